//! The HTTP carrier: the MCP server on a port of its own on 127.0.0.1, behind a bearer (pool document).
//!
//! What stands on the wire, as CLI 2.1.332 wants it:
//!
//! | request | answer |
//! | --- | --- |
//! | with an `Origin`, or for another host | 403 |
//! | without the bearer | 401, whatever is asked for |
//! | of another path | 404 |
//! | `GET` and the rest | 405; the CLI goes on without a stream of notifications |
//! | `DELETE` | 200: there is no session to end |
//! | `POST` of a notification | 202 |
//! | `POST` of a request | 200 with JSON |
//! | `POST` of a `tools/call` for the host | 200 as `text/event-stream`: the head and a progress of 0 at once, a progress every [`HEARTBEAT`], at last the result |
//!
//! A call that is answered as plain JSON is cut after 60 s, one whose stream is silent after 300 s, and comments do not
//! count; progress every 20 s carried one of 400 s (2.1.332).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::mcp::{self, Call, RpcId, Server};
use crate::cli::launch::McpServer;
use crate::conversation::ToolResult;
use crate::error::{Error, ErrorCode, Result};
use crate::loopback::origin::{Origin, origin_of};
use crate::loopback::{self, Caller, Listening, Port};
use crate::secret::Secret;
use crate::wire::{sse, surrogates};

/// The one path.
pub const PATH: &str = "/mcp";

/// Time between two signs of life of a call that waits (pool document; the CLI gives up after 300 s of silence).
pub const HEARTBEAT: Duration = Duration::from_secs(20);

/// Longest time of one call. A host's tool may ask a person, who may be asleep; the CLI's own bound is 28 h, and the one
/// in its configuration is a hard one that progress does not extend, so both are set to this.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Connections at a time. Each waiting call has one to itself, and the CLI calls in parallel (14 of one message were
/// seen); this is what its runtime opens at most by itself.
pub const CONNECTIONS_LIMIT: usize = 256;

/// Largest message of the CLI that is read. A model's message has 128,000 tokens at the most, which fits many times.
pub const MESSAGE_BYTES: usize = 8 * 1024 * 1024;

/// Messages that are read at the same time, so that their bodies together stay below 128 MiB.
const READING_LIMIT: usize = 16;

/// Occurrences that wait for the host: as many as all connections can bring before the host looks again, and room for
/// calls that were given up meanwhile.
pub const OCCURRENCES_LIMIT: usize = 4 * CONNECTIONS_LIMIT;

/// Where the answer to a call goes. It is of the carrier that gave it out, and is never given out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallAddress(u64);

/// What the host has to know.
#[derive(Clone, Debug, PartialEq)]
pub enum Occurrence {
    /// The tools were listed.
    Listed,
    /// A call that waits for [`HttpCarrier::answer`].
    Call {
        /// The call.
        call: Call,
        /// Where its answer goes.
        to: CallAddress,
    },
    /// The CLI gave up a call: it says so for each open one when its turn is interrupted (2.1.294, 2.1.310, 2.1.332), or its
    /// connection is gone. Its exchange ends with an answer, which nobody reads.
    Cancelled(CallAddress),
    /// A call where none may come (policy [`Proposing`](mcp::Policy::Proposing)).
    Violation(String),
}

/// An MCP server that listens. Dropping it closes the port and every connection.
#[derive(Debug)]
pub struct HttpCarrier {
    shared: Arc<Shared>,
    _listening: Listening,
}

#[derive(Debug)]
struct Shared {
    port: u16,
    bearer: Secret,
    server: Mutex<Server>,
    calls: Mutex<Calls>,
    occurrences: mpsc::Sender<Occurrence>,
    reading: Semaphore,
}

/// The calls that wait.
#[derive(Debug, Default)]
struct Calls {
    next: u64,
    waiting: BTreeMap<CallAddress, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    rpc_id: RpcId,
    answer: oneshot::Sender<Vec<u8>>,
}

impl HttpCarrier {
    /// Opens a port of the system's choice and serves `server` on it. The port is closed and its connections are gone once
    /// the carrier was dropped and `tasks` have ended.
    ///
    /// The receiver yields what the CLI does, in order. A host that lets [`OCCURRENCES_LIMIT`] of them lie loses further
    /// ones, and calls among them are failed at once.
    ///
    /// # Errors
    ///
    /// `mcp_startup` when no loopback port can be had.
    pub async fn start(
        server: Server,
        tasks: &TaskTracker,
    ) -> Result<(Self, mpsc::Receiver<Occurrence>)> {
        let port = Port::open().await.map_err(|error| {
            Error::new(
                ErrorCode::McpStartup,
                format!(
                    "no loopback port could be opened for the tools: {}",
                    error.kind()
                ),
            )
        })?;
        let (occurrences, received) = mpsc::channel(OCCURRENCES_LIMIT);
        let shared = Arc::new(Shared {
            port: port.number(),
            bearer: Secret::generate(),
            server: Mutex::new(server),
            calls: Mutex::default(),
            occurrences,
            reading: Semaphore::new(READING_LIMIT),
        });
        let answering = Arc::clone(&shared);
        let listening = port.serve(tasks, CONNECTIONS_LIMIT, move |request, caller| {
            answer(request, caller, Arc::clone(&answering))
        });
        let carrier = Self {
            shared,
            _listening: listening,
        };
        Ok((carrier, received))
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.shared.port
    }

    /// The entry for the CLI's private configuration file; the only way by which the bearer leaves this value.
    pub fn mcp_server_config(&self) -> McpServer {
        McpServer::Http {
            url: format!("http://127.0.0.1:{}{PATH}", self.shared.port),
            bearer: self.shared.bearer.clone(),
            timeout_ms: u64::try_from(CALL_TIMEOUT.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Answers a call. False when it does not wait any more: it was answered, or the CLI is gone.
    pub fn answer(&self, to: CallAddress, result: &ToolResult) -> bool {
        self.reply(to, |id| Server::answer(id, result))
    }

    /// Answers a call, after which the CLI ends its turn and waits for a user line. Not for an error, which it would not
    /// take for the end. False as for [`HttpCarrier::answer`].
    pub fn answer_and_end(&self, to: CallAddress, result: &ToolResult) -> bool {
        self.reply(to, |id| Server::answer_and_end(id, result))
    }

    fn reply(&self, to: CallAddress, message: impl FnOnce(&RpcId) -> Vec<u8>) -> bool {
        let Some(waiting) = self.shared.calls().waiting.remove(&to) else {
            return false;
        };
        waiting.answer.send(message(&waiting.rpc_id)).is_ok()
    }

    /// Calls that wait for an answer.
    pub fn waiting(&self) -> usize {
        self.shared.calls().waiting.len()
    }
}

impl Shared {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        // Nothing can panic while it is held, and every state of it is a whole one.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self, message: &[u8]) -> mcp::Reply {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        server.handle(message)
    }

    /// Tells the host. False when it does not listen.
    fn tell(&self, occurrence: Occurrence) -> bool {
        let told = self.occurrences.try_send(occurrence);
        if told.is_err() {
            tracing::warn!("the host does not take what the tool server has to say");
        }
        told.is_ok()
    }

    /// A call begins to wait.
    fn wait(self: &Arc<Self>, rpc_id: RpcId, token: Option<String>) -> Open {
        let (answer, answered) = oneshot::channel();
        let mut calls = self.calls();
        calls.next += 1;
        let to = CallAddress(calls.next);
        let waiting = Waiting {
            rpc_id: rpc_id.clone(),
            answer,
        };
        calls.waiting.insert(to, waiting);
        drop(calls);
        let now = Instant::now();
        Open {
            place: Place {
                to,
                shared: Arc::clone(self),
            },
            rpc_id,
            token,
            answered,
            beats: 0,
            next_beat: now,
            end: now + CALL_TIMEOUT,
        }
    }

    /// The newest waiting call of this id: a CLI that connects anew counts its ids anew.
    fn waiting_of(&self, rpc_id: &RpcId) -> Option<CallAddress> {
        let calls = self.calls();
        let mut newest = calls.waiting.iter().rev();
        newest
            .find(|(_, waiting)| waiting.rpc_id == *rpc_id)
            .map(|(to, _)| *to)
    }
}

/// The place of a waiting call. Dropping it before the answer means that the CLI's connection is gone.
#[derive(Debug)]
struct Place {
    to: CallAddress,
    shared: Arc<Shared>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let waiting = self.shared.calls().waiting.remove(&self.to);
        if waiting.is_some() {
            self.shared.tell(Occurrence::Cancelled(self.to));
        }
    }
}

/// The stream of a waiting call.
#[derive(Debug)]
struct Open {
    place: Place,
    rpc_id: RpcId,
    token: Option<String>,
    answered: oneshot::Receiver<Vec<u8>>,
    beats: u64,
    next_beat: Instant,
    end: Instant,
}

impl Open {
    /// The next event, and the rest if it was not the last.
    async fn next(mut self) -> (Bytes, Option<Self>) {
        let message = tokio::select! {
            biased;
            answer = &mut self.answered => answer,
            () = tokio::time::sleep_until(self.next_beat.min(self.end)) => {
                if Instant::now() < self.end {
                    return (self.beat(), Some(self));
                }
                Ok(Server::fail(&self.rpc_id, "turnpass: the host did not answer in a day"))
            }
        };
        let message = message.unwrap_or_else(|_| {
            Server::fail(&self.rpc_id, "turnpass: the host does not answer any more")
        });
        (event(&message), None)
    }

    /// A sign of life. Without a token there is nothing that the CLI counts as one; a comment keeps the connection busy.
    fn beat(&mut self) -> Bytes {
        let beat = match &self.token {
            Some(token) => event(&Server::progress(token, self.beats)),
            None => Bytes::from_static(b": waiting\n\n"),
        };
        self.beats += 1;
        self.next_beat += HEARTBEAT;
        beat
    }
}

/// One event. The message is one line of JSON.
fn event(message: &[u8]) -> Bytes {
    let mut event = Vec::with_capacity(message.len() + 32);
    sse::encode(&mut event, "message", message);
    event.into()
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

async fn answer(request: Request<Incoming>, caller: Caller, shared: Arc<Shared>) -> Response<Body> {
    let (head, body) = request.into_parts();
    match judge(
        shared.port,
        &shared.bearer,
        &head.method,
        &head.uri,
        &head.headers,
    ) {
        Err(status) => {
            tracing::debug!(status = status.as_u16(), "refused by the tool server");
            if status != StatusCode::UNAUTHORIZED && status != StatusCode::FORBIDDEN {
                caller.trust();
            }
            return refused(status);
        }
        Ok(Asked::Message) => caller.trust(),
        Ok(Asked::End) => {
            caller.trust();
            return respond(StatusCode::OK, None, Bytes::new());
        }
    }
    let Some(message) = read(body, &shared.reading).await else {
        return refused(StatusCode::BAD_REQUEST);
    };
    // Half a surrogate pair may stand in what the model wrote, and no JSON reader of ours takes it.
    let message = surrogates::repair(&message);
    let reply = shared.handle(&message);
    match reply.occurrence {
        mcp::Occurrence::Call(call) => return waiting(&shared, call),
        mcp::Occurrence::Nothing => {}
        mcp::Occurrence::Listed => drop(shared.tell(Occurrence::Listed)),
        mcp::Occurrence::Violation(name) => drop(shared.tell(Occurrence::Violation(name))),
        mcp::Occurrence::Cancelled(rpc_id) => {
            if let Some(to) = shared.waiting_of(&rpc_id) {
                shared.tell(Occurrence::Cancelled(to));
            }
        }
    }
    match reply.message {
        Some(message) => respond(StatusCode::OK, Some(JSON), message.into()),
        None => respond(StatusCode::ACCEPTED, None, Bytes::new()),
    }
}

/// The answer to a call for the host: a stream whose head goes out at once.
fn waiting(shared: &Arc<Shared>, mut call: Call) -> Response<Body> {
    let open = shared.wait(call.rpc_id.clone(), call.progress_token.clone());
    let to = open.place.to;
    // The token is of no use to the host: the signs of life are given here.
    call.progress_token = None;
    let rpc_id = call.rpc_id.clone();
    if !shared.tell(Occurrence::Call { call, to }) {
        // Nobody knows the call, so nobody is told of its end.
        shared.calls().waiting.remove(&to);
        let message = Server::fail(&rpc_id, "turnpass: the host takes no calls");
        return respond(StatusCode::OK, Some(JSON), message.into());
    }
    let events = futures_util::stream::unfold(Some(open), async |open| Some(open?.next().await));
    let frames = events.map(|bytes| Ok(Frame::data(bytes)));
    build(
        StatusCode::OK,
        Some(EVENT_STREAM),
        BodyExt::boxed_unsync(StreamBody::new(frames)),
    )
}

async fn read(body: Incoming, reading: &Semaphore) -> Option<Bytes> {
    // Each reader is done within a bounded time, so the turn comes.
    let _permit = reading.acquire().await.ok()?;
    loopback::read(body, MESSAGE_BYTES).await
}

/// What a good head asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// To take a message.
    Message,
    /// To end a session, of which there are none.
    End,
}

fn judge(
    port: u16,
    bearer: &Secret,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Asked, StatusCode> {
    if origin_of(headers, port) != Origin::Here {
        return Err(StatusCode::FORBIDDEN);
    }
    let mut shown = headers.get_all(header::AUTHORIZATION).iter();
    let is_ours = shown.next().is_some_and(|value| {
        let token = value.as_bytes().strip_prefix(b"Bearer ");
        token.is_some_and(|token| bearer.matches(token))
    });
    if !is_ours || shown.next().is_some() {
        return Err(StatusCode::UNAUTHORIZED);
    }
    if uri.path() != PATH {
        return Err(StatusCode::NOT_FOUND);
    }
    if *method == Method::DELETE {
        return Ok(Asked::End);
    }
    if *method != Method::POST {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    if headers.contains_key(header::CONTENT_ENCODING) {
        return Err(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
    let declared = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if declared.is_some_and(|length| length > MESSAGE_BYTES) {
        return Err(StatusCode::PAYLOAD_TOO_LARGE);
    }
    Ok(Asked::Message)
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");

/// A refusal says nothing about what is served here.
fn refused(status: StatusCode) -> Response<Body> {
    let mut response = respond(status, None, Bytes::new());
    if status == StatusCode::METHOD_NOT_ALLOWED {
        let allowed = HeaderValue::from_static("POST, DELETE");
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

fn respond(status: StatusCode, kind: Option<HeaderValue>, body: Bytes) -> Response<Body> {
    build(status, kind, Full::new(body).boxed_unsync())
}

fn build(status: StatusCode, kind: Option<HeaderValue>, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
