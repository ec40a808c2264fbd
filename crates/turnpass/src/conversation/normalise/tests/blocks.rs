//! Ids, thinking, and the kinds of content.

use super::*;

#[test]
fn bug_108_foreign_ids_are_mapped_one_to_one() {
    let long = "x".repeat(300);
    let foreign = [
        "functions.bash:0",
        "call_1|fc_2",
        "",
        &long,
        "é",
        "a.b",
        "a/b",
        "toolu_ok-1",
    ];
    let history = [
        Message::user("q"),
        assistant(foreign.iter().map(|id| call(id)).collect()),
        user(foreign.iter().rev().map(|id| result(id, id)).collect()),
    ];
    let normalised = normal(&history);
    let again = normal(&history);
    assert_eq!(normalised.messages, again.messages);
    let sent: Vec<_> = normalised.messages[1]
        .content
        .iter()
        .map(|block| match &**block {
            Block::ToolUse(call) => call.id.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    for (host, sent) in foreign.iter().zip(&sent) {
        assert_eq!(normalised.host_id(sent).0, **host);
    }
    assert_eq!(sent[7].0, "toolu_ok-1");
    assert_eq!(normalised.ids.len(), 7);
    // Results carry the id of their own call, in call order.
    for (block, (host, sent)) in normalised.messages[2]
        .content
        .iter()
        .zip(foreign.iter().zip(&sent))
    {
        let Block::ToolResult(result) = &**block else {
            panic!("{block:?}");
        };
        assert_eq!(result.id, *sent);
        assert_eq!(result.content.is_empty(), host.is_empty());
    }
}

#[test]
fn bug_108_one_id_in_several_turns_and_twice_in_one() {
    let history = [
        Message::user("q"),
        assistant(vec![call("c0"), call("c0")]),
        user(vec![
            result("c0", "a"),
            result("c0", "b"),
            result("c0", "extra"),
        ]),
        assistant(vec![call("c0")]),
        user(vec![result("c0", "c")]),
    ];
    let normalised = normal(&history);
    let lines = short(&normalised);
    assert!(
        lines[2].contains("c0=a") && lines[2].contains("=b"),
        "{lines:?}"
    );
    assert!(lines[4].ends_with("=c"), "{lines:?}");
    assert_eq!(
        rules(&normalised)
            .iter()
            .filter(|r| **r == Rule::RenamedId)
            .count(),
        2
    );
    assert!(rules(&normalised).contains(&Rule::RepeatedResult));
}

#[test]
fn ten_thousand_calls_of_one_id_take_no_time() {
    let mut history = vec![Message::user("q")];
    for _ in 0..10_000 {
        history.extend([assistant(vec![call("")]), user(vec![result("", "r")])]);
    }
    assert_eq!(normal(&history).ids.len(), 10_000);
}

#[test]
fn bug_098_thinking_is_kept_byte_for_byte_and_in_order() {
    let blocks = vec![
        think(" lead\r\ntrail "),
        Block::text("t"),
        call("1"),
        think(""),
        Block::RedactedThinking(RedactedThinking { data: "r".into() }),
        call("2"),
    ];
    let history = [
        Message::user("q"),
        assistant(blocks.clone()),
        user(vec![result("1", "a"), result("2", "b")]),
    ];
    let normalised = normal(&history);
    assert_eq!(normalised.to_messages()[1].content, blocks);
    assert_eq!(normalised.changes, []);
}

#[test]
fn bug_098_unsigned_thinking_is_dropped_whole() {
    let unsigned = Block::Thinking(SignedThinking {
        thinking: "x".into(),
        signature: String::new(),
    });
    let empty = Block::RedactedThinking(RedactedThinking {
        data: String::new(),
    });
    let history = [
        Message::user("q"),
        assistant(vec![unsigned.clone(), empty, Block::text("a")]),
        Message::user("b"),
        assistant(vec![unsigned]),
        Message::user("c"),
    ];
    let normalised = normal(&history);
    assert_eq!(short(&normalised), ["u: q", "a: a", "u: b, c"]);
    assert_eq!(
        rules(&normalised)
            .iter()
            .filter(|r| **r == Rule::UnsignedThinking)
            .count(),
        3
    );
}

#[test]
fn bug_098_turns_are_not_merged_across_a_tool_result() {
    let history = [
        Message::user("q"),
        assistant(vec![think("1"), call("c")]),
        user(vec![result("c", "r")]),
        assistant(vec![think("2"), Block::text("a")]),
        user(vec![result("c", "again")]),
        assistant(vec![think("3"), Block::text("b")]),
        Message::user("x"),
    ];
    let normalised = normal(&history);
    let lines = short(&normalised);
    assert_eq!(lines[3], "a: think 2, a");
    assert!(lines[4].starts_with("u: [turnpass: the assistant's next"));
    assert_eq!(lines[5], "a: think 3, b");
}

#[test]
fn bug_098_a_merge_never_puts_thinking_behind_a_first_text() {
    let history = [
        Message::user("q"),
        Message::assistant("plain"),
        assistant(vec![think("1"), Block::text("a")]),
        assistant(vec![think("2"), Block::text("b")]),
        Message::user("x"),
    ];
    assert_eq!(
        short(&normal(&history)),
        [
            "u: q",
            "a: plain",
            "u: [turnpass: the assistant's next message follows]",
            "a: think 1, a, think 2, b",
            "u: x"
        ]
    );
}

#[test]
fn bug_098_a_transport_that_cannot_carry_thinking_leaves_it_out_whole() {
    let history = [
        Message::user("q"),
        assistant(vec![think("1"), Block::text("a")]),
        assistant(vec![think("2")]),
        Message::user("x"),
    ];
    let normalised = normalise(&history, &NormaliseOptions::without_thinking()).unwrap();
    assert_eq!(short(&normalised), ["u: q", "a: a", "u: x"]);
    assert_eq!(
        normalised.summary()[1],
        "thinking was left out, as asked (2 times)"
    );
}

#[test]
fn an_answer_of_thinking_alone_is_left_out_where_the_cli_would_do_so() {
    let history = [
        Message::user("q"),
        assistant(vec![think("1")]),
        Message::user("r"),
        assistant(vec![think("2")]),
        assistant(vec![Block::text("a")]),
        Message::user("s"),
        assistant(vec![think("3"), call("c")]),
        user(vec![result("c", "x")]),
        assistant(vec![think("4")]),
    ];
    let without = NormaliseOptions {
        leave_out_thinking_alone: true,
        ..NormaliseOptions::default()
    };
    let normalised = normalise(&history, &without).unwrap();
    assert_eq!(
        short(&normalised),
        [
            "u: q, r",
            "a: think 2, a",
            "u: s",
            "a: think 3, call c",
            "u: c=x"
        ]
    );
    let again = normalised.to_messages();
    let again = normalise(&again, &without).unwrap();
    assert_eq!(short(&again), short(&normalised));
}

#[test]
fn blocks_in_the_wrong_role() {
    let history = [
        user(vec![Block::text("q"), think("no"), call("c")]),
        assistant(vec![
            image(),
            Block::text("a"),
            result("c", "r"),
            call("d"),
            result("d", "s"),
        ]),
        Message::user("x"),
    ];
    let normalised = normal(&history);
    assert_eq!(
        short(&normalised),
        [
            "u: q, [turnpass: tool call outside an assistant message]\nt {}",
            "a: a, call d",
            "u: d=s, image, [turnpass: result of a tool call that is not in this conversation]\nr, x",
        ]
    );
    for rule in [
        Rule::MisplacedThinking,
        Rule::MisplacedCall,
        Rule::MisplacedMedia,
    ] {
        assert!(rules(&normalised).contains(&rule), "{rule:?}");
    }
}

#[test]
fn failed_results_hold_text_alone_and_never_nothing() {
    let failed = |id: &str, content| {
        Block::ToolResult(ToolResult {
            id: ToolUseId(id.into()),
            content,
            is_error: true,
        })
    };
    let picture = ResultBlock::Image(Image {
        source: Source::Url {
            url: "https://e.x/i".into(),
        },
    });
    let text = |text: &str| ResultBlock::Text { text: text.into() };
    let history = [
        Message::user("q"),
        assistant(vec![call("1"), call("2"), call("3")]),
        user(vec![
            failed("1", vec![]),
            failed("2", vec![text("x"), picture]),
            failed("3", vec![text(" ")]),
            Block::text("y"),
        ]),
    ];
    let normalised = normal(&history);
    assert_eq!(
        short(&normalised)[2],
        "u: 1=[turnpass: the tool failed without saying why], 2=x, \
         3=[turnpass: the tool failed without saying why], image, y"
    );
    for rule in [Rule::EmptyError, Rule::ErrorMedia, Rule::BlankText] {
        assert!(rules(&normalised).contains(&rule), "{rule:?}");
    }
}

#[test]
fn media_that_the_service_does_not_take() {
    let document = |source| {
        Block::Document(Document {
            source,
            title: None,
        })
    };
    let text = |media_type: &str, data: &str| Source::Text {
        media_type: media_type.into(),
        data: data.into(),
    };
    let history = [user(vec![
        image_of("image/jpg", "AA"),
        image_of("IMAGE/PNG", "AA"),
        image_of("image/svg+xml", "AA"),
        image_of("image/png", ""),
        document(text("text/markdown", "# x")),
        document(text("text/plain", " ")),
        Block::Image(Image {
            source: text("text/plain", "x"),
        }),
    ])];
    let normalised = normal(&history);
    assert_eq!(
        short(&normalised),
        [
            "u: image, image, [turnpass: an image of type image/svg+xml was left out; the service does not take it], \
          [turnpass: an image without bytes was left out; the service does not take it], document, \
          [turnpass: an empty document was left out; the service does not take it], \
          [turnpass: an image given as text was left out; the service does not take it]"
        ]
    );
    assert_eq!(
        *normalised.messages[0].content[0],
        image_of("image/jpeg", "AA")
    );
    assert_eq!(
        rules(&normalised)
            .iter()
            .filter(|r| **r == Rule::MediaType)
            .count(),
        3
    );
}
