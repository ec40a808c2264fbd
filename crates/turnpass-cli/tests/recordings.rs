//! Records and recordings of real runs of the program, on the scripted CLI.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use turnpass_lab::cli::{Script, install};

/// The program with a home and a state folder of its own.
fn program(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnpass"));
    command
        .env_clear()
        .env("HOME", home)
        .env("PATH", "/usr/bin:/bin")
        .env("TZ", "UTC")
        .env("TURNPASS_STATE", home.join("state"))
        .current_dir(home)
        .stdin(Stdio::null());
    command
}

#[track_caller]
fn text(output: &Output, code: i32) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{out}\n{err}");
    out
}

fn demo(home: &Path, process: &str) -> Command {
    let mut command = program(home);
    command.args(["demo", "--scripted", "--json", "--process", process]);
    command
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// What the demonstration says, does and reads; none of it may be in a record.
const SAID: [&str; 6] = ["ledger", "sum.txt", "March", "rent 20", "[[say", "MADE-UP"];

#[test]
fn the_records_of_a_run_are_one_a_generation_and_hold_nothing_that_was_said() {
    let home = tempfile::tempdir().unwrap();
    let mut generations = 0;
    for process in ["warm", "per-request"] {
        let told = text(&demo(home.path(), process).output().unwrap(), 0);
        let told: Value = serde_json::from_str(&told).unwrap();
        generations += told["generations"].as_u64().unwrap();
        assert_eq!(told["upstream_requests"], told["generations"]);
    }
    let file = home.path().join("state/records/generations.jsonl");
    assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
    let lines = std::fs::read_to_string(&file).unwrap();
    assert_eq!(lines.lines().count() as u64, generations);
    for said in SAID {
        assert!(!lines.contains(said), "{said}: {lines}");
    }
    let log = |arguments: &[&str]| {
        let mut command = program(home.path());
        let output = command.arg("log").args(arguments).output().unwrap();
        text(&output, 0)
    };
    let read = log(&["--json", "-n", "100"]);
    let records: Vec<Value> = read
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(records.len() as u64, generations);
    for record in &records {
        assert_eq!(record["outcome"], "ok");
        assert_eq!(record["transport"], "relay");
        assert_eq!(record["call_kind"], "normal");
        assert_eq!(record["laboratory"], true);
        assert_eq!(record["upstream_requests"], 1);
        assert_eq!(record["attempts"], 1);
        assert_eq!(record["partial_stream"], false);
        assert!(record["chunks"].as_u64().unwrap() > 1, "{record}");
        assert!(record["tokens"]["output"].as_u64().unwrap() > 0, "{record}");
        assert!(record["first_token_ms"].as_u64() <= record["duration_ms"].as_u64());
    }
    let modes: Vec<_> = records.iter().map(|record| &record["process"]).collect();
    assert_eq!(modes[0], "warm");
    assert_eq!(modes[records.len() - 1], "per_request");

    assert_eq!(log(&[]).lines().count() as u64, 1 + generations);
    assert_eq!(log(&["-n", "2", "--since", "1h"]).lines().count(), 3);
    let total = format!("outcome=\"ok\"}} {generations}\n");
    let metrics = log(&["--metrics", "--outcome", "ok"]);
    assert!(metrics.contains(&total), "{metrics}");
    assert_eq!(
        log(&["--metrics", "--since", "0s"]).matches(" 0").count(),
        2
    );
    for none in [
        ["--outcome", "error"],
        ["--transport", "pool"],
        ["--since", "0s"],
    ] {
        assert!(log(&none).starts_with("no record"), "{none:?}");
    }
    let output = program(home.path()).args(["log", "--since", "1y"]).output();
    let output = output.unwrap();
    text(&output, 2);
    assert!(String::from_utf8_lossy(&output.stderr).contains("s, m, h, d or w"));
}

#[test]
fn records_that_are_switched_off_leave_nothing() {
    let home = tempfile::tempdir().unwrap();
    let mut command = demo(home.path(), "warm");
    let output = command.env("TURNPASS_KEEP_RECORDS", "false").output();
    text(&output.unwrap(), 0);
    assert!(!home.path().join("state/records").exists());
    text(&demo(home.path(), "warm").output().unwrap(), 0);
    assert!(
        home.path().join("state/records").exists(),
        "or this shows nothing"
    );
}

#[test]
fn a_recording_is_private_plays_back_and_never_holds_the_bearer() {
    for process in ["warm", "per-request"] {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("rec/of/mine");
        let run = demo(home.path(), process)
            .env("TURNPASS_RECORD", &folder)
            .output()
            .unwrap();
        text(&run, 0);
        assert_eq!(mode(&folder), 0o700);
        let recordings = files(&folder);
        assert!(!recordings.is_empty());
        for file in recordings {
            assert_eq!(mode(&file), 0o600);
            let recorded = std::fs::read_to_string(&file).unwrap();
            for secret in ["MADE-UP", "Bearer", "uthorization", "x-api-key"] {
                assert!(!recorded.contains(secret), "{secret} in {file:?}");
            }
            let played = program(home.path())
                .args(["lab", "replay-recording", "--json"])
                .arg(&file)
                .output()
                .unwrap();
            let played: Value = serde_json::from_str(&text(&played, 0)).unwrap();
            assert_eq!(played["standing"], "decodes", "{played}");
            assert!(
                played["records"]["result"].as_u64().unwrap() >= 1,
                "{played}"
            );
            let redacted = program(home.path())
                .args(["lab", "redact"])
                .arg(&file)
                .output()
                .unwrap();
            let redacted = text(&redacted, 0);
            for said in SAID {
                assert!(!redacted.contains(said), "{said}");
            }
        }
    }
}

#[test]
fn a_recorder_that_cannot_be_set_up_fails_the_start() {
    let home = tempfile::tempdir().unwrap();
    let open = home.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).unwrap();
    symlink(&open, home.path().join("link")).unwrap();
    std::fs::write(home.path().join("file"), "").unwrap();
    for name in ["open", "link", "file"] {
        let run = demo(home.path(), "warm")
            .env("TURNPASS_RECORD", home.path().join(name))
            .output()
            .unwrap();
        let told: Value = serde_json::from_str(&text(&run, 1)).unwrap();
        assert_eq!(told["error"]["code"], "recording_failed", "{told}");
        assert_eq!(told["upstream_requests"], 0);
    }
    assert!(files(&open).is_empty());
    let log = program(home.path()).args(["log", "--json"]).output();
    let log = text(&log.unwrap(), 0);
    assert!(log.contains("recording_failed") && !log.contains(&*home.path().to_string_lossy()));
}

#[test]
fn records_that_cannot_be_kept_fail_nothing() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("state"), "a file in the folder's place").unwrap();
    text(&demo(home.path(), "warm").output().unwrap(), 0);
    let log = program(home.path()).arg("log").output().unwrap();
    text(&log, 1);
    assert!(String::from_utf8_lossy(&log.stderr).contains("[recording_failed]"));
}

#[test]
fn the_scripted_cli_plays_a_redacted_recording() {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("../turnpass-lab/fixtures");
    for file in [
        "stateful/2.1.332-s42_out_of_order_results.ndjson",
        "relay/2.1.332-tools/stdout.ndjson",
    ] {
        let home = tempfile::tempdir().unwrap();
        let redacted = program(home.path())
            .args(["lab", "redact"])
            .arg(lab.join(file))
            .output()
            .unwrap();
        let redacted = text(&redacted, 0);
        std::fs::write(home.path().join("shared.ndjson"), &redacted).unwrap();
        let script = json!({"runs": [{"steps": [{"play_fixture": {"file": "shared.ndjson"}}]}]});
        let script = Script::parse(&script.to_string()).unwrap();
        let turnpass = Path::new(env!("CARGO_BIN_EXE_turnpass"));
        let claude = install(home.path(), turnpass, &script).unwrap();
        let played = Command::new(claude)
            .arg("-p")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let played = text(&played, 0);
        let of = |line: &str| -> Option<Value> {
            let value: Value = serde_json::from_str(line).unwrap();
            match value["dir"].as_str() {
                Some("out") => Some(value["v"].clone()),
                Some(_) => None,
                None => Some(value),
            }
        };
        let wanted: Vec<_> = redacted.lines().filter_map(of).collect();
        let got: Vec<_> = played.lines().filter_map(of).collect();
        assert!(wanted.len() > 10);
        assert_eq!(got, wanted, "{file}");
    }
}

#[test]
fn a_recording_that_cannot_be_read_or_played_says_so() {
    let home = tempfile::tempdir().unwrap();
    for what in ["replay-recording", "redact"] {
        let mut command = program(home.path());
        let output = command.args(["lab", what, "nowhere.ndjson"]).output();
        let output = output.unwrap();
        text(&output, 2);
        assert!(String::from_utf8_lossy(&output.stderr).contains("nowhere.ndjson"));
    }
    std::fs::write(
        home.path().join("b"),
        "{\"type\":\"result\",\"usage\":[]}\n{",
    )
    .unwrap();
    let mut command = program(home.path());
    let output = command.args(["lab", "replay-recording", "b"]).output();
    let told = text(&output.unwrap(), 0);
    assert!(told.starts_with("decodes_with_unknown\n"), "{told}");
    std::fs::write(home.path().join("c"), "{\"type\":\"user\",\"message\":3}\n").unwrap();
    let mut command = program(home.path());
    let output = command.args(["lab", "replay-recording", "c"]).output();
    assert!(text(&output.unwrap(), 1).starts_with("broken\n"));
}
