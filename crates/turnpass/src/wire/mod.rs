//! What travels over the wire, as functions over buffers.
//!
//! Nothing here reads, writes, waits or spawns: bytes come in, typed values that mostly borrow from those bytes come out,
//! and the other way round. Every buffer has a named limit, and going over it is a typed error, never a silent loss.
//!
//! | module | what |
//! |---|---|
//! | [`lines`] | stdout of the CLI, split at 0x0A |
//! | [`surrogates`] | JSON text that serde would refuse: lone surrogate halves and broken UTF-8 |
//! | [`sse`] | server-sent events, in and out |
//! | [`messages`] | events, blocks and errors of the Messages API |
//! | [`usage`] | token counters, merged so that nothing is counted twice |
//! | [`rate_limit`] | unified rate-limit headers and the CLI's `rate_limit_event` |
//! | [`splice`] | the CLI's request body: looked into, and given the host's `messages` |
//! | [`stream_json`] | records that the CLI prints |
//! | [`control`] | lines that we write to the CLI |
//!
//! Wire shapes were read off Claude CLI 2.1.332, 2.1.287 and 2.1.283 unless a comment names another version.

pub mod control;
mod lenient;
pub mod lines;
pub mod messages;
pub mod rate_limit;
pub mod splice;
pub mod sse;
pub mod stream_json;
pub mod surrogates;
pub mod text;
pub mod usage;
