//! The pool: live CLI processes, one conversation each (`seeds/pool.md`).
//!
//! The CLI is used as it is meant to be used: it holds the conversation, and each request of the host is one message to
//! it, or the results of the tools that it waits for. So a first token comes as fast as the CLI asks, and nothing is sent
//! twice.
//!
//! # The story of one generation
//!
//! 1. `prepared`: everything that can be wrong with a request is found before anything is started.
//! 2. `keys` and `table`: the key's seat is waited for; calls of one key are served one after the other, those of several
//!    at the same time.
//! 3. `sync`: what the live process's conversation holds, the state that the host stored, and the history of the request
//!    decide what is done, with the reason in words: go on, resume, fork, or give the whole history to a new process.
//! 4. [`crate::limits`]: before a new user message the process is asked whether credits are off.
//! 5. `session`: messages are delivered, or calls are answered.
//! 6. `exchange`: the answer is decoded as it passes. A generation ends at the end of the model's message; with calls the
//!    CLI's turn stays parked until the next request brings their results.
//!
//! A summary of a conversation has a way of its own, `summary`: beside the live process, in it, or without it.
//!
//! A turn that fails or is cancelled is taken back out of the CLI's conversation, or its process is ended: the CLI's
//! history and the host's never differ.
//!
//! # Cancel safety
//!
//! Dropping a generation interrupts it: the connection to the service closes within some 20 ms, the turn is taken back,
//! and the process serves on.

mod answer;
mod carrier;
mod exchange;
mod failure;
mod hearing;
mod keys;
mod launcher;
mod lines;
mod lock;
mod options;
mod prepared;
mod session;
pub mod status;
mod summary;
mod sync;
mod table;
mod transcript;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::exchange::{After, Ended, Exchange, Outcome};
use self::launcher::{Launcher, Stored};
use self::lock::SessionLock;
use self::prepared::Prepared;
use self::session::{Phase, Session};
use self::sync::{Base, Deliver, Given};
use self::table::{Held, Table, closed};
use crate::cli::installed::{Installed, surroundings};
use crate::conversation::frames::{self, Kind, Stamp};
use crate::conversation::normalise::Sendable;
use crate::conversation::{Block, Role, ToolResult};
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Done, Event, Plan, StateOrder};
use crate::limits::Policy;
use crate::limits::gate::{SourceFault, UsageSource};
use crate::limits::guard::{Asked, Guard, GuardOptions, Ticket};
use crate::limits::probe::Probe;
use crate::models;
use crate::process::{EndPolicy, SHUTDOWN_LIMIT};
use crate::provider::{EventSender, Generation, Transport};
use crate::relay::notices;
use crate::request::{CallKind, Request, StateRetirement, TransportKind};
use crate::turn::Finished;
use crate::wire::control::ControlRequest;

pub use options::{PoolOptions, Reseed, ToolCarrier};

/// How often a start is repeated for built-in plugins that slipped through (replay document: once).
const RELAUNCHES: u32 = 1;
/// How often a request is planned anew because a process turned out to be gone, or a stored conversation could not be
/// taken up, before anything was sent (bugs 22 and 23).
const REPLANS: u32 = 2;

/// The pool transport.
///
/// Dropping it kills every process that it owns at once; [`Transport::shutdown`] ends them in order and waits.
pub struct PoolTransport {
    inner: Arc<Inner>,
}

struct Inner {
    table: Arc<Table>,
    guard: Arc<Guard>,
    reseed: Reseed,
    laboratory: bool,
    tasks: TaskTracker,
    /// Why the pool serves no more: credits came into use.
    stopped: OnceLock<Error>,
}

impl fmt::Debug for PoolTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolTransport")
            .field("live", &self.inner.table.live())
            .field("laboratory", &self.inner.laboratory)
            .finish_non_exhaustive()
    }
}

impl PoolTransport {
    /// Sets a pool up. Starts nothing yet. Has to be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// `request_invalid` for options that contradict each other, `working_directory` for a laboratory home that is not
    /// there.
    pub fn new(options: PoolOptions) -> Result<Self> {
        let laboratory = options.lab_upstream.is_some();
        let snapshot = surroundings(laboratory, options.lab_home.as_deref())?;
        let installed = Arc::new(Installed::new(
            options.claude_path.clone(),
            snapshot.clone(),
            options.inherited_credentials,
        ));
        let default = match laboratory {
            true => Policy::Off,
            false => Policy::default_of(TransportKind::Pool),
        };
        let guard = Guard::new(
            Probe::new(Arc::clone(&installed)),
            GuardOptions {
                policy: options.usage_gate.unwrap_or(default),
                budgets: options.budgets,
                state_dir: options.state_dir.clone(),
            },
        );
        let tasks = TaskTracker::new();
        let launcher = Launcher::new(installed, snapshot, &options, tasks.clone());
        let table = Table::new(launcher, &options, tasks.clone());
        Ok(Self {
            inner: Arc::new(Inner {
                table,
                guard,
                reseed: options.reseed,
                laboratory,
                tasks,
                stopped: OnceLock::new(),
            }),
        })
    }

    /// The number of live conversations.
    pub fn live(&self) -> usize {
        self.inner.table.live()
    }
}

impl Transport for PoolTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Pool
    }

    fn generate(&self, request: Request) -> Generation {
        let (events, generation) = Generation::channel();
        let inner = Arc::clone(&self.inner);
        self.inner
            .tasks
            .spawn(async move { inner.generate(request, events).await });
        generation
    }

    fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async {
            let guard = tokio::time::timeout(SHUTDOWN_LIMIT, self.inner.guard.shutdown());
            let (ended, guarded) = tokio::join!(self.inner.table.shutdown(), guard);
            self.inner.guard.entered().await;
            ended.and(guarded.map_err(|_| {
                let what = "a question about usage did not end in time";
                Error::new(ErrorCode::ProcessCleanup, what)
            }))
        })
    }
}

impl Drop for PoolTransport {
    fn drop(&mut self) {
        self.inner.table.close();
        self.inner.guard.close();
    }
}

/// What a generation has from its beginning to its end.
struct Call<'a> {
    prepared: &'a Prepared<'a>,
    settings: sync::Settings,
    events: &'a mut EventSender,
    started: Instant,
    cancelled: CancellationToken,
    /// Given when the request's live conversation, and with it the host's stored state, is of no more use.
    retired: StateRetirement,
    /// Why a summary's fork failed.
    fork_failed: Option<ErrorCode>,
    /// Upstream requests of tries that failed.
    requests_before: u32,
}

/// What is done after one try.
enum Step {
    /// The host has heard the end.
    Done,
    /// Nothing was sent: plan anew, without the stored state if it could not be taken up.
    Again { forget_state: bool },
}

impl Inner {
    async fn generate(&self, request: Request, mut events: EventSender) {
        let started = Instant::now();
        let closing = self.table.closing().clone();
        let cancelled = events.cancelled().clone();
        let prepared = match Prepared::new(&request) {
            Ok(prepared) => prepared,
            Err(error) => return events.fail(error).await,
        };
        for notice in notices::of(self.laboratory, false, &prepared.history.summary()) {
            // A host that is gone is noticed below.
            let _ = events.try_send(Event::Notice(notice));
        }
        let mut call = Call {
            settings: prepared.settings(),
            prepared: &prepared,
            events: &mut events,
            started,
            cancelled: cancelled.clone(),
            retired: StateRetirement::default(),
            fork_failed: None,
            requests_before: 0,
        };
        let retired = call.retired.clone();
        let result = tokio::select! {
            result = self.call(&mut call) => result,
            () = closing.cancelled() => Err(closed()),
            // Within an exchange a cancel is seen there first; this one is for what comes before.
            () = lasting_cancel(cancelled) => return,
        };
        if let Err(error) = result {
            if error.code() == ErrorCode::Auth {
                self.table.launcher.installed.forget_sign_in();
            }
            let error = error.with_backend_state_retired(retired.is_signaled());
            events.fail(error).await;
        }
    }

    async fn call(&self, call: &mut Call<'_>) -> Result<()> {
        if let Some(error) = self.stopped.get() {
            return Err(error.clone());
        }
        let prepared = call.prepared;
        self.check_effort(prepared).await?;
        if prepared.request.call == CallKind::Summary {
            let served = self.serve_held(call, None).await;
            self.table.rests();
            return served;
        }
        // Who leaves while it waits has left: the seat is another's, and nothing is asked.
        let seat = unless_cancelled(call, within_start(call, self.table.seat(&prepared.key)));
        let Some(seat) = seat.await else {
            return Ok(());
        };
        let mut held = seat?;
        let served = self.serve_held(call, Some(&mut held)).await;
        // Of a pool that was stopped meanwhile no process stays.
        if let Some(session) = held.take_if(|_| self.stopped.get().is_some()) {
            self.table.discard(session);
        }
        if held.is_none() {
            self.table.show(&prepared.key, None);
        }
        drop(held);
        self.table.rests();
        served
    }

    /// Serves the request, as often as it takes: with the key's seat, or a summary, which takes the seats that it needs.
    async fn serve_held(&self, call: &mut Call<'_>, mut held: Option<&mut Held>) -> Result<()> {
        let prepared = call.prepared;
        let mut given: Option<Given> = prepared.request.state.as_ref().map(sync::decode);
        let (mut relaunches, mut replans) = (0, 0);
        loop {
            // Credits may have come into use while this one waited.
            if let Some(error) = self.stopped.get() {
                return Err(error.clone());
            }
            let step = match held.as_deref_mut() {
                Some(held) => self.serve(call, held, given.as_ref()).await,
                None => self.summarise(call, given.as_ref()).await,
            };
            match step {
                Ok(Step::Done) | Err(Failed::Cancelled) => return Ok(()),
                Ok(Step::Again { forget_state }) if replans < REPLANS => {
                    replans += 1;
                    if forget_state {
                        given = Some(Err(sync::Unusable::gone()));
                    }
                }
                Ok(Step::Again { .. }) => {
                    let what = "the CLI ended again and again before it took the message";
                    return Err(Error::new(ErrorCode::ProcessExit, what));
                }
                Err(Failed::Plugins(plugins)) if relaunches < RELAUNCHES => {
                    relaunches += 1;
                    self.table.launcher.learn(plugins);
                }
                Err(Failed::Plugins(_)) => {
                    let what = "a built-in plugin cannot be disabled";
                    return Err(Error::new(ErrorCode::IsolationCustomizations, what));
                }
                Err(Failed::Error(error)) => return Err(error),
            }
        }
    }

    /// One try: plan, process, gate, delivery, exchange.
    async fn serve(
        &self,
        call: &mut Call<'_>,
        held: &mut Held,
        given: Option<&Given>,
    ) -> Result<Step, Failed> {
        let prepared = call.prepared;
        if let Some(dead) = held.take_if(|session| !session.is_alive()) {
            self.table.show(&prepared.key, None);
            self.table.discard(dead);
        }
        let lock = self.lock(held, given);
        let plan = self.plan(call, held, given, lock.is_some());
        tracing::debug!(key = prepared.key.as_str(), plan = ?plan.kind, reason = %plan.reason, "planned");
        let is_live = matches!(plan.base, Base::Live { .. });
        let takes_up = matches!(plan.base, Base::Resume { .. } | Base::Fork { .. });
        let mut session = match self.process(call, held, &plan, given, lock).await {
            Ok(Some(session)) => session,
            Ok(None) => {
                return Ok(Step::Again {
                    forget_state: false,
                });
            }
            // A CLI that does not have the stored conversation ends before it lists the tools (2.1.294 to 2.1.332).
            Err(Failed::Error(error))
                if error.code() == ErrorCode::ProcessExit && (is_live || takes_up) =>
            {
                return Ok(Step::Again {
                    forget_state: takes_up,
                });
            }
            Err(failed) => return Err(failed),
        };
        if call.cancelled.is_cancelled() {
            // Nothing was said to it yet.
            **held = Some(session);
            return Err(Failed::Cancelled);
        }
        let how = plan.told();
        let shown = |session: &Session| session.shown(prepared.key.as_str()).plan(&how);
        self.table
            .show(&prepared.key, Some(shown(&session).running()));
        let gate = match self.stopped.get() {
            Some(error) => Err(error.clone()),
            None => self.gate(call, &mut session).await,
        };
        let ticket = match gate {
            Ok(ticket) => ticket,
            Err(error) => {
                // Nothing was written, so the conversation is as it was, unless the process itself failed.
                match leaves_it_usable(&error) {
                    true => {
                        self.table.show(&prepared.key, Some(shown(&session)));
                        **held = Some(session);
                    }
                    false => self.discard(call, session),
                }
                return Err(error.into());
            }
        };
        let delivered = self.deliver(call, &mut session, plan.deliver);
        let turn_at = match unless_cancelled(call, delivered).await {
            Some(Ok(turn_at)) => turn_at,
            // What it was told of the history until now is not known.
            None => {
                self.discard(call, session);
                return Err(Failed::Cancelled);
            }
            Some(Err(error)) => {
                let gone = error.code() == ErrorCode::ProcessExit;
                let plugins = session.slipped_through();
                self.discard(call, session);
                if let Some(plugins) = plugins {
                    return Err(Failed::Plugins(plugins));
                }
                return match gone && (is_live || takes_up) {
                    true => Ok(Step::Again {
                        forget_state: takes_up,
                    }),
                    false => Err(error.into()),
                };
            }
        };
        let outcome = Exchange::new(
            &mut session,
            call.events,
            &ticket,
            (prepared.limits, call.started),
            || prepared.tool_names(),
            how.clone(),
        )
        .run()
        .await;
        let silent = outcome.is_silent;
        session.generations += 1;
        let result = self
            .settle(call, session, held, turn_at, &how, outcome)
            .await;
        match result {
            // It died while nobody needed it, or could not take the stored conversation up: no failure of this request.
            Err(Failed::Error(error))
                if error.code() == ErrorCode::ProcessExit && silent && (is_live || takes_up) =>
            {
                Ok(Step::Again {
                    forget_state: takes_up,
                })
            }
            other => other,
        }
    }

    /// The lock of the stored conversation, when it may be resumed.
    fn lock(&self, held: &Held, given: Option<&Given>) -> Option<SessionLock> {
        let Some(Ok(stored)) = given.filter(|_| held.is_none()) else {
            return None;
        };
        let dir = self.table.launcher.pool_dir.as_deref()?;
        SessionLock::take(dir, &stored.session.hyphenated().to_string())
    }

    fn plan(
        &self,
        call: &mut Call<'_>,
        held: &Held,
        given: Option<&Given>,
        lock_held: bool,
    ) -> sync::Plan {
        let prepared = call.prepared;
        let live = held.as_ref();
        let awaited = live.map(Session::awaited).unwrap_or_default();
        let parked = live
            .filter(|session| session.phase() != Phase::Idle)
            .map(|session| sync::Parked {
                awaited: &awaited,
                turn: session.turn_at,
            });
        if let Some(session) = live
            && session.serves(&prepared.request.model)
            && let Some(settings) = &session.settings
        {
            // An alias and its full id are the same model.
            call.settings.model = settings.model.clone();
        }
        let live = live.and_then(|session| {
            Some(sync::Live {
                record: &session.record,
                settings: session.settings.as_ref()?,
                session: Uuid::try_parse(session.cli_session())
                    .ok()
                    .filter(|_| session.shape.persists),
                parked,
            })
        });
        sync::plan(
            live.as_ref(),
            given,
            &sync::Asked {
                transport_session: &prepared.request.session,
                messages: &prepared.history.messages,
                settings: &call.settings,
                keeps_state: prepared.persists,
                lock_held,
            },
        )
    }

    /// The process that the plan asks for, set up. `None` when the live one is of no use after all.
    async fn process(
        &self,
        call: &mut Call<'_>,
        held: &mut Held,
        plan: &sync::Plan,
        given: Option<&Given>,
        lock: Option<SessionLock>,
    ) -> Result<Option<Session>, Failed> {
        let prepared = call.prepared;
        let messages = &prepared.history.messages;
        let (stored, record) = match &plan.base {
            Base::Live { rewind, .. } => {
                let Some(mut session) = held.take() else {
                    return Ok(None);
                };
                if let Some(rewind) = rewind {
                    let undone = session.rewind(rewind).await;
                    if let Err(error) = undone {
                        tracing::debug!(code = %error.code(), "the live process could not be rewound");
                        self.discard(call, session);
                        return Ok(None);
                    }
                }
                if let Err(error) = session.set(&prepared.fit, &prepared.catalogue) {
                    tracing::debug!(code = %error.code(), "the live process takes no settings");
                    self.discard(call, session);
                    return Ok(None);
                }
                session.settings = Some(call.settings.clone());
                return Ok(Some(session));
            }
            Base::Resume { session, at } => (Some((session, at, lock)), {
                let stored = given.and_then(|given| given.as_ref().ok());
                stored.map(|stored| stored.adopt(messages))
            }),
            Base::Fork { session, at } => {
                let of_live = held
                    .as_ref()
                    .filter(|live| live.cli_session() == session.hyphenated().to_string())
                    .and_then(|live| Some(live.record.fork(live.record.point()?.len)));
                let of_state = || {
                    let stored = given.and_then(|given| given.as_ref().ok())?;
                    Some(stored.adopt(messages).fork(stored.point.len))
                };
                (Some((session, at, None)), of_live.or_else(of_state))
            }
            Base::Reseed => (None, None),
        };
        if let Some(old) = held.take() {
            self.table.show(&prepared.key, None);
            self.table.end(old);
        }
        let names = stored.map(|(session, at, lock)| {
            (
                session.hyphenated().to_string(),
                at.hyphenated().to_string(),
                lock,
            )
        });
        let (ids, lock) = match names {
            Some((session, at, lock)) => (Some((session, at)), lock),
            None => (None, None),
        };
        let stored = ids.as_ref().map(|(session, at)| Stored {
            session,
            at,
            model: &prepared.fit.model,
            lock,
        });
        let tools = &prepared.catalogue;
        let start = self
            .table
            .start(&prepared.shape, &prepared.key, tools, stored);
        let starts = unless_cancelled(call, within_start(call, start));
        let mut session = starts.await.ok_or(Failed::Cancelled)???;
        self.table.watch(&prepared.key, &session);
        session.record = record.unwrap_or_default();
        session.set(&prepared.fit, &prepared.catalogue)?;
        session.settings = Some(call.settings.clone());
        let checked = within_start(call, session.check_tools(&prepared.catalogue));
        let checked = unless_cancelled(call, checked);
        checked.await.ok_or(Failed::Cancelled)???;
        Ok(Some(session))
    }

    /// Asks the process whether the message may be sent, and counts it.
    async fn gate(&self, call: &Call<'_>, session: &mut Session) -> Result<Ticket> {
        let running = Running(tokio::sync::Mutex::new(session));
        let asked = Asked::of(call.prepared.request);
        let notifier = call.events.notifier();
        let ticket = self
            .guard
            .before_on(asked, notifier, &call.cancelled, Some(&running))
            .await?;
        // The line is what comes next.
        ticket.sending()?;
        Ok(ticket)
    }

    /// Gives the process what it does not have yet. Returns the entry of the record at which the turn began.
    async fn deliver(
        &self,
        call: &Call<'_>,
        session: &mut Session,
        deliver: Deliver,
    ) -> Result<usize> {
        let messages = &call.prepared.history.messages;
        let from = match deliver {
            Deliver::Answers => {
                let last = messages.last().ok_or_else(nothing_to_say)?;
                answer(session, last).await?;
                return Ok(session.turn_at);
            }
            Deliver::AnswersThenText => {
                let last = messages.last().ok_or_else(nothing_to_say)?;
                let results: Vec<_> = last
                    .content
                    .iter()
                    .filter_map(|block| as_result(block))
                    .collect();
                if session.can_end_with(&results)? {
                    return end_with(session, last, &results).await;
                }
                // A line while calls are open would get the CLI's own words around it, so the turn is taken back and told
                // with its results.
                let turn_at = session.turn_at;
                // A process whose turn cannot be taken back is as good as gone: nothing was sent.
                session.undo().await.map_err(|error| {
                    Error::new(ErrorCode::ProcessExit, error.detail().to_owned())
                })?;
                session.record.cut(turn_at);
                turn_at
            }
            Deliver::Messages { from } => from,
        };
        let start = call.started + call.prepared.limits.start;
        let rest = &messages[from..];
        if self.reseed == Reseed::Transcript && rest.len() > 1 {
            return tell_as_one(session, rest);
        }
        let told = tokio::time::timeout_at(start, tell(session, rest));
        told.await.map_err(|_| {
            let limit = call.prepared.limits.start.as_secs_f32();
            let what = format!("the CLI did not take the history within {limit} s");
            Error::new(ErrorCode::StartTimeout, what)
        })?
    }

    /// What becomes of the process and of the host's end after an exchange.
    async fn settle(
        &self,
        call: &mut Call<'_>,
        mut session: Session,
        held: &mut Held,
        turn_at: usize,
        how: &Plan,
        outcome: Outcome,
    ) -> Result<Step, Failed> {
        let upstream_requests = outcome.requests;
        if let Some(error) = &outcome.closes_pool {
            self.discard(call, session);
            self.stop(error);
            return Err(error.clone().into());
        }
        let whole = match outcome.ended {
            Ended::Relaunch(plugins) => {
                self.discard(call, session);
                return Err(Failed::Plugins(plugins));
            }
            Ended::Lost => {
                self.kill(call, session).await;
                return Ok(Step::Again { forget_state: true });
            }
            Ended::Failed(error) if outcome.kill => {
                self.kill(call, session).await;
                return Err(error.into());
            }
            Ended::Failed(error) => {
                let mut usable = leaves_it_usable(&error);
                if usable {
                    // The host need not wait for what is done about it.
                    call.events.fail(error.clone()).await;
                    usable = self.undone(&mut session, turn_at).await;
                }
                self.put_back(call, held, session, how, usable);
                return Err(error.into());
            }
            Ended::Cancelled if outcome.kill => {
                self.kill(call, session).await;
                return Ok(Step::Done);
            }
            Ended::Cancelled => {
                let usable = self.undone(&mut session, turn_at).await;
                self.put_back(call, held, session, how, usable);
                return Ok(Step::Done);
            }
            Ended::Whole(whole) => whole,
        };
        let mut usable = true;
        match whole.after {
            After::Over => {
                let at = whole.uuid.and_then(|uuid| Uuid::try_parse(&uuid).ok());
                session.record.push_answer(&whole.finished.message, at);
            }
            After::Parked => {
                session.record.push_answer(&whole.finished.message, None);
            }
            After::Undo => usable = self.undone(&mut session, turn_at).await,
            After::Kill => {
                // Its conversation can be taken up where the turn began.
                session.record.cut(turn_at);
                let state = self.state(call, &session, true);
                self.kill(call, session).await;
                return self
                    .tell_end(call, whole.finished, state, upstream_requests)
                    .await;
            }
        }
        let state = self.state(call, &session, usable);
        self.put_back(call, held, session, how, usable);
        self.tell_end(call, whole.finished, state, upstream_requests)
            .await
    }

    /// Tells the host its end.
    async fn tell_end(
        &self,
        call: &mut Call<'_>,
        finished: Finished,
        state: StateOrder,
        upstream_requests: u32,
    ) -> Result<Step, Failed> {
        // A host that is gone needs no end.
        let _ = call
            .events
            .send(Event::Done(Done {
                stop: finished.stop,
                message: finished.message,
                usage: finished.usage,
                model: finished.model,
                state,
                upstream_requests,
                laboratory: self.laboratory,
            }))
            .await;
        Ok(Step::Done)
    }

    fn state(&self, call: &Call<'_>, session: &Session, usable: bool) -> StateOrder {
        if !call.prepared.persists {
            return StateOrder::Unchanged;
        }
        let owner = Uuid::try_parse(session.cli_session())
            .ok()
            .map(|uuid| sync::Owner {
                session: uuid,
                transport_session: &call.prepared.request.session,
                model: &call.settings.model,
                fingerprint: call.settings.fingerprint(),
            });
        let state = owner
            .filter(|_| usable)
            .and_then(|owner| sync::encode(&session.record, &owner));
        state.map_or(StateOrder::Clear, |state| StateOrder::Keep { state })
    }

    /// Takes the turn back. False when the CLI's conversation is not known any more.
    async fn undone(&self, session: &mut Session, turn_at: usize) -> bool {
        match session.undo().await {
            Ok(()) => {
                session.record.cut(turn_at);
                true
            }
            Err(error) => {
                tracing::debug!(code = %error.code(), "a turn could not be taken back");
                false
            }
        }
    }

    fn put_back(
        &self,
        call: &Call<'_>,
        held: &mut Held,
        mut session: Session,
        how: &Plan,
        usable: bool,
    ) {
        if !usable || !session.is_alive() || self.stopped.get().is_some() {
            return self.discard(call, session);
        }
        session.lock_own(self.table.launcher.pool_dir.as_deref());
        // Once this conversation has what it needs: a start takes one core for a third of a second.
        self.table.keep_spare(&session.shape);
        let shown = session.shown(call.prepared.key.as_str()).plan(how);
        self.table.show(&call.prepared.key, Some(shown));
        **held = Some(session);
    }

    /// Ends a process at once and waits until it is gone, so that it surely asks nothing more.
    async fn kill(&self, call: &Call<'_>, session: Session) {
        self.table.show(&call.prepared.key, None);
        // A process that cannot be killed is reported by its owner.
        let _ = session.end(EndPolicy::KILL).await;
    }

    fn discard(&self, call: &Call<'_>, session: Session) {
        self.table.show(&call.prepared.key, None);
        self.table.discard(session);
    }

    /// Credits came into use: nothing is sent any more, by any process of this pool.
    fn stop(&self, error: &Error) {
        let _ = self.stopped.set(error.clone());
        self.table.end_all();
    }

    async fn check_effort(&self, prepared: &Prepared<'_>) -> Result<()> {
        prepared.check_context()?;
        let effort = prepared.request.effort;
        if effort.is_none() {
            return Ok(());
        }
        let launcher = &self.table.launcher;
        let found = launcher.installed.checked().await?;
        let catalog = launcher.models.catalog(&found).await;
        models::check_effort(&prepared.request.model, effort, &catalog)
    }
}

/// Why a try failed.
enum Failed {
    Error(Error),
    /// Built-in plugins slipped through.
    Plugins(Vec<String>),
    /// The host left before anything was asked.
    Cancelled,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// A process that is asked while nothing else is said to it.
struct Running<'a>(tokio::sync::Mutex<&'a mut Session>);

impl UsageSource for Running<'_> {
    fn get_usage(&self) -> BoxFuture<'_, Result<String, SourceFault>> {
        Box::pin(async {
            let mut session = self.0.lock().await;
            let ask = ControlRequest::GetUsage {
                skip_behaviors: true,
            };
            match session.control(&ask).await {
                Ok(answer) => Ok(answer.get().to_owned()),
                Err(error) if error.code() == ErrorCode::VersionIncompatible => {
                    Err(SourceFault::Refused)
                }
                Err(error) => Err(SourceFault::Gone(error)),
            }
        })
    }
}

/// Answers the open calls with the results of a message.
async fn answer(session: &mut Session, message: &Sendable<'_>) -> Result<()> {
    session.open_gate()?;
    session.before_answers().await?;
    session.record.push(message, None);
    for block in &message.content {
        if let Block::ToolResult(result) = &**block {
            session.answer(result.clone())?;
        }
    }
    Ok(())
}

fn as_result(block: &Block) -> Option<&ToolResult> {
    match block {
        Block::ToolResult(result) => Some(result),
        _ => None,
    }
}

/// Answers the open calls, which ends the CLI's turn, and asks with what stands beside the results.
async fn end_with(
    session: &mut Session,
    message: &Sendable<'_>,
    results: &[&ToolResult],
) -> Result<usize> {
    session.answer_and_end(results)?;
    session.after_last_answers().await?;
    let turn_at = session.turn_at;
    let content = message.content.iter();
    let rest = Sendable {
        role: message.role,
        content: content
            .filter(|block| as_result(block).is_none())
            .cloned()
            .collect(),
    };
    let uuid = Uuid::new_v4();
    let id = uuid.hyphenated().to_string();
    let stamp = Stamp {
        id: &id,
        model: session.model(),
        mark: None,
    };
    let line = frames::frame(&rest, Kind::Asks, &stamp)?.line;
    session.open_gate()?;
    // The turn that is taken back, if need be, is the one that began before the calls: a rewind to this line alone would
    // leave their results.
    session.ask_on(line.into_bytes(), uuid)?;
    session.record.push(message, None);
    Ok(turn_at)
}

/// Tells a process messages of the history and asks the last one. Returns the entry of the one that asks.
async fn tell(session: &mut Session, messages: &[Sendable<'_>]) -> Result<usize> {
    let (last, history) = messages.split_last().ok_or_else(nothing_to_say)?;
    // An assistant message is taken the moment it is read, while user lines wait for their turn: it goes together with
    // the line that follows it, once the line before it is confirmed (2.1.294, 2.1.310, 2.1.332).
    let mut with_next = Vec::new();
    for message in history {
        let uuid = Uuid::new_v4();
        let id = uuid.hyphenated().to_string();
        let stamp = Stamp {
            id: &id,
            model: session.model(),
            mark: None,
        };
        let line = frames::frame(message, Kind::History, &stamp)?.line;
        with_next.extend_from_slice(line.as_bytes());
        session.record.push(message, Some(uuid));
        if message.role == Role::Assistant {
            session.record.resume_after(uuid);
        } else {
            session.tell(std::mem::take(&mut with_next)).await?;
        }
    }
    let uuid = Uuid::new_v4();
    let id = uuid.hyphenated().to_string();
    let stamp = Stamp {
        id: &id,
        model: session.model(),
        mark: None,
    };
    let line = frames::frame(last, Kind::Asks, &stamp)?.line;
    with_next.extend_from_slice(line.as_bytes());
    let turn_at = session.record.len();
    session.open_gate()?;
    session.ask(with_next, uuid, turn_at)?;
    session.record.push(last, Some(uuid));
    Ok(turn_at)
}

/// Asks with one message that tells all of these. To take its turn back is to take all of them back.
fn tell_as_one(session: &mut Session, messages: &[Sendable<'_>]) -> Result<usize> {
    let uuid = Uuid::new_v4();
    let id = uuid.hyphenated().to_string();
    let stamp = Stamp {
        id: &id,
        model: session.model(),
        mark: None,
    };
    let one = transcript::message(messages);
    let line = frames::frame(&one, Kind::Asks, &stamp)?.line;
    let turn_at = session.record.len();
    session.open_gate()?;
    session.ask(line.into_bytes().into(), uuid, turn_at)?;
    for (n, message) in messages.iter().enumerate() {
        session.record.push(message, (n == 0).then_some(uuid));
    }
    Ok(turn_at)
}

fn nothing_to_say() -> Error {
    Error::new(
        ErrorCode::RequestInvalid,
        "messages: there is nothing to answer",
    )
}

/// Whether a process may serve on after an error, once its turn is taken back.
fn leaves_it_usable(error: &Error) -> bool {
    use ErrorCode as Code;
    !matches!(
        error.code(),
        Code::Auth
            | Code::ControlTimeout
            | Code::LineTooLong
            | Code::ProcessExit
            | Code::ProcessCleanup
            | Code::ProtocolBlocks
            | Code::ProtocolInit
            | Code::ProtocolOrder
            | Code::ProtocolRecord
            | Code::ProtocolResult
            | Code::ProtocolShape
            | Code::IsolationAuth
            | Code::IsolationCustomizations
            | Code::IsolationMcp
            | Code::IsolationPermissions
            | Code::IsolationTools
            | Code::McpStartup
            | Code::VersionIncompatible
    )
}

/// The work, unless the host leaves first; it is dropped then.
async fn unless_cancelled<T>(call: &Call<'_>, work: impl Future<Output = T>) -> Option<T> {
    call.cancelled.run_until_cancelled(work).await
}

/// Whatever comes before the exchange counts against the start deadline.
async fn within_start<T>(call: &Call<'_>, work: impl Future<Output = T>) -> Result<T> {
    let limit = call.prepared.limits.start;
    match tokio::time::timeout_at(call.started + limit, work).await {
        Ok(done) => Ok(done),
        Err(_) => {
            let what = format!("no process was ready within {} s", limit.as_secs_f32());
            Err(Error::new(ErrorCode::StartTimeout, what))
        }
    }
}

/// An exchange sees a cancel at once and puts its process in order; only when nothing has seen it after this long is the
/// whole task dropped, which kills what it owns. Taking a turn back takes 20 to 40 ms (2.1.332).
const CANCEL_GRACE: std::time::Duration = std::time::Duration::from_secs(8);

async fn lasting_cancel(cancelled: CancellationToken) {
    cancelled.cancelled().await;
    tokio::time::sleep(CANCEL_GRACE).await;
}
