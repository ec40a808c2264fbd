//! Where the CLI is: a pure decision over what a [`Probe`] sees, and a thin driver.
//!
//! The order is: the setting, `TURNPASS_CLAUDE_PATH`, the search path, `~/.local/bin`, npm's global folders, and then the
//! folders of common version and package tools, for a start by a daemon or a desktop that has a bare search path. The CLI
//! updates itself, so nothing here is remembered: every start looks anew.
//!
//! What a person named explicitly is taken or refused; it never falls through to something else.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::environment::Snapshot;
use crate::error::{Error, ErrorCode, Result};

/// The variable that names the executable.
pub const PATH_VARIABLE: &str = "TURNPASS_CLAUDE_PATH";

/// Bytes of a file's head that are looked at; the kernel reads as many of a script's first line.
const HEAD_BYTES: u64 = 256;

/// Which rule found the executable, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// The host's setting.
    Setting,
    /// [`PATH_VARIABLE`].
    Variable,
    /// The search path.
    SearchPath,
    /// `~/.local/bin`, where the CLI's own installer puts it.
    LocalBin,
    /// npm's global folder: `$NPM_CONFIG_PREFIX/bin`, `~/.npm-global/bin`, `%APPDATA%\npm`.
    NpmGlobal,
    /// nvm: the newest `$NVM_DIR/versions/node/vX/bin` that has it.
    Nvm,
    /// Volta: `$VOLTA_HOME/bin`.
    Volta,
    /// mise: `$MISE_DATA_DIR/shims`.
    Mise,
    /// Homebrew on macOS and Linux, and `/usr/local/bin`.
    Homebrew,
}

impl Rule {
    /// The rule in words, for `doctor`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Setting => "the setting",
            Self::Variable => PATH_VARIABLE,
            Self::SearchPath => "PATH",
            Self::LocalBin => "~/.local/bin",
            Self::NpmGlobal => "npm's global folder",
            Self::Nvm => "nvm",
            Self::Volta => "Volta",
            Self::Mise => "mise",
            Self::Homebrew => "Homebrew",
        }
    }
}

/// The operating system whose rules apply; a value, so that each one's rules are tested on every system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// ELF programs.
    Linux,
    /// Mach-O programs.
    MacOs,
    /// PE programs and `.cmd` shims.
    Windows,
}

impl Platform {
    /// The one that this program was built for.
    pub const fn here() -> Self {
        if cfg!(windows) {
            Self::Windows
        } else if cfg!(target_os = "macos") {
            Self::MacOs
        } else {
            Self::Linux
        }
    }

    fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Linux | Self::MacOs => &["claude"],
            // `claude` and `claude.ps1` beside them are for other shells.
            Self::Windows => &["claude.exe", "claude.cmd"],
        }
    }

    /// The npm packages that hold the native program, likeliest first.
    fn packages(self) -> &'static [&'static str] {
        let arm = cfg!(target_arch = "aarch64");
        match (self, arm) {
            (Self::Linux, false) => &["claude-code-linux-x64", "claude-code-linux-x64-musl"],
            (Self::Linux, true) => &["claude-code-linux-arm64", "claude-code-linux-arm64-musl"],
            (Self::MacOs, false) => &["claude-code-darwin-x64"],
            (Self::MacOs, true) => &["claude-code-darwin-arm64", "claude-code-darwin-x64"],
            (Self::Windows, false) => &["claude-code-win32-x64"],
            (Self::Windows, true) => &["claude-code-win32-arm64", "claude-code-win32-x64"],
        }
    }

    fn native_name(self) -> &'static str {
        match self {
            Self::Linux | Self::MacOs => "claude",
            Self::Windows => "claude.exe",
        }
    }

    fn is_native(self, head: &[u8]) -> bool {
        match self {
            Self::Linux => head.starts_with(b"\x7fELF"),
            Self::MacOs => [
                [0xcf, 0xfa, 0xed, 0xfe],
                [0xce, 0xfa, 0xed, 0xfe],
                [0xca, 0xfe, 0xba, 0xbe],
            ]
            .iter()
            .any(|magic| head.starts_with(magic)),
            Self::Windows => head.starts_with(b"MZ"),
        }
    }
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// Nothing, or nothing that may be looked at.
    Missing,
    /// A link to nothing.
    Dangling,
    /// A directory.
    Directory,
    /// A file.
    File {
        /// Whether this user may execute it.
        executable: bool,
        /// Its first bytes.
        head: Vec<u8>,
    },
}

/// How the decision looks at the file system.
pub trait Probe {
    /// What is at the path, links followed.
    fn node(&self, path: &Path) -> Node;

    /// The path without links, if there is something.
    fn canonical(&self, path: &Path) -> Option<PathBuf>;

    /// The names in a directory; none when it cannot be read.
    fn names(&self, dir: &Path) -> Vec<String>;
}

/// Why a file that was found cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// A link whose target is gone.
    #[error("is a link to nothing; install the CLI again")]
    Dangling,
    /// A directory.
    #[error("is a directory; name the program in it")]
    Directory,
    /// No permission.
    #[error("may not be executed; check its permissions")]
    NotExecutable,
    /// Neither a program for this machine nor a script.
    #[error(
        "is installed but not runnable (exec format): a placeholder whose install script did not run, or a program for \
         another machine; install the CLI again"
    )]
    ExecFormat,
    /// A script whose interpreter is not there.
    #[error(
        "is a script for {0}, which was not found; install it or install the CLI's native program"
    )]
    Interpreter(String),
    /// A batch file without the program that it stands for.
    #[error(
        "is a batch file, which cannot take our arguments, and the native program is not beside it; install the CLI again"
    )]
    Shim,
}

/// A file that was passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Where it is.
    pub path: PathBuf,
    /// The rule that led to it.
    pub rule: Rule,
    /// What is wrong with it.
    pub why: Unusable,
}

/// The executable that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executable {
    /// What to start. Links are kept, since a script's interpreter is beside the link.
    pub path: PathBuf,
    /// The rule that found it.
    pub rule: Rule,
    /// Better rules' finds that cannot run, for `doctor`.
    pub skipped: Vec<Skipped>,
}

/// Where to look, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// What a person named, with the rule by which.
    pub named: Option<(Rule, PathBuf)>,
    /// Folders, in order. Relative ones are passed over: they would mean another program in every working directory.
    pub folders: Vec<(Rule, PathBuf)>,
    /// nvm's `versions/node`.
    pub nvm: Option<PathBuf>,
    /// Folders after nvm's.
    pub later: Vec<(Rule, PathBuf)>,
    /// The search path that a child will have, for the interpreters of scripts.
    pub search: Vec<PathBuf>,
}

impl Places {
    /// From the host's setting and our environment.
    pub fn new(setting: Option<&Path>, ours: &Snapshot, platform: Platform) -> Self {
        let var = |name: &str| ours.get(name).map(PathBuf::from);
        let home = var(if platform == Platform::Windows {
            "USERPROFILE"
        } else {
            "HOME"
        });
        let at_home = |rest: &str| home.as_ref().map(|home| home.join(rest));
        let search: Vec<_> = ours
            .get("PATH")
            .map(|path| std::env::split_paths(path).collect())
            .unwrap_or_default();

        let named = setting
            .map(|path| (Rule::Setting, path.to_owned()))
            .or(var(PATH_VARIABLE).map(|path| (Rule::Variable, path)));
        let mut folders: Vec<_> = search
            .iter()
            .map(|path| (Rule::SearchPath, path.clone()))
            .collect();
        let mut add = |rule, path: Option<PathBuf>| folders.extend(path.map(|path| (rule, path)));
        add(Rule::LocalBin, at_home(".local/bin"));
        if platform == Platform::Windows {
            add(Rule::NpmGlobal, var("APPDATA").map(|path| path.join("npm")));
        } else {
            add(
                Rule::NpmGlobal,
                var("NPM_CONFIG_PREFIX").map(|path| path.join("bin")),
            );
            add(Rule::NpmGlobal, at_home(".npm-global/bin"));
        }
        let nvm = var("NVM_DIR")
            .or(at_home(".nvm"))
            .map(|path| path.join("versions/node"));
        let mut later = Vec::new();
        let mut add = |rule, path: Option<PathBuf>| later.extend(path.map(|path| (rule, path)));
        add(
            Rule::Volta,
            var("VOLTA_HOME")
                .or(at_home(".volta"))
                .map(|path| path.join("bin")),
        );
        add(
            Rule::Mise,
            var("MISE_DATA_DIR")
                .or(at_home(".local/share/mise"))
                .map(|path| path.join("shims")),
        );
        if platform != Platform::Windows {
            for brew in [
                "/opt/homebrew/bin",
                "/usr/local/bin",
                "/home/linuxbrew/.linuxbrew/bin",
            ] {
                add(Rule::Homebrew, Some(brew.into()));
            }
        }
        Self {
            named,
            folders,
            nvm,
            later,
            search,
        }
    }
}

/// Finds the executable.
///
/// # Errors
///
/// `executable_missing` when no rule finds anything, or an explicit path names nothing; `executable_unusable`, with the
/// file, the rule and the remedy, when what was found cannot run.
pub fn locate(places: &Places, platform: Platform, probe: &impl Probe) -> Result<Executable> {
    if let Some((rule, path)) = &places.named {
        return explicit(*rule, path, places, platform, probe);
    }
    let nvm = places.nvm.iter().flat_map(|root| nvm_folders(root, probe));
    let folders = places
        .folders
        .iter()
        .cloned()
        .chain(nvm)
        .chain(places.later.iter().cloned());
    let mut skipped: Vec<Skipped> = Vec::new();
    for (rule, folder) in folders.filter(|(_, folder)| folder.is_absolute()) {
        for name in platform.file_names() {
            let path = folder.join(name);
            match usable(&path, places, platform, probe) {
                None => {}
                Some(Ok(path)) => {
                    return Ok(Executable {
                        path,
                        rule,
                        skipped,
                    });
                }
                Some(Err(why)) if skipped.iter().all(|known| known.path != path) => {
                    skipped.push(Skipped { path, rule, why });
                }
                Some(Err(_)) => {}
            }
        }
    }
    Err(match skipped.into_iter().next() {
        Some(first) => unusable_error(&first.path, first.rule, &first.why),
        None => Error::new(
            ErrorCode::ExecutableMissing,
            format!(
                "`claude` is neither on PATH nor where its installers put it ({PATH_VARIABLE} is not set)"
            ),
        ),
    })
}

fn explicit(
    rule: Rule,
    path: &Path,
    places: &Places,
    platform: Platform,
    probe: &impl Probe,
) -> Result<Executable> {
    let missing = |what: &str| {
        Error::new(
            ErrorCode::ExecutableMissing,
            format!("{} (from {}) {what}", path.display(), rule.as_str()),
        )
    };
    if !path.is_absolute() {
        return Err(missing("is not an absolute path"));
    }
    match usable(path, places, platform, probe) {
        None => Err(missing("does not exist")),
        Some(Ok(path)) => Ok(Executable {
            path,
            rule,
            skipped: Vec::new(),
        }),
        Some(Err(why)) => Err(unusable_error(path, rule, &why)),
    }
}

fn unusable_error(path: &Path, rule: Rule, why: &Unusable) -> Error {
    Error::new(
        ErrorCode::ExecutableUnusable,
        format!("{} (from {}) {why}", path.display(), rule.as_str()),
    )
}

/// The folders of nvm's versions, newest first.
fn nvm_folders(root: &Path, probe: &impl Probe) -> Vec<(Rule, PathBuf)> {
    let version = |name: &str| -> Option<Vec<u64>> {
        name.strip_prefix('v')?
            .split('.')
            .map(|part| part.parse().ok())
            .collect()
    };
    let mut versions: Vec<_> = probe
        .names(root)
        .into_iter()
        .filter_map(|name| Some((version(&name)?, name)))
        .collect();
    versions.sort_unstable_by(|one, other| other.cmp(one));
    let folder = |(_, name): (_, String)| (Rule::Nvm, root.join(name).join("bin"));
    versions.into_iter().map(folder).collect()
}

/// Nothing there, something to start, or something that cannot be started.
fn usable(
    path: &Path,
    places: &Places,
    platform: Platform,
    probe: &impl Probe,
) -> Option<Result<PathBuf, Unusable>> {
    let (executable, head) = match probe.node(path) {
        Node::Missing => return None,
        Node::Dangling => return Some(Err(Unusable::Dangling)),
        Node::Directory => return Some(Err(Unusable::Directory)),
        Node::File { executable, head } => (executable, head),
    };
    let is_shim = path.extension().is_some_and(|extension| {
        ["cmd", "bat"]
            .iter()
            .any(|batch| extension.eq_ignore_ascii_case(batch))
    });
    if platform == Platform::Windows && is_shim {
        return Some(in_package(path, platform, probe).ok_or(Unusable::Shim));
    }
    if !executable {
        return Some(Err(Unusable::NotExecutable));
    }
    if platform.is_native(&head) {
        return Some(Ok(path.to_owned()));
    }
    if platform != Platform::Windows && head.starts_with(b"#!") {
        return Some(match missing_interpreter(&head, path, places, probe) {
            None => Ok(path.to_owned()),
            Some(interpreter) => Err(Unusable::Interpreter(interpreter)),
        });
    }
    // The npm package's placeholder, a text file without `#!`: the program is in the package beside it.
    Some(in_package(path, platform, probe).ok_or(Unusable::ExecFormat))
}

/// The native program of the npm package that a shim, link or placeholder belongs to.
fn in_package(path: &Path, platform: Platform, probe: &impl Probe) -> Option<PathBuf> {
    let real = probe.canonical(path).unwrap_or_else(|| path.to_owned());
    let scope = Path::new("node_modules").join("@anthropic-ai");
    let beside = real.parent().map(|folder| folder.join(&scope));
    // `SCOPE/claude-code/bin/claude.exe` belongs to SCOPE.
    let above = real
        .ancestors()
        .find(|folder| folder.ends_with(&scope))
        .map(Path::to_owned);
    for scope in above.into_iter().chain(beside) {
        let wrapper = scope.join("claude-code");
        let nested = wrapper.join("node_modules").join("@anthropic-ai");
        let packaged = platform
            .packages()
            .iter()
            .flat_map(|package| [scope.join(package), nested.join(package)])
            .map(|folder| folder.join(platform.native_name()));
        for candidate in std::iter::once(wrapper.join("bin").join("claude.exe")).chain(packaged) {
            match probe.node(&candidate) {
                Node::File {
                    executable: true,
                    head,
                } if platform.is_native(&head) => return Some(candidate),
                _ => {}
            }
        }
    }
    None
}

/// The interpreter of a script's first line, when it is not there. `/usr/bin/env NAME` looks for NAME where the child
/// will: beside the script first.
fn missing_interpreter(
    head: &[u8],
    script: &Path,
    places: &Places,
    probe: &impl Probe,
) -> Option<String> {
    let line = head[2..]
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    let line = String::from_utf8_lossy(line).into_owned();
    let mut words = line.split_ascii_whitespace();
    let program = words.next().unwrap_or_default();
    let runs = |path: &Path| {
        matches!(
            probe.node(path),
            Node::File {
                executable: true,
                ..
            }
        )
    };
    if !runs(Path::new(program)) {
        return Some(program.to_owned());
    }
    if !program.ends_with("/env") {
        return None;
    }
    let name = words.find(|word| !word.starts_with('-') && !word.contains('='))?;
    let own = script.parent().map(Path::to_owned);
    let found = own
        .iter()
        .chain(&places.search)
        .any(|folder| runs(&folder.join(name)));
    (!found).then(|| name.to_owned())
}

/// The file system as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Probe for Disk {
    fn node(&self, path: &Path) -> Node {
        let Ok(meta) = fs::metadata(path) else {
            let is_link = fs::symlink_metadata(path).is_ok();
            return if is_link {
                Node::Dangling
            } else {
                Node::Missing
            };
        };
        if meta.is_dir() {
            return Node::Directory;
        }
        if !meta.is_file() {
            // Reading a FIFO or device could block; it is no program either.
            return Node::File {
                executable: false,
                head: Vec::new(),
            };
        }
        let mut head = Vec::new();
        // An executable that may not be read is judged by its start.
        let _ = fs::File::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
        let executable = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
        Node::File { executable, head }
    }

    fn canonical(&self, path: &Path) -> Option<PathBuf> {
        fs::canonicalize(path).ok()
    }

    fn names(&self, dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }
}

/// Finds the executable on this machine, anew. Blocking, a few dozen looks at the file system.
///
/// # Errors
///
/// As [`locate`].
pub fn locate_here(setting: Option<&Path>, ours: &Snapshot) -> Result<Executable> {
    let platform = Platform::here();
    locate(&Places::new(setting, ours, platform), platform, &Disk)
}

#[cfg(test)]
#[path = "locate_tests.rs"]
mod tests;
