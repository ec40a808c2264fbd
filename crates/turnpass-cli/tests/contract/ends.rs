//! How a generation ends: by its stop reason, by its host, by a deadline, by a death.

use std::time::{Duration, Instant};

use turnpass::ErrorCode;
use turnpass::event::{Event, StopReason};
use turnpass_lab::rig::processes;
use turnpass_lab::scenario::{Item, Reply};

use crate::Ground;
use crate::stage::{PATIENCE, ask, ask_with_tools, hear, is_text, limits, told, until};

/// From the drop of a generation to the closed connection: the way through two runtimes on a loaded machine.
const HANG_UP: Duration = Duration::from_millis(700);

pub(crate) async fn bug_115_each_stop_reason_is_passed_on_with_one_request(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let cases = [
        ("end_turn", StopReason::EndTurn),
        ("max_tokens", StopReason::MaxTokens),
        ("stop_sequence", StopReason::StopSequence { sequence: None }),
        (
            "refusal",
            StopReason::Refusal {
                category: None,
                explanation: None,
            },
        ),
        ("pause_turn", StopReason::PauseTurn),
        (
            "model_context_window_exceeded",
            StopReason::ContextWindowExceeded,
        ),
        (
            "brand_new",
            StopReason::Other {
                word: "brand_new".into(),
            },
        ),
    ];
    for (at, (word, stop)) in cases.iter().enumerate() {
        let heard = told(&provider, ask(format!("[[say so far]] [[stop {word}]]"))).await;
        assert_eq!(heard.stop(), stop);
        assert_eq!(heard.text(), "so far");
        assert_eq!(heard.done().upstream_requests, 1, "{word}");
        assert_eq!(
            ground.stage.sent().len(),
            at + 1,
            "after {word} the CLI's further requests stay here"
        );
    }
}

pub(crate) async fn bug_115_null_is_an_error(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let heard = told(&provider, ask("[[say so far]] [[stop null]]")).await;
    assert!(heard.error().output_seen(), "{heard:?}");
    told(&provider, ask("[[say again]]")).await.done();
}

pub(crate) async fn bug_094_an_answer_without_text_is_passed_on(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for (at, text) in ["[[think only this]]", "[[empty]]"].iter().enumerate() {
        let heard = told(&provider, ask(*text)).await;
        assert_eq!(heard.stop(), &StopReason::EndTurn);
        assert_eq!(heard.text(), "");
        assert_eq!(ground.stage.sent().len(), at + 1, "{text}");
    }
}

pub(crate) async fn a_dropped_generation_closes_the_connection(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for text in [
        "[[say half]] [[stall closed]]",
        r#"[[call read {"path":"a"}]] [[stall closed]]"#,
    ] {
        let mut generation = provider.generate(ask_with_tools(text));
        let seen = |event: &Event| is_text(event) || matches!(event, Event::ToolInput { .. });
        until(&mut generation, "the first piece", seen).await;
        let number = ground.stage.sent().last().unwrap().number;
        let dropped = Instant::now();
        drop(generation);
        let closed = ground
            .stage
            .upstream
            .wait_for("a closed connection", |request| {
                request.number == number && request.client_closed_at().is_some()
            });
        let after = closed.await.unwrap().client_closed_at().unwrap() - dropped;
        assert!(
            after < HANG_UP,
            "the connection was open for {after:?} more"
        );
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    }
    assert_eq!(ground.stage.sent().len(), 4);
}

pub(crate) async fn a_generation_dropped_before_its_answer_costs_nothing_more(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    // At once; after the request went out.
    drop(provider.generate(ask("[[say never]]")));
    let mut generation = provider.generate(ask("[[stall closed]]"));
    let on_its_way = ground.stage.upstream.wait_for("the request", |request| {
        request.is_messages() && String::from_utf8_lossy(&request.body).contains("stall closed")
    });
    tokio::select! {
        seen = on_its_way => drop(seen.unwrap()),
        _ = async { while generation.next().await.is_some() {} } => panic!("it ended by itself"),
    }
    let dropped = Instant::now();
    drop(generation);
    let closed = ground
        .stage
        .upstream
        .wait_for("a closed connection", |request| {
            String::from_utf8_lossy(&request.body).contains("stall closed")
                && request.client_closed_at().is_some()
        });
    let after = closed.await.unwrap().client_closed_at().unwrap() - dropped;
    assert!(
        after < HANG_UP,
        "the connection was open for {after:?} more"
    );
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

pub(crate) async fn a_killed_cli_is_one_error_and_the_next_works(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut generation = provider.generate(ask_with_tools(
        r#"[[say half]] [[call read {"path":"a"}]] [[stall closed]]"#,
    ));
    until(&mut generation, "text", is_text).await;
    for pid in ground.stage.pids() {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    let heard = hear(generation).await;
    let error = heard.failed(ErrorCode::ProcessExit);
    assert!(error.is_retryable() && error.output_seen());
    assert!(heard.calls().is_empty());
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(ground.stage.sent().len(), 2);
}

pub(crate) async fn bug_019_silence_before_and_within_an_answer_ends(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut silent = ask("[[stall closed]]");
    silent.limits = limits(2_500, 60_000, 120_000);
    ground.stage.upstream.enqueue(Reply {
        before_head_ms: 600_000,
        ..Reply::text("late")
    });
    let heard = told(&provider, silent).await;
    let error = heard.failed(ErrorCode::StartTimeout);
    assert!(error.is_retryable() && !error.output_seen());
    // Within a text, and within the input of a call.
    for items in [
        vec![Item::text("half"), Item::UntilClosed {}],
        vec![
            Item::text("half"),
            Item::tool_use("read", serde_json::json!({"path": "a"})),
            Item::UntilClosed {},
        ],
    ] {
        ground.stage.upstream.enqueue(Reply::content(items));
        let mut request = ask_with_tools("x");
        request.limits = limits(30_000, 400, 120_000);
        let heard = told(&provider, request).await;
        let error = heard.failed(ErrorCode::IdleTimeout);
        assert!(error.is_retryable() && error.output_seen());
        assert_eq!(heard.text(), "half");
        assert!(
            heard.calls().is_empty(),
            "no call of a broken answer is released"
        );
    }
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
}

pub(crate) async fn bug_102_pings_are_no_progress(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let stall = Item::Stall {
        ms: 60_000,
        ping_every_ms: std::num::NonZeroUsize::new(50),
    };
    ground
        .stage
        .upstream
        .enqueue(Reply::content([Item::text("half"), stall]));
    let mut request = ask("x");
    request.limits = limits(30_000, 600, 120_000);
    let heard = told(&provider, request).await;
    heard.failed(ErrorCode::IdleTimeout);
    assert!(heard.took < PATIENCE / 2);
}

pub(crate) async fn the_overall_deadline_holds_for_a_busy_answer(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut request = ask("[[text-size 200000]] [[chunk 10 ms 20]]");
    request.limits = limits(30_000, 30_000, 3_000);
    let heard = told(&provider, request).await;
    let error = heard.failed(ErrorCode::TotalTimeout);
    assert!(error.output_seen() && !heard.text().is_empty());
    assert!(heard.took < Duration::from_secs(8), "{:?}", heard.took);
}

pub(crate) async fn shutdown_ends_what_runs(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut generation = provider.generate(ask("[[say half]] [[stall closed]]"));
    until(&mut generation, "text", is_text).await;
    let began = Instant::now();
    provider.shutdown().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15));
    hear(generation).await.failed(ErrorCode::Closed);
    told(&provider, ask("x")).await.failed(ErrorCode::Closed);
    ground.stage.all_gone(Duration::from_secs(1)).await;
}

pub(crate) async fn nothing_is_left_behind(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    told(&provider, ask("[[say a]]")).await.done();
    let mut generation = provider.generate(ask("[[say half]] [[stall closed]]"));
    until(&mut generation, "text", is_text).await;
    drop(provider);
    drop(generation);
    ground.stage.all_gone(Duration::from_secs(5)).await;
    // What was killed beside the leader is reaped a moment later; the runtime goes on meanwhile.
    let pids = ground.stage.pids();
    let left =
        tokio::task::spawn_blocking(move || processes::wait_gone(&pids, Duration::from_secs(5)));
    assert_eq!(left.await.unwrap(), Vec::<i32>::new());
    let open = ground
        .stage
        .upstream
        .wait_connections("no connection left", |all| all.open() == 0);
    open.await.unwrap();
}
