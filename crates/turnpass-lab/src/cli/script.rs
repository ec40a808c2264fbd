//! The script as data: what a run of the scripted CLI does, and its JSON form.
//!
//! The form is documented in `docs/lab/cli.md`. Unknown fields are refused, and every error names the
//! run and the step, because a script that is read wrongly makes a test pass for the wrong reason.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::emulator::EmulatorOptions;

pub use super::step::{
    Control, Grandchild, McpCall, McpConnect, PlayFixture, Post, Raw, Reply, Stderr, Step,
};

/// The version that a script claims when it names none: the one whose recordings we keep most of.
pub const DEFAULT_VERSION: &str = "2.1.332";

/// A whole script: how the scripted `claude` answers each way of starting it.
#[derive(Debug, Clone, Serialize)]
pub struct Script {
    /// Printed by `--version` as `VERSION (Claude Code)`.
    pub version: String,
    /// Answers to `auth status`, used in order; the last one stays.
    pub auth: Vec<Auth>,
    /// Where each run writes down what it was given (see [`super::recording`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<PathBuf>,
    /// What ordinary starts do, used in order; the last one stays.
    pub runs: Vec<Run>,
    /// What `auth login` does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub login: Vec<Step>,
    /// What `auth logout` does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logout: Vec<Step>,
}

/// What one start does.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Run {
    /// Plays these steps, then ends with code 0.
    Steps(Vec<Step>),
    /// Behaves like the real CLI.
    Emulator(EmulatorOptions),
    /// Answers `auth status`; chosen by the arguments, not written in a script.
    #[serde(skip)]
    AuthStatus(Auth),
}

/// The answer to `auth status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Auth {
    /// Printed as JSON, unless `raw` is given.
    #[serde(default = "signed_in", skip_serializing_if = "Value::is_null")]
    pub json: Value,
    /// Printed as it is, in place of `json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw: Option<String>,
    /// Exit code; by default 0 if `json.loggedIn` is true, else 1, as the real CLI does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<u8>,
    /// Wait before the answer.
    #[serde(default)]
    pub delay_ms: u64,
    /// Text for stderr.
    #[serde(default)]
    pub stderr: String,
    /// Never answer and never end.
    #[serde(default)]
    pub hang: bool,
}

impl Auth {
    /// Signed in with a made-up Max plan.
    pub fn signed_in() -> Auth {
        Auth::answer(signed_in())
    }

    /// Signed out, as 2.1.332 says it; exit code 1.
    pub fn signed_out() -> Auth {
        Auth::answer(json!({"loggedIn": false, "authMethod": "none", "apiProvider": "firstParty"}))
    }

    /// Answers with this JSON.
    pub fn answer(json: Value) -> Auth {
        Auth {
            json,
            raw: None,
            exit: None,
            delay_ms: 0,
            stderr: String::new(),
            hang: false,
        }
    }

    /// The exit code that goes with the answer.
    pub fn exit_code(&self) -> u8 {
        let logged_in = self.json.get("loggedIn") == Some(&Value::Bool(true));
        self.exit.unwrap_or(u8::from(!logged_in))
    }
}

/// Measured on 2.1.332 with a made-up claude.ai sign-in.
fn signed_in() -> Value {
    json!({
        "loggedIn": true, "authMethod": "claude.ai", "apiProvider": "firstParty",
        "analyticsDisabled": true, "loginExpiresAt": null, "consoleProfileSignInOffered": true,
        "email": null, "orgId": null, "orgName": null, "subscriptionType": "max",
        "storedClaudeAiLogin": true, "planTier": "max_5x",
    })
}

/// Why a script cannot be played: where, and what to correct.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{place}: {message}")]
pub struct ScriptError {
    /// The file, and the run and step in it, both counted from 1.
    pub place: String,
    /// What is wrong there.
    pub message: String,
}

impl ScriptError {
    pub(crate) fn at(place: impl Into<String>, message: impl ToString) -> ScriptError {
        ScriptError {
            place: place.into(),
            message: message.to_string(),
        }
    }
}

impl Script {
    /// A script of `version` that is signed in and whose every start plays `steps`.
    pub fn steps(version: &str, steps: impl IntoIterator<Item = Step>) -> Script {
        Script::runs(version, [Run::Steps(steps.into_iter().collect())])
    }

    /// A script of `version` that is signed in and whose starts play `runs` in order.
    pub fn runs(version: &str, runs: impl IntoIterator<Item = Run>) -> Script {
        Script {
            version: version.to_owned(),
            auth: vec![Auth::signed_in()],
            record: None,
            runs: runs.into_iter().collect(),
            login: Vec::new(),
            logout: Vec::new(),
        }
    }

    /// The built-in script that behaves like the real CLI of `version`.
    pub fn emulator(version: &str) -> Script {
        Script::runs(version, [Run::Emulator(EmulatorOptions::default())])
    }

    /// The same script, recording into `dir`.
    #[must_use]
    pub fn recording(mut self, dir: &Path) -> Script {
        self.record = Some(dir.to_path_buf());
        self
    }

    /// The JSON form that [`Script::parse`] reads.
    pub fn to_json(&self) -> String {
        // Every field is a string, number, list or JSON value: nothing in it can fail to serialize.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Reads and parses a script file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or [`Script::parse`] refuses it.
    pub fn load(path: &Path) -> Result<Script, ScriptError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ScriptError::at(&name, error))?;
        Script::parse(&text)
            .map_err(|error| ScriptError::at(format!("{name}: {}", error.place), error.message))
    }

    /// Parses the JSON form.
    ///
    /// # Errors
    ///
    /// Not JSON, an unknown field, or a step that is not one; the error names run and step.
    pub fn parse(text: &str) -> Result<Script, ScriptError> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Form {
            version: Option<String>,
            auth: Option<Value>,
            record: Option<PathBuf>,
            #[serde(default)]
            runs: Vec<Value>,
            #[serde(default)]
            login: Vec<Value>,
            #[serde(default)]
            logout: Vec<Value>,
        }
        let form: Form =
            serde_json::from_str(text).map_err(|error| ScriptError::at("script", error))?;
        let answers = match form.auth {
            None => Vec::new(),
            Some(Value::Array(list)) => list,
            Some(one) => vec![one],
        };
        let mut auth = Vec::new();
        for (index, value) in answers.into_iter().enumerate() {
            auth.push(parse_auth(&format!("auth {}", index + 1), value)?);
        }
        if auth.is_empty() {
            auth.push(Auth::signed_in());
        }
        let mut runs = Vec::new();
        for (index, value) in form.runs.into_iter().enumerate() {
            runs.push(parse_run(&format!("run {}", index + 1), value)?);
        }
        if runs.is_empty() {
            runs.push(Run::Emulator(EmulatorOptions::default()));
        }
        Ok(Script {
            version: form.version.unwrap_or_else(|| DEFAULT_VERSION.to_owned()),
            auth,
            record: form.record,
            runs,
            login: parse_steps("login", form.login)?,
            logout: parse_steps("logout", form.logout)?,
        })
    }

    /// The run of the start number `index`, from 0; past the end, the last one.
    pub fn run_for(&self, index: u64) -> Run {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let last = self.runs.len().saturating_sub(1);
        let run = self.runs.get(index.min(last)).cloned();
        run.unwrap_or_else(|| Run::Emulator(EmulatorOptions::default()))
    }

    /// The answer to the `auth status` number `index`, from 0; past the end, the last one.
    pub fn auth_for(&self, index: u64) -> Auth {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let last = self.auth.len().saturating_sub(1);
        self.auth
            .get(index.min(last))
            .cloned()
            .unwrap_or_else(Auth::signed_in)
    }
}

fn parse_auth(place: &str, value: Value) -> Result<Auth, ScriptError> {
    serde_json::from_value(value).map_err(|error| ScriptError::at(place, error))
}

fn parse_run(place: &str, value: Value) -> Result<Run, ScriptError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Form {
        steps: Option<Vec<Value>>,
        emulator: Option<EmulatorOptions>,
    }
    let form: Form =
        serde_json::from_value(value).map_err(|error| ScriptError::at(place, error))?;
    match (form.steps, form.emulator) {
        (Some(steps), None) => Ok(Run::Steps(parse_steps(place, steps)?)),
        (None, Some(options)) => Ok(Run::Emulator(options)),
        _ => Err(ScriptError::at(place, "give either `steps` or `emulator`")),
    }
}

fn parse_steps(place: &str, values: Vec<Value>) -> Result<Vec<Step>, ScriptError> {
    let mut steps = Vec::new();
    for (index, value) in values.into_iter().enumerate() {
        steps.push(parse_step(&format!("{place}, step {}", index + 1), value)?);
    }
    Ok(steps)
}

fn parse_step(place: &str, value: Value) -> Result<Step, ScriptError> {
    let value = match value {
        Value::String(name) => json!({ name: null }),
        other => other,
    };
    // The steps inside a step are read first, so that the error names the inner one.
    let inner = value.get("loop").or_else(|| value.pointer("/repeat/steps"));
    if let Some(Value::Array(list)) = inner {
        parse_steps(place, list.clone())?;
    }
    serde_json::from_value(value).map_err(|error| ScriptError::at(place, error))
}

/// Counters on disk that survive a run, so that a first and a second start can differ.
pub(crate) struct Counters {
    path: PathBuf,
}

impl Counters {
    pub(crate) fn beside(script: &Path) -> Counters {
        let mut path = script.as_os_str().to_owned();
        path.push(".count");
        Counters {
            path: PathBuf::from(path),
        }
    }

    /// The number of earlier calls with `name`; the file is locked, so parallel starts get their own.
    pub(crate) fn next(&self, name: &str) -> Result<u64, ScriptError> {
        let place = self.path.display().to_string();
        self.advance(name)
            .map_err(|error| ScriptError::at(place, error))
    }

    fn advance(&self, name: &str) -> std::io::Result<u64> {
        let mut options = OpenOptions::new();
        let mut file: File = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.path)?;
        file.lock()?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let mut counts: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
        let count = counts.get(name).and_then(Value::as_u64).unwrap_or(0);
        counts.insert(name.to_owned(), json!(count + 1));
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(Value::Object(counts).to_string().as_bytes())?;
        file.unlock()?;
        Ok(count)
    }
}
