//! One connection: bytes in and out, with an eye on the client at every wait.
//!
//! HTTP is written by hand here and not by a server library. A scripted upstream has to send what no correct server sends
//! (half a body, a wrong length, one byte at a time, a reset at byte N), has to know the instant at which each event was
//! handed to the kernel, and has to notice at once that a client has left during a stall. A library owns the socket and
//! hides all three.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// How many bytes of a next request are read ahead while a reply is written. Above it the client is no longer watched
/// for, which only a client that pipelines bodies can bring about.
const READ_AHEAD_BYTES: usize = 64 << 10;

/// How long an orderly close may take before the connection is dropped anyway.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// The client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// It closed its side.
    Closed,
    /// It reset the connection, or writing failed.
    Reset,
}

#[derive(Debug)]
pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Wire {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }
}

macro_rules! forward {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Wire::Plain(inner) => {
                let $stream = Pin::new(inner);
                $call
            }
            Wire::Tls(inner) => {
                let $stream = Pin::new(inner.as_mut());
                $call
            }
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_read(cx, buf))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        forward!(self, stream => stream.poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_shutdown(cx))
    }
}

/// A connection with what has been read from it and not yet used.
#[derive(Debug)]
pub(crate) struct Conn {
    wire: Wire,
    pub(crate) inbox: BytesMut,
    gone: Option<Gone>,
}

impl Conn {
    pub(crate) fn new(wire: Wire) -> Self {
        Self {
            wire,
            inbox: BytesMut::new(),
            gone: None,
        }
    }

    /// Reads more into the inbox, with room for about `want` bytes. Dropping it loses nothing that was read.
    pub(crate) async fn fill(&mut self, want: usize) -> Result<(), Gone> {
        if let Some(gone) = self.gone {
            return Err(gone);
        }
        self.inbox.reserve(want.clamp(8 << 10, 1 << 20));
        let gone = match self.wire.read_buf(&mut self.inbox).await {
            Ok(0) => Gone::Closed,
            Ok(_) => return Ok(()),
            Err(error) => gone_by(&error),
        };
        self.gone = Some(gone);
        Err(gone)
    }

    /// Runs a future until it is done or the client leaves.
    pub(crate) async fn race<F: Future>(&mut self, future: F) -> Result<F::Output, Gone> {
        let mut future = pin!(future);
        std::future::poll_fn(|cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(output));
            }
            self.poll_gone(cx).map(Err)
        })
        .await
    }

    /// Writes and flushes all of it, unless the client leaves first.
    pub(crate) async fn write_all(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        let mut rest = bytes;
        std::future::poll_fn(|cx| {
            if let Poll::Ready(gone) = self.poll_gone(cx) {
                return Poll::Ready(Err(gone));
            }
            while !rest.is_empty() {
                match ready!(Pin::new(&mut self.wire).poll_write(cx, rest)) {
                    Ok(0) => return Poll::Ready(Err(self.lost(Gone::Reset))),
                    Ok(written) => rest = &rest[written..],
                    Err(error) => return Poll::Ready(Err(self.lost(gone_by(&error)))),
                }
            }
            let flushed = ready!(Pin::new(&mut self.wire).poll_flush(cx));
            Poll::Ready(flushed.map_err(|error| self.lost(gone_by(&error))))
        })
        .await
    }

    /// Closes in order: what was written is delivered.
    pub(crate) async fn close(mut self) {
        let orderly = async {
            self.wire.shutdown().await.ok();
            // Bytes of the client that nobody read would turn the close into a reset and could destroy the reply on its
            // way, so they are read until the client closes too.
            while self.fill(0).await.is_ok() {
                self.inbox.clear();
            }
        };
        tokio::time::timeout(CLOSE_LIMIT, orderly).await.ok();
    }

    /// Resets the connection.
    pub(crate) fn reset(self) {
        self.wire.tcp().set_zero_linger().ok();
    }

    fn lost(&mut self, gone: Gone) -> Gone {
        *self.gone.get_or_insert(gone)
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Gone> {
        loop {
            if let Some(gone) = self.gone {
                return Poll::Ready(gone);
            }
            if self.inbox.len() >= READ_AHEAD_BYTES {
                return Poll::Pending;
            }
            let mut space = [0; 2048];
            let mut buf = ReadBuf::new(&mut space);
            match ready!(Pin::new(&mut self.wire).poll_read(cx, &mut buf)) {
                Ok(()) if buf.filled().is_empty() => self.gone = Some(Gone::Closed),
                Ok(()) => self.inbox.extend_from_slice(buf.filled()),
                Err(error) => self.gone = Some(gone_by(&error)),
            }
        }
    }
}

fn gone_by(error: &io::Error) -> Gone {
    match error.kind() {
        // A TLS client that leaves without close_notify.
        io::ErrorKind::UnexpectedEof => Gone::Closed,
        _ => Gone::Reset,
    }
}
