//! What becomes of a process, and of the host's end, after an exchange.

use super::*;

impl Inner {
    /// What becomes of the process and of the host's end after an exchange.
    pub(super) async fn settle(
        &self,
        call: &mut Call<'_>,
        mut session: Session,
        held: &mut Held,
        turn_at: usize,
        how: &Plan,
        outcome: Outcome,
    ) -> Result<Step, Failed> {
        let upstream_requests = outcome.requests;
        if let Some(error) = &outcome.closes_pool {
            self.discard(call, session);
            self.stop(error);
            return Err(error.clone().into());
        }
        let whole = match outcome.ended {
            Ended::Relaunch(plugins) => {
                self.discard(call, session);
                return Err(Failed::Plugins(plugins));
            }
            Ended::Lost => {
                self.kill(call, session).await;
                return Ok(Step::Again { forget_state: true });
            }
            Ended::Failed(error) if outcome.kill => {
                self.kill(call, session).await;
                return Err(error.into());
            }
            Ended::Failed(error) => {
                let mut usable = leaves_it_usable(&error);
                if usable {
                    // The host need not wait for what is done about it.
                    call.events.fail(error.clone()).await;
                    usable = self.undone(&mut session, turn_at).await;
                }
                self.put_back(call, held, session, how, usable);
                return Err(error.into());
            }
            Ended::Cancelled if outcome.kill => {
                self.kill(call, session).await;
                return Ok(Step::Done);
            }
            Ended::Cancelled => {
                let usable = self.undone(&mut session, turn_at).await;
                self.put_back(call, held, session, how, usable);
                return Ok(Step::Done);
            }
            Ended::Whole(whole) => whole,
        };
        let mut usable = true;
        match whole.after {
            After::Over => {
                let at = whole.uuid.and_then(|uuid| Uuid::try_parse(&uuid).ok());
                session.record.push_answer(&whole.finished.message, at);
            }
            After::Parked => {
                session.record.push_answer(&whole.finished.message, None);
            }
            After::Undo => usable = self.undone(&mut session, turn_at).await,
            After::Kill => {
                // Its conversation can be taken up where the turn began.
                session.record.cut(turn_at);
                let state = self.state(call, &session, true);
                self.kill(call, session).await;
                return self
                    .tell_end(call, whole.finished, state, upstream_requests)
                    .await;
            }
        }
        let state = self.state(call, &session, usable);
        self.put_back(call, held, session, how, usable);
        self.tell_end(call, whole.finished, state, upstream_requests)
            .await
    }

    /// Tells the host its end.
    pub(super) async fn tell_end(
        &self,
        call: &mut Call<'_>,
        finished: Finished,
        state: StateOrder,
        upstream_requests: u32,
    ) -> Result<Step, Failed> {
        // A host that is gone needs no end.
        let _ = call
            .events
            .send(Event::Done(Done {
                stop: finished.stop,
                message: finished.message,
                usage: finished.usage,
                model: finished.model,
                state,
                upstream_requests,
                laboratory: self.laboratory,
            }))
            .await;
        Ok(Step::Done)
    }

    pub(super) fn state(&self, call: &Call<'_>, session: &Session, usable: bool) -> StateOrder {
        if !call.prepared.persists {
            return StateOrder::Unchanged;
        }
        let owner = Uuid::try_parse(session.cli_session())
            .ok()
            .map(|uuid| sync::Owner {
                session: uuid,
                transport_session: &call.prepared.request.session,
                model: &call.settings.model,
                fingerprint: call.settings.fingerprint(),
            });
        let state = owner
            .filter(|_| usable)
            .and_then(|owner| sync::encode(&session.record, &owner));
        state.map_or(StateOrder::Clear, |state| StateOrder::Keep { state })
    }

    /// Takes the turn back. False when the CLI's conversation is not known any more.
    pub(super) async fn undone(&self, session: &mut Session, turn_at: usize) -> bool {
        match session.undo().await {
            Ok(()) => {
                session.record.cut(turn_at);
                true
            }
            Err(error) => {
                tracing::debug!(code = %error.code(), "a turn could not be taken back");
                false
            }
        }
    }

    pub(super) fn put_back(
        &self,
        call: &Call<'_>,
        held: &mut Held,
        mut session: Session,
        how: &Plan,
        usable: bool,
    ) {
        if !usable || !session.is_alive() || self.stopped.get().is_some() {
            return self.discard(call, session);
        }
        session.lock_own(self.table.launcher.pool_dir.as_deref());
        // Once this conversation has what it needs: a start takes one core for a third of a second.
        self.table.keep_spare(&session.shape, session.ways.tools);
        let shown = session.shown(call.prepared.key.as_str()).plan(how);
        self.table.show(&call.prepared.key, Some(shown));
        **held = Some(session);
    }

    /// Ends a process at once and waits until it is gone, so that it surely asks nothing more.
    pub(super) async fn kill(&self, call: &Call<'_>, session: Session) {
        self.table.show(&call.prepared.key, None);
        // A process that cannot be killed is reported by its owner.
        let _ = session.end(EndPolicy::KILL).await;
    }

    pub(super) fn discard(&self, call: &Call<'_>, session: Session) {
        self.table.show(&call.prepared.key, None);
        self.table.discard(session);
    }

    /// Credits came into use: nothing is sent any more, by any process of this pool.
    pub(super) fn stop(&self, error: &Error) {
        let _ = self.stopped.set(error.clone());
        self.table.end_all();
    }
}

/// Whether a process may serve on after an error, once its turn is taken back.
pub(super) fn leaves_it_usable(error: &Error) -> bool {
    use ErrorCode as Code;
    !matches!(
        error.code(),
        Code::Auth
            | Code::ControlTimeout
            | Code::LineTooLong
            | Code::ProcessExit
            | Code::ProcessCleanup
            | Code::ProtocolBlocks
            | Code::ProtocolInit
            | Code::ProtocolOrder
            | Code::ProtocolRecord
            | Code::ProtocolResult
            | Code::ProtocolShape
            | Code::IsolationAuth
            | Code::IsolationCustomizations
            | Code::IsolationMcp
            | Code::IsolationPermissions
            | Code::IsolationTools
            | Code::McpStartup
            | Code::VersionIncompatible
    )
}
