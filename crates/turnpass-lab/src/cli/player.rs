//! Plays the steps of a run.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use serde_json::{Map, Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::background::Inbox;
use super::emulator::state::State;
use super::emulator::{self, EmulatorOptions, Ended, Flags, Forward, Out, Outcome, Totals};
use super::fixture::{self, Row};
use super::http::{Ask, Base, Client};
use super::mcp::HostLink;
use super::pipes::{self, Output};
use super::recording::Recorder;
use super::script::{
    Auth, Grandchild, McpConnect, PlayFixture, Post, Raw, Reply, Run, ScriptError, Stderr, Step,
};
use super::sse::SseParser;
use super::template::{self, Scope};

/// What a run is started with.
pub(crate) struct Context {
    pub(crate) script_dir: PathBuf,
    pub(crate) version: String,
    pub(crate) argv: Vec<String>,
    pub(crate) recorder: Arc<Recorder>,
}

/// Runs to the end on a runtime of its own; gives the exit code.
pub(crate) fn block_on(context: Context, run: Run) -> Result<u8, ScriptError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| ScriptError::at("runtime", error))?;
    let local = tokio::task::LocalSet::new();
    let code = local.block_on(&runtime, play_run(context, run));
    // The reader of stdin may be blocked; it ends with the process.
    runtime.shutdown_background();
    Ok(code)
}

async fn play_run(context: Context, run: Run) -> u8 {
    let mut signals = Signals::install(Arc::clone(&context.recorder));
    match run {
        Run::AuthStatus(auth) => auth_status(auth, &mut signals).await,
        Run::Emulator(options) => {
            let lines = pipes::read_stdin(Arc::clone(&context.recorder));
            emulator::run(&context, options, lines, Output::start(), &mut signals).await
        }
        Run::Steps(steps) => {
            let mut player = Player::new(context, &steps);
            let code = tokio::select! {
                end = player.steps(&steps, 0) => player.code(end),
                code = signals.end() => code,
            };
            if !player.stdout_closed {
                tokio::select! {
                    () = player.output.written() => {}
                    _ = signals.end() => {}
                }
            }
            code
        }
    }
}

async fn auth_status(auth: Auth, signals: &mut Signals) -> u8 {
    let answer = async {
        tokio::time::sleep(Duration::from_millis(auth.delay_ms)).await;
        let _ = std::io::stderr().write_all(auth.stderr.as_bytes());
        if auth.hang {
            std::future::pending::<()>().await;
        }
        match &auth.raw {
            Some(raw) => super::print(raw),
            // Printed over several lines, as the real CLI does.
            None => super::print(&format!("{:#}\n", auth.json)),
        }
        auth.exit_code()
    };
    tokio::select! {
        code = answer => code,
        code = signals.end() => code,
    }
}

/// What a caught signal means.
pub(crate) enum SignalCode {
    /// SIGINT: the real CLI ends its turn and exits with 0.
    Interrupt,
    /// End with this code: 143 for SIGTERM, 129 for SIGHUP.
    End(u8),
    /// The script said that it is ignored.
    Ignored,
}

/// The signals that are caught and noted.
pub(crate) struct Signals {
    recorder: Arc<Recorder>,
    caught: Vec<(&'static str, Signal)>,
    ignored: Arc<Mutex<Vec<String>>>,
}

impl Signals {
    fn install(recorder: Arc<Recorder>) -> Signals {
        let kinds = [
            ("SIGTERM", SignalKind::terminate()),
            ("SIGINT", SignalKind::interrupt()),
            ("SIGHUP", SignalKind::hangup()),
            ("SIGUSR1", SignalKind::user_defined1()),
        ];
        // A signal that cannot be caught keeps its default action, which also ends the run.
        let caught = kinds
            .into_iter()
            .filter_map(|(name, kind)| Some((name, signal(kind).ok()?)))
            .collect();
        Signals {
            recorder,
            caught,
            ignored: IGNORED.with(Arc::clone),
        }
    }

    /// The next signal. Cancel safe.
    pub(crate) async fn next(&mut self) -> SignalCode {
        let name = std::future::poll_fn(|context| {
            for (name, signal) in &mut self.caught {
                if let std::task::Poll::Ready(Some(())) = signal.poll_recv(context) {
                    return std::task::Poll::Ready(*name);
                }
            }
            std::task::Poll::Pending
        })
        .await;
        let ignored = self
            .ignored
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .any(|one| one == name);
        self.recorder
            .note("signal", json!({"name": name, "ignored": ignored}));
        match name {
            _ if ignored => SignalCode::Ignored,
            "SIGINT" => SignalCode::Interrupt,
            "SIGHUP" => SignalCode::End(129),
            "SIGTERM" => SignalCode::End(143),
            _ => SignalCode::Ignored,
        }
    }

    /// Returns when a signal ends the run, with the code.
    async fn end(&mut self) -> u8 {
        loop {
            match self.next().await {
                SignalCode::Interrupt => return 0,
                SignalCode::End(code) => return code,
                SignalCode::Ignored => {}
            }
        }
    }
}

thread_local! {
    /// Shared between the player, which adds names, and [`Signals`]; the run has one thread.
    static IGNORED: Arc<Mutex<Vec<String>>> = Arc::default();
}

/// Why the steps stop before their end.
enum End {
    Exit(u8),
    Mismatch,
    /// The expectation of this step found the end of input; a `loop` takes it as its end.
    Input(usize),
}

struct Player {
    context: Context,
    output: Output,
    inbox: Option<Inbox>,
    state: Rc<std::cell::RefCell<State>>,
    scope: Scope,
    client: Client,
    totals: Totals,
    held: Vec<super::http::Answer>,
    stdout_closed: bool,
}

impl Player {
    fn new(context: Context, steps: &[Step]) -> Player {
        let output = Output::start();
        // A script decides by itself what is wrong with a command line.
        let parsed = Flags::parse(&context.argv);
        let link = HostLink::new(output.clone());
        let state = State::new(
            &context.version,
            EmulatorOptions::default(),
            parsed.unwrap_or_default(),
            link,
        );
        let mut named = Map::new();
        named.insert("session_id".to_owned(), json!(state.session_id));
        named.insert("version".to_owned(), json!(context.version));
        named.insert("model".to_owned(), json!(state.model));
        named.insert("pid".to_owned(), json!(std::process::id()));
        named.insert(
            "cwd".to_owned(),
            json!(std::env::current_dir().unwrap_or_default()),
        );
        named.insert("tools".to_owned(), json!([]));
        let deaf = steps
            .iter()
            .any(|step| matches!(step, Step::NeverReadStdin));
        let late = matches!(steps.first(), Some(Step::WriteBeforeRead(_)));
        let state = Rc::new(std::cell::RefCell::new(state));
        let inbox = (!deaf && !late).then(|| {
            let lines = pipes::read_stdin(Arc::clone(&context.recorder));
            Inbox::start(lines, Rc::clone(&state), output.clone())
        });
        Player {
            context,
            output,
            inbox,
            state,
            scope: Scope {
                named,
                line: Value::Null,
            },
            client: Client::default(),
            totals: Totals::default(),
            held: Vec::new(),
            stdout_closed: false,
        }
    }

    /// Plays steps in order. `pass` is the number of the surrounding `repeat`.
    async fn steps(&mut self, steps: &[Step], pass: u64) -> Result<(), End> {
        for (index, step) in steps.iter().enumerate() {
            self.scope.named.insert("n".to_owned(), json!(pass));
            // Boxed because a step can hold steps.
            Box::pin(self.step(step, index + 1)).await?;
        }
        Ok(())
    }

    async fn step(&mut self, step: &Step, number: usize) -> Result<(), End> {
        match step {
            Step::Expect(pattern) => self.expect(Some(pattern), number).await,
            Step::ExpectAny => self.expect(None, number).await,
            Step::Send(value) => self.send(value).await,
            Step::SendRaw(raw) => self.send_raw(raw).await,
            Step::SendInit(over) => self.send_init(over.as_ref()).await,
            Step::SendBig(big) => self.write(format!("{}\n", big.line()).into_bytes()).await,
            Step::Repeat { times, steps } => {
                for pass in 0..*times {
                    self.steps(steps, pass).await?;
                }
                Ok(())
            }
            Step::Loop(steps) => self.repeat_to_end_of_input(steps).await,
            Step::SleepMs(ms) => {
                tokio::time::sleep(Duration::from_millis(*ms)).await;
                Ok(())
            }
            Step::WaitEof => self.wait_eof().await,
            Step::Grandchild(spec) => self.grandchild(spec),
            Step::Stderr(what) => write_stderr(what),
            Step::Hang => std::future::pending().await,
            Step::Exit(code) => Err(End::Exit(*code)),
            Step::KillSelf(name) => self.kill_self(name).await,
            Step::IgnoreSignals(names) => {
                IGNORED.with(|ignored| {
                    ignored
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .extend(names.iter().cloned());
                });
                Ok(())
            }
            Step::NeverReadStdin => Ok(()),
            Step::WriteBeforeRead(bytes) => self.write_before_read(*bytes).await,
            Step::CloseStdout => self.close_stdout().await,
            Step::AnswerControls(list) => {
                if let Some(inbox) = &mut self.inbox {
                    inbox.answer(list.as_deref());
                }
                Ok(())
            }
            Step::McpConnect(spec) => self.mcp_connect(spec.clone().unwrap_or_default()).await,
            Step::Post(post) => self.post(post, number).await,
            Step::PlayFixture(fixture) => self.play_fixture(fixture, number).await,
        }
    }

    async fn write(&mut self, bytes: Vec<u8>) -> Result<(), End> {
        self.output.bytes(bytes);
        self.output.written().await;
        Ok(())
    }

    async fn record(&mut self, record: &Value) -> Result<(), End> {
        self.write(format!("{record}\n").into_bytes()).await
    }

    fn code(&self, end: Result<(), End>) -> u8 {
        match end {
            Ok(()) => 0,
            Err(End::Exit(code)) => code,
            Err(End::Mismatch) => super::EXIT_MISMATCH,
            Err(End::Input(number)) => {
                self.mismatch(number, "the input ended");
                super::EXIT_MISMATCH
            }
        }
    }

    fn mismatch(&self, number: usize, message: &str) -> End {
        let text = format!("step {number}: {message}");
        self.context
            .recorder
            .note("mismatch", json!({"step": number, "message": text}));
        super::complain(&format!("scripted cli: {text}"));
        End::Mismatch
    }

    async fn expect(&mut self, pattern: Option<&Value>, number: usize) -> Result<(), End> {
        let Some(inbox) = &mut self.inbox else {
            return Err(self.mismatch(number, "this run does not read stdin"));
        };
        let Some(line) = inbox.next().await else {
            // Not yet an error: inside a loop it is the way out.
            return Err(End::Input(number));
        };
        if let Some(pattern) = pattern {
            let wanted = template::fill(pattern, &self.scope);
            if !template::matches(&wanted, &line) {
                return Err(self.mismatch(number, &format!("expected {wanted}, but got {line}")));
            }
        }
        if line["type"] == "user" {
            let uuid = line["uuid"].as_str().unwrap_or_default().to_owned();
            let message = json!({"role": "user", "content": line["message"]["content"]});
            self.state
                .borrow_mut()
                .push(uuid, message, line["shouldQuery"] == false);
        }
        self.scope.line = line;
        Ok(())
    }

    async fn send(&mut self, value: &Value) -> Result<(), End> {
        let list = match value {
            Value::Array(list) => list.clone(),
            one => vec![one.clone()],
        };
        for item in list {
            let line = match template::fill(&item, &self.scope) {
                Value::String(text) => text,
                record => record.to_string(),
            };
            self.write(format!("{line}\n").into_bytes()).await?;
        }
        Ok(())
    }

    async fn send_raw(&mut self, raw: &Raw) -> Result<(), End> {
        let mut bytes = raw.text.clone().unwrap_or_default().into_bytes();
        if let Some(coded) = &raw.base64 {
            let plain = base64::engine::general_purpose::STANDARD.decode(coded);
            bytes.extend(plain.unwrap_or_default());
        }
        self.write(bytes).await
    }

    async fn send_init(&mut self, over: Option<&Map<String, Value>>) -> Result<(), End> {
        let mut record = emulator::init(&self.state.borrow());
        if let (Some(map), Some(over)) = (record.as_object_mut(), over) {
            for (key, value) in over {
                map.insert(key.clone(), template::fill(value, &self.scope));
            }
        }
        self.record(&record).await
    }

    async fn repeat_to_end_of_input(&mut self, steps: &[Step]) -> Result<(), End> {
        let mut pass = 0;
        loop {
            match self.steps(steps, pass).await {
                Ok(()) => pass += 1,
                Err(End::Input(_)) => return Ok(()),
                Err(other) => return Err(other),
            }
        }
    }

    async fn wait_eof(&mut self) -> Result<(), End> {
        if let Some(inbox) = &mut self.inbox {
            while inbox.next().await.is_some() {}
        }
        Ok(())
    }

    fn grandchild(&mut self, spec: &Grandchild) -> Result<(), End> {
        let trap = if spec.ignore_sigterm {
            "trap '' TERM; "
        } else {
            ""
        };
        let script = format!("{trap}exec sleep {}", spec.seconds);
        let pipe = || {
            if spec.keep_pipes {
                Stdio::inherit()
            } else {
                Stdio::null()
            }
        };
        let child = Command::new("/bin/sh")
            .arg("-c")
            .arg(script)
            .stdin(Stdio::null())
            .stdout(pipe())
            .stderr(pipe())
            .spawn();
        match child {
            Ok(child) => self
                .context
                .recorder
                .note("grandchild", json!({"pid": child.id()})),
            Err(error) => super::complain(&format!("scripted cli: grandchild: {error}")),
        }
        Ok(())
    }

    async fn kill_self(&mut self, name: &str) -> Result<(), End> {
        use rustix::process::{Signal, getpid, kill_process};
        self.output.written().await;
        let signal = match name {
            "SIGTERM" => Signal::TERM,
            "SIGINT" => Signal::INT,
            "SIGHUP" => Signal::HUP,
            "SIGSEGV" => Signal::SEGV,
            "SIGABRT" => Signal::ABORT,
            "SIGSTOP" => Signal::STOP,
            _ => Signal::KILL,
        };
        let _ = kill_process(getpid(), signal);
        // A caught signal ends the run from outside; SIGSTOP lets it go on after SIGCONT.
        if signal == Signal::STOP {
            Ok(())
        } else {
            std::future::pending().await
        }
    }

    async fn write_before_read(&mut self, bytes: u64) -> Result<(), End> {
        const LINE: &str = "{\"type\":\"noise\",\"text\":\"written before stdin is read\"}\n";
        let mut left = usize::try_from(bytes).unwrap_or(usize::MAX);
        while left > 0 {
            let line = LINE.as_bytes();
            // Whole lines only, so that what follows is not glued to half of one.
            self.write(line.to_vec()).await?;
            left = left.saturating_sub(line.len());
        }
        let lines = pipes::read_stdin(Arc::clone(&self.context.recorder));
        self.inbox = Some(Inbox::start(
            lines,
            Rc::clone(&self.state),
            self.output.clone(),
        ));
        Ok(())
    }

    async fn close_stdout(&mut self) -> Result<(), End> {
        self.output.written().await;
        self.stdout_closed = true;
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null");
        let closed = null
            .map_err(|error| error.to_string())
            .and_then(|null| rustix::stdio::dup2_stdout(&null).map_err(|error| error.to_string()));
        if let Err(error) = closed {
            super::complain(&format!("scripted cli: close_stdout: {error}"));
        }
        Ok(())
    }

    async fn mcp_connect(&mut self, spec: McpConnect) -> Result<(), End> {
        let servers = {
            let mut state = self.state.borrow_mut();
            if state.servers.is_empty() {
                state.open_servers();
            }
            state.servers.clone()
        };
        for server in &servers {
            server.connect().await;
            let note = json!({"server": server.name, "status": server.status.get(), "tools": server.tools.borrow().len()});
            self.context.recorder.note("mcp", note);
        }
        let tools: Vec<String> = self
            .state
            .borrow()
            .tools()
            .into_iter()
            .map(|tool| tool.name)
            .collect();
        self.scope.named.insert("tools".to_owned(), json!(tools));
        let mut running = Vec::new();
        for call in spec.calls {
            let tool = self
                .state
                .borrow()
                .tools()
                .into_iter()
                .find(|tool| tool.own == call.name);
            let recorder = Arc::clone(&self.context.recorder);
            let job = async move {
                let result = match tool {
                    Some(tool) => {
                        tool.server
                            .call(&tool.own, &call.arguments, &call.tool_use_id)
                            .await
                    }
                    None => Err("no such tool".to_owned()),
                };
                let result = result.unwrap_or_else(|error| json!({"error": error}));
                recorder.note(
                    "mcp_call",
                    json!({"tool_use_id": call.tool_use_id, "name": call.name, "result": result}),
                );
            };
            if spec.parallel {
                running.push(tokio::task::spawn_local(job));
            } else {
                job.await;
            }
        }
        for job in running {
            let _ = job.await;
        }
        Ok(())
    }

    async fn post(&mut self, post: &Post, number: usize) -> Result<(), End> {
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

    async fn take_reply(
        &mut self,
        reply: Reply,
        mut answer: super::http::Answer,
    ) -> Result<(), End> {
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

    async fn forward(&mut self, reply: Reply, mut answer: super::http::Answer) -> Result<(), End> {
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

    async fn play_fixture(&mut self, spec: &PlayFixture, number: usize) -> Result<(), End> {
        let path = self.context.script_dir.join(&spec.file);
        let rows = fixture::read(&path).map_err(|error| self.mismatch(number, &error))?;
        let mut ids = BTreeMap::new();
        for row in rows {
            match row {
                Row::Out { after, line } => {
                    if spec.timing {
                        tokio::time::sleep(after).await;
                    }
                    let line = fixture::replace_ids(&line, &ids);
                    self.write(format!("{line}\n").into_bytes()).await?;
                }
                Row::In(recorded) if spec.follow_stdin => {
                    self.expect(None, number).await?;
                    fixture::learn_ids(&recorded, &self.scope.line, &mut ids);
                }
                Row::In(_) => {}
            }
        }
        Ok(())
    }
}

fn write_stderr(what: &Stderr) -> Result<(), End> {
    let mut stderr = std::io::stderr().lock();
    let _ = match what {
        Stderr::Text(text) => stderr.write_all(text.as_bytes()),
        Stderr::Bytes { bytes } => {
            let mut left = *bytes;
            let piece = [b'e'; 4096];
            let mut done = Ok(());
            while left > 0 && done.is_ok() {
                let now = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
                done = stderr.write_all(&piece[..now]);
                left -= now as u64;
            }
            done
        }
    };
    Ok(())
}
