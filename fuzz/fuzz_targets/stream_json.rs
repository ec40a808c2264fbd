//! Records: repaired text is UTF-8 and stays as it is when repaired again; no line decodes with a panic; a clean verdict needs a clean result.
#![no_main]

use std::borrow::Cow;

use libfuzzer_sys::fuzz_target;
use turnpass::wire::stream_json::{FailureMarks, Noise, Record, UnknownTypes, Verdict, decode};
use turnpass::wire::surrogates;

fuzz_target!(|stream: &[u8]| {
    let mut marks = FailureMarks::default();
    let mut unknown = UnknownTypes::default();
    for line in stream.split(|&byte| byte == b'\n') {
        let repaired = surrogates::repair(line);
        assert!(std::str::from_utf8(&repaired).is_ok());
        assert!(matches!(surrogates::repair(&repaired), Cow::Borrowed(_)));
        let value = serde_json::from_slice::<serde_json::Value>(&repaired);
        match decode(&repaired) {
            Ok(record) => {
                unknown.observe(&record);
                match record {
                    Record::Assistant(record) => marks.observe(&record),
                    Record::Result(result) => {
                        let verdict = result.verdict(&marks);
                        if matches!(verdict, Verdict::Completed | Verdict::Acknowledged) {
                            assert!(!marks.any());
                            assert_eq!(result.is_error, Some(false));
                        }
                    }
                    _ => {}
                }
            }
            // Serde refuses some text that a value holds (deep nesting), never the other way round.
            Err(Noise::NotJson) => assert!(value.is_err()),
            Err(_) => {}
        }
    }
});
