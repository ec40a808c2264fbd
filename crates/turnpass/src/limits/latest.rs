//! The latest reading of use, asked for at most once a minute. All callers share one question, and all processes of a
//! person one file.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::budget::Moment;
use super::gate::{FRESH_LIMIT, SourceFault};
use super::probe::Probe;
use super::shared::{Ask, Shared, Unanswered};
use super::state_file::StateFile;
use super::windows::Reading;
use crate::error::{Error, ErrorCode, Result};

/// How long a reading is shown again before another one is asked for. The CLI shares its own for as long (2.1.332).
pub const MAX_AGE: Duration = Duration::from_secs(60);

/// The file in the state directory.
pub const USAGE_FILE: &str = "usage.json";

/// A reading and when it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dated {
    /// Seconds since the epoch.
    pub at: i64,
    /// What was read.
    pub reading: Reading,
}

/// Where readings come from.
#[derive(Debug)]
pub struct Latest {
    file: Option<StateFile>,
    question: Shared<Told>,
}

/// An answer, and when it came in seconds since the epoch.
type Told = (i64, Result<String, SourceFault>);

impl Latest {
    /// Readings of this probe, kept in `state_dir` if there is one.
    pub fn new(probe: &Probe, state_dir: Option<&Path>) -> Self {
        Self::with(probe.once(), state_dir)
    }

    fn with(ask: Ask<Result<String, SourceFault>>, state_dir: Option<&Path>) -> Self {
        let ask: Ask<Told> = Box::new(move || {
            let asked = ask();
            Box::pin(async move {
                let answer = asked.await;
                (Moment::now().unix_s, answer)
            })
        });
        Self {
            file: state_dir.map(|dir| StateFile::new(dir, USAGE_FILE)),
            question: Shared::new(ask, FRESH_LIMIT, MAX_AGE),
        }
    }

    /// A reading that is younger than [`MAX_AGE`], or a new one.
    ///
    /// Has to be called within a tokio runtime. Dropping the future leaves a question that others share as it is.
    ///
    /// # Errors
    ///
    /// What the start of the process fails with, `usage_unconfirmed` when it gave no answer in time, `closed`.
    pub async fn get(&self) -> Result<Dated> {
        let now = Moment::now().unix_s;
        if let Some(kept) = self.kept().await.filter(|kept| is_young(kept.at, now)) {
            return Ok(kept);
        }
        let no_answer = |what: &str| Error::new(ErrorCode::UsageUnconfirmed, what);
        let (at, text) = match self.question.get().await {
            Ok((at, Ok(text))) => (at, text),
            Ok((_, Err(SourceFault::Gone(error)))) => return Err(error),
            Ok((_, Err(SourceFault::Refused))) => {
                return Err(no_answer("the CLI refused the question about usage"));
            }
            Err(Unanswered::Late) => {
                return Err(no_answer("the CLI gave no answer about usage in time"));
            }
            Err(Unanswered::Closed) => {
                return Err(Error::new(ErrorCode::Closed, "the provider was shut down"));
            }
        };
        let dated = Dated {
            at,
            reading: Reading::read(&text),
        };
        self.keep(dated.clone()).await;
        Ok(dated)
    }

    /// Cancels a question that runs, and waits until its process is gone.
    pub async fn shutdown(&self) {
        self.question.shutdown().await;
    }

    async fn kept(&self) -> Option<Dated> {
        let file = self.file.clone()?;
        // A file that cannot be used costs a question, no more.
        tokio::task::spawn_blocking(move || file.read().ok().flatten())
            .await
            .ok()
            .flatten()
    }

    async fn keep(&self, dated: Dated) {
        let Some(file) = self.file.clone() else {
            return;
        };
        let kept = tokio::task::spawn_blocking(move || {
            file.change(|kept: &mut Option<Dated>| {
                *kept = Some(dated);
                Ok(())
            })
        });
        if let Ok(Err(error)) = kept.await {
            tracing::debug!(%error, "a reading of use was not kept");
        }
    }
}

/// A clock that was set back makes a reading from the future, which is no young one.
fn is_young(at: i64, now: i64) -> bool {
    let age = now.checked_sub(at).and_then(|age| u64::try_from(age).ok());
    age.is_some_and(|age| age < MAX_AGE.as_secs())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn latest(dir: Option<&Path>) -> (Latest, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let ask: Ask<Result<String, SourceFault>> = Box::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Box::pin(async { Ok(r#"{"subscription_type":"max"}"#.to_owned()) })
        });
        (Latest::with(ask, dir), asked)
    }

    #[tokio::test]
    async fn two_processes_ask_once_a_minute() {
        let dir = tempfile::tempdir().unwrap();
        let (first, asked) = latest(Some(dir.path()));
        let (second, asked_again) = latest(Some(dir.path()));
        let read = first.get().await.unwrap();
        assert_eq!(read.reading.plan.as_deref(), Some("max"));
        assert_eq!(first.get().await.unwrap(), read);
        assert_eq!(second.get().await.unwrap(), read);
        let counts = [asked, asked_again].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(counts, [1, 0]);
    }

    #[tokio::test]
    async fn without_a_file_or_with_a_broken_one_each_process_asks_for_itself() {
        let (alone, asked) = latest(None);
        let first = alone.get().await.unwrap();
        // A reading that is shown again is as old as it is.
        let second = || Moment::now().unix_s > first.at;
        let begin = std::time::Instant::now();
        while !second() && begin.elapsed() < Duration::from_secs(5) {
            tokio::task::yield_now().await;
        }
        for _ in 0..3 {
            assert_eq!(alone.get().await.unwrap().at, first.at);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(USAGE_FILE), "{").unwrap();
        let (broken, asked) = latest(Some(dir.path()));
        broken.get().await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn only_a_past_that_is_near_is_young() {
        assert!(is_young(100, 100) && is_young(41, 100));
        assert!(!is_young(40, 100) && !is_young(101, 100));
    }
}
