//! `turnpass models`: what the installed CLI offers, and what counts where.

use serde::Serialize;
use serde_json::json;
use turnpass::models::discovery::Discovered;
use turnpass::models::known::KnownModels;
use turnpass::models::{CatalogEntry, Credits, EXTENDED_SUFFIX, ceiling_tokens, credits};
use turnpass::request::ModelId;

use crate::context::{self, Context};
use crate::exit::{Exit, Fault};
use crate::settings::Values;
use crate::terminal::visible;

/// What the two windows are.
const NOTE: &str = "relay: the input ceiling that the relay holds a conversation to. CLI: the window that the CLI itself \
reports, which counts for the pool and for replay. The account decides what is accepted.";

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print one JSON object in place of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    values: Values,
}

/// One model, as the one object of `--json` has it.
#[derive(Debug, Serialize)]
struct Row {
    alias: String,
    id: String,
    display_name: String,
    efforts: Vec<&'static str>,
    thinking_off: bool,
    relay_ceiling_tokens: u64,
    cli_window_tokens: Option<u64>,
    credits: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    credits_why: Option<&'static str>,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(args.values)?;
    let installed = context::installed(&settings);
    // A laboratory run changes nothing of what is known.
    let state = context::state_dir().filter(|_| settings.lab_upstream.is_none());
    let known = KnownModels::new(state.as_deref());
    let discovered = tokio::select! {
        biased;
        () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
        discovered = known.discover(&installed) => discovered,
    };
    installed.shutdown().await;
    let rows: Vec<_> = discovered.models.iter().flat_map(rows).collect();
    match args.json {
        true => super::print(&object(&discovered, &rows)),
        false => super::print(&table(&discovered, &rows)),
    }
}

/// A model, and its extended-context variant where that has a higher ceiling. No suffix is added to a request by itself.
fn rows(entry: &CatalogEntry) -> Vec<Row> {
    let plain = row(entry, entry.id.clone());
    let extended = ModelId(format!("{}{EXTENDED_SUFFIX}", entry.id));
    let more = ceiling_tokens(&extended) > ceiling_tokens(&entry.id);
    let extended = more.then(|| row(entry, extended));
    std::iter::once(plain).chain(extended).collect()
}

fn row(entry: &CatalogEntry, id: ModelId) -> Row {
    let off = entry.thinking_off.then_some("none");
    let levels = entry.efforts.iter().map(|effort| effort.as_str());
    let (credits, credits_why) = match credits(&id) {
        Credits::No => ("no", None),
        Credits::OnSomePlans(why) => ("some plans", Some(why)),
        Credits::Always(why) => ("always", Some(why)),
    };
    Row {
        alias: match id == entry.id {
            true => entry.alias.clone(),
            false => String::new(),
        },
        display_name: entry.display_name.clone(),
        efforts: off.into_iter().chain(levels).collect(),
        thinking_off: entry.thinking_off,
        relay_ceiling_tokens: ceiling_tokens(&id),
        cli_window_tokens: entry.window_tokens,
        credits,
        credits_why,
        id: id.0,
    }
}

fn object(discovered: &Discovered, rows: &[Row]) -> String {
    let fallback = discovered
        .fallback
        .as_ref()
        .map(|error| json!({"code": error.code().as_str(), "said": error.detail()}));
    let version = discovered.version.map(|version| version.to_string());
    let source = match discovered.fallback {
        None => "cli",
        Some(_) => "static",
    };
    let object = json!({
        "source": source, "cli_version": version, "fallback": fallback, "models": rows,
    });
    format!("{object}\n")
}

fn table(discovered: &Discovered, rows: &[Row]) -> String {
    let tokens = |tokens: Option<u64>| tokens.map_or_else(|| "-".to_owned(), grouped);
    let wide = |of: fn(&Row) -> &str, least: usize| {
        let widths = rows.iter().map(|row| of(row).chars().count());
        widths.chain([least]).max().unwrap_or(least)
    };
    let (alias, id) = (wide(|row| &row.alias, 5), wide(|row| &row.id, 2));
    let mut text = format!(
        "{:<alias$}  {:<id$}  {:>9}  {:>9}  {:<10}  {}\n",
        "alias", "id", "relay", "CLI", "credits", "effort"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<alias$}  {:<id$}  {:>9}  {:>9}  {:<10}  {}\n",
            visible(&row.alias),
            visible(&row.id),
            grouped(row.relay_ceiling_tokens),
            tokens(row.cli_window_tokens),
            row.credits,
            row.efforts.join(" "),
        ));
    }
    text.push_str(&format!("\n{NOTE}\n"));
    let mut reasons: Vec<_> = rows.iter().filter_map(|row| row.credits_why).collect();
    reasons.dedup();
    for why in reasons {
        text.push_str(&format!("credits: {why}.\n"));
    }
    if let Some(error) = &discovered.fallback {
        let said = visible(&error.to_string());
        text.push_str(&format!(
            "The CLI did not tell its models, so these are the ones that turnpass knows: {said}\n"
        ));
    }
    text
}

/// A count with a comma every three digits.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpass::cli::version::Version;
    use turnpass::models::fallback_catalog;
    use turnpass::{Error, ErrorCode};

    fn discovered(fallback: Option<Error>) -> (Discovered, Vec<Row>) {
        let version = Version::new(2, 1, 332);
        let mut models = fallback_catalog(version);
        models[0].window_tokens = Some(1_000_000);
        let rows = models.iter().flat_map(rows).collect();
        let discovered = Discovered {
            models,
            version: Some(version),
            fallback,
        };
        (discovered, rows)
    }

    #[test]
    fn both_windows_and_the_credit_marks_are_shown() {
        let (discovered, rows) = discovered(None);
        let text = table(&discovered, &rows);
        for part in [
            "opus    claude-opus-5-5         202,000  1,000,000  no          low medium high xhigh max\n",
            "        claude-opus-5-5[1m]   1,000,000  1,000,000",
            "fable   claude-fable-5-2        202,000          -  some plans",
            "credits: Fable bills credits",
            "which counts for the pool",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
        assert!(!text.contains("haiku-5-5[1m]"), "not eligible:\n{text}");
    }

    #[test]
    fn a_fallback_says_so() {
        let error = Error::new(ErrorCode::ExecutableMissing, "");
        let (discovered, rows) = discovered(Some(error));
        assert!(table(&discovered, &rows).contains("[executable_missing]"));
        let object: serde_json::Value = serde_json::from_str(&object(&discovered, &rows)).unwrap();
        assert_eq!(object["source"], "static");
        assert_eq!(object["fallback"]["code"], "executable_missing");
        assert_eq!(object["models"][0]["relay_ceiling_tokens"], 202_000);
    }

    #[test]
    fn counts_are_grouped() {
        let shown = [0, 999, 1_000, 202_000, 1_000_000].map(grouped);
        assert_eq!(shown, ["0", "999", "1,000", "202,000", "1,000,000"]);
    }
}
