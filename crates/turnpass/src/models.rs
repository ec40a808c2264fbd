//! Models: names, context ceilings, effort levels, and the catalogue for when discovery fails.
//!
//! | module | what |
//! | --- | --- |
//! | here | names, ceilings, effort, credits, the catalogue: pure |
//! | [`discovery`] | the catalogue as a short-lived CLI process tells it |
//! | [`known`] | what it told last, for the program that told it |
//! | [`context`] | when a conversation has to become shorter: pure |
//!
//! What discovery reads from a live CLI outranks what this module knows by itself.

pub mod context;
pub mod discovery;
pub mod known;

use serde_json::Value;

use crate::cli::version::Version;
use crate::conversation::{Block, Message, ResultBlock, Source};
use crate::error::{Error, ErrorCode, Result};
use crate::request::{Effort, ModelId};

/// Longest model id, in bytes. Real ones have about 30; the command line and error texts hold it whole.
pub const MODEL_ID_BYTES: usize = 256;

/// Input ceiling of a selection with an explicit, eligible `[1m]`; the relay document's policy.
pub const EXTENDED_CEILING_TOKENS: u64 = 1_000_000;

/// Input ceiling of every other selection, aliases included; the relay document's policy. Newer models have a larger
/// window unsuffixed (2.1.332 says 1,000,000 for 5.x), but behind a relay the CLI's word is not the service's.
pub const CEILING_TOKENS: u64 = 202_000;

/// The suffix that asks for the extended context. Only the host writes it.
pub const EXTENDED_SUFFIX: &str = "[1m]";

/// Refuses what cannot be a model id, before anything is started. Unknown names pass: the service knows more models
/// than we do.
///
/// # Errors
///
/// `request_invalid` that says what is wrong.
pub fn check_model_id(model: &ModelId) -> Result<()> {
    let id = &model.0;
    let wrong = if id.is_empty() {
        "is empty"
    } else if id.len() > MODEL_ID_BYTES {
        "is too long"
    } else if id.starts_with('-') {
        "looks like an option"
    } else if !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        "holds a character that no model id has"
    } else {
        return Ok(());
    };
    Err(Error::new(
        ErrorCode::RequestInvalid,
        format!("the model id {wrong}"),
    ))
}

/// Families of models that rules are known for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `claude-fable-*`
    Fable,
    /// `claude-opus-*`
    Opus,
    /// `claude-sonnet-*`
    Sonnet,
    /// `claude-haiku-*`
    Haiku,
}

/// A full model id taken apart: `claude-opus-4-6-20260101[1m]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// The family.
    pub family: Family,
    /// Major and minor version, which compare by number.
    pub version: (u32, u32),
    /// Whether the host asked for the extended context.
    pub extended: bool,
}

impl ModelName {
    /// Takes a full id apart. Aliases and ids of another form give `None`.
    pub fn parse(model: &ModelId) -> Option<Self> {
        let (base, extended) = split_suffix(model);
        let mut parts = base.strip_prefix("claude-")?.split('-').peekable();
        let family = match parts.next()? {
            "fable" => Family::Fable,
            "opus" => Family::Opus,
            "sonnet" => Family::Sonnet,
            "haiku" => Family::Haiku,
            _ => return None,
        };
        let mut number = || {
            let part = parts.next_if(|part| is_number(part) && part.len() <= 2)?;
            part.parse().ok()
        };
        let version = (number()?, number().unwrap_or(0));
        let rest_is_a_date = match (parts.next(), parts.next()) {
            (None, _) => true,
            (Some(date), None) => is_number(date) && date.len() == 8,
            (Some(_), Some(_)) => false,
        };
        rest_is_a_date.then_some(Self {
            family,
            version,
            extended,
        })
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The id without the suffix, and whether it had one.
fn split_suffix(model: &ModelId) -> (&str, bool) {
    match model.0.strip_suffix(EXTENDED_SUFFIX) {
        Some(base) => (base, true),
        None => (&model.0, false),
    }
}

/// The input ceiling of a selection, in tokens: the relay document's table. Nothing that the CLI or a catalogue says
/// raises it.
pub fn ceiling_tokens(model: &ModelId) -> u64 {
    match ModelName::parse(model) {
        Some(ModelName {
            family: Family::Opus,
            version,
            extended: true,
        }) if version >= (4, 6) => EXTENDED_CEILING_TOKENS,
        Some(ModelName {
            family: Family::Fable,
            version,
            extended: true,
        }) if version >= (5, 0) => EXTENDED_CEILING_TOKENS,
        _ => CEILING_TOKENS,
    }
}

/// Whether a model can bill usage credits although the plan has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credits {
    /// Not that anybody knows of.
    No,
    /// On some plans; the sentence says which.
    OnSomePlans(&'static str),
    /// On every plan; the sentence says why.
    Always(&'static str),
}

/// Whether a selection can bill usage credits although the plan has room, as of the vendor's documentation of 2026-08-22.
pub fn credits(model: &ModelId) -> Credits {
    let (base, extended) = split_suffix(model);
    let name = ModelName::parse(model);
    if base == "fable" || name.is_some_and(|name| name.family == Family::Fable) {
        return Credits::OnSomePlans(
            "Fable bills credits on Pro and on standard Team seats, in print mode without asking",
        );
    }
    let Some(name) = name.filter(|_| extended) else {
        return if extended {
            Credits::OnSomePlans("the extended context may bill credits")
        } else {
            Credits::No
        };
    };
    match (name.family, name.version) {
        (Family::Sonnet, (4, _)) => {
            Credits::Always("the extended context of Sonnet 4 always bills credits")
        }
        (Family::Opus, version) if version >= (5, 5) => Credits::No,
        _ => Credits::OnSomePlans(
            "the extended context bills credits on plans that do not include it",
        ),
    }
}

/// A model that can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogEntry {
    /// The short name.
    pub alias: String,
    /// The full id that it stands for.
    pub id: ModelId,
    /// What the CLI calls it.
    pub display_name: String,
    /// Effort levels that it takes, without `none`.
    pub efforts: Vec<Effort>,
    /// Whether thinking can be turned off.
    pub thinking_off: bool,
    /// Whether it can bill usage credits although the plan has room.
    pub credits: Credits,
    /// The context window as the CLI reports it, if it was asked. It counts where the CLI owns the conversation (pool,
    /// replay); behind a relay [`ceiling_tokens`] counts.
    pub window_tokens: Option<u64>,
}

/// Every level but `none`.
const LEVELS: [Effort; 5] = [
    Effort::Low,
    Effort::Medium,
    Effort::High,
    Effort::Xhigh,
    Effort::Max,
];

/// The catalogue for when discovery fails, as the CLI of this version resolves its aliases (measured on 2.1.294, 2.1.310
/// and 2.1.332). Between 2.1.310 and 2.1.332 `fable` moved; the exact version has not been seen.
pub fn fallback_catalog(version: Version) -> Vec<CatalogEntry> {
    let fable = if version >= Version::new(2, 1, 332) {
        ("fable", "claude-fable-5-2", "Fable")
    } else {
        ("fable", "claude-fable-5-1", "Fable")
    };
    let others = [
        ("sonnet", "claude-sonnet-5-5", "Sonnet"),
        ("haiku", "claude-haiku-5-5", "Haiku"),
    ];
    [("opus", "claude-opus-5-5", "Opus"), fable]
        .into_iter()
        .chain(others)
        .map(|(alias, id, display_name)| CatalogEntry {
            alias: alias.into(),
            id: id.into(),
            display_name: display_name.into(),
            efforts: LEVELS.into(),
            thinking_off: false,
            credits: credits(&id.into()),
            window_tokens: None,
        })
        .collect()
}

/// Reads the `models` of an `initialize` answer: without the default alias, the first entry of each resolved id.
///
/// # Errors
///
/// `protocol_shape` when there is no list, or an entry other than the default has no `resolvedModel`; the pool
/// system's rule, since such an entry cannot be pinned.
pub fn read_catalog(initialize: &Value) -> Result<Vec<CatalogEntry>> {
    let wrong = |what: &str| Error::new(ErrorCode::ProtocolShape, format!("initialize: {what}"));
    let models = initialize
        .get("models")
        .and_then(Value::as_array)
        .ok_or_else(|| wrong("models is no list"))?;
    let mut catalog: Vec<CatalogEntry> = Vec::new();
    for model in models {
        let word = |name: &str| {
            model
                .get(name)
                .and_then(Value::as_str)
                .filter(|word| !word.is_empty())
        };
        let alias = word("value").ok_or_else(|| wrong("a model has no value"))?;
        if alias == "default" {
            continue;
        }
        let id = ModelId::from(
            word("resolvedModel").ok_or_else(|| wrong("a model has no resolvedModel"))?,
        );
        if catalog.iter().any(|entry| entry.id == id) {
            continue;
        }
        let levels = model.get("supportedEffortLevels").and_then(Value::as_array);
        let efforts = levels
            .into_iter()
            .flatten()
            .filter_map(|level| level.as_str()?.parse().ok());
        catalog.push(CatalogEntry {
            alias: alias.to_owned(),
            display_name: word("displayName").unwrap_or(alias).to_owned(),
            efforts: efforts.filter(|level| *level != Effort::None).collect(),
            // Absent on 2.1.294, which says nothing: then what is known of the model decides.
            thinking_off: model
                .get("supportsThinkingOff")
                .and_then(Value::as_bool)
                .unwrap_or_else(|| known_thinking_off(&id)),
            credits: credits(&id),
            window_tokens: None,
            id,
        });
    }
    Ok(catalog)
}

/// Refuses an effort that the model would ignore or replace without a word.
///
/// A model of the catalogue takes what its entry says, others what is known of them, and of an unknown model every level
/// passes, since the service decides; `none` passes only where thinking off is known to work.
///
/// # Errors
///
/// `effort_unsupported` that lists what works.
pub fn check_effort(
    model: &ModelId,
    effort: Option<Effort>,
    catalog: &[CatalogEntry],
) -> Result<()> {
    let Some(effort) = effort else {
        return Ok(());
    };
    let (base, _) = split_suffix(model);
    let entry = catalog
        .iter()
        .find(|entry| entry.alias == base || entry.id.0 == base);
    let (levels, thinking_off) = match entry {
        Some(entry) => (entry.efforts.clone(), entry.thinking_off),
        None => (known_levels(model), known_thinking_off(model)),
    };
    let works = if effort == Effort::None {
        thinking_off
    } else {
        levels.contains(&effort)
    };
    if works {
        return Ok(());
    }
    let off = thinking_off.then_some(Effort::None);
    let all: Vec<_> = off.into_iter().chain(levels).map(Effort::as_str).collect();
    let offer = if all.is_empty() {
        "it takes none at all".to_owned()
    } else {
        format!("it takes {}", all.join(", "))
    };
    Err(Error::new(
        ErrorCode::EffortUnsupported,
        format!("{model} does not take effort {}; {offer}", effort.as_str()),
    ))
}

/// Levels of a model that is in no catalogue (2.1.332 and the two others: nothing is sent for Sonnet and Haiku 4.5, and
/// `xhigh` of Opus 4.6 becomes `high`).
fn known_levels(model: &ModelId) -> Vec<Effort> {
    match ModelName::parse(model) {
        Some(ModelName {
            family: Family::Sonnet | Family::Haiku,
            version,
            ..
        }) if version <= (4, 5) => Vec::new(),
        Some(ModelName {
            family: Family::Opus,
            version: (4, 6),
            ..
        }) => LEVELS
            .into_iter()
            .filter(|level| *level != Effort::Xhigh)
            .collect(),
        _ => LEVELS.into(),
    }
}

/// Whether `--thinking disabled` is known to work (2.1.332: for Sonnet 4.5 and 5, Haiku 4.5, Opus 4.6, 4.8 and 5, and for
/// none of the newer ones).
fn known_thinking_off(model: &ModelId) -> bool {
    ModelName::parse(model).is_some_and(|name| match name.family {
        Family::Sonnet | Family::Opus => name.version <= (5, 0),
        Family::Haiku => name.version <= (4, 5),
        Family::Fable => false,
    })
}

/// Tokens that an image counts as at most, by the service's documentation of its largest size that is not scaled down.
const IMAGE_TOKENS: u64 = 1_600;
/// Characters of base64 that make about one token of a document; a page of 100 KB is some thousand tokens.
const DOCUMENT_CHARS_A_TOKEN: u64 = 64;
/// Bytes of text that make about one token.
const BYTES_A_TOKEN: u64 = 4;

/// A rough count of a request's input tokens: text at four bytes a token, images at their largest count, documents by
/// their size. Token-dense input can have far more, so this only spares a request that cannot fit; it promises nothing.
pub fn estimate_tokens(system: &str, tools_bytes: usize, messages: &[Message]) -> u64 {
    let text = |bytes: usize| bytes as u64 / BYTES_A_TOKEN;
    let source = |source: &Source| match source {
        Source::Text { data, .. } => text(data.len()),
        Source::Base64 { data, .. } => data.len() as u64 / DOCUMENT_CHARS_A_TOKEN,
        Source::Url { .. } => 0,
    };
    let result = |block: &ResultBlock| match block {
        ResultBlock::Text { text: said } => text(said.len()),
        ResultBlock::Image(_) => IMAGE_TOKENS,
        ResultBlock::Document(document) => source(&document.source),
    };
    let block = |block: &Block| match block {
        Block::Text { text: said } => text(said.len()),
        Block::Image(_) => IMAGE_TOKENS,
        Block::Document(document) => source(&document.source),
        Block::ToolUse(call) => text(call.input.as_str().len() + call.name.len()),
        Block::ToolResult(answer) => answer.content.iter().map(result).sum(),
        Block::Thinking(thinking) => text(thinking.thinking.len()),
        Block::RedactedThinking(thinking) => text(thinking.data.len()),
    };
    let said: u64 = messages
        .iter()
        .flat_map(|message| &message.content)
        .map(block)
        .sum();
    text(system.len()) + text(tools_bytes) + said
}

/// Refuses a conversation that is above the model's ceiling by the estimate; nothing is started then.
///
/// # Errors
///
/// `context_length_exceeded`.
pub fn check_context(model: &ModelId, tokens: u64) -> Result<()> {
    let ceiling = ceiling_tokens(model);
    if tokens <= ceiling {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::ContextLengthExceeded,
        format!("the conversation has about {tokens} tokens, {model} is held to {ceiling}"),
    ))
}

#[cfg(test)]
#[path = "models_tests.rs"]
mod tests;
