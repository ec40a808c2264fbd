//! When a conversation becomes shorter, what stays of it, and what is said in place of the rest. Pure.
//!
//! A compaction asks the model for a summary of the older part and puts it in the place of that part. What stays is whole:
//! a call and its results are on the same side of the cut, and every message behind it is the one that it was. The host's
//! own instructions in the middle of the older part stay too, and the person's latest request, if the part that stays has
//! none and it is small enough to be said again.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use turnpass::conversation::{Block, Message, Role, ToolUseId};
use turnpass::models::context::{
    CompactionPolicy, POOL_FRACTION, RELAY_COMPACTIONS, RELAY_FRACTION,
};
use turnpass::models::estimate_tokens;
use turnpass::request::TransportKind;

/// How much of the latest conversation stays, in tokens by turnpass's estimate: some rounds of work with their results,
/// and a seventh of the threshold of the smallest window.
pub const KEEP_TOKENS: u64 = 20_000;

/// Compactions of one run, whatever the transport: the relay document's bound, since a run that needs more goes in circles.
pub const COMPACTIONS: u32 = RELAY_COMPACTIONS;

/// The person's latest request is said again up to this size, in tokens; a longer one is some text to work on, which the
/// summary tells of like all else. Never more than a quarter of the conversation.
const REQUEST_TOKENS: u64 = 2_000;

/// What begins the message of a summary, so that it is known again.
pub(crate) const SUMMARY_MARK: &str = "[turnpass] Summary of the conversation so far";

/// What stands before the person's latest request in that message.
const REQUEST_MARK: &str = "[turnpass] The person's latest request, word for word:";

/// What begins everything that the agent itself says in the person's place.
const AGENT_MARK: &str = "[turnpass]";

/// A due compaction is worth its request when it takes away this part of the conversation at the least.
const WORTH_A_PART_OF: u64 = 4;

/// What asks for a summary.
const ASKS: &str = "[turnpass] The conversation above comes near the limit of the context window. Everything above is \
about to be replaced by a summary, which you write now. Whoever goes on with the work sees that summary, the latest \
messages, and nothing else.\n\n\
Write down:\n\
- what the person asked for, in their own words where these matter, and every wish and limit that still holds;\n\
- what was done and found so far, with the names of files, functions and commands, the values and the exact texts that \
are needed again;\n\
- what was decided, and why;\n\
- what failed, and what must not be tried again;\n\
- what is still to be done, beginning with the next step.\n\n\
If the conversation begins with a summary, carry over what still matters of it. Say nothing that is not in the \
conversation. Answer with the summary alone, as plain text. Do not call any tool.";

/// When and how an agent compacts its conversation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compaction {
    /// Whether it does at all. Without it a conversation that does not fit ends the run.
    pub enabled: bool,
    /// The size from which on the conversation is compacted before the next generation; `None` is the transport's own:
    /// 70 % of the window for the pool, 80 % for the relay, and for replay only what did not fit.
    pub threshold: Option<Threshold>,
    /// How much of the latest conversation stays, in estimated tokens. Never more than half of the threshold and half of
    /// the conversation; the last message, or the last calls with their results, stays whatever its size.
    pub keep_tokens: u64,
    /// Compactions of one run, those after an overflow included.
    pub per_run: u32,
    /// The model's window in tokens; `None` is what turnpass holds the model to
    /// ([`ceiling_tokens`](turnpass::models::ceiling_tokens)).
    pub window_tokens: Option<u64>,
}

impl Default for Compaction {
    fn default() -> Self {
        Self {
            enabled: true,
            threshold: None,
            keep_tokens: KEEP_TOKENS,
            per_run: COMPACTIONS,
            window_tokens: None,
        }
    }
}

/// A size of the conversation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// Tokens of the last response's prompt, cached parts included.
    Tokens(u64),
    /// This share of the window, above 0 and at most 1.
    Fraction(f64),
}

/// Why a conversation was compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The last response's prompt had reached the threshold.
    Threshold,
    /// It did not fit.
    Overflow,
}

impl Compaction {
    /// When a conversation is due on a transport; `None` when only an overflow makes it so.
    pub(crate) fn policy(&self, transport: TransportKind) -> Option<CompactionPolicy> {
        let own = match transport {
            TransportKind::Pool => Some(POOL_FRACTION),
            TransportKind::Relay => Some(RELAY_FRACTION),
            TransportKind::Replay => None,
        };
        let (threshold_tokens, fraction) = match self.threshold {
            Some(Threshold::Tokens(tokens)) => (Some(tokens), own.unwrap_or(POOL_FRACTION)),
            Some(Threshold::Fraction(fraction)) => (None, fraction),
            None => (None, own?),
        };
        Some(CompactionPolicy {
            threshold_tokens,
            fraction,
            per_run: Some(self.per_run),
        })
    }

    /// What is no setting, in words.
    pub(crate) fn wrong(&self) -> Option<&'static str> {
        match self.threshold {
            Some(Threshold::Tokens(0)) => Some("compaction: a threshold of no tokens is none"),
            Some(Threshold::Fraction(share)) if !(share > 0.0 && share <= 1.0) => {
                Some("compaction: a threshold is a share above 0 and at most 1")
            }
            _ => None,
        }
    }

    /// How much of a conversation stays.
    pub(crate) fn keeps(&self, threshold: Option<u64>, conversation: u64) -> u64 {
        let half = threshold.map_or(u64::MAX, |threshold| threshold / 2);
        self.keep_tokens.min(half).min(conversation / 2)
    }
}

/// The estimated tokens of messages.
pub(crate) fn size(messages: &[Message]) -> u64 {
    estimate_tokens("", 0, messages)
}

/// Where the conversation is cut: the index of the first message that stays. The latest part that stays has at most
/// `keep_tokens`, but is at least the last message, or the last calls with their results. `None` when there is nothing
/// before that part but a summary.
pub(crate) fn cut(messages: &[Message], keep_tokens: u64) -> Option<usize> {
    let parted = parted(messages);
    let mut tail = 0;
    let mut places = Vec::new();
    for at in (1..messages.len()).rev() {
        tail += size(&messages[at..=at]);
        if !parted[at] {
            places.push((at, tail));
        }
    }
    let last = places.first().map(|place| place.0);
    let fits = |(at, tail): &(usize, u64)| *tail <= keep_tokens || Some(*at) == last;
    let mut places = places.iter().rev().filter(|place| fits(place));
    let place = places.find(|(at, _)| messages[..*at].iter().any(|m| !is_summary(m)));
    place.map(|(at, _)| *at)
}

/// For each index, whether a cut before it would part a call from its result.
fn parted(messages: &[Message]) -> Vec<bool> {
    let mut parted = vec![false; messages.len()];
    let mut called: HashMap<&ToolUseId, usize> = HashMap::new();
    for (at, message) in messages.iter().enumerate() {
        for block in &message.content {
            match block {
                Block::ToolUse(call) => {
                    called.insert(&call.id, at);
                }
                Block::ToolResult(result) => {
                    if let Some(call) = called.get(&result.id) {
                        parted[call + 1..=at].fill(true);
                    }
                }
                _ => {}
            }
        }
    }
    parted
}

/// Whether taking `dropped` away from a conversation that is merely due is worth a request.
pub(crate) fn is_worth_it(dropped: &[Message], all: &[Message]) -> bool {
    size(dropped).saturating_mul(WORTH_A_PART_OF) >= size(all)
}

/// The messages of the request for a summary of the older part.
pub(crate) fn question(older: &[Message]) -> Vec<Message> {
    let mut messages = older.to_vec();
    messages.push(Message::user(ASKS));
    messages
}

/// The conversation with a summary in the place of what is before `at`.
pub(crate) fn compacted(messages: &[Message], at: usize, summary: &str) -> Vec<Message> {
    let (older, kept) = messages.split_at(at);
    let text = format!(
        "{SUMMARY_MARK}. The messages that it tells of are no longer here; go on from it.\n\n{}",
        summary.trim()
    );
    let mut first = Message::user(text);
    let has_request = kept.iter().any(|message| request_of(message).is_some());
    let request = older.iter().rev().find_map(request_of);
    if let (false, Some(request)) = (has_request, request) {
        let request = Message {
            role: Role::User,
            content: request.to_vec(),
        };
        let most = REQUEST_TOKENS.min(size(messages) / 4);
        if size(std::slice::from_ref(&request)) <= most {
            first.content.push(Block::text(REQUEST_MARK));
            first.content.extend(request.content);
        }
    }
    let instructions = older.iter().filter(|message| message.role == Role::System);
    let shorter = std::iter::once(first).chain(instructions.cloned());
    shorter.chain(kept.iter().cloned()).collect()
}

/// Whether a message is a summary that was put there before.
fn is_summary(message: &Message) -> bool {
    let text = message.content.first().and_then(Block::as_text);
    message.role == Role::User && text.is_some_and(|text| text.starts_with(SUMMARY_MARK))
}

/// What the person asks for in a message, if it is theirs: not results, not a note of the agent's own. Of a summary it is
/// what is repeated behind it.
fn request_of(message: &Message) -> Option<&[Block]> {
    let is_result = |block: &Block| matches!(block, Block::ToolResult(_));
    if message.role != Role::User || message.content.iter().any(is_result) {
        return None;
    }
    if is_summary(message) {
        let is_mark = |block: &Block| block.as_text() == Some(REQUEST_MARK);
        let mark = message.content.iter().position(is_mark)?;
        return Some(&message.content[mark + 1..]);
    }
    let first = message.content.first()?;
    let is_note = first
        .as_text()
        .is_some_and(|text| text.starts_with(AGENT_MARK));
    (!is_note).then_some(&message.content)
}

#[cfg(test)]
#[path = "compaction_tests.rs"]
mod tests;
