//! The decoder: one streamed message of the service in, the host's events out. Pure; all transports share it.
//!
//! Text and thinking are given out as they come. From the first tool call on, everything but previews is held back in
//! order: it is the suffix that [`Turn::finish`] releases once the transport's own conditions hold too. A call is
//! whole when its block has stopped and the message has ended with a stop reason, never before.

mod stop;

use std::collections::BTreeMap;

use crate::conversation::{
    Block, Message, RedactedThinking, Role, SignedThinking, ToolCall, ToolInput, ToolUseId,
};
use crate::error::{Error, ErrorCode};
use crate::event::{Event, Plan, Rejection, StopReason, Usage};
use crate::request::ModelId;
use crate::wire::messages::{BlockKind, Delta, ErrorBody, MessageDelta, StreamEvent};
use crate::wire::usage;

/// Most blocks that one message may have; the service sends a few dozen at the most.
pub const BLOCKS_LIMIT: usize = 4096;

/// The documented key under which input that does not parse stands in the message (the CLI's own word).
pub const UNPARSED_TOOL_INPUT: &str = "__unparsedToolInput";

/// Maps a published tool name back to the host's; `None` for a tool that the host did not offer.
pub type ToolNames = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Why a stream cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnError {
    /// An event at a place where it cannot stand.
    Order(&'static str),
    /// A block began, went on or ended where it cannot.
    Blocks(&'static str),
    /// The service said that it failed.
    Service(ErrorBody),
}

impl TurnError {
    /// The error that the host hears; the service's own words are classified by `service`.
    pub fn into_error(self, service: impl FnOnce(ErrorBody) -> Error) -> Error {
        match self {
            Self::Order(what) => Error::new(ErrorCode::ProtocolOrder, what),
            Self::Blocks(what) => Error::new(ErrorCode::ProtocolBlocks, what),
            Self::Service(body) => service(body),
        }
    }
}

/// Where the message stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Streaming,
    Stopped,
}

/// One block under construction or finished.
#[derive(Debug)]
struct Part {
    body: Body,
    open: bool,
}

#[derive(Debug)]
enum Body {
    Text(String),
    Thinking {
        thinking: String,
        signature: String,
    },
    Redacted(String),
    Tool {
        id: String,
        published: String,
        host: Option<String>,
        raw: String,
    },
    Unknown,
}

/// The state of one streamed message.
pub struct Turn {
    names: ToolNames,
    how: Option<Plan>,
    phase: Phase,
    message_id: String,
    model: ModelId,
    usage: usage::Usage,
    parts: BTreeMap<u32, Part>,
    stop: Option<StopReason>,
    first_tool: Option<u32>,
    held: Vec<Event>,
    given: bool,
    unknown: u32,
}

/// A message that ended well, before the transport's own conditions are asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Events that were held back, in order; tool calls are among them.
    pub suffix: Vec<Event>,
    /// The whole answer.
    pub message: Message,
    /// Why the model stopped.
    pub stop: StopReason,
    /// Final counts.
    pub usage: Usage,
    /// The model that served.
    pub model: ModelId,
}

impl Finished {
    /// Whether host tools are to be run.
    pub fn has_calls(&self) -> bool {
        self.suffix
            .iter()
            .any(|event| matches!(event, Event::ToolCall(_) | Event::ToolRejected { .. }))
    }
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn")
            .field("phase", &self.phase)
            .field("blocks", &self.parts.len())
            .field("unknown", &self.unknown)
            .finish_non_exhaustive()
    }
}

impl Turn {
    /// A turn that has heard nothing. `how` is told with the first event.
    pub fn new(names: ToolNames, how: Plan) -> Self {
        Self {
            names,
            how: Some(how),
            phase: Phase::Waiting,
            message_id: String::new(),
            model: ModelId(String::new()),
            usage: usage::Usage::default(),
            parts: BTreeMap::new(),
            stop: None,
            first_tool: None,
            held: Vec::new(),
            given: false,
            unknown: 0,
        }
    }

    /// Whether text or thinking was given out.
    pub fn output_seen(&self) -> bool {
        self.given
    }

    /// Whether the message has begun.
    pub fn has_begun(&self) -> bool {
        self.phase != Phase::Waiting
    }

    /// Whether `message_stop` came.
    pub fn is_stopped(&self) -> bool {
        self.phase == Phase::Stopped
    }

    /// Events, blocks and deltas of kinds that this version does not know; they were skipped.
    pub fn unknown(&self) -> u32 {
        self.unknown
    }

    /// The service's id of the message; empty before it began.
    pub fn message_id(&self) -> &str {
        &self.message_id
    }

    /// Ids of the tool calls so far, in order.
    pub fn call_ids(&self) -> impl Iterator<Item = &str> {
        self.parts.values().filter_map(|part| match &part.body {
            Body::Tool { id, .. } => Some(id.as_str()),
            _ => None,
        })
    }

    /// Why the message ends, once that was said; its end itself may still have to come.
    pub fn stop_reason(&self) -> Option<&StopReason> {
        self.stop.as_ref()
    }

    /// The streamed text of a call's input so far.
    pub fn raw_input(&self, call: &str) -> Option<&str> {
        self.parts.values().find_map(|part| match &part.body {
            Body::Tool { id, raw, .. } if id == call => Some(raw.as_str()),
            _ => None,
        })
    }

    /// Takes one event of the wire; what the host may hear now is appended to `out`.
    ///
    /// # Errors
    ///
    /// A [`TurnError`] ends the turn; nothing that was held back is released after it.
    pub fn push(&mut self, event: &StreamEvent<'_>, out: &mut Vec<Event>) -> Result<(), TurnError> {
        match event {
            StreamEvent::Ping => return Ok(()),
            StreamEvent::Error(body) => return Err(TurnError::Service(body.clone())),
            StreamEvent::Unknown { .. } => {
                self.unknown += 1;
                return Ok(());
            }
            StreamEvent::MessageStart(message) if self.phase == Phase::Waiting => {
                self.begin(
                    message.id.as_deref(),
                    message.model.as_deref(),
                    &message.usage,
                    out,
                );
                return Ok(());
            }
            StreamEvent::MessageStart(_) => return Err(TurnError::Order("a second message began")),
            _ => {}
        }
        if self.phase != Phase::Streaming {
            return Err(TurnError::Order("an event outside of the message"));
        }
        match event {
            StreamEvent::ContentBlockStart { index, block } => self.start(*index, &block.kind, out),
            StreamEvent::ContentBlockDelta { index, delta } => self.grow(*index, delta, out),
            StreamEvent::ContentBlockStop { index } => self.close(*index, out),
            StreamEvent::MessageDelta(delta) => {
                self.take_stop(delta, out);
                Ok(())
            }
            StreamEvent::MessageStop => self.end(),
            _ => Ok(()),
        }
    }

    fn begin(
        &mut self,
        id: Option<&str>,
        model: Option<&str>,
        usage: &usage::Usage,
        out: &mut Vec<Event>,
    ) {
        self.phase = Phase::Streaming;
        self.message_id = id.unwrap_or_default().to_owned();
        self.model = ModelId(model.unwrap_or_default().to_owned());
        self.usage.merge(usage);
        if let Some(how) = self.how.take() {
            out.push(Event::Started {
                model: self.model.clone(),
                how,
            });
        }
        out.push(Event::Usage(as_usage(&self.usage)));
    }

    fn start(
        &mut self,
        index: u32,
        kind: &BlockKind<'_>,
        out: &mut Vec<Event>,
    ) -> Result<(), TurnError> {
        if self
            .parts
            .last_key_value()
            .is_some_and(|(last, _)| *last >= index)
        {
            return Err(TurnError::Blocks("a block index does not rise"));
        }
        if self.parts.len() >= BLOCKS_LIMIT {
            return Err(TurnError::Blocks("too many blocks in one message"));
        }
        let body = match kind {
            BlockKind::Text { .. } => Body::Text(String::new()),
            BlockKind::Thinking { signature, .. } => Body::Thinking {
                thinking: String::new(),
                signature: signature.as_str().to_owned(),
            },
            BlockKind::RedactedThinking { data } => Body::Redacted(data.as_str().to_owned()),
            BlockKind::ToolUse { id, name, input } => {
                self.first_tool.get_or_insert(index);
                let raw = if input.get() == "{}" {
                    String::new()
                } else {
                    input.get().to_owned()
                };
                let (id, published) = (id.as_str().to_owned(), name.as_str().to_owned());
                let host = (self.names)(&published);
                Body::Tool {
                    id,
                    published,
                    host,
                    raw,
                }
            }
            _ => {
                self.unknown += 1;
                Body::Unknown
            }
        };
        self.parts.insert(index, Part { body, open: true });
        // The service starts text and thinking empty; a beginning that is not is the first piece.
        match kind {
            BlockKind::Text { text } if !text.is_empty() => {
                self.grow(index, &Delta::Text(text.clone()), out)
            }
            BlockKind::Thinking { thinking, .. } if !thinking.is_empty() => {
                self.grow(index, &Delta::Thinking(thinking.clone()), out)
            }
            _ => Ok(()),
        }
    }

    fn grow(
        &mut self,
        index: u32,
        delta: &Delta<'_>,
        out: &mut Vec<Event>,
    ) -> Result<(), TurnError> {
        let part = self
            .parts
            .get_mut(&index)
            .ok_or(TurnError::Blocks("a delta for an unknown block"))?;
        if !part.open {
            return Err(TurnError::Blocks("a delta for a block that has stopped"));
        }
        let event = match (&mut part.body, delta) {
            (Body::Text(text), Delta::Text(piece)) => {
                text.push_str(piece);
                (!piece.is_empty()).then(|| Event::Text {
                    text: piece.as_str().to_owned(),
                })
            }
            (Body::Thinking { thinking, .. }, Delta::Thinking(piece)) => {
                thinking.push_str(piece);
                (!piece.is_empty()).then(|| Event::Thinking {
                    text: piece.as_str().to_owned(),
                })
            }
            (Body::Thinking { signature, .. }, Delta::Signature(piece)) => {
                signature.push_str(piece);
                None
            }
            (
                Body::Tool {
                    id,
                    published,
                    host,
                    raw,
                },
                Delta::InputJson(piece),
            ) => {
                raw.push_str(piece);
                let name = host.as_ref().unwrap_or(published).clone();
                let partial = piece.as_str().to_owned();
                let preview = Event::ToolInput {
                    id: ToolUseId(id.clone()),
                    name,
                    partial,
                };
                // A preview is no part of the ordered answer, so it need not wait for the suffix.
                if !piece.is_empty() {
                    out.push(preview);
                }
                return Ok(());
            }
            (Body::Unknown, _) | (_, Delta::Unknown { .. }) => {
                self.unknown += 1;
                None
            }
            _ => return Err(TurnError::Blocks("a delta of another kind than its block")),
        };
        if let Some(event) = event {
            self.give(index, event, out);
        }
        Ok(())
    }

    fn close(&mut self, index: u32, out: &mut Vec<Event>) -> Result<(), TurnError> {
        let part = self
            .parts
            .get_mut(&index)
            .ok_or(TurnError::Blocks("a stop for an unknown block"))?;
        if !std::mem::replace(&mut part.open, false) {
            return Err(TurnError::Blocks("a block stopped twice"));
        }
        let event = match &part.body {
            Body::Thinking {
                thinking,
                signature,
            } if !signature.is_empty() => Event::ThinkingBlock(SignedThinking {
                thinking: thinking.clone(),
                signature: signature.clone(),
            }),
            Body::Tool {
                id,
                published,
                host,
                raw,
            } => released(id, published, host.as_deref(), raw),
            _ => return Ok(()),
        };
        self.give(index, event, out);
        Ok(())
    }

    /// Gives an event out, or holds it back when it belongs to the suffix.
    fn give(&mut self, index: u32, event: Event, out: &mut Vec<Event>) {
        if self.first_tool.is_some_and(|first| index >= first) {
            self.held.push(event);
        } else {
            self.given = true;
            out.push(event);
        }
    }

    fn take_stop(&mut self, delta: &MessageDelta<'_>, out: &mut Vec<Event>) {
        self.usage.merge(&delta.usage);
        if let Some(word) = &delta.stop_reason {
            let sequence = delta
                .stop_sequence
                .as_ref()
                .map(|text| text.as_str().to_owned());
            self.stop = Some(stop::reason(word, sequence, delta.stop_details));
        }
        out.push(Event::Usage(as_usage(&self.usage)));
    }

    fn end(&mut self) -> Result<(), TurnError> {
        if self.parts.values().any(|part| part.open) {
            return Err(TurnError::Blocks("the message ended inside a block"));
        }
        if self.stop.is_none() {
            return Err(TurnError::Order("the message ended without a stop reason"));
        }
        self.phase = Phase::Stopped;
        Ok(())
    }

    /// The token counts so far.
    pub fn usage(&self) -> Usage {
        as_usage(&self.usage)
    }

    /// The answer, once the message has ended. `None` before, and after a stream without stop reason or usage.
    pub fn finish(&mut self) -> Option<Finished> {
        if self.phase != Phase::Stopped || self.usage.output_tokens.is_none() {
            return None;
        }
        let stop = self.stop.clone()?;
        Some(Finished {
            suffix: std::mem::take(&mut self.held),
            message: self.message(),
            stop,
            usage: as_usage(&self.usage),
            model: self.model.clone(),
        })
    }

    /// What there is of the answer, without calls: what a host may keep after a failure or a cancel.
    pub fn partial(&self) -> Message {
        let mut message = self.message();
        message
            .content
            .retain(|block| matches!(block, Block::Text { .. } | Block::Thinking(_)));
        message
    }

    fn message(&self) -> Message {
        let blocks = self.parts.values().filter_map(|part| match &part.body {
            Body::Text(text) if text.is_empty() => None,
            Body::Text(text) => Some(Block::text(text.clone())),
            Body::Thinking { signature, .. } if signature.is_empty() => None,
            Body::Thinking {
                thinking,
                signature,
            } => Some(Block::Thinking(SignedThinking {
                thinking: thinking.clone(),
                signature: signature.clone(),
            })),
            Body::Redacted(data) => Some(Block::RedactedThinking(RedactedThinking {
                data: data.clone(),
            })),
            Body::Tool {
                id,
                published,
                host,
                raw,
            } => Some(Block::ToolUse(call(
                id,
                host.as_deref().unwrap_or(published),
                raw,
            ))),
            Body::Unknown => None,
        });
        Message {
            role: Role::Assistant,
            content: blocks.collect(),
        }
    }
}

fn released(id: &str, published: &str, host: Option<&str>, raw: &str) -> Event {
    let call = call(id, host.unwrap_or(published), raw);
    if host.is_none() {
        return Event::ToolRejected {
            call,
            reason: Rejection::UnknownTool,
        };
    }
    match ToolInput::from_streamed(raw) {
        Ok(_) => Event::ToolCall(call),
        Err(error) => Event::ToolRejected {
            call,
            reason: Rejection::ArgumentDecode { raw: error.raw },
        },
    }
}

fn call(id: &str, name: &str, raw: &str) -> ToolCall {
    let input = ToolInput::from_streamed(raw).unwrap_or_else(|error| {
        let mut inner = serde_json::Map::new();
        inner.insert("len".to_owned(), error.raw.len().into());
        inner.insert("raw".to_owned(), error.raw.into());
        let mut outer = serde_json::Map::new();
        outer.insert(UNPARSED_TOOL_INPUT.to_owned(), inner.into());
        outer.into()
    });
    ToolCall {
        id: ToolUseId(id.to_owned()),
        name: name.to_owned(),
        input,
    }
}

fn as_usage(usage: &usage::Usage) -> Usage {
    let lifetimes = usage.cache_creation.unwrap_or_default();
    Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_creation_input_tokens: usage.cache_creation_input_tokens,
        cache_creation_5m_input_tokens: lifetimes.ephemeral_5m_input_tokens,
        cache_creation_1h_input_tokens: lifetimes.ephemeral_1h_input_tokens,
        cache_read_input_tokens: usage.cache_read_input_tokens,
    }
}

#[cfg(test)]
#[path = "turn_tests.rs"]
mod tests;
