//! What is stored and comes back, and what is refused.

use proptest::prelude::*;
use uuid::Uuid;

use super::record::Record;
use super::record_tests::{id, image, long, normal, recorded, said, user};
use super::state::{Owner, STATE_LIMIT_BYTES, Stored, decode, encode};
use crate::conversation::digest::Digest;
use crate::conversation::{Block, Message, ToolResult};
use crate::request::{BackendState, ModelId, TransportSession};

fn written(record: &Record) -> Option<BackendState> {
    encode(
        record,
        &Owner {
            session: Uuid::from_u128(7),
            transport_session: &TransportSession::default(),
            model: &ModelId::from("m"),
            fingerprint: Digest::of(b"f"),
        },
    )
}

pub(super) fn stored(record: &Record) -> Stored {
    decode(&written(record).unwrap()).unwrap()
}

/// A history, and the record after it was answered.
fn answered(history: &[Message]) -> Record {
    let mut record = recorded(history);
    record.push_answer(&said("answer", &[]), Some(Uuid::from_u128(9)));
    record
}

fn grown(history: &[Message]) -> Vec<Message> {
    let mut history = history.to_vec();
    history.extend([said("answer", &[]), Message::user("next")]);
    history
}

#[test]
fn what_is_stored_comes_back_and_fits_its_history_alone() {
    let history = [Message::user("a"), said("b", &[]), Message::user("c")];
    let stored = stored(&answered(&history));
    assert_eq!(stored.session, Uuid::from_u128(7));
    assert_eq!((stored.point.len, stored.point.at), (4, Uuid::from_u128(9)));
    let next = grown(&history);
    assert!(stored.begins(&normal(&next).messages));
    for n in 0..4 {
        let mut other = next.clone();
        other[n].content = vec![Block::text("other")];
        assert!(!stored.begins(&normal(&other).messages), "{n}");
    }
    assert!(!stored.begins(&normal(&history).messages));
}

#[test]
fn a_long_conversation_has_a_short_state_without_any_of_its_text() {
    let record = answered(&long(2_000, 100));
    let state = written(&record).unwrap().0;
    assert!(state.len() < 512, "{}", state.len());
    assert!(!state.contains("words"), "{state}");
}

#[test]
fn stripped_images_and_answered_calls_are_tolerated_in_a_state() {
    let shot = |blocks: Vec<Block>| {
        let mut content = vec![Block::text("look")];
        content.extend(blocks);
        [user(content), said("b", &["c1"])]
    };
    let with = |blocks: Vec<Block>, result: &str| {
        let mut history = shot(blocks).to_vec();
        history.push(Message::results([ToolResult::error(id("c1"), result)]));
        history
    };
    let data = || Block::Image(image("AAAA"));
    let first = with(vec![data()], "one");
    let mut record = recorded(&first[..1]);
    record.push_answer(&first[1], None);
    record.answered_by_cli(&id("c1"));
    record.push(&normal(&first).messages[2], None);
    record.push_answer(&said("answer", &[]), Some(Uuid::from_u128(9)));
    let stored = stored(&record);
    for fits in [
        with(vec![data()], "one"),
        with(vec![], "two"),
        with(vec![Block::text("[image removed]")], "three"),
    ] {
        let fits = grown(&fits);
        let normalised = normal(&fits);
        assert!(stored.begins(&normalised.messages));
        assert_eq!(record.shared_prefix(&normalised.messages), 4);
        let adopted = stored.adopt(&normalised.messages);
        assert_eq!(adopted.shared_prefix(&normalised.messages), 4);
        assert_eq!(adopted.point(), record.point());
    }
    let other = grown(&with(vec![Block::Image(image("BBBB"))], "one"));
    assert!(!stored.begins(&normal(&other).messages));
}

#[test]
fn what_an_adopted_conversation_stores_fits_the_same_histories() {
    let history = [user(vec![Block::text("a"), Block::Image(image("AAAA"))])];
    let stripped = grown(&[Message::user("a")]);
    let normalised = normal(&stripped);
    let first = stored(&answered(&history));
    let adopted = first.adopt(&normalised.messages);
    assert!(stored(&adopted).begins(&normalised.messages));
    assert!(first.is_checkpoint_of(&answered(&history), Uuid::from_u128(7), Digest::of(b"f")));
    assert!(!first.is_checkpoint_of(&answered(&history), Uuid::from_u128(8), Digest::of(b"f")));
    assert!(!first.is_checkpoint_of(&answered(&history), Uuid::from_u128(7), Digest::of(b"g")));
    let same =
        |record: &Record| first.is_checkpoint_of(record, Uuid::from_u128(7), Digest::of(b"f"));
    let mut elsewhere = recorded(&history);
    elsewhere.push_answer(&said("answer", &[]), Some(Uuid::from_u128(10)));
    assert!(!same(&elsewhere), "another point");
    assert!(!same(&answered(&[Message::user("other")])), "other words");
    let mut tainted = answered(&history);
    tainted.taint();
    assert!(!same(&tainted));
    let mut further = answered(&history);
    further.push(&normalised.messages[0], None);
    assert!(!first.is_checkpoint_of(&further, Uuid::from_u128(7), Digest::of(b"f")));
}

#[test]
fn a_turn_with_open_calls_stores_the_point_before_it() {
    let mut record = answered(&[Message::user("a")]);
    record.push(&normal(&[Message::user("c")]).messages[0], None);
    record.push_answer(&said("d", &["c1"]), Some(Uuid::from_u128(10)));
    assert_eq!(stored(&record).point.len, 2);
    assert_eq!(written(&recorded(&[Message::user("a")])), None);
    record.taint();
    assert_eq!(written(&record), None);
}

#[test]
fn what_is_no_state_of_ours_is_refused_with_a_reason() {
    let good = written(&answered(&[Message::user("a")])).unwrap().0;
    let change = |from: &str, to: &str| {
        assert!(good.contains(from), "{good}");
        good.replace(from, to)
    };
    let table = [
        (String::new(), "not one that turnpass wrote"),
        ("[]".to_owned(), "not one that turnpass wrote"),
        ("x".repeat(STATE_LIMIT_BYTES + 1), "longer"),
        (change("\"pool\"", "\"relay\""), "another transport"),
        (change("\"version\":1", "\"version\":2"), "another version"),
        (change("\"messages\":2", "\"messages\":0"), "damaged"),
        (change("\"messages\":2", "\"messages\":100001"), "damaged"),
        (change("\"messages\":2", "\"messages\":-1"), "damaged"),
        (
            change(&Uuid::from_u128(7).to_string(), "--version"),
            "damaged",
        ),
        (change(&Uuid::from_u128(9).to_string(), "x"), "damaged"),
        (
            change("\"at\":", "\"shapes\":[[5,1,[],[]]],\"at\":"),
            "damaged",
        ),
        (
            change("\"at\":", "\"shapes\":[[0,1,[[0,\"xyz\"]],[]]],\"at\":"),
            "damaged",
        ),
        (
            change(
                "\"at\":",
                "\"shapes\":[[0,1,[[1,\"0000000000000000\"]],[]]],\"at\":",
            ),
            "damaged",
        ),
    ];
    let none = "0000000000000000";
    let shapes = [
        // Out of order.
        format!("[0,2,[[1,\"{none}\"],[0,\"{none}\"]],[]]"),
        "[0,1,[],[1,0]]".to_owned(),
        "[1,1,[],[]],[0,1,[],[]]".to_owned(),
        // No fingerprint.
        "[0,1,[[0,\"000000000000000\"]],[]]".to_owned(),
        "[0,1,[[0,\"+000000000000001\"]],[]]".to_owned(),
    ];
    let shapes = shapes.map(|shape| {
        let text = change("\"at\":", &format!("\"shapes\":[{shape}],\"at\":"));
        (text, "damaged")
    });
    for (text, why) in table.into_iter().chain(shapes) {
        let refused = decode(&BackendState(text)).unwrap_err();
        assert!(refused.0.starts_with("the stored state cannot be used: "));
        assert!(refused.0.contains(why), "{}", refused.0);
    }
}

proptest! {
    #[test]
    fn decoding_never_panics(text in "(?s).{0,200}") {
        let _ = decode(&BackendState(text));
    }

    #[test]
    fn a_state_with_any_byte_changed_is_refused_or_fits_no_other_history(
        at in any::<prop::sample::Index>(), byte in 0x20..0x7fu8,
    ) {
        let mut history = vec![user(vec![Block::text("a"), Block::Image(image("AAAA"))])];
        let good = written(&answered(&history)).unwrap().0;
        let mut bytes = good.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        history[0] = Message::user("b");
        let next = grown(&history);
        let stored = decode(&BackendState(String::from_utf8(bytes).unwrap()));
        if let Ok(stored) = stored {
            let normalised = normal(&next);
            prop_assert!(!stored.begins(&normalised.messages));
            stored.adopt(&normalised.messages);
        }
    }
}
