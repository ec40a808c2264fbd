//! The same for a CLI that cannot do all of it, and for a process that stood ready.

use super::*;

#[test]
fn a_cli_that_cannot_fork_or_resume_is_given_the_whole_history() {
    use PlanKind::{Reseeded, Resumed};
    let given = |session: &str| Some(state(&turn(), session, "m", &settings()));
    check(vec![
        (
            "resume_at fails",
            dead().with(|s| s.resumes = false),
            reseed(),
            Reseeded,
            "resume_at",
        ),
        (
            "fork_at fails: a live conversation with another model",
            scene().with(|s| {
                s.wants.model = ModelId::from("n");
                s.forks = false;
            }),
            reseed(),
            Reseeded,
            "the model changed, and the live conversation has no point",
        ),
        (
            "fork_at fails: somebody else's conversation",
            dead().with(|s| {
                s.given = given("other");
                s.forks = false;
            }),
            reseed(),
            Reseeded,
            "belongs to another transport session, and this CLI does not pass the check fork_at",
        ),
        (
            "neither needs the other",
            dead().with(|s| s.forks = false),
            resume(),
            Resumed,
            "no process is live",
        ),
        (
            "nor this one",
            dead().with(|s| {
                s.given = given("other");
                s.resumes = false;
            }),
            fork(STORED),
            PlanKind::Forked,
            "it is forked",
        ),
    ]);
}

#[test]
fn a_process_that_stood_ready_is_fitted() {
    use PlanKind::{Fresh, Reseeded, Resumed, Warm};
    check(vec![
        (
            "a first question",
            ready(),
            (set(false), from(0)),
            Warm,
            "stood ready",
        ),
        (
            "SPEC 5 a model before the first user line is set",
            ready().with(|s| {
                s.wants.model = ModelId::from("n");
                s.wants.effort = Some(Effort::Low);
            }),
            (set(true), from(0)),
            Warm,
            "stood ready",
        ),
        (
            "another prompt needs another process: it is told but once",
            ready().with(|s| s.wants.prompt = Digest::of(b"other")),
            reseed(),
            Fresh,
            "another prompt",
        ),
        (
            "other tools need another process",
            ready().with(|s| s.wants.tools = Digest::of(b"other")),
            reseed(),
            Fresh,
            "other tools",
        ),
        (
            "another place needs another process",
            ready().with(|s| s.wants.place = Digest::of(b"other")),
            reseed(),
            Fresh,
            "another place",
        ),
        (
            "a history is given to it",
            ready().with(|s| s.history = grown()),
            (set(false), from(0)),
            Reseeded,
            "is given the whole history: there is no stored state",
        ),
        (
            "but a stored conversation is better",
            ready().with(|s| {
                s.history = grown();
                s.given = dead().given;
            }),
            resume(),
            Resumed,
            "no process is live",
        ),
        (
            "once a user line was written it is no longer fresh, also after a rewind",
            scene().with(|s| {
                s.live.as_mut().unwrap().0.cut(0);
                s.history = vec![Message::user("a")];
                s.wants.model = ModelId::from("n");
            }),
            reseed(),
            Fresh,
            "the model changed, and the live conversation has no point",
        ),
    ]);
}

#[test]
fn what_only_looks_like_the_live_conversation_s_continuation() {
    use PlanKind::{Continued, Reseeded};
    let unanswered = || {
        let mut record = spoken(&[grown(), vec![said("d", &[])]].concat());
        record.cut(3);
        (record, settings())
    };
    check(vec![
        (
            "a message that was asked and never answered is not asked by saying nothing",
            scene().with(|s| s.live = Some(unanswered())),
            reseed(),
            Reseeded,
            "the history ends before the live conversation does",
        ),
        (
            "nor in a fork that begins after it",
            scene().with(|s| {
                let mut live = unanswered();
                live.0.resume_after(at(2));
                s.live = Some(live);
                s.wants.model = ModelId::from("n");
            }),
            reseed(),
            Reseeded,
            "nothing follows the last point",
        ),
        (
            "a call that keeps no state forks no conversation that does",
            scene().with(|s| {
                s.wants.model = ModelId::from("n");
                s.keeps_state = false;
            }),
            reseed(),
            Reseeded,
            "the live conversation has no point to fork it at",
        ),
        (
            "a tool may say what the normaliser says of a missing result",
            parked().with(|s| {
                let results = ["c1", "c2", "bad"];
                let results = results.map(|name| ToolResult::text(id(name), MISSING));
                *s.history.last_mut().unwrap() = Message::results(results);
            }),
            (set(false), Deliver::Answers),
            Continued,
            "the open calls are answered",
        ),
    ]);
}
