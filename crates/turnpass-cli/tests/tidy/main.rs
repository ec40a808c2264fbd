//! What the compiler cannot hold: where things may stand, and that the pages say what is so.
//!
//! Each rule is a function of one file that returns what it finds, with a sample that it has to find and one that it has
//! to pass. ARCHITECTURE.md names the rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bugs;
mod conformance;
mod lists;
mod pages;
mod rules;
mod text;

use rules::RULES;
use text::{File, repository};

#[test]
fn the_tree_is_tidy() {
    let files = repository();
    let mut found = Vec::new();
    for rule in RULES {
        for file in &files {
            for (line, what) in (rule.find)(file) {
                found.push(format!("[{}] {}:{line}: {what}", rule.name, file.path));
            }
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_rule_can_fail_and_pass() {
    for rule in RULES {
        for (path, raw) in rule.bad {
            let found = (rule.find)(&File::new(path, raw));
            assert!(
                !found.is_empty(),
                "{} does not find {path}: {raw}",
                rule.name
            );
        }
        for (path, raw) in rule.good {
            let found = (rule.find)(&File::new(path, raw));
            assert!(found.is_empty(), "{} finds {path}: {found:?}", rule.name);
        }
    }
}

#[test]
fn what_is_excepted_exists() {
    let files = repository();
    for path in lists::named_files() {
        assert!(
            files.iter().any(|file| file.path == path),
            "{path} is named in the tidy lists and is not there: take it out"
        );
    }
    for (path, lines, _) in lists::LONG_FILES {
        let file = files.iter().find(|file| file.path == *path).unwrap();
        let has = rules::length_of(file).0;
        assert!(
            has > rules::length_of(file).1,
            "{path} is short enough now ({has} lines): take it out of the list"
        );
        assert!(
            has + 60 > *lines,
            "{path} has {has} lines: lower its bound of {lines}"
        );
    }
}

#[test]
fn the_architecture_page_names_every_rule() {
    let page = std::fs::read_to_string(text::root().join("ARCHITECTURE.md")).unwrap();
    for rule in RULES {
        let name = format!("`{}`", rule.name);
        assert!(page.contains(&name), "ARCHITECTURE.md does not name {name}");
    }
}
