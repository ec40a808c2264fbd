//! What a pool shows of itself to other programs of the same person: keys, processes, what was done last and why.
//!
//! A small file in the state directory, written anew at each change and removed at the end. It holds keys and reasons and
//! nothing that was said.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::keys::Key;
use crate::event::{Plan, PlanKind};

/// The folder of these files in the pool's part of the state directory.
const STATUS: &str = "status";
/// Most bytes of one file that is read: a key is at most some hundred bytes.
const FILE_BYTES: u64 = 1024 * 1024;

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
        self.reason.clone_from(&plan.reason);
        self
    }
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
#[derive(Debug)]
pub(crate) struct Board {
    file: Option<PathBuf>,
    shown: Mutex<BTreeMap<Key, Shown>>,
}

impl Board {
    pub(crate) fn new(pool_dir: Option<&Path>) -> Self {
        // Several pools of one program have a file each.
        let name = format!(
            "{}-{}.json",
            std::process::id(),
            uuid::Uuid::new_v4().simple()
        );
        Self {
            file: pool_dir.map(|dir| dir.join(STATUS).join(name)),
            shown: Mutex::default(),
        }
    }

    pub(crate) fn set(&self, key: &Key, shown: Shown) {
        self.change(|all| {
            all.insert(key.clone(), shown);
        });
    }

    pub(crate) fn remove(&self, key: &Key) {
        self.change(|all| {
            all.remove(key);
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.shown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    pub(crate) fn clear(&self) {
        self.change(BTreeMap::clear);
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<Key, Shown>)) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut shown);
        let Some(file) = &self.file else { return };
        // It is there to be looked at: a disk that does not take it fails nothing.
        let written = match shown.is_empty() {
            true => fs::remove_file(file),
            false => write(
                file,
                &PoolStatus {
                    host_pid: std::process::id(),
                    sessions: shown.values().cloned().collect(),
                },
            ),
        };
        if let Err(error) = written {
            tracing::trace!(%error, "the pool's status was not written");
        }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.clear();
    }
}

fn write(file: &Path, status: &PoolStatus) -> std::io::Result<()> {
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
    opened.write_all(&serde_json::to_vec(status)?)?;
    fs::rename(&next, file)
}

/// What the pools of running programs show, read from the state directory. Files of programs that are gone are removed.
pub fn read(state_dir: &Path) -> Vec<PoolStatus> {
    let Ok(entries) = fs::read_dir(state_dir.join("pool").join(STATUS)) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let status = fs::metadata(&path)
            .ok()
            .filter(|meta| meta.len() <= FILE_BYTES)
            .and_then(|_| fs::read(&path).ok())
            .and_then(|bytes| serde_json::from_slice::<PoolStatus>(&bytes).ok());
        match status {
            Some(status) if is_running(status.host_pid) => all.push(status),
            Some(_) => {
                let _ = fs::remove_file(&path);
            }
            None => {}
        }
    }
    all.sort_by_key(|status| status.host_pid);
    all
}

/// Whether there is a process of this number. One that took the number of a program that is gone shows its file until it
/// ends; the file says when each process was started.
fn is_running(pid: u32) -> bool {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}
