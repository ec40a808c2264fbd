//! The records that the CLI writes around a stream, in the shape of 2.1.332.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::models;
use super::state::{State, fresh_uuid};

/// A `system/init` record.
pub(crate) fn init(state: &State) -> Value {
    let tools: Vec<String> = state.tools().into_iter().map(|tool| tool.name).collect();
    let servers: Vec<Value> = state
        .servers
        .iter()
        .map(|server| {
            json!({"name": server.name, "status": server.status.get(), "source": server.source})
        })
        .collect();
    let cwd = std::env::current_dir().unwrap_or_default();
    let loopback = std::env::var_os("ANTHROPIC_BASE_URL").is_some();
    let key = std::env::var_os("ANTHROPIC_API_KEY").map_or("none", |_| "ANTHROPIC_API_KEY");
    json!({
        "type": "system", "subtype": "init", "cwd": cwd, "session_id": state.session_id,
        "tools": tools, "mcp_servers": servers, "model": state.model,
        "permissionMode": state.flags.value("--permission-mode").unwrap_or("default"),
        "slash_commands": [], "apiKeySource": key, "claude_code_version": state.version,
        "output_style": "default",
        "agents": ["claude", "Explore", "general-purpose", "Plan", "statusline-setup"],
        "skills": [], "plugins": plugins(state),
        "capabilities": ["interrupt_receipt_v1", "interrupt_cancel_queued_v1", "msg_lifecycle_v1",
            "sdk_mcp_tools_list_changed", "sdk_mcp_manifests", "get_usage_detached_v1"],
        "analytics_disabled": true, "product_feedback_disabled": true,
        "served_by_anthropic": !loopback, "uuid": fresh_uuid(), "sandbox_enabled": false,
        "original_cwd": cwd, "additional_directories": [], "fast_mode_state": "off",
        "fast_mode_disabled_reason": "sdk_opt_in_required", "per_turn_effort_active": true,
        "ultrathink_available": false, "ultrathink_typed_raises": false, "view_mode": "default",
    })
}

/// The built-in plugins load in spite of `--setting-sources=` unless they are switched off by name.
fn plugins(state: &State) -> Vec<Value> {
    let switches = state
        .settings
        .get("enabledPlugins")
        .cloned()
        .unwrap_or_default();
    let mut names: Vec<String> = ["agents-md", "privacy", "plugin-authoring"]
        .iter()
        .map(|name| format!("cc-plugin-{name}"))
        .collect();
    names.extend(state.options.plugins.iter().cloned());
    names.retain(|name| switches[format!("{name}@builtin")] != json!(false));
    names
        .into_iter()
        .map(|name| json!({"source": format!("{name}@builtin"), "path": "builtin", "name": name}))
        .collect()
}

pub(crate) fn status(state: &State, uuid: Option<&str>) -> Value {
    let mut record = json!({
        "type": "system", "subtype": "status", "status": "requesting",
        "session_id": state.session_id, "uuid": fresh_uuid(),
    });
    add_user_uuid(&mut record, uuid);
    record
}

/// Records of a turn name the uuid of the host's line when it had one.
fn add_user_uuid(record: &mut Value, uuid: Option<&str>) {
    if let (Some(map), Some(uuid)) = (record.as_object_mut(), uuid) {
        map.insert("user_message_uuids".to_owned(), json!([uuid]));
    }
}

pub(crate) fn lifecycle(state: &State, uuid: &str, what: &str) -> Value {
    json!({
        "type": "command_lifecycle", "command_uuid": uuid, "state": what,
        "uuid": fresh_uuid(), "session_id": state.session_id,
    })
}

pub(crate) fn api_retry(
    state: &State,
    attempt: u64,
    max: u64,
    delay_ms: u64,
    status: Value,
    error: &str,
) -> Value {
    json!({
        "type": "system", "subtype": "api_retry", "attempt": attempt, "max_retries": max,
        "retry_delay_ms": delay_ms, "error_status": status, "error": error,
        "session_id": state.session_id, "uuid": fresh_uuid(),
    })
}

pub(crate) fn user(state: &State, content: Value, more: Value) -> Value {
    let mut record = json!({
        "type": "user", "message": {"role": "user", "content": content}, "parent_tool_use_id": null,
        "session_id": state.session_id, "uuid": fresh_uuid(), "timestamp": timestamp(),
    });
    if let (Some(map), Value::Object(more)) = (record.as_object_mut(), more) {
        map.extend(more);
    }
    record
}

pub(crate) fn permission_denied(state: &State, tool: &str, id: &str) -> Value {
    json!({
        "type": "system", "subtype": "permission_denied", "tool_name": tool, "tool_use_id": id,
        "decision_reason_type": "mode", "message": denial(tool),
        "uuid": fresh_uuid(), "session_id": state.session_id,
    })
}

/// In our own words; the real one is longer.
pub(crate) fn denial(tool: &str) -> String {
    format!("Permission to use {tool} has been denied because this run does not ask.")
}

/// The synthetic assistant record of an answer that needed no model.
pub(crate) fn local_answer(state: &State, text: &str) -> Value {
    let failure = Failure {
        text: text.to_owned(),
        ..Failure::default()
    };
    let mut record = synthetic(state, &failure);
    if let Some(map) = record.as_object_mut() {
        for key in ["error", "is_api_error_message", "api_error_status"] {
            map.shift_remove(key);
        }
    }
    record
}

/// A failure of the API as the CLI reports it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failure {
    pub(crate) status: Option<u16>,
    /// `error.type` of the reply.
    pub(crate) kind: Option<String>,
    /// What the record's `error` says.
    pub(crate) error: &'static str,
    /// `api_error`, when the CLI gives one.
    pub(crate) api_error: Option<&'static str>,
    pub(crate) text: String,
    pub(crate) terminal_reason: &'static str,
    pub(crate) rate_limit: Option<Value>,
    pub(crate) retry_after_ms: Option<u64>,
}

/// The synthetic assistant record of a failure.
pub(crate) fn synthetic(state: &State, failure: &Failure) -> Value {
    let mut record = json!({
        "type": "assistant",
        "message": {
            "id": fresh_uuid(), "model": "<synthetic>", "role": "assistant", "type": "message",
            "stop_reason": "stop_sequence", "stop_sequence": "", "stop_details": null,
            "usage": {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
            "content": [{"type": "text", "text": failure.text}], "context_management": null,
        },
        "parent_tool_use_id": null, "session_id": state.session_id, "uuid": fresh_uuid(),
        "timestamp": timestamp(), "error": failure.error, "is_api_error_message": true,
    });
    if let Some(map) = record.as_object_mut() {
        add_failure(map, failure);
        if let Some(limit) = &failure.rate_limit {
            map.insert(
                "api_error_params".to_owned(),
                json!({"rate_limit_info": limit}),
            );
        }
    }
    record
}

fn add_failure(map: &mut Map<String, Value>, failure: &Failure) {
    map.insert("api_error_status".to_owned(), json!(failure.status));
    if let Some(kind) = &failure.kind {
        map.insert("api_error_type".to_owned(), json!(kind));
    }
    if let Some(name) = failure.api_error {
        map.insert("api_error".to_owned(), json!(name));
    }
}

/// What the results of a process add up.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    results: u64,
    by_model: Map<String, Value>,
}

/// What one turn ends with.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) subtype: &'static str,
    pub(crate) is_error: bool,
    pub(crate) terminal_reason: &'static str,
    pub(crate) stop_reason: Value,
    pub(crate) result: Option<String>,
    pub(crate) errors: Vec<String>,
    pub(crate) failure: Option<Failure>,
    pub(crate) num_turns: u64,
    pub(crate) denials: Vec<Value>,
    pub(crate) begun: Vec<String>,
    pub(crate) usage: Usage,
    pub(crate) user_uuid: Option<String>,
    /// Answered without a request: such a result has no terminal reason.
    pub(crate) local: bool,
    pub(crate) started: Instant,
}

impl Outcome {
    pub(crate) fn new(user_uuid: Option<String>) -> Outcome {
        Outcome {
            subtype: "success",
            is_error: false,
            terminal_reason: "completed",
            stop_reason: Value::Null,
            result: None,
            errors: Vec::new(),
            failure: None,
            num_turns: 0,
            denials: Vec::new(),
            begun: Vec::new(),
            usage: Usage::default(),
            user_uuid,
            local: false,
            started: Instant::now(),
        }
    }
}

/// Token counts, summed over the requests of a turn.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) cache_read: u64,
    pub(crate) cache_creation: u64,
}

impl Usage {
    /// Adds the usage of one message: the counts of its start, with those of its last delta over them.
    pub(crate) fn add(&mut self, usage: &Value) {
        let count = |key: &str| usage[key].as_u64().unwrap_or(0);
        self.input += count("input_tokens");
        self.output += count("output_tokens");
        self.cache_read += count("cache_read_input_tokens");
        self.cache_creation += count("cache_creation_input_tokens");
    }

    fn per_model(self, model: &str) -> Value {
        let traits = models::traits(model);
        json!({
            "inputTokens": self.input, "outputTokens": self.output,
            "cacheReadInputTokens": self.cache_read, "cacheCreationInputTokens": self.cache_creation,
            "webSearchRequests": 0, "costUSD": 0, "contextWindow": traits.context_window,
            "maxOutputTokens": traits.max_tokens, "canonicalModel": model, "provider": "firstParty",
        })
    }
}

/// The `result` record. As in the real CLI `type` is not its first key. Long because the record is.
pub(crate) fn result(state: &State, totals: &mut Totals, outcome: &Outcome) -> Value {
    let usage = outcome.usage;
    let since = usage.per_model(&state.model);
    if !outcome.begun.is_empty() {
        let before = totals
            .by_model
            .get(&state.model)
            .cloned()
            .unwrap_or_default();
        let mut sum = since.clone();
        for key in [
            "inputTokens",
            "outputTokens",
            "cacheReadInputTokens",
            "cacheCreationInputTokens",
        ] {
            sum[key] = json!(before[key].as_u64().unwrap_or(0) + since[key].as_u64().unwrap_or(0));
        }
        totals.by_model.insert(state.model.clone(), sum);
    }
    let took = u64::try_from(outcome.started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let mut record = json!({
        "duration_api_ms": took, "stop_reason": outcome.stop_reason, "session_id": state.session_id,
        "total_cost_usd": 0,
        "usage": {
            "input_tokens": usage.input, "cache_creation_input_tokens": usage.cache_creation,
            "cache_read_input_tokens": usage.cache_read, "output_tokens": usage.output,
            "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
            "service_tier": "standard",
        },
        "modelUsage": totals.by_model, "permission_denials": outcome.denials,
        "terminal_reason": outcome.terminal_reason, "fast_mode_state": "off",
        "fast_mode_disabled_reason": "sdk_opt_in_required", "safety_stops": 0,
        "is_error": outcome.is_error, "num_turns": outcome.num_turns, "subtype": outcome.subtype,
    });
    let since_last = if outcome.begun.is_empty() {
        json!({})
    } else {
        json!({ &state.model: since })
    };
    let tail = json!({
        "type": "result", "duration_ms": took, "uuid": fresh_uuid(),
        "begun_message_ids": outcome.begun, "queued_turn_count": 0,
        "result_index": totals.results, "model_usage_since_last_result": since_last,
    });
    totals.results += 1;
    if let Some(map) = record.as_object_mut().filter(|_| outcome.local) {
        map.shift_remove("terminal_reason");
    }
    if let (Some(map), Value::Object(tail)) = (record.as_object_mut(), tail) {
        match &outcome.failure {
            Some(failure) => add_failure(map, failure),
            None if outcome.subtype == "success" && !outcome.local => {
                map.insert("api_error_status".to_owned(), Value::Null);
            }
            None => {}
        }
        if let Some(text) = &outcome.result {
            map.insert("result".to_owned(), json!(text));
        }
        if !outcome.errors.is_empty() {
            map.insert("errors".to_owned(), json!(outcome.errors));
        }
        map.extend(tail);
        if outcome.local || !state.newer() {
            map.shift_remove("begun_message_ids");
        }
    }
    add_user_uuid(&mut record, outcome.user_uuid.as_deref());
    record
}

/// The time as the records write it.
pub(crate) fn timestamp() -> String {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        since.subsec_millis()
    )
}

/// The calendar date of a number of days since 1970, counted in eras of 400 years that begin in March.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(19_782), (2024, 2, 29));
        assert_eq!(civil(20_787), (2026, 11, 30));
    }
}
