//! The installed `claude` command-line program, signed in by the person who owns it, as a model provider for that
//! person's own programs.
//!
//! # Layout
//!
//! | module | what |
//! | --- | --- |
//! | [`provider`], [`request`], [`event`], [`error`] | the boundary that hosts use |
//! | [`turn`] | the decoder: one streamed message in, events out: pure |
//! | [`pool`] | the pool transport: live processes, one conversation each |
//! | [`relay`] | the one-admission relay transport |
//! | [`replay`] | the replay transport: the whole conversation into a fresh process |
//! | [`wire`] | lines, SSE, stream-json, control, Messages and the body splice: functions over buffers |
//! | [`cli`] | the installed CLI: where, whether it fits, signed in, how it is started |
//! | `loopback` | a port of our own on loopback, and who may speak to it |
//! | [`limits`] | paid credits, usage windows, limits of a turn, budgets |
//! | [`login`] | signing in again through the CLI's own login, when a host asks for it |
//! | [`models`] | names, ceilings, effort levels, catalogue |
//! | [`process`] | one type that owns a process group, its pipes and its end |
//! | [`conversation`] | messages, blocks, normaliser, digests, the bytes of `messages`: pure |
//! | [`tools`] | the host's tools: catalogue, the MCP server core and its carriers |
//! | [`record`] | what is written down: one record of each generation; the CLI's own output when asked for |
//! | [`secret`] | values that are never printed |

pub mod cli;
pub mod conversation;
pub mod error;
pub mod event;
pub mod limits;
pub mod login;
mod loopback;
pub mod models;
pub mod pool;
pub mod process;
pub mod provider;
pub mod record;
pub mod relay;
pub mod replay;
pub mod request;
pub mod secret;
pub mod tools;
pub mod turn;
pub mod wire;

pub use error::{Error, ErrorCode, Result};
pub use event::{Done, Event};
pub use provider::{Generation, Provider, Transport};
pub use request::Request;
