//! A launch as data: argv, environment and files of one process.
//!
//! The shared parts (isolation, settings, switches) stand here and in [`super::settings`] and [`super::environment`] once;
//! each kind of process is one pure function that adds its own. Nothing long and nothing secret is in argv: prompts,
//! settings and tool servers go by private files, and the relay's address with its secret by the settings file.

mod trial;

mod tool_server;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use super::environment::{Environment, POOL, RELAY};
use super::private_dir::PrivateDir;
use super::settings::settings;
use crate::error::{Error, ErrorCode, Result};
use crate::models::check_model_id;
use crate::process::{ChildGroup, Spawn, StdinMode};
use crate::request::{Effort, ModelId, ThinkingDisplay};
use crate::secret::Secret;

pub use self::tool_server::McpServer;

pub use trial::{Trial, trial};

/// Bytes of all arguments together, with the program's name and one NUL each. Linux takes 128 KiB for one argument and
/// Windows 32 KiB for all; a launch that stays this far below both cannot grow into them with a prompt or a tool list.
pub const ARGV_LIMIT_BYTES: usize = 8 * 1024;

/// The name under which the host's tools are published: `mcp__turnpass__NAME`.
pub const MCP_SERVER: &str = "turnpass";

/// The prompt of a relay's process. It is constant because the CLI derives bytes of its first system block from the
/// first user text of a process (2.1.294, 2.1.310, 2.1.332), and those bytes must be equal from request to request.
pub const PLACEHOLDER: &str = "turnpass placeholder";

/// Names of the files in the private directory.
const SETTINGS_FILE: &str = "settings.json";
const SYSTEM_FILE: &str = "system.txt";
const MCP_FILE: &str = "mcp.json";

/// Print mode with machine-readable output, as far as every kind of process shares it.
const OUTPUT: &[&str] = &[
    "-p",
    "--output-format",
    "stream-json",
    "--verbose",
    "--include-partial-messages",
];

/// Requests come by standard input as well.
const STREAM_INPUT: &[&str] = &["--input-format", "stream-json"];

/// What keeps the person's own configuration and the CLI's own tools out; the union of the three documents.
const ISOLATION: &[&str] = &[
    // All of the CLI's own tools off. Two arguments: an empty value after `=` is not the same.
    "--tools",
    "",
    // No user, project or local settings, so none of their hooks, variables and instructions.
    "--setting-sources=",
    // Only the servers of our own configuration.
    "--strict-mcp-config",
    "--disable-slash-commands",
    // Nothing may run that was not allowed beforehand, and nobody is asked.
    "--permission-mode",
    "dontAsk",
    "--no-chrome",
    // A suggestion would be a second generation.
    "--prompt-suggestions",
    "false",
];

/// What every launch starts from.
#[derive(Clone, Debug)]
pub struct Ground {
    /// The executable.
    pub program: PathBuf,
    /// The environment as [`Environment::build`] made it for this executable and this directory.
    pub environment: Environment,
    /// The private directory that the files will be in.
    pub dir: PathBuf,
    /// The working directory.
    pub cwd: PathBuf,
    /// Built-in plugins that slipped through before, by id.
    pub learned_plugins: BTreeSet<String>,
}

/// One process to start.
#[derive(Clone)]
pub struct Launch {
    /// The executable.
    pub program: PathBuf,
    /// The arguments after the program's own name.
    pub argv: Vec<OsString>,
    /// The whole environment.
    pub environment: Environment,
    /// Files to write first, by name in the private directory.
    pub files: Vec<LaunchFile>,
    /// The working directory.
    pub cwd: PathBuf,
    /// What standard input is.
    pub stdin: StdinMode,
}

/// A private file of a launch.
#[derive(Clone, PartialEq, Eq)]
pub struct LaunchFile {
    /// Its name in the private directory.
    pub name: &'static str,
    /// What is in it.
    pub contents: Vec<u8>,
}

impl fmt::Debug for Launch {
    /// Without the contents of files and the values of variables.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("program", &self.program)
            .field("argv", &self.argv)
            .field("environment", &self.environment)
            .field("files", &self.files)
            .field("cwd", &self.cwd)
            .field("stdin", &self.stdin)
            .finish()
    }
}

impl fmt::Debug for LaunchFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.contents.len())
    }
}

/// Where a relay listens on loopback.
#[derive(Clone, Debug)]
pub struct RelayAddress {
    /// Its port.
    pub port: u16,
    /// The first segment of every path that it answers: letters, digits, `-` and `_`.
    pub secret: Secret,
}

impl RelayAddress {
    /// The address without the secret. It stands in the process's environment, so that a CLI that does not read our
    /// settings file is refused by the relay and never goes to the service by itself.
    fn public(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The address with the secret, for the settings file.
    fn private(&self) -> Result<String> {
        let secret = self.secret.expose_str();
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if secret.is_empty() || !secret.chars().all(allowed) {
            return Err(Error::new(
                ErrorCode::Internal,
                "the relay's secret is no path segment",
            ));
        }
        Ok(format!("{}/{secret}", self.public()))
    }
}

/// A relay process that serves one request: the relay document's way.
#[derive(Clone, Debug)]
pub struct RelayPerRequest<'a> {
    /// The model.
    pub model: &'a ModelId,
    /// The effort, if the host asked for one.
    pub effort: Option<Effort>,
    /// Whether thinking summaries are asked for.
    pub thinking: ThinkingDisplay,
    /// The system prompt; empty for none. A NUL in it reaches the model as U+0000 like any other character (2.1.294,
    /// 2.1.310, 2.1.332: the file is sent as it is).
    pub system: &'a str,
    /// Where the relay listens.
    pub relay: &'a RelayAddress,
    /// The inert tool server, if tools are offered that way.
    pub server: Option<&'a McpServer>,
    /// Members to add to the request's body, as the text of one JSON object (`CLAUDE_CODE_EXTRA_BODY`).
    pub extra_body: Option<&'a str>,
}

/// A relay process that serves many requests. Prompt, tools, model and effort come later over its input, so that one
/// spare process fits them all.
#[derive(Clone, Debug)]
pub struct RelayWarm<'a> {
    /// Whether thinking summaries are asked for; the one thing that cannot be changed later.
    pub thinking: ThinkingDisplay,
    /// Where the relay listens.
    pub relay: &'a RelayAddress,
}

/// A process of a pool: one conversation, told over its input what it is to be.
#[derive(Clone, Copy, Debug)]
pub struct PoolProcess<'a> {
    /// Whether thinking summaries are asked for; it cannot be changed later.
    pub thinking: ThinkingDisplay,
    /// Whether the CLI keeps the conversation on disk, so that it can be resumed.
    pub persists: bool,
    /// A conversation of the CLI to begin with.
    pub resume: Option<Resume<'a>>,
    /// Most rounds of a turn: 1 for a summary, `None` without a bound.
    pub max_turns: Option<u32>,
    /// The effort, for a CLI on which it cannot be set later.
    pub effort: Option<Effort>,
    /// The tool server, when the tools do not go in-band.
    pub server: Option<&'a McpServer>,
    /// A laboratory's upstream in place of the service.
    pub base_url: Option<&'a str>,
}

/// A conversation of the CLI to begin with.
#[derive(Clone, Copy, Debug)]
pub struct Resume<'a> {
    /// The CLI's session, a uuid.
    pub session: &'a str,
    /// The record after which everything is left out, a uuid.
    pub at: Option<&'a str>,
    /// Whether it goes on under a session of its own and leaves the old one as it is.
    pub fork: bool,
    /// The model that goes on. Setting it later would leave the text of a command in the conversation (2.1.294 to 2.1.332).
    pub model: &'a str,
}

/// A replay process: it is asked once.
#[derive(Clone, Debug)]
pub struct Replay<'a> {
    /// The model.
    pub model: &'a ModelId,
    /// The effort, if the host asked for one; thinking off goes by the extra body.
    pub effort: Option<Effort>,
    /// Whether thinking summaries are asked for.
    pub thinking: ThinkingDisplay,
    /// The system prompt; empty for none.
    pub system: &'a str,
    /// The proposing tool server, if tools are offered by a process of its own.
    pub server: Option<&'a McpServer>,
    /// Members to add to the request's body, as the text of one JSON object (`CLAUDE_CODE_EXTRA_BODY`).
    pub extra_body: Option<&'a str>,
    /// How often the CLI may try again before the service has begun to answer.
    pub retries: u32,
    /// A laboratory upstream in place of the service.
    pub upstream: Option<&'a str>,
}

/// A launch while it is put together.
struct Draft<'a> {
    ground: &'a Ground,
    argv: Vec<OsString>,
    files: Vec<LaunchFile>,
}

impl<'a> Draft<'a> {
    fn new(ground: &'a Ground) -> Self {
        Self {
            ground,
            argv: Vec::new(),
            files: Vec::new(),
        }
    }

    fn words(&mut self, words: &[&str]) {
        self.argv.extend(words.iter().map(OsString::from));
    }

    fn value(&mut self, flag: &str, value: &str) {
        self.words(&[flag, value]);
    }

    fn file(&mut self, flag: &str, name: &'static str, contents: Vec<u8>) {
        self.words(&[flag]);
        self.argv.push(self.ground.dir.join(name).into());
        self.files.push(LaunchFile { name, contents });
    }

    fn settings(&mut self, env: &[(&str, &str)]) {
        let settings = settings(&self.ground.learned_plugins, env);
        self.file("--settings", SETTINGS_FILE, settings.to_string().into());
    }

    fn thinking(&mut self, display: ThinkingDisplay) {
        match display {
            ThinkingDisplay::Summarized => self.value("--thinking-display", "summarized"),
            ThinkingDisplay::Omitted => {}
        }
    }

    fn finish(self, environment: Environment, stdin: StdinMode) -> Result<Launch> {
        let launch = Launch {
            program: self.ground.program.clone(),
            argv: self.argv,
            environment,
            files: self.files,
            cwd: self.ground.cwd.clone(),
            stdin,
        };
        let bytes = launch.argv_bytes();
        if bytes > ARGV_LIMIT_BYTES {
            return Err(Error::new(
                ErrorCode::RequestInvalid,
                format!(
                    "the CLI's arguments would have {bytes} bytes, the limit is {ARGV_LIMIT_BYTES}"
                ),
            ));
        }
        Ok(launch)
    }
}

/// `--model`, and the effort in the CLI's words: `none` is thinking off, everything else a level.
fn model_words(draft: &mut Draft<'_>, model: &ModelId, effort: Option<Effort>) -> Result<()> {
    check_model_id(model)?;
    draft.value("--model", &model.0);
    match effort {
        None => {}
        Some(Effort::None) => draft.value("--thinking", "disabled"),
        Some(level) => draft.value("--effort", level.as_str()),
    }
    Ok(())
}

/// The launch of a relay process that serves one request.
///
/// Standard input is empty: with an open pipe the CLI first waits 3 s for input (2.1.294, 2.1.310, 2.1.332).
///
/// # Errors
///
/// `request_invalid` for a model that cannot be named on a command line.
pub fn relay_per_request(ground: &Ground, wanted: &RelayPerRequest<'_>) -> Result<Launch> {
    let mut draft = Draft::new(ground);
    draft.words(&[OUTPUT[0], PLACEHOLDER]);
    draft.words(&OUTPUT[1..]);
    draft.words(ISOLATION);
    draft.words(&["--no-session-persistence", "--max-turns", "1"]);
    draft.thinking(wanted.thinking);
    model_words(&mut draft, wanted.model, wanted.effort)?;
    draft.file("--system-prompt-file", SYSTEM_FILE, wanted.system.into());
    let address = wanted.relay.private()?;
    let mut env = vec![("ANTHROPIC_BASE_URL", address.as_str())];
    env.extend(
        wanted
            .extra_body
            .map(|body| ("CLAUDE_CODE_EXTRA_BODY", body)),
    );
    draft.settings(&env);
    if let Some(server) = wanted.server {
        let config = server.config().to_string();
        draft.file("--mcp-config", MCP_FILE, config.into());
    }
    draft.finish(relay_environment(ground, wanted.relay), StdinMode::Null)
}

/// The launch of a relay process that serves many requests.
///
/// # Errors
///
/// `request_invalid` when paths make the command line too long.
pub fn relay_warm(ground: &Ground, wanted: &RelayWarm<'_>) -> Result<Launch> {
    let mut draft = Draft::new(ground);
    draft.words(OUTPUT);
    draft.words(STREAM_INPUT);
    draft.words(ISOLATION);
    draft.words(&["--no-session-persistence"]);
    draft.thinking(wanted.thinking);
    draft.settings(&[("ANTHROPIC_BASE_URL", &wanted.relay.private()?)]);
    draft.finish(relay_environment(ground, wanted.relay), StdinMode::QUEUE)
}

/// The launch of a pool's process.
///
/// # Errors
///
/// `request_invalid` for a session that is no uuid, or when paths make the command line too long.
pub fn pool(ground: &Ground, wanted: &PoolProcess<'_>) -> Result<Launch> {
    let mut draft = Draft::new(ground);
    draft.words(OUTPUT);
    draft.words(STREAM_INPUT);
    draft.words(ISOLATION);
    // A resumed conversation is sent with the prompt that it was recorded with otherwise (2.1.332).
    draft.words(&["--system-prompt-snapshot", "off"]);
    draft.value("--allowedTools", &format!("mcp__{MCP_SERVER}__*"));
    draft.thinking(wanted.thinking);
    if !wanted.persists {
        draft.words(&["--no-session-persistence"]);
    }
    if let Some(resume) = wanted.resume {
        draft.value("--resume", uuid_of(resume.session)?);
        if let Some(at) = resume.at {
            draft.value("--resume-session-at", uuid_of(at)?);
        }
        if resume.fork {
            draft.words(&["--fork-session"]);
        }
        draft.value("--model", resume.model);
    }
    if let Some(most) = wanted.max_turns {
        draft.value("--max-turns", &most.to_string());
    }
    if let Some(effort) = wanted.effort {
        draft.value("--effort", effort.as_str());
    }
    let env: Vec<_> = wanted
        .base_url
        .map(|url| ("ANTHROPIC_BASE_URL", url))
        .into_iter()
        .collect();
    draft.settings(&env);
    if let Some(server) = wanted.server {
        let config = server.config().to_string();
        draft.file("--mcp-config", MCP_FILE, config.into());
    }
    let mut environment = ground.environment.clone();
    environment.apply(POOL);
    if let Some(url) = wanted.base_url {
        environment.set("ANTHROPIC_BASE_URL", url);
    }
    draft.finish(environment, StdinMode::QUEUE)
}

/// A session or record of the CLI as a word of a command line. It comes from a state that a host stored, so it is looked
/// at: a text that began with `-` would be an option.
fn uuid_of(text: &str) -> Result<&str> {
    match uuid::Uuid::try_parse(text) {
        Ok(_) => Ok(text),
        Err(_) => Err(Error::new(
            ErrorCode::RequestInvalid,
            "a session or message of the CLI is no uuid",
        )),
    }
}

/// The launch of a replay process.
///
/// # Errors
///
/// `request_invalid` for a model that cannot be named on a command line.
pub fn replay(ground: &Ground, wanted: &Replay<'_>) -> Result<Launch> {
    let mut draft = Draft::new(ground);
    draft.words(OUTPUT);
    draft.words(STREAM_INPUT);
    draft.words(ISOLATION);
    // Without a session the CLI also leaves images of user messages alone (2.1.294 to 2.1.332).
    draft.words(&["--no-session-persistence", "--max-turns", "1"]);
    draft.thinking(wanted.thinking);
    model_words(&mut draft, wanted.model, wanted.effort)?;
    draft.file("--system-prompt-file", SYSTEM_FILE, wanted.system.into());
    let extra = wanted.extra_body;
    let env: Vec<_> = extra
        .map(|body| ("CLAUDE_CODE_EXTRA_BODY", body))
        .into_iter()
        .collect();
    draft.settings(&env);
    if let Some(server) = wanted.server {
        let config = server.config().to_string();
        draft.file("--mcp-config", MCP_FILE, config.into());
    }
    let mut environment = ground.environment.clone();
    environment.apply(RELAY);
    environment.set("CLAUDE_CODE_MAX_RETRIES", wanted.retries.to_string());
    if let Some(upstream) = wanted.upstream {
        environment.set("ANTHROPIC_BASE_URL", upstream);
    }
    draft.finish(environment, StdinMode::QUEUE)
}

/// The launch of a process that is only asked: control requests and no user line.
///
/// It has no relay's address and no switch that keeps it from its account: `get_usage` asks a fixed address, and
/// `CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC` would empty its answer (2.1.332).
///
/// # Errors
///
/// `request_invalid` when paths make the command line too long.
pub fn asked(ground: &Ground) -> Result<Launch> {
    let mut draft = Draft::new(ground);
    draft.words(OUTPUT);
    draft.words(STREAM_INPUT);
    draft.words(ISOLATION);
    draft.words(&["--no-session-persistence"]);
    draft.settings(&[]);
    draft.finish(ground.environment.clone(), StdinMode::QUEUE)
}

fn relay_environment(ground: &Ground, relay: &RelayAddress) -> Environment {
    let mut environment = ground.environment.clone();
    environment.apply(RELAY);
    environment.set("ANTHROPIC_BASE_URL", relay.public());
    environment
}

impl Launch {
    /// Bytes of the command line: the program and every argument, each with its NUL.
    pub fn argv_bytes(&self) -> usize {
        let program = self.program.as_os_str().len() + 1;
        self.argv
            .iter()
            .fold(program, |sum, argument| sum + argument.len() + 1)
    }

    /// Writes the files and starts the process.
    ///
    /// Has to be called within a tokio runtime. The files are small enough, and the directory local enough, for plain
    /// blocking writes.
    ///
    /// # Errors
    ///
    /// What [`PrivateDir::write`] and [`ChildGroup::spawn`] return; `internal` when the launch was made for another
    /// directory than `dir`.
    pub fn start(self, dir: &PrivateDir) -> Result<ChildGroup> {
        for file in &self.files {
            let path = dir.write(file.name, &file.contents)?;
            if !self.argv.iter().any(|argument| Path::new(argument) == path) {
                return Err(Error::new(
                    ErrorCode::Internal,
                    "a launch was started in another private directory than it was made for",
                ));
            }
        }
        ChildGroup::spawn(&Spawn {
            program: self.program,
            argv: self.argv,
            env: self.environment.into_pairs(),
            cwd: self.cwd,
            stdin: self.stdin,
            orphaned_dir: Some(dir.path().to_owned()),
        })
    }
}

/// The option that the CLI says it does not know, found in the tail of its standard error. A start that fails so fails
/// every time: the version lacks the option (`error: unknown option '--x'`, exit 1: 2.1.294, 2.1.310, 2.1.332).
pub fn refused_option(stderr_tail: &str) -> Option<Error> {
    let (_, rest) = stderr_tail.split_once("error: unknown option '")?;
    let option = rest
        .split('\'')
        .next()
        .filter(|option| option.starts_with('-'))?;
    Some(Error::new(
        ErrorCode::VersionIncompatible,
        format!("the CLI does not know the option {option}"),
    ))
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
