//! Results of tools as the service takes them.

use std::borrow::Cow;

use super::Rule;
use crate::conversation::{Block, ResultBlock, ToolResult, ToolUseId};

/// A result as the service takes it, and what has to stand behind the results.
pub(super) fn sendable<'a>(
    block: &'a Block,
    result: &'a ToolResult,
    sent: &str,
    mut note: impl FnMut(Rule),
) -> (Cow<'a, Block>, Vec<Cow<'a, Block>>) {
    let plain = |part: &ResultBlock| match part {
        ResultBlock::Text { text } => !super::is_blank(text),
        _ => !result.is_error && super::media::fits(part),
    };
    let fits = result.content.iter().all(plain) && !(result.is_error && result.content.is_empty());
    if fits && *sent == *result.id.0 {
        return (Cow::Borrowed(block), Vec::new());
    }
    let mut content = Vec::with_capacity(result.content.len());
    let mut behind = Vec::new();
    for part in &result.content {
        match part {
            ResultBlock::Text { text } if super::is_blank(text) => note(Rule::BlankText),
            ResultBlock::Text { .. } => content.push(part.clone()),
            // "all content must be type `text` if `is_error` is true"
            media if result.is_error => {
                let (block, rule) = super::media::of_result(media);
                note(Rule::ErrorMedia);
                rule.map(&mut note);
                behind.push(block);
            }
            media => {
                let (part, rule) = super::media::result_part(media);
                rule.map(&mut note);
                content.push(part);
            }
        }
    }
    if result.is_error && content.is_empty() {
        // "content cannot be empty if `is_error` is true"
        note(Rule::EmptyError);
        content.push(ResultBlock::Text {
            text: super::rules::EMPTY_ERROR.to_owned(),
        });
    }
    let result = ToolResult {
        id: ToolUseId(sent.to_owned()),
        content,
        is_error: result.is_error,
    };
    (Cow::Owned(Block::ToolResult(result)), behind)
}
