//! Signatures of thinking blocks, which the upstream issues and recognises.
//!
//! A signature is `base64(nonce || HMAC-SHA256(key, nonce || kind || text))`: a changed text, a signature of another
//! upstream and an invented one are all found out, and nothing has to be remembered. Signatures that a scenario gives, and
//! recorded ones that a test admits, are remembered.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

const NONCE_BYTES: usize = 8;
const BLOCK_BYTES: usize = 64;

/// Issues and recognises signatures.
#[derive(Debug)]
pub(crate) struct Signer {
    key: [u8; 32],
    /// Admitted signatures with the digest of the text that they belong to; without one they go with any text.
    admitted: HashMap<String, Option<[u8; 32]>>,
}

#[derive(Clone, Copy)]
enum Kind {
    Thinking,
    Redacted,
}

impl Signer {
    pub(crate) fn new(key: [u8; 32]) -> Self {
        Self {
            key,
            admitted: HashMap::new(),
        }
    }

    /// The signature of a thinking text; another nonce gives another one.
    pub(crate) fn thinking(&self, nonce: u64, text: &str) -> String {
        self.issue(Kind::Thinking, nonce, text)
    }

    /// The data of a redacted thinking block.
    pub(crate) fn redacted(&self, nonce: u64) -> String {
        self.issue(Kind::Redacted, nonce, "")
    }

    /// Accepts this signature (or redacted data) with any text.
    pub(crate) fn admit(&mut self, signature: &str) {
        self.admitted.insert(signature.to_owned(), None);
    }

    /// Accepts this signature with this text only.
    pub(crate) fn admit_for(&mut self, signature: &str, text: &str) {
        let digest = Sha256::digest(text.as_bytes()).into();
        self.admitted
            .entry(signature.to_owned())
            .or_insert(Some(digest));
    }

    pub(crate) fn knows_thinking(&self, signature: &str, text: &str) -> bool {
        self.knows(Kind::Thinking, signature, text)
    }

    pub(crate) fn knows_redacted(&self, data: &str) -> bool {
        self.knows(Kind::Redacted, data, "")
    }

    fn issue(&self, kind: Kind, nonce: u64, text: &str) -> String {
        let nonce = nonce.to_be_bytes();
        let mut bytes = nonce.to_vec();
        bytes.extend_from_slice(&self.mac(kind, &nonce, text));
        STANDARD.encode(bytes)
    }

    fn knows(&self, kind: Kind, signature: &str, text: &str) -> bool {
        match self.admitted.get(signature) {
            Some(None) => return true,
            Some(Some(digest)) => return *digest == <[u8; 32]>::from(Sha256::digest(text)),
            None => {}
        }
        let Ok(bytes) = STANDARD.decode(signature) else {
            return false;
        };
        bytes.len() > NONCE_BYTES
            && bytes[NONCE_BYTES..] == self.mac(kind, &bytes[..NONCE_BYTES], text)
    }

    /// HMAC-SHA256 (RFC 2104); the key is shorter than a block.
    fn mac(&self, kind: Kind, nonce: &[u8], text: &str) -> [u8; 32] {
        let pad = |with: u8| {
            let mut block = [with; BLOCK_BYTES];
            for (byte, key) in block.iter_mut().zip(self.key) {
                *byte ^= key;
            }
            block
        };
        let kind: &[u8] = match kind {
            Kind::Thinking => b"thinking\0",
            Kind::Redacted => b"redacted\0",
        };
        let inner = Sha256::new()
            .chain_update(pad(0x36))
            .chain_update(nonce)
            .chain_update(kind)
            .chain_update(text)
            .finalize();
        Sha256::new()
            .chain_update(pad(0x5c))
            .chain_update(inner)
            .finalize()
            .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_signature_with_its_own_text_is_known() {
        let signer = Signer::new([7; 32]);
        let signature = signer.thinking(1, " a\r\nb ");
        assert!(signer.knows_thinking(&signature, " a\r\nb "));
        assert!(!signer.knows_thinking(&signature, "a\r\nb"));
        assert!(!signer.knows_redacted(&signature));
        assert!(!Signer::new([8; 32]).knows_thinking(&signature, " a\r\nb "));
        assert_ne!(signature, signer.thinking(2, " a\r\nb "));
        for wrong in ["", "AAAA", "AAAAAAAAAAA=", "not base64"] {
            assert!(!signer.knows_thinking(wrong, ""));
        }
        let hidden = signer.thinking(3, "");
        assert!(signer.knows_thinking(&hidden, ""));
        assert!(signer.knows_redacted(&signer.redacted(4)));
    }

    #[test]
    fn admitted_signatures_are_known() {
        let mut signer = Signer::new([7; 32]);
        signer.admit("recorded");
        signer.admit_for("scripted", "text");
        assert!(signer.knows_thinking("recorded", "anything"));
        assert!(signer.knows_thinking("scripted", "text"));
        assert!(!signer.knows_thinking("scripted", "other"));
    }
}
