//! Whole runs against a scripted transport.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::json;
use tokio::sync::Barrier;
use tokio_util::sync::CancellationToken;
use turnpass::ErrorCode;
use turnpass::conversation::{Block, Message, ResultBlock, ToolInput, ToolResult};
use turnpass::event::{Rejection, StopReason};
use turnpass::request::Tool;

use crate::scripted::{Script, ScriptedTransport, assert_can_be_sent, call, said};
use crate::tools::{Failure, Scene};
use crate::{
    Agent, AgentEvent, Answer, Approvals, Approver, Ask, Effect, HostTool, Outcome, Report, tools,
};

/// An agent in a folder of its own, with all that happened.
struct Stage {
    transport: ScriptedTransport,
    folder: tempfile::TempDir,
    agent: Agent,
    cancel: CancellationToken,
    events: Arc<Mutex<Vec<AgentEvent>>>,
}

impl Stage {
    fn new(approvals: Approvals, scripts: impl IntoIterator<Item = Script>) -> Self {
        Self::with(approvals, tools::all(), 50, scripts)
    }

    fn with(
        approvals: Approvals,
        tools: Vec<Arc<dyn HostTool>>,
        rounds: u32,
        scripts: impl IntoIterator<Item = Script>,
    ) -> Self {
        let transport = ScriptedTransport::new(scripts);
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::builder(transport.provider(), "sonnet")
            .directory(folder.path())
            .tools(tools)
            .approvals(approvals)
            .rounds(rounds)
            .build()
            .unwrap();
        Self {
            transport,
            folder,
            agent,
            cancel: CancellationToken::new(),
            events: Arc::default(),
        }
    }

    async fn run(&mut self, prompt: &str) -> Report {
        let events = self.events.clone();
        let report = self
            .agent
            .run(prompt, &self.cancel, |event| {
                events.lock().unwrap().push(event)
            })
            .await;
        let events = self.events.lock().unwrap();
        let ends = events
            .iter()
            .filter(|event| matches!(event, AgentEvent::Ended(_)));
        assert_eq!(ends.count(), 1, "one end");
        assert!(matches!(events.last(), Some(AgentEvent::Ended(_))));
        report
    }

    fn events(&self) -> Vec<serde_json::Value> {
        let events = self.events.lock().unwrap();
        events
            .iter()
            .map(|event| serde_json::to_value(event).unwrap())
            .collect()
    }

    /// The results of the last message that holds some: text and whether it is a failure.
    fn results(&self) -> Vec<(String, bool)> {
        let message = self.agent.history().iter().rev().find(|message| {
            let first = message.content.first();
            matches!(first, Some(Block::ToolResult(_)))
        });
        let blocks = message.map(|message| message.content.clone());
        blocks
            .unwrap_or_default()
            .iter()
            .map(|block| match block {
                Block::ToolResult(ToolResult {
                    content, is_error, ..
                }) => match content.as_slice() {
                    [ResultBlock::Text { text }] => (text.clone(), *is_error),
                    other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            })
            .collect()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

#[tokio::test]
async fn a_task_with_tools_completes() {
    let mut stage = Stage::new(
        Approvals::read_only().allow(["write"]),
        [
            Script::calls(&[("t1", "write", json!({"path":"f","content":"hello"}))]),
            Script::calls(&[("t2", "read", json!({"path":"f"}))]),
            Script::text("done"),
        ],
    );
    let report = stage.run("make f").await;
    assert!(matches!(report.outcome, Outcome::Completed));
    assert_eq!((report.generations, report.tool_calls), (3, 2));
    assert_eq!(report.upstream_requests, 3);
    assert_eq!(report.context_tokens, Some(41), "bug 56: of the last one");
    assert_eq!(report.usage.input_tokens, Some(30));
    assert_eq!(report.cache_read_share, Some(0.75));
    assert!(report.laboratory);
    assert_eq!(stage.results(), [("hello".into(), false)]);
    assert_eq!(stage.agent.history().len(), 6);

    let requests = stage.transport.requests();
    assert_eq!(requests[0].tools.len(), 6);
    assert_eq!(requests[2].messages.len(), 5);
    assert_eq!(requests[0].session, requests[2].session);
    assert_eq!(
        requests[2].messages[..3],
        requests[1].messages[..],
        "the beginning of a growing conversation stays as it was"
    );
}

#[tokio::test]
async fn bug_119_a_call_without_arguments_runs() {
    let mut stage = Stage::new(
        Approvals::read_only(),
        [
            Script::calls(&[("t1", "list", json!({}))]),
            Script::text("x"),
        ],
    );
    stage.run("look").await;
    assert_eq!(stage.results(), [("[empty]".into(), false)]);
}

#[tokio::test]
async fn without_a_person_nothing_is_changed() {
    let mut stage = Stage::new(
        Approvals::read_only(),
        [
            Script::calls(&[
                ("t1", "write", json!({"path":"f","content":""})),
                ("t2", "shell", json!({"command":"touch g"})),
                ("t3", "read", json!({"path":"/etc/hosts"})),
                ("t4", "list", json!({"path":".."})),
            ]),
            Script::text("x"),
        ],
    );
    let report = stage.run("go").await;
    assert_eq!((report.tool_calls, report.refused_calls), (0, 4));
    for (text, is_error) in stage.results() {
        assert!(is_error && text.starts_with("denied: "), "{text}");
    }
    assert!(!stage.path("f").exists() && !stage.path("g").exists());
}

/// Answers from a list, and keeps the questions.
#[derive(Clone, Debug, Default)]
struct Person {
    answers: Arc<Mutex<Vec<Answer>>>,
    asked: Arc<Mutex<Vec<Ask>>>,
}

impl Person {
    fn new(answers: &[Answer]) -> Self {
        let answers = Arc::new(Mutex::new(answers.iter().rev().copied().collect()));
        Self {
            answers,
            asked: Arc::default(),
        }
    }
}

impl Approver for Person {
    fn ask<'a>(&'a self, ask: &'a Ask) -> BoxFuture<'a, Answer> {
        Box::pin(async {
            self.asked.lock().unwrap().push(ask.clone());
            let answer = self.answers.lock().unwrap().pop();
            answer.expect("one question too many")
        })
    }
}

#[tokio::test]
async fn the_person_is_asked_in_order_and_only_where_it_is_needed() {
    let person = Person::new(&[Answer::No, Answer::Always, Answer::Once]);
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().canonicalize().unwrap().join("note");
    std::fs::write(&secret, "outside").unwrap();
    let mut stage = Stage::new(
        Approvals::ask(person.clone()),
        [
            Script::calls(&[
                ("t1", "list", json!({})),
                ("t2", "shell", json!({"command":"touch denied"})),
                ("t3", "write", json!({"path":"a","content":"1"})),
                ("t4", "write", json!({"path":"b","content":"2"})),
                ("t5", "read", json!({"path":secret})),
            ]),
            Script::text("x"),
        ],
    );
    let report = stage.run("go").await;
    assert_eq!((report.tool_calls, report.refused_calls), (4, 1));
    let asked = person.asked.lock().unwrap().clone();
    let tools: Vec<_> = asked.iter().map(|ask| ask.tool.as_str()).collect();
    assert_eq!(tools, ["shell", "write", "read"]);
    assert_eq!(asked[0].detail, "touch denied");
    assert!(asked[1].outside.is_empty());
    assert_eq!(asked[2].outside, [secret]);
    let results = stage.results();
    assert!(results[1].1 && results[1].0.starts_with("denied"));
    assert_eq!(results[4], ("outside".into(), false));
    assert!(!stage.path("denied").exists() && stage.path("b").exists());
}

#[tokio::test]
async fn consent_is_asked_about_where_a_link_really_leads() {
    let person = Person::new(&[Answer::No]);
    let outside = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(
        Approvals::ask(person.clone()).allow(["write"]),
        [
            Script::calls(&[("t1", "write", json!({"path":"link/f","content":"1"}))]),
            Script::text("x"),
        ],
    );
    std::os::unix::fs::symlink(outside.path(), stage.path("link")).unwrap();
    stage.run("go").await;
    let place = outside.path().canonicalize().unwrap().join("f");
    assert_eq!(
        person.asked.lock().unwrap()[0].outside,
        std::slice::from_ref(&place)
    );
    assert!(!place.exists());
}

#[tokio::test]
async fn rejected_and_unreleased_calls_are_answered() {
    let unreleased = call("t3", "write", &json!({"path":"f","content":""}));
    let mut stage = Stage::new(
        Approvals::read_only().allow(["write"]),
        [
            Script::rejected("t1", "nothing", Rejection::UnknownTool),
            Script::rejected("t2", "write", Rejection::ArgumentDecode { raw: "{".into() }),
            Script::done(
                vec![],
                StopReason::ToolUse,
                vec![Block::ToolUse(unreleased)],
            ),
            Script::text("x"),
        ],
    );
    let report = stage.run("go").await;
    assert!(matches!(report.outcome, Outcome::Completed));
    assert_eq!((report.tool_calls, report.refused_calls), (0, 3));
    assert!(!stage.path("f").exists());
    let texts: Vec<_> = stage.events();
    let outputs: Vec<_> = texts
        .iter()
        .filter(|event| event["type"] == "tool_ended")
        .map(|event| event["output"].as_str().unwrap())
        .collect();
    assert!(outputs[0].contains("there is no tool named \"nothing\""));
    assert!(outputs[1].contains("not one JSON object"));
    assert!(outputs[2].contains("not released"));
}

/// A tool that meets others at a barrier, and writes down when it begins and ends.
#[derive(Debug)]
struct Meeting {
    name: &'static str,
    effect: Effect,
    barrier: Option<Arc<Barrier>>,
    diary: Arc<Mutex<Vec<String>>>,
}

impl HostTool for Meeting {
    fn declaration(&self) -> Tool {
        Tool {
            name: self.name.into(),
            description: String::new(),
            input_schema: json!({"type":"object"}),
        }
    }
    fn effect(&self) -> Effect {
        self.effect
    }
    fn paths(&self, _: &ToolInput) -> Result<Vec<PathBuf>, Failure> {
        Ok(vec![])
    }
    fn summary(&self, _: &ToolInput) -> String {
        String::new()
    }
    fn call(&self, input: ToolInput, _: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        let (barrier, diary) = (self.barrier.clone(), self.diary.clone());
        let who = input.to_map()["n"].to_string();
        Box::pin(async move {
            diary.lock().unwrap().push(format!("+{who}"));
            match barrier {
                Some(barrier) => {
                    barrier.wait().await;
                }
                None => tokio::task::yield_now().await,
            }
            diary.lock().unwrap().push(format!("-{who}"));
            Ok(who)
        })
    }
}

#[tokio::test]
async fn reads_run_together_changes_alone_and_results_keep_the_order() {
    let diary = Arc::<Mutex<Vec<String>>>::default();
    let barrier = Arc::new(Barrier::new(3));
    let tool = |name, effect, barrier| -> Arc<dyn HostTool> {
        let diary = diary.clone();
        Arc::new(Meeting {
            name,
            effect,
            barrier,
            diary,
        })
    };
    let tools = vec![
        tool("look", Effect::Read, Some(barrier)),
        tool("change", Effect::Change, None),
    ];
    let calls: Vec<_> = [
        "look", "look", "look", "change", "change", "look", "look", "look",
    ]
    .iter()
    .enumerate()
    .map(|(n, name)| (format!("t{n}"), *name, json!({ "n": n })))
    .collect();
    let calls: Vec<_> = calls
        .iter()
        .map(|(i, n, v)| (i.as_str(), *n, v.clone()))
        .collect();
    let rules = Approvals::read_only().allow(["change"]);
    let scripts = [Script::calls(&calls), Script::text("x")];
    let mut stage = Stage::with(rules, tools, 5, scripts);
    // The barrier opens only for three at the same time: serial reads would never end.
    tokio::time::timeout(Duration::from_secs(20), stage.run("go"))
        .await
        .unwrap();
    let results: Vec<_> = stage.results().into_iter().map(|(text, _)| text).collect();
    assert_eq!(results, ["0", "1", "2", "3", "4", "5", "6", "7"]);
    let diary = diary.lock().unwrap();
    assert_eq!(diary[6..10], ["+3", "-3", "+4", "-4"]);
    assert!(diary[..3].iter().all(|entry| entry.starts_with('+')));
}

#[tokio::test]
async fn the_limit_of_rounds_ends_a_run_that_can_be_gone_on_with() {
    let wants_more = || Script::calls(&[("t", "list", json!({}))]);
    let scripts = [wants_more(), wants_more(), Script::text("after all")];
    let mut stage = Stage::with(Approvals::read_only(), tools::all(), 2, scripts);
    let report = stage.run("go").await;
    assert!(matches!(report.outcome, Outcome::RoundLimit { rounds: 2 }));
    assert_eq!((report.tool_calls, report.refused_calls), (1, 1));
    assert_can_be_sent(stage.agent.history());
    stage.events.lock().unwrap().clear();
    let report = stage.run("go on").await;
    assert!(matches!(report.outcome, Outcome::Completed));
}

#[tokio::test]
async fn answers_that_are_not_whole_end_the_run_and_run_nothing() {
    let write = || Script::calls(&[("t", "write", json!({"path":"f","content":""}))]);
    let refusal = StopReason::Refusal {
        category: Some("c".into()),
        explanation: None,
    };
    for (stop, word) in [
        (StopReason::MaxTokens, "max_tokens"),
        (refusal, "refused"),
        (StopReason::PauseTurn, "stopped"),
        (StopReason::ContextWindowExceeded, "stopped"),
        (StopReason::Other { word: "new".into() }, "stopped"),
    ] {
        let rules = Approvals::read_only().allow(["write"]);
        let mut stage = Stage::new(rules, [write().stopping(stop)]);
        let report = stage.run("go").await;
        assert_eq!(report.outcome.as_str(), word);
        assert_can_be_sent(stage.agent.history());
        assert!(!stage.path("f").exists());
    }
    let empty = Script::done(vec![], StopReason::ToolUse, vec![Block::text("hm")]);
    let mut stage = Stage::new(Approvals::read_only(), [empty]);
    let report = stage.run("go").await;
    assert_eq!(
        report.outcome.as_str(),
        "stopped",
        "waits for tools it did not call"
    );
}

#[tokio::test(start_paused = true)]
async fn a_hiccup_before_any_output_is_tried_again_twice() {
    let busy = || Script::fail(vec![], ErrorCode::Overloaded);
    let mut stage = Stage::new(Approvals::read_only(), [busy(), busy(), Script::text("x")]);
    let report = stage.run("go").await;
    assert!(matches!(report.outcome, Outcome::Completed));
    assert_eq!((report.retries, report.generations), (2, 1));
    let waits: Vec<_> = stage
        .events()
        .iter()
        .filter(|event| event["type"] == "retry")
        .map(|event| event["wait_ms"].as_u64().unwrap())
        .collect();
    assert_eq!(waits, [1_000, 4_000]);

    let mut stage = Stage::new(Approvals::read_only(), [busy(), busy(), busy()]);
    let report = stage.run("go").await;
    assert!(matches!(report.outcome, Outcome::Failed { .. }));
    assert_eq!(stage.transport.requests().len(), 3);
    assert_eq!(stage.agent.history(), [Message::user("go")]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_tried_again_after_output_or_at_the_usage_limit() {
    for (events, code) in [
        (vec![said("half")], ErrorCode::StreamInterrupted),
        (
            vec![
                said("half"),
                turnpass::Event::Retracted { reason: "r".into() },
            ],
            ErrorCode::Overloaded,
        ),
        (vec![], ErrorCode::UsageLimit),
        (vec![], ErrorCode::Auth),
    ] {
        let mut stage = Stage::new(Approvals::read_only(), [Script::fail(events, code)]);
        let report = stage.run("go").await;
        assert_eq!(report.retries, 0, "{code}");
        assert!(matches!(report.outcome, Outcome::Failed { error } if error.code() == code));
    }
}

#[tokio::test]
async fn text_of_a_failed_answer_stays_with_a_note() {
    let broken = Script::fail(vec![said("half an ans")], ErrorCode::IdleTimeout);
    let mut stage = Stage::new(Approvals::read_only(), [broken, Script::text("whole")]);
    stage.run("go").await;
    let history = stage.agent.history();
    assert_eq!(history[1], Message::assistant("half an ans"));
    assert!(
        history[2]
            .text()
            .contains("broke off here: the generation failed (idle_timeout)")
    );
    stage.events.lock().unwrap().clear();
    stage.run("go on").await;
    assert_eq!(stage.agent.history().len(), 5);
}

/// Cancels as soon as an event of a type has come.
async fn run_and_cancel_at(stage: &mut Stage, kind: &'static str) -> Report {
    let (cancel, events) = (stage.cancel.clone(), stage.events.clone());
    let run = stage.agent.run("go", &stage.cancel, |event| {
        if serde_json::to_value(&event).unwrap()["type"] == kind {
            cancel.cancel();
        }
        events.lock().unwrap().push(event);
    });
    let report = tokio::time::timeout(Duration::from_secs(20), run).await;
    report.unwrap()
}

#[tokio::test]
async fn cancelling_an_answer_keeps_its_text_with_a_note() {
    let scripts = [Script::hang(vec![said("half")]), Script::text("x")];
    let mut stage = Stage::new(Approvals::read_only(), scripts);
    let report = run_and_cancel_at(&mut stage, "text").await;
    assert!(matches!(report.outcome, Outcome::Cancelled));
    let history = stage.agent.history();
    assert_eq!(history[1], Message::assistant("half"));
    assert!(
        history[2]
            .text()
            .contains("[turnpass] The answer broke off here")
    );
    assert_can_be_sent(history);
}

#[tokio::test(start_paused = true)]
async fn cancelling_a_wait_ends_it() {
    let busy = Script::fail(vec![], ErrorCode::Overloaded);
    let mut stage = Stage::new(Approvals::read_only(), [busy]);
    let report = run_and_cancel_at(&mut stage, "retry").await;
    assert!(matches!(report.outcome, Outcome::Cancelled));
    assert_eq!(stage.transport.requests().len(), 1);
}

#[tokio::test]
async fn cancelling_in_the_middle_of_a_shell_tool_leaves_no_process_and_a_valid_conversation() {
    let command = "sleep 600 & echo $$ > leader; wait";
    let mut stage = Stage::new(
        Approvals::read_only().allow(["shell", "write"]),
        [
            Script::calls(&[
                ("t1", "list", json!({})),
                ("t2", "shell", json!({ "command": command })),
                ("t3", "write", json!({"path":"never","content":""})),
            ]),
            Script::text("x"),
        ],
    );
    let leader = stage.path("leader");
    let cancel = stage.cancel.clone();
    let watch = tokio::task::spawn_blocking(move || {
        let start = std::time::Instant::now();
        loop {
            match std::fs::read_to_string(&leader) {
                Ok(text) if text.ends_with('\n') => {
                    cancel.cancel();
                    return text;
                }
                _ if start.elapsed() > Duration::from_secs(20) => panic!("no shell"),
                _ => std::thread::yield_now(),
            }
        }
    });
    let report = stage.run("go").await;
    assert!(matches!(report.outcome, Outcome::Cancelled));
    assert!(tools::testing::group_is_gone(&watch.await.unwrap()).await);
    assert!(!stage.path("never").exists());
    let results = stage.results();
    assert_eq!(results[1], ("[ended: cancelled]".into(), true));
    assert!(results[2].0.contains("not run: the person cancelled"));
    assert_can_be_sent(stage.agent.history());
    assert_eq!((report.tool_calls, report.refused_calls), (2, 1));
}

#[derive(Debug)]
struct Silent;

impl Approver for Silent {
    fn ask<'a>(&'a self, _: &'a Ask) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test]
async fn cancelling_a_question_counts_as_no() {
    let scripts = [Script::calls(&[(
        "t1",
        "write",
        json!({"path":"f","content":""}),
    )])];
    let mut stage = Stage::new(Approvals::ask(Silent), scripts);
    let report = run_and_cancel_at(&mut stage, "tool_started").await;
    assert!(matches!(report.outcome, Outcome::Cancelled));
    assert!(!stage.path("f").exists());
    assert_can_be_sent(stage.agent.history());
}

#[tokio::test]
async fn bug_087_a_conversation_that_was_killed_in_a_tool_goes_on() {
    let open = Script::calls(&[("t1", "list", json!({})), ("t2", "list", json!({}))]);
    let transport = ScriptedTransport::new([open, Script::text("x"), Script::text("y")]);
    let builder = || Agent::builder(transport.provider(), "sonnet").tools(tools::all());
    let mut first = builder().build().unwrap();
    let cancel = CancellationToken::new();
    first.run("go", &cancel, |_| {}).await;
    let killed = first.history()[..2].to_vec();
    assert_eq!(killed[1].tool_calls().count(), 2);

    let mut second = builder().with_history(killed, None).build().unwrap();
    // The scripted transport refuses a conversation that the service would refuse.
    let report = second.run("go on", &cancel, |_| {}).await;
    assert!(matches!(report.outcome, Outcome::Completed));
    let text = format!("{:?}", second.history()[2]);
    assert!(text.contains("[turnpass] The agent ended before this tool answered"));
}

#[tokio::test]
async fn a_run_that_was_dropped_can_be_gone_on_with() {
    let shell = Script::calls(&[("t1", "shell", json!({"command":"echo > began; sleep 600"}))]);
    let rules = Approvals::read_only().allow(["shell"]);
    let mut stage = Stage::new(rules, [shell, Script::text("x")]);
    let began = stage.path("began");
    let seen = async {
        while !began.exists() {
            tokio::task::yield_now().await;
        }
    };
    let cancel = CancellationToken::new();
    tokio::time::timeout(Duration::from_secs(20), async {
        tokio::select! {
            _ = stage.agent.run("go", &cancel, |_| {}) => unreachable!("it sleeps"),
            () = seen => {}
        }
    })
    .await
    .unwrap();
    let report = stage.run("go on").await;
    assert!(matches!(report.outcome, Outcome::Completed));
}

#[test]
fn what_cannot_be_built_is_an_error() {
    let provider = ScriptedTransport::default().provider();
    let builder = || Agent::builder(provider.clone(), "m");
    for (built, code) in [
        (
            builder().directory("/nowhere/at/all").build(),
            ErrorCode::WorkingDirectory,
        ),
        (builder().rounds(0).build(), ErrorCode::RequestInvalid),
        (
            builder()
                .tools([tools::all(), tools::all()].concat())
                .build(),
            ErrorCode::ToolInvalid,
        ),
    ] {
        assert_eq!(built.unwrap_err().code(), code);
    }
}
