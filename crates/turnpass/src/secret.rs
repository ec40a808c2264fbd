//! Values that must never be printed: a bearer in transit, a relay path, a tool server's token.

use std::fmt;

/// Bytes that identify or authorise, and appear nowhere but on the wire.
///
/// `Debug` and `Display` print a fixed word, there is no `Serialize`, and comparison takes the same time wherever
/// the first difference stands.
#[derive(Clone)]
pub struct Secret(Box<[u8]>);

/// Random bytes in a generated secret: 32, as the pool document says of its bearer.
pub const GENERATED_SECRET_BYTES: usize = 32;

impl Secret {
    /// Wraps bytes that came from outside.
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Self {
        Self(bytes.into())
    }

    /// A fresh random secret of [`GENERATED_SECRET_BYTES`] bytes, written in lower-case hexadecimal.
    pub fn generate() -> Self {
        let mut text = String::with_capacity(2 * GENERATED_SECRET_BYTES);
        for _ in 0..GENERATED_SECRET_BYTES / 16 {
            text.push_str(&uuid::Uuid::new_v4().simple().to_string());
        }
        Self(text.into_bytes().into())
    }

    /// The bytes themselves; for the wire only.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// The value as text, for a header or a path. Empty when it is not UTF-8, which then matches nothing.
    pub fn expose_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or("")
    }

    /// Whether `other` is equal, in a time that depends on its length only.
    pub fn matches(&self, other: &[u8]) -> bool {
        let mut difference = self.0.len() ^ other.len();
        for (index, byte) in other.iter().enumerate() {
            let own = self
                .0
                .get(index % self.0.len().max(1))
                .copied()
                .unwrap_or(0);
            difference |= usize::from(own ^ byte);
        }
        difference == 0 && !self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_never_printed() {
        let secret = Secret::new(*b"marker");
        assert_eq!(format!("{secret:?} {secret}"), "[secret] [secret]");
    }

    #[test]
    fn matches_only_the_same_bytes() {
        let secret = Secret::new(*b"abcd");
        assert!(secret.matches(b"abcd"));
        for wrong in [&b"abce"[..], b"abc", b"abcdabcd", b""] {
            assert!(!secret.matches(wrong));
        }
        assert!(!Secret::new(*b"").matches(b""));
    }

    #[test]
    fn generated_ones_differ() {
        let (one, two) = (Secret::generate(), Secret::generate());
        assert_eq!(one.expose().len(), 2 * GENERATED_SECRET_BYTES);
        assert_ne!(one.expose(), two.expose());
    }
}
