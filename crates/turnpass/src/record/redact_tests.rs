use super::*;
use crate::record::replay::tests::{play, recordings};
use crate::record::{Replayed, Standing};
use proptest::prelude::*;
use serde_json::json;

/// One of each class that must not survive.
const MARKERS: &[&str] = &[
    "jane.doe@private.example",
    "8f14e45f-ceea-467a-9d3b-1a2b3c4d5e6f",
    "org_01AbCdEfGhIjKlMn",
    "toolu_01Zz9Yy8Xx7Ww6Vv",
    "/home/jane/secret-project/main.rs",
    "~/secret-project",
    "C:\\Users\\jane",
    "sk-ant-oat01-AAAABBBBCCCCDDDD1234",
    "eyJhbGciOiJIUzI1NiJ9.e30.abc",
    "EqQBCkYIAxABGAIiQL+signature/base64==",
    "9b2c1d4e5f60718293a4b5c6d7e8f901",
    "fn main() { launch_the_secret(); }",
    "Jane Doe's Organization",
    "host-7f3a.internal.private",
];

fn redacted_text(value: &Value) -> String {
    String::from_utf8(redact(value.to_string().as_bytes()).bytes).unwrap()
}

#[test]
fn every_recording_of_the_laboratory_decodes_the_same_when_redacted() {
    let same = |played: &Replayed| {
        let mut records = played.records.clone();
        // Pieces of long texts are left out.
        records.remove("stream_event");
        (
            records,
            played.messages,
            played.unfinished,
            played.verdicts.clone(),
            played.tokens,
            played.standing,
            played.unknown.clone(),
        )
    };
    for (path, bytes) in recordings() {
        let before = play(&bytes);
        let redacted = redact(&bytes);
        let after = play(&redacted.bytes);
        if before.noise.is_empty() {
            assert_eq!(same(&before), same(&after), "{}", path.display());
        }
        assert_ne!(after.standing, Standing::Broken);
        let text = String::from_utf8(redacted.bytes.clone()).unwrap();
        for secret in ["test.person", "/rig/", "You are"] {
            assert!(!text.contains(secret), "{secret} in {}", path.display());
        }
        assert!(redact(&redacted.bytes).bytes.len() <= redacted.bytes.len() * 2);
    }
}

#[test]
fn ids_stay_related_and_words_of_the_protocol_stay() {
    let uuid = MARKERS[1];
    let lines = [
        json!({"type": "control_request", "request_id": "turnpass-3", "uuid": uuid}),
        json!({"type": "control_response", "response": {"subtype": "success", "request_id": "turnpass-3",
            "response": {"account": {"email": MARKERS[0], "tier": "max", "n": 4}}}, "session_id": uuid}),
        json!({"type": "system", "subtype": "init", "model": "claude-sonnet-4-5-20250929", "cwd": "/home/x",
            "tools": ["mcp__turnpass__read"], "claude_code_version": "2.1.332", "original_cwd": "/home/x",
            "plugins": [{"name": "privacy", "source": "cc-plugin-privacy@builtin"}]}),
    ];
    let text = lines.map(|line| line.to_string()).join("\n");
    let redacted = String::from_utf8(redact(text.as_bytes()).bytes).unwrap();
    let lines: Vec<Value> = redacted
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0]["request_id"], lines[1]["response"]["request_id"]);
    assert_eq!(lines[0]["request_id"], "id_0001");
    assert_eq!(lines[0]["uuid"], lines[1]["session_id"]);
    let account = &lines[1]["response"]["response"]["account"];
    assert_eq!(
        *account,
        json!({"field_1": "person-1@example.com", "field_2": "xxx", "field_3": 0})
    );
    let init = &lines[2];
    assert_eq!(init["model"], "claude-sonnet-4-5-20250929");
    assert_eq!(init["tools"][0], "mcp__turnpass__read");
    assert_eq!(init["claude_code_version"], "2.1.332");
    assert_eq!(init["plugins"][0]["source"], "cc-plugin-privacy@builtin");
    assert_eq!(init["cwd"], "/redacted/path-1");
    assert_eq!(init["cwd"], init["original_cwd"]);
}

#[test]
fn pieces_still_add_up_to_what_the_cli_repeats() {
    let delta = |delta: Value| json!({"type": "stream_event", "event": {"type": "content_block_delta", "index": 0, "delta": delta}});
    let mut lines = vec![json!({"type": "stream_event", "event": {"type": "message_start"}})];
    let whole = "Jane's file ".repeat(30);
    for piece in whole.as_bytes().chunks(7) {
        lines.push(delta(
            json!({"type": "text_delta", "text": std::str::from_utf8(piece).unwrap()}),
        ));
    }
    lines.push(
        json!({"type": "assistant", "message": {"content": [{"type": "text", "text": whole}]}}),
    );
    lines.push(json!({"type": "stream_event", "event": {"type": "message_start"}}));
    let input = r#"{"path":"/home/jane/x","n":12,"list":["a"]}"#;
    for piece in input.as_bytes().chunks(5) {
        lines.push(delta(
            json!({"type": "input_json_delta", "partial_json": std::str::from_utf8(piece).unwrap()}),
        ));
    }
    let value: Value = serde_json::from_str(input).unwrap();
    lines.push(json!({"type": "assistant", "message": {"content": [{"type": "tool_use", "input": value}]}}));
    let text: Vec<_> = lines.iter().map(Value::to_string).collect();
    let redacted = redact(text.join("\n").as_bytes());
    assert!(redacted.dropped > 20);
    let (mut text, mut json) = (String::new(), String::new());
    let mut repeated = Vec::new();
    for line in std::str::from_utf8(&redacted.bytes).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let delta = &line["event"]["delta"];
        text += delta["text"].as_str().unwrap_or_default();
        json += delta["partial_json"].as_str().unwrap_or_default();
        repeated.push(line["message"]["content"][0].clone());
    }
    assert_eq!(text.len(), REDACTED_CHARS);
    assert!(repeated.iter().any(|block| block["text"] == text));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(repeated.iter().any(|block| block["input"] == json));
    assert_eq!(json["field_1"], "/redacted/path-1");
}

#[test]
fn a_word_is_nothing_that_names_somebody() {
    for word in [
        "end_turn",
        "claude-sonnet-4-5-20250929",
        "opus[1m]",
        "2.1.332",
        "mcp__turnpass__read",
        "cc-plugin-privacy@builtin",
        "2025-06-18",
    ] {
        assert!(is_word(word), "{word}");
    }
    for text in [
        "db.internal",
        "main.rs",
        "a b",
        "gho_x",
        "1.2.x",
        "ab1234567890",
        "192.168.1.77",
        "00:1a:2b:3c:4d:5e",
        "fe80::1:2:3",
    ] {
        assert!(!is_word(text), "{text}");
    }
    for marker in MARKERS
        .iter()
        .filter(|marker| !marker.starts_with("toolu_"))
    {
        assert!(!is_word(marker), "{marker}");
    }
}

#[test]
fn no_number_names_somebody_and_escapes_hide_nothing() {
    // Written as a CLI might write it: every letter of the text as an escape, the key too.
    let text = r#"{"type":"system","\u006eame":"\u006aane\u0040private.example","cwd":"\u002fhome\u002fjane",
        "phone":491701234567,"balance":-1234567890.5,"input":[491701234567,42,"jane"],"arguments":42,
        "user_id":123456,"id":7,"owner":{"name":"jane"},"resets_at":1764547200,"timestamp":1764547200000,
        "duration_ms":1764547200000,"input_tokens":999999,"total_cost_usd":0.125}"#;
    let redacted = redact(text.replace('\n', "").as_bytes());
    let text = String::from_utf8(redacted.bytes).unwrap();
    for part in ["jane", "private", "home", "4917", "1234567", "123456", "42"] {
        assert!(!text.contains(part), "{part} in {text}");
    }
    let kept: Value = serde_json::from_str(&text).unwrap();
    for (field, value) in [
        ("id", json!(7)),
        ("resets_at", json!(1_764_547_200)),
        ("timestamp", json!(1_764_547_200_000_u64)),
        ("input_tokens", json!(999_999)),
        ("total_cost_usd", json!(0.125)),
        ("phone", json!(0)),
        ("arguments", json!(0)),
        ("input", json!([0, 0, "xxxx"])),
    ] {
        assert_eq!(kept[field], value, "{field}");
    }
}

#[test]
fn what_is_no_input_or_output_is_left_out() {
    let text = concat!(
        r#"{"t":0,"dir":"note","v":{"type":"x","env":{"TOKEN":"sk-1"}}}"#,
        "\nplain noise of jane\n",
        r#"{"t":1,"dir":"err","v":"stderr of jane"}"#,
        "\n[1]\n{\"no\":\"type\"}\n",
        r#"{"t":2.5,"dir":"out","v":{"type":"keep_alive"}}"#,
        "\n",
    );
    let redacted = redact(text.as_bytes());
    assert_eq!((redacted.kept, redacted.dropped), (1, 5));
    assert_eq!(
        redacted.bytes,
        b"{\"t\":2.5,\"dir\":\"out\",\"v\":{\"type\":\"keep_alive\"}}\n"
    );
}

/// Any JSON with markers anywhere, also as names of fields.
fn planted() -> impl Strategy<Value = Value> {
    let marker = prop::sample::select(MARKERS.to_vec());
    let fields = [
        "type",
        "name",
        "error",
        "id",
        "uuid",
        "tools",
        "model",
        "cwd",
        "text",
        "content",
        "input",
        "email",
        "account",
        "message",
        "source",
        "new_field",
        "modelUsage",
        "request_id",
    ];
    let field = prop_oneof![
        4 => prop::sample::select(fields.to_vec()).prop_map(str::to_owned),
        1 => prop::sample::select(MARKERS.to_vec()).prop_map(str::to_owned),
    ];
    let text = (prop::bool::ANY, marker).prop_map(|(alone, marker)| match alone {
        true => marker.to_owned(),
        false => format!("see {marker}, please"),
    });
    text.prop_map(Value::from)
        .prop_recursive(4, 24, 4, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((field.clone(), inner), 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
}

proptest! {
    #[test]
    fn no_marker_survives(body in planted(), kind in prop::sample::select(vec!["system", "assistant", "user", "result", "new"]), row in any::<bool>()) {
        let mut record = json!({"type": kind, "subtype": "init"});
        if let (Value::Object(fields), Some(record)) = (body.clone(), record.as_object_mut()) {
            for (name, value) in fields {
                record.entry(name).or_insert(value);
            }
        }
        record["payload"] = body;
        let line = if row { json!({"t": 1.0, "dir": "in", "v": record}) } else { record };
        let text = redacted_text(&line);
        prop_assert_eq!(text.lines().count(), 1);
        for marker in MARKERS {
            prop_assert!(!text.contains(marker), "{} in {}", marker, text);
        }
        for part in ["jane", "Jane", "secret", "private", "sk-ant", "0718293a4"] {
            prop_assert!(!text.contains(part), "{} in {}", part, text);
        }
    }

    #[test]
    fn no_marker_survives_in_pieces(marker in prop::sample::select(MARKERS.to_vec()), size in 1..9usize, kind in 0..3usize) {
        let (delta, field) = [("text_delta", "text"), ("thinking_delta", "thinking"), ("input_json_delta", "partial_json")][kind];
        let whole = if kind == 2 { json!({marker: {"content": marker}}).to_string() } else { format!("a {marker} b") };
        let chars: Vec<char> = whole.chars().collect();
        let mut lines = String::new();
        for piece in chars.chunks(size) {
            let piece: String = piece.iter().collect();
            lines += &json!({"type": "stream_event", "event": {"type": "content_block_delta", "index": 2, "delta": {"type": delta, field: piece}}}).to_string();
            lines.push('\n');
        }
        let redacted = String::from_utf8(redact(lines.as_bytes()).bytes).unwrap();
        let mut joined = String::new();
        for line in redacted.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            joined += line["event"]["delta"][field].as_str().unwrap();
        }
        prop_assert!(!joined.is_empty() && !joined.contains(marker), "{}", joined);
        for part in ["jane", "Jane", "secret", "private", "sk-ant"] {
            prop_assert!(!joined.contains(part), "{} in {}", part, joined);
        }
    }
}
