//! This program again, as a host of its own: to be killed, or to have an environment of its own.

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

use serde::{Deserialize, Serialize};
use turnpass::Transport as _;
use turnpass::event::Event;
use turnpass::relay::{ProcessMode, RelayTransport, ToolCarrier};
use turnpass_lab::rig::RealCli;

use crate::bench::{self, Bench, Setup};
use crate::privacy;

/// What a child is to play, as JSON; set only in children.
const PLAY: &str = "TURNPASS_RELAY_REAL_PLAY";

/// Printed when the part has come to the point that its test waits for.
pub(crate) const READY: &str = "READY";

/// A part in a test.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Reads up to the first delta, then waits for ever.
    Stall,
    /// [`crate::privacy`].
    Private,
}

/// A part with its surroundings; the files are in the test's own directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Play {
    pub(crate) role: Role,
    pub(crate) cli: PathBuf,
    pub(crate) warm: bool,
    pub(crate) mcp: bool,
    pub(crate) dir: PathBuf,
    pub(crate) upstream: String,
}

impl Play {
    pub(crate) fn new(bench: &Bench) -> Self {
        Self {
            role: Role::Stall,
            cli: std::fs::canonicalize(&bench.setup.cli.path).unwrap(),
            warm: bench.setup.is_warm(),
            mcp: bench.setup.tools == ToolCarrier::Mcp,
            dir: bench.dir().to_owned(),
            upstream: bench.up.url(),
        }
    }
}

/// The command of a part; its standard output is a pipe.
pub(crate) fn command(play: &Play) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .env(PLAY, serde_json::to_string(play).unwrap())
        .stdout(Stdio::piped());
    command
}

/// Starts a part.
pub(crate) fn start(play: &Play) -> Child {
    command(play).spawn().unwrap()
}

/// Plays the part that the environment names, if it names one.
pub(crate) fn play() -> Option<ExitCode> {
    let play: Play = serde_json::from_str(&std::env::var(PLAY).ok()?).unwrap();
    let setup = Setup {
        cli: RealCli {
            version: String::new(),
            path: play.cli.clone(),
        },
        process: if play.warm {
            ProcessMode::Warm
        } else {
            ProcessMode::PerRequest
        },
        tools: if play.mcp {
            ToolCarrier::Mcp
        } else {
            ToolCarrier::ExtraBody
        },
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        match play.role {
            Role::Stall => {
                let mut options = bench::options(&setup, &play.dir, &play.upstream);
                options.spares = 1;
                let relay = RelayTransport::new(options).unwrap();
                let mut generation = relay.generate(bench::say("go on"));
                bench::read_until(&mut generation, |event| matches!(event, Event::Text { .. }))
                    .await;
                println!("{READY}");
                std::future::pending::<()>().await;
            }
            Role::Private => {
                privacy::play(setup).await;
                println!("{READY}");
            }
        }
    });
    Some(ExitCode::SUCCESS)
}
