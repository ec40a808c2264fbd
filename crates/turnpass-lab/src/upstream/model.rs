//! The directive model: what it answers to a request. Pure.
//!
//! It looks at the texts that a user wrote and that tools returned in the current turn, takes the last one that holds
//! directives, and does what they say for the round of tool results that the turn is in. An assistant message without tool
//! calls ends a turn: what was said before it is done. A text that holds JSON lines (a transcript of records, as some
//! clients send a whole history) is looked into: each string in it is a text of its own, those of assistant records are
//! left out, and an assistant record that mentions neither `tool_use` nor `tool_call` ends a turn. Without directives it
//! says what it saw.

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::directive::{self, Directive, How, Place, Program};
use crate::scenario::{
    At, Coding, Cut, CutAt, CutHow, ErrorBody, Item, NamedPosition, Position, Reply,
};

/// A text that may hold directives, or the mark of a round of tool results.
enum Seen {
    Text(String),
    Round,
}

/// What the current turn holds, in order.
#[derive(Default)]
struct Turn {
    seen: Vec<Seen>,
    /// Results of parallel calls may stand in records of their own; those that follow each other are one round.
    in_round: bool,
}

/// The reply to a request, without the shape of its answer.
pub(crate) fn answer(request: &Value) -> Reply {
    let mut turn = Turn::default();
    for message in list(request, "messages") {
        let calls = || list(message, "content").any(|block| block["type"] == "tool_use");
        match message["role"].as_str() {
            Some("user") => turn.user(&message["content"]),
            Some("assistant") if !calls() => turn.seen.clear(),
            _ => {}
        }
    }
    let mut rounds = 0;
    for each in turn.seen.iter().rev() {
        match each {
            Seen::Round => rounds += 1,
            Seen::Text(text) => {
                if let Some(program) = directive::parse(text) {
                    return execute(&program, rounds, request);
                }
            }
        }
    }
    Reply::text(report(request))
}

/// The reply that a text of directives asks for, whatever the request says.
pub(crate) fn answer_directives(text: &str, request: &Value) -> Reply {
    match directive::parse(text) {
        Some(program) => execute(&program, 0, request),
        None => Reply::text(text),
    }
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value
        .get(field)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

impl Turn {
    fn user(&mut self, content: &Value) {
        self.in_round = false;
        if let Value::String(text) = content {
            self.text(text);
            return;
        }
        let blocks = || content.as_array().into_iter().flatten();
        if blocks().any(|block| block["type"] == "tool_result") {
            self.seen.push(Seen::Round);
        }
        for block in blocks() {
            match block["type"].as_str() {
                Some("text") => self.text(block["text"].as_str().unwrap_or_default()),
                Some("tool_result") => self.result(&block["content"]),
                _ => {}
            }
        }
    }

    fn result(&mut self, content: &Value) {
        match content {
            Value::String(text) => self.text(text),
            inner => {
                for block in inner.as_array().into_iter().flatten() {
                    self.text(block["text"].as_str().unwrap_or_default());
                }
            }
        }
    }

    /// Splits a text with JSON lines into the strings of these lines and the rest.
    fn text(&mut self, text: &str) {
        // Reading megabytes of JSON for nothing would delay the answer: only these words can matter.
        let matters = ["[[", "tool", "assistant"];
        if !matters.iter().any(|word| text.contains(word)) {
            return;
        }
        let mut plain = String::new();
        for line in text.split_inclusive('\n') {
            let record = line.trim();
            let json = (record.starts_with('{') && record.ends_with('}'))
                .then(|| serde_json::from_str::<Value>(record).ok())
                .flatten();
            match json {
                None => plain.push_str(line),
                Some(json) => {
                    self.plain(&mut plain);
                    self.record(&json, record);
                }
            }
        }
        self.plain(&mut plain);
    }

    fn plain(&mut self, plain: &mut String) {
        if !plain.trim().is_empty() {
            self.seen.push(Seen::Text(std::mem::take(plain)));
        }
        plain.clear();
    }

    fn record(&mut self, record: &Value, text: &str) {
        let results = has_result(record);
        if results && !self.in_round {
            self.seen.push(Seen::Round);
        }
        self.in_round = results;
        if record["role"] != "assistant" {
            self.strings(record);
        } else if !text.contains("tool_use") && !text.contains("tool_call") {
            self.seen.clear();
        }
    }

    fn strings(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.seen.push(Seen::Text(text.clone())),
            Value::Array(items) => items.iter().for_each(|item| self.strings(item)),
            Value::Object(fields) => fields.values().for_each(|field| self.strings(field)),
            _ => {}
        }
    }
}

fn has_result(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_result),
        Value::Object(fields) => {
            value["type"] == "tool_result"
                || value["role"] == "tool"
                || fields.values().any(has_result)
        }
        _ => false,
    }
}

/// A short text that says what the request holds, the same for the same request.
fn report(request: &Value) -> String {
    let messages = list(request, "messages").count();
    let tools = list(request, "tools").count();
    let last = last_text(request);
    let digest: String = Sha256::digest(last.as_bytes())[..4]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let results = list(request, "messages").last().map_or(0, |message| {
        list(message, "content")
            .filter(|block| block["type"] == "tool_result")
            .count()
    });
    let after = match results {
        0 => String::new(),
        count => format!(", {count} tool results"),
    };
    format!(
        "lab: {messages} messages, {tools} tools{after}, last text {} bytes sha256 {digest}",
        last.len()
    )
}

fn last_text(request: &Value) -> String {
    let messages: Vec<&Value> = list(request, "messages").collect();
    for message in messages.into_iter().rev() {
        if message["role"] != "user" {
            continue;
        }
        if let Some(text) = message["content"].as_str() {
            return text.to_owned();
        }
        let text = list(message, "content")
            .filter(|block| block["type"] == "text")
            .last();
        if let Some(text) = text.and_then(|block| block["text"].as_str()) {
            return text.to_owned();
        }
    }
    String::new()
}

fn execute(program: &Program, round: usize, request: &Value) -> Reply {
    let rounds = program.rounds();
    match rounds.get(round) {
        Some(directives) => follow(directives, request),
        None => Reply::text(report(request)),
    }
}

fn follow(directives: &[Directive], request: &Value) -> Reply {
    let mut reply = Reply::default();
    let mut items = Vec::new();
    let mut empty = false;
    let mut chunk = None;
    for directive in directives {
        match directive {
            Directive::Empty => empty = true,
            Directive::Chunk { chars, gap_ms } => {
                chunk = std::num::NonZeroUsize::new(*chars);
                reply.between_events_ms = *gap_ms;
            }
            other => match item(other) {
                Some(item) => items.push(item),
                None => shape(&mut reply, other),
            },
        }
    }
    for item in &mut items {
        if let Item::Text { chunk: each, .. }
        | Item::Thinking { chunk: each, .. }
        | Item::ToolUse { chunk: each, .. } = item
        {
            *each = chunk;
        }
    }
    let has_block = items.iter().any(|item| !item.is_action());
    if !has_block && !empty {
        // After the actions, so that `[[stall 100]]` alone stalls before the text.
        let mut text = Item::text(report(request));
        if let Item::Text { chunk: each, .. } = &mut text {
            *each = chunk;
        }
        items.push(text);
    }
    if reply.error.is_none() {
        reply.content = Some(items);
    }
    reply
}

/// The block or action of a directive that stands at a place in the message.
fn item(directive: &Directive) -> Option<Item> {
    Some(match directive {
        Directive::Say(text) => Item::text(text),
        Directive::TextSize(size) => Item::text(text_of(*size)),
        Directive::Think(text) => Item::thinking(text),
        Directive::Redacted => Item::RedactedThinking { data: None },
        Directive::Call { name, input } => Item::tool_use(name, input.clone()),
        Directive::RawCall { name, raw } => Item::ToolUse {
            name: name.clone(),
            id: None,
            input: None,
            raw: Some(halves(raw)),
            chunk: None,
        },
        Directive::Block(block) => Item::Block {
            block: block.clone(),
            deltas: Vec::new(),
        },
        Directive::StallMs(ms) => Item::Stall {
            ms: *ms,
            ping_every_ms: None,
        },
        Directive::StallUntilClosed => Item::UntilClosed {},
        Directive::Hold(gate) => Item::Hold { gate: gate.clone() },
        Directive::Ping(count) => Item::Ping { count: *count },
        Directive::Invalid { word, problem } => Item::text(format!("lab: [[{word}]] {problem}")),
        _ => return None,
    })
}

/// What a directive says about the reply as a whole.
fn shape(reply: &mut Reply, directive: &Directive) {
    match directive {
        Directive::Stop(reason) => reply.stop_reason = Some(reason.clone()),
        Directive::StopDetails(details) => reply.stop_details = Some(details.clone()),
        Directive::Usage(Value::Object(usage)) => reply.usage.clone_from(usage),
        Directive::Status { status, headers } => {
            reply.status = *status;
            reply.headers.extend(headers.iter().cloned());
            if *status >= 300 {
                reply.error = Some(ErrorBody {
                    kind: super::script::error_type(*status).into(),
                    message: format!("the directive says {status}"),
                    extra: Map::new(),
                });
            }
        }
        Directive::Error { kind, mid } => reply.at.push(At {
            event: Position::Named(match mid {
                true => NamedPosition::Middle,
                false => NamedPosition::Start,
            }),
            action: Item::Error {
                error: kind.clone(),
                message: None,
            },
        }),
        Directive::DelayMs(ms) => reply.before_head_ms = *ms,
        Directive::Cut { place, how } => {
            reply.cut = Some(Cut {
                at: match place {
                    Place::BeforeHead => CutAt::BeforeHead,
                    Place::MidBlock => CutAt::MidBlock,
                    Place::AfterBlock => CutAt::BeforeMessageDelta,
                    Place::BeforeStop => CutAt::BeforeMessageStop,
                },
                how: match how {
                    How::End => CutHow::End,
                    How::Close => CutHow::Close,
                    How::Rst => CutHow::Rst,
                },
            });
        }
        Directive::Encode(codings) => {
            reply.encoding = codings
                .iter()
                .filter_map(|name| Coding::from_name(name))
                .collect();
        }
        _ => {}
    }
}

/// A text of exactly so many bytes, always the same.
fn text_of(size: usize) -> String {
    const WORDS: &str = "abcdefgh ijklmnop qrstuvwx yz012345 ";
    WORDS.chars().cycle().take(size).collect()
}

/// Two pieces, so that no client can take a raw input for one delta.
fn halves(text: &str) -> Vec<String> {
    let mut middle = text.len() / 2;
    while !text.is_char_boundary(middle) {
        middle += 1;
    }
    let (first, second) = text.split_at(middle);
    let pieces = [first, second]
        .into_iter()
        .filter(|piece| !piece.is_empty());
    pieces.map(str::to_owned).collect()
}
