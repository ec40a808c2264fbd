//! NEEDS THE REAL CLI (`conformance/install`): the relay transport end to end, on every pinned version at once.
//!
//! # Layout
//!
//! - [`bench`]: one transport, its upstream, its home, and the account of its processes and files.
//! - [`workflow`], [`outcomes`]: what a generation is, and every way in which it ends.
//! - [`cancels`], [`deaths`]: what happens when host, CLI or service go away.
//! - [`counts`], [`prefix`], [`refits`]: what the service gets, from one generation to the next.
//! - [`texts`]: what passes unchanged in both directions.
//! - [`ports`], [`privacy`], [`surroundings`]: what nobody else gets to see or to do.
//! - [`child`]: this program again, as a host of its own.
//!
//! Each trial is named `VERSION::MODE::CARRIER::CASE`. It runs in a network namespace of its own and in a temporary
//! directory of its own, so that it can look at every file that was written.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::print_stdout
)]

mod bench;
mod cancels;
mod child;
mod counts;
mod deaths;
mod outcomes;
mod ports;
mod prefix;
mod privacy;
mod refits;
mod surroundings;
mod texts;
mod workflow;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::sync::LazyLock;
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use turnpass::relay::{ProcessMode, ToolCarrier};
use turnpass_lab::rig::{self, Isolation, REQUIRE_REAL_CLI, RealCli};

use bench::{BOUND, Setup};

/// The temporary directory of the whole run; set for the program inside.
const TEMPORARY: &str = "TURNPASS_RELAY_REAL_TMP";

/// Trials at once: each has one or two processes of 200 MB, and a start takes a core for a third of a second.
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

/// Every mode and carrier.
fn everywhere() -> Vec<Case> {
    vec![
        Case("workflow", |s| Box::pin(workflow::tool_round(s))),
        Case("bugs_058_096_097_prefix_stays", |s| {
            Box::pin(prefix::stays(s))
        }),
        Case("bugs_064_065_066_071_tools", |s| {
            Box::pin(texts::many_tools(s))
        }),
        Case("bug_027_privacy", |s| Box::pin(privacy::kept(s))),
        Case("bugs_079_113_refits", |s| Box::pin(refits::everything(s))),
    ]
}

/// Both modes, tools in the extra body.
fn both_modes() -> Vec<Case> {
    vec![
        Case("bug_125_port_attacked", |s| Box::pin(ports::attacked(s))),
        Case("bugs_035_037_planted_configuration", |s| {
            Box::pin(surroundings::planted(s))
        }),
        Case("bugs_032_033_034_inherited_environment", |s| {
            Box::pin(surroundings::inherited(s))
        }),
        Case("bugs_028_092_texts_are_exact", |s| {
            Box::pin(texts::exact(s))
        }),
        Case("bug_004_surrogates", |s| Box::pin(texts::surrogates(s))),
        Case("bugs_001_002_large_answers", |s| {
            Box::pin(texts::large_answers(s))
        }),
        Case("large_history", |s| Box::pin(texts::large_history(s))),
        Case("bug_113_refused_settings", |s| {
            Box::pin(refits::refused_settings(s))
        }),
        Case("bug_081_never_mixed", |s| Box::pin(counts::never_mixed(s))),
        Case("outcomes_stops", |s| Box::pin(outcomes::stops(s))),
        Case("outcomes_bug_094_cuts", |s| Box::pin(outcomes::cuts(s))),
        Case("outcomes_refused_requests", |s| {
            Box::pin(outcomes::refused(s))
        }),
        Case("outcomes_failing_service", |s| {
            Box::pin(outcomes::failing(s))
        }),
        Case("outcomes_bug_049_sign_in_and_money", |s| {
            Box::pin(outcomes::account(s))
        }),
        Case("cli_killed_after_the_first_delta", |s| {
            Box::pin(deaths::cli_killed(s))
        }),
        Case("bug_021_host_killed", |s| Box::pin(deaths::host_killed(s))),
        Case("cancel_after_the_first_delta", |s| {
            Box::pin(cancels::after_first_delta(s))
        }),
        Case("bug_077_cancel_early", |s| Box::pin(cancels::early(s))),
    ]
}

/// Kept processes alone.
fn warm_only() -> Vec<Case> {
    vec![
        Case("one_request_each_and_no_start", |s| {
            Box::pin(counts::exactly_one(s))
        }),
        Case("bug_022_cli_killed_between_generations", |s| {
            Box::pin(deaths::killed_between(s))
        }),
        Case("bug_076_cancel_then_next", |s| {
            Box::pin(cancels::next_is_clean(s))
        }),
    ]
}

fn trials(cli: &RealCli, present: bool) -> Vec<Trial> {
    const BOTH: [ProcessMode; 2] = [ProcessMode::Warm, ProcessMode::PerRequest];
    let mut trials = Vec::new();
    let mut add = |case: &Case, process, tools| {
        let setup = Setup {
            cli: cli.clone(),
            process,
            tools,
        };
        let run = case.1;
        let test = move || {
            RUNTIME.block_on(run(setup));
            Ok::<(), Failed>(())
        };
        let name = Setup {
            cli: cli.clone(),
            process,
            tools,
        }
        .name();
        trials.push(Trial::test(format!("{name}::{}", case.0), test).with_ignored_flag(!present));
    };
    for case in everywhere() {
        for process in BOTH {
            add(&case, process, ToolCarrier::ExtraBody);
            add(&case, process, ToolCarrier::Mcp);
        }
    }
    for case in both_modes() {
        for process in BOTH {
            add(&case, process, ToolCarrier::ExtraBody);
        }
    }
    for case in warm_only() {
        add(&case, ProcessMode::Warm, ToolCarrier::ExtraBody);
    }
    trials
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
    let mut all = vec![Trial::test("documented_outcomes", outcomes::documented)];
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
    let temporary = PathBuf::from(format!("/tmp/tpr-{:x}", std::process::id()));
    std::fs::create_dir_all(&temporary).unwrap();
    let error = Command::new(std::env::current_exe().unwrap())
        .args(std::env::args_os().skip(1))
        .env("TMPDIR", &temporary)
        .env(TEMPORARY, &temporary)
        .env_remove("XDG_RUNTIME_DIR")
        .exec();
    eprintln!("relay_real: cannot start itself again: {error}");
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
            "every trial of the relay on the real CLI: no network namespace ({reason})"
        ));
    }
    for version in missing {
        lines.push(format!(
            "the relay on the real CLI {version}: not installed, run conformance/install"
        ));
    }
    if lines.is_empty() {
        return true;
    }
    let edge = "=".repeat(100);
    eprintln!("{edge}\nNOT CHECKED by relay_real:");
    for line in &lines {
        eprintln!("  - {line}");
    }
    eprintln!("{edge}");
    std::env::var(REQUIRE_REAL_CLI).as_deref() != Ok("1")
}
