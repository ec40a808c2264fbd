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
