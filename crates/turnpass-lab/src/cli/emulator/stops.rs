//! How a turn ends that does not end well, or not by the model's word.

use serde_json::json;

use super::forward::{Ended, Out};
use super::records::{self, Failure};
use super::state::State;
use super::turn::{CUT_OFF, EMPTY, Shared, say_streaming};

/// Whether less may be spent than any request costs; the emulator has no prices.
pub(super) fn is_over_budget(state: &State) -> bool {
    const CHEAPEST_USD: f64 = 0.00001;
    let budget = state.flags.value("--max-budget-usd");
    let budget = budget.and_then(|text| text.parse::<f64>().ok());
    budget.is_some_and(|budget| budget < CHEAPEST_USD)
}

/// As 2.1.294, 2.1.310 and 2.1.332 end a turn whose budget is used up.
pub(super) fn over_budget(shared: &Shared) {
    shared.with_outcome(|outcome| {
        outcome.subtype = "error_max_budget_usd";
        outcome.is_error = true;
        outcome.terminal_reason = "budget_exhausted";
        outcome.result = None;
        outcome.errors = vec!["Reached maximum budget".to_owned()];
    });
}

pub(super) fn max_turns(shared: &Shared, limit: u64) {
    shared.with_outcome(|outcome| {
        outcome.subtype = "error_max_turns";
        outcome.is_error = true;
        outcome.terminal_reason = "max_turns";
        outcome.num_turns = limit + 1;
        outcome.result = None;
        outcome.errors = vec![format!("Reached maximum number of turns ({limit})")];
    });
}

pub(super) fn give_up(shared: &Shared, why: &str) {
    if why == EMPTY {
        return;
    }
    let (error, api_error) = if why == CUT_OFF {
        ("server_error", Some("connection_failed"))
    } else {
        ("max_output_tokens", None)
    };
    let text = "API Error: the answer could not be completed".to_owned();
    let failure = Failure {
        error,
        api_error,
        text,
        terminal_reason: "api_error",
        ..Failure::default()
    };
    fail(shared, failure);
}

/// Ends the turn with a failure. Its synthetic record goes before the made-up stops of a broken stream.
pub(super) fn fail(shared: &Shared, failure: Failure) {
    let record = records::synthetic(&shared.state.borrow(), &failure);
    let closing = {
        let mut progress = shared.progress.borrow_mut();
        match progress.forward.as_mut() {
            Some(forward) if forward.ended() != Ended::Whole && !forward.is_stopped() => {
                forward.abandon(false, vec![record])
            }
            _ => vec![Out::Record(record)],
        }
    };
    for out in closing {
        if let Out::Record(record) = out {
            say_streaming(shared, |_| record);
        }
    }
    shared.with_outcome(|outcome| {
        outcome.is_error = true;
        outcome.terminal_reason = failure.terminal_reason;
        outcome.stop_reason = json!("stop_sequence");
        outcome.result = Some(failure.text.clone());
        outcome.failure = Some(failure);
    });
}

pub(super) fn refusal() -> Failure {
    let text = "API Error: the model declined to answer".to_owned();
    Failure {
        error: "invalid_request",
        text,
        terminal_reason: "api_error",
        ..Failure::default()
    }
}
