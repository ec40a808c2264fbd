//! Another model, prompt, tools or effort in the middle of a conversation: served, never stale, and nothing is lost.

use serde_json::Value;
use turnpass::conversation::{Block, Message};
use turnpass::event::PlanKind;
use turnpass::request::Effort;
use turnpass_lab::rig::RealCli;

use crate::bench::Bench;
use crate::stage::{hear, tool};
use crate::talk::{Talk, planned};

const ROUND: &str = "[[say so]] [[call read {}]] [[then [[say done]]]]";

type Change = fn(&mut Talk);

/// The newest request has this talk's model, prompt and tools.
fn served(bench: &Bench, talk: &Talk) {
    let newest = bench.newest();
    let model = newest.field("/model").and_then(Value::as_str).unwrap();
    assert!(model.contains(&talk.model), "{model} for {}", talk.model);
    let system = newest.field("/system").unwrap().to_string();
    assert!(system.contains(&talk.system), "{system}");
    let tools = newest.field("/tools").and_then(Value::as_array).unwrap();
    let mut names: Vec<_> = tools
        .iter()
        .map(|tool| tool["name"].as_str().unwrap().to_owned())
        .collect();
    let own = talk
        .tools
        .iter()
        .map(|tool| format!("mcp__turnpass__{}", tool.name));
    let mut wanted: Vec<_> = own.collect();
    names.sort();
    wanted.sort();
    assert_eq!(names, wanted);
}

/// Each change alone and all at once, on the live process and after a restart (bug 79).
pub(crate) async fn changes(cli: RealCli) {
    let mut bench = Bench::new(&cli);
    let mut talk = Talk::new("changes");
    talk.say(&bench, ROUND).await;
    talk.answer(&bench).await;
    served(&bench, &talk);
    let changes: [(&str, Change); 4] = [
        ("prompt", |talk| {
            talk.system = "You are another one.".to_owned()
        }),
        ("tools", |talk| talk.tools.push(tool("search"))),
        ("model", |talk| talk.model = "haiku".to_owned()),
        ("all", |talk| {
            talk.model = "sonnet".to_owned();
            talk.system = "You are the first again.".to_owned();
            talk.tools.remove(0);
        }),
    ];
    for (what, change) in changes {
        change(&mut talk);
        let heard = talk.say(&bench, "[[say changed]]").await;
        planned(&heard, PlanKind::Forked);
        served(&bench, &talk);
        talk.say(&bench, "[[say still]]").await;
        served(&bench, &talk);
        eprintln!(
            "MEASURED {}: another {what}: {:?}",
            cli.version,
            crate::talk::plan(&heard)
        );
    }
    // Between a call and its results.
    talk.tools.push(tool("read"));
    talk.say(&bench, ROUND).await;
    talk.system = "You changed while a tool ran.".to_owned();
    assert_eq!(talk.answer(&bench).await.text(), "done");
    served(&bench, &talk);
    // After a restart: another model forks, other tools are told anew.
    bench = bench.restart().await;
    talk.model = "haiku".to_owned();
    planned(&talk.say(&bench, "[[say model]]").await, PlanKind::Forked);
    served(&bench, &talk);
    bench = bench.restart().await;
    talk.tools.push(tool("late"));
    planned(&talk.say(&bench, "[[say tools]]").await, PlanKind::Reseeded);
    served(&bench, &talk);
    bench.finish().await;
}

/// Another effort goes on with the live process.
pub(crate) async fn effort(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("effort");
    talk.say(&bench, "[[say hello]]").await;
    let mut seen = Vec::new();
    for effort in [Effort::Low, Effort::High, Effort::Low, Effort::Medium] {
        talk.messages.push(Message::user("[[say on]]"));
        let mut request = talk.request();
        request.effort = Some(effort);
        let history = talk.messages.clone();
        let heard = hear(turnpass::Transport::generate(&bench.pool, request)).await;
        talk.keep(&heard);
        planned(&heard, PlanKind::Continued);
        crate::holds::upstream_holds(&history, &bench.newest());
        let sent = bench.newest().field("/output_config/effort").cloned();
        seen.push(sent.unwrap_or_default());
    }
    assert_eq!(seen, ["low", "high", "low", "medium"]);
    assert_eq!(bench.spawned().len(), 1);
    bench.finish().await;
}

/// The service signs thinking for one model: another model is not given it, and the first one has it again.
pub(crate) async fn thinking(cli: RealCli) {
    let bench = Bench::new(&cli);
    let mut talk = Talk::new("thinking");
    talk.say(&bench, "[[think of sonnet]] [[say one]]").await;
    let own = talk.messages.clone();
    talk.model = "haiku".to_owned();
    talk.messages
        .push(Message::user("[[think of haiku]] [[say two]]"));
    let mut told = talk.messages.clone();
    without_thinking(&mut told);
    let heard = talk.go_on(&bench).await;
    planned(&heard, PlanKind::Forked);
    crate::holds::upstream_holds(&told, &bench.newest());
    talk.model = "sonnet".to_owned();
    talk.messages.push(Message::user("[[say three]]"));
    let mut told = talk.messages.clone();
    without_thinking(&mut told);
    told.splice(..own.len(), own);
    assert_eq!(talk.go_on(&bench).await.text(), "three");
    crate::holds::upstream_holds(&told, &bench.newest());
    bench.finish().await;
}

fn without_thinking(messages: &mut [Message]) {
    for message in messages {
        message
            .content
            .retain(|block| !matches!(block, Block::Thinking(_)));
    }
}
