//! How many processes start at once, and who renews an expired sign-in.
//!
//! A renewal token is good once. When several processes of the same sign-in find it expired at the same moment, one wins
//! and the others are refused, and a refused renewal blanks the stored sign-in (2.1.332). So starts are few at a time, one
//! at a time when the expiry is near, and the one retry after a 401 waits until all others have settled.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Error, ErrorCode, Result};

/// Starts at once, when the host says nothing. A start takes half a second of a processor; four keep a small machine
/// usable and the chance of a shared renewal low.
pub const DEFAULT_STARTS: NonZeroU32 = NonZeroU32::new(4).expect("four is not zero");

/// So long before the expiry a start is made alone: the CLI may renew at any time then.
pub const EXPIRY_MARGIN: Duration = Duration::from_secs(10 * 60);

/// Longest wait for a turn to start. Those that are ahead hold their turn for seconds; a minute means that somebody does
/// not give it back.
pub const TURN_LIMIT: Duration = Duration::from_secs(60);

/// Hands out turns to start a process. Cheap to clone; clones share the limit.
#[derive(Clone, Debug)]
pub struct Starts {
    turns: Arc<Semaphore>,
    at_once: NonZeroU32,
}

/// A turn to start a process. Dropping it lets the next one start; hold it until the process has shown its first record or
/// has failed.
#[derive(Debug)]
pub struct Turn {
    _held: OwnedSemaphorePermit,
}

impl Default for Starts {
    fn default() -> Self {
        Self::new(DEFAULT_STARTS)
    }
}

impl Starts {
    /// At most so many starts at once.
    pub fn new(at_once: NonZeroU32) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(at_once.get() as usize)),
            at_once,
        }
    }

    /// A turn among others, or alone when the sign-in is about to expire. Turns are given in the order of asking.
    ///
    /// Dropping the future leaves the queue.
    ///
    /// # Errors
    ///
    /// `launch_failed` after [`TURN_LIMIT`].
    pub async fn turn(&self, expires_at: Option<SystemTime>) -> Result<Turn> {
        if is_near(expires_at, SystemTime::now()) {
            return self.alone().await;
        }
        self.take(1).await
    }

    /// A turn after all that run now, with nobody beside it: for the one retry after a 401.
    ///
    /// # Errors
    ///
    /// As [`Starts::turn`].
    pub async fn alone(&self) -> Result<Turn> {
        self.take(self.at_once.get()).await
    }

    async fn take(&self, count: u32) -> Result<Turn> {
        let turns = Arc::clone(&self.turns).acquire_many_owned(count);
        match tokio::time::timeout(TURN_LIMIT, turns).await {
            Ok(Ok(held)) => Ok(Turn { _held: held }),
            // The semaphore is never closed, so this is the limit.
            _ => Err(Error::new(
                ErrorCode::LaunchFailed,
                format!(
                    "no turn to start a process within {} s",
                    TURN_LIMIT.as_secs()
                ),
            )),
        }
    }
}

/// Whether a sign-in may be renewed by the next start. An expiry that is unknown says nothing.
fn is_near(expires_at: Option<SystemTime>, now: SystemTime) -> bool {
    expires_at.is_some_and(|at| at <= now + EXPIRY_MARGIN)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const BOUND: Duration = Duration::from_secs(30);

    #[test]
    fn an_expiry_is_near_before_and_after_it() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        assert!(!is_near(None, now));
        assert!(!is_near(Some(now + 2 * EXPIRY_MARGIN), now));
        assert!(is_near(Some(now + EXPIRY_MARGIN), now));
        assert!(is_near(Some(now), now));
        assert!(is_near(Some(SystemTime::UNIX_EPOCH), now));
    }

    /// Runs eight starts and says how many were at it at once at most.
    async fn most_at_once(starts: &Starts, expires_at: Option<SystemTime>) -> usize {
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let all = (0..8).map(|_| {
            let (starts, running, most) = (starts.clone(), running.clone(), most.clone());
            tokio::spawn(async move {
                let turn = starts.turn(expires_at).await.unwrap();
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // Everybody who may run beside this one gets the chance to.
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                running.fetch_sub(1, Ordering::SeqCst);
                drop(turn);
            })
        });
        let all = futures_util::future::join_all(all);
        for result in tokio::time::timeout(BOUND, all).await.unwrap() {
            result.unwrap();
        }
        most.load(Ordering::SeqCst)
    }

    #[tokio::test]
    async fn bug_043_starts_are_few_at_a_time() {
        let three = NonZeroU32::new(3).unwrap();
        assert_eq!(most_at_once(&Starts::new(three), None).await, 3);
    }

    #[tokio::test]
    async fn bug_043_starts_are_single_when_the_sign_in_expires() {
        assert_eq!(
            most_at_once(&Starts::default(), Some(SystemTime::now())).await,
            1
        );
    }

    #[tokio::test]
    async fn bug_043_the_retry_waits_for_all_and_goes_before_later_ones() {
        let starts = Starts::default();
        let running = [
            starts.turn(None).await.unwrap(),
            starts.turn(None).await.unwrap(),
        ];
        let mut retry = Box::pin(starts.alone());
        let mut later = Box::pin(starts.turn(None));
        assert!(futures_util::poll!(&mut retry).is_pending());
        assert!(futures_util::poll!(&mut later).is_pending());
        drop(running);
        let retry = tokio::time::timeout(BOUND, retry).await.unwrap().unwrap();
        assert!(futures_util::poll!(&mut later).is_pending());
        drop(retry);
        tokio::time::timeout(BOUND, later).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_waiter_that_leaves_frees_its_place() {
        let starts = Starts::new(NonZeroU32::MIN);
        let turn = starts.turn(None).await.unwrap();
        let mut gone = Box::pin(starts.turn(None));
        assert!(futures_util::poll!(&mut gone).is_pending());
        drop(gone);
        drop(turn);
        tokio::time::timeout(BOUND, starts.turn(None))
            .await
            .unwrap()
            .unwrap();
    }
}
