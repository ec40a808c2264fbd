//! The real CLIs that can be run here.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{MadeUpHome, RefusingProxy};

/// With this variable set to 1 a test that needs the real CLI fails where it is missing.
pub const REQUIRE_REAL_CLI: &str = "TURNPASS_REQUIRE_REAL_CLI";

/// One installed version of the real CLI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealCli {
    /// As its folder or its `--version` says, such as `2.1.332`.
    pub version: String,
    /// The program.
    pub path: PathBuf,
}

impl RealCli {
    /// The versions that `conformance/install` has fetched, oldest first.
    pub fn find_all(conformance_dir: &Path) -> Vec<RealCli> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(conformance_dir)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(version) = name.strip_prefix("cli-") else {
                continue;
            };
            let scope = entry.path().join("node_modules/@anthropic-ai");
            let program = platforms()
                .map(|platform| scope.join(format!("claude-code-{platform}")).join("claude"))
                .find(|path| path.is_file());
            if let Some(path) = program {
                found.push(RealCli {
                    version: version.to_owned(),
                    path,
                });
            }
        }
        found.sort_by_key(|cli| numbers(&cli.version));
        found
    }

    /// Like [`RealCli::find_all`], for tests: where there is none it says so on stderr, unmistakably.
    ///
    /// # Panics
    ///
    /// When there is none and `TURNPASS_REQUIRE_REAL_CLI=1`.
    #[allow(clippy::panic, clippy::print_stderr)]
    pub fn for_tests(conformance_dir: &Path, test: &str) -> Vec<RealCli> {
        let found = RealCli::find_all(conformance_dir);
        if found.is_empty() {
            let said = format!(
                "NOT TESTED: {test} needs the real CLI, and {} has none; run conformance/install",
                conformance_dir.display()
            );
            assert!(
                std::env::var(REQUIRE_REAL_CLI).as_deref() != Ok("1"),
                "{said}"
            );
            eprintln!(
                "==================================================\n{said}\n=================================================="
            );
        }
        found
    }

    /// The `claude` on the path, if it answers `--version` as the real one does.
    pub fn installed() -> Option<RealCli> {
        let path = std::env::var_os("PATH")?;
        let program = std::env::split_paths(&path)
            .map(|dir| dir.join("claude"))
            .find(|file| file.is_file())?;
        let answer = Command::new(&program).arg("--version").output().ok()?;
        let answer = String::from_utf8_lossy(&answer.stdout).into_owned();
        let version = answer.trim().strip_suffix(" (Claude Code)")?.to_owned();
        Some(RealCli {
            version,
            path: program,
        })
    }

    /// A command with a cleared environment: the home, the proxy that refuses, and, for the base shape,
    /// the address of the upstream. The temporary directory is private to the home.
    ///
    /// # Errors
    ///
    /// The temporary directory cannot be made.
    pub fn command(
        &self,
        home: &MadeUpHome,
        proxy: &RefusingProxy,
        upstream: Option<&str>,
    ) -> io::Result<Command> {
        let temporary = home.path().join("tmp");
        std::fs::create_dir_all(&temporary)?;
        let mut command = Command::new(&self.path);
        command
            .env_clear()
            .envs(home.environment())
            .envs(proxy.environment())
            .env("TMPDIR", temporary);
        if let Some(url) = upstream {
            command.env("ANTHROPIC_BASE_URL", url);
        }
        Ok(command)
    }
}

/// The names of the platform packages that can run here; the second is for musl.
fn platforms() -> impl Iterator<Item = String> {
    let os = if cfg!(target_os = "macos") {
        "darwin"
    } else {
        "linux"
    };
    let arch = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "x64"
    };
    ["", "-musl"]
        .into_iter()
        .map(move |end| format!("{os}-{arch}{end}"))
}

fn numbers(version: &str) -> Vec<u64> {
    version
        .split('.')
        .map(|part| part.parse().unwrap_or(0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_by_folder_and_sorted_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let platform = platforms().next().unwrap();
        for version in ["2.1.1000", "2.1.332"] {
            let at = dir.path().join(format!(
                "cli-{version}/node_modules/@anthropic-ai/claude-code-{platform}"
            ));
            std::fs::create_dir_all(&at).unwrap();
            std::fs::write(at.join("claude"), "").unwrap();
        }
        std::fs::create_dir_all(dir.path().join("cli-9.9.9")).unwrap();
        let found: Vec<String> = RealCli::find_all(dir.path())
            .into_iter()
            .map(|cli| cli.version)
            .collect();
        assert_eq!(found, ["2.1.332", "2.1.1000"]);
    }
}
