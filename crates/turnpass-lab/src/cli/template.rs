//! Subset matching of JSON, and `{{placeholders}}` in what a script sends.

use serde_json::{Map, Value};

/// What the placeholders of a step stand for.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Named values: `{{session_id}}`, `{{version}}`, `{{n}}`, `{{tools}}` and so on.
    pub named: Map<String, Value>,
    /// The line that the last `expect` took, for `{{request_id}}`, `{{uuid_of_line}}`, `{{line:/a/b}}`.
    pub line: Value,
}

/// Whether `value` has everything that `pattern` has.
///
/// An object matches when each of its keys is present and matches; an array must have the same length
/// and match item by item; `{"$any": true}` matches anything that is present, `{"$absent": true}` a key
/// that is not there, `{"$contains": "x"}` a string with that text in it; everything else must be equal.
pub fn matches(pattern: &Value, value: &Value) -> bool {
    match (pattern, value) {
        (Value::Object(wanted), _) if wanted.len() == 1 && wanted.contains_key("$any") => true,
        (Value::Object(wanted), _) if wanted.len() == 1 && wanted.contains_key("$contains") => {
            let part = wanted.get("$contains").and_then(Value::as_str);
            part.zip(value.as_str())
                .is_some_and(|(part, text)| text.contains(part))
        }
        (Value::Object(wanted), Value::Object(found)) => {
            wanted.iter().all(|(key, inner)| match found.get(key) {
                Some(there) => !is_absent(inner) && matches(inner, there),
                None => is_absent(inner),
            })
        }
        (Value::Array(wanted), Value::Array(found)) => {
            wanted.len() == found.len()
                && wanted
                    .iter()
                    .zip(found)
                    .all(|(inner, there)| matches(inner, there))
        }
        _ => pattern == value,
    }
}

fn is_absent(pattern: &Value) -> bool {
    pattern
        .as_object()
        .is_some_and(|map| map.len() == 1 && map.contains_key("$absent"))
}

/// Fills the placeholders of `value`, everywhere in it.
///
/// A string that is one placeholder becomes the value itself, so that `"{{line:/id}}"` stays a number;
/// inside other text the value is written as text. An unknown placeholder stays as it is written.
pub fn fill(value: &Value, scope: &Scope) -> Value {
    match value {
        Value::String(text) => fill_text(text, scope),
        Value::Array(list) => list.iter().map(|item| fill(item, scope)).collect(),
        Value::Object(map) => {
            let filled = map
                .iter()
                .map(|(key, item)| (key.clone(), fill(item, scope)));
            Value::Object(filled.collect())
        }
        other => other.clone(),
    }
}

fn fill_text(text: &str, scope: &Scope) -> Value {
    if let Some(name) = text
        .strip_prefix("{{")
        .and_then(|rest| rest.strip_suffix("}}"))
        && !name.contains("{{")
        && let Some(value) = lookup(name, scope)
    {
        return value;
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{{") {
        let (before, tail) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tail.find("}}") else {
            rest = tail;
            break;
        };
        let (token, after) = tail.split_at(end + 2);
        match lookup(&token[2..end], scope) {
            Some(Value::String(plain)) => out.push_str(&plain),
            Some(other) => out.push_str(&other.to_string()),
            None => out.push_str(token),
        }
        rest = after;
    }
    out.push_str(rest);
    Value::String(out)
}

fn lookup(name: &str, scope: &Scope) -> Option<Value> {
    match name {
        "uuid" => Some(Value::String(uuid::Uuid::new_v4().to_string())),
        "request_id" => {
            let line = &scope.line;
            let id = line
                .get("request_id")
                .or_else(|| line.pointer("/response/request_id"));
            id.cloned()
        }
        "uuid_of_line" => scope.line.get("uuid").cloned(),
        _ => match name.strip_prefix("line:") {
            Some(pointer) => scope.line.pointer(pointer).cloned(),
            None => scope.named.get(name).cloned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_object_matches_by_subset_and_an_array_by_length() {
        assert!(matches(
            &json!({"a": {"b": 1}}),
            &json!({"a": {"b": 1, "c": 2}, "d": 3})
        ));
        assert!(!matches(&json!({"a": 1}), &json!({"b": 1})));
        assert!(!matches(&json!([1]), &json!([1, 2])));
        assert!(matches(&json!({"a": {"$absent": true}}), &json!({"b": 1})));
        assert!(!matches(
            &json!({"a": {"$absent": true}}),
            &json!({"a": null})
        ));
        assert!(matches(
            &json!({"a": {"$contains": "ell"}}),
            &json!({"a": "hello"})
        ));
        assert!(!matches(&json!({"a": {"$any": true}}), &json!({})));
    }

    #[test]
    fn placeholders_keep_their_type_when_alone_and_become_text_inside_text() {
        let scope = Scope {
            named: json!({"n": 7}).as_object().cloned().unwrap(),
            line: json!({"id": 12, "request_id": "r1", "uuid": "u1"}),
        };
        let value = json!({"id": "{{line:/id}}", "t": "no {{n}}/{{request_id}} {{what}} {{", "u": "{{uuid_of_line}}"});
        let filled = fill(&value, &scope);
        assert_eq!(
            filled,
            json!({"id": 12, "t": "no 7/r1 {{what}} {{", "u": "u1"})
        );
        let fresh = fill(&json!(["{{uuid}}", "{{uuid}}"]), &scope);
        assert_ne!(fresh[0], fresh[1]);
    }
}
