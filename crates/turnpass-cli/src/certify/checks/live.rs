//! What can be changed, stopped and taken back in a running process.

use serde_json::{Value, json};

use super::super::cli::{Cli, Why, seen, told, user, user_frame};
use super::super::lane::{Lane, MODEL, uuid};
use super::Checked;
use turnpass_lab::scenario::Reply;

/// Another prompt than that of the start.
const OTHER_SYSTEM: &str = "You are tried with another prompt.";

/// Another model than that of the start, by its full id.
const OTHER_MODEL: &str = "claude-opus-5-5";

fn has_prompt(body: &Value, prompt: &str) -> bool {
    let blocks = body["system"].as_array().map_or(&[][..], Vec::as_slice);
    blocks
        .iter()
        .any(|block| block["text"].as_str() == Some(prompt))
}

/// Whether the request goes out with this prompt.
pub(super) fn prompted(body: &Value, prompt: &str) -> Checked {
    match has_prompt(body, prompt) {
        true => Ok(()),
        false => seen("the request has another system prompt"),
    }
}

pub(super) async fn extra_body(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    lane.good_turn(&mut cli).await?;
    let messages =
        json!([{"role": "user", "content": [{"type": "text", "text": "in place of all"}]}]);
    let extra = json!({"messages": messages, "stop_sequences": ["certify"]});
    let env = json!({"CLAUDE_CODE_EXTRA_BODY": extra.to_string()});
    cli.control(json!({"subtype": "apply_flag_settings", "settings": {"env": env}}))
        .await?;
    let asked = lane.asked();
    lane.turn(&mut cli, "placeholder", "[[say done]]")
        .await?
        .good()?;
    let body = lane.one_since(asked)?;
    for field in ["messages", "stop_sequences"] {
        if body[field] != extra[field] {
            return seen(format!("{field} is {}", told(&body[field].to_string())));
        }
    }
    Ok(())
}

pub(super) async fn system_prompt(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let asked = lane.asked();
    cli.control(json!({"subtype": "set_model", "model": MODEL, "system_prompt": OTHER_SYSTEM}))
        .await?;
    let body = lane.goes_on(&mut cli, Vec::new()).await?;
    lane.one_since(asked)?;
    prompted(&body, OTHER_SYSTEM)
}

pub(super) async fn model_change_clean(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let (_, before) = lane.good_turn(&mut cli).await?;
    let asked = lane.asked();
    let thrown_away = uuid();
    let text = lane.label("thrown away");
    cli.send(&[user_frame(&thrown_away, &text)])?;
    cli.result().await?.good()?;
    cli.control(json!({"subtype": "set_model", "system_prompt": OTHER_SYSTEM}))
        .await?;
    cli.control(json!({"subtype": "apply_flag_settings", "settings": {"model": OTHER_MODEL}}))
        .await?;
    rewind(&mut cli, &thrown_away).await?;
    let body = lane.goes_on(&mut cli, before).await?;
    lane.one_since(asked)?;
    if body["model"] != OTHER_MODEL {
        return seen(format!(
            "the request is for {}",
            told(&body["model"].to_string())
        ));
    }
    prompted(&body, OTHER_SYSTEM)
}

pub(super) async fn effort(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    for level in ["low", "max"] {
        let settings = json!({"effortLevel": level});
        cli.control(json!({"subtype": "apply_flag_settings", "settings": settings}))
            .await?;
        let body = lane.goes_on(&mut cli, Vec::new()).await?;
        let effort = &body["output_config"]["effort"];
        if effort != level {
            return seen(format!(
                "the request has effort {} after {level}",
                told(&effort.to_string())
            ));
        }
    }
    let settings = json!({"effortLevel": null});
    cli.control(json!({"subtype": "apply_flag_settings", "settings": settings}))
        .await?;
    lane.keep(cli);
    Ok(())
}

/// Takes a user line and everything after it out of the conversation.
pub(super) async fn rewind(cli: &mut Cli, uuid: &str) -> Checked {
    let request = json!({"subtype": "rewind_conversation", "target_message_uuid": uuid});
    let answer = cli.control(request).await?;
    match answer["rewound"] == true {
        true => Ok(()),
        false => seen(format!(
            "not rewound: {}",
            told(&answer["reason"].to_string())
        )),
    }
}

/// Interrupts, and gives the answer.
async fn interrupt(cli: &mut Cli) -> Result<Value, Why> {
    cli.control(json!({"subtype": "interrupt", "cancel_queued": true}))
        .await
}

/// Begins a turn whose reply stops in the middle; gives the line's uuid and the number of the request.
async fn stopped_in_text(lane: &mut Lane, cli: &mut Cli) -> Result<(String, u64), Why> {
    let (uuid, text) = (uuid(), lane.label("stopped"));
    let asked = lane.asked();
    lane.reply("[[say half]] [[stall closed]]");
    cli.send(&[user(&uuid, &text)])?;
    cli.until("text", |one| one["event"]["type"] == "content_block_delta")
        .await?;
    let request = lane.requests_since(asked).pop();
    Ok((uuid, request.map_or(0, |one| one.number)))
}

pub(super) async fn rewind_after_interrupt(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (_, before) = lane.good_turn(&mut cli).await?;
    let (uuid, _) = stopped_in_text(lane, &mut cli).await?;
    interrupt(&mut cli).await?;
    cli.result().await?;
    rewind(&mut cli, &uuid).await?;
    lane.goes_on(&mut cli, before).await?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn rewind_after_failure(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (_, before) = lane.good_turn(&mut cli).await?;
    let (uuid, text) = (uuid(), lane.label("failed"));
    lane.upstream
        .enqueue(Reply::error(529, "overloaded_error", "overloaded"));
    cli.send(&[user(&uuid, &text)])?;
    let turn = cli.result().await?;
    if turn.is_good() {
        return seen("a failed request ended well");
    }
    rewind(&mut cli, &uuid).await?;
    lane.goes_on(&mut cli, before).await?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn interrupt_closes(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (uuid, number) = stopped_in_text(lane, &mut cli).await?;
    interrupt(&mut cli).await?;
    lane.closed(number).await?;
    cli.result().await?;
    rewind(&mut cli, &uuid).await?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn cancel_queued(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (_, before) = lane.good_turn(&mut cli).await?;
    let (running, _) = stopped_in_text(lane, &mut cli).await?;
    let asked = lane.asked();
    let (waiting, text) = (uuid(), lane.label("waiting"));
    cli.send(&[user(&waiting, &text)])?;
    cli.until("the waiting line in the queue", |one| {
        one["type"] == "command_lifecycle"
            && one["command_uuid"] == *waiting
            && one["state"] == "queued"
    })
    .await?;
    let answer = interrupt(&mut cli).await?;
    if answer["cancelled"] != json!([waiting]) {
        return seen(format!("interrupt answered {}", told(&answer.to_string())));
    }
    cli.result().await?;
    rewind(&mut cli, &running).await?;
    lane.goes_on(&mut cli, before).await?;
    lane.one_since(asked)?;
    lane.keep(cli);
    Ok(())
}
