//! Recordings of the real CLI, read for playing.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// One row that matters for playing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Row {
    /// A record that the CLI wrote, so long after the row before it.
    Out { after: Duration, record: Value },
    /// A line that the host wrote.
    In(Value),
}

/// Reads both forms: rows `{"t": ms, "dir": D, "v": V}`, and bare stdout records.
pub(crate) fn read(path: &Path) -> Result<Vec<Row>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut rows = Vec::new();
    let mut last_ms = None;
    for (index, line) in text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let value: Value = serde_json::from_str(line)
            .map_err(|error| format!("{}, line {}: {error}", path.display(), index + 1))?;
        let at_ms = value["t"].as_f64().unwrap_or(0.0);
        match value["dir"].as_str() {
            Some("out") => {
                let since = at_ms - last_ms.unwrap_or(at_ms);
                let after = Duration::from_secs_f64(since.max(0.0) / 1000.0);
                rows.push(Row::Out {
                    after,
                    record: value["v"].clone(),
                });
                last_ms = Some(at_ms);
            }
            Some("in") => {
                rows.push(Row::In(value["v"].clone()));
                last_ms = Some(at_ms);
            }
            Some(_) => {}
            None => rows.push(Row::Out {
                after: Duration::ZERO,
                record: value,
            }),
        }
    }
    Ok(rows)
}

/// Learns which recorded ids stand for which real ones, from a recorded and a real stdin line.
pub(crate) fn learn_ids(recorded: &Value, real: &Value, ids: &mut BTreeMap<String, String>) {
    for key in ["request_id", "uuid"] {
        if let (Some(old), Some(new)) = (recorded[key].as_str(), real[key].as_str()) {
            ids.insert(old.to_owned(), new.to_owned());
        }
    }
}

/// Replaces recorded ids, wherever a string is exactly one of them.
pub(crate) fn replace_ids(value: &Value, ids: &BTreeMap<String, String>) -> Value {
    match value {
        Value::String(text) => Value::String(ids.get(text).unwrap_or(text).clone()),
        Value::Array(list) => list.iter().map(|item| replace_ids(item, ids)).collect(),
        Value::Object(map) => {
            let replaced = map
                .iter()
                .map(|(key, item)| (key.clone(), replace_ids(item, ids)));
            Value::Object(replaced.collect())
        }
        other => other.clone(),
    }
}
