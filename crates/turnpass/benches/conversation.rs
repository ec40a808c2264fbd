//! Normalising and encoding: what every request pays before anything is sent.

#![allow(
    clippy::expect_used,
    reason = "a bench that cannot set up its data has nothing to measure"
)]

use divan::{Bencher, black_box};
use turnpass::conversation::encode::{Marks, Ttl, encode};
use turnpass::conversation::{
    Block, Message, NormaliseOptions, Role, SignedThinking, ToolCall, ToolInput, ToolResult,
    ToolUseId, normalise,
};
use turnpass::request::Tool;
use turnpass::tools::Catalogue;

fn main() {
    divan::main();
}

/// Source code, as tools return it: quotes and line ends to be escaped.
fn code(bytes: usize) -> String {
    const LINE: &str = "    let value = map.get(\"key\").map_or(0, |v| v.len() + 1); // größer\n";
    let mut text = LINE.repeat(bytes / LINE.len() + 1);
    text.truncate(text.floor_char_boundary(bytes));
    text
}

/// Turns of thinking, words, one call and its result, of about so many bytes in all.
fn history(turns: usize, bytes: usize) -> Vec<Message> {
    let each = bytes / turns;
    let mut history = vec![Message::user("Please look at the code.")];
    for turn in 0..turns {
        let id = ToolUseId(format!("toolu_{turn:024}"));
        history.push(Message {
            role: Role::Assistant,
            content: vec![
                Block::Thinking(SignedThinking {
                    thinking: String::new(),
                    signature: "A".repeat(each / 8),
                }),
                Block::text("Let me see."),
                Block::ToolUse(ToolCall {
                    id: id.clone(),
                    name: "read".into(),
                    input: ToolInput::empty(),
                }),
            ],
        });
        history.push(Message::results([ToolResult::text(
            id,
            code(each - each / 8),
        )]));
    }
    history
}

fn run(bencher: Bencher<'_, '_>, history: &[Message]) {
    bencher.bench_local(|| {
        let normalised =
            normalise(black_box(history), &NormaliseOptions::default()).expect("valid");
        encode(&normalised, Marks::two(Ttl::OneHour))
            .expect("fits")
            .bytes
            .len()
    });
}

#[divan::bench]
fn twenty_turns_40_kb(bencher: Bencher<'_, '_>) {
    run(bencher, &history(20, 40_000));
}

#[divan::bench]
fn two_hundred_turns_7_mib(bencher: Bencher<'_, '_>) {
    run(bencher, &history(200, 7 * 1024 * 1024));
}

#[divan::bench]
fn twenty_turns_normalise_only(bencher: Bencher<'_, '_>) {
    let history = history(20, 40_000);
    bencher.bench_local(|| {
        normalise(black_box(&history), &NormaliseOptions::default())
            .expect("valid")
            .messages
            .len()
    });
}

#[divan::bench]
fn forty_tools(bencher: Bencher<'_, '_>) {
    let tools: Vec<Tool> = (0..40)
        .map(|n| Tool {
            name: format!("tool.{n}"),
            description: "d".repeat(400),
            input_schema: serde_json::json!({"type": "object", "properties": {
                "path": {"type": "string", "description": "where"}, "n": {"type": "integer"},
            }, "required": ["path"]}),
        })
        .collect();
    bencher.bench_local(|| Catalogue::build(black_box(&tools)).expect("valid").digest());
}
