//! Money and limits: whether a message may be sent, what a limit means, and how much of the plan is used.
//!
//! | module | what |
//! | --- | --- |
//! | [`verdict`] | one answer to `get_usage` in, one verdict out: pure |
//! | [`gate`] | the verdict with its retries, the second opinion and the fresh sign-in check |
//! | [`probe`] | a CLI process that is started to be asked for use |
//! | [`shared`] | one question at a time, shared by all who ask |
//! | [`rate`] | events, notifications, headers and failures of a turn: overage, usage limit or throttle; pure |
//! | [`windows`] | the plan's windows for people, and the newest that is known of them; pure |
//! | [`latest`] | the latest reading of them, asked for at most once a minute |
//! | [`budget`] | what a person allows: requests, tokens, a share of a window; pure |
//! | `book` | the ledger in its place, and who enters what |
//! | `slips` | what waits to be entered into the ledger, seen by every process at once |
//! | [`state_file`] | small files of our own that several processes write |
//! | [`guard`] | all of it for one transport |
//!
//! Nothing here reads a credential, and nothing turns credits on.
//!
//! # Policies
//!
//! | policy | default of | before a new user message | credits in use in a turn |
//! | --- | --- | --- | --- |
//! | [`Policy::RequireOff`] | pool | only if the CLI confirms that credits are off; otherwise `billing` or `usage_unconfirmed` | the turn ends with `billing`; a pool closes |
//! | [`Policy::Warn`] | replay, relay | a notice, at most once in [`guard::NOTICE_INTERVAL`], from a question that delays nothing | a notice |
//! | [`Policy::Off`] | nobody | nothing | nothing |
//!
//! No policy sees a race: credits can be switched on between the answer and the message, which are a minute apart at most
//! ([`guard::PASSAGE_MAX_AGE`]) beside the minute for which the CLI shares an answer; and some models bill credits although
//! the plan has room (`Credits` in `models`).

mod book;
pub mod budget;
pub mod gate;
pub mod guard;
pub mod latest;
pub mod probe;
pub mod rate;
pub mod shared;
mod slips;
pub mod state_file;
pub mod verdict;
pub mod windows;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::request::TransportKind;

/// What to do about paid usage credits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Nothing is sent unless the CLI confirms that credits are off.
    RequireOff,
    /// Everything is sent; a notice says when credits are on or that nobody knows.
    Warn,
    /// Nobody asks.
    Off,
}

impl Policy {
    /// All policies, strictest first.
    pub const ALL: [Self; 3] = [Self::RequireOff, Self::Warn, Self::Off];

    /// The default of a transport (SPEC 8).
    pub fn default_of(transport: TransportKind) -> Self {
        match transport {
            TransportKind::Pool => Self::RequireOff,
            TransportKind::Replay | TransportKind::Relay => Self::Warn,
        }
    }

    /// The word in settings and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RequireOff => "require_off",
            Self::Warn => "warn",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("usage gate {0:?} is not known: use require_off, warn, off")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let word = text.trim().replace('-', "_");
        Self::ALL
            .into_iter()
            .find(|policy| policy.as_str() == word)
            .ok_or_else(|| UnknownPolicy(text.chars().take(40).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_requires_and_the_others_warn() {
        assert_eq!(Policy::default_of(TransportKind::Pool), Policy::RequireOff);
        assert_eq!(Policy::default_of(TransportKind::Replay), Policy::Warn);
        assert_eq!(Policy::default_of(TransportKind::Relay), Policy::Warn);
        for policy in Policy::ALL {
            assert_eq!(policy.as_str().parse(), Ok(policy));
        }
        assert_eq!("require-off".parse(), Ok(Policy::RequireOff));
        assert!("on".parse::<Policy>().is_err());
    }
}
