//! The models that the emulated versions know, as measured on 2.1.332.

use serde_json::{Value, json};

/// The effort levels that every current model takes.
const LEVELS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Alias, resolved id, display name.
const CATALOGUE: [(&str, &str, &str); 5] = [
    ("default", "claude-opus-5-5", "Default (recommended)"),
    ("opus", "claude-opus-5-5", "Opus"),
    ("fable", "claude-fable-5-2", "Fable"),
    ("sonnet", "claude-sonnet-5-5", "Sonnet"),
    ("haiku", "claude-haiku-5-5", "Haiku"),
];

/// The id that a name stands for; an unknown name is sent as it is. On 2.1.332 the suffix `[1m]` is
/// dropped for the 5.x models and never reaches the body.
pub(crate) fn resolve(name: &str) -> String {
    let plain = name.strip_suffix("[1m]").unwrap_or(name);
    match plain {
        "best" => "claude-opus-5-5".to_owned(),
        "opusplan" => "claude-sonnet-5-5".to_owned(),
        _ => CATALOGUE
            .iter()
            .find(|(alias, ..)| *alias == plain)
            .map_or_else(|| plain.to_owned(), |(_, id, _)| (*id).to_owned()),
    }
}

/// Whether `set_model` accepts it without asking upstream first.
pub(crate) fn is_known(name: &str) -> bool {
    CATALOGUE
        .iter()
        .any(|(alias, id, _)| *alias == name || *id == name)
}

/// The `models` of `initialize`.
pub(crate) fn listed() -> Value {
    CATALOGUE
        .iter()
        .map(|(alias, id, display)| {
            json!({
                "value": alias, "resolvedModel": id, "displayName": display,
                "description": format!("{display}, as the laboratory lists it"),
                "supportsEffort": true, "supportedEffortLevels": LEVELS,
                "supportsAdaptiveThinking": true, "supportsAutoMode": true, "supportsThinkingOff": false,
            })
        })
        .collect()
}

/// What a model is like on the wire.
pub(crate) struct Traits {
    /// It is of the generation whose environment text is a system message.
    pub(crate) current: bool,
    pub(crate) context_window: u64,
    pub(crate) max_tokens: u64,
    /// It takes `output_config.effort`.
    pub(crate) effort: bool,
}

/// Measured for the listed models; other names get what an unknown name got.
pub(crate) fn traits(id: &str) -> Traits {
    let has = |part: &str| id.contains(part);
    if has("-5-5") || has("fable-5-2") {
        Traits {
            current: true,
            context_window: 1_000_000,
            max_tokens: 128_000,
            effort: true,
        }
    } else if has("fable-5") || has("opus-4-6") || has("sonnet-5") || has("opus-5") {
        Traits {
            current: has("-5"),
            context_window: 200_000,
            max_tokens: 64_000,
            effort: true,
        }
    } else if has("4-5") {
        Traits {
            current: false,
            context_window: 200_000,
            max_tokens: 32_000,
            effort: false,
        }
    } else {
        Traits {
            current: true,
            context_window: 200_000,
            max_tokens: 32_000,
            effort: true,
        }
    }
}
