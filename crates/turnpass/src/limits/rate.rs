//! What a limit that shows itself in a turn means: paid credits in use, the plan's limit, or a moment's throttle. Pure.
//!
//! Four things tell it: a `rate_limit_event`, a `system/notification`, a failed turn, and the headers of an answer. The
//! three are never taken for one another:
//!
//! | signal | error | pool | replay | relay |
//! | --- | --- | --- | --- | --- |
//! | [`Signal::Overage`] under `require_off` | `billing` | the turn ends, and the whole pool closes | the request fails | the request fails, its connection to the service is closed |
//! | ... under `warn` | none | a notice | a notice | a notice |
//! | [`Signal::CreditsRequired`] | `billing` | the turn fails, the process stays | the request fails | the request fails |
//! | [`Signal::UsageLimit`] | `usage_limit` with the reset time, not retryable | the turn fails, the process stays | the request fails | the request fails, the process stays |
//! | [`Signal::Throttle`] | `rate_limit`, retryable | the turn fails, the process stays | the request fails | the request fails, the process stays |
//! | [`Signal::CreditsOn`] | none; under `require_off` the gate refuses the next message | a notice | a notice | a notice |
//! | [`Signal::Near`] | none | a notice | a notice | a notice |
//!
//! None of them is latched: the next request is tried, and the gate before it asks anew (bug 51).

use std::time::{Duration, SystemTime};

use super::Policy;
use super::gate::{CREDITS_ON, credits_on};
use super::windows::wire_name;
use crate::error::{Error, ErrorCode};
use crate::event::Notice;
use crate::wire::rate_limit::{LimitStatus, RateLimitInfo, UnifiedHeaders, Window, epoch_s};
use crate::wire::stream_json::{Failure, FailureKind};

/// What was seen.
#[derive(Clone, Debug, PartialEq)]
pub enum Signal {
    /// Nothing that matters.
    Clear,
    /// A window is nearly used up.
    Near(Near),
    /// Paid credits are in use, or that cannot be excluded.
    Overage(Sign),
    /// Credits could cover what goes beyond the plan; none are in use. The gate refuses the next message for it.
    CreditsOn,
    /// The service wants credits for this request and got none.
    CreditsRequired,
    /// The plan's limit is reached.
    UsageLimit {
        /// The window that decides.
        window: Option<String>,
        /// When it opens again, in seconds since the epoch.
        resets_at: Option<u64>,
    },
    /// The service limits requests for a moment.
    Throttle,
}

/// A window that is nearly used up.
#[derive(Clone, Debug, PartialEq)]
pub struct Near {
    /// The window.
    pub window: String,
    /// The used share, 0 to 1.
    pub utilization: Option<f64>,
    /// When it opens again, in seconds since the epoch.
    pub resets_at: Option<u64>,
}

/// What showed that credits are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The event cannot be decoded.
    Undecodable,
    /// `isUsingOverage` is true.
    IsUsingOverage,
    /// `overageInUse` is true, or the header is.
    OverageInUse,
    /// The window that decides is that of the credits.
    OverageWindow,
    /// The plan's limit is reached and credits cover the request.
    RejectedButCovered,
    /// The status is a word that is new, and nothing says that credits are not in use.
    UnknownStatus,
    /// The CLI said so in words.
    Notification,
}

impl Signal {
    /// Of a `rate_limit_event`; `None` is one that cannot be decoded.
    pub fn of_event(info: Option<&RateLimitInfo>) -> Self {
        let Some(info) = info else {
            return Self::Overage(Sign::Undecodable);
        };
        let facts = Facts {
            status: info.status.as_ref(),
            claim: info.rate_limit_type.as_deref(),
            overage_status: info.overage_status.as_ref(),
            in_use: info.overage_in_use == Some(true),
            using: info.is_using_overage,
            resets_at: info.reset_epoch_s,
            // A plain 429 is reported so: rejected, and nothing else (2.1.332).
            is_throttle: info.status == Some(LimitStatus::Rejected)
                && info.rate_limit_type.is_none()
                && info.reset_epoch_s.is_none()
                && info.unified_windows.is_empty(),
            enabled: info.overage_enabled == Some(true),
        };
        if info.error_code.as_deref() == Some(CREDITS_REQUIRED) && facts.overage().is_none() {
            return Self::CreditsRequired;
        }
        let near = || {
            let crossed = info.surpassed_threshold.is_some() || is_warning(info.status.as_ref());
            crossed.then(|| Near {
                window: info.rate_limit_type.clone().unwrap_or_default(),
                utilization: info.utilization,
                resets_at: info.reset_epoch_s,
            })
        };
        facts.signal(near)
    }

    /// Of the `anthropic-ratelimit-unified-*` headers of an answer with this status.
    pub fn of_headers(status: u16, headers: &UnifiedHeaders) -> Self {
        let facts = Facts {
            status: headers.status.as_ref(),
            claim: headers.representative_claim.as_deref(),
            overage_status: headers.overage_status.as_ref(),
            in_use: headers.overage_in_use == Some(true),
            using: None,
            resets_at: headers.reset_epoch_s,
            is_throttle: status == 429 && headers.status != Some(LimitStatus::Rejected),
            enabled: false,
        };
        facts.signal(|| near_window(headers))
    }

    /// Of the text of a `system/notification`: the CLI says by itself that it now uses credits. The wording has changed
    /// from version to version (2.1.294: six sentences, 2.1.332: more), so what they share is matched.
    pub fn of_notification(text: &str) -> Self {
        let said = text.trim().to_lowercase();
        let begins = ["you're now using", "you’re now using", "now using"]
            .iter()
            .find_map(|begin| said.strip_prefix(begin));
        let about = |rest: &str| {
            ["credit", "extra usage", "usage allocation"]
                .iter()
                .any(|word| rest.contains(word))
        };
        match begins.is_some_and(about) {
            true => Self::Overage(Sign::Notification),
            false => Self::Clear,
        }
    }

    /// Of a failed turn; [`Signal::Clear`] for one that failed for another reason.
    pub fn of_failure(failure: &Failure) -> Self {
        match failure.kind {
            FailureKind::UsageLimit => Self::UsageLimit {
                window: None,
                resets_at: reset_in(&failure.text),
            },
            FailureKind::Billing => Self::CreditsRequired,
            FailureKind::RateLimited if is_limit_sentence(&failure.text) => Self::UsageLimit {
                window: None,
                resets_at: reset_in(&failure.text),
            },
            FailureKind::RateLimited => Self::Throttle,
            FailureKind::InvalidRequest if is_billing_sentence(&failure.text) => {
                Self::CreditsRequired
            }
            _ => Self::Clear,
        }
    }

    /// What a transport does about it.
    pub fn reaction(&self, policy: Policy) -> Reaction {
        match (self, policy) {
            (Self::Clear, _) => Reaction::Go,
            (Self::Near(near), _) => Reaction::Tell(near.notice()),
            (Self::Overage(_) | Self::CreditsOn, Policy::Off) => Reaction::Go,
            (Self::CreditsOn, _) => Reaction::Tell(Notice::Other {
                text: format!("{CREDITS_ON}."),
            }),
            (Self::Overage(sign), Policy::Warn) => Reaction::Tell(Notice::Other {
                text: format!("usage credits are in use now ({sign}); they may be charged."),
            }),
            (Self::Overage(sign), Policy::RequireOff) => Reaction::End {
                error: Error::new(
                    ErrorCode::Billing,
                    format!("usage credits are in use ({sign}), and the setting is to refuse that"),
                )
                .with_remedy(credits_on().remedy()),
                closes_pool: true,
            },
            (Self::CreditsRequired, _) => end(Error::new(
                ErrorCode::Billing,
                "the service asks for usage credits for this request",
            )),
            (Self::UsageLimit { window, resets_at }, _) => {
                end(usage_limit(window.as_deref(), *resets_at))
            }
            (Self::Throttle, _) => end(Error::new(ErrorCode::RateLimit, "")),
        }
    }
}

/// What a transport does about a signal.
#[derive(Clone, Debug)]
pub enum Reaction {
    /// Nothing.
    Go,
    /// The host is to hear this.
    Tell(Notice),
    /// The turn ends with this.
    End {
        /// The error.
        error: Error,
        /// Whether a pool has to close as a whole: every one of its processes would draw on the same credits.
        closes_pool: bool,
    },
}

/// The word of the service for a request that only credits can pay.
const CREDITS_REQUIRED: &str = "credits_required";

/// What decides, from an event or from headers.
struct Facts<'a> {
    status: Option<&'a LimitStatus>,
    claim: Option<&'a str>,
    overage_status: Option<&'a LimitStatus>,
    in_use: bool,
    /// `isUsingOverage`; headers have no such field.
    using: Option<bool>,
    resets_at: Option<u64>,
    is_throttle: bool,
    /// `overageEnabled`; headers have no such field.
    enabled: bool,
}

impl Facts<'_> {
    fn overage(&self) -> Option<Sign> {
        let rejected = self.status == Some(&LimitStatus::Rejected);
        let covered = match self.overage_status {
            None | Some(LimitStatus::Rejected) => false,
            Some(LimitStatus::Other(word)) => !word.is_empty(),
            Some(_) => true,
        };
        if self.using == Some(true) {
            return Some(Sign::IsUsingOverage);
        }
        if self.in_use {
            return Some(Sign::OverageInUse);
        }
        if self.claim == Some("overage") {
            return Some(Sign::OverageWindow);
        }
        if rejected && covered {
            return Some(Sign::RejectedButCovered);
        }
        let unknown = matches!(self.status, Some(LimitStatus::Other(_)));
        (unknown && self.using != Some(false)).then_some(Sign::UnknownStatus)
    }

    fn signal(&self, near: impl FnOnce() -> Option<Near>) -> Signal {
        if let Some(sign) = self.overage() {
            return Signal::Overage(sign);
        }
        if self.is_throttle {
            return Signal::Throttle;
        }
        if self.status == Some(&LimitStatus::Rejected) {
            return Signal::UsageLimit {
                window: self.claim.map(str::to_owned),
                resets_at: self.resets_at,
            };
        }
        if self.enabled {
            return Signal::CreditsOn;
        }
        near().map_or(Signal::Clear, Signal::Near)
    }
}

fn is_warning(status: Option<&LimitStatus>) -> bool {
    status == Some(&LimitStatus::AllowedWarning)
}

/// The fullest window that has crossed a threshold, or the one that decides when the answer warns.
fn near_window(headers: &UnifiedHeaders) -> Option<Near> {
    let part = |window: &Window| window.utilization.unwrap_or(0.0);
    let crossed = headers
        .windows
        .iter()
        .filter(|(name, window)| {
            name.as_str() != "overage"
                && (window.surpassed_threshold.is_some() || is_warning(window.status.as_ref()))
        })
        .max_by(|(_, a), (_, b)| part(a).total_cmp(&part(b)));
    if let Some((name, window)) = crossed {
        return Some(Near {
            window: wire_name(name).to_owned(),
            utilization: window.utilization,
            resets_at: window.reset_epoch_s,
        });
    }
    is_warning(headers.status.as_ref()).then(|| Near {
        window: headers.representative_claim.clone().unwrap_or_default(),
        utilization: None,
        resets_at: headers.reset_epoch_s,
    })
}

impl Near {
    /// As the host hears it.
    pub fn notice(&self) -> Notice {
        Notice::LimitWarning {
            window: self.window.clone(),
            utilization: self.utilization,
            resets_at: self.resets_at.and_then(|at| i64::try_from(at).ok()),
        }
    }
}

impl std::fmt::Display for Sign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Undecodable => "a limit event cannot be decoded",
            Self::IsUsingOverage => "isUsingOverage is true",
            Self::OverageInUse => "overage is in use",
            Self::OverageWindow => "the deciding window is overage",
            Self::RejectedButCovered => "the plan's limit is reached and credits cover the request",
            Self::UnknownStatus => "the limit's status is not known",
            Self::Notification => "the CLI says so",
        })
    }
}

fn end(error: Error) -> Reaction {
    Reaction::End {
        error,
        closes_pool: false,
    }
}

fn usage_limit(window: Option<&str>, resets_at: Option<u64>) -> Error {
    let what = match window {
        Some(window) if is_word(window) => format!("the plan's limit is reached ({window})"),
        _ => "the plan's limit is reached".to_owned(),
    };
    let error = Error::new(ErrorCode::UsageLimit, what);
    match resets_at.and_then(moment) {
        Some(at) => error.with_reset(at),
        None => error,
    }
}

fn moment(seconds: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn is_word(text: &str) -> bool {
    let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    !text.is_empty() && text.len() <= 40 && text.bytes().all(letter)
}

/// Whether a sentence of the CLI or the service is about the plan's limit. A throttle says "not your usage limit".
pub(crate) fn is_limit_sentence(text: &str) -> bool {
    let said = text.to_lowercase();
    let limits = [
        "usage limit",
        "session limit",
        "weekly limit",
        "5-hour limit",
        "opus limit",
        "sonnet limit",
    ];
    !said.contains("not your usage limit") && limits.iter().any(|phrase| said.contains(phrase))
}

/// Whether a sentence asks for credits. Its wording drifts (bug 49), and a tool's name may carry "usage" too: only usage
/// or credits as something that is drawn on or used up counts.
pub(crate) fn is_billing_sentence(text: &str) -> bool {
    let said = text.to_lowercase();
    let about = ["extra usage", "usage credit", "credit balance"];
    about.iter().any(|phrase| said.contains(phrase))
        || (said.contains("usage") && (said.contains("out of") || said.contains("draw from")))
}

/// The reset time of the oldest wording: `usage limit reached|1762952400`. Times of day in newer sentences are for people;
/// what is needed of them stands in `rate_limit_event`.
fn reset_in(text: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once('|')?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let at = digits.parse().ok().and_then(epoch_s)?;
    (at > 1_000_000_000).then_some(at)
}

#[cfg(test)]
#[path = "rate_tests.rs"]
mod tests;
