//! What ends a message, a turn, or both.

use super::*;

impl Exchange<'_> {
    /// With its stop reason a message is whole. A short one can be faster than the closing of the gate.
    pub(super) fn before_it_goes_on(&mut self) -> Result<Option<Ended>> {
        let turn = self.answer.turn();
        let may_go_on = turn.stop_reason().is_some()
            && !turn.is_stopped()
            && goes_on(turn, self.session.ways.refused_once);
        // The closed gate keeps back what the CLI asks after a cut; of a refusal nobody has seen that.
        let refused = matches!(turn.stop_reason(), Some(StopReason::Refusal { .. }));
        if !may_go_on || (self.session.is_shut() && !refused) {
            return Ok(None);
        }
        self.answer.event(&StreamEvent::MessageStop)?;
        self.queue.extend(self.answer.out.drain(..));
        match self.answer.finish() {
            Some(finished) => Ok(Some(self.release(finished, After::Kill))),
            None => Err(interrupted("the answer ended without its token counts")),
        }
    }

    pub(super) fn message_stop(&mut self) -> Result<Option<Ended>> {
        self.queue.extend(self.answer.out.drain(..));
        let Some(finished) = self.answer.finish() else {
            return Err(interrupted("the answer ended without its token counts"));
        };
        if !self.session.is_isolated() {
            let what = "the CLI answered before it said what it loaded";
            return Err(Error::new(ErrorCode::ProtocolInit, what));
        }
        if finished.has_calls() {
            let rejected = |event: &Event| matches!(event, Event::ToolRejected { .. });
            let after = match finished.stop {
                StopReason::ToolUse if !finished.suffix.iter().any(rejected) => After::Parked,
                // The CLI answers what it does not issue itself, in its own words; the host is to answer.
                _ if self.session.is_shut() => After::Undo,
                _ => After::Kill,
            };
            return Ok(Some(self.release(finished, after)));
        }
        self.whole = Some(Instant::now());
        self.finished = Some(finished);
        Ok(None)
    }

    pub(super) fn release(&mut self, mut finished: Finished, after: After) -> Ended {
        if self.refuses_calls && finished.has_calls() {
            // With the calls answered it would ask again, unless it is not let.
            self.kill = !self.session.is_shut();
            let what = "the model called a tool in place of writing the summary";
            return Ended::Failed(Error::new(ErrorCode::SummaryToolCall, what));
        }
        if after == After::Parked {
            self.session.announce(&self.answer.calls());
        }
        self.kill |= after == After::Kill;
        self.queue.extend(finished.suffix.drain(..));
        Ended::Whole(Box::new(Whole {
            uuid: self.answer.uuid().map(str::to_owned),
            finished,
            after,
        }))
    }

    /// The CLI asks another model. What was said until now no longer counts; and when nothing was said, the model that
    /// the host asked for is not to be had, and no other is taken for it.
    pub(super) fn fell_back(&mut self) -> Result<Option<Ended>> {
        self.requests += 1;
        let reason = "the CLI went over to another model".to_owned();
        if !self.answer.turn().has_begun() {
            return Err(Error::new(ErrorCode::ModelNotFound, reason));
        }
        self.was_seen |= self.answer.turn().output_seen();
        self.is_guarded = false;
        self.finished = None;
        self.whole = None;
        self.session.open_gate()?;
        self.progress = Some(Instant::now());
        self.queue.push_back(Event::Retracted {
            reason: reason.clone(),
        });
        let how = Plan {
            kind: PlanKind::Continued,
            reason,
        };
        self.answer = Answer::new((self.names)(), how);
        Ok(None)
    }

    pub(super) fn limited(&mut self, signal: &Signal) -> Result<Option<Ended>> {
        match self.ticket.signalled(signal) {
            Reaction::Go => {}
            Reaction::Tell(notice) => self.queue.push_back(Event::Notice(notice)),
            Reaction::End {
                error,
                closes_pool: true,
            } => {
                self.closes_pool = Some(error.clone());
                return Err(error);
            }
            // The end of the turn says whether it failed for that.
            Reaction::End { error, .. } => self.limit = Some(error),
        }
        Ok(None)
    }

    pub(super) fn result(&mut self, verdict: Verdict) -> Result<Option<Ended>> {
        match verdict {
            Verdict::Acknowledged => Ok(None),
            Verdict::Completed | Verdict::MaxTurns => {
                self.answer.turn_is_over()?;
                self.queue.extend(self.answer.out.drain(..));
                match self.finished.take().or_else(|| self.answer.finish()) {
                    Some(finished) => Ok(Some(self.release(finished, After::Over))),
                    None => Err(Error::new(
                        ErrorCode::ProtocolResult,
                        "the CLI ended its turn without an answer",
                    )),
                }
            }
            Verdict::Failed(failure) => match self.finished.take() {
                Some(finished) if is_of_a_whole_answer(&failure, &finished.stop) => {
                    Ok(Some(self.release(finished, After::Undo)))
                }
                // Any mark of a failure is one (bug 46), also behind an answer that looks whole.
                _ => Err(self.failed(&failure)),
            },
            _ => Err(Error::new(
                ErrorCode::ProcessExit,
                "the CLI broke its turn off",
            )),
        }
    }
}
