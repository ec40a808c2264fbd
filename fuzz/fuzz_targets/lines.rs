//! Lines: however the stream is cut, the lines are those of a plain split, and the limit errs once.
#![no_main]

use libfuzzer_sys::fuzz_target;
use turnpass::wire::lines::LineSplitter;

const LIMIT_BYTES: usize = 64;

fuzz_target!(|input: (u8, &[u8])| {
    let (size, stream) = input;
    let mut splitter = LineSplitter::new(LIMIT_BYTES);
    let mut lines = Vec::new();
    let mut errors = 0;
    for (n, chunk) in stream.chunks(usize::from(size).max(1)).enumerate() {
        if n % 2 == 0 {
            splitter.push(chunk);
        } else {
            splitter.read_buf().extend_from_slice(chunk);
        }
        loop {
            match splitter.next_line() {
                Ok(Some(line)) => lines.push(line),
                Ok(None) => break,
                Err(_) => errors += 1,
            }
        }
    }
    lines.extend(splitter.finish());

    let mut expected: Vec<&[u8]> = stream.split(|&byte| byte == b'\n').collect();
    if expected.last().is_some_and(|last| last.is_empty()) {
        expected.pop();
    }
    let too_long = expected.iter().position(|line| line.len() > LIMIT_BYTES);
    expected.truncate(too_long.unwrap_or(expected.len()));
    assert_eq!(lines, expected);
    assert_eq!(errors, usize::from(too_long.is_some()));
});
