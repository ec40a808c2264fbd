//! The contract of a transport: one list of scenarios, run over every way of reaching the service.
//!
//! A row is a way: today the relay's two kinds of process with its two carriers of tools. Another transport joins with a
//! row of its own.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod answers;
mod ends;
mod failures;
#[path = "../growing/mod.rs"]
mod growing;
mod history;
#[path = "../stage/mod.rs"]
mod stage;

use std::future::Future;
use std::pin::Pin;

use libtest_mimic::{Arguments, Trial};
use turnpass::Provider;

use crate::stage::{Stage, Way};

/// What a scenario is given: the stage, and the way to a provider on it.
pub(crate) struct Ground<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) provider: &'a dyn Fn() -> Provider,
    pub(crate) way: Way,
}

type Run = for<'a> fn(&'a Ground<'a>) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One thing that every transport has to do.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: Run,
}

/// Makes [`Scenario`]s of async functions with their own names.
macro_rules! scenarios {
    ($($module:ident: $($name:ident),* $(,)?;)*) => {
        vec![$($(Scenario { name: stringify!($name), run: |ground| Box::pin($module::$name(ground)) }),*),*]
    };
}

/// Every scenario.
pub(crate) fn all() -> Vec<Scenario> {
    scenarios! {
        answers: a_text_streams_and_ends, thinking_comes_before_its_answer_and_goes_back_unchanged,
            a_call_is_whole_and_its_result_goes_on, text_beside_results_goes_in_one_message, parallel_calls_of_one_tool_keep_their_ids,
            bug_119_a_call_without_arguments_is_an_empty_object, bug_068_a_tool_that_was_not_offered_is_rejected,
            input_that_does_not_parse_is_rejected_with_its_text, bug_071_any_name_of_a_tool_comes_back,
            bug_100_hidden_thinking_makes_no_card, every_setting_arrives, bug_054_each_session_has_its_own_model,
            many_at_once_each_get_their_own, a_slow_host_gets_everything, bug_098_thinking_between_calls_goes_back_unchanged;
        ends: bug_115_each_stop_reason_is_passed_on_with_one_request, bug_115_null_is_an_error,
            bug_094_an_answer_without_text_is_passed_on, a_dropped_generation_closes_the_connection,
            a_generation_dropped_before_its_answer_costs_nothing_more, a_killed_cli_is_one_error_and_the_next_works,
            bug_019_silence_before_and_within_an_answer_ends, bug_102_pings_are_no_progress,
            the_overall_deadline_holds_for_a_busy_answer, shutdown_ends_what_runs, nothing_is_left_behind;
        failures: each_status_is_its_error, bug_048_a_usage_limit_tells_its_reset_and_a_throttle_is_retryable,
            bug_049_a_billing_refusal_is_billing, bug_041_a_live_401_is_an_auth_error_after_one_renewal,
            an_error_event_is_its_error, a_cut_stream_is_interrupted_and_releases_no_tool,
            bug_095_compressed_answers_and_errors_are_read, an_unreachable_service_is_told;
        history: bug_105_to_109_any_history_is_made_valid, bug_058_a_growing_conversation_keeps_its_bytes,
            images_and_documents_keep_their_place, bug_004_half_a_pair_never_leaves, bug_028_nul_in_text_passes,
            bug_092_paths_and_commands_in_text_reach_the_model, bug_109_an_unanswered_call_is_refused_before_anything_starts,
            an_agent_that_grows_is_summed_up_once_and_goes_on;
    }
}

fn main() {
    let mut arguments = Arguments::from_args();
    // They mostly wait for other processes.
    arguments.test_threads.get_or_insert(6);
    let mut trials = Vec::new();
    for way in Way::all() {
        for scenario in all() {
            let name = format!("{}::{}", way.name(), scenario.name);
            trials.push(Trial::test(name, move || {
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()?;
                runtime.block_on(async {
                    let stage = Stage::emulator();
                    let ground = Ground {
                        stage: &stage,
                        provider: &|| way.provider(&stage),
                        way,
                    };
                    (scenario.run)(&ground).await;
                });
                Ok(())
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
