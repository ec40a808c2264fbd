//! The offline laboratory of turnpass: everything that a host needs to be tried without an account and without a network.
//!
//! ```
//! use std::io::{Read as _, Write as _};
//! use turnpass_lab::upstream::{Options, Upstream};
//!
//! let upstream = Upstream::start(Options::default())?;
//! let body = r#"{"model":"claude-sonnet-5-5","max_tokens":64,
//!     "messages":[{"role":"user","content":"[[say Good morning]] [[stop end_turn]]"}]}"#;
//! let mut client = std::net::TcpStream::connect(upstream.addr())?;
//! write!(
//!     client,
//!     "POST /v1/messages HTTP/1.1\r\nhost: lab\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
//!     body.len(),
//! )?;
//! let mut reply = String::new();
//! client.read_to_string(&mut reply)?;
//! assert!(reply.starts_with("HTTP/1.1 200 OK"));
//! assert!(reply.contains(r#""content":[{"type":"text","text":"Good morning"}]"#));
//! assert_eq!(upstream.messages().len(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Layout
//!
//! | module | what |
//! |---|---|
//! | [`upstream`] | the scripted upstream: a Messages API on loopback, with the real one's refusals and prompt cache |
//! | [`scenario`] | scenario files: what it answers, as JSON |
//! | [`directive`] | instructions to it inside an ordinary prompt |
//! | [`cli`] | a stand-in for the `claude` program: plays a script, or emulates the real one |
//! | [`rig`] | runs the real `claude` hermetically: isolation, made-up homes, process accounting |
//!
//! This crate depends on no other crate of the project, so that it can share no bug with what it tests.

pub mod cli;
pub mod directive;
pub mod rig;
pub mod scenario;
pub mod upstream;
