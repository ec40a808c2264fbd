//! Small files of our own that several processes write: 0600 in a 0700 directory, replaced as a whole, under a lock.
//!
//! A reader sees the old file or the new one and never half of one. The lock is a file beside it, since the file itself is
//! another one after each change; it dies with the process that holds it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorCode, Result};

/// Largest file that is read; the ledger of two hundred sessions has 30 KB.
pub const FILE_BYTES: u64 = 1024 * 1024;

/// Longest wait for the lock. A change takes a millisecond; one that holds it longer is stopped or on a dead disk.
pub const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Between two tries for the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// One such file.
#[derive(Clone, Debug)]
pub struct StateFile {
    dir: PathBuf,
    name: &'static str,
}

/// The file while nobody else changes it. Dropping it lets the next one in.
#[derive(Debug)]
pub struct Held<'a> {
    file: &'a StateFile,
    _lock: Lock,
}

impl Held<'_> {
    /// Puts this in place of what is in it. Blocks for a local write.
    ///
    /// # Errors
    ///
    /// When it cannot be written; what was in it is in it still.
    pub fn replace<T: Serialize>(&self, value: &T) -> Result<()> {
        let written = self.file.replace(value);
        written.map_err(|error| self.file.wrong(&error))
    }
}

/// The lock, for as long as it lives.
#[derive(Debug)]
struct Lock(#[expect(dead_code, reason = "its drop is what it is for")] File);

impl StateFile {
    /// The file `name` in `dir`, which is made when something is written.
    pub fn new(dir: &Path, name: &'static str) -> Self {
        Self {
            dir: dir.to_owned(),
            name,
        }
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.dir.join(self.name)
    }

    /// What is in it; `None` when it does not exist. Blocks for a local read.
    ///
    /// # Errors
    ///
    /// `internal` that names the file when it is a link, can be written by others, is too large or is not what was
    /// written.
    pub fn read<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        match self.text() {
            Ok(None) => Ok(None),
            Ok(Some(text)) => serde_json::from_str(&text)
                .map(Some)
                .map_err(|error| self.wrong(&error)),
            Err(error) => Err(self.wrong(&error)),
        }
    }

    /// Changes what is in it, under the lock; what `change` returns is returned. Blocks for the lock, at most
    /// [`LOCK_LIMIT`], and for a local write.
    ///
    /// # Errors
    ///
    /// As [`StateFile::read`], when the lock cannot be had or the file cannot be written, and what `change` returns;
    /// nothing is written then.
    pub fn change<T, R>(&self, change: impl FnOnce(&mut T) -> Result<R>) -> Result<R>
    where
        T: DeserializeOwned + Serialize + Default,
    {
        let held = self.hold()?;
        let mut value = self.read::<T>()?.unwrap_or_default();
        let result = change(&mut value)?;
        held.replace(&value)?;
        Ok(result)
    }

    /// Takes the lock, for a change that is more than one value in and one value out. Blocks for it, at most
    /// [`LOCK_LIMIT`].
    ///
    /// # Errors
    ///
    /// When the lock cannot be had.
    pub fn hold(&self) -> Result<Held<'_>> {
        self.make_dir().map_err(|error| self.wrong(&error))?;
        let lock = self.lock().map_err(|error| self.wrong(&error))?;
        Ok(Held {
            file: self,
            _lock: lock,
        })
    }

    fn text(&self) -> io::Result<Option<String>> {
        let file = match open(OpenOptions::new().read(true), &self.path()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let state = file.metadata()?;
        if !state.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        if state.mode() & 0o022 != 0 || state.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("it can be written by others"));
        }
        let mut text = String::new();
        file.take(FILE_BYTES + 1).read_to_string(&mut text)?;
        if text.len() as u64 > FILE_BYTES {
            return Err(io::Error::other("it is too large"));
        }
        Ok(Some(text))
    }

    fn make_dir(&self) -> io::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
    }

    fn lock(&self) -> io::Result<Lock> {
        let path = self.dir.join(format!("{}.lock", self.name));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = open(&mut options, &path)?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock(file)),
                Err(fs::TryLockError::WouldBlock) if began.elapsed() < LOCK_LIMIT => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(fs::TryLockError::WouldBlock) => {
                    return Err(io::Error::other("another process holds its lock"));
                }
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    fn replace<T: Serialize>(&self, value: &T) -> io::Result<()> {
        let random = uuid::Uuid::new_v4().simple();
        let new = self.dir.join(format!("{}.{random}.new", self.name));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let written = open(&mut options, &new)
            .and_then(|mut file| file.write_all(&serde_json::to_vec(value)?))
            .and_then(|()| fs::rename(&new, self.path()));
        if written.is_err() {
            // The first error is the one to tell.
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// The file cannot be used, for this reason.
    pub(super) fn wrong(&self, error: &dyn std::fmt::Display) -> Error {
        let path = self.path();
        let what = format!("{} cannot be used: {error}", path.display());
        Error::new(ErrorCode::Internal, what).with_remedy(format!(
            "Make it yours alone, or remove {}.",
            path.display()
        ))
    }
}

/// Never through a link, and never waiting for the other end of a pipe.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    options
        .custom_flags(i32::try_from(flags).map_err(io::Error::other)?)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn file(dir: &Path) -> StateFile {
        StateFile::new(dir, "counts.json")
    }

    fn count(file: &StateFile) -> Result<u64> {
        file.change(|count: &mut u64| {
            *count += 1;
            Ok(*count)
        })
    }

    #[test]
    fn it_is_made_private_and_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("a/b");
        let file = file(&below);
        assert!(file.read::<u64>().unwrap().is_none());
        for wanted in 1..4 {
            assert_eq!(count(&file).unwrap(), wanted);
        }
        assert_eq!(file.read::<u64>().unwrap(), Some(3));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&below), mode(&file.path())), (0o700, 0o600));
        let mut names: Vec<_> = fs::read_dir(&below)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["counts.json", "counts.json.lock"],
            "nothing is left"
        );
    }

    #[test]
    fn a_change_that_is_refused_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        count(&file).unwrap();
        let refused = file.change(|count: &mut u64| {
            *count = 9;
            Err::<(), _>(Error::new(ErrorCode::Budget, ""))
        });
        assert_eq!(refused.unwrap_err().code(), ErrorCode::Budget);
        assert_eq!(file.read::<u64>().unwrap(), Some(1));
    }

    #[test]
    fn many_writers_lose_no_change() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..25).for_each(|_| assert!(count(&file(dir.path())).is_ok())));
            }
        });
        assert_eq!(file(dir.path()).read::<u64>().unwrap(), Some(100));
    }

    #[test]
    fn what_is_not_ours_alone_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        count(&file).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o622)).unwrap();
        assert!(
            count(&file)
                .unwrap_err()
                .to_string()
                .contains("written by others")
        );
        fs::remove_file(file.path()).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "7").unwrap();
        symlink(&other, file.path()).unwrap();
        assert!(file.read::<u64>().is_err() && count(&file).is_err());
        assert_eq!(fs::read_to_string(&other).unwrap(), "7");
        fs::remove_file(file.path()).unwrap();
        for name in ["counts.json", "counts.json.lock"] {
            let pipe = dir.path().join(name);
            let _ = fs::remove_file(&pipe);
            let made = std::process::Command::new("mkfifo").arg(&pipe).status();
            assert!(made.unwrap().success());
            count(&file).unwrap_err();
            fs::remove_file(pipe).unwrap();
        }
        fs::write(file.path(), "{not json").unwrap();
        let error = file.read::<u64>().unwrap_err();
        assert!(error.remedy().contains("counts.json"), "{error}");
    }
}
