//! What the suites on the real CLI share: a temporary directory and a network namespace for the whole run, every pinned
//! version at once, and at the end the question what was left behind and what was not checked.

// Each suite uses another part of it.
#![allow(dead_code)]

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use turnpass_lab::rig::{self, Isolation, ProductionShape, REQUIRE_REAL_CLI, RealCli};

/// The longest wait for anything. Nothing is asserted of the time itself.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

/// How often a condition without an event of its own is looked at.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(4);

/// The temporary directory of the whole run; set for the program inside.
const TEMPORARY: &str = "TURNPASS_SUITE_TMP";

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
});

/// A case that has begun.
pub(crate) type Running = Pin<Box<dyn Future<Output = ()>>>;

/// One case: its name, and what it does with a setup.
pub(crate) struct Case<S>(pub(crate) &'static str, pub(crate) fn(S) -> Running);

/// Cases: each a name and the function that it is; or modules, each with its functions, which give their own names.
macro_rules! cases {
    ($($name:literal => $function:path,)*) => {
        vec![$($crate::suite::Case($name, |setup| Box::pin($function(setup)))),*]
    };
    ($($module:ident: $($name:ident),* $(,)?;)*) => {
        vec![$($($crate::suite::Case(stringify!($name), |setup| Box::pin($module::$name(setup)))),*),*]
    };
}
pub(crate) use cases;

/// One suite.
pub(crate) struct Suite {
    /// The name of its test target.
    pub(crate) name: &'static str,
    /// What it is about, for the account of what was not checked.
    pub(crate) about: &'static str,
    /// A few letters for its temporary directory, whose path has to be short enough for sockets in it.
    pub(crate) letters: &'static str,
    /// Trials at once: each has processes of 200 MB, and a start takes a core for a third of a second.
    pub(crate) at_once: usize,
}

impl<S: Send + 'static> Case<S> {
    /// A trial of it; one that is not `present` is told as left out.
    pub(crate) fn trial(&self, name: &str, setup: S, present: bool) -> Trial {
        let run = self.1;
        trial(format!("{name}::{}", self.0), present, move || run(setup))
    }
}

/// A trial of what runs; one that is not `present` is told as left out.
pub(crate) fn trial(
    name: String,
    present: bool,
    run: impl FnOnce() -> Running + Send + 'static,
) -> Trial {
    let test = move || {
        RUNTIME.block_on(run());
        Ok::<(), Failed>(())
    };
    Trial::test(name, test).with_ignored_flag(!present)
}

/// Runs a case in this program itself.
pub(crate) fn play(running: Running) {
    RUNTIME.block_on(running);
}

/// Whether a CLI is the newest that is pinned: what does not differ between versions is shown on it.
pub(crate) fn is_newest(cli: &RealCli) -> bool {
    let number = |version: &str| -> Vec<u32> {
        let parts = version.split('.');
        parts.map(|part| part.parse().unwrap()).collect()
    };
    let (found, missing) = versions();
    let found = found.iter().map(|cli| &cli.version);
    let mut all = found.chain(&missing);
    all.all(|version| number(version) <= number(&cli.version))
}

/// The same case of all versions, then the next one.
pub(crate) fn in_turns(all: Vec<Vec<Trial>>) -> Vec<Trial> {
    let mut lists: Vec<_> = all.into_iter().map(Vec::into_iter).collect();
    let mut ordered = Vec::new();
    loop {
        let before = ordered.len();
        ordered.extend(lists.iter_mut().filter_map(Iterator::next));
        if ordered.len() == before {
            return ordered;
        }
    }
}

impl Suite {
    /// Runs the trials that `trials` names for each pinned CLI, one list each; the flag says whether they can run. Called
    /// before any thread is there.
    pub(crate) fn run(
        &self,
        trials: impl Fn(&RealCli, bool) -> Vec<Trial>,
        order: impl FnOnce(Vec<Vec<Trial>>) -> Vec<Trial>,
    ) -> ExitCode {
        let enter = |_: &Path| (rig::isolate(), None);
        self.run_where(enter, |cli, present, _| trials(cli, present), order)
    }

    /// As [`Suite::run`], with the hosts of the CLI in the namespace; the second flag says whether they are. Without them
    /// the namespace alone may still do.
    pub(crate) fn run_on_hosts(
        &self,
        trials: impl Fn(&RealCli, bool, bool) -> Vec<Trial>,
        order: impl FnOnce(Vec<Vec<Trial>>) -> Vec<Trial>,
    ) -> ExitCode {
        let enter = |temporary: &Path| match ProductionShape::enter(temporary) {
            Ok(_) => (Isolation::Namespace, None),
            Err(reason) => (rig::isolate(), Some(reason.to_string())),
        };
        self.run_where(enter, trials, order)
    }

    /// Runs the trials where `enter` puts this program; it also says why the hosts of the CLI are not there.
    fn run_where(
        &self,
        enter: impl FnOnce(&Path) -> (Isolation, Option<String>),
        trials: impl Fn(&RealCli, bool, bool) -> Vec<Trial>,
        order: impl FnOnce(Vec<Vec<Trial>>) -> Vec<Trial>,
    ) -> ExitCode {
        // Ends this program on a wrong argument, before anything is made.
        let mut arguments = Arguments::from_args();
        let Some(temporary) = std::env::var_os(TEMPORARY).map(PathBuf::from) else {
            return self.start_inside();
        };
        let (isolation, no_hosts) = enter(&temporary);
        arguments.test_threads.get_or_insert(self.at_once);
        let (found, missing) = versions();
        let hermetic = isolation == Isolation::Namespace;
        let hosts = no_hosts.is_none();
        let mut all: Vec<_> = found
            .iter()
            .map(|cli| trials(cli, hermetic, hosts))
            .collect();
        all.extend(missing.iter().map(|version| {
            let cli = RealCli {
                version: version.clone(),
                path: PathBuf::new(),
            };
            trials(&cli, false, false)
        }));
        let conclusion = libtest_mimic::run(&arguments, order(all));
        let mut good = !conclusion.has_failed();
        if !arguments.list {
            good &= nothing_left(&temporary);
            good &= self.told(&isolation, no_hosts, &missing);
        }
        // What is in it has been looked at; the directory was made by this program.
        let _ = std::fs::remove_dir_all(&temporary);
        ExitCode::from(u8::from(!good))
    }

    /// Replaces this program by itself with a temporary directory of its own, and without what a surrounding session may
    /// have set.
    fn start_inside(&self) -> ExitCode {
        let temporary = PathBuf::from(format!("/tmp/{}-{:x}", self.letters, std::process::id()));
        std::fs::create_dir_all(&temporary).unwrap();
        let error = Command::new(std::env::current_exe().unwrap())
            .args(std::env::args_os().skip(1))
            .env("TMPDIR", &temporary)
            .env(TEMPORARY, &temporary)
            .env_remove("XDG_RUNTIME_DIR")
            .exec();
        eprintln!("{}: cannot start itself again: {error}", self.name);
        ExitCode::FAILURE
    }

    /// Says what was not checked. False when that is a failure.
    fn told(&self, isolation: &Isolation, no_hosts: Option<String>, missing: &[String]) -> bool {
        let mut lines = Vec::new();
        lines.extend(no_hosts.map(|reason| format!("the trials on the CLI's own hosts: {reason}")));
        if let Isolation::Proxy { reason } = isolation {
            let about = self.about;
            lines.push(format!(
                "every trial of {about} on the real CLI: no network namespace ({reason})"
            ));
        }
        lines.extend(missing.iter().map(|version| {
            let about = self.about;
            format!("{about} on the real CLI {version}: not installed, run conformance/install")
        }));
        if lines.is_empty() {
            return true;
        }
        let edge = "=".repeat(100);
        eprintln!("{edge}\nNOT CHECKED by {}:", self.name);
        for line in &lines {
            eprintln!("  - {line}");
        }
        eprintln!("{edge}");
        std::env::var(REQUIRE_REAL_CLI).as_deref() != Ok("1")
    }
}

/// The pinned versions that are installed, and those that are not.
fn versions() -> (Vec<RealCli>, Vec<String>) {
    let conformance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let found = RealCli::find_all(&conformance);
    let pinned = std::fs::read_dir(&conformance)
        .into_iter()
        .flatten()
        .flatten();
    let mut missing: Vec<String> = pinned
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("cli-")?.to_owned()))
        .filter(|version| found.iter().all(|cli| cli.version != *version))
        .collect();
    missing.sort();
    (found, missing)
}

/// Every process of the whole run is gone, and no private directory of a transport is left.
fn nothing_left(temporary: &Path) -> bool {
    let own = i32::try_from(std::process::id()).unwrap();
    let left = rig::wait_gone(&rig::descendants(own), BOUND);
    let end = Instant::now() + BOUND;
    let mut dirs = private_dirs(temporary);
    while !dirs.is_empty() && Instant::now() < end {
        std::thread::sleep(LOOK_AGAIN);
        dirs = private_dirs(temporary);
    }
    if left.is_empty() && dirs.is_empty() {
        return true;
    }
    eprintln!("LEFT BEHIND: processes {left:?}, directories {dirs:?}");
    false
}

/// The private directories of transports in a temporary directory.
pub(crate) fn private_dirs(temporary: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(temporary).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("turnpass-"))
        .map(|entry| entry.path())
        .collect()
}

/// Waits until a condition holds, at most [`BOUND`].
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + BOUND;
    while !holds() {
        assert!(Instant::now() < end, "not within {BOUND:?}: {what}");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Waits for a future, at most [`BOUND`].
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(BOUND, future).await {
        Ok(done) => done,
        Err(_) => panic!("not within {BOUND:?}: {what}"),
    }
}
