//! Where records go: counted at once, and written by a thread of their own, so that no generation waits for a disk.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::counters::RecordCounters;
use super::file::{Kept, RecordFile};
use super::stream::StreamRecord;
use crate::error::{Error, ErrorCode, Result};

/// Records that wait for the disk, at about 600 bytes each. A disk that hangs for longer than so many generations loses
/// the rest, which is counted.
pub const QUEUE_RECORDS: usize = 1024;

/// Longest wait of [`RecordSink::flush`]: a folder on a network that is gone must not hold the end of a program.
pub const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Takes the records of generations. Cheap to clone; all clones write one file.
#[derive(Clone, Debug)]
pub struct RecordSink {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    queue: SyncSender<Job>,
    counters: Arc<Mutex<RecordCounters>>,
    folder: PathBuf,
}

enum Job {
    Write(Box<StreamRecord>),
    Flush(oneshot::Sender<()>),
}

impl RecordSink {
    /// Opens the file of records in this folder, which is made with mode 0700 when it is not there, and starts the thread
    /// that writes. The thread ends with the last clone, when it has written what waits.
    ///
    /// # Errors
    ///
    /// `recording_failed` when the folder or the file cannot be used, or is a symbolic link, or others have rights on it.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self> {
        Self::open_with(folder.into(), Kept::default())
    }

    /// Like [`RecordSink::open`], with other bounds of the files.
    ///
    /// # Errors
    ///
    /// As [`RecordSink::open`].
    pub fn open_with(folder: PathBuf, kept: Kept) -> Result<Self> {
        let file = RecordFile::open(&folder, kept).map_err(|error| {
            let what = format!("records cannot be kept in {}: {error}", folder.display());
            Error::new(ErrorCode::RecordingFailed, what)
        })?;
        let (queue, jobs) = sync_channel(QUEUE_RECORDS);
        let counters = Arc::new(Mutex::default());
        let written = Arc::clone(&counters);
        std::thread::Builder::new()
            .name("turnpass-records".to_owned())
            .spawn(move || write_all(file, &jobs, &written))
            .map_err(|error| {
                let what = format!("no thread for records: {error}");
                Error::new(ErrorCode::RecordingFailed, what)
            })?;
        Ok(Self {
            inner: Arc::new(Inner {
                queue,
                counters,
                folder,
            }),
        })
    }

    /// The folder of the file.
    pub fn folder(&self) -> &std::path::Path {
        &self.inner.folder
    }

    /// The totals as they are now.
    pub fn counters(&self) -> RecordCounters {
        lock(&self.inner.counters).clone()
    }

    /// Waits until everything that was taken so far is written, at most [`FLUSH_LIMIT`]. Says whether it is.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn flush(&self) -> bool {
        let flushed = async {
            loop {
                let (done, told) = oneshot::channel();
                match self.inner.queue.try_send(Job::Flush(done)) {
                    Ok(()) => return told.await.is_ok(),
                    Err(TrySendError::Disconnected(_)) => return false,
                    // The bound is around the loop; a queue of a thousand is worked off within milliseconds.
                    Err(TrySendError::Full(_)) => tokio::time::sleep(QUEUE_LOOK).await,
                }
            }
        };
        tokio::time::timeout(FLUSH_LIMIT, flushed)
            .await
            .unwrap_or(false)
    }

    /// Counts a record and queues it for writing; never waits.
    pub(super) fn take(&self, record: StreamRecord) {
        lock(&self.inner.counters).add(&record);
        if self
            .inner
            .queue
            .try_send(Job::Write(Box::new(record)))
            .is_err()
        {
            lock(&self.inner.counters).dropped += 1;
        }
    }
}

/// How often a flush looks whether a full queue has room again.
const QUEUE_LOOK: Duration = Duration::from_millis(5);

fn write_all(mut file: RecordFile, jobs: &Receiver<Job>, counters: &Mutex<RecordCounters>) {
    let mut told = false;
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Write(record) => match file.append(&record) {
                Ok(()) => lock(counters).written += 1,
                Err(error) => {
                    lock(counters).failed += 1;
                    if !told {
                        tracing::warn!("a record of a generation could not be written: {error}");
                        told = true;
                    }
                }
            },
            // Who asked may have given up.
            Job::Flush(done) => drop(done.send(())),
        }
    }
}

fn lock(counters: &Mutex<RecordCounters>) -> MutexGuard<'_, RecordCounters> {
    counters.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "sink_tests.rs"]
mod tests;
