//! `claude --version`: the number, the floor, what the file was certified to do, and a cache that sees an update.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::ask::{Answer, Question, Unanswered, ask};
use super::environment::Environment;
use crate::certify::{Certificates, Standing};
use crate::error::{Error, ErrorCode, Result};
use crate::process::Exit;

/// Oldest version that is accepted; the pool document's.
pub const FLOOR: Version = Version::new(2, 1, 294);

/// Longest wait for the answer. It takes about 0.1 s; a machine under load may need many times that.
pub const VERSION_LIMIT: Duration = Duration::from_secs(10);

/// A version by its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    major: u64,
    minor: u64,
    patch: u64,
}

impl Version {
    /// The version of three numbers.
    pub const fn new(major: u64, minor: u64, patch: u64) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// The first `x.y.z` in a text, whatever stands around it.
    pub fn find(text: &str) -> Option<Self> {
        let runs = text.split(|c: char| !c.is_ascii_digit() && c != '.');
        runs.into_iter().find_map(|run| {
            let mut parts = run.split('.').map(|part| part.parse().ok());
            Some(Self::new(parts.next()??, parts.next()??, parts.next()??))
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Reads the answer to `--version` and holds it against the floor.
///
/// # Errors
///
/// `version_too_old` that names both versions, `version_invalid`, `executable_unusable` for a program that fails, or
/// what kept it from starting.
pub fn judge(path: &Path, answer: &Result<Answer, Unanswered>) -> Result<Version> {
    let path = path.display();
    let answer = match answer {
        Ok(answer) => answer,
        Err(Unanswered::NotStarted(error)) => return Err(error.clone()),
        Err(other) => {
            return Err(Error::new(
                ErrorCode::VersionInvalid,
                format!("`{path} --version` gave {other}"),
            ));
        }
    };
    if !answer.exit.is_success() {
        let why = match answer.exit {
            Exit::Code(127) => " (its interpreter was not found)",
            Exit::Code(126) => " (its interpreter may not be executed)",
            _ => "",
        };
        return Err(Error::new(
            ErrorCode::ExecutableUnusable,
            format!(
                "{path} is installed but not runnable: `--version` ended with {}{why}",
                answer.exit
            ),
        ));
    }
    let Some(version) = Version::find(&answer.stdout) else {
        return Err(Error::new(
            ErrorCode::VersionInvalid,
            format!("`{path} --version` printed no version"),
        ));
    };
    if version < FLOOR {
        return Err(Error::new(
            ErrorCode::VersionTooOld,
            format!("{path} is version {version}, at least {FLOOR} is needed"),
        ));
    }
    Ok(version)
}

/// What tells one state of a program file from the next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    path: PathBuf,
    modified: Option<SystemTime>,
    bytes: u64,
}

impl Identity {
    fn of(program: &Path) -> Option<Self> {
        let path = fs::canonicalize(program).ok()?;
        let meta = fs::metadata(&path).ok()?;
        Some(Self {
            modified: meta.modified().ok(),
            bytes: meta.len(),
            path,
        })
    }
}

/// What is known of a program file as it is.
#[derive(Clone, Debug)]
pub struct Known {
    /// Its version, at least [`FLOOR`].
    pub version: Version,
    /// What it was certified to do.
    pub standing: Arc<Standing>,
}

/// Versions and standings of program files that were asked before. An update changes path, time or size and is asked anew.
#[derive(Debug, Default)]
pub struct Versions {
    /// One entry a path, so it stays as small as the number of installed programs.
    known: Mutex<HashMap<PathBuf, (Identity, Known)>>,
    certificates: Option<Certificates>,
}

impl Versions {
    /// With the certificates that are kept in this directory.
    pub fn with_certificates(state_dir: Option<&Path>) -> Self {
        Self {
            known: Mutex::default(),
            certificates: state_dir.map(Certificates::new),
        }
    }

    /// The version of a program, at least [`FLOOR`], and its standing, which is looked up on a thread for such work. Only
    /// successes are remembered. A certificate that is made later counts once the file has changed, or for another value.
    ///
    /// `place` is what has to be there while it is asked, and is dropped with the answer: a host that is killed during the look-up
    /// leaves nothing of it. Dropping the future kills the question.
    ///
    /// # Errors
    ///
    /// As [`judge`].
    pub async fn of(
        &self,
        program: &Path,
        environment: &Environment,
        cwd: &Path,
        place: impl Sized,
    ) -> Result<Known> {
        let identity = Identity::of(program);
        if let Some(known) = identity.as_ref().and_then(|identity| self.recall(identity)) {
            return Ok(known);
        }
        let question = Question::new(program, &["--version"], environment, cwd, VERSION_LIMIT);
        let answer = ask(question).await;
        drop(place);
        let version = judge(program, &answer)?;
        let (path, certificates) = (program.to_owned(), self.certificates.clone());
        let look = move || Standing::of(version, &path, certificates.as_ref());
        let standing = tokio::task::spawn_blocking(look).await;
        // A look-up that breaks off tells nothing.
        let standing = Arc::new(standing.unwrap_or(Standing::Unknown(version)));
        let known = Known { version, standing };
        // The file may have been replaced in between; then the answer belongs to neither state for sure.
        if let Some(identity) =
            identity.filter(|before| Identity::of(program).as_ref() == Some(before))
        {
            self.lock()
                .insert(identity.path.clone(), (identity, known.clone()));
        }
        Ok(known)
    }

    /// What is known of a program that was asked before and has not changed since; one look at the file.
    pub fn known(&self, program: &Path) -> Option<Known> {
        self.recall(&Identity::of(program)?)
    }

    fn recall(&self, identity: &Identity) -> Option<Known> {
        let known = self.lock();
        let (then, known) = known.get(&identity.path)?;
        (then == identity).then(|| known.clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PathBuf, (Identity, Known)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "version_tests.rs"]
mod tests;
