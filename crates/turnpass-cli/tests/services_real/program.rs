//! The program's commands, and the relay in production shape.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use serde_json::Value;
use turnpass::login::{Login, LoginCoordinator, LoginPrompt, LoginUi};
use turnpass::secret::Secret;
use turnpass_lab::rig::{MadeUpHome, SignIn};
use turnpass_lab::scenario::{ExtraUsage, Reply, TokenAnswer, UsageAnswer};

use super::Test;
use super::stage::{Ended, Stage};

pub(crate) const TESTS: [(&str, Test); 9] = [
    ("program::a_run_leaves_one_record_a_generation", records),
    (
        "program::usage_asks_once_a_minute",
        usage_asks_once_a_minute,
    ),
    ("program::auth_status_says_what_the_cli_says", auth_status),
    (
        "login::a_wrong_code_then_the_right_one",
        a_wrong_code_then_the_right_one,
    ),
    (
        "program::bug_032_a_key_helper_in_the_settings_is_no_sign_in_and_never_runs",
        bug_032_a_key_command_in_the_settings,
    ),
    ("program::models_come_from_the_cli", models),
    (
        "relay::require_off_refuses_before_anything_is_sent",
        require_off,
    ),
    (
        "relay::bug_052_overage_in_a_running_turn",
        bug_052_overage_in_a_running_turn,
    ),
    ("relay::warn_tells_beside_the_generation", warn_tells),
];

/// Pastes codes for the CLI's own links.
#[derive(Default)]
struct Pastes(Mutex<Vec<LoginPrompt>>);

impl LoginUi for Pastes {
    fn ask<'a>(&'a self, prompt: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>> {
        let mut prompts = self.0.lock().unwrap();
        prompts.push(prompt.clone());
        // The longer form of the link names the state that belongs to its code.
        let state = prompt.link.split("state=").nth(1).unwrap_or("made-up");
        let code = format!("made-up-code-{}#{state}", prompts.len());
        Box::pin(std::future::ready(Some(Secret::new(code.into_bytes()))))
    }
}

fn a_wrong_code_then_the_right_one(stage: &Stage) {
    MadeUpHome::with(&stage.home(), SignIn::SignedOut).unwrap();
    let refused = TokenAnswer {
        status: 400,
        ..TokenAnswer::default()
    };
    stage.upstream.set_token([refused, TokenAnswer::default()]);
    let ui = Arc::new(Pastes::default());
    let login = Login::new(stage.installed(), ui.clone())
        .with_coordinator(Arc::new(LoginCoordinator::default()));
    stage.wait(login.sign_in()).unwrap();
    let prompts = ui.0.lock().unwrap();
    assert_eq!(prompts.len(), 2, "{prompts:?}");
    assert_ne!(
        prompts[0].link, prompts[1].link,
        "each attempt has a link of its own"
    );
    let ended = stage.turnpass(&["auth", "status", "--json"]);
    assert_eq!(ended.json()["status"], "signed_in", "{}", ended.out);
    assert!(stage.upstream.messages().is_empty());
    assert_eq!(stage.left(), [""; 0]);
}

fn credits(extra_usage: ExtraUsage) -> UsageAnswer {
    UsageAnswer {
        extra_usage,
        ..UsageAnswer::default()
    }
}

fn usage_asks_once_a_minute(stage: &Stage) {
    stage.upstream.set_usage([credits(ExtraUsage::On)]);
    for _ in 0..2 {
        let ended = stage.turnpass(&["usage", "--json"]);
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let told = ended.json();
        assert_eq!(
            (&told["plan"], &told["credits"]),
            (&"max".into(), &"on".into())
        );
        assert_eq!(told["gate"]["require_off"], "would refuse with billing");
        assert_eq!(told["windows"][0]["name"], "five_hour");
        assert_eq!(told["windows"][0]["used_percent"], 12.0);
        assert_eq!(told["windows"][0]["resets_at"], 4_070_908_800_i64);
    }
    let text = stage.turnpass(&["usage"]);
    assert!(
        text.out
            .contains("seven_day         [##########--------------------]  34 %"),
        "{}",
        text.out
    );
    assert_eq!(stage.asked(), 1);
    assert!(stage.upstream.messages().is_empty());
    assert_eq!(stage.left(), [""; 0]);
}

fn auth_status(stage: &Stage) {
    let ended = stage.turnpass(&["auth", "status", "--json"]);
    assert_eq!(
        (ended.code, &ended.json()["status"]),
        (Some(0), &"signed_in".into())
    );
    std::fs::remove_dir_all(stage.home()).unwrap();
    MadeUpHome::with(&stage.home(), SignIn::SignedOut).unwrap();
    let ended = stage.turnpass(&["auth", "status"]);
    assert_eq!(ended.code, Some(5), "{}", ended.err);
    assert!(
        ended.out.contains("claude auth login --claudeai"),
        "{}",
        ended.out
    );
    assert_eq!(stage.left(), [""; 0]);
}

fn bug_032_a_key_command_in_the_settings(stage: &Stage) {
    let project = stage.path("w");
    let home = MadeUpHome::new(&stage.home()).unwrap();
    let planted = home.plant(&project).unwrap();
    // What the CLI says when it is asked as a person asks it.
    let plain = stage
        .command(&stage.claude)
        .args(["auth", "status"])
        .output();
    let plain = String::from_utf8(plain.unwrap().stdout).unwrap();
    assert!(plain.contains("api_key_helper"), "{plain}");
    let ended = stage.turnpass(&["auth", "status", "--json"]);
    let (code, told) = (ended.code, ended.json());
    assert_eq!(
        (code, &told["status"]),
        (Some(0), &"signed_in".into()),
        "{told}"
    );
    stage.upstream.set_usage([credits(ExtraUsage::Off)]);
    let passed = run(stage, "require_off");
    assert_eq!(passed.code, Some(0), "{}{}", passed.out, passed.err);
    let bearer = stage.upstream.messages()[0]
        .header("authorization")
        .map(str::to_owned);
    assert_eq!(bearer.as_deref(), Some("Bearer sk-ant-oat01-MADE-UP"));
    assert_eq!(planted.ran(), Vec::<String>::new());
    assert_eq!(stage.left(), [""; 0]);
}

fn records(stage: &Stage) {
    let task = r#"[[say MARKER-look]] [[call list {"path":"."}]] [[then [[say MARKER-answer]]]]"#;
    for process in ["warm", "per-request"] {
        let arguments = ["run", "--process", process, "--usage-gate", "off", task];
        let ended = stage.turnpass(&arguments);
        assert_eq!(ended.code, Some(0), "{process}: {}{}", ended.out, ended.err);
        assert!(ended.out.contains("MARKER-answer"), "or this shows nothing");
    }
    let refusal = Reply::error(403, "permission_error", "MARKER-refused");
    stage.upstream.enqueue(refusal);
    let failed = stage.turnpass(&["run", "--usage-gate", "off", "MARKER-task"]);
    assert_ne!(failed.code, Some(0), "{}", failed.out);
    let file = stage
        .home()
        .join(".local/state/turnpass/records/generations.jsonl");
    let text = std::fs::read_to_string(file).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let (records, sent) = (lines.collect::<Vec<Value>>(), stage.upstream.messages());
    assert_eq!((records.len(), sent.len()), (5, 5), "{text}");
    for (number, (record, sent)) in records[..4].iter().zip(&sent).enumerate() {
        let stop = ["tool_use", "end_turn"][number % 2];
        let process = ["warm", "per_request"][number / 2];
        let told = ["outcome", "stop", "process", "transport"].map(|name| &record[name]);
        assert_eq!(told, ["ok", stop, process, "relay"], "{record}");
        let one = ["upstream_requests", "attempts"].map(|name| &record[name]);
        assert_eq!(one, [1, 1], "{record}");
        let cache = sent.cache.as_ref().unwrap();
        let tokens = &record["tokens"];
        let told = ["input", "cache_read", "cache_creation"].map(|name| tokens[name].as_u64());
        let created = cache.created_5m + cache.created_1h;
        assert_eq!(
            told,
            [cache.input, cache.read, created].map(Some),
            "{record}"
        );
        assert!(tokens["output"].as_u64() > Some(0), "{record}");
    }
    let refused = &records[4];
    assert_eq!(
        (&refused["outcome"], &refused["error"]["status"]),
        (&"error".into(), &403.into())
    );
    for said in [
        "MARKER",
        "MADE-UP",
        "Bearer",
        stage.home().to_str().unwrap(),
    ] {
        assert!(!text.contains(said), "{said} in {text}");
    }
    assert_eq!(stage.left(), [""; 0]);
}

fn models(stage: &Stage) {
    let ended = stage.turnpass(&["models", "--json"]);
    let told = ended.json();
    assert_eq!(
        (ended.code, &told["source"]),
        (Some(0), &"cli".into()),
        "{told}"
    );
    let ids: Vec<_> = told["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert!(
        ids.contains(&"claude-opus-5-5") && ids.contains(&"claude-opus-5-5[1m]"),
        "{ids:?}"
    );
}

fn run(stage: &Stage, gate: &str) -> Ended {
    stage.turnpass(&["run", "--json", "--usage-gate", gate, "[[say hello]]"])
}

fn error(ended: &Ended) -> Value {
    let lines = ended.lines();
    lines.last().unwrap_or(&Value::Null)["error"].clone()
}

fn require_off(stage: &Stage) {
    stage.upstream.set_usage([credits(ExtraUsage::On)]);
    let refused = run(stage, "require_off");
    assert_eq!(refused.code, Some(6), "{}{}", refused.out, refused.err);
    assert_eq!(error(&refused)["code"], "billing", "{}", refused.out);
    assert!(stage.upstream.messages().is_empty(), "nothing was sent");
    std::fs::remove_dir_all(stage.home()).unwrap();
    MadeUpHome::new(&stage.home()).unwrap();
    stage.upstream.set_usage([credits(ExtraUsage::Off)]);
    let passed = run(stage, "require_off");
    assert_eq!(passed.code, Some(0), "{}{}", passed.out, passed.err);
    assert_eq!(stage.upstream.messages().len(), 1);
    assert_eq!(stage.left(), [""; 0]);
}

fn overage() -> Reply {
    let headers = [
        ("anthropic-ratelimit-unified-status", "rejected"),
        ("anthropic-ratelimit-unified-overage-status", "allowed"),
        ("anthropic-ratelimit-unified-overage-in-use", "true"),
        (
            "anthropic-ratelimit-unified-representative-claim",
            "five_hour",
        ),
    ];
    Reply {
        headers: headers
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ..Reply::text("hello")
    }
}

fn bug_052_overage_in_a_running_turn(stage: &Stage) {
    for process in ["warm", "per-request"] {
        stage.upstream.enqueue(overage());
        let arguments = [
            "run",
            "--json",
            "--process",
            process,
            "--usage-gate",
            "require-off",
            "hello",
        ];
        let ended = stage.turnpass(&arguments);
        assert_eq!(ended.code, Some(6), "{process}: {}{}", ended.out, ended.err);
        assert_eq!(error(&ended)["code"], "billing", "{process}: {}", ended.out);
        assert!(
            !ended.out.contains("\"text\":\"hello\""),
            "{process}: {}",
            ended.out
        );
    }
    stage.upstream.enqueue(overage());
    let warned = stage.turnpass(&["run", "--json", "--usage-gate", "warn", "hello"]);
    assert_eq!(warned.code, Some(0), "{}{}", warned.out, warned.err);
    assert!(
        warned.out.contains("usage credits are in use now"),
        "{}",
        warned.out
    );
    assert_eq!(stage.left(), [""; 0]);
}

fn warn_tells(stage: &Stage) {
    stage.upstream.set_usage([credits(ExtraUsage::On)]);
    // Two rounds, the first of which takes as long as the question beside it at least.
    stage.upstream.enqueue(Reply {
        before_head_ms: 0,
        between_events_ms: 1_000,
        headers: BTreeMap::new(),
        ..Reply::text("hello there, this takes a moment")
    });
    let ended = run(stage, "warn");
    assert_eq!(ended.code, Some(0), "{}{}", ended.out, ended.err);
    assert!(
        ended.out.contains("usage credits are on for this account"),
        "{}",
        ended.out
    );
    assert_eq!((stage.asked(), stage.upstream.messages().len()), (1, 1));
    assert_eq!(stage.left(), [""; 0]);
}
