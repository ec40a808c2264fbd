use std::ffi::OsStr;

use super::*;
use crate::cli::environment::{Base, InheritedCredentials, NEVER_SET, Snapshot};
use serde_json::{Value, json};

const PORT: u16 = 40_000;

fn relay() -> RelayAddress {
    RelayAddress {
        port: PORT,
        secret: Secret::new(*b"marker_of_the_secret"),
    }
}

fn ground() -> Ground {
    let program = PathBuf::from("/home/a/.local/bin/claude");
    let dir = PathBuf::from("/run/user/1000/turnpass-1-2-3");
    let environment = Environment::build(
        &Snapshot::from_iter([("HOME", "/home/a"), ("ANTHROPIC_BASE_URL", "http://evil")]),
        Base {
            program: &program,
            tmp: &dir.join("t"),
            time_zone: None,
            inherited: InheritedCredentials::Strip,
        },
    );
    Ground {
        program,
        environment: environment.unwrap(),
        cwd: dir.join("w"),
        dir,
        learned_plugins: BTreeSet::new(),
    }
}

fn server() -> McpServer {
    McpServer::Stdio {
        command: "/opt/turnpass".into(),
        args: vec![
            "mcp".into(),
            "/run/user/1000/turnpass-1-2-3/tools.json".into(),
        ],
        env: Vec::new(),
    }
}

fn per_request<'a>(change: impl FnOnce(&mut RelayPerRequest<'a>)) -> Result<Launch> {
    // Leaked, so that a test may put in borrows of its own.
    let (model, relay, server) = (
        &*Box::leak(Box::new(ModelId::from("claude-sonnet-5-5"))),
        &*Box::leak(Box::new(relay())),
        &*Box::leak(Box::new(server())),
    );
    let mut wanted = RelayPerRequest {
        model,
        effort: None,
        thinking: ThinkingDisplay::Summarized,
        system: "SYSTEM",
        relay,
        server: Some(server),
        extra_body: None,
    };
    change(&mut wanted);
    relay_per_request(&ground(), &wanted)
}

fn warm() -> Launch {
    let wanted = RelayWarm {
        thinking: ThinkingDisplay::Summarized,
        relay: &relay(),
    };
    relay_warm(&ground(), &wanted).unwrap()
}

fn argv(launch: &Launch) -> Vec<&str> {
    launch
        .argv
        .iter()
        .map(|argument| argument.to_str().unwrap())
        .collect()
}

fn file<'a>(launch: &'a Launch, name: &str) -> &'a [u8] {
    let found = launch.files.iter().find(|file| file.name == name);
    &found.expect("the launch has the file").contents
}

fn json_file(launch: &Launch, name: &str) -> Value {
    serde_json::from_slice(file(launch, name)).unwrap()
}

#[test]
fn the_relays_process_for_one_request_is_exactly_this() {
    let launch = per_request(|_| ()).unwrap();
    assert_eq!(
        argv(&launch),
        [
            "-p",
            "turnpass placeholder",
            "--output-format",
            "stream-json",
            "--verbose",
            "--include-partial-messages",
            "--tools",
            "",
            "--setting-sources=",
            "--strict-mcp-config",
            "--disable-slash-commands",
            "--permission-mode",
            "dontAsk",
            "--no-chrome",
            "--prompt-suggestions",
            "false",
            "--no-session-persistence",
            "--max-turns",
            "1",
            "--thinking-display",
            "summarized",
            "--model",
            "claude-sonnet-5-5",
            "--system-prompt-file",
            "/run/user/1000/turnpass-1-2-3/system.txt",
            "--settings",
            "/run/user/1000/turnpass-1-2-3/settings.json",
            "--mcp-config",
            "/run/user/1000/turnpass-1-2-3/mcp.json",
        ]
    );
    assert_eq!(launch.stdin, StdinMode::Null);
    assert_eq!(file(&launch, "system.txt"), b"SYSTEM");
    assert_eq!(
        json_file(&launch, "mcp.json"),
        json!({"mcpServers": {"turnpass": {
            "type": "stdio",
            "command": "/opt/turnpass",
            "args": ["mcp", "/run/user/1000/turnpass-1-2-3/tools.json"],
            "env": {},
        }}})
    );
}

#[test]
fn the_relays_warm_process_is_exactly_this() {
    let launch = warm();
    assert_eq!(
        argv(&launch),
        [
            "-p",
            "--output-format",
            "stream-json",
            "--verbose",
            "--include-partial-messages",
            "--input-format",
            "stream-json",
            "--tools",
            "",
            "--setting-sources=",
            "--strict-mcp-config",
            "--disable-slash-commands",
            "--permission-mode",
            "dontAsk",
            "--no-chrome",
            "--prompt-suggestions",
            "false",
            "--no-session-persistence",
            "--thinking-display",
            "summarized",
            "--settings",
            "/run/user/1000/turnpass-1-2-3/settings.json",
        ]
    );
    assert_eq!(launch.stdin, StdinMode::QUEUE);
    assert_eq!(launch.files.len(), 1);
}

fn in_pool<'a>(change: impl FnOnce(&mut PoolProcess<'a>)) -> Result<Launch> {
    let mut wanted = PoolProcess {
        thinking: ThinkingDisplay::Omitted,
        persists: true,
        resume: None,
        max_turns: None,
        effort: None,
        server: None,
        base_url: None,
    };
    change(&mut wanted);
    super::pool(&ground(), &wanted)
}

#[test]
fn the_pools_process_is_exactly_this() {
    let launch = in_pool(|_| ()).unwrap();
    let warm = warm();
    let shared = argv(&warm);
    let end = shared
        .iter()
        .position(|word| *word == "--no-session-persistence");
    let mut wanted = shared[..end.unwrap()].to_vec();
    wanted.extend(["--system-prompt-snapshot", "off", "--allowedTools"]);
    wanted.extend(["mcp__turnpass__*", "--settings"]);
    wanted.push("/run/user/1000/turnpass-1-2-3/settings.json");
    assert_eq!(argv(&launch), wanted);
    assert_eq!(launch.stdin, StdinMode::QUEUE);
    for (name, value) in [
        ("CLAUDE_CODE_MAX_RETRIES", "0"),
        ("MAX_MCP_OUTPUT_TOKENS", "250000"),
    ] {
        assert_eq!(launch.environment.get(name), Some(OsStr::new(value)));
    }
    assert_eq!(launch.environment.get("ANTHROPIC_BASE_URL"), None);
    for (name, reason) in NEVER_SET {
        assert_eq!(launch.environment.get(name), None, "{name}: {reason}");
    }
}

#[test]
fn a_conversation_is_taken_up_where_it_was_and_with_its_model() {
    let (session, at) = (
        "6f1f6f5e-7f0e-4f3a-9d52-0a4f6a0f3c11",
        "00000000-7f0e-4f3a-9d52-0a4f6a0f3c11",
    );
    for fork in [false, true] {
        let launch = in_pool(|wanted| {
            wanted.resume = Some(Resume {
                session,
                at: Some(at),
                model: "opus",
                fork,
            });
        });
        let launch = launch.unwrap();
        let words = argv(&launch);
        let begin = words.iter().position(|word| *word == "--resume").unwrap();
        let mut wanted = vec!["--resume", session, "--resume-session-at", at];
        wanted.extend(fork.then_some("--fork-session"));
        wanted.extend(["--model", "opus", "--settings"]);
        assert_eq!(words[begin..begin + wanted.len()], wanted);
    }
    for wrong in ["--x", "", "a b"] {
        let refused = in_pool(|wanted| {
            wanted.resume = Some(Resume {
                session: wrong,
                at: None,
                model: "claude-sonnet-5-5",
                fork: true,
            });
        });
        assert_eq!(refused.unwrap_err().code(), ErrorCode::RequestInvalid);
    }
}

#[test]
fn what_a_pool_keeps_nowhere_and_its_rounds_are_flags() {
    let server = McpServer::Http {
        url: "http://127.0.0.1:1/mcp".into(),
        bearer: Secret::new(*b"marker"),
        timeout_ms: 600_000,
    };
    let launch = in_pool(|wanted| {
        wanted.persists = false;
        wanted.max_turns = Some(1);
        wanted.server = Some(&server);
    });
    let launch = launch.unwrap();
    let words = argv(&launch);
    assert!(words.contains(&"--no-session-persistence"));
    assert!(words.windows(2).any(|pair| pair == ["--max-turns", "1"]));
    let entry = &json_file(&launch, "mcp.json")["mcpServers"]["turnpass"];
    assert_eq!(entry["headers"]["Authorization"], "Bearer marker");
    assert!(!format!("{launch:?}").contains("marker"));
}

fn replayed(change: impl FnOnce(&mut Replay<'_>)) -> Launch {
    let (model, server) = (ModelId::from("claude-sonnet-5-5"), server());
    let mut wanted = Replay {
        model: &model,
        effort: Some(Effort::High),
        thinking: ThinkingDisplay::Summarized,
        system: "SYSTEM",
        server: Some(&server),
        extra_body: None,
        retries: 0,
        upstream: None,
    };
    change(&mut wanted);
    replay(&ground(), &wanted).unwrap()
}

#[test]
fn the_replays_process_is_exactly_this() {
    let launch = replayed(|_| ());
    assert_eq!(
        argv(&launch),
        [
            "-p",
            "--output-format",
            "stream-json",
            "--verbose",
            "--include-partial-messages",
            "--input-format",
            "stream-json",
            "--tools",
            "",
            "--setting-sources=",
            "--strict-mcp-config",
            "--disable-slash-commands",
            "--permission-mode",
            "dontAsk",
            "--no-chrome",
            "--prompt-suggestions",
            "false",
            "--no-session-persistence",
            "--max-turns",
            "1",
            "--thinking-display",
            "summarized",
            "--model",
            "claude-sonnet-5-5",
            "--effort",
            "high",
            "--system-prompt-file",
            "/run/user/1000/turnpass-1-2-3/system.txt",
            "--settings",
            "/run/user/1000/turnpass-1-2-3/settings.json",
            "--mcp-config",
            "/run/user/1000/turnpass-1-2-3/mcp.json",
        ]
    );
    assert_eq!(launch.stdin, StdinMode::QUEUE);
    assert_eq!(file(&launch, "system.txt"), b"SYSTEM");
    let variable = |launch: &Launch, name: &str| launch.environment.get(name).map(OsStr::to_owned);
    assert_eq!(
        variable(&launch, "CLAUDE_CODE_MAX_RETRIES"),
        Some("0".into())
    );
    // It talks to the service by itself.
    assert_eq!(variable(&launch, "ANTHROPIC_BASE_URL"), None);
    for (name, _) in NEVER_SET {
        assert_eq!(variable(&launch, name), None, "{name}");
    }
    let laboratory = replayed(|wanted| {
        wanted.upstream = Some("http://127.0.0.1:1");
        wanted.retries = 2;
        wanted.extra_body = Some("{}");
    });
    assert_eq!(
        variable(&laboratory, "ANTHROPIC_BASE_URL"),
        Some("http://127.0.0.1:1".into())
    );
    assert_eq!(
        variable(&laboratory, "CLAUDE_CODE_MAX_RETRIES"),
        Some("2".into())
    );
    assert_eq!(
        json_file(&laboratory, "settings.json")["env"],
        json!({"CLAUDE_CODE_EXTRA_BODY": "{}"})
    );
}

#[test]
fn effort_and_thinking_in_the_clis_words() {
    let words = |effort, thinking| {
        let launch = per_request(|wanted| {
            wanted.effort = effort;
            wanted.thinking = thinking;
        });
        argv(&launch.unwrap()).join(" ")
    };
    for level in ["low", "medium", "high", "xhigh", "max"] {
        let all = words(Some(level.parse().unwrap()), ThinkingDisplay::Summarized);
        assert!(all.contains(&format!("--effort {level} ")), "{all}");
    }
    let none = words(Some(Effort::None), ThinkingDisplay::Summarized);
    assert!(none.contains("--thinking disabled ") && !none.contains("--effort"));
    let plain = words(None, ThinkingDisplay::Omitted);
    assert!(!plain.contains("--effort") && !plain.contains("--thinking"));
}

#[test]
fn nothing_secret_is_in_argv_or_environment() {
    for launch in [per_request(|_| ()).unwrap(), warm()] {
        let pairs = launch.environment.clone().into_pairs();
        let open = format!("{:?} {pairs:?} {launch:?}", launch.argv);
        assert!(!open.contains("marker"), "{open}");
        let base = launch.environment.get("ANTHROPIC_BASE_URL");
        assert_eq!(base, Some(OsStr::new("http://127.0.0.1:40000")));
        assert_eq!(
            json_file(&launch, "settings.json")["env"]["ANTHROPIC_BASE_URL"],
            "http://127.0.0.1:40000/marker_of_the_secret"
        );
    }
}

#[test]
fn the_bearer_of_a_listener_is_in_the_file_only() {
    let server = McpServer::Http {
        url: "http://127.0.0.1:1/mcp".into(),
        bearer: Secret::new(*b"marker"),
        timeout_ms: 600_000,
    };
    let launch = per_request(|wanted| wanted.server = Some(&server)).unwrap();
    assert!(!format!("{launch:?} {server:?}").contains("marker"));
    let entry = &json_file(&launch, "mcp.json")["mcpServers"]["turnpass"];
    assert_eq!(entry["headers"]["Authorization"], "Bearer marker");
    assert_eq!(entry["timeout"], 600_000);
}

#[test]
fn members_of_the_body_go_by_the_settings_file() {
    let body = r#"{"tools":[{"name":"a","input_schema":{"type":"object"}}],"temperature":1.0}"#;
    let launch = per_request(|wanted| {
        wanted.extra_body = Some(body);
        wanted.server = None;
    });
    let launch = launch.unwrap();
    assert_eq!(
        json_file(&launch, "settings.json")["env"]["CLAUDE_CODE_EXTRA_BODY"],
        body
    );
    assert!(!argv(&launch).contains(&"--mcp-config"));
}

#[test]
fn a_process_that_is_asked_for_use_reaches_its_account_by_itself() {
    let launch = asked(&ground()).unwrap();
    for name in [
        "ANTHROPIC_BASE_URL",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    ] {
        assert!(launch.environment.get(name).is_none(), "{name}");
    }
    assert!(json_file(&launch, SETTINGS_FILE).get("env").is_none());
    let words = argv(&launch);
    assert!(words.contains(&"--no-session-persistence"));
    assert!(!words.contains(&"--model") && !words.contains(&PLACEHOLDER));
}

#[test]
fn no_launch_sets_what_must_never_be_set() {
    for launch in [per_request(|_| ()).unwrap(), warm()] {
        let settings = json_file(&launch, "settings.json");
        for (name, reason) in NEVER_SET {
            assert_eq!(launch.environment.get(name), None, "{name}: {reason}");
            assert!(settings["env"].get(name).is_none(), "{name}: {reason}");
        }
        for flag in [
            "--bare",
            "--safe-mode",
            "--allowedTools",
            "--resume",
            "--betas",
        ] {
            assert!(!argv(&launch).contains(&flag), "{flag}");
        }
    }
}

#[test]
fn bug_027_argv_stays_short_whatever_the_request_holds() {
    let system = "x".repeat(1024 * 1024);
    let tools: Vec<_> = (0..800)
        .map(|index| json!({"name": format!("{index:060}"), "input_schema": {"type": "object", "x": "y".repeat(1024)}}))
        .collect();
    let body = json!({ "tools": tools }).to_string();
    let launch = per_request(|wanted| {
        wanted.system = &system;
        wanted.extra_body = Some(&body);
    });
    let launch = launch.unwrap();
    assert!(launch.argv_bytes() < ARGV_LIMIT_BYTES);
    assert!(launch.argv_bytes() < 1024, "{} bytes", launch.argv_bytes());
    assert_eq!(file(&launch, "system.txt").len(), system.len());
    let longest = launch.environment.clone().into_pairs();
    assert!(longest.iter().all(|(_, value)| value.len() < 1024));
}

#[test]
fn bug_027_a_path_that_is_too_long_is_refused_before_a_start() {
    let mut ground = ground();
    ground.dir = PathBuf::from(format!("/{}", "x".repeat(ARGV_LIMIT_BYTES)));
    let wanted = RelayWarm {
        thinking: ThinkingDisplay::Omitted,
        relay: &relay(),
    };
    let error = relay_warm(&ground, &wanted).unwrap_err();
    assert_eq!(error.code(), ErrorCode::RequestInvalid);
}

#[test]
fn bug_028_a_nul_in_the_model_is_refused_and_in_the_prompt_kept() {
    for model in ["a\0b", "", " ", "--settings"] {
        let model = ModelId::from(model);
        let error = per_request(|wanted| wanted.model = &model).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RequestInvalid, "{model:?}");
    }
    let launch = per_request(|wanted| wanted.system = "a\0b\r\n").unwrap();
    assert_eq!(file(&launch, "system.txt"), b"a\0b\r\n");
}

#[test]
fn a_secret_that_is_no_path_segment_is_refused() {
    for secret in ["", "a/b", "a?b", "é", "a b"] {
        let address = RelayAddress {
            port: PORT,
            secret: Secret::new(secret.as_bytes()),
        };
        assert_eq!(address.private().unwrap_err().code(), ErrorCode::Internal);
    }
}

#[test]
fn bug_023_an_unknown_option_is_an_incompatible_version() {
    let error = refused_option("error: unknown option '--thinking-display'\n").unwrap();
    assert_eq!(error.code(), ErrorCode::VersionIncompatible);
    assert!(error.detail().ends_with("--thinking-display"));
    for other in [
        "",
        "Error: Settings file not found: x",
        "error: unknown option 'x'",
    ] {
        assert!(refused_option(other).is_none(), "{other}");
    }
}

#[tokio::test]
async fn a_launch_writes_its_files_and_runs() {
    let root = tempfile::tempdir().unwrap();
    let dir = PrivateDir::create(&[root.path().to_owned()]).unwrap();
    let mut ground = ground();
    ground.dir = dir.path().to_owned();
    ground.cwd = dir.work();
    ground.program = "/bin/cat".into();
    let wanted = RelayWarm {
        thinking: ThinkingDisplay::Omitted,
        relay: &relay(),
    };
    let mut launch = relay_warm(&ground, &wanted).unwrap();
    let settings = launch.argv.last().unwrap().clone();
    launch.argv = vec![settings];
    let written = launch.files[0].contents.clone();
    let mut child = launch.clone().start(&dir).unwrap();
    let mut out = Vec::new();
    let mut stdout = child.take_stdout().unwrap();
    let read = tokio::io::AsyncReadExt::read_to_end(&mut stdout, &mut out);
    let limit = std::time::Duration::from_secs(30);
    tokio::time::timeout(limit, read).await.unwrap().unwrap();
    assert_eq!(out, written);

    let other = PrivateDir::create(&[root.path().to_owned()]).unwrap();
    let error = launch.start(&other).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Internal);
}
