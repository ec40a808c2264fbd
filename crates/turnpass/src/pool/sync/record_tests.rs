//! What is the same message, and what is not; and what a comparison costs.

use uuid::Uuid;

use super::record::Record;
use crate::conversation::normalise::Normalised;
use crate::conversation::{
    Block, Document, Image, Message, NormaliseOptions, ResultBlock, Role, SignedThinking, Source,
    ToolCall, ToolInput, ToolResult, ToolUseId, normalise,
};

pub(super) fn normal(history: &[Message]) -> Normalised<'_> {
    normalise(history, &NormaliseOptions::default()).unwrap()
}

pub(super) fn id(text: &str) -> ToolUseId {
    ToolUseId(text.to_owned())
}

pub(super) fn image(data: &str) -> Image {
    let (media_type, data) = ("image/png".to_owned(), data.to_owned());
    Image {
        source: Source::Base64 { media_type, data },
    }
}

pub(super) fn user(content: Vec<Block>) -> Message {
    let role = Role::User;
    Message { role, content }
}

pub(super) fn said(text: &str, calls: &[&str]) -> Message {
    let call = |name: &&str| {
        Block::ToolUse(ToolCall {
            id: id(name),
            name: "read".to_owned(),
            input: ToolInput::empty(),
        })
    };
    let mut content = vec![Block::text(text)];
    content.extend(calls.iter().map(call));
    let role = Role::Assistant;
    Message { role, content }
}

/// The record after a history was delivered whole.
pub(super) fn recorded(history: &[Message]) -> Record {
    let mut record = Record::new();
    for message in &normal(history).messages {
        record.push(message, Some(Uuid::new_v4()));
    }
    record
}

/// How much of the second is in the record of the first.
fn shared(recorded_history: &[Message], asked: &[Message]) -> usize {
    recorded(recorded_history).shared_prefix(&normal(asked).messages)
}

/// Whether a user message counts as another one, in the middle of a conversation.
fn same(was: Message, is: Message) -> bool {
    let around = |message| vec![message, said("yes", &[]), Message::user("go on")];
    match shared(&around(was), &around(is)) {
        0 => false,
        3 => true,
        other => panic!("{other}"),
    }
}

#[test]
fn a_history_that_grew_is_known_as_far_as_it_was_delivered() {
    let mut history = vec![Message::user("a"), said("b", &["c1"])];
    history.push(Message::results([ToolResult::text(id("c1"), "r")]));
    let record = recorded(&history);
    assert_eq!(record.len(), 3);
    history.extend([said("d", &[]), Message::user("e")]);
    assert_eq!(record.shared_prefix(&normal(&history).messages), 3);
    assert_eq!(Record::new().shared_prefix(&normal(&history).messages), 0);
}

#[test]
fn bug_082_every_rewrite_of_a_users_message_is_seen() {
    let base = || user(vec![Block::text("one"), Block::text("two")]);
    assert!(same(base(), base()));
    for other in [
        user(vec![Block::text("one")]),
        user(vec![Block::text("two"), Block::text("one")]),
        user(vec![Block::text("onetwo")]),
        user(vec![Block::text("one "), Block::text("two")]),
        user(vec![
            Block::text("one"),
            Block::text("two"),
            Block::text("x"),
        ]),
    ] {
        assert!(!same(base(), other));
    }
}

#[test]
fn bug_082_every_rewrite_of_a_result_is_seen() {
    let history = |result: ToolResult| {
        let asked = Message::user("a");
        vec![asked, said("b", &["c1"]), Message::results([result])]
    };
    let was = history(ToolResult::text(id("c1"), "r"));
    assert_eq!(shared(&was, &was), 3);
    let two = ToolResult {
        content: vec![
            ResultBlock::Text { text: "r".into() },
            ResultBlock::Text { text: "r".into() },
        ],
        ..ToolResult::text(id("c1"), "")
    };
    for other in [
        ToolResult::text(id("c1"), "R"),
        ToolResult::error(id("c1"), "r"),
        two.clone(),
    ] {
        assert_eq!(shared(&was, &history(other)), 2);
    }
    let mut beside = was.clone();
    beside[2].content.push(Block::text("r"));
    assert_eq!(shared(&was, &beside), 2);
    // The same texts, of which the second is the tool's once and the user's once.
    assert_eq!(shared(&history(two), &beside), 2);
}

#[test]
fn documents_are_compared_with_their_titles() {
    let document = |kind: &str, data: &str, title: Option<&str>| {
        let (media_type, data) = ("text/plain".to_owned(), data.to_owned());
        let source = match kind {
            "text" => Source::Text { media_type, data },
            _ => Source::Url { url: data },
        };
        let title = title.map(str::to_owned);
        user(vec![Block::Document(Document { source, title })])
    };
    assert!(same(
        document("text", "d", None),
        document("text", "d", None)
    ));
    assert!(!same(
        document("text", "d", Some("one")),
        document("text", "d", Some("two"))
    ));
    for other in [
        document("text", "D", None),
        document("text", "d", Some("")),
        document("url", "d", None),
        Message::user("d"),
    ] {
        assert!(!same(document("text", "d", None), other));
    }
}

#[test]
fn answers_are_compared_by_their_calls_in_order_and_by_their_text() {
    let same = |was: Message, is: Message| {
        let around = |answer: Message| vec![Message::user("a"), answer, Message::user("e")];
        // What differs is the answer itself, not only what stands for its results behind it.
        match shared(&around(was), &around(is)) {
            1 => false,
            3 => true,
            other => panic!("{other}"),
        }
    };
    assert!(same(said("b", &[]), said("\n b \t", &[])));
    assert!(!same(said("b", &[]), said("B", &[])));
    assert!(!same(said("b", &["c1"]), said("B", &["c1"])));
    assert!(!same(said("", &["c1", "c2"]), said("", &["c2", "c1"])));
    assert!(!same(said("", &["c1"]), said("", &["c1", "c2"])));
    assert!(!same(said("c1", &[]), said("", &["c1"])));

    let parts = |blocks: Vec<Block>| Message {
        role: Role::Assistant,
        content: blocks,
    };
    let thinking = Block::Thinking(SignedThinking {
        thinking: "t".into(),
        signature: "s".into(),
    });
    let whole = parts(vec![
        thinking,
        Block::text("b"),
        Block::text("\n"),
        Block::text("c "),
    ]);
    assert!(same(whole.clone(), said("bc", &[])));
    assert!(!same(whole, said("b c", &[])));

    let mut other_input = said("b", &["c1"]);
    let Block::ToolUse(call) = &mut other_input.content[1] else {
        panic!()
    };
    call.input = ToolInput::from_streamed(r#"{"n":"3"}"#).unwrap();
    assert!(same(said("b", &["c1"]), other_input));
}

#[test]
fn an_answer_is_the_same_as_it_came_and_as_the_host_gives_it_back() {
    let answer = said("  b\n", &["c1"]);
    let mut record = recorded(&[Message::user("a")]);
    record.push_answer(&answer, Some(Uuid::new_v4()));
    let results = Message::results([ToolResult::text(id("c1"), "r")]);
    let history = [Message::user("a"), answer, results];
    assert_eq!(record.shared_prefix(&normal(&history).messages), 2);
}

#[test]
fn an_image_that_is_there_has_to_be_one_that_was() {
    let with = |images: &[&str]| {
        let mut content = vec![Block::text("before")];
        content.extend(images.iter().map(|data| Block::Image(image(data))));
        content.push(Block::text("after"));
        user(content)
    };
    let was = || with(&["AAAA", "BBBB"]);
    for fits in [
        with(&["AAAA", "BBBB"]),
        with(&["BBBB"]),
        with(&["AAAA"]),
        with(&[]),
    ] {
        assert!(same(was(), fits));
    }
    for other in [
        with(&["BBBB", "AAAA"]),
        with(&["CCCC"]),
        with(&["AAAA", "CCCC"]),
        with(&["AAAA", "BBBB", "BBBB"]),
    ] {
        assert!(!same(was(), other));
    }
    assert!(!same(with(&[]), with(&["AAAA"])));
}

#[test]
fn a_placeholder_may_stand_where_an_image_stood_and_nowhere_else() {
    let with = |middle: Block| user(vec![Block::text("[x]"), middle, Block::text("after")]);
    let was = || with(Block::Image(image("AAAA")));
    for fits in [
        with(Block::Image(image(""))),
        with(Block::text("[image removed]")),
        with(Block::text("<image omitted>")),
    ] {
        assert!(same(was(), fits));
    }
    for other in [
        with(Block::text("look, a cat")),
        with(Block::text("[a note that goes on")),
        with(Block::Document(Document {
            source: Source::Url { url: "u".into() },
            title: None,
        })),
        with(Block::text(format!("[{}]", "x".repeat(300)))),
        user(vec![
            Block::text("[image removed]"),
            Block::text("[x]"),
            Block::text("after"),
        ]),
        user(vec![Block::text("[image removed]"), Block::text("after")]),
    ] {
        assert!(!same(was(), other));
    }
    assert!(!same(with(Block::text("[a]")), with(Block::text("[b]"))));
}

#[test]
fn images_of_results_may_go_too() {
    let history = |content: Vec<ResultBlock>| {
        let result = ToolResult {
            id: id("c1"),
            content,
            is_error: false,
        };
        vec![
            Message::user("a"),
            said("b", &["c1"]),
            Message::results([result]),
        ]
    };
    let text = |text: &str| ResultBlock::Text { text: text.into() };
    let was = history(vec![text("shot"), ResultBlock::Image(image("AAAA"))]);
    assert_eq!(shared(&was, &history(vec![text("shot")])), 3);
    assert_eq!(
        shared(&was, &history(vec![text("shot"), text("[gone]")])),
        3
    );
    assert_eq!(shared(&was, &history(vec![text("other")])), 2);
    let alone = history(vec![ResultBlock::Image(image("AAAA"))]);
    assert_eq!(shared(&alone, &history(vec![])), 3);
}

#[test]
fn the_result_of_a_call_that_the_cli_answered_is_taken_as_it_is() {
    let asked = [Message::user("a")];
    let results = |first: &str, second: &str| {
        let first = ToolResult::error(id("c1"), first);
        let second = ToolResult::text(id("c2"), second);
        vec![
            Message::user("a"),
            said("b", &["c1", "c2"]),
            Message::results([first, second]),
        ]
    };
    let mut record = recorded(&asked);
    record.push_answer(&said("b", &["c1", "c2"]), None);
    record.answered_by_cli(&id("c1"));
    record.push(&normal(&results("x", "r")).messages[2], None);
    assert_eq!(
        record.shared_prefix(&normal(&results("y", "r")).messages),
        3
    );
    assert_eq!(
        record.shared_prefix(&normal(&results("x", "R")).messages),
        2
    );
    let later = record.clone();
    assert_eq!(later.shared_prefix(&normal(&results("z", "r")).messages), 3);
}

#[test]
fn points_are_where_no_call_is_open_and_go_with_a_cut() {
    let [one, two] = [Uuid::new_v4(), Uuid::new_v4()];
    let mut record = recorded(&[Message::user("a")]);
    assert_eq!(record.point(), None);
    record.push_answer(&said("b", &[]), Some(one));
    record.push(&normal(&[Message::user("c")]).messages[0], Some(two));
    record.push_answer(&said("d", &["c1"]), Some(two));
    record.resume_after(two);
    let point = record.point().unwrap();
    assert_eq!((point.len, point.at), (2, one));
    assert_eq!(record.point_within(2), Some(point));
    assert_eq!(record.point_within(1), None);
    // The same for an answer with open calls that was told and not heard.
    let told = [Message::user("a"), said("b", &["c1"]), Message::user("c")];
    let mut telling = Record::new();
    for message in &normal(&told).messages[..2] {
        telling.push(message, None);
    }
    telling.resume_after(two);
    assert_eq!(telling.point(), None);
    assert_eq!(record.line(2), Some(two));
    assert_eq!(record.last_line(), Some(two));
    let fork = record.fork(2);
    assert_eq!(
        (fork.len(), fork.point(), fork.last_line()),
        (2, None, None)
    );
    record.cut(1);
    assert_eq!((record.len(), record.point()), (1, None));
    record.cut(5);
    assert_eq!(record.len(), 1);
    record.cut(0);
    assert!(record.len() == 0 && record.is_touched());
    assert!(!Record::new().is_touched());
    let mut tainted = Record::new();
    tainted.taint();
    assert!(
        tainted.is_touched(),
        "it is no longer as a process that stands ready"
    );
}

#[test]
fn a_line_to_rewind_to_is_one_of_the_user_s() {
    let history = [Message::user("a"), said("b", &[]), Message::user("c")];
    let mut record = Record::new();
    for (n, message) in (1..).zip(&normal(&history).messages[..2]) {
        record.push(message, Some(Uuid::from_u128(n)));
    }
    assert_eq!(record.line(0), Some(Uuid::from_u128(1)));
    assert_eq!(record.line(1), None);
    assert_eq!(record.last_line(), Some(Uuid::from_u128(1)));
}

/// Turns of a question, a call, its result and an answer, of about so many bytes each message.
pub(super) fn long(messages: usize, bytes: usize) -> Vec<Message> {
    let text = |n: usize| format!("{n:08} {}", "some words of it. ".repeat(bytes / 18));
    (0..messages)
        .map(|n| match n % 4 {
            0 => Message::user(text(n)),
            1 => said(&text(n), &[&format!("toolu_{n}")]),
            2 => Message::results([ToolResult::text(id(&format!("toolu_{}", n - 1)), text(n))]),
            _ => said(&text(n), &[]),
        })
        .chain([Message::user("and now?")])
        .collect()
}

#[test]
fn a_record_of_2000_messages_takes_well_below_a_megabyte() {
    let mut history = long(2_000, 20);
    for n in (0..2_000).step_by(100) {
        history[n].content.push(Block::Image(image("AAAA")));
    }
    let bytes = recorded(&history).bytes();
    assert!(bytes < 400 * 1024, "{bytes}");
}

/// `cargo test -p turnpass --release --lib pool::sync::record_tests::costs -- --ignored --nocapture`
#[test]
#[ignore = "prints times"]
#[allow(clippy::print_stdout, reason = "that is what it is for")]
fn costs() {
    const ROUNDS: u32 = 20;
    for (messages, bytes) in [(20, 1_000), (2_000, 0), (2_000, 1_000), (2_000, 10_000)] {
        let history = long(messages, bytes);
        let normalised = normal(&history);
        let mut record = recorded(&history);
        record.cut(messages);
        record.resume_after(Uuid::nil());
        let time = |what: &str, mut run: Box<dyn FnMut() + '_>| {
            let begin = std::time::Instant::now();
            (0..ROUNDS).for_each(|_| run());
            let each = begin.elapsed() / ROUNDS;
            let per = each.as_nanos() / messages as u128;
            println!("{messages} x {bytes} B: {what} {each:?}, {per} ns a message");
        };
        time("normalise", Box::new(|| drop(normal(&history))));
        let compare = || assert_eq!(record.shared_prefix(&normalised.messages), messages);
        time("compare", Box::new(compare));
        time("record anew", Box::new(|| drop(recorded(&history))));
        let point = record.clone();
        let stored = super::state_tests::stored(&point);
        let begins = || assert!(stored.begins(&normalised.messages));
        time("compare with a state", Box::new(begins));
        println!("{} bytes of memory", record.bytes());
    }
}
