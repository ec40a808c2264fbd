//! docs/bugs.md: every test that it names is there.

use std::collections::BTreeSet;

use crate::conformance::test_names;
use crate::text::{repository, root};

#[test]
fn every_test_of_the_page_is_there() {
    let page = std::fs::read_to_string(root().join("docs/bugs.md")).unwrap();
    let tests = test_names(&repository()).all;
    let named: BTreeSet<&str> = page
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| word.contains("bug_") && !word.contains("NNN"))
        .collect();
    assert!(named.len() > 150, "{} tests only", named.len());
    let gone: Vec<_> = named
        .into_iter()
        .filter(|name| !tests.contains(*name))
        .collect();
    assert!(gone.is_empty(), "there is no test {gone:?}");
}
