//! Lines to the CLI: whatever texts and raw JSON go in, each is one JSON object and one line end, and the texts come out unchanged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use serde_json::value::RawValue;
use turnpass::wire::control::{
    ControlRequest, Line, Pending, UserContent, UserLine, assistant_line, control_error,
    control_request, mcp_response, user_line,
};
use turnpass::wire::stream_json::{Record, decode};

fn object(line: &Line) -> Value {
    let (end, json) = line.as_bytes().split_last().expect("a line is not empty");
    assert_eq!(*end, b'\n');
    assert!(!json.contains(&b'\n') && !json.contains(&b'\r'));
    let value: Value = serde_json::from_slice(json).expect("a line is JSON");
    assert!(value.is_object());
    value
}

fuzz_target!(|input: (&str, &str)| {
    let (text, json) = input;
    let line = user_line(&UserLine {
        uuid: text,
        content: UserContent::Text(text),
        asks: true,
    });
    let line = object(&line);
    assert_eq!(line["message"]["content"], text);
    assert_eq!(line["uuid"], text);
    object(&control_error(text, text));
    let request = ControlRequest::SetModel {
        model: Some(text),
        system_prompt: Some(text),
    };
    assert_eq!(
        object(&control_request(text, &request))["request"]["system_prompt"],
        text
    );

    // A value nested deeper than serde's own limit is passed on all the same, but cannot be checked as a tree.
    let opens = json.bytes().filter(|byte| matches!(byte, b'[' | b'{'));
    let parsed = (
        serde_json::from_str::<&RawValue>(json),
        serde_json::from_str::<Value>(json),
    );
    let (true, (Ok(raw), Ok(expected))) = (opens.count() < 100, parsed) else {
        return;
    };
    let blocks = UserLine {
        uuid: "u",
        content: UserContent::Blocks(raw),
        asks: false,
    };
    assert_eq!(object(&user_line(&blocks))["message"]["content"], expected);
    object(&assistant_line(text, text, raw));
    let answer = mcp_response(text, raw);
    assert_eq!(
        object(&answer)["response"]["response"]["mcp_response"],
        expected
    );

    let bytes = answer.into_bytes();
    let mut pending = Pending::default();
    pending.register(text, ()).expect("it is empty");
    let Ok(Record::ControlResponse { request_id, .. }) = decode(&bytes) else {
        panic!("what we write as an answer reads as one");
    };
    assert_eq!(pending.resolve(&request_id), Some(()));
    assert_eq!(pending.resolve(&request_id), None);
    assert_eq!(pending.dropped(), 1);
});
