//! How a replay is set up, as data.

use std::path::PathBuf;

use super::ways::{Asked, ways};
use crate::certify::Standing;
use crate::cli::environment::InheritedCredentials;
use crate::error::Result;
use crate::limits::Policy;
use crate::limits::budget::Budgets;
use crate::relay::LoopbackUrl;

/// How the conversation is given to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum History {
    /// As one message of JSON records (replay document). It costs more tokens and cannot carry signatures of thinking.
    Transcript,
    /// As the CLI's own frames: calls, results, images and signed thinking stay what and where they are. Each message of
    /// the user waits for the CLI's word, 5 to 12 ms (2.1.294 to 2.1.332).
    Native,
}

impl History {
    /// The word in settings and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transcript => "transcript",
            Self::Native => "native",
        }
    }
}

impl std::str::FromStr for History {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Native, Self::Transcript]
            .into_iter()
            .find(|history| history.as_str() == text.trim())
            .ok_or_else(|| format!("history {text:?} is not known: use native, transcript"))
    }
}

impl std::fmt::Display for History {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Who lists the host's tools to the CLI. Nobody executes them there: a call is a violation that fails the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// The host itself, over the process's own input and output: no further process.
    InBand,
    /// The turnpass program as a process of its own, started by the CLI (replay document).
    Stdio,
}

/// How a replay is set up.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// How the conversation is given to the process. `None` is native where the CLI was certified for it, else a
    /// transcript; what is set is refused where the CLI was seen not to do it.
    pub history: Option<History>,
    /// Who lists the tools. `None` is in-band where the CLI was certified for it and no transcript was asked for, else stdio;
    /// what is set is refused where the CLI was seen not to do it.
    pub tools: Option<Carrier>,
    /// Whether the conversation gets a cache mark of its own beside the CLI's three. To be switched off should a version
    /// of the CLI use a fourth, since the service refuses a fifth.
    pub cache_mark: bool,
    /// How often the CLI may try again before the service has begun to answer. With 0 one generation is one request.
    pub retries: u32,
    /// Where the CLI is; `None` searches for it.
    pub claude_path: Option<PathBuf>,
    /// The turnpass program, which lists tools over stdio; needed for [`Carrier::Stdio`], and so for a CLI that was not
    /// certified: without it tools go in-band there as well, and are looked at before anything is said.
    pub tool_server: Option<PathBuf>,
    /// What to do when our environment names a credential (replay document: refuse).
    pub inherited_credentials: InheritedCredentials,
    /// What to do about paid usage credits; `None` is `warn`, and `off` in a laboratory run, where nothing is charged.
    pub usage_gate: Option<Policy>,
    /// What the person allows.
    pub budgets: Budgets,
    /// Where requests and tokens are counted and the latest usage is kept; `None` counts in memory, and only for budgets.
    pub state_dir: Option<PathBuf>,
    /// Where certificates of the installed CLI are kept (`turnpass doctor --certify`); `None` is `state_dir`.
    pub certificates: Option<PathBuf>,
    /// A loopback upstream in place of the service.
    pub lab_upstream: Option<LoopbackUrl>,
    /// The CLI's HOME in a laboratory run.
    pub lab_home: Option<PathBuf>,
    /// A folder for raw recordings of what each CLI process prints. It holds prompts and answers, never a credential.
    pub record: Option<PathBuf>,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self {
            history: None,
            tools: None,
            cache_mark: true,
            retries: 0,
            claude_path: None,
            tool_server: None,
            inherited_credentials: InheritedCredentials::Refuse,
            usage_gate: None,
            budgets: Budgets::default(),
            state_dir: None,
            certificates: None,
            lab_upstream: None,
            lab_home: None,
            record: None,
        }
    }
}

impl ReplayOptions {
    /// Which ways a replay takes with a program of this standing, in words: the same decision that it makes before it starts
    /// anything. Tools are taken to be there.
    ///
    /// # Errors
    ///
    /// `version_incompatible` that names the check that stands in the way.
    pub fn ways(&self, standing: &Standing) -> Result<String> {
        let ways = ways(standing, self.asked(), true)?;
        let tools = match ways.tools {
            Carrier::InBand => "in-band",
            Carrier::Stdio => "over stdio",
        };
        Ok(format!("history {}, tools {tools}", ways.told.history))
    }

    /// What is asked for, and what there is.
    pub(crate) fn asked(&self) -> Asked {
        Asked {
            history: self.history,
            tools: self.tools,
            cache_mark: self.cache_mark,
            has_tool_server: self.tool_server.is_some(),
        }
    }
}
