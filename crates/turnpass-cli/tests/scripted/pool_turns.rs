//! Turns of the pool's CLI that go wrong: what is taken back is gone, and what is not known is not trusted.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::{Event, StateOrder, StopReason};
use turnpass::{ErrorCode, Request};
use turnpass_lab::cli::RecordedRun;

use crate::stage::{
    Heard, Stage, WARM, ask, ask_with_tools, assert_valid, go_on, hear, host_messages, is_text,
    told, until,
};
use crate::turns;

/// From the end of a generation until everything of its process is gone.
const GONE: Duration = Duration::from_secs(6);

/// A run that behaves like the real CLI, for the start after a bad one.
pub(crate) fn emulator() -> Value {
    json!({"emulator": {}})
}

/// An event of the stream, as the CLI tells it.
pub(crate) fn event(event: Value) -> Value {
    json!({"send": {"type": "stream_event", "event": event, "session_id": "s", "uuid": "{{uuid}}", "parent_tool_use_id": null}})
}

pub(crate) fn message_start(id: &str) -> Value {
    event(
        json!({"type": "message_start", "message": {"id": id, "type": "message", "role": "assistant",
        "model": "m", "content": [], "stop_reason": null, "usage": {"input_tokens": 3, "output_tokens": 1}}}),
    )
}

pub(crate) fn text_block(index: u32, text: &str) -> Vec<Value> {
    vec![
        event(
            json!({"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}),
        ),
        event(
            json!({"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}),
        ),
        event(json!({"type": "content_block_stop", "index": index})),
    ]
}

pub(crate) fn call_block(index: u32, id: &str) -> Vec<Value> {
    vec![
        event(json!({"type": "content_block_start", "index": index,
            "content_block": {"type": "tool_use", "id": id, "name": "mcp__turnpass__read", "input": {}}})),
        event(
            json!({"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
        ),
        event(json!({"type": "content_block_stop", "index": index})),
    ]
}

pub(crate) fn message_end(stop: &str) -> Vec<Value> {
    vec![
        event(
            json!({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": null}, "usage": {"output_tokens": 9}}),
        ),
        event(json!({"type": "message_stop"})),
    ]
}

/// A message of the model with calls.
pub(crate) fn calling(id: &str, calls: &[&str]) -> Vec<Value> {
    let mut steps = vec![message_start(id)];
    for (index, call) in (0..).zip(calls) {
        steps.extend(call_block(index, call));
    }
    steps.extend(message_end("tool_use"));
    steps
}

/// The CLI's `tools/call` of a call.
pub(crate) fn tools_call(request: &str, rpc: u32, call: &str) -> Value {
    json!({"send": {"type": "control_request", "request_id": request, "request": {
    "subtype": "mcp_message", "server_name": "turnpass", "message": {
        "jsonrpc": "2.0", "id": rpc, "method": "tools/call",
        "params": {"name": "read", "arguments": {}, "_meta": {"claudecode/toolUseId": call}},
    }}}})
}

pub(crate) fn tool_result(call: &str) -> Value {
    json!({"send": {"type": "user", "session_id": "s", "uuid": "{{uuid}}", "parent_tool_use_id": null,
    "message": {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call, "content": "given up", "is_error": true},
    ]}}})
}

pub(crate) fn result(reason: &str) -> Value {
    let failed = reason != "completed";
    json!({"send": {"type": "result", "subtype": if failed { "error_during_execution" } else { "success" },
        "is_error": failed, "terminal_reason": reason, "num_turns": 1, "result": "", "session_id": "s", "uuid": "{{uuid}}"}})
}

/// Lines that the process was given, of one type.
pub(crate) fn lines(run: &RecordedRun, kind: &str) -> Vec<Value> {
    let lines = run.stdin.iter().map(|line| line.json());
    lines.filter(|line| line["type"] == kind).collect()
}

fn controls(run: &RecordedRun, subtype: &str) -> usize {
    let of = |line: &&Value| line["request"]["subtype"] == subtype;
    lines(run, "control_request").iter().filter(of).count()
}

/// Another text in place of results.
fn instead(request: &Request, heard: &Heard, text: &str) -> Request {
    let mut next = request.clone();
    let message = heard.done().message.clone();
    let results: Vec<_> = message
        .tool_calls()
        .map(|call| ToolResult::error(call.id.clone(), "not run"))
        .collect();
    next.messages.push(message);
    next.messages.push(Message::results(results));
    next.messages.push(Message::user(text));
    next
}

#[tokio::test]
async fn a_call_that_the_cli_gives_up_by_itself_is_answered_all_the_same() {
    let mut run = json!({"steps": [
        {"answer_controls": [{"subtype": "initialize"}, {"subtype": "mcp_status"},
            {"subtype": "rewind_conversation", "response": {"rewound": false}}, {"subtype": "apply_flag_settings"}]},
        {"expect": {"type": "user"}}, {"send_init": null},
    ]});
    let steps = run["steps"].as_array_mut().unwrap();
    steps.extend(calling("msg_1", &["toolu_1"]));
    steps.push(tools_call("call-1", 7, "toolu_1"));
    // It is interrupted, and tells the call's end without giving the call up first.
    steps.extend([
        json!({"expect": {"request": {"subtype": "interrupt"}}}),
        tool_result("toolu_1"),
        result("aborted_tools"),
        json!("hang"),
    ]);
    let stage = Stage::json(json!({"runs": [run, emulator()]}));
    let provider = stage.pool(|_| {});
    let request = ask_with_tools("x");
    let heard = told(&provider, request.clone()).await;
    let next = instead(&request, &heard, "[[say next]]");
    let heard = told(&provider, next).await;
    assert_eq!(heard.text(), "next", "{heard:?}");
    let run = &stage.recording().runs[0];
    let answers = lines(run, "control_response");
    let answered = answers
        .iter()
        .filter(|line| line["response"]["request_id"] == "call-1");
    assert_eq!(answered.count(), 1, "{answers:#?}");
}

#[tokio::test]
async fn a_turn_that_ran_and_cannot_be_found_again_retires_the_process() {
    let run = turns(
        WARM,
        [
            message_start("msg_1"),
            text_block(0, "half").remove(0),
            text_block(0, "half").remove(1),
            json!({"expect": {"type": "control_request"}}),
            result("aborted_streaming"),
        ],
    );
    let mut run = run;
    run["steps"][0] = json!({"answer_controls": [
        {"subtype": "initialize"}, {"subtype": "apply_flag_settings"},
        {"subtype": "rewind_conversation", "response": {"rewound": false, "reason": "target_not_found"}},
    ]});
    let stage = Stage::json(json!({"runs": [run, emulator()]}));
    let provider = stage.pool(|_| {});
    let mut dropped = provider.generate(ask("x"));
    until(&mut dropped, "text", is_text).await;
    drop(dropped);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(stage.recording().runs.len(), 2, "the process is retired");
}

#[tokio::test]
async fn bug_085_a_resume_that_begins_another_conversation_is_told_anew() {
    let stage = Stage::emulator();
    let mut request = ask("[[say first]]");
    request.session.0 = "a".into();
    let provider = stage.pool(|_| {});
    let heard = told(&provider, request.clone()).await;
    let mut next = go_on(&request, heard.done());
    let StateOrder::Keep { state } = heard.done().state.clone() else {
        panic!("no state: {heard:?}");
    };
    next.state = Some(state);
    provider.shutdown().await.unwrap();
    let elsewhere = json!({"steps": ["answer_controls", {"stderr": "No conversation found with session ID: x\n"},
        {"loop": [{"expect": {"type": "user"}},
            {"send_init": {"session_id": "00000000-0000-4000-8000-000000000001"}},
            {"post": {}}]}]});
    let script = json!({"runs": [elsewhere, {"emulator": {}}]});
    stage.change(turnpass_lab::cli::Script::parse(&script.to_string()).unwrap());
    let provider = stage.pool(|_| {});
    let heard = told(&provider, next).await;
    assert_eq!(heard.text(), "going on");
    let sent = stage.sent();
    let last = host_messages(sent.last().unwrap());
    assert_eq!(last.len(), 3, "the whole history: {last:#?}");
    assert_eq!(stage.recording().runs.len(), 3);
}

#[tokio::test]
async fn bug_067_text_beside_results_waits_for_no_call_that_has_not_come() {
    let mut steps = calling("msg_1", &["toolu_1", "toolu_2"]);
    steps.push(tools_call("call-1", 7, "toolu_1"));
    let run = turns(WARM, steps);
    let stage = Stage::json(json!({"runs": [run, emulator()]}));
    let provider = stage.pool(|_| {});
    let request = ask_with_tools("x");
    let heard = told(&provider, request.clone()).await;
    let mut next = go_on(&request, heard.done());
    let last = next.messages.last_mut().unwrap();
    last.content
        .push(turnpass::conversation::Block::text("[[say next]]"));
    let heard = told(&provider, next).await;
    assert_eq!(heard.text(), "next", "{heard:?}");
    let run = &stage.recording().runs[0];
    for answer in lines(run, "control_response") {
        assert!(
            !answer.to_string().contains("claude/endTurn"),
            "the second call's result would be lost: {answer}"
        );
    }
}

#[tokio::test]
async fn a_process_that_may_ask_again_is_killed_whether_the_host_reads_or_not() {
    let mut steps = vec![message_start("msg_1")];
    for index in 0..30 {
        steps.extend(text_block(index, "words that nobody reads"));
    }
    steps.extend(message_end("max_tokens"));
    steps.push(json!("hang"));
    let mut run = turns(WARM, steps);
    // It never takes the closing of the gate.
    run["steps"][0] = json!({"answer_controls": [{"subtype": "initialize"},
        {"subtype": "apply_flag_settings", "times": 2}, {"subtype": "apply_flag_settings", "ignore": true}]});
    let stage = Stage::json(json!({"runs": [run]}));
    let provider = stage.pool(|_| {});
    let mut unread = provider.generate(ask("x"));
    until(&mut unread, "text", is_text).await;
    // The host leaves exactly as many unread as may wait, so that the next one waits with us.
    for _ in 0..13 {
        unread.next().await;
    }
    stage.all_gone(GONE).await;
    let heard = hear(unread).await;
    assert_eq!(heard.stop(), &StopReason::MaxTokens);
}

#[tokio::test]
async fn bug_012_the_gate_is_closed_again_when_another_model_answers() {
    let mut steps = vec![message_start("msg_1")];
    steps.extend(text_block(0, "half"));
    steps.push(json!({"send": {"type": "system", "subtype": "model_refusal_fallback", "trigger": "refusal",
        "direction": "retry", "original_model": "a", "fallback_model": "b", "session_id": "s", "uuid": "u"}}));
    steps.push(message_start("msg_2"));
    steps.extend(text_block(0, "whole"));
    steps.push(json!({"sleep_ms": 300}));
    steps.extend(message_end("end_turn"));
    steps.push(result("completed"));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
    let provider = stage.pool(|_| {});
    let heard = told(&provider, ask("x")).await;
    assert_eq!(heard.done().message.text(), "whole");
    assert_eq!(
        heard.count(|event| matches!(event, Event::Retracted { .. })),
        1
    );
    let run = &stage.recording().runs[0];
    let limits: Vec<_> = lines(run, "control_request")
        .iter()
        .filter_map(|line| {
            let env = &line["request"]["settings"]["env"];
            env["CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE"]
                .as_str()
                .map(str::to_owned)
        })
        .collect();
    assert_eq!(limits, ["50000000", "1", "50000000", "1"]);
}

#[tokio::test]
async fn a_failure_after_an_answer_was_taken_back_says_that_something_was_seen() {
    let mut steps = vec![message_start("msg_1")];
    steps.extend(text_block(0, "half"));
    steps.push(json!({"send": {"type": "system", "subtype": "model_refusal_fallback", "trigger": "refusal",
        "direction": "retry", "original_model": "a", "fallback_model": "b", "session_id": "s", "uuid": "u"}}));
    steps.push(json!({"exit": 1}));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
    let heard = told(&stage.pool(|_| {}), ask("x")).await;
    assert!(heard.failed(ErrorCode::ProcessExit).output_seen());
}

#[tokio::test]
async fn bug_084_a_failure_that_came_while_the_tool_ran_is_the_next_call_s() {
    let mut steps = calling("msg_1", &["toolu_1"]);
    steps.push(tools_call("call-1", 7, "toolu_1"));
    steps.push(
        json!({"send": {"type": "assistant", "session_id": "s", "uuid": "{{uuid}}", "error": "rate_limit",
        "message": {"id": "x", "type": "message", "role": "assistant", "model": "<synthetic>",
            "content": [{"type": "text", "text": "API Error: 429"}]}}}),
    );
    steps.push(json!({"send": {"type": "result", "subtype": "success", "is_error": true, "api_error_status": 429,
        "terminal_reason": "api_error", "num_turns": 1, "result": "API Error: 429", "session_id": "s", "uuid": "u"}}));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps), emulator()]}));
    let provider = stage.pool(|_| {});
    let request = ask_with_tools("x");
    let heard = told(&provider, request.clone()).await;
    let began = Instant::now();
    let next = go_on(&request, heard.done());
    told(&provider, next.clone())
        .await
        .failed(ErrorCode::RateLimit);
    assert!(began.elapsed() < Duration::from_secs(10));
    let mut again = next;
    again.messages.push(Message::user("[[say recovered]]"));
    let heard = told(&provider, again).await;
    assert_eq!(heard.text(), "recovered", "{heard:?}");
}

#[tokio::test]
async fn bug_076_what_an_aborted_turn_still_says_is_in_no_later_answer() {
    // The old turn's end, and more of its words, come after the next line.
    let stage = Stage::json(json!({"runs": [
        {"steps": [
            {"answer_controls": [{"subtype": "initialize"}, {"subtype": "apply_flag_settings"}, {"subtype": "rewind_conversation", "response": {"rewound": true}}, {"subtype": "interrupt"}]},
            {"expect": {"type": "user"}}, {"send_init": null}, message_start("msg_1"),
            text_block(0, "OLD").remove(0), text_block(0, "OLD").remove(1),
            result("aborted_streaming"),
            {"expect": {"type": "user"}},
            text_block(0, "OLD").remove(1), text_block(0, "OLD").remove(1),
            result("completed"),
            "hang",
        ]},
        emulator(),
    ]}));
    let provider = stage.pool(|_| {});
    let mut dropped = provider.generate(ask("x"));
    until(&mut dropped, "text", is_text).await;
    drop(dropped);
    let heard = told(&provider, ask("[[say new]]")).await;
    assert!(!heard.text().contains("OLD"), "{heard:?}");
    if heard.error.is_none() {
        assert_eq!(heard.text(), "new");
    }
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

#[tokio::test]
async fn bug_077_an_interrupt_without_an_answer_costs_its_process_and_nobody_s_time() {
    let stage = Stage::json(json!({"runs": [
        {"steps": [
            {"answer_controls": [{"subtype": "initialize"}, {"subtype": "apply_flag_settings"}, {"subtype": "interrupt", "ignore": true}]},
            {"expect": {"type": "user"}}, {"send_init": null}, {"post": {"reply": "hold"}},
            "hang",
        ]},
        emulator(),
    ]}));
    let provider = stage.pool(|_| {});
    let dropped = provider.generate(ask("[[say x]] [[stall closed]]"));
    stage.upstream.wait_requests(1).await.unwrap();
    drop(dropped);
    let began = Instant::now();
    let heard = told(&provider, ask("[[say next]]")).await;
    assert_eq!(heard.text(), "next");
    assert!(began.elapsed() < Duration::from_secs(12));
    let first = &stage.recording().runs[0];
    assert_eq!(controls(first, "interrupt"), 1);
    // The service sees that the answer is not wanted any more.
    let end = Instant::now() + GONE;
    while stage.sent()[0].reply.ending.is_none() {
        assert!(Instant::now() < end, "the connection is still open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn bug_077_a_generation_dropped_at_any_point_does_not_spoil_the_next_of_the_pool() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let mut request = ask("[[say first]]");
    let heard = told(&provider, request.clone()).await;
    request = go_on(&request, heard.done());
    request.messages.pop();
    for at in 0..12 {
        let mut old = request.clone();
        old.messages
            .push(Message::user(format!("[[say old {at}]] [[chunk 1 ms 2]]")));
        let generation = provider.generate(old);
        let heard = tokio::time::timeout(Duration::from_millis(at * 4), hear(generation)).await;
        drop(heard);
        let mut new = request.clone();
        new.messages
            .push(Message::user(format!("[[say new {at}]]")));
        let heard = told(&provider, new).await;
        assert_eq!(heard.text(), format!("new {at}"));
        let sent = stage.sent();
        assert_eq!(
            host_messages(sent.last().unwrap()).len(),
            3,
            "nothing of what was dropped"
        );
    }
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn a_control_request_without_an_answer_retires_the_pool_s_process_after_thirty_seconds() {
    let mut steps = vec![
        json!({"expect": {"type": "user"}}),
        json!({"send_init": null}),
    ];
    steps.push(message_start("msg_1"));
    steps.extend(text_block(0, "half"));
    // It lives on, and says so.
    steps.push(text_block(1, "more").remove(0));
    let more = text_block(1, "more").remove(1);
    steps.push(json!({"repeat": {"times": 100, "steps": [{"sleep_ms": 500}, more]}}));
    let run = json!({"steps": [{"answer_controls": [{"subtype": "initialize"},
        {"subtype": "apply_flag_settings", "times": 1}, {"subtype": "apply_flag_settings", "ignore": true}]}]});
    let mut run = run;
    run["steps"].as_array_mut().unwrap().extend(steps);
    let stage = Stage::json(json!({"runs": [run, emulator()]}));
    let provider = stage.pool(|_| {});
    let heard = told(&provider, ask("x")).await;
    heard.failed(ErrorCode::ControlTimeout);
    assert!((25..45).contains(&heard.took.as_secs()), "{:?}", heard.took);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

#[tokio::test]
async fn a_call_that_the_cli_gave_up_is_no_conversation_that_is_too_long() {
    let mut steps = calling("msg_1", &["toolu_1"]);
    steps.push(tools_call("call-1", 7, "toolu_1"));
    // It gives the call up and would go on with that, which the closed gate forbids.
    steps.push(tool_result("toolu_1"));
    steps.push(json!({"send": {"type": "assistant", "session_id": "s", "uuid": "{{uuid}}", "error": "invalid_request",
        "message": {"id": "x", "type": "message", "role": "assistant", "model": "<synthetic>",
            "content": [{"type": "text", "text": "Prompt is too long"}]}}}));
    steps.push(json!({"send": {"type": "result", "subtype": "success", "is_error": true, "terminal_reason": "blocking_limit",
        "num_turns": 1, "result": "Prompt is too long", "session_id": "s", "uuid": "u"}}));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps), emulator()]}));
    let provider = stage.pool(|_| {});
    let request = ask_with_tools("x");
    let heard = told(&provider, request.clone()).await;
    let next = go_on(&request, heard.done());
    let heard = told(&provider, next.clone()).await;
    assert!(heard.failed(ErrorCode::StreamInterrupted).is_retryable());
    let mut again = next;
    again.messages.push(Message::user("[[say recovered]]"));
    assert_eq!(told(&provider, again).await.text(), "recovered");
    assert_valid(&stage.sent());
}
