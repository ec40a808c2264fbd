//! The program from outside: exit codes, messages, and what stands on which stream.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// The program with nothing of this machine around it.
fn program(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnpass"));
    command
        .env_clear()
        .env("HOME", home)
        .env("PATH", "/usr/bin:/bin")
        .current_dir(home)
        .stdin(Stdio::null());
    command
}

struct Ended {
    code: i32,
    out: String,
    err: String,
}

fn ended(output: Output) -> Ended {
    Ended {
        code: output.status.code().expect("ended by a signal"),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn run(arguments: &[&str]) -> Ended {
    run_with(arguments, &[])
}

fn run_with(arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let home = tempfile::tempdir().unwrap();
    let mut command = program(home.path());
    command.args(arguments).envs(variables.iter().copied());
    ended(command.output().unwrap())
}

#[track_caller]
fn assert_usage(ended: &Ended, parts: &[&str]) {
    assert_eq!(ended.code, 2, "{}", ended.err);
    assert!(ended.out.is_empty(), "{}", ended.out);
    for part in parts {
        assert!(
            ended.err.contains(part),
            "{part:?} is not in: {}",
            ended.err
        );
    }
}

#[test]
fn help_and_version_are_no_mistakes() {
    let help = run(&["--help"]);
    assert_eq!((help.code, help.err.as_str()), (0, ""));
    for word in ["run", "demo", "doctor", "lab", "config", "Exit codes"] {
        assert!(help.out.contains(word), "{word}");
    }
    assert!(!help.out.contains("mcp-stdio"), "hidden");
    let version = run(&["--version"]);
    assert_eq!(
        version.out,
        format!("turnpass {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(run(&[]).code, 2);
    assert_eq!(run(&["run"]).code, 2);
}

#[test]
fn bad_words_on_the_command_line_are_named_with_the_good_ones() {
    for (flag, word, known) in [
        (
            "--effort",
            "huge",
            "use none, low, medium, high, xhigh, max",
        ),
        ("--transport", "tube", "use pool, replay, relay"),
        ("--process", "cold", "use warm, per-request"),
        (
            "--allow",
            "sudo",
            "use read, list, search, write, edit, shell, outside",
        ),
        ("--deny", "read,", "is not known"),
        ("--max-rounds", "0", "0 is not in"),
        ("--max-requests-per-day", "-1", "invalid value '-1'"),
        ("--max-tokens-per-session", "-1", "invalid value '-1'"),
        ("--max-window-percent", "-1", "invalid value '-1'"),
    ] {
        assert_usage(&run(&["run", flag, word, "x"]), &[flag, known]);
    }
    assert_usage(
        &run(&["run", "--model", " ", "x"]),
        &["[usage] the model is empty"],
    );
    assert_usage(&run(&["run", "--nothing", "x"]), &["--nothing"]);
}

#[test]
fn bad_words_in_the_environment_are_named_too() {
    let ended = run_with(&["run", "x"], &[("TURNPASS_EFFORT", "huge")]);
    assert_usage(&ended, &["[usage] TURNPASS_EFFORT", "use none, low"]);
    let ended = run_with(&["config", "show"], &[("TURNPASS_TRANSPORT", "tube")]);
    assert_usage(&ended, &["[usage] TURNPASS_TRANSPORT", "use pool"]);
}

#[test]
fn a_directory_that_cannot_be_worked_in_is_named() {
    for place in ["/nowhere/at/all", "/etc/hosts"] {
        let ended = run(&["run", "-C", place, "x"]);
        assert_usage(&ended, &["[working_directory]", place]);
    }
}

#[test]
fn a_prompt_is_needed() {
    for argument in ["", "  ", "-"] {
        assert_usage(&run(&["run", argument]), &["[usage] the prompt is empty"]);
    }
    let home = tempfile::tempdir().unwrap();
    let mut child = program(home.path())
        .args(["run", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"\xff").unwrap();
    let ended = ended(child.wait_with_output().unwrap());
    assert_usage(&ended, &["not UTF-8"]);
}

#[test]
fn a_login_needs_a_person_at_a_terminal() {
    for arguments in [&["login"][..], &["run", "--login", "x"]] {
        assert_usage(
            &run(arguments),
            &["a person at a terminal", "claude auth login --claudeai"],
        );
    }
}

#[test]
fn a_laboratory_upstream_is_on_loopback_or_refused() {
    for url in [
        "https://127.0.0.1:9",
        "http://example.com",
        "http://127.0.0.1@example.com:80",
        "http://10.0.0.1:80",
        "nothing",
    ] {
        let ended = run(&["run", "--lab-upstream", url, "x"]);
        assert_usage(&ended, &["[lab_upstream_refused]", "http://127.0.0.1:PORT"]);
        let ended = run_with(&["run", "x"], &[("TURNPASS_LAB_UPSTREAM", url)]);
        assert_usage(&ended, &["[lab_upstream_refused]"]);
    }
    let ended = run(&["run", "--lab-home", "/tmp", "x"]);
    assert_usage(&ended, &["lab_home is set without lab_upstream"]);
}

#[test]
fn without_a_choice_it_is_the_pool() {
    let ended = run(&["config", "show"]);
    assert!(ended.out.contains("transport = \"pool\""), "{}", ended.out);
}

#[test]
fn with_json_a_failure_stands_on_standard_output_as_well() {
    let ended = run(&["run", "--json", "--lab-upstream", "http://example.org", "x"]);
    assert_eq!(ended.code, 2);
    let line: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(line["type"], "error");
    assert_eq!(line["code"], "lab_upstream_refused");
    assert_eq!(line["exit"], 2);
    assert!(ended.err.contains("[lab_upstream_refused]"));
}

fn config(home: &Path, text: &str, mode: u32) {
    let folder = home.join(".config/turnpass");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("config.toml");
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn the_configuration_is_where_it_says() {
    let home = tempfile::tempdir().unwrap();
    let path = ended(
        program(home.path())
            .args(["config", "path"])
            .output()
            .unwrap(),
    );
    let wanted = home.path().join(".config/turnpass/config.toml");
    assert_eq!(path.out, format!("{}\n", wanted.display()));
    let moved = run_with(&["config", "path"], &[("XDG_CONFIG_HOME", "/x")]);
    assert_eq!(moved.out, "/x/turnpass/config.toml\n");
    let named = run_with(&["config", "path"], &[("TURNPASS_CONFIG", "/y.toml")]);
    assert_eq!(named.out, "/y.toml\n");
}

#[test]
fn every_layer_is_shown_with_its_source() {
    let home = tempfile::tempdir().unwrap();
    config(
        home.path(),
        "model = \"opus\"\nmax_rounds = 3\neffort = \"low\"\n\n[prices.\"claude-opus-5-5\"]\ninput = 5\n",
        0o600,
    );
    let shown = program(home.path())
        .args(["config", "show", "--max-rounds", "9"])
        .env("TURNPASS_EFFORT", "high")
        .output();
    let shown = ended(shown.unwrap());
    for line in [
        "model = \"opus\"  # file",
        "max_rounds = 9  # flag",
        "effort = \"high\"  # environment",
        "allow = []  # default",
        "# lab_upstream is not set (TURNPASS_LAB_UPSTREAM)",
        "[prices.\"claude-opus-5-5\"]",
        "input = 5.0",
    ] {
        assert!(
            shown.out.lines().any(|each| each == line),
            "{line}: {}",
            shown.out
        );
    }
    // What it prints is a configuration file.
    let again = tempfile::tempdir().unwrap();
    config(again.path(), &shown.out, 0o600);
    let second = ended(
        program(again.path())
            .args(["config", "show"])
            .output()
            .unwrap(),
    );
    let values = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .map(|line| line.split("  #").next().unwrap_or_default());
        lines.map(str::to_owned).collect()
    };
    assert_eq!(values(&second.out), values(&shown.out));
}

#[test]
fn a_bad_configuration_is_named_with_line_and_remedy() {
    for (text, mode, parts) in [
        (
            "\nmodle = \"x\"\n",
            0o600,
            ["config.toml, line 2", "Did you mean `model`?"],
        ),
        ("effort = \"huge\"", 0o600, ["config.toml, line 1", "huge"]),
        ("", 0o622, ["can be written by others", "chmod go-w"]),
        (
            "claude_path = \"bin/claude\"",
            0o600,
            ["claude_path", "absolute"],
        ),
    ] {
        let home = tempfile::tempdir().unwrap();
        config(home.path(), text, mode);
        for arguments in [["run", "x"], ["config", "show"]] {
            let output = program(home.path()).args(arguments).output().unwrap();
            assert_usage(&ended(output), &parts);
        }
    }
}

#[test]
fn completions_and_manual_pages_are_printed() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&["completions", shell]);
        assert_eq!(script.code, 0);
        assert!(
            script.out.contains("turnpass") && script.out.contains("doctor"),
            "{shell}"
        );
    }
    assert_eq!(run(&["completions", "dos"]).code, 2);
    let page = run(&["man"]);
    assert!(page.out.contains(".TH turnpass 1") && page.out.contains("Exit codes"));
    let page = run(&["man", "run"]);
    assert!(page.out.contains(".TH turnpass\\-run 1") || page.out.contains(".TH turnpass-run 1"));
    assert!(page.out.contains("TURNPASS_EFFORT"));
    assert_usage(
        &run(&["man", "nothing"]),
        &["there is no command \"nothing\""],
    );
}

#[test]
fn the_scripted_cli_gets_its_arguments_untouched() {
    let home = tempfile::tempdir().unwrap();
    let script = home.path().join("s.json");
    std::fs::write(
        &script,
        turnpass_lab::cli::Script::emulator("2.1.332").to_json(),
    )
    .unwrap();
    let script = script.to_str().unwrap();
    for arguments in [["--version"], ["-v"]] {
        let mut command = program(home.path());
        let output = command
            .args(["lab", "cli", script])
            .args(arguments)
            .output();
        assert_eq!(ended(output.unwrap()).out, "2.1.332 (Claude Code)\n");
    }
    let mut command = program(home.path());
    let output = command
        .args(["-v", "lab", "cli", script, "auth", "status"])
        .output();
    let status: Value = serde_json::from_str(&ended(output.unwrap()).out).unwrap();
    assert_eq!(status["loggedIn"], true);
}

#[test]
fn the_laboratory_upstream_serves_until_it_is_told_to_end() {
    let home = tempfile::tempdir().unwrap();
    let mut child = program(home.path())
        .args(["lab", "upstream", "--port", "0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let address = line
        .trim_end()
        .strip_prefix("laboratory upstream: http://")
        .unwrap();
    let body = json!({"model":"claude-sonnet-5-5","max_tokens":9,
        "messages":[{"role":"user","content":"[[say hello]]"}]})
    .to_string();
    let mut client = std::net::TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: lab\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes()).unwrap();
    let reply = std::io::read_to_string(client).unwrap();
    assert!(reply.contains("hello"), "{reply}");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let rest = std::io::read_to_string(out).unwrap();
    assert_eq!(
        rest,
        "laboratory: nothing reaches the service; 1 messages in 1 requests were answered\n"
    );
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn bad_scenarios_and_ports_are_said() {
    let home = tempfile::tempdir().unwrap();
    let scenario = home.path().join("s.json");
    std::fs::write(&scenario, "{\"replys\":[]}").unwrap();
    let scenario = scenario.to_str().unwrap();
    let ended_ = run(&["lab", "upstream", "--scenario", scenario]);
    assert_usage(&ended_, &["the scenario cannot be used", "replys"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = run(&["lab", "upstream", "--port", &port]);
    assert_eq!(ended.code, 1);
    assert!(
        ended.err.starts_with("[system] could not listen"),
        "{}",
        ended.err
    );
}

#[test]
fn the_tool_server_speaks_mcp() {
    let home = tempfile::tempdir().unwrap();
    let tool = turnpass::request::Tool {
        name: "read".into(),
        description: "Reads.".into(),
        input_schema: json!({"type":"object"}),
    };
    let catalogue = turnpass::tools::Catalogue::build(&[tool]).unwrap();
    let file = home.path().join("catalogue.json");
    std::fs::write(&file, catalogue.file_json()).unwrap();
    let mut child = program(home.path())
        .args(["mcp-stdio", "--policy", "inert", "--catalogue"])
        .arg(&file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let request = json!({"jsonrpc":"2.0","id":1,"method":"tools/list"});
    writeln!(stdin, "{request}").unwrap();
    drop(stdin);
    let output = ended(child.wait_with_output().unwrap());
    let reply: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!(reply["result"]["tools"][0]["name"], "read");
    assert_eq!(output.code, 0);
    let missing = ["mcp-stdio", "--policy", "inert", "--catalogue", "/nowhere"];
    let ended = run(&missing);
    assert_eq!(ended.code, 1);
    assert!(ended.err.starts_with("[mcp_startup]"), "{}", ended.err);
    assert_eq!(
        run(&["mcp-stdio", "--policy", "answering", "--catalogue", "x"]).code,
        2
    );
}
