//! docs/conformance: every file and every test that a row names is there, and what is done names a test.

use std::collections::BTreeSet;

use crate::text::{File, repository, root};

/// The columns of a row.
const COLUMNS: usize = 7;
/// The words of the last column.
const STATES: [&str; 4] = ["done", "partly", "later", "not ours"];
/// Where a statement was shown.
const SHOWN: [&str; 5] = ["real", "measured", "scripted", "pure", "-"];
/// Where the tests are that run on the real CLI.
const ON_THE_REAL_CLI: [&str; 8] = [
    "crates/turnpass-cli/tests/pool_real/",
    "crates/turnpass-cli/tests/relay_real/",
    "crates/turnpass-cli/tests/replay_real/",
    "crates/turnpass-cli/tests/services_real/",
    "crates/turnpass-cli/tests/tools_real.rs",
    "crates/turnpass-cli/tests/tools_real/",
    "crates/turnpass-lab/tests/real_cli.rs",
    "crates/turnpass-lab/tests/production_shape.rs",
];

/// One row.
struct Row {
    place: String,
    id: String,
    code: Vec<String>,
    tests: Vec<String>,
    shown: String,
    state: String,
}

/// The rows of a page: `| id | statement | code | tests | CLI | deviation and reason | state |`.
fn rows(page: &File) -> Vec<Result<Row, String>> {
    let lines = page.raw.lines().enumerate();
    lines
        .filter(|(_, line)| {
            line.starts_with("| ") && !line.starts_with("| id |") && !line.starts_with("| ---")
        })
        .map(|(index, line)| {
            let place = format!("{}:{}", page.path, index + 1);
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let [id, _, code, tests, shown, _, state] = cells[..] else {
                return Err(format!("{place}: {} columns, not {COLUMNS}", cells.len()));
            };
            Ok(Row {
                place,
                id: id.to_owned(),
                code: quoted(code),
                tests: quoted(tests),
                shown: shown.to_owned(),
                state: state.to_owned(),
            })
        })
        .collect()
}

/// What stands between back-quotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn wrong(row: &Row, files: &[File], tests: &Tests) -> Vec<String> {
    let mut found = Vec::new();
    let state = row.state.split(':').next().unwrap_or_default();
    if !STATES.contains(&state) {
        found.push(format!("{}: {} is no state", row.place, row.state));
    }
    if !SHOWN.contains(&row.shown.as_str()) {
        found.push(format!(
            "{}: {} is no place to show it",
            row.place, row.shown
        ));
    }
    for path in &row.code {
        let there = ["", "crates/", "crates/turnpass/src/"]
            .map(|base| format!("{base}{path}"))
            .iter()
            .any(|path| {
                let folder = format!("{}/", path.trim_end_matches('/'));
                files
                    .iter()
                    .any(|file| file.path == *path || file.path.starts_with(&folder))
            });
        if !there {
            found.push(format!("{}: there is no {path}", row.place));
        }
    }
    for test in &row.tests {
        let name = test.rsplit("::").next().unwrap_or_default();
        if !tests.all.contains(name) {
            found.push(format!("{}: there is no test {test}", row.place));
        }
    }
    let on_the_real_cli = |test: &String| {
        let name = test.rsplit("::").next().unwrap_or_default();
        tests.real.contains(name)
    };
    if row.shown == "real" && !row.tests.iter().any(on_the_real_cli) {
        found.push(format!("{}: no test of it runs on the real CLI", row.place));
    }
    if row.state == "done" && (row.code.is_empty() || row.tests.is_empty()) {
        found.push(format!(
            "{}: {} is done without code or test",
            row.place, row.id
        ));
    }
    found
}

/// Names of tests.
pub(crate) struct Tests {
    pub(crate) all: BTreeSet<String>,
    /// Of those that run on the real CLI.
    real: BTreeSet<String>,
}

/// Names of test functions, and of trials that a program of tests makes from texts.
pub(crate) fn test_names(files: &[File]) -> Tests {
    let mut tests = Tests {
        all: BTreeSet::new(),
        real: BTreeSet::new(),
    };
    for file in files.iter().filter(|file| file.is_rust()) {
        let mut names = BTreeSet::new();
        for (_, code) in file.lines(true) {
            let name = code.split("fn ").nth(1).map(|after| {
                after
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect()
            });
            names.extend(name.filter(|name: &String| !name.is_empty()));
        }
        if file.is_test() {
            names.extend(file.texts.iter().map(|(_, text)| text.clone()));
        }
        if ON_THE_REAL_CLI
            .iter()
            .any(|path| file.path.starts_with(path))
        {
            tests.real.extend(names.iter().cloned());
        }
        tests.all.extend(names);
    }
    tests
}

#[test]
fn every_row_names_what_is_there() {
    let files = repository();
    let tests = test_names(&files);
    let pages = files
        .iter()
        .filter(|file| file.path.starts_with("docs/conformance/"));
    let mut found = Vec::new();
    let mut ids = BTreeSet::new();
    let mut count = 0;
    for row in pages.flat_map(rows) {
        match row {
            Err(what) => found.push(what),
            Ok(row) => {
                count += 1;
                if !ids.insert(row.id.clone()) {
                    found.push(format!("{}: {} stands twice", row.place, row.id));
                }
                found.extend(wrong(&row, &files, &tests));
            }
        }
    }
    assert!(count > 200, "{count} rows only");
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn a_row_that_is_wrong_is_found() {
    let page = "| id | statement | code | tests | CLI | deviation and reason | state |\n\
        | --- | --- | --- | --- | --- | --- | --- |\n\
        | A-1 | x | `turn.rs` | `a_row_that_is_wrong_is_found` | pure | - | done |\n\
        | A-2 | x | `gone.rs` | `no_such_test` | pure | - | done |\n\
        | A-3 | x | - | - | - | - | done |\n\
        | A-6 | x | `turn.rs` | `a_row_that_is_wrong_is_found` | real | - | done |\n\
        | A-4 | x | - | - | everywhere | - | nearly |\n\
        | A-5 | x | - | - | - | done |\n";
    let page = File::new("docs/conformance/x.md", page);
    let files = repository();
    let tests = test_names(&files);
    let judged: Vec<usize> = rows(&page)
        .into_iter()
        .map(|row| match row {
            Ok(row) => wrong(&row, &files, &tests).len(),
            Err(_) => 1,
        })
        .collect();
    assert_eq!(judged, [0, 2, 1, 1, 2, 1]);
}

#[test]
fn the_index_names_every_page_and_counts_its_rows() {
    let index = std::fs::read_to_string(root().join("docs/conformance.md")).unwrap();
    for file in repository() {
        let Some(name) = file.path.strip_prefix("docs/conformance/") else {
            continue;
        };
        let rows: Vec<Row> = rows(&file).into_iter().flatten().collect();
        let is = |state: &str| {
            rows.iter()
                .filter(|row| row.state.starts_with(state))
                .count()
        };
        let [done, partly, later, not_ours] = STATES.map(is);
        let counts = format!(
            "(conformance/{name}) | {} | {done} | {partly} | {later} | {not_ours} |",
            rows.len()
        );
        assert!(
            index.contains(&counts),
            "docs/conformance.md does not have: {counts}"
        );
    }
}
