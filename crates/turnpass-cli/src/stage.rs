//! The stage of a laboratory run: a throw-away home, an upstream in this process, a proxy that lets nothing out, and a
//! CLI, the installed one or the scripted one.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;
use turnpass::cli::environment::{InheritedCredentials, Snapshot};
use turnpass::cli::installed::{Found, Installed};
use turnpass::limits::budget::Budgets;
use turnpass::relay::LoopbackUrl;
use turnpass::request::TransportKind;
use turnpass_lab::cli::Script;
use turnpass_lab::rig::{MadeUpHome, RefusingProxy};
use turnpass_lab::upstream::{CacheOptions, Options, Upstream};

use crate::exit::Fault;
use crate::settings::{Process, Settings};

/// The version that the scripted CLI says it is: the newest one that its behaviour was measured on.
const SCRIPTED_VERSION: &str = "2.1.332";

/// Smallest prefix that the simulated cache keeps, in tokens. The service's is 1,024 or more; a demonstration is shorter,
/// and is to show what a cache does.
const CACHED_TOKENS: u64 = 64;

/// Which CLI plays.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Player {
    /// `real` or `scripted`.
    pub(crate) kind: &'static str,
    /// What it says its version is.
    pub(crate) version: String,
}

/// Everything that a laboratory run owns. Dropping it ends and removes all of it.
pub(crate) struct Stage {
    pub(crate) upstream: Upstream,
    pub(crate) player: Player,
    /// Why the installed CLI does not play, if it was looked for.
    pub(crate) passed_over: Option<String>,
    /// The settings of the run.
    pub(crate) settings: Settings,
    proxy: RefusingProxy,
    folder: tempfile::TempDir,
}

impl Stage {
    /// Sets the stage, with the installed CLI if there is one and `scripted` does not forbid it.
    pub(crate) async fn set(settings: &Settings, scripted: bool) -> Result<Self, Fault> {
        let failed = |error: std::io::Error| {
            Fault::system(
                format!("the laboratory cannot be set up: {error}"),
                "Check the space and the permissions of the folder for temporary files.",
            )
        };
        let folder = tempfile::Builder::new()
            .prefix("turnpass-lab-")
            .tempdir()
            .map_err(failed)?;
        let upstream = Upstream::start(Options {
            cache: CacheOptions {
                min_tokens: CACHED_TOKENS,
                min_tokens_by_model: Default::default(),
                ..CacheOptions::default()
            },
            ..Options::default()
        })
        .map_err(|error| Fault::system(error.to_string(), "Try again."))?;
        let proxy = RefusingProxy::start().map_err(failed)?;
        let home = folder.path().join("home");
        MadeUpHome::new(&home).map_err(failed)?;
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).map_err(failed)?;
        let installed = match scripted {
            true => None,
            false => Some(installed(settings).await),
        };
        let passed_over = match &installed {
            Some(Err(error)) => Some(error.to_string()),
            _ => None,
        };
        let (player, claude) = match installed {
            Some(Ok(found)) => {
                let claude = fenced(&bin, &found.executable.path, &proxy).map_err(failed)?;
                let version = found.version.to_string();
                (
                    Player {
                        kind: "real",
                        version,
                    },
                    claude,
                )
            }
            _ => (
                Player {
                    kind: "scripted",
                    version: SCRIPTED_VERSION.to_owned(),
                },
                scripted_cli(&bin).map_err(failed)?,
            ),
        };
        let mut settings = settings.clone();
        settings.claude_path = Some(claude);
        settings.lab_upstream = Some(LoopbackUrl::parse(&upstream.url())?);
        settings.lab_home = Some(home);
        Ok(Self {
            upstream,
            player,
            passed_over,
            settings,
            proxy,
            folder,
        })
    }

    /// A new folder on the stage.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf, Fault> {
        let path = self.folder.path().join(name);
        std::fs::create_dir(&path)
            .map_err(|error| Fault::system(format!("{}: {error}", path.display()), "Try again."))?;
        Ok(path)
    }

    /// Connections that wanted to leave this machine, and were refused.
    pub(crate) fn refused_connections(&self) -> usize {
        self.proxy.attempts().len()
    }
}

/// The settings of a laboratory run: those of the person, but on a transport of this build.
pub(crate) fn laboratory(
    mut settings: Settings,
    transport: Option<TransportKind>,
    process: Option<Process>,
) -> Settings {
    settings.transport = transport.unwrap_or(match process {
        // Only the relay has a choice of processes.
        Some(_) => TransportKind::Relay,
        None => TransportKind::Pool,
    });
    settings.process = process.or(settings.process);
    // Nothing of it draws on the plan, so what guards the plan would only be in its way.
    settings.usage_gate = None;
    settings.budgets = Budgets::default();
    settings
}

/// The installed CLI, if it is one that can be used. Its sign-in does not matter here.
async fn installed(settings: &Settings) -> turnpass::Result<Found> {
    let ours = Snapshot::of_this_process();
    let inherited = InheritedCredentials::Strip;
    Installed::new(settings.claude_path.clone(), ours, inherited)
        .checked()
        .await
}

/// A `claude` that runs the installed one with a proxy that refuses all: whatever is not on loopback stays away.
fn fenced(bin: &Path, claude: &Path, proxy: &RefusingProxy) -> std::io::Result<PathBuf> {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let mut script = String::from("#!/bin/sh\n");
    for (name, value) in proxy.environment() {
        // The library names loopback in NO_PROXY itself, and this must not be less.
        if !name.eq_ignore_ascii_case("NO_PROXY") {
            script.push_str(&format!("export {name}={}\n", quoted(&value)));
        }
    }
    let claude = claude.to_string_lossy();
    script.push_str(&format!("exec {} \"$@\"\n", quoted(&claude)));
    let written = bin.join("claude.new");
    std::fs::write(&written, script)?;
    std::fs::set_permissions(&written, PermissionsExt::from_mode(0o755))?;
    // Copied by a child: a file that is open for writing here while another thread forks cannot be executed (ETXTBSY).
    let target = bin.join("claude");
    let copied = Command::new("cp")
        .arg("-p")
        .arg(&written)
        .arg(&target)
        .status()?;
    match copied.success() {
        true => Ok(target),
        false => Err(std::io::Error::other(
            "cp could not write the claude wrapper",
        )),
    }
}

fn scripted_cli(bin: &Path) -> std::io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    turnpass_lab::cli::install(bin, &program, &Script::emulator(SCRIPTED_VERSION))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fence_sets_the_proxy_and_passes_the_arguments() {
        let folder = tempfile::tempdir().unwrap();
        let proxy = RefusingProxy::start().unwrap();
        let claude = fenced(folder.path(), Path::new("/bin/sh"), &proxy).unwrap();
        let output = Command::new(claude)
            .args(["-c", "echo \"$HTTPS_PROXY|$1\"", "sh", "a b'c"])
            .env_clear()
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text, format!("{}|a b'c\n", proxy.url()));
    }
}
