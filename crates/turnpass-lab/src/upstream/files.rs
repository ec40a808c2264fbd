//! Writing requests and replies into a directory.
//!
//! Each request gives `NNNN-request.json` (method, path, headers, timing, which checks fired, what the cache made of it),
//! `NNNN-request.body` (the body, byte for byte) and `NNNN-reply.body` (the answer's body as it was written). Values of
//! `authorization`, `x-api-key` and `cookie` are replaced by their length, so that a recording can be shown to others; the
//! bodies hold prompts and answers as they were.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::record::{Ending, Recorded};

/// Headers whose values are credentials.
const SECRET_HEADERS: [&str; 4] = [
    "authorization",
    "x-api-key",
    "cookie",
    "proxy-authorization",
];

#[derive(Debug)]
pub(crate) struct Recorder {
    directory: PathBuf,
}

impl Recorder {
    /// Makes the directory with mode 0700; an existing one must belong to nobody else.
    pub(crate) fn new(directory: &Path) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700))?;
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Writes a request and the answer to it. Requests are small in number, so this is done in place.
    pub(crate) fn write(&self, recorded: &Recorded, reply: &[u8]) -> io::Result<()> {
        let number = recorded.number;
        let body = serde_json::to_vec_pretty(&about(recorded))?;
        self.file(&format!("{number:04}-request.json"), &body)?;
        self.file(&format!("{number:04}-request.body"), &recorded.body)?;
        self.file(&format!("{number:04}-reply.body"), reply)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.directory.join(name))?;
        file.write_all(bytes)
    }
}

fn about(recorded: &Recorded) -> Value {
    let since = |at: std::time::Instant| {
        at.saturating_duration_since(recorded.arrived_at)
            .as_secs_f64()
            * 1e3
    };
    let headers: Vec<Value> = recorded
        .headers
        .iter()
        .map(|(name, value)| {
            let secret = SECRET_HEADERS
                .iter()
                .any(|each| each.eq_ignore_ascii_case(name));
            match secret {
                true => json!([name, format!("<{} bytes not recorded>", value.len())]),
                false => json!([name, value]),
            }
        })
        .collect();
    let violations: Vec<String> = recorded
        .violations
        .iter()
        .map(|each| each.message())
        .collect();
    let ending = match recorded.reply.ending {
        Some(Ending::Complete(_)) => "complete",
        Some(Ending::Cut(_)) => "cut",
        Some(Ending::ClientClosed(_)) => "client closed",
        None => "open",
    };
    json!({
        "number": recorded.number,
        "connection": recorded.connection,
        "method": recorded.method,
        "path": recorded.path,
        "query": recorded.query,
        "headers": headers,
        "body_bytes": recorded.body_bytes,
        "violations": violations,
        "cache": recorded.cache.as_ref().map(|cache| json!({
            "usage": cache.usage(),
            "prior_tokens": cache.prior,
            "share_read": cache.share_read(),
        })),
        "reply": {
            "status": recorded.reply.status,
            "bytes": recorded.reply.bytes,
            "events": recorded.reply.events.len(),
            "ending": ending,
        },
        "ms_from_arrival": {
            "body_complete": recorded.body_complete_at.map(since),
            "head": recorded.reply.head_at.map(since),
            "first_byte": recorded.reply.first_byte_at.map(since),
            "last_byte": recorded.reply.last_byte_at.map(since),
        },
    })
}
