//! The gate, with every answer that the usage endpoint can give.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Mutex;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use turnpass::limits::gate::{Finding, Question, SourceFault, UsageSource};
use turnpass::limits::verdict::{Doubt, Shape, Verdict};
use turnpass::models::discovery::discover;
use turnpass::request::CallKind;
use turnpass_lab::rig::{MadeUpHome, SignIn};
use turnpass_lab::scenario::{Body, ExtraUsage, Reply, UsageAnswer};

use super::Test;
use super::stage::Stage;

pub(crate) const TESTS: [(&str, Test); 9] = [
    ("gate::one_answer_of_each_kind", one_answer_of_each_kind),
    (
        "gate::a_late_answer_is_no_answer",
        a_late_answer_is_no_answer,
    ),
    (
        "gate::a_running_process_recovers_by_retries",
        a_running_process_recovers_by_retries,
    ),
    (
        "gate::a_remembered_refusal_needs_a_fresh_process",
        a_remembered_refusal_needs_a_fresh_process,
    ),
    (
        "gate::a_reading_made_up_from_headers_needs_a_fresh_process",
        seeded_from_headers,
    ),
    (
        "gate::another_process_s_answer_serves_for_a_minute",
        another_process_s_answer_serves_for_a_minute,
    ),
    (
        "gate::an_advisor_hears_that_it_is_signed_out",
        an_advisor_hears_that_it_is_signed_out,
    ),
    (
        "gate::bug_128_a_probe_that_hangs_leaves_nothing",
        bug_128_a_probe_that_hangs_leaves_nothing,
    ),
    (
        "models::discovery_tells_models_and_windows_at_no_cost",
        discovery,
    ),
];

fn says(extra_usage: ExtraUsage) -> UsageAnswer {
    UsageAnswer {
        extra_usage,
        ..UsageAnswer::default()
    }
}

fn status(status: u16) -> UsageAnswer {
    UsageAnswer {
        status,
        ..UsageAnswer::default()
    }
}

fn body(value: serde_json::Value) -> UsageAnswer {
    UsageAnswer {
        body: Some(Body::Json(value)),
        ..UsageAnswer::default()
    }
}

/// By a fresh process alone.
fn ask_fresh(stage: &Stage) -> Finding {
    stage.wait(async {
        let gate = stage.probe().gate();
        let question = Question {
            running: None,
            call: CallKind::Normal,
            cancel: &CancellationToken::new(),
        };
        let found = gate.ask(question).await;
        gate.shutdown().await;
        found
    })
}

/// By a running process first, as a pool asks.
fn ask(stage: &Stage, call: CallKind) -> Finding {
    stage.wait(async {
        let probe = stage.probe();
        let gate = probe.gate();
        let process = probe.start().await.unwrap();
        let question = Question {
            running: Some(&process),
            call,
            cancel: &CancellationToken::new(),
        };
        let found = gate.ask(question).await;
        process.end().await;
        gate.shutdown().await;
        found
    })
}

fn forget_snapshot(stage: &Stage) {
    // The CLI shares a good answer for a minute by a file in its home; each case is to be asked for.
    let home = stage.home();
    std::fs::remove_dir_all(&home).unwrap();
    MadeUpHome::new(&home).unwrap();
}

fn one_answer_of_each_kind(stage: &Stage) {
    let enabled = |value| body(json!({"five_hour": null, "extra_usage": {"is_enabled": value}}));
    let cases = [
        ("off", says(ExtraUsage::Off), Some("Off")),
        ("on", says(ExtraUsage::On), Some("On")),
        ("missing", says(ExtraUsage::Missing), None),
        ("null", says(ExtraUsage::Null), None),
        ("enabled null", enabled(json!(null)), None),
        ("enabled text", enabled(json!("false")), None),
        ("empty object", body(json!({})), None),
        ("401", status(401), None),
        ("403", status(403), None),
        ("429", status(429), None),
        ("500", status(500), None),
    ];
    for (name, answer, wanted) in cases {
        forget_snapshot(stage);
        let before = stage.asked();
        stage.upstream.set_usage([answer]);
        let found = format!("{:?}", ask_fresh(stage));
        match wanted {
            Some(wanted) => assert_eq!(found, wanted, "{name}"),
            None => assert!(found.starts_with("Unconfirmed("), "{name}: {found}"),
        }
        assert!(stage.asked() > before, "{name} was asked for");
    }
    assert!(stage.upstream.messages().is_empty(), "it costs nothing");
    assert_eq!(stage.left(), [""; 0]);
}

fn a_late_answer_is_no_answer(stage: &Stage) {
    stage.upstream.set_usage([UsageAnswer {
        delay_ms: 6_000,
        ..UsageAnswer::default()
    }]);
    let found = ask_fresh(stage);
    // The CLI gives the endpoint 5 s, and the gate the process 8 s.
    let wanted = [Doubt::RateLimits(Shape::Null), Doubt::NoAnswer];
    assert!(
        matches!(found, Finding::Unconfirmed(doubt) if wanted.contains(&doubt)),
        "{found:?}"
    );
    assert_eq!(stage.left(), [""; 0]);
}

fn a_running_process_recovers_by_retries(stage: &Stage) {
    // A failure of the server is asked for again by the running CLI.
    stage
        .upstream
        .set_usage([status(500), status(500), says(ExtraUsage::Off)]);
    let found = ask(stage, CallKind::Normal);
    assert!(matches!(found, Finding::Off), "{found:?}");
    assert_eq!(stage.asked(), 3);
}

fn a_remembered_refusal_needs_a_fresh_process(stage: &Stage) {
    // A 429 is remembered by the running CLI, which does not ask again; a fresh one does.
    stage
        .upstream
        .set_usage([status(429), says(ExtraUsage::Off)]);
    let found = ask(stage, CallKind::Normal);
    assert!(matches!(found, Finding::Off), "{found:?}");
    assert_eq!(stage.asked(), 2, "once by each process");
    assert_eq!(stage.left(), [""; 0]);
}

/// A process that has had a turn: what a pool's gate asks.
struct AfterATurn(Mutex<(Child, BufReader<ChildStdout>)>);

impl AfterATurn {
    fn new(stage: &Stage) -> Self {
        let mut command = stage.command(&stage.claude);
        let words = "-p --input-format stream-json --output-format stream-json --verbose --tools= --setting-sources= \
                     --strict-mcp-config --permission-mode dontAsk --no-session-persistence --model sonnet";
        command.args(words.split_whitespace());
        command.env("DISABLE_TELEMETRY", "1");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let after = Self(Mutex::new((child, stdout)));
        let user = json!({"type": "user", "client_composed": true, "message": {"role": "user", "content": "hello"}});
        after.write_and_read(&user, |record| (record["type"] == "result").then_some(()));
        after
    }

    fn write_and_read<T>(&self, line: &Value, wanted: impl Fn(&Value) -> Option<T>) -> T {
        let mut both = self.0.lock().unwrap();
        let (child, stdout) = &mut *both;
        writeln!(child.stdin.as_mut().unwrap(), "{line}").unwrap();
        loop {
            let mut text = String::new();
            assert!(stdout.read_line(&mut text).unwrap() > 0, "the CLI ended");
            let record: Value = serde_json::from_str(&text).unwrap_or_default();
            if let Some(found) = wanted(&record) {
                return found;
            }
        }
    }
}

impl UsageSource for AfterATurn {
    fn get_usage(&self) -> BoxFuture<'_, Result<String, SourceFault>> {
        let line = json!({"type": "control_request", "request_id": "u", "request": {"subtype": "get_usage", "skip_behaviors": true}});
        let payload = self.write_and_read(&line, |record| {
            let answer = &record["response"];
            (answer["request_id"] == "u").then(|| answer["response"].to_string())
        });
        Box::pin(async { Ok(payload) })
    }
}

impl Drop for AfterATurn {
    fn drop(&mut self) {
        let (child, _) = self.0.get_mut().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

fn seeded_from_headers(stage: &Stage) {
    let hour = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    let hour = hour
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let headers = [
        ("status", "allowed".to_owned()),
        ("reset", hour.to_string()),
        ("representative-claim", "five_hour".to_owned()),
        ("5h-status", "allowed".to_owned()),
        ("5h-utilization", "0.4".to_owned()),
        ("5h-reset", hour.to_string()),
        ("7d-status", "allowed".to_owned()),
        ("7d-utilization", "0.2".to_owned()),
        ("7d-reset", (hour + 86_400).to_string()),
    ];
    let headers =
        headers.map(|(name, value)| (format!("anthropic-ratelimit-unified-{name}"), value));
    stage.upstream.enqueue(Reply {
        headers: headers.into(),
        ..Reply::text("hello")
    });
    // Refused to the running process, whose first reading then is made up; well for the fresh one.
    stage
        .upstream
        .set_usage([status(429), says(ExtraUsage::Off)]);
    let running = AfterATurn::new(stage);
    let seeded = stage.wait(running.get_usage()).unwrap();
    assert_eq!(
        Verdict::read(&seeded),
        Verdict::Unconfirmed(Doubt::ExtraUsage(Shape::Missing)),
        "{seeded}"
    );
    let found = stage.wait(async {
        let gate = stage.probe().gate();
        let question = Question {
            running: Some(&running),
            call: CallKind::Normal,
            cancel: &CancellationToken::new(),
        };
        let found = gate.ask(question).await;
        gate.shutdown().await;
        found
    });
    assert!(matches!(found, Finding::Off), "{found:?}");
    drop(running);
    assert_eq!(
        (stage.upstream.messages().len(), stage.left()),
        (1, Vec::new())
    );
}

fn another_process_s_answer_serves_for_a_minute(stage: &Stage) {
    stage.upstream.set_usage([says(ExtraUsage::Off)]);
    assert!(matches!(ask_fresh(stage), Finding::Off));
    assert_eq!(stage.asked(), 1);
    let again = ask_fresh(stage);
    assert!(matches!(again, Finding::Off), "{again:?}");
    assert_eq!(stage.asked(), 1, "from the snapshot of the first process");
}

fn an_advisor_hears_that_it_is_signed_out(stage: &Stage) {
    std::fs::remove_dir_all(stage.home()).unwrap();
    MadeUpHome::with(&stage.home(), SignIn::SignedOut).unwrap();
    let found = ask(stage, CallKind::Advisor);
    assert!(matches!(found, Finding::SignedOut), "{found:?}");
    let found = ask_fresh(stage);
    assert!(
        matches!(found, Finding::Unconfirmed(doubt) if doubt.is_not_ready()),
        "{found:?}"
    );
    assert_eq!(stage.left(), [""; 0]);
}

fn bug_128_a_probe_that_hangs_leaves_nothing(stage: &Stage) {
    stage.upstream.set_usage([UsageAnswer {
        never: true,
        ..UsageAnswer::default()
    }]);
    stage.wait(async {
        let gate = std::sync::Arc::new(stage.probe().gate());
        let callers: Vec<_> = (0..20)
            .map(|_| {
                let gate = std::sync::Arc::clone(&gate);
                tokio::spawn(async move {
                    let question = Question {
                        running: None,
                        call: CallKind::Normal,
                        cancel: &CancellationToken::new(),
                    };
                    gate.ask(question).await
                })
            })
            .collect();
        let asked = stage
            .upstream
            .wait_for("usage", |one| one.path == "/api/oauth/usage");
        asked.await.unwrap();
        gate.shutdown().await;
        for caller in callers {
            assert!(matches!(caller.await.unwrap(), Finding::Closed));
        }
    });
    assert_eq!(stage.asked(), 1, "twenty callers share one probe");
    assert_eq!(stage.left(), [""; 0]);
}

fn discovery(stage: &Stage) {
    let found = stage.wait(async { discover(&stage.installed()).await });
    assert!(found.fallback.is_none(), "{found:?}");
    let opus = found
        .models
        .iter()
        .find(|model| model.alias == "opus")
        .unwrap();
    assert_eq!(opus.id.0, "claude-opus-5-5");
    assert!(opus.efforts.len() >= 5, "{opus:?}");
    assert!(found.models.iter().all(|model| model.alias != "default"));
    assert!(
        opus.window_tokens.is_some_and(|tokens| tokens >= 200_000),
        "{opus:?}"
    );
    assert!(
        stage.upstream.messages().is_empty(),
        "a change of a known model sends nothing"
    );
    assert_eq!(stage.left(), [""; 0]);
}
