//! How the program ends: exit codes, and the one sentence that goes with a failure.

use std::fmt;
use std::process::ExitCode;

use turnpass::{Error, ErrorCode};
use turnpass_agent::Outcome;

/// The exit codes; `docs/guide/exit-codes.md` explains them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// What was asked for was done.
    Done = 0,
    /// A generation, or something else on the way, failed.
    Failed = 1,
    /// The command line, the settings or the request cannot be worked with.
    Usage = 2,
    /// The CLI is missing or unusable.
    CliMissing = 3,
    /// The CLI is too old.
    CliTooOld = 4,
    /// The CLI is signed out, or not signed in with a subscription.
    SignedOut = 5,
    /// The plan's usage limit or a throttle is reached.
    Limit = 6,
    /// Refused: by the service, by a rule of this program, or by a limit such as that of rounds.
    Refused = 7,
    /// Cancelled by the person.
    Cancelled = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The exit code for an error of the library.
pub(crate) fn exit_of(code: ErrorCode) -> Exit {
    match code {
        ErrorCode::ExecutableMissing
        | ErrorCode::ExecutableUnusable
        | ErrorCode::VersionInvalid
        | ErrorCode::VersionIncompatible
        | ErrorCode::LaunchFailed => Exit::CliMissing,
        ErrorCode::VersionTooOld => Exit::CliTooOld,
        ErrorCode::Auth | ErrorCode::AuthIneligible | ErrorCode::AuthUnknown => Exit::SignedOut,
        ErrorCode::UsageLimit
        | ErrorCode::RateLimit
        | ErrorCode::Billing
        | ErrorCode::UsageUnconfirmed
        | ErrorCode::Budget => Exit::Limit,
        ErrorCode::RequestInvalid
        | ErrorCode::TransportUnavailable
        | ErrorCode::EffortUnsupported
        | ErrorCode::SamplingUnsupported
        | ErrorCode::WorkingDirectory
        | ErrorCode::LabUpstreamRefused => Exit::Usage,
        ErrorCode::InheritedCredentials => Exit::Refused,
        _ => Exit::Failed,
    }
}

/// The exit code for the outcome of a run.
pub(crate) fn exit_of_outcome(outcome: &Outcome) -> Exit {
    match outcome {
        Outcome::Completed => Exit::Done,
        Outcome::Failed { error } => exit_of(error.code()),
        Outcome::Cancelled => Exit::Cancelled,
        _ => Exit::Refused,
    }
}

/// Why a command could not do what was asked.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The command line or the settings cannot be worked with.
    Usage {
        /// What is wrong.
        what: String,
        /// What to do.
        next: String,
    },
    /// Something of this machine failed.
    System {
        /// What failed, with the operating system's words.
        what: String,
        /// What to do.
        next: String,
    },
    /// The library's error.
    Library(Error),
}

impl Fault {
    pub(crate) fn usage(what: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Usage {
            what: what.into(),
            next: next.into(),
        }
    }

    pub(crate) fn system(what: impl Into<String>, next: impl Into<String>) -> Self {
        Self::System {
            what: what.into(),
            next: next.into(),
        }
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Usage { .. } => Exit::Usage,
            Self::System { .. } => Exit::Failed,
            Self::Library(error) => exit_of(error.code()),
        }
    }

    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Usage { .. } => "usage",
            Self::System { .. } => "system",
            Self::Library(error) => error.code().as_str(),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage { what, next } | Self::System { what, next } => {
                write!(f, "[{}] {what}. {next}", self.code())
            }
            Self::Library(error) => error.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_the_documented_exit() {
        let page = include_str!("../../../docs/guide/exit-codes.md");
        for code in ErrorCode::ALL {
            let exit = exit_of(*code) as u8;
            let named = page
                .lines()
                .filter(|line| line.contains(&format!("`{code}`")))
                .collect::<Vec<_>>();
            if exit == Exit::Failed as u8 {
                assert!(named.is_empty(), "{code} ends with 1, which is not listed");
            } else {
                let row = format!("| {exit} |");
                assert!(
                    named.len() == 1 && named[0].starts_with(&row),
                    "{code}: {named:?} is not one row {row}"
                );
            }
        }
    }

    #[test]
    fn a_fault_says_code_cause_and_next_step() {
        let fault = Fault::usage("there is no prompt", "Write one.");
        assert_eq!(fault.to_string(), "[usage] there is no prompt. Write one.");
        let fault = Fault::from(Error::new(ErrorCode::Auth, ""));
        assert_eq!(fault.code(), "auth");
        assert!(fault.to_string().starts_with("[auth] "));
    }
}
