//! What the CLI answers to control requests, as far as we read it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::wire::lenient;
use crate::wire::stream_json::ControlOutcome;

/// Why an answer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// The CLI refused.
    #[error("the CLI refused the control request: {error}")]
    Refused {
        /// Its sentence.
        error: String,
        /// `unsupported_request`, `not_found`, ...
        error_code: Option<String>,
    },
    /// The answer lacks what it is for.
    #[error("the CLI's answer to the control request is malformed: {problem}")]
    Malformed {
        /// What serde said; it names fields and types.
        problem: String,
    },
}

/// Reads the answer to a control request as a `T`, one of this module's replies or a type of the caller. No payload reads as null.
///
/// # Errors
///
/// [`ReplyError`].
pub fn read_reply<'a, T: Deserialize<'a>>(outcome: &ControlOutcome<'a>) -> Result<T, ReplyError> {
    match outcome {
        ControlOutcome::Success { response } => {
            let response = response.unwrap_or(RawValue::NULL);
            serde_json::from_str(response.get()).map_err(|error| ReplyError::Malformed {
                problem: error.to_string(),
            })
        }
        ControlOutcome::Error { error, error_code } => Err(ReplyError::Refused {
            error: error.to_string(),
            error_code: error_code.as_ref().map(ToString::to_string),
        }),
    }
}

/// Answer to `set_model`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SetModelReply {
    /// The model by its resolved id.
    pub model: String,
}

/// Answer to `interrupt`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct InterruptReply {
    /// Uuids of user lines that will still run.
    pub still_queued: Vec<String>,
    /// Uuids of user lines that were taken back: no request, no result, nothing in the history.
    #[serde(default)]
    pub cancelled: Vec<String>,
}

/// Answer to `rewind_conversation`. The whole text of the removed line, which it also holds, is not read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RewindReply {
    /// Whether the line and all after it are gone.
    pub rewound: bool,
    /// Why not: `turn_running`, `stale_target`, `target_not_found`.
    #[serde(default)]
    pub reason: Option<String>,
    /// Uuid of the line that is gone.
    #[serde(default, rename = "targetMessageUuid")]
    pub target_message_uuid: Option<String>,
    /// Uuid of the last `assistant` record that is left.
    #[serde(default, rename = "precedingAssistantUuid")]
    pub preceding_assistant_uuid: Option<String>,
}

/// Answer to `mcp_status`. The servers' configuration, which holds our own bearer, is not read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct McpStatusReply {
    /// The servers.
    #[serde(rename = "mcpServers")]
    pub servers: Vec<McpServerStatus>,
}

/// One MCP server in [`McpStatusReply`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct McpServerStatus {
    /// Its name.
    pub name: String,
    /// `pending`, `connected`, `failed`, `disabled`.
    pub status: String,
    /// `dynamic`, `sdk`, ...
    #[serde(default, deserialize_with = "lenient::option")]
    pub source: Option<String>,
    /// Its tools by their own names; `None` until it is connected.
    #[serde(default)]
    pub tools: Option<Vec<McpToolStatus>>,
}

/// One tool in [`McpServerStatus`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct McpToolStatus {
    /// Its name, without the server's.
    pub name: String,
}

/// Answer to `mcp_set_servers`, given when the servers are connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct McpSetServersReply {
    /// Names of servers that are new.
    pub added: Vec<String>,
    /// Names of servers that are gone.
    pub removed: Vec<String>,
    /// Sentences by the name of the server that failed.
    #[serde(default)]
    pub errors: BTreeMap<String, String>,
}
