//! What a request says, in a form that can be compared: one line a block, without what the CLI adds by itself. Pure.

use serde_json::Value;

use super::cli::told;

/// Most lines of a conversation that are told.
const TOLD_LINES: usize = 6;

/// Longest text that is compared in full; of a longer one head and length are.
const LINE_CHARS: usize = 200;

/// The blocks of a request's messages, one line each. System messages and reminders are the CLI's own, and so are the
/// cache marks and the line feeds at the seams of merged messages.
pub(super) fn said(body: &Value) -> Vec<String> {
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let spoken = messages.iter().filter(|one| one["role"] != "system");
    spoken.flat_map(lines).collect()
}

fn lines(message: &Value) -> Vec<String> {
    let role = message["role"].as_str().unwrap_or("nobody");
    let lines = match &message["content"] {
        Value::String(text) => vec![text_line(text)],
        Value::Array(blocks) => blocks.iter().map(line).collect(),
        _ => Vec::new(),
    };
    let own = |line: &String| line.starts_with("text <system-reminder>");
    lines
        .into_iter()
        .filter(|line| !own(line))
        .map(|line| format!("{role} {line}"))
        .collect()
}

fn line(block: &Value) -> String {
    let of = |field: &str| block[field].as_str().unwrap_or_default();
    match of("type") {
        "text" => text_line(of("text")),
        "thinking" => format!(
            "thinking {} signed {}",
            of("thinking"),
            short(of("signature"))
        ),
        "tool_use" => format!("call {} {} {}", of("name"), of("id"), block["input"]),
        "tool_result" => format!(
            "result {} {}",
            of("tool_use_id"),
            short(&result_text(block))
        ),
        other => other.to_owned(),
    }
}

fn text_line(text: &str) -> String {
    format!("text {}", short(text.trim_end_matches('\n')))
}

/// The text of a tool result.
pub(super) fn result_text(block: &Value) -> String {
    match &block["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

fn short(text: &str) -> String {
    match text.char_indices().nth(LINE_CHARS) {
        Some((at, _)) => format!("{}... ({} bytes)", &text[..at], text.len()),
        None => text.to_owned(),
    }
}

/// Whether the conversation ends with exactly these lines, and the first of them occurs once; else what it ends with.
pub(super) fn ends_with(body: &Value, wanted: &[String]) -> Result<(), String> {
    let said = said(body);
    let first = wanted.first();
    let once = said.iter().filter(|line| Some(*line) == first).count() == 1;
    if once && said.ends_with(wanted) {
        return Ok(());
    }
    let from = said.len().saturating_sub(TOLD_LINES.max(wanted.len()));
    let lines: Vec<_> = said[from..].iter().map(|line| told(line)).collect();
    Err(format!("the request ends with: {}", lines.join(" | ")))
}

/// Every cache mark of a request: where it stands and how long it holds.
pub(super) fn cache_marks(body: &Value) -> Vec<(String, String)> {
    let mut marks = Vec::new();
    collect_marks(body, String::new(), &mut marks);
    marks
}

fn collect_marks(value: &Value, place: String, marks: &mut Vec<(String, String)>) {
    match value {
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                collect_marks(item, format!("{place}[{n}]"), marks);
            }
        }
        Value::Object(members) => {
            if let Some(mark) = members.get("cache_control") {
                let ttl = mark["ttl"].as_str().unwrap_or("5m");
                marks.push((place.clone(), ttl.to_owned()));
            }
            for (name, member) in members {
                let place = match place.is_empty() {
                    true => name.clone(),
                    false => format!("{place}.{name}"),
                };
                collect_marks(member, place, marks);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_cli_adds_is_left_out_and_the_rest_is_compared_in_order() {
        let body = json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x"}, {"type": "text", "text": "a\n"}]},
            {"role": "system", "content": "# Environment"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "name": "f", "id": "i", "input": {"n": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "r"}]}]},
            {"role": "user", "content": "b"},
        ]});
        let lines = [
            "user text a",
            "assistant thinking t signed s",
            "assistant call f i {\"n\":1}",
            "user result i r",
            "user text b",
        ]
        .map(str::to_owned);
        assert_eq!(said(&body), lines);
        assert_eq!(ends_with(&body, &lines[2..]), Ok(()));
        let other = ends_with(&body, &lines[..2]).unwrap_err();
        assert!(other.ends_with("user result i r | user text b"), "{other}");
    }

    #[test]
    fn a_conversation_that_holds_the_first_line_twice_is_another_one() {
        let turn = |text: &str| json!({"role": "user", "content": text});
        let body = json!({"messages": [turn("a"), turn("a")]});
        assert!(ends_with(&body, &["user text a".to_owned()]).is_err());
    }

    #[test]
    fn cache_marks_are_found_wherever_they_stand() {
        let mark = |ttl: &str| json!({"type": "ephemeral", "ttl": ttl});
        let body = json!({
            "system": [{"text": "a"}, {"text": "b", "cache_control": mark("1h")}],
            "messages": [{"content": [{"cache_control": {"type": "ephemeral"}}]}],
        });
        let wanted = [("system[1]", "1h"), ("messages[0].content[0]", "5m")];
        let wanted = wanted.map(|(place, ttl)| (place.to_owned(), ttl.to_owned()));
        assert_eq!(cache_marks(&body), wanted);
    }
}
