//! Nothing of a conversation and nothing of the sign-in is where it does not belong: files, logs, errors, arguments.
//!
//! Plays in a process of its own, so that every trace event and every file is of this one transport.

use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::json;
use turnpass::Transport as _;
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::Event;
use turnpass::request::{Request, TransportSession};
use turnpass_lab::scenario::{Item, Reply};
use turnpass_lab::upstream::Options;

use crate::bench::{Answer, Bench, Setup, drain, options, read_until, request, tool};
use crate::cancels::wait_closed;
use crate::child::{self, Play, Role};

/// The made-up sign-in of a laboratory home.
const BEARER: &str = "MADE-UP";
const SYSTEM: &str = "MARKSYSTEM";
const MESSAGE: &str = "MARKMESSAGE";
const RESULT: &str = "MARKRESULT";
const TOOL: &str = "MARKTOOL";
const DESCRIPTION: &str = "MARKDESCRIPTION";
const REPLY: &str = "MARKREPLY";
const ERROR: &str = "MARKERROR";
const SESSION: &str = "MARKSESSION";

const ALL: [&str; 9] = [
    BEARER,
    SYSTEM,
    MESSAGE,
    RESULT,
    TOOL,
    DESCRIPTION,
    REPLY,
    ERROR,
    SESSION,
];

/// Starts the part and passes its judgement on.
pub(crate) async fn kept(setup: Setup) {
    let bench = Bench::new(&setup);
    let temporary = bench.dir().join("t");
    std::fs::create_dir(&temporary).unwrap();
    let play = Play {
        role: Role::Private,
        ..Play::new(&bench)
    };
    let output = child::command(&play)
        .env("TMPDIR", &temporary)
        .stderr(std::process::Stdio::piped())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains(child::READY));
    bench.finish().await;
}

/// Everything that is traced, from all crates, at the finest level.
#[derive(Clone, Default)]
struct Traced(Arc<Mutex<Vec<u8>>>);

impl Write for Traced {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The part itself: success, failures, a cancel, and a look at everything during and after each.
pub(crate) async fn play(setup: Setup) {
    let traced = Traced::default();
    let writer = traced.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .init();
    tracing::trace!("the subscriber hears everything");
    let bench = Bench::with(&setup, Options::default(), |options| options.spares = 1);
    // The laboratory wrote the made-up sign-in into its home; nothing has run so far.
    let holds = |(path, bytes): (PathBuf, Vec<u8>)| {
        let text = String::from_utf8_lossy(&bytes);
        text.contains(BEARER).then_some(path)
    };
    let sign_in: Vec<PathBuf> = files(&[]).into_iter().filter_map(holds).collect();
    assert_eq!(sign_in.len(), 1);
    let shown = format!(
        "{:?} {:?}",
        bench.relay,
        options(&setup, bench.dir(), &bench.up.url())
    );
    clean("Debug of transport and options", shown.as_bytes(), &ALL);

    success(&bench, &sign_in).await;
    failures(&bench).await;
    cancel(&bench).await;
    let shown = format!("{:?}", bench.relay);
    clean("Debug of the transport", shown.as_bytes(), &ALL);
    bench.settle().await;
    bench.relay.shutdown().await.unwrap();
    for (path, bytes) in files(&sign_in) {
        clean(&format!("{} after the end", path.display()), &bytes, &ALL);
    }
    let log = traced.0.lock().unwrap().clone();
    assert!(String::from_utf8_lossy(&log).contains("the subscriber hears everything"));
    assert!(log.len() > 1_000, "other crates are heard as well");
    clean("the log", &log, &ALL);
    bench.finish().await;
}

fn marked() -> Request {
    let mut messages = vec![Message::user(format!("{MESSAGE} one"))];
    messages.push(Message::assistant(format!("{MESSAGE} two")));
    messages.push(Message::user(format!("{MESSAGE} three")));
    let mut request = request(messages);
    request.system = format!("{SYSTEM} prompt");
    request.session = TransportSession(SESSION.to_owned());
    let mut marked = tool(&format!("{TOOL}_read"));
    marked.description = DESCRIPTION.to_owned();
    request.tools = vec![marked];
    request
}

/// A call, its result and a text; held in the middle for a look at the disk and at the processes.
async fn success(bench: &Bench, sign_in: &[PathBuf]) {
    bench.up.enqueue(Reply::content([
        Item::text(format!("{REPLY} before")),
        Item::Hold {
            gate: "look".into(),
        },
        Item::tool_use(format!("{TOOL}_read"), json!({"path": REPLY})),
    ]));
    let mut generation = bench.relay.generate(marked());
    let mut events = read_until(&mut generation, |event| matches!(event, Event::Text { .. })).await;
    clean(
        "Debug of a generation",
        format!("{generation:?}").as_bytes(),
        &ALL,
    );
    during(bench, sign_in);
    bench.up.release("look");
    let mut answer = drain(generation).await;
    events.append(&mut answer.events);
    answer.events = events;
    told(&answer);
    let mut next = marked();
    next.messages.push(answer.done().message.clone());
    let call = answer.calls().remove(0);
    next.messages
        .push(Message::results([ToolResult::text(call.id, RESULT)]));
    bench.up.enqueue(Reply::text(format!("{REPLY} after")));
    let (answer, seen) = bench.ask(next).await;
    answer.done();
    assert!(seen[0].violations.is_empty());
    let sent = String::from_utf8_lossy(&seen[0].body).into_owned();
    for marker in [SYSTEM, MESSAGE, RESULT, TOOL, DESCRIPTION, REPLY] {
        assert!(
            sent.contains(marker),
            "{marker} reaches the service, so its absence elsewhere means something"
        );
    }
    assert!(seen[0].header("authorization").unwrap().contains(BEARER));
}

/// Every way of failing, with the service's own words around it.
async fn failures(bench: &Bench) {
    let invalid = "invalid_request_error";
    let replies = [
        vec![Reply::error(
            400,
            invalid,
            format!("messages.0.content: {ERROR} {MESSAGE}"),
        )],
        vec![Reply::error(400, ERROR, ERROR)],
        vec![Reply::error(500, "api_error", ERROR)],
        vec![Reply::error(
            404,
            "not_found_error",
            format!("model: {ERROR}"),
        )],
        vec![Reply::content([
            Item::text(REPLY),
            Item::Error {
                error: ERROR.into(),
                message: Some(ERROR.into()),
            },
        ])],
        vec![Reply {
            headers: [("retry-after".to_owned(), ERROR.to_owned())].into(),
            ..Reply::error(429, ERROR, ERROR)
        }],
        vec![
            Reply::error(401, "authentication_error", ERROR),
            Reply::error(401, "authentication_error", ERROR),
        ],
    ];
    for replies in replies {
        for reply in replies {
            bench.up.enqueue(reply);
        }
        let (answer, _) = bench.ask(marked()).await;
        let error = answer.error();
        clean(
            "an error",
            format!("{error} {error:?} {error:#?}").as_bytes(),
            &ALL,
        );
        told(&answer);
    }
}

async fn cancel(bench: &Bench) {
    bench
        .up
        .enqueue(Reply::content([Item::text(REPLY), Item::UntilClosed {}]));
    let mut generation = bench.relay.generate(marked());
    read_until(&mut generation, |event| matches!(event, Event::Text { .. })).await;
    let number = bench.up.requests().last().unwrap().number;
    drop(generation);
    wait_closed(bench, number).await;
}

/// Events beside those that carry what the model said.
fn told(answer: &Answer) {
    for event in &answer.events {
        if matches!(
            event,
            Event::Started { .. } | Event::Notice(_) | Event::Usage(_)
        ) {
            clean("an event", format!("{event:?}").as_bytes(), &ALL);
        }
    }
}

/// While a generation runs: the launch files and nothing else hold what they are for, in private directories; the
/// processes show nothing.
fn during(bench: &Bench, sign_in: &[PathBuf]) {
    for (path, bytes) in files(sign_in) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let allowed: &[&str] = match name {
            "system.txt" => &[SYSTEM],
            "settings.json" | "catalogue.json" => &[TOOL, DESCRIPTION],
            _ => &[],
        };
        let of_launch = path
            .parent()
            .unwrap()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("turnpass-");
        let wanted: Vec<&str> = ALL
            .into_iter()
            .filter(|marker| !of_launch || !allowed.contains(marker))
            .collect();
        clean(
            &format!("{} during a generation", path.display()),
            &bytes,
            &wanted,
        );
        if of_launch {
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&path), 0o600, "{}", path.display());
            assert_eq!(mode(path.parent().unwrap()), 0o700, "{}", path.display());
        }
    }
    let processes = bench.spawned();
    assert!(!processes.is_empty());
    for process in processes {
        for what in ["cmdline", "environ"] {
            // A spare may have ended by now.
            if let Ok(bytes) = std::fs::read(format!("/proc/{}/{what}", process.pid)) {
                clean(what, &bytes, &ALL);
                if what == "cmdline" {
                    assert!(
                        bytes.len() < 8 * 1024,
                        "bug 27: {} bytes of arguments",
                        bytes.len()
                    );
                }
            }
        }
    }
}

/// Every file below the temporary directory but `except`.
fn files(except: &[PathBuf]) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![std::env::temp_dir()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file()
                && !except.contains(&path)
                // It may have gone since the folder was listed.
                && let Ok(bytes) = std::fs::read(&path)
            {
                found.push((path, bytes));
            }
        }
    }
    assert!(!found.is_empty());
    found
}

fn clean(what: &str, bytes: &[u8], markers: &[&str]) {
    let text = String::from_utf8_lossy(bytes);
    for marker in markers {
        if let Some(at) = text.find(marker) {
            let from = text.floor_char_boundary(at.saturating_sub(200));
            let to = text.floor_char_boundary((at + 100).min(text.len()));
            panic!("{marker} is in {what}: …{}…", &text[from..to]);
        }
    }
}
