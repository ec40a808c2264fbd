//! What of a message is compared, and what is tolerated.
//!
//! A message is read into atoms: its texts, documents, images, results and calls. Their hashes make the message's key.
//!
//! - **User** messages are compared by their content, byte for byte and in order, images apart (pool document).
//! - **Results** that the CLI wrote itself (input that does not parse, an unknown tool) are compared by the call's id
//!   alone: its own words stand in its conversation, whatever the host says.
//! - **Assistant** messages are compared by the ids of their calls in order and by their text, blocks joined and outer
//!   white space trimmed. The document compares the ids only, "since the CLI may normalize their text". We are
//!   stricter, because a message without calls would match any other, and a text that the host rewrote would be taken
//!   for the one that the model knows. Not compared: thinking, which hosts may drop, and the name and input of a call,
//!   which the CLI repairs (2.1.332 turns `"3"` into `3`).
//!
//! # Images
//!
//! A host strips image data after use, so an image may be gone later. An image that is there has to be one of those
//! recorded, in their order. One that is gone may have left nothing, or a placeholder exactly in its place: a short
//! text in brackets, such as `[image removed]` or what the normaliser makes of an image without bytes. Within one
//! message it is the one or the other; anything else counts as a rewrite. So does a message of images alone that is gone
//! as a whole, since then the turns no longer match.

use std::borrow::{Borrow, Cow};

use twox_hash::XxHash3_128;

use crate::conversation::digest::Digest;
use crate::conversation::normalise::Sendable;
use crate::conversation::{Block, Document, Message, ResultBlock, Role, Source};

/// Longest text that can stand in the place of an image. The normaliser's own has less than 240 bytes, a foreign media type
/// of 40 characters included; what hosts write is a few words.
const PLACEHOLDER_BYTES: usize = 256;

/// A hash over bytes.
pub(super) trait Hash {
    type Out: AsRef<[u8]> + PartialEq;

    fn of(&self, bytes: &[u8]) -> Self::Out;
}

/// 128 bits under a random seed: for comparing within one process, where it never leaves memory.
///
/// Every request passes the whole history, so this is what a turn costs: XXH3 took 91 ns for a message of
/// 1 KB where SHA-256 with the processor's own instructions took 940, and 0.5 µs for 10 KB instead of 7.6.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fast(pub(super) u64);

impl Hash for Fast {
    type Out = [u8; 16];

    fn of(&self, bytes: &[u8]) -> [u8; 16] {
        XxHash3_128::oneshot_with_seed(self.0, bytes).to_le_bytes()
    }
}

impl AsRef<[u8]> for Digest {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// SHA-256: the same in every process and version, for what is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stable;

impl Hash for Stable {
    type Out = Digest;

    fn of(&self, bytes: &[u8]) -> Digest {
        Digest::of(bytes)
    }
}

/// What is compared of a message, in order.
#[derive(Clone, Debug)]
pub(super) enum Atom<'a> {
    /// A text of the user's, or of a result.
    Text { text: Cow<'a, str>, result: bool },
    /// A document of the user's, or of a result.
    Document {
        document: &'a Document,
        result: bool,
    },
    /// An image of the user's, or of a result.
    Image { source: &'a Source },
    /// A result's beginning; its content follows.
    Result { id: &'a str, is_error: bool },
    /// A result that the CLI wrote itself; nothing of it follows.
    AnsweredByCli { id: &'a str },
    /// A call.
    Call { id: &'a str },
    /// All that the assistant says.
    Said { text: Cow<'a, str> },
}

/// What a key leaves out of a message that was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape<P> {
    /// How many atoms the message had.
    pub(super) atoms: u32,
    /// Its images, in order.
    pub(super) pictures: Box<[(u32, P)]>,
    /// The blocks that are results of calls which the CLI answered itself.
    pub(super) answered: Box<[u32]>,
}

impl<P> Shape<P> {
    /// Whether there is nothing to leave out.
    pub(super) fn is_plain(&self) -> bool {
        self.pictures.is_empty() && self.answered.is_empty()
    }
}

/// Reads messages; keeps its buffers from one to the next.
#[derive(Debug, Default)]
pub(super) struct Reader<'a> {
    atoms: Vec<Atom<'a>>,
    bytes: Vec<u8>,
}

impl<'a> Reader<'a> {
    pub(super) fn sendable(&mut self, message: &'a Sendable<'_>, answered: &[u32]) {
        match message.role {
            Role::Assistant => self.assistant(&message.content),
            Role::User | Role::System => self.user(&message.content, answered),
        }
    }

    /// An answer as it came, before the normaliser saw it.
    pub(super) fn answer(&mut self, message: &'a Message) {
        self.assistant(&message.content);
    }

    fn assistant<B: Borrow<Block>>(&mut self, content: &'a [B]) {
        self.atoms.clear();
        let mut said: Cow<'a, str> = Cow::Borrowed("");
        for block in content {
            match block.borrow() {
                Block::ToolUse(call) => self.atoms.push(Atom::Call { id: &call.id.0 }),
                // The normaliser leaves blank texts out, and hosts may.
                Block::Text { text } if trimmed(text).is_empty() => {}
                Block::Text { text } if said.is_empty() => said = Cow::Borrowed(text),
                Block::Text { text } => said.to_mut().push_str(text),
                _ => {}
            }
        }
        let text = match said {
            Cow::Borrowed(text) => Cow::Borrowed(trimmed(text)),
            Cow::Owned(text) => Cow::Owned(trimmed(&text).to_owned()),
        };
        self.atoms.push(Atom::Said { text });
    }

    fn user<B: Borrow<Block>>(&mut self, content: &'a [B], answered: &[u32]) {
        self.atoms.clear();
        for (place, block) in content.iter().enumerate() {
            match block.borrow() {
                Block::Text { text } => self.text(text, false),
                Block::Image(image) => self.image(&image.source),
                Block::Document(document) => self.document(document, false),
                Block::ToolResult(result) => {
                    let id = &result.id.0;
                    if answered.iter().any(|at| *at as usize == place) {
                        self.atoms.push(Atom::AnsweredByCli { id });
                        continue;
                    }
                    let is_error = result.is_error;
                    self.atoms.push(Atom::Result { id, is_error });
                    for part in &result.content {
                        match part {
                            ResultBlock::Text { text } => self.text(text, true),
                            ResultBlock::Image(image) => self.image(&image.source),
                            ResultBlock::Document(document) => self.document(document, true),
                        }
                    }
                }
                // A normalised user message has no others.
                Block::ToolUse(_) | Block::Thinking(_) | Block::RedactedThinking(_) => {}
            }
        }
    }

    fn text(&mut self, text: &'a str, result: bool) {
        let text = Cow::Borrowed(text);
        self.atoms.push(Atom::Text { text, result });
    }

    fn image(&mut self, source: &'a Source) {
        self.atoms.push(Atom::Image { source });
    }

    fn document(&mut self, document: &'a Document, result: bool) {
        self.atoms.push(Atom::Document { document, result });
    }

    /// How many atoms the message has. It cannot have 2^32: they would not fit into memory.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.atoms.len()).unwrap_or(u32::MAX)
    }

    /// The images with their places, under a hash.
    pub(super) fn pictures<H: Hash>(&self, hash: &H) -> Box<[(u32, H::Out)]> {
        (0..)
            .zip(&self.atoms)
            .filter_map(|(place, atom)| match atom {
                Atom::Image { source } => Some((place, picture(hash, source))),
                _ => None,
            })
            .collect()
    }

    /// Takes out the images and what stands in their places; `false` when one of them cannot be a recorded one.
    pub(super) fn leave_out<P>(
        &mut self,
        atoms: u32,
        pictures: &[(u32, P)],
        same: impl Fn(&Source, &P) -> bool,
    ) -> bool {
        let is_image = |atom: &Atom<'_>| matches!(atom, Atom::Image { .. });
        if pictures.is_empty() {
            return !self.atoms.iter().any(is_image);
        }
        if self.count() != atoms {
            // Some are gone without a trace: those that are left stand in the recorded order.
            let mut recorded = pictures.iter();
            let fits = self.atoms.iter().all(|atom| match atom {
                Atom::Image { source } => recorded.any(|(_, picture)| same(source, picture)),
                _ => true,
            });
            self.atoms.retain(|atom| !is_image(atom));
            return fits;
        }
        // Each image, or what replaced it, stands in its place.
        let mut recorded = pictures.iter().peekable();
        let mut fits = true;
        let mut place = 0;
        self.atoms.retain(|atom| {
            let picture = recorded.next_if(|(at, _)| *at == place);
            place += 1;
            fits &= match (picture, atom) {
                (None, atom) => !is_image(atom),
                (Some((_, picture)), Atom::Image { source }) => same(source, picture),
                (Some(_), Atom::Text { text, .. }) => is_placeholder(text),
                (Some(_), _) => false,
            };
            picture.is_none()
        });
        fits
    }

    /// The key: a hash of what is compared, images not among it.
    pub(super) fn key<H: Hash>(&mut self, hash: &H) -> H::Out {
        self.bytes.clear();
        for atom in &self.atoms {
            let (tag, bytes) = match atom {
                Atom::Text { text, result } => (if *result { b't' } else { b'T' }, text.as_bytes()),
                Atom::Result { id, is_error } => {
                    (if *is_error { b'E' } else { b'R' }, id.as_bytes())
                }
                Atom::AnsweredByCli { id } => (b'A', id.as_bytes()),
                Atom::Call { id } => (b'C', id.as_bytes()),
                Atom::Said { text } => (b'S', text.as_bytes()),
                Atom::Image { .. } => continue,
                Atom::Document { document, result } => {
                    let parts = document_parts(hash, document);
                    self.bytes.push(if *result { b'd' } else { b'D' });
                    self.bytes.extend_from_slice(&parts);
                    continue;
                }
            };
            self.bytes.push(tag);
            self.bytes.extend_from_slice(hash.of(bytes).as_ref());
        }
        hash.of(&self.bytes)
    }
}

/// Hashes of one length each, so no two documents give the same bytes.
fn document_parts<H: Hash>(hash: &H, document: &Document) -> Vec<u8> {
    let title = document.title.as_deref();
    let kind = match document.source {
        Source::Base64 { .. } => 0,
        Source::Text { .. } => 1,
        Source::Url { .. } => 2,
    };
    let mut parts = vec![u8::from(title.is_some()), kind];
    parts.extend_from_slice(hash.of(title.unwrap_or_default().as_bytes()).as_ref());
    parts.extend_from_slice(picture(hash, &document.source).as_ref());
    parts
}

/// The hash of a source's bytes or address. Its media type is not in it: hosts spell it in several ways.
pub(super) fn picture<H: Hash>(hash: &H, source: &Source) -> H::Out {
    match source {
        Source::Base64 { data, .. } | Source::Text { data, .. } => hash.of(data.as_bytes()),
        Source::Url { url } => hash.of(url.as_bytes()),
    }
}

/// Whether a text can stand in the place of an image that was stripped.
fn is_placeholder(text: &str) -> bool {
    let text = trimmed(text);
    let bracketed = [('[', ']'), ('<', '>'), ('(', ')')]
        .iter()
        .any(|(open, close)| text.starts_with(*open) && text.ends_with(*close));
    bracketed && text.len() <= PLACEHOLDER_BYTES
}

/// Without outer white space, which is what the normaliser takes for it.
fn trimmed(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}
