//! The pool's seats and places: who waits is served, who leaves has left, and what ends is gone.

use std::time::{Duration, Instant};

use serde_json::json;
use turnpass::conversation::Message;
use turnpass::limits::Policy;
use turnpass::limits::budget::Allowance;
use turnpass::pool::status;
use turnpass::relay::PROCESS_BYTES;
use turnpass::{ErrorCode, Generation, Provider, Request};
use turnpass_lab::cli::{EmulatorOptions, Recording, Run, Script};
use turnpass_lab::scenario::Reply;

use crate::stage::{
    Heard, Stage, WARM, ask, ask_with_tools, go_on, hear, is_text, limits, told, until,
};
use crate::{good, turns};

/// Far below every deadline of a request, far above what a start takes on a loaded machine.
const SOON: Duration = Duration::from_secs(20);
/// From the end of a generation until everything of its process is gone.
const GONE: Duration = Duration::from_secs(6);

/// A pool with one place.
fn narrow(stage: &Stage) -> Provider {
    stage.pool(|options| options.memory_budget_bytes = PROCESS_BYTES)
}

fn of(session: &str, text: &str) -> Request {
    let mut request = ask(text);
    request.session.0 = session.to_owned();
    request
}

/// Gives everything that can go on the chance to, so that what waits is where it waits.
async fn settled() {
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
}

async fn soon(what: &str, generation: Generation) -> Heard {
    let heard = tokio::time::timeout(SOON, hear(generation)).await;
    heard.unwrap_or_else(|_| panic!("{what}"))
}

/// Waits until what a pool shows of itself is so.
async fn shown(stage: &Stage, what: &str, is: impl Fn(usize) -> bool) {
    let end = Instant::now() + SOON;
    loop {
        let all = status::read(&stage.path("state"));
        if is(all.iter().map(|one| one.sessions.len()).sum()) {
            return;
        }
        assert!(Instant::now() < end, "never {what}: {all:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn who_waits_for_a_place_has_it_once_another_conversation_rests() {
    let stage = Stage::emulator();
    let provider = narrow(&stage);
    let mut first = provider.generate(of("a", "[[say half]] [[hold open]]"));
    until(&mut first, "text", is_text).await;
    let second = provider.generate(of("b", "[[say second]]"));
    settled().await;
    stage.upstream.release("open");
    hear(first).await.done();
    assert_eq!(soon("nobody woke it", second).await.text(), "second");
}

#[tokio::test]
async fn many_who_wait_for_one_place_are_all_served() {
    let stage = Stage::emulator();
    let provider = narrow(&stage);
    let all = (0..6).map(|at| provider.generate(of(&format!("s{at}"), &format!("[[say {at}]]"))));
    let all: Vec<_> = all
        .map(|generation| soon("one was left waiting", generation))
        .collect();
    for (at, heard) in futures_util::future::join_all(all).await.iter().enumerate() {
        assert_eq!(heard.text(), at.to_string());
    }
    assert_eq!(stage.recording().runs.len(), 6, "one process each");
}

#[tokio::test]
async fn who_waits_ends_no_more_conversations_than_it_needs() {
    let stage = Stage::emulator();
    let provider = stage.pool(|options| options.memory_budget_bytes = 4 * PROCESS_BYTES);
    for session in ["a", "b", "c", "d"] {
        told(&provider, of(session, "[[say x]]")).await.done();
    }
    let (first, second) = (of("e", "[[say x]]"), of("f", "[[say x]]"));
    let both = (told(&provider, first), told(&provider, second));
    let (first, second) = tokio::join!(both.0, both.1);
    first.done();
    second.done();
    shown(&stage, "four conversations", |count| count == 4).await;
}

#[tokio::test]
async fn bug_080_a_cancelled_waiter_leaves_the_queue_and_asks_nothing() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let mut first = provider.generate(of("a", "[[say half]] [[hold open]]"));
    until(&mut first, "text", is_text).await;
    let waits = provider.generate(of("a", "[[say nobody wants this]]"));
    settled().await;
    drop(waits);
    settled().await;
    let third = provider.generate(of("a", "[[say third]]"));
    settled().await;
    stage.upstream.release("open");
    hear(first).await.done();
    assert_eq!(
        soon("the seat was not given on", third).await.text(),
        "third"
    );
    let asked: Vec<_> = stage.sent();
    assert_eq!(asked.len(), 2, "{asked:#?}");
}

#[tokio::test]
async fn bug_080_two_conversations_of_one_key_at_once_are_kept_apart() {
    for count in [2, 5] {
        let stage = Stage::emulator();
        let provider = stage.pool(|_| {});
        let all = (0..count).map(|at| told(&provider, of("a", &format!("[[say answer {at}]]"))));
        let all: Vec<_> = all.collect();
        for (at, heard) in futures_util::future::join_all(all).await.iter().enumerate() {
            assert_eq!(heard.text(), format!("answer {at}"));
        }
        for sent in stage.sent() {
            assert_eq!(crate::stage::host_messages(&sent).len(), 1, "of one alone");
        }
    }
}

#[tokio::test]
async fn a_generation_dropped_during_the_start_asks_nothing() {
    let slow = EmulatorOptions {
        start_delay_ms: 700,
        ..EmulatorOptions::default()
    };
    let stage = Stage::script(Script::runs("2.1.332", [Run::Emulator(slow)]));
    let provider = stage.pool(|_| {});
    let dropped = provider.generate(of("a", "[[say nobody wants this]]"));
    stage
        .recorded("started", |recording| recording.runs.len() == 1)
        .await;
    drop(dropped);
    let heard = soon(
        "the key is blocked",
        provider.generate(of("a", "[[say next]]")),
    )
    .await;
    assert_eq!(heard.text(), "next");
    assert_eq!(stage.sent().len(), 1);
}

#[tokio::test]
async fn a_start_that_is_dropped_gives_its_place_to_who_waits_for_it() {
    let slow = EmulatorOptions {
        start_delay_ms: 60_000,
        ..EmulatorOptions::default()
    };
    let runs = [
        Run::Emulator(slow),
        Run::Emulator(EmulatorOptions::default()),
    ];
    let stage = Stage::script(Script::runs("2.1.332", runs));
    let provider = narrow(&stage);
    let first = provider.generate(of("a", "[[say first]]"));
    stage
        .recorded("started", |recording| recording.runs.len() == 1)
        .await;
    let second = provider.generate(of("b", "[[say second]]"));
    settled().await;
    drop(first);
    assert_eq!(soon("nobody woke it", second).await.text(), "second");
}

#[tokio::test]
async fn bug_043_processes_that_were_told_nothing_hold_no_turn_to_start() {
    let credits = EmulatorOptions {
        rate_limits: json!({"extra_usage": {"is_enabled": true}}),
        ..EmulatorOptions::default()
    };
    let stage = Stage::script(Script::runs("2.1.332", [Run::Emulator(credits)]));
    let provider = stage.pool(|options| {
        options.usage_gate = Some(Policy::RequireOff);
        options.spare = true;
    });
    for session in ["a", "b", "c", "d"] {
        let mut request = of(session, "[[say x]]");
        request.limits = limits(12_000, 60_000, 120_000);
        told(&provider, request).await.failed(ErrorCode::Billing);
    }
    assert!(stage.sent().is_empty());
}

#[tokio::test]
async fn bug_022_a_process_that_dies_at_rest_is_forgotten_at_once() {
    let stage = Stage::emulator();
    let provider = narrow(&stage);
    told(&provider, of("a", "[[say first]]")).await.done();
    shown(&stage, "shown", |count| count == 1).await;
    kill(stage.pids()[0]);
    shown(&stage, "forgotten", |count| count == 0).await;
    // Its place is free without anybody having to give way.
    let heard = soon("no place", provider.generate(of("b", "[[say second]]"))).await;
    assert_eq!(heard.text(), "second");
}

#[tokio::test]
async fn a_spare_that_dies_at_rest_gives_its_place_back_and_is_renewed_once() {
    let ready = json!({"type": "control_response", "response": {"subtype": "success",
        "request_id": "{{request_id}}", "response": {}}});
    let dies =
        json!({"steps": [{"expect": {"type": "control_request"}}, {"send": ready}, {"exit": 1}]});
    let runs = json!([{"emulator": {}}, dies, dies, {"emulator": {}}]);
    let stage = Stage::json(json!({"runs": runs}));
    let provider = stage.pool(|options| {
        options.spare = true;
        options.memory_budget_bytes = 2 * PROCESS_BYTES;
    });
    let request = of("a", "[[say first]]");
    let first = told(&provider, request.clone()).await;
    // The second has the place of the first: there are two, and the conversation has one of them.
    let spares = |count: usize| move |recording: &Recording| recording.runs.len() == 1 + count;
    stage.recorded("renewed", spares(2)).await;
    let mut request = go_on(&request, first.done());
    request.messages.pop();
    // Several starts long.
    let slow = "[[delay 1000]] [[say going on]]";
    request.messages.push(Message::user(slow));
    let mut next = provider.generate(request);
    until(&mut next, "text", is_text).await;
    assert_eq!(stage.pids().len(), 3, "a CLI that always dies is let be");
    hear(next).await.done();
    stage
        .recorded("made after the next generation", spares(3))
        .await;
}

#[tokio::test]
async fn bug_022_a_process_that_died_between_two_generations_costs_the_pool_no_error() {
    for settle in [false, true] {
        let stage = Stage::emulator();
        let provider = stage.pool(|_| {});
        let request = of("a", "[[say first]]");
        let heard = told(&provider, request.clone()).await;
        kill(stage.pids()[0]);
        if settle {
            stage.all_gone(GONE).await;
        }
        let next = told(&provider, go_on(&request, heard.done())).await;
        assert_eq!(next.text(), "going on");
        assert_eq!(next.done().upstream_requests, 1);
        let sent = stage.sent();
        assert_eq!(sent.len(), 2);
        assert_eq!(crate::stage::host_messages(&sent[1]).len(), 3);
    }
}

#[tokio::test]
async fn bug_022_a_last_word_of_a_process_that_died_is_no_answer() {
    let allowed = json!({"type": "rate_limit_event", "rate_limit_info": {"status": "allowed"},
        "uuid": "u", "session_id": "s"});
    let user = json!({"expect": {"type": "user"}});
    let dies = json!({"steps": ["answer_controls", user, {"send_init": null}, crate::post(WARM),
        {"send": allowed}, user, {"exit": 1}]});
    let stage = Stage::json(json!({"runs": [dies, {"emulator": {}}]}));
    let provider = stage.pool(|_| {});
    let request = of("a", "[[say first]]");
    let heard = told(&provider, request.clone()).await;
    let next = told(&provider, go_on(&request, heard.done())).await;
    assert_eq!(next.text(), "going on");
    assert_eq!(stage.sent().len(), 2);
}

#[tokio::test]
async fn a_message_that_a_dead_process_did_not_take_has_not_counted() {
    let user = json!({"expect": {"type": "user"}});
    let dies = json!({"steps": ["answer_controls", user, {"send_init": null}, crate::post(WARM),
        user, {"exit": 1}]});
    let stage = Stage::json(json!({"runs": [dies, {"emulator": {}}]}));
    let two = Allowance {
        requests: Some(2),
        tokens: None,
    };
    let provider = stage.pool(|options| options.budgets.day = two);
    let request = of("a", "[[say first]]");
    let heard = told(&provider, request.clone()).await;
    let request = go_on(&request, heard.done());
    let next = told(&provider, request.clone()).await;
    assert_eq!(next.text(), "going on");
    let third = told(&provider, go_on(&request, next.done())).await;
    third.failed(ErrorCode::Budget);
    assert_eq!(stage.sent().len(), 2);
}

#[tokio::test]
async fn what_was_asked_has_counted_whatever_came_of_it() {
    let stage = Stage::emulator();
    let three = Allowance {
        requests: Some(3),
        tokens: None,
    };
    let provider = stage.pool(|options| options.budgets.day = three);
    let fails = || Reply::error(529, "overloaded_error", "busy");
    stage.upstream.enqueue(fails());
    told(&provider, ask("x"))
        .await
        .failed(ErrorCode::Overloaded);
    let mut request = ask_with_tools("[[call read {}]]");
    let heard = told(&provider, request.clone()).await;
    request = go_on(&request, heard.done());
    stage.upstream.enqueue(fails());
    let results = told(&provider, request.clone()).await;
    results.failed(ErrorCode::Overloaded);
    told(&provider, request).await.failed(ErrorCode::Budget);
    assert_eq!(stage.sent().len(), 3);
}

#[tokio::test]
async fn a_parked_conversation_gives_its_place_up_and_goes_on_afterwards() {
    let stage = Stage::emulator();
    let provider = narrow(&stage);
    let mut request = crate::stage::ask_with_tools("[[call read {}]] [[then [[say went on]]]]");
    request.session.0 = "a".into();
    let parked = told(&provider, request.clone()).await;
    let began = Instant::now();
    told(&provider, of("b", "[[say between]]")).await.done();
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "a parked process does not end by itself: {:?}",
        began.elapsed()
    );
    let heard = told(&provider, go_on(&request, parked.done())).await;
    assert_eq!(heard.text(), "went on");
    crate::stage::assert_valid(&stage.sent());
}

#[tokio::test]
async fn overage_in_one_conversation_stops_those_who_wait() {
    let overage = json!({"type": "rate_limit_event", "rate_limit_info": {
        "status": "allowed", "isUsingOverage": true, "rateLimitType": "five_hour",
    }, "uuid": "u", "session_id": "s"});
    let run = turns(
        WARM,
        [
            json!({"post": {"reply": "ignore"}}),
            json!({"send": overage}),
            json!("hang"),
        ],
    );
    let stage = Stage::json(json!({"runs": [run, good(WARM)]}));
    let provider = stage.pool(|options| {
        options.usage_gate = Some(Policy::RequireOff);
        options.memory_budget_bytes = PROCESS_BYTES;
    });
    let first = provider.generate(of("a", "[[say x]] [[delay 1500]]"));
    stage.upstream.wait_requests(1).await.unwrap();
    let second = provider.generate(of("b", "[[say second]]"));
    settled().await;
    soon("no end", first).await.failed(ErrorCode::Billing);
    soon("no end", second).await.failed(ErrorCode::Billing);
    assert_eq!(stage.sent().len(), 1, "nothing more is sent");
    stage.all_gone(GONE).await;
}

#[tokio::test]
async fn a_dropped_pool_leaves_nobody_whatever_it_was_doing() {
    let stage = Stage::emulator();
    let provider = stage.pool(|options| options.spare = true);
    told(&provider, of("rests", "[[say x]]")).await.done();
    let mut request = crate::stage::ask_with_tools("[[call read {}]]");
    request.session.0 = "parked".into();
    told(&provider, request).await.done();
    let mut answers = provider.generate(of("answers", "[[say half]] [[stall closed]]"));
    until(&mut answers, "text", is_text).await;
    let starts = provider.generate(of("starts", "[[say x]]"));
    let waits = provider.generate(of("answers", "[[say x]]"));
    settled().await;
    drop(provider);
    for generation in [answers, starts, waits] {
        soon("no end", generation).await.failed(ErrorCode::Closed);
    }
    stage.all_gone(GONE).await;
    assert_eq!(status::read(&stage.path("state")), [], "no status is left");
    let locks = stage.path("state/pool/locks");
    let left: Vec<_> = std::fs::read_dir(locks).into_iter().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}
