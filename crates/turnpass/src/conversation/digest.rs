//! Digests of what is sent: equal bytes, equal digest, and nothing of the text in it.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::encode::{self, Marks};
use super::names::hex;
use super::normalise::{Normalised, Sendable};

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of parts that cannot be mistaken for one another: each is preceded by its length.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// The digest of one message as it is sent, without cache marks.
    pub fn of_message(message: &Sendable<'_>) -> Self {
        let mut bytes = Vec::new();
        encode::message(&mut bytes, message, None);
        Self::of(&bytes)
    }

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Text that is not 64 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a digest is 64 lower-case hex digits")]
pub struct NoDigest;

impl std::str::FromStr for Digest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        let mut out = [0; 32];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != out.len() || !rest.is_empty() {
            return Err(NoDigest);
        }
        for (byte, [high, low]) in out.iter_mut().zip(pairs) {
            *byte = half(*high)? << 4 | half(*low)?;
        }
        Ok(Self(out))
    }
}

fn half(digit: u8) -> Result<u8, NoDigest> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(NoDigest),
    }
}

/// For each message the digest of the whole conversation up to and including it, as sent and without cache marks.
///
/// Two conversations share a prompt cache up to the last place where these are equal.
pub fn prefixes(normalised: &Normalised<'_>) -> Vec<Digest> {
    let mut hash = Sha256::new();
    let mut bytes = Vec::new();
    let mut out = Vec::with_capacity(normalised.messages.len());
    for message in &normalised.messages {
        bytes.clear();
        encode::message(&mut bytes, message, None);
        hash.update(&bytes);
        hash.update(b",");
        out.push(Digest(hash.clone().finalize().into()));
    }
    out
}

/// The digest of the conversation as sent, without cache marks.
///
/// # Errors
///
/// As [`encode::encode`].
pub fn whole(normalised: &Normalised<'_>) -> crate::error::Result<Digest> {
    encode::encode(normalised, Marks::NONE).map(|encoded| Digest::of(&encoded.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::{Message, NormaliseOptions, normalise};

    #[test]
    fn comes_back_from_its_text() {
        let digest = Digest::of(b"abc");
        assert_eq!(
            digest.to_string(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(digest.to_string().parse(), Ok(digest));
        let json = serde_json::to_string(&digest).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
        for bad in ["", "ba", &"g".repeat(64), &"A".repeat(64), &"a".repeat(65)] {
            assert_eq!(bad.parse::<Digest>(), Err(NoDigest));
        }
    }

    #[test]
    fn parts_are_not_mistaken_for_one_another() {
        let parts = |parts: &[&str]| Digest::of_parts(parts.iter().map(|part| part.as_bytes()));
        assert_ne!(parts(&["ab", "c"]), parts(&["a", "bc"]));
        assert_ne!(parts(&["a"]), parts(&["a", ""]));
    }

    #[test]
    fn bug_058_a_grown_conversation_keeps_its_prefixes() {
        let mut history = vec![
            Message::user("a"),
            Message::assistant("b"),
            Message::user("c"),
        ];
        let short = prefixes(&normalise(&history, &NormaliseOptions::default()).unwrap());
        history.extend([Message::assistant("d"), Message::user("e")]);
        let long = prefixes(&normalise(&history, &NormaliseOptions::default()).unwrap());
        assert_eq!(long[..3], short[..]);
        assert_eq!(long.len(), 5);
        history[1] = Message::assistant("B");
        let other = prefixes(&normalise(&history, &NormaliseOptions::default()).unwrap());
        assert_eq!(other[0], long[0]);
        assert!((1..5).all(|n| other[n] != long[n]));
    }
}
