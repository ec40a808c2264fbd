//! The doctor's checks, each told as soon as it is known.

use std::time::Duration;

use jiff::tz::TimeZone;
use turnpass::certify::{Certificates, Check as Certified, Outcome, Verdict};
use turnpass::cli::auth::AuthStatus;
use turnpass::cli::environment::{InheritedCredentials, REFUSED_NAMES, Snapshot};
use turnpass::cli::installed::{Found, Installed};
use turnpass::cli::locate::{Executable, locate_here};
use turnpass::cli::private_dir::{roots, sweep};
use turnpass::conversation::Message;
use turnpass::record::{Outcome as Ended, StreamRecord};
use turnpass::request::TransportKind;
use turnpass::{Error, ErrorCode, Event, Request};

use super::report::{Check, Report};
use super::tool_server;
use crate::certify::{Plan, certify};
use crate::config_file;
use crate::context::{self, environment};
use crate::exit::Fault;
use crate::settings::Settings;
use crate::stage::{self, Stage};

/// Longest laboratory generation. A start of the CLI takes half a second, on a machine under load many times that.
const LABORATORY_LIMIT: Duration = Duration::from_secs(60);

/// What the laboratory generation says.
const WORD: &str = "ready";

/// Variables that name a proxy. Their values may hold a password, so only names are told.
const PROXIES: [&str; 6] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
];

/// All checks.
pub(super) async fn all(settings: &Settings, report: &mut Report) -> Result<(), Fault> {
    let snapshot = Snapshot::of_this_process();
    report.add(configuration()?)?;
    report.add(credentials())?;
    report.add(proxies())?;
    report.add(left_over(&snapshot))?;
    let found = match locate_here(settings.claude_setting().as_deref(), &snapshot) {
        Err(error) => {
            report.add(missing(&error))?;
            None
        }
        Ok(found) => {
            for check in executable(&found) {
                report.add(check)?;
            }
            installed(settings, snapshot.clone(), report).await?
        }
    };
    if let Some(found) = &found {
        for check in ways(settings, found) {
            report.add(check)?;
        }
    }
    if let Some(check) = last_call(settings) {
        report.add(check)?;
    }
    report.add(tool_server::check().await)?;
    if let Some(found) = found {
        tried(found.clone(), snapshot, report).await?;
        let isolation = laboratory(settings).await?;
        report.add(match report.has_failed_with(isolation.code) {
            // The same failure met again: once is enough.
            true => Check::warn("isolation", "not checked", "See the lines above."),
            false => isolation,
        })?;
        certificate(&found, report)?;
    } else {
        let why = "not checked: there is no CLI that can be used";
        report.add(Check::warn("isolation", why, "See the lines above.").shown_as(why))?;
    }
    Ok(())
}

fn configuration() -> Result<Check, Fault> {
    let (path, _) = config_file::path(&environment)?;
    let exists = path.exists();
    let said = match exists {
        true => path.display().to_string(),
        false => format!("{} does not exist; the defaults hold", path.display()),
    };
    let public = if exists { "a file" } else { "none" };
    Ok(Check::ok("configuration", said).shown_as(public))
}

fn credentials() -> Check {
    let set: Vec<_> = REFUSED_NAMES
        .into_iter()
        .filter(|name| environment(name).is_some())
        .collect();
    let check = match set.is_empty() {
        true => Check::ok("environment", "names no credential and no other backend"),
        false => Check::warn(
            "environment",
            format!("{} is set, and is kept from the CLI", set.join(", ")),
            "Nothing has to be done; unset it if it is not wanted elsewhere.",
        ),
    };
    check.public()
}

/// The CLI gets the proxy variables as they are, with loopback exempt: a renewal of its sign-in may need them.
fn proxies() -> Check {
    let set: Vec<_> = PROXIES
        .into_iter()
        .filter(|name| environment(name).is_some_and(|value| !value.is_empty()))
        .collect();
    let said = match set.is_empty() {
        true => "none".to_owned(),
        false => format!(
            "{}: passed on, and never for what stays on this machine",
            set.join(", ")
        ),
    };
    Check::ok("proxies", said).public()
}

/// Private folders of runs that were killed are removed by the next start; here is said how many there were.
fn left_over(snapshot: &Snapshot) -> Check {
    let removed: usize = roots(snapshot).iter().map(|root| sweep(root).len()).sum();
    let said = match removed {
        0 => "none".to_owned(),
        1 => "the private folder of 1 killed run was removed".to_owned(),
        many => format!("the private folders of {many} killed runs were removed"),
    };
    Check::ok("left over", said).public()
}

/// For a newcomer: everything that is between nothing and a certified CLI.
fn missing(error: &Error) -> Check {
    let check = Check::fail("executable", error);
    match error.code() {
        ErrorCode::ExecutableMissing => check.then(format!(
            "{} Then sign in with `claude auth login --claudeai`, and run `turnpass doctor` again.",
            error.remedy()
        )),
        _ => check,
    }
}

fn executable(found: &Executable) -> Vec<Check> {
    let rule = found.rule.as_str();
    let said = format!("{}, found by {rule}", found.path.display());
    let passed_over = found.skipped.iter().map(|skipped| {
        Check::warn(
            "passed over",
            format!("{} {}", skipped.path.display(), skipped.why),
            "Remove it, or repair it.",
        )
        .shown_as("a file that cannot run")
    });
    std::iter::once(Check::ok("executable", said).shown_as(format!("found by {rule}")))
        .chain(passed_over)
        .collect()
}

/// Version and sign-in of the CLI; what was found, if it can be used.
async fn installed(
    settings: &Settings,
    snapshot: Snapshot,
    report: &mut Report,
) -> Result<Option<Found>, Fault> {
    let inherited = InheritedCredentials::Strip;
    let installed = Installed::new(settings.claude_setting(), snapshot, inherited)
        .with_certificates(context::state_dir().as_deref());
    let found = match installed.checked().await {
        Ok(found) => {
            report.add(Check::ok("version", found.version.to_string()).public())?;
            report.add(sign_in(&installed).await)?;
            Some(found)
        }
        Err(error) => {
            report.add(Check::fail("version", &error))?;
            // What a CLI says that is not used anyhow would only be a second failure.
            report.add(Check::warn("sign-in", "not asked", "See the line above.").public())?;
            None
        }
    };
    installed.shutdown().await;
    Ok(found)
}

/// Which ways each transport will take with it, and why: the decision that it makes before it starts anything.
fn ways(settings: &Settings, found: &Found) -> Vec<Check> {
    let standing = &found.standing;
    let check = |transport: TransportKind| {
        let name = transport.as_str();
        let decided = match transport {
            TransportKind::Pool => context::pool_options(settings).ways(standing),
            TransportKind::Replay => context::replay_options(settings).ways(standing),
            TransportKind::Relay => context::relay_options(settings).ways(standing),
        };
        match decided {
            Ok(ways) => {
                let because = std::iter::once(standing.source().to_owned());
                let around = standing.fall_backs(transport).into_iter();
                let around = around.map(|(check, way)| format!("{check} fails: {way}"));
                let why: Vec<_> = because.chain(around).collect();
                Check::ok(name, format!("{ways} ({})", why.join("; "))).public()
            }
            Err(error) if transport == settings.transport => Check::fail(name, &error),
            Err(error) => {
                let (said, next) = (error.detail().to_owned(), error.remedy());
                Check::warn(name, said, next).public()
            }
        }
    };
    TransportKind::ALL.into_iter().map(check).collect()
}

async fn sign_in(installed: &Installed) -> Check {
    const NAME: &str = "sign-in";
    let error = match installed.signed_in().await {
        Ok(signed_in) => {
            let plan = signed_in.subscription;
            let plan = plan.unwrap_or_else(|| "unnamed".to_owned());
            let said = format!("claude.ai, plan {plan}");
            return Check::ok(NAME, said).shown_as("claude.ai");
        }
        Err(error) => error,
    };
    let words = match installed.last_sign_in() {
        // What the CLI said may name the account, so it is for this terminal only.
        Some((AuthStatus::Unknown { text, .. }, _)) if !text.is_empty() => Some(text),
        _ => None,
    };
    match words {
        Some(text) => {
            let error = Error::new(error.code(), format!("{}: {text}", error.detail()));
            Check::fail(NAME, &error)
        }
        None => Check::fail(NAME, &error),
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
        if record.laboratory == is_laboratory && record.outcome != Ended::Cancelled {
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
        None => Check::ok(NAME, format!("answered at {at}")).public(),
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

/// Starts of the CLI in the laboratory, with our real flags, with our tool server, and among planted configuration.
async fn tried(found: Found, snapshot: Snapshot, report: &mut Report) -> Result<(), Fault> {
    let checks = vec![
        Certified::Flags,
        Certified::StdioBridge,
        Certified::Isolation,
    ];
    let plan = Plan {
        found,
        snapshot,
        checks,
    };
    let certified = certify(plan, &mut |_| {}).await?;
    for outcome in certified.certificate.outcomes() {
        report.add(of_outcome(outcome))?;
    }
    Ok(())
}

fn of_outcome(outcome: &Outcome) -> Check {
    let (name, good, code) = match outcome.check {
        Certified::StdioBridge => (
            "bridge",
            "the CLI took over the tools of `turnpass mcp-stdio`",
            ErrorCode::McpStartup,
        ),
        Certified::Isolation => (
            "planted",
            "hooks, instructions, MCP servers, plugins and variables that were planted had no effect",
            ErrorCode::IsolationCustomizations,
        ),
        _ => (
            "flags",
            "the CLI starts with every flag that is used",
            ErrorCode::VersionIncompatible,
        ),
    };
    match &outcome.verdict {
        Verdict::Holds => Check::ok(name, good).public(),
        Verdict::Fails { seen } => {
            Check::fail(name, &Error::new(code, seen.as_str())).shown_as(seen.as_str())
        }
        Verdict::NotChecked { why } => {
            let next = "Check the space and the permissions of the folder for temporary files.";
            Check::warn(name, format!("not checked: {why}"), next).shown_as("not checked")
        }
    }
}

/// One generation of the installed CLI in the laboratory: start, isolation, answer. The isolation is verified by
/// the transport, which fails closed.
async fn laboratory(settings: &Settings) -> Result<Check, Fault> {
    const NAME: &str = "isolation";
    // Over the person's own transport.
    let settings = stage::laboratory(settings.clone(), Some(settings.transport), None);
    let stage = Stage::set(&settings, false).await?;
    if stage.passed_over.is_some() {
        let why = "not checked: there is no CLI that can be used";
        return Ok(Check::warn(NAME, why, "See the lines above.").shown_as(why));
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
        )
        .public(),
        Ok(()) => {
            let why = format!("a laboratory generation made {requests} upstream requests");
            Check::fail(NAME, &Error::new(ErrorCode::ExtraGeneration, why.as_str())).shown_as(why)
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

/// What is known of this very program file.
fn certificate(found: &Found, report: &mut Report) -> Result<(), Fault> {
    const NAME: &str = "certificate";
    let kept = context::state_dir().map(|dir| Certificates::new(&dir));
    let certificate = kept.and_then(|kept| kept.of(found.version, &found.executable.path));
    let check = match &certificate {
        None => Check::ok(NAME, "this program file is not certified yet")
            .public()
            .then("run `turnpass doctor --certify`: it takes seconds and costs nothing."),
        Some(known) => {
            let held = known
                .outcomes()
                .iter()
                .filter(|one| one.verdict == Verdict::Holds);
            let said = format!("{} of {} checks hold", held.count(), Certified::ALL.len());
            let next = "ask something with `turnpass run \"Hello\"`, or try `turnpass demo`, which costs nothing.";
            match report.has_failed("sign-in") {
                true => Check::ok(NAME, said).public(),
                false => Check::ok(NAME, said).public().then(next),
            }
        }
    };
    report.certificate = certificate;
    report.add(check)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::report::State;
    use super::*;

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
    fn a_newcomer_is_told_every_step() {
        let error = Error::new(ErrorCode::ExecutableMissing, "");
        let line = super::super::report::line(&missing(&error), Default::default());
        for step in [
            "npm install -g @anthropic-ai/claude-code",
            "claude auth login --claudeai",
            "turnpass doctor",
        ] {
            assert!(line.contains(step), "{line}");
        }
    }
}
