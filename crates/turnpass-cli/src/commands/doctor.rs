//! `turnpass doctor`: what is installed and whether it works. It costs nothing: no question reaches the service.

use std::process::Stdio;
use std::time::Duration;

use jiff::tz::TimeZone;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use turnpass::cli::environment::{InheritedCredentials, REFUSED_NAMES, Snapshot};
use turnpass::cli::installed::Installed;
use turnpass::cli::locate::{Executable, locate_here};
use turnpass::conversation::Message;
use turnpass::record::{Outcome, StreamRecord};
use turnpass::request::Tool;
use turnpass::tools::{Catalogue, Policy};
use turnpass::{Error, ErrorCode, Event, Request};

use crate::config_file;
use crate::context::{self, Context, environment};
use crate::exit::{Exit, Fault, exit_of};
use crate::settings::{Settings, Values};
use crate::stage::{self, Stage};
use crate::terminal::{Style, visible};

/// Longest hand-shake with the tool server. It takes some milliseconds.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Longest laboratory generation. A start of the CLI takes half a second, on a machine under load many times that.
const LABORATORY_LIMIT: Duration = Duration::from_secs(60);

/// What the laboratory generation says.
const WORD: &str = "ready";

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    values: Values,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    Warn,
    Fail,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    said: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip)]
    exit: Option<Exit>,
}

impl Check {
    fn ok(name: &'static str, said: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            said: said.into(),
            next: None,
            code: None,
            exit: None,
        }
    }

    fn warn(name: &'static str, said: impl Into<String>, next: impl Into<String>) -> Self {
        Self {
            state: State::Warn,
            next: Some(next.into()),
            ..Self::ok(name, said)
        }
    }

    fn fail(name: &'static str, error: &Error) -> Self {
        let said = match error.detail() {
            "" => error.code().meaning(),
            detail => detail,
        };
        Self {
            state: State::Fail,
            next: Some(error.remedy().to_owned()),
            code: Some(error.code().as_str()),
            exit: Some(exit_of(error.code())),
            ..Self::ok(name, said)
        }
    }
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(args.values)?;
    let mut report = Report {
        json: args.json,
        style: context.output_style(),
        checks: Vec::new(),
    };
    tokio::select! {
        biased;
        () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
        done = examine(&settings, &mut report) => done?,
    }
    report.end()
}

/// All checks, each told as soon as it is known.
async fn examine(settings: &Settings, report: &mut Report) -> Result<(), Fault> {
    report.add(configuration()?)?;
    report.add(credentials())?;
    let snapshot = Snapshot::of_this_process();
    match locate_here(settings.claude_setting().as_deref(), &snapshot) {
        Err(error) => report.add(Check::fail("executable", &error))?,
        Ok(found) => {
            for check in executable(&found) {
                report.add(check)?;
            }
            let inherited = InheritedCredentials::Strip;
            let installed = Installed::new(settings.claude_setting(), snapshot, inherited);
            let version = version(&installed).await;
            // What a CLI says that is not used anyhow would only be a second failure.
            let is_usable = version.state != State::Fail;
            report.add(version)?;
            report.add(match is_usable {
                true => sign_in(&installed).await,
                false => Check::warn("sign-in", "not asked", "See the line above."),
            })?;
            installed.shutdown().await;
        }
    }
    if let Some(check) = last_call(settings) {
        report.add(check)?;
    }
    report.add(tool_server().await)?;
    let isolation = laboratory(settings).await?;
    report.add(match report.has_failed_with(isolation.code) {
        // The same failure met again: once is enough.
        true => Check::warn(isolation.name, "not checked", "See the lines above."),
        false => isolation,
    })
}

fn configuration() -> Result<Check, Fault> {
    let (path, _) = config_file::path(&environment)?;
    let said = match path.exists() {
        true => path.display().to_string(),
        false => format!("{} does not exist; the defaults hold", path.display()),
    };
    Ok(Check::ok("configuration", said))
}

fn credentials() -> Check {
    let set: Vec<_> = REFUSED_NAMES
        .into_iter()
        .filter(|name| environment(name).is_some())
        .collect();
    match set.is_empty() {
        true => Check::ok("environment", "names no credential and no other backend"),
        false => Check::warn(
            "environment",
            format!("{} is set, and is kept from the CLI", set.join(", ")),
            "Nothing has to be done; unset it if it is not wanted elsewhere.",
        ),
    }
}

fn executable(found: &Executable) -> Vec<Check> {
    let said = format!("{}, found by {}", found.path.display(), found.rule.as_str());
    let passed_over = found.skipped.iter().map(|skipped| {
        Check::warn(
            "passed over",
            format!("{} {}", skipped.path.display(), skipped.why),
            "Remove it, or repair it.",
        )
    });
    std::iter::once(Check::ok("executable", said))
        .chain(passed_over)
        .collect()
}

async fn version(installed: &Installed) -> Check {
    match installed.checked().await {
        Ok(found) => Check::ok("version", found.version.to_string()),
        Err(error) => Check::fail("version", &error),
    }
}

async fn sign_in(installed: &Installed) -> Check {
    match installed.signed_in().await {
        Ok(signed_in) => {
            let plan = signed_in.subscription;
            let plan = plan.unwrap_or_else(|| "unnamed".to_owned());
            Check::ok("sign-in", format!("claude.ai, plan {plan}"))
        }
        Err(error) => Check::fail("sign-in", &error),
    }
}

/// How the newest generation went that shows whether the service takes the sign-in: what is stored says nothing of that
/// (bug 41). Nothing where there is no log, or where it is switched off.
fn last_call(settings: &Settings) -> Option<Check> {
    let mut last = None;
    let is_laboratory = settings.lab_upstream.is_some();
    let folder = context::records_folder().ok()?;
    let take = |record: StreamRecord| {
        // One that was cancelled says nothing, and one of the laboratory nothing of the account.
        if record.laboratory == is_laboratory && record.outcome != Outcome::Cancelled {
            last = Some(record);
        }
    };
    turnpass::record::read(&folder, take).ok()?;
    Some(told_of(&last?, &TimeZone::system()))
}

fn told_of(record: &StreamRecord, zone: &TimeZone) -> Check {
    const NAME: &str = "last live call";
    let at = zone.to_datetime(record.time).strftime("%Y-%m-%d %H:%M");
    match &record.error {
        None => Check::ok(NAME, format!("answered at {at}")),
        Some(error) if error.code == ErrorCode::Auth.as_str() => Check::warn(
            NAME,
            format!(
                "refused (sign-in) at {at}; a stored sign-in is no proof that the service takes it"
            ),
            "Run `claude auth login --claudeai` unless you have signed in since.",
        ),
        Some(error) => Check::ok(
            NAME,
            format!("failed with {} at {at}, not for its sign-in", error.code),
        ),
    }
}

/// The hand-shake that the CLI makes with the tool server, with the very command that it is given.
async fn tool_server() -> Check {
    const NAME: &str = "tool server";
    match tokio::time::timeout(HANDSHAKE_LIMIT, handshake()).await {
        Ok(Ok(tools)) => Check::ok(NAME, format!("hand-shake done, {tools} tools listed")),
        Ok(Err(why)) => Check::fail(NAME, &Error::new(ErrorCode::McpStartup, why)),
        Err(_) => {
            let why = format!("no answer within {} s", HANDSHAKE_LIMIT.as_secs());
            Check::fail(NAME, &Error::new(ErrorCode::McpStartup, why))
        }
    }
}

async fn handshake() -> Result<usize, String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let tools: Vec<Tool> = turnpass_agent::tools::all()
        .iter()
        .map(|tool| tool.declaration())
        .collect();
    let catalogue = Catalogue::build(&tools).map_err(|error| said(&error))?;
    let folder = tempfile::tempdir().map_err(|error| said(&error))?;
    let file = folder.path().join("catalogue.json");
    std::fs::write(&file, catalogue.file_json()).map_err(|error| said(&error))?;
    let program = std::env::current_exe().map_err(|error| said(&error))?;
    let mut server = tokio::process::Command::new(program)
        .args([
            "mcp-stdio",
            "--policy",
            Policy::Inert.as_str(),
            "--catalogue",
        ])
        .arg(&file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| said(&error))?;
    let (Some(mut stdin), Some(mut stdout)) = (server.stdin.take(), server.stdout.take()) else {
        return Err("the tool server has no pipes".to_owned());
    };
    let client = json!({"name":"turnpass doctor","version":env!("CARGO_PKG_VERSION")});
    let requests = [
        json!({"jsonrpc":"2.0","id":1,"method":"initialize","params":
            {"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":client}}),
        json!({"jsonrpc":"2.0","method":"notifications/initialized"}),
        json!({"jsonrpc":"2.0","id":2,"method":"tools/list"}),
    ];
    let requests = requests.map(|request| format!("{request}\n")).concat();
    let write = stdin.write_all(requests.as_bytes()).await;
    write.map_err(|error| said(&error))?;
    drop(stdin);
    let mut output = String::new();
    let read = stdout.read_to_string(&mut output).await;
    read.map_err(|error| said(&error))?;
    let listed = output
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|reply| reply["id"] == 2)
        .and_then(|reply| reply["result"]["tools"].as_array().map(Vec::len));
    match listed {
        Some(count) if count == tools.len() => Ok(count),
        Some(count) => Err(format!("{count} of {} tools were listed", tools.len())),
        None => Err("the tool server did not list its tools".to_owned()),
    }
}

/// One generation of the installed CLI in the laboratory: start, isolation, answer. The isolation is verified by
/// the transport, which fails closed.
async fn laboratory(settings: &Settings) -> Result<Check, Fault> {
    const NAME: &str = "isolation";
    let settings = stage::laboratory(settings.clone(), None, None);
    let stage = Stage::set(&settings, false).await?;
    if stage.passed_over.is_some() {
        return Ok(Check::warn(
            NAME,
            "not checked: there is no CLI that can be used",
            "See the lines above.",
        ));
    }
    let generation = tokio::time::timeout(LABORATORY_LIMIT, generation(&stage)).await;
    let late = || {
        let why = format!("no end within {} s", LABORATORY_LIMIT.as_secs());
        Error::new(ErrorCode::TotalTimeout, why)
    };
    let requests = stage.upstream.messages().len();
    Ok(match generation.unwrap_or_else(|_| Err(late())) {
        Ok(()) if requests == 1 => Check::ok(
            NAME,
            format!(
                "a laboratory generation over the {} transport: 1 upstream request, {} other connections refused",
                stage.settings.transport,
                stage.refused_connections()
            ),
        ),
        Ok(()) => {
            let why = format!("a laboratory generation made {requests} upstream requests");
            Check::fail(NAME, &Error::new(ErrorCode::ExtraGeneration, why))
        }
        Err(error) => Check::fail(NAME, &error),
    })
}

async fn generation(stage: &Stage) -> turnpass::Result<()> {
    let provider = context::build_provider(&stage.settings)?;
    let messages = vec![Message::user(format!("[[say {WORD}]]"))];
    let mut generation = provider.generate(Request::new(stage.settings.model.as_str(), messages));
    let mut text = String::new();
    while let Some(event) = generation.next().await {
        if let Event::Text { text: piece } = event? {
            text.push_str(&piece);
        }
    }
    provider.shutdown().await?;
    match text == WORD {
        true => Ok(()),
        false => Err(Error::new(
            ErrorCode::ProtocolResult,
            "the laboratory's answer arrived changed",
        )),
    }
}

/// The report, told line by line, or whole as JSON.
struct Report {
    json: bool,
    style: Style,
    checks: Vec<Check>,
}

impl Report {
    fn has_failed_with(&self, code: Option<&str>) -> bool {
        code.is_some() && self.checks.iter().any(|check| check.code == code)
    }

    fn add(&mut self, check: Check) -> Result<(), Fault> {
        if !self.json {
            super::print(&line(&check, self.style))?;
        }
        self.checks.push(check);
        Ok(())
    }

    fn end(self) -> Result<Exit, Fault> {
        let exit = self.checks.iter().find_map(|check| check.exit);
        let exit = exit.unwrap_or(Exit::Done);
        if self.json {
            let object =
                json!({"ok": exit == Exit::Done, "exit": exit as u8, "checks": self.checks});
            super::print(&format!("{object}\n"))?;
        }
        Ok(exit)
    }
}

fn line(check: &Check, style: Style) -> String {
    let mark = match check.state {
        State::Ok => style.green("ok  "),
        State::Warn => style.yellow("warn"),
        State::Fail => style.red("fail"),
    };
    let code = check
        .code
        .map_or_else(String::new, |code| format!("[{code}] "));
    let mut said = visible(&format!("{code}{}", check.said)).replace('\n', " ");
    if let Some(next) = &check.next {
        let stop = if said.ends_with(['.', '…']) {
            ""
        } else {
            "."
        };
        said.push_str(&format!("{stop} {next}"));
    }
    format!("{mark} {:<14} {said}\n", check.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_one_line_with_the_next_step() {
        let style = Style::default();
        let ok = Check::ok("version", "2.1.332");
        assert_eq!(line(&ok, style), "ok   version        2.1.332\n");
        let error = Error::new(ErrorCode::VersionTooOld, "claude 2.1.1\nwas found");
        let fail = line(&Check::fail("version", &error), style);
        assert_eq!(
            fail,
            "fail version        [version_too_old] claude 2.1.1 was found. Run `claude update`.\n"
        );
    }

    #[test]
    fn bug_041_the_last_live_call_is_told_beside_the_stored_sign_in() {
        let record = |code: Option<&str>| {
            let mut record = json!({
                "time": "2026-06-01T22:30:00Z", "transport": "relay", "call_kind": "normal", "session": "00",
                "outcome": "ok", "duration_ms": 1, "chunks": 1, "attempts": 1, "partial_stream": false,
            });
            if let Some(code) = code {
                record["outcome"] = json!("error");
                record["error"] = json!({"code": code, "detail": ""});
            }
            serde_json::from_value(record).unwrap()
        };
        for (code, state, said) in [
            (None, State::Ok, "answered at 2026-06-01 22:30"),
            (
                Some("auth"),
                State::Warn,
                "refused (sign-in) at 2026-06-01 22:30",
            ),
            (
                Some("usage_limit"),
                State::Ok,
                "failed with usage_limit at 2026-06-01 22:30",
            ),
        ] {
            let check = told_of(&record(code), &TimeZone::UTC);
            assert_eq!(check.state, state);
            assert!(check.said.starts_with(said), "{}", check.said);
        }
    }

    #[test]
    fn the_first_failure_gives_the_exit_code() {
        let mut report = Report {
            json: true,
            style: Style::default(),
            checks: vec![Check::ok("a", ""), Check::warn("b", "", "")],
        };
        for code in [ErrorCode::Auth, ErrorCode::McpStartup] {
            report.checks.push(Check::fail("c", &Error::new(code, "")));
        }
        let exit = report.checks.iter().find_map(|check| check.exit);
        assert_eq!(exit, Some(Exit::SignedOut));
    }
}
