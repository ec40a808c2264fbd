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
#[path = "../suite/mod.rs"]
mod suite;
mod surroundings;
mod texts;
mod workflow;

use std::process::ExitCode;

use libtest_mimic::Trial;
use turnpass::relay::{ProcessMode, ToolCarrier};
use turnpass_lab::rig::RealCli;

use bench::Setup;
use suite::{Case, Suite, cases};

const SUITE: Suite = Suite {
    name: "relay_real",
    about: "the relay",
    letters: "tpr",
    at_once: 3,
};

/// Every mode and carrier.
fn everywhere() -> Vec<Case<Setup>> {
    cases! {
        "workflow" => workflow::tool_round,
        "bugs_058_096_097_prefix_stays" => prefix::stays,
        "bugs_064_065_066_071_tools" => texts::many_tools,
        "bug_027_privacy" => privacy::kept,
        "bugs_079_113_refits" => refits::everything,
    }
}

/// Both modes, tools in the extra body.
fn both_modes() -> Vec<Case<Setup>> {
    cases! {
        "bug_125_port_attacked" => ports::attacked,
        "bugs_035_037_planted_configuration" => surroundings::planted,
        "bugs_032_033_034_inherited_environment" => surroundings::inherited,
        "bugs_028_092_texts_are_exact" => texts::exact,
        "bug_004_surrogates" => texts::surrogates,
        "bugs_001_002_large_answers" => texts::large_answers,
        "large_history" => texts::large_history,
        "bug_113_refused_settings" => refits::refused_settings,
        "bug_081_never_mixed" => counts::never_mixed,
        "outcomes_stops" => outcomes::stops,
        "outcomes_bug_094_cuts" => outcomes::cuts,
        "outcomes_refused_requests" => outcomes::refused,
        "outcomes_failing_service" => outcomes::failing,
        "outcomes_bug_049_sign_in_and_money" => outcomes::account,
        "cli_killed_after_the_first_delta" => deaths::cli_killed,
        "bug_021_host_killed" => deaths::host_killed,
        "cancel_after_the_first_delta" => cancels::after_first_delta,
        "bug_077_cancel_early" => cancels::early,
    }
}

/// Kept processes alone.
fn warm_only() -> Vec<Case<Setup>> {
    cases! {
        "one_request_each_and_no_start" => counts::exactly_one,
        "bug_022_cli_killed_between_generations" => deaths::killed_between,
        "bug_076_cancel_then_next" => cancels::next_is_clean,
    }
}

fn trials(cli: &RealCli, present: bool) -> Vec<Trial> {
    const BOTH: [ProcessMode; 2] = [ProcessMode::Warm, ProcessMode::PerRequest];
    let mut trials = Vec::new();
    let mut add = |case: &Case<Setup>, process, tools| {
        let setup = Setup {
            cli: cli.clone(),
            process,
            tools,
        };
        trials.push(case.trial(&setup.name(), setup, present));
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
    SUITE.run(trials, |all| {
        let documented = Trial::test("documented_outcomes", outcomes::documented);
        std::iter::once(documented)
            .chain(all.into_iter().flatten())
            .collect()
    })
}
