//! The step `post`: a request to the upstream, and its reply as records.

use serde_json::{Value, json};

use super::emulator::state::State;
use super::emulator::{self, Ended, Forward, Out, Outcome};
use super::http::{Answer, Ask, Base};
use super::player::{End, Player};
use super::script::{Post, Reply};
use super::sse::SseParser;
use super::template;

impl Player {
    pub(super) async fn post(&mut self, post: &Post, number: usize) -> Result<(), End> {
        let (base, ask) = {
            let state = self.state.borrow();
            let url = state.env("ANTHROPIC_BASE_URL").unwrap_or_default();
            let base = Base::parse(&url).map_err(|error| self.mismatch(number, &error))?;
            (base, self.ask(post, &state))
        };
        let answer = match self.client.send(&base, &ask).await {
            Ok(answer) => answer,
            Err(error) => {
                self.context
                    .recorder
                    .note("post", json!({"path": ask.path, "error": error}));
                if post.expect_status.is_some() {
                    return Err(self.mismatch(number, &error));
                }
                return Ok(());
            }
        };
        self.context
            .recorder
            .note("post", json!({"path": ask.path, "status": answer.status}));
        if let Some(wanted) = post.expect_status
            && wanted != answer.status
        {
            return Err(self.mismatch(
                number,
                &format!("expected status {wanted}, but got {}", answer.status),
            ));
        }
        self.take_reply(post.reply, answer).await
    }

    fn ask(&self, post: &Post, state: &State) -> Ask {
        let method = post.method.clone().unwrap_or_else(|| "POST".to_owned());
        let mut headers = emulator::headers(state);
        for (name, value) in &post.headers {
            headers.retain(|(other, _)| !other.eq_ignore_ascii_case(name));
            if let Value::String(text) = template::fill(value, &self.scope) {
                headers.push((name.clone(), text));
            }
        }
        let body = match &post.body {
            Some(body) => template::fill(body, &self.scope),
            None => emulator::body(state),
        };
        let empty = method != "POST" && post.body.is_none();
        Ask {
            path: post
                .path
                .clone()
                .unwrap_or_else(|| emulator::MESSAGES_PATH.to_owned()),
            body: if empty {
                Vec::new()
            } else {
                body.to_string().into_bytes()
            },
            method,
            headers,
        }
    }

    async fn take_reply(&mut self, reply: Reply, mut answer: Answer) -> Result<(), End> {
        match reply {
            Reply::Cut => {
                self.client.close();
                drop(answer);
            }
            Reply::Hold => self.held.push(answer),
            Reply::Ignore => {
                let _ = answer.bytes().await;
            }
            Reply::Forward | Reply::ForwardNoResult => return self.forward(reply, answer).await,
        }
        Ok(())
    }

    async fn forward(&mut self, reply: Reply, mut answer: Answer) -> Result<(), End> {
        let session = self.state.borrow().session_id.clone();
        let request_id = answer.header("request-id").map(str::to_owned);
        let mut forward = Forward::new(&session, true, request_id);
        let mut events = SseParser::default();
        let mut outcome = Outcome::new(None);
        outcome.num_turns = 1;
        if answer.status >= 300 {
            let status = answer.status;
            let bytes = answer.bytes().await.unwrap_or_default();
            self.fail(&mut outcome, emulator::failure_of_status(status, &bytes))
                .await?;
        } else {
            while let Ok(Some(piece)) = answer.chunk().await {
                for event in events.push(&piece) {
                    let event = event.json();
                    for out in forward.event(&event) {
                        if let Out::Record(record) = out {
                            self.record(&record).await?;
                        }
                    }
                }
            }
            if forward.ended() != Ended::Whole {
                let failure = emulator::failure_of_connection("StreamTruncated");
                self.fail(&mut outcome, failure).await?;
            }
            outcome.stop_reason = forward.stop_reason.clone();
            outcome.usage.add(&forward.usage);
            outcome
                .begun
                .extend(forward.message_id().map(str::to_owned));
            if outcome.failure.is_none() {
                outcome.result = Some(forward.last_text());
            }
        }
        if reply == Reply::Forward {
            let record = emulator::result(&self.state.borrow(), &mut self.totals, &outcome);
            self.record(&record).await?;
        }
        Ok(())
    }

    async fn fail(&mut self, outcome: &mut Outcome, failure: emulator::Failure) -> Result<(), End> {
        let record = emulator::synthetic(&self.state.borrow(), &failure);
        self.record(&record).await?;
        outcome.is_error = true;
        outcome.terminal_reason = failure.terminal_reason;
        outcome.result = Some(failure.text.clone());
        outcome.failure = Some(failure);
        Ok(())
    }
}
