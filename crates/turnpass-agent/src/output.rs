//! Text that goes back to the model, bounded. Pure.

/// Largest text of one tool result, in bytes. At about four bytes a token this is 12,000 tokens: enough for any file
/// that is read on purpose, and little enough that eight of them fit the smallest context window.
pub(crate) const RESULT_BYTES: usize = 48 * 1024;

/// Cuts a text at [`RESULT_BYTES`], on a character boundary, and says how much is missing.
pub(crate) fn bounded(text: String) -> (String, bool) {
    bounded_at(text, RESULT_BYTES)
}

fn bounded_at(mut text: String, limit: usize) -> (String, bool) {
    if text.len() <= limit {
        return (text, false);
    }
    let whole = text.len();
    text.truncate(text.floor_char_boundary(limit));
    let missing = whole - text.len();
    text.push_str(&format!(
        "\n[cut here: {missing} of {whole} bytes are left out]"
    ));
    (text, true)
}

/// Keeps the beginning and the end of a stream of bytes of any length, within [`RESULT_BYTES`].
///
/// The end of a program's output says how it went, the beginning what it was about.
#[derive(Debug, Default)]
pub(crate) struct HeadAndTail {
    head: Vec<u8>,
    tail: std::collections::VecDeque<u8>,
    total: u64,
}

impl HeadAndTail {
    /// Bytes kept of the beginning.
    const HEAD: usize = RESULT_BYTES / 2;
    /// Bytes kept of the end; the rest of the room is for the note.
    const TAIL: usize = RESULT_BYTES / 2 - 256;

    /// Takes the next bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = Self::HEAD - self.head.len();
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(first);
        let rest = &rest[rest.len().saturating_sub(Self::TAIL)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(Self::TAIL);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// All bytes so far, kept or not.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The text, with a note where bytes were left out. Bytes that are no UTF-8 become U+FFFD.
    pub(crate) fn into_text(self) -> String {
        let kept = (self.head.len() + self.tail.len()) as u64;
        let missing = self.total - kept;
        let mut bytes = self.head;
        let tail: Vec<u8> = self.tail.into();
        if missing == 0 {
            bytes.extend(tail);
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        let head = whole_characters_at_the_end(&bytes);
        let tail = whole_characters_at_the_start(&tail);
        format!(
            "{}\n[{missing} bytes are left out here]\n{}",
            String::from_utf8_lossy(head),
            String::from_utf8_lossy(tail)
        )
    }
}

/// Drops a character that was cut in two at the end.
fn whole_characters_at_the_end(bytes: &[u8]) -> &[u8] {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => &bytes[..error.valid_up_to()],
        _ => bytes,
    }
}

/// Drops the rest of a character that was cut in two at the start: at most three continuation bytes.
fn whole_characters_at_the_start(bytes: &[u8]) -> &[u8] {
    let rest = bytes
        .iter()
        .take(3)
        .take_while(|byte| **byte & 0b1100_0000 == 0b1000_0000)
        .count();
    &bytes[rest..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bug_004_results_are_cut_on_a_character_boundary() {
        let family = "👩‍👩‍👧";
        for limit in 0..=family.len() {
            let (text, cut) = bounded_at(family.to_owned(), limit);
            assert_eq!(cut, limit < family.len());
            assert!(!text.contains('\u{fffd}'));
            assert!(cut == text.contains("bytes are left out"));
        }
    }

    #[test]
    fn a_short_output_is_kept_whole() {
        let mut output = HeadAndTail::default();
        for chunk in "übermäßig".as_bytes().chunks(1) {
            output.push(chunk);
        }
        assert_eq!(output.into_text(), "übermäßig");
    }

    #[test]
    fn a_long_output_keeps_its_beginning_and_its_end() {
        let mut output = HeadAndTail::default();
        output.push(b"first ");
        for _ in 0..100_000 {
            output.push("ü".as_bytes());
        }
        output.push(b" last");
        assert_eq!(output.total(), 200_011);
        let text = output.into_text();
        assert!(text.len() <= RESULT_BYTES, "{}", text.len());
        assert!(text.starts_with("first ü") && text.ends_with("ü last"));
        assert!(text.contains("bytes are left out here"));
        assert!(!text.contains('\u{fffd}'), "a character was cut in two");
    }
}
