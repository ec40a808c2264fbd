//! The backend state: what the host keeps so that a later process can take the CLI's conversation up again.
//!
//! JSON in one line: version, ids, the count of messages at the last point, the link of the digest chain there, and
//! fingerprints. No text of any message, tool or prompt. It stays a few hundred bytes however long the conversation is; an
//! image adds about 30, a call that the CLI answered itself about 10.
//!
//! The chain runs over the same keys that the record compares, so that images which the host stripped since and results
//! which the CLI wrote itself are tolerated here too: their places are listed beside it.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::compare::{Reader, Shape, Stable, picture};
use super::record::{Fingerprint, Point, Record, fingerprint, first_link, link};
use crate::conversation::digest::Digest;
use crate::conversation::names::hex;
use crate::conversation::normalise::{MESSAGES, Sendable};
use crate::request::{BackendState, ModelId, TransportSession};

/// The transport that wrote it.
const TRANSPORT: &str = "pool";

/// The version of the form, and of what is compared.
const VERSION: u32 = 1;

/// Longest state that is written or read: room for some thousand images, far more than a request can have, and a bound for
/// what is decoded.
pub(super) const STATE_LIMIT_BYTES: usize = 256 * 1024;

/// Whose conversation it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner<'a> {
    /// The CLI's session id.
    pub(crate) session: Uuid,
    /// The host's key.
    pub(crate) transport_session: &'a TransportSession,
    /// The model that served last.
    pub(crate) model: &'a ModelId,
    /// Of prompt and tools: [`super::Settings::fingerprint`].
    pub(crate) fingerprint: Digest,
}

/// The form that is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    transport: String,
    version: u32,
    session: String,
    transport_session: TransportSession,
    model: ModelId,
    fingerprint: Digest,
    messages: u32,
    chain: Digest,
    at: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shapes: Vec<KeptShape>,
}

/// Message, its atoms, its images, its results that the CLI wrote.
type KeptShape = (u32, u32, Vec<(u32, String)>, Vec<u32>);

/// What is read first: enough to tell that the rest is not for us.
#[derive(Deserialize)]
struct Head {
    transport: String,
    version: u32,
}

/// A state that can be compared with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// The CLI's session id.
    pub(crate) session: Uuid,
    /// Who owns the conversation.
    pub(crate) transport_session: TransportSession,
    /// The model that served last.
    pub(crate) model: ModelId,
    /// Of prompt and tools.
    pub(crate) fingerprint: Digest,
    /// Where it can be taken up, and how many messages it holds there.
    pub(crate) point: Point,
    chain: Digest,
    shapes: Vec<(u32, Shape<Fingerprint>)>,
}

/// A state that cannot be used. No error: the request reseeds, and says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unusable(pub(crate) String);

impl Unusable {
    /// Of a state whose session or point the CLI does not know: it said "No conversation found" or "No message found",
    /// or began another session than the one it was to resume. That happens without a fault of anybody's: a resume at an
    /// older point cuts the session's file for good, and other states may lie behind the cut (facts 0.12, 2.1.332).
    /// Plan again with this in place of the state, and without a live process.
    pub(crate) fn gone() -> Self {
        unusable("the CLI no longer has the conversation that it names")
    }
}

/// The state of a conversation at its last point; `None` when it has none, or would be longer than the limit. The host's
/// older state is then to be cleared.
pub(crate) fn encode(record: &Record, owner: &Owner<'_>) -> Option<BackendState> {
    let point = record.point().filter(|_| !record.is_tainted())?;
    let shapes = record.shapes(point.len).map(|(n, shape)| {
        let images = shape.pictures.iter();
        (
            n,
            shape.atoms,
            images.map(|(at, image)| (*at, hex(image))).collect(),
            shape.answered.to_vec(),
        )
    });
    let kept = Kept {
        transport: TRANSPORT.to_owned(),
        version: VERSION,
        session: owner.session.to_string(),
        transport_session: owner.transport_session.clone(),
        model: owner.model.clone(),
        fingerprint: owner.fingerprint,
        messages: u32::try_from(point.len).ok()?,
        chain: record.chain(point.len),
        at: point.at.to_string(),
        shapes: shapes.collect(),
    };
    let text = serde_json::to_string(&kept).ok()?;
    (text.len() <= STATE_LIMIT_BYTES).then_some(BackendState(text))
}

/// Reads a state that a host gave back. Never panics, whatever it is given.
///
/// # Errors
///
/// The reason for which it cannot be used.
pub(crate) fn decode(state: &BackendState) -> Result<Stored, Unusable> {
    let text = &state.0;
    if text.len() > STATE_LIMIT_BYTES {
        return Err(unusable("it is longer than any that turnpass writes"));
    }
    let head: Head =
        serde_json::from_str(text).map_err(|_| unusable("it is not one that turnpass wrote"))?;
    if head.transport != TRANSPORT {
        return Err(unusable("it is of another transport"));
    }
    if head.version != VERSION {
        return Err(unusable("another version of turnpass wrote it"));
    }
    let damaged = || unusable("it is damaged");
    let kept: Kept = serde_json::from_str(text).map_err(|_| damaged())?;
    // The ids become arguments of the CLI, so nothing but a uuid may pass.
    let uuid = |text: &str| Uuid::try_parse(text).map_err(|_| damaged());
    let len = kept.messages as usize;
    let ascend = kept.shapes.is_sorted_by(|a, b| a.0 < b.0);
    let inside = kept.shapes.iter().all(|shape| (shape.0 as usize) < len);
    if !(1..=MESSAGES).contains(&len) || !ascend || !inside {
        return Err(damaged());
    }
    let shapes = kept.shapes.iter().map(shape).collect::<Option<_>>();
    Ok(Stored {
        session: uuid(&kept.session)?,
        point: Point {
            len,
            at: uuid(&kept.at)?,
        },
        transport_session: kept.transport_session,
        model: kept.model,
        fingerprint: kept.fingerprint,
        chain: kept.chain,
        shapes: shapes.ok_or_else(damaged)?,
    })
}

fn unusable(why: &str) -> Unusable {
    Unusable(format!("the stored state cannot be used: {why}"))
}

fn shape((n, atoms, images, answered): &KeptShape) -> Option<(u32, Shape<Fingerprint>)> {
    let pictures = images
        .iter()
        .map(|(place, text)| Some((*place, unhex(text)?)))
        .collect::<Option<Box<[_]>>>()?;
    let fits = pictures.iter().all(|(place, _)| place < atoms)
        && pictures.is_sorted_by(|a, b| a.0 < b.0)
        && answered.is_sorted_by(|a, b| a < b);
    fits.then(|| {
        (
            *n,
            Shape {
                atoms: *atoms,
                pictures,
                answered: answered.as_slice().into(),
            },
        )
    })
}

fn unhex(text: &str) -> Option<Fingerprint> {
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let value = u64::from_str_radix(text, 16).ok().filter(|_| digits)?;
    Some(value.to_be_bytes())
}

impl Stored {
    /// Whether the request's history begins with the stored messages.
    pub(crate) fn begins(&self, messages: &[Sendable<'_>]) -> bool {
        let Some(messages) = messages.get(..self.point.len) else {
            return false;
        };
        let plain = Shape::default();
        let mut shapes = self.shapes.iter().peekable();
        let mut reader = Reader::default();
        let mut chain = first_link();
        for (n, message) in (0..).zip(messages) {
            let shape = shapes.next_if(|(entry, _)| *entry == n);
            let shape = shape.map_or(&plain, |(_, shape)| shape);
            reader.sendable(message, &shape.answered);
            if !reader.leave_out(shape.atoms, &shape.pictures, |source, recorded| {
                fingerprint(&picture(&Stable, source)) == *recorded
            }) {
                return false;
            }
            chain = link(&chain, &reader.key(&Stable));
        }
        chain == self.chain
    }

    /// The record of a process that took the conversation up at the stored point by `--resume`: the request's messages up
    /// to there. For a fork call [`Record::fork`] on it.
    pub(crate) fn adopt(&self, messages: &[Sendable<'_>]) -> Record {
        let messages = messages.get(..self.point.len).unwrap_or(messages);
        let answered = self.shapes.iter();
        let answered: Vec<_> = answered
            .map(|(n, shape)| (*n, shape.answered.clone()))
            .collect();
        Record::adopt(messages, self.point.at, &answered)
    }

    /// Whether it is the state of this live conversation as it stands: a summary may then fork it.
    pub(crate) fn is_checkpoint_of(
        &self,
        record: &Record,
        session: Uuid,
        fingerprint: Digest,
    ) -> bool {
        self.session == session
            && self.fingerprint == fingerprint
            && record.point() == Some(self.point)
            && self.point.len == record.len()
            && record.chain(record.len()) == self.chain
            && !record.is_tainted()
    }
}
