//! What a host hears of a generation: events in order, ended by exactly one [`Event::Done`] or one error.

use serde::{Deserialize, Serialize};

use crate::conversation::{Message, SignedThinking, ToolCall, ToolUseId};
use crate::request::{BackendState, ModelId};

/// One event of a generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// Once, when the service began to answer; before any text.
    Started {
        /// The model that serves, as the service names it.
        model: ModelId,
        /// How the request reached it.
        how: Plan,
    },
    /// A piece of the answer, as it arrives.
    Text {
        /// The piece.
        text: String,
    },
    /// A piece of thinking that may be shown, as it arrives. Never an empty one.
    Thinking {
        /// The piece.
        text: String,
    },
    /// A thinking block is complete; keep it in the conversation. Follows its pieces.
    ThinkingBlock(SignedThinking),
    /// A piece of a tool call's input, for preview only: nothing may be executed from it.
    ToolInput {
        /// The call.
        id: ToolUseId,
        /// The host's name of the tool.
        name: String,
        /// The piece of JSON text.
        partial: String,
    },
    /// A whole, valid call of a host tool. Emitted once per call, after all of the transport's conditions hold.
    ToolCall(ToolCall),
    /// The model called something that the host cannot run. It is in the message of `Done`, and the next request
    /// must answer its id like any call (the agent answers with an error result).
    ToolRejected {
        /// The call as it stands in the message.
        call: ToolCall,
        /// Why it is no call of the host's.
        reason: Rejection,
    },
    /// What was said since `Started` no longer counts: forget it. Another beginning follows.
    Retracted {
        /// Why, in words.
        reason: String,
    },
    /// Something worth knowing that changes nothing.
    Notice(Notice),
    /// The newest token counts of this generation, whenever they change.
    Usage(Usage),
    /// The end: the generation is complete and valid.
    Done(Done),
}

/// How a request reached the service, with the reason in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// In one word.
    pub kind: PlanKind,
    /// Why, in a sentence.
    pub reason: String,
}

/// How a request reached the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanKind {
    /// A process was started for it.
    Fresh,
    /// A kept process took it.
    Warm,
    /// The live process of this conversation went on.
    Continued,
    /// A stored conversation of the CLI was resumed.
    Resumed,
    /// A stored conversation of the CLI was forked.
    Forked,
    /// The whole history was given to a new process.
    Reseeded,
}

/// Why a call was not released as one of the host's tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Rejection {
    /// The input does not parse (`argument_decode_error`).
    ArgumentDecode {
        /// What the model wrote.
        raw: String,
    },
    /// No tool of this name was offered.
    UnknownTool,
}

/// Something worth knowing that changes nothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "notice", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Notice {
    /// The CLI or turnpass tries again before anything was said.
    Retry {
        /// Of the failed try, if HTTP gave one.
        status: Option<u16>,
        /// In words.
        reason: String,
    },
    /// A usage window is nearly or wholly used.
    LimitWarning {
        /// The window, as the service names it.
        window: String,
        /// Used part, 0 to 1.
        utilization: Option<f64>,
        /// When it opens again, in Unix seconds.
        resets_at: Option<i64>,
    },
    /// Further requests of the CLI were refused while this generation ran.
    RequestsRefused {
        /// How many.
        count: u32,
    },
    /// The normaliser changed the history on the way out; the host's copy is untouched.
    Normalised {
        /// What was changed, in words, one entry a rule.
        changes: Vec<String>,
    },
    /// This is a laboratory run: nothing reached the service.
    Laboratory,
    /// Once per provider: the transport is not certified by anybody (relay document).
    Uncertified {
        /// The sentence to show.
        text: String,
    },
    /// Once per provider: of the installed version of the CLI it is not known whether it does what the faster ways need, so
    /// the documented ways are used.
    UncertifiedVersion {
        /// The version.
        version: String,
        /// The sentence to show; it says how to settle it.
        text: String,
    },
    /// Anything else, in words.
    Other {
        /// The sentence to show.
        text: String,
    },
}

/// Token counts of one generation. `None` where the service did not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Prompt tokens neither read from nor written to the cache.
    pub input_tokens: Option<u64>,
    /// Tokens of the answer.
    pub output_tokens: Option<u64>,
    /// Prompt tokens written to the cache, all lifetimes.
    pub cache_creation_input_tokens: Option<u64>,
    /// Of these, with a lifetime of five minutes.
    pub cache_creation_5m_input_tokens: Option<u64>,
    /// Of these, with a lifetime of one hour.
    pub cache_creation_1h_input_tokens: Option<u64>,
    /// Prompt tokens read from the cache.
    pub cache_read_input_tokens: Option<u64>,
}

impl Usage {
    /// The size of the prompt: input, cache creation and cache read (pool document).
    pub fn prompt_tokens(&self) -> u64 {
        // What the service says may be any number, and a sum that wraps would be a small one.
        let written = self.cache_creation_input_tokens.unwrap_or(0);
        let read = self.cache_read_input_tokens.unwrap_or(0);
        self.input_tokens
            .unwrap_or(0)
            .saturating_add(written)
            .saturating_add(read)
    }

    /// Share of the prompt that was read from the cache, 0 to 1; `None` for an empty prompt.
    pub fn cache_read_share(&self) -> Option<f64> {
        let prompt = self.prompt_tokens();
        #[allow(
            clippy::cast_precision_loss,
            reason = "token counts stay far below 2^52"
        )]
        (prompt > 0).then(|| self.cache_read_input_tokens.unwrap_or(0) as f64 / prompt as f64)
    }
}

/// Why the model stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum StopReason {
    /// It said what it had to say.
    EndTurn,
    /// It waits for tool results.
    ToolUse,
    /// The bound on output tokens was reached; tool calls of a cut answer are released only if whole.
    MaxTokens,
    /// One of the stop sequences came.
    StopSequence {
        /// Which one.
        sequence: Option<String>,
    },
    /// The service refused; the answer so far stands in the message.
    Refusal {
        /// The service's category, at most 128 characters.
        category: Option<String>,
        /// The service's explanation, at most 1,024 characters.
        explanation: Option<String>,
    },
    /// The service paused a long turn.
    PauseTurn,
    /// The context window was full before the answer was.
    ContextWindowExceeded,
    /// A reason that this version does not know.
    Other {
        /// As on the wire.
        word: String,
    },
}

/// The end of a generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Done {
    /// Why the model stopped.
    pub stop: StopReason,
    /// The whole answer, to be appended to the conversation.
    pub message: Message,
    /// Final token counts of this generation.
    pub usage: Usage,
    /// The model that served, as the service names it.
    pub model: ModelId,
    /// What to do with the backend state.
    pub state: StateOrder,
    /// Messages requests that reached the upstream for this generation; a readmitted one counts again.
    pub upstream_requests: u32,
    /// True when the answer came from a laboratory upstream.
    pub laboratory: bool,
}

impl Done {
    /// An end with everything given; for transports outside this crate.
    pub fn new(stop: StopReason, message: Message, usage: Usage, model: ModelId) -> Self {
        Self {
            stop,
            message,
            usage,
            model,
            state: StateOrder::Unchanged,
            upstream_requests: 0,
            laboratory: false,
        }
    }
}

/// What the host does with the backend state that it stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum StateOrder {
    /// This transport or call kind keeps none: leave what is there.
    Unchanged,
    /// Store this one.
    Keep {
        /// The new state.
        state: BackendState,
    },
    /// Delete it (ClearBackendState in the pool document).
    Clear,
}
