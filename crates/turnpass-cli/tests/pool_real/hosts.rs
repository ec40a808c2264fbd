//! `kill -9` of the host at random points: nothing is left running, nothing is lost, and no tool is run twice.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};

use turnpass::conversation::Role;
use turnpass_lab::rig::RealCli;

use crate::bench::{Bench, Random};
use crate::child::{self, AT, DONE, Play};
use crate::deaths::seed;
use crate::holds::{compare, host, sent};

/// Other points on each version: the three are 30 together.
const KILLS: usize = 10;
/// On each version, when it is asked for.
const MANY_KILLS: usize = 30;
/// Most steps that a host gets before it is killed: about half a turn.
const STEPS: usize = 40;
/// More turns than the killed hosts get through.
const MANY: usize = 1_000;

pub(crate) async fn ten(cli: RealCli) {
    let seed = seed(&cli);
    killed(&cli, KILLS, seed).await;
}

pub(crate) async fn thirty(cli: RealCli) {
    killed(&cli, MANY_KILLS, 21).await;
}

/// One host after the other; the last one finishes the work.
async fn killed(cli: &RealCli, most: usize, seed: u64) {
    let bench = Bench::new(cli);
    let mut play = Play::new(&bench, MANY);
    let mut random = Random::new(seed);
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
            if seen == steps && kills < most {
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
            !ended.success() && kills < most,
            "the host failed by itself: {ended}"
        );
        kills += 1;
        // Every other time the next host finds the CLI of the one before still at work.
        if kills % 2 == 0 {
            bench.all_gone().await;
        }
        if kills == most {
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
    let whole = host(&stored.messages).len();
    let mut alone = 0;
    for request in bench.up.messages() {
        let held = sent(&request).unwrap();
        if let Err(problem) = compare(&stored.messages[..held.len().min(whole)], &request) {
            // A CLI whose host dies before it could be told that it must not go on gives up its calls in its own words.
            let last = held.last().unwrap()["content"].as_array().unwrap();
            let given_up = last.iter().all(|block| block["is_error"] == true);
            assert!(given_up, "request {}: {problem}", request.number);
            alone += 1;
        }
    }
    assert!(
        alone <= most.div_ceil(10),
        "{alone} requests of a CLI that was left alone"
    );
    eprintln!(
        "MEASURED {}: {alone} requests of a CLI after its host was killed",
        cli.version
    );
    bench.all_gone().await;
    bench.finish().await;
}
