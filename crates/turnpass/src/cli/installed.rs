//! The person's installed CLI, found and checked anew for each start, since it updates itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::ask::{Question, ask};
use super::auth::{AUTH_LIMIT, AUTH_STATUS, AuthCheck, AuthStatus, SignedIn, decode};
use super::environment::{Base, Environment, InheritedCredentials, Snapshot};
use super::locate::{Executable, locate_here};
use super::private_dir::{PrivateDir, roots};
use super::version::{Version, Versions};
use crate::error::Result;

/// Where the CLI is and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The executable, and the rule that found it.
    pub executable: Executable,
    /// Its version, not below the floor.
    pub version: Version,
}

/// The installed CLI. One value for each provider; its checks are shared by all callers.
#[derive(Debug)]
pub struct Installed {
    search: Arc<Search>,
    versions: Versions,
    sign_in: AuthCheck,
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
        let asked = Arc::clone(&search);
        let sign_in = AuthCheck::new(Box::new(move || {
            let search = Arc::clone(&asked);
            Box::pin(async move { search.ask_sign_in().await })
        }));
        Self {
            search,
            versions: Versions::default(),
            sign_in,
        }
    }

    /// Finds the CLI and checks its version. Starts a process only when the file has changed since the last time.
    ///
    /// # Errors
    ///
    /// `executable_missing`, `executable_unusable`, `version_invalid`, `version_too_old`, `inherited_credentials`.
    pub async fn checked(&self) -> Result<Found> {
        let executable = self.search.locate()?;
        let version = match self.versions.known(&executable.path) {
            Some(version) => version,
            None => {
                let (dir, environment) = self.search.place(&executable.path)?;
                self.versions
                    .of(&executable.path, &environment, &dir.work())
                    .await?
            }
        };
        Ok(Found {
            executable,
            version,
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

    /// The latest result of the sign-in check, without asking, and whether a live request was refused since.
    pub fn last_sign_in(&self) -> Option<(AuthStatus, bool)> {
        self.sign_in.last()
    }

    /// Drops what is known of the sign-in, after the service refused it.
    pub fn forget_sign_in(&self) {
        self.sign_in.forget();
    }

    /// Ends checks that are under way, and waits for it.
    pub async fn shutdown(&self) {
        self.sign_in.shutdown().await;
    }
}

impl Search {
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
