//! Histories that the host writes: user lines that are not asked, and assistant lines.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::cli::{Cli, Why, assistant_frame, late, seen, user, user_blocks, user_frame};
use super::super::conversation::{ends_with, said};
use super::super::lane::{Lane, uuid};
use super::Checked;
use crate::certify::cli::not_checked;

/// A word that a file in the working directory says, and that must not reach the service.
const WORD: &str = "PLANTED-WORD-mention";

/// Longest wait for the acknowledgement of an assistant frame, which comes as soon as the line is read.
const ACKNOWLEDGED_LIMIT: Duration = Duration::from_secs(5);

/// Frames a user line and waits for its result.
async fn frame(cli: &mut Cli, text: &str) -> Result<String, Why> {
    let uuid = uuid();
    cli.send(&[user_frame(&uuid, text)])?;
    let turn = cli.result().await?.good()?;
    // The model that answers may be named by an alias on the command line.
    let model = turn.init()["model"].as_str().unwrap_or_default();
    Ok(model.to_owned())
}

/// A call and its result in frames.
struct Exchange {
    call: Value,
    result: Value,
    lines: [String; 2],
}

fn exchange(lane: &Lane) -> Exchange {
    let id = format!("toolu_{}", uuid::Uuid::new_v4().simple());
    let name = lane.subject.name("alpha");
    Exchange {
        call: json!({"type": "tool_use", "id": id, "name": name, "input": {"n": 1}}),
        result: json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "fine"}]}),
        lines: [
            format!("assistant call {name} {id} {{\"n\":1}}"),
            format!("user result {id} fine"),
        ],
    }
}

/// Two framed turns, the second with a call, and a line that brings its result.
async fn framed(lane: &mut Lane, cli: &mut Cli, mut before: Vec<String>) -> Checked {
    let [one, two, three] = ["one", "two", "three"].map(|word| lane.label(word));
    let reply = lane.label("reply");
    let exchange = exchange(lane);
    let model = frame(cli, &one).await?;
    let first = assistant_frame(&uuid(), &model, json!([{"type": "text", "text": reply}]));
    let second = uuid();
    cli.send(&[first, user_frame(&second, &two)])?;
    cli.result().await?.good()?;
    let asked = lane.asked();
    lane.reply("[[say done]]");
    let ask = json!([exchange.result, {"type": "text", "text": three}]);
    cli.send(&[
        assistant_frame(&uuid(), &model, json!([exchange.call])),
        user_blocks(&uuid(), ask),
    ])?;
    cli.result().await?.good()?;
    before.extend([
        format!("user text {one}"),
        format!("assistant text {reply}"),
        format!("user text {two}"),
    ]);
    before.extend(exchange.lines);
    before.push(format!("user text {three}"));
    ends_with(&lane.one_since(asked)?, &before).map_err(Why::Seen)
}

pub(super) async fn order(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    framed(lane, &mut cli, Vec::new()).await?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn live(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (_, before) = lane.good_turn(&mut cli).await?;
    framed(lane, &mut cli, before).await?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn acknowledged(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let (first, second) = (uuid(), uuid());
    let text = lane.label("one");
    cli.send(&[user_frame(&first, &text)])?;
    let done = |uuid: &str, record: &Value| {
        record["type"] == "command_lifecycle"
            && record["command_uuid"] == *uuid
            && record["state"] == "completed"
    };
    // Result and acknowledgement come in either order.
    let (mut has_result, mut is_done, mut model) = (false, false, String::new());
    cli.until("acknowledgement of a user frame", |one| {
        has_result |= one["type"] == "result";
        is_done |= done(&first, one);
        if let Some(named) = one["model"].as_str() {
            named.clone_into(&mut model);
        }
        has_result && is_done
    })
    .await?;
    cli.send(&[assistant_frame(
        &second,
        &model,
        json!([{"type": "text", "text": "fine"}]),
    )])?;
    let until = cli.until("acknowledgement", |one| done(&second, one));
    match tokio::time::timeout(ACKNOWLEDGED_LIMIT, until).await {
        Ok(read) => drop(read?),
        Err(_) => return late("an assistant frame is not acknowledged"),
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn thinking(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let (one, reply, two) = (lane.label("one"), lane.label("reply"), lane.label("two"));
    let thought = lane.label("thought");
    let signature = lane.upstream.sign(&thought);
    let model = frame(&mut cli, &one).await?;
    let content = json!([
        {"type": "thinking", "thinking": thought, "signature": signature},
        {"type": "text", "text": reply},
    ]);
    let asked = lane.asked();
    lane.reply("[[say done]]");
    cli.send(&[
        assistant_frame(&uuid(), &model, content),
        user(&uuid(), &two),
    ])?;
    cli.result().await?.good()?;
    let body = lane.one_since(asked)?;
    let messages = body["messages"].as_array().cloned().unwrap_or_default();
    let mut blocks = messages
        .iter()
        .filter_map(|one| one["content"].as_array())
        .flatten();
    let kept = blocks.find(|block| block["type"] == "thinking" && block["thinking"] == *thought);
    match kept {
        Some(block) if block["signature"] == *signature => {}
        Some(_) => return seen("the signature is another one"),
        None => return seen(format!("the thinking is gone: {}", said(&body).join(" | "))),
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn client_composed(lane: &mut Lane) -> Checked {
    let file = lane.work().join("mention.txt");
    std::fs::write(&file, WORD).map_err(not_checked)?;
    let mut cli = lane.live().await?;
    let framed = format!("/compact {}", lane.label("frame"));
    frame(&mut cli, &framed).await?;
    let mut wanted = vec![format!("user text {framed}")];
    let at = lane.label("read @mention.txt and");
    let slash = format!("/compact {}", lane.label("it"));
    for text in [at, slash] {
        let asked = lane.asked();
        lane.turn(&mut cli, &text, "[[say done]]").await?.good()?;
        let body = lane.one_since(asked)?;
        if body.to_string().contains(WORD) {
            return seen("the file that a text names is in the request");
        }
        wanted.push(format!("user text {text}"));
        ends_with(&body, &wanted).map_err(Why::Seen)?;
        wanted.push("assistant text done".to_owned());
    }
    lane.keep(cli);
    Ok(())
}
