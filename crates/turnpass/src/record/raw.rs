//! Raw recording: what a process of the CLI prints, byte for byte, into a file that only its owner can read.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use super::folder::Folder;
use crate::error::{Error, ErrorCode, Result};

/// Largest recording of one process, in bytes. It ends there, and the process goes on: a warm process prints about 30 KB
/// a generation (2.1.332), and one with a large answer a few megabytes.
pub const RAW_FILE_BYTES: u64 = 256 * 1024 * 1024;

/// Longest encoded key in a file's name, in bytes; with time, process and ending it stays below the 255 of file systems.
const KEY_NAME_BYTES: usize = 120;

/// Tells recordings of one millisecond apart.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// The recording of one process. Each line of the CLI is a line of the file.
///
/// It holds whatever the CLI prints: prompts, answers, tool data and contents of files, and the account's name. What goes
/// over the wire of a relay, and so the bearer, is never in it.
#[derive(Debug)]
pub struct RawFile {
    file: Option<File>,
    path: PathBuf,
    left: u64,
}

impl RawFile {
    /// Makes a new file in `folder`, which is made with mode 0700 when it is not there. The key (a session, or a word for
    /// what has none) is in its name, encoded so that it stays within the folder.
    ///
    /// # Errors
    ///
    /// `recording_failed` when the folder is a symbolic link, belongs to somebody else or gives others rights, or when the
    /// file cannot be made.
    pub fn create(folder: &Path, key: &str) -> Result<Self> {
        let made = Folder::open_or_make(folder).and_then(|opened| {
            let name = file_name(key);
            let file = opened.create(&name)?;
            Ok((file, opened.path().join(name)))
        });
        let (file, path) = made.map_err(|error| {
            let what = format!("nothing can be recorded in {}: {error}", folder.display());
            Error::new(ErrorCode::RecordingFailed, what)
        })?;
        Ok(Self {
            file: Some(file),
            path,
            left: RAW_FILE_BYTES,
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends what was read. A disk that takes no more ends the recording, not the process.
    ///
    /// Blocking: a recording is to be whole, and it is asked for to find something out, so it may cost what it costs.
    pub fn write(&mut self, bytes: &[u8]) {
        let Some(file) = &mut self.file else { return };
        let fits = usize::try_from(self.left).unwrap_or(usize::MAX);
        let part = &bytes[..bytes.len().min(fits)];
        self.left -= part.len() as u64;
        let problem = match file.write_all(part) {
            Err(error) => Some(error.to_string()),
            Ok(()) if part.len() < bytes.len() => {
                Some(format!("it has reached {RAW_FILE_BYTES} bytes"))
            }
            Ok(()) => None,
        };
        if let Some(problem) = problem {
            tracing::warn!("the recording {} ended: {problem}", self.path.display());
            self.file = None;
        }
    }
}

/// `TIME-PROCESS-NUMBER-KEY.ndjson`, so that a listing is in order.
fn file_name(key: &str) -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let milliseconds = since.unwrap_or_default().as_millis();
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id();
    format!(
        "{milliseconds:013}-{process}-{number}-{}.ndjson",
        encoded(key)
    )
}

/// Letters, digits, `-` and `_` as they are, every other byte as `=` and two hexadecimal digits.
fn encoded(key: &str) -> String {
    let mut name = String::new();
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(byte.into()),
            _ => name += &format!("={byte:02x}"),
        }
        if name.len() > KEY_NAME_BYTES {
            name.truncate(KEY_NAME_BYTES);
            break;
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_recording_is_private_and_holds_the_bytes_as_they_came() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("new/rec");
        let mut raw = RawFile::create(&folder, "a session/../../x").unwrap();
        raw.write(b"{\"a\":1}\n\xff");
        raw.write(b"\nrest");
        assert_eq!(std::fs::read(raw.path()).unwrap(), b"{\"a\":1}\n\xff\nrest");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(raw.path())), (0o700, 0o600));
        assert_eq!(raw.path().parent().unwrap(), folder);
        let other = RawFile::create(&folder, "a session/../../x").unwrap();
        assert_ne!(raw.path(), other.path());
    }

    #[test]
    fn a_folder_that_is_a_link_or_open_to_others_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let real = root.path().join("real");
        std::fs::create_dir(&real).unwrap();
        std::fs::set_permissions(&real, PermissionsExt::from_mode(0o755)).unwrap();
        symlink(&real, root.path().join("link")).unwrap();
        for (name, said) in [("real", "chmod 700"), ("link", "symbolic link")] {
            let error = RawFile::create(&root.path().join(name), "k").unwrap_err();
            assert_eq!(error.code(), ErrorCode::RecordingFailed);
            assert!(error.detail().contains(said), "{error}");
        }
        assert_eq!(std::fs::read_dir(&real).unwrap().count(), 0);
    }

    #[test]
    fn a_recording_ends_at_its_bound_and_the_process_goes_on() {
        let root = tempfile::tempdir().unwrap();
        let mut raw = RawFile::create(&root.path().join("r"), "k").unwrap();
        raw.left = 5;
        for _ in 0..3 {
            raw.write(b"abc");
        }
        assert_eq!(std::fs::read(raw.path()).unwrap(), b"abcab");
    }

    proptest! {
        #[test]
        fn no_key_leaves_the_folder(key in any::<String>()) {
            let name = file_name(&key);
            prop_assert!(name.len() < 255);
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '=' | '.');
            prop_assert!(name.chars().all(plain) && !name.starts_with('.') && !name.contains(".."));
        }
    }
}
