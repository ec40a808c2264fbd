//! One generation from a started process to its end: hand-shake, history, answer, hand-off.
//!
//! Everything that waits goes through [`Driver::said`], where cancel, deadlines, a slow host and the CLI's lines meet.

mod deadlines;
mod handshake;

use std::collections::VecDeque;

use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use tokio::time::Instant;

use self::deadlines::Waiting;
use super::failure;
use super::hearing::{Hearing, Said};
use super::options::Carrier;
use super::prepared::{Prepared, Script};
use super::running::{ASK_TO_END, Running};
use super::ways::Ways;
use crate::cli::isolation::InitVerdict;
use crate::conversation::frames::{Content, Kind};
use crate::conversation::{Role, names};
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Done, Event, Notice, StateOrder, StopReason};
use crate::limits::guard::Ticket;
use crate::limits::rate::{Reaction, Signal};
use crate::process::EndPolicy;
use crate::provider::{EventSender, TrySend};
use crate::tools::{Occurrence, Policy, Server};
use crate::turn::Finished;
use crate::wire::control::{self, ControlRequest, UserContent, UserLine};
use crate::wire::stream_json::Verdict;

/// How a process's part in a generation ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The answer is whole. It is published once the process and its files are gone.
    Whole(Box<Finished>),
    /// The host is to hear this.
    Failed(Error),
    /// Built-in plugins slipped through: start again with these disabled. Nothing was published.
    Relaunch(Vec<String>),
    /// The host is gone.
    Cancelled,
}

/// One generation on one process.
pub(crate) struct Driver<'a> {
    running: &'a mut Running,
    hearing: Hearing,
    prepared: &'a Prepared,
    ways: Ways,
    ticket: &'a Ticket,
    events: &'a mut EventSender,
    queue: VecDeque<Event>,
    server: Option<Server>,
    started: Instant,
    waiting: Waiting,
    /// The session's model; known with the first record of a user line.
    model: Option<String>,
    /// The newest word about a limit, for the failure that follows it.
    limit: Option<Error>,
    /// Requests beyond the first that the CLI announced.
    repeated: u64,
    /// The CLI was told to ask nothing more.
    shut: bool,
    /// The host has not read what it could have.
    host_is_slow: bool,
    next_id: u64,
}

impl<'a> Driver<'a> {
    /// A generation on a process that was told nothing yet.
    pub(crate) fn new(
        running: &'a mut Running,
        hearing: Hearing,
        (prepared, ways): (&'a Prepared, Ways),
        ticket: &'a Ticket,
        events: &'a mut EventSender,
        started: Instant,
    ) -> Self {
        let tools = !prepared.catalogue.is_empty();
        let in_band = tools && ways.tools == Carrier::InBand;
        Self {
            server: in_band.then(|| Server::new(&prepared.catalogue, Policy::Proposing)),
            running,
            hearing,
            prepared,
            ways,
            ticket,
            events,
            queue: VecDeque::new(),
            started,
            waiting: Waiting::Start,
            model: None,
            limit: None,
            repeated: 0,
            shut: false,
            host_is_slow: false,
            next_id: 0,
        }
    }

    /// Runs the generation to its end.
    pub(crate) async fn run(&mut self) -> Ended {
        let ended = match self.story().await {
            Ok(finished) => Ended::Whole(Box::new(finished)),
            Err(ended) => ended,
        };
        self.running.starting = None;
        self.ticket.spent(&self.hearing.turn().usage());
        match ended {
            Ended::Failed(error) if error.code() == ErrorCode::ProcessExit => {
                self.failed(self.running.gone().await)
            }
            Ended::Failed(error) => self.failed(error),
            other => other,
        }
    }

    fn failed(&self, error: Error) -> Ended {
        Ended::Failed(error.with_output_seen(self.hearing.turn().output_seen()))
    }

    /// How the process is to be ended after an answer. SIGTERM lets the CLI remove its session file and key (35 to 65 ms);
    /// after a stop from which it would go on by itself only SIGKILL is sure to come before its next request, which leaves
    /// 8 to 14 ms after the stop (2.1.294, 2.1.332: 0 of 40 with SIGKILL, 31 of 40 with SIGTERM).
    pub(crate) fn end_policy(&self, finished: &Finished) -> EndPolicy {
        let cut = matches!(
            finished.stop,
            StopReason::MaxTokens | StopReason::ContextWindowExceeded
        );
        let silent = !finished.has_calls() && finished.message.text().is_empty();
        let refused = matches!(finished.stop, StopReason::Refusal { .. });
        match cut || silent || (refused && !self.ways.refused_once) {
            true => EndPolicy::KILL,
            false => ASK_TO_END,
        }
    }

    /// The events that are still to be given out, and the end.
    pub(crate) fn done(&mut self, finished: Finished, laboratory: bool) -> (VecDeque<Event>, Done) {
        let mut events = std::mem::take(&mut self.queue);
        events.extend(finished.suffix);
        let mut done = Done::new(
            finished.stop,
            finished.message,
            finished.usage,
            finished.model,
        );
        done.state = StateOrder::Unchanged;
        done.upstream_requests = u32::try_from(1 + self.repeated).unwrap_or(u32::MAX);
        done.laboratory = laboratory;
        (events, done)
    }

    async fn story(&mut self) -> Result<Finished, Ended> {
        if !self.prepared.catalogue.is_empty() {
            self.connect().await?;
        }
        match &self.prepared.script {
            Script::Transcript(content) => {
                let line = control::user_line(&UserLine {
                    uuid: &fresh_uuid(),
                    content: UserContent::Blocks(content),
                    asks: true,
                });
                self.ask(line)?;
            }
            Script::Native(contents) => self.tell(contents).await?,
        }
        self.answer().await
    }

    /// Gives the process the history in frames: each user message but the last is acknowledged before the answer to it.
    async fn tell(&mut self, contents: &[Content]) -> Result<(), Ended> {
        let last = contents.len() - 1;
        for (n, content) in contents.iter().enumerate() {
            let kind = match n == last {
                true => Kind::Asks,
                false => Kind::History,
            };
            let id = match content.role() {
                Role::Assistant => format!("msg_turnpass_{n}"),
                Role::User | Role::System => fresh_uuid(),
            };
            let model = self.model.clone().unwrap_or_default();
            let frame = content.frame(kind, &id, &model).map_err(Ended::Failed)?;
            if kind == Kind::Asks {
                return self.ask(frame.line);
            }
            self.write(frame.line.as_bytes().to_vec())?;
            if frame.acknowledged() {
                self.acknowledgement().await?;
            }
        }
        Ok(())
    }

    async fn acknowledgement(&mut self) -> Result<(), Ended> {
        self.waiting = Waiting::Control(Instant::now());
        loop {
            match self.said().await? {
                Said::Result(Verdict::Acknowledged) if self.model.is_some() => return Ok(()),
                Said::Result(_) => {
                    let what = "the CLI did not take a message of the history as one";
                    return Err(Ended::Failed(Error::new(ErrorCode::ProtocolOrder, what)));
                }
                _ => {}
            }
        }
    }

    fn ask(&mut self, line: control::Line) -> Result<(), Ended> {
        self.ticket.sending().map_err(Ended::Failed)?;
        self.hearing.asked();
        self.waiting = Waiting::Start;
        self.write(line.into_bytes())
    }

    async fn answer(&mut self) -> Result<Finished, Ended> {
        loop {
            match self.said().await? {
                Said::HandOff => return self.finished(),
                Said::Stopped => self.waiting = Waiting::Judgement(Instant::now()),
                Said::Requesting => self.shut(),
                Said::Progress => self.progress(),
                Said::Result(verdict) => return self.judged(verdict),
                _ => {}
            }
        }
    }

    fn progress(&mut self) {
        if matches!(self.waiting, Waiting::Start) {
            self.ticket.begun();
            self.running.starting = None;
        }
        self.waiting = Waiting::Next(Instant::now());
    }

    /// The CLI's request is on its way: from here on it is to ask nothing more. With this limit it refuses every further
    /// request of its own by itself, and the one that is on its way, renewed sign-in included, is left alone. It takes
    /// effect within milliseconds: with answers that come 20 ms after the request or later, 0 of 48 further requests on
    /// 2.1.294, 2.1.310 and 2.1.332 together. For answers that come at once in one piece there is [`Driver::end_policy`].
    fn shut(&mut self) {
        if std::mem::replace(&mut self.shut, true) {
            return;
        }
        let settings = json!({"env": {"CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE": "1"}});
        if let Ok(settings) = to_raw_value(&settings) {
            let request = ControlRequest::ApplyFlagSettings {
                settings: &settings,
            };
            // A process that takes no input any more asks nothing more either.
            let _ = self.request(&request);
        }
    }

    fn finished(&mut self) -> Result<Finished, Ended> {
        let what = "the answer ended without token counts";
        let missing = || Ended::Failed(failure::interrupted(what));
        self.hearing.finish().ok_or_else(missing)
    }

    /// The CLI has ended its turn.
    fn judged(&mut self, verdict: Verdict) -> Result<Finished, Ended> {
        let begun = self.hearing.turn().has_begun();
        let whole = self.hearing.turn().is_stopped();
        let error = match verdict {
            Verdict::Completed | Verdict::MaxTurns if whole => {
                return self.finished();
            }
            Verdict::Failed(failure) => failure::of_turn(&failure, begun, self.limit.as_ref()),
            _ if begun => failure::interrupted("the CLI ended its turn without a stop reason"),
            verdict => Error::new(
                ErrorCode::ProtocolResult,
                format!("the CLI ended its turn without an answer ({verdict:?})"),
            ),
        };
        Err(Ended::Failed(error))
    }

    /// The next thing that the CLI says; what concerns every phase is dealt with here.
    async fn said(&mut self) -> Result<Said, Ended> {
        loop {
            self.flush()?;
            let (deadline, late) = self.deadline();
            let line = tokio::select! {
                () = self.events.cancelled().cancelled() => return Err(Ended::Cancelled),
                () = tokio::time::sleep_until(deadline) => return Err(Ended::Failed(late)),
                () = self.events.ready(), if !self.queue.is_empty() => continue,
                line = self.running.line(), if self.queue.is_empty() => line.map_err(Ended::Failed)?,
            };
            let Some(line) = line else {
                return Err(Ended::Failed(Error::new(ErrorCode::ProcessExit, "")));
            };
            let mut out = Vec::new();
            let said = self.hearing.line(&line, &mut out);
            self.queue.extend(out);
            if let Some(said) = said
                && let Some(said) = self.always(said)?
            {
                // What was said with it is on its way before anything else is done about it.
                self.flush()?;
                return Ok(said);
            }
        }
    }

    /// What is done about in every phase; what is left over is for the phase.
    fn always(&mut self, said: Said) -> Result<Option<Said>, Ended> {
        match said {
            Said::Failed(error) => return Err(Ended::Failed(error)),
            Said::Init(InitVerdict::Refused(error), _) => return Err(Ended::Failed(error)),
            Said::Init(InitVerdict::BuiltinPlugins(plugins), _) => {
                return Err(Ended::Relaunch(plugins));
            }
            Said::Init(InitVerdict::Isolated, model) => self.model = Some(model),
            Said::Mcp { id, message } => self.serve(&id, &message)?,
            Said::Unsupported { id } => {
                self.write(control::control_error(&id, "unsupported").into_bytes())?;
            }
            Said::Limit(signal) => self.limited(signal)?,
            Said::Retry { status, attempt } => {
                self.repeated = self.repeated.max(attempt.max(1));
                let reason = match status {
                    Some(401) => "the service answered 401; the CLI renews its sign-in",
                    _ => "the CLI tries again",
                };
                let reason = reason.to_owned();
                self.queue
                    .push_back(Event::Notice(Notice::Retry { status, reason }));
            }
            said => return Ok(Some(said)),
        }
        Ok(None)
    }

    /// The in-band tool server: it lists, and a call is a violation.
    fn serve(&mut self, id: &str, message: &RawValue) -> Result<(), Ended> {
        let Some(server) = &mut self.server else {
            let line = control::control_error(id, "no MCP server of that name is here");
            return self.write(line.into_bytes());
        };
        let reply = server.handle(message.get().as_bytes());
        if let Occurrence::Violation(tool) = reply.occurrence {
            return Err(Ended::Failed(violation(&names::shown(&tool))));
        }
        // A notification has no answer of its own, and the CLI still wants its control request answered.
        let answer = reply.message.unwrap_or_else(|| EMPTY_ANSWER.to_vec());
        let answer = String::from_utf8(answer)
            .ok()
            .and_then(|text| RawValue::from_string(text).ok())
            .ok_or_else(|| internal("the tool server's answer is not JSON"))?;
        self.write(control::mcp_response(id, &answer).into_bytes())
    }

    fn limited(&mut self, signal: Signal) -> Result<(), Ended> {
        match self.ticket.signalled(&signal) {
            Reaction::Go => {}
            Reaction::Tell(notice) => self.queue.push_back(Event::Notice(notice)),
            Reaction::End { error, .. } if error.code() == ErrorCode::Billing => {
                return Err(Ended::Failed(error));
            }
            // The failure that follows has the status; this has the time.
            Reaction::End { error, .. } => self.limit = Some(error),
        }
        Ok(())
    }

    fn request(&mut self, request: &ControlRequest<'_>) -> Result<String, Ended> {
        self.next_id += 1;
        let id = format!("turnpass-{}", self.next_id);
        self.write(control::control_request(&id, request).into_bytes())?;
        Ok(id)
    }

    fn write(&self, bytes: impl Into<bytes::Bytes>) -> Result<(), Ended> {
        let written = self.running.stdin().write(bytes);
        written.map_err(|error| Ended::Failed(error.into()))
    }

    /// Gives the host what it has room for.
    fn flush(&mut self) -> Result<(), Ended> {
        while let Some(event) = self.queue.pop_front() {
            match self.events.try_send(event) {
                Ok(()) => {}
                Err(TrySend::Full(event)) => {
                    self.queue.push_front(*event);
                    self.host_is_slow = true;
                    return Ok(());
                }
                Err(TrySend::Cancelled) => return Err(Ended::Cancelled),
            }
        }
        if std::mem::take(&mut self.host_is_slow) {
            self.waiting = self.waiting.heard_again(Instant::now());
        }
        Ok(())
    }
}

/// What the CLI is answered where MCP itself has no answer.
const EMPTY_ANSWER: &[u8] = br#"{"jsonrpc":"2.0","id":0,"result":{}}"#;

/// The tool server was called.
pub(crate) fn violation(tool: &str) -> Error {
    let which = match tool.is_empty() {
        true => "a tool".to_owned(),
        false => format!("the tool {tool}"),
    };
    let what = format!("the CLI tried to execute {which}; nothing was executed");
    Error::new(ErrorCode::McpExecution, what)
}

fn refused() -> Error {
    Error::new(
        ErrorCode::VersionIncompatible,
        "the CLI refused a control request that this transport needs",
    )
}

fn fresh_uuid() -> String {
    uuid::Uuid::new_v4().to_string()
}

fn internal(what: &str) -> Ended {
    Ended::Failed(Error::new(ErrorCode::Internal, what))
}
