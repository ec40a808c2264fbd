//! Runs the real `claude` hermetically: no account, no network, nothing left behind.
//!
//! # Layout
//!
//! - [`isolate`]: a network namespace with loopback only, or else a proxy that refuses everything.
//! - [`RefusingProxy`]: counts what wanted to go out.
//! - [`MadeUpHome`]: a throw-away home with a made-up sign-in, and configuration that must not take effect.
//! - [`ProductionShape`]: the CLI's own hosts on loopback, with a throw-away authority.
//! - [`RealCli`]: the pinned versions under `conformance/`, and the one on the path.
//! - [`processes`]: who is alive, how much memory they use, and waiting until they are gone.
//!
//! Everything here writes only into directories that the caller gives, and nothing here reads the
//! caller's own home.

mod home;
mod isolation;
pub mod processes;
mod production;
mod proxy;
mod real;

pub use home::{MadeUpHome, Planted, SignIn};
pub use isolation::{Isolation, isolate};
pub use processes::{ProcessTree, alive_in_group, descendants, pss_bytes, rss_bytes, wait_gone};
pub use production::{PRODUCTION_HOSTS, ProductionShape, Unavailable};
pub use proxy::RefusingProxy;
pub use real::{REQUIRE_REAL_CLI, RealCli};
