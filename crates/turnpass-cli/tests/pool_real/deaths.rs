//! `kill -9` of the CLI at random points: nothing is lost, and no tool is run twice.

use std::collections::BTreeMap;

use turnpass::conversation::Message;
use turnpass::event::Event;
use turnpass_lab::rig::RealCli;

use crate::bench::{Bench, Random};
use crate::holds::upstream_holds;
use crate::stage::{Heard, PATIENCE};
use crate::talk::Talk;

/// Other points on each version: the three are 30 together.
const KILLS: usize = 10;
/// On each version, when it is asked for.
const MANY_KILLS: usize = 30;

/// Where a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Point {
    /// With this event of an answer.
    Event(usize),
    /// As soon as the answer is whole; with calls it is parked.
    End,
    /// Some scheduling after that.
    Later(usize),
    /// As soon as something is asked.
    Asked(usize),
}

pub(crate) async fn ten(cli: RealCli) {
    let seed = seed(&cli);
    killed(&cli, KILLS, seed).await;
}

pub(crate) async fn thirty(cli: RealCli) {
    killed(&cli, MANY_KILLS, 22).await;
}

/// The last number of the version.
pub(crate) fn seed(cli: &RealCli) -> u64 {
    let last = cli.version.rsplit('.').next();
    last.and_then(|number| number.parse().ok()).unwrap()
}

/// An agent whose CLI dies in every turn.
async fn killed(cli: &RealCli, most: usize, seed: u64) {
    let bench = Bench::new(cli);
    let mut random = Random::new(seed);
    let mut talk = Talk::new("killed");
    let (mut kills, mut errors) = (0, BTreeMap::new());
    let mut turn = 0;
    while kills < most {
        let text = format!(
            r#"turn {turn} [[chunk 4 ms 2]] [[think why]] [[say so we go on]] [[call read {{"path":"a"}}]] [[call write {{"path":"b"}}]] [[then [[chunk 3 ms 2]] [[say half]] [[call read {{}}]] [[then [[chunk 4 ms 2]] [[say this was turn {turn}]]]]]]"#
        );
        turn += 1;
        talk.messages.push(Message::user(text));
        loop {
            let point = match random.below(8) {
                0 | 1 => Some(Point::Event(random.below(25))),
                2 => Some(Point::End),
                3 => Some(Point::Later(random.below(200))),
                4 => Some(Point::Asked(random.below(60))),
                _ => None,
            };
            let point = point.filter(|_| kills < most);
            kills += usize::from(point.is_some());
            let history = talk.messages.clone();
            let heard = generate(&bench, &talk, point).await;
            if let Some(error) = &heard.error {
                // A host that tries again what may be tried again.
                assert!(error.is_retryable(), "{error} at {point:?}");
                *errors.entry(error.code().as_str()).or_insert(0) += 1;
                continue;
            }
            upstream_holds(&history, &bench.newest());
            talk.keep(&heard);
            if heard.calls().is_empty() {
                break;
            }
            let results = talk.results();
            talk.messages.push(Message::results(results));
        }
        let said = talk.messages.last().unwrap().text();
        assert_eq!(said, format!("this was turn {}", turn - 1));
    }
    assert_eq!(talk.ran.len(), 3 * turn, "each call of each turn, once");
    talk.check(&bench).await;
    eprintln!(
        "MEASURED {}: CLI killed {kills} times in {turn} turns, errors {errors:?}, {} processes, {} requests",
        cli.version,
        bench.spawned().len(),
        bench.count()
    );
    bench.finish().await;
}

async fn generate(bench: &Bench, talk: &Talk, point: Option<Point>) -> Heard {
    let mut generation = talk.generate(&bench.pool);
    let mut heard = Heard::default();
    if let Some(Point::Asked(times)) = point
        && !bench.spawned().is_empty()
    {
        for _ in 0..times {
            tokio::task::yield_now().await;
        }
        bench.kill_newest();
    }
    let mut events = 0;
    loop {
        let next = tokio::time::timeout(PATIENCE, generation.next()).await;
        match next.expect("an event or the end") {
            Some(Ok(Event::Done(done))) => heard.done = Some(done),
            Some(Ok(event)) => heard.events.push(event),
            Some(Err(error)) => heard.error = Some(error),
            None => break,
        }
        if point == Some(Point::Event(events)) {
            bench.kill_newest();
        }
        events += 1;
    }
    match point {
        Some(Point::End) => bench.kill_newest(),
        Some(Point::Later(times)) => {
            for _ in 0..times {
                tokio::task::yield_now().await;
            }
            bench.kill_newest();
        }
        _ => {}
    }
    heard
}
