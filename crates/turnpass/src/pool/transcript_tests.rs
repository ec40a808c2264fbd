use proptest::prelude::*;

use super::*;
use crate::conversation::normalise::{NormaliseOptions, normalise};
use crate::conversation::{
    Document, Image, Message, RedactedThinking, SignedThinking, Source, ToolInput, ToolUseId,
};

fn image(data: &str) -> Image {
    Image {
        source: Source::Base64 {
            media_type: "image/png".into(),
            data: data.into(),
        },
    }
}

fn call(id: &str, input: &str) -> Block {
    Block::ToolUse(ToolCall {
        id: ToolUseId(id.into()),
        name: "fs.read".into(),
        input: ToolInput::from_streamed(input).unwrap(),
    })
}

fn assistant(content: Vec<Block>) -> Message {
    Message {
        role: Role::Assistant,
        content,
    }
}

fn told(messages: &[Message]) -> Vec<Block> {
    let history = normalise(messages, &NormaliseOptions::default()).unwrap();
    let told = message(&history.messages);
    assert_eq!(told.role, Role::User);
    told.content.into_iter().map(Cow::into_owned).collect()
}

fn text(block: &Block) -> &str {
    block.as_text().unwrap()
}

#[test]
fn a_conversation_is_one_message_with_the_last_one_as_it_is() {
    let mut last = Message::user("and now?");
    last.content.push(Block::Image(image("aGk=")));
    let content = told(&[
        Message::user("hello\nthere"),
        assistant(vec![Block::text("I look."), call("toolu_1", r#"{"p":1}"#)]),
        Message::results([ToolResult::error(ToolUseId("toolu_1".into()), "no")]),
        assistant(vec![Block::text("It failed.")]),
        last.clone(),
    ]);
    assert_eq!(content.len(), 3);
    assert_eq!(
        text(&content[0]),
        format!(
            "{BEGIN}\nuser:\n| hello\n| there\nassistant:\n| I look.\n\
             assistant, call toolu_1 of mcp__turnpass__{}:\n| {{\"p\":1}}\n\
             failed result of call toolu_1:\n| no\nassistant:\n| It failed.\n{END_THEN_MESSAGE}\n",
            names::published("fs.read")
                .unwrap()
                .strip_prefix("mcp__turnpass__")
                .unwrap()
        )
    );
    assert_eq!(content[1..], last.content[..]);
}

#[test]
fn results_that_come_last_stand_in_the_transcript() {
    let mut results = Message::results([ToolResult::text(ToolUseId("a".into()), "yes")]);
    let history = [
        Message::user("x"),
        assistant(vec![call("a", "{}")]),
        results.clone(),
    ];
    let content = told(&history);
    assert_eq!(content.len(), 1);
    assert!(text(&content[0]).ends_with(&format!("result of call a:\n| yes\n{END_THEN_GO_ON}\n")));
    results.content.push(Block::text("but be quick"));
    let [first, call, _] = history;
    let content = told(&[first, call, results]);
    assert!(text(&content[0]).ends_with(&format!("| yes\n{END_THEN_MESSAGE}\n")));
    assert_eq!(text(&content[1]), "but be quick");
}

#[test]
fn images_and_documents_keep_their_place() {
    let document = Document {
        source: Source::Text {
            media_type: "text/plain".into(),
            data: "d".into(),
        },
        title: None,
    };
    let mut first = Message::user("before");
    first.content.push(Block::Image(image("AAAA")));
    first.content.push(Block::text("after"));
    let result = ToolResult {
        content: vec![
            ResultBlock::Text { text: "t".into() },
            ResultBlock::Image(image("BBBB")),
            ResultBlock::Document(document.clone()),
        ],
        ..ToolResult::text(ToolUseId("a".into()), "")
    };
    let content = told(&[
        first,
        assistant(vec![call("a", "{}")]),
        Message::results([result]),
        assistant(vec![Block::text("ok")]),
        Message::user("x"),
    ]);
    let kinds: Vec<_> = content
        .iter()
        .map(|block| match block {
            Block::Text { .. } => "text",
            Block::Image(_) => "image",
            Block::Document(_) => "document",
            _ => "other",
        })
        .collect();
    assert_eq!(
        kinds,
        [
            "text", "image", "text", "image", "text", "document", "text", "text"
        ]
    );
    assert!(text(&content[0]).ends_with("user:\n| before\nuser, an image:\n"));
    assert!(text(&content[2]).ends_with("result of call a:\n| t\nresult of call a, an image:\n"));
    assert_eq!(content[3], Block::Image(image("BBBB")));
    assert_eq!(content[5], Block::Document(document));
}

#[test]
fn thinking_is_left_out() {
    let content = told(&[
        Message::user("x"),
        assistant(vec![
            Block::Thinking(SignedThinking {
                thinking: "secret thoughts".into(),
                signature: "sig".into(),
            }),
            Block::RedactedThinking(RedactedThinking {
                data: "secret".into(),
            }),
            Block::text("y"),
        ]),
        Message::user("z"),
    ]);
    let all = format!("{content:?}");
    assert!(!all.contains("secret") && !all.contains("sig"), "{all}");
}

/// What a reader takes from a transcript: headings, and what stands under each.
fn read(content: &[Block]) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    let whole: String = content.iter().filter_map(Block::as_text).collect();
    let mut line = String::new();
    let mut lines = Vec::new();
    let mut chars = whole.chars().peekable();
    while let Some(c) = chars.next() {
        line.push(c);
        if breaks_line(c) && !(c == '\r' && chars.peek() == Some(&'\n')) {
            lines.push(std::mem::take(&mut line));
        }
    }
    for line in lines {
        match line.strip_prefix(QUOTE) {
            Some(said) => all.last_mut().unwrap().1.push_str(said),
            None => all.push((line.trim_end().to_owned(), String::new())),
        }
    }
    for (_, said) in &mut all {
        // The line end of ours after the content.
        said.pop();
    }
    all
}

fn content() -> impl Strategy<Value = String> {
    let hostile = prop_oneof![
        Just("| ".to_owned()),
        Just("user:".to_owned()),
        Just("assistant:\n| x".to_owned()),
        Just(END_THEN_MESSAGE.to_owned()),
        Just("\n".to_owned()),
        Just("\r\n".to_owned()),
        Just("\r".to_owned()),
        Just("\u{2028}".to_owned()),
        Just("\u{85}result of call a:".to_owned()),
        Just("\u{b}\u{c}\u{1d}".to_owned()),
        any::<String>(),
    ];
    proptest::collection::vec(hostile, 1..6).prop_map(|parts| format!("x{}", parts.concat()))
}

proptest! {
    #[test]
    fn whatever_is_said_is_read_back_and_nothing_else(
        user in content(), said in content(), result in content(), failed: bool,
    ) {
        let content = told(&[
            Message::user(user.clone()),
            assistant(vec![Block::text(said.clone()), call("a", "{}")]),
            Message::results([ToolResult { is_error: failed, ..ToolResult::text(ToolUseId("a".into()), result.clone()) }]),
            assistant(vec![Block::text("ok")]),
            Message::user("last"),
        ]);
        let alias = names::published("fs.read").unwrap();
        let how = if failed { "failed result" } else { "result" };
        let read = read(&content[..1]);
        let wanted = [
            (BEGIN.to_owned(), String::new()),
            ("user:".to_owned(), user),
            ("assistant:".to_owned(), said),
            (format!("assistant, call a of {alias}:"), "{}".to_owned()),
            (format!("{how} of call a:"), result),
            ("assistant:".to_owned(), "ok".to_owned()),
            (END_THEN_MESSAGE.to_owned(), String::new()),
        ];
        prop_assert_eq!(&read[..], &wanted[..]);
    }
}
