use std::time::Instant;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::time::timeout;

use super::*;
use crate::process::{SESSION_CLOSE_LIMIT, STDERR_TAIL_BYTES, StdinError};

/// Longest wait of a test for something that has to happen; generous for a machine under load.
const BOUND: Duration = Duration::from_secs(30);

fn sh(script: &str, args: &[&str]) -> Spawn {
    let mut argv: Vec<OsString> = ["-c", script, "fake"].map(Into::into).into();
    argv.extend(args.iter().map(OsString::from));
    Spawn {
        program: "/bin/sh".into(),
        argv,
        env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())],
        cwd: "/".into(),
        stdin: StdinMode::QUEUE,
        orphaned_dir: None,
    }
}

async fn bounded<T>(future: impl Future<Output = T>) -> T {
    timeout(BOUND, future)
        .await
        .expect("it has to happen in time")
}

async fn first_line(stdout: Stdout) -> (String, BufReader<Stdout>) {
    let mut reader = BufReader::new(stdout);
    let mut line = String::new();
    bounded(reader.read_line(&mut line)).await.unwrap();
    (line, reader)
}

/// A FIFO that reads as ended exactly when every process that opened it for writing is gone.
struct Life {
    _dir: tempfile::TempDir,
    path: String,
    receiver: pipe::Receiver,
}

impl Life {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("life").to_str().unwrap().to_owned();
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let receiver = pipe::OpenOptions::new().open_receiver(&path).unwrap();
        Self {
            _dir: dir,
            path,
            receiver,
        }
    }

    /// Only after a process has said that it opened the FIFO.
    async fn ended(mut self) {
        let mut rest = Vec::new();
        bounded(self.receiver.read_to_end(&mut rest)).await.unwrap();
    }
}

/// A leader and a grandchild that both ignore SIGTERM and hold the FIFO in `$1`.
const STUBBORN: &str = r#"trap '' TERM HUP INT; exec 9>"$1"
    sh -c 'trap "" TERM HUP INT; echo ready; while :; do sleep 1000; done' &
    while :; do sleep 1000; done"#;

fn is_gone(pid: u32) -> bool {
    let pid = Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}

#[tokio::test]
async fn it_is_the_leader_of_its_own_group() {
    let mut child = ChildGroup::spawn(&sh("echo $$; ps -o pgid= -p $$; read _", &[])).unwrap();
    let (line, mut rest) = first_line(child.take_stdout().unwrap()).await;
    assert_eq!(line.trim(), child.pid().to_string());
    let mut group = String::new();
    bounded(rest.read_line(&mut group)).await.unwrap();
    assert_eq!(group.trim(), child.pid().to_string());
    assert_eq!(
        bounded(child.end(EndPolicy::SESSION)).await.unwrap(),
        Exit::Code(1)
    );
}

#[tokio::test]
async fn exit_codes_and_signals_are_told_apart() {
    for (script, wanted) in [
        ("exit 0", Exit::Code(0)),
        ("exit 1", Exit::Code(1)),
        ("exit 143", Exit::Code(143)),
        ("kill -TERM $$", Exit::Signal(15)),
    ] {
        let child = ChildGroup::spawn(&sh(script, &[])).unwrap();
        assert_eq!(bounded(child.wait()).await, wanted, "{script}");
        assert_eq!(child.exit(), Some(wanted));
        assert_eq!(bounded(child.end(EndPolicy::KILL)).await.unwrap(), wanted);
    }
}

#[tokio::test]
async fn bug_015_a_flood_on_stderr_blocks_nothing() {
    for newline in ["\\n", ""] {
        let script = format!(
            "i=0; while [ $i -lt 200 ]; do printf '%01000d{newline}' $i >&2; i=$((i+1)); done; echo done"
        );
        let mut child = ChildGroup::spawn(&sh(&script, &[])).unwrap();
        let (line, _rest) = first_line(child.take_stdout().unwrap()).await;
        assert_eq!(line, "done\n");
        bounded(child.wait()).await;
        let tail = bounded(async {
            loop {
                // The drain may lag behind the exit; each turn of the loop gives it the processor.
                let tail = child.stderr_tail();
                if tail.trim_end().ends_with("199") {
                    break tail;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
        assert!(tail.len() <= STDERR_TAIL_BYTES);
    }
}

#[tokio::test]
async fn bug_016_big_input_and_big_output_at_once() {
    const INPUT: usize = 8 * 1024 * 1024;
    const OUTPUT: usize = 1024 * 1024;
    let script = format!("head -c {OUTPUT} /dev/zero; wc -c");
    let mut child = ChildGroup::spawn(&sh(&script, &[])).unwrap();
    child.stdin().write(vec![b'x'; INPUT]).unwrap();
    child.stdin().close();
    let mut all = Vec::new();
    bounded(child.take_stdout().unwrap().read_to_end(&mut all))
        .await
        .unwrap();
    let count = String::from_utf8(all.split_off(OUTPUT)).unwrap();
    assert_eq!(count.trim(), INPUT.to_string());
    assert!(all.iter().all(|byte| *byte == 0));
}

#[tokio::test]
async fn bug_016_a_program_that_never_reads_blocks_nobody() {
    const LIMIT: usize = 1024 * 1024;
    let mut spawn = sh("echo ready; while :; do sleep 1000; done", &[]);
    spawn.stdin = StdinMode::Queue { limit_bytes: LIMIT };
    let mut child = ChildGroup::spawn(&spawn).unwrap();
    let _held = first_line(child.take_stdout().unwrap()).await;
    let stdin = child.stdin().clone();
    stdin.write(vec![b'x'; LIMIT - 1]).unwrap();
    let full = StdinError::Full {
        pending: LIMIT - 1,
        asked: 2,
        limit: LIMIT,
    };
    assert_eq!(stdin.write("xx"), Err(full));
    assert_eq!(Error::from(full).code(), ErrorCode::ControlTimeout);
    let exit = bounded(child.end(EndPolicy::CANCEL)).await.unwrap();
    assert_eq!(exit, Exit::Signal(15));
    bounded(stdin.drained()).await;
    assert_eq!(stdin.write("x"), Err(StdinError::Closed));
}

#[tokio::test]
async fn bug_010_bytes_arrive_in_order_and_as_they_are() {
    let mut child = ChildGroup::spawn(&sh("cat", &[])).unwrap();
    let mut wanted = Vec::<u8>::new();
    for index in 0..500 {
        let line = format!("{{\"n\":{index}}}\n");
        wanted.extend(line.as_bytes());
        child.stdin().write(line).unwrap();
    }
    child.stdin().close();
    assert_eq!(child.stdin().write("late"), Err(StdinError::Closed));
    let mut all = Vec::new();
    bounded(child.take_stdout().unwrap().read_to_end(&mut all))
        .await
        .unwrap();
    assert_eq!(all, wanted);
    assert_eq!(bounded(child.wait()).await, Exit::Code(0));
}

#[tokio::test]
async fn bug_002_much_output_in_small_lines_passes_whole() {
    let script = "line=$(printf '%02047d' 7); yes $line | head -n 20000";
    let mut child = ChildGroup::spawn(&sh(script, &[])).unwrap();
    let mut stdout = child.take_stdout().unwrap();
    let (mut total, mut chunk) = (0, vec![0; 64 * 1024]);
    loop {
        match bounded(stdout.read(&mut chunk)).await.unwrap() {
            0 => break,
            count => total += count,
        }
    }
    assert_eq!(total, 20_000 * 2048);
}

#[tokio::test]
async fn bug_018_an_answer_is_there_before_a_program_that_will_not_end() {
    let life = Life::new();
    let mut child = ChildGroup::spawn(&sh(STUBBORN, &[&life.path])).unwrap();
    let (line, _held) = first_line(child.take_stdout().unwrap()).await;
    assert_eq!(line, "ready\n");
    let begun = Instant::now();
    let exit = bounded(child.end(EndPolicy::CANCEL)).await.unwrap();
    assert_eq!(exit, Exit::Signal(9));
    assert!(begun.elapsed() >= EndPolicy::CANCEL.after_terminate);
    assert!(begun.elapsed() < SESSION_CLOSE_LIMIT);
    life.ended().await;
}

#[tokio::test]
async fn bug_021_dropping_it_ends_the_whole_group() {
    let life = Life::new();
    let mut child = ChildGroup::spawn(&sh(STUBBORN, &[&life.path])).unwrap();
    let _held = first_line(child.take_stdout().unwrap()).await;
    drop(child);
    life.ended().await;
}

#[tokio::test]
async fn bug_021_dropping_the_end_ends_the_whole_group() {
    let life = Life::new();
    let mut child = ChildGroup::spawn(&sh(STUBBORN, &[&life.path])).unwrap();
    let _held = first_line(child.take_stdout().unwrap()).await;
    let end = child.end(EndPolicy::SESSION);
    assert!(timeout(Duration::from_millis(1), end).await.is_err());
    life.ended().await;
}

#[tokio::test]
async fn bug_021_a_grandchild_does_not_outlive_its_leader() {
    let life = Life::new();
    let script = r#"exec 9>"$1"; sh -c 'trap "" TERM HUP INT; while :; do sleep 1000; done' & echo ready; read _; exit 3"#;
    let mut child = ChildGroup::spawn(&sh(script, &[&life.path])).unwrap();
    let (_, mut rest) = first_line(child.take_stdout().unwrap()).await;
    child.stdin().close();
    assert_eq!(bounded(child.wait()).await, Exit::Code(3));
    life.ended().await;
    // The grandchild held standard output too; its end has come all the same.
    assert_eq!(bounded(rest.read(&mut [0; 8])).await.unwrap(), 0);
}

#[test]
fn bug_021_the_end_of_the_runtime_ends_the_whole_group() {
    let inner = tokio::runtime::Runtime::new().unwrap();
    let outer = tokio::runtime::Runtime::new().unwrap();
    let life = outer.block_on(async { Life::new() });
    let child = inner.block_on(async {
        let mut child = ChildGroup::spawn(&sh(STUBBORN, &[&life.path])).unwrap();
        let _held = first_line(child.take_stdout().unwrap()).await;
        child
    });
    drop(inner);
    outer.block_on(life.ended());
    drop(child);
}

#[tokio::test]
async fn bug_021_no_zombies_after_200_processes() {
    let mut pids = Vec::new();
    for index in 0..200 {
        let script = if index % 2 == 0 {
            "exit 0"
        } else {
            "sleep 1000"
        };
        let child = ChildGroup::spawn(&sh(script, &[])).unwrap();
        pids.push(child.pid());
        if index % 4 < 2 {
            bounded(child.end(EndPolicy::KILL)).await.unwrap();
        }
    }
    bounded(async {
        while !pids.iter().all(|pid| is_gone(*pid)) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn output_ends_although_a_stranger_holds_the_pipe() {
    // `setsid` leaves the group, so only closing the pipe on our side helps. The stranger ends when it is told to.
    let (life, wake) = (Life::new(), Life::new());
    let script = r#"setsid sh -c 'exec 9>"$1"; echo ready; read _ <"$2"' x "$1" "$2" & read _"#;
    let spawn = sh(script, &[&life.path, &wake.path]);
    let wake = {
        let Life {
            _dir,
            path,
            receiver,
        } = wake;
        drop(receiver);
        (path, _dir)
    };
    let mut child = ChildGroup::spawn(&spawn).unwrap();
    let (_, mut rest) = first_line(child.take_stdout().unwrap()).await;
    bounded(child.end(EndPolicy::KILL)).await.unwrap();
    let begun = Instant::now();
    assert_eq!(bounded(rest.read(&mut [0; 8])).await.unwrap(), 0);
    assert!(begun.elapsed() < PIPE_DRAIN_LIMIT * 10);
    let path = wake.0.clone();
    let told = tokio::task::spawn_blocking(move || std::fs::write(path, "end\n"));
    bounded(told).await.unwrap().unwrap();
    life.ended().await;
}

#[tokio::test]
async fn a_polite_end_lets_the_program_finish() {
    let mut child = ChildGroup::spawn(&sh("cat; echo bye", &[])).unwrap();
    child.stdin().write("one\n").unwrap();
    let (_, mut rest) = first_line(child.take_stdout().unwrap()).await;
    assert_eq!(
        bounded(child.end(EndPolicy::SESSION)).await.unwrap(),
        Exit::Code(0)
    );
    let mut bye = String::new();
    bounded(rest.read_to_string(&mut bye)).await.unwrap();
    assert_eq!(bye, "bye\n");
}

#[tokio::test]
async fn a_program_without_input_sees_its_end_at_once() {
    let mut spawn = sh("cat; echo done", &[]);
    spawn.stdin = StdinMode::Null;
    let mut child = ChildGroup::spawn(&spawn).unwrap();
    assert_eq!(first_line(child.take_stdout().unwrap()).await.0, "done\n");
    assert_eq!(child.stdin().write("x"), Err(StdinError::Closed));
}

#[tokio::test]
async fn nothing_is_inherited_but_what_is_listed() {
    let mut spawn = sh("env | sort", &[]);
    spawn.env.push(("ONE".into(), "1".into()));
    let mut child = ChildGroup::spawn(&spawn).unwrap();
    let mut all = String::new();
    bounded(child.take_stdout().unwrap().read_to_string(&mut all))
        .await
        .unwrap();
    let own = ["_=", "PWD=", "SHLVL=", "OLDPWD="];
    let names: Vec<_> = all
        .lines()
        .filter(|line| !own.iter().any(|own| line.starts_with(own)))
        .collect();
    assert_eq!(names, ["ONE=1", "PATH=/usr/local/bin:/usr/bin:/bin"]);
}

fn code_of(spawn: &Spawn) -> ErrorCode {
    ChildGroup::spawn(spawn).map(|_| ()).unwrap_err().code()
}

#[tokio::test]
async fn bug_025_what_cannot_run_says_so() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str, mode: u32| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let mut spawn = sh("", &[]);
    for (program, wanted) in [
        (dir.path().join("absent"), ErrorCode::ExecutableMissing),
        (dir.path().to_owned(), ErrorCode::ExecutableUnusable),
        (
            file("plain", "#!/bin/sh\n", 0o600),
            ErrorCode::ExecutableUnusable,
        ),
        (
            file("script", "#!/no/such/node\n", 0o700),
            ErrorCode::ExecutableUnusable,
        ),
        (
            file("binary", "\u{7f}ELF and nothing else", 0o700),
            ErrorCode::ExecutableUnusable,
        ),
    ] {
        spawn.program = program;
        assert_eq!(code_of(&spawn), wanted, "{}", spawn.program.display());
    }
    let mut spawn = sh("", &[]);
    spawn.cwd = dir.path().join("absent");
    assert_eq!(code_of(&spawn), ErrorCode::WorkingDirectory);
}

#[tokio::test]
async fn bug_027_too_long_arguments_have_their_own_words() {
    let spawn = sh("", &[&"x".repeat(4 * 1024 * 1024)]);
    let error = ChildGroup::spawn(&spawn).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LaunchFailed);
    assert!(error.detail().contains("too long"), "{error}");
}

#[tokio::test]
async fn bug_028_a_nul_byte_is_refused_before_any_start() {
    let with = |change: fn(&mut Spawn)| {
        let mut spawn = sh("", &[]);
        change(&mut spawn);
        let error = ChildGroup::spawn(&spawn).map(|_| ()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RequestInvalid);
        error.detail().to_owned()
    };
    assert_eq!(
        with(|s| s.argv[1] = "a\0b".into()),
        "argument 2 contains a NUL byte"
    );
    assert_eq!(
        with(|s| s.cwd = "/\0".into()),
        "the working directory contains a NUL byte"
    );
    assert_eq!(
        with(|s| s.program = "/\0".into()),
        "the program's path contains a NUL byte"
    );
    let variable = with(|s| s.env.push(("A".into(), "\0".into())));
    assert_eq!(variable, "the variable \"A\" contains a NUL byte");
}

#[test]
fn values_of_the_environment_are_not_printed() {
    let mut spawn = sh("", &[]);
    spawn.env.push(("NAME".into(), "marker".into()));
    let printed = format!("{spawn:?}");
    assert!(printed.contains("NAME") && !printed.contains("marker"));
}
