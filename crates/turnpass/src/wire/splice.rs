//! The CLI's request body: looked into, and given the host's `messages` in place of its own.
//!
//! The body is never taken apart into a tree and put together again. One borrowed pass finds where the value of the top-level `messages` begins and
//! ends; everything before and after that span is copied as it is, so that the bytes which the prompt cache and the API look at stay the CLI's.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::lenient;
use super::text::Text;

/// Largest request body of the CLI that is taken, in bytes (`seeds/relay.md`: 8 MiB).
pub const MAX_NATIVE_BYTES: usize = 8 * 1024 * 1024;

/// Largest request body with the host's messages in it, in bytes (`seeds/relay.md`: 8 MiB).
pub const MAX_RESTORED_BYTES: usize = 8 * 1024 * 1024;

/// Why a body was not given the host's messages. Nothing goes upstream then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpliceError {
    /// The CLI's body is larger than [`MAX_NATIVE_BYTES`].
    #[error(
        "the CLI's request body of {bytes} bytes is larger than the limit of {limit_bytes} bytes"
    )]
    NativeTooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The body with the host's messages is larger than [`MAX_RESTORED_BYTES`].
    #[error(
        "the request body with the host's messages has {bytes} bytes and is larger than the limit of {limit_bytes} bytes"
    )]
    RestoredTooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The body is not one JSON object.
    #[error("the CLI's request body is not a JSON object")]
    NotJson,
    /// There is no top-level `messages`.
    #[error("the CLI's request body has no messages")]
    MessagesMissing,
    /// There is more than one top-level `messages`.
    #[error("the CLI's request body has more than one messages")]
    MessagesRepeated,
    /// `messages` is no array, one of its elements has no role, or none is the user's.
    #[error("the messages of the CLI's request body are malformed")]
    MessagesInvalid,
    /// No text of the last user message is the placeholder, so this request is not the one that the host's turn caused.
    #[error("the CLI's request body does not contain the placeholder")]
    PlaceholderMissing,
    /// What the host wants to put in is not an array.
    #[error("the host's messages are not an array")]
    RestoredInvalid,
}

impl SpliceError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NativeTooLarge { .. } => "native_too_large",
            Self::RestoredTooLarge { .. } => "restored_too_large",
            Self::NotJson => "not_json",
            Self::MessagesMissing => "messages_missing",
            Self::MessagesRepeated => "messages_repeated",
            Self::MessagesInvalid => "messages_invalid",
            Self::PlaceholderMissing => "placeholder_missing",
            Self::RestoredInvalid => "restored_invalid",
        }
    }
}

/// A request body of the CLI, read but not changed.
#[derive(Debug, Clone)]
pub struct NativeBody<'a> {
    body: &'a [u8],
    fields: Vec<(Text<'a>, &'a RawValue)>,
}

/// `body` with its `messages` replaced by `messages`, every other byte kept.
///
/// Checks first that the body is the one which `placeholder` caused; see [`NativeBody::splice`].
///
/// # Errors
///
/// Any [`SpliceError`].
pub fn splice(body: &[u8], messages: &RawValue, placeholder: &str) -> Result<Vec<u8>, SpliceError> {
    NativeBody::read(body)?.splice(messages, placeholder)
}

impl<'a> NativeBody<'a> {
    /// Finds the top-level fields of a body in one pass.
    ///
    /// # Errors
    ///
    /// [`SpliceError::NativeTooLarge`] or [`SpliceError::NotJson`].
    pub fn read(body: &'a [u8]) -> Result<Self, SpliceError> {
        if body.len() > MAX_NATIVE_BYTES {
            return Err(SpliceError::NativeTooLarge {
                bytes: body.len(),
                limit_bytes: MAX_NATIVE_BYTES,
            });
        }
        let Fields(fields) = serde_json::from_slice(body).map_err(|_| SpliceError::NotJson)?;
        Ok(Self { body, fields })
    }

    /// The raw value of a top-level field: the last one if it is repeated, as the API reads it.
    pub fn field(&self, name: &str) -> Option<&'a RawValue> {
        let mut values = self.fields.iter().rev();
        values
            .find(|(field, _)| field == name)
            .map(|&(_, value)| value)
    }

    /// Names of the top-level fields, in order.
    pub fn field_names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|(name, _)| name.as_str())
    }

    /// The body with its `messages` replaced.
    ///
    /// Only if there is exactly one top-level `messages`, an array whose elements all have a role, and a text of the last one whose role is `user`
    /// is exactly `placeholder`: a request of the CLI's own about the user's text (a title, a summary) quotes it among other words, and a request
    /// that goes on after an answer has it in an earlier message (2.1.332). The result is the body's own bytes up to the old value, `messages`, and the body's own bytes after it.
    ///
    /// # Errors
    ///
    /// Any [`SpliceError`] but the two of [`read`](Self::read).
    pub fn splice(&self, messages: &RawValue, placeholder: &str) -> Result<Vec<u8>, SpliceError> {
        let native = self.messages()?;
        check_placeholder(native, placeholder)?;
        if !messages.get().starts_with('[') {
            return Err(SpliceError::RestoredInvalid);
        }
        let span = self.span(native);
        let bytes = self.body.len() - span.len() + messages.get().len();
        if bytes > MAX_RESTORED_BYTES {
            return Err(SpliceError::RestoredTooLarge {
                bytes,
                limit_bytes: MAX_RESTORED_BYTES,
            });
        }
        let mut restored = Vec::with_capacity(bytes);
        restored.extend_from_slice(&self.body[..span.start]);
        restored.extend_from_slice(messages.get().as_bytes());
        restored.extend_from_slice(&self.body[span.end..]);
        Ok(restored)
    }

    /// What a relay wants to know of the request before it builds the messages.
    pub fn inspect(&self) -> Inspection<'a> {
        let tools: Vec<Marked<'a>> = self.elements("tools");
        let system: Vec<Marked<'a>> = self.elements("system");
        let mut marks = Vec::new();
        for (place, list) in [(Place::Tools, &tools), (Place::System, &system)] {
            marks.extend(list.iter().enumerate().filter_map(|(index, element)| {
                let ttl = element.mark.as_ref()?.ttl();
                Some(CacheMark { place, index, ttl })
            }));
        }
        Inspection {
            model: self.field("model").and_then(lenient::parse),
            stream: self.field("stream").and_then(lenient::parse),
            tool_names: tools.into_iter().map(|tool| tool.name).collect(),
            marks,
            message_marks: self.message_marks(),
        }
    }

    fn messages(&self) -> Result<&'a RawValue, SpliceError> {
        let mut found = self.fields.iter().filter(|(name, _)| name == "messages");
        match (found.next(), found.next()) {
            (Some(&(_, messages)), None) => Ok(messages),
            (None, _) => Err(SpliceError::MessagesMissing),
            (Some(_), Some(_)) => Err(SpliceError::MessagesRepeated),
        }
    }

    /// Where in the body a value that borrows from it stands.
    fn span(&self, value: &RawValue) -> Range<usize> {
        let start = value.get().as_ptr() as usize - self.body.as_ptr() as usize;
        start..start + value.get().len()
    }

    fn elements<T: Deserialize<'a>>(&self, field: &str) -> Vec<T> {
        let elements: Vec<&RawValue> = self
            .field(field)
            .and_then(lenient::parse)
            .unwrap_or_default();
        elements.into_iter().filter_map(lenient::parse).collect()
    }

    fn message_marks(&self) -> Vec<CacheTtl> {
        let messages: Vec<NativeMessage<'a>> = self.elements("messages");
        let contents = messages.into_iter().filter_map(|message| message.content);
        contents
            .filter_map(lenient::parse::<Vec<&RawValue>>)
            .flatten()
            .filter_map(|block| Some(lenient::parse::<Marked<'_>>(block)?.mark?.ttl()))
            .collect()
    }
}

fn check_placeholder(messages: &RawValue, placeholder: &str) -> Result<(), SpliceError> {
    let elements: Vec<&RawValue> = lenient::parse(messages).ok_or(SpliceError::MessagesInvalid)?;
    let mut users = 0;
    let mut found = false;
    for element in elements {
        let message = Some(element).filter(|element| lenient::is_object(element.get().as_bytes()));
        let message: NativeMessage<'_> = message
            .and_then(lenient::parse)
            .ok_or(SpliceError::MessagesInvalid)?;
        if message.role == "user" {
            users += 1;
            // The newest one decides: those before it are of earlier turns.
            found = message
                .content
                .is_some_and(|content| has_text(content, placeholder));
        }
    }
    match (users, found) {
        (0, _) => Err(SpliceError::MessagesInvalid),
        (_, false) => Err(SpliceError::PlaceholderMissing),
        (_, true) => Ok(()),
    }
}

/// Whether a content, a string or blocks, has `text` as one of its texts.
fn has_text(content: &RawValue, text: &str) -> bool {
    if content.get().starts_with('"') {
        return lenient::parse::<Text<'_>>(content).is_some_and(|content| content == text);
    }
    let blocks: Vec<&RawValue> = lenient::parse(content).unwrap_or_default();
    blocks.into_iter().any(|block| {
        let block: Option<TextBlock<'_>> = lenient::parse(block);
        block.is_some_and(|block| {
            block.kind == "text" && block.text.is_some_and(|content| content == text)
        })
    })
}

/// What [`NativeBody::inspect`] found. Ill-typed parts read as absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection<'a> {
    /// `model`.
    pub model: Option<Text<'a>>,
    /// `stream`.
    pub stream: Option<bool>,
    /// Names of `tools` in order; `None` for a tool without a name.
    pub tool_names: Vec<Option<Text<'a>>>,
    /// `cache_control` marks on tools and system blocks, in the order in which the API counts them (tools, then system).
    pub marks: Vec<CacheMark>,
    /// Lifetimes of the marks on the native messages' blocks, which go away with those messages.
    pub message_marks: Vec<CacheTtl>,
}

impl Inspection<'_> {
    /// The lifetime that the CLI uses in this request, which a mark of ours must have too: that of its last mark that stays,
    /// else that of its first mark on a message. `None` when the CLI caches nothing.
    ///
    /// The API wants lifetimes not to rise in the order tools, system, messages; the last one that stays can be followed by itself.
    pub fn ttl(&self) -> Option<&CacheTtl> {
        let staying = self.marks.last().map(|mark| &mark.ttl);
        staying.or(self.message_marks.first())
    }

    /// Whether the marks that stay keep the API's order: none for an hour after one for five minutes.
    pub fn marks_in_order(&self) -> bool {
        let after_short = self
            .marks
            .iter()
            .skip_while(|mark| mark.ttl != CacheTtl::FiveMinutes);
        !after_short
            .into_iter()
            .any(|mark| mark.ttl == CacheTtl::OneHour)
    }
}

/// One `cache_control` mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheMark {
    /// The list it stands in.
    pub place: Place,
    /// Position in that list.
    pub index: usize,
    /// Its lifetime.
    pub ttl: CacheTtl,
}

/// A list that can hold marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `tools`.
    Tools,
    /// `system`.
    System,
}

/// Lifetime of a cache mark.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheTtl {
    /// `"5m"`, also meant by a mark without a `ttl`.
    FiveMinutes,
    /// `"1h"`.
    OneHour,
    /// Something that this version does not know.
    Other(String),
}

impl CacheTtl {
    /// The wire word.
    pub fn as_str(&self) -> &str {
        match self {
            Self::FiveMinutes => "5m",
            Self::OneHour => "1h",
            Self::Other(word) => word,
        }
    }
}

/// The top-level fields, repeated ones kept.
struct Fields<'a>(Vec<(Text<'a>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::with_capacity(16);
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}

#[derive(serde::Deserialize)]
struct NativeMessage<'a> {
    #[serde(borrow)]
    role: Text<'a>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
struct TextBlock<'a> {
    #[serde(borrow, rename = "type")]
    kind: Text<'a>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
}

/// An element of `tools`, `system` or a message's content.
#[derive(serde::Deserialize)]
struct Marked<'a> {
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default, rename = "cache_control")]
    mark: Option<Mark<'a>>,
}

#[derive(serde::Deserialize)]
struct Mark<'a> {
    #[serde(borrow, default)]
    ttl: Option<Text<'a>>,
}

impl Mark<'_> {
    fn ttl(&self) -> CacheTtl {
        match self.ttl.as_deref() {
            None | Some("5m") => CacheTtl::FiveMinutes,
            Some("1h") => CacheTtl::OneHour,
            Some(other) => CacheTtl::Other(other.to_owned()),
        }
    }
}

#[cfg(test)]
#[path = "splice_tests.rs"]
mod tests;
