//! A stand-in for the `claude` program: it plays a script, or emulates the real one.
//!
//! What the real CLI does is in `docs/lab/cli.md` and the recordings under `fixtures/`; what it cannot be
//! made to do (a line of 12 MiB, a process that ignores SIGTERM, a record type of next year) is written
//! as a [`Script`] and played from here.
//!
//! # Layout
//!
//! - [`script`], [`step`]: the script as data, its JSON form, its errors with the number of the step.
//! - [`template`]: subset matching of JSON and `{{placeholders}}`.
//! - [`recording`]: what a run writes down about itself, and how a test reads it back.
//! - `player`, `posting`, `signals`: play the steps of a run.
//! - `emulator`: the built-in run that behaves like the real CLI.
//! - `background`: control requests answered beside the steps.
//! - `pipes`, `sse`, `http`, `mcp`, `controls`, `fixture`, `big`: the parts that both use.
//!
//! # Why a wrapper and not a variable
//!
//! The library under test hands an allow-listed environment to its child, so nothing may depend on
//! inherited variables. [`install`] therefore writes a small `claude` program that carries the path of
//! the script in itself.

mod background;
mod big;
mod controls;
mod emulator;
mod fixture;
mod http;
mod mcp;
mod pipes;
mod player;
mod posting;
pub mod recording;
pub mod script;
mod signals;
mod sse;
pub mod step;
pub mod template;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

pub use big::{BigFill, BigKind, BigLine, MARK_BYTES};
pub use emulator::{EmulatorOptions, Fault, Flags, FlagsError};
pub use recording::{RecordedLine, RecordedRun, Recording};
pub use script::{Auth, Control, Post, Run, Script, ScriptError, Step};
pub use sse::{SseEvent, SseParser};

use recording::Recorder;

/// Exit code when the script cannot be read; distinct from every code of the real CLI.
pub const EXIT_BAD_SCRIPT: u8 = 96;

/// Exit code when an `expect` step saw another line, or the end of input, instead of what it wanted.
pub const EXIT_MISMATCH: u8 = 97;

/// Runs the scripted CLI: `script` is the path of the script, `args` what `claude` was called with.
///
/// Guarantees: it never panics on a bad script, but prints the step and ends with [`EXIT_BAD_SCRIPT`];
/// an expectation that fails ends with [`EXIT_MISMATCH`] and says on stderr what came instead.
/// It builds a small single-threaded runtime of its own and must not be called inside another one.
pub fn main(script: &Path, args: &[OsString]) -> ExitCode {
    let argv: Vec<String> = args
        .iter()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    match start(script, argv) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            complain(&format!("scripted cli: {error}"));
            ExitCode::from(EXIT_BAD_SCRIPT)
        }
    }
}

/// Runs the scripted CLI if this process was started as one (`PROGRAM lab cli SCRIPT [ARG...]`).
///
/// For test programs with a main function of their own, so that they can be the `program` of
/// [`install`]. Returns `None`, and does nothing, when the arguments are others.
pub fn intercept() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    if args.next()? != "lab" || args.next()? != "cli" {
        return None;
    }
    let Some(script) = args.next() else {
        complain("scripted cli: usage: PROGRAM lab cli SCRIPT [ARG...]");
        return Some(ExitCode::from(EXIT_BAD_SCRIPT));
    };
    if script == "--help" || script == "-h" {
        return None; // Asked of the program: the scripted CLI's own stands after SCRIPT.
    }
    let rest: Vec<OsString> = args.collect();
    Some(main(Path::new(&script), &rest))
}

/// Writes an executable named `claude` into `dir` that runs `script` through `PROGRAM lab cli`.
///
/// `program` is the `turnpass` program, `turnpass-lab`, or a test program that calls [`intercept`].
/// The script is stored beside it as `claude.script.json`, its counters as `claude.script.json.count`.
///
/// # Errors
///
/// Whatever the file system says; the wrapper is written by a child process, because a file that this
/// process holds open for writing while another thread forks cannot be executed (ETXTBSY).
pub fn install(dir: &Path, program: &Path, script: &Script) -> io::Result<PathBuf> {
    let file = dir.join("claude.script.json");
    std::fs::write(&file, script.to_json())?;
    install_file(dir, program, &file)
}

/// Like [`install`], for a script that is already a file.
///
/// # Errors
///
/// As [`install`].
pub fn install_file(dir: &Path, program: &Path, script: &Path) -> io::Result<PathBuf> {
    let quoted = |path: &Path| format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"));
    let text = format!(
        "#!/bin/sh\nexec {} lab cli {} \"$@\"\n",
        quoted(program),
        quoted(script)
    );
    let source = dir.join("claude.wrapper");
    std::fs::write(&source, text)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&source, mode)?;
    let target = dir.join("claude");
    let copied = Command::new("cp")
        .arg("-pf")
        .arg(&source)
        .arg(&target)
        .status()?;
    if !copied.success() {
        return Err(io::Error::other("cp could not write the claude wrapper"));
    }
    Ok(target)
}

/// The part of [`main`] that can fail before a run begins.
fn start(path: &Path, argv: Vec<String>) -> Result<u8, ScriptError> {
    let script = Script::load(path)?;
    if argv.iter().any(|arg| arg == "--version" || arg == "-v") {
        print(&format!("{} (Claude Code)\n", script.version));
        return Ok(0);
    }
    let counters = script::Counters::beside(path);
    // The real one takes its options before the command, too (2.1.294 to 2.1.332).
    let words = argv.iter().map(String::as_str);
    let command = words.skip_while(|word| word.starts_with("--setting-sources="));
    let kind = command.take(2).collect::<Vec<_>>();
    let run = match kind.as_slice() {
        ["auth", "status"] => Run::AuthStatus(script.auth_for(counters.next("auth")?)),
        ["auth", "login"] => Run::Steps(script.login.clone()),
        ["auth", "logout"] => Run::Steps(script.logout.clone()),
        _ => script.run_for(counters.next("runs")?),
    };
    let recorder = Recorder::open(script.record.as_deref(), &argv)
        .map_err(|error| ScriptError::at("record", error))?;
    let recorder = Arc::new(recorder);
    let context = player::Context {
        script_dir: path.parent().unwrap_or(Path::new(".")).to_path_buf(),
        version: script.version.clone(),
        argv,
        recorder: Arc::clone(&recorder),
    };
    let code = player::block_on(context, run)?;
    recorder.exit(code);
    Ok(code)
}

/// Writes to stdout; a closed pipe is the host's affair.
fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a line to stderr; a closed pipe is the host's affair.
fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}
