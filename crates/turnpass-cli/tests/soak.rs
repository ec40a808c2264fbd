//! Many cancels, many starts, many deaths of the host: nothing is left of them. Minutes long, so it runs when it is asked
//! for: `cargo test -p turnpass-cli --test soak -- --ignored --nocapture`.
//!
//! Each host is a process of its own (this program again), with a temporary folder of its own, so that whatever is left
//! there is of that host.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "stage/mod.rs"]
mod stage;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use turnpass::relay::{LoopbackUrl, RelayOptions, RelayTransport};
use turnpass::{ErrorCode, Provider};

use crate::stage::{PER_REQUEST, ROWS, Row, Stage, WARM, ask, hear, is_text, told, until};

/// Holds what the process that plays the host is to do.
const HOST: &str = "TURNPASS_TEST_SOAK_HOST";
/// Longest run of one host.
const HOST_LIMIT: Duration = Duration::from_secs(15 * 60);
/// From the death of a host to the end of everything that was its: end of input, SIGTERM, a second, SIGKILL.
const AFTER_DEATH: Duration = Duration::from_secs(15);
const CANCELS: u64 = 1_000;
const STARTS: u64 = 200;
const DEATHS: usize = 30;

/// Starts a host; its words come as lines that begin with `HOST `.
fn host(stage: &Stage, row: Row, work: &str, count: u64) -> Child {
    let tmp = stage.path("tmp");
    std::fs::create_dir_all(&tmp).unwrap();
    let order = json!({
        "row": ROWS.iter().position(|other| *other == row).unwrap(), "work": work, "count": count,
        "claude": stage.claude(), "upstream": stage.upstream.url(), "home": stage.path("home"),
    });
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "play_the_host",
            "--nocapture",
            "--include-ignored",
        ])
        .env_clear()
        .envs([("PATH", "/usr/bin:/bin"), ("HOME", "/nonexistent")])
        .env("TMPDIR", tmp)
        .env(HOST, order.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// The next words of a host.
async fn words(host: &mut Child) -> Value {
    let mut lines = BufReader::new(host.stdout.as_mut().unwrap()).lines();
    let said = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(said) = line.strip_prefix("HOST ") {
                return serde_json::from_str(said).unwrap();
            }
        }
        panic!("the host ended without a word");
    };
    tokio::time::timeout(HOST_LIMIT, said).await.unwrap()
}

/// Not a test of its own: the others start this one in a process of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn play_the_host() {
    let Ok(order) = std::env::var(HOST) else {
        return;
    };
    let order: Value = serde_json::from_str(&order).unwrap();
    let row = ROWS[order["row"].as_u64().unwrap() as usize];
    let count = order["count"].as_u64().unwrap();
    let before = open_files();
    let options = RelayOptions {
        process: Some(row.process),
        tools: Some(row.tools),
        claude_path: order["claude"].as_str().map(Into::into),
        lab_upstream: Some(LoopbackUrl::parse(order["upstream"].as_str().unwrap()).unwrap()),
        lab_home: order["home"].as_str().map(Into::into),
        ..RelayOptions::default()
    };
    let provider = Provider::new(RelayTransport::new(options).unwrap());
    let work = order["work"].as_str().unwrap();
    let done = match work {
        "cancel" => cancels(&provider, row, count).await,
        "start" => starts(&provider, count).await,
        _ => {
            let mut generation = provider.generate(ask("[[say half]] [[stall closed]]"));
            until(&mut generation, "text", is_text).await;
            println!("\nHOST {}", json!({"ready": true}));
            std::future::pending().await
        }
    };
    let zombies = zombies();
    provider.shutdown().await.unwrap();
    drop(provider);
    // The tasks that reap and drain end a moment after what they watched.
    let end = Instant::now() + AFTER_DEATH;
    while (open_files() > before || listeners() > 0) && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let left = json!({
        "done": done, "zombies": zombies, "listeners": listeners(),
        "files_before": before, "files_after": open_files(), "children": turnpass_lab::rig::descendants(std::process::id().cast_signed()).len(),
    });
    println!("\nHOST {left}");
}

/// Drops generations at random points; every tenth one is heard to its end, and has to be right.
async fn cancels(provider: &Provider, row: Row, count: u64) -> Value {
    // About as long as a generation takes when four are at it.
    let longest_us = if row.is_warm() { 120_000 } else { 400_000 };
    const AT_ONCE: u64 = 4;
    let work = |worker: u64| async move {
        // A fixed sequence, so that a failure can be repeated.
        let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(worker + 1);
        let (mut before_text, mut within, mut whole) = (0, 0, 0);
        for at in 0..count / AT_ONCE {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let mut request = ask(format!(
                "[[say answer {worker} {at} of many words]] [[chunk 2 ms 3]]"
            ));
            request.session.0 = format!("worker {worker}");
            if at % 10 == 9 {
                let heard = told(provider, request).await;
                assert_eq!(heard.text(), format!("answer {worker} {at} of many words"));
                assert_eq!(heard.done().upstream_requests, 1);
                continue;
            }
            let mut generation = provider.generate(request);
            let point = Duration::from_micros(random % longest_us);
            let mut heard = false;
            let ended = tokio::time::timeout(point, async {
                while let Some(event) = generation.next().await {
                    heard |= is_text(&event.unwrap());
                }
            });
            match (ended.await.is_ok(), heard) {
                (true, _) => whole += 1,
                (false, true) => within += 1,
                (false, false) => before_text += 1,
            }
        }
        (before_text, within, whole)
    };
    let all = futures_util::future::join_all((0..AT_ONCE).map(work)).await;
    let sum = all.iter().fold((0, 0, 0), |sum, each| {
        (sum.0 + each.0, sum.1 + each.1, sum.2 + each.2)
    });
    json!({"before_text": sum.0, "within_text": sum.1, "whole": sum.2})
}

/// One generation after the other, each in a process of its own.
async fn starts(provider: &Provider, count: u64) -> Value {
    let mut most = 0;
    for at in 0..count {
        let heard = told(provider, ask(format!("[[say {at}]]"))).await;
        assert_eq!(heard.text(), at.to_string());
        most = most.max(zombies());
    }
    json!({"starts": count, "most_zombies": most})
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Listening TCP sockets of this process.
fn listeners() -> usize {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listening = table.lines().skip(1).filter(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields[3] == "0A" && own.contains(&format!("socket:[{}]", fields[9]))
    });
    listening.count()
}

/// Children of this process that have ended and wait to be collected.
fn zombies() -> usize {
    let own = std::process::id().to_string();
    let stats = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let stat = std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
        let (_, tail) = stat.rsplit_once(')')?;
        let mut fields = tail.split_whitespace();
        Some((fields.next()? == "Z") && fields.next()? == own)
    });
    stats.filter(|is| *is).count()
}

/// Everything below a folder; what another process removes meanwhile is not there.
fn entries(dir: &Path) -> Vec<String> {
    let found = std::fs::read_dir(dir).into_iter().flatten().flatten();
    found
        .map(|entry| entry.path().display().to_string())
        .collect()
}

async fn nothing_is_left(stage: &Stage) {
    stage.all_gone(AFTER_DEATH).await;
    let end = Instant::now() + AFTER_DEATH;
    loop {
        let left = entries(&stage.path("tmp"));
        if left.is_empty() {
            break;
        }
        assert!(Instant::now() < end, "left: {left:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let open = stage
        .upstream
        .wait_connections("no connection left", |all| all.open() == 0);
    open.await.unwrap();
}

async fn a_thousand_cancels(row: Row) {
    let stage = Stage::emulator();
    let began = Instant::now();
    let mut host = host(&stage, row, "cancel", CANCELS);
    let said = words(&mut host).await;
    host.wait().await.unwrap();
    println!(
        "{}: {said} in {:?}, {} upstream requests, {} processes",
        row.name(),
        began.elapsed(),
        stage.sent().len(),
        stage.pids().len()
    );
    assert_eq!(
        (&said["listeners"], &said["children"], &said["zombies"]),
        (&json!(0), &json!(0), &json!(0))
    );
    assert!(
        said["files_after"].as_u64() <= said["files_before"].as_u64(),
        "{said}"
    );
    // The points were spread over the whole of a generation.
    for part in ["before_text", "within_text"] {
        assert!(said["done"][part].as_u64().unwrap() > 50, "{said}");
    }
    assert!(stage.sent().len() as u64 <= CANCELS);
    nothing_is_left(&stage).await;
}

#[tokio::test]
#[ignore = "minutes long"]
async fn bug_021_a_thousand_cancels_of_warm_processes_leave_nothing() {
    a_thousand_cancels(WARM).await;
}

#[tokio::test]
#[ignore = "minutes long"]
async fn bug_021_a_thousand_cancels_of_processes_per_request_leave_nothing() {
    a_thousand_cancels(PER_REQUEST).await;
}

#[tokio::test]
#[ignore = "minutes long"]
async fn bug_021_two_hundred_starts_leave_no_zombie() {
    let stage = Stage::emulator();
    let began = Instant::now();
    let mut host = host(&stage, PER_REQUEST, "start", STARTS);
    let said = words(&mut host).await;
    host.wait().await.unwrap();
    println!("{said} in {:?}", began.elapsed());
    assert_eq!(stage.pids().len() as u64, STARTS);
    assert_eq!(
        (&said["zombies"], &said["children"]),
        (&json!(0), &json!(0))
    );
    nothing_is_left(&stage).await;
}

#[tokio::test]
#[ignore = "minutes long"]
async fn bug_021_a_host_killed_thirty_times_leaves_nothing() {
    let mut longest = Duration::ZERO;
    for at in 0..DEATHS {
        let row = [WARM, PER_REQUEST][at % 2];
        let stage = Stage::emulator();
        let mut host = host(&stage, row, "wait", 1);
        assert_eq!(words(&mut host).await, json!({"ready": true}));
        host.kill().await.unwrap();
        let died = Instant::now();
        nothing_is_left(&stage).await;
        longest = longest.max(died.elapsed());
    }
    println!("the longest end took {longest:?}");
}

#[tokio::test]
#[ignore = "half a minute long"]
async fn a_control_request_without_an_answer_retires_its_process_after_thirty_seconds() {
    let silent = json!({"steps": [{"answer_controls": [{"subtype": "apply_flag_settings", "ignore": true}]}, "wait_eof"]});
    let stage = Stage::json(json!({"runs": [silent, {"emulator": {}}]}));
    let provider = stage.provider(WARM);
    let heard = hear(provider.generate(ask("x"))).await;
    assert!(heard.failed(ErrorCode::ControlTimeout).is_retryable());
    assert!((29..36).contains(&heard.took.as_secs()), "{:?}", heard.took);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}
