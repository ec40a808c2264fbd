//! Places for kept processes within a memory budget.

use std::sync::Arc;

use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// What one process takes, for the memory budget, in bytes: 155 to 200 MB resident after its first generation, 270
/// after two hundred (2.1.294 to 2.1.332).
pub const PROCESS_BYTES: u64 = 200 * 1024 * 1024;

/// The places of one transport.
#[derive(Debug)]
pub(crate) struct Places {
    places: Arc<Semaphore>,
    /// All who wait look again whenever a process or a place may have become free: one who is woken alone can be dropped,
    /// or need another process than the one that came, and the rest would sleep on.
    freed: Arc<Notify>,
}

/// A place within the memory budget. However its holder ends, who waits for a place hears of it, and only once it is free.
#[derive(Debug)]
pub(crate) struct Place {
    permit: Option<OwnedSemaphorePermit>,
    freed: Arc<Notify>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.permit = None;
        self.freed.notify_waiters();
    }
}

impl Places {
    /// As many as fit into the budget, at least one.
    pub(crate) fn within(memory_budget_bytes: u64) -> Self {
        let places = usize::try_from(memory_budget_bytes / PROCESS_BYTES)
            .unwrap_or(usize::MAX)
            .max(1);
        Self {
            places: Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS))),
            freed: Arc::new(Notify::new()),
        }
    }

    /// A free place.
    pub(crate) fn take(&self) -> Option<Place> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        Some(Place {
            permit: Some(permit),
            freed: Arc::clone(&self.freed),
        })
    }

    /// Ends when a process or a place may have become free from now on.
    pub(crate) fn freed(&self) -> Notified<'_> {
        self.freed.notified()
    }

    /// Says that a process has become free.
    pub(crate) fn tell(&self) {
        self.freed.notify_waiters();
    }
}
