//! One type that owns a process group, its pipes and its end.
//!
//! [`ChildGroup::spawn`] starts a program as leader of its own process group. From then on the group is a value: dropping
//! it kills the whole group at once, and [`ChildGroup::end`] ends it politely within fixed bounds and waits.
//!
//! # What keeps the promise that nothing is left running
//!
//! - The leader is watched. When it exits, for whatever reason, the rest of its group is killed at once, so a grandchild
//!   that ignores SIGTERM does not outlive it.
//! - A **guard** (`/bin/sh`, one `read` and two `kill`s) is a member of the group and waits on a pipe whose other end only
//!   this process holds. When this process dies, even by SIGKILL, the pipe closes, and the guard ends the group and removes
//!   its private directory. End of input on the CLI's standard input is not enough for that: with its host killed in the middle of a turn, the CLI was
//!   still running 25 seconds later, both with a stalled and with a slow upstream (2.1.294 and 2.1.332).
//! - The guard also keeps the group's number from being given to somebody else: it is not reaped before the last kill,
//!   so a signal to the group can never reach a stranger.
//!
//! What leaves the group on purpose (`setsid`) is out of reach; the CLI does not do that (2.1.332, `ps` during a turn).
//!
//! # Cancel safety
//!
//! [`ChildGroup::wait`] loses nothing when it is dropped. Dropping the future of [`ChildGroup::end`] kills the group.

#[cfg(not(unix))]
compile_error!(
    "turnpass needs process groups and runs on Linux and macOS only; on Windows use the Windows Subsystem for Linux"
);

mod end;
mod group;
mod stderr;
mod stdin;
mod stdout;

pub use end::{EndPolicy, Exit, REAP_LIMIT, SESSION_CLOSE_LIMIT, SHUTDOWN_LIMIT};
pub use group::{ChildGroup, Spawn, StdinMode};
pub use stderr::STDERR_TAIL_BYTES;
pub use stdin::{STDIN_QUEUE_BYTES, Stdin, StdinError};
pub use stdout::{PIPE_DRAIN_LIMIT, Stdout};
