//! How a pool is set up, as data.

use std::path::PathBuf;

use super::ways::ways;
use crate::certify::Standing;
use crate::cli::environment::InheritedCredentials;
use crate::cli::places::PROCESS_BYTES;
use crate::error::Result;
use crate::limits::Policy;
use crate::limits::budget::Budgets;
use crate::relay::LoopbackUrl;

/// How a conversation is given to a process that does not have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reseed {
    /// As the CLI's own messages: calls, results, images and signed thinking stay what they are.
    Native,
    /// As one user message that tells the whole conversation: the pool document's way. Calls and results are text then,
    /// images and documents stay, and thinking is left out. The same holds for what is told to a resumed conversation
    /// that is behind the host's, so no frame of the CLI's is used at all.
    Transcript,
}

/// How the host's tools are served to the CLI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolCarrier {
    /// Over the CLI's own input and output: no port, no token, no process.
    InBand,
    /// By a listener on loopback behind a bearer: the pool document's way. A process is told of it with its start, so no
    /// process is kept ready for the next conversation, and each answer waits until the CLI has taken what was written to
    /// it before.
    Http,
}

/// How a pool is set up.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// How a conversation is given to a process that does not have it. `None` is native where the CLI was certified for it,
    /// else a transcript; what is set is refused where the CLI was seen not to do it.
    pub reseed: Option<Reseed>,
    /// How the host's tools are served. `None` is in-band where the CLI was certified for it, else HTTP; what is set is
    /// refused where the CLI was seen not to do it.
    pub tools: Option<ToolCarrier>,
    /// Where the CLI is; `None` searches for it.
    pub claude_path: Option<PathBuf>,
    /// What to do when our environment names a credential.
    pub inherited_credentials: InheritedCredentials,
    /// Memory for live processes, in bytes; at [`PROCESS_BYTES`] each, at least one. When a conversation needs a process
    /// and there is no room, the one that was idle longest is ended; it is resumed or told anew when it is needed again.
    pub memory_budget_bytes: u64,
    /// Whether a process is kept ready for the next conversation, within the budget; never with [`ToolCarrier::Http`].
    pub spare: bool,
    /// What to do about paid usage credits; `None` is `require_off`, and `off` in a laboratory run, where nothing is
    /// charged.
    pub usage_gate: Option<Policy>,
    /// What the person allows.
    pub budgets: Budgets,
    /// Where requests and tokens are counted, locks of the CLI's sessions are held and the pool's own state is shown.
    /// Without it a stored conversation is forked and never resumed, since nobody can tell whether another program has
    /// it.
    pub state_dir: Option<PathBuf>,
    /// Where certificates of the installed CLI are kept (`turnpass doctor --certify`); `None` is `state_dir`.
    pub certificates: Option<PathBuf>,
    /// A loopback upstream in place of the service.
    pub lab_upstream: Option<LoopbackUrl>,
    /// The CLI's HOME in a laboratory run.
    pub lab_home: Option<PathBuf>,
    /// A folder for raw recordings of what each CLI process prints. It holds prompts, answers, results of tools and
    /// account details.
    pub record: Option<PathBuf>,
}

impl PoolOptions {
    /// Which ways a pool takes with a program of this standing, in words: the same decision that it makes before it starts
    /// anything. Tools are taken to be there.
    ///
    /// # Errors
    ///
    /// `version_incompatible` that names the check that stands in the way.
    pub fn ways(&self, standing: &Standing) -> Result<String> {
        let ways = ways(standing, self.reseed, self.tools)?;
        let history = match ways.reseed {
            Reseed::Native => "native",
            Reseed::Transcript => "transcript",
        };
        let tools = match ways.tools {
            ToolCarrier::InBand => "in-band",
            ToolCarrier::Http => "over HTTP on loopback",
        };
        Ok(format!("history {history}, tools {tools}"))
    }
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            reseed: None,
            tools: None,
            claude_path: None,
            inherited_credentials: InheritedCredentials::default(),
            memory_budget_bytes: 8 * PROCESS_BYTES,
            spare: true,
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
