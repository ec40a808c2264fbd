use super::*;
use crate::wire::stream_json::{ControlOutcome, Record, decode};
use proptest::prelude::*;
use serde_json::{Value, json};

fn raw(json: &str) -> &RawValue {
    serde_json::from_str(json).unwrap()
}

/// The rule of every line, and the object in it.
fn object(line: &Line) -> Value {
    let (end, json) = line.as_bytes().split_last().unwrap();
    assert_eq!(*end, b'\n');
    assert!(!json.contains(&b'\n') && !json.contains(&b'\r'));
    let text = std::str::from_utf8(json).unwrap();
    assert!(!text.contains(['\u{2028}', '\u{2029}']));
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(value.is_object());
    value
}

fn request(request: &ControlRequest<'_>) -> Value {
    let mut line = object(&control_request("r-1", request));
    assert_eq!(line["type"], "control_request");
    assert_eq!(line["request_id"], "r-1");
    line["request"].take()
}

#[test]
fn requests_are_spelt_as_the_cli_reads_them() {
    let initialize = ControlRequest::Initialize(Initialize {
        sdk_mcp_servers: &["turnpass"],
        sdk_mcp_server_manifests: Manifests(vec![(
            "turnpass",
            Manifest {
                initialize_result: raw(r#"{"protocolVersion":"2025-11-25"}"#),
                tools_list_result: raw(r#"{"tools":[]}"#),
            },
        )]),
        system_prompt: Some(&["You are brief."]),
        system_prompt_snapshot: Some(false),
    });
    assert_eq!(
        request(&initialize),
        json!({
            "subtype": "initialize", "sdkMcpServers": ["turnpass"],
            "sdkMcpServerManifests": {"turnpass": {
                "initializeResult": {"protocolVersion": "2025-11-25"}, "toolsListResult": {"tools": []},
            }},
            "systemPrompt": ["You are brief."], "systemPromptSnapshot": false,
        })
    );
    let bare = ControlRequest::Initialize(Initialize::default());
    assert_eq!(request(&bare), json!({"subtype": "initialize"}));
    for (built, expected) in [
        (
            ControlRequest::SetModel {
                model: Some("opus"),
                system_prompt: Some("p"),
            },
            json!({"subtype": "set_model", "model": "opus", "system_prompt": "p"}),
        ),
        (
            ControlRequest::SetModel {
                model: None,
                system_prompt: None,
            },
            json!({"subtype": "set_model"}),
        ),
        (
            ControlRequest::ApplyFlagSettings {
                settings: raw(r#"{"effortLevel":null}"#),
            },
            json!({"subtype": "apply_flag_settings", "settings": {"effortLevel": null}}),
        ),
        (
            ControlRequest::McpSetServers {
                servers: raw(r#"{"two":{"type":"sdk","name":"two"}}"#),
            },
            json!({"subtype": "mcp_set_servers", "servers": {"two": {"type": "sdk", "name": "two"}}}),
        ),
        (
            ControlRequest::McpStatus {},
            json!({"subtype": "mcp_status"}),
        ),
        (
            ControlRequest::GetUsage {
                skip_behaviors: true,
            },
            json!({"subtype": "get_usage", "skip_behaviors": true}),
        ),
        (
            ControlRequest::Interrupt {
                cancel_queued: true,
            },
            json!({"subtype": "interrupt", "cancel_queued": true}),
        ),
        (
            ControlRequest::RewindConversation {
                target_message_uuid: "u",
                last_seen_user_message_uuid: None,
            },
            json!({"subtype": "rewind_conversation", "target_message_uuid": "u"}),
        ),
        (
            ControlRequest::GetSettings {},
            json!({"subtype": "get_settings"}),
        ),
        (
            ControlRequest::EndSession {},
            json!({"subtype": "end_session"}),
        ),
    ] {
        assert_eq!(request(&built), expected);
    }
}

#[test]
fn user_and_assistant_lines() {
    let line = UserLine {
        uuid: "0b7d7e0a-0000-4000-8000-000000000001",
        content: UserContent::Text("see @/etc/hostname\n/compact"),
        asks: true,
    };
    assert_eq!(
        object(&user_line(&line)),
        json!({
            "type": "user", "message": {"role": "user", "content": "see @/etc/hostname\n/compact"},
            "parent_tool_use_id": null, "session_id": "", "uuid": line.uuid, "client_composed": true,
        })
    );
    let blocks = r#"[ {"type":"text", "text":"a"} ]"#;
    let line = UserLine {
        content: UserContent::Blocks(raw(blocks)),
        asks: false,
        ..line
    };
    let read = user_line(&line);
    assert_eq!(object(&read)["shouldQuery"], json!(false));
    assert!(
        memmem::find(read.as_bytes(), blocks.as_bytes()).is_some(),
        "blocks keep their bytes"
    );

    let thinking = r#"[{"type":"thinking","thinking":" \r\n","signature":"S=="}]"#;
    let read = assistant_line("msg_1", "claude-sonnet-5-5", raw(thinking));
    assert!(memmem::find(read.as_bytes(), thinking.as_bytes()).is_some());
    assert_eq!(
        object(&read),
        json!({"type": "assistant", "message": {
            "role": "assistant", "content": [{"type": "thinking", "thinking": " \r\n", "signature": "S=="}], "id": "msg_1",
            "type": "message", "model": "claude-sonnet-5-5", "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }})
    );
}

#[test]
fn answers_to_the_cli() {
    assert_eq!(
        object(&mcp_response(
            "r",
            raw(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#)
        )),
        json!({"type": "control_response", "response": {
            "subtype": "success", "request_id": "r",
            "response": {"mcp_response": {"jsonrpc": "2.0", "id": 1, "result": {}}},
        }})
    );
    assert_eq!(
        object(&control_error("r", "not served")),
        json!({"type": "control_response", "response": {"subtype": "error", "request_id": "r", "error": "not served"}})
    );
}

#[test]
fn bug_010_pretty_json_still_makes_one_line() {
    let pretty =
        "{\r\n  \"effortLevel\": \"low\",\n\t\"note\": \"a\\nb\\r\u{2028}\u{2029}\u{2027}\"\n}";
    let settings = raw(pretty);
    let line = request(&ControlRequest::ApplyFlagSettings { settings });
    assert_eq!(
        line["settings"],
        serde_json::from_str::<Value>(pretty).unwrap()
    );
}

#[test]
fn bug_004_no_lone_half_leaves_in_a_raw_value() {
    let line = mcp_response("r", raw(r#"{"text":"x \ud83d"}"#));
    assert_eq!(
        object(&line)["response"]["response"]["mcp_response"]["text"],
        "x \u{fffd}"
    );
}

#[test]
fn a_line_does_not_show_what_it_holds() {
    let line = control_error("r", "secret");
    assert_eq!(
        format!("{line:?}"),
        format!("Line({} bytes)", line.as_bytes().len())
    );
}

fn reply(json: &str) -> ControlOutcome<'_> {
    ControlOutcome::Success {
        response: Some(raw(json)),
    }
}

#[test]
fn replies_of_2_1_332() {
    let interrupt: InterruptReply =
        read_reply(&reply(r#"{"still_queued":[],"cancelled":["u"]}"#)).unwrap();
    assert_eq!(interrupt.cancelled, ["u"]);
    let interrupt: InterruptReply = read_reply(&reply(r#"{"still_queued":["u"]}"#)).unwrap();
    assert_eq!(
        (interrupt.still_queued.len(), interrupt.cancelled.len()),
        (1, 0)
    );
    let rewind: RewindReply =
        read_reply(&reply(r#"{"rewound":false,"prefillText":null,"precedingAssistantUuid":null,"error":"turn running","reason":"turn_running"}"#)).unwrap();
    assert_eq!(
        (rewind.rewound, rewind.reason.as_deref()),
        (false, Some("turn_running"))
    );
    let status: McpStatusReply = read_reply(&reply(
        r#"{"mcpServers":[{"name":"host","status":"connected","config":{"headers":{"Authorization":"Bearer x"}},"tools":[{"name":"w1","annotations":{}}]},{"name":"b","status":"pending"}]}"#,
    ))
    .unwrap();
    assert_eq!(status.servers[0].tools.as_ref().unwrap()[0].name, "w1");
    assert_eq!(status.servers[1].tools, None);
    let set: McpSetServersReply = read_reply(&reply(
        r#"{"added":["two"],"removed":["host"],"errors":{}}"#,
    ))
    .unwrap();
    assert_eq!(set.added, ["two"]);
    let model: SetModelReply = read_reply(&reply(r#"{"model":"claude-sonnet-5-5"}"#)).unwrap();
    assert_eq!(model.model, "claude-sonnet-5-5");
    read_reply::<()>(&ControlOutcome::Success { response: None }).unwrap();
}

#[test]
fn replies_that_cannot_be_used() {
    let malformed = read_reply::<SetModelReply>(&ControlOutcome::Success { response: None });
    assert!(matches!(malformed, Err(ReplyError::Malformed { .. })));
    let line = br#"{"type":"control_response","response":{"subtype":"error","request_id":"r","error":"Unsupported control request subtype: x","error_code":"unsupported_request"}}"#;
    let Ok(Record::ControlResponse { outcome, .. }) = decode(line) else {
        panic!()
    };
    let Err(ReplyError::Refused { error_code, .. }) = read_reply::<()>(&outcome) else {
        panic!()
    };
    assert_eq!(error_code.as_deref(), Some("unsupported_request"));
}

proptest! {
    #[test]
    fn bug_010_any_text_makes_exactly_one_line(text in "(\\PC|\n|\r|\u{2028}|\u{85}|\u{0}|\"|\\\\){0,40}", space in "[ \n\r\t]{0,4}") {
        let value = Value::from(text.as_str());
        let blocks = format!("[{space}{{{space}\"text\":{space}{value}}}]");
        let lines = [
            user_line(&UserLine { uuid: &text, content: UserContent::Text(&text), asks: true }),
            user_line(&UserLine { uuid: "u", content: UserContent::Blocks(raw(&blocks)), asks: false }),
            assistant_line(&text, &text, raw(&blocks)),
            control_error(&text, &text),
            mcp_response(&text, raw(&blocks)),
            control_request(&text, &ControlRequest::SetModel { model: Some(&text), system_prompt: Some(&text) }),
        ];
        for line in &lines {
            object(line);
        }
        prop_assert_eq!(&object(&lines[0])["message"]["content"], &value);
        prop_assert_eq!(&object(&lines[1])["message"]["content"][0]["text"], &value);
    }
}
