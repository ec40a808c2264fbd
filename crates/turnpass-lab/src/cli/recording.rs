//! What a run of the scripted CLI writes down about itself, and how a test reads it back.
//!
//! In the directory that the script names as `record` each run leaves `run-PID.json` (argv, environment,
//! working directory, process group) and `run-PID.log`, one JSON object a line, appended as things
//! happen: `{"t": ms, "what": "stdin" | "eof" | "signal" | "grandchild" | "mismatch" | ..., ...}`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// A line longer than this is kept in the log by its beginning; `bytes` still says its length.
pub const RECORDED_LINE_BYTES: usize = 1024 * 1024;

/// How often [`Recording::wait_for`] looks again: another process writes the files and tells nobody.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Writes a recording; does nothing when the script names no directory.
pub(crate) struct Recorder {
    log: Option<Mutex<File>>,
    started: Instant,
}

impl Recorder {
    pub(crate) fn open(dir: Option<&Path>, argv: &[String]) -> io::Result<Recorder> {
        let started = Instant::now();
        let Some(dir) = dir else {
            return Ok(Recorder { log: None, started });
        };
        std::fs::create_dir_all(dir)?;
        let pid = std::process::id();
        let environment: BTreeMap<String, String> = std::env::vars_os()
            .map(|(name, value)| {
                (
                    name.to_string_lossy().into_owned(),
                    value.to_string_lossy().into_owned(),
                )
            })
            .collect();
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let about = json!({
            "pid": pid,
            "group": rustix::process::getpgrp().as_raw_nonzero().get(),
            "started_unix_ms": u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            "argv": argv,
            "environment": environment,
            "cwd": std::env::current_dir().unwrap_or_default(),
        });
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(dir.join(format!("run-{pid}.log")))?;
        // Written under another name first, so that a reader never sees half of it.
        let draft = dir.join(format!(".run-{pid}.json"));
        std::fs::write(&draft, about.to_string())?;
        std::fs::rename(draft, dir.join(format!("run-{pid}.json")))?;
        Ok(Recorder {
            log: Some(Mutex::new(log)),
            started,
        })
    }

    /// Appends one entry; a full disk must not change what the run does.
    pub(crate) fn note(&self, what: &str, detail: Value) {
        let Some(log) = &self.log else { return };
        let mut row = json!({"t": self.started.elapsed().as_secs_f64() * 1000.0, "what": what});
        if let (Some(row), Value::Object(detail)) = (row.as_object_mut(), detail) {
            row.extend(detail);
        }
        let mut file = log.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = file.write_all(format!("{row}\n").as_bytes());
    }

    /// Notes a line of stdin exactly: its text, its length, and whether it ended in `\r`.
    pub(crate) fn stdin(&self, line: &[u8]) {
        if self.log.is_none() {
            return;
        }
        let kept = &line[..line.len().min(RECORDED_LINE_BYTES)];
        self.note(
            "stdin",
            json!({
                "bytes": line.len(),
                "carriage_return": line.ends_with(b"\r"),
                "line": String::from_utf8_lossy(kept),
            }),
        );
    }

    pub(crate) fn exit(&self, code: u8) {
        self.note("exit", json!({"code": code}));
    }
}

/// All runs that wrote into one directory.
#[derive(Debug, Clone, Default)]
pub struct Recording {
    /// In the order in which they were started.
    pub runs: Vec<RecordedRun>,
}

/// One run.
#[derive(Debug, Clone, Default)]
pub struct RecordedRun {
    /// Its process id.
    pub pid: i32,
    /// Its process group.
    pub group: i32,
    /// What it was called with, without the name of the program.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub environment: BTreeMap<String, String>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// The lines of stdin that it read.
    pub stdin: Vec<RecordedLine>,
    /// Signals that it caught, by name, in order.
    pub signals: Vec<String>,
    /// Processes that it started by `grandchild`.
    pub grandchildren: Vec<i32>,
    /// What an expectation saw instead.
    pub mismatch: Option<String>,
    /// It saw the end of its input.
    pub saw_end_of_input: bool,
    /// The code it ended with, if it ended by itself.
    pub exit: Option<i64>,
    /// Every entry of the log, for what has no field here.
    pub log: Vec<Value>,
    started_unix_ms: u64,
}

/// One line of stdin.
#[derive(Debug, Clone, Default)]
pub struct RecordedLine {
    /// Milliseconds since the run began.
    pub at_ms: f64,
    /// Without the line feed; cut at [`RECORDED_LINE_BYTES`].
    pub text: String,
    /// Its whole length without the line feed.
    pub bytes: usize,
    /// It ended in a carriage return.
    pub carriage_return: bool,
}

impl RecordedLine {
    /// The line as JSON; null when it is not.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or(Value::Null)
    }
}

impl RecordedRun {
    /// The value of an argument given as `--name value`.
    pub fn flag(&self, name: &str) -> Option<&str> {
        let at = self.argv.iter().position(|arg| arg == name)?;
        self.argv.get(at + 1).map(String::as_str)
    }

    /// The log entries of one kind.
    pub fn notes<'a>(&'a self, what: &'a str) -> impl Iterator<Item = &'a Value> {
        self.log.iter().filter(move |row| row["what"] == what)
    }

    fn read(dir: &Path, about: &Value) -> RecordedRun {
        let pid = about["pid"].as_i64().unwrap_or_default();
        let log = std::fs::read_to_string(dir.join(format!("run-{pid}.log"))).unwrap_or_default();
        let number =
            |value: &Value| i32::try_from(value.as_i64().unwrap_or_default()).unwrap_or_default();
        let mut run = RecordedRun {
            pid: number(&about["pid"]),
            group: number(&about["group"]),
            argv: serde_json::from_value(about["argv"].clone()).unwrap_or_default(),
            environment: serde_json::from_value(about["environment"].clone()).unwrap_or_default(),
            cwd: PathBuf::from(about["cwd"].as_str().unwrap_or_default()),
            started_unix_ms: about["started_unix_ms"].as_u64().unwrap_or_default(),
            ..RecordedRun::default()
        };
        for line in log.lines() {
            let Ok(row) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            match row["what"].as_str().unwrap_or_default() {
                "stdin" => run.stdin.push(RecordedLine {
                    at_ms: row["t"].as_f64().unwrap_or_default(),
                    text: text("line"),
                    bytes: usize::try_from(row["bytes"].as_u64().unwrap_or_default())
                        .unwrap_or_default(),
                    carriage_return: row["carriage_return"] == true,
                }),
                "signal" => run.signals.push(text("name")),
                "grandchild" => run.grandchildren.push(number(&row["pid"])),
                "mismatch" => run.mismatch = Some(text("message")),
                "eof" => run.saw_end_of_input = true,
                "exit" => run.exit = row["code"].as_i64(),
                _ => {}
            }
            run.log.push(row);
        }
        run
    }
}

impl Recording {
    /// Reads what is there now; a directory that does not exist yet has no runs.
    pub fn read(dir: &Path) -> Recording {
        let mut runs = Vec::new();
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with("run-") || !name.ends_with(".json") {
                continue;
            }
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            if let Ok(about) = serde_json::from_str::<Value>(&text) {
                runs.push(RecordedRun::read(dir, &about));
            }
        }
        runs.sort_by_key(|run| (run.started_unix_ms, run.pid));
        Recording { runs }
    }

    /// Reads again until `ready` says so, or `bound` is over; then returns what is there.
    ///
    /// Blocks the thread; in async code call it where blocking is allowed.
    pub fn wait_for(dir: &Path, bound: Duration, ready: impl Fn(&Recording) -> bool) -> Recording {
        let end = Instant::now() + bound;
        loop {
            let recording = Recording::read(dir);
            if ready(&recording) || Instant::now() >= end {
                return recording;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// The only run; a test that started one process says so with this.
    pub fn only(&self) -> Option<&RecordedRun> {
        match self.runs.as_slice() {
            [one] => Some(one),
            _ => None,
        }
    }
}
