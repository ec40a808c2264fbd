//! Who may do what: rules that the person set, and the person who is asked about the rest.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::tools::Effect;

/// The word in an allow list that permits leaving the working directory.
pub const OUTSIDE: &str = "outside";

/// What a person is asked about one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The tool.
    pub tool: String,
    /// The call in one line; written by the model, so it is to be shown with control characters made visible.
    pub summary: String,
    /// All that the call would do, over several lines; written by the model too.
    pub detail: String,
    /// The places outside the working directory that it would touch, with symbolic links resolved.
    pub outside: Vec<PathBuf>,
}

/// What the person said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This call.
    Once,
    /// This call and later ones of the same tool, and later ones to the same places outside.
    Always,
    /// Not this call.
    No,
}

/// Somebody who can be asked.
pub trait Approver: fmt::Debug + Send + Sync {
    /// Asks about one call; the agent waits. Calls are asked about one at a time, in the order of the calls.
    ///
    /// # Cancel safety
    ///
    /// The future is dropped when the run is cancelled; the call counts as not approved.
    fn ask<'a>(&'a self, ask: &'a Ask) -> BoxFuture<'a, Answer>;
}

/// The rules of one agent. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Approvals {
    allowed: BTreeSet<String>,
    denied: BTreeSet<String>,
    granted_outside: BTreeSet<PathBuf>,
    approver: Option<Arc<dyn Approver>>,
}

/// What the rules say about one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It runs.
    Allow,
    /// The person has to be asked.
    Ask,
    /// It does not run; the model is told why.
    Deny(String),
}

impl Approvals {
    /// Reads inside the working directory are allowed, everything else is refused: for runs that nobody watches.
    pub fn read_only() -> Self {
        Self::default()
    }

    /// Reads inside the working directory are allowed, everything else is asked about.
    pub fn ask(approver: impl Approver + 'static) -> Self {
        Self {
            approver: Some(Arc::new(approver)),
            ..Self::default()
        }
    }

    /// With tools that need no question; [`OUTSIDE`] permits leaving the working directory.
    #[must_use]
    pub fn allow<T: Into<String>>(mut self, tools: impl IntoIterator<Item = T>) -> Self {
        self.allowed.extend(tools.into_iter().map(Into::into));
        self
    }

    /// With tools that never run. A denial is stronger than a permission.
    #[must_use]
    pub fn deny<T: Into<String>>(mut self, tools: impl IntoIterator<Item = T>) -> Self {
        self.denied.extend(tools.into_iter().map(Into::into));
        self
    }

    pub(crate) fn approver(&self) -> Option<Arc<dyn Approver>> {
        self.approver.clone()
    }

    /// The verdict on a call that would touch these places outside.
    pub(crate) fn verdict(&self, tool: &str, effect: Effect, outside: &[&Path]) -> Verdict {
        if self.denied.contains(tool) {
            return Verdict::Deny(format!("the tool {tool} is not allowed in this run"));
        }
        let leaves = !self.allowed.contains(OUTSIDE)
            && outside
                .iter()
                .any(|path| !self.granted_outside.contains(*path));
        let changes = effect == Effect::Change && !self.allowed.contains(tool);
        match (leaves || changes, &self.approver) {
            (false, _) => Verdict::Allow,
            (true, Some(_)) => Verdict::Ask,
            (true, None) if leaves => Verdict::Deny(
                "the path is outside the working directory, and leaving it is not allowed in this run"
                    .to_owned(),
            ),
            (true, None) => Verdict::Deny(format!(
                "this run is read-only: the tool {tool} needs a permission that nobody gave"
            )),
        }
    }

    /// Remembers an [`Answer::Always`].
    pub(crate) fn remember(&mut self, tool: &str, outside: &[&Path]) {
        self.allowed.insert(tool.to_owned());
        self.granted_outside
            .extend(outside.iter().map(|path| path.to_path_buf()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Somebody;

    impl Approver for Somebody {
        fn ask<'a>(&'a self, _: &'a Ask) -> BoxFuture<'a, Answer> {
            Box::pin(async { Answer::No })
        }
    }

    const INSIDE: &[&Path] = &[];

    fn denied(verdict: Verdict) -> bool {
        matches!(verdict, Verdict::Deny(_))
    }

    #[test]
    fn nobody_there_means_read_only() {
        let rules = Approvals::read_only();
        let outside = [Path::new("/etc/hosts")];
        assert_eq!(rules.verdict("read", Effect::Read, INSIDE), Verdict::Allow);
        assert!(denied(rules.verdict("write", Effect::Change, INSIDE)));
        assert!(denied(rules.verdict("read", Effect::Read, &outside)));
    }

    #[test]
    fn a_permission_does_not_permit_to_leave() {
        let rules = Approvals::read_only().allow(["write"]);
        let outside = [Path::new("/etc/hosts")];
        assert_eq!(
            rules.verdict("write", Effect::Change, INSIDE),
            Verdict::Allow
        );
        assert!(denied(rules.verdict("write", Effect::Change, &outside)));
        let rules = rules.allow([OUTSIDE]);
        assert_eq!(
            rules.verdict("write", Effect::Change, &outside),
            Verdict::Allow
        );
        assert!(denied(rules.verdict("shell", Effect::Change, INSIDE)));
    }

    #[test]
    fn a_denial_is_stronger_than_a_permission_and_than_a_person() {
        let rules = Approvals::ask(Somebody).allow(["shell"]).deny(["shell"]);
        assert!(denied(rules.verdict("shell", Effect::Change, INSIDE)));
    }

    #[test]
    fn what_was_answered_with_always_is_not_asked_again() {
        let mut rules = Approvals::ask(Somebody);
        let (one, two) = ([Path::new("/a")], [Path::new("/b")]);
        assert_eq!(rules.verdict("read", Effect::Read, &one), Verdict::Ask);
        rules.remember("read", &one);
        assert_eq!(rules.verdict("read", Effect::Read, &one), Verdict::Allow);
        assert_eq!(rules.verdict("read", Effect::Read, &two), Verdict::Ask);
        assert_eq!(rules.verdict("write", Effect::Change, &one), Verdict::Ask);
    }
}
