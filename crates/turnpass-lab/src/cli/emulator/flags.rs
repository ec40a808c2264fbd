//! The command line, read as the real CLI reads it.

use std::collections::BTreeMap;

/// Flags that take one value.
const VALUED: [&str; 37] = [
    "--agent",
    "--agents",
    "--append-system-prompt",
    "--append-system-prompt-file",
    "--autocompact",
    "--debug-file",
    "--effort",
    "--environment",
    "--fallback-model",
    "--initialize-fields",
    "--input-format",
    "--json-schema",
    "--max-budget-usd",
    "--max-thinking-tokens",
    "--max-turns",
    "--model",
    "--name",
    "-n",
    "--output-format",
    "--permission-mode",
    "--permission-prompt-tool",
    "--permission-prompts",
    "--plugin-dir",
    "--plugin-url",
    "--prompt-suggestions",
    "--remote-control-session-name-prefix",
    "--resume-session-at",
    "--session-id",
    "--setting-sources",
    "--settings",
    "--system-prompt",
    "--system-prompt-file",
    "--system-prompt-snapshot",
    "--thinking",
    "--thinking-display",
    "--tmux",
    "--worktree",
];

/// Flags that take values up to the next flag.
const MANY: [&str; 11] = [
    "--add-dir",
    "--allowedTools",
    "--allowed-tools",
    "--betas",
    "--channels",
    "--disallowedTools",
    "--disallowed-tools",
    "--file",
    "--mcp-config",
    "--plugins",
    "--tools",
];

/// Flags that may take a value.
const MAYBE: [&str; 5] = ["--resume", "-r", "--debug", "-d", "--from-pr"];

/// Flags that take nothing.
const BARE: [&str; 29] = [
    "-p",
    "--print",
    "--verbose",
    "--include-partial-messages",
    "--strict-mcp-config",
    "--disable-slash-commands",
    "--no-session-persistence",
    "--fork-session",
    "--continue",
    "-c",
    "--replay-user-messages",
    "--safe-mode",
    "--restricted",
    "--bare",
    "--brief",
    "--ide",
    "--chrome",
    "--no-chrome",
    "--include-hook-events",
    "--forward-subagent-text",
    "--dangerously-skip-permissions",
    "--allow-dangerously-skip-permissions",
    "--await-initialize",
    "--exclude-dynamic-system-prompt-sections",
    "--enable-auth-status",
    "--ax-screen-reader",
    "--bg",
    "--background",
    "--desktop",
];

/// The command line of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    values: BTreeMap<String, Vec<String>>,
    /// What stood outside any flag: the prompt, in the form without stream-json input.
    pub prompt: Option<String>,
}

/// Why the command line is refused; printed to stderr, exit code 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FlagsError(pub String);

impl Flags {
    /// Reads `argv`, without the name of the program.
    ///
    /// # Errors
    ///
    /// With the real CLI's words: an unknown flag, a missing value, or formats that do not go together.
    pub fn parse(argv: &[String]) -> Result<Flags, FlagsError> {
        let mut flags = Flags::default();
        let mut rest = argv.iter().peekable();
        while let Some(arg) = rest.next() {
            if !arg.starts_with('-') || arg == "-" {
                flags.prompt.get_or_insert_with(|| arg.clone());
                continue;
            }
            if arg == "--" {
                if let Some(prompt) = rest.next() {
                    flags.prompt.get_or_insert_with(|| prompt.clone());
                }
                continue;
            }
            let (name, given) = match arg.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (arg.as_str(), None),
            };
            let known = |list: &[&str]| list.contains(&name);
            let mut values: Vec<String> = given.into_iter().collect();
            if known(&VALUED) {
                if values.is_empty() {
                    let missing =
                        || FlagsError(format!("error: option '{name} <value>' argument missing"));
                    values.push(rest.next().ok_or_else(missing)?.clone());
                }
            } else if known(&MANY) {
                while let Some(value) = rest.next_if(|next| !next.starts_with('-')) {
                    values.push(value.clone());
                }
            } else if known(&MAYBE) {
                values.extend(rest.next_if(|next| !next.starts_with('-')).cloned());
            } else if !known(&BARE) {
                return Err(FlagsError(format!("error: unknown option '{name}'")));
            }
            flags
                .values
                .entry(name.to_owned())
                .or_default()
                .extend(values);
        }
        flags.check()?;
        Ok(flags)
    }

    fn check(&self) -> Result<(), FlagsError> {
        let refuse = |text: &str| Err(FlagsError(text.to_owned()));
        if self.input_format() == "stream-json" && self.output_format() != "stream-json" {
            return refuse("Error: --input-format=stream-json requires output-format=stream-json.");
        }
        if self.output_format() == "stream-json" && !self.has("--verbose") {
            return refuse(
                "Error: When using --print, --output-format=stream-json requires --verbose",
            );
        }
        Ok(())
    }

    /// Takes a flag out, as if it had not been given.
    pub(crate) fn forget(&mut self, name: &str) {
        self.values.remove(name);
    }

    /// Whether the flag was given.
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// The last value of a flag.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values.get(name)?.last().map(String::as_str)
    }

    /// Every value of a flag that takes many.
    pub fn values(&self, name: &str) -> &[String] {
        self.values.get(name).map_or(&[], Vec::as_slice)
    }

    /// `text` unless given.
    pub fn input_format(&self) -> &str {
        self.value("--input-format").unwrap_or("text")
    }

    /// `text` unless given.
    pub fn output_format(&self) -> &str {
        self.value("--output-format").unwrap_or("text")
    }

    /// The number after `--max-turns`.
    pub fn max_turns(&self) -> Option<u64> {
        self.value("--max-turns")?.parse().ok()
    }

    /// Whether the allow list lets this tool run: by name, or by `mcp__server__*`, or `mcp__server`.
    pub fn allows(&self, tool: &str) -> bool {
        let lists = ["--allowedTools", "--allowed-tools"];
        lists
            .iter()
            .flat_map(|list| self.values(list))
            .any(|entry| {
                entry
                    .split([',', ' '])
                    .filter(|one| !one.is_empty())
                    .any(|one| {
                        let whole = one == tool;
                        let prefix = one
                            .strip_suffix('*')
                            .is_some_and(|start| tool.starts_with(start));
                        let server = tool
                            .strip_prefix(one)
                            .is_some_and(|rest| rest.starts_with("__"));
                        whole || prefix || server
                    })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Flags, FlagsError> {
        Flags::parse(&line.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn the_suggested_command_line_is_read() {
        let flags = parse(&[
            "-p",
            "--input-format",
            "stream-json",
            "--output-format",
            "stream-json",
            "--verbose",
            "--setting-sources=",
            "--tools",
            "",
            "--allowedTools",
            "mcp__host__*",
            "--max-turns",
            "1",
        ])
        .unwrap();
        assert_eq!(flags.value("--setting-sources"), Some(""));
        assert_eq!(flags.values("--tools"), [""]);
        assert_eq!(flags.max_turns(), Some(1));
        assert!(flags.allows("mcp__host__x") && !flags.allows("mcp__other__x"));
        assert_eq!(flags.prompt, None);
    }

    #[test]
    fn a_prompt_is_what_stands_outside_the_flags() {
        assert_eq!(
            parse(&["-p", "hello", "--model", "opus"])
                .unwrap()
                .prompt
                .as_deref(),
            Some("hello")
        );
        assert_eq!(
            parse(&["-p", "--", "--x"]).unwrap().prompt.as_deref(),
            Some("--x")
        );
    }

    #[test]
    fn what_the_real_cli_refuses_is_refused_in_its_words() {
        let said = |line: &[&str]| parse(line).unwrap_err().0;
        assert_eq!(
            said(&["-p", "--nope", "x"]),
            "error: unknown option '--nope'"
        );
        assert!(said(&["--model"]).contains("argument missing"));
        assert!(said(&["-p", "--input-format", "stream-json"]).contains("requires output-format"));
        assert!(said(&["-p", "--output-format", "stream-json"]).contains("requires --verbose"));
    }
}
