//! Scenario files: what the scripted upstream answers, written as JSON.
//!
//! A [`Scenario`] is a list of [`Reply`]s, each used once and in order by the first request that meets its conditions, and
//! a default for all further requests (without one, the [directive model](crate::directive) answers). Unknown fields are
//! refused, and every error names the file and the place in it, as `replies[2].content[0]`.
//!
//! ```
//! use turnpass_lab::scenario::Scenario;
//!
//! let scenario = Scenario::from_json(r#"{"replies":[
//!     {"when":{"contains":"weather"},
//!      "content":[{"type":"tool_use","name":"weather","input":{"city":"Oslo"}}]},
//!     {"content":[{"type":"text","text":"It rains.","chunk":3}],"between_events_ms":5}
//! ]}"#)?;
//! assert_eq!(scenario.replies.len(), 2);
//!
//! let wrong = Scenario::from_json(r#"{"replies":[{"content":[{"type":"text","txt":"x"}]}]}"#);
//! assert!(wrong.unwrap_err().to_string().contains("replies[0].content[0]"));
//! # Ok::<(), turnpass_lab::scenario::ScenarioError>(())
//! ```

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

mod account;
mod load;

pub use account::{ExtraUsage, TokenAnswer, UsageAnswer};
pub(crate) use load::decode;

/// The largest scenario file that is read, in bytes: far above any hand-written one, far below what would hurt.
pub const MAX_SCENARIO_BYTES: u64 = 64 << 20;

/// Why a scenario could not be read. The message names the file (if any) and the place in it.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file could not be read.
    #[error("scenario {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The content is not a scenario.
    #[error("scenario {origin}: {place}: {problem}")]
    Invalid {
        /// The file, or `text`.
        origin: String,
        /// The place in it, as `replies[2].content[0]`.
        place: String,
        /// What is wrong there and what would be right.
        problem: String,
    },
}

/// A script for the upstream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    /// For the reader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Replies to Messages requests, each used in order.
    pub replies: Vec<Reply>,
    /// The reply once none of `replies` is left or fits; the directive model if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<Box<Reply>>,
    /// Headers of every reply to a Messages request, as the rate-limit ones; a reply's own of the same name wins.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Answers of `GET /api/oauth/usage`, in order; the last one stays. Empty: extra usage off, both windows low.
    pub usage: Vec<UsageAnswer>,
    /// Answers of `POST /v1/oauth/token`, in order; the last one stays. Empty: a new made-up token each time.
    pub token: Vec<TokenAnswer>,
    /// The body of `GET /api/oauth/profile`; a made-up account if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Value>,
    /// Model ids of `GET /v1/models`; the current ones if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
}

/// One reply to a Messages request. Exactly one of `content`, `events`, `body`, `error` and `directives` says what is
/// answered; with none of them the directive model answers, in the shape that the other fields give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reply {
    /// Which requests it is for.
    #[serde(skip_serializing_if = "When::is_empty")]
    pub when: When,
    /// How many requests it serves before it is used up.
    pub times: u32,
    /// The HTTP status.
    pub status: u16,
    /// Response headers beside the usual ones; one of a usual name replaces it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// The model named in the message; the requested one if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The message: content blocks, with actions (pings, stalls, ...) between them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<Item>>,
    /// Instead of `content`: SSE events as they are; `type` names the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<Value>>,
    /// Instead of `content`: a body as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<Body>,
    /// Instead of `content`: an error in the API's shape.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
    /// Instead of `content`: directives, executed as if the user had written them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directives: Option<String>,
    /// The stop reason: any word or null. Absent: `tool_use` if there is a tool call, else `end_turn`.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub stop_reason: Option<Option<String>>,
    /// The matched stop sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_sequence: Option<String>,
    /// `stop_details` of `message_delta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_details: Option<Value>,
    /// Fields laid over the simulated usage; null removes one.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub usage: Map<String, Value>,
    /// Silence before the response head.
    pub before_head_ms: u64,
    /// Time from one SSE event to the next.
    pub between_events_ms: u64,
    /// Actions before the event of a given number.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub at: Vec<At>,
    /// Where and how the reply breaks off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// Content codings, in the order in which they are applied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub encoding: Vec<Coding>,
    /// How the end of the body is marked. Absent: chunked for a stream, its length for all else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub framing: Option<Framing>,
    /// A `content-length` as given, right or wrong; implies `framing: length`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_length: Option<u64>,
    /// The shape of the SSE text.
    pub sse: SseShape,
    /// Splits the body into writes (and HTTP chunks) of this many bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_bytes: Option<NonZeroUsize>,
}

impl Default for Reply {
    fn default() -> Self {
        Self {
            when: When::default(),
            times: 1,
            status: 200,
            headers: BTreeMap::new(),
            model: None,
            content: None,
            events: None,
            body: None,
            error: None,
            directives: None,
            stop_reason: None,
            stop_sequence: None,
            stop_details: None,
            usage: Map::new(),
            before_head_ms: 0,
            between_events_ms: 0,
            at: Vec::new(),
            cut: None,
            encoding: Vec::new(),
            framing: None,
            content_length: None,
            sse: SseShape::default(),
            split_bytes: None,
        }
    }
}

impl Reply {
    /// A message of one text block.
    pub fn text(text: impl Into<String>) -> Self {
        Self::content([Item::text(text)])
    }

    /// A message of these blocks and actions.
    pub fn content(items: impl IntoIterator<Item = Item>) -> Self {
        Self {
            content: Some(items.into_iter().collect()),
            ..Self::default()
        }
    }

    /// An error in the API's shape.
    pub fn error(status: u16, kind: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            status,
            error: Some(ErrorBody {
                kind: kind.into(),
                message: message.into(),
                extra: Map::new(),
            }),
            ..Self::default()
        }
    }

    /// What the directives in this text ask for, whatever the request says.
    pub fn directives(text: impl Into<String>) -> Self {
        Self {
            directives: Some(text.into()),
            ..Self::default()
        }
    }
}

/// Conditions on a request; those that are given must all hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct When {
    /// The requested model, exactly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A text that occurs in the last user message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contains: Option<String>,
    /// The number of the Messages request, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nth: Option<u64>,
    /// Whether the request asks for a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
}

impl When {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A content block, or an action between blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Item {
    /// A text block.
    Text {
        /// The text.
        text: String,
        /// Characters in each delta; absent: about 24, at most 200 deltas.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chunk: Option<NonZeroUsize>,
    },
    /// A thinking block.
    Thinking {
        /// The text; empty for one whose text is not shown.
        thinking: String,
        /// The signature; absent: one that the upstream issues and recognises.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signature: Option<String>,
        /// Characters in each delta.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chunk: Option<NonZeroUsize>,
    },
    /// A redacted thinking block.
    RedactedThinking {
        /// Its opaque data; absent: issued by the upstream.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<String>,
    },
    /// A tool call. `raw` gives the input's text in pieces as they are; otherwise `input` is written in chunks.
    ToolUse {
        /// The tool's name; matched to the offered tools with or without an MCP prefix.
        name: String,
        /// The call's id; absent: a new one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// The input.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        input: Option<Value>,
        /// The input's text, one delta for each piece, JSON or not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        raw: Option<Vec<String>>,
        /// Characters in each delta of `input`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chunk: Option<NonZeroUsize>,
    },
    /// A block of any type.
    Block {
        /// The block as `content_block_start` carries it.
        block: Value,
        /// The deltas as they are.
        #[serde(default)]
        deltas: Vec<Value>,
    },
    /// Pings.
    Ping {
        /// How many.
        #[serde(default = "one")]
        count: u32,
    },
    /// Silence.
    Stall {
        /// For how long.
        ms: u64,
        /// A ping every so often, as the real API sends while it thinks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ping_every_ms: Option<NonZeroUsize>,
    },
    /// Silence until the client leaves.
    UntilClosed {},
    /// Silence until the test releases this gate.
    Hold {
        /// Its name.
        gate: String,
    },
    /// An SSE comment.
    Comment {
        /// Its text, one line.
        text: String,
    },
    /// Text in the stream as it is.
    Raw {
        /// The text.
        text: String,
    },
    /// Bytes in the stream as they are.
    Garbage {
        /// The bytes in base64.
        base64: String,
    },
    /// An SSE `error` event; nothing comes after it.
    Error {
        /// The error type.
        error: String,
        /// The message; absent: one made from the type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
    },
}

impl Item {
    /// A text block.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text {
            text: text.into(),
            chunk: None,
        }
    }

    /// A thinking block with an issued signature.
    pub fn thinking(text: impl Into<String>) -> Self {
        Self::Thinking {
            thinking: text.into(),
            signature: None,
            chunk: None,
        }
    }

    /// A tool call.
    pub fn tool_use(name: impl Into<String>, input: Value) -> Self {
        Self::ToolUse {
            name: name.into(),
            id: None,
            input: Some(input),
            raw: None,
            chunk: None,
        }
    }

    /// Whether it is an action and no content block.
    pub fn is_action(&self) -> bool {
        !matches!(
            self,
            Self::Text { .. }
                | Self::Thinking { .. }
                | Self::RedactedThinking { .. }
                | Self::ToolUse { .. }
                | Self::Block { .. }
        )
    }
}

/// An action before an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct At {
    /// The event, from 0 (`message_start`), or a word.
    pub event: Position,
    /// What to do before it.
    #[serde(rename = "do")]
    pub action: Item,
}

/// The place of an event in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Position {
    /// Its number, from 0.
    Number(usize),
    /// A place by name.
    Named(NamedPosition),
}

/// A place in a stream by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamedPosition {
    /// Before the first event.
    Start,
    /// Before the event in the middle.
    Middle,
    /// After the last event.
    End,
}

/// An error body: `{"type":"error","error":{"type":..,"message":..}}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorBody {
    /// The error type, as `rate_limit_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The message.
    pub message: String,
    /// Further fields of the inner object.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

/// A body as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// A text.
    Text(String),
    /// Bytes.
    Base64(String),
    /// A JSON value.
    Json(Value),
}

/// Where and how a reply breaks off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// Where.
    pub at: CutAt,
    /// How the connection ends there.
    #[serde(default)]
    pub how: CutHow,
}

/// Where a reply breaks off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutAt {
    /// After this many bytes of the (encoded) body.
    Byte(u64),
    /// Before the event of this number.
    Event(usize),
    /// Before the response head.
    BeforeHead,
    /// Inside the last content block: before its `content_block_stop`.
    MidBlock,
    /// After the last content block, before `message_delta`.
    BeforeMessageDelta,
    /// Before `message_stop`.
    BeforeMessageStop,
}

/// How a cut ends the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutHow {
    /// The HTTP body ends properly (last chunk); what is missing are events.
    End,
    /// The connection is closed without the end of the body.
    #[default]
    Close,
    /// The connection is reset.
    Rst,
}

/// A content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Coding {
    /// gzip
    Gzip,
    /// Brotli
    Br,
    /// Zstandard
    Zstd,
    /// zlib, as HTTP's `deflate` means it
    Deflate,
}

impl Coding {
    /// The word in `content-encoding`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Br => "br",
            Self::Zstd => "zstd",
            Self::Deflate => "deflate",
        }
    }

    /// The coding of this word.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Gzip, Self::Br, Self::Zstd, Self::Deflate]
            .into_iter()
            .find(|coding| coding.name() == name)
    }
}

/// How the end of a body is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Framing {
    /// `transfer-encoding: chunked`
    Chunked,
    /// `content-length`
    Length,
    /// By the end of the connection.
    Close,
}

/// The shape of the SSE text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SseShape {
    /// Lines end in CR LF.
    pub crlf: bool,
    /// Events have their `event:` line.
    pub event_names: bool,
    /// A comment before each event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
}

impl Default for SseShape {
    fn default() -> Self {
        Self {
            crlf: false,
            event_names: true,
            comment: None,
        }
    }
}

fn one() -> u32 {
    1
}

/// Tells `null` (some) from an absent field (none).
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<String>>, D::Error> {
    Option::<String>::deserialize(deserializer).map(Some)
}
