//! How the host's tools reach one CLI process: inside its own input and output, or by a listener on loopback.
//!
//! What differs between the two for a session is here: where a call comes from, where its answer goes, and that an answer
//! over another connection than the CLI's input has no order with what is written there.

use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::cli::launch::McpServer;
use crate::conversation::ToolResult;
use crate::error::{Error, ErrorCode, Result};
use crate::process::Stdin;
use crate::tools::http::{CallAddress, HttpCarrier, Occurrence};
use crate::tools::mcp::RpcId;
use crate::tools::{Catalogue, Policy, Server, in_band};

/// The carrier of one process.
#[derive(Debug)]
pub(crate) enum Carrier {
    /// The server is there once the process is told of tools.
    InBand(Option<Server>),
    /// Its tools are those that it was started with.
    Http {
        listener: HttpCarrier,
        occurrences: mpsc::Receiver<Occurrence>,
        /// Whether the CLI has asked for the list of tools.
        listed: bool,
    },
}

/// Where the answer to a call goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    InBand(in_band::ReturnAddress, RpcId),
    Http(CallAddress),
}

impl Carrier {
    /// A listener for these tools. It has to be there before the process that is told of it.
    ///
    /// # Errors
    ///
    /// `mcp_startup` when no loopback port can be had.
    pub(crate) async fn listen(
        catalogue: &Catalogue,
        policy: Policy,
        tasks: &TaskTracker,
    ) -> Result<Self> {
        let server = Server::new(catalogue, policy);
        let (listener, occurrences) = HttpCarrier::start(server, tasks).await?;
        Ok(Self::Http {
            listener,
            occurrences,
            listed: false,
        })
    }

    /// What the launch has to name.
    pub(crate) fn mcp_server(&self) -> Option<McpServer> {
        match self {
            Self::InBand(_) => None,
            Self::Http { listener, .. } => Some(listener.mcp_server_config()),
        }
    }

    /// The tools that `initialize` has to announce; those of a listener are asked for.
    pub(crate) fn announced<'a>(
        &mut self,
        tools: Option<&'a Catalogue>,
        policy: Policy,
    ) -> Option<&'a Catalogue> {
        match self {
            Self::InBand(server) => {
                *server = tools.map(|tools| Server::new(tools, policy));
                tools
            }
            Self::Http { .. } => None,
        }
    }

    /// Whether answers go another way than lines do, so that neither is known to be read first.
    pub(crate) fn is_apart(&self) -> bool {
        matches!(self, Self::Http { .. })
    }

    /// Whether the CLI may be asked which tools it has: over HTTP it fetches them first.
    pub(crate) fn is_listed(&self) -> bool {
        match self {
            Self::InBand(_) => true,
            Self::Http { listed, .. } => *listed,
        }
    }

    /// What the CLI does over the listener; never, where there is none.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Occurrence {
        let Self::Http {
            occurrences,
            listed,
            ..
        } = self
        else {
            return std::future::pending().await;
        };
        match occurrences.recv().await {
            Some(occurrence) => {
                *listed |= occurrence == Occurrence::Listed;
                occurrence
            }
            // The listener lives as long as this value.
            None => std::future::pending().await,
        }
    }

    /// What has come over the listener already.
    pub(crate) fn waiting(&mut self) -> Option<Occurrence> {
        match self {
            Self::InBand(_) => None,
            Self::Http { occurrences, .. } => occurrences.try_recv().ok(),
        }
    }

    /// Gives a result. With `ends` the CLI ends its turn after it.
    pub(crate) fn answer(
        &self,
        stdin: &Stdin,
        to: &Address,
        result: &ToolResult,
        ends: bool,
    ) -> Result<()> {
        match (self, to) {
            (Self::InBand(_), Address::InBand(address, id)) => {
                let message = match ends {
                    true => Server::answer_and_end(id, result),
                    false => Server::answer(id, result),
                };
                let mut line = in_band::wrap(address, Some(&message));
                line.push(b'\n');
                Ok(stdin.write(line)?)
            }
            (Self::Http { listener, .. }, Address::Http(to)) => {
                // One that does not wait any more was given up by the CLI, which says so by itself.
                let _ = match ends {
                    true => listener.answer_and_end(*to, result),
                    false => listener.answer(*to, result),
                };
                Ok(())
            }
            _ => {
                let what = "a call came by another way than the tools are served";
                Err(Error::new(ErrorCode::Internal, what))
            }
        }
    }
}
