//! One run of the CLI's own login, and what is read of it.

use std::time::Duration;

use tokio::io::AsyncReadExt;

use super::{dialogue, failed};
use crate::cli::installed::Installed;
use crate::cli::private_dir::PrivateDir;
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ChildGroup, EndPolicy, Exit, Stdout};

/// The arguments of it.
const LOGIN_ARGUMENTS: &[&str] = &["auth", "login", "--claudeai"];

/// From the start of the CLI's login to its link; 0.3 s were measured (2.1.332).
pub const LINK_LIMIT: Duration = Duration::from_secs(30);

/// From the code to the CLI's verdict: it asks the service.
pub const VERDICT_LIMIT: Duration = Duration::from_secs(60);

/// Longest wait for the last words of a login that has ended.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(200);

/// What the CLI made of a code.
pub(super) enum Verdict {
    SignedIn,
    Refused,
}

/// One run of the CLI's login.
pub(super) struct Process {
    pub(super) group: ChildGroup,
    stdout: Stdout,
    _dir: PrivateDir,
}

impl Process {
    pub(super) async fn start(installed: &Installed) -> Result<Self> {
        let (mut group, dir) = installed.command(LOGIN_ARGUMENTS).await?;
        let stdout = group
            .take_stdout()
            .ok_or_else(|| Error::new(ErrorCode::Internal, "a process has no standard output"))?;
        Ok(Self {
            group,
            stdout,
            _dir: dir,
        })
    }

    /// Ends it, with all that it started, and removes its files. After a verdict it has ended by itself.
    pub(super) async fn end(self) {
        // One that cannot be ended is its owner's to report; the flow's outcome is another matter.
        let _ = self.group.end(EndPolicy::KILL).await;
    }

    /// Reads until the CLI waits for the code behind its link.
    pub(super) async fn link(&mut self) -> Result<String> {
        let mut said = Vec::new();
        let found = async {
            loop {
                let mut piece = [0; 4096];
                let read = self.stdout.read(&mut piece).await.unwrap_or(0);
                if read == 0 {
                    return Err(failed("the CLI's login ended before it showed a link"));
                }
                said.extend_from_slice(&piece[..read]);
                if said.len() > dialogue::DIALOGUE_BYTES {
                    return Err(failed("the CLI's login showed no link in its first 64 KiB"));
                }
                // A character that is not whole yet stands after the link.
                let text = String::from_utf8_lossy(&said);
                if let Some(link) = dialogue::link(&text) {
                    return Ok(link.to_owned());
                }
            }
        };
        match tokio::time::timeout(LINK_LIMIT, found).await {
            Ok(found) => found,
            Err(_) => Err(failed(&format!(
                "the CLI's login showed no link within {} s",
                LINK_LIMIT.as_secs()
            ))),
        }
    }

    /// Passes the code on and waits for the verdict.
    pub(super) async fn pass(&mut self, code: &str) -> Result<Verdict> {
        let Self { group, stdout, .. } = self;
        group.stdin().write(format!("{code}\n").into_bytes())?;
        let exit = group.wait();
        let mut said = Vec::new();
        let ended = async {
            // It is read to its end so that the CLI never waits for us, and its beginning is kept.
            let mut piece = [0; 4096];
            let drained = async {
                while let Ok(read @ 1..) = stdout.read(&mut piece).await {
                    let room = dialogue::DIALOGUE_BYTES.saturating_sub(said.len());
                    said.extend_from_slice(&piece[..read.min(room)]);
                }
            };
            let (exit, ()) = tokio::join!(exit, drained);
            exit
        };
        let exit = tokio::time::timeout(VERDICT_LIMIT, ended).await;
        let mut words = group.last_words(LAST_WORDS_LIMIT).await;
        words.push_str(&String::from_utf8_lossy(&said));
        match exit {
            Ok(exit) if exit.is_success() => Ok(Verdict::SignedIn),
            Ok(Exit::Code(_)) if dialogue::is_unreachable(&words) => Err(Error::new(
                ErrorCode::UpstreamUnreachable,
                "the CLI's login could not reach the service",
            )),
            Ok(Exit::Code(_)) => Ok(Verdict::Refused),
            Ok(exit) => Err(failed(&format!("the CLI's login ended with {exit}"))),
            Err(_) => Err(failed(&format!(
                "the CLI did not take the code within {} s",
                VERDICT_LIMIT.as_secs()
            ))),
        }
    }
}
