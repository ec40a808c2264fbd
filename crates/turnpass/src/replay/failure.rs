//! What a failed turn means when only the CLI's records tell it. Pure.
//!
//! A replay does not see the service's answer, so status, kind and words come from the CLI's `result`. The service's own
//! sentence stands in the CLI's behind `API Error: STATUS`; it is read for its kind and never shown.

use crate::error::{Error, ErrorCode};
use crate::limits::Policy;
use crate::limits::rate::{Reaction, Signal};
use crate::relay::classify;
use crate::wire::messages::ErrorBody;
use crate::wire::stream_json::{Failure, FailureKind};

/// The error of a failed turn. `begun` says whether the service had begun to answer.
pub(crate) fn of_turn(failure: &Failure, begun: bool, limit: Option<&Error>) -> Error {
    let error = classified(failure, begun);
    let error = match failure.status {
        Some(status) => error.with_status(status),
        None => error,
    };
    // The event before the failure comes from the service's headers: it knows the plan's limit from a throttle, and when
    // the limit opens again.
    match limit {
        Some(limit) if limit.code() == ErrorCode::UsageLimit && failure.status == Some(429) => {
            limit.clone().with_status(429)
        }
        _ => error,
    }
}

fn classified(failure: &Failure, begun: bool) -> Error {
    let signal = Signal::of_failure(failure);
    if matches!(signal, Signal::UsageLimit { .. })
        && let Reaction::End { error, .. } = signal.reaction(Policy::Off)
    {
        return error;
    }
    let Some(status) = failure.status else {
        return without_status(failure, begun);
    };
    let body = ErrorBody {
        kind: kind_of(failure).to_owned(),
        message: said(&failure.text).to_owned(),
        request_id: None,
    };
    match failure.kind {
        FailureKind::PromptTooLong => too_long(),
        _ => classify::told(status, &body),
    }
}

fn without_status(failure: &Failure, begun: bool) -> Error {
    let code = match failure.kind {
        FailureKind::PromptTooLong => return too_long(),
        FailureKind::UsageLimit => ErrorCode::UsageLimit,
        FailureKind::Billing => ErrorCode::Billing,
        FailureKind::Authentication => ErrorCode::Auth,
        FailureKind::ModelNotFound => ErrorCode::ModelNotFound,
        FailureKind::RateLimited => ErrorCode::RateLimit,
        FailureKind::Overloaded => ErrorCode::Overloaded,
        FailureKind::InvalidRequest => ErrorCode::UpstreamRejected,
        // A broken connection is a server's error to 2.1.294 and 2.1.310, with no kind of the service's.
        FailureKind::Server if failure.word.as_deref() != Some("server_error") => {
            ErrorCode::UpstreamError
        }
        FailureKind::Connection | FailureKind::Server if !begun => ErrorCode::UpstreamUnreachable,
        _ if begun => return interrupted("the CLI says that the answer broke off"),
        FailureKind::Other => ErrorCode::UpstreamError,
        _ => ErrorCode::ProtocolResult,
    };
    Error::new(
        code,
        format!("the CLI says that its turn failed ({:?})", failure.kind),
    )
}

fn too_long() -> Error {
    Error::new(
        ErrorCode::ContextLengthExceeded,
        "the conversation does not fit the model's context window",
    )
}

/// The answer broke off; the words are the document's.
pub(crate) fn interrupted(why: &str) -> Error {
    Error::new(
        ErrorCode::StreamInterrupted,
        format!("stream ended before message_stop: {why}"),
    )
}

/// A kind of the service's by what the CLI made of it; only shown.
fn kind_of(failure: &Failure) -> &'static str {
    match failure.kind {
        FailureKind::Authentication => "authentication_error",
        FailureKind::ModelNotFound => "not_found_error",
        FailureKind::RateLimited => "rate_limit_error",
        FailureKind::Overloaded => "overloaded_error",
        FailureKind::Server => "api_error",
        FailureKind::Billing => "billing_error",
        _ => "invalid_request_error",
    }
}

/// The service's sentence within the CLI's.
fn said(text: &str) -> &str {
    let Some((_, rest)) = text.split_once("API Error: ") else {
        return text;
    };
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[digits..].trim_start()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(kind: FailureKind, status: Option<u16>, word: &str, text: &str) -> Failure {
        Failure {
            kind,
            status,
            word: Some(word.to_owned()),
            text: text.to_owned(),
        }
    }

    fn code(kind: FailureKind, status: Option<u16>, word: &str, text: &str) -> ErrorCode {
        of_turn(&failure(kind, status, word, text), false, None).code()
    }

    #[test]
    fn each_status_is_its_error_whatever_the_cli_calls_it() {
        use FailureKind as Kind;
        // As 2.1.332 words them.
        let cases = [
            (
                Kind::InvalidRequest,
                400,
                "API Error: 400 messages.0: bad",
                ErrorCode::UpstreamRejected,
            ),
            (
                Kind::PromptTooLong,
                400,
                "Prompt is too long",
                ErrorCode::ContextLengthExceeded,
            ),
            (
                Kind::InvalidRequest,
                400,
                "API Error: 400 You are out of extra usage",
                ErrorCode::Billing,
            ),
            (
                Kind::Authentication,
                401,
                "Failed to authenticate. API Error: 401 invalid bearer token",
                ErrorCode::Auth,
            ),
            (
                Kind::Authentication,
                403,
                "Failed to authenticate. API Error: 403 no",
                ErrorCode::Forbidden,
            ),
            (
                Kind::Authentication,
                403,
                "Failed to authenticate. API Error: 403 OAuth token has been revoked",
                ErrorCode::Auth,
            ),
            (
                Kind::ModelNotFound,
                404,
                "There's an issue with the selected model",
                ErrorCode::ModelNotFound,
            ),
            (
                Kind::Image,
                413,
                "Request too large (max 32MB).",
                ErrorCode::HistoryTooLarge,
            ),
            (
                Kind::RateLimited,
                429,
                "API Error: Server is temporarily limiting requests (not your usage limit) · slow down",
                ErrorCode::RateLimit,
            ),
            (
                Kind::UsageLimit,
                429,
                "You've hit your session limit",
                ErrorCode::UsageLimit,
            ),
            (
                Kind::Server,
                500,
                "API Error: 500 oops.",
                ErrorCode::UpstreamError,
            ),
            (
                Kind::Overloaded,
                529,
                "API Error: 529 busy.",
                ErrorCode::Overloaded,
            ),
        ];
        for (kind, status, text, wanted) in cases {
            let error = of_turn(&failure(kind, Some(status), "unknown", text), false, None);
            assert_eq!(
                (error.code(), error.status()),
                (wanted, Some(status)),
                "{text}"
            );
            assert!(!error.to_string().contains("bearer token"), "{error}");
        }
    }

    #[test]
    fn what_has_no_status_is_told_apart_by_when_it_came() {
        use FailureKind as Kind;
        let dropped = "API Error: Connection dropped (ECONNRESET)";
        for (kind, word) in [
            (Kind::Connection, "connection_failed"),
            (Kind::Server, "server_error"),
        ] {
            assert_eq!(
                code(kind, None, word, dropped),
                ErrorCode::UpstreamUnreachable
            );
            let error = of_turn(&failure(kind, None, word, dropped), true, None);
            assert_eq!(error.code(), ErrorCode::StreamInterrupted);
            assert!(error.detail().contains("stream ended before message_stop"));
        }
        assert_eq!(
            code(Kind::Server, None, "unknown", "API Error: x"),
            ErrorCode::UpstreamError
        );
        assert_eq!(
            code(Kind::InvalidRequest, None, "unknown", "x"),
            ErrorCode::UpstreamRejected
        );
        let signed_out = "Not logged in · Please run /login";
        assert_eq!(
            code(
                Kind::Authentication,
                None,
                "authentication_failed",
                signed_out
            ),
            ErrorCode::Auth
        );
        assert_eq!(
            code(Kind::AnsweredLocally, None, "completed", "x"),
            ErrorCode::ProtocolResult
        );
    }

    #[test]
    fn bug_048_the_time_of_a_limit_comes_from_the_event_before_it() {
        let at = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
        let limit = Error::new(ErrorCode::UsageLimit, "").with_reset(at);
        let told = failure(
            FailureKind::UsageLimit,
            Some(429),
            "usage_limit_reached",
            "hit",
        );
        assert_eq!(of_turn(&told, false, Some(&limit)).resets_at(), Some(at));
        let unnamed = failure(FailureKind::RateLimited, Some(429), "rate_limit", "no");
        let error = of_turn(&unnamed, false, Some(&limit));
        assert_eq!(
            (error.code(), error.resets_at()),
            (ErrorCode::UsageLimit, Some(at))
        );
        let throttle = Error::new(ErrorCode::RateLimit, "");
        let error = of_turn(&told, false, Some(&throttle));
        assert_eq!(error.code(), ErrorCode::UsageLimit);
    }
}
