//! What every carrier has to do. Here: one list of exchanges over the bare core, in-band, stdio and HTTP.
//!
//! | module | what |
//! | --- | --- |
//! | [`answering`] | calls that the host answers, in-band and over HTTP |
//! | [`client`] | the CLI's end of an HTTP carrier |

mod answering;
pub(super) mod client;

use std::io::Cursor;
use std::path::Path;

use client::Client;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use crate::conversation::{ToolInput, ToolResult, ToolUseId};
use crate::request::Tool;
use crate::tools::http::HttpCarrier;
use crate::tools::mcp::{Call, Occurrence, Policy, RpcId, Server};
use crate::tools::stdio::{self, Markers};
use crate::tools::{Catalogue, in_band};

/// The tools of these tests.
pub(super) fn catalogue() -> Catalogue {
    let tool = |name: &str| Tool {
        name: name.into(),
        description: "d".into(),
        input_schema: json!({"type": "object"}),
    };
    Catalogue::build(&[tool("read"), tool("fs.write")]).unwrap()
}

/// A message that the CLI sends, and what it gets: `None` for nothing.
fn exchanges() -> Vec<(Value, Option<Value>)> {
    let catalogue = catalogue();
    let list: Value = serde_json::from_str(catalogue.tools_list_json().get()).unwrap();
    let result =
        |id: Value, result: Value| Some(json!({"jsonrpc": "2.0", "id": id, "result": result}));
    let error = |id: Value, code: i32, message: &str| {
        Some(json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}))
    };
    let ask = |id: Value, method: &str, params: Value| json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
    let hello = |version: &str| {
        json!({
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "turnpass", "version": env!("CARGO_PKG_VERSION")},
        })
    };
    let unknown = "method not found";
    vec![
        // In the order of CLI 2.1.332.
        (
            ask(
                json!("server-discover-probe-1"),
                "server/discover",
                json!({}),
            ),
            error(json!("server-discover-probe-1"), -32601, unknown),
        ),
        (
            ask(
                json!(0),
                "initialize",
                json!({"protocolVersion": "2025-11-25", "capabilities": {"roots": {}}, "clientInfo": {"name": "claude-code"}}),
            ),
            result(json!(0), hello("2025-11-25")),
        ),
        (
            json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
            None,
        ),
        (
            ask(json!(1), "tools/list", json!({})),
            result(json!(1), list.clone()),
        ),
        // Older and unknown versions of the protocol.
        (
            ask(
                json!(2),
                "initialize",
                json!({"protocolVersion": "2024-11-05"}),
            ),
            result(json!(2), hello("2024-11-05")),
        ),
        (
            ask(
                json!(3),
                "initialize",
                json!({"protocolVersion": "2099-01-01"}),
            ),
            result(json!(3), hello("2025-11-25")),
        ),
        (
            ask(json!(4), "initialize", json!([])),
            result(json!(4), hello("2025-11-25")),
        ),
        // The rest.
        (
            ask(json!("p"), "ping", json!({})),
            result(json!("p"), json!({})),
        ),
        (
            json!({"jsonrpc": "2.0", "id": -5, "method": "tools/list"}),
            result(json!(-5), list),
        ),
        (
            ask(json!(6), "tools/list", json!({"cursor": "x"})),
            error(json!(6), -32602, "unknown cursor"),
        ),
        (
            ask(json!(7), "tools/list", json!(7)),
            error(json!(7), -32602, "params are not an object"),
        ),
        (
            ask(json!(8), "resources/list", json!({})),
            error(json!(8), -32601, unknown),
        ),
        (
            ask(json!(9), "prompts/list", json!({})),
            error(json!(9), -32601, unknown),
        ),
        (
            json!({"jsonrpc": "2.0", "method": "notifications/anything", "params": [1]}),
            None,
        ),
        (json!({"jsonrpc": "2.0", "id": 10, "result": {}}), None),
        (
            json!({"jsonrpc": "1.0", "id": 11, "method": "ping"}),
            error(json!(11), -32600, "not JSON-RPC 2.0"),
        ),
        (
            json!({"jsonrpc": "2.0", "id": true, "method": "ping"}),
            error(json!(null), -32600, "the id is no text or number"),
        ),
        (
            json!([]),
            error(json!(null), -32600, "not a JSON-RPC 2.0 message"),
        ),
        (
            json!({}),
            error(json!(null), -32600, "not a JSON-RPC 2.0 message"),
        ),
        (
            json!("ping"),
            error(json!(null), -32600, "not a JSON-RPC 2.0 message"),
        ),
    ]
}

fn call(params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": "c", "method": "tools/call", "params": params})
}

/// Brings messages to a server and collects what comes back.
trait Carrier {
    fn exchange(&self, server: Server, messages: &[Value]) -> Vec<Option<Value>>;
}

struct Bare;
struct InBand;
struct Stdio;
struct Http;

impl Carrier for Bare {
    fn exchange(&self, mut server: Server, messages: &[Value]) -> Vec<Option<Value>> {
        let answer = |bytes: Vec<u8>| serde_json::from_slice(&bytes).unwrap();
        messages
            .iter()
            .map(|m| server.handle(m.to_string().as_bytes()).message.map(answer))
            .collect()
    }
}

impl Carrier for InBand {
    fn exchange(&self, mut server: Server, messages: &[Value]) -> Vec<Option<Value>> {
        let mut out = Vec::new();
        for (n, message) in messages.iter().enumerate() {
            let id = format!("r\"{n}");
            let line = json!({"type": "control_request", "request_id": id, "request": {
                "subtype": "mcp_message", "server_name": "turnpass", "message": message,
            }})
            .to_string();
            let reply = in_band::unwrap(line.as_bytes())
                .unwrap()
                .handle(&mut server);
            let bytes = reply.message.unwrap();
            assert!(!bytes.contains(&b'\n'));
            let reply: Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(reply["type"], "control_response");
            assert_eq!(reply["response"]["subtype"], "success");
            assert_eq!(reply["response"]["request_id"], id);
            let inner = reply["response"]["response"]["mcp_response"].clone();
            // A notification's control request gets an empty result.
            let empty = json!({"jsonrpc": "2.0", "id": 0, "result": {}});
            out.push((inner != empty).then_some(inner));
        }
        out
    }
}

impl Carrier for Stdio {
    fn exchange(&self, mut server: Server, messages: &[Value]) -> Vec<Option<Value>> {
        messages
            .iter()
            .map(|message| {
                let lines = served(
                    &mut server,
                    format!("{message}\r\n").into_bytes(),
                    Markers::default(),
                );
                assert!(lines.len() <= 1);
                lines.into_iter().next()
            })
            .collect()
    }
}

impl Carrier for Http {
    fn exchange(&self, server: Server, messages: &[Value]) -> Vec<Option<Value>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (carrier, _occurrences) = HttpCarrier::start(server, &TaskTracker::new())
                .await
                .unwrap();
            let client = Client::new(&carrier);
            let mut out = Vec::new();
            for message in messages {
                let mut got = client.post(&message.to_string()).await;
                let answer = match got.status {
                    202 => None,
                    200 => got.next().await,
                    other => panic!("{other}: {message}"),
                };
                assert_eq!(got.next().await, None);
                out.push(answer);
            }
            out
        })
    }
}

fn served(server: &mut Server, input: Vec<u8>, markers: Markers<'_>) -> Vec<Value> {
    let mut out = Vec::new();
    stdio::serve_stream(&mut Cursor::new(input), &mut out, server, markers).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

const CARRIERS: [&dyn Carrier; 4] = [&Bare, &InBand, &Stdio, &Http];
const POLICIES: [Policy; 3] = [Policy::Answering, Policy::Proposing, Policy::Inert];

#[test]
fn bug_074_every_carrier_and_policy_answers_the_same_list() {
    let (messages, wanted): (Vec<_>, Vec<_>) = exchanges().into_iter().unzip();
    for policy in POLICIES {
        for (n, carrier) in CARRIERS.iter().enumerate() {
            let got = carrier.exchange(Server::new(&catalogue(), policy), &messages);
            for ((message, got), wanted) in messages.iter().zip(got).zip(&wanted) {
                assert_eq!(&got, wanted, "carrier {n}, {policy:?}: {message}");
            }
        }
    }
}

#[test]
fn a_proposing_server_takes_every_call_for_a_violation() {
    for params in [
        json!({"name": "read", "arguments": {}}),
        json!({"name": "no such tool"}),
        json!({}),
        json!(7),
    ] {
        for carrier in CARRIERS {
            let server = Server::new(&catalogue(), Policy::Proposing);
            let got = carrier.exchange(server, &[call(params.clone())]);
            let error = &got[0].as_ref().unwrap()["error"];
            assert_eq!(error["code"], -32001);
            assert!(
                error["message"]
                    .as_str()
                    .unwrap()
                    .contains("nothing was executed")
            );
        }
        let name = params["name"].as_str().unwrap_or_default().to_owned();
        let reply = Server::new(&catalogue(), Policy::Proposing)
            .handle(call(params).to_string().as_bytes());
        assert_eq!(reply.occurrence, Occurrence::Violation(name));
    }
}

#[test]
fn an_inert_server_says_that_the_host_runs_tools() {
    for carrier in CARRIERS {
        let server = Server::new(&catalogue(), Policy::Inert);
        let got = carrier.exchange(server, &[call(json!({"name": "read"}))]);
        let result = &got[0].as_ref().unwrap()["result"];
        assert_eq!(result["isError"], true);
        assert!(
            result["content"][0]["text"]
                .as_str()
                .unwrap()
                .contains("The host program runs")
        );
    }
}

#[test]
fn bug_067_an_answering_server_leaves_the_call_to_the_host() {
    let mut server = Server::new(&catalogue(), Policy::Answering);
    let params = json!({
        "name": "fs_write_51060fc0",
        "arguments": {"n": 1},
        "_meta": {"claudecode/toolUseId": "toolu_1", "progressToken": 7},
    });
    let alias = catalogue().tools()[0].alias.clone();
    let mut params = params;
    params["name"] = json!(alias);
    let reply = server.handle(call(params.clone()).to_string().as_bytes());
    assert_eq!(reply.message, None);
    let Occurrence::Call(got) = reply.occurrence else {
        panic!("{:?}", reply.occurrence);
    };
    let input = ToolInput::from_streamed(r#"{"n":1}"#).unwrap();
    assert_eq!(
        (
            got.tool.as_str(),
            got.tool_use_id.as_ref(),
            &got.arguments,
            got.progress_token.as_deref()
        ),
        (
            "fs.write",
            Some(&ToolUseId("toolu_1".into())),
            &input,
            Some("7")
        )
    );
    let answer = Server::answer(
        &got.rpc_id,
        &ToolResult::text(ToolUseId("toolu_1".into()), "done"),
    );
    assert_eq!(
        serde_json::from_slice::<Value>(&answer).unwrap(),
        json!({"jsonrpc": "2.0", "id": "c", "result": {"content": [{"type": "text", "text": "done"}]}})
    );
    let failed: Value = serde_json::from_slice(&Server::fail(&got.rpc_id, "no \"x\"")).unwrap();
    assert_eq!(
        failed["result"],
        json!({"content": [{"type": "text", "text": "no \"x\""}], "isError": true})
    );
    let progress: Value = serde_json::from_slice(&Server::progress("7", 3)).unwrap();
    assert_eq!(
        progress["params"],
        json!({"progressToken": 7, "progress": 3})
    );

    // In-band the answer goes back to the control request.
    let line = json!({"type": "control_request", "request_id": "r1", "request": {
        "subtype": "mcp_message", "server_name": "turnpass", "message": call(params),
    }})
    .to_string();
    let wrapped = in_band::unwrap(line.as_bytes()).unwrap();
    let reply = wrapped.handle(&mut server);
    assert_eq!(reply.message, None);
    let back: Value =
        serde_json::from_slice(&in_band::wrap(&wrapped.return_address(), Some(&answer))).unwrap();
    assert_eq!(back["response"]["request_id"], "r1");
    assert_eq!(back["response"]["response"]["mcp_response"]["id"], "c");
}

#[test]
fn bug_067_a_call_without_an_id_is_told_apart() {
    let mut server = Server::new(&catalogue(), Policy::Answering);
    for (params, wanted) in [
        (json!({"name": "read"}), None),
        (
            json!({"name": "read", "_meta": {}, "arguments": null}),
            None,
        ),
        (
            json!({"name": "read", "_meta": {"claudecode/toolUseId": "t"}}),
            Some("t"),
        ),
    ] {
        let reply = server.handle(call(params).to_string().as_bytes());
        let Occurrence::Call(Call {
            tool_use_id,
            arguments,
            ..
        }) = reply.occurrence
        else {
            panic!("{:?}", reply.occurrence);
        };
        assert_eq!(tool_use_id, wanted.map(|id| ToolUseId(id.into())));
        assert_eq!(arguments, ToolInput::empty());
    }
}

#[test]
fn bug_068_a_call_of_no_tool_of_ours_is_refused_at_once() {
    for params in [
        json!({"name": "bash"}),
        json!({"name": "mcp__turnpass__read"}),
        json!({"name": ""}),
        json!({}),
        json!({"name": "read", "arguments": [1]}),
        json!({"name": 5}),
    ] {
        for carrier in CARRIERS {
            let server = Server::new(&catalogue(), Policy::Answering);
            let got = carrier.exchange(server, &[call(params.clone())]);
            assert_eq!(
                got[0].as_ref().unwrap()["error"]["code"],
                -32602,
                "{params}"
            );
        }
    }
}

#[test]
fn a_cancelled_call_and_a_listing_are_told() {
    let mut server = Server::new(&catalogue(), Policy::Answering);
    let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "c", "reason": "x"}});
    let reply = server.handle(cancelled.to_string().as_bytes());
    let Occurrence::Cancelled(id) = reply.occurrence else {
        panic!("{:?}", reply.occurrence);
    };
    assert_eq!(id.as_json(), "\"c\"");
    let called = server.handle(call(json!({"name": "read"})).to_string().as_bytes());
    let same =
        |id: &RpcId| matches!(&called.occurrence, Occurrence::Call(call) if call.rpc_id == *id);
    assert!(same(&id));
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    let reply = server.handle(list.to_string().as_bytes());
    assert_eq!(reply.occurrence, Occurrence::Listed);
}

#[test]
fn in_band_takes_its_own_messages_only() {
    for other in [
        json!({"type": "control_request", "request_id": "r", "request": {"subtype": "can_use_tool"}}),
        json!({"type": "assistant", "message": {}}),
        json!({"type": "control_request", "request_id": "r", "request": {"subtype": "mcp_message"}}),
    ] {
        assert!(
            in_band::unwrap(other.to_string().as_bytes()).is_none(),
            "{other}"
        );
    }
    assert!(in_band::unwrap(b"{").is_none());
    let line = json!({"type": "control_request", "request_id": "r", "request": {
        "subtype": "mcp_message", "server_name": "oth\"er", "message": {"jsonrpc": "2.0", "id": 1, "method": "ping"},
    }})
    .to_string();
    let reply = in_band::unwrap(line.as_bytes())
        .unwrap()
        .handle(&mut Server::new(&catalogue(), Policy::Answering));
    let reply: Value = serde_json::from_slice(&reply.message.unwrap()).unwrap();
    assert_eq!(reply["response"]["subtype"], "error");
    assert_eq!(reply["response"]["request_id"], "r");
    assert!(reply["response"]["error"].as_str().unwrap().contains("oth"));
}

#[test]
fn stdio_makes_its_markers_when_it_is_true() {
    let dir = tempfile::tempdir().unwrap();
    let (ready, violation) = (dir.path().join("ready"), dir.path().join("violation"));
    let markers = Markers {
        ready: Some(&ready),
        violation: Some(&violation),
    };
    let mut server = Server::new(&catalogue(), Policy::Proposing);
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    served(&mut server, ping.into(), markers);
    assert!(!ready.exists() && !violation.exists());
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    served(&mut server, format!("{list}\n{list}\n").into(), markers);
    assert!(ready.exists() && !violation.exists());
    served(
        &mut server,
        call(json!({"name": "read"})).to_string().into(),
        markers,
    );
    assert!(violation.exists());
    assert_eq!(std::fs::metadata(&violation).unwrap().len(), 0);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(&ready).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    // A marker that cannot be made ends the server: its host must not wait for it in vain.
    let nowhere = dir.path().join("no/such/dir");
    let markers = Markers {
        ready: Some(&nowhere),
        violation: None,
    };
    let mut out = Vec::new();
    assert!(stdio::serve_stream(&mut Cursor::new(list), &mut out, &mut server, markers).is_err());
}

#[test]
fn stdio_skips_blank_lines_and_refuses_long_and_broken_ones() {
    let mut server = Server::new(&catalogue(), Policy::Inert);
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let long = "x".repeat(stdio::LINE_BYTES + 1);
    let fits = format!("{ping}{}", " ".repeat(stdio::LINE_BYTES - ping.len()));
    let input = format!("\n  \r\n{ping}\n{long}\n{fits}\n{{\n{ping}");
    let out = served(&mut server, input.into(), Markers::default());
    let codes: Vec<_> = out
        .iter()
        .map(|reply| reply["error"]["code"].as_i64())
        .collect();
    assert_eq!(codes, [None, Some(-32600), None, Some(-32700), None]);
    assert_eq!(
        served(&mut server, long.into(), Markers::default()).len(),
        1
    );
    assert!(served(&mut server, Vec::new(), Markers::default()).is_empty());
}

#[test]
fn stdio_does_not_start_without_a_good_catalogue() {
    use crate::error::ErrorCode;
    use crate::tools::stdio::{Args, serve};

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalogue.json");
    let args = |policy, path: &Path| Args {
        catalogue: path.into(),
        policy,
        ready: None,
        violation: None,
    };
    let fails = |args: &Args| serve(args).unwrap_err().code();
    assert_eq!(fails(&args(Policy::Inert, &path)), ErrorCode::McpStartup);
    std::fs::write(&path, "{}").unwrap();
    assert_eq!(fails(&args(Policy::Inert, &path)), ErrorCode::McpStartup);
    std::fs::write(&path, catalogue().file_json()).unwrap();
    assert_eq!(
        fails(&args(Policy::Answering, &path)),
        ErrorCode::McpStartup
    );
}

proptest! {
    #[test]
    fn whatever_comes_gets_one_json_line_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for policy in POLICIES {
            let reply = Server::new(&catalogue(), policy).handle(&bytes);
            let message = reply.message.unwrap();
            prop_assert!(!message.contains(&b'\n'));
            let error: Value = serde_json::from_slice(&message).unwrap();
            prop_assert!(error["error"]["code"].is_i64());
        }
    }

    #[test]
    fn any_id_comes_back_as_it_was(id in "[^\\p{C}]{0,20}", number in any::<i64>()) {
        for id in [json!(id), json!(number)] {
            let ping = json!({"jsonrpc": "2.0", "id": id, "method": "ping"}).to_string();
            let reply = Server::new(&catalogue(), Policy::Inert).handle(ping.as_bytes());
            let reply: Value = serde_json::from_slice(&reply.message.unwrap()).unwrap();
            prop_assert_eq!(&reply["id"], &id);
        }
    }
}
