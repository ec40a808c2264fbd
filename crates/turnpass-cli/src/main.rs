//! The `turnpass` program: one file a command in `commands`, with the same items in the same order.

mod args;
mod commands;
mod config_file;
mod context;
mod exit;
mod prices;
mod settings;
mod show;
mod stage;
mod terminal;
mod words;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::context::Context;
use crate::exit::{Exit, Fault};

fn main() -> ExitCode {
    // The scripted CLI is called with the arguments of the real one, which must not be taken for ours.
    if let Some(code) = turnpass_lab::cli::intercept() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return args::told(&error),
    };
    args::start_log(cli.verbose);
    let json = cli.command.wants_json();
    match start(cli.command) {
        Ok(code) => code,
        Err(fault) => args::failed(&fault, json),
    }
}

fn start(command: Command) -> Result<ExitCode, Fault> {
    let exit = match command {
        Command::Config(args) => commands::config::run(args)?,
        Command::Completions(args) => commands::completions::run(args)?,
        Command::Log(args) => commands::log::run(args)?,
        Command::Pool(args) => commands::pool::run(args)?,
        Command::Man(args) => commands::man::run(args)?,
        Command::McpStdio(args) => commands::mcp_stdio::run(args)?,
        Command::BenchTap(args) => commands::bench::tap::run(args)?,
        Command::Lab(args) if args.is_scripted_cli() => return Ok(args.scripted_cli()),
        command => in_runtime(command)?,
    };
    Ok(exit.into())
}

/// How long the program waits at its end for what is still under way: a killed process is reaped within some ten
/// milliseconds.
const END_LIMIT: std::time::Duration = std::time::Duration::from_millis(500);

/// Runs a command that waits for more than one thing at a time.
fn in_runtime(command: Command) -> Result<Exit, Fault> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Fault::system(format!("no runtime: {error}"), "Try again."))?;
    let exit = runtime.block_on(async { commands::run(command, &Context::new()?).await });
    // Tasks that end processes and remove their files get a moment; a thread that waits for a line of the terminal cannot
    // be interrupted and must not hold the end for longer.
    runtime.shutdown_timeout(END_LIMIT);
    exit
}
