//! What the CLI says of its own turn, in every combination of its marks.

use serde_json::{Value, json};
use turnpass::ErrorCode;

use crate::stage::{MODES, Stage, ask, told};
use crate::{good, posted, turns};

fn synthetic(error: &str, text: &str) -> Value {
    json!({"send": {"type": "assistant", "error": error, "is_api_error_message": true, "session_id": "s", "uuid": "u",
        "message": {"id": "m", "role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": text}]}}})
}

fn result(subtype: &str, is_error: bool, status: Option<u16>, text: &str) -> Value {
    let reason = if is_error { "api_error" } else { "completed" };
    let mut record = json!({"type": "result", "subtype": subtype, "is_error": is_error, "terminal_reason": reason,
        "result": text, "num_turns": 1, "duration_ms": 1, "stop_reason": "end_turn", "session_id": "s", "uuid": "v"});
    if let Some(status) = status {
        record["api_error_status"] = json!(status);
    }
    json!({"send": record})
}

/// Any mark of a failure makes an error, also behind a whole answer of the service, and the CLI's words are in none.
#[tokio::test]
async fn bug_046_no_combination_of_marks_is_a_clean_end() {
    const SAID: &str = "SENTENCE OF THE CLI";
    for row in MODES {
        for streamed in [false, true] {
            let mut runs = Vec::new();
            let mut cases = Vec::new();
            for subtype in ["success", "error_during_execution"] {
                for is_error in [false, true] {
                    for status in [None, Some(401), Some(403), Some(429), Some(500), Some(529)] {
                        for marked in [false, true] {
                            if subtype == "success" && !is_error && status.is_none() && !marked {
                                continue;
                            }
                            let mut steps = Vec::new();
                            if streamed {
                                steps.push(posted(row, json!({"reply": "forward_no_result"})));
                            }
                            if marked {
                                steps.push(synthetic("server_error", SAID));
                            }
                            steps.push(result(subtype, is_error, status, SAID));
                            steps.push(json!({"exit": i32::from(is_error)}));
                            runs.push(turns(row, steps));
                            cases.push((subtype, is_error, status, marked));
                        }
                    }
                }
            }
            let stage = Stage::json(json!({"runs": runs}));
            let provider = stage.provider(row);
            for case in cases {
                let heard = told(&provider, ask("[[say all of it]]")).await;
                let error = heard.error();
                assert!(!error.to_string().contains(SAID), "{case:?}: {error}");
                // A warm CLI has its synthetic answer, and may speak, before the host has the first words of the real one.
                if !row.is_warm() {
                    assert_eq!(error.output_seen(), streamed, "{case:?}: {error}");
                    assert_eq!(heard.text(), if streamed { "all of it" } else { "" });
                }
                if case.2 == Some(401) {
                    assert_eq!(error.code(), ErrorCode::Auth, "{case:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn bug_046_and_048_each_kind_of_failure_that_only_the_cli_tells() {
    let cases = [
        (
            "rate_limit",
            Some(429),
            "You've hit your session limit · resets 4pm (UTC)",
            ErrorCode::UsageLimit,
        ),
        (
            "rate_limit",
            Some(429),
            "Server is temporarily limiting requests (not your usage limit)",
            ErrorCode::RateLimit,
        ),
        (
            "billing_error",
            Some(400),
            "Credit balance is too low",
            ErrorCode::Billing,
        ),
        (
            "authentication_failed",
            Some(401),
            "Please run /login",
            ErrorCode::Auth,
        ),
        (
            "authentication_failed",
            None,
            "Not logged in · Please run /login",
            ErrorCode::Auth,
        ),
        (
            "model_not_found",
            Some(404),
            "There's an issue with the selected model",
            ErrorCode::ModelNotFound,
        ),
        (
            "server_error",
            Some(529),
            "API Error: Overloaded",
            ErrorCode::Overloaded,
        ),
        (
            "server_error",
            Some(500),
            "API Error: 500",
            ErrorCode::UpstreamError,
        ),
    ];
    for row in MODES {
        let runs: Vec<_> = cases
            .iter()
            .map(|(word, status, text, _)| {
                turns(
                    row,
                    [
                        synthetic(word, text),
                        result("success", true, *status, text),
                        json!({"exit": 1}),
                    ],
                )
            })
            .collect();
        let stage = Stage::json(json!({"runs": runs}));
        let provider = stage.provider(row);
        for (word, status, text, code) in cases {
            let heard = told(&provider, ask("x")).await;
            assert_eq!(
                heard.error().code(),
                code,
                "{word} {status:?} {text}: {}",
                heard.error()
            );
        }
        assert!(stage.sent().is_empty());
    }
}

#[tokio::test]
async fn bug_051_an_error_is_not_kept_after_it_is_over() {
    for row in MODES {
        let failed = [
            synthetic("billing_error", "x"),
            result("success", true, Some(400), "x"),
            json!({"exit": 1}),
        ];
        let stage = Stage::json(json!({"runs": [turns(row, failed), good(row)]}));
        let provider = stage.provider(row);
        told(&provider, ask("x")).await.failed(ErrorCode::Billing);
        assert_eq!(
            told(&provider, ask("[[say healthy]]")).await.text(),
            "healthy"
        );
    }
}
