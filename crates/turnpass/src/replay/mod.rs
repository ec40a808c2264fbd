//! The replay transport: each generation is a fresh process that is given the whole conversation (`seeds/replay.md`).
//!
//! Nothing is resumed on the CLI's side and nothing is kept between two generations. The CLI talks to the service by
//! itself, with its own sign-in; turnpass sees what the CLI prints. Its tools are listed and never executed: a call ends
//! the process, the host runs it, and the next generation replays the conversation with the result.
//!
//! # The story of one generation
//!
//! 1. `prepared`: everything that can be wrong with a request is found before anything is started.
//! 2. `ways`: what the CLI was certified to do decides how it is used, or refuses it by the name of a check.
//! 3. `launcher`: a process with all of the CLI's own tools off, one turn or less to go, and private files.
//! 4. `driver`: nothing is said before the CLI has exactly the host's tools. Then the history: as one message of JSON records
//!    (`transcript`, the document's way) or as the CLI's own frames ([`History::Native`]).
//! 5. `hearing`: the CLI's records become events; what it loaded is judged before any of them.
//! 6. At a stop that the CLI would go on from by itself the process is ended at once; otherwise its own judgement is
//!    awaited. Process and files are gone before the end is published.
//!
//! # Cancel safety
//!
//! Dropping a generation ends its process with everything that it started, and its files.

mod driver;
mod failure;
mod hearing;
mod launcher;
mod options;
mod prepared;
mod running;
mod transcript;
mod ways;

use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::driver::{Driver, Ended, violation};
use self::hearing::Hearing;
use self::launcher::Launcher;
use self::prepared::Prepared;
use self::running::ASK_TO_END;
use self::ways::{Told, Ways};
use crate::certify::standing::extra_body_fails;
use crate::cli::environment::Snapshot;
use crate::cli::installed::Installed;
use crate::cli::starts::Starts;
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Event, Notice, Plan, PlanKind};
use crate::limits::Policy;
use crate::limits::guard::{Asked, Guard, GuardOptions, Ticket};
use crate::limits::probe::Probe;
use crate::models::known::KnownModels;
use crate::process::{EndPolicy, SHUTDOWN_LIMIT};
use crate::provider::{EventSender, Generation, Transport};
use crate::relay::notices;
use crate::request::{Request, TransportKind};
use crate::turn::Turn;

pub use options::{Carrier, History, ReplayOptions};

/// Processes that start at the same time; a start is over when the service begins to answer. It takes one core for a third
/// of a second, and several at once may renew one sign-in at once (bug 43).
const STARTS: NonZeroU32 = NonZeroU32::new(4).expect("four is not zero");
/// How often a start is repeated for built-in plugins that slipped through (replay document: once).
const RELAUNCHES: usize = 1;

/// The replay transport.
///
/// Dropping it kills every process that it owns at once; [`Transport::shutdown`] ends them in order and waits.
pub struct ReplayTransport {
    inner: Arc<Inner>,
}

struct Inner {
    launcher: Launcher,
    /// How the last history was written down; none before the first.
    told: Mutex<Option<Told>>,
    guard: Arc<Guard>,
    closing: CancellationToken,
}

impl fmt::Debug for ReplayTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayTransport")
            .field("asked", &self.inner.launcher.asked)
            .field("upstream", &self.inner.launcher.upstream)
            .finish_non_exhaustive()
    }
}

impl ReplayTransport {
    /// Sets a replay up. Starts nothing yet. Has to be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// `request_invalid` for options that contradict each other, `working_directory` for a laboratory home that is not
    /// there.
    pub fn new(options: ReplayOptions) -> Result<Self> {
        let mut snapshot = Snapshot::of_this_process();
        if let Some(home) = &options.lab_home {
            if options.lab_upstream.is_none() {
                let what = "a laboratory home goes with a laboratory upstream";
                return Err(Error::new(ErrorCode::RequestInvalid, what));
            }
            if !home.is_dir() {
                // The CLI would make it, and then say that it is signed out.
                let what = format!("the laboratory home {} is no directory", home.display());
                return Err(Error::new(ErrorCode::WorkingDirectory, what));
            }
            snapshot.set("HOME", home);
            snapshot.remove("CLAUDE_CONFIG_DIR");
        }
        let asked = options.asked();
        let certificates = options.certificates.as_ref().or(options.state_dir.as_ref());
        let certificates = certificates.map(PathBuf::as_path);
        let installed = Installed::new(
            options.claude_path,
            snapshot.clone(),
            options.inherited_credentials,
        );
        let installed = Arc::new(installed.with_certificates(certificates));
        let default = match options.lab_upstream {
            Some(_) => Policy::Off,
            None => Policy::default_of(TransportKind::Replay),
        };
        let models = KnownModels::new(options.state_dir.as_deref());
        let guard = Guard::new(
            Probe::new(Arc::clone(&installed)),
            GuardOptions {
                policy: options.usage_gate.unwrap_or(default),
                budgets: options.budgets,
                state_dir: options.state_dir,
            },
        );
        Ok(Self {
            inner: Arc::new(Inner {
                launcher: Launcher {
                    installed,
                    models,
                    snapshot,
                    inherited: options.inherited_credentials,
                    asked,
                    told: AtomicBool::new(false),
                    tool_server: options.tool_server,
                    retries: options.retries,
                    upstream: options.lab_upstream,
                    record: options.record,
                    learned: Default::default(),
                    starts: Starts::new(STARTS),
                    tasks: TaskTracker::new(),
                },
                told: Mutex::default(),
                guard,
                closing: CancellationToken::new(),
            }),
        })
    }
}

impl Transport for ReplayTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Replay
    }

    fn process_word(&self) -> Option<&'static str> {
        let asked = self.inner.launcher.asked.history;
        let history = asked.or_else(|| self.inner.told().map(|told| told.history));
        history.map(History::as_str)
    }

    fn generate(&self, request: Request) -> Generation {
        let (events, generation) = Generation::channel();
        let inner = Arc::clone(&self.inner);
        self.inner
            .launcher
            .tasks
            .spawn(async move { inner.generate(request, events).await });
        generation
    }

    fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async {
            self.inner.closing.cancel();
            let tasks = &self.inner.launcher.tasks;
            tasks.close();
            let ended = async {
                tokio::join!(
                    self.inner.launcher.installed.shutdown(),
                    self.inner.guard.shutdown()
                );
                tasks.wait().await;
            };
            tokio::time::timeout(SHUTDOWN_LIMIT, ended)
                .await
                .map_err(|_| {
                    let seconds = SHUTDOWN_LIMIT.as_secs();
                    let what = format!("not everything ended within {seconds} s");
                    Error::new(ErrorCode::ProcessCleanup, what)
                })
        })
    }
}

impl Drop for ReplayTransport {
    fn drop(&mut self) {
        self.inner.closing.cancel();
        self.inner.guard.close();
    }
}

impl Inner {
    async fn generate(&self, request: Request, mut events: EventSender) {
        let started = Instant::now();
        let cancelled = events.cancelled().clone();
        let asked = Asked::of(&request);
        // Whatever is wrong with it is found first; the program may want it written down in another way.
        let likely = self.told().unwrap_or(self.launcher.asked.likely());
        let mut prepared = match Prepared::new(&request, likely) {
            Ok(prepared) => prepared,
            Err(error) => return events.fail(error).await,
        };
        let result = tokio::select! {
            result = async {
                let ways = self.decide(&request, &mut prepared, &mut events).await?;
                drop(request);
                self.launcher.check_effort(&prepared).await?;
                let ticket = self.guard.before(asked, events.notifier(), &cancelled).await?;
                if let Some(notice) = ticket.pending() {
                    let _ = events.try_send(Event::Notice(notice));
                }
                self.replay((&prepared, ways), &ticket, &mut events, started).await
            } => result,
            () = self.closing.cancelled() => Err(closed()),
            // Within a driver a cancel is seen there first; this one is for what comes before.
            () = lasting_cancel(&cancelled) => return,
        };
        if let Err(error) = result {
            if error.code() == ErrorCode::Auth {
                self.launcher.installed.forget_sign_in();
            }
            events.fail(error).await;
        }
    }

    /// Which ways the request takes with the installed CLI, which may refuse it by the name of a check.
    async fn decide(
        &self,
        request: &Request,
        prepared: &mut Prepared,
        events: &mut EventSender,
    ) -> Result<Ways> {
        let has_tools = !prepared.catalogue.is_empty();
        let (ways, notice) = self.launcher.ways(has_tools).await?;
        if prepared.extra_body().is_some() && !ways.extra_body {
            return Err(extra_body_fails());
        }
        if prepared.told != ways.told {
            *prepared = Prepared::new(request, ways.told)?;
        }
        *self.last() = Some(ways.told);
        let catalogue = Some(&prepared.catalogue).filter(|_| !ways.long_descriptions);
        let cut = catalogue.and_then(notices::cut_descriptions);
        for notice in notice.into_iter().chain(cut).chain(self.notices(prepared)) {
            // A host that is gone is noticed below.
            let _ = events.try_send(Event::Notice(notice));
        }
        Ok(ways)
    }

    fn told(&self) -> Option<Told> {
        *self.last()
    }

    fn last(&self) -> MutexGuard<'_, Option<Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notices(&self, prepared: &Prepared) -> Vec<Notice> {
        let changes = prepared.changes.clone();
        let found = [
            self.launcher
                .upstream
                .is_some()
                .then_some(Notice::Laboratory),
            (!changes.is_empty()).then_some(Notice::Normalised { changes }),
        ];
        found.into_iter().flatten().collect()
    }

    /// A process, and another one only where nothing was published: for built-in plugins that slipped through.
    async fn replay(
        &self,
        prepared: (&Prepared, Ways),
        ticket: &Ticket,
        events: &mut EventSender,
        started: Instant,
    ) -> Result<()> {
        for _ in 0..=RELAUNCHES {
            match self.once(prepared, ticket, events, started).await? {
                Attempt::Over => return Ok(()),
                Attempt::Relaunch(plugins) => self.launcher.learn(plugins),
            }
        }
        Err(Error::new(
            ErrorCode::IsolationCustomizations,
            "a built-in plugin cannot be disabled",
        ))
    }

    async fn once(
        &self,
        (prepared, ways): (&Prepared, Ways),
        ticket: &Ticket,
        events: &mut EventSender,
        started: Instant,
    ) -> Result<Attempt> {
        let start = self.launcher.start(prepared, ways.tools);
        let limit = prepared.limits.start;
        let mut running = tokio::time::timeout_at(started + limit, start)
            .await
            .unwrap_or_else(|_| {
                let what = format!("no process was ready within {} s", limit.as_secs_f32());
                Err(Error::new(ErrorCode::StartTimeout, what))
            })?;
        let hearing = Hearing::new(
            Launcher::expected(prepared),
            Turn::new(prepared.tool_names(), plan(ways.told.history)),
        );
        let mut driver = Driver::new(
            &mut running,
            hearing,
            (prepared, ways),
            ticket,
            events,
            started,
        );
        match driver.run().await {
            Ended::Whole(finished) => {
                let laboratory = self.launcher.upstream.is_some();
                let policy = driver.end_policy(&finished);
                let (rest, done) = driver.done(*finished, laboratory);
                // The document's invariant: what is private is gone before success is published.
                if running.end(policy).await? {
                    return Err(violation(""));
                }
                for event in rest {
                    if events.send(event).await.is_err() {
                        return Ok(Attempt::Over);
                    }
                }
                // A host that is gone needs no end.
                let _ = events.send(Event::Done(done)).await;
                Ok(Attempt::Over)
            }
            Ended::Relaunch(plugins) => {
                running.end(ASK_TO_END).await?;
                Ok(Attempt::Relaunch(plugins))
            }
            Ended::Failed(error) => {
                // What went wrong first is what the host has to hear; a process that cannot be ended is reported by its
                // owner. A call of the tool server explains whatever followed it.
                let policy = match error.code() {
                    // The CLI would ask again, or another model.
                    ErrorCode::StreamInterrupted
                    | ErrorCode::ExtraGeneration
                    | ErrorCode::ModelNotFound
                    // It asks already, and nobody wants an answer; with a key it costs money.
                    | ErrorCode::IsolationAuth
                    | ErrorCode::IsolationCustomizations
                    | ErrorCode::IsolationMcp
                    | ErrorCode::IsolationPermissions
                    | ErrorCode::IsolationTools => EndPolicy::KILL,
                    _ => ASK_TO_END,
                };
                match running.end(policy).await {
                    Ok(true) => Err(violation("").with_output_seen(error.output_seen())),
                    _ => Err(error),
                }
            }
            Ended::Cancelled => {
                let _ = running.end(ASK_TO_END).await;
                Ok(Attempt::Over)
            }
        }
    }
}

fn plan(history: History) -> Plan {
    let how = match history {
        History::Transcript => "as one transcript",
        History::Native => "message by message",
    };
    Plan {
        kind: PlanKind::Fresh,
        reason: format!("each generation starts a process, which was given the history {how}"),
    }
}

/// How one process's part ended.
enum Attempt {
    Over,
    Relaunch(Vec<String>),
}

fn closed() -> Error {
    Error::new(ErrorCode::Closed, "the replay was shut down")
}

/// A driver sees a cancel at once and ends its process in order; only when nothing has seen it after this long is the whole
/// task dropped, which kills what it owns.
const CANCEL_GRACE: std::time::Duration = std::time::Duration::from_secs(3);

async fn lasting_cancel(cancelled: &CancellationToken) {
    cancelled.cancelled().await;
    tokio::time::sleep(CANCEL_GRACE).await;
}
