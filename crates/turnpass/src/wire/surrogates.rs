//! JSON text that serde refuses although its sender meant well: lone surrogate halves and bytes that are not UTF-8.
//!
//! A text cut by UTF-16 length inside an emoji leaves one half of a pair behind. JavaScript writes it as `\ud83d`, and both serde_json and the
//! Messages API refuse it; each half becomes U+FFFD here, so that the turn goes on and nothing that we pass on holds one.

use std::borrow::Cow;

use memchr::{memchr, memchr2, memmem};

/// `json` with each lone surrogate escape inside a string replaced by `\ufffd`, and each broken UTF-8 sequence by U+FFFD.
///
/// Returns the input itself when there is nothing to replace, which one pass over it decides. Valid pairs, escaped backslashes
/// (`\\ud83d` is a backslash and five letters) and everything outside strings stay as they are, also in text that is not JSON at all.
pub fn repair(json: &[u8]) -> Cow<'_, [u8]> {
    let text = match std::str::from_utf8(json) {
        Ok(_) => Cow::Borrowed(json),
        Err(_) => Cow::Owned(String::from_utf8_lossy(json).into_owned().into_bytes()),
    };
    if !may_hold_surrogate(&text) {
        return text;
    }
    match replace_lone(&text) {
        Some(repaired) => Cow::Owned(repaired),
        None => text,
    }
}

/// Whether a surrogate escape, lone or not, or something that looks like one occurs.
fn may_hold_surrogate(text: &[u8]) -> bool {
    memmem::find_iter(text, b"\\u").any(|at| is_surrogate_start(&text[at + 2..]))
}

fn is_surrogate_start(hex: &[u8]) -> bool {
    matches!(
        hex,
        [b'd' | b'D', b'8' | b'9' | b'a'..=b'f' | b'A'..=b'F', ..]
    )
}

/// The text with lone halves replaced, or `None` if all halves pair up.
fn replace_lone(text: &[u8]) -> Option<Vec<u8>> {
    let mut out: Vec<u8> = Vec::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(quote) = memchr(b'"', &text[at..]) {
        at += quote + 1;
        // Inside a string: from escape to escape until the closing quote.
        while let Some(step) = memchr2(b'"', b'\\', &text[at..]) {
            at += step;
            if text[at] == b'"' {
                at += 1;
                break;
            }
            match escape(&text[at..]) {
                Escape::Whole(width) => at = (at + width).min(text.len()),
                Escape::LoneHalf => {
                    out.extend_from_slice(&text[copied..at]);
                    out.extend_from_slice(b"\\ufffd");
                    at += 6;
                    copied = at;
                }
            }
        }
    }
    if copied == 0 {
        return None;
    }
    out.extend_from_slice(&text[copied..]);
    Some(out)
}

enum Escape {
    /// Bytes that belong together.
    Whole(usize),
    LoneHalf,
}

/// What the text, which begins with a backslash, escapes.
fn escape(text: &[u8]) -> Escape {
    match unit(text) {
        Some(0xD800..=0xDBFF) => match text.get(6..).and_then(unit) {
            Some(0xDC00..=0xDFFF) => Escape::Whole(12),
            _ => Escape::LoneHalf,
        },
        Some(0xDC00..=0xDFFF) => Escape::LoneHalf,
        Some(_) => Escape::Whole(6),
        None => Escape::Whole(2),
    }
}

/// The code unit of a `\uXXXX` that the text begins with.
fn unit(text: &[u8]) -> Option<u16> {
    let [b'\\', b'u', a, b, c, d, ..] = *text else {
        return None;
    };
    [a, b, c, d].iter().try_fold(0, |unit, &digit| {
        let digit = (digit as char).to_digit(16)?;
        Some(unit << 4 | digit as u16)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn repaired(json: &str) -> String {
        String::from_utf8(repair(json.as_bytes()).into_owned()).unwrap()
    }

    #[test]
    fn bug_004_half_a_surrogate_pair_becomes_the_replacement_character() {
        for (broken, whole) in [
            (r#"{"text":"ok \ud83d…"}"#, r#"{"text":"ok \ufffd…"}"#),
            (r#"{"text":"ok \uD83D"}"#, r#"{"text":"ok \ufffd"}"#),
            (r#"["\ude00\ud83d"]"#, r#"["\ufffd\ufffd"]"#),
            (r#"["\ud83d\ud83d\ude00"]"#, r#"["\ufffd\ud83d\ude00"]"#),
            (r#"["\ud83d\n\ude00"]"#, r#"["\ufffd\n\ufffd"]"#),
            (r#"["\ud83dx","\udFFF"]"#, r#"["\ufffdx","\ufffd"]"#),
            (r#"{"\ud83d":"\\\ud83d"}"#, r#"{"\ufffd":"\\\ufffd"}"#),
        ] {
            assert!(
                serde_json::from_str::<serde_json::Value>(broken).is_err(),
                "{broken}"
            );
            assert_eq!(repaired(broken), whole);
            assert!(serde_json::from_str::<serde_json::Value>(whole).is_ok());
        }
    }

    #[test]
    fn what_is_well_formed_is_not_touched_and_not_copied() {
        for json in [
            r#"{"text":"\ud83d\ude00 \uD83D\uDE00 é 😀"}"#,
            r#"{"text":"\\ud83d C:\\udata \\\\ud800"}"#,
            r#"{"a":"\u0041\u001b"}"#,
            r#"\ud83d outside "a string" \ud83d"#,
            r#"["unfinished \ud83"#,
            r#"["unfinished \"#,
            "",
        ] {
            assert!(
                matches!(repair(json.as_bytes()), Cow::Borrowed(_)),
                "{json}"
            );
        }
    }

    #[test]
    fn broken_utf8_becomes_the_replacement_character() {
        assert_eq!(
            repair(b"{\"a\":\"x\xF0\x9F\x98\"}").as_ref(),
            "{\"a\":\"x\u{fffd}\"}".as_bytes()
        );
        assert_eq!(
            repair(b"[\"\xFF\\ud83d\"]").as_ref(),
            "[\"\u{fffd}\\ufffd\"]".as_bytes()
        );
    }

    /// UTF-16 units written as a careless sender would: escaped or not, in either case.
    fn string_of_units() -> impl Strategy<Value = (String, Vec<u16>)> {
        let unit = prop_oneof![
            0xD800..=0xDFFFu16,
            0x20..0x7Fu16,
            Just(0x5C),
            Just(0x22),
            Just(0x0A),
            any::<u16>()
        ];
        prop::collection::vec((unit, any::<bool>()), 0..40).prop_map(|units| {
            let mut json = String::from("[\"");
            for &(unit, upper) in &units {
                match char::from_u32(u32::from(unit)) {
                    Some('"') => json.push_str("\\\""),
                    Some('\\') => json.push_str("\\\\"),
                    Some(plain) if !plain.is_control() => json.push(plain),
                    _ if upper => json.push_str(&format!("\\u{unit:04X}")),
                    _ => json.push_str(&format!("\\u{unit:04x}")),
                }
            }
            json.push_str("\"]");
            (json, units.into_iter().map(|(unit, _)| unit).collect())
        })
    }

    proptest! {
        #[test]
        fn a_string_of_any_units_reads_like_lossy_utf16((json, units) in string_of_units()) {
            let [read]: [String; 1] = serde_json::from_slice(&repair(json.as_bytes())).unwrap();
            prop_assert_eq!(read, String::from_utf16_lossy(&units));
        }

        #[test]
        fn any_bytes_come_out_as_utf8_and_stay_when_repaired_again(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let once = repair(&bytes).into_owned();
            prop_assert!(std::str::from_utf8(&once).is_ok());
            prop_assert!(matches!(repair(&once), Cow::Borrowed(_)));
        }

        #[test]
        fn any_mix_of_pieces_stays_repaired(pieces in prop::collection::vec(prop::sample::select(vec!["\"", "\\", "\\ud83d", "\\ude00", "u", "d83d", "\\\"", "é"]), 0..30)) {
            let text = pieces.concat();
            let once = repair(text.as_bytes()).into_owned();
            prop_assert!(matches!(repair(&once), Cow::Borrowed(_)));
        }
    }
}
