//! Turns of the CLI: what begins one, what keeps it to one request, what takes it back.

use super::*;

impl Session {
    /// Lets the CLI send its next request: the host has spoken. Goes into the same pipe, before what it is to send.
    pub(crate) fn open_gate(&mut self) -> Result<()> {
        self.set_gate(GATE_OPEN)?;
        self.closing = None;
        Ok(())
    }

    /// From here on the CLI refuses by itself whatever it would send in this turn: it asks again after an answer that is
    /// cut, empty or refused, and after calls that it does not issue, within some 10 ms, and an interrupt comes too late in
    /// every fifth case (2.1.294, 2.1.310, 2.1.332; refused so, none of 36 tries a version).
    pub(crate) fn close_gate(&mut self) -> Result<()> {
        self.closing = self.set_gate(GATE_CLOSED)?;
        Ok(())
    }

    /// Whether the CLI has taken the closing, and is one that keeps to it. Before that a short answer may be followed by a request of its own.
    pub(crate) fn is_shut(&self) -> bool {
        self.ways.gate && self.gate == GATE_CLOSED && self.closing.is_none()
    }

    pub(super) fn set_gate(&mut self, tokens: &'static str) -> Result<Option<String>> {
        if self.gate == tokens {
            return Ok(self.closing.take());
        }
        let extra = self.fit.as_ref().map_or("{}", |fit| fit.extra.as_str());
        let settings = to_raw_value(&json!({
            "env": {"CLAUDE_CODE_EXTRA_BODY": extra, "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE": tokens},
        }));
        let settings =
            settings.map_err(|_| Error::new(ErrorCode::Internal, "settings are not JSON"))?;
        let id = self.next_control()?;
        let request = ControlRequest::ApplyFlagSettings {
            settings: &settings,
        };
        self.group
            .stdin()
            .write(control::control_request(&id, &request).into_bytes())?;
        self.gate = tokens;
        Ok(Some(id))
    }

    /// Writes the line that asks, after what has to come right before it. A turn runs from here on.
    pub(crate) fn ask(&mut self, lines: Vec<u8>, uuid: Uuid, turn_at: usize) -> Result<()> {
        // The first call may follow at once.
        self.pairing.begin();
        self.group.stdin().write(lines)?;
        self.turn_at = turn_at;
        self.line = Some(uuid.hyphenated().to_string());
        self.last_line.clone_from(&self.line);
        self.phase = Phase::Running;
        Ok(())
    }

    /// Writes a line that asks and belongs to the turn that was ended with results: to take it back is to take back that
    /// turn as well.
    pub(crate) fn ask_on(&mut self, line: Bytes, uuid: Uuid) -> Result<()> {
        self.pairing.begin();
        self.group.stdin().write(line)?;
        self.last_line = Some(uuid.hyphenated().to_string());
        self.phase = Phase::Running;
        Ok(())
    }

    /// Gives the CLI lines of the history that end with a user line, and waits until it has that.
    pub(crate) async fn tell(&mut self, lines: Vec<u8>) -> Result<()> {
        self.group.stdin().write(lines)?;
        let taken = async {
            loop {
                match self.next(None).await? {
                    Heard::Result(Verdict::Acknowledged) => return Ok(()),
                    Heard::Init { .. } if self.is_lost => return Err(lost()),
                    Heard::Init {
                        verdict: InitVerdict::Refused(error),
                        ..
                    } => return Err(error),
                    Heard::Init {
                        verdict: InitVerdict::BuiltinPlugins(plugins),
                        ..
                    } => {
                        self.slipped = Some(plugins);
                        let what = "a built-in plugin is active";
                        return Err(Error::new(ErrorCode::IsolationCustomizations, what));
                    }
                    Heard::Result(_) => {
                        let what = "the CLI did not take a message of the history as one";
                        return Err(Error::new(ErrorCode::ProtocolResult, what));
                    }
                    _ => {}
                }
            }
        };
        match tokio::time::timeout(FRAME_LIMIT, taken).await {
            Ok(taken) => taken,
            Err(_) => Err(late("take a message of the history", FRAME_LIMIT)),
        }
    }

    pub(super) fn turn_is_over(&mut self) {
        self.phase = Phase::Idle;
        for answer in self.pairing.close().answers {
            // The CLI ignores an answer to a call that it has given up (2.1.332); a closed pipe needs none.
            let _ = self.write_answer(&answer, false);
        }
    }

    /// Takes the running turn back: interrupts it, waits for its end, and removes everything from its first line on from
    /// the CLI's conversation.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong means that the CLI's conversation is not known any more: the process is to be ended.
    pub(crate) async fn undo(&mut self) -> Result<()> {
        let Some((line, last)) = self.line.clone().zip(self.last_line.clone()) else {
            return Ok(());
        };
        self.may_take_back()?;
        let began = self.end_turn(&last).await?;
        self.rewind_to(&line, &last, began).await
    }

    /// Takes a parked turn back, as the plan says, and the record with it.
    pub(crate) async fn rewind(&mut self, rewind: &sync::Rewind) -> Result<()> {
        self.may_take_back()?;
        let to = rewind.to.hyphenated().to_string();
        let last = self.last_line.clone().unwrap_or_else(|| to.clone());
        let began = self.end_turn(&last).await?;
        self.rewind_to(&to, &last, began).await?;
        self.record.cut(rewind.len);
        Ok(())
    }

    /// Whether the CLI takes a turn back that stands where this one does; some say so and do not.
    fn may_take_back(&self) -> Result<()> {
        let may = match self.phase {
            Phase::Running => self.ways.interrupts,
            Phase::Idle => self.ways.rewinds,
        };
        let what = "the installed CLI does not take a turn back";
        may.then_some(())
            .ok_or_else(|| Error::new(ErrorCode::VersionIncompatible, what))
    }

    /// Whether the turn had begun: a line that was taken out of the queue is nowhere in the conversation.
    pub(super) async fn end_turn(&mut self, line: &str) -> Result<bool> {
        match self.phase {
            Phase::Idle => Ok(true),
            Phase::Running => self.interrupt(line).await,
        }
    }

    pub(super) async fn rewind_to(
        &mut self,
        line: &str,
        last_seen: &str,
        began: bool,
    ) -> Result<()> {
        let rewind = ControlRequest::RewindConversation {
            target_message_uuid: line,
            last_seen_user_message_uuid: Some(last_seen),
        };
        let reply = self.control(&rewind).await?;
        let reply: RewindReply = serde_json::from_str(reply.get()).map_err(|_| {
            let what = "the CLI's answer to rewind_conversation has an unknown shape";
            Error::new(ErrorCode::ProtocolShape, what)
        })?;
        let was_never = !began && reply.reason.as_deref() == Some("target_not_found");
        match reply.rewound || was_never {
            true => Ok(()),
            false => Err(Error::new(
                ErrorCode::ProtocolResult,
                "the CLI did not take its last turn back",
            )),
        }
    }

    pub(super) async fn interrupt(&mut self, line: &str) -> Result<bool> {
        let id = self.next_control()?;
        let request = ControlRequest::Interrupt {
            cancel_queued: true,
        };
        self.group
            .stdin()
            .write(control::control_request(&id, &request).into_bytes())?;
        let ended = async {
            let mut began = true;
            while self.phase != Phase::Idle {
                match self.next(None).await? {
                    Heard::Cancelled { uuid } if uuid == line => {
                        began = false;
                        self.turn_is_over();
                    }
                    _ => {}
                }
            }
            Ok::<_, Error>(began)
        };
        let began = tokio::time::timeout(INTERRUPT_LIMIT, ended)
            .await
            .map_err(|_| late("end an interrupted turn", INTERRUPT_LIMIT))??;
        self.asked.remove(&id);
        Ok(began)
    }
}
