//! What a process shows at its start is judged before anything goes to the service.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};
use turnpass::limits::budget::{Allowance, Budgets};
use turnpass::relay::{RelayOptions, RelayTransport};
use turnpass::request::Effort;
use turnpass::{ErrorCode, Provider, Transport as _};
use turnpass_lab::cli::{EmulatorOptions, Run, Script};

use crate::stage::{
    MODES, PER_REQUEST_MCP, ROWS, Stage, WARM, WARM_MCP, ask, ask_with_tools, assert_valid, told,
    tool,
};
use crate::{post, posted, turns};

/// A turn whose first record differs in these fields.
fn with_init(row: crate::stage::Row, init: Value) -> Value {
    let mut run = turns(row, [post(row)]);
    let text = run.to_string().replacen(
        r#"{"send_init":null}"#,
        &json!({"send_init": init}).to_string(),
        1,
    );
    run = serde_json::from_str(&text).unwrap();
    run
}

#[tokio::test]
async fn bug_039_an_executing_tool_fails_closed_and_a_harmless_one_does_not() {
    for row in MODES {
        let stage = Stage::json(json!({"runs": [with_init(row, json!({"tools": ["Bash"]}))]}));
        told(&stage.provider(row), ask("x"))
            .await
            .failed(ErrorCode::IsolationTools);
        assert!(stage.sent().is_empty());
        for extra in ["EndConversation", "ToolSearch", "WaitForMcpServers"] {
            let stage = Stage::json(json!({"runs": [with_init(row, json!({"tools": [extra]}))]}));
            assert_eq!(
                told(&stage.provider(row), ask("[[say fine]]")).await.text(),
                "fine",
                "{extra}"
            );
        }
    }
}

#[tokio::test]
async fn bug_032_a_key_in_place_of_the_subscription_stops_before_the_service() {
    for row in MODES {
        for source in ["ANTHROPIC_API_KEY", "apiKeyHelper", "/login managed key"] {
            let stage =
                Stage::json(json!({"runs": [with_init(row, json!({"apiKeySource": source}))]}));
            let heard = told(&stage.provider(row), ask("x")).await;
            assert!(
                heard
                    .failed(ErrorCode::IsolationAuth)
                    .detail()
                    .contains(source)
            );
            assert!(stage.sent().is_empty(), "{source}");
        }
        // The same when the request itself carries a key, whatever the record says.
        let run = turns(row, [posted(row, json!({"headers": {"x-api-key": "sk"}}))]);
        let stage = Stage::json(json!({"runs": [run]}));
        told(&stage.provider(row), ask("x"))
            .await
            .failed(ErrorCode::IsolationAuth);
        assert!(stage.sent().is_empty());
    }
}

#[tokio::test]
async fn customizations_modes_and_servers_that_are_not_ours_stop_before_the_service() {
    for row in MODES {
        let cases = [
            (
                json!({"permissionMode": "default"}),
                ErrorCode::IsolationPermissions,
            ),
            (
                json!({"plugins": [{"name": "mine", "source": "mine@market"}]}),
                ErrorCode::IsolationCustomizations,
            ),
            (
                json!({"slash_commands": ["deploy"]}),
                ErrorCode::IsolationCustomizations,
            ),
            (
                json!({"skills": ["mine"]}),
                ErrorCode::IsolationCustomizations,
            ),
            (
                json!({"mcp_servers": [{"name": "mine", "status": "connected"}]}),
                ErrorCode::IsolationMcp,
            ),
        ];
        for (init, code) in cases {
            let stage = Stage::json(json!({"runs": [with_init(row, init.clone())]}));
            let heard = told(&stage.provider(row), ask("x")).await;
            assert_eq!(heard.error().code(), code, "{init}: {}", heard.error());
            assert!(stage.sent().is_empty(), "{init}");
            stage.all_gone(std::time::Duration::from_secs(5)).await;
        }
    }
}

#[tokio::test]
async fn bug_040_and_063_a_server_that_is_missing_pending_failed_or_reported_stops_before_the_service()
 {
    let tools = json!(["mcp__turnpass__read", "mcp__turnpass__write"]);
    for row in [WARM_MCP, PER_REQUEST_MCP] {
        let server = |status: &str| json!([{"name": "turnpass", "status": status}]);
        let cases = [
            json!({"mcp_servers": []}),
            json!({"mcp_servers": server("pending"), "tools": []}),
            json!({"mcp_servers": server("failed"), "tools": []}),
            // Connected, and its list did not come over.
            json!({"mcp_servers": server("connected"), "tools": []}),
            json!({"mcp_servers": server("connected"), "tools": ["mcp__turnpass__read"]}),
            json!({"mcp_servers": server("connected"), "tools": tools, "mcp_server_errors": [{"name": "turnpass", "error": "x"}]}),
            json!({"mcp_servers": server("connected"), "tools": tools, "plugin_errors": [{"plugin": "p", "error": "x"}]}),
        ];
        for init in cases {
            let stage = Stage::json(json!({"runs": [with_init(row, init.clone())]}));
            let heard = told(&stage.provider(row), ask_with_tools("x")).await;
            assert_eq!(
                heard.error().code(),
                ErrorCode::McpStartup,
                "{init}: {}",
                heard.error()
            );
            assert!(stage.sent().is_empty(), "{init}");
        }
    }
}

#[tokio::test]
async fn bug_063_and_074_every_tool_is_there_in_the_first_request() {
    for row in ROWS {
        let stage = Stage::emulator();
        let mut request = ask("[[say x]]");
        request.tools = (0..120).map(|at| tool(&format!("tool_{at:03}"))).collect();
        for tool in &mut request.tools {
            tool.description = "d".repeat(2000);
        }
        told(&stage.provider(row), request).await.done();
        let sent = stage.sent();
        let tools = sent[0].field("/tools").unwrap().as_array().unwrap();
        let ours = tools.iter().filter(|tool| {
            tool["name"]
                .as_str()
                .unwrap()
                .starts_with("mcp__turnpass__tool_")
        });
        assert_eq!(ours.count(), 120, "{row:?}");
        assert!(
            tools
                .iter()
                .all(|tool| tool["defer_loading"] != true && tool["name"] != "ToolSearch")
        );
        assert_valid(&sent);
    }
}

#[tokio::test]
async fn bug_063_a_slow_tool_server_is_waited_for() {
    let row = PER_REQUEST_MCP;
    let stage = Stage::emulator();
    let program = env!("CARGO_BIN_EXE_turnpass");
    let slow = executable(
        &stage,
        "slow",
        &format!("#!/bin/sh\nsleep 2\nexec '{program}' \"$@\"\n"),
        0o755,
    );
    let options = RelayOptions {
        tool_server: Some(slow),
        ..stage.options(row)
    };
    let provider = Provider::new(RelayTransport::new(options).unwrap());
    let heard = told(&provider, ask_with_tools("[[call read {}]]")).await;
    assert_eq!(heard.calls().len(), 1);
    assert_eq!(
        stage.sent()[0].field("/tools/0/name").unwrap(),
        "mcp__turnpass__read"
    );
    // One that never comes up is told before anything is sent.
    let options = RelayOptions {
        tool_server: Some("/bin/false".into()),
        ..stage.options(row)
    };
    let provider = Provider::new(RelayTransport::new(options).unwrap());
    told(&provider, ask_with_tools("x"))
        .await
        .failed(ErrorCode::McpStartup);
    assert_eq!(stage.sent().len(), 1);
}

#[tokio::test]
async fn built_in_plugins_are_learned_and_the_start_repeated_once_before_anything_is_sent() {
    for row in MODES {
        let plugins = EmulatorOptions {
            plugins: vec!["brand-new".into()],
            ..EmulatorOptions::default()
        };
        let stage = Stage::script(Script::runs("2.1.332", [Run::Emulator(plugins)]));
        let provider = stage.provider(row);
        for _ in 0..2 {
            let heard = told(&provider, ask("[[say fine]]")).await;
            assert_eq!(
                (heard.text(), heard.done().upstream_requests),
                ("fine".to_owned(), 1)
            );
        }
        let starts = if row.is_warm() { 2 } else { 3 };
        assert_eq!(
            stage.recording().runs.len(),
            starts,
            "it was learned for good"
        );
        assert_eq!(stage.sent().len(), 2);
        // One that cannot be disabled ends after one more start.
        let stage = Stage::json(
            json!({"runs": [with_init(row, json!({"plugins": [{"name": "x", "source": "x@builtin"}]}))]}),
        );
        told(&stage.provider(row), ask("x"))
            .await
            .failed(ErrorCode::IsolationCustomizations);
        assert_eq!(stage.recording().runs.len(), 2);
        assert!(stage.sent().is_empty());
    }
}

#[tokio::test]
async fn bug_027_the_command_line_stays_short_whatever_the_request_holds() {
    for row in ROWS {
        let stage = Stage::emulator();
        let mut request = ask("[[say short]]");
        request.model = "claude-opus-4-6[1m]".into();
        request.system = "s".repeat(1024 * 1024);
        request.tools = (0..800)
            .map(|at| {
                let mut tool = tool(&format!("{at:03}_{}", "n".repeat(56)));
                tool.input_schema = json!({"type": "object", "properties": {"p": {"type": "string", "description": "d".repeat(960)}}});
                tool
            })
            .collect();
        let heard = told(&stage.provider(row), request).await;
        assert_eq!(heard.text(), "short", "{row:?}: {:?}", heard.error);
        for run in stage.recording().runs {
            let bytes: usize = run.argv.iter().map(|arg| arg.len() + 1).sum();
            assert!(bytes < 8 * 1024, "{row:?}: {bytes} bytes");
        }
        let sent = stage.sent();
        assert!(sent[0].body_bytes > 1_800_000);
    }
}

#[tokio::test]
async fn bug_025_what_is_no_program_is_told_and_never_taken_for_signed_out() {
    let stage = Stage::emulator();
    let fake = |name: &str, text: &str, mode: u32| executable(&stage, name, text, mode);
    let cases = [
        (stage.path("nowhere/claude"), ErrorCode::ExecutableMissing),
        (
            fake("text", "this is a placeholder\n", 0o755),
            ErrorCode::ExecutableUnusable,
        ),
        (fake("empty", "", 0o755), ErrorCode::ExecutableUnusable),
        (
            fake("mode", "#!/bin/sh\necho 2.1.332\n", 0o644),
            ErrorCode::ExecutableUnusable,
        ),
        (
            fake("interpreter", "#!/no/such/node\n", 0o755),
            ErrorCode::ExecutableUnusable,
        ),
        (
            fake(
                "hint",
                "#!/bin/sh\necho 'Run npm install first' >&2\nexit 1\n",
                0o755,
            ),
            ErrorCode::VersionInvalid,
        ),
        (
            fake("old", "#!/bin/sh\necho '2.1.200 (Claude Code)'\n", 0o755),
            ErrorCode::VersionTooOld,
        ),
    ];
    for (path, code) in cases {
        for row in MODES {
            let options = RelayOptions {
                claude_path: Some(path.clone()),
                ..stage.options(row)
            };
            let provider = Provider::new(RelayTransport::new(options).unwrap());
            let heard = told(&provider, ask("x")).await;
            let error = heard.error();
            // A hint that is printed by something that runs is either: it cannot be told from an unusable program.
            let also =
                code == ErrorCode::VersionInvalid && error.code() == ErrorCode::ExecutableUnusable;
            assert!(error.code() == code || also, "{}: {error}", path.display());
            assert!(!error.is_auth() && !error.is_retryable());
        }
    }
    assert!(stage.recording().runs.is_empty() && stage.sent().is_empty());
}

#[tokio::test]
async fn an_update_of_the_cli_between_two_generations_starts_the_new_one() {
    let stage = Stage::script(Script::emulator("2.1.310"));
    let relay = RelayTransport::new(stage.options(WARM)).unwrap();
    let provider = Provider::new(relay);
    told(&provider, ask("[[say old]]")).await.done();
    stage.change(Script::emulator("2.1.332"));
    assert_eq!(told(&provider, ask("[[say new]]")).await.text(), "new");
    let runs = stage.recording().runs;
    assert_eq!(runs.len(), 2, "the process of the old version is not used");
}

#[tokio::test]
async fn a_warm_up_starts_and_primes_one_process_and_sends_nothing() {
    let stage = Stage::emulator();
    let relay = RelayTransport::new(stage.options(WARM)).unwrap();
    let request = ask("[[say x]]");
    relay.warm_up(&request).await.unwrap();
    assert_eq!((stage.recording().runs.len(), stage.sent().len()), (1, 0));
    let heard = crate::stage::hear(relay.generate(request)).await;
    assert_eq!(heard.text(), "x");
    assert_eq!((stage.recording().runs.len(), stage.sent().len()), (1, 1));
}

#[tokio::test]
async fn the_efforts_that_the_cli_told_decide_and_no_generation_asks_for_them() {
    let stage = Stage::emulator();
    let options = || RelayOptions {
        state_dir: Some(stage.path("state")),
        ..stage.options(WARM)
    };
    let with = |effort| {
        let mut request = ask("[[say x]]");
        request.effort = Some(effort);
        request
    };
    let high = || with(Effort::High);
    let relay = RelayTransport::new(options()).unwrap();
    let found = relay.models().await;
    assert!(found.fallback.is_none(), "{found:?}");
    told(&Provider::new(relay), high()).await.done();
    // As if this version had told less.
    let file = stage.path("state/models.json");
    let mut kept: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    for model in kept["models"].as_array_mut().unwrap() {
        model["efforts"] = json!(["low"]);
    }
    std::fs::write(&file, kept.to_string()).unwrap();
    let before = stage.recording().runs.len();
    let provider = Provider::new(RelayTransport::new(options()).unwrap());
    told(&provider, high())
        .await
        .failed(ErrorCode::EffortUnsupported);
    assert_eq!(stage.recording().runs.len(), before, "nothing was started");
    told(&provider, with(Effort::Low)).await.done();
    // Another version has told nothing yet.
    stage.change(Script::emulator("2.1.310"));
    told(&provider, high()).await.done();
}

#[tokio::test]
async fn a_request_that_never_left_has_not_counted() {
    for row in MODES {
        let out = json!({"json": {"loggedIn": false, "authMethod": "none"}});
        let stage = Stage::json(json!({"auth": [out, out, {}]}));
        let options = RelayOptions {
            budgets: Budgets {
                day: Allowance {
                    requests: Some(1),
                    tokens: None,
                },
                ..Budgets::default()
            },
            state_dir: Some(stage.path("state")),
            ..stage.options(row)
        };
        let provider = Provider::new(RelayTransport::new(options).unwrap());
        for _ in 0..2 {
            told(&provider, ask("x")).await.failed(ErrorCode::Auth);
        }
        told(&provider, ask("[[say x]]")).await.done();
        told(&provider, ask("x")).await.failed(ErrorCode::Budget);
        assert_eq!(stage.sent().len(), 1);
    }
}

/// A file named `claude` in a folder of this name.
fn executable(stage: &Stage, name: &str, text: &str, mode: u32) -> std::path::PathBuf {
    let dir = stage.path(name);
    std::fs::create_dir(&dir).unwrap();
    let draft = dir.join("draft");
    std::fs::write(&draft, text).unwrap();
    std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(mode)).unwrap();
    // Another process writes it, so that nobody here holds it open for writing when it is started.
    let path = dir.join("claude");
    let copied = std::process::Command::new("cp")
        .arg("-p")
        .arg(&draft)
        .arg(&path)
        .status();
    assert!(copied.unwrap().success());
    path
}
