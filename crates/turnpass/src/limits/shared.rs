//! One question at a time, shared by everybody who asks meanwhile.
//!
//! The question is a job of its own: whoever waits may leave, and it goes on within its limit. At the limit it is dropped,
//! and with it whatever it started. [`Shared::shutdown`] cancels a job that runs and waits for its end; dropping the value
//! cancels it too. So twenty callers make one process, and none is left (bug 128).

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// Asks once.
pub type Ask<T> = Box<dyn Fn() -> BoxFuture<'static, T> + Send + Sync>;

/// A question that is shared.
pub struct Shared<T> {
    ask: Ask<T>,
    limit: Duration,
    max_age: Duration,
    while_wanted: bool,
    job: Mutex<Option<Job<T>>>,
    jobs: TaskTracker,
    stop: CancellationToken,
    _stop_on_drop: DropGuard,
}

/// The latest job.
struct Job<T> {
    result: Outcome<T>,
    waiters: usize,
    /// Cancelled when nobody waits any more, where that ends it.
    unwanted: CancellationToken,
}

/// `None` until the job is over.
type Outcome<T> = watch::Receiver<Option<Done<T>>>;

#[derive(Clone)]
struct Done<T> {
    /// `None` when it was late.
    answer: Option<T>,
    at: Instant,
}

/// The place of one who waits for a job.
struct Place<'a, T: Clone + Send + Sync + 'static> {
    shared: &'a Shared<T>,
    result: Outcome<T>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// It took longer than the limit, or its task went away with its runtime.
    #[error("no answer in time")]
    Late,
    /// [`Shared::shutdown`] was called.
    #[error("the provider was shut down")]
    Closed,
}

impl<T> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("limit", &self.limit)
            .field("max_age", &self.max_age)
            .finish_non_exhaustive()
    }
}

impl<T: Clone + Send + Sync + 'static> Shared<T> {
    /// A question that takes at most `limit`, and whose answer serves for `max_age` after it came.
    pub fn new(ask: Ask<T>, limit: Duration, max_age: Duration) -> Self {
        let stop = CancellationToken::new();
        Self {
            ask,
            limit,
            max_age,
            while_wanted: false,
            job: Mutex::default(),
            jobs: TaskTracker::new(),
            _stop_on_drop: stop.clone().drop_guard(),
            stop,
        }
    }

    /// Lets a job end with the last one who waits for it.
    #[must_use]
    pub fn while_wanted(mut self) -> Self {
        self.while_wanted = true;
        self
    }

    /// The answer of the job that runs, a young one, or that of a new job.
    ///
    /// Has to be called within a tokio runtime. Dropping the future leaves the job as it is, unless it is the last one's
    /// and the job lives [`Shared::while_wanted`].
    ///
    /// # Errors
    ///
    /// [`Unanswered`].
    pub async fn get(&self) -> Result<T, Unanswered> {
        let mut place = self.join()?;
        let done = place.result.wait_for(Option::is_some).await;
        let answer = done.ok().and_then(|done| done.clone()?.answer);
        match answer {
            Some(answer) => Ok(answer),
            None if self.stop.is_cancelled() => Err(Unanswered::Closed),
            None => Err(Unanswered::Late),
        }
    }

    /// Cancels a job that runs and waits until it is gone. Later calls of [`Shared::get`] fail.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.jobs.close();
        self.jobs.wait().await;
    }

    /// Decided under one lock, so that of many callers exactly one starts a job.
    fn join(&self) -> Result<Place<'_, T>, Unanswered> {
        let mut current = self.lock();
        if self.stop.is_cancelled() {
            return Err(Unanswered::Closed);
        }
        let job = match current.take().filter(|job| self.serves(job)) {
            Some(job) => current.insert(job),
            None => current.insert(self.start()),
        };
        job.waiters += 1;
        Ok(Place {
            shared: self,
            result: job.result.clone(),
        })
    }

    fn serves(&self, job: &Job<T>) -> bool {
        match &*job.result.borrow() {
            // A job whose task is gone without an answer serves nobody.
            None => job.result.has_changed().is_ok(),
            Some(done) => done.answer.is_some() && done.at.elapsed() < self.max_age,
        }
    }

    fn start(&self) -> Job<T> {
        let (publish, result) = watch::channel(None);
        let asked = tokio::time::timeout(self.limit, (self.ask)());
        let (stop, unwanted) = (self.stop.clone(), CancellationToken::new());
        let left = unwanted.clone();
        self.jobs.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = left.cancelled() => {}
                asked = asked => {
                    publish.send_replace(Some(Done {
                        answer: asked.ok(),
                        at: Instant::now(),
                    }));
                }
            }
        });
        Job {
            result,
            waiters: 0,
            unwanted,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Job<T>>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone + Send + Sync + 'static> Drop for Place<'_, T> {
    fn drop(&mut self) {
        let mut current = self.shared.lock();
        let Some(job) = current
            .as_mut()
            .filter(|job| job.result.same_channel(&self.result))
        else {
            return;
        };
        job.waiters -= 1;
        if self.shared.while_wanted && job.waiters == 0 && job.result.borrow().is_none() {
            job.unwanted.cancel();
            // Whoever asks now starts anew, also while the old one is still on its way out.
            *current = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(8);

    /// Counts what was asked and what is still under way.
    #[derive(Default)]
    struct Count {
        asked: AtomicUsize,
        alive: AtomicUsize,
    }

    struct Alive(Arc<Count>);

    impl Drop for Alive {
        fn drop(&mut self) {
            self.0.alive.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn shared(takes: Duration, max_age: Duration) -> (Shared<usize>, Arc<Count>) {
        let count = Arc::new(Count::default());
        let counted = Arc::clone(&count);
        let ask: Ask<usize> = Box::new(move || {
            let number = counted.asked.fetch_add(1, Ordering::SeqCst) + 1;
            counted.alive.fetch_add(1, Ordering::SeqCst);
            let alive = Alive(Arc::clone(&counted));
            Box::pin(async move {
                tokio::time::sleep(takes).await;
                drop(alive);
                number
            })
        });
        (Shared::new(ask, LIMIT, max_age), count)
    }

    #[tokio::test(start_paused = true)]
    async fn bug_128_twenty_callers_every_two_seconds_share_one_probe_that_hangs() {
        let (shared, count) = shared(Duration::from_secs(3600), Duration::ZERO);
        let shared = Arc::new(shared);
        let began = Instant::now();
        let mut callers = Vec::new();
        for _ in 0..3 {
            for _ in 0..20 {
                let shared = Arc::clone(&shared);
                callers.push(tokio::spawn(async move { shared.get().await }));
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert_eq!(count.asked.load(Ordering::SeqCst), 1, "one at a time");
        }
        for caller in callers {
            assert_eq!(caller.await.unwrap(), Err(Unanswered::Late));
        }
        assert_eq!(began.elapsed(), LIMIT);
        assert_eq!(count.alive.load(Ordering::SeqCst), 0, "ended at its limit");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_serves_for_its_age_and_a_late_one_never() {
        let (young, count) = shared(Duration::from_secs(1), Duration::from_secs(60));
        assert_eq!(young.get().await, Ok(1));
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert_eq!(young.get().await, Ok(1));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(young.get().await, Ok(2));
        assert_eq!(count.asked.load(Ordering::SeqCst), 2);
        let (late, count) = shared(LIMIT * 2, Duration::from_secs(60));
        for asked in 1..3 {
            assert_eq!(late.get().await, Err(Unanswered::Late));
            assert_eq!(count.asked.load(Ordering::SeqCst), asked);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_leaves_changes_nothing_for_the_others() {
        let (shared, count) = shared(Duration::from_secs(5), Duration::ZERO);
        let leaves = tokio::time::timeout(Duration::from_secs(1), shared.get()).await;
        assert!(leaves.is_err());
        assert_eq!(shared.get().await, Ok(1));
        assert_eq!(count.asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_cancels_and_joins_and_nobody_asks_after_it() {
        let (shared, count) = shared(Duration::from_secs(5), Duration::ZERO);
        let shared = Arc::new(shared);
        let waiting = Arc::clone(&shared);
        let waiter = tokio::spawn(async move { waiting.get().await });
        tokio::task::yield_now().await;
        shared.shutdown().await;
        assert_eq!(count.alive.load(Ordering::SeqCst), 0, "joined");
        assert_eq!(waiter.await.unwrap(), Err(Unanswered::Closed));
        assert_eq!(shared.get().await, Err(Unanswered::Closed));
        assert_eq!(count.asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_question_ends_its_job() {
        let (shared, count) = shared(Duration::from_secs(5), Duration::ZERO);
        let mut result = shared.join().unwrap().result.clone();
        tokio::task::yield_now().await;
        drop(shared);
        assert!(result.wait_for(Option::is_some).await.is_err());
        assert_eq!(count.alive.load(Ordering::SeqCst), 0);
    }
    #[tokio::test(start_paused = true)]
    async fn bug_128_a_job_that_lives_while_it_is_wanted_ends_with_its_last_waiter() {
        let (shared, count) = shared(Duration::from_secs(5), Duration::ZERO);
        let shared = shared.while_wanted();
        let second = Duration::from_secs(1);
        let leaves = tokio::time::timeout(second, shared.get());
        let stays = tokio::time::timeout(2 * second, shared.get());
        let (left, stayed) = tokio::join!(leaves, stays);
        assert!(left.is_err() && stayed.is_err());
        tokio::task::yield_now().await;
        let counts = |count: &Count| {
            let of = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
            (of(&count.asked), of(&count.alive))
        };
        assert_eq!(counts(&count), (1, 0), "one job, and it is over");
        assert_eq!(shared.get().await, Ok(2), "the next one starts anew");
        assert_eq!(counts(&count), (2, 0));
    }
}
