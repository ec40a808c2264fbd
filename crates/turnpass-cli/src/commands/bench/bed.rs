//! A test bed: a stage, a provider on it, and one measured generation.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use turnpass::conversation::Message;
use turnpass::event::Done;
use turnpass::pool::PoolTransport;
use turnpass::relay::{PROCESS_BYTES, RelayTransport};
use turnpass::request::TransportSession;
use turnpass::{Event, Provider, Request};
use turnpass_lab::upstream::{Recorded, Upstream, WaitTimeout};

use super::control::Direct;
use super::figures::{Row, Spread};
use super::talk;
use super::tap::Taps;
use crate::context;
use crate::exit::Fault;
use crate::settings::{Process, Settings};
use crate::stage::{self, Player, Stage};

/// Generations that are not counted: a CLI's first three are slower than those that follow (all versions).
const UNCOUNTED: usize = 4;
/// Rest after the uncounted ones: a spare process is started beside them, which takes a core for a third of a second.
const SETTLE: Duration = Duration::from_millis(1500);

/// The header by which a CLI process is told from another.
pub(super) const SESSION: &str = "x-claude-code-session-id";

/// What all scenes start from.
#[derive(Clone, Debug)]
pub(super) struct Ground {
    pub(super) settings: Settings,
    pub(super) scripted: bool,
    pub(super) requests: usize,
}

/// How a bed is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Make {
    pub(super) process: Process,
    /// Puts a tap between turnpass and the CLI.
    pub(super) tap: bool,
    pub(super) spares: usize,
    /// By the pool, not the relay.
    pub(super) pool: bool,
}

impl Make {
    /// As a host has it by default.
    pub(super) const WARM: Self = Self {
        process: Process::Warm,
        tap: false,
        spares: 1,
        pool: false,
    };
    /// The pool, as a host has it by default.
    pub(super) const POOL: Self = Self {
        pool: true,
        ..Self::WARM
    };
    /// A process for each request.
    pub(super) const COLD: Self = Self {
        process: Process::PerRequest,
        ..Self::WARM
    };
    /// One process alone, with a tap.
    pub(super) const TAPPED: Self = Self {
        tap: true,
        spares: 0,
        ..Self::WARM
    };
}

/// A stage, a provider, and the control beside it.
pub(super) struct Bed {
    pub(super) stage: Stage,
    pub(super) provider: Provider,
    pub(super) direct: Direct,
    pub(super) taps: Option<Taps>,
    make: Make,
}

impl Bed {
    /// Sets a stage and a provider that has started nothing.
    pub(super) async fn new(ground: &Ground, make: Make) -> Result<Self, Fault> {
        let settings = stage::laboratory(ground.settings.clone(), None, Some(make.process));
        let mut stage = Stage::set(&settings, ground.scripted).await?;
        let taps = match (make.tap, stage.settings.claude_path.clone()) {
            (true, Some(claude)) => {
                let (taps, claude) = Taps::install(&stage.folder("tap")?, &claude)?;
                stage.settings.claude_path = Some(claude);
                Some(taps)
            }
            _ => None,
        };
        let direct = Direct::new(&stage.upstream)?;
        let provider = match make.pool {
            true => Provider::new(pool(&stage, make)?),
            false => Provider::new(transport(&stage, make)?),
        };
        Ok(Self {
            stage,
            provider,
            direct,
            taps,
            make,
        })
    }

    /// Another provider on the same stage, as a host that was started anew.
    pub(super) fn transport(&self) -> Result<RelayTransport, Fault> {
        transport(&self.stage, self.make)
    }

    /// Who plays.
    pub(super) fn player(&self) -> Player {
        self.stage.player.clone()
    }

    /// A request of this host: the system prompt, ten tools and these messages.
    pub(super) fn request(&self, messages: Vec<Message>) -> Request {
        let mut request = Request::new(self.stage.settings.model.as_str(), messages);
        request.system = talk::SYSTEM.to_owned();
        request.tools = talk::tools(10, "", 300);
        request
    }

    /// One generation on the bed's own provider.
    pub(super) async fn generate(&self, request: Request) -> Result<Seen, Fault> {
        generate(&self.provider, &self.stage.upstream, request, None).await
    }

    /// The control, with the same body.
    pub(super) async fn control(&self, like: &Recorded) -> Result<Seen, Fault> {
        self.direct.send(&self.stage.upstream, like).await
    }

    /// Brings a kept process, and the control's connection, to where they are in the middle of a session.
    pub(super) async fn warm_up(&self, words: &mut talk::Words) -> Result<(), Fault> {
        for _ in 0..UNCOUNTED {
            let mut messages = words.history(talk::PAIRS, talk::HISTORY_BYTES);
            messages.push(Message::user(talk::SHORT));
            let seen = self.generate(self.request(messages)).await?;
            self.control(&seen.recorded).await?;
            if self.make.process == Process::PerRequest {
                return Ok(());
            }
        }
        tokio::time::sleep(SETTLE).await;
        Ok(())
    }

    /// Ends what the provider owns.
    pub(super) async fn clear(self) -> Result<(), Fault> {
        Ok(self.provider.shutdown().await?)
    }
}

fn pool(stage: &Stage, make: Make) -> Result<PoolTransport, Fault> {
    let mut options = context::pool_options(&stage.settings);
    options.spare = make.spares > 0;
    options.memory_budget_bytes = 16 * PROCESS_BYTES;
    // Of its own: the person's is for what they use.
    options.state_dir = Some(stage.folder("state")?);
    Ok(PoolTransport::new(options)?)
}

fn transport(stage: &Stage, make: Make) -> Result<RelayTransport, Fault> {
    let mut options = context::relay_options(&stage.settings);
    options.spares = make.spares;
    Ok(RelayTransport::new(options)?)
}

/// One generation, to its end. `mark` is a text of this request alone, for generations that run beside one another.
pub(super) async fn generate(
    provider: &Provider,
    upstream: &Upstream,
    mut request: Request,
    mark: Option<&str>,
) -> Result<Seen, Fault> {
    if let Some(mark) = mark {
        request.session = TransportSession(mark.to_owned());
    }
    let mut watch = Watch::start(upstream);
    let mut generation = provider.generate(request);
    while let Some(event) = generation.next().await {
        match event? {
            Event::Text { .. } => watch.text(Instant::now()),
            Event::Done(done) => watch.done = Some(done),
            _ => {}
        }
    }
    watch.end(upstream, mark).await
}

/// The clock of one generation.
pub(super) struct Watch {
    began: Instant,
    before: u64,
    texts: Vec<Instant>,
    done: Option<Done>,
}

impl Watch {
    /// Starts it.
    pub(super) fn start(upstream: &Upstream) -> Self {
        let before = upstream.requests().len() as u64;
        Self {
            began: Instant::now(),
            before,
            texts: Vec::new(),
            done: None,
        }
    }

    /// A piece of text came.
    pub(super) fn text(&mut self, at: Instant) {
        self.texts.push(at);
    }

    /// The answer was whole; finds what the upstream saw of it.
    pub(super) async fn end(self, upstream: &Upstream, mark: Option<&str>) -> Result<Seen, Fault> {
        let ended = Instant::now();
        let recorded = upstream
            .wait_for("the end of the answer", |seen| {
                is_of(seen, self.before, mark) && seen.reply.ending.is_some()
            })
            .await
            .map_err(unseen)?;
        let arrived = recorded.body_complete_at.unwrap_or(recorded.arrived_at);
        let last = recorded.reply.last_byte_at.unwrap_or(arrived);
        let whole = ended - self.began;
        let requests = upstream.requests();
        let upstream_requests = requests
            .iter()
            .filter(|seen| is_of(seen, self.before, mark))
            .count();
        Ok(Seen {
            to_upstream: arrived.saturating_duration_since(self.began),
            first_text: self.texts.first().map(|at| *at - self.began),
            net: whole.saturating_sub(last.saturating_duration_since(arrived)),
            began: self.began,
            texts: self.texts,
            done: self.done,
            upstream_requests,
            recorded,
        })
    }
}

/// Whether a request is one of a generation that began after `before` requests.
pub(super) fn is_of(seen: &Recorded, before: u64, mark: Option<&str>) -> bool {
    let marked = |mark: &str| std::str::from_utf8(&seen.body).is_ok_and(|body| body.contains(mark));
    seen.number > before && seen.is_messages() && mark.is_none_or(marked)
}

/// The upstream did not see what it has to see.
pub(super) fn unseen(error: WaitTimeout) -> Fault {
    Fault::system(error.to_string(), "Try again on a quieter machine.")
}

/// One generation, measured.
pub(super) struct Seen {
    pub(super) began: Instant,
    /// To the last byte of the request at the upstream.
    pub(super) to_upstream: Duration,
    pub(super) first_text: Option<Duration>,
    /// The whole less the time that the upstream took for its answer.
    pub(super) net: Duration,
    pub(super) texts: Vec<Instant>,
    pub(super) done: Option<Done>,
    pub(super) upstream_requests: usize,
    pub(super) recorded: Recorded,
}

impl Seen {
    /// From the first byte of each delta at the upstream to its event at the host.
    pub(super) fn deltas(&self) -> impl Iterator<Item = Duration> + '_ {
        let written = self.recorded.reply.events.iter();
        let written = written.filter(|event| &*event.name == "content_block_delta");
        written
            .zip(&self.texts)
            .map(|(written, got)| got.saturating_duration_since(written.at))
    }
}

/// The row of these generations.
pub(super) fn row(who: &str, all: &[Seen]) -> Row {
    let sessions: BTreeSet<_> = all
        .iter()
        .filter(|seen| seen.done.is_some())
        .filter_map(|seen| seen.recorded.header(SESSION))
        .collect();
    Row {
        generations: all.len(),
        upstream_requests: all.iter().map(|seen| seen.upstream_requests).sum(),
        processes: sessions.len(),
        ..Row::new(who)
    }
    .with(
        "to_upstream",
        Spread::of(all.iter().map(|seen| seen.to_upstream)),
    )
    .with(
        "first_text",
        Spread::of(all.iter().filter_map(|seen| seen.first_text)),
    )
    .with("net", Spread::of(all.iter().map(|seen| seen.net)))
}
