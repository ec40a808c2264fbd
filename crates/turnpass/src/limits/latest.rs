//! The latest reading of use, asked for at most once a minute. All callers share one question, and all processes of a
//! person one file.
//!
//! A question that got no answer is asked again by whoever has to know before a message is sent. For people who look
//! ([`Latest::look`]) it is remembered like an answer: a shell's loop around `turnpass usage` asks no more often than
//! `--watch`, whatever the CLI does.

use std::path::Path;
use std::time::{Duration, SystemTime};

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

/// The file beside it that remembers questions without an answer.
pub const ASKED_FILE: &str = "usage-asked.json";

/// Between two looks at the file while another process asks. Its answer takes 0.4 s (2.1.332).
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// A reading and when it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dated {
    /// Seconds since the epoch.
    pub at: i64,
    /// What was read.
    pub reading: Reading,
}

/// A question that somebody looked for, from before it was asked: whoever is killed while it asks has asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Asked {
    /// Seconds since the epoch.
    at: i64,
    /// Why it got no answer; absent while nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<Failed>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Failed {
    code: String,
    detail: String,
}

/// Whose turn it is to ask.
#[derive(Debug)]
enum Turn {
    /// Ours; it is written down.
    Ours,
    /// Somebody's, less than a minute ago.
    Theirs(Asked),
    /// Nothing can be written down, so nobody knows.
    Unknown,
}

/// Where readings come from.
#[derive(Debug)]
pub struct Latest {
    file: Option<StateFile>,
    asked: Option<StateFile>,
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
            asked: state_dir.map(|dir| StateFile::new(dir, ASKED_FILE)),
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

    /// The same for somebody who only wants to look: the CLI is asked at most once in [`MAX_AGE`] by all processes together,
    /// also when it gives no answer, and also when whoever asked it is gone.
    ///
    /// # Errors
    ///
    /// As [`Latest::get`]; those of a question that was asked less than a minute ago are told again, with the time from
    /// which on it is asked anew. A CLI that could not be started was not asked.
    pub async fn look(&self) -> Result<Dated> {
        let began = tokio::time::Instant::now();
        loop {
            let now = Moment::now().unix_s;
            if let Some(kept) = self.kept().await.filter(|kept| is_young(kept.at, now)) {
                return Ok(kept);
            }
            match self.turn().await {
                Turn::Unknown => return self.get().await,
                Turn::Ours => {
                    let read = self.get().await;
                    if let Err(error) = &read {
                        self.remember(error).await;
                    }
                    return read;
                }
                // Another process may be about to hear the answer.
                Turn::Theirs(Asked { at, failed: None })
                    if now - at <= FRESH_LIMIT.as_secs().cast_signed()
                        && began.elapsed() <= FRESH_LIMIT =>
                {
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
                Turn::Theirs(asked) => return Err(asked.error(now)),
            }
        }
    }

    async fn turn(&self) -> Turn {
        let decide = |asked: &mut Option<Asked>| {
            let now = Moment::now().unix_s;
            if let Some(theirs) = asked.take_if(|asked| is_young(asked.at, now)) {
                *asked = Some(theirs.clone());
                return Turn::Theirs(theirs);
            }
            *asked = Some(Asked {
                at: now,
                failed: None,
            });
            Turn::Ours
        };
        self.decided(decide).await.unwrap_or(Turn::Unknown)
    }

    /// What became of our question.
    async fn remember(&self, error: &Error) {
        if error.code() == ErrorCode::Closed {
            // We left; what the CLI would have said is not known.
            return;
        }
        let failed = was_asked(error.code()).then(|| Failed {
            code: error.code().as_str().to_owned(),
            detail: error.detail().to_owned(),
        });
        let write = |asked: &mut Option<Asked>| match (failed, asked.as_mut()) {
            (Some(failed), Some(asked)) => asked.failed = Some(failed),
            // What a person puts right is to be seen at once.
            (None, _) => *asked = None,
            (Some(_), None) => {}
        };
        self.decided(write).await;
    }

    /// Changes what is remembered; `None` where nothing can be.
    async fn decided<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Option<Asked>) -> R + Send + 'static,
    ) -> Option<R> {
        let file = self.asked.clone()?;
        let changed = tokio::task::spawn_blocking(move || file.change(|kept| Ok(change(kept))));
        match changed.await.ok()? {
            Ok(changed) => Some(changed),
            Err(error) => {
                tracing::debug!(%error, "a question about use was not remembered");
                None
            }
        }
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

impl Asked {
    /// For somebody who wants to ask again too early.
    fn error(&self, now: i64) -> Error {
        let again = self.at + MAX_AGE.as_secs().cast_signed();
        let (code, why) = match &self.failed {
            Some(failed) => {
                let known = ErrorCode::ALL.iter().copied();
                let code = known.into_iter().find(|code| code.as_str() == failed.code);
                (code, failed.detail.as_str())
            }
            None => (None, "the CLI gave no answer about usage"),
        };
        let (ago, left) = ((now - self.at).max(0), (again - now).max(0));
        let what = format!("{why} ({ago} s ago; it is asked again in {left} s at the earliest)");
        let error = Error::new(code.unwrap_or(ErrorCode::UsageUnconfirmed), what);
        let at = u64::try_from(again).ok().map(Duration::from_secs);
        match at.and_then(|at| SystemTime::UNIX_EPOCH.checked_add(at)) {
            Some(at) => error.with_reset(at),
            None => error,
        }
    }
}

/// Whether a question that failed so may have reached the CLI. What is found out before its start is told apart by its code.
fn was_asked(code: ErrorCode) -> bool {
    !matches!(
        code,
        ErrorCode::ExecutableMissing
            | ErrorCode::ExecutableUnusable
            | ErrorCode::VersionInvalid
            | ErrorCode::VersionTooOld
            | ErrorCode::InheritedCredentials
            | ErrorCode::WorkingDirectory
    )
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

    /// As [`latest`], with this in place of the answer.
    fn failing(dir: &Path, fault: SourceFault) -> (Latest, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let ask: Ask<Result<String, SourceFault>> = Box::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            let fault = fault.clone();
            Box::pin(async { Err(fault) })
        });
        (Latest::with(ask, Some(dir)), asked)
    }

    fn asked_before(dir: &Path, seconds: i64) {
        let file = StateFile::new(dir, ASKED_FILE);
        file.change(|asked: &mut Option<Asked>| {
            asked.as_mut().unwrap().at -= seconds;
            Ok(())
        })
        .unwrap();
    }

    #[tokio::test]
    async fn a_question_without_an_answer_is_asked_once_a_minute_by_those_who_look() {
        let dir = tempfile::tempdir().unwrap();
        let mut counts = Vec::new();
        for look in 0..4 {
            let (latest, asked) = failing(dir.path(), SourceFault::Refused);
            let error = latest.look().await.unwrap_err();
            assert_eq!(error.code(), ErrorCode::UsageUnconfirmed);
            assert_eq!(error.detail().contains("asked again"), look > 0, "{error}");
            assert_eq!(error.resets_at().is_some(), look > 0);
            counts.push(asked.load(Ordering::SeqCst));
        }
        assert_eq!(counts, [1, 0, 0, 0]);
        asked_before(dir.path(), 60);
        let (latest, asked) = failing(dir.path(), SourceFault::Refused);
        latest.look().await.unwrap_err();
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        // Whoever must know before a message is sent asks nevertheless, and its answer is everybody's.
        let (must, asked) = super::tests::latest(Some(dir.path()));
        must.get().await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        latest.look().await.unwrap();
    }

    #[tokio::test]
    async fn a_failure_keeps_its_code_and_one_before_the_start_is_tried_again() {
        for (code, asks) in [
            (ErrorCode::ProcessExit, 1),
            (ErrorCode::ControlTimeout, 1),
            (ErrorCode::ExecutableMissing, 3),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut count = 0;
            for _ in 0..3 {
                let gone = SourceFault::Gone(Error::new(code, "it is so"));
                let (latest, asked) = failing(dir.path(), gone);
                let error = latest.look().await.unwrap_err();
                assert_eq!(error.code(), code);
                assert!(error.detail().starts_with("it is so"), "{error}");
                count += asked.load(Ordering::SeqCst);
            }
            assert_eq!(count, asks, "{code}");
        }
    }

    #[tokio::test]
    async fn a_question_whose_asker_is_gone_was_asked() {
        let dir = tempfile::tempdir().unwrap();
        let hangs: Ask<Result<String, SourceFault>> = Box::new(|| Box::pin(std::future::pending()));
        let asker = Latest::with(hangs, Some(dir.path()));
        tokio::select! {
            biased;
            _ = asker.look() => panic!("it never ends"),
            () = until_asked(dir.path()) => {}
        }
        drop(asker);
        asked_before(dir.path(), FRESH_LIMIT.as_secs().cast_signed() + 1);
        let (latest, asked) = latest(Some(dir.path()));
        let error = latest.look().await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::UsageUnconfirmed);
        assert!(error.detail().contains("gave no answer"), "{error}");
        assert_eq!(asked.load(Ordering::SeqCst), 0);
    }

    async fn until_asked(dir: &Path) {
        while !dir.join(ASKED_FILE).exists() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn who_looks_while_another_process_asks_gets_its_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (answer, answered) = tokio::sync::watch::channel(false);
        let slow: Ask<Result<String, SourceFault>> = Box::new(move || {
            let mut answered = answered.clone();
            Box::pin(async move {
                let _ = answered.wait_for(|answered| *answered).await;
                Ok(r#"{"subscription_type":"pro"}"#.to_owned())
            })
        });
        let first = Latest::with(slow, Some(dir.path()));
        let (second, asked) = latest(Some(dir.path()));
        let read = tokio::join!(first.look(), async {
            until_asked(dir.path()).await;
            let mut looks = Box::pin(second.look());
            let pending = futures_util::poll!(&mut looks).is_pending();
            answer.send_replace(true);
            (pending, looks.await)
        });
        let (first, (pending, second)) = (read.0.unwrap(), read.1);
        assert!(pending);
        assert_eq!(first.reading.plan.as_deref(), Some("pro"));
        assert_eq!(second.unwrap(), first);
        assert_eq!(asked.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn what_cannot_be_remembered_is_asked() {
        for broken in [&b"{"[..], b"{\"at\":\"x\"}", &[0xff; 10]] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(ASKED_FILE), broken).unwrap();
            let (latest, asked) = latest(Some(dir.path()));
            latest.look().await.unwrap();
            assert_eq!(asked.load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn only_a_past_that_is_near_is_young() {
        assert!(is_young(100, 100) && is_young(41, 100));
        assert!(!is_young(40, 100) && !is_young(101, 100));
    }
}
