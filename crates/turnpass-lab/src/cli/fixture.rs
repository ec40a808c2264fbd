//! Recordings of the real CLI, read for playing.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// One row that matters for playing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Row {
    /// A line that the CLI wrote, byte for byte, so long after the row before it.
    Out { after: Duration, line: String },
    /// A line that the host wrote.
    In(Value),
}

/// Raw, because a recording may hold half a surrogate pair, which a JSON value cannot.
#[derive(Deserialize)]
struct Form<'a> {
    #[serde(default)]
    t: f64,
    dir: Option<&'a str>,
    #[serde(borrow)]
    v: Option<&'a RawValue>,
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
        let form: Form<'_> = serde_json::from_str(line)
            .map_err(|error| format!("{}, line {}: {error}", path.display(), index + 1))?;
        let value = form.v.map(RawValue::get).unwrap_or("null");
        match form.dir {
            Some("out") => {
                let since = form.t - last_ms.unwrap_or(form.t);
                let after = Duration::from_secs_f64(since.max(0.0) / 1000.0);
                rows.push(Row::Out {
                    after,
                    line: value.to_owned(),
                });
                last_ms = Some(form.t);
            }
            Some("in") => {
                rows.push(Row::In(serde_json::from_str(value).unwrap_or_default()));
                last_ms = Some(form.t);
            }
            Some(_) => {}
            None => rows.push(Row::Out {
                after: Duration::ZERO,
                line: line.to_owned(),
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

/// Replaces recorded ids where a string of the line is exactly one of them.
pub(crate) fn replace_ids(line: &str, ids: &BTreeMap<String, String>) -> String {
    let mut line = line.to_owned();
    for (old, new) in ids {
        line = line.replace(
            &format!("\"{old}\""),
            &Value::from(new.as_str()).to_string(),
        );
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bug_004_half_a_surrogate_pair_in_a_recording_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.ndjson");
        let text = concat!(
            r#"{"t":1,"dir":"in","v":{"uuid":"a"}}"#,
            "\n",
            r#"{"t":3.5,"dir":"out","v":{"u":"a","text":"x\ud83d"}}"#,
            "\n",
            r#"{"t":4,"dir":"up_req","v":null}"#,
            "\n",
        );
        std::fs::write(&path, text).unwrap();
        let rows = read(&path).unwrap();
        let Row::Out { after, line } = &rows[1] else {
            panic!("{rows:?}")
        };
        assert_eq!(*after, Duration::from_micros(2500));
        let ids = BTreeMap::from([("a".to_owned(), "b\"".to_owned())]);
        assert_eq!(replace_ids(line, &ids), r#"{"u":"b\"","text":"x\ud83d"}"#);
        assert_eq!(rows.len(), 2);
    }
}
