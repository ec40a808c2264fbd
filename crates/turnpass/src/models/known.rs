//! The models as the installed CLI told them last, kept for the program and version that told them.
//!
//! A generation never starts a process to learn of models: it takes what is known here, and without that the catalogue
//! that turnpass knows by itself. Whoever asks the CLI (`turnpass models`, a host) keeps the answer here.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::discovery::{Discovered, discover};
use super::{CatalogEntry, check_model_id, credits, fallback_catalog};
use crate::cli::installed::{Found, Installed};
use crate::limits::state_file::StateFile;
use crate::request::{Effort, ModelId};

/// The file in the state directory.
pub const MODELS_FILE: &str = "models.json";

/// Models that are kept; the CLI lists five.
const MODELS_KEPT: usize = 64;

/// What is known of the models.
#[derive(Debug, Default)]
pub struct KnownModels {
    file: Option<StateFile>,
    kept: Mutex<Option<Kept>>,
}

/// What a program of this version told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Kept {
    program: String,
    version: String,
    models: Vec<Model>,
}

/// One model. What credits it can bill is known here and not told by the CLI.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Model {
    alias: String,
    id: String,
    display_name: String,
    efforts: Vec<String>,
    thinking_off: bool,
    window_tokens: Option<u64>,
}

impl KnownModels {
    /// What is known, kept in `state_dir` if there is one and else in memory only.
    pub fn new(state_dir: Option<&Path>) -> Self {
        Self {
            file: state_dir.map(|dir| StateFile::new(dir, MODELS_FILE)),
            kept: Mutex::default(),
        }
    }

    /// Asks the installed CLI as [`discover`] does, and keeps what it told.
    ///
    /// Has to be called within a tokio runtime. Dropping the future kills the process.
    pub async fn discover(&self, installed: &Installed) -> Discovered {
        let before = installed.checked().await.ok();
        let discovered = discover(installed).await;
        // An update in between makes the answer that of neither.
        let found = before.filter(|found| Some(found.version) == discovered.version);
        if let (Some(found), None) = (found, &discovered.fallback) {
            self.keep(Kept::of(&found, &discovered.models)).await;
        }
        discovered
    }

    /// The catalogue of this program: what it told, else the static one. Starts nothing.
    pub async fn catalog(&self, found: &Found) -> Vec<CatalogEntry> {
        if let Some(kept) = self.kept().as_ref().filter(|kept| kept.is_of(found)) {
            return kept.entries();
        }
        let read = self.read().await.filter(|kept| kept.is_of(found));
        let entries = read.as_ref().map(Kept::entries).unwrap_or_default();
        if entries.is_empty() {
            return fallback_catalog(found.version);
        }
        *self.kept() = read;
        entries
    }

    async fn read(&self) -> Option<Kept> {
        let file = self.file.clone()?;
        // One that cannot be read is as good as none: it is written anew with the next answer.
        let read = tokio::task::spawn_blocking(move || file.read().ok().flatten());
        read.await.ok().flatten()
    }

    async fn keep(&self, kept: Kept) {
        *self.kept() = Some(kept.clone());
        let Some(file) = self.file.clone() else {
            return;
        };
        let written = tokio::task::spawn_blocking(move || {
            file.change(|old: &mut Option<Kept>| {
                *old = Some(kept);
                Ok(())
            })
        });
        if let Ok(Err(error)) = written.await {
            tracing::debug!(%error, "the models were not kept");
        }
    }

    fn kept(&self) -> MutexGuard<'_, Option<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn of(found: &Found, models: &[CatalogEntry]) -> Self {
        let model = |entry: &CatalogEntry| Model {
            alias: entry.alias.clone(),
            id: entry.id.0.clone(),
            display_name: entry.display_name.clone(),
            efforts: entry
                .efforts
                .iter()
                .map(|e| e.as_str().to_owned())
                .collect(),
            thinking_off: entry.thinking_off,
            window_tokens: entry.window_tokens,
        };
        Self {
            program: program(found),
            version: found.version.to_string(),
            models: models.iter().take(MODELS_KEPT).map(model).collect(),
        }
    }

    fn is_of(&self, found: &Found) -> bool {
        self.program == program(found) && self.version == found.version.to_string()
    }

    fn entries(&self) -> Vec<CatalogEntry> {
        let entry = |model: &Model| {
            let id = ModelId(model.id.clone());
            check_model_id(&id).ok()?;
            let efforts = model.efforts.iter().filter_map(|word| word.parse().ok());
            Some(CatalogEntry {
                alias: model.alias.clone(),
                display_name: model.display_name.clone(),
                efforts: efforts.filter(|effort| *effort != Effort::None).collect(),
                thinking_off: model.thinking_off,
                credits: credits(&id),
                window_tokens: model.window_tokens,
                id,
            })
        };
        self.models
            .iter()
            .take(MODELS_KEPT)
            .filter_map(entry)
            .collect()
    }
}

fn program(found: &Found) -> String {
    found.executable.path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::locate::{Executable, Rule};
    use crate::cli::version::Version;
    use crate::models::check_effort;

    fn found(path: &str, patch: u64) -> Found {
        Found {
            executable: Executable {
                path: path.into(),
                rule: Rule::Setting,
                skipped: Vec::new(),
            },
            version: Version::new(2, 1, patch),
            standing: crate::certify::Standing::Unknown(Version::new(2, 1, patch)).into(),
        }
    }

    fn told() -> Vec<CatalogEntry> {
        let mut models = fallback_catalog(Version::new(2, 1, 332));
        models.truncate(1);
        models[0].efforts = vec![Effort::Low];
        models[0].thinking_off = true;
        models[0].window_tokens = Some(7);
        models
    }

    #[tokio::test]
    async fn what_was_told_serves_its_program_and_version_alone_and_over_processes() {
        let dir = tempfile::tempdir().unwrap();
        let known = KnownModels::new(Some(dir.path()));
        let here = found("/a/claude", 332);
        assert_eq!(known.catalog(&here).await, fallback_catalog(here.version));
        known.keep(Kept::of(&here, &told())).await;
        let another = KnownModels::new(Some(dir.path()));
        for known in [&known, &another] {
            assert_eq!(known.catalog(&here).await, told());
            for other in [found("/a/claude", 333), found("/b/claude", 332)] {
                assert_eq!(known.catalog(&other).await, fallback_catalog(other.version));
            }
        }
        let catalog = another.catalog(&here).await;
        let takes = |effort| check_effort(&"opus".into(), Some(effort), &catalog).is_ok();
        assert!(takes(Effort::Low) && takes(Effort::None) && !takes(Effort::High));
        let alone = KnownModels::new(None);
        alone.keep(Kept::of(&here, &told())).await;
        assert_eq!(alone.catalog(&here).await, told());
    }

    #[tokio::test]
    async fn a_file_that_says_nothing_usable_is_as_good_as_none() {
        let dir = tempfile::tempdir().unwrap();
        let here = found("/a/claude", 332);
        let mut odd = Kept::of(&here, &told());
        odd.models[0].id = "--settings".to_owned();
        let mut none = odd.clone();
        none.models.clear();
        let text = |kept: &Kept| serde_json::to_string(kept).unwrap();
        for text in ["", "{", "null", "[1]", &text(&odd), &text(&none)] {
            std::fs::write(dir.path().join(MODELS_FILE), text).unwrap();
            let known = KnownModels::new(Some(dir.path()));
            assert_eq!(
                known.catalog(&here).await,
                fallback_catalog(here.version),
                "{text}"
            );
        }
    }
}
