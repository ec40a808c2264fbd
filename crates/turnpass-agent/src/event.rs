//! What a run tells, in order, ended by exactly one [`AgentEvent::Ended`].

use serde::Serialize;
use turnpass::Error;
use turnpass::conversation::{ToolInput, ToolUseId};
use turnpass::event::{Notice, Plan, StopReason, Usage};
use turnpass::request::ModelId;

use crate::compaction::Cause;

/// One event of a run.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum AgentEvent {
    /// A generation is asked for.
    Round {
        /// Its number within the run, from one. A retry keeps the number.
        round: u32,
    },
    /// The service began to answer.
    Started {
        /// The model that serves.
        model: ModelId,
        /// How the request reached it.
        how: Plan,
    },
    /// A piece of the answer, as it arrives.
    Text {
        /// The piece.
        text: String,
    },
    /// A piece of thinking that may be shown, as it arrives.
    Thinking {
        /// The piece.
        text: String,
    },
    /// What this round said so far no longer counts.
    Retracted {
        /// Why, in words.
        reason: String,
    },
    /// Something worth knowing that changes nothing.
    Notice(Notice),
    /// The generation failed before it said anything, and is asked for again after a wait.
    Retry {
        /// Which retry of this round it is, from one.
        retry: u32,
        /// The wait.
        wait_ms: u64,
        /// Why.
        error: Error,
    },
    /// A generation ended; what it called runs next.
    RoundEnded {
        /// Its number within the run.
        round: u32,
        /// Why the model stopped.
        stop: StopReason,
        /// Its token counts.
        usage: Usage,
        /// The model that served.
        model: ModelId,
        /// Messages requests that reached the upstream for it.
        upstream_requests: u32,
        /// From the request to the first piece of the answer.
        first_event_ms: Option<u64>,
        /// Whether the answer came from a laboratory upstream.
        laboratory: bool,
    },
    /// A summary of the older part of the conversation is asked for.
    Compacting {
        /// Why.
        cause: Cause,
        /// The size of the conversation: the last response's prompt, or more where an estimate says so.
        tokens: u64,
    },
    /// The summary is in the place of the older part.
    Compacted {
        /// Why.
        cause: Cause,
        /// Messages before.
        messages_before: usize,
        /// Messages now, with the summary.
        messages_after: usize,
        /// The size before, in tokens.
        tokens_before: u64,
        /// The size now, in tokens; an estimate until the next response.
        tokens_after: u64,
        /// Token counts of the summary's own generation.
        usage: Usage,
        /// The model that wrote it.
        model: ModelId,
        /// Messages requests that reached the upstream for it.
        upstream_requests: u32,
        /// Whether it came from a laboratory upstream.
        laboratory: bool,
    },
    /// The summary failed or is of no use; the conversation is as it was, and no other one is asked for at once.
    CompactionFailed {
        /// Why it was to be compacted.
        cause: Cause,
        /// What failed.
        error: Error,
    },
    /// A tool begins to run, or was refused (then `ToolEnded` follows at once).
    ToolStarted {
        /// The call.
        id: ToolUseId,
        /// The tool.
        name: String,
        /// The call in one line.
        summary: String,
        /// The input, as the model wrote it.
        input: ToolInput,
    },
    /// A tool ended; in the order of ending, while the model gets the results in the order of the calls.
    ToolEnded {
        /// The call.
        id: ToolUseId,
        /// The tool.
        name: String,
        /// What the model is told.
        output: String,
        /// Whether the model is told of a failure.
        is_error: bool,
        /// Whether it did not run at all: denied, rejected or cancelled before.
        refused: bool,
        /// Whether the output was cut at the limit of a result.
        cut: bool,
        /// From its start to its end.
        elapsed_ms: u64,
    },
    /// The end of the run.
    Ended(Report),
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// The model said what it had to say.
    Completed,
    /// The model still wanted tools when the rounds were used up.
    RoundLimit {
        /// The limit.
        rounds: u32,
    },
    /// The service refused.
    Refused {
        /// The service's category.
        category: Option<String>,
        /// The service's explanation.
        explanation: Option<String>,
    },
    /// The bound on output tokens was reached; calls of the cut answer were not run.
    MaxTokens,
    /// The model stopped for a reason after which an agent cannot go on.
    Stopped {
        /// The reason.
        stop: StopReason,
    },
    /// A generation failed.
    Failed {
        /// Why.
        error: Error,
    },
    /// The run was cancelled through its token.
    Cancelled,
}

impl Outcome {
    /// The word for it in events and records.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::RoundLimit { .. } => "round_limit",
            Self::Refused { .. } => "refused",
            Self::MaxTokens => "max_tokens",
            Self::Stopped { .. } => "stopped",
            Self::Failed { .. } => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What happened in a run.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Generations that ended whole, summaries among them.
    pub generations: u32,
    /// Compactions of the conversation.
    pub compactions: u32,
    /// Messages requests that reached the upstream for them.
    pub upstream_requests: u32,
    /// Generations that were asked for again.
    pub retries: u32,
    /// Tool calls that ran.
    pub tool_calls: u32,
    /// Tool calls that were answered without being run.
    pub refused_calls: u32,
    /// Size of the conversation, in tokens: prompt and answer of the last generation.
    pub context_tokens: Option<u64>,
    /// Token counts of all generations together: what was used up, not the size of the conversation.
    pub usage: Usage,
    /// Share of all prompts together that was read from the cache, 0 to 1.
    pub cache_read_share: Option<f64>,
    /// From the request of the first round to the first piece of its answer.
    pub first_event_ms: Option<u64>,
    /// The whole run.
    pub elapsed_ms: u64,
    /// Whether any answer came from a laboratory upstream.
    pub laboratory: bool,
}

impl Report {
    pub(crate) fn new() -> Self {
        Self {
            outcome: Outcome::Completed,
            generations: 0,
            compactions: 0,
            upstream_requests: 0,
            retries: 0,
            tool_calls: 0,
            refused_calls: 0,
            context_tokens: None,
            usage: Usage::default(),
            cache_read_share: None,
            first_event_ms: None,
            elapsed_ms: 0,
            laboratory: false,
        }
    }

    pub(crate) fn add_usage(&mut self, usage: &Usage) {
        self.add_spent(usage);
        let answer = usage.output_tokens.unwrap_or(0);
        self.context_tokens = Some(usage.prompt_tokens().saturating_add(answer));
    }

    /// Of a generation that says nothing about the size of the conversation.
    pub(crate) fn add_spent(&mut self, usage: &Usage) {
        let sum = &mut self.usage;
        for (total, part) in [
            (&mut sum.input_tokens, usage.input_tokens),
            (&mut sum.output_tokens, usage.output_tokens),
            (
                &mut sum.cache_creation_input_tokens,
                usage.cache_creation_input_tokens,
            ),
            (
                &mut sum.cache_creation_5m_input_tokens,
                usage.cache_creation_5m_input_tokens,
            ),
            (
                &mut sum.cache_creation_1h_input_tokens,
                usage.cache_creation_1h_input_tokens,
            ),
            (
                &mut sum.cache_read_input_tokens,
                usage.cache_read_input_tokens,
            ),
        ] {
            if let Some(part) = part {
                *total = Some(total.unwrap_or(0).saturating_add(part));
            }
        }
        self.cache_read_share = self.usage.cache_read_share();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bug_056_the_context_is_the_last_prompt_and_the_bill_is_the_sum() {
        let mut report = Report::new();
        for input in [10_000, 20_000, 30_000] {
            report.add_usage(&Usage {
                input_tokens: Some(input),
                ..Usage::default()
            });
        }
        assert_eq!(report.context_tokens, Some(30_000));
        assert_eq!(report.usage.input_tokens, Some(60_000));
        assert_eq!(report.usage.output_tokens, None, "never told, never nought");
    }

    #[test]
    fn an_event_is_one_json_object_with_a_type() {
        let events = [
            AgentEvent::Notice(Notice::Laboratory),
            AgentEvent::Ended(Report::new()),
            AgentEvent::Retry {
                retry: 1,
                wait_ms: 5,
                error: Error::new(turnpass::ErrorCode::Overloaded, "busy"),
            },
        ];
        let lines = events.map(|event| serde_json::to_value(event).unwrap());
        assert_eq!(
            lines[0],
            serde_json::json!({"type":"notice","notice":"laboratory"})
        );
        assert_eq!(lines[1]["type"], "ended");
        assert_eq!(lines[1]["outcome"], "completed");
        assert_eq!(lines[2]["error"]["code"], "overloaded");
    }
}
