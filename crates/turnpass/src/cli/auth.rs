//! `claude auth status`: what it says, and one shared check of it.
//!
//! The answer is the CLI's own; nothing here knows where a credential is kept. A status of *signed in* comes from stored
//! state and says nothing about the next request: a live 401 outranks it ([`AuthCheck::forget`]).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::ask::{Answer, Unanswered};
use crate::error::{Error, ErrorCode, Result};
use crate::process::Exit;

/// Longest check of the shared job. It takes 0.2 to 0.3 s (2.1.332), and renews an expired sign-in over the network.
pub const AUTH_LIMIT: Duration = Duration::from_secs(10);

/// Longest fresh check; the pool document's bound.
pub const FRESH_AUTH_LIMIT: Duration = Duration::from_secs(8);

/// How long a success is believed. It is dropped at once by a live 401, which is how an expired or ended sign-in shows
/// itself; the age only bounds how long a change of account or plan goes unseen.
pub const AUTH_MAX_AGE: Duration = Duration::from_secs(10 * 60);

/// Bytes of an unclear answer that are kept for diagnosis.
pub const AUTH_TEXT_BYTES: usize = 512;

/// The arguments of the question. No settings file is read for it, as none is for a generation: with an `apiKeyHelper` in a
/// person's settings it would say `api_key_helper`, which is not how their generations sign in. The flag has to come first
/// (2.1.294, 2.1.310 and 2.1.332).
pub const AUTH_STATUS: &[&str] = &["--setting-sources=", "auth", "status"];

/// What `claude auth status` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthStatus {
    /// With a Claude subscription, by the CLI's stored state.
    SignedIn(SignedIn),
    /// Explicitly not signed in.
    SignedOut,
    /// Signed in in a way that this program must not use.
    Ineligible {
        /// `authMethod`, or the source of a key that would win over the sign-in.
        auth_method: String,
        /// `apiProvider`.
        api_provider: String,
    },
    /// No clear answer.
    Unknown {
        /// What was wrong with it.
        reason: String,
        /// The answer's beginning. It may name the account; for a diagnosis that the person asked for.
        text: String,
    },
}

/// A sign-in that may be used. Nothing in it names the account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignedIn {
    /// `subscriptionType`: `pro`, `max`, `team`, `enterprise`.
    pub subscription: Option<String>,
    /// `planTier`, from 2.1.332 on.
    pub plan_tier: Option<String>,
    /// `loginExpiresAt`, from 2.1.332 on; null in every capture so far.
    pub expires_at: Option<SystemTime>,
}

impl AuthStatus {
    /// The sign-in, or the error that says what to do.
    ///
    /// # Errors
    ///
    /// `auth`, `auth_ineligible` or `auth_unknown`.
    pub fn accept(self) -> Result<SignedIn> {
        match self {
            Self::SignedIn(signed_in) => Ok(signed_in),
            Self::SignedOut => Err(Error::new(ErrorCode::Auth, "the CLI is signed out")),
            Self::Ineligible {
                auth_method,
                api_provider,
            } => Err(Error::new(
                ErrorCode::AuthIneligible,
                format!(
                    "the CLI is signed in by {auth_method} to {api_provider}, not with a Claude subscription"
                ),
            )),
            Self::Unknown { reason, .. } => Err(Error::new(
                ErrorCode::AuthUnknown,
                format!("`claude auth status` gave no clear answer: {reason}"),
            )),
        }
    }

    pub(super) fn unknown(reason: impl Into<String>, text: &str) -> Self {
        let end = text.floor_char_boundary(AUTH_TEXT_BYTES);
        Self::Unknown {
            reason: reason.into(),
            text: text[..end].to_owned(),
        }
    }
}

/// Reads the answer.
///
/// Signed in takes the boolean true, `claude.ai`, `firstParty` and exit code 0; signed out takes the boolean false and exit
/// code 0 or 1. Everything else is unknown.
pub fn decode(answer: &Result<Answer, Unanswered>) -> AuthStatus {
    let answer = match answer {
        Ok(answer) => answer,
        Err(unanswered) => return AuthStatus::unknown(unanswered.to_string(), ""),
    };
    let text = answer.stdout.trim();
    let unknown = |reason: &str| AuthStatus::unknown(reason, text);
    if text.is_empty() {
        return unknown(&format!(
            "it printed nothing and ended with {}",
            answer.exit
        ));
    }
    let Ok(Value::Object(fields)) = serde_json::from_str(text) else {
        return unknown("it printed something other than one JSON object");
    };
    let word = |name: &str| fields.get(name).and_then(Value::as_str);
    match (fields.get("loggedIn"), answer.exit) {
        (Some(Value::Bool(false)), Exit::Code(0 | 1)) => AuthStatus::SignedOut,
        (Some(Value::Bool(true)), Exit::Code(0)) => {
            let (Some(method), Some(provider)) = (word("authMethod"), word("apiProvider")) else {
                return unknown("authMethod or apiProvider is missing");
            };
            // A key that wins over the sign-in: older versions then still say claude.ai (2.1.283).
            let key = word("apiKeySource").filter(|source| *source != "none");
            if method != "claude.ai" || provider != "firstParty" || key.is_some() {
                return AuthStatus::Ineligible {
                    auth_method: key.unwrap_or(method).to_owned(),
                    api_provider: provider.to_owned(),
                };
            }
            AuthStatus::SignedIn(SignedIn {
                subscription: word("subscriptionType").map(str::to_owned),
                plan_tier: word("planTier").map(str::to_owned),
                expires_at: fields.get("loginExpiresAt").and_then(time),
            })
        }
        (Some(Value::Bool(logged_in)), exit) => unknown(&format!(
            "loggedIn is {logged_in}, but it ended with {exit}"
        )),
        (Some(_), _) => unknown("loggedIn is no boolean"),
        (None, _) => unknown("loggedIn is missing"),
    }
}

/// A time as text or as milliseconds since 1970; its real form has not been seen.
fn time(value: &Value) -> Option<SystemTime> {
    let milliseconds = match value {
        Value::String(text) => {
            let at = text.parse::<jiff::Timestamp>().ok()?;
            u64::try_from(at.as_millisecond()).ok()?
        }
        Value::Number(number) => number.as_u64()?,
        _ => return None,
    };
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(milliseconds))
}

/// Asks once; each call is a new check.
pub type Asker = Box<dyn Fn() -> Pin<Box<dyn Future<Output = AuthStatus> + Send>> + Send + Sync>;

/// One check at a time, shared by everybody who asks meanwhile.
///
/// The check is a job of its own. Whoever waits for it may leave, and the job goes on within its limit; nobody who waits
/// changes or ends an active job. A success is kept; after any other result the next [`AuthCheck::acquire`] starts exactly
/// one new job in its place, while those who still hold the old one get the old result. [`AuthCheck::shutdown`] cancels an
/// active job and waits for its end, and dropping the check cancels it too.
pub struct AuthCheck {
    asker: Asker,
    limit: Duration,
    max_age: Duration,
    slot: Mutex<Slot>,
    jobs: TaskTracker,
    stop: CancellationToken,
    _stop_on_drop: DropGuard,
}

#[derive(Debug, Default)]
struct Slot {
    /// The latest job, active or complete.
    job: Option<Job>,
    /// What the job before it said, while it is active.
    before: Option<Known>,
}

/// A result, and whether a live request was refused after it.
type Known = (AuthStatus, bool);

/// A job as its waiters see it.
#[derive(Clone, Debug)]
struct Job {
    result: watch::Receiver<Option<Completed>>,
    /// Its success must not be kept: a live request was refused during or after it.
    refused: bool,
}

#[derive(Clone, Debug)]
struct Completed {
    status: AuthStatus,
    at: Instant,
}

impl Job {
    fn completed(&self) -> Option<Completed> {
        self.result.borrow().clone()
    }

    fn known(&self) -> Option<Known> {
        self.completed()
            .map(|completed| (completed.status, self.refused))
    }

    /// Whether an acquire may use this job: it is active, or a success that is young and not refused since.
    fn serves(&self, max_age: Duration) -> bool {
        match self.completed() {
            // A job whose task is gone without a result (the runtime went away) serves nobody.
            None => self.result.has_changed().is_ok(),
            Some(Completed { status, at }) => {
                matches!(status, AuthStatus::SignedIn(_)) && !self.refused && at.elapsed() < max_age
            }
        }
    }
}

impl fmt::Debug for AuthCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthCheck")
            .field("limit", &self.limit)
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

impl AuthCheck {
    /// The shared check: [`AUTH_LIMIT`], successes are kept for [`AUTH_MAX_AGE`].
    pub fn new(asker: Asker) -> Self {
        Self::with(asker, AUTH_LIMIT, AUTH_MAX_AGE)
    }

    /// A check that keeps nothing, bounded by [`FRESH_AUTH_LIMIT`]: for the pool's recovery, which must not believe an
    /// earlier answer.
    pub fn fresh(asker: Asker) -> Self {
        Self::with(asker, FRESH_AUTH_LIMIT, Duration::ZERO)
    }

    fn with(asker: Asker, limit: Duration, max_age: Duration) -> Self {
        let stop = CancellationToken::new();
        Self {
            asker,
            limit,
            max_age,
            slot: Mutex::default(),
            jobs: TaskTracker::new(),
            _stop_on_drop: stop.clone().drop_guard(),
            stop,
        }
    }

    /// The sign-in: a kept one, or the result of the active or of a new job.
    ///
    /// Has to be called within a tokio runtime. Dropping the future leaves the job as it is.
    ///
    /// # Errors
    ///
    /// As [`AuthStatus::accept`]; `closed` after [`AuthCheck::shutdown`].
    pub async fn acquire(&self) -> Result<SignedIn> {
        let mut job = self.join()?;
        let completed = job.result.wait_for(Option::is_some).await;
        let status = match completed.as_deref() {
            Ok(Some(completed)) => completed.status.clone(),
            // The task went away with its runtime, or was cancelled by a shutdown.
            _ if self.stop.is_cancelled() => return Err(closed()),
            _ => AuthStatus::unknown("the check was given up", ""),
        };
        drop(completed);
        status.accept()
    }

    /// Drops a kept success: a live request was refused for its sign-in. An active job goes on, and its waiters get its
    /// result, but a success of it is not kept.
    pub fn forget(&self) {
        if let Some(job) = &mut self.slot().job {
            job.refused = true;
        }
    }

    /// The latest result, without asking; and whether a live request was refused since. For `doctor`.
    pub fn last(&self) -> Option<(AuthStatus, bool)> {
        let slot = self.slot();
        let now = slot.job.as_ref().and_then(Job::known);
        now.or_else(|| slot.before.clone())
    }

    /// Cancels an active job and waits until it has ended and its process is killed. Later acquires fail with `closed`.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.jobs.close();
        self.jobs.wait().await;
    }

    /// The active job, a completed one that still serves, or a new one; decided under one lock, so that of many callers
    /// exactly one starts a job.
    fn join(&self) -> Result<Job> {
        let mut slot = self.slot();
        if self.stop.is_cancelled() {
            return Err(closed());
        }
        match &slot.job {
            Some(job) if job.serves(self.max_age) => Ok(job.clone()),
            _ => {
                let job = self.start();
                if let Some(known) = slot.job.replace(job.clone()).and_then(|old| old.known()) {
                    slot.before = Some(known);
                }
                Ok(job)
            }
        }
    }

    fn start(&self) -> Job {
        let (publish, result) = watch::channel(None);
        let asked = tokio::time::timeout(self.limit, (self.asker)());
        let (limit, stop) = (self.limit, self.stop.clone());
        self.jobs.spawn(async move {
            // Cancelled, it drops the question, and with it the process group.
            if let Some(asked) = stop.run_until_cancelled(asked).await {
                let status = asked.unwrap_or_else(|_| {
                    AuthStatus::unknown(format!("no answer within {limit:?}"), "")
                });
                let at = Instant::now();
                publish.send_replace(Some(Completed { status, at }));
            }
        });
        Job {
            result,
            refused: false,
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn closed() -> Error {
    Error::new(ErrorCode::Closed, "the provider was shut down")
}

#[cfg(test)]
#[path = "auth_tests.rs"]
mod tests;
