//! Whether the service got exactly the host's history: the one question that every trial ends with.

use serde_json::{Map, Value, json};
use turnpass::conversation::{
    Block, Image, Message, NormaliseOptions, ResultBlock, Role, Source, normalise,
};
use turnpass_lab::upstream::Recorded;

/// What the CLI puts before the names of the host's tools.
const PREFIX: &str = "mcp__turnpass__";

/// Beginnings of what the CLI may say in system messages of its own: its environment, and nothing of the conversation.
const ENVIRONMENT: [&str; 3] = ["# Environment", "You are powered by", "<system-reminder>"];

/// The host's history, and nothing else, stands in this request; and it broke no rule of the API.
///
/// Left out: the order of results within one message (a failed one is quicker through the CLI), cache marks, system messages and reminder blocks with the CLI's own environment, and what it writes beside
/// an image (the path of a copy, and a line end before it).
#[track_caller]
pub(crate) fn upstream_holds(history: &[Message], request: &Recorded) {
    if let Err(problem) = compare(history, request) {
        panic!("request {}: {problem}", request.number);
    }
}

/// The same as a result.
pub(crate) fn compare(history: &[Message], request: &Recorded) -> Result<(), String> {
    if !request.violations.is_empty() {
        return Err(format!("{:?}", request.violations));
    }
    let wanted = host(history);
    let got = sent(request)?;
    for (at, (wanted, got)) in wanted.iter().zip(&got).enumerate() {
        if wanted != got {
            return Err(format!(
                "message {at}:\n  the host has {}\n  the service got {}",
                short(wanted),
                short(got)
            ));
        }
    }
    if wanted.len() != got.len() {
        let more = got.get(wanted.len()).or(wanted.get(got.len()));
        return Err(format!(
            "the host has {} messages, the service got {}; the first that is too much: {}",
            wanted.len(),
            got.len(),
            more.map(short).unwrap_or_default()
        ));
    }
    Ok(())
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(1_500) {
        Some((at, _)) => format!("{}... ({} bytes)", &text[..at], text.len()),
        None => text,
    }
}

/// The messages that reached the service, without what is the CLI's own.
pub(crate) fn sent(request: &Recorded) -> Result<Vec<Value>, String> {
    let messages = request.field("/messages").and_then(Value::as_array);
    let mut kept = Vec::new();
    for message in messages.into_iter().flatten() {
        let mut blocks = blocks_of(&message["content"]);
        if message["role"] == "system" {
            for block in &blocks {
                let text = block["text"].as_str().unwrap_or_default();
                let is_environment = ENVIRONMENT.iter().any(|start| text.starts_with(start));
                if !text.is_empty() && !is_environment {
                    return Err(format!("a system message of the CLI: {}", short(block)));
                }
            }
            continue;
        }
        clean(&mut blocks);
        in_order(&mut blocks);
        kept.push(json!({"role": message["role"], "content": blocks}));
    }
    Ok(kept)
}

fn blocks_of(content: &Value) -> Vec<Value> {
    match content {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        Value::Array(blocks) => blocks.clone(),
        _ => Vec::new(),
    }
}

/// Puts the results at the beginning of a message into the order of their ids.
fn in_order(blocks: &mut [Value]) {
    let results = blocks
        .iter()
        .take_while(|block| block["type"] == "tool_result")
        .count();
    blocks[..results].sort_by_key(|block| block["tool_use_id"].to_string());
}

fn clean(blocks: &mut Vec<Value>) {
    let note = |block: &Value| {
        let text = block["text"].as_str().unwrap_or_default();
        text.starts_with("[Image: source:")
    };
    let has_note = blocks.iter().any(note);
    blocks.retain(|block| {
        let text = block["text"].as_str().unwrap_or_default();
        !text.starts_with("<system-reminder>") && !note(block)
    });
    if has_note {
        // A line end is put to the last text before the note.
        let last = blocks
            .iter_mut()
            .rev()
            .find(|block| block["type"] == "text");
        if let Some(Value::String(text)) = last.and_then(|block| block.get_mut("text")) {
            text.truncate(text.trim_end_matches('\n').len());
        }
    }
    for block in blocks {
        let Some(fields) = block.as_object_mut() else {
            continue;
        };
        fields.remove("cache_control");
        if fields.get("type") == Some(&json!("tool_result")) {
            let mut content = blocks_of(&fields["content"]);
            clean(&mut content);
            fields.insert("content".into(), Value::Array(content));
            if fields.get("is_error") == Some(&json!(false)) {
                fields.remove("is_error");
            }
        }
        if fields.get("type") == Some(&json!("tool_use")) {
            fields.remove("caller");
        }
    }
}

/// The host's history in the same form. An answer of thinking alone is never sent again: the CLI leaves it out
/// (2.1.294, 2.1.310, 2.1.332), so the pool does.
pub(crate) fn host(history: &[Message]) -> Vec<Value> {
    let thought = |block: &Block| matches!(block, Block::Thinking(_) | Block::RedactedThinking(_));
    let is_said = |message: &&Message| {
        message.role != Role::Assistant || !message.content.iter().all(thought)
    };
    let history: Vec<_> = history.iter().filter(is_said).cloned().collect();
    let normalised = normalise(&history, &NormaliseOptions::default()).unwrap();
    let message = |message: &turnpass::conversation::normalise::Sendable<'_>| {
        let role = match message.role {
            Role::Assistant => "assistant",
            Role::User | Role::System => "user",
        };
        let blocks = message.content.iter().map(|block| block_of(block));
        let mut content: Vec<_> = blocks.collect();
        in_order(&mut content);
        json!({"role": role, "content": content})
    };
    normalised.messages.iter().map(message).collect()
}

fn block_of(block: &Block) -> Value {
    match block {
        Block::Text { text } => json!({"type": "text", "text": text}),
        Block::Image(image) => image_of(image),
        Block::Document(_) => json!({"type": "document"}),
        Block::ToolUse(call) => {
            let input: Value = serde_json::from_str(call.input.as_str()).unwrap();
            let name = format!("{PREFIX}{}", call.name);
            json!({"type": "tool_use", "id": call.id, "name": name, "input": input})
        }
        Block::ToolResult(result) => {
            let content: Vec<_> = result.content.iter().map(result_block).collect();
            let mut fields = Map::new();
            fields.insert("type".into(), json!("tool_result"));
            fields.insert("tool_use_id".into(), json!(result.id));
            fields.insert("content".into(), Value::Array(content));
            if result.is_error {
                fields.insert("is_error".into(), json!(true));
            }
            Value::Object(fields)
        }
        Block::Thinking(thinking) => json!({
            "type": "thinking", "thinking": thinking.thinking, "signature": thinking.signature,
        }),
        Block::RedactedThinking(redacted) => {
            json!({"type": "redacted_thinking", "data": redacted.data})
        }
    }
}

fn result_block(block: &ResultBlock) -> Value {
    match block {
        ResultBlock::Text { text } => json!({"type": "text", "text": text}),
        ResultBlock::Image(image) => image_of(image),
        ResultBlock::Document(_) => json!({"type": "document"}),
    }
}

fn image_of(image: &Image) -> Value {
    match &image.source {
        Source::Base64 { media_type, data } => json!({
            "type": "image", "source": {"type": "base64", "media_type": media_type, "data": data},
        }),
        other => json!({"type": "image", "source": other}),
    }
}
