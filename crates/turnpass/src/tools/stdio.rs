//! The stdio carrier: a process of its own, started by the CLI as `turnpass mcp-stdio`.
//!
//! It executes nothing and knows nothing but the catalogue file. It ends with its input, so it never outlives the CLI.

use std::fs::OpenOptions;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};

use super::catalogue::CatalogueFile;
use super::mcp::{self, Occurrence, Policy, Server};
use crate::error::{Error, ErrorCode, Result};

/// Longest message that is read, in bytes. The CLI's requests to a server that executes nothing are small; one with a call's
/// arguments may be larger and gets an error, which is what it would get anyway.
pub const LINE_BYTES: usize = 1024 * 1024;

/// Largest catalogue file that is read, in bytes: the catalogue's own limit and its frame.
pub const FILE_BYTES: u64 = 3 * 1024 * 1024;

/// What the hidden subcommand was told.
#[derive(Clone, Debug)]
pub struct Args {
    /// The file of [`Catalogue::file_json`](super::Catalogue::file_json).
    pub catalogue: PathBuf,
    /// Inert or proposing.
    pub policy: Policy,
    /// Made once the list has been written to the CLI.
    pub ready: Option<PathBuf>,
    /// Made before a violation is answered.
    pub violation: Option<PathBuf>,
}

/// Marker files; each is made once, empty, readable by the owner alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Markers<'a> {
    /// Made once the list has been written to the CLI.
    pub ready: Option<&'a Path>,
    /// Made before a violation is answered.
    pub violation: Option<&'a Path>,
}

/// Serves this process's stdin and stdout until the input ends.
///
/// # Errors
///
/// `mcp_startup` when the catalogue file cannot be read or the policy needs a host; `process_exit` when input, output or a
/// marker fails.
pub fn serve(args: &Args) -> Result<()> {
    let startup = |why: String| Error::new(ErrorCode::McpStartup, why);
    if args.policy == Policy::Answering {
        return Err(startup(
            "a process of its own cannot answer calls".to_owned(),
        ));
    }
    let size = std::fs::metadata(&args.catalogue)
        .map_err(|error| startup(format!("the catalogue file: {error}")))?
        .len();
    if size > FILE_BYTES {
        return Err(startup(format!(
            "the catalogue file has {size} bytes, at most {FILE_BYTES} are read"
        )));
    }
    let bytes = std::fs::read(&args.catalogue)
        .map_err(|error| startup(format!("the catalogue file: {error}")))?;
    let mut server = Server::from_file(CatalogueFile::read(&bytes)?, args.policy);
    let markers = Markers {
        ready: args.ready.as_deref(),
        violation: args.violation.as_deref(),
    };
    serve_stream(
        &mut io::stdin().lock(),
        &mut io::stdout().lock(),
        &mut server,
        markers,
    )
    .map_err(|error| Error::new(ErrorCode::ProcessExit, format!("mcp-stdio: {error}")))
}

/// Serves lines until the input ends. Blocking.
///
/// # Errors
///
/// Those of the reader, the writer and the markers' files.
pub fn serve_stream(
    reader: &mut impl BufRead,
    writer: &mut impl Write,
    server: &mut Server,
    markers: Markers<'_>,
) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        match read_line(reader, &mut line)? {
            Line::End => return Ok(()),
            Line::TooLong => write_line(writer, &mcp::too_long(LINE_BYTES))?,
            Line::Whole if line.trim_ascii().is_empty() => {}
            Line::Whole => {
                let reply = server.handle(&line);
                if matches!(reply.occurrence, Occurrence::Violation(_)) {
                    mark(markers.violation)?;
                }
                if let Some(message) = &reply.message {
                    write_line(writer, message)?;
                }
                if reply.occurrence == Occurrence::Listed {
                    mark(markers.ready)?;
                }
            }
        }
    }
}

enum Line {
    Whole,
    TooLong,
    End,
}

/// Reads up to the next line feed. Of a line above [`LINE_BYTES`] the rest is read and thrown away. A last line without
/// line feed counts as one.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Line> {
    line.clear();
    let mut too_long = false;
    let mut seen = false;
    loop {
        let chunk = match reader.fill_buf() {
            Ok(chunk) => chunk,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if chunk.is_empty() {
            return Ok(match (seen, too_long) {
                (false, _) => Line::End,
                (true, false) => Line::Whole,
                (true, true) => Line::TooLong,
            });
        }
        seen = true;
        let end = memchr::memchr(b'\n', chunk);
        let part = &chunk[..end.unwrap_or(chunk.len())];
        if line.len() + part.len() > LINE_BYTES {
            too_long = true;
            line.clear();
        }
        if !too_long {
            line.extend_from_slice(part);
        }
        let used = end.map_or(chunk.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            return Ok(if too_long { Line::TooLong } else { Line::Whole });
        }
    }
}

fn write_line(writer: &mut impl Write, message: &[u8]) -> io::Result<()> {
    writer.write_all(message)?;
    writer.write_all(b"\n")?;
    writer.flush()
}

fn mark(path: Option<&Path>) -> io::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}
