//! Whole runs of the program: the scripted CLI, the relay, and an upstream in this process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use turnpass_lab::cli::Script;
use turnpass_lab::upstream::{Options, Upstream};

/// Longest wait for something that has to happen.
const WAIT: Duration = Duration::from_secs(30);

struct Lab {
    upstream: Upstream,
    folder: tempfile::TempDir,
    claude: PathBuf,
}

impl Lab {
    fn new() -> Self {
        Self::with(&Script::emulator("2.1.332"))
    }

    fn with(script: &Script) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["home", "bin", "work"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let program = Path::new(env!("CARGO_BIN_EXE_turnpass"));
        let bin = folder.path().join("bin");
        Self {
            upstream: Upstream::start(Options::default()).unwrap(),
            claude: turnpass_lab::cli::install(&bin, program, script).unwrap(),
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
            .env("TURNPASS_TRANSPORT", "relay")
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

    fn run(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(&["run"]);
        Ended::from(command.args(arguments).output().unwrap())
    }
}

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
    fn lines(&self) -> Vec<Value> {
        let lines = self.out.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

const WRITE: &str = r#"[[call write {"path":"f","content":"made"}]] [[then [[say done]]]]"#;

#[test]
fn the_answer_is_on_standard_output_and_the_rest_beside_it() {
    let lab = Lab::new();
    std::fs::write(lab.path("work/notes"), "12345").unwrap();
    let ended =
        lab.run(&[r#"[[say looking]] [[call read {"path":"notes"}]] [[then [[say found]]]]"#]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(ended.out, "lookingfound\n");
    for part in [
        "laboratory: nothing reaches the service",
        "→ read notes\n← read: 5 bytes",
        "[completed] 2 generations, 1 tool calls",
        ", laboratory\n",
    ] {
        assert!(ended.err.contains(part), "{part}: {}", ended.err);
    }
    assert_eq!(lab.upstream.messages().len(), 2, "one request a generation");
}

#[test]
fn json_lines_tell_the_same() {
    let lab = Lab::new();
    let ended = lab.run(&["--json", "[[say hello]]"]);
    let lines = ended.lines();
    assert_eq!(lines[0]["type"], "round");
    let last = lines.last().unwrap();
    assert_eq!(last["type"], "ended");
    assert_eq!(last["outcome"], "completed");
    assert_eq!(last["laboratory"], true);
    let text: String = lines
        .iter()
        .filter(|line| line["type"] == "text")
        .map(|line| line["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "hello");
}

#[test]
fn without_a_terminal_a_run_is_read_only_unless_allowed() {
    let lab = Lab::new();
    let ended = lab.run(&[WRITE]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(
        ended.err.contains("← write: denied: this run is read-only"),
        "{}",
        ended.err
    );
    assert!(!lab.path("work/f").exists());
    let ended = lab.run(&["--allow", "write", WRITE]);
    assert_eq!(
        std::fs::read_to_string(lab.path("work/f")).unwrap(),
        "made",
        "{}",
        ended.err
    );
    let ended = lab.run(&["--allow", "write", "--deny", "write", WRITE]);
    assert!(
        ended.err.contains("denied: the tool write is not allowed"),
        "{}",
        ended.err
    );
}

#[test]
fn outcomes_have_their_exit_codes() {
    for (prompt, arguments, code, said) in [
        (
            "[[call list {}]] [[then [[say x]]]]",
            &["--max-rounds", "1"][..],
            7,
            "[round_limit]",
        ),
        ("[[say no]] [[stop refusal]]", &[], 7, "[refused]"),
        ("[[say long]] [[stop max_tokens]]", &[], 7, "[max_tokens]"),
        ("[[status 400 {}]]", &[], 1, "[failed]"),
    ] {
        let lab = Lab::new();
        let ended = lab.run(&[arguments, &[prompt]].concat());
        assert_eq!(ended.code, Some(code), "{prompt}: {}", ended.err);
        assert!(ended.err.contains(said), "{prompt}: {}", ended.err);
    }
}

#[test]
fn a_cli_that_cannot_be_used_has_its_exit_code() {
    let lab = Lab::new();
    let ended = lab.run(&["--claude-path", "/nowhere/claude", "x"]);
    assert_eq!(ended.code, Some(3), "{}", ended.err);
    assert!(ended.err.contains("[executable_missing]"));
    let old = Lab::with(&Script::emulator("2.1.100"));
    let ended = old.run(&["x"]);
    assert_eq!(ended.code, Some(4), "{}", ended.err);
    assert!(ended.err.contains("[version_too_old]") && ended.err.contains("claude update"));
    assert!(old.upstream.requests().is_empty());
}

#[test]
fn logs_hold_no_prompt_and_no_answer() {
    let lab = Lab::new();
    let prompt = "MARKER-PROMPT [[say MARKER-ANSWER]]";
    let mut command = lab.command(&["-vv", "run", prompt]);
    let ended = Ended::from(command.output().unwrap());
    assert_eq!(ended.out, "MARKER-ANSWER\n");
    assert!(!ended.err.contains("MARKER"), "{}", ended.err);
}

fn doctor(lab: &Lab, arguments: &[&str]) -> Ended {
    let mut command = lab.command(&["doctor"]);
    // The person's own machine: no laboratory but the doctor's.
    command
        .env_remove("TURNPASS_LAB_UPSTREAM")
        .env_remove("TURNPASS_LAB_HOME");
    Ended::from(command.args(arguments).output().unwrap())
}

#[test]
fn the_doctor_finds_a_healthy_cli_healthy() {
    let lab = Lab::new();
    let ended = doctor(&lab, &[]);
    assert_eq!(ended.code, Some(0), "{}{}", ended.out, ended.err);
    for line in [
        "ok   version        2.1.332",
        "ok   sign-in        claude.ai",
        "ok   tool server    hand-shake done, 6 tools listed",
        "ok   isolation      a laboratory generation over the pool transport: 1 upstream request",
    ] {
        assert!(ended.out.contains(line), "{line}: {}", ended.out);
    }
    assert!(ended.out.contains("found by TURNPASS_CLAUDE_PATH"));
    assert!(lab.upstream.requests().is_empty(), "nothing is asked");

    let ended = doctor(&lab, &["--json"]);
    let [report] = ended.lines().try_into().unwrap();
    let report: Value = report;
    assert_eq!(report["ok"], true);
    let checks = report["checks"].as_array().unwrap();
    assert!(
        checks.iter().all(|check| check["state"] == "ok"),
        "{report}"
    );
}

#[test]
fn the_doctor_names_what_is_wrong_and_the_next_step() {
    let mut signed_out = Script::emulator("2.1.332");
    signed_out.auth = vec![turnpass_lab::cli::Auth::signed_out()];
    for (script, code, line) in [
        (signed_out, 5, "fail sign-in        [auth]"),
        (
            Script::emulator("2.1.100"),
            4,
            "fail version        [version_too_old]",
        ),
    ] {
        let ended = doctor(&Lab::with(&script), &[]);
        assert_eq!(ended.code, Some(code), "{}", ended.out);
        assert!(ended.out.contains(line), "{}", ended.out);
        assert!(ended.out.contains("Run `claude "), "{}", ended.out);
        assert_eq!(ended.out.matches("fail ").count(), 1, "once: {}", ended.out);
    }
    let ended = doctor(&Lab::new(), &["--claude-path", "/nowhere/claude", "--json"]);
    assert_eq!(ended.code, Some(3));
    let report = &ended.lines()[0];
    assert_eq!(report["ok"], false);
    let failed = report["checks"].as_array().unwrap();
    let failed = failed
        .iter()
        .find(|check| check["state"] == "fail")
        .unwrap();
    assert_eq!(failed["code"], "executable_missing");
    assert!(failed["next"].is_string());
}

#[test]
fn a_signed_out_cli_ends_a_run_before_anything_is_sent() {
    let mut script = Script::emulator("2.1.332");
    script.auth = vec![turnpass_lab::cli::Auth::signed_out()];
    let lab = Lab::with(&script);
    let ended = lab.run(&["[[say x]]"]);
    assert_eq!(ended.code, Some(5), "{}", ended.err);
    assert!(ended.err.contains("[auth]") && ended.err.contains("claude auth login --claudeai"));
    assert!(lab.upstream.messages().is_empty());
}

#[test]
fn the_usage_limit_has_its_exit_code() {
    let lab = Lab::new();
    let limit = r#"[[status 429 {"anthropic-ratelimit-unified-status":"rejected","anthropic-ratelimit-unified-representative-claim":"five_hour","anthropic-ratelimit-unified-reset":"4102444800"}]]"#;
    let ended = lab.run(&[limit]);
    assert_eq!(ended.code, Some(6), "{}", ended.err);
    assert!(ended.err.contains("[usage_limit]"), "{}", ended.err);
    assert_eq!(
        lab.upstream.messages().len(),
        1,
        "a usage limit is not tried again"
    );
}

/// Waits until the program ends, and kills it when it does not.
fn wait(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    while start.elapsed() < WAIT {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::yield_now();
    }
    child.kill().unwrap();
    panic!("the program did not end");
}

#[test]
fn ctrl_c_cancels_a_run_and_leaves_nothing_running() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let lab = Lab::new();
        let mut child = lab
            .command(&["run", "[[say before]] [[stall closed]]"])
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut seen = vec![0; "before".len()];
        out.read_exact(&mut seen).unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(wait(&mut child), Some(130));
        let mut err = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut err)
            .unwrap();
        assert!(err.contains("[cancelled]"), "{err}");
        assert_eq!(processes_of(&lab), 0, "a process is left");
    }
}

/// Processes with a path of this laboratory on their command line; those that are about to be gone are waited for.
fn processes_of(lab: &Lab) -> usize {
    let marker = lab.folder.path().to_string_lossy().into_owned();
    let count = || {
        std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok())
            .filter(|line| String::from_utf8_lossy(line).contains(&marker))
            .count()
    };
    let start = Instant::now();
    while count() > 0 && start.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    count()
}

#[test]
fn a_reader_that_goes_away_ends_the_run() {
    let lab = Lab::new();
    let prompt = "[[text-size 2000000]] [[chunk 100 ms 0]] [[stall closed]]";
    let mut child = lab.command(&["run", "--json", prompt]).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    drop(out);
    assert_eq!(wait(&mut child), Some(1));
    assert_eq!(processes_of(&lab), 0, "a process is left");
}

/// A terminal as the program sees one: the person's end, and the program's.
fn terminal() -> (std::fs::File, OwnedFd) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let name = ptsname(&person, Vec::new()).unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let program = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
    (person.into(), program)
}

/// Runs a task at a terminal, gives each question the next answer, and returns the whole dialogue.
fn at_a_terminal(lab: &Lab, prompt: &str, answers: &[&str]) -> (Option<i32>, String) {
    let (mut person, program) = terminal();
    let mut command = lab.command(&["run", prompt]);
    command
        .stdin(program.try_clone().unwrap())
        .stdout(Stdio::null())
        .stderr(program);
    let mut child = command.spawn().unwrap();
    // The terminal ends for the person only when nobody else holds the program's end.
    drop(command);
    let mut answers = answers.iter();
    let (mut dialogue, mut answered) = (String::new(), 0);
    let mut buffer = [0; 4096];
    // Linux gives an error, not an end, when the other end of a terminal is closed.
    while let Ok(count @ 1..) = person.read(&mut buffer) {
        dialogue.push_str(&String::from_utf8_lossy(&buffer[..count]));
        if dialogue.matches("Allow? ").count() > answered && dialogue.ends_with("[N]o: ") {
            answered += 1;
            let answer = answers.next().expect("one question too many");
            person.write_all(answer.as_bytes()).unwrap();
        }
    }
    assert!(
        answers.next().is_none(),
        "a question was not asked: {dialogue}"
    );
    (wait(&mut child), dialogue)
}

#[test]
fn at_a_terminal_the_person_is_asked() {
    let lab = Lab::new();
    let (code, dialogue) = at_a_terminal(&lab, WRITE, &["n\n"]);
    assert_eq!(code, Some(0), "{dialogue}");
    assert!(dialogue.contains("write wants to run:"), "{dialogue}");
    assert!(
        dialogue.contains("denied: the person does not want this call"),
        "{dialogue}"
    );
    assert!(!lab.path("work/f").exists());

    let (_, dialogue) = at_a_terminal(&lab, WRITE, &["y\n"]);
    assert_eq!(
        std::fs::read_to_string(lab.path("work/f")).unwrap(),
        "made",
        "{dialogue}"
    );

    let twice = r#"[[call write {"path":"a","content":"1"}]] [[call write {"path":"b","content":"2"}]] [[then [[say x]]]]"#;
    at_a_terminal(&lab, twice, &["a\n"]);
    assert!(lab.path("work/a").exists() && lab.path("work/b").exists());
}

#[test]
fn leaving_the_directory_is_asked_about_and_ctrl_d_means_no() {
    let lab = Lab::new();
    std::fs::write(lab.path("secret"), "outside").unwrap();
    let prompt = r#"[[call read {"path":"../secret"}]] [[then [[say x]]]]"#;
    let (code, dialogue) = at_a_terminal(&lab, prompt, &["\u{4}"]);
    assert_eq!(code, Some(0), "{dialogue}");
    assert!(
        dialogue.contains("outside the working directory: "),
        "{dialogue}"
    );
    assert!(dialogue.contains("denied"), "{dialogue}");
}

#[test]
fn the_demo_tells_one_object_and_needs_nothing() {
    for process in [None, Some("warm"), Some("per-request")] {
        let home = tempfile::tempdir().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_turnpass"))
            .env_clear()
            .env("HOME", home.path())
            .env("PATH", "/usr/bin:/bin")
            .args(["demo", "--json", "--scripted"])
            .args(
                process
                    .map(|process| ["--process", process])
                    .iter()
                    .flatten(),
            )
            .output();
        let ended = Ended::from(output.unwrap());
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let lines = ended.lines();
        let [told] = lines.as_slice() else {
            panic!("{}", ended.out)
        };
        let transport = if process.is_some() { "relay" } else { "pool" };
        assert_eq!(told["transport"], transport);
        assert_eq!(told["process"].as_str(), process);
        assert_eq!(told["cli"]["kind"], "scripted");
        assert_eq!(told["generations"], 5);
        assert_eq!(told["upstream_requests"], 5);
        assert_eq!(told["tool_calls"], 6);
        assert_eq!(told["outcome"], "completed");
        assert_eq!(told["laboratory"], true);
        assert!(told["cache_read_share"].as_f64().unwrap() > 0.5, "{told}");
        assert!(told["first_event_ms"].is_u64() && told["cli"]["version"].is_string());
        let left: Vec<_> = std::fs::read_dir(home.path()).unwrap().collect();
        assert!(
            left.is_empty(),
            "the person's home is not touched: {left:?}"
        );
    }
}

#[test]
fn the_bench_counts_one_request_a_generation() {
    let lab = Lab::new();
    let words = ["lab", "bench", "--json", "--scripted", "--requests", "2"];
    let scenes = ["hist", "own", "drop", "tools", "refit", "spawn"];
    let mut command = lab.command(&[&words[..], &scenes].concat());
    let ended = Ended::from(command.output().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let told = &ended.lines()[0];
    assert_eq!(
        (&told["laboratory"], &told["build"]),
        (&true.into(), &"debug".into())
    );
    let seen = told["scenes"].as_array().unwrap();
    let names: Vec<_> = seen.iter().map(|scene| &scene["scene"]).collect();
    assert_eq!(
        names,
        ["hist", "follow", "own", "drop", "tools", "refit", "spawn"]
    );
    for row in seen
        .iter()
        .flat_map(|scene| scene["rows"].as_array().unwrap())
    {
        assert!(row["generations"].as_u64().unwrap() > 0, "{row}");
        assert_eq!(row["upstream_requests"], row["generations"], "{row}");
        for (name, figure) in row["figures"].as_object().unwrap() {
            // What is less the control may be nothing at all.
            let least = if name == "own_less_direct" { -0.1 } else { 0.0 };
            assert!(figure["p50"].as_f64().unwrap() > least, "{name}: {row}");
        }
    }
    let own = &seen[2]["rows"][0]["figures"];
    let at = |name: &str| own[name]["min"].as_f64().unwrap();
    assert!(at("own") > 0.0 && at("own") <= at("to_upstream"), "{own}");
}

#[test]
fn the_bench_measures_the_memory_of_sixty_four_streams() {
    let lab = Lab::new();
    let mut command = lab.command(&["lab", "bench", "--json", "--scripted", "streams"]);
    let ended = Ended::from(command.output().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let row = &ended.lines()[0]["scenes"][0]["rows"][0];
    assert_eq!(
        (&row["generations"], &row["upstream_requests"]),
        (&65.into(), &65.into())
    );
    assert_eq!(row["processes"], 64, "{row}");
    let megabytes = |name: &str| row["values"][name].as_f64().unwrap();
    assert!(megabytes("idle_mb") > 0.0 && megabytes("streaming_mb") > megabytes("idle_mb"));
}

#[test]
fn a_budget_of_requests_refuses_before_anything_is_sent() {
    let lab = Lab::new();
    let ended = lab.run(&[
        "--json",
        "--max-requests-per-session",
        "1",
        "--allow",
        "write",
        WRITE,
    ]);
    assert_eq!(ended.code, Some(6), "{}", ended.err);
    let lines = ended.lines();
    let error = &lines.last().unwrap()["error"];
    assert_eq!(error["code"], "budget", "{}", ended.out);
    assert!(
        ended.err.contains("max_requests_per_session is 1"),
        "{}",
        ended.err
    );
    assert_eq!(lab.upstream.messages().len(), 1);
}

#[test]
fn a_budget_of_tokens_refuses_the_request_after_it_is_used_up() {
    let lab = Lab::new();
    let ended = lab.run(&["--max-tokens-per-day", "1", "--allow", "write", WRITE]);
    assert_eq!(ended.code, Some(6), "{}", ended.err);
    assert!(
        ended.err.contains("max_tokens_per_day is 1"),
        "{}",
        ended.err
    );
    assert_eq!(lab.upstream.messages().len(), 1);
    let again = lab.run(&["--max-tokens-per-day", "1", "[[say hello]]"]);
    assert_eq!(
        again.code,
        Some(0),
        "a laboratory run counts for itself: {}",
        again.err
    );
}

#[test]
fn headers_of_a_window_that_is_nearly_used_up_become_a_notice() {
    let lab = Lab::new();
    let headers = [
        ("anthropic-ratelimit-unified-status", "allowed_warning"),
        ("anthropic-ratelimit-unified-5h-utilization", "0.93"),
        ("anthropic-ratelimit-unified-5h-surpassed-threshold", "0.9"),
    ];
    lab.upstream.enqueue(turnpass_lab::scenario::Reply {
        headers: headers
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ..turnpass_lab::scenario::Reply::text("hello")
    });
    let ended = lab.run(&["--json", "hello"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.contains("\"limit_warning\""), "{}", ended.out);
    assert!(ended.out.contains("five_hour"), "{}", ended.out);
}

#[test]
fn the_gate_is_off_in_the_laboratory_unless_it_is_asked_for() {
    let lab = Lab::new();
    let ended = lab.run(&["[[say hello]]"]);
    assert!(!ended.err.contains("credits are on"), "{}", ended.err);
    // The scripted CLI says that credits are off.
    let ended = lab.run(&["--usage-gate", "require_off", "[[say hello]]"]);
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (Some(0), "hello\n"),
        "{}",
        ended.err
    );
}

#[test]
fn usage_shows_the_tokens_of_the_last_sessions_and_an_estimate_at_the_persons_prices_only() {
    let lab = Lab::new();
    // A laboratory run is recorded only where a folder for it is named.
    let state = lab.path("state");
    for prompt in ["[[say hello]]", "[[say hello again]]"] {
        let mut command = lab.command(&["run", prompt]);
        let ended = Ended::from(command.env("TURNPASS_STATE", &state).output().unwrap());
        assert_eq!(ended.code, Some(0), "{}", ended.err);
    }
    let usage = |arguments: &[&str], prices: &str| {
        let file = lab.path("prices.toml");
        std::fs::write(&file, prices).unwrap();
        let mut command = lab.command(&["usage"]);
        command.args(arguments).env("TURNPASS_CONFIG", &file);
        command.env("TURNPASS_STATE", &state);
        let ended = Ended::from(command.output().unwrap());
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        ended
    };
    let told = &usage(&["--json"], "").lines()[0]["recorded"];
    let sessions = told["sessions"].as_array().unwrap();
    assert_eq!(sessions.len(), 2, "{told}");
    let count = |of: &Value, key: &str| of["tokens"][key].as_u64().unwrap();
    for key in ["input", "output", "cache_creation", "cache_read"] {
        let sum: u64 = sessions.iter().map(|session| count(session, key)).sum();
        assert_eq!(count(&told["today"], key), sum, "{key}: {told}");
    }
    assert!(count(&told["today"], "output") > 0, "{told}");
    assert_eq!(told["today"]["list_price_estimate_usd"], Value::Null);
    let text = usage(&[], "").out;
    assert!(text.contains("no price is built in"), "{text}");

    let family = sessions[0]["models"][0].as_str().unwrap();
    let family = family.split('-').nth(1).unwrap();
    let prices = format!("[prices.{family}]\noutput = 1000\n");
    let told = &usage(&["--json"], &prices).lines()[0]["recorded"]["today"];
    let usd = told["list_price_estimate_usd"].as_f64().unwrap();
    let output = u32::try_from(count(told, "output")).unwrap();
    assert!((usd - f64::from(output) / 1000.0).abs() < 1e-9, "{told}");
    let prompt = count(told, "input") + count(told, "cache_creation") + count(told, "cache_read");
    assert_eq!(told["tokens_without_price"], prompt);
    let text = usage(&[], &prices).out;
    for part in [
        "log, today        2 generations",
        "list-price estimate (your prices; not what you are charged)\n  today           $",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
