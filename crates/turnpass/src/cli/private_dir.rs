//! Where launch files live: a directory of our own, swept when its owner is gone.
//!
//! The owner holds a lock on a file in it. The lock dies with the process, however that dies, so a sweep needs neither
//! process numbers nor clocks to know that nobody uses a directory any more.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;

use super::environment::Snapshot;
use crate::error::{Error, ErrorCode, Result};

/// What the names of our directories begin with.
const PREFIX: &str = "turnpass-";

/// The lock within a directory.
const LOCK: &str = "lock";

/// The child's directory for temporary files within ours.
const TMP: &str = "t";

/// The child's working directory when the host names none.
const WORK: &str = "w";

/// Longest path of one of our directories. The CLI makes `t/cc-socks/PID.sock` in it (2.1.332: the name has at most 24
/// bytes more), and the address of a socket has 104 bytes on macOS, of which the last is 0.
pub const DIR_PATH_BYTES: usize = 104 - 1 - "/t/cc-socks/4194304.sock".len();

/// Younger directories are never swept: their owner may not have taken its lock yet.
pub const SWEEP_AGE: Duration = Duration::from_secs(60);

/// Directories that one sweep looks at. A temporary folder may hold very many entries; what is left is for the next one.
pub const SWEEP_ENTRIES: usize = 10_000;

/// A private directory. Dropping it removes it and what is in it.
#[derive(Debug)]
pub struct PrivateDir {
    path: PathBuf,
    _lock: File,
}

/// Candidates for the folder that ours are in, best first: the session's own runtime folder, then the temporary one.
pub fn roots(ours: &Snapshot) -> Vec<PathBuf> {
    let named = ["XDG_RUNTIME_DIR", "TMPDIR"].into_iter();
    named
        .filter_map(|name| ours.get(name).map(PathBuf::from))
        .filter(|path| path.is_absolute())
        .chain([PathBuf::from("/tmp")])
        .collect()
}

impl PrivateDir {
    /// Makes one in the first of `roots` that serves, mode 0700.
    ///
    /// # Errors
    ///
    /// `launch_failed` with the last cause when none serves.
    pub fn create(roots: &[PathBuf]) -> Result<Self> {
        let mut cause = "no folder was given".to_owned();
        for root in roots {
            match Self::create_in(root) {
                Ok(made) => return Ok(made),
                Err(error) => cause = format!("{}: {error}", root.display()),
            }
        }
        Err(Error::new(
            ErrorCode::LaunchFailed,
            format!("no private directory could be made: {cause}"),
        ))
    }

    fn create_in(root: &Path) -> io::Result<Self> {
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seconds = started.unwrap_or_default().as_secs();
        let random = uuid::Uuid::new_v4().simple().to_string();
        let name = format!(
            "{PREFIX}{:x}-{seconds:x}-{}",
            std::process::id(),
            &random[..6]
        );
        let path = root.join(name);
        if path.as_os_str().len() > DIR_PATH_BYTES {
            return Err(io::Error::other("its path is too long for a socket in it"));
        }
        DirBuilder::new().mode(0o700).create(&path)?;
        let made = (|| {
            let lock = new_file(&path.join(LOCK))?;
            lock.try_lock().map_err(io::Error::from)?;
            for inner in [TMP, WORK] {
                DirBuilder::new().mode(0o700).create(path.join(inner))?;
            }
            Ok(lock)
        })();
        match made {
            Ok(lock) => Ok(Self { path, _lock: lock }),
            Err(error) => {
                // The first error is the one to tell.
                let _ = fs::remove_dir_all(&path);
                Err(error)
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A private directory for the child's temporary files.
    pub fn tmp(&self) -> PathBuf {
        self.path.join(TMP)
    }

    /// An empty working directory, for a host that names none.
    pub fn work(&self) -> PathBuf {
        self.path.join(WORK)
    }

    /// Writes a new file, mode 0600, that must not exist yet.
    ///
    /// # Errors
    ///
    /// `launch_failed` when it exists, is a link, or cannot be written; `internal` for a name that is no plain name.
    pub fn write(&self, name: &str, contents: &[u8]) -> Result<PathBuf> {
        let path = self.path.join(plain(name)?);
        let written = new_file(&path).and_then(|mut file| file.write_all(contents));
        written.map_err(|error| {
            Error::new(
                ErrorCode::LaunchFailed,
                format!("the private file {name} could not be written: {error}"),
            )
        })?;
        Ok(path)
    }

    /// Removes it now and says whether that worked; dropping does the same without a word.
    ///
    /// # Errors
    ///
    /// `process_cleanup` when something of it stays.
    pub fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.path).map_err(|error| {
            Error::new(
                ErrorCode::ProcessCleanup,
                format!("{} could not be removed: {error}", self.path.display()),
            )
        })
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // It may have been removed already; anything left is swept at a later start.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn plain(name: &str) -> Result<&str> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(allowed) {
        return Err(Error::new(
            ErrorCode::Internal,
            format!("{name:?} is no name for a private file"),
        ));
    }
    Ok(name)
}

/// Mode 0600, fails when anything is there, follows no link.
fn new_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
}

/// What is known about an entry of a root without following it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    is_dir: bool,
    owner: u32,
    mode: u32,
    age: Duration,
}

/// Whether a sweep may look at the lock of this entry at all.
fn may_sweep(name: &OsStr, entry: Entry, me: u32) -> bool {
    name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
        && entry.is_dir
        && entry.owner == me
        && entry.mode & 0o077 == 0
        && entry.age >= SWEEP_AGE
}

/// Removes directories of ours whose owner is gone. Says which were removed.
///
/// Blocking, and bounded by [`SWEEP_ENTRIES`]. Never follows a link and never touches another user's entry.
pub fn sweep(root: &Path) -> Vec<OsString> {
    let me = rustix::process::geteuid().as_raw();
    let Ok(entries) = fs::read_dir(root) else {
        return Vec::new();
    };
    let mut removed = Vec::new();
    for entry in entries.take(SWEEP_ENTRIES).flatten() {
        let Ok(meta) = fs::symlink_metadata(entry.path()) else {
            continue;
        };
        let age = meta.modified().ok().and_then(|at| at.elapsed().ok());
        let facts = Entry {
            is_dir: meta.is_dir(),
            owner: meta.uid(),
            mode: meta.mode(),
            age: age.unwrap_or_default(),
        };
        if may_sweep(&entry.file_name(), facts, me)
            && is_abandoned(&entry.path())
            && fs::remove_dir_all(entry.path()).is_ok()
        {
            removed.push(entry.file_name());
        }
    }
    removed
}

/// The lock is free, or there never was one.
fn is_abandoned(dir: &Path) -> bool {
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let lock = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(dir.join(LOCK));
    match lock {
        Ok(file) => file.try_lock().is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
#[path = "private_dir_tests.rs"]
mod tests;
