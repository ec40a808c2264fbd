//! Kept sessions of the program, and what it shows of its pool: the scripted CLI, and an upstream in this process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use turnpass_lab::cli::Script;
use turnpass_lab::upstream::{Options, Recorded, Upstream};

/// Longest wait for something that has to happen.
const WAIT: Duration = Duration::from_secs(40);
/// How often another process is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The model calls a tool that notes that it ran and does not end.
const HANGS: &str =
    r#"[[call shell {"command":"echo ran >> ran.txt; sleep 600"}]] [[then [[say never]]]]"#;

struct Lab {
    upstream: Upstream,
    folder: tempfile::TempDir,
    claude: PathBuf,
}

impl Lab {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["home", "bin", "work"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let program = Path::new(env!("CARGO_BIN_EXE_turnpass"));
        let script = Script::emulator("2.1.332");
        let bin = folder.path().join("bin");
        Self {
            upstream: Upstream::start(Options::default()).unwrap(),
            claude: turnpass_lab::cli::install(&bin, program, &script).unwrap(),
            folder,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_turnpass"));
        command
            .env_clear()
            .env("HOME", self.path("home"))
            .env("PATH", "/usr/bin:/bin")
            .env("TURNPASS_STATE", self.path("state"))
            .env("TURNPASS_CLAUDE_PATH", &self.claude)
            .env("TURNPASS_LAB_UPSTREAM", self.upstream.url())
            .env("TURNPASS_LAB_HOME", self.path("home"))
            .current_dir(self.path("work"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .args(arguments);
        command
    }

    fn ends(&self, arguments: &[&str]) -> Ended {
        Ended::from(self.command(arguments).output().unwrap())
    }

    /// A run that goes on with the session `work`.
    fn run(&self, more: &[&str]) -> Ended {
        self.ends(&[&["run", "--json", "--session", "work"], more].concat())
    }

    /// A run of that session that hangs in a tool.
    fn hangs(&self) -> Running {
        let arguments = ["run", "--allow", "shell", "--session", "work", HANGS];
        let child = self.command(&arguments).spawn().unwrap();
        self.until("the tool runs", || self.path("work/ran.txt").exists());
        Running(child)
    }

    #[track_caller]
    fn until(&self, what: &str, is: impl Fn() -> bool) {
        let end = Instant::now() + WAIT;
        while !is() {
            assert!(Instant::now() < end, "never: {what}");
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn last_request(&self) -> Recorded {
        self.upstream.messages().pop().unwrap()
    }
}

/// A program that is killed at the end of its test at the latest.
struct Running(Child);

impl Running {
    fn kill(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        // It may have ended already.
        let _ = kill_process(pid, Signal::KILL);
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ended {
    #[track_caller]
    fn done(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// How the last request reached the CLI.
    fn how(&self) -> String {
        let mut how = String::new();
        for line in self.out.lines() {
            let event: Value = serde_json::from_str(line).unwrap();
            if event["type"] == "started" {
                how = event["how"]["kind"].as_str().unwrap().to_owned();
            }
        }
        how
    }
}

/// The texts of a request's messages, the CLI's own left out.
fn texts(request: &Recorded) -> Vec<String> {
    let messages = request.field("/messages").unwrap().as_array().unwrap();
    let blocks = messages
        .iter()
        .filter(|message| message["role"] != "system");
    let mut texts = Vec::new();
    for message in blocks {
        match &message["content"] {
            Value::String(text) => texts.push(text.clone()),
            Value::Array(blocks) => texts.extend(blocks.iter().map(|block| {
                let text = block["text"].as_str();
                text.map_or_else(|| block["type"].to_string(), str::to_owned)
            })),
            other => panic!("{other}"),
        }
    }
    texts.retain(|text| !text.starts_with("<system-reminder>"));
    texts
}

#[test]
fn a_kept_session_goes_on_in_the_next_run() {
    let lab = Lab::new();
    let first = lab.run(&["--model", "opus", "[[say one]]"]).done();
    assert_eq!(first.how(), "fresh");
    assert!(!first.err.contains("going on"), "{}", first.err);
    let second = lab.run(&["[[say two]]"]).done();
    assert_eq!(second.how(), "resumed");
    assert!(
        second
            .err
            .contains("going on with the session \"work\": 2 messages so far"),
        "{}",
        second.err
    );
    let request = lab.last_request();
    assert_eq!(texts(&request), ["[[say one]]", "one", "[[say two]]"]);
    let model = request
        .field("/model")
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned();
    assert!(model.contains("opus"), "the session's model stays: {model}");
    // Another transport has no state of its own and goes on all the same.
    lab.run(&["--transport", "relay", "[[say three]]"]).done();
    assert_eq!(texts(&lab.last_request()).len(), 5);
    let fourth = lab.run(&["[[say four]]"]).done();
    assert_eq!(texts(&lab.last_request()).len(), 7);
    assert_eq!(fourth.how(), "reseeded");
    for request in lab.upstream.messages() {
        assert!(request.violations.is_empty(), "{:?}", request.violations);
    }
}

#[test]
fn without_the_flag_nothing_is_kept() {
    let lab = Lab::new();
    lab.ends(&["run", "[[say secret]]"]).done();
    assert!(!lab.path("state/laboratory/sessions").exists());
    lab.run(&["[[say kept]]"]).done();
    assert!(lab.path("state/laboratory/sessions/work.json").exists());
    let nameless = lab
        .command(&["run", "--session", "work", "x"])
        .env_remove("TURNPASS_STATE")
        .output()
        .unwrap();
    let nameless = Ended::from(nameless);
    assert_eq!(nameless.code, Some(2));
    assert!(nameless.err.contains("TURNPASS_STATE"), "{}", nameless.err);
}

#[test]
fn a_killed_run_goes_on_and_no_tool_runs_twice() {
    let lab = Lab::new();
    lab.run(&["[[say one]]"]).done();
    lab.hangs().kill();
    let before = lab.upstream.messages().len();
    let ended = lab.run(&["[[say after]]"]).done();
    assert_eq!(lab.upstream.messages().len(), before + 1);
    assert_eq!(ended.how(), "resumed");
    let request = lab.last_request();
    assert!(request.violations.is_empty(), "{:?}", request.violations);
    let texts = texts(&request);
    assert_eq!(texts[..2], ["[[say one]]", "one"]);
    assert_eq!(texts.last().unwrap(), "[[say after]]");
    let body = String::from_utf8(request.body.to_vec()).unwrap();
    assert!(body.contains("what it did is not known"), "{body}");
    let ran = std::fs::read_to_string(lab.path("work/ran.txt")).unwrap();
    assert_eq!(ran, "ran\n");
}

#[test]
fn a_second_run_of_a_session_is_refused_while_the_first_goes_on() {
    let lab = Lab::new();
    let mut running = lab.hangs();
    let refused = lab.run(&["[[say two]]"]);
    assert_eq!(refused.code, Some(1));
    let said = format!(
        "another run uses the session \"work\" now (process {})",
        running.0.id()
    );
    assert!(refused.err.contains(&said), "{}", refused.err);
    let removed = lab.ends(&["sessions", "remove", "work"]);
    assert_eq!(removed.code, Some(1));
    let listed = lab.ends(&["sessions", "list"]).done();
    assert!(listed.out.contains(", in use\n"), "{}", listed.out);
    lab.ends(&["run", "--session", "play", "[[say other]]"])
        .done();
    running.kill();
    lab.run(&["[[say two]]"]).done();
}

#[test]
fn sessions_are_listed_and_removed() {
    let lab = Lab::new();
    let none = lab.ends(&["sessions", "list"]).done();
    assert!(none.out.starts_with("no session is kept"), "{}", none.out);
    lab.run(&["[[say one]]"]).done();
    let listed = lab.ends(&["sessions", "list", "--json"]).done();
    let listed: Value = serde_json::from_str(&listed.out).unwrap();
    assert_eq!(listed["sessions"][0]["name"], "work");
    assert_eq!(listed["sessions"][0]["messages"], 2);
    assert_eq!(listed["sessions"][0]["in_use"], false);
    lab.ends(&["sessions", "remove", "work"]).done();
    assert_eq!(lab.ends(&["sessions", "remove", "work"]).code, Some(2));
    // A new one of the same name is another conversation.
    let again = lab.run(&["[[say two]]"]).done();
    assert_eq!(again.how(), "fresh");
    assert_eq!(texts(&lab.last_request()), ["[[say two]]"]);
}

#[test]
fn the_pool_of_a_running_program_is_shown() {
    let lab = Lab::new();
    let none = lab.ends(&["pool", "status"]).done();
    assert_eq!(none.out, "no program with a pool runs\n");
    let mut running = lab.hangs();
    let parked = || lab.ends(&["pool", "status"]).done().out;
    lab.until("it waits for the tool", || {
        parked().contains("waits for results of tools")
    });
    let text = parked();
    assert!(
        text.starts_with(&format!(
            "program {}, in the laboratory\n  work-",
            running.0.id()
        )),
        "{text}"
    );
    for part in [
        "    process ",
        " old",
        "1 generation, 2 messages",
        "last: fresh: the conversation begins",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = lab.ends(&["pool", "status", "--json"]).done().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    let program = &json["programs"][0];
    assert_eq!(program["host_pid"], running.0.id());
    let session = &program["sessions"][0];
    assert_eq!(
        (&session["generations"], &session["plan"]),
        (&1.into(), &"fresh".into())
    );
    if cfg!(target_os = "linux") {
        assert!(session["memory_bytes"].as_u64().unwrap() > 1024 * 1024);
    }
    running.kill();
    assert_eq!(
        lab.ends(&["pool", "status"]).done().out,
        "no program with a pool runs\n"
    );
    lab.run(&["[[say well]]"]).done();
    assert_eq!(
        lab.ends(&["pool", "status"]).done().out,
        "no program with a pool runs\n"
    );
    let left = std::fs::read_dir(lab.path("state/laboratory/pool/status")).unwrap();
    assert_eq!(left.count(), 0);
}
