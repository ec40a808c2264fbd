//! Several conversations at once: none is ever told of another.

use turnpass::conversation::Message;
use turnpass_lab::rig::RealCli;

use crate::bench::{Bench, Random, within};
use crate::stage::{hear, is_text, until};
use crate::talk::Talk;

const SEED: u64 = 81;
const STEPS: usize = 60;

/// The word that stands in every text of a key and in no other's.
fn mark(key: &str) -> String {
    format!("WORD-OF-{key}-{key}")
}

/// Random work of two keys and of their forks, in turns: each request holds the words of one key alone (bug 81).
pub(crate) async fn interleaved(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut random = Random::new(SEED);
    let mut talks = [Talk::new("alpha"), Talk::new("beta")];
    for step in 0..STEPS {
        let talk = &mut talks[random.below(2)];
        let word = mark(&talk.key);
        let parked = talk
            .messages
            .last()
            .is_some_and(|last| last.tool_calls().next().is_some());
        let say = format!("{word} {step} [[say {word} {step}]]");
        match random.below(8) {
            _ if parked && random.below(4) > 0 => {
                talk.answer(&bench).await;
            }
            0 | 1 => {
                let call =
                    format!("{word} [[call read {{\"path\":\"{word}\"}}]] [[then [[say {word}]]]]");
                talk.say(&bench, &call).await;
            }
            2 => {
                talk.messages.push(Message::user(format!(
                    "{word} [[say {word}]] [[stall closed]]"
                )));
                let mut generation = talk.generate(&bench.pool);
                until(&mut generation, "text", is_text).await;
                drop(generation);
                talk.messages.pop();
            }
            3 if talk.messages.len() > 4 => {
                let at = random.below(talk.messages.len() / 2);
                talk.messages.truncate(2 * at);
                talk.say(&bench, &say).await;
            }
            4 if random.below(3) == 0 => {
                bench.kill_newest();
                talk.say(&bench, &say).await;
            }
            5 if random.below(5) == 0 => {
                bench = bench.restart().await;
                talk.say(&bench, &say).await;
            }
            _ => {
                talk.say(&bench, &say).await;
            }
        }
    }
    let (mut alpha, mut beta) = (0, 0);
    for request in bench.up.messages() {
        let text = String::from_utf8_lossy(&request.body);
        let of = [text.contains(&mark("alpha")), text.contains(&mark("beta"))];
        assert_ne!(of[0], of[1], "request {}", request.number);
        alpha += usize::from(of[0]);
        beta += usize::from(of[1]);
    }
    assert!(alpha > 15 && beta > 15, "{alpha} and {beta}");
    bench.finish().await;
}

/// Four keys at the same time, while a fifth waits for a silent service: none waits for another.
pub(crate) async fn parallel(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut silent = Talk::new("silent");
    silent
        .messages
        .push(Message::user("[[say half]] [[stall closed]]"));
    let mut stalled = silent.generate(&bench.pool);
    until(&mut stalled, "text", is_text).await;
    let work = |name: &'static str| {
        let bench = &bench;
        async move {
            let mut talk = Talk::new(name);
            for number in 0..4 {
                let text =
                    format!("{name} {number} [[call read {{}}]] [[then [[say {name} {number}]]]]");
                talk.messages.push(Message::user(text));
                for _ in 0..2 {
                    let history = talk.messages.clone();
                    let heard = hear(talk.generate(&bench.pool)).await;
                    talk.keep(&heard);
                    let of = |text: &str| text.contains(&format!("{name} {number} [["));
                    let sent = bench.up.messages();
                    let own = sent
                        .iter()
                        .rfind(|each| of(&String::from_utf8_lossy(&each.body)));
                    crate::holds::upstream_holds(&history, own.unwrap());
                    if heard.calls().is_empty() {
                        assert_eq!(heard.text(), format!("{name} {number}"));
                        break;
                    }
                    let results = talk.results();
                    talk.messages.push(Message::results(results));
                }
            }
        }
    };
    let all = async {
        tokio::join!(work("one"), work("two"), work("three"), work("four"));
    };
    within("four conversations", all).await;
    assert_eq!(bench.count(), 1 + 4 * 4 * 2);
    // Two callers of one key are served one after the other.
    let talk = Talk::new("one");
    let said = |text: &str| {
        let mut talk = talk.clone();
        talk.messages.push(Message::user(text));
        hear(talk.generate(&bench.pool))
    };
    let (first, second) = tokio::join!(said("[[say a]]"), said("[[say b]]"));
    assert_eq!((first.text().as_str(), second.text().as_str()), ("a", "b"));
    drop(stalled);
    bench.finish().await;
}
