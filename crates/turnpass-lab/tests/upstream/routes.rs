//! The routes beside Messages.

use reqwest::Method;
use serde_json::{Value, json};
use turnpass_lab::scenario::{ExtraUsage, Scenario, TokenAnswer, UsageAnswer};
use turnpass_lab::upstream::{Options, Upstream};

use crate::support::*;

async fn call(upstream: &Upstream, method: Method, path: &str) -> (u16, Value) {
    let url = format!("{}{path}", upstream.url());
    let reply = client().request(method, url).send().await.unwrap();
    let status = reply.status().as_u16();
    let text = reply.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or_default())
}

#[tokio::test]
async fn models_are_listed_and_found() {
    let upstream = start();
    let (status, list) = call(&upstream, Method::GET, "/v1/models?limit=5").await;
    assert_eq!(
        (status, &list["first_id"]),
        (200, &json!("claude-opus-5-5"))
    );
    assert_eq!(list["data"][0]["type"], "model");
    assert_eq!(
        call(&upstream, Method::GET, "/v1/models/claude-haiku-5-5")
            .await
            .1["id"],
        "claude-haiku-5-5"
    );
    let (status, error) = call(&upstream, Method::GET, "/v1/models/none").await;
    assert_eq!(
        (status, &error["error"]["type"]),
        (404, &json!("not_found_error"))
    );
}

#[tokio::test]
async fn usage_says_what_the_script_says() {
    let upstream = start();
    let body = call(&upstream, Method::GET, "/api/oauth/usage").await.1;
    assert_eq!(body["extra_usage"]["is_enabled"], json!(false));
    assert_eq!(body["five_hour"]["utilization"], json!(12.0));
    let with = |extra_usage| UsageAnswer {
        extra_usage,
        ..UsageAnswer::default()
    };
    upstream.set_usage([
        with(ExtraUsage::On),
        with(ExtraUsage::Missing),
        with(ExtraUsage::Null),
        UsageAnswer {
            status: 429,
            headers: [("retry-after".to_owned(), "3".to_owned())].into(),
            ..UsageAnswer::default()
        },
        UsageAnswer {
            extra: json!({"seven_day_opus": null}).as_object().unwrap().clone(),
            delay_ms: 5,
            ..UsageAnswer::default()
        },
    ]);
    let mut said = Vec::new();
    for _ in 0..3 {
        said.push(
            call(&upstream, Method::GET, "/api/oauth/usage")
                .await
                .1
                .get("extra_usage")
                .cloned(),
        );
    }
    assert_eq!(said[0].as_ref().unwrap()["is_enabled"], json!(true));
    assert_eq!(said[1..], [None, Some(Value::Null)]);
    assert_eq!(
        call(&upstream, Method::GET, "/api/oauth/usage").await.0,
        429
    );
    for _ in 0..2 {
        assert!(
            call(&upstream, Method::GET, "/api/oauth/usage")
                .await
                .1
                .get("seven_day_opus")
                .is_some()
        );
    }
}

#[tokio::test]
async fn a_usage_answer_that_never_comes_ends_with_the_client() {
    let upstream = start();
    upstream.set_usage([UsageAnswer {
        never: true,
        ..UsageAnswer::default()
    }]);
    let url = format!("{}/api/oauth/usage", upstream.url());
    let asking = tokio::spawn(client().get(url).send());
    upstream.wait_requests(1).await.unwrap();
    asking.abort();
    let left = upstream
        .wait_for("the client leaving", |each| {
            each.client_closed_at().is_some()
        })
        .await;
    assert_eq!(left.unwrap().reply.status, None);
}

#[tokio::test]
async fn tokens_profile_and_hello() {
    let scenario = Scenario {
        token: vec![
            TokenAnswer::default(),
            TokenAnswer {
                status: 400,
                ..TokenAnswer::default()
            },
        ],
        profile: Some(json!({"account": {"email": "other@example.invalid"}})),
        headers: [(
            "anthropic-ratelimit-unified-status".to_owned(),
            "allowed".to_owned(),
        )]
        .into(),
        ..Scenario::default()
    };
    let upstream = Upstream::start(Options {
        scenario,
        ..Options::default()
    })
    .unwrap();
    let (status, token) = call(&upstream, Method::POST, "/v1/oauth/token").await;
    assert_eq!((status, &token["token_type"]), (200, &json!("Bearer")));
    assert_eq!(token["access_token"], "sk-ant-oat01-MADE-UP-1");
    let (status, refused) = call(&upstream, Method::POST, "/v1/oauth/token").await;
    assert_eq!((status, &refused["error"]), (400, &json!("invalid_grant")));
    assert_eq!(
        call(&upstream, Method::GET, "/api/oauth/profile").await.1["account"]["email"],
        "other@example.invalid"
    );
    assert_eq!(call(&upstream, Method::HEAD, "/api/hello").await.0, 200);
    let (status, nothing) = call(&upstream, Method::PUT, "/other?a=b").await;
    assert_eq!(
        (status, &nothing["error"]["type"]),
        (404, &json!("not_found_error"))
    );
    let reply = post(&upstream, &ask("x")).await;
    assert_eq!(
        reply.headers()["anthropic-ratelimit-unified-status"],
        "allowed"
    );
    assert!(reply.headers().contains_key("request-id"));
    let paths: Vec<String> = upstream
        .requests()
        .into_iter()
        .map(|each| each.path)
        .collect();
    assert_eq!(
        paths,
        [
            "/v1/oauth/token",
            "/v1/oauth/token",
            "/api/oauth/profile",
            "/api/hello",
            "/other",
            "/v1/messages"
        ]
    );
    assert_eq!(upstream.requests()[4].query.as_deref(), Some("a=b"));
}
