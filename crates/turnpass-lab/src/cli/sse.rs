//! Server-sent events, read over a buffer.

use serde_json::Value;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SseEvent {
    /// The `event:` field; empty when there was none.
    pub name: String,
    /// The `data:` lines, joined by line feeds.
    pub data: String,
}

impl SseEvent {
    /// The data as JSON, read as JavaScript reads it: half a surrogate pair is accepted (it becomes U+FFFD here, where
    /// JavaScript keeps it). Null when it is no JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data)
            .or_else(|_| serde_json::from_str(&without_lone_halves(&self.data)))
            .unwrap_or_default()
    }
}

/// The text with `\ufffd` in place of each `\uD800` to `\uDFFF` that has no partner.
fn without_lone_halves(text: &str) -> String {
    let half = |at: usize| -> Option<u16> {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        let code = u16::from_str_radix(digits, 16).ok()?;
        (0xd800..0xe000).contains(&code).then_some(code)
    };
    let (mut out, mut at) = (String::with_capacity(text.len()), 0);
    while let Some(next) = text[at..].find('\\') {
        out.push_str(&text[at..at + next]);
        at += next;
        let taken = match (half(at), half(at + 6)) {
            (Some(..0xdc00), Some(0xdc00..)) => 12,
            (Some(_), _) => {
                out.push_str("\\ufffd");
                at += 6;
                continue;
            }
            // The escaped character goes with its backslash, so that `\\ud83d` stays what it is.
            (None, _) => 1 + text[at + 1..].chars().next().map_or(0, char::len_utf8),
        };
        out.push_str(&text[at..at + taken]);
        at += taken;
    }
    out + &text[at..]
}

/// Splits a byte stream into events: push bytes, take events.
///
/// Measured on 2.1.332: LF and CRLF line ends and comment lines are accepted, `event:` is required; an
/// unfinished event at the end of the stream is no event.
#[derive(Debug, Default)]
pub struct SseParser {
    buffer: Vec<u8>,
    name: String,
    data: Option<String>,
}

impl SseParser {
    /// Takes bytes and returns the events that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<SseEvent> {
        self.buffer.extend_from_slice(bytes);
        let mut events = Vec::new();
        let mut start = 0;
        while let Some(length) = self.buffer[start..].iter().position(|byte| *byte == b'\n') {
            let line = &self.buffer[start..start + length];
            start += length + 1;
            let line =
                String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line)).into_owned();
            if line.is_empty() {
                let name = std::mem::take(&mut self.name);
                if let Some(data) = self.data.take() {
                    events.push(SseEvent { name, data });
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut self.name),
                "data" => match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => self.data = Some(value.to_owned()),
                },
                _ => {}
            }
        }
        self.buffer.drain(..start);
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_any_cut_and_both_line_ends() {
        let wire = b": hi\r\nevent: a\r\ndata: {\"x\":1}\r\n\r\nevent: b\ndata: 1\ndata: 2\n\nevent: c\ndata: lost";
        let whole = SseParser::default().push(wire);
        assert_eq!(whole.len(), 2);
        assert_eq!(
            whole[0],
            SseEvent {
                name: "a".into(),
                data: "{\"x\":1}".into()
            }
        );
        assert_eq!(whole[1].data, "1\n2");
        for cut in 0..wire.len() {
            let mut parser = SseParser::default();
            let mut events = parser.push(&wire[..cut]);
            events.extend(parser.push(&wire[cut..]));
            assert_eq!(events, whole, "cut at {cut}");
        }
    }

    #[test]
    fn bug_004_half_a_pair_is_read_and_a_whole_one_kept() {
        let read = |data: &str| {
            let event = SseEvent {
                name: String::new(),
                data: data.to_owned(),
            };
            event.json()
        };
        assert_eq!(read(r#""a \ud83d b \ude00 c""#), "a \u{fffd} b \u{fffd} c");
        assert_eq!(read(r#""\ud83d\ude00 \ud83d""#), "\u{1f600} \u{fffd}");
        assert_eq!(read(r#""\\ud83d \ud83d\n""#), "\\ud83d \u{fffd}\n");
        assert_eq!(read("{\"a\": "), serde_json::Value::Null);
    }
}
