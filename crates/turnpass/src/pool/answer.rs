//! One answer of the model as the CLI tells it: streamed events, and the records that confirm them. Pure.
//!
//! Text and thinking come from the stream alone; the CLI's `assistant` records confirm calls and give the uuids at which
//! the conversation can be resumed. A message that was not streamed at all is taken from its records instead.

use crate::conversation::ToolUseId;
use crate::error::{Error, ErrorCode};
use crate::event::{Event, Plan};
use crate::relay::classify;
use crate::turn::{Finished, ToolNames, Turn};
use crate::wire::messages::{Block, BlockKind, MessageDelta, StreamEvent, unparsed_tool_input};
use crate::wire::stream_json::Assistant;
use crate::wire::text::Text;
use crate::wire::usage::Usage;

/// An answer under way.
#[derive(Debug)]
pub(crate) struct Answer {
    turn: Turn,
    /// What the host may hear now.
    pub(crate) out: Vec<Event>,
    /// The uuid of the newest block's record; a resume at it holds the whole message once that has ended.
    uuid: Option<String>,
    unstreamed: Option<Unstreamed>,
}

/// A message that came in records only.
#[derive(Debug, Default)]
struct Unstreamed {
    blocks: u32,
    stop: Option<String>,
    usage: Usage,
}

impl Answer {
    pub(crate) fn new(names: ToolNames, how: Plan) -> Self {
        Self {
            turn: Turn::new(names, how),
            out: Vec::new(),
            uuid: None,
            unstreamed: None,
        }
    }

    /// The decoder.
    pub(crate) fn turn(&self) -> &Turn {
        &self.turn
    }

    /// The whole answer, once it has ended.
    pub(crate) fn finish(&mut self) -> Option<Finished> {
        self.turn.finish()
    }

    /// The uuid of the answer's last record.
    pub(crate) fn uuid(&self) -> Option<&str> {
        self.uuid.as_deref()
    }

    /// The calls so far, in order.
    pub(crate) fn calls(&self) -> Vec<ToolUseId> {
        self.turn
            .call_ids()
            .map(|id| ToolUseId(id.to_owned()))
            .collect()
    }

    /// Takes an event of the stream.
    ///
    /// # Errors
    ///
    /// The service's own error, what cannot be, or `stream_interrupted` for an end without a stop reason: the CLI makes one
    /// up when the stream broke (2.1.294 and 2.1.310 do not mark it otherwise).
    pub(crate) fn event(&mut self, event: &StreamEvent<'_>) -> Result<(), Error> {
        if matches!(event, StreamEvent::MessageStop) && self.turn.stop_reason().is_none() {
            let what = "the connection to the service was lost";
            return Err(Error::new(ErrorCode::StreamInterrupted, what));
        }
        let pushed = self.turn.push(event, &mut self.out);
        pushed.map_err(|error| error.into_error(|body| classify::error_event(&body)))
    }

    /// Takes the record of a block.
    pub(crate) fn echo(&mut self, record: &Assistant<'_>) -> Result<(), Error> {
        if !self.turn.has_begun() || self.unstreamed.is_some() {
            self.unstreamed(record)?;
        } else if record.message.id.as_deref() != Some(self.turn.message_id()) {
            let what = "a record belongs to another message than the one that streams";
            return Err(Error::new(ErrorCode::ProtocolOrder, what));
        }
        for kind in record.message.content.kinds() {
            let BlockKind::ToolUse { id, input, .. } = kind else {
                continue;
            };
            let Some(streamed) = self.turn.raw_input(&id) else {
                let what = "a record names a tool call that the stream did not announce";
                return Err(Error::new(ErrorCode::ProtocolBlocks, what));
            };
            // The CLI repairs inputs, so only one that it could not parse has to be the same text.
            if let Some(unparsed) = unparsed_tool_input(input)
                && !streamed.starts_with(unparsed.raw.as_str())
            {
                let what =
                    "the CLI's text of an input that does not parse is not what was streamed";
                return Err(Error::new(ErrorCode::ProtocolBlocks, what));
            }
        }
        if let Some(uuid) = &record.uuid {
            self.uuid = Some(uuid.as_str().to_owned());
        }
        Ok(())
    }

    fn unstreamed(&mut self, record: &Assistant<'_>) -> Result<(), Error> {
        let mut events = Vec::new();
        let state = self.unstreamed.get_or_insert_default();
        if !self.turn.has_begun() {
            events.push(StreamEvent::MessageStart(Box::new(record.message.clone())));
        }
        for kind in record.message.content.kinds() {
            let index = state.blocks;
            state.blocks += 1;
            events.push(StreamEvent::ContentBlockStart {
                index,
                block: Block {
                    raw: serde_json::value::RawValue::NULL,
                    kind,
                },
            });
            events.push(StreamEvent::ContentBlockStop { index });
        }
        state.stop = record
            .message
            .stop_reason
            .as_deref()
            .map(str::to_owned)
            .or(state.stop.take());
        state.usage.merge(&record.message.usage);
        events.iter().try_for_each(|event| self.event(event))
    }

    /// The CLI's turn is over: a message that was not streamed is over too.
    pub(crate) fn turn_is_over(&mut self) -> Result<(), Error> {
        let Some(state) = self.unstreamed.take() else {
            return Ok(());
        };
        let stop = state.stop.unwrap_or_else(|| "end_turn".to_owned());
        let mut usage = state.usage;
        usage.output_tokens.get_or_insert(0);
        self.event(&StreamEvent::MessageDelta(MessageDelta {
            stop_reason: Some(Text::from(stop)),
            usage,
            ..MessageDelta::default()
        }))?;
        self.event(&StreamEvent::MessageStop)
    }
}
