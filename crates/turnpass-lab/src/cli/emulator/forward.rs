//! Turns the event stream of a reply into records, as the real CLI does: pure, no I/O.

use std::time::Instant;

use serde_json::{Value, json};

use super::records::timestamp;
use super::state::fresh_uuid;

/// What an event leads to.
#[derive(Debug)]
pub(crate) enum Out {
    Record(Value),
    /// A block is complete; its `assistant` record has just been given. The caller acts on a tool call
    /// before the records that follow.
    Block(Value),
}

/// How a stream ended.
#[derive(Debug, PartialEq)]
pub(crate) enum Ended {
    /// With a stop reason.
    Whole,
    /// Before anything came.
    Empty,
    /// Inside a block.
    InsideBlock,
    /// After at least one whole block, without a stop reason: the real CLI goes on by itself.
    AfterBlock,
    /// With an error event: its type and message.
    Error(String, String),
}

struct Open {
    index: u64,
    block: Value,
    /// Tool input as it streams.
    raw: String,
    since: Instant,
}

/// The state of one reply.
pub(crate) struct Forward {
    session_id: String,
    partial: bool,
    request_id: Option<String>,
    asked: Instant,
    message: Option<Value>,
    open: Option<Open>,
    /// Whole blocks, for the history.
    pub(crate) blocks: Vec<Value>,
    /// The uuid of the last `assistant` record; the message goes into the history under it.
    pub(crate) last_uuid: String,
    /// The usage of `message_start`, with that of `message_delta` over it.
    pub(crate) usage: Value,
    pub(crate) stop_reason: Value,
    error: Option<(String, String)>,
    stopped: bool,
    /// Whether made-up stops after a cut inside a block or an interrupt say what is abandoned.
    marks: bool,
}

impl Forward {
    pub(crate) fn new(session_id: &str, partial: bool, request_id: Option<String>) -> Forward {
        Forward {
            session_id: session_id.to_owned(),
            partial,
            request_id,
            asked: Instant::now(),
            message: None,
            open: None,
            blocks: Vec::new(),
            last_uuid: fresh_uuid(),
            usage: Value::Null,
            stop_reason: Value::Null,
            error: None,
            stopped: false,
            marks: true,
        }
    }

    /// For the versions whose made-up stops say less.
    pub(crate) fn without_marks(mut self) -> Forward {
        self.marks = false;
        self
    }

    pub(crate) fn message_id(&self) -> Option<&str> {
        self.message.as_ref()?["id"].as_str()
    }

    /// The text of the last block, which `result` repeats.
    pub(crate) fn last_text(&self) -> String {
        let last = self.blocks.last().and_then(|block| block["text"].as_str());
        last.unwrap_or_default().to_owned()
    }

    pub(crate) fn event(&mut self, event: &Value) -> Vec<Out> {
        let mut out = Vec::new();
        match event["type"].as_str().unwrap_or_default() {
            "ping" => return out,
            "error" => {
                let text = |key: &str| event["error"][key].as_str().unwrap_or_default().to_owned();
                self.error = Some((text("type"), text("message")));
                return out;
            }
            "message_start" => {
                self.message = Some(event["message"].clone());
                self.usage = event["message"]["usage"].clone();
            }
            "content_block_start" => {
                self.open = Some(Open {
                    index: event["index"].as_u64().unwrap_or(0),
                    block: event["content_block"].clone(),
                    raw: String::new(),
                    since: Instant::now(),
                });
            }
            "content_block_delta" => self.delta(&event["delta"], &mut out),
            "content_block_stop" => self.finish_block(&mut out, json!({})),
            "message_delta" => {
                self.stop_reason = event["delta"]["stop_reason"].clone();
                if let (Some(usage), Some(more)) =
                    (self.usage.as_object_mut(), event["usage"].as_object())
                {
                    usage.extend(more.clone());
                }
            }
            "message_stop" => self.stopped = true,
            _ => {}
        }
        self.stream_event(event.clone(), json!({}), &mut out);
        out
    }

    fn delta(&mut self, delta: &Value, out: &mut Vec<Out>) {
        let Some(open) = &mut self.open else { return };
        let mut append = |key: &str| {
            let more = delta[key].as_str().unwrap_or_default();
            let text = open.block[key].as_str().unwrap_or_default();
            open.block[key] = json!(format!("{text}{more}"));
        };
        match delta["type"].as_str().unwrap_or_default() {
            "text_delta" => append("text"),
            "thinking_delta" => {
                append("thinking");
                let length = delta["thinking"].as_str().unwrap_or_default().len();
                let total = open.block["thinking"].as_str().unwrap_or_default().len();
                out.push(Out::Record(json!({
                    "type": "system", "subtype": "thinking_tokens",
                    "estimated_tokens": total / 4 + 1, "estimated_tokens_delta": length / 4 + 1,
                    "session_id": self.session_id, "uuid": fresh_uuid(),
                })));
            }
            "signature_delta" => append("signature"),
            "input_json_delta" => {
                open.raw
                    .push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            _ => {}
        }
    }

    /// Gives the `assistant` record of the open block and closes it.
    fn finish_block(&mut self, out: &mut Vec<Out>, more: Value) {
        let Some(open) = self.open.take() else { return };
        let mut block = open.block;
        // An empty text leaves no record and nothing in the conversation: measured on 2.1.332.
        if block["type"] == "text" && block["text"] == "" {
            return;
        }
        if block["type"] == "tool_use" {
            block["input"] = tool_input(&open.raw);
        }
        let uuid = fresh_uuid();
        self.last_uuid.clone_from(&uuid);
        let mut record = self.assistant(&block, &uuid);
        if let (Some(map), Value::Object(more)) = (record.as_object_mut(), more) {
            if block["type"] == "thinking" {
                let took = u64::try_from(open.since.elapsed().as_millis()).unwrap_or(u64::MAX);
                map.insert("thinking_duration_ms".to_owned(), json!(took));
            }
            map.extend(more);
        }
        self.blocks.push(block.clone());
        out.push(Out::Record(record));
        out.push(Out::Block(block));
    }

    fn assistant(&self, block: &Value, uuid: &str) -> Value {
        let mut message = self.message.clone().unwrap_or_default();
        message["content"] = json!([block]);
        message["context_management"] = Value::Null;
        let mut record = json!({
            "type": "assistant", "message": message, "parent_tool_use_id": null,
            "session_id": self.session_id, "uuid": uuid, "timestamp": timestamp(),
            "request_id": self.request_id,
        });
        if block["type"] == "tool_use"
            && let Some(map) = record.as_object_mut()
        {
            let name = block["name"].as_str().unwrap_or_default();
            let own = name.rsplit("__").next().unwrap_or(name);
            let meta = json!([{"id": block["id"], "display_name": own, "tool_name": own}]);
            map.insert("tool_use_meta".to_owned(), meta);
        }
        record
    }

    fn stream_event(&self, event: Value, more: Value, out: &mut Vec<Out>) {
        if !self.partial {
            return;
        }
        let first = event["type"] == "message_start";
        let mut record = json!({
            "type": "stream_event", "event": event, "session_id": self.session_id,
            "parent_tool_use_id": null, "uuid": fresh_uuid(), "api_message_id": self.message_id(),
        });
        if let (Some(map), Value::Object(more)) = (record.as_object_mut(), more) {
            if first {
                let waited = u64::try_from(self.asked.elapsed().as_millis()).unwrap_or(u64::MAX);
                map.insert("ttft_ms".to_owned(), json!(waited));
                map.insert("thinking_display".to_owned(), json!("updates"));
            }
            map.extend(more);
        }
        out.push(Out::Record(record));
    }

    /// A `message_stop` has been given, real or made up.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// What the end of the stream, now, means.
    pub(crate) fn ended(&self) -> Ended {
        match (&self.error, &self.message) {
            (Some((kind, message)), _) => Ended::Error(kind.clone(), message.clone()),
            (None, None) => Ended::Empty,
            _ if !self.stop_reason.is_null() => Ended::Whole,
            _ if self.open.is_some() => Ended::InsideBlock,
            _ if self.stopped => Ended::Whole,
            _ => Ended::AfterBlock,
        }
    }

    /// The records that close a stream which broke off: made-up stops, the last of them saying from
    /// which block on nothing is to be believed. With `keep_open` the open block is kept (an interrupt),
    /// and its record says `aborted`.
    pub(crate) fn abandon(&mut self, keep_open: bool, between: Vec<Value>) -> Vec<Out> {
        let mut out = Vec::new();
        if self.message.is_none() {
            return between.into_iter().map(Out::Record).collect();
        }
        let open = self.open.as_ref().map(|open| open.index);
        let tool = self
            .open
            .as_ref()
            .is_some_and(|open| open.block["type"] == "tool_use");
        let whole = u64::try_from(self.blocks.len()).unwrap_or(u64::MAX);
        if keep_open && open.is_some() && !tool {
            self.finish_block(&mut out, json!({"aborted": true}));
        }
        let from = if keep_open && !tool {
            open.map_or(whole, |index| index + 1)
        } else {
            open.unwrap_or(whole)
        };
        out.extend(between.into_iter().map(Out::Record));
        if let Some(index) = open {
            self.open = None;
            self.stream_event(
                json!({"type": "content_block_stop", "index": index}),
                json!({}),
                &mut out,
            );
            let delta = json!({"stop_reason": null, "stop_sequence": null});
            let event = json!({"type": "message_delta", "delta": delta, "usage": self.usage});
            self.stream_event(event, json!({}), &mut out);
        }
        let abandoned = json!({"api_message_id": self.message_id(), "from_block_index": from});
        let said = self.marks || (open.is_none() && !keep_open);
        let more = if said {
            json!({"abandoned_blocks": abandoned})
        } else {
            json!({})
        };
        self.stopped = true;
        self.stream_event(json!({"type": "message_stop"}), more, &mut out);
        out
    }

    /// The made-up `message_stop` of a stream that gave a stop reason and then ended.
    pub(crate) fn made_up_stop(&mut self) -> Vec<Out> {
        let mut out = Vec::new();
        if !self.stopped {
            self.stopped = true;
            self.stream_event(json!({"type": "message_stop"}), json!({}), &mut out);
        }
        out
    }

    /// Takes a reply without a stream: bare `assistant` records, no events.
    pub(crate) fn whole_message(&mut self, message: &Value) -> Vec<Out> {
        let mut out = Vec::new();
        self.usage = message["usage"].clone();
        self.stop_reason = message["stop_reason"].clone();
        self.stopped = true;
        self.message = Some(message.clone());
        for block in message["content"].as_array().into_iter().flatten() {
            let uuid = fresh_uuid();
            self.blocks.push(block.clone());
            self.last_uuid.clone_from(&uuid);
            out.push(Out::Record(self.assistant(block, &uuid)));
            out.push(Out::Block(block.clone()));
        }
        out
    }
}

/// Input that does not parse is marked and never called: measured on 2.1.332.
fn tool_input(raw: &str) -> Value {
    match serde_json::from_str::<Value>(raw) {
        _ if raw.is_empty() => json!({}),
        Ok(Value::Null) => json!({}),
        Ok(value) => value,
        Err(_) => json!({"__unparsedToolInput": {"raw": raw, "len": raw.len()}}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(out: Vec<Out>) -> Vec<Value> {
        out.into_iter()
            .filter_map(|out| {
                if let Out::Record(record) = out {
                    Some(record)
                } else {
                    None
                }
            })
            .collect()
    }

    fn start() -> Value {
        json!({"type": "message_start", "message": {"id": "m1", "content": [], "usage": {"input_tokens": 3}}})
    }

    fn text(forward: &mut Forward, text: &str, stop: bool) -> Vec<Value> {
        let mut all = records(forward.event(&json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})));
        all.extend(records(forward.event(&json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}))));
        if stop {
            all.extend(records(
                forward.event(&json!({"type": "content_block_stop", "index": 0})),
            ));
        }
        all
    }

    #[test]
    fn the_assistant_record_of_a_block_comes_before_its_stop() {
        let mut forward = Forward::new("s", true, None);
        forward.event(&start());
        let all = text(&mut forward, "hello", true);
        let kinds: Vec<&str> = all
            .iter()
            .map(|record| record["type"].as_str().unwrap())
            .collect();
        assert_eq!(
            kinds,
            ["stream_event", "stream_event", "assistant", "stream_event"]
        );
        assert_eq!(all[2]["message"]["content"][0]["text"], "hello");
        assert_eq!(all[3]["event"]["type"], "content_block_stop");
    }

    #[test]
    fn a_break_is_judged_by_where_it_fell() {
        let mut forward = Forward::new("s", true, None);
        assert_eq!(forward.ended(), Ended::Empty);
        forward.event(&start());
        text(&mut forward, "he", false);
        assert_eq!(forward.ended(), Ended::InsideBlock);
        let closing = records(forward.abandon(false, Vec::new()));
        let last = closing.last().unwrap();
        assert_eq!(last["abandoned_blocks"]["from_block_index"], 0);

        let mut forward = Forward::new("s", true, None);
        forward.event(&start());
        text(&mut forward, "he", true);
        assert_eq!(forward.ended(), Ended::AfterBlock);
        forward.event(&json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}}));
        assert_eq!(forward.ended(), Ended::Whole);
        assert_eq!(
            forward.usage,
            json!({"input_tokens": 3, "output_tokens": 9})
        );
    }

    #[test]
    fn tool_input_that_does_not_parse_is_kept_as_it_came() {
        assert_eq!(tool_input(""), json!({}));
        assert_eq!(tool_input("{\"a\":1}"), json!({"a": 1}));
        assert_eq!(
            tool_input("{\"a"),
            json!({"__unparsedToolInput": {"raw": "{\"a", "len": 3}})
        );
    }
}
