//! `read`: the text of a file.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use super::{
    Effect, Failure, HostTool, Scene, declared, field, on_files, one_line, only_target, parse,
};
use crate::directory::{Directory, Target};
use crate::output::RESULT_BYTES;

/// Room for the note about what is left out, in bytes.
const NOTE_BYTES: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    path: PathBuf,
    #[serde(default = "first_line")]
    first_line: u64,
    lines: Option<u64>,
}

fn first_line() -> u64 {
    1
}

/// The `read` tool.
#[derive(Clone, Copy, Debug)]
pub struct Read;

impl HostTool for Read {
    fn declaration(&self) -> Tool {
        declared(
            "read",
            "Gives the text of a file, or some of its lines. Long files are cut, with a note that says how to go on.",
            json!({
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "The file."},
                    "first_line": {"type": "integer", "minimum": 1, "description": "Where to begin; 1 by default."},
                    "lines": {"type": "integer", "minimum": 1, "description": "How many lines; all by default."}
                },
                "required": ["path"],
                "additionalProperties": false
            }),
        )
    }

    fn effect(&self) -> Effect {
        Effect::Read
    }

    fn paths(&self, input: &ToolInput) -> Result<Vec<PathBuf>, Failure> {
        Ok(vec![parse::<Input>(input)?.path])
    }

    fn summary(&self, input: &ToolInput) -> String {
        one_line(&field(input, "path"))
    }

    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        Box::pin(async move {
            let input: Input = parse(&input)?;
            let target = only_target(&scene)?;
            let cancel = scene.cancel.clone();
            on_files(cancel.clone(), move || {
                lines_of(&scene.directory, &target, &input, &cancel)
            })
            .await
        })
    }
}

/// The asked lines, as many as fit a result.
fn lines_of(
    directory: &Directory,
    target: &Target,
    input: &Input,
    cancel: &CancellationToken,
) -> Result<String, Failure> {
    let mut file = BufReader::new(directory.open_file(target)?);
    let start = file.fill_buf().map_err(|error| target.failed(&error))?;
    if start.contains(&0) {
        return Err(Failure::new(format!("{}: not a text", target.shown())));
    }
    let first = input.first_line.max(1);
    let end = input
        .lines
        .map_or(u64::MAX, |lines| first.saturating_add(lines));
    let room = RESULT_BYTES - NOTE_BYTES;
    let mut kept = Vec::new();
    let mut number = 1;
    while number < end && !cancel.is_cancelled() {
        let wanted = number >= first;
        let left = room - kept.len();
        let mut line = Vec::new();
        let whole = next_line(
            &mut file,
            if wanted {
                Some((&mut line, left))
            } else {
                None
            },
        )
        .map_err(|error| target.failed(&error))?;
        match whole {
            Line::End => break,
            Line::Whole if wanted => kept.extend(line),
            Line::Whole => {}
            Line::TooLong => {
                let note = if kept.is_empty() {
                    // One line that is larger than a result: its beginning is better than nothing.
                    kept = line;
                    format!("[cut here: line {number} is longer than a result may be]")
                } else {
                    format!("[cut here: go on with first_line {number}]")
                };
                return Ok(text_of(kept, Some(&note)));
            }
        }
        number += 1;
    }
    if kept.is_empty() && first > 1 {
        return Err(Failure::new(format!(
            "{}: has {} lines",
            target.shown(),
            number - 1
        )));
    }
    Ok(text_of(kept, None))
}

enum Line {
    Whole,
    TooLong,
    End,
}

/// Reads one line with its end into the buffer, up to a number of bytes; without a buffer the line is passed over.
fn next_line(
    file: &mut impl BufRead,
    mut keep: Option<(&mut Vec<u8>, usize)>,
) -> std::io::Result<Line> {
    let mut any = false;
    loop {
        let chunk = file.fill_buf()?;
        if chunk.is_empty() {
            return Ok(if any { Line::Whole } else { Line::End });
        }
        any = true;
        let end = chunk.iter().position(|byte| *byte == b'\n');
        let part = &chunk[..end.map_or(chunk.len(), |end| end + 1)];
        if let Some((line, room)) = &mut keep {
            if line.len() + part.len() > *room {
                line.extend_from_slice(&part[..*room - line.len()]);
                return Ok(Line::TooLong);
            }
            line.extend_from_slice(part);
        }
        let used = part.len();
        file.consume(used);
        if end.is_some() {
            return Ok(Line::Whole);
        }
    }
}

fn text_of(bytes: Vec<u8>, note: Option<&str>) -> String {
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    if let Some(note) = note {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(note);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::testing::Bench;

    #[tokio::test]
    async fn gives_the_text_or_some_lines() {
        let bench = Bench::new(&[("f", b"one\ntwo\r\nthree"), ("empty", b"")]);
        for (input, text) in [
            (json!({"path":"f"}), "one\ntwo\r\nthree"),
            (json!({"path":"f","first_line":2,"lines":1}), "two\r\n"),
            (json!({"path":"f","first_line":3,"lines":9}), "three"),
            (json!({"path":"empty"}), ""),
        ] {
            assert_eq!(bench.call(&Read, input).await.unwrap(), text);
        }
        let error = bench.call(&Read, json!({"path":"f","first_line":9})).await;
        assert_eq!(error.unwrap_err().to_string(), "f: has 3 lines");
    }

    #[tokio::test]
    async fn a_long_file_can_be_read_in_pieces_without_a_gap() {
        let whole: String = (0..20_000).map(|n| format!("line {n}\n")).collect();
        let bench = Bench::new(&[("f", whole.as_bytes())]);
        let (mut text, mut first) = (String::new(), 1);
        loop {
            let input = json!({"path":"f","first_line":first});
            let piece = bench.call(&Read, input).await.unwrap();
            assert!(piece.len() <= RESULT_BYTES);
            let Some((lines, note)) = piece.split_once("[cut here: go on with first_line ") else {
                text.push_str(&piece);
                break;
            };
            text.push_str(lines);
            first = note.trim_end_matches(']').parse().unwrap();
        }
        assert_eq!(text, whole);
    }

    #[tokio::test]
    async fn one_line_larger_than_a_result_is_cut() {
        let bench = Bench::new(&[("f", "ü".repeat(RESULT_BYTES).as_bytes())]);
        let text = bench.call(&Read, json!({"path":"f"})).await.unwrap();
        assert!(text.len() <= RESULT_BYTES + 8 && text.contains("line 1 is longer"));
    }

    #[tokio::test]
    async fn what_is_no_text_is_said() {
        let bench = Bench::new(&[("bin", b"\x7fELF\0\0"), ("latin", b"caf\xe9")]);
        bench.call(&Read, json!({"path":"bin"})).await.unwrap_err();
        bench.call(&Read, json!({"path":"none"})).await.unwrap_err();
        bench.call(&Read, json!({"path":"."})).await.unwrap_err();
        let text = bench.call(&Read, json!({"path":"latin"})).await.unwrap();
        assert_eq!(text, "caf\u{fffd}");
    }
}
