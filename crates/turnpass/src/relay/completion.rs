//! When a generation is over: what the service and the CLI have shown in, one decision out. Pure.
//!
//! The answer counts as good only if the service's stream ended well *and* the CLI agrees. A finished tool call may end
//! the one-turn CLI with `error_max_turns`; that alone proves nothing (a cut stream after a call ends the same way), so
//! the stream is judged first, by itself.

use std::time::Duration;

use crate::error::{Error, ErrorCode};
use crate::event::StopReason;
use crate::limits::rate::is_limit_sentence;
use crate::process::Exit;
use crate::wire::stream_json::{Failure, FailureKind, Verdict};

/// From the end of the answer to the end of everything that the CLI still has to say (relay document: one fixed
/// grace). The CLI needs 4 to 60 ms (2.1.294 to 2.1.332).
pub(crate) const FINALISATION_GRACE: Duration = Duration::from_secs(10);

/// How the relay is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProcessMode {
    /// Kept processes; the CLI gets a short synthetic answer while the host reads the real one.
    #[default]
    Warm,
    /// A process for each request, which is passed the real answer (relay document).
    PerRequest,
}

impl ProcessMode {
    /// The word in settings and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::PerRequest => "per_request",
        }
    }
}

/// What the service's stream has shown.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// Not over.
    Open,
    /// Ended well.
    Whole {
        /// Why the model stopped.
        stop: StopReason,
        /// Whether tools are to be run.
        calls: bool,
        /// Whether there is anything visible: text or a call.
        visible: bool,
    },
    /// Failed.
    Failed(Error),
}

/// Everything that decides.
#[derive(Clone, Debug)]
pub(crate) struct Evidence {
    pub(crate) mode: ProcessMode,
    pub(crate) answer: Answer,
    /// The CLI's request came and went on its way.
    pub(crate) asked: bool,
    /// The CLI printed a block of the answer.
    pub(crate) assistant: bool,
    /// The CLI saw the end of the message.
    pub(crate) message_stop: bool,
    /// The CLI's own judgement of its turn.
    pub(crate) result: Option<Verdict>,
    /// The process is gone; `None` inside when only its output ended.
    pub(crate) exit: Option<Exit>,
    /// Its output ended.
    pub(crate) output_ended: bool,
    /// Further requests of the CLI that were refused.
    pub(crate) refused: u32,
}

/// What to do.
#[derive(Clone, Debug)]
pub(crate) enum Decision {
    /// Something is still to come.
    Wait,
    /// Give out the rest of the answer.
    Release,
    /// Give out nothing more.
    Fail(Error),
}

impl Evidence {
    /// Nothing has happened yet.
    pub(crate) fn new(mode: ProcessMode) -> Self {
        Self {
            mode,
            answer: Answer::Open,
            asked: false,
            assistant: false,
            message_stop: false,
            result: None,
            exit: None,
            output_ended: false,
            refused: 0,
        }
    }

    /// Whether the CLI has ended its turn, or will never do so.
    pub(crate) fn native_is_over(&self) -> bool {
        self.result.is_some() || self.is_gone()
    }

    fn is_gone(&self) -> bool {
        self.exit.is_some() && self.output_ended
    }

    /// Decides.
    pub(crate) fn decide(&self) -> Decision {
        match &self.answer {
            Answer::Failed(error) => Decision::Fail(error.clone()),
            Answer::Open => self.while_open(),
            Answer::Whole {
                stop,
                calls,
                visible,
            } => match self.mode {
                ProcessMode::Warm => self.warm(),
                ProcessMode::PerRequest => self.per_request(stop, *calls, *visible),
            },
        }
    }

    /// The CLI's end before the service's: whatever it is, the rest of the answer cannot be trusted to it.
    fn while_open(&self) -> Decision {
        match (&self.result, self.mode) {
            // A process that ended is gone with the person's sign-in; nothing goes on without it.
            _ if self.is_gone() => Decision::Fail(self.gone("before the answer was complete")),
            (Some(Verdict::Failed(failure)), _) => Decision::Fail(native_failure(failure)),
            (Some(Verdict::Aborted), _) => Decision::Fail(Error::new(
                ErrorCode::ProcessExit,
                "the CLI broke its turn off",
            )),
            // A CLI that thinks that it is done asks nothing more.
            (Some(Verdict::Completed), ProcessMode::Warm) if !self.asked => {
                Decision::Fail(contradiction("it ended its turn without a request"))
            }
            _ => Decision::Wait,
        }
    }

    fn warm(&self) -> Decision {
        match &self.result {
            Some(Verdict::Completed) => Decision::Release,
            Some(Verdict::Failed(failure)) => Decision::Fail(native_failure(failure)),
            Some(_) => Decision::Fail(contradiction("it did not take the answer as one")),
            None if self.is_gone() => Decision::Fail(self.gone("before it confirmed the answer")),
            None => Decision::Wait,
        }
    }

    fn per_request(&self, stop: &StopReason, calls: bool, visible: bool) -> Decision {
        let Some(result) = &self.result else {
            return match self.is_gone() {
                true => Decision::Fail(self.gone("without its result")),
                false => Decision::Wait,
            };
        };
        // An answer without visible output, a cut one and a refusal make the CLI ask again; that request was refused,
        // and the CLI calls its turn failed for it. The answer that came is whole all the same (bug 94).
        let provoked = self.refused > 0 || matches!(stop, StopReason::Refusal { .. }) || !visible;
        let (agreed, code) = match result {
            Verdict::Completed => (true, 0),
            Verdict::MaxTurns => (calls, 1),
            Verdict::Failed(_) => (provoked && !calls, 1),
            _ => (false, 1),
        };
        if !agreed {
            return Decision::Fail(match result {
                _ if self.refused > 0 => extra_generation(self.refused),
                Verdict::Failed(failure) => native_failure(failure),
                _ => contradiction("it did not end its turn as the answer did"),
            });
        }
        if matches!(result, Verdict::Completed | Verdict::MaxTurns)
            && !(self.assistant && self.message_stop)
        {
            return Decision::Fail(contradiction("its records do not show the answer"));
        }
        if !calls {
            // Text needs no proof of a clean exit, and the host need not wait for it (bug 18).
            return Decision::Release;
        }
        match self.exit {
            Some(exit) if exit == Exit::Code(code) || exit.is_success() => Decision::Release,
            Some(exit) => {
                let what = format!("the CLI ended with {exit} after the answer");
                Decision::Fail(Error::new(ErrorCode::ProcessExit, what))
            }
            None => Decision::Wait,
        }
    }

    /// The grace after the answer is over and the CLI is still not done.
    pub(crate) fn overdue(&self) -> Error {
        let seconds = FINALISATION_GRACE.as_secs();
        Error::new(
            ErrorCode::ProcessCleanup,
            format!("the CLI did not end its turn within {seconds} s of the answer"),
        )
    }

    fn gone(&self, when: &str) -> Error {
        let how = self.exit.map_or_else(
            || "closed its output".to_owned(),
            |exit| format!("ended with {exit}"),
        );
        Error::new(ErrorCode::ProcessExit, format!("the CLI {how} {when}"))
    }
}

fn contradiction(what: &str) -> Error {
    Error::new(
        ErrorCode::ProtocolResult,
        format!("the CLI's final record contradicts the answer: {what}"),
    )
}

fn extra_generation(count: u32) -> Error {
    let what = format!("the CLI asked for {count} more within one request; nothing of it was sent");
    Error::new(ErrorCode::ExtraGeneration, what)
}

/// What the CLI's own failure means when the service's answer does not tell. The CLI's sentence is not repeated: it can
/// quote the answer's body.
pub(crate) fn native_failure(failure: &Failure) -> Error {
    let code = match failure.kind {
        FailureKind::PromptTooLong => ErrorCode::ContextLengthExceeded,
        FailureKind::UsageLimit => ErrorCode::UsageLimit,
        FailureKind::Billing => ErrorCode::Billing,
        FailureKind::Authentication => ErrorCode::Auth,
        FailureKind::ModelNotFound => ErrorCode::ModelNotFound,
        // Versions before the word `usage_limit_reached` tell the plan's limit in their sentence alone.
        FailureKind::RateLimited if is_limit_sentence(&failure.text) => ErrorCode::UsageLimit,
        FailureKind::RateLimited => ErrorCode::RateLimit,
        FailureKind::Overloaded => ErrorCode::Overloaded,
        FailureKind::Connection => ErrorCode::StreamInterrupted,
        FailureKind::Server => ErrorCode::UpstreamError,
        _ => ErrorCode::ProtocolResult,
    };
    let kind = format!("{:?}", failure.kind);
    let error = Error::new(code, format!("the CLI says that its turn failed ({kind})"));
    match failure.status {
        Some(status) => error.with_status(status),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(kind: FailureKind) -> Verdict {
        Verdict::Failed(Failure {
            kind,
            status: None,
            word: None,
            text: "MARKER".into(),
        })
    }

    fn whole(stop: StopReason, calls: bool) -> Answer {
        let visible = calls || !matches!(stop, StopReason::MaxTokens);
        Answer::Whole {
            stop,
            calls,
            visible,
        }
    }

    fn per_request(
        answer: Answer,
        result: Option<Verdict>,
        exit: Option<i32>,
        refused: u32,
    ) -> Evidence {
        Evidence {
            answer,
            assistant: true,
            message_stop: true,
            result,
            exit: exit.map(Exit::Code),
            output_ended: exit.is_some(),
            refused,
            ..Evidence::new(ProcessMode::PerRequest)
        }
    }

    fn code(evidence: &Evidence) -> Option<ErrorCode> {
        match evidence.decide() {
            Decision::Fail(error) => Some(error.code()),
            _ => None,
        }
    }

    fn releases(evidence: &Evidence) -> bool {
        matches!(evidence.decide(), Decision::Release)
    }

    fn waits(evidence: &Evidence) -> bool {
        matches!(evidence.decide(), Decision::Wait)
    }

    #[test]
    fn a_text_is_released_with_the_result_and_calls_with_the_exit() {
        let text = whole(StopReason::EndTurn, false);
        assert!(waits(&per_request(text.clone(), None, None, 0)));
        assert!(releases(&per_request(
            text,
            Some(Verdict::Completed),
            None,
            0
        )));
        let call = whole(StopReason::ToolUse, true);
        assert!(waits(&per_request(
            call.clone(),
            Some(Verdict::MaxTurns),
            None,
            0
        )));
        assert!(releases(&per_request(
            call.clone(),
            Some(Verdict::MaxTurns),
            Some(1),
            0
        )));
        assert!(releases(&per_request(
            call.clone(),
            Some(Verdict::Completed),
            Some(0),
            0
        )));
        assert_eq!(
            code(&per_request(call, Some(Verdict::MaxTurns), Some(143), 0)),
            Some(ErrorCode::ProcessExit)
        );
    }

    #[test]
    fn error_max_turns_is_no_proof_without_a_whole_answer() {
        let cut = Answer::Failed(Error::new(ErrorCode::StreamInterrupted, ""));
        assert_eq!(
            code(&per_request(cut, Some(Verdict::MaxTurns), Some(1), 0)),
            Some(ErrorCode::StreamInterrupted)
        );
        let text = whole(StopReason::EndTurn, false);
        assert_eq!(
            code(&per_request(text, Some(Verdict::MaxTurns), Some(1), 0)),
            Some(ErrorCode::ProtocolResult)
        );
        let mut hidden = per_request(
            whole(StopReason::ToolUse, true),
            Some(Verdict::MaxTurns),
            Some(1),
            0,
        );
        hidden.message_stop = false;
        assert_eq!(code(&hidden), Some(ErrorCode::ProtocolResult));
    }

    #[test]
    fn bug_094_a_refused_follow_up_does_not_spoil_a_whole_answer_but_releases_no_tool() {
        for stop in [
            StopReason::MaxTokens,
            StopReason::ContextWindowExceeded,
            StopReason::EndTurn,
        ] {
            let evidence = per_request(
                whole(stop, false),
                Some(failed(FailureKind::Other)),
                Some(1),
                1,
            );
            assert!(releases(&evidence), "{evidence:?}");
        }
        let refusal = StopReason::Refusal {
            category: None,
            explanation: None,
        };
        assert!(releases(&per_request(
            whole(refusal, false),
            Some(failed(FailureKind::Refusal)),
            Some(1),
            0
        )));
        let call = whole(StopReason::ToolUse, true);
        assert_eq!(
            code(&per_request(
                call,
                Some(failed(FailureKind::Other)),
                Some(1),
                2
            )),
            Some(ErrorCode::ExtraGeneration)
        );
    }

    #[test]
    fn an_end_before_the_answer_s_is_a_failure() {
        assert_eq!(
            code(&per_request(Answer::Open, None, Some(137), 0)),
            Some(ErrorCode::ProcessExit)
        );
        assert_eq!(
            code(&per_request(
                Answer::Open,
                Some(failed(FailureKind::Authentication)),
                None,
                0
            )),
            Some(ErrorCode::Auth)
        );
        let mut warm = Evidence::new(ProcessMode::Warm);
        assert!(waits(&warm));
        warm.result = Some(Verdict::Completed);
        let no_request = Some(ErrorCode::ProtocolResult);
        assert_eq!(code(&warm), no_request, "nothing was asked in this turn");
        warm.asked = true;
        assert!(
            waits(&warm),
            "the synthetic answer is over long before the real one"
        );
        warm.exit = Some(Exit::Signal(9));
        warm.output_ended = true;
        assert_eq!(code(&warm), Some(ErrorCode::ProcessExit));
    }

    #[test]
    fn a_warm_answer_is_released_when_both_sides_are_whole() {
        for calls in [false, true] {
            let mut warm = Evidence::new(ProcessMode::Warm);
            warm.answer = whole(StopReason::ToolUse, calls);
            assert!(waits(&warm));
            warm.result = Some(Verdict::Completed);
            assert!(releases(&warm));
            warm.result = Some(failed(FailureKind::Other));
            assert_eq!(code(&warm), Some(ErrorCode::ProtocolResult));
        }
    }

    #[test]
    fn the_cli_s_sentence_is_not_repeated() {
        let evidence = per_request(Answer::Open, Some(failed(FailureKind::Server)), None, 0);
        let Decision::Fail(error) = evidence.decide() else {
            panic!()
        };
        assert!(!format!("{error}{error:?}").contains("MARKER"));
    }
}
