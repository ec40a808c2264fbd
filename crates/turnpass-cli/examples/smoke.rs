use std::time::Instant;
use turnpass::conversation::*;
use turnpass::event::Event;
use turnpass::relay::*;
use turnpass::request::*;
use turnpass::{Provider, Request, Transport};
use turnpass_lab::{rig, upstream};
fn main() {
    eprintln!("isolation {:?}", rig::isolate());
    tokio::runtime::Runtime::new().unwrap().block_on(run());
}
async fn run() {
    let up = upstream::Upstream::start(upstream::Options::default()).unwrap();
    let home = tempfile::tempdir().unwrap();
    let _h = rig::MadeUpHome::new(home.path()).unwrap();
    let mode = if std::env::args().any(|a| a == "per") {
        ProcessMode::PerRequest
    } else {
        ProcessMode::Warm
    };
    let carrier = if std::env::args().any(|a| a == "mcp") {
        ToolCarrier::Mcp
    } else {
        ToolCarrier::ExtraBody
    };
    let options = RelayOptions {
        process: mode,
        tools: carrier,
        claude_path: Some(std::env::var("CLAUDE").unwrap().into()),
        lab_upstream: Some(LoopbackUrl::parse(&up.url()).unwrap()),
        lab_home: Some(home.path().into()),
        tool_server: std::env::var("TP").ok().map(Into::into),
        ..RelayOptions::default()
    };
    let relay = RelayTransport::new(options).unwrap();
    let tools = vec![Tool {
        name: "read".into(),
        description: "reads".into(),
        input_schema: serde_json::json!({"type":"object","properties":{"path":{"type":"string"}}}),
    }];
    let mut messages = vec![Message::user(
        "hello [[think let me see]] [[call read {\"path\":\"a\"}]]",
    )];
    let request = |messages: &Vec<Message>| {
        let mut r = Request::new("sonnet", messages.clone());
        r.tools = tools.clone();
        r.system = "You are a test.".into();
        r
    };
    let t = Instant::now();
    eprintln!(
        "warm up {:?} {:?}",
        relay.warm_up(&request(&messages)).await,
        t.elapsed()
    );
    let provider = Provider::new(relay);
    for round in 0..6 {
        let t = Instant::now();
        let n0 = up.messages().len();
        let mut g = provider.generate(request(&messages));
        let mut calls = vec![];
        while let Some(e) = g.next().await {
            match e {
                Ok(Event::Done(d)) => {
                    eprintln!(
                        "{round} {:?} DONE {:?} {:?} reqs {} cache {:?}",
                        t.elapsed(),
                        d.stop,
                        d.message.text().len(),
                        d.upstream_requests,
                        d.usage.cache_read_share()
                    );
                    messages.push(d.message);
                }
                Ok(Event::ToolCall(c)) => {
                    calls.push(c.clone());
                    eprintln!("{round} {:?} {c:?}", t.elapsed());
                }
                Ok(e) => eprintln!("{round} {:?} {e:?}", t.elapsed()),
                Err(e) => {
                    eprintln!("{round} {:?} ERR {e}", t.elapsed());
                    return;
                }
            }
        }
        let all = up.messages();
        eprintln!(
            "{round} upstream requests {} at {:?}",
            all.len() - n0,
            all.last().map(|r| r.arrived_at.duration_since(t))
        );
        if calls.is_empty() {
            messages.push(Message::user(format!("next {round}")));
        } else {
            messages.push(Message::results(
                calls
                    .into_iter()
                    .map(|c| ToolResult::text(c.id, "result text")),
            ));
        }
    }
    eprintln!("shutdown {:?}", provider.shutdown().await);
}
