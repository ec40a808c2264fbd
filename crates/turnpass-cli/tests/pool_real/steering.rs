//! What else the host says while tools run, and histories that go on in another way than the one that was waited for.

use turnpass::conversation::{Block, Message, Role, ToolResult};
use turnpass_lab::rig::RealCli;

use crate::bench::Bench;
use crate::stage::Heard;
use crate::talk::Talk;

const CALLS: &str =
    r#"[[call read {"path":"a"}]] [[call write {"path":"b"}]] [[then [[say done]]]]"#;

fn with_text(results: Vec<ToolResult>, text: &str) -> Message {
    let mut message = Message::results(results);
    message.content.push(Block::text(text));
    message
}

async fn called(talk: &mut Talk, bench: &Bench) -> Vec<ToolResult> {
    let heard: Heard = talk.say(bench, CALLS).await;
    assert_eq!(heard.calls().len(), 2);
    talk.results()
}

/// Text beside good, mixed and all failed results: one request each, in one message with them.
pub(crate) async fn beside_results(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("steering");
    for failed in [vec![], vec![0], vec![1], vec![0, 1]] {
        let mut results = called(&mut talk, &bench).await;
        for at in failed {
            results[at] = ToolResult::error(results[at].id.clone(), "failed");
        }
        talk.messages.push(with_text(results, "[[say steered]]"));
        assert_eq!(talk.good(&bench).await.text(), "steered");
        talk.check(&bench).await;
    }
    // Again while the answer to it calls, and a cancel of that turn.
    let results = called(&mut talk, &bench).await;
    talk.messages.push(with_text(results, CALLS));
    assert_eq!(talk.good(&bench).await.calls().len(), 2);
    let results = talk.results();
    talk.messages
        .push(with_text(results, "[[say half]] [[stall closed]]"));
    let mut generation = talk.generate(&bench.pool);
    crate::stage::until(&mut generation, "text", crate::stage::is_text).await;
    drop(generation);
    let last = talk.messages.last_mut().unwrap();
    *last.content.last_mut().unwrap() = Block::text("[[say other]]");
    assert_eq!(talk.good(&bench).await.text(), "other");
    talk.check(&bench).await;
    assert_eq!(bench.spawned().len(), 1);
    bench.finish().await;
}

/// Missing, late and other results, no results at all, a history that is cut before the calls, and one that ends them.
pub(crate) async fn other_than_results(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("other");
    talk.say(&bench, "[[say hello]]").await;
    // Nothing but text: the calls are told to have no result.
    called(&mut talk, &bench).await;
    talk.messages.push(Message::user("[[say instead]]"));
    assert_eq!(talk.good(&bench).await.text(), "instead");
    talk.check(&bench).await;
    // One of two.
    let mut results = called(&mut talk, &bench).await;
    results.pop();
    talk.messages.push(with_text(results, "[[say one]]"));
    assert_eq!(talk.good(&bench).await.text(), "one");
    talk.check(&bench).await;
    // Two messages with one each, and a result that belongs to nothing.
    let mut results = called(&mut talk, &bench).await;
    let second = results.pop().unwrap();
    talk.messages.push(Message::results(results));
    talk.messages
        .push(Message::results([second.clone(), second]));
    assert_eq!(talk.good(&bench).await.text(), "done");
    talk.check(&bench).await;
    // The calls never were, in the host's history.
    called(&mut talk, &bench).await;
    talk.messages.pop();
    talk.messages.pop();
    talk.check(&bench).await;
    // Other words of the user, the same calls.
    let results = called(&mut talk, &bench).await;
    let at = talk.messages.len() - 2;
    talk.messages[at] = Message {
        role: Role::User,
        content: vec![Block::text(format!("edited {CALLS}"))],
    };
    talk.messages.push(Message::results(results));
    assert_eq!(talk.good(&bench).await.text(), "done");
    talk.check(&bench).await;
    bench.finish().await;
}
