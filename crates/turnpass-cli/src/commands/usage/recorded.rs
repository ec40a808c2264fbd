//! The tokens of the last sessions and of today, from the records of generations, and their list-price estimate. Pure,
//! but for [`Recorded::read`].

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use turnpass::record::{StreamRecord, TokensRecord};

use super::{SESSIONS, line};
use crate::commands::models::grouped;
use crate::prices::{Estimate, Prices};
use crate::terminal::visible;

/// Characters of a session's digest in the text: enough to tell five sessions apart. `--json` has what the log has.
const DIGEST_CHARS: usize = 8;

/// What the estimate is called wherever a person reads it.
const ESTIMATE: &str = "list-price estimate (your prices; not what you are charged)";

/// What several generations used.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sum {
    generations: u64,
    tokens: TokensRecord,
    models: BTreeSet<String>,
    estimate: Estimate,
}

impl Sum {
    fn add(&mut self, record: &StreamRecord, prices: &Prices) {
        let sum = |into: &mut u64, more: u64| *into = into.saturating_add(more);
        let (tokens, more) = (&mut self.tokens, &record.tokens);
        self.generations += 1;
        sum(&mut tokens.input, more.input);
        sum(&mut tokens.output, more.output);
        sum(&mut tokens.cache_creation, more.cache_creation);
        sum(&mut tokens.cache_read, more.cache_read);
        self.models.extend(record.model.clone());
        let estimate = prices.estimate(record.model.as_deref(), more);
        self.estimate.add(estimate);
    }

    fn text(&self) -> String {
        let tokens = &self.tokens;
        let prompt = tokens
            .input
            .saturating_add(tokens.cache_read)
            .saturating_add(tokens.cache_creation);
        let models: Vec<_> = self.models.iter().map(|model| visible(model)).collect();
        let mut text = format!(
            "{} generations, {} in ({} cache reads, {} cache writes), {} out",
            grouped(self.generations),
            grouped(prompt),
            grouped(tokens.cache_read),
            grouped(tokens.cache_creation),
            grouped(tokens.output),
        );
        if !models.is_empty() {
            text += &format!(", {}", models.join(" "));
        }
        text
    }

    fn object(&self, prices: &Prices) -> Value {
        let estimate = (!prices.is_empty()).then_some(self.estimate);
        json!({
            "generations": self.generations,
            "tokens": self.tokens,
            "models": self.models,
            "list_price_estimate_usd": estimate.map(|estimate| estimate.usd),
            "tokens_without_price": estimate.map(|estimate| estimate.unpriced_tokens),
        })
    }

    fn estimate(&self) -> String {
        let mut text = format!("${:.4}", self.estimate.usd);
        if self.estimate.unpriced_tokens > 0 {
            let tokens = grouped(self.estimate.unpriced_tokens);
            text += &format!(", without {tokens} tokens that have no price");
        }
        text
    }
}

/// A session of the log.
#[derive(Clone, Debug)]
struct Session {
    digest: String,
    last: Timestamp,
    sum: Sum,
}

/// What the log says.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorded {
    today: Sum,
    /// The one with the newest generation first.
    sessions: Vec<Session>,
    prices: Prices,
    /// Why the log could not be read.
    unread: Option<String>,
}

impl Recorded {
    /// Reads the log. One that cannot be read is told in its place: the rest of the page does not hang on it.
    pub(super) fn read(
        folder: Option<&Path>,
        laboratory: bool,
        prices: &Prices,
        now: Timestamp,
    ) -> Self {
        let Some(folder) = folder else {
            return Self {
                unread: Some("there is no home folder".to_owned()),
                ..Self::default()
            };
        };
        let mut summing = Summing::new(laboratory, prices, now, TimeZone::system());
        match turnpass::record::read(folder, |record| summing.add(&record)) {
            Ok(_) => summing.done(),
            Err(error) => Self {
                unread: Some(error.to_string()),
                ..Self::default()
            },
        }
    }

    pub(super) fn text(&self, zone: &TimeZone) -> String {
        if let Some(why) = &self.unread {
            return line("log", &visible(why));
        }
        let mut text = line("log, today", &self.today.text());
        for session in &self.sessions {
            let digest: String = session.digest.chars().take(DIGEST_CHARS).collect();
            let name = format!("log, {}", visible(&digest));
            let when = zone.to_datetime(session.last).strftime("%Y-%m-%d %H:%M");
            text += &line(&name, &format!("{when}, {}", session.sum.text()));
        }
        if self.prices.is_empty() {
            let how = "not shown: no price is built in; set yours in the configuration file, \
                       [prices.\"MODEL\"] input, output, cache_read, cache_write";
            return text + &format!("{ESTIMATE}\n") + &line("", how);
        }
        text += &format!("{ESTIMATE}\n");
        text += &line("  today", &self.today.estimate());
        for session in &self.sessions {
            let digest: String = session.digest.chars().take(DIGEST_CHARS).collect();
            text += &line(&format!("  {}", visible(&digest)), &session.sum.estimate());
        }
        text
    }

    pub(super) fn object(&self) -> Value {
        if let Some(why) = &self.unread {
            return json!({"unread": why});
        }
        let sessions = self.sessions.iter().map(|session| {
            let mut object = session.sum.object(&self.prices);
            object["session"] = json!(session.digest);
            object["last"] = json!(session.last);
            object
        });
        json!({
            "today": self.today.object(&self.prices),
            "sessions": sessions.collect::<Vec<_>>(),
        })
    }
}

/// Sums records up while they are read, so that the log is not held in memory.
#[derive(Debug)]
pub(super) struct Summing<'a> {
    laboratory: bool,
    prices: &'a Prices,
    now: Timestamp,
    zone: TimeZone,
    today: Sum,
    sessions: HashMap<String, Session>,
}

impl<'a> Summing<'a> {
    pub(super) fn new(
        laboratory: bool,
        prices: &'a Prices,
        now: Timestamp,
        zone: TimeZone,
    ) -> Self {
        Self {
            laboratory,
            prices,
            now,
            zone,
            today: Sum::default(),
            sessions: HashMap::new(),
        }
    }

    pub(super) fn add(&mut self, record: &StreamRecord) {
        // What a laboratory run used is not the plan's, and the other way round.
        if record.laboratory != self.laboratory {
            return;
        }
        let day = |at: Timestamp| self.zone.to_datetime(at).date();
        if day(record.time) == day(self.now) {
            self.today.add(record, self.prices);
        }
        let session = self.sessions.entry(record.session.clone());
        let session = session.or_insert_with(|| Session {
            digest: record.session.clone(),
            last: record.time,
            sum: Sum::default(),
        });
        session.last = session.last.max(record.time);
        session.sum.add(record, self.prices);
    }

    pub(super) fn done(self) -> Recorded {
        let mut sessions: Vec<_> = self.sessions.into_values().collect();
        sessions.sort_by(|a, b| b.last.cmp(&a.last).then(a.digest.cmp(&b.digest)));
        sessions.truncate(SESSIONS);
        Recorded {
            today: self.today,
            sessions,
            prices: self.prices.clone(),
            unread: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(time: &str, session: &str, more: Value) -> StreamRecord {
        let mut record = json!({
            "time": time, "transport": "relay", "call_kind": "normal",
            "session": session, "outcome": "ok", "duration_ms": 1, "chunks": 1, "attempts": 1,
            "partial_stream": false, "model": "claude-sonnet-5-5",
            "tokens": {"input": 1000, "output": 200, "cache_creation": 10000, "cache_read": 50000},
        });
        let object = record.as_object_mut().unwrap();
        object.extend(more.as_object().unwrap().clone());
        serde_json::from_value(record).unwrap()
    }

    fn zone() -> TimeZone {
        TimeZone::fixed(jiff::tz::offset(2))
    }

    fn summed(prices: &str, records: &[StreamRecord]) -> Recorded {
        let prices = toml::from_str(prices).unwrap();
        let now = "2026-06-02T12:00:00Z".parse().unwrap();
        let mut summing = Summing::new(false, &prices, now, zone());
        records.iter().for_each(|record| summing.add(record));
        summing.done()
    }

    const SONNET: &str =
        "[claude-sonnet-5-5]\ninput = 3.0\noutput = 15.0\ncache_read = 0.3\ncache_write = 6.0\n";

    #[test]
    fn sessions_and_the_local_day_are_summed() {
        let recorded = summed(
            SONNET,
            &[
                // Yesterday in UTC and today in the zone; and yesterday in both.
                record("2026-06-01T22:30:00Z", "aaaaaaaa11111111", json!({})),
                record("2026-06-01T21:30:00Z", "bbbbbbbb22222222", json!({})),
                record(
                    "2026-06-02T10:00:00Z",
                    "aaaaaaaa11111111",
                    json!({"model": "claude-opus-5-5", "outcome": "error"}),
                ),
                record("2026-06-02T11:00:00Z", "cc", json!({"laboratory": true})),
            ],
        );
        let text = recorded.text(&zone());
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "log, today        2 generations, 122,000 in (100,000 cache reads, 20,000 cache writes), 400 out, claude-opus-5-5 claude-sonnet-5-5",
                "log, aaaaaaaa     2026-06-02 12:00, 2 generations, 122,000 in (100,000 cache reads, 20,000 cache writes), 400 out, claude-opus-5-5 claude-sonnet-5-5",
                "log, bbbbbbbb     2026-06-01 23:30, 1 generations, 61,000 in (50,000 cache reads, 10,000 cache writes), 200 out, claude-sonnet-5-5",
                "list-price estimate (your prices; not what you are charged)",
                "  today           $0.0810, without 61,200 tokens that have no price",
                "  aaaaaaaa        $0.0810, without 61,200 tokens that have no price",
                "  bbbbbbbb        $0.0810",
            ]
        );
        let object = recorded.object();
        assert_eq!(object["sessions"].as_array().unwrap().len(), 2);
        let session = &object["sessions"][1];
        assert_eq!(session["session"], "bbbbbbbb22222222");
        assert_eq!(session["last"], "2026-06-01T21:30:00Z");
        assert_eq!(session["tokens"]["cache_read"], 50_000);
        let usd = session["list_price_estimate_usd"].as_f64().unwrap();
        assert!((usd - 0.081).abs() < 1e-12, "{usd}");
        assert_eq!(object["today"]["tokens_without_price"], 61_200);
    }

    #[test]
    fn without_prices_the_way_to_set_them_is_told() {
        let recorded = summed("", &[record("2026-06-02T10:00:00Z", "aa", json!({}))]);
        let text = recorded.text(&zone());
        assert!(text.contains("no price is built in"), "{text}");
        assert!(!text.contains('$'), "{text}");
        let object = recorded.object();
        assert_eq!(object["today"]["list_price_estimate_usd"], Value::Null);
        assert_eq!(object["sessions"][0]["tokens_without_price"], Value::Null);
    }

    #[test]
    fn the_last_sessions_come_newest_first_and_nothing_is_not_a_fault() {
        let records: Vec<_> = (0..7)
            .map(|n| {
                let time = format!("2026-06-02T0{n}:00:00Z");
                record(&time, &format!("{n}"), json!({}))
            })
            .collect();
        let object = summed("", &records).object();
        let digests: Vec<_> = object["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|session| session["session"].as_str().unwrap())
            .collect();
        assert_eq!(digests, ["6", "5", "4", "3", "2"]);
        let text = summed("", &[]).text(&zone());
        assert!(
            text.starts_with("log, today        0 generations"),
            "{text}"
        );
    }

    #[test]
    fn names_from_the_log_cannot_steer_a_terminal() {
        let made = json!({"model": "m\u{1b}[2J"});
        let text = summed("", &[record("2026-06-02T10:00:00Z", "\u{1b}[2J", made)]).text(&zone());
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn a_log_that_cannot_be_read_is_told_and_a_missing_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("records");
        let read = || Recorded::read(Some(&file), false, &Prices::default(), Timestamp::now());
        assert_eq!(read().object()["today"]["generations"], 0);
        std::fs::write(&file, "").unwrap();
        let text = read().text(&zone());
        assert!(text.contains("cannot be read"), "{text}");
        assert!(read().object()["unread"].is_string());
    }
}
