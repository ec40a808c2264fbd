//! The name of a session as the name of its file. Pure.

use turnpass::{Error, ErrorCode, Result};

/// Longest name as a file name, in bytes; with its end it has to stay below the 255 that file systems take.
const NAME_BYTES: usize = 240;

/// A name as a file name: lower-case letters, digits, `-` and `_` stay, every other byte is `%` and two digits. So no name
/// leads anywhere else, and two names are two files on a disk that does not tell `a` from `A` too.
pub(super) fn encode(name: &str) -> Result<String> {
    let wrong = |what: &str| {
        Err(Error::new(
            ErrorCode::RequestInvalid,
            format!("a session's name {what}"),
        ))
    };
    if name.trim().is_empty() {
        return wrong("is empty");
    }
    if name.chars().any(char::is_control) {
        return wrong("has a control character");
    }
    let mut encoded = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02x}")),
        }
    }
    match encoded.len() {
        ..=NAME_BYTES => Ok(encoded),
        _ => wrong("is too long: 80 letters outside a to z, or 240 of those, are the limit"),
    }
}

/// The name of a file name of ours.
pub(super) fn decode(encoded: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = encoded.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next()?, rest.next()?];
        let digits = std::str::from_utf8(&digits).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
    }
    let name = String::from_utf8(bytes).ok()?;
    (encode(&name).ok()? == encoded).then_some(name)
}
