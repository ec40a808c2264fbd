//! Which call of the CLI gets which result of the host. Pure; the carriers bring calls and take answers.
//!
//! A tool use of the model shows itself in up to four places: in the model's message, as a `tools/call` of the CLI, as a
//! result of the host, and as a result that the CLI made up itself. [`Pairing`] joins them by the id of the tool use and
//! by nothing else; name, arguments and order are never looked at (bug 67).
//!
//! | comes | of an id that is | then |
//! | --- | --- | --- |
//! | the model's message | new | announced: the host is to bring a result |
//! | | parked | announced, its call is here already |
//! | `tools/call` | new | parked; it can be up to 2.4 ms ahead of the message (2.1.332) |
//! | | announced | waits for the result |
//! | | announced, with a result | answered |
//! | | in flight with a call, or retired, or missing | answered at once with an error |
//! | a result of the host | announced or parked, with a call | answered |
//! | | announced, without a call | kept for the call |
//! | | anything else | told apart by [`Given`]; nothing is answered twice |
//! | the CLI gives up a call | in flight | answered with an error, which ends the exchange; nobody reads it |
//! | a result by the CLI | in flight | retired; the CLI's words stand in its conversation |
//! | the end of the turn | in flight | retired; its call is answered with an error |
//!
//! Every call is answered exactly once, by the value that the method for its event returns.

mod outcome;

use std::collections::{HashMap, VecDeque};

pub use outcome::{
    Announced, Answer, Arrived, CliAnswered, Closed, Comparison, Ended, Given, Refusal,
};

use crate::conversation::{ToolResult, ToolUseId};

/// Most tool uses in flight. A message of the model holds a few dozen at most (14 in parallel were seen); beyond this a
/// call is refused, so that a CLI that went wild cannot fill memory.
pub const IN_FLIGHT_LIMIT: usize = 512;

/// Ended tool uses that are remembered, so that what comes late is told from what is new (pool document). Twice
/// [`IN_FLIGHT_LIMIT`], so that the end of one turn never pushes out the turn before it whole.
pub const RETIRED_LIMIT: usize = 1024;

/// Longest id that is kept; those of the service have about 30 bytes.
pub const ID_BYTES: usize = 512;

/// A tool use in flight.
#[derive(Debug)]
struct Flight<A> {
    id: ToolUseId,
    announced: bool,
    call: Option<A>,
    /// Only ever held while there is no call.
    result: Option<ToolResult>,
}

/// The pairing of one CLI process.
///
/// `A` says where the answer to a call goes: the carrier's return address together with the id of the call's message.
#[derive(Debug)]
pub struct Pairing<A> {
    turn: bool,
    /// In order of first sight. Linear search serves: it is short but for a CLI that went wild, and bounded then.
    flights: Vec<Flight<A>>,
    retired: Retired,
}

impl<A> Default for Pairing<A> {
    fn default() -> Self {
        Self {
            turn: false,
            flights: Vec::new(),
            retired: Retired::default(),
        }
    }
}

impl<A> Pairing<A> {
    /// A turn begins: from now on calls are taken. Has to stand before the line that starts it is written, since the
    /// first call may follow at once.
    ///
    /// Returns what an earlier turn left, if it was not closed.
    pub fn begin(&mut self) -> Closed<A> {
        let left = self.close();
        self.turn = true;
        left
    }

    /// The turn is over, well or not: whatever is open gets an error, and calls are refused from now on.
    pub fn close(&mut self) -> Closed<A> {
        self.turn = false;
        let mut closed = Closed {
            answers: Vec::new(),
            missing: Vec::new(),
            unused: Vec::new(),
        };
        for flight in std::mem::take(&mut self.flights) {
            if let Some(to) = flight.call {
                closed
                    .answers
                    .push(failed(to, &flight.id, Ended::TurnOver.words()));
            }
            if flight.result.is_some() {
                closed.unused.push(flight.id.clone());
            } else if flight.announced {
                closed.missing.push(flight.id.clone());
            }
            self.retired.insert(flight.id, Ended::TurnOver);
        }
        closed
    }

    /// The model's message with this tool use is complete.
    pub fn announce(&mut self, id: &ToolUseId) -> Announced {
        if let Some(flight) = self.flight(id) {
            return match (flight.announced, &flight.call) {
                (true, _) => Announced::Again,
                (false, call) => {
                    let outcome = match call {
                        Some(_) => Announced::CallWaits,
                        None => Announced::New,
                    };
                    flight.announced = true;
                    outcome
                }
            };
        }
        if let Some(ended) = self.retired.get(id) {
            return Announced::Ended(ended);
        }
        if let Some(refusal) = self.refusal(id) {
            return Announced::Refused(refusal);
        }
        self.flights.push(Flight {
            id: id.clone(),
            announced: true,
            call: None,
            result: None,
        });
        Announced::New
    }

    /// A `tools/call` came; `id` is its [`Call::tool_use_id`](super::mcp::Call::tool_use_id).
    pub fn arrived(&mut self, id: Option<ToolUseId>, to: A) -> Arrived<A> {
        let id = id.unwrap_or_else(|| ToolUseId(String::new()));
        if let Some(at) = self.position(&id) {
            let flight = &mut self.flights[at];
            if flight.call.is_some() {
                return refused(Refusal::Duplicate, to, &id);
            }
            if let Some(result) = flight.result.take() {
                self.retire(at, Ended::Answered);
                return Arrived::Answered(Answer { to, result });
            }
            flight.call = Some(to);
            return Arrived::Waits;
        }
        let refusal = match self.retired.get(&id) {
            Some(ended) => Some(Refusal::Retired(ended)),
            None => self.refusal(&id),
        };
        if let Some(refusal) = refusal {
            return refused(refusal, to, &id);
        }
        self.flights.push(Flight {
            id,
            announced: false,
            call: Some(to),
            result: None,
        });
        Arrived::Parked
    }

    /// The host brings a result.
    pub fn give(&mut self, result: ToolResult) -> Given<A> {
        let Some(at) = self.position(&result.id) else {
            return match self.retired.get(&result.id) {
                None => Given::Extra,
                Some(Ended::Answered) => Given::Duplicate,
                Some(Ended::ByCli) => Given::ByCli,
                Some(Ended::Cancelled) => Given::Late,
                Some(Ended::TurnOver) => Given::Stale,
            };
        };
        let flight = &mut self.flights[at];
        if let Some(to) = flight.call.take() {
            self.retire(at, Ended::Answered);
            return Given::Answered(Answer { to, result });
        }
        if flight.result.is_some() {
            return Given::Duplicate;
        }
        flight.result = Some(result);
        Given::Kept
    }

    /// The CLI gave up a call (`notifications/cancelled`), or the connection that its answer would go over is gone.
    /// `is` picks the address; the newest that fits is meant, since a CLI that connects anew counts its ids anew.
    ///
    /// `None` when no such call is open, as for one that has been answered meanwhile.
    pub fn cancelled(&mut self, is: impl Fn(&A) -> bool) -> Option<Answer<A>> {
        let at = self
            .flights
            .iter()
            .rposition(|flight| flight.call.as_ref().is_some_and(&is))?;
        self.end_with_error(at, Ended::Cancelled)
    }

    /// A result of this tool use stands in a `user` record of the CLI: the echo of an answer of ours, or the CLI's own
    /// answer to input that it could not parse, to an unknown tool, to one that is not allowed.
    pub fn cli_answered(&mut self, id: &ToolUseId) -> CliAnswered<A> {
        let Some(at) = self.position(id) else {
            return match self.retired.get(id) {
                Some(ended) => CliAnswered::Known(ended),
                None => {
                    if usable(id) {
                        self.retired.insert(id.clone(), Ended::ByCli);
                    }
                    CliAnswered::Unannounced
                }
            };
        };
        let unused = self.flights[at].result.is_some();
        match self.end_with_error(at, Ended::ByCli) {
            Some(answer) => CliAnswered::Instead(answer),
            None => CliAnswered::Itself { unused },
        }
    }

    /// Announced tool uses without a result, in the order of their announcement or earlier call.
    pub fn awaited(&self) -> impl Iterator<Item = &ToolUseId> {
        self.flights
            .iter()
            .filter(|flight| flight.announced && flight.result.is_none())
            .map(|flight| &flight.id)
    }

    /// Tool uses whose call is here and unanswered, parked ones among them.
    pub fn open(&self) -> impl Iterator<Item = &ToolUseId> {
        self.flights
            .iter()
            .filter(|flight| flight.call.is_some())
            .map(|flight| &flight.id)
    }

    /// Tool uses whose call is here and that no message has announced.
    pub fn parked(&self) -> impl Iterator<Item = &ToolUseId> {
        self.flights
            .iter()
            .filter(|flight| !flight.announced)
            .map(|flight| &flight.id)
    }

    /// Tool uses whose result is here and whose call is still to come.
    pub fn kept(&self) -> impl Iterator<Item = &ToolUseId> {
        self.flights
            .iter()
            .filter(|flight| flight.result.is_some())
            .map(|flight| &flight.id)
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Whether a turn runs.
    pub fn in_turn(&self) -> bool {
        self.turn
    }

    /// How a tool use ended, as far as it is remembered.
    pub fn ended(&self, id: &ToolUseId) -> Option<Ended> {
        self.retired.get(id)
    }

    /// How results for these ids would be taken, without taking them.
    pub fn compare<'a>(&self, ids: impl IntoIterator<Item = &'a ToolUseId>) -> Comparison {
        let mut comparison = Comparison::default();
        let mut seen: Vec<&ToolUseId> = Vec::new();
        for id in ids {
            if seen.contains(&id) {
                comparison.duplicate.push(id.clone());
                continue;
            }
            seen.push(id);
            let to = match self.position(id).map(|at| &self.flights[at]) {
                Some(flight) if flight.result.is_some() => &mut comparison.duplicate,
                // A parked one too: the host can know of it only by the model's message.
                Some(_) => continue,
                None => match self.retired.get(id) {
                    None => &mut comparison.extra,
                    Some(Ended::ByCli) => continue,
                    Some(Ended::Answered) => &mut comparison.duplicate,
                    Some(Ended::Cancelled) => &mut comparison.late,
                    Some(Ended::TurnOver) => &mut comparison.stale,
                },
            };
            to.push(id.clone());
        }
        comparison.missing = self
            .awaited()
            .filter(|id| !seen.contains(id))
            .cloned()
            .collect();
        comparison
    }

    /// Why a tool use that is neither in flight nor retired cannot be taken.
    fn refusal(&self, id: &ToolUseId) -> Option<Refusal> {
        if !usable(id) {
            Some(Refusal::NoId)
        } else if !self.turn {
            Some(Refusal::NoTurn)
        } else if self.flights.len() >= IN_FLIGHT_LIMIT {
            Some(Refusal::TooMany)
        } else {
            None
        }
    }

    fn position(&self, id: &ToolUseId) -> Option<usize> {
        self.flights.iter().position(|flight| flight.id == *id)
    }

    fn flight(&mut self, id: &ToolUseId) -> Option<&mut Flight<A>> {
        self.flights.iter_mut().find(|flight| flight.id == *id)
    }

    fn retire(&mut self, at: usize, ended: Ended) -> Flight<A> {
        // Not `swap_remove`: the order of announcement is told to the host.
        let mut flight = self.flights.remove(at);
        let id = std::mem::replace(&mut flight.id, ToolUseId(String::new()));
        self.retired.insert(id, ended);
        flight
    }

    fn end_with_error(&mut self, at: usize, ended: Ended) -> Option<Answer<A>> {
        let id = self.flights[at].id.clone();
        let to = self.retire(at, ended).call?;
        Some(failed(to, &id, ended.words()))
    }
}

fn usable(id: &ToolUseId) -> bool {
    (1..=ID_BYTES).contains(&id.0.len())
}

fn refused<A>(refusal: Refusal, to: A, id: &ToolUseId) -> Arrived<A> {
    Arrived::Refused(refusal, failed(to, id, refusal.words()))
}

fn failed<A>(to: A, id: &ToolUseId, words: &str) -> Answer<A> {
    Answer {
        to,
        result: ToolResult::error(id.clone(), format!("turnpass: {words}")),
    }
}

/// The last [`RETIRED_LIMIT`] ended tool uses, oldest first.
#[derive(Debug, Default)]
struct Retired {
    order: VecDeque<ToolUseId>,
    ended: HashMap<ToolUseId, Ended>,
}

impl Retired {
    /// Only for ids that are not in it.
    fn insert(&mut self, id: ToolUseId, ended: Ended) {
        if self.order.len() >= RETIRED_LIMIT
            && let Some(oldest) = self.order.pop_front()
        {
            self.ended.remove(&oldest);
        }
        self.ended.insert(id.clone(), ended);
        self.order.push_back(id);
    }

    fn get(&self, id: &ToolUseId) -> Option<Ended> {
        self.ended.get(id).copied()
    }
}

#[cfg(test)]
mod tests;
