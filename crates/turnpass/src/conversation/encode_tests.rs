use super::*;
use crate::conversation::{
    Message, NormaliseOptions, RedactedThinking, SignedThinking, ToolInput, ToolUseId, normalise,
};
use serde_json::{Value, json};

fn call(id: &str, name: &str, input: &str) -> Block {
    Block::ToolUse(ToolCall {
        id: ToolUseId(id.into()),
        name: name.into(),
        input: ToolInput::from_streamed(input).unwrap(),
    })
}

fn assistant(content: Vec<Block>) -> Message {
    Message {
        role: Role::Assistant,
        content,
    }
}

fn encoded(history: &[Message], marks: Marks) -> String {
    let normalised = normalise(history, &NormaliseOptions::default()).unwrap();
    String::from_utf8(encode(&normalised, marks).unwrap().bytes).unwrap()
}

fn value(history: &[Message], marks: Marks) -> Value {
    serde_json::from_str(&encoded(history, marks)).unwrap()
}

fn every_block() -> Vec<Message> {
    let png = Source::Base64 {
        media_type: "image/png".into(),
        data: "AAAA".into(),
    };
    vec![
        Message {
            role: Role::User,
            content: vec![
                Block::text("a \"b\"\\\n\u{1}\0é👩‍👩‍👧"),
                Block::Image(Image {
                    source: png.clone(),
                }),
                Block::Document(Document {
                    source: Source::Text {
                        media_type: "text/plain".into(),
                        data: "d".into(),
                    },
                    title: Some("t".into()),
                }),
            ],
        },
        assistant(vec![
            Block::Thinking(SignedThinking {
                thinking: " th\r\n".into(),
                signature: "sig".into(),
            }),
            Block::RedactedThinking(RedactedThinking { data: "red".into() }),
            call("toolu_1", "fs.read", "{\"p\":\n\r \"a\\nb\"}"),
            call("toolu_2", "gone", ""),
        ]),
        Message::results([
            ToolResult {
                id: ToolUseId("toolu_1".into()),
                content: vec![
                    ResultBlock::Text { text: "r".into() },
                    ResultBlock::Image(Image { source: png }),
                    ResultBlock::Document(Document {
                        source: Source::Url {
                            url: "https://e.x/d.pdf".into(),
                        },
                        title: None,
                    }),
                ],
                is_error: false,
            },
            ToolResult::error(ToolUseId("toolu_2".into()), "no"),
        ]),
    ]
}

#[test]
fn every_block_has_the_shape_of_the_messages_api() {
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}});
    assert_eq!(
        value(&every_block(), Marks::NONE),
        json!([
            {"role": "user", "content": [
                {"type": "text", "text": "a \"b\"\\\n\u{1}\0é👩‍👩‍👧"},
                image,
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "t"},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": " th\r\n", "signature": "sig"},
                {"type": "redacted_thinking", "data": "red"},
                {"type": "tool_use", "id": "toolu_1", "name": "mcp__turnpass__fs_read_4074bc02", "input": {"p": "a\nb"}},
                {"type": "tool_use", "id": "toolu_2", "name": "mcp__turnpass__gone", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [
                    {"type": "text", "text": "r"},
                    image,
                    {"type": "document", "source": {"type": "url", "url": "https://e.x/d.pdf"}},
                ]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "no"}], "is_error": true},
            ]},
        ])
    );
}

#[test]
fn the_bytes_are_one_line_even_where_the_model_wrote_several() {
    let bytes = encoded(&every_block(), Marks::NONE);
    assert!(!bytes.contains(['\n', '\r']));
    assert!(bytes.contains(r#""input":{"p":   "a\nb"}"#));
}

#[test]
fn bug_119_a_call_without_arguments_is_sent_with_an_empty_object() {
    assert!(encoded(&every_block(), Marks::NONE).contains(r#"gone","input":{}"#));
}

#[test]
fn numbers_of_an_input_keep_their_digits() {
    let input = r#"{"n":12345678901234567890123,"e":1.50e+3}"#;
    let history = [
        Message::user("a"),
        assistant(vec![call("c", "t", input)]),
        Message::results([ToolResult::text(ToolUseId("c".into()), "r")]),
    ];
    assert!(encoded(&history, Marks::NONE).contains(input));
}

/// `(message, block)` of each mark.
fn marked(value: &Value) -> Vec<(usize, usize, Value)> {
    let mut found = Vec::new();
    for (m, message) in value.as_array().unwrap().iter().enumerate() {
        for (b, block) in message["content"].as_array().unwrap().iter().enumerate() {
            if let Some(mark) = block.get("cache_control") {
                found.push((m, b, mark.clone()));
            }
        }
    }
    found
}

#[test]
fn bug_096_marks_stand_at_the_end_and_where_the_end_was_before() {
    let hour = json!({"type": "ephemeral", "ttl": "1h"});
    let short = json!({"type": "ephemeral"});
    for (marks, wanted) in [
        (Marks::NONE, vec![]),
        (
            Marks {
                ttl: Ttl::None,
                most: 2,
            },
            vec![],
        ),
        (
            Marks {
                ttl: Ttl::OneHour,
                most: 0,
            },
            vec![],
        ),
        (
            Marks {
                ttl: Ttl::OneHour,
                most: 1,
            },
            vec![(2, 1, hour.clone())],
        ),
        (
            Marks::two(Ttl::OneHour),
            vec![(0, 2, hour.clone()), (2, 1, hour)],
        ),
        (
            Marks {
                ttl: Ttl::FiveMinutes,
                most: 4,
            },
            vec![(0, 2, short.clone()), (2, 1, short)],
        ),
    ] {
        let history = every_block();
        let normalised = normalise(&history, &NormaliseOptions::default()).unwrap();
        let out = encode(&normalised, marks).unwrap();
        let value: Value = serde_json::from_slice(&out.bytes).unwrap();
        assert_eq!(marked(&value), wanted, "{marks:?}");
        assert_eq!(out.marks, wanted.len());
    }
}

#[test]
fn bug_096_the_second_mark_is_where_the_first_was_however_long_the_tool_loop_is() {
    let mut history = vec![Message::user("go")];
    let mut last = Vec::new();
    for turn in 0..6 {
        let ids: Vec<String> = (0..15).map(|n| format!("c{turn}_{n}")).collect();
        history.push(assistant(ids.iter().map(|id| call(id, "t", "")).collect()));
        history.push(Message::results(
            ids.iter()
                .map(|id| ToolResult::text(ToolUseId(id.clone()), "r")),
        ));
        let here = marked(&value(&history, Marks::two(Ttl::OneHour)));
        assert_eq!(here.len(), 2);
        if let Some((message, block, _)) = last.last() {
            assert_eq!((here[0].0, here[0].1), (*message, *block));
        }
        last = here;
    }
}

#[test]
fn bug_058_earlier_messages_are_the_same_bytes_but_for_the_mark() {
    let mut history = every_block();
    let before = encoded(&history, Marks::NONE);
    history.extend([Message::assistant("x"), Message::user("y")]);
    let after = encoded(&history, Marks::NONE);
    assert!(after.starts_with(&before[..before.len() - 1]));
    let marked = encoded(&history, Marks::two(Ttl::OneHour));
    let unmarked = marked.replace(r#","cache_control":{"type":"ephemeral","ttl":"1h"}"#, "");
    assert_eq!(unmarked, after);
}

#[test]
fn the_limit_is_exact_and_typed() {
    let history = every_block();
    let normalised = normalise(&history, &NormaliseOptions::default()).unwrap();
    let size = encode(&normalised, Marks::NONE).unwrap().bytes.len();
    assert!(least_size(&normalised.messages) <= size);
    assert!(encode_within(&normalised, Marks::NONE, size).is_ok());
    for limit in [size - 1, size / 2, 1] {
        let error = encode_within(&normalised, Marks::NONE, limit).unwrap_err();
        assert_eq!(error.code(), ErrorCode::HistoryTooLarge);
        assert!(error.is_context_overflow());
        assert!(error.detail().contains(&limit.to_string()), "{error}");
    }
    let history = [Message::user("x".repeat(RESTORED_REQUEST_BYTES))];
    let normalised = normalise(&history, &NormaliseOptions::default()).unwrap();
    let error = encode(&normalised, Marks::NONE).unwrap_err();
    assert_eq!(error.code(), ErrorCode::HistoryTooLarge);
}

proptest::proptest! {
    #[test]
    fn bug_004_any_text_comes_back(text in "(?s).{0,200}") {
        let mut out = Vec::new();
        string(&mut out, &text);
        let back: String = serde_json::from_slice(&out).unwrap();
        proptest::prop_assert_eq!(back, text);
    }
}
