//! The offline laboratory: what turnpass is tested against when there is no account and no network.
//!
//! # Layout
//!
//! - [`cli`]: a stand-in for the `claude` program. It plays a script, or emulates the real one well
//!   enough to serve the transports, the demo and the benches.
//! - [`rig`]: runs the real `claude` hermetically: network isolation, made-up homes, process accounting.
//!
//! This crate depends on no other crate of the project, so that it can share no bug with them.

pub mod cli;
pub mod rig;
