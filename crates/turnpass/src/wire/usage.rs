//! Token counters as the API sends them, merged so that nothing is counted twice.

use serde::{Deserialize, Serialize};

use super::lenient;

/// Messages that a [`UsageLedger`] keeps apart. A turn of the CLI with more rounds folds its oldest messages into one sum.
pub const MAX_LEDGER_MESSAGES: usize = 1024;

/// One snapshot of a message's counters. `None` is what the sender left out or sent as null; it is not zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Usage {
    /// Input tokens that came neither from the cache nor were written to it.
    #[serde(deserialize_with = "lenient::option")]
    pub input_tokens: Option<u64>,
    /// Output tokens, thinking included. 1 in `message_start`; final only in `message_delta`.
    #[serde(deserialize_with = "lenient::option")]
    pub output_tokens: Option<u64>,
    /// Input tokens written to the cache.
    #[serde(deserialize_with = "lenient::option")]
    pub cache_creation_input_tokens: Option<u64>,
    /// Input tokens read from the cache.
    #[serde(deserialize_with = "lenient::option")]
    pub cache_read_input_tokens: Option<u64>,
    /// How the cache writes divide by lifetime.
    #[serde(deserialize_with = "lenient::option")]
    pub cache_creation: Option<CacheCreation>,
    /// How the output divides.
    #[serde(deserialize_with = "lenient::option")]
    pub output_tokens_details: Option<OutputDetails>,
}

/// Cache writes by lifetime.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct CacheCreation {
    /// Tokens written for five minutes.
    #[serde(deserialize_with = "lenient::option")]
    pub ephemeral_5m_input_tokens: Option<u64>,
    /// Tokens written for one hour.
    #[serde(deserialize_with = "lenient::option")]
    pub ephemeral_1h_input_tokens: Option<u64>,
}

/// Parts of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct OutputDetails {
    /// Output tokens spent on thinking.
    #[serde(deserialize_with = "lenient::option")]
    pub thinking_tokens: Option<u64>,
}

impl Usage {
    /// Takes over each counter that `later`, a newer snapshot of the same message, has.
    pub fn merge(&mut self, later: &Usage) {
        fn take<T: Copy>(slot: &mut Option<T>, later: Option<T>) {
            *slot = later.or(*slot);
        }
        take(&mut self.input_tokens, later.input_tokens);
        take(&mut self.output_tokens, later.output_tokens);
        take(
            &mut self.cache_creation_input_tokens,
            later.cache_creation_input_tokens,
        );
        take(
            &mut self.cache_read_input_tokens,
            later.cache_read_input_tokens,
        );
        if let Some(later) = later.cache_creation {
            let slot = self.cache_creation.get_or_insert_default();
            take(
                &mut slot.ephemeral_5m_input_tokens,
                later.ephemeral_5m_input_tokens,
            );
            take(
                &mut slot.ephemeral_1h_input_tokens,
                later.ephemeral_1h_input_tokens,
            );
        }
        if let Some(later) = later.output_tokens_details {
            let slot = self.output_tokens_details.get_or_insert_default();
            take(&mut slot.thinking_tokens, later.thinking_tokens);
        }
    }

    /// Adds the counters of another message; absent ones count as zero, and two absent ones stay absent.
    pub fn add(&mut self, other: &Usage) {
        fn sum(slot: &mut Option<u64>, other: Option<u64>) {
            if let Some(other) = other {
                *slot = Some(slot.unwrap_or(0).saturating_add(other));
            }
        }
        sum(&mut self.input_tokens, other.input_tokens);
        sum(&mut self.output_tokens, other.output_tokens);
        sum(
            &mut self.cache_creation_input_tokens,
            other.cache_creation_input_tokens,
        );
        sum(
            &mut self.cache_read_input_tokens,
            other.cache_read_input_tokens,
        );
        if let Some(other) = other.cache_creation {
            let slot = self.cache_creation.get_or_insert_default();
            sum(
                &mut slot.ephemeral_5m_input_tokens,
                other.ephemeral_5m_input_tokens,
            );
            sum(
                &mut slot.ephemeral_1h_input_tokens,
                other.ephemeral_1h_input_tokens,
            );
        }
        if let Some(other) = other.output_tokens_details {
            let slot = self.output_tokens_details.get_or_insert_default();
            sum(&mut slot.thinking_tokens, other.thinking_tokens);
        }
    }

    /// Tokens that the request's prompt filled: plain input, cache writes and cache reads together.
    pub fn prompt_tokens(&self) -> u64 {
        [
            self.input_tokens,
            self.cache_creation_input_tokens,
            self.cache_read_input_tokens,
        ]
        .into_iter()
        .flatten()
        .fold(0, u64::saturating_add)
    }
}

/// Counters of one turn, kept per message id: each block of a message repeats its usage, and only the last snapshot counts.
#[derive(Debug, Clone, Default)]
pub struct UsageLedger {
    /// In the order in which the messages began.
    messages: Vec<(String, Usage)>,
    folded: Usage,
}

impl UsageLedger {
    /// Takes a snapshot of the message `id`.
    pub fn observe(&mut self, id: &str, snapshot: &Usage) {
        // The current message is the last one in all but odd streams, so this search ends at its first step.
        if let Some((_, usage)) = self
            .messages
            .iter_mut()
            .rev()
            .find(|(known, _)| known == id)
        {
            usage.merge(snapshot);
            return;
        }
        if self.messages.len() >= MAX_LEDGER_MESSAGES {
            let (_, oldest) = self.messages.remove(0);
            self.folded.add(&oldest);
        }
        self.messages.push((id.to_owned(), *snapshot));
    }

    /// Sum over all messages: what the turn used.
    pub fn total(&self) -> Usage {
        let mut total = self.folded;
        for (_, usage) in &self.messages {
            total.add(usage);
        }
        total
    }

    /// The newest message's counters, whose [`Usage::prompt_tokens`] is the size of the context.
    pub fn last(&self) -> Option<&Usage> {
        self.messages.last().map(|(_, usage)| usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(json: &str) -> Usage {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn bug_007_null_absent_and_ill_typed_counters_are_absent() {
        let read = usage(
            r#"{"input_tokens":null,"output_tokens":"many","cache_read_input_tokens":3,"cache_creation":null,"output_tokens_details":7,"new":{}}"#,
        );
        assert_eq!(
            read,
            Usage {
                cache_read_input_tokens: Some(3),
                ..Usage::default()
            }
        );
    }

    #[test]
    fn bug_055_the_last_snapshot_of_each_message_counts_once() {
        let mut ledger = UsageLedger::default();
        ledger.observe(
            "msg_1",
            &usage(r#"{"input_tokens":12,"cache_read_input_tokens":100,"output_tokens":1}"#),
        );
        for output in [1, 1, 260] {
            ledger.observe("msg_1", &usage(&format!(r#"{{"input_tokens":12,"cache_read_input_tokens":100,"output_tokens":{output}}}"#)));
        }
        ledger.observe(
            "msg_2",
            &usage(r#"{"input_tokens":5,"cache_read_input_tokens":112,"output_tokens":1}"#),
        );
        ledger.observe("msg_2", &usage(r#"{"output_tokens":7}"#));
        let total = ledger.total();
        assert_eq!(total.output_tokens, Some(267));
        assert_eq!(total.input_tokens, Some(17));
        assert_eq!(ledger.last().unwrap().prompt_tokens(), 117);
    }

    #[test]
    fn a_later_snapshot_replaces_only_what_it_has() {
        let mut first = usage(
            r#"{"input_tokens":12,"output_tokens":1,"cache_creation":{"ephemeral_1h_input_tokens":9}}"#,
        );
        first.merge(&usage(r#"{"output_tokens":40,"cache_creation":{"ephemeral_5m_input_tokens":2},"output_tokens_details":{"thinking_tokens":30}}"#));
        let expected = usage(
            r#"{"input_tokens":12,"output_tokens":40,"cache_creation":{"ephemeral_1h_input_tokens":9,"ephemeral_5m_input_tokens":2},"output_tokens_details":{"thinking_tokens":30}}"#,
        );
        assert_eq!(first, expected);
    }

    #[test]
    fn a_ledger_stays_bounded_and_its_sum_right() {
        let mut ledger = UsageLedger::default();
        let rounds = 3 * MAX_LEDGER_MESSAGES as u64;
        for round in 0..rounds {
            ledger.observe(&round.to_string(), &usage(r#"{"output_tokens":2}"#));
        }
        assert_eq!(ledger.messages.len(), MAX_LEDGER_MESSAGES);
        assert_eq!(ledger.total().output_tokens, Some(2 * rounds));
    }
}
