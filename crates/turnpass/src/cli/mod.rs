//! The installed CLI: where it is, whether it fits, whether it is signed in, and how it is started.
//!
//! | module | what |
//! | --- | --- |
//! | [`locate`] | the executable and the rule that found it |
//! | [`version`] | `claude --version` and the floor |
//! | [`auth`] | `claude auth status`, as one shared check |
//! | [`installed`] | all three together, as a provider uses them |
//! | [`ask`] | a short command, bounded |
//! | [`inquiry`] | a process that is started to be asked, without a generation |
//! | [`environment`] | what a child may inherit and what is set for it; the only reader of our own environment |
//! | [`settings`] | the settings file that isolates a child from the person's own configuration |
//! | `isolation` | whether it loaded what it was told to load and nothing else |
//! | [`launch`] | argv, environment and files of each kind of process, as data |
//! | [`starts`] | how many processes start at once |
//! | [`places`] | places for kept processes within a memory budget |
//! | [`private_dir`] | where launch files live |
//!
//! The pure parts decide, thin drivers do. No function here opens, lists or stats a credential file.

pub mod ask;
pub mod auth;
pub mod environment;
pub mod inquiry;
pub mod installed;
pub(crate) mod isolation;
pub mod launch;
pub mod locate;
pub mod places;
pub mod private_dir;
pub mod settings;
pub mod starts;
pub mod version;
