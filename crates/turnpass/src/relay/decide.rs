//! How the installed CLI is to be used for a request, and what the host is told of that.

use super::*;
use crate::certify::standing::extra_body_fails;

impl Inner {
    /// Where the tools travel, until the program is known: to find what is wrong with a request first.
    pub(super) fn likely(&self) -> ToolCarrier {
        let last = || self.last().map(|ways| ways.tools);
        self.asked.tools.or_else(last).unwrap_or_default()
    }

    pub(super) fn last(&self) -> Option<Ways> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which ways the request takes with the installed CLI, which may refuse it by the name of a check.
    pub(super) async fn decide(&self, prepared: &mut Prepared) -> Result<Decided> {
        let has_tools = !prepared.catalogue.is_empty();
        let decided = self.stable.decide(self.asked, has_tools).await?;
        if prepared.has_settings() && !decided.ways.extra_body {
            return Err(extra_body_fails());
        }
        prepared.carry(decided.ways.tools);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(decided.ways);
        Ok(decided)
    }

    pub(super) fn notices(&self, prepared: &Prepared, decided: &mut Decided) -> Vec<Notice> {
        let catalogue = Some(&prepared.catalogue).filter(|_| !decided.ways.long_descriptions);
        let cut = catalogue.and_then(notices::cut_descriptions);
        // Nothing of a laboratory run reaches the service, so there is nothing to certify or to charge.
        let first = !self.upstream.is_laboratory() && !self.warned.swap(true, Ordering::Relaxed);
        let mut all = notices::of(self.upstream.is_laboratory(), first, &prepared.changes);
        all.extend(decided.notice.take().into_iter().chain(cut));
        all
    }
}

/// What the request needs of a kept process.
pub(super) fn need(decided: &Decided, prepared: &Prepared, thinking: ThinkingDisplay) -> Need {
    let in_band = launcher::mcp(prepared);
    Need {
        key: Key {
            program: decided.program.clone(),
            thinking,
            has_system: !prepared.fit.system.is_empty(),
            in_band: in_band
                .map(|catalogue| catalogue.digest().to_string())
                .unwrap_or_default(),
        },
        fit: prepared.fit.clone(),
        session: prepared.session.clone(),
        in_band: in_band.cloned(),
    }
}
