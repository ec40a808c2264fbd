//! What the model says reaches the host, each piece once and in order.

use serde_json::json;
use turnpass::conversation::{Block, Message};
use turnpass::event::{Event, Rejection, StopReason};
use turnpass::request::{Effort, ToolChoice, TransportSession};
use turnpass_lab::scenario::{Item, Reply};

use crate::Ground;
use crate::stage::{
    ask, ask_with_tools, assert_valid, go_on, host_messages, is_text, told, tool, until,
};

pub(crate) async fn a_text_streams_and_ends(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let heard = told(
        &provider,
        ask("[[say Good morning, everybody]] [[chunk 4]]"),
    )
    .await;
    assert_eq!(heard.text(), "Good morning, everybody");
    assert!(heard.count(is_text) > 3, "it came in one piece: {heard:?}");
    let at = |is: &dyn Fn(&Event) -> bool| heard.events.iter().position(is);
    let started = at(&|event| matches!(event, Event::Started { .. })).unwrap();
    assert!(started < at(&is_text).unwrap());
    assert_eq!(
        heard.count(|event| matches!(event, Event::Started { .. })),
        1
    );
    let done = heard.done();
    assert_eq!(done.stop, StopReason::EndTurn);
    assert_eq!(done.message, Message::assistant("Good morning, everybody"));
    assert!(done.usage.output_tokens.unwrap() > 0 && done.usage.prompt_tokens() > 0);
    assert_eq!((done.upstream_requests, done.laboratory), (1, true));
    assert_eq!(done.model.0, "claude-sonnet-5-5");
    let sent = ground.stage.sent();
    assert_eq!(sent.len(), 1);
    assert_valid(&sent);
    assert!(!sent[0].body.windows(11).any(|part| part == b"placeholder"));
}

pub(crate) async fn thinking_comes_before_its_answer_and_goes_back_unchanged(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let thought = " \tfirst this\r\nthen that  ";
    ground.stage.upstream.enqueue(Reply::content([
        Item::thinking(thought),
        Item::RedactedThinking { data: None },
        Item::text("so be it"),
    ]));
    let request = ask("think");
    let heard = told(&provider, request.clone()).await;
    assert_eq!(heard.thinking(), thought);
    let last = heard
        .events
        .iter()
        .rposition(|event| matches!(event, Event::ThinkingBlock(_)));
    assert!(last.unwrap() < heard.events.iter().position(is_text).unwrap());
    told(&provider, go_on(&request, heard.done())).await.done();
    let sent = ground.stage.sent();
    // The upstream knows its own signatures and refuses an altered block.
    assert_valid(&sent);
    let answer = &host_messages(&sent[1])[1];
    assert_eq!(answer["content"][0]["thinking"], thought);
    assert_eq!(answer["content"][1]["type"], "redacted_thinking");
}

pub(crate) async fn bug_098_thinking_between_calls_goes_back_unchanged(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    ground.stage.upstream.enqueue(Reply::content([
        Item::thinking("one"),
        Item::tool_use("read", json!({"path": "a"})),
        Item::thinking(""),
        Item::tool_use("read", json!({"path": "b"})),
    ]));
    let request = ask_with_tools("think and call");
    let heard = told(&provider, request.clone()).await;
    assert_eq!(heard.calls().len(), 2);
    told(&provider, go_on(&request, heard.done())).await.done();
    let sent = ground.stage.sent();
    assert_valid(&sent);
    let answer = &host_messages(&sent[1])[1];
    let kinds: Vec<_> = (0..4)
        .map(|at| answer["content"][at]["type"].clone())
        .collect();
    assert_eq!(kinds, ["thinking", "tool_use", "thinking", "tool_use"]);
}

pub(crate) async fn bug_100_hidden_thinking_makes_no_card(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let request = ask("[[think ]] [[say done]]");
    let heard = told(&provider, request.clone()).await;
    assert_eq!(
        heard.count(|event| matches!(event, Event::Thinking { .. })),
        0
    );
    let kept = heard.done().message.content.iter().any(
        |block| matches!(block, Block::Thinking(kept) if kept.thinking.is_empty() && !kept.signature.is_empty()),
    );
    assert!(kept, "{heard:?}");
    told(&provider, go_on(&request, heard.done())).await.done();
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn a_call_is_whole_and_its_result_goes_on(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let request = ask_with_tools(
        r#"[[say I look]] [[call read {"path":"a/b","deep":{"n":[1,2.50,"é"]}}]] [[then [[say read it]]]]"#,
    );
    let heard = told(&provider, request.clone()).await;
    let calls = heard.calls();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].name, "read");
    assert_eq!(
        calls[0].input.read::<serde_json::Value>().unwrap()["deep"]["n"],
        json!([1, 2.5, "é"])
    );
    let preview: String = heard
        .events
        .iter()
        .filter_map(|event| match event {
            Event::ToolInput { partial, .. } => Some(partial.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(preview, calls[0].input.as_str());
    assert_eq!(heard.stop(), &StopReason::ToolUse);
    assert_eq!(heard.done().upstream_requests, 1);
    let next = told(&provider, go_on(&request, heard.done())).await;
    assert_eq!(next.text(), "read it");
    let sent = ground.stage.sent();
    assert_eq!(sent.len(), 2);
    assert_valid(&sent);
    assert_eq!(
        sent[0].field("/tools/0/name").unwrap(),
        "mcp__turnpass__read"
    );
    assert_eq!(
        host_messages(&sent[1])[2]["content"][0]["type"],
        "tool_result"
    );
}

pub(crate) async fn text_beside_results_goes_in_one_message(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for failed in [0, 1, 2] {
        let request = ask_with_tools(
            r#"[[call read {"path":"a"}]] [[call read {"path":"b"}]] [[then [[say seen]]]]"#,
        );
        let heard = told(&provider, request.clone()).await;
        assert_eq!(heard.stop(), &StopReason::ToolUse);
        let mut next = go_on(&request, heard.done());
        let last = next.messages.last_mut().unwrap();
        for block in last.content.iter_mut().take(failed) {
            if let Block::ToolResult(result) = block {
                result.is_error = true;
            }
        }
        last.content.push(Block::text("and be quick"));
        let before = ground.stage.sent().len();
        let heard = told(&provider, next.clone()).await;
        if failed == 2 && ground.way.tells_as_one() {
            // No result that is good ends the CLI's turn, so the turn is told anew, here as a text.
            assert_eq!(heard.done().upstream_requests, 1);
            let sent = host_messages(ground.stage.sent().last().unwrap());
            let [transcript, text] = sent[0]["content"].as_array().unwrap().as_slice() else {
                panic!("{sent:#?}");
            };
            let transcript = transcript["text"].as_str().unwrap();
            assert_eq!(transcript.matches("\nfailed result of call ").count(), 2);
            assert_eq!(text["text"], "and be quick");
            continue;
        }
        assert_eq!(heard.text(), "seen", "{failed} failed");
        assert_eq!(heard.done().upstream_requests, 1);
        let sent = ground.stage.sent();
        assert_eq!(sent.len(), before + 1, "{failed} failed");
        let messages = host_messages(sent.last().unwrap());
        let last = messages.last().unwrap()["content"].as_array().unwrap();
        let kinds: Vec<_> = last.iter().map(|block| &block["type"]).collect();
        assert_eq!(kinds, ["tool_result", "tool_result", "text"]);
        let errors = last
            .iter()
            .filter(|block| block["is_error"] == true)
            .count();
        assert_eq!(errors, failed);
        assert_eq!(last[2]["text"], "and be quick");
        // The conversation goes on as one that nothing happened to.
        let heard = told(&provider, go_on(&next, heard.done())).await;
        assert_eq!(heard.text(), "going on");
        let again = host_messages(ground.stage.sent().last().unwrap());
        assert_eq!(again[..messages.len()], messages[..]);
    }
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn parallel_calls_of_one_tool_keep_their_ids(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let call = r#"[[call read {"path":"same"}]]"#;
    let request = ask_with_tools(format!("{} [[then [[say all]]]]", [call; 5].join(" ")));
    let heard = told(&provider, request.clone()).await;
    let mut ids: Vec<_> = heard.calls().into_iter().map(|call| call.id).collect();
    assert_eq!(ids.len(), 5);
    let mut next = go_on(&request, heard.done());
    next.messages.last_mut().unwrap().content.reverse();
    assert_eq!(told(&provider, next).await.text(), "all");
    let sent = ground.stage.sent();
    assert_valid(&sent);
    let results = host_messages(&sent[1])[2]["content"].clone();
    for (at, id) in ids.iter().enumerate() {
        // A live CLI sends results in the order in which they came; the others in that of the calls.
        let result = match ground.way.is_live() {
            true => results
                .as_array()
                .unwrap()
                .iter()
                .find(|result| result["tool_use_id"] == id.0),
            false => results.get(at),
        };
        let content = &result.unwrap()["content"];
        let text = content.pointer("/0/text").unwrap_or(content);
        assert_eq!(
            text,
            &json!(format!("result of {}", id.0)),
            "each id has its own result"
        );
    }
    ids.dedup();
    assert_eq!(ids.len(), 5);
}

pub(crate) async fn bug_119_a_call_without_arguments_is_an_empty_object(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for raw in [vec![], vec![String::new()], vec!["{}".to_owned()]] {
        ground
            .stage
            .upstream
            .enqueue(Reply::content([Item::ToolUse {
                name: "read".into(),
                id: None,
                input: None,
                raw: Some(raw),
                chunk: None,
            }]));
        let request = ask_with_tools("call");
        let heard = told(&provider, request.clone()).await;
        assert_eq!(heard.calls()[0].input.as_str(), "{}");
        told(&provider, go_on(&request, heard.done())).await.done();
    }
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn bug_068_a_tool_that_was_not_offered_is_rejected(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    for name in ["bash", "Bash", "mcp_host_read"] {
        let reply = Reply::content([
            Item::tool_use(name, json!({"a": 1})),
            Item::tool_use("read", json!({})),
        ]);
        ground.stage.upstream.enqueue(reply);
        let request = ask_with_tools("call");
        let heard = told(&provider, request.clone()).await;
        let calls = heard.calls();
        assert_eq!(calls.len(), 1, "{name}: {heard:?}");
        assert_eq!(calls[0].name, "read");
        let rejected = |event: &Event| matches!(event, Event::ToolRejected { call, reason: Rejection::UnknownTool } if call.name == name);
        assert_eq!(heard.count(rejected), 1, "{name}: {heard:?}");
        told(&provider, go_on(&request, heard.done())).await.done();
    }
    // A doubled prefix is repaired.
    let reply = Reply::content([Item::tool_use(
        "mcp__turnpass__mcp__turnpass__read",
        json!({}),
    )]);
    ground.stage.upstream.enqueue(reply);
    let heard = told(&provider, ask_with_tools("call")).await;
    assert_eq!(heard.calls()[0].name, "read");
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn input_that_does_not_parse_is_rejected_with_its_text(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let request = ask_with_tools(r#"[[raw-call read {"path": tru]]"#);
    let heard = told(&provider, request.clone()).await;
    assert!(heard.calls().is_empty());
    let rejected = |event: &Event| matches!(event, Event::ToolRejected { reason: Rejection::ArgumentDecode { raw }, .. } if raw.contains("tru"));
    assert_eq!(heard.count(rejected), 1, "{heard:?}");
    told(&provider, go_on(&request, heard.done())).await.done();
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn bug_071_any_name_of_a_tool_comes_back(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let long = |tail: &str| format!("{}{tail}", "n".repeat(80));
    let names = [
        "fs.read".into(),
        "a/b".into(),
        "hello world".into(),
        "é".into(),
        long("1"),
        long("2"),
        "m".repeat(128),
    ];
    let mut request = ask("[[say x]]");
    request.tools = names.iter().map(|name: &String| tool(name)).collect();
    told(&provider, request.clone()).await.done();
    let sent = ground.stage.sent();
    let published: Vec<String> = sent[0].json.as_ref().unwrap()["tools"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|tool| tool["defer_loading"] != true)
        .map(|tool| tool["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(published.len(), names.len());
    let mut back = Vec::new();
    for name in &published {
        assert!(
            name.len() <= 64 && name.starts_with("mcp__turnpass__"),
            "{name}"
        );
        ground
            .stage
            .upstream
            .enqueue(Reply::content([Item::tool_use(name.clone(), json!({}))]));
        let heard = told(&provider, request.clone()).await;
        back.push(heard.calls()[0].name.clone());
        told(&provider, go_on(&request, heard.done())).await.done();
    }
    back.sort();
    let mut names = names.to_vec();
    names.sort();
    assert_eq!(back, names);
    assert_valid(&ground.stage.sent());
}

pub(crate) async fn every_setting_arrives(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let mut request = ask_with_tools("[[say x]]");
    request.effort = Some(Effort::Low);
    request.sampling.max_tokens = Some(77);
    request.sampling.stop_sequences = vec!["END".into()];
    request.sampling.tool_choice = Some(ToolChoice::Tool {
        name: "write".into(),
        disable_parallel_tool_use: true,
    });
    told(&provider, request).await.done();
    // What one request asked for is gone from the next.
    told(&provider, ask_with_tools("[[say y]]")).await.done();
    let sent = ground.stage.sent();
    let field = |at: usize, pointer: &str| sent[at].field(pointer).cloned().unwrap_or_default();
    assert_eq!(field(0, "/max_tokens"), 77);
    assert_eq!(field(0, "/stop_sequences"), json!(["END"]));
    assert_eq!(
        field(0, "/tool_choice"),
        json!({"type": "tool", "name": "mcp__turnpass__write", "disable_parallel_tool_use": true})
    );
    assert_eq!(field(0, "/output_config/effort"), "low");
    let system = |at: usize| field(at, "/system").to_string();
    assert!(system(0).contains("You are a test.") && system(1).contains("You are a test."));
    assert_ne!(field(1, "/max_tokens"), 77);
    assert!(field(1, "/tool_choice").is_null() && field(1, "/stop_sequences").is_null());
    assert_ne!(field(1, "/output_config/effort"), "low");
}

pub(crate) async fn bug_054_each_session_has_its_own_model(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let models = [
        "claude-opus-4-6",
        "claude-haiku-5-5",
        "claude-sonnet-5-5",
        "claude-opus-4-6",
    ];
    let all = models.iter().enumerate().map(|(at, model)| {
        let mut request = ask(format!("[[say {model}]]"));
        request.session = TransportSession(format!("s{at}"));
        request.model = (*model).into();
        told(&provider, request)
    });
    for (heard, model) in futures_util::future::join_all(all).await.iter().zip(models) {
        assert_eq!(heard.text(), model);
        assert_eq!(heard.done().model.0, model);
    }
    // A name that the service does not know is its error, not another model.
    for _ in 0..ground.way.tries(404) {
        let reply = Reply::error(404, "not_found_error", "model: claude-4-sonnet");
        ground.stage.upstream.enqueue(reply);
    }
    let mut request = ask("x");
    request.model = "claude-4-sonnet".into();
    told(&provider, request)
        .await
        .failed(turnpass::ErrorCode::ModelNotFound);
}

pub(crate) async fn many_at_once_each_get_their_own(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    let all = (0..8).map(|at| {
        let mut request = ask(format!("[[say answer {at}]] [[chunk 2 ms 3]]"));
        request.session = TransportSession(format!("s{at}"));
        told(&provider, request)
    });
    for (at, heard) in futures_util::future::join_all(all).await.iter().enumerate() {
        assert_eq!(heard.text(), format!("answer {at}"));
    }
    assert_eq!(ground.stage.sent().len(), 8);
}

pub(crate) async fn a_slow_host_gets_everything(ground: &Ground<'_>) {
    let provider = (ground.provider)();
    // Far more events than wait anywhere, and more time than the idle deadline until the host goes on.
    let mut request = ask("[[text-size 20000]] [[chunk 20]]");
    request.limits = crate::stage::limits(20_000, 300, 60_000);
    let mut generation = provider.generate(request);
    until(&mut generation, "text", is_text).await;
    let written = ground
        .stage
        .upstream
        .wait_for("a whole answer or none", |seen| {
            seen.reply.events.len() > 100
        });
    written.await.unwrap();
    // The host's pause itself is what is tested.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let heard = crate::stage::hear(generation).await;
    assert_eq!(heard.done().message.text().len(), 20_000);
}
