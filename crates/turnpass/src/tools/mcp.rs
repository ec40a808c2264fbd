//! The MCP server core: one JSON-RPC message in, at most one out, and what the host has to know.
//!
//! Pure: the carriers bring the bytes. What it answers does not depend on the order of messages, since in-band with a
//! manifest the first message is already a `tools/call`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::catalogue::{Catalogue, CatalogueFile};
use super::result;
use crate::conversation::names::{Names, SERVER, shown};
use crate::conversation::{ToolInput, ToolResult, ToolUseId};

/// The protocol version that the CLI asks for (2.1.332), and ours for an unknown one.
pub const NEWEST_PROTOCOL: &str = "2025-11-25";

/// The versions whose messages for these five methods are the same; the asked one is answered.
pub const PROTOCOLS: [&str; 4] = [NEWEST_PROTOCOL, "2025-06-18", "2025-03-26", "2024-11-05"];

/// The key by which a call is paired with the model's tool use; there is no other.
pub const TOOL_USE_ID: &str = "claudecode/toolUseId";

/// What an inert server says to a call; the model never sees it, since the host runs the tool.
pub const INERT_ANSWER: &str = "The host program runs this tool itself; nothing was executed here.";

/// JSON-RPC error codes.
mod code {
    pub(super) const PARSE: i32 = -32700;
    pub(super) const INVALID_REQUEST: i32 = -32600;
    pub(super) const UNKNOWN_METHOD: i32 = -32601;
    pub(super) const INVALID_PARAMS: i32 = -32602;
    /// Ours: the call of a tool where only proposals are wanted.
    pub(super) const VIOLATION: i32 = -32001;
}

/// What happens to a `tools/call`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Pool: the host answers it.
    Answering,
    /// Replay: it is a violation that fails the request; an error is answered and nothing is executed.
    Proposing,
    /// Relay: a failed result says that the host runs tools itself.
    Inert,
}

impl Policy {
    /// The word on the command line of `mcp-stdio`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Answering => "answering",
            Self::Proposing => "proposing",
            Self::Inert => "inert",
        }
    }
}

/// The id of a JSON-RPC request as it stands on the wire: a number or a quoted text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RpcId(String);

impl RpcId {
    /// The JSON text.
    pub fn as_json(&self) -> &str {
        &self.0
    }
}

/// A call that waits for the host's answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// For [`Server::answer`].
    pub rpc_id: RpcId,
    /// The model's tool use. `None` when the CLI named none: the call cannot be paired, and the host has to fail it with
    /// [`Server::fail`] and say so.
    pub tool_use_id: Option<ToolUseId>,
    /// The host's name of the tool.
    pub tool: String,
    /// The arguments as the CLI repaired them; the host uses those of the model's own block where it has them.
    pub arguments: ToolInput,
    /// JSON of the token for [`Server::progress`].
    pub progress_token: Option<String>,
}

/// What the host has to know of a message.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Occurrence {
    /// Nothing.
    #[default]
    Nothing,
    /// The tools were listed: the CLI knows them once the reply has been written.
    Listed,
    /// A call that waits for an answer.
    Call(Call),
    /// A call where none may come; the tool's name as it was written.
    Violation(String),
    /// The CLI gave up waiting for the call of this id.
    Cancelled(RpcId),
}

/// What to write and what to know.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// One JSON-RPC message without line end; `None` for notifications, and for calls that the host answers later.
    pub message: Option<Vec<u8>>,
    /// What the host has to know.
    pub occurrence: Occurrence,
}

/// The server of one catalogue under one policy.
#[derive(Debug)]
pub struct Server {
    list: Box<RawValue>,
    names: Names,
    policy: Policy,
}

#[derive(Deserialize)]
struct Incoming<'a> {
    #[serde(borrow)]
    jsonrpc: Cow<'a, str>,
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
struct CallParams<'a> {
    #[serde(default)]
    name: Option<String>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow, rename = "_meta", default)]
    meta: Option<CallMeta<'a>>,
}

#[derive(Deserialize)]
struct CallMeta<'a> {
    #[serde(rename = "claudecode/toolUseId", default)]
    tool_use_id: Option<String>,
    #[serde(borrow, rename = "progressToken", default)]
    progress_token: Option<&'a RawValue>,
}

impl Server {
    /// The server of a catalogue.
    pub fn new(catalogue: &Catalogue, policy: Policy) -> Self {
        Self {
            list: catalogue.tools_list_json().to_owned(),
            names: catalogue.names().clone(),
            policy,
        }
    }

    /// The server of a catalogue file, for a process that answers nothing itself.
    pub fn from_file(file: CatalogueFile, policy: Policy) -> Self {
        Self {
            list: file.list,
            names: Names::default(),
            policy,
        }
    }

    /// Takes one message.
    ///
    /// Never fails: whatever cannot be understood is answered with a JSON-RPC error. The bytes have to be free of lone
    /// surrogates (`\ud83d` alone); the line reader sees to that.
    pub fn handle(&mut self, message: &[u8]) -> Reply {
        let Ok(incoming) = serde_json::from_slice::<Incoming<'_>>(message) else {
            return match serde_json::from_slice::<serde::de::IgnoredAny>(message) {
                Ok(_) => refusal("null", code::INVALID_REQUEST, "not a JSON-RPC 2.0 message"),
                Err(_) => refusal("null", code::PARSE, "not JSON"),
            };
        };
        let id = match incoming.id.map(RawValue::get) {
            None => None,
            Some(id)
                if id.starts_with(['"', '-']) || id.starts_with(|c: char| c.is_ascii_digit()) =>
            {
                Some(id)
            }
            Some(_) => {
                return refusal("null", code::INVALID_REQUEST, "the id is no text or number");
            }
        };
        if incoming.jsonrpc != "2.0" {
            return refusal(
                id.unwrap_or("null"),
                code::INVALID_REQUEST,
                "not JSON-RPC 2.0",
            );
        }
        match (incoming.method.as_deref(), id) {
            (Some(method), Some(id)) => self.request(method, id, incoming.params),
            (Some(method), None) => notification(method, incoming.params),
            // An answer; this server asks nothing.
            (None, _) => Reply::default(),
        }
    }

    fn request(&mut self, method: &str, id: &str, params: Option<&RawValue>) -> Reply {
        match method {
            "initialize" => said(id, &initialize_result(asked_protocol(params))),
            "ping" => said(id, "{}"),
            "tools/list" => self.list(id, params),
            "tools/call" => self.call(id, params),
            // Among them `server/discover`, for which the CLI waits 3 s if nobody answers (2.1.332, stdio).
            _ => refusal(id, code::UNKNOWN_METHOD, "method not found"),
        }
    }

    /// The whole list, always: a cursor is one that this server never gave.
    fn list(&self, id: &str, params: Option<&RawValue>) -> Reply {
        #[derive(Deserialize)]
        struct Params {
            #[serde(default)]
            cursor: Option<serde::de::IgnoredAny>,
        }
        let params = params.map(|params| serde_json::from_str::<Params>(params.get()));
        match params {
            Some(Ok(Params { cursor: Some(_) })) => {
                refusal(id, code::INVALID_PARAMS, "unknown cursor")
            }
            Some(Err(_)) => refusal(id, code::INVALID_PARAMS, "params are not an object"),
            _ => Reply {
                occurrence: Occurrence::Listed,
                ..said(id, self.list.get())
            },
        }
    }

    fn call(&self, id: &str, params: Option<&RawValue>) -> Reply {
        let params = params.map_or(Ok(CallParams::default()), |params| {
            serde_json::from_str::<CallParams<'_>>(params.get())
        });
        match self.policy {
            Policy::Proposing => {
                let name = params.ok().and_then(|params| params.name);
                Reply {
                    occurrence: Occurrence::Violation(shown(&name.unwrap_or_default())),
                    ..refusal(
                        id,
                        code::VIOLATION,
                        "tools are only proposed here; nothing was executed",
                    )
                }
            }
            Policy::Inert => said(id, &result::failed_text(INERT_ANSWER)),
            Policy::Answering => match params {
                Ok(params) => self.answering_call(id, params),
                Err(_) => refusal(id, code::INVALID_PARAMS, "params are not those of a call"),
            },
        }
    }

    fn answering_call(&self, id: &str, params: CallParams<'_>) -> Reply {
        let name = params.name.unwrap_or_default();
        let Some(tool) = self.names.host_of_alias(&name) else {
            return refusal(
                id,
                code::INVALID_PARAMS,
                &format!("no tool {:?} here", shown(&name)),
            );
        };
        let arguments = match params
            .arguments
            .map(|raw| ToolInput::from_streamed(raw.get()))
        {
            None => ToolInput::empty(),
            Some(Ok(arguments)) => arguments,
            Some(Err(_)) => {
                return refusal(id, code::INVALID_PARAMS, "the arguments are no object");
            }
        };
        let (tool_use_id, progress_token) = params.meta.map_or((None, None), |meta| {
            (
                meta.tool_use_id.map(ToolUseId),
                meta.progress_token.map(|token| token.get().to_owned()),
            )
        });
        Reply {
            message: None,
            occurrence: Occurrence::Call(Call {
                rpc_id: RpcId(id.to_owned()),
                tool_use_id,
                tool: tool.to_owned(),
                arguments,
                progress_token,
            }),
        }
    }

    /// The host's answer to a call.
    pub fn answer(id: &RpcId, result: &ToolResult) -> Vec<u8> {
        reply_bytes(&id.0, "result", &result::of(result))
    }

    /// The host's answer to a call, after which the CLI ends its turn and waits for a user line. Not for an error, which it
    /// would not take for the end.
    pub fn answer_and_end(id: &RpcId, result: &ToolResult) -> Vec<u8> {
        reply_bytes(&id.0, "result", &result::of_last(result))
    }

    /// A failed result for a call that the host cannot answer.
    pub fn fail(id: &RpcId, why: &str) -> Vec<u8> {
        reply_bytes(&id.0, "result", &result::failed_text(why))
    }

    /// A progress notification for a call that takes long; over HTTP silence ends it after 300 s (2.1.332).
    pub fn progress(token: &str, n: u64) -> Vec<u8> {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{n}}}}}"#
        )
        .into_bytes()
    }
}

fn notification(method: &str, params: Option<&RawValue>) -> Reply {
    #[derive(Deserialize)]
    struct Params<'a> {
        #[serde(borrow, rename = "requestId")]
        request_id: &'a RawValue,
    }
    let occurrence = match (method, params) {
        ("notifications/cancelled", Some(params)) => {
            serde_json::from_str::<Params<'_>>(params.get()).map_or(Occurrence::Nothing, |params| {
                Occurrence::Cancelled(RpcId(params.request_id.get().to_owned()))
            })
        }
        _ => Occurrence::Nothing,
    };
    Reply {
        message: None,
        occurrence,
    }
}

fn asked_protocol(params: Option<&RawValue>) -> &'static str {
    #[derive(Deserialize)]
    struct Params<'a> {
        #[serde(borrow, rename = "protocolVersion")]
        protocol_version: Cow<'a, str>,
    }
    params
        .and_then(|params| serde_json::from_str::<Params<'_>>(params.get()).ok())
        .and_then(|params| {
            PROTOCOLS
                .into_iter()
                .find(|p| *p == params.protocol_version)
        })
        .unwrap_or(NEWEST_PROTOCOL)
}

/// No `instructions`: the CLI would put them into its environment message (2.1.332).
pub(super) fn initialize_result(protocol: &str) -> String {
    format!(
        r#"{{"protocolVersion":"{protocol}","capabilities":{{"tools":{{}}}},"serverInfo":{{"name":"{SERVER}","version":"{}"}}}}"#,
        env!("CARGO_PKG_VERSION")
    )
}

fn said(id: &str, result: &str) -> Reply {
    Reply {
        message: Some(reply_bytes(id, "result", result)),
        occurrence: Occurrence::Nothing,
    }
}

fn refusal(id: &str, code: i32, message: &str) -> Reply {
    #[derive(Serialize)]
    struct Refusal<'a> {
        code: i32,
        message: &'a str,
    }
    // A number and a text always serialise.
    let error = serde_json::to_string(&Refusal { code, message }).unwrap_or_default();
    Reply {
        message: Some(reply_bytes(id, "error", &error)),
        occurrence: Occurrence::Nothing,
    }
}

/// The reply to a line that was too long to be read.
pub(super) fn too_long(limit: usize) -> Vec<u8> {
    let reply = refusal(
        "null",
        code::INVALID_REQUEST,
        &format!("the message is longer than {limit} bytes"),
    );
    reply.message.unwrap_or_default()
}

fn reply_bytes(id: &str, kind: &str, value: &str) -> Vec<u8> {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"{kind}":{value}}}"#).into_bytes()
}
