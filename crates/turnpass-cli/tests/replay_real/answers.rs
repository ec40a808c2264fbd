//! What a generation is: text, thinking, calls whole and once, each with exactly one request.

use serde_json::{Value, json};
use turnpass::conversation::{Block, Message, ToolResult};
use turnpass::event::{Event, StopReason};
use turnpass::request::{Effort, ToolChoice};
use turnpass_lab::scenario::{Item, Reply};

use crate::bench::{body, request, say};
use crate::ground::{Ground, Setup};
use crate::history::messages;

const THINKING: &str = "  the file is \"needed\"\r\n\tfirst — 考える 👩‍👩‍👧 ";

/// The document's flow: a call is proposed, the host runs it, the next process is given everything with the result.
pub(crate) async fn replay_workflow(setup: Setup) {
    let ground = Ground::new(&setup);
    ground.up.enqueue(Reply::content([
        Item::thinking(THINKING),
        Item::RedactedThinking { data: None },
        Item::text("I write it."),
        Item::tool_use(
            "write",
            json!({"path": "marker.txt", "content": "REPLAY_OK"}),
        ),
    ]));
    let mut history = vec![Message::user("write the marker")];
    let (answer, seen) = ground.ask(request(history.clone())).await;
    assert_eq!(seen.len(), 1);
    assert!(seen[0].violations.is_empty(), "{:?}", seen[0].violations);
    let done = answer.done();
    assert_eq!(
        (&done.stop, done.upstream_requests, done.laboratory),
        (&StopReason::ToolUse, 1, !setup.is_production())
    );
    let [call] = &answer.calls()[..] else {
        panic!("{:?}", answer.events)
    };
    assert_eq!(call.name, "write");
    assert!(
        answer
            .events
            .iter()
            .any(|event| matches!(event, Event::ThinkingBlock(_)))
    );
    history.push(done.message.clone());
    history.push(Message::results([ToolResult::text(
        call.id.clone(),
        "written",
    )]));
    // The conversation survives a restart of the host as JSON.
    let stored = serde_json::to_string(&history).unwrap();
    let mut history: Vec<Message> = serde_json::from_str(&stored).unwrap();

    ground.up.enqueue(Reply::text("REPLAY_OK is written."));
    let (answer, seen) = ground.ask(request(history.clone())).await;
    assert_eq!(seen.len(), 1);
    assert!(seen[0].violations.is_empty(), "{:?}", seen[0].violations);
    assert_eq!(answer.done().stop, StopReason::EndTurn);
    assert_eq!(answer.text(), "REPLAY_OK is written.");
    let sent = messages(&seen[0]);
    assert_eq!(sent.len(), 3, "{sent:?}");
    let Block::Thinking(thought) = &history[1].content[0] else {
        panic!("{history:?}")
    };
    let first = &sent[1]["content"][0];
    if setup.is_native() {
        assert_eq!(first["thinking"], THINKING);
        assert_eq!(first["signature"], thought.signature);
        assert_eq!(sent[1]["content"][1]["type"], "redacted_thinking");
    } else {
        assert_eq!(first["text"], THINKING);
        assert_eq!(sent[1]["content"][1]["redacted"], true);
    }
    let used = &sent[1]["content"][3];
    assert_eq!(used["name"], "mcp__turnpass__write");
    assert_eq!(sent[2]["content"][0]["tool_use_id"], used["id"]);
    let result = &sent[2]["content"][0]["content"][0]["text"];
    assert_eq!(result, "written", "{}", body(&seen[0]));

    history.push(answer.done().message.clone());
    history.push(Message::user("and now?"));
    let (answer, seen) = ground.ask(request(history)).await;
    assert_eq!((seen.len(), &answer.done().stop), (1, &StopReason::EndTurn));
    assert_eq!((ground.count(), ground.spawned().len()), (3, 3));
    ground.finish().await;
}

/// Text and three calls, two of one tool, with 200 KB in 500 pieces each; all of them whole, in order, with one request.
pub(crate) async fn bug_088_parallel_calls_with_large_inputs(setup: Setup) {
    let ground = Ground::new(&setup);
    for gap_ms in [0, 1] {
        let content = "y\"\\é".repeat(40_000);
        let call = |path: &str| Item::ToolUse {
            name: "write".into(),
            id: None,
            input: Some(json!({"path": path, "content": content})),
            raw: None,
            chunk: std::num::NonZeroUsize::new(600),
        };
        ground.up.enqueue(Reply {
            between_events_ms: gap_ms,
            ..Reply::content([
                Item::text("three"),
                call("a"),
                call("b"),
                Item::tool_use("read", json!({"path": "c"})),
            ])
        });
        let (answer, seen) = ground.ask(say("go")).await;
        assert_eq!(seen.len(), 1);
        let calls = answer.calls();
        let names: Vec<_> = calls.iter().map(|call| call.name.as_str()).collect();
        assert_eq!(names, ["write", "write", "read"]);
        for (call, path) in calls.iter().zip(["a", "b", "c"]) {
            let input: Value = call.input.read().unwrap();
            assert_eq!(input["path"], path);
            if path != "c" {
                assert_eq!(input["content"], content);
            }
        }
    }
    // A process that ends by itself in the middle of a call releases none.
    ground.up.enqueue(Reply::content([
        Item::tool_use("read", json!({"path": "a"})),
        Item::UntilClosed {},
    ]));
    let mut generation = ground.generate(say("go"));
    crate::bench::read_until(&mut generation, |event| {
        matches!(event, Event::ToolInput { .. })
    })
    .await;
    let pid = ground.spawned().last().unwrap().pid;
    crate::ends::kill(pid);
    let answer = crate::bench::drain(generation).await;
    assert_eq!(answer.code(), Some(turnpass::ErrorCode::ProcessExit));
    assert!(answer.calls().is_empty());
    ground.finish().await;
}

/// Calls that the CLI would deny, refuse or not know, and asks again for when it is let: one request each.
pub(crate) async fn bug_059_one_request_for_each_call(setup: Setup) {
    let ground = Ground::new(&setup);
    let raw = |raw: &str| Item::ToolUse {
        name: "read".into(),
        id: None,
        input: None,
        raw: Some(vec![raw.to_owned()]),
        chunk: None,
    };
    let many = || (0..8).map(|at| Item::tool_use("read", json!({"path": at.to_string()})));
    let cases: [(&str, Vec<Item>, usize, usize); 6] = [
        ("one", vec![Item::tool_use("read", json!({}))], 1, 0),
        ("eight", many().collect(), 8, 0),
        ("unknown", vec![Item::tool_use("fly", json!({}))], 0, 1),
        (
            "built in",
            vec![Item::tool_use("Bash", json!({"command": "ls"}))],
            0,
            1,
        ),
        ("unparsed", vec![raw("{\"path\": tru")], 0, 1),
        (
            "text behind",
            vec![Item::tool_use("read", json!({})), Item::text("so")],
            1,
            0,
        ),
    ];
    for (what, items, calls, rejected) in cases {
        for _ in 0..3 {
            ground.up.enqueue(Reply::content(items.clone()));
            let (answer, seen) = ground.ask(say("go")).await;
            answer.done();
            assert_eq!(seen.len(), 1, "{what}");
            assert_eq!(
                (answer.calls().len(), answer.rejected().len()),
                (calls, rejected),
                "{what}"
            );
        }
    }
    ground.finish().await;
}

/// Thinking streams; settings of the request are in the body, and thinking can be off.
pub(crate) async fn replay_thinking_and_settings(setup: Setup) {
    let ground = Ground::new(&setup);
    let mut asked = say("[[think let me see]] [[say done]]");
    asked.effort = Some(Effort::Low);
    asked.sampling.max_tokens = Some(77);
    asked.sampling.stop_sequences = vec!["END".into()];
    asked.sampling.tool_choice = Some(ToolChoice::Any {
        disable_parallel_tool_use: true,
    });
    let (answer, seen) = ground.ask(asked).await;
    let thought: String = answer
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Thinking { text } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(
        (thought.as_str(), answer.text().as_str()),
        ("let me see", "done")
    );
    let sent = body(&seen[0]);
    assert_eq!(sent["max_tokens"], 77);
    assert_eq!(sent["stop_sequences"], json!(["END"]));
    assert_eq!(sent["tool_choice"]["type"], "any");
    assert_eq!(sent["output_config"]["effort"], "low");
    assert_eq!(sent["system"][2]["text"], "You are under test.");

    let mut off = say("[[say plain]]");
    off.effort = Some(Effort::None);
    off.model = "claude-sonnet-5-5".into();
    let (answer, seen) = ground.ask(off).await;
    if answer.end.is_ok() {
        assert_eq!(body(&seen[0])["thinking"], json!({"type": "disabled"}));
    } else {
        assert_eq!(answer.code(), Some(turnpass::ErrorCode::EffortUnsupported));
    }
    ground.finish().await;
}

/// A line of megabytes, and a text of many pieces.
pub(crate) async fn bug_001_large_answers(setup: Setup) {
    let ground = Ground::new(&setup);
    let content = "z".repeat(3 * 1024 * 1024);
    ground.up.enqueue(Reply::content([Item::tool_use(
        "write",
        json!({"path": "a", "content": content}),
    )]));
    let (answer, seen) = ground.ask(say("go")).await;
    assert_eq!(seen.len(), 1);
    let input: Value = answer.calls()[0].input.read().unwrap();
    assert_eq!(input["content"], content);
    let (answer, _) = ground.ask(say("[[text-size 300000]] [[chunk 200]]")).await;
    assert_eq!(answer.done().message.text().len(), 300_000);
    assert_eq!(answer.text().len(), 300_000);
    ground.finish().await;
}
