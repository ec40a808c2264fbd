//! The rules.

use crate::lists::{
    LONG_FILES, NAMED_SO, NAMES_CREDENTIALS, NAMES_NEVER_SET, PURE, READS_ENVIRONMENT,
    STARTS_PROCESSES, STARTS_TASKS, WAITS_IN_TESTS,
};
use crate::text::File;

/// Most lines of a product file, its tests at the end not counted.
const PRODUCT_LINES: usize = 500;
/// Most lines of a file of tests.
const TEST_LINES: usize = 700;

/// Lines above a sleep within which a test has to look at the time.
const LOOK_LINES: usize = 6;

/// Lines with what is wrong there.
type Found = Vec<(usize, String)>;
/// A path and what stands in the file.
type Samples = &'static [(&'static str, &'static str)];

/// One rule.
pub(crate) struct Rule {
    pub(crate) name: &'static str,
    pub(crate) find: fn(&File) -> Found,
    /// What it has to find.
    pub(crate) bad: Samples,
    /// What it has to pass.
    pub(crate) good: Samples,
}

const LIB: &str = "crates/turnpass/src/other.rs";

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "environment",
        find: environment,
        bad: &[
            (LIB, "let x = std::env::var(\"HOME\");\n"),
            (LIB, "use std::env;\nlet x = env::vars_os();\n"),
            (
                "crates/turnpass-cli/src/show.rs",
                "std::env::set_var(\"A\", \"b\");\n",
            ),
        ],
        good: &[
            (
                "crates/turnpass/src/cli/environment.rs",
                "std::env::vars_os()\n",
            ),
            (LIB, "// std::env::var\nstd::env::current_exe();\n"),
            (
                "crates/turnpass-lab/src/cli/mod.rs",
                "std::env::var(\"A\");\n",
            ),
        ],
    },
    Rule {
        name: "processes",
        find: processes,
        bad: &[
            (LIB, "let c = Command::new(\"claude\");\n"),
            (
                "crates/turnpass/src/cli/ask.rs",
                "use tokio::process::Command as C;\n",
            ),
        ],
        good: &[
            ("crates/turnpass/src/process/group.rs", "Command::new(x);\n"),
            (
                LIB,
                "#[cfg(test)]\nmod tests {\n    fn a() { Command::new(\"sh\"); }\n}\n",
            ),
        ],
    },
    Rule {
        name: "tasks",
        find: tasks,
        bad: &[
            (LIB, "tokio::spawn(async {});\n"),
            (LIB, "tokio::task::spawn_blocking(|| 1);\n"),
            (LIB, "let t = TaskTracker::new();\n"),
            (
                "crates/turnpass-cli/src/show.rs",
                "std::thread::spawn(|| ());\n",
            ),
        ],
        good: &[(
            "crates/turnpass/src/loopback/mod.rs",
            "tokio::spawn(accept());\n",
        )],
    },
    Rule {
        name: "pure",
        find: pure,
        bad: &[
            (
                "crates/turnpass/src/wire/lines.rs",
                "use tokio::io::AsyncRead;\n",
            ),
            (
                "crates/turnpass/src/relay/fit.rs",
                "std::fs::read(\"x\");\n",
            ),
            ("crates/turnpass/src/turn.rs", "let now = Instant::now();\n"),
        ],
        good: &[
            (
                "crates/turnpass/src/relay/exchange.rs",
                "use tokio::sync::mpsc;\n",
            ),
            (
                "crates/turnpass/src/wire/lines.rs",
                "/// No tokio here.\nfn a() {}\n",
            ),
        ],
    },
    Rule {
        name: "module_docs",
        find: module_docs,
        bad: &[(LIB, "use std::fmt;\n"), (LIB, "// x\n\nuse std::fmt;\n")],
        good: &[
            (LIB, "//! What it is.\n"),
            ("crates/turnpass/src/turn_tests.rs", "use super::*;\n"),
        ],
    },
    Rule {
        name: "empty_docs",
        find: empty_docs,
        bad: &[(LIB, "//! Fine.\n\n/// x\npub fn a() {}\n")],
        good: &[(LIB, "//! Fine.\n\n/// Least.\npub fn a() {}\n///\n")],
    },
    Rule {
        name: "length",
        find: length,
        bad: &[(LIB, LONG)],
        good: &[(LIB, "//! Short.\n")],
    },
    Rule {
        name: "names",
        find: names,
        bad: &[
            ("crates/turnpass/src/util.rs", ""),
            (LIB, "struct ProcessManager;\n"),
            (LIB, "fn write_helper() {}\n"),
            (LIB, "mod common;\n"),
        ],
        good: &[(LIB, "struct Utilization;\nlet manager = 1;\n")],
    },
    Rule {
        name: "unfinished",
        find: unfinished,
        bad: &[
            (LIB, "todo!()\n"),
            (LIB, "unimplemented!(\"later\")\n"),
            (LIB, "// TODO: x\n"),
        ],
        good: &[(LIB, "let todo = 1;\n")],
    },
    Rule {
        name: "sleeps",
        find: sleeps,
        bad: &[
            ("crates/turnpass/tests/a.rs", "std::thread::sleep(ms);\n"),
            (
                LIB,
                "#[cfg(test)]\nmod tests {\n    tokio::time::sleep(ms).await;\n}\n",
            ),
        ],
        good: &[
            (LIB, "tokio::time::sleep(ms).await;\n"),
            (
                "crates/turnpass/tests/a.rs",
                "while !ready() {\n    assert!(Instant::now() < end);\n    sleep(LOOK_AGAIN);\n}\n",
            ),
        ],
    },
    Rule {
        name: "limits",
        find: limits,
        bad: &[
            (LIB, "const LINE_BYTES: usize = 1;\n"),
            (LIB, "pub const END_GRACE: Duration = A;\n"),
        ],
        good: &[
            (
                LIB,
                "/// Because.\npub(crate) const LINE_BYTES: usize = 1;\n",
            ),
            (
                LIB,
                "/// Because.\n#[allow(dead_code)]\nconst A_TIMEOUT: D = X;\n",
            ),
        ],
    },
    Rule {
        name: "laboratory",
        find: laboratory,
        bad: &[
            ("crates/turnpass-lab/src/a.rs", "use turnpass::Error;\n"),
            (
                "crates/turnpass-lab/Cargo.toml",
                "[dev-dependencies]\nturnpass.workspace = true\n",
            ),
            ("crates/turnpass-lab/tests/a.rs", "turnpass_agent::run();\n"),
        ],
        good: &[
            ("crates/turnpass-lab/src/a.rs", "use turnpass_lab::cli;\n"),
            (
                "crates/turnpass-lab/Cargo.toml",
                "[package]\nname = \"turnpass-lab\"\n",
            ),
        ],
    },
    Rule {
        name: "arrows",
        find: arrows,
        bad: &[
            (
                "crates/turnpass/Cargo.toml",
                "[dependencies]\nturnpass-lab.workspace = true\n",
            ),
            (
                "crates/turnpass-agent/Cargo.toml",
                "[dependencies]\nturnpass-lab = { path = \"x\" }\n",
            ),
            (
                "crates/turnpass-agent/Cargo.toml",
                "[dependencies]\nturnpass.workspace = true\n",
            ),
        ],
        good: &[(
            "crates/turnpass/Cargo.toml",
            "[dependencies]\nserde = 1\n[dev-dependencies]\nturnpass-lab.workspace = true\n[lints]\nworkspace = true\n",
        )],
    },
    Rule {
        name: "machines",
        find: machines,
        bad: &[
            ("docs/a.md", "see /work/notes\n"),
            (
                "conformance/install",
                "--registry https://registry.npmjs.org/\n",
            ),
            ("docs/a.md", "in `/root/.claude`\n"),
        ],
        good: &[(
            "docs/a.md",
            "see ./work/notes and /rootless and /proc/self/root/etc\n",
        )],
    },
    Rule {
        name: "credentials",
        find: credentials,
        bad: &[
            (LIB, "let path = home.join(\".credentials.json\");\n"),
            (
                "crates/turnpass-cli/src/show.rs",
                "\"Claude Code-credentials\"\n",
            ),
        ],
        good: &[(
            "crates/turnpass-lab/src/rig/home.rs",
            "\".credentials.json\"\n",
        )],
    },
    Rule {
        name: "never_set",
        find: never_set,
        bad: &[
            (LIB, "env.set(\"CLAUDE_CODE_ENTRYPOINT\", \"cli\");\n"),
            (
                "crates/turnpass/src/cli/launch.rs",
                "(\"CLAUDE_CODE_RETRY_WATCHDOG\", \"1\")\n",
            ),
        ],
        good: &[(
            "crates/turnpass/src/cli/environment.rs",
            "\"CLAUDE_CODE_ENTRYPOINT\"\n",
        )],
    },
];

/// A file of 501 lines.
const LONG: &str = include_str!("long-file-sample.txt");

fn listed(list: &[&str], path: &str) -> bool {
    list.iter().any(|entry| match entry.ends_with('/') {
        true => path.starts_with(entry),
        false => path == *entry,
    })
}

/// Library, agent and program; the laboratory is a program of its own with rules of its own.
fn is_product(file: &File) -> bool {
    let ours = [
        "turnpass",
        "turnpass-agent",
        "turnpass-cli",
        "turnpass-gateway",
    ];
    file.is_rust()
        && ours
            .iter()
            .any(|name| file.path.starts_with(&format!("crates/{name}/src/")))
}

/// This test's own files say what is forbidden.
fn is_tidy(file: &File) -> bool {
    file.path.starts_with("crates/turnpass-cli/tests/tidy/")
}

/// Product lines of a file that hold one of the words.
fn with_words(file: &File, tests: bool, words: &[&str], what: &str) -> Found {
    file.lines(tests)
        .filter_map(|(line, code)| {
            let word = words.iter().find(|word| code.contains(**word))?;
            Some((line, format!("{word}: {what}")))
        })
        .collect()
}

fn environment(file: &File) -> Found {
    if !is_product(file) || listed(READS_ENVIRONMENT, &file.path) {
        return Vec::new();
    }
    const WORDS: [&str; 7] = [
        "env::var(",
        "env::var_os(",
        "env::vars(",
        "env::vars_os(",
        "env::set_var(",
        "env::remove_var(",
        "use std::env::",
    ];
    with_words(
        file,
        false,
        &WORDS,
        "the environment is read in one place only",
    )
}

fn processes(file: &File) -> Found {
    if !is_product(file) || listed(STARTS_PROCESSES, &file.path) {
        return Vec::new();
    }
    const WORDS: [&str; 3] = ["Command::new(", "process::Command", "CommandExt"];
    with_words(
        file,
        false,
        &WORDS,
        "processes are started by process/ only, which ends them",
    )
}

fn tasks(file: &File) -> Found {
    if !is_product(file) || listed(STARTS_TASKS, &file.path) {
        return Vec::new();
    }
    const WORDS: [&str; 7] = [
        "tokio::spawn(",
        "task::spawn",
        "spawn_blocking(",
        "thread::spawn(",
        "thread::Builder",
        "TaskTracker::new(",
        "JoinSet::new(",
    ];
    with_words(
        file,
        false,
        &WORDS,
        "tasks are started in named places only, which end them",
    )
}

fn pure(file: &File) -> Found {
    if !listed(PURE, &file.path) {
        return Vec::new();
    }
    const WORDS: [&str; 10] = [
        "tokio",
        "std::fs",
        "std::net",
        "std::process",
        "std::env",
        "std::thread",
        "std::io::Read",
        "hyper::",
        "reqwest",
        "Instant::now",
    ];
    with_words(file, false, &WORDS, "this file is pure")
}

fn module_docs(file: &File) -> Found {
    let is_module = file.is_rust() && (!file.is_test() || file.path.ends_with("/main.rs"));
    let first = file
        .raw
        .lines()
        .find(|line| !line.trim().is_empty() && !line.starts_with("#!["));
    match is_module && !first.unwrap_or_default().starts_with("//!") {
        true => vec![(1, "a module begins with what it is (`//!`)".to_owned())],
        false => Vec::new(),
    }
}

/// A documentation line that is one word of one letter stands there for the lint.
fn empty_docs(file: &File) -> Found {
    let lines = file.raw.lines().enumerate();
    lines
        .filter(|(_, line)| {
            let said = line.trim_start().strip_prefix("/// ");
            file.is_rust() && !is_tidy(file) && said.is_some_and(|said| said.trim().len() < 2)
        })
        .map(|(index, _)| (index + 1, "this documentation says nothing".to_owned()))
        .collect()
}

/// The lines that count, and how many may be.
pub(crate) fn length_of(file: &File) -> (usize, usize) {
    match file.is_test() {
        true => (file.raw.lines().count(), TEST_LINES),
        false => (file.product_lines, PRODUCT_LINES),
    }
}

fn length(file: &File) -> Found {
    let (has, most) = length_of(file);
    let listed = LONG_FILES.iter().find(|(path, ..)| *path == file.path);
    let most = listed.map_or(most, |(_, lines, _)| *lines);
    match file.is_rust() && has > most {
        true => vec![(most, format!("{has} lines, {most} at the most"))],
        false => Vec::new(),
    }
}

fn names(file: &File) -> Found {
    const EMPTY_WORDS: [&str; 10] = [
        "manager",
        "managers",
        "helper",
        "helpers",
        "util",
        "utils",
        "common",
        "misc",
        "utility",
        "utilities",
    ];
    let is_empty = |name: &str| words_of(name).any(|word| EMPTY_WORDS.contains(&word.as_str()));
    let ours = file.is_rust() || file.path.ends_with(".md");
    if !ours || is_tidy(file) {
        return Vec::new();
    }
    let mut found = Vec::new();
    if is_empty(&file.path) {
        found.push((1, "the file's name says nothing".to_owned()));
    }
    for (index, line) in file.code.lines().enumerate() {
        let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        while let Some(word) = words.next() {
            let declares = [
                "fn", "struct", "enum", "trait", "mod", "type", "const", "static",
            ];
            let name = match declares.contains(&word) {
                true => words.next().unwrap_or_default(),
                false => continue,
            };
            if is_empty(name) && !NAMED_SO.contains(&(file.path.as_str(), name)) {
                found.push((index + 1, format!("{name} says nothing")));
            }
        }
    }
    found
}

/// The words of a name: `write_helper`, `ProcessManager`, `src/util.rs`.
fn words_of(name: &str) -> impl Iterator<Item = String> {
    let mut spaced = String::new();
    for c in name.chars() {
        match c {
            c if c.is_uppercase() => {
                spaced.push(' ');
                spaced.extend(c.to_lowercase());
            }
            c if c.is_alphanumeric() => spaced.push(c),
            _ => spaced.push(' '),
        }
    }
    let words: Vec<String> = spaced.split_whitespace().map(str::to_owned).collect();
    words.into_iter()
}

fn unfinished(file: &File) -> Found {
    if !file.is_rust() || is_tidy(file) {
        return Vec::new();
    }
    let code = file.code.lines().zip(file.raw.lines()).enumerate();
    code.filter(|(_, (code, raw))| {
        let comment = raw.contains("// TODO") || raw.contains("// FIXME") || raw.contains("// XXX");
        code.contains("todo!(") || code.contains("unimplemented!(") || comment
    })
    .map(|(index, _)| (index + 1, "something is not finished".to_owned()))
    .collect()
}

fn sleeps(file: &File) -> Found {
    if !file.is_rust() || is_tidy(file) || listed(WAITS_IN_TESTS, &file.path) {
        return Vec::new();
    }
    let code: Vec<&str> = file.code.lines().collect();
    let found = with_words(
        file,
        true,
        &["sleep("],
        "a test waits for what happens, not for time",
    );
    // Between two looks at a condition, within a bound, when what is waited for has no event.
    let looks = |line: usize| {
        let above = &code[line.saturating_sub(LOOK_LINES)..line];
        above.iter().any(|line| line.contains("Instant::now()"))
    };
    found
        .into_iter()
        .filter(|(line, _)| !looks(*line))
        .collect()
}

fn limits(file: &File) -> Found {
    if !is_product(file) {
        return Vec::new();
    }
    let raw: Vec<&str> = file.raw.lines().collect();
    let mut found = Vec::new();
    for (number, line) in file.lines(false) {
        let Some((_, after)) = line.split_once("const ") else {
            continue;
        };
        let name = after.split([':', ' ']).next().unwrap_or_default();
        let is_limit = ["LIMIT", "_BYTES", "_TIMEOUT", "_GRACE", "_CHARS", "_MAX"]
            .iter()
            .any(|end| name.ends_with(end));
        // Attributes may stand between the documentation and the constant.
        let above = raw[..number - 1].iter().rev();
        let above = above.map(|line| line.trim_start());
        let documented = above
            .take_while(|line| line.starts_with("///") || line.starts_with("#["))
            .any(|line| line.starts_with("///"));
        if is_limit && !documented {
            found.push((number, format!("{name} has no reason (`///`)")));
        }
    }
    found
}

/// The crates of this repository but the laboratory, as code and as dependencies name them.
const OUR_CRATES: [&str; 4] = [
    "turnpass",
    "turnpass_agent",
    "turnpass_gateway",
    "turnpass_cli",
];

fn laboratory(file: &File) -> Found {
    let Some(below) = file.path.strip_prefix("crates/turnpass-lab/") else {
        return Vec::new();
    };
    if below == "Cargo.toml" {
        let named = dependencies(
            file,
            &["dependencies", "dev-dependencies", "build-dependencies"],
        );
        return named
            .into_iter()
            .map(|(line, name)| (line, format!("the laboratory depends on {name}")))
            .collect();
    }
    let lines = file.code.lines().enumerate();
    lines
        .filter_map(|(index, code)| {
            let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
            let name = words.find(|word| OUR_CRATES.contains(word))?;
            let path = format!("{name}::");
            code.contains(&path)
                .then(|| (index + 1, format!("the laboratory names {name}")))
        })
        .collect()
}

fn arrows(file: &File) -> Found {
    let name = file.path.strip_prefix("crates/");
    let Some(name) = name.and_then(|path| path.strip_suffix("/Cargo.toml")) else {
        return Vec::new();
    };
    let may: &[&str] = match name {
        "turnpass" | "turnpass-lab" => &[],
        "turnpass-agent" | "turnpass-gateway" => &["turnpass"],
        _ => &[
            "turnpass",
            "turnpass-agent",
            "turnpass-gateway",
            "turnpass-lab",
        ],
    };
    let named = dependencies(file, &["dependencies", "build-dependencies"]).into_iter();
    let mut found: Found = named
        .filter(|(_, named)| !may.contains(&named.as_str()))
        .map(|(line, named)| (line, format!("{name} depends on {named}")))
        .collect();
    if !file.raw.contains("[lints]\nworkspace = true") {
        found.push((1, "the lints of the workspace do not hold here".to_owned()));
    }
    found
}

/// Crates of this repository that a manifest names in these tables, with the lines.
fn dependencies(file: &File, tables: &[&str]) -> Vec<(usize, String)> {
    let mut inside = false;
    let mut named = Vec::new();
    for (index, line) in file.raw.lines().enumerate() {
        if let Some(table) = line.strip_prefix('[') {
            inside = tables.contains(&table.trim_end_matches(']'));
        }
        let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
        let ours = OUR_CRATES.contains(&name.replace('-', "_").as_str()) || name == "turnpass-lab";
        if inside && ours {
            named.push((index + 1, name.to_owned()));
        }
    }
    named
}

fn machines(file: &File) -> Found {
    const HOSTS: [&str; 6] = [
        "registry.npmjs.org",
        "static.crates.io",
        "index.crates.io",
        "files.pythonhosted",
        "deb.debian.org",
        "proxy.golang.org",
    ];
    const PATHS: [&str; 5] = ["/work/", "/tmp/wt", "/root", "/farm/", "/home/user"];
    // Addresses in a lock file are cargo's own names of the index.
    if is_tidy(file) || file.path == "Cargo.lock" || file.path == "fuzz/Cargo.lock" {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (index, line) in file.raw.lines().enumerate() {
        if let Some(host) = HOSTS.iter().find(|host| line.contains(**host)) {
            found.push((index + 1, format!("names the host {host}")));
        }
        for path in PATHS {
            for (at, _) in line.match_indices(path) {
                let before = line[..at].chars().next_back();
                let after = line[at + path.len()..].chars().next();
                // Within another path or another word it is none of a machine's.
                let inner = before.is_some_and(|c| c.is_alphanumeric() || "._-/}$".contains(c));
                let longer = !path.ends_with('/') && after.is_some_and(char::is_alphanumeric);
                if !inner && !longer {
                    found.push((index + 1, format!("names the machine's path {path}")));
                }
            }
        }
    }
    found
}

fn credentials(file: &File) -> Found {
    const NAMES: [&str; 3] = [
        ".credentials.json",
        "Claude Code-credentials",
        "find-generic-password",
    ];
    if !file.is_rust() || is_tidy(file) || listed(NAMES_CREDENTIALS, &file.path) {
        return Vec::new();
    }
    file.texts
        .iter()
        .filter(|(_, text)| NAMES.iter().any(|name| text.contains(name)))
        .map(|(line, _)| (*line, "names where the CLI keeps credentials".to_owned()))
        .collect()
}

fn never_set(file: &File) -> Found {
    const NAMES: [&str; 2] = ["CLAUDE_CODE_ENTRYPOINT", "CLAUDE_CODE_RETRY_WATCHDOG"];
    if !file.is_rust() || listed(NAMES_NEVER_SET, &file.path) {
        return Vec::new();
    }
    file.product_texts()
        .filter(|(_, text)| NAMES.iter().any(|name| text.contains(name)))
        .map(|(line, text)| (line, format!("{text} is never set")))
        .collect()
}
