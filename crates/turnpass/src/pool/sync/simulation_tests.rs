//! A model of the CLI, driven by plans alone: whatever hosts and processes do, its conversation is the host's history.
//!
//! The model keeps what it is given as messages and knows nothing of records. It does as the real one does: a crash leaves
//! an unfinished turn on disk, a resume cuts the file, a fork copies it, a rewind takes a user line and all after it away.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use uuid::Uuid;

use super::host_tests::{Answer, Op, answer_calls, essence, op, own_words, rewrite, say};
use super::plan::{Asked, Base, Deliver, Given, Live, Parked, Plan, Rewind, Settings, plan};
use super::record::Record;
use super::record_tests::{id, said};
use super::state::{Owner, Unusable, decode, encode};
use crate::conversation::digest::Digest;
use crate::conversation::normalise::Sendable;
use crate::conversation::{Message, NormaliseOptions, Role, ToolUseId, normalise};
use crate::request::{BackendState, Effort, ModelId, TransportSession};

const KEYS: usize = 2;

/// One line of the CLI's conversation.
#[derive(Clone, Debug)]
struct Line {
    message: Message,
    uuid: Uuid,
}

#[derive(Debug)]
struct Process {
    session: Uuid,
    record: Record,
    settings: Settings,
    parked: Option<(Vec<ToolUseId>, usize)>,
}

#[derive(Clone, Debug)]
struct Host {
    key: TransportSession,
    history: Vec<Message>,
    /// What the last answer said to keep, and all before it.
    states: Vec<Option<BackendState>>,
    wants: Settings,
    lock_lost: bool,
}

#[derive(Default)]
struct World {
    disk: HashMap<Uuid, Vec<Line>>,
    live: HashMap<usize, Process>,
    hosts: Vec<Host>,
    numbers: u128,
    /// How often each kind of plan was carried out.
    seen: BTreeMap<&'static str, usize>,
}

fn settings() -> Settings {
    Settings {
        model: ModelId::from("m0"),
        prompt: Digest::of(b"0"),
        tools: Digest::of(b"0"),
        effort: None,
        place: Digest::of(b"place"),
    }
}

impl World {
    fn new() -> Self {
        let host = |n: usize| Host {
            key: TransportSession(format!("key {n}")),
            history: Vec::new(),
            states: vec![None],
            wants: settings(),
            lock_lost: false,
        };
        Self {
            hosts: (0..KEYS).map(host).collect(),
            ..Self::default()
        }
    }

    fn number(&mut self) -> u128 {
        self.numbers += 1;
        self.numbers
    }

    fn uuid(&mut self) -> Uuid {
        Uuid::from_u128(self.number())
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn given(&self, key: usize) -> Option<Given> {
        self.hosts[key].states.last()?.as_ref().map(decode)
    }

    /// One generation, which is answered, or cancelled in the middle.
    fn request(&mut self, key: usize, answer: Option<Answer>) {
        let host = self.hosts[key].clone();
        let Ok(normalised) = normalise(&host.history, &NormaliseOptions::default()) else {
            return;
        };
        let messages = &normalised.messages;
        let given = self.given(key);
        // True when no live process writes into the stored session: the key's own is retired before another starts.
        let written = given
            .as_ref()
            .and_then(|given| given.as_ref().ok())
            .is_some_and(|stored| {
                self.live
                    .iter()
                    .any(|(n, live)| *n != key && live.session == stored.session)
            });
        let mut decided = self.decide(key, messages, given.as_ref(), !written && !host.lock_lost);
        if let Base::Resume { session, at } | Base::Fork { session, at } = decided.base
            && self.place(session, at).is_none()
        {
            self.count("gone");
            self.live.remove(&key);
            let gone = Err(Unusable::gone());
            decided = self.decide(key, messages, Some(&gone), false);
            assert_eq!(decided.base, Base::Reseed);
        }
        assert!(!decided.reason.is_empty());
        let mut process = self.base(key, &decided, messages, given.as_ref());
        assert_eq!(process.settings, host.wants, "{decided:?}");
        let turn = self.deliver(&mut process, &decided, messages);
        self.check(&process, messages, &decided);
        self.hosts[key].lock_lost = false;
        match answer {
            Some(answer) => self.answer(key, &mut process, turn, answer),
            None => {
                self.disk.get_mut(&process.session).unwrap().truncate(turn);
                process.record.cut(turn);
                process.parked = None;
            }
        }
        self.live.insert(key, process);
    }

    fn decide(
        &self,
        key: usize,
        messages: &[Sendable<'_>],
        given: Option<&Given>,
        lock_held: bool,
    ) -> Plan {
        let live = self.live.get(&key).map(|process| Live {
            record: &process.record,
            settings: &process.settings,
            session: Some(process.session),
            parked: process.parked.as_ref().map(|(awaited, turn)| Parked {
                awaited,
                turn: *turn,
            }),
        });
        let asked = Asked {
            transport_session: &self.hosts[key].key,
            messages,
            settings: &self.hosts[key].wants,
            keeps_state: true,
            lock_held,
            resumes: true,
            forks: true,
        };
        plan(live.as_ref(), given, &asked)
    }

    fn base(
        &mut self,
        key: usize,
        plan: &Plan,
        messages: &[Sendable<'_>],
        given: Option<&Given>,
    ) -> Process {
        let old = self.live.remove(&key);
        let wants = self.hosts[key].wants.clone();
        let stored = given.and_then(|given| given.as_ref().ok());
        let from = match plan.deliver {
            Deliver::Messages { from } => from,
            _ => usize::MAX,
        };
        let (session, record) = match &plan.base {
            Base::Live { rewind, set_effort } => {
                self.count(if rewind.is_some() { "rewind" } else { "live" });
                let mut process = old.unwrap();
                assert!(!process.record.is_tainted());
                if let Some(rewind) = rewind {
                    self.rewind(&mut process, rewind);
                }
                let has = &mut process.settings;
                if has.model != wants.model {
                    assert!(!process.record.is_touched());
                    has.model = wants.model;
                }
                if *set_effort {
                    has.effort = wants.effort;
                }
                return process;
            }
            Base::Resume { session, at } => {
                self.count("resume");
                assert!(
                    self.live.values().all(|live| live.session != *session),
                    "two writers"
                );
                let len = self.place(*session, *at).unwrap();
                self.disk.get_mut(session).unwrap().truncate(len);
                (*session, stored.unwrap().adopt(messages))
            }
            Base::Fork { session, at } => {
                self.count("fork");
                let len = self.place(*session, *at).unwrap();
                let mut lines = self.disk[session][..len].to_vec();
                for line in &mut lines {
                    line.uuid = self.uuid();
                }
                let new = self.uuid();
                self.disk.insert(new, lines);
                let own = old.filter(|old| old.session == *session);
                let record = match own {
                    Some(own) => own.record.fork(from),
                    None => stored.unwrap().adopt(messages).fork(from),
                };
                (new, record)
            }
            Base::Reseed => {
                self.count("reseed");
                let new = self.uuid();
                self.disk.insert(new, Vec::new());
                (new, Record::new())
            }
        };
        Process {
            session,
            record,
            settings: wants,
            parked: None,
        }
    }

    /// How many lines a session has up to a uuid; the real CLI ends with an error when it has none of that uuid.
    fn place(&self, session: Uuid, at: Uuid) -> Option<usize> {
        let lines = &self.disk[&session];
        let place = lines.iter().position(|line| line.uuid == at)?;
        let open = lines[place].message.tool_calls().count();
        assert_eq!(open, 0, "the CLI would make up a result");
        Some(place + 1)
    }

    fn rewind(&mut self, process: &mut Process, rewind: &Rewind) {
        let lines = self.disk.get_mut(&process.session).unwrap();
        let users = lines.iter().filter(|line| line.message.role == Role::User);
        assert!(users.clone().any(|line| line.uuid == rewind.last_seen));
        let to = lines
            .iter()
            .position(|line| line.uuid == rewind.to)
            .unwrap();
        lines.truncate(to);
        process.record.cut(rewind.len);
        process.parked = None;
    }

    /// Gives the process its messages, and says at which entry the turn began.
    fn deliver(&mut self, process: &mut Process, plan: &Plan, messages: &[Sendable<'_>]) -> usize {
        let last = messages.len() - 1;
        let (from, turn) = match plan.deliver {
            Deliver::Messages { from } => {
                assert!(
                    process.parked.is_none(),
                    "a line in a turn that waits would be folded into it"
                );
                (from, last)
            }
            deliver => {
                self.count(if deliver == Deliver::Answers {
                    "answers"
                } else {
                    "answers and text"
                });
                (last, process.parked.take().unwrap().1)
            }
        };
        for message in &messages[from..] {
            let uuid = self.uuid();
            let line = (turn == last).then_some(uuid);
            process.record.push(message, line);
            let content = message.content.iter().map(|block| (**block).clone());
            let mut message = Message {
                role: message.role,
                content: content.collect(),
            };
            if turn != last {
                own_words(&mut message);
            }
            let line = Line { message, uuid };
            self.disk.get_mut(&process.session).unwrap().push(line);
        }
        turn
    }

    fn check(&self, process: &Process, messages: &[Sendable<'_>], plan: &Plan) {
        let lines = &self.disk[&process.session];
        assert_eq!(lines.len(), messages.len(), "{plan:?}");
        assert_eq!(process.record.len(), messages.len(), "{plan:?}");
        for (line, message) in lines.iter().zip(messages) {
            let (has, pictures) = essence(line.message.role, &line.message.content);
            let (wants, shown) = essence(message.role, &message.content);
            assert_eq!(has, wants, "{plan:?}");
            assert!(
                shown.iter().all(|picture| pictures.contains(picture)),
                "{plan:?}"
            );
        }
    }

    fn answer(&mut self, key: usize, process: &mut Process, turn: usize, answer: Answer) {
        let number = self.number();
        let calls: Vec<String> = match answer {
            Answer::Text => Vec::new(),
            Answer::Calls(calls, bad) => (0..calls)
                .map(|n| format!("c{number}-{n}"))
                .chain(bad.then(|| format!("bad{number}")))
                .collect(),
        };
        let names: Vec<&str> = calls.iter().map(String::as_str).collect();
        let message = said(&format!("answer {number}"), &names);
        let uuid = self.uuid();
        process.record.push_answer(&message, Some(uuid));
        let awaited = names.iter().filter(|name| !name.starts_with("bad"));
        for bad in names.iter().filter(|name| name.starts_with("bad")) {
            process.record.answered_by_cli(&id(bad));
        }
        process.parked =
            (!names.is_empty()).then(|| (awaited.map(|name| id(name)).collect(), turn));
        let line = Line {
            message: message.clone(),
            uuid,
        };
        self.disk.get_mut(&process.session).unwrap().push(line);
        let host = &mut self.hosts[key];
        host.history.push(message);
        host.states.push(encode(
            &process.record,
            &Owner {
                session: process.session,
                transport_session: &host.key,
                model: &process.settings.model,
                fingerprint: process.settings.fingerprint(),
            },
        ));
    }

    /// The process is gone; its turn may be left half written.
    fn crash(&mut self, key: usize) {
        if let Some(process) = self.live.remove(&key) {
            let uuid = self.uuid();
            let message = Message::user("[left over]");
            self.disk
                .get_mut(&process.session)
                .unwrap()
                .push(Line { message, uuid });
        }
    }

    fn run(&mut self, key: usize, op: Op) {
        match op {
            Op::Say(text, picture, answer) => {
                say(&mut self.hosts[key].history, text, picture);
                self.request(key, Some(answer));
            }
            Op::Results(all, beside, answer) => {
                answer_calls(&mut self.hosts[key].history, all, beside);
                self.request(key, Some(answer));
            }
            Op::Again(answer) => self.request(key, Some(answer)),
            Op::Cancel(text, keeps, survives) => {
                say(&mut self.hosts[key].history, text, None);
                self.request(key, None);
                if !survives {
                    self.crash(key);
                }
                if !keeps {
                    self.hosts[key].history.pop();
                }
            }
            Op::Crash => self.crash(key),
            Op::Restart(older) => {
                self.crash(key);
                let states = &mut self.hosts[key].states;
                states.truncate((states.len().saturating_sub(older)).max(1));
            }
            Op::Spoil(lost) => {
                let damaged = BackendState("{}".to_owned());
                self.hosts[key].states.push((!lost).then_some(damaged));
            }
            Op::Taint => {
                if let Some(process) = self.live.get_mut(&key) {
                    process.record.taint();
                }
                self.left_over(key);
            }
            Op::Ready if !self.live.contains_key(&key) => {
                let session = self.uuid();
                self.disk.insert(session, Vec::new());
                let process = Process {
                    session,
                    record: Record::new(),
                    settings: settings(),
                    parked: None,
                };
                self.live.insert(key, process);
            }
            Op::Ready => {}
            Op::LockLost => self.hosts[key].lock_lost = true,
            Op::Model(n) => self.hosts[key].wants.model = ModelId(format!("m{n}")),
            Op::Tools(n) => self.hosts[key].wants.tools = Digest::of(&[n]),
            Op::Prompt(n) => self.hosts[key].wants.prompt = Digest::of(&[n]),
            Op::Effort => {
                let effort = &mut self.hosts[key].wants.effort;
                *effort = effort.xor(Some(Effort::High));
            }
            Op::Branch => {
                let other = KEYS - 1 - key;
                self.hosts[other].history = self.hosts[key].history.clone();
                self.hosts[other].states = self.hosts[key].states.clone();
                self.hosts[other].wants = self.hosts[key].wants.clone();
            }
            op => rewrite(&mut self.hosts[key].history, &op),
        }
    }

    fn left_over(&mut self, key: usize) {
        let uuid = self.uuid();
        if let Some(process) = self.live.get(&key) {
            let message = Message::user("[a summary]");
            self.disk
                .get_mut(&process.session)
                .unwrap()
                .push(Line { message, uuid });
        }
    }
}

fn ops() -> impl Strategy<Value = Vec<(usize, Op)>> {
    prop::collection::vec((0..KEYS, op()), 1..50)
}

fn lived(ops: Vec<(usize, Op)>) -> World {
    let mut world = World::new();
    for (key, op) in ops {
        world.run(key, op);
    }
    world
}

proptest! {
    #[test]
    fn bug_082_the_clis_conversation_is_always_the_hosts_history(ops in ops()) {
        lived(ops);
    }
}

/// So that the property cannot hold for want of anything happening.
#[test]
fn the_simulation_comes_to_every_kind_of_plan() {
    let mut seen: BTreeMap<&'static str, usize> = BTreeMap::new();
    let mut runner = TestRunner::deterministic();
    for _ in 0..200 {
        let ops = ops().new_tree(&mut runner).unwrap().current();
        for (what, times) in lived(ops).seen {
            *seen.entry(what).or_default() += times;
        }
    }
    for what in [
        "live",
        "rewind",
        "resume",
        "fork",
        "reseed",
        "answers",
        "answers and text",
    ] {
        assert!(seen.get(what).is_some_and(|times| *times >= 20), "{seen:?}");
    }
}

/// A resume cuts the file; what another key stored of the same session may lie behind the cut.
#[test]
fn a_stored_point_that_an_older_resume_cut_off_is_reseeded() {
    let say = || Op::Say(0, None, Answer::Text);
    let world = lived(vec![
        (0, say()),
        (0, say()),
        (0, say()),
        (0, Op::Branch),
        (0, say()),
        (0, Op::Restart(2)),
        (0, say()),
        (1, say()),
    ]);
    assert_eq!(world.seen["gone"], 1);
}
