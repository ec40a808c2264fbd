//! How a failed request is named, and whether the CLI asks again: pure, from the tables in `docs/lab/cli.md`.

use serde_json::{Value, json};

use super::records::Failure;

/// The switches that decide about asking again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// `CLAUDE_CODE_MAX_RETRIES`; 10 without it.
    pub(crate) max_retries: u64,
    /// False with `CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK`.
    pub(crate) fallback: bool,
    /// How many times a 400 makes it strip something and ask again.
    pub(crate) strips: u64,
    /// `CLAUDE_CODE_RETRY_WATCHDOG`: a usage limit is waited out inside the turn.
    pub(crate) watchdog: bool,
}

/// The next try.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    pub(crate) delay_ms: u64,
    /// Announced by so many `api_retry` records.
    pub(crate) announced: u64,
    pub(crate) stream: bool,
}

/// The first delay; each further one doubles. Measured on 2.1.332: 0.6, 1.2, 2.4, 4.8 s.
const FIRST_DELAY_MS: u64 = 600;
/// The longest delay between two tries.
const LONGEST_DELAY_MS: u64 = 32_000;
/// Between a 401 and the same body again, while the token is renewed.
const RENEWAL_DELAY_MS: u64 = 250;

/// What comes after failure number `failed`, from 1, of one generation. `None`: the turn fails.
pub(crate) fn next_try(failure: &Failure, failed: u64, policy: Policy) -> Option<Retry> {
    let again = |delay_ms, announced, stream| {
        Some(Retry {
            delay_ms,
            announced,
            stream,
        })
    };
    let too_long = failure.terminal_reason == "prompt_too_long" || failure.error == "billing_error";
    match failure.status {
        Some(401) if failed == 1 => again(RENEWAL_DELAY_MS, 2, true),
        Some(403) if failed == 1 && failure.text.contains("revoked") => {
            again(RENEWAL_DELAY_MS, 2, true)
        }
        Some(400 | 422) if !too_long && failed <= policy.strips => again(0, 0, true),
        Some(404) if failed == 1 => again(0, 0, false),
        Some(429) if failure.api_error.is_some() && !policy.watchdog => None,
        Some(408 | 409 | 429 | 500..) | None if failed <= policy.max_retries => {
            let doubled = FIRST_DELAY_MS.saturating_mul(1 << (failed - 1).min(10));
            let delay = failure
                .retry_after_ms
                .unwrap_or(doubled.min(LONGEST_DELAY_MS));
            again(delay, 1, true)
        }
        None if policy.fallback && failed == policy.max_retries + 1 => again(0, 0, false),
        _ => None,
    }
}

/// Names an HTTP error.
pub(crate) fn of_status(
    status: u16,
    body: &[u8],
    limit: Option<Value>,
    retry_after_ms: Option<u64>,
) -> Failure {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let message = body["error"]["message"]
        .as_str()
        .unwrap_or("no message")
        .to_owned();
    let mut failure = Failure {
        status: Some(status),
        kind: body["error"]["type"].as_str().map(str::to_owned),
        error: "unknown",
        text: format!("API Error: {status} {message}"),
        terminal_reason: "api_error",
        retry_after_ms,
        ..Failure::default()
    };
    let lower = message.to_lowercase();
    match status {
        401 | 403 => {
            failure.error = "authentication_failed";
            failure.text = format!("Failed to authenticate. API Error: {status} {message}");
        }
        400 if lower.contains("prompt is too long") => {
            failure.error = "invalid_request";
            failure.text = "Prompt is too long".to_owned();
            failure.terminal_reason = "prompt_too_long";
        }
        400 if lower.contains("credit") => failure.error = "billing_error",
        404 => failure.error = "model_not_found",
        413 => {
            failure.error = "invalid_request";
            failure.terminal_reason = "image_error";
        }
        429 => {
            failure.error = "rate_limit";
            let rejected = limit.as_ref().is_some_and(|limit| {
                limit["status"] == "rejected" && limit.get("rateLimitType").is_some()
            });
            if rejected {
                failure.api_error = Some("usage_limit_reached");
                failure.text = "You've hit your limit".to_owned();
                failure.rate_limit = limit;
            }
        }
        500.. => failure.error = "server_error",
        _ => {}
    }
    failure
}

/// Names an error event inside a stream.
pub(crate) fn of_event(kind: &str, message: &str) -> Failure {
    // Measured on 2.1.332: these two have a status, all others only their kind.
    let status = match kind {
        "overloaded_error" => Some(529),
        "rate_limit_error" => Some(429),
        _ => None,
    };
    Failure {
        status,
        kind: Some(kind.to_owned()),
        error: "unknown",
        text: format!("API Error: {message}"),
        terminal_reason: "api_error",
        ..Failure::default()
    }
}

/// Names a connection that failed or broke.
pub(crate) fn of_connection(text: &str) -> Failure {
    Failure {
        error: "server_error",
        api_error: Some("connection_failed"),
        text: format!("API Error: Connection to the API was lost ({text})"),
        terminal_reason: "api_error",
        ..Failure::default()
    }
}

/// What the rate limit headers of a reply say, as `rate_limit_event` shows it.
pub(crate) fn rate_limit(status: u16, header: impl Fn(&str) -> Option<String>) -> Value {
    let unified = |name: &str| header(&format!("anthropic-ratelimit-unified-{name}"));
    let Some(said) = unified("status") else {
        let word = if status == 429 { "rejected" } else { "allowed" };
        return json!({"status": word, "isUsingOverage": false});
    };
    let overage = unified("overage-status");
    let using =
        said == "rejected" && matches!(overage.as_deref(), Some("allowed" | "allowed_warning"));
    let mut info = json!({"status": said});
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            info[key] = value;
        }
    };
    let number = |text: String| text.parse::<f64>().ok().map(|number| json!(number));
    let whole = |text: String| text.parse::<u64>().ok().map(|number| json!(number));
    put("resetsAt", unified("reset").and_then(whole));
    put(
        "rateLimitType",
        unified("representative-claim").map(Value::from),
    );
    put("overageStatus", overage.map(Value::from));
    put(
        "overageDisabledReason",
        unified("overage-disabled-reason").map(Value::from),
    );
    put(
        "overageInUse",
        unified("overage-in-use").map(|text| json!(text == "true")),
    );
    put("isUsingOverage", Some(json!(using)));
    let mut windows = json!({});
    for (short, long) in [("5h", "five_hour"), ("7d", "seven_day")] {
        if let Some(used) = unified(&format!("{short}-utilization")).and_then(number) {
            windows[long] = json!({
                "utilization": used,
                "resetsAt": unified(&format!("{short}-reset")).and_then(whole),
                "status": unified(&format!("{short}-status")),
            });
        }
    }
    if windows.as_object().is_some_and(|map| !map.is_empty()) {
        put("unifiedWindows", Some(windows));
    }
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Policy = Policy {
        max_retries: 0,
        fallback: false,
        strips: 5,
        watchdog: false,
    };

    fn requests(status: u16, message: &str) -> u64 {
        let body = json!({"error": {"type": "x", "message": message}}).to_string();
        let failure = of_status(status, body.as_bytes(), None, None);
        (1..20)
            .find(|failed| next_try(&failure, *failed, BOTH).is_none())
            .unwrap()
    }

    #[test]
    fn requests_with_both_switches_are_as_many_as_measured_on_2_1_332() {
        for status in [403, 408, 409, 410, 413, 418, 429, 500, 502, 503, 504, 529] {
            assert_eq!(requests(status, "no"), 1, "{status}");
        }
        assert_eq!(requests(401, "expired"), 2);
        assert_eq!(requests(403, "OAuth token has been revoked"), 2);
        assert_eq!(requests(400, "boom"), 6);
        assert_eq!(requests(400, "prompt is too long: 1 > 0"), 1);
        assert_eq!(requests(404, "model"), 2);
    }

    #[test]
    fn without_the_switches_it_backs_off_and_then_asks_without_a_stream() {
        let policy = Policy {
            max_retries: 2,
            fallback: true,
            ..BOTH
        };
        let lost = of_connection("reset");
        assert_eq!(next_try(&lost, 1, policy).unwrap().delay_ms, 600);
        assert_eq!(next_try(&lost, 2, policy).unwrap().delay_ms, 1200);
        assert!(!next_try(&lost, 3, policy).unwrap().stream);
        assert_eq!(next_try(&lost, 4, policy), None);
    }

    #[test]
    fn overage_is_a_rejection_that_money_overrides() {
        let info = rate_limit(200, |name| match name {
            "anthropic-ratelimit-unified-status" => Some("rejected".into()),
            "anthropic-ratelimit-unified-overage-status" => Some("allowed".into()),
            _ => None,
        });
        assert_eq!(info["isUsingOverage"], true);
        assert_eq!(
            rate_limit(429, |_| None),
            json!({"status": "rejected", "isUsingOverage": false})
        );
    }
}
