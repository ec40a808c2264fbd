//! Each rule of the pool document and of SPEC 5 about going on, restoring, forking and reseeding: one row each.

use uuid::Uuid;

use super::plan::{Asked, Base, Deliver, Given, Live, Parked, Plan, Rewind, Settings, plan};
use super::record::Record;
use super::record_tests::{id, normal, said};
use super::state::{Owner, decode, encode};
use crate::conversation::digest::Digest;
use crate::conversation::normalise::MISSING;
use crate::conversation::{Block, Message, ToolResult, ToolUseId};
use crate::event::PlanKind;
use crate::request::{BackendState, Effort, ModelId, TransportSession};

#[path = "plan_ready_tests.rs"]
mod ready;

const LIVE: Uuid = Uuid::from_u128(1);
const STORED: Uuid = Uuid::from_u128(2);

/// The uuid of the user line at an entry of the live record, and of the answer at one.
fn line(entry: usize) -> Uuid {
    Uuid::from_u128(100 + entry as u128)
}

fn at(entry: usize) -> Uuid {
    Uuid::from_u128(200 + entry as u128)
}

fn settings() -> Settings {
    Settings {
        model: ModelId::from("m"),
        prompt: Digest::of(b"prompt"),
        tools: Digest::of(b"tools"),
        effort: None,
        place: Digest::of(b"place"),
    }
}

/// As a process's record is after it was given these messages and answered with those of the assistant's.
fn spoken(history: &[Message]) -> Record {
    let mut record = Record::new();
    let asked = [history, &[Message::user("asked")]].concat();
    let normalised = normal(&asked);
    for (n, message) in normalised.messages.iter().take(history.len()).enumerate() {
        if n % 2 == 0 {
            record.push(message, Some(line(n)));
        } else {
            record.push_answer(&history[n], Some(at(n)));
        }
    }
    record
}

fn state(history: &[Message], session: &str, model: &str, settings: &Settings) -> Given {
    let owner = Owner {
        session: STORED,
        transport_session: &TransportSession(session.to_owned()),
        model: &ModelId::from(model),
        fingerprint: settings.fingerprint(),
    };
    decode(&encode(&spoken(history), &owner).unwrap())
}

/// What a row begins with: a live process that said `a b`, and a request that goes on with `c`.
struct Scene {
    live: Option<(Record, Settings)>,
    session: Option<Uuid>,
    parked: Option<(Vec<ToolUseId>, usize)>,
    given: Option<Given>,
    history: Vec<Message>,
    wants: Settings,
    keeps_state: bool,
    lock_held: bool,
    resumes: bool,
    forks: bool,
}

fn turn() -> Vec<Message> {
    vec![Message::user("a"), said("b", &[])]
}

fn grown() -> Vec<Message> {
    [turn(), vec![Message::user("c")]].concat()
}

/// Goes on with the live process.
fn scene() -> Scene {
    Scene {
        live: Some((spoken(&turn()), settings())),
        session: Some(LIVE),
        parked: None,
        given: None,
        history: grown(),
        wants: settings(),
        keeps_state: true,
        lock_held: true,
        resumes: true,
        forks: true,
    }
}

/// No live process, and a state of what was said.
fn dead() -> Scene {
    Scene {
        live: None,
        given: Some(state(&turn(), "default", "m", &settings())),
        ..scene()
    }
}

/// The live process waits for the results of two calls; one more was answered by the CLI.
fn parked() -> Scene {
    let mut history = grown();
    history.push(said("d", &["c1", "c2", "bad"]));
    let mut record = spoken(&history);
    record.answered_by_cli(&id("bad"));
    history.push(Message::results(
        ["c1", "c2", "bad"].map(|name| ToolResult::text(id(name), "r")),
    ));
    Scene {
        live: Some((record, settings())),
        parked: Some((vec![id("c1"), id("c2")], 2)),
        history,
        ..scene()
    }
}

/// A process that was started for the key and not used.
fn ready() -> Scene {
    Scene {
        live: Some((Record::new(), settings())),
        history: vec![Message::user("a")],
        ..scene()
    }
}

impl Scene {
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn plan(&self) -> Plan {
        let normalised = normal(&self.history);
        let parked = self.parked.as_ref().map(|(awaited, turn)| Parked {
            awaited,
            turn: *turn,
        });
        let live = self.live.as_ref().map(|(record, settings)| Live {
            record,
            settings,
            session: self.session,
            parked,
        });
        let asked = Asked {
            transport_session: &TransportSession::default(),
            messages: &normalised.messages,
            settings: &self.wants,
            keeps_state: self.keeps_state,
            lock_held: self.lock_held,
            resumes: self.resumes,
            forks: self.forks,
        };
        plan(live.as_ref(), self.given.as_ref(), &asked)
    }
}

fn set(set_effort: bool) -> Base {
    Base::Live {
        rewind: None,
        set_effort,
    }
}

fn live(deliver: Deliver) -> (Base, Deliver) {
    (set(false), deliver)
}

fn from(from: usize) -> Deliver {
    Deliver::Messages { from }
}

fn rewound() -> (Base, Deliver) {
    let (to, last_seen, len) = (line(2), line(2), 2);
    let base = Base::Live {
        rewind: Some(Rewind { to, last_seen, len }),
        set_effort: false,
    };
    (base, from(2))
}

fn resume() -> (Base, Deliver) {
    let (session, at) = (STORED, at(1));
    (Base::Resume { session, at }, from(2))
}

fn fork(session: Uuid) -> (Base, Deliver) {
    let at = at(1);
    (Base::Fork { session, at }, from(2))
}

fn reseed() -> (Base, Deliver) {
    (Base::Reseed, from(0))
}

type Row = (&'static str, Scene, (Base, Deliver), PlanKind, &'static str);

fn check(rows: Vec<Row>) {
    for (rule, scene, (base, deliver), kind, why) in rows {
        let plan = scene.plan();
        let is = (plan.base.clone(), plan.deliver, plan.kind);
        assert_eq!(is, (base, deliver, kind), "{rule}: {plan:?}");
        assert!(plan.reason.contains(why), "{rule}: {}", plan.reason);
        assert_eq!(plan.told().reason, plan.reason);
    }
}

#[test]
fn a_live_process_goes_on_with_a_history_that_begins_with_its_own() {
    use PlanKind::{Continued, Forked, Reseeded};
    check(vec![
        (
            "P-04 a process is reused",
            scene(),
            live(from(2)),
            Continued,
            "goes on",
        ),
        (
            "messages that the process has not seen are delivered",
            scene().with(|s| s.history.extend([said("d", &[]), Message::user("e")])),
            live(from(2)),
            Continued,
            "goes on",
        ),
        (
            "P-04 model and effort are no part of the key: effort live",
            scene().with(|s| s.wants.effort = Some(Effort::High)),
            (set(true), from(2)),
            Continued,
            "the effort changed and is set on it",
        ),
        (
            "SPEC 5, bug 79: a changed prompt is served, by a fork",
            scene().with(|s| s.wants.prompt = Digest::of(b"other")),
            fork(LIVE),
            Forked,
            "the prompt changed: the live conversation is forked",
        ),
        (
            "SPEC 5: a model change after the first user line is a fork",
            scene().with(|s| s.wants.model = ModelId::from("n")),
            fork(LIVE),
            Forked,
            "the model changed: the live conversation is forked",
        ),
        (
            "SPEC 5, bug 79: changed tools are served, by a fork",
            scene().with(|s| s.wants.tools = Digest::of(b"other")),
            fork(LIVE),
            Forked,
            "the tools changed",
        ),
        (
            "tools and prompt: a fork",
            scene().with(|s| {
                s.wants.tools = Digest::of(b"other");
                s.wants.prompt = Digest::of(b"other");
            }),
            fork(LIVE),
            Forked,
            "the tools changed",
        ),
        (
            "bug 85: another directory is another process",
            scene().with(|s| s.wants.place = Digest::of(b"other")),
            fork(LIVE),
            Forked,
            "the place",
        ),
        (
            "a model change while calls are open: fork before the turn, whose messages are delivered",
            parked().with(|s| s.wants.model = ModelId::from("n")),
            fork(LIVE),
            Forked,
            "the model changed",
        ),
        (
            "a conversation that is not on disk cannot be forked",
            scene().with(|s| {
                s.wants.model = ModelId::from("n");
                s.session = None;
                s.keeps_state = false;
            }),
            reseed(),
            Reseeded,
            "the model changed, and the live conversation has no point to fork it at; a call of this kind keeps no state",
        ),
        (
            "a changed model and another history",
            scene().with(|s| {
                s.wants.model = ModelId::from("n");
                s.history[1] = said("B", &[]);
            }),
            reseed(),
            Reseeded,
            "message 2 of 3",
        ),
    ]);
}

#[test]
fn bug_082_any_other_history_retires_the_live_process() {
    use PlanKind::{Forked, Fresh, Reseeded};
    let own = || Some(state(&turn(), "default", "m", &settings()));
    let foreign = || Some(state(&turn(), "other", "m", &settings()));
    let edited = || {
        scene().with(|s| s.live = Some((spoken(&[Message::user("A"), said("b", &[])]), settings())))
    };
    check(vec![
        (
            "P-51 a rewrite",
            edited(),
            reseed(),
            Reseeded,
            "message 1 of 3 is not the one that the live conversation has there; there is no stored state",
        ),
        (
            "P-51 an omission",
            scene().with(|s| s.history = vec![Message::user("a")]),
            reseed(),
            Fresh,
            "the history ends before the live conversation does",
        ),
        (
            "the same list again is no continuation",
            scene().with(|s| {
                s.live = Some((
                    spoken(&[grown(), vec![said("d", &[])]].concat()),
                    settings(),
                ))
            }),
            reseed(),
            Reseeded,
            "the history ends before",
        ),
        (
            "P-51 a reorder",
            scene()
                .with(|s| s.history = vec![Message::user("c"), said("b", &[]), Message::user("a")]),
            reseed(),
            Reseeded,
            "message 1 of 3",
        ),
        (
            "P-57 a rejecting live process: reseed, though its own state fits",
            edited().with(|s| s.given = own()),
            reseed(),
            Reseeded,
            "its stored state is of the same conversation",
        ),
        (
            "P-57 unless the state is of another transport session",
            edited().with(|s| s.given = foreign()),
            fork(STORED),
            Forked,
            "belongs to another transport session",
        ),
        (
            "P-57, P-55 and that state has to fit too",
            edited().with(|s| {
                s.given = foreign();
                s.history[1] = said("B", &[]);
            }),
            reseed(),
            Reseeded,
            "the history is not that of the stored state",
        ),
        (
            "a tainted record is never continued",
            scene().with(|s| s.live.as_mut().unwrap().0.taint()),
            reseed(),
            Reseeded,
            "holds a summary that is not the host's",
        ),
        (
            "nor forked",
            scene().with(|s| {
                s.live.as_mut().unwrap().0.taint();
                s.wants.model = ModelId::from("n");
            }),
            reseed(),
            Reseeded,
            "holds a summary",
        ),
    ]);
}

#[test]
fn open_calls_are_answered_or_their_turn_is_rewound() {
    use PlanKind::{Continued, Reseeded};
    let last = |s: &mut Scene, message: Message| *s.history.last_mut().unwrap() = message;
    let results =
        |names: &[&str]| Message::results(names.iter().map(|name| ToolResult::text(id(name), "r")));
    let stale = "the open calls were not answered: the turn is rewound";
    check(vec![
        (
            "the results came",
            parked(),
            live(Deliver::Answers),
            Continued,
            "the open calls are answered",
        ),
        (
            "the host need not answer what the CLI answered",
            parked().with(|s| last(s, results(&["c2", "c1"]))),
            live(Deliver::Answers),
            Continued,
            "are answered",
        ),
        (
            "results and text",
            parked().with(|s| {
                s.history
                    .last_mut()
                    .unwrap()
                    .content
                    .push(Block::text("and"))
            }),
            live(Deliver::AnswersThenText),
            Continued,
            "are answered",
        ),
        (
            "results and another effort",
            parked().with(|s| s.wants.effort = Some(Effort::Low)),
            (set(true), Deliver::Answers),
            Continued,
            "the effort changed",
        ),
        (
            "a changed prompt while calls are open: fork before the turn",
            parked().with(|s| s.wants.prompt = Digest::of(b"other")),
            fork(LIVE),
            PlanKind::Forked,
            "the prompt changed",
        ),
        (
            "pending tool work is stale: a result is missing",
            parked().with(|s| last(s, results(&["c1"]))),
            rewound(),
            Continued,
            stale,
        ),
        (
            "a result that says that there is none, as the normaliser's does",
            parked().with(|s| {
                let result = ToolResult::error(id("c1"), MISSING);
                last(
                    s,
                    Message::results([result, ToolResult::text(id("c2"), "r")]),
                );
            }),
            rewound(),
            Continued,
            stale,
        ),
        (
            "all are missing",
            parked().with(|s| last(s, Message::user("never mind"))),
            rewound(),
            Continued,
            stale,
        ),
        (
            "more than one message follows",
            parked().with(|s| s.history.extend([said("e", &[]), Message::user("f")])),
            rewound(),
            Continued,
            stale,
        ),
        (
            "the turn's answer was edited",
            parked().with(|s| s.history[3] = said("D", &["c1", "c2", "bad"])),
            rewound(),
            Continued,
            stale,
        ),
        (
            "the turn's question was edited",
            parked().with(|s| s.history = [turn(), vec![Message::user("C")]].concat()),
            rewound(),
            Continued,
            stale,
        ),
        (
            "the question is asked again",
            parked().with(|s| s.history.truncate(3)),
            rewound(),
            Continued,
            stale,
        ),
        (
            "no call is awaited: the CLI went on by itself",
            parked().with(|s| s.parked = Some((vec![], 2))),
            rewound(),
            Continued,
            stale,
        ),
        (
            "the history before the turn is another one",
            parked().with(|s| s.history[0] = Message::user("A")),
            reseed(),
            Reseeded,
            "the open calls were not answered, and message 1 of 5 is not the one",
        ),
        (
            "the turn has no user line to rewind to",
            parked().with(|s| {
                s.parked = Some((vec![id("c1")], 3));
                s.history[4] = Message::user("never mind");
            }),
            reseed(),
            Reseeded,
            "the turn cannot be rewound",
        ),
    ]);
}

#[test]
fn a_stored_conversation_is_restored_if_it_is_the_history_s() {
    use PlanKind::{Forked, Fresh, Reseeded, Resumed};
    let given = |session: &str, model: &str| Some(state(&turn(), session, model, &settings()));
    check(vec![
        (
            "P-52, P-53 restore at the stored uuid",
            dead(),
            resume(),
            Resumed,
            "no process is live",
        ),
        (
            "what stands after the point is delivered",
            dead().with(|s| s.history.extend([said("d", &[]), Message::user("e")])),
            resume(),
            Resumed,
            "no process is live",
        ),
        (
            "another effort makes no difference",
            dead().with(|s| s.wants.effort = Some(Effort::Max)),
            resume(),
            Resumed,
            "no process is live",
        ),
        (
            "P-54 a state of another transport session",
            dead().with(|s| s.given = given("other", "m")),
            fork(STORED),
            Forked,
            "belongs to another transport session: it is forked",
        ),
        (
            "SPEC 5 without the lock",
            dead().with(|s| s.lock_held = false),
            fork(STORED),
            Forked,
            "another process may be writing",
        ),
        (
            "SPEC 5 another model",
            dead().with(|s| s.given = given("default", "n")),
            fork(STORED),
            Forked,
            "the model is not that of the stored conversation",
        ),
        (
            "P-52, P-55 another prompt",
            dead().with(|s| s.wants.prompt = Digest::of(b"other")),
            reseed(),
            Reseeded,
            "prompt or tools are not those of the stored state",
        ),
        (
            "P-52, P-55 other tools",
            dead().with(|s| s.wants.tools = Digest::of(b"other")),
            reseed(),
            Reseeded,
            "prompt or tools",
        ),
        (
            "P-52, P-55 another history",
            dead().with(|s| s.history[1] = said("B", &[])),
            reseed(),
            Reseeded,
            "the history is not that of the stored state",
        ),
        (
            "P-55 a history that ends before the point",
            dead().with(|s| {
                s.given = Some(state(
                    &[grown(), vec![said("d", &[])]].concat(),
                    "default",
                    "m",
                    &settings(),
                ))
            }),
            reseed(),
            Reseeded,
            "the history is not that of the stored state",
        ),
        (
            "P-59 a cleared state",
            dead().with(|s| s.given = None),
            reseed(),
            Reseeded,
            "there is no stored state",
        ),
        (
            "a state that cannot be read is no error",
            dead().with(|s| s.given = Some(decode(&BackendState("?".into())))),
            reseed(),
            Reseeded,
            "the stored state cannot be used: it is not one that turnpass wrote",
        ),
        (
            "P-05, P-07 only a parent's normal calls have state",
            dead().with(|s| s.keeps_state = false),
            reseed(),
            Reseeded,
            "a call of this kind keeps no state",
        ),
        (
            "a conversation begins",
            dead().with(|s| {
                s.given = None;
                s.history = vec![Message::user("a")];
            }),
            reseed(),
            Fresh,
            "the conversation begins",
        ),
    ]);
}
