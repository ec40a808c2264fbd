//! A question to the CLI by a short command: bounded in time and output, and ended with its whole group.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::AsyncReadExt;

use super::environment::Environment;
use crate::error::Error;
use crate::process::{ChildGroup, EndPolicy, Exit, Spawn, StdinMode};

/// Longest answer that is read; the pool system's cap for such commands.
pub const ANSWER_BYTES: usize = 1024 * 1024;

/// A short command.
#[derive(Clone, Debug)]
pub struct Question {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub argv: Vec<OsString>,
    /// The environment, the same as that of the processes that the answer is about.
    pub environment: Environment,
    /// The working directory.
    pub cwd: PathBuf,
    /// Longest time until the answer is complete.
    pub limit: Duration,
}

impl Question {
    /// A command of the CLI, asked in `cwd`.
    pub fn new(
        program: &Path,
        argv: &[&str],
        environment: &Environment,
        cwd: &Path,
        limit: Duration,
    ) -> Self {
        Self {
            program: program.to_owned(),
            argv: argv.iter().map(OsString::from).collect(),
            environment: environment.clone(),
            cwd: cwd.to_owned(),
            limit,
        }
    }
}

/// What the command said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// How it ended.
    pub exit: Exit,
    /// Its standard output; bytes that are no UTF-8 are U+FFFD.
    pub stdout: String,
    /// The end of its standard error, for diagnosis only.
    pub stderr_tail: String,
}

/// Why there is no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unanswered {
    /// It could not be started.
    #[error("{0}")]
    NotStarted(Error),
    /// It took too long and was killed.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// It said too much and was killed.
    #[error("an answer of more than {ANSWER_BYTES} bytes")]
    TooLong,
}

/// Asks and waits. Whatever happens, the command and all that it started are gone afterwards.
///
/// Dropping the future kills the group at once.
///
/// # Errors
///
/// When there is no answer.
pub async fn ask(question: Question) -> Result<Answer, Unanswered> {
    let mut child = ChildGroup::spawn(&Spawn {
        program: question.program,
        argv: question.argv,
        env: question.environment.into_pairs(),
        cwd: question.cwd,
        stdin: StdinMode::Null,
        orphaned_dir: None,
    })
    .map_err(Unanswered::NotStarted)?;
    let stdout = child.take_stdout();
    let answer = tokio::time::timeout(question.limit, async {
        let mut bytes = Vec::new();
        if let Some(stdout) = stdout {
            // One byte more than allowed tells a full answer from one that goes on. A read error is an early end.
            let _ = stdout
                .take(ANSWER_BYTES as u64 + 1)
                .read_to_end(&mut bytes)
                .await;
        }
        if bytes.len() > ANSWER_BYTES {
            return Err(Unanswered::TooLong);
        }
        Ok((bytes, child.wait().await))
    })
    .await
    .unwrap_or(Err(Unanswered::Late(question.limit)));
    let stderr_tail = child.stderr_tail();
    // A process that even SIGKILL does not end is reported by the later ones; here only the answer counts.
    let _ = child.end(EndPolicy::KILL).await;
    let (bytes, exit) = answer?;
    Ok(Answer {
        exit,
        stdout: String::from_utf8_lossy(&bytes).into_owned(),
        stderr_tail,
    })
}
