//! NEEDS THE REAL CLI (`conformance/install`): the pool transport end to end, on every pinned version at once.
//!
//! # Layout
//!
//! - [`bench`]: one pool, its upstream, its home, and the account of its processes and files.
//! - [`talk`]: a host that keeps its conversation, and [`holds`]: whether the service got exactly that.
//! - [`outcomes`], [`contents`], [`steering`]: every way in which a generation ends, and everything that can be said.
//! - [`agent`]: long work with tools.
//! - [`deaths`], [`hosts`], [`cancels`]: what happens when CLI, host or generation go away; [`child`]: this program again.
//! - [`restore`], [`refits`]: conversations that are taken up again, with other settings among them.
//! - [`keys`]: several conversations at once. [`summaries`]: beside, in and without the live process.
//!
//! Each trial is named `VERSION::CASE`. It runs in a network namespace of its own and in a temporary directory of its own.
//! What takes minutes runs when it is asked for (`just soak`); of it, `soak_a_tool_of_400_s` alone waits for time to pass.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::print_stdout
)]

mod agent;
mod bench;
mod cancels;
mod child;
mod contents;
mod deaths;
mod holds;
mod hosts;
mod keys;
mod outcomes;
mod refits;
mod restore;
#[path = "../stage/mod.rs"]
mod stage;
mod steering;
mod summaries;
mod talk;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::sync::LazyLock;
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use turnpass_lab::rig::{self, Isolation, REQUIRE_REAL_CLI, RealCli};

use bench::BOUND;

/// The temporary directory of the whole run; set for the program inside.
const TEMPORARY: &str = "TURNPASS_POOL_REAL_TMP";

/// Trials at once: each has one or two processes of 200 MB, and a start takes a core for a third of a second.
const AT_ONCE: usize = 4;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
});

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// One case: its name, and what it does with a CLI.
struct Case(&'static str, fn(RealCli) -> Running);

macro_rules! cases {
    ($($name:literal => $function:path,)*) => {
        vec![$(Case($name, |cli| Box::pin($function(cli))),)*]
    };
}

/// The longest first, so that the last ones to run are short.
fn cases() -> Vec<Case> {
    cases! {
        "agent_50_turns_120_calls" => agent::long_session,
        "bugs_022_023_cli_killed_at_random" => deaths::ten,
        "bug_021_host_killed_at_random" => hosts::ten,
        "bugs_076_077_cancel_200_times" => cancels::two_hundred,
        "outcomes_stops_at_once" => outcomes::stops_at_once,
        "outcomes_stops_in_pieces" => outcomes::stops_in_pieces,
        "outcomes_bug_094_cuts" => outcomes::cuts,
        "outcomes_refused_requests" => outcomes::refused,
        "outcomes_failing_service" => outcomes::failing,
        "outcomes_bug_049_sign_in" => outcomes::account,
        "contents_text_and_thinking" => contents::texts,
        "contents_tools_in_any_order" => contents::tools,
        "contents_images" => contents::images,
        "contents_the_cli_s_own_tag" => contents::own_tag,
        "bug_072_large_results" => contents::large_results,
        "steering_beside_results" => steering::beside_results,
        "steering_other_than_results" => steering::other_than_results,
        "bug_082_restored" => restore::resumed,
        "restored_for_another_session" => restore::forked,
        "restored_an_edited_history" => restore::edited,
        "restored_older_state_after_a_crash" => restore::older_state,
        "reseeded_with_signed_thinking" => restore::reseeded,
        "bug_079_model_prompt_tools_change" => refits::changes,
        "thinking_of_another_model" => refits::thinking,
        "effort_on_the_live_process" => refits::effort,
        "bug_081_two_keys_never_mixed" => keys::interleaved,
        "keys_in_parallel" => keys::parallel,
        "summary_in_a_fork" => summaries::in_a_fork,
        "summary_in_a_fork_of_an_older_part" => summaries::of_an_older_part,
        "summary_in_place" => summaries::in_place,
        "summary_in_place_in_the_middle_of_calls" => summaries::in_the_middle_of_calls,
        "summary_in_place_after_a_failed_fork" => summaries::after_a_failed_fork,
        "summary_anew" => summaries::anew,
        "summary_of_a_sub_agent" => summaries::of_a_sub_agent,
        "summary_in_which_a_tool_is_called" => summaries::with_a_call,
    }
}

/// Minutes long, so they are left out unless they are asked for.
fn long_cases() -> Vec<Case> {
    cases! {
        "soak_cli_killed_30_times" => deaths::thirty,
        "soak_host_killed_30_times" => hosts::thirty,
        "soak_a_tool_of_400_s" => agent::tool_of_400_s,
    }
}

fn trials(cli: &RealCli, present: bool) -> impl Iterator<Item = Trial> {
    let cases = cases().into_iter().map(move |case| (case, !present));
    let long = long_cases().into_iter().map(|case| (case, true));
    cases.chain(long).map(move |(Case(name, run), ignored)| {
        let of = cli.clone();
        let test = move || {
            RUNTIME.block_on(run(of));
            Ok::<(), Failed>(())
        };
        Trial::test(format!("{}::{name}", cli.version), test).with_ignored_flag(ignored)
    })
}

fn main() -> ExitCode {
    if let Some(code) = child::play() {
        return code;
    }
    // Ends this program on a wrong argument, before anything is made.
    let mut arguments = Arguments::from_args();
    let Some(temporary) = std::env::var_os(TEMPORARY).map(PathBuf::from) else {
        return start_inside();
    };
    let isolation = rig::isolate();
    arguments.test_threads.get_or_insert(AT_ONCE);
    let (found, missing) = versions();
    let hermetic = isolation == Isolation::Namespace;
    let mut all: Vec<Vec<Trial>> = Vec::new();
    for cli in &found {
        all.push(trials(cli, hermetic).collect());
    }
    for version in &missing {
        let cli = RealCli {
            version: version.clone(),
            path: PathBuf::new(),
        };
        all.push(trials(&cli, false).collect());
    }
    let listing = arguments.list;
    let conclusion = libtest_mimic::run(&arguments, in_turns(all));
    let mut good = !conclusion.has_failed();
    if !listing {
        good &= nothing_left(&temporary);
        good &= told(&isolation, &missing);
    }
    // What is in it has been looked at; the directory was made by this program.
    let _ = std::fs::remove_dir_all(&temporary);
    ExitCode::from(u8::from(!good))
}

/// The same case of all versions, then the next one.
fn in_turns(all: Vec<Vec<Trial>>) -> Vec<Trial> {
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

/// Replaces this program by itself with a temporary directory of its own, short enough for sockets in it, and without
/// what a surrounding session may have set.
fn start_inside() -> ExitCode {
    let temporary = PathBuf::from(format!("/tmp/tpp-{:x}", std::process::id()));
    std::fs::create_dir_all(&temporary).unwrap();
    let error = Command::new(std::env::current_exe().unwrap())
        .args(std::env::args_os().skip(1))
        .env("TMPDIR", &temporary)
        .env(TEMPORARY, &temporary)
        .env_remove("XDG_RUNTIME_DIR")
        .exec();
    eprintln!("pool_real: cannot start itself again: {error}");
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
    let left = rig::wait_gone(&rig::descendants(own), BOUND);
    let end = Instant::now() + BOUND;
    let mut dirs = bench::private_dirs(temporary);
    while !dirs.is_empty() && Instant::now() < end {
        std::thread::sleep(bench::LOOK_AGAIN);
        dirs = bench::private_dirs(temporary);
    }
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
            "every trial of the pool on the real CLI: no network namespace ({reason})"
        ));
    }
    for version in missing {
        lines.push(format!(
            "the pool on the real CLI {version}: not installed, run conformance/install"
        ));
    }
    if lines.is_empty() {
        return true;
    }
    let edge = "=".repeat(100);
    eprintln!("{edge}\nNOT CHECKED by pool_real:");
    for line in &lines {
        eprintln!("  - {line}");
    }
    eprintln!("{edge}");
    std::env::var(REQUIRE_REAL_CLI).as_deref() != Ok("1")
}
