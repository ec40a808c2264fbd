//! The live processes of a pool: one seat for each key, places within the memory budget, one spare.

mod spare;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::spare::Spare;
use super::keys::Key;
use super::launcher::{Launcher, Shape, Stored};
use super::session::{Phase, Session};
use super::status::{Board, Shown};
use crate::cli::places::{Place, Places};
use crate::error::{Error, ErrorCode, Result};
use crate::process::{EndPolicy, SHUTDOWN_LIMIT};
use crate::tools::Catalogue;

/// An advisor's process that was not asked for so long is ended (pool document).
pub(crate) const ADVISOR_IDLE: Duration = Duration::from_secs(60 * 60);
/// How often advisors are looked at.
const REAP_INTERVAL: Duration = Duration::from_secs(60);

/// The seat of one key: its process, or none. Whoever holds it serves the key; others wait in order.
pub(crate) type Held = OwnedMutexGuard<Option<Session>>;

#[derive(Debug)]
struct Seat {
    session: Arc<tokio::sync::Mutex<Option<Session>>>,
    used: Instant,
}

/// The seats.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) launcher: Launcher,
    seats: Mutex<HashMap<Key, Seat>>,
    places: Places,
    /// Of the one who waits for a place and makes room for it; the others wait in order behind that one, so that nobody
    /// ends more conversations than are in the way.
    makes_room: tokio::sync::Mutex<()>,
    spare: Mutex<Option<Spare>>,
    keeps_spare: bool,
    board: Board,
    tasks: TaskTracker,
    closing: CancellationToken,
    /// Credits came into use: no process is kept any more.
    halted: AtomicBool,
}

impl Table {
    pub(crate) fn new(
        launcher: Launcher,
        options: &super::PoolOptions,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        let board = Board::new(launcher.pool_dir.as_deref());
        let table = Arc::new(Self {
            launcher,
            seats: Mutex::default(),
            places: Places::within(options.memory_budget_bytes),
            makes_room: tokio::sync::Mutex::default(),
            spare: Mutex::default(),
            keeps_spare: options.spare,
            board,
            tasks,
            closing: CancellationToken::new(),
            halted: AtomicBool::new(false),
        });
        let (weak, closing) = (Arc::downgrade(&table), table.closing.clone());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = closing.cancelled() => return,
                    () = tokio::time::sleep(REAP_INTERVAL) => {}
                }
                let Some(table) = weak.upgrade() else { return };
                table.reap(Instant::now());
            }
        });
        table
    }

    /// Waits for the seat of a key. Waiters are served in order; dropping the future leaves the queue.
    pub(crate) async fn seat(&self, key: &Key) -> Held {
        let session = {
            let mut seats = self.seats();
            let seat = seats.entry(key.clone()).or_insert_with(|| Seat {
                session: Arc::default(),
                used: Instant::now(),
            });
            seat.used = Instant::now();
            Arc::clone(&seat.session)
        };
        session.lock_owned().await
    }

    /// A process for a conversation: the spare when it is of this shape, else a new one.
    ///
    /// # Cancel safety
    ///
    /// A start that is under way when the future is dropped is ended.
    pub(crate) async fn start(
        self: &Arc<Self>,
        shape: &Shape,
        key: &Key,
        tools: &Catalogue,
        stored: Option<Stored<'_>>,
    ) -> Result<Session> {
        if stored.is_none()
            && let Some(spare) = self.take_spare(shape).await?
        {
            return Ok(spare);
        }
        let place = self.place().await?;
        let tools = (!tools.is_empty()).then_some(tools);
        self.launcher
            .start(shape, key.as_str(), tools, stored, place)
            .await
    }

    /// A place within the budget, for which the process that was idle longest is ended if need be.
    async fn place(&self) -> Result<Place> {
        let _first = self.makes_room.lock().await;
        // The place of a process that is being ended comes for certain, and is this one's.
        let mut is_coming = false;
        loop {
            if self.closing.is_cancelled() {
                return Err(closed());
            }
            let freed = self.places.freed();
            if let Some(place) = self.places.take() {
                return Ok(place);
            }
            if !is_coming {
                is_coming = self.evict();
            }
            tokio::select! {
                () = freed => {}
                () = self.closing.cancelled() => return Err(closed()),
            }
        }
    }

    /// Says that a process rests from now on, to whoever waits for a place.
    pub(crate) fn rests(&self) {
        self.places.tell();
    }

    /// Ends the spare, else the idle process that was used least lately, else one that waits for results of tools. False
    /// when all are at work.
    fn evict(&self) -> bool {
        if let Some(spare) = self.take_ready_spare(|_| true) {
            self.end(spare);
            return true;
        }
        let oldest = {
            // To its end, so that nobody who looks for free seats meanwhile takes one for held that is only looked at.
            let seats = self.seats();
            let free = seats.iter().filter_map(|(key, seat)| {
                let held = Arc::clone(&seat.session).try_lock_owned().ok()?;
                held.is_some().then(|| (key.clone(), seat.used, held))
            });
            free.min_by_key(|(_, used, held)| {
                let parked = held.as_ref().is_some_and(|s| s.phase() != Phase::Idle);
                (parked, *used)
            })
        };
        let Some((key, _, mut held)) = oldest else {
            return false;
        };
        let Some(session) = held.take() else {
            return false;
        };
        self.board.remove(&key);
        self.end(session);
        true
    }

    /// Forgets the process of a key the moment it dies, so that its place, its lock and its files do not wait for a request.
    pub(crate) fn watch(self: &Arc<Self>, key: &Key, session: &Session) {
        let (death, key, weak) = (session.death(), key.clone(), Arc::downgrade(self));
        // Ends with the process, as every process does.
        self.tasks.spawn(async move {
            death.await;
            let Some(table) = weak.upgrade() else { return };
            let seat = table
                .seats()
                .get(&key)
                .map(|seat| Arc::clone(&seat.session));
            let Some(seat) = seat else { return };
            let held = tokio::select! {
                held = seat.lock_owned() => Some(held),
                () = table.closing.cancelled() => None,
            };
            if let Some(mut held) = held
                && let Some(dead) = held.take_if(|session| !session.is_alive())
            {
                table.board.remove(&key);
                table.discard(dead);
            }
            table.tidy();
        });
    }

    /// Ends a process in the background, within bounds.
    pub(crate) fn end(&self, session: Session) {
        // One that waits for results of tools does not end with its input (2.1.332), and nothing of its turn is wanted.
        let policy = match session.phase() {
            Phase::Idle => EndPolicy::SESSION,
            Phase::Running => EndPolicy::CANCEL,
        };
        self.tasks.spawn(async move {
            // Bounded by the policy; a process that cannot be ended is reported by its owner.
            let _ = session.end(policy).await;
        });
    }

    /// Ends a process whose conversation is of no more use, at once.
    pub(crate) fn discard(&self, session: Session) {
        self.tasks.spawn(async move {
            // As above.
            let _ = session.end(EndPolicy::CANCEL).await;
        });
    }

    /// Ends every process that nobody is using; the others end when they are let go.
    pub(crate) fn end_all(&self) {
        self.halted.store(true, Ordering::Relaxed);
        let free: Vec<_> = {
            let seats = self.seats();
            let free = |seat: &Seat| Arc::clone(&seat.session).try_lock_owned().ok();
            seats.values().filter_map(free).collect()
        };
        for mut held in free {
            if let Some(session) = held.take() {
                self.end(session);
            }
        }
        self.end_spare();
        self.board.clear();
    }

    /// Shows what became of a key.
    pub(crate) fn show(&self, key: &Key, shown: Option<Shown>) {
        match shown {
            Some(shown) => self.board.set(key, shown),
            None => self.board.remove(key),
        }
    }

    /// Forgets the seats that have no process and that nobody waits for, so that keys that come and go leave nothing.
    pub(crate) fn tidy(&self) {
        self.seats().retain(|_, seat| {
            Arc::strong_count(&seat.session) > 1
                || seat.session.try_lock().map_or(true, |held| held.is_some())
        });
    }

    fn reap(&self, now: Instant) {
        let old: Vec<_> = self
            .seats()
            .iter()
            .filter(|(key, seat)| key.is_advisor() && now >= seat.used + ADVISOR_IDLE)
            .filter_map(|(key, seat)| {
                let held = Arc::clone(&seat.session).try_lock_owned().ok()?;
                Some((key.clone(), held))
            })
            .collect();
        for (key, mut held) in old {
            if let Some(session) = held.take() {
                self.board.remove(&key);
                self.end(session);
            }
        }
        self.tidy();
    }

    /// Cancelled when the pool is closing.
    pub(crate) fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Says that the pool is closing: nothing is started any more.
    pub(crate) fn close(&self) {
        self.closing.cancel();
    }

    /// Ends every process and waits for it, at most [`SHUTDOWN_LIMIT`].
    pub(crate) async fn shutdown(&self) -> Result<()> {
        self.close();
        let ended = async {
            let seats: Vec<_> = self.seats().drain().map(|(_, seat)| seat.session).collect();
            self.end_spare();
            for seat in seats {
                // Its holder sees the closing and lets go.
                if let Some(session) = seat.lock().await.take() {
                    self.end(session);
                }
            }
            self.launcher.shutdown().await;
            self.tasks.close();
            self.tasks.wait().await;
        };
        let ended = tokio::time::timeout(SHUTDOWN_LIMIT, ended).await;
        self.board.clear();
        ended.map_err(|_| {
            let what = format!("not everything ended within {} s", SHUTDOWN_LIMIT.as_secs());
            Error::new(ErrorCode::ProcessCleanup, what)
        })
    }

    /// The number of live processes, spare not counted.
    pub(crate) fn live(&self) -> usize {
        self.board.len()
    }

    fn seats(&self) -> MutexGuard<'_, HashMap<Key, Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorCode::Closed, "the provider was shut down")
}
