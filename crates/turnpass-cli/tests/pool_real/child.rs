//! This program again, as a host of its own that is killed and started again: an agent that stores its history and state
//! after each end, and notes each tool before it runs it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::json;
use turnpass::Transport as _;
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::Event;
use turnpass::pool::PoolTransport;
use turnpass::request::BackendState;

use crate::bench::{self, Bench};
use crate::stage::Heard;
use crate::talk::Talk;

/// What a child is to play, as JSON; set only in children.
const PLAY: &str = "TURNPASS_POOL_REAL_PLAY";

/// Printed before each step, with its name.
pub(crate) const AT: &str = "AT ";

/// Printed when all turns are done.
pub(crate) const DONE: &str = "DONE";

/// A host with its surroundings; its files are in the test's own directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Play {
    pub(crate) cli: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) upstream: String,
    pub(crate) turns: usize,
}

/// What the host stores.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) messages: Vec<Message>,
    pub(crate) state: Option<BackendState>,
}

impl Play {
    pub(crate) fn new(bench: &Bench, turns: usize) -> Self {
        Self {
            cli: std::fs::canonicalize(&bench.cli.path).unwrap(),
            dir: bench.dir().to_owned(),
            upstream: bench.up.url(),
            turns,
        }
    }

    /// Starts the host; its standard output is a pipe.
    pub(crate) fn start(&self) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .env(PLAY, serde_json::to_string(self).unwrap())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// What it has stored.
    pub(crate) fn stored(&self) -> Stored {
        match std::fs::read(self.dir.join("stored")) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap(),
            Err(_) => Stored::default(),
        }
    }

    fn store(&self, talk: &Talk) {
        at("storing");
        let stored = json!({"messages": talk.messages, "state": talk.state});
        let new = self.dir.join("stored.new");
        std::fs::write(&new, stored.to_string()).unwrap();
        std::fs::rename(new, self.dir.join("stored")).unwrap();
        at("stored");
    }

    /// The calls that were run, by their numbers.
    pub(crate) fn ran(&self) -> Vec<String> {
        let noted = std::fs::read_to_string(self.dir.join("ran")).unwrap_or_default();
        noted.lines().map(str::to_owned).collect()
    }
}

fn at(step: &str) {
    println!("{AT}{step}");
}

/// Plays the host, if the environment names one.
pub(crate) fn play() -> Option<ExitCode> {
    let play: Play = serde_json::from_str(&std::env::var(PLAY).ok()?).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(work(&play));
    Some(ExitCode::SUCCESS)
}

/// What turn `number` asks for: two calls in one message, one more in the next, and a word.
fn asked(number: usize) -> Message {
    Message::user(format!(
        r#"turn {number} [[chunk 4 ms 2]] [[think why]] [[say so we go]] [[call read {{"path":"{number}a"}}]] [[call write {{"path":"{number}b"}}]] [[then [[call read {{"path":"{number}c"}}]] [[then [[chunk 4 ms 2]] [[say this was turn {number}]]]]]]"#
    ))
}

/// How many turns were begun.
pub(crate) fn turns(messages: &[Message]) -> usize {
    let begun = messages
        .iter()
        .filter(|each| each.text().starts_with("turn "));
    begun.count()
}

async fn work(play: &Play) {
    let pool = PoolTransport::new(bench::options(&play.cli, &play.dir, &play.upstream)).unwrap();
    let stored = play.stored();
    let mut talk = Talk::new("killed");
    talk.messages = stored.messages;
    talk.state = stored.state;
    loop {
        let turns = turns(&talk.messages);
        let last = talk.messages.last();
        let calls: Vec<_> = last
            .iter()
            .flat_map(|each| each.tool_calls())
            .cloned()
            .collect();
        let answered = last.is_none_or(|each| each.role == turnpass::conversation::Role::Assistant);
        if !calls.is_empty() {
            let results: Vec<_> = calls.iter().map(|call| run(play, call)).collect();
            talk.messages.push(Message::results(results));
            play.store(&talk);
        } else if answered && turns == play.turns {
            break;
        } else if answered {
            talk.messages.push(asked(turns));
            play.store(&talk);
        }
        let heard = generate(&pool, &talk).await;
        match &heard.error {
            Some(error) => assert!(error.is_retryable(), "{error}"),
            None => {
                talk.keep(&heard);
                play.store(&talk);
            }
        }
    }
    pool.shutdown().await.unwrap();
    println!("{DONE}");
}

/// Runs a tool, unless it was begun before: then nobody knows what became of it.
fn run(play: &Play, call: &turnpass::conversation::ToolCall) -> ToolResult {
    let input: serde_json::Value = serde_json::from_str(call.input.as_str()).unwrap();
    let number = input["path"].as_str().unwrap();
    if play.ran().iter().any(|ran| ran == number) {
        return ToolResult::error(call.id.clone(), "this call may have been executed");
    }
    at("running");
    note(&play.dir, number);
    at("ran");
    ToolResult::text(call.id.clone(), format!("result {number}"))
}

fn note(dir: &Path, number: &str) {
    let mut options = std::fs::OpenOptions::new();
    let mut file = options
        .create(true)
        .append(true)
        .open(dir.join("ran"))
        .unwrap();
    writeln!(file, "{number}").unwrap();
}

async fn generate(pool: &PoolTransport, talk: &Talk) -> Heard {
    at("asking");
    let mut generation = talk.generate(pool);
    let mut heard = Heard::default();
    while let Some(next) = generation.next().await {
        match next {
            Ok(Event::Done(done)) => {
                at("end");
                heard.done = Some(done);
            }
            Ok(event) => {
                at(match event {
                    Event::Started { .. } => "start",
                    Event::Text { .. } => "text",
                    Event::ToolInput { .. } => "input",
                    _ => "event",
                });
                heard.events.push(event);
            }
            Err(error) => heard.error = Some(error),
        }
    }
    heard
}
