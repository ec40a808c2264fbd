//! A host that leaves at any moment: the service's connection closes, and the next request is exact.

use turnpass::conversation::Message;
use turnpass::event::Event;
use turnpass_lab::rig::RealCli;

use crate::bench::{Bench, Random, within};
use crate::holds::{sent, upstream_holds};
use crate::stage::{is_text, until as heard};
use crate::talk::Talk;

const SEED: u64 = 77;
const CANCELS: usize = 200;

/// 200 drops at random moments of one conversation. Every request, also each that is dropped, holds the host's history and
/// nothing of what was dropped before it.
pub(crate) async fn two_hundred(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut random = Random::new(SEED);
    let mut talk = Talk::new("cancelled");
    talk.say(&bench, "[[think first]] [[say hello]]").await;
    // Each line has a number of its own, by which its requests are found: one that was dropped early may still come.
    let mut told: Vec<Told> = Vec::new();
    for round in 0..CANCELS {
        let before = bench.count();
        let kind = random.below(8);
        let slow = random.below(4);
        let text = match kind {
            0 | 1 => format!("{round} [[chunk 5 ms {slow}]] [[text-size 4000]]"),
            2 => format!("{round} [[stall closed]]"),
            3 => format!("{round} [[say half]] [[stall closed]]"),
            4 => format!(
                r#"{round} [[chunk 3 ms {slow}]] [[call write {{"path":"a long path of some words"}}]] [[stall closed]]"#
            ),
            5 => format!("{round} [[delay 3000]] [[say late]]"),
            6 => format!(
                "{round} [[call read {{}}]] [[call write {{}}]] [[then [[say half]] [[stall closed]]]]"
            ),
            _ => format!("{round} [[say short]]"),
        };
        talk.messages.push(Message::user(text));
        let mut history = talk.messages.clone();
        let mut generation = talk.generate(&bench.pool);
        match kind {
            0 => {
                for _ in 0..=random.below(30) {
                    heard(&mut generation, "text", is_text).await;
                }
            }
            1 | 7 => {
                for _ in 0..random.below(40) {
                    tokio::task::yield_now().await;
                }
                if random.below(2) == 0 {
                    let found = bench
                        .up
                        .wait_for("a request", |each| each.number as usize > before);
                    let _ = found.await;
                }
            }
            2 | 5 => {
                // One of the line before may still be on its way.
                let line = format!("\"{round} [[");
                let own = |body: &[u8]| String::from_utf8_lossy(body).contains(&line);
                let came = bench.up.wait_for("the request", |each| own(&each.body));
                came.await.unwrap();
            }
            3 => heard(&mut generation, "text", is_text).await,
            4 => {
                heard(&mut generation, "input", |event| {
                    matches!(event, Event::ToolInput { .. })
                })
                .await;
            }
            _ => {
                // Parked; then the answer to the results is dropped.
                let calls = crate::stage::hear(generation).await;
                talk.keep(&calls);
                let results = talk.results();
                talk.messages.push(Message::results(results));
                history.clone_from(&talk.messages);
                generation = talk.generate(&bench.pool);
                heard(&mut generation, "text", is_text).await;
            }
        }
        drop(generation);
        told.push(Told {
            line: format!("{round} [["),
            at: history
                .iter()
                .rposition(|each| each.text().starts_with(&round.to_string()))
                .unwrap(),
            history,
            most: if kind == 6 { 2 } else { 1 },
            least: usize::from(matches!(kind, 0 | 2..=5)) + 2 * usize::from(kind == 6),
        });
        // What the host does with it: it forgets the turn, keeps the rounds of tools, or says something else after them.
        match (kind, random.below(2)) {
            (6, 0) => {
                let last = talk.messages.last_mut().unwrap();
                last.content
                    .push(turnpass::conversation::Block::text("[[say on]]"));
                told.last_mut().unwrap().most = 3;
                told.last_mut().unwrap().history.clone_from(&talk.messages);
                assert_eq!(talk.go_on(&bench).await.text(), "on");
                upstream_holds(&told.last().unwrap().history, &bench.newest());
            }
            (6, _) => talk.messages.truncate(talk.messages.len() - 3),
            _ => {
                talk.messages.pop();
            }
        }
        if round % 10 == 9 {
            talk.messages.push(Message::user(format!(
                "{} [[say still here]]",
                CANCELS + round
            )));
            let history = talk.messages.clone();
            assert_eq!(talk.go_on(&bench).await.text(), "still here");
            upstream_holds(&history, &bench.newest());
        }
    }
    let reached = accounted(&bench, &told).await;
    talk.check(&bench).await;
    eprintln!(
        "MEASURED {}: {CANCELS} cancels, {reached} of them of a request that was under way, {} processes",
        cli.version,
        bench.spawned().len()
    );
    bench.finish().await;
}

/// A line that was dropped.
struct Told {
    line: String,
    /// Its place in the history.
    at: usize,
    history: Vec<Message>,
    most: usize,
    least: usize,
}

/// Each line reached the service no more often than it may, with exactly its history, and each connection is closed.
async fn accounted(bench: &Bench, told: &[Told]) -> usize {
    let all = bench.up.messages();
    let held: Vec<_> = all.iter().map(|each| sent(each).unwrap()).collect();
    let mut reached = 0;
    for line in told {
        let is_own = |held: &[serde_json::Value]| {
            let text = held.get(line.at).map(|each| &each["content"][0]["text"]);
            let text = text.and_then(serde_json::Value::as_str);
            // Later lines have it in their history when its turn was kept.
            text.is_some_and(|text| text.starts_with(&line.line))
                && held.len() <= line.history.len()
        };
        let own = all.iter().zip(&held).filter(|(_, held)| is_own(held));
        let own: Vec<_> = own.collect();
        let allowed = line.least..=line.most;
        assert!(
            allowed.contains(&own.len()),
            "{}: {} requests",
            line.line,
            own.len()
        );
        reached += own.len().min(1);
        if let Some((last, held)) = own.last() {
            within("closing", bench.wait_closed(last.number)).await;
            if held.len() == line.history.len() {
                upstream_holds(&line.history, last);
            }
        }
    }
    reached
}
