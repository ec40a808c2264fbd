//! What a line of the CLI means to a pool's session. Pure: bytes in, at most one meaning out.
//!
//! An answer of the model is decoded by [`Answer`] as its events pass; everything else is a [`Heard`].

use bytes::Bytes;
use serde_json::value::RawValue;

use super::answer::Answer;
use crate::cli::isolation::{self, Expected, InitVerdict};
use crate::conversation::ToolUseId;
use crate::error::{Error, ErrorCode};
use crate::limits::rate::Signal;
use crate::wire::lines::LineTooLong;
use crate::wire::messages::{BlockKind, StreamEvent};
use crate::wire::stream_json::{
    self, CliRequest, ControlOutcome, FailureMarks, NoiseLog, Record, System, UnknownTypes, Verdict,
};
use crate::wire::surrogates;

/// What a line means.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    /// The answer took it; its events may be given on.
    Answer,
    /// The model's message has ended.
    MessageStop,
    /// The CLI closed the message itself because the stream broke; what it abandons did not come whole.
    Cut {
        /// It has said that the turn fails; otherwise it may go on by itself.
        fails: bool,
    },
    /// The first record of a turn.
    Init {
        /// Whether the isolation holds.
        verdict: InitVerdict,
        /// The CLI's session.
        session: String,
        /// The model, by its resolved id.
        model: String,
    },
    /// The answer to one of our control requests.
    Control {
        /// Of the request.
        id: String,
        /// The payload, or the CLI's refusal.
        outcome: Result<Box<RawValue>, String>,
    },
    /// The session has taken note of it.
    Noted,
    /// An MCP message for our server; the whole record.
    Mcp(Bytes),
    /// A request of the CLI that nobody here serves.
    Unsupported {
        /// Of the request.
        id: String,
    },
    /// The CLI has these calls' results: the host's, or its own for a call that it did not issue.
    Results(Vec<ToolUseId>),
    /// The CLI wrote a text of its own into the conversation to go on by itself.
    WentOn,
    /// The CLI tries a request again.
    Retry {
        /// Of the failed try.
        status: Option<u16>,
    },
    /// The CLI went over to another model.
    ModelFallback,
    /// What the service says of limits.
    Limits(Signal),
    /// The turn is over.
    Result(Verdict),
    /// A line of ours was taken out of the queue before it began.
    Cancelled {
        /// Of the line.
        uuid: String,
    },
    /// The process cannot be understood any more.
    Broken(Error),
}

impl Heard {
    /// Whether only a turn that is under way gives it: its line, or the results of its calls, have been taken.
    pub(crate) fn is_of_a_turn(&self) -> bool {
        match self {
            Self::Noted
            | Self::Control { .. }
            | Self::Mcp(_)
            | Self::Unsupported { .. }
            | Self::Limits(_)
            | Self::Cancelled { .. } => false,
            Self::Answer
            | Self::MessageStop
            | Self::Cut { .. }
            | Self::Init { .. }
            | Self::Results(_)
            | Self::WentOn
            | Self::Retry { .. }
            | Self::ModelFallback
            | Self::Result(_)
            | Self::Broken(_) => true,
        }
    }
}

/// Reads the lines of one process.
#[derive(Debug)]
pub(crate) struct Hearing {
    expected: Expected,
    marks: FailureMarks,
    noise: NoiseLog,
    unknown: UnknownTypes,
}

impl Hearing {
    pub(crate) fn new(expected: Expected) -> Self {
        Self {
            expected,
            marks: FailureMarks::default(),
            noise: NoiseLog::default(),
            unknown: UnknownTypes::default(),
        }
    }

    /// What `init` has to show from here on.
    pub(crate) fn expect(&mut self, expected: Expected) {
        self.expected = expected;
    }

    /// Records, events, blocks and deltas of kinds that this version does not know, which were skipped.
    pub(crate) fn unknown(&self) -> u64 {
        self.unknown.total()
    }

    /// Takes one line. `answer` is the one that is awaited, if any.
    pub(crate) fn line(&mut self, line: &Bytes, answer: Option<&mut Answer>) -> Option<Heard> {
        let repaired = surrogates::repair(line);
        let record = match stream_json::decode(&repaired) {
            Ok(record) => record,
            Err(noise) => return self.noise.take(&repaired, noise).map(Heard::Broken),
        };
        self.unknown.observe(&record);
        match record {
            Record::StreamEvent(event) if event.parent_tool_use_id.is_none() => {
                let answer = answer?;
                let fails = self.marks.any();
                if event.abandoned_blocks.is_some() {
                    return Some(Heard::Cut { fails });
                }
                match answer.event(&event.event) {
                    Ok(()) => {}
                    Err(error) if error.code() == ErrorCode::StreamInterrupted => {
                        return Some(Heard::Cut { fails });
                    }
                    Err(error) => return Some(Heard::Broken(error)),
                }
                Some(match event.event {
                    StreamEvent::MessageStop => Heard::MessageStop,
                    _ => Heard::Answer,
                })
            }
            Record::Assistant(assistant) if assistant.parent_tool_use_id.is_none() => {
                self.marks.observe(&assistant);
                if assistant.message.is_synthetic() {
                    return None;
                }
                let answer = answer?;
                if let Err(error) = answer.echo(&assistant) {
                    return Some(Heard::Broken(error));
                }
                Some(Heard::Answer)
            }
            Record::User(user) if user.parent_tool_use_id.is_none() => {
                if user.is_synthetic || user.refusal_retry {
                    return Some(Heard::WentOn);
                }
                let kinds = user.message.content.kinds();
                let results: Vec<_> = kinds
                    .iter()
                    .filter_map(|kind| match kind {
                        BlockKind::ToolResult { tool_use_id, .. } => {
                            Some(ToolUseId(tool_use_id.as_str().to_owned()))
                        }
                        _ => None,
                    })
                    .collect();
                (!results.is_empty()).then_some(Heard::Results(results))
            }
            Record::Result(result) => {
                let marks = std::mem::take(&mut self.marks);
                Some(Heard::Result(result.verdict(&marks)))
            }
            Record::RateLimitEvent(info) => Some(Heard::Limits(Signal::of_event(info.as_deref()))),
            Record::System(system) => self.system(system),
            Record::CommandLifecycle(lifecycle) => {
                let cancelled = lifecycle.state == "cancelled";
                cancelled.then(|| Heard::Cancelled {
                    uuid: lifecycle.command_uuid.into_owned(),
                })
            }
            Record::ControlResponse {
                request_id,
                outcome,
            } => Some(Heard::Control {
                id: request_id.into_owned(),
                outcome: match outcome {
                    ControlOutcome::Success { response } => {
                        Ok(response.unwrap_or(RawValue::NULL).to_owned())
                    }
                    ControlOutcome::Error { error, .. } => Err(error.to_string()),
                },
            }),
            Record::ControlRequest {
                request_id,
                request,
            } => Some(match request {
                CliRequest::McpMessage { .. } => Heard::Mcp(match &repaired {
                    std::borrow::Cow::Borrowed(_) => line.clone(),
                    std::borrow::Cow::Owned(repaired) => Bytes::copy_from_slice(repaired),
                }),
                CliRequest::Other { .. } => Heard::Unsupported {
                    id: request_id.into_owned(),
                },
            }),
            Record::Malformed { kind, .. } => Some(Heard::Broken(Error::new(
                ErrorCode::ProtocolShape,
                format!("a record of type {kind} has a shape that is not known"),
            ))),
            _ => None,
        }
    }

    fn system(&self, system: System<'_>) -> Option<Heard> {
        match system {
            System::Init(init) => Some(Heard::Init {
                verdict: isolation::judge(&init, &self.expected),
                session: init.session_id.as_deref().unwrap_or_default().to_owned(),
                model: init.model.as_deref().unwrap_or_default().to_owned(),
            }),
            System::ApiRetry { error_status, .. } => Some(Heard::Retry {
                status: error_status,
            }),
            // After a refusal the CLI also says that it asks no other model (2.1.294 to 2.1.332).
            System::ModelFallback { fallback_model, .. } => {
                fallback_model.map(|_| Heard::ModelFallback)
            }
            System::Notification { text } => {
                let signal = Signal::of_notification(text.as_deref().unwrap_or_default());
                (!matches!(signal, Signal::Clear)).then_some(Heard::Limits(signal))
            }
            _ => None,
        }
    }
}

/// A line above the limit.
pub(crate) fn too_long(error: &LineTooLong) -> Error {
    Error::new(ErrorCode::LineTooLong, error.to_string())
}
