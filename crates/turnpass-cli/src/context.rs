//! What every command works with: the environment, the streams, the signals, and the provider from the settings.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;

use etcetera::BaseStrategy;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use turnpass::cli::environment::{InheritedCredentials, Snapshot};
use turnpass::cli::installed::Installed;
use turnpass::pool::{PoolOptions, PoolTransport};
use turnpass::record::RecordSink;
use turnpass::relay::{ProcessMode, RelayOptions, RelayTransport};
use turnpass::replay::{ReplayOptions, ReplayTransport};
use turnpass::request::TransportKind;
use turnpass::{Error, Provider};
use turnpass_agent::SessionStore;

use crate::exit::{Exit, Fault};
use crate::settings::{Process, Settings, Values};
use crate::terminal::Style;

/// What every command works with.
#[derive(Debug)]
pub(crate) struct Context {
    cancel: CancellationToken,
}

impl Context {
    /// For this process. From here on the first Ctrl-C, SIGTERM or SIGHUP cancels, and the second one ends the program.
    pub(crate) fn new() -> Result<Self, Fault> {
        let cancel = CancellationToken::new();
        cancel_on_signals(cancel.clone())?;
        Ok(Self { cancel })
    }

    /// Cancelled when the person wants to stop.
    pub(crate) fn cancel(&self) -> &CancellationToken {
        &self.cancel
    }

    /// The style of standard error.
    pub(crate) fn style(&self) -> Style {
        Style::new(std::io::stderr().is_terminal(), &environment)
    }

    /// The style of standard output.
    pub(crate) fn output_style(&self) -> Style {
        Style::new(std::io::stdout().is_terminal(), &environment)
    }

    /// The settings that hold under these flags.
    pub(crate) fn settings(&self, flags: Values) -> Result<Settings, Fault> {
        Settings::load(flags, &environment)
    }
}

/// The one place where the program reads its environment.
pub(crate) fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// The provider that the settings describe. Nothing is started yet.
pub(crate) fn build_provider(settings: &Settings) -> Result<Provider, Error> {
    let provider = match settings.transport {
        TransportKind::Pool => Provider::new(PoolTransport::new(pool_options(settings))?),
        TransportKind::Relay => Provider::new(RelayTransport::new(relay_options(settings))?),
        TransportKind::Replay => Provider::new(ReplayTransport::new(replay_options(settings))?),
    };
    // A laboratory run leaves the person's home alone, unless they named a folder for what is kept.
    let is_nameless = settings.lab_upstream.is_some() && environment(STATE_VARIABLE).is_none();
    if is_nameless || !settings.keep_records {
        return Ok(provider);
    }
    Ok(match records() {
        Ok(sink) => provider.with_records(sink),
        Err(fault) => {
            // A log that cannot be kept is no reason to refuse what was asked for.
            tracing::warn!("{fault}");
            provider
        }
    })
}

fn records() -> Result<RecordSink, Fault> {
    Ok(RecordSink::open(records_folder()?)?)
}

/// Names another folder for what the program keeps between runs.
pub(crate) const STATE_VARIABLE: &str = "TURNPASS_STATE";

/// The folder of the records of generations.
pub(crate) fn records_folder() -> Result<PathBuf, Fault> {
    Ok(kept_dir()?.join("records"))
}

/// The pool that the settings describe.
pub(crate) fn pool_options(settings: &Settings) -> PoolOptions {
    let default = PoolOptions::default();
    PoolOptions {
        claude_path: settings.claude_path.clone(),
        usage_gate: settings.usage_gate,
        budgets: settings.budgets,
        state_dir: match settings.lab_upstream {
            Some(_) => laboratory_dir(),
            None => state_dir(),
        },
        memory_budget_bytes: memory_budget_bytes(settings, default.memory_budget_bytes),
        reseed: settings.reseed.map(|word| word.0),
        tools: settings.tool_carrier.map(|word| word.0),
        certificates: state_dir(),
        lab_upstream: settings.lab_upstream.clone(),
        lab_home: settings.lab_home.clone(),
        record: settings.record.clone(),
        ..default
    }
}

fn memory_budget_bytes(settings: &Settings, default: u64) -> u64 {
    settings
        .memory_mb
        .map_or(default, |mb| u64::from(mb) * 1024 * 1024)
}

/// Where laboratory runs keep what they keep: a part of the folder that the person named, apart from what is counted of
/// the plan; nowhere if they named none.
pub(crate) fn laboratory_dir() -> Option<PathBuf> {
    environment(STATE_VARIABLE)?;
    Some(state_dir()?.join("laboratory"))
}

/// The kept sessions of these settings.
pub(crate) fn sessions(settings: &Settings) -> Result<SessionStore, Fault> {
    let dir = match settings.lab_upstream {
        Some(_) => laboratory_dir().ok_or_else(|| {
            Fault::usage(
                "a laboratory run keeps no session",
                format!("Name a folder for what it keeps with {STATE_VARIABLE}."),
            )
        })?,
        None => kept_dir()?,
    };
    Ok(SessionStore::new(dir.join("sessions")))
}

fn kept_dir() -> Result<PathBuf, Fault> {
    state_dir().ok_or_else(|| {
        Fault::usage(
            "there is no home folder",
            format!("Set HOME, or name a folder with {STATE_VARIABLE}."),
        )
    })
}

/// The relay that the settings describe.
pub(crate) fn relay_options(settings: &Settings) -> RelayOptions {
    let default = RelayOptions::default();
    RelayOptions {
        memory_budget_bytes: memory_budget_bytes(settings, default.memory_budget_bytes),
        process: settings.process.map(|word| match word {
            Process::Warm => ProcessMode::Warm,
            Process::PerRequest => ProcessMode::PerRequest,
        }),
        certificates: state_dir(),
        claude_path: settings.claude_path.clone(),
        // This program serves the tools where they go over stdio.
        tool_server: std::env::current_exe().ok(),
        usage_gate: settings.usage_gate,
        budgets: settings.budgets,
        // What a laboratory run uses is not the plan's.
        state_dir: match settings.lab_upstream {
            Some(_) => None,
            None => state_dir(),
        },
        lab_upstream: settings.lab_upstream.clone(),
        lab_home: settings.lab_home.clone(),
        record: settings.record.clone(),
        ..default
    }
}

/// The replay that the settings describe.
pub(crate) fn replay_options(settings: &Settings) -> ReplayOptions {
    let laboratory = settings.lab_upstream.is_some();
    ReplayOptions {
        history: settings.history,
        certificates: state_dir(),
        claude_path: settings.claude_path.clone(),
        // This program lists the tools where they go over stdio.
        tool_server: std::env::current_exe().ok(),
        // A laboratory run pays with nothing, so a credential in the environment is only left out of it.
        inherited_credentials: match laboratory {
            true => InheritedCredentials::Strip,
            false => ReplayOptions::default().inherited_credentials,
        },
        usage_gate: settings.usage_gate,
        budgets: settings.budgets,
        // What a laboratory run uses is not the plan's.
        state_dir: match laboratory {
            true => None,
            false => state_dir(),
        },
        lab_upstream: settings.lab_upstream.clone(),
        lab_home: settings.lab_home.clone(),
        record: settings.record.clone(),
        ..ReplayOptions::default()
    }
}

/// The installed CLI that the settings name, for commands that only ask it.
pub(crate) fn installed(settings: &Settings) -> Arc<Installed> {
    let mut snapshot = Snapshot::of_this_process();
    if settings.lab_upstream.is_some() {
        // The CLI asks its account at fixed addresses; in a laboratory run that leads nowhere.
        for name in ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"] {
            snapshot.set(name, CLOSED_PROXY);
        }
        if let Some(home) = &settings.lab_home {
            snapshot.set("HOME", home);
            snapshot.remove("CLAUDE_CONFIG_DIR");
        }
    }
    let inherited = InheritedCredentials::Strip;
    Arc::new(Installed::new(
        settings.claude_setting(),
        snapshot,
        inherited,
    ))
}

/// Nobody listens on the discard port of loopback.
const CLOSED_PROXY: &str = "http://127.0.0.1:9";

/// Where the program keeps what it counts and records: `TURNPASS_STATE`, else `$XDG_STATE_HOME/turnpass`, else
/// `~/.local/state/turnpass`, on Linux and macOS alike.
pub(crate) fn state_dir() -> Option<PathBuf> {
    if let Some(named) = environment(STATE_VARIABLE).filter(|value| !value.is_empty()) {
        return std::path::absolute(named).ok();
    }
    let base = etcetera::base_strategy::Xdg::new().ok()?;
    Some(base.state_dir()?.join("turnpass"))
}

fn cancel_on_signals(cancel: CancellationToken) -> Result<(), Fault> {
    let listen = |kind| {
        signal(kind).map_err(|error| {
            Fault::system(
                format!("signals cannot be listened to: {error}"),
                "Try again.",
            )
        })
    };
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    tokio::spawn(async move {
        for again in [false, true] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            if again {
                // Process groups end with this process: their guards see the end of its pipes.
                std::process::exit(Exit::Cancelled as i32);
            }
            cancel.cancel();
        }
    });
    Ok(())
}
