//! What compactions took out of a kept session: a file for each, beside the session's own, never written again.
//!
//! It is on the disk before the session's file has the shorter conversation. A program that is killed between the two
//! leaves the longer one and a file that the next compaction writes anew.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use turnpass::Result;
use turnpass::conversation::Message;

use super::{Head, KEPT, KeptSession, PAST, SessionStore, VERSION, encode, parse, read};
use super::{Kept, unusable, write_whole};
use crate::compaction::Cause;

/// One compaction of a kept session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CompactionMark {
    /// When, in Unix seconds.
    pub at_unix_s: u64,
    /// Why.
    pub cause: Cause,
    /// Messages that the summary took the place of.
    pub replaced: usize,
    /// The size of the conversation before, in tokens.
    pub tokens_before: u64,
    /// And after, by estimate.
    pub tokens_after: u64,
}

/// What one compaction took out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Past {
    /// The compaction.
    pub compaction: CompactionMark,
    /// The messages that were there before, oldest first; the first one may be the summary of the compaction before.
    pub messages: Vec<Message>,
}

/// The form that is kept.
#[derive(Serialize, Deserialize)]
struct Put<P> {
    version: u32,
    #[serde(flatten)]
    past: P,
}

#[derive(Serialize)]
struct Taken<'a> {
    compaction: CompactionMark,
    messages: &'a [Message],
}

impl SessionStore {
    /// What compactions took out of a session, oldest first; nothing of one that was never compacted.
    ///
    /// # Errors
    ///
    /// `request_invalid` for a name that is none, `session_file` when there is no session of this name, or when a file cannot
    /// be trusted, read or understood.
    pub fn past(&self, name: &str) -> Result<Vec<Past>> {
        let encoded = encode(name)?;
        self.past_of(&encoded)
            .map_err(|error| unusable(name, &error))
    }

    fn past_of(&self, encoded: &str) -> io::Result<Vec<Past>> {
        let absent = |what: &str| io::Error::new(ErrorKind::NotFound, what.to_owned());
        let kept = read(&self.path(encoded, KEPT))?;
        let kept = kept.ok_or_else(|| absent("there is none of this name"))?;
        let kept: Kept<Vec<serde::de::IgnoredAny>> = parse(&kept)?;
        let one = |number: usize| {
            let bytes = read(&path(&self.folder, encoded, number))?;
            let bytes = bytes.ok_or_else(|| absent("what a compaction took out is gone"))?;
            Head::check(&bytes)?;
            let put: Put<Past> = serde_json::from_slice(&bytes).map_err(Head::damaged)?;
            Ok(put.past)
        };
        (1..=kept.compactions.len()).map(one).collect()
    }
}

impl KeptSession {
    /// Writes down what a compaction takes out. When this returns it is on the disk; the session's own file has the mark
    /// with the next [`KeptSession::save`].
    ///
    /// # Errors
    ///
    /// `session_file` when it is too large or cannot be written; then nothing has changed.
    pub(crate) fn put_aside(&mut self, messages: &[Message], mark: CompactionMark) -> Result<()> {
        let number = self.kept.compactions.len() + 1;
        let bytes = serde_json::to_vec(&Put {
            version: VERSION,
            past: Taken {
                compaction: mark,
                messages,
            },
        });
        let written = bytes
            .map_err(io::Error::from)
            .and_then(|bytes| write_whole(&self.folder, &self.encoded, &end(number), &bytes));
        written.map_err(|error| unusable(&self.name, &error))?;
        self.kept.compactions.push(mark);
        Ok(())
    }
}

/// Removes what the compactions of a session took out. The caller holds its lock.
pub(super) fn remove(folder: &Path, encoded: &str) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let file = entry.file_name();
        let number = file
            .to_str()
            .and_then(|file| file.strip_prefix(encoded)?.strip_prefix('.'))
            .and_then(|rest| rest.strip_suffix(PAST)?.strip_suffix('.'));
        if number.is_some_and(|number| number.parse::<usize>().is_ok()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn end(number: usize) -> String {
    format!("{number}.{PAST}")
}

fn path(folder: &Path, encoded: &str, number: usize) -> PathBuf {
    folder.join(format!("{encoded}.{}", end(number)))
}
