//! From a found, checked and signed-in CLI to a live session.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::num::NonZeroU32;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::task::TaskTracker;

use super::carrier::Carrier;
use super::lock::SessionLock;
use super::options::{Reseed, ToolCarrier};
use super::session::Session;
use super::ways::{Ways, ways};
use crate::cli::environment::{Base, Environment, InheritedCredentials, Snapshot};
use crate::cli::installed::{Found, Installed};
use crate::cli::launch::{self, Ground, PoolProcess, Resume};
use crate::cli::places::Place;
use crate::cli::private_dir::{PrivateDir, roots};
use crate::cli::starts::Starts;
use crate::error::{Error, ErrorCode, Result};
use crate::event::Notice;
use crate::models::known::KnownModels;
use crate::record::RawFile;
use crate::request::{Effort, Request, ThinkingDisplay};
use crate::tools::{Catalogue, Policy};

/// Processes that start at the same time; a start is over when the CLI's first record comes. It takes one core for a
/// third of a second, and several at once slow the generations that run, and may renew one sign-in at once (bug 43).
const STARTS: NonZeroU32 = NonZeroU32::new(2).expect("two is not zero");

/// The working directory of conversations whose host names none, in the pool's part of the state directory. It is the
/// same for every process: the CLI tells the model when a resumed conversation goes on elsewhere (2.1.332).
const WORK: &str = "work";

/// Starts processes for a pool.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) installed: Arc<Installed>,
    pub(crate) models: KnownModels,
    pub(crate) snapshot: Snapshot,
    pub(crate) inherited: InheritedCredentials,
    pub(crate) record: Option<PathBuf>,
    pub(crate) pool_dir: Option<PathBuf>,
    pub(crate) base_url: Option<String>,
    reseed: Option<Reseed>,
    tools: Option<ToolCarrier>,
    /// The host was told that nothing is known of the CLI.
    told: AtomicBool,
    learned: Mutex<BTreeSet<String>>,
    starts: Starts,
    tasks: TaskTracker,
}

/// What cannot be changed about a process once it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) thinking: ThinkingDisplay,
    pub(crate) persists: bool,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) time_zone: Option<String>,
    pub(crate) max_turns: Option<u32>,
    /// Only where it cannot be set later.
    pub(crate) effort: Option<Effort>,
}

/// A stored conversation of the CLI to begin with.
#[derive(Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) session: &'a str,
    pub(crate) at: &'a str,
    /// The model that goes on with it.
    pub(crate) model: &'a str,
    /// The lock, to resume; without it the conversation is forked.
    pub(crate) lock: Option<SessionLock>,
}

impl Shape {
    pub(crate) fn of(request: &Request, persists: bool) -> Self {
        Self {
            thinking: request.thinking,
            persists,
            directory: request.place.directory.clone(),
            time_zone: request.place.time_zone.clone(),
            max_turns: None,
            effort: None,
        }
    }

    /// Of a process that writes one summary beside or in place of a conversation's own: it keeps nothing, and has one
    /// round (pool document).
    pub(crate) fn for_summary(&self) -> Self {
        Self {
            persists: false,
            max_turns: Some(1),
            ..self.clone()
        }
    }

    /// What its tool server does with a call: nobody runs one for a summary, so it gets an error.
    pub(crate) fn policy(&self) -> Policy {
        match self.max_turns {
            Some(_) => Policy::Inert,
            None => Policy::Answering,
        }
    }
}

impl Launcher {
    pub(crate) fn new(
        installed: Arc<Installed>,
        snapshot: Snapshot,
        options: &super::PoolOptions,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            installed,
            models: KnownModels::new(options.state_dir.as_deref()),
            snapshot,
            inherited: options.inherited_credentials,
            record: options.record.clone(),
            pool_dir: options.state_dir.as_ref().map(|dir| dir.join("pool")),
            base_url: options
                .lab_upstream
                .as_ref()
                .map(|url| url.as_str().to_owned()),
            reseed: options.reseed,
            tools: options.tools,
            told: AtomicBool::new(false),
            learned: Mutex::default(),
            starts: Starts::new(STARTS),
            tasks,
        }
    }

    /// How the installed CLI is to be used, and what the host is told of it, once. Nothing is started but its version.
    ///
    /// # Errors
    ///
    /// Those of [`Installed::checked`]; `version_incompatible` that names the check that fails.
    pub(crate) async fn ways(&self) -> Result<(Ways, Option<Notice>)> {
        let found = self.installed.checked().await?;
        let ways = self.ways_of(&found)?;
        let notice = found.standing.notice();
        let notice = notice.filter(|_| !self.told.swap(true, Ordering::Relaxed));
        Ok((ways, notice))
    }

    fn ways_of(&self, found: &Found) -> Result<Ways> {
        ways(&found.standing, self.reseed, self.tools)
    }

    /// Built-in plugins that slipped through.
    pub(crate) fn learn(&self, plugins: Vec<String>) {
        self.learned().extend(plugins);
    }

    /// Those that are known.
    pub(crate) fn learned_plugins(&self) -> BTreeSet<String> {
        self.learned().clone()
    }

    fn learned(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process. The sign-in is checked first. It is told nothing yet, but where tools are served by a listener: it
    /// is told of that with its start.
    pub(crate) async fn start(
        &self,
        shape: &Shape,
        key: &str,
        tools: Option<&Catalogue>,
        stored: Option<Stored<'_>>,
        place: Place,
    ) -> Result<Session> {
        let found = self.installed.checked().await?;
        let ways = self.ways_of(&found)?;
        let sign_in = self.installed.signed_in().await?;
        let turn = self.starts.turn(sign_in.expires_at).await?;
        let program = found.executable.path;
        let dir = PrivateDir::create(&roots(&self.snapshot))?;
        let tmp = dir.tmp();
        let base = Base {
            program: &program,
            tmp: &tmp,
            time_zone: shape.time_zone.as_deref(),
            inherited: self.inherited,
        };
        let ground = Ground {
            environment: Environment::build(&self.snapshot, base)?,
            program,
            dir: dir.path().to_owned(),
            cwd: self.cwd(shape, stored.is_some(), &dir)?,
            learned_plugins: self.learned_plugins(),
        };
        let carrier = match (ways.tools, tools) {
            (ToolCarrier::Http, Some(tools)) => {
                Carrier::listen(tools, shape.policy(), &self.tasks).await?
            }
            _ => Carrier::InBand(None),
        };
        let server = carrier.mcp_server();
        let wanted = PoolProcess {
            thinking: shape.thinking,
            persists: shape.persists,
            resume: stored.as_ref().map(|stored| Resume {
                session: stored.session,
                at: Some(stored.at),
                fork: stored.lock.is_none(),
                model: stored.model,
            }),
            max_turns: shape.max_turns,
            effort: shape.effort,
            server: server.as_ref(),
            base_url: self.base_url.as_deref(),
        };
        let launch = launch::pool(&ground, &wanted)?;
        // A recording that cannot be made fails the start, before there is anything to record (pool origin).
        let folder = self.record.as_deref();
        let raw = folder.map(|dir| RawFile::create(dir, key)).transpose()?;
        let group = launch.start(&dir)?;
        let mut session = Session::new(
            (group, raw),
            (carrier, ways),
            dir,
            place,
            shape.clone(),
            &self.tasks,
        )?;
        session.starting = Some(turn);
        session.has_model = stored.is_some();
        // A fork gets an id of its own.
        session.resumes = stored
            .as_ref()
            .filter(|stored| stored.lock.is_some())
            .map(|stored| stored.session.to_owned());
        session.lock = stored.and_then(|stored| stored.lock);
        Ok(session)
    }

    fn cwd(&self, shape: &Shape, takes_up: bool, dir: &PrivateDir) -> Result<PathBuf> {
        if let Some(directory) = &shape.directory {
            return Ok(directory.clone());
        }
        let Some(pool) = self
            .pool_dir
            .as_ref()
            .filter(|_| shape.persists || takes_up)
        else {
            return Ok(dir.work());
        };
        let work = pool.join(WORK);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&work);
        made.map_err(|error| {
            let what = format!("{} cannot be made: {error}", work.display());
            Error::new(ErrorCode::LaunchFailed, what)
        })?;
        Ok(work)
    }

    /// Ends the checks that are under way.
    pub(crate) async fn shutdown(&self) {
        self.installed.shutdown().await;
    }
}
