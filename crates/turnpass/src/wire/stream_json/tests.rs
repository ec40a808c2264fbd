use super::*;
use crate::wire::messages::{BlockKind, Content, Delta, Message};
use crate::wire::rate_limit::LimitStatus;
use crate::wire::surrogates;
use proptest::prelude::*;

const TOOLS_332: &str = include_str!("../../../tests/data/cli-2.1.332-tools.ndjson");
const TOOLS_283: &str = include_str!("../../../tests/data/cli-2.1.283-tools.ndjson");
const TEXT_287: &str = include_str!("../../../tests/data/cli-2.1.287-text.ndjson");
const REFUSAL: &str = include_str!("../../../tests/data/cli-2.1.332-refusal.ndjson");
const LIMIT: &str = include_str!("../../../tests/data/cli-2.1.332-429-unified.ndjson");
const TRUNCATED: &str =
    include_str!("../../../tests/data/cli-2.1.332-truncated-after-block.ndjson");
const INTERRUPT: &str = include_str!("../../../tests/data/cli-2.1.332-interrupt.ndjson");
const CONTROL: &str = include_str!("../../../tests/data/cli-2.1.332-control.ndjson");
const HISTORY: &str = include_str!("../../../tests/data/cli-2.1.332-native-history.ndjson");

const ALL: [&str; 9] = [
    TOOLS_332, TOOLS_283, TEXT_287, REFUSAL, LIMIT, TRUNCATED, INTERRUPT, CONTROL, HISTORY,
];

fn one(line: &str) -> Record<'_> {
    decode(line.as_bytes()).unwrap()
}

fn records(stream: &str) -> Vec<Record<'_>> {
    stream.lines().map(one).collect()
}

fn verdicts(stream: &str) -> Vec<Verdict> {
    let mut marks = FailureMarks::default();
    let mut verdicts = Vec::new();
    for record in records(stream) {
        match record {
            Record::Assistant(record) => marks.observe(&record),
            Record::Result(record) => {
                verdicts.push(record.verdict(&marks));
                marks = FailureMarks::default();
            }
            _ => {}
        }
    }
    verdicts
}

fn failure(stream: &str) -> Failure {
    match verdicts(stream).pop() {
        Some(Verdict::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_recorded_line_is_a_known_record() {
    for stream in ALL {
        let mut unknown = UnknownTypes::default();
        for record in records(stream) {
            assert!(!matches!(record, Record::Malformed { .. }), "{record:?}");
            unknown.observe(&record);
        }
        assert_eq!(unknown, UnknownTypes::default());
    }
}

#[test]
fn init_has_what_the_checks_need() {
    let Record::System(System::Init(init)) = &records(TOOLS_332)[0] else {
        panic!()
    };
    let name = |list: &Option<Vec<Named<'_>>>| -> Vec<String> {
        let list = list.as_ref().unwrap();
        list.iter().map(|entry| entry.name.to_string()).collect()
    };
    assert_eq!(name(&init.tools), ["mcp__host__alpha"]);
    let server = McpServer {
        name: Some("host".into()),
        status: Some("connected".into()),
        source: Some("dynamic".into()),
    };
    assert_eq!(init.mcp_servers.as_ref().unwrap(), &[server]);
    assert_eq!(init.model.as_deref(), Some("claude-sonnet-5-5"));
    assert_eq!(init.permission_mode.as_deref(), Some("dontAsk"));
    assert_eq!(init.api_key_source.as_deref(), Some("none"));
    assert_eq!(init.claude_code_version.as_deref(), Some("2.1.332"));
    assert_eq!(init.served_by_anthropic, Some(false));
    assert!(name(&init.plugins).is_empty() && name(&init.skills).is_empty());
    assert!(name(&init.slash_commands).is_empty());
    assert_eq!(name(&init.agents).len(), 5);
    assert!(name(&init.capabilities).contains(&"sdk_mcp_manifests".to_owned()));
    assert!(init.memory_paths.is_none() && !init.has_load_errors());
}

#[test]
fn init_tells_absent_from_empty_and_refuses_what_it_cannot_see() {
    let init = |fields: &str| format!(r#"{{"type":"system","subtype":"init"{fields}}}"#);
    let line = init(
        r#","plugins":[{"name":"p","path":"builtin","source":"p@builtin"},7,"q"],"mcp_server_errors":[{"x":1}]"#,
    );
    let Record::System(System::Init(read)) = one(&line) else {
        panic!()
    };
    assert!(read.tools.is_none() && read.has_load_errors());
    let plugins = read.plugins.unwrap();
    assert_eq!(plugins.len(), 3, "an entry in a new form still counts");
    assert_eq!(plugins[0].source.as_deref(), Some("p@builtin"));
    assert_eq!(
        (plugins[1].name.as_str(), plugins[2].name.as_str()),
        ("", "q")
    );
    for (errors, any) in [
        ("[]", false),
        ("{}", false),
        ("null", false),
        (r#""x""#, true),
        (r#"{"a":1}"#, true),
    ] {
        let line = init(&format!(r#","plugin_errors":{errors}"#));
        let Record::System(System::Init(read)) = one(&line) else {
            panic!()
        };
        assert_eq!(read.has_load_errors(), any, "{errors}");
    }
    for hidden in [
        r#","tools":{"a":1}"#,
        r#","plugins":"none""#,
        r#","mcp_servers":7"#,
        r#","model":[]"#,
    ] {
        assert!(
            matches!(one(&init(hidden)), Record::Malformed { .. }),
            "{hidden}"
        );
    }
}

#[test]
fn deltas_read_the_same_the_short_and_the_long_way() {
    let short = r#"{"type":"stream_event","event":{"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"a\nb"}},"session_id":"s","parent_tool_use_id":null,"uuid":"u","api_message_id":"msg_1"}"#;
    let long = r#"{"api_message_id":"msg_1","event":{"delta":{"text":"a\nb","type":"text_delta"},"index":2,"type":"content_block_delta"},"type":"stream_event"}"#;
    for line in [short, long] {
        let Record::StreamEvent(record) = one(line) else {
            panic!()
        };
        assert_eq!(record.api_message_id.as_deref(), Some("msg_1"));
        assert!(record.parent_tool_use_id.is_none() && record.abandoned_blocks.is_none());
        assert!(matches!(
            record.event,
            StreamEvent::ContentBlockDelta { index: 2, delta: Delta::Text(text) } if text == "a\nb"
        ));
    }
}

#[test]
fn abandoned_blocks_are_on_the_made_up_message_stop() {
    let abandoned: Vec<_> = records(TRUNCATED)
        .into_iter()
        .filter_map(|record| match record {
            Record::StreamEvent(record) => record.abandoned_blocks,
            _ => None,
        })
        .collect();
    assert_eq!(abandoned.len(), 4);
    assert_eq!(abandoned[0].from_block_index, 1);
    assert_eq!(abandoned[0].api_message_id.as_deref(), Some("msg_01FAKE1"));
}

#[test]
fn bug_006_new_types_are_counted_and_never_fatal() {
    let mut unknown = UnknownTypes::default();
    for line in [
        r#"{"type":"brand_new","event":7}"#,
        r#"{"type":"system","subtype":"brand_new","status":{},"attempt":"x"}"#,
        r#"{"type":"system"}"#,
        r#"{"type":"stream_event","event":{"type":"brand_new","index":"x"}}"#,
        r#"{"type":"stream_event","event":{"type":"content_block_start","index":0,"content_block":{"type":"brand_new"}}}"#,
        r#"{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"brand_new","text":[]}}}"#,
        r#"{"type":"assistant","message":{"role":"assistant","content":[{"type":"brand_new","name":7}]}}"#,
    ] {
        assert_eq!(unknown.observe(&one(line)), 1, "{line}");
    }
    let names: Vec<_> = unknown
        .iter()
        .map(|(name, count)| format!("{name}={count}"))
        .collect();
    let expected = "block:brand_new=2 delta:brand_new=1 event:brand_new=1 record:brand_new=1 system:=1 system:brand_new=1";
    assert_eq!(names.join(" "), expected);
    // Known records with extra and with missing optional fields.
    for line in [
        r#"{"type":"result"}"#,
        r#"{"type":"assistant","message":{}}"#,
        r#"{"type":"user","message":{"content":"x"},"new":{}}"#,
        r#"{"type":"tool_progress"}"#,
        r#"{"type":"keep_alive","new":1}"#,
        r#"{"type":"rate_limit_event","rate_limit_info":{"new":1}}"#,
    ] {
        assert!(
            !matches!(one(line), Record::Malformed { .. } | Record::Unknown { .. }),
            "{line}"
        );
    }
}

#[test]
fn counting_unknown_types_stays_bounded() {
    let mut unknown = UnknownTypes::default();
    for n in 0..1000 {
        unknown.count("record", &format!("{n}{}", "é".repeat(100)));
    }
    assert_eq!(unknown.total(), 1000);
    assert_eq!(unknown.iter().count(), MAX_UNKNOWN_NAMES);
    assert!(
        unknown
            .iter()
            .all(|(name, _)| name.len() <= MAX_UNKNOWN_NAME_BYTES)
    );
}

#[test]
fn a_known_record_in_an_unknown_shape_is_not_noise() {
    for line in [
        r#"{"type":"stream_event"}"#,
        r#"{"type":"stream_event","event":7}"#,
        r#"{"type":"stream_event","event":{"type":"message_stop"},"abandoned_blocks":{}}"#,
        r#"{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"text_delta"}}}"#,
        r#"{"type":"assistant"}"#,
        r#"{"type":"assistant","message":{"content":7}}"#,
        r#"{"type":"assistant","message":{"content":[{"type":"tool_use","id":"x"}]}}"#,
        r#"{"type":"control_response","response":{"subtype":"success"}}"#,
        r#"{"type":"control_request","request":{"subtype":"x"}}"#,
        r#"{"type":"command_lifecycle","state":"queued"}"#,
    ] {
        assert!(matches!(one(line), Record::Malformed { .. }), "{line}");
    }
}

#[test]
fn lines_that_are_no_records_are_noise() {
    for (line, noise) in [
        ("", Noise::Blank),
        (" \t\r", Noise::Blank),
        ("Warning: something", Noise::NotJson),
        (r#"{"type":"result""#, Noise::NotJson),
        (
            r#"{"type":"stream_event","event":{"type":"ping"}} x"#,
            Noise::NotJson,
        ),
        ("[]", Noise::NotARecord),
        (r#"["result"]"#, Noise::NotARecord),
        // Found by fuzzing: more elements than a record's head has fields.
        (r#"["result","success","x"]"#, Noise::NotARecord),
        (r#"["result","success","x""#, Noise::NotJson),
        ("7", Noise::NotARecord),
        ("{}", Noise::NotARecord),
        (r#"{"type":7}"#, Noise::NotARecord),
        (
            r#"{"type":"stream_event","event":{"type":"ping"},"type":"result"}"#,
            Noise::NotARecord,
        ),
    ] {
        assert_eq!(decode(line.as_bytes()).unwrap_err(), noise, "{line}");
    }
}

#[test]
fn bug_004_a_line_with_half_a_pair_reads_after_repair() {
    let line = br#"{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"ok \ud83d"}}}"#;
    let repaired = surrogates::repair(line);
    let Ok(Record::StreamEvent(record)) = decode(&repaired) else {
        panic!()
    };
    assert!(matches!(
        record.event,
        StreamEvent::ContentBlockDelta { delta: Delta::Text(text), .. } if text == "ok \u{fffd}"
    ));
}

#[test]
fn bug_007_string_content_and_null_usage() {
    for kind in ["user", "assistant"] {
        let line = format!(
            r#"{{"type":"{kind}","message":{{"role":"{kind}","content":"hi","usage":{{"input_tokens":null}}}}}}"#
        );
        let check = |message: &Message<'_>| {
            assert_eq!(message.content.text(), "hi");
            assert_eq!(message.usage.input_tokens, None);
        };
        match one(&line) {
            Record::User(record) => check(&record.message),
            Record::Assistant(record) => check(&record.message),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn bug_012_what_is_retracted_and_superseded_is_named() {
    let records = records(REFUSAL);
    let retracted = records.iter().find_map(|record| match record {
        Record::System(System::ModelFallback {
            fallback_model: Some(model),
            retracted_message_uuids,
            ..
        }) => Some((model.to_string(), retracted_message_uuids.clone())),
        _ => None,
    });
    let (model, retracted) = retracted.unwrap();
    assert_eq!(model, "claude-sonnet-5");
    let superseded = records.iter().find_map(|record| match record {
        Record::Assistant(record) if !record.supersedes.is_empty() => {
            Some(record.supersedes.clone())
        }
        _ => None,
    });
    assert_eq!(superseded.unwrap(), retracted);
    let retries = records.iter().filter(
        |record| matches!(record, Record::User(user) if user.is_synthetic && user.refusal_retry),
    );
    assert_eq!(retries.count(), 1);
}

#[test]
fn a_tool_call_and_its_refusal() {
    let records = records(TOOLS_332);
    let calls: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            Record::Assistant(record) => Some(record.message.content.kinds()),
            _ => None,
        })
        .flatten()
        .filter_map(|block| match block {
            BlockKind::ToolUse { id, input, .. } => Some(format!("{id} {}", input.get())),
            _ => None,
        })
        .collect();
    assert_eq!(
        calls,
        [
            r#"toolu_01FAKE1_0 {"path":"a.txt"}"#,
            r#"toolu_01FAKE1_1 {"path":"b.txt"}"#
        ]
    );
    let results = records.iter().filter(|record| {
        matches!(record, Record::User(user) if matches!(&user.message.content, Content::Blocks(blocks)
            if matches!(blocks[0].kind, BlockKind::ToolResult { is_error: true, .. })))
    });
    assert_eq!(results.count(), 2);
    let Some(Record::Result(result)) = records.last() else {
        panic!()
    };
    assert_eq!(result.permission_denials.len(), 2);
    assert_eq!(
        result.permission_denials[1].tool_use_id.as_deref(),
        Some("toolu_01FAKE1_1")
    );
}

#[test]
fn control_records_in_both_directions() {
    let records = records(CONTROL);
    let Record::ControlResponse {
        request_id,
        outcome,
    } = &records[0]
    else {
        panic!()
    };
    assert_eq!(request_id.as_str(), "init-1");
    let ControlOutcome::Success {
        response: Some(response),
    } = outcome
    else {
        panic!()
    };
    assert!(response.get().starts_with(r#"{"commands""#));
    assert!(
        !format!("{outcome:?}").contains("commands"),
        "payloads can hold a bearer"
    );
    assert!(records.iter().any(|record| matches!(record, Record::ControlRequest { request: CliRequest::McpMessage { server_name, message }, .. }
        if *server_name == "two" && message.get().contains("tools/list"))));
    let line = r#"{"type":"control_response","response":{"subtype":"error","request_id":"r","error":"Model 'x' not found","error_code":"not_found","model":"m"}}"#;
    assert!(
        matches!(one(line), Record::ControlResponse { outcome: ControlOutcome::Error { error_code: Some(code), .. }, .. } if code == "not_found")
    );
    let line = r#"{"type":"control_response","response":{"subtype":"later","request_id":"r"}}"#;
    assert!(matches!(
        one(line),
        Record::ControlResponse {
            outcome: ControlOutcome::Error { .. },
            ..
        }
    ));
    let line = r#"{"type":"control_request","request_id":"r","request":{"subtype":"can_use_tool","input":{}}}"#;
    assert!(
        matches!(one(line), Record::ControlRequest { request: CliRequest::Other { subtype }, .. } if subtype == "can_use_tool")
    );
    assert!(matches!(
        one(r#"{"type":"control_cancel_request","request_id":"r"}"#),
        Record::ControlCancelRequest { .. }
    ));
}

#[test]
fn a_rate_limit_event_that_cannot_be_decoded_is_told_from_one_that_can() {
    let Record::RateLimitEvent(Some(info)) = &records(LIMIT)[2] else {
        panic!()
    };
    assert_eq!(info.status, Some(LimitStatus::Rejected));
    for line in [
        r#"{"type":"rate_limit_event"}"#,
        r#"{"type":"rate_limit_event","rate_limit_info":null}"#,
        r#"{"type":"rate_limit_event","rate_limit_info":{"isUsingOverage":1}}"#,
    ] {
        assert!(matches!(one(line), Record::RateLimitEvent(None)), "{line}");
    }
}

#[test]
fn verdicts_on_recorded_turns() {
    assert_eq!(verdicts(TEXT_287), [Verdict::Completed]);
    assert_eq!(verdicts(TOOLS_332), [Verdict::MaxTurns]);
    assert_eq!(verdicts(TOOLS_283), [Verdict::MaxTurns]);
    assert_eq!(verdicts(INTERRUPT), [Verdict::Aborted, Verdict::Completed]);
    assert_eq!(
        verdicts(HISTORY),
        [
            Verdict::Acknowledged,
            Verdict::Acknowledged,
            Verdict::Completed
        ]
    );
    let limit = failure(LIMIT);
    assert_eq!(
        (limit.kind, limit.status),
        (FailureKind::UsageLimit, Some(429))
    );
    assert_eq!(limit.word.as_deref(), Some("usage_limit_reached"));
    assert!(limit.text.starts_with("You've hit your limit"));
    assert_eq!(failure(TRUNCATED).kind, FailureKind::Connection);
    assert_eq!(failure(REFUSAL).kind, FailureKind::Refusal);
}

#[test]
fn verdicts_without_a_turn() {
    let result = |fields: &str| format!(r#"{{"type":"result","num_turns":0,{fields}}}"#);
    let local = result(
        r#""subtype":"success","is_error":false,"result":"/compact isn't available in this environment.""#,
    );
    assert_eq!(failure(&local).kind, FailureKind::AnsweredLocally);
    let unknown = result(
        r#""subtype":"error_during_execution","is_error":true,"errors":["No conversation found with session ID: x"]"#,
    );
    let failed = failure(&unknown);
    assert_eq!(failed.kind, FailureKind::NotStarted);
    assert!(failed.text.starts_with("No conversation found"));
}

#[test]
fn bug_046_no_mark_of_a_failure_is_a_clean_end() {
    let statuses = [
        ("401", FailureKind::Authentication),
        ("403", FailureKind::Authentication),
        ("429", FailureKind::RateLimited),
        ("500", FailureKind::Server),
        ("529", FailureKind::Overloaded),
        ("null", FailureKind::Other),
    ];
    let synthetic_line = r#"{"type":"assistant","message":{"model":"<synthetic>","content":"API Error"},"error":"unknown","is_api_error_message":true}"#;
    let mut clean = 0;
    for is_error in ["true", "false", "null", "1"] {
        for subtype in ["success", "error_during_execution", "brand_new"] {
            for (status, kind) in statuses {
                for reason in ["completed", "api_error", "brand_new"] {
                    for synthetic in [false, true] {
                        let result = format!(
                            r#"{{"type":"result","num_turns":1,"subtype":"{subtype}","is_error":{is_error},"api_error_status":{status},"terminal_reason":"{reason}","result":"the text"}}"#
                        );
                        let stream = if synthetic {
                            format!("{synthetic_line}\n{result}")
                        } else {
                            result.clone()
                        };
                        let verdict = verdicts(&stream).pop().unwrap();
                        let good = (is_error, subtype, status, reason, synthetic)
                            == ("false", "success", "null", "completed", false);
                        assert_eq!(verdict == Verdict::Completed, good, "{stream}");
                        clean += usize::from(good);
                        if let Verdict::Failed(failure) = verdict {
                            assert!(!failure.text.is_empty());
                            if status != "null" {
                                assert_eq!(failure.kind, kind, "{stream}");
                                assert_eq!(
                                    failure.status.map(|status| status.to_string()).as_deref(),
                                    Some(status)
                                );
                            }
                        }
                    }
                }
            }
        }
    }
    assert_eq!(clean, 1);
}

#[test]
fn bug_046_each_mark_of_an_assistant_record_is_enough() {
    let result = r#"{"type":"result","num_turns":1,"subtype":"success","is_error":false,"terminal_reason":"completed","result":"the text"}"#;
    for mark in [
        r#""error":"rate_limit""#,
        r#""error":{"odd":1}"#,
        r#""is_api_error_message":true"#,
        r#""api_error":"connection_failed""#,
        r#""api_error_status":"529""#,
        r#""local_command_source":"x""#,
    ] {
        let stream = format!(
            "{{\"type\":\"assistant\",\"message\":{{\"model\":\"m\",\"content\":\"why\"}},{mark}}}\n{result}"
        );
        assert_eq!(failure(&stream).text, "why", "{mark}");
    }
    let stream = format!(
        "{{\"type\":\"assistant\",\"message\":{{\"model\":\"<synthetic>\",\"content\":\"why\"}}}}\n{result}"
    );
    assert_eq!(failure(&stream).kind, FailureKind::AnsweredLocally);
    let fine = r#"{"type":"assistant","message":{"model":"m","content":"x"},"error":null,"is_api_error_message":false}"#;
    assert_eq!(verdicts(&format!("{fine}\n{result}")), [Verdict::Completed]);
}

#[test]
fn kinds_of_failures_by_word() {
    let kind = |fields: &str| {
        failure(&format!(
            r#"{{"type":"result","num_turns":1,"subtype":"success","is_error":true,{fields}}}"#
        ))
        .kind
    };
    assert_eq!(
        kind(r#""terminal_reason":"prompt_too_long","api_error_status":400"#),
        FailureKind::PromptTooLong
    );
    assert_eq!(
        kind(r#""terminal_reason":"blocking_limit""#),
        FailureKind::PromptTooLong
    );
    assert_eq!(
        kind(r#""terminal_reason":"image_error","api_error_status":413"#),
        FailureKind::Image
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error":"stream_idle_timeout""#),
        FailureKind::Connection
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error":"max_output_tokens""#),
        FailureKind::MaxOutputTokens
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error_status":404"#),
        FailureKind::ModelNotFound
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error_status":402"#),
        FailureKind::Billing
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error_status":410"#),
        FailureKind::InvalidRequest
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error_status":502"#),
        FailureKind::Server
    );
    assert_eq!(
        kind(r#""terminal_reason":"max_turns","api_error_status":529"#),
        FailureKind::Overloaded
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error_type":"api_error""#),
        FailureKind::Server
    );
    assert_eq!(
        kind(r#""terminal_reason":"api_error","api_error_type":"overloaded_error""#),
        FailureKind::Overloaded
    );
}

proptest! {
    #[test]
    fn no_line_panics_and_pieces_of_records_read_or_not(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(), pick in any::<prop::sample::Index>()) {
        let lines: Vec<&str> = ALL.iter().flat_map(|stream| stream.lines()).collect();
        let mut line = lines[pick.index(lines.len())].as_bytes().to_vec();
        let at = at.index(line.len());
        if cut {
            line.truncate(at);
        } else {
            line[at] = byte;
        }
        let line = surrogates::repair(&line);
        if let Ok(Record::Result(result)) = decode(&line) {
            result.verdict(&FailureMarks::default());
        }
    }
}
