//! The steps of a script as data.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::big::BigLine;

/// One step of a run. In JSON a step is an object with one key, or the bare name of a step that takes
/// nothing: `{"expect": {"type": "user"}}`, `"wait_eof"`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Takes the next line of stdin, which must match this pattern (see [`super::template::matches`]).
    Expect(Value),
    /// Takes the next line of stdin, whatever it is.
    ExpectAny,
    /// Writes a record, or each of an array of records, as lines; a string is written as it stands.
    Send(Value),
    /// Writes bytes without adding a line end.
    SendRaw(Raw),
    /// Writes a `system/init` record as the real CLI does; the object overrides its fields.
    SendInit(Option<Map<String, Value>>),
    /// Writes one line of an exact length.
    SendBig(BigLine),
    /// Plays steps again; `{{n}}` is the number of the pass, from 0.
    Repeat {
        /// How often.
        times: u64,
        /// What.
        steps: Vec<Step>,
    },
    /// Plays steps until an `expect` inside finds the end of input; then goes on after the loop.
    Loop(Vec<Step>),
    /// Does nothing for so long.
    SleepMs(u64),
    /// Reads until the end of input.
    WaitEof,
    /// Starts a process that outlives this one unless the group is ended.
    Grandchild(Grandchild),
    /// Writes to stderr.
    Stderr(Stderr),
    /// Does nothing more, for ever. Signals still work.
    Hang,
    /// Ends with this code.
    Exit(u8),
    /// Ends itself by a signal, such as `"SIGKILL"`.
    KillSelf(String),
    /// From here on these signals are noted and otherwise ignored.
    IgnoreSignals(Vec<String>),
    /// Stdin is never read in this run. Takes effect before the first step, wherever it stands.
    NeverReadStdin,
    /// Writes so many bytes of noise lines before stdin is read. Must be the first step.
    WriteBeforeRead(u64),
    /// Closes stdout, and goes on.
    CloseStdout,
    /// From here on answers these control requests by itself; without a list, all with the defaults.
    AnswerControls(Option<Vec<Control>>),
    /// Connects to the MCP servers of `--mcp-config`, so that their tools stand in `send_init`.
    McpConnect(Option<McpConnect>),
    /// Sends an HTTP request to `$ANTHROPIC_BASE_URL` and deals with the reply.
    Post(Post),
    /// Plays the stdout records of a recording.
    PlayFixture(PlayFixture),
}

/// Bytes for [`Step::SendRaw`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Raw {
    /// As text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// As base64, for bytes that are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

/// For [`Step::Grandchild`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grandchild {
    /// It ignores SIGTERM.
    #[serde(default = "yes")]
    pub ignore_sigterm: bool,
    /// It keeps stdout and stderr open, so that a reader sees no end of input while it lives.
    #[serde(default)]
    pub keep_pipes: bool,
    /// It ends by itself after so long; a bound, so that a failed test leaves nothing for ever.
    #[serde(default = "grandchild_seconds")]
    pub seconds: u32,
}

fn yes() -> bool {
    true
}

/// Longer than any test waits, short enough to clean up after a crashed one.
fn grandchild_seconds() -> u32 {
    120
}

/// For [`Step::Stderr`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Stderr {
    /// This text, as it stands.
    Text(String),
    /// So many bytes without a single line end.
    Bytes {
        /// How many.
        bytes: u64,
    },
}

/// One control request that [`Step::AnswerControls`] answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Control {
    /// The subtype, such as `initialize`.
    pub subtype: String,
    /// The payload of a success; the default of the emulator when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<Value>,
    /// Answer with this error instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Take the request and never answer it.
    #[serde(default)]
    pub ignore: bool,
    /// Wait before the answer.
    #[serde(default)]
    pub delay_ms: u64,
    /// Only so many times; later requests are left to the steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
}

impl Control {
    /// Answers `subtype` with a success.
    pub fn success(subtype: &str, response: Value) -> Control {
        Control {
            response: Some(response),
            ..Control::default_for(subtype)
        }
    }

    /// Answers `subtype` as the emulator does.
    pub fn default_for(subtype: &str) -> Control {
        Control {
            subtype: subtype.to_owned(),
            response: None,
            error: None,
            ignore: false,
            delay_ms: 0,
            times: None,
        }
    }
}

/// For [`Step::McpConnect`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpConnect {
    /// Tools to call once connected; the results are noted in the recording.
    #[serde(default)]
    pub calls: Vec<McpCall>,
    /// Issue the calls at once instead of one after another.
    #[serde(default)]
    pub parallel: bool,
}

/// One tools/call of [`McpConnect`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpCall {
    /// The tool's own name, without the `mcp__server__` prefix.
    pub name: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Value,
    /// Sent as `_meta["claudecode/toolUseId"]`.
    pub tool_use_id: String,
}

/// For [`Step::Post`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Post {
    /// `POST` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// `/v1/messages?beta=true` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// A body of the real shape, made from argv and the last user line, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Value>,
    /// Replace or, with null, remove headers.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub headers: Map<String, Value>,
    /// What to do with the reply.
    #[serde(default)]
    pub reply: Reply,
    /// The status that must come; another one ends the run with the mismatch code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_status: Option<u16>,
}

/// What [`Step::Post`] does with the reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Forward it as records: `stream_event`, `assistant`, and at last `result`.
    #[default]
    Forward,
    /// The same without the `result` record.
    ForwardNoResult,
    /// Read it to the end and say nothing.
    Ignore,
    /// Close the connection after the head of the reply.
    Cut,
    /// Keep it open and unread.
    Hold,
}

/// For [`Step::PlayFixture`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlayFixture {
    /// The recording, relative to the script: rows `{"t","dir","v"}`, or bare stdout records.
    pub file: PathBuf,
    /// Keep the recorded pauses between records.
    #[serde(default)]
    pub timing: bool,
    /// At each recorded stdin line wait for one, and put its request id and uuid into later records.
    #[serde(default)]
    pub follow_stdin: bool,
}
