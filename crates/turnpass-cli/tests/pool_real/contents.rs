//! Everything that can be said passes unchanged, on a live process and on one that is told it anew.

use turnpass::conversation::{Block, Image, Message, ResultBlock, Role, Source, ToolResult};
use turnpass::event::StopReason;
use turnpass_lab::rig::RealCli;
use turnpass_lab::scenario::{Item, Reply};

use crate::bench::{Bench, Random};
use crate::holds::{host, sent};
use crate::talk::Talk;

/// A PNG of one pixel.
const PIXEL: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

/// Longest result that passes whole, in characters (pool document).
const RESULT_CHARS: usize = 500_000;

/// Texts of every kind, and thinking with its signatures, over turns.
pub(crate) async fn texts(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("texts");
    let texts = [
        "plain",
        "/compact and /help are words here",
        "@README.md and !ls and #memory as well",
        "  outer white space  \n\n",
        "<system> is no tag, \"quotes\" \\ and \u{2028} line ends\r\n\t\u{7f}",
        "👩‍👩‍👧 é e\u{301} \u{200b} \u{feff}",
        "ultrathink about it",
    ];
    for (number, text) in texts.into_iter().enumerate() {
        bench.up.enqueue(Reply::content([
            Item::thinking(format!("thought {number}")),
            Item::RedactedThinking { data: None },
            Item::text(format!("answer {number} to {text}")),
        ]));
        let heard = talk.say(&bench, text).await;
        assert_eq!(heard.thinking(), format!("thought {number}"));
        assert_eq!(heard.text(), format!("answer {number} to {text}"));
        assert_eq!(heard.done().message.content.len(), 3);
    }
    // Several texts in one message, and a system message of the host's in its place.
    talk.messages.push(Message {
        role: Role::User,
        content: vec![
            Block::text("one"),
            Block::text("two"),
            Block::text("[[say three]]"),
        ],
    });
    talk.good(&bench).await;
    talk.messages.push(Message {
        role: Role::System,
        content: vec![Block::text("be brief")],
    });
    talk.check(&bench).await;
    // An answer larger than any pipe.
    bench.up.enqueue(Reply::text("é".repeat(300_000)));
    let heard = talk.say(&bench, "go on").await;
    assert_eq!(heard.text().chars().count(), 300_000);
    talk.check(&bench).await;
    assert_eq!(bench.spawned().len(), 1);
    bench.finish().await;
}

/// One call and parallel ones; their results in any order, failed ones among them.
pub(crate) async fn tools(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("tools");
    let mut random = Random::new(3);
    for calls in [1, 2, 5, 3, 8] {
        let call = r#"[[call read {"path":"a"}]] [[call write {"path":"b"}]]"#;
        let call: Vec<_> = call.split_inclusive("]] ").cycle().take(calls).collect();
        let directives = format!(
            "[[think so]] [[say now]] {} [[then [[say done]]]]",
            call.concat()
        );
        let heard = talk.say(&bench, &directives).await;
        assert_eq!(heard.stop(), &StopReason::ToolUse);
        assert_eq!(heard.calls().len(), calls);
        let mut results = talk.results();
        for at in (1..results.len()).rev() {
            results.swap(at, random.below(at + 1));
        }
        for result in results.iter_mut().skip(1).step_by(3) {
            *result = ToolResult::error(result.id.clone(), "it failed\nin two lines");
        }
        talk.messages.push(Message::results(results));
        assert_eq!(talk.good(&bench).await.text(), "done");
    }
    // Rounds that follow each other within one turn of the CLI.
    let rounds = "[[call read {}]] [[then [[call write {}]] [[then [[call read {}]] [[then [[say end]]]]]]]]";
    talk.say(&bench, rounds).await;
    talk.answer(&bench).await;
    talk.answer(&bench).await;
    assert_eq!(talk.answer(&bench).await.text(), "end");
    talk.check(&bench).await;
    assert_eq!(bench.spawned().len(), 1);
    bench.finish().await;
}

fn pixel() -> Image {
    Image {
        source: Source::Base64 {
            media_type: "image/png".to_owned(),
            data: PIXEL.to_owned(),
        },
    }
}

/// Images in what the user says and in results: on the live process, after a resume and after a reseed.
pub(crate) async fn images(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut talk = Talk::new("images");
    talk.messages.push(Message {
        role: Role::User,
        content: vec![
            Block::text("before"),
            Block::Image(pixel()),
            Block::text("[[call read {}]] [[call write {}]] [[then [[say seen]]]]"),
        ],
    });
    talk.good(&bench).await;
    let mut results = talk.results();
    results[0].content.push(ResultBlock::Image(pixel()));
    results[0].content.push(ResultBlock::Text {
        text: "beside".to_owned(),
    });
    results[1].content = vec![ResultBlock::Image(pixel())];
    talk.messages.push(Message::results(results));
    assert_eq!(talk.good(&bench).await.text(), "seen");
    talk.check(&bench).await;
    bench = bench.restart().await;
    talk.check(&bench).await;
    talk.state = None;
    bench = bench.restart().await;
    talk.check(&bench).await;
    // A host that strips images of old messages goes on with the live process.
    for message in &mut talk.messages {
        for block in &mut message.content {
            if let Block::Image(_) = block {
                *block = Block::text("[image]");
            }
        }
    }
    let starts = bench.spawned().len();
    talk.messages.push(Message::user("[[say stripped]]"));
    let heard = talk.go_on(&bench).await;
    assert_eq!(heard.text(), "stripped");
    assert_eq!(bench.spawned().len(), starts);
    bench.finish().await;
}

/// A result of 500,000 characters passes whole, a longer one is cut on a character boundary with a note (bug 72).
pub(crate) async fn large_results(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("whole");
    read(&mut talk, &bench, "x".repeat(RESULT_CHARS)).await;
    assert_eq!(talk.good(&bench).await.text(), "read");
    talk.check(&bench).await;

    // The cut falls among characters of several bytes.
    let mut talk = Talk::new("cut");
    let text = "x".repeat(RESULT_CHARS - 1_000) + &"é".repeat(20_000);
    let size = text.chars().count();
    read(&mut talk, &bench, text.clone()).await;
    let history = talk.messages.clone();
    let before = bench.count();
    assert_eq!(talk.go_on(&bench).await.text(), "read");
    assert_eq!(bench.count(), before + 1);
    let seen = sent(&bench.newest()).unwrap();
    let (mut wanted, mut got) = (host(&history), seen.clone());
    let (_, cut) = (wanted.pop(), got.pop().unwrap());
    assert_eq!(wanted, got, "all but the result");
    let pieces = cut["content"][0]["content"].as_array().unwrap();
    let told: String = pieces
        .iter()
        .map(|piece| piece["text"].as_str().unwrap())
        .collect();
    let (kept, note) = told.split_once("\n[turnpass: ").unwrap();
    assert!(told.chars().count() <= RESULT_CHARS && text.starts_with(kept));
    assert!(
        kept.ends_with('é') && note.contains(&format!("{size} characters")),
        "{note}"
    );
    // What the service has seen of it stays.
    talk.messages.push(Message::user("[[say on]]"));
    assert_eq!(talk.go_on(&bench).await.text(), "on");
    assert_eq!(seen[..], sent(&bench.newest()).unwrap()[..seen.len()]);
    assert_eq!(bench.spawned().len(), 2);
    bench.finish().await;
}

async fn read(talk: &mut Talk, bench: &Bench, text: String) {
    talk.say(bench, "[[call read {}]] [[then [[say read]]]]")
        .await;
    let call = talk
        .messages
        .last()
        .unwrap()
        .tool_calls()
        .next()
        .unwrap()
        .clone();
    talk.messages
        .push(Message::results([ToolResult::text(call.id, text)]));
}

/// The one text that does not pass as it is: where one begins with the CLI's own tag and the tag is never closed, the CLI
/// takes its bracket. It is the same live and told anew.
pub(crate) async fn own_tag(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut talk = Talk::new("tag");
    let tag = "<system-reminder>x</system-reminder>";
    let open = "<system-reminder is none [[call read {}]] [[then [[say on]]]]";
    talk.messages.push(Message {
        role: Role::User,
        content: vec![Block::text(tag), Block::text(open)],
    });
    talk.go_on(&bench).await;
    let call = talk
        .messages
        .last()
        .unwrap()
        .tool_calls()
        .next()
        .unwrap()
        .clone();
    talk.messages
        .push(Message::results([ToolResult::text(call.id, tag)]));
    talk.go_on(&bench).await;
    let live = tagged(&bench);
    talk.state = None;
    bench = bench.restart().await;
    talk.messages.push(Message::user("[[say again]]"));
    talk.go_on(&bench).await;
    assert_eq!(live, tagged(&bench));
    let escaped = open.replacen('<', "&lt;", 1);
    assert_eq!(live, [tag, &escaped, tag], "{}", cli.version);
    bench.finish().await;
}

/// All texts with the tag but the CLI's own, in order.
fn tagged(bench: &Bench) -> Vec<String> {
    let newest = bench.newest();
    let mut found = Vec::new();
    let mut left = vec![newest.field("/messages").unwrap().clone()];
    left.reverse();
    while let Some(value) = left.pop() {
        match value {
            serde_json::Value::String(text)
                if text.contains("system-reminder>x<") || text.contains("is none") =>
            {
                found.push(text)
            }
            serde_json::Value::Array(items) => left.extend(items.into_iter().rev()),
            serde_json::Value::Object(fields) => {
                left.extend(fields.into_iter().map(|(_, value)| value))
            }
            _ => {}
        }
    }
    found
}
