//! One process of the CLI that is tried: written to and read line by line, every wait bounded.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use turnpass::cli::launch::{Launch, refused_option};
use turnpass::cli::private_dir::PrivateDir;
use turnpass::process::{ChildGroup, EndPolicy, Exit, Stdout};
use turnpass::wire::lines::{LineSplitter, MAX_LINE_BYTES};
use turnpass::wire::surrogates;

/// Longest wait for one thing that the CLI does. Most take milliseconds and a start half a second; on a machine under
/// load many times that.
const STEP_LIMIT: Duration = Duration::from_secs(20);

/// Longest wait for what a process that ended has to say about it.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Most characters of a foreign text that are told.
const TOLD_CHARS: usize = 160;

/// Why a check does not hold.
#[derive(Clone, Debug)]
pub(super) enum Why {
    /// The CLI did something else.
    Seen(String),
    /// The CLI did nothing in time. A machine under load can do that to any CLI, so the check is run once more before it counts.
    Late(String),
    /// The laboratory failed, so nothing was looked at.
    NotChecked(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seen(text) | Self::Late(text) | Self::NotChecked(text) => f.write_str(text),
        }
    }
}

/// Something of the laboratory failed.
pub(super) fn not_checked(error: impl fmt::Display) -> Why {
    Why::NotChecked(told(&error.to_string()))
}

/// The CLI did something else than was expected.
pub(super) fn seen<T>(what: impl Into<String>) -> Result<T, Why> {
    Err(Why::Seen(what.into()))
}

/// What was waited for did not come in time.
pub(super) fn late<T>(what: impl Into<String>) -> Result<T, Why> {
    Err(Why::Late(what.into()))
}

/// A foreign text, short, on one line and without paths, which may name the person.
pub(super) fn told(text: &str) -> String {
    let words = text.split_whitespace();
    let words = words.map(|word| if word.contains('/') { "(path)" } else { word });
    let line = words.collect::<Vec<_>>().join(" ");
    line.chars().take(TOLD_CHARS).collect()
}

/// The process.
#[derive(Debug)]
pub(super) struct Cli {
    group: ChildGroup,
    stdout: Stdout,
    lines: LineSplitter,
    /// Read, but not looked at yet.
    backlog: VecDeque<Value>,
    next_id: u64,
    /// Removed after the process, since fields are dropped in order.
    _dir: PrivateDir,
}

impl Cli {
    /// Starts the process of a launch that was made for `dir`.
    pub(super) fn start(launch: Launch, dir: PrivateDir) -> Result<Self, Why> {
        let mut group = launch.start(&dir).map_err(not_checked)?;
        let stdout = group.take_stdout();
        let stdout = stdout.ok_or_else(|| not_checked("a process has no standard output"))?;
        Ok(Self {
            group,
            stdout,
            lines: LineSplitter::new(MAX_LINE_BYTES),
            backlog: VecDeque::new(),
            next_id: 0,
            _dir: dir,
        })
    }

    /// Writes lines in one piece.
    pub(super) fn send(&self, lines: &[Value]) -> Result<(), Why> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let written = self.group.stdin().write(text);
        // A process that ended says why in what is read next.
        written.or_else(|error| match self.group.exit() {
            Some(_) => Ok(()),
            None => Err(not_checked(error)),
        })
    }

    /// The next record.
    async fn next(&mut self) -> Result<Value, Why> {
        loop {
            match self.lines.next_line() {
                Ok(Some(line)) => {
                    let line = surrogates::repair(&line);
                    if let Ok(record) = serde_json::from_slice(&line) {
                        return Ok(record);
                    }
                }
                Ok(None) => match self.stdout.read_buf(self.lines.read_buf()).await {
                    Ok(1..) => {}
                    _ => return seen(self.ended().await),
                },
                Err(error) => return seen(error.to_string()),
            }
        }
    }

    /// Reads until a record is as wanted; gives all that were read, that one last.
    pub(super) async fn until(
        &mut self,
        what: &str,
        mut is_wanted: impl FnMut(&Value) -> bool,
    ) -> Result<Vec<Value>, Why> {
        let mut read: Vec<Value> = Vec::new();
        let reading = async {
            loop {
                let record = match self.backlog.pop_front() {
                    Some(record) => record,
                    None => self.next().await?,
                };
                let is_last = is_wanted(&record);
                read.push(record);
                if is_last {
                    return Ok(());
                }
            }
        };
        match tokio::time::timeout(STEP_LIMIT, reading).await {
            Ok(done) => done.map(|()| read),
            Err(_) => {
                let last = read.last().map_or_else(|| "nothing".to_owned(), kind);
                let limit = STEP_LIMIT.as_secs();
                late(format!(
                    "no {what} within {limit} s; the last record was {last}"
                ))
            }
        }
    }

    /// Reads until the end of the turn.
    pub(super) async fn result(&mut self) -> Result<Turn, Why> {
        let records = self.until("result", |one| one["type"] == "result").await?;
        Ok(Turn(records))
    }

    /// Asks a control request and waits for the payload of its success; other records stay to be read.
    pub(super) async fn control(&mut self, request: Value) -> Result<Value, Why> {
        let (line, id) = self.control_line(&request);
        self.send(&[line])?;
        self.answer(&request, &id).await
    }

    /// The line of a control request, for a write of several lines, and its id for [`Cli::answer`].
    pub(super) fn control_line(&mut self, request: &Value) -> (Value, String) {
        self.next_id += 1;
        let id = format!("certify-{}", self.next_id);
        (
            json!({"type": "control_request", "request_id": id, "request": request}),
            id,
        )
    }

    /// Waits for the answer to a control request that was written.
    pub(super) async fn answer(&mut self, request: &Value, id: &str) -> Result<Value, Why> {
        let subtype = request["subtype"].as_str().unwrap_or_default().to_owned();
        let is_answer =
            |one: &Value| one["type"] == "control_response" && one["response"]["request_id"] == *id;
        let what = format!("answer to {subtype}");
        let mut records = self.until(&what, is_answer).await?;
        let answer = records.pop().unwrap_or_default();
        // In their order, before what is read next.
        for record in records.into_iter().rev() {
            self.backlog.push_front(record);
        }
        let response = &answer["response"];
        if response["subtype"] == "success" {
            return Ok(response["response"].clone());
        }
        let error = response["error"].as_str().unwrap_or("no reason");
        seen(format!("{subtype} was refused: {}", told(error)))
    }

    /// Closes its input and waits for its end.
    pub(super) async fn end(self, policy: EndPolicy) -> Result<Exit, Why> {
        self.group.end(policy).await.map_err(not_checked)
    }

    /// Closes its input and keeps it.
    pub(super) fn close_input(&self) {
        self.group.stdin().close();
    }

    /// How it ended, at most after `limit`.
    pub(super) async fn exit_within(&self, limit: Duration) -> Option<Exit> {
        tokio::time::timeout(limit, self.group.wait()).await.ok()
    }

    /// Kills it and waits until it is gone.
    pub(super) async fn kill(self) -> Result<(), Why> {
        self.end(EndPolicy {
            after_stdin_close: Duration::ZERO,
            after_terminate: Duration::ZERO,
        })
        .await
        .map(|_| ())
    }

    async fn ended(&self) -> String {
        let words = self.group.last_words(LAST_WORDS).await;
        if let Some(error) = refused_option(&words) {
            return error.detail().to_owned();
        }
        let how = tokio::time::timeout(LAST_WORDS, self.group.wait()).await;
        let how = how.map_or_else(
            |_| "closed its output".to_owned(),
            |exit| format!("ended with {exit}"),
        );
        let words = told(words.lines().last().unwrap_or_default());
        match words.is_empty() {
            true => format!("the CLI {how}"),
            false => format!("the CLI {how}: {words}"),
        }
    }
}

/// What kind of record it is, in a few words.
fn kind(record: &Value) -> String {
    let of = |field: &str| record[field].as_str().map(str::to_owned);
    let event = record["event"]["type"].as_str().map(str::to_owned);
    let parts = [of("type"), of("subtype"), of("state"), event];
    told(&parts.into_iter().flatten().collect::<Vec<_>>().join(" "))
}

/// The records of a turn, up to its result.
#[derive(Debug)]
pub(super) struct Turn(pub(super) Vec<Value>);

impl Turn {
    /// The result record.
    pub(super) fn result(&self) -> &Value {
        self.0.last().unwrap_or(&Value::Null)
    }

    /// Whether it ended well.
    pub(super) fn is_good(&self) -> bool {
        self.result()["is_error"] == false
    }

    /// The first record, `system/init`.
    pub(super) fn init(&self) -> &Value {
        let mut records = self.0.iter();
        let init = records.find(|one| one["type"] == "system" && one["subtype"] == "init");
        init.unwrap_or(&Value::Null)
    }

    /// The uuid of the last answer's record.
    pub(super) fn last_assistant(&self) -> Result<String, Why> {
        let mut records = self.0.iter().rev();
        let last = records.find(|one| one["type"] == "assistant");
        match last.and_then(|one| one["uuid"].as_str()) {
            Some(uuid) => Ok(uuid.to_owned()),
            None => seen("a turn has no assistant record with a uuid"),
        }
    }

    /// How it ended, in words.
    pub(super) fn end(&self) -> String {
        let result = self.result();
        let word = |field: &str| told(result[field].as_str().unwrap_or("null"));
        format!(
            "result {} ({}), is_error {}",
            word("subtype"),
            word("terminal_reason"),
            result["is_error"]
        )
    }

    /// An error unless it ended well.
    pub(super) fn good(self) -> Result<Self, Why> {
        match self.is_good() {
            true => Ok(self),
            false => seen(self.end()),
        }
    }
}

/// A user line with one text.
pub(super) fn user(uuid: &str, text: &str) -> Value {
    user_blocks(uuid, json!([{"type": "text", "text": text}]))
}

/// A user line.
pub(super) fn user_blocks(uuid: &str, content: Value) -> Value {
    json!({
        "type": "user", "message": {"role": "user", "content": content}, "parent_tool_use_id": null,
        "session_id": "", "uuid": uuid, "client_composed": true,
    })
}

/// A user line that is not asked.
pub(super) fn user_frame(uuid: &str, text: &str) -> Value {
    let mut line = user(uuid, text);
    line["shouldQuery"] = json!(false);
    line
}

/// An assistant line.
pub(super) fn assistant_frame(uuid: &str, model: &str, content: Value) -> Value {
    json!({
        "type": "assistant", "uuid": uuid, "parent_tool_use_id": null, "session_id": "",
        "message": {"role": "assistant", "model": model, "content": content},
    })
}

/// Whether the CLI calls a tool of ours.
pub(super) fn is_call(record: &Value) -> bool {
    is_exchange(record) && record["request"]["message"]["method"] == "tools/call"
}

/// Whether it is a message to our in-band server.
pub(super) fn is_exchange(record: &Value) -> bool {
    record["type"] == "control_request" && record["request"]["subtype"] == "mcp_message"
}

/// The block that a call says it belongs to.
pub(super) fn block_of(call: &Value) -> Option<&str> {
    let meta = &call["request"]["message"]["params"]["_meta"];
    meta[turnpass::tools::TOOL_USE_ID].as_str()
}

/// The answer to a call of ours.
pub(super) fn answer(call: &Value, text: &str, end_turn: bool) -> Value {
    let mut result = json!({"content": [{"type": "text", "text": text}]});
    if end_turn {
        result["_meta"] = json!({"claude/endTurn": true});
    }
    let message =
        json!({"jsonrpc": "2.0", "id": call["request"]["message"]["id"], "result": result});
    json!({"type": "control_response", "response": {
        "subtype": "success", "request_id": call["request_id"], "response": {"mcp_response": message},
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_of_a_foreign_text_is_short_and_names_no_path() {
        assert_eq!(told("cannot  open\n/home/somebody/x"), "cannot open (path)");
        assert_eq!(told(&"a ".repeat(500)).chars().count(), TOLD_CHARS);
    }

    #[test]
    fn a_call_is_answered_where_it_came_from() {
        let call = json!({"type": "control_request", "request_id": "r1", "request": {
            "subtype": "mcp_message", "message": {"id": 7, "method": "tools/call",
                "params": {"_meta": {"claudecode/toolUseId": "toolu_1"}}},
        }});
        assert!(is_call(&call) && is_exchange(&call));
        assert_eq!(block_of(&call), Some("toolu_1"));
        let answer = answer(&call, "done", true);
        assert_eq!(answer["response"]["request_id"], "r1");
        let result = &answer["response"]["response"]["mcp_response"];
        assert_eq!(
            (&result["id"], &result["result"]["_meta"]["claude/endTurn"]),
            (&json!(7), &json!(true))
        );
    }
}
