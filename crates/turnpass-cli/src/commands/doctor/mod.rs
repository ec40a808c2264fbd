//! `turnpass doctor`: what is installed and whether it works. It costs nothing: no question reaches the service.

mod certify;
mod examine;
mod report;
mod tool_server;

use std::path::PathBuf;

use turnpass::certify::Check as Certified;

use crate::context::Context;
use crate::exit::{Exit, Fault};
use crate::settings::Values;

use report::{Destination, Report};

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Try each behaviour that a transport relies on, in the laboratory and at no cost, and keep what was found
    #[arg(long)]
    certify: bool,
    /// With --certify: only this check, as often as given; nothing is kept then
    #[arg(long, value_name = "NAME", requires = "certify")]
    check: Vec<Certified>,
    /// Write what was found to a new file that can be shown to anybody: no path, no account, no address
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// With --report: replace a file that is there
    #[arg(long, requires = "report")]
    force: bool,
    #[command(flatten)]
    values: Values,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(args.values.clone())?;
    let destination = match &args.report {
        Some(path) => Some(Destination::new(path, args.force)?),
        None => None,
    };
    if args.certify {
        return certify::run(&args, destination, &settings, context).await;
    }
    let mut report = Report {
        json: args.json,
        style: context.output_style(),
        checks: Vec::new(),
        certificate: None,
        destination,
    };
    tokio::select! {
        biased;
        () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
        done = examine::all(&settings, &mut report) => done?,
    }
    report.end()
}
