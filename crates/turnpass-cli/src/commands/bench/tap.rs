//! A tap between turnpass and the CLI, real or scripted: it passes everything on and notes when it did.
//!
//! turnpass's own share of a request is what lies before the placeholder line reaches the CLI and after the CLI's request
//! is complete. A tap is a program in the place of the CLI that starts the CLI with the relay's address exchanged for one
//! of its own. It notes the instant at which it has read the whole line, and the instant at which it has read the CLI's
//! whole request, each before it passes them on. Both clocks are the system's monotonic one. The tap's own work lies
//! between the two instants, except for one hop from the tap to the lane, so what is told is a little more than the truth.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::exit::{Exit, Fault};

/// What stands in the address of a lane before its port.
const LOOPBACK: &str = "127.0.0.1:";

/// The arguments of the hidden command.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Where to note the instants
    #[arg(long, value_name = "FILE")]
    log: PathBuf,
    /// The CLI and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    command: Vec<OsString>,
}

/// What a tap noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The user line was read whole.
    Line,
    /// An answer to the CLI, such as a tool's result, was read whole.
    Answer,
    /// The CLI's request was read whole.
    Post,
}

/// One note.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) kind: Kind,
    pub(super) at: Instant,
}

/// The taps of one stage.
#[derive(Debug)]
pub(super) struct Taps {
    log: PathBuf,
    /// The same moment on both clocks.
    zero: (Instant, u64),
}

impl Taps {
    /// Writes a `claude` into `folder` that is a tap before `claude`, and gives its path.
    pub(super) fn install(folder: &Path, claude: &Path) -> Result<(Self, PathBuf), Fault> {
        let failed =
            |error: std::io::Error| Fault::system(format!("no tap: {error}"), "Try again.");
        let program = std::env::current_exe().map_err(failed)?;
        let log = folder.join("stamps");
        let quoted = |path: &Path| format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"));
        let script = format!(
            "#!/bin/sh\nexec {} bench-tap --log {} -- {} \"$@\"\n",
            quoted(&program),
            quoted(&log),
            quoted(claude)
        );
        let (written, target) = (folder.join("claude.new"), folder.join("claude"));
        std::fs::write(&written, script).map_err(failed)?;
        std::fs::set_permissions(&written, PermissionsExt::from_mode(0o755)).map_err(failed)?;
        // Copied by a child, as in `stage`: a file that is open for writing while another thread forks cannot be executed.
        let copied = Command::new("cp")
            .arg("-p")
            .arg(&written)
            .arg(&target)
            .status();
        match copied.map_err(failed)?.success() {
            true => {}
            false => return Err(failed(std::io::Error::other("cp could not write it"))),
        }
        let zero = (Instant::now(), nanoseconds());
        Ok((Self { log, zero }, target))
    }

    /// Every note so far, in the order of time.
    pub(super) fn stamps(&self) -> Vec<Stamp> {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let mut stamps: Vec<_> = text.lines().filter_map(|line| self.read(line)).collect();
        stamps.sort_unstable_by_key(|stamp| stamp.at);
        stamps
    }

    fn read(&self, line: &str) -> Option<Stamp> {
        let (word, nanoseconds) = line.split_once(' ')?;
        let kind = match word {
            "line" => Kind::Line,
            "answer" => Kind::Answer,
            "post" => Kind::Post,
            _ => return None,
        };
        let since = nanoseconds.parse::<u64>().ok()?.checked_sub(self.zero.1)?;
        let at = self.zero.0 + Duration::from_nanos(since);
        Some(Stamp { kind, at })
    }
}

/// The monotonic clock, which is the same in every process.
fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or_default() * 1_000_000_000
        + u64::try_from(now.tv_nsec).unwrap_or_default()
}

/// Runs the hidden command: one CLI behind a tap.
pub(crate) fn run(args: Args) -> Result<Exit, Fault> {
    let failed =
        |error: std::io::Error| Fault::system(format!("the tap failed: {error}"), "Try again.");
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&args.log)
        .map_err(failed)?;
    let mut child = start(&args.command, &Arc::new(log)).map_err(failed)?;
    let status = child.wait().map_err(failed)?;
    let code = status.code().unwrap_or(1);
    // The CLI's own code is what turnpass judges; the threads of the tap end with it.
    std::process::exit(code);
}

fn start(command: &[OsString], log: &Arc<File>) -> std::io::Result<Child> {
    let [program, args @ ..] = command else {
        return Err(std::io::Error::other("no command"));
    };
    let mut args = args.to_vec();
    let mut child = Command::new(program);
    if let Some(url) = std::env::var("ANTHROPIC_BASE_URL").ok()
        && let Some(port) = port_of(&url)
    {
        let listener = TcpListener::bind((LOOPBACK.trim_end_matches(':'), 0))?;
        let own = listener.local_addr()?.port();
        child.env("ANTHROPIC_BASE_URL", exchanged(&url, port, own));
        exchange_settings(&mut args, port, own)?;
        let log = Arc::clone(log);
        std::thread::spawn(move || accept(&listener, port, own, &log));
    }
    let mut child = child.args(&args).stdin(Stdio::piped()).spawn()?;
    if let Some(stdin) = child.stdin.take() {
        let log = Arc::clone(log);
        // When our input ends, the pipe to the CLI is closed with it.
        std::thread::spawn(move || pass_lines(stdin, &log));
    }
    Ok(child)
}

fn port_of(url: &str) -> Option<u16> {
    let (_, rest) = url.split_once(LOOPBACK)?;
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..digits].parse().ok()
}

fn exchanged(text: &str, from: u16, to: u16) -> String {
    text.replace(&format!("{LOOPBACK}{from}"), &format!("{LOOPBACK}{to}"))
}

/// The address is in the settings as well, in a file or on the command line.
fn exchange_settings(args: &mut [OsString], from: u16, to: u16) -> std::io::Result<()> {
    let Some(at) = args.iter().position(|arg| arg == "--settings") else {
        return Ok(());
    };
    let Some(settings) = args.get_mut(at + 1) else {
        return Ok(());
    };
    let text = settings.to_string_lossy().into_owned();
    if text.trim_start().starts_with('{') {
        *settings = exchanged(&text, from, to).into();
        return Ok(());
    }
    let path = format!("{text}.tap");
    std::fs::write(&path, exchanged(&std::fs::read_to_string(&text)?, from, to))?;
    *settings = path.into();
    Ok(())
}

fn pass_lines(mut cli: impl Write, log: &File) {
    let mut ours = BufReader::with_capacity(64 * 1024, std::io::stdin().lock());
    let mut line = Vec::new();
    loop {
        line.clear();
        if ours.read_until(b'\n', &mut line).unwrap_or(0) == 0 {
            return;
        }
        let kinds: [(&[u8], _); 2] = [
            (b"{\"type\":\"user\"", "line"),
            (b"{\"type\":\"control_response\"", "answer"),
        ];
        let kind = kinds.iter().find(|(begin, _)| line.starts_with(begin));
        let noted = kind.map(|(_, kind)| (*kind, nanoseconds()));
        if cli.write_all(&line).and_then(|()| cli.flush()).is_err() {
            return;
        }
        if let Some((kind, at)) = noted {
            note(log, kind, at);
        }
    }
}

fn accept(listener: &TcpListener, port: u16, own: u16, log: &Arc<File>) {
    while let Ok((cli, _)) = listener.accept() {
        let log = Arc::clone(log);
        std::thread::spawn(move || {
            // A connection that breaks is the CLI's or the relay's affair, and both see it.
            let _ = pass_requests(&cli, port, own, &log);
            let _ = cli.shutdown(Shutdown::Both);
        });
    }
}

fn pass_requests(cli: &TcpStream, port: u16, own: u16, log: &File) -> std::io::Result<()> {
    let lane = TcpStream::connect((LOOPBACK.trim_end_matches(':'), port))?;
    lane.set_nodelay(true)?;
    cli.set_nodelay(true)?;
    let (mut from, mut to) = (lane.try_clone()?, cli.try_clone()?);
    std::thread::spawn(move || {
        // Ends with either side; the reading loop below sees it too.
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut requests = BufReader::with_capacity(64 * 1024, cli);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if requests.read_until(b'\n', &mut head)? == 0 {
                return lane.shutdown(Shutdown::Both);
            }
        }
        let text = String::from_utf8_lossy(&head).into_owned();
        let mut whole = exchanged(&text, own, port).into_bytes();
        let headed = whole.len();
        whole.resize(headed + content_length(&text), 0);
        requests.read_exact(&mut whole[headed..])?;
        let at = nanoseconds();
        (&lane).write_all(&whole)?;
        note(log, "post", at);
    }
}

fn content_length(head: &str) -> usize {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

/// One short write, which the system does whole or not at all.
fn note(mut log: &File, what: &str, at: u64) {
    // A note that cannot be written is missed by the bench, which says so.
    let _ = log.write_all(format!("{what} {at}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_exchanged_wherever_it_stands() {
        let url = "http://127.0.0.1:4321/secret";
        assert_eq!(port_of(url), Some(4321));
        assert_eq!(port_of("http://127.0.0.1:80"), Some(80));
        assert_eq!(port_of("https://api.example"), None);
        let head = "POST /x HTTP/1.1\r\nHost: 127.0.0.1:4321\r\nContent-Length: 7\r\n\r\n";
        assert!(exchanged(head, 4321, 5).contains("Host: 127.0.0.1:5\r\n"));
        assert_eq!(content_length(head), 7);
        let mut args = ["--settings", "{\"u\":\"127.0.0.1:4321/s\"}"].map(OsString::from);
        exchange_settings(&mut args, 4321, 5).unwrap();
        assert_eq!(args[1], "{\"u\":\"127.0.0.1:5/s\"}");
    }

    #[test]
    fn notes_are_read_back_in_order_on_the_clock_of_the_bench() {
        let folder = tempfile::tempdir().unwrap();
        let taps = Taps {
            log: folder.path().join("stamps"),
            zero: (Instant::now(), nanoseconds()),
        };
        let log = File::create(&taps.log).unwrap();
        let later = taps.zero.1 + 2_000_000;
        note(&log, "post", later);
        note(&log, "line", later - 1_000_000);
        let stamps = taps.stamps();
        assert_eq!(stamps[0].kind, Kind::Line);
        assert_eq!(stamps[1].at - stamps[0].at, Duration::from_millis(1));
        assert_eq!(stamps[1].at - taps.zero.0, Duration::from_millis(2));
    }
}
