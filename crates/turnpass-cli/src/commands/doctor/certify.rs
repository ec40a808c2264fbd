//! `turnpass doctor --certify`: each behaviour that a transport relies on, tried on the installed CLI in the laboratory.

use serde_json::json;
use turnpass::certify::{Certificate, Certificates, Check, Outcome, Verdict};
use turnpass::cli::environment::{InheritedCredentials, Snapshot};
use turnpass::cli::installed::Installed;
use turnpass::request::TransportKind;
use turnpass::{Error, ErrorCode};

use crate::certify::{Certified, Plan, certify};
use crate::context::{self, Context};
use crate::exit::{Exit, Fault};
use crate::settings::Settings;
use crate::terminal::{Style, visible};

use super::Args;
use super::report::{self, Destination};

/// Runs the checks, tells each one, and keeps the certificate if all were run.
pub(super) async fn run(
    args: &Args,
    destination: Option<Destination>,
    settings: &Settings,
    context: &Context,
) -> Result<Exit, Fault> {
    let snapshot = Snapshot::of_this_process();
    let installed = Installed::new(
        settings.claude_setting(),
        snapshot.clone(),
        InheritedCredentials::Strip,
    );
    let found = installed.checked().await?;
    installed.shutdown().await;
    let style = context.output_style();
    let is_whole = args.check.is_empty();
    let checks = match is_whole {
        true => Check::ALL.to_vec(),
        false => args.check.clone(),
    };
    if !args.json {
        let many = checks.len();
        let version = found.version;
        super::super::print(&format!(
            "claude {version}: {many} checks in the laboratory, at no cost\n"
        ))?;
    }
    let plan = Plan {
        found,
        snapshot,
        checks,
    };
    let mut written = Ok(Exit::Done);
    let mut tell = |outcome: &Outcome| {
        if !args.json && written.is_ok() {
            written = super::super::print(&line(outcome, style));
        }
    };
    let certified = tokio::select! {
        biased;
        () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
        certified = certify(plan, &mut tell) => certified?,
    };
    written?;
    let kept = match is_whole && was_all_seen(&certified.certificate) {
        true => keep(&certified.certificate),
        false => None,
    };
    if let Some(destination) = destination {
        let mut shown = report::public(&[], Some(&certified.certificate));
        shown["took_ms"] = json!(milliseconds(&certified));
        shown["refused"] = json!(certified.refused.values().sum::<usize>());
        destination.write(&shown)?;
    }
    if args.json {
        super::super::print(&format!("{}\n", as_json(&certified, kept.as_ref())))?;
    } else {
        super::super::print(&summary(&certified, kept.as_ref(), is_whole))?;
    }
    Ok(exit(&certified.certificate, kept.as_ref()))
}

/// Whether every check could be looked at. Transports obey a certificate, so what the laboratory failed at must not speak of the
/// CLI.
fn was_all_seen(certificate: &Certificate) -> bool {
    let mut outcomes = certificate.outcomes().iter();
    outcomes.all(|one| !matches!(one.verdict, Verdict::NotChecked { .. }))
}

/// Keeps it; the error is told, and does not undo what was found.
fn keep(certificate: &Certificate) -> Option<turnpass::Result<()>> {
    let dir = context::state_dir()
        .ok_or_else(|| Error::new(ErrorCode::Internal, "there is no home folder"));
    Some(dir.and_then(|dir| Certificates::new(&dir).keep(certificate)))
}

/// 0 when every check that was run holds; the exit code of an incompatible CLI when a transport refuses; else 1.
fn exit(certificate: &Certificate, kept: Option<&turnpass::Result<()>>) -> Exit {
    let all_hold = certificate
        .outcomes()
        .iter()
        .all(|one| one.verdict == Verdict::Holds);
    match (all_hold, kept) {
        (true, None | Some(Ok(()))) => Exit::Done,
        _ => Exit::Failed,
    }
}

/// One line a check.
pub(super) fn line(outcome: &Outcome, style: Style) -> String {
    let mark = match outcome.verdict {
        Verdict::Holds => style.green("ok  "),
        Verdict::Fails { .. } => style.red("fail"),
        Verdict::NotChecked { .. } => style.yellow("none"),
    };
    let about = outcome.check.about();
    let said = match outcome.verdict.said() {
        "" => about.what.to_owned(),
        said => format!("{said} (wanted: {})", about.what),
    };
    let said = visible(&said).replace('\n', " ");
    format!(
        "{mark} {:<22} {:>5} ms  {said}\n",
        about.name, outcome.took_ms
    )
}

/// What it means for each transport, and what was refused.
fn summary(certified: &Certified, kept: Option<&turnpass::Result<()>>, is_whole: bool) -> String {
    let certificate = &certified.certificate;
    let outcomes = certificate.outcomes();
    let held = outcomes
        .iter()
        .filter(|one| one.verdict == Verdict::Holds)
        .count();
    let mut text = format!(
        "{held} of {} hold, in {:.1} s\n",
        outcomes.len(),
        certified.took.as_secs_f64()
    );
    if is_whole {
        for transport in TransportKind::ALL {
            text.push_str(&for_transport(certificate, transport));
        }
    }
    match certified.refused.is_empty() {
        true => text.push_str("nothing wanted to leave this machine\n"),
        false => {
            let count: usize = certified.refused.values().sum();
            let each: Vec<_> = certified
                .refused
                .iter()
                .map(|(to, n)| format!("{to} ({n})"))
                .collect();
            let each = visible(&each.join(", "));
            text.push_str(&format!("refused {count} connections: {each}\n"));
        }
    }
    match kept {
        Some(Ok(())) => text.push_str("kept for this program file until it changes\n"),
        Some(Err(error)) => text.push_str(&format!("not kept: {error}\n")),
        None if is_whole => text.push_str("not kept: some checks could not be run\n"),
        None => text.push_str("not kept: only some checks were run\n"),
    }
    text
}

fn for_transport(certificate: &Certificate, transport: TransportKind) -> String {
    if let Some(error) = certificate.refusal(transport) {
        return format!("{transport}: does not work with it. {}\n", error.detail());
    }
    let ways = certificate.fall_backs(transport);
    if ways.is_empty() {
        return format!("{transport}: everything it relies on holds\n");
    }
    let ways: Vec<_> = ways
        .iter()
        .map(|(check, way)| format!("{check}: {way}"))
        .collect();
    format!("{transport}: works; {}\n", ways.join("; "))
}

fn as_json(certified: &Certified, kept: Option<&turnpass::Result<()>>) -> serde_json::Value {
    let certificate = &certified.certificate;
    let checks: Vec<_> = certificate
        .outcomes()
        .iter()
        .map(|one| {
            let relied_on_by: Vec<_> = one.check.about().relied_on_by.iter().map(|who| {
                json!({"transport": who.transport, "otherwise": who.otherwise.kind(), "means": who.otherwise.as_str()})
            }).collect();
            json!({
                "name": one.check, "verdict": one.verdict.as_str(), "said": one.verdict.said(),
                "took_ms": one.took_ms, "what": one.check.about().what, "relied_on_by": relied_on_by,
            })
        })
        .collect();
    json!({
        "version": certificate.identity().version(), "digest": certificate.identity().digest(),
        "checks": checks, "refused_connections": certified.refused,
        "took_ms": milliseconds(certified),
        "kept": matches!(kept, Some(Ok(()))),
    })
}

fn milliseconds(certified: &Certified) -> u64 {
    u64::try_from(certified.took.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use turnpass::certify::Identity;
    use turnpass::cli::version::Version;

    use super::*;

    #[test]
    fn what_the_laboratory_failed_at_is_not_kept() {
        let program = std::env::current_exe().unwrap();
        let identity = Identity::of(Version::new(2, 1, 332), &program).unwrap();
        let certificate = |verdict: Verdict| {
            let outcome = |check: &Check| Outcome {
                check: *check,
                verdict: match check {
                    Check::ForkAt => verdict.clone(),
                    _ => Verdict::Holds,
                },
                took_ms: 1,
            };
            let outcomes = Check::ALL.iter().map(outcome).collect();
            Certificate::new(identity.clone(), outcomes)
        };
        let (seen, why) = ("two requests".to_owned(), "no space".to_owned());
        for (verdict, is_kept) in [
            (Verdict::Holds, true),
            (Verdict::Fails { seen }, true),
            (Verdict::NotChecked { why }, false),
        ] {
            assert_eq!(was_all_seen(&certificate(verdict)), is_kept);
        }
    }
}
