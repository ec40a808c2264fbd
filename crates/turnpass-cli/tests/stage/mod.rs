//! A relay between the scripted CLI and the scripted upstream, in a throw-away directory.
//!
//! Every wait here has a bound. Where another process is looked at, it tells nobody when it changes, so it is looked at
//! again at short intervals until the condition holds or the bound is over.

// Each test target uses another part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use turnpass::cli::environment::InheritedCredentials;
use turnpass::conversation::{Message, ToolCall, ToolResult};
use turnpass::event::{Done, Event, Notice, StopReason};
use turnpass::pool::{self, PoolOptions, PoolTransport, Reseed};
use turnpass::relay::{LoopbackUrl, ProcessMode, RelayOptions, RelayTransport, ToolCarrier};
use turnpass::replay::{History, ReplayOptions, ReplayTransport};
use turnpass::request::{Limits, Tool};
use turnpass::{Error, ErrorCode, Generation, Provider, Request};
use turnpass_lab::cli::{Recording, Script, install};
use turnpass_lab::rig::processes;
use turnpass_lab::upstream::{Options, Recorded, Upstream};

/// Longest wait for anything in a test; a loaded machine needs seconds for what takes milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);
/// How often another process is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The way a relay is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) process: ProcessMode,
    pub(crate) tools: ToolCarrier,
}

pub(crate) const WARM: Row = Row {
    process: ProcessMode::Warm,
    tools: ToolCarrier::ExtraBody,
};
pub(crate) const WARM_MCP: Row = Row {
    process: ProcessMode::Warm,
    tools: ToolCarrier::Mcp,
};
pub(crate) const PER_REQUEST: Row = Row {
    process: ProcessMode::PerRequest,
    tools: ToolCarrier::ExtraBody,
};
pub(crate) const PER_REQUEST_MCP: Row = Row {
    process: ProcessMode::PerRequest,
    tools: ToolCarrier::Mcp,
};
pub(crate) const ROWS: [Row; 4] = [WARM, WARM_MCP, PER_REQUEST, PER_REQUEST_MCP];
/// Both kinds of process, for what does not depend on the carrier.
pub(crate) const MODES: [Row; 2] = [WARM, PER_REQUEST];

impl Row {
    pub(crate) fn name(self) -> String {
        let tools = match self.tools {
            ToolCarrier::ExtraBody => "extra_body",
            ToolCarrier::Mcp => "mcp",
        };
        format!("relay_{}_{tools}", self.process.as_str())
    }

    pub(crate) fn is_warm(self) -> bool {
        self.process == ProcessMode::Warm
    }
}

/// A way to reach the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Relay(Row),
    Pool(pool::ToolCarrier),
    /// Tools in-band, and what a process does not have told as one message.
    PoolTranscript,
    Replay(History),
}

impl Way {
    pub(crate) fn all() -> Vec<Self> {
        let relay = ROWS.into_iter().map(Self::Relay);
        let pool = [pool::ToolCarrier::InBand, pool::ToolCarrier::Http]
            .into_iter()
            .map(Self::Pool);
        let replay = [History::Native, History::Transcript].map(Self::Replay);
        let all = relay.chain(pool).chain([Self::PoolTranscript]);
        all.chain(replay).collect()
    }

    pub(crate) fn name(self) -> String {
        match self {
            Self::Relay(row) => row.name(),
            Self::Pool(pool::ToolCarrier::InBand) => "pool_in_band".to_owned(),
            Self::Pool(pool::ToolCarrier::Http) => "pool_http".to_owned(),
            Self::PoolTranscript => "pool_transcript".to_owned(),
            Self::Replay(history) => format!("replay_{history}"),
        }
    }

    pub(crate) fn provider(self, stage: &Stage) -> Provider {
        match self {
            Self::Relay(row) => stage.provider(row),
            Self::Pool(tools) => stage.pool(|options| options.tools = Some(tools)),
            Self::PoolTranscript => stage.pool(|options| options.reseed = Some(Reseed::Transcript)),
            Self::Replay(history) => stage.replay(history),
        }
    }
}

impl Way {
    /// Whether the CLI itself sends the request: it adds what is its own, and asks again where the service refuses in
    /// certain ways.
    pub(crate) fn is_live(self) -> bool {
        !matches!(self, Self::Relay(_))
    }

    /// Whether what a process does not have is told as one message of the user: its calls and results as text, and no
    /// thinking.
    pub(crate) fn tells_as_one(self) -> bool {
        self == Self::PoolTranscript
    }

    /// Requests that the CLI makes of one that the service refuses with this status, behind a base URL (2.1.332: without
    /// one a 400 is asked once).
    pub(crate) fn tries(self, status: u16) -> usize {
        match (self.is_live(), status) {
            (true, 400) => 3,
            (true, 401 | 404) => 2,
            (false, 401) => 2,
            _ => 1,
        }
    }
}

/// The host's own messages of a request: what the CLI adds to them, and marks, are left out, and a plain string is a
/// block. The records of a replay's transcript are read back.
pub(crate) fn host_messages(request: &Recorded) -> Vec<Value> {
    let all = request.field("/messages").and_then(Value::as_array);
    let mut messages = Vec::new();
    for message in all.into_iter().flatten() {
        if message["role"] == "system" {
            continue;
        }
        let mut message = message.clone();
        if let Some(text) = message["content"].as_str() {
            message["content"] = json!([{"type": "text", "text": text}]);
        }
        for block in message["content"].as_array_mut().into_iter().flatten() {
            block.as_object_mut().unwrap().remove("cache_control");
        }
        let added = |block: &Value| {
            let text = block["text"].as_str().unwrap_or_default();
            text.starts_with("<system-reminder>") || text.starts_with("[Image: source:")
        };
        message["content"]
            .as_array_mut()
            .unwrap()
            .retain(|block| !added(block));
        messages.push(message);
    }
    match is_transcript(request) {
        true => transcribed(&messages[0]["content"].as_array().unwrap()[1..]),
        false => messages,
    }
}

/// Whether a request carries its history as one transcript.
pub(crate) fn is_transcript(sent: &Recorded) -> bool {
    let first = sent.field("/messages/0/content/0").unwrap();
    record(first).is_some_and(|record| record["role"] == "header")
}

fn record(block: &Value) -> Option<Value> {
    let text = block["text"].as_str()?;
    serde_json::from_str::<Value>(text)
        .ok()
        .filter(Value::is_object)
}

fn transcribed(blocks: &[Value]) -> Vec<Value> {
    let mut messages: Vec<Value> = Vec::new();
    let mut blocks = blocks.iter().peekable();
    while let Some(block) = blocks.next() {
        let record = record(block).unwrap();
        let mut behind = Vec::new();
        while let Some(media) = blocks.next_if(|next| next["type"] != "text") {
            behind.push(media.clone());
        }
        let parts = record["content"].as_array().unwrap().iter().map(|part| {
            match part["type"].as_str().unwrap() {
                "image" | "document" => {
                    let at = part["block"].as_u64().unwrap();
                    behind[usize::try_from(at).unwrap() - 1].clone()
                }
                "thinking" if part["redacted"] == true => json!({"type": "redacted_thinking"}),
                "thinking" => json!({"type": "thinking", "thinking": part["text"]}),
                "tool_call" => json!({
                    "type": "tool_use", "id": part["id"], "name": part["name"],
                    "input": part["arguments"],
                }),
                _ => part.clone(),
            }
        });
        let mut content: Vec<Value> = parts.collect();
        let role = match record["role"].as_str().unwrap() {
            "tool" => {
                content = vec![json!({
                    "type": "tool_result", "tool_use_id": record["tool_call_id"],
                    "content": content, "is_error": record["is_error"],
                })];
                "user"
            }
            role => role,
        };
        match messages.last_mut() {
            Some(last) if last["role"] == role => {
                last["content"].as_array_mut().unwrap().extend(content);
            }
            _ => messages.push(json!({"role": role, "content": content})),
        }
    }
    messages
}

/// The scripted CLI, the scripted upstream, and a home.
pub(crate) struct Stage {
    pub(crate) upstream: Upstream,
    dir: TempDir,
    claude: PathBuf,
}

impl Stage {
    /// The emulator as the CLI.
    pub(crate) fn emulator() -> Self {
        Self::script(Script::emulator("2.1.332"))
    }

    /// Every start of the CLI plays these steps.
    #[track_caller]
    pub(crate) fn steps(steps: Value) -> Self {
        Self::json(json!({"runs": [{"steps": steps}]}))
    }

    /// A script in its JSON form.
    #[track_caller]
    pub(crate) fn json(script: Value) -> Self {
        Self::script(Script::parse(&script.to_string()).unwrap())
    }

    /// The CLI plays this script.
    pub(crate) fn script(script: Script) -> Self {
        Self::with(script, Options::default())
    }

    pub(crate) fn with(script: Script, upstream: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for part in ["home", "cli", "record"] {
            std::fs::create_dir(dir.path().join(part)).unwrap();
        }
        let script = script.recording(&dir.path().join("record"));
        let program = Path::new(env!("CARGO_BIN_EXE_turnpass"));
        let claude = install(&dir.path().join("cli"), program, &script).unwrap();
        Self {
            upstream: Upstream::start(upstream).unwrap(),
            dir,
            claude,
        }
    }

    /// Puts another script in the place of the one that is installed; runs that go on keep theirs.
    pub(crate) fn change(&self, script: Script) {
        let script = script.recording(&self.record());
        let program = Path::new(env!("CARGO_BIN_EXE_turnpass"));
        // A new script starts its counting anew.
        let _ = std::fs::remove_file(self.path("cli/claude.script.json.count"));
        install(&self.path("cli"), program, &script).unwrap();
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    pub(crate) fn claude(&self) -> &Path {
        &self.claude
    }

    fn record(&self) -> PathBuf {
        self.path("record")
    }

    /// Options for a relay that may start just what its requests need.
    pub(crate) fn options(&self, row: Row) -> RelayOptions {
        RelayOptions {
            process: Some(row.process),
            tools: Some(row.tools),
            claude_path: Some(self.claude.clone()),
            tool_server: Some(env!("CARGO_BIN_EXE_turnpass").into()),
            spares: 0,
            lab_upstream: Some(LoopbackUrl::parse(&self.upstream.url()).unwrap()),
            lab_home: Some(self.path("home")),
            ..RelayOptions::default()
        }
    }

    /// Options for a replay.
    pub(crate) fn replay_options(&self, history: History) -> ReplayOptions {
        ReplayOptions {
            history: Some(history),
            claude_path: Some(self.claude.clone()),
            tool_server: Some(env!("CARGO_BIN_EXE_turnpass").into()),
            inherited_credentials: InheritedCredentials::Strip,
            lab_upstream: Some(LoopbackUrl::parse(&self.upstream.url()).unwrap()),
            lab_home: Some(self.path("home")),
            ..ReplayOptions::default()
        }
    }

    pub(crate) fn replay(&self, history: History) -> Provider {
        Provider::new(ReplayTransport::new(self.replay_options(history)).unwrap())
    }

    pub(crate) fn provider(&self, row: Row) -> Provider {
        Provider::new(RelayTransport::new(self.options(row)).unwrap())
    }

    /// A pool that may start just what its requests need.
    pub(crate) fn pool(&self, change: impl FnOnce(&mut PoolOptions)) -> Provider {
        let mut options = PoolOptions {
            claude_path: Some(self.claude.clone()),
            spare: false,
            state_dir: Some(self.path("state")),
            lab_upstream: Some(LoopbackUrl::parse(&self.upstream.url()).unwrap()),
            lab_home: Some(self.path("home")),
            ..PoolOptions::default()
        };
        change(&mut options);
        Provider::new(PoolTransport::new(options).unwrap())
    }

    /// What the ordinary starts of the CLI wrote down; `auth status` is left out.
    pub(crate) fn recording(&self) -> Recording {
        let mut recording = Recording::read(&self.record());
        recording
            .runs
            .retain(|run| run.argv.iter().all(|arg| arg != "auth"));
        recording
    }

    /// Waits until somebody has asked for the sign-in.
    pub(crate) async fn asked_for_sign_in(&self) {
        let end = Instant::now() + PATIENCE;
        while Recording::read(&self.record()).runs.is_empty() {
            assert!(Instant::now() < end, "nobody asked");
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Waits until the recording is so.
    pub(crate) async fn recorded(
        &self,
        what: &str,
        ready: impl Fn(&Recording) -> bool,
    ) -> Recording {
        let end = Instant::now() + PATIENCE;
        loop {
            let recording = self.recording();
            if ready(&recording) {
                return recording;
            }
            assert!(Instant::now() < end, "never {what}: {recording:#?}");
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// The processes of the CLI that were started, dead or alive.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.recording().runs.iter().map(|run| run.pid).collect()
    }

    /// Waits until nobody is left in any group that the CLI was the leader of.
    pub(crate) async fn all_gone(&self, bound: Duration) {
        let groups: Vec<i32> = self.recording().runs.iter().map(|run| run.group).collect();
        let end = Instant::now() + bound;
        loop {
            let left: Vec<i32> = groups
                .iter()
                .flat_map(|group| processes::alive_in_group(*group))
                .collect();
            if left.is_empty() {
                return;
            }
            assert!(
                Instant::now() < end,
                "still alive after {bound:?}: {left:?}"
            );
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// The Messages requests that reached the upstream.
    pub(crate) fn sent(&self) -> Vec<Recorded> {
        self.upstream.messages()
    }
}

/// A request of one user text.
pub(crate) fn ask(text: impl Into<String>) -> Request {
    let mut request = Request::new("sonnet", vec![Message::user(text)]);
    request.system = "You are a test.".to_owned();
    request
}

/// The same with the tools `read` and `write`.
pub(crate) fn ask_with_tools(text: impl Into<String>) -> Request {
    let mut request = ask(text);
    request.tools = vec![tool("read"), tool("write")];
    request
}

pub(crate) fn tool(name: &str) -> Tool {
    Tool {
        name: name.to_owned(),
        description: format!("The tool {name}."),
        input_schema: json!({"type": "object", "properties": {"path": {"type": "string"}}}),
    }
}

/// Deadlines for a test; the others stay long.
pub(crate) fn limits(start_ms: u64, idle_ms: u64, total_ms: u64) -> Limits {
    Limits {
        start: Duration::from_millis(start_ms),
        idle: Duration::from_millis(idle_ms),
        total: Duration::from_millis(total_ms),
    }
}

/// Everything that a generation gave.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) events: Vec<Event>,
    pub(crate) done: Option<Done>,
    pub(crate) error: Option<Error>,
    /// From the call to the end.
    pub(crate) took: Duration,
}

/// Hears a generation to its end; a test that hears nothing for [`PATIENCE`] fails.
pub(crate) async fn hear(mut generation: Generation) -> Heard {
    let mut heard = Heard::default();
    let started = Instant::now();
    loop {
        let next = tokio::time::timeout(PATIENCE, generation.next());
        let Ok(next) = next.await else {
            panic!("nothing more came within {PATIENCE:?} after {heard:?}");
        };
        match next {
            Some(Ok(Event::Done(done))) => heard.done = Some(done),
            Some(Ok(event)) => heard.events.push(event),
            Some(Err(error)) => heard.error = Some(error),
            None => {
                heard.took = started.elapsed();
                assert!(
                    heard.done.is_some() != heard.error.is_some(),
                    "not exactly one end: {heard:?}"
                );
                return heard;
            }
        }
    }
}

/// Asks and hears to the end.
pub(crate) async fn told(provider: &Provider, request: Request) -> Heard {
    hear(provider.generate(request)).await
}

/// Hears until an event is so, and leaves the generation open.
pub(crate) async fn until(generation: &mut Generation, what: &str, is: impl Fn(&Event) -> bool) {
    loop {
        let next = tokio::time::timeout(PATIENCE, generation.next());
        match next.await {
            Ok(Some(Ok(event))) if is(&event) => return,
            Ok(Some(Ok(_))) => {}
            other => panic!("{other:?} came instead of {what}"),
        }
    }
}

pub(crate) fn is_text(event: &Event) -> bool {
    matches!(event, Event::Text { .. })
}

impl Heard {
    #[track_caller]
    pub(crate) fn done(&self) -> &Done {
        match (&self.done, &self.error) {
            (Some(done), _) => done,
            (None, error) => panic!("failed: {}", error.as_ref().unwrap()),
        }
    }

    #[track_caller]
    pub(crate) fn error(&self) -> &Error {
        match &self.error {
            Some(error) => error,
            None => panic!("did not fail: {self:?}"),
        }
    }

    /// Fails unless it ended with this code; gives the error.
    #[track_caller]
    pub(crate) fn failed(&self, code: ErrorCode) -> &Error {
        let error = self.error();
        assert_eq!(error.code(), code, "{error}");
        error
    }

    #[track_caller]
    pub(crate) fn stop(&self) -> &StopReason {
        &self.done().stop
    }

    pub(crate) fn text(&self) -> String {
        let parts = self.events.iter().filter_map(|event| match event {
            Event::Text { text } => Some(text.as_str()),
            _ => None,
        });
        parts.collect()
    }

    pub(crate) fn thinking(&self) -> String {
        let parts = self.events.iter().filter_map(|event| match event {
            Event::Thinking { text } => Some(text.as_str()),
            _ => None,
        });
        parts.collect()
    }

    pub(crate) fn calls(&self) -> Vec<ToolCall> {
        let calls = self.events.iter().filter_map(|event| match event {
            Event::ToolCall(call) => Some(call.clone()),
            _ => None,
        });
        calls.collect()
    }

    pub(crate) fn count(&self, is: impl Fn(&Event) -> bool) -> usize {
        self.events.iter().filter(|event| is(event)).count()
    }

    pub(crate) fn refused_requests(&self) -> u32 {
        let counts = self.events.iter().filter_map(|event| match event {
            Event::Notice(Notice::RequestsRefused { count }) => Some(*count),
            _ => None,
        });
        counts.sum()
    }
}

/// The next request of a conversation: the answer, and a result for each call.
pub(crate) fn go_on(request: &Request, done: &Done) -> Request {
    let mut next = request.clone();
    next.messages.push(done.message.clone());
    let results: Vec<_> = done
        .message
        .tool_calls()
        .map(|call| ToolResult::text(call.id.clone(), format!("result of {}", call.id.0)))
        .collect();
    if results.is_empty() {
        next.messages
            .push(Message::user("[[say going on]] and so on"));
    } else {
        next.messages.push(Message::results(results));
    }
    next
}

/// No rule of the API was broken by any request.
#[track_caller]
pub(crate) fn assert_valid(sent: &[Recorded]) {
    for request in sent {
        assert!(
            request.violations.is_empty(),
            "request {}: {:?}",
            request.number,
            request.violations
        );
    }
}
