use std::os::unix::fs::PermissionsExt;

use super::*;

fn answer(exit: Exit, stdout: &str) -> Result<Answer, Unanswered> {
    Ok(Answer {
        exit,
        stdout: stdout.into(),
        stderr_tail: "marker".into(),
    })
}

fn judged(answer: &Result<Answer, Unanswered>) -> Result<Version> {
    judge(Path::new("/bin/claude"), answer)
}

#[test]
fn the_first_triple_is_the_version() {
    for (text, wanted) in [
        ("2.1.332 (Claude Code)\n", Some((2, 1, 332))),
        ("claude v2.1.294", Some((2, 1, 294))),
        (
            "warning: node 22.1\n2.1.300-beta.4 3.0.0",
            Some((2, 1, 300)),
        ),
        ("10.20.30.40", Some((10, 20, 30))),
        ("99999999999999999999.1.1 1.2.3", Some((1, 2, 3))),
        ("2.1", None),
        ("..", None),
        ("", None),
        ("<html>", None),
    ] {
        let wanted = wanted.map(|(major, minor, patch)| Version::new(major, minor, patch));
        assert_eq!(Version::find(text), wanted, "{text:?}");
    }
}

#[test]
fn versions_compare_by_number() {
    let ordered = [
        "1.99.999", "2.0.999", "2.1.9", "2.1.10", "2.1.294", "2.10.0", "10.0.0",
    ];
    assert!(ordered.map(|text| Version::find(text).unwrap()).is_sorted());
}

#[test]
fn the_floor_and_both_names() {
    assert_eq!(judged(&answer(Exit::Code(0), "2.1.294")).unwrap(), FLOOR);
    for old in ["2.1.293 (Claude Code)", "1.0.0", "2.0.400"] {
        let error = judged(&answer(Exit::Code(0), old)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::VersionTooOld);
        let text = error.to_string();
        let number = old.split(' ').next().unwrap();
        assert!(
            text.contains(number) && text.contains("2.1.294") && text.contains("claude update"),
            "{text}"
        );
    }
}

#[test]
fn bug_025_a_stub_is_not_runnable_rather_than_signed_out() {
    let hint = answer(Exit::Code(1), "Error: claude native binary not installed.");
    let error = judged(&hint).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ExecutableUnusable);
    assert!(error.detail().contains("installed but not runnable"));
    assert!(!error.to_string().contains("marker"));
    let shim = judged(&answer(Exit::Code(127), "")).unwrap_err();
    assert!(
        shim.detail().contains("interpreter was not found"),
        "{shim}"
    );
}

#[test]
fn no_version_and_no_answer() {
    for wrong in [
        answer(Exit::Code(0), "hello"),
        Err(Unanswered::Late(VERSION_LIMIT)),
        Err(Unanswered::TooLong),
    ] {
        assert_eq!(
            judged(&wrong).unwrap_err().code(),
            ErrorCode::VersionInvalid
        );
    }
    let missing = Error::new(ErrorCode::ExecutableMissing, "");
    let error = judged(&Err(Unanswered::NotStarted(missing))).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ExecutableMissing);
}

/// A fake program that says its version and notes each call in a file beside it.
fn install(path: &Path, version: &str) {
    let text = format!("#!/bin/sh\necho asked >> \"$0.calls\"\necho '{version} (Claude Code)'\n");
    let new = path.with_extension("new");
    // By another process: see the same in the tests of `auth`.
    let mut shell = std::process::Command::new("/bin/sh");
    let shell = shell
        .args(["-c", "printf %s \"$2\" > \"$1\"", "write"])
        .arg(&new)
        .arg(text);
    assert!(shell.status().unwrap().success());
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(&new, path).unwrap();
}

#[tokio::test]
async fn an_update_is_seen_and_nothing_is_asked_twice() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("claude");
    let (versions, environment) = (Versions::default(), Environment::default());
    let calls = || {
        fs::read_to_string(dir.path().join("claude.calls"))
            .unwrap()
            .lines()
            .count()
    };
    install(&program, "2.1.300");
    for _ in 0..3 {
        let known = versions
            .of(&program, &environment, dir.path(), ())
            .await
            .unwrap();
        assert_eq!(known.version, Version::new(2, 1, 300));
        assert!(known.standing.is_unknown());
    }
    assert_eq!(calls(), 1);
    install(&program, "2.1.4000");
    let known = versions
        .of(&program, &environment, dir.path(), ())
        .await
        .unwrap();
    assert_eq!((known.version, calls()), (Version::new(2, 1, 4000), 2));
    install(&program, "2.1.1");
    for _ in 0..2 {
        let error = versions
            .of(&program, &environment, dir.path(), ())
            .await
            .unwrap_err();
        assert_eq!(error.code(), ErrorCode::VersionTooOld);
    }
    assert_eq!(calls(), 4, "a failure is not remembered");
}
