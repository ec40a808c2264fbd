//! Control requests that wait for an answer.

use std::collections::BTreeMap;

/// Control requests that may wait at one time on one process. The CLI answers each within milliseconds, so more means that it no longer does.
pub const MAX_PENDING: usize = 64;

/// Ids for control requests of one process: `<prefix>-1`, `<prefix>-2`, ...
#[derive(Debug, Clone)]
pub struct RequestIds {
    prefix: &'static str,
    last: u64,
}

impl RequestIds {
    /// Ids that begin with `prefix`.
    pub fn new(prefix: &'static str) -> Self {
        Self { prefix, last: 0 }
    }

    /// An id that this value has not given before.
    pub fn next_id(&mut self) -> String {
        self.last += 1;
        format!("{}-{}", self.prefix, self.last)
    }
}

/// Why a request was not registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// [`MAX_PENDING`] requests wait already.
    #[error("{MAX_PENDING} control requests wait for an answer already; the CLI no longer answers")]
    Full,
    /// The id waits already.
    #[error("a control request with this id waits already")]
    Duplicate,
}

/// Who waits for which answer. Each id resolves once; answers that nobody waits for are dropped and counted.
#[derive(Debug, Clone)]
pub struct Pending<T> {
    waiting: BTreeMap<String, T>,
    dropped: u64,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self {
            waiting: BTreeMap::new(),
            dropped: 0,
        }
    }
}

impl<T> Pending<T> {
    /// Keeps `waiter` until the answer with this id comes.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; the waiter is dropped then.
    pub fn register(
        &mut self,
        request_id: impl Into<String>,
        waiter: T,
    ) -> Result<(), RegisterError> {
        let request_id = request_id.into();
        if self.waiting.contains_key(&request_id) {
            return Err(RegisterError::Duplicate);
        }
        if self.waiting.len() >= MAX_PENDING {
            return Err(RegisterError::Full);
        }
        self.waiting.insert(request_id, waiter);
        Ok(())
    }

    /// Takes out who waits for an answer that has come; `None`, and counted, when nobody does (any more).
    pub fn resolve(&mut self, request_id: &str) -> Option<T> {
        let waiter = self.waiting.remove(request_id);
        self.dropped += u64::from(waiter.is_none());
        waiter
    }

    /// Gives up waiting, as after a timeout. An answer that still comes is then dropped and counted.
    pub fn forget(&mut self, request_id: &str) -> Option<T> {
        self.waiting.remove(request_id)
    }

    /// Takes out all who wait, as when the process has ended.
    pub fn drain(&mut self) -> impl Iterator<Item = (String, T)> {
        std::mem::take(&mut self.waiting).into_iter()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Answers that nobody waited for.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_resolves_once_and_strangers_are_counted() {
        let mut ids = RequestIds::new("turnpass");
        let mut pending = Pending::default();
        let [first, second] = [ids.next_id(), ids.next_id()];
        assert_eq!(first, "turnpass-1");
        pending.register(first.as_str(), 'a').unwrap();
        pending.register(second.as_str(), 'b').unwrap();
        assert_eq!(
            pending.register(first.as_str(), 'c'),
            Err(RegisterError::Duplicate)
        );
        assert_eq!(pending.resolve(&first), Some('a'));
        assert_eq!(pending.resolve(&first), None);
        assert_eq!(pending.resolve("never asked"), None);
        assert_eq!(pending.dropped(), 2);
        assert_eq!(pending.forget(&second), Some('b'));
        assert_eq!(pending.resolve(&second), None);
        assert_eq!((pending.dropped(), pending.len()), (3, 0));
    }

    #[test]
    fn waiters_are_bounded_and_all_come_out_at_the_end() {
        let mut pending = Pending::default();
        for n in 0..MAX_PENDING {
            pending.register(n.to_string(), n).unwrap();
        }
        assert_eq!(pending.register("one more", 0), Err(RegisterError::Full));
        assert_eq!(pending.drain().count(), MAX_PENDING);
        assert!(pending.is_empty());
        pending.register("one more", 0).unwrap();
    }
}
