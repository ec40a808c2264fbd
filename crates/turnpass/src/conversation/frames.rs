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

use super::Role;
use super::encode::{self, Ttl};
use super::normalise::{Normalised, Sendable};
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

/// One message as a frame.
///
/// # Errors
///
/// `request_invalid` for an assistant message that is to ask: the service wants the last message to be the user's.
pub fn frame(message: &Sendable<'_>, kind: Kind, stamp: &Stamp<'_>) -> Result<Frame> {
    let content = content(message, stamp.mark)?;
    let line = match (message.role, kind) {
        (Role::Assistant, Kind::History) => {
            control::assistant_line(stamp.id, stamp.model, &content)
        }
        (Role::Assistant, Kind::Asks) => {
            return Err(Error::new(
                ErrorCode::RequestInvalid,
                "messages: an answer cannot be what is asked",
            ));
        }
        // A normalised conversation has no system messages.
        (Role::User | Role::System, _) => control::user_line(&UserLine {
            uuid: stamp.id,
            content: UserContent::Blocks(&content),
            asks: kind == Kind::Asks,
        }),
    };
    Ok(Frame {
        line,
        role: message.role,
        kind,
    })
}

/// A whole conversation as frames, one by one: the last one asks.
///
/// Lazy, so that only one line is in memory besides the conversation. `id` makes the id of each message, `mark` stands on
/// the last block of the last message that the CLI passes a mark on from, if any.
pub fn frames<'a>(
    conversation: &'a Normalised<'_>,
    model: &'a str,
    mark: Ttl,
    mut id: impl FnMut(Role) -> String + 'a,
) -> impl Iterator<Item = Result<Frame>> + 'a {
    let last = conversation.messages.len().saturating_sub(1);
    conversation
        .messages
        .iter()
        .enumerate()
        .map(move |(n, message)| {
            let (kind, mark) = if n == last {
                (Kind::Asks, markable(message).map(|block| (block, mark)))
            } else {
                (Kind::History, None)
            };
            let id = id(message.role);
            frame(
                message,
                kind,
                &Stamp {
                    id: &id,
                    model,
                    mark: mark.filter(|(_, ttl)| *ttl != Ttl::None),
                },
            )
        })
}

/// The last block from which the CLI passes a mark on: a text or a result. An image's is dropped (2.1.283 to 2.1.332).
pub fn markable(message: &Sendable<'_>) -> Option<usize> {
    message.content.iter().rposition(|block| match &**block {
        super::Block::Text { text } => !text.is_empty(),
        super::Block::ToolResult(_) => true,
        _ => false,
    })
}

fn content(message: &Sendable<'_>, mark: Option<(usize, Ttl)>) -> Result<Box<RawValue>> {
    let mut json = vec![b'['];
    encode::content(&mut json, message, mark);
    json.push(b']');
    let unreadable = || Error::new(ErrorCode::Internal, "a message did not become JSON");
    let json = String::from_utf8(json).map_err(|_| unreadable())?;
    RawValue::from_string(json).map_err(|_| unreadable())
}

#[cfg(test)]
#[path = "frames_tests.rs"]
mod tests;
