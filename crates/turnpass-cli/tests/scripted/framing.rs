//! Lines of the CLI: long, many, new, torn and odd ones.

use serde_json::{Value, json};
use turnpass::ErrorCode;
use turnpass::event::StopReason;
use turnpass_lab::cli::{BigFill, BigKind, BigLine};
use turnpass_lab::scenario::Reply;

use crate::stage::{
    MODES, PER_REQUEST, Stage, WARM, WARM_MCP, ask, ask_with_tools, assert_valid, go_on, told,
};
use crate::{good, post, posted, turns};

const MIB: usize = 1024 * 1024;

fn big(bytes: usize) -> Value {
    json!({"send_big": {"bytes": bytes}})
}

#[tokio::test]
async fn bug_001_lines_up_to_the_limit_arrive_whole() {
    for (row, sizes) in [
        (PER_REQUEST, vec![3 * MIB, 12 * MIB, 16 * MIB]),
        (WARM, vec![MIB / 2, MIB]),
    ] {
        let mut steps: Vec<_> = sizes.into_iter().map(big).collect();
        steps.push(post(row));
        let stage = Stage::json(json!({"runs": [turns(row, steps)]}));
        let heard = told(&stage.provider(row), ask("[[say whole]]")).await;
        assert_eq!(
            (heard.text(), heard.stop()),
            ("whole".to_owned(), &StopReason::EndTurn)
        );
    }
}

#[tokio::test]
async fn bug_001_a_line_above_the_limit_is_one_error_and_the_next_call_works() {
    for (row, limit) in [(PER_REQUEST, 16 * MIB), (WARM, MIB)] {
        let stage =
            Stage::json(json!({"runs": [turns(row, [big(limit + 1), post(row)]), good(row)]}));
        let provider = stage.provider(row);
        let heard = told(&provider, ask("[[say x]]")).await;
        let error = heard.failed(ErrorCode::LineTooLong);
        assert!(error.detail().contains(&limit.to_string()), "{error}");
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
        let runs = stage.recording().runs;
        assert_eq!(runs.len(), 2, "the process is retired");
    }
}

#[tokio::test]
async fn bug_002_forty_megabytes_of_small_lines_in_one_turn() {
    for row in MODES {
        let line = json!({
            "type": "stream_event", "uuid": "u", "session_id": "s", "parent_tool_use_id": null,
            "event": {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x".repeat(2000)}},
        });
        let flood = json!({"repeat": {"times": 20_000, "steps": [{"send": line.to_string()}]}});
        let stage = Stage::json(json!({"runs": [turns(row, [flood, post(row)])]}));
        let heard = told(&stage.provider(row), ask("[[say through]]")).await;
        assert_eq!(heard.text(), "through");
    }
}

#[tokio::test]
async fn bug_004_half_a_pair_in_a_line_of_the_cli() {
    for row in MODES {
        let line = r#"{"type":"assistant","uuid":"u","session_id":"s","message":{"id":"m","type":"message","role":"assistant","model":"x","content":[{"type":"text","text":"ok \ud83d"}]}}"#;
        let stage = Stage::json(json!({"runs": [turns(row, [json!({"send": line}), post(row)])]}));
        assert_eq!(
            told(&stage.provider(row), ask("[[say on]]")).await.text(),
            "on"
        );
    }
}

/// Records that nobody knows yet, and known ones with more or less in them.
fn odd_records() -> Vec<Value> {
    let event = |event: Value| json!({"type": "stream_event", "event": event, "session_id": "s", "uuid": "u"});
    let lines = [
        json!({"type": "brand_new"}),
        json!({"type": "system", "subtype": "brand_new", "x": [1]}),
        event(json!({"type": "brand_new"})),
        event(
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "brand_new"}}),
        ),
        event(json!({"type": "content_block_delta", "index": 0, "delta": {"type": "brand_new"}})),
        json!({"type": "rate_limit_event", "rate_limit_info": {"status": "brand_new", "more": 1}}),
        json!({"type": "tool_progress", "tool_use_id": "t", "elapsed_time_seconds": 3}),
        json!({"type": "system", "subtype": "status", "status": null}),
        json!({"type": "user", "message": {"role": "user", "content": "hi"}}),
        json!({"type": "assistant", "message": {"role": "assistant", "content": "hi", "usage": {"input_tokens": null}}}),
        json!({"type": "assistant", "message": {"role": "assistant", "model": "m", "content": [{"type": "brand_new"}], "new": {}}}),
        json!({"no_type": true}),
    ];
    lines
        .into_iter()
        .map(|line| json!({"send": line}))
        .collect()
}

#[tokio::test]
async fn bug_006_and_007_records_that_are_new_or_odd_are_skipped() {
    for row in MODES {
        let mut steps = odd_records();
        steps.push(json!({"send": ["warning: not a record", "", "   "]}));
        steps.push(post(row));
        steps.extend(odd_records());
        let stage = Stage::json(json!({"runs": [turns(row, steps)]}));
        let provider = stage.provider(row);
        for at in 0..2 {
            let heard = told(&provider, ask(format!("[[say answer {at}]]"))).await;
            assert_eq!(heard.text(), format!("answer {at}"));
        }
    }
}

#[tokio::test]
async fn bug_008_white_space_at_every_chunk_s_end_is_kept() {
    for row in MODES {
        let stage = Stage::emulator();
        // What the model says, with white space around each 64 KiB mark.
        let line = BigLine {
            bytes: 300 * 1024,
            kind: BigKind::Text,
            fill: BigFill::WhiteSpaceAtMarks,
        };
        let line: Value = serde_json::from_str(&line.line()).unwrap();
        let text = line["message"]["content"][0]["text"].as_str().unwrap();
        assert!(text.contains('\t') && text.contains('\r'));
        stage.upstream.enqueue(Reply::text(text));
        let request = ask("x");
        let provider = stage.provider(row);
        let heard = told(&provider, request.clone()).await;
        assert_eq!(heard.text(), text);
        told(&provider, go_on(&request, heard.done())).await.done();
        let sent = stage.sent();
        assert_eq!(sent[1].field("/messages/1/content/0/text").unwrap(), text);
        // And such a line of the CLI changes nothing.
        let step = json!({"send_big": {"bytes": 300 * 1024, "kind": "text", "fill": "white_space_at_marks"}});
        let stage = Stage::json(json!({"runs": [turns(row, [step, post(row)])]}));
        assert_eq!(
            told(&stage.provider(row), ask("[[say x]]")).await.text(),
            "x"
        );
    }
}

#[tokio::test]
async fn bug_010_every_line_that_the_cli_reads_is_one_json_object() {
    for row in [WARM, WARM_MCP] {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        let mut request = ask_with_tools("line one\r\nline two\r\n\r\n[[call read {}]]");
        request.system = "A system prompt\r\n\nof \u{2028} lines\r\n".into();
        let heard = told(&provider, request.clone()).await;
        let mut next = go_on(&request, heard.done());
        next.system.push_str("\r\n and more");
        told(&provider, next).await.done();
        let recording = stage.recording();
        let run = recording.only().expect("one process for both");
        assert!(run.stdin.len() >= 4, "{run:?}");
        for line in &run.stdin {
            assert!(
                line.json().is_object() && !line.carriage_return && line.bytes > 0,
                "{line:?}"
            );
        }
        // A user line tells the CLI that it was composed by a program, with its own id.
        let users: Vec<_> = run
            .stdin
            .iter()
            .map(|line| line.json())
            .filter(|line| line["type"] == "user")
            .collect();
        assert_eq!(users.len(), 2);
        assert!(users.iter().all(|user| user["client_composed"] == true));
        assert_ne!(users[0]["uuid"], users[1]["uuid"]);
        assert_valid(&stage.sent());
    }
}

#[tokio::test]
async fn bug_012_what_the_cli_puts_in_place_of_a_refusal_is_not_the_answer() {
    let row = PER_REQUEST;
    let replacing = [
        json!({"type": "system", "subtype": "model_refusal_fallback", "trigger": "refusal", "direction": "retry",
            "original_model": "a", "fallback_model": "b", "retracted_message_uuids": ["u"], "session_id": "s", "uuid": "v"}),
        json!({"type": "assistant", "message": {"id": "n", "role": "assistant", "model": "b",
            "content": [{"type": "text", "text": "REPLACED"}]}, "supersedes": ["u"], "session_id": "s", "uuid": "w"}),
        json!({"type": "result", "subtype": "success", "is_error": false, "terminal_reason": "completed",
            "result": "REPLACED", "num_turns": 1, "stop_reason": "end_turn", "session_id": "s", "uuid": "x"}),
    ];
    let mut steps = vec![posted(row, json!({"reply": "forward_no_result"}))];
    // The further request that the CLI would make for it is refused, and costs nothing.
    steps.push(posted(
        row,
        json!({"reply": "ignore", "expect_status": 410}),
    ));
    steps.extend(replacing.into_iter().map(|line| json!({"send": line})));
    let stage = Stage::json(json!({"runs": [turns(row, steps)]}));
    let heard = told(
        &stage.provider(row),
        ask("[[say half of it]] [[stop refusal]]"),
    )
    .await;
    assert!(
        matches!(heard.stop(), StopReason::Refusal { .. }),
        "{heard:?}"
    );
    assert_eq!(heard.text(), "half of it");
    assert_eq!(heard.done().message.text(), "half of it");
    assert_eq!((stage.sent().len(), heard.refused_requests()), (1, 1));
}

#[tokio::test]
async fn bug_013_a_late_end_of_a_text_keeps_the_blocks_in_order() {
    for row in MODES {
        let stage = Stage::emulator();
        let events = json!([
            {"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m",
                "content": [], "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": 3, "output_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "before"}},
            {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "toolu_1", "name": "mcp__turnpass__read", "input": {}}},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{\"path\":"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "\"a\"}"}},
            {"type": "content_block_stop", "index": 1},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": {"output_tokens": 9}},
            {"type": "message_stop"},
        ]);
        stage.upstream.enqueue(Reply {
            events: Some(events.as_array().unwrap().clone()),
            ..Reply::default()
        });
        let heard = told(&stage.provider(row), ask_with_tools("x")).await;
        let done = heard.done();
        assert_eq!(done.message.content[0].as_text(), Some("before"));
        assert_eq!(
            done.message.tool_calls().next().unwrap().input.as_str(),
            r#"{"path":"a"}"#
        );
        assert_eq!(heard.calls().len(), 1);
    }
}

#[tokio::test]
async fn a_second_start_of_a_message_fails_closed() {
    for row in MODES {
        let stage = Stage::emulator();
        let start = json!({"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant",
            "model": "m", "content": [], "stop_reason": null, "usage": {"input_tokens": 3, "output_tokens": 1}}});
        let events = vec![start.clone(), start];
        stage.upstream.enqueue(Reply {
            events: Some(events),
            ..Reply::default()
        });
        let provider = stage.provider(row);
        let heard = told(&provider, ask("x")).await;
        assert_eq!(
            heard.error().code(),
            ErrorCode::ProtocolOrder,
            "{}",
            heard.error()
        );
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    }
}

#[tokio::test]
async fn noise_beyond_its_limit_ends_the_process_and_not_the_provider() {
    for row in MODES {
        let noise = json!({"repeat": {"times": 200, "steps": [{"send": "debug: something"}]}});
        let stage = Stage::json(json!({"runs": [turns(row, [noise, post(row)]), good(row)]}));
        let provider = stage.provider(row);
        told(&provider, ask("x"))
            .await
            .failed(ErrorCode::ProtocolRecord);
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    }
}
