//! A normalised conversation as lines for the CLI's stdin: the history in the CLI's own frames, and the line that asks.
//!
//! A user message is a user line with `"shouldQuery":false`, an assistant message an assistant record; the last user
//! message is a user line without that field, and starts the generation. So calls, results, images and signed thinking
//! reach the service as they are, each in its place.
//!
//! # The order of writing
//!
//! A user line that does not ask is acknowledged by a `result` of its own. The next assistant record may be written only
//! after that (2.1.294 to 2.1.332; written earlier the order is lost); an assistant record is not acknowledged, and the
//! user line after it may follow at once. [`Frame::acknowledged`] says which it is.
//!
//! # What the CLI changes (2.1.294, 2.1.310 and 2.1.332, measured)
//!
//! Blocks, ids, names, signatures, marks and the order of keys stay as they are. Numbers of a tool's input go through
//! JavaScript: `12345678901234567890123` becomes `1.2345678901234568e+22` and `1e3` becomes `1000`, the same in every
//! request. Images of a user message go through the CLI's own limits (2000 pixels); those in results as well.
//!
//! Without `--no-session-persistence` the CLI also writes each image of a user message (not those in results) to a file,
//! adds a text `[Image: source: PATH]` to the message and a line end to its last text. The path holds the CLI's session id,
//! so it differs from process to process; no variable was found that stops it.

use serde_json::value::RawValue;

use super::encode::{self, Ttl};
use super::marks::one_mark;
use super::normalise::{Normalised, Sendable};
use super::{Block, Role};
use crate::error::{Error, ErrorCode, Result};
use crate::wire::control::{self, Line, UserContent, UserLine};

/// What a frame does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only adds to the history.
    History,
    /// Adds to the history and starts a generation. Only a user message can.
    Asks,
}

/// A message as a line.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Frame {
    /// The line for stdin.
    pub line: Line,
    /// Whose message it is.
    pub role: Role,
    /// Whether it asks.
    pub kind: Kind,
}

impl Frame {
    /// Whether the CLI answers the line with a `result` of its own, for which the next assistant record has to wait.
    pub fn acknowledged(&self) -> bool {
        self.role == Role::User && self.kind == Kind::History
    }
}

/// What a frame says beside its message.
#[derive(Clone, Copy, Debug)]
pub struct Stamp<'a> {
    /// For a user message: a random uuid, by which the message can be taken back. For an assistant message: an id that no
    /// other message of the process has; it does not go upstream.
    pub id: &'a str,
    /// The session's model, its resolved id. The CLI leaves thinking out of a message of any other model.
    pub model: &'a str,
    /// The block that carries a cache mark. The CLI passes it on from a text or a result, not from an image.
    pub mark: Option<(usize, Ttl)>,
}

/// The content of one message, encoded and not yet a line: what remains to be said is whose process takes it.
#[derive(Clone, Debug)]
pub struct Content {
    role: Role,
    json: Box<RawValue>,
}

impl Content {
    /// Encodes a message; `mark` is the block that carries a cache mark. The CLI passes it on from a text or a result,
    /// not from an image.
    ///
    /// # Errors
    ///
    /// `internal`.
    pub fn of(message: &Sendable<'_>, mark: Option<(usize, Ttl)>) -> Result<Self> {
        let mut json = vec![b'['];
        encode::content(&mut json, message, mark);
        json.push(b']');
        Ok(Self {
            role: message.role,
            json: raw(json)?,
        })
    }

    /// Whose message it is.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Its size as JSON, in bytes.
    pub fn bytes(&self) -> usize {
        self.json.get().len()
    }

    /// The content as a frame.
    ///
    /// # Errors
    ///
    /// `request_invalid` for an assistant message that is to ask: the service wants the last message to be the user's.
    pub fn frame(&self, kind: Kind, id: &str, model: &str) -> Result<Frame> {
        let line = match (self.role, kind) {
            (Role::Assistant, Kind::History) => control::assistant_line(id, model, &self.json),
            (Role::Assistant, Kind::Asks) => {
                return Err(Error::new(
                    ErrorCode::RequestInvalid,
                    "messages: an answer cannot be what is asked",
                ));
            }
            // A normalised conversation has no system messages.
            (Role::User | Role::System, _) => control::user_line(&UserLine {
                uuid: id,
                content: UserContent::Blocks(&self.json),
                asks: kind == Kind::Asks,
            }),
        };
        Ok(Frame {
            line,
            role: self.role,
            kind,
        })
    }
}

/// One message as a frame.
///
/// # Errors
///
/// As [`Content::frame`].
pub fn frame(message: &Sendable<'_>, kind: Kind, stamp: &Stamp<'_>) -> Result<Frame> {
    Content::of(message, stamp.mark)?.frame(kind, stamp.id, stamp.model)
}

/// A whole conversation as frames, one by one: the last one asks.
///
/// Lazy, so that only one line is in memory besides the conversation. `id` makes the id of each message; the mark stands
/// where [`mark_place`] says.
pub fn frames<'a>(
    conversation: &'a Normalised<'_>,
    model: &'a str,
    mark: Ttl,
    mut id: impl FnMut(Role) -> String + 'a,
) -> impl Iterator<Item = Result<Frame>> + 'a {
    let last = conversation.messages.len().saturating_sub(1);
    let place = mark_place(conversation).filter(|_| mark != Ttl::None);
    conversation
        .messages
        .iter()
        .enumerate()
        .map(move |(n, message)| {
            let kind = match n == last {
                true => Kind::Asks,
                false => Kind::History,
            };
            let id = id(message.role);
            let stamp = Stamp {
                id: &id,
                model,
                mark: place
                    .filter(|(at, _)| *at == n)
                    .map(|(_, block)| (block, mark)),
            };
            frame(message, kind, &stamp)
        })
}

/// Every message's content, with the mark where [`mark_place`] says.
///
/// # Errors
///
/// `internal`.
pub fn contents(conversation: &Normalised<'_>, mark: Ttl) -> Result<Vec<Content>> {
    let place = mark_place(conversation).filter(|_| mark != Ttl::None);
    let messages = conversation.messages.iter().enumerate();
    messages
        .map(|(n, message)| {
            let mark = place
                .filter(|(at, _)| *at == n)
                .map(|(_, block)| (block, mark));
            Content::of(message, mark)
        })
        .collect()
}

/// The message and the block that carry the one mark that is left; see [`super::marks`].
pub fn mark_place(conversation: &Normalised<'_>) -> Option<(usize, usize)> {
    // The CLI passes a mark on from a text or a result, not from an image (2.1.283 to 2.1.332).
    let markable = |block: &Block| match block {
        Block::Text { text } => !text.is_empty(),
        Block::ToolResult(_) => true,
        _ => false,
    };
    let messages = conversation.messages.iter().map(|message| {
        let asks = message.role == Role::User;
        let blocks = message.content.iter();
        (asks, blocks.map(|block| asks && markable(block)).collect())
    });
    one_mark(messages)
}

fn raw(json: Vec<u8>) -> Result<Box<RawValue>> {
    let unreadable = || Error::new(ErrorCode::Internal, "a message did not become JSON");
    let json = String::from_utf8(json).map_err(|_| unreadable())?;
    RawValue::from_string(json).map_err(|_| unreadable())
}

#[cfg(test)]
#[path = "frames_tests.rs"]
mod tests;
