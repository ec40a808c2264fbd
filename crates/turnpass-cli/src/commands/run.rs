//! `turnpass run PROMPT`: the agent at work in a directory.

use std::io::Read;
use std::path::PathBuf;
use std::time::SystemTime;

use turnpass::Provider;
use turnpass::request::TransportKind;
use turnpass_agent::{Agent, Approvals, Directory, KeptSession, Outcome, tools};

use crate::context::{self, Context};
use crate::exit::{Exit, Fault, exit_of_outcome};
use crate::settings::{Settings, ToolWord, Values};
use crate::show::{Form, LABORATORY, Show, error_text};
use crate::terminal::AskOnTerminal;

/// Largest prompt from standard input, in bytes: what a request of the relay may hold.
const PROMPT_BYTES: u64 = 8 * 1024 * 1024;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The directory to work in; leaving it needs your consent
    #[arg(
        short = 'C',
        long = "directory",
        value_name = "DIR",
        default_value = "."
    )]
    directory: PathBuf,
    /// Print one JSON object a line in place of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Offer the CLI's own login when its session has expired, and go on afterwards
    #[arg(long)]
    login: bool,
    /// Go on with the conversation of this name, and keep it; a new name begins one
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    #[command(flatten)]
    values: Values,
    /// What is to be done; `-` reads it from standard input
    prompt: String,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(args.values)?;
    let prompt = prompt(args.prompt)?;
    // Before anything is set up: the commonest mistake gets its own answer.
    Directory::open(&args.directory)?;
    let kept = match &args.session {
        Some(name) => Some(kept(&settings, name)?),
        None => None,
    };
    let mut provider = context::build_provider(&settings)?;
    if args.login {
        provider = provider.with_login(super::login::of_person(&settings, context)?);
    }
    let goes_on = kept.as_ref().and_then(gone_on_with);
    let agent = agent(&settings, &provider, args.directory, kept, context)?;
    let form = if args.json {
        Form::JsonLines
    } else {
        Form::Text
    };
    let mut show = Show::on_streams(form, context, context.cancel().clone());
    if settings.lab_upstream.is_some() {
        show.note(LABORATORY);
    }
    if let Some(told) = goes_on {
        show.note(&told);
    }
    let exit = work(agent, &prompt, context, &mut show).await;
    if let Err(error) = provider.shutdown().await {
        show.note(&error.to_string());
    }
    Ok(exit)
}

async fn work(
    mut agent: Agent,
    prompt: &str,
    context: &Context,
    show: &mut Show<std::io::Stdout, std::io::Stderr>,
) -> Exit {
    let report = agent
        .run(prompt, context.cancel(), |event| show.event(&event))
        .await;
    if let Outcome::Failed { error } = &report.outcome {
        show.note(&error_text(error, SystemTime::now()));
    }
    if let Some(next) = unfinished(&report.outcome) {
        show.note(next);
    }
    match show.is_broken() {
        true => Exit::Failed,
        false => exit_of_outcome(&report.outcome),
    }
}

/// What to do about a run that ended before its task did.
fn unfinished(outcome: &Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::RoundLimit { .. } => Some(
            "The limit of rounds is reached and the task may be unfinished. `--max-rounds` allows more.",
        ),
        Outcome::MaxTokens => {
            Some("The answer reached the limit of output tokens and is cut. Ask for less at once.")
        }
        Outcome::Refused { .. } => {
            Some("The service refused to answer. Say it otherwise, or use another model.")
        }
        _ => None,
    }
}

fn agent(
    settings: &Settings,
    provider: &Provider,
    directory: PathBuf,
    kept: Option<KeptSession>,
    context: &Context,
) -> Result<Agent, Fault> {
    // A kept conversation stays with its model, unless the person names one.
    let of_session = kept.as_ref().and_then(KeptSession::model);
    let model = match (settings.named_model(), of_session) {
        (None, Some(model)) => model.clone(),
        _ => settings.model.as_str().into(),
    };
    let agent = Agent::builder(provider.clone(), model)
        .tools(tools::all())
        .approvals(approvals(settings, context))
        .directory(directory)
        .rounds(settings.max_rounds)
        .limits(settings.limits)
        .compaction(settings.compaction)
        .effort(settings.effort);
    let agent = match kept {
        Some(kept) => agent.kept(kept),
        None => agent,
    };
    Ok(agent.build()?)
}

fn kept(settings: &Settings, name: &str) -> Result<KeptSession, Fault> {
    let kept = context::sessions(settings)?.open(name)?;
    Ok(match settings.transport {
        TransportKind::Pool => kept,
        TransportKind::Relay | TransportKind::Replay => kept.without_state(),
    })
}

/// What a person is told who goes on with a conversation.
fn gone_on_with(kept: &KeptSession) -> Option<String> {
    let messages = kept.messages().len();
    (messages > 0).then(|| {
        let name = kept.name();
        let compacted = match kept.compactions().len() {
            0 => String::new(),
            1 => ", compacted once".to_owned(),
            times => format!(", compacted {times} times"),
        };
        format!("going on with the session {name:?}: {messages} messages so far{compacted}")
    })
}

fn approvals(settings: &Settings, context: &Context) -> Approvals {
    let words = |words: &[ToolWord]| words.iter().map(|word| word.0.clone()).collect::<Vec<_>>();
    let rules = match AskOnTerminal::is_possible() {
        true => Approvals::ask(AskOnTerminal::new(context.style())),
        false => Approvals::read_only(),
    };
    rules
        .allow(words(&settings.allow))
        .deny(words(&settings.deny))
}

fn prompt(argument: String) -> Result<String, Fault> {
    let text = match argument.as_str() {
        "-" => from_standard_input()?,
        _ => argument,
    };
    if text.trim().is_empty() {
        return Err(Fault::usage(
            "the prompt is empty",
            "Say what is to be done, or give `-` and write it to standard input.",
        ));
    }
    Ok(text)
}

fn from_standard_input() -> Result<String, Fault> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .take(PROMPT_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| {
            Fault::system(
                format!("standard input cannot be read: {error}"),
                "Give the prompt as an argument.",
            )
        })?;
    if bytes.len() as u64 > PROMPT_BYTES {
        return Err(Fault::usage(
            format!("the prompt is larger than {PROMPT_BYTES} bytes"),
            "Put it into a file in the directory and name the file.",
        ));
    }
    String::from_utf8(bytes)
        .map_err(|_| Fault::usage("the prompt is not UTF-8", "Convert it and try again."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_of_nothing_is_refused() {
        for text in ["", " \n\t"] {
            assert_eq!(prompt(text.to_owned()).unwrap_err().exit(), Exit::Usage);
        }
        assert_eq!(prompt("x".to_owned()).unwrap(), "x");
    }
}
