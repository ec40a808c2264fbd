//! Records that the CLI prints, one JSON object a line (`--output-format stream-json --verbose --include-partial-messages`).
//!
//! [`decode`] reads a line into a [`Record`] that borrows from it. Most lines of a turn are `stream_event` records with one small delta, so those are
//! read in a single pass; what is only passed on stays a `&RawValue`. A `type` or `subtype` that is new is a record of its own kind, to be
//! skipped and counted; a known one in an unknown shape is [`Record::Malformed`], on which a turn fails closed.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::lenient;
use super::messages::{self, FlatEvent, StreamEvent};
use super::rate_limit::RateLimitInfo;
use super::text::Text;

mod noise;
mod records;
mod verdict;

#[cfg(test)]
pub(crate) use noise::NOISE_LINES;
pub(crate) use noise::NoiseLog;
pub use records::{
    Assistant, CliRequest, CommandLifecycle, ControlOutcome, Init, McpServer, Named,
    PermissionDenial, ResultRecord, System, ToolProgress, User,
};
pub use verdict::{Failure, FailureKind, FailureMarks, Verdict};

/// One record of the CLI.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Record<'a> {
    /// `system`, by subtype.
    System(System<'a>),
    /// `stream_event`: one event of the API.
    StreamEvent(StreamEventRecord<'a>),
    /// `assistant`: one block of a message, before that block's `content_block_stop`; or a message that the CLI wrote itself.
    Assistant(Box<Assistant<'a>>),
    /// `user`: tool results, and texts that the CLI adds.
    User(Box<User<'a>>),
    /// `result`: the turn is over.
    Result(Box<ResultRecord<'a>>),
    /// `rate_limit_event`; `None` when it cannot be decoded, which counts as use of paid credits.
    RateLimitEvent(Option<Box<RateLimitInfo>>),
    /// `control_response`: the answer to a control request of ours.
    ControlResponse {
        /// The id that we gave.
        request_id: Text<'a>,
        /// The answer.
        outcome: ControlOutcome<'a>,
    },
    /// `control_request`: the CLI asks us.
    ControlRequest {
        /// The id to answer with.
        request_id: Text<'a>,
        /// What it asks.
        request: CliRequest<'a>,
    },
    /// `control_cancel_request`: the CLI no longer waits for an answer. Part of the protocol, not seen on 2.1.332.
    ControlCancelRequest {
        /// The id that needs no answer.
        request_id: Text<'a>,
    },
    /// `command_lifecycle`: what became of a user line that had a uuid.
    CommandLifecycle(CommandLifecycle<'a>),
    /// `tool_progress`: a tool still runs; every 30 s (CLI 2.1.332).
    ToolProgress(ToolProgress<'a>),
    /// `keep_alive`.
    KeepAlive,
    /// A type that is new.
    Unknown {
        /// The type's name.
        kind: Text<'a>,
    },
    /// A known type in a shape that we do not know. Not [`Noise`]: what it said is lost, so a turn cannot go on as if nothing was.
    Malformed {
        /// The type's name.
        kind: Text<'a>,
        /// What serde said; it names fields and types.
        problem: String,
    },
}

/// A `stream_event` record.
#[derive(Debug, Clone)]
pub struct StreamEventRecord<'a> {
    /// The event.
    pub event: StreamEvent<'a>,
    /// Id of the API message that the event belongs to; absent on events that the CLI made up before there was one.
    pub api_message_id: Option<Text<'a>>,
    /// The call whose sub-agent produced it; null for the conversation itself.
    pub parent_tool_use_id: Option<Text<'a>>,
    /// Blocks of a broken stream that do not count, on the `message_stop` that the CLI made up for it.
    pub abandoned_blocks: Option<AbandonedBlocks<'a>>,
}

/// Which blocks of which message were broken off: all from an index on.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AbandonedBlocks<'a> {
    /// The message.
    #[serde(borrow, default)]
    pub api_message_id: Option<Text<'a>>,
    /// Index of the first block that does not count.
    pub from_block_index: u32,
}

/// Why a line is no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Noise {
    /// Nothing but white space.
    #[error("the line is blank")]
    Blank,
    /// Not JSON.
    #[error("the line is not JSON")]
    NotJson,
    /// JSON, but no object with a `type`.
    #[error("the line is not an object with a type")]
    NotARecord,
}

/// How the CLI begins nearly all lines of a turn (2.1.332, 2.1.287, 2.1.283). Only a hint for the short way: any other order reads as well.
const STREAM_EVENT_BEGIN: &[u8] = br#"{"type":"stream_event""#;

/// Reads a line.
///
/// Lone surrogates must have been [repaired](super::surrogates::repair) before; otherwise the line is noise or malformed.
///
/// # Errors
///
/// [`Noise`] for a line that is no record at all.
pub fn decode(line: &[u8]) -> Result<Record<'_>, Noise> {
    if line.starts_with(STREAM_EVENT_BEGIN)
        && let Ok(read) = serde_json::from_slice::<StreamEventLine<'_>>(line)
        && let Ok(event) = read.event.into_event()
    {
        return Ok(Record::StreamEvent(read.rest.with(event)));
    }
    let head = Head::read(line)?;
    let kind = head.kind.clone();
    Ok(by_type(line, head).unwrap_or_else(|problem| Record::Malformed { kind, problem }))
}

#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow, rename = "type")]
    kind: Text<'a>,
    #[serde(default, deserialize_with = "lenient::word")]
    subtype: Option<Text<'a>>,
}

impl<'a> Head<'a> {
    fn read(line: &'a [u8]) -> Result<Self, Noise> {
        if line.trim_ascii().is_empty() {
            return Err(Noise::Blank);
        }
        // A struct is read from an array as well, and a longer array than it has fields looks like broken JSON.
        if !lenient::is_object(line) {
            return Err(match serde_json::from_slice::<IgnoredAny>(line) {
                Ok(_) => Noise::NotARecord,
                Err(_) => Noise::NotJson,
            });
        }
        serde_json::from_slice(line).map_err(|problem| match problem.classify() {
            serde_json::error::Category::Data => Noise::NotARecord,
            _ => Noise::NotJson,
        })
    }
}

fn by_type<'a>(line: &'a [u8], head: Head<'a>) -> Result<Record<'a>, String> {
    Ok(match head.kind.as_str() {
        "stream_event" => stream_event(line)?,
        "assistant" => Record::Assistant(read(line)?),
        "user" => Record::User(read(line)?),
        "result" => Record::Result(read(line)?),
        "system" => Record::System(System::read(line, head.subtype)?),
        "rate_limit_event" => {
            #[derive(Deserialize)]
            struct Line<'a> {
                #[serde(borrow)]
                rate_limit_info: &'a RawValue,
            }
            let info = read::<Line<'_>>(line).ok();
            Record::RateLimitEvent(
                info.and_then(|line| RateLimitInfo::read(line.rate_limit_info))
                    .map(Box::new),
            )
        }
        "control_response" => {
            let (request_id, outcome) = ControlOutcome::read(line)?;
            Record::ControlResponse {
                request_id,
                outcome,
            }
        }
        "control_request" => {
            let (request_id, request) = CliRequest::read(line)?;
            Record::ControlRequest {
                request_id,
                request,
            }
        }
        "control_cancel_request" => {
            #[derive(Deserialize)]
            struct Line<'a> {
                #[serde(borrow)]
                request_id: Text<'a>,
            }
            let Line { request_id } = read(line)?;
            Record::ControlCancelRequest { request_id }
        }
        "command_lifecycle" => Record::CommandLifecycle(read(line)?),
        "tool_progress" => Record::ToolProgress(read(line)?),
        "keep_alive" => Record::KeepAlive,
        _ => Record::Unknown { kind: head.kind },
    })
}

fn read<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| error.to_string())
}

/// Everything of a `stream_event` record but the event.
#[derive(Deserialize)]
struct StreamEventRest<'a> {
    #[serde(borrow, default)]
    api_message_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    parent_tool_use_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    abandoned_blocks: Option<AbandonedBlocks<'a>>,
}

impl<'a> StreamEventRest<'a> {
    fn with(self, event: StreamEvent<'a>) -> StreamEventRecord<'a> {
        StreamEventRecord {
            event,
            api_message_id: self.api_message_id,
            parent_tool_use_id: self.parent_tool_use_id,
            abandoned_blocks: self.abandoned_blocks,
        }
    }
}

struct StreamEventLine<'a> {
    event: FlatEvent<'a>,
    rest: StreamEventRest<'a>,
}

impl<'de: 'a, 'a> Deserialize<'de> for StreamEventLine<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // `#[serde(flatten)]` would buffer every value, so the fields stand here once more. `type` is read to refuse a second one.
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(rename = "type")]
            _kind: serde::de::IgnoredAny,
            #[serde(borrow)]
            event: FlatEvent<'a>,
            #[serde(borrow, default)]
            api_message_id: Option<Text<'a>>,
            #[serde(borrow, default)]
            parent_tool_use_id: Option<Text<'a>>,
            #[serde(borrow, default)]
            abandoned_blocks: Option<AbandonedBlocks<'a>>,
        }
        let line = Line::deserialize(deserializer)?;
        Ok(Self {
            event: line.event,
            rest: StreamEventRest {
                api_message_id: line.api_message_id,
                parent_tool_use_id: line.parent_tool_use_id,
                abandoned_blocks: line.abandoned_blocks,
            },
        })
    }
}

/// The long way: for an event of a new type, and for keys in another order.
fn stream_event(line: &[u8]) -> Result<Record<'_>, String> {
    #[derive(Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        event: &'a RawValue,
    }
    let rest: StreamEventRest<'_> = read(line)?;
    let Line { event } = read(line)?;
    let event = messages::decode(event.get().as_bytes()).map_err(|error| error.to_string())?;
    Ok(Record::StreamEvent(rest.with(event)))
}

/// Names that [`UnknownTypes`] keeps apart; further ones are counted together.
const MAX_UNKNOWN_NAMES: usize = 32;

/// Longest name that [`UnknownTypes`] keeps, in bytes; a longer one is cut.
const MAX_UNKNOWN_NAME_BYTES: usize = 64;

/// Counts of what was skipped because it is new, for diagnosis.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnknownTypes {
    counts: BTreeMap<String, u64>,
    others: u64,
}

impl UnknownTypes {
    /// Counts one occurrence of `kind`, which is a `place` such as `record`, `system`, `event`, `block` or `delta`.
    pub fn count(&mut self, place: &str, kind: &str) {
        let mut name = format!("{place}:{kind}");
        name.truncate(name.floor_char_boundary(MAX_UNKNOWN_NAME_BYTES));
        if let Some(count) = self.counts.get_mut(&name) {
            *count += 1;
        } else if self.counts.len() < MAX_UNKNOWN_NAMES {
            self.counts.insert(name, 1);
        } else {
            self.others += 1;
        }
    }

    /// Counts what is unknown in a record, if anything, and says how much that was.
    pub fn observe(&mut self, record: &Record<'_>) -> u64 {
        let before = self.total();
        match record {
            Record::Unknown { kind } => self.count("record", kind),
            Record::System(System::Unknown { subtype }) => self.count("system", subtype),
            Record::StreamEvent(record) => self.observe_event(&record.event),
            Record::Assistant(record) => self.observe_content(&record.message.content),
            Record::User(record) => self.observe_content(&record.message.content),
            _ => {}
        }
        self.total() - before
    }

    /// The same for an event that came from the API itself.
    pub fn observe_event(&mut self, event: &StreamEvent<'_>) {
        use messages::{BlockKind, Delta};
        match event {
            StreamEvent::Unknown { kind } => self.count("event", kind),
            StreamEvent::ContentBlockDelta {
                delta: Delta::Unknown { kind },
                ..
            } => self.count("delta", kind),
            StreamEvent::ContentBlockStart { block, .. } => {
                if let BlockKind::Unknown { kind } = &block.kind {
                    self.count("block", kind);
                }
            }
            _ => {}
        }
    }

    fn observe_content(&mut self, content: &messages::Content<'_>) {
        let messages::Content::Blocks(blocks) = content else {
            return;
        };
        for block in blocks {
            if let messages::BlockKind::Unknown { kind } = &block.kind {
                self.count("block", kind);
            }
        }
    }

    /// All occurrences.
    pub fn total(&self) -> u64 {
        self.counts.values().sum::<u64>() + self.others
    }

    /// Names (`place:kind`) with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.counts
            .iter()
            .map(|(name, &count)| (name.as_str(), count))
    }
}

#[cfg(test)]
mod tests;
