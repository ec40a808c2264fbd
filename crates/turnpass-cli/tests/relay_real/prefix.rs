//! The prompt cache: a growing conversation is the same bytes again, and a little more.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use turnpass::Transport as _;
use turnpass::conversation::{Message, ToolResult};
use turnpass::request::Request;
use turnpass_lab::upstream::Recorded;

use crate::bench::{Bench, Setup, request, tool};

/// Rounds of the conversation, each with a call and its result: kept processes, and a process for each request.
const ROUNDS: (usize, usize) = (12, 3);

/// The mark that the relay places; taken out before messages are compared, since marks move on.
const MARK: &str = r#","cache_control":{"type":"ephemeral","ttl":"1h"}"#;

/// The parts of a request that the prompt cache looks at, as bytes.
struct Prefix {
    tools: String,
    system: Vec<String>,
    /// Without marks.
    messages: Vec<String>,
    /// In the whole body.
    marks: usize,
}

fn prefix(recorded: &Recorded) -> Prefix {
    let body: BTreeMap<&str, &RawValue> = serde_json::from_slice(&recorded.body).unwrap();
    let list = |field: &str| -> Vec<String> {
        let parts: Vec<&RawValue> = serde_json::from_str(body[field].get()).unwrap();
        parts
            .into_iter()
            .map(|part| part.get().to_owned())
            .collect()
    };
    let text = std::str::from_utf8(&recorded.body).unwrap();
    Prefix {
        tools: body["tools"].get().to_owned(),
        system: list("system"),
        messages: list("messages")
            .into_iter()
            .map(|raw| raw.replace(MARK, ""))
            .collect(),
        marks: text.matches("\"cache_control\"").count(),
    }
}

fn long_request(messages: &[Message]) -> Request {
    let mut request = request(messages.to_vec());
    request.system = "You are under test, and you are told so at length. ".repeat(200);
    request
        .tools
        .extend((0..20).map(|number| tool(&format!("tool_{number}"))));
    request
}

/// Bytes of tools, system and earlier messages stay (bugs 58, 97), marks are few and in order (bug 96), and what was
/// sent before is read from the cache.
pub(crate) async fn stays(setup: Setup) {
    let bench = Bench::new(&setup);
    let rounds = if setup.is_warm() { ROUNDS.0 } else { ROUNDS.1 };
    let (mut messages, mut seen) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let filler = format!(
            "question {round}: {}",
            "some words to fill the window with ".repeat(20)
        );
        let wanted = r#"[[think why]] [[call read {"path":"a"}]] [[call write {"path":"b"}]] [[then [[say done]]]]"#;
        messages.push(Message::user(format!("{filler} {wanted}")));
        for _ in 0..2 {
            let mut request = long_request(&messages);
            // The host's order of its tools is no promise.
            let by = round % request.tools.len();
            request.tools.rotate_left(by);
            let (answer, requests) = bench.ask(request).await;
            let [one] = &requests[..] else {
                panic!("{} requests", requests.len())
            };
            assert!(one.violations.is_empty(), "{:?}", one.violations);
            seen.push(one.clone());
            messages.push(answer.done().message.clone());
            let calls = answer.calls();
            if !calls.is_empty() {
                let results = calls
                    .into_iter()
                    .map(|call| ToolResult::text(call.id, "the result ".repeat(30)));
                messages.push(Message::results(results));
            }
        }
    }
    assert_eq!(seen.len(), 2 * rounds);
    grows(&seen);

    // Another process, and the tools in another order, for the request that came last.
    messages.pop();
    bench.relay.shutdown().await.unwrap();
    let bench = bench.reopen();
    let mut request = long_request(&messages);
    request.tools.reverse();
    let (answer, again) = bench.ask(request).await;
    answer.done();
    let (last, again) = (prefix(seen.last().unwrap()), prefix(&again[0]));
    assert_eq!(last.tools, again.tools);
    assert_eq!(last.system, again.system);
    assert_eq!(last.messages, again.messages);
    assert_eq!(bench.count(), 2 * rounds + 1);
    bench.finish().await;
}

fn grows(seen: &[Recorded]) {
    let first = prefix(&seen[0]);
    let mut before = prefix(&seen[0]);
    for (number, one) in seen.iter().enumerate().skip(1) {
        let now = prefix(one);
        assert_eq!(now.tools, first.tools, "request {number}");
        assert_eq!(now.system, first.system, "request {number}");
        assert!(
            now.messages.len() > before.messages.len(),
            "request {number}"
        );
        assert_eq!(
            now.messages[..before.messages.len()],
            before.messages,
            "request {number}"
        );
        assert!(
            now.messages
                .iter()
                .all(|raw| !raw.contains("cache_control")),
            "marks of one kind"
        );
        assert!(
            (3..=4).contains(&now.marks),
            "{} marks in request {number}",
            now.marks
        );
        let cache = one.cache.as_ref().unwrap();
        let share = cache.share_read().unwrap();
        assert!(share >= 0.98, "request {number}: {share} of {cache:?}");
        before = now;
    }
    assert!(
        first.system[0].contains("x-anthropic-billing-header"),
        "{}",
        first.system[0]
    );
    assert!(!first.system[0].contains("cch="), "{}", first.system[0]);
}
