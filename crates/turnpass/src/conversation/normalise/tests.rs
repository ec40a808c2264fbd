use super::*;
use crate::conversation::digest;
use crate::conversation::{Document, Image, RedactedThinking, SignedThinking, Source, ToolInput};

mod blocks;
mod properties;
mod valid;

use valid::check;

fn normal(history: &[Message]) -> Normalised<'_> {
    let normalised = normalise(history, &NormaliseOptions::default()).unwrap();
    if let Err(why) = check(&normalised.messages) {
        panic!("{why}: {:#?}", normalised.messages);
    }
    normalised
}

fn rules(normalised: &Normalised<'_>) -> Vec<Rule> {
    normalised.changes.iter().map(|c| c.rule).collect()
}

/// The outcome in short: `u:` and `a:` with one word a block.
fn short(normalised: &Normalised<'_>) -> Vec<String> {
    let word = |block: &Block| match block {
        Block::Text { text } => text.clone(),
        Block::Image(_) => "image".into(),
        Block::Document(_) => "document".into(),
        Block::ToolUse(call) => format!("call {}", call.id.0),
        Block::ToolResult(result) => {
            let texts: String = result
                .content
                .iter()
                .map(|part| match part {
                    ResultBlock::Text { text } => text.as_str(),
                    _ => "media",
                })
                .collect();
            format!("{}={texts}", result.id.0)
        }
        Block::Thinking(thinking) => format!("think {}", thinking.thinking),
        Block::RedactedThinking(_) => "redacted".into(),
    };
    normalised
        .messages
        .iter()
        .map(|message| {
            let role = if message.role == Role::User { "u" } else { "a" };
            let words: Vec<_> = message.content.iter().map(|b| word(b)).collect();
            format!("{role}: {}", words.join(", "))
        })
        .collect()
}

fn message(role: Role, content: Vec<Block>) -> Message {
    Message { role, content }
}

fn assistant(content: Vec<Block>) -> Message {
    message(Role::Assistant, content)
}

fn user(content: Vec<Block>) -> Message {
    message(Role::User, content)
}

fn call(id: &str) -> Block {
    Block::ToolUse(ToolCall {
        id: ToolUseId(id.into()),
        name: "t".into(),
        input: ToolInput::empty(),
    })
}

fn result(id: &str, text: &str) -> Block {
    Block::ToolResult(ToolResult::text(ToolUseId(id.into()), text))
}

fn think(text: &str) -> Block {
    Block::Thinking(SignedThinking {
        thinking: text.into(),
        signature: "s".into(),
    })
}

fn image() -> Block {
    image_of("image/png", "AAAA")
}

fn image_of(media_type: &str, data: &str) -> Block {
    Block::Image(Image {
        source: Source::Base64 {
            media_type: media_type.into(),
            data: data.into(),
        },
    })
}

#[test]
fn a_valid_history_is_borrowed_as_it_is() {
    let history = [
        Message::user("q"),
        assistant(vec![
            think(" t\r\n"),
            Block::text("a "),
            call("c1"),
            call("c2"),
        ]),
        user(vec![
            result("c1", "1"),
            result("c2", ""),
            image(),
            Block::text("more"),
        ]),
    ];
    let mut history = history.to_vec();
    // An empty result is allowed.
    history[2].content[1] = Block::ToolResult(ToolResult {
        id: ToolUseId("c2".into()),
        content: vec![],
        is_error: false,
    });
    let normalised = normal(&history);
    assert_eq!(normalised.changes, []);
    assert_eq!(normalised.to_messages(), history);
    let borrowed = |block: &Cow<'_, Block>| matches!(block, Cow::Borrowed(_));
    assert!(
        normalised
            .messages
            .iter()
            .flat_map(|m| &m.content)
            .all(borrowed)
    );
    assert!(normalised.summary().is_empty());
}

#[test]
fn nothing_to_send_is_an_error() {
    for history in [
        vec![],
        vec![Message::user("")],
        vec![Message::user(" \n"), Message::assistant("")],
        vec![assistant(vec![Block::RedactedThinking(RedactedThinking {
            data: String::new(),
        })])],
    ] {
        let error = normalise(&history, &NormaliseOptions::default()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RequestInvalid);
        assert!(error.detail().starts_with("messages:"));
    }
}

#[test]
fn bug_105_blank_text_is_dropped_and_the_call_kept() {
    for blank in ["", "\n", " \t\u{a0}\u{2003}\r\n", "\u{1c}\u{1f}"] {
        let history = [
            user(vec![Block::text("q"), Block::text(blank)]),
            assistant(vec![Block::text(blank), call("c")]),
            user(vec![Block::text(blank), result("c", blank)]),
        ];
        let normalised = normal(&history);
        assert_eq!(
            short(&normalised),
            ["u: q", "a: call c", "u: c="],
            "{blank:?}"
        );
        assert_eq!(rules(&normalised), [Rule::BlankText; 4]);
    }
    for kept in ["\0", "\u{feff}", " x ", "\u{200b}"] {
        let history = [Message::user(kept)];
        assert_eq!(short(&normal(&history)), [format!("u: {kept}")]);
    }
}

#[test]
fn bug_105_a_message_left_with_nothing_is_merged_away() {
    let history = [
        Message::user("a"),
        Message::assistant(""),
        Message::user("b"),
        Message::assistant("c"),
        Message::user("\n"),
        Message::assistant("d"),
        Message::user("e"),
    ];
    let normalised = normal(&history);
    assert_eq!(short(&normalised), ["u: a, b", "a: c, d", "u: e"]);
    assert!(rules(&normalised).contains(&Rule::EmptyMessage));
    assert!(rules(&normalised).contains(&Rule::MergedNeighbours));
}

#[test]
fn bug_106_results_of_several_messages_in_call_order_before_everything_else() {
    let history = [
        Message::user("q"),
        assistant(vec![call("1"), call("2"), call("3")]),
        user(vec![Block::text("first"), result("3", "c")]),
        user(vec![result("1", "a"), image(), result("1", "again")]),
        user(vec![result("2", "b"), Block::text("last")]),
    ];
    let normalised = normal(&history);
    assert_eq!(
        short(&normalised),
        [
            "u: q",
            "a: call 1, call 2, call 3",
            "u: 1=a, 2=b, 3=c, first, image, last"
        ]
    );
    let found = rules(&normalised);
    assert_eq!(
        found.iter().filter(|r| **r == Rule::RepeatedResult).count(),
        1
    );
    assert_eq!(
        found
            .iter()
            .filter(|r| **r == Rule::MergedNeighbours)
            .count(),
        2
    );
    assert!(found.contains(&Rule::MovedResult));
}

#[test]
fn bug_106_a_late_result_moves_next_to_its_call() {
    let history = [
        Message::user("q"),
        assistant(vec![call("1")]),
        Message::user("wait"),
        Message::assistant("ok"),
        user(vec![result("1", "late")]),
        Message::assistant("thanks"),
        Message::user("x"),
    ];
    let normalised = normal(&history);
    assert_eq!(
        short(&normalised),
        [
            "u: q",
            "a: call 1",
            "u: 1=late, wait",
            "a: ok",
            "u: [turnpass: the assistant's next message follows]",
            "a: thanks",
            "u: x"
        ]
    );
    assert_eq!(
        rules(&normalised),
        [Rule::SeparatedNeighbours, Rule::MovedResult]
    );
}

#[test]
fn bug_106_consecutive_assistant_messages_with_calls_become_one() {
    let history = [
        Message::user("q"),
        assistant(vec![call("1")]),
        assistant(vec![call("2")]),
        user(vec![result("1", "a")]),
        user(vec![result("2", "b")]),
    ];
    assert_eq!(
        short(&normal(&history)),
        ["u: q", "a: call 1, call 2", "u: 1=a, 2=b"]
    );
}

#[test]
fn bug_087_after_a_crash() {
    let history = [
        Message::user("q"),
        assistant(vec![call("1"), call("2")]),
        user(vec![result("2", "b"), result("2", "twice")]),
        Message::user("go on"),
        assistant(vec![Block::text("hm")]),
        user(vec![result("gone", "x"), Block::text("y")]),
    ];
    let normalised = normal(&history);
    let lines = short(&normalised);
    assert!(
        lines[2].starts_with("u: 1=[turnpass: there is no result"),
        "{lines:?}"
    );
    assert!(lines[2].ends_with("2=b, go on"), "{lines:?}");
    assert_eq!(
        lines[4],
        "u: [turnpass: result of a tool call that is not in this conversation]\nx, y"
    );
    let Block::ToolResult(made) = &*normalised.messages[2].content[0] else {
        panic!("the result stands first");
    };
    assert!(made.is_error);
    for rule in [
        Rule::MissingResult,
        Rule::RepeatedResult,
        Rule::OrphanResult,
    ] {
        assert!(rules(&normalised).contains(&rule), "{rule:?}");
    }
}

#[test]
fn bug_109_a_last_message_that_calls_tools_is_an_error_that_names_them() {
    let open = [
        Message::user("q"),
        assistant(vec![call("id-7")]),
        Message::user(" "),
    ];
    for history in [&open[..], &open[..2]] {
        let error = normalise(history, &NormaliseOptions::default()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RequestInvalid);
        assert!(error.detail().contains("t (id-7)"), "{error}");
    }
}

#[test]
fn bug_109_a_trailing_assistant_message_is_asked_to_go_on() {
    for (last, wanted) in [
        (vec![Message::assistant("cut ")], vec!["a: cut "]),
        (
            vec![Message::assistant("one"), Message::assistant("two\n")],
            vec!["a: one, two\n"],
        ),
        (vec![Message::assistant("")], vec![]),
    ] {
        let mut history = vec![Message::user("q")];
        history.extend(last);
        let normalised = normal(&history);
        let lines = short(&normalised);
        assert_eq!(lines[1..].len(), if wanted.is_empty() { 0 } else { 2 });
        if let [wanted] = wanted[..] {
            assert_eq!(lines[1], wanted);
            assert!(lines[2].starts_with("u: [turnpass: continue"));
            assert!(rules(&normalised).contains(&Rule::TrailingAssistant));
        }
    }
}

#[test]
fn a_leading_assistant_message_gets_a_user_before_it() {
    let history = [Message::assistant("welcome"), Message::user("hi")];
    let normalised = normal(&history);
    assert_eq!(
        short(&normalised),
        [
            "u: [turnpass: the conversation begins with the assistant's message]",
            "a: welcome",
            "u: hi"
        ]
    );
    assert_eq!(rules(&normalised), [Rule::LeadingAssistant]);
}

#[test]
fn bug_104_system_messages_keep_their_place_but_not_before_results() {
    let system = |text: &str| message(Role::System, vec![Block::text(text)]);
    let history = [
        system("s0"),
        Message::user("q"),
        Message::assistant("a"),
        system("s1"),
        Message::user("go"),
        assistant(vec![call("1")]),
        system("s2"),
        user(vec![result("1", "r")]),
        system("s3"),
    ];
    let normalised = normal(&history);
    let mark = |text: &str| format!("[turnpass: system message of the host program]\n{text}");
    assert_eq!(
        short(&normalised),
        [
            format!("u: {}, q", mark("s0")),
            "a: a".to_owned(),
            format!("u: {}, go", mark("s1")),
            "a: call 1".to_owned(),
            format!("u: 1=r, {}, {}", mark("s2"), mark("s3")),
        ]
    );
}

#[test]
fn too_many_messages_are_a_typed_error() {
    let history = vec![Message::user("x"); MESSAGES + 1];
    let error = normalise(&history, &NormaliseOptions::default()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::HistoryTooLarge);
}

#[test]
fn the_page_lists_every_rule() {
    let page = include_str!("../../../../../docs/protocol/normaliser.md");
    for rule in Rule::ALL {
        let row = format!("| `{}` | {} |", rule.as_str(), rule.what());
        assert!(
            page.contains(&row),
            "docs/protocol/normaliser.md lacks: {row}"
        );
    }
}
