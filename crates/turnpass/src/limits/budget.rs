//! What a person allows: requests and tokens for a session and for a day, and a share of a usage window. Pure.
//!
//! A request counts before it is sent, tokens when the service has said how many they were. So a budget of tokens is
//! passed by at most the requests that are under way; a budget of requests is never passed.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::windows::{Board, UsedWindow};
use crate::error::{Error, ErrorCode, Result};
use crate::event::Usage;
use crate::request::TransportSession;

/// Sessions that the ledger keeps; beyond it the one that was used longest ago is forgotten, and would begin anew.
pub const SESSIONS_LIMIT: usize = 256;

/// Days that the ledger keeps beside the one that it counts on: programs in different time zones, and a clock that is set
/// back, count on several days in turn.
pub const DAYS_KEPT: usize = 4;

/// What a person allows. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    /// Nothing is sent while any usage window is used to this percentage or more.
    pub max_window_percent: Option<u8>,
    /// For one session, sub-agents included.
    pub session: Allowance,
    /// For one day by the local calendar, all sessions together.
    pub day: Allowance,
}

/// Requests and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Requests to the service.
    pub requests: Option<u64>,
    /// Tokens of prompts and answers as the service counts them, those from its cache included.
    pub tokens: Option<u64>,
}

impl Budgets {
    /// Whether something has to be counted.
    pub fn counts(&self) -> bool {
        self.session != Allowance::default() || self.day != Allowance::default()
    }

    /// Refuses when a window is used too far.
    ///
    /// # Errors
    ///
    /// `budget` with the time when the window starts anew.
    pub fn check_window(&self, board: &Board, now: i64) -> Result<()> {
        let Some(percent) = self.max_window_percent else {
            return Ok(());
        };
        match board.fullest(now) {
            Some(window) if window.used_percent >= f64::from(percent) => {
                Err(window_refused(&window, percent))
            }
            _ => Ok(()),
        }
    }
}

fn window_refused(window: &UsedWindow, percent: u8) -> Error {
    let what = format!(
        "nothing was sent: the window {} is used to {:.0} %, and max_window_percent is {percent}",
        window.name, window.used_percent
    );
    refused(what, window.resets_at)
}

fn refused(what: String, opens: Option<i64>) -> Error {
    let error = Error::new(ErrorCode::Budget, what);
    let at = opens
        .and_then(|at| u64::try_from(at).ok())
        .and_then(|at| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(at)));
    match at {
        Some(at) => error.with_reset(at),
        None => error,
    }
}

/// When something happens: the second, and the local day with its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Seconds since the epoch.
    pub unix_s: i64,
    /// The local day, `2026-11-30`.
    pub day: String,
    /// When it ends, in seconds since the epoch.
    pub day_ends: Option<i64>,
}

impl Moment {
    /// Now, by the system's time zone.
    pub fn now() -> Self {
        let now = jiff::ZonedDateTime::now();
        let tomorrow = now
            .tomorrow()
            .and_then(|at| at.start_of_day())
            .map(|at| at.timestamp().as_second());
        Self {
            unix_s: now.timestamp().as_second(),
            day: now.date().to_string(),
            day_ends: tomorrow.ok(),
        }
    }
}

/// What was used. The names of sessions are kept as digests only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    day: String,
    today: Spent,
    /// Other days, which are gone on with when it is their turn again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    others: BTreeMap<String, Spent>,
    sessions: BTreeMap<String, Session>,
}

/// Requests and tokens that were used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Requests to the service.
    pub requests: u64,
    /// Tokens of prompts and answers.
    pub tokens: u64,
}

/// What one session used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// What it used.
    #[serde(flatten)]
    pub spent: Spent,
    /// When it was last used, in seconds since the epoch.
    pub last: i64,
}

impl Spent {
    fn request(&mut self) {
        // The file is a person's own and may hold any number.
        self.requests = self.requests.saturating_add(1);
    }
}

impl Ledger {
    /// Counts one request that is about to be sent, or refuses it.
    ///
    /// # Errors
    ///
    /// `budget` that names the key; with the end of the day where that opens it again.
    pub fn request(&mut self, budgets: &Budgets, key: &SessionKey, now: &Moment) -> Result<()> {
        self.turn_page(now);
        let session = self.sessions.get(&key.0).copied().unwrap_or_default();
        check(session.spent, budgets.session, "session", None)?;
        check(self.today, budgets.day, "day", now.day_ends)?;
        self.today.request();
        self.session(key, now).spent.request();
        Ok(())
    }

    /// Takes a request out again that was counted on this day and then was not sent.
    pub fn unsent(&mut self, key: &SessionKey, day: &str) {
        let counted = match self.day == day {
            true => Some(&mut self.today),
            false => self.others.get_mut(day),
        };
        if let Some(spent) = counted {
            spent.requests = spent.requests.saturating_sub(1);
        }
        if let Some(session) = self.sessions.get_mut(&key.0) {
            session.spent.requests = session.spent.requests.saturating_sub(1);
            if session.spent == Spent::default() {
                self.sessions.remove(&key.0);
            }
        }
    }

    /// Counts tokens that a request took.
    pub fn tokens(&mut self, key: &SessionKey, tokens: u64, now: &Moment) {
        self.turn_page(now);
        self.today.tokens = self.today.tokens.saturating_add(tokens);
        let spent = &mut self.session(key, now).spent;
        spent.tokens = spent.tokens.saturating_add(tokens);
    }

    /// What was used today.
    pub fn today(&self, now: &Moment) -> Spent {
        match self.day == now.day {
            true => self.today,
            false => self.others.get(&now.day).copied().unwrap_or_default(),
        }
    }

    /// The sessions, the last used one first.
    pub fn sessions(&self) -> Vec<Session> {
        let mut sessions: Vec<_> = self.sessions.values().copied().collect();
        sessions.sort_by_key(|session| std::cmp::Reverse(session.last));
        sessions
    }

    fn turn_page(&mut self, now: &Moment) {
        if self.day == now.day {
            return;
        }
        let (day, today) = (std::mem::take(&mut self.day), self.today);
        if today != Spent::default() {
            self.others.insert(day, today);
        }
        self.day.clone_from(&now.day);
        self.today = self.others.remove(&now.day).unwrap_or_default();
        while self.others.len() > DAYS_KEPT {
            // Days are written so that the order of texts is that of time.
            self.others.pop_first();
        }
    }

    fn session(&mut self, key: &SessionKey, now: &Moment) -> &mut Session {
        if !self.sessions.contains_key(&key.0) && self.sessions.len() >= SESSIONS_LIMIT {
            let oldest = self.sessions.iter().min_by_key(|(_, session)| session.last);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.sessions.remove(&oldest);
            }
        }
        let session = self.sessions.entry(key.0.clone()).or_default();
        session.last = now.unix_s;
        session
    }
}

fn check(spent: Spent, allowed: Allowance, of: &str, opens: Option<i64>) -> Result<()> {
    for (what, used, limit) in [
        ("requests", spent.requests, allowed.requests),
        ("tokens", spent.tokens, allowed.tokens),
    ] {
        if let Some(limit) = limit.filter(|limit| used >= *limit) {
            let said = format!(
                "nothing was sent: this {of} has used {used} {what}, and max_{what}_per_{of} is {limit}"
            );
            // A budget of nothing is as closed on the next day.
            return Err(refused(said, opens.filter(|_| limit > 0)));
        }
    }
    Ok(())
}

/// Bytes of a digest that name a session: two of a person's sessions never share them.
const KEY_BYTES: usize = 12;

/// The name of a session in the ledger: a digest, since the name itself is the host's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionKey(String);

impl SessionKey {
    /// As it stands in the ledger.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// What [`SessionKey::as_str`] gave; `None` for anything else.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_key = text.len() == 2 * KEY_BYTES && text.bytes().all(is_digit);
        is_key.then(|| Self(text.to_owned()))
    }

    /// Of a request: its conversation, or the one that it was started from.
    pub fn of(session: &TransportSession, parent: Option<&TransportSession>) -> Self {
        let digest = Sha256::digest(parent.unwrap_or(session).0.as_bytes());
        Self(
            digest
                .iter()
                .take(KEY_BYTES)
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }
}

/// The tokens of one generation: prompt and answer.
pub fn tokens_of(usage: &Usage) -> u64 {
    usage
        .prompt_tokens()
        .saturating_add(usage.output_tokens.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::windows::Reading;
    use proptest::prelude::*;

    const NOW: i64 = 4_000_000_000;

    fn moment(day: &str) -> Moment {
        Moment {
            unix_s: NOW,
            day: day.to_owned(),
            day_ends: Some(NOW + 3600),
        }
    }

    fn key(name: &str) -> SessionKey {
        SessionKey::of(&TransportSession(name.to_owned()), None)
    }

    fn unix(seconds: i64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.unsigned_abs())
    }

    fn allow(requests: u64) -> Allowance {
        Allowance {
            requests: Some(requests),
            tokens: None,
        }
    }

    #[test]
    fn a_day_refuses_with_its_end_and_opens_with_the_next() {
        let budgets = Budgets {
            day: allow(2),
            ..Budgets::default()
        };
        let (mut ledger, today) = (Ledger::default(), moment("2026-11-30"));
        for name in ["a", "b"] {
            ledger.request(&budgets, &key(name), &today).unwrap();
        }
        let error = ledger.request(&budgets, &key("c"), &today).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Budget);
        assert!(
            error.detail().contains("max_requests_per_day is 2"),
            "{error}"
        );
        assert_eq!(error.resets_at(), Some(unix(NOW + 3600)));
        assert_eq!(
            ledger.today(&today).requests,
            2,
            "a refused one is not counted"
        );
        let next = moment("2026-12-01");
        ledger.request(&budgets, &key("c"), &next).unwrap();
        assert_eq!(ledger.today(&next).requests, 1);
    }

    #[test]
    fn a_budget_of_nothing_refuses_everything_and_opens_at_no_time() {
        let budgets = Budgets {
            day: allow(0),
            ..Budgets::default()
        };
        for day in ["2026-11-30", "2026-12-01"] {
            let refused = Ledger::default().request(&budgets, &key("s"), &moment(day));
            let error = refused.unwrap_err();
            assert_eq!((error.code(), error.resets_at()), (ErrorCode::Budget, None));
        }
    }

    #[test]
    fn days_that_take_turns_open_no_budget_twice() {
        // Two programs in different time zones around midnight, or a clock that is set back.
        let budgets = Budgets {
            day: allow(2),
            ..Budgets::default()
        };
        let (early, late) = (moment("2026-11-30"), moment("2026-12-01"));
        let (mut ledger, mut passed) = (Ledger::default(), [0, 0]);
        for _ in 0..5 {
            for (count, now) in passed.iter_mut().zip([&early, &late]) {
                *count += usize::from(ledger.request(&budgets, &key("s"), now).is_ok());
                let stored = serde_json::to_string(&ledger).unwrap();
                ledger = serde_json::from_str(&stored).unwrap();
            }
        }
        assert_eq!(passed, [2, 2]);
        let seen = [&early, &late].map(|now| ledger.today(now).requests);
        assert_eq!(seen, [2, 2]);
        for day in 1..30 {
            ledger.tokens(&key("s"), 1, &moment(&format!("2027-01-{day:02}")));
        }
        assert_eq!(ledger.others.len(), DAYS_KEPT);
    }

    #[test]
    fn a_request_that_was_not_sent_is_taken_out_of_its_own_day() {
        let (early, late) = (moment("2026-11-30"), moment("2026-12-01"));
        let mut ledger = Ledger::default();
        let none = Budgets::default();
        for now in [&early, &early, &late] {
            ledger.request(&none, &key("s"), now).unwrap();
        }
        ledger.unsent(&key("s"), "2026-11-30");
        let seen = [&early, &late].map(|now| ledger.today(now).requests);
        assert_eq!((seen, ledger.sessions()[0].spent.requests), ([1, 1], 2));
        for day in ["2026-11-30", "2026-12-01", "2026-12-01", "1999-01-01"] {
            ledger.unsent(&key("s"), day);
        }
        assert_eq!(ledger.today(&late), Spent::default());
        assert!(ledger.sessions().is_empty(), "nothing is left of it");
    }

    #[test]
    fn any_number_in_the_file_counts_on() {
        let most = u64::MAX;
        let stored = format!(
            r#"{{"day":"2026-11-30","today":{{"requests":{most},"tokens":{most}}},"sessions":{{"{}":{{"requests":{most},"tokens":{most},"last":{}}}}}}}"#,
            key("s").0,
            i64::MIN
        );
        let mut ledger: Ledger = serde_json::from_str(&stored).unwrap();
        let now = moment("2026-11-30");
        ledger
            .request(&Budgets::default(), &key("s"), &now)
            .unwrap();
        ledger.tokens(&key("s"), 1, &now);
        assert_eq!(ledger.today(&now).requests, most);
    }

    #[test]
    fn a_session_is_its_own_and_its_sub_agents_count_with_it() {
        let budgets = Budgets {
            session: Allowance {
                requests: None,
                tokens: Some(100),
            },
            ..Budgets::default()
        };
        let (mut ledger, now) = (Ledger::default(), moment("2026-11-30"));
        let parent = TransportSession("p".to_owned());
        let child = SessionKey::of(&TransportSession("c".to_owned()), Some(&parent));
        ledger.tokens(&child, 99, &now);
        ledger.request(&budgets, &key("p"), &now).unwrap();
        ledger.tokens(&key("p"), 1, &now);
        let error = ledger.request(&budgets, &child, &now).unwrap_err();
        assert!(
            error.detail().contains("max_tokens_per_session is 100"),
            "{error}"
        );
        assert_eq!(error.resets_at(), None, "no time opens a session again");
        ledger.request(&budgets, &key("other"), &now).unwrap();
    }

    #[test]
    fn a_window_that_is_too_full_refuses_with_its_reset() {
        let answer = format!(
            r#"{{"rate_limits":{{"five_hour":{{"utilization":80,"resets_at":{}}},"seven_day":{{"utilization":10}}}}}}"#,
            NOW + 60
        );
        let mut board = Board::default();
        let budgets = |percent| Budgets {
            max_window_percent: Some(percent),
            ..Budgets::default()
        };
        budgets(80).check_window(&board, NOW).unwrap();
        board.reading(&Reading::read(&answer), NOW, NOW);
        budgets(81).check_window(&board, NOW).unwrap();
        let error = budgets(80).check_window(&board, NOW).unwrap_err();
        assert!(
            error.detail().contains("five_hour is used to 80 %"),
            "{error}"
        );
        assert_eq!(error.resets_at(), Some(unix(NOW + 60)));
        budgets(80).check_window(&board, NOW + 60).unwrap();
        Budgets::default().check_window(&board, NOW).unwrap();
    }

    #[test]
    fn the_ledger_stays_small_and_holds_no_name() {
        let (mut ledger, mut now) = (Ledger::default(), moment("2026-11-30"));
        for number in 0..SESSIONS_LIMIT + 10 {
            now.unix_s += 1;
            ledger.tokens(&key(&format!("marker-{number}")), 1, &now);
        }
        assert_eq!(ledger.sessions().len(), SESSIONS_LIMIT);
        assert_eq!(ledger.sessions()[0].last, now.unix_s);
        let stored = serde_json::to_string(&ledger).unwrap();
        assert!(!stored.contains("marker") && stored.len() < 64 * 1024);
        assert_eq!(serde_json::from_str::<Ledger>(&stored).unwrap(), ledger);
    }

    proptest! {
        #[test]
        fn a_budget_of_requests_is_never_passed(limit in 0u64..20, days in proptest::collection::vec(0u8..3, 0..60)) {
            let budgets = Budgets { day: allow(limit), ..Budgets::default() };
            let mut ledger = Ledger::default();
            let mut days = days;
            days.sort_unstable();
            let mut passed = BTreeMap::new();
            for day in days {
                if ledger.request(&budgets, &key("s"), &moment(&day.to_string())).is_ok() {
                    *passed.entry(day).or_insert(0) += 1;
                }
            }
            prop_assert!(passed.values().all(|count| *count <= limit));
        }
    }
}
