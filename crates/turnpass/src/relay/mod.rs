//! The one-admission relay: the CLI makes an ordinary request of one placeholder, and a private loopback relay gives it
//! the host's conversation on its way to the service (`seeds/relay.md`).
//!
//! The CLI keeps what is its own: the sign-in, its renewal, the headers, and every byte of the request but the value of
//! `messages`. The relay lets one request through for each generation, to the service's fixed address, holds the bearer in
//! memory for just that request, and gives the host the service's own stream.
//!
//! # The story of one generation
//!
//! 1. `prepared`: everything that can be wrong with a request is found before anything is started.
//! 2. `ways`: what the CLI was certified to do decides how it is used, or refuses it by the name of a check.
//! 3. [`ProcessMode::Warm`]: a kept process is taken from the `stable`, set to what is needed (`fit`), and given the
//!    placeholder, all in one write. [`ProcessMode::PerRequest`]: a process is started for it.
//! 4. `lane` and `admission`: the CLI's request takes the one admission; later ones are refused with 410.
//! 5. `exchange`: the request gets the host's messages and goes out; the answer is decoded as it passes (`reading`).
//! 6. `completion`: the rest of the answer, tool calls first of all, is released when service and CLI agree.
//!
//! Nothing certifies this way of using a subscription, so a relay is off unless it is chosen, and says so once.
//!
//! # Cancel safety
//!
//! Dropping a generation closes its connection to the service at once. A process per request is killed with its whole
//! group; a kept process is put in order and serves on, or is ended when it cannot be within the grace.

mod admission;
pub(crate) mod classify;
pub(crate) mod completion;
mod decide;
mod exchange;
pub(crate) mod fit;
mod kept;
mod lane;
mod launcher;
pub(crate) mod native;
pub(crate) mod notices;
mod options;
pub(crate) mod prepared;
mod reading;
mod remains;
mod renewal;
mod service;
mod stable;
pub(crate) mod upstream;
mod ways;

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use self::decide::need;
use self::exchange::{Ended, Exchange};
use self::fit::{Fit, Key};
use self::kept::Kept;
use self::launcher::{Decided, Launcher, Shape};
use self::prepared::Prepared;
use self::remains::{Remains, is_reusable};
use self::service::Service;
use self::stable::{Need, RELAUNCHES, Stable, closed};
use self::upstream::Upstream;
use self::ways::Ways;
use crate::cli::installed::{Installed, surroundings};
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Event, Notice, Plan, PlanKind};
use crate::limits::Policy;
use crate::limits::guard::{Asked, Guard, GuardOptions, Ticket};
use crate::limits::probe::Probe;
use crate::process::{EndPolicy, SHUTDOWN_LIMIT};
use crate::provider::{EventSender, Generation, Transport};
use crate::request::{Request, ThinkingDisplay, TransportKind};

pub use crate::cli::places::PROCESS_BYTES;
pub use completion::ProcessMode;
pub use notices::UNCERTIFIED;
pub use options::RelayOptions;
pub use prepared::ToolCarrier;
pub use upstream::LoopbackUrl;

/// The relay transport.
///
/// Dropping it kills every process that it owns at once; [`Transport::shutdown`] ends them in order and waits.
pub struct RelayTransport {
    inner: Arc<Inner>,
}

struct Inner {
    stable: Arc<Stable>,
    upstream: Upstream,
    asked: ways::Asked,
    /// How the last request was served; none before the first.
    last: Mutex<Option<Ways>>,
    guard: Arc<Guard>,
    warned: AtomicBool,
}

impl fmt::Debug for RelayTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayTransport")
            .field("asked", &self.inner.asked)
            .field("upstream", &self.inner.upstream)
            .field("idle", &self.inner.stable.idle_count())
            .finish_non_exhaustive()
    }
}

impl RelayTransport {
    /// Sets a relay up. Starts nothing yet. Has to be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// `internal` when TLS cannot be set up, `request_invalid` for options that contradict each other.
    pub fn new(options: RelayOptions) -> Result<Self> {
        let laboratory = options.lab_upstream.is_some();
        let snapshot = surroundings(laboratory, options.lab_home.as_deref())?;
        let authorities = snapshot
            .get("NODE_EXTRA_CA_CERTS")
            .and_then(|path| std::fs::read(path).ok());
        let upstream = Upstream::new(options.lab_upstream.as_ref(), authorities.as_deref())?;
        let installed = Installed::new(
            options.claude_path,
            snapshot.clone(),
            options.inherited_credentials,
        );
        let certificates = options.certificates.as_ref().or(options.state_dir.as_ref());
        let installed = Arc::new(installed.with_certificates(certificates.map(PathBuf::as_path)));
        let default = match upstream.is_laboratory() {
            true => Policy::Off,
            false => Policy::default_of(TransportKind::Relay),
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
        let launcher = Launcher::new(
            installed,
            options.state_dir.as_deref(),
            snapshot,
            options.inherited_credentials,
            options.tool_server,
            options.record,
            tasks.clone(),
        );
        let stable = Stable::new(launcher, tasks, options.memory_budget_bytes, options.spares);
        Ok(Self {
            inner: Arc::new(Inner {
                stable,
                upstream,
                asked: ways::Asked {
                    process: options.process,
                    tools: options.tools,
                },
                last: Mutex::default(),
                guard,
                warned: AtomicBool::new(false),
            }),
        })
    }

    /// Starts, sets and primes a process for requests like this one, ahead of the first. Only for
    /// [`ProcessMode::Warm`]; otherwise it only checks the request and the CLI.
    ///
    /// # Errors
    ///
    /// What the request itself would fail with before it is sent.
    pub async fn warm_up(&self, request: &Request) -> Result<()> {
        let thinking = request.thinking;
        let mut prepared = Prepared::new(request.clone(), self.inner.likely())?;
        let decided = self.inner.decide(&mut prepared).await?;
        self.inner.stable.check_effort(&prepared).await?;
        if decided.ways.process == ProcessMode::Warm {
            let need = need(&decided, &prepared, thinking);
            self.inner.stable.make_ready(&need).await?;
        }
        Ok(())
    }

    /// Asks the installed CLI for its models, at no cost, by a process that dies with the future. What it tells decides from
    /// then on which efforts a model takes.
    pub async fn models(&self) -> crate::models::discovery::Discovered {
        self.inner.stable.discover().await
    }
}

impl Transport for RelayTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Relay
    }

    fn process_word(&self) -> Option<&'static str> {
        let asked = self.inner.asked.process;
        let process = asked.or_else(|| self.inner.last().map(|ways| ways.process));
        process.map(ProcessMode::as_str)
    }

    fn generate(&self, request: Request) -> Generation {
        let (events, generation) = Generation::channel();
        let inner = Arc::clone(&self.inner);
        self.inner
            .stable
            .spawn(async move { inner.generate(request, events).await });
        generation
    }

    fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async {
            let guard = tokio::time::timeout(SHUTDOWN_LIMIT, self.inner.guard.shutdown());
            let (ended, guarded) = tokio::join!(self.inner.stable.shutdown(), guard);
            self.inner.guard.entered().await;
            ended.and(guarded.map_err(|_| {
                let what = "a question about usage did not end in time";
                Error::new(ErrorCode::ProcessCleanup, what)
            }))
        })
    }
}

impl Drop for RelayTransport {
    fn drop(&mut self) {
        self.inner.stable.close();
        self.inner.guard.close();
    }
}

impl Inner {
    async fn generate(&self, request: Request, mut events: EventSender) {
        let started = Instant::now();
        let closing = self.stable.closing().clone();
        let cancelled = events.cancelled().clone();
        let place = request.place.clone();
        let thinking = request.thinking;
        let asked = Asked::of(&request);
        let mut prepared = match Prepared::new(request, self.likely()) {
            Ok(prepared) => prepared,
            Err(error) => return events.fail(error).await,
        };
        let result = tokio::select! {
            result = async {
                let mut decided = self.decide(&mut prepared).await?;
                for notice in self.notices(&prepared, &mut decided) {
                    // A host that is gone is noticed below.
                    let _ = events.try_send(Event::Notice(notice));
                }
                self.stable.check_effort(&prepared).await?;
                let ticket = self.guard.before(asked, events.notifier(), &cancelled).await?;
                if let Some(notice) = ticket.pending() {
                    let _ = events.try_send(Event::Notice(notice));
                }
                let service = self.service(&ticket);
                match decided.ways.process {
                    ProcessMode::Warm => {
                        let need = need(&decided, &prepared, thinking);
                        self.warm(service, &prepared, need, &mut events, started).await
                    }
                    ProcessMode::PerRequest => {
                        let shape = Shape::PerRequest { prepared: &prepared, thinking, place: &place };
                        self.per_request(service, &shape, &prepared, &mut events, started).await
                    }
                }
            } => result,
            () = closing.cancelled() => Err(closed()),
            // Within an exchange a cancel is seen there first; this one is for what comes before.
            () = lasting_cancel(cancelled.clone()) => return,
        };
        if let Err(error) = result {
            if error.code() == ErrorCode::Auth {
                self.stable.forget_sign_in();
            }
            events.fail(error).await;
        }
    }

    async fn warm(
        &self,
        service: Service<'_>,
        prepared: &Prepared,
        need: Need,
        events: &mut EventSender,
        started: Instant,
    ) -> Result<()> {
        let (mut relaunches, mut replacements) = (0, 0);
        while relaunches <= RELAUNCHES {
            let mut kept = within_start(prepared, started, self.stable.take(&need)).await?;
            let how = how_of(&kept, &need.fit);
            let mut may_replace = how.kind == PlanKind::Warm && replacements < REPLACEMENTS;
            kept.running.lane.admission().arm();
            let controls = match kept.write_burst(&need.fit, need.in_band.as_ref()) {
                Ok(controls) => controls,
                Err(error) => {
                    self.stable.end(kept);
                    if may_replace && error.code() == ErrorCode::ProcessExit {
                        replacements += 1;
                        continue;
                    }
                    return Err(error);
                }
            };
            let seat = kept.seat(controls);
            let exchange = Exchange::new(
                ProcessMode::Warm,
                seat,
                service,
                prepared,
                events,
                how,
                started,
            );
            let (ended, mut remains) = exchange.run().await;
            kept.isolated |= remains.isolated;
            match ended {
                Ended::Relaunch(plugins) => {
                    self.stable.learn(plugins);
                    self.stable.end(kept);
                    relaunches += 1;
                }
                Ended::Failed(error) => {
                    may_replace &= !remains.sent && error.code() == ErrorCode::ProcessExit;
                    if may_replace {
                        // It died while nobody needed it, which is no failure of this generation (bug 22).
                        self.stable.end(kept);
                        replacements += 1;
                        continue;
                    }
                    remains.hang_up();
                    let error = kept.running.cause(error).await;
                    self.settle(kept, remains, &need, leaves_it_usable(&error));
                    return Err(error);
                }
                Ended::Cancelled => {
                    // Nobody reads the answer any more, so the service is to stop making it.
                    remains.hang_up();
                    self.settle(kept, remains, &need, true);
                    return Ok(());
                }
                Ended::Released(done) => {
                    self.settle(kept, remains, &need, true);
                    // A host that is gone needs no end.
                    let _ = events.send(Event::Done(*done)).await;
                    return Ok(());
                }
            }
        }
        Err(undisableable())
    }

    fn service<'a>(&'a self, ticket: &'a Ticket) -> Service<'a> {
        Service {
            upstream: &self.upstream,
            starts: self.stable.starts(),
            ticket,
        }
    }

    /// Puts a process back after its CLI has ended the turn, or ends it. The host does not wait for that.
    fn settle(&self, mut kept: Kept, mut remains: Remains, need: &Need, may_be_kept: bool) {
        let (stable, session) = (Arc::clone(&self.stable), need.session.clone());
        if !may_be_kept || remains.unfit {
            return self.stable.end(kept);
        }
        self.stable.spawn(remains.linger());
        let put_back = move |kept: Kept| {
            if is_reusable(&kept.running.lane) {
                kept.running.lane.admission().disarm();
                stable.give_back(kept, session);
            } else {
                stable.end(kept);
            }
        };
        if remains.native_is_good {
            // Before the host hears the end, so that its next request finds the process.
            return put_back(kept);
        }
        let stable = Arc::clone(&self.stable);
        self.stable.spawn(async move {
            if !remains.native_is_over && kept.finish_turn().await {
                put_back(kept);
            } else {
                stable.end(kept);
            }
        });
    }

    async fn per_request(
        &self,
        service: Service<'_>,
        shape: &Shape<'_>,
        prepared: &Prepared,
        events: &mut EventSender,
        started: Instant,
    ) -> Result<()> {
        for _ in 0..=RELAUNCHES {
            let mut running =
                within_start(prepared, started, self.stable.start_alone(shape)).await?;
            let how = Plan {
                kind: PlanKind::Fresh,
                reason: "each request has a process of its own".to_owned(),
            };
            let seat = running.seat(None, 0, false);
            let exchange = Exchange::new(
                ProcessMode::PerRequest,
                seat,
                service,
                prepared,
                events,
                how,
                started,
            );
            let (ended, mut remains) = exchange.run().await;
            match ended {
                Ended::Released(done) => {
                    self.stable.spawn(remains.linger());
                    self.stable.spawn(async move {
                        // Bounded by the policy; a process that cannot be ended is reported by its owner.
                        let _ = running.end(EndPolicy::CANCEL).await;
                    });
                    // A host that is gone needs no end.
                    let _ = events.send(Event::Done(*done)).await;
                    return Ok(());
                }
                Ended::Relaunch(plugins) => {
                    self.stable.learn(plugins);
                    running.end(EndPolicy::KILL).await?;
                }
                Ended::Failed(error) => {
                    remains.hang_up();
                    let error = running.cause(error).await;
                    // What went wrong first is what the host has to hear, above all whether output was seen; a process
                    // that cannot be ended is reported by its owner.
                    let _ = running.end(EndPolicy::KILL).await;
                    return Err(error);
                }
                Ended::Cancelled => {
                    remains.hang_up();
                    // Cancelled: the group is killed by the drop as well; this only waits for the reaping.
                    let _ = running.end(EndPolicy::KILL).await;
                    return Ok(());
                }
            }
        }
        Err(undisableable())
    }
}

/// Whether a process may serve on: not with a refused sign-in, nor one that did not get to its request in time.
fn leaves_it_usable(error: &Error) -> bool {
    !matches!(
        error.code(),
        ErrorCode::Auth | ErrorCode::StartTimeout | ErrorCode::ControlTimeout
    )
}

/// A built-in plugin slipped through although the start before had disabled it.
fn undisableable() -> Error {
    Error::new(
        ErrorCode::IsolationCustomizations,
        "a built-in plugin cannot be disabled",
    )
}

/// Whatever comes before the exchange counts against the start deadline.
async fn within_start<T>(
    prepared: &Prepared,
    started: Instant,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let limit = prepared.limits.start;
    match tokio::time::timeout_at(started + limit, work).await {
        Ok(done) => done,
        Err(_) => {
            let what = format!("no process was ready within {} s", limit.as_secs_f32());
            Err(Error::new(ErrorCode::StartTimeout, what))
        }
    }
}

fn how_of(kept: &Kept, wanted: &Fit) -> Plan {
    let (kind, reason) = match &kept.fit {
        None => (
            PlanKind::Fresh,
            "no kept process was free, so one was started",
        ),
        Some(fit) if *fit == *wanted => (PlanKind::Warm, "a kept process already fits"),
        Some(_) => (PlanKind::Warm, "a kept process was set to this request"),
    };
    Plan {
        kind,
        reason: reason.to_owned(),
    }
}

/// Kept processes that may turn out to be dead within one generation, before anything was sent: a death is noticed
/// within milliseconds, so this is the one that happened at the very moment when the process was taken (bug 22).
const REPLACEMENTS: u32 = 1;

/// An exchange sees a cancel at once and puts its process in order; only when nothing has seen it after this long is the
/// whole task dropped, which kills what it owns.
const CANCEL_GRACE: std::time::Duration = std::time::Duration::from_millis(20);

async fn lasting_cancel(cancelled: tokio_util::sync::CancellationToken) {
    cancelled.cancelled().await;
    tokio::time::sleep(CANCEL_GRACE).await;
}
