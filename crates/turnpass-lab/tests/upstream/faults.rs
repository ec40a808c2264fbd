//! Replies that no correct server gives: cuts, codings, lengths, garbage, odd SSE.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use async_compression::tokio::bufread::{BrotliDecoder, GzipDecoder, ZlibDecoder, ZstdDecoder};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use turnpass_lab::scenario::{
    At, Body, Coding, Cut, CutAt, CutHow, Framing, Item, NamedPosition, Position, Reply, SseShape,
};
use turnpass_lab::upstream::{ClosedBy, Ending};

use crate::support::*;

fn cut(at: CutAt, how: CutHow) -> Reply {
    Reply {
        cut: Some(Cut { at, how }),
        ..Reply::content([Item::text("first block"), Item::text("second block")])
    }
}

fn last_type(body: &[u8]) -> String {
    let events = events(&String::from_utf8_lossy(body));
    let last = events.last().map(|event| event["type"].clone());
    last.and_then(|kind| kind.as_str().map(str::to_owned))
        .unwrap_or_default()
}

#[tokio::test]
async fn cuts_by_event_end_where_they_say() {
    for (at, last) in [
        (CutAt::Event(0), ""),
        (CutAt::Event(1), "message_start"),
        (CutAt::Event(3), "content_block_delta"),
        (CutAt::MidBlock, "content_block_delta"),
        (CutAt::BeforeMessageDelta, "content_block_stop"),
        (CutAt::BeforeMessageStop, "message_delta"),
    ] {
        for how in [CutHow::End, CutHow::Close] {
            let upstream = scripted([cut(at, how)]);
            let reply = raw(&upstream, &ask("x")).await;
            let (body, ended) = reply.dechunked();
            assert_eq!(last_type(&body), last, "{at:?} {how:?}");
            assert_eq!(ended, how == CutHow::End, "{at:?} {how:?}");
            assert_eq!(reply.error, None);
        }
    }
}

#[tokio::test]
async fn a_reset_is_a_reset() {
    for at in [CutAt::MidBlock, CutAt::Byte(40), CutAt::BeforeHead] {
        let upstream = scripted([cut(at, CutHow::Rst)]);
        let reply = raw(&upstream, &ask("x")).await;
        assert_eq!(
            reply.error,
            Some(std::io::ErrorKind::ConnectionReset),
            "{at:?}"
        );
        let recorded = upstream
            .wait_for("the cut", |each| each.reply.ending.is_some())
            .await
            .unwrap();
        assert!(matches!(recorded.reply.ending, Some(Ending::Cut(_))));
        let connections = upstream
            .wait_connections("closed", |all| all.open() == 0)
            .await
            .unwrap();
        assert_eq!(
            connections.all[0].closed.map(|(_, by)| by),
            Some(ClosedBy::Upstream)
        );
    }
}

#[tokio::test]
async fn a_cut_before_the_head_sends_nothing() {
    let upstream = scripted([cut(CutAt::BeforeHead, CutHow::Close)]);
    let reply = raw(&upstream, &ask("x")).await;
    assert_eq!(
        (reply.head.as_str(), reply.body.len(), reply.error),
        ("", 0, None)
    );
    assert_eq!(upstream.requests()[0].reply.status, None);
}

#[tokio::test]
async fn cuts_by_byte_are_exact() {
    let whole = raw(&scripted([Reply::text("some words")]), &ask("x"))
        .await
        .dechunked()
        .0;
    for byte in [0, 1, 7, whole.len() / 2, whole.len() - 1, whole.len()] {
        let upstream = scripted([Reply {
            cut: Some(Cut {
                at: CutAt::Byte(byte as u64),
                how: CutHow::Close,
            }),
            ..Reply::text("some words")
        }]);
        let (body, ended) = raw(&upstream, &ask("x")).await.dechunked();
        assert_eq!(body, whole[..byte], "{byte}");
        assert!(!ended, "{byte}");
        assert_eq!(upstream.requests()[0].reply.bytes, byte as u64);
    }
    let json = scripted([Reply {
        cut: Some(Cut {
            at: CutAt::Byte(5),
            how: CutHow::Close,
        }),
        ..Reply::error(400, "invalid_request_error", "no")
    }]);
    let reply = raw(&json, &ask("x")).await;
    assert_eq!(reply.body, b"{\"typ");
    assert!(
        reply
            .header("content-length")
            .unwrap()
            .parse::<usize>()
            .unwrap()
            > 5
    );
}

#[tokio::test]
async fn cut_directives_do_what_the_table_says() {
    let upstream = start();
    for (directive, last, ended) in [
        ("[[cut before-stop]]", "message_delta", true),
        ("[[cut after-block]]", "content_block_stop", true),
        ("[[cut mid-block]]", "content_block_delta", true),
        ("[[cut mid-block close]]", "content_block_delta", false),
        ("[[cut close]]", "content_block_delta", false),
    ] {
        let reply = raw(&upstream, &ask(&format!("[[say words]] {directive}"))).await;
        let (body, end) = reply.dechunked();
        assert_eq!(
            (last_type(&body).as_str(), end),
            (last, ended),
            "{directive}"
        );
    }
    let reset = raw(&upstream, &ask("[[say words]] [[cut rst]]")).await;
    assert_eq!(reset.error, Some(std::io::ErrorKind::ConnectionReset));
}

async fn undo(bytes: &[u8], codings: &[Coding]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for coding in codings.iter().rev() {
        let mut out = Vec::new();
        match coding {
            Coding::Gzip => GzipDecoder::new(&bytes[..])
                .read_to_end(&mut out)
                .await
                .unwrap(),
            Coding::Br => BrotliDecoder::new(&bytes[..])
                .read_to_end(&mut out)
                .await
                .unwrap(),
            Coding::Zstd => ZstdDecoder::new(&bytes[..])
                .read_to_end(&mut out)
                .await
                .unwrap(),
            Coding::Deflate => ZlibDecoder::new(&bytes[..])
                .read_to_end(&mut out)
                .await
                .unwrap(),
        };
        bytes = out;
    }
    bytes
}

#[tokio::test]
async fn bug_095_replies_and_errors_in_every_coding() {
    let plain = raw(&scripted([Reply::text("words")]), &ask("x"))
        .await
        .dechunked()
        .0;
    for codings in [
        vec![Coding::Gzip],
        vec![Coding::Br],
        vec![Coding::Zstd],
        vec![Coding::Deflate],
        vec![Coding::Gzip, Coding::Br],
    ] {
        let stream = Reply {
            encoding: codings.clone(),
            ..Reply::text("words")
        };
        let error = Reply {
            encoding: codings.clone(),
            ..Reply::error(429, "rate_limit_error", "slow")
        };
        let upstream = scripted([stream, error]);
        let reply = raw(&upstream, &ask("x")).await;
        let names: Vec<&str> = codings.iter().map(|coding| coding.name()).collect();
        assert_eq!(
            reply.header("content-encoding"),
            Some(names.join(", ").as_str())
        );
        assert_eq!(undo(&reply.dechunked().0, &codings).await, plain);
        let error = raw(&upstream, &ask("x")).await;
        assert_eq!(
            error.header("content-length").unwrap(),
            error.body.len().to_string()
        );
        let body: Value = serde_json::from_slice(&undo(&error.body, &codings).await).unwrap();
        assert_eq!(body["error"]["message"], "slow");
    }
}

#[tokio::test]
async fn an_encoded_stream_still_streams() {
    let upstream = scripted([Reply {
        encoding: vec![Coding::Gzip],
        at: vec![At {
            event: Position::Number(1),
            action: Item::Hold { gate: "go".into() },
        }],
        ..Reply::text("words")
    }]);
    let mut reply = post(&upstream, &ask("x")).await;
    let first = reply.chunk().await.unwrap().unwrap();
    let mut text = String::new();
    // The data ends in the middle of the format, so the decoder gives what is there and then an error.
    GzipDecoder::new(&first[..])
        .read_to_string(&mut text)
        .await
        .unwrap_err();
    let mut bytes = Vec::new();
    GzipDecoder::new(&first[..])
        .read_to_end(&mut bytes)
        .await
        .unwrap_err();
    assert_eq!(last_type(&bytes), "message_start");
    upstream.release("go");
    while reply.chunk().await.unwrap().is_some() {}
}

#[tokio::test]
async fn lengths_framings_and_whole_bodies() {
    let upstream = scripted([
        Reply {
            content_length: Some(5),
            ..Reply::error(400, "invalid_request_error", "no")
        },
        Reply {
            content_length: Some(9_999),
            ..Reply::text("words")
        },
        Reply {
            framing: Some(Framing::Close),
            ..Reply::text("words")
        },
        Reply {
            framing: Some(Framing::Length),
            ..Reply::text("words")
        },
        Reply {
            body: Some(Body::Text("<html>".into())),
            status: 502,
            ..Reply::default()
        },
        Reply {
            body: Some(Body::Base64("AP8=".into())),
            ..Reply::default()
        },
    ]);
    let short = raw(&upstream, &ask("x")).await;
    assert_eq!(short.header("content-length"), Some("5"));
    assert!(short.body.len() > 5);
    let long = raw(&upstream, &ask("x")).await;
    assert_eq!(long.header("content-length"), Some("9999"));
    assert_eq!(last_type(&long.body), "message_stop");
    let until_close = raw(&upstream, &ask("x")).await;
    assert_eq!(
        (
            until_close.header("content-length"),
            until_close.header("transfer-encoding")
        ),
        (None, None)
    );
    assert_eq!(last_type(&until_close.body), "message_stop");
    let whole = raw(&upstream, &ask("x")).await;
    assert_eq!(
        whole.header("content-length").unwrap(),
        whole.body.len().to_string()
    );
    let html = raw(&upstream, &ask("x")).await;
    assert!(html.head.starts_with("HTTP/1.1 502 Bad Gateway\n"));
    assert_eq!(html.body, b"<html>");
    assert_eq!(raw(&upstream, &ask("x")).await.body, [0, 255]);
}

#[tokio::test]
async fn one_byte_writes_carry_the_same_stream() {
    let upstream = scripted([
        Reply::text("wörds"),
        Reply {
            split_bytes: NonZeroUsize::new(1),
            ..Reply::text("wörds")
        },
    ]);
    let model =
        |body: &[u8]| String::from_utf8_lossy(body).replace("msg_lab00000002", "msg_lab00000001");
    let whole = raw(&upstream, &ask("x")).await.dechunked().0;
    let split = raw(&upstream, &ask("x")).await;
    assert!(split.body.starts_with(b"1\r\ne\r\n1\r\nv\r\n"));
    assert_eq!(model(&split.dechunked().0), model(&whole));
}

#[tokio::test]
async fn sse_in_other_shapes() {
    let shape = SseShape {
        crlf: true,
        event_names: false,
        comment: Some("note".into()),
    };
    let upstream = scripted([Reply {
        sse: shape,
        at: vec![
            At {
                event: Position::Number(2),
                action: Item::Comment { text: "mid".into() },
            },
            At {
                event: Position::Named(NamedPosition::Start),
                action: Item::Raw {
                    text: "data: {broken\r\n\r\n".into(),
                },
            },
            At {
                event: Position::Named(NamedPosition::End),
                action: Item::Garbage {
                    base64: "/wD/".into(),
                },
            },
        ],
        ..Reply::text("words")
    }]);
    let body = raw(&upstream, &ask("x")).await.dechunked().0;
    assert!(
        body.starts_with(b"data: {broken\r\n\r\n: note\r\n\r\ndata: {\"type\":\"message_start\"")
    );
    assert!(body.ends_with(b"\r\n\r\n\xff\0\xff"));
    let text = String::from_utf8_lossy(&body);
    assert!(text.contains(": mid\r\n\r\n"));
    assert!(!text.contains("event:"));
    assert_eq!(text_of(&events(&text)), "words");
}

#[tokio::test]
async fn bug_102_pings_between_and_during_silence() {
    let upstream = scripted([Reply::content([
        Item::Ping { count: 3 },
        Item::Stall {
            ms: 60,
            ping_every_ms: NonZeroUsize::new(10),
        },
        Item::text("words"),
    ])]);
    let started = Instant::now();
    let events = stream(&upstream, &ask("x")).await;
    assert!(started.elapsed() >= Duration::from_millis(60));
    let kinds = types(&events);
    let pings = kinds.iter().filter(|kind| **kind == "ping").count();
    // On a loaded machine a wait of 10 ms may take longer, so only the bounds are certain: the three, one more, at most five.
    assert!((4..=8).contains(&pings), "{kinds:?}");
    assert_eq!(text_of(&events), "words");
    let named = start();
    let events = stream(&named, &ask("[[ping 2]] [[say a]] [[ping]]")).await;
    assert_eq!(types(&events)[..3], ["message_start", "ping", "ping"]);
}

#[tokio::test]
async fn delays_stalls_and_gaps_take_their_time() {
    let upstream = start();
    let started = Instant::now();
    let events = stream(
        &upstream,
        &ask("[[delay 50]] [[say a]] [[stall 50]] [[say b]] [[chunk 1 ms 2]]"),
    )
    .await;
    assert!(started.elapsed() >= Duration::from_millis(100));
    assert_eq!(text_of(&events), "ab");
    let reply = &upstream.requests()[0].reply;
    let recorded = &upstream.requests()[0];
    assert!(
        reply.head_at.unwrap() - recorded.body_complete_at.unwrap() >= Duration::from_millis(50)
    );
}

#[tokio::test]
async fn errors_beside_messages_of_every_status() {
    for status in [
        400, 401, 402, 403, 404, 408, 409, 410, 413, 418, 422, 429, 500, 502, 503, 504, 529,
    ] {
        let upstream = scripted([Reply {
            status,
            ..Reply::default()
        }]);
        let reply = post(&upstream, &ask("x")).await;
        assert_eq!(reply.status().as_u16(), status);
        let body: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
        assert_eq!(body["type"], json!("error"));
        assert!(body["error"]["message"].is_string());
    }
}
