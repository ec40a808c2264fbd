//! What turnpass writes down: one record of each generation, and, only when asked for, the CLI's own standard output.
//!
//! - [`StreamRecord`]: how a generation went, in numbers and fixed words. It holds no prompt, no answer, no header and no
//!   standard error, and of the session's key only a digest. A [`RecordSink`] takes them from every generation of a
//!   [`Provider`](crate::Provider) that was built [`with_records`](crate::Provider::with_records), whatever the
//!   transport; [`read`] gives them back.
//! - [`RawFile`]: what a process of the CLI printed, byte for byte. It holds prompts, answers, tool data and the
//!   account's name, and is for finding out what a CLI did. [`Replay`] plays one through the decoder, and [`redact`]
//!   makes one fit to share.
//!
//! A generation never waits for a record and never fails because of one: a full disk is counted. A raw recording that
//! cannot be begun fails the start of the process that was to be recorded.

mod counters;
mod file;
mod folder;
mod raw;
mod redact;
mod replay;
mod rows;
mod sink;
mod stream;

pub use counters::RecordCounters;
pub use file::{Kept, RECORD_FILE, RECORD_FILE_BYTES, RECORD_FILES_KEPT, read};
pub use raw::{RAW_FILE_BYTES, RawFile};
pub use redact::{REDACTED_CHARS, Redacted, redact};
pub use replay::{REPLAY_LINE_BYTES, Replay, Replayed, Standing};
pub use sink::{FLUSH_LIMIT, QUEUE_RECORDS, RecordSink};
pub use stream::{
    ERROR_DETAIL_RECORDED_BYTES, FailureRecord, Outcome, SESSION_DIGEST_CHARS, StreamRecord,
    TokensRecord,
};

pub(crate) use stream::{Facts, Watch};
