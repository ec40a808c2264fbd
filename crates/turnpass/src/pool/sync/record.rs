//! What the conversation of one CLI process holds: an entry for each message of the normalised history.
//!
//! Entries are only ever appended. The one exception is [`Record::cut`], when the CLI's own conversation was rewound by
//! the same messages. An entry holds hashes and ids, no text. It has two hashes: a fast one, with which every request is
//! compared, and a link of a SHA-256 chain, with which the prefix up to it can be stored ([`super::state`]).

use std::hash::{BuildHasher as _, RandomState};

use uuid::Uuid;

use super::compare::{Fast, Reader, Shape, Stable, picture};
use crate::conversation::digest::Digest;
use crate::conversation::normalise::Sendable;
use crate::conversation::{Message, Role, ToolUseId};

/// Where the CLI's conversation can be taken up again by a new process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// The messages that it holds there.
    pub(crate) len: usize,
    /// The uuid of its last record there, for `--resume-session-at`.
    pub(crate) at: Uuid,
}

/// A shortened SHA-256 of an image: 64 bits suffice, since it is compared with the few of one message only.
pub(super) type Fingerprint = [u8; 8];

/// One message of the CLI's conversation.
#[derive(Clone, Debug)]
struct Entry {
    role: Role,
    /// Of what is compared, images apart.
    key: [u8; 16],
    /// Of this entry and all before it.
    chain: Digest,
    /// Boxed: few messages have images or calls that the CLI answered.
    shape: Option<Box<Shape<Picture>>>,
    /// Whether the assistant called tools here.
    calls: bool,
    /// The CLI's uuid at which a conversation that ends here can be resumed.
    at: Option<Uuid>,
    /// The uuid of the user line, to which the CLI can rewind.
    line: Option<Uuid>,
}

#[derive(Clone, Copy, Debug)]
struct Picture {
    fast: [u8; 16],
    stable: Fingerprint,
}

/// What one CLI process's conversation holds.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    fast: Fast,
    entries: Vec<Entry>,
    /// The calls of the last entry that the CLI answered itself.
    answered: Vec<ToolUseId>,
    tainted: bool,
    /// Whether anything was ever written into the conversation, also if it was rewound since.
    touched: bool,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            // A seed for each record, so that nobody can prepare messages that collide.
            fast: Fast(RandomState::new().hash_one(0)),
            entries: Vec::new(),
            answered: Vec::new(),
            tainted: false,
            touched: false,
        }
    }
}

impl Record {
    /// The record of a conversation in which nothing was said yet.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// The record of a conversation that a process took up at a stored point: the request's messages up to there.
    ///
    /// The images are those that the request still has.
    pub(super) fn adopt(
        messages: &[Sendable<'_>],
        at: Uuid,
        answered: &[(u32, Box<[u32]>)],
    ) -> Self {
        let mut record = Self::new();
        for (n, message) in (0..).zip(messages) {
            let answered = answered.iter().find(|(entry, _)| *entry == n);
            let answered = answered.map(|(_, blocks)| &**blocks).unwrap_or_default();
            record.append(message, answered);
        }
        if let Some(last) = record.entries.last_mut() {
            last.at = Some(at);
        }
        record
    }

    /// The record of a process that was started by a fork of this conversation at a point.
    ///
    /// It has no points of its own before its first answer: whether a fork keeps the uuids was not measured.
    pub(crate) fn fork(&self, len: usize) -> Self {
        let mut fork = self.clone();
        fork.tainted = false;
        fork.cut(len);
        for entry in &mut fork.entries {
            entry.at = None;
            entry.line = None;
        }
        fork
    }

    /// How many messages the conversation holds.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether a user line was ever written: until then a model can be set without a trace (facts 0.14, 2.1.332).
    pub(crate) fn is_touched(&self) -> bool {
        self.touched
    }

    /// Appends a message that was delivered: by a frame, as the asking line, or as the answers of parked calls.
    ///
    /// `line` is the uuid of the user line if it was written as one; without it the turn cannot be rewound to it.
    pub(crate) fn push(&mut self, message: &Sendable<'_>, line: Option<Uuid>) {
        let answered: Vec<u32> = (0..)
            .zip(&message.content)
            .filter_map(|(place, block)| match &**block {
                crate::conversation::Block::ToolResult(result) => {
                    self.answered.contains(&result.id).then_some(place)
                }
                _ => None,
            })
            .collect();
        self.append(message, &answered);
        if let Some(last) = self.entries.last_mut()
            && last.role != Role::Assistant
        {
            last.line = line;
        }
    }

    /// Appends the model's answer, whole and as the host was told it.
    ///
    /// `at` is the uuid of its last record, if the CLI told one. It counts only when no calls are open: at a call
    /// without its result the CLI makes one up when it is resumed there (facts 4, 2.1.332).
    pub(crate) fn push_answer(&mut self, answer: &Message, at: Option<Uuid>) {
        let mut fast = Reader::default();
        fast.answer(answer);
        let calls = answer.tool_calls().next().is_some();
        let key = fast.key(&self.fast);
        let chain = self.link(&fast.key(&Stable));
        self.add(Entry {
            role: Role::Assistant,
            key,
            chain,
            shape: None,
            calls,
            at: at.filter(|_| !calls),
            line: None,
        });
    }

    /// Says that the CLI answered this call of the last answer itself, so that the host's result for it is taken as it
    /// is. To be called before that result is pushed.
    #[cfg_attr(
        not(test),
        expect(
            dead_code,
            reason = "the transport takes such a turn back instead; stored states may still name such results"
        )
    )]
    pub(crate) fn answered_by_cli(&mut self, id: &ToolUseId) {
        if !self.answered.contains(id) {
            self.answered.push(id.clone());
        }
    }

    /// Says that the conversation can be resumed after the last entry; not where calls are open.
    pub(crate) fn resume_after(&mut self, at: Uuid) {
        if let Some(last) = self.entries.last_mut()
            && !last.calls
        {
            last.at = Some(at);
        }
    }

    /// Takes away what was rewound out of the CLI's conversation.
    pub(crate) fn cut(&mut self, to_len: usize) {
        if to_len < self.entries.len() {
            self.entries.truncate(to_len);
            self.answered.clear();
        }
    }

    /// Says that the conversation is about to hold something that is not the host's: a summary in place. To be called
    /// before the first write; there is no way back.
    pub(crate) fn taint(&mut self) {
        self.tainted = true;
        self.touched = true;
    }

    /// Whether the conversation holds something that is not the host's.
    pub(crate) fn is_tainted(&self) -> bool {
        self.tainted
    }

    /// The last point at which the conversation can be taken up.
    pub(crate) fn point(&self) -> Option<Point> {
        self.point_within(self.len())
    }

    /// The last point that holds no more than so many messages.
    pub(crate) fn point_within(&self, len: usize) -> Option<Point> {
        let entries = self.entries.get(..len).unwrap_or(&self.entries);
        let last = entries.iter().rposition(|entry| entry.at.is_some())?;
        let at = self.entries[last].at?;
        Some(Point { len: last + 1, at })
    }

    /// The uuid of the user line at an entry.
    pub(crate) fn line(&self, entry: usize) -> Option<Uuid> {
        self.entries.get(entry)?.line
    }

    /// The uuid of the last user line: a rewind to an earlier one has to name it.
    pub(crate) fn last_line(&self) -> Option<Uuid> {
        self.entries.iter().rev().find_map(|entry| entry.line)
    }

    /// How many messages of a request, from the first on, are those of the conversation.
    ///
    /// One scan over the bytes of the shared part; what differs ends it.
    pub(crate) fn shared_prefix(&self, messages: &[Sendable<'_>]) -> usize {
        let mut reader = Reader::default();
        self.entries
            .iter()
            .zip(messages)
            .take_while(|(entry, message)| self.is_same(&mut reader, entry, message))
            .count()
    }

    fn is_same<'a>(
        &self,
        reader: &mut Reader<'a>,
        entry: &Entry,
        message: &'a Sendable<'_>,
    ) -> bool {
        if entry.role != message.role {
            return false;
        }
        let (atoms, pictures, answered) = match &entry.shape {
            Some(shape) => (shape.atoms, &*shape.pictures, &*shape.answered),
            None => (0, &[][..], &[][..]),
        };
        reader.sendable(message, answered);
        reader.leave_out(atoms, pictures, |source, recorded| {
            picture(&self.fast, source) == recorded.fast
        }) && reader.key(&self.fast) == entry.key
    }

    /// The chain's link at a length.
    pub(super) fn chain(&self, len: usize) -> Digest {
        match len.checked_sub(1).and_then(|last| self.entries.get(last)) {
            Some(entry) => entry.chain,
            None => first_link(),
        }
    }

    /// Of the first `len` entries those with something to leave out, with the images as they are stored.
    pub(super) fn shapes(&self, len: usize) -> impl Iterator<Item = (u32, Shape<Fingerprint>)> {
        let entries = (0..).zip(self.entries.iter().take(len));
        entries.filter_map(|(n, entry)| {
            let shape = entry.shape.as_deref()?;
            let pictures = shape.pictures.iter();
            Some((
                n,
                Shape {
                    atoms: shape.atoms,
                    pictures: pictures
                        .map(|(at, picture)| (*at, picture.stable))
                        .collect(),
                    answered: shape.answered.clone(),
                },
            ))
        })
    }

    /// What it takes in memory, without what the allocator adds.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let of_shape = |shape: &Shape<Picture>| {
            size_of_val(shape) + size_of_val(&*shape.pictures) + size_of_val(&*shape.answered)
        };
        let shapes = self
            .entries
            .iter()
            .filter_map(|entry| entry.shape.as_deref());
        self.entries.capacity() * size_of::<Entry>() + shapes.map(of_shape).sum::<usize>()
    }

    fn append(&mut self, message: &Sendable<'_>, answered: &[u32]) {
        let mut reader = Reader::default();
        reader.sendable(message, answered);
        let fast = reader.pictures(&self.fast);
        let stable = reader.pictures(&Stable);
        let pictures = fast
            .iter()
            .zip(&stable)
            .map(|((place, fast), (_, stable))| {
                let stable = fingerprint(stable);
                (
                    *place,
                    Picture {
                        fast: *fast,
                        stable,
                    },
                )
            });
        let shape = Shape {
            atoms: reader.count(),
            pictures: pictures.collect(),
            answered: answered.into(),
        };
        let key = reader.key(&self.fast);
        let chain = self.link(&reader.key(&Stable));
        self.add(Entry {
            role: message.role,
            key,
            chain,
            shape: (!shape.is_plain()).then(|| Box::new(shape)),
            calls: has_calls(message),
            at: None,
            line: None,
        });
    }

    fn add(&mut self, entry: Entry) {
        self.entries.push(entry);
        self.answered.clear();
        self.touched = true;
    }

    fn link(&self, key: &Digest) -> Digest {
        link(&self.chain(self.len()), key)
    }
}

fn has_calls(message: &Sendable<'_>) -> bool {
    let call = |block: &std::borrow::Cow<'_, crate::conversation::Block>| {
        matches!(**block, crate::conversation::Block::ToolUse(_))
    };
    message.role == Role::Assistant && message.content.iter().any(call)
}

/// What the chain begins with. Another way of comparing needs another text.
pub(super) fn first_link() -> Digest {
    Digest::of(b"turnpass sync record 1")
}

/// The next link of the chain.
pub(super) fn link(before: &Digest, key: &Digest) -> Digest {
    Digest::of_parts([&before.as_bytes()[..], key.as_bytes()])
}

/// A digest, shortened.
pub(super) fn fingerprint(digest: &Digest) -> Fingerprint {
    let mut short = Fingerprint::default();
    let len = short.len();
    short.copy_from_slice(&digest.as_bytes()[..len]);
    short
}
