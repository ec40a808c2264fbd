//! What a version of the CLI was seen to do, and what a transport may therefore rely on.
//!
//! The CLI changes almost daily, so nothing here asks how new a version is: a [`Check`] is a behaviour with a name, a
//! [`Certificate`] is what one program file was seen to do, check by check, and [`Certificate::allows`] is the question that
//! a transport asks. The checks are run by the program (`turnpass doctor --certify`), which ships the laboratory that they
//! need; this module starts no process and opens no connection.
//!
//! # Layout
//!
//! | module | what | pure |
//! | --- | --- | --- |
//! | [`check`] | the checks as data: name, what is looked at, who relies on it, what happens without it | yes |
//! | [`certificate`] | the result: verdicts, a table, what a transport does about them | yes |
//! | [`identity`] | which program file a certificate speaks of | no: reads parts of the file |
//! | [`store`] | certificates kept in the state directory | no: one small file |
//!
//! # For a transport
//!
//! ```
//! use turnpass::certify::{Certificate, Check};
//!
//! fn reseeds_with_frames(certificate: Option<&Certificate>) -> bool {
//!     // Without a certificate nothing is known, and the documented way is taken.
//!     certificate.is_some_and(|known| known.allows(Check::FramesOrder) && known.allows(Check::FramesThinking))
//! }
//! assert!(!reseeds_with_frames(None));
//! ```

pub mod certificate;
pub mod check;
pub mod identity;
pub mod store;

pub use certificate::{Certificate, Outcome, Verdict};
pub use check::{About, Check, Otherwise, Reliance};
pub use identity::Identity;
pub use store::Certificates;
