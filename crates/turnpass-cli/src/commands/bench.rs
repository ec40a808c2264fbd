//! `turnpass lab bench`: how long the way from a request to the upstream and back takes, without the service.

use std::time::{Duration, Instant};

use serde::Serialize;
use turnpass::conversation::Message;
use turnpass::{Event, Provider, Request};

use crate::context::{self, Context};
use crate::exit::{Exit, Fault};
use crate::settings::{Process, Values};
use crate::show::LABORATORY;
use crate::stage::{self, Player, Stage};

/// What is asked for: a short text in several pieces.
const PROMPT: &str = "[[say The quick brown fox jumps over the lazy dog.]] [[chunk 8 ms 0]]";

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Requests that are measured in each mode, after one that is not
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    requests: u32,
    /// Use the scripted CLI even if the real one is installed
    #[arg(long)]
    scripted: bool,
}

/// One mode's figures.
#[derive(Debug, Serialize)]
struct Measured {
    process: &'static str,
    requests: usize,
    upstream_requests: usize,
    to_upstream_ms: Spread,
    first_text_ms: Spread,
    whole_ms: Spread,
}

/// The middle and the high end of a row of times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    p50: f64,
    p95: f64,
}

#[derive(Debug, Serialize)]
struct Told {
    cli: Player,
    modes: Vec<Measured>,
    laboratory: bool,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(Values::default())?;
    let mut modes = Vec::new();
    let mut player = None;
    for process in [Process::Warm, Process::PerRequest] {
        let settings = stage::laboratory(settings.clone(), None, Some(process));
        let stage = Stage::set(&settings, args.scripted).await?;
        let provider = context::build_provider(&stage.settings)?;
        let measured = tokio::select! {
            biased;
            () = context.cancel().cancelled() => None,
            measured = mode(&stage, &provider, args.requests) => Some(measured?),
        };
        provider.shutdown().await?;
        let Some(measured) = measured else {
            return Ok(Exit::Cancelled);
        };
        modes.push(measured);
        player = Some(stage.player.clone());
    }
    let Some(cli) = player else {
        return Ok(Exit::Done);
    };
    let told = Told {
        cli,
        modes,
        laboratory: true,
    };
    let text = match args.json {
        true => {
            serde_json::to_string(&told)
                .map_err(|error| Fault::system(error.to_string(), "Try again."))?
                + "\n"
        }
        false => table(&told),
    };
    super::print(&text)
}

async fn mode(stage: &Stage, provider: &Provider, requests: u32) -> Result<Measured, Fault> {
    let (mut to_upstream, mut first_text, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    once(stage, provider).await?;
    for _ in 0..requests {
        let seen = stage.upstream.messages().len();
        let times = once(stage, provider).await?;
        let messages = stage.upstream.messages();
        let arrived = messages.get(seen).map(|request| request.arrived_at);
        to_upstream.extend(arrived.map(|at| at.saturating_duration_since(times.began)));
        first_text.extend(times.first_text);
        whole.push(times.whole);
    }
    Ok(Measured {
        process: stage.settings.process.as_str(),
        requests: whole.len(),
        upstream_requests: stage.upstream.messages().len() - 1,
        to_upstream_ms: spread(to_upstream),
        first_text_ms: spread(first_text),
        whole_ms: spread(whole),
    })
}

struct Times {
    began: Instant,
    first_text: Option<Duration>,
    whole: Duration,
}

async fn once(stage: &Stage, provider: &Provider) -> Result<Times, Fault> {
    let messages = vec![Message::user(PROMPT)];
    let began = Instant::now();
    let mut generation = provider.generate(Request::new(stage.settings.model.as_str(), messages));
    let mut first_text = None;
    while let Some(event) = generation.next().await {
        if let Event::Text { .. } = event? {
            first_text.get_or_insert(began.elapsed());
        }
    }
    Ok(Times {
        began,
        first_text,
        whole: began.elapsed(),
    })
}

fn spread(mut times: Vec<Duration>) -> Spread {
    times.sort_unstable();
    // The smallest time that at least this share of all is not above.
    let at = |share: f64| {
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most a thousand times"
        )]
        let rank = (times.len() as f64 * share).ceil().max(1.0) as usize;
        let time = times.get(rank - 1).copied().unwrap_or_default();
        (time.as_secs_f64() * 100_000.0).round() / 100.0
    };
    Spread {
        p50: at(0.5),
        p95: at(0.95),
    }
}

fn table(told: &Told) -> String {
    let mut text = format!(
        "{LABORATORY}\nthe {} CLI {}; milliseconds, median / 95th percentile\n\n",
        told.cli.kind, told.cli.version
    );
    let header = [
        "process",
        "to upstream",
        "first text",
        "whole",
        "upstream/request",
    ];
    let mut row = |cells: [String; 5]| {
        let [a, b, c, d, e] = cells;
        text.push_str(&format!("{a:<12} {b:>18} {c:>18} {d:>18} {e:>17}\n"));
    };
    row(header.map(str::to_owned));
    for mode in &told.modes {
        let pair = |s: Spread| format!("{:.1} / {:.1}", s.p50, s.p95);
        #[allow(clippy::cast_precision_loss, reason = "at most a thousand requests")]
        let ratio = mode.upstream_requests as f64 / mode.requests as f64;
        row([
            mode.process.to_owned(),
            pair(mode.to_upstream_ms),
            pair(mode.first_text_ms),
            pair(mode.whole_ms),
            format!("{ratio:.2}"),
        ]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_high_end() {
        let times = |count: u64| (1..=count).map(Duration::from_millis).rev().collect();
        let wanted = |p50, p95| Spread { p50, p95 };
        assert_eq!(spread(times(20)), wanted(10.0, 19.0));
        assert_eq!(spread(times(1)), wanted(1.0, 1.0));
        assert_eq!(spread(vec![]), wanted(0.0, 0.0));
    }
}
