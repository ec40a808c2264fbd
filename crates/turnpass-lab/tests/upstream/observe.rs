//! What the upstream sees of its clients, and its own life.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use async_compression::tokio::write::GzipEncoder;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use turnpass_lab::scenario::Reply;
use turnpass_lab::upstream::{
    Authority, ClosedBy, Ending, Options, StartError, Upstream, WaitTimeout,
};

use crate::support::*;

#[tokio::test]
async fn a_request_is_recorded_byte_for_byte() {
    let upstream = start();
    let body = "{\"model\":\"m\", \"max_tokens\":1,\n\"messages\":[{\"role\":\"user\",\"content\":\"\\u00e9\"}]}";
    let url = format!("{}/v1/messages?beta=true", upstream.url());
    client()
        .post(url)
        .header("X-Own", "a  b")
        .body(body)
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let recorded = upstream
        .wait_for("the end", |each| each.reply.ending.is_some())
        .await
        .unwrap();
    assert_eq!((recorded.number, recorded.connection), (1, 1));
    assert_eq!(
        (recorded.method.as_str(), recorded.path.as_str()),
        ("POST", "/v1/messages")
    );
    assert_eq!(recorded.query.as_deref(), Some("beta=true"));
    assert_eq!(recorded.header("x-own"), Some("a  b"));
    assert_eq!(&recorded.body[..], body.as_bytes());
    assert_eq!(recorded.field("/messages/0/content"), Some(&json!("é")));
    let reply = recorded.reply;
    assert_eq!(reply.status, Some(200));
    let instants = [
        Some(recorded.arrived_at),
        recorded.body_complete_at,
        reply.head_at,
        reply.first_byte_at,
        reply.last_byte_at,
    ];
    assert!(instants.is_sorted(), "{instants:?}");
    assert!(matches!(reply.ending, Some(Ending::Complete(_))));
}

#[tokio::test]
async fn events_carry_the_instants_of_their_writing() {
    let upstream = start();
    stream(&upstream, &ask("[[text-size 40]] [[chunk 10 ms 5]]")).await;
    let recorded = upstream
        .wait_for("the end", |each| each.reply.ending.is_some())
        .await
        .unwrap();
    let names: Vec<&str> = recorded
        .reply
        .events
        .iter()
        .map(|event| &*event.name)
        .collect();
    assert_eq!(names.len(), 9);
    assert_eq!(
        names[..3],
        [
            "message_start",
            "content_block_start",
            "content_block_delta"
        ]
    );
    for pair in recorded.reply.events.windows(2) {
        assert!(pair[1].at > pair[0].at);
    }
    let span = recorded.reply.events[8].at - recorded.reply.events[0].at;
    assert!(span >= Duration::from_millis(8 * 5 - 2), "{span:?}");
}

#[tokio::test]
async fn a_dropped_stream_closes_the_connection_and_is_seen() {
    let upstream = start();
    let mut reply = post(&upstream, &ask("[[say a]] [[stall closed]]")).await;
    reply.chunk().await.unwrap().unwrap();
    assert_eq!(upstream.connections().open(), 1);
    drop(reply);
    let recorded = upstream
        .wait_for("leaving", |each| each.client_closed_at().is_some())
        .await
        .unwrap();
    let connections = upstream
        .wait_connections("none open", |all| all.open() == 0)
        .await
        .unwrap();
    let closed = connections.closed_by_client();
    assert_eq!(closed.len(), 1);
    assert_eq!(closed[0].0, recorded.connection);
    assert!(closed[0].1 >= recorded.client_closed_at().unwrap());
}

#[tokio::test]
async fn a_client_that_resets_is_seen_while_writing_and_while_silent() {
    let upstream = start();
    let texts = [
        "[[stall closed]]",
        "[[delay 60000]]",
        "[[text-size 20000000]]",
    ];
    for (number, text) in (1..).zip(texts) {
        let mut stream = TcpStream::connect(upstream.addr()).await.unwrap();
        send(&mut stream, &ask(text).to_string()).await;
        upstream
            .wait_for("the request", |each| each.connection == number)
            .await
            .unwrap();
        stream.set_zero_linger().unwrap();
        drop(stream);
        let closed = upstream
            .wait_connections("none open", |all| all.open() == 0)
            .await
            .unwrap();
        let last = closed.all.last().unwrap();
        assert_eq!(
            last.closed.map(|(_, by)| by),
            Some(ClosedBy::ClientReset),
            "{text}"
        );
    }
}

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let upstream = start();
    let client = client();
    for text in ["a", "b", "c"] {
        let url = format!("{}/v1/messages", upstream.url());
        let reply = client
            .post(url)
            .body(ask(text).to_string())
            .send()
            .await
            .unwrap();
        reply.text().await.unwrap();
    }
    let connections: Vec<u64> = upstream
        .requests()
        .iter()
        .map(|each| each.connection)
        .collect();
    assert_eq!(connections, [1, 1, 1]);
    assert_eq!(upstream.connections().open(), 1);
    drop(client);
    let all = upstream
        .wait_connections("closed", |all| all.open() == 0)
        .await
        .unwrap();
    assert_eq!(all.all[0].closed.map(|(_, by)| by), Some(ClosedBy::Client));
}

#[tokio::test]
async fn bodies_in_chunks_in_gzip_and_after_continue() {
    let upstream = start();
    let body = ask("[[say ok]]").to_string();
    let mut stream = TcpStream::connect(upstream.addr()).await.unwrap();
    let head = "POST /v1/messages HTTP/1.1\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).await.unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    for part in body.as_bytes().chunks(10) {
        let chunk = [format!("{:X}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat();
        stream.write_all(&chunk).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    assert!(reply.contains("\"text\":\"ok\""));
    assert_eq!(&upstream.requests()[0].body[..], body.as_bytes());

    let mut gzip = GzipEncoder::new(Vec::new());
    gzip.write_all(body.as_bytes()).await.unwrap();
    gzip.shutdown().await.unwrap();
    let url = format!("{}/v1/messages", upstream.url());
    let zipped = client()
        .post(url)
        .header("content-encoding", "gzip")
        .body(gzip.into_inner());
    assert!(
        zipped
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
            .contains("\"text\":\"ok\"")
    );
    assert_ne!(&upstream.requests()[1].body[..], body.as_bytes());
    assert_eq!(upstream.requests()[1].field("/stream"), Some(&json!(true)));
}

#[tokio::test]
async fn a_request_that_stops_in_its_body_is_recorded_as_such() {
    let upstream = start();
    let mut stream = TcpStream::connect(upstream.addr()).await.unwrap();
    let head = "POST /v1/messages HTTP/1.1\r\ncontent-length: 100\r\n\r\n{\"model\"";
    stream.write_all(head.as_bytes()).await.unwrap();
    drop(stream);
    let recorded = &upstream.wait_requests(1).await.unwrap()[0];
    assert_eq!(recorded.body_complete_at, None);
    assert!(recorded.client_closed_at().is_some());
}

#[tokio::test]
async fn what_is_no_http_is_answered_400_and_closed() {
    let upstream = start();
    for wrong in [
        "NONSENSE\r\n\r\n",
        "POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(upstream.addr()).await.unwrap();
        stream.write_all(wrong.as_bytes()).await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{reply}");
    }
}

#[tokio::test]
async fn two_requests_written_at_once_are_answered_in_order() {
    let upstream = start();
    let mut stream = TcpStream::connect(upstream.addr()).await.unwrap();
    send(&mut stream, &ask("[[say first]]").to_string()).await;
    send(&mut stream, &ask("[[say second]]").to_string()).await;
    let mut got = String::new();
    while got.matches("0\r\n\r\n").count() < 2 {
        let mut part = vec![0; 4096];
        let read = stream.read(&mut part).await.unwrap();
        assert_ne!(read, 0);
        got.push_str(&String::from_utf8_lossy(&part[..read]));
    }
    assert!(got.find("\"first\"").unwrap() < got.find("\"second\"").unwrap());
}

#[tokio::test]
async fn recordings_are_whole_private_and_without_credentials() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep").join("recording");
    let upstream = Upstream::start(Options {
        record: Some(path.clone()),
        ..Options::default()
    })
    .unwrap();
    let url = format!("{}/v1/messages", upstream.url());
    let body = ask("[[say kept]]").to_string();
    let asked = client()
        .post(url)
        .header("authorization", "Bearer made-up")
        .body(body.clone());
    let reply = asked.send().await.unwrap().text().await.unwrap();
    drop(upstream);
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let read = |name: &str| {
        assert_eq!(mode(&path.join(name)), 0o600);
        std::fs::read_to_string(path.join(name)).unwrap()
    };
    assert_eq!(read("0001-request.body"), body);
    assert_eq!(read("0001-reply.body"), reply);
    let about = read("0001-request.json");
    assert!(!about.contains("made-up"));
    let about: Value = serde_json::from_str(&about).unwrap();
    assert_eq!(about["reply"]["ending"], "complete");
}

#[tokio::test]
async fn dropping_it_stops_everything() {
    // An address of its own, so that no other test can take the port over.
    let upstream = Upstream::start(Options {
        addr: "127.0.0.77:0".parse().unwrap(),
        ..Options::default()
    })
    .unwrap();
    let addr = upstream.addr();
    let mut stalled = post(&upstream, &ask("[[say a]] [[stall closed]]")).await;
    let mut idle = TcpStream::connect(addr).await.unwrap();
    upstream
        .wait_connections("both", |all| all.open() == 2)
        .await
        .unwrap();
    drop(upstream);
    assert!(TcpStream::connect(addr).await.is_err());
    let rest = async { while let Ok(Some(_)) = stalled.chunk().await {} };
    tokio::time::timeout(Duration::from_secs(10), rest)
        .await
        .unwrap();
    assert!(matches!(idle.read(&mut [0; 1]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn a_gate_holds_until_it_is_released() {
    let upstream = start();
    let mut reply = post(&upstream, &ask("[[say a]] [[hold go]] [[say b]]")).await;
    let mut text = String::new();
    while !text.contains("content_block_stop") {
        text.push_str(&String::from_utf8_lossy(
            &reply.chunk().await.unwrap().unwrap(),
        ));
    }
    assert!(!text.contains("\"b\""));
    upstream.release("go");
    while let Some(chunk) = reply.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.contains("\"b\"") && text.contains("message_stop"));
}

#[tokio::test]
async fn a_wait_ends_and_says_what_was_seen() {
    let upstream = start();
    post(&upstream, &ask("x")).await.text().await.unwrap();
    let wait = upstream.wait_for_within("a PUT", Duration::from_millis(20), |each| {
        each.method == "PUT"
    });
    let WaitTimeout { what, seen, .. } = wait.await.unwrap_err();
    assert_eq!(what, "a PUT");
    assert!(
        seen.starts_with("1 requests [POST /v1/messages -> 200"),
        "{seen}"
    );
}

#[tokio::test]
async fn starting_fails_with_a_reason() {
    let taken = start();
    let options = |addr| Options {
        addr,
        ..Options::default()
    };
    let error = Upstream::start(options(taken.addr())).unwrap_err();
    assert!(matches!(error, StartError::Bind { .. }), "{error}");
    let error = Upstream::start(options("0.0.0.0:0".parse().unwrap())).unwrap_err();
    assert!(matches!(error, StartError::NotLoopback(_)), "{error}");
}

#[tokio::test]
async fn tls_with_a_throw_away_authority() {
    let authority = Authority::new(["api.anthropic.com", "127.0.0.1"]).unwrap();
    let upstream = Upstream::start(Options {
        tls: Some(authority.server_config()),
        ..Options::default()
    })
    .unwrap();
    assert!(upstream.url().starts_with("https://127.0.0.1:"));
    let dir = tempfile::tempdir().unwrap();
    let ca = std::fs::read(authority.write_ca(dir.path()).unwrap()).unwrap();
    client();
    let client = reqwest::Client::builder()
        .no_proxy()
        .tls_certs_only([reqwest::Certificate::from_pem(&ca).unwrap()])
        .resolve("api.anthropic.com", upstream.addr())
        .build()
        .unwrap();
    for host in ["api.anthropic.com", "127.0.0.1"] {
        let url = format!("https://{host}:{}/v1/messages", upstream.addr().port());
        let reply = client
            .post(url)
            .body(ask("[[say over TLS]]").to_string())
            .send()
            .await
            .unwrap();
        assert!(text_of(&events(&reply.text().await.unwrap())).contains("over TLS"));
    }
    let url = format!("https://127.0.0.1:{}/v1/messages", upstream.addr().port());
    let cut = client
        .post(url)
        .body(ask("[[say x]] [[cut rst]]").to_string())
        .send()
        .await;
    assert!(match cut {
        Ok(reply) => reply.text().await.is_err(),
        Err(_) => true,
    });
    let refused = reqwest::Client::builder()
        .no_proxy()
        .tls_certs_only([])
        .build()
        .unwrap();
    assert!(refused.get(upstream.url()).send().await.is_err());
    let all = upstream
        .wait_connections("the refused one closed", |all| {
            all.all.len() == 3 && all.open() <= 1
        })
        .await;
    all.unwrap();
}

#[tokio::test]
async fn sixty_four_streams_at_once_keep_their_pace() {
    let upstream = Arc::new(start());
    let mut asking = tokio::task::JoinSet::new();
    let client = client();
    for _ in 0..64 {
        let url = format!("{}/v1/messages", upstream.url());
        let request = client
            .post(url)
            .body(ask("[[text-size 2000]] [[chunk 10 ms 5]]").to_string());
        asking.spawn(async move { request.send().await.unwrap().text().await.unwrap() });
    }
    while let Some(reply) = asking.join_next().await {
        assert_eq!(text_of(&events(&reply.unwrap())).len(), 2000);
    }
    assert_eq!(upstream.messages().len(), 64);
    for recorded in upstream.messages() {
        assert_eq!(recorded.reply.events.len(), 205);
    }
}

#[tokio::test]
async fn a_body_of_eight_mebibytes_is_served() {
    let upstream = start();
    let big = "word ".repeat((8 << 20) / 5);
    let mut request = ask(&big);
    request["messages"][0]["content"] =
        json!([{"type": "text", "text": big, "cache_control": {"type": "ephemeral"}}]);
    stream(&upstream, &request).await;
    stream(&upstream, &request).await;
    let requests = upstream.messages();
    assert_eq!(requests[0].body_bytes, requests[0].body.len() as u64);
    assert_eq!(requests[1].cache.as_ref().unwrap().share_read(), Some(1.0));
    upstream.enqueue(Reply::text("next"));
    assert_eq!(text_of(&stream(&upstream, &ask("x")).await), "next");
}
