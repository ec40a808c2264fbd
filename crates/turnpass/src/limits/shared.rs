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
    job: Mutex<Option<Job<T>>>,
    jobs: TaskTracker,
    stop: CancellationToken,
    _stop_on_drop: DropGuard,
}

/// `None` until the job is over; `Some(None)` when it was late.
type Job<T> = watch::Receiver<Option<Done<T>>>;

#[derive(Clone)]
struct Done<T> {
    answer: Option<T>,
    at: Instant,
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
            job: Mutex::default(),
            jobs: TaskTracker::new(),
            _stop_on_drop: stop.clone().drop_guard(),
            stop,
        }
    }

    /// The answer of the job that runs, a young one, or that of a new job.
    ///
    /// Has to be called within a tokio runtime. Dropping the future leaves the job as it is.
    ///
    /// # Errors
    ///
    /// [`Unanswered`].
    pub async fn get(&self) -> Result<T, Unanswered> {
        let mut job = self.join()?;
        let done = job.wait_for(Option::is_some).await;
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
    fn join(&self) -> Result<Job<T>, Unanswered> {
        let mut current = self.lock();
        if self.stop.is_cancelled() {
            return Err(Unanswered::Closed);
        }
        if let Some(job) = current.as_ref().filter(|job| self.serves(job)) {
            return Ok(job.clone());
        }
        let job = self.start();
        *current = Some(job.clone());
        Ok(job)
    }

    fn serves(&self, job: &Job<T>) -> bool {
        match &*job.borrow() {
            // A job whose task is gone without an answer serves nobody.
            None => job.has_changed().is_ok(),
            Some(done) => done.answer.is_some() && done.at.elapsed() < self.max_age,
        }
    }

    fn start(&self) -> Job<T> {
        let (publish, job) = watch::channel(None);
        let asked = tokio::time::timeout(self.limit, (self.ask)());
        let stop = self.stop.clone();
        self.jobs.spawn(async move {
            if let Some(asked) = stop.run_until_cancelled(asked).await {
                publish.send_replace(Some(Done {
                    answer: asked.ok(),
                    at: Instant::now(),
                }));
            }
        });
        job
    }

    fn lock(&self) -> MutexGuard<'_, Option<Job<T>>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut job = shared.join().unwrap();
        tokio::task::yield_now().await;
        drop(shared);
        assert!(job.wait_for(Option::is_some).await.is_err());
        assert_eq!(count.alive.load(Ordering::SeqCst), 0);
    }
}
