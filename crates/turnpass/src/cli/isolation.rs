//! Whether the CLI loaded what it was told to load and nothing else. Pure.
//!
//! `apiKeySource: "none"` alone proves nothing (it is also "none" with a token variable), so it counts together with the
//! scrubbed environment and the sign-in check.

use crate::error::{Error, ErrorCode};
use crate::tools::check_tools;
use crate::wire::stream_json::{Init, Named};

/// The permission mode that every launch asks for.
const PERMISSION_MODE: &str = "dontAsk";
/// How built-in plugins are named; they load whatever the setting sources say (from 2.1.287 on).
const BUILTIN_SUFFIX: &str = "@builtin";
/// Most names that an error lists.
const NAMED_LIMIT: usize = 8;

/// What the first record of a turn has to show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The tool server of this launch, if it has one.
    pub(crate) server: Option<String>,
    /// The published names of its tools.
    pub(crate) tools: Vec<String>,
}

/// What was found.
#[derive(Clone, Debug)]
pub(crate) enum InitVerdict {
    /// As expected.
    Isolated,
    /// Only built-in plugins slipped through: start again with these disabled.
    BuiltinPlugins(Vec<String>),
    /// Anything else.
    Refused(Error),
}

/// Judges the first record of a turn.
pub(crate) fn judge(init: &Init<'_>, expected: &Expected) -> InitVerdict {
    match check(init, expected) {
        Err(error) => InitVerdict::Refused(error),
        Ok(plugins) if plugins.is_empty() => InitVerdict::Isolated,
        Ok(plugins) => InitVerdict::BuiltinPlugins(plugins),
    }
}

fn check(init: &Init<'_>, expected: &Expected) -> Result<Vec<String>, Error> {
    let missing = |field: &str| {
        Error::new(
            ErrorCode::ProtocolInit,
            format!("the first record has no {field}"),
        )
    };
    if init.model.as_deref().is_none_or(str::is_empty) {
        return Err(missing("model"));
    }
    check_key(
        init.api_key_source
            .as_deref()
            .ok_or_else(|| missing("apiKeySource"))?,
    )?;
    check_mode(
        init.permission_mode
            .as_deref()
            .ok_or_else(|| missing("permissionMode"))?,
    )?;
    check_servers(init, expected)?;
    let tools = init.tools.as_ref().ok_or_else(|| missing("tools"))?;
    let names = tools.iter().map(|tool| tool.name.as_str());
    check_tools(names, expected.tools.iter().map(String::as_str)).into_result()?;
    let commands = init
        .slash_commands
        .as_ref()
        .ok_or_else(|| missing("slash_commands"))?;
    check_empty("commands", commands)?;
    check_empty(
        "skills",
        init.skills.as_ref().ok_or_else(|| missing("skills"))?,
    )?;
    check_plugins(init.plugins.as_ref().ok_or_else(|| missing("plugins"))?)
}

fn check_key(source: &str) -> Result<(), Error> {
    if source == "none" {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::IsolationAuth,
        format!("the CLI takes a key from {}", shown(source)),
    ))
}

fn check_mode(mode: &str) -> Result<(), Error> {
    if mode == PERMISSION_MODE {
        return Ok(());
    }
    let what = format!(
        "the permission mode is {} instead of {PERMISSION_MODE}",
        shown(mode)
    );
    Err(Error::new(ErrorCode::IsolationPermissions, what))
}

fn check_servers(init: &Init<'_>, expected: &Expected) -> Result<(), Error> {
    if init.has_load_errors() {
        let what = "the CLI reports an error of its MCP configuration or plugins";
        return Err(Error::new(ErrorCode::McpStartup, what));
    }
    let servers = init.mcp_servers.as_deref().unwrap_or_default();
    let foreign = servers
        .iter()
        .find(|server| server.name.as_deref() != expected.server.as_deref());
    if let Some(foreign) = foreign {
        let what = format!(
            "the MCP server {} is loaded",
            shown(foreign.name.as_deref().unwrap_or("without a name"))
        );
        return Err(Error::new(ErrorCode::IsolationMcp, what));
    }
    match (&expected.server, servers) {
        (None, _) => Ok(()),
        (Some(_), [server]) if server.status.as_deref() == Some("connected") => Ok(()),
        (Some(name), [server]) => {
            let status = server.status.as_deref().unwrap_or("unknown");
            Err(Error::new(
                ErrorCode::McpStartup,
                format!("the tool server {name} is {}", shown(status)),
            ))
        }
        (Some(name), _) => Err(Error::new(
            ErrorCode::McpStartup,
            format!("the tool server {name} is not loaded once"),
        )),
    }
}

fn check_empty(what: &str, found: &[Named<'_>]) -> Result<(), Error> {
    if found.is_empty() {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::IsolationCustomizations,
        format!("{what} are active: {}", list(found)),
    ))
}

/// The built-in plugins that are active; any other one is an error.
fn check_plugins(found: &[Named<'_>]) -> Result<Vec<String>, Error> {
    let id = |plugin: &Named<'_>| plugin.source.as_deref().unwrap_or(&plugin.name).to_owned();
    let (builtin, foreign): (Vec<_>, Vec<_>) = found
        .iter()
        .partition(|plugin| id(plugin).ends_with(BUILTIN_SUFFIX));
    if foreign.is_empty() {
        return Ok(builtin.into_iter().map(id).collect());
    }
    let what = format!("plugins are active: {}", list(found));
    Err(Error::new(ErrorCode::IsolationCustomizations, what))
}

fn list(found: &[Named<'_>]) -> String {
    let names: Vec<_> = found
        .iter()
        .take(NAMED_LIMIT)
        .map(|named| shown(&named.name))
        .collect();
    names.join(", ")
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn expected() -> Expected {
        Expected {
            server: Some("turnpass".into()),
            tools: vec!["mcp__turnpass__read".into()],
        }
    }

    fn init() -> Value {
        json!({
            "type": "system", "subtype": "init", "model": "m", "apiKeySource": "none", "permissionMode": "dontAsk",
            "tools": ["mcp__turnpass__read"], "slash_commands": [], "skills": [], "plugins": [],
            "mcp_servers": [{"name": "turnpass", "status": "connected", "source": "sdk"}],
        })
    }

    fn verdict(value: &Value) -> InitVerdict {
        let text = value.to_string();
        judge(&serde_json::from_str(&text).unwrap(), &expected())
    }

    fn code(change: impl FnOnce(&mut Value)) -> ErrorCode {
        let mut value = init();
        change(&mut value);
        match verdict(&value) {
            InitVerdict::Refused(error) => error.code(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_asked_for_is_accepted() {
        assert!(matches!(verdict(&init()), InitVerdict::Isolated));
    }

    #[test]
    fn every_other_state_has_its_code() {
        assert_eq!(
            code(|v| v["apiKeySource"] = json!("ANTHROPIC_API_KEY")),
            ErrorCode::IsolationAuth
        );
        assert_eq!(
            code(|v| v["permissionMode"] = json!("default")),
            ErrorCode::IsolationPermissions
        );
        assert_eq!(
            code(|v| v["slash_commands"] = json!(["help"])),
            ErrorCode::IsolationCustomizations
        );
        assert_eq!(
            code(|v| v["skills"] = json!(["x"])),
            ErrorCode::IsolationCustomizations
        );
        assert_eq!(
            code(|v| v["plugins"] = json!([{"name": "mine", "source": "mine@market"}])),
            ErrorCode::IsolationCustomizations
        );
        assert_eq!(code(|v| v["model"] = json!("")), ErrorCode::ProtocolInit);
        for field in [
            "model",
            "apiKeySource",
            "permissionMode",
            "tools",
            "slash_commands",
            "skills",
            "plugins",
        ] {
            assert_eq!(
                code(|v| drop(v.as_object_mut().unwrap().remove(field))),
                ErrorCode::ProtocolInit,
                "{field}"
            );
        }
    }

    #[test]
    fn bug_039_an_executing_tool_fails_closed_and_a_harmless_one_does_not() {
        assert_eq!(
            code(|v| v["tools"] = json!(["mcp__turnpass__read", "Bash"])),
            ErrorCode::IsolationTools
        );
        let mut value = init();
        value["tools"] = json!(["mcp__turnpass__read", "EndConversation"]);
        assert!(matches!(verdict(&value), InitVerdict::Isolated));
    }

    #[test]
    fn bug_040_and_063_a_server_that_is_missing_pending_or_failed_is_a_start_error() {
        for servers in [
            json!([]),
            json!([{"name": "turnpass", "status": "pending"}]),
            json!([{"name": "turnpass", "status": "failed"}]),
        ] {
            assert_eq!(code(|v| v["mcp_servers"] = servers), ErrorCode::McpStartup);
        }
        assert_eq!(
            code(|v| v["mcp_server_errors"] = json!([{"name": "turnpass"}])),
            ErrorCode::McpStartup
        );
        assert_eq!(code(|v| v["tools"] = json!([])), ErrorCode::McpStartup);
        let two = json!([{"name": "turnpass", "status": "connected"}, {"name": "mine", "status": "connected"}]);
        assert_eq!(code(|v| v["mcp_servers"] = two), ErrorCode::IsolationMcp);
    }

    #[test]
    fn built_in_plugins_are_learned() {
        let mut value = init();
        value["plugins"] = json!([{"name": "cc-plugin-x", "source": "cc-plugin-x@builtin"}]);
        assert!(
            matches!(verdict(&value), InitVerdict::BuiltinPlugins(names) if names == ["cc-plugin-x@builtin"])
        );
        value["plugins"] = json!(["cc-plugin-x@builtin"]);
        assert!(matches!(verdict(&value), InitVerdict::BuiltinPlugins(_)));
        value["plugins"] =
            json!([{"name": "a", "source": "a@builtin"}, {"name": "b", "source": "b@market"}]);
        assert!(matches!(verdict(&value), InitVerdict::Refused(_)));
    }
}
