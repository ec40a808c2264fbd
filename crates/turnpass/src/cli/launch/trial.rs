//! The launch of a process that is tried in the laboratory before it is relied on.

use std::path::PathBuf;

use super::{Draft, Ground, ISOLATION, Launch, MCP_SERVER, McpServer, OUTPUT, STREAM_INPUT};
use super::{MCP_FILE, SYSTEM_FILE};
use crate::error::Result;
use crate::process::StdinMode;

/// A process to try: the flags of every transport at once, as far as they go together, and an upstream on loopback.
#[derive(Clone, Debug, Default)]
pub struct Trial {
    /// The upstream.
    pub base_url: String,
    /// The model.
    pub model: String,
    /// The effort, as a word of the command line.
    pub effort: Option<String>,
    /// The system prompt; empty for none.
    pub system: String,
    /// Whether our tools may be called.
    pub calls_allowed: bool,
    /// Whether the CLI keeps the conversation on disk.
    pub persists: bool,
    /// A conversation of the CLI to begin with: session, record, whether it is forked.
    pub resume: Option<(String, String, bool)>,
    /// Most rounds of a turn.
    pub max_turns: Option<u32>,
    /// What may be spent by the CLI's own estimate, in dollars.
    pub budget_usd: Option<String>,
    /// A tool server beside those that come in-band.
    pub server: Option<McpServer>,
    /// The working directory in place of the ground's.
    pub cwd: Option<PathBuf>,
}

/// The launch of a process to try.
///
/// # Errors
///
/// `request_invalid` when paths make the command line too long.
pub fn trial(ground: &Ground, wanted: &Trial) -> Result<Launch> {
    let mut draft = Draft::new(ground);
    draft.words(OUTPUT);
    draft.words(STREAM_INPUT);
    draft.words(ISOLATION);
    draft.value("--model", &wanted.model);
    if let Some(effort) = &wanted.effort {
        draft.value("--effort", effort);
    }
    draft.value("--thinking-display", "summarized");
    draft.words(&["--system-prompt-snapshot", "off"]);
    if wanted.calls_allowed {
        draft.value("--allowedTools", &format!("mcp__{MCP_SERVER}__*"));
    }
    if !wanted.persists {
        draft.words(&["--no-session-persistence"]);
    }
    if let Some((session, at, fork)) = &wanted.resume {
        draft.words(&["--resume", session, "--resume-session-at", at]);
        if *fork {
            draft.words(&["--fork-session"]);
        }
    }
    if let Some(most) = wanted.max_turns {
        draft.value("--max-turns", &most.to_string());
    }
    if let Some(budget) = &wanted.budget_usd {
        draft.value("--max-budget-usd", budget);
    }
    draft.file(
        "--system-prompt-file",
        SYSTEM_FILE,
        wanted.system.as_bytes().to_vec(),
    );
    draft.settings(&[("ANTHROPIC_BASE_URL", &wanted.base_url)]);
    if let Some(server) = &wanted.server {
        let config = server.config().to_string();
        draft.file("--mcp-config", MCP_FILE, config.into());
    }
    let mut environment = ground.environment.clone();
    environment.set("CLAUDE_CODE_MAX_RETRIES", "0");
    environment.set("ANTHROPIC_BASE_URL", wanted.base_url.as_str());
    let mut launch = draft.finish(environment, StdinMode::QUEUE)?;
    if let Some(cwd) = &wanted.cwd {
        launch.cwd.clone_from(cwd);
    }
    Ok(launch)
}
