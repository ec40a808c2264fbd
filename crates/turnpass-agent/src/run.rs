//! The loop: one generation, then the tools that it called, in rounds.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime};

use tokio_util::sync::CancellationToken;
use turnpass::conversation::{ToolCall, ToolUseId};
use turnpass::event::{Done, Notice, Rejection, StateOrder, StopReason};
use turnpass::{Error, Event};

use crate::agent::Agent;
use crate::compact::{self, Compacting, Reason};
use crate::compaction::Cause;
use crate::event::{AgentEvent, Outcome, Report};
use crate::{history, retry};

/// One run of an agent.
pub(crate) struct Run<'a> {
    pub(crate) agent: &'a mut Agent,
    pub(crate) cancel: &'a CancellationToken,
    pub(crate) emit: &'a mut (dyn FnMut(AgentEvent) + Send),
    pub(crate) report: Report,
    began: Instant,
}

/// What is known of a generation that did not end whole.
#[derive(Default)]
pub(crate) struct Partial {
    text: String,
    output_seen: bool,
    pub(crate) released: HashSet<ToolUseId>,
    pub(crate) rejected: HashMap<ToolUseId, Rejection>,
    first_event: Option<Duration>,
}

enum Generated {
    Done(Box<Done>, Partial),
    Failed(Error, Partial),
    Cancelled(Partial),
}

impl<'a> Run<'a> {
    pub(crate) fn new(
        agent: &'a mut Agent,
        cancel: &'a CancellationToken,
        emit: &'a mut (dyn FnMut(AgentEvent) + Send),
    ) -> Self {
        Self {
            agent,
            cancel,
            emit,
            report: Report::new(),
            began: Instant::now(),
        }
    }

    pub(crate) async fn finish(mut self) -> Report {
        let ended = self.rounds().await;
        let ended = ended.unwrap_or_else(|error| Outcome::Failed { error });
        // Also what a failure or a cancel has added.
        self.report.outcome = match (self.agent.keep(&[]), ended) {
            (Err(error), ended) if !matches!(ended, Outcome::Failed { .. }) => {
                Outcome::Failed { error }
            }
            (_, ended) => ended,
        };
        self.report.elapsed_ms = milliseconds(self.began.elapsed());
        (self.emit)(AgentEvent::Ended(self.report.clone()));
        self.report
    }

    async fn rounds(&mut self) -> Result<Outcome, Error> {
        for round in 1..=self.agent.rounds {
            // What the next request holds is on the disk before it is sent.
            self.agent.keep(&[])?;
            let before = match self.compact_if_due().await? {
                Compacting::Cancelled => return Ok(Outcome::Cancelled),
                before => before,
            };
            (self.emit)(AgentEvent::Round { round });
            let (done, partial) = match self.generate_within_window(before).await? {
                Generated::Done(done, partial) => (*done, partial),
                Generated::Failed(error, partial) => return Ok(self.failed(error, &partial)),
                Generated::Cancelled(partial) => return Ok(self.cancelled(&partial)),
            };
            let stop = done.stop.clone();
            let calls: Vec<ToolCall> = done.message.tool_calls().cloned().collect();
            self.take_done(round, done, &partial);
            // Before any tool runs: a call that is not known of could be made again.
            self.agent.keep(&[])?;
            let refusal = match &stop {
                StopReason::ToolUse | StopReason::EndTurn | StopReason::StopSequence { .. } => None,
                _ => Some("not run: the answer was not whole"),
            };
            if let Some(refusal) = refusal {
                self.refuse_all(&calls, refusal);
                return Ok(outcome_of(stop));
            }
            if calls.is_empty() {
                return Ok(match stop {
                    StopReason::ToolUse => Outcome::Stopped { stop },
                    _ => Outcome::Completed,
                });
            }
            if round == self.agent.rounds {
                self.refuse_all(&calls, "not run: the limit of rounds is reached");
                break;
            }
            self.run_calls(&calls, &partial).await?;
            if self.cancel.is_cancelled() {
                return Ok(Outcome::Cancelled);
            }
        }
        Ok(Outcome::RoundLimit {
            rounds: self.agent.rounds,
        })
    }

    /// One generation. One that does not fit, and has said nothing, is asked for once more after a compaction.
    async fn generate_within_window(&mut self, before: Compacting) -> Result<Generated, Error> {
        let (overflow, partial) = match self.generate_with_retries().await {
            Generated::Failed(error, partial) if is_overflow(&error, &partial) => (error, partial),
            ended => return Ok(ended),
        };
        let compacting = match before {
            // It is not tried again at once.
            Compacting::Not(Reason::Failed(error)) => Compacting::Not(Reason::Failed(error)),
            _ => self.compact(Cause::Overflow).await?,
        };
        Ok(match compacting {
            Compacting::Done => match self.generate_with_retries().await {
                Generated::Failed(error, partial) if is_overflow(&error, &partial) => {
                    Generated::Failed(compact::still_too_large(&error), partial)
                }
                ended => ended,
            },
            Compacting::Not(why) => Generated::Failed(compact::too_large(&overflow, &why), partial),
            Compacting::Cancelled => Generated::Cancelled(partial),
        })
    }

    async fn generate_with_retries(&mut self) -> Generated {
        let mut tried = 0;
        loop {
            let (error, partial) = match self.generate().await {
                Generated::Failed(error, partial) => (error, partial),
                ended => return ended,
            };
            let now = SystemTime::now();
            let Some(wait) = retry::wait_before_retry(&error, tried, partial.output_seen, now)
            else {
                return Generated::Failed(error, partial);
            };
            tried += 1;
            self.report.retries += 1;
            (self.emit)(AgentEvent::Retry {
                retry: tried,
                wait_ms: milliseconds(wait),
                error,
            });
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Generated::Cancelled(partial),
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    async fn generate(&mut self) -> Generated {
        let started = Instant::now();
        let mut partial = Partial::default();
        let mut generation = self.agent.provider.generate(self.agent.request.clone());
        loop {
            let item = tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Generated::Cancelled(partial),
                item = generation.next() => item,
            };
            match item {
                Some(Ok(Event::Done(done))) => return Generated::Done(Box::new(done), partial),
                Some(Ok(event)) => self.take_event(event, &mut partial, started),
                Some(Err(error)) => return Generated::Failed(error, partial),
                // `Generation` gives an error before it ends without a terminal event.
                None => {
                    let error =
                        Error::new(turnpass::ErrorCode::Internal, "a generation had no end");
                    return Generated::Failed(error, partial);
                }
            }
        }
    }

    fn take_event(&mut self, event: Event, partial: &mut Partial, started: Instant) {
        if matches!(
            event,
            Event::Text { .. }
                | Event::Thinking { .. }
                | Event::ThinkingBlock(_)
                | Event::ToolInput { .. }
                | Event::ToolCall(_)
                | Event::ToolRejected { .. }
        ) {
            partial.output_seen = true;
            partial.first_event.get_or_insert(started.elapsed());
        }
        let told = match event {
            Event::Started { model, how } => AgentEvent::Started { model, how },
            Event::Text { text } => {
                partial.text.push_str(&text);
                AgentEvent::Text { text }
            }
            Event::Thinking { text } => AgentEvent::Thinking { text },
            Event::Retracted { reason } => {
                partial.text.clear();
                partial.released.clear();
                partial.rejected.clear();
                AgentEvent::Retracted { reason }
            }
            Event::Notice(notice) => {
                // Also of a generation that does not end well.
                self.report.laboratory |= notice == Notice::Laboratory;
                AgentEvent::Notice(notice)
            }
            Event::ToolCall(call) => {
                partial.released.insert(call.id);
                return;
            }
            Event::ToolRejected { call, reason } => {
                partial.rejected.insert(call.id, reason);
                return;
            }
            // Thinking blocks and token counts come whole with `Done`; previews of input are for no use here.
            _ => return,
        };
        (self.emit)(told);
    }

    fn take_done(&mut self, round: u32, done: Done, partial: &Partial) {
        let report = &mut self.report;
        report.generations += 1;
        report.upstream_requests += done.upstream_requests;
        report.laboratory |= done.laboratory;
        report.add_usage(&done.usage);
        let first_event_ms = partial.first_event.map(milliseconds);
        if round == 1 {
            report.first_event_ms = first_event_ms;
        }
        match done.state {
            StateOrder::Keep { state } => self.agent.request.state = Some(state),
            StateOrder::Clear => self.agent.request.state = None,
            StateOrder::Unchanged => {}
        }
        let prompt = done.usage.prompt_tokens();
        self.agent.last_prompt_tokens = (prompt > 0).then_some(prompt);
        // An answer without a block would make the conversation one that cannot be sent.
        if !done.message.content.is_empty() {
            self.agent.request.messages.push(done.message);
        }
        (self.emit)(AgentEvent::RoundEnded {
            round,
            stop: done.stop,
            usage: done.usage,
            model: done.model,
            upstream_requests: done.upstream_requests,
            first_event_ms,
            laboratory: done.laboratory,
        });
    }

    fn failed(&mut self, error: Error, partial: &Partial) -> Outcome {
        if partial.output_seen {
            let why = format!("the generation failed ({})", error.code());
            history::keep_partial(&mut self.agent.request.messages, &partial.text, &why);
        }
        Outcome::Failed { error }
    }

    fn cancelled(&mut self, partial: &Partial) -> Outcome {
        let why = "the person cancelled it";
        history::keep_partial(&mut self.agent.request.messages, &partial.text, why);
        Outcome::Cancelled
    }
}

/// Whether a generation failed before it said anything, because the conversation is too large.
fn is_overflow(error: &Error, partial: &Partial) -> bool {
    error.is_context_overflow() && !partial.output_seen && !error.output_seen()
}

fn outcome_of(stop: StopReason) -> Outcome {
    match stop {
        StopReason::MaxTokens => Outcome::MaxTokens,
        StopReason::Refusal {
            category,
            explanation,
        } => Outcome::Refused {
            category,
            explanation,
        },
        stop => Outcome::Stopped { stop },
    }
}

pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
