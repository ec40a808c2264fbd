//! One transport with all that it is held against: its upstream, its home, its processes and its files.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use turnpass::conversation::{Message, ToolCall};
use turnpass::event::{Done, Event, Notice, Rejection};
use turnpass::relay::{LoopbackUrl, ProcessMode, RelayOptions, RelayTransport, ToolCarrier};
use turnpass::request::{Request, Tool};
use turnpass::{Error, ErrorCode, Generation, Transport};
use turnpass_lab::rig::{self, MadeUpHome, RealCli};
use turnpass_lab::upstream::{Options, Recorded, Upstream};

pub(crate) use crate::suite::{BOUND, until, within};

/// What a trial runs on.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) cli: RealCli,
    pub(crate) process: ProcessMode,
    pub(crate) tools: ToolCarrier,
}

impl Setup {
    /// The beginning of its trials' names.
    pub(crate) fn name(&self) -> String {
        let tools = match self.tools {
            ToolCarrier::ExtraBody => "extra_body",
            ToolCarrier::Mcp => "mcp",
        };
        format!("{}::{}::{tools}", self.cli.version, self.process.as_str())
    }

    pub(crate) fn is_warm(&self) -> bool {
        self.process == ProcessMode::Warm
    }
}

/// One transport and its surroundings.
pub(crate) struct Bench {
    pub(crate) relay: RelayTransport,
    pub(crate) up: Upstream,
    pub(crate) setup: Setup,
    pub(crate) home: MadeUpHome,
    dir: tempfile::TempDir,
}

/// A process of the CLI that the transport started for generations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    /// The private directory of its launch.
    pub(crate) dir: PathBuf,
}

impl Bench {
    /// A transport without spare processes.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self::with(setup, Options::default(), |options| options.spares = 0)
    }

    /// A transport as the options want it.
    pub(crate) fn with(
        setup: &Setup,
        upstream: Options,
        change: impl FnOnce(&mut RelayOptions),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = MadeUpHome::new(&dir.path().join("home")).unwrap();
        let up = Upstream::start(upstream).unwrap();
        let mut options = options(setup, dir.path(), &up.url());
        change(&mut options);
        let relay = RelayTransport::new(options).unwrap();
        Self {
            relay,
            up,
            setup: setup.clone(),
            home,
            dir,
        }
    }

    /// Another transport on the same upstream and home, as after a restart of the host.
    pub(crate) fn reopen(self) -> Self {
        let options = options(&self.setup, self.dir.path(), &self.up.url());
        Self {
            relay: RelayTransport::new(options).unwrap(),
            ..self
        }
    }

    /// A directory of the trial's own.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Messages requests that have reached the upstream.
    pub(crate) fn count(&self) -> usize {
        self.up.messages().len()
    }

    /// One generation to its end, and the Messages requests that it caused.
    pub(crate) async fn ask(&self, request: Request) -> (Answer, Vec<Recorded>) {
        let before = self.count();
        let answer = drain(self.relay.generate(request)).await;
        self.settle().await;
        (answer, self.up.messages().split_off(before))
    }

    /// Waits until no process is in a generation any more: ended where each request has its own, idle otherwise.
    pub(crate) async fn settle(&self) {
        if self.setup.is_warm() {
            let alive = || {
                self.spawned()
                    .iter()
                    .filter(|one| is_alive(one.pid))
                    .count()
            };
            until("every process is idle or gone", || self.idle() >= alive()).await;
        } else {
            self.all_gone().await;
        }
    }

    /// Idle kept processes, as the transport shows them.
    pub(crate) fn idle(&self) -> usize {
        let shown = format!("{:?}", self.relay);
        let (_, rest) = shown
            .split_once("idle: ")
            .expect("the transport shows its idle processes");
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    }

    /// The processes that were started for generations so far.
    pub(crate) fn spawned(&self) -> Vec<Spawned> {
        spawned(self.dir.path())
    }

    /// The one process that is alive.
    pub(crate) fn the_process(&self) -> Spawned {
        let mut alive = self.spawned();
        alive.retain(|one| is_alive(one.pid));
        assert_eq!(alive.len(), 1, "{alive:?}");
        alive.remove(0)
    }

    /// Waits until every process that was started so far is gone with its whole group.
    pub(crate) async fn all_gone(&self) {
        let groups = self.spawned();
        until("all processes are gone", || {
            groups
                .iter()
                .all(|one| rig::alive_in_group(one.pid).is_empty())
        })
        .await;
    }

    /// Shuts the transport down: afterwards no process and no private directory of it is left.
    pub(crate) async fn finish(self) {
        within("shutdown", self.relay.shutdown()).await.unwrap();
        self.nothing_left();
    }

    /// Drops the transport without a shutdown; the same holds a moment later.
    pub(crate) async fn abandon(self) {
        let Self {
            relay,
            up,
            setup: _,
            home: _,
            dir,
        } = self;
        drop(relay);
        let all = spawned(dir.path());
        until("an abandoned transport leaves nothing", || {
            all.iter()
                .all(|one| rig::alive_in_group(one.pid).is_empty() && !one.dir.exists())
        })
        .await;
        drop(up);
    }

    fn nothing_left(&self) {
        for one in self.spawned() {
            let left = rig::alive_in_group(one.pid);
            assert_eq!(left, Vec::<i32>::new(), "of the group of {}", one.pid);
            assert!(!one.dir.exists(), "{} is left", one.dir.display());
        }
    }
}

/// The options of a transport in `dir`: the CLI is started by a script that notes its process number and arguments and
/// then becomes the CLI, so that every start is counted.
pub(crate) fn options(setup: &Setup, dir: &Path, upstream: &str) -> RelayOptions {
    let program = dir.join("claude");
    let text = format!(
        "#!/bin/sh\necho \"$$ $*\" >> '{}'\nexec '{}' \"$@\"\n",
        dir.join("spawns").display(),
        std::fs::canonicalize(&setup.cli.path).unwrap().display(),
    );
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    RelayOptions {
        process: setup.process,
        tools: setup.tools,
        claude_path: Some(program),
        tool_server: Some(env!("CARGO_BIN_EXE_turnpass").into()),
        lab_upstream: Some(LoopbackUrl::parse(upstream).unwrap()),
        lab_home: Some(dir.join("home")),
        spares: 0,
        ..RelayOptions::default()
    }
}

/// The starts that the script in `dir` has noted, but those of `--version` and `auth status`.
pub(crate) fn spawned(dir: &Path) -> Vec<Spawned> {
    let noted = std::fs::read_to_string(dir.join("spawns")).unwrap_or_default();
    let of_generation = noted.lines().filter(|line| line.contains(" -p "));
    of_generation
        .map(|line| {
            let mut words = line.split(' ');
            let pid = words.next().unwrap().parse().unwrap();
            let settings = words
                .skip_while(|word| *word != "--settings")
                .nth(1)
                .unwrap();
            let dir = Path::new(settings).parent().unwrap().to_owned();
            Spawned { pid, dir }
        })
        .collect()
}

fn is_alive(pid: i32) -> bool {
    rig::ProcessTree::of_group(pid).pids().contains(&pid)
}

/// What a host heard of one generation.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) events: Vec<Event>,
    pub(crate) end: Result<Done, Error>,
}

impl Answer {
    /// Its good end.
    #[track_caller]
    pub(crate) fn done(&self) -> &Done {
        match &self.end {
            Ok(done) => done,
            Err(error) => panic!("failed: {error} after {:?}", self.events),
        }
    }

    /// Its failure.
    #[track_caller]
    pub(crate) fn error(&self) -> &Error {
        match &self.end {
            Ok(done) => panic!("did not fail: {done:?}"),
            Err(error) => error,
        }
    }

    pub(crate) fn code(&self) -> Option<ErrorCode> {
        self.end.as_ref().err().map(Error::code)
    }

    /// The streamed text.
    pub(crate) fn text(&self) -> String {
        let pieces = self.events.iter().filter_map(|event| match event {
            Event::Text { text } => Some(text.as_str()),
            _ => None,
        });
        pieces.collect()
    }

    /// The released tool calls.
    pub(crate) fn calls(&self) -> Vec<ToolCall> {
        let calls = self.events.iter().filter_map(|event| match event {
            Event::ToolCall(call) => Some(call.clone()),
            _ => None,
        });
        calls.collect()
    }

    /// The calls that were not released, with the reason.
    pub(crate) fn rejected(&self) -> Vec<(ToolCall, Rejection)> {
        let rejected = self.events.iter().filter_map(|event| match event {
            Event::ToolRejected { call, reason } => Some((call.clone(), reason.clone())),
            _ => None,
        });
        rejected.collect()
    }

    /// Requests of the CLI that were refused, as the host was told.
    pub(crate) fn refused(&self) -> Option<u32> {
        self.events.iter().find_map(|event| match event {
            Event::Notice(Notice::RequestsRefused { count }) => Some(*count),
            _ => None,
        })
    }
}

/// Reads a generation to its end.
pub(crate) async fn drain(mut generation: Generation) -> Answer {
    let mut events = Vec::new();
    let read = async {
        loop {
            match generation.next().await {
                Some(Ok(Event::Done(done))) => return Ok(done),
                Some(Ok(event)) => events.push(event),
                Some(Err(error)) => return Err(error),
                None => panic!("a generation ended without an end"),
            }
        }
    };
    let end = within("the end of a generation", read).await;
    assert!(
        generation.next().await.is_none(),
        "something came after the end"
    );
    Answer { events, end }
}

/// Reads a generation up to the first event that is wanted.
pub(crate) async fn read_until(
    generation: &mut Generation,
    wanted: impl Fn(&Event) -> bool,
) -> Vec<Event> {
    let mut events = Vec::new();
    let read = async {
        loop {
            match generation.next().await {
                Some(Ok(event)) => {
                    let found = wanted(&event);
                    events.push(event);
                    if found {
                        return;
                    }
                }
                other => panic!("the generation ended with {other:?} after {events:?}"),
            }
        }
    };
    within("an event of a generation", read).await;
    events
}

/// A tool of the host.
pub(crate) fn tool(name: &str) -> Tool {
    Tool {
        name: name.to_owned(),
        description: format!("The tool {name}."),
        input_schema: json!({
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path"],
        }),
    }
}

/// A small request with two tools.
pub(crate) fn request(messages: Vec<Message>) -> Request {
    let mut request = Request::new("sonnet", messages);
    request.system = "You are under test.".to_owned();
    request.tools = vec![tool("read"), tool("write")];
    request
}

/// A small request of one user text.
pub(crate) fn say(text: &str) -> Request {
    request(vec![Message::user(text)])
}

/// The JSON body of a request.
pub(crate) fn body(recorded: &Recorded) -> &Value {
    recorded.json.as_deref().expect("a body of JSON")
}

/// Numbers and words that are the same in each run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        // xorshift64*: good enough to mix, and the same everywhere.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let mixed = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(mixed).unwrap() % limit
    }

    /// A word of twelve letters.
    pub(crate) fn word(&mut self) -> String {
        (0..12)
            .map(|_| char::from(b'a' + u8::try_from(self.below(26)).unwrap()))
            .collect()
    }
}
