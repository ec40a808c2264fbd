//! Questions to a CLI process that is started only to be asked: control requests, no user line, so no generation.
//!
//! Used for what only a process can tell: use and limits, and the models. Such a process reaches its account by itself and
//! not through a relay, since `get_usage` asks a fixed address and a relay would only hide that (2.1.332).

use std::time::Duration;

use tokio::io::AsyncReadExt;

use super::launch::{Launch, refused_option};
use super::private_dir::PrivateDir;
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ChildGroup, EndPolicy, StdinError, Stdout};
use crate::wire::control::{ControlRequest, ReplyError, RequestIds, control_request};
use crate::wire::lines::LineSplitter;
use crate::wire::stream_json::{ControlOutcome, Record, decode};
use crate::wire::surrogates;

/// Longest line of an answer. `initialize` lists commands, agents and models in 20 to 60 KB (2.1.294 to 2.1.332).
pub const ANSWER_LINE_BYTES: usize = 4 * 1024 * 1024;

/// The end of a process that was only asked. It is idle, ends within 120 ms of the end of its input (2.1.332), and may
/// still write the reading that it shares with other processes.
pub const AFTER_ANSWER: EndPolicy = EndPolicy {
    after_stdin_close: Duration::from_secs(1),
    after_terminate: Duration::from_millis(500),
};

/// Longest wait for what a process that ended has to say about it.
const END_LIMIT: Duration = Duration::from_millis(200);

/// Between two looks at it.
const END_PAUSE: Duration = Duration::from_millis(5);

/// A process that is asked. Dropping it kills its group at once.
#[derive(Debug)]
pub struct Inquiry {
    group: ChildGroup,
    stdout: Stdout,
    lines: LineSplitter,
    ids: RequestIds,
    /// Removed after the process, since fields are dropped in order.
    _dir: PrivateDir,
}

/// Why a question has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NoAnswer {
    /// The CLI refused it; another question may be answered.
    #[error("the CLI refused the question: {0}")]
    Refused(String),
    /// The process can answer nothing any more.
    #[error("{0}")]
    Gone(Error),
}

impl From<NoAnswer> for Error {
    fn from(error: NoAnswer) -> Self {
        match error {
            NoAnswer::Gone(error) => error,
            NoAnswer::Refused(_) => Self::new(ErrorCode::VersionIncompatible, error.to_string()),
        }
    }
}

impl Inquiry {
    /// Starts the process of a launch that was made for `dir`.
    ///
    /// Has to be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// Those of [`Launch::start`].
    pub fn start(launch: Launch, dir: PrivateDir) -> Result<Self> {
        let mut group = launch.start(&dir)?;
        let stdout = group
            .take_stdout()
            .ok_or_else(|| Error::new(ErrorCode::Internal, "a process has no standard output"))?;
        Ok(Self {
            group,
            stdout,
            lines: LineSplitter::new(ANSWER_LINE_BYTES),
            ids: RequestIds::new("turnpass"),
            _dir: dir,
        })
    }

    /// Asks one thing and waits at most `limit` for the payload of the answer, which is empty if there is none.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`]; `control_timeout` after the limit, `process_exit` when the process ended, `version_incompatible` when
    /// it refused an option of ours.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the question; an answer that still comes is skipped by the next one.
    pub async fn ask(
        &mut self,
        request: &ControlRequest<'_>,
        limit: Duration,
    ) -> Result<String, NoAnswer> {
        let id = self.ids.next_id();
        let line = control_request(&id, request);
        match self.group.stdin().write(line.into_bytes()) {
            Ok(()) => {}
            // What the process was about to say of its end is still to be read.
            Err(StdinError::Closed) => {}
            Err(error) => return Err(NoAnswer::Gone(error.into())),
        }
        match tokio::time::timeout(limit, self.answer(&id)).await {
            Ok(answer) => answer,
            Err(_) => {
                let what = format!("no answer to a control request within {limit:?}");
                Err(NoAnswer::Gone(Error::new(ErrorCode::ControlTimeout, what)))
            }
        }
    }

    /// Ends the process in order and waits for it, within the policy's bounds.
    ///
    /// # Errors
    ///
    /// `process_cleanup`.
    pub async fn end(self, policy: EndPolicy) -> Result<()> {
        self.group.end(policy).await.map(|_| ())
    }

    async fn answer(&mut self, id: &str) -> Result<String, NoAnswer> {
        loop {
            while let Some(line) = self.lines.next_line().map_err(|error| {
                NoAnswer::Gone(Error::new(ErrorCode::LineTooLong, error.to_string()))
            })? {
                // Whatever else it prints means nothing here: no turn runs.
                let line = surrogates::repair(&line);
                if let Ok(Record::ControlResponse {
                    request_id,
                    outcome,
                }) = decode(&line)
                    && request_id.as_str() == id
                {
                    return payload(&outcome);
                }
            }
            // A read error is an early end.
            match self.stdout.read_buf(self.lines.read_buf()).await {
                Ok(1..) => {}
                _ => return Err(NoAnswer::Gone(self.ended().await)),
            }
        }
    }

    async fn ended(&self) -> Error {
        // The pipes end before the exit is known and the last of standard error is read.
        let known = async {
            self.group.wait().await;
            while self.group.stderr_tail().is_empty() {
                tokio::time::sleep(END_PAUSE).await;
            }
        };
        // A process that ended without a word is told as such after the limit.
        let _ = tokio::time::timeout(END_LIMIT, known).await;
        refused_option(&self.group.stderr_tail()).unwrap_or_else(|| {
            let how = self.group.exit().map_or_else(
                || "closed its output".to_owned(),
                |exit| format!("ended with {exit}"),
            );
            Error::new(
                ErrorCode::ProcessExit,
                format!("the CLI {how} before it answered a control request"),
            )
        })
    }
}

fn payload(outcome: &ControlOutcome<'_>) -> Result<String, NoAnswer> {
    match outcome {
        ControlOutcome::Success { response } => {
            Ok(response.map_or_else(String::new, |payload| payload.get().to_owned()))
        }
        ControlOutcome::Error { .. } => {
            let refused = crate::wire::control::read_reply::<()>(outcome);
            let said = match refused {
                Err(ReplyError::Refused {
                    error_code: Some(code),
                    ..
                }) => code,
                _ => "no code".to_owned(),
            };
            Err(NoAnswer::Refused(said))
        }
    }
}
