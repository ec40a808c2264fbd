//! The rules by name, and the texts that they put in.

use serde::Serialize;

macro_rules! rules {
    ($($name:ident = $word:literal, $what:literal;)*) => {
        /// One rule of the normaliser. The words are stable; new ones may be added.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum Rule {
            $(#[doc = $what] $name,)*
        }

        impl Rule {
            /// All rules, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The stable word.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// What it did, in words.
            pub fn what(self) -> &'static str {
                match self { $(Self::$name => $what,)* }
            }
        }
    };
}

rules! {
    BlankText = "blank_text", "a text without anything visible was left out";
    EmptyMessage = "empty_message", "a message with nothing left was left out";
    MergedNeighbours = "merged_neighbours", "neighbours of one role became one message";
    SeparatedNeighbours = "separated_neighbours", "a marked text was put between two assistant messages";
    SystemMessage = "system_message", "a system message became a marked user text in its place";
    LeadingAssistant = "leading_assistant", "a marked user text was put before a leading assistant message";
    TrailingAssistant = "trailing_assistant", "a request to continue was put after a trailing assistant message";
    MovedResult = "moved_result", "a tool result was moved next to its call";
    RepeatedResult = "repeated_result", "a second result of one call was left out";
    OrphanResult = "orphan_result", "a tool result without its call became a marked user text";
    MissingResult = "missing_result", "a call without result got a marked failed one";
    EmptyError = "empty_error", "a failed result without text got a marked one";
    ErrorMedia = "error_media", "images and documents of a failed result were moved behind the results";
    RenamedId = "renamed_id", "the id of a call was replaced";
    MisplacedCall = "misplaced_call", "a tool call outside an assistant message became a marked text";
    MisplacedMedia = "misplaced_media", "an image or document of an assistant message was moved behind it";
    MediaType = "media_type", "the media type of an image or document was put right";
    UnsupportedMedia = "unsupported_media", "an image or document that the service does not take became a marked text";
    UnsignedThinking = "unsigned_thinking", "thinking without signature or payload was left out";
    MisplacedThinking = "misplaced_thinking", "thinking outside an assistant message was left out";
    ThinkingLeftOut = "thinking_left_out", "thinking was left out, as asked";
    ThinkingAlone = "thinking_alone", "an answer of thinking alone was left out";
}

/// One thing that was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Change {
    /// By which rule.
    pub rule: Rule,
    /// The message of the host's history that it was about.
    pub message: usize,
}

/// Begins every text that the normaliser puts in, so that people and models can tell it from the host's.
pub const MARK: &str = "[turnpass: ";

pub(super) const SYSTEM: &str = "[turnpass: system message of the host program]\n";
pub(super) const LEADING: &str = "[turnpass: the conversation begins with the assistant's message]";
pub(super) const CONTINUE: &str =
    "[turnpass: continue from where your last message ends, without repeating it]";
pub(super) const BETWEEN: &str = "[turnpass: the assistant's next message follows]";
pub(crate) const MISSING: &str =
    "[turnpass: there is no result of this call; it may or may not have been executed]";
pub(super) const EMPTY_ERROR: &str = "[turnpass: the tool failed without saying why]";
pub(super) const ORPHAN: &str =
    "[turnpass: result of a tool call that is not in this conversation]";
pub(super) const CALL: &str = "[turnpass: tool call outside an assistant message]\n";
