//! Summaries of a conversation: where one is written, and what that does to the conversation ([`route`] decides, pure).
//!
//! | whose | its live process | a fork | the summary is written | live process | stored state, after success |
//! | --- | --- | --- | --- | --- | --- |
//! | sub-agent's | takes it | | in place | retired | none is kept |
//! | sub-agent's | does not | | anew, in a process of its own | retired | none is kept |
//! | sub-agent's | none | | anew, in a process of its own | | none is kept |
//! | parent's | there | possible | in a fork beside it | untouched | unchanged |
//! | parent's | takes it | not, or it failed | in place | retired | cleared |
//! | parent's | does not | not, or it failed | anew, in a process of its own | retired | cleared |
//! | parent's | none | | anew, in a process of its own | | cleared |
//!
//! A fork is possible when the stored state that came with the request is the live conversation's as it stands, with the
//! same prompt and tools. It begins where the summary's own history leaves the live one, so that history may be shorter.
//! It has failed for this purpose when its process did, before the service's answer began: what the service refuses it
//! would refuse in place as well, and the conversation would be lost for nothing.
//!
//! In place the record is tainted before the first byte is written, and the process is ended whatever comes of it. From
//! the same moment on the host's stored state is of no use, which it hears in three ways: `Clear` in the `Done`, a mark
//! on the error, and the request's [`StateRetirement`](crate::request::StateRetirement). What fails before that (no
//! seat, no process, the gate) retires nothing and marks nothing; nor does a summary anew without a live process.
//!
//! A summary holds no calls. One that the model makes all the same is answered with an error or not at all, fails the
//! generation with `summary_tool_call`, and is not shown: text beside it ("I will look first") is no summary, and a host
//! that took it for one would replace its conversation by it.
//!
//! Source: the pool document ("Summary routing"); SPEC 1 (one request of the host is one upstream).

use super::exchange::{After, Ended, Exchange, Outcome};
use super::launcher::Stored;
use super::session::Session;
use super::sync::{self, Base, Deliver, Given};
use super::table::Held;
use super::{Call, Failed, Inner, Step, leaves_it_usable, unless_cancelled, within_start};
use crate::error::{Error, ErrorCode, Result};
use crate::event::{Plan, PlanKind, StateOrder};
use crate::limits::guard::Ticket;
use crate::process::EndPolicy;
use uuid::Uuid;

/// The live process of the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    /// There is none.
    None,
    /// The summary's history goes on from its conversation, and it has the prompt, the tools and the model.
    Takes,
    /// It is there and cannot take the summary.
    Rejects,
}

/// Where a summary is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// In a fork beside the live process.
    Fork,
    /// By the live process, in its conversation.
    InPlace,
    /// By a new process that is given the whole history.
    Anew,
}

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Where.
    pub(crate) way: Way,
    /// Whether the live process is retired for it.
    pub(crate) retires: bool,
    /// Whether the host's stored state is cleared when it succeeds.
    pub(crate) clears: bool,
}

/// Decides.
pub(crate) fn route(of_sub_agent: bool, live: Live, can_fork: bool) -> Route {
    let way = match (of_sub_agent, live, can_fork) {
        (false, Live::Takes | Live::Rejects, true) => Way::Fork,
        (_, Live::Takes, _) => Way::InPlace,
        (_, Live::Rejects | Live::None, _) => Way::Anew,
    };
    let beside = way == Way::Fork;
    Route {
        way,
        retires: !beside && live != Live::None,
        clears: !beside && !of_sub_agent,
    }
}

impl Route {
    fn order(self) -> StateOrder {
        match self.clears {
            true => StateOrder::Clear,
            false => StateOrder::Unchanged,
        }
    }
}

/// Where a fork of the live conversation begins.
struct Source {
    session: String,
    at: String,
    /// Messages that it holds there.
    len: usize,
}

/// What a process of its own is to do.
struct Errand<'a> {
    takes_up: Option<&'a Source>,
    how: Plan,
    order: StateOrder,
}

/// Whether a fork failed by its process, so that the live one may do better. Not a refusal of the service, of the gate or
/// of a budget, no sign-out and no deadline: all of these hold for the live process as well.
fn is_of_the_process(error: &Error) -> bool {
    use ErrorCode as Code;
    let starts = matches!(
        error.code(),
        Code::ExecutableMissing
            | Code::ExecutableUnusable
            | Code::VersionInvalid
            | Code::VersionTooOld
            | Code::AuthUnknown
            | Code::LaunchFailed
            | Code::RecordingFailed
    );
    starts || (error.code() != Code::Auth && !leaves_it_usable(error))
}

impl Inner {
    /// One try: seat, route, and the way that it says.
    pub(super) async fn summarise(
        &self,
        call: &mut Call<'_>,
        given: Option<&Given>,
    ) -> Result<Step, Failed> {
        let prepared = call.prepared;
        let seat = within_start(call, self.table.seat(&prepared.key));
        let seat = unless_cancelled(call, seat).await;
        let mut held = seat.ok_or(Failed::Cancelled)??;
        if let Some(dead) = held.take_if(|session| !session.is_alive()) {
            self.table.show(&prepared.key, None);
            self.table.discard(dead);
        }
        self.decide(call, held.as_ref()).await?;
        // A summary keeps no state, so this goes on with the live process or tells everything anew.
        let plan = self.plan(call, &held, None, false);
        let (live, source) = match &*held {
            None => (Live::None, Err("no process is live".to_owned())),
            Some(session) => (
                match plan.base {
                    Base::Live { .. } => Live::Takes,
                    _ => Live::Rejects,
                },
                source(call, session, given),
            ),
        };
        let of_sub_agent = prepared.request.parent.is_some();
        let route = route(of_sub_agent, live, source.is_ok());
        tracing::debug!(key = prepared.key.as_str(), ?route, "a summary is routed");
        match (route.way, source) {
            (Way::Fork, Ok(source)) => {
                // The live process goes on beside it.
                drop(held);
                self.table.rests();
                self.fork(call, &source, route).await
            }
            (Way::InPlace, source) => {
                let why = source.err().filter(|_| !of_sub_agent);
                self.in_place(call, held, plan, (route, why)).await
            }
            (_, _) => {
                if let Some(old) = held.take() {
                    call.retire();
                    self.table.show(&prepared.key, None);
                    self.table.end(old);
                }
                let errand = Errand {
                    takes_up: None,
                    how: Plan {
                        kind: PlanKind::Reseeded,
                        reason: format!("the summary is written anew: {}", plan.reason),
                    },
                    order: route.order(),
                };
                // The seat stays taken: a state that a call stored meanwhile would be cleared by this one's end.
                self.apart(call, errand).await
            }
        }
    }

    async fn fork(
        &self,
        call: &mut Call<'_>,
        source: &Source,
        route: Route,
    ) -> Result<Step, Failed> {
        let key = call.prepared.key.of_summary();
        // Several of one conversation are written one after the other.
        let seat = within_start(call, self.table.seat(&key));
        let seat = unless_cancelled(call, seat).await;
        let _seat = seat.ok_or(Failed::Cancelled)??;
        let errand = Errand {
            takes_up: Some(source),
            how: Plan {
                kind: PlanKind::Forked,
                reason: "the summary is written in a fork; the live conversation is untouched"
                    .to_owned(),
            },
            order: route.order(),
        };
        self.apart(call, errand).await
    }

    /// Writes the summary with a process of its own, which ends with it.
    async fn apart(&self, call: &mut Call<'_>, errand: Errand<'_>) -> Result<Step, Failed> {
        let forks = errand.takes_up.is_some();
        let starts = unless_cancelled(call, self.process_apart(call, errand.takes_up));
        let mut session = match starts.await.ok_or(Failed::Cancelled)? {
            Ok(session) => session,
            Err(error) => return fork_failed(call, forks, error, 0),
        };
        let ticket = match self.gate(call, &mut session).await {
            Ok(ticket) => ticket,
            Err(error) => {
                self.table.discard(session);
                return fork_failed(call, forks, error, 0);
            }
        };
        // Credits may have come into use while this one started.
        if let Some(error) = self.stopped.get() {
            self.table.discard(session);
            return Err(error.clone().into());
        }
        let from = errand.takes_up.map_or(0, |source| source.len);
        let told = self.deliver(call, &mut session, Deliver::Messages { from }, &ticket);
        let Some(told) = unless_cancelled(call, told).await else {
            self.table.discard(session);
            return Err(Failed::Cancelled);
        };
        if let Err(error) = told {
            let plugins = session.slipped_through();
            self.table.discard(session);
            return match plugins {
                Some(plugins) => Err(Failed::Plugins(plugins)),
                None => fork_failed(call, forks, error, 0),
            };
        }
        let outcome = Exchange::new(
            &mut session,
            call.events,
            &ticket,
            (call.prepared.limits, call.started),
            || call.prepared.tool_names(),
            errand.how,
        )
        .refusing_calls()
        .run()
        .await;
        let has_begun = outcome.has_begun;
        // Without a word of the CLI it had not taken the message.
        let requests = outcome.requests * u32::from(!outcome.is_silent);
        match self.conclude(call, session, outcome, errand.order).await {
            Err(Failed::Error(error)) => fork_failed(call, forks && !has_begun, error, requests),
            other => other,
        }
    }

    /// A process for one summary, set up.
    async fn process_apart(&self, call: &Call<'_>, takes_up: Option<&Source>) -> Result<Session> {
        let prepared = call.prepared;
        let key = prepared.key.of_summary();
        let shape = prepared.shape(&call.ways).for_summary();
        let stored = takes_up.map(|source| Stored {
            session: &source.session,
            at: &source.at,
            model: &prepared.fit.model,
            lock: None,
        });
        let tools = &prepared.catalogue;
        let start = self.table.start(&shape, &key, tools, stored);
        let mut session = within_start(call, start).await??;
        session.set(&prepared.fit, &prepared.catalogue)?;
        session.settings = Some(call.settings.clone());
        within_start(call, session.check_tools(&prepared.catalogue)).await??;
        Ok(session)
    }

    /// Writes the summary into the live conversation, whose process ends with it.
    async fn in_place(
        &self,
        call: &mut Call<'_>,
        mut held: Held,
        plan: sync::Plan,
        (route, why): (Route, Option<String>),
    ) -> Result<Step, Failed> {
        let Some(mut session) = self.process(call, &mut held, &plan, None, None).await? else {
            return Ok(Step::Again {
                forget_state: false,
            });
        };
        let ticket = match self.gate(call, &mut session).await {
            Ok(ticket) => ticket,
            Err(error) => {
                // Nothing was written, so the conversation is as it was, unless the process itself failed.
                match leaves_it_usable(&error) {
                    true => *held = Some(session),
                    false => self.discard(call, session),
                }
                return Err(error.into());
            }
        };
        if call.cancelled.is_cancelled() {
            *held = Some(session);
            return Err(Failed::Cancelled);
        }
        if let Some(error) = self.stopped.get() {
            self.discard(call, session);
            return Err(error.clone().into());
        }
        // Before the first write: nobody goes on with this conversation, however this ends.
        session.record.taint();
        call.retire();
        let key = &call.prepared.key;
        let mut how = plan.told();
        how.reason = match why {
            Some(why) => format!("the summary is written in place, since {why}"),
            None => "the summary is written in place".to_owned(),
        };
        let shown = session.shown(key.as_str()).plan(&how).running();
        self.table.show(key, Some(shown));
        let ended = self.write(call, session, &ticket, (plan, how, route)).await;
        self.table.show(key, None);
        ended
    }

    /// The summary itself, in a conversation that is of no use after it.
    async fn write(
        &self,
        call: &mut Call<'_>,
        mut session: Session,
        ticket: &Ticket,
        (plan, how, route): (sync::Plan, Plan, Route),
    ) -> Result<Step, Failed> {
        let again = || {
            Ok(Step::Again {
                forget_state: false,
            })
        };
        let told = self.deliver(call, &mut session, plan.deliver, ticket);
        let Some(told) = unless_cancelled(call, told).await else {
            self.table.discard(session);
            return Err(Failed::Cancelled);
        };
        if let Err(error) = told {
            let gone = error.code() == ErrorCode::ProcessExit;
            self.table.discard(session);
            // It had died while nobody needed it.
            return if gone { again() } else { Err(error.into()) };
        }
        let outcome = Exchange::new(
            &mut session,
            call.events,
            ticket,
            (call.prepared.limits, call.started),
            || call.prepared.tool_names(),
            how,
        )
        .refusing_calls()
        .run()
        .await;
        let silent = outcome.is_silent;
        match self.conclude(call, session, outcome, route.order()).await {
            Err(Failed::Error(error)) if silent && error.code() == ErrorCode::ProcessExit => {
                again()
            }
            other => other,
        }
    }

    /// Ends the process and tells the host its end.
    async fn conclude(
        &self,
        call: &mut Call<'_>,
        session: Session,
        outcome: Outcome,
        order: StateOrder,
    ) -> Result<Step, Failed> {
        let kill = match &outcome.ended {
            Ended::Whole(whole) => whole.after == After::Kill,
            _ => false,
        };
        if kill || outcome.kill {
            // A process that cannot be killed is reported by its owner.
            let _ = session.end(EndPolicy::KILL).await;
        } else if matches!(&outcome.ended, Ended::Whole(whole) if whole.after == After::Over) {
            self.table.end(session);
        } else {
            self.table.discard(session);
        }
        if let Some(error) = outcome.closes_pool {
            self.stop(&error);
            return Err(error.into());
        }
        match outcome.ended {
            Ended::Relaunch(plugins) => Err(Failed::Plugins(plugins)),
            Ended::Failed(error) => Err(error.into()),
            Ended::Lost => {
                let what = "the CLI began another conversation than the one that it was to resume";
                Err(Error::new(ErrorCode::ProcessExit, what).into())
            }
            Ended::Cancelled => Ok(Step::Done),
            Ended::Whole(whole) => {
                let requests = call.requests_before + outcome.requests;
                self.tell_end(call, whole.finished, order, requests).await
            }
        }
    }
}

impl Call<'_> {
    /// The live process of the request's conversation goes, and with it what the host's stored state is worth. A
    /// sub-agent stores none.
    fn retire(&self) {
        if self.prepared.request.parent.is_some() {
            return;
        }
        self.retired.signal();
        if let Some(signal) = &self.prepared.request.retirement {
            signal.signal();
        }
    }
}

/// Where the summary's history leaves the live conversation, if that is the stored one as it stands.
fn source(call: &Call<'_>, live: &Session, given: Option<&Given>) -> Result<Source, String> {
    if !call.ways.forks {
        let check = crate::certify::Check::ForkAt;
        return Err(format!("this CLI does not pass the check {check}"));
    }
    if let Some(code) = call.fork_failed {
        return Err(format!("a fork failed ({code})"));
    }
    let stored = match given {
        None => return Err("there is no stored state".to_owned()),
        Some(Err(unusable)) => return Err(unusable.0.clone()),
        Some(Ok(stored)) => stored,
    };
    let session = Uuid::try_parse(live.cli_session());
    let on_disk = session.ok().filter(|_| live.shape.persists);
    let fingerprint = call.settings.fingerprint();
    let is_same = |session| stored.is_checkpoint_of(&live.record, session, fingerprint);
    let Some(session) = on_disk.filter(|session| is_same(*session)) else {
        return Err("the stored state is not the live conversation as it stands".to_owned());
    };
    let messages = &call.prepared.history.messages;
    let shared = live.record.shared_prefix(messages);
    // Something has to be left to ask.
    let most = shared.min(messages.len().saturating_sub(1));
    let point = live.record.point_within(most);
    let point = point.ok_or("the live conversation has no point at which the summary's begins")?;
    Ok(Source {
        session: session.hyphenated().to_string(),
        at: point.at.hyphenated().to_string(),
        len: point.len,
    })
}

/// The end of a try with a process of its own: a fork that failed by its process is no end.
fn fork_failed(
    call: &mut Call<'_>,
    forks: bool,
    error: Error,
    requests: u32,
) -> Result<Step, Failed> {
    if !forks || !is_of_the_process(&error) {
        return Err(error.into());
    }
    tracing::debug!(code = %error.code(), "a summary's fork failed");
    call.fork_failed = Some(error.code());
    call.requests_before += requests;
    Ok(Step::Again {
        forget_state: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_routes_are_those_of_the_pool_document() {
        use Live::{None, Rejects, Takes};
        use Way::{Anew, Fork, InPlace};
        // Sub-agent, live process, fork possible: way, live process retired, state cleared.
        let rows = [
            (true, Takes, false, InPlace, true, false),
            (true, Takes, true, InPlace, true, false),
            (true, Rejects, false, Anew, true, false),
            (true, Rejects, true, Anew, true, false),
            (true, None, false, Anew, false, false),
            (true, None, true, Anew, false, false),
            (false, Takes, true, Fork, false, false),
            (false, Rejects, true, Fork, false, false),
            (false, Takes, false, InPlace, true, true),
            (false, Rejects, false, Anew, true, true),
            (false, None, false, Anew, false, true),
            (false, None, true, Anew, false, true),
        ];
        for (of_sub_agent, live, can_fork, way, retires, clears) in rows {
            let wanted = Route {
                way,
                retires,
                clears,
            };
            assert_eq!(
                route(of_sub_agent, live, can_fork),
                wanted,
                "{of_sub_agent} {live:?} {can_fork}"
            );
        }
    }

    #[test]
    fn only_a_fault_of_its_process_makes_a_fork_fall_back() {
        use ErrorCode as Code;
        let falls_back = [
            Code::LaunchFailed,
            Code::ProcessExit,
            Code::ControlTimeout,
            Code::McpStartup,
            Code::ProtocolInit,
            Code::VersionIncompatible,
            Code::IsolationMcp,
            Code::ExecutableMissing,
        ];
        let stays = [
            Code::Auth,
            Code::Billing,
            Code::Budget,
            Code::UsageLimit,
            Code::UsageUnconfirmed,
            Code::RateLimit,
            Code::Overloaded,
            Code::UpstreamError,
            Code::ContextLengthExceeded,
            Code::StreamInterrupted,
            Code::SummaryToolCall,
            Code::StartTimeout,
            Code::Closed,
            Code::InheritedCredentials,
        ];
        for (codes, wanted) in [(&falls_back[..], true), (&stays[..], false)] {
            for code in codes {
                assert_eq!(is_of_the_process(&Error::new(*code, "")), wanted, "{code}");
            }
        }
    }
}
