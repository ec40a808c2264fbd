//! Server-sent events: any cut gives the same events; what is encoded is read back; no event decodes with a panic.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use turnpass::wire::sse::{Event, Parser, encode};
use turnpass::wire::{messages, surrogates};

const LIMIT_BYTES: usize = 512;

/// Events, and whether the limit was passed.
fn parse(stream: &[u8], size: usize) -> (Vec<Event>, bool) {
    let mut parser = Parser::new(LIMIT_BYTES);
    let mut events = Vec::new();
    let mut errors = 0;
    for chunk in stream.chunks(size.max(1)) {
        parser.push(Bytes::copy_from_slice(chunk));
        loop {
            match parser.next_event() {
                Ok(Some(event)) => events.push(event),
                Ok(None) => break,
                Err(_) => errors += 1,
            }
        }
    }
    assert!(errors <= 1);
    (events, errors == 1)
}

fuzz_target!(|input: (u8, &[u8])| {
    let (size, stream) = input;
    let whole = parse(stream, stream.len());
    assert_eq!(parse(stream, usize::from(size)), whole);
    for event in whole.0 {
        assert!(event.data.len() + event.name.len() <= LIMIT_BYTES);
        let _ = messages::decode(&surrogates::repair(&event.data));
        let mut again = Vec::new();
        encode(&mut again, event.name_str(), &event.data);
        let mut parser = Parser::default();
        parser.push(again.into());
        let read = parser
            .next_event()
            .expect("under the limit")
            .expect("one event");
        // A byte order mark is only at a stream's start no part of the first field, and no field of ours begins with one.
        assert_eq!(read.data, event.data);
        assert_eq!(read.name_str(), event.name_str());
        assert!(!parser.has_partial());
    }
});
