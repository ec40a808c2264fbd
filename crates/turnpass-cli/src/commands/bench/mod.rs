//! `turnpass lab bench`: what turnpass costs and what it takes, measured without the service.
//!
//! Every scene has its control in the same run: a plain HTTP client that sends the same bytes to the same upstream. Each
//! file here is one concern: [`bed`] measures one generation, [`control`] is the plain client, [`scenes`], [`pool`] and
//! [`memory`] are the scenes, [`tap`] stands between turnpass and the CLI, [`talk`] makes the conversations, [`figures`] shows them.
//! `docs/benchmarks.md` says what the figures mean and what came out.

mod bed;
mod control;
mod figures;
pub(crate) mod memory;
mod pool;
mod scenes;
mod talk;
pub(crate) mod tap;

use std::path::PathBuf;

use serde::Serialize;

use self::bed::{Bed, Ground, Make};
use self::figures::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fault};
use crate::settings::Values;
use crate::show::LABORATORY;
use crate::stage::Player;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of tables
    #[arg(long)]
    pub(crate) json: bool,
    /// Requests that are measured in each way of asking, beside those that are not counted
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    requests: u32,
    /// Use the scripted CLI even if the real one is installed
    #[arg(long)]
    scripted: bool,
    /// The `claude` program
    #[arg(long, value_name = "FILE")]
    claude_path: Option<PathBuf>,
    /// What to measure; everything if nothing is named
    #[arg(value_enum, value_name = "SCENE")]
    scenes: Vec<Scene>,
}

/// What can be measured.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// A long history never seen before, and the same with one message more
    Hist,
    /// Our own share of a request, small and large
    Own,
    /// From a delta at the upstream to its event
    Delta,
    /// From dropping a stream to the upstream's knowing it
    Drop,
    /// Four conversations at once
    Four,
    /// 64 streams at once: memory and processes
    Streams,
    /// From a tool's result to the next request
    Tools,
    /// Another model, effort, prompt or other tools
    Refit,
    /// A host's first request
    Spawn,
    /// Decoding of the CLI's lines
    Decode,
    /// The pool: a turn, a tool's result, a conversation never seen, planning
    Pool,
    /// The pool's own memory for conversations that rest
    PoolMemory,
}

const ALL: [Scene; 12] = [
    Scene::Hist,
    Scene::Own,
    Scene::Delta,
    Scene::Drop,
    Scene::Four,
    Scene::Streams,
    Scene::Tools,
    Scene::Refit,
    Scene::Spawn,
    Scene::Decode,
    Scene::Pool,
    Scene::PoolMemory,
];

#[derive(Debug, Serialize)]
struct Told {
    laboratory: bool,
    turnpass: &'static str,
    /// `release` or `debug`; the goals are those of a release build.
    build: &'static str,
    cli: Player,
    processors: usize,
    scenes: Vec<Outcome>,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(Values {
        claude_path: args.claude_path,
        ..Values::default()
    })?;
    let ground = Ground {
        settings,
        scripted: args.scripted,
        requests: args.requests as usize,
    };
    let wanted: &[Scene] = match args.scenes.as_slice() {
        [] => &ALL,
        some => some,
    };
    let mut told = Told {
        laboratory: true,
        turnpass: env!("CARGO_PKG_VERSION"),
        build: if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
        cli: player(&ground).await?,
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        scenes: Vec::new(),
    };
    if !args.json {
        super::print(&header(&told))?;
    }
    for scene in wanted {
        let before = load();
        let outcomes = tokio::select! {
            biased;
            () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
            outcomes = play(*scene, &ground) => outcomes?,
        };
        for mut outcome in outcomes {
            outcome.load = before.into_iter().chain(load()).collect();
            if !args.json {
                let mut text = String::new();
                outcome.show(&mut text);
                super::print(&text)?;
            }
            told.scenes.push(outcome);
        }
    }
    if !args.json {
        return Ok(Exit::Done);
    }
    let text = serde_json::to_string(&told)
        .map_err(|error| Fault::system(error.to_string(), "Try again."))?;
    super::print(&format!("{text}\n"))
}

/// Which CLI the scenes will have.
async fn player(ground: &Ground) -> Result<Player, Fault> {
    let bed = Bed::new(ground, Make::WARM).await?;
    let player = bed.player();
    bed.clear().await?;
    Ok(player)
}

async fn play(scene: Scene, ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    match scene {
        Scene::Hist => scenes::hist(ground).await,
        Scene::Own => scenes::own(ground).await,
        Scene::Delta => scenes::delta(ground).await,
        Scene::Drop => scenes::drop_stream(ground).await,
        Scene::Four => memory::four(ground).await,
        Scene::Streams => memory::streams(ground).await,
        Scene::Tools => scenes::tools(ground).await,
        Scene::Refit => scenes::refit(ground).await,
        Scene::Spawn => scenes::spawn(ground).await,
        Scene::Decode => Ok(vec![scenes::decode()]),
        Scene::Pool => pool::turns(ground).await,
        Scene::PoolMemory => memory::pool(ground).await,
    }
}

/// The machine's load of the last minute, where the system tells it.
fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

fn header(told: &Told) -> String {
    let note = match told.build {
        "release" => "",
        _ => "; the goals are those of a release build",
    };
    format!(
        "{LABORATORY}\nthe {} CLI {}; a {} build on {} processors{note}\n",
        told.cli.kind, told.cli.version, told.build, told.processors
    )
}
