//! The usage gate, overage and limits, as the CLI hears of them from its own service. In production shape.

use std::time::{Duration, SystemTime};

use turnpass::ErrorCode;
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::{Event, Notice, StopReason};
use turnpass::limits::Policy;
use turnpass::request::Request;
use turnpass_lab::scenario::{ExtraUsage, Reply, UsageAnswer};

use crate::bench::{Answer, say};
use crate::ground::{Ground, Setup};

fn under(setup: &Setup, policy: Option<Policy>) -> Ground {
    Ground::with(setup, |options, _| options.usage_gate = policy)
}

fn credits_on(ground: &Ground) {
    ground.up.set_usage([UsageAnswer {
        extra_usage: ExtraUsage::On,
        ..UsageAnswer::default()
    }]);
}

fn notices(answer: &Answer) -> Vec<String> {
    let texts = answer.events.iter().filter_map(|event| match event {
        Event::Notice(Notice::Other { text }) => Some(text.clone()),
        _ => None,
    });
    texts.collect()
}

fn with_results(asked: &Request, message: &Message) -> Request {
    let mut next = asked.clone();
    next.messages.push(message.clone());
    let results = message
        .tool_calls()
        .map(|call| ToolResult::text(call.id.clone(), "result"));
    next.messages
        .push(Message::results(results.collect::<Vec<_>>()));
    next
}

/// Asked before each new message and not before results of tools, at no request; with it one generation stays one request.
pub(crate) async fn replay_gate_before_each_message(setup: Setup) {
    let ground = under(&setup, Some(Policy::RequireOff));
    let asked = say("[[call read {}]] [[then [[call read {}]] [[then [[say done]]]]]]");
    let (answer, seen) = ground.ask(asked.clone()).await;
    assert_eq!((&answer.done().stop, seen.len()), (&StopReason::ToolUse, 1));
    assert_eq!(ground.probes().len(), 1);
    let asked = with_results(&asked, &answer.done().message);
    let (answer, seen) = ground.ask(asked.clone()).await;
    assert_eq!((&answer.done().stop, seen.len()), (&StopReason::ToolUse, 1));
    let mut asked = with_results(&asked, &answer.done().message);
    let (answer, seen) = ground.ask(asked.clone()).await;
    assert_eq!((answer.text().as_str(), seen.len()), ("done", 1));
    assert_eq!(ground.probes().len(), 1, "results are no new message");
    asked.messages.push(answer.done().message.clone());
    asked.messages.push(Message::user("[[say on]]"));
    let (answer, seen) = ground.ask(asked).await;
    assert_eq!((answer.text().as_str(), seen.len()), ("on", 1));
    assert_eq!(ground.probes().len(), 2, "a new message is one");
    ground.finish().await;
}

/// Credits that are on: refused with nothing started or sent, or told beside the answer.
pub(crate) async fn replay_gate_with_credits_on(setup: Setup) {
    let ground = under(&setup, Some(Policy::RequireOff));
    credits_on(&ground);
    for _ in 0..2 {
        let (answer, seen) = ground.ask(say("[[say never]]")).await;
        assert_eq!(answer.code(), Some(ErrorCode::Billing), "{:?}", answer.end);
        assert!(seen.is_empty() && ground.spawned().is_empty());
    }
    ground.finish().await;

    // The replay's default is to warn.
    let ground = under(&setup, None);
    credits_on(&ground);
    // The question is asked beside the answer, which takes longer than it.
    ground.up.enqueue(Reply {
        between_events_ms: 1_500,
        ..Reply::text("hello there, this takes a moment")
    });
    let (answer, seen) = ground.ask(say("x")).await;
    assert_eq!(
        (answer.done().stop.clone(), seen.len()),
        (StopReason::EndTurn, 1)
    );
    let told = notices(&answer);
    assert!(
        told.iter()
            .any(|text| text.contains("usage credits are on for this account")),
        "{told:?}"
    );
    ground.finish().await;
}

fn limited(headers: &[(&str, String)], reply: Reply) -> Reply {
    Reply {
        headers: headers
            .iter()
            .map(|(name, value)| (format!("anthropic-ratelimit-unified-{name}"), value.clone()))
            .collect(),
        ..reply
    }
}

fn overage() -> Reply {
    let headers = [
        ("status", "rejected".to_owned()),
        ("overage-status", "allowed".to_owned()),
        ("overage-in-use", "true".to_owned()),
        ("representative-claim", "five_hour".to_owned()),
    ];
    let reply = limited(&headers, Reply::text("a long answer that is paid for"));
    Reply {
        between_events_ms: 50,
        ..reply
    }
}

/// Paid credits that are drawn on in a turn end it under `require_off`, and are told under `warn`. One request each.
pub(crate) async fn bug_052_replay_overage_in_a_turn(setup: Setup) {
    let ground = under(&setup, Some(Policy::RequireOff));
    ground.up.enqueue(overage());
    let (answer, seen) = ground.ask(say("x")).await;
    assert_eq!((answer.code(), seen.len()), (Some(ErrorCode::Billing), 1));
    ground.finish().await;
    let ground = under(&setup, None);
    ground.up.enqueue(overage());
    let (answer, seen) = ground.ask(say("x")).await;
    assert_eq!(
        (answer.done().stop.clone(), seen.len()),
        (StopReason::EndTurn, 1)
    );
    let told = notices(&answer);
    assert!(
        told.iter()
            .any(|text| text.contains("usage credits are in use now")),
        "{told:?}"
    );
    ground.finish().await;
}

/// A plan's limit has its time, a throttle is another thing, and each is one request.
pub(crate) async fn bug_048_replay_limits_and_throttles(setup: Setup) {
    let ground = under(&setup, None);
    let reset = SystemTime::now() + Duration::from_secs(3_600);
    let seconds = reset
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let headers = [
        ("status", "rejected".to_owned()),
        ("representative-claim", "five_hour".to_owned()),
        ("reset", seconds.to_string()),
        ("5h-reset", seconds.to_string()),
    ];
    let refused = || {
        Reply::error(
            429,
            "rate_limit_error",
            "This request would exceed your account's rate limit.",
        )
    };
    ground.up.enqueue(limited(&headers, refused()));
    let (answer, seen) = ground.ask(say("x")).await;
    let error = answer.error();
    assert_eq!(
        (error.code(), seen.len()),
        (ErrorCode::UsageLimit, 1),
        "{error}"
    );
    let told = error.resets_at().expect("a time");
    assert_eq!(
        told.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs(),
        seconds
    );
    ground
        .up
        .enqueue(Reply::error(429, "rate_limit_error", "slow down"));
    let (answer, seen) = ground.ask(say("x")).await;
    let error = answer.error();
    assert_eq!(
        (error.code(), seen.len()),
        (ErrorCode::RateLimit, 1),
        "{error}"
    );
    assert!(error.is_retryable());
    let (answer, _) = ground.ask(say("[[say next]]")).await;
    assert_eq!(answer.text(), "next");
    ground.finish().await;
}
