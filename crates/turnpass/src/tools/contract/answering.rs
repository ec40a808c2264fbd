//! Calls that the host answers: the same scenes in-band and over HTTP, with the pairing between carrier and host.

use std::collections::{HashMap, VecDeque};

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use super::catalogue;
use super::client::{Client, within};
use crate::conversation::{Image, ResultBlock, Source, ToolResult, ToolUseId};
use crate::tools::catalogue::RESULT_CHARS;
use crate::tools::http::{self, CallAddress, HttpCarrier};
use crate::tools::in_band;
use crate::tools::mcp::{Call, Occurrence, Policy, RpcId, Server};
use crate::tools::pairing::{
    Announced, Answer, Arrived, CliAnswered, Ended, Given, Pairing, Refusal,
};
use crate::wire::surrogates;

/// What the host hears, over whichever carrier.
#[derive(Debug)]
enum Heard<A> {
    Listed,
    Call(Call, A),
    Cancelled(A),
}

/// Both ends of one carrier.
trait Ends: Sized {
    type To: Clone + PartialEq + std::fmt::Debug;

    async fn open() -> Self;
    /// The CLI sends a message.
    async fn send(&mut self, message: &str);
    /// The host waits for something to know.
    async fn heard(&mut self) -> Heard<Self::To>;
    /// The host answers.
    fn answer(&mut self, answer: Answer<Self::To>);
    /// The CLI waits for the answer to its request of this id.
    async fn got(&mut self, id: u64) -> Value;
}

struct InBand {
    server: Server,
    requests: u64,
    heard: VecDeque<Heard<(in_band::ReturnAddress, RpcId)>>,
    calls: Vec<(in_band::ReturnAddress, RpcId)>,
    got: HashMap<u64, Value>,
}

impl InBand {
    fn write(&mut self, line: &[u8]) {
        assert!(!line.contains(&b'\n'));
        let line: Value = serde_json::from_slice(line).unwrap();
        assert_eq!(line["response"]["subtype"], "success");
        let message = &line["response"]["response"]["mcp_response"];
        if let Some(id) = message["id"].as_u64() {
            let request = line["response"]["request_id"].as_str().unwrap();
            let first = self.got.insert(id, message.clone());
            // The control request of a notification is answered too.
            assert!(first.is_none() || id == 0, "{request} was answered twice");
        }
    }
}

impl Ends for InBand {
    type To = (in_band::ReturnAddress, RpcId);

    async fn open() -> Self {
        Self {
            server: Server::new(&catalogue(), Policy::Answering),
            requests: 0,
            heard: VecDeque::new(),
            calls: Vec::new(),
            got: HashMap::new(),
        }
    }

    async fn send(&mut self, message: &str) {
        self.requests += 1;
        let line = format!(
            r#"{{"type":"control_request","request_id":"r{}","request":{{"subtype":"mcp_message","server_name":"turnpass","message":{message}}}}}"#,
            self.requests
        );
        let line = surrogates::repair(line.as_bytes());
        let wrapped = in_band::unwrap(&line).unwrap();
        let reply = wrapped.handle(&mut self.server);
        match reply.occurrence {
            Occurrence::Call(call) => {
                let to = (wrapped.return_address(), call.rpc_id.clone());
                self.calls.push(to.clone());
                self.heard.push_back(Heard::Call(call, to));
            }
            Occurrence::Cancelled(id) => {
                let to = self.calls.iter().rfind(|call| call.1 == id);
                self.heard.extend(to.cloned().map(Heard::Cancelled));
            }
            Occurrence::Listed => self.heard.push_back(Heard::Listed),
            Occurrence::Nothing => {}
            Occurrence::Violation(name) => panic!("{name}"),
        }
        if let Some(line) = reply.message {
            self.write(&line);
        }
    }

    async fn heard(&mut self) -> Heard<Self::To> {
        self.heard.pop_front().unwrap()
    }

    fn answer(&mut self, answer: Answer<Self::To>) {
        let (to, id) = answer.to;
        let message = Server::answer(&id, &answer.result);
        self.write(&in_band::wrap(&to, Some(&message)));
    }

    async fn got(&mut self, id: u64) -> Value {
        self.got.remove(&id).unwrap()
    }
}

struct Http {
    carrier: HttpCarrier,
    occurrences: mpsc::Receiver<http::Occurrence>,
    client: Client,
    got: HashMap<u64, JoinHandle<Value>>,
}

impl Ends for Http {
    type To = CallAddress;

    async fn open() -> Self {
        let server = Server::new(&catalogue(), Policy::Answering);
        let (carrier, occurrences) = HttpCarrier::start(server, &TaskTracker::new())
            .await
            .unwrap();
        Self {
            client: Client::new(&carrier),
            carrier,
            occurrences,
            got: HashMap::new(),
        }
    }

    async fn send(&mut self, message: &str) {
        let mut answer = self.client.post(message).await;
        let asked: Value = serde_json::from_slice(&surrogates::repair(message.as_bytes())).unwrap();
        let Some(id) = asked["id"].as_u64() else {
            assert_eq!((answer.status, answer.next().await), (202, None));
            return;
        };
        assert_eq!(answer.status, 200);
        let is_call = answer.is_stream;
        if is_call && !asked["params"]["_meta"]["progressToken"].is_null() {
            let token = &asked["params"]["_meta"]["progressToken"];
            let progress = answer.next().await.unwrap();
            assert_eq!(
                progress,
                json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": 0}})
            );
        }
        let rest = async move {
            let message = answer.next().await.unwrap();
            assert_eq!(answer.next().await, None, "one answer only");
            message
        };
        self.got.insert(id, tokio::spawn(rest));
    }

    async fn heard(&mut self) -> Heard<Self::To> {
        match within(self.occurrences.recv()).await.unwrap() {
            http::Occurrence::Listed => Heard::Listed,
            http::Occurrence::Call { call, to } => Heard::Call(call, to),
            http::Occurrence::Cancelled(to) => Heard::Cancelled(to),
            http::Occurrence::Violation(name) => panic!("{name}"),
        }
    }

    fn answer(&mut self, answer: Answer<Self::To>) {
        assert!(self.carrier.answer(answer.to, &answer.result));
        assert!(!self.carrier.answer(answer.to, &answer.result), "only once");
    }

    async fn got(&mut self, id: u64) -> Value {
        within(self.got.remove(&id).unwrap()).await.unwrap()
    }
}

/// A `tools/call` as CLI 2.1.332 sends it: the token is the id of the message.
fn call(id: u64, tool_use: &str, arguments: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {
        "name": "read",
        "arguments": arguments,
        "_meta": {"claudecode/toolUseId": tool_use, "progressToken": id},
    }})
    .to_string()
}

fn id(tool_use: &str) -> ToolUseId {
    ToolUseId(tool_use.into())
}

/// One carrier with its pairing, in a turn.
struct Scene<E: Ends> {
    ends: E,
    pairing: Pairing<E::To>,
}

impl<E: Ends> Scene<E> {
    async fn open() -> Self {
        let mut pairing = Pairing::default();
        pairing.begin();
        Self {
            ends: E::open().await,
            pairing,
        }
    }

    /// The CLI calls and the host hears it.
    async fn call(&mut self, n: u64, tool_use: &str) -> Arrived<E::To> {
        self.ends.send(&call(n, tool_use, &json!({"n": n}))).await;
        let (call, to) = self.heard_call().await;
        assert_eq!(call.tool, "read");
        self.pairing.arrived(call.tool_use_id, to)
    }

    async fn heard_call(&mut self) -> (Call, E::To) {
        match self.ends.heard().await {
            Heard::Call(call, to) => (call, to),
            other => panic!("{other:?}"),
        }
    }

    fn give(&mut self, result: ToolResult) {
        match self.pairing.give(result) {
            Given::Answered(answer) => self.ends.answer(answer),
            other => panic!("{other:?}"),
        }
    }
}

fn text_of(answer: &Value) -> &str {
    let content = answer["result"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 1, "{answer}");
    content[0]["text"].as_str().unwrap()
}

async fn the_handshake_of_the_cli<E: Ends>() {
    let mut ends = E::open().await;
    for (id, method) in [(1, "initialize"), (2, "tools/list"), (3, "no/such")] {
        let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": {}});
        ends.send(&message.to_string()).await;
    }
    ends.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#)
        .await;
    assert!(matches!(ends.heard().await, Heard::Listed));
    assert_eq!(
        ends.got(1).await["result"]["serverInfo"]["name"],
        "turnpass"
    );
    let tools = &ends.got(2).await["result"]["tools"];
    assert_eq!(tools.as_array().unwrap().len(), 2);
    assert_eq!(ends.got(3).await["error"]["code"], -32601);
}

async fn an_early_call<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    assert_eq!(scene.call(1, "t").await, Arrived::Parked);
    assert_eq!(scene.pairing.announce(&id("t")), Announced::CallWaits);
    scene.give(ToolResult::text(id("t"), "done"));
    assert_eq!(text_of(&scene.ends.got(1).await), "done");
    assert_eq!(
        scene.pairing.cli_answered(&id("t")),
        CliAnswered::Known(Ended::Answered)
    );
}

async fn a_result_before_its_call<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    scene.pairing.announce(&id("t"));
    assert_eq!(
        scene.pairing.give(ToolResult::text(id("t"), "done")),
        Given::Kept
    );
    let Arrived::Answered(answer) = scene.call(1, "t").await else {
        panic!("the result is here");
    };
    scene.ends.answer(answer);
    assert_eq!(text_of(&scene.ends.got(1).await), "done");
}

async fn bug_067_parallel_calls_answered_in_any_order<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    // One name, equal arguments for two of them, more calls than were ever seen in one message.
    let names: Vec<String> = (0..20).map(|n| format!("toolu_{n}")).collect();
    for (n, name) in (0..).zip(&names) {
        scene.pairing.announce(&id(name));
        scene.ends.send(&call(n, name, &json!({"n": n / 2}))).await;
    }
    for _ in &names {
        let (call, to) = scene.heard_call().await;
        assert_eq!(scene.pairing.arrived(call.tool_use_id, to), Arrived::Waits);
    }
    assert_eq!(scene.pairing.open().count(), names.len());
    // 7 and 20 have no common divisor, so each comes once.
    for n in (0..20).map(|n| n * 7 % 20) {
        scene.give(ToolResult::text(id(&names[n]), format!("of {n}")));
    }
    for n in 0..20 {
        assert_eq!(text_of(&scene.ends.got(n).await), format!("of {n}"));
    }
    assert!(scene.pairing.close().is_clean());
}

async fn a_cancelled_call<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    for (n, name) in [(1, "stays"), (2, "goes")] {
        scene.pairing.announce(&id(name));
        assert_eq!(scene.call(n, name).await, Arrived::Waits);
    }
    let cancel = |n: u64| {
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": n, "reason": "x"}})
            .to_string()
    };
    scene.ends.send(&cancel(77)).await;
    scene.ends.send(&cancel(2)).await;
    let Heard::Cancelled(gone) = scene.ends.heard().await else {
        panic!("the call of id 77 is none of ours");
    };
    let answer = scene.pairing.cancelled(|to| *to == gone).unwrap();
    assert_eq!(answer.result.id, id("goes"));
    scene.ends.answer(answer);
    assert_eq!(scene.ends.got(2).await["result"]["isError"], true);
    assert_eq!(
        scene.pairing.give(ToolResult::text(id("goes"), "late")),
        Given::Late
    );
    scene.give(ToolResult::text(id("stays"), "good"));
    assert_eq!(text_of(&scene.ends.got(1).await), "good");
}

async fn bug_072_a_big_result<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    for (n, chars) in [(1, 120_000), (2, RESULT_CHARS), (3, 600_000)] {
        let name = format!("t{n}");
        scene.pairing.announce(&id(&name));
        assert_eq!(scene.call(n, &name).await, Arrived::Waits);
        let text = "é".repeat(chars);
        scene.give(ToolResult::text(id(&name), text.clone()));
        let answer = scene.ends.got(n).await;
        if chars <= RESULT_CHARS {
            assert!(text_of(&answer) == text, "{chars}");
        } else {
            let note = answer["result"]["content"][1]["text"].as_str().unwrap();
            assert!(note.contains("600000 characters"), "{note}");
        }
    }
}

fn argument(call: &Call) -> String {
    call.arguments.to_map()["a"].as_str().unwrap().to_owned()
}

async fn unicode_both_ways<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    let texts = [
        "👩‍👩‍👧 é e\u{301} \u{2028}\u{2029}",
        "\0 \u{1b}[0m \"\\ \r\n",
        "",
    ];
    for (n, text) in (1..).zip(texts) {
        let name = format!("t\u{e9}{n}");
        scene.pairing.announce(&id(&name));
        scene.ends.send(&call(n, &name, &json!({"a": text}))).await;
        let (call, to) = scene.heard_call().await;
        assert_eq!(argument(&call), text);
        assert_eq!(scene.pairing.arrived(call.tool_use_id, to), Arrived::Waits);
        scene.give(ToolResult::text(id(&name), text));
        assert_eq!(text_of(&scene.ends.got(n).await), text);
    }
    // The CLI passes on half of a pair as the model wrote it (2.1.332).
    let half = call(9, "half", &json!({"a": "HALF"})).replace("HALF", r"\ud83d!");
    scene.ends.send(&half).await;
    let (call, _) = scene.heard_call().await;
    assert_eq!(argument(&call), "\u{fffd}!");
}

async fn failed_results_and_images<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    let image = ResultBlock::Image(Image {
        source: Source::Base64 {
            media_type: "image/png".into(),
            data: "AAAA".into(),
        },
    });
    for (n, is_error) in [(1, true), (2, false)] {
        let name = format!("t{n}");
        scene.pairing.announce(&id(&name));
        assert_eq!(scene.call(n, &name).await, Arrived::Waits);
        scene.give(ToolResult {
            id: id(&name),
            content: vec![ResultBlock::Text { text: "no".into() }, image.clone()],
            is_error,
        });
        let result = scene.ends.got(n).await["result"].take();
        assert_eq!(result["isError"] == true, is_error);
        assert_eq!(
            result["content"],
            json!([{"type": "text", "text": "no"}, {"type": "image", "data": "AAAA", "mimeType": "image/png"}])
        );
    }
}

async fn bug_068_an_unknown_tool<E: Ends>() {
    let mut ends = E::open().await;
    let unknown = call(1, "t", &json!({})).replace("\"read\"", "\"mcp__turnpass__read\"");
    ends.send(&unknown).await;
    assert_eq!(ends.got(1).await["error"]["code"], -32602);
}

async fn bug_067_calls_that_cannot_be_paired<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    scene.pairing.announce(&id("t"));
    assert_eq!(scene.call(1, "t").await, Arrived::Waits);
    let no_id = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "read", "_meta": {"progressToken": "a text"}}});
    let no_meta =
        json!({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "read"}});
    for (n, message, wanted) in [
        (2, no_id.to_string(), Refusal::NoId),
        (3, no_meta.to_string(), Refusal::NoId),
        (4, call(4, "t", &json!({})), Refusal::Duplicate),
    ] {
        scene.ends.send(&message).await;
        let (call, to) = scene.heard_call().await;
        let Arrived::Refused(refusal, answer) = scene.pairing.arrived(call.tool_use_id, to) else {
            panic!("{message}");
        };
        assert_eq!(refusal, wanted);
        scene.ends.answer(answer);
        assert_eq!(scene.ends.got(n).await["result"]["isError"], true);
    }
    scene.give(ToolResult::text(id("t"), "good"));
    assert_eq!(text_of(&scene.ends.got(1).await), "good");
    assert!(matches!(
        scene.call(5, "t").await,
        Arrived::Refused(Refusal::Retired(Ended::Answered), _)
    ));
}

async fn the_end_of_a_turn<E: Ends>() {
    let mut scene = Scene::<E>::open().await;
    scene.pairing.announce(&id("a"));
    assert_eq!(scene.call(1, "a").await, Arrived::Waits);
    assert_eq!(scene.call(2, "b").await, Arrived::Parked);
    let closed = scene.pairing.close();
    assert_eq!(closed.answers.len(), 2);
    for answer in closed.answers {
        scene.ends.answer(answer);
    }
    for n in [1, 2] {
        assert!(text_of(&scene.ends.got(n).await).contains("over"));
    }
}

macro_rules! over_both {
    ($($scene:ident)*) => {
        mod in_band_carrier {
            $(#[tokio::test] async fn $scene() { super::$scene::<super::InBand>().await; })*
        }
        mod http_carrier {
            $(#[tokio::test] async fn $scene() { super::$scene::<super::Http>().await; })*
        }
    };
}

over_both! {
    the_handshake_of_the_cli
    an_early_call
    a_result_before_its_call
    bug_067_parallel_calls_answered_in_any_order
    a_cancelled_call
    bug_072_a_big_result
    unicode_both_ways
    failed_results_and_images
    bug_068_an_unknown_tool
    bug_067_calls_that_cannot_be_paired
    the_end_of_a_turn
}
