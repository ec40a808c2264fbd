//! A host that leaves: at any moment the service's connection closes, and nothing of the generation stays.

use std::time::{Duration, Instant};

use turnpass::Transport as _;
use turnpass::event::{Event, StopReason};
use turnpass_lab::scenario::{Item, Reply};
use turnpass_lab::upstream::Options;

use crate::bench::{BOUND, Bench, Setup, read_until, say, until};

/// Drops of kept processes and of processes of their own, which each cost a start.
const DROPS: (usize, usize) = (50, 8);

/// Drops whose next generation follows at once.
const FOLLOWED_DROPS: usize = 15;

fn endless() -> Reply {
    Reply::content([Item::text("a partial answer"), Item::UntilClosed {}])
}

/// Partial text was heard; the drop closes the service's connection and ends or frees the process.
pub(crate) async fn after_first_delta(setup: Setup) {
    let bench = Bench::new(&setup);
    let drops = if setup.is_warm() { DROPS.0 } else { DROPS.1 };
    let mut lags = Vec::new();
    for _ in 0..drops {
        bench.up.enqueue(endless());
        let mut generation = bench.relay.generate(say("go on"));
        let events = read_until(&mut generation, is_text).await;
        assert!(events.iter().any(is_text));
        let number = bench.up.requests().last().unwrap().number;
        let dropped = Instant::now();
        drop(generation);
        let closed = wait_closed(&bench, number).await;
        lags.push(closed.saturating_duration_since(dropped));
        bench.settle().await;
    }
    tell("drop to closed upstream connection", &setup, lags);
    assert_eq!(bench.count(), drops);
    let starts = bench.spawned().len();
    let (next, seen) = bench.ask(say("[[say whole]]")).await;
    assert_eq!(
        (next.text().as_str(), &next.done().stop),
        ("whole", &StopReason::EndTurn)
    );
    assert_eq!(seen.len(), 1);
    if setup.is_warm() {
        assert_eq!(
            (starts, bench.spawned().len()),
            (1, 1),
            "the same process serves all"
        );
    }
    bench.finish().await;
}

/// Cancels at 0 ms, before the CLI's first record, while the service is silent, while a spare is primed, and two at once.
pub(crate) async fn early(setup: Setup) {
    let bench = Bench::with(&setup, Options::default(), |options| options.spares = 1);
    for _ in 0..10 {
        drop(bench.relay.generate(say("[[say never]]")));
    }
    let before = bench.spawned().len();
    let generation = bench.relay.generate(say("[[say never]]"));
    until("a process was started", || bench.spawned().len() > before).await;
    drop(generation);
    let before = bench.spawned().len();
    let (one, other) = (
        bench.relay.generate(say("[[say never]]")),
        bench.relay.generate(say("[[say never]]")),
    );
    if !setup.is_warm() {
        until("a process was started", || bench.spawned().len() > before).await;
    }
    drop((one, other));
    assert_eq!(
        bench.count(),
        0,
        "nothing was sent for anybody who had left"
    );

    let silent = Reply {
        before_head_ms: 2 * 60_000,
        ..Reply::text("late")
    };
    bench.up.enqueue(silent);
    let generation = bench.relay.generate(say("go on"));
    let came = bench
        .up
        .wait_for_within("the request", BOUND, |_| true)
        .await
        .unwrap();
    drop(generation);
    wait_closed(&bench, came.number).await;

    let (next, seen) = bench.ask(say("[[say whole]]")).await;
    assert_eq!((next.text().as_str(), seen.len()), ("whole", 1));
    bench.up.enqueue(endless());
    let mut last = bench.relay.generate(say("go on"));
    read_until(&mut last, is_text).await;
    drop(last);
    // The shutdown meets a cancel that is still under way.
    bench.finish().await;
}

/// What is left of a cancelled answer is not in the next one, which does not wait for it (bug 76).
pub(crate) async fn next_is_clean(setup: Setup) {
    let bench = Bench::new(&setup);
    for round in 0..FOLLOWED_DROPS {
        let old = Item::Text {
            text: "old ".repeat(2_000),
            chunk: std::num::NonZeroUsize::new(8),
        };
        bench.up.enqueue(Reply {
            between_events_ms: 1,
            ..Reply::content([old])
        });
        let mut generation = bench.relay.generate(say("go on"));
        read_until(&mut generation, is_text).await;
        drop(generation);
        let before = bench.count();
        let new = format!("new {round}");
        let answer =
            crate::bench::drain(bench.relay.generate(say(&format!("[[say {new}]]")))).await;
        assert_eq!(answer.text(), new);
        assert_eq!(answer.done().message.text(), new);
        assert_eq!(bench.count(), before + 1);
    }
    bench.abandon().await;
}

fn is_text(event: &Event) -> bool {
    matches!(event, Event::Text { .. })
}

pub(crate) async fn wait_closed(bench: &Bench, number: u64) -> Instant {
    let closed = |request: &turnpass_lab::upstream::Recorded| {
        request.number == number && request.client_closed_at().is_some()
    };
    let request = bench
        .up
        .wait_for_within("a closed connection", BOUND, closed)
        .await
        .unwrap();
    request.client_closed_at().unwrap()
}

/// Prints the median and the 95th percentile.
pub(crate) fn tell(what: &str, setup: &Setup, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    let (count, half, most) = (times.len(), at(50), at(95));
    eprintln!(
        "MEASURED {}: {what}: median {half:.1?}, p95 {most:.1?} of {count}",
        setup.name()
    );
}
