//! Answers to the host's control requests, in the shape of 2.1.332.

use std::rc::Rc;

use serde_json::{Value, json};

use super::emulator::faults::Fault;
use super::emulator::models;
use super::emulator::state::State;
use super::mcp::Server;

/// An answer.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Success(Option<Value>),
    Error(String, Option<&'static str>),
}

impl Answer {
    /// The `control_response` line.
    pub(crate) fn record(self, request_id: &Value) -> Value {
        let response = match self {
            Answer::Success(None) => json!({"subtype": "success", "request_id": request_id}),
            Answer::Success(Some(payload)) => {
                json!({"subtype": "success", "request_id": request_id, "response": payload})
            }
            Answer::Error(error, None) => {
                json!({"subtype": "error", "request_id": request_id, "error": error})
            }
            Answer::Error(error, Some(code)) => {
                json!({"subtype": "error", "request_id": request_id, "error": error, "error_code": code})
            }
        };
        json!({"type": "control_response", "response": response})
    }
}

/// Answers a request that concerns the state alone. `interrupt` is answered as if nothing ran, and
/// `end_session` without ending; the emulator does both by itself.
pub(crate) fn answer(state: &mut State, request: &Value) -> Answer {
    let success = |payload: Value| Answer::Success(Some(payload));
    match request["subtype"].as_str().unwrap_or_default() {
        "initialize" => {
            initialize(state, request);
            success(initialized(state))
        }
        "list_models" => success(json!({"models": models::listed()})),
        "set_model" => {
            let model = set_model(state, request);
            success(json!({"model": model}))
        }
        "apply_flag_settings" => {
            if let Some(settings) = request["settings"].as_object() {
                state.apply_settings(settings);
            }
            Answer::Success(None)
        }
        "set_max_thinking_tokens" | "set_permission_mode" | "mcp_reconnect" | "end_session" => {
            Answer::Success(None)
        }
        "mcp_toggle" => {
            let name = request["serverName"].as_str().unwrap_or_default();
            for server in state.servers.iter().filter(|server| server.name == name) {
                let on = request["enabled"] == true;
                server.status.set(if on { "connected" } else { "disabled" });
            }
            Answer::Success(None)
        }
        "mcp_status" => {
            success(json!({"mcpServers": state.servers.iter().map(status).collect::<Vec<_>>()}))
        }
        "mcp_set_servers" => success(set_servers(state, &request["servers"])),
        "get_usage" => success(usage(state)),
        "get_settings" => success(json!({
            "effective": state.settings, "sources": [],
            "applied": {"model": state.model, "effort": state.effort},
        })),
        "get_binary_version" => success(json!({"version": state.version})),
        "get_session_cost" => success(json!({"text": "Usage: none that costs anything"})),
        "interrupt" => success(json!({"still_queued": []})),
        "rewind_conversation" => rewind(state, request),
        other => {
            let text = format!("Unsupported control request subtype: {other}");
            Answer::Error(text, Some("unsupported_request"))
        }
    }
}

/// Takes what `initialize` sets: prompt, and in-band servers. A second one changes no prompt.
fn initialize(state: &mut State, request: &Value) {
    let parts = request["systemPrompt"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let text: Vec<&str> = parts.iter().filter_map(Value::as_str).collect();
    if !text.is_empty() && state.system_prompt.is_none() {
        state.system_prompt = Some(text.join("\n\n"));
    }
    for name in request["sdkMcpServers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        if state.servers.iter().any(|server| server.name == name) {
            continue;
        }
        let manifest = request["sdkMcpServerManifests"].get(name);
        let server = Server::in_band(name, manifest, state.link.clone());
        state.servers.push(Rc::new(server));
    }
}

fn initialized(state: &State) -> Value {
    json!({
        "commands": [], "agents": [{"name": "claude", "description": "The default."}],
        "output_style": "default", "available_output_styles": ["default"],
        "models": models::listed(),
        "account": {"subscriptionType": "Claude Max", "apiProvider": "firstParty"},
        "pid": std::process::id(), "claude_code_version": state.version,
        "current_permission_mode": state.flags.value("--permission-mode").unwrap_or("default"),
        "fast_mode_state": "off", "fast_mode_disabled_reason": "sdk_opt_in_required",
        "session_state": "idle", "analytics_disabled": true,
        "capabilities": ["ui_surface_v1", "get_usage_detached_v1"],
    })
}

/// Before the first turn a change is clean; later it writes command text into the conversation.
fn set_model(state: &mut State, request: &Value) -> String {
    // Without a model it goes to the CLI's own default, whatever the process was started with.
    let wanted = request["model"].as_str().unwrap_or("default");
    let id = models::resolve(wanted);
    let wanted = wanted.to_owned();
    if let Some(prompt) = request["system_prompt"].as_str() {
        state.system_prompt = Some(prompt.to_owned());
    }
    if state.asked && id != state.model {
        state.pending_text.extend([
            "<local-command-caveat>What follows was a command, not a request.</local-command-caveat>".to_owned(),
            format!("<command-name>/model</command-name> <command-args>{wanted}</command-args>"),
            format!("<local-command-stdout>Set model to `{wanted} ({id})`</local-command-stdout>"),
        ]);
        state.pending_system = Some(format!("You are powered by the model {id}."));
    }
    state.model.clone_from(&id);
    id
}

fn status(server: &Rc<Server>) -> Value {
    let mut row = json!({
        "name": server.name, "status": server.status.get(), "config": server.config,
        "transport": server.config["type"], "scope": server.source, "source": server.source,
    });
    if server.status.get() == "connected" {
        row["serverInfo"] = server.info.borrow().clone();
        row["tools"] = server
            .tools
            .borrow()
            .iter()
            .map(|tool| {
                let read_only =
                    tool.pointer("/annotations/readOnlyHint") == Some(&Value::Bool(true));
                let marks = if read_only {
                    json!({"readOnly": true})
                } else {
                    json!({})
                };
                json!({"name": tool["name"], "annotations": marks})
            })
            .collect();
    }
    row
}

/// In-band and dynamic servers are replaced; those of the command line stay, as measured. In-band ones
/// connect by messages of their own afterwards.
fn set_servers(state: &mut State, servers: &Value) -> Value {
    let empty = serde_json::Map::new();
    let wanted = servers.as_object().unwrap_or(&empty);
    let gone = |server: &Rc<Server>| server.source == "sdk" && !wanted.contains_key(&server.name);
    let removed: Vec<String> = state
        .servers
        .iter()
        .filter(|server| gone(server))
        .map(|server| server.name.clone())
        .collect();
    state.servers.retain(|server| !gone(server));
    let mut added = Vec::new();
    for (name, config) in wanted {
        if state.servers.iter().all(|server| server.name != *name) {
            state
                .servers
                .push(Rc::new(Server::open(name, config, &state.link)));
            added.push(name.clone());
        }
    }
    json!({"added": added, "removed": removed, "errors": {}})
}

/// `rate_limits` of the options; null with the switch that keeps the real CLI from asking.
fn usage(state: &State) -> Value {
    let silent = state.is_on("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC");
    let limits = if silent {
        Value::Null
    } else {
        state.options.rate_limits.clone()
    };
    json!({
        "session": {"total_cost_usd": 0, "total_api_duration_ms": 0, "total_duration_ms": 0, "model_usage": {}},
        "subscription_type": "max", "rate_limits_available": state.options.rate_limits_available,
        "rate_limits": limits, "behaviors": null,
    })
}

/// Removes a user message and everything after it.
/// How the note begins that the CLI leaves where it was interrupted.
pub(crate) const INTERRUPTED: &str = "[Request interrupted by user";

fn rewind(state: &mut State, request: &Value) -> Answer {
    let Some(target) = request["target_message_uuid"].as_str() else {
        let text = "rewind_conversation: target_message_uuid must be a string";
        return Answer::Error(text.to_owned(), None);
    };
    let refuse = |error: &str, reason: &str| {
        Answer::Success(Some(json!({
            "rewound": false, "prefillText": null, "precedingAssistantUuid": null,
            "error": error, "reason": reason,
        })))
    };
    let asked = |entry: &super::emulator::state::Entry| {
        let text = entry.message.pointer("/content/0/text");
        let text = text.and_then(Value::as_str).unwrap_or_default();
        entry.message["role"] == "user"
            && entry.message.pointer("/content/0/tool_use_id").is_none()
            // The CLI's own note does not count as one of the user's (2.1.294 to 2.1.332).
            && !text.starts_with(INTERRUPTED)
            && !state.own.contains(&entry.uuid)
    };
    let at = state
        .history
        .iter()
        .position(|entry| entry.uuid == target && asked(entry));
    let Some(at) = at else {
        return refuse("target not found", "target_not_found");
    };
    let last = state
        .history
        .iter()
        .rev()
        .find(|entry| asked(entry))
        .map(|entry| entry.uuid.clone());
    let seen = request["last_seen_user_message_uuid"].as_str();
    if last.as_deref() != Some(target) && last.as_deref() != seen {
        return refuse("stale target", "stale_target");
    }
    let text = super::emulator::body_text(&state.history[at].message["content"]);
    let before = state.history[..at]
        .iter()
        .rev()
        .find(|entry| entry.message["role"] == "assistant");
    let before = before.map(|entry| entry.uuid.clone());
    let was_interrupted = state.history[at..]
        .iter()
        .any(|entry| super::emulator::body_text(&entry.message["content"]).contains(INTERRUPTED));
    let kept = match was_interrupted {
        true => Fault::KeepsInterrupted,
        false => Fault::KeepsFailed,
    };
    if !state.faults.has(kept) {
        state.history.truncate(at);
    }
    // What a model change has left for the next line goes with it: 2.1.294, 2.1.310, 2.1.332.
    if !state.faults.has(Fault::LeavesCommandText) {
        state.pending_text.clear();
        state.pending_system = None;
    }
    state.save();
    Answer::Success(Some(json!({
        "rewound": true, "targetMessageUuid": target, "prefillText": text,
        "precedingAssistantUuid": before,
    })))
}
