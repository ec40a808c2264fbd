//! `edit`: one passage of a file, found by its exact text.

use std::io::Read;
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::json;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use super::{
    Effect, Failure, HostTool, Scene, declared, field, on_files, one_line, only_target, parse,
};
use crate::directory::{Directory, Target};

/// Largest file that is edited, in bytes: it is held in memory twice.
const EDIT_FILE_BYTES: u64 = 8 * 1024 * 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    path: PathBuf,
    old: String,
    new: String,
}

/// The `edit` tool.
#[derive(Clone, Copy, Debug)]
pub struct Edit;

impl HostTool for Edit {
    fn declaration(&self) -> Tool {
        declared(
            "edit",
            "Replaces one passage of a file. The old text has to stand in the file exactly once, to the last space; \
             take in enough of the lines around it.",
            json!({
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "The file."},
                    "old": {"type": "string", "description": "The passage as it stands in the file."},
                    "new": {"type": "string", "description": "What takes its place."}
                },
                "required": ["path", "old", "new"],
                "additionalProperties": false
            }),
        )
    }

    fn effect(&self) -> Effect {
        Effect::Change
    }

    fn paths(&self, input: &ToolInput) -> Result<Vec<PathBuf>, Failure> {
        Ok(vec![parse::<Input>(input)?.path])
    }

    fn summary(&self, input: &ToolInput) -> String {
        one_line(&field(input, "path"))
    }

    fn detail(&self, input: &ToolInput) -> String {
        let with = |sign: &str, name: &str| -> String {
            let text = field(input, name);
            text.lines().map(|line| format!("{sign}{line}\n")).collect()
        };
        with("-", "old") + &with("+", "new")
    }

    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        Box::pin(async move {
            let input: Input = parse(&input)?;
            let target = only_target(&scene)?;
            on_files(scene.cancel.clone(), move || {
                let before = text_of(&scene.directory, &target)?;
                let (after, line) = edited(&before, &input.old, &input.new)
                    .map_err(|said| Failure::new(format!("{}: {said}", target.shown())))?;
                scene.directory.replace(&target, after.as_bytes())?;
                Ok(format!("edited {} at line {line}", target.shown()))
            })
            .await
        })
    }
}

fn text_of(directory: &Directory, target: &Target) -> Result<String, Failure> {
    let file = directory.open_file(target)?;
    let mut bytes = Vec::new();
    file.take(EDIT_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| target.failed(&error))?;
    if bytes.len() as u64 > EDIT_FILE_BYTES {
        return Err(Failure::new(format!(
            "{}: larger than {EDIT_FILE_BYTES} bytes",
            target.shown()
        )));
    }
    String::from_utf8(bytes)
        .map_err(|_| Failure::new(format!("{}: not UTF-8, so not edited", target.shown())))
}

/// The new text, and the line at which it changed.
fn edited(text: &str, old: &str, new: &str) -> Result<(String, usize), String> {
    if old.is_empty() {
        return Err("the old text is empty; use write for a new file".to_owned());
    }
    if old == new {
        return Err("the old and the new text are the same".to_owned());
    }
    let Some(at) = text.find(old) else {
        return Err(not_found(text, old));
    };
    // Passages that overlap count as well: which of them is meant cannot be told.
    let after_first = at + text[at..].chars().next().map_or(1, char::len_utf8);
    if text[after_first..].contains(old) {
        let count = text.matches(old).count().max(2);
        return Err(format!(
            "the old text stands there {count} times; take in more of the lines around it"
        ));
    }
    let line = text[..at].matches('\n').count() + 1;
    Ok((text.replacen(old, new, 1), line))
}

fn not_found(text: &str, old: &str) -> String {
    let mut said = "the old text does not stand there".to_owned();
    if text.contains("\r\n") && text.replace("\r\n", "\n").contains(old) {
        said.push_str("; the lines of this file end in CR LF");
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::testing::Bench;

    #[test]
    fn only_an_exact_and_unique_passage_is_replaced() {
        assert_eq!(edited("a\nb b\nc", "b\nc", "X"), Ok(("a\nb X".into(), 2)));
        assert_eq!(edited("éé x", "x", ""), Ok(("éé ".into(), 1)));
        for (text, old, new, said) in [
            ("a b a", "a", "c", "2 times"),
            ("aaa", "aa", "b", "2 times"),
            ("ééé", "éé", "b", "2 times"),
            ("abc", "x", "y", "does not stand"),
            ("abc", "ABC", "y", "does not stand"),
            ("a\r\nb", "a\nb", "y", "CR LF"),
            ("abc", "", "y", "empty"),
            ("abc", "b", "b", "the same"),
        ] {
            let error = edited(text, old, new).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    #[tokio::test]
    async fn edits_the_file_or_leaves_it() {
        let bench = Bench::new(&[("f", b"let x = 1;\nlet y = 1;\n"), ("latin", b"caf\xe9 x")]);
        let input = json!({"path":"f","old":"y = 1","new":"y = 2"});
        assert_eq!(
            bench.call(&Edit, input).await.unwrap(),
            "edited f at line 2"
        );
        assert_eq!(bench.content("f"), "let x = 1;\nlet y = 2;\n");
        let input = json!({"path":"f","old":"let","new":"var"});
        bench.call(&Edit, input).await.unwrap_err();
        assert_eq!(bench.content("f"), "let x = 1;\nlet y = 2;\n");
        let input = json!({"path":"latin","old":"x","new":"y"});
        bench.call(&Edit, input).await.unwrap_err();
        let input = json!({"path":"none","old":"x","new":"y"});
        bench.call(&Edit, input).await.unwrap_err();
    }
}
