//! How a group ends: exit status, steps and bounds.

use std::fmt;
use std::process::ExitStatus;
use std::time::Duration;

/// Longest close of one session; the pool document's bound.
pub const SESSION_CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Longest shutdown of everything a transport owns, absolute; the pool document's bound.
pub const SHUTDOWN_LIMIT: Duration = Duration::from_secs(15);

/// From SIGKILL until the leader has to be reaped. A killed process is gone within milliseconds; one that sits in the
/// kernel (a dead network file system) is reported as `process_cleanup` instead of being waited for.
pub const REAP_LIMIT: Duration = Duration::from_secs(2);

/// How a leader ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    /// It returned this code. The CLI ends with 143 or 129 of its own accord on SIGTERM and SIGHUP (2.1.332).
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It ended, but the operating system did not say how: the host program ignores SIGCHLD.
    Unknown,
}

impl Exit {
    pub(super) fn from_status(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown,
        }
    }

    /// Whether it returned 0.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Unknown => f.write_str("an unknown exit status"),
        }
    }
}

/// The steps of [`super::ChildGroup::end`] and how long each may take.
///
/// Standard input is closed at once; then each step waits for the leader's exit. Whatever is left of the group is killed
/// as soon as the leader is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndPolicy {
    /// From the end of input to SIGTERM. An idle CLI ends within 30 to 120 ms of it; one in the middle of a turn ends
    /// only with the turn (2.1.332).
    pub after_stdin_close: Duration,
    /// From SIGTERM to SIGKILL. The CLI needs 35 to 65 ms, in which it removes its socket and session file (2.1.332).
    pub after_terminate: Duration,
}

impl EndPolicy {
    /// The end of a session that may still write its transcript: 5 s and 2 s, within [`SESSION_CLOSE_LIMIT`].
    pub const SESSION: Self = Self {
        after_stdin_close: Duration::from_secs(5),
        after_terminate: Duration::from_secs(2),
    };

    /// The end of a cancelled generation: nothing that the CLI would still write is wanted, but its socket is to go.
    pub const CANCEL: Self = Self {
        after_stdin_close: Duration::ZERO,
        after_terminate: Duration::from_millis(500),
    };

    /// SIGKILL at once.
    pub const KILL: Self = Self {
        after_stdin_close: Duration::ZERO,
        after_terminate: Duration::ZERO,
    };

    /// Longest time that the whole end takes with this policy.
    pub const fn limit(self) -> Duration {
        match self.after_stdin_close.checked_add(self.after_terminate) {
            Some(sum) => sum.saturating_add(REAP_LIMIT),
            None => Duration::MAX,
        }
    }

    /// The same steps, shortened so that the whole end fits into `left`. With nothing left it is [`EndPolicy::KILL`].
    #[must_use]
    pub fn within(self, left: Duration) -> Self {
        let left = left.saturating_sub(REAP_LIMIT);
        let after_terminate = self.after_terminate.min(left);
        Self {
            after_stdin_close: self.after_stdin_close.min(left - after_terminate),
            after_terminate,
        }
    }
}

const _: () = assert!(EndPolicy::SESSION.limit().as_millis() <= SESSION_CLOSE_LIMIT.as_millis());
const _: () = assert!(SESSION_CLOSE_LIMIT.as_millis() <= SHUTDOWN_LIMIT.as_millis());

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_time_left_kills_at_once() {
        assert_eq!(
            EndPolicy::SESSION.within(Duration::ZERO),
            EndPolicy::KILL.within(Duration::ZERO)
        );
        assert_eq!(EndPolicy::SESSION.within(REAP_LIMIT), EndPolicy::KILL);
    }

    #[test]
    fn enough_time_changes_nothing() {
        assert_eq!(
            EndPolicy::SESSION.within(SESSION_CLOSE_LIMIT),
            EndPolicy::SESSION
        );
    }

    proptest! {
        #[test]
        fn a_shortened_policy_fits(stdin in 0u64..20_000, term in 0u64..20_000, left in 0u64..30_000) {
            let policy = EndPolicy {
                after_stdin_close: Duration::from_millis(stdin),
                after_terminate: Duration::from_millis(term),
            };
            let left = Duration::from_millis(left);
            prop_assert!(policy.within(left).limit() <= left.max(REAP_LIMIT));
        }
    }
}
