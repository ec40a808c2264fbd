//! `turnpass lab compatibility`: the page that says which version of the CLI does what, and the table of the library that says
//! the same, both from reports of certifications.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use turnpass::certify::{Check, Otherwise};
use turnpass::request::TransportKind;

use crate::exit::{Exit, Fault};

/// Largest report that is read; one has about 6 KB.
const REPORT_BYTES: u64 = 1024 * 1024;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print the library's table of certified versions in place of the page
    #[arg(long)]
    released: bool,
    /// The reports, as `turnpass doctor --certify --report FILE` writes them
    #[arg(required = true, value_name = "FILE")]
    reports: Vec<PathBuf>,
}

/// What a report says of one version.
#[derive(Deserialize)]
struct Report {
    certificate: Certificate,
    refused: usize,
}

#[derive(Deserialize)]
struct Certificate {
    version: String,
    checks: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    name: Check,
    verdict: String,
    said: String,
}

impl Report {
    fn of(&self, check: Check) -> Option<&Row> {
        self.certificate.checks.iter().find(|row| row.name == check)
    }

    fn holds(&self, check: Check) -> bool {
        self.of(check).is_some_and(|row| row.verdict == "holds")
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<Exit, Fault> {
    let mut reports = Vec::new();
    for path in &args.reports {
        reports.push(read(path)?);
    }
    reports.sort_by_key(|report| numbers(&report.certificate.version));
    super::print(&match args.released {
        true => released(&reports),
        false => page(&reports),
    })
}

fn read(path: &Path) -> Result<Report, Fault> {
    let wrong = |what: String| {
        let next = "Name a file that `turnpass doctor --certify --report FILE` wrote.";
        Fault::usage(format!("{}: {what}", path.display()), next)
    };
    let state = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    if state.len() > REPORT_BYTES {
        return Err(wrong("it is too large".to_owned()));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))
}

/// The page.
fn page(reports: &[Report]) -> String {
    let mut text = String::from(HEAD);
    text.push_str("\n## What each version does\n\n");
    table(&mut text, reports);
    text.push_str("\n## What that means for each transport\n\n");
    transports(&mut text, reports);
    text.push_str("\n## What was seen instead\n\n");
    differences(&mut text, reports);
    text.push_str("\n## The checks\n\n");
    checks(&mut text);
    text
}

const HEAD: &str = "# Compatibility\n\n\
    Which version of the CLI does what turnpass relies on. This page is written by `just compatibility` from the reports in\n\
    `conformance/certificates`, one for each version, which `conformance/certify` makes with `turnpass doctor --certify`: the real\n\
    CLI in the laboratory, in base shape (an upstream on loopback, a made-up sign-in, everything else refused). Change neither by\n\
    hand. For your own CLI ask [the doctor](guide/doctor.md).\n";

fn table(text: &mut String, reports: &[Report]) {
    let cells = |each: &dyn Fn(&Report) -> String| {
        let cells: Vec<_> = reports.iter().map(each).collect();
        cells.join(" | ")
    };
    let versions = cells(&|report| report.certificate.version.clone());
    text.push_str(&format!(
        "| check | {versions} |\n| --- |{}\n",
        " --- |".repeat(reports.len())
    ));
    for check in Check::ALL {
        let marks = cells(&|report| match report.of(*check) {
            Some(row) if row.verdict == "holds" => "yes".to_owned(),
            Some(row) if row.verdict == "fails" => "**no**".to_owned(),
            _ => "-".to_owned(),
        });
        text.push_str(&format!("| `{check}` | {marks} |\n"));
    }
    let refused = cells(&|report| report.refused.to_string());
    text.push_str(&format!("| refused connections | {refused} |\n"));
}

fn transports(text: &mut String, reports: &[Report]) {
    text.push_str("| version | pool | replay | relay |\n| --- | --- | --- | --- |\n");
    for report in reports {
        let cells = TransportKind::ALL.map(|transport| for_transport(report, transport));
        let version = &report.certificate.version;
        text.push_str(&format!("| {version} | {} |\n", cells.join(" | ")));
    }
}

fn for_transport(report: &Report, transport: TransportKind) -> String {
    let missing = Check::ALL.iter().filter(|check| !report.holds(**check));
    let (mut refused, mut ways) = (Vec::new(), Vec::new());
    for check in missing {
        match check.otherwise(transport) {
            Some(Otherwise::Refuses(_)) => refused.push(format!("`{check}`")),
            Some(Otherwise::FallsBack(way) | Otherwise::Always(way)) => {
                ways.push(format!("`{check}`: {way}"))
            }
            None => {}
        }
    }
    match (refused.is_empty(), ways.is_empty()) {
        (false, _) => format!("no: {}", refused.join(", ")),
        (true, false) => format!("yes; {}", ways.join("; ")),
        (true, true) => "yes".to_owned(),
    }
}

fn differences(text: &mut String, reports: &[Report]) {
    let mut is_empty = true;
    for check in Check::ALL {
        let mut said: Vec<(&str, Vec<&str>)> = Vec::new();
        for report in reports {
            let Some(row) = report.of(*check).filter(|row| row.verdict != "holds") else {
                continue;
            };
            let version = report.certificate.version.as_str();
            match said.iter_mut().find(|(what, _)| *what == row.said) {
                Some((_, versions)) => versions.push(version),
                None => said.push((&row.said, vec![version])),
            }
        }
        for (what, versions) in said {
            is_empty = false;
            let what = what.replace('|', "\\|");
            text.push_str(&format!("- `{check}` on {}: {what}\n", versions.join(", ")));
        }
    }
    if is_empty {
        text.push_str("Nothing: every check holds on every version.\n");
    }
}

fn checks(text: &mut String) {
    text.push_str("| check | holds when | without it |\n| --- | --- | --- |\n");
    for check in Check::ALL {
        let about = check.about();
        // One sentence for all transports that say the same.
        let sentences: BTreeSet<_> = about
            .relied_on_by
            .iter()
            .map(|one| one.otherwise.as_str())
            .collect();
        let without: Vec<_> = sentences
            .into_iter()
            .map(|sentence| {
                let who = about
                    .relied_on_by
                    .iter()
                    .filter(|one| one.otherwise.as_str() == sentence);
                let who: Vec<_> = who
                    .map(|one| match one.otherwise {
                        Otherwise::Refuses(_) => format!("{} refuses", one.transport),
                        Otherwise::FallsBack(_) | Otherwise::Always(_) => one.transport.to_string(),
                    })
                    .collect();
                format!("{}: {sentence}", who.join(", "))
            })
            .collect();
        text.push_str(&format!(
            "| `{check}` | {} | {} |\n",
            about.what,
            without.join("; ")
        ));
    }
}

const RELEASED_HEAD: &str = "//! The versions that were certified before this build was released, with the checks that each does not pass. Written by\n\
    //! `just compatibility` from the reports in `conformance/certificates`; not to be changed by hand.\n\
    \n\
    use super::check::Check;\n\
    use crate::cli::version::Version;\n\
    \n\
    /// Whether this build is for the platform on which they were certified.\n\
    pub(super) const IS_HERE: bool = cfg!(all(target_os = \"linux\", target_arch = \"x86_64\"));\n\
    \n\
    /// Each version.\n\
    #[rustfmt::skip]\n\
    pub(super) const VERSIONS: &[(Version, &[Check])] = &[\n\
    ";

/// `crates/turnpass/src/certify/released.rs`.
fn released(reports: &[Report]) -> String {
    let mut text = String::from(RELEASED_HEAD);
    for report in reports {
        let numbers: Vec<_> = numbers(&report.certificate.version);
        let numbers: Vec<_> = numbers.iter().map(u64::to_string).collect();
        let failing = Check::ALL.iter().filter(|check| !report.holds(**check));
        let failing: Vec<_> = failing.map(|check| format!("Check::{check:?}")).collect();
        text.push_str(&format!(
            "    (Version::new({}), &[{}]),\n",
            numbers.join(", "),
            failing.join(", ")
        ));
    }
    text.push_str("];\n");
    text
}

fn numbers(version: &str) -> Vec<u64> {
    let parts = version.split('.');
    parts.map(|part| part.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(version: &str, failed: Option<Check>) -> Report {
        let checks: Vec<_> = Check::ALL
            .iter()
            .map(|check| match Some(*check) == failed {
                true => json!({"name": check, "verdict": "fails", "said": "2 requests"}),
                false => json!({"name": check, "verdict": "holds", "said": ""}),
            })
            .collect();
        let certificate = json!({"version": version, "digest": "0", "checks": checks});
        serde_json::from_value(json!({"certificate": certificate, "took_ms": 9_400, "refused": 61}))
            .unwrap()
    }

    #[test]
    fn what_fails_is_told_with_what_it_means() {
        let reports = [
            report("2.1.300", Some(Check::StopAfterCut)),
            report("2.1.301", Some(Check::RetriesOff)),
            report("2.1.1000", None),
        ];
        let page = page(&reports);
        for line in [
            "| check | 2.1.300 | 2.1.301 | 2.1.1000 |",
            "| `stop_after_cut` | **no** | yes | yes |",
            "| 2.1.300 | yes; `stop_after_cut`: a block without its own end is dropped |",
            "| 2.1.301 | no: `retries_off` | no: `retries_off` | yes; `retries_off`: the relay refuses every other request |",
            "| 2.1.1000 | yes | yes | yes |",
            "- `stop_after_cut` on 2.1.300: 2 requests",
        ] {
            assert!(page.contains(line), "{line}\n{page}");
        }
        for check in Check::ALL {
            assert!(
                page.contains(&format!("| `{check}` | {} |", check.about().what)),
                "{check}"
            );
        }
    }
}
