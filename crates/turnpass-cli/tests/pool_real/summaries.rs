//! Where a summary is written, and that the service's cache finds what it has.

use serde_json::{Value, json};
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::{Done, Event, PlanKind, StateOrder};
use turnpass::request::{CallKind, Effort, StateRetirement, TransportSession};
use turnpass::{ErrorCode, Request, Transport as _};
use turnpass_lab::rig::{self, RealCli};
use turnpass_lab::upstream::Recorded;

use crate::bench::{Bench, until};
use crate::stage::{Heard, ask_with_tools, assert_valid, go_on, hear, host_messages};

async fn told(bench: &Bench, request: Request) -> Heard {
    hear(bench.pool.generate(request)).await
}

/// Waits until a process is gone with its whole group.
async fn gone(pid: i32) {
    until("a process is gone", || rig::alive_in_group(pid).is_empty()).await;
}

/// A conversation with a round of calls and a turn after it, and the request that goes on.
async fn begun(bench: &Bench) -> Request {
    let first =
        ask_with_tools("[[say I look]] [[call read {\"path\":\"a\"}]] [[then [[say seen]]]]");
    let heard = told(bench, first.clone()).await;
    let second = go_on(&first, heard.done());
    let heard = told(bench, second.clone()).await;
    assert_eq!(heard.text(), "seen");
    let third = kept(go_on(&second, heard.done()), heard.done());
    let heard = told(bench, third.clone()).await;
    kept(go_on(&third, heard.done()), heard.done())
}

fn kept(mut next: Request, done: &Done) -> Request {
    match &done.state {
        StateOrder::Keep { state } => next.state = Some(state.clone()),
        other => panic!("{other:?} in place of a state"),
    }
    next
}

/// The summary of what `next` would go on with, and its signal.
fn summary(next: &Request, prompt: &str) -> (Request, StateRetirement) {
    let mut request = next.clone();
    request.call = CallKind::Summary;
    request.messages.pop();
    request.messages.push(Message::user(prompt));
    request.with_retirement()
}

fn how(heard: &Heard) -> (PlanKind, String) {
    let started = heard.events.iter().find_map(|event| match event {
        Event::Started { how, .. } => Some((how.kind, how.reason.clone())),
        _ => None,
    });
    started.unwrap_or_else(|| panic!("it never started: {heard:?}"))
}

/// The messages as they went, marks of the cache left out; a text that is a plain string while it is not the last is a
/// block like the others.
fn raw(request: &Recorded) -> Vec<Value> {
    let mut messages = request
        .field("/messages")
        .unwrap()
        .as_array()
        .unwrap()
        .clone();
    for message in &mut messages {
        if let Some(text) = message["content"].as_str() {
            message["content"] = json!([{"type": "text", "text": text}]);
        }
        for block in message["content"].as_array_mut().into_iter().flatten() {
            block.as_object_mut().unwrap().remove("cache_control");
        }
    }
    messages
}

/// What the service has of `before` is the beginning of `after`, and is read from its cache.
#[track_caller]
fn goes_on_from(before: &Recorded, after: &Recorded) {
    for part in ["/model", "/system", "/tools"] {
        assert_eq!(before.field(part), after.field(part), "{part}");
    }
    let (old, new) = (raw(before), raw(after));
    assert!(old.len() < new.len());
    assert_eq!(old[..], new[..old.len()]);
    let (had, has) = (
        before.cache.as_ref().unwrap(),
        after.cache.as_ref().unwrap(),
    );
    assert_eq!(
        has.read,
        had.read + had.created_5m + had.created_1h,
        "{has:?}"
    );
}

/// What the host says and nothing of the CLI's but its surroundings.
#[track_caller]
fn holds(request: &Recorded, texts: &[&str]) {
    let all = Value::from(host_messages(request)).to_string();
    for text in texts {
        assert!(all.contains(text), "{text} is not in {all}");
    }
    assert!(
        !all.contains("No response requested") && !all.contains("interrupted"),
        "{all}"
    );
}

fn transcripts(bench: &Bench) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let projects = bench.dir().join("home/.claude/projects");
    let mut found = Vec::new();
    for folder in std::fs::read_dir(projects).into_iter().flatten().flatten() {
        for file in std::fs::read_dir(folder.path())
            .into_iter()
            .flatten()
            .flatten()
        {
            if file.path().extension().is_some_and(|ext| ext == "jsonl") {
                found.push((file.path(), std::fs::read(file.path()).unwrap()));
            }
        }
    }
    found.sort();
    found
}

pub(crate) async fn in_a_fork(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut next = begun(&bench).await;
    let before = transcripts(&bench);
    assert_eq!(before.len(), 1);
    for effort in [None, Some(Effort::Low)] {
        next.effort = effort;
        let (request, signal) = summary(&next, "[[say in short]] sum up");
        let heard = told(&bench, request).await;
        assert_eq!(heard.text(), "in short");
        assert_eq!(how(&heard).0, PlanKind::Forked);
        let done = heard.done();
        assert_eq!(
            (&done.state, done.upstream_requests),
            (&StateOrder::Unchanged, 1)
        );
        assert!(!signal.is_signaled());
        assert_eq!(
            transcripts(&bench),
            before,
            "the parent's is untouched, and no other is made"
        );
        let sent = bench.up.messages();
        goes_on_from(&sent[2], sent.last().unwrap());
        assert_eq!(host_messages(sent.last().unwrap()).len(), 7);
    }
    let spawned = bench.spawned();
    assert_eq!(spawned.len(), 3);
    for fork in &spawned[1..] {
        for flag in [
            "--fork-session",
            "--resume-session-at",
            "--max-turns 1",
            "--no-session-persistence",
        ] {
            assert!(fork.arguments.contains(flag), "{flag}: {}", fork.arguments);
        }
        gone(fork.pid).await;
    }
    next.effort = None;
    let heard = told(&bench, next).await;
    assert_eq!(how(&heard).0, PlanKind::Continued);
    let sent = bench.up.messages();
    goes_on_from(&sent[2], &sent[5]);
    assert!(!Value::from(raw(&sent[5])).to_string().contains("in short"));
    assert_valid(&sent);
    assert_eq!((sent.len(), bench.spawned().len()), (6, 3));
    bench.finish().await;
}

pub(crate) async fn of_an_older_part(cli: RealCli) {
    let bench = Bench::new(&cli);
    let next = begun(&bench).await;
    let mut older = next.clone();
    // The round of calls and its answer; the turn after it is left out.
    older.messages.truncate(5);
    let (request, _) = summary(&older, "[[say of the first]] sum up");
    let heard = told(&bench, request).await;
    assert_eq!(heard.text(), "of the first");
    assert_eq!(how(&heard).0, PlanKind::Forked);
    let sent = bench.up.messages();
    let (last, fork) = (raw(&sent[1]), raw(&sent[3]));
    assert_eq!(last[..], fork[..last.len()]);
    assert_eq!(host_messages(&sent[3]).len(), 5);
    assert_valid(&sent);
    assert_eq!(how(&told(&bench, next).await).0, PlanKind::Continued);
    bench.finish().await;
}

pub(crate) async fn in_place(cli: RealCli) {
    let bench = Bench::new(&cli);
    let next = begun(&bench).await;
    let (mut request, signal) = summary(&next, "[[say in place]] sum up");
    request.state = None;
    let heard = told(&bench, request).await;
    assert_eq!(heard.text(), "in place");
    assert_eq!(how(&heard).0, PlanKind::Continued);
    let done = heard.done();
    assert_eq!(
        (&done.state, done.upstream_requests),
        (&StateOrder::Clear, 1)
    );
    assert!(signal.is_signaled());
    gone(bench.spawned()[0].pid).await;
    goes_on_from(&bench.up.messages()[2], &bench.up.messages()[3]);
    cleared(&bench, next).await;
    bench.finish().await;
}

/// The request after a cleared state: the whole history, to a new process.
async fn cleared(bench: &Bench, mut next: Request) {
    next.state = None;
    let heard = told(bench, next).await;
    assert_eq!(how(&heard).0, PlanKind::Reseeded);
    assert!(matches!(heard.done().state, StateOrder::Keep { .. }));
    let sent = bench.up.messages();
    assert_valid(&sent);
    holds(sent.last().unwrap(), &["I look", "seen", "going on"]);
}

pub(crate) async fn in_the_middle_of_calls(cli: RealCli) {
    for with_results in [true, false] {
        let bench = Bench::new(&cli);
        let next = begun(&bench).await;
        let mut calling = next.clone();
        calling.messages.pop();
        calling.messages.push(Message::user(
            "[[call read {}]] [[then [[say in place]]]] look",
        ));
        let heard = told(&bench, calling.clone()).await;
        let (mut request, signal) = calling.clone().with_retirement();
        request.call = CallKind::Summary;
        if with_results {
            let result = ToolResult::text(heard.calls()[0].id.clone(), "the result");
            request.messages.push(heard.done().message.clone());
            request.messages.push(Message::results(vec![result]));
        } else {
            // What was before the turn that waits.
            request.messages.pop();
        }
        request
            .messages
            .push(Message::user("[[say in place]] sum up"));
        let heard = told(&bench, request).await;
        assert_eq!(heard.text(), "in place");
        let done = heard.done();
        assert_eq!(
            (&done.state, done.upstream_requests),
            (&StateOrder::Clear, 1)
        );
        assert!(signal.is_signaled());
        assert_eq!(bench.spawned().len(), 1);
        gone(bench.spawned()[0].pid).await;
        let sent = bench.up.messages();
        assert_valid(&sent);
        assert_eq!(sent.len(), 5);
        let before = if with_results { &sent[3] } else { &sent[2] };
        goes_on_from(before, &sent[4]);
        holds(&sent[4], &["sum up"]);
        bench.finish().await;
    }
}

pub(crate) async fn after_a_failed_fork(cli: RealCli) {
    let bench = Bench::new(&cli);
    let next = begun(&bench).await;
    // Somebody cleaned up behind the CLI's back.
    for (path, _) in transcripts(&bench) {
        std::fs::remove_file(path).unwrap();
    }
    let (request, signal) = summary(&next, "[[say in place]] sum up");
    let heard = told(&bench, request).await;
    assert_eq!(heard.text(), "in place");
    let (kind, reason) = how(&heard);
    assert_eq!(kind, PlanKind::Continued);
    assert!(reason.contains("process_exit"), "{reason}");
    let done = heard.done();
    assert_eq!(
        (&done.state, done.upstream_requests),
        (&StateOrder::Clear, 1)
    );
    assert!(signal.is_signaled());
    assert_eq!((bench.up.messages().len(), bench.spawned().len()), (4, 2));
    goes_on_from(&bench.up.messages()[2], &bench.up.messages()[3]);
    for one in bench.spawned() {
        gone(one.pid).await;
    }
    cleared(&bench, next).await;
    bench.finish().await;
}

pub(crate) async fn anew(cli: RealCli) {
    let bench = Bench::new(&cli);
    let next = begun(&bench).await;
    let bench = bench.restart().await;
    let before = transcripts(&bench);
    let (request, signal) = summary(&next, "[[say anew]] sum up");
    let heard = told(&bench, request).await;
    assert_eq!(heard.text(), "anew");
    assert_eq!(how(&heard).0, PlanKind::Reseeded);
    let done = heard.done();
    assert_eq!(
        (&done.state, done.upstream_requests),
        (&StateOrder::Clear, 1)
    );
    assert!(!signal.is_signaled());
    let fresh = &bench.spawned()[1];
    assert!(
        fresh
            .arguments
            .contains("--no-session-persistence --max-turns 1")
    );
    assert!(!fresh.arguments.contains("--resume"));
    gone(fresh.pid).await;
    assert_eq!(transcripts(&bench), before);
    let sent = bench.up.messages();
    assert_valid(&sent);
    let (live, anew) = (host_messages(&sent[2]), host_messages(&sent[3]));
    assert_eq!(live[..], anew[..live.len()]);
    assert_eq!(anew.len(), 7);
    cleared(&bench, next).await;
    bench.finish().await;
}

pub(crate) async fn of_a_sub_agent(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut first = ask_with_tools("[[call read {}]] [[then [[say seen]]]]");
    first.call = CallKind::SubAgent;
    first.session = TransportSession("child".to_owned());
    first.parent = Some(TransportSession::default());
    let heard = told(&bench, first.clone()).await;
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let second = go_on(&first, heard.done());
    let heard = told(&bench, second.clone()).await;
    assert_eq!(heard.done().state, StateOrder::Unchanged);
    let next = go_on(&second, heard.done());
    for (text, kind) in [
        ("in place", PlanKind::Continued),
        ("anew", PlanKind::Reseeded),
    ] {
        let (request, signal) = summary(&next, &format!("[[say {text}]] sum up"));
        let heard = told(&bench, request).await;
        assert_eq!((heard.text().as_str(), how(&heard).0), (text, kind));
        assert_eq!(heard.done().state, StateOrder::Unchanged);
        assert!(!signal.is_signaled());
    }
    let spawned = bench.spawned();
    assert_eq!(spawned.len(), 2);
    for one in &spawned {
        assert!(one.arguments.contains("--no-session-persistence"));
        gone(one.pid).await;
    }
    goes_on_from(&bench.up.messages()[1], &bench.up.messages()[2]);
    assert_valid(&bench.up.messages());
    assert!(transcripts(&bench).is_empty());
    bench.finish().await;
}

pub(crate) async fn with_a_call(cli: RealCli) {
    let bench = Bench::new(&cli);
    let next = begun(&bench).await;
    let prompts = [
        "[[say I look first]] [[call read {\"path\":\"x\"}]]",
        "[[raw-call read {\"path\":]]",
        "[[call nobody {}]]",
    ];
    for (n, prompt) in prompts.into_iter().enumerate() {
        let (request, signal) = summary(&next, prompt);
        let heard = told(&bench, request).await;
        let error = heard.failed(ErrorCode::SummaryToolCall);
        assert!(!error.backend_state_retired() && !signal.is_signaled());
        let shows_a_call = |event: &Event| {
            matches!(
                event,
                Event::ToolInput { .. } | Event::ToolCall(_) | Event::ToolRejected { .. }
            )
        };
        assert_eq!(heard.count(shows_a_call), 0);
        let fork = bench.spawned().pop().unwrap();
        gone(fork.pid).await;
        assert_eq!(bench.up.messages().len(), 4 + n, "the CLI did not go on");
    }
    assert!(!rig::alive_in_group(bench.spawned()[0].pid).is_empty());
    assert_eq!(how(&told(&bench, next).await).0, PlanKind::Continued);
    bench.finish().await;
}
