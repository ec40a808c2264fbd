//! The ledger in its place, in a file that processes share or in memory, and who enters what into it.
//!
//! A request has its place from when it was counted until it is dropped unsent. That it gives the place back is seen by
//! the next request at once, whoever makes it: in memory it is entered there and then, and beside a file it is a slip that
//! needs no lock (`slips`). Tokens are entered in the same way.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::budget::{Budgets, Ledger, Moment, SessionKey};
use super::slips::{Slip, Slips};
use super::state_file::StateFile;
use crate::error::{Error, ErrorCode, Result};

/// The ledger in the state directory.
pub const LEDGER_FILE: &str = "ledger.json";

/// Where requests and tokens are counted.
#[derive(Debug)]
pub(super) struct Book {
    /// `None` where nobody wants to know.
    place: Option<Place>,
    budgets: Budgets,
    /// Entries that are under way.
    tasks: TaskTracker,
}

#[derive(Debug)]
enum Place {
    Memory(Mutex<Ledger>),
    File(StateFile, Slips),
}

/// A request in the ledger. Dropping it takes it out again unless it was sent.
#[derive(Debug)]
pub(super) struct Counted {
    book: Arc<Book>,
    key: SessionKey,
    stage: Arc<Stage>,
    sent: AtomicBool,
}

/// How far a request has come, for the caller who waits for it and for the thread that enters it.
#[derive(Debug, Default)]
struct Stage(Mutex<Come>);

#[derive(Debug, Default)]
enum Come {
    /// Not in the ledger, as yet or for good.
    #[default]
    Uncounted,
    /// In the ledger on this day.
    Counted(String),
    /// Nobody waits for it: it is not to be in the ledger.
    Left,
}

impl Stage {
    fn lock(&self) -> MutexGuard<'_, Come> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is in the ledger; `false` for a caller who has left.
    fn counted(&self, day: &str) -> bool {
        let mut come = self.lock();
        match *come {
            Come::Left => false,
            Come::Uncounted | Come::Counted(_) => {
                *come = Come::Counted(day.to_owned());
                true
            }
        }
    }

    /// Nobody waits any more; the day on which it was counted.
    fn leave(&self) -> Option<String> {
        match std::mem::replace(&mut *self.lock(), Come::Left) {
            Come::Counted(day) => Some(day),
            Come::Uncounted | Come::Left => None,
        }
    }
}

impl Book {
    /// In this directory, or in memory if budgets need it. Whoever waits for `tasks` waits for its entries.
    pub(super) fn open(dir: Option<&Path>, budgets: Budgets, tasks: TaskTracker) -> Arc<Self> {
        let place = match (dir, budgets.counts()) {
            (Some(dir), _) => Some(Place::File(
                StateFile::new(dir, LEDGER_FILE),
                Slips::of(dir),
            )),
            (None, true) => Some(Place::Memory(Mutex::default())),
            (None, false) => None,
        };
        Arc::new(Self {
            place,
            budgets,
            tasks,
        })
    }

    /// Counts a request, or refuses it.
    ///
    /// # Errors
    ///
    /// `budget`; `internal` for a ledger that cannot be used, where a budget depends on it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future takes the request out again.
    pub(super) async fn count(self: &Arc<Self>, key: SessionKey) -> Result<Counted> {
        // From here on dropping it gives back what the thread enters, before or after.
        let counted = Counted {
            book: Arc::clone(self),
            key: key.clone(),
            stage: Arc::default(),
            sent: AtomicBool::new(false),
        };
        let (book, stage) = (Arc::clone(self), Arc::clone(&counted.stage));
        let enter = move || {
            let entered = book.request(&key, &stage, &Moment::now(), |_| {});
            book.unless_uncounted(entered)
        };
        let entered = match self.place {
            Some(Place::File(..)) => self.tasks.spawn_blocking(enter).await,
            _ => Ok(enter()),
        };
        entered.map_err(|_| Error::new(ErrorCode::Internal, "the ledger's task broke off"))??;
        Ok(counted)
    }

    /// A ledger that cannot be written refuses only where a budget depends on it.
    fn unless_uncounted(&self, done: Result<()>) -> Result<()> {
        match done {
            Err(error) if error.code() != ErrorCode::Budget && !self.budgets.counts() => {
                tracing::warn!(%error, "the ledger was not written");
                Ok(())
            }
            done => done,
        }
    }

    /// Enters a request, and takes it out again if its caller has left meanwhile: under the ledger's lock, so that nobody else
    /// ever reads a ledger with the request of a caller who had left before. `between` sees the ledger when the request is
    /// in it and not yet written.
    fn request(
        &self,
        key: &SessionKey,
        stage: &Stage,
        now: &Moment,
        between: impl FnOnce(&Ledger),
    ) -> Result<()> {
        let count = |ledger: &mut Ledger| {
            ledger.request(&self.budgets, key, now)?;
            between(ledger);
            Ok(())
        };
        // Whether the ledger has to be put back to where it was.
        let back = |(), ledger: &mut Ledger| {
            let left = !stage.counted(&now.day);
            if left {
                ledger.unsent(key, &now.day);
            }
            left
        };
        match &self.place {
            None => Ok(()),
            Some(Place::Memory(ledger)) => {
                let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
                count(&mut ledger)?;
                back((), &mut ledger);
                Ok(())
            }
            Some(Place::File(file, slips)) => write(file, slips, now, count, back),
        }
    }

    /// Enters something that nobody waits for and that refuses nothing. The next request sees it, whoever makes it.
    fn enter(self: &Arc<Self>, slip: Slip) {
        match &self.place {
            None => {}
            Some(Place::Memory(ledger)) => {
                let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
                slip.enter(&mut ledger, &Moment::now());
            }
            Some(Place::File(_, slips)) => {
                let left = slips.leave(&slip);
                let book = Arc::clone(self);
                let sweep = move || match left {
                    Ok(()) => book.sweep(None),
                    // A directory that takes no slip may still take a change of the file.
                    Err(_) => book.sweep(Some(&slip)),
                };
                match Handle::try_current() {
                    Ok(runtime) => drop(self.tasks.spawn_blocking_on(sweep, &runtime)),
                    // Where there is no runtime, nothing else waits for this thread.
                    Err(_) => sweep(),
                }
            }
        }
    }

    /// Puts into the file what waits beside it, and this.
    fn sweep(&self, slip: Option<&Slip>) {
        let Some(Place::File(file, slips)) = &self.place else {
            return;
        };
        if slip.is_none() && !slips.any() {
            // Another request has taken it along.
            return;
        }
        let now = Moment::now();
        let enter = |ledger: &mut Ledger| {
            if let Some(slip) = slip {
                slip.enter(ledger, &now);
            }
            Ok(())
        };
        if let Err(error) = write(file, slips, &now, enter, |(), _| false) {
            tracing::warn!(%error, "the ledger was not written");
        }
    }
}

/// Changes the file, with all that waits beside it. `then` sees what was written while nobody else reads it, and says whether
/// it has changed it once more.
fn write<R>(
    file: &StateFile,
    slips: &Slips,
    now: &Moment,
    change: impl FnOnce(&mut Ledger) -> Result<R>,
    then: impl FnOnce(R, &mut Ledger) -> bool,
) -> Result<()> {
    let held = file.hold()?;
    let mut ledger: Ledger = file.read()?.unwrap_or_default();
    let taken = slips
        .enter(&mut ledger, now)
        .map_err(|error| file.wrong(&error))?;
    let done = change(&mut ledger);
    if done.is_err() && taken.is_empty() {
        return done.map(drop);
    }
    if let Err(error) = held.replace(&ledger) {
        taken.not_written(slips);
        return done.and(Err(error));
    }
    taken.written();
    if then(done?, &mut ledger) {
        held.replace(&ledger)?;
    }
    Ok(())
}

impl Counted {
    /// It is on its way to the service.
    pub(super) fn sent(&self) {
        self.sent.store(true, Ordering::Relaxed);
    }

    /// It did not go to the service after all, which is known for sure.
    pub(super) fn not_sent(&self) {
        self.sent.store(false, Ordering::Relaxed);
    }

    /// It took these tokens, which nothing but a request that was sent does.
    pub(super) fn spent(&self, tokens: u64) {
        self.sent();
        let slip = Slip::tokens(self.key.clone(), tokens, &Moment::now());
        self.book.enter(slip);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let (Some(day), false) = (self.stage.leave(), *self.sent.get_mut()) {
            self.book.enter(Slip::unsent(self.key.clone(), day));
        }
    }
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
