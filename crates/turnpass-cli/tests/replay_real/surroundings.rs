//! The tool server, the person's configuration, and what is left behind.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use turnpass::ErrorCode;
use turnpass::conversation::Message;
use turnpass::event::Event;
use turnpass::replay::Carrier;

use crate::bench::{body, drain, read_until, request, say, tool};
use crate::ground::{Ground, Setup, script};

/// Hooks, instructions, servers, plugins, variables and memory have no effect.
pub(crate) async fn bug_035_planted_configuration(setup: Setup) {
    let ground = Ground::new(&setup);
    let project = ground.dir().join("project");
    std::fs::create_dir(&project).unwrap();
    let planted = ground.home.plant(&project).unwrap();
    let settings = ground.home.path().join(".claude/settings.json");
    let mut kept: Value =
        serde_json::from_str(&std::fs::read_to_string(&settings).unwrap()).unwrap();
    // `auth status` reads the person's settings and then names the helper as the way of signing in, so such a person is
    // refused before anything is started (all three versions). The project's settings keep theirs.
    kept.as_object_mut().unwrap().remove("apiKeyHelper");
    std::fs::write(&settings, kept.to_string()).unwrap();
    for _ in 0..2 {
        let mut asked = request(vec![
            Message::user("one"),
            Message::assistant("two"),
            Message::user("[[say ok]]"),
        ]);
        asked.place.directory = Some(project.clone());
        let (answer, seen) = ground.ask(asked).await;
        assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1));
        let shown = planted.shows_in(body(&seen[0]));
        assert!(shown.is_empty(), "{shown:?}");
    }
    assert_eq!(planted.ran(), Vec::<String>::new());
    ground.finish().await;
    assert_eq!(planted.ran(), Vec::<String>::new(), "nor at the end");
}

/// Turnpass as a tool server, with something before it.
fn served(setup: &Setup, before: &str) -> Ground {
    Ground::with(setup, |options, dir| {
        options.tools = Some(Carrier::Stdio);
        let text = format!(
            "#!/bin/sh\n{before}\nexec '{}' \"$@\"\n",
            env!("CARGO_BIN_EXE_turnpass")
        );
        options.tool_server = Some(script(dir, "server", &text));
    })
}

/// A server that takes its time is waited for: nothing is asked before the CLI has all of its tools.
pub(crate) async fn bug_063_a_slow_tool_server(setup: Setup) {
    for seconds in [0, 3, 6] {
        let ground = served(&setup, &format!("sleep {seconds}"));
        let (answer, seen) = ground.ask(say("[[say ok]]")).await;
        assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1));
        let names: Vec<_> = body(&seen[0])["tools"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["name"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["mcp__turnpass__read", "mcp__turnpass__write"]);
        ground.finish().await;
    }
}

/// One that ends at once, one that is not there, and one that lists nothing: nothing is asked.
pub(crate) async fn replay_a_dead_tool_server(setup: Setup) {
    for before in ["exit 1", "exec /nonexistent/server", "exec cat"] {
        let ground = served(&setup, before);
        let mut asked = say("[[say never]]");
        asked.limits.start = std::time::Duration::from_secs(45);
        let (answer, seen) = ground.ask(asked).await;
        let error = answer.error();
        assert_eq!(error.code(), ErrorCode::McpStartup, "{before}: {error}");
        assert_eq!(seen.len(), 0, "{before}");
        assert!(error.is_retryable());
        ground.finish().await;
    }
}

/// A call that reached the tool server fails the request, whatever the answer is.
pub(crate) async fn replay_a_violation(setup: Setup) {
    // The CLI denies every call by itself, so the mark is made in the server's place.
    let mark = r#"for word in "$@"; do [ "$last" = --violation ] && : > "$word"; last=$word; done"#;
    let ground = served(&setup, mark);
    for directives in [r#"[[call read {"path":"a"}]]"#, "[[say fine]]"] {
        let (answer, seen) = ground.ask(say(directives)).await;
        assert_eq!(answer.code(), Some(ErrorCode::McpExecution), "{directives}");
        assert!(answer.calls().is_empty());
        assert_eq!(seen.len(), 1);
    }
    ground.finish().await;
}

/// Prompts, tools and settings go by private files.
pub(crate) async fn bug_027_nothing_long_on_the_command_line(setup: Setup) {
    let ground = Ground::new(&setup);
    let mut asked = say("[[say ok]]");
    asked.system = "MARKER ".repeat(50_000);
    asked.model = "claude-sonnet-5-5".into();
    asked.tools = (0..200)
        .map(|at| tool(&format!("{}{at}", "n".repeat(60))))
        .collect();
    asked.messages = vec![
        Message::user("MARKER ".repeat(20_000)),
        Message::assistant("yes"),
        Message::user("[[say ok]]"),
    ];
    let (answer, seen) = ground.ask(asked).await;
    assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1));
    assert_eq!(body(&seen[0])["tools"].as_array().unwrap().len(), 200);
    let noted = std::fs::read_to_string(ground.dir().join("spawns")).unwrap();
    assert!(!noted.contains("MARKER") && !noted.contains("nnnn"));
    assert!(noted.lines().all(|line| line.len() < 8 * 1024));
    ground.finish().await;
}

/// Calls in this number, one in four killed: no process, no private file, and nothing in the CLI's own folder grows.
const CALLS: usize = 200;

pub(crate) async fn bug_021_many_calls_leave_nothing(setup: Setup) {
    let ground = Ground::new(&setup);
    let (answer, _) = ground.ask(say("[[say first]]")).await;
    answer.done();
    let before = files(ground.home.path());
    // Older versions take as long and show the same; the newest is the one that changes.
    let calls = if setup.cli.version.as_str() > "2.1.310" {
        CALLS
    } else {
        CALLS / 5
    };
    let mut at = 0;
    while at < calls {
        let four = (at..at + 4).map(|at| one(&ground, at));
        futures_util::future::join_all(four).await;
        at += 4;
    }
    ground.all_gone().await;
    let after = files(ground.home.path());
    let new: Vec<_> = after.difference(&before).collect();
    eprintln!(
        "MEASURED {}: new files after {calls} calls: {new:?}",
        setup.name()
    );
    assert!(new.len() <= 8, "{new:?}");
    ground.finish().await;
}

async fn one(ground: &Ground, at: usize) {
    if at % 4 == 3 {
        let mut generation = ground.generate(say("[[say half]] [[stall closed]]"));
        read_until(&mut generation, |event| matches!(event, Event::Text { .. })).await;
        drop(generation);
    } else {
        let answer = drain(ground.generate(say(&format!("[[say answer {at}]]")))).await;
        assert_eq!(answer.text(), format!("answer {at}"));
    }
}

/// Every file below a folder.
fn files(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => open.push(entry.path()),
                _ => {
                    found.insert(entry.path().display().to_string());
                }
            }
        }
    }
    found
}
