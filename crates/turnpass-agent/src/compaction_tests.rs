use proptest::prelude::*;
use turnpass::conversation::normalise::Rule;
use turnpass::conversation::{
    NormaliseOptions, SignedThinking, ToolCall, ToolInput, ToolResult, normalise,
};

use super::*;

fn calls(ids: &[String]) -> Message {
    let thinking = Block::Thinking(SignedThinking {
        thinking: "why".into(),
        signature: "c2ln".into(),
    });
    let calls = ids.iter().map(|id| {
        Block::ToolUse(ToolCall {
            id: ToolUseId(id.clone()),
            name: "read".into(),
            input: ToolInput::empty(),
        })
    });
    Message {
        role: Role::Assistant,
        content: std::iter::once(thinking).chain(calls).collect(),
    }
}

fn results(ids: &[String], text: &str) -> Message {
    Message::results(
        ids.iter()
            .map(|id| ToolResult::text(ToolUseId(id.clone()), text)),
    )
}

/// A prompt of some size, and rounds of calls with results of some size.
type Turn = (usize, Vec<(usize, usize)>);

/// Turns that end with an answer, and then a prompt, or the results of calls that are still to be answered.
fn conversation(turns: &[Turn], ends_with_results: bool) -> Vec<Message> {
    let mut messages = Vec::new();
    let mut count = 0;
    let mut round = |messages: &mut Vec<Message>, how_many: usize, bytes: usize| {
        let ids: Vec<String> = (0..how_many)
            .map(|_| {
                count += 1;
                // An id of an earlier round comes again: pairs are told apart by their places.
                format!("t{}", count % 7)
            })
            .collect();
        messages.push(calls(&ids));
        messages.push(results(&ids, &"r".repeat(bytes)));
    };
    for (number, (bytes, rounds)) in turns.iter().enumerate() {
        messages.push(Message::user(format!(
            "ask {number} {}",
            "p".repeat(*bytes)
        )));
        for (how_many, bytes) in rounds {
            round(&mut messages, *how_many, *bytes);
        }
        messages.push(Message::assistant(format!("answer {number}")));
    }
    messages.push(Message::user("the last request"));
    if ends_with_results {
        round(&mut messages, 2, 40);
    }
    messages
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let round = (1usize..4, 1usize..4_000);
    prop::collection::vec((0usize..4_000, prop::collection::vec(round, 0..4)), 0..8)
}

proptest! {
    #[test]
    fn a_cut_parts_nothing_and_keeps_the_rest_as_it_was(
        turns in turns(),
        ends_with_results: bool,
        keep in 0u64..8_000,
    ) {
        let messages = conversation(&turns, ends_with_results);
        let keep = keep.min(size(&messages) / 2);
        let Some(at) = cut(&messages, keep) else {
            // Nothing stands before the last message, or before the last calls.
            prop_assert!(turns.is_empty() && !ends_with_results, "{messages:?}");
            return Ok(());
        };
        prop_assert!(at > 0 && at < messages.len());
        for side in [&messages[..at], &messages[at..]] {
            let of = |is: fn(&Block) -> Option<&ToolUseId>| {
                let blocks = side.iter().flat_map(|message| &message.content);
                blocks.filter_map(is).cloned().collect::<Vec<_>>()
            };
            let calls = of(|block| match block {
                Block::ToolUse(call) => Some(&call.id),
                _ => None,
            });
            let results = of(|block| match block {
                Block::ToolResult(result) => Some(&result.id),
                _ => None,
            });
            prop_assert_eq!(calls, results, "calls and results side by side");
        }
        let shorter = compacted(&messages, at, " what was done ");
        let kept = &messages[at..];
        prop_assert_eq!(&shorter[1..], kept, "whole, and in order");
        let is_text = |block: &Block| block.as_text().is_some();
        prop_assert!(shorter[0].content.iter().all(is_text), "no thinking, no calls");
        prop_assert_eq!(shorter.last().unwrap().role, Role::User);
        // The summary's own words, and a request that is said again, are all that is added.
        prop_assert!(size(&shorter) <= size(kept) + REQUEST_TOKENS.min(size(&messages) / 4) + 60);
        let last_unit = 1 + usize::from(ends_with_results);
        prop_assert!(kept.len() == last_unit || size(kept) <= keep);
        let normalised = normalise(&shorter, &NormaliseOptions::default()).unwrap();
        // Two messages of the user's side become one; ids that come again get new ones. Nothing is made up or left out.
        for change in &normalised.changes {
            prop_assert!(
                matches!(change.rule, Rule::MergedNeighbours | Rule::RenamedId),
                "{:?}",
                change.rule
            );
        }
        // What was compacted can be compacted again, and never ends up with a summary of a summary alone.
        if let Some(again) = cut(&shorter, keep) {
            prop_assert!(again > 1);
        }
    }
}

#[test]
fn what_is_the_last_word_stays_whatever_its_size() {
    let big = "x".repeat(400_000);
    let alone = [Message::user(big.clone())];
    assert_eq!(cut(&alone, 20), None);
    let asked = [
        Message::user("a"),
        Message::assistant("b"),
        Message::user(big.clone()),
    ];
    assert_eq!(cut(&asked, 20), Some(2));
    let ids = ["t".to_owned()];
    let called = [Message::user("a"), calls(&ids), results(&ids, &big)];
    assert_eq!(cut(&called, 20), Some(1));
    let summed = compacted(&asked, 2, "s");
    assert_eq!(cut(&summed, 20), None, "a summary and the last message");
}

#[test]
fn the_latest_request_is_said_again_where_the_tail_has_none() {
    let ids = ["t".to_owned()];
    let mut messages = vec![
        Message::user("old"),
        Message::assistant("x ".repeat(100)),
        Message::user("rename util"),
        Message::user("[turnpass] The answer broke off here: it failed."),
        calls(&ids),
        results(&ids, "r"),
    ];
    let at = cut(&messages, 0).unwrap();
    assert_eq!(at, 4);
    let texts = |message: &Message| -> Vec<String> {
        let texts = message.content.iter().filter_map(Block::as_text);
        texts.map(str::to_owned).collect()
    };
    let shorter = compacted(&messages, at, "s");
    assert_eq!(texts(&shorter[0])[1..], [REQUEST_MARK, "rename util"]);
    // And again, from the summary.
    let mut later = shorter.clone();
    later.extend([calls(&ids), results(&ids, "r")]);
    let again = compacted(&later, cut(&later, 0).unwrap(), "s2");
    assert_eq!(texts(&again[0])[1..], [REQUEST_MARK, "rename util"]);
    assert_eq!(again.len(), 3);
    // Not when it stays, and not when it is too large.
    messages.push(Message::user("now this"));
    let shorter = compacted(&messages, 4, "s");
    assert_eq!(texts(&shorter[0]).len(), 1);
    messages.pop();
    messages[2] = Message::user("this ".repeat(100));
    assert_eq!(texts(&compacted(&messages, 4, "s")[0]).len(), 1);
}

#[test]
fn instructions_of_the_host_stay() {
    let rule = Message {
        role: Role::System,
        content: vec![Block::text("never push")],
    };
    let messages = [
        Message::user("a"),
        rule.clone(),
        Message::assistant("b"),
        Message::user("c"),
    ];
    let shorter = compacted(&messages, 3, "s");
    assert_eq!(shorter[1..], [rule, Message::user("c")]);
}

#[test]
fn each_transport_has_its_own_threshold() {
    let own = Compaction::default();
    let threshold = |settings: &Compaction, kind| {
        let policy = settings.policy(kind)?;
        assert_eq!(policy.per_run, Some(4));
        Some(policy.threshold(200_000))
    };
    assert_eq!(threshold(&own, TransportKind::Pool), Some(140_000));
    assert_eq!(threshold(&own, TransportKind::Relay), Some(160_000));
    assert_eq!(threshold(&own, TransportKind::Replay), None);
    for (set, wanted) in [
        (Threshold::Tokens(7_000), 7_000),
        (Threshold::Fraction(0.5), 100_000),
    ] {
        let settings = Compaction {
            threshold: Some(set),
            ..own
        };
        for kind in TransportKind::ALL {
            assert_eq!(threshold(&settings, kind), Some(wanted), "{kind}");
        }
    }
    assert_eq!(own.keeps(Some(140_000), 100_000), 20_000);
    assert_eq!(own.keeps(Some(140_000), 30_000), 15_000);
    assert_eq!(own.keeps(Some(1_000), 30_000), 500);
    assert_eq!(own.keeps(None, u64::MAX), 20_000);
}

#[test]
fn a_threshold_that_is_none_is_refused() {
    let wrong = |threshold| {
        let settings = Compaction {
            threshold: Some(threshold),
            ..Compaction::default()
        };
        settings.wrong().is_some()
    };
    for share in [0.0, -0.1, 1.01, f64::NAN, f64::INFINITY] {
        assert!(wrong(Threshold::Fraction(share)), "{share}");
    }
    assert!(wrong(Threshold::Tokens(0)));
    assert!(!wrong(Threshold::Tokens(1)) && !wrong(Threshold::Fraction(1.0)));
}
