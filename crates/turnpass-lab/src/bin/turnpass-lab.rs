//! `turnpass-lab lab cli SCRIPT [ARG...]`: the scripted CLI on its own, for the tests of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    match turnpass_lab::cli::intercept() {
        Some(code) => code,
        None => ExitCode::from(turnpass_lab::cli::EXIT_BAD_SCRIPT),
    }
}
