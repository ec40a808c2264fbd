//! The scripted upstream: a Messages API on loopback that answers what a script says.
//!
//! [`Upstream::start`] opens it, [`Upstream::url`] is where it listens, [`Upstream::requests`] is what it saw, dropping it
//! ends it with all its connections. It runs on a thread of its own, so it serves synchronous and asynchronous tests
//! alike, and a benchmark's own work does not delay it.
//!
//! | module | what |
//! |---|---|
//! | `server`, `answer`, `conn`, `http`, `encode` | the wire: HTTP/1.1 by hand, over TCP or TLS |
//! | `routes`, `account` | which request gets which answer |
//! | `script`, `message` | from a [reply](crate::scenario::Reply) to the steps that write it (pure) |
//! | `model` | the [directive](crate::directive) model (pure) |
//! | `checks`, `signature` | the real API's refusals (pure) |
//! | `cache` | the prompt cache (pure) |
//! | `record`, `files` | what was seen |
//! | `authority` | a throw-away certificate authority |

mod account;
mod answer;
mod authority;
mod cache;
mod checks;
mod conn;
mod encode;
mod files;
mod http;
mod message;
mod model;
mod record;
mod routes;
mod script;
mod server;
mod signature;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::oneshot;

pub use account::MODELS;
pub use authority::{Authority, AuthorityError, CLI_HOSTS};
pub use cache::{CacheOptions, CacheReport, Clock, LOOK_BACK_BLOCKS, MEDIA_TOKENS, tokens};
pub use checks::{Check, Checks, MAX_CACHE_MARKS, MAX_TOOL_NAME_BYTES, Violation};
pub use record::{
    ClosedBy, Connection, Connections, Ending, Recorded, Replied, WAIT_LIMIT, WaitTimeout, Written,
};

use crate::scenario::{Reply, Scenario, TokenAnswer, UsageAnswer};

/// The largest request body that is accepted, in bytes: the API's documented 32 MB.
pub const REQUEST_LIMIT_BYTES: u64 = 32 << 20;

/// How an upstream is to be.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to listen; a loopback address. Port 0 takes a free one.
    pub addr: SocketAddr,
    /// TLS with this configuration; plain HTTP if absent.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// What to answer.
    pub scenario: Scenario,
    /// Which rules of the API hold.
    pub checks: Checks,
    /// The prompt cache.
    pub cache: CacheOptions,
    /// A directory that each request and reply is written to (files 0600, directory 0700).
    pub record: Option<PathBuf>,
    /// The key of the signatures; a random one if absent. Two upstreams of one key recognise each other's thinking.
    pub signing_key: Option<[u8; 32]>,
}

impl Default for Options {
    /// 127.0.0.1 on a free port, plain HTTP, the directive model, all checks, the cache on.
    fn default() -> Self {
        Self {
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            tls: None,
            scenario: Scenario::default(),
            checks: Checks::default(),
            cache: CacheOptions::default(),
            record: None,
            signing_key: None,
        }
    }
}

/// Why an upstream could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is not on loopback. The laboratory is never reachable from outside.
    #[error("{0} is not a loopback address; use 127.0.0.1 or another of 127.0.0.0/8")]
    NotLoopback(SocketAddr),
    /// The address could not be bound.
    #[error("could not listen on {addr}: {source}; choose another port or 0")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The directory for recordings could not be made.
    #[error("could not make the recording directory {}: {source}", path.display())]
    Record {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The thread or its runtime could not be started.
    #[error("could not start the upstream's thread: {0}")]
    Thread(std::io::Error),
}

/// A running upstream. Dropping it closes the listener and every connection before it returns.
pub struct Upstream {
    addr: SocketAddr,
    tls: bool,
    lab: Arc<routes::Lab>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream")
            .field("url", &self.url())
            .finish_non_exhaustive()
    }
}

impl Upstream {
    /// Binds the address and begins to serve; a request sent after this returned is answered.
    pub fn start(options: Options) -> Result<Self, StartError> {
        let Options {
            addr,
            tls,
            scenario,
            checks,
            cache,
            record,
            signing_key,
        } = options;
        if !addr.ip().is_loopback() {
            return Err(StartError::NotLoopback(addr));
        }
        let bind = |source| StartError::Bind { addr, source };
        let listener = std::net::TcpListener::bind(addr).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let recorder = match record {
            None => None,
            Some(path) => {
                Some(
                    files::Recorder::new(&path).map_err(|source| StartError::Record {
                        path: path.clone(),
                        source,
                    })?,
                )
            }
        };
        let signer = signature::Signer::new(signing_key.unwrap_or_else(random_key));
        let lab = Arc::new(routes::Lab {
            log: record::Log::new(),
            checks,
            cache_options: cache,
            recorder,
            state: Mutex::new(routes::State::new(scenario, signer)),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(StartError::Thread)?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(bind)?
        };
        let (stop, stopped) = oneshot::channel();
        let is_tls = tls.is_some();
        let serving = Arc::clone(&lab);
        let thread = std::thread::Builder::new()
            .name("lab-upstream".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        _ = stopped => {}
                        () = server::accept(listener, tls, serving) => {}
                    }
                });
            })
            .map_err(StartError::Thread)?;
        Ok(Self {
            addr,
            tls: is_tls,
            lab,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:PORT`, or `https://` with TLS; without a slash at the end, as `ANTHROPIC_BASE_URL` wants it.
    pub fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}", self.addr)
    }

    /// All requests so far, in the order of arrival, of every route.
    pub fn requests(&self) -> Vec<Recorded> {
        self.lab.log.requests()
    }

    /// Those that ask for a message.
    pub fn messages(&self) -> Vec<Recorded> {
        let mut requests = self.requests();
        requests.retain(Recorded::is_messages);
        requests
    }

    /// All connections so far.
    pub fn connections(&self) -> Connections {
        self.lab.log.connections()
    }

    /// Waits until there are at least `count` requests, at most [`WAIT_LIMIT`]. Dropping the future loses nothing.
    pub async fn wait_requests(&self, count: usize) -> Result<Vec<Recorded>, WaitTimeout> {
        let what = format!("{count} requests");
        let look = |requests: &[Recorded], _: &[Connection]| {
            (requests.len() >= count).then(|| requests.to_vec())
        };
        self.lab.log.wait(&what, WAIT_LIMIT, look).await
    }

    /// Waits until a request is as the predicate says (also one that was there before), at most [`WAIT_LIMIT`].
    /// It is looked at again whenever its answer moves on. Dropping the future loses nothing.
    pub async fn wait_for(
        &self,
        what: &str,
        predicate: impl FnMut(&Recorded) -> bool,
    ) -> Result<Recorded, WaitTimeout> {
        self.wait_for_within(what, WAIT_LIMIT, predicate).await
    }

    /// [`wait_for`](Self::wait_for) with another limit.
    pub async fn wait_for_within(
        &self,
        what: &str,
        limit: Duration,
        mut predicate: impl FnMut(&Recorded) -> bool,
    ) -> Result<Recorded, WaitTimeout> {
        let look = |requests: &[Recorded], _: &[Connection]| {
            requests.iter().find(|each| predicate(each)).cloned()
        };
        self.lab.log.wait(what, limit, look).await
    }

    /// Waits until the connections are as the predicate says, at most [`WAIT_LIMIT`].
    pub async fn wait_connections(
        &self,
        what: &str,
        mut predicate: impl FnMut(&Connections) -> bool,
    ) -> Result<Connections, WaitTimeout> {
        let look = |_: &[Recorded], connections: &[Connection]| {
            let connections = Connections {
                all: connections.to_vec(),
            };
            predicate(&connections).then_some(connections)
        };
        self.lab.log.wait(what, WAIT_LIMIT, look).await
    }

    /// Adds a reply after those that are still to be given.
    pub fn enqueue(&self, reply: Reply) {
        self.lab.state().queue.push_back(reply);
    }

    /// Replies that were not yet used up.
    pub fn replies_left(&self) -> usize {
        self.lab.state().queue.len()
    }

    /// Sets the answers of the usage route, as [`Scenario::usage`].
    pub fn set_usage(&self, answers: impl IntoIterator<Item = UsageAnswer>) {
        self.lab.state().usage = answers.into_iter().collect();
    }

    /// Sets the answers of the token route, as [`Scenario::token`].
    pub fn set_token(&self, answers: impl IntoIterator<Item = TokenAnswer>) {
        self.lab.state().token = answers.into_iter().collect();
    }

    /// Releases a gate, for all replies that hold at it now or later.
    pub fn release(&self, gate: &str) {
        self.lab.log.release(gate);
    }

    /// Accepts a signature (or redacted data) that this upstream did not issue, as one from a recording.
    pub fn admit_signature(&self, signature: &str) {
        self.lab.state().signer.admit(signature);
    }

    /// A signature that this upstream accepts for this thinking text.
    pub fn sign(&self, thinking: &str) -> String {
        self.lab.state().signer.thinking(u64::MAX, thinking)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Every task of that thread ends at its next await, so this takes microseconds; a panic there was printed.
            thread.join().ok();
        }
    }
}

fn random_key() -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    key[16..].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    key
}
