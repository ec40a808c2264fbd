use super::*;
use bytes::Bytes;

fn read(json: &str) -> StreamEvent<'_> {
    decode(json.as_bytes()).unwrap()
}

fn delta(json: &str) -> Delta<'_> {
    match read(json) {
        StreamEvent::ContentBlockDelta { delta, .. } => delta,
        other => panic!("{other:?}"),
    }
}

fn raw(json: &str) -> &RawValue {
    serde_json::from_str(json).unwrap()
}

#[test]
fn events_of_a_streamed_message() {
    let StreamEvent::MessageStart(message) = read(
        r#"{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"claude-sonnet-5-5","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":12,"cache_creation_input_tokens":0,"cache_read_input_tokens":7,"output_tokens":1}}}"#,
    ) else {
        panic!()
    };
    assert_eq!(message.id.unwrap(), "msg_1");
    assert_eq!(message.usage.prompt_tokens(), 19);
    let StreamEvent::MessageDelta(end) = read(
        r#"{"type":"message_delta","delta":{"stop_reason":"refusal","stop_sequence":null,"stop_details":{"type":"refusal"}},"usage":{"output_tokens":5}}"#,
    ) else {
        panic!()
    };
    assert_eq!(end.stop_reason.unwrap(), "refusal");
    assert_eq!(end.stop_details.unwrap().get(), r#"{"type":"refusal"}"#);
    assert_eq!(
        end.usage,
        Usage {
            output_tokens: Some(5),
            ..Usage::default()
        }
    );
    assert!(matches!(
        read(r#"{"type":"content_block_stop","index":3}"#),
        StreamEvent::ContentBlockStop { index: 3 }
    ));
    assert!(matches!(
        read(r#"{"type":"message_stop"}"#),
        StreamEvent::MessageStop
    ));
    assert!(matches!(read(r#"{"type":"ping"}"#), StreamEvent::Ping));
}

#[test]
fn deltas_borrow_and_any_key_order_reads() {
    let text = delta(
        r#"{"delta":{"text":"Hé","type":"text_delta"},"index":0,"type":"content_block_delta"}"#,
    );
    assert!(matches!(&text, Delta::Text(text) if *text == "Hé" && text.is_borrowed()));
    let thinking = r#"{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":" \r\n","estimated_tokens":4}}"#;
    assert_eq!(delta(thinking), Delta::Thinking(" \r\n".into()));
    let signature = r#"{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"S=="}}"#;
    assert_eq!(delta(signature), Delta::Signature("S==".into()));
}

#[test]
fn bug_119_an_empty_input_delta_is_a_delta() {
    let empty = r#"{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":""}}"#;
    assert_eq!(delta(empty), Delta::InputJson("".into()));
    let StreamEvent::ContentBlockStart { block, .. } = read(
        r#"{"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"t","name":"n","input":{}}}"#,
    ) else {
        panic!()
    };
    assert!(matches!(block.kind, BlockKind::ToolUse { input, .. } if input.get() == "{}"));
}

#[test]
fn bug_006_types_that_are_new_are_values_of_their_own() {
    for event in [
        r#"{"type":"brand_new"}"#,
        r#"{"type":"brand_new","index":"x","delta":7,"usage":[],"message":{}}"#,
        r#"{"index":-1,"type":"brand_new"}"#,
    ] {
        assert!(matches!(read(event), StreamEvent::Unknown { kind } if kind == "brand_new"));
    }
    for event in [
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"brand_new","text":"x"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"brand_new","text":{"a":1}}}"#,
    ] {
        assert!(matches!(delta(event), Delta::Unknown { kind } if kind == "brand_new"));
    }
    for event in [
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"brand_new","x":1}}"#,
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"brand_new","text":7,"id":[]}}"#,
    ] {
        let StreamEvent::ContentBlockStart { block, .. } = read(event) else {
            panic!()
        };
        assert!(matches!(block.kind, BlockKind::Unknown { kind } if kind == "brand_new"));
        assert!(block.raw.get().contains("brand_new"));
    }
}

#[test]
fn known_types_without_what_makes_them_up_are_errors() {
    for event in [
        r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":7}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"text":"x"}}"#,
        r#"{"type":"content_block_delta","index":-1,"delta":{"type":"brand_new"}}"#,
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","name":"n"}}"#,
        r#"{"type":"content_block_start","index":0,"content_block":"x"}"#,
        r#"{"type":"message_start"}"#,
        r#"{"type":"message_delta","usage":{}}"#,
        r#"{"type":"error"}"#,
    ] {
        let error = decode(event.as_bytes()).unwrap_err();
        assert!(
            matches!(error, MessagesError::Malformed { .. }),
            "{event}: {error}"
        );
    }
    for data in [
        "",
        "[DONE]",
        r#"["ping"]"#,
        "{}",
        r#"{"type":1}"#,
        r#"{"type":"ping""#,
    ] {
        assert_eq!(
            decode(data.as_bytes()).unwrap_err(),
            MessagesError::NotAnEvent,
            "{data}"
        );
    }
}

#[test]
fn bug_007_content_as_a_plain_string_is_one_text_block() {
    let message: Message<'_> =
        serde_json::from_str(r#"{"role":"user","content":"hi","usage":{"input_tokens":null}}"#)
            .unwrap();
    assert!(
        matches!(message.content.kinds().as_slice(), [BlockKind::Text { text }] if *text == "hi")
    );
    assert_eq!(message.usage, Usage::default());
    let message: Message<'_> = serde_json::from_str(r#"{"content":null,"usage":null}"#).unwrap();
    assert!(message.content.kinds().is_empty());
    assert!(serde_json::from_str::<Message<'_>>(r#"{"content":7}"#).is_err());
}

#[test]
fn bug_098_blocks_keep_their_bytes_and_order() {
    let blocks = [
        r#"{"type": "thinking","thinking":"  a\r\n ","signature":"S=="}"#,
        r#"{"signature":"T","type":"thinking","thinking":""}"#,
        r#"{"type":"redacted_thinking","data":"x\u002by"}"#,
        r#"{"type":"tool_use","id":"t1","name":"n","input":{"b":1,"a":2}}"#,
    ];
    let json = format!(r#"{{"content":[{}]}}"#, blocks.join(" , "));
    let message: Message<'_> = serde_json::from_str(&json).unwrap();
    let Content::Blocks(read) = &message.content else {
        panic!()
    };
    let read: Vec<&str> = read.iter().map(|block| block.raw.get()).collect();
    assert_eq!(read, blocks);
}

#[test]
fn an_input_that_the_cli_could_not_parse_is_recognised() {
    let input = raw(r#"{"__unparsedToolInput":{"raw":"{\"path\":\"a.tx","len":13}}"#);
    assert_eq!(unparsed_tool_input(input).unwrap().raw, "{\"path\":\"a.tx");
    for ordinary in [
        "{}",
        "null",
        r#"{"path":"x"}"#,
        r#"{"__unparsedToolInput":{"raw":"x"},"path":1}"#,
    ] {
        assert_eq!(unparsed_tool_input(raw(ordinary)), None);
    }
}

#[test]
fn error_bodies() {
    let decoded = ErrorBody::decode(
        br#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded \ud83d"},"request_id":"req_1"}"#,
    );
    let expected = ErrorBody {
        kind: "overloaded_error".to_owned(),
        message: "Overloaded \u{fffd}".to_owned(),
        request_id: Some("req_1".to_owned()),
    };
    assert_eq!(decoded, Some(expected));
    assert_eq!(
        ErrorBody::decode(br#"{"error":"plain"}"#).unwrap().message,
        "plain"
    );
    assert_eq!(
        ErrorBody::decode(br#"{"error":{"type":7}}"#).unwrap().kind,
        ""
    );
    for other in [
        "<html>",
        "",
        "{}",
        "[]",
        r#"{"error":null}"#,
        r#"{"error":[1]}"#,
    ] {
        assert_eq!(ErrorBody::decode(other.as_bytes()), None, "{other}");
    }
    assert!(matches!(
        read(r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#),
        StreamEvent::Error(error) if error.kind == "overloaded_error"
    ));
}

#[test]
fn an_encoded_reply_is_a_whole_stream() {
    let mut out = Vec::new();
    let usage = Usage {
        input_tokens: Some(3),
        output_tokens: Some(2),
        ..Usage::default()
    };
    encode_text_reply(&mut out, "msg_x", "claude-sonnet-5-5", "ok\n\"é\"", &usage);
    let mut parser = sse::Parser::default();
    parser.push(Bytes::from(out));
    let mut seen = Vec::new();
    let mut text = String::new();
    while let Some(event) = parser.next_event().unwrap() {
        seen.push(event.name_str().to_owned());
        assert_eq!(
            kind_of(std::str::from_utf8(&event.data).unwrap()).unwrap(),
            event.name_str()
        );
        if let StreamEvent::ContentBlockDelta {
            delta: Delta::Text(part),
            ..
        } = decode(&event.data).unwrap()
        {
            text.push_str(&part);
        }
    }
    assert!(!parser.has_partial());
    assert_eq!(text, "ok\n\"é\"");
    let expected = "message_start content_block_start content_block_delta content_block_stop message_delta message_stop";
    assert_eq!(seen.join(" "), expected);
}
