//! `turnpass demo`: the same agent on a small task, with an upstream in this process. No account and no network.

use serde::Serialize;
use turnpass::replay::History;
use turnpass::request::TransportKind;
use turnpass_agent::{Agent, Approvals, Outcome, Report, tools};

use crate::context::{self, Context};
use crate::exit::{Exit, Fault, exit_of_outcome};
use crate::settings::{Process, Settings, Values};
use crate::show::{Form, LABORATORY, Show};
use crate::stage::{self, Player, Stage};

/// The task in the words of a person; the upstream has no model behind it and follows the directives after it.
const TASK: &str = "Add up the numbers in the ledger, write the sum to sum.txt and check it.";

/// The rounds of the task: look, read, write, check, tell. Each `then` is what the model does once it has the results.
const DIRECTIVES: &str = r#"
[[say I will look at what is there.
]] [[call list {}]] [[call search {"pattern":"^total","ignore_case":true}]]
[[then [[call read {"path":"ledger/march.txt"}]] [[call read {"path":"ledger/april.txt"}]]
[[then [[say March and April come to 42.
]] [[call write {"path":"sum.txt","content":"42\n"}]]
[[then [[call shell {"command":"cat sum.txt && awk '{s+=$2} END {print s}' ledger/*.txt"}]]
[[then [[say The sum is 42. It stands in sum.txt, and adding up the files gives the same.
]]]] ]] ]] ]]"#;

/// What the folder of the task holds.
const FILES: [(&str, &str); 2] = [
    ("march.txt", "rent 20\nbread 3\ntea 4\n"),
    ("april.txt", "bread 5\nshoes 10\n"),
];

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    /// The transport; the pool by default
    #[arg(long, value_name = "TRANSPORT")]
    transport: Option<TransportKind>,
    /// Whether the relay keeps its process: warm or per-request; naming it chooses the relay
    #[arg(long, value_name = "PROCESS")]
    process: Option<Process>,
    /// How replay gives the conversation to its process: native or transcript
    #[arg(long, value_name = "HISTORY")]
    history: Option<History>,
    /// Use the scripted CLI even if the real one is installed
    #[arg(long)]
    scripted: bool,
}

/// What happened, as the one object of `--json`.
#[derive(Debug, Serialize)]
struct Told<'a> {
    transport: TransportKind,
    /// Of the relay only.
    process: Option<&'static str>,
    cli: &'a Player,
    generations: u32,
    upstream_requests: usize,
    tool_calls: u32,
    cache_read_share: Option<f64>,
    first_event_ms: Option<u64>,
    elapsed_ms: u64,
    refused_connections: usize,
    #[serde(flatten)]
    outcome: &'a Outcome,
    laboratory: bool,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    // What else the person's settings say (rules, a home, an upstream) is not for the laboratory.
    let settings = context.settings(Values::default())?;
    let mut settings = stage::laboratory(settings, args.transport, args.process);
    settings.history = args.history.unwrap_or(settings.history);
    let stage = Stage::set(&settings, args.scripted).await?;
    let mut show = Show::on_streams(Form::Text, context, context.cancel().clone());
    if !args.json {
        show.note(LABORATORY);
        if let Some(why) = &stage.passed_over {
            show.note(&format!(
                "your own CLI is not used, and for the demo it need not be: {why}"
            ));
        }
        show.note(&format!(
            "the {} CLI {} plays, over the transport {}\n\n> {TASK}\n",
            stage.player.kind,
            stage.player.version,
            way(stage.settings.transport, stage.settings.way()),
        ));
    }
    let provider = context::build_provider(&stage.settings)?;
    let mut agent = agent(&stage, &provider)?;
    let prompt = format!("{TASK}\n{DIRECTIVES}");
    let report = agent
        .run(prompt, context.cancel(), |event| {
            if !args.json {
                show.event(&event);
            }
        })
        .await;
    if let Err(error) = provider.shutdown().await {
        show.note(&error.to_string());
    }
    if let (Outcome::Failed { error }, false) = (&report.outcome, args.json) {
        show.note(&error.to_string());
    }
    let told = told(&stage, &report);
    match args.json {
        true => show.json(&told),
        false => {
            super::print(&table(&told))?;
        }
    }
    Ok(exit_of_outcome(&report.outcome))
}

fn agent(stage: &Stage, provider: &turnpass::Provider) -> Result<Agent, Fault> {
    let folder = stage.folder("task")?;
    let ledger = stage.folder("task/ledger")?;
    for (name, content) in FILES {
        std::fs::write(ledger.join(name), content)
            .map_err(|error| Fault::system(format!("{name}: {error}"), "Try again."))?;
    }
    let Settings {
        model, compaction, ..
    } = &stage.settings;
    let agent = Agent::builder(provider.clone(), model.as_str())
        .tools(tools::all())
        .compaction(*compaction)
        // A folder of its own that is removed afterwards, and a model whose every word is in this file.
        .approvals(Approvals::read_only().allow(["write", "shell"]))
        .directory(folder)
        .build()?;
    Ok(agent)
}

fn told<'a>(stage: &'a Stage, report: &'a Report) -> Told<'a> {
    Told {
        transport: stage.settings.transport,
        process: Some(stage.settings.way()).filter(|way| !way.is_empty()),
        cli: &stage.player,
        generations: report.generations,
        // Counted where they arrive, not where they are believed to be sent.
        upstream_requests: stage.upstream.messages().len(),
        tool_calls: report.tool_calls,
        cache_read_share: report.cache_read_share,
        first_event_ms: report.first_event_ms,
        elapsed_ms: report.elapsed_ms,
        refused_connections: stage.refused_connections(),
        outcome: &report.outcome,
        laboratory: true,
    }
}

fn way(transport: TransportKind, word: &str) -> String {
    match word.is_empty() {
        true => transport.to_string(),
        false => format!("{transport} ({word})"),
    }
}

fn table(told: &Told<'_>) -> String {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let share = told
        .cache_read_share
        .map(|share| format!("{:.0} %", share * 100.0));
    let first = told.first_event_ms.map(|ms| format!("{ms} ms"));
    let rows = [
        ("outcome", told.outcome.as_str().to_owned()),
        (
            "transport",
            way(told.transport, told.process.unwrap_or_default()),
        ),
        ("CLI", format!("{} {}", told.cli.kind, told.cli.version)),
        ("generations", told.generations.to_string()),
        ("upstream requests", told.upstream_requests.to_string()),
        ("tool calls", told.tool_calls.to_string()),
        ("read from the cache", or_dash(share)),
        ("first event after", or_dash(first)),
        ("whole run", format!("{} ms", told.elapsed_ms)),
        ("refused connections", told.refused_connections.to_string()),
    ];
    let mut text = String::from("\n");
    for (name, value) in rows {
        text.push_str(&format!("{name:<20} {value}\n"));
    }
    text + LABORATORY + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directives_are_five_rounds_that_the_upstream_understands() {
        let program = turnpass_lab::directive::parse(DIRECTIVES).unwrap();
        let rounds = program.rounds();
        assert_eq!(rounds.len(), 5);
        let text = format!("{rounds:?}");
        assert!(!text.contains("Invalid"), "{text}");
        assert_eq!(text.matches("Call {").count(), 6);
    }
}
