//! One turn: requests until there is nothing more to do, each reply forwarded as records.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};

use super::calls::Calls;
use super::failure::{self, Policy};
use super::faults::Fault;
use super::forward::{Ended, Forward, Out};
use super::records::{self, Failure, Outcome, Totals};
use super::state::{PublishedTool, State, fresh_uuid};
use super::stops::{fail, give_up, is_over_budget, max_turns, over_budget, refusal};
use super::{body, models};
use crate::cli::http::{Answer, Ask, Base, Client};
use crate::cli::pipes::Output;
use crate::cli::sse::SseParser;

/// How often the real CLI goes on by itself in one turn before it gives up: measured on 2.1.332.
const FOLLOW_UPS: u64 = 3;

/// From a message to the request that the real CLI makes by itself: 6 to 12 ms on 2.1.332. A host that closes its gate
/// within that time is waited for here however slow the machine is, up to a bound.
const GOES_ON_AFTER: Duration = Duration::from_millis(6);
const GATE_WAIT: Duration = Duration::from_secs(5);

/// What the parts of a process share.
pub(crate) struct Shared {
    pub(crate) state: RefCell<State>,
    pub(crate) output: Output,
    pub(crate) client: RefCell<Option<Client>>,
    pub(crate) totals: RefCell<Totals>,
    pub(crate) last_limit: RefCell<Value>,
    pub(crate) progress: RefCell<Progress>,
}

/// How far the running turn has come; an interrupt reads it.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) forward: Option<Forward>,
    pub(crate) outcome: Option<Outcome>,
    /// Calls without a result yet.
    pub(crate) calls: Vec<(String, PublishedTool)>,
    /// The reply of the running request already stands in the history.
    pub(crate) stored: bool,
    /// A result of a tool said that the turn ends with it.
    pub(crate) ended_by_result: bool,
}

enum Reply {
    Whole,
    /// Go on by itself, saying this.
    Continue(&'static str),
    Failed(Failure),
}

impl Shared {
    pub(crate) fn say(&self, record: &Value) {
        self.output.record(record);
    }

    pub(crate) fn with_outcome<T>(&self, act: impl FnOnce(&mut Outcome) -> T) -> T {
        let mut progress = self.progress.borrow_mut();
        act(progress.outcome.get_or_insert_with(|| Outcome::new(None)))
    }

    /// Writes the result record and says whether the turn counts as an error for the exit code.
    pub(crate) fn finish(&self) -> bool {
        let progress = std::mem::take(&mut *self.progress.borrow_mut());
        let outcome = progress.outcome.unwrap_or_else(|| Outcome::new(None));
        let state = self.state.borrow();
        let record = records::result(&state, &mut self.totals.borrow_mut(), &outcome);
        match state.flags.output_format() {
            "json" => self.say(&record),
            "stream-json" => self.say(&record),
            _ => {
                let text = outcome
                    .result
                    .clone()
                    .unwrap_or_else(|| outcome.errors.join("\n"));
                self.output.bytes(format!("{text}\n").into_bytes());
            }
        }
        outcome.is_error
    }
}

/// Runs a turn whose user message already stands in the history. Dropping it closes the request.
pub(crate) async fn run(shared: Rc<Shared>, user_uuid: Option<String>) {
    shared.state.borrow_mut().asked = true;
    let limit = shared.state.borrow().flags.max_turns();
    let mut requests = 0;
    let mut follow_ups = 0;
    let mut nudged = false;
    shared.with_outcome(|outcome| outcome.num_turns = 1);
    loop {
        if is_blocked(&shared.state.borrow()) {
            fail(
                &shared,
                Failure {
                    error: "invalid_request",
                    text: "Prompt is too long".to_owned(),
                    terminal_reason: "blocking_limit",
                    ..Failure::default()
                },
            );
            return;
        }
        requests += 1;
        say_streaming(&shared, |state| {
            records::status(state, user_uuid.as_deref())
        });
        let (reply, results) = generation(&shared).await;
        if !matches!(reply, Reply::Failed(_)) && is_over_budget(&shared.state.borrow()) {
            over_budget(&shared);
            return;
        }
        match reply {
            Reply::Failed(failure) => {
                fail(&shared, failure);
                return;
            }
            Reply::Continue(why) => {
                let again = if why == EMPTY {
                    !nudged
                } else {
                    follow_ups < FOLLOW_UPS
                };
                if !again {
                    give_up(&shared, why);
                    return;
                }
                nudged |= why == EMPTY;
                follow_ups += u64::from(why != EMPTY);
                shared.with_outcome(|outcome| outcome.num_turns += 1);
                go_on(&shared, why);
                // What it is told meanwhile holds for the request.
                told_meanwhile(&shared).await;
            }
            Reply::Whole => {
                if results.is_empty() {
                    return;
                }
                if std::mem::take(&mut shared.progress.borrow_mut().ended_by_result) {
                    return;
                }
                if let Some(limit) = limit.filter(|limit| requests >= *limit) {
                    max_turns(&shared, limit);
                    return;
                }
                let more = u64::try_from(results.len()).unwrap_or(u64::MAX);
                shared.with_outcome(|outcome| outcome.num_turns += more);
            }
        }
    }
}

/// The moment before a request that the CLI makes by itself, in which it takes what it is told.
async fn told_meanwhile(shared: &Shared) {
    let has_gate = |state: &State| {
        let limit = state.env("CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE");
        limit.is_some() && !is_blocked(state)
    };
    let end = tokio::time::Instant::now() + GATE_WAIT;
    tokio::time::sleep(GOES_ON_AFTER).await;
    while has_gate(&shared.state.borrow()) && tokio::time::Instant::now() < end {
        tokio::time::sleep(GOES_ON_AFTER).await;
    }
}

/// Whether the conversation is above the size at which no request is sent, as far as that was set. The real CLI counts
/// tokens of its own; a conversation has more than one of them.
fn is_blocked(state: &State) -> bool {
    let limit = state.env("CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE");
    limit.and_then(|text| text.parse().ok()) == Some(1u64)
}

/// Says what the CLI says by itself to make the model go on.
fn go_on(shared: &Shared, why: &str) {
    let state = shared.state.borrow();
    let content = json!([{"type": "text", "text": why}]);
    let record = records::user(&state, content, json!({"isSynthetic": true}));
    let text = if state.newer() {
        format!("<system-reminder>\n{why}\n</system-reminder>")
    } else {
        why.to_owned()
    };
    drop(state);
    let uuid = record["uuid"].as_str().unwrap_or_default().to_owned();
    shared
        .state
        .borrow_mut()
        .push_own(uuid, json!({"role": "user", "content": text}));
    say_streaming(shared, |_| record);
}

pub(super) const EMPTY: &str = "[The last answer had nothing to show. Please go on and answer.]";
pub(super) const CUT_OFF: &str =
    "The answer above was cut off mid-stream. Go on from where it stops.";
const TOKEN_LIMIT: &str = "Output token limit hit. Go on from where it stops.";
const REFUSED: &str = "[The last answer was declined. Please try again.]";

pub(super) fn say_streaming(shared: &Shared, record: impl FnOnce(&State) -> Value) {
    let state = shared.state.borrow();
    if state.flags.output_format() == "stream-json" {
        shared.say(&record(&state));
    }
}

/// One generation with its retries; on success the tool results are in the history.
async fn generation(shared: &Rc<Shared>) -> (Reply, Vec<Value>) {
    let mut failed = 0;
    let mut stream = true;
    loop {
        let failure = match exchange(shared, stream).await {
            Ok((reply, results)) => return (reply, results),
            Err(failure) => failure,
        };
        failed += 1;
        let faults = shared.state.borrow().faults.clone();
        if faults.has(Fault::Retries410) && failure.status == Some(410) && failed == 1 {
            continue;
        }
        if faults.has(Fault::NoReadmission) && failure.status == Some(401) {
            return (Reply::Failed(failure), Vec::new());
        }
        let policy = policy(&shared.state.borrow());
        let Some(retry) = failure::next_try(&failure, failed, policy) else {
            return (Reply::Failed(failure), Vec::new());
        };
        for _ in 0..retry.announced {
            let attempt = if failure.status == Some(401) {
                0
            } else {
                failed
            };
            say_streaming(shared, |state| {
                records::api_retry(
                    state,
                    attempt,
                    policy.max_retries,
                    retry.delay_ms,
                    json!(failure.status),
                    failure.error,
                )
            });
        }
        tokio::time::sleep(Duration::from_millis(retry.delay_ms)).await;
        shared.progress.borrow_mut().forward = None;
        stream = retry.stream;
    }
}

fn policy(state: &State) -> Policy {
    let number = |name: &str| state.env(name).and_then(|text| text.parse().ok());
    let placeholder =
        !state.tools().is_empty() && state.env("ENABLE_TOOL_SEARCH").as_deref() != Some("false");
    let strips = if state.is_on("CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS") {
        0
    } else {
        2 + 3 * u64::from(placeholder)
    };
    Policy {
        max_retries: number("CLAUDE_CODE_MAX_RETRIES").unwrap_or(10),
        fallback: !state.is_on("CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK"),
        strips,
        watchdog: state.is_on("CLAUDE_CODE_RETRY_WATCHDOG"),
    }
}

/// Sends one request and reads its reply. `Err` is a failure that may be tried again.
async fn exchange(shared: &Rc<Shared>, stream: bool) -> Result<(Reply, Vec<Value>), Failure> {
    let (base, ask) = {
        let state = shared.state.borrow();
        let mut body = body::body(&state);
        state.faults.body(&mut body);
        if !stream {
            body["stream"] = json!(false);
        }
        let url = state.env("ANTHROPIC_BASE_URL").unwrap_or_default();
        let base = Base::parse(&url).map_err(|text| failure::of_connection(&text))?;
        let ask = Ask {
            method: "POST".to_owned(),
            path: body::MESSAGES_PATH.to_owned(),
            headers: body::headers(&state),
            body: body.to_string().into_bytes(),
        };
        (base, ask)
    };
    let mut client = shared.client.borrow_mut().take().unwrap_or_default();
    let mut answer = client
        .send(&base, &ask)
        .await
        .map_err(|text| failure::of_connection(&text))?;
    let limit = failure::rate_limit(answer.status, |name| answer.header(name).map(str::to_owned));
    if answer.status >= 300 {
        let wait = answer
            .header("retry-after")
            .and_then(|text| text.parse::<u64>().ok());
        let bytes = answer.bytes().await.unwrap_or_default();
        if answer.status == 429 {
            say_limit(shared, &limit);
        }
        *shared.client.borrow_mut() = Some(client);
        let wait = wait.map(|seconds| seconds.saturating_mul(1000));
        return Err(failure::of_status(answer.status, &bytes, Some(limit), wait));
    }
    let done = read_reply(shared, &mut answer, stream, &limit).await;
    *shared.client.borrow_mut() = Some(client);
    done
}

/// Said after the first response and then whenever it changed.
fn say_limit(shared: &Shared, limit: &Value) {
    if *shared.last_limit.borrow() != *limit {
        shared.last_limit.replace(limit.clone());
        say_streaming(
            shared,
            |state| json!({"type": "rate_limit_event", "rate_limit_info": limit, "uuid": fresh_uuid(), "session_id": state.session_id}),
        );
    }
}

async fn read_reply(
    shared: &Rc<Shared>,
    answer: &mut Answer,
    stream: bool,
    limit: &Value,
) -> Result<(Reply, Vec<Value>), Failure> {
    let forward = {
        let state = shared.state.borrow();
        let partial = state.flags.has("--include-partial-messages");
        let request_id = answer.header("request-id").map(str::to_owned);
        let forward = Forward::new(&state.session_id, partial, request_id);
        if state.newer() {
            forward
        } else {
            forward.without_marks()
        }
    };
    {
        let mut progress = shared.progress.borrow_mut();
        progress.forward = Some(forward);
        progress.stored = false;
    }
    let mut calls = Calls::default();
    let mut broken = None;
    if stream {
        let mut events = SseParser::default();
        loop {
            match answer.chunk().await {
                Ok(Some(piece)) => {
                    for event in events
                        .push(&piece)
                        .into_iter()
                        .filter(|event| !event.name.is_empty())
                    {
                        let event = event.json();
                        step(shared, &mut calls, |forward| forward.event(&event));
                        if !calls.is_empty() {
                            // A call is issued while the message still streams.
                            tokio::task::yield_now().await;
                        }
                    }
                }
                Ok(None) => break,
                Err(text) => {
                    broken = Some(text);
                    break;
                }
            }
        }
    } else {
        let bytes = answer
            .bytes()
            .await
            .map_err(|text| failure::of_connection(&text))?;
        let message: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        step(shared, &mut calls, |forward| {
            forward.whole_message(&message)
        });
    }
    settle(shared, calls, broken, limit).await
}

/// Feeds the forwarder and acts on what comes out of it.
fn step(shared: &Rc<Shared>, calls: &mut Calls, feed: impl FnOnce(&mut Forward) -> Vec<Out>) {
    let outs = {
        let mut progress = shared.progress.borrow_mut();
        progress.forward.as_mut().map(feed).unwrap_or_default()
    };
    note_begun(shared);
    let mut late = Vec::new();
    for out in outs {
        match out {
            Out::Record(record) => {
                say_streaming(shared, |_| record);
                // A denied call's result follows the record that ends its block.
                for record in late.drain(..) {
                    say_streaming(shared, |_| record);
                }
            }
            Out::Block(block) if block["type"] == "tool_use" => {
                late.extend(calls.take(shared, &block));
            }
            Out::Block(_) => {}
        }
    }
    for record in late {
        say_streaming(shared, |_| record);
    }
}

/// A message counts as begun from its first event on, each id once.
fn note_begun(shared: &Shared) {
    let mut progress = shared.progress.borrow_mut();
    let id = progress
        .forward
        .as_ref()
        .and_then(Forward::message_id)
        .map(str::to_owned);
    if let (Some(id), Some(outcome)) = (id, progress.outcome.as_mut())
        && !outcome.begun.contains(&id)
    {
        outcome.begun.push(id);
    }
}

/// What follows the end of a reply.
async fn settle(
    shared: &Rc<Shared>,
    calls: Calls,
    broken: Option<String>,
    limit: &Value,
) -> Result<(Reply, Vec<Value>), Failure> {
    let ended = shared
        .progress
        .borrow()
        .forward
        .as_ref()
        .map_or(Ended::Empty, Forward::ended);
    match ended {
        Ended::Error(kind, message) => return Err(failure::of_event(&kind, &message)),
        Ended::Empty => {
            let mut failure = failure::of_connection(broken.as_deref().unwrap_or("no events"));
            if broken.is_none() {
                failure.error = "unknown";
                "Stream ended without receiving any events".clone_into(&mut failure.text);
            }
            return Err(failure);
        }
        Ended::InsideBlock if calls.is_empty() => {
            return Err(failure::of_connection("StreamTruncated"));
        }
        _ => {}
    }
    step(
        shared,
        &mut Calls::default(),
        Forward::made_up_stop_if_whole,
    );
    let (stop_reason, text, empty) = keep_answer(shared);
    if ended == Ended::Whole {
        say_limit(shared, limit);
    }
    // The made-up end comes at once; a call that came whole keeps the turn waiting for its result (2.1.332).
    let outs = match ended {
        Ended::Whole => Vec::new(),
        _ => {
            let mut progress = shared.progress.borrow_mut();
            progress
                .forward
                .as_mut()
                .map(|forward| forward.abandon(false, Vec::new()))
                .unwrap_or_default()
        }
    };
    for out in outs {
        if let Out::Record(record) = out {
            say_streaming(shared, |_| record);
        }
    }
    let results = calls.results(shared).await;
    shared.with_outcome(|outcome| {
        outcome.stop_reason = stop_reason.clone();
        outcome.result = Some(text);
    });
    let reply = judge(shared, &stop_reason, empty, !results.is_empty());
    Ok((reply, results))
}

/// What a whole reply leads to.
fn judge(shared: &Shared, stop_reason: &Value, empty: bool, called: bool) -> Reply {
    match stop_reason.as_str() {
        _ if called => Reply::Whole,
        Some("max_tokens" | "model_context_window_exceeded") => Reply::Continue(TOKEN_LIMIT),
        Some("refusal")
            if !shared
                .state
                .borrow()
                .is_on("CLAUDE_CODE_DISABLE_REFUSAL_RETRY") =>
        {
            Reply::Continue(REFUSED)
        }
        Some("refusal") => Reply::Failed(refusal()),
        None => Reply::Continue(CUT_OFF),
        _ if empty => Reply::Continue(EMPTY),
        _ => Reply::Whole,
    }
}

impl Forward {
    fn made_up_stop_if_whole(&mut self) -> Vec<Out> {
        if self.ended() == Ended::Whole {
            self.made_up_stop()
        } else {
            Vec::new()
        }
    }
}

/// Puts the answer into the history; gives its stop reason, last text, and whether nothing is to be seen.
fn keep_answer(shared: &Shared) -> (Value, String, bool) {
    let mut progress = shared.progress.borrow_mut();
    let Some(forward) = progress.forward.as_ref() else {
        return (Value::Null, String::new(), true);
    };
    let blocks = forward.blocks.clone();
    let uuid = forward.last_uuid.clone();
    let (usage, stop_reason, text) = (
        forward.usage.clone(),
        forward.stop_reason.clone(),
        forward.last_text(),
    );
    let seen = |block: &Value| {
        block["type"] == "tool_use" || !block["text"].as_str().unwrap_or_default().is_empty()
    };
    let empty = !blocks.iter().any(seen);
    progress.stored = true;
    if let Some(outcome) = progress.outcome.as_mut() {
        outcome.usage.add(&usage);
    }
    drop(progress);
    if !blocks.is_empty() {
        let message = json!({"role": "assistant", "content": blocks});
        shared.state.borrow_mut().push(uuid, message, false);
    }
    (stop_reason, text, empty)
}

/// Asks upstream whether an unknown model exists, as `set_model` does.
pub(crate) async fn probe(shared: &Rc<Shared>, model: &str) -> bool {
    if models::is_known(model) {
        return true;
    }
    let (base, ask) = {
        let state = shared.state.borrow();
        let Ok(base) = Base::parse(&state.env("ANTHROPIC_BASE_URL").unwrap_or_default()) else {
            return false;
        };
        let body = json!({"model": models::resolve(model), "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]});
        let ask = Ask {
            method: "POST".to_owned(),
            path: body::MESSAGES_PATH.to_owned(),
            headers: body::headers(&state),
            body: body.to_string().into_bytes(),
        };
        (base, ask)
    };
    let answer = Client::default().send(&base, &ask).await;
    answer.is_ok_and(|answer| answer.status != 404)
}
