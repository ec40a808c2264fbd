//! The plan's windows: what `get_usage` says of them for people, and the newest that is known of each. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::verdict::Verdict;
use crate::wire::rate_limit::{UnifiedHeaders, epoch_s};

/// Windows that are kept; the CLI shows three to eight.
pub const WINDOWS_LIMIT: usize = 32;

/// Longest name of a window or plan that is kept, in characters.
const NAME_CHARACTERS: usize = 60;

/// One answer to `get_usage`, as far as people want to see it. It holds no name of the account.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// `subscription_type`: `pro`, `max`, `team`, `enterprise`.
    pub plan: Option<String>,
    /// Whether the CLI shows limits at all.
    pub rate_limits_available: Option<bool>,
    /// The windows: five hours, seven days, then the others as they came.
    pub windows: Vec<UsedWindow>,
    /// Paid credits: `off`, `on` or `unconfirmed`.
    pub credits: Credits,
    /// Why they are unconfirmed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub doubt: Option<String>,
}

/// Paid credits, as the gate sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Credits {
    /// Surely off.
    Off,
    /// Surely on.
    On,
    /// Not known.
    Unconfirmed,
}

/// One window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UsedWindow {
    /// As on the wire (`five_hour`), or the model's name for a window of one model.
    pub name: String,
    /// The used part in percent; above 100 is possible.
    pub used_percent: f64,
    /// When it starts anew, in seconds since the epoch.
    pub resets_at: Option<i64>,
}

impl Reading {
    /// Reads the payload of an answer. What cannot be read is left out; the verdict says what that means.
    pub fn read(json: &str) -> Self {
        let verdict = Verdict::read(json);
        let answer: Map<String, Value> = serde_json::from_str(json).unwrap_or_default();
        let limits = answer.get("rate_limits").and_then(Value::as_object);
        let (credits, doubt) = match verdict {
            Verdict::Off => (Credits::Off, None),
            Verdict::On => (Credits::On, None),
            Verdict::Unconfirmed(doubt) => (Credits::Unconfirmed, Some(doubt.to_string())),
        };
        Self {
            plan: word(answer.get("subscription_type")),
            rate_limits_available: answer.get("rate_limits_available").and_then(Value::as_bool),
            windows: limits.map(windows).unwrap_or_default(),
            credits,
            doubt,
        }
    }
}

fn windows(limits: &Map<String, Value>) -> Vec<UsedWindow> {
    let named = limits
        .iter()
        // Not a window of the plan: what credits have paid for.
        .filter(|(name, _)| name.as_str() != "extra_usage")
        .filter_map(|(name, value)| window(name, value));
    let scoped = limits
        .get("model_scoped")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|value| window(value.get("display_name")?.as_str()?, value));
    let mut windows: Vec<_> = named.chain(scoped).take(WINDOWS_LIMIT).collect();
    windows.sort_by_key(|window| match window.name.as_str() {
        "five_hour" => 0,
        "seven_day" => 1,
        _ => 2,
    });
    windows
}

fn window(name: &str, value: &Value) -> Option<UsedWindow> {
    let used_percent = value.get("utilization")?.as_f64()?;
    Some(UsedWindow {
        name: cut(name),
        used_percent,
        resets_at: value.get("resets_at").and_then(time),
    })
}

/// A time as RFC 3339 text, which the endpoint sends, or as seconds or milliseconds since the epoch, which headers and events
/// have.
fn time(value: &Value) -> Option<i64> {
    match value {
        Value::String(text) => text
            .parse::<jiff::Timestamp>()
            .ok()
            .map(|at| at.as_second()),
        number => {
            let at = number.as_f64().and_then(epoch_s)?;
            i64::try_from(at).ok()
        }
    }
}

fn word(value: Option<&Value>) -> Option<String> {
    value.and_then(Value::as_str).map(cut)
}

fn cut(text: &str) -> String {
    text.chars().take(NAME_CHARACTERS).collect()
}

/// The wire name of a window that a header names short.
pub fn wire_name(header: &str) -> &str {
    match header {
        "5h" => "five_hour",
        "7d" => "seven_day",
        other => other,
    }
}

/// The newest that is known of each window, whoever told it.
#[derive(Clone, Debug, Default)]
pub struct Board {
    seen: BTreeMap<String, Seen>,
    read_at: Option<i64>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    used_percent: f64,
    resets_at: Option<i64>,
    at: i64,
}

impl Board {
    /// Takes a reading that was made at `at`, in seconds since the epoch. It shows all windows that there were then.
    pub fn reading(&mut self, reading: &Reading, at: i64, now: i64) {
        let is_shown = |name: &str| reading.windows.iter().any(|window| window.name == name);
        self.seen
            .retain(|name, seen| is_shown(name) || (at..=now).contains(&seen.at));
        for window in &reading.windows {
            let told = (window.used_percent, window.resets_at, at);
            self.take(&window.name, told, now);
        }
        self.read_at = Some(at);
    }

    /// Takes the headers of an answer that came now.
    pub fn headers(&mut self, headers: &UnifiedHeaders, now: i64) {
        for (name, window) in &headers.windows {
            if let (false, Some(part)) = (name == "overage", window.utilization) {
                let resets_at = window.reset_epoch_s.and_then(|at| i64::try_from(at).ok());
                self.take(wire_name(name), (part * 100.0, resets_at, now), now);
            }
        }
    }

    fn take(&mut self, name: &str, told: (f64, Option<i64>, i64), now: i64) {
        let (used_percent, resets_at, at) = told;
        // What was told in the future was told by a clock that has been set back since.
        let newer = |seen: &Seen| seen.at <= at || seen.at > now;
        let room = self.seen.len() < WINDOWS_LIMIT || self.seen.contains_key(name);
        if self.seen.get(name).is_none_or(newer) && room {
            let seen = Seen {
                used_percent,
                resets_at,
                at,
            };
            self.seen.insert(name.to_owned(), seen);
        }
    }

    /// When all windows were last read, in seconds since the epoch.
    pub fn read_at(&self) -> Option<i64> {
        self.read_at
    }

    /// When something was last told, in seconds since the epoch.
    pub fn told_at(&self) -> Option<i64> {
        self.seen.values().map(|seen| seen.at).max()
    }

    /// The fullest window that has not started anew since it was told.
    pub fn fullest(&self, now: i64) -> Option<UsedWindow> {
        self.seen
            .iter()
            .filter(|(_, seen)| seen.resets_at.is_none_or(|at| at > now))
            .max_by(|(_, a), (_, b)| a.used_percent.total_cmp(&b.used_percent))
            .map(|(name, seen)| UsedWindow {
                name: name.clone(),
                used_percent: seen.used_percent,
                resets_at: seen.resets_at,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answer() -> String {
        // As 2.1.332 passes it on, with a field that is new.
        json!({"subscription_type": "max", "rate_limits_available": true, "session": {"total_cost_usd": 3},
            "rate_limits": {
                "seven_day_cowork": null,
                "seven_day": {"utilization": 34, "resets_at": "2099-01-02T00:00:00+00:00"},
                "five_hour": {"utilization": 12.5, "resets_at": "2099-01-01T00:00:00Z"},
                "brand_new": {"utilization": 1, "resets_at": 4_070_908_800_i64},
                "extra_usage": {"is_enabled": false, "utilization": 0},
                "limits": [],
                "model_scoped": [{"display_name": "Opus", "utilization": 55, "resets_at": null}],
            }})
        .to_string()
    }

    #[test]
    fn a_reading_holds_plan_windows_and_credits() {
        let reading = Reading::read(&answer());
        assert_eq!(reading.plan.as_deref(), Some("max"));
        assert_eq!(reading.credits, Credits::Off);
        let shown: Vec<_> = reading
            .windows
            .iter()
            .map(|window| (window.name.as_str(), window.used_percent, window.resets_at))
            .collect();
        assert_eq!(
            shown,
            [
                ("five_hour", 12.5, Some(4_070_908_800)),
                ("seven_day", 34.0, Some(4_070_995_200)),
                ("brand_new", 1.0, Some(4_070_908_800)),
                ("Opus", 55.0, None),
            ]
        );
        let stored = serde_json::to_string(&reading).unwrap();
        assert!(!stored.contains("cost"), "never a charge: {stored}");
        assert_eq!(serde_json::from_str::<Reading>(&stored).unwrap(), reading);
    }

    #[test]
    fn a_reading_of_nothing_says_why() {
        for text in [
            "",
            "[]",
            r#"{"rate_limits_available":true,"rate_limits":null}"#,
        ] {
            let reading = Reading::read(text);
            assert_eq!(reading.credits, Credits::Unconfirmed);
            assert!(reading.doubt.is_some() && reading.windows.is_empty());
        }
    }

    #[test]
    fn odd_windows_are_left_out_and_odd_times_are_read_or_unknown() {
        let limits = json!({
            "text": {"utilization": "50", "resets_at": 5}, "null": {"utilization": null}, "list": [1], "number": 7,
            "below": {"utilization": -5, "resets_at": -1}, "above": {"utilization": 1e300, "resets_at": "soon"},
            "milliseconds": {"utilization": 1, "resets_at": 4_070_908_800_000_i64},
            "float": {"utilization": 1, "resets_at": 4_070_908_800.5}, "far": {"utilization": 1, "resets_at": 1e30},
        });
        let reading = Reading::read(&json!({"rate_limits": limits}).to_string());
        let times: Vec<_> = reading
            .windows
            .iter()
            .map(|window| (window.name.as_str(), window.resets_at))
            .collect();
        let at = Some(4_070_908_800);
        assert_eq!(
            times,
            [
                ("below", None),
                ("above", None),
                ("milliseconds", at),
                ("float", at),
                ("far", None)
            ]
        );
    }

    #[test]
    fn the_board_keeps_the_newest_and_forgets_what_has_started_anew() {
        let mut board = Board::default();
        assert!(board.fullest(0).is_none() && board.told_at().is_none());
        board.reading(&Reading::read(&answer()), 100, 100);
        assert_eq!(board.fullest(100).unwrap().name, "Opus");
        let headers = |part: &str, reset: &str| {
            let names = [
                "anthropic-ratelimit-unified-5h-utilization",
                "anthropic-ratelimit-unified-5h-reset",
                "anthropic-ratelimit-unified-overage-utilization",
            ];
            UnifiedHeaders::read([(names[0], part), (names[1], reset), (names[2], "5")]).unwrap()
        };
        board.headers(&headers("0.91", "500"), 200);
        let fullest = board.fullest(200).unwrap();
        assert_eq!(
            (fullest.name.as_str(), fullest.used_percent),
            ("five_hour", 91.0)
        );
        assert_eq!(fullest.resets_at, Some(500));
        board.reading(&one("five_hour", 20), 150, 200);
        assert_eq!(board.fullest(200).unwrap().used_percent, 91.0, "older news");
        board.reading(&Reading::read(&answer()), 160, 200);
        assert_eq!(board.fullest(500).unwrap().name, "Opus", "it started anew");
        assert_eq!((board.told_at(), board.read_at()), (Some(200), Some(160)));
    }

    fn one(name: &str, used: u8) -> Reading {
        let limits = json!({name: {"utilization": used}});
        Reading::read(&json!({"rate_limits": limits}).to_string())
    }

    #[test]
    fn a_clock_that_was_set_back_freezes_no_window() {
        let mut board = Board::default();
        board.reading(&one("five_hour", 99), 9_000, 9_000);
        board.reading(&one("five_hour", 10), 100, 100);
        assert_eq!(board.fullest(100).unwrap().used_percent, 10.0);
        board.reading(&one("five_hour", 50), 9_000, 9_000);
        let names = ["anthropic-ratelimit-unified-5h-utilization"];
        let headers = UnifiedHeaders::read([(names[0], "0.2")]).unwrap();
        board.headers(&headers, 100);
        assert_eq!(board.fullest(100).unwrap().used_percent, 20.0);
    }

    #[test]
    fn a_window_that_is_shown_no_more_is_forgotten() {
        let mut board = Board::default();
        board.reading(&one("Opus", 99), 100, 100);
        board.reading(&one("five_hour", 10), 200, 200);
        assert_eq!(board.fullest(200).unwrap().name, "five_hour");
        // But not what an answer has told since the reading was made.
        let names = ["anthropic-ratelimit-unified-7d-utilization"];
        let headers = UnifiedHeaders::read([(names[0], "0.5")]).unwrap();
        board.headers(&headers, 250);
        board.reading(&one("five_hour", 10), 240, 260);
        assert_eq!(board.fullest(260).unwrap().name, "seven_day");
    }
}
