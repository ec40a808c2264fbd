//! Sub-agents and advisors of the pool: what they keep, what they are told, and how long they live.

use std::time::Duration;

use serde_json::{Value, json};
use turnpass::conversation::Message;
use turnpass::event::{PlanKind, StateOrder};
use turnpass::limits::Policy;
use turnpass::request::{CallKind, TransportSession};
use turnpass::{ErrorCode, Request};
use turnpass_lab::cli::{RecordedRun, Run, Script};

use crate::pool_summary::{GONE, assert_alive, begun, goes_on, gone, has, how, pool, summary};
use crate::stage::{PATIENCE, Stage, ask_with_tools, assert_valid, go_on, told};

pub(crate) fn sub_agent(text: &str) -> Request {
    let mut request = ask_with_tools(text);
    request.call = CallKind::SubAgent;
    request.session = TransportSession("child".to_owned());
    request.parent = Some(TransportSession::default());
    request
}

#[tokio::test]
async fn a_sub_agent_keeps_no_state_and_its_summary_is_in_place() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let first = sub_agent("[[say first answer]] begin");
    let heard = told(&provider, first.clone()).await;
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let next = go_on(&first, heard.done());
    let heard = told(&provider, next.clone()).await;
    assert_eq!(how(&heard).0, PlanKind::Continued);
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let next = go_on(&next, heard.done());
    let runs = stage.recording().runs;
    assert_eq!(runs.len(), 1);
    assert!(has(&runs[0], "--no-session-persistence"));

    let (request, signal) = summary(&next, "[[say in short]] sum up");
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "in short");
    assert_eq!(how(&heard).0, PlanKind::Continued);
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    assert!(!signal.is_signaled(), "it has no stored state");
    assert_eq!(stage.pids().len(), 1);
    gone(stage.pids()[0]).await;

    // Its process is gone: the next summary is told anew.
    let (request, _) = summary(&next, "[[say once more]] sum up");
    let heard = told(&provider, request).await;
    assert_eq!(heard.text(), "once more");
    assert_eq!(how(&heard).0, PlanKind::Reseeded);
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    gone(stage.pids()[1]).await;
    assert_valid(&stage.sent());
}

fn advisor(text: &str, session: &str, parent: Option<&str>) -> Request {
    let mut request = ask_with_tools(text);
    request.call = CallKind::Advisor;
    request.session = TransportSession(session.to_owned());
    request.parent = parent.map(|parent| TransportSession(parent.to_owned()));
    request
}

/// User lines that a run was given, frames and asking ones.
fn lines(run: &RecordedRun) -> Vec<Value> {
    let lines = run.stdin.iter().map(|line| line.json());
    lines
        .filter(|line| line["type"] == "user" || line["type"] == "assistant")
        .collect()
}

#[tokio::test]
async fn an_advisor_keeps_no_state_and_is_told_only_what_is_new() {
    let stage = Stage::emulator();
    let provider = pool(&stage);
    // The parent's conversation goes on beside it, with a key of its own.
    let parent = begun(&provider).await;
    let mut question = advisor("[[say advice]] what now?", "default", None);
    question.messages = vec![
        Message::user("one"),
        Message::assistant("two"),
        Message::user("[[say advice]] what now?"),
    ];
    let heard = told(&provider, question.clone()).await;
    assert_eq!(heard.text(), "advice");
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let before = lines(&stage.recording().runs[1]).len();
    assert_eq!(before, 3);

    let mut next = question.clone();
    next.messages.push(heard.done().message.clone());
    next.messages
        .push(Message::user("[[say more advice]] and now?"));
    let heard = told(&provider, next).await;
    assert_eq!(heard.text(), "more advice");
    assert_eq!(how(&heard).0, PlanKind::Continued);
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let runs = stage.recording().runs;
    assert_eq!(runs.len(), 2, "it has a live process of its own");
    assert!(has(&runs[1], "--no-session-persistence"));
    assert_eq!(lines(&runs[1]).len(), before + 1, "the delta alone");
    goes_on(&provider, &stage, parent, 2).await;

    // Another of a sub-agent.
    let heard = told(&provider, advisor("[[say c]]", "child", Some("default"))).await;
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    assert_eq!(stage.recording().runs.len(), 3);
    // The status is written a moment after what it shows.
    let wanted = [
        "child-subagent-advisor|advisor",
        "default",
        "default-advisor|advisor",
    ];
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        let shown = turnpass::pool::status::read(&stage.path("state"));
        let sessions = shown.iter().flat_map(|one| &one.sessions);
        let keys: Vec<_> = sessions.map(|one| one.key.clone()).collect();
        if keys == wanted {
            break;
        }
        assert!(tokio::time::Instant::now() < end, "{keys:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_advisor_that_was_not_asked_for_an_hour_is_ended_and_nobody_else_is() {
    const MINUTE: Duration = Duration::from_secs(60);
    let stage = Stage::emulator();
    let provider = pool(&stage);
    let requests = [
        ask_with_tools("[[say x]]"),
        sub_agent("[[say x]]"),
        advisor("[[say x]]", "default", None),
        advisor("[[say x]]", "child", Some("default")),
    ];
    for request in requests {
        told(&provider, request).await.done();
    }
    let pids = stage.pids();
    assert_eq!(pids.len(), 4);
    let idle = async |minutes: u32| {
        for _ in 0..minutes {
            tokio::time::advance(MINUTE).await;
            // What wakes up of it runs before the next minute.
            for _ in 0..8 {
                tokio::task::yield_now().await;
            }
        }
    };
    tokio::time::pause();
    idle(58).await;
    tokio::time::resume();
    for pid in &pids {
        assert_alive(*pid);
    }
    // Asked again, it has another hour; the other's is over.
    told(&provider, advisor("[[say x]] again", "default", None))
        .await
        .done();
    tokio::time::pause();
    idle(4).await;
    tokio::time::resume();
    let runs = stage.recording().runs;
    let last = runs.last().unwrap().pid;
    gone(pids[3]).await;
    for pid in [pids[0], pids[1], last] {
        assert_alive(pid);
    }
    tokio::time::pause();
    idle(58).await;
    tokio::time::resume();
    gone(last).await;
    assert_alive(pids[0]);
    assert_alive(pids[1]);
}

#[tokio::test]
async fn an_advisor_that_is_signed_out_loses_its_process_and_nothing_is_replayed() {
    let unready = json!({"emulator": {"rate_limits": null}});
    let signed_out =
        json!({"json": {"loggedIn": false, "authMethod": "none", "apiProvider": "firstParty"}});
    let stage = Stage::json(json!({"auth": [{}, signed_out], "runs": [unready]}));
    let provider = stage.pool(|options| options.usage_gate = Some(Policy::RequireOff));
    let heard = told(&provider, advisor("[[say never]]", "a", None)).await;
    let error = heard.failed(ErrorCode::Auth);
    assert!(
        !error.is_retryable() && error.remedy().contains("claude auth login"),
        "{error}"
    );
    let runs = stage.recording().runs;
    assert_eq!(
        runs.len(),
        2,
        "its own process and the one that was asked beside it"
    );
    stage.all_gone(GONE).await;
    assert!(stage.sent().is_empty(), "nothing was replayed");
    // Signed in again: the next explicit call is served by a new process.
    stage.change(Script::runs("2.1.332", [Run::Emulator(Default::default())]));
    let heard = tokio::time::timeout(
        PATIENCE,
        told(&provider, advisor("[[say back]]", "a", None)),
    );
    assert_eq!(heard.await.unwrap().text(), "back");
}
