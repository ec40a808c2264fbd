//! What an emulated process knows: flags, model, prompt, servers, history.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::EmulatorOptions;
use super::faults::{Fault, Faults};
use super::flags::Flags;
use super::models;
use super::sessions::{self, Opened};
use crate::cli::mcp::{HostLink, Server};

/// One message of the conversation.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// The uuid of its record or of the host's line; rewinding and resuming name it.
    pub(crate) uuid: String,
    /// `{"role", "content"}` as it goes upstream.
    pub(crate) message: Value,
    /// Written by the host as a frame, not asked.
    pub(crate) frame: bool,
}

pub(crate) struct State {
    pub(crate) version: String,
    pub(crate) faults: Faults,
    pub(crate) options: EmulatorOptions,
    pub(crate) flags: Flags,
    pub(crate) session_id: String,
    pub(crate) model: String,
    pub(crate) effort: Option<String>,
    pub(crate) system_prompt: Option<String>,
    /// `env` of the settings, which wins over the environment.
    pub(crate) settings_env: BTreeMap<String, String>,
    pub(crate) settings: Map<String, Value>,
    pub(crate) servers: Vec<Rc<Server>>,
    pub(crate) history: Vec<Entry>,
    /// User messages that the CLI wrote by itself; nobody rewinds to them, and they make no target stale.
    pub(crate) own: BTreeSet<String>,
    /// A turn has been asked, so that a model change leaves traces.
    pub(crate) asked: bool,
    /// Text blocks that go before the next user text.
    pub(crate) pending_text: Vec<String>,
    /// A system message that goes after the next user text.
    pub(crate) pending_system: Option<String>,
    pub(crate) link: HostLink,
    pub(crate) device_id: String,
    /// Where the conversation is kept.
    pub(crate) file: Option<PathBuf>,
}

impl State {
    pub(crate) fn new(
        version: &str,
        options: EmulatorOptions,
        flags: Flags,
        link: HostLink,
    ) -> State {
        let prompt = match (
            flags.value("--system-prompt"),
            flags.value("--system-prompt-file"),
        ) {
            (Some(text), _) => Some(text.to_owned()),
            (None, Some(file)) => std::fs::read_to_string(file).ok(),
            (None, None) => None,
        };
        let settings = json_or_file(flags.value("--settings"));
        let settings = settings.as_object().cloned().unwrap_or_default();
        let session = flags.value("--session-id").map(str::to_owned);
        let mut state = State {
            version: version.to_owned(),
            model: models::resolve(flags.value("--model").unwrap_or("default")),
            effort: flags.value("--effort").map(str::to_owned),
            system_prompt: prompt,
            session_id: session.unwrap_or_else(fresh_uuid),
            settings_env: BTreeMap::new(),
            settings: Map::new(),
            servers: Vec::new(),
            history: Vec::new(),
            own: BTreeSet::new(),
            asked: false,
            pending_text: Vec::new(),
            pending_system: None,
            device_id: format!(
                "{}{}",
                uuid::Uuid::new_v4().simple(),
                uuid::Uuid::new_v4().simple()
            ),
            faults: Faults::new(&options.faults),
            options,
            flags,
            link,
            file: None,
        };
        state.apply_settings(&settings);
        state
    }

    /// Takes settings as `--settings` and `apply_flag_settings` give them; null takes one away.
    pub(crate) fn apply_settings(&mut self, settings: &Map<String, Value>) {
        for (name, value) in settings {
            match name.as_str() {
                "model" => {
                    let wanted = value
                        .as_str()
                        .or(self.flags.value("--model"))
                        .unwrap_or("default");
                    self.model = models::resolve(wanted);
                }
                // An invalid level is answered with success and ignored: measured on 2.1.332.
                "effortLevel" => match value.as_str() {
                    Some("low" | "medium" | "high" | "xhigh" | "max") => {
                        self.effort = value.as_str().map(str::to_owned);
                    }
                    Some(_) => {}
                    None => self.effort = self.flags.value("--effort").map(str::to_owned),
                },
                "env" => {
                    for (key, item) in value.as_object().into_iter().flatten() {
                        match item.as_str() {
                            Some(text) => self.settings_env.insert(key.clone(), text.to_owned()),
                            None => self.settings_env.remove(key),
                        };
                    }
                }
                _ => {
                    self.settings.insert(name.clone(), value.clone());
                }
            }
        }
    }

    /// A variable, from the settings or from the environment.
    pub(crate) fn env(&self, name: &str) -> Option<String> {
        if self.faults.hides(name) {
            return None;
        }
        self.settings_env
            .get(name)
            .cloned()
            .or_else(|| std::env::var(name).ok())
    }

    /// Whether a switch variable is on.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.env(name)
            .is_some_and(|value| !matches!(value.as_str(), "" | "0" | "false" | "off"))
    }

    /// Opens the servers of `--mcp-config`; the caller connects them.
    pub(crate) fn open_servers(&mut self) {
        for config in self.flags.values("--mcp-config").to_vec() {
            let config = json_or_file(Some(&config));
            for (name, entry) in config["mcpServers"].as_object().into_iter().flatten() {
                self.servers
                    .push(Rc::new(Server::open(name, entry, &self.link)));
            }
        }
    }

    /// The tools in the order in which the CLI lists them, with the server and the tool's own name.
    pub(crate) fn tools(&self) -> Vec<PublishedTool> {
        let plain = self.is_on("CLAUDE_AGENT_SDK_MCP_NO_PREFIX");
        let mut found: Vec<PublishedTool> = Vec::new();
        for server in &self.servers {
            if server.status.get() != "connected" {
                continue;
            }
            for tool in server.tools.borrow().iter() {
                let own = tool["name"].as_str().unwrap_or_default().to_owned();
                let safe: String = own
                    .chars()
                    .map(|c| {
                        if c.is_ascii_alphanumeric() || "_-".contains(c) {
                            c
                        } else {
                            '_'
                        }
                    })
                    .collect();
                let prefix = format!("mcp__{}__", server.name);
                let bare = plain && server.source == "sdk";
                let name = if bare {
                    safe
                } else {
                    format!("{prefix}{safe}")
                };
                // The first of two equal names wins, and 128 characters are the limit.
                if name.len() <= 128 && found.iter().all(|other| other.name != name) {
                    found.push(PublishedTool {
                        name,
                        own,
                        tool: tool.clone(),
                        server: Rc::clone(server),
                    });
                }
            }
        }
        found.sort_by_key(|tool| tool.name.to_lowercase());
        found
    }

    /// Whether the version is newer than 2.1.310. Seen on 2.1.332 and not on 2.1.294 and 2.1.310:
    /// `begun_message_ids`, `abandoned_blocks` after a cut inside a block or an interrupt, and the
    /// reminder tags around what the CLI says by itself. `abandoned_blocks` came with 2.1.311; of the others it is not known.
    pub(crate) fn newer(&self) -> bool {
        let mut numbers = self
            .version
            .split('.')
            .map(|part| part.parse().unwrap_or(0_u64));
        let version =
            [numbers.next(), numbers.next(), numbers.next()].map(Option::unwrap_or_default);
        version > [2, 1, 310]
    }

    /// Takes up a stored conversation; its recorded prompt wins over the given one.
    pub(crate) fn resume(&mut self, opened: Opened) {
        self.session_id = opened.session_id;
        self.file = opened.file;
        self.history = opened.saved.history;
        if opened.saved.system_prompt.is_some() {
            self.system_prompt = opened.saved.system_prompt;
        }
    }

    /// Writes the conversation down; a full disk must not change what the run does.
    pub(crate) fn save(&self) {
        if let Some(file) = &self.file {
            let _ = sessions::save(file, self.system_prompt.as_deref(), &self.history);
        }
    }

    /// Adds a user message that nobody asked.
    pub(crate) fn push_own(&mut self, uuid: String, message: Value) {
        self.own.insert(uuid.clone());
        self.push(uuid, message, false);
    }

    /// Adds a message to the conversation under a uuid.
    pub(crate) fn push(&mut self, uuid: String, message: Value, frame: bool) {
        let is_lost = self.faults.has(Fault::ParkedNotOnDisk) && !calls(&message).is_empty();
        self.history.push(Entry {
            uuid,
            message,
            frame,
        });
        if !is_lost {
            self.save();
        }
    }

    /// Results of the host take the place of those that a resume has put in for missing ones: 2.1.294, 2.1.310, 2.1.332.
    pub(crate) fn take_results_of(&mut self, content: &Value) {
        let given = results(content);
        let made_up = self
            .history
            .last()
            .filter(|last| {
                last.message["content"]
                    .to_string()
                    .contains(sessions::MISSING)
            })
            .map(|last| results(&last.message["content"]));
        if made_up.is_some_and(|ids| !ids.is_empty() && ids.iter().all(|id| given.contains(id))) {
            self.history.pop();
        }
    }
}

/// The ids of the calls of a message.
fn calls(message: &Value) -> Vec<String> {
    ids(&message["content"], "tool_use", "id")
}

/// The ids of the calls that a content has results of.
fn results(content: &Value) -> Vec<String> {
    ids(content, "tool_result", "tool_use_id")
}

fn ids(content: &Value, kind: &str, field: &str) -> Vec<String> {
    let blocks = content.as_array().map_or(&[][..], Vec::as_slice);
    let blocks = blocks.iter().filter(|block| block["type"] == *kind);
    blocks
        .filter_map(|block| block[field].as_str().map(str::to_owned))
        .collect()
}

/// A tool as it is published to the model.
#[derive(Clone)]
pub(crate) struct PublishedTool {
    pub(crate) name: String,
    pub(crate) own: String,
    pub(crate) tool: Value,
    pub(crate) server: Rc<Server>,
}

impl PublishedTool {
    /// Calls of such tools run beside each other.
    pub(crate) fn read_only(&self) -> bool {
        self.tool.pointer("/annotations/readOnlyHint") == Some(&Value::Bool(true))
    }
}

pub(crate) fn fresh_uuid() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// A JSON text, or the path of a file that holds one.
fn json_or_file(given: Option<&str>) -> Value {
    let Some(given) = given else { return json!({}) };
    if given.trim_start().starts_with('{') {
        return serde_json::from_str(given).unwrap_or_default();
    }
    let text = std::fs::read_to_string(given).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}
