//! Runs of a kept session: what is on the disk when, and what a later run finds.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use turnpass::ErrorCode;
use turnpass::conversation::{Block, Message, ToolInput};
use turnpass::event::{Done, StateOrder, StopReason, Usage};
use turnpass::request::{BackendState, Tool};

use crate::scripted::{Script, ScriptedTransport, assert_can_be_sent};
use crate::tools::{Failure, Scene};
use crate::{Agent, Approvals, Effect, HostTool, KeptSession, Outcome, Report, SessionStore};

/// A tool that notes what stands in the session's file when it runs.
#[derive(Debug)]
struct Look {
    file: PathBuf,
    seen: Mutex<Vec<serde_json::Value>>,
    /// It never ends.
    hangs: bool,
    began: tokio::sync::Notify,
    /// It makes the folder one that nothing can be written to.
    breaks: bool,
}

impl HostTool for Look {
    fn declaration(&self) -> Tool {
        Tool {
            name: "look".into(),
            description: "looks".into(),
            input_schema: json!({"type": "object"}),
        }
    }

    fn effect(&self) -> Effect {
        Effect::Change
    }

    fn paths(&self, _: &ToolInput) -> Result<Vec<PathBuf>, Failure> {
        Ok(Vec::new())
    }

    fn summary(&self, _: &ToolInput) -> String {
        "look".into()
    }

    fn call(&self, _: ToolInput, _: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        let text = std::fs::read_to_string(&self.file).unwrap();
        let mut seen = self.seen.lock().unwrap();
        seen.push(serde_json::from_str(&text).unwrap());
        let count = seen.len();
        self.began.notify_one();
        if self.breaks {
            std::fs::remove_dir_all(self.file.parent().unwrap()).unwrap();
        }
        match self.hangs {
            true => Box::pin(std::future::pending()),
            false => Box::pin(async move { Ok(format!("look {count}")) }),
        }
    }
}

struct Stage {
    folder: tempfile::TempDir,
    store: SessionStore,
    transport: ScriptedTransport,
    tool: Arc<Look>,
}

impl Stage {
    fn new(scripts: impl IntoIterator<Item = Script>) -> Self {
        Self::with(scripts, |_| {})
    }

    fn with(scripts: impl IntoIterator<Item = Script>, change: impl FnOnce(&mut Look)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let sessions = folder.path().join("sessions");
        let mut tool = Look {
            file: sessions.join("s.json"),
            seen: Mutex::default(),
            hangs: false,
            began: tokio::sync::Notify::new(),
            breaks: false,
        };
        change(&mut tool);
        Self {
            folder,
            store: SessionStore::new(sessions),
            transport: ScriptedTransport::new(scripts),
            tool: Arc::new(tool),
        }
    }

    fn agent(&self) -> Agent {
        Agent::builder(self.transport.provider(), "sonnet")
            .directory(self.folder.path())
            .tools(vec![self.tool.clone()])
            .approvals(Approvals::read_only().allow(["look"]))
            .kept(self.store.open("s").unwrap())
            .build()
            .unwrap()
    }

    async fn run(&self, prompt: &str) -> Report {
        let cancel = CancellationToken::new();
        self.agent().run(prompt, &cancel, |_| {}).await
    }

    fn kept(&self) -> KeptSession {
        self.store.open("s").unwrap()
    }
}

fn look(id: &str) -> (&str, &str, serde_json::Value) {
    (id, "look", json!({}))
}

fn keeping(text: &str, state: &str) -> Script {
    let message = Message::assistant(text);
    let usage = Usage::default();
    let mut done = Done::new(StopReason::EndTurn, message, usage, "scripted".into());
    done.state = StateOrder::Keep {
        state: BackendState(state.to_owned()),
    };
    Script::ending(done)
}

#[tokio::test]
async fn a_tool_finds_its_call_and_what_ran_before_it_on_the_disk() {
    let stage = Stage::new([
        Script::calls(&[look("t1"), look("t2")]),
        Script::calls(&[look("t3")]),
        Script::text("done"),
    ]);
    let report = stage.run("go").await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    let seen = stage.tool.seen.lock().unwrap().clone();
    let results = |kept: &serde_json::Value| {
        let text = kept["messages"].to_string();
        let calls = text.matches("\"type\":\"tool_use\"").count();
        (calls, text.matches("\"type\":\"tool_result\"").count())
    };
    let seen: Vec<_> = seen.iter().map(results).collect();
    assert_eq!(seen, [(2, 0), (2, 1), (3, 2)]);
    let kept = stage.kept();
    assert_eq!(kept.messages().len(), 6);
    assert_eq!(kept.messages().last(), Some(&Message::assistant("done")));
}

#[tokio::test]
async fn a_later_run_goes_on_with_messages_state_and_key() {
    let stage = Stage::new([keeping("one", "{\"n\":1}"), Script::text("two")]);
    stage.run("first").await;
    stage.run("second").await;
    let requests = stage.transport.requests();
    assert_eq!(requests[1].messages.len(), 3);
    assert_eq!(requests[0].session, requests[1].session);
    assert_eq!(requests[0].state, None);
    assert_eq!(
        requests[1].state,
        Some(BackendState("{\"n\":1}".to_owned()))
    );
    assert_can_be_sent(&requests[1].messages);
}

#[tokio::test]
async fn a_tool_that_was_running_when_the_program_ended_does_not_run_again() {
    let stage = Stage::with(
        [Script::calls(&[look("t1")]), Script::text("well")],
        |tool| {
            tool.hangs = true;
        },
    );
    {
        let mut agent = stage.agent();
        let cancel = CancellationToken::new();
        let run = agent.run("go", &cancel, |_| {});
        tokio::select! {
            report = run => panic!("{report:?}"),
            // Dropping the run is all that an end of the program leaves of it.
            () = stage.tool.began.notified() => {}
        }
    }
    let report = stage.run("go on").await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    assert_eq!(stage.tool.seen.lock().unwrap().len(), 1);
    let request = stage.transport.requests().pop().unwrap();
    assert_can_be_sent(&request.messages);
    let text = format!("{:?}", request.messages[2]);
    assert!(text.contains("what it did is not known"), "{text}");
}

#[tokio::test]
async fn a_generation_that_was_running_is_all_that_is_lost() {
    let stage = Stage::new([
        Script::calls(&[look("t1")]),
        Script::hang(vec![crate::scripted::said("half an ans")]),
        Script::text("again"),
    ]);
    {
        let mut agent = stage.agent();
        let cancel = CancellationToken::new();
        let (heard, mut half) = tokio::sync::mpsc::unbounded_channel();
        let run = agent.run("go", &cancel, move |event| {
            if matches!(event, crate::AgentEvent::Text { .. }) {
                heard.send(()).unwrap();
            }
        });
        tokio::select! {
            report = run => panic!("{report:?}"),
            _ = half.recv() => {}
        }
    }
    let kept: Vec<_> = stage.kept().messages().to_vec();
    assert_eq!(kept.len(), 3, "prompt, call, result: {kept:?}");
    assert!(matches!(kept[2].content[0], Block::ToolResult(_)));
    stage.run("go on").await;
    assert_eq!(stage.tool.seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn what_cannot_be_kept_ends_the_run_before_anything_more_happens() {
    let stage = Stage::with(
        [
            Script::calls(&[look("t1"), look("t2")]),
            Script::text("never"),
        ],
        |tool| tool.breaks = true,
    );
    let report = stage.run("go").await;
    let Outcome::Failed { error } = report.outcome else {
        panic!("{report:?}");
    };
    assert_eq!(error.code(), ErrorCode::SessionFile);
    assert_eq!(stage.tool.seen.lock().unwrap().len(), 1, "t2 is not run");
    assert_eq!(stage.transport.requests().len(), 1);
}

#[tokio::test]
async fn a_cancelled_run_keeps_what_was_said() {
    let stage = Stage::new([Script::hang(vec![crate::scripted::said("half an ans")])]);
    let cancel = CancellationToken::new();
    let token = cancel.clone();
    let mut agent = stage.agent();
    let report = agent
        .run("go", &cancel, move |event| {
            if matches!(event, crate::AgentEvent::Text { .. }) {
                token.cancel();
            }
        })
        .await;
    assert!(matches!(report.outcome, Outcome::Cancelled));
    drop(agent);
    let kept = stage.kept();
    let last = kept.messages().last().unwrap().text();
    assert!(last.contains("The answer broke off here"), "{last}");
}
