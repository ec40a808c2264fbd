//! What the upstream has seen and done, and waiting for it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::watch;

use super::cache::CacheReport;
use super::checks::Violation;
use super::http;

/// How long the `wait_*` methods wait. Tests wait on events of their own machine, and the slowest one that was seen (a cold
/// CLI on a loaded 2-core machine) takes about two seconds.
pub const WAIT_LIMIT: Duration = Duration::from_secs(20);

/// One request and what was answered to it. A snapshot: it does not change after it was handed out.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Its number among all requests, from 1, in the order of arrival.
    pub number: u64,
    /// The number of the connection, from 1.
    pub connection: u64,
    /// The method.
    pub method: String,
    /// The path without the query.
    pub path: String,
    /// The query, without the question mark.
    pub query: Option<String>,
    /// The headers in order, names as they were sent.
    pub headers: Vec<(String, String)>,
    /// The body, exactly; at most [`REQUEST_LIMIT_BYTES`](super::REQUEST_LIMIT_BYTES) of it are kept.
    pub body: Bytes,
    /// The whole length of the body.
    pub body_bytes: u64,
    /// The body as JSON, if it is some (a `content-encoding` is undone first).
    pub json: Option<Arc<Value>>,
    /// When the head was there.
    pub arrived_at: Instant,
    /// When the last byte of the body was there; none if the client left before.
    pub body_complete_at: Option<Instant>,
    /// Which checks fired.
    pub violations: Vec<Violation>,
    /// What the prompt cache made of it; for Messages requests that passed the checks.
    pub cache: Option<CacheReport>,
    /// The answer so far.
    pub reply: Replied,
}

/// The answer to a request, as far as it has come.
#[derive(Clone, Debug, Default)]
pub struct Replied {
    /// The status, once it was sent.
    pub status: Option<u16>,
    /// When the response head was handed to the kernel.
    pub head_at: Option<Instant>,
    /// When the first byte of the body was handed to the kernel.
    pub first_byte_at: Option<Instant>,
    /// When the last one was.
    pub last_byte_at: Option<Instant>,
    /// Each SSE event with the instant directly before its bytes were handed to the kernel.
    pub events: Vec<Written>,
    /// Bytes of the body (after content coding) that were written.
    pub bytes: u64,
    /// How it ended; none while it goes on.
    pub ending: Option<Ending>,
}

/// An SSE event that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The event's name.
    pub name: Arc<str>,
    /// The instant directly before its bytes were handed to the kernel.
    pub at: Instant,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All of it was written.
    Complete(Instant),
    /// The script cut it.
    Cut(Instant),
    /// The client left first.
    ClientClosed(Instant),
}

impl Recorded {
    /// The first header of this name, in any case.
    pub fn header(&self, name: &str) -> Option<&str> {
        http::find(&self.headers, name)
    }

    /// A field of the JSON body by JSON pointer, as `/messages/0/role`.
    pub fn field(&self, pointer: &str) -> Option<&Value> {
        self.json.as_deref()?.pointer(pointer)
    }

    /// Whether it asks for a message (not for a count of tokens).
    pub fn is_messages(&self) -> bool {
        self.method == "POST" && self.path == "/v1/messages"
    }

    /// When the client left before the answer was complete.
    pub fn client_closed_at(&self) -> Option<Instant> {
        match self.reply.ending {
            Some(Ending::ClientClosed(at)) => Some(at),
            _ => None,
        }
    }
}

/// One connection, open or closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its number, from 1.
    pub number: u64,
    /// When it was accepted.
    pub opened_at: Instant,
    /// When and by whom it was closed.
    pub closed: Option<(Instant, ClosedBy)>,
}

/// Who closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosedBy {
    /// The client, in order; also a TLS handshake that came to nothing.
    Client,
    /// The client, by a reset.
    ClientReset,
    /// The upstream: by its script, after a `connection: close`, or after an unreadable request.
    Upstream,
}

/// All connections so far.
#[derive(Clone, Debug, Default)]
pub struct Connections {
    /// Each of them in the order of acceptance.
    pub all: Vec<Connection>,
}

impl Connections {
    /// How many are open now.
    pub fn open(&self) -> usize {
        self.all.iter().filter(|each| each.closed.is_none()).count()
    }

    /// Those that the client closed, with the instant.
    pub fn closed_by_client(&self) -> Vec<(u64, Instant)> {
        let by_client = |each: &Connection| match each.closed {
            Some((at, ClosedBy::Client | ClosedBy::ClientReset)) => Some((each.number, at)),
            _ => None,
        };
        self.all.iter().filter_map(by_client).collect()
    }
}

/// What was waited for did not come within the limit.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the upstream did not see {what} within {limit:?}; it saw {seen}")]
pub struct WaitTimeout {
    /// What was waited for.
    pub what: String,
    /// The limit.
    pub limit: Duration,
    /// What was there instead.
    pub seen: String,
}

#[derive(Debug, Default)]
struct Entries {
    requests: Vec<Recorded>,
    connections: Vec<Connection>,
    released: HashSet<String>,
}

/// The shared log. Every change wakes those that wait.
#[derive(Debug)]
pub(crate) struct Log {
    entries: Mutex<Entries>,
    changed: watch::Sender<u64>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self {
            entries: Mutex::default(),
            changed: watch::Sender::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, with: impl FnOnce(&mut Entries) -> T) -> T {
        let output = with(&mut self.lock());
        self.changed.send_modify(|version| *version += 1);
        output
    }

    pub(crate) fn requests(&self) -> Vec<Recorded> {
        self.lock().requests.clone()
    }

    pub(crate) fn connections(&self) -> Connections {
        Connections {
            all: self.lock().connections.clone(),
        }
    }

    /// Adds a request and gives it its number.
    pub(crate) fn push(&self, mut recorded: Recorded) -> u64 {
        self.change(|entries| {
            let number = entries.requests.len() as u64 + 1;
            recorded.number = number;
            entries.requests.push(recorded);
            number
        })
    }

    pub(crate) fn update(&self, number: u64, with: impl FnOnce(&mut Replied)) {
        self.change(|entries| {
            if let Some(recorded) = entries.requests.get_mut(number as usize - 1) {
                with(&mut recorded.reply);
            }
        });
    }

    pub(crate) fn snapshot(&self, number: u64) -> Option<Recorded> {
        self.lock().requests.get(number as usize - 1).cloned()
    }

    pub(crate) fn opened(&self, at: Instant) -> u64 {
        self.change(|entries| {
            let number = entries.connections.len() as u64 + 1;
            entries.connections.push(Connection {
                number,
                opened_at: at,
                closed: None,
            });
            number
        })
    }

    pub(crate) fn closed(&self, number: u64, by: ClosedBy) {
        self.change(|entries| {
            if let Some(connection) = entries.connections.get_mut(number as usize - 1) {
                connection.closed.get_or_insert((Instant::now(), by));
            }
        });
    }

    pub(crate) fn release(&self, gate: &str) {
        self.change(|entries| entries.released.insert(gate.to_owned()));
    }

    /// Waits until a gate is released; for ever if it never is.
    pub(crate) async fn released(&self, gate: &str) {
        let mut changed = self.changed.subscribe();
        while !self.lock().released.contains(gate) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits until a look at the log gives something.
    pub(crate) async fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut(&[Recorded], &[Connection]) -> Option<T>,
    ) -> Result<T, WaitTimeout> {
        let mut changed = self.changed.subscribe();
        let found = tokio::time::timeout(limit, async {
            loop {
                {
                    let entries = self.lock();
                    if let Some(found) = look(&entries.requests, &entries.connections) {
                        return found;
                    }
                }
                // The sender lives as long as this log, so this cannot fail while we are borrowed from it.
                changed.changed().await.ok();
            }
        })
        .await;
        found.map_err(|_| WaitTimeout {
            what: what.to_owned(),
            limit,
            seen: self.seen(),
        })
    }

    fn seen(&self) -> String {
        let entries = self.lock();
        let lines: Vec<String> = entries
            .requests
            .iter()
            .map(|each| {
                let status = each.reply.status.map_or("no".to_owned(), |s| s.to_string());
                format!(
                    "{} {} -> {status} ({:?})",
                    each.method, each.path, each.reply.ending
                )
            })
            .collect();
        let open = entries
            .connections
            .iter()
            .filter(|c| c.closed.is_none())
            .count();
        format!(
            "{} requests [{}], {open} of {} connections open",
            lines.len(),
            lines.join("; "),
            entries.connections.len()
        )
    }
}
