//! The tools of the agent. One file a tool, with the same items in the same order: input, tool, `HostTool`, work.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use crate::directory::{Directory, Target};

mod edit;
mod glob;
mod list;
mod read;
mod search;
mod shell;
mod write;

pub use edit::Edit;
pub use list::List;
pub use read::Read;
pub use search::Search;
pub use shell::Shell;
pub use write::Write;

/// Longest time that a tool which works on files may take; a disk that hangs must not hold the agent.
const FILE_TOOL_WAIT: Duration = Duration::from_secs(60);

/// Longest one-line summary of a call, in characters.
const SUMMARY_CHARACTERS: usize = 100;

/// What a tool may do to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It only looks: calls may run at the same time, and need no permission inside the working directory.
    Read,
    /// It may change something: calls run one at a time, in the order of the model's calls, and need a permission.
    Change,
}

/// A tool that the agent runs for the model.
pub trait HostTool: fmt::Debug + Send + Sync {
    /// What the model is told of it.
    fn declaration(&self) -> Tool;

    /// What it may do to the world.
    fn effect(&self) -> Effect;

    /// The paths that a call touches, as the model wrote them; the agent resolves them, asks for consent where they
    /// leave the working directory, and gives them to [`HostTool::call`] in the same order.
    ///
    /// # Errors
    ///
    /// When the input does not fit the tool; the call is then answered with the failure and not run.
    fn paths(&self, input: &ToolInput) -> Result<Vec<PathBuf>, Failure>;

    /// The call in one line, for a person.
    fn summary(&self, input: &ToolInput) -> String;

    /// All that the call would do, for the person who is asked for consent.
    fn detail(&self, input: &ToolInput) -> String {
        self.summary(input)
    }

    /// Runs one call. The text goes to the model, cut at the limit of a result.
    ///
    /// # Cancel safety
    ///
    /// Both cancelling the scene's token and dropping the future end everything that the call started.
    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>>;
}

/// Where a call takes place.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The working directory.
    pub directory: Arc<Directory>,
    /// The targets of [`HostTool::paths`], with consent.
    pub targets: Vec<Target>,
    /// Cancelled when the run is.
    pub cancel: CancellationToken,
}

/// What the model is told when a call did not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(String);

impl Failure {
    /// A failure in words.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// All tools of this module.
pub fn all() -> Vec<Arc<dyn HostTool>> {
    vec![
        Arc::new(Read),
        Arc::new(List),
        Arc::new(Search),
        Arc::new(Write),
        Arc::new(Edit),
        Arc::new(Shell),
    ]
}

/// The names of [`all`], for messages.
pub const NAMES: [&str; 6] = ["read", "list", "search", "write", "edit", "shell"];

fn declared(name: &str, description: &str, input_schema: serde_json::Value) -> Tool {
    Tool {
        name: name.to_owned(),
        description: description.to_owned(),
        input_schema,
    }
}

fn parse<T: serde::de::DeserializeOwned>(input: &ToolInput) -> Result<T, Failure> {
    input
        .read()
        .map_err(|error| Failure::new(format!("the input does not fit the tool: {error}")))
}

/// One line of at most [`SUMMARY_CHARACTERS`] characters.
fn one_line(text: &str) -> String {
    let mut line: String = text.chars().take(SUMMARY_CHARACTERS).collect();
    if line.len() < text.len() {
        line.push('…');
    }
    line.replace(['\n', '\r', '\t'], " ")
}

/// The value of a text field, for a summary of input that may not fit the tool.
fn field(input: &ToolInput, name: &str) -> String {
    match input.to_map().get(name) {
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

/// The only target of a call, or the working directory for a tool whose path may be left out.
fn only_target(scene: &Scene) -> Result<Target, Failure> {
    match scene.targets.first() {
        Some(target) => Ok(target.clone()),
        None => scene.directory.resolve(".".as_ref()),
    }
}

/// Runs work on files off the event loop, until it ends, the run is cancelled or [`FILE_TOOL_WAIT`] is over. Work
/// that takes long looks at the token itself.
async fn on_files(
    cancel: CancellationToken,
    work: impl FnOnce() -> Result<String, Failure> + Send + 'static,
) -> Result<String, Failure> {
    let work = tokio::task::spawn_blocking(work);
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Failure::new("cancelled")),
        ended = tokio::time::timeout(FILE_TOOL_WAIT, work) => match ended {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Failure::new("the tool broke down")),
            Err(_) => Err(Failure::new(format!(
                "no end after {} seconds",
                FILE_TOOL_WAIT.as_secs()
            ))),
        },
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Waits until no process of a group is left, at most five seconds: a killed process is seen until it is reaped.
    pub(crate) async fn group_is_gone(leader: &str) -> bool {
        let leader = rustix::process::Pid::from_raw(leader.trim().parse().unwrap()).unwrap();
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            if rustix::process::test_kill_process_group(leader).is_err() {
                return true;
            }
            // The runtime of the test reaps the processes.
            tokio::task::yield_now().await;
        }
        false
    }

    /// A working directory with a tool in it, called as the agent does when everything is allowed.
    pub(crate) struct Bench {
        pub(crate) folder: tempfile::TempDir,
        pub(crate) cancel: CancellationToken,
    }

    impl Bench {
        pub(crate) fn new(files: &[(&str, &[u8])]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            for (name, content) in files {
                let path = folder.path().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, content).unwrap();
            }
            Self {
                folder,
                cancel: CancellationToken::new(),
            }
        }

        pub(crate) async fn call(
            &self,
            tool: &dyn HostTool,
            input: serde_json::Value,
        ) -> Result<String, Failure> {
            let input = ToolInput::from_streamed(&input.to_string()).unwrap();
            let directory = Arc::new(Directory::open(self.folder.path()).unwrap());
            let targets = tool
                .paths(&input)?
                .iter()
                .map(|path| directory.resolve(path))
                .collect::<Result<_, _>>()?;
            let scene = Scene {
                directory,
                targets,
                cancel: self.cancel.clone(),
            };
            tool.call(input, scene).await
        }

        pub(crate) fn content(&self, name: &str) -> String {
            std::fs::read_to_string(self.folder.path().join(name)).unwrap()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_tools() {
        let names: Vec<_> = all().iter().map(|tool| tool.declaration().name).collect();
        assert_eq!(names, NAMES);
    }

    #[test]
    fn input_that_does_not_fit_is_a_failure_before_anything_runs() {
        let input = ToolInput::from_streamed(r#"{"wrong":1}"#).unwrap();
        for tool in all() {
            let error = tool.paths(&input).unwrap_err();
            assert!(error.to_string().contains("wrong"), "{error}");
            // A summary is made before the input is looked at.
            tool.summary(&input);
            tool.detail(&input);
        }
    }

    #[test]
    fn schemas_require_what_the_input_type_requires() {
        for tool in all() {
            let schema = tool.declaration().input_schema;
            let required: Vec<_> = schema["required"]
                .as_array()
                .map(|names| names.iter().map(|name| name.as_str().unwrap()).collect())
                .unwrap_or_default();
            let full: serde_json::Map<_, _> = required
                .iter()
                .map(|name| ((*name).to_owned(), serde_json::json!("x")))
                .collect();
            tool.paths(&full.clone().into()).unwrap();
            for name in &required {
                let mut less = full.clone();
                less.shift_remove(*name);
                tool.paths(&less.into()).unwrap_err();
            }
            for name in schema["properties"].as_object().unwrap().keys() {
                let mut wrong = full.clone();
                wrong.insert(name.clone(), serde_json::json!([[]]));
                tool.paths(&wrong.into()).unwrap_err();
            }
        }
    }
}
