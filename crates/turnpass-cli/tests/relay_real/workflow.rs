//! The workflow of the relay document: a tool of the host writes, and a fresh continuation goes on with signed thinking.

use serde_json::Value;
use turnpass::conversation::{Block, Message, ToolResult};
use turnpass::event::{Event, StopReason};
use turnpass_lab::scenario::{Item, Reply};

use crate::bench::{Bench, Setup, body, request};

const THINKING: &str = "  the file is \"needed\"\r\n\tfirst — 考える 👩‍👩‍👧 ";

/// Durable order, byte-exact thinking, one upstream request each; the host restarts in between.
pub(crate) async fn tool_round(setup: Setup) {
    let bench = Bench::new(&setup);
    bench.up.enqueue(Reply::content([
        Item::thinking(THINKING),
        Item::RedactedThinking { data: None },
        Item::thinking(""),
        Item::text("I write it."),
        Item::tool_use(
            "write",
            serde_json::json!({"path": "marker.txt", "content": "RELAY_OK"}),
        ),
    ]));
    let mut history = vec![Message::user("write the marker")];
    let (answer, seen) = bench.ask(request(history.clone())).await;
    assert_eq!(seen.len(), 1);
    assert!(seen[0].violations.is_empty(), "{:?}", seen[0].violations);
    assert_eq!(
        order(&answer.events),
        [
            "thinking",
            "thinking_block",
            "thinking_block",
            "text",
            "call"
        ]
    );
    let done = answer.done();
    assert_eq!(
        (&done.stop, done.upstream_requests, done.laboratory),
        (&StopReason::ToolUse, 1, true)
    );
    let [call] = &answer.calls()[..] else {
        panic!("{:?}", answer.events)
    };
    assert_eq!(call.name, "write");
    history.push(done.message.clone());

    // The host executes the call, and the conversation survives a restart of the host as JSON.
    let wanted: Value = call.input.read().unwrap();
    let file = bench.dir().join(wanted["path"].as_str().unwrap());
    std::fs::write(&file, wanted["content"].as_str().unwrap()).unwrap();
    history.push(Message::results([ToolResult::text(
        call.id.clone(),
        "written",
    )]));
    let stored = serde_json::to_string(&history).unwrap();
    let history: Vec<Message> = serde_json::from_str(&stored).unwrap();
    turnpass::Transport::shutdown(&bench.relay).await.unwrap();
    let bench = bench.reopen();

    bench.up.enqueue(Reply::content([
        Item::thinking("done"),
        Item::text("RELAY_OK is written."),
    ]));
    let (answer, seen) = bench.ask(request(history.clone())).await;
    assert_eq!(seen.len(), 1, "the service accepts its own signatures");
    assert_eq!(answer.done().stop, StopReason::EndTurn);
    assert_eq!(answer.text(), "RELAY_OK is written.");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "RELAY_OK");
    follow_up_is_exact(&history, body(&seen[0]), &seen[0].body);

    let mut longer = history;
    longer.push(answer.done().message.clone());
    longer.push(Message::user("and now?"));
    let (answer, seen) = bench.ask(request(longer)).await;
    assert_eq!((seen.len(), &answer.done().stop), (1, &StopReason::EndTurn));
    assert_eq!(bench.count(), 3);
    bench.finish().await;
}

fn order(events: &[Event]) -> Vec<&'static str> {
    let mut order: Vec<&'static str> = events
        .iter()
        .filter_map(|event| match event {
            Event::Thinking { .. } => Some("thinking"),
            Event::ThinkingBlock(_) => Some("thinking_block"),
            Event::Text { .. } => Some("text"),
            Event::ToolCall(_) => Some("call"),
            _ => None,
        })
        .collect();
    order.dedup_by(|a, b| a == b && *a != "thinking_block");
    order
}

/// Thinking, redacted thinking, text, call, result: in this order, and the opaque parts as they were issued.
fn follow_up_is_exact(history: &[Message], body: &Value, bytes: &[u8]) {
    let kinds = |message: &Value| -> Vec<String> {
        let blocks = message["content"].as_array().unwrap();
        blocks
            .iter()
            .map(|block| block["type"].as_str().unwrap().to_owned())
            .collect()
    };
    let messages = body["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 3);
    assert_eq!(
        kinds(&messages[1]),
        [
            "thinking",
            "redacted_thinking",
            "thinking",
            "text",
            "tool_use"
        ]
    );
    assert_eq!(kinds(&messages[2]), ["tool_result"]);
    assert_eq!(messages[1]["content"][0]["thinking"], THINKING);
    assert_eq!(messages[1]["content"][2]["thinking"], "");
    let text = std::str::from_utf8(bytes).unwrap();
    for block in &history[1].content {
        let (field, value) = match block {
            Block::Thinking(thinking) => ("signature", &thinking.signature),
            Block::RedactedThinking(redacted) => ("data", &redacted.data),
            _ => continue,
        };
        assert!(value.len() > 10, "the upstream issues long ones");
        assert!(
            text.contains(&format!("\"{field}\":\"{value}\"")),
            "{field}"
        );
    }
    assert_eq!(
        messages[2]["content"][0]["tool_use_id"],
        messages[1]["content"][4]["id"]
    );
}
