//! A tool result of the host as the result of an MCP call.
//!
//! | host | MCP | what the CLI makes of it (2.1.332) |
//! | --- | --- | --- |
//! | text | `text` | as it is |
//! | inline image | `image` | the image, and a text with the path of a copy |
//! | document with text | `text`, after its title | as it is |
//! | anything by address, PDF | `text` that says what could not be carried | as it is |
//! | no content | no content | a text that says so |
//! | failed | `isError` | texts joined, images lost, above 10,041 characters the middle lost |
//!
//! A failed result keeps its flag and its images on the wire, although the CLI drops the latter: a host that has to show
//! an image of a failure sends it as a result that did not fail.
//!
//! Text is cut at [`RESULT_CHARS`] characters in all, with a note: above that the CLI would put a file note in its place.

use serde::Serialize;

use super::catalogue::RESULT_CHARS;
use crate::conversation::{Document, Image, ResultBlock, Source, ToolResult};

/// Characters left for the note about a cut, within [`RESULT_CHARS`].
const NOTE_CHARS: usize = 200;

#[derive(Serialize)]
struct CallResult<'a> {
    content: Vec<Content<'a>>,
    #[serde(rename = "isError", skip_serializing_if = "std::ops::Not::not")]
    is_error: bool,
    #[serde(rename = "_meta", skip_serializing_if = "Option::is_none")]
    meta: Option<Meta>,
}

#[derive(Serialize)]
struct Meta {
    #[serde(rename = "claude/endTurn")]
    end_turn: bool,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Content<'a> {
    Text {
        text: std::borrow::Cow<'a, str>,
    },
    Image {
        data: &'a str,
        #[serde(rename = "mimeType")]
        mime_type: &'a str,
    },
}

/// JSON of the result of a call.
pub(super) fn of(result: &ToolResult) -> String {
    let mut content: Vec<_> = result.content.iter().map(content_of).collect();
    cut(&mut content, RESULT_CHARS);
    json(&CallResult {
        content,
        is_error: result.is_error,
        meta: None,
    })
}

/// JSON of a failed result of one text.
/// The same for a result after which the CLI ends its turn without another request. It does so for one that is no error
/// (2.1.294, 2.1.310, 2.1.332).
pub(super) fn of_last(result: &ToolResult) -> String {
    let mut content: Vec<_> = result.content.iter().map(content_of).collect();
    cut(&mut content, RESULT_CHARS);
    json(&CallResult {
        content,
        is_error: false,
        meta: Some(Meta { end_turn: true }),
    })
}

pub(super) fn failed_text(text: &str) -> String {
    json(&CallResult {
        content: vec![Content::Text { text: text.into() }],
        is_error: true,
        meta: None,
    })
}

fn json(result: &CallResult<'_>) -> String {
    // Texts and a truth value always serialise.
    serde_json::to_string(result).unwrap_or_default()
}

fn content_of(block: &ResultBlock) -> Content<'_> {
    match block {
        ResultBlock::Text { text } => Content::Text { text: text.into() },
        ResultBlock::Image(Image {
            source: Source::Base64 { media_type, data },
        }) => Content::Image {
            data,
            mime_type: media_type,
        },
        ResultBlock::Image(Image { source }) => left_out("an image", source),
        ResultBlock::Document(Document {
            source: Source::Text { data, .. },
            title,
        }) => Content::Text {
            text: match title {
                Some(title) => format!("{title}\n\n{data}").into(),
                None => data.into(),
            },
        },
        ResultBlock::Document(Document { source, title }) => {
            let what = title.as_deref().map_or_else(
                || "a document".to_owned(),
                |title| format!("the document {title:?}"),
            );
            left_out(&what, source)
        }
    }
}

fn left_out(what: &str, source: &Source) -> Content<'static> {
    let of = match source {
        Source::Url { url } => format!("at {url}"),
        Source::Base64 { media_type, .. } | Source::Text { media_type, .. } => {
            format!("of type {media_type}")
        }
    };
    Content::Text {
        text: format!("[turnpass: {what} {of} cannot be carried in a tool result here]").into(),
    }
}

/// Keeps at most `limit` characters of text, on character boundaries; images do not count.
fn cut(content: &mut Vec<Content<'_>>, limit: usize) {
    let chars = |content: &Content<'_>| match content {
        // Bytes bound characters from above, so counting is needed for long texts only.
        Content::Text { text } => text.chars().count(),
        Content::Image { .. } => 0,
    };
    let bytes: usize = content
        .iter()
        .map(|content| match content {
            Content::Text { text } => text.len(),
            Content::Image { .. } => 0,
        })
        .sum();
    if bytes <= limit {
        return;
    }
    let total: usize = content.iter().map(chars).sum();
    if total <= limit {
        return;
    }
    let mut left = limit - NOTE_CHARS;
    content.retain_mut(|content| {
        let Content::Text { text } = content else {
            return true;
        };
        let here = text.chars().count();
        if here <= left {
            left -= here;
            return true;
        }
        let end = text
            .char_indices()
            .nth(left)
            .map_or(text.len(), |(at, _)| at);
        *text = text[..end].to_owned().into();
        left = 0;
        !text.is_empty()
    });
    let note = format!(
        "\n[turnpass: the result has {total} characters; the rest was cut after {}]",
        limit - NOTE_CHARS
    );
    content.push(Content::Text { text: note.into() });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::ToolUseId;
    use serde_json::{Value, json};

    fn value(result: &ToolResult) -> Value {
        serde_json::from_str(&of(result)).unwrap()
    }

    fn id() -> ToolUseId {
        ToolUseId("t".into())
    }

    #[test]
    fn each_block_has_its_form() {
        let inline = Source::Base64 {
            media_type: "image/png".into(),
            data: "AAAA".into(),
        };
        let url = Source::Url {
            url: "https://e.x/i".into(),
        };
        let result = ToolResult {
            id: id(),
            is_error: false,
            content: vec![
                ResultBlock::Text { text: "a\0".into() },
                ResultBlock::Image(Image { source: inline }),
                ResultBlock::Image(Image { source: url }),
                ResultBlock::Document(Document {
                    source: Source::Text {
                        media_type: "text/plain".into(),
                        data: "body".into(),
                    },
                    title: Some("T".into()),
                }),
            ],
        };
        assert_eq!(
            value(&result),
            json!({"content": [
                {"type": "text", "text": "a\0"},
                {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                {"type": "text", "text": "[turnpass: an image at https://e.x/i cannot be carried in a tool result here]"},
                {"type": "text", "text": "T\n\nbody"},
            ]})
        );
        assert_eq!(
            value(&ToolResult::error(id(), "no")),
            json!({"content": [{"type": "text", "text": "no"}], "isError": true})
        );
    }

    #[test]
    fn bug_072_whole_up_to_the_limit_and_cut_with_a_note_beyond() {
        for (size, whole) in [
            (30_000, true),
            (120_000, true),
            (RESULT_CHARS, true),
            (600_000, false),
            (3_000_000, false),
        ] {
            let text = "é".repeat(size);
            let out = value(&ToolResult::text(id(), text.clone()));
            let texts: String = out["content"]
                .as_array()
                .unwrap()
                .iter()
                .map(|content| content["text"].as_str().unwrap())
                .collect();
            assert_eq!(texts == text, whole, "{size}");
            assert!(texts.chars().count() <= RESULT_CHARS, "{size}");
            assert_eq!(texts.contains(&format!("{size} characters")), !whole);
        }
    }

    #[test]
    fn bug_004_the_cut_falls_between_characters_of_several_texts() {
        let text = "👩‍👩‍👧".repeat(100_000);
        let result = ToolResult {
            id: id(),
            is_error: false,
            content: vec![
                ResultBlock::Text { text: text.clone() },
                ResultBlock::Text { text },
            ],
        };
        let out = value(&result);
        assert_eq!(out["content"].as_array().unwrap().len(), 2);
        assert!(
            out["content"][1]["text"]
                .as_str()
                .unwrap()
                .contains("was cut")
        );
    }
}
