//! Texts that the CLI would act on, odd tools and large things: everything reaches the other side as it was written.

use std::num::NonZeroUsize;

use serde_json::{Value, json};
use turnpass::ErrorCode;
use turnpass::conversation::{
    Block, Document, Image, Message, ResultBlock, Role, Source, ToolCall, ToolInput, ToolResult,
    ToolUseId,
};
use turnpass::request::Tool;
use turnpass_lab::scenario::{Body, Item, Reply};
use turnpass_lab::upstream::{Checks, Options};

use crate::bench::{Bench, Random, Setup, body, request, say, tool};

/// What the CLI has a meaning of its own for, and what breaks on the way in other programs.
const TEXTS: [&str; 18] = [
    "see @/etc/hostname and @~/.ssh/config and @\"x y\"",
    "@/etc/hostname",
    "/clear",
    "/compact",
    "/help me",
    "/usage",
    " /x",
    "!ls -la",
    "#note remember this",
    "ultrathink megathink think harder",
    "turnpass placeholder",
    "turnpass placeholder\n",
    "<system-reminder>not one</system-reminder>",
    "<local-command-stdout>no</local-command-stdout>",
    "\u{feff}bom, nul \u{0}, escape \u{1b}[0m, ls \u{2028}, del \u{7f}",
    "line\r\nline\rline\n\ttab  ",
    "👩‍👩‍👧 é e\u{301} 漢字 \u{202e}rtl\u{202c}",
    "\\u0000 \\\" {\"messages\":[]} ${HOME} $(id) `id`",
];

fn png() -> Source {
    let data = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    Source::Base64 {
        media_type: "image/png".into(),
        data: data.into(),
    }
}

fn pdf() -> Document {
    let source = Source::Base64 {
        media_type: "application/pdf".into(),
        data: "JVBERi0xLjQK".into(),
    };
    Document {
        source,
        title: Some("@title".into()),
    }
}

/// User text, results, call input and system prompt, byte for byte, with images and documents in place (bugs 28, 92).
pub(crate) async fn exact(setup: Setup) {
    let bench = Bench::new(&setup);
    let mut messages = Vec::new();
    for (at, text) in TEXTS.into_iter().enumerate() {
        let id = ToolUseId(format!("toolu_{at}"));
        let input = json!({"path": text, "deep": [{"more": text}]});
        messages.push(Message {
            role: Role::User,
            content: vec![
                Block::text(text),
                Block::Image(Image { source: png() }),
                Block::text(format!("{text}.")),
                Block::Document(pdf()),
                Block::text("end"),
            ],
        });
        let call = ToolCall {
            id: id.clone(),
            name: "read".into(),
            input: ToolInput::from(input.as_object().unwrap().clone()),
        };
        messages.push(Message {
            role: Role::Assistant,
            content: vec![Block::text(text), Block::ToolUse(call)],
        });
        let content = vec![
            ResultBlock::Text { text: text.into() },
            ResultBlock::Image(Image { source: png() }),
            ResultBlock::Text {
                text: format!(":{text}"),
            },
        ];
        messages.push(Message::results([ToolResult {
            id,
            content,
            is_error: false,
        }]));
        messages.push(Message::assistant(format!("-{text}")));
    }
    messages.push(Message::user("[[say ok]]"));
    let mut request = request(messages);
    request.system = TEXTS.join("\n");
    let (answer, seen) = bench.ask(request.clone()).await;
    assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1));
    assert!(seen[0].violations.is_empty(), "{:?}", seen[0].violations);
    let sent = body(&seen[0]);
    assert_eq!(sent["system"][2]["text"], request.system);
    let found = sent["messages"].as_array().unwrap();
    assert_eq!(found.len(), 4 * TEXTS.len() + 1);
    for (four, text) in found.chunks(4).zip(TEXTS) {
        let user = four[0]["content"].as_array().unwrap();
        let kinds: Vec<&str> = user
            .iter()
            .map(|block| block["type"].as_str().unwrap())
            .collect();
        assert_eq!(
            kinds,
            ["text", "image", "text", "document", "text"],
            "{text:?}"
        );
        assert_eq!(
            (&user[0]["text"], &user[2]["text"]),
            (&json!(text), &json!(format!("{text}.")))
        );
        assert_eq!(user[3]["title"], "@title");
        let answered = &four[1]["content"];
        assert_eq!(answered[0]["text"], text);
        assert_eq!(
            answered[1]["input"],
            json!({"path": text, "deep": [{"more": text}]})
        );
        let result = &four[2]["content"][0]["content"];
        assert_eq!(
            (&result[0]["text"], &result[1]["type"]),
            (&json!(text), &json!("image"))
        );
        assert_eq!(result[2]["text"], format!(":{text}"));
        assert_eq!(four[3]["content"][0]["text"], format!("-{text}"));
    }
    // Each one alone as the whole prompt: no command, no second request, no missing turn.
    for text in if setup.is_warm() {
        &TEXTS[..]
    } else {
        &TEXTS[..3]
    } {
        bench.up.enqueue(Reply::text("ok"));
        let (answer, seen) = bench.ask(say(text)).await;
        assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1), "{text:?}");
        let content = &body(&seen[0])["messages"][0]["content"];
        assert_eq!(
            (&content[0]["text"], content.as_array().unwrap().len()),
            (&json!(text), 1)
        );
    }
    bench.finish().await;
}

/// Half a surrogate pair from the service is a replacement character, and the history that holds it goes out again
/// (bug 4).
pub(crate) async fn surrogates(setup: Setup) {
    let bench = Bench::new(&setup);
    let event =
        |kind: &str, rest: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{rest}}}\n\n");
    let stream = [
        event(
            "message_start",
            r#","message":{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"usage":{"input_tokens":1,"output_tokens":1}}"#,
        ),
        event(
            "content_block_start",
            r#","index":0,"content_block":{"type":"text","text":""}"#,
        ),
        event(
            "content_block_delta",
            r#","index":0,"delta":{"type":"text_delta","text":"ok \ud83d, \udc69 and \ud83d\udc69"}"#,
        ),
        event("content_block_stop", r#","index":0"#),
        event(
            "message_delta",
            r#","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":5}"#,
        ),
        event("message_stop", ""),
    ];
    bench.up.enqueue(Reply {
        headers: [("content-type".to_owned(), "text/event-stream".to_owned())].into(),
        body: Some(Body::Text(stream.concat())),
        ..Reply::default()
    });
    let (answer, seen) = bench.ask(say("go on")).await;
    assert_eq!(
        (answer.text().as_str(), seen.len()),
        ("ok \u{fffd}, \u{fffd} and 👩", 1)
    );
    let messages = vec![
        Message::user("go on"),
        answer.done().message.clone(),
        Message::user("[[say ok]]"),
    ];
    let (answer, seen) = bench.ask(request(messages)).await;
    assert_eq!((answer.text().as_str(), seen.len()), ("ok", 1));
    bench.finish().await;
}

/// Large answers up to 16 MiB are whole, a larger one is one typed error (bug 1); many small deltas (bug 2).
pub(crate) async fn large_answers(setup: Setup) {
    const MIB: usize = 1024 * 1024;
    let bench = Bench::new(&setup);
    for size in [3 * MIB, 12 * MIB] {
        let (answer, seen) = bench.ask(say(&format!("[[text-size {size}]]"))).await;
        assert_eq!(
            (
                answer.done().message.text().len(),
                answer.text().len(),
                seen.len()
            ),
            (size, size, 1)
        );
    }
    let content = "x".repeat(3 * MIB);
    bench.up.enqueue(Reply::content([Item::tool_use(
        "write",
        json!({"path": "a", "content": content}),
    )]));
    let (answer, seen) = bench.ask(say("go on")).await;
    let input: Value = answer.calls()[0].input.read().unwrap();
    assert_eq!(
        (input["content"].as_str().unwrap().len(), seen.len()),
        (3 * MIB, 1)
    );

    let (answer, seen) = bench.ask(say(&format!("[[text-size {}]]", 17 * MIB))).await;
    let error = answer.error();
    assert_eq!(
        (error.code(), error.output_seen()),
        (ErrorCode::ResponseTooLarge, true),
        "{error}"
    );
    assert!(
        error.detail().contains(&(16 * MIB).to_string()),
        "the limit is named: {error}"
    );
    assert_eq!(seen.len(), 1);

    // A CLI that is passed the real answer takes about 2 ms for each delta.
    let deltas = if setup.is_warm() { 20_000 } else { 2_000 };
    bench.up.enqueue(Reply::content([Item::Text {
        text: "y".repeat(deltas),
        chunk: NonZeroUsize::new(1),
    }]));
    let (answer, seen) = bench.ask(say("go on")).await;
    assert_eq!(
        (
            answer.done().message.text().len(),
            answer.text().len(),
            seen.len()
        ),
        (deltas, deltas, 1)
    );
    bench.finish().await;
}

/// 7.9 MiB go out whole; 9 MiB are refused before anything is started.
pub(crate) async fn large_history(setup: Setup) {
    let bench = Bench::new(&setup);
    let image = |bytes: usize| {
        let source = Source::Base64 {
            media_type: "image/png".into(),
            data: "A".repeat(bytes / 4 * 4),
        };
        Block::Image(Image { source })
    };
    let history = |bytes: usize| {
        let content = (0..4)
            .map(|_| image(bytes / 4))
            .chain([Block::text("[[say ok]]")])
            .collect();
        request(vec![Message {
            role: Role::User,
            content,
        }])
    };
    let (answer, seen) = bench.ask(history(9 * 1024 * 1024)).await;
    assert_eq!(
        answer.code(),
        Some(ErrorCode::HistoryTooLarge),
        "{:?}",
        answer.end
    );
    assert!(answer.error().is_context_overflow());
    assert!(seen.is_empty() && bench.spawned().is_empty());

    let bytes = 79 * 1024 * 1024 / 10;
    let (answer, seen) = bench.ask(history(bytes)).await;
    assert_eq!(
        (answer.text().as_str(), seen.len()),
        ("ok", 1),
        "{:?}",
        answer.end
    );
    let sent = body(&seen[0])["messages"][0]["content"].as_array().unwrap();
    let data = sent
        .iter()
        .filter_map(|block| block["source"]["data"].as_str());
    assert_eq!(data.map(str::len).sum::<usize>(), bytes / 4 / 4 * 4 * 4);

    // Text of that size is more than any window, which is known before anything is sent.
    let (answer, seen) = bench.ask(say(&"word ".repeat(bytes / 5))).await;
    assert_eq!(
        answer.code(),
        Some(ErrorCode::ContextLengthExceeded),
        "{:?}",
        answer.end
    );
    assert!(seen.is_empty());
    bench.finish().await;
}

/// 120 tools with large schemas are all there, none deferred (bug 64); odd names come back as they were (bug 71); odd
/// schemas reach the service in a form that it takes (bug 65), nested ones unchanged (bug 66).
pub(crate) async fn many_tools(setup: Setup) {
    let upstream = Options {
        checks: Checks::default(),
        ..Options::default()
    };
    let bench = Bench::with(&setup, upstream, |_| {});
    let mut random = Random::new(5);
    let nested = json!({"type": "object", "properties": {"list": {"type": "array", "items": {
        "type": "object", "required": ["kind"], "additionalProperties": false, "properties": {
            "kind": {"const": "x"}, "level": {"enum": [1, 2, 3.5]},
            "name": {"type": "string", "pattern": "^[a-z]+$", "format": "email", "description": "deep"},
        },
    }}}});
    let mut tools: Vec<Tool> = (0..120)
        .map(|at| {
            let words: Vec<String> = (0..140).map(|_| random.word()).collect();
            let mut schema = nested.clone();
            schema["properties"]["many"] = json!({"type": "string", "enum": words});
            Tool {
                input_schema: schema,
                ..tool(&format!("tool_{at}"))
            }
        })
        .collect();
    let odd_names = [
        "fs.read".to_owned(),
        "fs/read".to_owned(),
        "hello world".to_owned(),
        "é".to_owned(),
        "Bash".to_owned(),
        "mcp__turnpass__x".to_owned(),
        "n".repeat(64),
        format!("{}a", "l".repeat(90)),
        format!("{}b", "l".repeat(90)),
    ];
    tools.extend(odd_names.iter().map(|name| tool(name)));
    let variants = json!([
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "integer"}}},
    ]);
    let odd_schemas = [
        json!({"oneOf": variants}),
        json!({"type": "object", "anyOf": variants}),
        json!({"allOf": variants}),
        json!({"$ref": "#/$defs/T", "$defs": {"T": variants[0]}}),
        json!({"properties": {"x": {"type": "string"}}}),
        json!({"type": ["object", "null"]}),
        json!({}),
        json!(true),
        json!({"type": "object", "additionalProperties": true}),
    ];
    let odd = odd_schemas.into_iter().enumerate();
    tools.extend(odd.map(|(at, input_schema)| Tool {
        input_schema,
        ..tool(&format!("odd_{at}"))
    }));
    let count = tools.len();
    for name in &odd_names {
        let mut request = say("go on");
        request.tools.clone_from(&tools);
        bench.up.enqueue(Reply::content([Item::tool_use(
            published(name),
            json!({"path": "a"}),
        )]));
        let (answer, seen) = bench.ask(request).await;
        let [recorded] = &seen[..] else {
            panic!("{} requests, {:?}", seen.len(), answer.end)
        };
        assert!(recorded.violations.is_empty(), "{:?}", recorded.violations);
        let sent = body(recorded)["tools"].as_array().unwrap();
        assert_eq!(sent.len(), count, "every tool, and none besides");
        let text = body(recorded)["tools"].to_string();
        assert!(!text.contains("defer_loading") && !text.contains("ToolSearch"));
        for plain in &tools[..120] {
            let name = format!("mcp__turnpass__{}", plain.name);
            let found = sent.iter().find(|sent| sent["name"] == name).unwrap();
            assert_eq!(found["input_schema"], plain.input_schema, "{name}");
        }
        assert_eq!(answer.calls()[0].name, *name);
        if !setup.is_warm() {
            // Each one would be a start; the names were told apart above all the same.
            break;
        }
    }
    bench.finish().await;
}

/// The name that the service knows a tool by.
fn published(name: &str) -> String {
    turnpass::conversation::names::published(name).unwrap()
}
