//! Tools in-band, and turns that end in calls.

use std::time::Duration;

use serde_json::Value;

use super::super::cli::{answer, block_of, is_call, is_exchange, late, seen, told, user};
use super::super::conversation::{ends_with, result_text};
use super::super::lane::{Lane, uuid};
use super::Checked;
use crate::certify::cli::Why;

/// Four times what the CLI leaves of a result without being asked to leave more (50,000).
const RESULT_CHARS: usize = 200_000;

/// Longest wait for a second call beside the first: 5 to 10 ms on 2.1.332.
const BESIDE_LIMIT: Duration = Duration::from_secs(5);

pub(super) async fn in_band_manifest(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let (asked, text) = (lane.asked(), lane.label("ask"));
    let name = lane.subject.name("alpha");
    lane.reply(&format!("[[call {name} {{}}]]"));
    cli.send(&[user(&uuid(), &text)])?;
    let records = cli.until("tools/call", is_exchange).await?;
    let first = records.last().unwrap_or(&Value::Null);
    if !is_call(first) {
        let method = first["request"]["message"]["method"].as_str();
        let method = told(method.unwrap_or("something"));
        return seen(format!("{method} comes before the first call"));
    }
    let body = lane.one_since(asked)?;
    match body["tools"].as_array().map(Vec::len) {
        Some(2) => Ok(()),
        count => seen(format!(
            "the request has {} tools",
            count.unwrap_or_default()
        )),
    }
}

pub(super) async fn in_band_pairing(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let text = lane.label("ask");
    let (call, records) = lane.parked(&mut cli, &text).await?;
    let block = block_of(&call).map(str::to_owned);
    lane.reply("[[say done]]");
    cli.send(&[answer(&call, "fine", false)])?;
    let turn = cli.result().await?.good()?;
    let blocks = records.iter().chain(&turn.0);
    let mut blocks = blocks.flat_map(|one| {
        one["message"]["content"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    });
    let id = blocks.find(|block| block["type"] == "tool_use");
    let id = id.and_then(|block| block["id"].as_str().map(str::to_owned));
    match (block, id) {
        (Some(named), Some(id)) if named == id => {
            lane.keep(cli);
            Ok(())
        }
        (None, _) => seen("the call names no block"),
        (_, None) => seen("no record shows the block"),
        _ => seen("the call names another block"),
    }
}

pub(super) async fn in_band_parallel(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (alpha, beta) = (lane.subject.name("alpha"), lane.subject.name("beta"));
    lane.reply(&format!(
        "[[call {alpha} {{\"n\":1}}]] [[call {beta} {{\"n\":2}}]]"
    ));
    let text = lane.label("ask");
    cli.send(&[user(&uuid(), &text)])?;
    let first = cli
        .until("tools/call", is_call)
        .await?
        .pop()
        .unwrap_or_default();
    let second = tokio::time::timeout(BESIDE_LIMIT, cli.until("tools/call", is_call)).await;
    let Ok(second) = second else {
        return late("the second call waits for the answer to the first");
    };
    let second = second?.pop().unwrap_or_default();
    lane.reply("[[say done]]");
    cli.send(&[answer(&second, "two", false), answer(&first, "one", false)])?;
    cli.result().await?.good()?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn result_whole(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let text = lane.label("ask");
    let (call, _) = lane.parked(&mut cli, &text).await?;
    let asked = lane.asked();
    lane.reply("[[say done]]");
    let long = "0123456789".repeat(RESULT_CHARS / 10);
    cli.send(&[answer(&call, &long, false)])?;
    cli.result().await?.good()?;
    let arrived = result_of(&lane.one_since(asked)?, block_of(&call));
    if arrived.as_deref() != Some(long.as_str()) {
        let chars = arrived.map_or(0, |text| text.chars().count());
        return seen(format!("{chars} of {RESULT_CHARS} characters"));
    }
    lane.keep(cli);
    Ok(())
}

/// The text of the result of a call in a request.
fn result_of(body: &Value, id: Option<&str>) -> Option<String> {
    let messages = body["messages"].as_array()?;
    let mut blocks = messages
        .iter()
        .filter_map(|one| one["content"].as_array())
        .flatten();
    let result =
        blocks.find(|block| block["type"] == "tool_result" && block["tool_use_id"].as_str() == id);
    result.map(result_text)
}

pub(super) async fn end_turn(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (text, steer) = (lane.label("ask"), lane.label("steer"));
    let (call, _) = lane.parked(&mut cli, &text).await?;
    let asked = lane.asked();
    cli.send(&[answer(&call, "fine", true)])?;
    cli.result().await?.good()?;
    match lane.asked() - asked {
        0 => {}
        count => return seen(format!("{count} requests after the result")),
    }
    lane.turn(&mut cli, &steer, "[[say done]]").await?.good()?;
    let id = block_of(&call).unwrap_or_default();
    let name = lane.subject.name("alpha");
    let wanted = [
        format!("user text {text}"),
        format!("assistant call {name} {id} {{\"n\":1}}"),
        format!("user result {id} fine"),
        format!("user text {steer}"),
    ];
    ends_with(&lane.one_since(asked)?, &wanted).map_err(Why::Seen)?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn unparsed_input(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let name = lane.subject.name("alpha");
    let text = lane.label("ask");
    let asked = lane.asked();
    lane.reply(&format!("[[raw-call {name} {{\"n\":]]"));
    lane.reply("[[say sorry]]");
    cli.send(&[user(&uuid(), &text)])?;
    let mut is_called = false;
    let records = cli
        .until("result", |one| {
            is_called |= is_call(one);
            is_called || one["type"] == "result"
        })
        .await?;
    if is_called {
        return seen("the call was made");
    }
    let mut blocks = records.iter().flat_map(|one| {
        one["message"]["content"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    });
    let block = blocks
        .find(|block| block["type"] == "tool_use")
        .unwrap_or_default();
    if block["input"].get("__unparsedToolInput").is_none() {
        return seen(format!(
            "the record shows the input {}",
            told(&block["input"].to_string())
        ));
    }
    let body = lane.bodies_since(asked).pop().unwrap_or_default();
    if result_of(&body, block["id"].as_str()).is_none() {
        return seen("the CLI does not answer the call by itself");
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn max_turns_hand_off(lane: &mut Lane) -> Checked {
    let mut cli = lane
        .fresh(|trial| {
            trial.calls_allowed = false;
            trial.max_turns = Some(1);
        })
        .await?;
    let name = lane.subject.name("alpha");
    let asked = lane.asked();
    let text = lane.label("ask");
    let turn = lane
        .turn(&mut cli, &text, &format!("[[call {name} {{}}]]"))
        .await?;
    lane.one_since(asked)?;
    match turn.result()["subtype"].as_str() {
        Some("error_max_turns") => Ok(()),
        _ => seen(turn.end()),
    }
}
