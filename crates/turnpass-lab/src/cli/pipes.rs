//! Stdin and stdout of the scripted CLI, each on a thread of its own.
//!
//! The real CLI never blocks on its stdout: it goes on reading stdin and answering signals while the
//! host is slow. A thread per pipe gives the same without unsafe code and without making the pipes
//! non-blocking, which would also change them for every process that shares them.

use std::io::{self, BufRead as _, Write as _};
use std::sync::{Arc, mpsc as threads};

use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::emulator::faults::Faults;
use super::recording::Recorder;

/// Lines of stdin in order; `recv` gives `None` at the end of input.
pub(crate) type Lines = mpsc::UnboundedReceiver<Vec<u8>>;

/// Starts to read stdin; every line and the end of input go into the recording.
///
/// The queue has no bound on purpose: the real CLI also reads ahead without one, and the writer is the
/// program under test, whose own limits are what a test looks at.
pub(crate) fn read_stdin(recorder: Arc<Recorder>) -> Lines {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            match stdin.read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {
                    if line.last() == Some(&b'\n') {
                        line.pop();
                    }
                    recorder.stdin(&line);
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            }
        }
        recorder.note("eof", Value::Null);
    });
    receiver
}

enum Job {
    Write(Vec<u8>),
    Written(oneshot::Sender<()>),
}

/// Stdout. Cheap to clone; all clones write through one thread, in order.
#[derive(Clone)]
pub(crate) struct Output {
    jobs: threads::Sender<Job>,
    faults: Faults,
}

impl Output {
    pub(crate) fn start() -> Output {
        let (jobs, queue) = threads::channel::<Job>();
        std::thread::spawn(move || {
            let mut broken = false;
            while let Ok(job) = queue.recv() {
                match job {
                    Job::Write(bytes) if !broken => {
                        let mut out = io::stdout().lock();
                        // A host that has closed the pipe is no reason to end: signals decide that.
                        broken = out.write_all(&bytes).and_then(|()| out.flush()).is_err();
                    }
                    Job::Write(_) => {}
                    Job::Written(done) => {
                        let _ = done.send(());
                    }
                }
            }
        });
        Output {
            jobs,
            faults: Faults::default(),
        }
    }

    /// The same pipe, whose records are written as these faults make them.
    pub(crate) fn with(mut self, faults: Faults) -> Output {
        self.faults = faults;
        self
    }

    /// Queues bytes; returns at once.
    pub(crate) fn bytes(&self, bytes: Vec<u8>) {
        let _ = self.jobs.send(Job::Write(bytes));
    }

    /// Queues one record as a line; returns at once.
    pub(crate) fn record(&self, record: &Value) {
        let mut record = record.clone();
        if !self.faults.record(&mut record) {
            return;
        }
        let mut line = record.to_string().into_bytes();
        line.push(b'\n');
        self.bytes(line);
    }

    /// Returns when everything queued before has been handed to the pipe. A host that does not read
    /// makes this wait, as it is meant to; signals still end the run.
    pub(crate) async fn written(&self) {
        let (done, wait) = oneshot::channel();
        if self.jobs.send(Job::Written(done)).is_ok() {
            let _ = wait.await;
        }
    }
}
