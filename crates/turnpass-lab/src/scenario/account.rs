//! Answers of the account routes: usage and token.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Body;

/// One answer of `GET /api/oauth/usage`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UsageAnswer {
    /// The HTTP status; anything but 200 answers an error.
    pub status: u16,
    /// Silence before the answer.
    pub delay_ms: u64,
    /// Silence for ever.
    pub never: bool,
    /// Extra headers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Paid extra usage.
    pub extra_usage: ExtraUsage,
    /// Utilisation of the five-hour window, 0 to 100.
    pub five_hour: f64,
    /// Utilisation of the seven-day window, 0 to 100.
    pub seven_day: f64,
    /// When the windows reset, as RFC 3339.
    pub resets_at: String,
    /// Further fields of the answer, laid over the others.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
    /// Instead of all of it: a body as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<Body>,
}

impl Default for UsageAnswer {
    fn default() -> Self {
        Self {
            status: 200,
            delay_ms: 0,
            never: false,
            headers: BTreeMap::new(),
            extra_usage: ExtraUsage::Off,
            five_hour: 12.0,
            seven_day: 34.0,
            resets_at: "2099-01-01T00:00:00+00:00".into(),
            extra: Map::new(),
            body: None,
        }
    }
}

/// What the usage answer says of paid extra usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtraUsage {
    /// `is_enabled: false`
    Off,
    /// `is_enabled: true`
    On,
    /// The field is missing.
    Missing,
    /// The field is null.
    Null,
}

/// One answer of `POST /v1/oauth/token`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokenAnswer {
    /// 200: a new made-up token; otherwise an OAuth error.
    pub status: u16,
    /// The OAuth error word of another status.
    pub error: String,
    /// Seconds until the new token expires.
    pub expires_in_s: u64,
    /// Silence before the answer.
    pub delay_ms: u64,
}

impl Default for TokenAnswer {
    fn default() -> Self {
        Self {
            status: 200,
            error: "invalid_grant".into(),
            expires_in_s: 28_800,
            delay_ms: 0,
        }
    }
}
