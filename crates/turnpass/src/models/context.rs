//! When a conversation has to become shorter, and what says that it already is too long. Pure.
//!
//! | transport | due | too long |
//! | --- | --- | --- |
//! | pool | at 70 % of the window, or at `CompactionThresholdTokens` | the service, or the CLI by itself |
//! | relay | at 80 % of [`super::ceiling_tokens`], at most four times a run | the service, or the estimate before anything is sent |
//! | replay | when it failed with `context_length_exceeded` | the service, or the CLI by itself |

use crate::event::Usage;
use crate::wire::stream_json::{Failure, FailureKind};

/// Share of the window at which a pool's conversation is due (pool document).
pub const POOL_FRACTION: f64 = 0.70;

/// Share of the ceiling at which a relay's conversation is due (relay document).
pub const RELAY_FRACTION: f64 = 0.80;

/// Compactions of one run of a relay (relay document).
pub const RELAY_COMPACTIONS: u32 = 4;

/// So many tokens below the window the CLI refuses by itself, before any request: 176.6k pass and 177.3k do not at 200k,
/// 976.6k and 977.1k at 1M (2.1.332).
pub const LOCAL_REFUSAL_MARGIN_TOKENS: u64 = 23_000;

/// When a conversation is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompactionPolicy {
    /// `CompactionThresholdTokens`: decides alone when it is set. Zero is not set (pool document).
    pub threshold_tokens: Option<u64>,
    /// Share of the window. What is no share (zero, negative, above one, no number) is [`POOL_FRACTION`] (pool document).
    pub fraction: f64,
    /// Compactions of one run; `None` is no limit.
    pub per_run: Option<u32>,
}

impl CompactionPolicy {
    /// The pool document's.
    pub const POOL: Self = Self {
        threshold_tokens: None,
        fraction: POOL_FRACTION,
        per_run: None,
    };

    /// The relay document's.
    pub const RELAY: Self = Self {
        threshold_tokens: None,
        fraction: RELAY_FRACTION,
        per_run: Some(RELAY_COMPACTIONS),
    };

    /// The prompt's size from which on a conversation in this window is due, never zero.
    pub fn threshold(&self, window_tokens: u64) -> u64 {
        let is_share = self.fraction > 0.0 && self.fraction <= 1.0;
        let fraction = if is_share {
            self.fraction
        } else {
            POOL_FRACTION
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "token counts stay far below 2^52, and `as` saturates"
        )]
        let share = (window_tokens as f64 * fraction) as u64;
        self.threshold_tokens
            .filter(|tokens| *tokens > 0)
            .unwrap_or(share)
            .max(1)
    }
}

/// Whether a conversation is due, by the token counts of its *last response*: what the model read for it is what the next
/// request starts from. The sum over a turn with several tool rounds says nothing about that (bug 56).
///
/// `window_tokens` is what counts for the transport: the CLI's window for a pool, [`super::ceiling_tokens`] for a relay.
/// `done` are the compactions of this run. A window of zero is one that nobody knows: then only
/// [`CompactionPolicy::threshold_tokens`] decides.
pub fn compaction_due(
    last_response: &Usage,
    window_tokens: u64,
    policy: &CompactionPolicy,
    done: u32,
) -> bool {
    let may = policy.per_run.is_none_or(|limit| done < limit);
    let is_known = window_tokens > 0 || policy.threshold_tokens.is_some_and(|tokens| tokens > 0);
    may && is_known && last_response.prompt_tokens() >= policy.threshold(window_tokens)
}

/// A conversation that did not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// The service said so. The process goes on with the next turn.
    Upstream,
    /// The CLI said so by itself, without a request ([`LOCAL_REFUSAL_MARGIN_TOKENS`]). Every later turn of this process is
    /// refused too: it is to be rewound behind the refused line, or retired.
    Local,
}

impl Overflow {
    /// Whether a failed turn is an overflow, and whose. Both are `context_length_exceeded` to the host.
    pub fn of(failure: &Failure) -> Option<Self> {
        match (failure.kind, failure.status) {
            // The service's refusal comes with its status, the CLI's own with none (2.1.332).
            (FailureKind::PromptTooLong, None) => Some(Self::Local),
            (FailureKind::PromptTooLong, Some(_)) => Some(Self::Upstream),
            _ => None,
        }
    }

    /// Whether the process may not be used for another turn as it stands.
    pub fn blocks_process(self) -> bool {
        self == Self::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{CEILING_TOKENS, ceiling_tokens};

    fn prompt(input: u64, written: u64, read: u64) -> Usage {
        Usage {
            input_tokens: Some(input),
            cache_creation_input_tokens: Some(written),
            cache_read_input_tokens: Some(read),
            output_tokens: Some(1_000_000),
            ..Usage::default()
        }
    }

    #[test]
    fn the_pool_is_due_at_70_percent_of_the_prompt_with_its_cached_parts() {
        let due = |usage| compaction_due(&usage, 200_000, &CompactionPolicy::POOL, 99);
        assert!(!due(prompt(139_999, 0, 0)));
        assert!(due(prompt(140_000, 0, 0)));
        assert!(due(prompt(1_000, 9_000, 130_000)));
        assert!(!due(Usage::default()));
    }

    #[test]
    fn threshold_tokens_decide_alone() {
        let policy = CompactionPolicy {
            threshold_tokens: Some(50_000),
            ..CompactionPolicy::POOL
        };
        assert!(compaction_due(&prompt(50_000, 0, 0), 1_000_000, &policy, 0));
        assert!(!compaction_due(&prompt(49_999, 0, 0), 1, &policy, 0));
    }

    #[test]
    fn the_relay_is_due_at_80_percent_of_its_own_ceiling_and_four_times_a_run() {
        let relay = CompactionPolicy::RELAY;
        let ceiling = ceiling_tokens(&"sonnet".into());
        assert_eq!(
            (ceiling, relay.threshold(ceiling)),
            (CEILING_TOKENS, 161_600)
        );
        for done in 0..6 {
            let due = compaction_due(&prompt(161_600, 0, 0), ceiling, &relay, done);
            assert_eq!(due, done < 4, "{done}");
        }
        assert!(!compaction_due(&prompt(161_599, 0, 0), ceiling, &relay, 0));
        let extended = ceiling_tokens(&"claude-opus-5-5[1m]".into());
        assert_eq!(relay.threshold(extended), 800_000);
    }

    #[test]
    fn what_is_not_set_is_never_due_by_itself() {
        let full = prompt(1_000_000, 0, 0);
        for (threshold_tokens, fraction) in [
            (None, 0.0),
            (Some(0), 0.7),
            (None, -1.0),
            (None, f64::NAN),
            (None, f64::INFINITY),
            (None, 70.0),
        ] {
            let policy = CompactionPolicy {
                threshold_tokens,
                fraction,
                per_run: None,
            };
            // The pool document's 0.70 is what holds then.
            assert_eq!(policy.threshold(200_000), 140_000, "{policy:?}");
            assert!(!compaction_due(&Usage::default(), 200_000, &policy, 0));
            assert!(!compaction_due(&full, 0, &policy, 0), "no window is known");
        }
        let tokens = CompactionPolicy {
            threshold_tokens: Some(50_000),
            ..CompactionPolicy::POOL
        };
        assert!(compaction_due(&full, 0, &tokens, 0));
        for window in [0, 1, u64::MAX] {
            assert!(!compaction_due(
                &Usage::default(),
                window,
                &CompactionPolicy::RELAY,
                0
            ));
        }
        assert!(compaction_due(
            &prompt(u64::MAX, u64::MAX, u64::MAX),
            u64::MAX,
            &CompactionPolicy::POOL,
            0
        ));
    }

    #[test]
    fn bug_056_the_last_response_counts_and_not_the_sum_of_the_turn() {
        let rounds = [10_000, 20_000, 30_000].map(|input| prompt(input, 0, 0));
        let policy = CompactionPolicy {
            threshold_tokens: Some(40_000),
            ..CompactionPolicy::POOL
        };
        let sum: u64 = rounds.iter().map(Usage::prompt_tokens).sum();
        assert!(sum > 40_000);
        let last = rounds.last().unwrap();
        assert!(!compaction_due(last, 200_000, &policy, 0));
    }

    #[test]
    fn a_local_refusal_is_the_same_overflow_and_blocks_the_process() {
        let failure = |kind, status| Failure {
            kind,
            status,
            word: None,
            text: "Prompt is too long".to_owned(),
        };
        let local = Overflow::of(&failure(FailureKind::PromptTooLong, None));
        let upstream = Overflow::of(&failure(FailureKind::PromptTooLong, Some(400)));
        assert_eq!(
            (local, upstream),
            (Some(Overflow::Local), Some(Overflow::Upstream))
        );
        assert!(Overflow::Local.blocks_process() && !Overflow::Upstream.blocks_process());
        assert_eq!(
            Overflow::of(&failure(FailureKind::InvalidRequest, Some(400))),
            None
        );
        assert!(CompactionPolicy::POOL.threshold(200_000) < 200_000 - LOCAL_REFUSAL_MARGIN_TOKENS);
    }
}
