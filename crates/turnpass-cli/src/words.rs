//! The words that settings take: each is read from a flag, a variable and the file alike.

use std::str::FromStr;

use serde::Deserialize;
use turnpass::pool::{Reseed, ToolCarrier};
use turnpass_agent::approval::OUTSIDE;
use turnpass_agent::tools;

/// Whether the relay keeps its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Process {
    /// One process serves many generations.
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
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
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
