//! `shell`: a command, in a process group of its own that ends with the call.

use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::ToolInput;
use turnpass::request::Tool;

use super::{Effect, Failure, HostTool, Scene, declared, field, one_line, parse};
use crate::output::HeadAndTail;

/// Time for a command that names none, in seconds.
const USUAL_SECONDS: u64 = 120;

/// Longest time that a command may name, in seconds.
const LONGEST_SECONDS: u64 = 600;

/// From the request to end to the order to die.
const GRACE: Duration = Duration::from_secs(2);

/// For the operating system to end a process that was ordered to die.
const DEATH: Duration = Duration::from_secs(5);

/// For output that is still in the pipe after the end. Only a process that left the group can hold the pipe longer.
const DRAIN: Duration = Duration::from_secs(1);

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
            let mut running = Running::start(&input.command, scene.directory.path())
                .map_err(|error| Failure::new(format!("the command could not start: {error}")))?;
            let end = running.until_the_end(limit, &scene.cancel).await;
            told(running.output.into_text(), end, limit)
        })
    }
}

/// Why a command is over.
#[derive(Debug)]
enum End {
    Exited(ExitStatus),
    TimeOver,
    Flood,
    Cancelled,
    /// The operating system did not end it in time.
    Undead,
}

fn told(mut output: String, end: End, limit: Duration) -> Result<String, Failure> {
    let note = match end {
        End::Exited(status) if status.success() => None,
        End::Exited(status) => Some(match (status.code(), status.signal()) {
            (Some(code), _) => format!("[exit status {code}]"),
            (None, Some(signal)) => format!("[ended by signal {signal}]"),
            (None, None) => "[ended without a status]".to_owned(),
        }),
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
    group: Group,
    exited: oneshot::Receiver<ExitStatus>,
    pipe: Option<Receiver>,
    output: HeadAndTail,
}

impl Running {
    fn start(command: &str, directory: &Path) -> std::io::Result<Self> {
        // One pipe for both streams keeps their order.
        let (reader, writer) = std::io::pipe()?;
        let mut shell = Command::new("/bin/sh");
        shell
            .args(["-c", command])
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            // Programs that would wait for a person who is not there.
            .envs([
                ("PAGER", "cat"),
                ("GIT_PAGER", "cat"),
                ("GIT_TERMINAL_PROMPT", "0"),
            ])
            .process_group(0);
        let child = shell.spawn();
        // The command holds the writing ends; the pipe ends only when all of them are closed.
        drop(shell);
        let (group, exited) = Group::of(child?)?;
        Ok(Self {
            group,
            exited,
            pipe: Some(Receiver::from_owned_fd(OwnedFd::from(reader))?),
            output: HeadAndTail::default(),
        })
    }

    async fn until_the_end(&mut self, limit: Duration, cancel: &CancellationToken) -> End {
        let end = self.next_end(Instant::now() + limit, Some(cancel)).await;
        if let End::Exited(_) = end {
            self.drain().await;
            return end;
        }
        self.group.signal(Signal::TERM);
        let mut ended = self.next_end(Instant::now() + GRACE, None).await;
        if !matches!(ended, End::Exited(_)) {
            self.group.signal(Signal::KILL);
            ended = self.next_end(Instant::now() + DEATH, None).await;
        }
        if !matches!(ended, End::Exited(_)) {
            return End::Undead;
        }
        self.drain().await;
        end
    }

    /// Takes output until the command ends or there is a reason to end it.
    async fn next_end(&mut self, deadline: Instant, cancel: Option<&CancellationToken>) -> End {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            tokio::select! {
                biased;
                () = cancelled(cancel) => return End::Cancelled,
                status = &mut self.exited => {
                    // The sender is gone without a word only if its thread broke down; the group is dead then as well.
                    return status.map_or(End::Undead, End::Exited);
                }
                () = tokio::time::sleep_until(deadline) => return End::TimeOver,
                () = next_chunk(&mut self.pipe, &mut self.output, &mut buffer), if self.pipe.is_some() => {
                    if cancel.is_some() && self.output.total() > FLOOD_BYTES {
                        return End::Flood;
                    }
                }
            }
        }
    }

    async fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        let mut buffer = vec![0; 16 * 1024];
        while self.pipe.is_some() && self.output.total() <= FLOOD_BYTES {
            let next = next_chunk(&mut self.pipe, &mut self.output, &mut buffer);
            if tokio::time::timeout_at(deadline, next).await.is_err() {
                return;
            }
        }
    }
}

async fn cancelled(cancel: Option<&CancellationToken>) {
    match cancel {
        Some(cancel) => cancel.cancelled().await,
        None => std::future::pending().await,
    }
}

/// Takes what the pipe has; closes it at its end.
async fn next_chunk(pipe: &mut Option<Receiver>, output: &mut HeadAndTail, buffer: &mut [u8]) {
    let Some(open) = pipe else { return };
    match open.read(buffer).await {
        Ok(0) | Err(_) => *pipe = None,
        Ok(count) => output.push(&buffer[..count]),
    }
}

/// A process group that dies when this is dropped.
///
/// A thread waits for the leader without reaping it, so the number cannot be given to another process while there is
/// still something to signal: first the rest of the group is killed, then the leader is reaped.
#[derive(Debug)]
struct Group {
    leader: Pid,
    reaped: Arc<Mutex<bool>>,
}

impl Group {
    fn of(child: Child) -> std::io::Result<(Self, oneshot::Receiver<ExitStatus>)> {
        let group = Self {
            leader: Pid::from_child(&child),
            reaped: Arc::default(),
        };
        let (tell, exited) = oneshot::channel();
        let (leader, reaped) = (group.leader, group.reaped.clone());
        std::thread::Builder::new()
            .name("turnpass-shell".into())
            .spawn(move || {
                if let Ok(status) = reap(child, leader, &reaped) {
                    // Nobody listens when the call was dropped.
                    let _ = tell.send(status);
                }
            })?;
        Ok((group, exited))
    }

    fn signal(&self, signal: Signal) {
        let reaped = self.reaped.lock().unwrap_or_else(PoisonError::into_inner);
        if !*reaped {
            // A group whose processes are all gone needs no signal.
            let _ = rustix::process::kill_process_group(self.leader, signal);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

fn reap(mut child: Child, leader: Pid, reaped: &Mutex<bool>) -> std::io::Result<ExitStatus> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(error) = rustix::process::waitid(WaitId::Pid(leader), options) {
        if error != rustix::io::Errno::INTR {
            break;
        }
    }
    let mut reaped = reaped.lock().unwrap_or_else(PoisonError::into_inner);
    // What the command left in the background ends with it; there may be nothing.
    let _ = rustix::process::kill_process_group(leader, Signal::KILL);
    *reaped = true;
    child.wait()
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
        assert_eq!(failed.to_string(), "x\n[exit status 3]");
        let killed = run("kill -9 $$").await.unwrap_err();
        assert_eq!(killed.to_string(), "[ended by signal 9]");
        run("a\0b").await.unwrap_err();
    }

    #[tokio::test]
    async fn what_is_left_in_the_background_ends_with_the_call() {
        let bench = Bench::new(&[]);
        let command = "sleep 600 & (sleep 600 &) ; echo $$";
        let start = Instant::now();
        let leader = bench.call(&Shell, json!({ "command": command })).await;
        assert!(start.elapsed() < Duration::from_secs(60));
        assert!(group_is_gone(&leader.unwrap()));
    }

    #[tokio::test]
    async fn a_command_over_its_time_is_ended_even_if_it_does_not_want_to() {
        let bench = Bench::new(&[]);
        let command = "echo $$; trap '' TERM; while :; do sleep 600; done";
        let input = json!({"command":command,"seconds":1});
        let said = bench.call(&Shell, input).await.unwrap_err().to_string();
        let (leader, note) = said.split_once('\n').unwrap();
        assert_eq!(note, "[ended: still running after 1 seconds]");
        assert!(group_is_gone(leader));
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
        assert!(group_is_gone(&leader));
    }

    #[tokio::test]
    async fn dropping_the_call_ends_all_of_its_processes() {
        let bench = Bench::new(&[]);
        let leader = tokio::select! {
            _ = bench.call(&Shell, json!({ "command": LONG })) => unreachable!("it sleeps"),
            leader = leader_of(&bench) => leader,
        };
        assert!(group_is_gone(&leader));
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
        let start = Instant::now();
        let text = bench.call(&Shell, json!({ "command": command })).await;
        assert!(start.elapsed() < Duration::from_secs(20));
        // The test cleans up what the tool documents that it cannot.
        let pid = Pid::from_raw(text.unwrap().trim().parse().unwrap()).unwrap();
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}
