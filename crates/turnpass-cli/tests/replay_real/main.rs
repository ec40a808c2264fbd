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
#[path = "../suite/mod.rs"]
mod suite;
mod surroundings;

use std::process::ExitCode;

use libtest_mimic::Trial;
use turnpass::replay::History;
use turnpass_lab::rig::RealCli;

use ground::Setup;
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
    }
}

/// Independent of the history.
fn once() -> Vec<Case<Setup>> {
    cases! {
        surroundings: bug_021_many_calls_leave_nothing;
    }
}

fn trials(cli: &RealCli, present: bool) -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut add = |case: &Case<Setup>, history| {
        let setup = Setup {
            cli: cli.clone(),
            history,
        };
        trials.push(case.trial(&setup.name(), setup, present));
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
    SUITE.run(trials, |all| all.into_iter().flatten().collect())
}
