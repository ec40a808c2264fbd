//! The scripted upstream, seen from outside: over TCP and over an HTTP client.

mod checks;
mod faults;
mod messages;
mod observe;
mod prompt_cache;
mod routes;
mod support;
