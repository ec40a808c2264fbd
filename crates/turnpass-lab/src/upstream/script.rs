//! From a [`Reply`] to the steps that write it: pure.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::message::{Asked, Flow, Part, fold, message, type_of};
use crate::scenario::{
    Body, Coding, CutAt, CutHow, ErrorBody, Framing, Item, NamedPosition, Position, Reply, SseShape,
};

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
