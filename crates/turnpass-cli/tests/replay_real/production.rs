//! Trials in production shape: the CLI has no base URL of ours and believes that it talks to its own service, whose hosts
//! are all on loopback. Only there does it answer `get_usage`, renew a sign-in and complete a login.
//!
//! A transport reads its surroundings from its own environment, so each trial is a process of its own: this program again.
//! The service's port is one, so there is one such trial at a time.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Mutex;
use turnpass::replay::History;
use turnpass_lab::rig::{ProductionShape, RealCli};
use turnpass_lab::upstream::Options;

use crate::ground::{Setup, Shape};

/// What a trial's own process is to do, as JSON; set only there.
const PLAY: &str = "TURNPASS_REPLAY_REAL_PRODUCTION";

/// Longest run of one trial.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Who has the service's port.
static PORT: Mutex<()> = Mutex::const_new(());

/// The stage of this process.
static STAGE: OnceLock<Stage> = OnceLock::new();

struct Stage {
    place: PathBuf,
    shape: ProductionShape,
}

/// Runs one case in a process of its own.
pub(crate) async fn trial(setup: Setup, case: &'static str) {
    let _alone = PORT.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let temporary = dir.path().join("t");
    std::fs::create_dir(&temporary).unwrap();
    let play = json!({
        "case": case, "version": setup.cli.version, "path": std::path::absolute(&setup.cli.path).unwrap(),
        "history": setup.history.as_str(), "place": dir.path(),
    });
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .env_clear()
        .env("HOME", dir.path().join("home"))
        .env("PATH", "/usr/bin:/bin")
        .env("TMPDIR", &temporary)
        .env("NODE_EXTRA_CA_CERTS", dir.path().join("authority.pem"))
        .env(PLAY, play.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let ended = tokio::time::timeout(LIMIT, child.wait_with_output()).await;
    let ended = ended.expect("the trial in time").unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{}: {said}", ended.status);
    for line in said.lines().filter(|line| line.starts_with("MEASURED")) {
        eprintln!("{line}");
    }
    let left = crate::suite::private_dirs(&temporary);
    assert!(left.is_empty(), "{left:?}");
}

/// Plays a trial, if the environment names one.
pub(crate) fn play() -> Option<ExitCode> {
    let play: Value = serde_json::from_str(&std::env::var(PLAY).ok()?).unwrap();
    let text = |field: &str| play[field].as_str().unwrap();
    let place = PathBuf::from(text("place"));
    let shape = ProductionShape::authority(&place).unwrap();
    let stage = Stage { place, shape };
    assert!(STAGE.set(stage).is_ok(), "one trial a process");
    let setup = Setup {
        cli: RealCli {
            version: text("version").to_owned(),
            path: text("path").into(),
        },
        history: text("history").parse::<History>().unwrap(),
        shape: Shape::Production,
    };
    let mut cases = crate::in_production();
    cases.extend(crate::in_production_once());
    let case = cases.iter().find(|case| case.0 == text("case")).unwrap();
    crate::suite::play((case.1)(setup));
    Some(ExitCode::SUCCESS)
}

/// The directory of this process's trial: its home is in it.
pub(crate) fn place() -> PathBuf {
    let place = stage().place.clone();
    // What an earlier ground of the same trial has left there.
    let _ = std::fs::remove_dir_all(place.join("home"));
    let _ = std::fs::remove_file(place.join("spawns"));
    place
}

/// An upstream on the port of the service.
pub(crate) fn upstream() -> Options {
    Options {
        addr: SocketAddr::from(([127, 0, 0, 1], 443)),
        tls: Some(stage().shape.server_config()),
        ..Options::default()
    }
}

fn stage() -> &'static Stage {
    STAGE.get().expect("a trial in production shape")
}
