//! The gate before a new user message: asks for use until one thing is certain, and says what that means.
//!
//! A new user message passes the gate; the results of tools do not, since the model's turn goes on with them. The story:
//!
//! 1. The process that will take the message is asked. While nothing is certain it is asked again after 0.5, 1 and 2 s and
//!    then every 2 s, as long as that begins within [`RETRY_BUDGET`]. Each question has [`CONTROL_LIMIT`].
//! 2. A running CLI keeps an incomplete reading (remembered 401, 403 and 429, limits made up from headers: 2.1.332), so a
//!    fresh process is asked once, within [`FRESH_LIMIT`]; one at a time for all callers.
//! 3. An advisor's call for which both the running and the fresh process say that they have no limits to show at all may
//!    look whether the sign-in is gone: one fresh `auth status`, within its own limit. It only ever changes which refusal
//!    is given; a sign-in that is there authorises nothing.
//!
//! Credits that are on, a cancel, a shutdown, and any usage result that is good or unknown outrank the sign-in. A cancel or
//! a shutdown during step 3 takes the place of the refusal that step 2 had come to.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Policy;
use super::shared::{Ask, Shared, Unanswered};
use super::verdict::{Doubt, Verdict};
use crate::cli::auth::AuthCheck;
use crate::error::{Error, ErrorCode};
use crate::request::CallKind;

/// Longest wait for one answer of a running process: that of every control request (SPEC 3).
pub const CONTROL_LIMIT: Duration = Duration::from_secs(30);

/// From the first question to the beginning of the last one to the same process (pool document).
pub const RETRY_BUDGET: Duration = Duration::from_secs(15);

/// Waits before the second, third and every later question (pool document).
pub const RETRY_WAITS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
];

/// Longest life of the fresh process (pool document). A start and an answer take 0.4 s (2.1.332); the usage endpoint is
/// given 5 s by the CLI itself.
pub const FRESH_LIMIT: Duration = Duration::from_secs(8);

/// Where use can be asked for.
pub trait UsageSource: Send + Sync {
    /// Asks `get_usage` once. The text is the payload of the answer, empty if it had none.
    ///
    /// The gate bounds it; dropping the future gives up the question.
    fn get_usage(&self) -> BoxFuture<'_, Result<String, SourceFault>>;
}

/// Why a source gave no payload.
#[derive(Clone, Debug)]
pub enum SourceFault {
    /// The CLI refused the question; it may answer the next one.
    Refused,
    /// The process is gone or no longer answers: nothing can be sent to it either.
    Gone(Error),
}

/// The gate of one transport. All its callers share one fresh process at a time.
#[derive(Debug)]
pub struct Gate {
    fresh: Shared<Result<String, SourceFault>>,
    sign_in: AuthCheck,
    stop: CancellationToken,
}

/// One caller's question.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// The process that will take the message; `None` where each message has a process of its own.
    pub running: Option<&'a dyn UsageSource>,
    /// What the call is for.
    pub call: CallKind,
    /// Cancelled when the caller no longer wants to send.
    pub cancel: &'a CancellationToken,
}

/// What the gate found.
#[derive(Clone, Debug)]
pub enum Finding {
    /// Credits are off.
    Off,
    /// Credits are on: definitive.
    On,
    /// Nobody knows.
    Unconfirmed(Doubt),
    /// Nobody knows, and a fresh check says that the CLI is signed out. The caller's process is to be retired.
    SignedOut,
    /// The running process cannot be used any more. It is to be retired.
    Gone(Error),
    /// The caller left.
    Cancelled,
    /// The provider was shut down.
    Closed,
}

/// What the processes say, before it matters whose call it is.
#[derive(Clone, Debug)]
pub(crate) struct Heard {
    finding: Finding,
    /// Both say that they have no limits to show at all.
    not_ready_twice: bool,
}

impl From<Finding> for Heard {
    fn from(finding: Finding) -> Self {
        Self {
            finding,
            not_ready_twice: false,
        }
    }
}

impl Gate {
    /// A gate whose second opinion comes from `fresh`, which starts a process, asks it and ends it, and whose fresh
    /// sign-in check is `sign_in` ([`AuthCheck::fresh`]).
    pub fn new(fresh: Ask<Result<String, SourceFault>>, sign_in: AuthCheck) -> Self {
        Self {
            // Nothing is kept: a message needs an answer of its own.
            fresh: Shared::new(fresh, FRESH_LIMIT, Duration::ZERO),
            sign_in,
            stop: CancellationToken::new(),
        }
    }

    /// Asks until it is certain, or refuses.
    ///
    /// Has to be called within a tokio runtime. Dropping the future leaves shared jobs as they are, within their limits.
    pub async fn ask(&self, question: Question<'_>) -> Finding {
        let found = async {
            let heard = self.hear(question.running).await;
            self.advised(heard, question.call).await
        };
        self.unless_left(question.cancel, found).await
    }

    /// Steps 1 and 2, which are the same for every caller, so that several can share them.
    pub(crate) async fn hear(&self, running: Option<&dyn UsageSource>) -> Heard {
        let first = match running {
            None => None,
            Some(running) => match poll(running).await {
                Ok(Verdict::Off) => return Finding::Off.into(),
                Ok(Verdict::On) => return Finding::On.into(),
                Ok(Verdict::Unconfirmed(doubt)) => Some(doubt),
                Err(error) => return Finding::Gone(error).into(),
            },
        };
        let fresh = match self.fresh.get().await {
            Ok(Ok(text)) => Verdict::read(&text),
            Ok(Err(_)) | Err(Unanswered::Late) => Verdict::Unconfirmed(Doubt::NoAnswer),
            Err(Unanswered::Closed) => return Finding::Closed.into(),
        };
        match fresh {
            Verdict::Off => Finding::Off.into(),
            Verdict::On => Finding::On.into(),
            Verdict::Unconfirmed(doubt) => Heard {
                finding: Finding::Unconfirmed(doubt),
                // "A second fresh definitive not-ready": the running process said it first, the fresh one says it again.
                not_ready_twice: first.is_some_and(Doubt::is_not_ready) && doubt.is_not_ready(),
            },
        }
    }

    /// Step 3 for one of the callers that shared [`Gate::hear`].
    pub(crate) async fn settle(
        &self,
        heard: Heard,
        call: CallKind,
        cancel: &CancellationToken,
    ) -> Finding {
        self.unless_left(cancel, self.advised(heard, call)).await
    }

    /// A shutdown and a cancel outrank what was found.
    async fn unless_left(
        &self,
        cancel: &CancellationToken,
        found: impl Future<Output = Finding>,
    ) -> Finding {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Finding::Closed,
            () = cancel.cancelled() => Finding::Cancelled,
            found = found => found,
        }
    }

    async fn advised(&self, heard: Heard, call: CallKind) -> Finding {
        if call != CallKind::Advisor || !heard.not_ready_twice {
            return heard.finding;
        }
        match self.sign_in.acquire().await {
            Err(error) if error.code() == ErrorCode::Auth => Finding::SignedOut,
            Err(error) if error.code() == ErrorCode::Closed => Finding::Closed,
            _ => heard.finding,
        }
    }

    /// Cancels what runs and waits until it has ended: fresh processes are killed, sign-in checks joined.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.fresh.shutdown().await;
        self.sign_in.shutdown().await;
    }
}

/// Asks a running process until it is certain or the budget is used up.
async fn poll(running: &dyn UsageSource) -> Result<Verdict, Error> {
    let began = Instant::now();
    let [first @ .., last] = RETRY_WAITS;
    let mut waits = first.into_iter().chain(std::iter::repeat(last));
    loop {
        let verdict = match tokio::time::timeout(CONTROL_LIMIT, running.get_usage()).await {
            Ok(Ok(text)) => Verdict::read(&text),
            Ok(Err(SourceFault::Refused)) => Verdict::Unconfirmed(Doubt::NoAnswer),
            Ok(Err(SourceFault::Gone(error))) => return Err(error),
            Err(_) => {
                let what = format!(
                    "the CLI did not answer get_usage within {} s",
                    CONTROL_LIMIT.as_secs()
                );
                return Err(Error::new(ErrorCode::ControlTimeout, what));
            }
        };
        if !matches!(verdict, Verdict::Unconfirmed(_)) {
            return Ok(verdict);
        }
        let wait = waits.next().unwrap_or(last);
        if began.elapsed() + wait > RETRY_BUDGET {
            return Ok(verdict);
        }
        tokio::time::sleep(wait).await;
    }
}

/// What a message may do.
#[derive(Clone, Debug)]
pub enum Passage {
    /// Go.
    Open,
    /// Go, and the host is to hear this sentence.
    Told(String),
    /// Nothing is to be sent; the host hears this.
    Refused(Error),
    /// Nothing is to be sent, and nobody listens.
    Cancelled,
}

impl Passage {
    /// As a result for a caller that only wants to know whether it may send.
    pub(crate) fn into_result(self) -> Result<(), Error> {
        match self {
            Self::Open | Self::Told(_) => Ok(()),
            Self::Refused(error) => Err(error),
            Self::Cancelled => Err(Error::new(ErrorCode::Closed, "the request was cancelled")),
        }
    }
}

/// The sentence about credits that are on.
pub const CREDITS_ON: &str =
    "usage credits are on for this account, so use beyond the plan's limits would be charged";

/// What a person does about it.
const CREDITS_REMEDY: &str = "Turn them off at claude.ai, Settings > Usage, or set usage_gate to \"warn\" if they may be \
used; turnpass never turns credits on or off.";

impl Finding {
    /// What the policy makes of it. Pure.
    pub fn passage(self, policy: Policy) -> Passage {
        match (self, policy) {
            (Self::Off, _) => Passage::Open,
            (Self::Cancelled, _) => Passage::Cancelled,
            (Self::Closed, _) => {
                Passage::Refused(Error::new(ErrorCode::Closed, "the provider was shut down"))
            }
            (Self::Gone(error), _) => Passage::Refused(error),
            (_, Policy::Off) => Passage::Open,
            (Self::On, Policy::Warn) => Passage::Told(format!("{CREDITS_ON}.")),
            (Self::On, Policy::RequireOff) => Passage::Refused(credits_on()),
            (Self::Unconfirmed(doubt), Policy::Warn) => Passage::Told(format!(
                "it is not known whether usage credits are on: {doubt}."
            )),
            (Self::Unconfirmed(doubt), Policy::RequireOff) => Passage::Refused(Error::new(
                ErrorCode::UsageUnconfirmed,
                format!("nothing was sent: {doubt}"),
            )),
            (Self::SignedOut, _) => Passage::Refused(Error::new(
                ErrorCode::Auth,
                "the CLI shows no limits, and a fresh check says that it is signed out",
            )),
        }
    }
}

/// The refusal for credits that are on.
pub(crate) fn credits_on() -> Error {
    Error::new(ErrorCode::Billing, CREDITS_ON).with_remedy(CREDITS_REMEDY)
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
