//! Runs whose conversation becomes too large.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::{Block, Message, Role, ToolResult};
use turnpass::event::{StateOrder, StopReason};
use turnpass::request::{BackendState, CallKind, Request, Sampling, ToolChoice};
use turnpass::{Error, ErrorCode};

use crate::scripted::{Script, ScriptedTransport, call, said};
use crate::{
    Agent, AgentEvent, Approvals, Cause, Compaction, KeptSession, Outcome, Report, SessionStore,
    Threshold, tools,
};

/// The size from which on the conversation is due.
const DUE: u64 = 1_000;

struct Stage {
    transport: ScriptedTransport,
    folder: tempfile::TempDir,
    events: Arc<Mutex<Vec<AgentEvent>>>,
}

impl Stage {
    fn new(scripts: impl IntoIterator<Item = Script>) -> Self {
        Self {
            transport: ScriptedTransport::new(scripts),
            folder: tempfile::tempdir().unwrap(),
            events: Arc::default(),
        }
    }

    /// An agent with a long conversation behind it, and a state.
    fn agent(&self, change: impl FnOnce(&mut Compaction)) -> Agent {
        let state = BackendState("{\"n\":1}".into());
        let mut compaction = settings();
        change(&mut compaction);
        Agent::builder(self.transport.provider(), "sonnet")
            .directory(self.folder.path())
            .tools(tools::all())
            .approvals(Approvals::read_only())
            .sampling(Sampling {
                temperature: Some(0.5),
                tool_choice: Some(ToolChoice::Auto {
                    disable_parallel_tool_use: true,
                }),
                ..Sampling::default()
            })
            .compaction(compaction)
            .with_history(long(), Some(state))
            .build()
            .unwrap()
    }

    async fn run(&self, agent: &mut Agent, prompt: &str) -> Report {
        let cancel = CancellationToken::new();
        self.run_until(agent, prompt, &cancel).await
    }

    async fn run_until(
        &self,
        agent: &mut Agent,
        prompt: &str,
        cancel: &CancellationToken,
    ) -> Report {
        let events = self.events.clone();
        let note = |event| events.lock().unwrap().push(event);
        agent.run(prompt, cancel, note).await
    }

    /// What was told of compactions, in words.
    fn told(&self) -> Vec<String> {
        let events = self.events.lock().unwrap();
        let told = events.iter().filter_map(|event| match event {
            AgentEvent::Compacting { cause, .. } => Some(format!("{cause:?} begins")),
            AgentEvent::Compacted { cause, .. } => Some(format!("{cause:?} done")),
            AgentEvent::CompactionFailed { cause, error } => {
                Some(format!("{cause:?} failed: {}", error.code()))
            }
            _ => None,
        });
        told.collect()
    }

    fn kinds(&self) -> Vec<CallKind> {
        let requests = self.transport.requests();
        requests.iter().map(|request| request.call).collect()
    }

    fn store(&self) -> SessionStore {
        SessionStore::new(self.folder.path().join("sessions"))
    }

    /// A session with a long conversation in it.
    fn long_session(&self) -> KeptSession {
        let mut session = self.store().open("s").unwrap();
        let saved = session.save(&long(), None, &"sonnet".into(), None);
        saved.unwrap();
        drop(session);
        self.store().open("s").unwrap()
    }

    /// An agent whose conversation is kept.
    fn kept(&self, session: KeptSession) -> Agent {
        Agent::builder(self.transport.provider(), "sonnet")
            .directory(self.folder.path())
            .tools(tools::all())
            .compaction(settings())
            .kept(session)
            .build()
            .unwrap()
    }
}

fn settings() -> Compaction {
    Compaction {
        threshold: Some(Threshold::Tokens(DUE)),
        ..Compaction::default()
    }
}

/// Ten turns of about 130 tokens each.
fn long() -> Vec<Message> {
    let turn = |number: usize| {
        let text = format!("turn {number} {}", "words ".repeat(80));
        [Message::user(text), Message::assistant("well")]
    };
    (0..10).flat_map(turn).collect()
}

/// The summary that the scripted model writes.
fn summary() -> Script {
    Script::text("what was done so far").reading(900)
}

fn overflow() -> Script {
    Script::fail(Vec::new(), ErrorCode::ContextLengthExceeded)
}

fn failed(report: &Report) -> &Error {
    match &report.outcome {
        Outcome::Failed { error } => error,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_summed_up(request: &Request, prompt: &str) {
    let first = request.messages[0].text();
    assert!(first.starts_with("[turnpass] Summary of the conversation so far"));
    assert!(first.contains("what was done so far"), "{first}");
    assert_eq!(request.messages[0].role, Role::User);
    assert_eq!(request.messages.last().unwrap().text(), prompt);
    assert_eq!(request.state, None, "the state was that of the longer one");
    assert_eq!(request.call, CallKind::Normal);
}

#[tokio::test]
async fn a_conversation_above_the_threshold_is_summed_up_and_goes_on() {
    let stage = Stage::new([
        Script::text("one").reading(DUE),
        summary(),
        Script::text("two"),
    ]);
    let mut agent = stage.agent(|_| {});
    stage.run(&mut agent, "first").await;
    assert_eq!(stage.told(), [""; 0], "not by what nobody counted yet");
    let report = stage.run(&mut agent, "second").await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    assert_eq!(stage.told(), ["Threshold begins", "Threshold done"]);
    let requests = stage.transport.requests();
    let kinds = [CallKind::Normal, CallKind::Summary, CallKind::Normal];
    assert_eq!(stage.kinds(), kinds);
    // The summary's request is the conversation's own beginning, with what its normal calls have.
    let (before, asked, after) = (&requests[0], &requests[1], &requests[2]);
    let older = asked.messages.len() - 1;
    assert_eq!(asked.messages[..older], before.messages[..older]);
    assert_eq!(
        (&asked.system, &asked.tools),
        (&before.system, &before.tools)
    );
    assert_eq!(
        (&asked.session, &asked.state),
        (&before.session, &before.state)
    );
    assert!(
        asked.messages[older]
            .text()
            .contains("Do not call any tool")
    );
    assert!(asked.retirement.is_some());
    assert_eq!(asked.sampling.temperature, Some(0.5));
    assert_eq!(asked.sampling.tool_choice, None, "that is for answers");
    assert_summed_up(after, "second");
    // Behind the summary stands the latest part, as it was.
    let mut whole = before.messages.clone();
    whole.extend([Message::assistant("one"), Message::user("second")]);
    assert_eq!(after.messages[1..], whole[older..]);
    assert!(after.messages.len() > 3 && older > 10, "{older}");
    // It counts as a generation, and the size is that of the conversation.
    assert_eq!((report.generations, report.compactions), (2, 1));
    assert_eq!(report.upstream_requests, 2);
    assert_eq!(report.usage.input_tokens, Some(910));
    assert_eq!(report.context_tokens, Some(41));
    let events = stage.events.lock().unwrap();
    let event = events.iter().find_map(|event| match event {
        AgentEvent::Compacted {
            messages_before,
            messages_after,
            tokens_before,
            tokens_after,
            upstream_requests,
            ..
        } => {
            assert!(tokens_after < tokens_before && *tokens_before >= DUE);
            Some((*messages_before, *messages_after, *upstream_requests))
        }
        _ => None,
    });
    assert_eq!(event, Some((23, after.messages.len(), 1)));
    let texts = events.iter().filter_map(|event| match event {
        AgentEvent::Text { text } => Some(text.as_str()),
        _ => None,
    });
    assert_eq!(
        texts.collect::<String>(),
        "onetwo",
        "nobody is shown a summary"
    );
}

#[tokio::test]
async fn it_is_summed_up_between_a_call_and_the_next_one_with_both_sides_whole() {
    let calls = |id| Script::calls(&[(id, "list", json!({}))]);
    let stage = Stage::new([
        calls("t1"),
        calls("t2").reading(DUE),
        summary(),
        Script::text("done"),
    ]);
    let mut agent = stage.agent(|compaction| compaction.keep_tokens = 0);
    let report = stage.run(&mut agent, "look twice").await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    let requests = stage.transport.requests();
    let asked = &requests[2];
    assert_eq!(asked.call, CallKind::Summary);
    // t1 and its result are summed up; t2 and its result stay.
    let last = &requests[3].messages;
    assert_eq!(last.len(), 3);
    assert_eq!(last[1].tool_calls().next().unwrap().id.0, "t2");
    assert!(matches!(&last[2].content[0], Block::ToolResult(result) if result.id.0 == "t2"));
    // What the person asked for last is not left to the summary.
    let first = last[0].text();
    assert!(first.ends_with("word for word:look twice"), "{first}");
}

#[tokio::test]
async fn what_does_not_fit_is_summed_up_and_asked_for_once_more() {
    let stage = Stage::new([overflow(), summary(), Script::text("fits")]);
    let mut agent = stage.agent(|compaction| compaction.threshold = None);
    let report = stage.run(&mut agent, "go").await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    assert_eq!(stage.told(), ["Overflow begins", "Overflow done"]);
    assert_summed_up(&stage.transport.requests()[2], "go");
    assert_eq!(report.retries, 0);
    assert_eq!(agent.history().last(), Some(&Message::assistant("fits")));
}

#[tokio::test]
async fn a_second_overflow_is_told_with_what_to_do() {
    let stage = Stage::new([overflow(), summary(), overflow()]);
    let mut agent = stage.agent(|_| {});
    let report = stage.run(&mut agent, "go").await;
    let error = failed(&report);
    assert_eq!(error.code(), ErrorCode::ContextLengthExceeded);
    let said = error.to_string();
    assert!(said.contains("although it was just compacted"), "{said}");
    assert!(said.contains("larger window"), "{said}");
    assert_eq!(stage.transport.requests().len(), 3);
    assert_eq!(report.compactions, 1);
}

#[tokio::test]
async fn an_overflow_after_output_is_no_reason_to_ask_again() {
    let cut = Script::fail(vec![said("half")], ErrorCode::ContextLengthExceeded);
    let stage = Stage::new([cut]);
    let mut agent = stage.agent(|_| {});
    let report = stage.run(&mut agent, "go").await;
    assert_eq!(failed(&report).code(), ErrorCode::ContextLengthExceeded);
    assert_eq!(stage.told(), [""; 0]);
}

#[tokio::test]
async fn one_huge_message_is_told_without_a_further_request() {
    let stage = Stage::new([overflow()]);
    let mut agent = Agent::builder(stage.transport.provider(), "sonnet")
        .directory(stage.folder.path())
        .build()
        .unwrap();
    let report = stage.run(&mut agent, &"x".repeat(1_000_000)).await;
    let said = failed(&report).to_string();
    assert!(said.contains("too large by itself"), "{said}");
    assert!(said.contains("put a long text into a file"), "{said}");
    assert_eq!(stage.transport.requests().len(), 1);
    assert_eq!(stage.told(), [""; 0]);
}

#[tokio::test]
async fn a_summary_that_cannot_fit_is_not_asked_for() {
    let stage = Stage::new([overflow()]);
    let mut agent = stage.agent(|compaction| compaction.window_tokens = Some(500));
    let report = stage.run(&mut agent, "go").await;
    let said = failed(&report).to_string();
    assert!(said.contains("too large for this model"), "{said}");
    assert_eq!(stage.transport.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_summary_leaves_everything_and_is_not_tried_again_at_once() {
    let stage = Stage::new([
        Script::text("one").reading(DUE),
        Script::fail(Vec::new(), ErrorCode::Overloaded),
        Script::calls(&[("t1", "list", json!({}))]).reading(DUE),
        Script::text("two").reading(DUE),
        Script::text("three").reading(DUE),
        summary(),
        Script::text("four"),
    ]);
    let mut agent = stage.agent(|_| {});
    stage.run(&mut agent, "first").await;
    let before = agent.history().to_vec();
    let report = stage.run(&mut agent, "second").await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    let told = ["Threshold begins", "Threshold failed: overloaded"];
    assert_eq!(
        stage.told(),
        told,
        "once, and its two further rounds say nothing"
    );
    assert_eq!(agent.history()[..before.len()], before[..]);
    assert!(agent.state().is_some(), "nothing was retired");
    stage.run(&mut agent, "third").await;
    assert_eq!(stage.told(), told);
    tokio::time::advance(Duration::from_secs(5 * 60)).await;
    stage.run(&mut agent, "fourth").await;
    assert_eq!(stage.told()[2..], ["Threshold begins", "Threshold done"]);
}

#[tokio::test]
async fn what_is_no_summary_is_not_taken_for_one() {
    let calls = Script::done(
        vec![],
        StopReason::ToolUse,
        vec![
            Block::text("I look first"),
            Block::ToolUse(call("t", "list", &json!({}))),
        ],
    );
    let refused = StopReason::Refusal {
        category: None,
        explanation: None,
    };
    for (script, code) in [
        (Script::text(" \n"), ErrorCode::SummaryUnusable),
        (
            Script::text("half").stopping(StopReason::MaxTokens),
            ErrorCode::SummaryUnusable,
        ),
        (
            Script::text("no").stopping(refused),
            ErrorCode::SummaryUnusable,
        ),
        (
            Script::text(&"as long as before ".repeat(1_000)),
            ErrorCode::SummaryUnusable,
        ),
        (calls, ErrorCode::SummaryToolCall),
    ] {
        let stage = Stage::new([
            Script::text("one").reading(DUE),
            script,
            Script::text("two"),
        ]);
        let mut agent = stage.agent(|_| {});
        stage.run(&mut agent, "first").await;
        let report = stage.run(&mut agent, "second").await;
        assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
        let told = format!("Threshold failed: {code}");
        assert_eq!(stage.told(), ["Threshold begins", told.as_str()]);
        assert_eq!(agent.history().len(), 24);
        // It was a generation all the same.
        assert_eq!((report.generations, report.compactions), (2, 0));
    }
}

#[tokio::test]
async fn a_failed_summary_of_an_overflow_is_told_with_it() {
    let stage = Stage::new([overflow(), Script::fail(vec![], ErrorCode::Billing)]);
    let mut agent = stage.agent(|_| {});
    let report = stage.run(&mut agent, "go").await;
    let error = failed(&report);
    assert_eq!(error.code(), ErrorCode::ContextLengthExceeded);
    assert!(
        error.detail().contains("the summary failed (billing)"),
        "{error}"
    );
    assert_eq!(
        stage.told(),
        ["Overflow begins", "Overflow failed: billing"]
    );
}

#[tokio::test]
async fn after_a_failed_summary_the_same_round_asks_for_no_other() {
    let stage = Stage::new([
        Script::text("one").reading(DUE),
        Script::fail(vec![], ErrorCode::Overloaded),
        overflow(),
    ]);
    let mut agent = stage.agent(|_| {});
    stage.run(&mut agent, "first").await;
    let report = stage.run(&mut agent, "second").await;
    assert!(failed(&report).detail().contains("(overloaded)"));
    assert_eq!(stage.transport.requests().len(), 3);
}

#[tokio::test]
async fn a_cancelled_summary_leaves_everything_as_before() {
    for retires in [false, true] {
        let hang = Script::hang(vec![said("half a summ")]);
        let hang = if retires { hang.retiring() } else { hang };
        let stage = Stage::new([Script::text("one").reading(DUE), hang]);
        let mut agent = stage.agent(|_| {});
        stage.run(&mut agent, "first").await;
        let mut before = agent.history().to_vec();
        before.push(Message::user("second"));
        let cancel = CancellationToken::new();
        let token = cancel.clone();
        let report = agent
            .run("second", &cancel, move |event| {
                if matches!(event, AgentEvent::Compacting { .. }) {
                    token.cancel();
                }
            })
            .await;
        assert!(matches!(report.outcome, Outcome::Cancelled), "{report:?}");
        assert_eq!(agent.history(), before);
        assert_eq!((report.generations, report.compactions), (0, 0));
        assert_eq!(agent.state().is_none(), retires, "the rest stays");
    }
}

#[tokio::test]
async fn a_retired_state_is_forgotten_however_the_summary_ends() {
    let hang = || Script::hang(vec![said("half")]).retiring();
    let marked = Error::new(ErrorCode::ProcessExit, "").with_backend_state_retired(true);
    let unusable = Script::text("").ordering(StateOrder::Clear);
    for (name, script) in [
        ("dropped", hang()),
        ("failed", Script::failing(vec![], marked)),
        ("empty", unusable),
    ] {
        let stage = Stage::new([
            Script::text("one").reading(DUE),
            script,
            Script::text("two"),
        ]);
        let mut agent = stage.agent(|compaction| compaction.keep_tokens = 0);
        stage.run(&mut agent, "first").await;
        assert!(agent.state().is_some());
        let cancel = CancellationToken::new();
        if name == "dropped" {
            let (began, mut begun) = tokio::sync::mpsc::unbounded_channel();
            let run = agent.run("second", &cancel, move |event| {
                if matches!(event, AgentEvent::Compacting { .. }) {
                    began.send(()).unwrap();
                }
            });
            let asked = async {
                begun.recv().await.unwrap();
                while stage.transport.requests().len() < 2 {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                report = run => panic!("{report:?}"),
                () = asked => {}
            }
            agent.compaction.enabled = false;
            stage.run(&mut agent, "third").await;
        } else {
            stage.run(&mut agent, "second").await;
        }
        assert_eq!(agent.state(), None, "{name}");
        assert_eq!(stage.transport.requests()[2].state, None, "{name}");
        assert!(agent.history().len() > 20, "{name}: nothing was summed up");
    }
}

#[tokio::test]
async fn a_run_compacts_so_often_and_no_more() {
    let round = |n: usize| {
        let id = format!("t{n}");
        Script::calls(&[(id.as_str(), "list", json!({}))]).reading(DUE)
    };
    let mut scripts = vec![round(0)];
    for n in 1..=4 {
        scripts.extend([summary(), round(n)]);
    }
    scripts.extend([round(5), overflow()]);
    let stage = Stage::new(scripts);
    let mut agent = stage.agent(|compaction| compaction.keep_tokens = 0);
    // Each round is large enough to be worth it.
    std::fs::write(stage.folder.path().join("f".repeat(200)), "").unwrap();
    let report = stage.run(&mut agent, &"go on ".repeat(20)).await;
    assert_eq!(report.compactions, 4, "{:?}", stage.told());
    let said = failed(&report).to_string();
    assert!(said.contains("compacted 4 times in this run"), "{said}");
}

#[tokio::test]
async fn switched_off_it_says_so_when_nothing_fits() {
    let stage = Stage::new([Script::text("one").reading(DUE * 10), overflow()]);
    let mut agent = stage.agent(|compaction| compaction.enabled = false);
    stage.run(&mut agent, "first").await;
    let report = stage.run(&mut agent, "second").await;
    let said = failed(&report).to_string();
    assert!(said.contains("compaction is switched off"), "{said}");
    assert_eq!(stage.told(), [""; 0]);
    assert_eq!(stage.transport.requests().len(), 2);
}

#[tokio::test]
async fn a_reopened_session_goes_on_from_the_summary_and_nothing_is_lost() {
    let stage = Stage::new([
        Script::text("one").reading(DUE),
        summary(),
        Script::text("two"),
        Script::text("three"),
    ]);
    stage
        .run(&mut stage.kept(stage.long_session()), "first")
        .await;
    // The size is known to the next program too.
    let session = stage.store().open("s").unwrap();
    assert_eq!(session.last_prompt_tokens(), Some(DUE));
    stage.run(&mut stage.kept(session), "second").await;
    let session = stage.store().open("s").unwrap();
    let [mark] = session.compactions() else {
        panic!("{:?}", session.compactions())
    };
    assert_eq!(mark.cause, Cause::Threshold);
    assert!(mark.tokens_after < mark.tokens_before);
    let past = stage.store().past("s").unwrap();
    assert_eq!(past.len(), 1);
    assert_eq!(past[0].compaction, *mark);
    // What was taken out, and what stays behind the summary, is the whole conversation.
    let mut whole = long();
    whole.extend([
        Message::user("first"),
        Message::assistant("one"),
        Message::user("second"),
        Message::assistant("two"),
    ]);
    let mut all = past[0].messages.clone();
    all.extend_from_slice(&session.messages()[1..]);
    assert_eq!(all, whole);
    let after = session.messages().to_vec();
    stage.run(&mut stage.kept(session), "third").await;
    let last = stage.transport.requests().pop().unwrap();
    assert_eq!(last.messages[..after.len()], after[..]);
    assert_eq!(stage.store().list().unwrap()[0].compactions, 1);
    assert!(stage.store().remove("s").unwrap());
    let left = std::fs::read_dir(stage.folder.path().join("sessions")).unwrap();
    assert_eq!(
        left.count(),
        0,
        "removed with everything that was said in it"
    );
}

#[tokio::test]
async fn what_cannot_be_put_aside_is_not_taken_out() {
    let stage = Stage::new([Script::text("one").reading(DUE), summary()]);
    let mut agent = stage.kept(stage.long_session());
    stage.run(&mut agent, "first").await;
    // A folder in the place of the file.
    std::fs::create_dir_all(stage.folder.path().join("sessions/s.1.past/x")).unwrap();
    let report = stage.run(&mut agent, "second").await;
    assert_eq!(failed(&report).code(), ErrorCode::SessionFile);
    assert_eq!(agent.history().len(), 23);
    drop(agent);
    let session = stage.store().open("s").unwrap();
    assert_eq!(session.messages().len(), 23);
    assert!(session.compactions().is_empty());
}

#[test]
fn results_that_stand_alone_begin_no_tail() {
    let orphan = Message::results([ToolResult::text(
        call("t", "list", &json!({})).id,
        "of nobody",
    )]);
    let messages = [Message::user("a"), orphan, Message::user("b")];
    // It belongs to no call, so it may stand on either side.
    assert_eq!(crate::compaction::cut(&messages, 100), Some(1));
}
