//! The host dies by SIGKILL, so that nothing of ours runs any more: still nothing is left running.

#![cfg(unix)]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use turnpass::process::{ChildGroup, Spawn, StdinMode};

const BOUND: Duration = Duration::from_secs(30);

/// Names a folder with the FIFO to hold and the private directory; set only in the process that plays the host.
const HOST: &str = "TURNPASS_TEST_HOST_FOLDER";

/// Ignores SIGTERM and the end of its input, and so does its child; both hold the FIFO.
const STUBBORN: &str = r#"trap '' TERM HUP INT; exec 9>"$1"
    sh -c 'trap "" TERM HUP INT; echo ready; while :; do sleep 1000; done' &
    while :; do sleep 1000; done"#;

/// Not a test of its own: the other test starts this one in a process that plays the host.
#[test]
fn play_the_host() {
    let Ok(folder) = std::env::var(HOST) else {
        return;
    };
    let fifo = format!("{folder}/life");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut child = ChildGroup::spawn(&Spawn {
            program: "/bin/sh".into(),
            argv: ["-c", STUBBORN, "fake", &fifo].map(Into::into).into(),
            env: vec![("PATH".into(), "/usr/bin:/bin".into())],
            cwd: "/".into(),
            stdin: StdinMode::QUEUE,
            orphaned_dir: Some(format!("{folder}/private").into()),
        })
        .unwrap();
        let mut stdout = tokio::io::BufReader::new(child.take_stdout().unwrap());
        let mut line = String::new();
        tokio::io::AsyncBufReadExt::read_line(&mut stdout, &mut line)
            .await
            .unwrap();
        println!("\nHOST {}", line.trim());
        std::future::pending::<()>().await;
    });
}

#[test]
fn bug_021_a_killed_host_leaves_nothing_running() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("life");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    let private = dir.path().join("private");
    std::fs::create_dir(&private).unwrap();
    std::fs::write(private.join("settings.json"), "{}").unwrap();
    // A blocking open for reading ends when the fake program opens the FIFO for writing; the read ends when every
    // process that did so is gone.
    let (done, ended) = mpsc::channel();
    let path = fifo.clone();
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let read = std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut rest));
        let _ = done.send(read.is_ok());
    });

    let mut host = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "play_the_host", "--nocapture"])
        .env(HOST, dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(host.stdout.take().unwrap()).lines();
    let ready = lines.map_while(Result::ok).any(|line| line == "HOST ready");
    assert!(ready, "the host did not get as far as a running child");
    assert!(private.exists());
    host.kill().unwrap();
    assert_eq!(host.wait().unwrap().signal(), Some(9));
    assert_eq!(ended.recv_timeout(BOUND), Ok(true));
    assert!(!private.exists());
    assert!(fifo.exists(), "nothing else is removed");
}
