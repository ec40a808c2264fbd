//! One generation between the moment when the CLI was asked and its end: the loop in which CLI and host meet.
//!
//! The loop is a table of events. Nothing in an arm waits for anything else, so a slow host and a silent CLI each meet
//! their own deadline.

mod ends;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::answer::Answer;
use super::failure;
use super::hearing::Heard;
use super::session::{self, CONTROL_TIMEOUT, Session};
use crate::cli::isolation::InitVerdict;
use crate::conversation::Block;
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Event, Notice, Plan, PlanKind, StopReason};
use crate::limits::guard::Ticket;
use crate::limits::rate::{Reaction, Signal};
use crate::provider::{EventSender, TrySend};
use crate::request::Limits;
use crate::turn::{Finished, ToolNames, Turn};
use crate::wire::messages::StreamEvent;
use crate::wire::stream_json::{Failure, FailureKind, Verdict};

/// From the end of the model's message to the end of the CLI's turn; 4 to 15 ms were measured (2.1.332).
pub(crate) const FINALISATION_GRACE: Duration = Duration::from_secs(10);

/// From a broken message to what the CLI says of it; it comes with the same piece of its output (2.1.332).
const CUT_GRACE: Duration = Duration::from_secs(2);

/// How a generation ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The model's message is whole, and the host has everything but its end.
    Whole(Box<Whole>),
    /// The host is to hear this; the turn has to be taken back.
    Failed(Error),
    /// The host is gone; the turn has to be taken back.
    Cancelled,
    /// Built-in plugins slipped through: start again with these disabled. Nothing was said.
    Relaunch(Vec<String>),
    /// The CLI began another conversation than the one that it was to resume. Nothing was said.
    Lost,
}

/// A whole message.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) finished: Finished,
    /// The uuid at which a resume holds it; none when the CLI did not confirm it.
    pub(crate) uuid: Option<String>,
    pub(crate) after: After,
}

/// What is to be done with the CLI's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// It is over.
    Over,
    /// It waits for the results of tools.
    Parked,
    /// It is to be taken back: the CLI does not take the message for an answer, or wanted to go on by itself.
    Undo,
    /// The process is to be killed at once: the CLI may be about to ask again, and has not taken it yet that it must not.
    Kill,
}

/// What came of an exchange.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    /// Requests that reached the service.
    pub(crate) requests: u32,
    /// The CLI said nothing at all.
    pub(crate) is_silent: bool,
    /// Credits came into use, so the pool serves no more.
    pub(crate) closes_pool: Option<Error>,
    /// The process is to be killed at once.
    pub(crate) kill: bool,
    /// The service's answer had begun.
    pub(crate) has_begun: bool,
}

fn died(ended: &Ended) -> bool {
    matches!(ended, Ended::Failed(error) if error.code() == ErrorCode::ProcessExit)
}

/// One generation.
pub(crate) struct Exchange<'a> {
    session: &'a mut Session,
    events: &'a mut EventSender,
    ticket: &'a Ticket,
    limits: Limits,
    answer: Answer,
    names: Box<dyn Fn() -> ToolNames + Send + Sync + 'a>,
    queue: VecDeque<Event>,
    finished: Option<Finished>,
    started: Instant,
    progress: Option<Instant>,
    whole: Option<Instant>,
    host_is_slow: bool,
    requests: u32,
    is_silent: bool,
    closes_pool: Option<Error>,
    /// What an event said of a limit.
    limit: Option<Error>,
    /// The status that was tried again last.
    retried: Option<u16>,
    /// When the CLI closed the message itself.
    cut: Option<Instant>,
    kill: bool,
    /// The gate was closed for the answer that streams.
    is_guarded: bool,
    /// Since when a control request has been without its answer.
    owed: Option<Instant>,
    /// The host has seen something of an answer that was taken back.
    was_seen: bool,
    /// A call of the model fails the generation, and the host hears nothing of it.
    refuses_calls: bool,
}

impl<'a> Exchange<'a> {
    /// A generation whose line, or whose results of tools, are on their way to the CLI.
    pub(crate) fn new(
        session: &'a mut Session,
        events: &'a mut EventSender,
        ticket: &'a Ticket,
        (limits, started): (Limits, Instant),
        names: impl Fn() -> ToolNames + Send + Sync + 'a,
        how: Plan,
    ) -> Self {
        Self {
            answer: Answer::new(names(), how),
            names: Box::new(names),
            session,
            events,
            ticket,
            limits,
            queue: VecDeque::new(),
            finished: None,
            started,
            progress: None,
            whole: None,
            host_is_slow: false,
            requests: 1,
            is_silent: true,
            closes_pool: None,
            limit: None,
            retried: None,
            cut: None,
            kill: false,
            is_guarded: false,
            owed: None,
            was_seen: false,
            refuses_calls: false,
        }
    }

    /// The same for a summary, in which the model may call nothing.
    pub(crate) fn refusing_calls(mut self) -> Self {
        self.refuses_calls = true;
        self
    }

    /// Runs the generation to its end.
    pub(crate) async fn run(mut self) -> Outcome {
        let ended = match self.table().await {
            Ended::Failed(error) => {
                let seen = self.was_seen || self.answer.turn().output_seen();
                Ended::Failed(error.with_output_seen(seen))
            }
            other => other,
        };
        if self.is_silent && died(&ended) {
            // Without a word of the CLI it had not taken the message.
            self.ticket.not_sent();
        }
        self.ticket.spent(&self.answer.turn().usage());
        Outcome {
            ended,
            requests: self.requests,
            is_silent: self.is_silent,
            closes_pool: self.closes_pool,
            kill: self.kill,
            has_begun: self.answer.turn().has_begun(),
        }
    }

    async fn table(&mut self) -> Ended {
        loop {
            if let Err(Gone) = self.flush() {
                return Ended::Cancelled;
            }
            let (deadline, late) = self.deadline();
            let heard = tokio::select! {
                () = self.events.cancelled().cancelled() => return Ended::Cancelled,
                () = tokio::time::sleep_until(deadline) => return Ended::Failed(late),
                () = self.events.ready(), if !self.queue.is_empty() => continue,
                heard = self.session.next(Some(&mut self.answer)), if self.queue.is_empty() => heard,
            };
            let step = match heard {
                Ok(heard) => self.heard(heard),
                // After a whole message only the process is lost.
                Err(error) => match self.finished.take() {
                    Some(finished) => Ok(Some(self.release(finished, After::Undo))),
                    None => Err(error),
                },
            };
            if self.kill {
                // What has been decoded reaches the host all the same, however slowly it reads.
                self.session.kill();
            }
            match step {
                Ok(None) => {}
                Ok(Some(ended)) => return self.deliver(ended).await,
                Err(error) => return self.deliver(Ended::Failed(error)).await,
            }
        }
    }

    /// What was decoded before the end belongs to the host, in order and before it.
    async fn deliver(&mut self, ended: Ended) -> Ended {
        self.queue.extend(self.answer.out.drain(..));
        let total = self.started + self.limits.total;
        loop {
            match self.flush() {
                Err(Gone) => return Ended::Cancelled,
                Ok(()) if self.queue.is_empty() => return ended,
                Ok(()) => {}
            }
            tokio::select! {
                () = self.events.cancelled().cancelled() => return Ended::Cancelled,
                () = tokio::time::sleep_until(total) => return ended,
                () = self.events.ready() => {}
            }
        }
    }

    fn flush(&mut self) -> Result<(), Gone> {
        while let Some(event) = self.queue.pop_front() {
            if self.refuses_calls && matches!(event, Event::ToolInput { .. }) {
                continue;
            }
            match self.events.try_send(event) {
                Ok(()) => {}
                Err(TrySend::Full(event)) => {
                    self.queue.push_front(*event);
                    self.host_is_slow = true;
                    return Ok(());
                }
                Err(TrySend::Cancelled) => return Err(Gone),
            }
        }
        if std::mem::take(&mut self.host_is_slow)
            && let Some(progress) = &mut self.progress
        {
            // While the host did not read, nothing was read from the CLI; its silence counts from now.
            *progress = Instant::now();
            self.owed = self.owed.map(|_| Instant::now());
        }
        Ok(())
    }

    fn deadline(&self) -> (Instant, Error) {
        let total = self.started + self.limits.total;
        let late = |code: ErrorCode, limit: Duration| {
            let what = format!("the deadline of {} s passed", limit.as_secs_f32());
            Error::new(code, what)
        };
        if let Some(cut) = self.cut {
            return (
                cut + CUT_GRACE,
                interrupted("the connection to the service was lost"),
            );
        }
        let (at, error) = match (self.whole, self.progress) {
            (Some(whole), _) => (
                whole + FINALISATION_GRACE,
                late(ErrorCode::ProcessCleanup, FINALISATION_GRACE),
            ),
            (None, Some(progress)) => (
                progress + self.limits.idle,
                late(ErrorCode::IdleTimeout, self.limits.idle),
            ),
            (None, None) => (
                self.started + self.limits.start,
                late(ErrorCode::StartTimeout, self.limits.start),
            ),
        };
        let (at, error) = match self.owed.map(|owed| owed + CONTROL_TIMEOUT) {
            Some(due) if due < at => (
                due,
                session::late("answer a control request", CONTROL_TIMEOUT),
            ),
            _ => (at, error),
        };
        // A host that does not read is not the CLI's silence: only the overall deadline counts then.
        if at > total || !self.queue.is_empty() {
            return (total, late(ErrorCode::TotalTimeout, self.limits.total));
        }
        (at, error)
    }

    fn heard(&mut self, heard: Heard) -> Result<Option<Ended>> {
        // Of the turn before, or of the process, a line may still come when the CLI has died in between (2.1.294).
        self.is_silent &= !heard.is_of_a_turn();
        self.session.settle_controls()?;
        self.owed = match self.session.is_owed_an_answer() {
            true => self.owed.or_else(|| Some(Instant::now())),
            false => None,
        };
        match heard {
            Heard::Answer => {
                if !self.is_guarded && self.answer.turn().has_begun() {
                    self.is_guarded = true;
                    // One request of the host is one of the CLI: whatever it would ask by itself after this message is
                    // refused, until the host speaks again.
                    self.session.close_gate()?;
                    self.ticket.begun();
                }
                self.progress = Some(Instant::now());
                self.queue.extend(self.answer.out.drain(..));
                return self.before_it_goes_on();
            }
            Heard::MessageStop => return self.message_stop(),
            Heard::Cut { fails: false } if !self.session.is_shut() => {
                // It goes on by itself after whole blocks, and may not have taken it yet that it must not.
                self.kill = true;
                return Err(interrupted("the connection to the service was lost"));
            }
            Heard::Cut { .. } if self.answer.calls().is_empty() => {
                // The CLI says next what it was: an error of the service, or a lost connection.
                self.cut.get_or_insert_with(Instant::now);
            }
            // It would keep the call and wait for its result.
            Heard::Cut { .. } => return Err(interrupted("the connection to the service was lost")),
            Heard::Init { verdict, .. } => return self.judged(verdict),
            Heard::WentOn => {
                // It says so before it would ask, which the gate does not let it.
                self.requests += u32::from(!self.session.is_shut());
                return match self.finished.take() {
                    Some(finished) => Ok(Some(self.release(finished, After::Undo))),
                    None => Err(interrupted("the answer broke off and the CLI began anew")),
                };
            }
            Heard::Retry { status } => {
                // A sign-in that is renewed is announced twice and asked again once (2.1.332).
                if status.is_some() && self.retried == status {
                    return Ok(None);
                }
                self.retried = status;
                self.requests += 1;
                if self.answer.turn().has_begun() {
                    return Err(interrupted("the answer broke off and the CLI tries again"));
                }
                let reason = "the CLI tries again".to_owned();
                self.queue
                    .push_back(Event::Notice(Notice::Retry { status, reason }));
            }
            Heard::ModelFallback => return self.fell_back(),
            Heard::Limits(signal) => return self.limited(&signal),
            Heard::Result(verdict) => return self.result(verdict),
            Heard::Results(_) | Heard::Cancelled { .. } => {}
            // Dealt with in the session.
            Heard::Noted | Heard::Control { .. } | Heard::Mcp(_) | Heard::Unsupported { .. } => {}
            Heard::Broken(error) => return Err(error),
        }
        Ok(None)
    }

    fn judged(&mut self, verdict: InitVerdict) -> Result<Option<Ended>> {
        match verdict {
            _ if self.session.is_lost() => Ok(Some(Ended::Lost)),
            InitVerdict::Isolated => Ok(None),
            InitVerdict::Refused(error) => Err(error),
            InitVerdict::BuiltinPlugins(plugins) if !self.answer.turn().has_begun() => {
                Ok(Some(Ended::Relaunch(plugins)))
            }
            InitVerdict::BuiltinPlugins(plugins) => {
                let what = format!("built-in plugins are active: {}", plugins.join(", "));
                Err(Error::new(ErrorCode::IsolationCustomizations, what))
            }
        }
    }
}

impl Exchange<'_> {
    /// A turn that failed without a whole message.
    fn failed(&mut self, failure: &Failure) -> Error {
        let begun = self.answer.turn().has_begun();
        let is_ours = failure.kind == FailureKind::PromptTooLong && failure.status.is_none();
        if is_ours && (begun || self.session.is_in_the_middle_of_a_turn()) {
            // Not the service's word: the CLI wanted to go on by itself, after a broken answer or a call that it gave up,
            // and was not let.
            return interrupted("the answer broke off");
        }
        let said = match self.ticket.signalled(&Signal::of_failure(failure)) {
            Reaction::End { error, .. } => Some(error),
            _ => None,
        };
        let error = match (self.limit.take(), said) {
            // The event tells when the limit opens again.
            (Some(limit), _) if limit.code() == ErrorCode::UsageLimit => limit,
            (_, Some(said)) => said,
            (limit, None) => return limit.unwrap_or_else(|| failure::error(failure, begun)),
        };
        match failure.status {
            Some(status) => error.with_status(status),
            None => error,
        }
    }
}

/// Whether the CLI says so of an answer that is whole for the host: it wanted to go on by itself and was not let, or was
/// refused, which it counts as a failure (2.1.294, 2.1.310, 2.1.332).
fn is_of_a_whole_answer(failure: &Failure, stop: &StopReason) -> bool {
    use FailureKind as Kind;
    match failure.kind {
        Kind::PromptTooLong | Kind::MaxOutputTokens | Kind::Refusal => true,
        Kind::InvalidRequest => {
            failure.status.is_none() && matches!(stop, StopReason::Refusal { .. })
        }
        _ => false,
    }
}

/// The host is gone.
struct Gone;

/// Whether the CLI asks again by itself after a message that has ended so (2.1.294, 2.1.310, 2.1.332). Not after a
/// refusal, which the environment of its process forbids, on a version that keeps to it; with calls it goes on with their results.
fn goes_on(turn: &Turn, refused_once: bool) -> bool {
    match turn.stop_reason() {
        Some(StopReason::MaxTokens | StopReason::ContextWindowExceeded) => true,
        Some(StopReason::Refusal { .. }) => !refused_once,
        Some(StopReason::PauseTurn) | None => false,
        _ => {
            let visible =
                |block: &Block| block.as_text().is_some_and(|text| !text.trim().is_empty());
            turn.call_ids().next().is_none() && !turn.partial().content.iter().any(visible)
        }
    }
}

fn interrupted(what: &str) -> Error {
    Error::new(ErrorCode::StreamInterrupted, what)
}
