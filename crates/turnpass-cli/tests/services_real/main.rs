//! NEEDS THE REAL CLI (`conformance/install`): sign-in, usage, models and the gate in production shape, where the CLI
//! believes that it talks to its own service and everything stays on loopback. Only there does it answer `get_usage`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a test fails by panicking"
)]

mod gate;
mod pool;
mod program;
mod stage;
mod strace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use turnpass_lab::rig::{ProductionShape, REQUIRE_REAL_CLI, RealCli};

use stage::Stage;

fn main() -> ExitCode {
    if let Some(code) = pool::play() {
        return code;
    }
    // Ends the program for wrong ones, before there is anything to clean up.
    let mut arguments = Arguments::from_args();
    // Short, since the CLI makes sockets below it, and named by the process, which stays the same inside the namespaces.
    let dir = PathBuf::from(format!("/tmp/tps-{}", std::process::id()));
    let shape = ProductionShape::enter(&dir).map(Arc::new);
    // The CLI's hosts are one address, so there is one upstream at a time.
    arguments.test_threads = Some(1);
    let required = std::env::var(REQUIRE_REAL_CLI).as_deref() == Ok("1");
    if let Err(reason) = &shape {
        assert!(!required, "NOT TESTED: {reason}");
        eprintln!("====\nNOT TESTED: the services with the real CLI: {reason}\n====");
    }
    let conformance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let is_possible = shape.is_ok();
    let mut trials = Vec::new();
    let all = RealCli::for_tests(&conformance, "tests/services_real of turnpass-cli");
    for (number, cli) in all.iter().enumerate() {
        let mut tests = tests();
        if number + 1 == all.len() {
            tests.extend(pool::ON_THE_NEWEST);
        }
        for (name, test) in tests {
            let (cli, shape) = (cli.clone(), shape.clone());
            // A private directory whose path is too long for a socket would be made elsewhere.
            let folder = dir.join(trials.len().to_string());
            let trial = Trial::test(format!("{}::{name}", cli.version), move || {
                let shape = shape.map_err(|reason| Failed::from(reason.to_string()))?;
                test(&Stage::set(&cli, &shape, &folder));
                Ok(())
            });
            trials.push(trial.with_ignored_flag(!is_possible));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    // Whatever is left is in a folder of our own.
    let _ = std::fs::remove_dir_all(&dir);
    conclusion.exit_code()
}

type Test = fn(&Stage);

fn tests() -> Vec<(&'static str, Test)> {
    let mut tests: Vec<(&'static str, Test)> = Vec::new();
    tests.extend(gate::TESTS);
    tests.extend(pool::TESTS);
    tests.extend(program::TESTS);
    tests.extend(strace::TESTS);
    tests
}
