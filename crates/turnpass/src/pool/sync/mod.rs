//! What the CLI's conversation holds, and what has to happen so that it holds the host's: pure.
//!
//! | module | what |
//! | --- | --- |
//! | `compare` | what of a message is compared, and its hashes |
//! | `record` | what a live process's conversation holds, entry by entry |
//! | `state` | the same in a few hundred bytes, kept by the host |
//! | `plan` | from these and a request: the process to use and the messages to give it |
//!
//! Source: the pool document ("The sync record is append-only", "A new parent process restores"); SPEC 5 where it
//! decides otherwise.

mod compare;
mod plan;
mod record;
mod state;

#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod record_tests;
#[cfg(test)]
mod simulation_tests;
#[cfg(test)]
mod state_tests;

pub(crate) use plan::{Asked, Base, Deliver, Given, Live, Parked, Plan, Rewind, Settings, plan};
pub(crate) use record::Record;
pub(crate) use state::{Owner, Unusable, decode, encode};
