//! Conversations that are taken up again: by the next host, by another session, with an older state, or told anew.

use turnpass::conversation::{Block, Message};
use turnpass::event::{PlanKind, StopReason};
use turnpass_lab::rig::RealCli;

use crate::bench::Bench;
use crate::talk::{Talk, planned};

const ROUND: &str = r#"[[think why]] [[redacted]] [[say so]] [[call read {"path":"a"}]] [[call write {"path":"b"}]] [[then [[think done]] [[say done]]]]"#;

async fn with_history(bench: &Bench, key: &str) -> Talk {
    let mut talk = Talk::new(key);
    talk.say(bench, "[[think first]] [[say hello]]").await;
    talk.say(bench, ROUND).await;
    assert_eq!(talk.answer(bench).await.text(), "done");
    talk
}

/// After a shutdown the next host resumes: at the end of a turn, and in the middle of one that waits for results.
pub(crate) async fn resumed(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut talk = with_history(&bench, "resumed").await;
    bench = bench.restart().await;
    let heard = talk.say(&bench, "[[think again]] [[say again]]").await;
    planned(&heard, PlanKind::Resumed);
    let newest = bench.spawned().pop().unwrap().arguments;
    assert!(
        newest.contains("--resume ") && !newest.contains("--fork-session"),
        "{newest}"
    );

    let heard = talk.say(&bench, ROUND).await;
    assert_eq!(heard.stop(), &StopReason::ToolUse);
    bench = bench.restart().await;
    let heard = talk.answer(&bench).await;
    planned(&heard, PlanKind::Resumed);
    assert_eq!(heard.text(), "done");
    talk.check(&bench).await;

    // A turn that is being taken back while the host shuts down, then a state that is not JSON, and one of another version.
    drop(talk.generate(&bench.pool));
    bench = bench.restart().await;
    // Resumed; told anew where the CLI was ended before its file was whole again (once in some forty runs).
    talk.say(&bench, "[[say on]]").await;
    for (old, new) in [("{", "["), ("\"version\":1", "\"version\":999")] {
        bench = bench.restart().await;
        let state = talk.state.as_mut().unwrap();
        state.0 = state.0.replacen(old, new, 1);
        planned(&talk.say(&bench, "[[say on]]").await, PlanKind::Reseeded);
    }
    // A session that the CLI does not have any more.
    bench = bench.restart().await;
    std::fs::remove_dir_all(bench.dir().join("home/.claude/projects")).unwrap();
    talk.check(&bench).await;
    bench.finish().await;
}

/// The state of another transport session is forked, and neither sees the other, also while one waits for results.
pub(crate) async fn forked(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut first = with_history(&bench, "first").await;
    let mut second = Talk {
        key: "second".to_owned(),
        ..first.clone()
    };
    planned(
        &second.say(&bench, "[[say second]]").await,
        PlanKind::Forked,
    );
    planned(
        &first.say(&bench, "[[say first]]").await,
        PlanKind::Continued,
    );
    first.say(&bench, ROUND).await;
    let mut third = Talk {
        key: "third".to_owned(),
        ..second.clone()
    };
    planned(&third.say(&bench, "[[say third]]").await, PlanKind::Forked);
    planned(&first.answer(&bench).await, PlanKind::Continued);
    second.check(&bench).await;
    first.check(&bench).await;
    bench = bench.restart().await;
    for talk in [&mut first, &mut second, &mut third] {
        planned(&talk.say(&bench, "[[say back]]").await, PlanKind::Resumed);
    }
    assert_eq!(bench.pool.live(), 3);
    bench.finish().await;
}

/// A history that was edited is told anew, whatever the state says; so is one that was cut.
pub(crate) async fn edited(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut talk = with_history(&bench, "edited").await;
    let whole = talk.clone();
    talk.messages[0] = Message::user("[[say other]]");
    planned(&talk.say(&bench, "[[say live]]").await, PlanKind::Reseeded);
    bench = bench.restart().await;
    talk.messages[1] = Message::assistant("another answer");
    planned(
        &talk.say(&bench, "[[say stored]]").await,
        PlanKind::Reseeded,
    );
    let mut cut = whole.clone();
    cut.key = talk.key.clone();
    cut.messages.truncate(2);
    planned(&cut.say(&bench, "[[say cut]]").await, PlanKind::Reseeded);
    // Without the calls in the middle.
    let mut without = whole.clone();
    without.messages.drain(2..4);
    planned(
        &without.say(&bench, "[[say without]]").await,
        PlanKind::Reseeded,
    );
    // Nothing but the last message is other than what the live process has.
    let mut last = without.clone();
    last.messages.pop();
    last.messages.push(Message::assistant("put into its mouth"));
    planned(&last.say(&bench, "[[say last]]").await, PlanKind::Reseeded);
    last.check(&bench).await;
    bench.finish().await;
}

/// The host crashed between the end of a process and its own saving, so an older state, of a session that is no longer
/// the newest one, comes with the history of then or of now: the pool document's unverified case.
pub(crate) async fn older_state(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let saved = with_history(&bench, "crashed").await;

    // The process was retired and another one told the edited history; nothing of that was saved.
    let mut lost = saved.clone();
    lost.messages[0] = Message::user("edited");
    planned(&lost.say(&bench, "[[say lost]]").await, PlanKind::Reseeded);
    assert_ne!(lost.state, saved.state);
    bench = bench.restart().await;
    let mut back = saved.clone();
    planned(&back.say(&bench, "[[say back]]").await, PlanKind::Resumed);
    back.check(&bench).await;

    // The newer history was saved, the newer state was not: what follows the old state is told as frames.
    bench = bench.restart().await;
    let mut longer = back.clone();
    longer.state.clone_from(&saved.state);
    planned(
        &longer.say(&bench, "[[say longer]]").await,
        PlanKind::Resumed,
    );

    // That resume has cut the session's file: the state that lies behind the cut is of no use, and that costs nobody an
    // error.
    bench = bench.restart().await;
    let heard = back.say(&bench, "[[say behind the cut]]").await;
    eprintln!(
        "MEASURED {}: a state behind a cut: {:?}",
        cli.version,
        crate::talk::plan(&heard)
    );
    // The edited history with the old state.
    bench = bench.restart().await;
    lost.state.clone_from(&saved.state);
    planned(
        &lost.say(&bench, "[[say edited]]").await,
        PlanKind::Reseeded,
    );
    lost.check(&bench).await;
    bench.finish().await;
}

/// Told anew, signed and redacted thinking stay: the service accepts its signatures.
pub(crate) async fn reseeded(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut talk = with_history(&bench, "reseeded").await;
    talk.say(&bench, ROUND).await;
    let results = talk.results();
    talk.messages.push(Message::results(results));
    bench = bench.restart().await;
    talk.state = None;
    let heard = talk.good(&bench).await;
    planned(&heard, PlanKind::Reseeded);
    let thinks = |block: &&Block| matches!(block, Block::Thinking(_) | Block::RedactedThinking(_));
    let kept: usize = talk
        .messages
        .iter()
        .map(|each| each.content.iter().filter(thinks).count())
        .sum();
    assert_eq!(kept, 7);
    talk.check(&bench).await;
    // Twenty more, so that the whole of a longer one is told.
    for number in 0..10 {
        talk.say(&bench, &format!("[[think {number}]] [[say {number}]]"))
            .await;
    }
    bench = bench.restart().await;
    talk.state = None;
    planned(
        &talk.say(&bench, "[[say all of it]]").await,
        PlanKind::Reseeded,
    );
    bench.finish().await;
}
