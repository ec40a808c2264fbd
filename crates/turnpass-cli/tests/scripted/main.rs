//! The relay and the pool against a CLI that does what the real one cannot be made to do: each step of the scripted CLI stands for a
//! failure that somebody has had.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bad_input;
mod environment;
mod extra_requests;
mod framing;
mod kept;
mod life;
mod pool_bugs;
mod pool_history;
mod pool_kinds;
mod pool_seats;
mod pool_summary;
mod pool_turns;
mod replays;
mod sign_in;
#[path = "../stage/mod.rs"]
mod stage;
mod standing;
mod start;
mod verdicts;

use serde_json::{Value, json};

use crate::stage::Row;

/// A whole run of the scripted CLI that takes the host's turns, with these steps in each: for a warm process again and
/// again, for a process per request once.
fn turns(row: Row, steps: impl IntoIterator<Item = Value>) -> Value {
    let mut turn = vec![json!({"send_init": null})];
    turn.extend(steps);
    if row.is_warm() {
        turn.insert(0, json!({"expect": {"type": "user"}}));
        json!({"steps": ["answer_controls", {"loop": turn}]})
    } else {
        turn.push(json!({"exit": 0}));
        json!({"steps": turn})
    }
}

/// The request of the turn, its answer forwarded as the real CLI does.
fn post(row: Row) -> Value {
    posted(row, json!({}))
}

/// The same with other settings of the step. Without stream input the prompt stands in argv, so the step is given its
/// body.
fn posted(row: Row, settings: Value) -> Value {
    let mut post = settings;
    if !row.is_warm() && post.get("body").is_none() {
        post["body"] = body(json!([{"role": "user", "content": "turnpass placeholder"}]));
    }
    json!({"post": post})
}

fn body(messages: Value) -> Value {
    json!({
        "model": "{{model}}", "max_tokens": 1000, "stream": true, "messages": messages,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    })
}

/// The same with the tools of [`stage::ask_with_tools`].
fn body_with_tools() -> Value {
    let mut body = body(json!([{"role": "user", "content": "turnpass placeholder"}]));
    let tool =
        |name: &str| json!({"name": name, "description": "", "input_schema": {"type": "object"}});
    body["tools"] = json!([tool("mcp__turnpass__read"), tool("mcp__turnpass__write")]);
    body
}

/// A good turn, for the start after a bad one.
fn good(row: Row) -> Value {
    turns(row, [post(row)])
}
