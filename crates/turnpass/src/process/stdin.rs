//! Standard input: queued writes by a task of its own, so that a full pipe never blocks the caller.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::process::ChildStdin;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorCode};

/// Bytes that may wait to be written. The largest message that the documents allow is a transcript of 32 MiB with
/// 100 MiB of images, which base64 makes 134 MiB; the rest is room for control requests behind it.
pub const STDIN_QUEUE_BYTES: usize = 192 * 1024 * 1024;

/// The writing end of a process's standard input. Cheap to clone; the pipe closes after [`Stdin::close`].
#[derive(Clone, Debug)]
pub struct Stdin {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Bytes queued and not yet in the pipe; `None` when the pipe is closed.
    pending: watch::Sender<Option<usize>>,
    limit: usize,
}

#[derive(Debug)]
struct Queue {
    sender: Option<mpsc::UnboundedSender<Bytes>>,
}

/// Why bytes were not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StdinError {
    /// The process is gone, has closed its input, or [`Stdin::close`] was called.
    #[error("the CLI's standard input is closed")]
    Closed,
    /// The process does not read fast enough.
    #[error(
        "{pending} bytes wait for the CLI to read them, {asked} more would pass the limit of {limit}"
    )]
    Full {
        /// Bytes that wait.
        pending: usize,
        /// Bytes that were to be added.
        asked: usize,
        /// The limit.
        limit: usize,
    },
}

impl From<StdinError> for Error {
    fn from(error: StdinError) -> Self {
        let code = match error {
            StdinError::Closed => ErrorCode::ProcessExit,
            StdinError::Full { .. } => ErrorCode::ControlTimeout,
        };
        Self::new(code, error.to_string())
    }
}

impl Stdin {
    /// Starts the writer. It ends when the pipe is closed on either side or `stop` is cancelled.
    pub(super) fn start(pipe: ChildStdin, limit: usize, stop: CancellationToken) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (pending, _) = watch::channel(Some(0));
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue {
                sender: Some(sender),
            }),
            pending,
            limit,
        });
        let writer = Arc::clone(&shared);
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = writer.run(pipe, receiver) => {}
            }
            writer.pending.send_replace(None);
        });
        Self { shared }
    }

    /// An input that was never opened.
    pub(super) fn closed() -> Self {
        let (pending, _) = watch::channel(None);
        Self {
            shared: Arc::new(Shared {
                queue: Mutex::new(Queue { sender: None }),
                pending,
                limit: 0,
            }),
        }
    }

    /// Queues bytes in order and returns at once.
    ///
    /// The bytes are written as they are: a caller that speaks stream-json gives exactly one object and one `\n`.
    ///
    /// # Errors
    ///
    /// [`StdinError::Closed`] when nothing can be written any more, [`StdinError::Full`] above the queue's limit; then
    /// nothing of these bytes was queued.
    pub fn write(&self, bytes: impl Into<Bytes>) -> Result<(), StdinError> {
        let bytes = bytes.into();
        let queue = self.lock();
        let sender = queue.sender.as_ref().ok_or(StdinError::Closed)?;
        let limit = self.shared.limit;
        let mut outcome = Ok(());
        self.shared.pending.send_if_modified(|pending| {
            match *pending {
                None => outcome = Err(StdinError::Closed),
                Some(count) if count.saturating_add(bytes.len()) > limit => {
                    outcome = Err(StdinError::Full {
                        pending: count,
                        asked: bytes.len(),
                        limit,
                    });
                }
                Some(count) => *pending = Some(count + bytes.len()),
            }
            false
        });
        outcome?;
        sender.send(bytes).map_err(|_| StdinError::Closed)
    }

    /// Closes the pipe after what is queued. Later writes fail; calling it again does nothing.
    pub fn close(&self) {
        self.lock().sender = None;
    }

    /// Bytes that are queued and not yet in the pipe.
    pub fn pending(&self) -> usize {
        self.shared.pending.borrow().unwrap_or(0)
    }

    /// Waits until everything queued so far is in the pipe, or the pipe is closed.
    ///
    /// Unbounded by itself: a process that does not read never lets it end. Dropping the future loses nothing.
    pub async fn drained(&self) {
        let mut pending = self.shared.pending.subscribe();
        // The sender lives in `self`, so this cannot fail while we wait.
        let _ = pending.wait_for(|count| count.unwrap_or(0) == 0).await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.shared
            .queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    async fn run(&self, mut pipe: ChildStdin, mut queue: mpsc::UnboundedReceiver<Bytes>) {
        while let Some(bytes) = queue.recv().await {
            if pipe.write_all(&bytes).await.is_err() {
                return;
            }
            self.pending.send_modify(|pending| {
                *pending = pending.map(|count| count.saturating_sub(bytes.len()));
            });
        }
    }
}
