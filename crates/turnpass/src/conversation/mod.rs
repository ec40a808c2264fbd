//! The conversation: messages and blocks as the host owns them. Pure data; nothing here does I/O.
//!
//! The serde form of these types is what a host may store; it is close to the Messages API but not the same, since ids
//! and names here are the host's own and thinking is opaque.

pub mod digest;
pub mod encode;
pub mod frames;
pub mod marks;
pub mod names;
pub mod normalise;

use serde::{Deserialize, Serialize};

pub use normalise::{NormaliseOptions, Normalised, normalise};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The person or program that asks, and the results of tools.
    User,
    /// The model.
    Assistant,
    /// An instruction of the host in the middle of the conversation; it keeps its place (see the normaliser).
    System,
}

/// One message of the conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said, in order.
    pub content: Vec<Block>,
}

impl Message {
    /// A user message of one text block.
    pub fn user(text: impl Into<String>) -> Self {
        Self {
            role: Role::User,
            content: vec![Block::text(text)],
        }
    }

    /// An assistant message of one text block.
    pub fn assistant(text: impl Into<String>) -> Self {
        Self {
            role: Role::Assistant,
            content: vec![Block::text(text)],
        }
    }

    /// A user message that holds tool results.
    pub fn results(results: impl IntoIterator<Item = ToolResult>) -> Self {
        Self {
            role: Role::User,
            content: results.into_iter().map(Block::ToolResult).collect(),
        }
    }

    /// All text blocks, joined.
    pub fn text(&self) -> String {
        self.content.iter().filter_map(Block::as_text).collect()
    }

    /// The tool calls of this message, in order.
    pub fn tool_calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.content.iter().filter_map(|block| match block {
            Block::ToolUse(call) => Some(call),
            _ => None,
        })
    }
}

/// One piece of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// Plain text.
    Text {
        /// The text, as written.
        text: String,
    },
    /// An image.
    Image(Image),
    /// A document (PDF or text).
    Document(Document),
    /// A call of a host tool by the model.
    ToolUse(ToolCall),
    /// What the host's tool answered.
    ToolResult(ToolResult),
    /// Thinking that the service signed: kept byte for byte.
    Thinking(SignedThinking),
    /// Thinking that only the service can read: kept byte for byte.
    RedactedThinking(RedactedThinking),
}

impl Block {
    /// A text block.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into() }
    }

    /// The text of a text block.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text { text } => Some(text),
            _ => None,
        }
    }
}

/// Where the bytes of an image or document are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Source {
    /// Inline bytes, as standard base64 with padding.
    Base64 {
        /// For example `image/png` or `application/pdf`.
        media_type: String,
        /// The encoded bytes.
        data: String,
    },
    /// Plain text (documents only).
    Text {
        /// For example `text/plain`.
        media_type: String,
        /// The text.
        data: String,
    },
    /// An address that the service fetches; turnpass never does.
    Url {
        /// An https address.
        url: String,
    },
}

/// An image block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Its bytes or address.
    pub source: Source,
}

/// A document block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Its bytes or address.
    pub source: Source,
    /// A title that the model sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

/// The id that pairs a call with its result. Any text: foreign ids are mapped on the way out and back.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ToolUseId(pub String);

/// A call of a host tool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Pairs the call with its result.
    pub id: ToolUseId,
    /// The host's name of the tool, without any prefix.
    pub name: String,
    /// The input.
    pub input: ToolInput,
}

/// A tool call's input: the text of one JSON object, kept as the model wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolInput(Box<str>);

/// Tool input that is not one JSON object; the raw text is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tool input is not one JSON object")]
pub struct ArgumentDecodeError {
    /// What the model wrote.
    pub raw: String,
}

impl ToolInput {
    /// Reads the text that the model streamed. No text at all means a call without arguments: `{}`.
    ///
    /// # Errors
    ///
    /// When the text is not exactly one JSON object.
    pub fn from_streamed(raw: &str) -> Result<Self, ArgumentDecodeError> {
        let text = raw.trim_matches([' ', '\t', '\r', '\n']);
        if text.is_empty() {
            return Ok(Self::empty());
        }
        match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text) {
            Ok(_) => Ok(Self(text.into())),
            Err(_) => Err(ArgumentDecodeError {
                raw: raw.to_owned(),
            }),
        }
    }

    /// The empty object.
    pub fn empty() -> Self {
        Self("{}".into())
    }

    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads the input as a type of the host's.
    ///
    /// # Errors
    ///
    /// When the object does not fit the type.
    pub fn read<T: serde::de::DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(&self.0)
    }

    /// Reads the input as an object.
    pub fn to_map(&self) -> serde_json::Map<String, serde_json::Value> {
        self.read().unwrap_or_default()
    }
}

impl From<serde_json::Map<String, serde_json::Value>> for ToolInput {
    fn from(map: serde_json::Map<String, serde_json::Value>) -> Self {
        Self(serde_json::Value::Object(map).to_string().into())
    }
}

impl Serialize for ToolInput {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match serde_json::from_str::<&serde_json::value::RawValue>(&self.0) {
            Ok(raw) => raw.serialize(serializer),
            Err(error) => Err(serde::ser::Error::custom(error)),
        }
    }
}

impl<'de> Deserialize<'de> for ToolInput {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde_json::Map::deserialize(deserializer).map(Self::from)
    }
}

/// What a host's tool answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// The call that it answers.
    pub id: ToolUseId,
    /// Text and images, in order. May be empty.
    pub content: Vec<ResultBlock>,
    /// Whether the tool failed; the model is told.
    #[serde(default)]
    pub is_error: bool,
}

impl ToolResult {
    /// A result of one text block.
    pub fn text(id: ToolUseId, text: impl Into<String>) -> Self {
        Self {
            id,
            content: vec![ResultBlock::Text { text: text.into() }],
            is_error: false,
        }
    }

    /// A failure told to the model.
    pub fn error(id: ToolUseId, text: impl Into<String>) -> Self {
        Self {
            is_error: true,
            ..Self::text(id, text)
        }
    }
}

/// One piece of a tool result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResultBlock {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
    /// An image.
    Image(Image),
    /// A document.
    Document(Document),
}

/// A thinking block with the service's signature. Neither part may change, not even in white space.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedThinking {
    /// The thinking that may be shown; may be empty when the service hides it.
    pub thinking: String,
    /// The signature; never shown.
    pub signature: String,
}

impl std::fmt::Debug for SignedThinking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignedThinking")
            .field("thinking", &self.thinking)
            .finish_non_exhaustive()
    }
}

/// A thinking block that the service encrypted; never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedactedThinking {
    /// The opaque payload.
    pub data: String,
}

impl std::fmt::Debug for RedactedThinking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RedactedThinking")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bug_119_a_call_without_arguments_is_an_empty_object() {
        for raw in ["", " \n", "{}"] {
            assert_eq!(ToolInput::from_streamed(raw).unwrap().as_str(), "{}");
        }
    }

    #[test]
    fn input_that_is_no_object_keeps_its_text() {
        for raw in ["{\"a\":", "[1]", "\"{}\"", "null", "{} {}"] {
            assert_eq!(ToolInput::from_streamed(raw).unwrap_err().raw, raw);
        }
    }

    #[test]
    fn input_keeps_the_numbers_that_the_model_wrote() {
        let raw = r#"{"big":12345678901234567890123,"e":1e3,"z":1,"a":2}"#;
        let input = ToolInput::from_streamed(raw).unwrap();
        assert_eq!(serde_json::to_string(&input).unwrap(), raw);
    }

    #[test]
    fn signatures_are_not_printed() {
        let thinking = SignedThinking {
            thinking: "t".into(),
            signature: "marker".into(),
        };
        let redacted = RedactedThinking {
            data: "marker".into(),
        };
        assert!(!format!("{thinking:?}{redacted:?}").contains("marker"));
    }
}
