//! A small agent over a turnpass provider: it asks, runs the tools that the model calls, and asks again.
//!
//! ```no_run
//! # async fn example(provider: turnpass::Provider) -> turnpass::Result<()> {
//! use turnpass_agent::{Agent, Approvals, tools};
//!
//! let mut agent = Agent::builder(provider, "sonnet")
//!     .directory(".")
//!     .tools(tools::all())
//!     .approvals(Approvals::read_only())
//!     .build()?;
//! let cancel = tokio_util::sync::CancellationToken::new();
//! let report = agent.run("What is in this folder?", &cancel, |_event| {}).await;
//! println!("{:?}", report.outcome);
//! # Ok(())
//! # }
//! ```
//!
//! # Layout
//!
//! | module | what |
//! | --- | --- |
//! | [`agent`] | the builder and the conversation that it owns |
//! | [`event`] | what a run tells, and the report that ends it |
//! | [`approval`] | who may do what: a pure verdict, and the person who is asked |
//! | [`compaction`] | when the conversation becomes shorter, and what stays of it: pure |
//! | [`session`] | conversations that outlive the program: a file each |
//! | [`directory`] | the working directory, and how a path is opened without leaving it |
//! | [`tools`] | read, list, search, write, edit, shell |
//! | `run`, `calls`, `compact` | the loop: one generation, then its tool calls, in rounds; and a summary where that is due |
//! | `retry`, `schedule`, `history`, `output` | the loop's decisions, all pure |
//!
//! # Cancel safety
//!
//! Cancel through the token: running tools are ended, text that was seen stays in the conversation with a note, and
//! [`Agent::run`] returns a report. Dropping the future of `run` ends the same things; text of the generation that
//! was running is lost then, and the next run closes the calls that were left open.

pub mod agent;
pub mod approval;
pub mod compaction;
pub mod directory;
pub mod event;
pub mod session;
pub mod tools;

mod calls;
mod compact;
mod history;
mod output;
mod retry;
mod run;
mod schedule;

#[cfg(test)]
mod compact_tests;
#[cfg(test)]
mod kept_tests;
#[cfg(test)]
mod run_tests;
#[cfg(test)]
mod scripted;

pub use agent::{Agent, AgentBuilder};
pub use approval::{Answer, Approvals, Approver, Ask};
pub use compaction::{Cause, Compaction, Threshold};
pub use directory::Directory;
pub use event::{AgentEvent, Outcome, Report};
pub use session::{CompactionMark, KeptSession, Past, SessionInfo, SessionStore};
pub use tools::{Effect, HostTool};
