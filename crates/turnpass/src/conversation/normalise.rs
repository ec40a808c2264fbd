//! Makes any history one that the service takes, by rules, and says what it did.
//!
//! The host's copy is never touched; what is changed is changed on the way out. The rules stand in
//! `docs/protocol/normaliser.md` and by name in [`Rule`]. What holds for every history (each has a property test):
//!
//! - the outcome is valid: user and assistant take turns, the first and the last message are the user's, each call is
//!   answered in the next message, ids are allowed and used once, no text is blank;
//! - normalising the outcome changes nothing;
//! - when a conversation grows by an answer and what the host says to it, the messages of before stay the same bytes,
//!   so the service's prompt cache holds;
//! - thinking is kept byte for byte and in its order within a message, or left out whole.
//!
//! # How
//!
//! The history is read once into turns: what the assistant says, then the results of its calls, then what the user says.
//! Results go to the slot of their call, whichever message they came in; everything else keeps its order.

mod alone;
mod ids;
mod media;
mod results;
mod rules;

use std::borrow::Cow;
use std::collections::HashMap;

pub use ids::ID_BYTES;
pub(crate) use rules::MISSING;
pub use rules::{Change, MARK, Rule};

use self::alone::thinks;
use self::ids::Ids;
use super::names::shown;
use super::{Block, Message, ResultBlock, Role, ToolCall, ToolResult, ToolUseId};
use crate::error::{Error, ErrorCode, Result};

/// Most messages of a request: the service's own limit.
pub const MESSAGES: usize = 100_000;

/// Choices of the transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NormaliseOptions {
    /// Leave thinking out: for a transport that cannot carry it unchanged (replay as a transcript).
    pub leave_out_thinking: bool,
    /// Leave out answers of thinking alone: for a transport whose CLI holds the conversation, since the CLI leaves them out
    /// and puts their neighbours together (2.1.294, 2.1.310, 2.1.332).
    pub leave_out_thinking_alone: bool,
}

impl NormaliseOptions {
    /// Without thinking.
    pub fn without_thinking() -> Self {
        Self {
            leave_out_thinking: true,
            ..Self::default()
        }
    }
}

/// A message that the service takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Sendable<'a> {
    /// User or assistant.
    pub role: Role,
    /// Never empty.
    pub content: Vec<Cow<'a, Block>>,
}

/// A history that the service takes, and what was changed for that.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Normalised<'a> {
    /// User and assistant in turns; the first and the last are the user's.
    pub messages: Vec<Sendable<'a>>,
    /// What was changed, in the order of the history.
    pub changes: Vec<Change>,
    /// Replaced ids: the host's, and the one that is sent.
    pub ids: Vec<(ToolUseId, ToolUseId)>,
}

impl Normalised<'_> {
    /// One sentence a rule, with how often it was applied; for
    /// [`Notice::Normalised`](crate::event::Notice::Normalised).
    pub fn summary(&self) -> Vec<String> {
        Rule::ALL
            .iter()
            .filter_map(
                |rule| match self.changes.iter().filter(|c| c.rule == *rule).count() {
                    0 => None,
                    1 => Some(rule.what().to_owned()),
                    times => Some(format!("{} ({times} times)", rule.what())),
                },
            )
            .collect()
    }

    /// The host's id of a call that is sent as `sent`.
    pub fn host_id<'b>(&'b self, sent: &'b ToolUseId) -> &'b ToolUseId {
        self.ids
            .iter()
            .find_map(|(host, wire)| (wire == sent).then_some(host))
            .unwrap_or(sent)
    }

    /// The messages as values of their own.
    pub fn to_messages(&self) -> Vec<Message> {
        self.messages
            .iter()
            .map(|message| Message {
                role: message.role,
                content: message.content.iter().map(|b| (**b).clone()).collect(),
            })
            .collect()
    }
}

/// Makes a history valid.
///
/// # Errors
///
/// `request_invalid` when there is nothing to send, or when the last message is the assistant's and calls tools: only the
/// host knows the results. `history_too_large` above [`MESSAGES`].
pub fn normalise<'a>(history: &'a [Message], options: &NormaliseOptions) -> Result<Normalised<'a>> {
    if history.len() > MESSAGES {
        return Err(Error::new(
            ErrorCode::HistoryTooLarge,
            format!(
                "the conversation has {} messages, the limit is {MESSAGES}",
                history.len()
            ),
        ));
    }
    let mut turns = Turns::new(*options);
    for (at, message) in history.iter().enumerate() {
        match message.role {
            Role::Assistant => turns.assistant(at, &message.content),
            Role::User => turns.user(at, &message.content, false),
            Role::System => turns.user(at, &message.content, true),
        }
    }
    turns.finish(history.len())
}

/// What the assistant says, the answers to its calls, and what the user says then.
#[derive(Debug, Default)]
struct Turn<'a> {
    /// The message that opened it.
    at: usize,
    assistant: Vec<Cow<'a, Block>>,
    calls: Vec<Slot<'a>>,
    user: Vec<Cow<'a, Block>>,
    /// Whether a message of the user's side was read: the next one is merged into it.
    spoken: bool,
    /// Whether a tool result was read here, of whichever call: an assistant message after it is a turn of its own.
    answered: bool,
}

/// The place of one call's result.
#[derive(Debug)]
struct Slot<'a> {
    name: &'a str,
    host: &'a ToolUseId,
    sent: Cow<'a, str>,
    result: Option<Cow<'a, Block>>,
    /// Images and documents of a failed result.
    media: Vec<Cow<'a, Block>>,
}

#[derive(Debug)]
struct Turns<'a> {
    options: NormaliseOptions,
    /// The first holds what the user says before the assistant does.
    turns: Vec<Turn<'a>>,
    ids: Ids<'a>,
    /// Of each id of the host's, the turn that used it last.
    latest: HashMap<&'a str, usize>,
    changes: Vec<Change>,
}

impl<'a> Turns<'a> {
    fn new(options: NormaliseOptions) -> Self {
        Self {
            options,
            turns: vec![Turn::default()],
            ids: Ids::default(),
            latest: HashMap::new(),
            changes: Vec::new(),
        }
    }

    fn note(&mut self, rule: Rule, message: usize) {
        self.changes.push(Change { rule, message });
    }

    fn current(&mut self) -> &mut Turn<'a> {
        let last = self.turns.len() - 1;
        &mut self.turns[last]
    }

    fn assistant(&mut self, at: usize, content: &'a [Block]) {
        let mut kept = Vec::with_capacity(content.len());
        let mut others = Vec::new();
        for block in content {
            match block {
                Block::Text { text } if is_blank(text) => self.note(Rule::BlankText, at),
                Block::Thinking(_) | Block::RedactedThinking(_)
                    if self.options.leave_out_thinking =>
                {
                    self.note(Rule::ThinkingLeftOut, at);
                }
                Block::Thinking(thinking) if thinking.signature.is_empty() => {
                    self.note(Rule::UnsignedThinking, at);
                }
                Block::RedactedThinking(redacted) if redacted.data.is_empty() => {
                    self.note(Rule::UnsignedThinking, at);
                }
                Block::ToolResult(_) | Block::Image(_) | Block::Document(_) => others.push(block),
                _ => kept.push(block),
            }
        }
        if !kept.is_empty() {
            self.open(at, &kept);
            for block in kept {
                self.say(block, at);
            }
        } else if others.is_empty() {
            self.note(Rule::EmptyMessage, at);
        }
        for block in others {
            if matches!(block, Block::Image(_) | Block::Document(_)) {
                self.note(Rule::MisplacedMedia, at);
            }
            self.user_block(at, block, false);
        }
    }

    /// Begins a turn, or goes on with the current one if its user has said nothing yet.
    fn open(&mut self, at: usize, blocks: &[&Block]) {
        let first = self.turns.len() == 1;
        let turn = self.current();
        let silent = !first && turn.user.is_empty() && !turn.answered;
        // Some models want thinking first in a message that has any ("the first block must be thinking").
        let fits = turn.assistant.first().is_some_and(|block| thinks(block))
            || !blocks.iter().any(|block| thinks(block));
        if silent && fits {
            self.note(Rule::MergedNeighbours, at);
        } else {
            self.turns.push(Turn {
                at,
                ..Turn::default()
            });
        }
    }

    fn say(&mut self, block: &'a Block, at: usize) {
        let Block::ToolUse(call) = block else {
            self.current().assistant.push(Cow::Borrowed(block));
            return;
        };
        let sent = self.ids.next(&call.id.0);
        let block = if *sent == *call.id.0 {
            Cow::Borrowed(block)
        } else {
            self.note(Rule::RenamedId, at);
            Cow::Owned(Block::ToolUse(ToolCall {
                id: ToolUseId(sent.to_string()),
                ..call.clone()
            }))
        };
        self.latest.insert(&call.id.0, self.turns.len() - 1);
        let turn = self.current();
        turn.assistant.push(block);
        turn.calls.push(Slot {
            name: &call.name,
            host: &call.id,
            sent,
            result: None,
            media: Vec::new(),
        });
    }

    fn user(&mut self, at: usize, content: &'a [Block], system: bool) {
        let changes = self.changes.len();
        let before = self.changes_of_content();
        for block in content {
            self.user_block(at, block, system);
        }
        if self.changes_of_content() == before {
            // A result that was left out or moved has its own rule.
            if self.changes[changes..]
                .iter()
                .all(|change| change.rule == Rule::BlankText)
            {
                self.note(Rule::EmptyMessage, at);
            }
            return;
        }
        if std::mem::replace(&mut self.current().spoken, true) {
            self.note(Rule::MergedNeighbours, at);
        }
    }

    /// Grows with everything that the user's side of the current turn gets.
    fn changes_of_content(&mut self) -> usize {
        let turn = self.current();
        let results = turn.calls.iter().filter(|slot| slot.result.is_some());
        results.count() + turn.user.len()
    }

    fn user_block(&mut self, at: usize, block: &'a Block, system: bool) {
        match block {
            Block::Text { text } if is_blank(text) => self.note(Rule::BlankText, at),
            Block::Text { text } if system => {
                self.note(Rule::SystemMessage, at);
                self.tell(format!("{}{text}", rules::SYSTEM));
            }
            Block::Text { .. } => self.current().user.push(Cow::Borrowed(block)),
            Block::Image(_) | Block::Document(_) => {
                let (block, rule) = media::block(block);
                self.changes
                    .extend(rule.map(|rule| Change { rule, message: at }));
                self.current().user.push(block);
            }
            Block::ToolResult(result) => self.result(at, block, result),
            Block::ToolUse(call) => {
                self.note(Rule::MisplacedCall, at);
                let (name, input) = (&call.name, call.input.as_str());
                self.tell(format!("{}{name} {input}", rules::CALL));
            }
            Block::Thinking(_) | Block::RedactedThinking(_) => {
                self.note(Rule::MisplacedThinking, at);
            }
        }
    }

    fn tell(&mut self, text: String) {
        self.current().user.push(Cow::Owned(Block::text(text)));
    }

    /// Puts a result into the slot of its call: of the calls with its id those of the latest turn, of these the first
    /// without one.
    fn result(&mut self, at: usize, block: &'a Block, result: &'a ToolResult) {
        let Some(&turn) = self.latest.get(result.id.0.as_str()) else {
            self.orphan(at, result);
            return;
        };
        let now = self.turns.len() - 1;
        self.turns[now].answered = true;
        let late = turn < now || !self.turns[now].user.is_empty();
        let slots = &mut self.turns[turn].calls;
        let Some(place) = slots
            .iter()
            .position(|slot| *slot.host == result.id && slot.result.is_none())
        else {
            self.note(Rule::RepeatedResult, at);
            return;
        };
        let early = slots[place..].iter().any(|slot| slot.result.is_some());
        let sent = slots[place].sent.clone();
        let (block, media) = results::sendable(block, result, &sent, |rule| {
            self.changes.push(Change { rule, message: at });
        });
        if late || early {
            self.note(Rule::MovedResult, at);
        }
        let slot = &mut self.turns[turn].calls[place];
        slot.result = Some(block);
        slot.media = media;
    }

    fn orphan(&mut self, at: usize, result: &'a ToolResult) {
        self.note(Rule::OrphanResult, at);
        let mut text = rules::ORPHAN.to_owned();
        let mut rest = Vec::new();
        for part in &result.content {
            match part {
                ResultBlock::Text { text: part } if is_blank(part) => {}
                ResultBlock::Text { text: part } => {
                    text.push('\n');
                    text += part;
                }
                other => rest.push(media::of_result(other)),
            }
        }
        self.tell(text);
        for (block, rule) in rest {
            self.changes
                .extend(rule.map(|rule| Change { rule, message: at }));
            self.current().user.push(block);
        }
    }

    fn finish(mut self, end: usize) -> Result<Normalised<'a>> {
        let mut turns = std::mem::take(&mut self.turns);
        if self.options.leave_out_thinking_alone {
            turns = self.without_thinking_alone(turns);
        }
        let last = turns.len() - 1;
        let mut messages = Vec::with_capacity(2 * turns.len());
        let mut ids = Vec::new();
        for (n, mut turn) in turns.into_iter().enumerate() {
            if n == 0 {
                if turn.user.is_empty() && last == 0 {
                    return Err(Error::new(
                        ErrorCode::RequestInvalid,
                        "messages: there is nothing in them to send",
                    ));
                }
                if turn.user.is_empty() {
                    self.note(Rule::LeadingAssistant, 0);
                    turn.user.push(marked(rules::LEADING));
                }
            } else {
                let assistant = std::mem::take(&mut turn.assistant);
                messages.push(Sendable {
                    role: Role::Assistant,
                    content: assistant,
                });
            }
            let unheard = n == last && turn.user.is_empty() && !turn.answered;
            if unheard && !turn.calls.is_empty() {
                return Err(missing(&turn.calls));
            }
            ids.extend(
                turn.calls
                    .iter()
                    .filter(|slot| slot.sent != slot.host.0)
                    .map(|slot| (slot.host.clone(), ToolUseId(slot.sent.to_string()))),
            );
            let content = self.user_side(turn, n == last, end);
            messages.push(Sendable {
                role: Role::User,
                content,
            });
        }
        self.changes.sort_by_key(|change| change.message);
        Ok(Normalised {
            messages,
            changes: self.changes,
            ids,
        })
    }

    /// Results in the order of the calls, then the media of failed ones, then what the user says; never nothing.
    fn user_side(&mut self, turn: Turn<'a>, last: bool, end: usize) -> Vec<Cow<'a, Block>> {
        let mut content = Vec::with_capacity(turn.calls.len() + turn.user.len());
        let mut media = Vec::new();
        for slot in turn.calls {
            content.push(slot.result.unwrap_or_else(|| {
                self.changes.push(Change {
                    rule: Rule::MissingResult,
                    message: turn.at,
                });
                Cow::Owned(Block::ToolResult(ToolResult::error(
                    ToolUseId(slot.sent.into_owned()),
                    rules::MISSING,
                )))
            }));
            media.extend(slot.media);
        }
        content.append(&mut media);
        content.extend(turn.user);
        if content.is_empty() {
            let (rule, at, text) = if last {
                (Rule::TrailingAssistant, end - 1, rules::CONTINUE)
            } else {
                (Rule::SeparatedNeighbours, turn.at, rules::BETWEEN)
            };
            self.note(rule, at);
            content.push(marked(text));
        }
        content
    }
}

fn missing(calls: &[Slot<'_>]) -> Error {
    const SHOWN: usize = 4;
    let mut names: Vec<_> = calls
        .iter()
        .take(SHOWN)
        .map(|slot| format!("{} ({})", shown(slot.name), shown(&slot.host.0)))
        .collect();
    if calls.len() > SHOWN {
        names.push(format!("{} more", calls.len() - SHOWN));
    }
    Error::new(
        ErrorCode::RequestInvalid,
        format!(
            "messages: the last message calls tools and there is no result of {}",
            names.join(", ")
        ),
    )
}

fn marked(text: &str) -> Cow<'static, Block> {
    Cow::Owned(Block::text(text))
}

/// Whether the service takes a text for empty ("text content blocks must contain non-whitespace text"). The separators
/// U+001C to U+001F count as white space in some languages and not in others, so here they do.
fn is_blank(text: &str) -> bool {
    text.chars()
        .all(|c| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

#[cfg(test)]
mod tests;
