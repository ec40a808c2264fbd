//! The request that goes upstream: body and headers of the real shape (recordings `relay-2.1.332-*`).

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::models;
use super::state::{Entry, State};

/// The path of every generation.
pub(crate) const MESSAGES_PATH: &str = "/v1/messages?beta=true";

/// Descriptions are cut here unless `CLAUDE_CODE_MAX_MCP_DESCRIPTION_LENGTH` says otherwise: measured.
const DESCRIPTION_CHARS: usize = 4096;

/// The identity line that stands in every request.
const IDENTITY: &str = "You are a Claude agent, built on Anthropic's Claude Agent SDK.";

/// Made up, and says so: the emulator has no account.
pub(crate) const MADE_UP_TOKEN: &str = "sk-ant-oat01-MADE-UP-BY-THE-EMULATOR";

/// The body of the next generation.
pub(crate) fn body(state: &State) -> Value {
    let traits = models::traits(&state.model);
    let cached = || json!({"type": "ephemeral", "ttl": "1h"});
    let mut system = Vec::new();
    if state.env("CLAUDE_CODE_ATTRIBUTION_HEADER").as_deref() != Some("0") {
        system.push(json!({"type": "text", "text": billing_line(state)}));
    }
    system.push(json!({"type": "text", "text": IDENTITY, "cache_control": cached()}));
    if let Some(prompt) = state
        .system_prompt
        .as_deref()
        .filter(|prompt| !prompt.is_empty())
    {
        system.push(json!({"type": "text", "text": prompt, "cache_control": cached()}));
    }
    let effort = state.effort.clone().unwrap_or_else(|| "medium".to_owned());
    let user_id = json!({
        "device_id": state.device_id, "account_uuid": "", "session_id": state.session_id,
    });
    let mut body = json!({
        "model": state.model,
        "messages": messages(state, &effort),
        "system": system,
        "tools": tools(state),
        "metadata": {"user_id": user_id.to_string()},
        "max_tokens": traits.max_tokens,
        "thinking": thinking(state, traits.current),
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    });
    let Some(map) = body.as_object_mut() else {
        return body;
    };
    let extra = state.env("CLAUDE_CODE_EXTRA_BODY");
    let extra = extra.and_then(|text| serde_json::from_str::<Map<String, Value>>(&text).ok());
    map.extend(extra.unwrap_or_default());
    if traits.effort {
        map.entry("output_config")
            .or_insert(json!({"effort": effort}));
    }
    map.insert("stream".to_owned(), json!(true));
    body
}

/// The headers of a generation, in the order of the real CLI.
pub(crate) fn headers(state: &State) -> Vec<(String, String)> {
    let agent = format!("claude-cli/{} (external, sdk-cli)", state.version);
    let mut headers: Vec<(String, String)> = [
        ("accept", "application/json"),
        ("authorization", &format!("Bearer {MADE_UP_TOKEN}")),
        ("content-type", "application/json"),
        ("user-agent", &agent),
        ("x-claude-code-session-id", &state.session_id),
        ("x-stainless-lang", "js"),
        ("x-stainless-retry-count", "0"),
        ("x-stainless-runtime", "node"),
        ("x-stainless-timeout", "600"),
        ("anthropic-beta", BETAS),
        ("anthropic-dangerous-direct-browser-access", "true"),
        ("anthropic-version", "2023-06-01"),
        ("x-app", "cli"),
        ("connection", "keep-alive"),
        ("accept-encoding", "gzip, deflate, br, zstd"),
    ]
    .iter()
    .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
    .collect();
    for line in state
        .env("ANTHROPIC_CUSTOM_HEADERS")
        .unwrap_or_default()
        .lines()
    {
        if let Some((name, value)) = line.split_once(':') {
            headers.push((name.trim().to_lowercase(), value.trim().to_owned()));
        }
    }
    headers
}

/// Measured on 2.1.332 with a loopback base URL.
const BETAS: &str = "claude-code-20250219,oauth-2025-04-20,interleaved-thinking-2025-05-14,\
context-management-2025-06-27,per-turn-control-2026-07-01,mid-conversation-tool-changes-2026-07-01,\
thinking-token-count-2026-05-13,effort-2025-11-24,thinking-display-updates-2026-08-18,\
extended-cache-ttl-2025-04-11";

/// Three hex digits of it depend on the first text block of the first user message, as in the real CLI (2.1.294, 2.1.332).
fn billing_line(state: &State) -> String {
    let first = state
        .history
        .iter()
        .find(|entry| entry.message["role"] == "user");
    let text = first
        .map(|entry| first_text_of(&entry.message["content"]))
        .unwrap_or_default();
    let digest = Sha256::digest(format!("{}{text}", state.version).as_bytes());
    let tag = u16::from_be_bytes([digest[0], digest[1]]) >> 4;
    let version = &state.version;
    format!("x-anthropic-billing-header: cc_version={version}.{tag:03x}; cc_entrypoint=sdk-cli;")
}

fn first_text_of(content: &Value) -> String {
    match content {
        Value::Array(blocks) => {
            let text = blocks.iter().find_map(|block| block["text"].as_str());
            text.unwrap_or_default().to_owned()
        }
        other => text_of(other),
    }
}

/// The text of a content, its blocks joined.
pub(crate) fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks
            .iter()
            .filter_map(|block| block["text"].as_str())
            .collect::<Vec<_>>()
            .join("\n"),
        _ => String::new(),
    }
}

fn thinking(state: &State, current: bool) -> Value {
    if state.is_on("CLAUDE_CODE_DISABLE_THINKING") {
        return json!({"type": "disabled"});
    }
    if !current {
        return json!({"type": "enabled", "budget_tokens": 31_999});
    }
    let display = match state.flags.value("--thinking-display") {
        Some("summarized") => "summarized",
        _ => "updates",
    };
    json!({"type": "adaptive", "display": display})
}

/// The conversation with the CLI's own words in it. After the first user message stands a system
/// message with the effort; the environment stands after the first message that was asked, which is
/// the same one unless frames came before it. The cache breakpoint is on the last message.
fn messages(state: &State, effort: &str) -> Vec<Value> {
    let asked = |entry: &Entry| entry.message["role"] == "user" && !entry.frame;
    let first_asked = state.history.iter().position(asked);
    let split = state.is_on("CLAUDE_CODE_DISABLE_ATTACHMENTS");
    let mut out: Vec<Value> = Vec::new();
    let mut effort_said = false;
    for (index, entry) in state.history.iter().enumerate() {
        match out.last_mut() {
            Some(last) if last["role"] == "user" && entry.message["role"] == "user" => {
                merge(last, &entry.message);
            }
            _ => out.push(entry.message.clone()),
        }
        let next = state
            .history
            .get(index + 1)
            .map(|next| &next.message["role"]);
        if entry.message["role"] != "user" || next == Some(&json!("user")) {
            continue;
        }
        let here = first_asked.is_some_and(|asked| {
            asked <= index
                && state.history[asked..=index]
                    .iter()
                    .all(|entry| entry.message["role"] == "user")
        });
        if !effort_said {
            effort_said = true;
            let content = if here || split {
                json!(environment(state))
            } else {
                json!([])
            };
            out.push(
                json!({"role": "system", "content": content, "output_config": {"effort": effort}}),
            );
            if here {
                continue;
            }
        }
        if here {
            let text = if split {
                "The date is in the environment text.".to_owned()
            } else {
                environment(state)
            };
            out.push(json!({"role": "system", "content": text}));
        }
    }
    if let Some(text) = &state.pending_system {
        out.push(json!({"role": "system", "content": text}));
    }
    if let Some(last) = out.last_mut() {
        mark_last(last);
    }
    out
}

/// Two user messages in a row become one; its texts but the last end in a line feed: measured.
fn merge(into: &mut Value, next: &Value) {
    let blocks = |content: &Value| match content {
        Value::Array(blocks) => blocks.clone(),
        text => vec![json!({"type": "text", "text": text})],
    };
    let mut all = blocks(&into["content"]);
    if let Some(text) = all
        .last()
        .and_then(|block| block["text"].as_str())
        .map(str::to_owned)
        && let Some(last) = all.last_mut()
    {
        last["text"] = json!(format!("{text}\n"));
    }
    all.extend(blocks(&next["content"]));
    into["content"] = json!(all);
}

/// Puts the breakpoint on the last block of a message.
fn mark_last(message: &mut Value) {
    if let Some(text) = message["content"].as_str() {
        message["content"] = json!([{"type": "text", "text": text}]);
    }
    let last = message["content"]
        .as_array_mut()
        .and_then(|blocks| blocks.last_mut());
    if let Some(block) = last.and_then(Value::as_object_mut) {
        block.insert(
            "cache_control".to_owned(),
            json!({"type": "ephemeral", "ttl": "1h"}),
        );
    }
}

/// In our own words, at the place and of about the size of the real text.
fn environment(state: &State) -> String {
    let cwd = std::env::current_dir().unwrap_or_default();
    let repository = cwd.join(".git").exists();
    format!(
        "# Environment\nThe emulated CLI runs here:\n - Primary working directory: {}\n - Is a git repository: {repository}\n - Platform: {}\n - Model: {}\n",
        cwd.display(),
        std::env::consts::OS,
        state.model,
    )
}

fn tools(state: &State) -> Vec<Value> {
    let limit = state.env("CLAUDE_CODE_MAX_MCP_DESCRIPTION_LENGTH");
    let limit = limit
        .and_then(|text| text.parse().ok())
        .unwrap_or(DESCRIPTION_CHARS);
    let mut tools: Vec<Value> = state
        .tools()
        .into_iter()
        .map(|tool| {
            let description = tool.tool["description"].as_str().unwrap_or_default();
            json!({
                "name": tool.name,
                "description": cut(description, limit),
                "input_schema": tool.tool["inputSchema"],
            })
        })
        .collect();
    let deferred = state.env("ENABLE_TOOL_SEARCH").as_deref() == Some("false")
        || state.is_on("CLAUDE_CODE_DISABLE_ATTACHMENTS")
        || state.is_on("CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS");
    if !deferred && !tools.is_empty() {
        let placeholder = json!({
            "name": "DeferredToolPlaceholder", "description": "Placeholder.",
            "input_schema": {"type": "object", "properties": {}}, "defer_loading": true,
        });
        tools.insert(tools.len() - 1, placeholder);
    }
    tools
}

fn cut(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((at, _)) => format!("{}… [truncated]", &text[..at]),
        None => text.to_owned(),
    }
}
