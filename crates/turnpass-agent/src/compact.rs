//! Compacting: the summary is asked for, checked, kept, and put in the place of what it is of.
//!
//! Nothing of the conversation changes before the summary is whole, found usable, and what it replaces is on the disk (if
//! the conversation is kept at all). A summary that fails leaves everything as it was but the backend state, where the
//! transport says that it is of no more use.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;
use turnpass::conversation::Message;
use turnpass::event::{Done, Notice, StateOrder, StopReason, Usage};
use turnpass::models::context::compaction_due;
use turnpass::models::{ceiling_tokens, estimate_tokens};
use turnpass::request::{CallKind, Request, Sampling, Tool, TransportKind};
use turnpass::{Error, ErrorCode, Event};

use crate::compaction::{Cause, compacted, cut, is_worth_it, question, size};
use crate::event::AgentEvent;
use crate::run::Run;
use crate::session::CompactionMark;

/// How long no summary is asked for after one failed, unless the conversation does not fit or the error names a later
/// time: what made it fail has to pass first, and each try costs as much as a long generation.
const COOLDOWN: Duration = Duration::from_secs(5 * 60);

/// Longest rest, whatever time an error names: a clock takes it, and a run that lives longer may try.
const LONGEST_COOLDOWN: Duration = Duration::from_secs(24 * 60 * 60);

/// What came of it.
pub(crate) enum Compacting {
    /// The conversation is shorter.
    Done,
    /// It is as it was, and not to be compacted now.
    Not(Reason),
    /// The run was cancelled; the conversation is as it was.
    Cancelled,
}

/// Why a conversation is not compacted.
pub(crate) enum Reason {
    /// It is not due.
    NotDue,
    /// The person or the host switched it off.
    Off,
    /// It was done as often as one run may.
    Limit(u32),
    /// There is nothing before its last message.
    Alone,
    /// What a summary would be of is itself larger than the window.
    OlderPartTooLarge,
    /// The summary failed.
    Failed(Error),
}

/// How a request for a summary ended.
enum Asked {
    Whole(Box<Done>),
    Failed(Error),
    Cancelled,
}

impl Run<'_> {
    /// Before a generation: compacts the conversation if its last response says so.
    ///
    /// # Errors
    ///
    /// When the conversation cannot be written down.
    pub(crate) async fn compact_if_due(&mut self) -> Result<Compacting, Error> {
        let settings = self.agent.compaction;
        let Some(policy) = settings
            .policy(self.transport())
            .filter(|_| settings.enabled)
        else {
            return Ok(Compacting::Not(Reason::NotDue));
        };
        let last = Usage {
            input_tokens: self.agent.last_prompt_tokens,
            ..Usage::default()
        };
        let done = self.report.compactions;
        let cools = self
            .agent
            .cools_until
            .is_some_and(|until| Instant::now() < until);
        if cools || !compaction_due(&last, self.window_tokens(), &policy, done) {
            return Ok(Compacting::Not(Reason::NotDue));
        }
        self.compact(Cause::Threshold).await
    }

    /// Compacts the conversation.
    ///
    /// # Errors
    ///
    /// When the conversation cannot be written down.
    pub(crate) async fn compact(&mut self, cause: Cause) -> Result<Compacting, Error> {
        let settings = self.agent.compaction;
        if !settings.enabled {
            return Ok(Compacting::Not(Reason::Off));
        }
        if self.report.compactions >= settings.per_run {
            return Ok(Compacting::Not(Reason::Limit(settings.per_run)));
        }
        let window = self.window_tokens();
        let messages = &self.agent.request.messages;
        let policy = settings.policy(self.transport());
        let threshold = policy.map(|policy| policy.threshold(window));
        let keep = settings.keeps(threshold, size(messages));
        let Some(at) = cut(messages, keep) else {
            return Ok(Compacting::Not(Reason::Alone));
        };
        if cause == Cause::Threshold && !is_worth_it(&messages[..at], messages) {
            return Ok(Compacting::Not(Reason::NotDue));
        }
        let question = question(&messages[..at]);
        let around = surroundings(&self.agent.request);
        if around + size(&question) > window {
            return Ok(Compacting::Not(Reason::OlderPartTooLarge));
        }
        let (count, before) = (messages.len(), around + size(messages));
        // Dense text has more tokens than the estimate says, and what came after the last response is not in its count.
        let tokens_before = self.agent.last_prompt_tokens.unwrap_or(0).max(before);
        (self.emit)(AgentEvent::Compacting {
            cause,
            tokens: tokens_before,
        });
        let done = match self.ask_for_summary(question).await {
            Asked::Whole(done) => done,
            Asked::Failed(error) => return Ok(self.failed_summary(cause, error)),
            Asked::Cancelled => return Ok(Compacting::Cancelled),
        };
        self.count_summary(&done);
        let shorter = match usable(&done) {
            Ok(summary) => compacted(&self.agent.request.messages, at, &summary),
            Err(error) => return Ok(self.failed_summary(cause, error)),
        };
        let after = around + size(&shorter);
        if after >= before {
            let what = "the summary is no shorter than what it is of";
            let error = Error::new(ErrorCode::SummaryUnusable, what);
            return Ok(self.failed_summary(cause, error));
        }
        let mark = CompactionMark {
            at_unix_s: unix_s(),
            cause,
            replaced: at,
            tokens_before,
            tokens_after: scaled(tokens_before, after, before),
        };
        self.agent.replace(shorter, at, mark)?;
        self.report.compactions += 1;
        (self.emit)(AgentEvent::Compacted {
            cause,
            messages_before: count,
            messages_after: self.agent.request.messages.len(),
            tokens_before,
            tokens_after: mark.tokens_after,
            usage: done.usage,
            model: done.model,
            upstream_requests: done.upstream_requests,
            laboratory: done.laboratory,
        });
        Ok(Compacting::Done)
    }

    /// One generation of the transport's own kind for summaries. What it says is shown to nobody.
    async fn ask_for_summary(&mut self, question: Vec<Message>) -> Asked {
        let mut request = self.agent.request.clone();
        request.call = CallKind::Summary;
        request.messages = question;
        request.sampling = of_summary(&request.sampling);
        let (request, retirement) = request.with_retirement();
        // For a run that is dropped in the middle of it, too.
        self.agent.retirement = Some(retirement);
        let mut generation = self.agent.provider.generate(request);
        let asked = loop {
            let item = tokio::select! {
                biased;
                () = self.cancel.cancelled() => break Asked::Cancelled,
                item = generation.next() => item,
            };
            match item {
                Some(Ok(Event::Done(done))) => break Asked::Whole(Box::new(done)),
                Some(Ok(Event::Notice(notice))) => {
                    self.report.laboratory |= notice == Notice::Laboratory;
                    (self.emit)(AgentEvent::Notice(notice));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => break Asked::Failed(error),
                None => {
                    let what = "a generation had no end";
                    break Asked::Failed(Error::new(ErrorCode::Internal, what));
                }
            }
        };
        // Ends it, when it was cancelled.
        drop(generation);
        match &asked {
            Asked::Whole(done) if done.state == StateOrder::Clear => {
                self.agent.request.state = None
            }
            Asked::Failed(error) if error.backend_state_retired() => {
                self.agent.request.state = None;
            }
            _ => {}
        }
        self.agent.heed_retirement();
        asked
    }

    /// It has used up tokens like any other generation, but the size of the conversation is not its own.
    fn count_summary(&mut self, done: &Done) {
        let report = &mut self.report;
        report.generations += 1;
        report.upstream_requests += done.upstream_requests;
        report.laboratory |= done.laboratory;
        report.add_spent(&done.usage);
    }

    fn failed_summary(&mut self, cause: Cause, error: Error) -> Compacting {
        let opens = error
            .resets_at()
            .and_then(|at| at.duration_since(SystemTime::now()).ok());
        let cools = opens.unwrap_or_default().clamp(COOLDOWN, LONGEST_COOLDOWN);
        self.agent.cools_until = Some(Instant::now() + cools);
        (self.emit)(AgentEvent::CompactionFailed {
            cause,
            error: error.clone(),
        });
        Compacting::Not(Reason::Failed(error))
    }

    fn transport(&self) -> TransportKind {
        let request = &self.agent.request;
        request
            .transport
            .unwrap_or_else(|| self.agent.provider.default_kind())
    }

    fn window_tokens(&self) -> u64 {
        let settings = self.agent.compaction;
        settings
            .window_tokens
            .unwrap_or_else(|| ceiling_tokens(&self.agent.request.model))
    }
}

/// What is sent beside the messages, in estimated tokens.
fn surroundings(request: &Request) -> u64 {
    let tool = |tool: &Tool| {
        tool.name.len() + tool.description.len() + tool.input_schema.to_string().len()
    };
    let tools = request.tools.iter().map(tool).sum();
    estimate_tokens(&request.system, tools, &[])
}

/// What is left of the host's settings for a summary: those that say how an answer ends or what it calls are for answers.
fn of_summary(sampling: &Sampling) -> Sampling {
    Sampling {
        stop_sequences: Vec::new(),
        tool_choice: None,
        output_schema: None,
        ..sampling.clone()
    }
}

/// The text of a summary that may take the place of a conversation.
fn usable(done: &Done) -> Result<String, Error> {
    if done.message.tool_calls().next().is_some() {
        return Err(Error::new(ErrorCode::SummaryToolCall, ""));
    }
    let text = done.message.text();
    let what = match &done.stop {
        StopReason::EndTurn if text.trim().is_empty() => "the summary is empty".to_owned(),
        StopReason::EndTurn => return Ok(text),
        StopReason::MaxTokens => "the summary reached the limit of output tokens".to_owned(),
        StopReason::Refusal { .. } => "the service refused to write the summary".to_owned(),
        _ => "the summary is not whole".to_owned(),
    };
    Err(Error::new(ErrorCode::SummaryUnusable, what))
}

/// What an overflow is told as when nothing makes the conversation fit.
pub(crate) fn too_large(overflow: &Error, why: &Reason) -> Error {
    let (more, next) = match why {
        Reason::NotDue | Reason::Alone => (
            "and what was said last is too large by itself, so no summary makes it fit".to_owned(),
            "Ask for less at once: put a long text into a file and name the file, or use a model with a larger window.",
        ),
        Reason::OlderPartTooLarge => (
            "and it is too large for this model to write a summary of".to_owned(),
            "Go on with a model of a larger window, or begin a new session.",
        ),
        Reason::Off => (
            "and compaction is switched off".to_owned(),
            "Switch compaction on, or begin a new session.",
        ),
        Reason::Limit(limit) => (
            format!("and it was compacted {limit} times in this run, which is the limit"),
            "Run again to go on, with a smaller task, or begin a new session.",
        ),
        Reason::Failed(error) => (
            format!("and the summary failed ({})", error.code()),
            "Run again in a few minutes, or begin a new session.",
        ),
    };
    told_anew(overflow, &more, next)
}

/// What an overflow is told as that follows a compaction.
pub(crate) fn still_too_large(overflow: &Error) -> Error {
    let next = "Ask for less at once, use a model with a larger window, or begin a new session.";
    told_anew(overflow, "although it was just compacted", next)
}

fn told_anew(overflow: &Error, more: &str, next: &str) -> Error {
    let said = match overflow.detail() {
        "" => overflow.code().meaning(),
        detail => detail,
    };
    let said = format!("{}, {more}", said.trim_end_matches('.'));
    let error = Error::new(overflow.code(), said).with_remedy(next);
    match overflow.status() {
        Some(status) => error.with_status(status),
        None => error,
    }
}

/// A size in the service's tokens, from estimates of a known one and of another.
fn scaled(tokens: u64, part: u64, whole: u64) -> u64 {
    let scaled = u128::from(tokens) * u128::from(part) / u128::from(whole.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

fn unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
