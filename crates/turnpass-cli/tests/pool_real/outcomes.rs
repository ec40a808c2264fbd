//! Every answer that the service can give: what the host hears of it, how many requests it costs, and that the histories
//! are equal afterwards.

use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use serde_json::json;
use turnpass::ErrorCode;
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::{Event, Rejection, StopReason};
use turnpass_lab::rig::RealCli;
use turnpass_lab::scenario::{Cut, CutAt, CutHow, Item, Reply};

use crate::bench::Bench;
use crate::holds;
use crate::stage::Heard;
use crate::talk::{Talk, plan};

/// Between two events of an answer that comes in pieces: a fast model's pace, and time enough for the CLI to take what it
/// is told while it reads.
const PACE_MS: u64 = 25;
/// A pace that also a CLI on a loaded machine keeps up with.
const SLOW_PACE_MS: u64 = 100;

/// One answer of the service.
struct Row {
    reply: &'static str,
    /// What the upstream answers to the first request and to those after it.
    replies: Vec<Reply>,
    outcome: Outcome,
    /// What the host says, for an answer that is given however often it is asked for.
    line: Option<&'static str>,
    /// Messages requests that reach the upstream.
    requests: RangeInclusive<usize>,
    goes_on: bool,
}

enum Outcome {
    /// A good end with this text and nothing else.
    Done(StopReason, &'static str),
    /// A good end with a released call.
    Call(StopReason),
    /// A good end with a call that the host cannot run.
    Rejected(StopReason, &'static str),
    /// An error; whether text had been given out before; the HTTP status.
    Fails(ErrorCode, bool, Option<u16>),
    /// The connection was lost in the middle. A CLI that has no time to read loses what had come before with it.
    Lost,
}

/// Answers that end, whole in one piece: faster than anything can be told to the CLI.
pub(crate) async fn stops_at_once(cli: RealCli) {
    run(&cli, stop_rows(), 0, |_, _| {}).await;
}

/// The same as a model writes them: one process serves them all.
pub(crate) async fn stops_in_pieces(cli: RealCli) {
    let starts = run(&cli, stop_rows(), SLOW_PACE_MS, |_, _| {}).await;
    assert_eq!(starts, 1, "no answer costs the process");
}

/// Answers that break off (bug 94).
pub(crate) async fn cuts(cli: RealCli) {
    run(&cli, cut_rows(), PACE_MS, |_, _| {}).await;
}

/// Requests that the service refuses.
pub(crate) async fn refused(cli: RealCli) {
    run(&cli, refused_rows(), 0, |_, _| {}).await;
}

/// A service that fails, is overloaded or limits.
pub(crate) async fn failing(cli: RealCli) {
    run(&cli, failing_rows(), PACE_MS, |row, heard| {
        let reset = heard.error().resets_at();
        let ahead = reset.and_then(|at| at.duration_since(SystemTime::now()).ok());
        match row.reply {
            USAGE_LIMIT => assert!(ahead.unwrap() > Duration::from_secs(3_000), "{ahead:?}"),
            _ => assert_eq!(reset, None, "{}", row.reply),
        }
    })
    .await;
}

/// Sign-in, plan and money (bug 49).
pub(crate) async fn account(cli: RealCli) {
    run(&cli, account_rows(), 0, |_, _| {}).await;
}

/// Every row in one conversation, each followed by a good generation that shows the histories equal. Gives the number of
/// processes that it took.
async fn run(cli: &RealCli, rows: Vec<Row>, pace_ms: u64, check: impl Fn(&Row, &Heard)) -> usize {
    let bench = Bench::new(cli);
    let count = rows.len();
    let mut talk = Talk::new("rows");
    talk.say(&bench, "[[think first]] [[say hello]]").await;
    let (mut wrong, mut slipped, mut killed) = (String::new(), 0, 0);
    for (number, row) in rows.into_iter().enumerate() {
        for reply in row.replies.clone() {
            bench.up.enqueue(Reply {
                between_events_ms: pace_ms,
                ..reply
            });
        }
        let before = bench.count();
        let starts = bench.spawned().len();
        let line = row.line.unwrap_or("go on with it");
        talk.messages
            .push(Message::user(format!("{number} {line}")));
        let history = talk.messages.clone();
        let heard = talk.go_on(&bench).await;
        let seen = bench.up.messages().split_off(before);
        let mut problem = |what: String| writeln!(wrong, "{}: {what}", row.reply).unwrap();
        match judge(&row, &heard) {
            Err(what) => problem(what),
            Ok(()) => check(&row, &heard),
        }
        // A whole answer in one piece can be over before the CLI can be told that it must not go on by itself.
        let late = usize::from(pace_ms == 0 && row.goes_on && seen.len() == 2);
        if !row.requests.contains(&(seen.len() - late)) {
            problem(format!("{} requests, not {:?}", seen.len(), row.requests));
        }
        slipped += late;
        if bench.up.replies_left() > 0 {
            problem("a reply was not asked for".into());
        }
        for request in &seen[..seen.len() - late] {
            if let Err(what) = holds::compare(&history, request) {
                problem(what);
            }
        }
        let again = row.line.is_none() && number % 2 == 1;
        for what in follow(&bench, &mut talk, &heard, again).await {
            problem(what);
        }
        killed += usize::from(bench.spawned().len() > starts);
    }
    assert!(wrong.is_empty(), "\n{wrong}");
    eprintln!(
        "MEASURED {}: {count} answers, {pace_ms} ms between events: {killed} cost the process, {slipped} a further request",
        cli.version
    );
    let starts = bench.spawned().len();
    bench.finish().await;
    starts
}

/// The host goes on: with the results of what was called, with the same line or with another one. Nothing but its history
/// is in what the service gets.
async fn follow(bench: &Bench, talk: &mut Talk, heard: &Heard, again: bool) -> Vec<String> {
    let calls: Vec<_> = match &heard.done {
        Some(done) => done.message.tool_calls().cloned().collect(),
        None => Vec::new(),
    };
    if heard.done.is_none() && !again {
        talk.messages.pop();
    }
    if !calls.is_empty() {
        let results = calls.into_iter().map(|call| match again {
            false => ToolResult::error(call.id, "there is no such thing"),
            true => ToolResult::text(call.id, "[[say still here]]"),
        });
        talk.messages.push(Message::results(results));
    } else if heard.done.is_some() || !again {
        talk.messages.push(Message::user("[[say still here]]"));
    }
    let history = talk.messages.clone();
    let before = bench.count();
    let next = talk.go_on(bench).await;
    let seen = bench.up.messages().split_off(before);
    let mut wrong = Vec::new();
    if let Some(error) = &next.error {
        wrong.push(format!("the next generation: {error}"));
        talk.messages.pop();
    }
    if seen.len() != 1 {
        wrong.push(format!("{} requests of the next generation", seen.len()));
    }
    for request in seen {
        if let Err(what) = holds::compare(&history, &request) {
            wrong.push(format!("the next generation, {:?}: {what}", plan(&next)));
        }
    }
    wrong
}

fn judge(row: &Row, heard: &Heard) -> Result<(), String> {
    let end = (&heard.done, &heard.error);
    let wrong = || Err(format!("{end:?} after {:?}", heard.events));
    let calls = heard.calls();
    let rejected: Vec<_> = heard
        .events
        .iter()
        .filter_map(|event| match event {
            Event::ToolRejected { reason, .. } => Some(reason),
            _ => None,
        })
        .collect();
    let failure = match row.outcome {
        Outcome::Fails(code, seen, status) => Some((code, Some(seen), status)),
        Outcome::Lost => Some((ErrorCode::StreamInterrupted, None, None)),
        _ => None,
    };
    if let Some((code, seen, status)) = failure {
        let Some(error) = &heard.error else {
            return wrong();
        };
        let seen = seen.unwrap_or(error.output_seen());
        let same = (error.code(), error.output_seen(), error.status()) == (code, seen, status);
        let released = !calls.is_empty() || !rejected.is_empty();
        return if same && !released { Ok(()) } else { wrong() };
    }
    let Some(done) = &heard.done else {
        return wrong();
    };
    if done.upstream_requests as usize != *row.requests.end() || !done.laboratory {
        return Err(format!("told {} requests", done.upstream_requests));
    }
    let good = match &row.outcome {
        Outcome::Done(stop, text) => {
            (&done.stop, done.message.text().as_str()) == (stop, text)
                && heard.text() == *text
                && calls.is_empty()
                && rejected.is_empty()
        }
        Outcome::Call(stop) => {
            done.stop == *stop
                && calls.len() == 1
                && rejected.is_empty()
                && done.message.tool_calls().eq(calls.iter())
        }
        Outcome::Rejected(stop, why) => {
            let kind = rejected.first().map(|reason| match reason {
                Rejection::UnknownTool => "unknown_tool",
                Rejection::ArgumentDecode { .. } => "argument_decode",
            });
            done.stop == *stop && calls.is_empty() && rejected.len() == 1 && kind == Some(why)
        }
        Outcome::Fails(..) | Outcome::Lost => false,
    };
    if good { Ok(()) } else { wrong() }
}

fn row(reply: &'static str, replies: impl IntoIterator<Item = Reply>, outcome: Outcome) -> Row {
    Row {
        reply,
        replies: replies.into_iter().collect(),
        outcome,
        line: None,
        requests: 1..=1,
        goes_on: false,
    }
}

fn times(requests: usize, row: Row) -> Row {
    Row {
        requests: requests..=requests,
        ..row
    }
}

/// After which the CLI asks again by itself, unless it was told not to.
fn goes_on(row: Row) -> Row {
    Row {
        goes_on: true,
        ..row
    }
}

/// A refusal that the CLI tries again with less, behind a base URL.
fn tried(most: usize, line: &'static str, outcome: Outcome) -> Row {
    Row {
        line: Some(line),
        requests: 1..=most,
        ..row(line, [], outcome)
    }
}

fn text() -> Reply {
    Reply::text("some words")
}

fn stopped(reason: &str) -> Reply {
    Reply {
        stop_reason: Some(Some(reason.to_owned())),
        ..text()
    }
}

fn call(name: &str) -> Item {
    Item::tool_use(name, json!({"path": "a"}))
}

fn raw_call(raw: &str) -> Item {
    Item::ToolUse {
        name: "read".to_owned(),
        id: None,
        input: None,
        raw: Some(vec![raw.to_owned()]),
        chunk: None,
    }
}

fn stop_rows() -> Vec<Row> {
    let mut rows = ends();
    rows.extend(calls());
    rows
}

fn ends() -> Vec<Row> {
    use Outcome::Done;
    let sequence = StopReason::StopSequence {
        sequence: Some("END".into()),
    };
    let details = json!({"type": "refusal", "category": "cyber", "explanation": "not this"});
    let refusal = |category: Option<&str>, explanation: Option<&str>| StopReason::Refusal {
        category: category.map(Into::into),
        explanation: explanation.map(Into::into),
    };
    let other = StopReason::Other {
        word: "brand_new".into(),
    };
    let end = StopReason::EndTurn;
    let said = |stop| Done(stop, "some words");
    let with = |reason: &str, change: fn(&mut Reply)| {
        let mut reply = stopped(reason);
        change(&mut reply);
        [reply]
    };
    let detailed = Reply {
        stop_details: Some(details),
        ..stopped("refusal")
    };
    let by_sequence = with("stop_sequence", |reply| {
        reply.stop_sequence = Some("END".into());
    });
    let empty_refusal = with("refusal", |reply| reply.content = Some(Vec::new()));
    let thought = with("max_tokens", |reply| {
        reply.content = Some(vec![Item::thinking("hm")]);
    });
    vec![
        row("text, end_turn", [text()], said(end.clone())),
        row("text, stop_sequence", by_sequence, said(sequence)),
        row(
            "text, pause_turn",
            [stopped("pause_turn")],
            said(StopReason::PauseTurn),
        ),
        row(
            "text, a new stop reason",
            [stopped("brand_new")],
            said(other),
        ),
        goes_on(row(
            "text, max_tokens",
            [stopped("max_tokens")],
            said(StopReason::MaxTokens),
        )),
        goes_on(row(
            "thinking alone, max_tokens",
            thought,
            Done(StopReason::MaxTokens, ""),
        )),
        goes_on(row(
            "text, model_context_window_exceeded",
            [stopped("model_context_window_exceeded")],
            said(StopReason::ContextWindowExceeded),
        )),
        row(
            "text, refusal",
            [stopped("refusal")],
            said(refusal(None, None)),
        ),
        row(
            "text, refusal with stop_details",
            [detailed],
            said(refusal(Some("cyber"), Some("not this"))),
        ),
        row(
            "an empty refusal",
            empty_refusal,
            Done(refusal(None, None), ""),
        ),
        goes_on(row(
            "no content",
            [Reply::content([])],
            Done(end.clone(), ""),
        )),
        goes_on(row(
            "an empty text",
            [Reply::text("")],
            Done(end.clone(), ""),
        )),
        goes_on(row(
            "thinking alone",
            [Reply::content([Item::thinking("hm")])],
            Done(end, ""),
        )),
    ]
}

fn calls() -> Vec<Row> {
    use Outcome::{Call, Rejected};
    let use_tool = StopReason::ToolUse;
    let ended = |reason: &str, item: Item| Reply {
        stop_reason: Some(Some(reason.into())),
        ..Reply::content([item])
    };
    let unfinished = "{\"path\": \"a";
    vec![
        row(
            "a call of a host tool",
            [Reply::content([Item::text("so"), call("read")])],
            Call(use_tool.clone()),
        ),
        row(
            "a call without arguments (bug 119)",
            [Reply::content([raw_call("")])],
            Call(use_tool.clone()),
        ),
        row(
            "a call, end_turn",
            [ended("end_turn", call("read"))],
            Call(StopReason::EndTurn),
        ),
        goes_on(row(
            "a call of a built-in tool (bug 68)",
            [Reply::content([call("Bash")])],
            Rejected(use_tool.clone(), "unknown_tool"),
        )),
        goes_on(row(
            "a call of a tool that nobody has",
            [Reply::content([
                Item::text("so"),
                call("mcp__turnpass__nothing"),
            ])],
            Rejected(use_tool.clone(), "unknown_tool"),
        )),
        goes_on(row(
            "a call with input that does not parse",
            [Reply::content([raw_call(unfinished)])],
            Rejected(use_tool, "argument_decode"),
        )),
        goes_on(row(
            "a call cut by max_tokens",
            [ended("max_tokens", raw_call(unfinished))],
            Rejected(StopReason::MaxTokens, "argument_decode"),
        )),
    ]
}

fn cut_rows() -> Vec<Row> {
    use CutAt::{BeforeHead, BeforeMessageDelta, BeforeMessageStop, Event, MidBlock};
    use CutHow::{Close, End, Rst};
    use ErrorCode::{StreamInterrupted, UpstreamUnreachable};
    let cut = |reply: Reply, at, how| {
        [Reply {
            cut: Some(Cut { at, how }),
            ..reply
        }]
    };
    let broken = |seen| Outcome::Fails(StreamInterrupted, seen, None);
    let called = || Reply::content([Item::text("so"), call("read")]);
    let pieces = || {
        Reply::content([Item::Text {
            text: "some words".to_owned(),
            chunk: NonZeroUsize::new(2),
        }])
    };
    let nothing = || Outcome::Fails(UpstreamUnreachable, false, None);
    vec![
        row(
            "text, no message_delta",
            cut(text(), BeforeMessageDelta, End),
            broken(true),
        ),
        row(
            "text that ends inside its block",
            cut(text(), MidBlock, End),
            broken(true),
        ),
        row(
            "text, then the connection closes",
            cut(pieces(), MidBlock, Close),
            Outcome::Lost,
        ),
        row(
            "text, then a reset",
            cut(pieces(), MidBlock, Rst),
            Outcome::Lost,
        ),
        row(
            "a whole call, no message_delta",
            cut(called(), BeforeMessageDelta, End),
            broken(true),
        ),
        row(
            "a call that ends inside its input",
            cut(called(), MidBlock, Close),
            Outcome::Lost,
        ),
        row(
            "message_start alone",
            cut(text(), Event(1), End),
            broken(false),
        ),
        row(
            "the connection closes before any answer",
            cut(text(), BeforeHead, Close),
            nothing(),
        ),
        row(
            "a reset before any answer",
            cut(text(), BeforeHead, Rst),
            nothing(),
        ),
        row(
            "text, no message_stop",
            cut(text(), BeforeMessageStop, End),
            Outcome::Done(StopReason::EndTurn, "some words"),
        ),
    ]
}

fn fails(code: ErrorCode, status: u16) -> Outcome {
    Outcome::Fails(code, false, Some(status))
}

fn refused_rows() -> Vec<Row> {
    use ErrorCode::{
        ContextLengthExceeded, Forbidden, HistoryTooLarge, ModelNotFound, UpstreamError,
        UpstreamRejected,
    };
    let invalid = "invalid_request_error";
    let error = |status: u16, kind: &str, message: &str| [Reply::error(status, kind, message)];
    let long = "prompt is too long: 250000 tokens > 200000 maximum";
    vec![
        tried(3, "[[status 400]]", fails(UpstreamRejected, 400)),
        tried(3, "[[status 422]]", fails(UpstreamRejected, 422)),
        row(
            "400 too long",
            error(400, invalid, long),
            fails(ContextLengthExceeded, 400),
        ),
        row(
            "403",
            error(403, "permission_error", "no"),
            fails(Forbidden, 403),
        ),
        tried(2, "[[status 404]]", fails(ModelNotFound, 404)),
        row(
            "408",
            error(408, "timeout_error", "late"),
            fails(UpstreamError, 408),
        ),
        row(
            "409",
            error(409, "conflict_error", "busy"),
            fails(UpstreamError, 409),
        ),
        row(
            "413",
            error(413, "request_too_large", "large"),
            fails(HistoryTooLarge, 413),
        ),
    ]
}

const USAGE_LIMIT: &str = "429, unified status rejected, with its reset";

fn failing_rows() -> Vec<Row> {
    use ErrorCode::{Overloaded, RateLimit, UpstreamError, UsageLimit};
    let limited = || Reply::error(429, "rate_limit_error", "slow down");
    let in_an_hour = SystemTime::now() + Duration::from_secs(3_600);
    let epoch = in_an_hour
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let unified = [
        ("anthropic-ratelimit-unified-status", "rejected".to_owned()),
        ("anthropic-ratelimit-unified-reset", epoch.to_string()),
        (
            "anthropic-ratelimit-unified-representative-claim",
            "five_hour".to_owned(),
        ),
    ];
    let unified = Reply {
        headers: unified.map(|(name, value)| (name.to_owned(), value)).into(),
        ..limited()
    };
    let event = |error: &str| Item::Error {
        error: error.to_owned(),
        message: None,
    };
    let said = |error: &str| [Reply::content([Item::text("some words"), event(error)])];
    // The CLI does not tell what it was: it keeps the text and would go on by itself.
    let broken = || Outcome::Fails(ErrorCode::StreamInterrupted, true, None);
    let busy = || [Reply::error(529, "overloaded_error", "busy")];
    let mut rows = vec![
        row("429", [limited()], fails(RateLimit, 429)),
        row(USAGE_LIMIT, [unified], fails(UsageLimit, 429)),
        row(
            "an error event first, overloaded",
            [Reply::content([event("overloaded_error")])],
            fails(Overloaded, 529),
        ),
        row(
            "text, then an error event, overloaded",
            said("overloaded_error"),
            broken(),
        ),
        row(
            "text, then an error event, api_error",
            said("api_error"),
            broken(),
        ),
        row("529", busy(), fails(Overloaded, 529)),
    ];
    for (reply, status) in [("500", 500), ("503", 503), ("504", 504)] {
        let error = Reply::error(status, "api_error", "x");
        rows.push(row(reply, [error], fails(UpstreamError, status)));
    }
    rows
}

fn account_rows() -> Vec<Row> {
    use ErrorCode::{Auth, Billing, Overloaded};
    let denied = || Reply::error(401, "authentication_error", "OAuth token has expired");
    let busy = Reply::error(529, "overloaded_error", "busy");
    let called = Reply::content([call("read")]);
    let invalid = "invalid_request_error";
    let credit = "Your credit balance is too low to access the API";
    let end = || Outcome::Done(StopReason::EndTurn, "some words");
    vec![
        times(2, row("401, then text", [denied(), text()], end())),
        times(
            2,
            row(
                "401, then a call",
                [denied(), called],
                Outcome::Call(StopReason::ToolUse),
            ),
        ),
        times(
            2,
            row("401, then 529", [denied(), busy], fails(Overloaded, 529)),
        ),
        times(2, row("401 twice", [denied(), denied()], fails(Auth, 401))),
        row(
            "402",
            [Reply::error(402, "billing_error", "pay")],
            fails(Billing, 402),
        ),
        row(
            "400 about the credit balance",
            [Reply::error(400, invalid, credit)],
            fails(Billing, 400),
        ),
    ]
}
