//! Unified rate limits: response headers of the API, and the `rate_limit_event` that the CLI derives from them.
//!
//! Only values; what a value means for a turn is the business of `limits`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::lenient;
use super::text::Text;

/// Common beginning of the headers, in lower case.
pub const HEADER_PREFIX: &str = "anthropic-ratelimit-unified-";

/// Windows that are kept per answer; the API sends two or three.
pub const MAX_WINDOWS: usize = 16;

/// `allowed`, `allowed_warning`, `rejected` or a word that is new.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitStatus {
    /// Requests pass.
    Allowed,
    /// Requests pass, a threshold is near.
    AllowedWarning,
    /// Requests are refused.
    Rejected,
    /// A word that this version does not know, cut to 64 characters.
    Other(String),
}

impl From<&str> for LimitStatus {
    fn from(word: &str) -> Self {
        match word {
            "allowed" => Self::Allowed,
            "allowed_warning" => Self::AllowedWarning,
            "rejected" => Self::Rejected,
            other => Self::Other(other.chars().take(64).collect()),
        }
    }
}

impl<'de> Deserialize<'de> for LimitStatus {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Text::deserialize(deserializer).map(|word| word.as_str().into())
    }
}

/// One window of use.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Window {
    /// State of this window alone.
    #[serde(deserialize_with = "lenient::option")]
    pub status: Option<LimitStatus>,
    /// Share of the window that is used, 0 to 1 and above.
    #[serde(deserialize_with = "lenient::option")]
    pub utilization: Option<f64>,
    /// When it starts anew, in seconds since the epoch.
    #[serde(rename = "resetsAt", deserialize_with = "seconds")]
    pub reset_epoch_s: Option<u64>,
    /// The warning threshold that use has passed.
    #[serde(rename = "surpassedThreshold", deserialize_with = "lenient::option")]
    pub surpassed_threshold: Option<f64>,
}

/// The `anthropic-ratelimit-unified-*` headers of one response. Absent and unreadable ones are `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UnifiedHeaders {
    /// `…-status`: whether requests on the subscription pass.
    pub status: Option<LimitStatus>,
    /// `…-reset`, in seconds since the epoch.
    pub reset_epoch_s: Option<u64>,
    /// `…-representative-claim`: the window that decides, such as `five_hour`.
    pub representative_claim: Option<String>,
    /// `…-overage-status`: whether paid credits would be used.
    pub overage_status: Option<LimitStatus>,
    /// `…-overage-in-use`.
    pub overage_in_use: Option<bool>,
    /// `…-overage-reset`, in seconds since the epoch.
    pub overage_reset_epoch_s: Option<u64>,
    /// `…-overage-disabled-reason`, such as `org_level_disabled`.
    pub overage_disabled_reason: Option<String>,
    /// `…-fallback-percentage`.
    pub fallback_percentage: Option<f64>,
    /// `…-<window>-status`, `-utilization`, `-reset` and `-surpassed-threshold`, by the window's wire name (`5h`, `7d`).
    ///
    /// The overage's own utilization and threshold stand here too, as the window `overage`.
    pub windows: BTreeMap<String, Window>,
}

impl UnifiedHeaders {
    /// Reads the headers out of any list of names and values. Names are compared without regard to case; of a repeated one the last counts.
    ///
    /// `None` when there is not one unified header, which tells a throttle (429 without them) from a limit.
    pub fn read<'a>(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Option<Self> {
        let mut read = Self::default();
        let mut any = false;
        for (name, value) in headers {
            let name = name.to_ascii_lowercase();
            if let Some(field) = name.strip_prefix(HEADER_PREFIX) {
                any = true;
                read.field(field, value.trim());
            }
        }
        any.then_some(read)
    }

    fn field(&mut self, field: &str, value: &str) {
        match field {
            "status" => self.status = Some(value.into()),
            "reset" => self.reset_epoch_s = epoch_seconds(value),
            "representative-claim" => self.representative_claim = Some(value.to_owned()),
            "overage-status" => self.overage_status = Some(value.into()),
            "overage-in-use" => self.overage_in_use = value.to_ascii_lowercase().parse().ok(),
            "overage-reset" => self.overage_reset_epoch_s = epoch_seconds(value),
            "overage-disabled-reason" => self.overage_disabled_reason = Some(value.to_owned()),
            "fallback-percentage" => self.fallback_percentage = number(value),
            _ => self.window_field(field, value),
        }
    }

    fn window_field(&mut self, field: &str, value: &str) {
        let parts = ["-status", "-utilization", "-reset", "-surpassed-threshold"]
            .into_iter()
            .find_map(|part| Some((field.strip_suffix(part)?, part)));
        let Some((window, part)) = parts else {
            return;
        };
        if !self.windows.contains_key(window) && self.windows.len() >= MAX_WINDOWS {
            return;
        }
        let window = self.windows.entry(window.to_owned()).or_default();
        match part {
            "-status" => window.status = Some(value.into()),
            "-utilization" => window.utilization = number(value),
            "-reset" => window.reset_epoch_s = epoch_seconds(value),
            _ => window.surpassed_threshold = number(value),
        }
    }
}

fn number(value: &str) -> Option<f64> {
    value.parse().ok().filter(|number: &f64| number.is_finite())
}

fn epoch_seconds(value: &str) -> Option<u64> {
    value.parse().ok().and_then(epoch_s)
}

/// From here on a number is no count of seconds since the epoch (that would be the year 5138) but one of milliseconds.
const MILLISECONDS_FROM: f64 = 1e11;

/// A time in seconds or in milliseconds since the epoch, both of which have been seen; `None` for what is neither.
pub fn epoch_s(number: f64) -> Option<u64> {
    let seconds = match number {
        MILLISECONDS_FROM.. => number / 1000.0,
        _ => number,
    };
    // `as` saturates, and the filter leaves nothing that it would have to.
    (0.0..MILLISECONDS_FROM)
        .contains(&seconds)
        .then_some(seconds as u64)
}

/// `rate_limit_info` of the CLI's `rate_limit_event`.
///
/// The fields that money hangs on are read strictly: an unexpected type in one of them makes the whole event undecodable, which
/// the limits treat as use of paid credits. The others only inform.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RateLimitInfo {
    /// Whether requests on the subscription pass.
    pub status: Option<LimitStatus>,
    /// The window that decides: `five_hour`, `seven_day`, `overage`, ...
    pub rate_limit_type: Option<String>,
    /// Whether paid credits would be used.
    pub overage_status: Option<LimitStatus>,
    /// Paid credits are being used, by the response header.
    pub overage_in_use: Option<bool>,
    /// Paid credits are being used: `status` is rejected and `overageStatus` allowed (CLI 2.1.332).
    pub is_using_overage: Option<bool>,
    /// Credits could cover what goes beyond the plan; in the CLI's types, not seen on the wire.
    #[serde(deserialize_with = "lenient::option")]
    pub overage_enabled: Option<bool>,
    /// Why credits are off, such as `org_level_disabled`.
    #[serde(deserialize_with = "lenient::option")]
    pub overage_disabled_reason: Option<String>,
    /// When the deciding window starts anew, in seconds since the epoch.
    #[serde(rename = "resetsAt", deserialize_with = "seconds")]
    pub reset_epoch_s: Option<u64>,
    /// When the overage window starts anew, in seconds since the epoch.
    #[serde(rename = "overageResetsAt", deserialize_with = "seconds")]
    pub overage_reset_epoch_s: Option<u64>,
    /// Share of the deciding window that is used; only with a warning.
    #[serde(deserialize_with = "lenient::option")]
    pub utilization: Option<f64>,
    /// The warning threshold that use has passed.
    #[serde(deserialize_with = "lenient::option")]
    pub surpassed_threshold: Option<f64>,
    /// A code for the refusal; read in the CLI, not seen on the wire.
    #[serde(deserialize_with = "lenient::option")]
    pub error_code: Option<String>,
    /// All windows, by the CLI's name (`five_hour`, `seven_day`).
    #[serde(deserialize_with = "windows")]
    pub unified_windows: BTreeMap<String, Window>,
}

impl RateLimitInfo {
    /// Reads `rate_limit_info`, or `None` when it is no object or a field that money hangs on has an unexpected type.
    pub fn read(info: &RawValue) -> Option<Self> {
        // A struct would also accept an array of its fields in order.
        if !info.get().starts_with('{') {
            return None;
        }
        serde_json::from_str(info.get()).ok()
    }
}

fn seconds<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let number: Option<f64> = lenient::option(deserializer)?;
    Ok(number.and_then(epoch_s))
}

fn windows<'de, D>(deserializer: D) -> Result<BTreeMap<String, Window>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    let windows: Option<BTreeMap<String, &RawValue>> = lenient::option(deserializer)?;
    Ok(windows
        .unwrap_or_default()
        .into_iter()
        .filter_map(|(name, raw)| Some((name, lenient::parse(raw)?)))
        .take(MAX_WINDOWS)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_a_usage_limit() {
        let headers = UnifiedHeaders::read([
            ("Anthropic-RateLimit-Unified-Status", "rejected"),
            ("anthropic-ratelimit-unified-reset", "1796074134"),
            (
                "anthropic-ratelimit-unified-representative-claim",
                "five_hour",
            ),
            ("anthropic-ratelimit-unified-overage-status", "allowed"),
            ("anthropic-ratelimit-unified-overage-in-use", "true"),
            ("anthropic-ratelimit-unified-overage-reset", "1796074999"),
            ("anthropic-ratelimit-unified-5h-status", "rejected"),
            ("anthropic-ratelimit-unified-5h-utilization", "1.02"),
            ("anthropic-ratelimit-unified-5h-reset", "1796074134"),
            ("anthropic-ratelimit-unified-7d-utilization", "NaN"),
            ("anthropic-ratelimit-unified-7d-surpassed-threshold", "0.75"),
            ("content-type", "text/event-stream"),
        ])
        .unwrap();
        assert_eq!(headers.status, Some(LimitStatus::Rejected));
        assert_eq!(headers.reset_epoch_s, Some(1_796_074_134));
        assert_eq!(headers.overage_status, Some(LimitStatus::Allowed));
        assert_eq!(headers.overage_in_use, Some(true));
        assert_eq!(headers.representative_claim.as_deref(), Some("five_hour"));
        assert_eq!(headers.windows["5h"].utilization, Some(1.02));
        assert_eq!(headers.windows["5h"].status, Some(LimitStatus::Rejected));
        assert_eq!(headers.windows["7d"].utilization, None);
        assert_eq!(headers.windows["7d"].surpassed_threshold, Some(0.75));
    }

    #[test]
    fn a_time_is_one_in_seconds_and_in_milliseconds_and_nothing_else_is() {
        for (number, wanted) in [
            (1_796_074_134.0, Some(1_796_074_134)),
            (1_796_074_134.9, Some(1_796_074_134)),
            (1_796_074_134_000.0, Some(1_796_074_134)),
            (0.0, Some(0)),
            (-1.0, None),
            (1e300, None),
            (f64::NAN, None),
            (f64::INFINITY, None),
        ] {
            assert_eq!(epoch_s(number), wanted, "{number}");
        }
        let read = info(r#"{"resetsAt":1796074134000}"#).unwrap();
        assert_eq!(read.reset_epoch_s, Some(1_796_074_134));
        let header = [("anthropic-ratelimit-unified-reset", "1796074134000")];
        let read = UnifiedHeaders::read(header).unwrap();
        assert_eq!(read.reset_epoch_s, Some(1_796_074_134));
    }

    #[test]
    fn a_throttle_has_no_unified_headers() {
        assert_eq!(UnifiedHeaders::read([("retry-after", "3")]), None);
    }

    #[test]
    fn windows_stay_bounded() {
        let names: Vec<String> = (0..100)
            .map(|n| format!("{HEADER_PREFIX}w{n}-status"))
            .collect();
        let headers = UnifiedHeaders::read(names.iter().map(|name| (name.as_str(), "allowed")));
        assert_eq!(headers.unwrap().windows.len(), MAX_WINDOWS);
    }

    fn info(json: &str) -> Option<RateLimitInfo> {
        RateLimitInfo::read(serde_json::from_str(json).unwrap())
    }

    #[test]
    fn an_event_of_2_1_332() {
        let read = info(r#"{"status":"allowed_warning","resetsAt":1796329734,"rateLimitType":"seven_day","utilization":0.77,"isUsingOverage":false,"surpassedThreshold":0.75,"unifiedWindows":{"five_hour":{"utilization":0.2,"resetsAt":1796074134,"status":"allowed"},"odd":3}}"#).unwrap();
        assert_eq!(read.status, Some(LimitStatus::AllowedWarning));
        assert_eq!(read.is_using_overage, Some(false));
        assert_eq!(read.reset_epoch_s, Some(1_796_329_734));
        assert_eq!(read.unified_windows.len(), 1);
        assert_eq!(read.unified_windows["five_hour"].utilization, Some(0.2));
    }

    #[test]
    fn what_money_hangs_on_is_read_strictly_and_the_rest_leniently() {
        for undecodable in [
            r#"{"isUsingOverage":"yes"}"#,
            r#"{"status":1}"#,
            r#"{"overageInUse":0}"#,
            r#"{"overageStatus":{}}"#,
            r#"{"rateLimitType":[]}"#,
            "[]",
            "3",
            "null",
        ] {
            assert_eq!(info(undecodable), None, "{undecodable}");
        }
        let read = info(
            r#"{"status":null,"resetsAt":"soon","utilization":{},"unifiedWindows":[],"errorCode":9,"new":1}"#,
        );
        assert_eq!(read, Some(RateLimitInfo::default()));
        let read = info(r#"{"status":"paused"}"#).unwrap();
        assert_eq!(read.status, Some(LimitStatus::Other("paused".to_owned())));
    }
}
