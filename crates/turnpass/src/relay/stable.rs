//! The kept processes of a warm relay: which one serves next, when another is started, when one is ended.
//!
//! Any process serves any conversation, since the messages are the host's. So a process goes to the next generation that
//! needs one, set to whatever that needs, and one spare is kept ahead of the demand within the memory budget.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::fit::{self, Fit, Key};
use super::kept::{Kept, Primed, Running};
use super::launcher::{Decided, Launcher, Shape};
use super::prepared::Prepared;
use super::ways::Asked;
use crate::cli::places::{Place, Places};
use crate::cli::starts::Starts;
use crate::error::{Error, ErrorCode, Result};
use crate::models::discovery::Discovered;
use crate::process::{EndPolicy, SHUTDOWN_LIMIT};
use crate::request::TransportSession;
use crate::tools::Catalogue;

/// How long a process that nobody needs is kept. One that was idle for seven minutes was as fast as ever (2.1.332).
pub(crate) const IDLE_TTL: Duration = Duration::from_secs(10 * 60);
/// Longest time for starting and priming a spare; 300 ms were measured, a busy machine takes seconds.
const SPARE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a start is repeated for built-in plugins that slipped through (replay document: once).
pub(crate) const RELAUNCHES: usize = 1;

/// Kept processes.
#[derive(Debug)]
pub(crate) struct Stable {
    launcher: Launcher,
    idle: Mutex<Vec<Kept>>,
    places: Places,
    spares: usize,
    /// The keys of spares that are being made.
    coming: Mutex<Vec<Key>>,
    tasks: TaskTracker,
    closing: CancellationToken,
}

/// A spare that is being made; counted until it is there, or will not come.
struct Coming {
    stable: Arc<Stable>,
    key: Key,
}

impl Coming {
    fn new(stable: &Arc<Stable>, key: &Key) -> Self {
        stable.coming().push(key.clone());
        Self {
            stable: Arc::clone(stable),
            key: key.clone(),
        }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        let mut coming = self.stable.coming();
        if let Some(at) = coming.iter().position(|key| *key == self.key) {
            coming.swap_remove(at);
        }
    }
}

/// What a generation needs of a process.
#[derive(Clone, Debug)]
pub(crate) struct Need {
    pub(crate) key: Key,
    pub(crate) fit: Fit,
    pub(crate) session: TransportSession,
    /// Published in-band; `None` when the tools travel in the body.
    pub(crate) in_band: Option<Catalogue>,
}

impl Stable {
    /// `tasks` are those that the launcher was given: shutdown waits for them.
    pub(crate) fn new(
        launcher: Launcher,
        tasks: TaskTracker,
        memory_budget_bytes: u64,
        spares: usize,
    ) -> Arc<Self> {
        let stable = Arc::new(Self {
            launcher,
            idle: Mutex::default(),
            places: Places::within(memory_budget_bytes),
            spares,
            coming: Mutex::default(),
            tasks,
            closing: CancellationToken::new(),
        });
        // The reaper holds no process and no reference that keeps the stable alive.
        let weak = Arc::downgrade(&stable);
        let closing = stable.closing.clone();
        tokio::spawn(async move {
            let mut next = Instant::now() + IDLE_TTL;
            loop {
                tokio::select! {
                    () = closing.cancelled() => return,
                    () = tokio::time::sleep_until(next) => {}
                }
                let Some(stable) = weak.upgrade() else { return };
                next = stable.reap(Instant::now());
            }
        });
        stable
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn coming(&self) -> MutexGuard<'_, Vec<Key>> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of idle processes.
    pub(crate) fn idle_count(&self) -> usize {
        self.idle().len()
    }

    /// A process for a generation: an idle one that fits, else a new one that was told nothing yet. Waits while the
    /// memory budget is used up by processes at work.
    ///
    /// # Cancel safety
    ///
    /// A start that is under way when the future is dropped is ended.
    pub(crate) async fn take(self: &Arc<Self>, need: &Need) -> Result<Kept> {
        let kept = loop {
            if self.closing.is_cancelled() {
                return Err(closed());
            }
            let freed = self.places.freed();
            if let Some(kept) = self.take_idle(need) {
                break kept;
            }
            // Asked before a place is taken, so that all who wait share one answer (bug 128).
            self.launcher.signed_in().await?;
            if let Some(place) = self.place() {
                break self.start(need, place).await?;
            }
            tokio::select! {
                () = freed => {}
                () = self.closing.cancelled() => return Err(closed()),
            }
        };
        self.keep_spares(need);
        Ok(kept)
    }

    fn take_idle(&self, need: &Need) -> Option<Kept> {
        let (taken, spent) = {
            let mut idle = self.idle();
            let mut spent = Vec::new();
            while let Some(at) = idle.iter_mut().position(Kept::is_spent) {
                spent.push(idle.remove(at));
            }
            let all = idle.iter().map(|kept| {
                (
                    &kept.key,
                    kept.fit.as_ref(),
                    kept.session.as_ref() == Some(&need.session),
                )
            });
            let chosen = fit::choose(all, &need.key, &need.fit);
            (chosen.map(|at| idle.remove(at)), spent)
        };
        for kept in spent {
            self.end(kept);
        }
        taken
    }

    /// A place within the budget: a free one, else that of the idle process that waits longest.
    fn place(&self) -> Option<Place> {
        if let Some(place) = self.places.take() {
            return Some(place);
        }
        let oldest = {
            let mut idle = self.idle();
            let at = idle
                .iter()
                .enumerate()
                .min_by_key(|(_, kept)| kept.last_used)?
                .0;
            idle.remove(at)
        };
        let (running, place) = oldest.into_parts();
        self.tasks.spawn(async move {
            // Its end is bounded by the policy; one that cannot be ended was reported by the process owner.
            let _ = running.end(EndPolicy::CANCEL).await;
        });
        Some(place)
    }

    async fn start(&self, need: &Need, place: Place) -> Result<Kept> {
        let shape = Shape::Warm {
            thinking: need.key.thinking,
            in_band: need.in_band.as_ref(),
        };
        let running = self.start_alone(&shape).await?;
        Ok(Kept::new(
            running,
            need.key.clone(),
            need.in_band.as_ref(),
            place,
        ))
    }

    /// Learns built-in plugins that slipped through, so that the next start disables them.
    pub(crate) fn learn(&self, plugins: Vec<String>) {
        self.launcher.learn(plugins);
    }

    /// The installed CLI as it is now, and how it is to be used.
    pub(crate) async fn decide(&self, asked: Asked, has_tools: bool) -> Result<Decided> {
        self.launcher.decide(asked, has_tools).await
    }

    /// Asks the CLI for its models.
    pub(crate) async fn discover(&self) -> Discovered {
        self.launcher.discover().await
    }

    /// Whether the installed CLI's model takes the request's effort.
    pub(crate) async fn check_effort(&self, prepared: &Prepared) -> Result<()> {
        self.launcher.check_effort(prepared).await
    }

    /// Drops what is known of the sign-in, after a live refusal.
    pub(crate) fn forget_sign_in(&self) {
        self.launcher.forget_sign_in();
    }

    /// Gives a process back after a generation that ended well on its side.
    pub(crate) fn give_back(&self, mut kept: Kept, session: TransportSession) {
        if kept.is_spent() {
            self.end(kept);
            return;
        }
        kept.session = Some(session);
        {
            let mut idle = self.idle();
            // Under the lock: a shutdown that has emptied the list would leave this one behind.
            if !self.closing.is_cancelled() {
                idle.push(kept);
                self.places.tell();
                return;
            }
        }
        self.end(kept);
    }

    /// Ends a process in the background, within bounds.
    pub(crate) fn end(&self, kept: Kept) {
        let (running, place) = kept.into_parts();
        self.tasks.spawn(async move {
            // As above.
            let _ = running.end(EndPolicy::CANCEL).await;
            drop(place);
        });
    }

    /// Starts and primes processes ahead of the demand, as far as the budget has free places.
    pub(crate) fn keep_spares(self: &Arc<Self>, need: &Need) {
        let idle = self.idle();
        let fitting = idle.iter().filter(|kept| kept.key == need.key).count();
        drop(idle);
        let coming = self.coming();
        let fitting = fitting + coming.iter().filter(|key| **key == need.key).count();
        drop(coming);
        for _ in fitting..self.spares {
            let Some(place) = self.places.take() else {
                return;
            };
            let (stable, need) = (Arc::clone(self), need.clone());
            let closing = self.closing.clone();
            let coming = Coming::new(self, &need.key);
            self.tasks.spawn(async move {
                let coming = coming;
                let made = tokio::time::timeout(SPARE_TIMEOUT, stable.spare(&need, place));
                let made = tokio::select! {
                    () = closing.cancelled() => return,
                    made = made => made,
                };
                match made {
                    Ok(Ok(kept)) => stable.give_back(kept, need.session.clone()),
                    // A spare that could not be made costs nobody anything: the next generation starts its own and says
                    // what is wrong.
                    Ok(Err(error)) => tracing::debug!(code = %error.code(), "no spare process"),
                    Err(_) => tracing::debug!("a spare process did not get ready in time"),
                }
                drop(coming);
            });
        }
    }

    async fn spare(&self, need: &Need, place: Place) -> Result<Kept> {
        let mut kept = self.start(need, place).await?;
        for _ in 0..=RELAUNCHES {
            match kept.prime(&need.fit, need.in_band.as_ref()).await? {
                Primed::Ready => return Ok(kept),
                Primed::Relaunch(plugins) => {
                    self.learn(plugins);
                    let (running, place) = kept.into_parts();
                    running.end(EndPolicy::CANCEL).await?;
                    kept = self.start(need, place).await?;
                }
            }
        }
        Err(Error::new(
            ErrorCode::IsolationCustomizations,
            "a built-in plugin cannot be disabled",
        ))
    }

    /// A primed process that fits, if there is none yet.
    pub(crate) async fn make_ready(&self, need: &Need) -> Result<()> {
        if self.idle().iter().any(|kept| kept.key == need.key) {
            return Ok(());
        }
        let Some(place) = self.place() else {
            return Ok(());
        };
        let kept = tokio::time::timeout(SPARE_TIMEOUT, self.spare(need, place))
            .await
            .map_err(|_| {
                let what = format!("no process was ready within {} s", SPARE_TIMEOUT.as_secs());
                Error::new(ErrorCode::StartTimeout, what)
            })??;
        self.give_back(kept, need.session.clone());
        Ok(())
    }

    /// A process for one request.
    pub(crate) async fn start_alone(&self, shape: &Shape<'_>) -> Result<Running> {
        self.launcher.start(shape).await
    }

    /// Turns to start, and to renew a sign-in.
    pub(crate) fn starts(&self) -> &Starts {
        self.launcher.starts()
    }

    /// Ends what was idle too long. Returns when to look again.
    fn reap(&self, now: Instant) -> Instant {
        let (old, next) = {
            let mut idle = self.idle();
            let mut old = Vec::new();
            while let Some(at) = idle
                .iter()
                .position(|kept| now >= kept.last_used + IDLE_TTL)
            {
                old.push(idle.remove(at));
            }
            let oldest = idle.iter().map(|kept| kept.last_used).min();
            (old, oldest.unwrap_or(now) + IDLE_TTL)
        };
        for kept in old {
            self.end(kept);
        }
        next
    }

    /// Runs a generation's own task; shutdown waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Cancelled when the stable is closing.
    pub(crate) fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Ends every process and waits for it, at most [`SHUTDOWN_LIMIT`].
    pub(crate) async fn shutdown(&self) -> Result<()> {
        self.close();
        let all: Vec<Kept> = self.idle().drain(..).collect();
        for kept in all {
            self.end(kept);
        }
        self.tasks.close();
        let ended = async {
            self.launcher.shutdown().await;
            self.tasks.wait().await;
        };
        tokio::time::timeout(SHUTDOWN_LIMIT, ended)
            .await
            .map_err(|_| {
                let what = format!("not everything ended within {} s", SHUTDOWN_LIMIT.as_secs());
                Error::new(ErrorCode::ProcessCleanup, what)
            })
    }

    /// Refuses new work and cancels what runs; every process is killed at once when it is dropped.
    pub(crate) fn close(&self) {
        self.closing.cancel();
    }
}

impl Drop for Stable {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorCode::Closed, "the relay was shut down")
}
