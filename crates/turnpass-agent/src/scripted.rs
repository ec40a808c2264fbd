//! A transport for the tests: it answers from a script, and keeps what it was asked.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use turnpass::conversation::{Block, Message, Role, ToolCall, ToolInput, ToolUseId};
use turnpass::event::{Done, Rejection, StateOrder, StopReason, Usage};
use turnpass::request::TransportKind;
use turnpass::{Error, ErrorCode, Event, Generation, Provider, Request, Result, Transport};

/// One scripted answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    events: Vec<Event>,
    end: Option<std::result::Result<Box<Done>, Error>>,
    /// Gives the request's signal before it begins.
    retires: bool,
}

impl Script {
    /// Events, and then nothing more until the generation is dropped.
    pub(crate) fn hang(events: Vec<Event>) -> Self {
        Self {
            events,
            ..Self::default()
        }
    }

    pub(crate) fn fail(events: Vec<Event>, code: ErrorCode) -> Self {
        Self::failing(events, Error::new(code, "as the script says"))
    }

    pub(crate) fn failing(events: Vec<Event>, error: Error) -> Self {
        Self {
            events,
            end: Some(Err(error)),
            ..Self::default()
        }
    }

    pub(crate) fn done(events: Vec<Event>, stop: StopReason, content: Vec<Block>) -> Self {
        let message = Message {
            role: Role::Assistant,
            content,
        };
        let usage = Usage {
            input_tokens: Some(10),
            output_tokens: Some(1),
            cache_read_input_tokens: Some(30),
            ..Usage::default()
        };
        let mut done = Done::new(stop, message, usage, "scripted".into());
        done.upstream_requests = 1;
        done.laboratory = true;
        Self {
            events,
            end: Some(Ok(Box::new(done))),
            ..Self::default()
        }
    }

    /// This end and nothing before it.
    pub(crate) fn ending(done: Done) -> Self {
        Self {
            end: Some(Ok(Box::new(done))),
            ..Self::default()
        }
    }

    /// A plain answer.
    pub(crate) fn text(text: &str) -> Self {
        Self::done(
            vec![said(text)],
            StopReason::EndTurn,
            vec![Block::text(text)],
        )
    }

    /// An answer that calls tools: `(id, name, input)`.
    pub(crate) fn calls(calls: &[(&str, &str, serde_json::Value)]) -> Self {
        let calls: Vec<_> = calls.iter().map(|(i, n, v)| call(i, n, v)).collect();
        let events = calls.iter().cloned().map(Event::ToolCall).collect();
        let content = calls.into_iter().map(Block::ToolUse).collect();
        Self::done(events, StopReason::ToolUse, content)
    }

    /// An answer whose only call is no call of the host's.
    pub(crate) fn rejected(id: &str, name: &str, reason: Rejection) -> Self {
        let call = call(id, name, &serde_json::json!({}));
        let event = Event::ToolRejected {
            call: call.clone(),
            reason,
        };
        Self::done(vec![event], StopReason::ToolUse, vec![Block::ToolUse(call)])
    }

    /// The same, that retires the backend state.
    pub(crate) fn retiring(mut self) -> Self {
        self.retires = true;
        self
    }

    /// The same with another size of its prompt.
    pub(crate) fn reading(mut self, prompt_tokens: u64) -> Self {
        if let Some(Ok(done)) = &mut self.end {
            done.usage.input_tokens = Some(prompt_tokens);
            done.usage.cache_read_input_tokens = None;
        }
        self
    }

    /// The same with a word about the backend state.
    pub(crate) fn ordering(mut self, state: StateOrder) -> Self {
        if let Some(Ok(done)) = &mut self.end {
            done.state = state;
        }
        self
    }

    /// The same with another reason to stop.
    pub(crate) fn stopping(mut self, stop: StopReason) -> Self {
        if let Some(Ok(done)) = &mut self.end {
            done.stop = stop;
        }
        self
    }
}

pub(crate) fn said(text: &str) -> Event {
    Event::Text { text: text.into() }
}

pub(crate) fn call(id: &str, name: &str, input: &serde_json::Value) -> ToolCall {
    ToolCall {
        id: ToolUseId(id.into()),
        name: name.into(),
        input: ToolInput::from_streamed(&input.to_string()).unwrap(),
    }
}

/// The transport.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptedTransport {
    scripts: Arc<Mutex<VecDeque<Script>>>,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl ScriptedTransport {
    pub(crate) fn new(scripts: impl IntoIterator<Item = Script>) -> Self {
        Self {
            scripts: Arc::new(Mutex::new(scripts.into_iter().collect())),
            requests: Arc::default(),
        }
    }

    pub(crate) fn provider(&self) -> Provider {
        Provider::new(self.clone())
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Transport for ScriptedTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Relay
    }

    fn generate(&self, request: Request) -> Generation {
        assert_can_be_sent(&request.messages);
        let script = self.scripts.lock().unwrap().pop_front();
        let script = script.expect("the script has no further answer");
        if let (true, Some(signal)) = (script.retires, &request.retirement) {
            signal.signal();
        }
        self.requests.lock().unwrap().push(request);
        let (mut sender, generation) = Generation::channel();
        tokio::spawn(async move {
            for event in script.events {
                if sender.send(event).await.is_err() {
                    return;
                }
            }
            match script.end {
                Some(Ok(done)) => drop(sender.send(Event::Done(*done)).await),
                Some(Err(error)) => sender.fail(error).await,
                None => sender.cancelled().clone().cancelled().await,
            }
        });
        generation
    }

    fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async { Ok(()) })
    }
}

/// What the service demands of a conversation: it ends with the user, and each call is answered by the very next
/// message, in the order of the calls, before anything else in it.
pub(crate) fn assert_can_be_sent(messages: &[Message]) {
    assert_eq!(messages.last().map(|last| last.role), Some(Role::User));
    for (index, message) in messages.iter().enumerate() {
        assert!(!message.content.is_empty(), "message {index} is empty");
        let calls: Vec<_> = message.tool_calls().map(|call| &call.id).collect();
        if calls.is_empty() {
            continue;
        }
        let answers: Vec<_> = messages[index + 1]
            .content
            .iter()
            .map_while(|block| match block {
                Block::ToolResult(result) => Some(&result.id),
                _ => None,
            })
            .collect();
        assert_eq!(answers, calls, "the calls of message {index}");
    }
}
