//! What is known of the program file that is about to serve, and what a transport may therefore do with it.
//!
//! The person's own certificate of this very file counts first. Without one the versions count that were certified before
//! this build was released, by their number, on the platform where that was done. Of every other file nothing is known: then
//! the documented ways are taken, and what can be checked while they run is checked.

use std::path::Path;

use super::certificate::Certificate;
use super::check::{Check, Otherwise};
use super::released;
use super::store::Certificates;
use crate::cli::version::Version;
use crate::error::{Error, ErrorCode, Result};
use crate::request::TransportKind;

/// What is known of one program file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It was certified on this machine, as it is now.
    Certified(Certificate),
    /// Its version was certified before this build was released, on this platform.
    Released(Released),
    /// Nothing.
    Unknown(Version),
}

/// A version that was certified before this build was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released {
    version: Version,
    failing: &'static [Check],
}

impl Standing {
    /// The standing of a program file. Blocks for a local read of some MiB where certificates are kept.
    pub fn of(version: Version, program: &Path, certificates: Option<&Certificates>) -> Self {
        let own = certificates.and_then(|kept| kept.of(version, program));
        let released = || Released::of(version, released::IS_HERE);
        match own {
            Some(own) => Self::Certified(own),
            None => released().map_or(Self::Unknown(version), Self::Released),
        }
    }

    /// Whether a behaviour was seen to hold.
    pub fn allows(&self, check: Check) -> bool {
        match self {
            Self::Certified(own) => own.allows(check),
            Self::Released(released) => !released.failing.contains(&check),
            Self::Unknown(_) => false,
        }
    }

    /// Whether a behaviour was looked at and not seen to hold: never so of a program of which nothing is known.
    pub fn fails(&self, check: Check) -> bool {
        !matches!(self, Self::Unknown(_)) && !self.allows(check)
    }

    /// The CLI's version.
    pub fn version(&self) -> String {
        match self {
            Self::Certified(own) => own.identity().version().to_owned(),
            Self::Released(released) => released.version.to_string(),
            Self::Unknown(version) => version.to_string(),
        }
    }

    /// Whether nothing is known.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_))
    }

    /// Who says so, in half a sentence.
    pub fn source(&self) -> &'static str {
        match self {
            Self::Certified(_) => "certified on this machine",
            Self::Released(_) => "certified before this release, by its version",
            Self::Unknown(_) => "not certified on this machine",
        }
    }

    /// Why a transport does not work with this CLI, by the name of the first check that it cannot do without. A program of
    /// which nothing is known is not refused.
    pub fn refusal(&self, transport: TransportKind) -> Option<Error> {
        match self {
            Self::Unknown(_) => None,
            _ => refusal(&self.version(), transport, |check| self.allows(check)),
        }
    }

    /// What a transport takes another way for: each check that decides about its way and that does not hold.
    pub fn fall_backs(&self, transport: TransportKind) -> Vec<(Check, &'static str)> {
        fall_backs(transport, |check| !self.fails(check))
    }

    /// Whether a way that was asked for may be taken: each of its checks holds, or nothing is known of the program.
    ///
    /// # Errors
    ///
    /// `version_incompatible` that names the first check that fails, `what` needs it, and what to do.
    pub(crate) fn permits(&self, what: &str, needs: &[Check], instead: &str) -> Result<()> {
        let Some(check) = needs.iter().find(|check| self.fails(**check)) else {
            return Ok(());
        };
        let version = self.version();
        let said = format!("claude {version} does not pass the check {check}, which {what} needs");
        Err(Error::new(ErrorCode::VersionIncompatible, said).with_remedy(instead))
    }

    /// Whether every check was seen to hold.
    pub(crate) fn allows_all(&self, checks: &[Check]) -> bool {
        checks.iter().all(|check| self.allows(*check))
    }

    /// Whether a check of these was seen not to hold.
    pub(crate) fn fails_any(&self, checks: &[Check]) -> bool {
        checks.iter().any(|check| self.fails(*check))
    }

    /// What the host is told once of a program of which nothing is known.
    pub(crate) fn notice(&self) -> Option<crate::event::Notice> {
        let Self::Unknown(version) = self else {
            return None;
        };
        let version = version.to_string();
        let text = format!(
            "claude {version} is not certified on this machine, so the documented ways are used. `turnpass doctor --certify` \
             settles it: about 15 s, no quota, and nothing leaves the machine."
        );
        Some(crate::event::Notice::UncertifiedVersion { version, text })
    }
}

impl Released {
    fn of(version: Version, is_here: bool) -> Option<Self> {
        let known = released::VERSIONS.iter().filter(|_| is_here);
        known
            .clone()
            .find(|(of, _)| *of == version)
            .map(|(version, failing)| Self {
                version: *version,
                failing,
            })
    }
}

/// The versions that were certified before this build was released, each with the checks that it does not pass.
pub fn released_versions() -> &'static [(Version, &'static [Check])] {
    released::VERSIONS
}

/// Settings of the body on a CLI that was seen not to pass them on.
pub(crate) fn extra_body_fails() -> Error {
    let check = Check::ExtraBodyLive;
    let what = format!(
        "the installed CLI does not pass the check {check}, so it may leave out settings of the body (sampling, effort none)"
    );
    Error::new(ErrorCode::SamplingUnsupported, what)
        .with_remedy("Leave these settings out, or use another version of the CLI.")
}

/// By what does not hold: why a transport does not work.
pub(super) fn refusal(
    version: &str,
    transport: TransportKind,
    holds: impl Fn(Check) -> bool,
) -> Option<Error> {
    let refused_by = |transport| {
        let mut missing = Check::ALL.iter().filter(|check| !holds(**check));
        missing.find_map(|check| match check.otherwise(transport) {
            Some(Otherwise::Refuses(why)) => Some((*check, why)),
            _ => None,
        })
    };
    let (check, why) = refused_by(transport)?;
    let what = format!("claude {version} does not pass the check {check}: {why}");
    let others: Vec<_> = TransportKind::ALL
        .into_iter()
        .filter(|other| refused_by(*other).is_none())
        .map(TransportKind::as_str)
        .collect();
    let remedy = match others.is_empty() {
        true => "Use another version of the CLI; no transport works with this one.".to_owned(),
        false => format!(
            "Use another version of the CLI, or another transport that works with this one: {}.",
            others.join(", ")
        ),
    };
    Some(Error::new(ErrorCode::VersionIncompatible, what).with_remedy(remedy))
}

/// By what does not hold: what a transport takes another way for.
pub(super) fn fall_backs(
    transport: TransportKind,
    holds: impl Fn(Check) -> bool,
) -> Vec<(Check, &'static str)> {
    let missing = Check::ALL.iter().filter(|check| !holds(**check));
    let wants = |check: &Check| match check.otherwise(transport) {
        Some(Otherwise::FallsBack(way)) => Some((*check, way)),
        _ => None,
    };
    missing.filter_map(wants).collect()
}

/// For tests of what a transport does: a program that was certified here and does not pass these.
#[cfg(test)]
pub(crate) fn failing(checks: &[Check]) -> Standing {
    use super::certificate::{Outcome, Verdict};
    let outcomes = Check::ALL.iter().map(|check| Outcome {
        check: *check,
        verdict: match checks.contains(check) {
            true => Verdict::Fails {
                seen: "not so".to_owned(),
            },
            false => Verdict::Holds,
        },
        took_ms: 1,
    });
    let identity = super::identity::test_identity();
    Standing::Certified(Certificate::new(identity, outcomes.collect()))
}

/// For the same: a program of which nothing is known.
#[cfg(test)]
pub(crate) const UNKNOWN: Standing = Standing::Unknown(Version::new(2, 1, 9999));

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::certify::{Identity, Outcome, Verdict};

    const RELEASED: Version = Version::new(2, 1, 310);

    #[test]
    fn an_own_certificate_beats_the_released_table_and_that_of_another_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("claude");
        let kept = Certificates::new(&dir.path().join("state"));
        let of = |version| Standing::of(version, &program, Some(&kept));
        fs::write(&program, "one").unwrap();
        let by_version = Released::of(RELEASED, released::IS_HERE);
        let released = by_version.map_or(Standing::Unknown(RELEASED), Standing::Released);
        assert_eq!(of(RELEASED), released);
        let outcome = Outcome {
            check: Check::StopAfterCut,
            verdict: Verdict::Holds,
            took_ms: 1,
        };
        let identity = Identity::of(RELEASED, &program).unwrap();
        let own = Certificate::new(identity, vec![outcome]);
        kept.keep(&own).unwrap();
        assert_eq!(of(RELEASED), Standing::Certified(own));
        assert!(of(RELEASED).allows(Check::StopAfterCut));
        assert!(of(RELEASED).fails(Check::FramesOrder), "it was not seen");
        fs::write(&program, "another").unwrap();
        assert_eq!(of(RELEASED), released);
        let newer = Version::new(2, 1, 9999);
        assert_eq!(of(newer), Standing::Unknown(newer));
        assert_eq!(Standing::of(RELEASED, &program, None), released);
    }

    #[test]
    fn a_released_version_counts_only_where_it_was_certified() {
        let here = Standing::Released(Released::of(RELEASED, true).unwrap());
        assert!(here.fails(Check::StopAfterCut) && here.allows(Check::FramesOrder));
        assert_eq!(here.version(), "2.1.310");
        assert_eq!(Released::of(RELEASED, false), None);
        assert_eq!(Released::of(Version::new(2, 1, 295), true), None);
    }

    #[test]
    fn nothing_known_neither_allows_nor_fails_nor_refuses_and_is_told() {
        for check in Check::ALL {
            assert!(!UNKNOWN.allows(*check) && !UNKNOWN.fails(*check));
        }
        for transport in TransportKind::ALL {
            assert!(UNKNOWN.refusal(transport).is_none());
            assert!(UNKNOWN.fall_backs(transport).is_empty());
        }
        UNKNOWN.permits("it", Check::ALL, "").unwrap();
        let told = format!("{:?}", UNKNOWN.notice().unwrap());
        assert!(
            told.contains("2.1.9999") && told.contains("doctor --certify"),
            "{told}"
        );
        assert!(failing(&[]).notice().is_none());
    }

    #[test]
    fn a_refusal_names_the_check_and_the_transports_that_work() {
        let error = failing(&[Check::InBandPairing]).refusal(TransportKind::Pool);
        let error = error.unwrap();
        assert_eq!(error.code(), ErrorCode::VersionIncompatible);
        assert!(error.detail().contains("in_band_pairing"), "{error}");
        assert!(error.remedy().contains("replay, relay"), "{error}");
        assert!(!error.is_retryable());
        let none = failing(&[Check::Flags]).refusal(TransportKind::Pool);
        assert!(none.unwrap().remedy().contains("no transport"));
        let asked = failing(&[Check::FramesOrder]).permits(
            "`reseed = \"native\"`",
            &[Check::FramesAcknowledged, Check::FramesOrder],
            "Leave it out.",
        );
        let error = asked.unwrap_err();
        assert!(error.detail().contains("frames_order"), "{error}");
        assert_eq!(error.remedy(), "Leave it out.");
    }
}
