//! Long work: 50 turns with 120 calls in one process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use turnpass::event::StopReason;
use turnpass_lab::rig::RealCli;
use turnpass_lab::upstream::Recorded;

use crate::bench::Bench;
use crate::stage::tool;
use crate::talk::Talk;

const TURNS: usize = 50;
const CALLS: usize = 120;
const CACHE_READ: f64 = 0.98;
/// How long the slow tool takes.
const TOOL: Duration = Duration::from_secs(400);

/// The parts of a request that the prompt cache looks at, as bytes without marks.
struct Prefix {
    tools: String,
    system: String,
    messages: Vec<String>,
}

fn prefix(recorded: &Recorded) -> Prefix {
    let body: BTreeMap<&str, &RawValue> = serde_json::from_slice(&recorded.body).unwrap();
    let messages: Vec<&RawValue> = serde_json::from_str(body["messages"].get()).unwrap();
    Prefix {
        tools: body["tools"].get().to_owned(),
        system: body["system"].get().to_owned(),
        messages: messages
            .into_iter()
            .map(|raw| as_string(unmarked(raw.get())))
            .collect(),
    }
}

/// The CLI's own system message is a list of blocks while it is marked, and a string later, which is the same to the
/// service.
fn as_string(raw: String) -> String {
    if !raw.starts_with(r#"{"role":"system""#) {
        return raw;
    }
    let mut message: serde_json::Value = serde_json::from_str(&raw).unwrap();
    if let Some([block]) = message["content"].as_array().map(Vec::as_slice) {
        message["content"] = block["text"].clone();
    }
    message.to_string()
}

/// Without cache marks, which move on.
fn unmarked(raw: &str) -> String {
    let Some((before, rest)) = raw.split_once(r#","cache_control":{"#) else {
        return raw.to_owned();
    };
    let (_, after) = rest.split_once('}').unwrap();
    format!("{before}{}", unmarked(after))
}

/// One request a generation, one process, byte-equal prefixes, and a cache that is read.
pub(crate) async fn long_session(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("agent");
    talk.system = "You are under test, and you are told so at length. ".repeat(200);
    talk.tools
        .extend((0..20).map(|number| tool(&format!("tool_{number}"))));
    let (mut calls, mut generations) = (0, 0);
    for turn in 0..TURNS {
        // 2.4 calls a turn: two of them at once, and in every second turn a round of one or two more.
        let more = match turn % 5 {
            0 => r#"[[then [[call tool_3 {"path":"d"}]] [[then [[say done]]]]]]"#,
            2 => "[[then [[call read {}]] [[then [[say done]]]]]]",
            _ => "[[then [[say done]]]]",
        };
        let filler = "some words to fill the window with ".repeat(20);
        let text = format!(
            r#"turn {turn}: {filler} [[think why]] [[say so]] [[call read {{"path":"a"}}]] [[call write {{"path":"b"}}]] {more}"#
        );
        // The host's order of its tools is no promise.
        let by = turn % talk.tools.len();
        talk.tools.rotate_left(by);
        let mut heard = talk.say(&bench, &text).await;
        generations += 1;
        while heard.stop() == &StopReason::ToolUse {
            calls += heard.calls().len();
            heard = talk.answer(&bench).await;
            generations += 1;
        }
        assert_eq!(heard.text(), "done");
    }
    assert_eq!(calls, CALLS);
    assert_eq!(talk.ran.len(), CALLS);
    let seen = bench.up.messages();
    assert_eq!(seen.len(), generations, "requests for each generation");
    assert_eq!(bench.spawned().len(), 1, "no start after the first");
    grows(&seen);
    let (mut read, mut prior) = (0, 0);
    for one in &seen {
        let cache = one.cache.as_ref().unwrap();
        read += cache.read;
        prior += cache.prior;
        if let Some(share) = cache.share_read() {
            assert!(
                share >= CACHE_READ,
                "request {}: {share} of {cache:?}",
                one.number
            );
        }
    }
    #[allow(
        clippy::cast_precision_loss,
        reason = "token counts stay far below 2^52"
    )]
    let share = read as f64 / prior as f64;
    eprintln!(
        "MEASURED {}: {generations} generations, {} requests, {calls} calls, 1 process, {:.2} % of {prior} prior tokens read",
        cli.version,
        seen.len(),
        share * 100.0
    );
    bench.finish().await;
}

/// A tool that works for 400 s: nobody loses patience, and its result is answered as any other.
pub(crate) async fn tool_of_400_s(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("slow");
    talk.say(
        &bench,
        "[[call read {}]] [[call write {}]] [[then [[say done]]]]",
    )
    .await;
    let end = Instant::now() + TOOL;
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(talk.answer(&bench).await.text(), "done");
    talk.check(&bench).await;
    assert_eq!(bench.spawned().len(), 1);
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
        before = now;
    }
}
