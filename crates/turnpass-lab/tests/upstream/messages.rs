//! Messages: streamed and not, by directives and by scenarios.

use serde_json::{Value, json};
use turnpass_lab::scenario::{Item, Reply, When};

use crate::support::*;

#[tokio::test]
async fn a_stream_has_the_shape_of_the_api() {
    let upstream = start();
    let events = stream(
        &upstream,
        &ask("[[think why]] [[say hello]] [[call read {\"a\":[[1]]}]]"),
    )
    .await;
    let kinds = types(&events);
    assert_eq!(kinds.first(), Some(&"message_start"));
    assert_eq!(&kinds[kinds.len() - 2..], ["message_delta", "message_stop"]);
    let starts: Vec<&str> = events
        .iter()
        .filter_map(|event| event["content_block"]["type"].as_str())
        .collect();
    assert_eq!(starts, ["thinking", "text", "tool_use"]);
    assert_eq!(joined(&events, "thinking_delta", "thinking"), "why");
    assert_eq!(text_of(&events), "hello");
    assert_eq!(
        joined(&events, "input_json_delta", "partial_json"),
        "{\"a\":[[1]]}"
    );
    assert_eq!(stop_reason(&events), "tool_use");
    assert_eq!(events[0]["message"]["model"], "claude-sonnet-5-5");
    assert!(events[0]["message"]["usage"]["input_tokens"].as_u64() > Some(0));
}

#[tokio::test]
async fn without_directives_it_says_what_it_saw_and_always_the_same() {
    let upstream = start();
    let first = text_of(&stream(&upstream, &ask("plain words")).await);
    let second = text_of(&stream(&upstream, &ask("plain words")).await);
    let other = text_of(&stream(&upstream, &ask("plain word")).await);
    assert_eq!(first, second);
    assert_ne!(first, other);
    assert!(
        first.starts_with("lab: 1 messages, 0 tools, last text 11 bytes"),
        "{first}"
    );
}

#[tokio::test]
async fn a_message_that_is_not_streamed_holds_the_same_blocks() {
    let upstream = start();
    let request = unstreamed(ask(
        "[[think why]] [[say hello]] [[call read {\"a\":1}]] [[raw-call x {bad]]",
    ));
    let message: Value =
        serde_json::from_str(&post(&upstream, &request).await.text().await.unwrap()).unwrap();
    assert_eq!(message["type"], "message");
    assert_eq!(message["content"][0]["thinking"], "why");
    assert!(
        !message["content"][0]["signature"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    assert_eq!(message["content"][1]["text"], "hello");
    assert_eq!(message["content"][2]["input"], json!({"a": 1}));
    assert_eq!(message["content"][3]["input"], "{bad");
    assert_eq!(message["stop_reason"], "tool_use");
}

#[tokio::test]
async fn calls_are_matched_to_the_offered_names() {
    let upstream = start();
    let schema = json!({"type": "object"});
    let mut request =
        ask("[[call read]] [[call mcp__turnpass__write]] [[call mcp__turnpass__none]]");
    request["tools"] = json!([
        {"name": "mcp__turnpass__read", "input_schema": schema},
        {"name": "write", "input_schema": schema},
    ]);
    let events = stream(&upstream, &request).await;
    let calls: Vec<&str> = events
        .iter()
        .filter_map(|event| event["content_block"]["name"].as_str())
        .collect();
    assert_eq!(
        calls,
        ["mcp__turnpass__read", "write", "mcp__turnpass__none"]
    );
}

/// The request that follows a reply: its message and a result for each of its calls.
fn with_results(mut request: Value, events: &[Value], result: &str) -> Value {
    let calls: Vec<Value> = events
        .iter()
        .filter(|event| event["content_block"]["type"] == "tool_use")
        .map(|event| event["content_block"].clone())
        .collect();
    let results: Vec<Value> = calls
        .iter()
        .map(|call| json!({"type": "tool_result", "tool_use_id": call["id"], "content": result}))
        .collect();
    let messages = request["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": calls}));
    messages.push(json!({"role": "user", "content": results}));
    request
}

#[tokio::test]
async fn then_follows_the_rounds_of_results() {
    let upstream = start();
    let text = "[[call a]] [[call b]] [[then [[call c]] [[then [[say done]]]]]]";
    let request = ask(text);
    let first = stream(&upstream, &request).await;
    let request = with_results(request, &first, "ok");
    let second = stream(&upstream, &request).await;
    assert_eq!(stop_reason(&second), "tool_use");
    let request = with_results(request, &second, "ok");
    let third = stream(&upstream, &request).await;
    assert_eq!(text_of(&third), "done");
    let request = with_results(request, &second, "[[say from the tool]]");
    // The same call twice would break a rule of the API, which is not what this test is about.
    let fourth = post(&upstream, &request).await;
    assert_eq!(fourth.status(), 400);
    assert!(fourth.text().await.unwrap().contains("occurs twice"));
}

#[tokio::test]
async fn directives_in_a_tool_result_win() {
    let upstream = start();
    let request = ask("[[call a]] [[then [[say from the user]]]]");
    let first = stream(&upstream, &request).await;
    let request = with_results(request, &first, "found: [[say from the tool]]");
    assert_eq!(text_of(&stream(&upstream, &request).await), "from the tool");
}

#[tokio::test]
async fn directives_of_an_ended_turn_are_done() {
    let upstream = start();
    let mut request = ask("[[say first]]");
    request["messages"].as_array_mut().unwrap().extend([
        json!({"role": "assistant", "content": [{"type": "text", "text": "first"}]}),
        json!({"role": "user", "content": [{"type": "text", "text": "plain"}]}),
    ]);
    let text = text_of(&stream(&upstream, &request).await);
    assert!(text.starts_with("lab: 3 messages"), "{text}");
    // A further text of the same turn, as clients add reminders, changes nothing.
    let reminder = json!({"type": "text", "text": "a reminder"});
    let said = json!({"type": "text", "text": "[[say second]]"});
    request["messages"][2]["content"] = json!([said, reminder]);
    assert_eq!(text_of(&stream(&upstream, &request).await), "second");
    let records = [
        json!({"role": "user", "content": "[[say old]]"}),
        json!({"role": "assistant", "content": "old"}),
        json!({"role": "user", "content": "plain"}),
    ];
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    let text = text_of(&stream(&upstream, &ask(&lines.join("\n"))).await);
    assert!(text.starts_with("lab: 1 messages"), "{text}");
}

#[tokio::test]
async fn a_transcript_of_records_is_looked_into() {
    let upstream = start();
    let records = [
        json!({"record": "header", "rules": "[[say wrong]]"}),
        json!({"role": "user", "content": [{"type": "text", "text": "[[call f {\"a\":\"]]\"}]] [[then [[say right]]]]"}]}),
        json!({"role": "assistant", "content": [{"type": "text", "text": "[[say never]]"}, {"type": "tool_use", "id": "x"}]}),
        json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": "one"},
            {"type": "tool_result", "tool_use_id": "y", "content": "two"}]}),
    ];
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    let until_call = stream(&upstream, &ask(&lines[..2].join("\n"))).await;
    assert_eq!(
        joined(&until_call, "input_json_delta", "partial_json"),
        r#"{"a":"]]"}"#
    );
    let whole = stream(&upstream, &ask(&lines.join("\n"))).await;
    assert_eq!(text_of(&whole), "right");
    let blocks: Vec<Value> = lines
        .iter()
        .map(|line| json!({"type": "text", "text": line}))
        .collect();
    let mut request = ask("");
    request["messages"][0]["content"] = json!(blocks);
    assert_eq!(text_of(&stream(&upstream, &request).await), "right");
}

#[tokio::test]
async fn unknown_directives_are_named_in_the_answer() {
    let upstream = start();
    let events = stream(&upstream, &ask("[[dance]] and [[stall long]]")).await;
    let text = text_of(&events);
    assert!(text.contains("[[dance]] is not a directive"), "{text}");
    assert!(text.contains("[[stall]] needs milliseconds"), "{text}");
}

#[tokio::test]
async fn stop_reasons_and_usage_are_any() {
    let upstream = start();
    let text = "[[say x]] [[stop refusal]] [[stop-details {\"why\":1}]] [[usage {\"output_tokens\":77,\"input_tokens\":5}]]";
    let events = stream(&upstream, &ask(text)).await;
    let delta = events
        .iter()
        .find(|event| event["type"] == "message_delta")
        .unwrap();
    assert_eq!(delta["delta"]["stop_reason"], "refusal");
    assert_eq!(delta["delta"]["stop_details"], json!({"why": 1}));
    assert_eq!(delta["usage"]["output_tokens"], 77);
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], 5);
    let null = stream(&upstream, &ask("[[say x]] [[stop null]]")).await;
    assert_eq!(stop_reason(&null), &Value::Null);
    let empty = stream(&upstream, &ask("[[empty]]")).await;
    assert_eq!(
        types(&empty),
        ["message_start", "message_delta", "message_stop"]
    );
}

#[tokio::test]
async fn status_and_error_directives() {
    let upstream = start();
    let reply = post(
        &upstream,
        &ask("[[status 429 {\"retry-after\":\"7\",\"x-n\":3}]]"),
    )
    .await;
    assert_eq!(reply.status(), 429);
    assert_eq!(reply.headers()["retry-after"], "7");
    assert_eq!(reply.headers()["x-n"], "3");
    let body: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    assert_eq!(body["error"]["type"], "rate_limit_error");

    let first = stream(
        &upstream,
        &ask("[[say x]] [[error overloaded_error start]]"),
    )
    .await;
    assert_eq!(types(&first), ["error"]);
    let mid = stream(&upstream, &ask("[[say x]] [[error overloaded_error mid]]")).await;
    assert_eq!(
        types(&mid),
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "error"
        ]
    );
    let whole = post(
        &upstream,
        &unstreamed(ask("[[say x]] [[error overloaded_error mid]]")),
    )
    .await;
    assert_eq!(whole.status(), 529);
}

#[tokio::test]
async fn text_of_a_size_in_chunks() {
    let upstream = start();
    let events = stream(&upstream, &ask("[[text-size 1000]] [[chunk 5 ms 0]]")).await;
    assert_eq!(text_of(&events).len(), 1000);
    let deltas = types(&events)
        .iter()
        .filter(|kind| **kind == "content_block_delta")
        .count();
    assert_eq!(deltas, 200);
}

#[tokio::test]
async fn scripted_replies_come_in_order_and_by_their_conditions() {
    let when = |when: When, text: &str| Reply {
        when,
        ..Reply::text(text)
    };
    let upstream = scripted([
        when(
            When {
                contains: Some("needle".into()),
                ..When::default()
            },
            "found",
        ),
        when(
            When {
                nth: Some(3),
                ..When::default()
            },
            "third",
        ),
        when(
            When {
                model: Some("other".into()),
                ..When::default()
            },
            "other model",
        ),
        Reply {
            times: 2,
            ..Reply::text("plain")
        },
    ]);
    let mut said = Vec::new();
    for text in ["a", "b", "c", "a needle", "[[say by directive]]"] {
        said.push(text_of(&stream(&upstream, &ask(text)).await));
    }
    assert_eq!(said, ["plain", "plain", "third", "found", "by directive"]);
    assert_eq!(upstream.replies_left(), 1);
}

#[tokio::test]
async fn replies_may_be_directives_blocks_or_raw_events() {
    let upstream = scripted([
        Reply::directives("[[say scripted]] [[stop pause_turn]]"),
        Reply::content([
            Item::Block {
                block: json!({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}),
                deltas: vec![json!({"type": "new_delta", "x": 1})],
            },
            Item::RedactedThinking {
                data: Some("opaque".into()),
            },
            Item::ToolUse {
                name: "n".into(),
                id: Some("toolu_x".into()),
                input: None,
                raw: Some(vec!["{\"a".into(), "\": tru".into()]),
                chunk: None,
            },
        ]),
        Reply {
            events: Some(vec![
                json!({"type": "message_start", "message": {"content": []}}),
                json!({"type": "odd"}),
            ]),
            ..Reply::default()
        },
        Reply::error(403, "permission_error", "no"),
    ]);
    let first = stream(&upstream, &ask("x")).await;
    assert_eq!(
        (text_of(&first).as_str(), stop_reason(&first)),
        ("scripted", &json!("pause_turn"))
    );
    let second = stream(&upstream, &ask("x")).await;
    assert!(
        second
            .iter()
            .any(|event| event["delta"]["type"] == "new_delta")
    );
    assert!(
        second
            .iter()
            .any(|event| event["content_block"]["data"] == "opaque")
    );
    assert_eq!(
        joined(&second, "input_json_delta", "partial_json"),
        "{\"a\": tru"
    );
    assert_eq!(
        types(&stream(&upstream, &ask("x")).await),
        ["message_start", "odd"]
    );
    assert_eq!(post(&upstream, &ask("x")).await.status(), 403);
}
