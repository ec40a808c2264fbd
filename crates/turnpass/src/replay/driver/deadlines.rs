//! What a generation waits for, and how long.

use std::time::Duration;

use tokio::time::Instant;

use super::Driver;
use crate::error::{Error, ErrorCode};

/// Longest wait for the answer to a control request, and for an acknowledgement (SPEC 3).
const CONTROL_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for the tool server. The CLI itself gives up after 27 s (2.1.332) and would then ask without tools.
const SERVER_TIMEOUT: Duration = Duration::from_secs(30);
/// From the end of a text to the CLI's own judgement of it; it needs 4 to 60 ms (2.1.294 to 2.1.332).
const FINALISATION_GRACE: Duration = Duration::from_secs(10);

/// What is waited for, with its own deadline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Waiting {
    /// The tool server.
    Server(Instant),
    /// An answer to a control request, or an acknowledgement.
    Control(Instant),
    /// The first sign of the answer.
    Start,
    /// The next sign of the answer.
    Next(Instant),
    /// The CLI's judgement.
    Judgement(Instant),
}

impl Waiting {
    /// While the host did not read, nothing was read from the CLI, and what it said meanwhile was not late: its silence
    /// counts from now. What has begun with the request goes on counting from there.
    pub(super) fn heard_again(self, now: Instant) -> Self {
        match self {
            Self::Server(_) => Self::Server(now),
            Self::Control(_) => Self::Control(now),
            Self::Start => Self::Start,
            Self::Next(_) => Self::Next(now),
            Self::Judgement(_) => Self::Judgement(now),
        }
    }
}

impl Driver<'_> {
    /// The next deadline, and the error of missing it.
    pub(super) fn deadline(&self) -> (Instant, Error) {
        let limits = &self.prepared.limits;
        let late = |code: ErrorCode, limit: Duration| {
            let what = format!("the deadline of {} s passed", limit.as_secs_f32());
            Error::new(code, what)
        };
        let start = (
            self.started + limits.start,
            late(ErrorCode::StartTimeout, limits.start),
        );
        let within = |since: Instant, limit: Duration, error: Error| match since + limit {
            at if at < start.0 => (at, error),
            _ => start.clone(),
        };
        let (at, error) = match self.waiting {
            Waiting::Server(since) => {
                let seconds = SERVER_TIMEOUT.as_secs();
                let what = format!("the tool server was not ready within {seconds} s");
                within(
                    since,
                    SERVER_TIMEOUT,
                    Error::new(ErrorCode::McpStartup, what),
                )
            }
            Waiting::Control(since) => within(
                since,
                CONTROL_TIMEOUT,
                late(ErrorCode::ControlTimeout, CONTROL_TIMEOUT),
            ),
            Waiting::Start => start,
            Waiting::Next(since) => (
                since + limits.idle,
                late(ErrorCode::IdleTimeout, limits.idle),
            ),
            Waiting::Judgement(since) => {
                let seconds = FINALISATION_GRACE.as_secs();
                let what = format!("the CLI did not end its turn within {seconds} s of the answer");
                let error = Error::new(ErrorCode::ProcessCleanup, what);
                (since + FINALISATION_GRACE, error)
            }
        };
        let total = self.started + limits.total;
        // A host that does not read is not the service's silence: only the overall deadline counts then.
        if at > total || !self.queue.is_empty() {
            return (total, late(ErrorCode::TotalTimeout, limits.total));
        }
        (at, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_reads_late_is_no_late_cli() {
        let then = Instant::now();
        let now = then + Duration::from_secs(3600);
        for waiting in [
            Waiting::Server,
            Waiting::Control,
            Waiting::Next,
            Waiting::Judgement,
        ] {
            let (before, after) = (waiting(then), waiting(now));
            assert_eq!(before.heard_again(now), after);
        }
        assert_eq!(Waiting::Start.heard_again(now), Waiting::Start);
    }
}
