//! The hand-shake that the CLI makes with the tool server, made by this program with itself.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use turnpass::request::Tool;
use turnpass::tools::{Catalogue, Policy};
use turnpass::{Error, ErrorCode};

use super::report::Check;

/// Longest hand-shake with the tool server. It takes some milliseconds.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// The hand-shake that the CLI makes with the tool server, with the very command that it is given.
pub(super) async fn check() -> Check {
    const NAME: &str = "tool server";
    match tokio::time::timeout(HANDSHAKE_LIMIT, handshake()).await {
        Ok(Ok(tools)) => Check::ok(NAME, format!("hand-shake done, {tools} tools listed")).public(),
        Ok(Err(why)) => Check::fail(NAME, &Error::new(ErrorCode::McpStartup, why)),
        Err(_) => {
            let why = format!("no answer within {} s", HANDSHAKE_LIMIT.as_secs());
            Check::fail(NAME, &Error::new(ErrorCode::McpStartup, why))
        }
    }
}

async fn handshake() -> Result<usize, String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let tools: Vec<Tool> = turnpass_agent::tools::all()
        .iter()
        .map(|tool| tool.declaration())
        .collect();
    let catalogue = Catalogue::build(&tools).map_err(|error| said(&error))?;
    let folder = tempfile::tempdir().map_err(|error| said(&error))?;
    let file = folder.path().join("catalogue.json");
    std::fs::write(&file, catalogue.file_json()).map_err(|error| said(&error))?;
    let program = std::env::current_exe().map_err(|error| said(&error))?;
    let mut server = tokio::process::Command::new(program)
        .args([
            "mcp-stdio",
            "--policy",
            Policy::Inert.as_str(),
            "--catalogue",
        ])
        .arg(&file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| said(&error))?;
    let (Some(mut stdin), Some(mut stdout)) = (server.stdin.take(), server.stdout.take()) else {
        return Err("the tool server has no pipes".to_owned());
    };
    let client = json!({"name":"turnpass doctor","version":env!("CARGO_PKG_VERSION")});
    let requests = [
        json!({"jsonrpc":"2.0","id":1,"method":"initialize","params":
            {"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":client}}),
        json!({"jsonrpc":"2.0","method":"notifications/initialized"}),
        json!({"jsonrpc":"2.0","id":2,"method":"tools/list"}),
    ];
    let requests = requests.map(|request| format!("{request}\n")).concat();
    let write = stdin.write_all(requests.as_bytes()).await;
    write.map_err(|error| said(&error))?;
    drop(stdin);
    let mut output = String::new();
    let read = stdout.read_to_string(&mut output).await;
    read.map_err(|error| said(&error))?;
    let listed = output
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|reply| reply["id"] == 2)
        .and_then(|reply| reply["result"]["tools"].as_array().map(Vec::len));
    match listed {
        Some(count) if count == tools.len() => Ok(count),
        Some(count) => Err(format!("{count} of {} tools were listed", tools.len())),
        None => Err("the tool server did not list its tools".to_owned()),
    }
}
