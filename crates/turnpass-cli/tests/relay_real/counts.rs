//! One request a generation, no start where a process is kept, and no word in another conversation.

use turnpass::Transport as _;
use turnpass::conversation::Message;
use turnpass::relay::PROCESS_BYTES;
use turnpass::request::TransportSession;
use turnpass_lab::upstream::Options;

use crate::bench::{Bench, Random, Setup, body, drain, request, say, spawned};

/// Generations after each other, then in batches of four at once.
const ALONE: usize = 32;
const BATCHES: usize = 7;
const AT_ONCE: usize = 4;

/// Exactly 1.00 requests a generation, and not one start after the first ones.
pub(crate) async fn exactly_one(setup: Setup) {
    let bench = Bench::with(&setup, Options::default(), |options| {
        options.spares = 1;
        options.memory_budget_bytes = 5 * PROCESS_BYTES;
    });
    for number in 0..ALONE {
        // The next one follows at once, as an agent's does.
        let answer = drain(bench.relay.generate(say(&format!("[[say {number}]]")))).await;
        assert_eq!(answer.text(), number.to_string());
        assert_eq!(answer.done().upstream_requests, 1);
    }
    assert_eq!(bench.count(), ALONE);
    assert!(
        bench.spawned().len() <= 2,
        "one process and one spare: {:?}",
        bench.spawned()
    );
    let mut starts = None;
    for batch in 0..BATCHES {
        let texts: Vec<String> = (0..AT_ONCE).map(|at| format!("{batch}-{at}")).collect();
        let running = texts.iter().map(|text| {
            let mut request = say(&format!("[[say {text}]]"));
            request.session = TransportSession(text.clone());
            drain(bench.relay.generate(request))
        });
        let answers = futures_util::future::join_all(running).await;
        for (answer, text) in answers.iter().zip(&texts) {
            assert_eq!(answer.text(), *text);
        }
        bench.settle().await;
        let now = bench.spawned().len();
        assert_eq!(
            *starts.get_or_insert(now),
            now,
            "batch {batch} started something"
        );
    }
    assert!(starts.unwrap() <= 5, "within the memory budget");
    assert_eq!(bench.count(), ALONE + BATCHES * AT_ONCE);
    bench.finish().await;
}

/// Generations of the mix: kept processes, and a process for each request.
const MIXED: (usize, usize) = (100, 12);

/// One conversation of the mix.
struct Conversation {
    session: TransportSession,
    /// Which of the two transports.
    side: usize,
    said: Vec<String>,
    messages: Vec<Message>,
}

/// Two transports with two sessions each, all at once, with random texts: no text is ever in another one's request or
/// answer (bugs 76, 81).
pub(crate) async fn never_mixed(setup: Setup) {
    let (one, other) = (Bench::new(&setup), Bench::new(&setup));
    let mut random = Random::new(7);
    let mut all: Vec<Conversation> = (0..4)
        .map(|at| Conversation {
            session: TransportSession(format!("session {}", at / 2)),
            side: at % 2,
            said: Vec::new(),
            messages: Vec::new(),
        })
        .collect();
    let generations = if setup.is_warm() { MIXED.0 } else { MIXED.1 };
    for _ in 0..generations / all.len() {
        let running = all.iter_mut().map(|each| {
            let word = random.word();
            let filler = random.word().repeat(random.below(200));
            each.messages
                .push(Message::user(format!("[[say answer {word}]] {filler}")));
            each.said.push(word);
            let mut request = request(each.messages.clone());
            request.session = each.session.clone();
            request.system = format!("prompt {}", each.said[0]);
            let relay = [&one.relay, &other.relay][each.side];
            drain(relay.generate(request))
        });
        let answers = futures_util::future::join_all(running).await;
        for (each, answer) in all.iter_mut().zip(answers) {
            assert_eq!(
                answer.text(),
                format!("answer {}", each.said.last().unwrap())
            );
            each.messages.push(answer.done().message.clone());
        }
    }
    one.settle().await;
    other.settle().await;
    let requests = [one.up.messages(), other.up.messages()];
    assert_eq!(requests[0].len() + requests[1].len(), generations);
    for (side, requests) in requests.iter().enumerate() {
        for recorded in requests {
            let text = String::from_utf8_lossy(&recorded.body);
            let prompt = body(recorded)["system"][2]["text"].as_str().unwrap();
            for each in &all {
                let own = prompt == format!("prompt {}", each.said[0]);
                assert!(!own || each.side == side, "{prompt} on the other transport");
                let shown = each
                    .said
                    .iter()
                    .filter(|word| text.contains(word.as_str()))
                    .count();
                assert_eq!(shown > 0, own, "{prompt}");
            }
        }
    }
    assert_ne!(spawned(one.dir()), spawned(other.dir()));
    one.finish().await;
    other.finish().await;
}
