//! NEEDS THE REAL CLI (`conformance/install`): the rig, and the emulator held against the real one.
//!
//! Runs in a network namespace of its own; where none can be made, behind a proxy that refuses.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::{Value, json};
use support::{
    Cli, PATIENCE, Reply, STREAM, Upstream, message_start, program, reply, text, text_block,
    tool_block,
};
use turnpass_lab::cli::{Script, install};
use turnpass_lab::rig::{self, Isolation, MadeUpHome, RealCli, RefusingProxy, SignIn, processes};

fn main() -> ExitCode {
    let isolation = rig::isolate();
    eprintln!("real_cli: isolation is {isolation:?}");
    let mut arguments = Arguments::from_args();
    // Each trial starts processes of 200 MB; two cores serve no more of them.
    arguments.test_threads.get_or_insert(2);
    let conformance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let mut trials = Vec::new();
    for cli in RealCli::for_tests(&conformance, "tests/real_cli.rs of turnpass-lab") {
        let mut add = |name: &str, test: fn(&RealCli)| {
            let cli = cli.clone();
            trials.push(Trial::test(format!("{}::{name}", cli.version), move || {
                test(&cli);
                Ok::<(), Failed>(())
            }));
        };
        add("says_its_version", says_its_version);
        add(
            "made_up_homes_are_what_they_say",
            made_up_homes_are_what_they_say,
        );
        add(
            "planted_configuration_has_no_effect",
            planted_configuration_has_no_effect,
        );
        add("planting_would_show", planting_would_show);
        add("nothing_outlives_its_group", nothing_outlives_its_group);
        add(
            "sessions_resume_and_fork_as_emulated",
            sessions_resume_and_fork_as_emulated,
        );
        for scene in scenes() {
            let cli = cli.clone();
            trials.push(Trial::test(
                format!("{}::emulated::{}", cli.version, scene.name),
                move || {
                    compare(&cli, &scene);
                    Ok(())
                },
            ));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// One hermetic run: a home, a project, an upstream, a proxy.
struct Bench {
    dir: tempfile::TempDir,
    home: MadeUpHome,
    upstream: Upstream,
    proxy: RefusingProxy,
}

const ONE_REQUEST: [(&str, &str); 4] = [
    ("CLAUDE_CODE_MAX_RETRIES", "0"),
    ("CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK", "1"),
    ("ENABLE_TOOL_SEARCH", "false"),
    ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
];

const PLUGINS_OFF: &str = r#"{"autoCompactEnabled":false,"fastMode":false,"disableAllHooks":true,"autoMemoryEnabled":false,"totalTokensReminder":"off","enabledPlugins":{"cc-plugin-agents-md@builtin":false,"agents-md@builtin":false,"cc-plugin-privacy@builtin":false,"cc-plugin-plugin-authoring@builtin":false,"plugin-authoring@builtin":false}}"#;

impl Bench {
    fn new(replies: impl IntoIterator<Item = Reply>) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let home = MadeUpHome::new(&dir.path().join("home")).unwrap();
        std::fs::create_dir(dir.path().join("project")).unwrap();
        Bench {
            home,
            upstream: Upstream::start(replies),
            proxy: RefusingProxy::start().unwrap(),
            dir,
        }
    }

    fn project(&self) -> PathBuf {
        self.dir.path().join("project")
    }

    fn command(&self, cli: &RealCli, args: &[&str]) -> Command {
        let mut command = cli
            .command(&self.home, &self.proxy, Some(&self.upstream.url))
            .unwrap();
        command
            .args(args)
            .envs(ONE_REQUEST)
            .current_dir(self.project());
        command
    }
}

fn isolated(more: &[&'static str]) -> Vec<&'static str> {
    STREAM
        .iter()
        .copied()
        .chain([
            "--tools",
            "",
            "--settings",
            PLUGINS_OFF,
            "--system-prompt",
            "You are a test.",
        ])
        .chain(more.iter().copied())
        .collect()
}

fn says_its_version(cli: &RealCli) {
    let bench = Bench::new([]);
    let output = bench.command(cli, &["--version"]).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        format!("{} (Claude Code)", cli.version)
    );
}

fn made_up_homes_are_what_they_say(cli: &RealCli) {
    let cases = [
        (SignIn::SignedIn, true, 0),
        (SignIn::SignedOut, false, 1),
        (SignIn::Expired, true, 0),
    ];
    for (sign_in, logged_in, code) in cases {
        let dir = tempfile::tempdir().unwrap();
        let home = MadeUpHome::with(dir.path(), sign_in).unwrap();
        let proxy = RefusingProxy::start().unwrap();
        let output = cli
            .command(&home, &proxy, None)
            .unwrap()
            .args(["auth", "status"])
            .output()
            .unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["loggedIn"], logged_in, "{sign_in:?}: {said}");
        assert_eq!(output.status.code(), Some(code), "{sign_in:?}");
        if logged_in {
            assert_eq!(
                (&said["authMethod"], &said["apiProvider"]),
                (&json!("claude.ai"), &json!("firstParty"))
            );
        }
        if sign_in == SignIn::Expired {
            assert!(
                proxy
                    .attempts()
                    .iter()
                    .any(|target| target.contains("platform.claude.com")),
                "{:?}",
                proxy.attempts()
            );
        }
    }
}

fn planted_configuration_has_no_effect(cli: &RealCli) {
    let bench = Bench::new([]);
    let planted = bench.home.plant(&bench.project()).unwrap();
    let mut real = Cli::spawn(bench.command(cli, &isolated(&[])));
    real.user("hello");
    let init = real.until("system/init");
    assert_eq!(init["plugins"], json!([]));
    assert_eq!(init["mcp_servers"], json!([]));
    assert_eq!(real.until("result")["is_error"], false);
    assert_eq!(real.finish().code(), Some(0));
    assert_eq!(planted.ran(), Vec::<String>::new());
    assert_eq!(
        planted.shows_in(&bench.upstream.posts()[0]),
        Vec::<String>::new()
    );
}

/// The other side of the test above: without the flags the same planting takes effect.
fn planting_would_show(cli: &RealCli) {
    let bench = Bench::new([]);
    let planted = bench.home.plant(&bench.project()).unwrap();
    let args = [
        "-p",
        "--input-format",
        "stream-json",
        "--output-format",
        "stream-json",
        "--verbose",
        "--model",
        "sonnet",
    ];
    let mut real = Cli::spawn(bench.command(cli, &args));
    real.user("hello");
    real.until("result");
    real.finish();
    let ran = planted.ran();
    assert!(ran.iter().any(|name| name.contains("hook")), "{ran:?}");
    assert!(ran.iter().any(|name| name.contains("mcp")), "{ran:?}");
}

fn nothing_outlives_its_group(cli: &RealCli) {
    use std::os::unix::process::CommandExt as _;
    let bench = Bench::new([Reply::Stall(vec![message_start()])]);
    let mut command = bench.command(cli, &isolated(&[]));
    command.process_group(0);
    let mut real = Cli::spawn(command);
    real.user("hello");
    real.until("stream_event");
    let group = i32::try_from(real.child.id()).unwrap();
    let members = rig::alive_in_group(group);
    assert!(members.contains(&group));
    let tree = rig::ProcessTree::of_group(group);
    let pss = tree.pss_bytes().unwrap() >> 20;
    assert!((20..2000).contains(&pss), "{pss} MiB");
    processes::kill_group(group).unwrap();
    assert!(rig::wait_gone(&members, Duration::from_secs(10)).is_empty());
    assert!(rig::alive_in_group(group).is_empty());
}

/// The same scene on the real CLI and on the emulator must look the same from outside.
#[derive(Clone)]
struct Scene {
    name: &'static str,
    flags: &'static [&'static str],
    replies: Vec<Reply>,
    play: fn(&mut Cli),
}

fn one_turn(cli: &mut Cli) {
    cli.user("hello");
    cli.until("result");
}

fn in_band(cli: &mut Cli) {
    let tool = |name: &str| json!({"name": name, "description": name, "inputSchema": {"type": "object", "properties": {}}, "annotations": {"readOnlyHint": true}});
    cli.control("i", json!({
        "subtype": "initialize", "sdkMcpServers": ["host"], "systemPromptSnapshot": false,
        "sdkMcpServerManifests": {"host": {
            "initializeResult": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "host", "version": "1"}},
            "toolsListResult": {"tools": [tool("beta"), tool("Alpha")]},
        }},
    }));
}

fn answer_call(cli: &mut Cli, request: &Value, text: &str) {
    let id = &request["request"]["message"]["id"];
    let result = json!({"content": [{"type": "text", "text": text}]});
    cli.write(&json!({"type": "control_response", "response": {
        "subtype": "success", "request_id": request["request_id"],
        "response": {"mcp_response": {"jsonrpc": "2.0", "id": id, "result": result}},
    }}));
}

fn scenes() -> Vec<Scene> {
    let scene = |name, flags, replies, play| Scene {
        name,
        flags,
        replies,
        play,
    };
    let calls = || {
        reply(
            vec![
                text_block(0, "both"),
                tool_block(1, "toolu_1", "mcp__host__Alpha", "{\"a\": 1}"),
                tool_block(2, "toolu_2", "mcp__host__beta", "{}"),
            ],
            "tool_use",
        )
    };
    let cut = || {
        let mut events = vec![message_start()];
        events.extend(text_block(0, "half"));
        Reply::Events(events)
    };
    let mut inside = vec![message_start()];
    inside.extend(text_block(0, "Hel").into_iter().take(2));
    let stalled = inside.clone();
    vec![
        scene("text", &["--max-turns", "1"], vec![text("hi")], one_turn),
        scene(
            "three_turns",
            &[],
            vec![text("1"), text("2"), text("3")],
            |cli| (0..3).for_each(|_| one_turn(cli)),
        ),
        scene(
            "denied_calls",
            &["--max-turns", "1"],
            vec![calls()],
            |cli| {
                in_band(cli);
                one_turn(cli);
            },
        ),
        scene(
            "allowed_calls",
            &["--allowedTools", "mcp__host__*"],
            vec![calls(), text("done")],
            |cli| {
                in_band(cli);
                cli.user("go");
                // Answers go out after the whole message has been seen, or their place would be a race.
                let mut requests = Vec::new();
                let mut whole = false;
                while requests.len() < 2 || !whole {
                    let record = cli.next().unwrap();
                    whole |= record["event"]["type"] == "message_stop";
                    if record["type"] == "control_request" {
                        requests.push(record);
                    }
                }
                answer_call(cli, &requests[0], "first");
                cli.until("user");
                answer_call(cli, &requests[1], "second");
                cli.until("result");
            },
        ),
        scene("everything_by_controls", &[], vec![], |cli| {
            in_band(cli);
            let body =
                json!({"messages": [{"role": "user", "content": "real"}], "temperature": 0.5});
            cli.control("a", json!({"subtype": "apply_flag_settings", "settings": {"model": "opus", "effortLevel": "low", "env": {"CLAUDE_CODE_EXTRA_BODY": body.to_string()}}}));
            one_turn(cli);
            cli.control("b", json!({"subtype": "set_model", "model": "sonnet"}));
            one_turn(cli);
        }),
        scene("frames", &[], vec![], |cli| {
            let user = |text: &str| json!({"type": "user", "shouldQuery": false, "client_composed": true, "message": {"role": "user", "content": text}});
            cli.write(&user("old"));
            cli.until("result");
            cli.write(&json!({"type": "assistant", "message": {"id": "m", "type": "message", "role": "assistant", "model": "claude-sonnet-5-5", "content": [
                {"type": "thinking", "thinking": "t", "signature": "SIG=="}, {"type": "tool_use", "id": "toolu_h", "name": "mcp__host__x", "input": {}}],
                "stop_reason": "tool_use", "stop_sequence": null, "usage": {"input_tokens": 1, "output_tokens": 1}}}));
            cli.write(&json!({"type": "user", "message": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_h", "content": "R"}]}}));
            cli.until("result");
        }),
        scene(
            "refused_410",
            &[],
            vec![Reply::Status(410, "gone", vec![])],
            |cli| (0..2).for_each(|_| one_turn(cli)),
        ),
        scene(
            "unauthorised_401",
            &[],
            vec![
                Reply::Status(401, "expired", vec![]),
                Reply::Status(401, "expired", vec![]),
            ],
            one_turn,
        ),
        scene(
            "overloaded_529",
            &[],
            vec![Reply::Status(529, "Overloaded", vec![])],
            one_turn,
        ),
        scene(
            "max_tokens_then_410",
            &["--max-turns", "1"],
            vec![
                reply(vec![text_block(0, "a")], "max_tokens"),
                Reply::Status(410, "no", vec![]),
            ],
            one_turn,
        ),
        scene(
            "max_tokens_for_ever",
            &["--max-turns", "1"],
            (0..5)
                .map(|_| reply(vec![text_block(0, "a")], "max_tokens"))
                .collect(),
            one_turn,
        ),
        scene(
            "pause_turn",
            &["--max-turns", "1"],
            vec![reply(vec![text_block(0, "a")], "pause_turn")],
            one_turn,
        ),
        scene(
            "empty_answer",
            &[],
            vec![reply(vec![text_block(0, "")], "end_turn")],
            one_turn,
        ),
        scene(
            "cut_after_a_block",
            &[],
            vec![cut(), cut(), cut(), cut()],
            one_turn,
        ),
        scene(
            "cut_inside_a_block",
            &[],
            vec![Reply::Events(inside)],
            one_turn,
        ),
        scene("no_events", &[], vec![Reply::Events(vec![])], one_turn),
        scene(
            "interrupt_then_next",
            &[],
            vec![Reply::Stall(stalled)],
            |cli| {
                cli.user("one");
                while cli.until("stream_event")["event"]["type"] != "content_block_delta" {}
                cli.control("x", json!({"subtype": "interrupt"}));
                cli.until("result");
                one_turn(cli);
            },
        ),
        scene(
            "rewind",
            &[],
            vec![text("a"), Reply::Status(410, "no", vec![])],
            |cli| {
                for uuid in [
                    "5e0c0f4e-5d1c-4b53-9d64-3f6d37f0a001",
                    "91f3b8a7-2b7e-4a0c-8f15-0c4f0e6d2b02",
                ] {
                    cli.write(&json!({"type": "user", "uuid": uuid, "client_composed": true, "message": {"role": "user", "content": uuid}}));
                    cli.until("result");
                }
                cli.control("r", json!({"subtype": "rewind_conversation", "target_message_uuid": "91f3b8a7-2b7e-4a0c-8f15-0c4f0e6d2b02"}));
                one_turn(cli);
            },
        ),
        scene("slash_command", &[], vec![], |cli| {
            cli.write(&json!({"type": "user", "message": {"role": "user", "content": "/compact"}}));
            cli.until("result");
        }),
    ]
}

fn compare(real: &RealCli, scene: &Scene) {
    let args = isolated(scene.flags);
    let bench = Bench::new(scene.replies.clone());
    let real_view = view(
        Cli::spawn(bench.command(real, &args)),
        scene,
        &bench.upstream,
    );
    let bench = Bench::new(scene.replies.clone());
    let emulator = install(
        bench.dir.path(),
        &program(),
        &Script::emulator(&real.version),
    )
    .unwrap();
    let emulator = RealCli {
        version: real.version.clone(),
        path: emulator,
    };
    let emulated = view(
        Cli::spawn(bench.command(&emulator, &args)),
        scene,
        &bench.upstream,
    );
    let (left, right) = (format!("{real_view:#}"), format!("{emulated:#}"));
    if left != right {
        let differing: Vec<String> = left
            .lines()
            .zip(right.lines())
            .filter(|(l, r)| l != r)
            .take(12)
            .map(|(l, r)| format!("real {}   emulated {}", l.trim(), r.trim()))
            .collect();
        panic!(
            "{}: the emulator differs:\n{}\n--- real\n{left}\n--- emulated\n{right}",
            scene.name,
            differing.join("\n")
        );
    }
}

/// Two turns in one process; then a second process goes on in four ways, and must see the same history.
fn sessions_resume_and_fork_as_emulated(real: &RealCli) {
    let seen = |emulated: bool| {
        let bench = Bench::new([]);
        let cli = if emulated {
            let path = install(
                bench.dir.path(),
                &program(),
                &Script::emulator(&real.version),
            )
            .unwrap();
            RealCli {
                version: real.version.clone(),
                path,
            }
        } else {
            real.clone()
        };
        let keeping = |more: &[&str]| -> Vec<String> {
            let all = isolated(&[])
                .into_iter()
                .filter(|flag| *flag != "--no-session-persistence");
            all.chain(more.iter().copied()).map(str::to_owned).collect()
        };
        let start = |more: &[&str]| {
            let args = keeping(more);
            Cli::spawn(bench.command(&cli, &args.iter().map(String::as_str).collect::<Vec<_>>()))
        };
        let mut first = start(&[]);
        first.user("one");
        let session = first.until("result")["session_id"]
            .as_str()
            .unwrap()
            .to_owned();
        let answers = |cli: &Cli| {
            cli.seen
                .iter()
                .rev()
                .find(|record| record["type"] == "assistant")
                .unwrap()["uuid"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        let answer = answers(&first);
        first.user("two");
        first.until("result");
        first.finish();
        let ways: [&[&str]; 4] = [
            &["--resume", &session, "--fork-session"],
            &[
                "--resume",
                &session,
                "--fork-session",
                "--resume-session-at",
                &answer,
            ],
            &["--resume", "00000000-0000-4000-8000-000000000000"],
            &["--resume", &session],
        ];
        let mut all = Vec::new();
        for way in ways {
            let before = bench.upstream.posts().len();
            let mut second = start(way);
            second.user("three");
            let result = second.until("result");
            let same = result["session_id"] == session.as_str();
            let code = second.finish().code();
            let users: Vec<String> = bench.upstream.posts()[before..]
                .iter()
                .flat_map(|body| body["messages"].as_array().unwrap().clone())
                .filter(|message| message["role"] != "system")
                .map(|message| {
                    format!(
                        "{} {}",
                        message["role"],
                        message["content"].to_string().contains("two")
                    )
                })
                .collect();
            all.push(json!([
                result["subtype"],
                result["errors"],
                same && way.len() != 2,
                code,
                users
            ]));
        }
        json!(all)
    };
    assert_eq!(format!("{:#}", seen(false)), format!("{:#}", seen(true)));
}

/// What a host can see, without ids, times and the CLI's own words. Where a tool call stands among the
/// records is a race, so requests to the host and their like are left out of the order.
fn view(mut cli: Cli, scene: &Scene, upstream: &Upstream) -> Value {
    (scene.play)(&mut cli);
    let code = cli.finish().code();
    let mut records: Vec<String> = cli.seen.iter().map(record_view).collect();
    let limits = records
        .iter()
        .filter(|name| *name == "rate_limit_event")
        .count();
    records.retain(|name| !UNORDERED.contains(&name.as_str()));
    records.dedup();
    let results: Vec<Value> = cli
        .seen
        .iter()
        .filter(|record| record["type"] == "result")
        .map(result_view)
        .collect();
    let bodies: Vec<Value> = upstream.posts().iter().map(body_view).collect();
    let controls: Vec<Value> = cli
        .seen
        .iter()
        .filter(|record| record["type"] == "control_response")
        .map(|record| {
            json!([
                record["response"]["subtype"],
                record["response"]["response"].get("rewound")
            ])
        })
        .collect();
    json!({"exit": code, "limits": limits, "records": records, "results": results, "controls": controls, "bodies": bodies})
}

/// Records whose place among the others is a race, or that come as often as the CLI likes.
const UNORDERED: [&str; 5] = [
    "thinking_tokens",
    "command_lifecycle",
    "background_tasks_changed",
    "control_request",
    "rate_limit_event",
];

fn record_view(record: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match record["type"].as_str().unwrap_or_default() {
        "stream_event" => {
            let abandoned = record
                .get("abandoned_blocks")
                .map(|blocks| blocks["from_block_index"].to_string());
            format!(
                "{}{}",
                text(&record["event"]["type"]),
                abandoned
                    .map(|from| format!(" abandoned from {from}"))
                    .unwrap_or_default()
            )
        }
        "system" => text(&record["subtype"]),
        "assistant" => {
            let kind = text(&record["message"]["content"][0]["type"]);
            let model = text(&record["message"]["model"]);
            format!(
                "assistant {kind} {model} {} {}",
                text(&record["error"]),
                record.get("aborted").is_some()
            )
        }
        "user" => format!(
            "user {} {}",
            text(&record["message"]["content"][0]["type"]),
            record.get("isSynthetic").is_some()
        ),
        other => other.to_owned(),
    }
}

fn result_view(record: &Value) -> Value {
    let mut view = json!({});
    for key in [
        "subtype",
        "is_error",
        "terminal_reason",
        "stop_reason",
        "num_turns",
        "api_error_status",
        "permission_denials",
        "usage",
        "begun_message_ids",
    ] {
        view[key] = record[key].clone();
    }
    for key in ["input_tokens", "output_tokens"] {
        view[key] = record["usage"][key].clone();
    }
    view.as_object_mut().unwrap().shift_remove("usage");
    view
}

/// The shape of a body: keys, roles, block types, tools, cache marks; texts only where they are the host's.
fn body_view(body: &Value) -> Value {
    let block = |block: &Value| {
        let mark = if block.get("cache_control").is_some() {
            " cached"
        } else {
            ""
        };
        format!("{}{mark}", block["type"].as_str().unwrap_or_default())
    };
    let messages: Vec<String> = body["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| {
            let content = match &message["content"] {
                // Sentences that the CLI says by itself are its own.
                Value::String(text) if text.starts_with("<system-reminder>") => {
                    "reminder".to_owned()
                }
                Value::String(text) if message["role"] == "user" && text.len() < 50 => {
                    format!("{text:?}")
                }
                Value::String(_) => "text".to_owned(),
                blocks => blocks
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(block)
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            format!("{}: {content}", message["role"].as_str().unwrap())
        })
        .collect();
    let system: Vec<String> = body["system"]
        .as_array()
        .into_iter()
        .flatten()
        .map(block)
        .collect();
    json!({
        "keys": body.as_object().unwrap().keys().collect::<Vec<_>>(),
        "model": body["model"], "messages": messages, "system": system, "tools": body["tools"],
        "max_tokens": body["max_tokens"], "thinking": body["thinking"], "effort": body["output_config"],
        "context_management": body["context_management"], "prompt": body["system"][2]["text"],
    })
}

/// Keeps the names that other test programs use from being unused here.
const _: (Duration, fn() -> Isolation) = (PATIENCE, rig::isolate);
