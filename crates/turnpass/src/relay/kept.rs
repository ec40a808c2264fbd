//! One warm CLI process: its lane, its lines, what it is set to. A value whose drop ends all of it.

use bytes::{Bytes, BytesMut};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::exchange::Seat;
use super::fit::{Fit, Key};
use super::isolation::{Expected, InitVerdict};
use super::lane::{Arrival, Lane};
use super::native::{self, Native, NativeReader};
use crate::cli::launch::{MCP_SERVER, PLACEHOLDER};
use crate::cli::private_dir::PrivateDir;
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ChildGroup, EndPolicy, Exit, Stdin, Stdout};
use crate::request::TransportSession;
use crate::tools::{Catalogue, Policy, Server, in_band};
use crate::wire::control;
use crate::wire::lines::LineSplitter;
use crate::wire::stream_json::Verdict;

/// Generations that one process serves. The CLI keeps about 0.3 to 0.5 MB of each (2.1.294 to 2.1.332), so this bounds
/// its growth to about 90 MB.
pub(crate) const GENERATIONS_LIMIT: u32 = 200;
/// Longest line while the CLI is answered synthetically (relay document: 1 MiB).
pub(crate) const WARM_LINE_BYTES: usize = 1024 * 1024;
/// Longest line while the CLI is passed the real answer: one tool input is one line (2.1.332).
pub(crate) const REAL_LINE_BYTES: usize = 16 * 1024 * 1024;
/// Meaningful lines that wait for the generation (relay document: 16).
const NATIVES: usize = 16;

/// The parts of any running CLI process that a generation needs.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) group: ChildGroup,
    pub(crate) lane: Lane,
    pub(crate) arrivals: mpsc::Receiver<Arrival>,
    pub(crate) natives: mpsc::Receiver<Native>,
    _reading: AbortOnDropHandle<()>,
    /// Removed after the process, since fields are dropped in order.
    _dir: PrivateDir,
}

impl Running {
    /// Takes over a started process.
    pub(crate) fn new(
        mut group: ChildGroup,
        lane: Lane,
        arrivals: mpsc::Receiver<Arrival>,
        dir: PrivateDir,
        expected: Expected,
        line_bytes: usize,
    ) -> Result<Self> {
        let stdout = group
            .take_stdout()
            .ok_or_else(|| Error::new(ErrorCode::Internal, "a new process has no output"))?;
        let (sender, natives) = mpsc::channel(NATIVES);
        let reading = tokio::spawn(read_lines(stdout, NativeReader::new(expected), line_bytes, sender));
        Ok(Self { group, lane, arrivals, natives, _reading: AbortOnDropHandle::new(reading), _dir: dir })
    }

    /// Ends the process within the policy's bounds, then removes its files.
    pub(crate) async fn end(self, policy: EndPolicy) -> Result<Exit> {
        self.group.end(policy).await
    }
}

async fn read_lines(
    mut stdout: Stdout,
    mut reader: NativeReader,
    line_bytes: usize,
    natives: mpsc::Sender<Native>,
) {
    let mut lines = LineSplitter::new(line_bytes);
    loop {
        let read = stdout.read_buf::<BytesMut>(lines.read_buf()).await;
        let ended = !matches!(read, Ok(1..));
        loop {
            let native = match lines.next_line() {
                Ok(Some(line)) => reader.line(&line),
                Ok(None) => break,
                Err(error) => Some(native::too_long(&error)),
            };
            if let Some(native) = native
                && natives.send(native).await.is_err()
            {
                return;
            }
        }
        if ended {
            if let Some(native) = lines.finish().and_then(|line| reader.line(&line)) {
                let _ = natives.send(native).await;
            }
            let _ = natives.send(Native::End).await;
            return;
        }
    }
}

/// A warm process.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) running: Running,
    pub(crate) key: Key,
    pub(crate) fit: Option<Fit>,
    pub(crate) session: Option<TransportSession>,
    pub(crate) last_used: Instant,
    pub(crate) isolated: bool,
    generations: u32,
    server: Option<Server>,
    next_id: u64,
    _place: OwnedSemaphorePermit,
}

impl Kept {
    /// A process that was told nothing yet. `catalogue` is published in-band when given.
    pub(crate) fn new(
        running: Running,
        key: Key,
        catalogue: Option<&Catalogue>,
        place: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            running,
            key,
            fit: None,
            session: None,
            last_used: Instant::now(),
            isolated: false,
            generations: 0,
            server: catalogue.map(|catalogue| Server::new(catalogue, Policy::Inert)),
            next_id: 0,
            _place: place,
        }
    }

    /// Whether it serves no more.
    pub(crate) fn is_spent(&mut self) -> bool {
        let ended = self.running.group.exit().is_some();
        // An idle process prints nothing; whatever it did print is its end or something that nobody asked for.
        let said = self.running.natives.try_recv().is_ok();
        ended || said || self.generations >= GENERATIONS_LIMIT
    }

    /// Writes everything that the next generation needs in one burst. The lane has to be armed before. Returns how many
    /// control answers will come.
    pub(crate) fn write_burst(&mut self, wanted: &Fit, catalogue: Option<&Catalogue>) -> Result<usize> {
        let mut burst = Vec::new();
        let mut controls = 0;
        let mut request = |burst: &mut Vec<u8>, request: &Value, next_id: &mut u64| {
            *next_id += 1;
            controls += 1;
            burst.extend_from_slice(&control::request(&format!("turnpass-{next_id}"), request));
        };
        if self.fit.is_none() {
            request(&mut burst, &initialize(&wanted.system, catalogue), &mut self.next_id);
        }
        for refit in wanted.refit(self.fit.as_ref()) {
            request(&mut burst, &refit, &mut self.next_id);
        }
        let uuid = uuid::Uuid::new_v4();
        burst.extend_from_slice(&control::user_line(PLACEHOLDER, &uuid.to_string()));
        self.running.group.stdin().write(burst)?;
        self.fit = Some(wanted.clone());
        self.generations += 1;
        self.last_used = Instant::now();
        Ok(controls)
    }

    /// Serves one placeholder turn that never leaves the machine, so that the first real one is as fast as any later.
    pub(crate) async fn prime(&mut self, wanted: &Fit, catalogue: Option<&Catalogue>) -> Result<Primed> {
        self.running.lane.admission().arm_local();
        self.write_burst(wanted, catalogue)?;
        let (mut answered, mut result) = (false, None);
        while !(answered && result.is_some()) {
            tokio::select! {
                arrival = self.running.arrivals.recv() => {
                    answered |= matches!(arrival, Some(Arrival::AnsweredLocally));
                }
                native = self.running.natives.recv() => match native {
                    Some(Native::Init(InitVerdict::Isolated)) => self.isolated = true,
                    Some(Native::Init(InitVerdict::BuiltinPlugins(plugins))) => return Ok(Primed::Relaunch(plugins)),
                    Some(Native::Init(InitVerdict::Refused(error)) | Native::Broken(error)) => return Err(error),
                    Some(Native::Result(verdict)) => result = Some(verdict),
                    Some(Native::Control { refused: true, .. }) => return Err(refused_control()),
                    Some(ask @ (Native::Mcp { .. } | Native::Unsupported { .. })) => {
                        respond(self.running.group.stdin(), self.server.as_mut(), &ask)?;
                    }
                    Some(Native::End) | None => {
                        return Err(Error::new(ErrorCode::ProcessExit, "the CLI ended while it was being primed"));
                    }
                    Some(_) => {}
                },
            }
        }
        match result {
            Some(Verdict::Completed) => Ok(Primed::Ready),
            Some(Verdict::Failed(failure)) => Err(super::completion::native_failure(&failure)),
            _ => Err(Error::new(ErrorCode::ProtocolResult, "the CLI did not end its priming turn well")),
        }
    }

    /// Lends the process to a generation.
    pub(crate) fn seat<'a>(&'a mut self, controls: usize, respond: &'a mut Responder) -> Seat<'a> {
        let running = &mut self.running;
        *respond = Responder { stdin: running.group.stdin().clone(), server: self.server.take() };
        Seat {
            exit: Box::pin(running.group.wait()),
            lane: &running.lane,
            arrivals: &mut running.arrivals,
            natives: &mut running.natives,
            respond,
            controls,
            isolated: self.isolated,
        }
    }

    /// Takes back what [`Kept::seat`] lent.
    pub(crate) fn take_back(&mut self, responder: Responder) {
        self.server = responder.server;
    }
}

/// How priming ended.
#[derive(Debug)]
pub(crate) enum Primed {
    /// The process is ready.
    Ready,
    /// Built-in plugins slipped through: start another one with these disabled.
    Relaunch(Vec<String>),
}

/// Answers what the CLI asks in the middle of a generation.
#[derive(Debug)]
pub(crate) struct Responder {
    stdin: Stdin,
    server: Option<Server>,
}

impl Responder {
    /// For a process without in-band tools.
    pub(crate) fn new(stdin: Stdin) -> Self {
        Self { stdin, server: None }
    }

    /// Answers one request.
    pub(crate) fn respond(&mut self, ask: &Native) -> Result<()> {
        respond(&self.stdin, self.server.as_mut(), ask)
    }
}

fn respond(stdin: &Stdin, server: Option<&mut Server>, ask: &Native) -> Result<()> {
    let line = match ask {
        Native::Mcp { id, message } => match server {
            Some(server) => in_band::answer(server, id, message),
            None => control::refusal(id, "no such server"),
        },
        Native::Unsupported { id } => control::refusal(id, "unsupported"),
        _ => return Ok(()),
    };
    stdin.write(Bytes::from(line))?;
    Ok(())
}

fn refused_control() -> Error {
    Error::new(ErrorCode::VersionIncompatible, "the CLI refused to take over a setting of the request")
}

/// The first control request of a process. The prompt is not kept as a snapshot, since later changes would then be
/// accepted and ignored (2.1.294, 2.1.310, 2.1.332); an empty list is the only way to have none.
fn initialize(system: &str, catalogue: Option<&Catalogue>) -> Value {
    let prompt: Vec<&str> = if system.is_empty() { Vec::new() } else { vec![system] };
    let mut request = json!({"subtype": "initialize", "systemPrompt": prompt, "systemPromptSnapshot": false});
    if let Some(catalogue) = catalogue {
        request["sdkMcpServers"] = json!([MCP_SERVER]);
        let manifest: Value = serde_json::from_str(catalogue.manifest().get()).unwrap_or_default();
        request["sdkMcpServerManifests"] = json!({MCP_SERVER: manifest});
    }
    request
}
