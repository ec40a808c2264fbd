use super::*;
use crate::event::PlanKind;
use crate::wire::messages::decode;
use proptest::prelude::*;

fn turn() -> Turn {
    let names: ToolNames = Box::new(|name| {
        let host = name.strip_prefix("mcp__turnpass__")?;
        ["read", "write"].contains(&host).then(|| host.to_owned())
    });
    Turn::new(
        names,
        Plan {
            kind: PlanKind::Fresh,
            reason: "test".into(),
        },
    )
}

fn play(turn: &mut Turn, events: &[&str]) -> Result<Vec<Event>, TurnError> {
    let mut out = Vec::new();
    for event in events {
        turn.push(&decode(event.as_bytes()).unwrap(), &mut out)?;
    }
    Ok(out)
}

const START: &str = r#"{"type":"message_start","message":{"id":"msg_1","model":"m-1","usage":{"input_tokens":5,"cache_read_input_tokens":null}}}"#;
const STOP: &str = r#"{"type":"message_stop"}"#;

fn block(index: u32, block: &str) -> String {
    format!(r#"{{"type":"content_block_start","index":{index},"content_block":{block}}}"#)
}

fn delta(index: u32, delta: &str) -> String {
    format!(r#"{{"type":"content_block_delta","index":{index},"delta":{delta}}}"#)
}

fn close(index: u32) -> String {
    format!(r#"{{"type":"content_block_stop","index":{index}}}"#)
}

fn ended(reason: &str) -> String {
    format!(
        r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}},"usage":{{"output_tokens":9}}}}"#
    )
}

fn text(index: u32, text: &str) -> Vec<String> {
    vec![
        block(index, r#"{"type":"text","text":""}"#),
        delta(
            index,
            &format!(
                r#"{{"type":"text_delta","text":{}}}"#,
                serde_json::json!(text)
            ),
        ),
        close(index),
    ]
}

fn tool(index: u32, id: &str, name: &str, pieces: &[&str]) -> Vec<String> {
    let head = format!(r#"{{"type":"tool_use","id":"{id}","name":"{name}","input":{{}}}}"#);
    let mut events = vec![block(index, &head)];
    for piece in pieces {
        let piece = serde_json::json!(piece);
        events.push(delta(
            index,
            &format!(r#"{{"type":"input_json_delta","partial_json":{piece}}}"#),
        ));
    }
    events.push(close(index));
    events
}

fn whole(parts: &[Vec<String>], reason: &str) -> Vec<String> {
    let mut events = vec![START.to_owned()];
    events.extend(parts.iter().flatten().cloned());
    events.push(ended(reason));
    events.push(STOP.to_owned());
    events
}

fn refs(events: &[String]) -> Vec<&str> {
    events.iter().map(String::as_str).collect()
}

#[test]
fn text_comes_at_once_and_the_message_at_the_end() {
    let mut turn = turn();
    let out = play(&mut turn, &refs(&whole(&[text(0, "hello")], "end_turn"))).unwrap();
    assert!(matches!(&out[0], Event::Started { model, .. } if model.0 == "m-1"));
    assert!(out.contains(&Event::Text {
        text: "hello".into()
    }));
    let done = turn.finish().unwrap();
    assert_eq!((done.stop, done.suffix.len()), (StopReason::EndTurn, 0));
    assert_eq!(done.message, Message::assistant("hello"));
    assert_eq!(
        (done.usage.input_tokens, done.usage.output_tokens),
        (Some(5), Some(9))
    );
}

#[test]
fn signed_thinking_comes_before_the_call_and_stays_byte_for_byte() {
    let thinking = vec![
        block(0, r#"{"type":"thinking","thinking":"","signature":""}"#),
        delta(0, r#"{"type":"thinking_delta","thinking":" a\r\n"}"#),
        delta(0, r#"{"type":"signature_delta","signature":"c2ln"}"#),
        close(0),
    ];
    let call = tool(1, "t1", "mcp__turnpass__write", &["{\"a\"", ":1}"]);
    let mut turn = turn();
    let out = play(&mut turn, &refs(&whole(&[thinking, call], "tool_use"))).unwrap();
    let kept = SignedThinking {
        thinking: " a\r\n".into(),
        signature: "c2ln".into(),
    };
    assert!(out.contains(&Event::ThinkingBlock(kept.clone())));
    assert!(
        !out.iter().any(|event| matches!(event, Event::ToolCall(_))),
        "held back"
    );
    let done = turn.finish().unwrap();
    assert_eq!(done.message.content[0], Block::Thinking(kept));
    let Event::ToolCall(call) = &done.suffix[0] else {
        panic!("{:?}", done.suffix)
    };
    assert_eq!(
        (call.name.as_str(), call.input.as_str()),
        ("write", "{\"a\":1}")
    );
}

#[test]
fn bug_100_hidden_thinking_makes_no_empty_card_and_keeps_its_signature() {
    let hidden = vec![
        block(0, r#"{"type":"thinking","thinking":"","signature":""}"#),
        delta(0, r#"{"type":"signature_delta","signature":"s"}"#),
        close(0),
    ];
    let mut turn = turn();
    let out = play(
        &mut turn,
        &refs(&whole(&[hidden, text(1, "x")], "end_turn")),
    )
    .unwrap();
    assert!(
        !out.iter()
            .any(|event| matches!(event, Event::Thinking { .. }))
    );
    assert!(
        matches!(&turn.finish().unwrap().message.content[0], Block::Thinking(t) if t.thinking.is_empty())
    );
}

#[test]
fn what_follows_a_call_waits_with_it_in_order() {
    let parts = [
        text(0, "before"),
        tool(1, "t1", "mcp__turnpass__read", &[]),
        text(2, "after"),
        tool(3, "t2", "mcp__turnpass__read", &["{}"]),
    ];
    let mut turn = turn();
    let out = play(&mut turn, &refs(&whole(&parts, "tool_use"))).unwrap();
    let texts: Vec<_> = out
        .iter()
        .filter(|event| matches!(event, Event::Text { .. }))
        .collect();
    assert_eq!(texts.len(), 1);
    let suffix = turn.finish().unwrap().suffix;
    assert!(matches!(
        &suffix[..],
        [Event::ToolCall(a), Event::Text { text }, Event::ToolCall(b)]
            if a.id.0 == "t1" && text == "after" && b.id.0 == "t2"
    ));
}

#[test]
fn bug_068_a_tool_that_was_not_offered_is_rejected_and_stays_in_the_message() {
    for name in ["bash", "Bash", "mcp__host__read", "", "mcp__turnpass__nope"] {
        let mut turn = turn();
        play(
            &mut turn,
            &refs(&whole(&[tool(0, "t", name, &["{}"])], "tool_use")),
        )
        .unwrap();
        let done = turn.finish().unwrap();
        assert!(
            matches!(
                &done.suffix[..],
                [Event::ToolRejected {
                    reason: Rejection::UnknownTool,
                    ..
                }]
            ),
            "{name}"
        );
        assert_eq!(done.message.tool_calls().count(), 1);
    }
}

#[test]
fn input_that_does_not_parse_is_an_argument_decode_error_with_its_text() {
    let mut turn = turn();
    play(
        &mut turn,
        &refs(&whole(
            &[tool(0, "t", "mcp__turnpass__read", &["{\"a\":"])],
            "tool_use",
        )),
    )
    .unwrap();
    let done = turn.finish().unwrap();
    let [
        Event::ToolRejected {
            call,
            reason: Rejection::ArgumentDecode { raw },
        },
    ] = &done.suffix[..]
    else {
        panic!("{:?}", done.suffix)
    };
    assert_eq!(raw, "{\"a\":");
    assert_eq!(
        call.input.as_str(),
        r#"{"__unparsedToolInput":{"len":5,"raw":"{\"a\":"}}"#
    );
}

#[test]
fn bug_006_unknown_kinds_are_skipped_and_counted() {
    let events = [
        START.to_owned(),
        r#"{"type":"brand_new","x":1}"#.to_owned(),
        block(0, r#"{"type":"brand_new"}"#),
        delta(0, r#"{"type":"brand_new_delta"}"#),
        close(0),
        block(1, r#"{"type":"text","text":""}"#),
        delta(1, r#"{"type":"brand_new_delta"}"#),
        delta(1, r#"{"type":"text_delta","text":"ok"}"#),
        close(1),
        ended("end_turn"),
        STOP.to_owned(),
    ];
    let mut turn = turn();
    play(&mut turn, &refs(&events)).unwrap();
    assert_eq!(turn.finish().unwrap().message.text(), "ok");
    assert_eq!(turn.unknown(), 4);
}

#[test]
fn structural_violations_fail_closed() {
    let b0 = || block(0, r#"{"type":"text","text":""}"#);
    let t0 = || delta(0, r#"{"type":"text_delta","text":"x"}"#);
    let cases: Vec<Vec<String>> = vec![
        vec![START.into(), START.into()],
        vec![b0()],
        vec![START.into(), t0()],
        vec![START.into(), b0(), b0()],
        vec![START.into(), b0(), close(0), t0()],
        vec![START.into(), b0(), close(0), close(0)],
        vec![START.into(), close(3)],
        vec![
            START.into(),
            b0(),
            delta(0, r#"{"type":"input_json_delta","partial_json":"1"}"#),
        ],
        vec![START.into(), b0(), ended("end_turn"), STOP.into()],
        vec![START.into(), STOP.into()],
        [whole(&[], "end_turn"), vec![START.into()]].concat(),
        [whole(&[], "end_turn"), vec![STOP.into()]].concat(),
    ];
    for events in cases {
        let mut turn = turn();
        assert!(play(&mut turn, &refs(&events)).is_err(), "{events:?}");
    }
}

#[test]
fn bug_115_every_stop_reason_is_passed_on() {
    let cases = [
        ("end_turn", StopReason::EndTurn),
        ("tool_use", StopReason::ToolUse),
        ("max_tokens", StopReason::MaxTokens),
        ("stop_sequence", StopReason::StopSequence { sequence: None }),
        ("pause_turn", StopReason::PauseTurn),
        (
            "model_context_window_exceeded",
            StopReason::ContextWindowExceeded,
        ),
        (
            "refusal",
            StopReason::Refusal {
                category: None,
                explanation: None,
            },
        ),
        (
            "new_word",
            StopReason::Other {
                word: "new_word".into(),
            },
        ),
    ];
    for (word, wanted) in cases {
        let mut turn = turn();
        play(&mut turn, &refs(&whole(&[text(0, "x")], word))).unwrap();
        assert_eq!(turn.finish().unwrap().stop, wanted);
    }
}

#[test]
fn bug_013_a_late_text_stop_keeps_the_order_of_indices() {
    let events = [
        START.to_owned(),
        block(0, r#"{"type":"text","text":""}"#),
        delta(0, r#"{"type":"text_delta","text":"a"}"#),
        block(
            1,
            r#"{"type":"tool_use","id":"t","name":"mcp__turnpass__read","input":{}}"#,
        ),
        close(0),
        close(1),
        ended("tool_use"),
        STOP.to_owned(),
    ];
    let mut turn = turn();
    play(&mut turn, &refs(&events)).unwrap();
    let content = turn.finish().unwrap().message.content;
    assert!(matches!(
        &content[..],
        [Block::Text { .. }, Block::ToolUse(_)]
    ));
}

#[test]
fn bug_088_nothing_is_released_before_the_message_ends() {
    let events = whole(
        &[
            text(0, "x"),
            tool(1, "a", "mcp__turnpass__read", &["{\"n\":1}"]),
            tool(2, "b", "mcp__turnpass__read", &["{\"n\":2}"]),
        ],
        "tool_use",
    );
    for cut in 0..events.len() {
        let mut turn = turn();
        let out = play(&mut turn, &refs(&events[..cut])).unwrap();
        assert!(
            !out.iter().any(|event| matches!(event, Event::ToolCall(_))),
            "cut at {cut}"
        );
        assert!(turn.finish().is_none(), "cut at {cut}");
        assert_eq!(turn.partial().tool_calls().count(), 0);
    }
}

proptest! {
    #[test]
    fn any_split_of_a_text_gives_the_same_message(pieces in proptest::collection::vec(".{0,8}", 0..20)) {
        let mut events = vec![START.to_owned(), block(0, r#"{"type":"text","text":""}"#)];
        for piece in &pieces {
            events.push(delta(0, &format!(r#"{{"type":"text_delta","text":{}}}"#, serde_json::json!(piece))));
        }
        events.extend([close(0), ended("end_turn"), STOP.to_owned()]);
        let mut turn = turn();
        let out = play(&mut turn, &refs(&events)).unwrap();
        let shown: String = out.iter().filter_map(|event| match event {
            Event::Text { text } => Some(text.as_str()),
            _ => None,
        }).collect();
        prop_assert_eq!(&shown, &pieces.concat());
        prop_assert_eq!(turn.finish().unwrap().message.text(), shown);
    }
}
