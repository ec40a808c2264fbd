//! Writing a script as an HTTP answer, with the instant of everything.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::conn::{Conn, Gone};
use super::encode::Encoder;
use super::http;
use super::record::{Ending, Replied, Written};
use super::routes::Lab;
use super::script::{Script, Step};
use crate::scenario::{CutHow, Framing};

/// How long `until_closed` and `hold` last at most: longer than the longest idle limit that a client is known to have.
const HOLD_LIMIT: Duration = Duration::from_secs(3_600);

/// Why writing an answer stopped early.
#[derive(Debug)]
pub(crate) enum Stop {
    Gone(Gone),
    Cut(CutHow),
}

impl From<Gone> for Stop {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

/// Writes one answer and keeps its record.
pub(crate) struct Answer<'a> {
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
    pub(crate) fn new(lab: &'a Lab, number: Option<u64>, closes: bool, bodiless: bool) -> Self {
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

    pub(crate) async fn run(&mut self, conn: &mut Conn, script: Script) -> Result<(), Stop> {
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
    pub(crate) fn finish(self, outcome: &Result<(), Stop>) {
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
