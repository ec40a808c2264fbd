//! What a child inherits, in a host whose own environment is full of traps. The environment of a process cannot be
//! changed safely from within, so each host is a process of its own: this test program again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use turnpass::Provider;
use turnpass::cli::environment::InheritedCredentials;
use turnpass::relay::{LoopbackUrl, RelayOptions, RelayTransport};
use turnpass_lab::rig::RefusingProxy;

use crate::stage::{MODES, PER_REQUEST, ROWS, Row, Stage, ask_with_tools, told};

/// Holds what the process that plays the host is to do.
const HOST: &str = "TURNPASS_TEST_HOST";

/// Not a test of its own: the others start this one in a process with another environment.
#[tokio::test]
async fn play_the_host() {
    let Ok(order) = std::env::var(HOST) else {
        return;
    };
    let order: Value = serde_json::from_str(&order).unwrap();
    let text = |key: &str| order[key].as_str().map(PathBuf::from);
    let row = ROWS[order["row"].as_u64().unwrap() as usize];
    let options = RelayOptions {
        process: Some(row.process),
        tools: Some(row.tools),
        claude_path: text("claude"),
        tool_server: text("tool_server"),
        spares: 0,
        inherited_credentials: match order["refuse"].as_bool() {
            Some(true) => InheritedCredentials::Refuse,
            _ => InheritedCredentials::Strip,
        },
        lab_upstream: Some(LoopbackUrl::parse(order["upstream"].as_str().unwrap()).unwrap()),
        lab_home: text("home"),
        ..RelayOptions::default()
    };
    let provider = Provider::new(RelayTransport::new(options).unwrap());
    let mut request = ask_with_tools(r#"[[say hello]] [[call read {}]]"#);
    request.place.time_zone = order["time_zone"].as_str().map(str::to_owned);
    let heard = told(&provider, request).await;
    let said = match heard.error {
        Some(error) => json!({"code": error.code().as_str(), "message": error.to_string()}),
        None => json!({"text": heard.text(), "calls": heard.calls().len()}),
    };
    println!("\nHOST {said}");
    provider.shutdown().await.unwrap();
}

/// Runs a host with these variables; gives what it said.
async fn host(stage: &Stage, row: Row, more: Value, variables: &[(&str, &str)]) -> Value {
    let mut order = json!({
        "row": ROWS.iter().position(|other| *other == row).unwrap(),
        "claude": stage.claude(), "tool_server": env!("CARGO_BIN_EXE_turnpass"),
        "upstream": stage.upstream.url(), "home": stage.path("home"),
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        order[key] = value.clone();
    }
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "environment::play_the_host", "--nocapture"])
        .env_clear()
        .envs([("PATH", "/usr/bin:/bin"), ("HOME", "/nonexistent")])
        .envs(variables.iter().copied())
        .env(HOST, order.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(crate::stage::PATIENCE, child)
        .await
        .unwrap()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = out.lines().find_map(|line| line.strip_prefix("HOST "));
    let said = said.unwrap_or_else(|| panic!("{out}{}", String::from_utf8_lossy(&output.stderr)));
    serde_json::from_str(said).unwrap()
}

/// The environment of the one process that was started.
fn environment(stage: &Stage) -> BTreeMap<String, String> {
    stage.recording().only().unwrap().environment.clone()
}

#[tokio::test]
async fn bug_032_and_033_no_credential_backend_or_marker_is_inherited() {
    let traps = [
        ("ANTHROPIC_API_KEY", "sk-trap"),
        ("ANTHROPIC_AUTH_TOKEN", "trap"),
        ("ANTHROPIC_CUSTOM_HEADERS", "x-trap: 1"),
        ("ANTHROPIC_MODEL", "trap"),
        ("ANTHROPIC_BETAS", "trap"),
        ("CLAUDE_CODE_OAUTH_TOKEN", "trap"),
        ("CLAUDE_CODE_USE_BEDROCK", "1"),
        ("CLAUDE_CODE_USE_VERTEX", "1"),
        ("CLAUDE_CODE_USE_FOUNDRY", "1"),
        ("CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST", "1"),
        ("CLAUDE_CODE_ENTRYPOINT", "trap"),
        ("CLAUDE_CODE_SIMPLE", "1"),
        ("CLAUDE_CODE_EXTRA_BODY", "{\"max_tokens\":1}"),
        ("CLAUDE_CODE_RETRY_WATCHDOG", "1"),
        ("CLAUDE_CODE_SSE_PORT", "1"),
        ("CLAUDE_CODE_SESSION_ID", "trap"),
        ("CLAUDECODE", "1"),
        ("AWS_ACCESS_KEY_ID", "trap"),
        ("AWS_BEARER_TOKEN_BEDROCK", "trap"),
        ("NODE_OPTIONS", "--require /trap.js"),
        ("LD_PRELOAD_TRAP", "trap"),
        ("MY_OWN_SECRET", "trap"),
    ];
    for row in MODES {
        let stage = Stage::emulator();
        let mut variables = traps.to_vec();
        variables.push(("ANTHROPIC_BASE_URL", "http://127.0.0.1:9/trap"));
        let said = host(&stage, row, json!({}), &variables).await;
        assert_eq!(said, json!({"text": "hello", "calls": 1}));
        let environment = environment(&stage);
        for (name, value) in traps {
            assert_ne!(
                environment.get(name).map(String::as_str),
                Some(value),
                "{row:?}: {name}"
            );
        }
        assert!(!environment["ANTHROPIC_BASE_URL"].contains("trap"));
        assert!(environment["ANTHROPIC_BASE_URL"].starts_with("http://127.0.0.1:"));
        let sent = stage.sent();
        assert_eq!(sent.len(), 1);
        assert!(sent[0].header("x-trap").is_none() && sent[0].header("x-api-key").is_none());
        // The secret of the relay stands neither in the environment nor in argv.
        let run = stage.recording().only().unwrap().clone();
        let settings = run.flag("--settings").unwrap().to_owned();
        assert!(
            !std::path::Path::new(&settings).exists(),
            "the private directory is gone with its process"
        );
    }
}

#[tokio::test]
async fn bug_032_refuse_names_the_variable_and_starts_nothing() {
    for name in [
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_BASE_URL",
    ] {
        let stage = Stage::emulator();
        let said = host(
            &stage,
            PER_REQUEST,
            json!({"refuse": true}),
            &[(name, "sk-trap")],
        )
        .await;
        assert_eq!(said["code"], "inherited_credentials", "{said}");
        let message = said["message"].as_str().unwrap();
        assert!(
            message.contains(name) && !message.contains("sk-trap"),
            "{message}"
        );
        assert!(stage.recording().runs.is_empty() && stage.sent().is_empty());
    }
}

#[tokio::test]
async fn bug_034_loopback_never_goes_to_a_proxy() {
    for row in ROWS {
        for no_proxy in [None, Some("example.com"), Some("*")] {
            let stage = Stage::emulator();
            let proxy = RefusingProxy::start().unwrap();
            let url = proxy.url();
            let mut variables: Vec<(&str, &str)> = [
                "HTTP_PROXY",
                "HTTPS_PROXY",
                "ALL_PROXY",
                "http_proxy",
                "https_proxy",
                "all_proxy",
            ]
            .map(|name| (name, url.as_str()))
            .to_vec();
            variables.extend(no_proxy.map(|value| ("NO_PROXY", value)));
            let said = host(&stage, row, json!({}), &variables).await;
            assert_eq!(said["text"], "hello", "{said}");
            assert_eq!(
                proxy.attempts(),
                Vec::<String>::new(),
                "{row:?} {no_proxy:?}"
            );
            let environment = environment(&stage);
            for name in ["NO_PROXY", "no_proxy"] {
                let value = &environment[name];
                match no_proxy {
                    Some("*") => assert_eq!(value, "*"),
                    before => {
                        let parts: Vec<&str> = value.split(',').map(str::trim).collect();
                        assert!(
                            ["127.0.0.1", "localhost", "::1"]
                                .iter()
                                .all(|host| parts.contains(host)),
                            "{value}"
                        );
                        assert!(
                            before.is_none_or(|before| parts.contains(&before)),
                            "{value}"
                        );
                    }
                }
            }
            assert_eq!(
                environment["HTTPS_PROXY"], url,
                "the person's proxy stays for the CLI's own way out"
            );
        }
    }
}

#[tokio::test]
async fn bug_035_and_the_place_of_the_session_are_passed_on() {
    let stage = Stage::emulator();
    let variables = [
        ("LANG", "de_AT.UTF-8"),
        ("LC_ALL", "C.UTF-8"),
        ("USER", "somebody"),
        ("TZ", "UTC"),
        ("TMPDIR", "/tmp"),
    ];
    for row in MODES {
        let said = host(
            &stage,
            row,
            json!({"time_zone": "Europe/Vienna"}),
            &variables,
        )
        .await;
        assert_eq!(said["text"], "hello");
        let run = stage.recording().runs.last().unwrap().clone();
        assert_eq!(run.environment["LANG"], "de_AT.UTF-8");
        assert_eq!(run.environment["USER"], "somebody");
        assert_eq!(
            run.environment["HOME"],
            stage.path("home").to_str().unwrap()
        );
        assert_ne!(
            run.environment["TMPDIR"], "/tmp",
            "its temporary files are in a private directory"
        );
        assert!(run.cwd.starts_with("/tmp") && !run.cwd.exists());
        if row == PER_REQUEST {
            assert_eq!(run.environment["TZ"], "Europe/Vienna");
        }
        assert_eq!(run.group, run.pid, "it leads its own group");
    }
}
