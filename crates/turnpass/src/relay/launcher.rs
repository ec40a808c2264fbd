//! From a found, checked and signed-in CLI to a running process with its lane.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::task::TaskTracker;

use super::kept::{REAL_LINE_BYTES, Running, WARM_LINE_BYTES};
use super::lane::Lane;
use super::prepared::{Prepared, ToolCarrier};
use super::ways::{Asked, Ways, ways};
use crate::cli::environment::{Base, Environment, InheritedCredentials, Snapshot};
use crate::cli::installed::Installed;
use crate::cli::isolation::Expected;
use crate::cli::launch::{
    self, Ground, MCP_SERVER, McpServer, RelayAddress, RelayPerRequest, RelayWarm,
};
use crate::cli::private_dir::{PrivateDir, roots};
use crate::cli::starts::Starts;
use crate::error::{Error, ErrorCode, Result};
use crate::event::Notice;
use crate::models;
use crate::models::discovery::Discovered;
use crate::models::known::KnownModels;
use crate::record::RawFile;
use crate::request::{ModelId, Place, ThinkingDisplay};
use crate::tools::Catalogue;

/// Processes that start at the same time; a start is over when the CLI's first request comes. It takes one core for a
/// third of a second, and several at once slow the generations that run, and may renew one sign-in at once (bug 43).
const STARTS: NonZeroU32 = NonZeroU32::new(2).expect("two is not zero");

/// Starts processes for a relay.
#[derive(Debug)]
pub(crate) struct Launcher {
    installed: Arc<Installed>,
    models: KnownModels,
    snapshot: Snapshot,
    inherited: InheritedCredentials,
    tool_server: Option<PathBuf>,
    record: Option<PathBuf>,
    /// The host was told that nothing is known of the CLI.
    told: AtomicBool,
    learned: Mutex<BTreeSet<String>>,
    starts: Starts,
    tasks: TaskTracker,
}

/// The installed CLI, and how it is to be used.
pub(crate) struct Decided {
    pub(crate) ways: Ways,
    /// What the host is told of it, once.
    pub(crate) notice: Option<Notice>,
    /// The executable and its version, in a word that changes with an update.
    pub(crate) program: String,
}

/// What is to be started.
pub(crate) enum Shape<'a> {
    /// A process that serves many generations.
    Warm {
        /// Asked for at launch.
        thinking: ThinkingDisplay,
        /// Published in-band.
        in_band: Option<&'a Catalogue>,
    },
    /// A process for one request.
    PerRequest {
        /// The request.
        prepared: &'a Prepared,
        /// Asked for at launch.
        thinking: ThinkingDisplay,
        /// Where the host works.
        place: &'a Place,
    },
}

impl Launcher {
    pub(crate) fn new(
        installed: Arc<Installed>,
        state_dir: Option<&Path>,
        snapshot: Snapshot,
        inherited: InheritedCredentials,
        tool_server: Option<PathBuf>,
        record: Option<PathBuf>,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            installed,
            models: KnownModels::new(state_dir),
            snapshot,
            inherited,
            tool_server,
            record,
            told: AtomicBool::new(false),
            learned: Mutex::default(),
            starts: Starts::new(STARTS),
            tasks,
        }
    }

    /// The installed CLI as it is now, and how it is to be used. Checks the version's floor; costs a process of some
    /// milliseconds when the file has changed.
    ///
    /// # Errors
    ///
    /// Those of [`Installed::checked`]; `version_incompatible` that names the check that fails.
    pub(crate) async fn decide(&self, asked: Asked, has_tools: bool) -> Result<Decided> {
        let found = self.installed.checked().await?;
        let notice = found.standing.notice();
        Ok(Decided {
            ways: ways(&found.standing, asked, has_tools)?,
            notice: notice.filter(|_| !self.told.swap(true, Ordering::Relaxed)),
            program: format!("{} {}", found.executable.path.display(), found.version),
        })
    }

    /// Asks the CLI for its models, and keeps what it tells.
    pub(crate) async fn discover(&self) -> Discovered {
        self.models.discover(&self.installed).await
    }

    /// Whether the model of a request takes its effort, by what the installed CLI was last heard to tell, else by what is
    /// known of its version. Nothing is started for it.
    pub(crate) async fn check_effort(&self, prepared: &Prepared) -> Result<()> {
        if prepared.effort.is_none() {
            // The model's own default; a look at the file system (14 to 54 µs) is spared.
            return Ok(());
        }
        let found = self.installed.checked().await?;
        let model = ModelId(prepared.fit.model.clone());
        let catalog = self.models.catalog(&found).await;
        models::check_effort(&model, prepared.effort, &catalog)
    }

    /// Built-in plugins that slipped through.
    pub(crate) fn learn(&self, plugins: Vec<String>) {
        self.learned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(plugins);
    }

    /// After a live refusal the stored sign-in is no news any more.
    pub(crate) fn forget_sign_in(&self) {
        self.installed.forget_sign_in();
    }

    /// Ends the checks that are under way.
    pub(crate) async fn shutdown(&self) {
        self.installed.shutdown().await;
    }

    /// Checks the sign-in, or waits for a check that is under way; a success is kept for a while.
    pub(crate) async fn signed_in(&self) -> Result<()> {
        self.installed.signed_in().await.map(drop)
    }

    /// Turns to start, and to renew a sign-in.
    pub(crate) fn starts(&self) -> &Starts {
        &self.starts
    }

    /// Starts a process. The sign-in is checked first.
    pub(crate) async fn start(&self, shape: &Shape<'_>) -> Result<Running> {
        let found = self.installed.checked().await?;
        let sign_in = self.installed.signed_in().await?;
        let turn = self.starts.turn(sign_in.expires_at).await?;
        let program = found.executable.path;
        let (lane, arrivals) = Lane::open(&self.tasks).await?;
        let dir = PrivateDir::create(&roots(&self.snapshot))?;
        let relay = lane.address();
        let (cwd, time_zone) = match shape {
            // The CLI lists git files of its working directory at start; an empty one costs nothing and tells nothing.
            Shape::Warm { .. } => (dir.work(), None),
            Shape::PerRequest { place, .. } => {
                let cwd = place.directory.clone().unwrap_or_else(|| dir.work());
                (cwd, place.time_zone.as_deref())
            }
        };
        let tmp = dir.tmp();
        let base = Base {
            program: &program,
            tmp: &tmp,
            time_zone,
            inherited: self.inherited,
        };
        let ground = Ground {
            environment: Environment::build(&self.snapshot, base)?,
            program,
            dir: dir.path().to_owned(),
            cwd,
            learned_plugins: self
                .learned
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        };
        let (launch, expected, line_bytes) = match shape {
            Shape::Warm { thinking, in_band } => {
                let launch = launch::relay_warm(
                    &ground,
                    &RelayWarm {
                        thinking: *thinking,
                        relay: &relay,
                    },
                )?;
                (launch, expected_of(*in_band), WARM_LINE_BYTES)
            }
            Shape::PerRequest {
                prepared, thinking, ..
            } => (
                self.per_request(&ground, &dir, prepared, *thinking, &relay)?,
                expected_of(mcp(prepared)),
                REAL_LINE_BYTES,
            ),
        };
        if matches!(shape, Shape::PerRequest { .. }) {
            // Its prompt is on its command line, so the request may come as soon as it runs.
            lane.admission().arm();
        }
        // A recording that cannot be made fails the start, before there is anything to record (pool origin).
        let raw = self.raw(shape)?;
        let group = launch.start(&dir)?;
        let mut running = Running::new(
            (group, raw),
            (lane, arrivals),
            dir,
            expected,
            line_bytes,
            &self.tasks,
        )?;
        running.starting = Some(turn);
        Ok(running)
    }

    fn raw(&self, shape: &Shape<'_>) -> Result<Option<RawFile>> {
        let key = match shape {
            // It serves any session, so it is recorded under a key of its own.
            Shape::Warm { .. } => "relay-warm",
            Shape::PerRequest { prepared, .. } => &prepared.session.0,
        };
        let folder = self.record.as_deref();
        folder.map(|dir| RawFile::create(dir, key)).transpose()
    }

    fn per_request(
        &self,
        ground: &Ground,
        dir: &PrivateDir,
        prepared: &Prepared,
        thinking: ThinkingDisplay,
        relay: &RelayAddress,
    ) -> Result<launch::Launch> {
        let server = match mcp(prepared) {
            None => None,
            Some(catalogue) => {
                let program = self.tool_server.as_deref().ok_or_else(|| {
                    let what =
                        "tools over stdio need the path of the turnpass program, which serves them";
                    Error::new(ErrorCode::RequestInvalid, what)
                })?;
                let file = dir.write("catalogue.json", catalogue.file_json().as_bytes())?;
                Some(inert_server(program, &file)?)
            }
        };
        let model = ModelId(prepared.fit.model.clone());
        launch::relay_per_request(
            ground,
            &RelayPerRequest {
                model: &model,
                effort: prepared.fit.effort,
                thinking,
                system: &prepared.fit.system,
                relay,
                server: server.as_ref(),
                extra_body: Some(&prepared.fit.extra),
            },
        )
    }
}

/// The catalogue that the CLI itself serves, if it does.
pub(crate) fn mcp(prepared: &Prepared) -> Option<&Catalogue> {
    (prepared.carrier == ToolCarrier::Mcp && !prepared.catalogue.is_empty())
        .then_some(&prepared.catalogue)
}

fn expected_of(catalogue: Option<&Catalogue>) -> Expected {
    match catalogue {
        None => Expected::default(),
        Some(catalogue) => Expected {
            server: Some(MCP_SERVER.to_owned()),
            tools: catalogue.expected_tool_names().map(str::to_owned).collect(),
        },
    }
}

/// The tool server that the CLI starts: turnpass itself, which lists the tools and runs none.
fn inert_server(program: &Path, catalogue: &Path) -> Result<McpServer> {
    let path = catalogue.to_str().ok_or_else(|| {
        Error::new(
            ErrorCode::LaunchFailed,
            "the path of the private directory is not UTF-8",
        )
    })?;
    let args = ["mcp-stdio", "--catalogue", path, "--policy", "inert"];
    Ok(McpServer::Stdio {
        command: program.to_owned(),
        args: args.map(str::to_owned).into(),
        env: Vec::new(),
    })
}
