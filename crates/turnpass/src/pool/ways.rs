//! Which ways a pool takes with a program: decided for each by what it was certified to do, before anything is started. Pure.
//!
//! A way of the pool document is taken unless it was seen to fail. A faster way of our own needs more: that it was seen to
//! hold, or that a person asked for it and nothing is known of the program.

use super::options::{Reseed, ToolCarrier};
use crate::certify::standing::extra_body_fails;
use crate::certify::{Check, Standing};
use crate::error::Result;
use crate::request::TransportKind;

/// What the messages of a history need to go as the CLI's own frames.
const FRAMES: &[Check] = &[Check::FramesOrder, Check::FramesAcknowledged];
/// What tools need to go over the CLI's own input and output.
const IN_BAND: &[Check] = &[Check::InBandManifest];
/// What it takes to end a running turn and to go on without it.
const INTERRUPTS: &[Check] = &[
    Check::InterruptCloses,
    Check::CancelQueued,
    Check::RewindAfterInterrupt,
];

/// The decision for one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ways {
    /// How a process is told what it does not have.
    pub(crate) reseed: Reseed,
    /// How the host's tools are served.
    pub(crate) tools: ToolCarrier,
    /// Whether frames carry thinking.
    pub(crate) thinking: bool,
    /// Whether frames may follow turns of the process's own.
    pub(crate) frames_live: bool,
    /// Whether descriptions of tools arrive whole, however long.
    pub(crate) long_descriptions: bool,
    /// Whether results of tools arrive whole, however long.
    pub(crate) long_results: bool,
    /// Whether a turn can be ended with results.
    pub(crate) ends_turns: bool,
    /// Whether settings of the body arrive.
    pub(crate) extra_body: bool,
    /// Whether the effort can be set on a running process.
    pub(crate) sets_effort: bool,
    /// Whether a running turn can be ended and taken back.
    pub(crate) interrupts: bool,
    /// Whether a turn that is over can be taken back.
    pub(crate) rewinds: bool,
    /// Whether a stored conversation can be resumed at its point.
    pub(crate) resumes: bool,
    /// Whether it can be forked there.
    pub(crate) forks: bool,
    /// Whether the blocking limit keeps the CLI from asking by itself.
    pub(crate) gate: bool,
    /// Whether the CLI leaves it at a refusal.
    pub(crate) refused_once: bool,
}

impl Ways {
    /// Before a program is known: no way that needs anything.
    pub(crate) const NONE: Self = Self {
        reseed: Reseed::Transcript,
        tools: ToolCarrier::Http,
        thinking: false,
        frames_live: false,
        long_descriptions: false,
        long_results: false,
        ends_turns: false,
        extra_body: false,
        sets_effort: false,
        interrupts: false,
        rewinds: false,
        resumes: false,
        forks: false,
        gate: false,
        refused_once: false,
    };

    /// Whether the settings of a request's body reach the service.
    ///
    /// # Errors
    ///
    /// `sampling_unsupported` that names the check.
    pub(crate) fn check_extra_body(&self, has_settings: bool) -> Result<()> {
        match has_settings && !self.extra_body {
            true => Err(extra_body_fails()),
            false => Ok(()),
        }
    }
}

/// Decides. `None` leaves a choice to what the program was certified to do.
///
/// # Errors
///
/// `version_incompatible` that names the check that the pool cannot do without, or that a way that was asked for needs.
pub(crate) fn ways(
    standing: &Standing,
    reseed: Option<Reseed>,
    tools: Option<ToolCarrier>,
) -> Result<Ways> {
    if let Some(error) = standing.refusal(TransportKind::Pool) {
        return Err(error);
    }
    if reseed == Some(Reseed::Native) {
        let instead = "Leave the setting out, or set it to transcript, which this version takes.";
        standing.permits("reseed = \"native\"", FRAMES, instead)?;
    }
    if tools == Some(ToolCarrier::InBand) {
        let instead = "Leave the setting out, or set it to http, which this version takes.";
        standing.permits("tool_carrier = \"in-band\"", IN_BAND, instead)?;
    }
    let unless_failed = |check| !standing.fails(check);
    Ok(Ways {
        reseed: reseed.unwrap_or(match standing.allows_all(FRAMES) {
            true => Reseed::Native,
            false => Reseed::Transcript,
        }),
        tools: tools.unwrap_or(match standing.allows_all(IN_BAND) {
            true => ToolCarrier::InBand,
            false => ToolCarrier::Http,
        }),
        thinking: unless_failed(Check::FramesThinking),
        frames_live: unless_failed(Check::FramesLive),
        long_descriptions: unless_failed(Check::DescriptionsWhole),
        long_results: unless_failed(Check::ResultWhole),
        ends_turns: standing.allows(Check::EndTurn),
        extra_body: unless_failed(Check::ExtraBodyLive),
        sets_effort: unless_failed(Check::EffortLive),
        // What the CLI answers to them is looked at, so they may be tried.
        interrupts: !standing.fails_any(INTERRUPTS),
        rewinds: unless_failed(Check::RewindAfterFailure),
        resumes: unless_failed(Check::ResumeAt),
        forks: unless_failed(Check::ForkAt),
        gate: standing.allows(Check::BlockingLimitGate),
        refused_once: standing.allows(Check::RefusalOnce),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certify::Otherwise;
    use crate::certify::standing::{UNKNOWN, failing};
    use crate::error::ErrorCode;

    fn certified() -> Ways {
        ways(&failing(&[]), None, None).unwrap()
    }

    #[test]
    fn everything_of_our_own_is_used_where_everything_holds() {
        let all = Ways {
            reseed: Reseed::Native,
            tools: ToolCarrier::InBand,
            thinking: true,
            frames_live: true,
            long_descriptions: true,
            long_results: true,
            ends_turns: true,
            extra_body: true,
            sets_effort: true,
            interrupts: true,
            rewinds: true,
            resumes: true,
            forks: true,
            gate: true,
            refused_once: true,
        };
        assert_eq!(certified(), all);
    }

    #[test]
    fn of_an_unknown_program_the_documented_ways_are_taken_and_what_is_asked_for_is_obeyed() {
        let documented = ways(&UNKNOWN, None, None).unwrap();
        let wanted = Ways {
            reseed: Reseed::Transcript,
            tools: ToolCarrier::Http,
            ends_turns: false,
            gate: false,
            refused_once: false,
            ..certified()
        };
        assert_eq!(documented, wanted);
        let asked = ways(&UNKNOWN, Some(Reseed::Native), Some(ToolCarrier::InBand)).unwrap();
        assert_eq!(
            (asked.reseed, asked.tools, asked.thinking),
            (Reseed::Native, ToolCarrier::InBand, true)
        );
    }

    type Change = fn(&mut Ways);

    /// Each check that decides about a way, with what is left without it.
    fn rows() -> Vec<(Check, Change)> {
        vec![
            (Check::FramesOrder, |w| w.reseed = Reseed::Transcript),
            (Check::FramesAcknowledged, |w| w.reseed = Reseed::Transcript),
            (Check::FramesThinking, |w| w.thinking = false),
            (Check::FramesLive, |w| w.frames_live = false),
            (Check::InBandManifest, |w| w.tools = ToolCarrier::Http),
            (Check::DescriptionsWhole, |w| w.long_descriptions = false),
            (Check::ResultWhole, |w| w.long_results = false),
            (Check::EndTurn, |w| w.ends_turns = false),
            (Check::ExtraBodyLive, |w| w.extra_body = false),
            (Check::EffortLive, |w| w.sets_effort = false),
            (Check::InterruptCloses, |w| w.interrupts = false),
            (Check::CancelQueued, |w| w.interrupts = false),
            (Check::RewindAfterInterrupt, |w| w.interrupts = false),
            (Check::RewindAfterFailure, |w| w.rewinds = false),
            (Check::ResumeAt, |w| w.resumes = false),
            (Check::ForkAt, |w| w.forks = false),
            (Check::BlockingLimitGate, |w| w.gate = false),
            (Check::RefusalOnce, |w| w.refused_once = false),
        ]
    }

    #[test]
    fn each_check_decides_about_its_way_and_about_no_other() {
        for (check, change) in rows() {
            let mut wanted = certified();
            change(&mut wanted);
            assert_eq!(
                ways(&failing(&[check]), None, None).unwrap(),
                wanted,
                "{check}"
            );
        }
    }

    #[test]
    fn every_check_that_the_table_says_decides_does_and_every_refusal_has_its_name() {
        for check in Check::ALL {
            let decides = rows().iter().any(|(of, _)| of == check);
            let otherwise = check.otherwise(TransportKind::Pool);
            let says = matches!(otherwise, Some(Otherwise::FallsBack(_)));
            assert_eq!(decides, says, "{check}");
            let refused = ways(&failing(&[*check]), None, None);
            match otherwise {
                Some(Otherwise::Refuses(_)) => {
                    let error = refused.unwrap_err();
                    assert_eq!(error.code(), ErrorCode::VersionIncompatible);
                    assert!(error.detail().contains(check.as_str()), "{error}");
                }
                _ => drop(refused.unwrap()),
            }
        }
    }

    #[test]
    fn a_way_that_was_asked_for_is_refused_where_its_check_fails_and_no_other_is() {
        let (native, in_band) = (Some(Reseed::Native), Some(ToolCarrier::InBand));
        for (check, reseed, tools, word) in [
            (Check::FramesOrder, native, None, "reseed"),
            (Check::FramesAcknowledged, native, None, "reseed"),
            (Check::InBandManifest, None, in_band, "tool_carrier"),
        ] {
            let error = ways(&failing(&[check]), reseed, tools).unwrap_err();
            assert_eq!(error.code(), ErrorCode::VersionIncompatible);
            let detail = error.detail();
            assert!(
                detail.contains(check.as_str()) && detail.contains(word),
                "{error}"
            );
            assert!(error.remedy().contains("Leave the setting out"), "{error}");
            let other = (reseed.xor(native), tools.xor(in_band));
            ways(&failing(&[check]), other.0, other.1).unwrap();
        }
        let all = failing(&[Check::FramesOrder, Check::InBandManifest]);
        let slow = ways(&all, Some(Reseed::Transcript), Some(ToolCarrier::Http)).unwrap();
        assert_eq!(
            (slow.reseed, slow.tools),
            (Reseed::Transcript, ToolCarrier::Http)
        );
    }

    #[test]
    fn settings_of_the_body_are_refused_where_they_may_be_lost() {
        let lost = ways(&failing(&[Check::ExtraBodyLive]), None, None).unwrap();
        lost.check_extra_body(false).unwrap();
        let error = lost.check_extra_body(true).unwrap_err();
        assert_eq!(error.code(), ErrorCode::SamplingUnsupported);
        assert!(error.detail().contains("extra_body_live"), "{error}");
        certified().check_extra_body(true).unwrap();
    }
}
