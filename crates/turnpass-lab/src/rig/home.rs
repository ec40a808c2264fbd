//! Throw-away homes for the real CLI.

use std::fs;
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// What the made-up sign-in of a home looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignIn {
    /// A claude.ai Max plan whose tokens are made up and far from expiry.
    SignedIn,
    /// Nothing stored.
    SignedOut,
    /// Like the first, but expired: the CLI tries to renew it before it does anything.
    Expired,
}

/// A home directory that holds a made-up sign-in and nothing of anybody's.
#[derive(Debug, Clone)]
pub struct MadeUpHome {
    path: PathBuf,
}

/// Configuration that must have no effect, and how to tell whether it had.
#[derive(Debug, Clone)]
pub struct Planted {
    marks: PathBuf,
    words: Vec<String>,
}

/// A variable that the planted settings set, and its value; the first one is visible upstream as `max_tokens`.
const PLANTED_MAX_TOKENS: u64 = 1111;

impl MadeUpHome {
    /// A signed-in home in `dir`, which is created.
    ///
    /// # Errors
    ///
    /// Whatever the file system says.
    pub fn new(dir: &Path) -> io::Result<MadeUpHome> {
        MadeUpHome::with(dir, SignIn::SignedIn)
    }

    /// A home in `dir` with this sign-in.
    ///
    /// # Errors
    ///
    /// Whatever the file system says.
    pub fn with(dir: &Path, sign_in: SignIn) -> io::Result<MadeUpHome> {
        let settings = dir.join(".claude");
        fs::create_dir_all(&settings)?;
        fs::set_permissions(&settings, fs::Permissions::from_mode(0o700))?;
        fs::write(
            dir.join(".claude.json"),
            json!({"hasCompletedOnboarding": true}).to_string(),
        )?;
        let home = MadeUpHome {
            path: dir.to_path_buf(),
        };
        let expires_at_ms = match sign_in {
            SignIn::SignedOut => return Ok(home),
            SignIn::SignedIn => 4_102_444_800_000_u64, // the year 2100
            SignIn::Expired => 1_000_000_000_000,      // 2001
        };
        let made_up = json!({"claudeAiOauth": {
            "accessToken": "sk-ant-oat01-MADE-UP", "refreshToken": "sk-ant-ort01-MADE-UP",
            "expiresAt": expires_at_ms,
            "scopes": ["user:inference", "user:profile", "user:sessions:claude_code"],
            "subscriptionType": "max", "rateLimitTier": "default_claude_max_5x",
        }});
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = file.open(settings.join(".credentials.json"))?;
        io::Write::write_all(&mut file, made_up.to_string().as_bytes())?;
        Ok(home)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The environment of a hermetic run: this home, a plain path, and nothing else of the caller's.
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("HOME", self.path.to_string_lossy().as_ref()),
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("DISABLE_TELEMETRY", "1"),
            ("DISABLE_AUTOUPDATER", "1"),
        ]
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
    }

    /// Plants hooks, instructions, MCP servers, a plugin, variables, commands, skills, agents, rules and
    /// memory into this home and into `project`. Each one that takes effect leaves a mark.
    ///
    /// # Errors
    ///
    /// Whatever the file system says.
    pub fn plant(&self, project: &Path) -> io::Result<Planted> {
        let marks = self.path.join("marks");
        fs::create_dir_all(&marks)?;
        let mut planted = Planted {
            marks,
            words: Vec::new(),
        };
        for (place, dir) in [("user", self.path.as_path()), ("project", project)] {
            planted.settings(place, &dir.join(".claude"))?;
            planted.texts(place, dir)?;
        }
        planted.servers(&self.path.join(".claude.json"), project)?;
        let folder: String = project
            .to_string_lossy()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        let memory = self
            .path
            .join(".claude/projects")
            .join(folder)
            .join("memory");
        planted.text("memory", &memory.join("MEMORY.md"))?;
        Ok(planted)
    }
}

impl Planted {
    /// A shell command that leaves the mark `name`.
    fn mark(&self, name: &str) -> String {
        format!("touch '{}'", self.marks.join(name).display())
    }

    fn text(&mut self, name: &str, path: &Path) -> io::Result<()> {
        let word = format!("PLANTED-WORD-{name}");
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        let front = "---\nname: planted\ndescription: planted\n---\n";
        let front = if name.contains("skill") || name.contains("agent-") {
            front
        } else {
            ""
        };
        fs::write(path, format!("{front}Always say {word}.\n"))?;
        self.words.push(word);
        Ok(())
    }

    fn texts(&mut self, place: &str, dir: &Path) -> io::Result<()> {
        let files = [
            (
                "instructions",
                if place == "user" {
                    ".claude/CLAUDE.md"
                } else {
                    "CLAUDE.md"
                },
            ),
            ("local", "CLAUDE.local.md"),
            ("agents-md", "AGENTS.md"),
            ("rule", ".claude/rules/planted.md"),
            ("command", ".claude/commands/planted.md"),
            ("skill", ".claude/skills/planted/SKILL.md"),
            ("agent-", ".claude/agents/planted.md"),
            ("style", ".claude/output-styles/planted.md"),
        ];
        for (name, file) in files {
            self.text(&format!("{place}-{name}"), &dir.join(file))?;
        }
        Ok(())
    }

    fn settings(&self, place: &str, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        let hook = |event: &str| {
            let command = self.mark(&format!("{place}-hook-{event}"));
            json!([{"matcher": "", "hooks": [{"type": "command", "command": command}]}])
        };
        let settings = json!({
            "hooks": {
                "SessionStart": hook("SessionStart"), "UserPromptSubmit": hook("UserPromptSubmit"),
                "PreToolUse": hook("PreToolUse"), "Stop": hook("Stop"), "SessionEnd": hook("SessionEnd"),
            },
            "env": {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": PLANTED_MAX_TOKENS.to_string(), "PLANTED": "1"},
            "outputStyle": "planted",
            "enabledPlugins": {"planted@planted": true},
            "enableAllProjectMcpServers": true,
            "statusLine": {"type": "command", "command": self.mark(&format!("{place}-status-line"))},
            "apiKeyHelper": self.mark(&format!("{place}-api-key-helper")),
        });
        fs::write(dir.join("settings.json"), settings.to_string())?;
        fs::write(dir.join("settings.local.json"), settings.to_string())
    }

    fn servers(&self, user: &Path, project: &Path) -> io::Result<()> {
        let server = |name: &str| {
            let command = self.mark(name);
            json!({"planted": {"type": "stdio", "command": "/bin/sh", "args": ["-c", command]}})
        };
        let known: Value = serde_json::from_str(&fs::read_to_string(user)?).unwrap_or_default();
        let mut known = known.as_object().cloned().unwrap_or_default();
        known.insert("mcpServers".to_owned(), server("user-mcp"));
        let trusted = json!({project.to_string_lossy(): {
            "hasTrustDialogAccepted": true, "mcpServers": server("local-mcp"),
        }});
        known.insert("projects".to_owned(), trusted);
        fs::write(user, Value::Object(known).to_string())?;
        let shared = json!({"mcpServers": server("project-mcp")});
        fs::write(project.join(".mcp.json"), shared.to_string())
    }

    /// The names of what ran.
    pub fn ran(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.marks)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// What of the planted text, or of the planted variables, shows in a request body.
    pub fn shows_in(&self, body: &Value) -> Vec<String> {
        let text = body.to_string();
        let mut found: Vec<String> = self
            .words
            .iter()
            .filter(|word| text.contains(word.as_str()))
            .cloned()
            .collect();
        if body["max_tokens"] == PLANTED_MAX_TOKENS {
            found.push("user variables".to_owned());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_says_what_its_sign_in_is_and_keeps_it_private() {
        let dir = tempfile::tempdir().unwrap();
        let home = MadeUpHome::with(dir.path(), SignIn::Expired).unwrap();
        let file = home.path().join(".claude/.credentials.json");
        assert_eq!(
            fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let made_up: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        assert!(
            made_up["claudeAiOauth"]["accessToken"]
                .as_str()
                .unwrap()
                .contains("MADE-UP")
        );
        let other = tempfile::tempdir().unwrap();
        MadeUpHome::with(other.path(), SignIn::SignedOut).unwrap();
        assert!(!other.path().join(".claude/.credentials.json").exists());
    }

    #[test]
    fn planted_things_are_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let project = tempfile::tempdir().unwrap();
        let planted = MadeUpHome::new(dir.path())
            .unwrap()
            .plant(project.path())
            .unwrap();
        assert!(planted.ran().is_empty());
        let done = std::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(planted.mark("x"))
            .status();
        assert!(done.unwrap().success());
        assert_eq!(planted.ran(), ["x"]);
        let body = json!({"max_tokens": 1111, "messages": ["Always say PLANTED-WORD-user-rule."]});
        assert_eq!(
            planted.shows_in(&body),
            ["PLANTED-WORD-user-rule", "user variables"]
        );
    }
}
