//! Summaries of the pool's conversations: where each is written, and what it leaves behind.

use std::time::Duration;

use serde_json::{Value, json};
use turnpass::conversation::Message;
use turnpass::event::{Done, Event, PlanKind, StateOrder};
use turnpass::limits::budget::{Allowance, Budgets};
use turnpass::pool::{PoolOptions, ToolCarrier};
use turnpass::request::{BackendState, CallKind, StateRetirement, TransportSession};
use turnpass::{ErrorCode, Provider, Request};
use turnpass_lab::cli::{Auth, RecordedRun, Script};
use turnpass_lab::rig::processes;

use crate::pool_kinds::sub_agent;
use crate::stage::{
    Heard, Stage, ask_with_tools, assert_valid, go_on, hear, host_messages, is_text, limits, told,
    until,
};

/// The polite end of a process takes the emulator some milliseconds; a loaded machine longer.
pub(crate) const GONE: Duration = Duration::from_secs(10);
/// How often another process is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

pub(crate) fn pool(stage: &Stage) -> Provider {
    stage.pool(|_| ())
}

/// A parent's conversation of one turn, and the request that goes on with it.
pub(crate) async fn begun(provider: &Provider) -> Request {
    let first = ask_with_tools("[[say first answer]] begin");
    let heard = told(provider, first.clone()).await;
    kept(go_on(&first, heard.done()), heard.done())
}

/// With the state that the host was told to keep.
fn kept(mut next: Request, done: &Done) -> Request {
    match &done.state {
        StateOrder::Keep { state } => next.state = Some(state.clone()),
        other => panic!("{other:?} in place of a state"),
    }
    next
}

/// The summary of what `next` would go on with, and its signal.
pub(crate) fn summary(next: &Request, prompt: &str) -> (Request, StateRetirement) {
    let mut request = next.clone();
    request.call = CallKind::Summary;
    request.messages.pop();
    request.messages.push(Message::user(prompt));
    request.with_retirement()
}

pub(crate) fn how(heard: &Heard) -> (PlanKind, String) {
    let started = heard.events.iter().find_map(|event| match event {
        Event::Started { how, .. } => Some((how.kind, how.reason.clone())),
        _ => None,
    });
    started.unwrap_or_else(|| panic!("it never started: {heard:?}"))
}

pub(crate) fn has(run: &RecordedRun, flag: &str) -> bool {
    run.argv.iter().any(|arg| arg == flag)
}

/// Waits until a process is gone; nobody tells when another process ends.
pub(crate) async fn gone(pid: i32) {
    let end = tokio::time::Instant::now() + GONE;
    while !processes::wait_gone(&[pid], Duration::ZERO).is_empty() {
        assert!(tokio::time::Instant::now() < end, "{pid} is alive");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

#[track_caller]
pub(crate) fn assert_alive(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    assert!(rustix::process::test_kill_process(pid).is_ok(), "it ended");
}

/// The next request is served by the same live process, which has not lost anything.
pub(crate) async fn goes_on(provider: &Provider, stage: &Stage, next: Request, starts: usize) {
    let heard = told(provider, next).await;
    assert_eq!(heard.text(), "going on");
    assert_eq!(how(&heard).0, PlanKind::Continued);
    assert_eq!(stage.recording().runs.len(), starts);
}

/// The next request finds no live process and no state: its history is given to a new one.
async fn goes_on_anew(provider: &Provider, mut next: Request) {
    next.state = None;
    let heard = told(provider, next).await;
    assert_eq!(heard.text(), "going on");
    assert_eq!(how(&heard).0, PlanKind::Reseeded);
    assert!(matches!(heard.done().state, StateOrder::Keep { .. }));
}

#[tokio::test]
async fn summary_of_a_parent_is_a_fork_that_leaves_it_untouched() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (request, signal) = summary(&next, "[[say in short]] sum up");
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "in short");
    assert_eq!(how(&heard).0, PlanKind::Forked);
    let done = heard.done();
    assert_eq!(
        (&done.state, done.upstream_requests),
        (&StateOrder::Unchanged, 1)
    );
    assert!(!signal.is_signaled());

    let runs = stage.recording().runs;
    let [parent, fork] = &runs[..] else {
        panic!("{} starts", runs.len());
    };
    let state: Value = serde_json::from_str(&next.state.as_ref().unwrap().0).unwrap();
    assert_eq!(fork.flag("--resume"), state["session"].as_str());
    assert_eq!(fork.flag("--resume-session-at"), state["at"].as_str());
    assert_eq!(fork.flag("--max-turns"), Some("1"));
    assert!(has(fork, "--fork-session") && has(fork, "--no-session-persistence"));
    assert!(!has(parent, "--no-session-persistence"));
    assert_eq!(fork.cwd, parent.cwd);
    gone(fork.pid).await;
    assert_alive(parent.pid);

    let sent = stage.sent();
    assert_valid(&sent);
    for part in ["/system", "/tools", "/model"] {
        assert_eq!(sent[0].field(part), sent[1].field(part), "{part}");
    }
    let (first, whole) = (host_messages(&sent[0]), host_messages(&sent[1]));
    assert_eq!(first[..], whole[..1], "the prefix that the cache has");
    assert_eq!(whole.len(), 3);
    goes_on(&provider, &stage, next, 2).await;
}

#[tokio::test]
async fn summary_of_an_older_part_is_a_fork_where_it_leaves_the_conversation() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let second = begun(&provider).await;
    let heard = told(&provider, second.clone()).await;
    let third = kept(go_on(&second, heard.done()), heard.done());
    // Two turns live, the summary is of the first.
    let (mut request, signal) = summary(&second, "[[say of the first]] sum up");
    request.state.clone_from(&third.state);
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "of the first");
    assert_eq!(how(&heard).0, PlanKind::Forked);
    assert!(!signal.is_signaled());
    let sent = stage.sent();
    assert_valid(&sent);
    let messages = host_messages(&sent[2]);
    assert_eq!(messages.len(), 3);
    assert_eq!(messages[..2], host_messages(&sent[1])[..2]);
    goes_on(&provider, &stage, third, 2).await;
}

#[tokio::test]
async fn summary_in_a_fork_delays_nobody() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (request, _) = summary(&next, "[[say beside]] [[hold summary]] sum up");
    let slow = hear(provider.generate(request));
    let beside = async {
        stage.upstream.wait_requests(2).await.unwrap();
        let heard = told(&provider, next.clone()).await;
        assert_eq!(how(&heard).0, PlanKind::Continued);
        stage.upstream.release("summary");
        heard
    };
    let (summary, normal) = tokio::join!(slow, beside);
    assert_eq!((summary.text(), normal.text()).0, "beside");
    let sent = stage.sent();
    assert!(sent[2].reply.last_byte_at < sent[1].reply.last_byte_at);
}

#[tokio::test]
async fn summary_waits_for_the_call_that_its_conversation_is_in() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let mut next = begun(&provider).await;
    next.messages.pop();
    next.messages
        .push(Message::user("[[say going on]] [[hold open]] more"));
    let normal = hear(provider.generate(next.clone()));
    let after = async {
        stage.upstream.wait_requests(2).await.unwrap();
        let (request, _) = summary(&next, "[[say after it]] sum up");
        let mut generation = provider.generate(request);
        // It is under way, and its next step is the seat.
        until(&mut generation, "a notice", |event| {
            matches!(event, Event::Notice(_))
        })
        .await;
        stage.upstream.release("open");
        hear(generation).await
    };
    let (normal, summary) = tokio::join!(normal, after);
    normal.done();
    assert_eq!(summary.text(), "after it");
    let sent = stage.sent();
    assert!(sent[2].arrived_at >= sent[1].reply.last_byte_at.unwrap());
}

#[tokio::test]
async fn summaries_in_forks_of_one_conversation_are_written_one_after_the_other() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (one, _) = summary(&next, "[[say one]] [[chunk 1 ms 5]] sum up");
    let (two, _) = summary(&next, "[[say two]] [[chunk 1 ms 5]] sum up");
    let (one, two) = tokio::join!(told(&provider, one), told(&provider, two));
    assert_eq!((one.text(), two.text()), ("one".into(), "two".into()));
    let mut sent = stage.sent().split_off(1);
    sent.sort_by_key(|request| request.arrived_at);
    assert!(sent[1].arrived_at >= sent[0].reply.last_byte_at.unwrap());
}

#[tokio::test]
async fn summary_without_the_stored_state_is_in_place_and_retires_the_parent() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let other = {
        // Another conversation's state: right in form, and not this one's.
        let mut state: Value = serde_json::from_str(&next.state.as_ref().unwrap().0).unwrap();
        state["session"] = json!("6f1f6f5e-7f0e-4f3a-9d52-0a4f6a0f3c11");
        BackendState(state.to_string())
    };
    let mut next = next;
    for (state, starts) in [(None, 1), (Some(other), 2)] {
        let (mut request, signal) = summary(&next, "[[say in place]] sum up");
        request.state = state;
        let heard = told(&provider, request).await;
        assert_eq!(heard.text(), "in place");
        let (kind, reason) = how(&heard);
        assert_eq!(kind, PlanKind::Continued);
        assert!(reason.contains("in place"), "{reason}");
        let done = heard.done();
        assert_eq!(
            (&done.state, done.upstream_requests),
            (&StateOrder::Clear, 1)
        );
        assert!(signal.is_signaled(), "a dropped end would say nothing");
        let runs = stage.recording().runs;
        assert_eq!(runs.len(), starts, "no further process");
        gone(runs[starts - 1].pid).await;
        goes_on_anew(&provider, next.clone()).await;
        // The same once more, on the new process.
        next.messages.push(Message::assistant("going on"));
        next.messages.push(Message::user("[[say going on]] more"));
    }
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn summary_whose_fork_fails_before_output_is_in_place() {
    let exits =
        json!({"steps": [{"stderr": "No conversation found with session ID: x\n"}, {"exit": 1}]});
    let begins = json!({"steps": ["answer_controls", {"expect": {"type": "user"}}, {"send_init": null}, {"exit": 3}]});
    for failing in [exits, begins] {
        let stage = Stage::json(json!({"runs": [{"emulator": {}}, failing, {"emulator": {}}]}));
        let provider = pool(&stage);
        let next = begun(&provider).await;
        let (request, signal) = summary(&next, "[[say in place]] sum up");
        let heard = told(&provider, request).await;
        assert_eq!(heard.text(), "in place");
        let (kind, reason) = how(&heard);
        assert_eq!(kind, PlanKind::Continued);
        assert!(reason.contains("a fork failed"), "{reason}");
        assert_eq!(heard.done().state, StateOrder::Clear);
        assert!(signal.is_signaled());
        let runs = stage.recording().runs;
        assert_eq!(runs.len(), 2);
        gone(runs[0].pid).await;
        assert_eq!(stage.sent().len(), 2, "the fork sent nothing");
        goes_on_anew(&provider, next).await;
    }
}

#[tokio::test]
async fn summary_that_the_service_refuses_in_a_fork_costs_the_parent_nothing() {
    let refusals = [
        ("[[status 529 {}]]", ErrorCode::Overloaded),
        ("[[status 429 {}]]", ErrorCode::RateLimit),
        (
            "[[say half]] [[cut mid-block close]]",
            ErrorCode::StreamInterrupted,
        ),
    ];
    for (prompt, code) in refusals {
        let stage = Stage::emulator();
        let provider = pool(&stage);
        let next = begun(&provider).await;
        let (request, signal) = summary(&next, prompt);
        let heard = told(&provider, request).await;
        let error = heard.failed(code);
        assert!(!error.backend_state_retired() && !signal.is_signaled());
        assert_eq!(stage.sent().len(), 2, "{code}: not asked in place too");
        gone(stage.pids()[1]).await;
        goes_on(&provider, &stage, next, 2).await;
    }
}

#[tokio::test]
async fn summary_that_is_dropped_in_a_fork_costs_the_parent_nothing() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (request, signal) = summary(&next, "[[say half]] [[stall closed]]");
    let mut generation = provider.generate(request);
    until(&mut generation, "text", is_text).await;
    drop(generation);
    gone(stage.pids()[1]).await;
    assert!(!signal.is_signaled());
    goes_on(&provider, &stage, next, 2).await;
}

#[tokio::test]
async fn summary_that_is_dropped_while_its_fork_starts_is_not_sent() {
    let slow = json!({"emulator": {"start_delay_ms": 60_000}});
    let stage = Stage::json(json!({"runs": [{"emulator": {}}, slow]}));
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (request, signal) = summary(&next, "[[say never]] sum up");
    let generation = provider.generate(request);
    stage
        .recorded("a fork", |recording| recording.runs.len() == 2)
        .await;
    drop(generation);
    gone(stage.pids()[1]).await;
    assert!(!signal.is_signaled());
    goes_on(&provider, &stage, next, 2).await;
    assert_eq!(stage.sent().len(), 2);
}

#[tokio::test]
async fn summary_that_fails_in_place_marks_its_error_and_retires_the_parent() {
    for (prompt, code) in [
        ("[[status 529 {}]]", ErrorCode::Overloaded),
        (
            "[[say half]] [[cut mid-block close]]",
            ErrorCode::StreamInterrupted,
        ),
        (
            "[[say I look first]] [[call read {}]]",
            ErrorCode::SummaryToolCall,
        ),
    ] {
        let stage = Stage::emulator();
        let provider = pool(&stage);
        let next = begun(&provider).await;
        let (mut request, signal) = summary(&next, prompt);
        request.state = None;
        let heard = told(&provider, request).await;
        let error = heard.failed(code);
        assert!(
            error.backend_state_retired() && signal.is_signaled(),
            "{error}"
        );
        let json = serde_json::to_value(error).unwrap();
        assert_eq!(json["backend_state_retired"], true);
        gone(stage.pids()[0]).await;
        goes_on_anew(&provider, next).await;
        assert_eq!(stage.sent().len(), 3);
    }
}

#[tokio::test]
async fn summary_that_is_dropped_in_place_gives_the_signal_and_retires_the_parent() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (mut request, signal) = summary(&next, "[[say half]] [[stall closed]]");
    request.state = None;
    let mut generation = provider.generate(request);
    until(&mut generation, "text", is_text).await;
    drop(generation);
    assert!(signal.is_signaled());
    gone(stage.pids()[0]).await;
    goes_on_anew(&provider, next).await;
}

#[tokio::test]
async fn summary_in_place_that_a_shutdown_ends_is_marked() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let (mut request, signal) = summary(&next, "[[say half]] [[stall closed]]");
    request.state = None;
    let mut generation = provider.generate(request);
    until(&mut generation, "text", is_text).await;
    provider.shutdown().await.unwrap();
    let heard = hear(generation).await;
    assert!(heard.failed(ErrorCode::Closed).backend_state_retired());
    assert!(signal.is_signaled());
    stage.all_gone(GONE).await;
}

#[tokio::test]
async fn summary_without_a_live_process_is_told_anew_and_clears_only_when_it_succeeds() {
    let stage = Stage::emulator();
    let next = {
        let provider = pool(&stage);
        let next = begun(&provider).await;
        provider.shutdown().await.unwrap();
        next
    };
    let provider = pool(&stage);
    let (request, signal) = summary(&next, "[[status 529 {}]]");
    let heard = told(&provider, request).await;
    let error = heard.failed(ErrorCode::Overloaded);
    assert!(!error.backend_state_retired() && !signal.is_signaled());

    let (request, signal) = summary(&next, "[[say anew]] sum up");
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "anew");
    assert_eq!(how(&heard).0, PlanKind::Reseeded);
    let done = heard.done();
    assert_eq!(
        (&done.state, done.upstream_requests),
        (&StateOrder::Clear, 1)
    );
    assert!(!signal.is_signaled(), "nothing was retired");
    let runs = stage.recording().runs;
    assert_eq!(runs.len(), 3);
    for run in &runs[1..] {
        assert!(has(run, "--no-session-persistence") && !has(run, "--resume"));
        assert_eq!(run.flag("--max-turns"), Some("1"));
        gone(run.pid).await;
    }
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn summary_of_another_history_retires_the_live_process() {
    for (prompt, fails) in [("[[say anew]] sum up", false), ("[[status 529 {}]]", true)] {
        let stage = Stage::emulator();
        let provider = pool(&stage);
        let mut next = begun(&provider).await;
        next.state = None;
        next.messages[0] = Message::user("[[say first answer]] otherwise");
        let (request, signal) = summary(&next, prompt);
        let heard = told(&provider, request).await;
        assert!(signal.is_signaled());
        if fails {
            assert!(heard.failed(ErrorCode::Overloaded).backend_state_retired());
        } else {
            assert_eq!(how(&heard).0, PlanKind::Reseeded);
            assert_eq!(heard.done().state, StateOrder::Clear);
        }
        let runs = stage.recording().runs;
        assert_eq!(runs.len(), 2);
        assert!(has(&runs[1], "--no-session-persistence"));
        gone(runs[0].pid).await;
        goes_on_anew(&provider, next).await;
    }
}

#[tokio::test]
async fn summary_in_the_middle_of_calls_is_in_place() {
    for with_results in [true, false] {
        let stage = Stage::emulator();
        let provider = pool(&stage);
        let second = begun(&provider).await;
        let mut calling = second.clone();
        calling.messages.pop();
        calling.messages.push(Message::user(
            "[[call read {}]] [[then [[say in place]]]] look",
        ));
        let heard = told(&provider, calling.clone()).await;
        assert_eq!(heard.calls().len(), 1);
        let mut request = go_on(&calling, heard.done());
        request.call = CallKind::Summary;
        if !with_results {
            // The host sums up what was before the turn that waits.
            request.messages.truncate(2);
        }
        let (mut request, signal) = request.with_retirement();
        request.state.clone_from(&second.state);
        request
            .messages
            .push(Message::user("[[say in place]] sum up"));
        let heard = told(&provider, request).await;
        assert_eq!(heard.text(), "in place");
        let done = heard.done();
        assert_eq!(
            (&done.state, done.upstream_requests),
            (&StateOrder::Clear, 1)
        );
        assert!(signal.is_signaled());
        assert_eq!(stage.pids().len(), 1);
        gone(stage.pids()[0]).await;
        let sent = stage.sent();
        assert_valid(&sent);
        assert_eq!(sent.len(), 3);
    }
}

#[tokio::test]
async fn summary_in_which_the_model_calls_a_tool_is_an_error_and_no_call() {
    for prompt in [
        "[[say I look first]] [[call read {\"path\":\"x\"}]]",
        "[[call read {}]]",
        "[[raw-call read {\"path\":]]",
        "[[call nobody {}]]",
    ] {
        let stage = Stage::emulator();
        let provider = pool(&stage);
        let next = begun(&provider).await;
        let (request, signal) = summary(&next, prompt);
        let heard = told(&provider, request).await;
        let error = heard.failed(ErrorCode::SummaryToolCall);
        assert!(error.is_retryable() && !error.backend_state_retired());
        assert!(!signal.is_signaled());
        let shows_a_call = |event: &Event| {
            matches!(
                event,
                Event::ToolInput { .. } | Event::ToolCall(_) | Event::ToolRejected { .. }
            )
        };
        assert_eq!(heard.count(shows_a_call), 0, "{prompt}");
        gone(stage.pids()[1]).await;
        assert_eq!(stage.sent().len(), 2, "{prompt}: the CLI did not go on");
        goes_on(&provider, &stage, next, 2).await;
    }
}

#[tokio::test]
async fn summary_over_the_http_carrier_goes_the_same_ways() {
    let stage = Stage::emulator();
    let provider = stage.pool(|options| options.tools = Some(ToolCarrier::Http));
    let next = begun(&provider).await;
    let (request, _) = summary(&next, "[[say I look]] [[call read {}]]");
    let heard = told(&provider, request).await;
    heard.failed(ErrorCode::SummaryToolCall);
    assert_eq!(stage.sent().len(), 2);
    let (request, _) = summary(&next, "[[say in short]] sum up");
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "in short");
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let (mut request, signal) = summary(&next, "[[say in place]] sum up");
    request.state = None;
    let heard = told(&provider, request).await;
    assert_eq!(heard.done().state, StateOrder::Clear);
    assert!(signal.is_signaled());
    goes_on_anew(&provider, next).await;
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn summary_that_gets_no_process_retires_nothing() {
    // No seat: another call has it until the deadline.
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let mut next = begun(&provider).await;
    next.messages.pop();
    next.messages
        .push(Message::user("[[say going on]] [[hold open]] more"));
    let normal = hear(provider.generate(next.clone()));
    let summarised = async {
        stage.upstream.wait_requests(2).await.unwrap();
        let (mut request, signal) = summary(&next, "[[say never]] sum up");
        request.limits = limits(200, 60_000, 60_000);
        let heard = told(&provider, request).await;
        let error = heard.failed(ErrorCode::StartTimeout);
        assert!(!error.backend_state_retired() && !signal.is_signaled());
        stage.upstream.release("open");
    };
    let (normal, ()) = tokio::join!(normal, summarised);
    assert_eq!(normal.text(), "going on");

    // No sign-in, and no live process.
    let stage = Stage::script(Script {
        auth: vec![Auth::signed_out()],
        ..Script::emulator("2.1.332")
    });
    let (request, signal) = summary(&next, "[[say never]] sum up");
    let heard = told(&pool(&stage), request).await;
    let error = heard.failed(ErrorCode::Auth);
    assert!(!error.backend_state_retired() && !signal.is_signaled());

    // A budget that is used up, before anything is written in place.
    let stage = Stage::emulator();
    let provider = stage.pool(|options| {
        options.budgets = Budgets {
            session: Allowance {
                requests: Some(1),
                tokens: None,
            },
            ..Budgets::default()
        };
    });
    let next = begun(&provider).await;
    let (mut request, signal) = summary(&next, "[[say never]] sum up");
    request.state = None;
    let heard = told(&provider, request).await;
    let error = heard.failed(ErrorCode::Budget);
    assert!(!error.backend_state_retired() && !signal.is_signaled());
    assert_alive(stage.pids()[0]);
    assert_eq!(stage.sent().len(), 1);
}

#[tokio::test]
async fn summary_with_no_room_for_a_second_process_loses_nothing() {
    let stage = Stage::emulator();
    let provider = stage.pool(|options| options.memory_budget_bytes = 1);
    let next = begun(&provider).await;
    let (request, signal) = summary(&next, "[[say in short]] sum up");
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "in short");
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    assert!(!signal.is_signaled());
    // The live process made room, as for any conversation; its own is on disk, and the host's state still holds.
    let heard = told(&provider, next).await;
    assert_eq!(heard.text(), "going on");
    assert_eq!(how(&heard).0, PlanKind::Resumed);
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn summary_leaves_the_spare_to_those_whom_it_fits() {
    let stage = Stage::emulator();
    let provider = stage.pool(|options: &mut PoolOptions| options.spare = true);
    let next = begun(&provider).await;
    stage
        .recorded("a spare", |recording| recording.runs.len() == 2)
        .await;
    let spare = stage.pids()[1];
    let (request, _) = summary(&next, "[[say in short]] sum up");
    told(&provider, request).await.done();
    let mut anew = next.clone();
    anew.session.0 = "nobody's".to_owned();
    let (request, _) = summary(&anew, "[[say anew]] sum up");
    told(&provider, request).await.done();
    assert_alive(spare);
}

#[tokio::test]
async fn summary_of_a_sub_agent_without_a_key_of_its_own_leaves_the_parents_state() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let next = begun(&provider).await;
    let mut request = sub_agent("[[say of the child]] sum up");
    request.call = CallKind::Summary;
    request.session = TransportSession::default();
    let (request, signal) = request.with_retirement();
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "of the child");
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    assert!(!signal.is_signaled());
    let heard = told(&provider, next).await;
    assert_eq!(how(&heard).0, PlanKind::Resumed);
}
