//! The file of records: appended to by several processes at once, turned over when it is large, read back.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::folder::Folder;
use super::stream::StreamRecord;
use crate::error::{Error, ErrorCode, Result};

/// The file's name in its folder; older ones have `.1`, `.2` and so on behind it, and the lock `.lock`.
pub const RECORD_FILE: &str = "generations.jsonl";

/// Size at which the file is turned over, in bytes: about fifteen thousand generations.
pub const RECORD_FILE_BYTES: u64 = 8 * 1024 * 1024;

/// Older files that are kept beside the one that is written.
pub const RECORD_FILES_KEPT: u32 = 3;

/// Older files that are looked for: a program may have kept more than [`RECORD_FILES_KEPT`].
const OLDER_FILES_READ: u32 = 64;

/// Longest line that is read, in bytes; what is longer is no record of ours.
const LINE_BYTES: u64 = 64 * 1024;

/// Bounds of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Size at which a file is turned over, in bytes.
    pub file_bytes: u64,
    /// Older files that are kept.
    pub older_files: u32,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            file_bytes: RECORD_FILE_BYTES,
            older_files: RECORD_FILES_KEPT,
        }
    }
}

/// The open file.
#[derive(Debug)]
pub(super) struct RecordFile {
    folder: Folder,
    kept: Kept,
    lock: File,
    file: File,
}

fn older(number: u32) -> String {
    match number {
        0 => RECORD_FILE.to_owned(),
        number => format!("{RECORD_FILE}.{number}"),
    }
}

impl RecordFile {
    pub(super) fn open(folder: &Path, kept: Kept) -> io::Result<Self> {
        let folder = Folder::open_or_make(folder)?;
        let lock = folder.append(&format!("{RECORD_FILE}.lock"))?;
        let file = folder.append(RECORD_FILE)?;
        Ok(Self {
            folder,
            kept,
            lock,
            file,
        })
    }

    /// Appends one line. Either the whole line is in the file afterwards, or nothing of it.
    ///
    /// The lock is held for the few microseconds of one write, so that a line of one process is never cut by the turning
    /// over or the clearing away of another.
    pub(super) fn append(&mut self, record: &StreamRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.lock.lock()?;
        let written = self.append_locked(&line);
        // It is given back with the file at the latest.
        let _ = self.lock.unlock();
        written
    }

    fn append_locked(&mut self, line: &[u8]) -> io::Result<()> {
        let mut state = self.file.metadata()?;
        if self.folder.identity(RECORD_FILE) != Some((state.dev(), state.ino())) {
            // Another process has turned it over, or a person has removed it.
            self.file = self.folder.append(RECORD_FILE)?;
            state = self.file.metadata()?;
        }
        if state.len() > 0 && state.len() + line.len() as u64 > self.kept.file_bytes {
            self.turn_over()?;
            state = self.file.metadata()?;
        }
        let mut before = state.len();
        if before > 0 && !self.ends_with_line()? {
            // A process was killed within its write; its half line becomes one that readers skip.
            self.file.write_all(b"\n")?;
            before += 1;
        }
        self.file.write_all(line).inspect_err(|_| {
            // A disk that took half of the line is full; the half is cleared away for the next reader's sake.
            let _ = self.file.set_len(before);
        })
    }

    fn ends_with_line(&mut self) -> io::Result<bool> {
        let mut last = [0];
        self.file.seek(SeekFrom::End(-1))?;
        self.file.read_exact(&mut last)?;
        Ok(last[0] == b'\n')
    }

    fn turn_over(&mut self) -> io::Result<()> {
        for number in (0..self.kept.older_files).rev() {
            match self.folder.rename(&older(number), &older(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        if self.kept.older_files == 0 {
            return self.file.set_len(0);
        }
        self.file = self.folder.append(RECORD_FILE)?;
        Ok(())
    }
}

/// Reads the records of a folder, oldest file first, and gives each to `each`. Returns how many lines were no records; a
/// folder or file that is not there has none.
///
/// Blocking. Nothing is held but one line, and the files that were there when it began.
///
/// # Errors
///
/// `recording_failed` when something is there that cannot be read, or that is a symbolic link.
pub fn read(folder: &Path, mut each: impl FnMut(StreamRecord)) -> Result<u64> {
    let failed = |error: io::Error| {
        let what = format!("records in {} cannot be read: {error}", folder.display());
        Error::new(ErrorCode::RecordingFailed, what)
    };
    let opened = match Folder::open(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        opened => opened.map_err(failed)?,
    };
    let mut files: Vec<((u64, u64), File)> = Vec::new();
    // All are opened before one is read, the newest first: files that are turned over meanwhile only come to stand where
    // this looks later, so none is missed, and one that is met again is known by what it is.
    for number in 0..=OLDER_FILES_READ {
        let file = match opened.read(&older(number)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file.map_err(failed)?,
        };
        let state = file.metadata().map_err(failed)?;
        let identity = (state.dev(), state.ino());
        if !files.iter().any(|(known, _)| *known == identity) {
            files.push((identity, file));
        }
    }
    let mut skipped = 0;
    for (_, file) in files.into_iter().rev() {
        skipped += read_file(file, &mut each).map_err(failed)?;
    }
    Ok(skipped)
}

fn read_file(file: File, each: &mut impl FnMut(StreamRecord)) -> io::Result<u64> {
    let mut reader = BufReader::new(file);
    let (mut line, mut skipped) = (Vec::new(), 0);
    loop {
        line.clear();
        let read = reader
            .by_ref()
            .take(LINE_BYTES)
            .read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(skipped);
        }
        match serde_json::from_slice(&line) {
            Ok(record) => each(record),
            Err(_) => skipped += 1,
        }
    }
}
