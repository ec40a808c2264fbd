//! The ledger in its place, in a file that processes share or in memory, and who enters what into it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::budget::{Budgets, Ledger, Moment, SessionKey};
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
    File(StateFile),
}

/// A request in the ledger. Dropping it takes it out again unless it was sent.
#[derive(Debug)]
pub(super) struct Counted {
    book: Arc<Book>,
    key: SessionKey,
    /// The day that it was counted on; `None` when nothing was written.
    day: Option<String>,
    sent: AtomicBool,
    /// On its way to the caller, who may have left: it is waited for like the entry itself.
    underway: Option<TaskTrackerToken>,
}

impl Book {
    /// In this directory, or in memory if budgets need it. Whoever waits for `tasks` waits for its entries.
    pub(super) fn open(dir: Option<&Path>, budgets: Budgets, tasks: TaskTracker) -> Arc<Self> {
        let place = match (dir, budgets.counts()) {
            (Some(dir), _) => Some(Place::File(StateFile::new(dir, LEDGER_FILE))),
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
        let mut counted = Counted {
            book: Arc::clone(self),
            key,
            day: None,
            sent: AtomicBool::new(false),
            underway: None,
        };
        let enter = move || {
            let now = Moment::now();
            let book = Arc::clone(&counted.book);
            let entered = book.change(|ledger| ledger.request(&book.budgets, &counted.key, &now));
            if book.unless_uncounted(entered)? {
                counted.day = Some(now.day);
                counted.underway = Some(book.tasks.token());
            }
            // A caller that has left by now drops it, and with it the entry.
            Ok::<_, Error>(counted)
        };
        let entered = match self.place {
            Some(Place::File(_)) => self.tasks.spawn_blocking(enter).await,
            _ => Ok(enter()),
        };
        let broken = |_| Error::new(ErrorCode::Internal, "the ledger's task broke off");
        let mut counted = entered.map_err(broken)??;
        counted.underway = None;
        Ok(counted)
    }

    /// Whether it was written. A ledger that cannot be written refuses only where a budget depends on it.
    fn unless_uncounted(&self, done: Result<()>) -> Result<bool> {
        match done {
            Ok(()) => Ok(self.place.is_some()),
            Err(error) if error.code() != ErrorCode::Budget && !self.budgets.counts() => {
                tracing::warn!(%error, "the ledger was not written");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Ledger) -> Result<()>) -> Result<()> {
        match &self.place {
            None => Ok(()),
            Some(Place::File(file)) => file.change(change),
            Some(Place::Memory(ledger)) => {
                change(&mut ledger.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Enters something that nobody waits for and that refuses nothing.
    fn enter_later(self: &Arc<Self>, change: impl FnOnce(&mut Ledger) + Send + 'static) {
        let book = Arc::clone(self);
        let entry = move || {
            let entered = book.change(|ledger| {
                change(ledger);
                Ok(())
            });
            if let Err(error) = entered {
                tracing::warn!(%error, "the ledger was not written");
            }
        };
        match (&self.place, Handle::try_current()) {
            (None, _) => {}
            (Some(Place::File(_)), Ok(runtime)) => {
                self.tasks.spawn_blocking_on(entry, &runtime);
            }
            // Where there is no runtime, nothing else waits for this thread.
            (Some(_), _) => entry(),
        }
    }
}

impl Counted {
    /// It is on its way to the service.
    pub(super) fn sent(&self) {
        self.sent.store(true, Ordering::Relaxed);
    }

    /// It took these tokens, which nothing but a request that was sent does.
    pub(super) fn spent(&self, tokens: u64) {
        self.sent();
        let key = self.key.clone();
        self.book
            .enter_later(move |ledger| ledger.tokens(&key, tokens, &Moment::now()));
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Some(day) = self.day.take().filter(|_| !*self.sent.get_mut()) else {
            return;
        };
        let key = self.key.clone();
        self.book
            .enter_later(move |ledger| ledger.unsent(&key, &day));
    }
}
