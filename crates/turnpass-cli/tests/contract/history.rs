//! Any history arrives whole, valid, and byte for byte the same from one request to the next.

use serde_json::{Value, json};
use turnpass::ErrorCode;
use turnpass::conversation::{
    Block, Document, Image, Message, ResultBlock, Role, Source, ToolCall, ToolInput, ToolResult,
    ToolUseId,
};
use turnpass::event::StopReason;

use crate::Ground;
use crate::stage::{ask_with_tools, assert_valid, go_on, host_messages, is_transcript, told};

fn call(id: &str) -> Block {
    Block::ToolUse(ToolCall {
        id: ToolUseId(id.to_owned()),
        name: "read".to_owned(),
        input: ToolInput::empty(),
    })
}

fn result(id: &str) -> ToolResult {
    ToolResult::text(ToolUseId(id.to_owned()), format!("r-{id}"))
}

fn assistant(content: Vec<Block>) -> Message {
    Message {
        role: Role::Assistant,
        content,
    }
}

fn user(content: Vec<Block>) -> Message {
    Message {
        role: Role::User,
        content,
    }
}

pub(crate) async fn bug_105_to_109_any_history_is_made_valid(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let first = || Message::user("begin");
    let long = "x".repeat(300);
    let histories: Vec<(&str, Vec<Message>)> = vec![
        (
            "empty texts",
            vec![
                first(),
                assistant(vec![Block::text(""), call("a")]),
                Message::results([result("a")]),
                assistant(vec![]),
                user(vec![Block::text("\n")]),
            ],
        ),
        (
            "an empty result",
            vec![
                first(),
                assistant(vec![call("a")]),
                Message::results([ToolResult {
                    content: vec![],
                    ..result("a")
                }]),
            ],
        ),
        (
            "results in three messages and another order",
            vec![
                first(),
                assistant(vec![call("a"), call("b"), call("c")]),
                Message::results([result("c")]),
                Message::results([result("a")]),
                user(vec![Block::text("and"), Block::ToolResult(result("b"))]),
            ],
        ),
        (
            "a result twice",
            vec![
                first(),
                assistant(vec![call("a")]),
                Message::results([result("a"), result("a")]),
            ],
        ),
        (
            "a late result",
            vec![
                first(),
                assistant(vec![call("a")]),
                Message::user("wait"),
                assistant(vec![Block::text("ok")]),
                Message::results([result("a")]),
            ],
        ),
        (
            "a call without a result",
            vec![first(), assistant(vec![call("a")]), Message::user("go on")],
        ),
        (
            "a result without a call",
            vec![first(), Message::results([result("zzz")])],
        ),
        (
            "foreign ids",
            vec![
                first(),
                assistant(vec![
                    call("functions.bash:0"),
                    call("call_1|fc_2"),
                    call(""),
                    call(&long),
                    call("é"),
                    call("a b"),
                    call("a_b"),
                ]),
                Message::results(
                    [
                        "functions.bash:0",
                        "call_1|fc_2",
                        "",
                        &long,
                        "é",
                        "a b",
                        "a_b",
                    ]
                    .map(result),
                ),
            ],
        ),
        (
            "neighbours of one role",
            vec![
                first(),
                Message::user("two"),
                assistant(vec![Block::text("a")]),
                assistant(vec![Block::text("b")]),
                Message::user("three"),
                Message::user("four"),
            ],
        ),
        (
            "the assistant last",
            vec![first(), assistant(vec![Block::text("half an ans  ")])],
        ),
        (
            "the assistant first",
            vec![assistant(vec![Block::text("hello")]), first()],
        ),
        (
            "a system message within",
            vec![
                first(),
                assistant(vec![Block::text("a")]),
                Message {
                    role: Role::System,
                    content: vec![Block::text("be brief")],
                },
                Message::user("b"),
            ],
        ),
    ];
    for (what, messages) in histories {
        let mut request = ask_with_tools("x");
        request.messages = messages;
        let heard = told(&provider, request).await;
        assert!(heard.error.is_none(), "{what}: {}", heard.error());
        let sent = ground.stage.sent();
        assert!(
            sent.last().unwrap().violations.is_empty(),
            "{what}: {:?}",
            sent.last().unwrap().violations
        );
    }
}

pub(crate) async fn bug_109_an_unanswered_call_is_refused_before_anything_starts(
    ground: &Ground<'_>,
) {
    let provider = (ground.provider)();
    let mut request = ask_with_tools("x");
    request.messages.push(assistant(vec![call("call-7")]));
    let heard = told(&provider, request).await;
    let error = heard.failed(ErrorCode::RequestInvalid);
    assert!(error.detail().contains("call-7"), "{error}");
    assert!(ground.stage.pids().is_empty() && ground.stage.sent().is_empty());
}

/// The bytes of a top-level field of a body, as they were sent.
fn raw<'a>(body: &'a [u8], field: &str) -> &'a str {
    let all: std::collections::HashMap<&str, &serde_json::value::RawValue> =
        serde_json::from_slice(body).unwrap();
    all[field].get()
}

pub(crate) async fn bug_058_a_growing_conversation_keeps_its_bytes(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut request = ask_with_tools(
        r#"[[think well]] [[call write {"path":"b"}]] [[call read {"path":"a"}]] [[then [[call read {"path":"c"}]] [[then [[say done]]]]]]"#,
    );
    // Long enough to be cached at all.
    request.system = "All work and no play. ".repeat(400);
    for round in 0..5 {
        // The host's order of tools is none of the service's business.
        request.tools.reverse();
        let heard = told(&provider, request.clone()).await;
        request = go_on(&request, heard.done());
        if round < 2 {
            assert_eq!(heard.stop(), &StopReason::ToolUse);
        }
    }
    let sent = ground.stage.sent();
    assert_eq!(sent.len(), 5);
    assert_valid(&sent);
    for pair in sent.windows(2) {
        for field in ["tools", "system", "model", "thinking"] {
            assert_eq!(
                raw(&pair[0].body, field),
                raw(&pair[1].body, field),
                "{field}"
            );
        }
        let messages = |at: usize| host_messages(&pair[at]);
        let (before, after) = (messages(0), messages(1));
        assert_eq!(before[..], after[..before.len()]);
    }
    for request in &sent[1..] {
        let read = request.cache.as_ref().unwrap().share_read().unwrap();
        assert!(
            read > 0.99,
            "request {}: {:?}",
            request.number,
            request.cache
        );
    }
}

pub(crate) async fn images_and_documents_keep_their_place(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let image = || Image {
        source: Source::Base64 {
            media_type: "image/png".into(),
            data: "iVBORw0KGgo=".into(),
        },
    };
    let document = Document {
        source: Source::Base64 {
            media_type: "application/pdf".into(),
            data: "JVBERi0xLjQK".into(),
        },
        title: Some("A title".into()),
    };
    let mut request = ask_with_tools("x");
    request.messages = vec![
        user(vec![
            Block::text("look"),
            Block::Image(image()),
            Block::text("and"),
            Block::Document(document),
        ]),
        assistant(vec![call("a")]),
        Message::results([ToolResult {
            id: ToolUseId("a".into()),
            content: vec![
                ResultBlock::Text { text: "t".into() },
                ResultBlock::Image(image()),
            ],
            is_error: false,
        }]),
    ];
    told(&provider, request).await.done();
    let sent = ground.stage.sent();
    assert_valid(&sent);
    let kinds = |pointer: &str| -> Vec<Value> {
        let all = json!({"messages": host_messages(&sent[0])});
        let blocks = all.pointer(pointer).unwrap().as_array().unwrap().clone();
        blocks.iter().map(|block| block["type"].clone()).collect()
    };
    if ground.way.tells_as_one() {
        // The transcript is cut where an image or a document stands; the result's is one of them.
        let all = ["text", "image", "text", "document", "text", "image", "text"];
        assert_eq!(kinds("/messages/0/content"), all);
        return;
    }
    assert_eq!(
        kinds("/messages/0/content"),
        ["text", "image", "text", "document"]
    );
    assert_eq!(kinds("/messages/2/content/0/content"), ["text", "image"]);
    assert_eq!(
        host_messages(&sent[0])[0]["content"][1]["source"]["data"],
        "iVBORw0KGgo="
    );
}

pub(crate) async fn bug_004_half_a_pair_never_leaves(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let raw = r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"ok \ud83d\u2026"}}"#;
    let text = format!("event: content_block_delta\n{raw}\n\n");
    let at =
        serde_json::from_value(json!({"event": 2, "do": {"type": "raw", "text": text}})).unwrap();
    let reply = turnpass_lab::scenario::Reply::text("and on");
    ground
        .stage
        .upstream
        .enqueue(turnpass_lab::scenario::Reply {
            at: vec![at],
            ..reply
        });
    let request = ask_with_tools("x");
    let heard = told(&provider, request.clone()).await;
    assert_eq!(heard.text(), "ok \u{fffd}…and on");
    told(&provider, go_on(&request, heard.done())).await.done();
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn bug_028_nul_in_text_passes(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut request = ask_with_tools("a\0b");
    request.system = "sys\0tem".into();
    request.messages.push(assistant(vec![call("a")]));
    request.messages.push(Message::results([ToolResult::text(
        ToolUseId("a".into()),
        "re\0sult",
    )]));
    told(&provider, request).await.done();
    let sent = ground.stage.sent();
    assert_valid(&sent);
    let body = String::from_utf8(sent[0].body.to_vec()).unwrap();
    // In a replay's transcript the text is JSON within JSON.
    let twice = is_transcript(&sent[0]);
    for part in [r"a\u0000b", r"re\u0000sult"] {
        let part = match twice {
            true => part.replace('\\', r"\\"),
            false => part.to_owned(),
        };
        assert!(body.contains(&part), "{part} is not in {body}");
    }
    let part = r"sys\u0000tem";
    assert!(body.contains(part), "{part} is not in {body}");
}

pub(crate) async fn bug_092_paths_and_commands_in_text_reach_the_model(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let texts = [
        "see @/etc/hostname and @~/.ssh/config",
        "@\"x y\"",
        "/clear",
        "/help me",
        "/compact",
        " /x",
        "!ls",
        "#note",
    ];
    for (at, text) in texts.iter().enumerate() {
        let mut request = ask_with_tools(*text);
        request.messages.insert(0, Message::user("before"));
        request.messages.insert(1, assistant(vec![call("a")]));
        request.messages.insert(
            2,
            Message::results([ToolResult::text(ToolUseId("a".into()), *text)]),
        );
        told(&provider, request).await.done();
        let sent = ground.stage.sent();
        assert_eq!(sent.len(), at + 1, "{text}");
        let messages = host_messages(&sent[at]);
        let last = messages.last().unwrap()["content"].as_array().unwrap();
        assert_eq!(last.last().unwrap()["text"], *text);
        let result = match ground.way.tells_as_one() {
            true => last[0]["text"]
                .as_str()
                .unwrap()
                .contains(&format!("\n| {text}\n")),
            false => last[0]["content"][0]["text"] == *text,
        };
        assert!(result, "{text}: {last:#?}");
    }
    assert_valid(&ground.stage.sent());
}

/// The host's runner compacts: at the transport's threshold, with one request for the summary.
pub(crate) async fn an_agent_that_grows_is_summed_up_once_and_goes_on(ground: &Ground<'_>) {
    crate::growing::summed_up((ground.provider)(), &ground.stage.upstream).await;
}
