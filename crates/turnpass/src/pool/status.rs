//! What a pool shows of itself to other programs of the same person: keys, processes, what was done last and why.
//!
//! A small file in the state directory, written anew after changes and removed at the end. It holds keys and reasons and
//! nothing that was said.

use std::collections::BTreeMap;
use std::fs::{self, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use super::keys::Key;
use super::lock;
use crate::event::{Plan, PlanKind};

/// The folder of these files in the pool's part of the state directory.
const STATUS: &str = "status";
/// Most bytes of one file that is read: 500 processes of [`SHOWN_CHARS`] twice, far more than a machine can run.
const FILE_BYTES: u64 = 1024 * 1024;
/// Most files that are looked at; each running program has one.
const FILES: usize = 1000;
/// How often a file is looked at that is replaced meanwhile: a look takes far less than a [`WRITE_PAUSE`].
const LOOKS: u32 = 3;
/// Shortest time between two writes: what a person looks at need not be newer, and a disk is written to at most so often
/// however fast the tools of the host are.
const WRITE_PAUSE: Duration = Duration::from_millis(100);
/// Age from which a half-written file is one of a program that was killed: a write takes a millisecond.
const LEFT_OVER_AGE: Duration = Duration::from_secs(60);
/// Longest key or reason that is shown; hosts choose their keys.
const SHOWN_CHARS: usize = 300;

/// One live process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Shown {
    /// The key of its conversation.
    pub key: String,
    /// The CLI's process.
    pub pid: u32,
    /// When it was started, in Unix seconds.
    pub started_unix_s: i64,
    /// Generations that it served.
    pub generations: u32,
    /// Whether a generation runs.
    #[serde(default)]
    pub running: bool,
    /// Whether it waits for results of tools.
    pub parked: bool,
    /// Messages that its conversation holds.
    pub messages: usize,
    /// How the last request reached it.
    pub plan: PlanKind,
    /// Why, in a sentence.
    pub reason: String,
}

impl Shown {
    pub(crate) fn plan(mut self, plan: &Plan) -> Self {
        self.plan = plan.kind;
        self.reason = cut(&plan.reason);
        self.key = cut(&self.key);
        self
    }

    pub(crate) fn running(mut self) -> Self {
        self.running = true;
        self.parked = false;
        self
    }
}

fn cut(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}

/// What one program shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PoolStatus {
    /// The program's process.
    pub host_pid: u32,
    /// Its live processes.
    pub sessions: Vec<Shown>,
}

/// Where it is shown.
///
/// Whoever changes something waits for no disk: a task writes, at most every [`WRITE_PAUSE`], and only what differs from
/// what stands there.
#[derive(Debug)]
pub(crate) struct Board {
    shared: Arc<Shared>,
    _writer: Option<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    shown: Mutex<BTreeMap<Key, Shown>>,
    changed: Notify,
    file: Mutex<Kept>,
}

/// The file, and what stands in it.
#[derive(Debug)]
struct Kept {
    path: Option<PathBuf>,
    bytes: Vec<u8>,
    /// The file that stands there, locked: its lock ends with this program, however that ends, and tells readers so.
    held: Option<fs::File>,
    /// How often it was written or removed.
    writes: u64,
    /// Nothing is written any more.
    closed: bool,
}

impl Board {
    /// Has to be called within a tokio runtime.
    pub(crate) fn new(pool_dir: Option<&Path>) -> Self {
        // Several pools of one program have a file each.
        let name = format!(
            "{}-{}.json",
            std::process::id(),
            uuid::Uuid::new_v4().simple()
        );
        let path = pool_dir.map(|dir| dir.join(STATUS).join(name));
        let has_file = path.is_some();
        let shared = Arc::new(Shared {
            shown: Mutex::default(),
            changed: Notify::new(),
            file: Mutex::new(Kept {
                path,
                bytes: Vec::new(),
                held: None,
                writes: 0,
                closed: false,
            }),
        });
        let writer = has_file.then(|| tokio::spawn(write_changes(Arc::clone(&shared))));
        Self {
            shared,
            _writer: writer.map(AbortOnDropHandle::new),
        }
    }

    pub(crate) fn set(&self, key: &Key, shown: Shown) {
        let mut all = self.shared.shown();
        if all.get(key) != Some(&shown) {
            all.insert(key.clone(), shown);
            self.shared.changed.notify_one();
        }
    }

    pub(crate) fn remove(&self, key: &Key) {
        if self.shared.shown().remove(key).is_some() {
            self.shared.changed.notify_one();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.shared.shown().len()
    }

    /// Shows nothing any more. The file is gone when this returns.
    pub(crate) fn clear(&self) {
        self.shared.shown().clear();
        self.shared.write();
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.clear();
        self.shared.file().closed = true;
    }
}

impl Shared {
    fn shown(&self) -> MutexGuard<'_, BTreeMap<Key, Shown>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self) -> MutexGuard<'_, Kept> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the file up to date.
    fn write(&self) {
        // First the file, so that what is written last is what is shown last.
        let mut file = self.file();
        let sessions: Vec<_> = self.shown().values().cloned().collect();
        if let Err(error) = file.replace(sessions) {
            // It is there to be looked at: a disk that does not take it fails nothing.
            tracing::trace!(%error, "the pool's status was not written");
        }
    }
}

impl Kept {
    fn replace(&mut self, sessions: Vec<Shown>) -> std::io::Result<()> {
        let bytes = match sessions.is_empty() {
            true => Vec::new(),
            false => serde_json::to_vec(&PoolStatus {
                host_pid: std::process::id(),
                sessions,
            })?,
        };
        let Some(path) = self.path.as_ref().filter(|_| !self.closed) else {
            return Ok(());
        };
        if bytes == self.bytes {
            return Ok(());
        }
        self.writes += 1;
        // The lock of the old file goes after the new one has taken its place, so what stands there is always locked.
        self.held = match bytes.is_empty() {
            true => {
                fs::remove_file(path)?;
                None
            }
            false => Some(write(path, &bytes)?),
        };
        self.bytes = bytes;
        Ok(())
    }
}

async fn write_changes(shared: Arc<Shared>) {
    loop {
        shared.changed.notified().await;
        let writing = Arc::clone(&shared);
        // A writer that panicked has written nothing, and the next change is written again.
        let _ = tokio::task::spawn_blocking(move || writing.write()).await;
        tokio::time::sleep(WRITE_PAUSE).await;
    }
}

/// Puts a file there whose lock is held as long as what is returned is kept.
fn write(file: &Path, bytes: &[u8]) -> std::io::Result<fs::File> {
    use std::io::Write;
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    let folder = file.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    // A reader sees the old file or the new one.
    let next = file.with_extension("next");
    let mut opened = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&next)?;
    opened.write_all(bytes)?;
    // Where files have no locks, readers look at the number of the process.
    let _ = opened.try_lock();
    fs::rename(&next, file)?;
    Ok(opened)
}

/// What the pools of running programs show, read from the state directory. Files of programs that are gone are removed.
pub fn read(state_dir: &Path) -> Vec<PoolStatus> {
    let Ok(entries) = fs::read_dir(state_dir.join("pool").join(STATUS)) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for entry in entries.flatten().take(FILES) {
        let path = entry.path();
        if path.extension().is_none_or(|kind| kind != "json") {
            // One that is being written, or was when its program was killed.
            remove_old(&path);
            continue;
        }
        all.extend((0..LOOKS).find_map(|_| look(&path)).flatten());
    }
    all.sort_by_key(|status| status.host_pid);
    all
}

/// Removes a file that nobody can be writing any more.
fn remove_old(path: &Path) {
    let age = fs::metadata(path)
        .and_then(|meta| meta.modified())
        .ok()
        .and_then(|at| at.elapsed().ok());
    if age.is_some_and(|age| age > LEFT_OVER_AGE) {
        let _ = fs::remove_file(path);
    }
}

/// What a file shows, if its program still runs; a file of a program that is gone is removed. `None` when it has just been
/// replaced, so that it is to be looked at once more.
///
/// The lock tells the two apart. The number of the process would not: another may have it by now, and a program in another
/// container has its number in another list.
fn look(path: &Path) -> Option<Option<PoolStatus>> {
    let Some((file, status)) = open(path) else {
        return Some(None);
    };
    let runs = match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => true,
        Err(TryLockError::Error(_)) => is_running(status.host_pid),
        Ok(()) => false,
    };
    if runs {
        return Some(Some(status));
    }
    // Nobody holds what was opened. If it still stands there, then nobody is left to replace it.
    match lock::is_at(&file, path) {
        Some(true) => {
            let _ = fs::remove_file(path);
            Some(None)
        }
        Some(false) => None,
        None => Some(None),
    }
}

fn open(path: &Path) -> Option<(fs::File, PoolStatus)> {
    use std::io::Read;
    let file = fs::File::open(path).ok()?;
    let mut bytes = Vec::new();
    (&file).take(FILE_BYTES + 1).read_to_end(&mut bytes).ok()?;
    let is_whole = bytes.len() as u64 <= FILE_BYTES;
    let status = is_whole.then(|| serde_json::from_slice(&bytes).ok())??;
    Some((file, status))
}

/// Whether there is a process of this number.
fn is_running(pid: u32) -> bool {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
