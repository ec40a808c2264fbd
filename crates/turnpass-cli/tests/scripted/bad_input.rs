//! What is wrong with a request or a machine is told before anything is spent: the CLI was not started for it (or asked
//! for its version and sign-in only), and the service saw nothing.

use serde_json::json;
use turnpass::ErrorCode;
use turnpass::Request;
use turnpass::conversation::Message;
use turnpass::request::{BackendState, Effort, ToolChoice};

use crate::stage::{ROWS, Stage, ask, ask_with_tools, told, tool};

type Change = fn(&mut Request);

#[tokio::test]
async fn a_request_that_cannot_be_sent_starts_nothing() {
    let cases: Vec<(&str, Change, ErrorCode)> = vec![
        (
            "an empty model",
            |r| r.model.0.clear(),
            ErrorCode::RequestInvalid,
        ),
        (
            "a model like an option",
            |r| r.model = "--help".into(),
            ErrorCode::RequestInvalid,
        ),
        (
            "a model with a blank",
            |r| r.model = "claude sonnet".into(),
            ErrorCode::RequestInvalid,
        ),
        (
            "a long model",
            |r| r.model = "m".repeat(5_000).into(),
            ErrorCode::RequestInvalid,
        ),
        (
            "NUL in the model",
            |r| r.model = "son\0net".into(),
            ErrorCode::RequestInvalid,
        ),
        (
            "NUL in the session",
            |r| r.session.0.push('\0'),
            ErrorCode::RequestInvalid,
        ),
        (
            "NUL in a tool's name",
            |r| r.tools.push(tool("a\0b")),
            ErrorCode::ToolInvalid,
        ),
        (
            "an empty tool name",
            |r| r.tools.push(tool("")),
            ErrorCode::ToolInvalid,
        ),
        (
            "a tool twice",
            |r| r.tools = vec![tool("a"), tool("a")],
            ErrorCode::ToolInvalid,
        ),
        (
            "a schema that is none",
            |r| r.tools[0].input_schema = json!("string"),
            ErrorCode::ToolInvalid,
        ),
        (
            "a schema of a list",
            |r| r.tools[0].input_schema = json!({"type": "array", "items": {}}),
            ErrorCode::ToolInvalid,
        ),
        (
            "too many tools",
            |r| r.tools = (0..5_000).map(|at| tool(&format!("t{at}"))).collect(),
            ErrorCode::ToolLimit,
        ),
        (
            "too large tools",
            |r| r.tools[0].description = "d".repeat(4_000_000),
            ErrorCode::ToolCatalogSize,
        ),
        (
            "an effort that the model lacks",
            |r| {
                r.model = "claude-haiku-4-5".into();
                r.effort = Some(Effort::Max);
            },
            ErrorCode::EffortUnsupported,
        ),
        (
            "no messages",
            |r| r.messages.clear(),
            ErrorCode::RequestInvalid,
        ),
        (
            "9 MiB of history",
            |r| r.messages.insert(0, Message::user("x".repeat(9 << 20))),
            ErrorCode::HistoryTooLarge,
        ),
        (
            "more than the context",
            |r| {
                r.messages
                    .insert(0, Message::user("word ".repeat(1_200_000)))
            },
            ErrorCode::ContextLengthExceeded,
        ),
        (
            "state of another transport",
            |r| r.state = Some(BackendState("{}".into())),
            ErrorCode::RequestInvalid,
        ),
        (
            "no tokens",
            |r| r.sampling.max_tokens = Some(0),
            ErrorCode::RequestInvalid,
        ),
        (
            "a choice without tools",
            |r| {
                r.tools.clear();
                r.sampling.tool_choice = Some(ToolChoice::None);
            },
            ErrorCode::RequestInvalid,
        ),
        (
            "a choice of no tool",
            |r| {
                r.sampling.tool_choice = Some(ToolChoice::Tool {
                    name: "no".into(),
                    disable_parallel_tool_use: false,
                })
            },
            ErrorCode::RequestInvalid,
        ),
        (
            "no time",
            |r| r.limits.idle = std::time::Duration::ZERO,
            ErrorCode::RequestInvalid,
        ),
        (
            "a directory that is not there",
            |r| r.place.directory = Some("/no/such/directory".into()),
            ErrorCode::WorkingDirectory,
        ),
        (
            "a file as directory",
            |r| r.place.directory = Some("/etc/hostname".into()),
            ErrorCode::WorkingDirectory,
        ),
        (
            "a relative directory",
            |r| r.place.directory = Some("src".into()),
            ErrorCode::WorkingDirectory,
        ),
    ];
    for row in ROWS {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        for (what, change, code) in &cases {
            let mut request = ask_with_tools("x");
            change(&mut request);
            let heard = told(&provider, request).await;
            let error = heard.error();
            // Nine MiB are more than the context as well; either says that the conversation has to become shorter.
            let either = error.is_context_overflow()
                && matches!(
                    code,
                    ErrorCode::HistoryTooLarge | ErrorCode::ContextLengthExceeded
                );
            assert!(error.code() == *code || either, "{row:?}, {what}: {error}");
            assert!(!error.is_retryable(), "{what}");
            assert!(
                stage.recording().runs.is_empty(),
                "{row:?}, {what}: the CLI was started"
            );
        }
        assert!(stage.upstream.requests().is_empty());
        assert_eq!(told(&provider, ask("[[say fine]]")).await.text(), "fine");
    }
}

#[tokio::test]
async fn bug_028_a_nul_in_a_name_is_refused_before_any_start() {
    let cases: [(Change, ErrorCode); 4] = [
        (|r| r.model = "son\0net".into(), ErrorCode::RequestInvalid),
        (|r| r.session.0.push('\0'), ErrorCode::RequestInvalid),
        (|r| r.tools.push(tool("a\0b")), ErrorCode::ToolInvalid),
        (
            |r| r.place.time_zone = Some("UTC\0".into()),
            ErrorCode::RequestInvalid,
        ),
    ];
    for row in ROWS {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        for (change, code) in cases {
            let mut request = ask_with_tools("x");
            change(&mut request);
            told(&provider, request).await.failed(code);
        }
        assert!(stage.recording().runs.is_empty() && stage.upstream.requests().is_empty());
    }
}
