//! The host's tools: how they are published, and the MCP server that publishes them.
//!
//! | module | what |
//! | --- | --- |
//! | [`catalogue`] | the tools of one request: names, order, schemas, limits, and the forms that the carriers need |
//! | [`schema`] | the root rule for input schemas |
//! | [`check`] | whether the CLI has exactly our tools |
//! | [`mcp`] | the server core: JSON-RPC bytes in, bytes and an occurrence out |
//! | [`pairing`] | which call of the CLI gets which result of the host |
//! | [`result`] | a tool result of the host as MCP content |
//! | [`in_band`] | carrier over the CLI's own stdin and stdout |
//! | [`http`] | carrier over a port on loopback, behind a bearer |
//! | [`stdio`] | carrier as a process of its own: the hidden subcommand `turnpass mcp-stdio` |
//!
//! Everything but the loop in [`stdio`] and the port of [`http`] is pure.
//!
//! # Why our own server core
//!
//! The three carriers (loopback HTTP, stdio, in-band) have one thing in common, a JSON-RPC message, and nothing else:
//! in-band there is no byte stream of MCP at all, only messages wrapped in the CLI's control requests. A library's server
//! wants a transport of its own kind and a runtime to drive it; one pure function serves all three, can be fuzzed, and
//! is small because a catalogue that never changes needs five methods.

pub mod catalogue;
pub mod check;
pub mod http;
pub mod in_band;
pub mod mcp;
pub mod pairing;
pub mod result;
pub mod schema;
pub mod stdio;

pub use catalogue::{Catalogue, CatalogueLimits};
pub use check::{KNOWN_HARMLESS_EXTRAS, Verdict, check_tools};
pub use mcp::{Call, Occurrence, Policy, Reply, Server, TOOL_USE_ID};
pub use pairing::Pairing;

#[cfg(test)]
mod contract;
