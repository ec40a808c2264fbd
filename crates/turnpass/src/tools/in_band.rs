//! The in-band carrier: MCP messages inside the CLI's control requests on its own stdin and stdout.
//!
//! No port, no token, no process. Measured on 2.1.332: with a manifest nothing is exchanged before the first call, calls
//! are not cut for silence (330 s tried), results may come in any order.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::catalogue::Catalogue;
use super::mcp::{Reply, Server};
use crate::conversation::names::{SERVER, shown};
use crate::wire::control::{self, ControlRequest, Initialize, Line, Manifest, Manifests};

/// The first control request of a process: its prompt, and the tools when they go in-band.
///
/// The prompt is not kept as a snapshot, since later changes would then be accepted and ignored (2.1.294, 2.1.310,
/// 2.1.332); an empty list is the only way to have none.
pub(crate) fn initialize(request_id: &str, system: &str, catalogue: Option<&Catalogue>) -> Line {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Parts<'a> {
        #[serde(borrow)]
        initialize_result: &'a RawValue,
        #[serde(borrow)]
        tools_list_result: &'a RawValue,
    }
    let manifest = catalogue.map(Catalogue::manifest);
    let parts: Option<Parts<'_>> = manifest
        .as_deref()
        .and_then(|manifest| serde_json::from_str(manifest.get()).ok());
    let manifests = parts.map(|parts| {
        Manifests(vec![(
            SERVER,
            Manifest {
                initialize_result: parts.initialize_result,
                tools_list_result: parts.tools_list_result,
            },
        )])
    });
    let prompt = [system];
    let initialize = Initialize {
        sdk_mcp_servers: if manifests.is_some() { &[SERVER] } else { &[] },
        sdk_mcp_server_manifests: manifests.unwrap_or_default(),
        system_prompt: Some(if system.is_empty() { &[] } else { &prompt }),
        system_prompt_snapshot: Some(false),
    };
    control::control_request(request_id, &ControlRequest::Initialize(initialize))
}

/// An MCP message as it came.
#[derive(Clone, Copy, Debug)]
pub struct Wrapped<'a> {
    /// Goes back in the answer; JSON text of it.
    request_id: &'a RawValue,
    server: &'a RawValue,
    message: &'a RawValue,
}

/// Takes a record of the CLI apart. `None` when it is no `mcp_message` control request.
pub fn unwrap(record: &[u8]) -> Option<Wrapped<'_>> {
    #[derive(Deserialize)]
    struct Record<'a> {
        #[serde(borrow, rename = "type")]
        kind: Cow<'a, str>,
        #[serde(borrow)]
        request_id: &'a RawValue,
        #[serde(borrow)]
        request: Request<'a>,
    }
    #[derive(Deserialize)]
    struct Request<'a> {
        #[serde(borrow)]
        subtype: Cow<'a, str>,
        #[serde(borrow)]
        server_name: &'a RawValue,
        #[serde(borrow)]
        message: &'a RawValue,
    }
    let record: Record<'_> = serde_json::from_slice(record).ok()?;
    (record.kind == "control_request" && record.request.subtype == "mcp_message").then_some(
        Wrapped {
            request_id: record.request_id,
            server: record.request.server_name,
            message: record.request.message,
        },
    )
}

/// Where the later answer to a call goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReturnAddress(Box<str>);

impl Wrapped<'_> {
    /// The MCP message.
    pub fn message(&self) -> &RawValue {
        self.message
    }

    /// Where an answer goes; to be kept with a call that is answered later.
    pub fn return_address(&self) -> ReturnAddress {
        ReturnAddress(self.request_id.get().into())
    }

    /// Gives the message to the server. The reply's message is a whole control response, without line end; for a call
    /// that the host answers later there is none yet.
    pub fn handle(&self, server: &mut Server) -> Reply {
        let name: Cow<'_, str> = serde_json::from_str(self.server.get()).unwrap_or_default();
        let address = self.return_address();
        if name != SERVER {
            let why = format!("no MCP server {:?} here", shown(&name));
            return Reply {
                message: Some(wrap_error(&address, &why)),
                ..Reply::default()
            };
        }
        let mut reply = server.handle(self.message.get().as_bytes());
        let later = matches!(reply.occurrence, super::mcp::Occurrence::Call(_));
        if !later {
            reply.message = Some(wrap(&address, reply.message.as_deref()));
        }
        reply
    }
}

/// The control response that carries an MCP message. A notification has no answer of its own, and the CLI still wants
/// its control request answered: with an empty result.
pub fn wrap(address: &ReturnAddress, message: Option<&[u8]>) -> Vec<u8> {
    const EMPTY: &[u8] = br#"{"jsonrpc":"2.0","id":0,"result":{}}"#;
    let mut line = Vec::new();
    line.extend_from_slice(
        br#"{"type":"control_response","response":{"subtype":"success","request_id":"#,
    );
    line.extend_from_slice(address.0.as_bytes());
    line.extend_from_slice(br#","response":{"mcp_response":"#);
    line.extend_from_slice(message.unwrap_or(EMPTY));
    line.extend_from_slice(b"}}}");
    line
}

/// The control response that refuses an MCP message.
pub fn wrap_error(address: &ReturnAddress, why: &str) -> Vec<u8> {
    #[derive(Serialize)]
    struct Text<'a>(&'a str);
    // A text always serialises.
    let why = serde_json::to_string(&Text(why)).unwrap_or_default();
    format!(
        r#"{{"type":"control_response","response":{{"subtype":"error","request_id":{},"error":{why}}}}}"#,
        address.0
    )
    .into_bytes()
}
