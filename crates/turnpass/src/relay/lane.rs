//! The loopback listener of one CLI process. What it may let through is decided in [`super::admission`].
//!
//! A lane has one port, one secret path and one admission. It reads the head of a request, asks the admission, and only
//! then reads the body; the request and the means to answer it then go to the generation that armed the lane.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use super::admission::{Admission, Judgement, LaneAddress, NATIVE_REQUEST_BYTES, Refusal};
use crate::cli::launch::RelayAddress;
use crate::error::{Error, ErrorCode, Result};
use crate::loopback::{self, Caller, Listening, Port};
use crate::secret::Secret;
use crate::wire::messages::encode_text_reply;
use crate::wire::usage::Usage;

/// Connections of one lane at a time (relay origin). The CLI uses one or two; when more come, the oldest that has not
/// yet shown the lane's secret is closed, so that a storm cannot keep the CLI out.
pub(crate) const CONNECTIONS_LIMIT: usize = 8;
/// Arrivals that wait for the generation. Refusals beyond it are counted in the admission all the same.
const ARRIVALS: usize = 16;
/// What the CLI reads instead of the real answer; not empty, since the CLI asks again after an empty one.
const SYNTHETIC_TEXT: &str = "ok";

/// Something that came in over the lane.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// A request took the admission and its body was read.
    Request(Admitted),
    /// A request with the lane's secret was refused.
    Refused(Refusal),
    /// A request was answered here.
    AnsweredLocally,
    /// A request took the admission, and its body could not be read.
    Unreadable,
}

/// A request that took the admission. Dropping it answers with 410.
pub(crate) struct Admitted {
    /// The body as the CLI sent it.
    pub(crate) body: Bytes,
    /// The headers as the CLI sent them; the bearer is among them.
    pub(crate) headers: HeaderMap,
    /// The path and query below the secret.
    pub(crate) path: String,
    reply: oneshot::Sender<Reply>,
}

impl std::fmt::Debug for Admitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admitted")
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl Admitted {
    /// Answers the CLI. An answer that the CLI no longer waits for goes nowhere.
    pub(crate) fn answer(self, reply: Reply) {
        let _ = self.reply.send(reply);
    }
}

/// How the CLI is answered.
pub(crate) enum Reply {
    /// A short, good answer that ends the CLI's turn.
    Synthetic,
    /// No: the CLI stops at once.
    Gone,
    /// The upstream's own answer, whole.
    Whole {
        status: StatusCode,
        headers: HeaderMap,
        body: Bytes,
    },
    /// The upstream's own answer, as it comes. The stream breaks off when an `Err` comes.
    Stream {
        headers: HeaderMap,
        chunks: mpsc::Receiver<Result<Bytes, BrokenOff>>,
    },
}

/// The upstream broke off; the CLI's connection is closed as the upstream's was.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the upstream broke off")]
pub(crate) struct BrokenOff;

/// A listening lane. Dropping it closes the port and every connection.
#[derive(Debug)]
pub(crate) struct Lane {
    shared: Arc<Shared>,
    _listening: Listening,
}

#[derive(Debug)]
struct Shared {
    address: LaneAddress,
    admission: Mutex<Admission>,
    arrivals: mpsc::Sender<Arrival>,
}

impl Lane {
    /// Opens a lane on a port of the system's choice. Its port is closed and its connections are gone once `tasks` have
    /// ended.
    ///
    /// # Errors
    ///
    /// `relay_transit` when no loopback port can be had.
    pub(crate) async fn open(tasks: &TaskTracker) -> Result<(Self, mpsc::Receiver<Arrival>)> {
        let failed = |error: std::io::Error| {
            Error::new(
                ErrorCode::RelayTransit,
                format!("no loopback port could be opened: {}", error.kind()),
            )
        };
        let port = Port::open().await.map_err(failed)?;
        let (arrivals, received) = mpsc::channel(ARRIVALS);
        let shared = Arc::new(Shared {
            address: LaneAddress {
                port: port.number(),
                secret: Secret::generate(),
            },
            admission: Mutex::default(),
            arrivals,
        });
        let answering = Arc::clone(&shared);
        let listening = port.serve(tasks, CONNECTIONS_LIMIT, move |request, caller| {
            answer(request, caller, Arc::clone(&answering))
        });
        let lane = Self {
            shared,
            _listening: listening,
        };
        Ok((lane, received))
    }

    /// Where the lane listens, for the launch of its process.
    pub(crate) fn address(&self) -> RelayAddress {
        RelayAddress {
            port: self.shared.address.port,
            secret: self.shared.address.secret.clone(),
        }
    }

    /// The admission. Held for a moment only.
    pub(crate) fn admission(&self) -> MutexGuard<'_, Admission> {
        self.shared.admission()
    }
}

impl Shared {
    fn admission(&self) -> MutexGuard<'_, Admission> {
        // Nothing can panic while it is held, and every state of an admission is a whole one.
        self.admission
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

type Body = BoxBody<Bytes, BrokenOff>;

async fn answer(request: Request<Incoming>, caller: Caller, shared: Arc<Shared>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let trusted = shared.address.below(&head.uri).is_some();
    let judgement =
        shared
            .admission()
            .judge(&shared.address, &head.method, &head.uri, &head.headers);
    if trusted {
        caller.trust();
    }
    match judgement {
        Judgement::Refuse(status, refusal) => {
            tracing::debug!(
                refusal = refusal.as_str(),
                status = status.as_u16(),
                "refused on the lane"
            );
            if trusted && refusal.is_extra_generation() {
                // Read to its end: a connection that is closed with unread bytes is reset, and the CLI could lose the answer
                // that stops it.
                let _ = read(body).await;
            }
            if trusted {
                // A full queue loses no count: the admission has it.
                let _ = shared.arrivals.try_send(Arrival::Refused(refusal));
            }
            refused(status)
        }
        Judgement::Local => {
            // Read to its end so that the connection can be used again.
            let _ = read(body).await;
            let _ = shared.arrivals.send(Arrival::AnsweredLocally).await;
            respond(Reply::Synthetic)
        }
        Judgement::Admit => {
            let Some(body) = read(body).await else {
                let _ = shared.arrivals.send(Arrival::Unreadable).await;
                return refused(StatusCode::GONE);
            };
            let path = head.uri.path_and_query().map_or("", |path| path.as_str());
            let path = path
                .trim_start_matches('/')
                .split_once('/')
                .map_or("", |(_, below)| below);
            let (reply, replied) = oneshot::channel();
            let admitted = Admitted {
                body,
                headers: head.headers,
                path: format!("/{path}"),
                reply,
            };
            if shared
                .arrivals
                .send(Arrival::Request(admitted))
                .await
                .is_err()
            {
                return refused(StatusCode::GONE);
            }
            respond(replied.await.unwrap_or(Reply::Gone))
        }
    }
}

async fn read(body: Incoming) -> Option<Bytes> {
    let limit = usize::try_from(NATIVE_REQUEST_BYTES).unwrap_or(usize::MAX);
    loopback::read(body, limit).await
}

fn respond(reply: Reply) -> Response<Body> {
    match reply {
        Reply::Synthetic => {
            let mut headers = HeaderMap::new();
            headers.insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("text/event-stream; charset=utf-8"),
            );
            build(StatusCode::OK, headers, whole(synthetic()))
        }
        Reply::Gone => refused(StatusCode::GONE),
        Reply::Whole {
            status,
            headers,
            body,
        } => build(status, headers, whole(body)),
        Reply::Stream {
            headers,
            mut chunks,
        } => {
            let frames = futures_util::stream::poll_fn(move |cx| chunks.poll_recv(cx));
            let frames = futures_util::StreamExt::map(frames, |chunk| chunk.map(Frame::data));
            build(
                StatusCode::OK,
                headers,
                BodyExt::boxed(StreamBody::new(frames)),
            )
        }
    }
}

fn build(status: StatusCode, headers: HeaderMap, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn whole(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

/// The answer to the CLI when the real one goes to the host alone: without token counts, so that the CLI's own view of
/// the context stays small and it never blocks a later generation (2.1.332 blocks on large ones).
fn synthetic() -> Bytes {
    let mut reply = Vec::with_capacity(1024);
    let usage = Usage {
        input_tokens: Some(1),
        output_tokens: Some(1),
        ..Usage::default()
    };
    encode_text_reply(
        &mut reply,
        "msg_turnpass",
        "turnpass-synthetic",
        SYNTHETIC_TEXT,
        &usage,
    );
    reply.into()
}

/// A refusal in the API's form. It says nothing about what is served here.
fn refused(status: StatusCode) -> Response<Body> {
    const BODY: &str = r#"{"type":"error","error":{"type":"invalid_request_error","message":"not admitted by the turnpass relay"}}"#;
    let mut headers = HeaderMap::new();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    // The CLI retries what it may; this one it may not (seen on 2.1.332).
    headers.insert(
        HeaderName::from_static("x-should-retry"),
        HeaderValue::from_static("false"),
    );
    build(status, headers, whole(Bytes::from_static(BODY.as_bytes())))
}
