//! The scenes of the pool: a conversation that lives, and one that nobody has seen.

use std::time::Duration;

use turnpass::conversation::{Message, ToolResult};
use turnpass::request::TransportSession;

use super::bed::{Bed, Ground, Make, Seen, row};
use super::figures::{Goal, Outcome, Row, Spread};
use super::scenes::{fresh, one_each, shares, shares_since};
use super::talk::{SHORT, Words};
use super::tap::Kind;
use crate::exit::Fault;

/// Rest before a conversation that takes the spare: a start takes a third of a second, on a busy machine longer.
const SPARE_READY: Duration = Duration::from_millis(2500);
/// Pairs of the two conversations whose planning is compared.
const PAIRS_OF_PLANS: [usize; 2] = [10, 1000];
/// Bytes of each message there.
const PLAN_MESSAGE_BYTES: usize = 200;

/// Everything that the pool does for one request.
pub(super) async fn turns(ground: &Ground) -> Result<Vec<Outcome>, Fault> {
    Ok(vec![
        live(ground).await?,
        seeds(ground).await?,
        plans(ground).await?,
    ])
}

/// A conversation that grows, on its own process, with and without tools.
async fn live(ground: &Ground) -> Result<Outcome, Fault> {
    let tapped = Make {
        tap: true,
        spares: 0,
        ..Make::POOL
    };
    let mut words = Words::new();
    let mut rows = Vec::new();
    let mut untapped = Vec::new();
    for make in [Make::POOL, tapped] {
        let bed = Bed::new(ground, make).await?;
        let (turns, direct) = grown(&bed, ground, &mut words).await?;
        if make.tap {
            let shares = shares(bed.taps.as_ref(), &turns)?;
            rows.push(
                row("a turn, tapped", &turns)
                    .with("own", Spread::of(shares.iter().map(|share| share.to_line)))
                    .with("cli", Spread::of(shares.iter().map(|share| share.cli))),
            );
            let answers = answered(&bed, ground, &mut words).await?;
            let shares = shares_since(Kind::Answer, bed.taps.as_ref(), &answers)?;
            rows.push(
                row("a tool's result, tapped", &answers)
                    .with("own", Spread::of(shares.iter().map(|share| share.to_line)))
                    .with("cli", Spread::of(shares.iter().map(|share| share.cli))),
            );
        } else {
            untapped.push(row("direct", &direct));
            untapped.push(row("a turn", &turns));
            untapped.push(row(
                "a tool's result",
                &answered(&bed, ground, &mut words).await?,
            ));
        }
        bed.clear().await?;
    }
    let rows: Vec<Row> = untapped.into_iter().chain(rows).collect();
    let at = |row: &Row, figure: &str| row.spread(figure).map_or(0.0, |spread| spread.p50);
    let goals = vec![
        Goal::at_most("own share of a turn, median ms", 1.0, at(&rows[3], "own")),
        Goal::at_most(
            "own share of a tool's result, median ms",
            1.0,
            at(&rows[4], "own"),
        ),
        one_each(&rows),
    ];
    Ok(Outcome {
        scene: "pool".to_owned(),
        about: "a live conversation of 20 pairs and 40 KB that goes on; own: call to line; ms, median / p95 (least)",
        rows,
        goals,
        ..Outcome::default()
    })
}

/// Turns of one conversation, and the control of each.
async fn grown(
    bed: &Bed,
    ground: &Ground,
    words: &mut Words,
) -> Result<(Vec<Seen>, Vec<Seen>), Fault> {
    let (mut turns, mut direct) = (Vec::new(), Vec::new());
    let mut messages = fresh(words);
    // The first turns of a CLI are slower than those that follow (all versions).
    for turn in 0..ground.requests * 2 + 4 {
        let seen = bed.generate(bed.request(messages.clone())).await?;
        messages.extend(seen.done.as_ref().map(|done| done.message.clone()));
        messages.push(Message::user(format!("{} {SHORT}", words.text(200))));
        let control = bed.control(&seen.recorded).await?;
        if turn >= 4 {
            turns.push(seen);
            direct.push(control);
        }
    }
    Ok((turns, direct))
}

/// The requests that bring a tool's result, each of a turn of its own in one conversation.
async fn answered(bed: &Bed, ground: &Ground, words: &mut Words) -> Result<Vec<Seen>, Fault> {
    let mut all = Vec::new();
    let mut messages = words.history(2, 2048);
    let session = TransportSession(words.mark());
    for _ in 0..ground.requests * 2 {
        let prompt = r#"[[call read {"path":"a.txt"}]] [[then [[say It says hello.]]]]"#;
        messages.push(Message::user(prompt));
        let mut request = bed.request(messages.clone());
        request.session = session.clone();
        let first = bed.generate(request).await?;
        let Some(done) = &first.done else { continue };
        let results = done
            .message
            .tool_calls()
            .map(|call| ToolResult::text(call.id.clone(), "hello"));
        let results: Vec<_> = results.collect();
        messages.push(done.message.clone());
        messages.push(Message::results(results));
        let mut request = bed.request(messages.clone());
        request.session = session.clone();
        let second = bed.generate(request).await?;
        messages.extend(second.done.as_ref().map(|done| done.message.clone()));
        all.push(second);
    }
    Ok(all)
}

/// Conversations that nobody has seen, told by frames to a process that stood ready.
async fn seeds(ground: &Ground) -> Result<Outcome, Fault> {
    let mut words = Words::new();
    let bed = Bed::new(ground, Make::POOL).await?;
    bed.generate(bed.request(fresh(&mut words))).await?;
    let (mut seeded, mut direct) = (Vec::new(), Vec::new());
    for _ in 0..ground.requests {
        tokio::time::sleep(SPARE_READY).await;
        let mut request = bed.request(fresh(&mut words));
        request.session = TransportSession(words.mark());
        let seen = bed.generate(request).await?;
        direct.push(bed.control(&seen.recorded).await?);
        seeded.push(seen);
    }
    bed.clear().await?;
    let rows = vec![row("direct", &direct), row("on a spare", &seeded)];
    let spare = rows[1]
        .spread("to_upstream")
        .map_or(0.0, |spread| spread.p50);
    Ok(Outcome {
        scene: "pool-seed".to_owned(),
        about: "20 pairs, 40 KB, ten tools, never seen before, told to a spare; ms, median / p95 (least)",
        goals: vec![
            Goal::at_most("on a spare, to the upstream, median ms", 150.0, spare),
            one_each(&rows),
        ],
        rows,
        ..Outcome::default()
    })
}

/// What a long history costs a turn of a live conversation: it is compared from its beginning each time.
async fn plans(ground: &Ground) -> Result<Outcome, Fault> {
    let mut words = Words::new();
    let make = Make {
        tap: true,
        spares: 0,
        ..Make::POOL
    };
    let mut rows = Vec::new();
    for pairs in PAIRS_OF_PLANS {
        let bed = Bed::new(ground, make).await?;
        let mut messages = words.history(pairs, pairs * 2 * PLAN_MESSAGE_BYTES);
        messages.push(Message::user(SHORT));
        let mut all = Vec::new();
        for turn in 0..=ground.requests {
            let seen = bed.generate(bed.request(messages.clone())).await?;
            messages.extend(seen.done.as_ref().map(|done| done.message.clone()));
            messages.push(Message::user(SHORT));
            if turn > 0 {
                all.push(seen);
            }
        }
        let shares = shares(bed.taps.as_ref(), &all)?;
        rows.push(
            row(&format!("{} messages", pairs * 2), &all)
                .with("own", Spread::of(shares.iter().map(|share| share.to_line)))
                .with("cli", Spread::of(shares.iter().map(|share| share.cli))),
        );
        bed.clear().await?;
    }
    let at = |row: &Row| row.spread("own").map_or(0.0, |spread| spread.p50);
    let more = at(&rows[1]) - at(&rows[0]);
    Ok(Outcome {
        scene: "pool-plan".to_owned(),
        about: "a turn of a live conversation of 20 and of 2,000 messages; own: call to line; ms, median / p95 (least)",
        goals: vec![
            Goal::at_most("2,000 messages over 20, median ms", 5.0, more),
            one_each(&rows),
        ],
        rows,
        ..Outcome::default()
    })
}
