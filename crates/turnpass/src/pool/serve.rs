//! One try of a request: plan, process, gate, delivery, exchange.

use super::*;

impl Inner {
    /// One try: plan, process, gate, delivery, exchange.
    pub(super) async fn serve(
        &self,
        call: &mut Call<'_>,
        held: &mut Held,
        given: Option<&Given>,
    ) -> Result<Step, Failed> {
        let prepared = call.prepared;
        if let Some(dead) = held.take_if(|session| !session.is_alive()) {
            self.table.show(&prepared.key, None);
            self.table.discard(dead);
        }
        self.decide(call, held.as_ref()).await?;
        let lock = self.lock(held, given);
        let plan = self.plan(call, held, given, lock.is_some());
        tracing::debug!(key = prepared.key.as_str(), plan = ?plan.kind, reason = %plan.reason, "planned");
        let is_live = matches!(plan.base, Base::Live { .. });
        let takes_up = matches!(plan.base, Base::Resume { .. } | Base::Fork { .. });
        let mut session = match self.process(call, held, &plan, given, lock).await {
            Ok(Some(session)) => session,
            Ok(None) => {
                return Ok(Step::Again {
                    forget_state: false,
                });
            }
            // A CLI that does not have the stored conversation ends before it lists the tools (2.1.294 to 2.1.332).
            Err(Failed::Error(error))
                if error.code() == ErrorCode::ProcessExit && (is_live || takes_up) =>
            {
                return Ok(Step::Again {
                    forget_state: takes_up,
                });
            }
            Err(failed) => return Err(failed),
        };
        if call.cancelled.is_cancelled() {
            // Nothing was said to it yet.
            **held = Some(session);
            return Err(Failed::Cancelled);
        }
        let how = plan.told();
        let shown = |session: &Session| session.shown(prepared.key.as_str()).plan(&how);
        self.table
            .show(&prepared.key, Some(shown(&session).running()));
        let gate = match self.stopped.get() {
            Some(error) => Err(error.clone()),
            None => self.gate(call, &mut session).await,
        };
        let ticket = match gate {
            Ok(ticket) => ticket,
            Err(error) => {
                // Nothing was written, so the conversation is as it was, unless the process itself failed.
                match leaves_it_usable(&error) {
                    true => {
                        self.table.show(&prepared.key, Some(shown(&session)));
                        **held = Some(session);
                    }
                    false => self.discard(call, session),
                }
                return Err(error.into());
            }
        };
        let delivered = self.deliver(call, &mut session, plan.deliver, &ticket);
        let turn_at = match unless_cancelled(call, delivered).await {
            Some(Ok(turn_at)) => turn_at,
            // What it was told of the history until now is not known.
            None => {
                self.discard(call, session);
                return Err(Failed::Cancelled);
            }
            Some(Err(error)) => {
                let gone = error.code() == ErrorCode::ProcessExit;
                let plugins = session.slipped_through();
                let error = session.explained(error).await;
                self.discard(call, session);
                if let Some(plugins) = plugins {
                    return Err(Failed::Plugins(plugins));
                }
                return match gone && (is_live || takes_up) {
                    true => Ok(Step::Again {
                        forget_state: takes_up,
                    }),
                    false => Err(error.into()),
                };
            }
        };
        let outcome = Exchange::new(
            &mut session,
            call.events,
            &ticket,
            (prepared.limits, call.started),
            || prepared.tool_names(),
            how.clone(),
        )
        .run()
        .await;
        let silent = outcome.is_silent;
        session.generations += 1;
        let result = self
            .settle(call, session, held, turn_at, &how, outcome)
            .await;
        match result {
            // It died while nobody needed it, or could not take the stored conversation up: no failure of this request.
            Err(Failed::Error(error))
                if error.code() == ErrorCode::ProcessExit && silent && (is_live || takes_up) =>
            {
                Ok(Step::Again {
                    forget_state: takes_up,
                })
            }
            other => other,
        }
    }

    /// Which ways the request takes: those of the live process, else those of the installed CLI, which may refuse it by the
    /// name of a check. A live process costs no look at the program.
    pub(super) async fn decide(
        &self,
        call: &mut Call<'_>,
        live: Option<&Session>,
    ) -> Result<(), Failed> {
        let prepared = call.prepared;
        let ways = match live {
            Some(live) => live.ways,
            None => {
                let ways = within_start(call, self.table.launcher.ways());
                let (ways, notice) = unless_cancelled(call, ways)
                    .await
                    .ok_or(Failed::Cancelled)???;
                let catalogue = Some(&prepared.catalogue).filter(|_| !ways.long_descriptions);
                let cut = catalogue.and_then(notices::cut_descriptions);
                for notice in notice.into_iter().chain(cut) {
                    // A host that is gone is noticed later.
                    let _ = call.events.try_send(Event::Notice(notice));
                }
                ways
            }
        };
        ways.check_extra_body(prepared.has_extra)?;
        call.settings = prepared.settings(&ways);
        call.ways = ways;
        Ok(())
    }

    /// The lock of the stored conversation, when it may be resumed.
    pub(super) fn lock(&self, held: &Held, given: Option<&Given>) -> Option<SessionLock> {
        let Some(Ok(stored)) = given.filter(|_| held.is_none()) else {
            return None;
        };
        let dir = self.table.launcher.pool_dir.as_deref()?;
        SessionLock::take(dir, &stored.session.hyphenated().to_string())
    }

    pub(super) fn plan(
        &self,
        call: &mut Call<'_>,
        held: &Held,
        given: Option<&Given>,
        lock_held: bool,
    ) -> sync::Plan {
        let prepared = call.prepared;
        let live = held.as_ref();
        let awaited = live.map(Session::awaited).unwrap_or_default();
        let parked = live
            .filter(|session| session.phase() != Phase::Idle)
            .map(|session| sync::Parked {
                awaited: &awaited,
                turn: session.turn_at,
            });
        if let Some(session) = live
            && session.serves(&prepared.request.model)
            && let Some(settings) = &session.settings
        {
            // An alias and its full id are the same model.
            call.settings.model = settings.model.clone();
        }
        let live = live.and_then(|session| {
            Some(sync::Live {
                record: &session.record,
                settings: session.settings.as_ref()?,
                session: Uuid::try_parse(session.cli_session())
                    .ok()
                    .filter(|_| session.shape.persists),
                parked,
            })
        });
        sync::plan(
            live.as_ref(),
            given,
            &sync::Asked {
                transport_session: &prepared.request.session,
                messages: &prepared.history.messages,
                settings: &call.settings,
                keeps_state: prepared.persists,
                lock_held,
                resumes: call.ways.resumes,
                forks: call.ways.forks,
            },
        )
    }

    /// The process that the plan asks for, set up. `None` when the live one is of no use after all.
    pub(super) async fn process(
        &self,
        call: &mut Call<'_>,
        held: &mut Held,
        plan: &sync::Plan,
        given: Option<&Given>,
        lock: Option<SessionLock>,
    ) -> Result<Option<Session>, Failed> {
        let prepared = call.prepared;
        let messages = &prepared.history.messages;
        let (stored, record) = match &plan.base {
            Base::Live { rewind, .. } => {
                let Some(mut session) = held.take() else {
                    return Ok(None);
                };
                if let Some(rewind) = rewind {
                    let undone = session.rewind(rewind).await;
                    if let Err(error) = undone {
                        tracing::debug!(code = %error.code(), "the live process could not be rewound");
                        self.discard(call, session);
                        return Ok(None);
                    }
                }
                if let Err(error) = session.set(&prepared.fit, &prepared.catalogue) {
                    tracing::debug!(code = %error.code(), "the live process takes no settings");
                    self.discard(call, session);
                    return Ok(None);
                }
                session.settings = Some(call.settings.clone());
                return Ok(Some(session));
            }
            Base::Resume { session, at } => (Some((session, at, lock)), {
                let stored = given.and_then(|given| given.as_ref().ok());
                stored.map(|stored| stored.adopt(messages))
            }),
            Base::Fork { session, at } => {
                let of_live = held
                    .as_ref()
                    .filter(|live| live.cli_session() == session.hyphenated().to_string())
                    .and_then(|live| Some(live.record.fork(live.record.point()?.len)));
                let of_state = || {
                    let stored = given.and_then(|given| given.as_ref().ok())?;
                    Some(stored.adopt(messages).fork(stored.point.len))
                };
                (Some((session, at, None)), of_live.or_else(of_state))
            }
            Base::Reseed => (None, None),
        };
        if let Some(old) = held.take() {
            self.table.show(&prepared.key, None);
            self.table.end(old);
        }
        let names = stored.map(|(session, at, lock)| {
            (
                session.hyphenated().to_string(),
                at.hyphenated().to_string(),
                lock,
            )
        });
        let (ids, lock) = match names {
            Some((session, at, lock)) => (Some((session, at)), lock),
            None => (None, None),
        };
        let stored = ids.as_ref().map(|(session, at)| Stored {
            session,
            at,
            model: &prepared.fit.model,
            lock,
        });
        let (tools, shape) = (&prepared.catalogue, prepared.shape(&call.ways));
        let start = self.table.start(&shape, &prepared.key, tools, stored);
        let starts = unless_cancelled(call, within_start(call, start));
        let mut session = starts.await.ok_or(Failed::Cancelled)???;
        self.table.watch(&prepared.key, &session);
        session.record = record.unwrap_or_default();
        if let Err(error) = session.set(&prepared.fit, &prepared.catalogue) {
            return Err(session.explained(error).await.into());
        }
        session.settings = Some(call.settings.clone());
        let checked = within_start(call, session.check_tools(&prepared.catalogue));
        let checked = unless_cancelled(call, checked);
        checked.await.ok_or(Failed::Cancelled)???;
        Ok(Some(session))
    }

    /// Asks the process whether the message may be sent, and counts it.
    pub(super) async fn gate(&self, call: &Call<'_>, session: &mut Session) -> Result<Ticket> {
        let running = Running(tokio::sync::Mutex::new(session));
        let asked = Asked::of(call.prepared.request);
        let notifier = call.events.notifier();
        self.guard
            .before_on(asked, notifier, &call.cancelled, Some(&running))
            .await
    }
}

/// A process that is asked while nothing else is said to it.
struct Running<'a>(tokio::sync::Mutex<&'a mut Session>);

impl UsageSource for Running<'_> {
    fn get_usage(&self) -> BoxFuture<'_, Result<String, SourceFault>> {
        Box::pin(async {
            let mut session = self.0.lock().await;
            let ask = ControlRequest::GetUsage {
                skip_behaviors: true,
            };
            match session.control(&ask).await {
                Ok(answer) => Ok(answer.get().to_owned()),
                Err(error) if error.code() == ErrorCode::VersionIncompatible => {
                    Err(SourceFault::Refused)
                }
                Err(error) => Err(SourceFault::Gone(error)),
            }
        })
    }
}
