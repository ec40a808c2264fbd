//! The steps of a script, each seen from outside the process.

#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Cli, PATIENCE, STREAM, Upstream, program, text};
use turnpass_lab::cli::{BigFill, BigKind, BigLine, EXIT_MISMATCH, Recording, Script, install};
use turnpass_lab::rig::{alive_in_group, processes, wait_gone};

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        Bench {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn record(&self) -> std::path::PathBuf {
        self.dir.path().join("record")
    }

    fn script(&self, text: &str) -> Script {
        Script::parse(text).unwrap().recording(&self.record())
    }

    fn steps(&self, steps: Value) -> Cli {
        self.start(&json!({"runs": [{"steps": steps}]}), &[], &[])
    }

    fn start(&self, script: &Value, args: &[&str], env: &[(&str, &str)]) -> Cli {
        Cli::start(
            &self.script(&script.to_string()),
            self.dir.path(),
            args,
            env,
        )
    }

    fn recording(&self) -> Recording {
        Recording::read(&self.record())
    }
}

#[test]
fn version_and_auth_status_answer_as_scripted() {
    let bench = Bench::new();
    let script = json!({
        "version": "2.1.310",
        "auth": [
            {"json": {"loggedIn": false}, "stderr": "not now"},
            {"raw": "{\"loggedIn\": tr", "exit": 0},
            {"delay_ms": 30},
        ],
    });
    let mut cli = bench.start(&script, &["--version"], &[]);
    assert_eq!(cli.line().unwrap(), "2.1.310 (Claude Code)");
    assert_eq!(cli.finish().code(), Some(0));
    let wanted = [
        (1, "\"loggedIn\": false"),
        (0, "tr"),
        (0, "\"loggedIn\": true"),
        (0, "claude.ai"),
    ];
    for (number, (code, part)) in wanted.into_iter().enumerate() {
        // With and without the option that leaves the settings out.
        let words = &["--setting-sources=", "auth", "status"][number % 2..];
        let mut cli = bench.start(&script, words, &[]);
        let mut said = String::new();
        while let Some(line) = cli.line() {
            said.push_str(&line);
        }
        assert_eq!(cli.finish().code(), Some(code), "{said}");
        assert!(said.contains(part), "{said}");
    }
    let mut cli = bench.start(&json!({"auth": {"hang": true}}), &["auth", "status"], &[]);
    let counted = bench.dir.path().join("claude.script.json.count");
    assert!(counted.exists());
    assert!(cli.child.try_wait().unwrap().is_none());
    cli.child.kill().unwrap();
}

#[test]
fn expectations_templates_and_the_recording_go_together() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!([
        {"expect": {"type": "control_request", "request": {"subtype": "initialize"}}},
        {"send": {"type": "control_response", "response": {"request_id": "{{request_id}}"}}},
        {"repeat": {"times": 2, "steps": [
            {"expect": {"type": "user"}},
            {"send": [{"n": "{{n}}", "of": "{{uuid_of_line}}", "text": "{{line:/message/content}}"}, "raw {{version}}"]},
        ]}},
        "wait_eof",
        {"exit": 3},
    ]));
    cli.write(&json!({"type": "control_request", "request_id": "r7", "request": {"subtype": "initialize"}}));
    assert_eq!(cli.next().unwrap()["response"]["request_id"], "r7");
    for n in 0..2 {
        cli.write(&json!({"type": "user", "uuid": format!("u{n}"), "message": {"content": "hé"}}));
        assert_eq!(
            cli.next().unwrap(),
            json!({"n": n, "of": format!("u{n}"), "text": "hé"})
        );
        assert_eq!(cli.line().unwrap(), "raw 2.1.332");
    }
    assert_eq!(cli.finish().code(), Some(3));
    let recording = bench.recording();
    let run = recording.only().unwrap();
    assert_eq!(run.exit, Some(3));
    assert_eq!(run.stdin.len(), 3);
    assert_eq!(run.stdin[0].json()["request_id"], "r7");
    assert!(run.saw_end_of_input);
    assert!(run.environment.contains_key("PATH") && !run.environment.contains_key("HOME"));
}

#[test]
fn a_mismatch_ends_with_its_own_code_and_says_what_came() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!(["expect_any", {"expect": {"type": "user"}}]));
    cli.write(&json!({"type": "x"}));
    cli.write(&json!({"type": "control_request"}));
    assert_eq!(cli.finish().code(), Some(i32::from(EXIT_MISMATCH)));
    assert!(
        cli.stderr().contains("step 2: expected"),
        "{}",
        cli.stderr()
    );
    assert!(
        bench
            .recording()
            .only()
            .unwrap()
            .mismatch
            .as_ref()
            .unwrap()
            .contains("control_request")
    );
    let mut cli = bench.steps(json!(["expect_any"]));
    assert_eq!(cli.finish().code(), Some(i32::from(EXIT_MISMATCH)));
    assert!(cli.stderr().contains("the input ended"));
}

#[test]
fn a_script_with_a_mistake_names_the_step() {
    for (text, part) in [
        (
            r#"{"runs":[{"steps":["wait_eof",{"sennd":1}]}]}"#,
            "run 1, step 2",
        ),
        (
            r#"{"runs":[{"steps":[{"loop":["wait_eof",{"exit":"x"}]}]}]}"#,
            "run 1, step 1, step 2",
        ),
        (
            r#"{"runs":[{"steps":[{"repeat":{"times":1,"steps":[{"grandchild":{"sleep":1}}]}}]}]}"#,
            "run 1, step 1, step 1",
        ),
        (r#"{"runs":[{}]}"#, "run 1"),
        (r#"{"auth":{"jsn":1}}"#, "auth 1"),
        (r#"{"run":[]}"#, "unknown field `run`"),
        ("{", "script"),
    ] {
        let error = Script::parse(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.json");
    std::fs::write(&file, r#"{"runs":[{"steps":[{"sennd":1}]}]}"#).unwrap();
    let claude = turnpass_lab::cli::install_file(dir.path(), &program(), &file).unwrap();
    let output = Command::new(claude).output().unwrap();
    assert_eq!(output.status.code(), Some(96));
    assert!(String::from_utf8_lossy(&output.stderr).contains("run 1, step 1"));
}

#[test]
fn a_script_survives_its_json_form() {
    let text = json!({
        "version": "2.1.294", "record": "/r", "auth": [{"hang": true}],
        "runs": [{"steps": ["expect_any", {"send": [1]}, {"send_raw": {"base64": "AA=="}}, {"send_init": null},
            {"send_big": {"bytes": 9}}, {"loop": [{"sleep_ms": 1}]}, {"grandchild": {}}, {"stderr": "x"},
            {"stderr": {"bytes": 5}}, "hang", {"exit": 1}, {"kill_self": "SIGKILL"}, {"ignore_signals": ["SIGTERM"]},
            "never_read_stdin", {"write_before_read": 1}, "close_stdout", "answer_controls",
            {"answer_controls": [{"subtype": "interrupt", "ignore": true}]}, "mcp_connect", {"post": {}},
            {"play_fixture": {"file": "f"}}]}, {"emulator": {}}],
    });
    let script = Script::parse(&text.to_string()).unwrap();
    let again = Script::parse(&script.to_json()).unwrap();
    assert_eq!(script.to_json(), again.to_json());
    assert_eq!(again.runs.len(), 2);
}

#[test]
fn starts_take_the_runs_in_order_even_when_they_race() {
    let bench = Bench::new();
    let script = json!({"runs": [{"steps": [{"exit": 11}]}, {"steps": [{"exit": 12}]}, {"steps": [{"exit": 13}]}]});
    let claude = install(
        bench.dir.path(),
        &program(),
        &bench.script(&script.to_string()),
    )
    .unwrap();
    let mut children: Vec<_> = (0..8)
        .map(|_| Command::new(&claude).spawn().unwrap())
        .collect();
    let mut codes: Vec<i32> = children
        .iter_mut()
        .map(|child| child.wait().unwrap().code().unwrap())
        .collect();
    codes.sort_unstable();
    assert_eq!(codes, [11, 12, 13, 13, 13, 13, 13, 13]);
    assert_eq!(bench.recording().runs.len(), 8);
}

#[test]
fn bug_001_lines_of_3_and_12_mib_arrive_whole() {
    let bench = Bench::new();
    let big = |mib: usize| BigLine {
        bytes: mib << 20,
        kind: BigKind::ToolInput,
        fill: BigFill::Letters,
    };
    let mut cli = bench
        .steps(json!([{"send_big": big(3)}, {"send_big": big(12)}, {"send": {"type": "result"}}]));
    assert_eq!(cli.line().unwrap().len(), 3 << 20);
    assert_eq!(cli.line().unwrap(), big(12).line());
    assert_eq!(cli.next().unwrap()["type"], "result");
    assert_eq!(cli.finish().code(), Some(0));
}

#[test]
fn bug_004_raw_bytes_are_not_touched() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!([
        {"send_raw": {"text": "{\"t\":\"\\ud83d\"}\r\n"}},
        {"send_raw": {"base64": "/w=="}}, {"send_raw": {"text": "half"}},
    ]));
    assert_eq!(cli.line().unwrap(), "{\"t\":\"\\ud83d\"}\r");
    assert_eq!(cli.line().unwrap(), "\u{fffd}half");
    assert!(cli.line().is_none());
}

#[test]
fn bug_010_the_recording_shows_how_each_line_ended() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!(["wait_eof"]));
    cli.write_bytes(b"{\"a\":1}\n\n{\"b\":2}\r\n");
    cli.finish();
    let recording = bench.recording();
    let lines = &recording.only().unwrap().stdin;
    let seen: Vec<(usize, bool)> = lines
        .iter()
        .map(|line| (line.bytes, line.carriage_return))
        .collect();
    assert_eq!(seen, [(7, false), (0, false), (8, true)]);
}

#[test]
fn bug_015_a_loud_stderr_without_a_line_end_comes_first() {
    let bench = Bench::new();
    let mut cli =
        bench.steps(json!([{"stderr": {"bytes": 200_000}}, {"send": {"type": "result"}}]));
    assert_eq!(cli.next().unwrap()["type"], "result");
    cli.finish();
    let end = Instant::now() + PATIENCE;
    while cli.stderr().len() < 200_000 && Instant::now() < end {
        std::thread::yield_now();
    }
    assert_eq!(cli.stderr().len(), 200_000);
    assert!(!cli.stderr().contains('\n'));
}

#[test]
fn bug_016_it_can_write_before_it_reads_or_never_read() {
    let bench = Bench::new();
    let mut cli = bench.steps(
        json!([{"write_before_read": 1_000_000}, {"expect": {"n": 1}}, {"send": {"done": true}}]),
    );
    cli.write(&json!({"n": 1}));
    let mut bytes = 0;
    loop {
        let line = cli.line().unwrap();
        if line.contains("done") {
            break;
        }
        bytes += line.len() + 1;
    }
    assert!(bytes >= 1_000_000);
    assert_eq!(cli.finish().code(), Some(0));
    let mut deaf = bench.steps(json!(["never_read_stdin", {"send": {"up": true}}, "hang"]));
    deaf.next().unwrap();
    deaf.write(&json!({"lost": true}));
    deaf.child.kill().unwrap();
    assert!(bench.recording().runs.last().unwrap().stdin.is_empty());
}

#[test]
fn bug_017_sigterm_can_be_ignored_and_is_noted() {
    let bench = Bench::new();
    let mut cli =
        bench.steps(json!([{"ignore_signals": ["SIGTERM"]}, {"send": {"up": true}}, "hang"]));
    cli.next().unwrap();
    let pid = i32::try_from(cli.child.id()).unwrap();
    signal(pid, "TERM");
    let noted = |recording: &Recording| recording.runs.iter().any(|run| !run.signals.is_empty());
    let recording = Recording::wait_for(&bench.record(), PATIENCE, noted);
    assert_eq!(recording.only().unwrap().signals, ["SIGTERM"]);
    assert!(cli.child.try_wait().unwrap().is_none(), "it lives on");
    signal(pid, "HUP");
    assert_eq!(cli.wait().code(), Some(129));
    let mut cli = bench.steps(json!([{"send": {"up": true}}, "hang"]));
    cli.next().unwrap();
    signal(i32::try_from(cli.child.id()).unwrap(), "TERM");
    assert_eq!(cli.wait().code(), Some(143));
}

fn signal(pid: i32, name: &str) {
    let sent = Command::new("/bin/sh")
        .arg("-c")
        .arg(format!("kill -{name} {pid}"))
        .status()
        .unwrap();
    assert!(sent.success());
}

#[test]
fn bug_020_a_grandchild_that_ignores_sigterm_needs_the_group_to_be_killed() {
    let bench = Bench::new();
    let script = bench.script(
        &json!({"runs": [{"steps": [
            {"grandchild": {"keep_pipes": true}}, {"send": {"up": true}}, "hang",
        ]}]})
        .to_string(),
    );
    let claude = install(bench.dir.path(), &program(), &script).unwrap();
    let mut command = Command::new(claude);
    command.process_group(0);
    let mut cli = Cli::spawn(command);
    cli.next().unwrap();
    let group = i32::try_from(cli.child.id()).unwrap();
    let recording = bench.recording();
    let run = recording.only().unwrap();
    assert_eq!((run.pid, run.group), (group, group));
    let grandchild = run.grandchildren[0];
    let end = Instant::now() + PATIENCE;
    // The shell in between becomes the sleeper; until then SIGTERM would still reach it.
    while !std::fs::read_to_string(format!("/proc/{grandchild}/comm"))
        .unwrap_or_default()
        .starts_with("sleep")
    {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    signal(group, "TERM");
    cli.wait();
    signal(grandchild, "TERM");
    assert_eq!(
        alive_in_group(group),
        [grandchild],
        "it outlives its parent"
    );
    processes::kill_group(group).unwrap();
    assert!(wait_gone(&[grandchild], PATIENCE).is_empty());
    assert!(cli.line().is_none(), "now the pipe has ended");
}

#[test]
fn kill_self_close_stdout_and_sleep_do_what_they_say() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!([{"send": {"a": 1}}, {"kill_self": "SIGKILL"}]));
    cli.next().unwrap();
    assert_eq!(cli.wait().signal(), Some(9));
    let mut cli = bench.steps(json!([{"send": {"a": 1}}, "close_stdout", {"send": {"b": 2}}, {"expect": {"go": 1}}, {"exit": 5}]));
    cli.next().unwrap();
    assert!(
        cli.line().is_none(),
        "the pipe ended though the process lives"
    );
    assert!(cli.child.try_wait().unwrap().is_none());
    cli.write(&json!({"go": 1}));
    assert_eq!(cli.wait().code(), Some(5));
    let started = Instant::now();
    bench.steps(json!([{"sleep_ms": 60}])).finish();
    assert!(started.elapsed() >= Duration::from_millis(60));
}

#[test]
fn controls_are_answered_in_the_background_also_while_a_step_waits() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!([
        {"answer_controls": [
            {"subtype": "get_usage", "error": "no", "times": 1},
            {"subtype": "mcp_status", "response": {"mcpServers": []}},
            {"subtype": "interrupt", "ignore": true},
        ]},
        "answer_controls",
        {"sleep_ms": 600_000},
    ]));
    let ask = |cli: &mut Cli, id: &str, subtype: &str| cli.control(id, json!({"subtype": subtype}));
    assert_eq!(ask(&mut cli, "1", "get_usage")["error"], "no");
    assert_eq!(
        ask(&mut cli, "2", "get_usage")["response"]["rate_limits"]["extra_usage"]["is_enabled"],
        false
    );
    assert_eq!(
        ask(&mut cli, "3", "mcp_status")["response"],
        json!({"mcpServers": []})
    );
    assert!(
        ask(&mut cli, "4", "initialize")["response"]["models"]
            .as_array()
            .unwrap()
            .len()
            > 3
    );
    assert_eq!(
        ask(&mut cli, "5", "nonsense")["error_code"],
        "unsupported_request"
    );
    cli.write(
        &json!({"type": "control_request", "request_id": "6", "request": {"subtype": "interrupt"}}),
    );
    assert_eq!(
        ask(&mut cli, "7", "set_model")["response"]["model"],
        "claude-opus-5-5"
    );
    assert!(
        !cli.seen
            .iter()
            .any(|record| record["response"]["request_id"] == "6")
    );
}

#[test]
fn a_loop_serves_turns_until_the_input_ends() {
    let bench = Bench::new();
    let mut cli = bench.steps(json!([
        {"loop": [{"expect": {"type": "user"}}, {"send": {"type": "result", "n": "{{n}}"}}]},
        {"send": {"type": "bye"}},
    ]));
    for n in 0..3 {
        cli.user("x");
        assert_eq!(cli.until("result")["n"], n);
    }
    assert_eq!(cli.finish().code(), Some(0));
    assert_eq!(cli.seen.last().unwrap()["type"], "bye");
}

#[test]
fn post_forwards_the_reply_and_sends_other_requests_as_told() {
    let bench = Bench::new();
    let upstream = Upstream::start([text("hello"), text("unread")]);
    let script = json!({"runs": [{"steps": [
        {"post": {"method": "HEAD", "path": "/", "reply": "ignore"}},
        {"expect": {"type": "user"}},
        {"post": {"headers": {"x-app": null, "x-more": "{{model}}"}, "expect_status": 200}},
        {"post": {"path": "/v1/messages/count_tokens", "body": {"model": "{{model}}"}, "reply": "ignore", "expect_status": 200}},
        {"post": {"expect_status": 404}},
    ]}]});
    let mut cli = bench.start(&script, &STREAM, &[("ANTHROPIC_BASE_URL", &upstream.url)]);
    cli.user("hi");
    assert_eq!(cli.until("result")["result"], "hello");
    assert_eq!(cli.finish().code(), Some(i32::from(EXIT_MISMATCH)));
    let asked = upstream.asked();
    let seen: Vec<(&str, &str)> = asked
        .iter()
        .map(|one| (one.method.as_str(), one.path.as_str()))
        .collect();
    assert_eq!(
        seen,
        [
            ("HEAD", "/"),
            ("POST", "/v1/messages?beta=true"),
            ("POST", "/v1/messages/count_tokens"),
            ("POST", "/v1/messages?beta=true")
        ]
    );
    assert_eq!(asked[1].header("x-app"), None);
    assert_eq!(asked[1].header("x-more"), Some("claude-sonnet-5-5"));
    assert_eq!(asked[1].body["messages"][0]["content"], "hi");
    assert_eq!(asked[2].body, json!({"model": "claude-sonnet-5-5"}));
}

/// A stdio MCP server is itself a script: it answers by the id of each line.
fn stdio_server(dir: &Path) -> Value {
    let answer =
        |result: Value| json!({"send": {"jsonrpc": "2.0", "id": "{{line:/id}}", "result": result}});
    let tools = json!([{"name": "b", "inputSchema": {"type": "object"}}, {"name": "A", "inputSchema": {"type": "object"}}]);
    let script = json!({"runs": [{"steps": [
        {"expect": {"method": "server/discover"}},
        {"send": {"jsonrpc": "2.0", "id": "{{line:/id}}", "error": {"code": -32601, "message": "no"}}},
        {"expect": {"method": "initialize"}}, answer(json!({"serverInfo": {"name": "s"}})),
        {"expect": {"method": "notifications/initialized"}},
        {"expect": {"method": "tools/list"}}, answer(json!({"tools": tools})),
        {"loop": [{"expect": {"method": "tools/call"}}, answer(json!({"content": [{"type": "text", "text": "did {{line:/params/name}}"}]}))]},
    ]}]});
    let dir = dir.join("server");
    std::fs::create_dir_all(&dir).unwrap();
    let program = install(
        &dir,
        &program(),
        &Script::parse(&script.to_string()).unwrap(),
    )
    .unwrap();
    json!({"mcpServers": {"host": {"type": "stdio", "command": program, "args": []}}})
}

#[test]
fn mcp_connect_lists_the_real_tools_of_a_stdio_server() {
    let bench = Bench::new();
    let config = stdio_server(bench.dir.path()).to_string();
    let script = json!({"runs": [{"steps": [
        {"mcp_connect": {"calls": [{"name": "b", "tool_use_id": "t1", "arguments": {}}]}},
        {"send_init": {"model": "other"}},
        {"send": {"tools": "{{tools}}"}},
    ]}]});
    let mut cli = bench.start(&script, &["--mcp-config", &config], &[]);
    let init = cli.until("system/init");
    assert_eq!(init["tools"], json!(["mcp__host__A", "mcp__host__b"]));
    assert_eq!(
        init["mcp_servers"],
        json!([{"name": "host", "status": "connected", "source": "dynamic"}])
    );
    assert_eq!(init["model"], "other");
    assert_eq!(cli.next().unwrap()["tools"], init["tools"]);
    cli.finish();
    let recording = bench.recording();
    let call = recording.only().unwrap().notes("mcp_call").next().unwrap();
    assert_eq!(call["result"]["content"][0]["text"], "did b");
}

#[test]
fn the_emulator_calls_a_stdio_server_and_ends_it() {
    let bench = Bench::new();
    let config = stdio_server(bench.dir.path()).to_string();
    let call = support::tool_block(0, "t1", "mcp__host__b", "{}");
    let upstream = Upstream::start([support::reply(vec![call], "tool_use"), text("done")]);
    let args: Vec<&str> = STREAM
        .iter()
        .copied()
        .chain(["--mcp-config", &config, "--allowedTools", "mcp__host__*"])
        .collect();
    let mut cli = bench.start(&json!({}), &args, &[("ANTHROPIC_BASE_URL", &upstream.url)]);
    cli.user("go");
    assert_eq!(cli.until("result")["result"], "done");
    let server = processes::descendants(i32::try_from(cli.child.id()).unwrap());
    assert_eq!(server.len(), 1);
    assert_eq!(cli.finish().code(), Some(0));
    assert!(wait_gone(&server, PATIENCE).is_empty());
    let posts = upstream.posts();
    assert!(posts[1]["messages"].to_string().contains("did b"));
}

#[test]
fn a_recording_is_played_with_the_ids_of_the_host() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let bench = Bench::new();
    let file = fixtures.join("stateful/2.1.332-s02_control.ndjson");
    let mut cli = bench.steps(json!([{"play_fixture": {"file": file, "follow_stdin": true}}]));
    let answer = cli.control("mine", json!({"subtype": "initialize"}));
    assert_eq!(answer["response"]["claude_code_version"], "2.1.332");
    cli.child.kill().unwrap();

    let file = fixtures.join("relay/2.1.332-text/stdout.ndjson");
    let mut cli = bench.steps(json!([{"play_fixture": {"file": file}}]));
    assert_eq!(cli.until("result")["result"], "Hello from fake");
    assert_eq!(cli.finish().code(), Some(0));

    let mut cli = bench.steps(json!([{"play_fixture": {"file": "missing.ndjson"}}]));
    assert_eq!(cli.finish().code(), Some(i32::from(EXIT_MISMATCH)));
    assert!(cli.stderr().contains("missing.ndjson"));
}

#[test]
fn every_recording_can_be_played() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(fixtures.join("stateful"))
        .unwrap()
        .flatten()
    {
        files.push(entry.path());
    }
    for kind in ["relay", "replay"] {
        for entry in std::fs::read_dir(fixtures.join(kind)).unwrap().flatten() {
            files.push(entry.path().join("stdout.ndjson"));
        }
    }
    assert!(files.len() > 80);
    let bench = Bench::new();
    let steps: Vec<Value> = files
        .iter()
        .map(|file| json!({"play_fixture": {"file": file}}))
        .collect();
    let mut cli = bench.steps(json!(steps));
    let mut results = 0;
    while let Some(record) = cli.next() {
        // Half a surrogate pair is in one of them, which this test's own parser refuses.
        let raw = record["$line"]
            .as_str()
            .is_some_and(|line| line.contains("\\ud83d"));
        assert!(record.get("type").is_some() || raw, "{record}");
        results += usize::from(record["type"] == "result");
        cli.seen.clear();
    }
    assert_eq!(cli.finish().code(), Some(0), "{}", cli.stderr());
    assert!(results > 80, "{results}");
}
