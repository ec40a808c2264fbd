//! Lines of an exact length, for the limits of line readers.

use serde::{Deserialize, Serialize};
use serde_json::json;

/// Where readers that work in chunks lose white space: 64 KiB.
pub const MARK_BYTES: usize = 64 * 1024;

/// For the step `send_big`: one line of exactly `bytes` bytes before its line feed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BigLine {
    /// The length of the line.
    pub bytes: usize,
    /// What record it is.
    #[serde(default)]
    pub kind: BigKind,
    /// What it is filled with.
    #[serde(default)]
    pub fill: BigFill,
}

/// What record a [`BigLine`] is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BigKind {
    /// An `assistant` record with one tool call, whose input has the fill as `content`.
    #[default]
    ToolInput,
    /// An `assistant` record with one text block.
    Text,
    /// A `text_delta` in a `stream_event`.
    Delta,
    /// A `user` record with a tool result.
    ToolResult,
    /// No JSON at all.
    Noise,
}

/// What a [`BigLine`] is filled with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BigFill {
    /// The letter x.
    #[default]
    Letters,
    /// Blanks only.
    Spaces,
    /// Letters, with tab, blanks and carriage return around each 64 KiB mark of the line.
    WhiteSpaceAtMarks,
}

/// Raw bytes around a mark: half of them before it, half after.
const MARK_RUN: &str = "\\t    \\r";

impl BigLine {
    /// The line, without its line feed. When `bytes` is less than the record alone needs, the record
    /// with an empty fill.
    pub fn line(&self) -> String {
        let (head, tail) = self.kind.frame();
        let room = self.bytes.saturating_sub(head.len() + tail.len());
        let mut line = head;
        let start = line.len();
        match self.fill {
            BigFill::Letters => line.extend(std::iter::repeat_n('x', room)),
            BigFill::Spaces => line.extend(std::iter::repeat_n(' ', room)),
            BigFill::WhiteSpaceAtMarks => {
                let end = start + room;
                while line.len() < end {
                    let mark = (line.len() / MARK_BYTES + 1) * MARK_BYTES - MARK_RUN.len() / 2;
                    let letters = mark.saturating_sub(line.len()).min(end - line.len());
                    line.extend(std::iter::repeat_n('x', letters));
                    if end - line.len() >= MARK_RUN.len() {
                        line.push_str(MARK_RUN);
                    } else {
                        let rest = end - line.len();
                        line.extend(std::iter::repeat_n('x', rest));
                    }
                }
            }
        }
        line.push_str(&tail);
        line
    }

    /// The text that a right reader finds in it.
    pub fn text(&self) -> String {
        let (head, tail) = self.kind.frame();
        let line = self.line();
        let raw = &line[head.len()..line.len() - tail.len()];
        raw.replace("\\t", "\t").replace("\\r", "\r")
    }
}

impl BigKind {
    /// What stands before and after the fill.
    fn frame(self) -> (String, String) {
        const HOLE: &str = "@HOLE@";
        let assistant = |block: serde_json::Value| {
            json!({
                "type": "assistant",
                "message": {
                    "id": "msg_big", "type": "message", "role": "assistant",
                    "model": "claude-sonnet-5-5", "content": [block],
                    "stop_reason": null, "stop_sequence": null,
                    "usage": {"input_tokens": 1, "output_tokens": 1},
                },
                "parent_tool_use_id": null, "session_id": "", "uuid": "00000000-0000-4000-8000-000000000b16",
            })
        };
        let record = match self {
            BigKind::ToolInput => assistant(json!({
                "type": "tool_use", "id": "toolu_big", "name": "mcp__turnpass__big",
                "input": {"content": HOLE},
            })),
            BigKind::Text => assistant(json!({"type": "text", "text": HOLE})),
            BigKind::Delta => json!({
                "type": "stream_event",
                "event": {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": HOLE}},
                "session_id": "", "parent_tool_use_id": null,
            }),
            BigKind::ToolResult => json!({
                "type": "user",
                "message": {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_big", "content": HOLE},
                ]},
                "parent_tool_use_id": null, "session_id": "",
            }),
            BigKind::Noise => json!(HOLE),
        };
        let text = record.to_string();
        let text = if self == BigKind::Noise {
            HOLE.to_owned()
        } else {
            text
        };
        let (head, tail) = text.split_once(HOLE).unwrap_or((&text, ""));
        (head.to_owned(), tail.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn the_line_has_exactly_the_length_and_the_text_that_it_says() {
        for kind in [
            BigKind::ToolInput,
            BigKind::Text,
            BigKind::Delta,
            BigKind::ToolResult,
        ] {
            for fill in [
                BigFill::Letters,
                BigFill::Spaces,
                BigFill::WhiteSpaceAtMarks,
            ] {
                let big = BigLine {
                    bytes: 300 * 1024,
                    kind,
                    fill,
                };
                let line = big.line();
                assert_eq!(line.len(), 300 * 1024, "{kind:?} {fill:?}");
                let value: Value = serde_json::from_str(&line).unwrap();
                let pointer = match kind {
                    BigKind::ToolInput => "/message/content/0/input/content",
                    BigKind::Text => "/message/content/0/text",
                    BigKind::Delta => "/event/delta/text",
                    _ => "/message/content/0/content",
                };
                assert_eq!(
                    value.pointer(pointer).unwrap().as_str().unwrap(),
                    big.text()
                );
            }
        }
    }

    #[test]
    fn bug_008_white_space_stands_on_both_sides_of_every_mark() {
        let big = BigLine {
            bytes: 300 * 1024,
            kind: BigKind::Text,
            fill: BigFill::WhiteSpaceAtMarks,
        };
        let line = big.line().into_bytes();
        for mark in (MARK_BYTES..line.len()).step_by(MARK_BYTES) {
            assert_eq!(&line[mark - 4..mark + 4], b"\\t    \\r", "at {mark}");
        }
        assert_eq!(big.text().matches('\t').count(), 4);
    }
}
