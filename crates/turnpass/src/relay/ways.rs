//! Which ways a relay takes with a program: decided by what it was certified to do, before anything is started. Pure.
//!
//! A relay looks at each request of the CLI before it is sent, so it needs little. What a kept process is set to while it runs
//! is not in that request alone, so a process is kept where that was seen to hold.

use super::ProcessMode;
use super::prepared::ToolCarrier;
use crate::certify::{Check, Standing};
use crate::error::Result;
use crate::request::TransportKind;

/// What a process needs to serve another request than its first.
const WARM: &[Check] = &[Check::SystemPromptLive, Check::EffortLive];
/// What tools need to travel in the body.
const EXTRA_BODY: &[Check] = &[Check::ExtraBodyLive];
/// What they need as the CLI's own, in a kept process and in one for each request.
const MCP_WARM: &[Check] = &[Check::ToolsExact, Check::InBandManifest];
const MCP_PER_REQUEST: &[Check] = &[Check::ToolsExact, Check::StdioBridge];

/// What a person set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) process: Option<ProcessMode>,
    pub(crate) tools: Option<ToolCarrier>,
}

/// The decision for one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ways {
    /// Whether its processes are kept.
    pub(crate) process: ProcessMode,
    /// Where the host's tools travel.
    pub(crate) tools: ToolCarrier,
    /// Whether descriptions of tools arrive whole, however long.
    pub(crate) long_descriptions: bool,
    /// Whether settings of the body arrive.
    pub(crate) extra_body: bool,
}

/// Decides.
///
/// # Errors
///
/// `version_incompatible` that names the check that a relay cannot do without, or that a way that was asked for needs.
pub(crate) fn ways(standing: &Standing, asked: Asked, has_tools: bool) -> Result<Ways> {
    if let Some(error) = standing.refusal(TransportKind::Relay) {
        return Err(error);
    }
    if asked.process == Some(ProcessMode::Warm) {
        let instead = "Leave the setting out, or set it to per-request, which this version takes.";
        standing.permits("process = \"warm\"", WARM, instead)?;
    }
    let process = asked.process.unwrap_or(match standing.allows_all(WARM) {
        true => ProcessMode::Warm,
        false => ProcessMode::PerRequest,
    });
    let in_body = !standing.fails_any(EXTRA_BODY);
    let tools = asked.tools.unwrap_or(match in_body {
        true => ToolCarrier::ExtraBody,
        false => ToolCarrier::Mcp,
    });
    let arrive_whole = tools == ToolCarrier::ExtraBody || !standing.fails(Check::DescriptionsWhole);
    Ok(Ways {
        process: match has_tools {
            true => carried(standing, asked, process, tools)?,
            false => process,
        },
        tools,
        long_descriptions: arrive_whole,
        extra_body: in_body,
    })
}

/// Whether the tools can travel so, and in which process.
fn carried(
    standing: &Standing,
    asked: Asked,
    process: ProcessMode,
    tools: ToolCarrier,
) -> Result<ProcessMode> {
    let instead =
        "Use another version of the CLI, or another transport; requests without tools are served.";
    if tools == ToolCarrier::ExtraBody {
        standing.permits("carrying tools in the extra body", EXTRA_BODY, instead)?;
        return Ok(process);
    }
    let needs = |process| match process {
        ProcessMode::Warm => MCP_WARM,
        ProcessMode::PerRequest => MCP_PER_REQUEST,
    };
    let warm_may = asked.process.is_none() && !standing.fails_any(WARM);
    let other = match process {
        ProcessMode::Warm => ProcessMode::PerRequest,
        ProcessMode::PerRequest => ProcessMode::Warm,
    };
    let other_may = asked.process.is_none() && (other == ProcessMode::PerRequest || warm_may);
    if standing.fails_any(needs(process)) && other_may && !standing.fails_any(needs(other)) {
        return Ok(other);
    }
    standing.permits("carrying tools over MCP", needs(process), instead)?;
    Ok(process)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certify::Otherwise;
    use crate::certify::standing::{UNKNOWN, failing};
    use crate::error::ErrorCode;

    const AUTO: Asked = Asked {
        process: None,
        tools: None,
    };

    fn decided(failed: &[Check], asked: Asked) -> (ProcessMode, ToolCarrier) {
        let ways = ways(&failing(failed), asked, true).unwrap();
        (ways.process, ways.tools)
    }

    #[test]
    fn each_check_decides_about_its_way() {
        use ProcessMode::{PerRequest, Warm};
        use ToolCarrier::{ExtraBody, Mcp};
        let over_mcp = Asked {
            tools: Some(Mcp),
            ..AUTO
        };
        for (failed, asked, wanted) in [
            (&[][..], AUTO, (Warm, ExtraBody)),
            (&[Check::SystemPromptLive], AUTO, (PerRequest, ExtraBody)),
            (&[Check::EffortLive], AUTO, (PerRequest, ExtraBody)),
            (&[Check::ToolsExact], AUTO, (Warm, ExtraBody)),
            (&[Check::ExtraBodyLive], AUTO, (Warm, Mcp)),
            (&[], over_mcp, (Warm, Mcp)),
            (&[Check::InBandManifest], over_mcp, (PerRequest, Mcp)),
            (&[Check::StdioBridge], over_mcp, (Warm, Mcp)),
            (&[Check::StdioBridge], AUTO, (Warm, ExtraBody)),
            (
                &[Check::ExtraBodyLive, Check::InBandManifest],
                AUTO,
                (PerRequest, Mcp),
            ),
        ] {
            assert_eq!(decided(failed, asked), wanted, "{failed:?}");
        }
        let unknown = ways(&UNKNOWN, AUTO, true).unwrap();
        assert_eq!((unknown.process, unknown.tools), (PerRequest, ExtraBody));
        let warm = Asked {
            process: Some(Warm),
            ..AUTO
        };
        assert_eq!(ways(&UNKNOWN, warm, true).unwrap().process, Warm);
        let body = |failed: &[Check]| ways(&failing(failed), over_mcp, true).unwrap().extra_body;
        assert!(unknown.extra_body && body(&[]) && !body(EXTRA_BODY));
        let cut = ways(&failing(&[Check::DescriptionsWhole]), over_mcp, true).unwrap();
        assert!(!cut.long_descriptions);
        let whole = ways(&failing(&[Check::DescriptionsWhole]), AUTO, true).unwrap();
        assert!(whole.long_descriptions);
    }

    #[test]
    fn every_check_that_the_table_says_decides_has_its_row_and_every_refusal_has_its_name() {
        let decides = [
            Check::ToolsExact,
            Check::DescriptionsWhole,
            Check::InBandManifest,
            Check::StdioBridge,
            Check::ExtraBodyLive,
            Check::SystemPromptLive,
            Check::EffortLive,
        ];
        for check in Check::ALL {
            let otherwise = check.otherwise(TransportKind::Relay);
            let says = matches!(otherwise, Some(Otherwise::FallsBack(_)));
            assert_eq!(decides.contains(check), says, "{check}");
            let refused = ways(&failing(&[*check]), AUTO, true);
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
        let over = |tools| Asked {
            tools: Some(tools),
            ..AUTO
        };
        let warm = Asked {
            process: Some(ProcessMode::Warm),
            ..AUTO
        };
        let warm_mcp = Asked {
            tools: Some(ToolCarrier::Mcp),
            ..warm
        };
        for (failed, asked, named) in [
            (
                &[Check::SystemPromptLive][..],
                warm,
                Check::SystemPromptLive,
            ),
            (&[Check::EffortLive], warm, Check::EffortLive),
            (
                &[Check::ToolsExact],
                over(ToolCarrier::Mcp),
                Check::ToolsExact,
            ),
            (&[Check::InBandManifest], warm_mcp, Check::InBandManifest),
            (
                &[Check::ExtraBodyLive],
                over(ToolCarrier::ExtraBody),
                Check::ExtraBodyLive,
            ),
            (
                &[Check::ExtraBodyLive, Check::ToolsExact],
                AUTO,
                Check::ToolsExact,
            ),
            (
                &[
                    Check::ExtraBodyLive,
                    Check::InBandManifest,
                    Check::StdioBridge,
                ],
                AUTO,
                Check::InBandManifest,
            ),
        ] {
            let error = ways(&failing(failed), asked, true).unwrap_err();
            assert_eq!(error.code(), ErrorCode::VersionIncompatible);
            assert!(error.detail().contains(named.as_str()), "{error}");
            if asked.process.is_none() {
                ways(&failing(failed), asked, false).unwrap();
            }
        }
    }
}
