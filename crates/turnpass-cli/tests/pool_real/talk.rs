//! A host with one conversation: it keeps the history and the state, runs each tool once, and asks again when it may.

use std::collections::BTreeMap;

use turnpass::conversation::{Message, ToolCall, ToolResult, ToolUseId};
use turnpass::event::{Event, Plan, PlanKind, StateOrder};
use turnpass::pool::PoolTransport;
use turnpass::request::{BackendState, Request, Tool, TransportSession};
use turnpass::{Generation, Transport as _};

use crate::bench::Bench;
use crate::stage::{Heard, hear, tool};

/// What a host keeps.
#[derive(Clone, Debug)]
pub(crate) struct Talk {
    pub(crate) key: String,
    pub(crate) messages: Vec<Message>,
    pub(crate) state: Option<BackendState>,
    pub(crate) model: String,
    pub(crate) system: String,
    pub(crate) tools: Vec<Tool>,
    /// How often each call was run.
    pub(crate) ran: BTreeMap<ToolUseId, u32>,
}

impl Talk {
    pub(crate) fn new(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            messages: Vec::new(),
            state: None,
            model: "sonnet".to_owned(),
            system: "You are under test.".to_owned(),
            tools: vec![tool("read"), tool("write")],
            ran: BTreeMap::new(),
        }
    }

    pub(crate) fn request(&self) -> Request {
        let mut request = Request::new(self.model.as_str(), self.messages.clone());
        request.session = TransportSession(self.key.clone());
        request.system.clone_from(&self.system);
        request.tools.clone_from(&self.tools);
        request.state.clone_from(&self.state);
        request
    }

    /// Begins a generation of the history as it is.
    pub(crate) fn generate(&self, pool: &PoolTransport) -> Generation {
        pool.generate(self.request())
    }

    /// Keeps what a generation brought.
    pub(crate) fn keep(&mut self, heard: &Heard) {
        let Some(done) = &heard.done else { return };
        self.messages.push(done.message.clone());
        match &done.state {
            StateOrder::Keep { state } => self.state = Some(state.clone()),
            StateOrder::Clear => self.state = None,
            StateOrder::Unchanged => {}
        }
    }

    /// One generation of the history as it is; what it brings is kept.
    pub(crate) async fn go_on(&mut self, bench: &Bench) -> Heard {
        let heard = hear(self.generate(&bench.pool)).await;
        self.keep(&heard);
        heard
    }

    /// One generation that was good, that cost one request, and that brought the service exactly the history.
    #[track_caller]
    pub(crate) fn good(&mut self, bench: &Bench) -> impl Future<Output = Heard> {
        let caller = std::panic::Location::caller();
        async move {
            let before = bench.count();
            let history = self.messages.clone();
            let heard = self.go_on(bench).await;
            if let Some(error) = &heard.error {
                panic!("at {caller}: {error}");
            }
            let seen = bench.up.messages().split_off(before);
            assert_eq!(seen.len(), 1, "requests at {caller}");
            assert_eq!(heard.done().upstream_requests, 1, "told at {caller}");
            if let Err(problem) = crate::holds::compare(&history, &seen[0]) {
                panic!("at {caller}: {problem}\n{:?}", plan(&heard));
            }
            heard
        }
    }

    /// Says something; the answer is good.
    #[track_caller]
    pub(crate) fn say(&mut self, bench: &Bench, text: &str) -> impl Future<Output = Heard> {
        self.messages.push(Message::user(text));
        self.good(bench)
    }

    /// The same, and what is said is answered with these words.
    #[track_caller]
    pub(crate) fn check(&mut self, bench: &Bench) -> impl Future<Output = ()> {
        self.messages.push(Message::user("[[say still here]]"));
        let good = self.good(bench);
        async move {
            let heard = good.await;
            assert_eq!(heard.text(), "still here");
        }
    }

    /// Runs a tool: each call once.
    pub(crate) fn run(&mut self, call: &ToolCall) -> ToolResult {
        let times = self.ran.entry(call.id.clone()).or_default();
        *times += 1;
        assert_eq!(*times, 1, "{} was run again", call.id.0);
        ToolResult::text(call.id.clone(), format!("result of {}", call.id.0))
    }

    /// Results of all calls of the last message.
    pub(crate) fn results(&mut self) -> Vec<ToolResult> {
        let calls: Vec<_> = self
            .messages
            .last()
            .unwrap()
            .tool_calls()
            .cloned()
            .collect();
        calls.iter().map(|call| self.run(call)).collect()
    }

    /// Runs the tools of the last message and goes on; the answer is good.
    #[track_caller]
    pub(crate) fn answer(&mut self, bench: &Bench) -> impl Future<Output = Heard> {
        let results = self.results();
        self.messages.push(Message::results(results));
        self.good(bench)
    }
}

/// How the generation was served.
pub(crate) fn plan(heard: &Heard) -> Option<&Plan> {
    heard.events.iter().find_map(|event| match event {
        Event::Started { how, .. } => Some(how),
        _ => None,
    })
}

/// It was served so.
#[track_caller]
pub(crate) fn planned(heard: &Heard, kind: PlanKind) {
    let how = plan(heard).expect("a plan");
    assert_eq!(how.kind, kind, "{}", how.reason);
}
