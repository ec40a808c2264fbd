//! What hosts do in the simulation: what they say, and how they change what was said.

use std::borrow::Borrow;

use proptest::prelude::*;

use super::record_tests::image;
use crate::conversation::{Block, Message, ResultBlock, Role, ToolResult};

const GONE: &str = "[image removed]";

#[derive(Clone, Debug)]
pub(super) enum Op {
    /// The host says something; with an image or not.
    Say(u8, Option<u8>, Answer),
    /// The host answers the open calls: all, or some; with text beside them or not.
    Results(bool, bool, Answer),
    /// The same request again.
    Again(Answer),
    /// The host says something and cancels; it keeps what it said or not. The process survives that or not.
    Cancel(u8, bool, bool),
    Edit(prop::sample::Index, u8),
    Delete(prop::sample::Index),
    Truncate(prop::sample::Index),
    /// Image data is stripped, with or without a placeholder.
    Strip(bool),
    Crash,
    /// The host's program starts anew, with the state of so many answers ago.
    Restart(usize),
    /// The state is lost or damaged.
    Spoil(bool),
    /// A summary in place, after which the process was not retired.
    Taint,
    Ready,
    LockLost,
    Model(u8),
    Tools(u8),
    Prompt(u8),
    Effort,
    /// The other conversation begins as a copy of this one.
    Branch,
}

/// What the model says.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    Text,
    /// So many calls, and one that the CLI answers itself.
    Calls(usize, bool),
}

/// What has to agree, in words, and the images.
pub(super) fn essence<B: Borrow<Block>>(role: Role, content: &[B]) -> (Vec<String>, Vec<String>) {
    let (mut words, mut images) = (vec![format!("{role:?}")], Vec::new());
    let mut text = String::new();
    for block in content {
        match block.borrow() {
            Block::Text { text: t } if role == Role::Assistant => text += t,
            Block::Text { text: t } if t == GONE => {}
            Block::Text { text: t } => words.push(t.clone()),
            Block::Image(image) => images.push(format!("{image:?}")),
            Block::ToolUse(call) => words.push(format!("call {}", call.id.0)),
            Block::ToolResult(result) if result.id.0.starts_with("bad") => {
                words.push(format!("result {}", result.id.0));
            }
            Block::ToolResult(result) => {
                words.push(format!("result {} {}", result.id.0, result.is_error));
                for part in &result.content {
                    match part {
                        ResultBlock::Text { text } if text == GONE => {}
                        ResultBlock::Text { text } => words.push(text.clone()),
                        ResultBlock::Image(image) => images.push(format!("{image:?}")),
                        ResultBlock::Document(document) => words.push(format!("{document:?}")),
                    }
                }
            }
            other => words.push(format!("{other:?}")),
        }
    }
    words.push(text.trim().to_owned());
    (words, images)
}

/// The results of calls that the CLI answered itself stand in its own words.
pub(super) fn own_words(message: &mut Message) {
    for block in &mut message.content {
        if let Block::ToolResult(result) = block
            && result.id.0.starts_with("bad")
        {
            *result = ToolResult::error(result.id.clone(), "InputValidationError");
        }
    }
}

pub(super) fn rewrite(history: &mut Vec<Message>, op: &Op) {
    if history.is_empty() {
        return;
    }
    match op {
        Op::Edit(at, text) => {
            let len = history.len();
            let message = &mut history[at.index(len)];
            match message.content.first_mut() {
                Some(Block::Text { text: t }) => *t = format!("text {text}"),
                Some(Block::ToolResult(result)) => {
                    *result = ToolResult::text(result.id.clone(), format!("result {text}"));
                }
                _ => {}
            }
        }
        Op::Delete(at) => {
            let at = at.index(history.len());
            history.remove(at);
        }
        Op::Truncate(at) => history.truncate(at.index(history.len()) + 1),
        Op::Strip(placeholder) => history
            .iter_mut()
            .for_each(|message| strip(message, *placeholder)),
        _ => {}
    }
}

fn strip(message: &mut Message, placeholder: bool) {
    message.content.retain_mut(|block| match block {
        Block::Image(_) if placeholder => {
            *block = Block::text(GONE);
            true
        }
        Block::Image(_) => false,
        Block::ToolResult(result) => {
            result.content.retain_mut(|part| match part {
                ResultBlock::Image(_) if placeholder => {
                    *part = ResultBlock::Text { text: GONE.into() };
                    true
                }
                ResultBlock::Image(_) => false,
                _ => true,
            });
            true
        }
        _ => true,
    });
}

pub(super) fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        1 => Just(Answer::Text),
        1 => (1..3usize, any::<bool>()).prop_map(|(calls, bad)| Answer::Calls(calls, bad)),
    ]
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        8 => (0..3u8, prop::option::weighted(0.3, 0..4u8), answer()).prop_map(|(t, p, a)| Op::Say(t, p, a)),
        10 => (prop::bool::weighted(0.8), prop::bool::weighted(0.2), answer()).prop_map(|(a, b, c)| Op::Results(a, b, c)),
        1 => answer().prop_map(Op::Again),
        2 => (0..3u8, any::<bool>(), any::<bool>()).prop_map(|(t, k, s)| Op::Cancel(t, k, s)),
        1 => (index(), 0..3u8).prop_map(|(at, text)| Op::Edit(at, text)),
        1 => index().prop_map(Op::Delete),
        1 => index().prop_map(Op::Truncate),
        2 => any::<bool>().prop_map(Op::Strip),
        3 => Just(Op::Crash),
        2 => (0..3usize).prop_map(Op::Restart),
        1 => any::<bool>().prop_map(Op::Spoil),
        1 => Just(Op::Taint),
        1 => Just(Op::Ready),
        1 => Just(Op::LockLost),
        1 => (0..2u8).prop_map(Op::Model),
        1 => (0..2u8).prop_map(Op::Tools),
        1 => (0..2u8).prop_map(Op::Prompt),
        1 => Just(Op::Effort),
        1 => Just(Op::Branch),
    ]
}

/// The host says something, with an image before or behind it or none.
pub(super) fn say(history: &mut Vec<Message>, text: u8, picture: Option<u8>) {
    let mut message = Message::user(format!("text {text}"));
    if let Some(picture) = picture {
        let place = usize::from(picture % 2);
        let picture = image(&format!("AA{picture:02}"));
        message.content.insert(place, Block::Image(picture));
    }
    history.push(message);
}

/// The host answers the open calls.
pub(super) fn answer_calls(history: &mut Vec<Message>, all: bool, beside: bool) {
    let Some(last) = history.last().filter(|last| last.role == Role::Assistant) else {
        return;
    };
    let skip = usize::from(!all);
    let results = last.tool_calls().skip(skip).map(|call| {
        let mut result = ToolResult::text(call.id.clone(), "result");
        if call.id.0.ends_with("-1") {
            result.content.push(ResultBlock::Image(image("AAAA")));
        }
        result
    });
    let mut message = Message::results(results);
    if beside {
        message.content.push(Block::text("and this"));
    }
    history.push(message);
}
