//! Standard output as raw bytes; splitting into lines is the caller's.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::process::ChildStdout;

/// How long a pipe may stay open after the group is gone. A descendant that left the group can hold it for ever; one
/// second is what the pool system waits for pipes that descendants hold.
pub const PIPE_DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// The reading end of a process's standard output.
///
/// Reads give what the process wrote, in order, then the end. The end comes with the process, at the latest
/// [`PIPE_DRAIN_LIMIT`] after its group is gone. Reading slowly makes the process wait; nothing is kept in between.
pub struct Stdout {
    pipe: ChildStdout,
    abandoned: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
    ended: bool,
}

impl Stdout {
    pub(super) fn new(
        pipe: ChildStdout,
        abandoned: impl Future<Output = ()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            pipe,
            abandoned: Box::pin(abandoned),
            ended: false,
        }
    }
}

impl fmt::Debug for Stdout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stdout")
            .field("pipe", &self.pipe)
            .finish_non_exhaustive()
    }
}

impl AsyncRead for Stdout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.pipe).poll_read(cx, buf) {
            return Poll::Ready(read);
        }
        if !self.ended {
            std::task::ready!(self.abandoned.as_mut().poll(cx));
            self.ended = true;
        }
        // Success without a byte is the end of the stream.
        Poll::Ready(Ok(()))
    }
}
