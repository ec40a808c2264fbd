//! The prompt cache, seen in `usage` and in the record.

use std::time::Duration;

use serde_json::{Value, json};
use turnpass_lab::upstream::{CacheOptions, CacheReport, Checks, Clock, Options, Upstream};

use crate::support::*;

fn start_with(clock: &Clock, min_tokens: u64) -> Upstream {
    Upstream::start(Options {
        checks: Checks::none(),
        cache: CacheOptions {
            min_tokens,
            min_tokens_by_model: [("big".to_owned(), 100_000)].into(),
            clock: clock.clone(),
            ..CacheOptions::default()
        },
        ..Options::default()
    })
    .unwrap()
}

fn block(text: &str, ttl: Option<&str>) -> Value {
    let mut block = json!({"type": "text", "text": text});
    if let Some(ttl) = ttl {
        block["cache_control"] = json!({"type": "ephemeral", "ttl": ttl});
    }
    block
}

fn request(system: &[Value], blocks: &[Value]) -> Value {
    json!({"model": "m", "max_tokens": 9, "system": system,
        "messages": [{"role": "user", "content": blocks}]})
}

/// Posts a request; gives its usage and its report, which must agree.
async fn usage(upstream: &Upstream, request: &Value) -> CacheReport {
    let body = post(upstream, request).await.text().await.unwrap();
    let usage = serde_json::from_str::<Value>(&body).unwrap()["usage"].clone();
    let report = upstream.messages().pop().unwrap().cache.unwrap();
    assert_eq!(usage["input_tokens"], report.input);
    assert_eq!(usage["cache_read_input_tokens"], report.read);
    assert_eq!(
        usage["cache_creation_input_tokens"],
        report.created_5m + report.created_1h
    );
    assert_eq!(
        usage["cache_creation"]["ephemeral_5m_input_tokens"],
        report.created_5m
    );
    assert_eq!(
        usage["cache_creation"]["ephemeral_1h_input_tokens"],
        report.created_1h
    );
    assert_eq!(
        report.read + report.created_5m + report.created_1h + report.input,
        report.total
    );
    report
}

#[tokio::test]
async fn a_growing_conversation_reads_what_it_wrote() {
    let upstream = start_with(&Clock::manual(), 0);
    let system = [block("the system prompt", Some("1h"))];
    let first = usage(&upstream, &request(&system, &[block("one", Some("5m"))])).await;
    assert_eq!((first.read, first.input, first.prior), (0, 0, 0));
    assert_eq!(first.share_read(), None);
    assert!(first.created_1h > 0 && first.created_5m > 0);
    // The mark moves on to the new last block; the old block without its mark is still the same prefix.
    let grown = request(
        &system,
        &[
            block("one", None),
            block("two", Some("5m")),
            block("three", None),
        ],
    );
    let second = usage(&upstream, &grown).await;
    assert_eq!(second.read, first.total);
    assert_eq!(second.prior, first.total);
    assert_eq!(second.share_read(), Some(1.0));
    assert!(second.created_5m > 0 && second.created_1h == 0 && second.input > 0);
}

#[tokio::test]
async fn entries_end_with_their_time_to_live_and_reading_renews_them() {
    let clock = Clock::manual();
    let upstream = start_with(&clock, 0);
    let request = request(
        &[block("system", Some("1h"))],
        &[block("words", Some("5m"))],
    );
    let first = usage(&upstream, &request).await;
    clock.advance(Duration::from_secs(299));
    assert_eq!(usage(&upstream, &request).await.read, first.total);
    clock.advance(Duration::from_secs(299));
    assert_eq!(usage(&upstream, &request).await.read, first.total);
    clock.advance(Duration::from_secs(301));
    let expired = usage(&upstream, &request).await;
    assert_eq!(expired.read, first.created_1h);
    assert_eq!(expired.created_5m, first.created_5m);
    assert_eq!(expired.share_read().map(|share| share < 1.0), Some(true));
    clock.advance(Duration::from_secs(3_601));
    assert_eq!(usage(&upstream, &request).await.read, 0);
}

#[tokio::test]
async fn a_breakpoint_looks_back_over_twenty_blocks() {
    let blocks = |count: usize| -> Vec<Value> {
        (0..count)
            .map(|at| block(&format!("block {at}"), (at + 1 == count).then_some("5m")))
            .collect()
    };
    for (grown, reads) in [(20, true), (21, false)] {
        let upstream = start_with(&Clock::manual(), 0);
        let first = usage(&upstream, &request(&[], &blocks(1))).await;
        let second = usage(&upstream, &request(&[], &blocks(grown))).await;
        assert_eq!(second.read, if reads { first.total } else { 0 }, "{grown}");
        assert_eq!(second.prior, first.total);
    }
}

#[tokio::test]
async fn short_prefixes_and_other_models_are_not_cached() {
    let upstream = start_with(&Clock::manual(), 50);
    let short = request(&[], &[block("short", Some("5m"))]);
    usage(&upstream, &short).await;
    assert_eq!(usage(&upstream, &short).await.read, 0);
    let mut long = request(&[], &[block(&"long ".repeat(100), Some("5m"))]);
    let first = usage(&upstream, &long).await;
    assert_eq!(usage(&upstream, &long).await.read, first.total);
    long["model"] = json!("big");
    usage(&upstream, &long).await;
    assert_eq!(usage(&upstream, &long).await.read, 0);
}

#[tokio::test]
async fn bug_097_a_changed_first_system_block_misses_everything() {
    let upstream = start_with(&Clock::manual(), 0);
    let with = |nonce: &str| {
        request(
            &[block(nonce, None), block("prompt", Some("1h"))],
            &[block("x", Some("1h"))],
        )
    };
    let first = usage(&upstream, &with("cch=1")).await;
    assert_eq!(usage(&upstream, &with("cch=2")).await.read, 0);
    assert_eq!(usage(&upstream, &with("cch=1")).await.read, first.total);
}

#[tokio::test]
async fn changed_thinking_settings_keep_tools_and_system_only() {
    let upstream = start_with(&Clock::manual(), 0);
    let mut request = request(&[block("prompt", Some("1h"))], &[block("x", Some("5m"))]);
    let first = usage(&upstream, &request).await;
    request["thinking"] = json!({"type": "adaptive"});
    assert_eq!(usage(&upstream, &request).await.read, first.created_1h);
}

#[tokio::test]
async fn a_request_wide_mark_and_a_plain_text_are_blocks_too() {
    let upstream = start_with(&Clock::manual(), 0);
    let plain = json!({"model": "m", "max_tokens": 9, "cache_control": {"type": "ephemeral"},
        "messages": [{"role": "user", "content": "words"}]});
    let first = usage(&upstream, &plain).await;
    assert_eq!(first.created_5m, first.total);
    let as_block = request(&[], &[block("words", Some("5m"))]);
    assert_eq!(usage(&upstream, &as_block).await.read, first.total);
}

#[tokio::test]
async fn count_tokens_is_the_same_estimate() {
    let upstream = start_with(&Clock::manual(), 0);
    let request = request(&[block("prompt", None)], &[block("x", None)]);
    let url = format!("{}/v1/messages/count_tokens", upstream.url());
    let reply = client()
        .post(url)
        .body(request.to_string())
        .send()
        .await
        .unwrap();
    let counted: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    assert_eq!(
        counted["input_tokens"],
        usage(&upstream, &request).await.total
    );
    assert_eq!(upstream.requests().len(), 2);
    assert_eq!(upstream.messages().len(), 1);
}
