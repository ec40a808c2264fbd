//! What the doctor found: told line by line, as one JSON object, or in a file that can be shown to anybody.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};
use turnpass::Error;
use turnpass::certify::Certificate;

use crate::exit::{Exit, Fault, exit_of};
use crate::terminal::{Style, visible};

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Ok,
    Warn,
    Fail,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    name: &'static str,
    pub(super) state: State,
    pub(super) said: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<&'static str>,
    #[serde(skip)]
    exit: Option<Exit>,
    /// What may be shown to anybody: it names no path, no account and no address.
    #[serde(skip)]
    public: Option<String>,
}

impl Check {
    pub(super) fn ok(name: &'static str, said: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            said: said.into(),
            next: None,
            code: None,
            exit: None,
            public: None,
        }
    }

    pub(super) fn warn(
        name: &'static str,
        said: impl Into<String>,
        next: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Warn,
            next: Some(next.into()),
            ..Self::ok(name, said)
        }
    }

    pub(super) fn fail(name: &'static str, error: &Error) -> Self {
        let said = match error.detail() {
            "" => error.code().meaning(),
            detail => detail,
        };
        Self {
            state: State::Fail,
            next: Some(error.remedy().to_owned()),
            code: Some(error.code().as_str()),
            exit: Some(exit_of(error.code())),
            // The detail of an error may hold a path or a word of the CLI; its meaning is a sentence of ours.
            public: Some(error.code().meaning().to_owned()),
            ..Self::ok(name, said)
        }
    }

    /// With a step that can be taken although nothing is wrong.
    pub(super) fn then(self, next: impl Into<String>) -> Self {
        Self {
            next: Some(next.into()),
            ..self
        }
    }

    /// All that is said may be shown to anybody.
    pub(super) fn public(self) -> Self {
        let said = self.said.clone();
        self.shown_as(said)
    }

    /// This may be shown to anybody in place of what is said.
    pub(super) fn shown_as(self, public: impl Into<String>) -> Self {
        Self {
            public: Some(public.into()),
            ..self
        }
    }
}

/// Where a report is written for others.
#[derive(Clone, Debug)]
pub(super) struct Destination {
    path: PathBuf,
    is_forced: bool,
}

impl Destination {
    /// A file that must not be there yet, unless it may be replaced.
    pub(super) fn new(path: &Path, is_forced: bool) -> Result<Self, Fault> {
        // Before the checks, so that nobody waits for them in vain.
        if !is_forced && fs::symlink_metadata(path).is_ok() {
            return Err(exists(path));
        }
        Ok(Self {
            path: path.to_owned(),
            is_forced,
        })
    }

    /// Writes it, readable by this user only. A file that is replaced is replaced whole, and no link is followed.
    pub(super) fn write(&self, report: &Value) -> Result<(), Fault> {
        let text = format!("{report:#}\n");
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::AlreadyExists => exists(&self.path),
            _ => Fault::system(
                format!("{} cannot be written: {error}", self.path.display()),
                "Name a file in a folder that you may write to.",
            ),
        };
        let target = match self.is_forced {
            false => self.path.clone(),
            true => {
                let mut name = self.path.as_os_str().to_owned();
                name.push(format!(".{}.new", std::process::id()));
                name.into()
            }
        };
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&target);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        let written = written.and_then(|()| match self.is_forced {
            true => fs::rename(&target, &self.path),
            false => Ok(()),
        });
        if written.is_err() && self.is_forced {
            // The first error is the one to tell.
            let _ = fs::remove_file(&target);
        }
        written.map_err(failed)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn exists(path: &Path) -> Fault {
    Fault::usage(
        format!("{} exists", path.display()),
        "Name another file, or replace it with --force.",
    )
}

/// What may be shown to anybody of a certificate.
pub(super) fn public_certificate(certificate: &Certificate) -> Value {
    let checks: Vec<_> = certificate
        .outcomes()
        .iter()
        // What was seen is told without paths, and of the laboratory only.
        .map(|one| json!({"name": one.check, "verdict": one.verdict.as_str(), "said": one.verdict.said()}))
        .collect();
    json!({
        "version": certificate.identity().version(),
        "digest": certificate.identity().digest(),
        "checks": checks,
    })
}

/// The report for others.
pub(super) fn public(checks: &[Check], certificate: Option<&Certificate>) -> Value {
    let checks: Vec<_> = checks
        .iter()
        .map(|check| {
            json!({
                "name": check.name, "state": check.state, "code": check.code, "said": check.public,
            })
        })
        .collect();
    json!({
        "turnpass": env!("CARGO_PKG_VERSION"),
        "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        "checks": checks,
        "certificate": certificate.map(public_certificate),
    })
}

/// The report of a run, told line by line, or whole as JSON.
pub(super) struct Report {
    pub(super) json: bool,
    pub(super) style: Style,
    pub(super) checks: Vec<Check>,
    /// What is known of this program file.
    pub(super) certificate: Option<Certificate>,
    /// Where to write it for others.
    pub(super) destination: Option<Destination>,
}

impl Report {
    pub(super) fn add(&mut self, check: Check) -> Result<(), Fault> {
        if !self.json {
            super::super::print(&line(&check, self.style))?;
        }
        self.checks.push(check);
        Ok(())
    }

    /// Whether a check failed with this code.
    pub(super) fn has_failed_with(&self, code: Option<&str>) -> bool {
        code.is_some() && self.checks.iter().any(|check| check.code == code)
    }

    /// Whether a check of this name failed.
    pub(super) fn has_failed(&self, name: &str) -> bool {
        let mut checks = self.checks.iter();
        checks.any(|check| check.name == name && check.state == State::Fail)
    }

    pub(super) fn exit(&self) -> Exit {
        let exit = self.checks.iter().find_map(|check| check.exit);
        exit.unwrap_or(Exit::Done)
    }

    /// What to do next: that of the first failure, else of the first line that has something to do.
    fn next(&self) -> Option<&str> {
        let of = |state: State| {
            self.checks
                .iter()
                .find(|check| check.state == state && check.next.is_some())
        };
        let check = of(State::Fail).or_else(|| of(State::Ok))?;
        check.next.as_deref()
    }

    pub(super) fn end(self) -> Result<Exit, Fault> {
        let exit = self.exit();
        if let Some(destination) = &self.destination {
            destination.write(&public(&self.checks, self.certificate.as_ref()))?;
        }
        if self.json {
            let object = json!({
                "ok": exit == Exit::Done, "exit": exit as u8, "checks": self.checks, "next": self.next(),
            });
            super::super::print(&format!("{object}\n"))?;
            return Ok(exit);
        }
        if let Some(destination) = &self.destination {
            let path = destination.path().display();
            super::super::print(&format!(
                "report written to {path}; it names no path, account or address\n"
            ))?;
        }
        if let Some(next) = self.next() {
            super::super::print(&format!("next: {}\n", visible(next)))?;
        }
        Ok(exit)
    }
}

pub(super) fn line(check: &Check, style: Style) -> String {
    let mark = match check.state {
        State::Ok => style.green("ok  "),
        State::Warn => style.yellow("warn"),
        State::Fail => style.red("fail"),
    };
    let code = check
        .code
        .map_or_else(String::new, |code| format!("[{code}] "));
    let mut said = visible(&format!("{code}{}", check.said)).replace('\n', " ");
    // A step of a good line is told once, at the end, unless something else comes first.
    if let Some(next) = check.next.as_ref().filter(|_| check.state != State::Ok) {
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
    use std::os::unix::fs::PermissionsExt;

    use turnpass::ErrorCode;

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

    fn report(checks: Vec<Check>) -> Report {
        Report {
            json: true,
            style: Style::default(),
            checks,
            certificate: None,
            destination: None,
        }
    }

    #[test]
    fn the_first_failure_gives_the_exit_code_and_the_next_step() {
        let fails = [ErrorCode::Auth, ErrorCode::McpStartup]
            .map(|code| Check::fail("c", &Error::new(code, "")));
        let mut checks = vec![
            Check::ok("a", "").then("Certify."),
            Check::warn("b", "", "Look."),
        ];
        assert_eq!(report(checks.clone()).next(), Some("Certify."));
        checks.extend(fails);
        let report = report(checks);
        assert_eq!(report.exit(), Exit::SignedOut);
        assert_eq!(report.next(), Some(ErrorCode::Auth.remedy()));
    }

    #[test]
    fn what_is_not_marked_as_public_is_not_in_a_report_for_others() {
        let secret = "/home/somebody/claude";
        let checks = [
            Check::ok("a", secret),
            Check::ok("b", secret).shown_as("found by PATH"),
            Check::warn("c", secret, secret),
            Check::fail("d", &Error::new(ErrorCode::ExecutableUnusable, secret)),
        ];
        let shown = public(&checks, None).to_string();
        assert!(!shown.contains("somebody"), "{shown}");
        assert!(shown.contains("found by PATH") && shown.contains("executable_unusable"));
    }

    #[test]
    fn a_file_that_is_there_is_replaced_only_when_asked_and_never_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        Destination::new(&path, false)
            .unwrap()
            .write(&json!({"n": 1}))
            .unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(Destination::new(&path, false).is_err());
        let other = dir.path().join("other");
        fs::write(&other, "kept").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&other, &link).unwrap();
        assert!(Destination::new(&link, false).is_err());
        Destination::new(&link, true)
            .unwrap()
            .write(&json!({"n": 2}))
            .unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "kept");
        assert!(fs::read_to_string(&link).unwrap().contains("2"));
        let late = Destination::new(&dir.path().join("late"), false).unwrap();
        fs::write(late.path(), "somebody's").unwrap();
        assert!(late.write(&json!({})).is_err());
        assert_eq!(fs::read_to_string(late.path()).unwrap(), "somebody's");
    }
}
