//! A folder that only its owner can read, and files in it that no link leads out of.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self as sys, FileType, Mode, OFlags};

/// An open folder of mode 0700 that belongs to us. Files are opened relative to it, so that nobody can put another folder
/// in its place in between.
#[derive(Debug)]
pub(super) struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens it; makes it, and what is above it, with mode 0700 when it is not there.
    pub(super) fn open_or_make(path: &Path) -> io::Result<Self> {
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(path) {
            // A link to a folder counts as there, and is refused below; anything else that is there is told so.
            if error.kind() != io::ErrorKind::AlreadyExists {
                return Err(error);
            }
        }
        Self::open(path)
    }

    /// Opens one that is there.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // Looked at first only to say in words what the open below refuses in a number.
        if path.symlink_metadata()?.is_symlink() {
            return Err(io::Error::other("it is a symbolic link"));
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let fd = sys::open(path, flags, Mode::empty())?;
        let state = sys::fstat(&fd)?;
        if state.st_uid != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("it belongs to somebody else"));
        }
        if Mode::from_raw_mode(state.st_mode).intersects(Mode::RWXG | Mode::RWXO) {
            return Err(io::Error::other(
                "its group or others have rights on it; `chmod 700` takes them away",
            ));
        }
        Ok(Self {
            fd,
            path: path.to_owned(),
        })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A new file of mode 0600 that must not be there yet, not even as a link.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        self.at(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    /// A file to append to, of mode 0600; made when it is not there.
    pub(super) fn append(&self, name: &str) -> io::Result<File> {
        self.at(name, OFlags::RDWR | OFlags::CREATE | OFlags::APPEND)
    }

    /// A file to read.
    pub(super) fn read(&self, name: &str) -> io::Result<File> {
        self.at(name, OFlags::RDONLY)
    }

    fn at(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // Without O_NONBLOCK a pipe in the file's place would hold the open for ever.
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd =
            sys::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR).map_err(
                |error| match error {
                    rustix::io::Errno::LOOP => {
                        io::Error::other(format!("{name} is a symbolic link"))
                    }
                    error => error.into(),
                },
            )?;
        let state = sys::fstat(&fd)?;
        if FileType::from_raw_mode(state.st_mode) != FileType::RegularFile {
            return Err(io::Error::other(format!("{name} is no regular file")));
        }
        Ok(File::from(fd))
    }

    /// Gives a file another name, over what has that name.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(sys::renameat(&self.fd, from, &self.fd, to)?)
    }

    /// Which file has a name, as device and inode.
    pub(super) fn identity(&self, name: &str) -> Option<(u64, u64)> {
        let state = sys::statat(&self.fd, name, sys::AtFlags::SYMLINK_NOFOLLOW).ok()?;
        #[allow(clippy::unnecessary_cast, reason = "the widths differ between systems")]
        Some((state.st_dev as u64, state.st_ino as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_folder_is_made_private_and_another_one_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let made = root.path().join("a/b");
        let folder = Folder::open_or_make(&made).unwrap();
        for path in [&made, &root.path().join("a")] {
            let mode = std::fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
        }
        folder.create("f").unwrap();
        let mode = std::fs::metadata(made.join("f")).unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);

        let open = root.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o750)).unwrap();
        let said = Folder::open_or_make(&open).unwrap_err().to_string();
        assert!(said.contains("chmod 700"), "{said}");
        std::fs::write(root.path().join("file"), "").unwrap();
        Folder::open_or_make(&root.path().join("file")).unwrap_err();
    }

    #[test]
    fn no_link_is_followed_and_nothing_but_a_file_is_opened() {
        let root = tempfile::tempdir().unwrap();
        let real = root.path().join("real");
        let folder = Folder::open_or_make(&real).unwrap();
        let link = root.path().join("link");
        symlink(&real, &link).unwrap();
        let said = Folder::open_or_make(&link).unwrap_err().to_string();
        assert!(said.contains("symbolic link"), "{said}");

        let outside = root.path().join("outside");
        std::fs::write(&outside, "kept").unwrap();
        symlink(&outside, real.join("l")).unwrap();
        symlink(root.path().join("new"), real.join("dangling")).unwrap();
        for name in ["l", "dangling"] {
            folder.append(name).unwrap_err();
            folder.create(name).unwrap_err();
            folder.read(name).unwrap_err();
        }
        assert_eq!(std::fs::read_to_string(&outside).unwrap(), "kept");
        assert!(!root.path().join("new").exists());
        std::fs::create_dir(real.join("d")).unwrap();
        folder.read("d").unwrap_err();
    }
}
