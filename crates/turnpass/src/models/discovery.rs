//! The models as the installed CLI tells them: a short-lived process, no message, no cost.

use std::time::Duration;

use serde::Deserialize;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{CatalogEntry, fallback_catalog, read_catalog};
use crate::cli::inquiry::{AFTER_ANSWER, Inquiry};
use crate::cli::installed::Installed;
use crate::cli::version::Version;
use crate::error::{Error, ErrorCode, Result};
use crate::wire::control::{ControlRequest, Initialize};

/// Longest time for start and answers (pool document). 0.4 to 0.6 s were measured (2.1.294 to 2.1.332).
pub const WORK_LIMIT: Duration = Duration::from_secs(12);

/// Reserved for the end of the process (pool document).
pub const CLEANUP_LIMIT: Duration = Duration::from_secs(8);

/// Models whose window is asked for; the CLI lists five.
const WINDOWS_ASKED: usize = 16;

/// The version whose names serve when not even a version is known: the newest that was measured.
const NEWEST_MEASURED: Version = Version::new(2, 1, 332);

/// The models, and where they come from.
#[derive(Clone, Debug)]
pub struct Discovered {
    /// The models.
    pub models: Vec<CatalogEntry>,
    /// The CLI's version, if it is known.
    pub version: Option<Version>,
    /// Why these are the models that turnpass knows by itself; `None` when the CLI told them.
    pub fallback: Option<Error>,
}

/// Asks the installed CLI for its models, within [`WORK_LIMIT`] and [`CLEANUP_LIMIT`]. Whatever fails, the answer is the
/// static catalogue with the reason.
///
/// Has to be called within a tokio runtime. Dropping the future kills the process.
pub async fn discover(installed: &Installed) -> Discovered {
    let deadline = Instant::now() + WORK_LIMIT;
    let found = tokio::time::timeout_at(deadline, installed.checked()).await;
    let version = found
        .ok()
        .and_then(|found| found.ok())
        .map(|found| found.version);
    match asked(installed, deadline).await {
        Ok(models) => Discovered {
            models,
            version,
            fallback: None,
        },
        Err(error) => Discovered {
            models: fallback_catalog(version.unwrap_or(NEWEST_MEASURED)),
            version,
            fallback: Some(error),
        },
    }
}

async fn asked(installed: &Installed, deadline: Instant) -> Result<Vec<CatalogEntry>> {
    let late = |_| {
        let what = format!("no models within {} s", WORK_LIMIT.as_secs());
        Error::new(ErrorCode::ControlTimeout, what)
    };
    let started = tokio::time::timeout_at(deadline, installed.inquire());
    let mut process = started.await.map_err(late)??;
    let models = tokio::time::timeout_at(deadline, catalogue(&mut process)).await;
    // Whatever came of it, the process ends within its reserve; one that does not is worth a word.
    if let Err(error) = process.end(AFTER_ANSWER.within(CLEANUP_LIMIT)).await {
        tracing::warn!(code = %error.code(), "the process that told the models did not end");
    }
    let models = models.map_err(late)??;
    match models.is_empty() {
        true => Err(Error::new(
            ErrorCode::ProtocolShape,
            "the CLI told no models",
        )),
        false => Ok(models),
    }
}

async fn catalogue(process: &mut Inquiry) -> Result<Vec<CatalogEntry>> {
    let initialize = ControlRequest::Initialize(Initialize::default());
    let told = process.ask(&initialize, WORK_LIMIT).await?;
    let told: Value = serde_json::from_str(&told).unwrap_or_default();
    let mut models = read_catalog(&told)?;
    for model in models.iter_mut().take(WINDOWS_ASKED) {
        model.window_tokens = window(process, &model.id.0).await;
    }
    Ok(models)
}

/// The window of a model by the CLI's own table. The model is set as a setting: `set_model` sends a request of its own to
/// check a full id, a setting sends nothing (2.1.332). A version that does not tell is no failure.
async fn window(process: &mut Inquiry, model: &str) -> Option<u64> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct ContextUsage {
        raw_max_tokens: u64,
    }
    let settings = to_raw_value(&json!({"model": model})).ok()?;
    let set = ControlRequest::ApplyFlagSettings {
        settings: &settings,
    };
    process.ask(&set, WORK_LIMIT).await.ok()?;
    let ask = ControlRequest::GetContextUsage { detail: "summary" };
    let told = process.ask(&ask, WORK_LIMIT).await.ok()?;
    let usage: ContextUsage = serde_json::from_str(&told).ok()?;
    Some(usage.raw_max_tokens)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;
    use crate::cli::environment::InheritedCredentials;
    use crate::request::ModelId;

    const BOUND: Duration = Duration::from_secs(30);

    /// A CLI whose answers are lines of a file, in order, with the ids that it is asked with.
    fn install(dir: &Path, body: &str) -> Installed {
        let program = dir.join("claude");
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && {{ echo 2.1.332; exit; }}\ncd \"{}\"\nsay() {{\nread -r line || exit 0\n\
             id=$(printf %s \"$line\" | sed 's/.*\"request_id\":\"\\([^\"]*\\)\".*/\\1/')\n\
             printf '{{\"type\":\"control_response\",\"response\":{{\"subtype\":\"success\",\"request_id\":\"%s\",\"response\":%s}}}}\\n' \"$id\" \"$1\"\n}}\n{body}\n",
            dir.display()
        );
        let mut shell = std::process::Command::new("/bin/sh");
        let shell = shell.args(["-c", "printf %s \"$2\" > \"$1\"", "write"]);
        assert!(shell.arg(&program).arg(script).status().unwrap().success());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let snapshot = [("PATH", "/usr/bin:/bin"), ("TMPDIR", dir.to_str().unwrap())];
        Installed::new(
            Some(program),
            snapshot.into_iter().collect(),
            InheritedCredentials::Strip,
        )
    }

    async fn discovered(body: &str) -> Discovered {
        let dir = tempfile::tempdir().unwrap();
        let installed = install(dir.path(), body);
        let found = tokio::time::timeout(BOUND, discover(&installed))
            .await
            .unwrap();
        let left = fs::read_dir(dir.path()).unwrap().flatten();
        let ours =
            left.filter(|entry| entry.file_name().to_string_lossy().starts_with("turnpass-"));
        assert_eq!(ours.count(), 0, "its files are gone");
        found
    }

    const MODELS: &str = r#"{"models":[{"value":"default","resolvedModel":"claude-opus-5-5"},{"value":"opus","resolvedModel":"claude-opus-5-5","supportedEffortLevels":["low"]},{"value":"again","resolvedModel":"claude-opus-5-5"}]}"#;

    #[tokio::test]
    async fn the_default_alias_is_skipped_and_the_window_is_asked_for() {
        let found = discovered(&format!(
            "say '{MODELS}'\nsay '{{\"model\":\"claude-opus-5-5\"}}'\nsay '{{\"rawMaxTokens\":1000000,\"new\":1}}'\ncat >/dev/null"
        ))
        .await;
        assert!(found.fallback.is_none(), "{found:?}");
        assert_eq!(found.version, Some(NEWEST_MEASURED));
        let [opus] = &found.models[..] else {
            panic!("{found:?}")
        };
        assert_eq!(
            (opus.alias.as_str(), &opus.id),
            ("opus", &ModelId::from("claude-opus-5-5"))
        );
        assert_eq!(opus.window_tokens, Some(1_000_000));
    }

    #[tokio::test]
    async fn a_version_that_tells_no_window_still_tells_its_models() {
        let found = discovered(&format!(
            "say '{MODELS}'\nsay null\nsay null\ncat >/dev/null"
        ))
        .await;
        assert!(found.fallback.is_none());
        assert_eq!(found.models[0].window_tokens, None);
    }

    #[tokio::test]
    async fn whatever_fails_the_static_catalogue_serves_with_the_reason() {
        for (body, code) in [
            (
                "say '{\"models\":[]}'\ncat >/dev/null",
                ErrorCode::ProtocolShape,
            ),
            (
                "say '{\"models\":7}'\ncat >/dev/null",
                ErrorCode::ProtocolShape,
            ),
            ("say null\ncat >/dev/null", ErrorCode::ProtocolShape),
            ("exit 3", ErrorCode::ProcessExit),
            (
                "echo \"error: unknown option '--no-chrome'\" >&2; exit 1",
                ErrorCode::VersionIncompatible,
            ),
        ] {
            let found = discovered(body).await;
            assert_eq!(found.fallback.unwrap().code(), code, "{body}");
            assert_eq!(found.models, fallback_catalog(NEWEST_MEASURED));
        }
    }

    #[tokio::test]
    async fn without_a_cli_there_are_models_too() {
        let dir = tempfile::tempdir().unwrap();
        let absent = Installed::new(
            Some(dir.path().join("absent")),
            crate::cli::environment::Snapshot::default(),
            InheritedCredentials::Strip,
        );
        let found = discover(&absent).await;
        assert_eq!(found.fallback.unwrap().code(), ErrorCode::ExecutableMissing);
        assert!(found.version.is_none() && !found.models.is_empty());
    }
}
