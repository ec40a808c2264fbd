//! Kept processes at their edges: who waits for a place is woken whenever one is free, and a process that showed that it
//! cannot be trusted serves no more.

use std::time::{Duration, Instant};

use serde_json::json;
use turnpass::event::Event;
use turnpass::relay::{PROCESS_BYTES, RelayOptions, RelayTransport};
use turnpass::request::Effort;
use turnpass::{ErrorCode, Generation, Provider, Request};
use turnpass_lab::cli::{EmulatorOptions, Run, Script};

use crate::stage::{MODES, Row, Stage, WARM, ask, assert_valid, hear, is_text, told, until};
use crate::{good, post, turns};

/// Far below every deadline of a request, far above what a start takes on a loaded machine.
const SOON: Duration = Duration::from_secs(20);

/// A relay with one place.
fn narrow(stage: &Stage) -> Provider {
    let options = RelayOptions {
        memory_budget_bytes: PROCESS_BYTES,
        ..stage.options(WARM)
    };
    Provider::new(RelayTransport::new(options).unwrap())
}

/// A generation that has come to where it waits for a place.
async fn waiting(provider: &Provider, request: Request) -> Generation {
    let mut generation = provider.generate(request);
    until(&mut generation, "its first notice", |event| {
        matches!(event, Event::Notice(_))
    })
    .await;
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    generation
}

#[tokio::test]
async fn a_process_that_died_at_work_gives_its_place_to_who_waits() {
    let stage = Stage::emulator();
    let provider = narrow(&stage);
    let mut first = provider.generate(ask("[[say half]] [[stall closed]]"));
    until(&mut first, "text", is_text).await;
    let second = waiting(&provider, ask("[[say second]]")).await;
    let pid = stage.recording().only().unwrap().pid;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    hear(first).await.failed(ErrorCode::ProcessExit);
    let heard = tokio::time::timeout(SOON, hear(second)).await;
    assert_eq!(heard.expect("nobody woke it").text(), "second");
}

#[tokio::test]
async fn a_start_that_is_dropped_gives_its_place_to_who_waits() {
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
    let first = provider.generate(ask("[[say first]]"));
    stage
        .recorded("started", |recording| recording.runs.len() == 1)
        .await;
    let second = waiting(&provider, ask("[[say second]]")).await;
    drop(first);
    let heard = tokio::time::timeout(SOON, hear(second)).await;
    assert_eq!(heard.expect("nobody woke it").text(), "second");
}

#[tokio::test]
async fn a_process_that_refused_a_setting_serves_no_more() {
    let refusing = json!({"steps": [
        {"answer_controls": [{"subtype": "initialize"}, {"subtype": "apply_flag_settings", "error": "no"}]},
        {"loop": [{"expect": {"type": "user"}}, {"send_init": null}, post(WARM)]},
    ]});
    let stage = Stage::json(json!({"runs": [refusing, good(WARM)]}));
    let provider = narrow(&stage);
    told(&provider, ask("[[say x]]"))
        .await
        .failed(ErrorCode::VersionIncompatible);
    // It was never set to the request, so the same request may not count it as one that fits.
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(stage.recording().runs.len(), 2, "the process is retired");
    assert_eq!(stage.sent().len(), 1);
}

#[tokio::test]
async fn a_process_whose_isolation_failed_serves_no_more() {
    let bad = json!({"steps": ["answer_controls", {"loop": [
        {"expect": {"type": "user"}}, {"send_init": {"tools": ["Bash"]}}, post(WARM),
    ]}]});
    let stage = Stage::json(json!({"runs": [bad, good(WARM)]}));
    let provider = narrow(&stage);
    told(&provider, ask("[[say x]]"))
        .await
        .failed(ErrorCode::IsolationTools);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(stage.recording().runs.len(), 2, "the process is retired");
}

#[tokio::test]
async fn bug_076_a_good_end_without_a_request_is_no_end_of_this_turn() {
    let result = json!({
        "type": "result", "subtype": "success", "is_error": false, "terminal_reason": "completed",
        "num_turns": 1, "result": "ok", "session_id": "s", "uuid": "u",
    });
    // The second record belongs to the turn before; it comes once the process serves the next one.
    let stage = Stage::json(
        json!({"runs": [turns(WARM, [json!({"send": result}), json!("hang")]), good(WARM)]}),
    );
    let provider = narrow(&stage);
    let heard = tokio::time::timeout(SOON, told(&provider, ask("[[say x]]"))).await;
    heard
        .expect("it waits for a request that will not come")
        .failed(ErrorCode::ProtocolResult);
    assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    assert_eq!(stage.recording().runs.len(), 2, "the process is retired");
}

#[tokio::test]
async fn deadlines_without_end_are_deadlines() {
    for row in MODES {
        let stage = Stage::emulator();
        let mut request = ask("[[say x]]");
        request.limits.start = Duration::MAX;
        request.limits.idle = Duration::MAX;
        request.limits.total = Duration::MAX;
        assert_eq!(told(&stage.provider(row), request).await.text(), "x");
    }
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_a_host_that_does_not_read() {
    for row in MODES {
        // The answer has left the upstream, but whether it has filled the host's channel by then is the machine's affair.
        let mut most = 0;
        for _ in 0..20 {
            most = most.max(shut_down_unread(row).await);
            if most >= 16 {
                break;
            }
        }
        assert!(most >= 16, "the channel was never full: {most}");
    }
}

/// Shuts down while an answer is there that nobody reads; how many events were waiting.
async fn shut_down_unread(row: Row) -> usize {
    let stage = Stage::emulator();
    let provider = stage.provider(row);
    let text = "many words of an answer that nobody reads ".repeat(20);
    let unread = provider.generate(ask(format!("[[say {text}]] [[chunk 8]]")));
    let end = Instant::now() + SOON;
    while stage
        .sent()
        .first()
        .is_none_or(|sent| sent.reply.last_byte_at.is_none())
    {
        assert!(Instant::now() < end, "never answered");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let began = Instant::now();
    provider.shutdown().await.unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
    let heard = hear(unread).await;
    heard.failed(ErrorCode::Closed);
    stage.all_gone(Duration::from_secs(1)).await;
    heard.events.len()
}

#[tokio::test]
async fn thinking_off_leaves_nothing_in_the_request_that_needs_thinking() {
    for row in MODES {
        let stage = Stage::emulator();
        let mut request = ask("[[say x]]");
        request.model = "claude-opus-4-6".into();
        request.effort = Some(Effort::None);
        assert_eq!(told(&stage.provider(row), request).await.text(), "x");
        assert_valid(&stage.sent());
    }
}
