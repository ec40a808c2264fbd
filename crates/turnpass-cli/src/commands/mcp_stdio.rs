//! `turnpass mcp-stdio`: the tool server that the CLI starts. Hidden; its arguments are the library's.

use std::path::PathBuf;

use turnpass::tools::{Policy, stdio};

use crate::exit::{Exit, Fault};

/// The arguments, as the library's `mcp_config_stdio` writes them.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The catalogue file
    #[arg(long, value_name = "FILE")]
    catalogue: PathBuf,
    /// What happens to a call: inert or proposing
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    policy: Policy,
    /// Made once the list has been written
    #[arg(long, value_name = "FILE")]
    ready: Option<PathBuf>,
    /// Made before a violation is answered
    #[arg(long, value_name = "FILE")]
    violation: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<Exit, Fault> {
    let Args {
        catalogue,
        policy,
        ready,
        violation,
    } = args;
    stdio::serve(&stdio::Args {
        catalogue,
        policy,
        ready,
        violation,
    })?;
    Ok(Exit::Done)
}

fn policy(word: &str) -> Result<Policy, String> {
    [Policy::Inert, Policy::Proposing]
        .into_iter()
        .find(|policy| policy.as_str() == word)
        .ok_or_else(|| "use inert or proposing".to_owned())
}
