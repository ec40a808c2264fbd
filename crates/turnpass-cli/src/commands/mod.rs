//! The commands. Each file has the same items in the same order: `Args`, `run`, its parts, its tests.

pub(crate) mod auth;
pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod lab;
pub(crate) mod log;
pub(crate) mod login;
pub(crate) mod man;
pub(crate) mod mcp_stdio;
pub(crate) mod models;
pub(crate) mod pool;
pub(crate) mod recording;
pub(crate) mod run;
pub(crate) mod sessions;
pub(crate) mod usage;

use std::io::Write;

use crate::args::Command;
use crate::context::Context;
use crate::exit::{Exit, Fault};

/// Runs one command.
pub(crate) async fn run(command: Command, context: &Context) -> Result<Exit, Fault> {
    match command {
        Command::Run(args) => run::run(args, context).await,
        Command::Demo(args) => demo::run(args, context).await,
        Command::Doctor(args) => doctor::run(args, context).await,
        Command::Login(args) => login::run(args, context).await,
        Command::Auth(args) => auth::run(args, context).await,
        Command::Usage(args) => usage::run(args, context).await,
        Command::Models(args) => models::run(args, context).await,
        Command::Lab(args) => lab::run(args, context).await,
        Command::Log(args) => log::run(args),
        Command::Pool(args) => pool::run(args),
        Command::Sessions(args) => sessions::run(args, context),
        // These need no runtime, and `mcp-stdio` is to start at once.
        Command::Config(args) => config::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => man::run(args),
        Command::McpStdio(args) => mcp_stdio::run(args),
        Command::BenchHost(args) => bench::memory::host(args).await,
        Command::BenchTap(args) => bench::tap::run(args),
    }
}

/// Writes to standard output. A reader that went away has what it wanted.
fn print(text: &str) -> Result<Exit, Fault> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Fault::system(
            format!("standard output cannot be written: {error}"),
            "Send it somewhere else.",
        )),
        _ => Ok(Exit::Done),
    }
}
