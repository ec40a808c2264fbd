//! The relay's port is open to every program of the machine: only the CLI gets anything from it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::Value;
use turnpass::Transport as _;
use turnpass::event::Event;
use turnpass_lab::scenario::{Item, Reply};

use crate::bench::{BOUND, Bench, Setup, Spawned, drain, read_until, say, within};

/// Connections of the storm; the lane serves eight at a time.
const STORM: usize = 50;

/// Where a process's lane is, as its launch files say.
struct Door {
    port: u16,
    secret: String,
}

fn door(process: &Spawned) -> Door {
    let settings = std::fs::read_to_string(process.dir.join("settings.json")).unwrap();
    let settings: Value = serde_json::from_str(&settings).unwrap();
    let url = settings["env"]["ANTHROPIC_BASE_URL"].as_str().unwrap();
    let (port, secret) = url
        .strip_prefix("http://127.0.0.1:")
        .unwrap()
        .split_once('/')
        .unwrap();
    assert!(secret.len() >= 32, "{} characters", secret.len());
    Door {
        port: port.parse().unwrap(),
        secret: secret.to_owned(),
    }
}

impl Door {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream
    }

    /// The status that a request is answered with, and that the answer tells nothing.
    fn status(&self, request: &str) -> u16 {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer);
        for told in [
            &self.secret,
            "turnpass placeholder",
            "MADE-UP",
            "whole",
            "access-control-allow",
        ] {
            assert!(!answer.contains(told), "{told} in {answer}");
        }
        answer.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn attack(&self) {
        let Self { port, secret } = self;
        let own = format!("127.0.0.1:{port}");
        let wrong = "A".repeat(secret.len());
        let near = format!("{}A", &secret[..secret.len() - 1]);
        let post = |path: &str, host: &str, more: &str| {
            format!(
                "POST {path} HTTP/1.1\r\nhost: {host}\r\n{more}content-length: 2\r\nconnection: close\r\n\r\n{{}}"
            )
        };
        let get = |method: &str, path: &str| {
            format!("{method} {path} HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n")
        };
        let messages = format!("/{secret}/v1/messages");
        let attacks = [
            (post("/v1/messages", &own, ""), 404),
            (post(&format!("/{wrong}/v1/messages"), &own, ""), 404),
            (post(&format!("/{near}/v1/messages"), &own, ""), 404),
            (post(&format!("/{secret}/v1/models"), &own, ""), 404),
            (post(&messages, "evil.example", ""), 403),
            (post(&messages, &format!("localhost:{port}"), ""), 403),
            (
                post(&messages, &own, "origin: https://evil.example\r\n"),
                403,
            ),
            (post(&messages, &own, "host: evil.example\r\n"), 403),
            (get("GET", &messages), 404),
            (get("OPTIONS", &messages), 404),
            (get("GET", "/"), 404),
        ];
        for (request, status) in attacks {
            assert_eq!(self.status(&request), status, "{request}");
        }
    }
}

/// Refused without effect, during a generation and between two; a storm keeps nobody out (bug 125).
pub(crate) async fn attacked(setup: Setup) {
    let bench = Bench::new(&setup);
    bench.up.enqueue(Reply::content([
        Item::text("who"),
        Item::Hold {
            gate: "attacked".into(),
        },
        Item::text("le"),
    ]));
    let mut generation = bench.relay.generate(say("go on"));
    read_until(&mut generation, |event| matches!(event, Event::Text { .. })).await;
    let at = door(&bench.the_process());
    let mut storm: Vec<TcpStream> = (0..STORM).map(|_| at.connect()).collect();
    for half in storm.iter_mut().take(STORM / 2) {
        // A connection that was closed for another one may refuse this.
        let _ = half.write_all(b"POST /x HTTP/1.1\r\nhost: a\r\n");
    }
    at.attack();
    bench.up.release("attacked");
    let answer = drain(generation).await;
    assert_eq!(answer.done().message.text(), "whole");
    assert_eq!(answer.done().upstream_requests, 1);
    assert_eq!(
        answer.refused(),
        None,
        "a stranger's request is not the CLI's"
    );
    bench.settle().await;
    if setup.is_warm() {
        at.attack();
        let own = format!("127.0.0.1:{}", at.port);
        let known = format!(
            "POST /{}/v1/messages HTTP/1.1\r\nhost: {own}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}",
            at.secret
        );
        assert_eq!(at.status(&known), 410, "nobody waits for a request");
    }
    // The idle connections are still open.
    let (next, seen) = bench.ask(say("[[say whole]]")).await;
    assert_eq!(
        (next.text().as_str(), seen.len(), bench.count()),
        ("whole", 1, 2)
    );
    drop(storm);
    within("shutdown", bench.relay.shutdown()).await.unwrap();
    assert!(
        TcpStream::connect(("127.0.0.1", at.port)).is_err(),
        "the port is closed"
    );
    bench.finish().await;
}
