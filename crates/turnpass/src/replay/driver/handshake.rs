//! Before anything is said: the CLI has exactly our tool server with exactly our tools, or the generation ends.

use std::time::Duration;

use serde_json::value::RawValue;
use tokio::time::Instant;

use super::{Carrier, Driver, Ended, Said, Waiting, internal, refused};
use crate::cli::launch::MCP_SERVER;
use crate::conversation::names;
use crate::error::{Error, ErrorCode, Result};
use crate::tools::{Catalogue, check_tools};
use crate::wire::control::{ControlRequest, Initialize, Manifest, Manifests, McpStatusReply};

/// How often the marker is looked for, and the CLI asked again while its tool server is pending. A hand-shake takes 200 ms
/// (2.1.332).
const LOOK_AGAIN: Duration = Duration::from_millis(10);
impl Driver<'_> {
    /// Waits until the CLI has exactly our tools; nothing is said to it before.
    pub(super) async fn connect(&mut self) -> Result<(), Ended> {
        self.waiting = Waiting::Server(Instant::now());
        match self.ways.tools {
            Carrier::InBand => self.publish()?,
            Carrier::Stdio => self.ready().await?,
        }
        loop {
            let id = self.request(&ControlRequest::McpStatus {})?;
            let status = self.reply(&id).await?;
            if is_connected(&status, &self.prepared.catalogue)? {
                return Ok(());
            }
            self.pause().await?;
        }
    }

    /// Tells the CLI of the tools over its own input; the prompt stays that of the command line.
    fn publish(&mut self) -> Result<(), Ended> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Parts<'a> {
            #[serde(borrow)]
            initialize_result: &'a RawValue,
            #[serde(borrow)]
            tools_list_result: &'a RawValue,
        }
        let manifest = self.prepared.catalogue.manifest();
        let parts: Parts<'_> = serde_json::from_str(manifest.get())
            .map_err(|_| internal("the manifest of the tools has lost a part"))?;
        let manifest = Manifest {
            initialize_result: parts.initialize_result,
            tools_list_result: parts.tools_list_result,
        };
        let initialize = Initialize {
            sdk_mcp_servers: &[MCP_SERVER],
            sdk_mcp_server_manifests: Manifests(vec![(MCP_SERVER, manifest)]),
            ..Initialize::default()
        };
        self.request(&ControlRequest::Initialize(initialize))
            .map(drop)
    }

    /// Waits for the tool server's marker.
    async fn ready(&mut self) -> Result<(), Ended> {
        while let Some(marker) = self.running.ready_marker() {
            if marker.exists() {
                return Ok(());
            }
            // A server that failed never makes it, and only the CLI knows that.
            let id = self.request(&ControlRequest::McpStatus {})?;
            let status = self.reply(&id).await?;
            if is_connected(&status, &self.prepared.catalogue)? {
                return Ok(());
            }
            self.pause().await?;
        }
        Ok(())
    }

    /// Hears what comes until it is time to look again.
    async fn pause(&mut self) -> Result<(), Ended> {
        let until = Instant::now() + LOOK_AGAIN;
        loop {
            tokio::select! {
                said = self.said() => drop(said?),
                () = tokio::time::sleep_until(until) => return Ok(()),
            }
        }
    }

    async fn reply(&mut self, wanted: &str) -> Result<Box<RawValue>, Ended> {
        loop {
            match self.said().await? {
                Said::Control { id, payload } if id == wanted => {
                    return payload.ok_or_else(|| Ended::Failed(refused()));
                }
                Said::Control { payload: None, .. } => return Err(Ended::Failed(refused())),
                _ => {}
            }
        }
    }
}

/// Whether the CLI has exactly our server with exactly our tools; false while it is not known yet.
fn is_connected(status: &RawValue, catalogue: &Catalogue) -> Result<bool, Ended> {
    let status: McpStatusReply = serde_json::from_str(status.get()).map_err(|_| {
        let what = "the answer about MCP servers has a shape that is not known";
        Ended::Failed(Error::new(ErrorCode::ProtocolShape, what))
    })?;
    if let Some(foreign) = status.servers.iter().find(|s| s.name != MCP_SERVER) {
        let what = format!("the MCP server {} is loaded", names::shown(&foreign.name));
        return Err(Ended::Failed(Error::new(ErrorCode::IsolationMcp, what)));
    }
    let Some(server) = status.servers.first() else {
        return Ok(false);
    };
    match (server.status.as_str(), &server.tools) {
        ("connected", Some(tools)) => {
            let published: Vec<String> = tools
                .iter()
                .map(|tool| format!("{}{}", names::PREFIX, tool.name))
                .collect();
            let listed = published.iter().map(String::as_str);
            check_tools(listed, catalogue.expected_tool_names())
                .into_result()
                .map_err(Ended::Failed)?;
            Ok(true)
        }
        ("pending" | "connected", _) => Ok(false),
        (other, _) => {
            let what = format!("the tool server is {}", names::shown(other));
            Err(Ended::Failed(Error::new(ErrorCode::McpStartup, what)))
        }
    }
}
