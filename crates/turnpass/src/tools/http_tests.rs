use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;
use crate::conversation::ToolUseId;
use crate::tools::contract::catalogue;
use crate::tools::contract::client::{Client, within};
use crate::tools::mcp::Policy;

fn server() -> Server {
    Server::new(&catalogue(), Policy::Answering)
}

struct Stage {
    carrier: HttpCarrier,
    occurrences: mpsc::Receiver<Occurrence>,
    tasks: TaskTracker,
}

async fn stage() -> Stage {
    let tasks = TaskTracker::new();
    let (carrier, occurrences) = HttpCarrier::start(server(), &tasks).await.unwrap();
    Stage {
        carrier,
        occurrences,
        tasks,
    }
}

impl Stage {
    async fn called(&mut self) -> CallAddress {
        match within(self.occurrences.recv()).await.unwrap() {
            Occurrence::Call { to, .. } => to,
            other => panic!("{other:?}"),
        }
    }

    fn bearer(&self) -> String {
        self.carrier.shared.bearer.expose_str().to_owned()
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.carrier.port()))
            .await
            .unwrap()
    }

    /// Everything that comes back for these bytes.
    async fn raw(&self, request: &str) -> String {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // A refusal with unread bytes behind it may end in a reset; what came before it counts.
        let _ = within(stream.read_to_end(&mut answer)).await;
        String::from_utf8(answer).unwrap()
    }
}

fn call(id: u64) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {
        "name": "read", "_meta": {"claudecode/toolUseId": format!("t{id}"), "progressToken": id},
    }})
    .to_string()
}

fn result() -> ToolResult {
    ToolResult::text(ToolUseId("t1".into()), "done")
}

#[test]
fn bug_125_a_head_is_judged_before_its_body_is_read() {
    let bearer = Secret::new(*b"marker");
    let good = || {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, "127.0.0.1:4321".parse().unwrap());
        headers.insert(header::AUTHORIZATION, "Bearer marker".parse().unwrap());
        headers
    };
    let with = |name: header::HeaderName, value: &str| {
        let mut headers = good();
        headers.insert(name, value.parse().unwrap());
        headers
    };
    let without = |name: header::HeaderName| {
        let mut headers = good();
        headers.remove(name);
        headers
    };
    let twice = |name: header::HeaderName| {
        let mut headers = good();
        let value = headers[&name].clone();
        headers.append(name, value);
        headers
    };
    let too_long = (MESSAGE_BYTES + 1).to_string();
    let fits = MESSAGE_BYTES.to_string();
    for (method, path, headers, wanted) in [
        ("POST", "/mcp", good(), Ok(Asked::Message)),
        ("POST", "/mcp?x=1", good(), Ok(Asked::Message)),
        ("DELETE", "/mcp", good(), Ok(Asked::End)),
        (
            "POST",
            "/mcp",
            with(header::CONTENT_LENGTH, &fits),
            Ok(Asked::Message),
        ),
        ("GET", "/mcp", good(), Err(405)),
        ("OPTIONS", "/mcp", good(), Err(405)),
        ("PUT", "/mcp", good(), Err(405)),
        ("POST", "/", good(), Err(404)),
        ("POST", "/mcp/", good(), Err(404)),
        ("POST", "/mcp", without(header::AUTHORIZATION), Err(401)),
        ("GET", "/", without(header::AUTHORIZATION), Err(401)),
        (
            "POST",
            "/mcp",
            with(header::AUTHORIZATION, "Bearer markes"),
            Err(401),
        ),
        (
            "POST",
            "/mcp",
            with(header::AUTHORIZATION, "Bearer marker2"),
            Err(401),
        ),
        (
            "POST",
            "/mcp",
            with(header::AUTHORIZATION, "Bearer "),
            Err(401),
        ),
        (
            "POST",
            "/mcp",
            with(header::AUTHORIZATION, "marker"),
            Err(401),
        ),
        (
            "POST",
            "/mcp",
            with(header::AUTHORIZATION, "Basic marker"),
            Err(401),
        ),
        ("POST", "/mcp", twice(header::AUTHORIZATION), Err(401)),
        (
            "POST",
            "/mcp",
            with(header::ORIGIN, "https://evil.example"),
            Err(403),
        ),
        ("POST", "/mcp", with(header::ORIGIN, "null"), Err(403)),
        (
            "POST",
            "/mcp",
            with(header::ORIGIN, "http://127.0.0.1:4321"),
            Err(403),
        ),
        ("POST", "/mcp", with(header::HOST, "evil.example"), Err(403)),
        (
            "POST",
            "/mcp",
            with(header::HOST, "localhost:4321"),
            Err(403),
        ),
        (
            "POST",
            "/mcp",
            with(header::HOST, "127.0.0.1:4322"),
            Err(403),
        ),
        ("POST", "/mcp", without(header::HOST), Err(403)),
        ("POST", "/mcp", twice(header::HOST), Err(403)),
        (
            "POST",
            "/mcp",
            with(header::CONTENT_ENCODING, "gzip"),
            Err(415),
        ),
        (
            "POST",
            "/mcp",
            with(header::CONTENT_LENGTH, &too_long),
            Err(413),
        ),
    ] {
        let got = judge(
            4321,
            &bearer,
            &method.parse().unwrap(),
            &path.parse().unwrap(),
            &headers,
        );
        let wanted = wanted.map_err(|status| StatusCode::from_u16(status).unwrap());
        assert_eq!(got, wanted, "{method} {path} {headers:?}");
    }
}

#[tokio::test]
async fn bug_125_a_stranger_gets_nothing_over_the_socket() {
    let mut stage = stage().await;
    let bearer = stage.bearer();
    assert_eq!(bearer.len(), 64);
    let port = stage.carrier.port();
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let request = |method: &str, head: &str| {
        format!(
            "{method} /mcp HTTP/1.1\r\nconnection: close\r\n{head}content-length: {}\r\n\r\n{list}",
            list.len()
        )
    };
    let own = format!("host: 127.0.0.1:{port}\r\n");
    let shown = format!("authorization: Bearer {bearer}\r\n");
    let wrong = format!("authorization: Bearer {}\r\n", "0".repeat(64));
    let foreign = "host: evil.example\r\n";
    let page = "origin: https://evil.example\r\n";
    // The bound is looked at between two reads, so it has some play.
    let endless = format!("x: {}\r\n", "a".repeat(4 * loopback::HEAD_BYTES));
    for (request, status) in [
        (request("POST", &own), "401"),
        (request("POST", &format!("{own}{wrong}")), "401"),
        (request("POST", &format!("{foreign}{shown}")), "403"),
        (request("POST", &format!("{own}{shown}{page}")), "403"),
        (request("OPTIONS", &format!("{own}{page}")), "403"),
        (request("POST", &format!("{own}{shown}{endless}")), "431"),
    ] {
        let answer = stage.raw(&request).await;
        assert_eq!(answer.get(9..12), Some(status), "{answer}");
        for told in ["turnpass", "read", bearer.as_str(), "access-control"] {
            assert!(!answer.contains(told), "{told} in {answer}");
        }
    }
    let got = stage.raw(&request("GET", &format!("{own}{shown}"))).await;
    assert!(
        got.starts_with("HTTP/1.1 405") && got.contains("allow: POST, DELETE"),
        "{got}"
    );
    let got = stage
        .raw(&request("DELETE", &format!("{own}{shown}")))
        .await;
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    assert!(stage.occurrences.try_recv().is_err(), "nobody was heard");
    let got = stage.raw(&request("POST", &format!("{own}{shown}"))).await;
    assert!(
        got.starts_with("HTTP/1.1 200") && got.contains("read"),
        "{got}"
    );
    assert_eq!(stage.occurrences.try_recv(), Ok(Occurrence::Listed));
    let shown = format!(
        "{:?} {:?}",
        stage.carrier,
        stage.carrier.mcp_server_config()
    );
    assert!(!shown.contains(&bearer), "{shown}");
}

#[tokio::test]
async fn a_body_of_unknown_length_is_bounded_too() {
    let stage = stage().await;
    let mut stream = stage.connect().await;
    let head = format!(
        "POST /mcp HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nauthorization: Bearer {}\r\ntransfer-encoding: chunked\r\n\r\n",
        stage.carrier.port(),
        stage.bearer()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = [b"100000\r\n".as_slice(), &[b' '; 0x10_0000], b"\r\n"].concat();
    let (mut reader, mut writer) = stream.into_split();
    let writing = tokio::spawn(async move {
        // Ends when the carrier closes its end, or with one chunk more than it may take.
        for _ in 0..=MESSAGE_BYTES / 0x10_0000 {
            if writer.write_all(&chunk).await.is_err() {
                break;
            }
        }
        writer
    });
    let mut answer = [0; 12];
    within(reader.read_exact(&mut answer)).await.unwrap();
    assert_eq!(answer, *b"HTTP/1.1 400");
    within(writing).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn bug_061_a_waiting_call_shows_life_at_once_and_every_20_s() {
    let stage = stage().await;
    let begun = Instant::now();
    let mut open = stage
        .carrier
        .shared
        .wait(rpc_id(), Some("\"token\"".into()));
    let to = open.place.to;
    for n in 0..30u32 {
        let (beat, rest) = open.next().await;
        open = rest.unwrap();
        assert_eq!(begun.elapsed(), HEARTBEAT * n);
        let beat = String::from_utf8(beat.to_vec()).unwrap();
        let data = beat.strip_prefix("event: message\ndata: ").unwrap();
        let progress: Value = serde_json::from_str(data).unwrap();
        assert_eq!(
            progress["params"],
            json!({"progressToken": "token", "progress": n})
        );
        assert!(beat.ends_with("\n\n"));
    }
    assert!(stage.carrier.answer(to, &result()));
    let (last, rest) = open.next().await;
    assert!(rest.is_none());
    assert!(String::from_utf8(last.to_vec()).unwrap().contains("done"));
    assert_eq!(begun.elapsed(), HEARTBEAT * 29, "a result does not wait");
}

fn rpc_id() -> RpcId {
    let reply = server().handle(call(1).as_bytes());
    match reply.occurrence {
        mcp::Occurrence::Call(call) => call.rpc_id,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_answers_ends() {
    let mut stage = stage().await;
    let begun = Instant::now();
    let mut open = stage.carrier.shared.wait(rpc_id(), None);
    let to = open.place.to;
    let last = loop {
        match open.next().await {
            (beat, Some(rest)) => {
                assert!(
                    beat.starts_with(b": "),
                    "without a token there is no progress"
                );
                open = rest;
            }
            (last, None) => break last,
        }
    };
    assert_eq!(begun.elapsed(), CALL_TIMEOUT);
    assert!(
        String::from_utf8(last.to_vec())
            .unwrap()
            .contains("isError")
    );
    assert_eq!(stage.occurrences.try_recv(), Ok(Occurrence::Cancelled(to)));
    assert!(!stage.carrier.answer(to, &result()));
}

#[tokio::test]
async fn a_connection_that_is_gone_gives_up_its_call() {
    let mut stage = stage().await;
    let client = Client::new(&stage.carrier);
    let answer = client.post(&call(1)).await;
    let to = stage.called().await;
    assert_eq!(stage.carrier.waiting(), 1);
    drop((answer, client));
    assert_eq!(
        within(stage.occurrences.recv()).await,
        Some(Occurrence::Cancelled(to))
    );
    assert!(!stage.carrier.answer(to, &result()));
    assert_eq!(stage.carrier.waiting(), 0);
}

#[tokio::test]
async fn a_dropped_carrier_leaves_no_port_connection_or_task() {
    let mut stage = stage().await;
    let client = Client::new(&stage.carrier);
    let mut answer = client.post(&call(1)).await;
    assert_eq!(answer.next().await.unwrap()["params"]["progress"], 0);
    stage.called().await;
    let (mut idle, port) = (stage.connect().await, stage.carrier.port());
    drop(stage.carrier);
    stage.tasks.close();
    within(stage.tasks.wait()).await;
    assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
    let mut rest = Vec::new();
    let _ = within(idle.read_to_end(&mut rest)).await;
    assert!(rest.is_empty());
}

#[tokio::test]
async fn a_storm_of_strangers_does_not_keep_the_cli_out() {
    let mut stage = stage().await;
    let client = Client::new(&stage.carrier);
    let mut answer = client.post(&call(1)).await;
    let to = stage.called().await;
    let mut storm = Vec::new();
    for _ in 0..CONNECTIONS_LIMIT + 10 {
        storm.push(stage.connect().await);
    }
    let mut other = client.post(&call(2)).await;
    let other_to = stage.called().await;
    for (answer, to) in [(&mut answer, to), (&mut other, other_to)] {
        assert_eq!(answer.next().await.unwrap()["params"]["progress"], 0);
        assert!(stage.carrier.answer(to, &result()));
        let last = answer.next().await.unwrap();
        assert_eq!(last["result"]["content"][0]["text"], "done");
    }
}

#[tokio::test]
async fn a_call_that_the_host_does_not_take_fails_at_once() {
    let stage = stage().await;
    drop(stage.occurrences);
    let mut answer = Client::new(&stage.carrier).post(&call(1)).await;
    assert!(!answer.is_stream);
    assert_eq!(answer.next().await.unwrap()["result"]["isError"], true);
    assert_eq!(stage.carrier.waiting(), 0);
}

#[tokio::test]
async fn the_entry_of_the_configuration_leads_here() {
    let stage = stage().await;
    let McpServer::Http {
        url,
        bearer,
        timeout_ms,
    } = stage.carrier.mcp_server_config()
    else {
        panic!("no http entry");
    };
    assert_eq!(
        url,
        format!("http://127.0.0.1:{}/mcp", stage.carrier.port())
    );
    assert!(bearer.matches(stage.bearer().as_bytes()));
    assert_eq!(u128::from(timeout_ms), CALL_TIMEOUT.as_millis());
}
