//! The files of the repository, and what a rule may look at: code without comments and texts, and the texts alone.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// Folders that hold nothing of ours.
const NOT_OURS: [&str; 8] = [
    ".git",
    "target",
    "node_modules",
    "corpus",
    "artifacts",
    "coverage",
    ".idea",
    ".vscode",
];

/// Kinds of files that are looked at, by the end of their names; recordings of the CLI (`ndjson`) included.
const TEXT: [&str; 9] = [
    "rs", "md", "toml", "sh", "json", "ndjson", "yml", "yaml", "txt",
];

/// One file.
pub(crate) struct File {
    /// Below the repository, with slashes.
    pub(crate) path: String,
    /// As it is.
    pub(crate) raw: String,
    /// Rust: comments and the insides of texts are blanks; the lines are the same. Else empty.
    pub(crate) code: String,
    /// Rust: the texts with the numbers of the lines where they begin. Else empty.
    pub(crate) texts: Vec<(usize, String)>,
    /// Rust: lines before the tests at the end of the file; all lines where there are none.
    pub(crate) product_lines: usize,
}

impl File {
    pub(crate) fn new(path: &str, raw: &str) -> Self {
        let (code, texts) = match path.ends_with(".rs") {
            true => split(raw),
            false => (String::new(), Vec::new()),
        };
        let product_lines = match is_test(path) {
            true => 0,
            false => before_tests(&code).unwrap_or_else(|| raw.lines().count()),
        };
        Self {
            path: path.to_owned(),
            raw: raw.to_owned(),
            code,
            texts,
            product_lines,
        }
    }

    /// Lines of code, numbered from 1; `tests` says which: those of tests or those of the product.
    pub(crate) fn lines(&self, tests: bool) -> impl Iterator<Item = (usize, &str)> {
        let from = self.product_lines;
        self.code
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line))
            .filter(move |(number, _)| (*number > from) == tests)
    }

    /// Texts in the product's code, with their lines.
    pub(crate) fn product_texts(&self) -> impl Iterator<Item = (usize, &str)> {
        let upto = self.product_lines;
        self.texts
            .iter()
            .filter(move |(line, _)| *line <= upto)
            .map(|(line, text)| (*line, text.as_str()))
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether the whole file is there for tests only.
    pub(crate) fn is_test(&self) -> bool {
        is_test(&self.path)
    }
}

fn is_test(path: &str) -> bool {
    path.ends_with("_tests.rs")
        || path.ends_with("/tests.rs")
        || path.contains("/tests/")
        || path.contains("/benches/")
        || path.contains("/examples/")
        || path.starts_with("fuzz/")
        || path.starts_with("crates/turnpass/src/tools/contract/")
}

/// The number of lines before `#[cfg(test)] mod name {`.
fn before_tests(code: &str) -> Option<usize> {
    let lines: Vec<&str> = code.lines().collect();
    lines
        .windows(2)
        .position(|pair| pair[0] == "#[cfg(test)]" && opens_module(pair[1]))
}

fn opens_module(line: &str) -> bool {
    line.starts_with("mod ") && line.ends_with('{')
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every text file of the repository, in the order of the paths.
pub(crate) fn repository() -> Vec<File> {
    let mut files = Vec::new();
    walk(&root(), "", &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(files.len() > 100, "{} files only", files.len());
    files
}

fn walk(folder: &Path, below: &str, files: &mut Vec<File>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = match below {
            "" => name.clone(),
            below => format!("{below}/{name}"),
        };
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && !NOT_OURS.contains(&name.as_str()) {
            walk(&entry.path(), &path, files);
        }
        let end = name.rsplit_once('.').map_or("", |(_, end)| end);
        let script = end.is_empty() || below == ".ci";
        if kind.is_file() && (TEXT.contains(&end) || script) {
            // A file that is no UTF-8 is no text.
            if let Ok(raw) = std::fs::read_to_string(entry.path()) {
                files.push(File::new(&path, &raw));
            }
        }
    }
}

/// Separates code from comments and texts.
fn split(raw: &str) -> (String, Vec<(usize, String)>) {
    let bytes = raw.as_bytes();
    let mut code = vec![b' '; bytes.len()];
    let mut texts = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &raw[at..];
        let (length, text) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), None)
        } else if rest.starts_with("/*") {
            (block_comment(rest), None)
        } else if let Some((inside, length)) = text_at(raw, at) {
            code[at] = b'"';
            (length, Some(&rest[inside]))
        } else {
            let length = rest.chars().next().map_or(1, char::len_utf8);
            code[at..at + length].copy_from_slice(&bytes[at..at + length]);
            (length, None)
        };
        if let Some(text) = text {
            texts.push((line, text.to_owned()));
        }
        for index in at..at + length {
            if bytes[index] == b'\n' {
                code[index] = b'\n';
                line += 1;
            }
        }
        at += length;
    }
    (String::from_utf8(code).unwrap(), texts)
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let here = &rest.as_bytes()[at..];
        if here.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if here.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// The inside of a text, and its whole length; `None` when none begins here.
fn text_at(raw: &str, at: usize) -> Option<(Range<usize>, usize)> {
    let rest = &raw[at..];
    let before = raw[..at].chars().next_back();
    if rest.starts_with('\'') {
        return character(rest).map(|length| (1..length - 1, length));
    }
    let in_a_name = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let raw_text = rest.strip_prefix('r').or_else(|| rest.strip_prefix("br"));
    if let (Some(after), false) = (raw_text, in_a_name) {
        let hashes = after.len() - after.trim_start_matches('#').len();
        if after[hashes..].starts_with('"') {
            let open = rest.len() - after.len() + hashes + 1;
            let close = format!("\"{}", "#".repeat(hashes));
            let end = rest[open..].find(&close).map_or(rest.len(), |at| open + at);
            return Some((open..end, rest.len().min(end + close.len())));
        }
    }
    if !rest.starts_with('"') {
        return None;
    }
    let mut escaped = false;
    for (index, byte) in rest.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some((1..index, index + 1)),
            _ => {}
        }
    }
    Some((1..rest.len(), rest.len()))
}

/// The length of a character literal; `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        let end = rest[3..].find('\'')?;
        return Some(3 + end + 1);
    }
    let (index, second) = chars.next()?;
    (second == '\'').then_some(index + 1)
}

#[test]
fn code_comments_and_texts_are_told_apart() {
    let raw = "let a = \"x // \\\" y\"; // env::var\nlet b = 'c'; /* Command::new\n */ fn f<'a>() {}\nlet c = r#\"r \" \"#;\n";
    let file = File::new("crates/x/src/a.rs", raw);
    assert!(!file.code.contains("env::var") && !file.code.contains("Command"));
    assert!(file.code.contains("fn f<'a>() {}"), "{}", file.code);
    let texts: Vec<_> = file
        .texts
        .iter()
        .map(|(line, text)| (*line, text.as_str()))
        .collect();
    assert_eq!(texts, [(1, "x // \\\" y"), (2, "c"), (4, "r \" ")]);
    assert_eq!(file.code.lines().count(), 4);
}

#[test]
fn tests_at_the_end_are_told_from_the_product() {
    let raw = "fn a() {}\n\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
    let file = File::new("crates/x/src/a.rs", raw);
    assert_eq!(file.product_lines, 2);
    assert!(file.lines(true).any(|(_, line)| line.contains("fn b")));
    assert!(!file.lines(false).any(|(_, line)| line.contains("fn b")));
}
