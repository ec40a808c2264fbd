//! Every answer that the service can give, and what the host hears of it: the same in both process modes.
//!
//! The rows are also the table of `docs/protocol/relay-outcomes.md`; `documented` holds the page against them.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use libtest_mimic::Failed;
use serde_json::json;
use turnpass::ErrorCode;
use turnpass::event::{Rejection, StopReason};
use turnpass_lab::scenario::{Body, Cut, CutAt, CutHow, Item, Reply};

use crate::bench::{Answer, Bench, Setup, say};

/// One answer of the service.
struct Row {
    /// In words, for the page.
    reply: &'static str,
    /// What the upstream answers to the first request and to those after it.
    replies: Vec<Reply>,
    outcome: Outcome,
    /// Messages requests that reach the upstream.
    requests: u32,
    /// What a CLI that is passed the answer does, for the page (per request).
    cli: &'static str,
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
}

/// Answers that end well, with tool calls among them.
pub(crate) async fn stops(setup: Setup) {
    run(&setup, stop_rows(), |_, _| {}).await;
}

/// Answers that break off (bug 94).
pub(crate) async fn cuts(setup: Setup) {
    run(&setup, cut_rows(), |_, _| {}).await;
}

/// Requests that the service refuses.
pub(crate) async fn refused(setup: Setup) {
    run(&setup, refused_rows(), |_, _| {}).await;
}

/// A service that fails, is overloaded or limits.
pub(crate) async fn failing(setup: Setup) {
    run(&setup, failing_rows(), |row, answer| {
        let reset = answer.error().resets_at();
        let ahead = reset.and_then(|at| at.duration_since(SystemTime::now()).ok());
        match row.reply {
            USAGE_LIMIT => assert!(ahead.unwrap() > Duration::from_secs(3_000), "{ahead:?}"),
            RETRY_AFTER => assert!(ahead.unwrap() < Duration::from_secs(601), "{ahead:?}"),
            _ => assert_eq!(reset, None),
        }
    })
    .await;
}

/// Sign-in, plan and money (bug 49).
pub(crate) async fn account(setup: Setup) {
    run(&setup, account_rows(), |_, _| {}).await;
}

/// Every row on one transport, each followed by a good generation on it.
async fn run(setup: &Setup, rows: Vec<Row>, check: impl Fn(&Row, &Answer)) {
    let bench = Bench::new(setup);
    let mut wrong = String::new();
    for row in rows {
        for reply in row.replies.clone() {
            bench.up.enqueue(reply);
        }
        let (answer, seen) = bench.ask(say("go on")).await;
        let left = bench.up.replies_left();
        let outcome = judge(&row, &answer, setup.is_warm());
        if let Err(problem) = outcome {
            writeln!(wrong, "{}: {problem}", row.reply).unwrap();
        } else {
            check(&row, &answer);
        }
        if seen.len() != row.requests as usize || left != 0 {
            let (wanted, came) = (row.requests, seen.len());
            writeln!(
                wrong,
                "{}: {came} requests instead of {wanted}, {left} replies left",
                row.reply
            )
            .unwrap();
        }
        // A process per request starts afresh anyway, so there the next row is the next generation.
        if setup.is_warm() {
            let (next, seen) = bench.ask(say("[[say still here]]")).await;
            if next.end.is_err() || next.text() != "still here" || seen.len() != 1 {
                writeln!(wrong, "{}: the next generation: {next:?}", row.reply).unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
    bench.finish().await;
}

fn judge(row: &Row, answer: &Answer, warm: bool) -> Result<(), String> {
    let wrong = || Err(format!("{:?} after {:?}", answer.end, answer.events));
    let (calls, rejected) = (answer.calls(), answer.rejected());
    if let Outcome::Fails(code, seen, status) = row.outcome {
        let Err(error) = &answer.end else {
            return wrong();
        };
        let same = (error.code(), error.output_seen(), error.status()) == (code, seen, status);
        let released = !calls.is_empty() || !rejected.is_empty();
        return if same && !released { Ok(()) } else { wrong() };
    }
    let Ok(done) = &answer.end else {
        return wrong();
    };
    if done.upstream_requests != row.requests || !done.laboratory {
        return wrong();
    }
    let good = match &row.outcome {
        Outcome::Done(stop, text) => {
            (&done.stop, done.message.text().as_str()) == (stop, text)
                && answer.text() == *text
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
            let kind = rejected.first().map(|(_, reason)| match reason {
                Rejection::UnknownTool => "unknown_tool",
                Rejection::ArgumentDecode { .. } => "argument_decode",
            });
            done.stop == *stop && calls.is_empty() && rejected.len() == 1 && kind == Some(why)
        }
        Outcome::Fails(..) => false,
    };
    // A kept process is answered in the service's place, so it never has a reason to ask again.
    let again = row.cli.contains(ASKS_AGAIN) && !warm;
    let told = answer.refused().is_some();
    if good && again == told {
        Ok(())
    } else {
        wrong()
    }
}

const ASKS_AGAIN: &str = "asks again (refused)";
const ENDS_WELL: &str = "exit 0, `success`";
const MAX_TURNS: &str = "exit 1, `error_max_turns`";
const FAILS: &str = "exit 1, `api_error`";
const FAILS_AGAIN: &str = "asks again (refused); exit 1";
const EMPTY_AGAIN: &str = "asks again (refused) for visible output; exit 1";

fn row(
    reply: &'static str,
    replies: impl IntoIterator<Item = Reply>,
    outcome: Outcome,
    cli: &'static str,
) -> Row {
    Row {
        reply,
        replies: replies.into_iter().collect(),
        outcome,
        requests: 1,
        cli,
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

fn refusal() -> StopReason {
    StopReason::Refusal {
        category: None,
        explanation: None,
    }
}

fn stop_rows() -> Vec<Row> {
    use Outcome::{Call, Done, Rejected};
    let sequence = StopReason::StopSequence {
        sequence: Some("END".into()),
    };
    let details = json!({"type": "refusal", "category": "cyber", "explanation": "not this"});
    let detailed = StopReason::Refusal {
        category: Some("cyber".into()),
        explanation: Some("not this".into()),
    };
    let other = StopReason::Other {
        word: "brand_new".into(),
    };
    let end = StopReason::EndTurn;
    let said = |stop| Done(stop, "some words");
    vec![
        row("text, `end_turn`", [text()], said(end.clone()), ENDS_WELL),
        row(
            "text, `stop_sequence`",
            [Reply {
                stop_sequence: Some("END".into()),
                ..stopped("stop_sequence")
            }],
            said(sequence),
            ENDS_WELL,
        ),
        row(
            "text, `pause_turn`",
            [stopped("pause_turn")],
            said(StopReason::PauseTurn),
            ENDS_WELL,
        ),
        row(
            "text, a stop reason that is new",
            [stopped("brand_new")],
            said(other),
            ENDS_WELL,
        ),
        row(
            "text, `max_tokens`",
            [stopped("max_tokens")],
            said(StopReason::MaxTokens),
            FAILS_AGAIN,
        ),
        row(
            "text, `model_context_window_exceeded`",
            [stopped("model_context_window_exceeded")],
            said(StopReason::ContextWindowExceeded),
            FAILS_AGAIN,
        ),
        row(
            "text, `refusal`",
            [stopped("refusal")],
            said(refusal()),
            FAILS,
        ),
        row(
            "text, `refusal` with `stop_details`",
            [Reply {
                stop_details: Some(details),
                ..stopped("refusal")
            }],
            said(detailed),
            FAILS,
        ),
        row(
            "no content",
            [Reply::content([])],
            Done(end.clone(), ""),
            EMPTY_AGAIN,
        ),
        row(
            "an empty text",
            [Reply::text("")],
            Done(end.clone(), ""),
            EMPTY_AGAIN,
        ),
        row(
            "thinking alone",
            [Reply::content([Item::thinking("hm")])],
            Done(end.clone(), ""),
            EMPTY_AGAIN,
        ),
        row(
            "a call of a host tool",
            [Reply::content([Item::text("so"), call("read")])],
            Call(StopReason::ToolUse),
            MAX_TURNS,
        ),
        row(
            "a call without arguments (bug 119)",
            [Reply::content([raw_call("")])],
            Call(StopReason::ToolUse),
            MAX_TURNS,
        ),
        row(
            "a call, `end_turn`",
            [Reply {
                stop_reason: Some(Some("end_turn".into())),
                ..Reply::content([call("read")])
            }],
            Call(end),
            MAX_TURNS,
        ),
        row(
            "a call of a tool that is not the host's (bug 68)",
            [Reply::content([call("Bash")])],
            Rejected(StopReason::ToolUse, "unknown_tool"),
            MAX_TURNS,
        ),
        row(
            "a call with input that does not parse",
            [Reply::content([raw_call("{\"path\": \"a")])],
            Rejected(StopReason::ToolUse, "argument_decode"),
            MAX_TURNS,
        ),
        row(
            "a call cut by `max_tokens`",
            [Reply {
                stop_reason: Some(Some("max_tokens".into())),
                ..Reply::content([raw_call("{\"path\": \"a")])
            }],
            Rejected(StopReason::MaxTokens, "argument_decode"),
            MAX_TURNS,
        ),
    ]
}

fn cut_rows() -> Vec<Row> {
    use ErrorCode::{ProtocolOrder, StreamInterrupted, UpstreamUnreachable};
    let cut = |reply: Reply, at, how| {
        [Reply {
            cut: Some(Cut { at, how }),
            ..reply
        }]
    };
    let broken = |seen| Outcome::Fails(StreamInterrupted, seen, None);
    let called = || Reply::content([Item::text("so"), call("read")]);
    let json = json!({
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "x"}], "usage": {"input_tokens": 1, "output_tokens": 1},
    });
    let body = |body| Reply {
        body: Some(body),
        ..Reply::default()
    };
    vec![
        row(
            "text, no `message_stop`",
            cut(text(), CutAt::BeforeMessageStop, CutHow::End),
            broken(true),
            ENDS_WELL,
        ),
        row(
            "text, no `message_delta`",
            cut(text(), CutAt::BeforeMessageDelta, CutHow::End),
            broken(true),
            FAILS_AGAIN,
        ),
        row(
            "text that ends inside its block",
            cut(text(), CutAt::MidBlock, CutHow::End),
            broken(true),
            FAILS,
        ),
        row(
            "text, then the connection closes",
            cut(text(), CutAt::MidBlock, CutHow::Close),
            broken(true),
            FAILS,
        ),
        row(
            "text, then a reset",
            cut(text(), CutAt::MidBlock, CutHow::Rst),
            broken(true),
            FAILS,
        ),
        row(
            "a whole call, no `message_delta`",
            cut(called(), CutAt::BeforeMessageDelta, CutHow::End),
            broken(true),
            MAX_TURNS,
        ),
        row(
            "a whole call, no `message_stop`",
            cut(called(), CutAt::BeforeMessageStop, CutHow::End),
            broken(true),
            MAX_TURNS,
        ),
        row(
            "a call that ends inside its input",
            cut(called(), CutAt::MidBlock, CutHow::Close),
            broken(true),
            FAILS,
        ),
        row(
            "`message_start` alone",
            cut(text(), CutAt::Event(1), CutHow::End),
            broken(false),
            FAILS,
        ),
        row(
            "an event stream without events",
            [Reply {
                headers: [("content-type".to_owned(), "text/event-stream".to_owned())].into(),
                ..body(Body::Text(String::new()))
            }],
            broken(false),
            FAILS,
        ),
        row(
            "a message in JSON, status 200",
            [body(Body::Json(json))],
            broken(false),
            FAILS,
        ),
        row(
            "text, `stop_reason` null (bug 115)",
            [Reply {
                stop_reason: Some(None),
                ..text()
            }],
            Outcome::Fails(ProtocolOrder, true, None),
            "exit 1",
        ),
        row(
            "the connection closes before any answer",
            cut(text(), CutAt::BeforeHead, CutHow::Close),
            Outcome::Fails(UpstreamUnreachable, false, None),
            FAILS,
        ),
        row(
            "a reset before any answer",
            cut(text(), CutAt::BeforeHead, CutHow::Rst),
            Outcome::Fails(UpstreamUnreachable, false, None),
            FAILS,
        ),
    ]
}

fn error(status: u16, kind: &str, message: &str) -> [Reply; 1] {
    [Reply::error(status, kind, message)]
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
    let strips = "310, 332: asks again (refused) without its extras; exit 1";
    vec![
        row(
            "400",
            error(400, invalid, "messages.1: bad"),
            fails(UpstreamRejected, 400),
            strips,
        ),
        row(
            "422",
            error(422, invalid, "bad"),
            fails(UpstreamRejected, 422),
            strips,
        ),
        row(
            "400 \"prompt is too long\"",
            error(
                400,
                invalid,
                "prompt is too long: 250000 tokens > 200000 maximum",
            ),
            fails(ContextLengthExceeded, 400),
            "exit 1, `prompt_too_long`",
        ),
        row(
            "403",
            error(403, "permission_error", "no"),
            fails(Forbidden, 403),
            FAILS,
        ),
        row(
            "404",
            error(404, "not_found_error", "model: x"),
            fails(ModelNotFound, 404),
            FAILS_AGAIN,
        ),
        row(
            "408",
            error(408, "timeout_error", "late"),
            fails(UpstreamError, 408),
            FAILS,
        ),
        row(
            "409",
            error(409, "conflict_error", "busy"),
            fails(UpstreamError, 409),
            FAILS,
        ),
        row(
            "410",
            error(410, invalid, "gone"),
            fails(UpstreamRejected, 410),
            FAILS,
        ),
        row(
            "413",
            error(413, "request_too_large", "large"),
            fails(HistoryTooLarge, 413),
            "exit 1, `image_error`",
        ),
        row(
            "418",
            error(418, invalid, "teapot"),
            fails(UpstreamRejected, 418),
            FAILS,
        ),
        row(
            "307 to another address",
            [Reply {
                headers: [(
                    "location".to_owned(),
                    "http://127.0.0.1:9/elsewhere".to_owned(),
                )]
                .into(),
                ..Reply::error(307, invalid, "elsewhere")
            }],
            fails(UpstreamRejected, 307),
            FAILS,
        ),
    ]
}

const USAGE_LIMIT: &str = "429, unified status `rejected`, with its reset";
const RETRY_AFTER: &str = "429 with `retry-after`";

fn failing_rows() -> Vec<Row> {
    use ErrorCode::{Overloaded, RateLimit, UpstreamError, UsageLimit};
    let limited = || Reply::error(429, "rate_limit_error", "slow down");
    let with = |reply: Reply, headers: &[(&str, String)]| {
        let owned = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()));
        [Reply {
            headers: owned.collect(),
            ..reply
        }]
    };
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
    let event = |error: &str| Item::Error {
        error: error.to_owned(),
        message: None,
    };
    let mut rows = vec![
        row("429", [limited()], fails(RateLimit, 429), FAILS),
        row(
            RETRY_AFTER,
            with(limited(), &[("retry-after", "600".into())]),
            fails(RateLimit, 429),
            FAILS,
        ),
        row(
            USAGE_LIMIT,
            with(limited(), &unified),
            fails(UsageLimit, 429),
            FAILS,
        ),
        row(
            "429 with `x-should-retry: true`",
            with(limited(), &[("x-should-retry", "true".into())]),
            fails(RateLimit, 429),
            FAILS,
        ),
        row(
            "503 with `x-should-retry: true`",
            with(
                Reply::error(503, "api_error", "x"),
                &[("x-should-retry", "true".into())],
            ),
            fails(UpstreamError, 503),
            FAILS,
        ),
        row(
            "an `error` event first, overloaded",
            [Reply::content([event("overloaded_error")])],
            fails(Overloaded, 529),
            FAILS,
        ),
        row(
            "text, then an `error` event, overloaded",
            [Reply::content([
                Item::text("some words"),
                event("overloaded_error"),
            ])],
            Outcome::Fails(Overloaded, true, Some(529)),
            FAILS,
        ),
        row(
            "text, then an `error` event, `api_error`",
            [Reply::content([
                Item::text("some words"),
                event("api_error"),
            ])],
            Outcome::Fails(UpstreamError, true, Some(500)),
            FAILS,
        ),
        row(
            "529",
            error(529, "overloaded_error", "busy"),
            fails(Overloaded, 529),
            FAILS,
        ),
    ];
    for (reply, status) in [("500", 500), ("502", 502), ("503", 503), ("504", 504)] {
        rows.push(row(
            reply,
            error(status, "api_error", "x"),
            fails(UpstreamError, status),
            FAILS,
        ));
    }
    rows
}

fn account_rows() -> Vec<Row> {
    use ErrorCode::{Auth, Billing};
    let renewed = "renews its sign-in and sends the same request once more";
    let denied = || Reply::error(401, "authentication_error", "OAuth token has expired");
    let twice = |replies: [Reply; 2], outcome| Row {
        requests: 2,
        ..row("", replies, outcome, renewed)
    };
    vec![
        Row {
            reply: "401, then text",
            ..twice(
                [denied(), text()],
                Outcome::Done(StopReason::EndTurn, "some words"),
            )
        },
        Row {
            reply: "401, then a call",
            ..twice(
                [denied(), Reply::content([call("read")])],
                Outcome::Call(StopReason::ToolUse),
            )
        },
        Row {
            reply: "401 twice",
            ..twice([denied(), denied()], fails(Auth, 401))
        },
        Row {
            reply: "401, then 529",
            ..twice(
                [denied(), Reply::error(529, "overloaded_error", "busy")],
                fails(ErrorCode::Overloaded, 529),
            )
        },
        row(
            "403 \"OAuth token has been revoked\"",
            error(403, "permission_error", "OAuth token has been revoked."),
            fails(Auth, 403),
            FAILS_AGAIN,
        ),
        row(
            "400 about the credit balance",
            error(
                400,
                "invalid_request_error",
                "Your credit balance is too low to access the API",
            ),
            fails(Billing, 400),
            "exit 1, `billing_error`",
        ),
        row(
            "402",
            error(402, "billing_error", "pay"),
            fails(Billing, 402),
            FAILS,
        ),
    ]
}

/// The page has exactly these rows. With TURNPASS_BLESS set it is written.
pub(crate) fn documented() -> Result<(), Failed> {
    let groups = [
        ("Answers that end well", stop_rows()),
        ("Answers that break off", cut_rows()),
        ("Refused requests", refused_rows()),
        ("A service that fails or limits", failing_rows()),
        ("Sign-in, plan and money", account_rows()),
    ];
    let mut table = String::new();
    for (title, rows) in groups {
        write!(
            table,
            "\n## {title}\n\n| the service answers | the host hears | upstream requests | a CLI that reads it (per request) |\n\
             | --- | --- | --- | --- |\n"
        )?;
        for row in rows {
            let Row {
                reply,
                outcome,
                requests,
                cli,
                ..
            } = row;
            writeln!(
                table,
                "| {reply} | {} | {requests} | {cli} |",
                words(&outcome)
            )?;
        }
    }
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/protocol/relay-outcomes.md"
    );
    let page = std::fs::read_to_string(path)?;
    let (head, rest) = page.split_once(BEGIN).ok_or("the page has no table")?;
    let (_, tail) = rest.split_once(END).ok_or("the page's table has no end")?;
    let wanted = format!("{head}{BEGIN}\n{table}\n{END}{tail}");
    if page != wanted && std::env::var_os("TURNPASS_BLESS").is_some() {
        std::fs::write(path, &wanted)?;
    } else if page != wanted {
        return Err(
            "docs/protocol/relay-outcomes.md is out of date: run with TURNPASS_BLESS=1".into(),
        );
    }
    Ok(())
}

const BEGIN: &str = "<!-- table: written by the suite relay_real -->";
const END: &str = "<!-- end of table -->";

fn words(outcome: &Outcome) -> String {
    let stop = |stop: &StopReason| {
        let value = serde_json::to_value(stop).unwrap();
        value["reason"].as_str().unwrap().to_owned()
    };
    match outcome {
        Outcome::Done(reason, "") => format!("`Done` {}, empty", stop(reason)),
        Outcome::Done(reason, _) => format!("text, `Done` {}", stop(reason)),
        Outcome::Call(reason) => format!("`ToolCall`, `Done` {}", stop(reason)),
        Outcome::Rejected(reason, why) => format!("`ToolRejected` {why}, `Done` {}", stop(reason)),
        Outcome::Fails(code, true, _) => format!("text so far, then `{code}`"),
        Outcome::Fails(code, false, _) => format!("`{code}`"),
    }
}
