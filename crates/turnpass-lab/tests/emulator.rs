//! The built-in script against a tiny upstream: what the transports rely on.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{
    Cli, Reply, STREAM, Upstream, end, message_start, reply, text, text_block, tool_block,
};
use turnpass_lab::cli::{Script, install};

const ONE_REQUEST: [(&str, &str); 3] = [
    ("CLAUDE_CODE_MAX_RETRIES", "0"),
    ("CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK", "1"),
    ("ENABLE_TOOL_SEARCH", "false"),
];

fn manifest() -> Value {
    json!({
        "subtype": "initialize", "systemPrompt": ["You are a test."], "systemPromptSnapshot": false,
        "sdkMcpServers": ["host"],
        "sdkMcpServerManifests": {"host": {
            "initializeResult": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "host", "version": "1"}},
            "toolsListResult": {"tools": [
                {"name": "beta", "description": "B", "inputSchema": {"type": "object", "properties": {}}, "annotations": {"readOnlyHint": true}},
                {"name": "alpha", "description": "A", "inputSchema": {"type": "object", "z": 1, "a": 2}, "annotations": {"readOnlyHint": true}},
            ]},
        }},
    })
}

struct Bench {
    dir: tempfile::TempDir,
    upstream: Upstream,
}

impl Bench {
    fn new(replies: impl IntoIterator<Item = Reply>) -> Bench {
        Bench {
            dir: tempfile::tempdir().unwrap(),
            upstream: Upstream::start(replies),
        }
    }

    fn cli(&self, more: &[&str], env: &[(&str, &str)]) -> Cli {
        let args: Vec<&str> = STREAM.iter().chain(more).copied().collect();
        let url = format!("{}/s3cr3t", self.upstream.url);
        let mut all: Vec<(&str, &str)> = ONE_REQUEST.to_vec();
        all.push(("ANTHROPIC_BASE_URL", &url));
        all.extend_from_slice(env);
        Cli::start(&Script::emulator("2.1.332"), self.dir.path(), &args, &all)
    }
}

fn kinds(records: &[Value]) -> Vec<String> {
    let name = |record: &Value| {
        let part = |key: &str| record[key].as_str().unwrap_or_default().to_owned();
        match record["type"].as_str().unwrap_or_default() {
            "stream_event" => record["event"]["type"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            "system" => part("subtype"),
            other => other.to_owned(),
        }
    };
    records.iter().map(name).collect()
}

#[test]
fn a_text_turn_has_the_records_of_the_real_cli_in_their_order() {
    let bench = Bench::new([text("hello")]);
    let mut cli = bench.cli(&[], &[]);
    cli.user("hi");
    let result = cli.until("result");
    assert_eq!(
        kinds(&cli.seen),
        [
            "init",
            "status",
            "message_start",
            "content_block_start",
            "content_block_delta",
            "assistant",
            "content_block_stop",
            "message_delta",
            "message_stop",
            "rate_limit_event",
            "result"
        ]
    );
    assert_eq!(result["result"], "hello");
    assert_eq!(result["is_error"], false);
    assert_eq!(result["usage"]["output_tokens"], 5);
    assert_eq!(cli.finish().code(), Some(0));
    let asked = bench.upstream.asked();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].path, "/s3cr3t/v1/messages?beta=true");
    assert!(
        asked[0]
            .header("authorization")
            .unwrap()
            .contains("MADE-UP")
    );
    let body = &asked[0].body;
    let keys: Vec<&String> = body.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "model",
            "messages",
            "system",
            "tools",
            "metadata",
            "max_tokens",
            "thinking",
            "context_management",
            "output_config",
            "stream"
        ]
    );
    assert_eq!(
        body["messages"][0],
        json!({"role": "user", "content": "hi"})
    );
    assert_eq!(body["messages"][1]["role"], "system");
}

#[test]
fn one_process_serves_many_generations_and_replaced_messages() {
    let bench = Bench::new([]);
    let mut cli = bench.cli(&[], &[]);
    let extra =
        json!({"messages": [{"role": "user", "content": "real"}], "stop_sequences": ["END"]});
    let settings = json!({"subtype": "apply_flag_settings", "settings": {
        "model": "opus", "effortLevel": "low", "env": {"CLAUDE_CODE_EXTRA_BODY": extra.to_string()},
    }});
    assert_eq!(cli.control("c1", settings)["subtype"], "success");
    for _ in 0..3 {
        cli.user("placeholder");
        assert_eq!(cli.until("result")["is_error"], false);
    }
    assert_eq!(cli.finish().code(), Some(0));
    let posts = bench.upstream.posts();
    assert_eq!(posts.len(), 3);
    for body in &posts {
        assert_eq!(body["messages"], extra["messages"]);
        assert_eq!(body["stop_sequences"], json!(["END"]));
        assert_eq!(body["model"], "claude-opus-5-5");
        assert_eq!(body["output_config"]["effort"], "low");
    }
    assert_eq!(posts[0]["system"], posts[2]["system"]);
}

#[test]
fn a_denied_call_ends_the_only_turn_with_exit_code_1() {
    let calls = vec![
        text_block(0, "two"),
        tool_block(1, "toolu_1", "mcp__host__alpha", "{\"path\": \"a\"}"),
        tool_block(2, "toolu_2", "mcp__host__alpha", "{\"pa"),
    ];
    let bench = Bench::new([reply(calls, "tool_use")]);
    let mut cli = bench.cli(&["--max-turns", "1"], &[]);
    cli.control("i", manifest());
    cli.user("go");
    let init = cli.until("system/init");
    assert_eq!(
        init["tools"],
        json!(["mcp__host__alpha", "mcp__host__beta"])
    );
    assert_eq!(init["mcp_servers"][0]["source"], "sdk");
    let result = cli.until("result");
    assert_eq!(result["subtype"], "error_max_turns");
    assert_eq!(result["terminal_reason"], "max_turns");
    assert_eq!(
        result["permission_denials"][0]["tool_input"],
        json!({"path": "a"})
    );
    assert_eq!(result["num_turns"], 2);
    let order = kinds(&cli.seen);
    let denied = order
        .iter()
        .position(|kind| kind == "permission_denied")
        .unwrap();
    assert_eq!(
        &order[denied..denied + 3],
        ["permission_denied", "content_block_stop", "user"]
    );
    let unparsed = cli.seen.iter().find(|record| {
        record
            .pointer("/message/content/0/input/__unparsedToolInput")
            .is_some()
    });
    assert!(unparsed.is_some());
    assert_eq!(cli.finish().code(), Some(1));
    let posts = bench.upstream.posts();
    assert_eq!(posts.len(), 1);
    assert_eq!(posts[0]["system"][2]["text"], "You are a test.");
    let schema = posts[0]["tools"][0]["input_schema"].to_string();
    assert_eq!(schema, r#"{"type":"object","z":1,"a":2}"#);
}

#[test]
fn allowed_in_band_calls_run_beside_each_other_and_go_up_in_order_of_completion() {
    let calls = vec![
        tool_block(0, "toolu_1", "mcp__host__alpha", "{}"),
        tool_block(1, "toolu_2", "mcp__host__beta", "{\"x\":1}"),
    ];
    let bench = Bench::new([reply(calls, "tool_use"), text("done")]);
    let mut cli = bench.cli(&["--allowedTools", "mcp__host__*"], &[]);
    cli.control("i", manifest());
    cli.user("go");
    let one = cli.until("control_request");
    let two = cli.until("control_request");
    assert_eq!(
        two["request"]["message"]["params"]["_meta"]["claudecode/toolUseId"],
        "toolu_2"
    );
    for (request, text) in [(&two, "second"), (&one, "first")] {
        let id = &request["request"]["message"]["id"];
        let result = json!({"content": [{"type": "text", "text": text}]});
        cli.write(&json!({"type": "control_response", "response": {
            "subtype": "success", "request_id": request["request_id"],
            "response": {"mcp_response": {"jsonrpc": "2.0", "id": id, "result": result}},
        }}));
        cli.until("user");
    }
    assert_eq!(cli.until("result")["result"], "done");
    let posts = bench.upstream.posts();
    let results = &posts[1]["messages"].as_array().unwrap().last().unwrap()["content"];
    assert_eq!(results.as_array().unwrap().len(), 2);
    assert_eq!(cli.finish().code(), Some(0));
}

#[test]
fn errors_are_synthetic_records_and_a_success_that_is_an_error() {
    let bench = Bench::new([Reply::Status(410, "gone", vec![])]);
    let mut cli = bench.cli(&[], &[]);
    cli.user("x");
    let result = cli.until("result");
    assert_eq!(
        (
            &result["subtype"],
            &result["is_error"],
            &result["api_error_status"]
        ),
        (&json!("success"), &json!(true), &json!(410))
    );
    let assistant = cli
        .seen
        .iter()
        .find(|record| record["type"] == "assistant")
        .unwrap();
    assert_eq!(assistant["message"]["model"], "<synthetic>");
    cli.user("again");
    assert_eq!(cli.until("result")["is_error"], false);
    assert_eq!(cli.finish().code(), Some(0));
    assert_eq!(bench.upstream.posts().len(), 2);
}

#[test]
fn it_asks_again_where_the_real_cli_does() {
    let cut = || {
        let mut events = vec![message_start()];
        events.extend(text_block(0, "half"));
        Reply::Events(events)
    };
    let cases: [(Vec<Reply>, usize, bool); 6] = [
        (vec![Reply::Status(401, "expired", vec![])], 2, false),
        (
            vec![
                reply(vec![text_block(0, "a")], "max_tokens"),
                Reply::Status(410, "no", vec![]),
            ],
            2,
            true,
        ),
        (vec![reply(vec![text_block(0, "")], "end_turn")], 2, false),
        (vec![cut(), cut(), cut(), cut(), text("never")], 4, true),
        (
            vec![reply(vec![text_block(0, "a")], "pause_turn")],
            1,
            false,
        ),
        (vec![Reply::Events(vec![])], 1, true),
    ];
    for (index, (replies, requests, is_error)) in cases.into_iter().enumerate() {
        let bench = Bench::new(replies);
        let mut cli = bench.cli(&["--max-turns", "1"], &[]);
        cli.user("x");
        let result = cli.until("result");
        assert_eq!(result["is_error"], is_error, "case {index}: {result}");
        assert_eq!(bench.upstream.posts().len(), requests, "case {index}");
        assert_eq!(
            cli.finish().code(),
            Some(i32::from(is_error)),
            "case {index}"
        );
    }
}

#[test]
fn an_interrupt_stops_the_stream_and_the_process_goes_on() {
    let mut half = vec![message_start()];
    half.extend(text_block(0, "Hello").into_iter().take(2));
    let bench = Bench::new([Reply::Stall(half)]);
    let mut cli = bench.cli(&[], &[]);
    cli.user("one");
    loop {
        let event = cli.until("stream_event");
        if event["event"]["type"] == "content_block_delta" {
            break;
        }
    }
    let answer = cli.control("x", json!({"subtype": "interrupt"}));
    assert_eq!(answer["response"], json!({"still_queued": []}));
    let assistant = cli.until("assistant");
    assert_eq!(assistant["aborted"], true);
    let result = cli.until("result");
    assert_eq!(result["terminal_reason"], "aborted_streaming");
    let stop = cli
        .seen
        .iter()
        .rev()
        .find(|record| record["type"] == "stream_event")
        .unwrap();
    assert_eq!(stop["abandoned_blocks"]["from_block_index"], 1);
    cli.user("two");
    assert_eq!(cli.until("result")["result"], "ok");
    let posts = bench.upstream.posts();
    let messages = posts[1]["messages"].to_string();
    assert!(messages.contains("Request interrupted by user") && messages.contains("Hello"));
    assert_eq!(cli.finish().code(), Some(0));
}

#[test]
fn a_rewound_turn_leaves_no_trace() {
    let bench = Bench::new([text("a1"), Reply::Status(410, "no", vec![])]);
    let mut cli = bench.cli(&[], &[]);
    let line = |text: &str, uuid: &str| json!({"type": "user", "uuid": uuid, "message": {"role": "user", "content": text}});
    cli.write(&line("q1", "11111111-0000-4000-8000-000000000001"));
    cli.until("result");
    cli.write(&line("bad", "22222222-0000-4000-8000-000000000002"));
    cli.until("result");
    let request = json!({"subtype": "rewind_conversation", "target_message_uuid": "22222222-0000-4000-8000-000000000002"});
    let answer = cli.control("r", request);
    assert_eq!(answer["response"]["rewound"], true);
    assert_eq!(answer["response"]["prefillText"], "bad");
    cli.user("q2");
    cli.until("result");
    let posts = bench.upstream.posts();
    let roles: Vec<&str> = posts[2]["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["user", "system", "assistant", "user"]);
    assert!(!posts[2].to_string().contains("bad"));
}

#[test]
fn native_frames_are_acknowledged_and_keep_signed_thinking() {
    let bench = Bench::new([]);
    let mut cli = bench.cli(&[], &[]);
    cli.write(&json!({"type": "user", "shouldQuery": false, "message": {"role": "user", "content": "old"}}));
    assert_eq!(cli.until("result")["num_turns"], 0);
    let thinking = json!({"type": "thinking", "thinking": "t", "signature": "SIG=="});
    for model in ["claude-sonnet-5-5", "another-model"] {
        cli.write(&json!({"type": "assistant", "message": {"role": "assistant", "model": model, "content": [thinking, {"type": "text", "text": model}]}}));
        cli.write(&json!({"type": "user", "shouldQuery": false, "message": {"role": "user", "content": "more"}}));
        cli.until("result");
    }
    cli.user("now");
    cli.until("result");
    let posts = bench.upstream.posts();
    assert_eq!(posts.len(), 1);
    let messages = &posts[0]["messages"];
    assert_eq!(messages[2]["content"][0], thinking);
    assert_eq!(
        messages[4]["content"].as_array().unwrap().len(),
        1,
        "thinking of another model is dropped"
    );
}

#[test]
fn plain_text_input_and_output_work_for_the_demo() {
    let bench = Bench::new([text("hello there")]);
    let env = [("ANTHROPIC_BASE_URL", bench.upstream.url.as_str())];
    let mut cli = Cli::start(
        &Script::emulator("2.1.332"),
        bench.dir.path(),
        &["-p", "say hello"],
        &env,
    );
    assert_eq!(cli.line().unwrap(), "hello there");
    assert_eq!(cli.finish().code(), Some(0));
    let mut cli = Cli::start(
        &Script::emulator("2.1.332"),
        bench.dir.path(),
        &["-p", "--nope"],
        &env,
    );
    assert_eq!(cli.finish().code(), Some(1));
    assert!(cli.stderr().starts_with("error: unknown option '--nope'"));
}

#[test]
fn without_a_home_nothing_is_written() {
    let bench = Bench::new([]);
    let script = install(
        bench.dir.path(),
        &support::program(),
        &Script::emulator("2.1.332"),
    )
    .unwrap();
    let place = bench.dir.path().join("empty");
    std::fs::create_dir(&place).unwrap();
    let mut command = std::process::Command::new(script);
    command
        .args(["-p", "hello"])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("ANTHROPIC_BASE_URL", &bench.upstream.url)
        .current_dir(&place);
    assert_eq!(Cli::spawn(command).finish().code(), Some(0));
    assert_eq!(std::fs::read_dir(place).unwrap().count(), 0);
}

#[test]
fn a_cut_after_the_stop_reason_is_a_whole_answer() {
    let mut events = vec![message_start()];
    events.extend(text_block(0, "all"));
    events.extend(end("end_turn").into_iter().take(1));
    let bench = Bench::new([Reply::Events(events)]);
    let mut cli = bench.cli(&[], &[]);
    cli.user("x");
    assert_eq!(cli.until("result")["is_error"], false);
    assert!(kinds(&cli.seen).contains(&"message_stop".to_owned()));
}
