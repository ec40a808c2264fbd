//! How a relay is set up, as data.

use std::path::PathBuf;

use super::completion::ProcessMode;
use super::prepared::ToolCarrier;
use super::upstream::LoopbackUrl;
use super::ways::{Asked, ways};
use crate::certify::Standing;
use crate::cli::environment::InheritedCredentials;
use crate::cli::places::PROCESS_BYTES;
use crate::error::Result;
use crate::limits::Policy;
use crate::limits::budget::Budgets;

/// How a relay is set up.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// Kept processes, or one a request. `None` keeps them where the CLI was certified for it; what is set is refused where
    /// the CLI was seen not to do it.
    pub process: Option<ProcessMode>,
    /// How the host's tools reach the service. `None` is in the extra body unless the CLI was seen not to pass that on; what
    /// is set is refused then.
    pub tools: Option<ToolCarrier>,
    /// Where the CLI is; `None` searches for it.
    pub claude_path: Option<PathBuf>,
    /// The turnpass program, which serves tools over stdio; needed only for [`ToolCarrier::Mcp`] with
    /// [`ProcessMode::PerRequest`].
    pub tool_server: Option<PathBuf>,
    /// What to do when our environment names a credential.
    pub inherited_credentials: InheritedCredentials,
    /// Memory for kept processes, in bytes; at [`PROCESS_BYTES`] each, at least one.
    pub memory_budget_bytes: u64,
    /// Processes that are kept ready ahead of the demand, within the budget.
    pub spares: usize,
    /// What to do about paid usage credits; `None` is `warn`, and `off` in a laboratory run, where nothing is charged.
    pub usage_gate: Option<Policy>,
    /// What the person allows.
    pub budgets: Budgets,
    /// Where requests and tokens are counted, and the latest usage and models are kept; `None` counts in memory, and only
    /// for budgets.
    pub state_dir: Option<PathBuf>,
    /// Where certificates of the installed CLI are kept (`turnpass doctor --certify`); `None` is `state_dir`.
    pub certificates: Option<PathBuf>,
    /// A loopback upstream in place of the service.
    pub lab_upstream: Option<LoopbackUrl>,
    /// The CLI's HOME in a laboratory run.
    pub lab_home: Option<PathBuf>,
    /// A folder for raw recordings of what each CLI process prints. It holds prompts and answers, never the bearer.
    pub record: Option<PathBuf>,
}

impl RelayOptions {
    /// Which ways a relay takes with a program of this standing, in words: the same decision that it makes before it starts
    /// anything. Tools are taken to be there.
    ///
    /// # Errors
    ///
    /// `version_incompatible` that names the check that stands in the way.
    pub fn ways(&self, standing: &Standing) -> Result<String> {
        let asked = Asked {
            process: self.process,
            tools: self.tools,
        };
        let ways = ways(standing, asked, true)?;
        let process = match ways.process {
            ProcessMode::Warm => "kept processes",
            ProcessMode::PerRequest => "a process for each request",
        };
        let tools = match ways.tools {
            ToolCarrier::ExtraBody => "in the extra body",
            ToolCarrier::Mcp => "over MCP",
        };
        Ok(format!("{process}, tools {tools}"))
    }
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self {
            process: None,
            tools: None,
            claude_path: None,
            tool_server: None,
            inherited_credentials: InheritedCredentials::default(),
            memory_budget_bytes: 5 * PROCESS_BYTES,
            spares: 1,
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

#[cfg(test)]
mod tests {
    use super::super::RelayTransport;
    use super::*;
    use crate::error::ErrorCode;

    #[tokio::test]
    async fn a_laboratory_home_that_is_not_there_is_refused_and_not_made() {
        let home = std::env::temp_dir().join("turnpass-no-such-home");
        let options = RelayOptions {
            lab_upstream: Some(LoopbackUrl::parse("http://127.0.0.1:9").unwrap()),
            lab_home: Some(home.clone()),
            ..RelayOptions::default()
        };
        let error = RelayTransport::new(options).unwrap_err();
        assert_eq!(error.code(), ErrorCode::WorkingDirectory);
        assert!(!home.exists());
    }
}
