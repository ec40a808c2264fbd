//! `kill -9` of the host at 30 random points: nothing is left running, nothing is lost, and no tool is run twice.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};

use turnpass::conversation::Role;
use turnpass_lab::rig::RealCli;

use crate::bench::{Bench, Random};
use crate::child::{self, AT, DONE, Play};
use crate::holds::{compare, host, sent};

const SEED: u64 = 21;
const KILLS: usize = 30;
/// Most steps that a host gets before it is killed: about half a turn.
const STEPS: usize = 40;
/// More turns than the killed hosts get through.
const MANY: usize = 1_000;

/// One host after the other; the last one finishes the work.
pub(crate) async fn thirty(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut play = Play::new(&bench, MANY);
    let mut random = Random::new(SEED);
    let (mut kills, mut points) = (0, BTreeSet::new());
    loop {
        let mut child = play.start();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let steps = 1 + random.below(STEPS);
        let mut seen = 0;
        let mut done = false;
        for line in lines.map_while(Result::ok) {
            done |= line == DONE;
            let Some(step) = line.strip_prefix(AT) else {
                continue;
            };
            seen += 1;
            if seen == steps && kills < KILLS {
                points.insert(step.to_owned());
                child.kill().unwrap();
            }
        }
        let ended = child.wait().unwrap();
        if done {
            assert!(ended.success());
            break;
        }
        assert!(
            !ended.success() && kills < KILLS,
            "the host failed by itself: {ended}"
        );
        kills += 1;
        // Every other time the next host finds the CLI of the one before still at work.
        if kills % 2 == 0 {
            bench.all_gone().await;
        }
        if kills == KILLS {
            // The last host finishes what was begun, and one turn more.
            play.turns = child::turns(&play.stored().messages) + 1;
        }
    }
    eprintln!(
        "MEASURED {}: host killed {kills} times in {} turns at {points:?}, {} processes, {} requests",
        cli.version,
        play.turns,
        bench.spawned().len(),
        bench.count()
    );
    let turns = play.turns;
    let stored = play.stored();
    let ran = play.ran();
    let once: BTreeSet<_> = ran.iter().collect();
    assert_eq!(once.len(), ran.len(), "a tool was run twice: {ran:?}");
    assert_eq!(ran.len(), 3 * turns, "{ran:?}");
    let answers = stored
        .messages
        .iter()
        .filter(|each| each.role == Role::Assistant);
    let answers: Vec<_> = answers
        .map(|each| each.text())
        .filter(|text| text.starts_with("this was"))
        .collect();
    let wanted: Vec<_> = (0..turns)
        .map(|turn| format!("this was turn {turn}"))
        .collect();
    assert_eq!(answers, wanted);
    // Every request held what the host has stored, up to its place.
    let whole = host(&stored.messages[..stored.messages.len() - 1]);
    for request in bench.up.messages() {
        let held = sent(&request).unwrap().len();
        assert!(held <= whole.len());
        compare_prefix(&stored.messages, &request, held);
    }
    bench.all_gone().await;
    bench.finish().await;
}

fn compare_prefix(
    messages: &[turnpass::conversation::Message],
    request: &turnpass_lab::upstream::Recorded,
    held: usize,
) {
    // Calls of an answer that was lost had other ids, and only they.
    if let Err(problem) = compare(&messages[..held], request) {
        panic!("request {}: {problem}", request.number);
    }
}
