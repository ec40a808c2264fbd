//! What the bench has measured, as data and as a table.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Serialize, Serializer};

/// The middle, the high end and the least of a row of figures. Times are in milliseconds.
///
/// The least is what the code can do; on a machine that does other work as well, the rest is partly that machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) min: f64,
    pub(super) n: usize,
}

impl Spread {
    /// Of times.
    pub(super) fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        Self::of_numbers(
            times
                .into_iter()
                .map(|time| time.as_secs_f64() * 1000.0)
                .collect(),
        )
    }

    /// Of numbers of any unit.
    pub(super) fn of_numbers(mut numbers: Vec<f64>) -> Self {
        numbers.sort_unstable_by(f64::total_cmp);
        // The smallest number that at least this share of all is not above.
        let at = |share: f64| {
            #[allow(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "at most some thousand figures"
            )]
            let rank = (numbers.len() as f64 * share).ceil().max(1.0) as usize;
            rounded(numbers.get(rank - 1).copied().unwrap_or_default())
        };
        Self {
            p50: at(0.5),
            p95: at(0.95),
            min: at(0.0),
            n: numbers.len(),
        }
    }
}

/// To a thousandth, which for milliseconds is a microsecond.
pub(super) fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

/// What one way of asking has shown in one scene.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Row {
    /// Which way.
    pub(super) who: String,
    /// Measured generations, and the Messages requests that the upstream saw for them.
    pub(super) generations: usize,
    pub(super) upstream_requests: usize,
    /// CLI processes that served them; none for the plain client.
    pub(super) processes: usize,
    #[serde(serialize_with = "as_map")]
    pub(super) figures: Vec<(&'static str, Spread)>,
    #[serde(serialize_with = "as_map", skip_serializing_if = "Vec::is_empty")]
    pub(super) values: Vec<(&'static str, f64)>,
}

fn as_map<S: Serializer, T: Serialize>(
    pairs: &[(&'static str, T)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

impl Row {
    /// A row without generations.
    pub(super) fn new(who: impl Into<String>) -> Self {
        Self {
            who: who.into(),
            ..Self::default()
        }
    }

    /// With one more spread.
    pub(super) fn with(mut self, name: &'static str, spread: Spread) -> Self {
        self.figures.push((name, spread));
        self
    }

    /// With one more number.
    pub(super) fn value(mut self, name: &'static str, value: f64) -> Self {
        self.values.push((name, rounded(value)));
        self
    }

    /// The spread of this name.
    pub(super) fn spread(&self, name: &str) -> Option<Spread> {
        let found = self.figures.iter().find(|(figure, _)| *figure == name);
        found.map(|(_, spread)| *spread)
    }
}

/// A figure that the project wants, held against what came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Goal {
    what: String,
    /// `at_most` or `at_least`.
    bound: &'static str,
    wanted: f64,
    got: f64,
    met: bool,
}

impl Goal {
    /// Met by this or less.
    pub(super) fn at_most(what: impl Into<String>, wanted: f64, got: f64) -> Self {
        Self {
            what: what.into(),
            bound: "at_most",
            wanted,
            got: rounded(got),
            met: got <= wanted,
        }
    }

    /// Met by this or more.
    pub(super) fn at_least(what: impl Into<String>, wanted: f64, got: f64) -> Self {
        Self {
            what: what.into(),
            bound: "at_least",
            wanted,
            got: rounded(got),
            met: got >= wanted,
        }
    }
}

/// One scene's outcome.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Outcome {
    pub(super) scene: String,
    pub(super) about: &'static str,
    pub(super) rows: Vec<Row>,
    pub(super) goals: Vec<Goal>,
    /// The machine's load before and after; a quiet machine of two cores is below one.
    pub(super) load: Vec<f64>,
}

impl Outcome {
    /// The figure's median in the row of this name.
    pub(super) fn p50(&self, who: &str, figure: &str) -> Option<f64> {
        self.spread(who, figure).map(|spread| spread.p50)
    }

    /// The figure in the row of this name.
    pub(super) fn spread(&self, who: &str, figure: &str) -> Option<Spread> {
        self.rows.iter().find(|row| row.who == who)?.spread(figure)
    }

    /// Writes the scene for people.
    pub(super) fn show(&self, out: &mut String) {
        let load: Vec<_> = self.load.iter().map(|load| format!("{load:.1}")).collect();
        // Writing into a string cannot fail.
        let _ = writeln!(
            out,
            "\n{}: {} (load {})",
            self.scene,
            self.about,
            load.join(" to ")
        );
        let mut columns: Vec<&str> = Vec::new();
        for (name, _) in self.rows.iter().flat_map(|row| &row.figures) {
            if !columns.contains(name) {
                columns.push(name);
            }
        }
        let _ = write!(out, "  {:<14}", "");
        for column in &columns {
            let _ = write!(out, " {column:>24}");
        }
        out.push('\n');
        for row in &self.rows {
            let _ = write!(out, "  {:<14}", row.who);
            for column in &columns {
                let cell = row
                    .spread(column)
                    .map(|s| format!("{} / {} ({})", short(s.p50), short(s.p95), short(s.min)));
                let _ = write!(out, " {:>24}", cell.unwrap_or_default());
            }
            if row.generations > 0 {
                #[allow(clippy::cast_precision_loss, reason = "at most some thousand requests")]
                let share = row.upstream_requests as f64 / row.generations as f64;
                let _ = write!(
                    out,
                    "  {} generations, {share:.2} upstream requests each",
                    row.generations
                );
            }
            if row.processes > 0 {
                let _ = write!(out, ", processes: {}", row.processes);
            }
            for (name, value) in &row.values {
                let _ = write!(out, "  {name} {}", short(*value));
            }
            out.push('\n');
        }
        for goal in &self.goals {
            let word = if goal.met { "met" } else { "MISSED" };
            let bound = goal.bound.replace('_', " ");
            let _ = writeln!(
                out,
                "  goal {word}: {} {bound} {}: {}",
                goal.what,
                goal.wanted,
                short(goal.got)
            );
        }
    }
}

/// As many places as tell something.
fn short(number: f64) -> String {
    match number.abs() {
        100.0.. => format!("{number:.0}"),
        10.0.. => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_the_high_end_and_the_least() {
        let times = |count: u64| (1..=count).map(Duration::from_millis).rev();
        let wanted = |p50, p95, min, n| Spread { p50, p95, min, n };
        assert_eq!(Spread::of(times(20)), wanted(10.0, 19.0, 1.0, 20));
        assert_eq!(Spread::of(times(1)), wanted(1.0, 1.0, 1.0, 1));
        assert_eq!(Spread::of([]), wanted(0.0, 0.0, 0.0, 0));
    }

    #[test]
    fn a_goal_is_met_at_its_bound() {
        assert!(Goal::at_most("a", 1.0, 1.0).met && !Goal::at_most("a", 1.0, 1.1).met);
        assert!(Goal::at_least("a", 10.0, 10.0).met && !Goal::at_least("a", 10.0, 9.9).met);
    }

    #[test]
    fn a_scene_is_shown_with_every_column_once() {
        let spread = Spread::of([Duration::from_millis(2)]);
        let row = |who: &str| Row {
            generations: 2,
            upstream_requests: 2,
            ..Row::new(who).with("to_upstream", spread)
        };
        let outcome = Outcome {
            scene: "hist".to_owned(),
            rows: vec![row("direct"), row("warm").value("ratio", 12.0)],
            goals: vec![Goal::at_most("x", 1.0, 2.0)],
            ..Outcome::default()
        };
        let mut text = String::new();
        outcome.show(&mut text);
        assert_eq!(text.matches("to_upstream").count(), 1);
        assert!(
            text.contains("2.00 / 2.00 (2.00)") && text.contains("MISSED: x at most 1"),
            "{text}"
        );
        let json = serde_json::to_value(&outcome).unwrap();
        assert_eq!(json["rows"][1]["figures"]["to_upstream"]["p50"], 2.0);
        assert_eq!(json["rows"][1]["values"]["ratio"], 12.0);
    }
}
