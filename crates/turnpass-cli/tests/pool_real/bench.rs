//! One pool with all that it is held against: its upstream, its home, its processes and its files.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use turnpass::Transport as _;
use turnpass::pool::{PoolOptions, PoolTransport};
use turnpass::relay::LoopbackUrl;
use turnpass_lab::rig::{self, MadeUpHome, RealCli};
use turnpass_lab::upstream::{Options, Recorded, Upstream};

pub(crate) use crate::suite::{BOUND, until, within};

/// One pool and its surroundings.
pub(crate) struct Bench {
    pub(crate) pool: PoolTransport,
    pub(crate) up: Upstream,
    pub(crate) cli: RealCli,
    _home: MadeUpHome,
    dir: tempfile::TempDir,
}

/// A process of the CLI that holds or held a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    /// The private directory of its launch.
    pub(crate) dir: PathBuf,
    pub(crate) arguments: String,
}

impl Bench {
    /// A pool without a spare.
    pub(crate) fn new(cli: &RealCli) -> Self {
        Self::with(cli, |_| {})
    }

    /// A pool as the options want it.
    pub(crate) fn with(cli: &RealCli, change: impl FnOnce(&mut PoolOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = MadeUpHome::new(&dir.path().join("home")).unwrap();
        let up = Upstream::start(Options::default()).unwrap();
        let mut options = options(&cli.path, dir.path(), &up.url());
        change(&mut options);
        Self {
            pool: PoolTransport::new(options).unwrap(),
            up,
            cli: cli.clone(),
            _home: home,
            dir,
        }
    }

    /// Another pool on the same upstream, home and state directory, as after a restart of the host.
    pub(crate) async fn restart(self) -> Self {
        within("shutdown", self.pool.shutdown()).await.unwrap();
        self.nothing_left();
        let options = options(&self.cli.path, self.dir.path(), &self.up.url());
        Self {
            pool: PoolTransport::new(options).unwrap(),
            ..self
        }
    }

    /// A directory of the trial's own.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Messages requests that have reached the upstream.
    pub(crate) fn count(&self) -> usize {
        self.up.messages().len()
    }

    /// The newest Messages request.
    pub(crate) fn newest(&self) -> Recorded {
        self.up.messages().pop().expect("a request")
    }

    /// The processes that were started for conversations so far.
    pub(crate) fn spawned(&self) -> Vec<Spawned> {
        spawned(self.dir.path())
    }

    /// Kills the process that was started last, as a crash would.
    pub(crate) fn kill_newest(&self) {
        let newest = self.spawned().pop().expect("a process");
        kill(newest.pid);
    }

    /// Waits until a request's connection is closed by the CLI.
    pub(crate) async fn wait_closed(&self, number: u64) {
        let closed =
            |request: &Recorded| request.number == number && request.reply.ending.is_some();
        let waited = self
            .up
            .wait_for_within("a closed connection", BOUND, closed);
        waited.await.unwrap();
    }

    /// Waits until every process that was started so far is gone with its whole group.
    pub(crate) async fn all_gone(&self) {
        let groups = self.spawned();
        until("all processes are gone", || {
            groups
                .iter()
                .all(|one| rig::alive_in_group(one.pid).is_empty())
        })
        .await;
    }

    /// Shuts the pool down: afterwards no process and no private directory of it is left.
    pub(crate) async fn finish(self) {
        within("shutdown", self.pool.shutdown()).await.unwrap();
        self.nothing_left();
    }

    fn nothing_left(&self) {
        for one in self.spawned() {
            let left = rig::alive_in_group(one.pid);
            assert_eq!(left, Vec::<i32>::new(), "of the group of {}", one.pid);
            assert!(!one.dir.exists(), "{} is left", one.dir.display());
        }
    }
}

/// The options of a pool in `dir`: the CLI is started by a script that notes its process number and arguments and then
/// becomes the CLI, so that every start is counted.
pub(crate) fn options(cli: &Path, dir: &Path, upstream: &str) -> PoolOptions {
    let program = dir.join("claude");
    if !program.exists() {
        let text = format!(
            "#!/bin/sh\necho \"$$ $*\" >> '{}'\nexec '{}' \"$@\"\n",
            dir.join("spawns").display(),
            std::fs::canonicalize(cli).unwrap().display(),
        );
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    PoolOptions {
        claude_path: Some(program),
        spare: false,
        state_dir: Some(dir.join("state")),
        lab_upstream: Some(LoopbackUrl::parse(upstream).unwrap()),
        lab_home: Some(dir.join("home")),
        ..PoolOptions::default()
    }
}

/// The starts that the script in `dir` has noted, but those of `--version` and `auth status`.
pub(crate) fn spawned(dir: &Path) -> Vec<Spawned> {
    let noted = std::fs::read_to_string(dir.join("spawns")).unwrap_or_default();
    let of_conversation = noted.lines().filter(|line| line.contains(" -p "));
    of_conversation
        .map(|line| {
            let (pid, arguments) = line.split_once(' ').unwrap();
            let mut words = arguments.split(' ');
            let settings = words.find(|word| *word == "--settings").and(words.next());
            Spawned {
                pid: pid.parse().unwrap(),
                dir: Path::new(settings.unwrap()).parent().unwrap().to_owned(),
                arguments: arguments.to_owned(),
            }
        })
        .collect()
}

/// `kill -9` of one process; one that is gone already is no error.
pub(crate) fn kill(pid: i32) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

/// Numbers that are the same in each run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        // xorshift64*: good enough to mix, and the same everywhere.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let mixed = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(mixed).unwrap() % limit
    }
}
