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
#[path = "../suite/mod.rs"]
mod suite;
mod summaries;
mod talk;

use std::process::ExitCode;

use libtest_mimic::Trial;
use turnpass_lab::rig::RealCli;

use suite::{Case, Suite, cases, in_turns};

const SUITE: Suite = Suite {
    name: "pool_real",
    about: "the pool",
    letters: "tpp",
    at_once: 4,
};

/// The longest first, so that the last ones to run are short.
fn cases() -> Vec<Case<RealCli>> {
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
fn long_cases() -> Vec<Case<RealCli>> {
    cases! {
        "soak_cli_killed_30_times" => deaths::thirty,
        "soak_host_killed_30_times" => hosts::thirty,
        "soak_a_tool_of_400_s" => agent::tool_of_400_s,
    }
}

fn trials(cli: &RealCli, present: bool) -> Vec<Trial> {
    let cases = cases().into_iter().map(|case| (case, present));
    let long = long_cases().into_iter().map(|case| (case, false));
    let all = cases.chain(long);
    all.map(|(case, present)| case.trial(&cli.version, cli.clone(), present))
        .collect()
}

fn main() -> ExitCode {
    if let Some(code) = child::play() {
        return code;
    }
    SUITE.run(trials, in_turns)
}
