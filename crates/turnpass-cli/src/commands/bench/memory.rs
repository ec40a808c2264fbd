//! Scenes of many at once, and what a host's own process takes meanwhile.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;

use futures_util::future::{join_all, try_join_all};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use turnpass::conversation::Message;
use turnpass::pool::{PoolOptions, PoolTransport};
use turnpass::relay::{LoopbackUrl, PROCESS_BYTES, RelayOptions, RelayTransport};
use turnpass::request::TransportSession;
use turnpass::{Event, Provider, Request};
use turnpass_lab::rig::{descendants, rss_bytes};
use turnpass_lab::upstream::Recorded;

use super::bed::{self, Bed, Ground, Make, SESSION, row};
use super::figures::{Goal, Outcome, Row};
use super::scenes::one_each;
use super::talk::{self, Words};
use crate::exit::{Exit, Fault};

/// Streams at once.
const STREAMS: usize = 64;
/// The place in each answer at which all streams meet.
const GATE: &str = "all";
/// Bytes of each answer: half before the gate, half behind it.
const ANSWER_BYTES: usize = 100_000;

/// Four at once.
pub(super) async fn four(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let mut words = Words::new();
    let bed = Bed::new(ground, Make::WARM).await?;
    bed.warm_up(&mut words).await?;
    let (mut first, mut warm, mut direct) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ground.requests {
        let marks: Vec<String> = (0..4).map(|_| words.mark()).collect();
        let asked = marks.iter().map(|mark| {
            let mut messages = words.history(talk::PAIRS, talk::HISTORY_BYTES);
            messages.push(Message::user(format!("{mark} {}", talk::SHORT)));
            let request = bed.request(messages);
            bed::generate(&bed.provider, &bed.stage.upstream, request, Some(mark))
        });
        let seen = try_join_all(asked.collect::<Vec<_>>()).await?;
        if round == 0 {
            first.extend(seen);
            continue;
        }
        let controls = seen.iter().zip(&marks).map(|(seen, mark)| {
            bed.direct
                .send_marked(&bed.stage.upstream, &seen.recorded, Some(mark))
        });
        direct.extend(try_join_all(controls.collect::<Vec<_>>()).await?);
        warm.extend(seen);
    }
    bed.clear().await?;
    let rows = vec![
        row("direct", &direct),
        row("warm, first", &first),
        row("warm", &warm),
    ];
    Ok(vec![Outcome {
        scene: "four".to_owned(),
        about: "four conversations at once; the first round starts the processes; ms, median / p95 (least)",
        goals: vec![one_each(&rows[1..])],
        rows,
        ..Outcome::default()
    }])
}

/// Sixty-four streams at once, in a process that does nothing else.
pub(super) async fn streams(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let scripted = Ground {
        scripted: true,
        ..ground.clone()
    };
    let bed = Bed::new(&scripted, Make::WARM).await?;
    let mut host = Host::start(&bed, &[])?;
    let mut rss = Vec::new();
    for (said, asked) in [("built", "one"), ("idle", "all")] {
        host.heard(said).await?;
        rss.push(host.rss());
        host.say(asked).await?;
    }
    host.heard("streaming").await?;
    rss.push(host.rss());
    let children = descendants(host.pid()).len();
    bed.stage.upstream.release(GATE);
    host.heard("done").await?;
    rss.push(host.rss());
    let peak = host.peak();
    host.say("end").await?;
    host.end().await?;
    let served = bed.stage.upstream.messages();
    bed.clear().await?;
    let session = |seen: &'_ Recorded| seen.header(SESSION).map(str::to_owned);
    let sessions: BTreeSet<_> = served.iter().filter_map(session).collect();
    let row = Row {
        generations: STREAMS + 1,
        upstream_requests: served.len(),
        processes: sessions.len(),
        ..Row::new("scripted CLI")
    }
    // Each CLI process has a small one beside it that ends its group when the host is killed.
    .value(
        "children",
        f64::from(u32::try_from(children).unwrap_or(u32::MAX)),
    )
    .value("built_mb", rss[0])
    .value("idle_mb", rss[1])
    .value("streaming_mb", rss[2])
    .value("after_mb", rss[3])
    .value("peak_mb", peak);
    let goals = vec![
        Goal::at_most("resident, idle, MB", 15.0, rss[1]),
        Goal::at_most("resident, 64 streams, MB", 40.0, rss[2]),
        one_each(std::slice::from_ref(&row)),
    ];
    Ok(vec![Outcome {
        scene: "streams".to_owned(),
        about: "64 streams at once, 40 KB of history and 100 KB of answer each; MB of the host's own process",
        rows: vec![row],
        goals,
        ..Outcome::default()
    }])
}

/// Conversations that rest in a pool.
const CONVERSATIONS: usize = 32;

/// What a conversation that rests takes in the host's own process, in one that does nothing else.
pub(super) async fn pool(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let scripted = Ground {
        scripted: true,
        ..ground.clone()
    };
    let bed = Bed::new(&scripted, Make::POOL).await?;
    let mut host = Host::start(&bed, &["--pool"])?;
    let mut rss = Vec::new();
    for (said, asked) in [("built", "one"), ("one", "all"), ("idle", "end")] {
        host.heard(said).await?;
        rss.push(host.rss());
        host.say(asked).await?;
    }
    host.end().await?;
    let served = bed.stage.upstream.messages();
    bed.clear().await?;
    #[allow(clippy::cast_precision_loss, reason = "some dozens")]
    let each = (rss[2] - rss[1]) / (CONVERSATIONS - 1) as f64;
    let row = Row {
        generations: CONVERSATIONS,
        upstream_requests: served.len(),
        processes: CONVERSATIONS,
        ..Row::new("scripted CLI")
    }
    .value("built_mb", rss[0])
    .value("one_mb", rss[1])
    .value("all_mb", rss[2])
    .value("each_mb", each);
    Ok(vec![Outcome {
        scene: "pool-memory".to_owned(),
        about: "32 conversations that rest, 40 KB of history each; MB of the host's own process",
        goals: vec![
            Goal::at_most("a conversation that rests, MB", 1.0, each),
            one_each(std::slice::from_ref(&row)),
        ],
        rows: vec![row],
        ..Outcome::default()
    }])
}

/// The process that only hosts a provider.
struct Host {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Host {
    fn start(bed: &Bed, args: &[&str]) -> Result<Self, Fault> {
        let failed =
            |error: std::io::Error| Fault::system(format!("no host: {error}"), "Try again.");
        let settings = &bed.stage.settings;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("bench-host").arg(bed.stage.upstream.url());
        command.args(settings.lab_home.iter().chain(&settings.claude_path));
        command.args(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let absent = || Fault::system("a host has no pipes", "Try again.");
        let stdin = child.stdin.take().ok_or_else(absent)?;
        let stdout = child.stdout.take().ok_or_else(absent)?;
        Ok(Self {
            child,
            stdin,
            lines: BufReader::new(stdout).lines(),
        })
    }

    fn pid(&self) -> i32 {
        self.child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .unwrap_or_default()
    }

    /// Resident memory in MB.
    fn rss(&self) -> f64 {
        megabytes(rss_bytes(self.pid()).unwrap_or_default())
    }

    /// The most that it ever was, in MB, where the system says it.
    fn peak(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        megabytes(kilobytes.unwrap_or_default() * 1024)
    }

    async fn heard(&mut self, word: &str) -> Result<(), Fault> {
        match self.lines.next_line().await {
            Ok(Some(line)) if line == word => Ok(()),
            other => Err(Fault::system(
                format!("the host said {other:?} in place of {word}"),
                "Try again.",
            )),
        }
    }

    async fn say(&mut self, word: &str) -> Result<(), Fault> {
        let line = format!("{word}\n");
        let written = self.stdin.write_all(line.as_bytes()).await;
        written.map_err(|error| Fault::system(format!("the host is gone: {error}"), "Try again."))
    }

    async fn end(mut self) -> Result<(), Fault> {
        let ended = self.child.wait().await;
        match ended {
            Ok(status) if status.success() => Ok(()),
            other => Err(Fault::system(
                format!("the host ended with {other:?}"),
                "Try again.",
            )),
        }
    }
}

fn megabytes(bytes: u64) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "memory of a process")]
    let bytes = bytes as f64;
    bytes / 1e6
}

/// The arguments of the hidden command.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The upstream's address
    upstream: String,
    /// The CLI's home
    home: PathBuf,
    /// The CLI
    claude: PathBuf,
    /// Keep conversations in a pool
    #[arg(long)]
    pool: bool,
}

/// Runs the hidden command: a provider and nothing else. It says how far it is and waits to be told to go on.
pub(crate) async fn host(args: Args) -> Result<Exit, Fault> {
    if args.pool {
        return pool_host(args).await;
    }
    let transport = RelayTransport::new(RelayOptions {
        claude_path: Some(args.claude),
        lab_upstream: Some(LoopbackUrl::parse(&args.upstream)?),
        lab_home: Some(args.home),
        memory_budget_bytes: PROCESS_BYTES * STREAMS as u64,
        spares: 0,
        ..RelayOptions::default()
    })?;
    let provider = Provider::new(transport);
    let mut words = Words::new();
    next("built")?;
    stream(&provider, talk::SHORT, &mut words, None).await?;
    next("idle")?;
    let half = ANSWER_BYTES / 2;
    let prompt =
        format!("[[text-size {half}]] [[hold {GATE}]] [[text-size {half}]] [[chunk 200 ms 0]]");
    // The first text of each stream takes a place; when all are taken, every stream is under way.
    let started = tokio::sync::Semaphore::new(0);
    let streams: Vec<_> = (0..STREAMS)
        .map(|_| stream(&provider, &prompt, &mut words, Some(&started)))
        .collect();
    let all_started = async {
        // Never closed, so this only waits.
        let _ = started.acquire_many(STREAMS as u32).await;
        super::super::print("streaming\n").map(|_| ())
    };
    let (ended, told) = tokio::join!(join_all(streams), all_started);
    told?;
    ended.into_iter().collect::<Result<Vec<()>, _>>()?;
    next("done")?;
    provider.shutdown().await?;
    Ok(Exit::Done)
}

/// Says how far it is, and waits to be told to go on.
fn next(said: &str) -> Result<usize, Fault> {
    super::super::print(&format!("{said}\n"))?;
    let mut line = String::new();
    // Nothing else is going on while this process is looked at.
    let read = tokio::task::block_in_place(|| std::io::stdin().read_line(&mut line));
    read.map_err(|error| Fault::system(format!("nobody asks: {error}"), "Try again."))
}

/// A pool whose conversations rest.
async fn pool_host(args: Args) -> Result<Exit, Fault> {
    let provider = Provider::new(PoolTransport::new(PoolOptions {
        claude_path: Some(args.claude),
        lab_upstream: Some(LoopbackUrl::parse(&args.upstream)?),
        lab_home: Some(args.home),
        memory_budget_bytes: PROCESS_BYTES * CONVERSATIONS as u64,
        spare: false,
        ..PoolOptions::default()
    })?);
    let mut words = Words::new();
    next("built")?;
    stream(&provider, talk::SHORT, &mut words, None).await?;
    next("one")?;
    for _ in 1..CONVERSATIONS {
        stream(&provider, talk::SHORT, &mut words, None).await?;
    }
    next("idle")?;
    provider.shutdown().await?;
    Ok(Exit::Done)
}

/// One stream of a conversation of its own, read to its end.
fn stream<'a>(
    provider: &Provider,
    prompt: &str,
    words: &mut Words,
    started: Option<&'a tokio::sync::Semaphore>,
) -> impl Future<Output = Result<(), Fault>> + use<'a> {
    let mut messages = words.history(talk::PAIRS, talk::HISTORY_BYTES);
    messages.push(Message::user(prompt));
    let mut request = Request::new("sonnet", messages);
    request.session = TransportSession(words.mark());
    request.system = talk::SYSTEM.to_owned();
    request.tools = talk::tools(10, "", 300);
    let mut generation = provider.generate(request);
    async move {
        let mut told = false;
        while let Some(event) = generation.next().await {
            if matches!(event?, Event::Text { .. }) && !told {
                told = true;
                if let Some(started) = started {
                    started.add_permits(1);
                }
            }
        }
        Ok(())
    }
}
