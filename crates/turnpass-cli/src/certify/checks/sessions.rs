//! Conversations that go on in another process.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::super::cli::{Why, block_of, late, seen, user_blocks};
use super::super::conversation::ends_with;
use super::super::lane::{Lane, uuid};
use super::Checked;
use super::live::prompted;

/// Longest wait until a parked call is on disk: 16 to 65 ms (2.1.294 to 2.1.332).
const FLUSH_LIMIT: Duration = Duration::from_secs(10);

/// Between two looks at the file.
const FLUSH_PAUSE: Duration = Duration::from_millis(10);

/// At the end, where the last turn has to be on disk although its process was killed at once, and then further up.
pub(super) async fn resume_at(lane: &mut Lane) -> Checked {
    let parent = lane.parent().await?;
    let [one, both] = parent.turns;
    for (record, before) in [(parent.second, both), (parent.first, one)] {
        let mut cli = lane
            .fresh(|trial| {
                trial.persists = true;
                trial.resume = Some((parent.session.clone(), record, false));
            })
            .await?;
        lane.goes_on(&mut cli, before).await?;
        cli.kill().await?;
    }
    Ok(())
}

pub(super) async fn fork_at(lane: &mut Lane) -> Checked {
    let parent = lane.parent().await?;
    let mut cli = lane
        .fresh(|trial| {
            trial.persists = true;
            trial.resume = Some((parent.session.clone(), parent.first, true));
        })
        .await?;
    let [before, _] = parent.turns;
    let asked = lane.asked();
    lane.goes_on(&mut cli, before).await?;
    let request = lane.requests_since(asked).pop();
    let session = request.and_then(|one| one.header("x-claude-code-session-id").map(str::to_owned));
    match session {
        Some(session) if session != parent.session => Ok(()),
        _ => seen("the fork goes on under the id of its parent"),
    }
}

pub(super) async fn prompt_snapshot_off(lane: &mut Lane) -> Checked {
    const PROMPT: &str = "You are tried again.";
    let parent = lane.parent().await?;
    let mut cli = lane
        .fresh(|trial| {
            trial.persists = true;
            trial.resume = Some((parent.session, parent.first, true));
            PROMPT.clone_into(&mut trial.system);
        })
        .await?;
    let [before, _] = parent.turns;
    let body = lane.goes_on(&mut cli, before).await?;
    prompted(&body, PROMPT)
}

pub(super) async fn resume_parked(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|trial| trial.persists = true).await?;
    let (turn, mut before) = lane.good_turn(&mut cli).await?;
    let session = turn.result()["session_id"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let text = lane.label("parked");
    let (call, mut records) = lane.parked(&mut cli, &text).await?;
    // The call can come before the record of its block.
    let is_block = |one: &serde_json::Value| one["type"] == "assistant";
    if !records.iter().any(is_block) {
        records = cli.until("assistant record", is_block).await?;
    }
    let record = records.iter().rev().find(|one| is_block(one));
    let record = record
        .and_then(|one| one["uuid"].as_str())
        .unwrap_or_default()
        .to_owned();
    on_disk(
        &lane.home.path().join(".claude/projects"),
        &session,
        &record,
    )
    .await?;
    cli.kill().await?;
    let mut cli = lane
        .fresh(|trial| {
            trial.persists = true;
            trial.resume = Some((session, record, true));
        })
        .await?;
    let id = block_of(&call).unwrap_or_default();
    let (asked, more) = (lane.asked(), lane.label("more"));
    lane.reply("[[say done]]");
    let content = json!([
        {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "fine"}]},
        {"type": "text", "text": more},
    ]);
    cli.send(&[user_blocks(&uuid(), content)])?;
    cli.result().await?.good()?;
    let name = lane.subject.name("alpha");
    before.extend([
        format!("user text {text}"),
        format!("assistant call {name} {id} {{\"n\":1}}"),
        format!("user result {id} fine"),
        format!("user text {more}"),
    ]);
    ends_with(&lane.one_since(asked)?, &before).map_err(Why::Seen)
}

/// Waits until a record stands in the conversation's file.
async fn on_disk(projects: &Path, session: &str, record: &str) -> Checked {
    let name = format!("{session}.jsonl");
    let holds = || {
        let folders = std::fs::read_dir(projects).into_iter().flatten().flatten();
        let mut texts =
            folders.filter_map(|folder| std::fs::read_to_string(folder.path().join(&name)).ok());
        texts.any(|text| text.contains(record))
    };
    let end = Instant::now() + FLUSH_LIMIT;
    while !holds() {
        if Instant::now() > end {
            let limit = FLUSH_LIMIT.as_secs();
            return late(format!("a parked call is not on disk within {limit} s"));
        }
        tokio::time::sleep(FLUSH_PAUSE).await;
    }
    Ok(())
}
