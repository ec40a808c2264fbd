//! The environment of a child: an allow-list over our own, then what is set for it.
//!
//! Everything that is not listed is gone: keys and tokens, backend selectors, custom headers, `CLAUDECODE` and other marks
//! of a surrounding session, entry-point names, `NODE_OPTIONS`. No other module reads the environment of this process.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::error::{Error, ErrorCode, Result};

/// Variables of ours at one moment; the pure functions work on it.
#[derive(Clone, Default)]
pub struct Snapshot(BTreeMap<OsString, OsString>);

impl Snapshot {
    /// The environment of this process as it is now.
    pub fn of_this_process() -> Self {
        std::env::vars_os().collect()
    }

    /// One value; an empty one counts as not set, as it does for the CLI.
    pub fn set(&mut self, name: impl Into<OsString>, value: impl Into<OsString>) {
        self.0.insert(name.into(), value.into());
    }

    /// Takes a variable out.
    pub fn remove(&mut self, name: &str) {
        self.0.remove(OsStr::new(name));
    }

    /// A variable.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        let value = self.0.get(OsStr::new(name))?;
        (!value.is_empty()).then_some(value)
    }
}

impl<N: Into<OsString>, V: Into<OsString>> FromIterator<(N, V)> for Snapshot {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        let pairs = pairs.into_iter();
        Self(
            pairs
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
        )
    }
}

impl std::fmt::Debug for Snapshot {
    /// Names only: among the values are keys and tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// What to do when our own environment names a credential or another backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InheritedCredentials {
    /// Leave it out of the child's environment; the default of pool and relay.
    #[default]
    Strip,
    /// Refuse to start anything; the default of replay.
    Refuse,
}

/// Names that make [`InheritedCredentials::Refuse`] refuse: those of the replay document, and Foundry, which joined the
/// backends later.
pub const REFUSED_NAMES: [&str; 7] = [
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_BASE_URL",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
];

/// Names that a child inherits as they are, with the reason.
const INHERITED: &[(&str, &str)] = &[
    ("HOME", "the CLI finds its sign-in below it"),
    ("USER", "macOS: part of the look-up in the keychain"),
    ("LOGNAME", "the same, for programs that prefer it"),
    ("SHELL", "named in the CLI's environment text"),
    ("LANG", "encoding of messages"),
    (
        "HTTP_PROXY",
        "the CLI's own renewal of its sign-in may need it",
    ),
    ("http_proxy", "the same"),
    ("HTTPS_PROXY", "the same"),
    ("https_proxy", "the same"),
    ("ALL_PROXY", "the same"),
    ("all_proxy", "the same"),
    (
        "CLAUDE_CONFIG_DIR",
        "unchanged: macOS derives the name of the keychain entry from its text",
    ),
    ("NODE_EXTRA_CA_CERTS", "certificates of a company's proxy"),
    ("SSL_CERT_FILE", "the same"),
    ("SSL_CERT_DIR", "the same"),
];

/// Loopback names that no proxy may get. A proxy sees loopback MCP and relay requests without them (2.1.294, 2.1.310,
/// 2.1.332: the CLI sent it both), and none with them.
const LOOPBACK: [&str; 3] = ["127.0.0.1", "localhost", "::1"];

/// Search path of a child when ours has none, as after a start by a daemon.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Names that no launch may set or inherit, with the reason. The tests of every launch hold it.
pub const NEVER_SET: &[(&str, &str)] = &[
    (
        "CLAUDE_CODE_ENTRYPOINT",
        "names the client; ours is what the CLI says by itself",
    ),
    ("CLAUDE_AGENT_SDK_CLIENT_APP", "the same, in a header"),
    (
        "CLAUDE_CODE_ATTRIBUTION_HEADER",
        "removes the CLI's own attribution",
    ),
    (
        "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST",
        "breaks the sign-in and moves runs to another tier (2.1.332)",
    ),
    (
        "CLAUDE_CODE_RETRY_WATCHDOG",
        "parks a turn until the usage window opens, for hours (2.1.332)",
    ),
    (
        "CLAUDE_CODE_SIMPLE",
        "never reads the subscription's sign-in (2.1.332)",
    ),
    ("CLAUDECODE", "the CLI refuses to start inside itself"),
    (
        "CLAUDE_CODE_OAUTH_TOKEN",
        "another credential than the person's sign-in",
    ),
    ("ANTHROPIC_API_KEY", "bills an API account"),
    ("ANTHROPIC_AUTH_TOKEN", "wins over the sign-in"),
    ("ANTHROPIC_CUSTOM_HEADERS", "could carry a credential"),
    ("ANTHROPIC_PROFILE", "wins over the sign-in"),
    ("ANTHROPIC_FEDERATION_RULE_ID", "the same"),
    ("CLAUDE_CODE_USE_BEDROCK", "another backend"),
    ("CLAUDE_CODE_USE_VERTEX", "another backend"),
    ("CLAUDE_CODE_USE_FOUNDRY", "another backend"),
    (
        "CLAUDE_AUTO_BACKGROUND_TASKS",
        "moves long tool calls to the background",
    ),
    ("NODE_OPTIONS", "loads code into the CLI"),
];

/// One variable that a launch sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: &'static str,
    /// Why it is set, with the version on which the effect was seen.
    pub reason: &'static str,
}

const fn switch(name: &'static str, value: &'static str, reason: &'static str) -> Switch {
    Switch {
        name,
        value,
        reason,
    }
}

/// Set for every process of every transport.
pub const EVERYWHERE: &[Switch] = &[
    switch(
        "DISABLE_TELEMETRY",
        "1",
        "without it another built-in plugin loads and 240 KB are posted at each start (2.1.332)",
    ),
    switch(
        "DISABLE_AUTOUPDATER",
        "1",
        "a child must not replace its own program while it runs",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_FAST_MODE",
        "1",
        "fast mode always bills usage credits",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
        "1",
        "the person's MEMORY.md reaches the request otherwise (all versions)",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_CLAUDE_MDS",
        "1",
        "the same for CLAUDE.md and MEMORY.md",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS",
        "1",
        "the host's prompt is the only prompt",
    ),
    switch(
        "CLAUDE_CODE_SILENT_TURN_REMINDER",
        "0",
        "system messages appear every five tool rounds otherwise (2.1.332)",
    ),
    switch(
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER",
        "off",
        "a changing token count defeats the prompt cache (default on 2.1.283 and 2.1.287)",
    ),
    switch(
        "CLAUDE_CODE_TODO_REMINDER_MODE",
        "off",
        "the host has its own tools and reminders",
    ),
    switch("DISABLE_COMPACT", "1", "the host owns compaction"),
    switch("DISABLE_AUTO_COMPACT", "1", "the host owns compaction"),
    switch(
        "ENABLE_TOOL_SEARCH",
        "false",
        "tools are deferred or followed by a placeholder tool otherwise (2.1.310, 2.1.332)",
    ),
    switch(
        "CLAUDE_CODE_MAX_MCP_DESCRIPTION_LENGTH",
        "100000",
        "descriptions are cut at 4,096 characters otherwise (2.1.332)",
    ),
    switch(
        "MCP_PROTOCOL_NEGOTIATION",
        "legacy",
        "skips a probe that costs 3 s when it stays unanswered (2.1.332)",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK",
        "1",
        "a broken stream is asked for again otherwise: one request is one generation",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_REFUSAL_RETRY",
        "1",
        "a refusal is asked for again otherwise (2.1.332)",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_REFUSAL_FALLBACK",
        "1",
        "a refusal is asked for again from another model otherwise (2.1.332)",
    ),
];

/// Set for the processes of relay and replay as well.
pub const RELAY: &[Switch] = &[
    switch(
        "CLAUDE_CODE_MAX_RETRIES",
        "0",
        "one request is one generation; retrying is the host's",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "1",
        "no feature flags can change the isolation; these processes are never asked for get_usage, which this empties",
    ),
    switch(
        "CLAUDE_CODE_DISABLE_ATTACHMENTS",
        "1",
        "the CLI adds nothing to what is said and reads no file that a text names, and removed tools leave the body (2.1.332)",
    ),
    switch(
        "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE",
        "50000000",
        "the CLI refuses locally near the window by an estimate of its own (2.1.332); the service knows",
    ),
];

/// Set for the pool's processes as well. They answer `get_usage`, so their account traffic is left on.
pub const POOL: &[Switch] = &[
    switch(
        "CLAUDE_CODE_MAX_RETRIES",
        "0",
        "one request of the host is one request of the CLI; retrying is the host's",
    ),
    switch(
        "MAX_MCP_OUTPUT_TOKENS",
        "250000",
        "bounds a result whose tool has no size of its own; ours have one, which goes before it (2.1.332)",
    ),
];

/// The environment of one child. `Debug` prints names only.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<OsString, OsString>);

/// What the base of a child's environment depends on.
#[derive(Clone, Copy, Debug)]
pub struct Base<'a> {
    /// The executable that will be started; its folder leads the child's search path, so that a script finds the `node`
    /// that it was installed with.
    pub program: &'a Path,
    /// The private directory for temporary files. The CLI opens a socket for messages from other sessions in it.
    pub tmp: &'a Path,
    /// The session's time zone; `None` inherits ours.
    pub time_zone: Option<&'a str>,
    /// What to do about credentials.
    pub inherited: InheritedCredentials,
}

impl Environment {
    /// What a child inherits, and the switches of [`EVERYWHERE`].
    ///
    /// # Errors
    ///
    /// `inherited_credentials`, naming the variable, when that is the policy.
    pub fn build(ours: &Snapshot, base: Base<'_>) -> Result<Self> {
        if base.inherited == InheritedCredentials::Refuse {
            refuse_credentials(ours)?;
        }
        let mut child = Self::default();
        for (name, _) in INHERITED {
            if let Some(value) = ours.get(name) {
                child.set(name, value);
            }
        }
        for (name, value) in &ours.0 {
            if name.as_encoded_bytes().starts_with(b"LC_") && !value.is_empty() {
                child.set(name, value);
            }
        }
        child.set("PATH", search_path(ours, base.program));
        child.set("TMPDIR", base.tmp);
        match base.time_zone.map(OsStr::new).or(ours.get("TZ")) {
            Some(zone) if !zone.is_empty() => child.set("TZ", zone),
            _ => {}
        }
        for name in ["NO_PROXY", "no_proxy"] {
            child.set(name, no_proxy(ours));
        }
        child.apply(EVERYWHERE);
        Ok(child)
    }

    /// Adds switches.
    pub fn apply(&mut self, switches: &[Switch]) {
        for switch in switches {
            self.set(switch.name, switch.value);
        }
    }

    pub(super) fn set(&mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) {
        self.0.insert(name.as_ref().into(), value.as_ref().into());
    }

    /// One value.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(OsStr::new(name)).map(OsString::as_os_str)
    }

    /// The names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &OsStr> {
        self.0.keys().map(OsString::as_os_str)
    }

    /// All pairs, sorted by name.
    pub fn into_pairs(self) -> Vec<(OsString, OsString)> {
        self.0.into_iter().collect()
    }
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

fn refuse_credentials(ours: &Snapshot) -> Result<()> {
    match REFUSED_NAMES.iter().find(|name| ours.get(name).is_some()) {
        None => Ok(()),
        Some(name) => Err(Error::new(
            ErrorCode::InheritedCredentials,
            format!("{name} is set"),
        )),
    }
}

/// Ours with the program's own folder in front.
fn search_path(ours: &Snapshot, program: &Path) -> OsString {
    let inherited = ours.get("PATH").unwrap_or(OsStr::new(DEFAULT_PATH));
    let folder = program.parent().filter(|folder| folder.is_absolute());
    let rest = std::env::split_paths(inherited).filter(|entry| Some(entry.as_path()) != folder);
    let all = folder.map(Path::to_owned).into_iter().chain(rest);
    // Joining fails only for a folder with a colon in its name, which no search path can hold.
    std::env::join_paths(all).unwrap_or_else(|_| inherited.to_owned())
}

/// Both spellings of ours, merged, with loopback; `*` stays alone, since some readers take it only so.
fn no_proxy(ours: &Snapshot) -> String {
    let values =
        ["NO_PROXY", "no_proxy"].map(|name| ours.get(name).unwrap_or_default().to_string_lossy());
    let own = values
        .iter()
        .flat_map(|value| value.split([',', ' ', '\t']));
    let mut entries: Vec<&str> = Vec::new();
    for entry in own.chain(LOOPBACK).filter(|entry| !entry.is_empty()) {
        if entry == "*" {
            return "*".to_owned();
        }
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    entries.join(",")
}

#[cfg(test)]
#[path = "environment_tests.rs"]
mod tests;
