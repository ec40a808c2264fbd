//! What fails upstream is one typed error, and the next generation works.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use turnpass::ErrorCode;
use turnpass::event::{Event, Notice};
use turnpass_lab::scenario::{Coding, Cut, CutAt, CutHow, Item, Reply};

use crate::Ground;
use crate::stage::{ask, ask_with_tools, told};

pub(crate) async fn each_status_is_its_error(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let cases = [
        (
            400,
            "invalid_request_error",
            "messages.0: no",
            ErrorCode::UpstreamRejected,
            false,
        ),
        (
            400,
            "invalid_request_error",
            "prompt is too long: 9 > 8",
            ErrorCode::ContextLengthExceeded,
            false,
        ),
        (403, "permission_error", "no", ErrorCode::Forbidden, false),
        (
            404,
            "not_found_error",
            "model: x",
            ErrorCode::ModelNotFound,
            false,
        ),
        (
            413,
            "request_too_large",
            "too large",
            ErrorCode::HistoryTooLarge,
            false,
        ),
        (
            429,
            "rate_limit_error",
            "slow down",
            ErrorCode::RateLimit,
            true,
        ),
        (500, "api_error", "oops", ErrorCode::UpstreamError, true),
        (529, "overloaded_error", "busy", ErrorCode::Overloaded, true),
    ];
    let mut count = 0;
    for (status, kind, message, code, retryable) in cases {
        // The CLI takes back some of what it asked for after a plain 400, and asks again.
        let tries = match message.starts_with("prompt is too long") {
            true => 1,
            false => ground.way.tries(status),
        };
        for _ in 0..tries {
            ground
                .stage
                .upstream
                .enqueue(Reply::error(status, kind, message));
        }
        count += tries;
        let heard = told(&provider, ask("x")).await;
        let error = heard.failed(code);
        assert_eq!(
            (error.status(), error.is_retryable()),
            (Some(status), retryable)
        );
        assert!(!error.output_seen());
        assert_eq!(
            ground.stage.sent().len(),
            count,
            "one request for {status}, whatever the CLI wants"
        );
    }
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

pub(crate) async fn bug_048_a_usage_limit_tells_its_reset_and_a_throttle_is_retryable(
    ground: &Ground<'_>,
) {
    let provider = (ground.provider)();
    let at = SystemTime::now() + Duration::from_secs(3 * 3600);
    let seconds = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let mut limit = Reply::error(
        429,
        "rate_limit_error",
        "This request would exceed your account's rate limit.",
    );
    limit.headers = [
        (
            "anthropic-ratelimit-unified-status".to_owned(),
            "rejected".to_owned(),
        ),
        (
            "anthropic-ratelimit-unified-reset".to_owned(),
            seconds.to_string(),
        ),
    ]
    .into();
    ground.stage.upstream.enqueue(limit);
    let heard = told(&provider, ask("x")).await;
    let error = heard.failed(ErrorCode::UsageLimit);
    assert!(!error.is_retryable());
    assert_eq!(
        error
            .resets_at()
            .unwrap()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs(),
        seconds
    );
    let mut throttle = Reply::error(
        429,
        "rate_limit_error",
        "Server is temporarily limiting requests (not your usage limit)",
    );
    throttle.headers = [("retry-after".to_owned(), "7".to_owned())].into();
    ground.stage.upstream.enqueue(throttle);
    let heard = told(&provider, ask("x")).await;
    // A live CLI does not tell how long the service asked to wait.
    let told = heard.failed(ErrorCode::RateLimit).resets_at().is_some();
    assert!(told || ground.way.is_live());
    assert_eq!(ground.stage.sent().len(), 2);
}

pub(crate) async fn bug_049_a_billing_refusal_is_billing(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for text in [
        "this would draw from your extra usage",
        "You are out of extra usage",
        "buy usage credits",
    ] {
        for _ in 0..ground.way.tries(400) {
            ground
                .stage
                .upstream
                .enqueue(Reply::error(400, "invalid_request_error", text));
        }
        let heard = told(&provider, ask("x")).await;
        assert!(!heard.failed(ErrorCode::Billing).is_retryable());
    }
}

pub(crate) async fn bug_041_a_live_401_is_an_auth_error_after_one_renewal(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let refused = || Reply::error(401, "authentication_error", "invalid bearer token");
    ground.stage.upstream.enqueue(refused());
    // Renewed: the same body once more, and the host sees one notice.
    let heard = told(&provider, ask("[[say renewed]]")).await;
    assert_eq!(heard.text(), "renewed");
    assert_eq!(heard.done().upstream_requests, 2);
    let retried = |event: &Event| {
        matches!(
            event,
            Event::Notice(Notice::Retry {
                status: Some(401),
                ..
            })
        )
    };
    assert!(heard.count(retried) >= 1, "{heard:?}");
    let sent = ground.stage.sent();
    assert_eq!(sent[0].body, sent[1].body);
    // Refused for good.
    ground.stage.upstream.enqueue(refused());
    ground.stage.upstream.enqueue(refused());
    let heard = told(&provider, ask("x")).await;
    let error = heard.failed(ErrorCode::Auth);
    assert!(error.remedy().contains("claude auth login") && !error.is_retryable());
    assert_eq!(ground.stage.sent().len(), 4);
    assert_eq!(
        told(&provider, ask("[[say signed in again]]")).await.text(),
        "signed in again"
    );
}

pub(crate) async fn an_error_event_is_its_error(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for (kind, code) in [
        ("overloaded_error", ErrorCode::Overloaded),
        ("rate_limit_error", ErrorCode::RateLimit),
        ("api_error", ErrorCode::UpstreamError),
        ("invalid_request_error", ErrorCode::UpstreamRejected),
    ] {
        for (text, seen) in [("start", false), ("mid", true)] {
            let heard = told(
                &provider,
                ask(format!("[[say half of this]] [[error {kind} {text}]]")),
            )
            .await;
            assert_eq!(heard.failed(code).output_seen(), seen, "{kind} {text}");
        }
    }
    assert_eq!(ground.stage.sent().len(), 8);
}

pub(crate) async fn a_cut_stream_is_interrupted_and_releases_no_tool(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut count = 0;
    for at in [
        CutAt::MidBlock,
        CutAt::BeforeMessageDelta,
        CutAt::BeforeMessageStop,
    ] {
        for how in [CutHow::End, CutHow::Close, CutHow::Rst] {
            let reply = Reply::content([
                Item::text("half"),
                Item::tool_use("read", serde_json::json!({"path": "a"})),
            ]);
            ground.stage.upstream.enqueue(Reply {
                cut: Some(Cut { at, how }),
                ..reply
            });
            let heard = told(&provider, ask_with_tools("x")).await;
            count += 1;
            if ground.way.is_live() && at == CutAt::BeforeMessageStop && heard.error.is_none() {
                // Everything came but the last event, which the CLI makes up: the answer is whole.
                assert_eq!((heard.text().as_str(), heard.calls().len()), ("half", 1));
                assert_eq!(ground.stage.sent().len(), count, "{at:?} {how:?}");
                continue;
            }
            let error = heard.failed(ErrorCode::StreamInterrupted);
            assert!(error.is_retryable(), "{at:?} {how:?}");
            assert!(heard.calls().is_empty(), "{at:?} {how:?}");
            // A reset may overtake what was sent before it; an end may not.
            if how == CutHow::End {
                assert!(
                    error.output_seen() && heard.text() == "half",
                    "{at:?}: {heard:?}"
                );
            }
            assert_eq!(ground.stage.sent().len(), count, "{at:?} {how:?}");
        }
    }
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

pub(crate) async fn an_unreachable_service_is_told(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let cut = Cut {
        at: CutAt::BeforeHead,
        how: CutHow::Close,
    };
    ground.stage.upstream.enqueue(Reply {
        cut: Some(cut),
        ..Reply::text("x")
    });
    let heard = told(&provider, ask("x")).await;
    let error = heard.failed(ErrorCode::UpstreamUnreachable);
    assert!(error.is_retryable() && !error.output_seen());
    assert!(!error.to_string().contains("127.0.0.1"), "{error}");
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

pub(crate) async fn bug_095_compressed_answers_and_errors_are_read(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let encodings = [
        vec![Coding::Gzip],
        vec![Coding::Br],
        vec![Coding::Zstd],
        vec![Coding::Deflate],
        vec![Coding::Gzip, Coding::Br],
        vec![Coding::Zstd, Coding::Gzip],
    ];
    for encoding in encodings {
        if ground.way.is_live() && encoding.len() > 1 {
            // The CLI reads its answer itself, and one coding is all that it takes (2.1.332).
            continue;
        }
        ground.stage.upstream.enqueue(Reply {
            encoding: encoding.clone(),
            ..Reply::text("packed")
        });
        assert_eq!(
            told(&provider, ask("x")).await.text(),
            "packed",
            "{encoding:?}"
        );
        for (status, kind, code) in [
            (
                400,
                "invalid_request_error",
                ErrorCode::ContextLengthExceeded,
            ),
            (429, "rate_limit_error", ErrorCode::UsageLimit),
        ] {
            let said = "prompt is too long, and your weekly limit is reached";
            let reply = Reply::error(status, kind, said);
            ground.stage.upstream.enqueue(Reply {
                encoding: encoding.clone(),
                ..reply
            });
            told(&provider, ask("x")).await.failed(code);
        }
    }
    for request in ground.stage.sent() {
        if ground.way.is_live() {
            continue;
        }
        assert_eq!(request.header("accept-encoding"), Some("identity"));
    }
}
