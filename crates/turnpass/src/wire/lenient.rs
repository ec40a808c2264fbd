//! Fields that only inform: a value of an unexpected type reads as absent instead of refusing the whole record.

use serde::de::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::text::Text;

/// For `#[serde(default, deserialize_with = "lenient::option")]`: null, absent and ill-typed are all `None`.
pub(super) fn option<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let raw = <&RawValue>::deserialize(deserializer)?;
    Ok(parse(raw))
}

/// The same for a list: elements that do not read as `T` are left out, and anything but a list is empty.
pub(super) fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let raw = <&RawValue>::deserialize(deserializer)?;
    let elements: Vec<&RawValue> = parse(raw).unwrap_or_default();
    Ok(elements.into_iter().filter_map(parse).collect())
}

/// A flag that counts only when it is the boolean `true`.
pub(super) fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let raw = <&RawValue>::deserialize(deserializer)?;
    Ok(raw.get() == "true")
}

/// `raw` as a `T`, or `None` when it is null or something else.
pub(super) fn parse<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Option<T> {
    serde_json::from_str::<Option<T>>(raw.get()).ok().flatten()
}

/// Whether the text, if it is JSON, is an object.
///
/// Serde reads a struct from an array of its fields too, which no sender of ours means.
pub(super) fn is_object(json: &[u8]) -> bool {
    json.trim_ascii_start().starts_with(b"{")
}

/// A word that must not get lost when it is not the string we expect: then its JSON text stands for it.
pub(super) fn word<'de: 'a, 'a, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Text<'a>>, D::Error> {
    let raw = <&RawValue>::deserialize(deserializer)?;
    Ok(match raw.get() {
        "null" => None,
        other => Some(parse(raw).unwrap_or_else(|| other.into())),
    })
}

/// An HTTP status, as a number or as its digits in a string.
pub(super) fn status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    let raw = <&RawValue>::deserialize(deserializer)?;
    Ok(raw.get().trim_matches('"').parse().ok())
}
