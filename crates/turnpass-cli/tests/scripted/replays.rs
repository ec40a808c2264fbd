//! The replay against a CLI that does what the real one cannot be made to do.

use serde_json::{Value, json};
use turnpass::cli::environment::InheritedCredentials;
use turnpass::replay::{Carrier, History, ReplayOptions, ReplayTransport};
use turnpass::{ErrorCode, Provider};
use turnpass_lab::cli::{EmulatorOptions, Run, Script};
use turnpass_lab::scenario::Reply;

use crate::stage::{Stage, ask, ask_with_tools, go_on, limits, told};

const BOTH: [History; 2] = [History::Native, History::Transcript];

/// A process that takes the history and answers once, with these steps after the user's line.
fn run(init: Value, steps: Value) -> Value {
    let mut all = vec![
        json!("answer_controls"),
        json!({"expect": {"type": "user"}}),
        json!({"send_init": init}),
    ];
    all.extend(steps.as_array().unwrap().iter().cloned());
    json!({"runs": [{"steps": all}]})
}

fn replay(stage: &Stage, change: impl FnOnce(&mut ReplayOptions)) -> Provider {
    let mut options = stage.replay_options(History::Native);
    change(&mut options);
    Provider::new(ReplayTransport::new(options).unwrap())
}

#[tokio::test]
async fn replay_built_in_plugins_are_learned_and_the_start_repeated_once() {
    for history in BOTH {
        let plugins = EmulatorOptions {
            plugins: vec!["brand-new".into()],
            ..EmulatorOptions::default()
        };
        let stage = Stage::script(Script::runs("2.1.332", [Run::Emulator(plugins)]));
        let provider = stage.replay(history);
        let first = ask_with_tools("[[say fine]]");
        let heard = told(&provider, first.clone()).await;
        assert_eq!(heard.text(), "fine");
        assert_eq!(stage.recording().runs.len(), 2);
        let heard = told(&provider, go_on(&first, heard.done())).await;
        heard.done();
        assert_eq!(stage.recording().runs.len(), 3, "it was learned for good");
        // One that cannot be disabled ends after one more start.
        let stays = json!({"plugins": [{"name": "x", "source": "x@builtin"}]});
        let stage = Stage::json(run(stays, json!(["wait_eof"])));
        told(&stage.replay(history), ask("x"))
            .await
            .failed(ErrorCode::IsolationCustomizations);
        assert_eq!(stage.recording().runs.len(), 2);
        assert!(stage.sent().is_empty());
    }
}

#[tokio::test]
async fn replay_whatever_else_is_loaded_fails_closed_with_its_code() {
    let cases = [
        (
            json!({"plugins": [{"name": "mine", "source": "mine@market"}]}),
            ErrorCode::IsolationCustomizations,
        ),
        (
            json!({"slash_commands": ["help"]}),
            ErrorCode::IsolationCustomizations,
        ),
        (json!({"skills": ["x"]}), ErrorCode::IsolationCustomizations),
        (
            json!({"permissionMode": "default"}),
            ErrorCode::IsolationPermissions,
        ),
        (
            json!({"apiKeySource": "ANTHROPIC_API_KEY"}),
            ErrorCode::IsolationAuth,
        ),
        (json!({"tools": ["Bash"]}), ErrorCode::IsolationTools),
        (
            json!({"mcp_servers": [{"name": "mine", "status": "connected"}]}),
            ErrorCode::IsolationMcp,
        ),
        (
            json!({"mcp_server_errors": [{"name": "x"}]}),
            ErrorCode::McpStartup,
        ),
        (json!({"model": ""}), ErrorCode::ProtocolInit),
    ];
    for (init, code) in cases {
        for history in BOTH {
            let stage = Stage::json(run(init.clone(), json!(["hang"])));
            let heard = told(&stage.replay(history), ask("x")).await;
            heard.failed(code);
            assert!(stage.sent().is_empty(), "{init}");
            stage.all_gone(crate::stage::PATIENCE).await;
        }
    }
}

#[tokio::test]
async fn replay_no_word_is_said_before_the_tools_are_there() {
    for servers in [
        json!([{"name": "turnpass", "status": "failed"}]),
        json!([]),
        json!([{"name": "turnpass", "status": "pending"}]),
        json!([{"name": "turnpass", "status": "connected", "tools": []}]),
        json!([{"name": "turnpass", "status": "connected", "tools": [{"name": "read"}]}]),
    ] {
        let answers = json!([
            {"subtype": "initialize", "response": {}},
            {"subtype": "mcp_status", "response": {"mcpServers": servers}},
        ]);
        let steps =
            json!([{"answer_controls": answers}, {"expect": {"type": "user"}}, {"exit": 3}]);
        let stage = Stage::json(json!({"runs": [{"steps": steps}]}));
        let mut request = ask_with_tools("x");
        request.limits = limits(1_500, 60_000, 60_000);
        let heard = told(&stage.replay(History::Native), request).await;
        let code = heard.error().code();
        assert!(
            matches!(code, ErrorCode::McpStartup | ErrorCode::StartTimeout),
            "{servers}: {code}"
        );
        let said = stage.recording().runs[0]
            .stdin
            .iter()
            .any(|line| format!("{line:?}").contains("shouldQuery"));
        assert!(!said && stage.sent().is_empty(), "{servers}");
    }
}

#[tokio::test]
async fn replay_a_call_of_the_tool_server_is_a_violation() {
    let call = json!({
        "type": "control_request", "request_id": "cli-1",
        "request": {"subtype": "mcp_message", "server_name": "turnpass", "message": {
            "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": "read", "arguments": {"path": "a"}},
        }},
    });
    let answers = json!([
        {"subtype": "initialize", "response": {}},
        {"subtype": "mcp_status", "response": {"mcpServers": [
            {"name": "turnpass", "status": "connected", "tools": [{"name": "read"}, {"name": "write"}]},
        ]}},
    ]);
    let init = json!({
        "tools": ["mcp__turnpass__read", "mcp__turnpass__write"],
        "mcp_servers": [{"name": "turnpass", "status": "connected"}],
    });
    let steps = json!([
        {"answer_controls": answers}, {"expect": {"type": "user"}}, {"send_init": init}, {"send": call}, "hang",
    ]);
    let stage = Stage::json(json!({"runs": [{"steps": steps}]}));
    let heard = told(&stage.replay(History::Native), ask_with_tools("x")).await;
    let error = heard.failed(ErrorCode::McpExecution);
    assert!(error.detail().contains("read"), "{error}");
    stage.all_gone(crate::stage::PATIENCE).await;
}

#[tokio::test]
async fn bug_032_a_replay_refuses_a_credential_in_the_environment_unless_told_otherwise() {
    assert_eq!(
        ReplayOptions::default().inherited_credentials,
        InheritedCredentials::Refuse
    );
}

#[tokio::test]
async fn replay_each_history_works_over_each_carrier() {
    for history in BOTH {
        for carrier in [Carrier::InBand, Carrier::Stdio] {
            let stage = Stage::emulator();
            let provider = replay(&stage, |options| {
                options.history = Some(history);
                options.tools = Some(carrier);
            });
            let first = ask_with_tools(r#"[[call read {"path":"a"}]] [[then [[say done]]]]"#);
            let heard = told(&provider, first.clone()).await;
            assert_eq!(heard.calls().len(), 1, "{history} {carrier:?}");
            let heard = told(&provider, go_on(&first, heard.done())).await;
            assert_eq!(heard.text(), "done", "{history} {carrier:?}");
            assert_eq!(stage.sent().len(), 2);
        }
    }
}

#[tokio::test]
async fn bug_096_the_mark_can_be_switched_off_and_there_is_never_a_fifth() {
    for history in BOTH {
        for (mark, most) in [(true, 4), (false, 3)] {
            let stage = Stage::emulator();
            let provider = replay(&stage, |options| {
                options.history = Some(history);
                options.cache_mark = mark;
            });
            let mut request = ask_with_tools("[[say one]]");
            for _ in 0..3 {
                let heard = told(&provider, request.clone()).await;
                request = go_on(&request, heard.done());
            }
            for sent in stage.sent() {
                let marks = sent.cache.as_ref().unwrap().breakpoints;
                assert_eq!(marks, most, "{history}");
            }
        }
    }
}

#[tokio::test]
async fn replay_retries_before_the_answer_are_let_through_and_told() {
    let stage = Stage::emulator();
    let provider = replay(&stage, |options| options.retries = 2);
    stage
        .upstream
        .enqueue(Reply::error(529, "overloaded_error", "busy"));
    let heard = told(&provider, ask("[[say now]]")).await;
    assert_eq!(heard.text(), "now");
    assert_eq!(heard.done().upstream_requests, 2);
    assert_eq!(stage.sent().len(), 2);
}
