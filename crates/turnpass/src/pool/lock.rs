//! The lock of one session of the CLI. The CLI lets two processes write into one session (2.1.332), which makes it
//! branch; so a session is resumed only while its lock is held, and forked otherwise.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The folder of locks in the pool's part of the state directory.
const LOCKS: &str = "locks";

/// A held lock. Dropping it removes its file and lets others have the session; the end of this process does the latter.
#[derive(Debug)]
pub(crate) struct SessionLock {
    path: PathBuf,
    _file: File,
}

impl SessionLock {
    /// Takes the lock of a session, if nobody has it. `None` also when the folder cannot be used: a fork is always safe.
    pub(crate) fn take(pool_dir: &Path, cli_session: &str) -> Option<Self> {
        let name = uuid::Uuid::try_parse(cli_session).ok()?;
        let folder = pool_dir.join(LOCKS);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .ok()?;
        let path = folder.join(name.hyphenated().to_string());
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .ok()?;
        file.try_lock().ok()?;
        // Its holder may have removed the file between our open and our lock; then the lock is that of a file that nobody
        // else will ever see.
        match is_at(&file, &path)? {
            true => Some(Self { path, _file: file }),
            // No value, since its end would take the file of whoever has the lock now away.
            false => None,
        }
    }
}

/// Whether the file is the one of this name.
pub(crate) fn is_at(file: &File, path: &Path) -> Option<bool> {
    Some(fs::metadata(path).ok()?.ino() == file.metadata().ok()?.ino())
}

impl Drop for SessionLock {
    fn drop(&mut self) {
        // Before the lock goes: whoever opens the path from here on makes a new file.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: &str = "6f1f6f5e-7f0e-4f3a-9d52-0a4f6a0f3c11";

    #[test]
    fn one_holder_at_a_time_and_no_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let held = SessionLock::take(dir.path(), SESSION).unwrap();
        assert!(SessionLock::take(dir.path(), SESSION).is_none());
        let other = "00000000-7f0e-4f3a-9d52-0a4f6a0f3c11";
        assert!(SessionLock::take(dir.path(), other).is_some());
        drop(held);
        assert_eq!(fs::read_dir(dir.path().join(LOCKS)).unwrap().count(), 0);
        assert!(SessionLock::take(dir.path(), SESSION).is_some());
    }

    #[test]
    fn who_comes_too_late_takes_no_file_of_another_s_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let old = File::create(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(is_at(&old, &path), None, "nobody has one");
        File::create(&path).unwrap();
        assert_eq!(is_at(&old, &path), Some(false), "somebody has another");
    }

    #[test]
    fn many_who_take_and_drop_it_at_once_never_have_it_together() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let dir = tempfile::tempdir().unwrap();
        let holders = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if let Some(held) = SessionLock::take(dir.path(), SESSION) {
                            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                            std::thread::yield_now();
                            assert_eq!(holders.fetch_sub(1, Ordering::SeqCst), 1);
                            drop(held);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_session_that_is_no_uuid_has_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert!(SessionLock::take(dir.path(), "../escape").is_none());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
