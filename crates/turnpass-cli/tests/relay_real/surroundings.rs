//! What the person's machine holds besides: configuration, history, credentials and proxies in the environment.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use turnpass_lab::rig::RefusingProxy;
use turnpass_lab::scenario::{Item, Reply};

use crate::bench::{Bench, Setup, body, say};
use crate::child::{self, Play, Role};

/// Hooks, instructions, servers, plugins, variables and memory have no effect; old history stays (bugs 35, 37).
pub(crate) async fn planted(setup: Setup) {
    let bench = Bench::new(&setup);
    let project = bench.dir().join("project");
    std::fs::create_dir(&project).unwrap();
    let planted = bench.home.plant(&project).unwrap();
    let settings = bench.home.path().join(".claude/settings.json");
    let mut kept: Value =
        serde_json::from_str(&std::fs::read_to_string(&settings).unwrap()).unwrap();
    kept["cleanupPeriodDays"] = json!(3650);
    std::fs::write(&settings, kept.to_string()).unwrap();
    let history = bench
        .home
        .path()
        .join(".claude/projects/-old/0b57aa4e-0000-4000-8000-000000000001.jsonl");
    std::fs::create_dir_all(history.parent().unwrap()).unwrap();
    std::fs::write(&history, "{\"type\":\"user\"}\n").unwrap();
    let days = SystemTime::now() - Duration::from_secs(90 * 24 * 3_600);
    File::options()
        .write(true)
        .open(&history)
        .unwrap()
        .set_modified(days)
        .unwrap();

    for _ in 0..3 {
        let mut request = say("[[say ok]]");
        request.place.directory = Some(project.clone());
        let (answer, seen) = bench.ask(request).await;
        answer.done();
        assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1));
        let shown = planted.shows_in(body(&seen[0]));
        assert!(shown.is_empty(), "{shown:?}");
        for (name, value) in &seen[0].headers {
            assert!(!value.contains("PLANTED"), "{name}: {value}");
        }
    }
    assert_eq!(planted.ran(), Vec::<String>::new());
    assert!(history.exists(), "the person's history was removed");
    assert_eq!(bench.count(), 3);
    bench.finish().await;
    assert_eq!(
        planted.ran(),
        Vec::<String>::new(),
        "nor at the end of a session"
    );
}

/// What must not reach the CLI, with what could be recognised of it.
const INHERITED: [(&str, &str); 15] = [
    ("ANTHROPIC_API_KEY", "sk-ant-INHERITED"),
    ("ANTHROPIC_AUTH_TOKEN", "INHERITED-token"),
    ("ANTHROPIC_BASE_URL", "http://127.0.0.1:9/INHERITED"),
    ("ANTHROPIC_CUSTOM_HEADERS", "x-inherited: INHERITED"),
    ("ANTHROPIC_MODEL", "INHERITED-model"),
    ("ANTHROPIC_BETAS", "INHERITED-beta"),
    ("CLAUDE_CODE_OAUTH_TOKEN", "sk-ant-oat01-INHERITED"),
    ("CLAUDE_CODE_USE_BEDROCK", "1"),
    ("CLAUDE_CODE_USE_VERTEX", "1"),
    (
        "CLAUDE_CODE_EXTRA_BODY",
        "{\"metadata\":{\"user_id\":\"INHERITED\"}}",
    ),
    ("CLAUDE_CODE_ENTRYPOINT", "INHERITED"),
    ("CLAUDE_CODE_SSE_PORT", "12345"),
    ("CLAUDECODE", "1"),
    ("CLAUDE_CODE_SIMPLE", "1"),
    ("NODE_OPTIONS", "--require=/nonexistent/INHERITED.js"),
];

/// Credentials, backends and marks of a surrounding session do not reach CLI or service, and a proxy sees no loopback
/// request (bugs 32, 33, 34).
pub(crate) async fn inherited(setup: Setup) {
    let bench = Bench::new(&setup);
    let proxy = RefusingProxy::start().unwrap();
    bench.up.enqueue(Reply::content([
        Item::text("partial"),
        Item::UntilClosed {},
    ]));
    let mut command = child::command(&Play {
        role: Role::Stall,
        ..Play::new(&bench)
    });
    command.envs(INHERITED);
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
        command
            .env(name, proxy.url())
            .env(name.to_lowercase(), proxy.url());
    }
    command
        .env("NO_PROXY", "example.com")
        .env_remove("no_proxy");
    let mut host = command.spawn().unwrap();
    let mut lines = BufReader::new(host.stdout.take().unwrap()).lines();
    let ready = lines
        .by_ref()
        .map_while(Result::ok)
        .any(|line| line == child::READY);
    let process = bench.spawned().first().cloned();
    let environment =
        process.map(|process| std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap());
    host.kill().unwrap();
    host.wait().unwrap();
    assert!(ready, "the host did not get as far as a first delta");
    bench.all_gone().await;

    let environment = String::from_utf8(environment.unwrap()).unwrap();
    let variables: Vec<(&str, &str)> = environment
        .split('\0')
        .filter_map(|variable| variable.split_once('='))
        .collect();
    let names: BTreeSet<&str> = variables.iter().map(|(name, _)| *name).collect();
    for (name, _) in INHERITED {
        // The address of the relay is set by the launch itself.
        assert!(
            name == "ANTHROPIC_BASE_URL" || !names.contains(name),
            "{name}"
        );
    }
    assert!(!environment.contains("INHERITED"));
    for name in ["NO_PROXY", "no_proxy"] {
        let (_, value) = variables.iter().find(|(found, _)| *found == name).unwrap();
        for part in ["example.com", "127.0.0.1", "localhost", "::1"] {
            assert!(
                value.split(',').any(|found| found == part),
                "{name}={value}"
            );
        }
    }
    let [recorded] = &bench.up.messages()[..] else {
        panic!("{} requests", bench.count())
    };
    assert_eq!(
        recorded.header("authorization"),
        Some("Bearer sk-ant-oat01-MADE-UP")
    );
    assert_eq!(
        (recorded.header("x-api-key"), recorded.header("x-inherited")),
        (None, None)
    );
    let sent = format!(
        "{:?}{}",
        recorded.headers,
        String::from_utf8_lossy(&recorded.body)
    );
    assert!(!sent.contains("INHERITED"));
    let loopback =
        |attempt: &String| attempt.contains("127.0.0.1") || attempt.contains("localhost");
    let seen: Vec<String> = proxy.attempts().into_iter().filter(loopback).collect();
    assert_eq!(seen, Vec::<String>::new(), "a proxy saw loopback requests");
    bench.finish().await;
}
