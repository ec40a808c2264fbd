//! The tool server, the person's configuration, and what is left behind.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use turnpass::ErrorCode;
use turnpass::conversation::Message;
use turnpass::event::Event;
use turnpass::replay::Carrier;

use crate::bench::{Random, body, drain, request, say, tool};
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

/// Some calls, one in four killed: no process, no private file, and nothing in the CLI's own folder grows.
pub(crate) async fn bug_021_many_calls_leave_nothing(setup: Setup) {
    many(setup, 24).await;
}

/// The whole of it.
pub(crate) async fn soak_200_calls_of_which_50_are_killed_leave_nothing(setup: Setup) {
    many(setup, 200).await;
}

/// What the CLI's own folder may gain: it keeps some files of its own, whose number does not depend on that of the calls.
const NEW_FILES: usize = 8;
const NEW_BYTES: u64 = 64 * 1024;

/// Calls in this number, one in four killed at a random point of its life.
async fn many(setup: Setup, calls: usize) {
    let ground = Ground::new(&setup);
    let (answer, _) = ground.ask(say("[[say first]]")).await;
    answer.done();
    let before = files(ground.home.path());
    let mut random = Random::new(41);
    let mut when = [0; 3];
    let mut at = 0;
    while at < calls {
        let kind = random.below(when.len());
        let point = Point::random(&mut random, kind);
        let (a, b, c, ()) = tokio::join!(
            whole(&ground, at),
            whole(&ground, at + 1),
            whole(&ground, at + 2),
            killed(&ground, point)
        );
        assert_eq!([a, b, c], [at, at + 1, at + 2]);
        when[kind] += 1;
        at += 4;
    }
    ground.all_gone().await;
    let after = files(ground.home.path());
    let new: Vec<_> = after
        .keys()
        .filter(|file| !before.contains_key(*file))
        .collect();
    let bytes = |files: &BTreeMap<String, u64>| files.values().sum::<u64>();
    let grown = bytes(&after).saturating_sub(bytes(&before));
    eprintln!(
        "MEASURED {}: {calls} calls, killed after a time, at the beginning, within the text: {when:?}; new files {new:?}, {grown} bytes",
        setup.name()
    );
    assert!(
        new.len() <= NEW_FILES && grown <= NEW_BYTES,
        "{new:?} {grown}"
    );
    ground.finish().await;
}

async fn whole(ground: &Ground, at: usize) -> usize {
    let answer = drain(ground.generate(say(&format!("[[say answer {at}]]")))).await;
    assert_eq!(answer.text(), format!("answer {at}"));
    assert_eq!(answer.done().upstream_requests, 1);
    at
}

/// Where a generation is killed.
#[derive(Clone, Copy)]
enum Point {
    /// After this time, which is mostly before the CLI has asked.
    After(Duration),
    /// When the answer has begun.
    Begun,
    /// After so many pieces of text.
    Pieces(usize),
}

impl Point {
    fn random(random: &mut Random, kind: usize) -> Self {
        match kind {
            0 => Self::After(Duration::from_millis(
                u64::try_from(random.below(600)).unwrap(),
            )),
            1 => Self::Begun,
            _ => Self::Pieces(1 + random.below(10)),
        }
    }
}

/// Drops a generation at a point of its life.
async fn killed(ground: &Ground, point: Point) {
    let mut generation = ground.generate(say(
        "[[say half of a long answer]] [[chunk 2 ms 60]] [[stall closed]]",
    ));
    let mut pieces = 0;
    let heard = async {
        loop {
            match (generation.next().await, point) {
                (Some(Ok(Event::Started { .. })), Point::Begun) => return,
                (Some(Ok(Event::Text { .. })), Point::Pieces(wanted)) => {
                    pieces += 1;
                    if pieces == wanted {
                        return;
                    }
                }
                (Some(Ok(_)), _) => {}
                (other, _) => panic!("{other:?}"),
            }
        }
    };
    let limit = match point {
        Point::After(time) => time,
        _ => crate::suite::BOUND,
    };
    let reached = tokio::time::timeout(limit, heard).await.is_ok();
    assert!(
        reached || matches!(point, Point::After(_)),
        "the point was not reached"
    );
    drop(generation);
}

/// Every file below a folder, with its size.
fn files(dir: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => open.push(entry.path()),
                _ => {
                    let bytes = entry.metadata().map_or(0, |file| file.len());
                    found.insert(entry.path().display().to_string(), bytes);
                }
            }
        }
    }
    found
}
