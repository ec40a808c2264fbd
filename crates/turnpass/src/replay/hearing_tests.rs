use super::*;
use crate::event::{Plan, PlanKind, StopReason};
use crate::wire::stream_json::{FailureKind, NOISE_LINES};
use serde_json::{Value, json};

fn hearing() -> Hearing {
    let plan = Plan {
        kind: PlanKind::Fresh,
        reason: String::new(),
    };
    let names = |name: &str| name.strip_prefix("mcp__turnpass__").map(str::to_owned);
    let expected = Expected {
        server: Some("turnpass".into()),
        tools: vec!["mcp__turnpass__read".into()],
    };
    let mut hearing = Hearing::new(expected, Turn::new(Box::new(names), plan));
    hearing.asked();
    hearing
}

fn event(event: Value) -> Value {
    json!({"type": "stream_event", "event": event, "parent_tool_use_id": null})
}

fn start() -> Value {
    event(json!({"type": "message_start", "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
        "usage": {"input_tokens": 3, "output_tokens": 1},
    }}))
}

fn block(index: u32, block: Value, delta: Value) -> [Value; 3] {
    [
        event(json!({"type": "content_block_start", "index": index, "content_block": block})),
        event(json!({"type": "content_block_delta", "index": index, "delta": delta})),
        event(json!({"type": "content_block_stop", "index": index})),
    ]
}

fn text(index: u32, text: &str) -> [Value; 3] {
    let delta = json!({"type": "text_delta", "text": text});
    block(index, json!({"type": "text", "text": ""}), delta)
}

fn call(index: u32) -> [Value; 3] {
    let delta = json!({"type": "input_json_delta", "partial_json": "{\"a\":1}"});
    let tool = json!({"type": "tool_use", "id": format!("toolu_{index}"), "name": "mcp__turnpass__read", "input": {}});
    block(index, tool, delta)
}

fn stop(word: Value) -> Value {
    event(
        json!({"type": "message_delta", "delta": {"stop_reason": word, "stop_sequence": null}, "usage": {"output_tokens": 9}}),
    )
}

fn message_stop() -> Value {
    event(json!({"type": "message_stop"}))
}

fn synthetic(error: &str, said: &str) -> Value {
    json!({"type": "assistant", "error": error, "message": {
        "id": "x", "role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": said}],
    }})
}

fn result(reason: &str, more: Value) -> Value {
    let mut result = json!({
        "type": "result", "subtype": "success", "is_error": reason != "completed", "num_turns": 1,
        "terminal_reason": reason, "result": "so",
    });
    result
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    result
}

/// Plays records; gives what each meant, and the events.
fn play(hearing: &mut Hearing, records: &[Value]) -> (Vec<Said>, Vec<Event>) {
    let mut events = Vec::new();
    let said = records
        .iter()
        .filter_map(|record| hearing.line(&record.to_string().into(), &mut events))
        .collect();
    (said, events)
}

fn failed(said: &[Said]) -> Option<ErrorCode> {
    said.iter().find_map(|said| match said {
        Said::Failed(error) => Some(error.code()),
        _ => None,
    })
}

fn answer(blocks: &[[Value; 3]], word: &str) -> Vec<Value> {
    let mut all = vec![start()];
    all.extend(blocks.iter().flatten().cloned());
    all.extend([stop(json!(word)), message_stop()]);
    all
}

#[test]
fn bug_088_calls_are_handed_off_at_the_stop_reason_and_whole() {
    let mut hearing = hearing();
    let records = answer(&[text(0, "I look"), call(1), call(2)], "tool_use");
    let last = records.len() - 1;
    let (said, _) = play(&mut hearing, &records[..last]);
    assert!(matches!(said.last(), Some(Said::HandOff)), "{said:?}");
    let finished = hearing.finish().unwrap();
    assert_eq!(finished.stop, StopReason::ToolUse);
    let calls = |event: &&Event| matches!(event, Event::ToolCall(_));
    assert_eq!(finished.suffix.iter().filter(calls).count(), 2);
}

#[test]
fn bug_088_a_call_that_is_still_open_is_no_hand_off() {
    let mut hearing = hearing();
    let [begin, delta, _] = call(1);
    let records = [
        vec![start()],
        call(0).to_vec(),
        vec![begin, delta, stop(json!("tool_use"))],
    ]
    .concat();
    let (said, _) = play(&mut hearing, &records);
    assert_eq!(failed(&said), Some(ErrorCode::ProtocolBlocks));
    assert!(hearing.finish().is_none());
}

#[test]
fn every_stop_from_which_the_cli_goes_on_is_a_hand_off_and_a_text_waits_for_its_judgement() {
    for word in ["max_tokens", "model_context_window_exceeded", "refusal"] {
        let (said, _) = play(&mut hearing(), &answer(&[text(0, "so far")], word)[..5]);
        assert!(
            matches!(said.last(), Some(Said::HandOff)),
            "{word}: {said:?}"
        );
    }
    let thought = block(
        0,
        json!({"type": "thinking", "thinking": "", "signature": ""}),
        json!({"type": "thinking_delta", "thinking": "hm"}),
    );
    for blocks in [vec![], vec![thought]] {
        let records = answer(&blocks, "end_turn");
        let (said, _) = play(&mut hearing(), &records[..records.len() - 1]);
        assert!(matches!(said.last(), Some(Said::HandOff)), "{said:?}");
    }
    for word in ["end_turn", "stop_sequence", "pause_turn", "brand_new"] {
        let mut hearing = hearing();
        let (said, _) = play(&mut hearing, &answer(&[text(0, "so far")], word));
        assert!(
            matches!(said.last(), Some(Said::Stopped)),
            "{word}: {said:?}"
        );
        let (said, _) = play(&mut hearing, &[result("completed", json!({}))]);
        assert!(matches!(said[..], [Said::Result(Verdict::Completed)]));
        assert!(hearing.finish().is_some());
    }
}

#[test]
fn bug_012_a_recovery_in_the_middle_of_an_answer_is_an_interruption() {
    let retry =
        json!({"type": "system", "subtype": "api_retry", "attempt": 1, "error_status": 529});
    let other = json!({"type": "assistant", "message": {"id": "msg_2", "role": "assistant", "model": "m", "content": []}});
    let fallback = json!({"type": "system", "subtype": "model_refusal_fallback", "original_model": "m", "fallback_model": "n"});
    for record in [retry.clone(), other, fallback.clone(), start()] {
        let mut hearing = hearing();
        let records = [
            vec![start()],
            text(0, "half").to_vec(),
            vec![record.clone()],
        ]
        .concat();
        let (said, _) = play(&mut hearing, &records);
        assert_eq!(
            failed(&said),
            Some(ErrorCode::StreamInterrupted),
            "{record}"
        );
    }
    // Before anything was said the CLI may.
    let (said, _) = play(&mut hearing(), &[retry]);
    assert!(matches!(
        said[..],
        [Said::Retry {
            status: Some(529),
            attempt: 1
        }]
    ));
    let (said, _) = play(&mut hearing(), std::slice::from_ref(&fallback));
    assert_eq!(failed(&said), Some(ErrorCode::ExtraGeneration));
    for (trigger, code) in [
        ("model_not_found", ErrorCode::ModelNotFound),
        ("overloaded", ErrorCode::ExtraGeneration),
    ] {
        let mut fallback = fallback.clone();
        fallback["subtype"] = json!("model_fallback");
        fallback["trigger"] = json!(trigger);
        let (said, _) = play(&mut hearing(), &[fallback]);
        assert_eq!(failed(&said), Some(code));
    }
}

#[test]
fn bug_094_stops_that_the_cli_made_up_end_no_answer() {
    let cut = || [vec![start()], text(0, "half").to_vec()].concat();
    // Without a record of the failure it would go on by itself.
    for end in [
        vec![message_stop()],
        vec![stop(Value::Null), message_stop()],
    ] {
        let mut hearing = hearing();
        let (said, _) = play(&mut hearing, &[cut(), end].concat());
        assert_eq!(failed(&said), Some(ErrorCode::StreamInterrupted));
        assert!(hearing.finish().is_none());
    }
    // With one, the result says what happened.
    let error = synthetic("unknown", "API Error: busy");
    let more = json!({"api_error_status": 529, "api_error_type": "overloaded_error"});
    let end = vec![
        error,
        stop(Value::Null),
        message_stop(),
        result("api_error", more),
    ];
    let mut hearing = hearing();
    let (said, _) = play(&mut hearing, &[cut(), end].concat());
    assert_eq!(failed(&said), None, "{said:?}");
    let Some(Said::Result(Verdict::Failed(failure))) = said.last() else {
        panic!("{said:?}")
    };
    assert_eq!(
        (failure.kind, failure.status),
        (FailureKind::Overloaded, Some(529))
    );
    assert!(hearing.finish().is_none());
}

#[test]
fn nothing_is_an_answer_before_anything_was_asked() {
    let mut hearing = hearing();
    hearing.asked = false;
    let (said, _) = play(&mut hearing, &[start()]);
    assert_eq!(failed(&said), Some(ErrorCode::ProtocolOrder));
}

#[test]
fn what_the_cli_loaded_is_judged_with_the_first_record() {
    let init = json!({
        "type": "system", "subtype": "init", "model": "m", "apiKeySource": "none", "permissionMode": "dontAsk",
        "tools": ["mcp__turnpass__read"], "slash_commands": [], "skills": [], "plugins": [],
        "mcp_servers": [{"name": "turnpass", "status": "connected"}],
    });
    let (said, _) = play(&mut hearing(), std::slice::from_ref(&init));
    assert!(matches!(&said[..], [Said::Init(InitVerdict::Isolated, model)] if model == "m"));
    let mut foreign = init;
    foreign["plugins"] = json!([{"name": "mine", "source": "mine@market"}]);
    let (said, _) = play(&mut hearing(), &[foreign]);
    let [Said::Init(InitVerdict::Refused(error), _)] = &said[..] else {
        panic!("{said:?}")
    };
    assert_eq!(error.code(), ErrorCode::IsolationCustomizations);
}

#[test]
fn bug_006_what_is_new_is_skipped_and_noise_has_a_limit() {
    let mut hearing = hearing();
    let mut records = answer(&[text(0, "so")], "end_turn");
    records.insert(2, json!({"type": "brand_new"}));
    records.insert(2, json!({"type": "system", "subtype": "brand_new"}));
    records.insert(2, event(json!({"type": "brand_new"})));
    let (said, events) = play(&mut hearing, &records);
    assert!(matches!(said.last(), Some(Said::Stopped)), "{said:?}");
    assert!(events.contains(&Event::Text { text: "so".into() }));
    assert_eq!(hearing.unknown.total(), 3);
    let mut out = Vec::new();
    let noise: Vec<_> = (0..=NOISE_LINES)
        .filter_map(|_| hearing.line(&Bytes::from_static(b"warning: x"), &mut out))
        .collect();
    assert_eq!(failed(&noise), Some(ErrorCode::ProtocolRecord));
}

#[test]
fn bug_011_each_text_comes_once() {
    let mut hearing = hearing();
    let mut records = answer(&[text(0, "once")], "end_turn");
    let repeated = json!({"type": "assistant", "message": {
        "id": "msg_1", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "once"}],
    }});
    records.insert(3, repeated);
    records.push(result("completed", json!({"result": "once"})));
    let (_, events) = play(&mut hearing, &records);
    let texts = events
        .iter()
        .filter(|event| matches!(event, Event::Text { .. }));
    assert_eq!(texts.count(), 1);
    assert_eq!(hearing.finish().unwrap().message.text(), "once");
}
