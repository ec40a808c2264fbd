//! The book under load: what one caller gives back is there for the next one, whoever holds what meanwhile.

use std::fs::File;
use std::sync::mpsc;

use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::limits::budget::Allowance;
use crate::request::TransportSession;

fn allow(requests: Option<u64>, tokens: Option<u64>) -> Budgets {
    Budgets {
        day: Allowance { requests, tokens },
        ..Budgets::default()
    }
}

fn key() -> SessionKey {
    SessionKey::of(&TransportSession("s".to_owned()), None)
}

/// A program with one thread for all that blocks, so that what it does has an order.
struct Program {
    runtime: Runtime,
    book: Arc<Book>,
}

impl Program {
    fn new(dir: Option<&Path>, budgets: Budgets) -> Self {
        Self {
            runtime: Builder::new_current_thread()
                .max_blocking_threads(1)
                .build()
                .unwrap(),
            book: Book::open(dir, budgets, TaskTracker::new()),
        }
    }

    fn count(&self) -> Result<Counted> {
        self.runtime.block_on(self.book.count(key()))
    }

    /// Whether another request would be let through; it is not sent.
    fn has_room(&self) -> bool {
        self.count().is_ok()
    }

    /// Lets nothing that blocks run until the answer is dropped: the load under which entries come late.
    fn busy(&self) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel();
        self.runtime
            .spawn_blocking(move || released.recv().is_err());
        release
    }

    /// Within the program, as all that a generation does.
    fn within(&self, act: impl FnOnce()) {
        let _entered = self.runtime.enter();
        act();
    }
}

fn lock_of(dir: &Path) -> File {
    let lock = File::create(dir.join(format!("{LEDGER_FILE}.lock"))).unwrap();
    lock.lock().unwrap();
    lock
}

#[test]
fn what_a_busy_program_gives_back_is_there_for_another_one_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let [first, other] = [(); 2].map(|()| Program::new(Some(dir.path()), allow(Some(1), None)));
    let counted = first.count().unwrap();
    assert!(!other.has_room());
    let busy = first.busy();
    first.within(|| drop(counted));
    assert!(other.has_room());
    drop(busy);
}

#[test]
fn what_is_given_back_while_another_program_holds_the_file_is_there_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let [first, other] = [(); 2].map(|()| Program::new(Some(dir.path()), allow(Some(1), None)));
    let counted = first.count().unwrap();
    let lock = lock_of(dir.path());
    let busy = first.busy();
    first.within(|| drop(counted));
    drop(lock);
    assert!(other.has_room());
    drop(busy);
    assert!(first.has_room());
}

#[test]
fn what_is_given_back_within_a_program_is_there_for_its_next_request() {
    let dir = tempfile::tempdir().unwrap();
    for dir in [Some(dir.path()), None] {
        let program = Program::new(dir, allow(Some(1), None));
        for _ in 0..3 {
            let counted = program.count().unwrap();
            assert!(!program.has_room());
            // Outside of the runtime and inside.
            drop(counted);
            let counted = program.count().unwrap();
            program.within(|| drop(counted));
        }
        program.count().unwrap().sent();
        assert!(!program.has_room());
    }
}

#[test]
fn tokens_that_a_busy_program_spent_close_the_budget_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let [first, other] = [(); 2].map(|()| Program::new(Some(dir.path()), allow(None, Some(100))));
    let counted = first.count().unwrap();
    let busy = first.busy();
    first.within(|| counted.spent(99));
    for _ in 0..3 {
        assert!(other.has_room(), "each counts once");
    }
    first.within(|| counted.spent(1));
    assert!(!other.has_room());
    drop(busy);
    assert!(!first.has_room());
}

#[test]
fn who_leaves_while_it_is_counted_takes_no_place_from_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(Some(dir.path()), allow(Some(1), None));
    let lock = lock_of(dir.path());
    program.runtime.block_on(async {
        let mut leaves = Box::pin(program.book.count(key()));
        assert!(futures_util::poll!(&mut leaves).is_pending());
        let mut next = Box::pin(program.book.count(key()));
        assert!(futures_util::poll!(&mut next).is_pending());
        drop(leaves);
        drop(lock);
        next.await.unwrap().sent();
    });
    assert!(!program.has_room());
}

#[test]
fn who_leaves_while_it_is_written_is_out_before_anybody_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    for dir in [Some(dir.path()), None] {
        let program = Program::new(dir, allow(Some(1), None));
        let (stage, now) = (Stage::default(), Moment::now());
        let mut seen = 0;
        let leaves = |ledger: &Ledger| {
            seen = ledger.today(&now).requests;
            assert_eq!(stage.leave(), None);
        };
        program.book.request(&key(), &stage, &now, leaves).unwrap();
        assert_eq!(seen, 1);
        assert!(program.has_room());
    }
}

#[test]
fn a_refusal_loses_nothing_of_what_was_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(Some(dir.path()), allow(Some(2), None));
    let [back, stays] = [(); 2].map(|()| program.count().unwrap());
    stays.sent();
    let small = Program::new(Some(dir.path()), allow(Some(1), None));
    let busy = program.busy();
    program.within(|| drop(back));
    assert!(!small.has_room());
    drop(busy);
    assert!(program.has_room());
}

#[test]
fn a_file_that_cannot_be_written_keeps_what_was_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(Some(dir.path()), allow(Some(1), None));
    let counted = program.count().unwrap();
    let file = dir.path().join(LEDGER_FILE);
    let good = std::fs::read(&file).unwrap();
    std::fs::write(&file, "{").unwrap();
    drop(counted);
    let error = program.count().unwrap_err();
    assert_eq!(error.code(), ErrorCode::Internal);
    std::fs::write(&file, good).unwrap();
    assert!(program.has_room());
}

#[test]
fn a_disk_that_takes_no_file_keeps_what_was_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(Some(dir.path()), allow(Some(1), None));
    let counted = program.count().unwrap();
    let busy = program.busy();
    program.within(|| drop(counted));
    let Some(Place::File(file, slips)) = &program.book.place else {
        panic!("it is in a file");
    };
    let good = std::fs::read(file.path()).unwrap();
    let in_the_way = |_: &mut Ledger| {
        std::fs::remove_file(file.path()).unwrap();
        std::fs::create_dir(file.path()).unwrap();
        Ok(())
    };
    write(file, slips, &Moment::now(), in_the_way, |(), _| false).unwrap_err();
    std::fs::remove_dir(file.path()).unwrap();
    std::fs::write(file.path(), good).unwrap();
    drop(busy);
    assert!(program.has_room());
}
