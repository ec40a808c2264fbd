//! A port on 127.0.0.1 that speaks HTTP/1.1, and its connections. What it answers is its owner's affair.
//!
//! | module | what |
//! | --- | --- |
//! | here | the listener, the bound on its connections, the reading of a body |
//! | [`origin`] | who may speak to it: pure |

pub(crate) mod origin;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// Largest request head (relay origin: 32 KiB).
pub(crate) const HEAD_BYTES: usize = 32 * 1024;
/// Longest wait for a whole request head (relay origin).
pub(crate) const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest wait for a whole request body; the CLI sends 8 MiB over loopback in well under a second.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Wait after a connection that could not be accepted, so that a lack of descriptors does not burn a processor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A port of the system's choice, not yet served.
#[derive(Debug)]
pub(crate) struct Port {
    listener: TcpListener,
    number: u16,
}

/// A served port. Dropping it closes the port and every connection, also one that comes at this very moment.
#[derive(Debug)]
pub(crate) struct Listening {
    _closed: DropGuard,
}

/// The connection that a request came over.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    id: u64,
    connections: Arc<Connections>,
}

impl Caller {
    /// The caller has shown the port's secret: its connection is not closed to make room for another.
    pub(crate) fn trust(&self) {
        self.connections
            .lock()
            .with(self.id, |connection| connection.trusted = true);
    }
}

impl Port {
    /// Opens a port.
    pub(crate) async fn open() -> std::io::Result<Self> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = TcpListener::bind(any).await?;
        let number = listener.local_addr()?.port();
        Ok(Self { listener, number })
    }

    /// Its number.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Serves at most `limit` connections at a time. When more come, the oldest that has not yet shown the port's secret
    /// is closed, so that a storm cannot keep the CLI out. The port is closed and the connections are gone once the
    /// returned value was dropped and `tasks` have ended.
    pub(crate) fn serve<A, F, B>(self, tasks: &TaskTracker, limit: usize, answer: A) -> Listening
    where
        A: Fn(Request<Incoming>, Caller) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        let closed = CancellationToken::new();
        let accepting = accept(self.listener, limit, answer, tasks.clone(), closed.clone());
        tasks.spawn(closed.clone().run_until_cancelled_owned(accepting));
        Listening {
            _closed: closed.drop_guard(),
        }
    }
}

/// The open connections.
#[derive(Debug, Default)]
struct Connections(Mutex<Open>);

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Open> {
        // Nothing can panic while it is held, and every state of it is a whole one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Oldest first.
#[derive(Debug, Default)]
struct Open {
    next: u64,
    open: VecDeque<Connection>,
}

#[derive(Debug)]
struct Connection {
    id: u64,
    trusted: bool,
    task: Option<AbortHandle>,
}

impl Open {
    /// Makes room for one more. `None` when every place is held by a connection that showed the secret.
    fn enter(&mut self, limit: usize) -> Option<u64> {
        if self.open.len() >= limit {
            let stranger = self
                .open
                .iter()
                .position(|connection| !connection.trusted)?;
            let gone = self.open.remove(stranger);
            if let Some(task) = gone.and_then(|connection| connection.task) {
                task.abort();
            }
        }
        self.next += 1;
        self.open.push_back(Connection {
            id: self.next,
            trusted: false,
            task: None,
        });
        Some(self.next)
    }

    fn with(&mut self, id: u64, change: impl FnOnce(&mut Connection)) {
        if let Some(connection) = self.open.iter_mut().find(|connection| connection.id == id) {
            change(connection);
        }
    }

    fn leave(&mut self, id: u64) {
        self.open.retain(|connection| connection.id != id);
    }
}

async fn accept<A, F, B>(
    listener: TcpListener,
    limit: usize,
    answer: A,
    tasks: TaskTracker,
    closed: CancellationToken,
) where
    A: Fn(Request<Incoming>, Caller) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let connections = Arc::new(Connections::default());
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Mostly a connection that broke before it was accepted; but without free descriptors it fails at once again.
            tokio::time::sleep_until(Instant::now() + ACCEPT_PAUSE).await;
            continue;
        };
        let Some(id) = connections.lock().enter(limit) else {
            continue;
        };
        let caller = Caller {
            id,
            connections: Arc::clone(&connections),
        };
        let serving = serve(stream, caller, answer.clone());
        let task = tasks.spawn(closed.clone().run_until_cancelled_owned(serving));
        connections
            .lock()
            .with(id, |connection| connection.task = Some(task.abort_handle()));
    }
}

async fn serve<A, F, B>(stream: TcpStream, caller: Caller, answer: A)
where
    A: Fn(Request<Incoming>, Caller) -> F,
    F: Future<Output = Response<B>>,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    // Small answers must not wait for a full segment.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(|request| {
        let answering = answer(request, caller.clone());
        async { Ok::<_, Infallible>(answering.await) }
    });
    // A connection that ends in an error has been told so by its own end.
    let _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(true)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    caller.connections.lock().leave(caller.id);
}

/// Reads a body whole. `None` when it is longer than `limit`, broke off, or took longer than [`BODY_TIMEOUT`].
pub(crate) async fn read(body: Incoming, limit: usize) -> Option<Bytes> {
    let collected = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, limit).collect()).await;
    Some(collected.ok()?.ok()?.to_bytes())
}
