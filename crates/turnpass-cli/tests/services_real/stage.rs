//! One upstream on the CLI's own hosts, one made-up home, and the ways to run things between them.

use std::ffi::OsStr;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use turnpass::cli::environment::{InheritedCredentials, Snapshot};
use turnpass::cli::installed::Installed;
use turnpass::limits::probe::Probe;
use turnpass_lab::rig::{MadeUpHome, ProductionShape, RealCli, SignIn};
use turnpass_lab::upstream::{Options, Upstream};

/// Longer than anything here takes on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// From the end of a command to the end of what it killed.
const GONE: Duration = Duration::from_secs(10);

pub(crate) struct Stage {
    pub(crate) upstream: Upstream,
    pub(crate) claude: PathBuf,
    dir: PathBuf,
    authority: PathBuf,
}

pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(self.out.trim()).unwrap_or_else(|_| panic!("{}{}", self.out, self.err))
    }

    pub(crate) fn lines(&self) -> Vec<Value> {
        let lines = self.out.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

impl Stage {
    pub(crate) fn set(cli: &RealCli, shape: &ProductionShape, dir: &Path) -> Self {
        std::fs::create_dir_all(dir.join("t")).unwrap();
        std::fs::create_dir_all(dir.join("w")).unwrap();
        MadeUpHome::with(&dir.join("h"), SignIn::SignedIn).unwrap();
        let upstream = Upstream::start(Options {
            addr: SocketAddr::from(([127, 0, 0, 1], 443)),
            tls: Some(shape.server_config()),
            ..Options::default()
        });
        Self {
            upstream: upstream.unwrap(),
            claude: std::path::absolute(&cli.path).unwrap(),
            dir: dir.to_owned(),
            authority: shape.authority_file().to_owned(),
        }
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.dir.join("h")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        vec![
            ("HOME", self.home()),
            ("PATH", "/usr/bin:/bin".into()),
            ("TMPDIR", self.dir.join("t")),
            ("NODE_EXTRA_CA_CERTS", self.authority.clone()),
        ]
    }

    /// The installed CLI as the library uses it.
    pub(crate) fn installed(&self) -> Arc<Installed> {
        let snapshot: Snapshot = self.variables().into_iter().collect();
        let strip = InheritedCredentials::Strip;
        Arc::new(Installed::new(Some(self.claude.clone()), snapshot, strip))
    }

    pub(crate) fn probe(&self) -> Probe {
        Probe::new(self.installed())
    }

    /// Runs a future of the library to its end.
    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime
            .block_on(async { tokio::time::timeout(PATIENCE, future).await })
            .unwrap()
    }

    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(self.variables())
            .env("TURNPASS_CLAUDE_PATH", &self.claude)
            .env("TURNPASS_TRANSPORT", "relay")
            .current_dir(self.dir.join("w"))
            .stdin(Stdio::null());
        command
    }

    /// Runs the program.
    pub(crate) fn turnpass(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(env!("CARGO_BIN_EXE_turnpass"));
        let output = command.args(arguments).output().unwrap();
        Ended {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// How often the usage endpoint was asked.
    pub(crate) fn asked(&self) -> usize {
        let requests = self.upstream.requests();
        let usage = requests.iter().filter(|one| one.path == "/api/oauth/usage");
        usage.count()
    }

    /// Private directories and processes of this stage that are still there after a moment: a process that was killed
    /// needs some milliseconds to give its memory back.
    pub(crate) fn left(&self) -> Vec<String> {
        let end = Instant::now() + GONE;
        loop {
            let left = self.left_now();
            if left.is_empty() || Instant::now() > end {
                return left;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Those of this moment.
    pub(crate) fn left_now(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.join("t")).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut left: Vec<_> = names.filter(|name| name.starts_with("turnpass-")).collect();
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            let environ = std::fs::read(process.path().join("environ")).unwrap_or_default();
            let home = format!("HOME={}", self.home().display());
            if String::from_utf8_lossy(&environ)
                .split('\0')
                .any(|one| one == home)
            {
                let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
                // A zombie that its parent has not reaped yet has no command line.
                if !line.is_empty() {
                    left.push(String::from_utf8_lossy(&line).replace('\0', " "));
                }
            }
        }
        left
    }
}
