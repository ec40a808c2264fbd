//! The versions that were certified before this build was released, with the checks that each does not pass. Written by
//! `just compatibility` from the reports in `conformance/certificates`; not to be changed by hand.

use super::check::Check;
use crate::cli::version::Version;

/// Whether this build is for the platform on which they were certified.
pub(super) const IS_HERE: bool = cfg!(all(target_os = "linux", target_arch = "x86_64"));

/// Each version.
#[rustfmt::skip]
pub(super) const VERSIONS: &[(Version, &[Check])] = &[
    (Version::new(2, 1, 294), &[Check::StopAfterCut]),
    (Version::new(2, 1, 299), &[Check::StopAfterCut]),
    (Version::new(2, 1, 305), &[Check::StopAfterCut]),
    (Version::new(2, 1, 310), &[Check::StopAfterCut]),
    (Version::new(2, 1, 311), &[]),
    (Version::new(2, 1, 312), &[]),
    (Version::new(2, 1, 314), &[]),
    (Version::new(2, 1, 315), &[]),
    (Version::new(2, 1, 319), &[]),
    (Version::new(2, 1, 325), &[]),
    (Version::new(2, 1, 329), &[]),
    (Version::new(2, 1, 332), &[]),
];
