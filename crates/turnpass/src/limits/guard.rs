//! All of it for one transport: what is asked before a message, what is read of an answer, what is counted.
//!
//! A transport asks [`Guard::before`] for a [`Ticket`] before it sends anything, shows the ticket the head of the answer,
//! and tells it the token counts at the end. With the policy off and no budget every one of these returns at once.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use super::book::LEDGER_FILE;

use super::Policy;
use super::book::{Book, Counted};
use super::budget::{Budgets, Moment, SessionKey, tokens_of};
use super::gate::{CREDITS_ON, Finding, Gate, Heard, Question, UsageSource};
use super::latest::Latest;
use super::probe::Probe;
use super::rate::{Near, Reaction, Signal};
use super::shared::{Ask, Shared, Unanswered};
use super::verdict::Doubt;
use super::windows::{Board, Credits};
use crate::conversation::{Block, Message, Role};
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Notice, Usage};
use crate::provider::Notifier;
use crate::request::{CallKind, Request};
use crate::wire::rate_limit::UnifiedHeaders;

/// Between two notices about credits. A person who has read one knows it for a while.
pub const NOTICE_INTERVAL: Duration = Duration::from_secs(15 * 60);

/// How old the last reading of all windows may be before a person's limit on windows asks anew. Answers tell of some
/// windows only: those of a single model stand in a reading alone.
pub const WINDOW_MAX_AGE: Duration = Duration::from_secs(5 * 60);

/// How long a message that has passed under `require_off` may take to be on its way. A start takes half a second; the
/// answer itself may be as old again, since the CLI shares it for a minute (2.1.332).
pub const PASSAGE_MAX_AGE: Duration = Duration::from_secs(60);

/// Longest life of the process that is asked before a message: its start, the retries of 15 s, one last answer of 30 s,
/// and the fresh process of 8 s.
pub const REQUIRE_LIMIT: Duration = Duration::from_secs(70);

/// How a guard is set up.
#[derive(Clone, Debug)]
pub struct GuardOptions {
    /// What to do about paid credits.
    pub policy: Policy,
    /// What the person allows.
    pub budgets: Budgets,
    /// Where the ledger and the latest reading are kept; `None` keeps them in memory.
    pub state_dir: Option<PathBuf>,
}

/// Guards one transport.
#[derive(Debug)]
pub struct Guard {
    policy: Policy,
    budgets: Budgets,
    book: Arc<Book>,
    gate: Arc<Gate>,
    asking: Shared<Result<Heard>>,
    latest: Latest,
    told: Mutex<Told>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// What is known of windows, and what the host has heard.
#[derive(Debug, Default)]
struct Told {
    board: Board,
    looked: Option<Instant>,
    pending: Option<Notice>,
    near: BTreeMap<String, (u64, Option<u64>)>,
}

/// One request that may be sent. It counts from now on; dropped before it was [`Ticket::sending`], it has not counted.
#[derive(Debug)]
pub struct Ticket {
    guard: Arc<Guard>,
    counted: Counted,
    is_new_message: bool,
    /// When the gate let it pass; `None` where it was not asked.
    passed: Option<Instant>,
    notifier: Option<Notifier>,
}

/// What a guard has to know of a request.
#[derive(Clone, Debug)]
pub struct Asked {
    call: CallKind,
    key: SessionKey,
    is_new_message: bool,
}

impl Asked {
    /// Of a request.
    pub fn of(request: &Request) -> Self {
        Self {
            call: request.call,
            key: SessionKey::of(&request.session, request.parent.as_ref()),
            is_new_message: is_new_message(&request.messages),
        }
    }
}

/// Whether a conversation brings something that the model has not been told: everything but the results of the calls that
/// the model has just made, and nothing beside them.
///
/// In doubt it does. A history is put in order on its way out (`normalise`), and what stands last in the host's copy need
/// not stand last there: an empty message is dropped, messages of one side become one, and results that nobody asked for
/// become something that a person says.
pub fn is_new_message(messages: &[Message]) -> bool {
    let said = |role: Role| move |message: &&Message| message.role == role;
    let mut backwards = messages.iter().rev().peekable();
    let mut answered = HashSet::new();
    while let Some(message) = backwards.next_if(said(Role::User)) {
        if message.content.is_empty() {
            return true;
        }
        for block in &message.content {
            match block {
                Block::ToolResult(result) => answered.insert(&result.id),
                _ => return true,
            };
        }
    }
    let has_results = !answered.is_empty();
    while let Some(message) = backwards.next_if(said(Role::Assistant)) {
        for call in message.tool_calls() {
            answered.remove(&call.id);
        }
    }
    !has_results || !answered.is_empty()
}

impl Guard {
    /// A guard whose questions go to this probe. Starts nothing.
    pub fn new(probe: Probe, options: GuardOptions) -> Arc<Self> {
        let (gate, tasks) = (Arc::new(probe.gate()), TaskTracker::new());
        let state_dir = options.state_dir.as_deref();
        let latest = Latest::new(&probe, state_dir);
        let book = Book::open(state_dir, options.budgets, tasks.clone());
        let ask = ask_once(probe, Arc::clone(&gate), tasks.clone());
        Arc::new(Self {
            policy: options.policy,
            budgets: options.budgets,
            book,
            gate,
            // Nothing is kept: a message needs an answer that was asked for while it waited.
            asking: Shared::new(ask, REQUIRE_LIMIT, Duration::ZERO).while_wanted(),
            latest,
            told: Mutex::default(),
            tasks,
            stop: CancellationToken::new(),
        })
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Decides whether a request may be sent, and counts it. Nothing has been sent when it refuses.
    ///
    /// Under `require_off` a new user message waits for the gate; a share of a window waits for a reading when none is
    /// known; everything else waits for nothing but the ledger.
    ///
    /// # Errors
    ///
    /// `billing`, `usage_unconfirmed`, `budget`, `auth`, `closed`, or what the start of the process that is asked fails
    /// with.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends the process that is asked unless another message waits for it too; nothing is counted
    /// unless it had come to its end.
    pub async fn before(
        self: &Arc<Self>,
        asked: Asked,
        notifier: Option<Notifier>,
        cancel: &CancellationToken,
    ) -> Result<Ticket> {
        self.before_on(asked, notifier, cancel, None).await
    }

    /// The same for a message that a running process will take: that one is asked.
    ///
    /// # Errors
    ///
    /// As [`Guard::before`]; after `auth`, and what the process itself fails with, it is to be retired.
    ///
    /// # Cancel safety
    ///
    /// As [`Guard::before`].
    pub async fn before_on(
        self: &Arc<Self>,
        asked: Asked,
        notifier: Option<Notifier>,
        cancel: &CancellationToken,
        running: Option<&dyn UsageSource>,
    ) -> Result<Ticket> {
        self.check_window().await?;
        let mut passed = None;
        if self.policy == Policy::RequireOff && asked.is_new_message {
            self.require_off(asked.call, cancel, running).await?;
            passed = Some(Instant::now());
        }
        Ok(Ticket {
            guard: Arc::clone(self),
            counted: self.book.count(asked.key).await?,
            is_new_message: asked.is_new_message,
            passed,
            notifier,
        })
    }

    /// Cancels what runs and waits for it: questions, sign-in checks, entries into the ledger. What generations that still
    /// run enter afterwards is waited for by [`Guard::entered`].
    pub async fn shutdown(&self) {
        self.close();
        self.asking.shutdown().await;
        self.gate.shutdown().await;
        self.latest.shutdown().await;
        self.entered().await;
    }

    /// Waits for the entries into the ledger that are under way, once the guard is shut down.
    pub async fn entered(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Cancels questions that nobody waits for; later requests are refused with `closed` where they would ask.
    pub fn close(&self) {
        self.stop.cancel();
    }

    async fn check_window(&self) -> Result<()> {
        if self.budgets.max_window_percent.is_none() {
            return Ok(());
        }
        let now = Moment::now().unix_s;
        let is_young = |at: Option<i64>| {
            let age = at.and_then(|at| u64::try_from(now.saturating_sub(at)).ok());
            age.is_some_and(|age| age < WINDOW_MAX_AGE.as_secs())
        };
        let (read_at, told_at) = {
            let told = self.told();
            (told.board.read_at(), told.board.told_at())
        };
        if !is_young(read_at) {
            let nothing = || {
                let what = "nothing was sent: the CLI shows no usage window, so max_window_percent cannot be kept";
                Error::new(ErrorCode::UsageUnconfirmed, what)
                    .with_remedy("Try again in a minute, or unset max_window_percent.")
            };
            match self.latest.get().await {
                Ok(latest) if !latest.reading.windows.is_empty() => {
                    let mut told = self.told();
                    told.board.reading(&latest.reading, latest.at, now);
                }
                Err(error) if error.code() == ErrorCode::Closed => return Err(error),
                // A reading that fails is bridged by what answers have told since.
                _ if is_young(told_at) => {}
                Ok(_) => return Err(nothing()),
                Err(error) => return Err(error),
            }
        }
        self.budgets.check_window(&self.told().board, now)
    }

    /// The process that will take the message is asked, if it can be. A relay's cannot: it reaches its account through the
    /// relay. Then one beside it is asked, which messages that wait at the same time share, so there is one at a time
    /// (bug 128).
    async fn require_off(
        &self,
        call: CallKind,
        cancel: &CancellationToken,
        running: Option<&dyn UsageSource>,
    ) -> Result<()> {
        let found = match running {
            Some(_) => {
                let question = Question {
                    running,
                    call,
                    cancel,
                };
                self.gate.ask(question).await
            }
            None => {
                let heard = tokio::select! {
                    biased;
                    () = self.stop.cancelled() => Err(Unanswered::Closed),
                    () = cancel.cancelled() => return Finding::Cancelled.passage(self.policy).into_result(),
                    heard = self.asking.get() => heard,
                };
                let heard = match heard {
                    Ok(heard) => heard?,
                    Err(Unanswered::Late) => Finding::Unconfirmed(Doubt::NoAnswer).into(),
                    Err(Unanswered::Closed) => Finding::Closed.into(),
                };
                self.gate.settle(heard, call, cancel).await
            }
        };
        found.passage(self.policy).into_result()
    }

    /// Asks beside the generation whether credits are on, unless that was done lately.
    fn look(self: &Arc<Self>, notifier: Option<Notifier>) {
        let now = Instant::now();
        let mut told = self.told();
        let lately = told
            .looked
            .is_some_and(|at| now.duration_since(at) < NOTICE_INTERVAL);
        if self.policy != Policy::Warn || lately || self.stop.is_cancelled() {
            return;
        }
        told.looked = Some(now);
        drop(told);
        let (guard, stop) = (Arc::clone(self), self.stop.clone());
        self.tasks.spawn(async move {
            let Some(latest) = stop.run_until_cancelled(guard.latest.get()).await else {
                return;
            };
            let text = match latest {
                Ok(latest) => {
                    let now = Moment::now().unix_s;
                    guard.told().board.reading(&latest.reading, latest.at, now);
                    match (latest.reading.credits, latest.reading.doubt) {
                        (Credits::Off, _) => return,
                        (Credits::On, _) => format!("{CREDITS_ON}."),
                        (Credits::Unconfirmed, doubt) => unknown(&doubt.unwrap_or_default()),
                    }
                }
                Err(error) => unknown(error.detail()),
            };
            let notice = Notice::Other { text };
            let said = notifier.is_some_and(|notifier| notifier.notify(notice.clone()));
            if !said {
                guard.told().pending = Some(notice);
            }
        });
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(why: &str) -> String {
    format!("it is not known whether usage credits are on: {why}.")
}

impl Told {
    /// Whether a window that is nearly used up is news: five percent fuller than when it was last told, or begun anew.
    fn is_news(&mut self, near: &Near) -> bool {
        const STEPS: f64 = 20.0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a window is a small positive number, and `as` saturates"
        )]
        let step = (near.utilization.unwrap_or(0.0) * STEPS) as u64;
        let now = (step, near.resets_at);
        let before = self.near.insert(near.window.clone(), now);
        before.is_none_or(|before| before.1 != now.1 || before.0 < now.0)
    }
}

impl Ticket {
    /// A notice that could not be told before.
    pub fn pending(&self) -> Option<Notice> {
        self.guard.told().pending.take()
    }

    /// Reads the head of the service's answer: what it says of limits, and what is to be done about it. From here on the
    /// question about credits runs beside the generation.
    pub fn answered(&self, status: u16, headers: &HeaderMap) -> Reaction {
        if self.is_new_message {
            self.guard.look(self.notifier.clone());
        }
        let pairs = headers
            .iter()
            .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
        let Some(read) = UnifiedHeaders::read(pairs) else {
            return Reaction::Go;
        };
        let mut told = self.guard.told();
        told.board.headers(&read, Moment::now().unix_s);
        match Signal::of_headers(status, &read) {
            Signal::Near(near) if !told.is_news(&near) => Reaction::Go,
            signal => signal.reaction(self.guard.policy),
        }
    }

    /// The answer has begun: from here on the question about credits runs beside the generation, where the policy asks it.
    pub fn begun(&self) {
        if self.is_new_message {
            self.guard.look(self.notifier.clone());
        }
    }

    /// What is to be done about what the CLI says of limits in the middle of a turn.
    pub fn signalled(&self, signal: &Signal) -> Reaction {
        let mut told = self.guard.told();
        match signal {
            Signal::Near(near) if !told.is_news(near) => Reaction::Go,
            signal => signal.reaction(self.guard.policy),
        }
    }

    /// To be called at the last moment before the request goes to the service. From here on it has counted, whatever comes
    /// of it.
    ///
    /// # Errors
    ///
    /// `usage_unconfirmed` when the gate let it pass so long ago ([`PASSAGE_MAX_AGE`]) that its word is none any more;
    /// nothing may be sent then.
    pub fn sending(&self) -> Result<()> {
        let age = self.passed.map(|passed| passed.elapsed());
        if let Some(age) = age.filter(|age| *age > PASSAGE_MAX_AGE) {
            let what = format!(
                "nothing was sent: credits were off {} s ago, and the CLI took as long to get ready",
                age.as_secs()
            );
            return Err(Error::new(ErrorCode::UsageUnconfirmed, what));
        }
        self.counted.sent();
        Ok(())
    }

    /// The request was not taken by the process that it was said to, which is gone: it has not counted unless it is
    /// [`Ticket::sending`] once more.
    pub fn not_sent(&self) {
        self.counted.not_sent();
    }

    /// Counts the tokens of a generation that has ended, well or not. Nobody waits for it.
    pub fn spent(&self, usage: &Usage) {
        let tokens = tokens_of(usage);
        if tokens > 0 {
            self.counted.spent(tokens);
        }
    }
}

/// Starts a process, asks it as the gate does and ends it; its end takes a moment that no message waits for.
fn ask_once(probe: Probe, gate: Arc<Gate>, tasks: TaskTracker) -> Ask<Result<Heard>> {
    Box::new(move || {
        let (probe, gate, tasks) = (probe.clone(), Arc::clone(&gate), tasks.clone());
        Box::pin(async move {
            let process = probe.start().await?;
            let heard = gate.hear(Some(&process)).await;
            tasks.spawn(process.end());
            Ok(heard)
        })
    })
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
