//! `turnpass log`: how past generations went.

use std::collections::VecDeque;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use turnpass::record::{Outcome, RecordCounters, StreamRecord};
use turnpass::request::TransportKind;

use crate::context::records_folder;
use crate::exit::{Exit, Fault};
use crate::terminal::visible;

/// Longest error that the table shows, in characters; `--json` has the whole.
const ERROR_CHARS: usize = 60;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object a line in place of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Print the totals of all that fit as Prometheus text, however many
    #[arg(long, conflicts_with_all = ["json", "last"])]
    metrics: bool,
    /// Only the last minutes, hours or days: 30m, 12h, 7d
    #[arg(long, value_name = "DURATION")]
    since: Option<Since>,
    /// Only this outcome: ok, error or cancelled
    #[arg(long, value_name = "OUTCOME", value_parser = outcome)]
    outcome: Option<Outcome>,
    /// Only this transport: pool, replay or relay
    #[arg(long, value_name = "TRANSPORT")]
    transport: Option<TransportKind>,
    /// The last N
    #[arg(short = 'n', long = "last", value_name = "N", default_value_t = 20)]
    last: usize,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<Exit, Fault> {
    let folder = records_folder()?;
    if args.metrics {
        let mut counters = RecordCounters::default();
        each(&folder, &args, Timestamp::now(), |record| {
            counters.add(&record)
        })?;
        return super::print(&counters.prometheus());
    }
    let (records, skipped) = read(&folder, &args, Timestamp::now())?;
    if args.json {
        let lines = records.iter().map(|record| {
            let line = serde_json::to_string(record).unwrap_or_default();
            line + "\n"
        });
        return super::print(&lines.collect::<String>());
    }
    let mut text = match records.is_empty() {
        true => format!("no record of a generation in {}\n", folder.display()),
        false => table(&records, &TimeZone::system()),
    };
    if skipped > 0 {
        text += &format!("\n{skipped} lines are no records and were passed over\n");
    }
    super::print(&text)
}

fn read(
    folder: &std::path::Path,
    args: &Args,
    now: Timestamp,
) -> Result<(VecDeque<StreamRecord>, u64), Fault> {
    let mut records = VecDeque::new();
    let skipped = each(folder, args, now, |record| {
        records.push_back(record);
        if records.len() > args.last {
            records.pop_front();
        }
    })?;
    Ok((records, skipped))
}

/// Gives each record that fits, oldest first.
fn each(
    folder: &std::path::Path,
    args: &Args,
    now: Timestamp,
    mut take: impl FnMut(StreamRecord),
) -> Result<u64, Fault> {
    // No file goes back as far as a duration that reaches beyond the beginning of time.
    let begin = args.since.and_then(|since| now.checked_sub(since.0).ok());
    let skipped = turnpass::record::read(folder, |record| {
        let fits = begin.is_none_or(|begin| record.time >= begin)
            && args.outcome.is_none_or(|wanted| record.outcome == wanted)
            && args
                .transport
                .is_none_or(|wanted| record.transport == wanted);
        if fits {
            take(record);
        }
    })?;
    Ok(skipped)
}

fn table(records: &VecDeque<StreamRecord>, zone: &TimeZone) -> String {
    let head = [
        "time",
        "transport",
        "call",
        "outcome",
        "total",
        "first",
        "in",
        "cached",
        "out",
        "req",
        "model",
        "",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(records.iter().map(|record| cells(record, zone)));
    let mut widths = [0; 12];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let line = row
            .iter()
            .zip(widths)
            .enumerate()
            .map(|(column, (cell, width))| match column {
                // Numbers stand to the right.
                4..=9 => format!("{cell:>width$}"),
                _ => format!("{cell:<width$}"),
            });
        text += line.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn cells(record: &StreamRecord, zone: &TimeZone) -> [String; 12] {
    let tokens = &record.tokens;
    // A line of the file may hold any number.
    let prompt = tokens
        .input
        .saturating_add(tokens.cache_creation)
        .saturating_add(tokens.cache_read);
    let number = |value: u64| match value {
        0 => "-".to_owned(),
        value => value.to_string(),
    };
    let word = |value: &Option<String>| visible(value.as_deref().unwrap_or("-"));
    let transport = match &record.process {
        Some(process) => format!("{} {}", record.transport, visible(process)),
        None => record.transport.to_string(),
    };
    let call = serde_json::to_value(record.call_kind).unwrap_or_default();
    let mut notes = Vec::new();
    match (&record.error, record.stop.as_deref()) {
        (Some(error), _) => {
            let said = format!("{}: {}", error.code, error.detail);
            notes.push(visible(&said.chars().take(ERROR_CHARS).collect::<String>()));
        }
        (None, Some(stop)) if stop != "end_turn" => notes.push(visible(stop)),
        _ => {}
    }
    for (is, said) in [
        (record.partial_stream, "partial"),
        (record.attempts > 1, "retried"),
        (record.laboratory, "laboratory"),
    ] {
        if is {
            notes.push(said.to_owned());
        }
    }
    [
        zone.to_datetime(record.time)
            .strftime("%Y-%m-%d %H:%M:%S")
            .to_string(),
        transport,
        call.as_str().unwrap_or("-").to_owned(),
        record.outcome.as_str().to_owned(),
        format!("{} ms", record.duration_ms),
        record
            .first_token_ms
            .map_or("-".to_owned(), |ms| format!("{ms} ms")),
        number(prompt),
        number(tokens.cache_read),
        number(tokens.output),
        record
            .upstream_requests
            .map_or("-".to_owned(), |count| count.to_string()),
        word(&record.model),
        notes.join(", "),
    ]
}

/// A duration in one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Since(Duration);

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no duration: use a number with s, m, h, d or w");
        let unit = text.chars().next_back().ok_or_else(wrong)?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 60 * 60,
            'd' => 24 * 60 * 60,
            'w' => 7 * 24 * 60 * 60,
            _ => return Err(wrong()),
        };
        let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
        let seconds = number.checked_mul(seconds).ok_or_else(wrong)?;
        Ok(Self(Duration::from_secs(seconds)))
    }
}

fn outcome(text: &str) -> Result<Outcome, String> {
    let known = Outcome::ALL
        .into_iter()
        .find(|outcome| outcome.as_str() == text);
    known.ok_or_else(|| {
        let known = Outcome::ALL.map(Outcome::as_str).join(", ");
        format!("outcome {text:?} is not known: use {known}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(time: &str, more: serde_json::Value) -> StreamRecord {
        let mut record = json!({
            "time": time, "transport": "relay", "process": "warm", "call_kind": "sub_agent",
            "session": "00", "outcome": "ok", "duration_ms": 1500, "first_token_ms": 20,
            "chunks": 3, "upstream_requests": 1, "attempts": 1, "partial_stream": false,
            "model": "claude-sonnet-5-5",
            "tokens": {"input": 1, "output": 7, "cache_creation": 20, "cache_read": 300},
        });
        let object = record.as_object_mut().unwrap();
        object.extend(more.as_object().unwrap().clone());
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn the_table_has_local_times_and_what_went_wrong() {
        let error = json!({"outcome": "error", "partial_stream": true, "laboratory": true,
            "error": {"code": "stream_interrupted", "detail": "it broke \u{1b}[2J"}});
        let records = VecDeque::from([
            record("2026-06-01T22:30:00Z", json!({})),
            record("2026-06-01T22:31:00Z", error),
        ]);
        let most = u64::MAX;
        let odd = json!({"tokens": {"input": most, "cache_read": most}, "duration_ms": most});
        assert!(cells(&record("2026-06-01T22:30:00Z", odd), &TimeZone::UTC)[6] == most.to_string());
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        let text = table(&records, &zone);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        for part in [
            "2026-06-02 00:30:00",
            "relay warm",
            "sub_agent",
            "1500 ms",
            "321",
            "300",
        ] {
            assert!(lines[1].contains(part), "{part}: {text}");
        }
        assert!(lines[2].contains("stream_interrupted: it broke"), "{text}");
        assert!(lines[2].ends_with("partial, laboratory"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn durations_are_a_number_and_a_unit() {
        for (text, seconds) in [
            ("90s", 90),
            ("30m", 1800),
            ("12h", 43_200),
            ("2d", 172_800),
            ("1w", 604_800),
        ] {
            assert_eq!(text.parse(), Ok(Since(Duration::from_secs(seconds))));
        }
        for text in ["", "h", "1", "-1h", "1 y", "1é", "99999999999999999999d"] {
            assert!(text.parse::<Since>().is_err(), "{text}");
        }
    }

    #[test]
    fn outcomes_are_words() {
        assert_eq!(outcome("cancelled"), Ok(Outcome::Cancelled));
        assert!(
            outcome("fine")
                .unwrap_err()
                .contains("ok, error, cancelled")
        );
    }
}
