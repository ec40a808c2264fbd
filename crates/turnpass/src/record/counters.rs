//! Totals over all generations that a sink has seen, for whoever exports figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::stream::{Outcome, StreamRecord, TokensRecord};
use crate::request::TransportKind;

/// Totals since the sink was opened. They count every generation, also those whose record could not be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordCounters {
    /// Generations by transport and outcome.
    pub generations: BTreeMap<(TransportKind, Outcome), u64>,
    /// Errors by code.
    pub errors: BTreeMap<String, u64>,
    /// Tokens by transport.
    pub tokens: BTreeMap<TransportKind, TokensRecord>,
    /// Messages requests that reached the upstream, as far as transports said.
    pub upstream_requests: u64,
    /// Time of all generations together, in milliseconds.
    pub duration_ms: u64,
    /// Records that are in the file.
    pub written: u64,
    /// Records that the disk did not take.
    pub failed: u64,
    /// Records that found the queue full.
    pub dropped: u64,
}

impl RecordCounters {
    /// All generations of this outcome.
    pub fn of(&self, outcome: Outcome) -> u64 {
        let all = self.generations.iter();
        all.filter(|((_, of), _)| *of == outcome)
            .map(|(_, count)| count)
            .sum()
    }

    /// The totals as Prometheus text (exposition format 0.0.4). Names and labels are fixed words, but for codes of errors,
    /// of which a record that somebody else wrote can hold any: they are left out unless they are words.
    pub fn prometheus(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, help: &str, rows: &[(String, String)]| {
            if rows.is_empty() {
                return;
            }
            // Writing to a string does not fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
            for (labels, value) in rows {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        };
        let rows: Vec<_> = self
            .generations
            .iter()
            .map(|((transport, outcome), count)| {
                let outcome = outcome.as_str();
                let labels = format!("{{transport=\"{transport}\",outcome=\"{outcome}\"}}");
                (labels, count.to_string())
            })
            .collect();
        family("turnpass_generations_total", "Generations.", &rows);
        let rows: Vec<_> = self
            .errors
            .iter()
            .filter(|(code, _)| is_word(code))
            .map(|(code, count)| (format!("{{code=\"{code}\"}}"), count.to_string()))
            .collect();
        family("turnpass_errors_total", "Failed generations.", &rows);
        let kinds = |tokens: &TokensRecord| {
            [
                ("input", tokens.input),
                ("output", tokens.output),
                ("cache_creation", tokens.cache_creation),
                ("cache_read", tokens.cache_read),
            ]
        };
        let rows: Vec<_> = self
            .tokens
            .iter()
            .flat_map(|(transport, tokens)| {
                kinds(tokens).map(|(kind, count)| {
                    let labels = format!("{{transport=\"{transport}\",kind=\"{kind}\"}}");
                    (labels, count.to_string())
                })
            })
            .collect();
        family("turnpass_tokens_total", "Tokens.", &rows);
        let one = |value: String| [(String::new(), value)];
        let requests = one(self.upstream_requests.to_string());
        let what = "Messages requests that reached the upstream, as far as transports said.";
        family("turnpass_upstream_requests_total", what, &requests);
        let (seconds, milliseconds) = (self.duration_ms / 1000, self.duration_ms % 1000);
        let seconds = one(format!("{seconds}.{milliseconds:03}"));
        let what = "Time of all generations together.";
        family("turnpass_generation_seconds_total", what, &seconds);
        text
    }

    /// Counts a record.
    pub fn add(&mut self, record: &StreamRecord) {
        let key = (record.transport, record.outcome);
        *self.generations.entry(key).or_default() += 1;
        if let Some(error) = &record.error {
            *self.errors.entry(error.code.clone()).or_default() += 1;
        }
        let tokens = self.tokens.entry(record.transport).or_default();
        for (sum, more) in [
            (&mut tokens.input, record.tokens.input),
            (&mut tokens.output, record.tokens.output),
            (&mut tokens.cache_creation, record.tokens.cache_creation),
            (&mut tokens.cache_read, record.tokens.cache_read),
            (
                &mut self.upstream_requests,
                record.upstream_requests.unwrap_or(0).into(),
            ),
            (&mut self.duration_ms, record.duration_ms),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

/// Longest code of an error that becomes a label, in bytes; the longest of ours has 24.
const CODE_BYTES: usize = 48;

fn is_word(code: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    !code.is_empty() && code.len() <= CODE_BYTES && code.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(outcome: &str, code: Option<&str>) -> StreamRecord {
        let mut record = json!({
            "time": "2026-06-01T00:00:00Z", "transport": "relay", "call_kind": "normal", "session": "00",
            "outcome": outcome, "duration_ms": 1_250, "chunks": 1, "attempts": 1, "partial_stream": false,
            "upstream_requests": 1, "tokens": {"input": 1, "output": 2, "cache_creation": 3, "cache_read": 4},
        });
        if let Some(code) = code {
            record["error"] = json!({"code": code, "detail": ""});
        }
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn the_totals_are_prometheus_text() {
        let mut counters = RecordCounters::default();
        counters.add(&record("ok", None));
        counters.add(&record("ok", None));
        counters.add(&record("error", Some("usage_limit")));
        counters.add(&record("error", Some("x\"} 1\nevil{a=\"")));
        let wanted = "# HELP turnpass_generations_total Generations.\n\
            # TYPE turnpass_generations_total counter\n\
            turnpass_generations_total{transport=\"relay\",outcome=\"ok\"} 2\n\
            turnpass_generations_total{transport=\"relay\",outcome=\"error\"} 2\n\
            # HELP turnpass_errors_total Failed generations.\n\
            # TYPE turnpass_errors_total counter\n\
            turnpass_errors_total{code=\"usage_limit\"} 1\n\
            # HELP turnpass_tokens_total Tokens.\n\
            # TYPE turnpass_tokens_total counter\n\
            turnpass_tokens_total{transport=\"relay\",kind=\"input\"} 4\n\
            turnpass_tokens_total{transport=\"relay\",kind=\"output\"} 8\n\
            turnpass_tokens_total{transport=\"relay\",kind=\"cache_creation\"} 12\n\
            turnpass_tokens_total{transport=\"relay\",kind=\"cache_read\"} 16\n";
        let text = counters.prometheus();
        assert!(text.starts_with(wanted), "{text}");
        assert!(
            text.contains("\nturnpass_upstream_requests_total 4\n"),
            "{text}"
        );
        assert!(
            text.ends_with("\nturnpass_generation_seconds_total 5.000\n"),
            "{text}"
        );
        assert!(!text.contains("evil"), "{text}");
    }
}
