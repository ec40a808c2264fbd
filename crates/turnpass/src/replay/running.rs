//! One started process of a replay: its lines, its files, its marker of a violation. A value whose drop ends all of it.

use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncReadExt;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use crate::cli::launch::refused_option;
use crate::cli::private_dir::PrivateDir;
use crate::cli::starts::Turn as Start;
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ChildGroup, EndPolicy, Stdin, Stdout};
use crate::record::RawFile;
use crate::wire::lines::{LineSplitter, LineTooLong};

/// Longest line: one tool input is one line (2.1.332).
const LINE_BYTES: usize = 16 * 1024 * 1024;
/// Longest wait for the last words of a process that has ended.
const LAST_WORDS_LIMIT: std::time::Duration = std::time::Duration::from_millis(200);

/// The end of a process that asks nothing more: SIGTERM, so that the CLI removes its session file and key from its own
/// folder. It needs 35 to 65 ms (2.1.332), and more than half a second on a machine at fifteen times its load.
pub(crate) const ASK_TO_END: EndPolicy = EndPolicy {
    after_stdin_close: std::time::Duration::ZERO,
    after_terminate: std::time::Duration::from_secs(2),
};

/// Files that the tool server makes.
#[derive(Clone, Debug)]
pub(crate) struct Markers {
    /// Made once the CLI has the list.
    pub(crate) ready: PathBuf,
    /// Made when the CLI calls a tool.
    pub(crate) violation: PathBuf,
}

/// A started process.
#[derive(Debug)]
pub(crate) struct Running {
    group: ChildGroup,
    stdout: Stdout,
    lines: LineSplitter,
    ended: bool,
    raw: Option<RawFile>,
    markers: Option<Markers>,
    /// The right to be starting; given back when the service has begun to answer, or the process has failed.
    pub(crate) starting: Option<Start>,
    /// The private directory goes when this is dropped and the process is gone.
    keep: oneshot::Sender<()>,
    /// Ends when the files are removed, also after a drop.
    removed: JoinHandle<()>,
}

impl Running {
    /// Takes over a started process. Among `tasks` is its end from here on, so whoever waits for them waits for it too.
    pub(crate) fn new(
        (mut group, raw): (ChildGroup, Option<RawFile>),
        dir: PrivateDir,
        markers: Option<Markers>,
        starting: Start,
        tasks: &TaskTracker,
    ) -> Result<Self> {
        let gone = group.gone();
        let (keep, released) = oneshot::channel();
        let removed = tasks.spawn(async move {
            // A process that still runs could make files anew.
            gone.await;
            // Its owner looks for the marker first; an error means that the owner is gone.
            let _ = released.await;
            drop(dir);
        });
        let stdout = group
            .take_stdout()
            .ok_or_else(|| Error::new(ErrorCode::Internal, "a new process has no output"))?;
        Ok(Self {
            group,
            stdout,
            lines: LineSplitter::new(LINE_BYTES),
            ended: false,
            raw,
            markers,
            starting: Some(starting),
            keep,
            removed,
        })
    }

    /// Its input.
    pub(crate) fn stdin(&self) -> &Stdin {
        self.group.stdin()
    }

    /// The file that the tool server makes once the CLI has the list.
    pub(crate) fn ready_marker(&self) -> Option<&Path> {
        self.markers.as_ref().map(|markers| markers.ready.as_path())
    }

    /// The next line; `None` at the end of its output.
    ///
    /// Dropping the future loses nothing.
    ///
    /// # Errors
    ///
    /// `line_too_long`.
    pub(crate) async fn line(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(line) = self.lines.next_line().map_err(|e| too_long(&e))? {
                return Ok(Some(line));
            }
            if self.ended {
                return Ok(self.lines.finish());
            }
            let buffer = self.lines.read_buf();
            let before = buffer.len();
            let read = self.stdout.read_buf::<BytesMut>(buffer).await;
            if let Some(raw) = &mut self.raw {
                raw.write(&buffer[before..]);
            }
            self.ended = !matches!(read, Ok(1..));
        }
    }

    /// Why its output ended.
    pub(crate) async fn gone(&self) -> Error {
        let words = self.group.last_words(LAST_WORDS_LIMIT).await;
        if let Some(error) = refused_option(&words) {
            return error;
        }
        let how = match self.group.exit() {
            Some(exit) => format!("ended with {exit}"),
            None => "closed its output".to_owned(),
        };
        let what = format!("the CLI {how} before the answer was complete");
        Error::new(ErrorCode::ProcessExit, what)
    }

    /// Ends the whole group, waits for that, and removes its files. Says whether the tool server was called.
    ///
    /// # Errors
    ///
    /// `process_cleanup`.
    pub(crate) async fn end(self, policy: EndPolicy) -> Result<bool> {
        self.group.end(policy).await?;
        let violated = self
            .markers
            .as_ref()
            .is_some_and(|markers| markers.violation.exists());
        drop(self.keep);
        // The task is dropped early only with its runtime, and the files go with it.
        let _ = self.removed.await;
        Ok(violated)
    }
}

fn too_long(error: &LineTooLong) -> Error {
    Error::new(ErrorCode::LineTooLong, error.to_string())
}
