//! A conversation told as one user message: the pool document's way of a reseed. Pure.
//!
//! What was said stands word for word in lines that begin with [`QUOTE`]; every other line is a heading of ours. A line
//! break of any kind in what was said is followed by the quote mark, so no content can write a heading or end the
//! transcript. Images and documents stand where they were; the last message of the user follows as it is.
//!
//! What it cannot carry: thinking, which only the model's own messages can hold, and calls and results as such. A result
//! in the last message is part of the transcript too, since no call stands before it.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::conversation::normalise::Sendable;
use crate::conversation::{Block, ResultBlock, Role, ToolCall, ToolResult, names};

/// What every line of content begins with.
const QUOTE: &str = "| ";

/// What the model is told first.
const BEGIN: &str = "This conversation began elsewhere. Here is all of it so far: lines that begin with \"| \" are what \
    was said, word for word behind that mark, and all other lines say whose it is. The tool calls in it were made and \
    answered; do not make them again because they stand here.";

/// What it is told last, before the user's new message, or when only results of tools were new.
const END_THEN_MESSAGE: &str = "End of the conversation so far. The user's new message follows.";
const END_THEN_GO_ON: &str = "End of the conversation so far. Go on from here.";

/// Messages of a history as one message of the user. They are at least two, and the last one is the user's.
pub(crate) fn message<'a>(messages: &'a [Sendable<'a>]) -> Sendable<'a> {
    let mut transcript = Transcript::default();
    transcript.text.push_str(BEGIN);
    transcript.text.push('\n');
    let (last, history) = match messages.split_last() {
        Some((last, history)) => (Some(last), history),
        None => (None, messages),
    };
    for message in history {
        for block in &message.content {
            transcript.block(message.role, block);
        }
    }
    let rest = last.into_iter().flat_map(|last| &last.content);
    let (results, new): (Vec<_>, Vec<_>) =
        rest.partition(|block| matches!(***block, Block::ToolResult(_)));
    for result in results {
        transcript.block(Role::User, result);
    }
    transcript.heading(match new.is_empty() {
        true => END_THEN_GO_ON,
        false => END_THEN_MESSAGE,
    });
    transcript.flush();
    let mut content = transcript.content;
    content.extend(new.into_iter().cloned());
    Sendable {
        role: Role::User,
        content,
    }
}

/// The message while it is written.
#[derive(Default)]
struct Transcript<'a> {
    content: Vec<Cow<'a, Block>>,
    text: String,
}

impl<'a> Transcript<'a> {
    fn block(&mut self, role: Role, block: &'a Block) {
        let whose = match role {
            Role::Assistant => "assistant",
            Role::User | Role::System => "user",
        };
        match block {
            Block::Text { text } => {
                self.heading(&format!("{whose}:"));
                self.quoted(text);
            }
            Block::Image(_) => self.whole(&format!("{whose}, an image:"), Cow::Borrowed(block)),
            Block::Document(_) => {
                self.whole(&format!("{whose}, a document:"), Cow::Borrowed(block))
            }
            Block::ToolUse(call) => self.call(call),
            Block::ToolResult(result) => self.result(result),
            // Only a message of the model can hold it, and only with its signature.
            Block::Thinking(_) | Block::RedactedThinking(_) => {}
        }
    }

    fn call(&mut self, call: &ToolCall) {
        let name = names::published(&call.name);
        let name = name.as_deref().unwrap_or("a tool");
        self.heading(&format!(
            "assistant, call {} of {}:",
            word(&call.id.0),
            word(name)
        ));
        self.quoted(call.input.as_str());
    }

    fn result(&mut self, result: &'a ToolResult) {
        let how = if result.is_error {
            "failed result"
        } else {
            "result"
        };
        let id = word(&result.id.0);
        self.heading(&format!("{how} of call {id}:"));
        for part in &result.content {
            let block = match part {
                ResultBlock::Text { text } => {
                    self.quoted(text);
                    continue;
                }
                ResultBlock::Image(image) => Block::Image(image.clone()),
                ResultBlock::Document(document) => Block::Document(document.clone()),
            };
            let what = match block {
                Block::Image(_) => "an image",
                _ => "a document",
            };
            self.whole(&format!("{how} of call {id}, {what}:"), Cow::Owned(block));
        }
    }

    /// A block that no text can stand for.
    fn whole(&mut self, heading: &str, block: Cow<'a, Block>) {
        self.heading(heading);
        self.flush();
        self.content.push(block);
    }

    fn heading(&mut self, text: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.text, "{text}");
    }

    fn quoted(&mut self, text: &str) {
        self.text.push_str(QUOTE);
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            self.text.push(c);
            if breaks_line(c) && !(c == '\r' && chars.peek() == Some(&'\n')) {
                self.text.push_str(QUOTE);
            }
        }
        self.text.push('\n');
    }

    fn flush(&mut self) {
        if !self.text.is_empty() {
            let text = std::mem::take(&mut self.text);
            self.content.push(Cow::Owned(Block::Text { text }));
        }
    }
}

/// Whatever a reader may take for the end of a line: Unicode's mandatory breaks, and the separators of ASCII.
fn breaks_line(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// A word for a heading. Ids and published names of a normalised history have no other characters.
fn word(text: &str) -> String {
    let allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    text.chars().filter(allowed).collect()
}

#[cfg(test)]
#[path = "transcript_tests.rs"]
mod tests;
