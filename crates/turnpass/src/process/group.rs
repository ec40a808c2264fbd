//! The group itself: start, watch, signal, end.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::end::{EndPolicy, Exit, REAP_LIMIT};
use super::stderr::StderrTail;
use super::stdin::{STDIN_QUEUE_BYTES, Stdin};
use super::stdout::{PIPE_DRAIN_LIMIT, Stdout};
use crate::error::{Error, ErrorCode, Result};

/// What the guard runs: it waits for the end of its input, which comes when this process dies, ends its own group and
/// removes the private directory. SIGTERM comes first so that the CLI removes its socket and session file (35 to 65 ms,
/// 2.1.332); the guard itself ignores it.
const GUARD_SCRIPT: &str = "trap '' HUP INT TERM; read _; kill -TERM 0; sleep 1; \
    [ -z \"$1\" ] || rm -rf -- \"$1\"; kill -KILL 0";

/// A program to start, as data.
#[derive(Clone)]
pub struct Spawn {
    /// The executable, absolute.
    pub program: PathBuf,
    /// The arguments after the program's own name.
    pub argv: Vec<OsString>,
    /// The whole environment; nothing is inherited.
    pub env: Vec<(OsString, OsString)>,
    /// The working directory.
    pub cwd: PathBuf,
    /// What standard input is.
    pub stdin: StdinMode,
    /// A private directory that the guard removes when this process dies. A clean end leaves it to its owner.
    pub orphaned_dir: Option<PathBuf>,
}

/// What a program's standard input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StdinMode {
    /// Empty. For `-p PROMPT`: with an open pipe the CLI first waits 3 s for input (2.1.294, 2.1.310, 2.1.332).
    Null,
    /// A pipe with a queue of this many bytes.
    Queue {
        /// See [`STDIN_QUEUE_BYTES`].
        limit_bytes: usize,
    },
}

impl StdinMode {
    /// A pipe with the default queue.
    pub const QUEUE: Self = Self::Queue {
        limit_bytes: STDIN_QUEUE_BYTES,
    };
}

impl fmt::Debug for Spawn {
    /// Names and sizes only: values of the environment may identify or authorise.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.env.iter().map(|(name, _)| name).collect();
        f.debug_struct("Spawn")
            .field("program", &self.program)
            .field("argv", &self.argv)
            .field("env_names", &names)
            .field("cwd", &self.cwd)
            .field("stdin", &self.stdin)
            .field("orphaned_dir", &self.orphaned_dir)
            .finish()
    }
}

/// A running program and everything that it started, as one value.
///
/// Dropping it kills the group at once with SIGKILL; a task of the runtime reaps what is left, so no zombie stays.
#[derive(Debug)]
pub struct ChildGroup {
    pid: Pid,
    group: Arc<Group>,
    state: watch::Receiver<State>,
    stdin: Stdin,
    stdout: Option<Stdout>,
    stderr: StderrTail,
    stderr_ended: CancellationToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// The leader is reaped, the rest is being killed.
    Exited(Exit),
    /// Leader and guard are reaped.
    Gone(Exit),
}

impl State {
    fn exit(self) -> Option<Exit> {
        match self {
            Self::Running => None,
            Self::Exited(exit) | Self::Gone(exit) => Some(exit),
        }
    }
}

/// The group's number, as long as it is surely ours.
#[derive(Debug)]
struct Group {
    id: Pid,
    ours: Mutex<bool>,
}

impl Group {
    fn signal(&self, signal: Signal) {
        let ours = self.ours.lock().unwrap_or_else(PoisonError::into_inner);
        if *ours {
            // Failure means that nobody is left, or that only zombies are (EPERM on macOS).
            let _ = kill_process_group(self.id, signal);
        }
    }

    /// The last kill; from here on the number may become somebody else's.
    fn release(&self) {
        let mut ours = self.ours.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut *ours) {
            let _ = kill_process_group(self.id, Signal::KILL);
        }
    }
}

/// Releases the group when the watching task ends or is dropped with its runtime, before the processes are reaped.
#[derive(Debug)]
struct Release(Arc<Group>);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// What the watching task owns; dropped in this order.
struct Watched {
    release: Release,
    guard_pipe: ChildStdin,
    leader: Child,
    guard: Child,
}

impl ChildGroup {
    /// Starts a program as leader of its own group.
    ///
    /// Has to be called within a tokio runtime, which drives the pipes and reaps the processes.
    ///
    /// # Errors
    ///
    /// `request_invalid` for a NUL byte in an argument, the environment or the working directory; `working_directory`,
    /// `executable_missing`, `executable_unusable` or `launch_failed` for what the operating system says.
    pub fn spawn(spawn: &Spawn) -> Result<Self> {
        refuse_nul(spawn)?;
        let mut leader = leader_command(spawn)
            .spawn()
            .map_err(|error| launch_error(spawn, &error))?;
        let Some(pid) = leader.id().and_then(|id| Pid::from_raw(id.cast_signed())) else {
            return Err(Error::new(
                ErrorCode::Internal,
                "a new process has no number",
            ));
        };
        let group = Arc::new(Group {
            id: pid,
            ours: Mutex::new(true),
        });
        let release = Release(Arc::clone(&group));
        let mut guard = guard_command(pid, spawn.orphaned_dir.as_deref())
            .spawn()
            .map_err(|error| {
                Error::new(
                    ErrorCode::LaunchFailed,
                    format!("/bin/sh could not be started as guard: {error}"),
                )
            })?;
        let (Some(guard_pipe), Some(stdout), Some(stderr)) = (
            guard.stdin.take(),
            leader.stdout.take(),
            leader.stderr.take(),
        ) else {
            return Err(Error::new(ErrorCode::Internal, "a pipe is missing"));
        };

        let (gone, abandoned) = (CancellationToken::new(), CancellationToken::new());
        let stdin = match (spawn.stdin, leader.stdin.take()) {
            (StdinMode::Queue { limit_bytes }, Some(pipe)) => {
                Stdin::start(pipe, limit_bytes, gone.clone())
            }
            _ => Stdin::closed(),
        };
        let tail = StderrTail::default();
        let stderr_ended = CancellationToken::new();
        let ended = stderr_ended.clone().drop_guard();
        let (drained, given_up) = (tail.clone(), abandoned.clone());
        tokio::spawn(async move {
            given_up.run_until_cancelled(drained.drain(stderr)).await;
            drop(ended);
        });
        let (publish, state) = watch::channel(State::Running);
        let watched = Watched {
            release,
            guard_pipe,
            leader,
            guard,
        };
        let stdout = Stdout::new(stdout, abandoned.clone().cancelled_owned());
        tokio::spawn(async move {
            watched.run(publish).await;
            gone.cancel();
            tokio::time::sleep(PIPE_DRAIN_LIMIT).await;
            abandoned.cancel();
        });
        Ok(Self {
            pid,
            group,
            state,
            stdin,
            stdout: Some(stdout),
            stderr: tail,
            stderr_ended,
        })
    }

    /// The leader's process number; the group has the same.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Standard input.
    pub fn stdin(&self) -> &Stdin {
        &self.stdin
    }

    /// Standard output, once.
    pub fn take_stdout(&mut self) -> Option<Stdout> {
        self.stdout.take()
    }

    /// The last [`super::STDERR_TAIL_BYTES`] of standard error. For a diagnosis that a person asked for; it may hold
    /// parts of a prompt or paths, so no error contains it.
    pub fn stderr_tail(&self) -> String {
        self.stderr.text()
    }

    /// The same once standard error has ended, or after `limit`: what a program says last is read a moment after its exit
    /// is known, and a process that it leaves behind may keep standard error open.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn last_words(&self, limit: Duration) -> String {
        // Whether it ended or not, the tail is what is known.
        let _ = tokio::time::timeout(limit, self.stderr_ended.cancelled()).await;
        self.stderr.text()
    }

    /// Kills the group at once, without waiting for its end.
    pub fn kill(&self) {
        self.group.signal(Signal::KILL);
    }

    /// How the leader ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        self.state.borrow().exit()
    }

    /// Waits for the leader's exit. Unbounded by itself.
    ///
    /// The future does not borrow the group, and dropping it loses nothing.
    pub fn wait(&self) -> impl Future<Output = Exit> + Send + use<> {
        let mut state = self.state.clone();
        async move {
            let exit = state.wait_for(|state| state.exit().is_some()).await;
            // The sender is dropped without an exit only when the runtime shuts down.
            exit.ok()
                .and_then(|state| state.exit())
                .unwrap_or(Exit::Unknown)
        }
    }

    /// Waits until leader and guard are reaped, so that nothing of the group is left. Unbounded by itself.
    ///
    /// The future does not borrow the group, and dropping it loses nothing.
    pub fn gone(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut state = self.state.clone();
        async move {
            // The sender is dropped early only when the runtime shuts down; the group was killed then.
            let _ = state
                .wait_for(|state| matches!(state, State::Gone(_)))
                .await;
        }
    }

    /// Ends the group and waits until it is reaped: end of input, SIGTERM, SIGKILL, within the policy's bounds.
    ///
    /// Dropping the future kills the group at once.
    ///
    /// # Errors
    ///
    /// `process_cleanup` when the leader is still there [`REAP_LIMIT`] after SIGKILL.
    pub async fn end(self, policy: EndPolicy) -> Result<Exit> {
        self.stdin.close();
        if !self.exits_within(policy.after_stdin_close).await {
            if !policy.after_terminate.is_zero() {
                self.group.signal(Signal::TERM);
            }
            if !self.exits_within(policy.after_terminate).await {
                self.group.signal(Signal::KILL);
            }
        }
        let mut state = self.state.clone();
        let gone = state.wait_for(|state| matches!(state, State::Gone(_)));
        match tokio::time::timeout(REAP_LIMIT, gone).await {
            Ok(Ok(state)) => Ok(state.exit().unwrap_or(Exit::Unknown)),
            // The watching task is gone with its runtime; its drop has killed the group.
            Ok(Err(_)) => Ok(Exit::Unknown),
            Err(_) => Err(Error::new(
                ErrorCode::ProcessCleanup,
                format!(
                    "process {} did not end within {} s of SIGKILL",
                    self.pid(),
                    REAP_LIMIT.as_secs()
                ),
            )),
        }
    }

    async fn exits_within(&self, limit: Duration) -> bool {
        if limit.is_zero() {
            return self.exit().is_some();
        }
        tokio::time::timeout(limit, self.wait()).await.is_ok()
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        self.group.signal(Signal::KILL);
    }
}

impl Watched {
    /// Waits for the leader, kills the rest, reaps the guard.
    async fn run(mut self, publish: watch::Sender<State>) {
        let exit = self
            .leader
            .wait()
            .await
            .map_or(Exit::Unknown, Exit::from_status);
        publish.send_replace(State::Exited(exit));
        drop(self.release);
        drop(self.guard_pipe);
        // It was killed; an error means that the host ignores SIGCHLD and the system has reaped it.
        let _ = self.guard.wait().await;
        publish.send_replace(State::Gone(exit));
    }
}

fn leader_command(spawn: &Spawn) -> Command {
    let mut command = Command::new(&spawn.program);
    command
        .args(&spawn.argv)
        .env_clear()
        .envs(spawn.env.iter().map(|(name, value)| (name, value)))
        .current_dir(&spawn.cwd)
        .stdin(match spawn.stdin {
            StdinMode::Null => Stdio::null(),
            StdinMode::Queue { .. } => Stdio::piped(),
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command
}

fn guard_command(group: Pid, orphaned_dir: Option<&Path>) -> Command {
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", GUARD_SCRIPT, "turnpass-guard"])
        .args(orphaned_dir)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(group.as_raw_nonzero().get());
    command
}

/// The operating system ends strings at a NUL, so it would be a start that fails every time; refused before any start.
fn refuse_nul(spawn: &Spawn) -> Result<()> {
    let nul = |text: &std::ffi::OsStr| text.as_encoded_bytes().contains(&0);
    let place = if nul(spawn.program.as_os_str()) {
        Some("the program's path".to_owned())
    } else if spawn.orphaned_dir.iter().any(|dir| nul(dir.as_os_str())) {
        Some("the private directory".to_owned())
    } else if nul(spawn.cwd.as_os_str()) {
        Some("the working directory".to_owned())
    } else if let Some(index) = spawn.argv.iter().position(|argument| nul(argument)) {
        Some(format!("argument {}", index + 1))
    } else {
        let named = spawn
            .env
            .iter()
            .find(|(name, value)| nul(name) || nul(value));
        named.map(|(name, _)| format!("the variable {:?}", name.to_string_lossy()))
    };
    match place {
        None => Ok(()),
        Some(place) => Err(Error::new(
            ErrorCode::RequestInvalid,
            format!("{place} contains a NUL byte"),
        )),
    }
}

/// Asks the file system what an error of the start was about; the error itself does not say.
fn launch_error(spawn: &Spawn, error: &io::Error) -> Error {
    let enterable =
        rustix::fs::access(&spawn.cwd, rustix::fs::Access::EXEC_OK).is_ok() && spawn.cwd.is_dir();
    classify(
        error,
        &spawn.program,
        &spawn.cwd,
        enterable,
        spawn.program.exists(),
    )
}

fn classify(error: &io::Error, program: &Path, cwd: &Path, enterable: bool, exists: bool) -> Error {
    use rustix::io::Errno;
    let (program, cwd) = (program.display(), cwd.display());
    let errno = Errno::from_io_error(error);
    match errno {
        Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::PERM) if !enterable => {
            Error::new(
                ErrorCode::WorkingDirectory,
                format!("{cwd} cannot be entered"),
            )
        }
        Some(Errno::NOENT | Errno::NOTDIR) if exists => Error::new(
            ErrorCode::ExecutableUnusable,
            format!(
                "{program} is a script whose interpreter, or a program whose loader, is missing"
            ),
        ),
        Some(Errno::NOENT | Errno::NOTDIR) => Error::new(
            ErrorCode::ExecutableMissing,
            format!("{program} does not exist"),
        ),
        Some(Errno::ACCESS | Errno::PERM | Errno::ISDIR) => Error::new(
            ErrorCode::ExecutableUnusable,
            format!("{program} may not be executed"),
        ),
        Some(Errno::NOEXEC) => Error::new(
            ErrorCode::ExecutableUnusable,
            format!("{program} is no program for this machine (exec format error)"),
        ),
        Some(Errno::TOOBIG) => Error::new(
            ErrorCode::LaunchFailed,
            "the arguments and the environment together are too long for the operating system",
        )
        .with_remedy("Shorten the environment variables that are passed on, PATH first."),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => Error::new(
            ErrorCode::LaunchFailed,
            format!("the operating system is out of processes, memory or open files: {error}"),
        ),
        _ => Error::new(
            ErrorCode::LaunchFailed,
            format!("{program} could not be started: {error}"),
        ),
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
