//! Each sign by itself, and the events that 2.1.332 was seen to print.

use serde_json::{Value, json};

use super::*;

fn event(info: Value) -> Signal {
    let raw = serde_json::value::to_raw_value(&info).unwrap();
    Signal::of_event(RateLimitInfo::read(&raw).as_ref())
}

fn headers(pairs: &[(&str, &str)], status: u16) -> Signal {
    let named: Vec<_> = pairs
        .iter()
        .map(|(name, value)| (format!("anthropic-ratelimit-unified-{name}"), *value))
        .collect();
    let read = named.iter().map(|(name, value)| (name.as_str(), *value));
    Signal::of_headers(status, &UnifiedHeaders::read(read).unwrap())
}

fn failure(kind: FailureKind, text: &str) -> Signal {
    Signal::of_failure(&Failure {
        kind,
        status: Some(429),
        word: None,
        text: text.to_owned(),
    })
}

#[test]
fn rule_6_every_sign_of_overage_counts_alone() {
    for (info, sign) in [
        (
            json!({"status": "allowed", "isUsingOverage": true}),
            Sign::IsUsingOverage,
        ),
        (
            json!({"status": "allowed", "isUsingOverage": false, "overageInUse": true}),
            Sign::OverageInUse,
        ),
        (
            json!({"status": "allowed", "rateLimitType": "overage"}),
            Sign::OverageWindow,
        ),
        (
            json!({"status": "rejected", "overageStatus": "allowed"}),
            Sign::RejectedButCovered,
        ),
        (
            json!({"status": "rejected", "overageStatus": "allowed_warning"}),
            Sign::RejectedButCovered,
        ),
        (
            json!({"status": "rejected", "overageStatus": "new_word"}),
            Sign::RejectedButCovered,
        ),
        (json!({"status": "new_word"}), Sign::UnknownStatus),
        (json!({"isUsingOverage": "yes"}), Sign::Undecodable),
        (json!([]), Sign::Undecodable),
    ] {
        assert_eq!(event(info.clone()), Signal::Overage(sign), "{info}");
    }
    assert_eq!(Signal::of_event(None), Signal::Overage(Sign::Undecodable));
}

#[test]
fn rule_6_rejected_without_cover_is_a_usage_limit_with_its_window_and_reset() {
    for overage in [json!(null), json!("rejected"), json!("")] {
        let info = json!({"status": "rejected", "resetsAt": 1796073991, "rateLimitType": "five_hour",
            "overageStatus": overage, "overageDisabledReason": "org_level_disabled", "isUsingOverage": false});
        let wanted = Signal::UsageLimit {
            window: Some("five_hour".to_owned()),
            resets_at: Some(1_796_073_991),
        };
        assert_eq!(event(info), wanted, "{overage}");
    }
}

#[test]
fn rule_6_allowed_warning_passes_and_so_does_a_new_status_that_excludes_overage() {
    let near = event(
        json!({"status": "allowed_warning", "rateLimitType": "seven_day", "utilization": 0.77,
        "surpassedThreshold": 0.75, "resetsAt": 1796329734, "isUsingOverage": false}),
    );
    let Signal::Near(near) = near else {
        panic!("{near:?}")
    };
    assert_eq!(
        (near.window.as_str(), near.utilization),
        ("seven_day", Some(0.77))
    );
    assert_eq!(
        event(json!({"status": "allowed", "isUsingOverage": false})),
        Signal::Clear
    );
    assert_eq!(
        event(json!({"status": "slowed", "isUsingOverage": false})),
        Signal::Clear
    );
    assert_eq!(event(json!({})), Signal::Clear);
}

/// Every word of the event's types (SDK 0.3.332).
#[test]
fn rule_8_each_documented_window_and_reason_is_what_it_is() {
    let windows = [
        "five_hour",
        "seven_day",
        "seven_day_opus",
        "seven_day_sonnet",
        "seven_day_overage_included",
    ];
    for window in windows {
        for status in ["allowed", "allowed_warning"] {
            let info = json!({"status": status, "rateLimitType": window, "isUsingOverage": false});
            let signal = event(info);
            assert!(
                matches!(signal, Signal::Clear | Signal::Near(_)),
                "{window}: {signal:?}"
            );
        }
        let signal = event(
            json!({"status": "rejected", "rateLimitType": window, "resetsAt": 5,
            "overageStatus": "rejected", "overageDisabledReason": "org_level_disabled"}),
        );
        let wanted = Signal::UsageLimit {
            window: Some(window.to_owned()),
            resets_at: Some(5),
        };
        assert_eq!(signal, wanted);
    }
    // Neither a reason nor what a person could buy says that credits are in use, or that they are not.
    for (extra, wanted) in [
        (
            json!({"overageDisabledReason": "out_of_credits"}),
            Signal::Clear,
        ),
        (
            json!({"overageDisabledReason": "new_reason", "limitScope": "org"}),
            Signal::Clear,
        ),
        (
            json!({"canUserPurchaseCredits": true, "hasChargeableSavedPaymentMethod": true}),
            Signal::Clear,
        ),
        (
            json!({"overageDisabledReason": "org_level_disabled", "isUsingOverage": true}),
            Signal::Overage(Sign::IsUsingOverage),
        ),
    ] {
        let mut info = json!({"status": "allowed", "rateLimitType": "five_hour"});
        info.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        assert_eq!(event(info.clone()), wanted, "{info}");
    }
}

#[test]
fn rule_9_credits_required_is_a_billing_refusal_and_overage_in_use_outranks_it() {
    let required =
        json!({"status": "rejected", "errorCode": "credits_required", "overageStatus": "rejected"});
    assert_eq!(event(required), Signal::CreditsRequired);
    let using =
        json!({"status": "rejected", "errorCode": "credits_required", "isUsingOverage": true});
    assert_eq!(event(using), Signal::Overage(Sign::IsUsingOverage));
}

#[test]
fn rule_9_credits_that_are_enabled_are_told_and_end_nothing() {
    let enabled =
        event(json!({"status": "allowed", "overageEnabled": true, "isUsingOverage": false}));
    assert_eq!(enabled, Signal::CreditsOn);
    for policy in [Policy::RequireOff, Policy::Warn] {
        assert!(matches!(enabled.reaction(policy), Reaction::Tell(_)));
    }
    let limit =
        event(json!({"status": "rejected", "rateLimitType": "five_hour", "overageEnabled": true}));
    assert!(matches!(limit, Signal::UsageLimit { .. }));
}

#[test]
fn bug_048_a_plain_429_is_a_throttle_and_no_limit() {
    // What 2.1.332 prints for a 429 without unified headers.
    assert_eq!(
        event(json!({"status": "rejected", "isUsingOverage": false})),
        Signal::Throttle
    );
    assert_eq!(headers(&[("status", "allowed")], 429), Signal::Throttle);
    let limit = headers(
        &[
            ("status", "rejected"),
            ("representative-claim", "seven_day"),
            ("reset", "1796073991"),
        ],
        429,
    );
    let wanted = Signal::UsageLimit {
        window: Some("seven_day".to_owned()),
        resets_at: Some(1_796_073_991),
    };
    assert_eq!(limit, wanted);
}

#[test]
fn bug_048_sentences_of_every_version_are_told_apart() {
    for text in [
        "You've hit your session limit · resets 4pm (UTC)",
        "You've hit your weekly limit · resets Aug 5, 7am (America/New_York)",
        "You've hit your 5-hour limit · resets 9:26pm (UTC)",
        "Claude AI usage limit reached|1762952400",
    ] {
        let signal = failure(FailureKind::RateLimited, text);
        assert!(
            matches!(signal, Signal::UsageLimit { .. }),
            "{text}: {signal:?}"
        );
    }
    let old = failure(FailureKind::UsageLimit, "usage limit reached|1962952400");
    let Reaction::End { error, .. } = old.reaction(Policy::Warn) else {
        panic!()
    };
    assert!(error.resets_at().is_some() && !error.is_retryable());
    let past = failure(FailureKind::UsageLimit, "usage limit reached|1562952400");
    let Reaction::End { error, .. } = past.reaction(Policy::Warn) else {
        panic!()
    };
    assert!(error.resets_at().is_none(), "a past reset time is ignored");
    let text = "Server is temporarily limiting requests (not your usage limit) · Rate limited";
    assert_eq!(failure(FailureKind::RateLimited, text), Signal::Throttle);
}

#[test]
fn bug_049_billing_sentences_in_any_wording() {
    for text in [
        "this would draw from extra usage",
        "this would draw from your extra usage",
        "You are out of extra usage",
        "Usage credits are required",
    ] {
        assert_eq!(
            failure(FailureKind::InvalidRequest, text),
            Signal::CreditsRequired,
            "{text}"
        );
    }
    let field = "tools.0.custom.name: mcp_usage_probe is not allowed";
    assert_eq!(failure(FailureKind::InvalidRequest, field), Signal::Clear);
    assert_eq!(failure(FailureKind::Server, "extra usage"), Signal::Clear);
}

#[test]
fn rule_6_a_notification_about_credits_is_overage() {
    // From the binaries of 2.1.294 and 2.1.332.
    for text in [
        "You're now using usage credits",
        "You're now using your usage allocation · resets 3pm",
        "Now using your usage allocation",
        "  NOW USING USAGE CREDITS",
        "Now using credits",
        "You're now using extra usage",
        "Now using extra usage",
    ] {
        assert_eq!(
            Signal::of_notification(text),
            Signal::Overage(Sign::Notification),
            "{text}"
        );
    }
    for text in [
        "You've used 80% of your session limit",
        "Error compacting conversation",
        "Now using Opus",
        "",
    ] {
        assert_eq!(Signal::of_notification(text), Signal::Clear, "{text}");
    }
}

#[test]
fn headers_say_the_same_as_events() {
    type Pairs<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Pairs<'_>, u16, Signal); 5] = [
        (
            &[("status", "allowed"), ("overage-in-use", "true")],
            200,
            Signal::Overage(Sign::OverageInUse),
        ),
        (
            &[("status", "rejected"), ("overage-status", "allowed")],
            200,
            Signal::Overage(Sign::RejectedButCovered),
        ),
        (
            &[("status", "allowed"), ("representative-claim", "overage")],
            200,
            Signal::Overage(Sign::OverageWindow),
        ),
        (
            &[("status", "paused")],
            200,
            Signal::Overage(Sign::UnknownStatus),
        ),
        (
            &[("status", "allowed"), ("5h-utilization", "0.4")],
            200,
            Signal::Clear,
        ),
    ];
    for (pairs, status, wanted) in cases {
        assert_eq!(headers(pairs, status), wanted, "{pairs:?}");
    }
    let near = headers(
        &[
            ("status", "allowed_warning"),
            ("5h-utilization", "0.8"),
            ("5h-surpassed-threshold", "0.75"),
            ("5h-reset", "9"),
            ("7d-utilization", "0.95"),
        ],
        200,
    );
    let wanted = Near {
        window: "five_hour".to_owned(),
        utilization: Some(0.8),
        resets_at: Some(9),
    };
    assert_eq!(near, Signal::Near(wanted));
}

#[test]
fn bug_052_the_policy_decides_what_overage_in_a_turn_does() {
    let overage = Signal::Overage(Sign::IsUsingOverage);
    match overage.reaction(Policy::RequireOff) {
        Reaction::End { error, closes_pool } => {
            assert!(closes_pool && error.code() == ErrorCode::Billing);
            assert!(!error.is_retryable());
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(overage.reaction(Policy::Warn), Reaction::Tell(_)));
    assert!(matches!(overage.reaction(Policy::Off), Reaction::Go));
}

#[test]
fn the_three_errors_are_three() {
    let limit = Signal::UsageLimit {
        window: Some("five_hour".to_owned()),
        resets_at: Some(4_000_000_000),
    };
    for (signal, code, retryable) in [
        (Signal::CreditsRequired, ErrorCode::Billing, false),
        (limit, ErrorCode::UsageLimit, false),
        (Signal::Throttle, ErrorCode::RateLimit, true),
    ] {
        for policy in Policy::ALL {
            let Reaction::End { error, closes_pool } = signal.reaction(policy) else {
                panic!("{signal:?}")
            };
            assert_eq!((error.code(), error.is_retryable()), (code, retryable));
            assert!(!closes_pool, "only credits in use close a pool");
        }
    }
}
