//! `turnpass sessions list|past|remove`: the kept conversations of `run --session`.

use jiff::Timestamp;
use turnpass_agent::SessionInfo;

use super::models::grouped;
use crate::context::{self, Context};
use crate::exit::{Exit, Fault};
use crate::settings::Values;
use crate::show::span;
use crate::terminal::visible;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Show them, the newest first
    List(List),
    /// Print what compactions took out of one, oldest first, one JSON object a line
    Past(Past),
    /// Remove one, with everything that was said in it
    Remove(Remove),
}

#[derive(clap::Args, Debug)]
struct List {
    /// Print one JSON object in place of text
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
struct Past {
    /// Its name
    name: String,
}

#[derive(clap::Args, Debug)]
struct Remove {
    /// Its name
    name: String,
}

impl Args {
    pub(crate) fn wants_json(&self) -> bool {
        matches!(&self.what, What::List(list) if list.json)
    }
}

/// Runs the command.
pub(crate) fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let store = context::sessions(&context.settings(Values::default())?)?;
    match args.what {
        What::List(list) => {
            let sessions = store.list()?;
            super::print(&match list.json {
                true => format!("{}\n", serde_json::json!({ "sessions": sessions })),
                false => text(&sessions, Timestamp::now().as_second()),
            })
        }
        What::Past(past) => {
            let mut text = String::new();
            for past in store.past(&past.name)? {
                text += &format!("{}\n", serde_json::json!(past));
            }
            super::print(&text)
        }
        What::Remove(remove) => match store.remove(&remove.name)? {
            true => Ok(Exit::Done),
            false => Err(Fault::usage(
                format!("there is no session {:?}", remove.name),
                "`turnpass sessions list` shows those that there are.",
            )),
        },
    }
}

fn text(sessions: &[SessionInfo], now: i64) -> String {
    if sessions.is_empty() {
        return "no session is kept; `turnpass run --session NAME` keeps one\n".to_owned();
    }
    let mut text = String::new();
    for session in sessions {
        let saved = i64::try_from(session.saved_unix_s).unwrap_or(i64::MAX);
        let ago = span(now.saturating_sub(saved));
        let size = grouped(session.bytes.div_ceil(1024));
        let told = match &session.model {
            Some(model) => {
                let compacted = match session.compactions {
                    0 => String::new(),
                    1 => ", compacted once".to_owned(),
                    times => format!(", compacted {times} times"),
                };
                format!(
                    "{} messages{compacted}, {}, {size} KiB",
                    session.messages,
                    visible(&model.0)
                )
            }
            None => format!("cannot be read, {size} KiB"),
        };
        let in_use = if session.in_use { ", in use" } else { "" };
        text += &format!(
            "{}\n    {told}, {ago} ago{in_use}\n",
            visible(&session.name)
        );
    }
    text
}
