//! What became of an event of the pairing.

use crate::conversation::{ToolResult, ToolUseId};

/// An answer to a call: the caller has to bring it there.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer<A> {
    /// Where it goes.
    pub to: A,
    /// The host's result, or a failed one that says why there is none.
    pub result: ToolResult,
}

/// How a tool use ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With the host's result.
    Answered,
    /// The CLI answered it itself.
    ByCli,
    /// The CLI gave its call up.
    Cancelled,
    /// The turn ended before it.
    TurnOver,
}

impl Ended {
    /// What the model is told, should the CLI call such a tool use once more.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Answered => "this tool call has been answered already",
            Self::ByCli => "this tool call has been answered by the CLI itself",
            Self::Cancelled => "this tool call was cancelled",
            Self::TurnOver => "the turn of this tool call is over",
        }
    }
}

/// Why a call was answered at once with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It names no tool use, or one of no usable length.
    NoId,
    /// Another call of this tool use waits for the same answer.
    Duplicate,
    /// The tool use has ended.
    Retired(Ended),
    /// No turn runs.
    NoTurn,
    /// [`IN_FLIGHT_LIMIT`](super::IN_FLIGHT_LIMIT) are in flight.
    TooMany,
}

impl Refusal {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoId => "the call does not say which tool use it belongs to",
            Self::Duplicate => "this tool call is under way already",
            Self::Retired(ended) => ended.words(),
            Self::NoTurn => "no turn is under way",
            Self::TooMany => "too many tool calls are under way",
        }
    }
}

/// What became of a tool use in the model's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// Its call is still to come.
    New,
    /// Its call is here and waits.
    CallWaits,
    /// It was announced before; nothing changed.
    Again,
    /// It ended before it was announced: the CLI was faster with its own answer, or gave up.
    Ended(Ended),
    /// It cannot be taken, for the reason given: the turn cannot go on.
    Refused(Refusal),
}

/// What became of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrived<A> {
    /// It waits for the host's result.
    Waits,
    /// It came before the model's message was complete, and waits for that.
    Parked,
    /// The host's result was here already.
    Answered(Answer<A>),
    /// It gets an error.
    Refused(Refusal, Answer<A>),
}

/// What became of a result of the host.
#[derive(Clone, Debug, PartialEq)]
pub enum Given<A> {
    /// It answers a call that waits.
    Answered(Answer<A>),
    /// It is kept for the call, which is still to come.
    Kept,
    /// There is a result of this tool use already. The first one stands.
    Duplicate,
    /// The CLI answered this tool use itself, and its words stand. Not a fault of the host.
    ByCli,
    /// Late: the CLI had given up the call.
    Late,
    /// Stale: the turn had ended.
    Stale,
    /// Extra: no such tool use is known.
    Extra,
}

/// What became of a result in a `user` record of the CLI.
#[derive(Clone, Debug, PartialEq)]
pub enum CliAnswered<A> {
    /// It is the record of an answer that was given here, or of an end that is known.
    Known(Ended),
    /// The CLI answered the tool use itself: it did not call, and it will not.
    Itself {
        /// The host had brought a result, which goes nowhere.
        unused: bool,
    },
    /// The CLI answered the tool use although its call waits here; the call gets an error, which nobody reads.
    Instead(Answer<A>),
    /// A tool use that was not announced. It is retired.
    Unannounced,
}

/// What the end of a turn leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Closed<A> {
    /// Errors for the calls that waited or were parked.
    pub answers: Vec<Answer<A>>,
    /// Announced tool uses without a result.
    pub missing: Vec<ToolUseId>,
    /// Tool uses whose result was here and whose call never came.
    pub unused: Vec<ToolUseId>,
}

impl<A> Closed<A> {
    /// Whether nothing was open.
    pub fn is_clean(&self) -> bool {
        self.answers.is_empty() && self.missing.is_empty() && self.unused.is_empty()
    }
}

/// How a list of results compares with the tool uses that await one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Awaited, and not in the list.
    pub missing: Vec<ToolUseId>,
    /// In the list, and unknown here.
    pub extra: Vec<ToolUseId>,
    /// In the list twice, or with a result already.
    pub duplicate: Vec<ToolUseId>,
    /// In the list, and given up by the CLI.
    pub late: Vec<ToolUseId>,
    /// In the list, and of a turn that ended.
    pub stale: Vec<ToolUseId>,
}

impl Comparison {
    /// Whether the list holds a result of every awaited tool use, and besides only those of tool uses that the CLI
    /// answered itself.
    pub fn is_exact(&self) -> bool {
        *self == Self::default()
    }
}
