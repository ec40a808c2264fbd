//! What the tests of this crate share: a driver of a CLI over its pipes, and a tiny upstream.
//!
//! The upstream is deliberately not the laboratory's own, so that the two parts are tested apart.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnpass_lab::cli::{Script, install};

/// Longer than anything here takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_turnpass-lab"))
}

/// The command line of the facts, section 12, without files.
pub const STREAM: [&str; 15] = [
    "-p",
    "--input-format",
    "stream-json",
    "--output-format",
    "stream-json",
    "--verbose",
    "--include-partial-messages",
    "--strict-mcp-config",
    "--setting-sources=",
    "--disable-slash-commands",
    "--permission-mode",
    "dontAsk",
    "--no-session-persistence",
    "--model",
    "sonnet",
];

pub struct Cli {
    pub child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    pub seen: Vec<Value>,
    stderr: Arc<Mutex<String>>,
}

impl Cli {
    pub fn start(script: &Script, dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Cli {
        let claude = install(dir, &program(), script).unwrap();
        let mut command = Command::new(claude);
        command
            .args(args)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .envs(env.iter().copied());
        Cli::spawn(command)
    }

    pub fn spawn(mut command: Command) -> Cli {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = child.stdout.take().unwrap();
        std::thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = Vec::new();
            while stdout.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
                let text =
                    String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(&line)).into_owned();
                if sender.send(text).is_err() {
                    break;
                }
                line.clear();
            }
        });
        let stderr = Arc::new(Mutex::new(String::new()));
        let kept = Arc::clone(&stderr);
        let mut pipe = child.stderr.take().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = pipe.read(&mut bytes) {
                kept.lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&bytes[..read]));
            }
        });
        let stdin = child.stdin.take();
        Cli {
            child,
            stdin,
            lines,
            seen: Vec::new(),
            stderr,
        }
    }

    pub fn write(&mut self, value: &Value) {
        self.write_bytes(format!("{value}\n").as_bytes());
    }

    pub fn write_bytes(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    pub fn user(&mut self, text: &str) {
        self.write(&json!({
            "type": "user", "client_composed": true,
            "message": {"role": "user", "content": text},
        }));
    }

    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// The next line as text; `None` at the end of output.
    pub fn line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!(
                    "no line within {PATIENCE:?}; seen {:#?}; stderr {}",
                    self.seen,
                    self.stderr()
                )
            }
        }
    }

    pub fn next(&mut self) -> Option<Value> {
        let line = self.line()?;
        let value: Value = serde_json::from_str(&line).unwrap_or_else(|_| json!({"$line": line}));
        self.seen.push(value.clone());
        Some(value)
    }

    /// Reads up to a record of this type, and subtype if given as `type/subtype`.
    pub fn until(&mut self, kind: &str) -> Value {
        let (kind, subtype) = kind
            .split_once('/')
            .map_or((kind, None), |(kind, sub)| (kind, Some(sub)));
        loop {
            let Some(value) = self.next() else {
                panic!(
                    "output ended before {kind}; seen {:#?}; stderr {}",
                    self.seen,
                    self.stderr()
                );
            };
            if value["type"] == kind && subtype.is_none_or(|subtype| value["subtype"] == subtype) {
                return value;
            }
        }
    }

    /// Sends a control request and reads up to its answer.
    pub fn control(&mut self, id: &str, request: Value) -> Value {
        self.write(&json!({"type": "control_request", "request_id": id, "request": request}));
        loop {
            let answer = self.until("control_response");
            if answer["response"]["request_id"] == id {
                return answer["response"].clone();
            }
        }
    }

    pub fn stderr(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    /// Closes the input, reads everything, and waits for the end.
    pub fn finish(&mut self) -> ExitStatus {
        self.close_input();
        while self.next().is_some() {}
        self.wait()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "the process did not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Cli {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the upstream answers.
#[derive(Clone)]
pub enum Reply {
    /// These events, then the end.
    Events(Vec<Value>),
    /// These events, then nothing, with the connection open.
    Stall(Vec<Value>),
    /// An error.
    Status(u16, &'static str, Vec<(&'static str, &'static str)>),
}

pub struct Asked {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Value,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self
            .headers
            .iter()
            .find(|(other, _)| other.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

/// A loopback upstream; replies are used in order, then `text("ok")`.
pub struct Upstream {
    pub url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    replies: Arc<Mutex<VecDeque<Reply>>>,
    gets: Gets,
}

/// Bodies for GET, by the start of the path.
type Gets = Arc<Mutex<Vec<(String, Value)>>>;

impl Upstream {
    pub fn start(replies: impl IntoIterator<Item = Reply>) -> Upstream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let replies = Arc::new(Mutex::new(replies.into_iter().collect::<VecDeque<_>>()));
        let gets = Gets::default();
        let (all, queue, known) = (Arc::clone(&asked), Arc::clone(&replies), Arc::clone(&gets));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (all, queue, known) =
                    (Arc::clone(&all), Arc::clone(&queue), Arc::clone(&known));
                std::thread::spawn(move || serve(stream, &all, &queue, &known));
            }
        });
        Upstream {
            url,
            asked,
            replies,
            gets,
        }
    }

    pub fn push(&self, reply: Reply) {
        self.replies.lock().unwrap().push_back(reply);
    }

    /// Answers GET requests whose path starts so.
    pub fn answer_get(&self, path: &str, body: Value) {
        self.gets.lock().unwrap().push((path.to_owned(), body));
    }

    pub fn asked(&self) -> std::sync::MutexGuard<'_, Vec<Asked>> {
        self.asked.lock().unwrap()
    }

    pub fn posts(&self) -> Vec<Value> {
        let asked = self.asked();
        asked
            .iter()
            .filter(|one| one.method == "POST")
            .map(|one| one.body.clone())
            .collect()
    }
}

fn serve(
    stream: TcpStream,
    asked: &Mutex<Vec<Asked>>,
    replies: &Mutex<VecDeque<Reply>>,
    gets: &Gets,
) {
    let mut out = stream.try_clone().unwrap();
    let mut input = BufReader::new(stream);
    loop {
        let mut first = String::new();
        if input.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        let mut words = first.split(' ');
        let (method, path) = (
            words.next().unwrap_or_default().to_owned(),
            words.next().unwrap_or_default().to_owned(),
        );
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            input.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(':') else {
                break;
            };
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
        let length = headers
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length: usize = length.map_or(0, |(_, value)| value.parse().unwrap());
        let mut body = vec![0; length];
        input.read_exact(&mut body).unwrap();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let post = method == "POST";
        let known = gets
            .lock()
            .unwrap()
            .iter()
            .find(|(start, _)| path.starts_with(start))
            .map(|(_, body)| body.to_string());
        asked.lock().unwrap().push(Asked {
            method,
            path,
            headers,
            body,
        });
        if !post {
            let body = known.unwrap_or_default();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            let _ = out
                .write_all(head.as_bytes())
                .and_then(|()| out.write_all(body.as_bytes()));
            continue;
        }
        let reply = replies
            .lock()
            .unwrap()
            .pop_front()
            .unwrap_or_else(|| text("ok"));
        let (events, stall) = match reply {
            Reply::Status(status, message, more) => {
                let body =
                    json!({"type": "error", "error": {"type": "some_error", "message": message}})
                        .to_string();
                let more: String = more
                    .iter()
                    .map(|(name, value)| format!("{name}: {value}\r\n"))
                    .collect();
                let head = format!(
                    "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: {}\r\n\r\n",
                    body.len()
                );
                let _ = out
                    .write_all(head.as_bytes())
                    .and_then(|()| out.write_all(body.as_bytes()));
                continue;
            }
            Reply::Events(events) => (events, false),
            Reply::Stall(events) => (events, true),
        };
        let mut wire = String::from(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nrequest-id: req_test\r\nconnection: close\r\n\r\n",
        );
        for event in &events {
            wire.push_str(&format!(
                "event: {}\ndata: {event}\n\n",
                event["type"].as_str().unwrap()
            ));
        }
        if out.write_all(wire.as_bytes()).is_err() {
            return;
        }
        if stall {
            // Until the client goes away.
            let mut rest = Vec::new();
            let _ = input.read_to_end(&mut rest);
        }
        let _ = out.shutdown(std::net::Shutdown::Both);
        return;
    }
}

pub fn message_start() -> Value {
    json!({"type": "message_start", "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-sonnet-5-5", "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": 12, "output_tokens": 1},
    }})
}

pub fn block(index: u64, start: Value, deltas: &[Value]) -> Vec<Value> {
    let mut events =
        vec![json!({"type": "content_block_start", "index": index, "content_block": start})];
    for delta in deltas {
        events.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
    }
    events.push(json!({"type": "content_block_stop", "index": index}));
    events
}

pub fn text_block(index: u64, text: &str) -> Vec<Value> {
    block(
        index,
        json!({"type": "text", "text": ""}),
        &[json!({"type": "text_delta", "text": text})],
    )
}

pub fn tool_block(index: u64, id: &str, name: &str, input: &str) -> Vec<Value> {
    let start = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
    block(
        index,
        start,
        &[json!({"type": "input_json_delta", "partial_json": input})],
    )
}

pub fn end(reason: &str) -> Vec<Value> {
    vec![
        json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": {"output_tokens": 5}}),
        json!({"type": "message_stop"}),
    ]
}

pub fn reply(blocks: Vec<Vec<Value>>, reason: &str) -> Reply {
    let mut events = vec![message_start()];
    events.extend(blocks.into_iter().flatten());
    events.extend(end(reason));
    Reply::Events(events)
}

pub fn text(text: &str) -> Reply {
    reply(vec![text_block(0, text)], "end_turn")
}
