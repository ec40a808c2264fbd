//! How the CLI starts, what it shows of itself, and how it ends.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnpass::cli::launch::{MCP_SERVER, McpServer};
use turnpass::process::{EndPolicy, Exit};
use turnpass::tools::Policy;
use turnpass_lab::rig::MadeUpHome;

use super::super::cli::{Cli, Turn, Why, late, not_checked, seen, told};
use super::super::lane::{DESCRIPTION_CHARS, Lane, uuid};
use super::Checked;
use crate::certify::cli::user;

/// Longest end of an idle process: 30 to 120 ms on 2.1.332.
const IDLE_END: Duration = Duration::from_secs(10);

/// Longest wait for a stdio server. The CLI itself gives up after 27 s.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// Between two looks at a server that is still starting.
const READY_PAUSE: Duration = Duration::from_millis(20);

/// A start with every flag at once that a transport uses. Those of a resume have checks of their own.
pub(super) async fn flags(lane: &mut Lane) -> Checked {
    let mut cli = lane
        .start(|trial| {
            trial.effort = Some("low".to_owned());
            trial.max_turns = Some(1);
            trial.budget_usd = Some("5".to_owned());
        })
        .await?;
    cli.control(lane.initialize()).await?;
    cli.end(EndPolicy::CANCEL).await.map(|_| ())
}

async fn a_turn(lane: &mut Lane, cli: &mut Cli) -> Result<Turn, Why> {
    lane.good_turn(cli).await.map(|(turn, _)| turn)
}

pub(super) async fn init_fields(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let turn = a_turn(lane, &mut cli).await?;
    let init = turn.init();
    for field in [
        "model",
        "session_id",
        "claude_code_version",
        "apiKeySource",
        "permissionMode",
    ] {
        if init[field].as_str().is_none_or(str::is_empty) {
            return seen(format!("the first record has no {field}"));
        }
    }
    for field in [
        "tools",
        "mcp_servers",
        "slash_commands",
        "skills",
        "plugins",
    ] {
        if !init[field].is_array() {
            return seen(format!("the first record has no list {field}"));
        }
    }
    let version = lane.subject.version.as_str();
    let wanted = [
        ("apiKeySource", "none"),
        ("permissionMode", "dontAsk"),
        ("claude_code_version", version),
    ];
    for (field, wanted) in wanted {
        if init[field] != wanted {
            return seen(format!("{field} is {}", told(&init[field].to_string())));
        }
    }
    for field in ["slash_commands", "skills"] {
        if init[field] != json!([]) {
            return seen(format!("{field} is not empty"));
        }
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn plugins_off(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let turn = a_turn(lane, &mut cli).await?;
    let plugins = turn.init()["plugins"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    if !plugins.is_empty() {
        let name =
            |plugin: &Value| told(plugin["source"].as_str().or(plugin.as_str()).unwrap_or("?"));
        let names: Vec<_> = plugins.iter().map(name).collect();
        return seen(format!("still on: {}", names.join(", ")));
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn isolation(lane: &mut Lane) -> Checked {
    let folder = lane.folder("planted")?;
    let (home, project) = (folder.join("home"), folder.join("project"));
    std::fs::create_dir(&project).map_err(not_checked)?;
    let home = MadeUpHome::new(&home).map_err(not_checked)?;
    let planted = home.plant(&project).map_err(not_checked)?;
    let asked = lane.asked();
    let mut cli = lane
        .start_at_home(home.path(), |trial| trial.cwd = Some(project))
        .await?;
    let turn = a_turn(lane, &mut cli).await?;
    // A hook of the end runs at the end.
    cli.end(EndPolicy::SESSION).await?;
    let ran = planted.ran();
    if !ran.is_empty() {
        return seen(format!("planted things ran: {}", told(&ran.join(", "))));
    }
    let shown = planted.shows_in(&lane.one_since(asked)?);
    if !shown.is_empty() {
        return seen(format!(
            "planted texts are in the request: {}",
            told(&shown.join(", "))
        ));
    }
    let init = turn.init();
    match (&init["mcp_servers"], &init["tools"]) {
        (Value::Array(servers), Value::Array(tools)) if servers.is_empty() && tools.is_empty() => {
            Ok(())
        }
        _ => seen("the first record shows servers or tools that nobody gave it"),
    }
}

/// The names of what a list of tools holds, sorted.
fn names(tools: &Value) -> Vec<String> {
    let tools = tools.as_array().map_or(&[][..], Vec::as_slice);
    let mut names: Vec<_> = tools
        .iter()
        .filter_map(|tool| tool.as_str().or(tool["name"].as_str()))
        .map(str::to_owned)
        .collect();
    names.sort_unstable();
    names
}

fn only_ours(lane: &Lane, turn: &Turn, body: &Value) -> Checked {
    let wanted = lane.subject.names();
    for (place, tools) in [
        ("the first record", &turn.init()["tools"]),
        ("the request", &body["tools"]),
    ] {
        let names = names(tools);
        if names != wanted {
            return seen(format!("{place} lists: {}", told(&names.join(", "))));
        }
    }
    let servers = &turn.init()["mcp_servers"];
    let is_ours = servers[0]["name"] == MCP_SERVER && servers[0]["status"] == "connected";
    match servers.as_array().map(Vec::len) {
        Some(1) if is_ours => Ok(()),
        _ => seen(format!("servers: {}", told(&servers.to_string()))),
    }
}

pub(super) async fn tools_exact(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let asked = lane.asked();
    let turn = a_turn(lane, &mut cli).await?;
    only_ours(lane, &turn, &lane.one_since(asked)?)?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn descriptions_whole(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let asked = lane.asked();
    a_turn(lane, &mut cli).await?;
    let body = lane.one_since(asked)?;
    let beta = lane.subject.name("beta");
    let tools = body["tools"].as_array().cloned().unwrap_or_default();
    let tool = tools.iter().find(|tool| tool["name"] == *beta);
    let chars = tool.and_then(|tool| tool["description"].as_str());
    let chars = chars.map_or(0, |text| text.chars().count());
    if chars < DESCRIPTION_CHARS {
        return seen(format!("{chars} of {DESCRIPTION_CHARS} characters"));
    }
    lane.keep(cli);
    Ok(())
}

/// The tool server as a program that the CLI starts.
fn bridge(lane: &mut Lane) -> Result<McpServer, Why> {
    let folder = lane.folder("bridge")?;
    let file = folder.join("catalogue.json");
    std::fs::write(&file, lane.subject.catalogue.file_json()).map_err(not_checked)?;
    let args = [
        "mcp-stdio",
        "--policy",
        Policy::Inert.as_str(),
        "--catalogue",
    ];
    let mut args: Vec<String> = args.map(str::to_owned).into();
    args.push(file.to_string_lossy().into_owned());
    let server = McpServer::Stdio {
        command: lane.subject.tool_server.clone(),
        args,
        env: Vec::new(),
    };
    Ok(server)
}

pub(super) async fn stdio_bridge(lane: &mut Lane) -> Checked {
    let server = bridge(lane)?;
    let mut cli = lane.start(|trial| trial.server = Some(server)).await?;
    let asked = lane.asked();
    let turn = a_turn(lane, &mut cli).await?;
    only_ours(lane, &turn, &lane.one_since(asked)?)
}

pub(super) async fn ready_before_prompt(lane: &mut Lane) -> Checked {
    let asked = lane.asked();
    let mut in_band = lane.fresh(|_| {}).await?;
    ready(lane, &mut in_band).await?;
    in_band.kill().await?;
    let server = bridge(lane)?;
    let mut stdio = lane.start(|trial| trial.server = Some(server)).await?;
    stdio.control(json!({"subtype": "initialize"})).await?;
    ready(lane, &mut stdio).await?;
    match lane.asked() - asked {
        0 => Ok(()),
        count => seen(format!("{count} requests before any line")),
    }
}

/// Waits until the server is there with its tools.
async fn ready(lane: &Lane, cli: &mut Cli) -> Checked {
    let wanted = lane.subject.catalogue.tools().len();
    let end = Instant::now() + READY_LIMIT;
    loop {
        let status = cli.control(json!({"subtype": "mcp_status"})).await?;
        let server = &status["mcpServers"][0];
        let tools = server["tools"].as_array().map_or(0, Vec::len);
        if server["name"] == MCP_SERVER && server["status"] == "connected" && tools == wanted {
            return Ok(());
        }
        let status = told(server["status"].as_str().unwrap_or("absent"));
        let stands = format!("the server is {status} with {tools} of {wanted} tools");
        if server["status"] == "failed" {
            return seen(stands);
        }
        if Instant::now() > end {
            return late(stands);
        }
        tokio::time::sleep(READY_PAUSE).await;
    }
}

pub(super) async fn idle_close(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    a_turn(lane, &mut cli).await?;
    cli.close_input();
    match cli.exit_within(IDLE_END).await {
        Some(Exit::Code(0)) => Ok(()),
        Some(exit) => seen(format!("it ended with {exit}")),
        None => late(format!("it still runs {} s later", IDLE_END.as_secs())),
    }
}

pub(super) async fn model_catalogue(lane: &mut Lane) -> Checked {
    let mut cli = lane.start(|_| {}).await?;
    let answer = cli.control(lane.initialize()).await?;
    let models = answer["models"].as_array().cloned().unwrap_or_default();
    if models.is_empty() {
        return seen("no models are listed");
    }
    for model in &models {
        let named = |field: &str| model[field].as_str().is_some_and(|text| !text.is_empty());
        if !named("value") || !named("resolvedModel") {
            return seen("a model has no value or no resolvedModel");
        }
    }
    let levels = |model: &Value| {
        model["supportedEffortLevels"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    };
    match models.iter().any(levels) {
        true => {}
        false => return seen("no model lists effort levels"),
    }
    // The answer was that of a process that can go on.
    cli.send(&[user(&uuid(), "catalogue")])?;
    cli.result().await?.good()?;
    lane.keep(cli);
    Ok(())
}
