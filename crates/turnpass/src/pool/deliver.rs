//! What a process is told: messages of the history, results of tools, the line that asks.

use super::*;

impl Inner {
    /// Gives the process what it does not have yet. Returns the entry of the record at which the turn began. What fails here
    /// has not been asked.
    pub(super) async fn deliver(
        &self,
        call: &Call<'_>,
        session: &mut Session,
        deliver: Deliver,
        ticket: &Ticket,
    ) -> Result<usize> {
        let delivered = self.hand_over(call, session, deliver, ticket).await;
        if delivered.is_err() {
            ticket.not_sent();
        }
        delivered
    }

    async fn hand_over(
        &self,
        call: &Call<'_>,
        session: &mut Session,
        deliver: Deliver,
        ticket: &Ticket,
    ) -> Result<usize> {
        let messages = &call.prepared.history.messages;
        let from = match deliver {
            Deliver::Answers => {
                let last = messages.last().ok_or_else(nothing_to_say)?;
                if session.ways.long_results || !has_long_result(last) {
                    answer(session, last, ticket).await?;
                    return Ok(session.turn_at);
                }
                take_back(session).await?
            }
            Deliver::AnswersThenText => {
                let last = messages.last().ok_or_else(nothing_to_say)?;
                let results: Vec<_> = last
                    .content
                    .iter()
                    .filter_map(|block| as_result(block))
                    .collect();
                let whole = session.ways.long_results || !has_long_result(last);
                if whole && session.ways.ends_turns && session.can_end_with(&results)? {
                    return end_with(session, last, &results, ticket).await;
                }
                // A line while calls are open would get the CLI's own words around it.
                take_back(session).await?
            }
            Deliver::Messages { from } => from,
        };
        let start = call.started + call.prepared.limits.start;
        let rest = &messages[from..];
        if rest.len() > 1 && !session.takes_frames() {
            return tell_as_one(session, rest, ticket);
        }
        let told = tokio::time::timeout_at(start, tell(session, rest, ticket));
        told.await.map_err(|_| {
            let limit = call.prepared.limits.start.as_secs_f32();
            let what = format!("the CLI did not take the history within {limit} s");
            Error::new(ErrorCode::StartTimeout, what)
        })?
    }
}

/// Takes the turn back whose calls are open, so that it is told anew with its results. Returns where it began.
async fn take_back(session: &mut Session) -> Result<usize> {
    let turn_at = session.turn_at;
    // A process whose turn cannot be taken back is as good as gone: nothing was sent.
    let gone = |error: Error| Error::new(ErrorCode::ProcessExit, error.detail().to_owned());
    session.undo().await.map_err(gone)?;
    session.record.cut(turn_at);
    Ok(turn_at)
}

/// Characters of a result from which on a CLI that does not pass `result_whole` puts a stub in its place (2.1.283 to 2.1.332
/// without the annotation of a tool that lifts it).
const LONG_RESULT_CHARS: usize = 50_000;

/// Whether a result of the message may not arrive whole.
fn has_long_result(message: &Sendable<'_>) -> bool {
    let results = message.content.iter().filter_map(|block| as_result(block));
    let mut texts = results.map(|result| {
        let parts = result.content.iter().map(|part| match part {
            ResultBlock::Text { text } => text.len(),
            _ => 0,
        });
        // Bytes are no fewer than characters, and counting them is free.
        parts.sum::<usize>()
    });
    texts.any(|bytes| bytes > LONG_RESULT_CHARS)
}

/// Answers the open calls with the results of a message.
pub(super) async fn answer(
    session: &mut Session,
    message: &Sendable<'_>,
    ticket: &Ticket,
) -> Result<()> {
    session.open_gate()?;
    session.before_answers().await?;
    ticket.sending()?;
    session.record.push(message, None);
    for block in &message.content {
        if let Block::ToolResult(result) = &**block {
            session.answer(result.clone())?;
        }
    }
    Ok(())
}

pub(super) fn as_result(block: &Block) -> Option<&ToolResult> {
    match block {
        Block::ToolResult(result) => Some(result),
        _ => None,
    }
}

/// Answers the open calls, which ends the CLI's turn, and asks with what stands beside the results.
pub(super) async fn end_with(
    session: &mut Session,
    message: &Sendable<'_>,
    results: &[&ToolResult],
    ticket: &Ticket,
) -> Result<usize> {
    session.answer_and_end(results)?;
    session.after_last_answers().await?;
    let turn_at = session.turn_at;
    let content = message.content.iter();
    let rest = Sendable {
        role: message.role,
        content: content
            .filter(|block| as_result(block).is_none())
            .cloned()
            .collect(),
    };
    let uuid = Uuid::new_v4();
    let id = uuid.hyphenated().to_string();
    let stamp = Stamp {
        id: &id,
        model: session.model(),
        mark: None,
    };
    let line = frames::frame(&rest, Kind::Asks, &stamp)?.line;
    session.open_gate()?;
    // The turn that is taken back, if need be, is the one that began before the calls: a rewind to this line alone would
    // leave their results.
    ticket.sending()?;
    session.ask_on(line.into_bytes(), uuid)?;
    session.record.push(message, None);
    Ok(turn_at)
}

/// Tells a process messages of the history and asks the last one. Returns the entry of the one that asks.
pub(super) async fn tell(
    session: &mut Session,
    messages: &[Sendable<'_>],
    ticket: &Ticket,
) -> Result<usize> {
    let (last, history) = messages.split_last().ok_or_else(nothing_to_say)?;
    // An assistant message is taken the moment it is read, while user lines wait for their turn: it goes together with
    // the line that follows it, once the line before it is confirmed (2.1.294, 2.1.310, 2.1.332).
    let mut with_next = Vec::new();
    for message in history {
        let uuid = Uuid::new_v4();
        let id = uuid.hyphenated().to_string();
        let stamp = Stamp {
            id: &id,
            model: session.model(),
            mark: None,
        };
        let bare = (!session.ways.thinking).then(|| without_thinking(message));
        let told = bare.as_ref().unwrap_or(message);
        let line = frames::frame(told, Kind::History, &stamp)?.line;
        with_next.extend_from_slice(line.as_bytes());
        session.record.push(message, Some(uuid));
        if message.role == Role::Assistant {
            session.record.resume_after(uuid);
        } else {
            session.tell(std::mem::take(&mut with_next)).await?;
        }
    }
    let uuid = Uuid::new_v4();
    let id = uuid.hyphenated().to_string();
    let stamp = Stamp {
        id: &id,
        model: session.model(),
        mark: None,
    };
    let line = frames::frame(last, Kind::Asks, &stamp)?.line;
    with_next.extend_from_slice(line.as_bytes());
    let turn_at = session.record.len();
    session.open_gate()?;
    ticket.sending()?;
    session.ask(with_next, uuid, turn_at)?;
    session.record.push(last, Some(uuid));
    Ok(turn_at)
}

/// A message for a CLI that does not keep the signatures of thinking. What is nothing but thinking was left out before.
fn without_thinking<'a>(message: &Sendable<'a>) -> Sendable<'a> {
    let thinks = |block: &Block| matches!(block, Block::Thinking(_) | Block::RedactedThinking(_));
    let content = message.content.iter();
    Sendable {
        role: message.role,
        content: content.filter(|block| !thinks(block)).cloned().collect(),
    }
}

/// Asks with one message that tells all of these. To take its turn back is to take all of them back.
pub(super) fn tell_as_one(
    session: &mut Session,
    messages: &[Sendable<'_>],
    ticket: &Ticket,
) -> Result<usize> {
    let uuid = Uuid::new_v4();
    let id = uuid.hyphenated().to_string();
    let stamp = Stamp {
        id: &id,
        model: session.model(),
        mark: None,
    };
    let one = transcript::message(messages);
    let line = frames::frame(&one, Kind::Asks, &stamp)?.line;
    let turn_at = session.record.len();
    session.open_gate()?;
    ticket.sending()?;
    session.ask(line.into_bytes().into(), uuid, turn_at)?;
    for (n, message) in messages.iter().enumerate() {
        session.record.push(message, (n == 0).then_some(uuid));
    }
    Ok(turn_at)
}

pub(super) fn nothing_to_say() -> Error {
    Error::new(
        ErrorCode::RequestInvalid,
        "messages: there is nothing to answer",
    )
}
