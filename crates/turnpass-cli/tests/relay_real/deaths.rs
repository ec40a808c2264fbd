//! CLI and host die by SIGKILL, at every place where it hurts.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use turnpass::event::Event;
use turnpass::{ErrorCode, Transport as _};
use turnpass_lab::rig;
use turnpass_lab::scenario::{Item, Reply};

use crate::bench::{BOUND, Bench, Setup, drain, read_until, say, until};
use crate::cancels::wait_closed;
use crate::child;

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// A typed failure, no tool released, the service's connection closed, and the next generation works.
pub(crate) async fn cli_killed(setup: Setup) {
    let bench = Bench::new(&setup);
    for round in 0..3 {
        bench.up.enqueue(Reply::content([
            Item::text("partial"),
            Item::Hold {
                gate: "never".into(),
            },
            Item::tool_use("write", serde_json::json!({"path": "a"})),
        ]));
        let mut generation = bench.relay.generate(say("go on"));
        read_until(&mut generation, |event| matches!(event, Event::Text { .. })).await;
        let number = bench.up.requests().last().unwrap().number;
        kill(bench.the_process().pid);
        let answer = drain(generation).await;
        let error = answer.error();
        assert_eq!(error.code(), ErrorCode::ProcessExit, "{error}");
        assert!(error.output_seen() && error.is_retryable());
        assert!(answer.calls().is_empty() && answer.rejected().is_empty());
        wait_closed(&bench, number).await;
        bench.all_gone().await;
        let (next, seen) = bench.ask(say("[[say whole]]")).await;
        assert_eq!((next.text().as_str(), seen.len()), ("whole", 1), "{next:?}");
        assert_eq!(bench.count(), 2 * (round + 1));
    }
    bench.finish().await;
}

/// A kept process that dies while nobody uses it costs nobody an error (bug 22).
pub(crate) async fn killed_between(setup: Setup) {
    let bench = Bench::new(&setup);
    let (first, _) = bench.ask(say("[[say one]]")).await;
    first.done();
    for round in 0..4 {
        let process = bench.the_process();
        kill(process.pid);
        if round % 2 == 0 {
            assert_eq!(rig::wait_gone(&[process.pid], BOUND), Vec::<i32>::new());
        }
        let (next, seen) = bench.ask(say("[[say next]]")).await;
        assert_eq!((next.text().as_str(), seen.len()), ("next", 1), "{next:?}");
        assert_ne!(bench.the_process().pid, process.pid);
    }
    assert_eq!((bench.count(), bench.spawned().len()), (5, 5));
    bench.finish().await;
}

/// `kill -9` of the host in the middle of a generation: every process of it ends, the service's connection closes, and
/// no private file of it stays (bug 21).
pub(crate) async fn host_killed(setup: Setup) {
    let bench = Bench::new(&setup);
    bench.up.enqueue(Reply::content([
        Item::text("partial"),
        Item::UntilClosed {},
    ]));
    let mut host = child::start(&child::Play {
        role: child::Role::Stall,
        ..child::Play::new(&bench)
    });
    let mut lines = BufReader::new(host.stdout.take().unwrap()).lines();
    let ready = lines
        .by_ref()
        .map_while(Result::ok)
        .any(|line| line == child::READY);
    assert!(ready, "the host did not get as far as a first delta");
    if setup.is_warm() {
        until("the spare is there as well", || bench.spawned().len() == 2).await;
    }
    let number = bench.up.requests().last().unwrap().number;
    let left = bench.spawned();
    host.kill().unwrap();
    let killed = Instant::now();
    assert_eq!(host.wait().unwrap().signal(), Some(9));
    wait_closed(&bench, number).await;
    bench.all_gone().await;
    eprintln!(
        "MEASURED {}: host killed to no process left: {:.1?}",
        setup.name(),
        killed.elapsed()
    );

    until("the guards removed the private files", || {
        left.iter().all(|one| !one.dir.exists())
    })
    .await;
    let (next, seen) = bench.ask(say("[[say whole]]")).await;
    assert_eq!((next.text().as_str(), seen.len()), ("whole", 1));
    bench.finish().await;
}
