//! NEEDS THE REAL CLI (`conformance/install`): the replay transport end to end, on every pinned version at once.
//!
//! # Layout
//!
//! - [`ground`]: one replay with its upstream, its home, and the account of its processes and files.
//! - [`answers`]: what a generation is, with its calls; [`ends`]: every way in which it ends.
//! - [`history`]: what the service gets, from one generation to the next.
//! - [`surroundings`]: the tool server, the person's configuration, and what is left behind.
//!
//! Each trial is named `VERSION::HISTORY::CASE`. It runs in a network namespace of its own and in a temporary directory of
//! its own, so that it can look at every file that was written.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::print_stdout
)]

mod answers;
// The stage of the relay's suite; another part of it is used there.
#[allow(dead_code)]
#[path = "../relay_real/bench.rs"]
mod bench;
mod ends;
mod ground;
mod history;
mod surroundings;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::sync::LazyLock;

use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use turnpass::replay::History;
use turnpass_lab::rig::{self, Isolation, REQUIRE_REAL_CLI, RealCli};

use ground::Setup;

/// The temporary directory of the whole run; set for the program inside.
const TEMPORARY: &str = "TURNPASS_REPLAY_REAL_TMP";

/// Trials at once: each has a process of 200 MB, and a start takes a core for a third of a second.
const AT_ONCE: usize = 3;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
});

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// One case: its name, and what it does with a setup.
struct Case(&'static str, fn(Setup) -> Running);

/// Cases of functions with their own names.
macro_rules! cases {
    ($($module:ident: $($name:ident),* $(,)?;)*) => {
        vec![$($(Case(stringify!($name), |setup| Box::pin($module::$name(setup)))),*),*]
    };
}

/// For both histories.
fn everywhere() -> Vec<Case> {
    cases! {
        answers: replay_workflow, bug_088_parallel_calls_with_large_inputs, bug_059_one_request_for_each_call,
            replay_thinking_and_settings, bug_001_large_answers;
        ends: replay_stops_with_one_request, replay_failing_service, bug_019_replay_deadlines, replay_cancels,
            replay_cli_killed, replay_expired_sign_in;
        history: bug_058_prefix_is_read_from_the_cache, bug_096_many_blocks_in_one_round, bug_091_images_keep_their_place,
            bug_092_texts_are_exact, replay_what_a_long_history_costs;
        surroundings: bug_035_planted_configuration, bug_063_a_slow_tool_server, replay_a_dead_tool_server,
            replay_a_violation, bug_027_nothing_long_on_the_command_line;
    }
}

/// Independent of the history.
fn once() -> Vec<Case> {
    cases! {
        surroundings: bug_021_many_calls_leave_nothing;
    }
}

fn trials(cli: &RealCli, present: bool) -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut add = |case: &Case, history| {
        let setup = Setup {
            cli: cli.clone(),
            history,
        };
        let name = format!("{}::{}", setup.name(), case.0);
        let run = case.1;
        let test = move || {
            RUNTIME.block_on(run(setup));
            Ok::<(), Failed>(())
        };
        trials.push(Trial::test(name, test).with_ignored_flag(!present));
    };
    for case in everywhere() {
        for history in [History::Native, History::Transcript] {
            add(&case, history);
        }
    }
    for case in once() {
        add(&case, History::Native);
    }
    trials
}

fn main() -> ExitCode {
    // Ends this program on a wrong argument, before anything is made.
    let mut arguments = Arguments::from_args();
    let Some(temporary) = std::env::var_os(TEMPORARY).map(PathBuf::from) else {
        return start_inside();
    };
    let isolation = rig::isolate();
    arguments.test_threads.get_or_insert(AT_ONCE);
    let (found, missing) = versions();
    let hermetic = isolation == Isolation::Namespace;
    let mut all = Vec::new();
    for cli in &found {
        all.extend(trials(cli, hermetic));
    }
    for version in &missing {
        let cli = RealCli {
            version: version.clone(),
            path: PathBuf::new(),
        };
        all.extend(trials(&cli, false));
    }
    let listing = arguments.list;
    let conclusion = libtest_mimic::run(&arguments, all);
    let mut good = !conclusion.has_failed();
    if !listing {
        good &= nothing_left(&temporary);
        good &= told(&isolation, &missing);
    }
    // What is in it has been looked at; the directory was made by this program.
    let _ = std::fs::remove_dir_all(&temporary);
    ExitCode::from(u8::from(!good))
}

/// Replaces this program by itself with a temporary directory of its own, short enough for sockets in it, and without
/// what a surrounding session may have set.
fn start_inside() -> ExitCode {
    let temporary = PathBuf::from(format!("/tmp/tpy-{:x}", std::process::id()));
    std::fs::create_dir_all(&temporary).unwrap();
    let error = Command::new(std::env::current_exe().unwrap())
        .args(std::env::args_os().skip(1))
        .env("TMPDIR", &temporary)
        .env(TEMPORARY, &temporary)
        .env_remove("XDG_RUNTIME_DIR")
        .exec();
    eprintln!("replay_real: cannot start itself again: {error}");
    ExitCode::FAILURE
}

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
    let left = rig::wait_gone(&rig::descendants(own), bench::BOUND);
    let dirs = bench::private_dirs(temporary);
    if left.is_empty() && dirs.is_empty() {
        return true;
    }
    eprintln!("LEFT BEHIND: processes {left:?}, directories {dirs:?}");
    false
}

/// Says what was not checked. False when that is a failure.
fn told(isolation: &Isolation, missing: &[String]) -> bool {
    let mut lines = Vec::new();
    if let Isolation::Proxy { reason } = isolation {
        lines.push(format!(
            "every trial of the replay on the real CLI: no network namespace ({reason})"
        ));
    }
    for version in missing {
        lines.push(format!(
            "the replay on the real CLI {version}: not installed, run conformance/install"
        ));
    }
    if lines.is_empty() {
        return true;
    }
    let edge = "=".repeat(100);
    eprintln!("{edge}\nNOT CHECKED by replay_real:");
    for line in &lines {
        eprintln!("  - {line}");
    }
    eprintln!("{edge}");
    std::env::var(REQUIRE_REAL_CLI).as_deref() != Ok("1")
}
