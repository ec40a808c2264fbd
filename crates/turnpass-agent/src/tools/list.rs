//! `list`: the entries of a directory.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use rustix::fs::{Dir, FileType, Mode, OFlags};
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use super::{
    Effect, Failure, HostTool, Scene, declared, field, on_files, one_line, only_target, parse,
};

/// Entries in one listing.
const LISTED: usize = 1_000;

/// Levels below the directory.
const DEEPEST: u32 = 16;

/// Directories that are named but not gone into: they hold what programs made, and would fill any result.
pub(super) const CLOSED: [&str; 3] = [".git", "node_modules", "target"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    path: Option<PathBuf>,
    levels: Option<u32>,
}

/// The `list` tool.
#[derive(Clone, Copy, Debug)]
pub struct List;

impl HostTool for List {
    fn declaration(&self) -> Tool {
        declared(
            "list",
            "Lists a directory, one entry a line, sorted; directories end in a slash, symbolic links in an at sign. \
             .git, node_modules and target are named but not gone into.",
            json!({
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "The directory; the working directory by default."},
                    "levels": {"type": "integer", "minimum": 1, "maximum": DEEPEST, "description": "How deep; 1 by default."}
                },
                "additionalProperties": false
            }),
        )
    }

    fn effect(&self) -> Effect {
        Effect::Read
    }

    fn paths(&self, input: &ToolInput) -> Result<Vec<PathBuf>, Failure> {
        Ok(parse::<Input>(input)?.path.into_iter().collect())
    }

    fn summary(&self, input: &ToolInput) -> String {
        one_line(&field(input, "path"))
    }

    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        Box::pin(async move {
            let input: Input = parse(&input)?;
            let target = only_target(&scene)?;
            let levels = input.levels.unwrap_or(1).clamp(1, DEEPEST);
            on_files(scene.cancel.clone(), move || {
                let top = scene.directory.open_directory(&target)?;
                let mut lines = Vec::new();
                entries(&top, "", levels, &scene.cancel, &mut lines)
                    .map_err(|error| target.failed(&error))?;
                Ok(shown(lines))
            })
            .await
        })
    }
}

fn shown(mut lines: Vec<String>) -> String {
    if lines.is_empty() {
        return "[empty]".to_owned();
    }
    if lines.len() > LISTED {
        lines.truncate(LISTED);
        lines.push(format!("[cut here: more than {LISTED} entries]"));
    }
    lines.join("\n")
}

/// Adds the entries of an open directory, with those below, until one more than [`LISTED`] are there.
fn entries(
    directory: &OwnedFd,
    before: &str,
    levels: u32,
    cancel: &CancellationToken,
    lines: &mut Vec<String>,
) -> std::io::Result<()> {
    for entry in sorted(directory)? {
        if lines.len() > LISTED || cancel.is_cancelled() {
            return Ok(());
        }
        let name = entry.name.to_string_lossy().replace(['\n', '\r'], "?");
        let path = format!("{before}{name}");
        match entry.kind {
            FileType::Directory => {
                let below = format!("{path}/");
                lines.push(below.clone());
                if levels > 1
                    && !CLOSED.contains(&name.as_str())
                    && let Some(inner) = open_below(directory, &entry.name)
                {
                    entries(&inner, &below, levels - 1, cancel, lines)?;
                }
            }
            FileType::Symlink => lines.push(format!("{path}@")),
            _ => lines.push(path),
        }
    }
    Ok(())
}

/// One entry of a directory.
pub(super) struct Entry {
    pub(super) name: OsString,
    pub(super) kind: FileType,
}

/// The entries of an open directory, sorted by name.
pub(super) fn sorted(directory: &OwnedFd) -> std::io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        // Some file systems do not say the kind here.
        let kind = match entry.file_type() {
            FileType::Unknown => kind_of(directory, entry.file_name()),
            kind => kind,
        };
        found.push(Entry {
            name: OsString::from_vec(name.to_vec()),
            kind,
        });
    }
    found.sort_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
    Ok(found)
}

fn kind_of(directory: &OwnedFd, name: &std::ffi::CStr) -> FileType {
    rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .map_or(FileType::Unknown, |state| {
            FileType::from_raw_mode(state.st_mode)
        })
}

/// Opens a directory in another, unless it is a link or may not be read.
pub(super) fn open_below(directory: &OwnedFd, name: &OsString) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::testing::Bench;

    #[tokio::test]
    async fn lists_sorted_and_marked() {
        let bench = Bench::new(&[
            ("b", b""),
            ("a/x/deep", b""),
            (".git/config", b""),
            ("c\nd", b""),
        ]);
        std::os::unix::fs::symlink("/", bench.folder.path().join("out")).unwrap();
        let one = bench.call(&List, json!({})).await.unwrap();
        assert_eq!(one, ".git/\na/\nb\nc?d\nout@");
        let deep = bench.call(&List, json!({"levels":9})).await.unwrap();
        assert_eq!(deep, ".git/\na/\na/x/\na/x/deep\nb\nc?d\nout@");
        let inner = bench.call(&List, json!({"path":".git"})).await.unwrap();
        assert_eq!(inner, "config");
        bench.call(&List, json!({"path":"b"})).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_full_directory_is_cut() {
        let bench = Bench::new(&[]);
        for n in 0..LISTED + 5 {
            std::fs::write(bench.folder.path().join(format!("{n:05}")), "").unwrap();
        }
        let text = bench.call(&List, json!({})).await.unwrap();
        assert_eq!(text.lines().count(), LISTED + 1);
        assert!(text.ends_with("[cut here: more than 1000 entries]"));
    }
}
