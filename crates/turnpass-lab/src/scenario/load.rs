//! Reading scenarios, and finding the place of an error in one.

use std::io::Read as _;
use std::path::Path;

use base64::Engine as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Body, Item, MAX_SCENARIO_BYTES, Reply, Scenario, ScenarioError};

impl Scenario {
    /// Reads a scenario from JSON text.
    pub fn from_json(text: &str) -> Result<Self, ScenarioError> {
        read(text.as_bytes(), "text")
    }

    /// Reads a scenario file of at most [`MAX_SCENARIO_BYTES`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ScenarioError> {
        let path = path.as_ref();
        let io_error = |source| ScenarioError::Read {
            path: path.to_owned(),
            source,
        };
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .map_err(io_error)?
            .take(MAX_SCENARIO_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(io_error)?;
        let origin = path.display().to_string();
        if bytes.len() as u64 > MAX_SCENARIO_BYTES {
            return Err(invalid(
                &origin,
                "whole file",
                format!("is larger than {MAX_SCENARIO_BYTES} bytes"),
            ));
        }
        read(&bytes, &origin)
    }
}

fn invalid(origin: &str, place: impl Into<String>, problem: impl Into<String>) -> ScenarioError {
    ScenarioError::Invalid {
        origin: origin.to_owned(),
        place: place.into(),
        problem: problem.into(),
    }
}

fn read(bytes: &[u8], origin: &str) -> Result<Scenario, ScenarioError> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|error| invalid(origin, "JSON", error.to_string()))?;
    let scenario: Scenario = serde_json::from_value(value.clone()).map_err(|error| {
        // The derive of a tagged enum loses the place, so the parts are read again one by one until one of them fails.
        let (place, problem) =
            locate(&value).unwrap_or_else(|| ("top level".into(), error.to_string()));
        invalid(origin, place, problem)
    })?;
    meaning(&scenario).map_err(|(place, problem)| invalid(origin, place, problem))?;
    Ok(scenario)
}

/// Finds what is wrong with a part.
type Problem = fn(&Value) -> Option<String>;

fn fails<T: DeserializeOwned>(value: &Value) -> Option<String> {
    serde_json::from_value::<T>(value.clone())
        .err()
        .map(|error| error.to_string())
}

fn locate(scenario: &Value) -> Option<(String, String)> {
    let replies = scenario.get("replies").and_then(Value::as_array);
    let numbered = replies
        .into_iter()
        .flatten()
        .enumerate()
        .map(|(index, reply)| (format!("replies[{index}]"), reply));
    let default = scenario
        .get("default")
        .map(|reply| ("default".to_owned(), reply));
    for (place, reply) in numbered.chain(default) {
        if let Some(problem) = fails::<Reply>(reply) {
            return Some(locate_in_reply(&place, reply).unwrap_or((place, problem)));
        }
    }
    for field in ["usage", "token"] {
        for (index, answer) in list(scenario, field).enumerate() {
            let problem = match field {
                "usage" => fails::<super::UsageAnswer>(answer),
                _ => fails::<super::TokenAnswer>(answer),
            };
            if let Some(problem) = problem {
                return Some((format!("{field}[{index}]"), problem));
            }
        }
    }
    None
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value
        .get(field)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

fn locate_in_reply(place: &str, reply: &Value) -> Option<(String, String)> {
    for (index, item) in list(reply, "content").enumerate() {
        if let Some(problem) = fails::<Item>(item) {
            return Some((format!("{place}.content[{index}]"), problem));
        }
    }
    for (index, at) in list(reply, "at").enumerate() {
        if let Some(problem) = fails::<super::At>(at) {
            let at_place = format!("{place}.at[{index}]");
            let inner = at.get("do").and_then(fails::<Item>);
            return Some(match inner {
                Some(problem) => (format!("{at_place}.do"), problem),
                None => (at_place, problem),
            });
        }
    }
    let fields: [(&str, Problem); 6] = [
        ("when", fails::<super::When>),
        ("body", fails::<Body>),
        ("error", fails::<super::ErrorBody>),
        ("cut", fails::<super::Cut>),
        ("sse", fails::<super::SseShape>),
        ("encoding", fails::<Vec<super::Coding>>),
    ];
    fields.iter().find_map(|(field, check)| {
        let problem = reply.get(field).and_then(check)?;
        Some((format!("{place}.{field}"), problem))
    })
}

/// What the types cannot say.
fn meaning(scenario: &Scenario) -> Result<(), (String, String)> {
    let numbered = scenario
        .replies
        .iter()
        .enumerate()
        .map(|(index, reply)| (format!("replies[{index}]"), reply));
    let default = scenario
        .default
        .as_deref()
        .map(|reply| ("default".to_owned(), reply));
    for (place, reply) in numbered.chain(default) {
        reply_meaning(reply).map_err(|(inner, problem)| (format!("{place}{inner}"), problem))?;
    }
    Ok(())
}

fn reply_meaning(reply: &Reply) -> Result<(), (String, String)> {
    let sources = [
        ("content", reply.content.is_some()),
        ("events", reply.events.is_some()),
        ("body", reply.body.is_some()),
        ("error", reply.error.is_some()),
        ("directives", reply.directives.is_some()),
    ];
    let given: Vec<&str> = sources
        .iter()
        .filter_map(|(name, given)| given.then_some(*name))
        .collect();
    if given.len() > 1 {
        let problem = format!("has {} at once; give one of them", given.join(" and "));
        return Err((String::new(), problem));
    }
    if !(200..600).contains(&reply.status) {
        return Err((".status".into(), "must be from 200 to 599".into()));
    }
    for (name, value) in &reply.headers {
        let sound = http::HeaderName::from_bytes(name.as_bytes()).is_ok()
            && !value.contains(['\r', '\n', '\0']);
        if !sound {
            return Err((format!(".headers.{name}"), "is not a header".into()));
        }
    }
    for (index, at) in reply.at.iter().enumerate() {
        if !at.action.is_action() {
            let problem =
                "must be an action (ping, stall, until_closed, hold, comment, raw, garbage, error)";
            return Err((format!(".at[{index}].do"), problem.into()));
        }
    }
    let items = reply.content.iter().flatten().map(|item| ("content", item));
    for (field, item) in items.chain(reply.at.iter().map(|at| ("at", &at.action))) {
        if let Item::Garbage { base64 } = item {
            decode(base64).map_err(|problem| (format!(".{field}"), problem))?;
        }
    }
    if let Some(Body::Base64(text)) = &reply.body {
        decode(text).map_err(|problem| (".body.base64".into(), problem))?;
    }
    Ok(())
}

/// Decodes base64 of a scenario.
pub(crate) fn decode(text: &str) -> Result<Vec<u8>, String> {
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .map_err(|error| format!("is not base64: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        Scenario::from_json(text).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_place() {
        for (text, place) in [
            (r#"{"replys":[]}"#, "top level"),
            (r#"{"replies":[{},{"statuss":3}]}"#, "replies[1]:"),
            (
                r#"{"replies":[{"content":[{"type":"text","text":"a"},{"type":"txt"}]}]}"#,
                "replies[0].content[1]",
            ),
            (
                r#"{"default":{"at":[{"event":1,"do":{"type":"stall"}}]}}"#,
                "default.at[0].do",
            ),
            (
                r#"{"replies":[{"at":[{"event":1,"do":{"type":"text","text":"x"}}]}]}"#,
                "replies[0].at[0].do",
            ),
            (
                r#"{"replies":[{"content":[],"body":{"text":""}}]}"#,
                "content and body at once",
            ),
            (
                r#"{"replies":[{"body":{"base64":"*"}}]}"#,
                "replies[0].body.base64",
            ),
            (r#"{"replies":[{"cut":{"at":"never"}}]}"#, "replies[0].cut"),
            (r#"{"replies":[{"status":99}]}"#, "replies[0].status"),
            (
                r#"{"replies":[{"headers":{"a":"b\r\nc"}}]}"#,
                "replies[0].headers.a",
            ),
            (r#"{"usage":[{"extra_usage":"maybe"}]}"#, "usage[0]"),
            (r#"{"replies":[}"#, "JSON"),
        ] {
            let message = problem(text);
            assert!(message.contains(place), "{text}: {message}");
        }
    }

    #[test]
    fn a_file_error_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wrong.json");
        std::fs::write(&path, r#"{"replies":7}"#).unwrap();
        let message = Scenario::from_file(&path).unwrap_err().to_string();
        assert!(message.contains("wrong.json"), "{message}");
        let missing = Scenario::from_file(dir.path().join("none.json")).unwrap_err();
        assert!(missing.to_string().contains("none.json"));
    }

    #[test]
    fn what_is_written_is_read_back() {
        let text = r#"{"replies":[{"when":{"model":"m","nth":2},"times":3,"stop_reason":null,
            "content":[{"type":"thinking","thinking":"t"},{"type":"tool_use","name":"n","raw":["{","}"]},
            {"type":"stall","ms":5,"ping_every_ms":2}],"cut":{"at":{"byte":7},"how":"rst"},
            "encoding":["gzip","br"],"split_bytes":1,"at":[{"event":"middle","do":{"type":"ping"}}]}],
            "usage":[{"extra_usage":"null","status":429}]}"#;
        let scenario = Scenario::from_json(text).unwrap();
        assert_eq!(scenario.replies[0].stop_reason, Some(None));
        let again = Scenario::from_json(&serde_json::to_string(&scenario).unwrap()).unwrap();
        assert_eq!(scenario, again);
    }
}
