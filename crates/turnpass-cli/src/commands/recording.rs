//! `turnpass lab replay-recording` and `turnpass lab redact`: what is done with a recording of the CLI.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use turnpass::record::{RAW_FILE_BYTES, Replay, Replayed, Standing};

use crate::exit::{Exit, Fault};
use crate::terminal::visible;

/// Read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// The arguments of `replay-recording`.
#[derive(clap::Args, Debug)]
pub(crate) struct ReplayArgs {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Lines of the CLI, or rows of a laboratory recording
    file: PathBuf,
}

/// The arguments of `redact`.
#[derive(clap::Args, Debug)]
pub(crate) struct RedactArgs {
    /// Lines of the CLI, or rows of a laboratory recording
    file: PathBuf,
}

/// Runs `replay-recording`. Fails when this version cannot read the recording.
pub(crate) fn replay(args: ReplayArgs) -> Result<Exit, Fault> {
    let mut file = open(&args.file)?;
    let mut replay = Replay::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => replay.push(&piece[..read]),
            Err(error) => return Err(unreadable(&args.file, &error)),
        }
    }
    let replayed = replay.finish();
    let text = match args.json {
        true => serde_json::to_string(&replayed).unwrap_or_default() + "\n",
        false => told(&replayed),
    };
    super::print(&text)?;
    Ok(match replayed.standing {
        Standing::Decodes | Standing::DecodesWithUnknown => Exit::Done,
        _ => Exit::Failed,
    })
}

/// Runs `redact`.
pub(crate) fn redact(args: &RedactArgs) -> Result<Exit, Fault> {
    let file = open(&args.file)?;
    let mut bytes = Vec::new();
    let read = file.take(RAW_FILE_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(&args.file, &error))?;
    if bytes.len() as u64 > RAW_FILE_BYTES {
        return Err(Fault::usage(
            format!(
                "{} is larger than {RAW_FILE_BYTES} bytes",
                args.file.display()
            ),
            "Cut out the lines that matter.",
        ));
    }
    let redacted = turnpass::record::redact(&bytes);
    let exit = super::print(&String::from_utf8_lossy(&redacted.bytes))?;
    let (kept, dropped) = (redacted.kept, redacted.dropped);
    // Standard error may be closed; what was asked for is on standard output.
    let _ = writeln!(
        std::io::stderr(),
        "{kept} lines are kept and {dropped} left out; look through them before you share them"
    );
    Ok(exit)
}

fn open(path: &Path) -> Result<File, Fault> {
    File::open(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Fault {
    let path = path.display();
    Fault::usage(
        format!("{path} cannot be read: {error}"),
        "Name a recording: a file of TURNPASS_RECORD, or one of the laboratory.",
    )
}

fn told(replayed: &Replayed) -> String {
    let mut text = format!("{}\n\n", replayed.standing.as_str());
    let mut row = |name: &str, value: String| {
        if !value.is_empty() && value != "0" {
            text += &format!("{name:<20} {}\n", visible(&value));
        }
    };
    let counts = |counts: &std::collections::BTreeMap<String, u64>| {
        let counts = counts.iter().map(|(name, count)| format!("{name} {count}"));
        counts.collect::<Vec<_>>().join(", ")
    };
    row("lines", replayed.lines.to_string());
    row("rows passed over", replayed.other_rows.to_string());
    row("records", counts(&replayed.records));
    row("unknown", counts(&replayed.unknown));
    row("no records", counts(&replayed.noise));
    row("messages", replayed.messages.to_string());
    row("broken off", replayed.unfinished.to_string());
    row("events", counts(&replayed.events));
    row("turns", replayed.verdicts.join(", "));
    row("output tokens", replayed.tokens.output.to_string());
    row("problems", replayed.problem_count.to_string());
    for problem in &replayed.problems {
        row("", problem.clone());
    }
    text
}
