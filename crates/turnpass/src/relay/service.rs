//! What a generation meets on its way out, beside its own process.

use super::upstream::Upstream;
use crate::cli::starts::Starts;
use crate::limits::guard::Ticket;

/// What a generation meets on its way out.
#[derive(Clone, Copy)]
pub(crate) struct Service<'a> {
    pub(crate) upstream: &'a Upstream,
    /// Turns to start, and to renew a sign-in.
    pub(crate) starts: &'a Starts,
    /// What this generation may, and where it is counted.
    pub(crate) ticket: &'a Ticket,
}
