//! The MCP client of the scripted CLI: over a child's stdio, over HTTP, and in band.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::oneshot;

use super::http::{Ask, Base, Client};
use super::pipes::Output;
use super::sse::SseParser;

/// How long a server may take to connect; after it the status is `failed` and the run goes on without
/// tools. Measured on 2.1.332: about 27 s; `MCP_TIMEOUT` changes it.
const CONNECT_LIMIT: Duration = Duration::from_secs(27);

/// How long a stdio server may take to end after its input was closed, before it is killed.
const CHILD_END_LIMIT: Duration = Duration::from_secs(2);

/// The protocol version that 2.1.332 asks for.
const PROTOCOL_VERSION: &str = "2025-11-25";

type Waiting = Rc<RefCell<HashMap<String, oneshot::Sender<Value>>>>;

/// Control requests from the CLI to the host, for in-band servers.
#[derive(Clone)]
pub(crate) struct HostLink {
    output: Output,
    waiting: Waiting,
}

impl HostLink {
    pub(crate) fn new(output: Output) -> HostLink {
        HostLink {
            output,
            waiting: Waiting::default(),
        }
    }

    /// Takes a `control_response` line of the host; false when nobody waits for it.
    pub(crate) fn answered(&self, line: &Value) -> bool {
        let id = line
            .pointer("/response/request_id")
            .and_then(Value::as_str)
            .unwrap_or_default();
        match self.waiting.borrow_mut().remove(id) {
            Some(waiter) => waiter.send(line["response"].clone()).is_ok(),
            None => false,
        }
    }

    /// Sends a message whose answer nobody waits for.
    fn tell(&self, server: &str, message: &Value) -> String {
        let id = uuid::Uuid::new_v4().to_string();
        self.output.record(&json!({
            "type": "control_request",
            "request_id": id,
            "request": {"subtype": "mcp_message", "server_name": server, "message": message},
        }));
        id
    }

    async fn message(&self, server: &str, message: Value) -> Result<Value, String> {
        let (sender, receiver) = oneshot::channel();
        let id = self.tell(server, &message);
        self.waiting.borrow_mut().insert(id, sender);
        let response = receiver
            .await
            .map_err(|_| "the host went away".to_owned())?;
        match response["subtype"].as_str() {
            Some("success") => Ok(response["response"]["mcp_response"].clone()),
            _ => Err(response["error"]
                .as_str()
                .unwrap_or("the host refused")
                .to_owned()),
        }
    }
}

enum Carrier {
    Stdio(StdioServer),
    Http {
        base: Base,
        path: String,
        headers: Vec<(String, String)>,
    },
    InBand(HostLink),
}

struct StdioServer {
    stdin: tokio::sync::Mutex<Option<ChildStdin>>,
    waiting: Waiting,
    child: RefCell<Option<Child>>,
}

/// One MCP server, connected or failed.
pub(crate) struct Server {
    pub(crate) name: String,
    /// `dynamic` for the command line, `sdk` for in-band.
    pub(crate) source: &'static str,
    pub(crate) config: Value,
    pub(crate) status: Cell<&'static str>,
    pub(crate) info: RefCell<Value>,
    pub(crate) tools: RefCell<Vec<Value>>,
    carrier: Carrier,
    next_id: Cell<u64>,
}

impl Server {
    /// An in-band server; with a manifest it counts as connected without a message.
    pub(crate) fn in_band(name: &str, manifest: Option<&Value>, link: HostLink) -> Server {
        let server = Server {
            name: name.to_owned(),
            source: "sdk",
            config: json!({"type": "sdk", "name": name}),
            status: Cell::new("pending"),
            info: RefCell::new(Value::Null),
            tools: RefCell::default(),
            carrier: Carrier::InBand(link),
            next_id: Cell::new(0),
        };
        if let Some(manifest) = manifest {
            *server.info.borrow_mut() = manifest["initializeResult"]["serverInfo"].clone();
            server.take_tools(&manifest["toolsListResult"]);
            server.status.set("connected");
        }
        server
    }

    /// A server of the command line, or of `mcp_set_servers`. A stdio server is started at once.
    pub(crate) fn open(name: &str, config: &Value, link: &HostLink) -> Server {
        let carrier = match config["type"].as_str() {
            Some("sdk") => return Server::in_band(name, None, link.clone()),
            Some("http") => open_http(config),
            _ => open_stdio(config),
        };
        let failed = carrier.is_err();
        Server {
            name: name.to_owned(),
            source: "dynamic",
            config: config.clone(),
            status: Cell::new(if failed { "failed" } else { "pending" }),
            info: RefCell::new(Value::Null),
            tools: RefCell::default(),
            carrier: carrier.unwrap_or_else(|_| Carrier::InBand(link.clone())),
            next_id: Cell::new(0),
        }
    }

    /// The handshake. Ends as `connected` or `failed`; never stops the run, as the real CLI's does not.
    pub(crate) async fn connect(&self) {
        if self.status.get() != "pending" {
            return;
        }
        let limit = std::env::var("MCP_TIMEOUT")
            .ok()
            .and_then(|text| text.parse().ok());
        let limit = limit.map_or(CONNECT_LIMIT, Duration::from_millis);
        let outcome = tokio::time::timeout(limit, self.handshake()).await;
        self.status.set(if matches!(outcome, Ok(Ok(()))) {
            "connected"
        } else {
            "failed"
        });
    }

    async fn handshake(&self) -> Result<(), String> {
        let legacy = std::env::var("MCP_PROTOCOL_NEGOTIATION").is_ok_and(|value| value == "legacy");
        if !legacy && !matches!(self.carrier, Carrier::InBand(_)) {
            // Any answer will do, an error too; it only tells which protocol the server speaks.
            let probe = json!({"jsonrpc": "2.0", "id": "server-discover-probe-1", "method": "server/discover", "params": {}});
            let _ = self.exchange(probe, "server-discover-probe-1").await;
        }
        let client = json!({"name": "claude-code", "version": "0"});
        let hello = json!({"protocolVersion": PROTOCOL_VERSION, "capabilities": {"roots": {}}, "clientInfo": client});
        let answer = self.request("initialize", hello).await?;
        *self.info.borrow_mut() = answer["serverInfo"].clone();
        let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        self.notify(note).await?;
        // A server that dies here stays "connected" with no tools: measured on 2.1.332.
        if let Ok(list) = self.request("tools/list", json!({})).await {
            self.take_tools(&list);
        }
        Ok(())
    }

    /// One tool without a root `"type":"object"` empties the whole list: measured on 2.1.332.
    fn take_tools(&self, list: &Value) {
        let tools = list["tools"].as_array().cloned().unwrap_or_default();
        let whole = tools
            .iter()
            .all(|tool| tool["inputSchema"]["type"] == "object");
        *self.tools.borrow_mut() = if whole { tools } else { Vec::new() };
    }

    /// Calls a tool. The error is a sentence for the model.
    pub(crate) async fn call(
        &self,
        tool: &str,
        arguments: &Value,
        id: &str,
    ) -> Result<Value, String> {
        let token = self.next_id.get();
        self.request(
            "tools/call",
            json!({
                "name": tool,
                "arguments": arguments,
                "_meta": {"claudecode/toolUseId": id, "progressToken": token},
            }),
        )
        .await
    }

    /// Tells the server that a call is no longer wanted.
    pub(crate) async fn cancel_all(&self) {
        let reason = json!({"requestId": self.next_id.get().saturating_sub(1), "reason": "AbortError: remote-cancel"});
        let note = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": reason});
        match &self.carrier {
            // The CLI goes on whether it is answered or not (2.1.332); its loop takes the answer.
            Carrier::InBand(link) => drop(link.tell(&self.name, &note)),
            _ => drop(self.notify(note).await),
        }
    }

    async fn request(&self, method: &str, params: Value) -> Result<Value, String> {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let reply = self.exchange(message, &id.to_string()).await?;
        match reply.get("error") {
            Some(error) => Err(error["message"]
                .as_str()
                .unwrap_or("unknown error")
                .to_owned()),
            None => Ok(reply["result"].clone()),
        }
    }

    async fn notify(&self, message: Value) -> Result<(), String> {
        match &self.carrier {
            Carrier::Stdio(server) => server.write(&message).await,
            Carrier::Http {
                base,
                path,
                headers,
            } => post(base, path, headers, &message, None).await.map(|_| ()),
            Carrier::InBand(link) => link.message(&self.name, message).await.map(|_| ()),
        }
    }

    async fn exchange(&self, message: Value, id: &str) -> Result<Value, String> {
        match &self.carrier {
            Carrier::Stdio(server) => {
                let (sender, receiver) = oneshot::channel();
                server.waiting.borrow_mut().insert(id.to_owned(), sender);
                server.write(&message).await?;
                receiver.await.map_err(|_| "the server ended".to_owned())
            }
            Carrier::Http {
                base,
                path,
                headers,
            } => post(base, path, headers, &message, Some(&message["id"])).await,
            Carrier::InBand(link) => link.message(&self.name, message).await,
        }
    }

    /// Ends a stdio server: its input is closed, and after [`CHILD_END_LIMIT`] it is killed.
    pub(crate) async fn close(&self) {
        let Carrier::Stdio(server) = &self.carrier else {
            return;
        };
        server.stdin.lock().await.take();
        let child = server.child.borrow_mut().take();
        if let Some(mut child) = child
            && tokio::time::timeout(CHILD_END_LIMIT, child.wait())
                .await
                .is_err()
        {
            let _ = child.kill().await;
        }
    }
}

impl StdioServer {
    async fn write(&self, message: &Value) -> Result<(), String> {
        let mut stdin = self.stdin.lock().await;
        let stdin = stdin.as_mut().ok_or("the server was closed")?;
        let line = format!("{message}\n");
        stdin
            .write_all(line.as_bytes())
            .await
            .map_err(|error| error.to_string())?;
        stdin.flush().await.map_err(|error| error.to_string())
    }
}

fn open_stdio(config: &Value) -> Result<Carrier, String> {
    let command = config["command"]
        .as_str()
        .ok_or("the server has no command")?;
    let args = config["args"].as_array().cloned().unwrap_or_default();
    let mut child = Command::new(command);
    child
        .args(args.iter().filter_map(Value::as_str))
        .env("CLAUDECODE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    for (name, value) in config["env"].as_object().into_iter().flatten() {
        child.env(name, value.as_str().unwrap_or_default());
    }
    let mut child = child.spawn().map_err(|error| error.to_string())?;
    let stdin = child.stdin.take();
    let stdout = child.stdout.take().ok_or("the server has no stdout")?;
    let waiting = Waiting::default();
    let answers = Rc::clone(&waiting);
    tokio::task::spawn_local(async move {
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let Ok(message) = serde_json::from_str::<Value>(&line) else {
                continue;
            };
            let id = match &message["id"] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            if let Some(waiter) = answers.borrow_mut().remove(&id) {
                let _ = waiter.send(message);
            }
        }
        // Whoever still waits learns that the server is gone.
        answers.borrow_mut().clear();
    });
    Ok(Carrier::Stdio(StdioServer {
        stdin: tokio::sync::Mutex::new(stdin),
        waiting,
        child: RefCell::new(Some(child)),
    }))
}

fn open_http(config: &Value) -> Result<Carrier, String> {
    let url = config["url"].as_str().ok_or("the server has no url")?;
    let mut base = Base::parse(url)?;
    let path = std::mem::take(&mut base.prefix);
    let mut headers = vec![
        (
            "accept".to_owned(),
            "application/json, text/event-stream".to_owned(),
        ),
        ("content-type".to_owned(), "application/json".to_owned()),
    ];
    for (name, value) in config["headers"].as_object().into_iter().flatten() {
        headers.push((name.clone(), value.as_str().unwrap_or_default().to_owned()));
    }
    Ok(Carrier::Http {
        base,
        path,
        headers,
    })
}

/// One POST on a connection of its own, so that calls can run beside each other. With an id it waits
/// for the message of that id, in a JSON body or in an event stream.
async fn post(
    base: &Base,
    path: &str,
    headers: &[(String, String)],
    message: &Value,
    id: Option<&Value>,
) -> Result<Value, String> {
    let ask = Ask {
        method: "POST".to_owned(),
        path: path.to_owned(),
        headers: headers.to_vec(),
        body: message.to_string().into_bytes(),
    };
    let mut answer = Client::default().send(base, &ask).await?;
    if answer.status >= 300 {
        return Err(format!("Error POSTing to endpoint: {}", answer.status));
    }
    let Some(id) = id else { return Ok(Value::Null) };
    if answer
        .header("content-type")
        .is_some_and(|kind| kind.starts_with("text/event-stream"))
    {
        let mut events = SseParser::default();
        while let Some(piece) = answer.chunk().await? {
            for event in events.push(&piece) {
                let value: Value = serde_json::from_str(&event.data).unwrap_or_default();
                if value.get("id") == Some(id) {
                    return Ok(value);
                }
            }
        }
        return Err("the stream ended without an answer".to_owned());
    }
    serde_json::from_slice(&answer.bytes().await?).map_err(|error| error.to_string())
}
