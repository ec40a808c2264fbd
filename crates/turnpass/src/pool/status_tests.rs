use std::time::Instant;

use super::*;
use crate::conversation::Message;
use crate::request::{Request, TransportSession};

/// Longest wait for a file to change.
const PATIENCE: Duration = Duration::from_secs(20);

fn key(name: &str) -> Key {
    let mut request = Request::new("sonnet", vec![Message::user("x")]);
    request.session = TransportSession(name.to_owned());
    Key::of(&request)
}

fn shown(name: &str, generations: u32) -> Shown {
    Shown {
        key: name.to_owned(),
        pid: 1,
        started_unix_s: 2,
        generations,
        running: false,
        parked: true,
        messages: 3,
        plan: PlanKind::Fresh,
        reason: "the conversation begins".to_owned(),
    }
}

/// Waits until what can be read is so.
async fn until(state: &Path, is: impl Fn(&[PoolStatus]) -> bool) {
    let end = Instant::now() + PATIENCE;
    loop {
        let read = read(state);
        if is(&read) {
            return;
        }
        assert!(Instant::now() < end, "never: {read:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn what_is_shown_can_be_read_and_goes_with_its_pool() {
    let state = tempfile::tempdir().unwrap();
    let board = Board::new(Some(&state.path().join("pool")));
    assert!(read(state.path()).is_empty());
    board.set(&key("a"), shown("a", 1));
    board.set(&key("b"), shown("b", 1));
    until(state.path(), |read| {
        read.len() == 1 && read[0].sessions == [shown("a", 1), shown("b", 1)]
    })
    .await;
    assert_eq!(read(state.path())[0].host_pid, std::process::id());
    board.remove(&key("a"));
    until(state.path(), |read| read[0].sessions == [shown("b", 1)]).await;
    drop(board);
    assert!(read(state.path()).is_empty());
    let left = fs::read_dir(state.path().join("pool").join(STATUS)).unwrap();
    assert_eq!(left.count(), 0);
}

#[tokio::test]
async fn many_changes_are_few_writes_and_no_change_is_none() {
    let state = tempfile::tempdir().unwrap();
    let board = Board::new(Some(&state.path().join("pool")));
    let began = Instant::now();
    for n in 0..10_000 {
        board.set(&key("a"), shown("a", n));
        if n % 100 == 0 {
            tokio::task::yield_now().await;
        }
    }
    until(state.path(), |read| {
        read.first()
            .is_some_and(|read| read.sessions[0].generations == 9_999)
    })
    .await;
    let writes = board.shared.file().writes;
    let most = began.elapsed().as_millis() / WRITE_PAUSE.as_millis() + 2;
    assert!(
        u128::from(writes) <= most,
        "{writes} writes, {most} at most"
    );
    // The same again, and something that changes back before it is written.
    board.set(&key("a"), shown("a", 9_999));
    board.shared.write();
    board.set(&key("b"), shown("b", 1));
    board.remove(&key("b"));
    board.shared.write();
    assert_eq!(board.shared.file().writes, writes);
}

#[tokio::test]
async fn a_pool_that_is_gone_writes_no_more() {
    let state = tempfile::tempdir().unwrap();
    let board = Board::new(Some(&state.path().join("pool")));
    let shared = Arc::clone(&board.shared);
    board.set(&key("a"), shown("a", 1));
    drop(board);
    shared.shown().insert(key("a"), shown("a", 2));
    shared.write();
    assert!(read(state.path()).is_empty());
}

#[tokio::test]
async fn files_of_programs_that_are_gone_are_removed() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().join("pool").join(STATUS);
    let gone = PoolStatus {
        // Above the largest process number that Linux gives out.
        host_pid: 0x0040_0001,
        sessions: vec![shown("a", 1)],
    };
    write(&folder.join("1.json"), &serde_json::to_vec(&gone).unwrap()).unwrap();
    fs::write(folder.join("2.json"), "not ours").unwrap();
    fs::write(folder.join("3.next"), "half").unwrap();
    assert!(read(state.path()).is_empty());
    let mut left: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(
        left,
        ["2.json", "3.next"],
        "a young one may be being written"
    );
}

#[test]
fn a_file_of_a_killed_program_is_not_taken_for_that_of_the_process_that_got_its_number() {
    let state = tempfile::tempdir().unwrap();
    let path = state.path().join("pool").join(STATUS).join("1.json");
    let own = PoolStatus {
        host_pid: std::process::id(),
        sessions: vec![shown("a", 1)],
    };
    let held = write(&path, &serde_json::to_vec(&own).unwrap()).unwrap();
    assert_eq!(read(state.path()), [own]);
    // As the system does for a program that was killed.
    drop(held);
    assert!(read(state.path()).is_empty());
    assert!(!path.exists());
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_is_not_taken_for_a_left_over() {
    let state = tempfile::tempdir().unwrap();
    let path = state.path().join("pool").join(STATUS).join("1.json");
    let bytes = |generations| {
        let sessions = vec![shown("a", generations)];
        let host_pid = std::process::id();
        serde_json::to_vec(&PoolStatus { host_pid, sessions }).unwrap()
    };
    let mut held = write(&path, &bytes(0)).unwrap();
    let opened = open(&path).unwrap().0;
    held = {
        let next = write(&path, &bytes(1)).unwrap();
        drop(held);
        next
    };
    assert_eq!(lock::is_at(&opened, &path), Some(false));
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            for _ in 0..2_000 {
                // It may be replaced more often than it is looked at; it is never removed.
                let read = read(state.path());
                assert!(read.iter().all(|one| one.sessions.len() == 1));
                assert!(path.exists());
            }
        });
        let mut generations = 1;
        while !reading.is_finished() {
            generations += 1;
            held = write(&path, &bytes(generations)).unwrap();
        }
        reading.join().unwrap();
    });
    assert_eq!(read(state.path()).len(), 1);
    drop(held);
}

#[test]
fn a_long_key_is_cut() {
    let plan = Plan {
        kind: PlanKind::Fresh,
        reason: "x".repeat(1000),
    };
    let shown = shown(&"é".repeat(1000), 1).plan(&plan);
    assert_eq!(shown.key.chars().count(), SHOWN_CHARS);
    assert_eq!(shown.reason.len(), SHOWN_CHARS);
}
