//! The CLI's side of a generation: its lines in, what a relay has to know of them out. Pure.
//!
//! What the model says is decoded from the service's own bytes ([`super::reading`]); the CLI's records are read for
//! what only it can tell: that its isolation holds, that its turn ended well, and that a control request was taken.

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::cli::isolation::{self, Expected, InitVerdict};
use crate::error::{Error, ErrorCode};
use crate::wire::messages::StreamEvent;
use crate::wire::stream_json::{
    self, CliRequest, ControlOutcome, FailureMarks, NoiseLog, Record, System, UnknownTypes, Verdict,
};
use crate::wire::{lines::LineTooLong, surrogates};

/// What one line meant to a relay.
#[derive(Clone, Debug)]
pub(crate) enum Native {
    /// The turn began; what the CLI loaded was judged.
    Init(InitVerdict),
    /// A block of an answer.
    Assistant,
    /// The CLI saw the end of the message.
    MessageStop,
    /// The CLI tries again before anything was said.
    Retry {
        /// Of the failed try.
        status: Option<u16>,
    },
    /// The turn is over.
    Result(Verdict),
    /// A control request of ours was answered.
    Control {
        /// Whether the CLI refused it.
        refused: bool,
    },
    /// A message for the in-band tool server, to be answered.
    Mcp {
        /// The id to answer with.
        id: String,
        /// One JSON-RPC message.
        message: Box<RawValue>,
    },
    /// A request of the CLI that is not served here, to be answered as such.
    Unsupported {
        /// The id to answer with.
        id: String,
    },
    /// The process cannot be used any more.
    Broken(Error),
    /// Standard output ended.
    End,
}

/// Reads the lines of one process.
#[derive(Debug)]
pub(crate) struct NativeReader {
    expected: Expected,
    marks: FailureMarks,
    noise: NoiseLog,
    unknown: UnknownTypes,
}

impl NativeReader {
    /// A reader for a process that was launched to show exactly `expected`.
    pub(crate) fn new(expected: Expected) -> Self {
        Self {
            expected,
            marks: FailureMarks::default(),
            noise: NoiseLog::default(),
            unknown: UnknownTypes::default(),
        }
    }

    /// Reads one line. `None` for one that means nothing to a relay.
    pub(crate) fn line(&mut self, line: &Bytes) -> Option<Native> {
        let line = surrogates::repair(line);
        let record = match stream_json::decode(&line) {
            Ok(record) => record,
            Err(noise) => return self.noise.take(&line, noise).map(Native::Broken),
        };
        self.unknown.observe(&record);
        match record {
            Record::System(System::Init(init)) => {
                Some(Native::Init(isolation::judge(&init, &self.expected)))
            }
            Record::System(System::ApiRetry { error_status, .. }) => Some(Native::Retry {
                status: error_status,
            }),
            Record::StreamEvent(event) => {
                matches!(event.event, StreamEvent::MessageStop).then_some(Native::MessageStop)
            }
            Record::Assistant(assistant) => {
                self.marks.observe(&assistant);
                (!assistant.message.is_synthetic()).then_some(Native::Assistant)
            }
            Record::Result(result) => {
                let marks = std::mem::take(&mut self.marks);
                Some(Native::Result(result.verdict(&marks)))
            }
            Record::ControlResponse { outcome, .. } => Some(Native::Control {
                refused: matches!(outcome, ControlOutcome::Error { .. }),
            }),
            Record::ControlRequest {
                request_id,
                request,
            } => Some(match request {
                CliRequest::McpMessage { message, .. } => Native::Mcp {
                    id: request_id.into_owned(),
                    message: message.to_owned(),
                },
                CliRequest::Other { .. } => Native::Unsupported {
                    id: request_id.into_owned(),
                },
            }),
            Record::Malformed { kind, .. } => Some(Native::Broken(Error::new(
                ErrorCode::ProtocolShape,
                format!("a record of type {kind} has a shape that is not known"),
            ))),
            _ => None,
        }
    }

    /// What was skipped because it is new.
    #[cfg(test)]
    pub(crate) fn unknown(&self) -> &UnknownTypes {
        &self.unknown
    }
}

/// The end of a process that wrote an over-long line.
pub(crate) fn too_long(error: &LineTooLong) -> Native {
    Native::Broken(Error::new(ErrorCode::LineTooLong, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::stream_json::NOISE_LINES;

    fn reader() -> NativeReader {
        NativeReader::new(Expected::default())
    }

    fn read(reader: &mut NativeReader, line: &str) -> Option<Native> {
        reader.line(&Bytes::copy_from_slice(line.as_bytes()))
    }

    #[test]
    fn bug_006_records_that_are_new_are_skipped_and_counted() {
        let mut reader = reader();
        for line in [
            r#"{"type":"brand_new"}"#,
            r#"{"type":"system","subtype":"brand_new"}"#,
            r#"{"type":"stream_event","event":{"type":"brand_new"}}"#,
        ] {
            assert!(read(&mut reader, line).is_none(), "{line}");
        }
        assert_eq!(reader.unknown().total(), 3);
    }

    #[test]
    fn bug_046_a_failure_with_subtype_success_is_a_failure() {
        let mut reader = reader();
        read(
            &mut reader,
            r#"{"type":"assistant","message":{"model":"<synthetic>","content":[{"type":"text","text":"x"}]},"error":"rate_limit"}"#,
        );
        let result = r#"{"type":"result","subtype":"success","is_error":true,"api_error_status":429,"terminal_reason":"api_error"}"#;
        assert!(matches!(
            read(&mut reader, result),
            Some(Native::Result(Verdict::Failed(_)))
        ));
        let good = r#"{"type":"result","subtype":"success","is_error":false,"terminal_reason":"completed","num_turns":1,"result":"ok"}"#;
        assert!(
            matches!(
                read(&mut reader, good),
                Some(Native::Result(Verdict::Completed))
            ),
            "marks are per turn"
        );
    }

    #[test]
    fn noise_is_tolerated_up_to_its_limit() {
        let mut reader = reader();
        for _ in 0..NOISE_LINES {
            assert!(read(&mut reader, "warning: something").is_none());
            assert!(read(&mut reader, "").is_none());
        }
        assert!(
            matches!(read(&mut reader, "one more"), Some(Native::Broken(error)) if error.code() == ErrorCode::ProtocolRecord)
        );
    }

    #[test]
    fn a_known_record_in_an_unknown_shape_is_no_noise() {
        let line = r#"{"type":"result","subtype":"success","is_error":{"new":1},"usage":[]}"#;
        let read = read(&mut reader(), line);
        assert!(
            !matches!(read, Some(Native::Result(Verdict::Completed)) | None),
            "{read:?}"
        );
    }

    #[test]
    fn controls_and_requests_of_the_cli_keep_their_ids() {
        let mut reader = reader();
        let ok =
            r#"{"type":"control_response","response":{"subtype":"success","request_id":"r1"}}"#;
        assert!(matches!(
            read(&mut reader, ok),
            Some(Native::Control { refused: false })
        ));
        let no = r#"{"type":"control_response","response":{"subtype":"error","request_id":"r2","error":"no"}}"#;
        assert!(matches!(
            read(&mut reader, no),
            Some(Native::Control { refused: true })
        ));
        let ask =
            r#"{"type":"control_request","request_id":"c","request":{"subtype":"can_use_tool"}}"#;
        assert!(matches!(read(&mut reader, ask), Some(Native::Unsupported { id }) if id == "c"));
    }
}
