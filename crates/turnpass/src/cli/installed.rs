//! The person's installed CLI, found and checked anew for each start, since it updates itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ask::{Question, ask};
use super::auth::{AUTH_LIMIT, AUTH_STATUS, Asker, AuthCheck, AuthStatus, SignedIn, decode};
use super::environment::{Base, Environment, InheritedCredentials, Snapshot};
use super::inquiry::Inquiry;
use super::launch::{self, Ground};
use super::locate::{Executable, locate_here};
use super::private_dir::{PrivateDir, roots, sweep};
use super::version::{Known, Version, Versions};
use crate::certify::Standing;
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ChildGroup, Spawn, StdinMode};

/// Where the CLI is and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The executable, and the rule that found it.
    pub executable: Executable,
    /// Its version, not below the floor.
    pub version: Version,
    /// What it was certified to do. Looked up once for each program file as it is.
    pub standing: Arc<Standing>,
}

/// The environment of a provider's children: this process's, with a laboratory run's own home.
///
/// # Errors
///
/// `request_invalid` for a laboratory home without a laboratory upstream, `working_directory` for one that is not there.
pub(crate) fn surroundings(is_laboratory: bool, lab_home: Option<&Path>) -> Result<Snapshot> {
    let mut snapshot = Snapshot::of_this_process();
    let Some(home) = lab_home else {
        return Ok(snapshot);
    };
    if !is_laboratory {
        let what = "a laboratory home goes with a laboratory upstream";
        return Err(Error::new(ErrorCode::RequestInvalid, what));
    }
    if !home.is_dir() {
        // The CLI would make it, and then say that it is signed out.
        let what = format!("the laboratory home {} is no directory", home.display());
        return Err(Error::new(ErrorCode::WorkingDirectory, what));
    }
    snapshot.set("HOME", home);
    snapshot.remove("CLAUDE_CONFIG_DIR");
    Ok(snapshot)
}

/// The installed CLI. One value for each provider; its checks are shared by all callers.
#[derive(Debug)]
pub struct Installed {
    search: Arc<Search>,
    versions: Versions,
    sign_in: AuthCheck,
    swept: AtomicBool,
}

/// Where to look, and in which environment to ask.
#[derive(Debug)]
struct Search {
    setting: Option<PathBuf>,
    snapshot: Snapshot,
    inherited: InheritedCredentials,
}

impl Installed {
    /// The CLI at `setting`, or the one that a search finds, in the environment that `snapshot` describes.
    pub fn new(
        setting: Option<PathBuf>,
        snapshot: Snapshot,
        inherited: InheritedCredentials,
    ) -> Self {
        let search = Arc::new(Search {
            setting,
            snapshot,
            inherited,
        });
        let sign_in = AuthCheck::new(Search::asker(&search));
        Self {
            search,
            versions: Versions::default(),
            sign_in,
            swept: AtomicBool::new(false),
        }
    }

    /// With the certificates that are kept in a state directory; without one, only what was certified before this build was
    /// released counts.
    #[must_use]
    pub fn with_certificates(mut self, state_dir: Option<&Path>) -> Self {
        self.versions = Versions::with_certificates(state_dir);
        self
    }

    /// Finds the CLI, checks its version and looks up its standing. Starts a process, and reads of the file, only when it has changed
    /// since the last time.
    ///
    /// Has to be called within a tokio runtime. Dropping the future ends a process that it started.
    ///
    /// # Errors
    ///
    /// `executable_missing`, `executable_unusable`, `version_invalid`, `version_too_old`, `inherited_credentials`.
    pub async fn checked(&self) -> Result<Found> {
        self.sweep_once();
        let executable = self.search.locate()?;
        let Known { version, standing } = match self.versions.known(&executable.path) {
            Some(known) => known,
            None => {
                let (dir, environment) = self.search.place(&executable.path)?;
                let cwd = dir.work();
                self.versions
                    .of(&executable.path, &environment, &cwd, dir)
                    .await?
            }
        };
        Ok(Found {
            executable,
            version,
            standing,
        })
    }

    /// The sign-in: a kept success, or a check that is shared by everybody who asks meanwhile.
    ///
    /// # Errors
    ///
    /// `auth`, `auth_ineligible` or `auth_unknown`; `closed` after [`Installed::shutdown`].
    pub async fn signed_in(&self) -> Result<SignedIn> {
        self.sign_in.acquire().await
    }

    /// A check that believes no earlier answer and keeps none, for the gate; its owner shuts it down.
    pub fn fresh_sign_in(&self) -> AuthCheck {
        AuthCheck::fresh(Search::asker(&self.search))
    }

    /// Starts a process that is only asked, in a private directory of its own.
    ///
    /// # Errors
    ///
    /// Those of [`Installed::checked`] and [`Inquiry::start`].
    pub async fn inquire(&self) -> Result<Inquiry> {
        let found = self.checked().await?;
        let (dir, environment) = self.search.place(&found.executable.path)?;
        let ground = Ground {
            program: found.executable.path,
            environment,
            dir: dir.path().to_owned(),
            cwd: dir.work(),
            learned_plugins: BTreeSet::new(),
        };
        Inquiry::start(launch::asked(&ground)?, dir)
    }

    /// Starts a command of the CLI that a person takes part in, in a private directory of its own.
    ///
    /// # Errors
    ///
    /// Those of [`Installed::checked`], and what the start fails with.
    pub(crate) async fn command(&self, argv: &[&str]) -> Result<(ChildGroup, PrivateDir)> {
        let found = self.checked().await?;
        let (dir, environment) = self.search.place(&found.executable.path)?;
        let group = ChildGroup::spawn(&Spawn {
            program: found.executable.path,
            argv: argv.iter().map(Into::into).collect(),
            env: environment.into_pairs(),
            cwd: dir.work(),
            stdin: StdinMode::QUEUE,
            orphaned_dir: Some(dir.path().to_owned()),
        })?;
        Ok((group, dir))
    }

    /// The latest result of the sign-in check, without asking, and whether a live request was refused since.
    pub fn last_sign_in(&self) -> Option<(AuthStatus, bool)> {
        self.sign_in.last()
    }

    /// Drops what is known of the sign-in, after the service refused it.
    pub fn forget_sign_in(&self) {
        self.sign_in.forget();
    }

    /// Ends checks that are under way: when it returns, their processes are killed.
    pub async fn shutdown(&self) {
        self.sign_in.shutdown().await;
    }

    /// Directories that a killed host left are removed beside the first start. Nobody waits for it.
    fn sweep_once(&self) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        let roots = roots(&self.search.snapshot);
        tokio::task::spawn_blocking(move || {
            for root in roots {
                sweep(&root);
            }
        });
    }
}

impl Search {
    fn asker(search: &Arc<Self>) -> Asker {
        let search = Arc::clone(search);
        Box::new(move || {
            let search = Arc::clone(&search);
            Box::pin(async move { search.ask_sign_in().await })
        })
    }

    fn locate(&self) -> Result<Executable> {
        locate_here(self.setting.as_deref(), &self.snapshot)
    }

    /// A private directory, and the environment of a short command in it.
    fn place(&self, program: &Path) -> Result<(PrivateDir, Environment)> {
        let dir = PrivateDir::create(&roots(&self.snapshot))?;
        let tmp = dir.tmp();
        let base = Base {
            program,
            tmp: &tmp,
            time_zone: None,
            inherited: self.inherited,
        };
        let environment = Environment::build(&self.snapshot, base)?;
        Ok((dir, environment))
    }

    async fn ask_sign_in(&self) -> AuthStatus {
        let place = self
            .locate()
            .and_then(|found| Ok((self.place(&found.path)?, found.path)));
        match place {
            Ok(((dir, environment), program)) => {
                let question =
                    Question::new(&program, AUTH_STATUS, &environment, &dir.work(), AUTH_LIMIT);
                decode(&ask(question).await)
            }
            Err(error) => AuthStatus::unknown(error.detail(), ""),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorCode;

    const BOUND: Duration = Duration::from_secs(30);

    async fn bounded<T>(future: impl Future<Output = T>) -> T {
        tokio::time::timeout(BOUND, future).await.unwrap()
    }

    /// A fake CLI that notes each call, and says the sign-in that is in a file beside it.
    fn install(dir: &Path, version: &str) -> Installed {
        let program = dir.join("claude");
        let text = format!(
            "#!/bin/sh\necho \"$*\" >> \"{0}/calls\"\ncase \"$*\" in\n--version) echo {version};;\n*\" auth status\") . \"{0}/auth\";;\nesac\n",
            dir.display()
        );
        // By another process: see the tests of `auth`.
        let mut shell = std::process::Command::new("/bin/sh");
        let shell = shell
            .args(["-c", "printf %s \"$2\" > \"$1\"", "write"])
            .arg(&program)
            .arg(text);
        assert!(shell.status().unwrap().success());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        say(dir, IN);
        let snapshot = [("PATH", "/usr/bin:/bin"), ("TMPDIR", dir.to_str().unwrap())];
        Installed::new(
            Some(program),
            snapshot.into_iter().collect(),
            InheritedCredentials::Strip,
        )
    }

    const IN: &str =
        r#"echo '{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty"}'"#;
    const STATUS: &str = "--setting-sources= auth status";
    const OUT: &str = r#"echo '{"loggedIn":false,"authMethod":"none"}'; exit 1"#;

    fn say(dir: &Path, auth: &str) {
        fs::write(dir.join("auth"), auth).unwrap();
    }

    fn calls(dir: &Path) -> Vec<String> {
        let calls = fs::read_to_string(dir.join("calls")).unwrap_or_default();
        let mut calls: Vec<_> = calls.lines().map(str::to_owned).collect();
        calls.sort_unstable();
        calls
    }

    #[tokio::test]
    async fn it_is_checked_once_and_again_after_a_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let installed = install(dir.path(), "2.1.300");
        for _ in 0..3 {
            let found = bounded(installed.checked()).await.unwrap();
            assert_eq!(found.version, Version::new(2, 1, 300));
            assert_eq!(found.executable.path, dir.path().join("claude"));
            bounded(installed.signed_in()).await.unwrap();
        }
        assert_eq!(calls(dir.path()), [STATUS, "--version"]);
        installed.forget_sign_in();
        assert!(installed.last_sign_in().unwrap().1, "refused since");
        say(dir.path(), OUT);
        let error = bounded(installed.signed_in()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Auth);
        say(dir.path(), IN);
        bounded(installed.signed_in()).await.unwrap();
        let wanted = [STATUS, STATUS, STATUS, "--version"];
        assert_eq!(calls(dir.path()), wanted);
    }

    #[tokio::test]
    async fn what_is_wrong_with_the_program_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let old = install(dir.path(), "2.1.293");
        let error = bounded(old.checked()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::VersionTooOld);
        let absent = Installed::new(
            Some(dir.path().join("absent")),
            Snapshot::default(),
            InheritedCredentials::Strip,
        );
        let error = bounded(absent.checked()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::ExecutableMissing);
        let error = bounded(absent.signed_in()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::AuthUnknown);
        assert!(error.detail().contains("absent"), "{error}");
    }

    #[tokio::test]
    async fn what_a_killed_host_left_is_swept_at_the_first_start() {
        let dir = tempfile::tempdir().unwrap();
        let installed = install(dir.path(), "2.1.300");
        let left = dir.path().join("turnpass-1-1-left");
        fs::create_dir(&left).unwrap();
        fs::set_permissions(&left, fs::Permissions::from_mode(0o700)).unwrap();
        let old = std::time::SystemTime::now() - Duration::from_secs(3600);
        fs::File::open(&left).unwrap().set_modified(old).unwrap();
        bounded(installed.checked()).await.unwrap();
        bounded(async {
            while left.exists() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    #[tokio::test]
    async fn bug_128_shutdown_ends_a_hanging_check_and_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let installed = Arc::new(install(dir.path(), "2.1.300"));
        let life = dir.path().join("life");
        let made = std::process::Command::new("mkfifo").arg(&life).status();
        assert!(made.unwrap().success());
        let hang = format!(
            "trap '' TERM; exec 9>\"{}\"; echo >&9; while :; do sleep 1000; done",
            life.display()
        );
        say(dir.path(), &hang);
        let (tell, mut began) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || {
            use std::io::Read;
            let mut pipe = fs::File::open(life).unwrap();
            while let Ok(count) = pipe.read(&mut [0; 8]) {
                if tell.send(count).is_err() || count == 0 {
                    break;
                }
            }
        });
        let waiting = Arc::clone(&installed);
        let waiter = tokio::spawn(async move { waiting.signed_in().await });
        assert_eq!(bounded(began.recv()).await, Some(1));
        bounded(installed.shutdown()).await;
        let error = bounded(waiter).await.unwrap().unwrap_err();
        assert_eq!(error.code(), ErrorCode::Closed);
        assert_eq!(bounded(began.recv()).await, Some(0), "every holder is gone");
        let left = fs::read_dir(dir.path()).unwrap().flatten();
        let left =
            left.filter(|entry| entry.file_name().to_string_lossy().starts_with("turnpass-"));
        assert_eq!(left.count(), 0);
    }
}
