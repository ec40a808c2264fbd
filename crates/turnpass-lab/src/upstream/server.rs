//! Accepting connections, reading requests, writing scripts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::REQUEST_LIMIT_BYTES;
use super::conn::{Conn, Gone, Wire};
use super::encode::{self, Encoder};
use super::http::{self, BadRequest, Dechunk, Head, Length};
use super::record::{ClosedBy, Ending, Recorded, Replied, Written};
use super::routes::Lab;
use super::script::{Script, Step};
use crate::scenario::{CutHow, Framing};

/// How long a TLS handshake may take.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// How long a connection may be silent between requests or inside one. Longer than any client keeps an idle one.
const SILENCE_LIMIT: Duration = Duration::from_secs(600);

/// How long `until_closed` and `hold` last at most: longer than the longest idle limit that a client is known to have.
const HOLD_LIMIT: Duration = Duration::from_secs(3_600);

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

/// Why writing an answer stopped early.
#[derive(Debug)]
enum Stop {
    Gone(Gone),
    Cut(CutHow),
}

impl From<Gone> for Stop {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

/// Writes one answer and keeps its record.
struct Answer<'a> {
    lab: &'a Lab,
    number: Option<u64>,
    closes: bool,
    bodiless: bool,
    /// A copy of the body, if it is to be written to a file.
    copy: Option<Vec<u8>>,
    chunked: bool,
    split: Option<usize>,
    cut_byte: Option<u64>,
    finish: CutHow,
    written: u64,
}

impl<'a> Answer<'a> {
    fn new(lab: &'a Lab, number: Option<u64>, closes: bool, bodiless: bool) -> Self {
        Self {
            lab,
            number,
            closes,
            bodiless,
            copy: lab.recorder.is_some().then(Vec::new),
            chunked: false,
            split: None,
            cut_byte: None,
            finish: CutHow::End,
            written: 0,
        }
    }

    fn note(&self, with: impl FnOnce(&mut Replied)) {
        if let Some(number) = self.number {
            self.lab.log.update(number, with);
        }
    }

    async fn run(&mut self, conn: &mut Conn, script: Script) -> Result<(), Stop> {
        for step in script.before_head.iter().cloned() {
            self.silence(conn, step).await?;
        }
        if let Some(how) = script.no_head {
            return Err(Stop::Cut(how));
        }
        self.chunked = script.framing == Framing::Chunked && !self.bodiless;
        self.split = script.split;
        self.cut_byte = script.cut_byte;
        self.finish = script.finish;
        let mut encoder = Encoder::new(&script.encoding);
        if script.framing == Framing::Length {
            return self.run_length(conn, script, &mut encoder).await;
        }
        self.head(conn, &script, None).await?;
        if self.bodiless {
            return Ok(());
        }
        self.body(conn, script.steps, script.gap, &mut encoder)
            .await?;
        if self.finish != CutHow::End && self.cut_byte.is_none() {
            return Err(Stop::Cut(self.finish));
        }
        if !encoder.is_identity() {
            let tail = encoder.push(&[], true).await.unwrap_or_default();
            self.bytes(conn, &tail, || {}).await?;
        }
        if self.chunked {
            conn.write_all(b"0\r\n\r\n").await?;
        }
        Ok(())
    }

    /// A body of known length is made whole before its head, which needs the length.
    async fn run_length(
        &mut self,
        conn: &mut Conn,
        script: Script,
        encoder: &mut Encoder,
    ) -> Result<(), Stop> {
        let mut whole = Vec::new();
        for step in &script.steps {
            if let Step::Event(_, bytes) | Step::Bytes(bytes) = step {
                whole.extend_from_slice(bytes);
            }
        }
        let plain = encoder.is_identity();
        if !plain {
            whole = encoder.push(&whole, true).await.unwrap_or_default();
        }
        let length = script.content_length.unwrap_or(whole.len() as u64);
        self.head(conn, &script, Some(length)).await?;
        if self.bodiless {
            return Ok(());
        }
        if plain {
            // Events of a stream with a length still come one by one.
            self.body(conn, script.steps, script.gap, encoder).await?;
        } else {
            self.bytes(conn, &whole, || {}).await?;
        }
        let cut = self.finish != CutHow::End && self.cut_byte.is_none();
        if cut || length != whole.len() as u64 {
            // After a wrong length no further answer can be told from the rest of this one.
            return Err(Stop::Cut(match self.finish {
                CutHow::Rst => CutHow::Rst,
                _ => CutHow::Close,
            }));
        }
        Ok(())
    }

    async fn head(
        &mut self,
        conn: &mut Conn,
        script: &Script,
        length: Option<u64>,
    ) -> Result<(), Stop> {
        let reason = ::http::StatusCode::from_u16(script.status)
            .ok()
            .and_then(|status| status.canonical_reason())
            .unwrap_or("Scripted");
        let mut head = format!("HTTP/1.1 {} {reason}\r\n", script.status);
        let mut line = |name: &str, value: &str| {
            head.push_str(&format!("{name}: {value}\r\n"));
        };
        for (name, value) in &script.headers {
            line(name, value);
        }
        if !script.encoding.is_empty() && http::find(&script.headers, "content-encoding").is_none()
        {
            let names: Vec<&str> = script.encoding.iter().map(|coding| coding.name()).collect();
            line("content-encoding", &names.join(", "));
        }
        match length {
            Some(length) => line("content-length", &length.to_string()),
            None if self.chunked => line("transfer-encoding", "chunked"),
            None => {}
        }
        if self.closes {
            line("connection", "close");
        }
        head.push_str("\r\n");
        let status = script.status;
        let at = Instant::now();
        self.note(|reply| {
            reply.status = Some(status);
            reply.head_at = Some(at);
        });
        conn.write_all(head.as_bytes()).await?;
        Ok(())
    }

    async fn body(
        &mut self,
        conn: &mut Conn,
        steps: Vec<Step>,
        gap: Duration,
        encoder: &mut Encoder,
    ) -> Result<(), Stop> {
        // Events follow a timetable and not the end of the last write, so that small delays do not add up.
        let mut due: Option<Instant> = None;
        for step in steps {
            match step {
                Step::Event(name, bytes) => {
                    if let Some(at) = due {
                        let at = tokio::time::Instant::from_std(at + gap);
                        if !gap.is_zero() {
                            conn.race(tokio::time::sleep_until(at)).await?;
                        }
                    }
                    let now = Instant::now();
                    due = Some(due.map_or(now, |last| {
                        let next = last + gap;
                        if now.saturating_duration_since(next) > gap {
                            now
                        } else {
                            next
                        }
                    }));
                    self.encoded(conn, &bytes, encoder, Some(name)).await?;
                }
                Step::Bytes(bytes) => self.encoded(conn, &bytes, encoder, None).await?,
                Step::Pause {
                    total,
                    ping: Some((every, bytes)),
                } => {
                    let end = Instant::now() + total;
                    loop {
                        let left = end.saturating_duration_since(Instant::now());
                        if left <= every {
                            conn.race(tokio::time::sleep(left)).await?;
                            break;
                        }
                        conn.race(tokio::time::sleep(every)).await?;
                        self.encoded(conn, &bytes, encoder, Some("ping".into()))
                            .await?;
                    }
                    due = None;
                }
                silent => {
                    self.silence(conn, silent).await?;
                    due = None;
                }
            }
        }
        Ok(())
    }

    async fn silence(&self, conn: &mut Conn, step: Step) -> Result<(), Stop> {
        match step {
            Step::Pause { total, .. } if total.is_zero() => {}
            Step::Pause { total, .. } => conn.race(tokio::time::sleep(total)).await?,
            Step::Hold(gate) => {
                let released = self.lab.log.released(&gate);
                conn.race(tokio::time::timeout(HOLD_LIMIT, released))
                    .await?
                    .ok();
            }
            Step::UntilClosed => {
                conn.race(tokio::time::sleep(HOLD_LIMIT)).await?;
            }
            Step::Event(..) | Step::Bytes(_) => {}
        }
        Ok(())
    }

    async fn encoded(
        &mut self,
        conn: &mut Conn,
        bytes: &[u8],
        encoder: &mut Encoder,
        event: Option<Arc<str>>,
    ) -> Result<(), Stop> {
        let (lab, number) = (self.lab, self.number);
        let note = move || {
            if let (Some(name), Some(number)) = (event, number) {
                let at = Instant::now();
                lab.log
                    .update(number, |reply| reply.events.push(Written { name, at }));
            }
        };
        if encoder.is_identity() {
            return self.bytes(conn, bytes, note).await;
        }
        let bytes = encoder.push(bytes, false).await.unwrap_or_default();
        self.bytes(conn, &bytes, note).await
    }

    /// Writes bytes of the body: cut where the script says, split as it says, each piece its own HTTP chunk.
    /// `begin` is called directly before the first of them goes out.
    async fn bytes(
        &mut self,
        conn: &mut Conn,
        bytes: &[u8],
        begin: impl FnOnce(),
    ) -> Result<(), Stop> {
        let left = self.cut_byte.map(|cut| cut.saturating_sub(self.written));
        let cut = left.filter(|left| *left <= bytes.len() as u64);
        let bytes = &bytes[..cut.map_or(bytes.len(), |left| left as usize)];
        let mut begin = Some(begin);
        let mut wire = Vec::new();
        for piece in bytes.chunks(self.split.unwrap_or(usize::MAX)) {
            wire.clear();
            if self.chunked {
                wire.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                wire.extend_from_slice(piece);
                wire.extend_from_slice(b"\r\n");
            }
            if let Some(begin) = begin.take() {
                begin();
            }
            let at = Instant::now();
            let out = if self.chunked { &wire } else { piece };
            conn.write_all(out).await?;
            self.written += piece.len() as u64;
            if let Some(copy) = &mut self.copy {
                copy.extend_from_slice(piece);
            }
            let written = self.written;
            self.note(|reply| {
                reply.first_byte_at.get_or_insert(at);
                reply.last_byte_at = Some(Instant::now());
                reply.bytes = written;
            });
        }
        match cut {
            Some(_) => Err(Stop::Cut(self.finish)),
            None => Ok(()),
        }
    }

    /// Notes how it ended, and writes the files.
    fn finish(self, outcome: &Result<(), Stop>) {
        let at = Instant::now();
        let ending = match outcome {
            Ok(()) => Ending::Complete(at),
            Err(Stop::Cut(_)) => Ending::Cut(at),
            Err(Stop::Gone(_)) => Ending::ClientClosed(at),
        };
        self.note(|reply| reply.ending = Some(ending));
        let recorded = self.number.and_then(|number| self.lab.log.snapshot(number));
        if let (Some(recorder), Some(recorded), Some(reply)) =
            (&self.lab.recorder, recorded, &self.copy)
        {
            // A full disk must not change what the client sees; the missing file tells.
            recorder.write(&recorded, reply).ok();
        }
    }
}
