//! The lines of one process on their way from the task that reads them to whoever hears them, bounded by number and by
//! bytes.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::hearing;
use crate::error::{Error, Result};
use crate::record::RawFile;
use crate::wire::lines::LineSplitter;

/// Longest line of the CLI: one tool input is one line, and so is one whole text (2.1.332: lines of 3 MB were seen).
pub(crate) const LINE_BYTES: usize = 16 * 1024 * 1024;
/// Lines that wait for whoever hears them. The CLI goes on to write into its pipe, and then waits.
const QUEUE_LINES: usize = 64;
/// Bytes of all lines that wait: the longest line has room when nothing else waits, and a process that rests can hold no
/// more than that.
const QUEUE_BYTES: usize = LINE_BYTES;

/// How a `tool_progress` record begins (2.1.332).
const TOOL_PROGRESS: &[u8] = br#"{"type":"tool_progress""#;

/// A line with its room in the queue, or the end of them.
type Item = Result<(Bytes, OwnedSemaphorePermit)>;

/// The hearing end.
#[derive(Debug)]
pub(crate) struct Lines(mpsc::Receiver<Item>);

/// The reading end.
#[derive(Debug)]
pub(crate) struct Queue {
    lines: mpsc::Sender<Item>,
    room: Arc<Semaphore>,
}

/// Both ends of an empty queue.
pub(crate) fn queue() -> (Queue, Lines) {
    let (lines, heard) = mpsc::channel(QUEUE_LINES);
    let room = Arc::new(Semaphore::new(QUEUE_BYTES));
    (Queue { lines, room }, Lines(heard))
}

impl Lines {
    /// The next line; `None` at the end of the process's output.
    ///
    /// # Errors
    ///
    /// `line_too_long`; nothing follows it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Result<Bytes>> {
        // The room is given back with the line.
        let line = self.0.recv().await?;
        Some(line.map(|(line, _room)| line))
    }
}

impl Queue {
    /// Reads until the end of the output, or until nobody hears any more.
    pub(crate) async fn fill(self, mut output: impl AsyncRead + Unpin, mut raw: Option<RawFile>) {
        let mut lines = LineSplitter::new(LINE_BYTES);
        loop {
            let buffer = lines.read_buf();
            let before = buffer.len();
            let read = output.read_buf::<BytesMut>(buffer).await;
            let ended = !matches!(read, Ok(1..));
            if let Some(raw) = &mut raw {
                raw.write(&buffer[before..]);
            }
            loop {
                let line = match lines.next_line() {
                    // A sign of life of a running tool, every 30 s: it would fill the queue while the host works.
                    Ok(Some(line)) if line.starts_with(TOOL_PROGRESS) => continue,
                    Ok(Some(line)) => Ok(line),
                    Ok(None) => break,
                    Err(error) => Err(hearing::too_long(&error)),
                };
                if self.put(line).await.is_err() {
                    return;
                }
            }
            if ended {
                if let Some(line) = lines.finish() {
                    // Nobody has to hear it.
                    let _ = self.put(Ok(line)).await;
                }
                return;
            }
        }
    }

    async fn put(&self, line: Result<Bytes, Error>) -> Result<(), Gone> {
        let item = match line {
            Ok(line) => {
                // A line is at most as long as the queue is, so it gets its room once those before it are heard.
                let bytes = u32::try_from(line.len().clamp(1, QUEUE_BYTES)).map_err(|_| Gone)?;
                let room = Arc::clone(&self.room).acquire_many_owned(bytes);
                let room = tokio::select! {
                    room = room => room.map_err(|_| Gone)?,
                    () = self.lines.closed() => return Err(Gone),
                };
                Ok((line, room))
            }
            Err(error) => Err(error),
        };
        self.lines.send(item).await.map_err(|_| Gone)
    }
}

/// Nobody hears any more.
struct Gone;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::error::ErrorCode;

    const BOUND: Duration = Duration::from_secs(30);
    const MIB: usize = 1024 * 1024;

    fn output(sizes: &[usize]) -> Vec<u8> {
        let mut all = Vec::new();
        for size in sizes {
            all.resize(all.len() + size, b'x');
            all.push(b'\n');
        }
        all
    }

    /// Lets everything run until it waits for something.
    async fn settled() {
        for _ in 0..10_000 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_waits_is_bounded_by_bytes() {
        let (queue, mut lines) = queue();
        let output = output(&[10 * MIB, 5 * MIB, 2 * MIB, 10 * MIB, 1]);
        let room = Arc::clone(&queue.room);
        let filled = tokio::spawn(async move { queue.fill(&output[..], None).await });
        settled().await;
        assert_eq!(lines.0.len(), 2, "the third has no room");
        for size in [10 * MIB, 5 * MIB, 2 * MIB, 10 * MIB, 1] {
            let line = timeout(BOUND, lines.next()).await.unwrap().unwrap();
            assert_eq!(line.unwrap().len(), size);
        }
        assert!(timeout(BOUND, lines.next()).await.unwrap().is_none());
        filled.await.unwrap();
        assert_eq!(room.available_permits(), QUEUE_BYTES);
    }

    #[tokio::test]
    async fn what_waits_is_bounded_by_number() {
        let (queue, lines) = queue();
        let output = output(&[1; 1000]);
        let filled = tokio::spawn(async move { queue.fill(&output[..], None).await });
        settled().await;
        assert_eq!(lines.0.len(), QUEUE_LINES);
        drop(lines);
        timeout(BOUND, filled).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_reader_that_waits_for_room_ends_with_its_hearer() {
        let (queue, lines) = queue();
        let output = output(&[LINE_BYTES, LINE_BYTES]);
        let filled = tokio::spawn(async move { queue.fill(&output[..], None).await });
        settled().await;
        assert_eq!(lines.0.len(), 1);
        drop(lines);
        timeout(BOUND, filled).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn bug_001_the_longest_line_passes_and_a_longer_one_is_one_error() {
        let (queue, mut lines) = queue();
        let output = output(&[LINE_BYTES, LINE_BYTES + 1, 5]);
        tokio::spawn(async move { queue.fill(&output[..], None).await });
        let line = timeout(BOUND, lines.next()).await.unwrap().unwrap();
        assert_eq!(line.unwrap().len(), LINE_BYTES);
        let error = timeout(BOUND, lines.next()).await.unwrap().unwrap();
        assert_eq!(error.unwrap_err().code(), ErrorCode::LineTooLong);
        assert!(timeout(BOUND, lines.next()).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn signs_of_life_take_no_room() {
        let (queue, mut lines) = queue();
        let mut output = Vec::new();
        for _ in 0..200 {
            output.extend_from_slice(TOOL_PROGRESS);
            output.extend_from_slice(b"}\n");
        }
        output.extend_from_slice(b"last");
        tokio::spawn(async move { queue.fill(&output[..], None).await });
        let line = timeout(BOUND, lines.next()).await.unwrap().unwrap();
        assert_eq!(line.unwrap(), "last");
    }
}
