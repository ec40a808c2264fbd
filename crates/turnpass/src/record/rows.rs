//! The two forms of a recording: bare lines of the CLI, and rows `{"t": ms, "dir": "in" | "out" | ..., "v": ...}` of the
//! laboratory.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

/// One line of a recording.
#[derive(Debug)]
pub(super) enum Row<'a> {
    /// A line that the CLI printed, as it stands.
    Bare(&'a [u8]),
    /// A row: milliseconds, direction, and what went over.
    Timed {
        at_ms: f64,
        direction: Cow<'a, str>,
        value: &'a RawValue,
    },
}

#[derive(Deserialize)]
struct Form<'a> {
    t: f64,
    #[serde(borrow)]
    dir: Cow<'a, str>,
    #[serde(borrow)]
    v: &'a RawValue,
}

impl<'a> Row<'a> {
    /// Reads a line, whichever form it has. Lone surrogates must have been repaired before.
    pub(super) fn read(line: &'a [u8]) -> Self {
        let is_object = line.trim_ascii_start().first() == Some(&b'{');
        match serde_json::from_slice::<Form<'_>>(line) {
            Ok(form) if is_object => Self::Timed {
                at_ms: form.t,
                direction: form.dir,
                value: form.v,
            },
            _ => Self::Bare(line),
        }
    }
}
