//! The installed `claude` command-line program as a model provider.

pub mod wire;
