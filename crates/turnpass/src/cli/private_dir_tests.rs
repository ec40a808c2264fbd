use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o777
}

/// As if it had been made long ago.
fn make_old(path: &Path) {
    let old = SystemTime::now() - 2 * SWEEP_AGE;
    File::open(path).unwrap().set_modified(old).unwrap();
}

fn create(root: &Path) -> PrivateDir {
    PrivateDir::create(&[root.to_owned()]).unwrap()
}

#[test]
fn it_is_private_and_gone_after_drop() {
    let root = tempfile::tempdir().unwrap();
    let dir = create(root.path());
    let path = dir.path().to_owned();
    assert_eq!(mode(&path), 0o700);
    assert_eq!((mode(&dir.tmp()), mode(&dir.work())), (0o700, 0o700));
    let file = dir.write("system.txt", b"text").unwrap();
    assert_eq!(mode(&file), 0o600);
    assert_eq!(fs::read(&file).unwrap(), b"text");
    fs::write(dir.tmp().join("left by the child"), "x").unwrap();
    drop(dir);
    assert!(!path.exists());
}

#[test]
fn files_are_new_and_never_through_a_link() {
    let root = tempfile::tempdir().unwrap();
    let dir = create(root.path());
    dir.write("a", b"1").unwrap();
    assert_eq!(
        dir.write("a", b"2").unwrap_err().code(),
        ErrorCode::LaunchFailed
    );
    symlink(root.path().join("elsewhere"), dir.path().join("b")).unwrap();
    assert_eq!(
        dir.write("b", b"2").unwrap_err().code(),
        ErrorCode::LaunchFailed
    );
    assert!(!root.path().join("elsewhere").exists());
    for name in ["", ".", "..", "a/b", ".hidden", "a\0", "é"] {
        assert_eq!(
            dir.write(name, b"").unwrap_err().code(),
            ErrorCode::Internal,
            "{name:?}"
        );
    }
}

#[test]
fn a_socket_of_the_child_fits_into_it() {
    let root = tempfile::tempdir().unwrap();
    let dir = create(root.path());
    let socket = dir.tmp().join("cc-socks");
    fs::create_dir(&socket).unwrap();
    let socket = socket.join("4194304.sock");
    assert!(socket.as_os_str().len() <= 103);
    std::os::unix::net::UnixListener::bind(socket).unwrap();
}

#[test]
fn a_root_that_does_not_serve_is_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let long = root.path().join("x".repeat(DIR_PATH_BYTES));
    fs::create_dir(&long).unwrap();
    let roots = [root.path().join("absent"), long, root.path().to_owned()];
    let dir = PrivateDir::create(&roots).unwrap();
    assert_eq!(dir.path().parent(), Some(root.path()));
    let error = PrivateDir::create(&roots[..2]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LaunchFailed);
}

#[test]
fn roots_are_absolute_and_end_with_the_temporary_folder() {
    let of = |pairs: &[(&str, &str)]| roots(&pairs.iter().copied().collect());
    assert_eq!(of(&[]), [PathBuf::from("/tmp")]);
    let both = [("TMPDIR", "/var/tmp"), ("XDG_RUNTIME_DIR", "/run/user/7")];
    assert_eq!(
        of(&both),
        ["/run/user/7", "/var/tmp", "/tmp"].map(PathBuf::from)
    );
    assert_eq!(of(&[("TMPDIR", "here")]), [PathBuf::from("/tmp")]);
}

#[test]
fn a_sweep_removes_what_nobody_holds() {
    let root = tempfile::tempdir().unwrap();
    let held = create(root.path());
    make_old(held.path());
    let (unheld, without_lock) = (
        root.path().join("turnpass-1-1-a"),
        root.path().join("turnpass-1-1-b"),
    );
    for path in [&unheld, &without_lock] {
        DirBuilder::new().mode(0o700).create(path).unwrap();
    }
    fs::write(unheld.join(LOCK), "").unwrap();
    fs::write(unheld.join("mcp.json"), "secret").unwrap();
    for path in [&unheld, &without_lock] {
        make_old(path);
    }
    let mut removed = sweep(root.path());
    removed.sort();
    assert_eq!(removed, ["turnpass-1-1-a", "turnpass-1-1-b"]);
    assert!(held.path().exists() && !unheld.exists() && !without_lock.exists());
    assert!(sweep(root.path()).is_empty());
}

#[test]
fn a_sweep_leaves_everything_else_alone() {
    let root = tempfile::tempdir().unwrap();
    let target = tempfile::tempdir().unwrap();
    fs::write(target.path().join("precious"), "x").unwrap();
    symlink(target.path(), root.path().join("turnpass-link")).unwrap();
    fs::write(root.path().join("turnpass-file"), "x").unwrap();
    let open = root.path().join("turnpass-open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    make_old(&open);
    DirBuilder::new()
        .mode(0o700)
        .create(root.path().join("turnpass-young"))
        .unwrap();
    let other = root.path().join("other");
    DirBuilder::new().mode(0o700).create(&other).unwrap();
    make_old(&other);
    assert!(sweep(root.path()).is_empty());
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 5);
    assert!(target.path().join("precious").exists());
}

#[test]
fn only_an_old_private_directory_of_ours_may_be_swept() {
    let good = Entry {
        is_dir: true,
        owner: 7,
        mode: 0o40700,
        age: SWEEP_AGE,
    };
    let name = OsStr::new("turnpass-1-2-3");
    assert!(may_sweep(name, good, 7));
    assert!(!may_sweep(name, good, 8), "another user's");
    assert!(!may_sweep(OsStr::new("tmp.x"), good, 7), "another name");
    for wrong in [
        Entry {
            is_dir: false,
            ..good
        },
        Entry {
            mode: 0o40750,
            ..good
        },
        Entry {
            age: SWEEP_AGE - Duration::from_secs(1),
            ..good
        },
    ] {
        assert!(!may_sweep(name, wrong, 7), "{wrong:?}");
    }
}
