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
//! 3. `ways`: what the CLI was certified to do decides which ways are taken with it, or refuses it by the name of a check.
//! 4. `sync`: what the live process's conversation holds, the state that the host stored, and the history of the request
//!    decide what is done, with the reason in words: go on, resume, fork, or give the whole history to a new process.
//! 5. [`crate::limits`]: before a new user message the process is asked whether credits are off.
//! 6. `session`: messages are delivered, or calls are answered.
//! 7. `exchange`: the answer is decoded as it passes. A generation ends at the end of the model's message; with calls the
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
mod deliver;
mod exchange;
mod failure;
mod hearing;
mod keys;
mod launcher;
mod lines;
mod lock;
mod options;
mod prepared;
mod serve;
mod session;
mod settle;
pub mod status;
mod summary;
mod sync;
mod table;
mod transcript;
mod ways;

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
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
use self::settle::leaves_it_usable;
use self::sync::{Base, Deliver, Given};
use self::table::{Held, Table, closed};
use self::ways::Ways;
use crate::cli::installed::{Installed, surroundings};
use crate::conversation::frames::{self, Kind, Stamp};
use crate::conversation::normalise::Sendable;
use crate::conversation::{Block, ResultBlock, Role, ToolResult};
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
        let installed = Installed::new(
            options.claude_path.clone(),
            snapshot.clone(),
            options.inherited_credentials,
        );
        let certificates = options.certificates.as_ref().or(options.state_dir.as_ref());
        let installed = Arc::new(installed.with_certificates(certificates.map(PathBuf::as_path)));
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
    /// Decided with each try.
    ways: Ways,
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
            settings: prepared.settings(&Ways::NONE),
            ways: Ways::NONE,
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
