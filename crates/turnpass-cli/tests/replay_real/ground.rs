//! One replay with all that it is held against: its upstream, its home, its processes and its files.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use turnpass::cli::environment::InheritedCredentials;
use turnpass::relay::LoopbackUrl;
use turnpass::replay::{History, ReplayOptions, ReplayTransport};
use turnpass::request::Request;
use turnpass::{Generation, Transport};
use turnpass_lab::rig::{self, MadeUpHome, RealCli};
use turnpass_lab::upstream::{Options, Recorded, Upstream};

use crate::bench::{Answer, Spawned, drain, until, within};
use crate::production;

/// Where the CLI believes that its service is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// At a loopback address that its environment names.
    BaseUrl,
    /// At its own hosts, without any word of ours; they are on loopback ([`production`]).
    Production,
}

/// What a trial runs on.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) cli: RealCli,
    pub(crate) history: History,
    pub(crate) shape: Shape,
}

impl Setup {
    /// The beginning of its trials' names.
    pub(crate) fn name(&self) -> String {
        let shape = match self.shape {
            Shape::BaseUrl => "",
            Shape::Production => "::production",
        };
        format!("{}::{}{shape}", self.cli.version, self.history)
    }

    pub(crate) fn is_production(&self) -> bool {
        self.shape == Shape::Production
    }

    pub(crate) fn is_native(&self) -> bool {
        self.history == History::Native
    }
}

/// One replay and its surroundings.
pub(crate) struct Ground {
    pub(crate) replay: ReplayTransport,
    pub(crate) up: Upstream,
    pub(crate) home: MadeUpHome,
    pub(crate) options: ReplayOptions,
    dir: Place,
}

/// A directory of a trial's own.
enum Place {
    Temporary(tempfile::TempDir),
    /// In production shape the environment of the whole process names it, and its parent removes it.
    Given(PathBuf),
}

impl Place {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(dir) => dir.path(),
            Self::Given(path) => path,
        }
    }
}

impl Ground {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self::with(setup, |_, _| {})
    }

    /// A replay as the options want it; the change also gets the trial's own directory.
    pub(crate) fn with(setup: &Setup, change: impl FnOnce(&mut ReplayOptions, &Path)) -> Self {
        let (dir, upstream) = match setup.shape {
            Shape::BaseUrl => (
                Place::Temporary(tempfile::tempdir().unwrap()),
                Options::default(),
            ),
            Shape::Production => (Place::Given(production::place()), production::upstream()),
        };
        let home = MadeUpHome::new(&dir.path().join("home")).unwrap();
        let up = Upstream::start(upstream).unwrap();
        let mut options = options(setup, dir.path(), &up.url());
        change(&mut options, dir.path());
        Self {
            replay: ReplayTransport::new(options.clone()).unwrap(),
            up,
            home,
            options,
            dir,
        }
    }

    /// Another transport on the same ground.
    pub(crate) fn another(&self) -> ReplayTransport {
        ReplayTransport::new(self.options.clone()).unwrap()
    }

    /// A directory of the trial's own.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Messages requests that have reached the upstream.
    pub(crate) fn count(&self) -> usize {
        self.up.messages().len()
    }

    /// One generation to its end, and the Messages requests that it caused. Its process and its files are gone before its
    /// end is heard, so nothing can come later.
    pub(crate) async fn ask(&self, request: Request) -> (Answer, Vec<Recorded>) {
        let before = self.count();
        let answer = drain(self.replay.generate(request)).await;
        if answer.end.is_ok() {
            self.nothing_left();
        }
        self.all_gone().await;
        (answer, self.up.messages().split_off(before))
    }

    /// A generation that is left to its host.
    pub(crate) fn generate(&self, request: Request) -> Generation {
        self.replay.generate(request)
    }

    /// The processes that were started for generations so far.
    pub(crate) fn spawned(&self) -> Vec<Spawned> {
        self.started(" --max-turns ")
    }

    /// The processes that were started to be asked for use, and say nothing to the service.
    pub(crate) fn probes(&self) -> Vec<Spawned> {
        let generations = self.spawned();
        let mut all = self.started(" -p ");
        all.retain(|one| !generations.contains(one));
        all
    }

    /// Starts whose command line holds a word.
    fn started(&self, word: &str) -> Vec<Spawned> {
        let noted = std::fs::read_to_string(self.dir().join("spawns")).unwrap_or_default();
        let lines = noted.lines().filter(|line| line.contains(word));
        let of = |line: &str| {
            let mut words = line.split(' ');
            let pid = words.next().unwrap().parse().unwrap();
            let mut files = words.skip_while(|word| *word != "--settings");
            let dir = Path::new(files.nth(1).unwrap())
                .parent()
                .unwrap()
                .to_owned();
            Spawned { pid, dir }
        };
        lines.map(of).collect()
    }

    /// Waits until every process that was started so far is gone with its whole group, and its files with it.
    pub(crate) async fn all_gone(&self) {
        let all = self.spawned();
        until("all processes are gone with their files", || {
            all.iter()
                .all(|one| rig::alive_in_group(one.pid).is_empty() && !one.dir.exists())
        })
        .await;
    }

    /// Now, without waiting.
    #[track_caller]
    pub(crate) fn nothing_left(&self) {
        self.gone(&self.spawned());
    }

    #[track_caller]
    fn gone(&self, all: &[Spawned]) {
        for one in all {
            let left = rig::alive_in_group(one.pid);
            assert_eq!(left, Vec::<i32>::new(), "of the group of {}", one.pid);
            assert!(!one.dir.exists(), "{} is left", one.dir.display());
        }
    }

    /// Shuts the transport down: afterwards no process and no private directory of a generation is left.
    pub(crate) async fn finish(self) {
        within("shutdown", self.replay.shutdown()).await.unwrap();
        self.gone(&self.spawned());
        // A process that was asked for use has been killed by then, and is not waited for.
        until("every process is gone", || {
            let all = self.started(" -p ");
            all.iter()
                .all(|one| rig::alive_in_group(one.pid).is_empty() && !one.dir.exists())
        })
        .await;
    }
}

/// The CLI is started by a script that notes its process number and arguments and then becomes the CLI, so that every
/// start is counted.
fn options(setup: &Setup, dir: &Path, upstream: &str) -> ReplayOptions {
    let text = format!(
        "#!/bin/sh\necho \"$$ $*\" >> '{}'\nexec '{}' \"$@\"\n",
        dir.join("spawns").display(),
        std::fs::canonicalize(&setup.cli.path).unwrap().display(),
    );
    let mut options = ReplayOptions {
        history: Some(setup.history),
        claude_path: Some(script(dir, "claude", &text)),
        tool_server: Some(env!("CARGO_BIN_EXE_turnpass").into()),
        inherited_credentials: InheritedCredentials::Strip,
        ..ReplayOptions::default()
    };
    if setup.shape == Shape::BaseUrl {
        options.lab_upstream = Some(LoopbackUrl::parse(upstream).unwrap());
        options.lab_home = Some(dir.join("home"));
    }
    options
}

/// A shell script that can be run.
pub(crate) fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}
