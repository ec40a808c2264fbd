//! `write`: the whole content of a file.

use std::path::PathBuf;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::json;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use super::{
    Effect, Failure, HostTool, Scene, declared, field, on_files, one_line, only_target, parse,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    path: PathBuf,
    content: String,
}

/// The `write` tool.
#[derive(Clone, Copy, Debug)]
pub struct Write;

impl HostTool for Write {
    fn declaration(&self) -> Tool {
        declared(
            "write",
            "Writes a file whole, in place of what was there. Makes the directories on the way.",
            json!({
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "The file."},
                    "content": {"type": "string", "description": "All of its new text."}
                },
                "required": ["path", "content"],
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
        let size = field(input, "content").len();
        format!("{} ({size} bytes)", one_line(&field(input, "path")))
    }

    fn detail(&self, input: &ToolInput) -> String {
        field(input, "content")
    }

    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        Box::pin(async move {
            let input: Input = parse(&input)?;
            let target = only_target(&scene)?;
            on_files(scene.cancel.clone(), move || {
                let made = scene.directory.replace(&target, input.content.as_bytes())?;
                let what = if made { "made" } else { "replaced" };
                let (name, size) = (target.shown(), input.content.len());
                Ok(format!("{what} {name}: {size} bytes"))
            })
            .await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::testing::Bench;

    #[tokio::test]
    async fn makes_and_replaces() {
        let bench = Bench::new(&[("old", b"before")]);
        let said = bench
            .call(&Write, json!({"path":"a/b/new","content":"über"}))
            .await
            .unwrap();
        assert_eq!(said, "made a/b/new: 5 bytes");
        assert_eq!(bench.content("a/b/new"), "über");
        let input = json!({"path":"old","content":""});
        let said = bench.call(&Write, input).await.unwrap();
        assert_eq!(said, "replaced old: 0 bytes");
        assert_eq!(bench.content("old"), "");
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_said() {
        let bench = Bench::new(&[("folder/file", b"x")]);
        for path in ["folder", ".", "folder/file/below"] {
            let input = json!({"path":path,"content":"y"});
            bench.call(&Write, input).await.unwrap_err();
        }
        assert_eq!(bench.content("folder/file"), "x");
    }
}
