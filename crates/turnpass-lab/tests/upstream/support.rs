//! A client and a reader of SSE for these tests.

use std::io;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use turnpass_lab::scenario::{Reply, Scenario};
use turnpass_lab::upstream::{Checks, Options, Upstream};

pub(crate) fn client() -> reqwest::Client {
    rustls::crypto::ring::default_provider()
        .install_default()
        .ok();
    reqwest::Client::builder().no_proxy().build().unwrap()
}

pub(crate) fn start() -> Upstream {
    Upstream::start(Options::default()).unwrap()
}

/// An upstream that answers these replies and checks nothing.
pub(crate) fn scripted(replies: impl IntoIterator<Item = Reply>) -> Upstream {
    let scenario = Scenario {
        replies: replies.into_iter().collect(),
        ..Scenario::default()
    };
    Upstream::start(Options {
        scenario,
        checks: Checks::none(),
        ..Options::default()
    })
    .unwrap()
}

/// A streamed request with one user text.
pub(crate) fn ask(text: &str) -> Value {
    json!({"model": "claude-sonnet-5-5", "max_tokens": 1000, "stream": true,
        "messages": [{"role": "user", "content": text}]})
}

pub(crate) fn unstreamed(mut request: Value) -> Value {
    request["stream"] = json!(false);
    request
}

pub(crate) async fn post(upstream: &Upstream, request: &Value) -> reqwest::Response {
    let url = format!("{}/v1/messages?beta=true", upstream.url());
    client()
        .post(url)
        .body(request.to_string())
        .send()
        .await
        .unwrap()
}

/// The events of an SSE text.
pub(crate) fn events(text: &str) -> Vec<Value> {
    text.replace("\r\n", "\n")
        .split("\n\n")
        .filter_map(|event| {
            let data = event.lines().find_map(|line| line.strip_prefix("data: "))?;
            serde_json::from_str(data).ok()
        })
        .collect()
}

pub(crate) async fn stream(upstream: &Upstream, request: &Value) -> Vec<Value> {
    let reply = post(upstream, request).await;
    assert_eq!(reply.status(), 200);
    events(&reply.text().await.unwrap())
}

pub(crate) fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .filter_map(|event| event["type"].as_str())
        .collect()
}

/// The joined deltas of one kind.
pub(crate) fn joined(events: &[Value], kind: &str, field: &str) -> String {
    events
        .iter()
        .filter(|event| event["delta"]["type"] == kind)
        .filter_map(|event| event["delta"][field].as_str())
        .collect()
}

pub(crate) fn text_of(events: &[Value]) -> String {
    joined(events, "text_delta", "text")
}

pub(crate) fn stop_reason(events: &[Value]) -> &Value {
    let delta = events.iter().find(|event| event["type"] == "message_delta");
    &delta.expect("no message_delta")["delta"]["stop_reason"]
}

/// What a plain TCP client got: head, body as framed, and the error that reading ended with, if any.
pub(crate) struct Raw {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    pub(crate) error: Option<io::ErrorKind>,
}

impl Raw {
    /// The body without its chunk framing, and whether the last chunk was there.
    pub(crate) fn dechunked(&self) -> (Vec<u8>, bool) {
        let (mut rest, mut body) = (self.body.as_slice(), Vec::new());
        while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
            let size =
                usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
            if size == 0 {
                return (body, true);
            }
            body.extend_from_slice(&rest[end + 2..end + 2 + size]);
            rest = &rest[end + 4 + size..];
        }
        (body, false)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }
}

pub(crate) async fn send(stream: &mut TcpStream, request: &str) {
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: lab\r\ncontent-length: {}\r\n\r\n",
        request.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
}

/// Posts over plain TCP, asks the server to close after it, and reads to the end.
pub(crate) async fn raw(upstream: &Upstream, request: &Value) -> Raw {
    let mut stream = TcpStream::connect(upstream.addr()).await.unwrap();
    let request = request.to_string();
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: lab\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        request.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let error = stream
        .read_to_end(&mut bytes)
        .await
        .err()
        .map(|error| error.kind());
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let (head, body) = match end {
        Some(end) => (bytes[..end + 2].to_vec(), bytes[end + 4..].to_vec()),
        None => (bytes, Vec::new()),
    };
    Raw {
        head: String::from_utf8_lossy(&head).replace("\r\n", "\n"),
        body,
        error,
    }
}
