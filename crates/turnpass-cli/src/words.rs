//! The words that settings take: each is read from a flag, a variable and the file alike.

use std::str::FromStr;

use serde::Deserialize;
use turnpass::pool::{Reseed, ToolCarrier};
use turnpass_agent::approval::OUTSIDE;
use turnpass_agent::{Threshold, tools};

/// Whether the relay keeps its process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Process {
    /// One process serves many generations.
    #[default]
    Warm,
    /// Each generation has its own.
    #[serde(alias = "per_request")]
    PerRequest,
}

impl Process {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::PerRequest => "per-request",
        }
    }
}

impl FromStr for Process {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "warm" => Ok(Self::Warm),
            "per-request" | "per_request" => Ok(Self::PerRequest),
            other => Err(format!(
                "process {other:?} is not known: use warm, per-request"
            )),
        }
    }
}

/// A setting of the pool by its word.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident($inner:ty), $what:literal, $($word:literal $(| $alias:literal)* => $value:expr),*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
        #[serde(try_from = "String")]
        pub(crate) struct $name(pub(crate) $inner);

        impl $name {
            pub(crate) fn as_str(self) -> &'static str {
                $(if self.0 == $value { return $word; })*
                // Each value has its word above.
                ""
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word $(| $alias)* => Ok(Self($value)),)*
                    other => Err(format!("{} {other:?} is not known: use {}", $what, [$($word),*].join(", "))),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }
    };
}

words! {
    /// How the pool tells a process what was said before.
    ReseedWord(Reseed), "reseed",
    "native" => Reseed::Native, "transcript" => Reseed::Transcript
}

words! {
    /// How the pool serves tools to the CLI.
    CarrierWord(ToolCarrier), "tool_carrier",
    "in-band" | "in_band" => ToolCarrier::InBand, "http" => ToolCarrier::Http
}

/// The name of a tool, or the word for leaving the directory.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct ToolWord(pub(crate) String);

impl FromStr for ToolWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let word = text.trim();
        if tools::NAMES.contains(&word) || word == OUTSIDE {
            return Ok(Self(word.to_owned()));
        }
        let known = tools::NAMES.join(", ");
        Err(format!(
            "tool {word:?} is not known: use {known}, {OUTSIDE}"
        ))
    }
}

impl TryFrom<String> for ToolWord {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// From which size on a conversation is compacted: tokens, or a percentage of the window.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "TokensOrText")]
pub(crate) struct ThresholdWord(pub(crate) Threshold);

/// The file may have the number of tokens as a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokensOrText {
    Tokens(u64),
    Text(String),
}

impl ThresholdWord {
    /// As the file has it.
    pub(crate) fn shown(self) -> String {
        match self.0 {
            Threshold::Tokens(tokens) => tokens.to_string(),
            Threshold::Fraction(share) => format!("\"{}%\"", (share * 100.0).round()),
        }
    }
}

impl FromStr for ThresholdWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let threshold = match text.strip_suffix('%') {
            Some(percent) => {
                let percent = percent.trim_end().parse::<u8>().ok();
                let percent = percent.filter(|percent| (1..=100).contains(percent));
                percent.map(|percent| Threshold::Fraction(f64::from(percent) / 100.0))
            }
            None => {
                let tokens = text.parse::<u64>().ok();
                tokens.filter(|n| *n > 0).map(Threshold::Tokens)
            }
        };
        threshold.map(Self).ok_or_else(|| {
            format!("a threshold of {text:?} is none: use tokens (120000) or 1% to 100%")
        })
    }
}

impl TryFrom<TokensOrText> for ThresholdWord {
    type Error = String;

    fn try_from(given: TokensOrText) -> Result<Self, String> {
        match given {
            TokensOrText::Tokens(tokens) => tokens.to_string().parse(),
            TokensOrText::Text(text) => text.parse(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_tokens_or_a_percentage() {
        for (text, wanted, shown) in [
            ("120000", Threshold::Tokens(120_000), "120000"),
            (" 70% ", Threshold::Fraction(0.7), "\"70%\""),
            ("29 %", Threshold::Fraction(0.29), "\"29%\""),
            ("100%", Threshold::Fraction(1.0), "\"100%\""),
        ] {
            let word: ThresholdWord = text.parse().unwrap();
            assert_eq!((word.0, word.shown().as_str()), (wanted, shown));
            let of_file = |text: &str| {
                let value: toml::Table = toml::from_str(&format!("x = {text}")).unwrap();
                value["x"].clone().try_into::<ThresholdWord>().unwrap()
            };
            assert_eq!(of_file(shown), word);
        }
        for text in ["", "0", "0%", "101%", "-1", "0.7", "many", "%"] {
            let said = text.parse::<ThresholdWord>().unwrap_err();
            assert!(said.contains("use tokens"), "{said}");
        }
    }
}
