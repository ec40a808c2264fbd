//! Which ways a replay takes with a program: decided by what it was certified to do, before anything is started. Pure.
//!
//! A way of the replay document is taken unless it was seen to fail. A faster way of our own needs more: that it was seen to
//! hold, or that a person asked for it and nothing is known of the program.

use super::options::{Carrier, History};
use crate::certify::{Check, Standing};
use crate::error::Result;
use crate::request::TransportKind;

/// What a history needs to go as the CLI's own frames.
const NATIVE: &[Check] = &[
    Check::FramesOrder,
    Check::FramesAcknowledged,
    // A transcript escapes what the CLI would act on.
    Check::ClientComposed,
];
/// What tools need to go over the CLI's own input and output.
const IN_BAND: &[Check] = &[Check::InBandManifest];
/// What they need to be listed by a process of their own.
const STDIO: &[Check] = &[Check::StdioBridge];

/// What a person set, and what there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) history: Option<History>,
    pub(crate) tools: Option<Carrier>,
    pub(crate) cache_mark: bool,
    /// The turnpass program is known, which lists tools over stdio.
    pub(crate) has_tool_server: bool,
}

/// How a history is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) history: History,
    /// Whether frames carry thinking.
    pub(crate) thinking: bool,
    /// Whether it gets a cache mark.
    pub(crate) mark: bool,
}

/// The decision for one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ways {
    /// How the history is given to it.
    pub(crate) told: Told,
    /// Who lists the tools.
    pub(crate) tools: Carrier,
    /// Whether descriptions of tools arrive whole, however long.
    pub(crate) long_descriptions: bool,
    /// Whether settings of the body arrive.
    pub(crate) extra_body: bool,
    /// Whether the CLI leaves it at a refusal.
    pub(crate) refused_once: bool,
}

impl Asked {
    /// How a history is written down until the program is known: to find what is wrong with a request first.
    pub(crate) fn likely(self) -> Told {
        Told {
            history: self.history.unwrap_or(History::Native),
            thinking: true,
            mark: self.cache_mark,
        }
    }
}

/// Decides.
///
/// # Errors
///
/// `version_incompatible` that names the check that a replay cannot do without, or that a way that was asked for needs.
pub(crate) fn ways(standing: &Standing, asked: Asked, has_tools: bool) -> Result<Ways> {
    if let Some(error) = standing.refusal(TransportKind::Replay) {
        return Err(error);
    }
    if asked.history == Some(History::Native) {
        let instead = "Leave the setting out, or set it to transcript, which this version takes.";
        standing.permits("history = \"native\"", NATIVE, instead)?;
    }
    let history = asked.history.unwrap_or(match standing.allows_all(NATIVE) {
        true => History::Native,
        false => History::Transcript,
    });
    let unless_failed = |check| !standing.fails(check);
    Ok(Ways {
        told: Told {
            history,
            thinking: unless_failed(Check::FramesThinking),
            mark: asked.cache_mark && unless_failed(Check::CacheBreakpoints),
        },
        tools: carrier(standing, asked, has_tools)?,
        long_descriptions: unless_failed(Check::DescriptionsWhole),
        extra_body: unless_failed(Check::ExtraBodyLive),
        refused_once: standing.allows(Check::RefusalOnce),
    })
}

/// Who lists the tools: who was asked for; in-band where that holds, or over stdio for whoever asked for the document's
/// history; else the other. In-band comes last where nobody else can, since the tools are looked at before anything is said.
fn carrier(standing: &Standing, asked: Asked, has_tools: bool) -> Result<Carrier> {
    if !has_tools {
        return Ok(asked.tools.unwrap_or(Carrier::InBand));
    }
    let instead = "Leave the carrier of tools out, or use another version of the CLI.";
    match asked.tools {
        Some(Carrier::InBand) => {
            standing.permits("carrying tools in-band", IN_BAND, instead)?;
            return Ok(Carrier::InBand);
        }
        Some(Carrier::Stdio) => {
            standing.permits("carrying tools over stdio", STDIO, instead)?;
            return Ok(Carrier::Stdio);
        }
        None => {}
    }
    let stdio = asked.has_tool_server && !standing.fails_any(STDIO);
    let in_band = standing.allows_all(IN_BAND);
    if stdio && (!in_band || asked.history == Some(History::Transcript)) {
        return Ok(Carrier::Stdio);
    }
    let instead = "Use another version of the CLI, or another transport.";
    standing.permits("carrying tools", IN_BAND, instead)?;
    Ok(Carrier::InBand)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certify::Otherwise;
    use crate::certify::standing::{UNKNOWN, failing};
    use crate::error::ErrorCode;

    const ASKED: Asked = Asked {
        history: None,
        tools: None,
        cache_mark: true,
        has_tool_server: true,
    };

    fn certified() -> Ways {
        ways(&failing(&[]), ASKED, true).unwrap()
    }

    #[test]
    fn everything_of_our_own_is_used_where_everything_holds() {
        let all = Ways {
            told: ASKED.likely(),
            tools: Carrier::InBand,
            long_descriptions: true,
            extra_body: true,
            refused_once: true,
        };
        assert_eq!(certified(), all);
        assert_eq!(all.told.history, History::Native);
    }

    #[test]
    fn of_an_unknown_program_the_documented_ways_are_taken_and_what_is_asked_for_is_obeyed() {
        let mut wanted = certified();
        wanted.told.history = History::Transcript;
        wanted.tools = Carrier::Stdio;
        wanted.refused_once = false;
        assert_eq!(ways(&UNKNOWN, ASKED, true).unwrap(), wanted);
        let asked = Asked {
            history: Some(History::Native),
            tools: Some(Carrier::InBand),
            ..ASKED
        };
        let obeyed = ways(&UNKNOWN, asked, true).unwrap();
        assert_eq!(
            (obeyed.told, obeyed.tools),
            (ASKED.likely(), Carrier::InBand)
        );
    }

    type Change = fn(&mut Ways);

    /// Each check that decides about a way, with what is left without it.
    fn rows() -> Vec<(Check, Change)> {
        vec![
            (Check::FramesOrder, |w| w.told.history = History::Transcript),
            (Check::FramesAcknowledged, |w| {
                w.told.history = History::Transcript
            }),
            (Check::ClientComposed, |w| {
                w.told.history = History::Transcript
            }),
            (Check::FramesThinking, |w| w.told.thinking = false),
            (Check::CacheBreakpoints, |w| w.told.mark = false),
            (Check::InBandManifest, |w| w.tools = Carrier::Stdio),
            (Check::DescriptionsWhole, |w| w.long_descriptions = false),
            (Check::ExtraBodyLive, |w| w.extra_body = false),
            (Check::RefusalOnce, |w| w.refused_once = false),
        ]
    }

    #[test]
    fn each_check_decides_about_its_way_and_about_no_other() {
        for (check, change) in rows() {
            let mut wanted = certified();
            change(&mut wanted);
            let decided = ways(&failing(&[check]), ASKED, true).unwrap();
            assert_eq!(decided, wanted, "{check}");
        }
        let asked = Asked {
            history: Some(History::Transcript),
            ..ASKED
        };
        for (standing, tools) in [
            (failing(&[]), Carrier::Stdio),
            (UNKNOWN, Carrier::Stdio),
            (failing(&[Check::StdioBridge]), Carrier::InBand),
        ] {
            let decided = ways(&standing, asked, true).unwrap();
            assert_eq!(decided.tools, tools, "{standing:?}");
        }
    }

    #[test]
    fn every_check_that_the_table_says_decides_does_and_every_refusal_has_its_name() {
        for check in Check::ALL {
            let decides = rows().iter().any(|(of, _)| of == check) || *check == Check::StdioBridge;
            let otherwise = check.otherwise(TransportKind::Replay);
            let says = matches!(otherwise, Some(Otherwise::FallsBack(_)));
            assert_eq!(decides, says, "{check}");
            let refused = ways(&failing(&[*check]), ASKED, true);
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
    fn a_way_that_was_asked_for_is_refused_where_its_check_fails() {
        let native = Asked {
            history: Some(History::Native),
            ..ASKED
        };
        let over = |carrier| Asked {
            tools: Some(carrier),
            ..ASKED
        };
        for (check, asked) in [
            (Check::FramesOrder, native),
            (Check::FramesAcknowledged, native),
            (Check::ClientComposed, native),
            (Check::InBandManifest, over(Carrier::InBand)),
            (Check::StdioBridge, over(Carrier::Stdio)),
        ] {
            let error = ways(&failing(&[check]), asked, true).unwrap_err();
            assert_eq!(error.code(), ErrorCode::VersionIncompatible);
            assert!(error.detail().contains(check.as_str()), "{error}");
            assert!(error.remedy().starts_with("Leave the"), "{error}");
        }
    }

    #[test]
    fn tools_that_nobody_can_carry_are_refused_and_a_request_without_tools_is_not() {
        let neither = failing(&[Check::InBandManifest, Check::StdioBridge]);
        let error = ways(&neither, ASKED, true).unwrap_err();
        assert!(error.detail().contains("in_band_manifest"), "{error}");
        ways(&neither, ASKED, false).unwrap();
        let alone = Asked {
            has_tool_server: false,
            ..ASKED
        };
        let in_band = ways(&UNKNOWN, alone, true).unwrap();
        assert_eq!(
            in_band.tools,
            Carrier::InBand,
            "it is looked at when it runs"
        );
        let fails = ways(&failing(&[Check::InBandManifest]), alone, true);
        assert!(fails.unwrap_err().detail().contains("in_band_manifest"));
    }
}
