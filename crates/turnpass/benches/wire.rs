//! Throughput of the wire code: `cargo bench -p turnpass --bench wire`.
//!
//! Targets on one core: records of a realistic stream of deltas at 200 MB/s and more, a splice of 8 MiB in 5 ms and less.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot build its own input has nothing to measure"
)]

use bytes::Bytes;
use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use serde_json::value::RawValue;
use turnpass::wire::{lines, messages, splice, sse, stream_json, surrogates};

fn main() {
    divan::main();
}

const TOOLS: &str = include_str!("../tests/data/cli-2.1.332-tools.ndjson");

/// A turn as CLI 2.1.332 prints it: the recorded frame with `deltas` text deltas of a few words each, as the API sends them.
fn turn(deltas: usize) -> Vec<u8> {
    let words = [
        "The quick",
        " brown fox",
        " jumps over\\n",
        " the “lazy” dog,",
        " and then it",
        " `runs` away \\\"home\\\".",
    ];
    let delta = TOOLS
        .lines()
        .find(|line| line.contains("text_delta"))
        .expect("the recording has a text delta");
    let mut stream = Vec::new();
    for line in TOOLS.lines() {
        stream.extend_from_slice(line.as_bytes());
        stream.push(b'\n');
        if line == delta {
            for n in 0..deltas {
                let line = delta.replace("Calling two tools.", words[n % words.len()]);
                stream.extend_from_slice(line.as_bytes());
                stream.push(b'\n');
            }
        }
    }
    stream
}

/// The same answer as the API streams it.
fn sse_stream(deltas: usize) -> Vec<u8> {
    let mut stream = Vec::new();
    for line in turn(deltas).split(|&byte| byte == b'\n') {
        #[derive(serde::Deserialize)]
        struct Line<'a> {
            #[serde(borrow)]
            event: Option<&'a RawValue>,
        }
        let Ok(Line { event: Some(event) }) = serde_json::from_slice(line) else {
            continue;
        };
        sse::encode(&mut stream, "content_block_delta", event.get().as_bytes());
    }
    stream
}

#[divan::bench]
fn lines_in_64_kib_chunks(bencher: Bencher<'_, '_>) {
    let stream = turn(20_000);
    bencher
        .counter(BytesCount::of_slice(&stream))
        .bench_local(|| {
            let mut splitter = lines::LineSplitter::default();
            let mut count = 0;
            for chunk in stream.chunks(lines::READ_BYTES) {
                splitter.read_buf().extend_from_slice(chunk);
                while let Ok(Some(line)) = splitter.next_line() {
                    count += line.len();
                }
            }
            count
        });
}

#[divan::bench]
fn one_line_of_16_mib(bencher: Bencher<'_, '_>) {
    let line = vec![b'x'; lines::MAX_LINE_BYTES - 1];
    bencher
        .counter(BytesCount::of_slice(&line))
        .bench_local(|| {
            let mut splitter = lines::LineSplitter::default();
            for chunk in line.chunks(lines::READ_BYTES) {
                splitter.read_buf().extend_from_slice(chunk);
                assert!(matches!(splitter.next_line(), Ok(None)));
            }
            splitter.finish()
        });
}

#[divan::bench(args = [false, true])]
fn repair(bencher: Bencher<'_, '_>, lone_halves: bool) {
    let mut stream = turn(20_000);
    if lone_halves {
        let text = String::from_utf8(stream).expect("the stream is UTF-8");
        stream = text.replace("home", "\\ud83d").into_bytes();
    }
    bencher
        .counter(BytesCount::of_slice(&stream))
        .bench_local(|| surrogates::repair(black_box(&stream)).len());
}

/// What each line of stdout goes through: repaired, decoded, dropped.
#[divan::bench]
fn records_of_a_delta_stream(bencher: Bencher<'_, '_>) {
    let stream = turn(20_000);
    let lines: Vec<&[u8]> = stream.split_inclusive(|&byte| byte == b'\n').collect();
    bencher
        .counter(BytesCount::of_slice(&stream))
        .counter(ItemsCount::new(lines.len()))
        .bench_local(|| {
            for line in &lines {
                let line = surrogates::repair(line);
                let _ = black_box(stream_json::decode(&line));
            }
        });
}

/// The same from bytes to records, as a reader of stdout does it.
#[divan::bench]
fn stdout_to_records(bencher: Bencher<'_, '_>) {
    let stream = turn(20_000);
    bencher
        .counter(BytesCount::of_slice(&stream))
        .bench_local(|| {
            let mut splitter = lines::LineSplitter::default();
            for chunk in stream.chunks(lines::READ_BYTES) {
                splitter.read_buf().extend_from_slice(chunk);
                while let Ok(Some(line)) = splitter.next_line() {
                    let line = surrogates::repair(&line);
                    let _ = black_box(stream_json::decode(&line));
                }
            }
        });
}

#[divan::bench]
fn an_assistant_record_of_12_mib(bencher: Bencher<'_, '_>) {
    let input = "x \\n é \\\" ".repeat(12 * 1024 * 1024 / 11);
    let line = format!(
        r#"{{"type":"assistant","message":{{"id":"m","model":"m","role":"assistant","content":[{{"type":"tool_use","id":"t","name":"n","input":{{"text":"{input}"}}}}]}}}}"#
    );
    bencher.counter(BytesCount::of_str(&line)).bench_local(|| {
        let line = surrogates::repair(line.as_bytes());
        let _ = black_box(stream_json::decode(&line));
    });
}

#[divan::bench(args = [1400, 64 * 1024])]
fn sse_events(bencher: Bencher<'_, '_>, chunk_bytes: usize) {
    let stream = Bytes::from(sse_stream(20_000));
    bencher
        .counter(BytesCount::new(stream.len()))
        .bench_local(|| {
            let mut parser = sse::Parser::default();
            let mut rest = stream.clone();
            let mut count = 0;
            while !rest.is_empty() {
                parser.push(rest.split_to(chunk_bytes.min(rest.len())));
                while let Ok(Some(event)) = parser.next_event() {
                    count += event.data.len();
                }
            }
            count
        });
}

#[divan::bench]
fn sse_to_messages_events(bencher: Bencher<'_, '_>) {
    let stream = Bytes::from(sse_stream(20_000));
    bencher
        .counter(BytesCount::new(stream.len()))
        .bench_local(|| {
            let mut parser = sse::Parser::default();
            let mut rest = stream.clone();
            while !rest.is_empty() {
                parser.push(rest.split_to((16 * 1024).min(rest.len())));
                while let Ok(Some(event)) = parser.next_event() {
                    let _ = black_box(messages::decode(&event.data));
                }
            }
        });
}

/// A body of 8 MiB, mostly text with some escapes; `native` says whether the CLI's or the host's side of it is large.
#[divan::bench(args = [true, false])]
fn splice_8_mib(bencher: Bencher<'_, '_>, native: bool) {
    const SIZE: usize = 8 * 1024 * 1024 - 2048;
    let text = "Some words of a prompt, \\\"quoted\\\" and\\nbroken; ".repeat(SIZE / 49);
    let (tool, message) = if native {
        (text.as_str(), "")
    } else {
        ("", text.as_str())
    };
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"placeholder"}}],"tools":[{{"name":"t","description":"{tool}"}}],"stream":true}}"#
    );
    let messages = format!(r#"[{{"role":"user","content":"{message}"}}]"#);
    let messages: Box<RawValue> = serde_json::from_str(&messages).expect("the messages are JSON");
    bencher
        .counter(BytesCount::new(body.len() + messages.get().len()))
        .bench_local(|| splice::splice(body.as_bytes(), &messages, "placeholder"));
}

/// Many small values instead of few large ones: 8 MiB of tools, some 50,000.
#[divan::bench(args = [false, true])]
fn splice_8_mib_of_small_values(bencher: Bencher<'_, '_>, inspect: bool) {
    let tool = r#"{"name":"mcp__turnpass__read","description":"Reads a file","input_schema":{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}}"#;
    let tools = vec![tool; 8 * 1024 * 1024 / (tool.len() + 1) - 2].join(",");
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"placeholder"}}],"tools":[{tools}],"stream":true}}"#
    );
    let messages: Box<RawValue> = serde_json::from_str("[]").expect("an empty array is JSON");
    bencher.counter(BytesCount::of_str(&body)).bench_local(|| {
        let native = splice::NativeBody::read(body.as_bytes()).expect("the body is JSON");
        let tools = inspect.then(|| native.inspect().tool_names.len());
        (tools, native.splice(&messages, "placeholder"))
    });
}
