//! What else the CLI asks over the relay: nothing of it reaches the service, and nothing of it gets the history.

use std::time::Duration;

use serde_json::{Value, json};
use turnpass::ErrorCode;
use turnpass_lab::scenario::{Cut, CutAt, CutHow, Item, Reply};

use crate::stage::{MODES, ROWS, Row, Stage, ask, ask_with_tools, told};
use crate::{body, post, posted, turns};

/// What a CLI may ask before the real request: probes, a title, a quota check.
fn helpers(row: Row) -> Vec<Value> {
    let quota = json!({"model": "claude-haiku-5-5", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]});
    vec![
        posted(
            row,
            json!({"method": "HEAD", "path": "/", "reply": "ignore", "body": null}),
        ),
        posted(
            row,
            json!({"method": "GET", "path": "/v1/models?limit=10", "reply": "ignore", "body": null}),
        ),
        posted(
            row,
            json!({"path": "/v1/messages/count_tokens?beta=true", "reply": "ignore", "body": body(json!([]))}),
        ),
        posted(
            row,
            json!({"reply": "ignore", "expect_status": 410, "body": quota}),
        ),
        posted(
            row,
            json!({"reply": "ignore", "expect_status": 410, "body": body(json!([{"role": "user", "content": "Make a title"}]))}),
        ),
    ]
}

#[tokio::test]
async fn bug_094_only_the_request_with_the_placeholder_reaches_the_service() {
    for row in MODES {
        let mut steps = helpers(row);
        steps.push(post(row));
        let stage = Stage::json(json!({"runs": [turns(row, steps)]}));
        let provider = stage.provider(row);
        for at in 1..=2 {
            let heard = told(&provider, ask("a secret story [[say told]]")).await;
            assert_eq!(heard.text(), "told");
            assert_eq!(heard.done().upstream_requests, 1);
            let all = stage.upstream.requests();
            assert_eq!(all.len(), at, "of every route");
            assert!(String::from_utf8_lossy(&all[at - 1].body).contains("a secret story"));
        }
    }
}

#[tokio::test]
async fn bug_094_a_cli_that_never_sends_the_placeholder_is_told_so() {
    for row in MODES {
        let other = || {
            posted(
                row,
                json!({"reply": "ignore", "body": body(json!([{"role": "user", "content": "other"}]))}),
            )
        };
        let steps: Vec<_> = (0..8).map(|_| other()).chain([json!("hang")]).collect();
        let stage = Stage::json(json!({"runs": [turns(row, steps)]}));
        let heard = told(&stage.provider(row), ask("x")).await;
        heard.failed(ErrorCode::RelayTransit);
        assert!(stage.sent().is_empty());
    }
}

#[tokio::test]
async fn bug_094_a_placeholder_that_stands_in_another_place_is_not_taken() {
    for row in MODES {
        let forms = [
            json!([{"role": "user", "content": "about turnpass placeholder and more"}]),
            json!([{"role": "assistant", "content": "turnpass placeholder"}, {"role": "user", "content": "x"}]),
        ];
        for form in forms {
            let steps = [
                posted(row, json!({"reply": "ignore", "body": body(form.clone())})),
                json!("hang"),
            ];
            let stage = Stage::json(json!({"runs": [turns(row, steps)]}));
            let mut request = ask("x");
            request.limits = crate::stage::limits(1_500, 60_000, 120_000);
            told(&stage.provider(row), request).await.error();
            assert!(stage.sent().is_empty(), "{form}");
        }
    }
}

#[tokio::test]
async fn bug_094_a_second_generation_is_refused_and_the_first_stands() {
    for row in MODES {
        let again = posted(row, json!({"reply": "ignore", "expect_status": 410}));
        let stage = Stage::json(json!({"runs": [turns(row, [
            posted(row, json!({"reply": "forward_no_result"})), again.clone(), again,
            json!({"send": {"type": "result", "subtype": "success", "is_error": false, "terminal_reason": "completed",
                "result": "x", "num_turns": 1, "session_id": "s", "uuid": "v"}}),
        ])]}));
        let heard = told(&stage.provider(row), ask("[[say first]]")).await;
        assert_eq!(heard.text(), "first");
        assert_eq!(heard.refused_requests(), 2, "{row:?}");
        assert_eq!(stage.sent().len(), 1);
    }
}

#[tokio::test]
async fn bug_125_a_browser_s_request_is_refused_and_changes_nothing() {
    for row in MODES {
        let foreign = json!({
            "reply": "ignore", "expect_status": 403, "headers": {"origin": "https://evil.example"},
        });
        let stage = Stage::json(json!({"runs": [turns(row, [posted(row, foreign), post(row)])]}));
        let heard = told(&stage.provider(row), ask("[[say mine]]")).await;
        assert_eq!(heard.text(), "mine");
        assert_eq!((heard.refused_requests(), stage.sent().len()), (0, 1));
    }
}

#[tokio::test]
async fn bug_059_one_call_is_one_request_also_after_a_while() {
    for row in ROWS {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        let heard = told(&provider, ask_with_tools(r#"[[call read {"path":"a"}]]"#)).await;
        assert_eq!(heard.calls().len(), 1);
        provider.shutdown().await.unwrap();
        stage.all_gone(Duration::from_secs(5)).await;
        // Nobody is left that could ask.
        assert_eq!(stage.sent().len(), 1, "{row:?}");
    }
}

#[tokio::test]
async fn bug_094_a_stream_that_breaks_is_retryable_and_not_repeated_by_the_cli() {
    for row in ROWS {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        for at in [CutAt::Event(1), CutAt::Event(3), CutAt::BeforeMessageDelta] {
            let cut = Cut {
                at,
                how: CutHow::End,
            };
            stage.upstream.enqueue(Reply {
                cut: Some(cut),
                ..Reply::content([Item::text("some words of an answer")])
            });
            let heard = told(&provider, ask("x")).await;
            assert!(heard.failed(ErrorCode::StreamInterrupted).is_retryable());
        }
        assert_eq!(stage.sent().len(), 3, "{row:?}");
    }
}

#[tokio::test]
async fn bug_129_failures_for_ever_are_told_at_once_whatever_the_cli_would_do() {
    for row in MODES {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        for at in 1..=3 {
            stage
                .upstream
                .enqueue(Reply::error(529, "overloaded_error", "busy"));
            let heard = told(&provider, ask("x")).await;
            heard.failed(ErrorCode::Overloaded);
            assert!(heard.took < Duration::from_secs(5), "{:?}", heard.took);
            assert_eq!(stage.sent().len(), at);
        }
        for run in stage.recording().runs {
            assert!(!run.environment.contains_key("CLAUDE_CODE_RETRY_WATCHDOG"));
        }
    }
}

#[tokio::test]
async fn the_cli_s_request_after_a_drop_costs_nothing() {
    // The host leaves between the line and the request.
    let row = crate::stage::WARM;
    let stage = Stage::json(json!({"runs": [turns(row, [json!({"sleep_ms": 400}), post(row)])]}));
    let provider = stage.provider(row);
    let generation = provider.generate(ask("[[say old]]"));
    let began = stage.recorded("a started turn", |recording| {
        recording
            .runs
            .iter()
            .any(|run| run.stdin.iter().any(|line| line.json()["type"] == "user"))
    });
    began.await;
    drop(generation);
    assert_eq!(told(&provider, ask("[[say new]]")).await.text(), "new");
    let sent = stage.sent();
    assert_eq!(sent.len(), 1);
    assert!(String::from_utf8_lossy(&sent[0].body).contains("say new"));
}
