//! The spare: a process that was told nothing yet, ahead of the next conversation.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::Table;
use crate::cli::places::Place;
use crate::error::{Error, Result};
use crate::pool::launcher::Shape;
use crate::pool::options::ToolCarrier;
use crate::pool::session::Session;
use crate::process::EndPolicy;

/// How often a spare that died at rest is made anew before a generation has ended well again: a CLI that always dies is not
/// started in a loop.
const SPARE_RENEWALS: u32 = 1;

/// A process that was told nothing yet.
#[derive(Debug)]
pub(super) enum Spare {
    Coming,
    Ready(Box<Session>, String),
}

impl Table {
    async fn program(&self) -> Result<String> {
        let found = self.launcher.installed.checked().await?;
        let path = found.executable.path.display();
        // A spare that was started before a plugin was learned has it.
        let learned = self.launcher.learned_plugins();
        Ok(format!("{path} {} {learned:?}", found.version))
    }

    pub(super) async fn take_spare(&self, shape: &Shape) -> Result<Option<Session>> {
        // One of another shape is kept for those that it fits.
        if !matches!(&*self.spare(), Some(Spare::Ready(session, _)) if session.shape == *shape) {
            return Ok(None);
        }
        let program = self.program().await?;
        // A success is kept for a while, so this asks nobody when the spare has just been started.
        self.launcher.installed.signed_in().await?;
        let taken = {
            let mut spare = self.spare();
            match spare.take() {
                Some(Spare::Ready(session, of)) => Some((session, of)),
                other => {
                    *spare = other;
                    None
                }
            }
        };
        let Some((session, of)) = taken else {
            return Ok(None);
        };
        if of == program && session.shape == *shape && session.is_alive() {
            return Ok(Some(*session));
        }
        self.end(*session);
        Ok(None)
    }

    /// Starts a process ahead of the next conversation, if the budget has a free place.
    pub(crate) fn keep_spare(self: &Arc<Self>, shape: &Shape, tools: ToolCarrier) {
        // A listener's tools are told to a process with its start, when nobody knows yet which they will be.
        if tools == ToolCarrier::Http {
            return;
        }
        self.make_spare(shape, SPARE_RENEWALS);
    }

    fn make_spare(self: &Arc<Self>, shape: &Shape, renewals: u32) {
        let ends = self.closing.is_cancelled() || self.halted.load(Ordering::Relaxed);
        if !self.keeps_spare || !shape.persists || ends {
            return;
        }
        // A conversation that waits for a place needs it more.
        let Ok(_nobody_waits) = self.makes_room.try_lock() else {
            return;
        };
        {
            let mut spare = self.spare();
            match &*spare {
                Some(Spare::Coming) => return,
                Some(Spare::Ready(session, _)) if session.shape == *shape => return,
                _ => {}
            }
            let Some(place) = self.places.take() else {
                return;
            };
            if let Some(Spare::Ready(session, _)) = spare.replace(Spare::Coming) {
                self.end(*session);
            }
            self.spawn_spare(shape.clone(), place, renewals);
        }
    }

    fn spawn_spare(self: &Arc<Self>, shape: Shape, place: Place, renewals: u32) {
        let (table, closing) = (Arc::clone(self), self.closing.clone());
        self.tasks.spawn(async move {
            let coming = Coming(&table);
            let made = async {
                let program = table.program().await?;
                let mut session = table
                    .launcher
                    .start(&shape, "spare", None, None, place)
                    .await?;
                session.warm_up().await?;
                Ok::<_, Error>((session, program))
            };
            let made = tokio::select! {
                () = closing.cancelled() => return,
                made = made => made,
            };
            match made {
                Ok((session, program)) => {
                    let death = session.death();
                    coming.ready(session, program);
                    table.watch_spare(death, shape, renewals);
                }
                // A spare that could not be made costs nobody anything: the next conversation starts its own process and
                // says what is wrong.
                Err(error) => tracing::debug!(code = %error.code(), "no spare process"),
            }
        });
    }

    /// Gives the place of a spare that dies at rest back at once, and makes another in it.
    fn watch_spare(
        self: &Arc<Self>,
        death: impl Future<Output = ()> + Send + 'static,
        shape: Shape,
        renewals: u32,
    ) {
        let weak = Arc::downgrade(self);
        // Ends with the process, as every process does, whoever has it by then.
        self.tasks.spawn(async move {
            death.await;
            let dead = weak
                .upgrade()
                .and_then(|table| table.take_ready_spare(|spare| !spare.is_alive()));
            let Some(dead) = dead else { return };
            // Bounded by the policy; its place is free after that. A pool that is dropped meanwhile is not kept for it.
            let _ = dead.end(EndPolicy::CANCEL).await;
            let Some(table) = weak.upgrade() else { return };
            if let Some(renewals) = renewals.checked_sub(1) {
                table.make_spare(&shape, renewals);
            }
        });
    }

    /// The spare, if it is one of these.
    pub(super) fn take_ready_spare(&self, is: impl Fn(&Session) -> bool) -> Option<Session> {
        let is = |spare: &mut Spare| matches!(spare, Spare::Ready(session, _) if is(session));
        match self.spare().take_if(is)? {
            Spare::Ready(session, _) => Some(*session),
            Spare::Coming => None,
        }
    }

    /// Ends the spare; one that is still coming sees that it is not wanted.
    pub(super) fn end_spare(&self) {
        let spare = self.spare().take();
        if let Some(Spare::Ready(session, _)) = spare {
            self.end(*session);
        }
    }

    fn spare(&self) -> MutexGuard<'_, Option<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A spare that is being made; forgotten however that ends.
struct Coming<'a>(&'a Table);

impl Coming<'_> {
    fn ready(self, session: Session, program: String) {
        let mut spare = self.0.spare();
        // A shutdown that has emptied the place would leave this one behind.
        if self.0.closing.is_cancelled() || self.0.halted.load(Ordering::Relaxed) {
            drop(spare);
            return self.0.end(session);
        }
        *spare = Some(Spare::Ready(Box::new(session), program));
        drop(spare);
        self.0.rests();
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        let mut spare = self.0.spare();
        if matches!(&*spare, Some(Spare::Coming)) {
            *spare = None;
        }
    }
}
