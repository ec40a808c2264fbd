//! `turnpass lab upstream|cli|bench|replay-recording|redact|compatibility`: the offline laboratory.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use turnpass_lab::scenario::Scenario;
use turnpass_lab::upstream::{Options, Upstream};

use super::{bench, compatibility, recording};
use crate::context::Context;
use crate::exit::{Exit, Fault};
use crate::show::LABORATORY;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Serve the scripted upstream on loopback until it is cancelled
    Upstream(UpstreamArgs),
    /// Be the scripted CLI: plays SCRIPT as if called as `claude ARGS`
    Cli(CliArgs),
    /// Measure the way from a request to the upstream and back, without the service
    Bench(bench::Args),
    /// Play a recording through the decoder and say what it came to
    ReplayRecording(recording::ReplayArgs),
    /// Make a recording fit to share, on standard output
    Redact(recording::RedactArgs),
    /// Make the page that compares versions of the CLI, on standard output
    Compatibility(compatibility::Args),
}

#[derive(clap::Args, Debug)]
struct UpstreamArgs {
    /// The port on 127.0.0.1; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
    /// What to answer, as JSON; otherwise the directives in each prompt say it
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Write every request and reply into this directory
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
}

#[derive(clap::Args, Debug)]
struct CliArgs {
    /// The script, as JSON
    script: PathBuf,
    /// The arguments of `claude`, passed on untouched
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

impl Args {
    pub(crate) fn wants_json(&self) -> bool {
        match &self.what {
            What::Bench(args) => args.json,
            What::ReplayRecording(args) => args.json,
            _ => false,
        }
    }

    /// Whether this is `lab cli`, which brings a runtime of its own and so has to run without ours.
    pub(crate) fn is_scripted_cli(&self) -> bool {
        matches!(self.what, What::Cli(_))
    }

    /// Plays the script of `lab cli`.
    pub(crate) fn scripted_cli(self) -> ExitCode {
        match self.what {
            What::Cli(args) => turnpass_lab::cli::main(&args.script, &args.args),
            _ => Exit::Usage.into(),
        }
    }
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    match args.what {
        What::Upstream(args) => upstream(args, context).await,
        What::Bench(args) => bench::run(args, context).await,
        What::ReplayRecording(args) => recording::replay(args),
        What::Redact(args) => recording::redact(&args),
        What::Compatibility(args) => compatibility::run(&args),
        What::Cli(_) => Err(Fault::usage(
            "the scripted CLI cannot run here",
            "Call it as `turnpass lab cli SCRIPT ARGS`.",
        )),
    }
}

async fn upstream(args: UpstreamArgs, context: &Context) -> Result<Exit, Fault> {
    let scenario = args.scenario.map(Scenario::from_file).transpose();
    let scenario = scenario.map_err(|error| {
        Fault::usage(
            format!("the scenario cannot be used: {error}"),
            "`docs/lab/upstream.md` says how one is written.",
        )
    })?;
    let upstream = Upstream::start(Options {
        addr: SocketAddr::from((Ipv4Addr::LOCALHOST, args.port)),
        scenario: scenario.unwrap_or_default(),
        record: args.record,
        ..Options::default()
    })
    .map_err(|error| Fault::system(error.to_string(), "Another port or directory may do."))?;
    let url = upstream.url();
    super::print(&format!("laboratory upstream: {url}\n"))?;
    context.cancel().cancelled().await;
    let (messages, all) = (upstream.messages().len(), upstream.requests().len());
    super::print(&format!(
        "{LABORATORY}; {messages} messages in {all} requests were answered\n"
    ))
}
