use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn id(text: &str) -> ToolUseId {
    ToolUseId(text.into())
}

fn ids(texts: &[&str]) -> Vec<ToolUseId> {
    texts.iter().map(|text| id(text)).collect()
}

fn result(text: &str) -> ToolResult {
    ToolResult::text(id(text), format!("result of {text}"))
}

fn answer(to: u32, text: &str) -> Answer<u32> {
    Answer {
        to,
        result: result(text),
    }
}

fn begun() -> Pairing<u32> {
    let mut pairing = Pairing::default();
    assert!(pairing.begin().is_clean());
    pairing
}

fn listed<'a>(ids: impl Iterator<Item = &'a ToolUseId>) -> Vec<&'a str> {
    ids.map(|id| id.0.as_str()).collect()
}

/// The words of a failed answer to `to`.
fn words(answer: &Answer<u32>, to: u32) -> String {
    assert_eq!(answer.to, to);
    assert!(answer.result.is_error);
    let [crate::conversation::ResultBlock::Text { text }] = answer.result.content.as_slice() else {
        panic!("{answer:?}");
    };
    text.clone()
}

#[test]
fn bug_067_a_call_an_announcement_and_a_result_meet_in_any_order() {
    // c: the call, m: the model's message, r: the host's result.
    for order in ["cmr", "mcr", "mrc", "crm"] {
        let mut pairing = begun();
        let mut answers = Vec::new();
        for step in order.chars() {
            match step {
                'c' => match pairing.arrived(Some(id("t")), 7) {
                    Arrived::Answered(answer) => answers.push(answer),
                    Arrived::Parked => assert!(order.starts_with('c'), "{order}"),
                    Arrived::Waits => assert_eq!(order, "mcr"),
                    refused @ Arrived::Refused(..) => panic!("{order}: {refused:?}"),
                },
                'm' => {
                    let wanted = match order {
                        "cmr" => Announced::CallWaits,
                        "crm" => Announced::Ended(Ended::Answered),
                        _ => Announced::New,
                    };
                    assert_eq!(pairing.announce(&id("t")), wanted, "{order}");
                }
                _ => match pairing.give(result("t")) {
                    Given::Answered(answer) => answers.push(answer),
                    Given::Kept => assert_eq!(order, "mrc"),
                    other => panic!("{order}: {other:?}"),
                },
            }
        }
        assert_eq!(answers, [answer(7, "t")], "{order}");
        assert!(pairing.is_idle(), "{order}");
        assert_eq!(
            pairing.cli_answered(&id("t")),
            CliAnswered::Known(Ended::Answered)
        );
    }
}

#[test]
fn a_result_that_nothing_has_asked_for_is_extra_and_changes_nothing() {
    let mut pairing = begun();
    assert_eq!(pairing.give(result("t")), Given::Extra);
    assert_eq!(pairing.arrived(Some(id("t")), 1), Arrived::Parked);
    assert_eq!(
        pairing.give(result("t")),
        Given::Answered(answer(1, "t")),
        "the extra one was not kept"
    );
}

#[test]
fn bug_067_five_parallel_calls_are_answered_in_reverse() {
    let names = ["a", "b", "c", "d", "e"];
    let mut pairing = begun();
    for (to, name) in (0..5).zip(names) {
        pairing.announce(&id(name));
        assert_eq!(pairing.arrived(Some(id(name)), to), Arrived::Waits);
    }
    assert_eq!(listed(pairing.awaited()), names);
    assert_eq!(listed(pairing.open()), names);
    for (to, name) in (0..5).zip(names).rev() {
        assert_eq!(
            pairing.give(result(name)),
            Given::Answered(answer(to, name))
        );
    }
    assert!(pairing.is_idle() && pairing.close().is_clean());
}

#[test]
fn bug_067_calls_that_cannot_be_paired_fail_at_once() {
    let mut pairing = begun();
    pairing.announce(&id("answered"));
    pairing.arrived(Some(id("answered")), 0);
    pairing.give(result("answered"));
    pairing.announce(&id("open"));
    pairing.arrived(Some(id("open")), 1);
    let long = "x".repeat(ID_BYTES + 1);
    for (name, refusal) in [
        (None, Refusal::NoId),
        (Some(""), Refusal::NoId),
        (Some(long.as_str()), Refusal::NoId),
        (Some("open"), Refusal::Duplicate),
        (Some("answered"), Refusal::Retired(Ended::Answered)),
    ] {
        let Arrived::Refused(got, answer) = pairing.arrived(name.map(id), 9) else {
            panic!("{name:?}");
        };
        assert_eq!(got, refusal);
        assert!(words(&answer, 9).starts_with("turnpass: "));
    }
    // The one under way is not hurt.
    assert_eq!(
        pairing.give(result("open")),
        Given::Answered(answer(1, "open"))
    );
    assert_eq!(
        pairing.announce(&id(&long)),
        Announced::Refused(Refusal::NoId)
    );
}

#[test]
fn results_are_told_apart() {
    let mut pairing = begun();
    for name in ["answered", "kept", "by cli", "given up", "missing"] {
        assert_eq!(pairing.announce(&id(name)), Announced::New);
        assert_eq!(pairing.announce(&id(name)), Announced::Again);
    }
    pairing.arrived(Some(id("answered")), 1);
    pairing.arrived(Some(id("given up")), 2);
    pairing.give(result("answered"));
    pairing.give(result("kept"));
    assert_eq!(
        pairing.cli_answered(&id("by cli")),
        CliAnswered::Itself { unused: false }
    );
    let answer = pairing.cancelled(|to| *to == 2).unwrap();
    assert!(words(&answer, 2).contains("cancelled"));
    for (name, given) in [
        ("answered", Given::Duplicate),
        ("kept", Given::Duplicate),
        ("by cli", Given::ByCli),
        ("given up", Given::Late),
        ("no such", Given::Extra),
    ] {
        assert_eq!(pairing.give(result(name)), given, "{name}");
    }
    assert_eq!(listed(pairing.kept()), ["kept"]);
    let closed = pairing.close();
    assert_eq!(closed.missing, ids(&["missing"]));
    assert_eq!(closed.unused, ids(&["kept"]));
    assert_eq!(closed.answers, []);
    assert_eq!(pairing.give(result("missing")), Given::Stale);
    assert_eq!(pairing.give(result("kept")), Given::Stale);
}

#[test]
fn a_list_of_results_is_compared_before_it_is_given() {
    let mut pairing = begun();
    pairing.announce(&id("old"));
    pairing.begin();
    for name in ["a", "b", "kept", "by cli", "given up", "answered"] {
        pairing.announce(&id(name));
    }
    pairing.give(result("kept"));
    pairing.give(result("answered"));
    pairing.arrived(Some(id("answered")), 1);
    pairing.arrived(Some(id("given up")), 2);
    pairing.cancelled(|to| *to == 2);
    pairing.cli_answered(&id("by cli"));
    for exact in [&["a", "b"][..], &["b", "by cli", "a"]] {
        assert!(pairing.compare(&ids(exact)).is_exact(), "{exact:?}");
    }
    let list = ids(&[
        "a", "a", "kept", "answered", "given up", "old", "new", "by cli",
    ]);
    assert_eq!(
        pairing.compare(&list),
        Comparison {
            missing: ids(&["b"]),
            extra: ids(&["new"]),
            duplicate: ids(&["a", "kept", "answered"]),
            late: ids(&["given up"]),
            stale: ids(&["old"]),
        }
    );
    assert!(!pairing.compare(&[]).is_exact());
}

#[test]
fn bug_068_what_the_cli_answers_itself_is_not_waited_for() {
    let mut pairing = begun();
    for name in ["unparsed", "given", "called"] {
        pairing.announce(&id(name));
    }
    pairing.give(result("given"));
    pairing.arrived(Some(id("called")), 3);
    assert_eq!(
        pairing.cli_answered(&id("unparsed")),
        CliAnswered::Itself { unused: false }
    );
    assert_eq!(
        pairing.cli_answered(&id("given")),
        CliAnswered::Itself { unused: true }
    );
    let CliAnswered::Instead(answer) = pairing.cli_answered(&id("called")) else {
        panic!("the call is open");
    };
    assert!(words(&answer, 3).contains("the CLI itself"));
    assert_eq!(pairing.cli_answered(&id("early")), CliAnswered::Unannounced);
    assert_eq!(
        pairing.announce(&id("early")),
        Announced::Ended(Ended::ByCli)
    );
    assert_eq!(
        pairing.cli_answered(&id("early")),
        CliAnswered::Known(Ended::ByCli)
    );
    assert!(pairing.is_idle());
    assert_eq!(pairing.ended(&id("given")), Some(Ended::ByCli));
}

#[test]
fn only_an_open_call_can_be_cancelled_and_of_equal_addresses_the_newest() {
    let mut pairing = begun();
    assert_eq!(pairing.cancelled(|_| true), None);
    pairing.announce(&id("a"));
    assert_eq!(pairing.cancelled(|_| true), None);
    pairing.arrived(Some(id("a")), 5);
    pairing.arrived(Some(id("b")), 5);
    let first = pairing.cancelled(|to| *to == 5).unwrap();
    assert_eq!(first.result.id, id("b"));
    assert_eq!(listed(pairing.open()), ["a"]);
    assert_eq!(pairing.cancelled(|to| *to == 6), None);
    // The same tool use does not come to life again.
    assert!(matches!(
        pairing.arrived(Some(id("b")), 6),
        Arrived::Refused(Refusal::Retired(Ended::Cancelled), _)
    ));
}

#[test]
fn the_end_of_a_turn_answers_whatever_is_open() {
    let mut pairing = begun();
    pairing.announce(&id("waits"));
    pairing.arrived(Some(id("waits")), 1);
    pairing.arrived(Some(id("parked")), 2);
    assert_eq!(listed(pairing.parked()), ["parked"]);
    assert_eq!(listed(pairing.awaited()), ["waits"]);
    let closed = pairing.close();
    assert_eq!(closed.missing, ids(&["waits"]));
    assert_eq!(closed.answers.len(), 2);
    for (answer, to) in closed.answers.iter().zip(1..) {
        assert!(words(answer, to).contains("over"));
    }
    assert!(pairing.is_idle() && !pairing.in_turn());
    for name in ["waits", "parked", "new"] {
        assert!(matches!(
            pairing.arrived(Some(id(name)), 3),
            Arrived::Refused(_, _)
        ));
    }
    assert_eq!(
        pairing.announce(&id("new")),
        Announced::Refused(Refusal::NoTurn)
    );
    assert!(pairing.begin().is_clean() && pairing.in_turn());
    assert_eq!(pairing.arrived(Some(id("new")), 4), Arrived::Parked);
    assert_eq!(pairing.begin().answers.len(), 1);
}

#[test]
fn memory_is_bounded() {
    let mut pairing = begun();
    let name = |n: usize| id(&format!("toolu_{n}"));
    for n in 0..IN_FLIGHT_LIMIT {
        assert_eq!(pairing.announce(&name(n)), Announced::New);
    }
    assert_eq!(
        pairing.announce(&id("one more")),
        Announced::Refused(Refusal::TooMany)
    );
    assert!(matches!(
        pairing.arrived(Some(id("one more")), 1),
        Arrived::Refused(Refusal::TooMany, _)
    ));
    assert_eq!(pairing.close().missing.len(), IN_FLIGHT_LIMIT);
    pairing.begin();
    for n in IN_FLIGHT_LIMIT..RETIRED_LIMIT {
        pairing.announce(&name(n));
        pairing.cli_answered(&name(n));
    }
    assert_eq!(pairing.ended(&name(0)), Some(Ended::TurnOver));
    pairing.cli_answered(&id("one more"));
    assert_eq!(pairing.ended(&name(0)), None);
    assert_eq!(pairing.ended(&name(1)), Some(Ended::TurnOver));
    assert_eq!(pairing.retired.ended.len(), RETIRED_LIMIT);
    pairing.cli_answered(&id(&"x".repeat(ID_BYTES + 1)));
    assert_eq!(pairing.retired.order.len(), RETIRED_LIMIT);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Announce(u8),
    Arrive(Option<u8>),
    Give(u8),
    Cancel(u32),
    CliAnswers(u8),
    Close,
    Begin,
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0u8..6;
    prop_oneof![
        4 => name.clone().prop_map(Step::Announce),
        5 => prop::option::weighted(0.9, name.clone()).prop_map(Step::Arrive),
        4 => name.clone().prop_map(Step::Give),
        1 => (0u32..30).prop_map(Step::Cancel),
        1 => name.prop_map(Step::CliAnswers),
        1 => Just(Step::Close),
        2 => Just(Step::Begin),
    ]
}

proptest! {
    #[test]
    fn every_call_is_answered_exactly_once_whatever_the_order(steps in prop::collection::vec(step(), 0..80)) {
        let mut pairing = Pairing::default();
        // By address: the id of the call, and the answers that it got.
        let mut calls: BTreeMap<u32, (Option<ToolUseId>, Vec<ToolResult>)> = BTreeMap::new();
        let name = |n: u8| ToolUseId(format!("t{n}"));
        for step in steps.into_iter().chain([Step::Close]) {
            let answers = match step {
                Step::Announce(n) => {
                    pairing.announce(&name(n));
                    vec![]
                }
                Step::Arrive(n) => {
                    let to = u32::try_from(calls.len()).unwrap();
                    calls.insert(to, (n.map(name), vec![]));
                    match pairing.arrived(n.map(name), to) {
                        Arrived::Waits | Arrived::Parked => vec![],
                        Arrived::Answered(answer) | Arrived::Refused(_, answer) => vec![answer],
                    }
                }
                Step::Give(n) => match pairing.give(ToolResult::text(name(n), "good")) {
                    Given::Answered(answer) => vec![answer],
                    _ => vec![],
                },
                Step::Cancel(to) => pairing.cancelled(|is| *is == to).into_iter().collect(),
                Step::CliAnswers(n) => match pairing.cli_answered(&name(n)) {
                    CliAnswered::Instead(answer) => vec![answer],
                    _ => vec![],
                },
                Step::Close => pairing.close().answers,
                Step::Begin => pairing.begin().answers,
            };
            for answer in answers {
                calls.get_mut(&answer.to).unwrap().1.push(answer.result);
            }
            let open = calls.values().filter(|(_, answers)| answers.is_empty()).count();
            prop_assert_eq!(pairing.open().count(), open);
            prop_assert!(pairing.parked().all(|id| pairing.open().any(|open| open == id)));
            prop_assert!(pairing.kept().all(|id| pairing.open().all(|open| open != id)));
            prop_assert!(pairing.in_turn() || pairing.is_idle());
        }
        for (id, answers) in calls.into_values() {
            prop_assert_eq!(answers.len(), 1);
            prop_assert_eq!(&answers[0].id, &id.clone().unwrap_or(ToolUseId(String::new())));
            prop_assert!(id.is_some() || answers[0].is_error);
        }
    }

    #[test]
    fn what_is_exact_is_taken_whole(announced in prop::collection::btree_set(0u8..20, 1..12), called in any::<u32>(), reverse in any::<bool>()) {
        let mut pairing = begun();
        let name = |n: u8| ToolUseId(format!("t{n}"));
        for n in &announced {
            pairing.announce(&name(*n));
            if called >> n & 1 == 1 {
                pairing.arrived(Some(name(*n)), u32::from(*n));
            }
        }
        let mut list: Vec<_> = announced.iter().map(|n| name(*n)).collect();
        if reverse {
            list.reverse();
        }
        prop_assert!(pairing.compare(&list).is_exact());
        for id in list {
            let given = pairing.give(ToolResult::text(id, "good"));
            prop_assert!(matches!(given, Given::Answered(_) | Given::Kept));
        }
        prop_assert_eq!(pairing.awaited().count(), 0);
        for n in announced {
            if called >> n & 1 == 0 {
                let arrived = pairing.arrived(Some(name(n)), 0);
                prop_assert!(matches!(arrived, Arrived::Answered(answer) if answer.result.id == name(n)));
            }
        }
        prop_assert!(pairing.close().is_clean());
    }
}
