//! `turnpass usage`: how much of the plan is used, whether credits are on, and what the gate would say.

use std::io::Write;
use std::path::Path;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use turnpass::Error;
use turnpass::limits::Policy;
use turnpass::limits::budget::{Ledger, Moment};
use turnpass::limits::gate::{Finding, Passage};
use turnpass::limits::guard::LEDGER_FILE;
use turnpass::limits::latest::{Dated, Latest, MAX_AGE};
use turnpass::limits::probe::Probe;
use turnpass::limits::state_file::StateFile;
use turnpass::limits::verdict::Doubt;
use turnpass::limits::windows::{Credits, UsedWindow};

use self::recorded::Recorded;
use super::models::grouped;
use crate::context::{self, Context, records_folder, state_dir};
use crate::exit::{Exit, Fault};
use crate::settings::Values;
use crate::show::span;
use crate::terminal::{Style, visible};

mod recorded;

/// Characters of a bar.
const BAR: usize = 30;

/// Sessions whose tokens are shown.
const SESSIONS: usize = 5;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Show it anew every minute until it is cancelled
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    values: Values,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(args.values)?;
    let installed = context::installed(&settings);
    // A laboratory run neither reads nor changes what is known of the plan.
    let state = state_dir().filter(|_| settings.lab_upstream.is_none());
    let latest = Latest::new(&Probe::new(installed), state.as_deref());
    let style = context.output_style();
    let shown = async {
        let mut seen = false;
        loop {
            let mut page = match Page::of(&latest, state.as_deref()).await {
                Ok(page) => page,
                // Somebody who watches wants to see it get better; who has seen nothing yet wants to know why.
                Err(error) if seen => {
                    let _ = writeln!(std::io::stderr(), "{}", visible(&error.to_string()));
                    tokio::time::sleep(MAX_AGE).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            seen = true;
            page.recorded = Recorded::read(
                records_folder().ok().as_deref(),
                settings.lab_upstream.is_some(),
                &settings.prices,
                Timestamp::now(),
            );
            let text = match args.json {
                true => format!("{}\n", page.object()),
                false => page.text(style),
            };
            super::print(&text)?;
            if !args.watch {
                return Ok::<_, Fault>(Exit::Done);
            }
            tokio::time::sleep(MAX_AGE).await;
        }
    };
    let exit = tokio::select! {
        biased;
        () = context.cancel().cancelled() => Ok(match args.watch {
            true => Exit::Done,
            false => Exit::Cancelled,
        }),
        exit = shown => exit,
    };
    latest.shutdown().await;
    exit
}

/// What is shown.
struct Page {
    dated: Dated,
    now: Moment,
    ledger: Ledger,
    recorded: Recorded,
}

impl Page {
    async fn of(latest: &Latest, state: Option<&Path>) -> Result<Self, Error> {
        let dated = latest.look().await?;
        let ledger = state.map(|dir| StateFile::new(dir, LEDGER_FILE));
        // A ledger that cannot be read is told by the request that needs it.
        let ledger = ledger.and_then(|file| file.read().ok().flatten());
        Ok(Self {
            dated,
            now: Moment::now(),
            ledger: ledger.unwrap_or_default(),
            recorded: Recorded::default(),
        })
    }

    fn text(&self, style: Style) -> String {
        let reading = &self.dated.reading;
        let plan = reading.plan.as_deref().unwrap_or("not told");
        let mut text = line("plan", &visible(plan));
        for window in &reading.windows {
            let shown = bar(window, self.now.unix_s, style);
            text.push_str(&line(&visible(&window.name), &shown));
        }
        if reading.windows.is_empty() {
            text.push_str(&line(
                "windows",
                "the CLI shows none; `turnpass auth status` says whether it is signed in",
            ));
        }
        let credits = match (reading.credits, &reading.doubt) {
            (Credits::Off, _) => style.green("off"),
            (Credits::On, _) => style.yellow("on: use beyond the plan's limits would be charged"),
            (Credits::Unconfirmed, doubt) => {
                let doubt = visible(doubt.as_deref().unwrap_or_default());
                style.yellow(&format!("not known: {doubt}"))
            }
        };
        text.push_str(&line("usage credits", &credits));
        for policy in [Policy::RequireOff, Policy::Warn] {
            let name = format!("gate {policy}");
            text.push_str(&line(&name, &gate_says(reading.credits, policy)));
        }
        let today = self.ledger.today(&self.now);
        let requests = format!(
            "{} requests, {} tokens through turnpass",
            grouped(today.requests),
            grouped(today.tokens)
        );
        text.push_str(&line("today", &requests));
        for session in self.ledger.sessions().iter().take(SESSIONS) {
            let ago = span(self.now.unix_s.saturating_sub(session.last));
            let spent = session.spent;
            text.push_str(&line(
                "session",
                &format!(
                    "{} requests, {} tokens, {ago} ago",
                    grouped(spent.requests),
                    grouped(spent.tokens)
                ),
            ));
        }
        text.push_str(&self.recorded.text(&TimeZone::system()));
        let age = self.now.unix_s.saturating_sub(self.dated.at);
        text.push_str(&style.dim(&line("asked", &format!("{} ago, at no cost", span(age)))));
        text
    }

    fn object(&self) -> Value {
        let reading = &self.dated.reading;
        let gate = |policy| gate_says(reading.credits, policy);
        json!({
            "plan": reading.plan,
            "rate_limits_available": reading.rate_limits_available,
            "windows": reading.windows,
            "credits": reading.credits,
            "doubt": reading.doubt,
            "gate": {"require_off": gate(Policy::RequireOff), "warn": gate(Policy::Warn)},
            "today": self.ledger.today(&self.now),
            "sessions": self.ledger.sessions().iter().take(SESSIONS).collect::<Vec<_>>(),
            "recorded": self.recorded.object(),
            "asked_at": self.dated.at,
        })
    }
}

/// What the gate would do with a new user message.
fn gate_says(credits: Credits, policy: Policy) -> String {
    let finding = match credits {
        Credits::Off => Finding::Off,
        Credits::On => Finding::On,
        Credits::Unconfirmed => Finding::Unconfirmed(Doubt::NoAnswer),
    };
    match finding.passage(policy) {
        Passage::Open => "would send".to_owned(),
        Passage::Told(_) => "would send, with a notice".to_owned(),
        Passage::Refused(error) => format!("would refuse with {}", error.code()),
        // Nobody cancels a question that is not asked.
        Passage::Cancelled => "would not send".to_owned(),
    }
}

fn line(name: &str, said: &str) -> String {
    format!("{name:<17} {said}\n")
}

fn bar(window: &UsedWindow, now: i64, style: Style) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "the part is between 0 and 1, and the bar is short"
    )]
    let full = ((window.used_percent / 100.0).clamp(0.0, 1.0) * BAR as f64).round() as usize;
    let bar = format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full));
    let bar = match window.used_percent {
        ..75.0 => style.green(&bar),
        75.0..90.0 => style.yellow(&bar),
        _ => style.red(&bar),
    };
    let resets = match window.resets_at {
        Some(at) if at > now => format!(", starts anew in {}", span(at - now)),
        Some(_) => ", has started anew".to_owned(),
        None => String::new(),
    };
    format!("{bar} {:>3.0} %{resets}", window.used_percent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpass::limits::windows::Reading;

    fn page(extra: &str) -> Page {
        let answer = format!(
            r#"{{"subscription_type":"max","rate_limits_available":true,"session":{{"total_cost_usd":9.5}},
            "rate_limits":{{"five_hour":{{"utilization":50,"resets_at":5000}},"seven_day":{{"utilization":91,"resets_at":90000}},"extra_usage":{extra}}}}}"#
        );
        Page {
            dated: Dated {
                at: 970,
                reading: Reading::read(&answer),
            },
            now: Moment {
                unix_s: 1000,
                day: String::new(),
                day_ends: None,
            },
            ledger: Ledger::default(),
            recorded: Recorded::default(),
        }
    }

    #[test]
    fn plan_windows_credits_and_gate_stand_in_the_text() {
        let text = page(r#"{"is_enabled":false}"#).text(Style::default());
        for part in [
            "plan              max\n",
            "five_hour         [###############---------------]  50 %, starts anew in 1 h 6 min\n",
            "seven_day         [###########################---]  91 %, starts anew in 1 d 0 h\n",
            "usage credits     off\n",
            "gate require_off  would send\n",
            "asked             30 s ago, at no cost\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
        assert!(!text.contains("9.5"), "never a charge:\n{text}");
    }

    #[test]
    fn credits_that_are_on_or_unknown_are_told_with_what_the_gate_would_do() {
        let on = page(r#"{"is_enabled":true}"#).text(Style::default());
        assert!(
            on.contains("gate require_off  would refuse with billing\n"),
            "{on}"
        );
        assert!(
            on.contains("gate warn         would send, with a notice\n"),
            "{on}"
        );
        let unknown = page("null").text(Style::default());
        assert!(
            unknown.contains(
                "not known: in the CLI's answer about usage, rate_limits.extra_usage is null"
            ),
            "{unknown}"
        );
        assert!(
            unknown.contains("would refuse with usage_unconfirmed"),
            "{unknown}"
        );
    }

    #[test]
    fn the_object_holds_the_same() {
        let object = page(r#"{"is_enabled":false}"#).object();
        assert_eq!(object["credits"], "off");
        assert_eq!(object["gate"]["require_off"], "would send");
        assert_eq!(object["windows"][0]["used_percent"], 50.0);
        assert_eq!(object["windows"][0]["resets_at"], 5000);
    }

    #[test]
    fn spans_have_two_units() {
        let shown = [-5, 59, 60, 3_661, 90_000].map(span);
        assert_eq!(shown, ["0 s", "59 s", "1 min", "1 h 1 min", "1 d 1 h"]);
    }
}
