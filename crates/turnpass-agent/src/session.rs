//! Conversations that outlive the program: a file each, which one run at a time may use.
//!
//! A file holds the conversation with everything in it, so it is for its owner alone: 0600 in a folder of 0700. It is
//! replaced as a whole and brought to the disk before the run goes on, so that a program that is killed, or a machine that
//! loses power, finds the conversation as it was before the generation, or the tool, that was running.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use turnpass::conversation::Message;
use turnpass::request::{BackendState, ModelId, TransportSession};
use turnpass::{Error, ErrorCode, Result};

mod name;
mod past;

use name::{decode, encode};
pub use past::{CompactionMark, Past};

/// Largest file, in bytes: more than any conversation that can still be sent, and little enough to be written before each
/// generation.
pub const SESSION_BYTES: u64 = 64 * 1024 * 1024;

/// Most sessions that are listed.
const LISTED: usize = 10_000;

/// The version of the form.
const VERSION: u32 = 1;

/// The ends of the names of files: the conversation, its lock, and the next one while it is written.
const KEPT: &str = "json";
const LOCK: &str = "lock";
const NEXT: &str = "next";
const PAST: &str = "past";

/// How often a lock is tried before the session counts as used, and the pause between: whoever lists the sessions holds
/// each lock for some microseconds.
const LOCK_TRIES: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The kept sessions of one folder.
#[derive(Clone, Debug)]
pub struct SessionStore {
    folder: PathBuf,
}

/// A kept session that this program alone may use, until the value is dropped.
#[derive(Debug)]
pub struct KeptSession {
    name: String,
    encoded: String,
    folder: PathBuf,
    kept: Kept,
    /// Of what stands in the file, so that the same is not written again.
    written: Option<u64>,
    _lock: Lock,
}

/// What is listed of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Its name.
    pub name: String,
    /// The model that it was used with last; none when the file cannot be read.
    pub model: Option<ModelId>,
    /// Its messages.
    pub messages: usize,
    /// How often it was compacted; what that took out is kept too ([`SessionStore::past`]).
    pub compactions: usize,
    /// When it was written last, in Unix seconds.
    pub saved_unix_s: u64,
    /// The size of its file, in bytes.
    pub bytes: u64,
    /// Whether a program uses it now.
    pub in_use: bool,
}

/// The form that is kept.
#[derive(Debug, Serialize, Deserialize)]
struct Kept<M = Vec<Message>> {
    version: u32,
    session: TransportSession,
    model: Option<ModelId>,
    state: Option<BackendState>,
    /// What the model read for its last response, if that is still the conversation's size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_prompt_tokens: Option<u64>,
    /// Oldest first; each has a file of its own with what it took out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    compactions: Vec<CompactionMark>,
    messages: M,
}

impl SessionStore {
    /// The sessions in this folder, which is made when something is written.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    /// Takes a session for this program, a new one if there is none of this name.
    ///
    /// # Errors
    ///
    /// `request_invalid` for a name that is none, `session_file` when another program uses the session, or when its file or
    /// folder cannot be trusted, read or understood.
    pub fn open(&self, name: &str) -> Result<KeptSession> {
        let encoded = encode(name)?;
        make_folder(&self.folder).map_err(|error| unusable(name, &error))?;
        let lock = Lock::take(&self.folder, &encoded, name)?;
        let read = read(&self.path(&encoded, KEPT)).map_err(|error| unusable(name, &error))?;
        let written = read.as_deref().map(digest);
        let kept = match read {
            Some(bytes) => parse(&bytes).map_err(|error| unusable(name, &error))?,
            None => Kept {
                version: VERSION,
                // A later session of this name is another conversation.
                session: TransportSession(format!("{name}-{}", unix_s(SystemTime::now()))),
                model: None,
                state: None,
                last_prompt_tokens: None,
                compactions: Vec::new(),
                messages: Vec::new(),
            },
        };
        Ok(KeptSession {
            name: name.to_owned(),
            encoded,
            folder: self.folder.clone(),
            kept,
            written,
            _lock: lock,
        })
    }

    /// The sessions, newest first.
    ///
    /// # Errors
    ///
    /// `session_file` when the folder cannot be read. A file that cannot be read is listed without a model.
    pub fn list(&self) -> Result<Vec<SessionInfo>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| {
                let what = format!("the kept sessions cannot be listed: {error}");
                Error::new(ErrorCode::SessionFile, what)
            })?,
        };
        let mut all = Vec::new();
        for entry in entries.flatten().take(LISTED) {
            let path = entry.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let name = stem.and_then(decode);
            let (Some(name), true) = (name, path.extension().is_some_and(|end| end == KEPT)) else {
                continue;
            };
            let Ok(meta) = entry.metadata() else { continue };
            let kept = read(&path).ok().flatten();
            let kept = kept.and_then(|bytes| parse::<Vec<IgnoredAny>>(&bytes).ok());
            all.push(SessionInfo {
                in_use: stem.is_some_and(|stem| Lock::is_held(&self.folder, stem)),
                model: kept.as_ref().and_then(|kept| kept.model.clone()),
                compactions: kept.as_ref().map_or(0, |kept| kept.compactions.len()),
                messages: kept.map_or(0, |kept| kept.messages.len()),
                saved_unix_s: meta.modified().map_or(0, unix_s),
                bytes: meta.len(),
                name,
            });
        }
        all.sort_by(|a, b| (b.saved_unix_s, &a.name).cmp(&(a.saved_unix_s, &b.name)));
        Ok(all)
    }

    /// Removes a session. False when there is none of this name.
    ///
    /// # Errors
    ///
    /// As for [`SessionStore::open`].
    pub fn remove(&self, name: &str) -> Result<bool> {
        let encoded = encode(name)?;
        if !self.folder.is_dir() {
            return Ok(false);
        }
        let lock = Lock::take(&self.folder, &encoded, name)?;
        let _ = fs::remove_file(self.path(&encoded, NEXT));
        past::remove(&self.folder, &encoded).map_err(|error| unusable(name, &error))?;
        let removed = match fs::remove_file(self.path(&encoded, KEPT)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(unusable(name, &error)),
        };
        // While it is held: whoever waits for it sees that the file is another one.
        let _ = fs::remove_file(self.path(&encoded, LOCK));
        drop(lock);
        removed
    }

    fn path(&self, encoded: &str, end: &str) -> PathBuf {
        self.folder.join(format!("{encoded}.{end}"))
    }
}

impl KeptSession {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model that it was used with last; none for a new one.
    pub fn model(&self) -> Option<&ModelId> {
        self.kept.model.as_ref()
    }

    /// What was said so far.
    pub fn messages(&self) -> &[Message] {
        &self.kept.messages
    }

    /// The host's key of the conversation, the same in every run.
    pub fn transport_session(&self) -> &TransportSession {
        &self.kept.session
    }

    /// Its compactions, oldest first.
    pub fn compactions(&self) -> &[CompactionMark] {
        &self.kept.compactions
    }

    /// The size of the conversation by its last response, in tokens of the prompt; none when that is not known.
    pub fn last_prompt_tokens(&self) -> Option<u64> {
        self.kept.last_prompt_tokens
    }

    /// What the transport wants back.
    pub fn state(&self) -> Option<&BackendState> {
        self.kept.state.as_ref()
    }

    /// For a transport that keeps no state: what another one wanted back is forgotten, and it is told the conversation anew
    /// should it serve again.
    #[must_use]
    pub fn without_state(mut self) -> Self {
        self.kept.state = None;
        self
    }

    /// Takes the conversation out; from here on [`KeptSession::save`] is given it.
    pub(crate) fn take(&mut self) -> (Vec<Message>, Option<BackendState>) {
        (
            std::mem::take(&mut self.kept.messages),
            self.kept.state.take(),
        )
    }

    /// Writes the conversation down, if it is another one than stands there. When this returns it is on the disk. Blocks for
    /// the write.
    ///
    /// # Errors
    ///
    /// `session_file` when it is larger than [`SESSION_BYTES`] or cannot be written; what stood there stays.
    pub(crate) fn save(
        &mut self,
        messages: &[Message],
        state: Option<&BackendState>,
        model: &ModelId,
        last_prompt_tokens: Option<u64>,
    ) -> Result<()> {
        let written = serde_json::to_vec(&Kept {
            version: VERSION,
            session: self.kept.session.clone(),
            model: Some(model.clone()),
            state: state.cloned(),
            last_prompt_tokens,
            compactions: self.kept.compactions.clone(),
            messages,
        });
        let saved = written
            .map_err(io::Error::from)
            .and_then(|bytes| self.replace(&bytes));
        saved.map_err(|error| unusable(&self.name, &error))
    }

    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = Some(digest(bytes));
        if self.written != written {
            write_whole(&self.folder, &self.encoded, KEPT, bytes)?;
            self.written = written;
        }
        Ok(())
    }
}

/// Puts a file of a session in the place of the one that is there, as a whole. When this returns it is on the disk.
fn write_whole(folder: &Path, encoded: &str, end: &str, bytes: &[u8]) -> io::Result<()> {
    if bytes.len() as u64 > SESSION_BYTES {
        let most = SESSION_BYTES / 1024 / 1024;
        return Err(io::Error::other(format!(
            "it would be larger than {most} MiB"
        )));
    }
    let path = |end: &str| folder.join(format!("{encoded}.{end}"));
    let next = path(NEXT);
    // One that is there is of a program that was killed: the lock is ours.
    let _ = fs::remove_file(&next);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = open(&mut options, &next)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&next, path(end))?;
    // The new name is in the folder, which is a file of its own.
    File::open(folder)?.sync_all()
}

/// The lock of a session. It dies with the program that holds it.
#[derive(Debug)]
struct Lock(#[expect(dead_code, reason = "its drop is what it is for")] File);

impl Lock {
    fn take(folder: &Path, encoded: &str, name: &str) -> Result<Self> {
        let path = folder.join(format!("{encoded}.{LOCK}"));
        for _ in 0..LOCK_TRIES {
            match Self::try_take(&path) {
                Ok(Some(lock)) => return Ok(lock),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(error) => return Err(unusable(name, &error)),
            }
        }
        Err(in_use(name, &path))
    }

    /// `None` when the file was removed between its opening and its locking.
    fn try_take(path: &Path) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let mut file = open(&mut options, path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(ErrorKind::WouldBlock.into()),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        let same = fs::symlink_metadata(path).is_ok_and(|meta| {
            file.metadata()
                .is_ok_and(|ours| (ours.dev(), ours.ino()) == (meta.dev(), meta.ino()))
        });
        if !same {
            return Ok(None);
        }
        file.set_len(0)?;
        // For whoever finds it held.
        write!(file, "{}", std::process::id())?;
        Ok(Some(Self(file)))
    }

    fn is_held(folder: &Path, encoded: &str) -> bool {
        let path = folder.join(format!("{encoded}.{LOCK}"));
        let file = open(OpenOptions::new().read(true), &path);
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock)))
    }
}

fn in_use(name: &str, lock: &Path) -> Error {
    let mut text = String::new();
    let read = open(OpenOptions::new().read(true), lock)
        .and_then(|file| file.take(20).read_to_string(&mut text));
    let by = match (read, text.trim().parse::<u32>()) {
        (Ok(_), Ok(pid)) => format!(" (process {pid})"),
        _ => String::new(),
    };
    let what = format!("another run uses the session {name:?} now{by}");
    let next = "Wait until it has ended, or use a session of another name.";
    Error::new(ErrorCode::SessionFile, what).with_remedy(next)
}

fn unusable(name: &str, error: &io::Error) -> Error {
    Error::new(
        ErrorCode::SessionFile,
        format!("the session {name:?} cannot be used: {error}"),
    )
}

/// A folder of ours that others cannot look into.
fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let state = fs::symlink_metadata(folder)?;
    let ours = state.uid() == rustix::process::geteuid().as_raw();
    if !state.is_dir() || !ours || state.mode() & 0o077 != 0 {
        return Err(io::Error::other(format!(
            "{} is not a folder that you alone can use; `chmod 700` makes it one",
            folder.display()
        )));
    }
    Ok(())
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match open(OpenOptions::new().read(true), path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take(SESSION_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > SESSION_BYTES {
        return Err(io::Error::other("its file is too large"));
    }
    Ok(Some(bytes))
}

/// What every file of a session has.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

impl Head {
    fn check(bytes: &[u8]) -> io::Result<()> {
        let head: Self = serde_json::from_slice(bytes).map_err(Self::damaged)?;
        match head.version {
            VERSION => Ok(()),
            _ => Err(io::Error::other("another version of turnpass wrote it")),
        }
    }

    fn damaged(_: serde_json::Error) -> io::Error {
        io::Error::other("its file is damaged")
    }
}

fn parse<M: for<'a> Deserialize<'a>>(bytes: &[u8]) -> io::Result<Kept<M>> {
    Head::check(bytes)?;
    serde_json::from_slice(bytes).map_err(Head::damaged)
}

/// Opens a regular file and follows no link.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // Without O_NONBLOCK a pipe in the file's place would hold the open for ever.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = options.custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok(file)
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn unix_s(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
