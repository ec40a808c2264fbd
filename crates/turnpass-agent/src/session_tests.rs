use std::os::unix::fs::{PermissionsExt, symlink};

use turnpass::conversation::{Block, Role, SignedThinking};

use super::*;

fn store() -> (tempfile::TempDir, SessionStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = SessionStore::new(folder.path().join("sessions"));
    (folder, store)
}

fn save(session: &mut KeptSession, messages: &[Message], state: Option<&str>) -> Result<()> {
    let state = state.map(|state| BackendState(state.to_owned()));
    session.save(messages, state.as_ref(), &"opus".into(), None)
}

fn failed<T: std::fmt::Debug>(result: Result<T>, code: ErrorCode) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.code(), code);
    error.detail().to_owned()
}

#[test]
fn what_is_kept_comes_back_byte_for_byte() {
    let (_folder, store) = store();
    let mut session = store.open("work").unwrap();
    assert!(session.messages().is_empty() && session.model().is_none());
    let thinking = SignedThinking {
        thinking: "hm\u{2028}\0".into(),
        signature: "c2ln".into(),
    };
    let messages = [
        Message::user("a \u{fffd} é"),
        Message {
            role: Role::Assistant,
            content: vec![Block::Thinking(thinking), Block::text("b")],
        },
    ];
    save(&mut session, &messages, Some("{\"x\":1}")).unwrap();
    let key = session.transport_session().clone();
    drop(session);
    let mut session = store.open("work").unwrap();
    assert_eq!(session.messages(), messages);
    assert_eq!(session.state().unwrap().0, "{\"x\":1}");
    assert_eq!(session.model(), Some(&"opus".into()));
    assert_eq!(session.transport_session(), &key);
    save(&mut session, &messages, None).unwrap();
    drop(session);
    assert!(store.open("work").unwrap().state().is_none());
}

#[test]
fn a_session_has_one_user_at_a_time() {
    let (_folder, store) = store();
    let session = store.open("work").unwrap();
    let said = failed(store.open("work"), ErrorCode::SessionFile);
    let own = format!(
        "another run uses the session \"work\" now (process {})",
        std::process::id()
    );
    assert_eq!(said, own);
    failed(store.remove("work"), ErrorCode::SessionFile);
    store.open("play").unwrap();
    drop(session);
    store.open("work").unwrap();
}

#[test]
fn sessions_are_listed_and_removed() {
    let (folder, store) = store();
    assert_eq!(store.list().unwrap(), []);
    assert!(!store.remove("work").unwrap());
    let mut work = store.open("Work / é").unwrap();
    save(&mut work, &[Message::user("x")], None).unwrap();
    drop(store.open("empty").unwrap());
    fs::write(folder.path().join("sessions/bad.json"), "{").unwrap();
    fs::write(folder.path().join("sessions/%zz.json"), "{}").unwrap();
    let listed = store.list().unwrap();
    let names: std::collections::BTreeMap<_, _> = listed
        .iter()
        .map(|info| {
            (
                info.name.as_str(),
                (info.messages, info.in_use, info.model.is_some()),
            )
        })
        .collect();
    let wanted = [("Work / é", (1, true, true)), ("bad", (0, false, false))];
    assert_eq!(names, wanted.into(), "one without a message is not kept");
    drop(work);
    assert!(!store.list().unwrap().iter().any(|info| info.in_use));
    assert!(store.remove("Work / é").unwrap());
    assert!(store.remove("bad").unwrap());
    assert_eq!(store.list().unwrap(), []);
}

#[test]
fn no_name_leads_out_of_the_folder() {
    let (folder, store) = store();
    for name in [
        "..",
        "../x",
        "/etc/passwd",
        "a/b",
        ".hidden",
        "A",
        "a",
        "%41",
        "a.json",
        "~",
        "con",
        "é",
    ] {
        let mut session = store.open(name).unwrap();
        save(&mut session, &[Message::user(name)], None).unwrap();
    }
    let outside: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(outside.len(), 1);
    let files: std::collections::BTreeSet<String> = fs::read_dir(folder.path().join("sessions"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(files.len(), 24, "a file and a lock each: {files:?}");
    for file in &files {
        let lower = file.to_lowercase();
        assert!(!file.starts_with('.') && *file == lower, "{file}");
    }
    for name in ["..", "A", "a", "é"] {
        assert_eq!(store.open(name).unwrap().messages(), [Message::user(name)]);
    }
    for name in ["", "  ", "a\nb", "a\0", &"a".repeat(241), &"é".repeat(41)] {
        failed(store.open(name), ErrorCode::RequestInvalid);
    }
    store.open(&"a".repeat(240)).unwrap();
    store.open(&"é".repeat(40)).unwrap();
}

#[test]
fn files_are_for_their_owner_and_no_link_is_followed() {
    let (folder, store) = store();
    let mut session = store.open("work").unwrap();
    save(&mut session, &[Message::user("x")], None).unwrap();
    let sessions = folder.path().join("sessions");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&sessions), 0o700);
    for entry in fs::read_dir(&sessions).unwrap() {
        assert_eq!(mode(&entry.unwrap().path()), 0o600);
    }
    let outside = folder.path().join("outside");
    fs::write(&outside, "mine").unwrap();
    for link in ["a.json", "b.lock"] {
        symlink(&outside, sessions.join(link)).unwrap();
    }
    failed(store.open("a"), ErrorCode::SessionFile);
    failed(store.open("b"), ErrorCode::SessionFile);
    assert_eq!(fs::read_to_string(&outside).unwrap(), "mine");
    fs::set_permissions(&sessions, PermissionsExt::from_mode(0o750)).unwrap();
    let said = failed(store.open("work2"), ErrorCode::SessionFile);
    assert!(said.contains("chmod 700"), "{said}");
}

#[test]
fn a_file_that_is_not_ours_is_refused_and_stays() {
    let (folder, store) = store();
    drop(store.open("x").unwrap());
    let path = folder.path().join("sessions/x.json");
    for (text, said) in [
        ("", "damaged"),
        ("{\"version\":1}", "damaged"),
        ("{\"version\":2,\"messages\":[]}", "another version"),
    ] {
        fs::write(&path, text).unwrap();
        let error = failed(store.open("x"), ErrorCode::SessionFile);
        assert!(error.contains(said), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
    let file = File::create(&path).unwrap();
    file.set_len(SESSION_BYTES + 1).unwrap();
    let error = failed(store.open("x"), ErrorCode::SessionFile);
    assert!(error.contains("too large"), "{error}");
}

#[test]
fn what_cannot_be_written_leaves_what_stood_there() {
    let (folder, store) = store();
    let mut session = store.open("x").unwrap();
    save(&mut session, &[Message::user("first")], None).unwrap();
    let most = usize::try_from(SESSION_BYTES).unwrap();
    let large = [Message::user("x".repeat(most))];
    let said = failed(save(&mut session, &large, None), ErrorCode::SessionFile);
    assert!(said.contains("larger than 64 MiB"), "{said}");
    // Left by a program that was killed while it wrote.
    fs::write(folder.path().join("sessions/x.next"), "half").unwrap();
    drop(session);
    let mut session = store.open("x").unwrap();
    assert_eq!(session.messages(), [Message::user("first")]);
    let path = folder.path().join("sessions/x.json");
    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
    let before = inode(&path);
    save(&mut session, &[Message::user("first")], None).unwrap();
    assert_eq!(inode(&path), before, "the same is not written again");
    save(&mut session, &[Message::user("second")], None).unwrap();
    assert_ne!(inode(&path), before);
}
