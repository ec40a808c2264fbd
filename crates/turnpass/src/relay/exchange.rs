//! One generation between the moment when its lane is armed and its end: the loop in which service, CLI and host meet.
//!
//! The loop is a table of events: each arm takes one and changes [`Evidence`], and after each the pure decision says
//! whether to go on. Nothing in an arm waits for anything else, so a slow host, a slow CLI and a silent service each
//! meet their own deadline.

use std::collections::VecDeque;
use std::pin::Pin;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::classify;
use super::completion::{Answer as Judged, Decision, Evidence, FINALISATION_GRACE, ProcessMode};
use super::kept::Asked;
use super::lane::{Admitted, Arrival, BrokenOff, Lane, Reply};
use super::native::Native;
use super::prepared::{self, Prepared};
use super::reading::Reading;
use super::remains::Remains;
use super::renewal::Renewal;
use super::service::Service;
use super::upstream::{Answer, AnswerBody};
use crate::cli::isolation::InitVerdict;
use crate::cli::starts::Turn as Start;
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Done, Event, Notice, Plan, StateOrder};
use crate::limits::rate::Reaction;
use crate::process::Exit;
use crate::provider::{EventSender, TrySend};
use crate::request::Limits;
use crate::turn::{Finished, Turn};
use crate::wire::stream_json::Verdict;

/// Longest wait for the answer to a control request (SPEC 3).
pub(crate) const CONTROL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

/// How a generation ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The host has the whole answer but its end, which is told once the process is put back: the host may ask again
    /// the moment it hears it.
    Released(Box<Done>),
    /// The host is to hear this.
    Failed(Error),
    /// The host is gone.
    Cancelled,
    /// Built-in plugins slipped through: start again with these disabled. Nothing was sent or said.
    Relaunch(Vec<String>),
}

/// Something that is waited for beside everything else.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What one CLI process offers to a generation.
pub(crate) struct Seat<'a> {
    pub(crate) lane: &'a Lane,
    pub(crate) arrivals: &'a mut mpsc::Receiver<Arrival>,
    pub(crate) natives: &'a mut mpsc::Receiver<Native>,
    /// Given back with the CLI's first request.
    pub(crate) starting: &'a mut Option<Start>,
    pub(crate) exit: Boxed<Exit>,
    /// Answers what the CLI asks.
    pub(crate) asked: Asked<'a>,
    /// Control requests that the CLI has not answered yet.
    pub(crate) controls: usize,
    /// The isolation of this process was seen to hold.
    pub(crate) isolated: bool,
}

/// One generation.
pub(crate) struct Exchange<'a> {
    seat: Seat<'a>,
    service: Service<'a>,
    prepared: &'a Prepared,
    events: &'a mut EventSender,
    limits: Limits,
    reading: Reading,
    evidence: Evidence,
    queue: VecDeque<Event>,
    /// A request that waits for the isolation to be seen.
    held: Option<Admitted>,
    /// The request whose answer is under way, and the body that was admitted first.
    admitted: Option<Admitted>,
    first_body: Option<Bytes>,
    sending: Option<Boxed<Result<Answer>>>,
    body: Option<AnswerBody>,
    renewal: Renewal,
    /// The CLI's copy of the answer (per request only).
    copy: Option<mpsc::Sender<Result<Bytes, BrokenOff>>>,
    copying: Option<Result<Bytes, BrokenOff>>,
    finished: Option<Finished>,
    done: Option<Box<Done>>,
    upstream_requests: u32,
    /// The host's call; the start and overall deadlines count from here.
    started: Instant,
    /// The line went to the CLI; its answers to control requests are awaited from here.
    seated: Instant,
    progress: Option<Instant>,
    whole: Option<Instant>,
    /// The host has not read what it could have.
    host_is_slow: bool,
    /// The process has shown that it cannot be trusted with another generation.
    unfit: bool,
}

impl<'a> Exchange<'a> {
    /// A generation whose lane is armed and whose line is on its way to the CLI.
    pub(crate) fn new(
        mode: ProcessMode,
        seat: Seat<'a>,
        service: Service<'a>,
        prepared: &'a Prepared,
        events: &'a mut EventSender,
        how: Plan,
        started: Instant,
    ) -> Self {
        Self {
            reading: Reading::new(Turn::new(prepared.tool_names(), how)),
            evidence: Evidence::new(mode),
            limits: prepared.limits,
            queue: VecDeque::new(),
            held: None,
            admitted: None,
            first_body: None,
            sending: None,
            body: None,
            renewal: Renewal::None,
            copy: None,
            copying: None,
            finished: None,
            done: None,
            upstream_requests: 0,
            started,
            seated: Instant::now(),
            progress: None,
            whole: None,
            host_is_slow: false,
            unfit: false,
            seat,
            service,
            prepared,
            events,
        }
    }

    /// Runs the generation to its end. The lane's admission is void afterwards.
    pub(crate) async fn run(mut self) -> (Ended, Remains) {
        let ended = self.table().await;
        self.seat.lane.admission().void();
        *self.seat.starting = None;
        self.service.ticket.spent(&self.reading.turn().usage());
        let ended = match ended {
            Ended::Failed(error) => {
                Ended::Failed(error.with_output_seen(self.reading.turn().output_seen()))
            }
            other => other,
        };
        let remains = Remains {
            body: self.body.take(),
            sent: self.upstream_requests > 0,
            native_is_over: self.evidence.native_is_over(),
            native_is_good: matches!(self.evidence.result, Some(Verdict::Completed)),
            isolated: self.seat.isolated,
            unfit: self.unfit,
        };
        (ended, remains)
    }

    async fn table(&mut self) -> Ended {
        loop {
            match self.flush() {
                Ok(()) => {}
                Err(ended) => return ended,
            }
            let (deadline, late) = self.deadline();
            let step = tokio::select! {
                () = self.events.cancelled().cancelled() => return Ended::Cancelled,
                () = tokio::time::sleep_until(deadline) => return Ended::Failed(late),
                () = self.events.ready(), if !self.queue.is_empty() => Ok(()),
                Some(arrival) = self.seat.arrivals.recv() => self.arrived(arrival),
                native = self.seat.natives.recv(), if !self.evidence.output_ended => match self.heard(native) {
                    Ok(Some(plugins)) => return Ended::Relaunch(plugins),
                    Ok(None) => Ok(()),
                    Err(error) => Err(error),
                },
                exit = &mut self.seat.exit, if self.evidence.exit.is_none() => {
                    self.evidence.exit = Some(exit);
                    Ok(())
                }
                answer = pending(&mut self.sending) => self.answered(answer).await,
                turn = self.renewal.turn() => {
                    self.renewal.begin(turn);
                    Ok(())
                }
                chunk = next_chunk(&mut self.body), if self.queue.is_empty() && self.copying.is_none() => {
                    self.take(chunk)
                }
                () = room(&self.copy), if self.copying.is_some() => {
                    self.pass_on();
                    Ok(())
                }
            };
            if let Err(error) = step {
                return self.fail(error).await;
            }
            // The lane counts refusals even when the queue of arrivals is full.
            let refused = self.seat.lane.admission().refused();
            self.evidence.refused = refused;
            match self.evidence.decide() {
                Decision::Wait => {}
                Decision::Fail(error) => return self.fail(error).await,
                Decision::Release => self.release(),
            }
        }
    }

    /// What was decoded before a failure still belongs to the host, in order and before the failure.
    async fn fail(&mut self, error: Error) -> Ended {
        let total = self.started + self.limits.total;
        loop {
            match self.flush() {
                Err(ended) => return ended,
                Ok(()) if self.queue.is_empty() => return Ended::Failed(error),
                Ok(()) => {}
            }
            tokio::select! {
                () = self.events.cancelled().cancelled() => return Ended::Cancelled,
                () = tokio::time::sleep_until(total) => return Ended::Failed(error),
                () = self.events.ready() => {}
            }
        }
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
        if std::mem::take(&mut self.host_is_slow)
            && let Some(progress) = &mut self.progress
        {
            // While the host did not read, nothing was read from the service; its silence counts from now.
            *progress = Instant::now();
        }
        match self.done.take() {
            Some(done) => Err(Ended::Released(done)),
            None => Ok(()),
        }
    }

    fn deadline(&self) -> (Instant, Error) {
        let total = self.started + self.limits.total;
        let late = |code: ErrorCode, limit: std::time::Duration| {
            Error::new(
                code,
                format!("the deadline of {} s passed", limit.as_secs_f32()),
            )
        };
        let (at, error) = match (self.whole, self.progress) {
            (Some(whole), _) => (whole + FINALISATION_GRACE, self.evidence.overdue()),
            (None, _) if self.seat.controls > 0 && self.upstream_requests == 0 => {
                let start = self.started + self.limits.start;
                let control = self.seated + CONTROL_TIMEOUT;
                match start < control {
                    true => (start, late(ErrorCode::StartTimeout, self.limits.start)),
                    false => (control, late(ErrorCode::ControlTimeout, CONTROL_TIMEOUT)),
                }
            }
            (None, Some(progress)) => (
                progress + self.limits.idle,
                late(ErrorCode::IdleTimeout, self.limits.idle),
            ),
            (None, None) => (
                self.started + self.limits.start,
                late(ErrorCode::StartTimeout, self.limits.start),
            ),
        };
        // A host that does not read is not the service's silence: only the overall deadline counts then.
        if at > total || !self.queue.is_empty() {
            return (total, late(ErrorCode::TotalTimeout, self.limits.total));
        }
        (at, error)
    }

    /// A request came in over the lane.
    fn arrived(&mut self, arrival: Arrival) -> Result<()> {
        if matches!(arrival, Arrival::Request(_)) {
            // It comes with the sign-in as the CLI has it, renewed if that was due.
            *self.seat.starting = None;
            self.renewal = Renewal::None;
        }
        match arrival {
            Arrival::Request(admitted) if self.seat.isolated => self.admit(admitted),
            Arrival::Request(admitted) => {
                self.held = Some(admitted);
                Ok(())
            }
            Arrival::Refused(refusal) => {
                if refusal == super::admission::Refusal::Key {
                    let what = "the CLI sent a key instead of the subscription's bearer";
                    return Err(Error::new(ErrorCode::IsolationAuth, what));
                }
                Ok(())
            }
            Arrival::AnsweredLocally => Ok(()),
            Arrival::Unreadable => Err(Error::new(
                ErrorCode::RelayTransit,
                "the CLI's request could not be read to its end",
            )),
        }
    }

    /// The CLI said something.
    fn heard(&mut self, native: Option<Native>) -> Result<Option<Vec<String>>> {
        match native {
            Some(Native::Init(verdict)) => return self.judged(verdict),
            Some(Native::Assistant) => self.evidence.assistant = true,
            Some(Native::MessageStop) => self.evidence.message_stop = true,
            Some(Native::Retry { status }) => {
                let reason = "the CLI tries again".to_owned();
                self.queue
                    .push_back(Event::Notice(Notice::Retry { status, reason }));
            }
            Some(Native::Result(verdict)) => {
                // It ends a turn whose request has not come: another turn than this one (bug 76).
                self.unfit |= self.upstream_requests == 0 && verdict == Verdict::Completed;
                self.evidence.result = Some(verdict);
            }
            Some(Native::Control { refused: true, .. }) => {
                self.unfit = true;
                let what = "the CLI refused to take over a setting of the request";
                return Err(Error::new(ErrorCode::VersionIncompatible, what));
            }
            Some(Native::Control { .. }) => {
                self.seat.controls = self.seat.controls.saturating_sub(1);
            }
            Some(ask @ (Native::Mcp { .. } | Native::Unsupported { .. })) => {
                self.seat.asked.answer(&ask)?;
            }
            Some(Native::Broken(error)) => {
                self.unfit = true;
                return Err(error);
            }
            Some(Native::End) | None => self.evidence.output_ended = true,
        }
        Ok(None)
    }

    fn judged(&mut self, verdict: InitVerdict) -> Result<Option<Vec<String>>> {
        self.unfit |= !matches!(verdict, InitVerdict::Isolated);
        match verdict {
            InitVerdict::Refused(error) => return Err(error),
            InitVerdict::BuiltinPlugins(plugins) if self.upstream_requests == 0 => {
                return Ok(Some(plugins));
            }
            InitVerdict::BuiltinPlugins(plugins) => {
                let what = format!("built-in plugins are active: {}", plugins.join(", "));
                return Err(Error::new(ErrorCode::IsolationCustomizations, what));
            }
            InitVerdict::Isolated => self.seat.isolated = true,
        }
        match self.held.take() {
            Some(admitted) => self.admit(admitted).map(|()| None),
            None => Ok(None),
        }
    }

    /// The request took the admission and the isolation holds: give it the host's messages and send it.
    fn admit(&mut self, admitted: Admitted) -> Result<()> {
        let restored = match self.prepared.restore(&admitted.body) {
            Ok(restored) => restored,
            Err(prepared::Misfit::NotOurs) => {
                let may_come = self.seat.lane.admission().give_back();
                admitted.answer(Reply::Gone);
                let what = "too many requests without the placeholder came from the CLI";
                return may_come
                    .then_some(())
                    .ok_or_else(|| Error::new(ErrorCode::RelayTransit, what));
            }
            Err(prepared::Misfit::Refused(error)) => {
                admitted.answer(Reply::Gone);
                return Err(error);
            }
        };
        if !has_bearer(&admitted.headers) {
            admitted.answer(Reply::Gone);
            let what = "the CLI's request carries no bearer of the subscription";
            return Err(Error::new(ErrorCode::IsolationAuth, what));
        }
        let same = self
            .first_body
            .as_ref()
            .is_some_and(|first| *first == admitted.body);
        if !self.seat.lane.admission().may_send(same) {
            admitted.answer(Reply::Gone);
            return Ok(());
        }
        if let Err(error) = self.service.ticket.sending() {
            admitted.answer(Reply::Gone);
            return Err(error);
        }
        self.first_body = Some(admitted.body.clone());
        self.upstream_requests += 1;
        self.evidence.asked = true;
        let (upstream, path, headers) = (
            self.service.upstream.clone(),
            admitted.path.clone(),
            admitted.headers.clone(),
        );
        self.sending = Some(Box::pin(async move {
            upstream.send(&path, &headers, restored).await
        }));
        self.admitted = Some(admitted);
        Ok(())
    }

    /// The head of the service's answer came, or none will.
    async fn answered(&mut self, answer: Result<Answer>) -> Result<()> {
        self.sending = None;
        let Some(admitted) = self.admitted.take() else {
            return Ok(());
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                let _ = self.seat.lane.admission().answered(StatusCode::BAD_GATEWAY);
                admitted.answer(self.in_place_of(None));
                self.evidence.answer = Judged::Failed(error);
                return Ok(());
            }
        };
        let again = self.seat.lane.admission().answered(answer.status);
        let ticket = self.service.ticket;
        match ticket.answered(answer.status.as_u16(), &answer.headers) {
            // A failed answer says by itself what is wrong.
            Reaction::End { error, .. } if answer.status == StatusCode::OK => {
                admitted.answer(self.in_place_of(None));
                self.evidence.answer = Judged::Failed(error);
                return Ok(());
            }
            Reaction::Tell(notice) => self.queue.push_back(Event::Notice(notice)),
            Reaction::Go | Reaction::End { .. } => {}
        }
        if answer.status == StatusCode::OK {
            self.body = Some(answer.body);
            self.answer_with_stream(admitted, answer.headers);
            return Ok(());
        }
        let body = tokio::select! {
            body = answer.body.read_error() => body,
            () = self.events.cancelled().cancelled() => return Ok(()),
        };
        let error = classify::failed_answer(answer.status, &answer.headers, &body);
        let whole = Reply::Whole {
            status: answer.status,
            headers: answer.headers,
            body,
        };
        if again {
            // The CLI renews its token and sends the same body once more.
            let reason = "the service answered 401; the CLI renews its sign-in".to_owned();
            self.queue.push_back(Event::Notice(Notice::Retry {
                status: Some(401),
                reason,
            }));
            self.renewal = Renewal::wait(self.service.starts, admitted, whole);
            return Ok(());
        }
        admitted.answer(self.in_place_of(Some(whole)));
        self.evidence.answer = Judged::Failed(error);
        Ok(())
    }

    /// What the CLI is told of a failed answer. A kept process is told that all is well, so that it asks nothing more and
    /// stays usable; only a refused sign-in it has to see.
    fn in_place_of(&self, whole: Option<Reply>) -> Reply {
        match (self.evidence.mode, whole) {
            (
                _,
                Some(
                    whole @ Reply::Whole {
                        status: StatusCode::UNAUTHORIZED,
                        ..
                    },
                ),
            ) => whole,
            (ProcessMode::Warm, _) => Reply::Synthetic,
            (ProcessMode::PerRequest, Some(whole)) => whole,
            (ProcessMode::PerRequest, None) => Reply::Gone,
        }
    }

    fn answer_with_stream(&mut self, admitted: Admitted, headers: HeaderMap) {
        match self.evidence.mode {
            ProcessMode::Warm => admitted.answer(Reply::Synthetic),
            ProcessMode::PerRequest => {
                let (copy, chunks) = mpsc::channel(1);
                self.copy = Some(copy);
                admitted.answer(Reply::Stream { headers, chunks });
            }
        }
    }

    /// A piece of the answer, its end, or its break.
    fn take(&mut self, chunk: Option<std::io::Result<Bytes>>) -> Result<()> {
        let mut out = Vec::new();
        let fed = match chunk {
            Some(Ok(chunk)) => {
                if self.copy.is_some() {
                    self.copying = Some(Ok(chunk.clone()));
                }
                self.reading.feed(chunk, &mut out)
            }
            Some(Err(_)) | None => {
                self.body = None;
                let ended = self.reading.end();
                if ended.is_err() && matches!(chunk, Some(Err(_))) && self.copy.is_some() {
                    self.copying = Some(Err(BrokenOff));
                } else {
                    self.copy = None;
                }
                ended.map(|()| false)
            }
        };
        self.queue.extend(out);
        match fed {
            Ok(progress) => {
                if progress {
                    self.progress = Some(Instant::now());
                }
                self.judge_answer();
            }
            Err(error) => {
                self.body = None;
                if self.copy.is_some() && self.copying.is_none() {
                    self.copying = Some(Err(BrokenOff));
                }
                self.evidence.answer = Judged::Failed(error);
            }
        }
        Ok(())
    }

    fn judge_answer(&mut self) {
        if !self.reading.turn().is_stopped() || self.whole.is_some() {
            return;
        }
        self.whole = Some(Instant::now());
        let Some(finished) = self.reading.turn().finish() else {
            let what = "the answer ended without token counts";
            self.evidence.answer = Judged::Failed(Error::new(ErrorCode::StreamInterrupted, what));
            return;
        };
        self.evidence.answer = Judged::Whole {
            stop: finished.stop.clone(),
            calls: finished.has_calls(),
            visible: finished.has_calls() || !finished.message.text().is_empty(),
        };
        self.finished = Some(finished);
    }

    fn pass_on(&mut self) {
        let Some(copy) = &self.copy else {
            self.copying = None;
            return;
        };
        if let Some(chunk) = self.copying.take() {
            let last = chunk.is_err() || self.body.is_none();
            // A CLI that no longer reads has ended its turn; its records say how.
            let gone = copy.try_send(chunk).is_err();
            if last || gone {
                self.copy = None;
            }
        }
    }

    fn release(&mut self) {
        let Some(finished) = self.finished.take() else {
            return;
        };
        self.queue.extend(finished.suffix);
        if self.evidence.refused > 0 {
            let count = self.evidence.refused;
            self.queue
                .push_back(Event::Notice(Notice::RequestsRefused { count }));
        }
        self.done = Some(Box::new(Done {
            stop: finished.stop,
            message: finished.message,
            usage: finished.usage,
            model: finished.model,
            state: StateOrder::Unchanged,
            upstream_requests: self.upstream_requests,
            laboratory: self.service.upstream.is_laboratory(),
        }));
    }
}

fn has_bearer(headers: &HeaderMap) -> bool {
    headers
        .get(header::AUTHORIZATION)
        .is_some_and(|value| value.as_bytes().starts_with(b"Bearer "))
}

async fn pending<T>(future: &mut Option<Boxed<T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

async fn next_chunk(body: &mut Option<AnswerBody>) -> Option<std::io::Result<Bytes>> {
    match body {
        Some(body) => body.chunk().await,
        None => std::future::pending().await,
    }
}

async fn room(copy: &Option<mpsc::Sender<Result<Bytes, BrokenOff>>>) {
    if let Some(copy) = copy {
        let _ = copy.reserve().await;
    }
}
