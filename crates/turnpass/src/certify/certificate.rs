//! What one program file was seen to do: a table of verdicts, and what a transport does about it. Pure.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::identity::Identity;
use super::standing;
use crate::error::Error;
use crate::request::TransportKind;

/// Form of a stored certificate. A certificate of another form is none: its checks may have looked at something else. It is
/// raised with each check that is added, since what a kept certificate does not have counts as failing.
pub const FORM: u32 = 1;

/// How a check went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// The behaviour was seen.
    Holds,
    /// Something else was seen.
    Fails {
        /// What, in one sentence without anything of the person's.
        seen: String,
    },
    /// It could not be looked at, so nobody may rely on it.
    NotChecked {
        /// Why.
        why: String,
    },
}

impl Verdict {
    /// The word for a table.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Fails { .. } => "fails",
            Self::NotChecked { .. } => "not_checked",
        }
    }

    /// What was seen, or why nothing was.
    pub fn said(&self) -> &str {
        match self {
            Self::Holds => "",
            Self::Fails { seen } => seen,
            Self::NotChecked { why } => why,
        }
    }
}

/// One line of a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The check.
    pub check: Check,
    /// How it went.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How long it took.
    pub took_ms: u64,
}

/// What one program file was seen to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    form: u32,
    identity: Identity,
    outcomes: Vec<Outcome>,
}

impl Certificate {
    /// The certificate of a program file. Of two outcomes of one check the worse one counts; the order is that of
    /// [`Check::ALL`].
    pub fn new(identity: Identity, mut outcomes: Vec<Outcome>) -> Self {
        outcomes.sort_by_key(|one| (one.check, one.verdict == Verdict::Holds));
        outcomes.dedup_by_key(|one| one.check);
        Self {
            form: FORM,
            identity,
            outcomes,
        }
    }

    /// Which program file it speaks of.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether a transport may rely on a behaviour: only what was seen to hold. A pure look-up.
    pub fn allows(&self, check: Check) -> bool {
        matches!(self.verdict(check), Some(Verdict::Holds))
    }

    /// How a check went; `None` when it was not part of this certification.
    pub fn verdict(&self, check: Check) -> Option<&Verdict> {
        let outcome = self.outcomes.iter().find(|one| one.check == check);
        outcome.map(|one| &one.verdict)
    }

    /// All outcomes, in the order of [`Check::ALL`].
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Whether every check was run and holds.
    pub fn is_clean(&self) -> bool {
        Check::ALL.iter().all(|check| self.allows(*check))
    }

    /// What a transport takes another way for: each check that decides about its way and that does not hold.
    pub fn fall_backs(&self, transport: TransportKind) -> Vec<(Check, &'static str)> {
        standing::fall_backs(transport, |check| self.allows(check))
    }

    /// Why a transport does not work with this CLI, by the name of the first check that it cannot do without.
    pub fn refusal(&self, transport: TransportKind) -> Option<Error> {
        let version = self.identity.version();
        standing::refusal(version, transport, |check| self.allows(check))
    }

    /// Whether it is of the form that this build writes.
    pub(super) fn is_current(&self) -> bool {
        self.form == FORM
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certify::identity::test_identity;
    use crate::error::ErrorCode;

    fn outcome(check: Check, verdict: Verdict) -> Outcome {
        Outcome {
            check,
            verdict,
            took_ms: 1,
        }
    }

    fn fails() -> Verdict {
        Verdict::Fails {
            seen: "two requests".to_owned(),
        }
    }

    fn all_but(missing: &[Check]) -> Certificate {
        let held = Check::ALL.iter().filter(|check| !missing.contains(check));
        let mut outcomes: Vec<_> = held.map(|check| outcome(*check, Verdict::Holds)).collect();
        outcomes.extend(missing.iter().map(|check| outcome(*check, fails())));
        Certificate::new(test_identity(), outcomes)
    }

    #[test]
    fn the_form_is_raised_with_the_checks() {
        assert_eq!((FORM, Check::ALL.len()), (1, 44));
    }

    #[test]
    fn only_what_was_seen_to_hold_is_allowed() {
        let not_checked = Verdict::NotChecked {
            why: "the CLI did not start".to_owned(),
        };
        let certificate = Certificate::new(
            test_identity(),
            vec![
                outcome(Check::FramesOrder, Verdict::Holds),
                outcome(Check::ForkAt, fails()),
                outcome(Check::ResumeAt, not_checked),
            ],
        );
        assert!(certificate.allows(Check::FramesOrder));
        for check in [Check::ForkAt, Check::ResumeAt, Check::Flags] {
            assert!(!certificate.allows(check), "{check}");
        }
        assert!(!certificate.is_clean());
        assert!(all_but(&[]).is_clean());
    }

    #[test]
    fn the_worse_of_two_outcomes_counts_whatever_their_order() {
        for order in [[Verdict::Holds, fails()], [fails(), Verdict::Holds]] {
            let outcomes = order.map(|verdict| outcome(Check::ForkAt, verdict));
            let certificate = Certificate::new(test_identity(), outcomes.into());
            assert_eq!(certificate.outcomes().len(), 1);
            assert!(!certificate.allows(Check::ForkAt));
        }
    }

    #[test]
    fn a_transport_falls_back_or_refuses_by_the_name_of_the_check() {
        let clean = all_but(&[]);
        for transport in TransportKind::ALL {
            assert!(clean.refusal(transport).is_none());
            assert!(clean.fall_backs(transport).is_empty());
        }
        let certificate = all_but(&[Check::FramesOrder, Check::RetriesOff]);
        let told = certificate.fall_backs(TransportKind::Pool);
        assert_eq!(
            told,
            [(Check::FramesOrder, "a reseed is one transcript message")]
        );
        let error = certificate.refusal(TransportKind::Replay).unwrap();
        assert_eq!(error.code(), ErrorCode::VersionIncompatible);
        assert!(error.detail().contains("retries_off"), "{error}");
        assert!(certificate.refusal(TransportKind::Relay).is_none());
    }

    #[test]
    fn it_is_the_same_after_it_was_written_and_read() {
        let certificate = all_but(&[Check::StopAfterCut]);
        let text = serde_json::to_string(&certificate).unwrap();
        assert!(
            text.contains(r#""check":"stop_after_cut","verdict":"fails","seen":"two requests""#)
        );
        assert_eq!(
            serde_json::from_str::<Certificate>(&text).unwrap(),
            certificate
        );
    }
}
