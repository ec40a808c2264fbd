use super::*;
use proptest::prelude::*;
use serde_json::Value;

/// The body that CLI 2.1.332 sent for the placeholder "gen-0 placeholder" with one tool.
const NATIVE: &[u8] = include_bytes!("../../tests/data/cli-2.1.332-request-body.json");
const PLACEHOLDER: &str = "gen-0 placeholder";

fn raw(json: &str) -> &RawValue {
    serde_json::from_str(json).unwrap()
}

fn code(body: &str, messages: &str) -> &'static str {
    splice(body.as_bytes(), raw(messages), PLACEHOLDER)
        .unwrap_err()
        .code()
}

#[test]
fn the_body_of_2_1_332_gets_other_messages_and_keeps_the_rest() {
    let messages = r#"[ {"role":"user","content":"Hi \u0041"}, {"role":"assistant","content":[{"type":"thinking","thinking":" \r\n","signature":"S=="}]} ]"#;
    let restored = splice(NATIVE, raw(messages), PLACEHOLDER).unwrap();
    let native = std::str::from_utf8(NATIVE).unwrap();
    let start = native.find("\"messages\":").unwrap() + "\"messages\":".len();
    let end = native.find(",\"system\"").unwrap();
    let expected = [&native[..start], messages, &native[end..]].concat();
    assert_eq!(String::from_utf8(restored).unwrap(), expected);
}

#[test]
fn bug_094_only_the_request_with_the_placeholder_is_taken() {
    let user = |content: &str| format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
    assert_eq!(code(&user(r#""Hi""#), "[]"), "placeholder_missing");
    assert_eq!(
        code(
            &user(r#"[{"type":"image","text":"gen-0 placeholder"}]"#),
            "[]"
        ),
        "placeholder_missing"
    );
    assert_eq!(
        code(
            &user(r#"[{"type":"tool_result","content":"gen-0 placeholder"}]"#),
            "[]"
        ),
        "placeholder_missing"
    );
    let by_others = r#"{"messages":[{"role":"system","content":"gen-0 placeholder"},{"role":"user","content":"x"}]}"#;
    assert_eq!(code(by_others, "[]"), "placeholder_missing");
    for found in [
        r#""gen-0 placeholder""#,
        r#""gen\u002d0 placeholder""#,
        r#"[{"type":"text","text":"<system-reminder>"},7,{"text":"gen-0 placeholder","type":"text"}]"#,
    ] {
        assert!(
            splice(user(found).as_bytes(), raw("[]"), PLACEHOLDER).is_ok(),
            "{found}"
        );
    }
}

#[test]
fn bodies_that_are_refused() {
    let good = r#"[{"role":"user","content":"gen-0 placeholder"}]"#;
    for not_json in [
        "",
        "[]",
        "nul",
        "{",
        r#"{"messages":[]} x"#,
        r#"{"messages":[}"#,
        "{\"a\":\"\u{1}\"}",
    ] {
        assert_eq!(code(not_json, "[]"), "not_json", "{not_json}");
    }
    assert_eq!(
        splice(b"{\"a\":\"\xff\"}", raw("[]"), "x").unwrap_err(),
        SpliceError::NotJson
    );
    assert_eq!(
        code(r#"{"model":"x","a":{"messages":[]}}"#, "[]"),
        "messages_missing"
    );
    let twice = format!(r#"{{"messages":{good},"mess\u0061ges":{good}}}"#);
    assert_eq!(code(&twice, "[]"), "messages_repeated");
    for invalid in [
        "{}",
        "null",
        "7",
        "[]",
        r#"[["user","gen-0 placeholder"]]"#,
        r#"[{"content":"x"}]"#,
        r#"[{"role":7}]"#,
        r#"[{"role":"system"}]"#,
    ] {
        assert_eq!(
            code(&format!(r#"{{"messages":{invalid}}}"#), "[]"),
            "messages_invalid",
            "{invalid}"
        );
    }
    let body = format!(r#"{{"messages":{good}}}"#);
    for restored in ["{}", "null", r#""[]""#] {
        assert_eq!(code(&body, restored), "restored_invalid");
    }
}

#[test]
fn both_sizes_are_capped_exactly() {
    let frame = r#"{"messages":[{"role":"user","content":"gen-0 placeholder"}],"x":""}"#;
    let padded = |bytes: usize| {
        frame.replace(
            r#""x":"""#,
            &format!(r#""x":"{}""#, "a".repeat(bytes - frame.len())),
        )
    };
    assert!(splice(padded(MAX_NATIVE_BYTES).as_bytes(), raw("[]"), PLACEHOLDER).is_ok());
    assert_eq!(
        code(&padded(MAX_NATIVE_BYTES + 1), "[]"),
        "native_too_large"
    );

    let fixed = frame.len() - r#"[{"role":"user","content":"gen-0 placeholder"}]"#.len();
    let messages = |bytes: usize| format!(r#"["{}"]"#, "b".repeat(bytes - fixed - 4));
    let restored = splice(
        frame.as_bytes(),
        raw(&messages(MAX_RESTORED_BYTES)),
        PLACEHOLDER,
    )
    .unwrap();
    assert_eq!(restored.len(), MAX_RESTORED_BYTES);
    assert_eq!(
        code(frame, &messages(MAX_RESTORED_BYTES + 1)),
        "restored_too_large"
    );
}

#[test]
fn a_lone_surrogate_elsewhere_in_the_body_is_none_of_our_business() {
    let body = r#"{"system":"\ud83d","messages":[{"role":"system","content":"\ud83d"},{"role":"user","content":"gen-0 placeholder"}]}"#;
    let restored = splice(body.as_bytes(), raw("[]"), PLACEHOLDER).unwrap();
    assert_eq!(restored, br#"{"system":"\ud83d","messages":[]}"#);
}

#[test]
fn bug_096_marks_of_the_cli_are_found_with_their_lifetimes() {
    let body = NativeBody::read(NATIVE).unwrap();
    let inspection = body.inspect();
    assert_eq!(inspection.model.as_deref(), Some("claude-sonnet-5-5"));
    assert_eq!(inspection.stream, Some(true));
    assert_eq!(inspection.tool_names, [Some("mcp__host__alpha".into())]);
    let mark = |index| CacheMark {
        place: Place::System,
        index,
        ttl: CacheTtl::OneHour,
    };
    assert_eq!(inspection.marks, [mark(1), mark(2)]);
    assert_eq!(inspection.message_marks, [CacheTtl::OneHour]);
    assert_eq!(inspection.ttl(), Some(&CacheTtl::OneHour));
    assert!(inspection.marks_in_order());
    assert_eq!(body.field("max_tokens").unwrap().get(), "128000");
    assert_eq!(
        body.field("output_config").unwrap().get(),
        r#"{"effort":"medium"}"#
    );
    assert!(body.field("stop_sequences").is_none());

    let odd = br#"{"tools":[{"name":"a","cache_control":{"type":"ephemeral"}},7,{"cache_control":null}],"system":[{"cache_control":{"ttl":"1h"}},{"cache_control":{"ttl":"2d"}}],"stream":"yes"}"#;
    let body = NativeBody::read(odd).unwrap();
    let inspection = body.inspect();
    assert_eq!(inspection.marks.len(), 3);
    assert_eq!(inspection.marks[0].ttl, CacheTtl::FiveMinutes);
    assert_eq!(inspection.ttl(), Some(&CacheTtl::Other("2d".to_owned())));
    assert!(!inspection.marks_in_order());
    assert_eq!(inspection.stream, None);
    assert_eq!(
        NativeBody::read(b"{\"system\":\"x\"}")
            .unwrap()
            .inspect()
            .ttl(),
        None
    );
}

fn any_json(depth: u32) -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "(\\PC|\"|\\\\|\n){0,8}".prop_map(Value::from),
        Just(Value::from("messages")),
    ];
    leaf.prop_recursive(depth, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("(messages|role|content|[a-z]{1,3})", inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
    .boxed()
}

/// JSON text with white space of its own after each token.
fn spaced(value: &Value, space: &str) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| spaced(item, space)).collect();
            format!("[{space}{}]{space}", items.join(&format!(",{space}")))
        }
        Value::Object(fields) => {
            let fields: Vec<_> = fields
                .iter()
                .map(|(name, value)| {
                    format!(
                        "{}{space}:{}",
                        Value::from(name.as_str()),
                        spaced(value, space)
                    )
                })
                .collect();
            format!("{{{space}{}}}{space}", fields.join(&format!(",{space}")))
        }
        leaf => format!("{leaf}{space}"),
    }
}

proptest! {
    #[test]
    fn all_other_bytes_are_kept(
        before in prop::collection::vec(("[a-ln-z]{1,4}", any_json(3)), 0..4),
        after in prop::collection::vec(("[a-ln-z]{1,4}", any_json(3)), 0..4),
        extra in prop::collection::vec(any_json(2), 0..3),
        restored in prop::collection::vec(any_json(3), 0..4),
        space in prop::sample::select(vec!["", " ", "\n\t", "\r\n  "]),
    ) {
        let fields = |fields: &[(String, Value)]| -> Vec<String> {
            fields.iter().map(|(name, value)| format!("\"{name}\"{space}:{space}{}", spaced(value, space))).collect()
        };
        let mut native = vec![serde_json::json!({"role": "user", "content": PLACEHOLDER})];
        native.extend(extra.into_iter().map(|value| serde_json::json!({"role": "system", "content": value})));
        let native = spaced(&Value::from(native), "");
        let mut head = fields(&before).join(",");
        if !head.is_empty() {
            head.push(',');
        }
        let head = format!("{space}{{{head}\"messages\"{space}:{space}");
        let tail: String = fields(&after).iter().map(|field| format!("{space},{field}")).collect();
        let tail = format!("{tail}}}{space}");
        let body = format!("{head}{native}{tail}");
        let messages = spaced(&Value::from(restored.clone()), space);
        let messages = messages.trim_end();

        let out = splice(body.as_bytes(), raw(messages), PLACEHOLDER).unwrap();
        prop_assert_eq!(std::str::from_utf8(&out).unwrap(), format!("{head}{messages}{tail}"));
        let read: Value = serde_json::from_slice(&out).unwrap();
        prop_assert_eq!(&read["messages"], &Value::from(restored));
    }
}
