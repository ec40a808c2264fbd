//! The certification from outside, against the emulated CLI: whole, and with each behaviour broken on purpose.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use turnpass::certify::{Certificates, Check, released_versions};
use turnpass::cli::version::Version;
use turnpass_lab::cli::{EmulatorOptions, Fault, Run, Script, install};

/// What breaks each check. A fault may break others too, which its own certification then says.
const BREAKS: &[(Check, Fault)] = &[
    (Check::Flags, Fault::UnknownOption),
    (Check::InitFields, Fault::NoKeySource),
    (Check::PluginsOff, Fault::PluginLoads),
    (Check::Isolation, Fault::ReadsInstructions),
    (Check::ToolsExact, Fault::ExtraTool),
    (Check::DescriptionsWhole, Fault::CutsDescriptions),
    (Check::InBandManifest, Fault::IgnoresManifests),
    (Check::InBandPairing, Fault::NoPairing),
    (Check::InBandParallel, Fault::CallsInSequence),
    (Check::ResultWhole, Fault::StubsResults),
    (Check::EndTurn, Fault::IgnoresEndTurn),
    (Check::StdioBridge, Fault::IgnoresMcpConfig),
    (Check::ReadyBeforePrompt, Fault::ServersPending),
    (Check::OneRequest, Fault::AsksForTitle),
    (Check::ClientComposed, Fault::IgnoresComposed),
    (Check::CacheBreakpoints, Fault::ExtraCacheMark),
    (Check::FramesOrder, Fault::FramesOutOfOrder),
    (Check::FramesAcknowledged, Fault::FramesUnacknowledged),
    (Check::FramesThinking, Fault::DropsThinking),
    (Check::FramesLive, Fault::NoLiveFrames),
    (Check::ExtraBodyLive, Fault::NoLiveExtraBody),
    (Check::SystemPromptLive, Fault::NoLivePrompt),
    (Check::ModelChangeClean, Fault::LeavesCommandText),
    (Check::EffortLive, Fault::NoLiveEffort),
    (Check::RewindAfterInterrupt, Fault::KeepsInterrupted),
    (Check::RewindAfterFailure, Fault::KeepsFailed),
    (Check::InterruptCloses, Fault::InterruptKeepsRequest),
    (Check::CancelQueued, Fault::IgnoresCancelQueued),
    (Check::ResumeAt, Fault::IgnoresResumeAt),
    (Check::ResumeParked, Fault::ParkedNotOnDisk),
    (Check::ForkAt, Fault::IgnoresFork),
    (Check::PromptSnapshotOff, Fault::KeepsSnapshot),
    (Check::BlockingLimitGate, Fault::NoBlockingLimit),
    (Check::Refusal410, Fault::Retries410),
    (Check::Readmission401, Fault::NoReadmission),
    (Check::RetriesOff, Fault::IgnoresMaxRetries),
    (Check::FallbackOff, Fault::FallsBack),
    (Check::RefusalOnce, Fault::RetriesRefusals),
    (Check::UnparsedInput, Fault::CallsUnparsed),
    (Check::StopAfterCut, Fault::NoAbandonedBlocks),
    (Check::MaxTurnsHandOff, Fault::IgnoresMaxTurns),
    (Check::BudgetStop, Fault::IgnoresBudget),
    (Check::IdleClose, Fault::IgnoresEndOfInput),
    (Check::ModelCatalogue, Fault::NoModels),
];

/// A person's machine with an emulated CLI.
struct Machine {
    home: tempfile::TempDir,
    claude: PathBuf,
}

impl Machine {
    fn new(faults: impl IntoIterator<Item = Fault>) -> Self {
        Self::with_runs([faults.into_iter().collect()])
    }

    /// Each start has the faults of the next run; the last run stays.
    fn with_runs(runs: impl IntoIterator<Item = BTreeSet<Fault>>) -> Self {
        let home = tempfile::tempdir().unwrap();
        let run = |faults| {
            Run::Emulator(EmulatorOptions {
                faults,
                ..EmulatorOptions::default()
            })
        };
        let mut script = Script::emulator("2.1.332");
        script.runs = runs.into_iter().map(run).collect();
        let bin = home.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        let program = Path::new(env!("CARGO_BIN_EXE_turnpass"));
        let claude = install(&bin, program, &script).unwrap();
        Self { home, claude }
    }

    fn state(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// How often the CLI was started, its version and sign-in apart.
    fn starts(&self) -> u64 {
        let counts = self.claude.with_file_name("claude.script.json.count");
        let counts: Value = serde_json::from_slice(&std::fs::read(counts).unwrap()).unwrap();
        counts["runs"].as_u64().unwrap()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_turnpass"))
            .env_clear()
            .env("HOME", self.home.path())
            .env("PATH", "/usr/bin:/bin")
            .env("TURNPASS_CLAUDE_PATH", &self.claude)
            .env("TURNPASS_STATE", self.state())
            .current_dir(self.home.path())
            .stdin(Stdio::null())
            .args(["doctor", "--certify"])
            .args(arguments)
            .output()
            .unwrap()
    }

    fn json(&self, arguments: &[&str]) -> (i32, Value) {
        let output = self.run(&[&["--json"], arguments].concat());
        let code = output.status.code().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        (
            code,
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{error}")),
        )
    }
}

#[test]
fn a_healthy_cli_passes_every_check_and_its_certificate_is_kept() {
    let machine = Machine::new([]);
    let version = Version::new(2, 1, 332);
    let certificates = Certificates::new(&machine.state());
    assert!(certificates.of(version, &machine.claude).is_none());
    let (code, told) = machine.json(&[]);
    assert_eq!(code, 0, "{told:#}");
    let names: Vec<_> = told["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    let all: Vec<_> = Check::ALL.iter().map(|check| check.as_str()).collect();
    assert_eq!(names, all);
    assert_eq!(
        (&told["version"], &told["kept"]),
        (&json!("2.1.332"), &json!(true))
    );
    assert_eq!(told["refused_connections"], json!({}));
    let kept = certificates.of(version, &machine.claude).unwrap();
    assert!(kept.is_clean());
    assert_eq!(kept.identity().digest(), told["digest"].as_str().unwrap());
    let mut other = std::fs::OpenOptions::new()
        .append(true)
        .open(&machine.claude)
        .unwrap();
    std::io::Write::write_all(&mut other, b"# updated\n").unwrap();
    assert!(
        certificates.of(version, &machine.claude).is_none(),
        "another program file"
    );
}

#[test]
fn each_check_fails_when_its_behaviour_is_broken() {
    let checks: Vec<_> = BREAKS.iter().map(|(check, _)| *check).collect();
    assert_eq!(checks, Check::ALL, "one row a check, in order");
    let faults: BTreeSet<_> = BREAKS.iter().map(|(_, fault)| *fault).collect();
    assert_eq!(faults.len(), BREAKS.len(), "one fault a row");
    // Two at a time, as many as the runner has processes.
    let unnoticed: Vec<String> = std::thread::scope(|scope| {
        let halves = BREAKS.chunks(BREAKS.len().div_ceil(2));
        let halves = halves
            .map(|half| scope.spawn(|| half.iter().filter_map(unnoticed).collect::<Vec<_>>()));
        let halves: Vec<_> = halves.collect();
        halves
            .into_iter()
            .flat_map(|half| half.join().unwrap())
            .collect()
    });
    assert_eq!(unnoticed, [""; 0]);
}

/// What is wrong with a certification of a CLI with this fault, if anything is.
fn unnoticed((check, fault): &(Check, Fault)) -> Option<String> {
    let machine = Machine::new([*fault]);
    let (code, told) = machine.json(&["--check", check.as_str()]);
    let row = &told["checks"][0];
    let is_noticed = code == 1
        && row["name"] == check.as_str()
        && row["verdict"] == "fails"
        && row["said"].as_str().is_some_and(|said| said.len() > 5)
        && told["kept"] == false
        && !machine.state().exists();
    (!is_noticed).then(|| format!("{check} with {fault:?}: {code} {row}"))
}

#[test]
fn what_was_late_once_holds_and_what_was_late_twice_fails() {
    let late = || BTreeSet::from([Fault::InterruptKeepsRequest]);
    for (runs, starts, code, verdict) in [
        (vec![late(), BTreeSet::new()], 2, 0, "holds"),
        (vec![late(), late(), BTreeSet::new()], 2, 1, "fails"),
    ] {
        let machine = Machine::with_runs(runs);
        let (exit, told) = machine.json(&["--check", "interrupt_closes"]);
        let row = &told["checks"][0];
        assert_eq!((exit, &row["verdict"]), (code, &json!(verdict)), "{row}");
        assert_eq!(machine.starts(), starts, "{row}");
        let said = row["said"].as_str().unwrap();
        assert_eq!(said.contains("2 times in a row"), verdict == "fails");
    }
}

#[test]
fn what_was_seen_to_be_otherwise_is_not_tried_again() {
    let machine = Machine::with_runs([BTreeSet::from([Fault::NoKeySource]), BTreeSet::new()]);
    let (exit, told) = machine.json(&["--check", "init_fields"]);
    assert_eq!((exit, machine.starts()), (1, 1), "{told}");
}

#[test]
fn a_broken_behaviour_is_kept_and_its_neighbours_hold() {
    let machine = Machine::new([Fault::KeepsFailed, Fault::NoAbandonedBlocks]);
    let (code, told) = machine.json(&[]);
    assert_eq!(code, 1);
    let failed: Vec<_> = told["checks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["verdict"] != "holds")
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    // The rewinds that take a failed or unfinished turn back are those that the fault is about.
    assert!(
        failed.contains(&"rewind_after_failure") && failed.contains(&"stop_after_cut"),
        "{failed:?}"
    );
    for holds in ["in_band_pairing", "frames_order", "fork_at", "retries_off"] {
        assert!(!failed.contains(&holds), "{failed:?}");
    }
    let kept = Certificates::new(&machine.state())
        .of(Version::new(2, 1, 332), &machine.claude)
        .unwrap();
    assert!(!kept.allows(Check::RewindAfterFailure) && kept.allows(Check::FramesOrder));
}

#[test]
fn the_text_says_each_check_and_what_it_means_for_each_transport() {
    let machine = Machine::new([]);
    let output = machine.run(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for check in Check::ALL {
        let line = text
            .lines()
            .find(|line| line.contains(&format!(" {check} ")));
        assert!(
            line.is_some_and(|line| line.starts_with("ok ")),
            "{check}: {text}"
        );
    }
    for line in [
        "44 of 44 hold",
        "pool: everything it relies on holds",
        "relay: everything it relies on holds",
        "nothing wanted to leave this machine",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn a_check_that_nobody_knows_and_a_cli_that_is_not_there_are_told() {
    let machine = Machine::new([]);
    let unknown = machine.run(&["--check", "nonsense"]);
    assert_eq!(unknown.status.code(), Some(2));
    std::fs::remove_file(&machine.claude).unwrap();
    let absent = machine.run(&[]);
    assert_eq!(absent.status.code(), Some(3));
    let error = String::from_utf8(absent.stderr).unwrap();
    assert!(
        error.contains("executable_missing") || error.contains("executable_unusable"),
        "{error}"
    );
}

#[test]
fn nothing_is_left_of_a_certification() {
    let machine = Machine::new([Fault::IgnoresEndOfInput, Fault::InterruptKeepsRequest]);
    let temporary = machine.home.path().join("t");
    std::fs::create_dir(&temporary).unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_turnpass"))
        .env_clear()
        .env("HOME", machine.home.path())
        .env("PATH", "/usr/bin:/bin")
        .env("TMPDIR", &temporary)
        .env("TURNPASS_CLAUDE_PATH", &machine.claude)
        .args([
            "doctor",
            "--certify",
            "--check",
            "idle_close",
            "--check",
            "interrupt_closes",
        ])
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1));
    let left: Vec<_> = std::fs::read_dir(&temporary)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_compatibility_page_is_that_of_the_reports() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let reports = std::fs::read_dir(root.join("conformance/certificates")).unwrap();
    let mut reports: Vec<_> = reports.flatten().map(|entry| entry.path()).collect();
    reports.sort();
    assert!(reports.len() >= 8, "{} versions only", reports.len());
    for path in &reports {
        let text = std::fs::read_to_string(path).unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        let checks = report["certificate"]["checks"].as_array().unwrap();
        let names: Vec<_> = checks
            .iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        let all: Vec<_> = Check::ALL.iter().map(|check| check.as_str()).collect();
        assert_eq!(names, all, "{}: run `just compatibility`", path.display());
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnpass"));
    let output = command
        .args(["lab", "compatibility"])
        .args(&reports)
        .output()
        .unwrap();
    let page = std::fs::read_to_string(root.join("docs/compatibility.md")).unwrap();
    let made = String::from_utf8(output.stdout).unwrap();
    assert!(
        made == page,
        "docs/compatibility.md is not that of the reports: run `just compatibility`"
    );
    // What each version is released with is in the reports too.
    let released: Vec<(String, Vec<Check>)> = released_versions()
        .iter()
        .map(|(version, failing)| (version.to_string(), failing.to_vec()))
        .collect();
    let mut reported: Vec<_> = reports.iter().map(|path| failing(path)).collect();
    let numbers = |version: &str| -> Vec<u32> {
        let parts = version.split('.');
        parts.map(|part| part.parse().unwrap()).collect()
    };
    reported.sort_by_key(|(version, _)| numbers(version));
    assert_eq!(released, reported, "run `just compatibility`");
    let output = Command::new(env!("CARGO_BIN_EXE_turnpass"))
        .args(["lab", "compatibility", "--released"])
        .args(&reports)
        .output()
        .unwrap();
    let table = root.join("crates/turnpass/src/certify/released.rs");
    let made = String::from_utf8(output.stdout).unwrap();
    assert!(
        made == std::fs::read_to_string(table).unwrap(),
        "the table of released versions is not that of the reports: run `just compatibility`"
    );
}

/// The version of a report, and the checks that it does not pass.
fn failing(report: &Path) -> (String, Vec<Check>) {
    let report: Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    let certificate = &report["certificate"];
    let failing = certificate["checks"].as_array().unwrap().iter();
    let failing = failing.filter(|one| one["verdict"] != "holds");
    let names = failing.map(|one| one["name"].as_str().unwrap().parse().unwrap());
    (
        certificate["version"].as_str().unwrap().to_owned(),
        names.collect(),
    )
}
