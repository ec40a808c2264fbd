use super::*;
use crate::record::stream::{Facts, Watch};
use crate::record::{RECORD_FILE, read};
use crate::request::TransportKind;
use crate::{Error, ErrorCode, Request};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const SMALL: Kept = Kept {
    file_bytes: 4096,
    older_files: 3,
};

/// Names the folder that [`play_a_writer`] writes to, and how many records.
const WRITER: &str = "TURNPASS_TEST_RECORDS_FOLDER";

fn fail_one(sink: &RecordSink, number: usize) {
    let facts = Facts::new(&Request::new("m", vec![]), TransportKind::Pool, None);
    let error = Error::new(ErrorCode::Closed, format!("number {number}"));
    Watch::new(sink.clone(), facts).see(&Err(error));
}

fn details(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let skipped = read(folder, |record| found.push(record.error.unwrap().detail)).unwrap();
    assert_eq!(skipped, 0);
    found
}

#[tokio::test]
async fn the_file_is_private_and_is_turned_over() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("state/records");
    let sink = RecordSink::open_with(folder.clone(), SMALL).unwrap();
    for number in 0..200 {
        fail_one(&sink, number);
    }
    assert!(sink.flush().await);
    assert_eq!(sink.counters().written, 200);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let entry = entry.unwrap();
        let state = entry.metadata().unwrap();
        assert_eq!(state.permissions().mode() & 0o777, 0o600);
        assert!(state.len() <= SMALL.file_bytes);
        names.push(entry.file_name().into_string().unwrap());
    }
    names.sort();
    let wanted = ["", ".1", ".2", ".3", ".lock"].map(|end| format!("{RECORD_FILE}{end}"));
    assert_eq!(names, wanted);
    // What is left is the newest, in order and without a gap.
    let left = details(&folder);
    let first = 200 - left.len();
    let wanted: Vec<_> = (first..200).map(|n| format!("number {n}")).collect();
    assert_eq!(left, wanted);
}

#[tokio::test]
async fn files_that_are_turned_over_while_they_are_read_are_read_once_and_whole() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("records");
    let sink = RecordSink::open_with(folder.clone(), SMALL).unwrap();
    fail_one(&sink, 0);
    assert!(sink.flush().await);
    let mut one = None;
    read(&folder, |record| one = Some(record)).unwrap();
    let mut one = one.unwrap();
    let mut file = RecordFile::open(&folder, SMALL).unwrap();
    let mut write = |numbers: std::ops::Range<usize>| {
        for number in numbers {
            one.error.as_mut().unwrap().detail = format!("number {number}");
            file.append(&one).unwrap();
        }
    };
    write(1..25);
    let mut found = Vec::new();
    read(&folder, |record| {
        if found.is_empty() {
            write(25..45);
        }
        found.push(record.error.unwrap().detail);
    })
    .unwrap();
    let wanted: Vec<_> = (0..25).map(|n| format!("number {n}")).collect();
    assert_eq!(found[..25], wanted);
    let met: std::collections::BTreeSet<_> = found.iter().collect();
    assert_eq!(met.len(), found.len(), "none is met twice");
    assert!(folder.join(format!("{RECORD_FILE}.2")).exists());
}

/// Not a test of its own: the next ones start this one in other processes.
#[test]
fn play_a_writer() {
    let Ok(folder) = std::env::var(WRITER) else {
        return;
    };
    let sink = RecordSink::open_with(folder.into(), SMALL).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        for number in 0..300 {
            fail_one(&sink, number);
        }
        assert!(sink.flush().await);
    });
    let counters = sink.counters();
    println!("\nWRITER {} {}", counters.written, counters.failed);
}

fn writer(folder: &Path, before: &str) -> Command {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("{before}; exec \"$0\" \"$@\""))
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "record::sink::tests::play_a_writer",
            "--nocapture",
        ])
        .env(WRITER, folder);
    command
}

#[test]
fn several_processes_append_whole_lines() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("r");
    let running: Vec<_> = (0..2)
        .map(|_| {
            let mut command = writer(&folder, ":");
            command
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in running {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("WRITER 300 0"), "{text}");
    }
    let left = details(&folder);
    // The last line of each is there, as often as it was written.
    let last = left.iter().filter(|detail| *detail == "number 299");
    assert!(last.count() >= 1 && left.len() > 20, "{left:?}");
    for name in ["", ".1", ".2", ".3"] {
        let text = std::fs::read_to_string(folder.join(format!("{RECORD_FILE}{name}"))).unwrap();
        assert!(text.len() <= 4096 && text.ends_with('\n'));
    }
}

#[test]
fn a_disk_that_is_full_fails_no_generation_and_is_counted() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("r");
    // Two kilobytes for any file of the process, and no signal when that is over: writes then fail as on a full disk.
    let output = writer(&folder, "trap '' XFSZ; ulimit -f 4")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let counts = text
        .split("WRITER ")
        .nth(1)
        .unwrap_or_else(|| panic!("{output:?}"));
    let counts: Vec<u64> = counts
        .split_whitespace()
        .take(2)
        .map(|count| count.parse().unwrap())
        .collect();
    assert_eq!(counts[0] + counts[1], 300);
    assert!(counts[0] > 0 && counts[1] > 100, "{counts:?}");
    // No half line was left behind.
    assert_eq!(details(&folder).len() as u64, counts[0]);
}

#[tokio::test]
async fn taking_a_record_never_waits_for_the_disk() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("r");
    let sink = RecordSink::open(&folder).unwrap();
    // The lock is held by somebody who does not give it back.
    let lock = std::fs::File::options()
        .write(true)
        .open(folder.join(format!("{RECORD_FILE}.lock")))
        .unwrap();
    lock.lock().unwrap();
    let began = Instant::now();
    for number in 0..3 * QUEUE_RECORDS {
        fail_one(&sink, number);
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    println!("{} records in {took:?}", 3 * QUEUE_RECORDS);
    let counters = sink.counters();
    assert_eq!(
        counters.of(crate::record::Outcome::Error),
        3 * QUEUE_RECORDS as u64
    );
    assert!(counters.dropped >= QUEUE_RECORDS as u64, "{counters:?}");
    lock.unlock().unwrap();
    assert!(sink.flush().await);
    let counters = sink.counters();
    assert_eq!(
        counters.written + counters.dropped,
        3 * QUEUE_RECORDS as u64
    );
}

#[tokio::test]
async fn a_half_line_and_a_removed_file_are_survived() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("r");
    let sink = RecordSink::open(&folder).unwrap();
    fail_one(&sink, 1);
    assert!(sink.flush().await);
    let path = folder.join(RECORD_FILE);
    let mut text = std::fs::read(&path).unwrap();
    text.extend_from_slice(b"{\"half\":");
    std::fs::write(&path, text).unwrap();
    fail_one(&sink, 2);
    assert!(sink.flush().await);
    let mut found = 0;
    assert_eq!(read(&folder, |_| found += 1).unwrap(), 1);
    assert_eq!(found, 2);
    std::fs::remove_file(&path).unwrap();
    fail_one(&sink, 3);
    assert!(sink.flush().await);
    assert_eq!(details(&folder), ["number 3"]);
}

#[test]
fn a_link_in_the_place_of_the_folder_or_the_file_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("r");
    drop(RecordSink::open(&folder).unwrap());
    let outside = root.path().join("outside");
    std::fs::write(&outside, "kept").unwrap();
    std::fs::remove_file(folder.join(RECORD_FILE)).unwrap();
    symlink(&outside, folder.join(RECORD_FILE)).unwrap();
    symlink(&folder, root.path().join("link")).unwrap();
    for place in ["r", "link"] {
        let error = RecordSink::open(root.path().join(place)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RecordingFailed);
        assert!(error.detail().contains("symbolic link"), "{error}");
        read(&root.path().join(place), |_| ()).unwrap_err();
    }
    assert_eq!(std::fs::read_to_string(outside).unwrap(), "kept");
    assert_eq!(read(&root.path().join("nowhere"), |_| ()).unwrap(), 0);
}
