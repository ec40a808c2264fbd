//! Conversations that nobody has seen before, and the host around them.

use serde_json::json;
use turnpass::conversation::{Block, Image, Message, Role, Source};
use turnpass::request::Tool;

/// A short answer in several pieces, at once.
pub(super) const SHORT: &str =
    "[[say The quick brown fox jumps over the lazy dog.]] [[chunk 8 ms 0]]";

/// Pairs of messages and bytes of the history that a session of some length has.
pub(super) const PAIRS: usize = 20;
/// Bytes of all messages of such a history.
pub(super) const HISTORY_BYTES: usize = 40 * 1024;

/// The host's system prompt.
pub(super) const SYSTEM: &str = "You work in a repository. Read before you write, keep changes small, run the tests \
after each change, and say what you did in a few sentences. Ask when something is not clear. Never invent a file.";

/// Random words without end.
#[derive(Debug)]
pub(super) struct Words(u64);

impl Words {
    /// Other words in every run.
    pub(super) fn new() -> Self {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Self(now.as_secs() ^ (u64::from(now.subsec_nanos()) << 32) ^ u64::from(std::process::id()))
    }

    fn number(&mut self) -> u64 {
        // splitmix64: no two states give the same number, which is all that is asked of it.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Prose of this length, with the quotes and line ends that real text has.
    pub(super) fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 16);
        while text.len() < bytes {
            let mut letters = self.number();
            for _ in 0..2 + letters % 7 {
                letters >>= 5;
                text.push(char::from(b'a' + (letters % 26) as u8));
            }
            text.push_str(match letters % 24 {
                0 => ".\n",
                1 => "\" ",
                _ => " ",
            });
        }
        text.truncate(bytes);
        text
    }

    /// A word that is in no other text.
    pub(super) fn mark(&mut self) -> String {
        format!("mark-{:016x}", self.number())
    }

    /// `pairs` of a question and an answer, `bytes` in all.
    pub(super) fn history(&mut self, pairs: usize, bytes: usize) -> Vec<Message> {
        let each = bytes / (2 * pairs.max(1));
        (0..pairs)
            .flat_map(|_| {
                [
                    Message::user(self.text(each)),
                    Message::assistant(self.text(each)),
                ]
            })
            .collect()
    }

    /// A history with the weight of pictures, so that it is large in bytes and still within the model's window.
    pub(super) fn heavy_history(&mut self, bytes: usize) -> Vec<Message> {
        // Most of the weight: text alone would fill the window long before the body is full.
        const PICTURE: usize = 5 * 1024 * 1024 / 4;
        let mut messages = self.history(PAIRS, bytes % PICTURE);
        for _ in 0..bytes / PICTURE {
            let mut data = String::with_capacity(PICTURE);
            data.push_str("iVBORw0KGgoAAAANSUhEUgAA");
            while data.len() < PICTURE {
                data.push_str(&format!("{:016x}", self.number()));
            }
            data.truncate(PICTURE);
            messages.push(Message {
                role: Role::User,
                content: vec![Block::Image(Image {
                    source: Source::Base64 {
                        media_type: "image/png".to_owned(),
                        data,
                    },
                })],
            });
            messages.push(Message::assistant(self.text(64)));
        }
        messages
    }
}

/// Tools of a usual agent; `salt` goes into each description, so that another one makes other tools.
pub(super) fn tools(count: usize, salt: &str, description_bytes: usize) -> Vec<Tool> {
    const NAMES: [&str; 10] = [
        "read", "write", "edit", "list", "glob", "search", "shell", "fetch", "plan", "ask",
    ];
    let filler = "Reads, writes or looks for what the arguments name, and says what came of it. ";
    let tool = |n: usize| {
        let name = NAMES
            .get(n)
            .map_or(format!("tool_{n}"), |name| (*name).to_owned());
        let mut description = format!("{salt}{name}. ");
        while description.len() < description_bytes {
            description.push_str(filler);
        }
        Tool {
            name,
            description,
            input_schema: json!({
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Relative to the working directory."},
                    "pattern": {"type": "string", "description": "What to look for."},
                    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
                },
                "required": ["path"],
                "additionalProperties": false,
            }),
        }
    };
    (0..count).map(tool).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_has_its_size_and_is_never_the_same() {
        let mut words = Words::new();
        let bytes = |messages: &[Message]| messages.iter().map(|m| m.text().len()).sum::<usize>();
        let (one, two) = (words.history(20, 40_000), words.history(20, 40_000));
        assert_eq!((one.len(), bytes(&one)), (40, 40_000));
        assert!(one.iter().zip(&two).all(|(one, two)| one != two));
        assert!(one.iter().all(|message| !message.text().contains("[[")));
        assert_ne!(words.mark(), words.mark());
    }

    #[test]
    fn another_salt_makes_other_tools_of_the_same_names() {
        let (one, two) = (tools(12, "a", 100), tools(12, "b", 100));
        assert!(
            one.iter()
                .zip(&two)
                .all(|(one, two)| one.name == two.name && one != two)
        );
        assert!(one.iter().all(|tool| tool.description.len() >= 100));
    }
}
