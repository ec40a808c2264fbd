//! One live CLI process that holds one conversation. A value: dropping it ends the process and everything it owns.
//!
//! It speaks with the CLI and knows nothing of hosts: it sets the process up, delivers messages, answers calls, waits for
//! what is said, and takes a turn back. What is to be done is decided elsewhere.

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
use super::status::Shown;
use super::sync::{self, Record};
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
        carrier: Carrier,
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

    /// Whether a control request waits for its answer.
    pub(crate) fn is_owed_an_answer(&self) -> bool {
        self.asked.values().any(Option::is_none)
    }

    /// Whether the process still runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.group.exit().is_none()
    }

    /// Calls that wait for the host's results.
    pub(crate) fn awaited(&self) -> Vec<ToolUseId> {
        self.pairing.awaited().cloned().collect()
    }

    /// The model's message has ended with these calls.
    pub(crate) fn announce(&mut self, calls: &[ToolUseId]) {
        for call in calls {
            let announced = self.pairing.announce(call);
            if let pairing::Announced::Refused(why) = announced {
                tracing::warn!(?why, "a call of the model cannot be paired");
            }
        }
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
        if let Some(settings) = settings_of(wanted, self.fit.as_ref(), self.has_model, self.gate) {
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

    /// Lets the CLI send its next request: the host has spoken. Goes into the same pipe, before what it is to send.
    pub(crate) fn open_gate(&mut self) -> Result<()> {
        self.set_gate(GATE_OPEN)?;
        self.closing = None;
        Ok(())
    }

    /// From here on the CLI refuses by itself whatever it would send in this turn: it asks again after an answer that is
    /// cut, empty or refused, and after calls that it does not issue, within some 10 ms, and an interrupt comes too late in
    /// every fifth case (2.1.294, 2.1.310, 2.1.332; refused so, none of 36 tries a version).
    pub(crate) fn close_gate(&mut self) -> Result<()> {
        self.closing = self.set_gate(GATE_CLOSED)?;
        Ok(())
    }

    /// Whether the CLI has taken the closing. Before that a short answer may be followed by a request of its own.
    pub(crate) fn is_shut(&self) -> bool {
        self.gate == GATE_CLOSED && self.closing.is_none()
    }

    fn set_gate(&mut self, tokens: &'static str) -> Result<Option<String>> {
        if self.gate == tokens {
            return Ok(self.closing.take());
        }
        let extra = self.fit.as_ref().map_or("{}", |fit| fit.extra.as_str());
        let settings = to_raw_value(&json!({
            "env": {"CLAUDE_CODE_EXTRA_BODY": extra, "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE": tokens},
        }));
        let settings =
            settings.map_err(|_| Error::new(ErrorCode::Internal, "settings are not JSON"))?;
        let id = self.next_control()?;
        let request = ControlRequest::ApplyFlagSettings {
            settings: &settings,
        };
        self.group
            .stdin()
            .write(control::control_request(&id, &request).into_bytes())?;
        self.gate = tokens;
        Ok(Some(id))
    }

    /// Writes the line that asks, after what has to come right before it. A turn runs from here on.
    pub(crate) fn ask(&mut self, lines: Vec<u8>, uuid: Uuid, turn_at: usize) -> Result<()> {
        // The first call may follow at once.
        self.pairing.begin();
        self.group.stdin().write(lines)?;
        self.turn_at = turn_at;
        self.line = Some(uuid.hyphenated().to_string());
        self.last_line.clone_from(&self.line);
        self.phase = Phase::Running;
        Ok(())
    }

    /// Writes a line that asks and belongs to the turn that was ended with results: to take it back is to take back that
    /// turn as well.
    pub(crate) fn ask_on(&mut self, line: Bytes, uuid: Uuid) -> Result<()> {
        self.pairing.begin();
        self.group.stdin().write(line)?;
        self.last_line = Some(uuid.hyphenated().to_string());
        self.phase = Phase::Running;
        Ok(())
    }

    /// Gives the CLI lines of the history that end with a user line, and waits until it has that.
    pub(crate) async fn tell(&mut self, lines: Vec<u8>) -> Result<()> {
        self.group.stdin().write(lines)?;
        let taken = async {
            loop {
                match self.next(None).await? {
                    Heard::Result(Verdict::Acknowledged) => return Ok(()),
                    Heard::Init { .. } if self.is_lost => return Err(lost()),
                    Heard::Init {
                        verdict: InitVerdict::Refused(error),
                        ..
                    } => return Err(error),
                    Heard::Init {
                        verdict: InitVerdict::BuiltinPlugins(plugins),
                        ..
                    } => {
                        self.slipped = Some(plugins);
                        let what = "a built-in plugin is active";
                        return Err(Error::new(ErrorCode::IsolationCustomizations, what));
                    }
                    Heard::Result(_) => {
                        let what = "the CLI did not take a message of the history as one";
                        return Err(Error::new(ErrorCode::ProtocolResult, what));
                    }
                    _ => {}
                }
            }
        };
        match tokio::time::timeout(FRAME_LIMIT, taken).await {
            Ok(taken) => taken,
            Err(_) => Err(late("take a message of the history", FRAME_LIMIT)),
        }
    }

    /// Gives the host's result of a call.
    pub(crate) fn answer(&mut self, result: ToolResult) -> Result<()> {
        match self.pairing.give(result) {
            Given::Answered(answer) => self.write_answer(&answer, false),
            // The plan saw to it that all awaited calls and no others are answered.
            _ => Ok(()),
        }
    }

    /// Whether results can be given so that the CLI ends its turn with them: every call is here, since one that came later
    /// would not get its result any more, and one of the results is no error.
    pub(crate) fn can_end_with(&mut self, results: &[&ToolResult]) -> Result<bool> {
        while let Some(occurrence) = self.carrier.waiting() {
            self.occurred(occurrence)?;
        }
        let is_open = |id: &ToolUseId| self.pairing.open().any(|open| open == id);
        Ok(self.pairing.awaited().all(is_open)
            && results
                .iter()
                .any(|result| !result.is_error && is_open(&result.id)))
    }

    /// Gives results after which the CLI ends its turn without a request, so that what the host says beside them can
    /// follow as a line of its own, in one message with them (2.1.294, 2.1.310, 2.1.332).
    pub(crate) fn answer_and_end(&mut self, results: &[&ToolResult]) -> Result<()> {
        let mut has_ended = false;
        for result in results {
            let Given::Answered(answer) = self.pairing.give((*result).clone()) else {
                continue;
            };
            let ends = !has_ended && !answer.result.is_error;
            has_ended |= ends;
            self.write_answer(&answer, ends)?;
        }
        self.ended_turns += 1;
        Ok(())
    }

    fn write_answer(&self, answer: &pairing::Answer<Address>, ends: bool) -> Result<()> {
        let stdin = self.group.stdin();
        self.carrier.answer(stdin, &answer.to, &answer.result, ends)
    }

    /// Waits until what goes another way than lines do may be given: the CLI has taken what was written before.
    pub(crate) async fn before_answers(&mut self) -> Result<()> {
        match self.carrier.is_apart() {
            true => self.settled().await,
            false => Ok(()),
        }
    }

    /// Waits until a line may follow answers that went another way: the CLI has ended the turn that they end. A line that
    /// it reads before would get its own words around it.
    pub(crate) async fn after_last_answers(&mut self) -> Result<()> {
        if !self.carrier.is_apart() {
            return Ok(());
        }
        let ended = async {
            while self.ended_turns > 0 {
                self.next(None).await?;
            }
            Ok(())
        };
        match tokio::time::timeout(TURN_END_LIMIT, ended).await {
            Ok(ended) => ended,
            Err(_) => Err(late("end its turn with results", TURN_END_LIMIT)),
        }
    }

    /// Asks a control request and waits for its answer; what is said meanwhile is taken note of and otherwise dropped, so
    /// this is only for times when no answer of the model is awaited.
    pub(crate) async fn control(&mut self, request: &ControlRequest<'_>) -> Result<Box<RawValue>> {
        let id = self.next_control()?;
        self.group
            .stdin()
            .write(control::control_request(&id, request).into_bytes())?;
        let answered = async {
            loop {
                if let Some(Some(outcome)) = self.asked.get(&id) {
                    let outcome = outcome.clone();
                    self.asked.remove(&id);
                    return outcome.map_err(refused);
                }
                self.next(None).await?;
            }
        };
        match tokio::time::timeout(CONTROL_TIMEOUT, answered).await {
            Ok(answer) => answer,
            Err(_) => Err(late("answer a control request", CONTROL_TIMEOUT)),
        }
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

    fn turn_is_over(&mut self) {
        self.phase = Phase::Idle;
        for answer in self.pairing.close().answers {
            // The CLI ignores an answer to a call that it has given up (2.1.332); a closed pipe needs none.
            let _ = self.write_answer(&answer, false);
        }
    }

    /// Built-in plugins that slipped through, which were noticed while the history was told.
    pub(crate) fn slipped_through(&mut self) -> Option<Vec<String>> {
        self.slipped.take()
    }

    /// Waits until the CLI has the host's tools, all of them and no others, before it is told anything.
    ///
    /// # Errors
    ///
    /// `mcp_startup`, `isolation_mcp` or `isolation_tools`.
    pub(crate) async fn check_tools(&mut self, catalogue: &Catalogue) -> Result<()> {
        if catalogue.is_empty() {
            return Ok(());
        }
        // Before the CLI has taken the tools over it lists none (2.1.294 to 2.1.332).
        self.settled().await?;
        let reply = tokio::time::timeout(TOOLS_LIMIT, self.connected()).await;
        let reply = reply.map_err(|_| {
            let limit = TOOLS_LIMIT.as_secs();
            let what = format!("the CLI did not fetch the tools within {limit} s");
            Error::new(ErrorCode::McpStartup, what)
        })??;
        let [server] = reply.servers.as_slice() else {
            let what = format!("the CLI has {} tool servers", reply.servers.len());
            return Err(Error::new(ErrorCode::IsolationMcp, what));
        };
        if server.name != MCP_SERVER {
            let what = "the CLI has another tool server than the host's";
            return Err(Error::new(ErrorCode::IsolationMcp, what));
        }
        if server.status != "connected" {
            let what = format!("the tool server is {:?}", names::shown(&server.status));
            return Err(Error::new(ErrorCode::McpStartup, what));
        }
        let prefix = format!("mcp__{MCP_SERVER}__");
        let listed: Vec<String> = server
            .tools
            .iter()
            .flatten()
            .map(|tool| match tool.name.starts_with(&prefix) {
                true => tool.name.clone(),
                false => format!("{prefix}{}", tool.name),
            })
            .collect();
        let listed = listed.iter().map(String::as_str);
        check_tools(listed, catalogue.expected_tool_names()).into_result()
    }

    /// What the CLI says of its tool servers once none of them is on its way.
    async fn connected(&mut self) -> Result<McpStatusReply> {
        loop {
            let reply = self.control(&ControlRequest::McpStatus {}).await?;
            let reply: McpStatusReply = serde_json::from_str(reply.get()).map_err(|_| {
                let what = "the CLI's answer to mcp_status has an unknown shape";
                Error::new(ErrorCode::ProtocolShape, what)
            })?;
            if !reply
                .servers
                .iter()
                .any(|server| server.status == "pending")
            {
                return Ok(reply);
            }
            match self.carrier.is_listed() {
                // It tells nobody when it has taken over what it fetched.
                true => tokio::time::sleep(TOOLS_PAUSE).await,
                false => drop(self.next(None).await?),
            }
        }
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

    /// Lets a process that was told nothing yet finish its start, so that whoever takes it need not wait for that.
    pub(crate) async fn warm_up(&mut self) -> Result<()> {
        self.control(&ControlRequest::GetSettings {})
            .await
            .map(drop)
    }

    /// Whether the isolation of this process was seen to hold.
    pub(crate) fn is_isolated(&self) -> bool {
        self.isolated
    }

    fn next_control(&mut self) -> Result<String> {
        if self.asked.len() >= MAX_PENDING {
            let what = format!("{MAX_PENDING} control requests wait for an answer already");
            return Err(Error::new(ErrorCode::ControlTimeout, what));
        }
        let id = self.ids.next_id();
        self.asked.insert(id.clone(), None);
        Ok(id)
    }

    fn controlled(&mut self, id: &str, outcome: Result<Box<RawValue>, String>) {
        if self.closing.as_deref() == Some(id) {
            self.closing = None;
        }
        // An answer to nothing that we asked is dropped.
        if let Some(slot) = self.asked.get_mut(id) {
            *slot = Some(outcome);
        }
    }

    /// Waits until every control request is answered.
    async fn settled(&mut self) -> Result<()> {
        let answered = async {
            while self.asked.values().any(Option::is_none) {
                self.next(None).await?;
            }
            self.settle_controls()
        };
        match tokio::time::timeout(CONTROL_TIMEOUT, answered).await {
            Ok(answered) => answered,
            Err(_) => Err(late("answer a control request", CONTROL_TIMEOUT)),
        }
    }

    /// Takes note of the answers to requests that nobody waits for one by one.
    ///
    /// # Errors
    ///
    /// `version_incompatible` when one was refused.
    pub(crate) fn settle_controls(&mut self) -> Result<()> {
        let answered: Vec<_> = self
            .asked
            .iter()
            .filter(|(_, outcome)| outcome.is_some())
            .map(|(id, _)| id.clone())
            .collect();
        for id in answered {
            if let Some(Some(Err(why))) = self.asked.remove(&id) {
                return Err(refused(why));
            }
        }
        Ok(())
    }

    fn called(&mut self, record: &Bytes) -> Result<()> {
        let Some(wrapped) = in_band::unwrap(record) else {
            return Ok(());
        };
        let address = wrapped.return_address();
        let Carrier::InBand(Some(server)) = &mut self.carrier else {
            let mut line = in_band::wrap_error(&address, "no MCP server of that name is here");
            line.push(b'\n');
            self.group.stdin().write(line)?;
            return Ok(());
        };
        let reply = wrapped.handle(server);
        if let Some(mut message) = reply.message {
            message.push(b'\n');
            self.group.stdin().write(message)?;
        }
        match reply.occurrence {
            Occurrence::Call(call) => {
                self.arrived(call.tool_use_id, Address::InBand(address, call.rpc_id))
            }
            Occurrence::Cancelled(id) => {
                self.given_up(|to| matches!(to, Address::InBand(_, of) if *of == id))
            }
            _ => Ok(()),
        }
    }

    fn occurred(&mut self, occurrence: http::Occurrence) -> Result<()> {
        match occurrence {
            http::Occurrence::Call { call, to } => {
                self.arrived(call.tool_use_id, Address::Http(to))
            }
            http::Occurrence::Cancelled(to) => self.given_up(|of| *of == Address::Http(to)),
            http::Occurrence::Listed | http::Occurrence::Violation(_) => Ok(()),
        }
    }

    fn arrived(&mut self, id: Option<ToolUseId>, to: Address) -> Result<()> {
        match self.pairing.arrived(id, to) {
            Arrived::Waits | Arrived::Parked => Ok(()),
            Arrived::Answered(answer) | Arrived::Refused(_, answer) => {
                self.write_answer(&answer, false)
            }
        }
    }

    fn given_up(&mut self, is: impl Fn(&Address) -> bool) -> Result<()> {
        match self.pairing.cancelled(is) {
            Some(answer) => self.write_answer(&answer, false),
            None => Ok(()),
        }
    }

    /// Takes the running turn back: interrupts it, waits for its end, and removes everything from its first line on from
    /// the CLI's conversation.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong means that the CLI's conversation is not known any more: the process is to be ended.
    pub(crate) async fn undo(&mut self) -> Result<()> {
        let Some((line, last)) = self.line.clone().zip(self.last_line.clone()) else {
            return Ok(());
        };
        let began = self.end_turn(&last).await?;
        self.rewind_to(&line, &last, began).await
    }

    /// Takes a parked turn back, as the plan says, and the record with it.
    pub(crate) async fn rewind(&mut self, rewind: &sync::Rewind) -> Result<()> {
        let to = rewind.to.hyphenated().to_string();
        let last = self.last_line.clone().unwrap_or_else(|| to.clone());
        let began = self.end_turn(&last).await?;
        self.rewind_to(&to, &last, began).await?;
        self.record.cut(rewind.len);
        Ok(())
    }

    /// Whether the turn had begun: a line that was taken out of the queue is nowhere in the conversation.
    async fn end_turn(&mut self, line: &str) -> Result<bool> {
        match self.phase {
            Phase::Idle => Ok(true),
            Phase::Running => self.interrupt(line).await,
        }
    }

    async fn rewind_to(&mut self, line: &str, last_seen: &str, began: bool) -> Result<()> {
        let rewind = ControlRequest::RewindConversation {
            target_message_uuid: line,
            last_seen_user_message_uuid: Some(last_seen),
        };
        let reply = self.control(&rewind).await?;
        let reply: RewindReply = serde_json::from_str(reply.get()).map_err(|_| {
            let what = "the CLI's answer to rewind_conversation has an unknown shape";
            Error::new(ErrorCode::ProtocolShape, what)
        })?;
        let was_never = !began && reply.reason.as_deref() == Some("target_not_found");
        match reply.rewound || was_never {
            true => Ok(()),
            false => Err(Error::new(
                ErrorCode::ProtocolResult,
                "the CLI did not take its last turn back",
            )),
        }
    }

    async fn interrupt(&mut self, line: &str) -> Result<bool> {
        let id = self.next_control()?;
        let request = ControlRequest::Interrupt {
            cancel_queued: true,
        };
        self.group
            .stdin()
            .write(control::control_request(&id, &request).into_bytes())?;
        let ended = async {
            let mut began = true;
            while self.phase != Phase::Idle {
                match self.next(None).await? {
                    Heard::Cancelled { uuid } if uuid == line => {
                        began = false;
                        self.turn_is_over();
                    }
                    _ => {}
                }
            }
            Ok::<_, Error>(began)
        };
        let began = tokio::time::timeout(INTERRUPT_LIMIT, ended)
            .await
            .map_err(|_| late("end an interrupted turn", INTERRUPT_LIMIT))??;
        self.asked.remove(&id);
        Ok(began)
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

/// The settings that make a process fit; a model only before the first line, since later it would leave command text in
/// the conversation (2.1.294 to 2.1.332).
fn settings_of(
    wanted: &Fit,
    has: Option<&Fit>,
    has_model: bool,
    gate: &str,
) -> Option<serde_json::Value> {
    let mut env = json!({"CLAUDE_CODE_EXTRA_BODY": wanted.extra});
    if !gate.is_empty() {
        // Who says one variable says both.
        env["CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE"] = gate.into();
    }
    let effort = wanted.effort.map(Effort::as_str);
    match has {
        None if has_model => Some(json!({"effortLevel": effort, "env": env})),
        None => Some(json!({"model": wanted.model, "effortLevel": effort, "env": env})),
        Some(has) if (has.effort, &has.extra) == (wanted.effort, &wanted.extra) => None,
        Some(_) => Some(json!({"effortLevel": effort, "env": env})),
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
