//! The failures of programs like this one, through the pool: its CLI is told, heard and ended otherwise than the relay's.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnpass::event::Event;
use turnpass::{ErrorCode, Provider};
use turnpass_lab::cli::{EmulatorOptions, Run, Script};
use turnpass_lab::rig::processes;
use turnpass_lab::scenario::{Item, Reply};

use crate::pool_turns::{
    calling, emulator, event, message_end, message_start, result, text_block, tools_call,
};
use crate::stage::{
    Stage, WARM, ask, ask_with_tools, assert_valid, go_on, host_messages, is_text, limits, told,
    until,
};
use crate::{good, post, posted, turns};

/// From the end of a generation until everything of its process is gone.
const GONE: Duration = Duration::from_secs(6);
const MIB: usize = 1024 * 1024;

fn pool(stage: &Stage) -> Provider {
    stage.pool(|_| {})
}

/// One turn with these steps before its request.
fn before(steps: impl IntoIterator<Item = Value>) -> Value {
    let mut steps: Vec<_> = steps.into_iter().collect();
    steps.push(post(WARM));
    turns(WARM, steps)
}

#[tokio::test]
async fn bug_001_long_lines_of_the_pool_s_cli_pass_and_one_too_long_is_one_error() {
    let big = |bytes: usize| json!({"send_big": {"bytes": bytes, "kind": "tool_result"}});
    let whole = before([big(3 * MIB), big(12 * MIB), big(16 * MIB)]);
    let broken = before([big(16 * MIB + 1)]);
    let stage = Stage::json(json!({"runs": [whole, good(WARM)]}));
    assert_eq!(
        told(&pool(&stage), ask("[[say whole]]")).await.text(),
        "whole"
    );
    let stage = Stage::json(json!({"runs": [broken, good(WARM)]}));
    let provider = pool(&stage);
    let heard = told(&provider, ask("[[say x]]")).await;
    let error = heard.failed(ErrorCode::LineTooLong);
    assert!(error.detail().contains(&(16 * MIB).to_string()), "{error}");
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(stage.recording().runs.len(), 2, "the process is retired");
}

#[tokio::test]
async fn bug_001_a_long_answer_of_one_line_reaches_the_host_whole() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let path = "x".repeat(3 * MIB);
    stage.upstream.enqueue(Reply::content([Item::tool_use(
        "mcp__turnpass__read",
        json!({"path": path}),
    )]));
    stage.upstream.enqueue(Reply::text("done"));
    let mut request = ask_with_tools("x");
    request.model = "claude-opus-4-6[1m]".into();
    let heard = told(&provider, request.clone()).await;
    let calls = heard.calls();
    assert!(calls[0].input.as_str().len() > 3 * MIB);
    let heard = told(&provider, go_on(&request, heard.done())).await;
    assert_eq!(heard.text(), "done");
}

#[tokio::test]
async fn bug_002_forty_megabytes_of_small_lines_in_one_turn_of_the_pool() {
    let line = json!({"type": "brand_new", "text": "x".repeat(2000)});
    let flood = json!({"repeat": {"times": 20_000, "steps": [{"send": line.to_string()}]}});
    let stage = Stage::json(json!({"runs": [before([flood])]}));
    let heard = told(&pool(&stage), ask("[[say through]]")).await;
    assert_eq!(heard.text(), "through");
}

#[tokio::test]
async fn bug_004_and_006_and_007_odd_records_change_nothing_in_the_pool() {
    let odd = || {
        let records = [
            json!({"type": "brand_new"}),
            json!({"type": "system", "subtype": "brand_new", "x": [1]}),
            json!({"type": "stream_event", "event": {"type": "brand_new"}, "session_id": "s", "uuid": "u"}),
            json!({"type": "rate_limit_event", "rate_limit_info": {"status": "brand_new", "more": 1}}),
            json!({"type": "tool_progress", "tool_use_id": "t", "elapsed_time_seconds": 3}),
            json!({"type": "system", "subtype": "status", "status": null}),
            json!({"type": "user", "message": {"role": "user", "content": "hi"}}),
            json!({"no_type": true}),
        ];
        let records = records.into_iter().map(|line| json!({"send": line}));
        records.chain([json!({"send": ["warning: not a record", "", "   ", "half \\ud83d"]})])
    };
    let mut steps: Vec<Value> = odd().collect();
    steps.push(message_start("msg_1"));
    steps.extend(odd());
    steps.push(event(
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "brand_new"}}),
    ));
    steps.push(event(
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "brand_new"}}),
    ));
    steps.push(event(json!({"type": "content_block_stop", "index": 0})));
    steps.extend(text_block(1, "answer"));
    steps.extend(message_end("end_turn"));
    steps.extend(odd());
    steps.push(result("completed"));
    steps.extend(odd());
    let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
    let provider = pool(&stage);
    for _ in 0..2 {
        let heard = told(&provider, ask("x")).await;
        assert_eq!(heard.text(), "answer", "{heard:?}");
        heard.done();
    }
}

#[tokio::test]
async fn bug_008_and_010_text_and_lines_of_the_pool_keep_every_byte() {
    let stage = Stage::emulator();
    let text = format!("a\tb \r\n {} \u{2028}\u{85}\n \t", " \r\t\n".repeat(50_000));
    stage.upstream.enqueue(Reply::text(&text));
    let provider = pool(&stage);
    let mut request = ask("line one\r\nline two\r\n\r\n");
    request.system = "A system prompt\r\n\nof \u{2028} lines\r\n".into();
    let heard = told(&provider, request.clone()).await;
    assert_eq!(heard.text(), text);
    told(&provider, go_on(&request, heard.done())).await.done();
    let sent = host_messages(&stage.sent()[1]);
    assert_eq!(sent[1]["content"][0]["text"], text.as_str());
    let recording = stage.recording();
    for line in &recording.only().expect("one process for both").stdin {
        assert!(
            line.json().is_object() && !line.carriage_return && line.bytes > 0,
            "{line:?}"
        );
    }
}

#[tokio::test]
async fn bug_011_a_text_is_told_once_streamed_or_not() {
    let record = |text: &str| {
        json!({"send": {"type": "assistant", "session_id": "s", "uuid": "{{uuid}}", "parent_tool_use_id": null,
        "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": null,
            "content": [{"type": "text", "text": text}], "usage": {"input_tokens": 3, "output_tokens": 1}}}})
    };
    let mut streamed = vec![message_start("msg_1")];
    streamed.extend(text_block(0, "once"));
    streamed.push(record("once"));
    streamed.extend(message_end("end_turn"));
    streamed.push(result("completed"));
    let unstreamed = vec![record("once"), result("completed")];
    for steps in [streamed, unstreamed] {
        let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
        let heard = told(&pool(&stage), ask("x")).await;
        assert_eq!(heard.text(), "once");
        assert_eq!(heard.done().message.text(), "once");
    }
}

#[tokio::test]
async fn bug_013_a_late_end_of_a_text_keeps_the_pool_s_blocks_in_order() {
    let mut steps = vec![message_start("msg_1")];
    let [start, delta, stop] = <[Value; 3]>::try_from(text_block(0, "before")).unwrap();
    steps.extend([start, delta]);
    steps.push(event(json!({"type": "content_block_start", "index": 1,
        "content_block": {"type": "tool_use", "id": "toolu_1", "name": "mcp__turnpass__read", "input": {}}})));
    steps.push(stop);
    steps.push(event(
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{\"path\":\"a\"}"}}),
    ));
    steps.push(event(json!({"type": "content_block_stop", "index": 1})));
    steps.extend(message_end("tool_use"));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
    let heard = told(&pool(&stage), ask_with_tools("x")).await;
    let done = heard.done();
    assert_eq!(done.message.content[0].as_text(), Some("before"));
    assert_eq!(
        done.message.tool_calls().next().unwrap().input.as_str(),
        r#"{"path":"a"}"#
    );
}

#[tokio::test]
async fn bug_015_a_loud_stderr_blocks_nothing_in_the_pool() {
    for stderr in [json!({"bytes": 200_000}), json!("a line\n".repeat(30_000))] {
        let run = turns(
            WARM,
            [
                json!({"stderr": stderr}),
                post(WARM),
                json!({"stderr": stderr}),
            ],
        );
        let stage = Stage::json(json!({"runs": [run]}));
        let provider = pool(&stage);
        for _ in 0..2 {
            let heard = told(&provider, ask("[[say heard]]")).await;
            assert_eq!(heard.text(), "heard");
        }
    }
}

#[tokio::test]
async fn bug_016_big_input_meets_big_output_in_the_pool() {
    let mut run = before([]);
    run["steps"]
        .as_array_mut()
        .unwrap()
        .insert(0, json!({"write_before_read": 1_000_000}));
    let stage = Stage::json(json!({"runs": [run]}));
    let mut request = ask("[[say both ways]]");
    request.model = "claude-opus-4-6[1m]".into();
    request.system = "x".repeat(3_000_000);
    assert_eq!(told(&pool(&stage), request).await.text(), "both ways");
}

#[tokio::test]
async fn bug_016_a_pool_s_cli_that_never_reads_ends_at_the_start_deadline() {
    let silent = json!({"steps": ["never_read_stdin", "hang"]});
    let stage = Stage::json(json!({"runs": [silent, good(WARM)]}));
    let provider = pool(&stage);
    let mut request = ask_with_tools("x");
    request.model = "claude-opus-4-6[1m]".into();
    request.system = "x".repeat(3_000_000);
    request.limits = limits(1_500, 60_000, 120_000);
    let heard = told(&provider, request).await;
    assert!(heard.failed(ErrorCode::StartTimeout).is_retryable());
    assert!(heard.took < Duration::from_secs(6), "{:?}", heard.took);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    provider.shutdown().await.unwrap();
    stage.all_gone(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn bug_019_each_state_of_the_pool_s_cli_has_its_deadline() {
    let hang = || json!("hang");
    let mut begun = vec![message_start("msg_1")];
    begun.extend(text_block(0, "half"));
    begun.push(hang());
    let cases = [
        (
            "before everything",
            json!({"steps": ["hang"]}),
            ErrorCode::StartTimeout,
        ),
        (
            "after its controls",
            json!({"steps": ["answer_controls", "hang"]}),
            ErrorCode::StartTimeout,
        ),
        (
            "after its first record",
            turns(WARM, [hang()]),
            ErrorCode::StartTimeout,
        ),
        (
            "within the answer",
            turns(WARM, begun),
            ErrorCode::IdleTimeout,
        ),
    ];
    for (what, run, code) in cases {
        for with_tools in [false, true] {
            let stage = Stage::json(json!({"runs": [run, emulator()]}));
            let provider = pool(&stage);
            let mut request = match with_tools {
                true => ask_with_tools("x"),
                false => ask("x"),
            };
            request.limits = limits(1_200, 1_200, 120_000);
            let heard = told(&provider, request).await;
            assert_eq!(heard.error().code(), code, "{what}: {}", heard.error());
            assert!(heard.error().is_retryable(), "{what}");
            assert!(
                heard.took < Duration::from_secs(5),
                "{what}: {:?}",
                heard.took
            );
            assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
        }
    }
}

#[tokio::test]
async fn bug_019_a_turn_that_the_pool_s_cli_never_ends_is_ended_by_the_grace() {
    let run = turns(
        WARM,
        [
            posted(WARM, json!({"reply": "forward_no_result"})),
            json!("hang"),
        ],
    );
    let stage = Stage::json(json!({"runs": [run, good(WARM)]}));
    let provider = pool(&stage);
    let heard = told(&provider, ask("[[say all of it]]")).await;
    assert!(heard.failed(ErrorCode::ProcessCleanup).output_seen());
    assert_eq!(heard.text(), "all of it", "what was said is not taken back");
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

#[tokio::test]
async fn bug_021_what_the_pool_s_cli_started_goes_with_it() {
    for keep_pipes in [false, true] {
        let stage = Stage::json(
            json!({"runs": [before([json!({"grandchild": {"keep_pipes": keep_pipes}})])]}),
        );
        for drops in [false, true] {
            let provider = pool(&stage);
            let mut generation = provider.generate(ask("[[say half]] [[stall 300]]"));
            until(&mut generation, "text", is_text).await;
            let runs = stage.recording().runs;
            let grandchildren = runs.last().unwrap().grandchildren.clone();
            assert_eq!(grandchildren.len(), 1);
            if drops {
                drop((generation, provider));
            } else {
                crate::stage::hear(generation).await.done();
                provider.shutdown().await.unwrap();
            }
            stage.all_gone(GONE).await;
            assert!(processes::wait_gone(&grandchildren, GONE).is_empty());
        }
    }
}

#[tokio::test]
async fn bug_021_a_pool_s_process_that_ignores_its_end_is_killed_within_the_shutdown() {
    let mut run = before([]);
    let steps = run["steps"].as_array_mut().unwrap();
    steps.insert(
        0,
        json!({"ignore_signals": ["SIGTERM", "SIGINT", "SIGHUP"]}),
    );
    steps.push(json!("hang"));
    let stage = Stage::json(json!({"runs": [run]}));
    let provider = pool(&stage);
    told(&provider, ask("[[say x]]")).await.done();
    let began = Instant::now();
    provider.shutdown().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15));
    stage.all_gone(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn bug_023_a_start_of_the_pool_that_fails_each_time_is_one_start_for_each_call() {
    let unknown = "error: unknown option '--no-chrome'\n";
    let failing = |words: &str| json!({"steps": [{"stderr": words}, {"exit": 1}]});
    let stage = Stage::json(json!({"runs": [failing(unknown)]}));
    let provider = pool(&stage);
    for at in 1..=3 {
        let heard = told(&provider, ask("x")).await;
        let error = heard.failed(ErrorCode::VersionIncompatible);
        assert!(!error.is_retryable() && error.detail().contains("--no-chrome"));
        assert_eq!(stage.recording().runs.len(), at);
    }
    let other = failing("No conversation found with session ID: x\n");
    let stage = Stage::json(json!({"runs": [other, good(WARM)]}));
    let provider = pool(&stage);
    let heard = told(&provider, ask("x")).await;
    let error = heard.failed(ErrorCode::ProcessExit);
    assert!(!error.to_string().contains("No conversation"), "{error}");
    assert_eq!(stage.recording().runs.len(), 1);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

#[tokio::test]
async fn bug_023_a_stored_conversation_that_cannot_be_taken_up_is_tried_once() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let request = ask("[[say first]]");
    let heard = told(&provider, request.clone()).await;
    let mut next = go_on(&request, heard.done());
    let turnpass::event::StateOrder::Keep { state } = heard.done().state.clone() else {
        panic!("no state: {heard:?}");
    };
    next.state = Some(state);
    provider.shutdown().await.unwrap();
    let refusing =
        json!({"steps": [{"stderr": "No message found with message.uuid of: x\n"}, {"exit": 1}]});
    let script = json!({"runs": [refusing, emulator()]});
    stage.change(Script::parse(&script.to_string()).unwrap());
    let provider = pool(&stage);
    assert_eq!(told(&provider, next).await.text(), "going on");
    assert_eq!(stage.recording().runs.len(), 3);
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn bug_027_the_pool_s_command_line_stays_short_and_tells_nothing() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let mut request = ask_with_tools(format!("[[say x]] {}", "SECRET ".repeat(50_000)));
    request.system = "SECRET ".repeat(20_000);
    request.tools[0].description = "SECRET ".repeat(1_000);
    told(&provider, request).await.done();
    let recording = stage.recording();
    let run = recording.only().unwrap();
    let argv: usize = run.argv.iter().map(|arg| arg.len() + 1).sum();
    assert!(argv < 8 * 1024, "{argv}");
    assert!(run.argv.iter().all(|arg| !arg.contains("SECRET")));
    assert!(
        run.environment
            .values()
            .all(|value| !value.contains("SECRET"))
    );
}

#[tokio::test]
async fn bug_039_and_063_what_the_pool_s_cli_loaded_is_checked_before_it_is_told() {
    let status =
        |servers: Value| json!({"subtype": "mcp_status", "response": {"mcpServers": servers}});
    let ours = |status: &str, tools: &[&str]| {
        let tools: Vec<_> = tools.iter().map(|name| json!({"name": name})).collect();
        json!([{"name": "turnpass", "status": status, "tools": tools}])
    };
    let other = json!([{"name": "other", "status": "connected", "tools": []}]);
    let cases = [
        (json!([]), ErrorCode::IsolationMcp),
        (other, ErrorCode::IsolationMcp),
        (ours("pending", &[]), ErrorCode::McpStartup),
        (ours("failed", &[]), ErrorCode::McpStartup),
        (ours("connected", &["read"]), ErrorCode::McpStartup),
        (
            ours("connected", &["read", "write", "Bash"]),
            ErrorCode::IsolationTools,
        ),
    ];
    for (servers, code) in cases {
        let run = json!({"steps": [
            {"answer_controls": [{"subtype": "initialize"}, {"subtype": "apply_flag_settings"}, status(servers.clone())]},
            {"loop": [{"expect": {"type": "user"}}, {"send_init": null}, post(WARM)]},
        ]});
        let stage = Stage::json(json!({"runs": [run, emulator()]}));
        let provider = pool(&stage);
        let heard = told(&provider, ask_with_tools("[[say x]]")).await;
        assert_eq!(heard.error().code(), code, "{servers}: {}", heard.error());
        assert!(stage.sent().is_empty());
        let users = stage.recording().runs[0]
            .stdin
            .iter()
            .filter(|line| line.json()["type"] == "user")
            .count();
        assert_eq!(users, 0, "it was told nothing");
        let heard = told(&provider, ask_with_tools("[[say next]]")).await;
        assert_eq!(heard.text(), "next");
    }
    // What init shows counts too.
    let run = json!({"steps": ["answer_controls", {"loop": [
        {"expect": {"type": "user"}}, {"send_init": {"tools": ["Bash"]}}, "hang",
    ]}]});
    let stage = Stage::json(json!({"runs": [run, good(WARM)]}));
    let provider = pool(&stage);
    told(&provider, ask("[[say x]]"))
        .await
        .failed(ErrorCode::IsolationTools);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

#[tokio::test]
async fn bug_040_built_in_plugins_that_slip_through_are_learned_once() {
    let plugin = EmulatorOptions {
        plugins: vec!["brand-new".into()],
        ..EmulatorOptions::default()
    };
    let stage = Stage::script(Script::runs("2.1.332", [Run::Emulator(plugin)]));
    for history in [false, true] {
        let provider = stage.pool(|options| options.spare = true);
        let mut request = ask("[[say first]]");
        if history {
            request.messages.extend([
                turnpass::conversation::Message::assistant("first"),
                turnpass::conversation::Message::user("[[say second]]"),
            ]);
        }
        let began = stage.recording().runs.len();
        let heard = told(&provider, request.clone()).await;
        assert_eq!(heard.text(), if history { "second" } else { "first" });
        assert_eq!(heard.done().upstream_requests, 1);
        assert!(stage.recording().runs.len() >= began + 2);
        provider.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn bug_044_a_refused_sign_in_retires_the_pool_s_process() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    told(&provider, ask("[[status 401]]"))
        .await
        .failed(ErrorCode::Auth);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(stage.recording().runs.len(), 2);
}

#[tokio::test]
async fn bug_046_no_combination_of_marks_is_a_clean_end_of_the_pool() {
    const SAID: &str = "SENTENCE OF THE CLI";
    let synthetic = json!({"send": {"type": "assistant", "error": "server_error", "is_api_error_message": true,
        "session_id": "s", "uuid": "u", "message": {"id": "m", "role": "assistant", "model": "<synthetic>",
        "content": [{"type": "text", "text": SAID}]}}});
    for streamed in [false, true] {
        let (mut runs, mut cases) = (Vec::new(), Vec::new());
        for subtype in ["success", "error_during_execution"] {
            for is_error in [false, true] {
                for status in [None, Some(401), Some(403), Some(429), Some(500), Some(529)] {
                    for marked in [false, true] {
                        if subtype == "success" && !is_error && status.is_none() && !marked {
                            continue;
                        }
                        let mut steps = Vec::new();
                        if streamed {
                            steps.push(posted(WARM, json!({"reply": "forward_no_result"})));
                        }
                        steps.extend(marked.then(|| synthetic.clone()));
                        let reason = if is_error { "api_error" } else { "completed" };
                        let mut record = json!({"type": "result", "subtype": subtype, "is_error": is_error,
                            "terminal_reason": reason, "result": SAID, "num_turns": 1, "session_id": "s", "uuid": "v"});
                        if let Some(status) = status {
                            record["api_error_status"] = json!(status);
                        }
                        steps.push(json!({"send": record}));
                        steps.push(json!({"exit": i32::from(is_error)}));
                        runs.push(turns(WARM, steps));
                        cases.push((subtype, is_error, status, marked));
                    }
                }
            }
        }
        let stage = Stage::json(json!({"runs": runs}));
        let provider = pool(&stage);
        for case in cases {
            let heard = told(&provider, ask("[[say all of it]]")).await;
            let error = heard.error();
            assert!(!error.to_string().contains(SAID), "{case:?}: {error}");
            assert_eq!(error.output_seen(), streamed, "{case:?}: {error}");
        }
    }
}

#[tokio::test]
async fn bug_051_an_error_of_the_pool_is_over_when_it_is_over() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    for status in ["400", "403", "429", "500", "529"] {
        let directive = format!(r#"[[status {status} {{}}]] x"#);
        told(&provider, ask(directive)).await.error();
        assert_eq!(
            told(&provider, ask("[[say next]]")).await.text(),
            "next",
            "{status}"
        );
    }
}

#[tokio::test]
async fn bug_055_and_056_usage_is_the_last_snapshot_of_each_answer() {
    let record = |output: u32, text: &str| {
        json!({"send": {"type": "assistant", "session_id": "s", "uuid": "{{uuid}}", "parent_tool_use_id": null,
        "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": null,
            "content": [{"type": "text", "text": text}], "usage": {"input_tokens": 10_000, "output_tokens": output}}}})
    };
    let mut steps = vec![event(
        json!({"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant",
        "model": "m", "content": [], "stop_reason": null, "usage": {"input_tokens": 10_000, "output_tokens": 1}}}),
    )];
    for (index, output) in [(0, 1), (1, 1), (2, 260)] {
        steps.extend(text_block(index, "x"));
        steps.push(record(output, "x"));
    }
    steps.push(event(
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null}, "usage": {"output_tokens": 260}}),
    ));
    steps.push(event(json!({"type": "message_stop"})));
    steps.push(json!({"send": {"type": "result", "subtype": "success", "is_error": false, "terminal_reason": "completed",
        "num_turns": 1, "result": "", "session_id": "s", "uuid": "{{uuid}}", "usage": {"input_tokens": 60_000, "output_tokens": 900}}}));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
    let heard = told(&pool(&stage), ask("x")).await;
    let usage = &heard.done().usage;
    assert_eq!(
        (usage.input_tokens, usage.output_tokens),
        (Some(10_000), Some(260))
    );
}

#[tokio::test]
async fn bug_059_one_call_of_the_pool_is_one_request_also_after_a_while() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let heard = told(&provider, ask_with_tools("[[call read {}]]")).await;
    assert_eq!(heard.done().upstream_requests, 1);
    provider.shutdown().await.unwrap();
    stage.all_gone(GONE).await;
    assert_eq!(stage.sent().len(), 1, "nobody is left that could ask");
}

#[tokio::test]
async fn bug_067_a_call_that_names_no_tool_use_or_a_strange_one_is_refused_at_once() {
    let mut steps = calling("msg_1", &["toolu_1"]);
    steps.push(tools_call("call-1", 7, "toolu_1"));
    let mut nameless = tools_call("call-2", 8, "x");
    nameless["send"]["request"]["message"]["params"]["_meta"] = json!({});
    steps.push(nameless);
    steps.push(tools_call("call-3", 9, "toolu_1"));
    let answered =
        |id: &str| json!({"expect": {"type": "control_response", "response": {"request_id": id}}});
    // Heard with the results of the first.
    steps.extend([answered("call-1"), answered("call-2"), answered("call-3")]);
    steps.extend(text_message());
    let stage = Stage::json(json!({"runs": [turns(WARM, steps)]}));
    let provider = pool(&stage);
    let request = ask_with_tools("x");
    let heard = told(&provider, request.clone()).await;
    let heard = told(&provider, go_on(&request, heard.done())).await;
    assert_eq!(heard.text(), "answer", "{heard:?}");
    let run = &stage.recording().runs[0];
    let answers = crate::pool_turns::lines(run, "control_response");
    let error = |id: &str| {
        let of = |line: &&Value| line["response"]["request_id"] == id;
        let message = &answers.iter().find(of).unwrap()["response"]["response"]["mcp_response"];
        message["result"]["isError"] == true || message.get("error").is_some()
    };
    assert!(
        !error("call-1") && error("call-2") && error("call-3"),
        "{answers:#?}"
    );
}

fn text_message() -> Vec<Value> {
    let mut steps = vec![message_start("msg_2")];
    steps.extend(text_block(0, "answer"));
    steps.extend(message_end("end_turn"));
    steps.push(result("completed"));
    steps
}

#[tokio::test]
async fn bug_084_and_088_a_process_that_dies_within_a_call_releases_none() {
    let mut steps = vec![message_start("msg_1")];
    steps.extend(text_block(0, "first"));
    steps.push(event(json!({"type": "content_block_start", "index": 1,
        "content_block": {"type": "tool_use", "id": "toolu_1", "name": "mcp__turnpass__read", "input": {}}})));
    steps.push(event(
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{\"path\":"}}),
    ));
    steps.push(json!({"kill_self": "SIGKILL"}));
    let stage = Stage::json(json!({"runs": [turns(WARM, steps), emulator()]}));
    let provider = pool(&stage);
    let heard = told(&provider, ask_with_tools("x")).await;
    assert!(heard.failed(ErrorCode::ProcessExit).output_seen());
    assert!(heard.calls().is_empty());
    assert_eq!(
        heard.count(|event| matches!(event, Event::ToolRejected { .. })),
        0
    );
    let heard = told(&provider, ask_with_tools("[[say next]]")).await;
    assert_eq!(heard.text(), "next");
}
