//! The Messages API's streaming events, content blocks and errors.
//!
//! Read tolerantly: an event, block or delta type that is new is a value of its own ([`StreamEvent::Unknown`], [`BlockKind::Unknown`],
//! [`Delta::Unknown`]) that the reader skips and counts; fields that are new are ignored. A known type without what makes it up is an error.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::lenient;
use super::sse;
use super::text::Text;
use super::usage::Usage;

/// Why an event could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessagesError {
    /// The data is not a JSON object with a `type`.
    #[error("the event is not a JSON object with a type")]
    NotAnEvent,
    /// A known event lacks a field or has one of the wrong type.
    #[error("a {event} event is malformed: {problem}")]
    Malformed {
        /// The event's type.
        event: String,
        /// What serde said; it names fields and types and quotes no content.
        problem: String,
    },
}

/// One event of a streamed message.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum StreamEvent<'a> {
    /// The message begins.
    MessageStart(Box<Message<'a>>),
    /// A block begins.
    ContentBlockStart {
        /// Position in the message, from 0.
        index: u32,
        /// The block as it stands at its beginning; its text or input comes in deltas.
        block: Block<'a>,
    },
    /// A block grows.
    ContentBlockDelta {
        /// Position of the block.
        index: u32,
        /// What is added.
        delta: Delta<'a>,
    },
    /// A block is whole.
    ContentBlockStop {
        /// Position of the block.
        index: u32,
    },
    /// The message's end is known: stop reason and final counters.
    MessageDelta(MessageDelta<'a>),
    /// The message is over.
    MessageStop,
    /// Nothing but a sign of life.
    Ping,
    /// The API ends the stream with an error.
    Error(ErrorBody),
    /// A type that is new.
    Unknown {
        /// The type's name.
        kind: Text<'a>,
    },
}

/// What a `content_block_delta` adds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delta<'a> {
    /// Text.
    Text(Text<'a>),
    /// Thinking, in the clear.
    Thinking(Text<'a>),
    /// A piece of a tool input's JSON; may be empty, and a tool without arguments has none but `""`.
    InputJson(Text<'a>),
    /// The signature of a thinking block.
    Signature(Text<'a>),
    /// A type that is new.
    Unknown {
        /// The type's name.
        kind: Text<'a>,
    },
}

/// A `message_delta`.
#[derive(Debug, Clone, Default)]
pub struct MessageDelta<'a> {
    /// Why the message ended.
    pub stop_reason: Option<Text<'a>>,
    /// The stop sequence that was met.
    pub stop_sequence: Option<Text<'a>>,
    /// More about a refusal.
    pub stop_details: Option<&'a RawValue>,
    /// Counters to merge into those of `message_start`.
    pub usage: Usage,
}

/// A message: in `message_start`, in the CLI's `assistant` and `user` records, in a reply that was not streamed.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Message<'a> {
    /// The API's id; a user message has none.
    #[serde(borrow)]
    pub id: Option<Text<'a>>,
    /// The model that served it; `<synthetic>` when the CLI wrote the message itself.
    #[serde(borrow)]
    pub model: Option<Text<'a>>,
    /// `assistant`, `user` or `system`.
    #[serde(borrow)]
    pub role: Option<Text<'a>>,
    /// The blocks.
    #[serde(borrow)]
    pub content: Content<'a>,
    /// Why it ended; null in the CLI's `assistant` records, which come before the end.
    #[serde(borrow)]
    pub stop_reason: Option<Text<'a>>,
    /// The stop sequence that was met.
    #[serde(borrow)]
    pub stop_sequence: Option<Text<'a>>,
    /// More about a refusal.
    #[serde(borrow)]
    pub stop_details: Option<&'a RawValue>,
    /// Counters so far.
    #[serde(deserialize_with = "usage_or_none")]
    pub usage: Usage,
}

/// Model name of messages that the CLI wrote itself: errors and answers to local commands (CLI 2.1.332).
pub const SYNTHETIC_MODEL: &str = "<synthetic>";

impl Message<'_> {
    /// Whether the CLI wrote this message itself, in place of a model.
    pub fn is_synthetic(&self) -> bool {
        self.model.as_deref() == Some(SYNTHETIC_MODEL)
    }
}

/// Content of a message: a plain string or a list of blocks.
#[derive(Debug, Clone)]
pub enum Content<'a> {
    /// A plain string, which means one text block.
    Text(Text<'a>),
    /// Blocks in order.
    Blocks(Vec<Block<'a>>),
}

impl Default for Content<'_> {
    fn default() -> Self {
        Self::Blocks(Vec::new())
    }
}

impl<'a> Content<'a> {
    /// The blocks, a plain string being one text block.
    pub fn kinds(&self) -> Vec<BlockKind<'a>> {
        match self {
            Content::Text(text) => vec![BlockKind::Text { text: text.clone() }],
            Content::Blocks(blocks) => blocks.iter().map(|block| block.kind.clone()).collect(),
        }
    }

    /// All text in it, joined without a separator.
    pub fn text(&self) -> String {
        match self {
            Content::Text(text) => text.as_str().to_owned(),
            Content::Blocks(blocks) => blocks
                .iter()
                .filter_map(|block| match &block.kind {
                    BlockKind::Text { text } => Some(text.as_str()),
                    _ => None,
                })
                .collect(),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Content<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // By hand and not as an untagged enum, which would buffer a tool input of megabytes.
        struct ContentVisitor;

        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of blocks")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Content::default())
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Content::Text(text.into()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Content::Text(text.to_owned().into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut blocks = Vec::new();
                while let Some(block) = seq.next_element()? {
                    blocks.push(block);
                }
                Ok(Content::Blocks(blocks))
            }
        }

        deserializer.deserialize_any(ContentVisitor)
    }
}

/// A content block: what it is, and its bytes.
#[derive(Debug, Clone)]
pub struct Block<'a> {
    /// The block's JSON as received, for passing on byte for byte.
    pub raw: &'a RawValue,
    /// What it is.
    pub kind: BlockKind<'a>,
}

/// What a content block is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum BlockKind<'a> {
    /// Text.
    Text {
        /// The text; empty at a block's start.
        text: Text<'a>,
    },
    /// Thinking with its signature, both possibly empty.
    Thinking {
        /// The thinking in the clear, or a summary, or nothing.
        thinking: Text<'a>,
        /// Opaque; empty at a block's start.
        signature: Text<'a>,
    },
    /// Thinking that only the API can read.
    RedactedThinking {
        /// Opaque.
        data: Text<'a>,
    },
    /// A call of a tool.
    ToolUse {
        /// The call's id.
        id: Text<'a>,
        /// The tool's name upstream.
        name: Text<'a>,
        /// The input; `{}` at a block's start.
        input: &'a RawValue,
    },
    /// The result of a call.
    ToolResult {
        /// The id of the call.
        tool_use_id: Text<'a>,
        /// A string or blocks.
        content: Option<&'a RawValue>,
        /// Whether the call failed.
        is_error: bool,
    },
    /// An image; see [`Block::raw`].
    Image,
    /// A document; see [`Block::raw`].
    Document,
    /// A type that is new.
    Unknown {
        /// The type's name.
        kind: Text<'a>,
    },
}

/// Any block, flat: one pass over its JSON, whatever the order of its keys.
#[derive(Deserialize)]
struct FlatBlock<'a> {
    #[serde(borrow, rename = "type")]
    kind: Text<'a>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    thinking: Option<Text<'a>>,
    #[serde(borrow, default)]
    signature: Option<Text<'a>>,
    #[serde(borrow, default)]
    data: Option<Text<'a>>,
    #[serde(borrow, default)]
    id: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_use_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(default, deserialize_with = "lenient::flag")]
    is_error: bool,
}

impl<'a> FlatBlock<'a> {
    fn into_kind(self) -> Result<BlockKind<'a>, &'static str> {
        Ok(match self.kind.as_str() {
            "text" => BlockKind::Text {
                text: self.text.unwrap_or_default(),
            },
            "thinking" => BlockKind::Thinking {
                thinking: self.thinking.unwrap_or_default(),
                signature: self.signature.unwrap_or_default(),
            },
            "redacted_thinking" => BlockKind::RedactedThinking {
                data: self.data.ok_or("redacted_thinking without data")?,
            },
            "tool_use" => BlockKind::ToolUse {
                id: self.id.ok_or("tool_use without id")?,
                name: self.name.ok_or("tool_use without name")?,
                input: self.input.unwrap_or(RawValue::NULL),
            },
            "tool_result" => BlockKind::ToolResult {
                tool_use_id: self.tool_use_id.ok_or("tool_result without tool_use_id")?,
                content: self.content,
                is_error: self.is_error,
            },
            "image" => BlockKind::Image,
            "document" => BlockKind::Document,
            _ => BlockKind::Unknown { kind: self.kind },
        })
    }
}

/// Types whose fields we read, so that a field of the wrong type is an error and not a sign of a new block type.
const KNOWN_BLOCKS: [&str; 7] = [
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "image",
    "document",
];

impl<'a> Block<'a> {
    /// Reads a block.
    ///
    /// # Errors
    ///
    /// What serde or the missing field says, for a known type or a value that is no object with a `type`.
    pub fn read(raw: &'a RawValue) -> Result<Self, String> {
        let kind = match serde_json::from_str::<FlatBlock<'a>>(raw.get()) {
            Ok(flat) => flat.into_kind()?,
            Err(error) => match kind_of(raw.get()) {
                Some(kind) if !KNOWN_BLOCKS.contains(&kind.as_str()) => BlockKind::Unknown { kind },
                _ => return Err(error.to_string()),
            },
        };
        Ok(Self { raw, kind })
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Block<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        Block::read(raw).map_err(serde::de::Error::custom)
    }
}

/// The CLI's stand-in for a tool input that it could not parse: `{"__unparsedToolInput":{"raw":…,"len":…}}` (CLI 2.1.332).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct UnparsedToolInput<'a> {
    /// The raw text as it was streamed.
    #[serde(borrow)]
    pub raw: Text<'a>,
}

/// The raw text of an input that the CLI could not parse, or `None` for an ordinary input.
///
/// A model can write such an object itself, so the caller compares the raw text with what was streamed.
pub fn unparsed_tool_input(input: &RawValue) -> Option<UnparsedToolInput<'_>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sentinel<'a> {
        #[serde(borrow, rename = "__unparsedToolInput")]
        unparsed: UnparsedToolInput<'a>,
    }
    let sentinel: Sentinel<'_> = serde_json::from_str(input.get()).ok()?;
    Some(sentinel.unparsed)
}

/// Any event, flat. The CLI's `stream_event` record holds one, which is why it is shared.
#[derive(Deserialize)]
pub(super) struct FlatEvent<'a> {
    #[serde(borrow, rename = "type")]
    kind: Text<'a>,
    #[serde(default)]
    index: Option<u32>,
    #[serde(borrow, default)]
    delta: Option<FlatDelta<'a>>,
    #[serde(borrow, default)]
    content_block: Option<&'a RawValue>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(default, deserialize_with = "usage_or_none")]
    usage: Usage,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct FlatDelta<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    thinking: Option<Text<'a>>,
    #[serde(borrow, default)]
    partial_json: Option<Text<'a>>,
    #[serde(borrow, default)]
    signature: Option<Text<'a>>,
    #[serde(borrow, default)]
    stop_reason: Option<Text<'a>>,
    #[serde(borrow, default)]
    stop_sequence: Option<Text<'a>>,
    #[serde(borrow, default)]
    stop_details: Option<&'a RawValue>,
}

const KNOWN_DELTAS: [&str; 4] = [
    "text_delta",
    "thinking_delta",
    "input_json_delta",
    "signature_delta",
];

impl<'a> FlatDelta<'a> {
    fn into_delta(self) -> Result<Delta<'a>, &'static str> {
        let kind = self.kind.ok_or("delta without type")?;
        Ok(match kind.as_str() {
            "text_delta" => Delta::Text(self.text.ok_or("text_delta without text")?),
            "thinking_delta" => {
                Delta::Thinking(self.thinking.ok_or("thinking_delta without thinking")?)
            }
            "input_json_delta" => Delta::InputJson(
                self.partial_json
                    .ok_or("input_json_delta without partial_json")?,
            ),
            "signature_delta" => {
                Delta::Signature(self.signature.ok_or("signature_delta without signature")?)
            }
            _ => Delta::Unknown { kind },
        })
    }
}

impl<'a> FlatEvent<'a> {
    pub(super) fn into_event(self) -> Result<StreamEvent<'a>, MessagesError> {
        let kind = self.kind.clone();
        self.read().map_err(|problem| MessagesError::Malformed {
            event: kind.into_owned(),
            problem,
        })
    }

    fn read(self) -> Result<StreamEvent<'a>, String> {
        let index = self.index.ok_or("no index");
        Ok(match self.kind.as_str() {
            "content_block_delta" => StreamEvent::ContentBlockDelta {
                index: index?,
                delta: self.delta.ok_or("no delta")?.into_delta()?,
            },
            "content_block_start" => StreamEvent::ContentBlockStart {
                index: index?,
                block: Block::read(self.content_block.ok_or("no content_block")?)?,
            },
            "content_block_stop" => StreamEvent::ContentBlockStop { index: index? },
            "message_start" => {
                let message = self.message.ok_or("no message")?.get();
                let message = serde_json::from_str(message).map_err(|error| error.to_string())?;
                StreamEvent::MessageStart(message)
            }
            "message_delta" => {
                let delta = self.delta.ok_or("no delta")?;
                StreamEvent::MessageDelta(MessageDelta {
                    stop_reason: delta.stop_reason,
                    stop_sequence: delta.stop_sequence,
                    stop_details: delta.stop_details,
                    usage: self.usage,
                })
            }
            "message_stop" => StreamEvent::MessageStop,
            "ping" => StreamEvent::Ping,
            "error" => {
                let error = self.error.and_then(ErrorBody::read);
                StreamEvent::Error(error.ok_or("no error")?)
            }
            _ => StreamEvent::Unknown { kind: self.kind },
        })
    }
}

const KNOWN_EVENTS: [&str; 8] = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "ping",
    "error",
];

/// Reads one event from the data of a server-sent event, or from the `event` of the CLI's `stream_event` record.
///
/// The data's own `type` decides; the event's name is not needed. Lone surrogates must have been
/// [repaired](super::surrogates::repair) before.
///
/// # Errors
///
/// [`MessagesError`]: data that is no event at all, or a known event without what makes it up.
pub fn decode(data: &[u8]) -> Result<StreamEvent<'_>, MessagesError> {
    if !lenient::is_object(data) {
        return Err(MessagesError::NotAnEvent);
    }
    let problem = match serde_json::from_slice::<FlatEvent<'_>>(data) {
        Ok(flat) => return flat.into_event(),
        Err(problem) => problem.to_string(),
    };
    // Not in the known shape: either a new type that uses a known field name for something else, or broken.
    #[derive(Deserialize)]
    struct Odd<'a> {
        #[serde(borrow, rename = "type")]
        kind: Text<'a>,
        #[serde(default, deserialize_with = "lenient::option")]
        index: Option<u32>,
        #[serde(borrow, default)]
        delta: Option<&'a RawValue>,
    }
    let odd: Odd<'_> = serde_json::from_slice(data).map_err(|_| MessagesError::NotAnEvent)?;
    if !KNOWN_EVENTS.contains(&odd.kind.as_str()) {
        return Ok(StreamEvent::Unknown { kind: odd.kind });
    }
    if let ("content_block_delta", Some(index), Some(delta)) =
        (odd.kind.as_str(), odd.index, odd.delta)
        && let Some(kind) = kind_of(delta.get())
        && !KNOWN_DELTAS.contains(&kind.as_str())
    {
        let delta = Delta::Unknown { kind };
        return Ok(StreamEvent::ContentBlockDelta { index, delta });
    }
    Err(MessagesError::Malformed {
        event: odd.kind.into_owned(),
        problem,
    })
}

/// The `type` of an object.
pub(super) fn kind_of(json: &str) -> Option<Text<'_>> {
    #[derive(Deserialize)]
    struct Kind<'a> {
        #[serde(borrow, rename = "type")]
        kind: Text<'a>,
    }
    let kind: Kind<'_> = serde_json::from_str(json).ok()?;
    Some(kind.kind)
}

pub(super) fn usage_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Usage, D::Error> {
    lenient::option(deserializer).map(Option::unwrap_or_default)
}

/// An error as the API words it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorBody {
    /// The API's kind, such as `rate_limit_error` or `overloaded_error`; empty if it sent none.
    pub kind: String,
    /// The API's sentence. It can quote the request, so it belongs in no log.
    pub message: String,
    /// The API's id of the request, if the body holds one.
    pub request_id: Option<String>,
}

impl ErrorBody {
    /// Reads the body of a failed response: `{"type":"error","error":{"type":…,"message":…},"request_id":…}`.
    ///
    /// Also takes an `error` that is a plain string. `None` for anything else, such as a proxy's HTML page.
    pub fn decode(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Body<'a> {
            #[serde(borrow)]
            error: &'a RawValue,
            #[serde(default, deserialize_with = "lenient::option")]
            request_id: Option<String>,
        }
        let body = super::surrogates::repair(body);
        let read: Body<'_> = serde_json::from_slice(&body).ok()?;
        let mut error = Self::read(read.error)?;
        error.request_id = read.request_id;
        Some(error)
    }

    fn read(error: &RawValue) -> Option<Self> {
        #[derive(Deserialize)]
        struct Inner {
            #[serde(default, rename = "type", deserialize_with = "lenient::option")]
            kind: Option<String>,
            #[serde(default, deserialize_with = "lenient::option")]
            message: Option<String>,
        }
        let inner = if error.get().starts_with('{') {
            lenient::parse(error)?
        } else {
            Inner {
                kind: None,
                message: Some(lenient::parse(error)?),
            }
        };
        Some(Self {
            kind: inner.kind.unwrap_or_default(),
            message: inner.message.unwrap_or_default(),
            request_id: None,
        })
    }
}

/// Appends a whole streamed reply of one text block, as the API would send it: what the CLI is answered in a warm relay.
///
/// The reply ends in `end_turn` and uses `usage` in both of its snapshots. `text` should not be empty, since the CLI asks again
/// after an answer without visible output (2.1.332).
pub fn encode_text_reply(out: &mut Vec<u8>, id: &str, model: &str, text: &str, usage: &Usage) {
    use serde_json::json;
    let input_tokens = usage.input_tokens.unwrap_or(0);
    let output_tokens = usage.output_tokens.unwrap_or(0);
    let cache = [
        usage.cache_creation_input_tokens.unwrap_or(0),
        usage.cache_read_input_tokens.unwrap_or(0),
    ];
    let events = [
        json!({"type": "message_start", "message": {
            "id": id, "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": null, "stop_sequence": null,
            "usage": {
                "input_tokens": input_tokens, "cache_creation_input_tokens": cache[0],
                "cache_read_input_tokens": cache[1], "output_tokens": 1,
            },
        }}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({
            "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
            "usage": {"output_tokens": output_tokens},
        }),
        json!({"type": "message_stop"}),
    ];
    for event in &events {
        let name = event["type"].as_str().unwrap_or_default();
        sse::encode(out, name, event.to_string().as_bytes());
    }
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
