//! Plays a recording through what reads a live CLI: lines, records, messages, verdicts. Pure.

use std::collections::BTreeMap;

use serde::Serialize;

use super::rows::Row;
use super::stream::TokensRecord;
use crate::event::{Event, Plan, PlanKind};
use crate::turn::{Turn, TurnError};
use crate::wire::lines::LineSplitter;
use crate::wire::messages::StreamEvent;
use crate::wire::stream_json::{
    self, FailureMarks, Noise, Record, StreamEventRecord, System, UnknownTypes, Verdict,
};
use crate::wire::surrogates;

/// Longest line of a recording, in bytes: the CLI's longest (16 MiB), wrapped into a row with every byte escaped.
pub const REPLAY_LINE_BYTES: usize = 64 * 1024 * 1024;

/// Problems that are told in words; further ones are only counted.
const PROBLEMS_TOLD: usize = 20;
/// Verdicts that are told one by one; a process of the CLI serves a few hundred turns.
const VERDICTS_TOLD: usize = 1000;

/// What a recording came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replayed {
    /// Lines that the CLI printed.
    pub lines: u64,
    /// Rows of another direction (what went in, the upstream, notes); they were passed over.
    pub other_rows: u64,
    /// Records by type, with their subtype.
    pub records: BTreeMap<String, u64>,
    /// Events that the decoder made of the streamed messages, by kind.
    pub events: BTreeMap<String, u64>,
    /// What this version does not know, by place and name.
    pub unknown: BTreeMap<String, u64>,
    /// Lines that are no records, by what is wrong.
    pub noise: BTreeMap<String, u64>,
    /// Messages that were whole.
    pub messages: u64,
    /// Messages that broke off: a stop, an interrupt, the end of the recording.
    pub unfinished: u64,
    /// How each turn ended.
    pub verdicts: Vec<String>,
    /// Tokens of all whole messages.
    pub tokens: TokensRecord,
    /// What could not be decoded, in words without content.
    pub problems: Vec<String>,
    /// How many of them there were.
    pub problem_count: u64,
    /// All in a word.
    pub standing: Standing,
}

/// Whether this version reads the recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// There is no record in it.
    #[default]
    Empty,
    /// Everything is known.
    Decodes,
    /// It decodes, and holds things that are new or lines that are no records; both are skipped.
    DecodesWithUnknown,
    /// Something is not as it has to be; a live generation would fail.
    Broken,
}

impl Standing {
    /// The word in the output.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Decodes => "decodes",
            Self::DecodesWithUnknown => "decodes_with_unknown",
            Self::Broken => "broken",
        }
    }
}

/// Plays a recording: push its bytes in any pieces, then [`finish`](Replay::finish).
#[derive(Debug)]
pub struct Replay {
    lines: LineSplitter,
    marks: FailureMarks,
    unknown: UnknownTypes,
    turn: Option<Turn>,
    /// The rest of a message that failed is passed over.
    failed: bool,
    came_to: Replayed,
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            lines: LineSplitter::new(REPLAY_LINE_BYTES),
            marks: FailureMarks::default(),
            unknown: UnknownTypes::default(),
            turn: None,
            failed: false,
            came_to: Replayed::default(),
        }
    }
}

impl Replay {
    /// A player that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.lines.push(bytes);
        loop {
            match self.lines.next_line() {
                Ok(Some(line)) => self.line(&line),
                Ok(None) => return,
                Err(error) => return self.problem(error.to_string()),
            }
        }
    }

    /// The end of the recording.
    pub fn finish(mut self) -> Replayed {
        if let Some(line) = self.lines.finish() {
            self.line(&line);
        }
        self.break_off();
        let mut came_to = self.came_to;
        came_to.unknown = self
            .unknown
            .iter()
            .map(|(name, count)| (name.to_owned(), count))
            .collect();
        came_to.standing = match (&came_to.records, came_to.problem_count) {
            (_, 1..) => Standing::Broken,
            (records, _) if records.is_empty() => Standing::Empty,
            _ if !came_to.unknown.is_empty() || !came_to.noise.is_empty() => {
                Standing::DecodesWithUnknown
            }
            _ => Standing::Decodes,
        };
        came_to
    }

    fn line(&mut self, line: &[u8]) {
        let line = surrogates::repair(line);
        match Row::read(&line) {
            Row::Bare(line) => self.record(line),
            Row::Timed {
                direction, value, ..
            } if direction == "out" => self.record(value.get().as_bytes()),
            Row::Timed { .. } => self.came_to.other_rows += 1,
        }
    }

    fn record(&mut self, line: &[u8]) {
        self.came_to.lines += 1;
        let record = match stream_json::decode(line) {
            Ok(record) => record,
            Err(noise) => {
                let what = match noise {
                    Noise::Blank => "blank",
                    Noise::NotJson => "not_json",
                    _ => "not_a_record",
                };
                return count(&mut self.came_to.noise, what);
            }
        };
        count(&mut self.came_to.records, &name_of(&record));
        self.unknown.observe(&record);
        match &record {
            Record::StreamEvent(event) if event.parent_tool_use_id.is_none() => self.event(event),
            Record::Assistant(assistant) => self.marks.observe(assistant),
            Record::Result(result) => {
                self.break_off();
                let verdict = result.verdict(&std::mem::take(&mut self.marks));
                if self.came_to.verdicts.len() < VERDICTS_TOLD {
                    self.came_to.verdicts.push(word_of(&verdict));
                }
            }
            Record::Malformed { kind, problem } => {
                self.problem(format!("a {} record: {problem}", kind.as_str()));
            }
            _ => {}
        }
    }

    fn event(&mut self, record: &StreamEventRecord<'_>) {
        let event = &record.event;
        if matches!(event, StreamEvent::MessageStart(_)) {
            self.break_off();
            self.failed = false;
        }
        if self.failed {
            return;
        }
        if record.abandoned_blocks.is_some() {
            // The CLI made this end up for a stream that broke.
            return self.break_off();
        }
        let turn = self.turn.get_or_insert_with(new_turn);
        let mut events = Vec::new();
        let pushed = turn.push(event, &mut events);
        let finished = turn.is_stopped().then(|| turn.finish());
        for event in &events {
            count(&mut self.came_to.events, kind_of(event));
        }
        match (pushed, finished) {
            (Err(TurnError::Service(_)), _) => {
                count(&mut self.came_to.events, "service_error");
                self.break_off();
                self.failed = true;
            }
            (Err(error), _) => {
                let what = match error {
                    TurnError::Order(what) | TurnError::Blocks(what) => what,
                    TurnError::Service(_) => "the service failed",
                };
                self.problem(format!("a message: {what}"));
                (self.turn, self.failed) = (None, true);
            }
            (Ok(()), None) => {}
            (Ok(()), Some(None)) => {
                self.problem("a message ended without token counts".to_owned());
                self.turn = None;
            }
            (Ok(()), Some(Some(finished))) => {
                for event in &finished.suffix {
                    count(&mut self.came_to.events, kind_of(event));
                }
                self.came_to.messages += 1;
                let tokens = TokensRecord::from(&finished.usage);
                let sum = &mut self.came_to.tokens;
                sum.input += tokens.input;
                sum.output += tokens.output;
                sum.cache_creation += tokens.cache_creation;
                sum.cache_read += tokens.cache_read;
                self.turn = None;
            }
        }
    }

    fn break_off(&mut self) {
        if self.turn.take().is_some_and(|turn| turn.has_begun()) {
            self.came_to.unfinished += 1;
        }
    }

    fn problem(&mut self, what: String) {
        self.came_to.problem_count += 1;
        if self.came_to.problems.len() < PROBLEMS_TOLD {
            let line = self.came_to.lines;
            self.came_to.problems.push(format!("line {line}: {what}"));
        }
    }
}

/// Every tool counts as offered: a recording does not say which were.
fn new_turn() -> Turn {
    let how = Plan {
        kind: PlanKind::Fresh,
        reason: "a recording".to_owned(),
    };
    Turn::new(Box::new(|name| Some(name.to_owned())), how)
}

fn count(counts: &mut BTreeMap<String, u64>, name: &str) {
    match counts.get_mut(name) {
        Some(count) => *count += 1,
        None => drop(counts.insert(name.to_owned(), 1)),
    }
}

fn name_of(record: &Record<'_>) -> String {
    let system = |subtype: &str| format!("system/{subtype}");
    match record {
        Record::System(System::Init(_)) => system("init"),
        Record::System(System::Status { .. }) => system("status"),
        Record::System(System::ApiRetry { .. }) => system("api_retry"),
        Record::System(System::ThinkingTokens { .. }) => system("thinking_tokens"),
        Record::System(System::PermissionDenied { .. }) => system("permission_denied"),
        Record::System(System::Informational { .. }) => system("informational"),
        Record::System(System::ModelFallback { .. }) => system("model_fallback"),
        Record::System(System::BackgroundTasksChanged) => system("background_tasks_changed"),
        // Its name is the CLI's own and stands, bounded, in the list of what is unknown.
        Record::System(_) => system("unknown"),
        Record::StreamEvent(_) => "stream_event".to_owned(),
        Record::Assistant(_) => "assistant".to_owned(),
        Record::User(_) => "user".to_owned(),
        Record::Result(_) => "result".to_owned(),
        Record::RateLimitEvent(_) => "rate_limit_event".to_owned(),
        Record::ControlResponse { .. } => "control_response".to_owned(),
        Record::ControlRequest { .. } => "control_request".to_owned(),
        Record::ControlCancelRequest { .. } => "control_cancel_request".to_owned(),
        Record::CommandLifecycle(_) => "command_lifecycle".to_owned(),
        Record::ToolProgress(_) => "tool_progress".to_owned(),
        Record::KeepAlive => "keep_alive".to_owned(),
        Record::Unknown { .. } => "unknown".to_owned(),
        Record::Malformed { .. } => "malformed".to_owned(),
    }
}

fn kind_of(event: &Event) -> &'static str {
    match event {
        Event::Started { .. } => "started",
        Event::Text { .. } => "text",
        Event::Thinking { .. } => "thinking",
        Event::ThinkingBlock(_) => "thinking_block",
        Event::ToolInput { .. } => "tool_input",
        Event::ToolCall(_) => "tool_call",
        Event::ToolRejected { .. } => "tool_rejected",
        Event::Retracted { .. } => "retracted",
        Event::Notice(_) => "notice",
        Event::Usage(_) => "usage",
        Event::Done(_) => "done",
    }
}

fn word_of(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Completed => "completed".to_owned(),
        Verdict::Acknowledged => "acknowledged".to_owned(),
        Verdict::MaxTurns => "max_turns".to_owned(),
        Verdict::Aborted => "aborted".to_owned(),
        Verdict::Failed(failure) => match failure.status {
            Some(status) => format!("failed: {:?} ({status})", failure.kind),
            None => format!("failed: {:?}", failure.kind),
        },
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
pub(super) mod tests;
