//! Ids of calls: the service takes `[A-Za-z0-9_-]`, at most 64, and each once in a conversation.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use sha2::{Digest as _, Sha256};

use crate::conversation::names::{clean, hex, is_safe};

/// Longest id that is sent, in bytes.
pub const ID_BYTES: usize = 64;

/// Hex digits that tell replaced ids apart.
const HASH_DIGITS: usize = 16;

/// Gives out the ids of one conversation, call by call.
///
/// An id that the service takes stays, unless an earlier call has it. Any other becomes its clean characters, `_`, and
/// digits of the SHA-256 of the id and of how often it had to be told apart. So a call's id depends on the calls before it
/// alone, and stays when the conversation grows.
#[derive(Debug, Default)]
pub(super) struct Ids<'a> {
    used: HashSet<Cow<'a, str>>,
    /// How often an id has been replaced, so that ten thousand calls of one id do not try each other's digits.
    replaced: HashMap<&'a str, u64>,
}

impl<'a> Ids<'a> {
    /// The id of the next call.
    pub(super) fn next(&mut self, host: &'a str) -> Cow<'a, str> {
        let fits = (1..=ID_BYTES).contains(&host.len()) && host.bytes().all(is_safe);
        if fits && self.used.insert(Cow::Borrowed(host)) {
            return Cow::Borrowed(host);
        }
        let mut clean: String = host
            .chars()
            .map(clean)
            .take(ID_BYTES - HASH_DIGITS - 1)
            .collect();
        clean.push('_');
        let times = self.replaced.entry(host).or_default();
        loop {
            let mut hash = Sha256::new();
            hash.update(times.to_be_bytes());
            hash.update(host.as_bytes());
            let id = format!("{clean}{}", hex(&hash.finalize()[..HASH_DIGITS / 2]));
            *times += 1;
            // Ends: each round gives other digits, and the used ids are finite.
            if self.used.insert(Cow::Owned(id.clone())) {
                return Cow::Owned(id);
            }
        }
    }
}
