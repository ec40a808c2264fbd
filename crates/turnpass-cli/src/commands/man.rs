//! `turnpass man [COMMAND]`: a manual page on standard output.

use clap::CommandFactory;

use crate::args::Cli;
use crate::exit::{Exit, Fault};

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The page of this command; of the program otherwise
    command: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<Exit, Fault> {
    let program = Cli::command();
    let page = match args.command {
        None => program,
        Some(name) => {
            let found = program.find_subcommand(&name).cloned();
            let found = found.ok_or_else(|| {
                Fault::usage(
                    format!("there is no command {name:?}"),
                    "`turnpass --help` lists them.",
                )
            })?;
            // clap wants a name that lives as long as the program; this is called once.
            let title: &'static str = format!("turnpass-{name}").leak();
            found.name(title).version(env!("CARGO_PKG_VERSION"))
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page)
        .render(&mut text)
        .map_err(|error| Fault::system(format!("no manual page: {error}"), "Try again."))?;
    super::print(&String::from_utf8_lossy(&text))
}
