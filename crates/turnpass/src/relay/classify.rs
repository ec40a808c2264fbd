//! What a failed answer of the service means: status, headers and body in, one error out. Pure.
//!
//! The service's own sentence can quote the request, so it is read here and never shown; what is shown is the kind and
//! the path of the field that it complains about, if it names one.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};

use crate::error::{Error, ErrorCode};
use crate::limits::rate::{is_billing_sentence, is_limit_sentence};
use crate::wire::messages::ErrorBody;
use crate::wire::rate_limit::{LimitStatus, UnifiedHeaders};

/// Longest body of a failed answer that is read.
pub(crate) const ERROR_BODY_BYTES: usize = 64 * 1024;
/// Longest field path that is shown, in bytes.
const FIELD_PATH_BYTES: usize = 80;
/// The status that the Messages API uses for an overload.
const OVERLOADED: u16 = 529;

/// The error for an answer with another status than 200.
pub(crate) fn failed_answer(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Error {
    let body = ErrorBody::decode(body).unwrap_or_else(|| ErrorBody {
        kind: String::new(),
        message: String::new(),
        request_id: None,
    });
    let limits = UnifiedHeaders::read(
        headers
            .iter()
            .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))),
    );
    let error = classify(status.as_u16(), &body, limits.as_ref());
    let reset = limits
        .as_ref()
        .and_then(|limits| limits.reset_epoch_s)
        .and_then(unix)
        .or_else(|| retry_after(headers));
    match reset {
        Some(at) => error.with_status(status.as_u16()).with_reset(at),
        None => error.with_status(status.as_u16()),
    }
}

/// The error for a failed answer of which only the status and the service's words are known.
pub(crate) fn told(status: u16, body: &ErrorBody) -> Error {
    classify(status, body, None).with_status(status)
}

/// The error for an `error` event inside of a 200 answer.
pub(crate) fn error_event(body: &ErrorBody) -> Error {
    let status = match body.kind.as_str() {
        "overloaded_error" => OVERLOADED,
        "rate_limit_error" => 429,
        "authentication_error" => 401,
        "permission_error" => 403,
        "not_found_error" => 404,
        "invalid_request_error" => 400,
        "request_too_large" => 413,
        "billing_error" => 402,
        _ => 500,
    };
    classify(status, body, None).with_status(status)
}

fn classify(status: u16, body: &ErrorBody, limits: Option<&UnifiedHeaders>) -> Error {
    let said = body.message.to_ascii_lowercase();
    let code = match status {
        401 => ErrorCode::Auth,
        402 => ErrorCode::Billing,
        403 if said.contains("oauth token has been revoked") => ErrorCode::Auth,
        403 => ErrorCode::Forbidden,
        404 => ErrorCode::ModelNotFound,
        400 | 413 if is_overflow(&said) => ErrorCode::ContextLengthExceeded,
        // The wording of these drifts, and a tool's name may carry "usage" too: only a sentence about usage or credits
        // as something that is drawn on or used up counts (bug 49).
        400 if is_billing_sentence(&said) => ErrorCode::Billing,
        413 => ErrorCode::HistoryTooLarge,
        429 if is_usage_limit(&said, limits) => ErrorCode::UsageLimit,
        429 => ErrorCode::RateLimit,
        OVERLOADED => ErrorCode::Overloaded,
        _ if body.kind == "overloaded_error" => ErrorCode::Overloaded,
        // The service's own clients send 408 and 409 again, as they do a 5xx.
        408 | 409 | 500.. => ErrorCode::UpstreamError,
        _ => ErrorCode::UpstreamRejected,
    };
    Error::new(code, detail(status, body, code))
}

fn detail(status: u16, body: &ErrorBody, code: ErrorCode) -> String {
    let kind = if is_word(&body.kind) {
        body.kind.as_str()
    } else {
        "no kind"
    };
    let field = match (code, field_path(&body.message)) {
        (ErrorCode::UpstreamRejected, Some(path)) => format!(" about {path}"),
        _ => String::new(),
    };
    format!("the service answered {status} ({kind}){field}")
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 40
        && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
}

/// The path before the first colon, when it is one: `messages.3.content.0.text`, `tools.2.custom.input_schema`.
fn field_path(message: &str) -> Option<&str> {
    let (path, _) = message.split_once(':')?;
    let shape = path
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'.' || b == b'_');
    (shape && !path.is_empty() && path.len() <= FIELD_PATH_BYTES).then_some(path)
}

fn is_overflow(said: &str) -> bool {
    [
        "prompt is too long",
        "context window",
        "context_length",
        "exceed context limit",
        "too many total text bytes",
    ]
    .iter()
    .any(|phrase| said.contains(phrase))
}

fn is_usage_limit(said: &str, limits: Option<&UnifiedHeaders>) -> bool {
    match limits {
        Some(limits) => limits.status == Some(LimitStatus::Rejected),
        // Older wordings, for a service that sends no unified headers. "not your usage limit" is a throttle's.
        None => is_limit_sentence(said),
    }
}

/// `None` for a moment that no clock here can show.
fn unix(seconds: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn retry_after(headers: &HeaderMap) -> Option<SystemTime> {
    let seconds = headers
        .get(header::RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    SystemTime::now().checked_add(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(status: u16, kind: &str, message: &str, headers: &[(&'static str, &str)]) -> ErrorCode {
        answer(status, kind, message, headers).code()
    }

    fn answer(status: u16, kind: &str, message: &str, headers: &[(&'static str, &str)]) -> Error {
        let body =
            serde_json::json!({"type": "error", "error": {"type": kind, "message": message}});
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        failed_answer(
            StatusCode::from_u16(status).unwrap(),
            &map,
            body.to_string().as_bytes(),
        )
    }

    #[test]
    fn a_reset_beyond_all_time_is_no_reset() {
        let headers = [
            ("anthropic-ratelimit-unified-status", "rejected"),
            ("anthropic-ratelimit-unified-reset", "18446744073709551615"),
            ("retry-after", "18446744073709551615"),
        ];
        let error = answer(429, "rate_limit_error", "", &headers);
        assert_eq!(
            (error.code(), error.resets_at()),
            (ErrorCode::UsageLimit, None)
        );
    }

    #[test]
    fn each_status_has_its_code() {
        let cases = [
            (401, "authentication_error", "invalid", ErrorCode::Auth),
            (402, "billing_error", "", ErrorCode::Billing),
            (
                403,
                "permission_error",
                "OAuth token has been revoked",
                ErrorCode::Auth,
            ),
            (403, "permission_error", "no", ErrorCode::Forbidden),
            (404, "not_found_error", "model: x", ErrorCode::ModelNotFound),
            (
                400,
                "invalid_request_error",
                "prompt is too long: 9 > 8",
                ErrorCode::ContextLengthExceeded,
            ),
            (
                400,
                "invalid_request_error",
                "messages.0: bad",
                ErrorCode::UpstreamRejected,
            ),
            (
                413,
                "request_too_large",
                "too large",
                ErrorCode::HistoryTooLarge,
            ),
            (429, "rate_limit_error", "slow down", ErrorCode::RateLimit),
            (500, "api_error", "x", ErrorCode::UpstreamError),
            (503, "overloaded_error", "x", ErrorCode::Overloaded),
            (529, "overloaded_error", "x", ErrorCode::Overloaded),
            (418, "", "", ErrorCode::UpstreamRejected),
        ];
        for (status, kind, message, wanted) in cases {
            assert_eq!(
                code(status, kind, message, &[]),
                wanted,
                "{status} {kind} {message}"
            );
        }
    }

    #[test]
    fn bug_048_a_usage_limit_is_no_throttle_and_a_throttle_no_usage_limit() {
        let future = (jiff::Timestamp::now().as_second() + 3600).to_string();
        let rejected = [
            ("anthropic-ratelimit-unified-status", "rejected"),
            ("anthropic-ratelimit-unified-reset", future.as_str()),
        ];
        let limit = answer(429, "rate_limit_error", "x", &rejected);
        assert_eq!(limit.code(), ErrorCode::UsageLimit);
        assert!(limit.resets_at().is_some() && !limit.is_retryable());
        let allowed = [
            ("anthropic-ratelimit-unified-status", "allowed"),
            ("retry-after", "7"),
        ];
        let throttle = answer(429, "rate_limit_error", "x", &allowed);
        assert!(
            throttle.code() == ErrorCode::RateLimit
                && throttle.is_retryable()
                && throttle.resets_at().is_some()
        );
        for text in [
            "You've hit your session limit · resets 4pm (UTC)",
            "weekly limit · resets Aug 5",
            "usage limit reached|1762952400",
        ] {
            assert_eq!(
                code(429, "rate_limit_error", text, &[]),
                ErrorCode::UsageLimit,
                "{text}"
            );
        }
        let text = "Server is temporarily limiting requests (not your usage limit)";
        assert_eq!(
            code(429, "rate_limit_error", text, &[]),
            ErrorCode::RateLimit
        );
    }

    #[test]
    fn bug_049_a_billing_refusal_is_known_in_any_wording() {
        for text in [
            "this would draw from extra usage",
            "this would draw from your extra usage",
            "You are out of extra usage",
            "buy usage credits to go on",
            "Your credit balance is too low",
        ] {
            let error = answer(400, "invalid_request_error", text, &[]);
            assert!(
                error.code() == ErrorCode::Billing && !error.is_retryable(),
                "{text}"
            );
        }
        let field = "tools.0.custom.name: mcp_usage_probe is not allowed";
        assert_eq!(
            code(400, "invalid_request_error", field, &[]),
            ErrorCode::UpstreamRejected
        );
    }

    #[test]
    fn the_service_s_sentence_is_not_shown_but_the_field_is() {
        let error = answer(
            400,
            "invalid_request_error",
            "messages.3.content.0.text: MARKER is bad",
            &[],
        );
        assert!(!error.to_string().contains("MARKER"));
        assert!(
            error.detail().ends_with("about messages.3.content.0.text"),
            "{}",
            error.detail()
        );
        let error = answer(500, "MARKER kind", "MARKER", &[]);
        assert!(!format!("{error} {error:?}").contains("MARKER"));
    }

    #[test]
    fn a_body_that_is_no_error_is_judged_by_its_status() {
        let error = failed_answer(
            StatusCode::BAD_GATEWAY,
            &HeaderMap::new(),
            b"<html>proxy</html>",
        );
        assert_eq!(
            (error.code(), error.status()),
            (ErrorCode::UpstreamError, Some(502))
        );
    }
}
