//! Totals over all generations that a sink has seen, for whoever exports figures.

use std::collections::BTreeMap;

use super::stream::{Outcome, StreamRecord, TokensRecord};
use crate::request::TransportKind;

/// Totals since the sink was opened. They count every generation, also those whose record could not be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordCounters {
    /// Generations by transport and outcome.
    pub generations: BTreeMap<(TransportKind, Outcome), u64>,
    /// Errors by code.
    pub errors: BTreeMap<String, u64>,
    /// Tokens by transport.
    pub tokens: BTreeMap<TransportKind, TokensRecord>,
    /// Messages requests that reached the upstream, as far as transports said.
    pub upstream_requests: u64,
    /// Time of all generations together, in milliseconds.
    pub duration_ms: u64,
    /// Records that are in the file.
    pub written: u64,
    /// Records that the disk did not take.
    pub failed: u64,
    /// Records that found the queue full.
    pub dropped: u64,
}

impl RecordCounters {
    /// All generations of this outcome.
    pub fn of(&self, outcome: Outcome) -> u64 {
        let all = self.generations.iter();
        all.filter(|((_, of), _)| *of == outcome)
            .map(|(_, count)| count)
            .sum()
    }

    pub(super) fn add(&mut self, record: &StreamRecord) {
        let key = (record.transport, record.outcome);
        *self.generations.entry(key).or_default() += 1;
        if let Some(error) = &record.error {
            *self.errors.entry(error.code.clone()).or_default() += 1;
        }
        let tokens = self.tokens.entry(record.transport).or_default();
        for (sum, more) in [
            (&mut tokens.input, record.tokens.input),
            (&mut tokens.output, record.tokens.output),
            (&mut tokens.cache_creation, record.tokens.cache_creation),
            (&mut tokens.cache_read, record.tokens.cache_read),
            (
                &mut self.upstream_requests,
                record.upstream_requests.unwrap_or(0).into(),
            ),
            (&mut self.duration_ms, record.duration_ms),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}
