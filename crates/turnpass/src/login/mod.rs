//! Signing in again without failing the request (`seeds/replay.md`, "Session expiry and re-login").
//!
//! turnpass signs nobody in: it runs the CLI's own `claude auth login --claudeai`, shows the owner the CLI's link, and
//! passes on what the owner pastes. The code is held in memory until it is written, and stored nowhere; the sign-in itself
//! is the CLI's alone.
//!
//! # The story
//!
//! 1. A request fails with `auth` before anything of its answer was given out, and the provider has a [`Login`]
//!    ([`crate::Provider::with_login`]). It pauses.
//! 2. [`LoginUi::ask`] gets one prompt: steps, link and question together.
//! 3. One flow at a time, process-wide: whoever needs a sign-in meanwhile waits for the same one. Successful flows are
//!    counted; a request that began before one and fails after it is sent again at once.
//! 4. A wrong code gets a fresh link, [`LoginOptions::attempts`] in all.
//! 5. After a success the request is sent once more, and what comes of that is told as it is.
//! 6. Without a [`Login`] nothing of this happens: the request fails and names the command to run.

mod dialogue;
mod process;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::cli::installed::Installed;
use crate::error::{Error, ErrorCode, Result};
use crate::secret::Secret;

pub use process::{LINK_LIMIT, VERDICT_LIMIT};
use process::{Process, Verdict};

/// The command that a person runs by hand.
pub const LOGIN_COMMAND: &str = "claude auth login --claudeai";

/// Budget and timeouts; the replay document's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginOptions {
    /// Codes that the owner may try; at least one.
    pub attempts: u32,
    /// How long the owner has for each prompt.
    pub code_timeout: Duration,
    /// How long it may take to find out where the owner is.
    pub owner_timeout: Duration,
}

impl Default for LoginOptions {
    fn default() -> Self {
        Self {
            attempts: 3,
            code_timeout: Duration::from_secs(10 * 60),
            owner_timeout: Duration::from_secs(30),
        }
    }
}

/// Where the owner of the sign-in is asked.
pub trait LoginUi: Send + Sync {
    /// Finds out whether the owner can be asked now. Bounded by [`LoginOptions::owner_timeout`]; dropping the future gives
    /// up.
    fn reach(&self) -> BoxFuture<'_, bool> {
        Box::pin(std::future::ready(true))
    }

    /// Shows the prompt and waits for what the owner pastes; `None` when the owner declines. Bounded by
    /// [`LoginOptions::code_timeout`]; dropping the future takes the prompt back.
    fn ask<'a>(&'a self, prompt: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>>;
}

/// One prompt: link and question are one message, so that they cannot arrive out of order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoginPrompt {
    /// What to do, in steps, with the link.
    pub steps: String,
    /// The CLI's link alone. It belongs to this attempt and to nobody else.
    pub link: String,
    /// What is asked for.
    pub question: &'static str,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// How many there are.
    pub attempts: u32,
}

/// The question of every prompt.
pub const QUESTION: &str = "Paste the Claude login code";

impl LoginPrompt {
    fn new(link: &str, attempt: u32, attempts: u32) -> Self {
        let again = match attempt {
            1 => "",
            _ => "That code was not accepted, and the earlier link is void.\n",
        };
        let steps = format!(
            "{again}The CLI is signed out or its session has expired.\n\
             1. Open {link}\n\
             2. Sign in with the account of your own subscription and allow Claude Code.\n\
             3. Copy the code that the page shows, all of it with the # in the middle, and paste it here.\n\
             It goes to the claude program on this machine and is stored by nobody else."
        );
        Self {
            steps,
            link: link.to_owned(),
            question: QUESTION,
            attempt,
            attempts,
        }
    }
}

/// One flow at a time for all who need a sign-in.
#[derive(Default)]
pub struct LoginCoordinator {
    generation: AtomicU64,
    flight: Mutex<Option<Flight>>,
}

/// What is heard of a flow: `None` until it is over.
type Outcome = watch::Receiver<Option<Result<()>>>;

/// A flow under way.
struct Flight {
    done: Outcome,
    /// Held by each who waits; when all have left, the flow is cancelled.
    held: std::sync::Weak<DropGuard>,
}

/// The flow of the whole process.
static SHARED: LazyLock<Arc<LoginCoordinator>> = LazyLock::new(Arc::default);

impl fmt::Debug for LoginCoordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoginCoordinator")
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

impl LoginCoordinator {
    /// The one that all providers of this process share unless they are given another.
    pub fn shared() -> Arc<Self> {
        Arc::clone(&SHARED)
    }

    /// Successful flows so far.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Sees to a sign-in after a request that began at `seen` failed for want of one: at once when one has succeeded since,
    /// else by the flow that is under way or a new one.
    ///
    /// # Errors
    ///
    /// `auth` when the owner cannot be asked, declines, or runs out of attempts; what the CLI cannot be started with.
    ///
    /// # Cancel safety
    ///
    /// Whoever waits may leave; when nobody waits any more, the flow ends with its process.
    async fn recover(self: &Arc<Self>, seen: u64, login: &Login) -> Result<()> {
        self.outcome(login, Some(seen)).await
    }

    /// Signs in, or waits for the flow that is under way and reports its outcome.
    async fn sign_in(self: &Arc<Self>, login: &Login) -> Result<()> {
        self.outcome(login, None).await
    }

    /// Waits until a flow that everybody has left is over, its process included. Returns at once while somebody waits for
    /// the flow, or when there is none.
    async fn settled(&self) {
        let left = self.flight().as_ref().and_then(|flight| {
            let is_wanted = flight.held.strong_count() > 0;
            (!is_wanted).then(|| flight.done.clone())
        });
        if let Some(mut done) = left {
            // An error means that its task is gone with the runtime; the process was killed then.
            let _ = done.wait_for(Option::is_some).await;
        }
    }

    async fn outcome(self: &Arc<Self>, login: &Login, seen: Option<u64>) -> Result<()> {
        let Some((mut done, _held)) = self.join(login, seen) else {
            return Ok(());
        };
        let ended = done.wait_for(Option::is_some).await;
        match ended {
            Ok(result) => result.clone().unwrap_or_else(|| Err(gone())),
            Err(_) => Err(gone()),
        }
    }

    /// The flow to wait for; `None` when one has succeeded since `seen`. A flow ends under the same lock, so nobody can
    /// look between its success and its end and start a second one.
    fn join(
        self: &Arc<Self>,
        login: &Login,
        seen: Option<u64>,
    ) -> Option<(Outcome, Arc<DropGuard>)> {
        let mut flight = self.flight();
        if seen.is_some_and(|seen| self.generation() > seen) {
            return None;
        }
        let running = flight.as_ref().and_then(|flight| {
            let held = flight.held.upgrade()?;
            flight
                .done
                .borrow()
                .is_none()
                .then(|| (flight.done.clone(), held))
        });
        if running.is_some() {
            return running;
        }
        let cancel = CancellationToken::new();
        let held = Arc::new(cancel.clone().drop_guard());
        let (tell, done) = watch::channel(None);
        *flight = Some(Flight {
            done: done.clone(),
            held: Arc::downgrade(&held),
        });
        let (coordinator, login) = (Arc::clone(self), login.clone());
        tokio::spawn(async move {
            let result = login.flow(&cancel).await;
            let _flight = coordinator.flight();
            if result.is_ok() {
                coordinator.generation.fetch_add(1, Ordering::SeqCst);
            }
            tell.send_replace(Some(result));
        });
        Some((done, held))
    }

    fn flight(&self) -> MutexGuard<'_, Option<Flight>> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a provider signs in again.
#[derive(Clone)]
pub struct Login {
    installed: Arc<Installed>,
    ui: Arc<dyn LoginUi>,
    options: LoginOptions,
    coordinator: Arc<LoginCoordinator>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("options", &self.options)
            .field("coordinator", &self.coordinator)
            .finish_non_exhaustive()
    }
}

impl Login {
    /// With the process-wide coordinator and the document's timeouts.
    pub fn new(installed: Arc<Installed>, ui: Arc<dyn LoginUi>) -> Self {
        Self {
            installed,
            ui,
            options: LoginOptions::default(),
            coordinator: LoginCoordinator::shared(),
        }
    }

    /// With other timeouts.
    #[must_use]
    pub fn with_options(mut self, options: LoginOptions) -> Self {
        self.options = options;
        self
    }

    /// With a coordinator of its own, for a program that uses several accounts' homes apart from each other, and for tests.
    #[must_use]
    pub fn with_coordinator(mut self, coordinator: Arc<LoginCoordinator>) -> Self {
        self.coordinator = coordinator;
        self
    }

    /// The number of successful flows, to be kept when a request begins.
    pub(crate) fn generation(&self) -> u64 {
        self.coordinator.generation()
    }

    /// See [`LoginCoordinator::recover`].
    pub(crate) async fn recover(&self, seen: u64) -> Result<()> {
        self.coordinator.recover(seen, self).await
    }

    /// See [`LoginCoordinator::settled`].
    pub(crate) async fn settled(&self) {
        self.coordinator.settled().await;
    }

    /// Signs in now, whatever the state of the sign-in is; waits for a flow that is under way and reports its outcome.
    ///
    /// # Errors
    ///
    /// `auth` when the owner cannot be asked, declines, or runs out of attempts; what the CLI cannot be started with.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the flow; when nobody waits for it any more, it ends with its process.
    pub async fn sign_in(&self) -> Result<()> {
        self.coordinator.sign_in(self).await
    }

    /// One flow, from the first link to a sign-in or the last attempt.
    async fn flow(&self, cancel: &CancellationToken) -> Result<()> {
        let reach = async {
            let reached = tokio::time::timeout(self.options.owner_timeout, self.ui.reach()).await;
            match reached {
                Ok(true) => Ok(()),
                _ => Err(failed("whoever could sign in cannot be reached")),
            }
        };
        unless(cancel, reach).await?;
        let attempts = self.options.attempts.max(1);
        for attempt in 1..=attempts {
            match self.attempt(attempt, attempts, cancel).await? {
                Verdict::SignedIn => return unless(cancel, self.confirmed()).await,
                Verdict::Refused => {}
            }
        }
        Err(failed(&format!("none of {attempts} codes was accepted")))
    }

    /// One link and one code. Whatever comes of it, the process is gone with its files before anybody hears of it.
    async fn attempt(
        &self,
        attempt: u32,
        attempts: u32,
        cancel: &CancellationToken,
    ) -> Result<Verdict> {
        let mut process = unless(cancel, Process::start(&self.installed)).await?;
        let verdict = unless(cancel, self.talk(&mut process, attempt, attempts)).await;
        process.end().await;
        verdict
    }

    async fn talk(&self, process: &mut Process, attempt: u32, attempts: u32) -> Result<Verdict> {
        let link = process.link().await?;
        let prompt = LoginPrompt::new(&link, attempt, attempts);
        let ask = tokio::time::timeout(self.options.code_timeout, self.ui.ask(&prompt));
        let pasted = tokio::select! {
            pasted = ask => pasted,
            // The page that the CLI opens in a browser on this machine can complete the sign-in without any code.
            exit = process.group.wait() => return match exit.is_success() {
                true => Ok(Verdict::SignedIn),
                false => Err(failed(&format!("the CLI's login ended with {exit} before a code came"))),
            },
        };
        let pasted = match pasted {
            Ok(Some(pasted)) => pasted,
            Ok(None) => return Err(failed("the sign-in was declined")),
            Err(_) => {
                let seconds = self.options.code_timeout.as_secs();
                return Err(failed(&format!("no code came within {seconds} s")));
            }
        };
        // The CLI would ask for a malformed one again, on a channel that nobody reads.
        let Some(code) = dialogue::code(pasted.expose_str()) else {
            return Ok(Verdict::Refused);
        };
        process.pass(code).await
    }

    /// The CLI's word that it is done is confirmed by its own status.
    async fn confirmed(&self) -> Result<()> {
        self.installed.forget_sign_in();
        self.installed.signed_in().await.map(drop)
    }
}

/// What comes of the work, unless everybody leaves first.
async fn unless<T>(cancel: &CancellationToken, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        () = cancel.cancelled() => Err(gone()),
        done = work => done,
    }
}

fn failed(why: &str) -> Error {
    Error::new(ErrorCode::Auth, why)
}

fn gone() -> Error {
    failed("the sign-in was broken off")
}

#[cfg(test)]
#[path = "../login_tests.rs"]
mod tests;
