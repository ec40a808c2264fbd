//! The refusals of the real API, each with its place in the message.

use serde_json::{Value, json};
use turnpass_lab::upstream::{Check, Checks, Options, REQUEST_LIMIT_BYTES, Upstream};

use crate::support::*;

fn request(messages: Value) -> Value {
    json!({"model": "claude-sonnet-5-5", "max_tokens": 9, "messages": messages})
}

fn user(content: Value) -> Value {
    json!({"role": "user", "content": content})
}

fn assistant(content: Value) -> Value {
    json!({"role": "assistant", "content": content})
}

fn call(id: &str) -> Value {
    json!({"type": "tool_use", "id": id, "name": "t", "input": {}})
}

fn result(id: &str) -> Value {
    json!({"type": "tool_result", "tool_use_id": id, "content": "r"})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Posts a request; gives the message of its refusal, or an empty one.
async fn refusal(upstream: &Upstream, request: &Value) -> String {
    let reply = post(upstream, request).await;
    let status = reply.status();
    let body: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    if status == 200 {
        return String::new();
    }
    assert_eq!(status, 400, "{body}");
    assert_eq!(body["type"], "error");
    assert_eq!(body["error"]["type"], "invalid_request_error");
    body["error"]["message"].as_str().unwrap().to_owned()
}

/// Each request breaks exactly this rule, at this place; without the rule it is served.
async fn breaks(cases: Vec<(Value, Check, &str)>) {
    for (request, check, place) in cases {
        let upstream = start();
        let message = refusal(&upstream, &request).await;
        assert!(
            message.starts_with(&format!("{place}: ")),
            "{check:?}: {message}\n{request}"
        );
        let fired: Vec<Check> = upstream.requests()[0]
            .violations
            .iter()
            .map(|each| each.check)
            .collect();
        assert_eq!(fired, [check], "{request}");
        let without = Upstream::start(Options {
            checks: Checks::default().without(check),
            ..Options::default()
        })
        .unwrap();
        assert_eq!(refusal(&without, &request).await, "", "{request}");
    }
}

#[tokio::test]
async fn roles_and_contents() {
    let mut no_tokens = request(json!([user(json!("x"))]));
    no_tokens["max_tokens"] = json!(0);
    breaks(vec![
        (no_tokens, Check::MaxTokens, "max_tokens"),
        (
            request(json!([user(json!("x")), {"role": "tool", "content": "y"}])),
            Check::Roles,
            "messages.1.role",
        ),
        (
            request(json!([assistant(json!("x")), user(json!("y"))])),
            Check::FirstIsUser,
            "messages.0.role",
        ),
        (
            request(json!([user(json!([]))])),
            Check::EmptyContent,
            "messages.0",
        ),
        (
            request(json!([user(json!(""))])),
            Check::EmptyContent,
            "messages.0",
        ),
    ])
    .await;
}

#[tokio::test]
async fn bug_105_empty_text_is_refused_and_empty_results_are_not() {
    breaks(vec![(
        request(json!([user(json!([text("a"), text("")]))])),
        Check::EmptyText,
        "messages.0.content.1.text",
    )])
    .await;
    let upstream = start();
    for content in [json!(""), json!([]), Value::Null] {
        let empty = json!({"type": "tool_result", "tool_use_id": "a", "content": content});
        let request = request(json!([
            user(json!("x")),
            assistant(json!([call("a")])),
            user(json!([empty]))
        ]));
        assert_eq!(refusal(&upstream, &request).await, "");
    }
}

#[tokio::test]
async fn bug_106_results_and_calls_belong_together() {
    let before = || [user(json!("x")), assistant(json!([call("a"), call("b")]))];
    let with = |rest: &[Value]| {
        let mut messages = before().to_vec();
        messages.extend_from_slice(rest);
        request(json!(messages))
    };
    breaks(vec![
        (
            with(&[user(json!([result("a")]))]),
            Check::CallsAnswered,
            "messages.1",
        ),
        (
            with(&[user(json!([result("b"), result("a"), result("c")]))]),
            Check::ResultsBelong,
            "messages.2.content.2.tool_use_id",
        ),
        (
            with(&[user(json!([result("a"), result("b"), result("a")]))]),
            Check::UniqueIds,
            "messages.2.content.2.tool_use_id",
        ),
        (
            with(&[user(json!([result("a"), text("t"), result("b")]))]),
            Check::ResultsFirst,
            "messages.2.content.2",
        ),
        (
            request(json!([
                user(json!("x")),
                assistant(json!([call("a")])),
                user(json!([result("a")])),
                assistant(json!([call("a")])),
                user(json!([result("a")]))
            ])),
            Check::UniqueIds,
            "messages.3.content.0.id",
        ),
    ])
    .await;
    let upstream = start();
    let split = with(&[user(json!([result("a")])), user(json!([result("b")]))]);
    assert!(
        refusal(&upstream, &split)
            .await
            .contains("messages.1: tool_use without tool_result in the next message: b")
    );
    let good = with(&[user(json!([result("b"), result("a"), text("then text")]))]);
    assert_eq!(refusal(&upstream, &good).await, "");
}

#[tokio::test]
async fn bug_104_system_messages_have_a_place() {
    let system = json!({"role": "system", "content": "note"});
    let upstream = start();
    let after_user = request(json!([user(json!("x")), system]));
    assert_eq!(refusal(&upstream, &after_user).await, "");
    let empty = request(json!([user(json!("x")), {"role": "system", "content": []}]));
    assert_eq!(refusal(&upstream, &empty).await, "");
    let between = request(json!([
        user(json!("x")),
        assistant(json!([call("a")])),
        system,
        user(json!([result("a")]))
    ]));
    assert!(
        refusal(&upstream, &between)
            .await
            .starts_with("messages.1: tool_use without")
    );
    let first = request(json!([system, user(json!("x"))]));
    assert!(
        refusal(&upstream, &first)
            .await
            .starts_with("messages.0.role: ")
    );
    let mut checks = Checks::default();
    checks.system_role = false;
    let strict = Upstream::start(Options {
        checks,
        ..Options::default()
    })
    .unwrap();
    assert!(
        refusal(&strict, &after_user)
            .await
            .starts_with("messages.1.role: ")
    );
}

#[tokio::test]
async fn bug_109_the_last_message_is_not_the_assistants() {
    let prefilled = request(json!([user(json!("x")), assistant(json!("And so"))]));
    breaks(vec![(
        prefilled.clone(),
        Check::LastIsNotAssistant,
        "messages.1",
    )])
    .await;
    let upstream = start();
    let mut old = prefilled;
    old["model"] = json!("claude-sonnet-4-5-20250929");
    assert_eq!(refusal(&upstream, &old).await, "");
    old["messages"][1]["content"] = json!([call("a")]);
    assert!(refusal(&upstream, &old).await.contains("next message: a"));
}

#[tokio::test]
async fn bug_098_thinking_comes_back_as_it_was_issued() {
    let upstream = start();
    let said = unstreamed(ask(
        r#"[[think " a\r\n b "]] [[say x]] [[redacted]] [[think ""]]"#,
    ));
    let reply = post(&upstream, &said).await.text().await.unwrap();
    let content = serde_json::from_str::<Value>(&reply).unwrap()["content"].clone();
    assert_eq!(content[0]["thinking"], " a\r\n b ");
    let back = |content: &Value| {
        request(json!([
            user(json!("x")),
            assistant(content.clone()),
            user(json!("y"))
        ]))
    };
    assert_eq!(refusal(&upstream, &back(&content)).await, "");

    for (pointer, wrong, place) in [
        ("/0/thinking", "a\r\n b", "messages.1.content.0.signature"),
        ("/0/signature", "bm9uZQ==", "messages.1.content.0.signature"),
        ("/2/data", "bm9uZQ==", "messages.1.content.2.data"),
        ("/3/thinking", "filled in", "messages.1.content.3.signature"),
    ] {
        let mut altered = content.clone();
        *altered.pointer_mut(pointer).unwrap() = json!(wrong);
        assert!(
            refusal(&upstream, &back(&altered)).await.starts_with(place),
            "{pointer}"
        );
    }
    let other = start();
    assert!(!refusal(&other, &back(&content)).await.is_empty());
    let recorded =
        json!([{"type": "thinking", "thinking": "from a recording", "signature": "recorded"}]);
    assert!(!refusal(&other, &back(&recorded)).await.is_empty());
    other.admit_signature("recorded");
    assert_eq!(refusal(&other, &back(&recorded)).await, "");
}

fn marked(text: &str, ttl: Option<&str>) -> Value {
    let control = match ttl {
        Some(ttl) => json!({"type": "ephemeral", "ttl": ttl}),
        None => json!({"type": "ephemeral"}),
    };
    json!({"type": "text", "text": text, "cache_control": control})
}

#[tokio::test]
async fn bug_096_cache_marks_are_few_ordered_and_in_place() {
    let with_system = |system: Value, messages: Value| {
        let mut request = request(messages);
        request["system"] = system;
        request
    };
    let five = json!([
        marked("a", None),
        marked("b", None),
        marked("c", None),
        marked("d", None),
        marked("e", None)
    ]);
    let thinking = {
        let upstream = Upstream::start(Options {
            signing_key: Some([1; 32]),
            ..Options::default()
        })
        .unwrap();
        json!({"type": "thinking", "thinking": "t", "signature": upstream.sign("t"),
            "cache_control": {"type": "ephemeral"}})
    };
    breaks(vec![
        (
            request(json!([user(five)])),
            Check::CacheMarks,
            "cache_control",
        ),
        (
            with_system(
                json!([marked("s", Some("5m"))]),
                json!([user(json!([marked("m", Some("1h"))]))]),
            ),
            Check::CacheOrder,
            "messages.0.content.0.cache_control.ttl",
        ),
    ])
    .await;
    let deep =
        json!({"type": "tool_result", "tool_use_id": "a", "content": [marked("deep", Some("1h"))]});
    let nested = with_system(
        json!([marked("s", None)]),
        json!([
            user(json!("x")),
            assistant(json!([call("a")])),
            user(json!([deep]))
        ]),
    );
    let place = "messages.2.content.0.content.0.cache_control.ttl";
    breaks(vec![(nested, Check::CacheOrder, place)]).await;
    let keyed = || {
        Upstream::start(Options {
            signing_key: Some([1; 32]),
            ..Options::default()
        })
        .unwrap()
    };
    let on_thinking = request(json!([
        user(json!("x")),
        assistant(json!([thinking])),
        user(json!("y"))
    ]));
    assert!(
        refusal(&keyed(), &on_thinking)
            .await
            .starts_with("messages.1.content.0.cache_control: ")
    );
    let on_empty = request(json!([user(json!([marked("", None)]))]));
    let upstream = start();
    refusal(&upstream, &on_empty).await;
    let fired: Vec<Check> = upstream.requests()[0]
        .violations
        .iter()
        .map(|each| each.check)
        .collect();
    assert_eq!(fired, [Check::EmptyText, Check::CachePlace]);
    let good = with_system(
        json!([marked("s", Some("1h")), marked("t", Some("1h"))]),
        json!([user(json!([
            marked("m", Some("1h")),
            marked("n", Some("5m"))
        ]))]),
    );
    assert_eq!(refusal(&upstream, &good).await, "");
}

#[tokio::test]
async fn tools_and_names() {
    let with = |tools: Value| {
        let mut request = request(json!([user(json!("x"))]));
        request["tools"] = tools;
        request
    };
    let tool = |name: &str, schema: Value| json!({"name": name, "input_schema": schema});
    let object = || json!({"type": "object"});
    let with_call = |name: &str, id: &str| {
        request(json!([
            user(json!("x")),
            assistant(json!([{"type": "tool_use", "id": id, "name": name, "input": {}}])),
            user(json!([result(id)]))
        ]))
    };
    breaks(vec![
        (
            with(json!([tool("a", json!({"properties": {}}))])),
            Check::Schemas,
            "tools.0.input_schema.type",
        ),
        (
            with(json!([tool("a", json!({"type": "object", "anyOf": []}))])),
            Check::Schemas,
            "tools.0.input_schema",
        ),
        (
            with(json!([{"name": "a"}])),
            Check::Schemas,
            "tools.0.input_schema",
        ),
        (
            with(json!([tool("a", object()), tool("a", object())])),
            Check::UniqueTools,
            "tools.1.name",
        ),
        (
            with(json!([tool("a b", object())])),
            Check::Names,
            "tools.0.name",
        ),
        (
            with(json!([tool(&"n".repeat(129), object())])),
            Check::Names,
            "tools.0.name",
        ),
        (
            with_call("n", "functions.bash:0"),
            Check::Names,
            "messages.1.content.0.id",
        ),
        (
            with_call("n n", "a"),
            Check::Names,
            "messages.1.content.0.name",
        ),
    ])
    .await;
    let upstream = start();
    let server_tool = with(
        json!([{"type": "web_search_20250305", "name": "web_search"}, tool(&"n".repeat(128), object())]),
    );
    assert_eq!(refusal(&upstream, &server_tool).await, "");
}

#[tokio::test]
async fn bug_101_references_to_tools_that_are_not_offered() {
    let mut referring = request(json!([user(
        json!([{"type": "tool_reference", "tool_name": "later"}])
    )]));
    breaks(vec![(
        referring.clone(),
        Check::References,
        "messages.0.content.0.tool_name",
    )])
    .await;
    referring["tools"] =
        json!([{"name": "later", "input_schema": {"type": "object"}, "defer_loading": true}]);
    assert_eq!(refusal(&start(), &referring).await, "");
}

#[tokio::test]
async fn what_is_no_request_at_all() {
    let upstream = start();
    for (body, place) in [
        ("{", "body"),
        ("[]", "body"),
        ("{\"model\":\"m\"}", "messages"),
        ("", "body"),
    ] {
        let url = format!("{}/v1/messages", upstream.url());
        let reply = client().post(url).body(body).send().await.unwrap();
        assert_eq!(reply.status(), 400);
        let text = reply.text().await.unwrap();
        assert!(text.contains(&format!("\"message\":\"{place}: ")), "{text}");
    }
}

#[tokio::test]
async fn too_large_is_413() {
    let upstream = start();
    let filler = "x".repeat(REQUEST_LIMIT_BYTES as usize);
    let reply = post(&upstream, &request(json!([user(json!(filler))]))).await;
    assert_eq!(reply.status(), 413);
    assert!(reply.text().await.unwrap().contains("request_too_large"));
    let recorded = &upstream.requests()[0];
    assert_eq!(recorded.violations[0].check, Check::Size);
    assert_eq!(recorded.body.len() as u64, REQUEST_LIMIT_BYTES);
    assert!(recorded.body_bytes > REQUEST_LIMIT_BYTES);
}

#[tokio::test]
async fn record_only_serves_what_it_finds_fault_with() {
    let upstream = Upstream::start(Options {
        checks: Checks::default().record_only(),
        ..Options::default()
    })
    .unwrap();
    let wrong = request(json!([assistant(json!(""))]));
    assert_eq!(refusal(&upstream, &wrong).await, "");
    let fired: Vec<Check> = upstream.requests()[0]
        .violations
        .iter()
        .map(|each| each.check)
        .collect();
    assert_eq!(fired, [Check::FirstIsUser, Check::LastIsNotAssistant]);
}

#[tokio::test]
async fn edits_of_thinking_need_thinking() {
    let mut off = request(json!([user(json!("x"))]));
    off["context_management"] =
        json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    off["thinking"] = json!({"type": "disabled"});
    let place = "context_management.edits.0";
    breaks(vec![(off.clone(), Check::ThinkingEdits, place)]).await;
    off["context_management"] = json!({"edits": []});
    assert_eq!(refusal(&start(), &off).await, "");
    off["context_management"] = json!({"edits": [{"type": "clear_thinking_20251015"}]});
    off["thinking"] = json!({"type": "adaptive"});
    assert_eq!(refusal(&start(), &off).await, "");
}
