//! A normalised conversation as the bytes of the `messages` array of a Messages request.
//!
//! One pass into one buffer, no tree. The bytes of a message depend on that message alone, so those of earlier messages
//! stay the same when the conversation grows, apart from the cache marks that move on.
//!
//! # Where the marks go
//!
//! The first goes on the last markable block of the last message, the next on that of the user message before, and so on.
//! The service looks back at most twenty blocks from a mark for something that it has cached. A conversation grows by one
//! assistant and one user message a request, so the second mark stands exactly where the first stood in the request
//! before: it hits however many calls and results lie between. Thinking and empty text cannot carry a mark.

use std::borrow::Cow;

use super::names::{self, PREFIX};
use super::normalise::{Normalised, Sendable};
use super::{Block, Document, Image, ResultBlock, Role, Source, ToolCall, ToolResult};
use crate::error::{Error, ErrorCode, Result};

/// Largest request that is sent, in bytes (relay document).
pub const RESTORED_REQUEST_BYTES: usize = 8 * 1024 * 1024;

/// How long the service keeps a cached prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ttl {
    /// No marks at all.
    #[default]
    None,
    /// Five minutes.
    FiveMinutes,
    /// One hour: what the CLI uses on a subscription (2.1.283 to 2.1.332). A mark of five minutes may not stand before
    /// one of an hour, so ours follow the CLI's of the same request.
    OneHour,
}

/// Which cache marks to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Their lifetime.
    pub ttl: Ttl,
    /// Most marks; the service takes four in a request, of which the CLI uses two for the system prompt.
    pub most: usize,
}

impl Marks {
    /// No marks.
    pub const NONE: Self = Self {
        ttl: Ttl::None,
        most: 0,
    };

    /// The two that the CLI leaves to the messages when these are replaced.
    pub const fn two(ttl: Ttl) -> Self {
        Self { ttl, most: 2 }
    }
}

/// The bytes of a `messages` array.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// JSON on one line.
    pub bytes: Vec<u8>,
    /// How many marks were placed.
    pub marks: usize,
}

/// Encodes within [`RESTORED_REQUEST_BYTES`].
///
/// # Errors
///
/// `history_too_large`.
pub fn encode(conversation: &Normalised<'_>, marks: Marks) -> Result<Encoded> {
    encode_within(conversation, marks, RESTORED_REQUEST_BYTES)
}

/// Encodes within a limit of bytes. Stops soon after it is passed, so the buffer never grows much beyond it.
///
/// # Errors
///
/// `history_too_large`.
pub fn encode_within(conversation: &Normalised<'_>, marks: Marks, limit: usize) -> Result<Encoded> {
    let least = least_size(&conversation.messages);
    if least > limit {
        return Err(too_large(least, limit));
    }
    let places = places(&conversation.messages, marks);
    // Escapes add to the least size; an eighth more avoids most copies of a growing buffer.
    let mut bytes = Vec::with_capacity((least + least / 8 + 64).min(limit.saturating_add(64)));
    bytes.push(b'[');
    for (n, message) in conversation.messages.iter().enumerate() {
        if n > 0 {
            bytes.push(b',');
        }
        let mark = places.iter().find(|place| place.message == n);
        self::message(
            &mut bytes,
            message,
            mark.map(|place| (place.block, marks.ttl)),
        );
        if bytes.len() > limit {
            return Err(too_large(bytes.len(), limit));
        }
    }
    bytes.push(b']');
    if bytes.len() > limit {
        return Err(too_large(bytes.len(), limit));
    }
    Ok(Encoded {
        bytes,
        marks: places.len(),
    })
}

fn too_large(size: usize, limit: usize) -> Error {
    Error::new(
        ErrorCode::HistoryTooLarge,
        format!("the conversation is at least {size} bytes as JSON, the limit is {limit}"),
    )
}

/// A block that carries a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    message: usize,
    block: usize,
}

fn places(messages: &[Sendable<'_>], marks: Marks) -> Vec<Place> {
    if marks.ttl == Ttl::None {
        return Vec::new();
    }
    let markable = |block: &Cow<'_, Block>| match &**block {
        Block::Text { text } => !text.is_empty(),
        Block::Thinking(_) | Block::RedactedThinking(_) => false,
        _ => true,
    };
    messages
        .iter()
        .enumerate()
        .rev()
        .filter(|(_, message)| message.role == Role::User)
        .filter_map(|(n, message)| {
            let block = message.content.iter().rposition(markable)?;
            Some(Place { message: n, block })
        })
        .take(marks.most)
        .collect()
}

/// Appends one message; `mark` is the index of the block that carries a cache mark.
pub(crate) fn message(out: &mut Vec<u8>, message: &Sendable<'_>, mark: Option<(usize, Ttl)>) {
    let head: &[u8] = match message.role {
        Role::Assistant => br#"{"role":"assistant","content":["#,
        // A normalised conversation has no system messages.
        Role::User | Role::System => br#"{"role":"user","content":["#,
    };
    out.extend_from_slice(head);
    content(out, message, mark);
    out.extend_from_slice(b"]}");
}

/// Appends the blocks of one message, without the brackets around them; `mark` as for [`message`].
pub(super) fn content(out: &mut Vec<u8>, message: &Sendable<'_>, mark: Option<(usize, Ttl)>) {
    for (n, block) in message.content.iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        self::block(out, block);
        match mark {
            Some((at, Ttl::FiveMinutes)) if at == n => {
                out.extend_from_slice(br#","cache_control":{"type":"ephemeral"}"#);
            }
            Some((at, Ttl::OneHour)) if at == n => {
                out.extend_from_slice(br#","cache_control":{"type":"ephemeral","ttl":"1h"}"#);
            }
            _ => {}
        }
        out.push(b'}');
    }
}

/// Appends one block.
pub(crate) fn block_alone(out: &mut Vec<u8>, block: &Block) {
    self::block(out, block);
    out.push(b'}');
}

/// Appends one part of a tool result as a block.
pub(crate) fn result_block_alone(out: &mut Vec<u8>, part: &ResultBlock) {
    result_block(out, part);
    out.push(b'}');
}

/// Appends a block without its closing brace.
fn block(out: &mut Vec<u8>, block: &Block) {
    match block {
        Block::Text { text } => self::text(out, text),
        Block::Image(image) => self::image(out, image),
        Block::Document(document) => self::document(out, document),
        Block::ToolUse(call) => tool_use(out, call),
        Block::ToolResult(result) => tool_result(out, result),
        Block::Thinking(thinking) => {
            field(
                out,
                br#"{"type":"thinking","thinking":"#,
                &thinking.thinking,
            );
            field(out, br#","signature":"#, &thinking.signature);
        }
        Block::RedactedThinking(redacted) => {
            field(
                out,
                br#"{"type":"redacted_thinking","data":"#,
                &redacted.data,
            );
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    field(out, br#"{"type":"text","text":"#, text);
}

fn image(out: &mut Vec<u8>, image: &Image) {
    out.extend_from_slice(br#"{"type":"image","source":"#);
    source(out, &image.source);
}

fn document(out: &mut Vec<u8>, document: &Document) {
    out.extend_from_slice(br#"{"type":"document","source":"#);
    source(out, &document.source);
    if let Some(title) = &document.title {
        field(out, br#","title":"#, title);
    }
}

fn source(out: &mut Vec<u8>, source: &Source) {
    let (kind, media_type, data): (&[u8], _, _) = match source {
        Source::Base64 { media_type, data } => {
            (br#"{"type":"base64","media_type":"#, media_type, data)
        }
        Source::Text { media_type, data } => (br#"{"type":"text","media_type":"#, media_type, data),
        Source::Url { url } => {
            field(out, br#"{"type":"url","url":"#, url);
            out.push(b'}');
            return;
        }
    };
    field(out, kind, media_type);
    field(out, br#","data":"#, data);
    out.push(b'}');
}

fn tool_use(out: &mut Vec<u8>, call: &ToolCall) {
    field(out, br#"{"type":"tool_use","id":"#, &call.id.0);
    out.extend_from_slice(br#","name":""#);
    // Both halves keep to letters, digits, `_` and `-`, so nothing has to be escaped.
    out.extend_from_slice(PREFIX.as_bytes());
    out.extend_from_slice(names::alias_of_any(&call.name).as_bytes());
    out.extend_from_slice(br#"","input":"#);
    let at = out.len();
    out.extend_from_slice(call.input.as_str().as_bytes());
    // A line end in JSON can only be white space between tokens; on the CLI's stdin it would end the record.
    for byte in &mut out[at..] {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
}

fn tool_result(out: &mut Vec<u8>, result: &ToolResult) {
    field(
        out,
        br#"{"type":"tool_result","tool_use_id":"#,
        &result.id.0,
    );
    out.extend_from_slice(br#","content":["#);
    for (n, part) in result.content.iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        result_block_alone(out, part);
    }
    out.push(b']');
    if result.is_error {
        out.extend_from_slice(br#","is_error":true"#);
    }
}

/// Appends a part of a result without its closing brace.
fn result_block(out: &mut Vec<u8>, part: &ResultBlock) {
    match part {
        ResultBlock::Text { text } => self::text(out, text),
        ResultBlock::Image(image) => self::image(out, image),
        ResultBlock::Document(document) => self::document(out, document),
    }
}

fn field(out: &mut Vec<u8>, head: &[u8], value: &str) {
    out.extend_from_slice(head);
    string(out, value);
}

/// Appends a JSON string.
fn string(out: &mut Vec<u8>, value: &str) {
    // Writing a text into memory cannot fail.
    let _ = serde_json::to_writer(out, value);
}

/// A lower bound of the encoded size, without looking into any text.
fn least_size(messages: &[Sendable<'_>]) -> usize {
    const FRAME: usize = 24;
    let of_source = |source: &Source| match source {
        Source::Base64 { data, .. } | Source::Text { data, .. } => data.len(),
        Source::Url { url } => url.len(),
    };
    let of_result = |part: &ResultBlock| match part {
        ResultBlock::Text { text } => text.len() + FRAME,
        ResultBlock::Image(image) => of_source(&image.source) + FRAME,
        ResultBlock::Document(document) => of_source(&document.source) + FRAME,
    };
    let of_block = |block: &Cow<'_, Block>| {
        FRAME
            + match &**block {
                Block::Text { text } => text.len(),
                Block::Image(image) => of_source(&image.source),
                Block::Document(document) => of_source(&document.source),
                Block::ToolUse(call) => call.input.as_str().len(),
                Block::ToolResult(result) => result.content.iter().map(of_result).sum(),
                Block::Thinking(thinking) => thinking.thinking.len() + thinking.signature.len(),
                Block::RedactedThinking(redacted) => redacted.data.len(),
            }
    };
    messages
        .iter()
        .flat_map(|message| &message.content)
        .map(of_block)
        .sum()
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;
