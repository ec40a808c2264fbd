//! A client and a reader of SSE for these tests.

use serde_json::{Value, json};
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
