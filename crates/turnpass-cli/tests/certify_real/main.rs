//! NEEDS THE REAL CLI (`conformance/install`): the certification and the doctor on each pinned version, in a namespace that
//! has loopback only; and that a transport obeys what was certified.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::{Value, json};
use turnpass::certify::{Certificate, Certificates, Check, Identity, Outcome, Standing, Verdict};
use turnpass::cli::version::Version;
use turnpass::conversation::Message;
use turnpass::pool::{PoolOptions, PoolTransport};
use turnpass::relay::LoopbackUrl;
use turnpass::request::Tool;
use turnpass::{ErrorCode, Event, Provider, Request};
use turnpass_lab::rig::{Isolation, MadeUpHome, REQUIRE_REAL_CLI, RealCli, isolate};
use turnpass_lab::upstream::{Options, Upstream};

/// What each pinned version does not do. docs/compatibility.md has it for more versions.
const DIFFERENCES: [(&str, &[Check]); 3] = [
    ("2.1.294", &[Check::StopAfterCut]),
    ("2.1.310", &[Check::StopAfterCut]),
    ("2.1.332", &[]),
];

/// From the end of the program to the end of what it killed.
const GONE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    // Before any thread, and before anything is made that would have to be removed.
    let isolation = isolate();
    let mut arguments = Arguments::from_args();
    // A certification runs two processes, as many as this machine has cores for.
    arguments.test_threads = Some(1);
    let required = std::env::var(REQUIRE_REAL_CLI).as_deref() == Ok("1");
    if let Isolation::Proxy { reason } = &isolation {
        assert!(!required, "NOT TESTED: {reason}");
        eprintln!("====\nNOT TESTED: the certification with the real CLI: {reason}\n====");
    }
    let is_possible = isolation == Isolation::Namespace;
    let conformance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let mut trials = Vec::new();
    for cli in RealCli::for_tests(&conformance, "tests/certify_real of turnpass-cli") {
        for (name, test) in TESTS {
            let cli = cli.clone();
            let trial = Trial::test(format!("{}::{name}", cli.version), move || {
                test(&Machine::new(&cli));
                Ok::<_, Failed>(())
            });
            trials.push(trial.with_ignored_flag(!is_possible));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

type Test = fn(&Machine);

const TESTS: [(&str, Test); 4] = [
    ("certified_by_the_real_cli", certified_by_the_real_cli),
    ("the_doctor_with_the_real_cli", the_doctor_with_the_real_cli),
    (
        "a_cancelled_certification_leaves_nothing",
        a_cancelled_certification_leaves_nothing,
    ),
    (
        "a_pool_obeys_the_certificate_of_the_real_cli",
        a_pool_obeys_the_certificate_of_the_real_cli,
    ),
];

/// A person's machine with a pinned CLI and a made-up sign-in of its own.
struct Machine {
    dir: tempfile::TempDir,
    version: String,
    claude: PathBuf,
}

impl Machine {
    fn new(cli: &RealCli) -> Self {
        // Short, since the CLI makes sockets below it.
        let dir = tempfile::Builder::new()
            .prefix("tpr")
            .tempdir_in("/tmp")
            .unwrap();
        std::fs::create_dir(dir.path().join("t")).unwrap();
        MadeUpHome::new(&dir.path().join("h")).unwrap();
        Self {
            dir,
            version: cli.version.clone(),
            claude: std::path::absolute(&cli.path).unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_turnpass"));
        command
            .env_clear()
            .env("HOME", self.path("h"))
            .env("PATH", "/usr/bin:/bin")
            .env("TMPDIR", self.path("t"))
            .env("TURNPASS_STATE", self.path("state"))
            .env("TURNPASS_CLAUDE_PATH", &self.claude)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.command(arguments).output().unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap(), format!("{out}{err}"))
    }

    fn differences(&self) -> Vec<&'static str> {
        let known = DIFFERENCES
            .iter()
            .find(|(version, _)| *version == self.version);
        let (_, checks) = known.expect("a pinned version without a row");
        checks.iter().map(|check| check.as_str()).collect()
    }

    /// Processes and private folders that are still there after a moment.
    fn left(&self) -> Vec<String> {
        let end = Instant::now() + GONE;
        loop {
            let left = self.left_now();
            if left.is_empty() || Instant::now() > end {
                return left;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn left_now(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("t")).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut left: Vec<_> = names.filter(|name| name.starts_with("turnpass-")).collect();
        let ours = self.path("t").to_string_lossy().into_owned();
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            let environ = std::fs::read(process.path().join("environ")).unwrap_or_default();
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            // A zombie that its parent has not reaped yet has no command line.
            if !line.is_empty() && String::from_utf8_lossy(&environ).contains(&ours) {
                left.push(String::from_utf8_lossy(&line).replace('\0', " "));
            }
        }
        left
    }
}

fn certified_by_the_real_cli(machine: &Machine) {
    let (code, text) = machine.run(&["doctor", "--certify", "--json"]);
    let told: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
    let checks = told["checks"].as_array().unwrap();
    let failed: Vec<_> = checks
        .iter()
        .filter(|one| one["verdict"] != "holds")
        .collect();
    let names: Vec<_> = failed
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, machine.differences(), "{failed:#?}");
    assert_eq!(checks.len(), Check::ALL.len());
    assert_eq!(code, i32::from(!names.is_empty()));
    assert_eq!(
        (&told["version"], &told["kept"]),
        (&json!(machine.version), &json!(true))
    );
    // The CLI wants to see its account; nothing of it leaves the machine, and all of it is counted.
    let refused = told["refused_connections"].as_object().unwrap();
    assert!(refused.contains_key("api.anthropic.com:443"), "{refused:?}");
    let known = ["api.anthropic.com:443", "platform.claude.com:443"];
    assert!(
        refused.keys().all(|to| known.contains(&to.as_str())),
        "{refused:?}"
    );
    let version = Version::find(&machine.version).unwrap();
    let kept = Certificates::new(&machine.path("state"))
        .of(version, &machine.claude)
        .unwrap();
    for check in Check::ALL {
        assert_eq!(
            kept.allows(*check),
            !names.contains(&check.as_str()),
            "{check}"
        );
    }
    assert_eq!(machine.left(), [""; 0]);
}

fn the_doctor_with_the_real_cli(machine: &Machine) {
    let (code, text) = machine.run(&["doctor", "--report", "report"]);
    assert_eq!(code, 0, "{text}");
    for line in [
        "ok   sign-in        claude.ai, plan max",
        "ok   flags          the CLI starts with every flag that is used",
        "ok   bridge         the CLI took over the tools of `turnpass mcp-stdio`",
        "ok   planted        hooks, instructions, MCP servers",
        "ok   isolation      a laboratory generation over the ",
        "ok   certificate    this program file is not certified yet",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let report = std::fs::read_to_string(machine.path("report")).unwrap();
    assert!(
        !report.contains(&*machine.dir.path().to_string_lossy()),
        "{report}"
    );
    assert!(report.contains(&machine.version), "{report}");
    assert_eq!(machine.left(), [""; 0]);
}

fn a_cancelled_certification_leaves_nothing(machine: &Machine) {
    use std::io::{BufRead, BufReader};
    let mut command = machine.command(&["doctor", "--certify"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The first check has been told, so both lanes are at work.
    let told = lines
        .by_ref()
        .map(Result::unwrap)
        .find(|line| line.starts_with("ok "));
    assert!(told.is_some());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!machine.path("state").exists(), "nothing is kept of it");
    assert_eq!(machine.left(), [""; 0]);
}

/// With everything certified its own ways are taken; with some of it failing the ways around; with one that nobody can do
/// without it is refused, and nothing is started.
fn a_pool_obeys_the_certificate_of_the_real_cli(machine: &Machine) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    for (failing, way) in [
        (&[][..], Way::Own),
        (&[Check::FramesOrder, Check::InBandManifest], Way::Around),
        (&[Check::Isolation], Way::Refused),
    ] {
        let took = machine.certify(failing);
        let seen = runtime.block_on(machine.ask());
        eprintln!("{}: {seen:?}; the standing took {took:?}", machine.version);
        assert_eq!(seen, way, "{failing:?}");
        assert_eq!(machine.running(), [""; 0]);
    }
}

/// Longest generation of a pool here.
const GENERATION: Duration = Duration::from_secs(60);

/// How a history and tools went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Message by message, with tools in-band.
    Own,
    /// As one message, with tools over HTTP.
    Around,
    /// By the name of the check.
    Refused,
    /// As one message with tools in-band, or the other way round.
    Mixed,
}

impl Machine {
    /// Keeps a certificate of the real program file by which these checks fail; gives how long it takes to look it up.
    fn certify(&self, failing: &[Check]) -> Duration {
        let version = Version::find(&self.version).unwrap();
        let outcome = |check: &Check| Outcome {
            check: *check,
            verdict: match failing.contains(check) {
                true => Verdict::Fails {
                    seen: "something else".to_owned(),
                },
                false => Verdict::Holds,
            },
            took_ms: 1,
        };
        let outcomes = Check::ALL.iter().map(outcome).collect();
        let identity = Identity::of(version, &self.claude).unwrap();
        let certificate = Certificate::new(identity, outcomes);
        let kept = Certificates::new(&self.path("state"));
        kept.keep(&certificate).unwrap();
        let began = Instant::now();
        let standing = Standing::of(version, &self.claude, Some(&kept));
        let took = began.elapsed();
        assert_eq!(standing, Standing::Certified(certificate));
        took
    }

    /// The command lines of the CLI's processes that are there.
    fn running(&self) -> Vec<String> {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let lines = processes.map(|one| {
            let line = std::fs::read(one.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).replace('\0', " ")
        });
        let ours = self.claude.to_string_lossy().into_owned();
        lines.filter(|line| line.starts_with(&ours)).collect()
    }

    /// Gives a pool a history and a tool.
    async fn ask(&self) -> Way {
        let upstream = Upstream::start(Options::default()).unwrap();
        let pool = PoolTransport::new(PoolOptions {
            claude_path: Some(self.claude.clone()),
            spare: false,
            state_dir: Some(self.path("state")),
            lab_upstream: Some(LoopbackUrl::parse(&upstream.url()).unwrap()),
            lab_home: Some(self.path("h")),
            ..PoolOptions::default()
        });
        let provider = Provider::new(pool.unwrap());
        let messages = vec![
            Message::user("one"),
            Message::assistant("two"),
            Message::user("three [[say done]]"),
        ];
        let mut request = Request::new("sonnet", messages);
        request.tools = vec![Tool {
            name: "read".to_owned(),
            description: "Reads.".to_owned(),
            input_schema: json!({"type": "object"}),
        }];
        let mut generation = provider.generate(request);
        let whole = async {
            let mut text = String::new();
            while let Some(event) = generation.next().await {
                if let Event::Text { text: piece } = event? {
                    text.push_str(&piece);
                }
            }
            Ok::<_, turnpass::Error>(text)
        };
        let ended = tokio::time::timeout(GENERATION, whole).await.unwrap();
        let lines = self.running();
        let sent = upstream.messages();
        provider.shutdown().await.unwrap();
        match ended {
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::VersionIncompatible, "{error}");
                assert!(error.detail().contains("isolation"), "{error}");
                assert!(lines.is_empty() && sent.is_empty(), "{lines:?}");
                return Way::Refused;
            }
            Ok(text) => assert_eq!(text, "done"),
        }
        assert_eq!((sent.len(), lines.len()), (1, 1), "{lines:?}");
        let messages = sent[0].field("/messages").and_then(Value::as_array);
        let is_native = messages
            .unwrap()
            .iter()
            .any(|one| one["role"] == "assistant");
        match (is_native, lines[0].contains("--mcp-config")) {
            (true, false) => Way::Own,
            (false, true) => Way::Around,
            _ => Way::Mixed,
        }
    }
}
