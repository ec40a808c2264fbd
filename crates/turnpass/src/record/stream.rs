//! The record of one generation, and the watch that makes it from the events that pass.

use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::sink::RecordSink;
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Event, Notice, PlanKind, StopReason, Usage};
use crate::request::{CallKind, Request, TransportKind, TransportSession};

/// Longest detail of an error in a record, in bytes: enough for a sentence with its numbers.
pub const ERROR_DETAIL_RECORDED_BYTES: usize = 300;

/// Characters of the session's digest: enough to tell a person's sessions apart.
pub const SESSION_DIGEST_CHARS: usize = 16;

/// Longest name of a model in a record, in bytes; real ones have about thirty.
const MODEL_BYTES: usize = 80;

/// How a generation went. One JSON object a line in the file.
///
/// Everything in it is a number, a time, a fixed word, the name of a model, a digest or a sentence of turnpass's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StreamRecord {
    /// When it began, in UTC.
    pub time: jiff::Timestamp,
    /// Which transport took it.
    pub transport: TransportKind,
    /// How that runs its processes (`warm`, `per_request`), where it has a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// What the call was for.
    pub call_kind: CallKind,
    /// The first [`SESSION_DIGEST_CHARS`] characters of the SHA-256 of the transport session, in hexadecimal.
    pub session: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why the model stopped, in the wire's word; only with the outcome `ok`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<String>,
    /// The error; only with the outcome `error`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<FailureRecord>,
    /// From the request to the end, in milliseconds.
    pub duration_ms: u64,
    /// From the request to the first piece of text, thinking or tool input, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_ms: Option<u64>,
    /// Events that were given to the host, the terminal one not counted.
    pub chunks: u64,
    /// Messages requests that reached the upstream; absent where the transport did not say, as after an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_requests: Option<u32>,
    /// Tries within the generation: one, and one for each retry that was announced.
    pub attempts: u32,
    /// Pieces of an answer had reached the host, and then it failed or was cancelled.
    pub partial_stream: bool,
    /// The model that served, as the service names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// How the request reached the service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanKind>,
    /// Token counts as far as they were told.
    #[serde(default, skip_serializing_if = "TokensRecord::is_empty")]
    pub tokens: TokensRecord,
    /// Nothing of it reached the service.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub laboratory: bool,
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// With `Done`.
    Ok,
    /// With an error.
    Error,
    /// The host dropped it.
    Cancelled,
}

impl Outcome {
    /// All outcomes.
    pub const ALL: [Self; 3] = [Self::Ok, Self::Error, Self::Cancelled];

    /// The word in records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The error of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureRecord {
    /// The stable code.
    pub code: String,
    /// What happened, at most [`ERROR_DETAIL_RECORDED_BYTES`] bytes. Where a detail may name what the host wrote, the
    /// code's general meaning stands here.
    pub detail: String,
    /// The HTTP status of the service, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
}

/// Token counts; zero where nothing was said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokensRecord {
    /// Prompt tokens neither read from nor written to the cache.
    pub input: u64,
    /// Tokens of the answer.
    pub output: u64,
    /// Prompt tokens written to the cache.
    pub cache_creation: u64,
    /// Prompt tokens read from the cache.
    pub cache_read: u64,
}

impl TokensRecord {
    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl From<&Usage> for TokensRecord {
    fn from(usage: &Usage) -> Self {
        Self {
            input: usage.input_tokens.unwrap_or(0),
            output: usage.output_tokens.unwrap_or(0),
            cache_creation: usage.cache_creation_input_tokens.unwrap_or(0),
            cache_read: usage.cache_read_input_tokens.unwrap_or(0),
        }
    }
}

impl FailureRecord {
    fn new(error: &Error) -> Self {
        let detail = match may_name_what_the_host_wrote(error.code()) || error.detail().is_empty() {
            true => error.code().meaning(),
            false => error.detail(),
        };
        Self {
            code: error.code().as_str().to_owned(),
            detail: cut(detail, ERROR_DETAIL_RECORDED_BYTES),
            status: error.status(),
        }
    }
}

/// Whether the detail of such an error is about fields, names or paths of the request, or repeats what a program printed.
fn may_name_what_the_host_wrote(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::RequestInvalid
            | ErrorCode::WorkingDirectory
            | ErrorCode::ModelNotFound
            | ErrorCode::EffortUnsupported
            | ErrorCode::SamplingUnsupported
            | ErrorCode::VersionInvalid
            | ErrorCode::IsolationTools
            | ErrorCode::McpExecution
            | ErrorCode::McpStartup
            | ErrorCode::RecordingFailed
    )
}

/// At most so many bytes, cut on a character boundary and on one line.
fn cut(text: &str, bytes: usize) -> String {
    let text = &text[..text.floor_char_boundary(bytes)];
    text.replace(|c: char| c.is_control(), " ")
}

/// The digest of a session's key.
fn session_digest(session: &TransportSession) -> String {
    let digest = Sha256::digest(session.0.as_bytes());
    let mut text: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    text.truncate(SESSION_DIGEST_CHARS);
    text
}

/// The wire's word for a stop reason; a new one is `other`, because the word is the service's.
fn stop_word(stop: &StopReason) -> &'static str {
    match stop {
        StopReason::EndTurn => "end_turn",
        StopReason::ToolUse => "tool_use",
        StopReason::MaxTokens => "max_tokens",
        StopReason::StopSequence { .. } => "stop_sequence",
        StopReason::Refusal { .. } => "refusal",
        StopReason::PauseTurn => "pause_turn",
        StopReason::ContextWindowExceeded => "model_context_window_exceeded",
        StopReason::Other { .. } => "other",
    }
}

/// What is known of a generation before it begins.
pub(crate) struct Facts {
    transport: TransportKind,
    process: Option<&'static str>,
    call_kind: CallKind,
    session: String,
}

impl Facts {
    pub(crate) fn new(
        request: &Request,
        transport: TransportKind,
        process: Option<&'static str>,
    ) -> Self {
        Self {
            transport,
            process,
            call_kind: request.call,
            session: session_digest(&request.session),
        }
    }
}

/// Sees the events of one generation pass and gives exactly one record to the sink: at the terminal event, or when it is
/// dropped before that.
#[derive(Debug)]
pub(crate) struct Watch {
    sink: RecordSink,
    began: Instant,
    output_seen: bool,
    /// Taken when it is given away.
    record: Option<Box<StreamRecord>>,
}

impl Watch {
    pub(crate) fn new(sink: RecordSink, facts: Facts) -> Self {
        let time = jiff::Timestamp::try_from(SystemTime::now()).unwrap_or_default();
        let record = StreamRecord {
            time,
            transport: facts.transport,
            process: facts.process.map(str::to_owned),
            call_kind: facts.call_kind,
            session: facts.session,
            outcome: Outcome::Cancelled,
            stop: None,
            error: None,
            duration_ms: 0,
            first_token_ms: None,
            chunks: 0,
            upstream_requests: None,
            attempts: 1,
            partial_stream: false,
            model: None,
            plan: None,
            tokens: TokensRecord::default(),
            laboratory: false,
        };
        Self {
            sink,
            began: Instant::now(),
            output_seen: false,
            record: Some(Box::new(record)),
        }
    }

    /// Takes note of one item on its way to the host.
    pub(crate) fn see(&mut self, item: &Result<Event>) {
        let Some(record) = &mut self.record else {
            return;
        };
        match item {
            Ok(Event::Done(done)) => {
                record.outcome = Outcome::Ok;
                record.stop = Some(stop_word(&done.stop).to_owned());
                record.model = Some(cut(&done.model.0, MODEL_BYTES));
                record.tokens = (&done.usage).into();
                record.upstream_requests = Some(done.upstream_requests);
                record.laboratory |= done.laboratory;
                self.end();
            }
            Err(error) => {
                record.outcome = Outcome::Error;
                record.error = Some(FailureRecord::new(error));
                self.output_seen |= error.output_seen();
                self.end();
            }
            Ok(event) => {
                record.chunks += 1;
                note(record, event);
                let is_output = matches!(
                    event,
                    Event::Text { .. } | Event::Thinking { .. } | Event::ToolInput { .. }
                );
                if is_output && !self.output_seen {
                    self.output_seen = true;
                    record.first_token_ms = Some(milliseconds(self.began.elapsed()));
                }
            }
        }
    }

    fn end(&mut self) {
        if let Some(mut record) = self.record.take() {
            record.duration_ms = milliseconds(self.began.elapsed());
            record.partial_stream = self.output_seen && record.outcome != Outcome::Ok;
            self.sink.take(*record);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

fn note(record: &mut StreamRecord, event: &Event) {
    match event {
        Event::Started { model, how } => {
            record.model = Some(cut(&model.0, MODEL_BYTES));
            record.plan = Some(how.kind);
        }
        Event::Usage(usage) => record.tokens = usage.into(),
        Event::Notice(Notice::Retry { .. }) => record.attempts += 1,
        Event::Notice(Notice::Laboratory) => record.laboratory = true,
        _ => {}
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
