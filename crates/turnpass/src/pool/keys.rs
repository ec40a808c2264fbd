//! Which conversation of the CLI a call belongs to. Pure.

use crate::request::{CallKind, Request, TransportSession};

/// The key of one live process. Model and effort are no part of it (pool document).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    name: String,
    kind: Kind,
}

/// Kept apart from the name, so that no name of a host's can be another kind's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Conversation,
    Advisor,
    /// `x` with a sub-agent's advisor and `x-subagent` with an advisor have the same name.
    SubAgentAdvisor,
    Summary,
}

/// What marks an advisor's key (pool document).
const ADVISOR: &str = "|advisor";
/// What marks the key of a summary's process.
const SUMMARY: &str = "|summary";

impl Key {
    /// The key of a call: the transport session, else its parent's, else `default`; an advisor has one of its own.
    pub(crate) fn of(request: &Request) -> Self {
        let own = session_of(request);
        let (name, kind) = match (request.call, &request.parent) {
            (CallKind::Advisor, None) => (format!("{own}-advisor{ADVISOR}"), Kind::Advisor),
            (CallKind::Advisor, Some(_)) => {
                let name = format!("{own}-subagent-advisor{ADVISOR}");
                (name, Kind::SubAgentAdvisor)
            }
            _ => (own.to_owned(), Kind::Conversation),
        };
        Self { name, kind }
    }

    /// The key of the process that a summary of this conversation gets when it has one of its own.
    pub(crate) fn of_summary(&self) -> Self {
        Self {
            name: format!("{}{SUMMARY}", self.name),
            kind: Kind::Summary,
        }
    }

    /// Whether its process is ended when nobody has asked it for an hour.
    pub(crate) fn is_advisor(&self) -> bool {
        matches!(self.kind, Kind::Advisor | Kind::SubAgentAdvisor)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }
}

fn session_of(request: &Request) -> &str {
    match &request.parent {
        Some(parent) if request.session == TransportSession::default() => &parent.0,
        _ => &request.session.0,
    }
}

/// Whether a call keeps its conversation on disk and tells the host a state: the parent's normal calls alone.
pub(crate) fn persists(request: &Request) -> bool {
    request.call == CallKind::Normal && request.parent.is_none()
}

/// Whether the live process of a call's conversation is one that keeps it on disk. A parent's summary belongs to the
/// conversation of its normal calls; where it does not run there it has a process without persistence.
pub(crate) fn is_on_disk(request: &Request) -> bool {
    request.parent.is_none() && matches!(request.call, CallKind::Normal | CallKind::Summary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::Message;

    fn request(session: Option<&str>, parent: Option<&str>, call: CallKind) -> Request {
        let mut request = Request::new("sonnet", vec![Message::user("x")]);
        if let Some(session) = session {
            request.session = TransportSession(session.to_owned());
        }
        request.parent = parent.map(|parent| TransportSession(parent.to_owned()));
        request.call = call;
        request
    }

    #[test]
    fn keys_are_as_the_pool_document_says() {
        use CallKind::{Advisor, Normal, SubAgent, Summary};
        let rows = [
            (Some("a"), None, Normal, "a"),
            (None, None, Normal, "default"),
            (Some("a"), None, Summary, "a"),
            (None, None, Summary, "default"),
            (Some("c"), Some("p"), Summary, "c"),
            (None, Some("p"), SubAgent, "p"),
            (Some("c"), Some("p"), SubAgent, "c"),
            (Some("a"), None, Advisor, "a-advisor|advisor"),
            (Some("c"), Some("p"), Advisor, "c-subagent-advisor|advisor"),
        ];
        for (session, parent, call, key) in rows {
            let key_of = Key::of(&request(session, parent, call));
            assert_eq!(key_of.as_str(), key);
            assert_eq!(key_of.is_advisor(), call == Advisor);
        }
    }

    #[test]
    fn a_summary_is_asked_of_the_process_of_its_conversation_and_has_a_key_beside_it() {
        for parent in [None, Some("p")] {
            let kind = match parent {
                Some(_) => CallKind::SubAgent,
                None => CallKind::Normal,
            };
            let normal = request(Some("a"), parent, kind);
            let summary = request(Some("a"), parent, CallKind::Summary);
            assert_eq!(Key::of(&summary), Key::of(&normal));
            assert_eq!(is_on_disk(&summary), is_on_disk(&normal));
            let own = Key::of(&summary).of_summary();
            assert_eq!(own.as_str(), "a|summary");
            assert!(own != Key::of(&normal) && !own.is_advisor());
        }
        assert!(!is_on_disk(&request(Some("a"), None, CallKind::Advisor)));
    }

    #[test]
    fn no_name_is_another_kinds_key() {
        let advisor = Key::of(&request(Some("a"), None, CallKind::Advisor));
        let named = Key::of(&request(Some(advisor.as_str()), None, CallKind::Normal));
        assert_ne!(advisor, named);
        assert!(!named.is_advisor());
        let of_sub_agent = Key::of(&request(Some("a"), Some("p"), CallKind::Advisor));
        let named = Key::of(&request(Some("a-subagent"), None, CallKind::Advisor));
        assert_eq!(of_sub_agent.as_str(), named.as_str());
        assert_ne!(of_sub_agent, named);
        assert_ne!(
            Key::of(&request(Some("a|summary"), None, CallKind::Normal)),
            Key::of(&request(Some("a"), None, CallKind::Normal)).of_summary()
        );
    }

    #[test]
    fn model_and_effort_are_no_part_of_a_key() {
        let mut other = request(Some("a"), None, CallKind::Normal);
        other.model = "opus".into();
        other.effort = Some(crate::request::Effort::High);
        assert_eq!(
            Key::of(&other),
            Key::of(&request(Some("a"), None, CallKind::Normal))
        );
    }

    #[test]
    fn only_the_parents_normal_calls_persist() {
        for call in [
            CallKind::Normal,
            CallKind::SubAgent,
            CallKind::Advisor,
            CallKind::Summary,
        ] {
            for parent in [None, Some("p")] {
                let wanted = call == CallKind::Normal && parent.is_none();
                assert_eq!(persists(&request(Some("a"), parent, call)), wanted);
            }
        }
    }
}
