//! Whether a failed generation is asked for again. Pure.

use std::time::{Duration, SystemTime};

use turnpass::{Error, ErrorCode};

/// Tries after the first one. Two get over a hiccup of the service; more would hide an outage from the person.
pub(crate) const RETRIES: u32 = 2;

/// Wait before the first retry; four times as long before the second.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// Longest wait for a throttle that names its end; a later end is told instead of waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How long to wait before the same request is sent again, or `None` when the error stands.
///
/// `tried` is how many retries of this request there were; `output_seen` whether anything of the answer was given out.
pub(crate) fn wait_before_retry(
    error: &Error,
    tried: u32,
    output_seen: bool,
    now: SystemTime,
) -> Option<Duration> {
    if output_seen || error.output_seen() || tried >= RETRIES || !error.is_retryable() {
        return None;
    }
    // The words of a usage limit and of a throttle are told apart by the library; a usage limit stands in any case.
    if error.code() == ErrorCode::UsageLimit {
        return None;
    }
    let usual = FIRST_WAIT * 4u32.pow(tried);
    match error.resets_at().map(|at| at.duration_since(now)) {
        Some(Ok(until)) if until > LONGEST_WAIT => None,
        Some(Ok(until)) => Some(until.max(usual)),
        Some(Err(_)) | None => Some(usual),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(error: &Error, tried: u32, seen: bool) -> Option<Duration> {
        wait_before_retry(error, tried, seen, SystemTime::now())
    }

    #[test]
    fn every_code_keeps_its_word() {
        for code in ErrorCode::ALL {
            let error = Error::new(*code, "");
            let again = wait(&error, 0, false).is_some();
            assert_eq!(again, code.is_retryable(), "{code}");
            assert_eq!(wait(&error, 0, true), None, "{code} after output");
            assert_eq!(wait(&error, RETRIES, false), None, "{code} too often");
        }
        assert!(!ErrorCode::UsageLimit.is_retryable());
    }

    #[test]
    fn waits_grow() {
        let error = Error::new(ErrorCode::Overloaded, "");
        assert_eq!(wait(&error, 0, false), Some(Duration::from_secs(1)));
        assert_eq!(wait(&error, 1, false), Some(Duration::from_secs(4)));
    }

    #[test]
    fn output_that_only_the_library_knows_of_counts() {
        let error = Error::new(ErrorCode::StreamInterrupted, "").with_output_seen(true);
        assert_eq!(wait(&error, 0, false), None);
    }

    #[test]
    fn a_throttle_is_waited_for_only_within_a_minute() {
        let now = SystemTime::now();
        let soon = now + Duration::from_secs(20);
        let late = now + Duration::from_secs(3600);
        let throttle = |at| Error::new(ErrorCode::RateLimit, "").with_reset(at);
        assert_eq!(
            wait_before_retry(&throttle(soon), 0, false, now),
            Some(Duration::from_secs(20))
        );
        assert_eq!(wait_before_retry(&throttle(late), 0, false, now), None);
    }
}
