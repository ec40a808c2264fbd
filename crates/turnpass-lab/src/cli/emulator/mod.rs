//! The built-in run: behaves like the real CLI of 2.1.332 as far as the transports look.
//!
//! `docs/lab/cli.md` lists what is emulated and what is not. The shape of bodies and records is that of
//! the recordings; sentences are our own.

mod begin;
mod body;
mod calls;
mod failure;
pub(crate) mod faults;
mod flags;
mod forward;
pub(crate) mod models;
mod records;
mod sessions;
pub(crate) mod state;
mod stops;
mod turn;

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

pub use faults::Fault;
pub use flags::{Flags, FlagsError};

pub(crate) use body::{MESSAGES_PATH, body, headers, text_of as body_text};
pub(crate) use forward::{Ended, Forward, Out};
pub(crate) use records::{Failure, Outcome, Totals, init, result, synthetic};

use super::controls::{self, Answer};
use super::mcp::HostLink;
use super::pipes::{Lines, Output};
use super::player::Context;
use super::signals::{SignalCode, Signals};
use begin::start_turn;
use faults::Faults;
use state::{State, fresh_uuid};
use turn::{Progress, Shared};

/// How the emulator differs from its default.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EmulatorOptions {
    /// Wait before anything is done; the real CLI needs about 400 ms to its first request.
    pub start_delay_ms: u64,
    /// What `get_usage` says as `rate_limits`.
    pub rate_limits: Value,
    /// What `get_usage` says as `rate_limits_available`.
    pub rate_limits_available: bool,
    /// Further built-in plugins, without the `@builtin` suffix.
    pub plugins: Vec<String>,
    /// Control requests of these subtypes are taken and never answered.
    pub ignore_controls: Vec<String>,
    /// Behaviours that are broken on purpose.
    pub faults: BTreeSet<Fault>,
}

impl Default for EmulatorOptions {
    fn default() -> EmulatorOptions {
        EmulatorOptions {
            start_delay_ms: 0,
            rate_limits: json!({
                "five_hour": {"utilization": 31, "resets_at": "2099-01-01T00:00:00+00:00"},
                "seven_day": {"utilization": 12.5, "resets_at": "2099-01-05T00:00:00+00:00"},
                "extra_usage": {"is_enabled": false, "monthly_limit": null, "used_credits": null, "utilization": null},
            }),
            rate_limits_available: true,
            plugins: Vec::new(),
            ignore_controls: Vec::new(),
            faults: BTreeSet::new(),
        }
    }
}

/// A user line that waits for its turn.
struct Queued {
    content: Value,
    uuid: Option<String>,
    ask: bool,
    composed: bool,
}

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// Runs the emulator to its end; gives the exit code.
pub(crate) async fn run(
    context: &Context,
    options: EmulatorOptions,
    lines: Lines,
    output: Output,
    signals: &mut Signals,
) -> u8 {
    tokio::time::sleep(Duration::from_millis(options.start_delay_ms)).await;
    let faults = Faults::new(&options.faults);
    let output = output.with(faults.clone());
    let parsed = match faults.has(Fault::UnknownOption) {
        false => Flags::parse(&context.argv),
        true => Err(FlagsError(
            "error: unknown option '--thinking-display'".to_owned(),
        )),
    };
    let flags = match parsed {
        Ok(mut flags) => {
            for unseen in faults.unseen_flags() {
                flags.forget(unseen);
            }
            flags
        }
        Err(error) => {
            super::complain(&error.to_string());
            return 1;
        }
    };
    let link = HostLink::new(output.clone());
    let mut state = State::new(&context.version, options, flags, link.clone());
    let here = std::env::current_dir().unwrap_or_default();
    let projects = sessions::projects_dir();
    match sessions::open(
        projects.as_deref().unwrap_or(Path::new("")),
        &here,
        &state.flags,
    ) {
        Ok(mut opened) => {
            opened.file = opened.file.filter(|_| projects.is_some());
            state.resume(opened);
        }
        Err(refused) => return refuse(&state, refused, &output).await,
    }
    state.open_servers();
    let shared = Rc::new(Shared {
        state: RefCell::new(state),
        output,
        client: RefCell::default(),
        totals: RefCell::default(),
        last_limit: RefCell::default(),
        progress: RefCell::default(),
    });
    let mut process = Process {
        shared: Rc::clone(&shared),
        link,
        queue: VecDeque::new(),
        connecting: Vec::new(),
        failed: false,
        over: false,
        is_deaf: false,
        left_running: Vec::new(),
    };
    process.connect_new();
    let code = process.serve(lines, signals).await;
    let servers = shared.state.borrow().servers.clone();
    for server in servers {
        server.close().await;
    }
    shared.output.written().await;
    code
}

/// A session that cannot be opened: a sentence on stderr, perhaps a result, and exit code 1.
async fn refuse(state: &State, refused: sessions::Refused, output: &Output) -> u8 {
    match refused {
        sessions::Refused::InUse(text) => super::complain(&text),
        sessions::Refused::NotFound(text) => {
            super::complain(&text);
            let mut outcome = Outcome::new(None);
            outcome.subtype = "error_during_execution";
            outcome.is_error = true;
            outcome.errors = vec![text];
            output.record(&records::result(state, &mut Totals::default(), &outcome));
            output.written().await;
        }
    }
    1
}

struct Process {
    shared: Rc<Shared>,
    link: HostLink,
    queue: VecDeque<Queued>,
    connecting: Vec<JoinHandle<()>>,
    /// The last turn was an error: the exit code at the end of input.
    failed: bool,
    over: bool,
    /// The end of input does not end it.
    is_deaf: bool,
    /// Turns whose requests an interrupt left open.
    left_running: Vec<Running>,
}

impl Process {
    fn connect_new(&mut self) {
        for server in self.shared.state.borrow().servers.iter().cloned() {
            if server.status.get() == "pending" {
                self.connecting.push(tokio::task::spawn_local(
                    async move { server.connect().await },
                ));
            }
        }
    }

    async fn serve(&mut self, mut lines: Lines, signals: &mut Signals) -> u8 {
        let streaming = self.shared.state.borrow().flags.input_format() == "stream-json";
        let mut open = true;
        if !streaming {
            let prompt = self.shared.state.borrow().flags.prompt.clone();
            let prompt = match prompt {
                Some(prompt) => prompt,
                None => whole_input(&mut lines).await,
            };
            open = false;
            self.queue.push_back(Queued {
                content: json!(prompt),
                uuid: None,
                ask: true,
                composed: false,
            });
        }
        let mut running: Option<(Running, Option<String>)> = None;
        loop {
            if running.is_none() {
                while let Ok(line) = lines.try_recv() {
                    if let Some(code) = self.line(&line, &mut running).await {
                        return code;
                    }
                }
                match self.queue.pop_front() {
                    Some(next) => running = self.begin(next),
                    None if (!open && !self.is_deaf) || self.over => return u8::from(self.failed),
                    None => {}
                }
            }
            tokio::select! {
                biased;
                line = lines.recv(), if open => match line {
                    Some(line) => {
                        if let Some(code) = self.line(&line, &mut running).await {
                            return code;
                        }
                    }
                    None => {
                        open = false;
                        self.is_deaf = self.has(Fault::IgnoresEndOfInput);
                    }
                },
                () = drive(&mut running), if running.is_some() => {
                    let uuid = running.take().and_then(|(_, uuid)| uuid);
                    self.failed = self.shared.finish();
                    self.lifecycle(uuid.as_deref(), "completed");
                }
                signal = signals.next() => match signal {
                    SignalCode::Interrupt => {
                        if running.is_some() {
                            self.abort(&mut running).await;
                        }
                        return 0;
                    }
                    SignalCode::End(code) => return code,
                    SignalCode::Ignored => {}
                },
            }
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.shared.state.borrow().faults.has(fault)
    }

    fn lifecycle(&self, uuid: Option<&str>, what: &str) {
        if let Some(uuid) = uuid {
            let record = records::lifecycle(&self.shared.state.borrow(), uuid, what);
            self.shared.say(&record);
        }
    }

    /// Takes one line of stdin; `Some` ends the process with that code.
    async fn line(
        &mut self,
        line: &[u8],
        running: &mut Option<(Running, Option<String>)>,
    ) -> Option<u8> {
        if line.iter().all(u8::is_ascii_whitespace) {
            return None;
        }
        let Ok(mut line) = serde_json::from_slice::<Value>(line) else {
            super::complain(&format!(
                "Error parsing streaming input line ({} chars): SyntaxError",
                line.len()
            ));
            return Some(1);
        };
        let faults = self.shared.state.borrow().faults.clone();
        if !faults.line(&mut line) {
            return None;
        }
        match line["type"].as_str().unwrap_or_default() {
            "user" => {
                let uuid = line["uuid"].as_str().map(str::to_owned);
                self.lifecycle(uuid.as_deref(), "queued");
                self.queue.push_back(Queued {
                    content: line["message"]["content"].clone(),
                    uuid,
                    ask: line["shouldQuery"] != false,
                    composed: line["client_composed"] == true,
                });
            }
            "assistant" => self.frame(&line),
            "control_response" => {
                self.link.answered(&line);
            }
            "control_request" => self.control(&line, running).await,
            _ => {}
        }
        None
    }

    /// An assistant record of the host. It is appended at once, also before a user frame that still
    /// waits: the host must wait for the result of each user frame. Thinking of another model is dropped.
    fn frame(&self, line: &Value) {
        let mut state = self.shared.state.borrow_mut();
        let foreign = line["message"]["model"] != json!(state.model);
        let mut blocks = line["message"]["content"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        blocks.retain(|block| {
            !foreign
                || !matches!(
                    block["type"].as_str(),
                    Some("thinking" | "redacted_thinking")
                )
        });
        let uuid = line["uuid"].as_str().map_or_else(fresh_uuid, str::to_owned);
        state.push(uuid, json!({"role": "assistant", "content": blocks}), true);
        drop(state);
        // Exactly this one record, and only when the line has a uuid: 2.1.294, 2.1.310, 2.1.332.
        if !self.has(Fault::FramesUnacknowledged) {
            self.lifecycle(line["uuid"].as_str(), "completed");
        }
    }

    async fn control(&mut self, line: &Value, running: &mut Option<(Running, Option<String>)>) {
        let request = &line["request"];
        let subtype = request["subtype"].as_str().unwrap_or_default();
        if self
            .shared
            .state
            .borrow()
            .options
            .ignore_controls
            .iter()
            .any(|ignored| ignored == subtype)
        {
            return;
        }
        let answer = match subtype {
            "interrupt" => {
                let answer = self.interrupted(request);
                self.shared.say(&answer.record(&line["request_id"]));
                self.abort(running).await;
                return;
            }
            "rewind_conversation" if running.is_some() => Answer::Success(Some(json!({
                "rewound": false, "prefillText": null, "precedingAssistantUuid": null,
                "error": "turn running", "reason": "turn_running",
            }))),
            "set_model" => {
                let model = request["model"].as_str().unwrap_or("default").to_owned();
                if turn::probe(&self.shared, &model).await {
                    let before = self.shared.state.borrow().pending_text.len();
                    let answer = controls::answer(&mut self.shared.state.borrow_mut(), request);
                    let state = self.shared.state.borrow();
                    if let Some(said) = state
                        .pending_text
                        .last()
                        .filter(|_| state.pending_text.len() > before)
                    {
                        self.shared.say(&records::user(
                            &state,
                            json!(said),
                            json!({"isReplay": true}),
                        ));
                    }
                    answer
                } else {
                    Answer::Error(format!("model not found: {model}"), Some("not_found"))
                }
            }
            _ => controls::answer(&mut self.shared.state.borrow_mut(), request),
        };
        self.shared.say(&answer.record(&line["request_id"]));
        self.connect_new();
        self.over |= subtype == "end_session";
    }

    /// With `cancel_queued` lines that have a uuid are taken out of the queue.
    fn interrupted(&mut self, request: &Value) -> Answer {
        let uuids = |queue: &VecDeque<Queued>| -> Vec<String> {
            queue.iter().filter_map(|item| item.uuid.clone()).collect()
        };
        if request["cancel_queued"] != true {
            return Answer::Success(Some(json!({"still_queued": uuids(&self.queue)})));
        }
        let cancelled = uuids(&self.queue);
        for uuid in &cancelled {
            self.lifecycle(Some(uuid), "cancelled");
        }
        self.queue.retain(|item| item.uuid.is_none());
        let mut answer = json!({"still_queued": []});
        if !cancelled.is_empty() {
            answer["cancelled"] = json!(cancelled);
        }
        Answer::Success(Some(answer))
    }

    /// Stops the running turn, with the records of the real CLI.
    async fn abort(&mut self, running: &mut Option<(Running, Option<String>)>) {
        let Some((turn, uuid)) = running.take() else {
            return;
        };
        match self.has(Fault::InterruptKeepsRequest) {
            true => self.left_running.push(turn),
            false => drop(turn),
        }
        self.shared.client.borrow_mut().take();
        let progress = std::mem::take(&mut *self.shared.progress.borrow_mut());
        let Progress {
            forward,
            outcome,
            calls,
            stored,
            ended_by_result: _,
        } = progress;
        for (_, tool) in &calls {
            tool.server.cancel_all().await;
        }
        let marker = if calls.is_empty() {
            "[Request interrupted by user]"
        } else {
            "[Request interrupted by user for tool use]"
        };
        let note = records::user(
            &self.shared.state.borrow(),
            json!([{"type": "text", "text": marker}]),
            json!({}),
        );
        let reason = if calls.is_empty() {
            "aborted_streaming"
        } else {
            "aborted_tools"
        };
        self.close_records(forward, &calls, stored, &note);
        let note_uuid = note["uuid"].as_str().unwrap_or_default().to_owned();
        self.shared
            .state
            .borrow_mut()
            .push_own(note_uuid, note["message"].clone());
        self.shared.with_outcome(|now| {
            *now = outcome.unwrap_or_else(|| Outcome::new(uuid.clone()));
            now.subtype = "error_during_execution";
            now.is_error = true;
            now.terminal_reason = reason;
            now.num_turns += 1;
            now.stop_reason = if calls.is_empty() {
                Value::Null
            } else {
                json!("tool_use")
            };
            now.errors = vec![
                "[ede_diagnostic] result_type=user last_content_type=n/a stop_reason=null"
                    .to_owned(),
            ];
            now.result = None;
        });
        self.failed = self.shared.finish();
        self.lifecycle(uuid.as_deref(), "cancelled");
    }

    fn close_records(
        &self,
        forward: Option<Forward>,
        calls: &[(String, state::PublishedTool)],
        stored: bool,
        note: &Value,
    ) {
        let mut state = self.shared.state.borrow_mut();
        if calls.is_empty() {
            let mut blocks = Vec::new();
            let outs = match forward {
                Some(mut forward) => {
                    let outs = forward.abandon(true, vec![note.clone()]);
                    blocks = forward.blocks;
                    outs
                }
                None => vec![Out::Record(note.clone())],
            };
            for out in outs {
                if let Out::Record(record) = out {
                    self.shared.say(&record);
                }
            }
            if !blocks.is_empty() && !stored {
                state.push(
                    fresh_uuid(),
                    json!({"role": "assistant", "content": blocks}),
                    false,
                );
            }
            return;
        }
        if !stored && let Some(forward) = forward {
            state.push(
                fresh_uuid(),
                json!({"role": "assistant", "content": forward.blocks}),
                false,
            );
        }
        let results: Vec<Value> = calls
            .iter()
            .map(|(id, _)| json!({"type": "tool_result", "content": "The call was interrupted.", "is_error": true, "tool_use_id": id}))
            .collect();
        for result in &results {
            self.shared
                .say(&records::user(&state, json!([result]), json!({})));
        }
        state.push(
            fresh_uuid(),
            json!({"role": "user", "content": results}),
            false,
        );
        self.shared.say(note);
    }

    /// Starts the next line of the queue. `None` when it needs no request.
    fn begin(&mut self, next: Queued) -> Option<(Running, Option<String>)> {
        let shared = Rc::clone(&self.shared);
        let connecting = std::mem::take(&mut self.connecting);
        let uuid = next.uuid.clone();
        shared.progress.borrow_mut().outcome = Some(Outcome::new(uuid.clone()));
        let turn = async move {
            for server in connecting {
                let _ = server.await;
            }
            start_turn(shared, next).await;
        };
        Some((Box::pin(turn), uuid))
    }
}

async fn drive(running: &mut Option<(Running, Option<String>)>) {
    if let Some((turn, _)) = running {
        turn.await;
    }
}

async fn whole_input(lines: &mut Lines) -> String {
    let mut text = String::new();
    while let Some(line) = lines.recv().await {
        text.push_str(&String::from_utf8_lossy(&line));
        text.push('\n');
    }
    text
}

pub(crate) fn failure_of_status(status: u16, body: &[u8]) -> Failure {
    failure::of_status(status, body, None, None)
}

pub(crate) fn failure_of_connection(text: &str) -> Failure {
    failure::of_connection(text)
}
