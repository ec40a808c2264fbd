//! One live CLI process that holds one conversation. A value: dropping it ends the process and everything it owns.
//!
//! It speaks with the CLI and knows nothing of hosts: it sets the process up, delivers messages, answers calls, waits for
//! what is said, and takes a turn back. What is to be done is decided elsewhere.

mod controls;
mod tools;
mod turns;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use tokio::task::JoinHandle;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use uuid::Uuid;

use super::answer::Answer;
use super::carrier::{Address, Carrier};
use super::hearing::{Heard, Hearing};
use super::launcher::Shape;
use super::lines::{self, Lines};
use super::lock::SessionLock;
use super::options::Reseed;
use super::status::Shown;
use super::sync::{self, Record};
use super::ways::Ways;
use crate::cli::isolation::{Expected, InitVerdict};
use crate::cli::launch::{MCP_SERVER, refused_option};
use crate::cli::places::Place;
use crate::cli::private_dir::PrivateDir;
use crate::cli::starts::Turn as StartTurn;
use crate::conversation::{ToolResult, ToolUseId, names};
use crate::error::{Error, ErrorCode, Result};
use crate::event::PlanKind;
use crate::limits::budget::Moment;
use crate::process::{ChildGroup, EndPolicy, Exit};
use crate::record::RawFile;
use crate::relay::fit::Fit;
use crate::request::{Effort, ModelId};
use crate::tools::pairing::{self, Arrived, CliAnswered, Given, Pairing};
use crate::tools::{Catalogue, Occurrence, check_tools, http, in_band};
use crate::wire::control::{
    self, ControlRequest, MAX_PENDING, McpStatusReply, RequestIds, RewindReply,
};
use crate::wire::stream_json::Verdict;

/// Longest wait for the answer to a control request (SPEC 3).
pub(crate) const CONTROL_TIMEOUT: Duration = Duration::from_secs(30);
/// The size of a conversation, in tokens, from which on the CLI sends no request (`CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE`):
/// none that there is, and every one.
const GATE_OPEN: &str = "50000000";
const GATE_CLOSED: &str = "1";
/// Longest wait until an interrupted turn has ended; 10 to 20 ms were measured (2.1.332).
const INTERRUPT_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the last words of a process that has ended.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(200);
/// Longest wait until the CLI has fetched the tools from a listener. Its own limit for a server is 30 s (2.1.332).
const TOOLS_LIMIT: Duration = Duration::from_secs(30);
/// Between two looks at a tool server that is not connected yet.
const TOOLS_PAUSE: Duration = Duration::from_millis(10);
/// Longest wait until the CLI has ended a turn with results of tools; 10 to 18 ms were measured (2.1.294 to 2.1.332).
const TURN_END_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for the acknowledgement of one frame; 10 ms were measured (2.1.332).
const FRAME_LIMIT: Duration = Duration::from_secs(30);

/// Where the turn of the CLI stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No turn runs.
    Idle,
    /// A turn runs, or is parked in calls.
    Running,
}

/// One live process.
pub(crate) struct Session {
    group: ChildGroup,
    lines: Lines,
    hearing: Hearing,
    ids: RequestIds,
    /// Control requests without an answer, and answers that nobody took yet.
    asked: BTreeMap<String, Option<Result<Box<RawValue>, String>>>,
    carrier: Carrier,
    /// As its program was certified when it was started.
    pub(crate) ways: Ways,
    pairing: Pairing<Address>,
    phase: Phase,
    /// The line that asked last.
    line: Option<String>,
    /// The newest line: that one, or one that followed results of tools in its turn.
    last_line: Option<String>,
    /// The entry of the record that it is.
    pub(crate) turn_at: usize,
    slipped: Option<Vec<String>>,
    gate: &'static str,
    /// The request that closed it, until the CLI has taken it.
    closing: Option<String>,
    /// Turns that were ended with results of tools and whose end the CLI has not told yet.
    ended_turns: u32,
    isolated: bool,
    /// The session that it was to go on with.
    pub(crate) resumes: Option<String>,
    /// It began another one (bug 85).
    is_lost: bool,
    cli_session: String,
    model: String,
    pub(crate) fit: Option<Fit>,
    pub(crate) settings: Option<sync::Settings>,
    /// What the CLI's conversation holds.
    pub(crate) record: Record,
    pub(crate) shape: Shape,
    /// Of the CLI's session, while this process may write into it.
    pub(crate) lock: Option<SessionLock>,
    pub(crate) starting: Option<StartTurn>,
    pub(crate) generations: u32,
    /// Started with its model, which goes on with a stored conversation.
    pub(crate) has_model: bool,
    started_unix_s: i64,
    pub(crate) place: Place,
    _reading: AbortOnDropHandle<()>,
    removed: JoinHandle<()>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("pid", &self.group.pid())
            .field("phase", &self.phase)
            .field("generations", &self.generations)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Takes over a started process. Its end is among `tasks` from here on.
    pub(crate) fn new(
        (mut group, raw): (ChildGroup, Option<RawFile>),
        (carrier, ways): (Carrier, Ways),
        dir: PrivateDir,
        place: Place,
        shape: Shape,
        tasks: &TaskTracker,
    ) -> Result<Self> {
        let gone = group.gone();
        let removed = tasks.spawn(async move {
            // A process that still runs could make files anew.
            gone.await;
            drop(dir);
        });
        let stdout = group
            .take_stdout()
            .ok_or_else(|| Error::new(ErrorCode::Internal, "a new process has no output"))?;
        let (queue, lines) = lines::queue();
        let reading = tokio::spawn(queue.fill(stdout, raw));
        Ok(Self {
            group,
            lines,
            hearing: Hearing::new(Expected::default()),
            ids: RequestIds::new("turnpass"),
            asked: BTreeMap::new(),
            carrier,
            ways,
            pairing: Pairing::default(),
            phase: Phase::Idle,
            line: None,
            last_line: None,
            turn_at: 0,
            slipped: None,
            gate: "",
            closing: None,
            ended_turns: 0,
            isolated: false,
            resumes: None,
            is_lost: false,
            cli_session: String::new(),
            model: String::new(),
            fit: None,
            settings: None,
            record: Record::default(),
            shape,
            lock: None,
            starting: None,
            generations: 0,
            has_model: false,
            started_unix_s: Moment::now().unix_s,
            place,
            _reading: AbortOnDropHandle::new(reading),
            removed,
        })
    }

    /// The CLI's session; empty before the first turn.
    pub(crate) fn cli_session(&self) -> &str {
        &self.cli_session
    }

    /// The resolved id of the model; empty before the first turn.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Ends when the process is gone, by itself or by us.
    pub(crate) fn death(&self) -> impl Future<Output = ()> + Send + use<> {
        self.group.gone()
    }

    /// Kills the process at once, so that it asks nothing more; it is to be ended all the same.
    pub(crate) fn kill(&self) {
        self.group.kill();
    }

    /// Whether it began another conversation than the one that it was to go on with.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether more than the line that asked stands in the turn: an answer with calls, and their results.
    pub(crate) fn is_in_the_middle_of_a_turn(&self) -> bool {
        self.record.len() > self.turn_at + 1
    }

    /// Whether the process still runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.group.exit().is_none()
    }

    /// Sets a process up that was told nothing yet, or changes one that was. Nothing is waited for: the CLI takes lines in
    /// order (2.1.332).
    pub(crate) fn set(&mut self, wanted: &Fit, catalogue: &Catalogue) -> Result<()> {
        let mut burst = Vec::new();
        if self.fit.is_none() {
            let tools = (!catalogue.is_empty()).then_some(catalogue);
            self.hearing.expect(expected_of(tools));
            let announced = self.carrier.announced(tools, self.shape.policy());
            let id = self.next_control()?;
            burst.extend_from_slice(in_band::initialize(&id, &wanted.system, announced).as_bytes());
        }
        // Before the first line only: later it would leave command text in the conversation (2.1.294 to 2.1.332).
        let sets_model = match &self.fit {
            None => !self.has_model,
            Some(has) => has.model != wanted.model && !self.record.is_touched(),
        };
        if let Some(settings) = settings_of(wanted, self.fit.as_ref(), sets_model, self.gate) {
            let settings = to_raw_value(&settings)
                .map_err(|_| Error::new(ErrorCode::Internal, "settings are not JSON"))?;
            let request = ControlRequest::ApplyFlagSettings {
                settings: &settings,
            };
            let id = self.next_control()?;
            burst.extend_from_slice(control::control_request(&id, &request).as_bytes());
        }
        if !burst.is_empty() {
            self.group.stdin().write(burst)?;
        }
        self.fit = Some(wanted.clone());
        Ok(())
    }

    /// The next thing that the CLI says which anybody has to know; calls of tools and answers to control requests are
    /// dealt with here.
    ///
    /// # Errors
    ///
    /// What the process ended with, or what cannot be understood of it; it is of no use after that.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self, mut answer: Option<&mut Answer>) -> Result<Heard> {
        loop {
            let line = tokio::select! {
                line = self.lines.next() => line,
                occurrence = self.carrier.next() => {
                    self.occurred(occurrence)?;
                    return Ok(Heard::Noted);
                }
            };
            let line = match line {
                Some(line) => line?,
                None => return Err(self.gone().await),
            };
            // It has started. Whoever is told nothing for long, such as a spare, is in nobody's way.
            self.starting = None;
            let Some(heard) = self.hearing.line(&line, answer.as_deref_mut()) else {
                continue;
            };
            match heard {
                Heard::Control { id, outcome } => {
                    self.controlled(&id, outcome);
                    return Ok(Heard::Noted);
                }
                Heard::Mcp(record) => self.called(&record)?,
                Heard::Unsupported { id } => {
                    let line = control::control_error(&id, "unsupported");
                    self.group.stdin().write(line.into_bytes())?;
                }
                Heard::Results(calls) => {
                    for call in &calls {
                        if let CliAnswered::Instead(answer) = self.pairing.cli_answered(call) {
                            self.write_answer(&answer, false)?;
                        }
                    }
                    return Ok(Heard::Results(calls));
                }
                Heard::Init {
                    verdict,
                    session,
                    model,
                } => {
                    self.is_lost = self.resumes.as_ref().is_some_and(|of| *of != session);
                    self.cli_session.clone_from(&session);
                    self.model.clone_from(&model);
                    self.isolated = matches!(verdict, InitVerdict::Isolated);
                    return Ok(Heard::Init {
                        verdict,
                        session,
                        model,
                    });
                }
                Heard::Result(verdict) if self.ended_turns > 0 => {
                    // The turn that ended with results; the one that was asked for is still to come.
                    self.ended_turns -= 1;
                    if verdict != Verdict::Completed {
                        let what = "the CLI did not end its turn with the results of tools";
                        return Err(Error::new(ErrorCode::ProtocolResult, what));
                    }
                    return Ok(Heard::Noted);
                }
                Heard::Result(verdict) => {
                    if verdict != Verdict::Acknowledged {
                        self.turn_is_over();
                    }
                    return Ok(Heard::Result(verdict));
                }
                Heard::Broken(error) => return Err(error),
                other => return Ok(other),
            }
        }
    }

    /// Built-in plugins that slipped through, which were noticed while the history was told.
    pub(crate) fn slipped_through(&mut self) -> Option<Vec<String>> {
        self.slipped.take()
    }

    /// Whether requests for this model are for the one that the process serves: the same name, or its resolved id.
    pub(crate) fn serves(&self, model: &ModelId) -> bool {
        let own = self.settings.as_ref().map(|settings| &settings.model);
        own == Some(model) || (!self.model.is_empty() && model.0 == self.model)
    }

    /// Takes the lock of the process's own session, so that no other program resumes it.
    pub(crate) fn lock_own(&mut self, pool_dir: Option<&Path>) {
        let Some(dir) = pool_dir.filter(|_| self.shape.persists && self.lock.is_none()) else {
            return;
        };
        self.lock = SessionLock::take(dir, &self.cli_session);
    }

    /// Whether messages of a history go to it one by one.
    pub(crate) fn takes_frames(&self) -> bool {
        let is_new = self.record.len() == 0;
        self.ways.reseed == Reseed::Native && (is_new || self.ways.frames_live)
    }

    /// How it is shown to other programs.
    pub(crate) fn shown(&self, key: &str) -> Shown {
        Shown {
            key: key.to_owned(),
            pid: self.group.pid(),
            started_unix_s: self.started_unix_s,
            generations: self.generations,
            running: false,
            parked: self.phase != Phase::Idle,
            messages: self.record.len(),
            plan: PlanKind::Fresh,
            reason: String::new(),
        }
    }

    /// Whether the isolation of this process was seen to hold.
    pub(crate) fn is_isolated(&self) -> bool {
        self.isolated
    }

    /// An error of this process; a pipe that could not be written to because the process has ended says why that was.
    pub(crate) async fn explained(&mut self, error: Error) -> Error {
        match error.code() {
            ErrorCode::ProcessExit => self.gone().await,
            _ => error,
        }
    }

    async fn gone(&mut self) -> Error {
        let how = self.group.exit().map_or_else(
            || "closed its output".to_owned(),
            |exit| format!("ended with {exit}"),
        );
        let words = self.group.last_words(LAST_WORDS_LIMIT).await;
        refused_option(&words).unwrap_or_else(|| {
            Error::new(
                ErrorCode::ProcessExit,
                format!("the CLI {how} in the middle of the conversation"),
            )
        })
    }

    /// Ends the process within the policy's bounds, then removes its files.
    pub(crate) async fn end(self, policy: EndPolicy) -> Result<Exit> {
        let unknown = self.hearing.unknown();
        if unknown > 0 {
            // Skipped, never fatal; `-v` shows that there was something new.
            tracing::info!(unknown, "the CLI said what this version does not know");
        }
        let Self {
            group,
            removed,
            place,
            ..
        } = self;
        let exit = group.end(policy).await;
        // One that is still there after its kill keeps its files until it goes, and nobody waits for that.
        if exit.is_ok() {
            let _ = removed.await;
        }
        drop(place);
        exit
    }
}

/// The settings that make a process fit.
fn settings_of(
    wanted: &Fit,
    has: Option<&Fit>,
    sets_model: bool,
    gate: &str,
) -> Option<serde_json::Value> {
    let mut env = json!({"CLAUDE_CODE_EXTRA_BODY": wanted.extra});
    if !gate.is_empty() {
        // Who says one variable says both.
        env["CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE"] = gate.into();
    }
    let effort = wanted.effort.map(Effort::as_str);
    if sets_model {
        return Some(json!({"model": wanted.model, "effortLevel": effort, "env": env}));
    }
    match has {
        Some(has) if (has.effort, &has.extra) == (wanted.effort, &wanted.extra) => None,
        _ => Some(json!({"effortLevel": effort, "env": env})),
    }
}

fn refused(_why: String) -> Error {
    // The CLI's sentence can quote what it was given.
    Error::new(
        ErrorCode::VersionIncompatible,
        "the CLI refused a control request",
    )
}

/// The CLI has begun another conversation than the one that it was to resume.
fn lost() -> Error {
    let what = "the CLI does not have the conversation that it was to resume";
    Error::new(ErrorCode::ProcessExit, what)
}

pub(crate) fn late(what: &str, limit: Duration) -> Error {
    Error::new(
        ErrorCode::ControlTimeout,
        format!("the CLI did not {what} within {} s", limit.as_secs()),
    )
}

fn expected_of(catalogue: Option<&Catalogue>) -> Expected {
    catalogue.map_or_else(Expected::default, |catalogue| Expected {
        server: Some(crate::cli::launch::MCP_SERVER.to_owned()),
        tools: catalogue.expected_tool_names().map(str::to_owned).collect(),
    })
}
