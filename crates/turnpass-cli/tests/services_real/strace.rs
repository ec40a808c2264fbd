//! Who opens, lists or stats a credential file: only the CLI's own process. Shown by the kernel, not said.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::Test;
use super::stage::Stage;

pub(crate) const TESTS: [(&str, Test); 1] = [(
    "strace::only_the_cli_touches_a_credential_file",
    only_the_cli_touches_a_credential_file,
)];

/// Demanded where continuous integration has strace.
const REQUIRE: &str = "TURNPASS_REQUIRE_STRACE";

/// What the sign-in is kept in, by name.
const CREDENTIALS: &str = ".credentials.json";

/// One system call that named a credential file.
#[derive(Debug)]
struct Touch {
    program: String,
    call: String,
}

fn only_the_cli_touches_a_credential_file(stage: &Stage) {
    if Command::new("strace").arg("-V").output().is_err() {
        let said =
            "left out, since strace is not installed: that only the CLI touches a credential file";
        assert!(std::env::var(REQUIRE).as_deref() != Ok("1"), "{said}");
        eprintln!("====\n{said}\n====");
        return;
    }
    for arguments in [
        &["auth", "status"][..],
        &["usage"],
        &["models"],
        &["run", "--usage-gate", "require_off", "[[say hello]]"],
        &[
            "run",
            "--usage-gate",
            "warn",
            "--process",
            "per-request",
            "[[say hello]]",
        ],
        &["doctor"],
        &["demo", "--json"],
    ] {
        let touches = traced(stage, arguments);
        let (by_cli, by_others): (Vec<_>, Vec<_>) = touches
            .into_iter()
            .partition(|touch| Path::new(&touch.program) == stage.claude.canonicalize().unwrap());
        // Doctor and demo make homes of their own up, in folders of ours; those they write and remove, and never read.
        let wrong: Vec<_> = by_others
            .iter()
            .filter(|touch| !is_made_up(stage, &touch.call))
            .collect();
        assert!(wrong.is_empty(), "{arguments:?}: {wrong:#?}");
        assert!(
            !by_cli.is_empty(),
            "{arguments:?}: the CLI opens it, or this shows nothing"
        );
    }
}

fn is_made_up(stage: &Stage, call: &str) -> bool {
    let ours = format!("{}/turnpass-", stage.path("t").display());
    let is_write = call.contains("O_WRONLY|O_CREAT") || call.starts_with("unlink");
    // The second half of a call that another cut in two; its first half, with the flags, is a call of this list too.
    call.contains(&ours) && (is_write || call.starts_with("<... openat resumed>"))
}

fn traced(stage: &Stage, arguments: &[&str]) -> Vec<Touch> {
    let trace = stage.path("trace");
    let mut command = stage.command("strace");
    command
        .args([
            "-f",
            "--seccomp-bpf",
            "-y",
            "-qq",
            "-s",
            "4096",
            "-e",
            "trace=%file,%process",
            "-o",
        ])
        .arg(&trace)
        .arg(env!("CARGO_BIN_EXE_turnpass"))
        .args(arguments);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}");
    let touches = touches(&std::fs::read_to_string(&trace).unwrap());
    std::fs::remove_file(trace).unwrap();
    touches
}

/// Reads a trace: which program each process runs, and which of them named a credential file. A process runs the program
/// of the one that made it until it executes another.
fn touches(trace: &str) -> Vec<Touch> {
    let mut programs: BTreeMap<&str, String> = BTreeMap::new();
    let mut makers: BTreeMap<&str, &str> = BTreeMap::new();
    let mut found = Vec::new();
    for line in trace.lines() {
        let Some((pid, call)) = line.split_once(' ') else {
            continue;
        };
        let call = call.trim_start();
        if let Some(path) = call
            .strip_prefix("execve(\"")
            .filter(|_| !call.contains("= -1"))
        {
            let program = path.split('"').next().unwrap_or_default();
            let program = std::fs::canonicalize(program).unwrap_or_else(|_| program.into());
            programs.insert(pid, program.to_string_lossy().into_owned());
        }
        let makes = [
            "clone(",
            "clone3(",
            "fork(",
            "vfork(",
            "<... clone",
            "<... fork",
            "<... vfork",
        ];
        if makes.iter().any(|make| call.starts_with(make))
            && let Some(child) = call
                .rsplit("= ")
                .next()
                .map(|id| id.split_whitespace().next().unwrap_or_default())
        {
            match programs.get(pid).cloned() {
                Some(program) => {
                    programs.entry(child).or_insert(program);
                }
                // Its maker is as new as it is.
                None => {
                    makers.insert(child, pid);
                }
            }
        }
        if call.contains(CREDENTIALS) {
            found.push((pid, programs.get(pid).cloned(), call.to_owned()));
        }
    }
    // What a new process does can be told before its maker's call is told to have returned; by the end of the trace it has.
    let known = |pid: &str| {
        let mut pid = pid;
        while let (None, Some(maker)) = (programs.get(pid), makers.get(pid)) {
            pid = maker;
        }
        programs.get(pid).cloned().unwrap_or_default()
    };
    found
        .into_iter()
        .map(|(pid, program, call)| Touch {
            program: program.unwrap_or_else(|| known(pid)),
            call,
        })
        .collect()
}
