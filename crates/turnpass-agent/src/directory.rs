//! The working directory, and how a path is opened without leaving it.
//!
//! A path from the model is resolved first: every symbolic link, `..` and missing part is followed by hand, which
//! gives the place that would really be touched. The verdict and the person's consent are about that place. It is then
//! opened one component at a time with `O_NOFOLLOW`, from a directory that is held open, so a link that appears between
//! the question and the act is an error and never a way out. This works on every Unix and needs no `openat2`.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use turnpass::{Error, ErrorCode, Result};

use crate::tools::Failure;

/// Symbolic links that one path may lead through; the kernel's own limit.
const LINKS: usize = 40;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

// Without O_NONBLOCK a named pipe would hold the agent until somebody writes into it.
const REGULAR: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// The directory in which an agent works.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    handle: OwnedFd,
}

/// A place that a path from the model leads to, with every link resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    place: PathBuf,
    inside: Option<PathBuf>,
}

impl Directory {
    /// Opens a working directory.
    ///
    /// # Errors
    ///
    /// `working_directory` when it does not exist, is none, or cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::new(
                ErrorCode::WorkingDirectory,
                format!("{}: {error}", path.display()),
            )
        };
        let path = path.canonicalize().map_err(failed)?;
        let handle = rustix::fs::open(&path, DIRECTORY, Mode::empty())
            .map_err(|error| failed(error.into()))?;
        Ok(Self { path, handle })
    }

    /// Its absolute path, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Resolves a path as the model wrote it: relative to this directory, or absolute.
    ///
    /// # Errors
    ///
    /// When a part cannot be looked at, or links lead in a circle. A part that does not exist is no error.
    pub fn resolve(&self, asked: &Path) -> Result<Target, Failure> {
        if asked.as_os_str().is_empty() || asked.as_os_str().as_bytes().contains(&0) {
            return Err(Failure::new("the path is empty or holds a NUL"));
        }
        let place = resolve(&self.path.join(asked))
            .map_err(|error| Failure::new(format!("{}: {error}", asked.display())))?;
        let inside = place.strip_prefix(&self.path).ok().map(Path::to_path_buf);
        Ok(Target { place, inside })
    }

    /// Where the walk to a target starts, and its components from there.
    fn start(&self, target: &Target) -> io::Result<(OwnedFd, Vec<OsString>)> {
        let (start, rest) = match &target.inside {
            Some(rest) => (self.handle.try_clone()?, rest.as_path()),
            None => (
                rustix::fs::open("/", DIRECTORY, Mode::empty())?,
                target.place.as_path(),
            ),
        };
        let components = rest.components().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            _ => None,
        });
        Ok((start, components.collect()))
    }

    /// Opens the directory at a target.
    pub(crate) fn open_directory(&self, target: &Target) -> Result<OwnedFd, Failure> {
        let (start, components) = self.start(target).map_err(|e| target.failed(&e))?;
        walk(start, &components, false).map_err(|error| target.failed(&error))
    }

    /// Opens the regular file at a target for reading.
    pub(crate) fn open_file(&self, target: &Target) -> Result<File, Failure> {
        let (parent, name) = self.open_parent(target, false)?;
        let file = rustix::fs::openat(&parent, &name, OFlags::RDONLY | REGULAR, Mode::empty())
            .map_err(|error| target.failed(&error.into()))?;
        target.regular(file)
    }

    /// Puts new content at a target: a new file beside it that takes its place, so that nobody ever sees half of it.
    /// Directories on the way are made. True when there was no file before.
    pub(crate) fn replace(&self, target: &Target, content: &[u8]) -> Result<bool, Failure> {
        let (parent, name) = self.open_parent(target, true)?;
        let failed = |error: io::Error| target.failed(&error);
        let flags = OFlags::WRONLY | REGULAR;
        // Opened for writing, since a rename would go through on a file that the person made read-only.
        let mode = match rustix::fs::openat(&parent, &name, flags, Mode::empty()) {
            Ok(file) => {
                let file = target.regular(file)?;
                let state = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
                Some(Mode::from_raw_mode(state.st_mode))
            }
            Err(rustix::io::Errno::NOENT) => None,
            Err(error) => return Err(failed(error.into())),
        };
        let mut beside = Beside::create(&parent).map_err(failed)?;
        beside.file.write_all(content).map_err(failed)?;
        if let Some(mode) = mode {
            rustix::fs::fchmod(&beside.file, mode).map_err(|error| failed(error.into()))?;
        }
        beside.take_the_place_of(&name).map_err(failed)?;
        Ok(mode.is_none())
    }

    fn open_parent(&self, target: &Target, create: bool) -> Result<(OwnedFd, OsString), Failure> {
        let (start, mut components) = self.start(target).map_err(|e| target.failed(&e))?;
        let name = components
            .pop()
            .ok_or_else(|| target.failed(&io::ErrorKind::IsADirectory.into()))?;
        let parent = walk(start, &components, create).map_err(|error| target.failed(&error))?;
        Ok((parent, name))
    }
}

impl Target {
    /// The absolute path, without links.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Whether it lies in the working directory.
    pub fn is_inside(&self) -> bool {
        self.inside.is_some()
    }

    /// The path to show: relative when it lies inside.
    pub fn shown(&self) -> impl fmt::Display + '_ {
        match &self.inside {
            Some(rest) if rest.as_os_str().is_empty() => Path::new(".").display(),
            Some(rest) => rest.display(),
            None => self.place.display(),
        }
    }

    pub(crate) fn failed(&self, error: &io::Error) -> Failure {
        let said = match rustix::io::Errno::from_io_error(error) {
            Some(rustix::io::Errno::LOOP) => {
                "a symbolic link appeared on the way; the path is not followed".to_owned()
            }
            _ => error.to_string(),
        };
        Failure::new(format!("{}: {said}", self.shown()))
    }

    fn regular(&self, file: OwnedFd) -> Result<File, Failure> {
        let state = rustix::fs::fstat(&file).map_err(|error| self.failed(&error.into()))?;
        match FileType::from_raw_mode(state.st_mode) {
            FileType::RegularFile => Ok(File::from(file)),
            FileType::Directory => Err(self.failed(&io::ErrorKind::IsADirectory.into())),
            _ => Err(Failure::new(format!(
                "{}: not a regular file",
                self.shown()
            ))),
        }
    }
}

/// Goes down, one directory at a time, through no link.
fn walk(start: OwnedFd, components: &[OsString], create: bool) -> io::Result<OwnedFd> {
    let mut here = start;
    for name in components {
        here = match open_step(&here, name) {
            Err(rustix::io::Errno::NOENT) if create => {
                match rustix::fs::mkdirat(&here, name, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => open_step(&here, name)?,
                    Err(error) => return Err(error.into()),
                }
            }
            other => other?,
        };
    }
    Ok(here)
}

fn open_step(here: &OwnedFd, name: &OsString) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(here, name, DIRECTORY, Mode::empty())
}

/// The place that a path leads to. The kernel's rules, except that parts that do not exist are kept as they stand.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut place = PathBuf::from("/");
    let mut ahead: Vec<OsString> = Vec::new();
    let mut links = 0;
    push_components(&mut ahead, path);
    while let Some(name) = ahead.pop() {
        if name == ".." {
            place.pop();
            continue;
        }
        let next = place.join(&name);
        let linked = match next.symlink_metadata() {
            Ok(state) if state.is_symlink() => next.read_link()?,
            Ok(_) => {
                place = next;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                place = next;
                continue;
            }
            Err(error) => return Err(error),
        };
        links += 1;
        if links > LINKS {
            return Err(rustix::io::Errno::LOOP.into());
        }
        if linked.is_absolute() {
            place = PathBuf::from("/");
        }
        push_components(&mut ahead, &linked);
    }
    Ok(place)
}

fn push_components(ahead: &mut Vec<OsString>, path: &Path) {
    let names = path
        .components()
        .rev()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        });
    ahead.extend(names);
}

/// A new file with a name of its own; gone again when it did not take its place.
struct Beside<'a> {
    parent: &'a OwnedFd,
    name: String,
    file: File,
    placed: bool,
}

impl<'a> Beside<'a> {
    fn create(parent: &'a OwnedFd) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".turnpass-{}-{count}.tmp", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | REGULAR;
        let file = rustix::fs::openat(parent, &name, flags, Mode::from_raw_mode(0o666))?;
        Ok(Self {
            parent,
            name,
            file: file.into(),
            placed: false,
        })
    }

    fn take_the_place_of(mut self, name: &OsString) -> io::Result<()> {
        rustix::fs::renameat(
            self.parent.as_fd(),
            &self.name,
            self.parent.as_fd(),
            name.as_os_str(),
        )?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        if !self.placed {
            // Nothing can be done about a file that cannot be removed; the write has failed with its own error.
            let _ = rustix::fs::unlinkat(self.parent, &self.name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};

    struct House {
        _all: tempfile::TempDir,
        directory: Directory,
        elsewhere: PathBuf,
    }

    fn house() -> House {
        let all = tempfile::tempdir().unwrap();
        let root = all.path().canonicalize().unwrap();
        let (inner, elsewhere) = (root.join("work"), root.join("elsewhere"));
        std::fs::create_dir_all(inner.join("sub")).unwrap();
        std::fs::create_dir(&elsewhere).unwrap();
        std::fs::write(inner.join("sub/file"), "inside").unwrap();
        std::fs::write(elsewhere.join("file"), "outside").unwrap();
        House {
            _all: all,
            directory: Directory::open(&inner).unwrap(),
            elsewhere,
        }
    }

    fn target(house: &House, path: impl AsRef<Path>) -> Target {
        house.directory.resolve(path.as_ref()).unwrap()
    }

    fn content(house: &House, target: &Target) -> Result<String, Failure> {
        let mut text = String::new();
        let mut file = house.directory.open_file(target)?;
        file.read_to_string(&mut text).unwrap();
        Ok(text)
    }

    #[test]
    fn paths_that_stay() {
        let house = house();
        let root = house.directory.path().to_owned();
        symlink(root.join("sub"), root.join("absolute-link")).unwrap();
        symlink("sub/../sub", root.join("relative-link")).unwrap();
        for path in [
            "sub/file",
            "./sub/./file",
            "sub/../sub/file",
            "absolute-link/file",
            "relative-link/file",
            "../work/sub/file",
        ] {
            let target = target(&house, path);
            assert!(target.is_inside(), "{path}");
            assert_eq!(content(&house, &target).unwrap(), "inside", "{path}");
        }
        assert!(target(&house, root.join("sub/new/deep")).is_inside());
    }

    #[test]
    fn paths_that_leave() {
        let house = house();
        let root = house.directory.path().to_owned();
        symlink(&house.elsewhere, root.join("way-out")).unwrap();
        symlink("way-out", root.join("twice")).unwrap();
        symlink(house.elsewhere.join("not-yet"), root.join("dangling")).unwrap();
        let paths: Vec<PathBuf> = [
            "../elsewhere/file",
            "sub/../../elsewhere/file",
            "way-out/file",
            "twice/file",
            "way-out/../elsewhere/new",
            "missing/../../elsewhere/file",
            "dangling",
            "/etc/hosts",
            "/proc/self/root/etc/hosts",
            "..",
        ]
        .map(PathBuf::from)
        .into_iter()
        .chain([
            house.elsewhere.join("file"),
            format!("{}2", root.display()).into(),
        ])
        .collect();
        for path in paths {
            assert!(!target(&house, &path).is_inside(), "{}", path.display());
        }
        assert_eq!(
            content(&house, &target(&house, "way-out/file")).unwrap(),
            "outside",
            "with consent it is opened"
        );
    }

    #[test]
    fn a_link_that_appears_after_the_question_is_not_followed() {
        let house = house();
        let root = house.directory.path().to_owned();
        let (file, new) = (target(&house, "sub/file"), target(&house, "sub/new"));
        std::fs::rename(root.join("sub"), root.join("moved")).unwrap();
        symlink(&house.elsewhere, root.join("sub")).unwrap();
        content(&house, &file).unwrap_err();
        house.directory.replace(&new, b"x").unwrap_err();
        assert!(!house.elsewhere.join("new").exists());

        let last = target(&house, "last");
        symlink(house.elsewhere.join("file"), root.join("last")).unwrap();
        house.directory.replace(&last, b"x").unwrap_err();
        content(&house, &last).unwrap_err();
        assert_eq!(
            std::fs::read_to_string(house.elsewhere.join("file")).unwrap(),
            "outside"
        );
    }

    #[test]
    fn a_directory_that_was_moved_away_is_still_the_one() {
        let house = house();
        let root = house.directory.path().to_owned();
        let file = target(&house, "sub/file");
        std::fs::rename(&root, root.with_extension("old")).unwrap();
        symlink(&house.elsewhere, &root).unwrap();
        assert_eq!(content(&house, &file).unwrap(), "inside");
    }

    #[test]
    fn links_in_a_circle_end() {
        let house = house();
        symlink("a", house.directory.path().join("b")).unwrap();
        symlink("b", house.directory.path().join("a")).unwrap();
        house.directory.resolve(Path::new("a/x")).unwrap_err();
    }

    #[test]
    fn a_named_pipe_does_not_hold_the_agent() {
        let house = house();
        let path = house.directory.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let pipe = target(&house, "pipe");
        let error = content(&house, &pipe).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
        house.directory.replace(&pipe, b"x").unwrap_err();
    }

    #[test]
    fn replacing_keeps_the_mode_and_leaves_nothing_behind() {
        let house = house();
        let path = house.directory.path().join("sub/file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o750)).unwrap();
        let file = target(&house, "sub/file");
        assert!(!house.directory.replace(&file, b"new").unwrap());
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o750);
        assert_eq!(content(&house, &file).unwrap(), "new");
        assert!(
            house
                .directory
                .replace(&target(&house, "x/y/z"), b"")
                .unwrap()
        );
        house
            .directory
            .replace(&target(&house, "sub"), b"x")
            .unwrap_err();
        let names: Vec<_> = std::fs::read_dir(house.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert!(
            names
                .iter()
                .all(|name| !name.to_string_lossy().contains("turnpass")),
            "{names:?}"
        );
    }

    #[test]
    fn a_working_directory_that_is_none_is_an_error() {
        let house = house();
        for path in ["missing", "sub/file"] {
            let path = house.directory.path().join(path);
            let error = Directory::open(&path).unwrap_err();
            assert_eq!(error.code(), ErrorCode::WorkingDirectory);
        }
    }
}
