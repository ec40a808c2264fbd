//! The routes beside Messages: models, usage, profile, token.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::script::{Script, Step, error_type};
use crate::scenario::{Body, ExtraUsage, TokenAnswer, UsageAnswer};

/// Model ids that `GET /v1/models` lists unless the scenario says others: the aliases' targets of CLI 2.1.332.
pub const MODELS: [&str; 4] = [
    "claude-opus-5-5",
    "claude-sonnet-5-5",
    "claude-haiku-5-5",
    "claude-fable-5-2",
];

fn model(id: &str) -> Value {
    json!({"type": "model", "id": id, "display_name": id, "created_at": "2026-01-01T00:00:00Z"})
}

pub(crate) fn models(ids: &[String]) -> Script {
    let data: Vec<Value> = ids.iter().map(|id| model(id)).collect();
    Script::json(
        200,
        &json!({
            "data": data,
            "has_more": false,
            "first_id": ids.first(),
            "last_id": ids.last(),
        }),
    )
}

pub(crate) fn one_model(ids: &[String], id: &str) -> Script {
    match ids.iter().any(|each| each == id) {
        true => Script::json(200, &model(id)),
        false => Script::error(404, "not_found_error", &format!("model: {id}")),
    }
}

fn pause(ms: u64) -> Step {
    Step::Pause {
        total: Duration::from_millis(ms),
        ping: None,
    }
}

pub(crate) fn usage(answer: &UsageAnswer) -> Script {
    let mut script = match (&answer.body, answer.status) {
        (Some(body), status) => {
            let mut script = Script::json(status, &Value::Null);
            let bytes = match body {
                Body::Text(text) => text.clone().into_bytes(),
                Body::Base64(text) => crate::scenario::decode(text).unwrap_or_default(),
                Body::Json(value) => value.to_string().into_bytes(),
            };
            script.steps = vec![Step::Bytes(bytes)];
            script
        }
        (None, 200) => Script::json(200, &usage_body(answer)),
        (None, status) => Script::error(status, error_type(status), "the script says so"),
    };
    script.before_head.push(pause(answer.delay_ms));
    if answer.never {
        script.before_head.push(Step::UntilClosed);
    }
    for (name, value) in &answer.headers {
        script.set_header(name, value);
    }
    script
}

fn usage_body(answer: &UsageAnswer) -> Value {
    let window =
        |utilization: f64| json!({"utilization": utilization, "resets_at": answer.resets_at});
    let mut body = Map::new();
    body.insert("five_hour".into(), window(answer.five_hour));
    body.insert("seven_day".into(), window(answer.seven_day));
    let extra = |enabled: bool| json!({"is_enabled": enabled, "monthly_limit": 5000, "used_credits": 0, "utilization": 0});
    match answer.extra_usage {
        ExtraUsage::Missing => {}
        ExtraUsage::Null => drop(body.insert("extra_usage".into(), Value::Null)),
        ExtraUsage::On => drop(body.insert("extra_usage".into(), extra(true))),
        ExtraUsage::Off => drop(body.insert("extra_usage".into(), extra(false))),
    }
    body.extend(answer.extra.clone());
    Value::Object(body)
}

/// The made-up account of the laboratory.
pub(crate) fn profile() -> Value {
    json!({
        "account": {
            "uuid": "00000000-0000-4000-8000-000000000001",
            "email": "lab@example.invalid",
            "full_name": "Lab",
            "display_name": "Lab",
            "has_claude_max": true,
            "has_claude_pro": false,
        },
        "organization": {
            "uuid": "00000000-0000-4000-8000-000000000002",
            "name": "Lab",
            "organization_type": "claude_max",
            "rate_limit_tier": "default_claude_max_5x",
            "has_extra_usage_enabled": false,
        },
    })
}

pub(crate) fn token(answer: &TokenAnswer, number: u64) -> Script {
    let mut script = match answer.status {
        200 => Script::json(
            200,
            &json!({
                "token_type": "Bearer",
                "access_token": format!("sk-ant-oat01-MADE-UP-{number}"),
                "refresh_token": format!("sk-ant-ort01-MADE-UP-{number}"),
                "expires_in": answer.expires_in_s,
                "scope": "user:inference user:profile user:sessions:claude_code",
            }),
        ),
        status => Script::json(
            status,
            &json!({
                "error": answer.error,
                "error_description": "the script says so",
            }),
        ),
    };
    script.before_head.push(pause(answer.delay_ms));
    script
}
