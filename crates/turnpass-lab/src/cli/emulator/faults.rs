//! Behaviours of the real CLI that the emulator can be told to lack, one switch each: what a certification has to notice.
//!
//! Most of them are changes at one of three borders, where they are functions over values: a line of the host as it is read,
//! a record as it is written, a request's body as it is sent. The rest is asked for by the place that has the behaviour.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A behaviour that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// An option of the command line is not known.
    UnknownOption,
    /// The first record lacks `apiKeySource`.
    NoKeySource,
    /// A built-in plugin loads that nobody switched off.
    PluginLoads,
    /// The person's CLAUDE.md goes into the system prompt.
    ReadsInstructions,
    /// One of the CLI's own tools is listed and offered.
    ExtraTool,
    /// Descriptions are cut at 2,048 characters.
    CutsDescriptions,
    /// An in-band server is asked for its tools although it has a manifest.
    IgnoresManifests,
    /// Calls do not name their block.
    NoPairing,
    /// Calls go one after another.
    CallsInSequence,
    /// Results of calls above 50,000 characters are replaced by a stub; those of frames are not.
    StubsResults,
    /// `claude/endTurn` is not seen.
    IgnoresEndTurn,
    /// Servers of the configuration file do not start.
    IgnoresMcpConfig,
    /// `mcp_status` says `pending` for ever.
    ServersPending,
    /// A title is asked for before each turn.
    AsksForTitle,
    /// `client_composed` is not seen, and `/word` is a command.
    IgnoresComposed,
    /// A fourth cache mark.
    ExtraCacheMark,
    /// Framed messages trade places.
    FramesOutOfOrder,
    /// Assistant frames are not acknowledged.
    FramesUnacknowledged,
    /// Thinking in frames is dropped.
    DropsThinking,
    /// Frames after a turn are not taken.
    NoLiveFrames,
    /// The extra body is not seen when it is set on a running process.
    NoLiveExtraBody,
    /// `set_model` does not take a prompt.
    NoLivePrompt,
    /// Command text stays after a rewind.
    LeavesCommandText,
    /// An effort is not seen on a running process.
    NoLiveEffort,
    /// An interrupted turn stays although the rewind is said to be done.
    KeepsInterrupted,
    /// A failed turn stays although the rewind is said to be done.
    KeepsFailed,
    /// An interrupt leaves the request open.
    InterruptKeepsRequest,
    /// `cancel_queued` is not seen.
    IgnoresCancelQueued,
    /// `--resume-session-at` is not seen.
    IgnoresResumeAt,
    /// Parked calls are not on disk.
    ParkedNotOnDisk,
    /// `--fork-session` is not seen.
    IgnoresFork,
    /// `--system-prompt-snapshot` is not seen.
    KeepsSnapshot,
    /// The blocking limit is not read.
    NoBlockingLimit,
    /// A 410 is asked for again.
    Retries410,
    /// A 401 is not asked for again.
    NoReadmission,
    /// `CLAUDE_CODE_MAX_RETRIES` is not read.
    IgnoresMaxRetries,
    /// `CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK` is not read.
    FallsBack,
    /// `CLAUDE_CODE_DISABLE_REFUSAL_RETRY` is not read.
    RetriesRefusals,
    /// A call whose input does not parse is made with an empty one.
    CallsUnparsed,
    /// The made-up end of a cut stream names no abandoned blocks.
    NoAbandonedBlocks,
    /// `--max-turns` is not seen.
    IgnoresMaxTurns,
    /// `--max-budget-usd` is not seen.
    IgnoresBudget,
    /// The end of input does not end it.
    IgnoresEndOfInput,
    /// `initialize` lists no models.
    NoModels,
}

/// The faults of one run, shared by all of its parts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    set: Arc<BTreeSet<Fault>>,
    asked: Arc<AtomicBool>,
}

/// Flags that are not seen under a fault.
const UNSEEN_FLAGS: [(Fault, &str); 6] = [
    (Fault::IgnoresResumeAt, "--resume-session-at"),
    (Fault::IgnoresFork, "--fork-session"),
    (Fault::KeepsSnapshot, "--system-prompt-snapshot"),
    (Fault::IgnoresMcpConfig, "--mcp-config"),
    (Fault::IgnoresMaxTurns, "--max-turns"),
    (Fault::IgnoresBudget, "--max-budget-usd"),
];

/// Variables that are not read under a fault.
const UNREAD_VARIABLES: [(Fault, &str); 4] = [
    (
        Fault::NoBlockingLimit,
        "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE",
    ),
    (Fault::IgnoresMaxRetries, "CLAUDE_CODE_MAX_RETRIES"),
    (
        Fault::FallsBack,
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK",
    ),
    (Fault::RetriesRefusals, "CLAUDE_CODE_DISABLE_REFUSAL_RETRY"),
];

/// What is left of a description, and of a result.
const CUT_CHARS: usize = 2048;
const STUB_CHARS: usize = 50_000;

impl Faults {
    /// What becomes of the result of a call.
    pub(crate) fn called(&self, block: &mut Value) {
        if self.has(Fault::StubsResults) && block["content"].to_string().len() > STUB_CHARS {
            block["content"] = json!("<persisted-output>");
        }
    }

    pub(crate) fn new(set: &BTreeSet<Fault>) -> Faults {
        Faults {
            set: Arc::new(set.clone()),
            asked: Arc::default(),
        }
    }

    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.set.contains(&fault)
    }

    /// The flags that are not seen.
    pub(crate) fn unseen_flags(&self) -> impl Iterator<Item = &'static str> {
        let unseen = UNSEEN_FLAGS.into_iter();
        unseen.filter_map(|(fault, flag)| self.has(fault).then_some(flag))
    }

    /// Whether a variable is not read.
    pub(crate) fn hides(&self, variable: &str) -> bool {
        let mut hidden = UNREAD_VARIABLES.into_iter();
        hidden.any(|(fault, name)| name == variable && self.has(fault))
    }

    /// A line of the host as it is read; false when it is not taken at all.
    pub(crate) fn line(&self, line: &mut Value) -> bool {
        let is_asked = line["type"] == "user" && line["shouldQuery"] != false;
        let is_frame = line["type"] == "assistant" || line["shouldQuery"] == false;
        if self.has(Fault::NoLiveFrames)
            && is_frame
            && self.asked.load(Ordering::Relaxed)
            && line["type"] == "assistant"
        {
            return false;
        }
        if is_asked {
            self.asked.store(true, Ordering::Relaxed);
        }
        if self.has(Fault::IgnoresComposed) {
            remove(line, "client_composed");
        }
        if self.has(Fault::DropsThinking)
            && let Some(blocks) = line["message"]["content"].as_array_mut()
        {
            blocks.retain(|block| block["type"] != "thinking");
        }
        if self.has(Fault::IgnoresEndTurn)
            && let Some(result) = line.pointer_mut("/response/response/mcp_response/result")
        {
            remove(result, "_meta");
        }
        self.request(&mut line["request"]);
        true
    }

    /// A control request of the host as it is read.
    fn request(&self, request: &mut Value) {
        if self.has(Fault::IgnoresManifests) {
            remove(request, "sdkMcpServerManifests");
        }
        if self.has(Fault::CallsInSequence)
            && let Some(manifests) = request["sdkMcpServerManifests"].as_object_mut()
        {
            let tools = manifests
                .values_mut()
                .filter_map(|manifest| manifest.pointer_mut("/toolsListResult/tools"));
            for tool in tools.filter_map(Value::as_array_mut).flatten() {
                remove(tool, "annotations");
            }
        }
        if self.has(Fault::IgnoresCancelQueued) {
            remove(request, "cancel_queued");
        }
        if self.has(Fault::NoLivePrompt) {
            remove(request, "system_prompt");
        }
        if self.has(Fault::NoLiveEffort) {
            remove(&mut request["settings"], "effortLevel");
        }
        if self.has(Fault::NoLiveExtraBody) {
            remove(&mut request["settings"]["env"], "CLAUDE_CODE_EXTRA_BODY");
        }
    }

    /// A record as it is written; false when it is not written at all.
    pub(crate) fn record(&self, record: &mut Value) -> bool {
        if record["subtype"] == "init" {
            self.init(record);
        }
        if self.has(Fault::NoPairing)
            && let Some(params) = record.pointer_mut("/request/message/params")
        {
            remove(params, "_meta");
        }
        if self.has(Fault::NoAbandonedBlocks) {
            remove(record, "abandoned_blocks");
        }
        let Some(answer) = record.pointer_mut("/response/response") else {
            return true;
        };
        if self.has(Fault::NoModels) {
            remove(answer, "models");
        }
        if self.has(Fault::ServersPending)
            && let Some(servers) = answer["mcpServers"].as_array_mut()
        {
            for server in servers {
                server["status"] = json!("pending");
                remove(server, "tools");
            }
        }
        true
    }

    fn init(&self, init: &mut Value) {
        if self.has(Fault::NoKeySource) {
            remove(init, "apiKeySource");
        }
        if let Some(tools) = init["tools"]
            .as_array_mut()
            .filter(|_| self.has(Fault::ExtraTool))
        {
            tools.push(json!("Bash"));
        }
        if let Some(plugins) = init["plugins"]
            .as_array_mut()
            .filter(|_| self.has(Fault::PluginLoads))
        {
            plugins.push(json!({"name": "cc-plugin-new", "source": "cc-plugin-new@builtin", "path": "builtin"}));
        }
    }

    /// A request's body as it is sent.
    pub(crate) fn body(&self, body: &mut Value) {
        if let Some(tools) = body["tools"]
            .as_array_mut()
            .filter(|_| self.has(Fault::CutsDescriptions))
        {
            for tool in tools {
                let text = tool["description"].as_str().unwrap_or_default();
                let cut: String = text.chars().take(CUT_CHARS).collect();
                tool["description"] = json!(cut);
            }
        }
        if let Some(system) = body["system"].as_array_mut() {
            if self.has(Fault::ExtraCacheMark) {
                system[0]["cache_control"] = json!({"type": "ephemeral", "ttl": "1h"});
            }
            if self.has(Fault::ReadsInstructions)
                && let Some(text) = instructions()
            {
                system.push(json!({"type": "text", "text": text}));
            }
        }
        let Some(messages) = body["messages"].as_array_mut() else {
            return;
        };
        if self.has(Fault::FramesOutOfOrder) {
            let spoken = |one: &Value| one["role"] == "assistant";
            let places: Vec<usize> = (0..messages.len())
                .filter(|at| spoken(&messages[*at]))
                .collect();
            if let [first, .., last] = places[..] {
                messages.swap(first, last);
            }
        }
    }
}

/// What the person's own instructions say.
fn instructions() -> Option<String> {
    let home = std::env::var_os("HOME")?;
    std::fs::read_to_string(std::path::Path::new(&home).join(".claude/CLAUDE.md")).ok()
}

fn remove(value: &mut Value, key: &str) {
    if let Some(members) = value.as_object_mut() {
        let members: &mut Map<String, Value> = members;
        members.shift_remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(fault: Fault) -> Faults {
        Faults::new(&BTreeSet::from([fault]))
    }

    #[test]
    fn without_a_fault_nothing_is_changed() {
        let none = Faults::default();
        let line =
            json!({"type": "user", "client_composed": true, "request": {"cancel_queued": true}});
        let mut same = line.clone();
        assert!(none.line(&mut same));
        assert_eq!(same, line);
        let record = json!({"subtype": "init", "apiKeySource": "none", "tools": [], "plugins": []});
        let mut same = record.clone();
        assert!(none.record(&mut same));
        assert_eq!(same, record);
        assert_eq!(none.unseen_flags().count(), 0);
        assert!(!none.hides("CLAUDE_CODE_MAX_RETRIES"));
    }

    #[test]
    fn a_fault_changes_what_it_is_for() {
        let mut line = json!({"type": "user", "client_composed": true});
        with(Fault::IgnoresComposed).line(&mut line);
        assert_eq!(line.get("client_composed"), None);
        let mut body = json!({"tools": [{"description": "x".repeat(5000)}]});
        with(Fault::CutsDescriptions).body(&mut body);
        assert_eq!(
            body["tools"][0]["description"].as_str().unwrap().len(),
            CUT_CHARS
        );
        assert_eq!(
            with(Fault::IgnoresFork).unseen_flags().collect::<Vec<_>>(),
            ["--fork-session"]
        );
        assert!(with(Fault::FallsBack).hides("CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK"));
    }

    #[test]
    fn every_fault_has_a_name_in_a_script() {
        let options = r#"{"faults": ["no_pairing", "retries410"]}"#;
        let read: super::super::EmulatorOptions = serde_json::from_str(options).unwrap();
        assert_eq!(
            read.faults,
            BTreeSet::from([Fault::NoPairing, Fault::Retries410])
        );
    }
}
