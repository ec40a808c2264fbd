//! The runner of a certification: the installed CLI in the laboratory, one check after another in two lanes.
//!
//! It lives in the program and not in the library, because it needs the laboratory's upstream, and the laboratory depends on
//! none of our crates and none of them on it. What it finds is a [`Certificate`] of the library.
//!
//! | module | what |
//! | --- | --- |
//! | [`cli`] | one process: lines in, records out, every wait bounded |
//! | [`lane`] | an upstream, a made-up home and the one process that checks share |
//! | [`conversation`] | what a request says, in a form that can be compared |
//! | [`checks`] | the checks |

mod checks;
mod cli;
mod conversation;
mod lane;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use turnpass::certify::{Certificate, Check, Identity, Outcome, Verdict};
use turnpass::cli::environment::Snapshot;
use turnpass::cli::installed::Found;
use turnpass::cli::private_dir::{PrivateDir, roots};
use turnpass_lab::rig::RefusingProxy;

use crate::exit::Fault;
use cli::Why;
use lane::{Lane, Subject};

/// Longest check. The longest one starts two processes; on a machine under load a start takes two seconds.
const CHECK_LIMIT: Duration = Duration::from_secs(60);

/// Processes of the CLI at a time. Each needs a core while it starts and about 200 MB.
pub(crate) const LANES: usize = 2;

/// What is to be certified.
pub(crate) struct Plan {
    /// The CLI.
    pub(crate) found: Found,
    /// The environment of this process; home and proxies are replaced.
    pub(crate) snapshot: Snapshot,
    /// The checks.
    pub(crate) checks: Vec<Check>,
}

/// What came out of it.
pub(crate) struct Certified {
    /// The certificate.
    pub(crate) certificate: Certificate,
    /// Where the CLI wanted to go, and how often; all of it was refused.
    pub(crate) refused: BTreeMap<String, usize>,
    /// How long it took in all.
    pub(crate) took: Duration,
}

/// Runs the checks of a plan and tells each outcome as soon as it is known.
///
/// Nothing reaches the service, and nothing of the person's home is read. Dropping the future ends every process.
///
/// # Errors
///
/// When the laboratory cannot be set up, or the program file cannot be read.
pub(crate) async fn certify(
    plan: Plan,
    tell: &mut dyn FnMut(&Outcome),
) -> Result<Certified, Fault> {
    let began = Instant::now();
    let failed = |error: &dyn std::fmt::Display| {
        Fault::system(
            format!("the laboratory cannot be set up: {error}"),
            "Check the space and the permissions of the folder for temporary files.",
        )
    };
    let program = plan.found.executable.path.clone();
    let identity = Identity::of(plan.found.version, &program).map_err(|error| failed(&error))?;
    let proxy = RefusingProxy::start().map_err(|error| failed(&error))?;
    // Private, locked while it is in use, and swept after a kill like every folder of ours.
    let folder = PrivateDir::create(&roots(&plan.snapshot)).map_err(|error| failed(&error))?;
    let tool_server = std::env::current_exe().map_err(|error| failed(&error))?;
    let subject = Subject::new(
        program,
        plan.found.version.to_string(),
        fenced(plan.snapshot, &proxy),
        tool_server,
    );
    let subject = Arc::new(subject.map_err(|why| failed(&why))?);
    let mut lanes = Vec::new();
    for number in 0..LANES {
        let folder: PathBuf = folder.path().join(number.to_string());
        std::fs::create_dir(&folder).map_err(|error| failed(&error))?;
        lanes.push(Lane::new(Arc::clone(&subject), folder).map_err(|why| failed(&why))?);
    }
    let mut checks = plan.checks;
    checks.sort_by_key(|check| !checks::shares_its_process(*check));
    let outcomes = run(checks, &mut lanes, tell).await;
    drop(lanes);
    let mut refused = BTreeMap::new();
    for target in proxy.attempts() {
        *refused.entry(target).or_insert(0) += 1;
    }
    Ok(Certified {
        certificate: Certificate::new(identity, outcomes),
        refused,
        took: began.elapsed(),
    })
}

/// The environment with every proxy variable at a proxy that refuses all, and nothing that points at the person's
/// configuration.
fn fenced(mut snapshot: Snapshot, proxy: &RefusingProxy) -> Snapshot {
    snapshot.remove("CLAUDE_CONFIG_DIR");
    for (name, value) in proxy.environment() {
        snapshot.set(name, value);
    }
    snapshot
}

/// Each lane takes the next check as soon as it is free.
async fn run(
    checks: Vec<Check>,
    lanes: &mut [Lane],
    tell: &mut dyn FnMut(&Outcome),
) -> Vec<Outcome> {
    let waiting: RefCell<VecDeque<Check>> = RefCell::new(checks.into());
    let told = RefCell::new((Vec::new(), tell));
    let work = lanes.iter_mut().map(|lane| async {
        loop {
            let next = waiting.borrow_mut().pop_front();
            let Some(check) = next else { break };
            let outcome = one(check, lane).await;
            let (outcomes, tell) = &mut *told.borrow_mut();
            tell(&outcome);
            outcomes.push(outcome);
        }
        lane.end();
    });
    futures_util::future::join_all(work).await;
    told.into_inner().0
}

/// How often a check is tried that fails by its lateness alone.
const TRIES: usize = 2;

/// Runs a check, and once more if it was only late: transports obey a certificate, and a machine under load must not write a
/// wrong one.
async fn one(check: Check, lane: &mut Lane) -> Outcome {
    let began = Instant::now();
    let mut checked = tried(check, lane).await;
    for _ in 1..TRIES {
        let Err(Why::Late(why)) = &checked else { break };
        tracing::warn!(%check, why, "late, so it is tried once more");
        checked = tried(check, lane).await;
    }
    let verdict = match checked {
        Ok(()) => Verdict::Holds,
        Err(Why::Late(late)) => Verdict::Fails {
            seen: format!("{late}, {TRIES} times in a row"),
        },
        Err(Why::Seen(seen)) => Verdict::Fails { seen },
        Err(Why::NotChecked(why)) => Verdict::NotChecked { why },
    };
    Outcome {
        check,
        verdict,
        took_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
    }
}

/// Runs a check. One that does not hold leaves a lane that is as new.
async fn tried(check: Check, lane: &mut Lane) -> Result<(), Why> {
    let checked = tokio::time::timeout(CHECK_LIMIT, checks::run(check, lane)).await;
    let late = || Why::Late(format!("no end within {} s", CHECK_LIMIT.as_secs()));
    let checked = checked.unwrap_or_else(|_| Err(late()));
    if checked.is_ok() {
        return checked;
    }
    match (lane.renew(), checked) {
        // Without a laboratory a second try would look at nothing.
        (Err(why), Err(Why::Late(_))) => Err(why),
        (Err(why), checked) => {
            tracing::warn!("the laboratory could not be set up again: {why}");
            checked
        }
        (Ok(()), checked) => checked,
    }
}
