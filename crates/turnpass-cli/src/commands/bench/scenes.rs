//! The scenes of one conversation: how soon a request is at the upstream, and its answer at the host.

use std::time::{Duration, Instant};

use turnpass::conversation::Message;
use turnpass::{Event, Provider};

use super::bed::{self, Bed, Ground, Make, Seen, is_of, row, unseen};
use super::figures::{Goal, Outcome, Row, Spread};
use super::talk::{self, HISTORY_BYTES, PAIRS, SHORT, Words};
use super::tap::{Kind, Taps};
use crate::exit::Fault;

/// Deltas of one answer, and the time between them.
const DELTAS: usize = 200;
/// A body of almost the largest size that the relay sends, 8 MiB.
const HEAVY_BYTES: usize = 79 * 1024 * 1024 / 10;

/// A conversation that nobody has seen.
pub(super) fn fresh(words: &mut Words) -> Vec<Message> {
    let mut messages = words.history(PAIRS, HISTORY_BYTES);
    messages.push(Message::user(SHORT));
    messages
}

/// A long history, never seen before; then the same and one message more.
pub(super) async fn hist(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let mut words = Words::new();
    let mut hist = [Vec::new(), Vec::new(), Vec::new()];
    let mut follow = [Vec::new(), Vec::new(), Vec::new()];
    let mut is_real = true;
    for (place, make) in [(1, Make::WARM), (2, Make::COLD)] {
        let bed = Bed::new(ground, make).await?;
        bed.warm_up(&mut words).await?;
        is_real &= bed.player().kind == "real";
        for _ in 0..ground.requests {
            let mut messages = fresh(&mut words);
            let first = bed.generate(bed.request(messages.clone())).await?;
            if place == 1 {
                hist[0].push(bed.control(&first.recorded).await?);
            }
            messages.extend(first.done.as_ref().map(|done| done.message.clone()));
            messages.push(Message::user(format!("{} {SHORT}", words.text(200))));
            hist[place].push(first);
            let next = bed.generate(bed.request(messages)).await?;
            if place == 1 {
                follow[0].push(bed.control(&next.recorded).await?);
            }
            follow[place].push(next);
        }
        bed.clear().await?;
    }
    let rows = |all: &[Vec<Seen>; 3]| {
        let names = ["direct", "warm", "per-request"];
        names
            .iter()
            .zip(all)
            .map(|(name, all)| row(name, all))
            .collect()
    };
    let mut hist = Outcome {
        scene: "hist".to_owned(),
        about: "20 pairs, 40 KB, ten tools, never seen before; ms, median / p95 (least)",
        rows: rows(&hist),
        ..Outcome::default()
    };
    let warm = hist.p50("warm", "to_upstream").unwrap_or_default();
    let cold = hist.p50("per-request", "to_upstream").unwrap_or_default();
    hist.goals = vec![Goal::at_most(
        "warm, to the upstream, median ms",
        35.0,
        warm,
    )];
    if is_real {
        // The scripted CLI starts in some milliseconds, so there is nothing to be spared.
        hist.goals.push(Goal::at_least(
            "a start's time over the warm one's",
            10.0,
            cold / warm.max(0.001),
        ));
    }
    hist.goals.push(one_each(&hist.rows));
    let follow = Outcome {
        scene: "follow".to_owned(),
        about: "the same conversation and one message more; ms, median / p95 (least)",
        goals: Vec::new(),
        rows: rows(&follow),
        ..Outcome::default()
    };
    Ok(vec![hist, follow])
}

/// The goal that every generation is one request upstream.
pub(super) fn one_each(rows: &[Row]) -> Goal {
    #[allow(clippy::cast_precision_loss, reason = "at most some thousand requests")]
    let most = rows
        .iter()
        .filter(|row| row.generations > 0)
        .map(|row| row.upstream_requests as f64 / row.generations as f64)
        .fold(0.0, f64::max);
    Goal::at_most("upstream requests a generation", 1.0, most)
}

/// turnpass's own share, seen from a tap between it and the CLI.
pub(super) async fn own(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let mut words = Words::new();
    let bed = Bed::new(ground, Make::TAPPED).await?;
    bed.warm_up(&mut words).await?;
    let mut rows = Vec::new();
    for (name, rounds, bytes) in [
        ("hist 40 KB", ground.requests * 3, HISTORY_BYTES),
        ("7.9 MiB", ground.requests, HEAVY_BYTES),
    ] {
        let (mut ours, mut direct) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut messages = words.heavy_history(bytes);
            messages.push(Message::user(SHORT));
            let seen = bed.generate(bed.request(messages)).await?;
            direct.push(bed.control(&seen.recorded).await?.to_upstream);
            ours.push(seen);
        }
        let control = Spread::of(direct.iter().copied());
        let shares = shares(bed.taps.as_ref(), &ours)?;
        let figure = |pick: fn(&Share) -> Duration| Spread::of(shares.iter().map(pick));
        let less_direct = shares
            .iter()
            .zip(&direct)
            .map(|(share, direct)| share.own().saturating_sub(*direct));
        rows.push(
            row(name, &ours)
                .with("own", figure(Share::own))
                .with("own_less_direct", Spread::of(less_direct))
                .with("to_line", figure(|share| share.to_line))
                .with("to_arrival", figure(|share| share.to_arrival))
                .with("cli", figure(|share| share.cli))
                .with("direct", control),
        );
    }
    bed.clear().await?;
    let at = |row: &Row, figure: &str| row.spread(figure).map_or(0.0, |spread| spread.p50);
    let goals = vec![
        Goal::at_most("own share, median ms", 1.0, at(&rows[0], "own")),
        Goal::at_most(
            "own share of 7.9 MiB less the plain client's time, median ms",
            15.0,
            at(&rows[1], "own_less_direct"),
        ),
    ];
    Ok(vec![Outcome {
        scene: "own".to_owned(),
        about: "our share: call to line, and the CLI's request to the upstream; ms, median / p95 (least)",
        rows,
        goals,
        ..Outcome::default()
    }])
}

/// How the time of one request to the upstream is made up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// From the host's call to the line at the CLI.
    pub(super) to_line: Duration,
    /// From the line to the CLI's whole request.
    pub(super) cli: Duration,
    /// From there to the whole request at the upstream.
    to_arrival: Duration,
}

impl Share {
    pub(super) fn own(&self) -> Duration {
        self.to_line + self.to_arrival
    }
}

/// How often, and how far apart, the notes of a tap are looked at again: it writes one after the line has gone on, and a
/// quick CLI has answered by then.
const NOTE_LOOKS: u32 = 100;
const NOTE_LOOK: Duration = Duration::from_millis(20);

/// The shares of generations that ran one after the other.
pub(super) fn shares(taps: Option<&Taps>, all: &[Seen]) -> Result<Vec<Share>, Fault> {
    shares_since(Kind::Line, taps, all)
}

/// The same, where what the CLI is given last is of another kind.
pub(super) fn shares_since(
    given: Kind,
    taps: Option<&Taps>,
    all: &[Seen],
) -> Result<Vec<Share>, Fault> {
    for _ in 0..NOTE_LOOKS {
        if let Some(shares) = noted(given, taps, all) {
            return Ok(shares);
        }
        std::thread::sleep(NOTE_LOOK);
    }
    Err(Fault::system("a tap missed a request", "Try again."))
}

fn noted(given: Kind, taps: Option<&Taps>, all: &[Seen]) -> Option<Vec<Share>> {
    let stamps = taps.map(Taps::stamps).unwrap_or_default();
    let within = |kind: Kind, seen: &Seen| {
        let arrived = seen.began + seen.to_upstream;
        let mut found = stamps
            .iter()
            .filter(|stamp| stamp.kind == kind && stamp.at >= seen.began && stamp.at <= arrived);
        found.next().map(|stamp| stamp.at)
    };
    let share = |seen: &Seen| {
        let (line, post) = (within(given, seen)?, within(Kind::Post, seen)?);
        Some(Share {
            to_line: line - seen.began,
            cli: post.saturating_duration_since(line),
            to_arrival: (seen.began + seen.to_upstream).saturating_duration_since(post),
        })
    };
    all.iter().map(share).collect()
}

/// From a delta at the upstream to its event at the host.
pub(super) async fn delta(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let mut words = Words::new();
    let prompt = format!("[[text-size {}]] [[chunk 10 ms 5]]", DELTAS * 10);
    let mut rows: [Vec<Duration>; 3] = Default::default();
    let mut counts = [
        Row::new("direct"),
        Row::new("warm"),
        Row::new("per-request"),
    ];
    for (place, make) in [(1, Make::WARM), (2, Make::COLD)] {
        let bed = Bed::new(ground, make).await?;
        bed.warm_up(&mut words).await?;
        for _ in 0..ground.requests.div_ceil(5) {
            let mut messages = words.history(2, 2048);
            messages.push(Message::user(prompt.clone()));
            let seen = bed.generate(bed.request(messages)).await?;
            rows[place].extend(seen.deltas());
            counts[place].generations += 1;
            counts[place].upstream_requests += seen.upstream_requests;
            if place == 1 {
                let control = bed.control(&seen.recorded).await?;
                rows[0].extend(control.deltas());
                counts[0].generations += 1;
                counts[0].upstream_requests += control.upstream_requests;
            }
        }
        bed.clear().await?;
    }
    let rows: Vec<Row> = counts
        .into_iter()
        .zip(rows)
        .map(|(count, deltas)| count.with("delta", Spread::of(deltas)))
        .collect();
    let warm = rows[1].spread("delta").map_or(0.0, |spread| spread.p50);
    Ok(vec![Outcome {
        scene: "delta".to_owned(),
        about: "a delta at the upstream to its event at the host, 200 a generation at 5 ms; ms, median / p95 (least)",
        goals: vec![
            Goal::at_most("warm, a delta, median ms", 0.3, warm),
            one_each(&rows),
        ],
        rows,
        ..Outcome::default()
    }])
}

/// From dropping the stream to the end of the connection at the upstream.
pub(super) async fn drop_stream(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let mut words = Words::new();
    let (mut rows, mut goals) = (Vec::new(), Vec::new());
    for (name, make) in [("warm", Make::WARM), ("per-request", Make::COLD)] {
        let bed = Bed::new(ground, make).await?;
        bed.warm_up(&mut words).await?;
        let before = bed.stage.upstream.messages().len();
        let mut times = Vec::new();
        let mut next = Vec::new();
        for _ in 0..ground.requests * 5 {
            times.push(drop_one(&bed, &mut words).await?);
            let began = Instant::now();
            let mut messages = words.history(2, 2048);
            messages.push(Message::user(SHORT));
            if make.process == crate::settings::Process::Warm && times.len() % 5 == 0 {
                // A dropped generation must not make the next one wait.
                let seen = bed.generate(bed.request(messages)).await?;
                next.push(seen.to_upstream.min(began.elapsed()));
            }
        }
        let after = bed.stage.upstream.messages().len();
        let spread = Spread::of(times);
        goals.push(Goal::at_most(
            format!("{name}, 95 of 100, ms"),
            50.0,
            spread.p95,
        ));
        let mut row = Row {
            generations: ground.requests * 5 + next.len(),
            upstream_requests: after - before,
            ..Row::new(name)
        }
        .with("closed", spread);
        if !next.is_empty() {
            row = row.with("next_to_upstream", Spread::of(next));
        }
        rows.push(row);
        bed.clear().await?;
    }
    goals.push(one_each(&rows));
    Ok(vec![Outcome {
        scene: "drop".to_owned(),
        about: "the host drops the stream after the first delta; until the upstream sees it; ms, median / p95 (least)",
        rows,
        goals,
        ..Outcome::default()
    }])
}

async fn drop_one(bed: &Bed, words: &mut Words) -> Result<Duration, Fault> {
    let mut messages = words.history(2, 2048);
    messages.push(Message::user("[[text-size 8000]] [[chunk 8 ms 5]]"));
    let before = bed.stage.upstream.requests().len() as u64;
    let mut generation = bed.provider.generate(bed.request(messages));
    loop {
        match generation.next().await.transpose()? {
            Some(Event::Text { .. }) => break,
            Some(_) => {}
            None => return Err(Fault::system("an answer had no text", "Try again.")),
        }
    }
    let dropped = Instant::now();
    drop(generation);
    let seen = bed
        .stage
        .upstream
        .wait_for("the end of a dropped stream", |seen| {
            is_of(seen, before, None) && seen.client_closed_at().is_some()
        })
        .await
        .map_err(unseen)?;
    let closed = seen.client_closed_at().unwrap_or(dropped);
    Ok(closed.saturating_duration_since(dropped))
}

/// A host that has just started: without anything ready, and with a process that was made ready.
pub(super) async fn spawn(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    let mut words = Words::new();
    let make = Make {
        spares: 0,
        ..Make::WARM
    };
    let bed = Bed::new(ground, make).await?;
    bed.warm_up(&mut words).await?;
    let (mut cold, mut primed, mut ready) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ground.requests {
        for prime in [false, true] {
            let transport = bed.transport()?;
            let request = bed.request(fresh(&mut words));
            if prime {
                let began = Instant::now();
                transport.warm_up(&request).await?;
                ready.push(began.elapsed());
            }
            let provider = Provider::new(transport);
            let seen = bed::generate(&provider, &bed.stage.upstream, request, None).await?;
            provider.shutdown().await?;
            match prime {
                true => primed.push(seen),
                false => cold.push(seen),
            }
        }
    }
    let is_real = bed.player().kind == "real";
    bed.clear().await?;
    let rows = vec![
        row("new host", &cold),
        row("made ready", &primed).with("making_ready", Spread::of(ready)),
    ];
    let at = |row: &Row| row.spread("to_upstream").map_or(0.0, |spread| spread.p50);
    let mut goals = vec![one_each(&rows)];
    if is_real {
        goals.push(Goal::at_least(
            "a new host's first request over one that was made ready",
            10.0,
            at(&rows[0]) / at(&rows[1]).max(0.001),
        ));
    }
    Ok(vec![Outcome {
        scene: "spawn".to_owned(),
        about: "the first request of a host: version, sign-in and start on the way, or made ready before; ms, median / p95 (least)",
        rows,
        goals,
        ..Outcome::default()
    }])
}

/// How fast the CLI's lines are decoded.
pub(super) fn decode() -> Outcome {
    use turnpass::wire::{lines, stream_json, surrogates};
    let line = r#"{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" jumps over\nthe “lazy” dog"}},"session_id":"11111111-2222-3333-4444-555555555555","parent_tool_use_id":null,"uuid":"66666666-7777-8888-9999-000000000000"}"#;
    let stream = format!("{line}\n").repeat(20_000).into_bytes();
    let speeds = (0..5).map(|_| {
        let began = Instant::now();
        let mut splitter = lines::LineSplitter::default();
        for chunk in stream.chunks(lines::READ_BYTES) {
            splitter.push(chunk);
            while let Ok(Some(line)) = splitter.next_line() {
                std::hint::black_box(stream_json::decode(&surrogates::repair(&line)).is_ok());
            }
        }
        #[allow(clippy::cast_precision_loss, reason = "some megabytes")]
        let megabytes = stream.len() as f64 / 1e6;
        megabytes / began.elapsed().as_secs_f64()
    });
    let speed = Spread::of_numbers(speeds.collect());
    Outcome {
        scene: "decode".to_owned(),
        about: "lines of text deltas from the CLI to records; MB/s, median / p95 (least)",
        goals: vec![Goal::at_least("MB/s, median", 200.0, speed.p50)],
        rows: vec![Row::new("stream-json").with("mb_per_s", speed)],
        ..Outcome::default()
    }
}

/// Tools and their results, with the round trip between two requests.
pub(super) async fn tools(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    use turnpass::conversation::ToolResult;
    let mut words = Words::new();
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    let mut loops: [Vec<Duration>; 3] = Default::default();
    for (place, make) in [(1, Make::WARM), (2, Make::COLD)] {
        let bed = Bed::new(ground, make).await?;
        bed.warm_up(&mut words).await?;
        for _ in 0..ground.requests {
            let mut messages = words.history(2, 2048);
            let prompt = r#"[[call read {"path":"a.txt"}]] [[then [[say It says hello.]]]]"#;
            messages.push(Message::user(prompt));
            let first = bed.generate(bed.request(messages.clone())).await?;
            let Some(done) = &first.done else { continue };
            let results = done.message.tool_calls();
            let results: Vec<_> = results
                .map(|call| ToolResult::text(call.id.clone(), "hello"))
                .collect();
            messages.push(done.message.clone());
            messages.push(Message::results(results));
            let second = bed.generate(bed.request(messages)).await?;
            if place == 1 {
                let control = [
                    bed.control(&first.recorded).await?,
                    bed.control(&second.recorded).await?,
                ];
                loops[0].push(control.iter().map(|seen| seen.net).sum());
                let [_, second] = control;
                all[0].push(second);
            }
            loops[place].push(first.net + second.net);
            all[place].push(second);
        }
        bed.clear().await?;
    }
    let names = ["direct", "warm", "per-request"];
    let rows: Vec<Row> = (0..3)
        .map(|n| row(names[n], &all[n]).with("loop_net", Spread::of(loops[n].iter().copied())))
        .collect();
    Ok(vec![Outcome {
        scene: "tools".to_owned(),
        about: "a tool's result to the next request at the upstream, and both requests' own time; ms, median / p95 (least)",
        goals: vec![one_each(&rows)],
        rows,
        ..Outcome::default()
    }])
}

/// What it costs when the next request wants another model, effort, prompt or other tools.
pub(super) async fn refit(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    const KINDS: [&str; 7] = [
        "nothing",
        "model",
        "effort",
        "prompt",
        "tools",
        "all",
        "700 KB tools",
    ];
    use turnpass::request::Effort;
    let mut words = Words::new();
    let bed = Bed::new(ground, Make::TAPPED).await?;
    bed.warm_up(&mut words).await?;
    let mut all: [Vec<Seen>; 7] = Default::default();
    for _ in 0..ground.requests {
        for (place, kind) in KINDS.iter().enumerate() {
            bed.generate(bed.request(fresh(&mut words))).await?;
            let mut request = bed.request(fresh(&mut words));
            if ["model", "all"].contains(kind) {
                let other = if request.model.0.contains("opus") {
                    "sonnet"
                } else {
                    "opus"
                };
                request.model = other.to_owned().into();
            }
            if ["effort", "all"].contains(kind) {
                request.effort = Some(Effort::Low);
            }
            if ["prompt", "all"].contains(kind) {
                request.system.push_str(&words.text(200));
            }
            if ["tools", "all"].contains(kind) {
                request.tools = talk::tools(10, &words.mark(), 300);
            }
            if kind.starts_with('7') {
                request.tools = talk::tools(85, &words.mark(), 8200);
            }
            all[place].push(bed.generate(request).await?);
        }
    }
    let base = Spread::of(all[0].iter().map(|seen| seen.to_upstream)).p50;
    let mut rows = Vec::new();
    for (name, all) in KINDS.iter().zip(&all) {
        let shares = shares(bed.taps.as_ref(), all)?;
        let spread = Spread::of(all.iter().map(|seen| seen.to_upstream));
        rows.push(
            row(name, all)
                .with("own", Spread::of(shares.iter().map(Share::own)))
                .with("cli", Spread::of(shares.iter().map(|share| share.cli)))
                .value("extra_ms", spread.p50 - base),
        );
    }
    bed.clear().await?;
    Ok(vec![Outcome {
        scene: "refit".to_owned(),
        about: "the next request wants something else of the same process, through a tap; ms, median / p95 (least)",
        goals: vec![one_each(&rows)],
        rows,
        ..Outcome::default()
    }])
}
