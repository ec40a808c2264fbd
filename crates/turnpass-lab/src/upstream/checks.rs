//! The checks of the real API that hosts most often fail: pure.
//!
//! Each [`Check`] names a rule; a request that breaks one is answered 400 `invalid_request_error` (413 for its size) with
//! a message that begins with the place, as `messages.3.content.0: ...`. All broken rules are in
//! [`Recorded::violations`](super::Recorded::violations). The words are this upstream's own; the places and statuses are the API's.

use std::collections::{BTreeSet, HashSet};

use serde_json::Value;

use super::signature::Signer;

/// The most `cache_control` marks in one request (API documentation).
pub const MAX_CACHE_MARKS: usize = 4;

/// The longest tool name, in bytes (API documentation; CLI 2.1.332 drops longer ones itself).
pub const MAX_TOOL_NAME_BYTES: usize = 128;

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// The body is a JSON object with a model and an array of messages.
    Shape,
    /// The body is at most [`REQUEST_LIMIT_BYTES`](super::REQUEST_LIMIT_BYTES) long.
    Size,
    /// `max_tokens` is a number above 0.
    MaxTokens,
    /// Roles are user or assistant, and system where it is allowed.
    Roles,
    /// The first message is the user's.
    FirstIsUser,
    /// The last message is not the assistant's, but for models that allow a prefill.
    LastIsNotAssistant,
    /// A message has content (a system message may have none).
    EmptyContent,
    /// A text block is not empty.
    EmptyText,
    /// Each tool call has its result in the next message.
    CallsAnswered,
    /// Each tool result belongs to a call of the message before.
    ResultsBelong,
    /// Tool results stand before all else in their message.
    ResultsFirst,
    /// Ids of tool calls occur once.
    UniqueIds,
    /// Ids of tool calls and tool names keep to `[a-zA-Z0-9_-]`, names to 128 bytes.
    Names,
    /// Thinking carries a signature that this upstream issued for exactly this text.
    Signatures,
    /// At most four `cache_control` marks.
    CacheMarks,
    /// No mark of an hour after one of five minutes.
    CacheOrder,
    /// No mark on thinking or on an empty text.
    CachePlace,
    /// An input schema is an object without `anyOf`, `oneOf` or `allOf` at its root.
    Schemas,
    /// Tool names occur once.
    UniqueTools,
    /// A `tool_reference` names an offered tool.
    References,
    /// Edits of earlier thinking are asked for only where thinking is on.
    ThinkingEdits,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::Shape,
        Self::Size,
        Self::MaxTokens,
        Self::Roles,
        Self::FirstIsUser,
        Self::LastIsNotAssistant,
        Self::EmptyContent,
        Self::EmptyText,
        Self::CallsAnswered,
        Self::ResultsBelong,
        Self::ResultsFirst,
        Self::UniqueIds,
        Self::Names,
        Self::Signatures,
        Self::CacheMarks,
        Self::CacheOrder,
        Self::CachePlace,
        Self::Schemas,
        Self::UniqueTools,
        Self::References,
        Self::ThinkingEdits,
    ];
}

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub check: Check,
    /// The place, as `messages.3.content.0`.
    pub place: String,
    /// What is wrong there.
    pub problem: String,
}

impl Violation {
    /// The message of the answer.
    pub fn message(&self) -> String {
        format!("{}: {}", self.place, self.problem)
    }
}

/// Which rules hold, and what breaking one does.
#[derive(Clone, Debug)]
pub struct Checks {
    off: BTreeSet<Check>,
    refuse: bool,
    /// Whether `role: "system"` may occur in `messages`. CLI 2.1.332 sends it for the 5.x models.
    pub system_role: bool,
    /// Beginnings of the names of models on which the conversation may end with an assistant message.
    pub prefill_models: Vec<String>,
}

impl Default for Checks {
    /// All rules, refused; system messages allowed; prefill on the models before 4.6.
    fn default() -> Self {
        let old = [
            "claude-3",
            "claude-sonnet-4-0",
            "claude-sonnet-4-2",
            "claude-sonnet-4-5",
            "claude-opus-4-0",
            "claude-opus-4-1",
            "claude-opus-4-2",
            "claude-opus-4-5",
            "claude-haiku-4-5",
        ];
        Self {
            off: BTreeSet::new(),
            refuse: true,
            system_role: true,
            prefill_models: old.map(str::to_owned).to_vec(),
        }
    }
}

impl Checks {
    /// No rule at all.
    pub fn none() -> Self {
        Self {
            off: Check::ALL.into(),
            ..Self::default()
        }
    }

    /// Without this rule.
    #[must_use]
    pub fn without(mut self, check: Check) -> Self {
        self.off.insert(check);
        self
    }

    /// Broken rules are recorded, and the request is served all the same.
    #[must_use]
    pub fn record_only(mut self) -> Self {
        self.refuse = false;
        self
    }

    pub(crate) fn is_on(&self, check: Check) -> bool {
        !self.off.contains(&check)
    }

    pub(crate) fn refuses(&self) -> bool {
        self.refuse
    }
}

/// All rules that a Messages request breaks, in the order of its parts. `None` is a body that is no JSON.
pub(crate) fn check(
    request: Option<&Value>,
    checks: &Checks,
    signer: &Signer,
    counting: bool,
) -> Vec<Violation> {
    let mut found = Found {
        checks,
        violations: Vec::new(),
    };
    let Some(request) = request.filter(|request| request.is_object()) else {
        found.add(Check::Shape, "body", "must be a JSON object");
        return found.violations;
    };
    if !request["model"].is_string() {
        found.add(Check::Shape, "model", "must be a string");
    }
    let Some(messages) = request["messages"].as_array() else {
        found.add(Check::Shape, "messages", "must be an array");
        return found.violations;
    };
    if messages.is_empty() {
        found.add(Check::Shape, "messages", "must hold at least one message");
    }
    if !counting
        && request["max_tokens"]
            .as_f64()
            .is_none_or(|tokens| tokens < 1.0)
    {
        found.add(
            Check::MaxTokens,
            "max_tokens",
            "must be a number of at least 1",
        );
    }
    tools(request, &mut found);
    references(request, messages, &mut found);
    order(request, messages, &mut found);
    contents(request, messages, signer, &mut found);
    pairs(messages, &mut found);
    marks(request, messages, &mut found);
    thinking_edits(request, &mut found);
    found.violations
}

struct Found<'a> {
    checks: &'a Checks,
    violations: Vec<Violation>,
}

impl Found<'_> {
    fn add(&mut self, check: Check, place: impl Into<String>, problem: impl Into<String>) {
        if self.checks.is_on(check) {
            self.violations.push(Violation {
                check,
                place: place.into(),
                problem: problem.into(),
            });
        }
    }
}

fn thinking_edits(request: &Value, found: &mut Found<'_>) {
    if matches!(
        request["thinking"]["type"].as_str(),
        Some("enabled" | "adaptive")
    ) {
        return;
    }
    for (index, edit) in list(&request["context_management"], "edits") {
        let kind = edit["type"].as_str().unwrap_or_default();
        if kind.starts_with("clear_thinking") {
            let place = format!("context_management.edits.{index}");
            found.add(Check::ThinkingEdits, place, "needs thinking to be on");
        }
    }
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = (usize, &'a Value)> {
    let items = value.get(field).and_then(Value::as_array);
    items.into_iter().flatten().enumerate()
}

fn is_word(text: &str) -> bool {
    let sound = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    !text.is_empty() && text.chars().all(sound)
}

fn tools(request: &Value, found: &mut Found<'_>) {
    let mut names = HashSet::new();
    for (index, tool) in list(request, "tools") {
        let name = tool["name"].as_str().unwrap_or_default();
        if !names.insert(name) {
            found.add(
                Check::UniqueTools,
                format!("tools.{index}.name"),
                "occurs twice",
            );
        }
        if !is_word(name) || name.len() > MAX_TOOL_NAME_BYTES {
            let problem = "must be 1 to 128 characters of [a-zA-Z0-9_-]";
            found.add(Check::Names, format!("tools.{index}.name"), problem);
        }
        // Tools that the server runs have a type and no schema.
        let custom = tool["type"].is_null() || tool["type"] == "custom";
        if custom {
            schema(
                &tool["input_schema"],
                &format!("tools.{index}.input_schema"),
                found,
            );
        }
    }
}

fn references(request: &Value, messages: &[Value], found: &mut Found<'_>) {
    let offered: HashSet<&str> = list(request, "tools")
        .filter_map(|(_, tool)| tool["name"].as_str())
        .collect();
    let mut visit = |place: String, block: &Value| {
        let name = block["tool_name"].as_str().unwrap_or_default();
        if block["type"] == "tool_reference" && !offered.contains(name) {
            let problem = format!("`{name}` is not among the tools of this request");
            found.add(Check::References, format!("{place}.tool_name"), problem);
        }
    };
    for (index, message) in messages.iter().enumerate() {
        for (at, block) in list(message, "content") {
            let place = format!("messages.{index}.content.{at}");
            for (inner_at, inner) in list(block, "content") {
                visit(format!("{place}.content.{inner_at}"), inner);
            }
            visit(place, block);
        }
    }
}

fn schema(schema: &Value, place: &str, found: &mut Found<'_>) {
    if !schema.is_object() {
        found.add(Check::Schemas, place, "must be an object");
    } else if schema["type"] != "object" {
        found.add(
            Check::Schemas,
            format!("{place}.type"),
            "must be \"object\"",
        );
    } else if let Some(word) = ["anyOf", "oneOf", "allOf"]
        .into_iter()
        .find(|word| schema.get(word).is_some())
    {
        let problem = format!("must not have {word} at its root");
        found.add(Check::Schemas, place, problem);
    }
}

fn order(request: &Value, messages: &[Value], found: &mut Found<'_>) {
    for (index, message) in messages.iter().enumerate() {
        let place = format!("messages.{index}.role");
        match message["role"].as_str() {
            Some("user" | "assistant") => {}
            Some("system") if found.checks.system_role => {}
            _ => found.add(Check::Roles, place, "must be user or assistant"),
        }
    }
    if messages
        .first()
        .is_some_and(|first| first["role"] != "user")
    {
        found.add(Check::FirstIsUser, "messages.0.role", "must be user");
    }
    let model = request["model"].as_str().unwrap_or_default();
    let prefill = found
        .checks
        .prefill_models
        .iter()
        .any(|old| model.starts_with(old.as_str()));
    let last = messages
        .iter()
        .rposition(|message| message["role"] != "system");
    if let Some(last) = last.filter(|last| messages[*last]["role"] == "assistant" && !prefill) {
        let problem = "this model does not continue an assistant message; the conversation must end with a user message";
        found.add(
            Check::LastIsNotAssistant,
            format!("messages.{last}"),
            problem,
        );
    }
}

fn contents(request: &Value, messages: &[Value], signer: &Signer, found: &mut Found<'_>) {
    for (index, block) in list(request, "system") {
        text_block(block, &format!("system.{index}"), found);
    }
    let last = messages.len().saturating_sub(1);
    for (index, message) in messages.iter().enumerate() {
        let place = format!("messages.{index}");
        let exempt =
            message["role"] == "system" || (index == last && message["role"] == "assistant");
        match &message["content"] {
            Value::String(text) if text.is_empty() && !exempt => {
                found.add(Check::EmptyContent, place, "must have content");
            }
            Value::String(_) => {}
            Value::Array(blocks) if blocks.is_empty() && !exempt => {
                found.add(Check::EmptyContent, place, "must have content");
            }
            Value::Array(blocks) => {
                for (at, block) in blocks.iter().enumerate() {
                    content_block(block, &format!("{place}.content.{at}"), signer, found);
                }
            }
            _ => found.add(
                Check::Shape,
                format!("{place}.content"),
                "must be a string or an array",
            ),
        }
    }
}

fn text_block(block: &Value, place: &str, found: &mut Found<'_>) {
    if block["type"] != "text" {
        return;
    }
    match block["text"].as_str() {
        Some("") => found.add(
            Check::EmptyText,
            format!("{place}.text"),
            "must not be empty",
        ),
        Some(_) => {}
        None => found.add(Check::Shape, format!("{place}.text"), "must be a string"),
    }
}

fn content_block(block: &Value, place: &str, signer: &Signer, found: &mut Found<'_>) {
    match block["type"].as_str() {
        Some("text") => text_block(block, place, found),
        Some("tool_use") => {
            if !is_word(block["id"].as_str().unwrap_or_default()) {
                let problem = "must match ^[a-zA-Z0-9_-]+$";
                found.add(Check::Names, format!("{place}.id"), problem);
            }
            let name = block["name"].as_str().unwrap_or_default();
            if !is_word(name) || name.len() > MAX_TOOL_NAME_BYTES {
                let problem = "must be 1 to 128 characters of [a-zA-Z0-9_-]";
                found.add(Check::Names, format!("{place}.name"), problem);
            }
            if !block["input"].is_object() {
                found.add(Check::Shape, format!("{place}.input"), "must be an object");
            }
        }
        Some("tool_result") => {
            for (at, inner) in list(block, "content") {
                text_block(inner, &format!("{place}.content.{at}"), found);
            }
        }
        Some("thinking") => {
            let text = block["thinking"].as_str().unwrap_or_default();
            let signature = block["signature"].as_str().unwrap_or_default();
            if !signer.knows_thinking(signature, text) {
                let problem = "was not issued for this thinking text";
                found.add(Check::Signatures, format!("{place}.signature"), problem);
            }
        }
        Some("redacted_thinking") => {
            if !signer.knows_redacted(block["data"].as_str().unwrap_or_default()) {
                found.add(Check::Signatures, format!("{place}.data"), "was not issued");
            }
        }
        Some(_) => {}
        None => found.add(Check::Shape, format!("{place}.type"), "must be a string"),
    }
}

/// The ids of a message's blocks of a type, with their places.
fn ids<'a>(message: &'a Value, kind: &str, field: &str) -> Vec<(usize, &'a str)> {
    list(message, "content")
        .filter(|(_, block)| block["type"] == kind)
        .map(|(at, block)| (at, block[field].as_str().unwrap_or_default()))
        .collect()
}

fn pairs(messages: &[Value], found: &mut Found<'_>) {
    let mut seen = HashSet::new();
    let mut open: Vec<(usize, &str)> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let is_user = message["role"] == "user";
        let results = if is_user {
            ids(message, "tool_result", "tool_use_id")
        } else {
            Vec::new()
        };
        let mut answered = HashSet::new();
        for (at, id) in &results {
            let place = format!("messages.{index}.content.{at}.tool_use_id");
            if !open.iter().any(|(_, call)| call == id) {
                let problem = format!("`{id}` is no tool_use of the message directly before");
                found.add(Check::ResultsBelong, place, problem);
            } else if !answered.insert(*id) {
                found.add(Check::UniqueIds, place, format!("`{id}` is answered twice"));
            }
        }
        let missing: Vec<&str> = open
            .iter()
            .map(|(_, id)| *id)
            .filter(|id| !answered.contains(id))
            .collect();
        if !missing.is_empty() {
            unanswered(index - 1, &missing, found);
        }
        for (nth, (at, _)) in results.iter().enumerate() {
            if *at != nth {
                let place = format!("messages.{index}.content.{at}");
                found.add(
                    Check::ResultsFirst,
                    place,
                    "tool_result must stand before all other blocks",
                );
                break;
            }
        }
        open = match message["role"] == "assistant" {
            true => ids(message, "tool_use", "id"),
            false => Vec::new(),
        };
        for (at, id) in &open {
            if !seen.insert(*id) {
                let place = format!("messages.{index}.content.{at}.id");
                found.add(Check::UniqueIds, place, format!("`{id}` occurs twice"));
            }
        }
    }
    if !open.is_empty() {
        let missing: Vec<&str> = open.iter().map(|(_, id)| *id).collect();
        unanswered(messages.len() - 1, &missing, found);
    }
}

fn unanswered(message: usize, missing: &[&str], found: &mut Found<'_>) {
    let problem = format!(
        "tool_use without tool_result in the next message: {}",
        missing.join(", ")
    );
    found.add(Check::CallsAnswered, format!("messages.{message}"), problem);
}

fn marks(request: &Value, messages: &[Value], found: &mut Found<'_>) {
    let mut count = 0;
    let mut short_before = false;
    let mut visit = |place: String, block: &Value, found: &mut Found<'_>| {
        let control = &block["cache_control"];
        if control.is_null() {
            return;
        }
        count += 1;
        let kind = block["type"].as_str().unwrap_or_default();
        if matches!(kind, "thinking" | "redacted_thinking") || block["text"] == "" {
            let problem = "is not allowed on thinking or on an empty text";
            found.add(Check::CachePlace, format!("{place}.cache_control"), problem);
        }
        match control["ttl"].as_str() {
            Some("1h") if short_before => {
                let problem =
                    "an hour must not come after five minutes (order: tools, system, messages)";
                found.add(
                    Check::CacheOrder,
                    format!("{place}.cache_control.ttl"),
                    problem,
                );
            }
            Some("1h") => {}
            Some("5m") | None => short_before = true,
            Some(_) => {
                let problem = "must be 5m or 1h";
                found.add(Check::Shape, format!("{place}.cache_control.ttl"), problem);
            }
        }
    };
    for (index, tool) in list(request, "tools") {
        visit(format!("tools.{index}"), tool, found);
    }
    for (index, block) in list(request, "system") {
        visit(format!("system.{index}"), block, found);
    }
    for (index, message) in messages.iter().enumerate() {
        for (at, block) in list(message, "content") {
            let place = format!("messages.{index}.content.{at}");
            for (inner_at, inner) in list(block, "content") {
                visit(format!("{place}.content.{inner_at}"), inner, found);
            }
            visit(place, block, found);
        }
    }
    if count > MAX_CACHE_MARKS {
        let problem =
            format!("at most {MAX_CACHE_MARKS} blocks may have it, this request has {count}");
        found.add(Check::CacheMarks, "cache_control", problem);
    }
}
