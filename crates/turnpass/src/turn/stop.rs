//! Why the model stopped, from the words of the wire. Pure.

use crate::event::StopReason;

/// Longest refusal category that is kept, in characters (relay origin).
const REFUSAL_CATEGORY_CHARS: usize = 128;
/// Longest refusal explanation that is kept, in characters (relay origin).
const REFUSAL_EXPLANATION_CHARS: usize = 1024;

pub(super) fn reason(
    word: &str,
    sequence: Option<String>,
    details: Option<&serde_json::value::RawValue>,
) -> StopReason {
    match word {
        "end_turn" => StopReason::EndTurn,
        "tool_use" => StopReason::ToolUse,
        "max_tokens" => StopReason::MaxTokens,
        "stop_sequence" => StopReason::StopSequence { sequence },
        "pause_turn" => StopReason::PauseTurn,
        "model_context_window_exceeded" => StopReason::ContextWindowExceeded,
        "refusal" => {
            let details: serde_json::Value = details
                .and_then(|raw| serde_json::from_str(raw.get()).ok())
                .unwrap_or_default();
            let text = |key: &str, chars: usize| {
                details
                    .get(key)?
                    .as_str()
                    .map(|text| text.chars().take(chars).collect())
            };
            StopReason::Refusal {
                category: text("category", REFUSAL_CATEGORY_CHARS),
                explanation: text("explanation", REFUSAL_EXPLANATION_CHARS),
            }
        }
        other => StopReason::Other {
            word: other.chars().take(REFUSAL_CATEGORY_CHARS).collect(),
        },
    }
}
