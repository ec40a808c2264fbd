//! Every way in which a generation ends.

use std::time::{Duration, Instant};

use serde_json::json;
use turnpass::ErrorCode;
use turnpass::event::{Event, Notice, StopReason};
use turnpass::request::Limits;
use turnpass_lab::rig::{MadeUpHome, SignIn};
use turnpass_lab::scenario::{Cut, CutAt, CutHow, Item, Reply, When};

use crate::bench::{BOUND, body, drain, read_until, say, until};
use crate::ground::{Ground, Setup};

fn is_text(event: &Event) -> bool {
    matches!(event, Event::Text { .. })
}

/// Whatever the model stops for, the CLI's further requests do not leave: with tools and without, in one piece and slowly.
pub(crate) async fn replay_stops_with_one_request(setup: Setup) {
    let ground = Ground::new(&setup);
    let refusal = StopReason::Refusal {
        category: None,
        explanation: None,
    };
    let cases = [
        ("[[say so far]]", "so far", StopReason::EndTurn),
        (
            "[[say so far]] [[stop max_tokens]]",
            "so far",
            StopReason::MaxTokens,
        ),
        (
            "[[say so far]] [[stop model_context_window_exceeded]]",
            "so far",
            StopReason::ContextWindowExceeded,
        ),
        ("[[say so far]] [[stop refusal]]", "so far", refusal),
        (
            "[[say so far]] [[stop pause_turn]]",
            "so far",
            StopReason::PauseTurn,
        ),
        ("[[think only this]]", "", StopReason::EndTurn),
        ("[[empty]]", "", StopReason::EndTurn),
    ];
    for (directives, text, stop) in cases {
        // In one piece, but not in the same moment as the request: no service is that near.
        for slow in [" [[delay 250]]", " [[delay 250]] [[chunk 1 ms 5]]"] {
            for tools in [true, false] {
                let mut request = say(&format!("{directives}{slow}"));
                if !tools {
                    request.tools.clear();
                }
                let (answer, seen) = ground.ask(request).await;
                let what = format!("{directives} {slow} {tools}");
                assert_eq!(answer.done().stop, stop, "{what}");
                assert_eq!(answer.text(), text, "{what}");
                assert_eq!(seen.len(), 1, "{what}");
                assert_eq!(
                    body(&seen[0])["tools"].as_array().map_or(0, Vec::len),
                    if tools { 2 } else { 0 }
                );
            }
        }
    }
    ground.finish().await;
}

/// What fails is one typed error, and the next generation works.
pub(crate) async fn replay_failing_service(setup: Setup) {
    let ground = Ground::new(&setup);
    let cases = [
        (
            400,
            "invalid_request_error",
            "messages.0: no",
            ErrorCode::UpstreamRejected,
        ),
        (
            400,
            "invalid_request_error",
            "prompt is too long: 9 > 8",
            ErrorCode::ContextLengthExceeded,
        ),
        (
            400,
            "invalid_request_error",
            "You are out of extra usage",
            ErrorCode::Billing,
        ),
        (403, "permission_error", "no", ErrorCode::Forbidden),
        (404, "not_found_error", "model: x", ErrorCode::ModelNotFound),
        (
            413,
            "request_too_large",
            "too large",
            ErrorCode::HistoryTooLarge,
        ),
        (429, "rate_limit_error", "slow down", ErrorCode::RateLimit),
        (500, "api_error", "oops", ErrorCode::UpstreamError),
        (529, "overloaded_error", "busy", ErrorCode::Overloaded),
    ];
    let mut counts = Vec::new();
    for (at, (status, kind, said, code)) in cases.into_iter().enumerate() {
        let name = format!("case {at}.");
        // However often the CLI asks.
        ground.up.enqueue(Reply {
            when: When {
                contains: Some(name.clone()),
                ..When::default()
            },
            times: 20,
            ..Reply::error(status, kind, said)
        });
        let (answer, seen) = ground.ask(say(&name)).await;
        let error = answer.error();
        assert_eq!(error.code(), code, "{status} {said}: {error}");
        assert_eq!(error.status(), Some(status), "{error}");
        assert!(!error.output_seen());
        counts.push((status, seen.len()));
    }
    eprintln!(
        "MEASURED {}: requests of a refused generation: {counts:?}",
        setup.name()
    );
    // Only these three make the CLI ask again, for a moment and without an answer.
    assert!(
        counts
            .iter()
            .all(|(status, count)| *count == 1 || matches!(status, 400 | 404)),
        "{counts:?}"
    );
    for (kind, code) in [
        ("overloaded_error", ErrorCode::Overloaded),
        ("rate_limit_error", ErrorCode::RateLimit),
    ] {
        let (answer, seen) = ground
            .ask(say(&format!("[[say half of this]] [[error {kind} mid]]")))
            .await;
        assert_eq!((answer.code(), seen.len()), (Some(code), 1));
        assert!(answer.error().output_seen());
    }
    for at in [CutAt::MidBlock, CutAt::BeforeMessageDelta] {
        let reply = Reply::content([
            Item::text("half"),
            Item::tool_use("read", json!({"path": "a"})),
        ]);
        ground.up.enqueue(Reply {
            cut: Some(Cut {
                at,
                how: CutHow::End,
            }),
            ..reply
        });
        let (answer, seen) = ground.ask(say("x")).await;
        assert_eq!(
            (answer.code(), seen.len()),
            (Some(ErrorCode::StreamInterrupted), 1),
            "{at:?}"
        );
        assert!(answer.calls().is_empty() && answer.error().is_retryable());
    }
    let (answer, _) = ground.ask(say("[[say next]]")).await;
    assert_eq!(answer.text(), "next");
    ground.finish().await;
}

/// Silence before the answer and within it.
pub(crate) async fn bug_019_replay_deadlines(setup: Setup) {
    let ground = Ground::new(&setup);
    let long = Duration::from_secs(120);
    let mut request = say("x");
    request.limits = Limits {
        start: Duration::from_secs(15),
        idle: long,
        total: long,
    };
    ground.up.enqueue(Reply {
        before_head_ms: 600_000,
        ..Reply::text("late")
    });
    let (answer, seen) = ground.ask(request.clone()).await;
    assert_eq!(answer.code(), Some(ErrorCode::StartTimeout));
    assert_eq!(seen.len(), 1);
    request.limits = Limits {
        start: long,
        idle: Duration::from_millis(700),
        total: long,
    };
    ground
        .up
        .enqueue(Reply::content([Item::text("half"), Item::UntilClosed {}]));
    let (answer, _) = ground.ask(request.clone()).await;
    assert_eq!(answer.code(), Some(ErrorCode::IdleTimeout));
    assert!(answer.error().output_seen());
    request.limits = Limits {
        start: long,
        idle: long,
        total: Duration::from_secs(5),
    };
    request.messages = say("[[text-size 400000]] [[chunk 10 ms 20]]").messages;
    let (answer, _) = ground.ask(request).await;
    assert_eq!(answer.code(), Some(ErrorCode::TotalTimeout));
    ground.finish().await;
}

/// A host that leaves: the service's connection closes, process and files go.
pub(crate) async fn replay_cancels(setup: Setup) {
    let ground = Ground::new(&setup);
    for _ in 0..5 {
        drop(ground.generate(say("[[say never]]")));
    }
    for _ in 0..4 {
        ground.up.enqueue(Reply::content([
            Item::text("a partial answer"),
            Item::UntilClosed {},
        ]));
        let mut generation = ground.generate(say("go on"));
        read_until(&mut generation, is_text).await;
        let number = ground.up.requests().last().unwrap().number;
        let dropped = Instant::now();
        drop(generation);
        let closed = ground
            .up
            .wait_for_within("a closed connection", BOUND, |request| {
                request.number == number && request.client_closed_at().is_some()
            })
            .await
            .unwrap();
        let lag = closed
            .client_closed_at()
            .unwrap()
            .saturating_duration_since(dropped);
        assert!(lag < Duration::from_secs(3), "{lag:?}");
        ground.all_gone().await;
    }
    // While the service is silent.
    ground.up.enqueue(Reply {
        before_head_ms: 120_000,
        ..Reply::text("late")
    });
    let before = ground.count();
    let generation = ground.generate(say("go on"));
    until("the request", || ground.count() > before).await;
    drop(generation);
    ground.all_gone().await;
    let (answer, seen) = ground.ask(say("[[say whole]]")).await;
    assert_eq!((answer.text().as_str(), seen.len()), ("whole", 1));
    ground.finish().await;
}

/// A typed failure, no tool released, and the next generation works.
pub(crate) async fn replay_cli_killed(setup: Setup) {
    let ground = Ground::new(&setup);
    ground.up.enqueue(Reply::content([
        Item::text("partial"),
        Item::Hold {
            gate: "never".into(),
        },
        Item::tool_use("write", json!({"path": "a"})),
    ]));
    let mut generation = ground.generate(say("go on"));
    read_until(&mut generation, is_text).await;
    kill(ground.spawned().last().unwrap().pid);
    let answer = drain(generation).await;
    assert_eq!(answer.code(), Some(ErrorCode::ProcessExit));
    assert!(answer.error().output_seen() && answer.calls().is_empty());
    ground.all_gone().await;
    let (next, seen) = ground.ask(say("[[say whole]]")).await;
    assert_eq!((next.text().as_str(), seen.len()), ("whole", 1));
    ground.finish().await;
}

/// A sign-in that the service refuses: renewed once by the CLI, or an error that says what to do.
pub(crate) async fn replay_expired_sign_in(setup: Setup) {
    let ground = Ground::new(&setup);
    let refused = || Reply::error(401, "authentication_error", "invalid bearer token");
    ground.up.enqueue(refused());
    let (answer, seen) = ground.ask(say("[[say renewed]]")).await;
    if answer.end.is_ok() {
        assert_eq!((answer.text().as_str(), seen.len()), ("renewed", 2));
        assert_eq!(answer.done().upstream_requests, 2);
        let told = |event: &Event| {
            matches!(
                event,
                Event::Notice(Notice::Retry {
                    status: Some(401),
                    ..
                })
            )
        };
        assert!(answer.events.iter().any(told));
    } else {
        // Its renewal had nowhere to go.
        assert_eq!(answer.code(), Some(ErrorCode::Auth), "{}", answer.error());
    }
    for _ in 0..4 {
        ground.up.enqueue(refused());
    }
    let (answer, seen) = ground.ask(say("x")).await;
    let error = answer.error();
    assert_eq!(error.code(), ErrorCode::Auth, "{error}");
    assert!(error.remedy().contains("claude auth login"), "{error}");
    // A renewal that succeeds is tried out, and once more when the service refuses that too.
    let most = if setup.is_production() { 3 } else { 2 };
    assert!(seen.len() <= most, "{}", seen.len());
    ground.finish().await;

    let ground = Ground::with(&setup, |_, dir| {
        std::fs::remove_dir_all(dir.join("home")).unwrap();
        MadeUpHome::with(&dir.join("home"), SignIn::SignedOut).unwrap();
    });
    let (answer, seen) = ground.ask(say("x")).await;
    assert_eq!((answer.code(), seen.len()), (Some(ErrorCode::Auth), 0));
    assert!(ground.spawned().is_empty(), "nothing is started for nobody");
    ground.finish().await;
}

pub(crate) fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
