//! The command line, and what is said when it is wrong.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{
    auth, bench, completions, config, demo, doctor, lab, log, login, man, mcp_stdio, models, pool,
    run, sessions, usage,
};
use crate::exit::{Exit, Fault};

/// Uses the claude program that you installed and signed in to as a model provider on your own machine.
#[derive(Debug, Parser)]
#[command(
    name = "turnpass",
    version,
    propagate_version = true,
    max_term_width = 100
)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 CLI missing, 4 CLI too old, 5 signed out, \
                        6 usage limit, 7 refused, 130 cancelled."
)]
pub(crate) struct Cli {
    /// Log to standard error what happens; twice for more. Never a prompt or an answer.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands; each has its file.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Give the agent a task in a directory
    Run(run::Args),
    /// See the agent work on a small task, without an account and without a network
    Demo(demo::Args),
    /// Check the installed CLI, at no cost
    Doctor(doctor::Args),
    /// Sign in with the CLI's own login
    Login(login::Args),
    /// Whether the CLI is signed in
    Auth(auth::Args),
    /// How much of the plan is used, and whether credits are on; it costs nothing
    Usage(usage::Args),
    /// The models that the CLI offers
    Models(models::Args),
    /// How past generations went
    Log(log::Args),
    /// The live processes of running programs
    Pool(pool::Args),
    /// The kept conversations of `run --session`
    Sessions(sessions::Args),
    /// The offline laboratory
    Lab(lab::Args),
    /// Where the configuration is, and what it says
    Config(config::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
    /// Print a manual page
    Man(man::Args),
    /// The tool server that the CLI starts
    #[command(hide = true)]
    McpStdio(mcp_stdio::Args),
    /// A provider and nothing else, for `lab bench`
    #[command(hide = true)]
    BenchHost(bench::memory::Args),
    /// A tap before the CLI, for `lab bench`
    #[command(hide = true)]
    BenchTap(bench::tap::Args),
}

impl Command {
    /// Whether standard output is for a program, so that a failure is told there too.
    pub(crate) fn wants_json(&self) -> bool {
        match self {
            Self::Run(args) => args.json,
            Self::Demo(args) => args.json,
            Self::Doctor(args) => args.json,
            Self::Auth(args) => args.wants_json(),
            Self::Usage(args) => args.json,
            Self::Models(args) => args.json,
            Self::Log(args) => args.json,
            Self::Pool(args) => args.wants_json(),
            Self::Sessions(args) => args.wants_json(),
            Self::Lab(args) => args.wants_json(),
            _ => false,
        }
    }
}

/// Prints help, the version, or what is wrong with the command line.
pub(crate) fn told(error: &clap::Error) -> ExitCode {
    // Nothing can be said about a stream that cannot be written.
    let _ = error.print();
    if let Some(hint) = hint(error) {
        let _ = writeln!(std::io::stderr(), "\n{hint}");
    }
    match error.use_stderr() {
        true => Exit::Usage.into(),
        false => Exit::Done.into(),
    }
}

/// What a person meant who wrote a task as the shell's words, or none.
fn hint(error: &clap::Error) -> Option<String> {
    use clap::error::{ContextKind, ErrorKind};
    let text = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    let example = "turnpass run 'fix the failing test'";
    let is_run = text(ContextKind::Usage).contains("turnpass run");
    match error.kind() {
        ErrorKind::MissingRequiredArgument
            if text(ContextKind::InvalidArg).contains("<PROMPT>") =>
        {
            Some(format!("Say what is to be done: {example}"))
        }
        // With a dash it is an option that does not exist, and clap names the nearest one.
        ErrorKind::UnknownArgument if is_run && !text(ContextKind::InvalidArg).starts_with('-') => {
            Some(format!(
                "A task of several words stands in quotes: {example}"
            ))
        }
        ErrorKind::InvalidSubcommand if error.get(ContextKind::SuggestedSubcommand).is_none() => {
            Some(format!("A task is given to the agent by: {example}"))
        }
        _ => None,
    }
}

/// Prints why a command could not do what was asked.
pub(crate) fn failed(fault: &Fault, json: bool) -> ExitCode {
    let text = crate::terminal::visible(&fault.to_string());
    let _ = writeln!(std::io::stderr(), "{text}");
    if json {
        let line = serde_json::json!({
            "type": "error",
            "code": fault.code(),
            "message": fault.to_string(),
            "exit": fault.exit() as u8,
        });
        let _ = writeln!(std::io::stdout(), "{line}");
    }
    fault.exit().into()
}

/// Log lines go to standard error, and only if asked for.
pub(crate) fn start_log(verbose: u8) {
    let level = match verbose {
        0 => return,
        1 => "info",
        _ => "debug",
    };
    // Only this project's own lines: those of libraries may hold headers.
    let filter = format!("turnpass={level},turnpass_agent={level}");
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_task_that_is_not_quoted_is_told_how_to_be() {
        let hint = |words: &[&str]| {
            let words = ["turnpass"].iter().chain(words);
            hint(&Cli::try_parse_from(words).unwrap_err())
        };
        for (words, wanted) in [
            (&["run"][..], Some("Say what is to be done")),
            (&["run", "fix", "the", "bug"], Some("in quotes")),
            (&["fix", "the", "bug"], Some("given to the agent")),
            (&["run", "--modle", "x", "y"], None),
            (&["log", "x"], None),
            (&["--help"], None),
        ] {
            let hint = hint(words);
            let fits = hint
                .as_deref()
                .map(|hint| wanted.is_some_and(|part| hint.contains(part)));
            assert_eq!(fits, wanted.map(|_| true), "{words:?}: {hint:?}");
        }
    }

    #[test]
    fn every_key_has_a_flag_that_names_its_variable() {
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        for (key, variable) in crate::settings::KEYS {
            let flag = run.get_arguments().find(|arg| arg.get_id() == key);
            let help = flag.and_then(|arg| arg.get_help()).map(ToString::to_string);
            let help = help.unwrap_or_default();
            assert!(
                help.contains(&format!("[env: {variable}]")),
                "{key}: {help}"
            );
        }
    }
}
