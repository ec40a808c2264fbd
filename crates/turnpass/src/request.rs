//! What a host asks: one request is one generation.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::conversation::Message;

/// One generation, as the host wants it.
///
/// Start from [`Request::new`] and set what differs. Whatever is set is either applied or refused with an error
/// before anything is started; nothing is ignored without a word.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// The host's key for this conversation.
    pub session: TransportSession,
    /// The conversation that this one was started from, for sub-agents.
    pub parent: Option<TransportSession>,
    /// What the call is for.
    pub call: CallKind,
    /// The model, as an alias or a full id.
    pub model: ModelId,
    /// How hard the model should work; `None` leaves the model's default.
    pub effort: Option<Effort>,
    /// Whether thinking is to be told.
    pub thinking: ThinkingDisplay,
    /// The system prompt; empty for none.
    pub system: String,
    /// The tools of the host, in any order.
    pub tools: Vec<Tool>,
    /// The whole conversation, oldest first, that ends with what the model is to answer.
    pub messages: Vec<Message>,
    /// Settings of the generation.
    pub sampling: Sampling,
    /// What the last `Done` of this conversation said to keep.
    pub state: Option<BackendState>,
    /// Where to say that `state` is of no more use; [`Request::with_retirement`] sets it.
    pub retirement: Option<StateRetirement>,
    /// Where the host's work takes place.
    pub place: Place,
    /// Deadlines.
    pub limits: Limits,
    /// The transport for this request; `None` takes the provider's.
    pub transport: Option<TransportKind>,
}

impl Request {
    /// A request with no tools, no system prompt and the default limits.
    pub fn new(model: impl Into<ModelId>, messages: Vec<Message>) -> Self {
        Self {
            session: TransportSession::default(),
            parent: None,
            call: CallKind::Normal,
            model: model.into(),
            effort: None,
            thinking: ThinkingDisplay::default(),
            system: String::new(),
            tools: Vec::new(),
            messages,
            sampling: Sampling::default(),
            state: None,
            retirement: None,
            place: Place::default(),
            limits: Limits::default(),
            transport: None,
        }
    }

    /// The same request with a signal of its own, in place of any that it had, and that signal.
    ///
    /// For summaries that the host may drop before their end; see [`StateRetirement`].
    #[must_use]
    pub fn with_retirement(mut self) -> (Self, StateRetirement) {
        let signal = StateRetirement::default();
        self.retirement = Some(signal.clone());
        (self, signal)
    }
}

/// Says whether a request retired the backend state of its conversation (pool document).
///
/// A summary that the pool writes into the parent's own live conversation makes that conversation another one than the
/// host's, and ends its process, whatever comes of the summary. A whole one says so by [`StateOrder::Clear`] in its
/// `Done`, a failed one by [`Error::backend_state_retired`]; a host that drops the generation hears neither and looks
/// here. The signal is given before the first byte is written and is never taken back, so it also stands after a whole
/// one. Given means: delete the stored state, as `Clear` says; the next request gives its history anew.
///
/// The pool alone gives it; the other transports keep no state.
///
/// Clones are one signal, also those in clones of a [`Request`]: take one for each request.
///
/// [`StateOrder::Clear`]: crate::event::StateOrder::Clear
/// [`Error::backend_state_retired`]: crate::Error::backend_state_retired
#[derive(Clone, Debug, Default)]
pub struct StateRetirement(Arc<AtomicBool>);

impl StateRetirement {
    /// Whether it was given.
    pub fn is_signaled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Gives it; for transports.
    pub fn signal(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The host's key for one conversation. Any text without NUL; it is never used as a file name as it stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TransportSession(pub String);

impl Default for TransportSession {
    fn default() -> Self {
        Self("default".to_owned())
    }
}

/// What a call is for. Only parent normal calls keep backend state (pool document).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallKind {
    /// The conversation itself.
    #[default]
    Normal,
    /// A sub-agent of the conversation in `parent`.
    SubAgent,
    /// A read-only second opinion.
    Advisor,
    /// A summary of the conversation, for compaction: its history (or an older part of it) and what asks for the
    /// summary, with the session, the parent, the tools, the prompt and the stored state of its normal calls, so that the
    /// service's cache is read. The pool lets the model call no tool in it (`summary_tool_call`), and may have to give the
    /// conversation's live process up for it: see [`StateRetirement`].
    Summary,
}

/// A model: an alias (`sonnet`) or a full id (`claude-sonnet-5-5`), with `[1m]` only where the host wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelId(pub String);

impl<T: Into<String>> From<T> for ModelId {
    fn from(value: T) -> Self {
        Self(value.into())
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How hard the model should work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// No thinking at all, where the model supports that; elsewhere an error.
    None,
    /// Least.
    Low,
    /// The usual default of newer models.
    Medium,
    /// The usual default of older models.
    High,
    /// More than high.
    Xhigh,
    /// Most.
    Max,
}

impl Effort {
    /// All levels, least first.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::Low,
        Self::Medium,
        Self::High,
        Self::Xhigh,
        Self::Max,
    ];

    /// The word on the CLI's command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
            Self::Max => "max",
        }
    }
}

impl std::str::FromStr for Effort {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let wanted = text.trim().to_ascii_lowercase();
        Self::ALL
            .into_iter()
            .find(|effort| effort.as_str() == wanted)
            .ok_or_else(|| UnknownWord::new("effort", text, &Self::ALL.map(Self::as_str)))
    }
}

/// A word that is none of those known; the message lists them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {word:?} is not known: use {known}")]
pub struct UnknownWord {
    what: &'static str,
    word: String,
    known: String,
}

impl UnknownWord {
    fn new(what: &'static str, word: &str, known: &[&str]) -> Self {
        let word = word.chars().take(40).collect();
        Self {
            what,
            word,
            known: known.join(", "),
        }
    }
}

/// Whether the service's thinking summaries are to be streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingDisplay {
    /// Ask for the provider-generated summaries (relay document).
    #[default]
    Summarized,
    /// Leave the CLI's default; newer models then send signatures with little or no text.
    Omitted,
}

/// A tool of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// The host's name: any non-empty text; it is mapped to what the service accepts, and back.
    pub name: String,
    /// What the model is told about it.
    #[serde(default)]
    pub description: String,
    /// JSON Schema of the input, as the host wrote it.
    pub input_schema: serde_json::Value,
}

/// Settings of one generation. A transport applies each one that is set, or refuses the request and names it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Upper bound of output tokens.
    pub max_tokens: Option<u32>,
    /// Texts that end the generation.
    pub stop_sequences: Vec<String>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Nucleus sampling.
    pub top_p: Option<f64>,
    /// Top-k sampling.
    pub top_k: Option<u32>,
    /// Which tool the model may or must call.
    pub tool_choice: Option<ToolChoice>,
    /// JSON Schema that the answer has to follow.
    pub output_schema: Option<serde_json::Value>,
}

impl Sampling {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Which tool the model may or must call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToolChoice {
    /// The model decides.
    Auto {
        /// At most one call in the answer.
        #[serde(default)]
        disable_parallel_tool_use: bool,
    },
    /// Some tool has to be called.
    Any {
        /// At most one call in the answer.
        #[serde(default)]
        disable_parallel_tool_use: bool,
    },
    /// This tool has to be called; the host's name.
    Tool {
        /// The host's name of the tool.
        name: String,
        /// At most one call in the answer.
        #[serde(default)]
        disable_parallel_tool_use: bool,
    },
    /// No tool may be called.
    None,
}

/// Opaque: the host stores it beside the conversation and gives it back. It holds ids and digests and no text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BackendState(pub String);

/// Where the host's work takes place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The working directory, absolute; `None` is a private empty one.
    pub directory: Option<PathBuf>,
    /// The session's time zone (`Europe/Vienna`); `None` inherits.
    pub time_zone: Option<String>,
}

/// Deadlines of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From the request to the first sign of progress; five minutes in the relay document.
    pub start: Duration,
    /// Between two signs of progress (an event of the answer; pings do not count); five minutes in the replay document.
    pub idle: Duration,
    /// The whole generation; thirty minutes in the relay and replay documents.
    pub total: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(5 * 60),
            idle: Duration::from_secs(5 * 60),
            total: Duration::from_secs(30 * 60),
        }
    }
}

/// How a request reaches the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// Live processes, one conversation each.
    Pool,
    /// The whole conversation into a fresh process.
    Replay,
    /// One admission through a loopback relay.
    Relay,
}

impl TransportKind {
    /// All transports.
    pub const ALL: [Self; 3] = [Self::Pool, Self::Replay, Self::Relay];

    /// The word used in settings, errors and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Replay => "replay",
            Self::Relay => "relay",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for TransportKind {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let wanted = text.trim().to_ascii_lowercase();
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str() == wanted)
            .ok_or_else(|| UnknownWord::new("transport", text, &Self::ALL.map(Self::as_str)))
    }
}
