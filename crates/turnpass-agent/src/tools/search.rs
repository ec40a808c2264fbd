//! `search`: the lines that match, in all files below a directory.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use regex::{Regex, RegexBuilder};
use rustix::fs::{FileType, Mode, OFlags};
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use super::glob::Glob;
use super::list::{CLOSED, open_below, sorted};
use super::{
    Effect, Failure, HostTool, Scene, declared, field, on_files, one_line, only_target, parse,
};

/// Matching lines in one result.
const MATCHES: usize = 200;

/// Longest part of a line that is shown, in characters.
const LINE_CHARACTERS: usize = 300;

/// Largest file that is looked into, in bytes; what is larger is seldom written by hand.
const SEARCHED_FILE_BYTES: u64 = 4 * 1024 * 1024;

/// Largest compiled pattern, in bytes.
const PATTERN_BYTES: usize = 1024 * 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    pattern: String,
    path: Option<PathBuf>,
    files: Option<String>,
    #[serde(default)]
    literal: bool,
    #[serde(default)]
    ignore_case: bool,
}

/// The `search` tool.
#[derive(Clone, Copy, Debug)]
pub struct Search;

impl HostTool for Search {
    fn declaration(&self) -> Tool {
        declared(
            "search",
            "Finds the lines that match a regular expression, in a file or in all files below a directory. Each line of \
             the result is path:line: text. .git, node_modules and target are not gone into unless they are named.",
            json!({
                "type": "object",
                "properties": {
                    "pattern": {"type": "string", "description": "The regular expression (Rust syntax, no look-around)."},
                    "path": {"type": "string", "description": "A file or directory; the working directory by default."},
                    "files": {"type": "string", "description": "Only files that match, for example *.rs or src/**/*.ts."},
                    "literal": {"type": "boolean", "description": "Take the pattern as plain text."},
                    "ignore_case": {"type": "boolean"}
                },
                "required": ["pattern"],
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
        let place = field(input, "path");
        let pattern = field(input, "pattern");
        one_line(format!("{pattern} {place}").trim_end())
    }

    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        Box::pin(async move {
            let input: Input = parse(&input)?;
            let target = only_target(&scene)?;
            let mut hunt = Hunt::new(&input, scene.cancel.clone())?;
            on_files(scene.cancel.clone(), move || {
                match scene.directory.open_directory(&target) {
                    Ok(top) => hunt.below(&top, "").map_err(|e| target.failed(&e))?,
                    // Not a directory: a file, or the error of opening it.
                    Err(_) => {
                        let file = scene.directory.open_file(&target)?;
                        hunt.file(file, &target.shown().to_string());
                    }
                }
                Ok(hunt.told())
            })
            .await
        })
    }
}

/// One search.
struct Hunt {
    regex: Regex,
    files: Option<Glob>,
    cancel: CancellationToken,
    lines: Vec<String>,
    looked: u64,
    passed: u64,
}

impl Hunt {
    fn new(input: &Input, cancel: CancellationToken) -> Result<Self, Failure> {
        let pattern = if input.literal {
            regex::escape(&input.pattern)
        } else {
            input.pattern.clone()
        };
        let regex = RegexBuilder::new(&pattern)
            .case_insensitive(input.ignore_case)
            .size_limit(PATTERN_BYTES)
            .build()
            .map_err(|error| Failure::new(format!("the pattern cannot be read: {error}")))?;
        Ok(Self {
            regex,
            files: input.files.as_deref().map(Glob::new).transpose()?,
            cancel,
            lines: Vec::new(),
            looked: 0,
            passed: 0,
        })
    }

    fn full(&self) -> bool {
        self.lines.len() > MATCHES || self.cancel.is_cancelled()
    }

    fn below(&mut self, directory: &OwnedFd, before: &str) -> std::io::Result<()> {
        for entry in sorted(directory)? {
            if self.full() {
                break;
            }
            let name = entry.name.to_string_lossy();
            let path = format!("{before}{name}");
            match entry.kind {
                FileType::Directory if !CLOSED.contains(&&*name) => {
                    if let Some(inner) = open_below(directory, &entry.name) {
                        self.below(&inner, &format!("{path}/"))?;
                    }
                }
                FileType::RegularFile if self.wants(&path) => {
                    match open_regular(directory, &entry.name) {
                        Some(file) => self.file(file, &path),
                        None => self.passed += 1,
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn wants(&self, path: &str) -> bool {
        self.files.as_ref().is_none_or(|glob| glob.matches(path))
    }

    /// Looks into one file; one that is too large, no text or unreadable is passed over and counted.
    fn file(&mut self, file: File, path: &str) {
        let mut bytes = Vec::new();
        let read = file.take(SEARCHED_FILE_BYTES + 1).read_to_end(&mut bytes);
        if read.is_err() || bytes.len() as u64 > SEARCHED_FILE_BYTES || bytes.contains(&0) {
            self.passed += 1;
            return;
        }
        self.looked += 1;
        let text = String::from_utf8_lossy(&bytes);
        for (index, line) in text.lines().enumerate() {
            if self.regex.is_match(line) {
                let shown: String = line.chars().take(LINE_CHARACTERS).collect();
                let more = if shown.len() < line.len() { "…" } else { "" };
                self.lines
                    .push(format!("{path}:{}: {shown}{more}", index + 1));
                if self.full() {
                    return;
                }
            }
        }
    }

    fn told(mut self) -> String {
        let cut = self.lines.len() > MATCHES;
        self.lines.truncate(MATCHES);
        if cut {
            self.lines.push(format!(
                "[cut here: more than {MATCHES} lines match; narrow the search]"
            ));
        } else if self.lines.is_empty() {
            self.lines
                .push(format!("[no line matches in {} files]", self.looked));
        }
        if self.passed > 0 {
            self.lines.push(format!(
                "[{} files were passed over: larger than {SEARCHED_FILE_BYTES} bytes, no text, or unreadable]",
                self.passed
            ));
        }
        self.lines.join("\n")
    }
}

fn open_regular(directory: &OwnedFd, name: &OsString) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::empty()).ok()?;
    let state = rustix::fs::fstat(&file).ok()?;
    (FileType::from_raw_mode(state.st_mode) == FileType::RegularFile).then(|| file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::testing::Bench;

    fn bench() -> Bench {
        let bench = Bench::new(&[
            ("a.rs", b"fn one() {}\nfn Two() {}\n"),
            ("sub/b.rs", b"let x = a+b;\n"),
            ("sub/c.txt", b"fn three\n"),
            ("target/d.rs", b"fn made() {}\n"),
            ("bin", b"fn\0"),
        ]);
        std::os::unix::fs::symlink("/etc", bench.folder.path().join("out")).unwrap();
        bench
    }

    #[tokio::test]
    async fn finds_lines() {
        let bench = bench();
        for (input, text) in [
            (
                json!({"pattern":"fn \\w+\\(","files":"*.rs"}),
                "a.rs:1: fn one() {}\na.rs:2: fn Two() {}",
            ),
            (
                json!({"pattern":"two","ignore_case":true,"files":"a.rs"}),
                "a.rs:2: fn Two() {}",
            ),
            (
                json!({"pattern":"a+b","literal":true,"path":"sub"}),
                "b.rs:1: let x = a+b;",
            ),
            (
                json!({"pattern":"fn","path":"sub/c.txt"}),
                "sub/c.txt:1: fn three",
            ),
            (
                json!({"pattern":"made","path":"target"}),
                "d.rs:1: fn made() {}",
            ),
            (
                json!({"pattern":"made"}),
                "[no line matches in 3 files]\n[1 files were passed over: larger than 4194304 bytes, no text, or unreadable]",
            ),
        ] {
            assert_eq!(bench.call(&Search, input).await.unwrap(), text);
        }
    }

    #[tokio::test]
    async fn bad_patterns_and_places_are_said() {
        let bench = bench();
        for input in [
            json!({"pattern":"("}),
            json!({"pattern":"x{1000}{1000}"}),
            json!({"pattern":"x","files":"{"}),
            json!({"pattern":"x","path":"none"}),
        ] {
            bench.call(&Search, input).await.unwrap_err();
        }
    }

    #[tokio::test]
    async fn too_many_lines_are_cut() {
        let bench = Bench::new(&[("f", "x\n".repeat(MATCHES + 1).as_bytes())]);
        let text = bench.call(&Search, json!({"pattern":"x"})).await.unwrap();
        assert_eq!(text.lines().count(), MATCHES + 1);
        assert!(text.contains("more than 200 lines match"));
    }
}
