//! Which process serves a request, and which messages it is given: the decision, and nothing else.
//!
//! Source: the pool document, SPEC 5, and the facts about CLI 2.1.332 named at each rule.
//!
//! | what there is | what is done |
//! | --- | --- |
//! | a live process whose conversation the history begins with | go on with it |
//! | the same, parked in calls, and their results came | answer the calls |
//! | parked in calls, and anything else came | rewind to the turn's user line, go on from there |
//! | another effort | set it on the live process |
//! | another model, prompt, other tools, another place | fork at the last point of the live process's conversation |
//! | the same, before the first user line | model and effort are set; another prompt, other tools or another place need a new process |
//! | any other history, or a tainted record | the live process is retired; fork if the state is another transport session's, else reseed |
//! | no live process, a state that fits | resume at its point |
//! | the same, of another transport session, with another model, or without the lock | fork at its point |
//! | a state that does not fit, or none | reseed |
//!
//! A point is usually behind: a turn in which calls were open ends at no point. The messages after it are delivered by
//! frames, like those of a reseed, so [`Deliver::Messages`] says where to begin for every base.

use uuid::Uuid;

use super::record::{Point, Record};
use super::state::{Stored, Unusable};
use crate::certify::Check;
use crate::conversation::digest::Digest;
use crate::conversation::normalise::{MISSING, Sendable};
use crate::conversation::{Block, ResultBlock, ToolResult, ToolUseId};
use crate::event;
use crate::request::{Effort, ModelId, TransportSession};

/// What a process serves with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The model.
    pub(crate) model: ModelId,
    /// Of the system prompt.
    pub(crate) prompt: Digest,
    /// Of the tools as they are published, in order.
    pub(crate) tools: Digest,
    /// The effort.
    pub(crate) effort: Option<Effort>,
    /// Of all else that a process keeps from its start: directory, time zone, how thinking is shown.
    pub(crate) place: Digest,
}

impl Settings {
    /// Of prompt and tools, as it is stored (pool document).
    pub(crate) fn fingerprint(&self) -> Digest {
        Digest::of_parts([&self.prompt.as_bytes()[..], self.tools.as_bytes()])
    }
}

/// The live process of the request's key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live<'a> {
    /// What its conversation holds.
    pub(crate) record: &'a Record,
    /// What it serves with.
    pub(crate) settings: &'a Settings,
    /// Its session id, if its conversation is on disk so that it can be forked; `None` under `--no-session-persistence`.
    pub(crate) session: Option<Uuid>,
    /// Set while its turn waits for results of calls.
    pub(crate) parked: Option<Parked<'a>>,
}

/// A turn that waits for results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parked<'a> {
    /// The calls that the host has to answer: not those that the CLI answered itself.
    pub(crate) awaited: &'a [ToolUseId],
    /// The entry of the user line that asked.
    pub(crate) turn: usize,
}

/// The state that came with the request, as it was read.
pub(crate) type Given = Result<Stored, Unusable>;

/// What the host asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    /// The key as the host gave it; states carry it.
    pub(crate) transport_session: &'a TransportSession,
    /// The normalised history; its last message is the user's.
    pub(crate) messages: &'a [Sendable<'a>],
    /// What it is to be served with.
    pub(crate) settings: &'a Settings,
    /// Whether the call keeps backend state: normal calls of a parent do, no others.
    pub(crate) keeps_state: bool,
    /// Whether we hold the lock of the stored CLI session: two writers are not prevented by the CLI.
    pub(crate) lock_held: bool,
    /// Whether this CLI resumes a conversation at its point.
    pub(crate) resumes: bool,
    /// Whether it forks one there.
    pub(crate) forks: bool,
}

/// A decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The process.
    pub(crate) base: Base,
    /// What it is given.
    pub(crate) deliver: Deliver,
    /// Why, in a sentence.
    pub(crate) reason: String,
    /// For the host.
    pub(crate) kind: event::PlanKind,
}

impl Plan {
    /// As the host is told.
    pub(crate) fn told(&self) -> event::Plan {
        event::Plan {
            kind: self.kind,
            reason: self.reason.clone(),
        }
    }
}

/// The process that serves. With any but `Live` the live process, if there is one, is retired; for a fork of its own
/// conversation that need not come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// The live one, after these changes, in this order.
    Live {
        /// Interrupt, wait for the turn's end, rewind, cut the record. If one of them fails: retire, and plan again
        /// without it.
        rewind: Option<Rewind>,
        /// `apply_flag_settings`.
        set_effort: bool,
    },
    /// `--resume SESSION --resume-session-at AT`.
    Resume {
        /// The CLI's session.
        session: Uuid,
        /// Its last record that counts.
        at: Uuid,
    },
    /// The same with `--fork-session`.
    Fork {
        /// The CLI's session.
        session: Uuid,
        /// Its last record that counts.
        at: Uuid,
    },
    /// A new process with an empty conversation.
    Reseed,
}

/// What is rewound before the live process goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rewind {
    /// `target_message_uuid`: it and everything after it goes.
    pub(crate) to: Uuid,
    /// `last_seen_user_message_uuid`, which the CLI wants for a target that is not the last user line.
    pub(crate) last_seen: Uuid,
    /// What the record is cut to.
    pub(crate) len: usize,
}

/// What the process is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deliver {
    /// The results of the last message, to the parked calls.
    Answers,
    /// The same, and then what else that message says.
    AnswersThenText,
    /// The messages from this one on: all but the last as frames, the last as the asking line. There is always one.
    Messages {
        /// Index into the normalised history.
        from: usize,
    },
}

/// Decides.
pub(crate) fn plan(live: Option<&Live<'_>>, given: Option<&Given>, asked: &Asked<'_>) -> Plan {
    let Some(live) = live else {
        return match restore(given, asked, None) {
            Ok(plan) => plan,
            Err(why) => reseed(asked, why),
        };
    };
    if !live.record.is_touched() {
        // A process that was started for this key and not used: a stored conversation is worth more than its warmth.
        return restore(given, asked, None).unwrap_or_else(|why| unused(live, asked, &why));
    }
    match go_on(live, asked) {
        Ok(plan) => plan,
        Err(rejected) => match restore(given, asked, Some(&rejected)) {
            Ok(plan) => plan,
            Err(why) => reseed(asked, why),
        },
    }
}

/// A live process in which nothing was said.
fn unused(live: &Live<'_>, asked: &Asked<'_>, why: &str) -> Plan {
    let (has, wants) = (live.settings, asked.settings);
    if has.tools != wants.tools || has.place != wants.place || has.prompt != wants.prompt {
        // A prompt is told with the first request of all and never again (2.1.294 to 2.1.332).
        let why = "the process that stood ready has another prompt, other tools or another place";
        return reseed(asked, why.to_owned());
    }
    let seeds = asked.messages.len() > 1;
    let reason = if seeds {
        format!("the process that stood ready is given the whole history: {why}")
    } else {
        "a process stood ready".to_owned()
    };
    Plan {
        base: Base::Live {
            rewind: None,
            set_effort: live.settings.effort != asked.settings.effort,
        },
        deliver: Deliver::Messages { from: 0 },
        reason,
        kind: if seeds {
            event::PlanKind::Reseeded
        } else {
            event::PlanKind::Warm
        },
    }
}

/// The live process goes on, or its conversation is forked, or it rejects the request for a reason.
fn go_on(live: &Live<'_>, asked: &Asked<'_>) -> Result<Plan, String> {
    if live.record.is_tainted() {
        return Err(
            "the live process's conversation holds a summary that is not the host's".into(),
        );
    }
    let shared = live.record.shared_prefix(asked.messages);
    if let Some(change) = unservable(live.settings, asked.settings) {
        return fork_of(live, asked, shared, change);
    }
    let whole = shared == live.record.len();
    if let Some(parked) = &live.parked {
        let answers = answers(parked, &asked.messages[shared..]).filter(|_| whole);
        return match answers {
            Some(deliver) => Ok(continued(
                live,
                asked,
                None,
                deliver,
                "the open calls are answered",
            )),
            None => rewound(
                live,
                asked,
                parked,
                shared,
                "the open calls were not answered",
            ),
        };
    }
    if whole && shared < asked.messages.len() {
        let deliver = Deliver::Messages { from: shared };
        return Ok(continued(
            live,
            asked,
            None,
            deliver,
            "the history goes on from the live conversation",
        ));
    }
    Err(rejection(shared, asked))
}

/// In which way a history is not the live conversation's.
fn rejection(shared: usize, asked: &Asked<'_>) -> String {
    if shared == asked.messages.len() {
        "the history ends before the live conversation does".to_owned()
    } else {
        format!(
            "message {} of {} is not the one that the live conversation has there",
            shared + 1,
            asked.messages.len()
        )
    }
}

/// What a live process cannot be told once it has spoken (facts 0.14: a model set later leaves command text behind).
fn unservable(has: &Settings, wants: &Settings) -> Option<&'static str> {
    if has.model != wants.model {
        Some("the model changed")
    } else if has.tools != wants.tools {
        Some("the tools changed")
    } else if has.prompt != wants.prompt {
        // `set_model` with a prompt goes over to the default model and leaves command text behind (2.1.294 to 2.1.332).
        Some("the prompt changed")
    } else if has.place != wants.place {
        Some(
            "the place, the way of showing thinking or an effort that is fixed at the start changed",
        )
    } else {
        None
    }
}

fn fork_of(
    live: &Live<'_>,
    asked: &Asked<'_>,
    shared: usize,
    change: &str,
) -> Result<Plan, String> {
    let session = live.session.filter(|_| asked.keeps_state && asked.forks);
    let Some((session, point)) = session.zip(live.record.point()) else {
        return Err(format!(
            "{change}, and the live conversation has no point to fork it at"
        ));
    };
    if point.len > shared {
        return Err(format!("{change}, and {}", rejection(shared, asked)));
    }
    let reason = format!("{change}: the live conversation is forked");
    fork(asked, session, point, reason)
        .ok_or_else(|| format!("{change}, and nothing follows the last point of the conversation"))
}

fn fork(asked: &Asked<'_>, session: Uuid, point: Point, reason: String) -> Option<Plan> {
    (point.len < asked.messages.len()).then_some(Plan {
        base: Base::Fork {
            session,
            at: point.at,
        },
        deliver: Deliver::Messages { from: point.len },
        reason,
        kind: event::PlanKind::Forked,
    })
}

fn continued(
    live: &Live<'_>,
    asked: &Asked<'_>,
    rewind: Option<Rewind>,
    deliver: Deliver,
    why: &str,
) -> Plan {
    let set_effort = live.settings.effort != asked.settings.effort;
    let mut reason = why.to_owned();
    if set_effort {
        reason += "; the effort changed and is set on it";
    }
    Plan {
        base: Base::Live { rewind, set_effort },
        deliver,
        reason,
        kind: event::PlanKind::Continued,
    }
}

/// The turn that waits is taken back, and what is left goes on if it is still the history's.
fn rewound(
    live: &Live<'_>,
    asked: &Asked<'_>,
    parked: &Parked<'_>,
    shared: usize,
    why: &str,
) -> Result<Plan, String> {
    let len = parked.turn;
    if shared < len {
        return Err(format!("{why}, and {}", rejection(shared, asked)));
    }
    if len >= asked.messages.len() {
        return Err(format!("{why}, and the history ends before that turn"));
    }
    let lines = live.record.line(len).zip(live.record.last_line());
    let Some((to, last_seen)) = lines else {
        return Err(format!("{why}, and the turn cannot be rewound"));
    };
    let rewind = Rewind { to, last_seen, len };
    let reason = format!("{why}: the turn is rewound");
    let deliver = Deliver::Messages { from: len };
    Ok(continued(live, asked, Some(rewind), deliver, &reason))
}

/// Whether the rest of a history is one message with the results of all awaited calls.
fn answers(parked: &Parked<'_>, rest: &[Sendable<'_>]) -> Option<Deliver> {
    let [last] = rest else { return None };
    let answers = |id: &ToolUseId| {
        last.content.iter().any(|block| match &**block {
            Block::ToolResult(result) => result.id == *id && !is_missing(result),
            _ => false,
        })
    };
    // With nothing awaited the CLI went on by itself, and no answer could reach it.
    if parked.awaited.is_empty() || !parked.awaited.iter().all(answers) {
        return None;
    }
    let alone = last
        .content
        .iter()
        .all(|block| matches!(**block, Block::ToolResult(_)));
    Some(if alone {
        Deliver::Answers
    } else {
        Deliver::AnswersThenText
    })
}

/// Whether the normaliser put it in, since the host has no result.
fn is_missing(result: &ToolResult) -> bool {
    match result.content.as_slice() {
        [ResultBlock::Text { text }] => result.is_error && text == MISSING,
        _ => false,
    }
}

/// A stored conversation is taken up, or it is not for a reason. `rejected` is why a live process does not serve.
fn restore(
    given: Option<&Given>,
    asked: &Asked<'_>,
    rejected: Option<&str>,
) -> Result<Plan, String> {
    let because = |why: &str| match rejected {
        Some(rejected) => format!("{rejected}; {why}"),
        None => why.to_owned(),
    };
    if asked.messages.len() < 2 {
        return Err(because("nothing was said before"));
    }
    if !asked.keeps_state {
        return Err(because("a call of this kind keeps no state"));
    }
    let stored = match given {
        None => return Err(because("there is no stored state")),
        Some(Err(Unusable(why))) => return Err(because(why)),
        Some(Ok(stored)) => stored,
    };
    let foreign = stored.transport_session != *asked.transport_session;
    if rejected.is_some() && !foreign {
        return Err(because("its stored state is of the same conversation"));
    }
    if stored.fingerprint != asked.settings.fingerprint() {
        return Err(because("prompt or tools are not those of the stored state"));
    }
    if !stored.begins(asked.messages) {
        return Err(because("the history is not that of the stored state"));
    }
    let (session, point) = (stored.session, stored.point);
    let fork_reason = if foreign {
        Some("the stored conversation belongs to another transport session")
    } else if stored.model != asked.settings.model {
        Some("the model is not that of the stored conversation")
    } else if !asked.lock_held {
        Some("another process may be writing into the stored conversation")
    } else {
        None
    };
    let nothing = || because("nothing follows the stored conversation");
    if let Some(why) = fork_reason.filter(|_| !asked.forks) {
        let why = format!(
            "{why}, and this CLI does not pass the check {}",
            Check::ForkAt
        );
        return Err(because(&why));
    }
    if let Some(why) = fork_reason {
        let reason = because(&format!("{why}: it is forked"));
        return fork(asked, session, point, reason).ok_or_else(nothing);
    }
    if point.len >= asked.messages.len() {
        return Err(nothing());
    }
    if !asked.resumes {
        let why = format!("this CLI does not pass the check {}", Check::ResumeAt);
        return Err(because(&why));
    }
    Ok(Plan {
        base: Base::Resume {
            session,
            at: point.at,
        },
        deliver: Deliver::Messages { from: point.len },
        reason: "no process is live, and the stored conversation is the history's".to_owned(),
        kind: event::PlanKind::Resumed,
    })
}

fn reseed(asked: &Asked<'_>, why: String) -> Plan {
    let first = asked.messages.len() < 2;
    Plan {
        base: Base::Reseed,
        deliver: Deliver::Messages { from: 0 },
        reason: if first {
            format!("the conversation begins: {why}")
        } else {
            format!("the whole history is given to a new process: {why}")
        },
        kind: if first {
            event::PlanKind::Fresh
        } else {
            event::PlanKind::Reseeded
        },
    }
}
