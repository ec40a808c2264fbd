//! The CLI's lines in, what a replay does about each out. Pure.
//!
//! What the model says is decoded from the CLI's `stream_event` records, which repeat the service's events one by one. The
//! CLI also makes some up: after a broken stream it closes what is open with stops of its own, but a `message_delta` of its
//! own never has a stop reason (2.1.294, 2.1.310, 2.1.332), so a stop reason is the service's word that the message is
//! whole.

use bytes::Bytes;
use serde_json::value::RawValue;

use super::failure::interrupted;
use crate::cli::isolation::{self, Expected, InitVerdict};
use crate::error::{Error, ErrorCode};
use crate::event::Event;
use crate::limits::rate::Signal;
use crate::relay::classify;
use crate::turn::{Finished, Turn, TurnError};
use crate::wire::messages::{MessageDelta, StreamEvent};
use crate::wire::stream_json::{
    self, Assistant, CliRequest, ControlOutcome, FailureMarks, NoiseLog, Record, StreamEventRecord,
    System, UnknownTypes, Verdict,
};
use crate::wire::surrogates;
use crate::wire::text::Text;

/// What one line meant.
#[derive(Debug)]
pub(crate) enum Said {
    /// A user line was taken; what the CLI loaded was judged. The model is the session's, by its resolved id.
    Init(InitVerdict, String),
    /// The CLI sends its request.
    Requesting,
    /// The answer went on.
    Progress,
    /// The answer is whole and nothing more is wanted of the process: it is to be ended before it asks again.
    HandOff,
    /// The message ended; the CLI's own judgement is still to come.
    Stopped,
    /// A turn is over.
    Result(Verdict),
    /// The CLI tries again before anything was said.
    Retry {
        /// Of the failed try.
        status: Option<u16>,
        /// Its number; 0 for the one after a renewed sign-in.
        attempt: u64,
    },
    /// Something about limits.
    Limit(Signal),
    /// A control request of ours was answered.
    Control {
        /// The id that we gave.
        id: String,
        /// The payload; `None` when it was refused.
        payload: Option<Box<RawValue>>,
    },
    /// A message for the in-band tool server.
    Mcp {
        /// The id to answer with.
        id: String,
        /// One JSON-RPC message.
        message: Box<RawValue>,
    },
    /// A request of the CLI that is not served here.
    Unsupported {
        /// The id to answer with.
        id: String,
    },
    /// The process cannot be used any more.
    Failed(Error),
}

/// What a replay knows of one process.
pub(crate) struct Hearing {
    expected: Expected,
    turn: Turn,
    marks: FailureMarks,
    noise: NoiseLog,
    unknown: UnknownTypes,
    /// The line that asks was written.
    asked: bool,
    /// The service's own stop reason came.
    stop_seen: bool,
}

impl std::fmt::Debug for Hearing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hearing")
            .field("turn", &self.turn)
            .field("unknown", &self.unknown)
            .finish_non_exhaustive()
    }
}

impl Hearing {
    /// Of a process that is to show exactly `expected`.
    pub(crate) fn new(expected: Expected, turn: Turn) -> Self {
        Self {
            expected,
            turn,
            marks: FailureMarks::default(),
            noise: NoiseLog::default(),
            unknown: UnknownTypes::default(),
            asked: false,
            stop_seen: false,
        }
    }

    /// From here on an answer may come.
    pub(crate) fn asked(&mut self) {
        self.asked = true;
    }

    /// What was decoded so far.
    pub(crate) fn turn(&self) -> &Turn {
        &self.turn
    }

    /// The answer, once it is whole.
    pub(crate) fn finish(&mut self) -> Option<Finished> {
        self.turn.finish()
    }

    /// Takes one line; what the host may hear now is appended to `out`. `None` for a line that means nothing to a replay.
    pub(crate) fn line(&mut self, line: &Bytes, out: &mut Vec<Event>) -> Option<Said> {
        let line = surrogates::repair(line);
        let record = match stream_json::decode(&line) {
            Ok(record) => record,
            Err(noise) => return self.noise.take(&line, noise).map(Said::Failed),
        };
        self.unknown.observe(&record);
        match record {
            Record::StreamEvent(event) => self.event(&event, out),
            Record::Assistant(assistant) => self.assistant(&assistant),
            Record::Result(result) => {
                let marks = std::mem::take(&mut self.marks);
                Some(Said::Result(result.verdict(&marks)))
            }
            Record::System(system) => self.system(&system),
            Record::RateLimitEvent(info) => Some(Said::Limit(Signal::of_event(info.as_deref()))),
            Record::ControlResponse {
                request_id,
                outcome,
            } => Some(Said::Control {
                id: request_id.into_owned(),
                payload: match outcome {
                    ControlOutcome::Success { response } => {
                        Some(response.unwrap_or(RawValue::NULL).to_owned())
                    }
                    ControlOutcome::Error { .. } => None,
                },
            }),
            Record::ControlRequest {
                request_id,
                request,
            } => Some(match request {
                CliRequest::McpMessage { message, .. } => Said::Mcp {
                    id: request_id.into_owned(),
                    message: message.to_owned(),
                },
                CliRequest::Other { .. } => Said::Unsupported {
                    id: request_id.into_owned(),
                },
            }),
            Record::Malformed { kind, .. } => Some(Said::Failed(Error::new(
                ErrorCode::ProtocolShape,
                format!("a record of type {kind} has a shape that is not known"),
            ))),
            _ => None,
        }
    }

    fn system(&self, system: &System<'_>) -> Option<Said> {
        match system {
            System::Init(init) => {
                let model = init.model.as_deref().unwrap_or_default().to_owned();
                Some(Said::Init(isolation::judge(init, &self.expected), model))
            }
            System::Status {
                status: Some(status),
                ..
            } if status == "requesting" => Some(Said::Requesting),
            System::ApiRetry { .. } if self.turn.has_begun() => {
                Some(Said::Failed(interrupted("the CLI tries again")))
            }
            System::ApiRetry {
                error_status,
                attempt,
                ..
            } => Some(Said::Retry {
                status: *error_status,
                attempt: attempt.unwrap_or(1),
            }),
            System::Notification { text: Some(text) } => {
                match Signal::of_notification(text.as_str()) {
                    Signal::Clear => None,
                    signal => Some(Said::Limit(signal)),
                }
            }
            // Without another model it only tells of the refusal, which the stop reason tells too.
            System::ModelFallback {
                fallback_model: Some(_),
                trigger,
                ..
            } => Some(Said::Failed(match trigger.as_ref().map(Text::as_str) {
                _ if self.turn.has_begun() => interrupted("another model takes over"),
                // On its own hosts 2.1.332 says so only here.
                Some("model_not_found") => Error::new(
                    ErrorCode::ModelNotFound,
                    "the service does not know the model",
                )
                .with_status(404),
                _ => Error::new(
                    ErrorCode::ExtraGeneration,
                    "the CLI goes over to another model",
                ),
            })),
            _ => None,
        }
    }

    fn assistant(&mut self, assistant: &Assistant<'_>) -> Option<Said> {
        self.marks.observe(assistant);
        let message = &assistant.message;
        let is_other = self.turn.has_begun()
            && !message.is_synthetic()
            && message
                .id
                .as_deref()
                .is_some_and(|id| id != self.turn.message_id());
        is_other.then(|| Said::Failed(interrupted("another message takes its place")))
    }

    fn event(&mut self, record: &StreamEventRecord<'_>, out: &mut Vec<Event>) -> Option<Said> {
        if record.parent_tool_use_id.is_some() {
            return None;
        }
        if !self.asked {
            let what = "an answer came before anything was asked";
            return Some(Said::Failed(Error::new(ErrorCode::ProtocolOrder, what)));
        }
        let said = match &record.event {
            StreamEvent::Ping => return None,
            StreamEvent::MessageStart(_) if self.turn.has_begun() => {
                return Some(Said::Failed(interrupted("another message began")));
            }
            StreamEvent::MessageStop if !self.stop_seen || record.abandoned_blocks.is_some() => {
                return self.made_up_stop();
            }
            StreamEvent::MessageStop => Said::Stopped,
            StreamEvent::MessageDelta(delta) => return self.delta(delta, &record.event, out),
            _ => Said::Progress,
        };
        Some(self.push(&record.event, out).unwrap_or(said))
    }

    /// A stop that the CLI made up. After a record of the failure it gives up, and its result says what happened; without
    /// one it would go on by itself from what it has, so the process has to end (2.1.294, 2.1.310, 2.1.332).
    fn made_up_stop(&self) -> Option<Said> {
        let why = "the answer broke off without a stop reason";
        (!self.marks.any()).then(|| Said::Failed(interrupted(why)))
    }

    fn delta(
        &mut self,
        delta: &MessageDelta<'_>,
        event: &StreamEvent<'_>,
        out: &mut Vec<Event>,
    ) -> Option<Said> {
        if let Some(failed) = self.push(event, out) {
            return Some(failed);
        }
        let Some(word) = &delta.stop_reason else {
            return Some(Said::Progress);
        };
        self.stop_seen = true;
        if !self.provokes(word.as_str()) {
            return Some(Said::Progress);
        }
        // All blocks have to be whole, or this is no hand-off.
        let failed = self.push(&StreamEvent::MessageStop, out);
        Some(failed.unwrap_or(Said::HandOff))
    }

    /// Whether the CLI would do something of its own about an answer that stops so: deny a call and ask again, go on after
    /// a limit, ask for words where there are none.
    fn provokes(&self, stop: &str) -> bool {
        matches!(
            stop,
            "tool_use" | "max_tokens" | "model_context_window_exceeded" | "refusal"
        ) || self.turn.call_ids().next().is_some()
            || self.turn.partial().text().is_empty()
    }

    fn push(&mut self, event: &StreamEvent<'_>, out: &mut Vec<Event>) -> Option<Said> {
        let failed = self.turn.push(event, out).err()?;
        Some(Said::Failed(failed_turn(failed)))
    }
}

fn failed_turn(error: TurnError) -> Error {
    error.into_error(|body| classify::error_event(&body))
}

#[cfg(test)]
#[path = "hearing_tests.rs"]
mod tests;
