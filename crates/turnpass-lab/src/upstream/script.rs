//! From a [`Reply`] to the steps that write it: pure.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::signature::Signer;
use crate::scenario::{
    Body, Coding, CutAt, CutHow, ErrorBody, Framing, Item, NamedPosition, Position, Reply, SseShape,
};

/// Deltas of a text whose chunk size nobody gave: so many characters each ...
const CHUNK_CHARS: usize = 24;
/// ... but no more deltas than this, so that a megabyte of text does not become 40,000 events.
const CHUNKS: usize = 200;

/// What is known of the request that a reply answers.
pub(crate) struct Asked<'a> {
    pub(crate) number: u64,
    pub(crate) model: &'a str,
    pub(crate) stream: bool,
    pub(crate) tools: &'a [String],
    /// The simulated usage, without `output_tokens`.
    pub(crate) usage: Map<String, Value>,
    pub(crate) signer: &'a Signer,
}

/// One step of writing a body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// An SSE event.
    Event(Arc<str>, Vec<u8>),
    /// Other bytes.
    Bytes(Vec<u8>),
    /// Silence, with pings if they are given.
    Pause {
        total: Duration,
        ping: Option<(Duration, Vec<u8>)>,
    },
    /// Silence until a gate is released.
    Hold(String),
    /// Silence until the client leaves.
    UntilClosed,
}

/// How a reply is written.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) before_head: Vec<Step>,
    /// No head is written; the connection ends so.
    pub(crate) no_head: Option<CutHow>,
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) framing: Framing,
    pub(crate) content_length: Option<u64>,
    pub(crate) encoding: Vec<Coding>,
    pub(crate) split: Option<usize>,
    pub(crate) gap: Duration,
    pub(crate) steps: Vec<Step>,
    pub(crate) cut_byte: Option<u64>,
    pub(crate) finish: CutHow,
    /// Signatures that the scenario gave, with their texts: to be recognised when they come back.
    pub(crate) issued: Vec<(String, String)>,
}

impl Script {
    /// A JSON answer.
    pub(crate) fn json(status: u16, body: &Value) -> Self {
        Self {
            before_head: Vec::new(),
            no_head: None,
            status,
            headers: vec![("content-type".into(), "application/json".into())],
            framing: Framing::Length,
            content_length: None,
            encoding: Vec::new(),
            split: None,
            gap: Duration::ZERO,
            steps: vec![Step::Bytes(body.to_string().into_bytes())],
            cut_byte: None,
            finish: CutHow::End,
            issued: Vec::new(),
        }
    }

    /// An error in the API's shape.
    pub(crate) fn error(status: u16, kind: &str, message: &str) -> Self {
        Self::json(status, &error_value(kind, message, &Map::new()))
    }

    pub(crate) fn set_header(&mut self, name: &str, value: &str) {
        self.headers
            .retain(|(each, _)| !each.eq_ignore_ascii_case(name));
        self.headers
            .push((name.to_ascii_lowercase(), value.to_owned()));
    }
}

pub(crate) fn error_value(kind: &str, message: &str, extra: &Map<String, Value>) -> Value {
    let mut inner = json!({"type": kind, "message": message});
    for (name, value) in extra {
        inner[name.as_str()] = value.clone();
    }
    json!({"type": "error", "error": inner})
}

/// The error type that the API uses with a status.
pub(crate) fn error_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

fn status_of(kind: &str) -> u16 {
    let known = [401, 402, 403, 404, 413, 429, 504, 529, 400];
    let with = |status: &u16| error_type(*status) == kind;
    known.into_iter().find(with).unwrap_or(500)
}

/// Compiles a reply. `content` must be there unless another source is.
pub(crate) fn compile(reply: &Reply, asked: &Asked<'_>) -> Script {
    let mut script = source(reply, asked);
    script.before_head.insert(0, pause(reply.before_head_ms));
    script.gap = Duration::from_millis(reply.between_events_ms);
    script.encoding.clone_from(&reply.encoding);
    script.split = reply.split_bytes.map(Into::into);
    if let Some(framing) = reply.framing {
        script.framing = framing;
    }
    if reply.content_length.is_some() {
        script.content_length = reply.content_length;
        script.framing = Framing::Length;
    }
    for (name, value) in &reply.headers {
        script.set_header(name, value);
    }
    script
}

fn pause(ms: u64) -> Step {
    Step::Pause {
        total: Duration::from_millis(ms),
        ping: None,
    }
}

fn source(reply: &Reply, asked: &Asked<'_>) -> Script {
    let mut script = Script::json(reply.status, &Value::Null);
    if let Some(body) = &reply.body {
        // The scenario was checked when it was read; a reply built in code with wrong base64 answers an empty body.
        let bytes = match body {
            Body::Text(text) => text.clone().into_bytes(),
            Body::Base64(text) => crate::scenario::decode(text).unwrap_or_default(),
            Body::Json(value) => value.to_string().into_bytes(),
        };
        script.steps = vec![Step::Bytes(bytes)];
        cut_whole(&mut script, reply);
        return script;
    }
    let no_message = reply.content.is_none() && reply.events.is_none();
    if reply.error.is_some() || (reply.status >= 300 && no_message) {
        let fallback = ErrorBody {
            kind: error_type(reply.status).into(),
            message: format!("the script says {}", reply.status),
            extra: Map::new(),
        };
        let error = reply.error.as_ref().unwrap_or(&fallback);
        let body = error_value(&error.kind, &error.message, &error.extra);
        script.steps = vec![Step::Bytes(body.to_string().into_bytes())];
        cut_whole(&mut script, reply);
        return script;
    }
    let mut flow = match &reply.events {
        Some(events) => Flow {
            parts: events.iter().cloned().map(Part::Event).collect(),
            issued: Vec::new(),
        },
        None => message(reply, asked),
    };
    insert(&mut flow.parts, reply);
    script.issued = std::mem::take(&mut flow.issued);
    if asked.stream {
        stream(&mut script, flow.parts, reply);
    } else {
        whole(&mut script, flow.parts, reply);
    }
    script
}

/// An event or an action between events.
enum Part {
    Event(Value),
    Action(Item),
}

struct Flow {
    parts: Vec<Part>,
    issued: Vec<(String, String)>,
}

impl Flow {
    fn event(&mut self, event: Value) {
        self.parts.push(Part::Event(event));
    }

    fn block(&mut self, index: usize, start: &Value, deltas: impl Iterator<Item = Value>) {
        self.event(json!({"type": "content_block_start", "index": index, "content_block": start}));
        for delta in deltas {
            self.event(json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        self.event(json!({"type": "content_block_stop", "index": index}));
    }
}

fn message(reply: &Reply, asked: &Asked<'_>) -> Flow {
    let mut flow = Flow {
        parts: Vec::new(),
        issued: Vec::new(),
    };
    let items = reply.content.as_deref().unwrap_or_default();
    let mut start_usage = asked.usage.clone();
    start_usage.insert("output_tokens".into(), json!(1));
    start_usage.insert("service_tier".into(), json!("standard"));
    lay_over(&mut start_usage, &reply.usage);
    if reply.usage.contains_key("output_tokens") {
        start_usage.insert("output_tokens".into(), json!(1));
    }
    flow.event(json!({"type": "message_start", "message": {
        "id": format!("msg_lab{:08}", asked.number),
        "type": "message",
        "role": "assistant",
        "model": reply.model.as_deref().unwrap_or(asked.model),
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": start_usage,
    }}));
    let (mut index, mut output_bytes, mut calls) = (0, 0, false);
    for item in items {
        if item.is_action() {
            flow.parts.push(Part::Action(item.clone()));
            continue;
        }
        output_bytes += block(&mut flow, index, item, asked);
        calls |= matches!(item, Item::ToolUse { .. });
        index += 1;
    }
    let default = Some(if calls { "tool_use" } else { "end_turn" }.to_owned());
    let mut delta = json!({
        "stop_reason": reply.stop_reason.clone().unwrap_or(default),
        "stop_sequence": reply.stop_sequence,
    });
    if let Some(details) = &reply.stop_details {
        delta["stop_details"] = details.clone();
    }
    let mut usage = asked.usage.clone();
    usage.remove("cache_creation");
    usage.insert(
        "output_tokens".into(),
        json!(super::cache::tokens(output_bytes)),
    );
    lay_over(&mut usage, &reply.usage);
    flow.event(json!({"type": "message_delta", "delta": delta, "usage": usage}));
    flow.event(json!({"type": "message_stop"}));
    flow
}

fn lay_over(usage: &mut Map<String, Value>, with: &Map<String, Value>) {
    for (name, value) in with {
        if value.is_null() {
            usage.remove(name);
        } else {
            usage.insert(name.clone(), value.clone());
        }
    }
}

/// Adds one content block; gives the bytes of its content.
fn block(flow: &mut Flow, index: usize, item: &Item, asked: &Asked<'_>) -> usize {
    let nonce = asked.number << 16 | index as u64;
    match item {
        Item::Text { text, chunk } => {
            let deltas = pieces(text, chunk.map(Into::into));
            flow.block(
                index,
                &json!({"type": "text", "text": ""}),
                deltas.map(|piece| json!({"type": "text_delta", "text": piece})),
            );
            text.len()
        }
        Item::Thinking {
            thinking,
            signature,
            chunk,
        } => {
            let signature = match signature {
                Some(given) => {
                    flow.issued.push((given.clone(), thinking.clone()));
                    given.clone()
                }
                None => asked.signer.thinking(nonce, thinking),
            };
            let deltas = pieces(thinking, chunk.map(Into::into))
                .map(|piece| json!({"type": "thinking_delta", "thinking": piece}));
            let last = json!({"type": "signature_delta", "signature": signature});
            flow.block(
                index,
                &json!({"type": "thinking", "thinking": "", "signature": ""}),
                deltas.chain([last]),
            );
            thinking.len()
        }
        Item::RedactedThinking { data } => {
            let data = match data {
                Some(given) => {
                    flow.issued.push((given.clone(), String::new()));
                    given.clone()
                }
                None => asked.signer.redacted(nonce),
            };
            let start = json!({"type": "redacted_thinking", "data": data});
            flow.block(index, &start, std::iter::empty());
            data.len()
        }
        Item::ToolUse {
            name,
            id,
            input,
            raw,
            chunk,
        } => {
            let id = id
                .clone()
                .unwrap_or_else(|| format!("toolu_lab{:08}_{index}", asked.number));
            let start = json!({"type": "tool_use", "id": id,
                "name": offered(name, asked.tools), "input": {}});
            let pieces: Vec<String> = match raw {
                Some(raw) => raw.clone(),
                None => {
                    let text = input.clone().unwrap_or_else(|| json!({})).to_string();
                    pieces(&text, chunk.map(Into::into))
                        .map(str::to_owned)
                        .collect()
                }
            };
            let bytes = pieces.iter().map(String::len).sum();
            let deltas = pieces
                .into_iter()
                .map(|piece| json!({"type": "input_json_delta", "partial_json": piece}));
            flow.block(index, &start, deltas);
            bytes
        }
        Item::Block { block, deltas } => {
            flow.block(index, block, deltas.iter().cloned());
            block.to_string().len()
        }
        // Actions are no blocks; the caller keeps them apart.
        _ => 0,
    }
}

/// The name under which a tool was offered: as given, with an MCP prefix more, or with the prefix less.
fn offered(name: &str, tools: &[String]) -> String {
    let bare = |tool: &str| -> String {
        let mut parts = tool.splitn(3, "__");
        match (parts.next(), parts.next(), parts.next()) {
            (Some("mcp"), Some(_), Some(rest)) => rest.to_owned(),
            _ => tool.to_owned(),
        }
    };
    if tools.iter().any(|tool| tool == name) {
        return name.to_owned();
    }
    let wanted = bare(name);
    tools
        .iter()
        .find(|tool| bare(tool) == wanted)
        .cloned()
        .unwrap_or_else(|| name.to_owned())
}

/// Cuts a text into pieces of so many characters; an empty text is one empty piece only where a size was given.
fn pieces(text: &str, chars: Option<usize>) -> impl Iterator<Item = &str> {
    let chars = chars
        .unwrap_or_else(|| CHUNK_CHARS.max(text.len().div_ceil(CHUNKS)))
        .max(1);
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest
            .char_indices()
            .nth(chars)
            .map_or(rest.len(), |(at, _)| at);
        let (piece, after) = rest.split_at(end);
        rest = after;
        Some(piece)
    })
}

/// Puts the actions of `at` before their events.
fn insert(parts: &mut Vec<Part>, reply: &Reply) {
    for at in &reply.at {
        let numbered: Vec<usize> = event_places(parts);
        let place = match at.event {
            Position::Number(number) => numbered.get(number).copied(),
            Position::Named(NamedPosition::Start) => numbered.first().copied(),
            Position::Named(NamedPosition::Middle) => numbered.get(numbered.len() / 2).copied(),
            Position::Named(NamedPosition::End) => None,
        };
        parts.insert(
            place.unwrap_or(parts.len()),
            Part::Action(at.action.clone()),
        );
    }
}

fn event_places(parts: &[Part]) -> Vec<usize> {
    let is_event = |(_, part): &(usize, &Part)| matches!(part, Part::Event(_));
    parts
        .iter()
        .enumerate()
        .filter(is_event)
        .map(|(place, _)| place)
        .collect()
}

fn type_of(event: &Value) -> &str {
    event
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("message")
}

/// The body of a streamed message, cut where the reply says.
fn stream(script: &mut Script, mut parts: Vec<Part>, reply: &Reply) {
    script.set_header("content-type", "text/event-stream; charset=utf-8");
    script.set_header("cache-control", "no-cache");
    script.framing = Framing::Chunked;
    if let Some(cut) = reply.cut {
        let last = |kind: &str| {
            parts
                .iter()
                .rposition(|part| matches!(part, Part::Event(event) if type_of(event) == kind))
        };
        let middle = || {
            event_places(&parts)
                .get(event_places(&parts).len() / 2)
                .copied()
        };
        let place = match cut.at {
            CutAt::Byte(byte) => {
                script.cut_byte = Some(byte);
                None
            }
            CutAt::BeforeHead => {
                script.no_head = Some(cut.how);
                Some(0)
            }
            CutAt::Event(number) => event_places(&parts).get(number).copied(),
            CutAt::MidBlock => last("content_block_stop").or_else(middle),
            CutAt::BeforeMessageDelta => last("message_delta"),
            CutAt::BeforeMessageStop => last("message_stop"),
        };
        parts.truncate(place.unwrap_or(parts.len()));
        script.finish = cut.how;
    }
    for part in parts {
        match part {
            Part::Event(event) => script.steps.push(sse(&event, &reply.sse)),
            Part::Action(item) => {
                let ends = matches!(item, Item::Error { .. });
                script.steps.extend(action(&item, &reply.sse));
                if ends {
                    break;
                }
            }
        }
    }
    // The null body that `Script::json` began with.
    script.steps.remove(0);
}

/// The body of a message that was not asked for as a stream: pauses first, then the events folded into one message.
fn whole(script: &mut Script, parts: Vec<Part>, reply: &Reply) {
    let mut message = json!({});
    script.steps.clear();
    let mut raw_inputs: Vec<String> = Vec::new();
    for part in &parts {
        match part {
            Part::Event(event) => fold(&mut message, &mut raw_inputs, event),
            Part::Action(Item::Error { error, message }) => {
                let status = status_of(error);
                let text = message
                    .clone()
                    .unwrap_or_else(|| format!("the script says {error}"));
                let body = error_value(error, &text, &Map::new());
                script.status = status;
                script
                    .steps
                    .push(Step::Bytes(body.to_string().into_bytes()));
                cut_whole(script, reply);
                return;
            }
            Part::Action(
                item @ (Item::Stall { .. } | Item::Hold { .. } | Item::UntilClosed {}),
            ) => {
                let silent = action(item, &reply.sse).into_iter().map(|step| match step {
                    Step::Pause { total, .. } => Step::Pause { total, ping: None },
                    other => other,
                });
                // Nothing of a message that is not streamed can come before all of it is made.
                script.before_head.extend(silent);
            }
            Part::Action(_) => {}
        }
    }
    script
        .steps
        .push(Step::Bytes(message.to_string().into_bytes()));
    cut_whole(script, reply);
}

/// A cut of a body that has no events: at its byte, or in the middle for every place that is named by an event.
fn cut_whole(script: &mut Script, reply: &Reply) {
    let Some(cut) = reply.cut else { return };
    let length: usize = script
        .steps
        .iter()
        .map(|step| match step {
            Step::Bytes(bytes) => bytes.len(),
            _ => 0,
        })
        .sum();
    match cut.at {
        CutAt::BeforeHead => script.no_head = Some(cut.how),
        CutAt::Byte(byte) => script.cut_byte = Some(byte),
        _ => script.cut_byte = Some(length as u64 / 2),
    }
    // A body of a known length that ends early cannot end in order.
    script.finish = match cut.how {
        CutHow::Rst => CutHow::Rst,
        _ => CutHow::Close,
    };
}

fn fold(message: &mut Value, raw: &mut Vec<String>, event: &Value) {
    let index = event["index"].as_u64().unwrap_or(0) as usize;
    match type_of(event) {
        "message_start" => *message = event["message"].clone(),
        "content_block_start" => {
            if let Some(content) = message["content"].as_array_mut() {
                content.push(event["content_block"].clone());
                raw.push(String::new());
            }
        }
        "content_block_delta" => {
            let delta = &event["delta"];
            let add = |field: &mut Value, text: &Value| {
                let joined = format!(
                    "{}{}",
                    field.as_str().unwrap_or_default(),
                    text.as_str().unwrap_or_default()
                );
                *field = Value::String(joined);
            };
            let Some(block) = message["content"].get_mut(index) else {
                return;
            };
            match type_of(delta) {
                "text_delta" => add(&mut block["text"], &delta["text"]),
                "thinking_delta" => add(&mut block["thinking"], &delta["thinking"]),
                "signature_delta" => add(&mut block["signature"], &delta["signature"]),
                "input_json_delta" => {
                    if let (Some(raw), Some(piece)) =
                        (raw.get_mut(index), delta["partial_json"].as_str())
                    {
                        raw.push_str(piece);
                    }
                }
                _ => {}
            }
        }
        "content_block_stop" => {
            if let (Some(text), Some(block)) = (raw.get(index), message["content"].get_mut(index))
                && !text.is_empty()
            {
                // A message that is not streamed has no way to carry an input that is no JSON but as a string.
                block["input"] =
                    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()));
            }
        }
        "message_delta" => {
            for (name, value) in event["delta"].as_object().into_iter().flatten() {
                message[name.as_str()] = value.clone();
            }
            for (name, value) in event["usage"].as_object().into_iter().flatten() {
                message["usage"][name.as_str()] = value.clone();
            }
        }
        _ => {}
    }
}

fn sse(event: &Value, shape: &SseShape) -> Step {
    let name = type_of(event);
    let line = if shape.crlf { "\r\n" } else { "\n" };
    let mut bytes = Vec::with_capacity(160);
    if let Some(comment) = &shape.comment {
        bytes.extend_from_slice(format!(": {comment}{line}{line}").as_bytes());
    }
    if shape.event_names {
        bytes.extend_from_slice(format!("event: {name}{line}").as_bytes());
    }
    bytes.extend_from_slice(b"data: ");
    // Writing a Value into a Vec cannot fail.
    serde_json::to_writer(&mut bytes, event).ok();
    bytes.extend_from_slice(line.as_bytes());
    bytes.extend_from_slice(line.as_bytes());
    Step::Event(name.into(), bytes)
}

fn action(item: &Item, shape: &SseShape) -> Vec<Step> {
    let ping = || sse(&json!({"type": "ping"}), shape);
    let line = if shape.crlf { "\r\n" } else { "\n" };
    match item {
        Item::Ping { count } => (0..*count).map(|_| ping()).collect(),
        Item::Stall { ms, ping_every_ms } => {
            let bytes = match ping() {
                Step::Event(_, bytes) => bytes,
                _ => Vec::new(),
            };
            let every = ping_every_ms.map(|ms| Duration::from_millis(usize::from(ms) as u64));
            vec![Step::Pause {
                total: Duration::from_millis(*ms),
                ping: every.map(|every| (every, bytes)),
            }]
        }
        Item::UntilClosed {} => vec![Step::UntilClosed],
        Item::Hold { gate } => vec![Step::Hold(gate.clone())],
        Item::Comment { text } => {
            vec![Step::Bytes(format!(": {text}{line}{line}").into_bytes())]
        }
        Item::Raw { text } => vec![Step::Bytes(text.clone().into_bytes())],
        Item::Garbage { base64 } => vec![Step::Bytes(
            crate::scenario::decode(base64).unwrap_or_default(),
        )],
        Item::Error { error, message } => {
            let text = message
                .clone()
                .unwrap_or_else(|| format!("the script says {error}"));
            vec![sse(&error_value(error, &text, &Map::new()), shape)]
        }
        _ => Vec::new(),
    }
}
