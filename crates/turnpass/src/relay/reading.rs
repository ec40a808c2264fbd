//! The answer's bytes in, events out: what the host sees of a generation is decoded here, from the service's own bytes
//! as they pass. Pure.

use bytes::Bytes;

use super::classify;
use crate::error::{Error, ErrorCode, Result};
use crate::event::Event;
use crate::turn::{Turn, TurnError};
use crate::wire::messages::{self, StreamEvent};
use crate::wire::{sse, surrogates};

/// Largest answer that is taken (relay document: 16 MiB).
pub(crate) const RESPONSE_BYTES: usize = 16 * 1024 * 1024;

/// An answer on its way in.
#[derive(Debug)]
pub(crate) struct Reading {
    parser: sse::Parser,
    turn: Turn,
    bytes: usize,
}

impl Reading {
    /// An answer of which nothing has come.
    pub(crate) fn new(turn: Turn) -> Self {
        Self {
            parser: sse::Parser::new(sse::MAX_EVENT_BYTES),
            turn,
            bytes: 0,
        }
    }

    /// What was decoded so far.
    pub(crate) fn turn(&mut self) -> &mut Turn {
        &mut self.turn
    }

    /// Takes a chunk; events are appended to `out`. Returns whether the answer went on: pings are no progress, so that
    /// an upstream which only pings still meets the idle deadline (bug 102).
    ///
    /// # Errors
    ///
    /// Ends the answer; `out` holds what had been decoded before.
    pub(crate) fn feed(&mut self, chunk: Bytes, out: &mut Vec<Event>) -> Result<bool> {
        self.bytes += chunk.len();
        if self.bytes > RESPONSE_BYTES {
            let what = format!("the answer is larger than {RESPONSE_BYTES} bytes");
            return Err(Error::new(ErrorCode::ResponseTooLarge, what));
        }
        self.parser.push(chunk);
        let mut progress = false;
        while let Some(event) = self.parser.next_event().map_err(|error| framing(&error))? {
            let data = surrogates::repair(&event.data);
            let event = messages::decode(&data).map_err(|error| shape(&error))?;
            progress |= !matches!(event, StreamEvent::Ping);
            self.turn.push(&event, out).map_err(service)?;
        }
        Ok(progress)
    }

    /// The connection ended, well or not: the answer is whole only if the message had ended.
    ///
    /// # Errors
    ///
    /// `stream_interrupted`.
    pub(crate) fn end(&self) -> Result<()> {
        if self.turn.is_stopped() {
            return Ok(());
        }
        let what = if self.turn.has_begun() {
            "stream ended before message_stop"
        } else {
            "stream ended before message_stop, without any event"
        };
        Err(Error::new(ErrorCode::StreamInterrupted, what))
    }
}

fn framing(error: &sse::SseError) -> Error {
    Error::new(ErrorCode::ResponseTooLarge, error.to_string())
}

fn shape(error: &messages::MessagesError) -> Error {
    Error::new(ErrorCode::ProtocolShape, error.to_string())
}

fn service(error: TurnError) -> Error {
    error.into_error(|body| classify::error_event(&body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Plan, PlanKind};
    use proptest::prelude::*;

    fn reading() -> Reading {
        let plan = Plan {
            kind: PlanKind::Fresh,
            reason: String::new(),
        };
        Reading::new(Turn::new(Box::new(|name| Some(name.to_owned())), plan))
    }

    fn answer() -> Vec<u8> {
        let mut bytes = Vec::new();
        let usage = crate::wire::usage::Usage::default();
        messages::encode_text_reply(&mut bytes, "msg", "m", "héllo 👩‍👩‍👧", &usage);
        bytes
    }

    #[test]
    fn bug_004_half_a_surrogate_pair_becomes_a_replacement_character() {
        let text = String::from_utf8(answer())
            .unwrap()
            .replace("héllo", r"ok \ud83d");
        let (mut reading, mut out) = (reading(), Vec::new());
        assert!(reading.feed(text.into_bytes().into(), &mut out).unwrap());
        assert!(
            out.iter()
                .any(|event| matches!(event, Event::Text { text } if text.contains("ok \u{fffd}")))
        );
        reading.end().unwrap();
    }

    #[test]
    fn bug_102_a_ping_is_no_progress() {
        let ping = Bytes::from_static(b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
        assert!(!reading().feed(ping, &mut Vec::new()).unwrap());
    }

    #[test]
    fn an_answer_above_the_limit_is_one_typed_error() {
        let mut reading = reading();
        let comment = Bytes::from(vec![b':'; 1024]);
        let mut result = Ok(false);
        for _ in 0..=RESPONSE_BYTES / 1024 {
            result = reading.feed(comment.clone(), &mut Vec::new());
            if result.is_err() {
                break;
            }
        }
        assert_eq!(result.unwrap_err().code(), ErrorCode::ResponseTooLarge);
    }

    #[test]
    fn an_answer_that_is_cut_anywhere_is_interrupted() {
        let bytes = answer();
        for cut in 0..bytes.len() - 1 {
            let (mut reading, mut out) = (reading(), Vec::new());
            reading
                .feed(Bytes::copy_from_slice(&bytes[..cut]), &mut out)
                .unwrap();
            assert_eq!(
                reading.end().unwrap_err().code(),
                ErrorCode::StreamInterrupted,
                "cut at {cut}"
            );
            assert!(reading.turn().finish().is_none());
        }
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(cuts in proptest::collection::vec(0usize..600, 0..8)) {
            let bytes = answer();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut % bytes.len()).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let (mut whole, mut parts) = (Vec::new(), Vec::new());
            reading().feed(Bytes::from(bytes.clone()), &mut whole).unwrap();
            let mut reading = reading();
            for pair in cuts.windows(2) {
                reading.feed(Bytes::copy_from_slice(&bytes[pair[0]..pair[1]]), &mut parts).unwrap();
            }
            prop_assert_eq!(whole, parts);
            prop_assert!(reading.end().is_ok());
        }
    }
}
