//! The doctor from outside: what a newcomer is told, and what a report for others holds.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use turnpass_lab::cli::{Auth, EmulatorOptions, Fault, Run, Script, install};

/// A person's machine.
struct Machine {
    home: tempfile::TempDir,
    /// Variables beside the bare ones.
    variables: Vec<(String, String)>,
}

struct Ended {
    code: i32,
    out: String,
    err: String,
}

impl Ended {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|_| panic!("{}{}", self.out, self.err))
    }

    #[track_caller]
    fn says(&self, part: &str) {
        assert!(
            self.out.contains(part),
            "{part:?} is not in: {}{}",
            self.out,
            self.err
        );
    }
}

impl Machine {
    /// With no CLI.
    fn new() -> Self {
        let home = tempfile::Builder::new().prefix("alice-").tempdir().unwrap();
        Self {
            home,
            variables: Vec::new(),
        }
    }

    fn with(script: &Script) -> Self {
        let machine = Self::new();
        machine.install(script);
        machine
    }

    fn bin(&self) -> PathBuf {
        self.home.path().join(".local/bin")
    }

    /// Puts a CLI where its own installer does.
    fn install(&self, script: &Script) {
        std::fs::create_dir_all(self.bin()).unwrap();
        install(
            &self.bin(),
            Path::new(env!("CARGO_BIN_EXE_turnpass")),
            script,
        )
        .unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn doctor(&self, arguments: &[&str]) -> Ended {
        self.turnpass(&[&["doctor"], arguments].concat())
    }

    fn turnpass(&self, arguments: &[&str]) -> Ended {
        let output = Command::new(env!("CARGO_BIN_EXE_turnpass"))
            .env_clear()
            .env("HOME", self.home.path())
            .env("PATH", "/usr/bin:/bin")
            .envs(self.variables.iter().cloned())
            .current_dir(self.home.path())
            .stdin(Stdio::null())
            .args(arguments)
            .output()
            .unwrap();
        Ended {
            code: output.status.code().unwrap(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn signed(auth: Auth) -> Script {
    let mut script = Script::emulator("2.1.332");
    script.auth = vec![auth];
    script
}

#[test]
fn bug_031_a_newcomer_gets_from_nothing_to_a_certified_cli_by_what_is_said() {
    let machine = Machine::new();
    let nothing = machine.doctor(&[]);
    assert_eq!(nothing.code, 3);
    nothing.says("fail executable     [executable_missing]");
    let next = nothing.out.lines().last().unwrap();
    for step in [
        "next: Install Claude Code",
        "npm install -g @anthropic-ai/claude-code",
        "claude auth login --claudeai",
    ] {
        assert!(next.contains(step), "{next}");
    }
    machine.install(&signed(Auth::signed_out()));
    let signed_out = machine.doctor(&[]);
    assert_eq!(signed_out.code, 5);
    signed_out.says("found by ~/.local/bin");
    signed_out.says("next: Run `claude auth login --claudeai`.");
    machine.install(&signed(Auth::signed_in()));
    let fresh = machine.doctor(&[]);
    assert_eq!(fresh.code, 0, "{}", fresh.out);
    fresh.says("ok   certificate    this program file is not certified yet");
    fresh.says("next: run `turnpass doctor --certify`");
    fresh.says("ok   pool           history native, tools in-band (certified before this release, by its version)");
    let certified = machine.doctor(&["--certify"]);
    assert_eq!(certified.code, 0, "{}", certified.out);
    let ways = machine.doctor(&[]);
    for line in [
        "ok   pool           history native, tools in-band (certified on this machine)",
        "ok   replay         history native, tools in-band (certified on this machine)",
        "ok   relay          kept processes, tools in the extra body (certified on this machine)",
    ] {
        ways.says(line);
    }
    let whole = machine.doctor(&["--json"]);
    let told = whole.json();
    assert_eq!((whole.code, &told["ok"]), (0, &json!(true)));
    let last = told["checks"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (&last["name"], &last["said"]),
        (&json!("certificate"), &json!("44 of 44 checks hold"))
    );
    assert!(told["next"].as_str().unwrap().contains("turnpass run"));
}

#[test]
fn the_ways_of_each_transport_are_told_with_why() {
    let machine = Machine::with(&Script::emulator("2.1.9999"));
    let unknown = machine.doctor(&[]);
    for line in [
        "ok   pool           history transcript, tools over HTTP on loopback (not certified on this machine)",
        "ok   replay         history transcript, tools over stdio (not certified on this machine)",
        "ok   relay          a process for each request, tools in the extra body (not certified on this machine)",
    ] {
        unknown.says(line);
    }
    let options = EmulatorOptions {
        faults: [Fault::FramesOutOfOrder, Fault::NoPairing].into(),
        ..EmulatorOptions::default()
    };
    let mut script = Script::emulator("2.1.9999");
    script.runs = vec![Run::Emulator(options)];
    machine.install(&script);
    assert_eq!(machine.doctor(&["--certify"]).code, 1);
    let broken = machine.doctor(&[]);
    assert_eq!(broken.code, 3, "{}", broken.out);
    broken.says("fail pool           [version_incompatible] claude 2.1.9999 does not pass the check in_band_pairing");
    broken
        .says("ok   replay         history transcript, tools in-band (certified on this machine; ");
    broken.says("; frames_order fails: the history is a transcript");
}

#[test]
fn an_old_cli_is_told_to_be_updated() {
    let old = Machine::with(&Script::emulator("2.1.293")).doctor(&[]);
    assert_eq!(old.code, 4);
    old.says("next: Run `claude update`.");
    old.says("warn isolation      not checked");
}

#[test]
fn bug_025_a_stub_is_said_to_be_one_and_not_to_be_signed_out() {
    let machine = Machine::new();
    std::fs::create_dir_all(machine.bin()).unwrap();
    let stub = machine.bin().join("claude");
    std::fs::write(&stub, "the real program is fetched by an install script\n").unwrap();
    std::fs::set_permissions(&stub, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ended = machine.doctor(&[]);
    assert_eq!(ended.code, 3, "{}", ended.out);
    ended.says("fail executable     [executable_");
    assert!(!ended.out.contains("sign-in"), "{}", ended.out);
    assert!(!ended.out.contains("[auth]"), "{}", ended.out);
}

#[test]
fn what_the_cli_does_to_planted_configuration_and_to_our_flags_is_told() {
    for (fault, code, line) in [
        (
            Fault::ReadsInstructions,
            1,
            "fail planted        [isolation_customizations]",
        ),
        (
            Fault::UnknownOption,
            3,
            "fail flags          [version_incompatible] the CLI does not know the option",
        ),
        (
            Fault::IgnoresMcpConfig,
            1,
            "fail bridge         [mcp_startup]",
        ),
    ] {
        let mut script = Script::emulator("2.1.332");
        script.runs = vec![Run::Emulator(EmulatorOptions {
            faults: [fault].into(),
            ..EmulatorOptions::default()
        })];
        let ended = Machine::with(&script).doctor(&[]);
        assert_eq!(ended.code, code, "{fault:?}: {}", ended.out);
        ended.says(line);
        ended.says("\nnext: ");
    }
}

/// Things that identify the person.
const PERSONAL: [&str; 6] = [
    "alice",
    "example.com",
    "Acme",
    "org-7",
    "hunter2",
    "proxy.internal",
];

fn personal() -> Value {
    json!({
        "loggedIn": true, "authMethod": "claude.ai", "apiProvider": "firstParty", "subscriptionType": "max",
        "email": "alice@example.com", "orgId": "org-7", "orgName": "Acme", "configDirectory": "/home/alice/.claude",
    })
}

#[test]
fn bug_032_a_report_for_others_names_no_path_account_or_address() {
    let mut unclear = Auth::answer(personal());
    unclear.raw = Some("alice@example.com of Acme (org-7) is nearly signed in".to_owned());
    for (auth, code) in [
        (Auth::answer(personal()), 0),
        (unclear, 5),
        (Auth::signed_out(), 5),
    ] {
        let mut machine = Machine::with(&signed(auth));
        machine.variables = vec![
            (
                "HTTPS_PROXY".to_owned(),
                "http://alice:hunter2@proxy.internal:3128".to_owned(),
            ),
            ("ANTHROPIC_API_KEY".to_owned(), "hunter2".to_owned()),
            ("USER".to_owned(), "alice".to_owned()),
        ];
        let file = machine.path("report.json");
        let ended = machine.doctor(&["--report", "report.json"]);
        assert_eq!(ended.code, code, "{}{}", ended.out, ended.err);
        ended.says("report written to report.json");
        let text = std::fs::read_to_string(&file).unwrap();
        for word in PERSONAL {
            assert!(!text.contains(word), "{word}: {text}");
        }
        assert!(
            !text.contains(&*machine.home.path().to_string_lossy()),
            "{text}"
        );
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let report: Value = serde_json::from_str(&text).unwrap();
        let of = |name: &str| {
            let mut checks = report["checks"].as_array().unwrap().iter();
            checks.find(|check| check["name"] == name).unwrap()["said"].clone()
        };
        assert_eq!(of("version"), "2.1.332");
        assert_eq!(of("executable"), "found by ~/.local/bin");
        assert!(
            of("environment")
                .as_str()
                .unwrap()
                .contains("ANTHROPIC_API_KEY is set")
        );
        assert!(of("proxies").as_str().unwrap().starts_with("HTTPS_PROXY"));
    }
}

#[test]
fn a_report_holds_what_is_certified() {
    let mut script = Script::emulator("2.1.332");
    script.runs = vec![Run::Emulator(EmulatorOptions {
        faults: [Fault::NoAbandonedBlocks].into(),
        ..EmulatorOptions::default()
    })];
    let machine = Machine::with(&script);
    for (arguments, code) in [
        (["--certify", "--report", "a"], 1),
        (["--json", "--report", "b"], 0),
    ] {
        let ended = machine.doctor(&arguments);
        assert_eq!(ended.code, code, "{}{}", ended.out, ended.err);
        let text = std::fs::read_to_string(machine.path(arguments[2])).unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        let certificate = &report["certificate"];
        assert_eq!(certificate["version"], "2.1.332");
        let checks = certificate["checks"].as_array().unwrap();
        let failed: Vec<_> = checks
            .iter()
            .filter(|one| one["verdict"] == "fails")
            .collect();
        assert_eq!(failed.len(), 1, "{text}");
        assert_eq!(failed[0]["name"], "stop_after_cut");
    }
}

#[test]
fn a_report_is_not_written_over_a_file_unless_asked() {
    let machine = Machine::new();
    std::fs::write(machine.path("mine"), "kept").unwrap();
    let refused = machine.doctor(&["--report", "mine"]);
    assert_eq!(refused.code, 2);
    assert!(
        refused.err.contains("mine exists") && refused.err.contains("--force"),
        "{}",
        refused.err
    );
    assert!(!refused.out.contains("executable"), "before any check");
    assert_eq!(
        std::fs::read_to_string(machine.path("mine")).unwrap(),
        "kept"
    );
    assert_eq!(machine.doctor(&["--report", "mine", "--force"]).code, 3);
    assert!(
        std::fs::read_to_string(machine.path("mine"))
            .unwrap()
            .contains("executable_missing")
    );
    assert_eq!(
        machine.doctor(&["--force"]).code,
        2,
        "there is nothing to force"
    );
}

#[test]
fn bug_041_the_doctor_tells_the_last_live_call() {
    let machine = Machine::with(&signed(Auth::signed_in()));
    let records = machine.path(".local/state/turnpass/records");
    std::fs::create_dir_all(&records).unwrap();
    for dir in [
        ".local",
        ".local/state",
        ".local/state/turnpass",
        ".local/state/turnpass/records",
    ] {
        let mode = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(machine.path(dir), mode).unwrap();
    }
    let record = |code: &str, laboratory: bool| {
        json!({
            "time": "2026-12-01T00:00:00Z", "transport": "relay", "call_kind": "normal", "session": "s",
            "outcome": if code.is_empty() { "ok" } else { "error" },
            "error": if code.is_empty() { Value::Null } else { json!({"code": code, "detail": ""}) },
            "duration_ms": 1, "chunks": 0, "attempts": 1, "partial_stream": false, "tokens": {}, "laboratory": laboratory,
        })
    };
    let write = |rows: &[Value]| {
        let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
        let file = records.join(turnpass::record::RECORD_FILE);
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    write(&[record("", false), record("auth", false), record("", true)]);
    let refused = machine.doctor(&[]);
    refused.says("ok   sign-in        claude.ai, plan max");
    refused.says("warn last live call refused (sign-in) at ");
    write(&[record("auth", false), record("", false)]);
    machine.doctor(&[]).says("ok   last live call answered at ");
}
