use super::*;
use crate::conversation::{
    Block, Image, Message, NormaliseOptions, RedactedThinking, ResultBlock, SignedThinking, Source,
    ToolCall, ToolInput, ToolResult, ToolUseId, normalise,
};
use serde_json::{Value, json};

fn png() -> Image {
    Image {
        source: Source::Base64 {
            media_type: "image/png".into(),
            data: "AAAA".into(),
        },
    }
}

fn history() -> Vec<Message> {
    vec![
        Message {
            role: Role::User,
            content: vec![Block::text("go\u{2028}@x /y"), Block::Image(png())],
        },
        Message {
            role: Role::Assistant,
            content: vec![
                Block::Thinking(SignedThinking {
                    thinking: " t\r\n".into(),
                    signature: "sig==".into(),
                }),
                Block::RedactedThinking(RedactedThinking { data: "red".into() }),
                Block::ToolUse(ToolCall {
                    id: ToolUseId("toolu_1".into()),
                    name: "fs.read".into(),
                    input: ToolInput::from_streamed("{\"p\":\n1e3}").unwrap(),
                }),
            ],
        },
        Message::results([ToolResult {
            id: ToolUseId("toolu_1".into()),
            content: vec![
                ResultBlock::Text { text: "r".into() },
                ResultBlock::Image(png()),
            ],
            is_error: false,
        }]),
    ]
}

fn all(history: &[Message], mark: Ttl) -> Vec<Frame> {
    let normalised = normalise(history, &NormaliseOptions::default()).unwrap();
    let mut n = 0;
    frames(&normalised, "claude-x", mark, |_| {
        n += 1;
        format!("id{n}")
    })
    .collect::<Result<_>>()
    .unwrap()
}

fn values(frames: &[Frame]) -> Vec<Value> {
    frames
        .iter()
        .map(|frame| serde_json::from_slice(frame.line.as_bytes()).unwrap())
        .collect()
}

#[test]
fn every_message_is_one_line_in_its_place_and_only_the_last_asks() {
    let frames = all(&history(), Ttl::OneHour);
    let kinds: Vec<_> = frames.iter().map(|f| (f.kind, f.acknowledged())).collect();
    assert_eq!(
        kinds,
        [
            (Kind::History, true),
            (Kind::History, false),
            (Kind::Asks, false)
        ]
    );
    let values = values(&frames);
    assert_eq!(values[0]["shouldQuery"], json!(false));
    assert_eq!(values[0]["client_composed"], json!(true));
    assert_eq!(values[0]["uuid"], "id1");
    assert_eq!(
        values[0]["message"]["content"][0]["text"],
        "go\u{2028}@x /y"
    );
    assert_eq!(values[2].get("shouldQuery"), None);
    for frame in &frames {
        let bytes = frame.line.as_bytes();
        assert_eq!(memchr::memchr(b'\n', bytes), Some(bytes.len() - 1));
    }
}

#[test]
fn bug_098_signed_and_redacted_thinking_are_the_same_bytes() {
    let values = values(&all(&history(), Ttl::None));
    let message = &values[1]["message"];
    assert_eq!(message["model"], "claude-x");
    assert_eq!(message["id"], "id2");
    assert_eq!(
        message["content"][0],
        json!({"type":"thinking","thinking":" t\r\n","signature":"sig=="})
    );
    assert_eq!(
        message["content"][1],
        json!({"type":"redacted_thinking","data":"red"})
    );
    let name = message["content"][2]["name"].as_str().unwrap();
    assert!(name.starts_with("mcp__turnpass__fs_read_"), "{name}");
    let line = String::from_utf8_lossy(all(&history(), Ttl::None)[1].line.as_bytes()).into_owned();
    assert!(line.contains(r#""input":{"p": 1e3}"#), "{line}");
}

#[test]
fn the_mark_is_on_the_last_block_that_can_carry_one_and_nowhere_else() {
    let mut history = history();
    history[2].content.push(Block::text("and"));
    history[2].content.push(Block::Image(png()));
    let with = all(&history, Ttl::OneHour);
    let marked = values(&with);
    assert_eq!(
        marked[2]["message"]["content"][1]["cache_control"],
        json!({"type":"ephemeral","ttl":"1h"})
    );
    let count = |frames: &[Frame]| {
        frames
            .iter()
            .map(|f| memchr::memmem::find_iter(f.line.as_bytes(), b"cache_control").count())
            .sum::<usize>()
    };
    assert_eq!(count(&with), 1);
    assert_eq!(count(&all(&history, Ttl::None)), 0);
}

#[test]
fn bug_058_earlier_messages_are_the_same_bytes_when_the_conversation_grows() {
    let mut history = history();
    let before = values(&all(&history, Ttl::OneHour));
    history.extend([Message::assistant("x"), Message::user("y")]);
    let after = values(&all(&history, Ttl::OneHour));
    for n in 0..2 {
        assert_eq!(before[n]["message"], after[n]["message"]);
    }
    let mut was = before[2]["message"].clone();
    was["content"][0]
        .as_object_mut()
        .unwrap()
        .remove("cache_control");
    assert_eq!(was, after[2]["message"]);
}

#[test]
fn an_answer_cannot_ask() {
    let history = [
        Message::user("a"),
        Message::assistant("b"),
        Message::user("c"),
    ];
    let normalised = normalise(&history, &NormaliseOptions::default()).unwrap();
    let stamp = Stamp {
        id: "x",
        model: "m",
        mark: None,
    };
    let error = frame(&normalised.messages[1], Kind::Asks, &stamp).unwrap_err();
    assert_eq!(error.code(), ErrorCode::RequestInvalid);
}

proptest::proptest! {
    #[test]
    fn bug_004_any_text_is_one_line_and_comes_back(text in "(?s).{1,200}") {
        let history = [Message::user("a"), Message::assistant(format!("x{text}")), Message::user(format!("{text}x"))];
        let frames = all(&history, Ttl::OneHour);
        let values = values(&frames);
        proptest::prop_assert_eq!(values[1]["message"]["content"][0]["text"].as_str().unwrap(), format!("x{text}"));
        proptest::prop_assert_eq!(values[2]["message"]["content"][0]["text"].as_str().unwrap(), format!("{text}x"));
        for frame in &frames {
            let bytes = frame.line.as_bytes();
            proptest::prop_assert_eq!(memchr::memchr2(b'\n', b'\r', bytes), Some(bytes.len() - 1));
        }
    }
}
