//! The person's own prices, and what tokens would come to at them. turnpass knows no price itself, and what comes out is
//! an estimate by a list, not what anybody is charged. Pure.

use std::collections::BTreeMap;

use serde::Deserialize;
use turnpass::models::ModelName;
use turnpass::record::TokensRecord;
use turnpass::request::ModelId;

/// Prices are per this many tokens.
const PER_TOKENS: f64 = 1e6;

/// Largest price, in US dollars per million tokens: a thousand times what a price list may reasonably say, so that a
/// price per token or a slip of the comma is noticed.
const MAX_PRICE_USD: f64 = 100_000.0;

/// What a key of the table may be when it is no full id.
const FAMILIES: [&str; 4] = ["fable", "opus", "sonnet", "haiku"];

/// The prices of one model or family, in US dollars per million tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Price {
    /// Prompt tokens neither read from nor written to the cache.
    pub(crate) input: Option<Usd>,
    /// Tokens of answers.
    pub(crate) output: Option<Usd>,
    /// Prompt tokens read from the cache.
    pub(crate) cache_read: Option<Usd>,
    /// Prompt tokens written to the cache.
    pub(crate) cache_write: Option<Usd>,
}

impl Price {
    /// The kinds by their keys, in the order of the documentation.
    fn kinds(&self) -> [(&'static str, Option<Usd>); 4] {
        [
            ("input", self.input),
            ("output", self.output),
            ("cache_read", self.cache_read),
            ("cache_write", self.cache_write),
        ]
    }
}

/// A price: finite and not below zero.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "f64")]
pub(crate) struct Usd(f64);

impl TryFrom<f64> for Usd {
    type Error = String;

    fn try_from(usd: f64) -> Result<Self, String> {
        match (0.0..=MAX_PRICE_USD).contains(&usd) {
            true => Ok(Self(usd)),
            false => Err(format!(
                "{usd} is no price in US dollars per million tokens: use 0 to {MAX_PRICE_USD}"
            )),
        }
    }
}

/// The prices of a person, by a model's full id or by a family.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "BTreeMap<String, Price>")]
pub(crate) struct Prices(BTreeMap<String, Price>);

impl TryFrom<BTreeMap<String, Price>> for Prices {
    type Error = String;

    fn try_from(table: BTreeMap<String, Price>) -> Result<Self, String> {
        let wrong = table
            .keys()
            .find(|key| !FAMILIES.contains(&key.as_str()) && !key.starts_with("claude-"));
        match wrong {
            None => Ok(Self(table)),
            Some(key) => Err(format!(
                "[prices.{key:?}] names no model: use a full id, which begins with claude-, or one of {}",
                FAMILIES.join(", ")
            )),
        }
    }
}

impl Prices {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The prices of a model: those under its id, else under its id without date and suffix, else of its family.
    fn of(&self, model: &str) -> Option<&Price> {
        let parse = |id: &str| ModelName::parse(&ModelId(id.to_owned()));
        if let Some(price) = self.0.get(model) {
            return Some(price);
        }
        let name = parse(model)?;
        let undated = self.0.iter().find(|(key, _)| {
            // A key with a date of its own means that release only.
            key.split('-').all(|part| part.len() != 8)
                && parse(key).is_some_and(|key| {
                    (key.family, key.version, key.extended) == (name.family, name.version, false)
                })
        });
        let family = format!("{:?}", name.family).to_ascii_lowercase();
        undated
            .map(|(_, price)| price)
            .or_else(|| self.0.get(&family))
    }

    /// What these tokens of a model come to.
    pub(crate) fn estimate(&self, model: Option<&str>, tokens: &TokensRecord) -> Estimate {
        let price = model.and_then(|model| self.of(model));
        let price = price.copied().unwrap_or_default();
        let mut estimate = Estimate::default();
        for (count, usd) in [
            (tokens.input, price.input),
            (tokens.output, price.output),
            (tokens.cache_read, price.cache_read),
            (tokens.cache_creation, price.cache_write),
        ] {
            #[expect(
                clippy::cast_precision_loss,
                reason = "exact up to 2^53 tokens, which nobody uses"
            )]
            match usd {
                Some(Usd(usd)) => estimate.usd += count as f64 * usd / PER_TOKENS,
                None => estimate.unpriced_tokens = estimate.unpriced_tokens.saturating_add(count),
            }
        }
        estimate
    }

    /// The tables as the configuration file has them.
    pub(crate) fn shown(&self) -> String {
        let mut text = String::new();
        for (model, price) in &self.0 {
            text += &format!("\n[prices.{}]\n", toml::Value::from(model.as_str()));
            for (key, usd) in price.kinds() {
                if let Some(Usd(usd)) = usd {
                    text += &format!("{key} = {}\n", toml::Value::from(usd));
                }
            }
        }
        text
    }
}

/// What tokens come to at the person's prices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Estimate {
    /// US dollars for the tokens that have a price.
    pub(crate) usd: f64,
    /// Tokens that have none.
    pub(crate) unpriced_tokens: u64,
}

impl Estimate {
    /// Adds another one.
    pub(crate) fn add(&mut self, other: Self) {
        self.usd += other.usd;
        self.unpriced_tokens = self.unpriced_tokens.saturating_add(other.unpriced_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices(text: &str) -> Result<Prices, String> {
        toml::from_str(text).map_err(|error| error.message().to_owned())
    }

    fn tokens(input: u64, output: u64, cache_read: u64, cache_creation: u64) -> TokensRecord {
        TokensRecord {
            input,
            output,
            cache_creation,
            cache_read,
        }
    }

    #[test]
    fn each_kind_of_token_has_its_own_price() {
        let table =
            "[claude-sonnet-5-5]\ninput = 3\noutput = 15.0\ncache_read = 0.3\ncache_write = 6.0\n";
        let prices = prices(table).unwrap();
        for (tokens, usd) in [
            (tokens(1_000_000, 0, 0, 0), 3.0),
            (tokens(0, 1_000_000, 0, 0), 15.0),
            (tokens(0, 0, 1_000_000, 0), 0.3),
            (tokens(0, 0, 0, 1_000_000), 6.0),
            (tokens(1_000, 200, 50_000, 10_000), 0.081),
            (tokens(0, 0, 0, 0), 0.0),
        ] {
            let estimate = prices.estimate(Some("claude-sonnet-5-5"), &tokens);
            assert!((estimate.usd - usd).abs() < 1e-12, "{estimate:?}");
            assert_eq!(estimate.unpriced_tokens, 0);
        }
    }

    #[test]
    fn an_id_goes_before_its_form_without_date_and_that_before_the_family() {
        let prices = prices(
            "[sonnet]\ninput = 1\n[claude-sonnet-5-5]\ninput = 2\n[claude-sonnet-5-5-20260101]\ninput = 3\n",
        )
        .unwrap();
        for (model, usd) in [
            ("claude-sonnet-5-5-20260101", 3.0),
            ("claude-sonnet-5-5-20260202", 2.0),
            ("claude-sonnet-5-5[1m]", 2.0),
            ("claude-sonnet-5-5", 2.0),
            ("claude-sonnet-6", 1.0),
        ] {
            let estimate = prices.estimate(Some(model), &tokens(1_000_000, 0, 0, 0));
            assert!((estimate.usd - usd).abs() < 1e-12, "{model}: {estimate:?}");
        }
    }

    #[test]
    fn what_has_no_price_is_counted_and_not_guessed() {
        let prices = prices("[opus]\ninput = 5\n").unwrap();
        for (model, unpriced) in [
            (Some("claude-opus-5-5"), 6 + 7 + 8),
            (Some("claude-haiku-4-5"), 5 + 6 + 7 + 8),
            (Some("another"), 5 + 6 + 7 + 8),
            (None, 5 + 6 + 7 + 8),
        ] {
            let estimate = prices.estimate(model, &tokens(5, 6, 7, 8));
            assert_eq!(estimate.unpriced_tokens, unpriced, "{model:?}");
        }
    }

    #[test]
    fn no_price_is_built_in() {
        let estimate = Prices::default().estimate(Some("claude-sonnet-5-5"), &tokens(1, 2, 3, 4));
        assert_eq!((estimate.usd, estimate.unpriced_tokens), (0.0, 10));
    }

    #[test]
    fn a_wrong_table_is_refused() {
        for (text, said) in [
            ("[sonnets]\ninput = 1\n", "names no model"),
            (
                "[sonnet]\ninptu = 1\n",
                "unknown field `inptu`, expected one of `input`",
            ),
            ("[sonnet]\ninput = -1\n", "is no price"),
            ("[sonnet]\ninput = nan\n", "is no price"),
            ("[sonnet]\ninput = inf\n", "is no price"),
            ("[sonnet]\ninput = \"3\"\n", "invalid type"),
        ] {
            let error = prices(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
