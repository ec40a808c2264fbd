//! The one-admission relay (`seeds/relay.md`).
#![allow(dead_code)]
mod admission;
mod classify;
mod lane;
mod reading;
mod upstream;

pub use upstream::LoopbackUrl;
