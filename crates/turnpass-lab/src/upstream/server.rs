//! Accepting connections and reading requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::REQUEST_LIMIT_BYTES;
use super::answer::{Answer, Stop};
use super::conn::{Conn, Gone, Wire};
use super::encode;
use super::http::{self, BadRequest, Dechunk, Head, Length};
use super::record::{ClosedBy, Ending, Recorded, Replied};
use super::routes::Lab;
use super::script::Script;
use crate::scenario::{CutHow, Framing};

/// How long a TLS handshake may take.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// How long a connection may be silent between requests or inside one. Longer than any client keeps an idle one.
const SILENCE_LIMIT: Duration = Duration::from_secs(600);

/// How much of a body above the limit is read and thrown away, so that the client gets to read the refusal.
const DISCARD_LIMIT_BYTES: u64 = 512 << 20;

/// Accepts until it is dropped; dropping it drops every connection.
pub(crate) async fn accept(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    lab: Arc<Lab>,
) {
    let acceptor = tls.map(TlsAcceptor::from);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, acceptor.clone(), Arc::clone(&lab)));
                }
                // Out of descriptors, or a client that left in the queue: the next accept may work again.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, lab: Arc<Lab>) {
    let number = lab.log.opened(Instant::now());
    // Without it the kernel would join small writes, and the instants of the events would not be theirs.
    stream.set_nodelay(true).ok();
    let wire = match tls {
        None => Wire::Plain(stream),
        Some(acceptor) => {
            match tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => Wire::Tls(Box::new(stream)),
                _ => return lab.log.closed(number, ClosedBy::Client),
            }
        }
    };
    let mut conn = Conn::new(wire);
    let by = match serve(&mut conn, &lab, number).await {
        End::Gone(gone) => {
            lab.log.closed(number, closed_by(gone));
            return;
        }
        End::Close => {
            conn.close().await;
            ClosedBy::Upstream
        }
        End::Reset => {
            conn.reset();
            ClosedBy::Upstream
        }
    };
    lab.log.closed(number, by);
}

fn closed_by(gone: Gone) -> ClosedBy {
    match gone {
        Gone::Closed => ClosedBy::Client,
        Gone::Reset => ClosedBy::ClientReset,
    }
}

/// How serving a connection ended.
enum End {
    Gone(Gone),
    Close,
    Reset,
}

impl From<Gone> for End {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

enum ReadError {
    Gone(Gone),
    Bad(BadRequest),
}

impl From<Gone> for ReadError {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

impl From<BadRequest> for ReadError {
    fn from(bad: BadRequest) -> Self {
        Self::Bad(bad)
    }
}

async fn fill(conn: &mut Conn, want: usize) -> Result<(), Gone> {
    let filled = tokio::time::timeout(SILENCE_LIMIT, conn.fill(want)).await;
    filled.unwrap_or(Err(Gone::Closed))
}

/// Serves requests until the connection ends.
async fn serve(conn: &mut Conn, lab: &Lab, connection: u64) -> End {
    loop {
        let (recorded, keep_alive) = match read_request(conn, lab, connection).await {
            Ok(read) => read,
            Err(ReadError::Gone(gone)) => return End::Gone(gone),
            Err(ReadError::Bad(BadRequest(problem))) => {
                let script = Script::error(400, "invalid_request_error", problem);
                let mut answer = Answer::new(lab, None, true, false);
                return match answer.run(conn, script).await {
                    Err(Stop::Gone(gone)) => End::Gone(gone),
                    _ => End::Close,
                };
            }
        };
        let bodiless = recorded.method == "HEAD";
        let (number, script) = lab.answer(recorded);
        let closes = !keep_alive || script.framing == Framing::Close;
        let mut answer = Answer::new(lab, Some(number), closes, bodiless);
        let outcome = answer.run(conn, script).await;
        answer.finish(&outcome);
        match outcome {
            Ok(()) if closes => return End::Close,
            Ok(()) => {}
            Err(Stop::Gone(gone)) => return End::Gone(gone),
            Err(Stop::Cut(CutHow::Rst)) => return End::Reset,
            Err(Stop::Cut(_)) => return End::Close,
        }
    }
}

/// Reads one request whole. One whose client leaves in its body is recorded as it is.
async fn read_request(
    conn: &mut Conn,
    lab: &Lab,
    connection: u64,
) -> Result<(Recorded, bool), ReadError> {
    let head = loop {
        if let Some(head) = http::take_head(&mut conn.inbox)? {
            break head;
        }
        fill(conn, 0).await?;
    };
    let arrived_at = Instant::now();
    let length = head.length()?;
    let continues = head
        .header("expect")
        .is_some_and(|expect| expect.eq_ignore_ascii_case("100-continue"));
    if continues {
        conn.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
    }
    let keep_alive = head.keeps_alive();
    let mut recorded = record(head, connection, arrived_at);
    match read_body(conn, length).await {
        Ok((body, body_bytes)) => {
            recorded.body = body;
            recorded.body_bytes = body_bytes;
            recorded.body_complete_at = Some(Instant::now());
            recorded.json = parse(&recorded).await.map(Arc::new);
            Ok((recorded, keep_alive))
        }
        Err(error) => {
            if matches!(error, ReadError::Gone(_)) {
                recorded.reply.ending = Some(Ending::ClientClosed(Instant::now()));
            }
            lab.log.push(recorded);
            Err(error)
        }
    }
}

fn record(head: Head, connection: u64, arrived_at: Instant) -> Recorded {
    let (path, query) = match head.target.split_once('?') {
        Some((path, query)) => (path.to_owned(), Some(query.to_owned())),
        None => (head.target, None),
    };
    Recorded {
        number: 0,
        connection,
        method: head.method,
        path,
        query,
        headers: head.headers,
        body: Bytes::new(),
        body_bytes: 0,
        json: None,
        arrived_at,
        body_complete_at: None,
        violations: Vec::new(),
        cache: None,
        reply: Replied::default(),
    }
}

async fn parse(recorded: &Recorded) -> Option<serde_json::Value> {
    match recorded.header("content-encoding") {
        None => serde_json::from_slice(&recorded.body).ok(),
        Some(codings) => {
            let plain = encode::decode(&recorded.body, codings, REQUEST_LIMIT_BYTES).await?;
            serde_json::from_slice(&plain).ok()
        }
    }
}

/// The body, up to the limit, and its whole length.
async fn read_body(conn: &mut Conn, length: Length) -> Result<(Bytes, u64), ReadError> {
    let limit = REQUEST_LIMIT_BYTES as usize;
    match length {
        Length::Exactly(length) if length <= REQUEST_LIMIT_BYTES => {
            let length = length as usize;
            while conn.inbox.len() < length {
                fill(conn, length - conn.inbox.len()).await?;
            }
            Ok((conn.inbox.split_to(length).freeze(), length as u64))
        }
        Length::Exactly(length) => {
            if length > DISCARD_LIMIT_BYTES {
                return Err(BadRequest("the body is far too large").into());
            }
            let (mut kept, mut left) = (BytesMut::new(), length);
            while left > 0 {
                if conn.inbox.is_empty() {
                    fill(conn, 1 << 20).await?;
                }
                let take = (left.min(conn.inbox.len() as u64)) as usize;
                let part = conn.inbox.split_to(take);
                kept.extend_from_slice(&part[..take.min(limit - kept.len())]);
                left -= take as u64;
            }
            Ok((kept.freeze(), length))
        }
        Length::Chunked => {
            let (mut kept, mut total, mut dechunk) = (BytesMut::new(), 0, Dechunk::default());
            while !dechunk.step(&mut conn.inbox, |part| {
                total += part.len() as u64;
                kept.extend_from_slice(&part[..part.len().min(limit - kept.len())]);
            })? {
                if total > DISCARD_LIMIT_BYTES {
                    return Err(BadRequest("the body is far too large").into());
                }
                fill(conn, 0).await?;
            }
            Ok((kept.freeze(), total))
        }
    }
}
