//! NEEDS THE REAL CLI (`conformance/install`): the replay transport end to end, on every pinned version at once.
//!
//! # Layout
//!
//! - [`ground`]: one replay with its upstream, its home, and the account of its processes and files.
//! - [`answers`]: what a generation is, with its calls; [`ends`]: every way in which it ends.
//! - [`history`]: what the service gets, from one generation to the next.
//! - [`surroundings`]: the tool server, the person's configuration, and what is left behind.
//! - [`breaches`]: what the CLI shows and must not show, and what is refused before it is started.
//! - [`production`]: the CLI on its own hosts; [`signing_in`] and [`money`] are only there.
//!
//! Each trial is named `VERSION::HISTORY::CASE`, or `VERSION::HISTORY::production::CASE`. All run in one network
//! namespace, each in a temporary directory of its own, so that it can look at every file that was written.

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
mod breaches;
mod ends;
mod ground;
mod history;
mod money;
mod production;
mod signing_in;
#[path = "../suite/mod.rs"]
mod suite;
mod surroundings;

use std::process::ExitCode;

use libtest_mimic::Trial;
use turnpass::replay::History;
use turnpass_lab::rig::RealCli;

use ground::{Setup, Shape};
use suite::{Case, Suite, cases};

const SUITE: Suite = Suite {
    name: "replay_real",
    about: "the replay",
    letters: "tpy",
    at_once: 3,
};

/// For both histories.
fn everywhere() -> Vec<Case<Setup>> {
    cases! {
        answers: replay_workflow, bug_088_parallel_calls_with_large_inputs, bug_059_one_request_for_each_call,
            replay_thinking_and_settings, bug_001_large_answers;
        ends: replay_stops_with_one_request, replay_failing_service, bug_019_replay_deadlines, replay_cancels,
            replay_cli_killed, replay_expired_sign_in;
        history: bug_058_prefix_is_read_from_the_cache, bug_096_many_blocks_in_one_round, bug_091_images_keep_their_place,
            bug_092_texts_are_exact, replay_what_a_long_history_costs;
        surroundings: bug_035_planted_configuration, bug_063_a_slow_tool_server, replay_a_dead_tool_server,
            replay_a_violation, bug_027_nothing_long_on_the_command_line;
        breaches: replay_built_in_plugin_slips_through, replay_limits_are_refused_before_anything_is_started;
    }
}

/// Independent of the history.
fn once() -> Vec<Case<Setup>> {
    cases! {
        surroundings: bug_021_many_calls_leave_nothing;
        breaches: replay_each_breach_fails_closed_with_its_code, replay_no_version_keeps_an_image_by_path_in_place;
    }
}

/// Minutes long, so they run when they are asked for (`just soak`).
fn long() -> Vec<Case<Setup>> {
    cases! {
        surroundings: soak_200_calls_of_which_50_are_killed_leave_nothing;
    }
}

/// On the CLI's own hosts, for both histories.
fn in_production() -> Vec<Case<Setup>> {
    cases! {
        answers: replay_workflow, bug_088_parallel_calls_with_large_inputs, replay_thinking_and_settings;
        ends: replay_stops_with_one_request, replay_cancels;
        history: bug_091_images_keep_their_place;
        money: replay_gate_before_each_message;
    }
}

/// On the CLI's own hosts, where the history makes no difference.
fn in_production_once() -> Vec<Case<Setup>> {
    cases! {
        answers: bug_059_one_request_for_each_call;
        ends: replay_failing_service, replay_expired_sign_in;
        surroundings: bug_035_planted_configuration;
        signing_in: replay_expired_sign_in_with_a_place_to_ask, replay_requests_that_expire_together_share_one_login,
            replay_wrong_code_and_second_expiry, replay_a_login_that_nobody_completes;
        money: replay_gate_with_credits_on, bug_052_replay_overage_in_a_turn, bug_048_replay_limits_and_throttles;
    }
}

/// The trials of one version. Those in production shape, and those where versions do not differ, are of the newest; the
/// others are run by their name with `--ignored`.
fn trials(cli: &RealCli, present: bool, production: bool) -> Vec<Trial> {
    const BOTH: &[History] = &[History::Native, History::Transcript];
    const ONE: &[History] = &[History::Native];
    let newest = suite::is_newest(cli);
    let (base, own) = (Shape::BaseUrl, Shape::Production);
    let mut trials = Vec::new();
    for (cases, histories, shape, runs) in [
        (everywhere(), BOTH, base, present),
        (once(), ONE, base, present && newest),
        (long(), ONE, base, false),
        (in_production(), BOTH, own, production && newest),
        (in_production_once(), ONE, own, production && newest),
    ] {
        for (case, history) in cases
            .iter()
            .flat_map(|case| histories.iter().map(move |one| (case, *one)))
        {
            let setup = Setup {
                cli: cli.clone(),
                history,
                shape,
            };
            let name = setup.name();
            let case_name = case.0;
            trials.push(match shape {
                Shape::BaseUrl => case.trial(&name, setup, runs),
                Shape::Production => {
                    suite::trial(format!("{name}::{case_name}"), runs, move || {
                        Box::pin(production::trial(setup, case_name))
                    })
                }
            });
        }
    }
    trials
}

fn main() -> ExitCode {
    if let Some(code) = production::play() {
        return code;
    }
    SUITE.run_on_hosts(trials, |all| all.into_iter().flatten().collect())
}
