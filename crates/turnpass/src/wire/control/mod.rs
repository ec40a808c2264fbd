//! Lines that we write to the CLI's stdin: control requests, user and assistant lines, answers to what the CLI asks.
//!
//! Each is a [`Line`], of which there is no other source: exactly one JSON object and one 0x0A. The CLI exits with 1 at the first line that is not JSON
//! (2.1.332), and one that is cut in two by a stray line end would be just that.

use bytes::Bytes;
use memchr::{memchr2_iter, memmem};
use serde::Serialize;
use serde_json::value::RawValue;

use super::surrogates;

mod pending;
mod replies;

pub use pending::{MAX_PENDING, Pending, RegisterError, RequestIds};
pub use replies::{
    InterruptReply, McpServerStatus, McpSetServersReply, McpStatusReply, McpToolStatus, ReplyError,
    RewindReply, SetModelReply, read_reply,
};

/// One line for the CLI: a JSON object and 0x0A. It holds no other 0x0A and no 0x0D, no lone surrogate and neither U+2028 nor U+2029 as they are,
/// at which some readers end a line too.
#[derive(Clone, PartialEq, Eq)]
pub struct Line(Bytes);

impl Line {
    /// The line with its 0x0A.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The same without a copy.
    pub fn into_bytes(self) -> Bytes {
        self.0
    }

    fn of(object: &impl Serialize) -> Self {
        #[expect(
            clippy::expect_used,
            reason = "all callers pass structs of this module, whose keys are strings and whose writer is memory"
        )]
        let json = serde_json::to_vec(object).expect("a struct with string keys serialises");
        let mut json = match surrogates::repair(&json) {
            std::borrow::Cow::Borrowed(_) => json,
            std::borrow::Cow::Owned(repaired) => repaired,
        };
        // Inside a JSON string both bytes are always escaped, so what is left of them is white space of a raw value that was passed in.
        let stray: Vec<usize> = memchr2_iter(b'\n', b'\r', &json).collect();
        for at in stray {
            json[at] = b' ';
        }
        let mut json = escape_separators(json);
        json.push(b'\n');
        Self(json.into())
    }
}

/// The size only: a line holds the conversation.
impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Line({} bytes)", self.0.len())
    }
}

/// U+2028 and U+2029 stand in JSON text only inside strings, where an escape means the same.
fn escape_separators(json: Vec<u8>) -> Vec<u8> {
    const COMMON: &[u8] = b"\xE2\x80";
    let is_separator = |at: &usize| matches!(json.get(at + 2), Some(0xA8 | 0xA9));
    let found: Vec<usize> = memmem::find_iter(&json, COMMON)
        .filter(is_separator)
        .collect();
    if found.is_empty() {
        return json;
    }
    let mut escaped = Vec::with_capacity(json.len() + 3 * found.len());
    let mut copied = 0;
    for at in found {
        escaped.extend_from_slice(&json[copied..at]);
        let escape: &[u8] = if json[at + 2] == 0xA8 {
            b"\\u2028"
        } else {
            b"\\u2029"
        };
        escaped.extend_from_slice(escape);
        copied = at + 3;
    }
    escaped.extend_from_slice(&json[copied..]);
    escaped
}

/// A control request to the CLI. Its answer is a `control_response` with the same id.
///
/// Values that are only passed on are raw JSON; build one with [`serde_json::value::to_raw_value`].
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "subtype", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ControlRequest<'a> {
    /// Tells the CLI of in-band MCP servers and the system prompt. A second one does not change the prompt.
    Initialize(Initialize<'a>),
    /// Changes the model, the system prompt, or both. After the first user line a change of model also writes command text into the
    /// conversation, and a name that the CLI does not know makes it send a request of its own (2.1.332).
    SetModel {
        /// Alias or full id; `None` is the session's default.
        #[serde(skip_serializing_if = "Option::is_none")]
        model: Option<&'a str>,
        /// The new prompt, used from the next turn on, only if the prompt snapshot is off.
        #[serde(skip_serializing_if = "Option::is_none")]
        system_prompt: Option<&'a str>,
    },
    /// Changes settings: `{"effortLevel":…}`, `{"model":…}` without a request to check it, `{"env":{…}}`. A value that the CLI does not know is ignored
    /// without an error (2.1.332).
    ApplyFlagSettings {
        /// The settings, an object.
        settings: &'a RawValue,
    },
    /// Replaces the MCP servers that came by this request or by `initialize`.
    McpSetServers {
        /// Servers by name, an object: `{"two":{"type":"sdk","name":"two"}}`.
        servers: &'a RawValue,
    },
    /// Asks for MCP servers and their tools. Does not wait for a connection.
    McpStatus {},
    /// Asks for use and limits.
    GetUsage {
        /// Leaves out a scan of a week of transcripts.
        skip_behaviors: bool,
    },
    /// Asks for the context window and what fills it.
    GetContextUsage {
        /// `summary` is an estimate of the CLI's own; the default would send three requests upstream (2.1.332).
        detail: &'static str,
    },
    /// Stops the running turn.
    Interrupt {
        /// Also takes back a user line that has not begun; needs a uuid on that line. Without it the turn runs all the same.
        cancel_queued: bool,
    },
    /// Takes a user line and everything after it out of the history.
    RewindConversation {
        /// Uuid of the user line. The CLI compares its first 24 characters only, so uuids have to be random (2.1.332).
        target_message_uuid: &'a str,
        /// Uuid of the newest user line, needed for a target before it.
        #[serde(skip_serializing_if = "Option::is_none")]
        last_seen_user_message_uuid: Option<&'a str>,
    },
    /// Asks for the settings in force, model and effort among them.
    GetSettings {},
    /// Ends the process with exit code 0.
    EndSession {},
}

/// `initialize`.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Initialize<'a> {
    /// Names of the in-band MCP servers.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub sdk_mcp_servers: &'a [&'a str],
    /// What the servers would answer to `initialize` and `tools/list`, so that the CLI need not ask.
    #[serde(skip_serializing_if = "Manifests::is_empty")]
    pub sdk_mcp_server_manifests: Manifests<'a>,
    /// The system prompt; `None` leaves that of the command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<&'a [&'a str]>,
    /// `Some(false)` lets a later `set_model` change the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt_snapshot: Option<bool>,
}

/// Manifests of in-band MCP servers, by the server's name.
#[derive(Debug, Clone, Default)]
pub struct Manifests<'a>(pub Vec<(&'a str, Manifest<'a>)>);

impl Manifests<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Manifests<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, manifest)| (name, manifest)))
    }
}

/// What an in-band MCP server would answer.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest<'a> {
    /// The result of `initialize`: `protocolVersion`, `capabilities`, `serverInfo`.
    pub initialize_result: &'a RawValue,
    /// The result of `tools/list`: `{"tools":[…]}`. One tool whose schema lacks `"type":"object"` empties the CLI's whole list (2.1.332).
    pub tools_list_result: &'a RawValue,
}

/// Content of a user line.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(untagged)]
pub enum UserContent<'a> {
    /// A plain string, which goes upstream as one.
    Text(&'a str),
    /// Blocks: a JSON array.
    Blocks(&'a RawValue),
}

/// A user line.
#[derive(Debug, Clone, Copy)]
pub struct UserLine<'a> {
    /// A random uuid. It becomes the message's uuid in the CLI's history, and without one the line cannot be taken back.
    pub uuid: &'a str,
    /// What the user says.
    pub content: UserContent<'a>,
    /// Whether the CLI answers it. `false` only puts it into the history; the CLI acknowledges it with a `result` of its own, for which
    /// the next line has to wait or the order is lost (2.1.332).
    pub asks: bool,
}

/// The line for a control request.
pub fn control_request(request_id: &str, request: &ControlRequest<'_>) -> Line {
    #[derive(Serialize)]
    struct Request<'a> {
        r#type: &'static str,
        request_id: &'a str,
        request: &'a ControlRequest<'a>,
    }
    Line::of(&Request {
        r#type: "control_request",
        request_id,
        request,
    })
}

/// The line for a user message. It carries `client_composed`, so that `@path`, `/command` and magic words reach the model as written.
pub fn user_line(line: &UserLine<'_>) -> Line {
    #[derive(Serialize)]
    struct User<'a> {
        r#type: &'static str,
        message: Message<'a>,
        parent_tool_use_id: (),
        session_id: &'static str,
        uuid: &'a str,
        client_composed: bool,
        #[serde(rename = "shouldQuery", skip_serializing_if = "Option::is_none")]
        should_query: Option<bool>,
    }
    #[derive(Serialize)]
    struct Message<'a> {
        role: &'static str,
        content: UserContent<'a>,
    }
    Line::of(&User {
        r#type: "user",
        message: Message {
            role: "user",
            content: line.content,
        },
        parent_tool_use_id: (),
        session_id: "",
        uuid: line.uuid,
        client_composed: true,
        should_query: (!line.asks).then_some(false),
    })
}

/// The line that puts an earlier answer into the CLI's history. It is not acknowledged.
///
/// `model` must be the session's current model, or the CLI drops the message's thinking without a word (2.1.332). `content` is a JSON array of blocks.
pub fn assistant_line(message_id: &str, model: &str, content: &RawValue) -> Line {
    #[derive(Serialize)]
    struct Assistant<'a> {
        r#type: &'static str,
        /// Becomes the record's uuid in the transcript, at which a conversation can be resumed (2.1.294 to 2.1.332).
        #[serde(skip_serializing_if = "Option::is_none")]
        uuid: Option<&'a str>,
        message: Message<'a>,
    }
    #[derive(Serialize)]
    struct Message<'a> {
        role: &'static str,
        content: &'a RawValue,
        id: &'a str,
        r#type: &'static str,
        model: &'a str,
        stop_reason: &'static str,
        stop_sequence: (),
        usage: Usage,
    }
    #[derive(Serialize)]
    struct Usage {
        input_tokens: u64,
        output_tokens: u64,
    }
    Line::of(&Assistant {
        r#type: "assistant",
        uuid: uuid::Uuid::try_parse(message_id)
            .is_ok()
            .then_some(message_id),
        message: Message {
            role: "assistant",
            content,
            id: message_id,
            r#type: "message",
            model,
            stop_reason: "end_turn",
            stop_sequence: (),
            // Its counters are not ours to know here; large ones could trip the CLI's own estimate of the context.
            usage: Usage {
                input_tokens: 1,
                output_tokens: 1,
            },
        },
    })
}

/// The line that answers an `mcp_message` of the CLI with a JSON-RPC message. A notification gets one too, with an empty result.
pub fn mcp_response(request_id: &str, message: &RawValue) -> Line {
    #[derive(Serialize)]
    struct Payload<'a> {
        mcp_response: &'a RawValue,
    }
    control_response(
        request_id,
        "success",
        Some(Payload {
            mcp_response: message,
        }),
        None,
    )
}

/// The line that refuses a control request of the CLI, such as one of a kind that we do not serve.
pub fn control_error(request_id: &str, error: &str) -> Line {
    control_response(request_id, "error", None::<()>, Some(error))
}

fn control_response(
    request_id: &str,
    subtype: &str,
    payload: Option<impl Serialize>,
    error: Option<&str>,
) -> Line {
    #[derive(Serialize)]
    struct Outer<'a, P> {
        r#type: &'static str,
        response: Response<'a, P>,
    }
    #[derive(Serialize)]
    struct Response<'a, P> {
        subtype: &'a str,
        request_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        response: Option<P>,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a str>,
    }
    Line::of(&Outer {
        r#type: "control_response",
        response: Response {
            subtype,
            request_id,
            response: payload,
            error,
        },
    })
}

#[cfg(test)]
mod tests;
