//! The shapes of the records, field by field as far as anything reads them.

use std::fmt;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::read;
use crate::wire::lenient;
use crate::wire::messages::{Message, usage_or_none};
use crate::wire::text::Text;
use crate::wire::usage::Usage;

/// A `system` record.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum System<'a> {
    /// `init`: printed at the start of each turn, when its user line has been taken, and never before one.
    Init(Box<Init<'a>>),
    /// `status`: what the CLI does (`requesting`), or a changed permission mode.
    Status {
        /// `requesting` or null.
        status: Option<Text<'a>>,
        /// The new permission mode.
        permission_mode: Option<Text<'a>>,
    },
    /// `api_retry`: a request failed and will be made again.
    ApiRetry {
        /// Number of the coming attempt, from 1.
        attempt: Option<u64>,
        /// How many there will be at most.
        max_retries: Option<u64>,
        /// How long the CLI waits before it.
        retry_delay_ms: Option<f64>,
        /// The HTTP status that failed; null when there was none.
        error_status: Option<u16>,
        /// The CLI's word for the error.
        error: Option<Text<'a>>,
    },
    /// `thinking_tokens`: an estimate while thinking streams.
    ThinkingTokens {
        /// Tokens so far.
        estimated_tokens: Option<u64>,
    },
    /// `permission_denied`: a call that the CLI refused by itself.
    PermissionDenied {
        /// The call.
        tool_use_id: Option<Text<'a>>,
        /// The tool.
        tool_name: Option<Text<'a>>,
        /// Why: `mode`, `rule`, ...
        decision_reason_type: Option<Text<'a>>,
    },
    /// `informational`: a sentence for a person.
    Informational {
        /// The sentence.
        content: Option<Text<'a>>,
        /// `notice`, `warning`, ...
        level: Option<Text<'a>>,
    },
    /// `notification`: a sentence that the CLI shows for a moment; that credits are used now is among them.
    Notification {
        /// The sentence.
        text: Option<Text<'a>>,
    },
    /// `model_fallback`, `model_refusal_fallback`, `model_refusal_no_fallback`: another model answers, or none does.
    ModelFallback {
        /// The subtype as it came.
        subtype: Text<'a>,
        /// Why, in the CLI's words, such as `model_not_found`.
        trigger: Option<Text<'a>>,
        /// The model that was asked.
        original_model: Option<Text<'a>>,
        /// The model that answers; `None` if none does.
        fallback_model: Option<Text<'a>>,
        /// Uuids of `assistant` records that no longer count.
        retracted_message_uuids: Vec<Text<'a>>,
    },
    /// `background_tasks_changed`: nothing to a program without background tasks.
    BackgroundTasksChanged,
    /// A subtype that is new, or none.
    Unknown {
        /// Its name; empty if there is none.
        subtype: Text<'a>,
    },
}

impl<'a> System<'a> {
    pub(super) fn read(line: &'a [u8], subtype: Option<Text<'a>>) -> Result<Self, String> {
        let subtype = subtype.unwrap_or_default();
        if subtype == "init" {
            return Ok(Self::Init(read(line)?));
        }
        // All other subtypes only inform, so a field of the wrong type is an absent one.
        let flat: FlatSystem<'a> = read(line)?;
        Ok(match subtype.as_str() {
            "status" => Self::Status {
                status: flat.status,
                permission_mode: flat.permission_mode,
            },
            "api_retry" => Self::ApiRetry {
                attempt: flat.attempt,
                max_retries: flat.max_retries,
                retry_delay_ms: flat.retry_delay_ms,
                error_status: flat.error_status,
                error: flat.error,
            },
            "thinking_tokens" => Self::ThinkingTokens {
                estimated_tokens: flat.estimated_tokens,
            },
            "permission_denied" => Self::PermissionDenied {
                tool_use_id: flat.tool_use_id,
                tool_name: flat.tool_name,
                decision_reason_type: flat.decision_reason_type,
            },
            "informational" => Self::Informational {
                content: flat.content,
                level: flat.level,
            },
            "notification" => Self::Notification { text: flat.text },
            "model_fallback" | "model_refusal_fallback" | "model_refusal_no_fallback" => {
                Self::ModelFallback {
                    subtype,
                    trigger: flat.trigger,
                    original_model: flat.original_model,
                    fallback_model: flat.fallback_model,
                    retracted_message_uuids: flat.retracted_message_uuids,
                }
            }
            "background_tasks_changed" => Self::BackgroundTasksChanged,
            _ => Self::Unknown { subtype },
        })
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FlatSystem<'a> {
    #[serde(borrow, deserialize_with = "lenient::word")]
    status: Option<Text<'a>>,
    #[serde(borrow, rename = "permissionMode", deserialize_with = "lenient::word")]
    permission_mode: Option<Text<'a>>,
    #[serde(deserialize_with = "lenient::option")]
    attempt: Option<u64>,
    #[serde(deserialize_with = "lenient::option")]
    max_retries: Option<u64>,
    #[serde(deserialize_with = "lenient::option")]
    retry_delay_ms: Option<f64>,
    #[serde(deserialize_with = "lenient::status")]
    error_status: Option<u16>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    error: Option<Text<'a>>,
    #[serde(deserialize_with = "lenient::option")]
    estimated_tokens: Option<u64>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    tool_use_id: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    tool_name: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    decision_reason_type: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    content: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    level: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    text: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    trigger: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    original_model: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::word")]
    fallback_model: Option<Text<'a>>,
    #[serde(borrow, deserialize_with = "lenient::list")]
    retracted_message_uuids: Vec<Text<'a>>,
}

/// `system/init`. Lists that a check needs are `None` when the record does not have them, which is not the same as empty.
///
/// Read strictly: a list that is no list makes the record malformed, so that no check passes on what it could not see.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Init<'a> {
    /// Names of all tools that the model is offered.
    #[serde(borrow)]
    pub tools: Option<Vec<Named<'a>>>,
    /// MCP servers with their status. A server can be `connected` and still have lost its whole list, so `tools` decides.
    #[serde(borrow)]
    pub mcp_servers: Option<Vec<McpServer<'a>>>,
    /// The model by its resolved id.
    #[serde(borrow)]
    pub model: Option<Text<'a>>,
    /// `dontAsk`, ...
    #[serde(borrow, rename = "permissionMode")]
    pub permission_mode: Option<Text<'a>>,
    /// Commands that text could trigger.
    #[serde(borrow)]
    pub slash_commands: Option<Vec<Named<'a>>>,
    /// `none`, or the variable that a key came from. `none` alone proves nothing: it is also there with a token variable.
    #[serde(borrow, rename = "apiKeySource")]
    pub api_key_source: Option<Text<'a>>,
    /// The version that runs.
    #[serde(borrow)]
    pub claude_code_version: Option<Text<'a>>,
    /// Plugins that are loaded.
    #[serde(borrow)]
    pub plugins: Option<Vec<Named<'a>>>,
    /// Skills that are loaded.
    #[serde(borrow)]
    pub skills: Option<Vec<Named<'a>>>,
    /// Agents that are known; five built-in ones stay whatever the flags.
    #[serde(borrow)]
    pub agents: Option<Vec<Named<'a>>>,
    /// What this version can do, by name.
    #[serde(borrow)]
    pub capabilities: Option<Vec<Named<'a>>>,
    /// Errors of MCP servers, in whatever form.
    #[serde(borrow)]
    pub mcp_server_errors: Option<&'a RawValue>,
    /// Errors of plugins, in whatever form.
    #[serde(borrow)]
    pub plugin_errors: Option<&'a RawValue>,
    /// The CLI's session, constant over the process.
    #[serde(borrow)]
    pub session_id: Option<Text<'a>>,
    /// Whether the CLI believes that it talks to Anthropic directly (from 2.1.332 on; false behind a loopback base URL).
    pub served_by_anthropic: Option<bool>,
    /// `default`, ...
    #[serde(borrow)]
    pub output_style: Option<Text<'a>>,
    /// Present only while the CLI's own memory is on.
    #[serde(borrow)]
    pub memory_paths: Option<&'a RawValue>,
    /// `on`, `off`, ...
    #[serde(borrow)]
    pub fast_mode_state: Option<Text<'a>>,
    /// The socket on which other sessions could send messages to this one.
    #[serde(borrow)]
    pub messaging_socket_path: Option<Text<'a>>,
}

impl Init<'_> {
    /// Whether the CLI names errors of MCP servers or plugins.
    pub fn has_load_errors(&self) -> bool {
        let lists = [self.mcp_server_errors, self.plugin_errors];
        lists
            .into_iter()
            .flatten()
            .any(|list| !matches!(list.get(), "[]" | "{}" | "null"))
    }
}

/// An entry of a list: a plain name, or an object with a `name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named<'a> {
    /// The name; empty for an entry in a form that is new, which counts all the same.
    pub name: Text<'a>,
    /// Where it comes from, such as `cc-plugin-privacy@builtin` for a plugin.
    pub source: Option<Text<'a>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Named<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Entry<'a> {
            #[serde(borrow, deserialize_with = "lenient::word")]
            name: Option<Text<'a>>,
            #[serde(borrow, deserialize_with = "lenient::word")]
            source: Option<Text<'a>>,
        }
        let raw = <&RawValue>::deserialize(deserializer)?;
        if let Some(name) = lenient::parse(raw) {
            return Ok(Self { name, source: None });
        }
        let entry: Entry<'a> = lenient::parse(raw).unwrap_or_default();
        Ok(Self {
            name: entry.name.unwrap_or_default(),
            source: entry.source,
        })
    }
}

/// An MCP server in `init`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct McpServer<'a> {
    /// Its name.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub name: Option<Text<'a>>,
    /// `connected`, `failed`, `pending`, `disabled`.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub status: Option<Text<'a>>,
    /// `dynamic` from a config, `sdk` in-band.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub source: Option<Text<'a>>,
}

/// An `assistant` record: one block of a message, or a message that the CLI wrote itself.
#[derive(Debug, Clone, Deserialize)]
pub struct Assistant<'a> {
    /// The message. Its usage is that of `message_start`; output tokens are final only in `message_delta`.
    #[serde(borrow)]
    pub message: Message<'a>,
    /// The record's uuid, which is its uuid in the transcript too and a target for resuming.
    #[serde(borrow, default)]
    pub uuid: Option<Text<'a>>,
    /// The CLI's session.
    #[serde(borrow, default)]
    pub session_id: Option<Text<'a>>,
    /// The call whose sub-agent produced it.
    #[serde(borrow, default)]
    pub parent_tool_use_id: Option<Text<'a>>,
    /// The API's request id.
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub request_id: Option<Text<'a>>,
    /// The CLI's word for an error: `rate_limit`, `authentication_failed`, ...
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub error: Option<Text<'a>>,
    /// Whether the text is an error and no answer.
    #[serde(default, deserialize_with = "lenient::flag")]
    pub is_api_error_message: bool,
    /// A finer word: `usage_limit_reached`, `connection_failed`, ...
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub api_error: Option<Text<'a>>,
    /// The HTTP status.
    #[serde(default, deserialize_with = "lenient::status")]
    pub api_error_status: Option<u16>,
    /// The API's own kind: `rate_limit_error`, ...
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub api_error_type: Option<Text<'a>>,
    /// More about the error, such as `rate_limit_info`.
    #[serde(borrow, default)]
    pub api_error_params: Option<&'a RawValue>,
    /// Whether an interrupt cut this message off.
    #[serde(default, deserialize_with = "lenient::flag")]
    pub aborted: bool,
    /// Uuids of earlier records that this one replaces.
    #[serde(borrow, default, deserialize_with = "lenient::list")]
    pub supersedes: Vec<Text<'a>>,
    /// The API message that was refused.
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub refused_message_id: Option<Text<'a>>,
    /// There if the CLI answered a command by itself.
    #[serde(borrow, default)]
    pub local_command_source: Option<&'a RawValue>,
    /// Uuid of the user line that it answers.
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub user_message_uuid: Option<Text<'a>>,
}

/// A `user` record: results of tools, or a text that the CLI put into the conversation.
#[derive(Debug, Clone, Deserialize)]
pub struct User<'a> {
    /// The message.
    #[serde(borrow)]
    pub message: Message<'a>,
    /// The record's uuid, which is its uuid in the transcript too.
    #[serde(borrow, default)]
    pub uuid: Option<Text<'a>>,
    /// The CLI's session.
    #[serde(borrow, default)]
    pub session_id: Option<Text<'a>>,
    /// The call whose sub-agent produced it.
    #[serde(borrow, default)]
    pub parent_tool_use_id: Option<Text<'a>>,
    /// The CLI wrote this text to go on by itself; a generation that nobody asked for follows.
    #[serde(default, rename = "isSynthetic", deserialize_with = "lenient::flag")]
    pub is_synthetic: bool,
    /// An echo of a line that we wrote, or of a command.
    #[serde(default, rename = "isReplay", deserialize_with = "lenient::flag")]
    pub is_replay: bool,
    /// The CLI asks again after a refusal.
    #[serde(default, deserialize_with = "lenient::flag")]
    pub refusal_retry: bool,
    /// The API message that was refused.
    #[serde(borrow, default, deserialize_with = "lenient::word")]
    pub refused_message_id: Option<Text<'a>>,
    /// How each result came about: permission decision, or why the tool did not run.
    #[serde(borrow, default)]
    pub tool_result_meta: Option<&'a RawValue>,
}

/// A `result` record. Whether the turn succeeded is what [`verdict`](Self::verdict) says, never `subtype` alone.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ResultRecord<'a> {
    /// `success` also for failures; `error_during_execution`, `error_max_turns`.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub subtype: Option<Text<'a>>,
    /// Whether the turn failed; `None` if the record does not say or says it in another form.
    #[serde(deserialize_with = "lenient::option")]
    pub is_error: Option<bool>,
    /// `completed`, `api_error`, `aborted_streaming`, ...; absent when no turn ran.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub terminal_reason: Option<Text<'a>>,
    /// A finer word for the error.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub api_error: Option<Text<'a>>,
    /// The HTTP status.
    #[serde(deserialize_with = "lenient::status")]
    pub api_error_status: Option<u16>,
    /// The API's own kind.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub api_error_type: Option<Text<'a>>,
    /// Stop reason of the last message; `stop_sequence` when the CLI wrote that itself.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub stop_reason: Option<Text<'a>>,
    /// Text of the last message, or the CLI's sentence about the error.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub result: Option<Text<'a>>,
    /// Sentences about what went wrong.
    #[serde(borrow, deserialize_with = "lenient::list")]
    pub errors: Vec<Text<'a>>,
    /// Rounds, tools included; 0 when no turn ran.
    #[serde(deserialize_with = "lenient::option")]
    pub num_turns: Option<u64>,
    /// Calls that were refused.
    #[serde(borrow, deserialize_with = "lenient::list")]
    pub permission_denials: Vec<PermissionDenial<'a>>,
    /// Sum over all requests of the turn; a cross-check, not the counters of a message.
    #[serde(deserialize_with = "usage_or_none")]
    pub usage: Usage,
    /// Counters by model, cumulative over the process.
    #[serde(borrow, rename = "modelUsage")]
    pub model_usage: Option<&'a RawValue>,
    /// The CLI's session.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub session_id: Option<Text<'a>>,
    /// Uuid of the user line that the turn was for, if it had one.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub user_message_uuid: Option<Text<'a>>,
    /// The same for several lines.
    #[serde(borrow, deserialize_with = "lenient::list")]
    pub user_message_uuids: Vec<Text<'a>>,
    /// Lines that still wait.
    #[serde(deserialize_with = "lenient::option")]
    pub queued_turn_count: Option<u64>,
}

/// A call that the CLI refused.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PermissionDenial<'a> {
    /// The tool.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub tool_name: Option<Text<'a>>,
    /// The call.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub tool_use_id: Option<Text<'a>>,
}

/// `command_lifecycle`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CommandLifecycle<'a> {
    /// Uuid of the user line.
    #[serde(borrow)]
    pub command_uuid: Text<'a>,
    /// `queued`, `started`, `completed`, `cancelled`. A cancelled line gets no `result`.
    #[serde(borrow)]
    pub state: Text<'a>,
}

/// `tool_progress`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ToolProgress<'a> {
    /// The call; `tool_use_id` is an id of the heartbeat.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub parent_tool_use_id: Option<Text<'a>>,
    /// The tool.
    #[serde(borrow, deserialize_with = "lenient::word")]
    pub tool_name: Option<Text<'a>>,
    /// How long it has run.
    #[serde(deserialize_with = "lenient::option")]
    pub elapsed_time_seconds: Option<f64>,
}

/// What a `control_response` says.
#[derive(Clone)]
pub enum ControlOutcome<'a> {
    /// It worked.
    Success {
        /// The payload, if there is one. That of `mcp_status` holds the bearer of our own server.
        response: Option<&'a RawValue>,
    },
    /// It did not.
    Error {
        /// A sentence.
        error: Text<'a>,
        /// `unsupported_request`, `not_found`, ...
        error_code: Option<Text<'a>>,
    },
}

impl fmt::Debug for ControlOutcome<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Success { response: None } => f.write_str("Success"),
            Self::Success {
                response: Some(response),
            } => write!(f, "Success({} bytes)", response.get().len()),
            Self::Error { error, error_code } => f
                .debug_struct("Error")
                .field("error", error)
                .field("error_code", error_code)
                .finish(),
        }
    }
}

impl<'a> ControlOutcome<'a> {
    pub(super) fn read(line: &'a [u8]) -> Result<(Text<'a>, Self), String> {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(borrow)]
            response: Response<'a>,
        }
        #[derive(Deserialize)]
        struct Response<'a> {
            #[serde(borrow)]
            subtype: Text<'a>,
            #[serde(borrow)]
            request_id: Text<'a>,
            #[serde(borrow, default)]
            response: Option<&'a RawValue>,
            #[serde(borrow, default, deserialize_with = "lenient::word")]
            error: Option<Text<'a>>,
            #[serde(borrow, default, deserialize_with = "lenient::word")]
            error_code: Option<Text<'a>>,
        }
        let Line { response } = read(line)?;
        let outcome = match response.subtype.as_str() {
            "success" => Self::Success {
                response: response.response,
            },
            // A subtype that is new is no success that we could vouch for.
            other => Self::Error {
                error: response
                    .error
                    .unwrap_or_else(|| format!("the CLI answered with {other}").into()),
                error_code: response.error_code,
            },
        };
        Ok((response.request_id, outcome))
    }
}

/// What the CLI asks in a `control_request`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum CliRequest<'a> {
    /// `mcp_message`: a JSON-RPC message for an in-band MCP server.
    McpMessage {
        /// The server's name.
        server_name: Text<'a>,
        /// The message.
        message: &'a RawValue,
    },
    /// Anything else, to be answered as unsupported.
    Other {
        /// Its name.
        subtype: Text<'a>,
    },
}

impl<'a> CliRequest<'a> {
    pub(super) fn read(line: &'a [u8]) -> Result<(Text<'a>, Self), String> {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(borrow)]
            request_id: Text<'a>,
            #[serde(borrow)]
            request: Request<'a>,
        }
        #[derive(Deserialize)]
        struct Request<'a> {
            #[serde(borrow)]
            subtype: Text<'a>,
            #[serde(borrow, default)]
            server_name: Option<Text<'a>>,
            #[serde(borrow, default)]
            message: Option<&'a RawValue>,
        }
        let line: Line<'a> = read(line)?;
        let Request {
            subtype,
            server_name,
            message,
        } = line.request;
        let request = match (subtype.as_str(), server_name, message) {
            ("mcp_message", Some(server_name), Some(message)) => Self::McpMessage {
                server_name,
                message,
            },
            _ => Self::Other { subtype },
        };
        Ok((line.request_id, request))
    }
}
