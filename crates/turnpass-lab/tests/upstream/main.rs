//! The scripted upstream, seen from outside: over TCP and over an HTTP client.

// The allowance of clippy.toml covers test functions only, and what supports them is test code as well.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod checks;
mod faults;
mod messages;
mod observe;
mod prompt_cache;
mod routes;
mod support;

/// The example of the documentation is a scenario that is read.
#[test]
fn the_documented_scenario_is_valid() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lab/upstream.md");
    let page = std::fs::read_to_string(path).unwrap();
    let example = page
        .split("```json")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let scenario = turnpass_lab::scenario::Scenario::from_json(example).unwrap();
    assert_eq!(scenario.replies.len(), 3);
}
