//! `shell`: a command, in a process group of its own that ends with the call.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::ToolInput;
use turnpass::process::{ChildGroup, EndPolicy, Exit, PIPE_DRAIN_LIMIT, Spawn, StdinMode, Stdout};
use turnpass::request::Tool;

use super::{Effect, Failure, HostTool, Scene, declared, field, one_line, parse};
use crate::output::HeadAndTail;

/// Time for a command that names none, in seconds.
const USUAL_SECONDS: u64 = 120;

/// Longest time that a command may name, in seconds.
const LONGEST_SECONDS: u64 = 600;

/// How a command is ended: two seconds from SIGTERM to SIGKILL, for what it has to put away.
const ENDING: EndPolicy = EndPolicy {
    after_stdin_close: Duration::ZERO,
    after_terminate: Duration::from_secs(2),
};

/// Read from the pipe at once, in bytes; on the stack of the call.
const CHUNK_BYTES: usize = 8 * 1024;

/// Output after which a command is ended, in bytes: nobody reads so much, and something is in a loop.
const FLOOD_BYTES: u64 = 64 * 1024 * 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    command: String,
    seconds: Option<u64>,
}

/// The `shell` tool.
#[derive(Clone, Copy, Debug)]
pub struct Shell;

impl HostTool for Shell {
    fn declaration(&self) -> Tool {
        declared(
            "shell",
            "Runs a command with /bin/sh in the working directory, and gives what it wrote and its exit status. There is \
             no input and no terminal, and whatever it starts in the background ends with it.",
            json!({
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "The command."},
                    "seconds": {"type": "integer", "minimum": 1, "maximum": LONGEST_SECONDS, "description": "Time limit; 120 by default."}
                },
                "required": ["command"],
                "additionalProperties": false
            }),
        )
    }

    fn effect(&self) -> Effect {
        Effect::Change
    }

    // A command can go anywhere, so there is no path to ask about: the permission for this tool is for all of it.
    fn paths(&self, input: &ToolInput) -> Result<Vec<PathBuf>, Failure> {
        parse::<Input>(input).map(|_| Vec::new())
    }

    fn summary(&self, input: &ToolInput) -> String {
        one_line(&field(input, "command"))
    }

    fn detail(&self, input: &ToolInput) -> String {
        field(input, "command")
    }

    fn call(&self, input: ToolInput, scene: Scene) -> BoxFuture<'static, Result<String, Failure>> {
        Box::pin(async move {
            let input: Input = parse(&input)?;
            let seconds = input.seconds.unwrap_or(USUAL_SECONDS);
            let limit = Duration::from_secs(seconds.clamp(1, LONGEST_SECONDS));
            let running = Running::start(&input.command, scene.directory.path())
                .map_err(|error| Failure::new(format!("the command could not start: {error}")))?;
            let (output, end) = running.finish(limit, &scene.cancel).await;
            told(output, end, limit)
        })
    }
}

/// Why a command is over.
#[derive(Debug)]
enum End {
    Exited(Exit),
    TimeOver,
    Flood,
    Cancelled,
    /// The operating system did not end it in time.
    Undead,
}

fn told(mut output: String, end: End, limit: Duration) -> Result<String, Failure> {
    let note = match end {
        End::Exited(exit) if exit.is_success() => None,
        End::Exited(exit) => Some(format!("[{exit}]")),
        End::TimeOver => Some(format!(
            "[ended: still running after {} seconds]",
            limit.as_secs()
        )),
        End::Flood => Some(format!("[ended: more than {FLOOD_BYTES} bytes of output]")),
        End::Cancelled => Some("[ended: cancelled]".to_owned()),
        End::Undead => Some("[it could not be ended; it may still run]".to_owned()),
    };
    match note {
        None if output.is_empty() => Ok("[no output]".to_owned()),
        None => Ok(output),
        Some(note) => {
            if !output.is_empty() && !output.ends_with('\n') {
                output.push('\n');
            }
            Err(Failure::new(output + &note))
        }
    }
}

/// A running command with its output.
struct Running {
    group: ChildGroup,
    pipe: Option<Stdout>,
    output: HeadAndTail,
}

impl Running {
    fn start(command: &str, directory: &Path) -> turnpass::Result<Self> {
        // Programs that would wait for a person who is not there.
        let quiet = [
            ("PAGER", "cat"),
            ("GIT_PAGER", "cat"),
            ("GIT_TERMINAL_PROMPT", "0"),
        ];
        let quiet = quiet.map(|(name, value)| (name.into(), value.into()));
        let mut group = ChildGroup::spawn(&Spawn {
            orphaned_dir: None,
            program: "/bin/sh".into(),
            // One pipe for both streams keeps their order.
            argv: vec!["-c".into(), format!("exec 2>&1\n{command}").into()],
            env: std::env::vars_os().chain(quiet).collect(),
            cwd: directory.to_owned(),
            stdin: StdinMode::Null,
        })?;
        Ok(Self {
            pipe: group.take_stdout(),
            group,
            output: HeadAndTail::default(),
        })
    }

    /// Takes output until the command exits or there is a reason to end it; then ends what is left of its group.
    ///
    /// Dropping the future kills the group.
    async fn finish(mut self, limit: Duration, cancel: &CancellationToken) -> (String, End) {
        let exited = self.group.wait();
        let over = tokio::time::sleep(limit);
        tokio::pin!(exited, over);
        let end = loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => break End::Cancelled,
                exit = &mut exited => break End::Exited(exit),
                () = &mut over => break End::TimeOver,
                () = next_chunk(&mut self.pipe, &mut self.output), if self.pipe.is_some() => {
                    if self.output.total() > FLOOD_BYTES {
                        break End::Flood;
                    }
                }
            }
        };
        let rest = async {
            while self.pipe.is_some() && self.output.total() <= FLOOD_BYTES {
                next_chunk(&mut self.pipe, &mut self.output).await;
            }
        };
        // The pipe ends with the group, or a little later when a process that left the group holds it.
        let rest = tokio::time::timeout(ENDING.limit() + PIPE_DRAIN_LIMIT, rest);
        let (ended, _) = tokio::join!(self.group.end(ENDING), rest);
        let end = if ended.is_ok() { end } else { End::Undead };
        (self.output.into_text(), end)
    }
}

/// Takes what the pipe has; closes it at its end.
async fn next_chunk(pipe: &mut Option<Stdout>, output: &mut HeadAndTail) {
    let Some(open) = pipe else { return };
    let mut buffer = [0; CHUNK_BYTES];
    match open.read(&mut buffer).await {
        Ok(0) | Err(_) => *pipe = None,
        Ok(count) => output.push(&buffer[..count]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::RESULT_BYTES;
    use crate::tools::testing::{Bench, group_is_gone};

    #[tokio::test]
    async fn gives_output_in_order_and_the_status() {
        let bench = Bench::new(&[("f", b"")]);
        let run = |command: &str| bench.call(&Shell, json!({ "command": command }));
        assert_eq!(run("echo a; echo b >&2; ls").await.unwrap(), "a\nb\nf\n");
        assert_eq!(run("true").await.unwrap(), "[no output]");
        assert_eq!(run("cat").await.unwrap(), "[no output]", "input is empty");
        let failed = run("printf x; exit 3").await.unwrap_err();
        assert_eq!(failed.to_string(), "x\n[exit code 3]");
        let killed = run("kill -9 $$").await.unwrap_err();
        assert_eq!(killed.to_string(), "[signal 9]");
        run("a\0b").await.unwrap_err();
    }

    #[tokio::test]
    async fn what_is_left_in_the_background_ends_with_the_call() {
        let bench = Bench::new(&[]);
        let command = "sleep 600 & (sleep 600 &) ; echo $$";
        let start = std::time::Instant::now();
        let leader = bench.call(&Shell, json!({ "command": command })).await;
        assert!(start.elapsed() < Duration::from_secs(60));
        assert!(group_is_gone(&leader.unwrap()).await);
    }

    #[tokio::test]
    async fn a_command_over_its_time_is_ended_even_if_it_does_not_want_to() {
        let bench = Bench::new(&[]);
        let command = "echo $$; trap '' TERM; while :; do sleep 600; done";
        let input = json!({"command":command,"seconds":1});
        let said = bench.call(&Shell, input).await.unwrap_err().to_string();
        let (leader, note) = said.split_once('\n').unwrap();
        assert_eq!(note, "[ended: still running after 1 seconds]");
        assert!(group_is_gone(leader).await);
    }

    async fn leader_of(bench: &Bench) -> String {
        let path = bench.folder.path().join("leader");
        tokio::time::timeout(Duration::from_secs(20), async {
            loop {
                match std::fs::read_to_string(&path) {
                    Ok(text) if text.ends_with('\n') => return text,
                    _ => tokio::task::yield_now().await,
                }
            }
        })
        .await
        .unwrap()
    }

    const LONG: &str = "sleep 600 & echo $$ > leader; echo started; wait";

    #[tokio::test]
    async fn cancelling_ends_all_of_its_processes() {
        let bench = Bench::new(&[]);
        let call = bench.call(&Shell, json!({ "command": LONG }));
        let cancel = async {
            let leader = leader_of(&bench).await;
            bench.cancel.cancel();
            leader
        };
        let (said, leader) = tokio::join!(call, cancel);
        let said = said.unwrap_err().to_string();
        assert_eq!(said, "started\n[ended: cancelled]");
        assert!(group_is_gone(&leader).await);
    }

    #[tokio::test]
    async fn dropping_the_call_ends_all_of_its_processes() {
        let bench = Bench::new(&[]);
        let leader = tokio::select! {
            _ = bench.call(&Shell, json!({ "command": LONG })) => unreachable!("it sleeps"),
            leader = leader_of(&bench) => leader,
        };
        assert!(group_is_gone(&leader).await);
    }

    #[tokio::test]
    async fn a_lot_of_output_is_cut_in_the_middle() {
        let bench = Bench::new(&[]);
        let command = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last";
        let text = bench.call(&Shell, json!({ "command": command })).await;
        let text = text.unwrap();
        assert!(text.len() <= RESULT_BYTES);
        assert!(text.starts_with("first\n") && text.ends_with("\nlast\n"));
    }

    #[tokio::test]
    async fn a_process_that_left_the_group_does_not_hold_the_call() {
        let bench = Bench::new(&[]);
        let command = "setsid sleep 30 & echo $!";
        let start = std::time::Instant::now();
        let text = bench.call(&Shell, json!({ "command": command })).await;
        assert!(start.elapsed() < Duration::from_secs(20));
        // The test cleans up what the tool documents that it cannot.
        let pid = rustix::process::Pid::from_raw(text.unwrap().trim().parse().unwrap()).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
