//! What a failed turn of the CLI means. Pure.
//!
//! The CLI tells the service's refusal by its status and in words of its own, which are read here and never shown.

use crate::error::{Error, ErrorCode};
use crate::limits::rate::is_billing_sentence;
use crate::relay::completion::native_failure;
use crate::wire::stream_json::{Failure, FailureKind};

/// The error of a failed turn; `begun` when the answer had begun.
pub(crate) fn error(failure: &Failure, begun: bool) -> Error {
    let text = failure.text.to_lowercase();
    let code = match (failure.status, failure.kind) {
        (_, FailureKind::PromptTooLong) => Some(ErrorCode::ContextLengthExceeded),
        (Some(403), _) if text.contains("oauth token has been revoked") => Some(ErrorCode::Auth),
        (Some(403), _) => Some(ErrorCode::Forbidden),
        (Some(404), _) => Some(ErrorCode::ModelNotFound),
        (Some(413), _) => Some(ErrorCode::HistoryTooLarge),
        (Some(400), _) if is_billing_sentence(&text) => Some(ErrorCode::Billing),
        // The service's own clients send 408 and 409 again, as they do a 5xx.
        (Some(408 | 409), _) | (Some(500..), FailureKind::Other) => Some(ErrorCode::UpstreamError),
        (Some(300..=499), FailureKind::Other | FailureKind::InvalidRequest) => {
            Some(ErrorCode::UpstreamRejected)
        }
        // An error event in the stream is told by its kind alone (2.1.332).
        (None, FailureKind::InvalidRequest) => Some(ErrorCode::UpstreamRejected),
        // Nothing had come: whoever asks again loses nothing.
        _ if is_lost(failure, &text) && !begun => Some(ErrorCode::UpstreamUnreachable),
        _ if is_lost(failure, &text) => Some(ErrorCode::StreamInterrupted),
        // A stream that ended before its first block has no word of its own (2.1.332).
        (None, FailureKind::Other) if begun => Some(ErrorCode::StreamInterrupted),
        _ => None,
    };
    let Some(code) = code else {
        return native_failure(failure);
    };
    let error = Error::new(
        code,
        format!("the CLI says that its turn failed ({:?})", failure.kind),
    );
    match failure.status {
        Some(status) => error.with_status(status),
        None => error,
    }
}

/// Whether the connection was lost. Versions before the word for it tell it in their sentence alone (2.1.294).
fn is_lost(failure: &Failure, text: &str) -> bool {
    let told = failure.kind == FailureKind::Server
        && (text.contains("connection to the api was lost") || text.contains("connection dropped"));
    failure.status.is_none() && (failure.kind == FailureKind::Connection || told)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_read_by_its_status_and_its_kind() {
        use FailureKind as Kind;
        let rows = [
            (Some(400), Kind::Other, "bad", ErrorCode::UpstreamRejected),
            (
                Some(400),
                Kind::PromptTooLong,
                "",
                ErrorCode::ContextLengthExceeded,
            ),
            (
                None,
                Kind::PromptTooLong,
                "",
                ErrorCode::ContextLengthExceeded,
            ),
            (
                Some(400),
                Kind::InvalidRequest,
                "You are out of extra usage",
                ErrorCode::Billing,
            ),
            (None, Kind::InvalidRequest, "", ErrorCode::UpstreamRejected),
            (Some(401), Kind::Authentication, "", ErrorCode::Auth),
            (Some(403), Kind::Authentication, "no", ErrorCode::Forbidden),
            (
                Some(403),
                Kind::Authentication,
                "OAuth token has been revoked",
                ErrorCode::Auth,
            ),
            (Some(404), Kind::ModelNotFound, "", ErrorCode::ModelNotFound),
            (
                Some(408),
                Kind::InvalidRequest,
                "",
                ErrorCode::UpstreamError,
            ),
            (
                Some(409),
                Kind::InvalidRequest,
                "",
                ErrorCode::UpstreamError,
            ),
            (
                Some(418),
                Kind::InvalidRequest,
                "",
                ErrorCode::UpstreamRejected,
            ),
            (
                Some(422),
                Kind::InvalidRequest,
                "",
                ErrorCode::UpstreamRejected,
            ),
            (Some(413), Kind::Image, "", ErrorCode::HistoryTooLarge),
            (Some(429), Kind::RateLimited, "", ErrorCode::RateLimit),
            (Some(500), Kind::Server, "", ErrorCode::UpstreamError),
            (Some(529), Kind::Overloaded, "", ErrorCode::Overloaded),
        ];
        for (status, kind, text, code) in rows {
            let failure = Failure {
                kind,
                status,
                word: None,
                text: text.to_owned(),
            };
            let error = error(&failure, false);
            assert_eq!(error.code(), code, "{status:?} {kind:?}");
            assert_eq!(error.status(), status);
        }
    }

    #[test]
    fn a_lost_connection_is_an_interruption_only_after_the_answer_had_begun() {
        let newer = (FailureKind::Connection, "");
        // 2.1.294
        let mid =
            "API Error: Connection to the API was lost (ECONNRESET). This is usually temporary.";
        let before = "API Error: Connection dropped (ECONNRESET)";
        let older = [mid, before].map(|text| (FailureKind::Server, text));
        for (kind, text) in older.into_iter().chain([newer]) {
            let failure = Failure {
                kind,
                status: None,
                word: None,
                text: text.to_owned(),
            };
            let code = |begun| error(&failure, begun).code();
            assert_eq!(code(false), ErrorCode::UpstreamUnreachable, "{text}");
            assert_eq!(code(true), ErrorCode::StreamInterrupted, "{text}");
        }
    }
}
