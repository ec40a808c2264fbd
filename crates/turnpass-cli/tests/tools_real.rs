//! NEEDS THE REAL CLI (`conformance/install`): the HTTP carrier and the pairing, held against what the real CLI does.
//!
//! Runs in a network namespace of its own; where none can be made, behind a proxy that refuses.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

mod growing;
#[path = "tools_real/grows.rs"]
mod grows;
#[path = "tools_real/pool.rs"]
mod pool;

use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use turnpass::cli::launch::McpServer;
use turnpass::conversation::{ToolResult, ToolUseId};
use turnpass::pool::ToolCarrier;
use turnpass::request::{Tool, TransportKind};
use turnpass::tools::http::{CallAddress, HttpCarrier, Occurrence};
use turnpass::tools::pairing::{Announced, Arrived, CliAnswered, Ended, Given};
use turnpass::tools::{Catalogue, Pairing, Policy, Server};
use turnpass_lab::rig::{self, MadeUpHome, RealCli, RefusingProxy};
use turnpass_lab::scenario::{Item, Reply};
use turnpass_lab::upstream::{Options, Upstream};

/// The longest wait for the next thing that happens.
const BOUND: Duration = Duration::from_secs(60);

/// A result above what the CLI would swap for a note about a file, and below what it takes whole (2.1.332).
const BIG_CHARS: usize = 300_000;

fn main() -> ExitCode {
    let isolation = rig::isolate();
    eprintln!("tools_real: isolation is {isolation:?}");
    let mut arguments = Arguments::from_args();
    // Each trial starts a process of 200 MB.
    arguments.test_threads.get_or_insert(2);
    let conformance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let mut trials = Vec::new();
    for cli in RealCli::for_tests(&conformance, "tests/tools_real.rs of turnpass-cli") {
        for (name, test) in tests() {
            let cli = cli.clone();
            trials.push(Trial::test(format!("{}::{name}", cli.version), move || {
                runtime()?.block_on(async {
                    let mut stage = Stage::set(&cli).await;
                    test(&mut stage).await;
                    stage.child.kill().await.unwrap();
                });
                Ok::<(), Failed>(())
            }));
        }
    }
    for cli in RealCli::find_all(&conformance) {
        for (way, tools) in [
            ("pool_in_band", ToolCarrier::InBand),
            ("pool_http", ToolCarrier::Http),
        ] {
            let (name, cli) = (format!("{}::{way}", cli.version), cli.clone());
            trials.push(Trial::test(name, move || {
                runtime()?.block_on(pool::every_step(&cli, tools));
                Ok::<(), Failed>(())
            }));
        }
        let name = format!("{}::pool_transcript", cli.version);
        trials.push(Trial::test(name, move || {
            runtime()?.block_on(pool::transcript(&cli));
            Ok::<(), Failed>(())
        }));
    }
    // What the agent does with a conversation is its own doing and no version's, so one version shows it.
    if let Some(cli) = RealCli::find_all(&conformance).into_iter().next_back() {
        for (case, transport) in [
            ("an_agent_grows_over_pool", TransportKind::Pool),
            ("an_agent_grows_over_replay", TransportKind::Replay),
            ("an_agent_grows_over_relay", TransportKind::Relay),
        ] {
            let (name, cli) = (format!("{}::{case}", cli.version), cli.clone());
            trials.push(Trial::test(name, move || {
                runtime()?.block_on(grows::over(&cli, transport));
                Ok::<(), Failed>(())
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
}

type Running<'a> = std::pin::Pin<Box<dyn Future<Output = ()> + 'a>>;
type Test = for<'a> fn(&'a mut Stage) -> Running<'a>;

fn tests() -> [(&'static str, Test); 2] {
    [
        ("http_calls_of_one_message_in_reverse", |stage| {
            Box::pin(calls_of_one_message_in_reverse(stage))
        }),
        ("http_an_interrupt_gives_up_the_call", |stage| {
            Box::pin(an_interrupt_gives_up_the_call(stage))
        }),
    ]
}

/// One process of the CLI with the carrier as its only server.
struct Stage {
    up: Upstream,
    aliases: Vec<String>,
    carrier: HttpCarrier,
    occurrences: mpsc::Receiver<Occurrence>,
    pairing: Pairing<CallAddress>,
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    _kept: (tempfile::TempDir, MadeUpHome, RefusingProxy),
}

/// What happens next.
#[derive(Debug)]
enum Next {
    Record(Value),
    Occurrence(Occurrence),
}

impl Stage {
    async fn set(cli: &RealCli) -> Self {
        let tool = |name: &str| Tool {
            name: name.into(),
            description: "a tool of the host".into(),
            input_schema: json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        };
        let catalogue = Catalogue::build(&[tool("read"), tool("fs.write")]).unwrap();
        let server = Server::new(&catalogue, Policy::Answering);
        let (carrier, occurrences) = HttpCarrier::start(server, &TaskTracker::new())
            .await
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("mcp.json");
        std::fs::write(&config, configuration(&carrier).to_string()).unwrap();
        let home = MadeUpHome::new(&dir.path().join("home")).unwrap();
        let proxy = RefusingProxy::start().unwrap();
        let up = Upstream::start(Options::default()).unwrap();
        let mut command =
            tokio::process::Command::from(cli.command(&home, &proxy, Some(&up.url())).unwrap());
        command
            .args(["-p", "--input-format", "stream-json", "--output-format"])
            .args(["stream-json", "--verbose", "--include-partial-messages"])
            .args(["--strict-mcp-config", "--setting-sources="])
            .args(["--disable-slash-commands", "--permission-mode", "dontAsk"])
            .args(["--no-session-persistence", "--model", "sonnet"])
            .args(["--tools", "", "--system-prompt", "You are a test."])
            .args(["--allowedTools", "mcp__turnpass__*", "--mcp-config"])
            .arg(&config)
            .env("CLAUDE_CODE_MAX_RETRIES", "0")
            .env("CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK", "1")
            .env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
            .env("ENABLE_TOOL_SEARCH", "false")
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        Self {
            up,
            aliases: ["read", "fs.write"]
                .map(|host| {
                    let tool = catalogue.tools().iter().find(|tool| tool.host == host);
                    tool.unwrap().name.clone()
                })
                .into(),
            carrier,
            occurrences,
            pairing: Pairing::default(),
            stdin: child.stdin.take().unwrap(),
            stdout: BufReader::new(child.stdout.take().unwrap()).lines(),
            child,
            _kept: (dir, home, proxy),
        }
    }

    /// The model calls both tools in one message.
    fn both_calls(&self) -> Reply {
        let call = |tool: usize, id: &str| Item::ToolUse {
            name: self.aliases[tool].clone(),
            id: Some(id.into()),
            input: Some(json!({"n": tool})),
            raw: None,
            chunk: None,
        };
        Reply::content([Item::text("both"), call(0, "toolu_a"), call(1, "toolu_b")])
    }

    async fn write(&mut self, line: &Value) {
        let line = format!("{line}\n");
        self.stdin.write_all(line.as_bytes()).await.unwrap();
    }

    async fn say(&mut self, text: &str) {
        assert!(self.pairing.begin().is_clean());
        let message = json!({"role": "user", "content": text});
        self.write(&json!({"type": "user", "client_composed": true, "message": message}))
            .await;
    }

    async fn next(&mut self) -> Next {
        let next = async {
            tokio::select! {
                line = self.stdout.next_line() => {
                    let line = line.unwrap().unwrap();
                    Next::Record(serde_json::from_str(&line).unwrap())
                }
                Some(occurrence) = self.occurrences.recv() => Next::Occurrence(occurrence),
            }
        };
        tokio::time::timeout(BOUND, next).await.unwrap()
    }

    /// Takes what happens until both calls wait and the message is whole. Returns the tools that the CLI says it has.
    async fn until_both_wait(&mut self) -> Vec<String> {
        let mut tools = Vec::new();
        while self.pairing.awaited().count() < 2 || self.pairing.open().count() < 2 {
            match self.next().await {
                Next::Record(record) if record["subtype"] == "init" => {
                    let listed = record["tools"].as_array().unwrap();
                    tools = listed.iter().map(|tool| text(tool).to_owned()).collect();
                }
                Next::Record(record) if record["event"]["type"] == "message_stop" => {
                    for id in ["toolu_a", "toolu_b"] {
                        let announced = self.pairing.announce(&ToolUseId(id.into()));
                        assert!(matches!(announced, Announced::New | Announced::CallWaits));
                    }
                }
                Next::Record(record) => assert_ne!(record["type"], "result", "{record}"),
                Next::Occurrence(Occurrence::Listed) => {}
                Next::Occurrence(Occurrence::Call { call, to }) => {
                    let id = call.tool_use_id.clone();
                    assert_eq!(call.arguments.as_str(), {
                        let n = usize::from(call.tool == "fs.write");
                        format!(r#"{{"n":{n}}}"#)
                    });
                    let arrived = self.pairing.arrived(id, to);
                    assert!(matches!(arrived, Arrived::Waits | Arrived::Parked));
                }
                other => panic!("{other:?}"),
            }
        }
        tools
    }
}

/// The file that names the carrier.
fn configuration(carrier: &HttpCarrier) -> Value {
    let McpServer::Http {
        url,
        bearer,
        timeout_ms,
    } = carrier.mcp_server_config()
    else {
        panic!("no http entry");
    };
    json!({"mcpServers": {"turnpass": {
        "type": "http",
        "url": url,
        "headers": {"Authorization": format!("Bearer {}", bearer.expose_str())},
        "timeout": timeout_ms,
    }}})
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

async fn calls_of_one_message_in_reverse(stage: &mut Stage) {
    stage.up.enqueue(stage.both_calls());
    stage.up.enqueue(Reply::text("done"));
    stage.say("go").await;
    let tools = stage.until_both_wait().await;
    for alias in &stage.aliases {
        assert!(tools.contains(alias), "{alias} in {tools:?}");
    }
    let big = "é".repeat(BIG_CHARS);
    for (id, said) in [("toolu_b", big.as_str()), ("toolu_a", "small")] {
        let result = ToolResult::text(ToolUseId(id.into()), said);
        let Given::Answered(answer) = stage.pairing.give(result) else {
            panic!("{id} waits");
        };
        assert!(stage.carrier.answer(answer.to, &answer.result));
        // The CLI tells of each in its own record; the order is that of the answers.
        loop {
            let Next::Record(record) = stage.next().await else {
                panic!("nothing else is called");
            };
            if record["type"] == "user" {
                let told = &record["message"]["content"][0];
                assert_eq!(told["tool_use_id"], id);
                assert_eq!(
                    stage.pairing.cli_answered(&ToolUseId(id.into())),
                    CliAnswered::Known(Ended::Answered)
                );
                break;
            }
        }
    }
    loop {
        if let Next::Record(record) = stage.next().await
            && record["type"] == "result"
        {
            assert_eq!(record["is_error"], false, "{record}");
            break;
        }
    }
    assert!(stage.pairing.close().is_clean());
    let requests = stage.up.messages();
    assert_eq!(requests.len(), 2);
    let body = requests[1].json.as_ref().unwrap();
    let results: Vec<_> = body["messages"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|message| message["content"].as_array())
        .flatten()
        .filter(|block| block["type"] == "tool_result")
        .map(|block| {
            (
                text(&block["tool_use_id"]),
                text(&block["content"][0]["text"]),
            )
        })
        .collect();
    assert!(results.contains(&("toolu_a", "small")));
    assert!(
        results.contains(&("toolu_b", big.as_str())),
        "it came whole"
    );
}

async fn an_interrupt_gives_up_the_call(stage: &mut Stage) {
    stage.up.enqueue(stage.both_calls());
    stage.say("go").await;
    stage.until_both_wait().await;
    let interrupt = json!({"subtype": "interrupt"});
    stage
        .write(&json!({"type": "control_request", "request_id": "i", "request": interrupt}))
        .await;
    let (mut given_up, mut ended) = (0, false);
    while given_up < 2 || !ended {
        match stage.next().await {
            Next::Record(record) => ended |= record["type"] == "result",
            Next::Occurrence(Occurrence::Cancelled(gone)) => {
                if let Some(answer) = stage.pairing.cancelled(|to| *to == gone) {
                    given_up += 1;
                    stage.carrier.answer(answer.to, &answer.result);
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(stage.pairing.open().count(), 0);
    assert_eq!(stage.carrier.waiting(), 0);
}
