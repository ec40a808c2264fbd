//! A tool server as the CLI's configuration names it.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::MCP_SERVER;
use crate::secret::Secret;

/// A tool server that the CLI is told of.
#[derive(Clone, Debug)]
pub enum McpServer {
    /// A program that the CLI starts; it becomes a member of the CLI's process group.
    Stdio {
        /// The program, absolute.
        command: PathBuf,
        /// Its arguments. They are visible to every user of the machine.
        args: Vec<String>,
        /// Variables on top of those of the CLI.
        env: Vec<(String, String)>,
    },
    /// Our own listener on loopback.
    Http {
        /// Its address.
        url: String,
        /// The bearer that it asks for.
        bearer: Secret,
        /// Longest time of one call. The CLI gives up after 60 s without it (2.1.332).
        timeout_ms: u64,
    },
}

impl McpServer {
    pub(super) fn config(&self) -> Value {
        let entry = match self {
            Self::Stdio { command, args, env } => json!({
                "type": "stdio",
                "command": command.to_string_lossy(),
                "args": args,
                "env": env.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            }),
            Self::Http {
                url,
                bearer,
                timeout_ms,
            } => json!({
                "type": "http",
                "url": url,
                "headers": {"Authorization": format!("Bearer {}", bearer.expose_str())},
                "timeout": timeout_ms,
            }),
        };
        json!({"mcpServers": {MCP_SERVER: entry}})
    }
}
