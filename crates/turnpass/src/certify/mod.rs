//! What a version of the CLI was seen to do, and what a transport may therefore rely on.
//!
//! The CLI changes almost daily, so nothing here asks how new a version is: a [`Check`] is a behaviour with a name, a
//! [`Certificate`] is what one program file was seen to do, check by check, and [`Standing`] is what is known of the file that is
//! about to serve. Each transport turns it into its ways, in one pure function. The checks are run by the program (`turnpass doctor
//! --certify`), which ships the laboratory that they
//! need; this module starts no process and opens no connection.
//!
//! # Layout
//!
//! | module | what | pure |
//! | --- | --- | --- |
//! | [`check`] | the checks as data: name, what is looked at, who relies on it, what happens without it | yes |
//! | [`certificate`] | the result: verdicts, a table, what a transport does about them | yes |
//! | [`identity`] | which program file a certificate speaks of | no: reads parts of the file |
//! | [`standing`] | what is known of a program: its own certificate, else its released version, else nothing | yes, but for its making |
//! | `released` | the versions that were certified before this release | yes |
//! | [`store`] | certificates kept in the state directory | no: one small file |
//!
//! # For a transport
//!
//! ```
//! use turnpass::certify::{Check, Standing};
//! use turnpass::cli::version::Version;
//!
//! fn reseeds_with_frames(standing: &Standing) -> bool {
//!     standing.allows(Check::FramesOrder) && standing.allows(Check::FramesAcknowledged)
//! }
//! // Of a version that nobody has certified nothing is known, and the documented way is taken.
//! assert!(!reseeds_with_frames(&Standing::Unknown(Version::new(2, 1, 9999))));
//! ```

pub mod certificate;
pub mod check;
pub mod identity;
mod released;
pub mod standing;
pub mod store;

pub use certificate::{Certificate, Outcome, Verdict};
pub use check::{About, Check, Otherwise, Reliance};
pub use identity::Identity;
pub use standing::{Released, Standing, released_versions};
pub use store::Certificates;
