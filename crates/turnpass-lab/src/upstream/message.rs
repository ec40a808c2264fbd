//! The events of a message, and a message of events: pure.

use serde_json::{Map, Value, json};

use super::signature::Signer;
use crate::scenario::{Item, Reply};

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

/// An event or an action between events.
pub(crate) enum Part {
    Event(Value),
    Action(Item),
}

pub(crate) struct Flow {
    pub(crate) parts: Vec<Part>,
    pub(crate) issued: Vec<(String, String)>,
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

pub(crate) fn message(reply: &Reply, asked: &Asked<'_>) -> Flow {
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

pub(crate) fn fold(message: &mut Value, raw: &mut Vec<String>, event: &Value) {
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

pub(crate) fn type_of(event: &Value) -> &str {
    event
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("message")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_of_any_size_join_to_the_text(text in "\\PC{0,80}", chars in prop::option::of(1usize..20)) {
            let cut: Vec<&str> = pieces(&text, chars).collect();
            prop_assert_eq!(cut.concat(), text.as_str());
            prop_assert!(cut.iter().all(|piece| !piece.is_empty()));
            if let Some(chars) = chars {
                prop_assert!(cut.iter().all(|piece| piece.chars().count() <= chars));
            }
        }

        #[test]
        fn a_text_of_unknown_chunk_size_has_a_bounded_number_of_deltas(size in 0usize..200_000) {
            prop_assert!(pieces(&"x".repeat(size), None).count() <= CHUNKS);
        }

        #[test]
        fn folding_the_events_of_a_message_gives_its_blocks(
            texts in prop::collection::vec("\\PC{1,30}", 0..5),
            chunk in 1usize..7,
        ) {
            let signer = Signer::new([3; 32]);
            let asked = Asked {
                number: 1,
                model: "m",
                stream: true,
                tools: &[],
                usage: Map::new(),
                signer: &signer,
            };
            let items = texts.iter().map(|text| Item::Text {
                text: text.clone(),
                chunk: std::num::NonZeroUsize::new(chunk),
            });
            let flow = message(&Reply::content(items), &asked);
            let (mut folded, mut raw) = (json!({}), Vec::new());
            for part in &flow.parts {
                if let Part::Event(event) = part {
                    fold(&mut folded, &mut raw, event);
                }
            }
            let blocks: Vec<&str> = folded["content"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|block| block["text"].as_str())
                .collect();
            prop_assert_eq!(blocks, texts);
            prop_assert_eq!(&folded["stop_reason"], "end_turn");
        }
    }

    #[test]
    fn names_are_matched_with_and_without_a_prefix() {
        let tools = ["mcp__turnpass__read".to_owned(), "write".to_owned()];
        for (name, offer) in [
            ("read", "mcp__turnpass__read"),
            ("mcp__host__read", "mcp__turnpass__read"),
            ("mcp__turnpass__write", "write"),
            ("none", "none"),
            ("mcp__x", "mcp__x"),
        ] {
            assert_eq!(offered(name, &tools), offer, "{name}");
        }
    }
}
