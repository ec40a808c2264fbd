//! How many requests a turn is, and what the CLI makes of the answers.

use serde_json::{Value, json};
use turnpass_lab::scenario::Reply;

use super::super::cli::{Cli, Turn, Why, seen, user};
use super::super::conversation::cache_marks;
use super::super::lane::{Lane, uuid};
use super::Checked;
use super::live::rewind;

/// What the gate is set to: nothing fits, and everything fits.
const SHUT: &str = "1";
const OPEN: &str = "50000000";

pub(super) async fn one(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let before = lane.upstream.requests().len();
    lane.good_turn(&mut cli).await?;
    let requests = lane.upstream.requests();
    let posts = requests
        .iter()
        .skip(before)
        .filter(|one| one.method == "POST");
    match posts.count() {
        1 => {}
        count => return seen(format!("{count} requests")),
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn cache_breakpoints(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let body = lane.goes_on(&mut cli, Vec::new()).await?;
    let marks = cache_marks(&body);
    let is_as_known = marks.len() == 3 && marks.iter().all(|(_, ttl)| ttl == "1h");
    if !is_as_known {
        let marks: Vec<_> = marks
            .iter()
            .map(|(place, ttl)| format!("{place} {ttl}"))
            .collect();
        return seen(format!("marks: {}", marks.join(", ")));
    }
    lane.keep(cli);
    Ok(())
}

fn gate(state: &str) -> Value {
    let env = json!({"CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE": state});
    json!({"subtype": "apply_flag_settings", "settings": {"env": env}})
}

/// Asks with the gate open and shuts it when the reply begins. The upstream holds the rest of the reply until the CLI has
/// taken that: how fast a machine is must not decide.
async fn gated(lane: &Lane, cli: &mut Cli, line: Value, held: &str) -> Result<Turn, Why> {
    let open = gate(OPEN);
    let (open_line, id) = cli.control_line(&open);
    cli.send(&[open_line, line])?;
    cli.answer(&open, &id).await?;
    cli.until("message_start", |one| {
        one["event"]["type"] == "message_start"
    })
    .await?;
    cli.control(gate(SHUT)).await?;
    lane.upstream.release(held);
    cli.result().await
}

pub(super) async fn blocking_limit_gate(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let (_, before) = lane.good_turn(&mut cli).await?;
    for rest in ["[[say half]] [[stop max_tokens]]", "[[empty]]"] {
        let asked = lane.asked();
        let held = lane.label("gate").replace(' ', "-");
        lane.reply(&format!("[[hold {held}]] {rest}"));
        let (uuid, text) = (uuid(), lane.label("gated"));
        let turn = gated(lane, &mut cli, user(&uuid, &text), &held).await?;
        lane.one_since(asked)?;
        if turn.result()["terminal_reason"] != "blocking_limit" {
            return seen(turn.end());
        }
        rewind(&mut cli, &uuid).await?;
    }
    cli.control(gate(OPEN)).await?;
    lane.goes_on(&mut cli, before).await.map(|_| ())
}

/// Asks something that is answered as `reply` says; gives the turn and how many requests it was.
async fn answered(lane: &mut Lane, cli: &mut Cli, reply: Reply) -> Result<(Turn, usize), Why> {
    let asked = lane.asked();
    let text = lane.label("ask");
    lane.upstream.enqueue(reply);
    cli.send(&[user(&uuid(), &text)])?;
    let turn = cli.result().await?;
    Ok((turn, lane.asked() - asked))
}

/// A turn that fails after exactly one request.
async fn fails_once(lane: &mut Lane, cli: &mut Cli, what: &str, reply: Reply) -> Result<Turn, Why> {
    let (turn, requests) = answered(lane, cli, reply).await?;
    if requests != 1 {
        return seen(format!("{what}: {requests} requests"));
    }
    match turn.is_good() {
        true => seen(format!("{what} ended well")),
        false => Ok(turn),
    }
}

pub(super) async fn refused_with_410(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let asked = lane.asked();
    lane.reply("[[say half]] [[stop max_tokens]]");
    lane.upstream.enqueue(Reply::error(
        410,
        "invalid_request_error",
        "one request only",
    ));
    let text = lane.label("ask");
    cli.send(&[user(&uuid(), &text)])?;
    let turn = cli.result().await?;
    match (
        lane.asked() - asked,
        turn.result()["api_error_status"].as_u64(),
    ) {
        (2, Some(410)) => Ok(()),
        (2, _) => seen(turn.end()),
        (1, _) => seen("it did not go on by itself, so nothing was refused"),
        (requests, _) => seen(format!("{} requests after the refusal", requests - 2)),
    }
}

pub(super) async fn readmission_after_401(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let asked = lane.asked();
    lane.upstream
        .enqueue(Reply::error(401, "authentication_error", "expired"));
    let text = lane.label("ask");
    let turn = lane.turn(&mut cli, &text, "[[say renewed]]").await?;
    let bodies = lane.bodies_since(asked);
    match bodies.as_slice() {
        [first, second] if first["messages"] == second["messages"] => turn.good().map(|_| ()),
        [_, _] => seen("the second body is another one"),
        bodies => seen(format!("{} requests", bodies.len())),
    }
}

pub(super) async fn retries_off(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    for (status, kind) in [
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ] {
        let reply = Reply::error(status, kind, "made up");
        fails_once(lane, &mut cli, &format!("a {status}"), reply).await?;
    }
    lane.keep(cli);
    Ok(())
}

/// A reply that breaks off inside a block, in the middle of its body or with a body that ends in order.
const CUT: [&str; 2] = [
    "[[say this breaks off somewhere]] [[cut mid-block end]]",
    "[[say this breaks off somewhere]] [[cut mid-block close]]",
];

pub(super) async fn fallback_off(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    for cut in CUT {
        let reply = Reply::directives(cut);
        fails_once(lane, &mut cli, "a stream that broke off", reply).await?;
    }
    lane.keep(cli);
    Ok(())
}

pub(super) async fn refusal_once(lane: &mut Lane) -> Checked {
    let mut cli = lane.fresh(|_| {}).await?;
    let refusal = Reply::directives("[[say no]] [[stop refusal]]");
    fails_once(lane, &mut cli, "a refusal", refusal).await?;
    let details = "[[say no]] [[stop refusal]] [[stop-details {\"type\":\"refusal\",\"category\":\"cyber\"}]]";
    fails_once(
        lane,
        &mut cli,
        "a refusal with details",
        Reply::directives(details),
    )
    .await?;
    lane.keep(cli);
    Ok(())
}

pub(super) async fn stop_after_cut(lane: &mut Lane) -> Checked {
    let mut cli = lane.live().await?;
    let (turn, _) = answered(lane, &mut cli, Reply::directives(CUT[0])).await?;
    let mut records = turn.0.iter();
    let stop = records.find(|one| one["event"]["type"] == "message_stop");
    match stop {
        Some(stop) if stop["abandoned_blocks"].is_object() => {
            lane.keep(cli);
            Ok(())
        }
        Some(_) => seen("the made-up message_stop names no abandoned blocks"),
        None => seen("no message_stop is made up"),
    }
}

pub(super) async fn budget_stop(lane: &mut Lane) -> Checked {
    let mut cli = lane
        .start(|trial| {
            trial.max_turns = Some(1);
            trial.budget_usd = Some("0.0000001".to_owned());
        })
        .await?;
    let reply = Reply::directives("[[say half]] [[stop max_tokens]]");
    let (turn, requests) = answered(lane, &mut cli, reply).await?;
    match requests {
        1 if turn.result()["type"] == "result" => Ok(()),
        count => seen(format!("{count} requests")),
    }
}
