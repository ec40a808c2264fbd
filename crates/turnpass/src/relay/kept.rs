//! One warm CLI process: its lane, its lines, what it is set to. A value whose drop ends all of it.

use std::time::Duration;

use bytes::BytesMut;
use serde_json::value::{RawValue, to_raw_value};
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::completion::FINALISATION_GRACE;
use super::exchange::Seat;
use super::fit::{Fit, Key, Refit};
use super::lane::{Arrival, Lane};
use super::native::{self, Native, NativeReader};
use crate::cli::isolation::{Expected, InitVerdict};
use crate::cli::launch::{PLACEHOLDER, refused_option};
use crate::cli::places::Place;
use crate::cli::private_dir::PrivateDir;
use crate::cli::starts::Turn;
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ChildGroup, EndPolicy, Exit, Stdin, Stdout};
use crate::record::RawFile;
use crate::request::TransportSession;
use crate::tools::{Catalogue, Policy, Server, in_band};
use crate::wire::control::{self, ControlRequest, UserContent, UserLine};
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
/// Longest wait for the last words of a process that has ended.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(200);

/// The parts of any running CLI process that a generation needs.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) group: ChildGroup,
    pub(crate) lane: Lane,
    pub(crate) arrivals: mpsc::Receiver<Arrival>,
    pub(crate) natives: mpsc::Receiver<Native>,
    /// The right to be starting; given back when the CLI's first request comes, since it has renewed its sign-in by then.
    pub(crate) starting: Option<Turn>,
    _reading: AbortOnDropHandle<()>,
    /// Ends when the process is gone and its files are removed, also after a drop.
    removed: JoinHandle<()>,
}

impl Running {
    /// Takes over a started process. Among `tasks` is its end from here on, so whoever waits for them waits for it too.
    pub(crate) fn new(
        (mut group, raw): (ChildGroup, Option<RawFile>),
        (lane, arrivals): (Lane, mpsc::Receiver<Arrival>),
        dir: PrivateDir,
        expected: Expected,
        line_bytes: usize,
        tasks: &TaskTracker,
    ) -> Result<Self> {
        let gone = group.gone();
        let removed = tasks.spawn(async move {
            // A process that still runs could make files anew.
            gone.await;
            drop(dir);
        });
        let stdout = group
            .take_stdout()
            .ok_or_else(|| Error::new(ErrorCode::Internal, "a new process has no output"))?;
        let (sender, natives) = mpsc::channel(NATIVES);
        let reading = tokio::spawn(read_lines(
            stdout,
            NativeReader::new(expected),
            (line_bytes, raw),
            sender,
        ));
        Ok(Self {
            group,
            lane,
            arrivals,
            natives,
            starting: None,
            _reading: AbortOnDropHandle::new(reading),
            removed,
        })
    }

    /// Lends the process to a generation.
    pub(crate) fn seat<'a>(
        &'a mut self,
        server: Option<&'a mut Server>,
        controls: usize,
        isolated: bool,
    ) -> Seat<'a> {
        let exit = Box::pin(self.group.wait());
        let asked = Asked {
            stdin: self.group.stdin().clone(),
            server,
        };
        let Self {
            lane,
            arrivals,
            natives,
            starting,
            ..
        } = self;
        Seat {
            lane,
            arrivals,
            natives,
            starting,
            exit,
            asked,
            controls,
            isolated,
        }
    }

    /// The cause of an early end, where only the CLI's last words tell it: an option that it does not know fails every
    /// start, so it is no end that may be tried again (bug 23).
    pub(crate) async fn cause(&self, error: Error) -> Error {
        if error.code() != ErrorCode::ProcessExit {
            return error;
        }
        refused_option(&self.group.last_words(LAST_WORDS_LIMIT).await).unwrap_or(error)
    }

    /// Ends the process within the policy's bounds, then removes its files.
    pub(crate) async fn end(self, policy: EndPolicy) -> Result<Exit> {
        let exit = self.group.end(policy).await?;
        // Its files are removed; the task is dropped early only with its runtime, and they go with it.
        let _ = self.removed.await;
        Ok(exit)
    }
}

async fn read_lines(
    mut stdout: Stdout,
    mut reader: NativeReader,
    (line_bytes, mut raw): (usize, Option<RawFile>),
    natives: mpsc::Sender<Native>,
) {
    let mut lines = LineSplitter::new(line_bytes);
    loop {
        let buffer = lines.read_buf();
        let before = buffer.len();
        let read = stdout.read_buf::<BytesMut>(buffer).await;
        let ended = !matches!(read, Ok(1..));
        if let Some(raw) = &mut raw {
            raw.write(&buffer[before..]);
        }
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
    place: Place,
}

impl Kept {
    /// A process that was told nothing yet. `catalogue` is published in-band when given.
    pub(crate) fn new(
        running: Running,
        key: Key,
        catalogue: Option<&Catalogue>,
        place: Place,
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
            place,
        }
    }

    /// Whether it serves no more.
    pub(crate) fn is_spent(&mut self) -> bool {
        let why = self.spent();
        if let Some(why) = why {
            tracing::debug!(
                why,
                generations = self.generations,
                "a kept process serves no more"
            );
        }
        why.is_some()
    }

    fn spent(&mut self) -> Option<&'static str> {
        if self.running.group.exit().is_some() {
            return Some("it ended");
        }
        if self.generations >= GENERATIONS_LIMIT {
            return Some("it served as many generations as one may");
        }
        // An idle process prints nothing but the last answers to what it was told; anything else is its end or something
        // that nobody asked for.
        while let Ok(said) = self.running.natives.try_recv() {
            if !matches!(said, Native::Control { refused: false }) {
                return Some("it said something while it was idle");
            }
        }
        None
    }

    /// Writes everything that the next generation needs in one burst. The lane has to be armed before. Returns how many
    /// control answers will come.
    pub(crate) fn write_burst(
        &mut self,
        wanted: &Fit,
        catalogue: Option<&Catalogue>,
    ) -> Result<usize> {
        let mut burst = Burst::default();
        if self.fit.is_none() {
            burst.initialize(&mut self.next_id, &wanted.system, catalogue);
        }
        for refit in wanted.refit(self.fit.as_ref()) {
            match refit {
                Refit::Prompt(prompt) if self.fit.is_some() => {
                    burst.request(
                        &mut self.next_id,
                        &ControlRequest::SetModel {
                            model: None,
                            system_prompt: Some(prompt),
                        },
                    );
                }
                Refit::Prompt(_) => {}
                Refit::Settings(settings) => {
                    let settings =
                        to_raw_value(&settings).map_err(|_| internal("settings are not JSON"))?;
                    burst.request(
                        &mut self.next_id,
                        &ControlRequest::ApplyFlagSettings {
                            settings: &settings,
                        },
                    );
                }
            }
        }
        let uuid = uuid::Uuid::new_v4().to_string();
        let line = UserLine {
            uuid: &uuid,
            content: UserContent::Text(PLACEHOLDER),
            asks: true,
        };
        burst
            .bytes
            .extend_from_slice(control::user_line(&line).as_bytes());
        self.running.group.stdin().write(burst.bytes)?;
        self.fit = Some(wanted.clone());
        self.generations += 1;
        self.last_used = Instant::now();
        Ok(burst.controls)
    }

    /// Serves one placeholder turn that never leaves the machine, so that the first real one is as fast as any later.
    pub(crate) async fn prime(
        &mut self,
        wanted: &Fit,
        catalogue: Option<&Catalogue>,
    ) -> Result<Primed> {
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
                        let error = Error::new(ErrorCode::ProcessExit, "the CLI ended while it was being primed");
                        return Err(self.running.cause(error).await);
                    }
                    Some(_) => {}
                },
            }
        }
        self.running.starting = None;
        match result {
            Some(Verdict::Completed) => Ok(Primed::Ready),
            Some(Verdict::Failed(failure)) => Err(super::completion::native_failure(&failure)),
            _ => Err(Error::new(
                ErrorCode::ProtocolResult,
                "the CLI did not end its priming turn well",
            )),
        }
    }

    /// Waits, within the grace, until the CLI has ended a turn that nobody waits for any more. Its request is answered
    /// here if it still comes.
    pub(crate) async fn finish_turn(&mut self) -> bool {
        let ended = async {
            loop {
                tokio::select! {
                    Some(arrival) = self.running.arrivals.recv() => drop(arrival),
                    native = self.running.natives.recv() => match native {
                        Some(Native::Result(verdict)) => return verdict == Verdict::Completed,
                        Some(Native::Broken(_) | Native::End) | None => return false,
                        Some(Native::Init(InitVerdict::Isolated)) => self.isolated = true,
                        // A setting that was refused is not what the process is thought to be set to.
                        Some(Native::Init(_) | Native::Control { refused: true }) => return false,
                        Some(_) => {}
                    },
                }
            }
        };
        tokio::time::timeout(FINALISATION_GRACE, ended)
            .await
            .unwrap_or(false)
    }

    /// The process alone, and its place in the memory budget.
    pub(crate) fn into_parts(self) -> (Running, Place) {
        (self.running, self.place)
    }

    /// Lends the process to a generation.
    pub(crate) fn seat(&mut self, controls: usize) -> Seat<'_> {
        self.running
            .seat(self.server.as_mut(), controls, self.isolated)
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
pub(crate) struct Asked<'a> {
    stdin: Stdin,
    server: Option<&'a mut Server>,
}

impl Asked<'_> {
    /// Answers one request.
    pub(crate) fn answer(&mut self, ask: &Native) -> Result<()> {
        respond(&self.stdin, self.server.as_deref_mut(), ask)
    }
}

fn respond(stdin: &Stdin, server: Option<&mut Server>, ask: &Native) -> Result<()> {
    let line = match ask {
        Native::Mcp { id, message } => {
            match server.map(|server| server.handle(message.get().as_bytes()).message) {
                // A notification has no answer of its own, and the CLI still wants its control request answered.
                Some(answer) => {
                    let answer = answer.unwrap_or_else(|| EMPTY_ANSWER.to_vec());
                    let answer = String::from_utf8(answer)
                        .ok()
                        .and_then(|text| RawValue::from_string(text).ok());
                    let answer =
                        answer.ok_or_else(|| internal("the tool server's answer is not JSON"))?;
                    control::mcp_response(id, &answer)
                }
                None => control::control_error(id, "no MCP server of that name is here"),
            }
        }
        Native::Unsupported { id } => control::control_error(id, "unsupported"),
        _ => return Ok(()),
    };
    stdin.write(line.into_bytes())?;
    Ok(())
}

/// What the CLI is answered where MCP itself has no answer.
const EMPTY_ANSWER: &[u8] = br#"{"jsonrpc":"2.0","id":0,"result":{}}"#;

fn internal(what: &str) -> Error {
    Error::new(ErrorCode::Internal, what)
}

fn refused_control() -> Error {
    Error::new(
        ErrorCode::VersionIncompatible,
        "the CLI refused to take over a setting of the request",
    )
}

/// Lines that are written at once.
#[derive(Default)]
struct Burst {
    bytes: Vec<u8>,
    controls: usize,
}

impl Burst {
    fn request(&mut self, next_id: &mut u64, request: &ControlRequest<'_>) {
        *next_id += 1;
        self.controls += 1;
        let line = control::control_request(&format!("turnpass-{next_id}"), request);
        self.bytes.extend_from_slice(line.as_bytes());
    }

    fn initialize(&mut self, next_id: &mut u64, system: &str, catalogue: Option<&Catalogue>) {
        *next_id += 1;
        self.controls += 1;
        let line = in_band::initialize(&format!("turnpass-{next_id}"), system, catalogue);
        self.bytes.extend_from_slice(line.as_bytes());
    }
}
