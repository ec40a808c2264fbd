//! Makes a recording fit to share. Pure.
//!
//! The rule is the other way round from a search for secrets: nothing stays but what is known to be harmless. A string
//! stays only under a key of the protocol's own vocabulary and only if it has the shape of a word of it; an id becomes
//! another one, the same everywhere; everything else becomes as many `x`, at most [`REDACTED_CHARS`]. Text that comes in
//! pieces is masked piece by piece, so that the pieces still add up to the whole that the CLI repeats.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::rows::Row;
use crate::wire::surrogates;

/// Characters that are left of a text: enough to see that it is one, and in how many pieces it came.
pub const REDACTED_CHARS: usize = 200;

/// Longest word of the vocabulary, in bytes.
const WORD_BYTES: usize = 64;
/// Longest name of a field, in bytes.
const FIELD_BYTES: usize = 48;
/// Digits in the name of a field: `cache_creation_5m_input_tokens` has one, an id has many.
const FIELD_DIGITS: usize = 3;
/// Letters and digits in a row, with a digit among them, from which on a word looks like an id or a token. The date in the
/// name of a model has eight.
const RUN_BYTES: usize = 12;
/// Largest number that stays under the name of an id; JSON-RPC counts its messages with small ones.
const SMALL_ID: u64 = 9_999;
/// Smallest number that stays only under the name of a time: counts of tokens, bytes and milliseconds are smaller, the
/// numbers of accounts and telephones are not.
const LARGE_NUMBER: f64 = 1e9;

/// Keys whose values are words of the protocol.
const VOCABULARY: &[&str] = &[
    "agents",
    "apiKeySource",
    "api_error",
    "api_error_type",
    "behavior",
    "capabilities",
    "claude_code_version",
    "decision_reason_type",
    "error",
    "fast_mode_disabled_reason",
    "fast_mode_state",
    "inference_geo",
    "jsonrpc",
    "kind",
    "level",
    "mcp_servers",
    "method",
    "mode",
    "model",
    "name",
    "output_style",
    "overageDisabledReason",
    "overageStatus",
    "permissionMode",
    "plugins",
    "protocolVersion",
    "rateLimitType",
    "reason",
    "role",
    "sdkMcpServers",
    "server_name",
    "service_tier",
    "skills",
    "slash_commands",
    "source",
    "speed",
    "state",
    "status",
    "stop_reason",
    "subtype",
    "terminal_reason",
    "tool_name",
    "tools",
    "type",
    "version",
];

/// Keys below which everything is the host's, the model's or the person's: not even names of fields stay.
const FREE: &[&str] = &[
    "account",
    "arguments",
    "env",
    "input",
    "inputSchema",
    "input_schema",
    "metadata",
    "organization",
    "structuredContent",
    "structured_content",
    "structured_output",
    "tool_use_result",
    "author",
    "owner",
    "person",
    "team",
    "user_info",
    "userInfo",
    "workspace",
];

/// What ids of the service begin with.
const ID_PREFIXES: &[&str] = &["msg", "toolu", "srvtoolu", "req", "org", "user", "sess"];

/// A recording that was made fit to share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redacted {
    /// The lines that are left, in the form they came in.
    pub bytes: Vec<u8>,
    /// How many these are.
    pub kept: u64,
    /// Lines that were left out: no records, rows that are neither input nor output, pieces beyond the bound.
    pub dropped: u64,
}

/// Redacts a recording of either form that [`Replay`](super::Replay) reads.
///
/// What is left decodes as before: the same records in the same order, but for the pieces of long texts.
pub fn redact(recording: &[u8]) -> Redacted {
    let repaired = surrogates::repair(recording);
    let mut redactor = Redactor::default();
    for line in repaired.split(|byte| *byte == b'\n') {
        if let Some((_, value)) = read(line) {
            redactor.gather(&value);
        }
    }
    redactor.messages.clear();
    let mut redacted = Redacted::default();
    for line in repaired.split(|byte| *byte == b'\n') {
        if line.trim_ascii().is_empty() {
            continue;
        }
        match read(line).and_then(|(row, value)| Some((row, redactor.record(value)?))) {
            Some((row, value)) => {
                let line = match row {
                    Some((at_ms, direction)) => {
                        serde_json::json!({"t": at_ms, "dir": direction, "v": value})
                    }
                    None => value,
                };
                redacted.kept += 1;
                redacted
                    .bytes
                    .extend_from_slice(line.to_string().as_bytes());
                redacted.bytes.push(b'\n');
            }
            None => redacted.dropped += 1,
        }
    }
    redacted
}

/// A line's record, and the milliseconds and the direction if it is a row; nothing for what is not shared.
fn read(line: &[u8]) -> Option<(Option<(f64, &'static str)>, Value)> {
    let (row, value) = match Row::read(line) {
        Row::Bare(line) => (None, serde_json::from_slice(line).ok()?),
        Row::Timed {
            at_ms,
            direction,
            value,
        } => {
            let direction = ["in", "out"]
                .into_iter()
                .find(|known| direction == *known)?;
            let value = serde_json::from_str(value.get()).ok()?;
            (Some((at_ms, direction)), value)
        }
    };
    let value: Value = value;
    value.get("type")?.as_str()?;
    Some((row, value))
}

/// A block of a streamed message: whose sub-agent, which message, which block.
type BlockKey = (String, u64, u64);

#[derive(Default)]
struct Redactor {
    names: BTreeMap<String, String>,
    counts: BTreeMap<&'static str, u64>,
    /// Messages that began, for each sub-agent.
    messages: BTreeMap<String, u64>,
    /// The pieces of each tool input, put together; taken by the first piece.
    inputs: BTreeMap<BlockKey, String>,
    /// Characters of a block's text that are left.
    budgets: BTreeMap<BlockKey, usize>,
}

impl Redactor {
    /// The first pass: puts the pieces of tool inputs together, since a piece alone is no JSON.
    fn gather(&mut self, record: &Value) {
        let Some(key) = self.block_of(record) else {
            return;
        };
        if let Some(piece) = record["event"]["delta"]["partial_json"].as_str() {
            self.inputs.entry(key).or_default().push_str(piece);
        }
    }

    /// Which block a `stream_event` is about; counts messages on the way.
    fn block_of(&mut self, record: &Value) -> Option<BlockKey> {
        if record["type"] != "stream_event" {
            return None;
        }
        let parent = record["parent_tool_use_id"].as_str().unwrap_or_default();
        let message = self.messages.entry(parent.to_owned()).or_default();
        if record["event"]["type"] == "message_start" {
            *message += 1;
        }
        let index = record["event"]["index"].as_u64()?;
        Some((parent.to_owned(), *message, index))
    }

    fn record(&mut self, mut record: Value) -> Option<Value> {
        let delta = self.block_of(&record).and_then(|key| {
            let delta = record.get_mut("event")?.get_mut("delta")?.as_object_mut()?;
            Some((key, std::mem::take(delta)))
        });
        let delta = match delta {
            Some((key, delta)) => Some(self.delta(key, delta)?),
            None => None,
        };
        let mut redacted = self.value("", record);
        if let (Some(delta), Some(place)) = (delta, redacted.pointer_mut("/event/delta")) {
            *place = Value::Object(delta);
        }
        Some(redacted)
    }

    /// A piece of a block; nothing when the block has had its share.
    fn delta(&mut self, key: BlockKey, delta: Map<String, Value>) -> Option<Map<String, Value>> {
        let mut redacted = Map::new();
        for (name, value) in delta {
            let value = match (name.as_str(), value) {
                ("partial_json", Value::String(_)) => {
                    Value::String(self.whole_input(self.inputs.get(&key).cloned()?.as_str()))
                }
                ("text" | "thinking" | "signature", Value::String(piece)) => {
                    let budget = self.budgets.entry(key.clone()).or_insert(REDACTED_CHARS);
                    if *budget == 0 && !piece.is_empty() {
                        return None;
                    }
                    let chars = piece.chars().count().min(*budget);
                    *budget -= chars;
                    Value::String("x".repeat(chars))
                }
                (_, value) => self.value(&name, value),
            };
            redacted.insert(self.field("", &name), value);
        }
        self.inputs.remove(&key);
        Some(redacted)
    }

    /// A tool input as its first piece carries it: the whole.
    fn whole_input(&mut self, json: &str) -> String {
        match serde_json::from_str(json) {
            Ok(input) => self.free(input).to_string(),
            // What did not parse before is not to parse now.
            Err(_) => masked(json),
        }
    }

    fn value(&mut self, key: &str, value: Value) -> Value {
        match value {
            value if FREE.contains(&key) => self.free(value),
            Value::Object(map) => {
                let fields = map.into_iter().map(|(name, value)| {
                    let value = self.value(&name, value);
                    (self.field(key, &name), value)
                });
                Value::Object(fields.collect())
            }
            Value::Array(list) => {
                let list = list.into_iter().map(|value| self.value(key, value));
                Value::Array(list.collect())
            }
            Value::String(text) => Value::String(self.string(key, &text)),
            Value::Number(number) if is_telling(key, &number) => Value::from(0),
            other => other,
        }
    }

    /// What is not the protocol's: not even names of fields or numbers stay.
    fn free(&mut self, value: Value) -> Value {
        match value {
            Value::Object(map) => {
                let fields = map.into_iter().map(|(name, value)| {
                    let value = self.free(value);
                    (self.named("field", &name), value)
                });
                Value::Object(fields.collect())
            }
            Value::Array(list) => list.into_iter().map(|value| self.free(value)).collect(),
            Value::String(text) => Value::String(self.text(&text)),
            Value::Number(_) => Value::from(0),
            other => other,
        }
    }

    /// The name of a field: an identifier stays, everything else gets a number.
    fn field(&mut self, parent: &str, name: &str) -> String {
        let identifier = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let digits = name.bytes().filter(u8::is_ascii_digit).count();
        let plain = !name.is_empty()
            && name.len() <= FIELD_BYTES
            && digits <= FIELD_DIGITS
            && !is_service_id(name)
            && name.chars().all(identifier);
        match plain || (parent == "modelUsage" && is_word(name)) {
            true => name.to_owned(),
            false => self.named("field", name),
        }
    }

    fn string(&mut self, key: &str, text: &str) -> String {
        if text.is_empty() || (VOCABULARY.contains(&key) && is_word(text)) {
            return text.to_owned();
        }
        if is_id_field(key) && !is_uuid(text) {
            let prefix = id_prefix(text).unwrap_or("id");
            return self.named(prefix, text);
        }
        self.text(text)
    }

    /// A string whose key says nothing: by its shape.
    fn text(&mut self, text: &str) -> String {
        if is_uuid(text) {
            return self.named("uuid", text);
        }
        if let Some(prefix) = id_prefix(text).filter(|_| is_service_id(text)) {
            return self.named(prefix, text);
        }
        let one_word = text.len() <= FIELD_BYTES * 8 && !text.contains(char::is_whitespace);
        match one_word {
            true if text.contains('@') => self.named("mail", text),
            true if text.starts_with(['/', '~']) => self.named("path", text),
            true if is_time(text) => "2026-01-01T00:00:00.000Z".to_owned(),
            _ => masked(text),
        }
    }

    /// Another name for this one, the same wherever it stands.
    fn named(&mut self, class: &'static str, name: &str) -> String {
        let known = format!("{class} {name}");
        if let Some(named) = self.names.get(&known) {
            return named.clone();
        }
        let count = self.counts.entry(class).or_default();
        *count += 1;
        let named = match class {
            "uuid" => format!("00000000-0000-4000-8000-{count:012}"),
            "mail" => format!("person-{count}@example.com"),
            "path" => format!("/redacted/path-{count}"),
            "field" => format!("field_{count}"),
            class => format!("{class}_{count:04}"),
        };
        self.names.insert(known, named.clone());
        named
    }
}

/// As many `x`, at most [`REDACTED_CHARS`].
fn masked(text: &str) -> String {
    "x".repeat(text.chars().count().min(REDACTED_CHARS))
}

fn is_id_field(key: &str) -> bool {
    let ends = [
        "_id",
        "Id",
        "ID",
        "uuid",
        "Uuid",
        "uuids",
        "_ids",
        "fingerprint",
    ];
    key == "id" || ends.iter().any(|end| key.ends_with(end))
}

/// Whether a number can say whose it is.
fn is_telling(key: &str, number: &serde_json::Number) -> bool {
    let is_large = number
        .as_f64()
        .is_none_or(|number| number.abs() >= LARGE_NUMBER);
    let times = [
        "_at",
        "At",
        "reset",
        "timestamp",
        "_time",
        "Time",
        "_ms",
        "Ms",
    ];
    let is_time = times.iter().any(|end| key.ends_with(end));
    let small = number.as_u64().is_some_and(|number| number <= SMALL_ID);
    (is_id_field(key) && !small) || (is_large && !is_time)
}

/// What an id begins with, if that is known.
fn id_prefix(text: &str) -> Option<&'static str> {
    let (prefix, _) = text.split_once('_')?;
    ID_PREFIXES.iter().find(|known| **known == prefix).copied()
}

/// Whether this has the shape of an id of the service wherever it stands: a known beginning, and letters with digits.
fn is_service_id(text: &str) -> bool {
    let rest = text.split_once('_').map_or("", |(_, rest)| rest);
    id_prefix(text).is_some()
        && rest.bytes().all(|b| b.is_ascii_alphanumeric())
        && rest
            .bytes()
            .any(|b| b.is_ascii_digit() || b.is_ascii_uppercase())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_uuid(text: &str) -> bool {
    let mut groups = text.split('-');
    let fits = [8, 4, 4, 4, 12].into_iter().all(|length| {
        let group = groups.next().unwrap_or_default();
        group.len() == length && group.bytes().all(|b| b.is_ascii_hexdigit())
    });
    fits && groups.next().is_none()
}

fn is_time(text: &str) -> bool {
    let shape: String = text.chars().take(11).collect();
    let digits = |c: char| if c.is_ascii_digit() { '0' } else { c };
    shape.chars().map(digits).eq("0000-00-00T".chars())
}

/// A word of the protocol: letters, digits and a few marks, and nothing that looks like an id, a token or an address.
fn is_word(text: &str) -> bool {
    let stem = text.trim_end_matches("[1m]").trim_end_matches("@builtin");
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    let looks_random = stem
        .split(|c: char| !c.is_ascii_alphanumeric())
        .any(|run| run.len() >= RUN_BYTES && run.bytes().any(|b| b.is_ascii_digit()));
    // A point stands within a version; after a letter it stands within the name of a machine or a file.
    let is_address = stem.as_bytes()
            .windows(2)
            .any(|two| two[1] == b'.' && !two[0].is_ascii_digit())
            || stem.rsplit('.').next().is_some_and(|end| {
                end.len() < stem.len() && !end.bytes().all(|b| b.is_ascii_digit())
            })
            // Of a machine in a network; a version has three numbers.
            || stem.split('.').filter(|part| is_number(part)).count() > 3
            || stem.matches(':').count() > 3;
    let begins_like_a_token = ["sk-", "pk-", "ey", "gh", "xox", "AKIA"]
        .iter()
        .any(|begin| stem.starts_with(begin));
    stem.len() <= WORD_BYTES
        && stem.chars().all(plain)
        && !is_uuid(stem)
        && !looks_random
        && !is_address
        && !begins_like_a_token
}

#[cfg(test)]
#[path = "redact_tests.rs"]
mod tests;
