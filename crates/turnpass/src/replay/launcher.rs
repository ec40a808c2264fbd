//! From a found, checked and signed-in CLI to a running process of a replay.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::task::TaskTracker;

use super::options::Carrier;
use super::prepared::Prepared;
use super::running::{Markers, Running};
use super::ways::{Asked, Ways, ways};
use crate::cli::environment::{Base, Environment, InheritedCredentials, Snapshot};
use crate::cli::installed::Installed;
use crate::cli::isolation::Expected;
use crate::cli::launch::{self, Ground, MCP_SERVER, McpServer, Replay};
use crate::cli::private_dir::{PrivateDir, roots};
use crate::cli::starts::Starts;
use crate::error::{Error, ErrorCode, Result};
use crate::event::Notice;
use crate::models;
use crate::models::known::KnownModels;
use crate::record::RawFile;
use crate::relay::LoopbackUrl;
use crate::tools::Policy;

/// The empty directory in which processes work whose host names none. Not named like a private directory, which the next
/// start would sweep away while it is used.
const WORK: &str = "turnpass_work";

/// Starts processes for a replay.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) installed: Arc<Installed>,
    pub(crate) models: KnownModels,
    pub(crate) snapshot: Snapshot,
    pub(crate) inherited: InheritedCredentials,
    pub(crate) asked: Asked,
    /// The host was told that nothing is known of the CLI.
    pub(crate) told: AtomicBool,
    pub(crate) tool_server: Option<PathBuf>,
    pub(crate) retries: u32,
    pub(crate) upstream: Option<LoopbackUrl>,
    pub(crate) record: Option<PathBuf>,
    pub(crate) learned: Mutex<BTreeSet<String>>,
    pub(crate) starts: Starts,
    pub(crate) tasks: TaskTracker,
}

impl Launcher {
    /// Whether the model of a request takes its effort, by what the installed CLI was last heard to tell, else by what is
    /// known of its version. Nothing is started for it.
    pub(crate) async fn check_effort(&self, prepared: &Prepared) -> Result<()> {
        if prepared.effort.is_none() {
            return Ok(());
        }
        let found = self.installed.checked().await?;
        let catalogue = self.models.catalog(&found).await;
        models::check_effort(&prepared.model, prepared.effort, &catalogue)
    }

    /// How the installed CLI is to be used, and what the host is told of it, once. Nothing is started but its version.
    ///
    /// # Errors
    ///
    /// Those of [`Installed::checked`]; `version_incompatible` that names the check that fails.
    pub(crate) async fn ways(&self, has_tools: bool) -> Result<(Ways, Option<Notice>)> {
        let found = self.installed.checked().await?;
        let ways = ways(&found.standing, self.asked, has_tools)?;
        let notice = found.standing.notice();
        let notice = notice.filter(|_| !self.told.swap(true, Ordering::Relaxed));
        Ok((ways, notice))
    }

    /// Built-in plugins that slipped through.
    pub(crate) fn learn(&self, plugins: Vec<String>) {
        self.learned().extend(plugins);
    }

    fn learned(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the process has to show.
    pub(crate) fn expected(prepared: &Prepared) -> Expected {
        match prepared.catalogue.is_empty() {
            true => Expected::default(),
            false => Expected {
                server: Some(MCP_SERVER.to_owned()),
                tools: prepared
                    .catalogue
                    .expected_tool_names()
                    .map(str::to_owned)
                    .collect(),
            },
        }
    }

    /// Starts a process. The sign-in is checked first.
    pub(crate) async fn start(&self, prepared: &Prepared, carrier: Carrier) -> Result<Running> {
        let found = self.installed.checked().await?;
        let sign_in = self.installed.signed_in().await?;
        let turn = self.starts.turn(sign_in.expires_at).await?;
        let program = found.executable.path;
        let dir = PrivateDir::create(&roots(&self.snapshot))?;
        let cwd = match &prepared.place.directory {
            Some(directory) => directory.clone(),
            None => self.work(&dir),
        };
        let tmp = dir.tmp();
        let base = Base {
            program: &program,
            tmp: &tmp,
            time_zone: prepared.place.time_zone.as_deref(),
            inherited: self.inherited,
        };
        let ground = Ground {
            environment: Environment::build(&self.snapshot, base)?,
            program,
            dir: dir.path().to_owned(),
            cwd,
            learned_plugins: self.learned().clone(),
        };
        let (server, markers) = self.server(prepared, carrier, &dir)?.unzip();
        let launch = launch::replay(
            &ground,
            &Replay {
                model: &prepared.model,
                effort: prepared.level(),
                thinking: prepared.thinking,
                system: &prepared.system,
                server: server.as_ref(),
                extra_body: prepared.extra_body(),
                retries: self.retries,
                upstream: self.upstream.as_ref().map(LoopbackUrl::as_str),
            },
        )?;
        // A recording that cannot be made fails the start, before there is anything to record (pool origin).
        let raw = match self.record.as_deref() {
            Some(folder) => Some(RawFile::create(folder, &prepared.session.0)?),
            None => None,
        };
        let group = launch.start(&dir)?;
        Running::new((group, raw), dir, markers, turn, &self.tasks)
    }

    /// The tool server as a process of its own: turnpass itself, which lists the tools and runs none.
    fn server(
        &self,
        prepared: &Prepared,
        carrier: Carrier,
        dir: &PrivateDir,
    ) -> Result<Option<(McpServer, Markers)>> {
        if prepared.catalogue.is_empty() || carrier == Carrier::InBand {
            return Ok(None);
        }
        let program = self.tool_server.clone().ok_or_else(|| {
            let what = "tools over stdio need the path of the turnpass program, which lists them";
            Error::new(ErrorCode::RequestInvalid, what)
        })?;
        let catalogue = dir.write("catalogue.json", prepared.catalogue.file_json().as_bytes())?;
        let markers = Markers {
            ready: dir.path().join("ready"),
            violation: dir.path().join("violation"),
        };
        let mut args = vec!["mcp-stdio".to_owned()];
        for (option, path) in [
            ("--catalogue", &catalogue),
            ("--ready", &markers.ready),
            ("--violation", &markers.violation),
        ] {
            args.extend([option.to_owned(), text_of(path)?]);
        }
        args.extend(["--policy".to_owned(), Policy::Proposing.as_str().to_owned()]);
        let server = McpServer::Stdio {
            command: program,
            args,
            env: Vec::new(),
        };
        Ok(Some((server, markers)))
    }

    /// An empty directory with a path that stays the same: the CLI tells the model its path in the middle of the
    /// conversation, so one that changes makes the service's cache useless (2.1.294 to 2.1.332). Where it cannot be had,
    /// the private directory serves.
    fn work(&self, dir: &PrivateDir) -> PathBuf {
        let me = rustix::process::geteuid().as_raw();
        let kept = roots(&self.snapshot)
            .into_iter()
            .map(|root| root.join(format!("{WORK}-{me}")))
            .find(|path| is_ours(path, me));
        kept.unwrap_or_else(|| dir.work())
    }
}

/// Makes the directory if it is not there; false for one that is somebody else's, or open to others, or a link.
fn is_ours(path: &Path, me: u32) -> bool {
    // One that exists already is looked at like a new one.
    let _ = DirBuilder::new().mode(0o700).create(path);
    std::fs::symlink_metadata(path)
        .is_ok_and(|state| state.is_dir() && state.uid() == me && state.mode() & 0o077 == 0)
}

fn text_of(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        let what = "the path of the private directory is not UTF-8";
        Error::new(ErrorCode::LaunchFailed, what)
    })
}
