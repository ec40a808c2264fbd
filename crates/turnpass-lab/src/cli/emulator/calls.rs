//! The tool calls of one reply: refused, or run against their server.

use std::rc::Rc;

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::faults::Fault;
use super::records;
use super::state::{PublishedTool, fresh_uuid};
use super::turn::{Shared, say_streaming};

/// A tool result on its way: what goes into the conversation, and what the record says beside it.
struct ToolResult {
    block: Value,
    more: Value,
    ends_turn: bool,
}

/// The tool calls of one reply.
#[derive(Default)]
pub(super) struct Calls {
    results: Vec<Value>,
    running: Vec<JoinHandle<ToolResult>>,
    /// A good result said that the turn ends with it.
    ends_turn: bool,
    /// Calls without the read-only mark wait for those before them.
    last: Option<tokio::sync::watch::Receiver<bool>>,
}

impl Calls {
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.results.is_empty()
    }

    /// Acts on a complete `tool_use` block. A refused call gives its records; an allowed one starts.
    pub(super) fn take(&mut self, shared: &Rc<Shared>, block: &Value) -> Vec<Value> {
        let name = block["name"].as_str().unwrap_or_default().to_owned();
        let id = block["id"].as_str().unwrap_or_default().to_owned();
        let state = shared.state.borrow();
        let tool = state.tools().into_iter().find(|tool| tool.name == name);
        let allowed = state.flags.allows(&name);
        let unparsed = block["input"].get("__unparsedToolInput").is_some()
            && !state.faults.has(Fault::CallsUnparsed);
        let refuse = |text: String| {
            let content = json!([{"type": "tool_result", "content": text, "is_error": true, "tool_use_id": id}]);
            records::user(
                &state,
                content,
                json!({"tool_use_result": format!("Error: {text}")}),
            )
        };
        let mut records = Vec::new();
        match tool {
            _ if unparsed => {
                let text = "<tool_use_error>InputValidationError: the input could not be parsed as JSON.</tool_use_error>";
                records.push(refuse(text.to_owned()));
            }
            None => {
                let text = format!(
                    "<tool_use_error>Error: No such tool available: {name}</tool_use_error>"
                );
                records.push(refuse(text));
            }
            Some(_) if !allowed => {
                say_now(shared, &records::permission_denied(&state, &name, &id));
                let input = block["input"].clone();
                let denial = json!({"tool_name": name, "tool_use_id": id, "tool_input": input});
                shared.with_outcome(|outcome| outcome.denials.push(denial));
                records.push(refuse(records::denial(&name)));
            }
            Some(tool) => {
                drop(state);
                self.start(shared, tool, id, block["input"].clone());
                return Vec::new();
            }
        }
        self.results.extend(
            records
                .iter()
                .map(|record| record["message"]["content"][0].clone()),
        );
        records
    }

    fn start(&mut self, shared: &Rc<Shared>, tool: PublishedTool, id: String, input: Value) {
        shared
            .progress
            .borrow_mut()
            .calls
            .push((id.clone(), tool.clone()));
        let (done, ready) = tokio::sync::watch::channel(false);
        let before = if tool.read_only() {
            None
        } else {
            self.last.take()
        };
        self.last = Some(ready);
        let shared = Rc::clone(shared);
        self.running.push(tokio::task::spawn_local(async move {
            if let Some(mut before) = before {
                let _ = before.wait_for(|done| *done).await;
            }
            let outcome = tool.server.call(&tool.own, &input, &id).await;
            let mut result = tool_result(&tool, &id, outcome);
            shared.state.borrow().faults.called(&mut result.block);
            shared
                .progress
                .borrow_mut()
                .calls
                .retain(|(call, _)| *call != id);
            let record = records::user(
                &shared.state.borrow(),
                json!([result.block]),
                result.more.clone(),
            );
            say_streaming(&shared, |_| record);
            let _ = done.send(true);
            result
        }));
    }

    /// Waits for the running calls and puts all results into the history, in the order of completion.
    pub(super) async fn results(mut self, shared: &Rc<Shared>) -> Vec<Value> {
        for call in self.running.drain(..) {
            if let Ok(result) = call.await {
                self.ends_turn |= result.ends_turn;
                self.results.push(result.block);
            }
        }
        if !self.results.is_empty() {
            let message = json!({"role": "user", "content": self.results});
            shared.state.borrow_mut().push(fresh_uuid(), message, false);
        }
        shared.progress.borrow_mut().ended_by_result = self.ends_turn;
        std::mem::take(&mut self.results)
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        for call in &self.running {
            call.abort();
        }
    }
}

fn say_now(shared: &Shared, record: &Value) {
    shared.say(record);
}

/// What a tool's answer becomes in the conversation: measured on 2.1.332.
fn tool_result(tool: &PublishedTool, id: &str, outcome: Result<Value, String>) -> ToolResult {
    let error = |text: String| ToolResult {
        more: json!({"tool_use_result": format!("Error: {text}")}),
        block: json!({"type": "tool_result", "content": text, "is_error": true, "tool_use_id": id}),
        // Measured on 2.1.294 to 2.1.332: an error does not end the turn, whatever it says.
        ends_turn: false,
    };
    let answer = match outcome {
        Ok(answer) => answer,
        Err(text) => return error(text),
    };
    let blocks = answer["content"].as_array().cloned().unwrap_or_default();
    if answer["isError"] == true {
        let texts: Vec<&str> = blocks
            .iter()
            .filter_map(|block| block["text"].as_str())
            .collect();
        return error(texts.join("\n"));
    }
    let content: Vec<Value> = blocks
        .into_iter()
        .map(|block| match block["type"].as_str() {
            Some("image") => json!({
                "type": "image",
                "source": {"type": "base64", "media_type": block["mimeType"], "data": block["data"]},
            }),
            _ => block,
        })
        .collect();
    let content = if content.is_empty() {
        json!(format!("({} completed with no output)", tool.name))
    } else {
        json!(content)
    };
    ToolResult {
        more: json!({"tool_use_result": content}),
        block: json!({"tool_use_id": id, "type": "tool_result", "content": content}),
        ends_turn: answer["_meta"]["claude/endTurn"] == true,
    }
}
