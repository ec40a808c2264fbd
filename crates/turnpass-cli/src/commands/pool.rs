//! `turnpass pool status`: the live processes of running programs, and why each was used as it was.

use jiff::Timestamp;
use serde::Serialize;
use turnpass::event::PlanKind;
use turnpass::pool::status::{self, PoolStatus, Shown};

use crate::context::{STATE_VARIABLE, laboratory_dir, state_dir};
use crate::exit::{Exit, Fault};
use crate::show::span;
use crate::terminal::visible;

/// Characters of a key in the text; `--json` has all of them.
const KEY_CHARS: usize = 40;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Show keys, processes and what was done last
    Status(Status),
}

#[derive(clap::Args, Debug)]
struct Status {
    /// Print one JSON object in place of text
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn wants_json(&self) -> bool {
        let What::Status(status) = &self.what;
        status.json
    }
}

/// A program with a pool.
#[derive(Debug, Serialize)]
struct Program {
    host_pid: u32,
    laboratory: bool,
    sessions: Vec<Session>,
}

/// A live process.
#[derive(Debug, Serialize)]
struct Session {
    #[serde(flatten)]
    shown: Shown,
    age_s: i64,
    /// Resident memory; not told on every system, and not of a process that is gone.
    memory_bytes: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<Exit, Fault> {
    let What::Status(args) = args.what;
    let state = state_dir().ok_or_else(|| {
        Fault::usage(
            "there is no home folder",
            format!("Set HOME, or name a folder with {STATE_VARIABLE}."),
        )
    })?;
    let now = Timestamp::now().as_second();
    let mut programs = told(status::read(&state), false, now);
    if let Some(laboratory) = laboratory_dir() {
        programs.extend(told(status::read(&laboratory), true, now));
    }
    super::print(&match args.json {
        true => format!("{}\n", serde_json::json!({ "programs": programs })),
        false => text(&programs),
    })
}

fn told(read: Vec<PoolStatus>, laboratory: bool, now: i64) -> Vec<Program> {
    let session = |shown: Shown| Session {
        age_s: now.saturating_sub(shown.started_unix_s).max(0),
        memory_bytes: resident_bytes(shown.pid),
        shown,
    };
    read.into_iter()
        .map(|status| Program {
            host_pid: status.host_pid,
            laboratory,
            sessions: status.sessions.into_iter().map(session).collect(),
        })
        .collect()
}

/// The resident memory of a process, where the system shows it in /proc.
fn resident_bytes(pid: u32) -> Option<u64> {
    resident(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn resident(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

fn text(programs: &[Program]) -> String {
    if programs.is_empty() {
        return "no program with a pool runs\n".to_owned();
    }
    let mut text = String::new();
    for program in programs {
        let laboratory = if program.laboratory {
            ", in the laboratory"
        } else {
            ""
        };
        text += &format!("program {}{laboratory}\n", program.host_pid);
        for session in &program.sessions {
            let shown = &session.shown;
            let key: String = shown.key.chars().take(KEY_CHARS).collect();
            let state = match (shown.running, shown.parked) {
                (true, _) => "answers",
                (_, true) => "waits for results of tools",
                _ => "idle",
            };
            let memory = match session.memory_bytes {
                Some(bytes) => format!(", {} MiB", bytes / 1024 / 1024),
                None => String::new(),
            };
            text += &format!(
                "  {}\n    process {}, {} old{memory}, {}, {}, {state}\n    last: {}: {}\n",
                visible(&key),
                shown.pid,
                span(session.age_s),
                counted(shown.generations as usize, "generation"),
                counted(shown.messages, "message"),
                word(shown.plan),
                visible(&shown.reason),
            );
        }
    }
    text
}

/// The word of events and of `--json`.
fn word(plan: PlanKind) -> String {
    let word = serde_json::to_value(plan).unwrap_or_default();
    word.as_str().unwrap_or_default().to_owned()
}

fn counted(number: usize, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(extra: &str) -> Program {
        let status = format!(
            r#"{{"host_pid":7,"sessions":[{{"key":"work","pid":4194305,"started_unix_s":940,"generations":1,
            "parked":true,"messages":3,"plan":"resumed","reason":"the stored\u001b[31m one"{extra}}}]}}"#
        );
        let status = serde_json::from_str(&status).unwrap();
        told(vec![status], false, 1000).remove(0)
    }

    #[test]
    fn a_process_is_told_with_what_was_done_last() {
        let text = text(&[program("")]);
        assert_eq!(
            text,
            "program 7\n  work\n    process 4194305, 1 min old, 1 generation, 3 messages, waits for results of tools\n    \
             last: resumed: the stored␛[31m one\n"
        );
        assert!(super::text(&[program(r#","running":true"#)]).contains(", answers\n"));
        assert_eq!(super::text(&[]), "no program with a pool runs\n");
    }

    #[test]
    fn the_object_has_the_same() {
        let object = serde_json::to_value(program("")).unwrap();
        assert_eq!(object["host_pid"], 7);
        let session = &object["sessions"][0];
        assert_eq!(session["key"], "work");
        assert_eq!(session["age_s"], 60);
        assert_eq!(session["plan"], "resumed");
        assert!(session["memory_bytes"].is_null(), "it is gone");
    }

    #[test]
    fn memory_is_read_as_linux_tells_it() {
        assert_eq!(
            resident("Name:\tclaude\nVmRSS:\t  204800 kB\nRssAnon: 1 kB\n"),
            Some(204_800 * 1024)
        );
        assert_eq!(resident("Name:\tz\n"), None);
        if cfg!(target_os = "linux") {
            assert!(resident_bytes(std::process::id()).unwrap() > 1024 * 1024);
        }
    }
}
