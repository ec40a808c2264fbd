//! A request made ready: everything that can be wrong with it is found here, before anything is started or spent. Pure.

use serde_json::value::RawValue;

use super::options::History;
use super::transcript::transcript;
use super::ways::Told;
use crate::conversation::encode::Ttl;
use crate::conversation::frames::{Content, contents};
use crate::conversation::names;
use crate::conversation::normalise::{NormaliseOptions, Normalised, normalise};
use crate::conversation::{Block, ResultBlock, Source};
use crate::error::{Error, ErrorCode, Result};
use crate::models;
use crate::relay::fit;
use crate::relay::prepared::{bounded, check};
use crate::request::{Effort, Limits, ModelId, Place, Request, ThinkingDisplay, TransportSession};
use crate::tools::{Catalogue, CatalogueLimits};
use crate::turn::ToolNames;

/// Most images of a request (replay document's origin).
pub(crate) const IMAGES: usize = 20;
/// Largest image in bytes, decoded (replay document's origin).
pub(crate) const IMAGE_BYTES: usize = 20 * 1024 * 1024;
/// All images together in bytes, decoded (replay document's origin).
pub(crate) const ALL_IMAGES_BYTES: usize = 100 * 1024 * 1024;
/// Largest conversation in bytes without images; that of a transcript, so that neither way takes what the other refuses.
pub(crate) const HISTORY_BYTES: usize = super::transcript::TRANSCRIPT_BYTES;

/// What is written to the process.
pub(crate) enum Script {
    /// One user message of records: its content.
    Transcript(Box<RawValue>),
    /// Messages one by one.
    Native(Vec<Content>),
}

/// A request that may be sent.
pub(crate) struct Prepared {
    pub(crate) session: TransportSession,
    pub(crate) place: Place,
    pub(crate) model: ModelId,
    pub(crate) effort: Option<Effort>,
    pub(crate) thinking: ThinkingDisplay,
    pub(crate) system: String,
    pub(crate) catalogue: Catalogue,
    pub(crate) limits: Limits,
    /// What the normaliser changed, in words.
    pub(crate) changes: Vec<String>,
    pub(crate) script: Script,
    /// How that was written down.
    pub(crate) told: Told,
    extra: Option<String>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared")
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl Prepared {
    /// Checks and encodes a request.
    ///
    /// # Errors
    ///
    /// `request_invalid`, `tool_*`, `history_too_large` or `context_length_exceeded`.
    pub(crate) fn new(request: &Request, told: Told) -> Result<Self> {
        check(request)?;
        if request.state.is_some() {
            let what = "a replay keeps no backend state; leave it out";
            return Err(Error::new(ErrorCode::RequestInvalid, what));
        }
        let catalogue = Catalogue::build_within(&request.tools, CatalogueLimits::REPLAY)?;
        let published = |host: &str| names::published(host).unwrap_or_else(|_| host.to_owned());
        let fields = fit::extra_body(&request.sampling, request.effort, published);
        let extra = (!fields.is_empty()).then(|| fit::extra_body_text(None, &fields));
        let options = NormaliseOptions {
            leave_out_thinking: told.history == History::Native && !told.thinking,
            ..NormaliseOptions::default()
        };
        let normalised = normalise(&request.messages, &options)?;
        check_images(&normalised)?;
        let ttl = match told.mark {
            // The CLI's own are of an hour, and one of five minutes may not stand before them.
            true => Ttl::OneHour,
            false => Ttl::None,
        };
        let script = match told.history {
            History::Transcript => Script::Transcript(transcript(&normalised, &catalogue, ttl)?),
            History::Native => Script::Native(native(&normalised, ttl)?),
        };
        let changes = normalised.summary();
        let tools_bytes = catalogue.request_json().get().len();
        let tokens = models::estimate_tokens(&request.system, tools_bytes, &request.messages);
        models::check_context(&request.model, tokens)?;
        Ok(Self {
            session: request.session.clone(),
            place: request.place.clone(),
            model: request.model.clone(),
            effort: request.effort,
            thinking: request.thinking,
            system: request.system.clone(),
            catalogue,
            limits: bounded(request.limits),
            changes,
            script,
            told,
            extra,
        })
    }

    /// Maps published tool names back to the host's.
    pub(crate) fn tool_names(&self) -> ToolNames {
        let names = self.catalogue.names().clone();
        Box::new(move |published| names.resolve(published).host().map(str::to_owned))
    }

    /// The effort as the command line takes it; thinking off is in the extra body.
    pub(crate) fn level(&self) -> Option<Effort> {
        self.effort.filter(|effort| *effort != Effort::None)
    }

    /// The JSON text of the CLI's extra-body setting, if there is anything to add.
    pub(crate) fn extra_body(&self) -> Option<&str> {
        self.extra.as_deref()
    }
}

fn native(normalised: &Normalised<'_>, ttl: Ttl) -> Result<Vec<Content>> {
    let contents = contents(normalised, ttl)?;
    let images: usize = images(normalised).map(str::len).sum();
    let all: usize = contents.iter().map(Content::bytes).sum();
    let bytes = all.saturating_sub(images);
    if bytes > HISTORY_BYTES {
        let what =
            format!("the conversation has {bytes} bytes as JSON, the limit is {HISTORY_BYTES}");
        return Err(Error::new(ErrorCode::HistoryTooLarge, what));
    }
    Ok(contents)
}

/// The base64 texts of all images.
fn images<'a>(normalised: &'a Normalised<'_>) -> impl Iterator<Item = &'a str> {
    let blocks = normalised.messages.iter().flat_map(|m| &m.content);
    let sources = blocks.flat_map(|block| {
        let of_result = |part: &'a ResultBlock| match part {
            ResultBlock::Image(image) => Some(&image.source),
            _ => None,
        };
        let (own, parts) = match &**block {
            Block::Image(image) => (Some(&image.source), &[][..]),
            Block::ToolResult(result) => (None, &result.content[..]),
            _ => (None, &[][..]),
        };
        own.into_iter().chain(parts.iter().filter_map(of_result))
    });
    sources.filter_map(|source| match source {
        Source::Base64 { data, .. } => Some(data.as_str()),
        _ => None,
    })
}

fn check_images(normalised: &Normalised<'_>) -> Result<()> {
    let decoded = |data: &str| data.len() / 4 * 3;
    let (mut count, mut all) = (0, 0);
    for data in images(normalised) {
        count += 1;
        all += decoded(data);
        if decoded(data) > IMAGE_BYTES {
            let what = format!(
                "image {count} has about {} bytes, the limit is {IMAGE_BYTES}",
                decoded(data)
            );
            return Err(Error::new(ErrorCode::RequestInvalid, what));
        }
        if !is_base64(data) {
            let what = format!("image {count} is not base64 with its padding");
            return Err(Error::new(ErrorCode::RequestInvalid, what));
        }
    }
    let too_much = |what: String| Err(Error::new(ErrorCode::HistoryTooLarge, what));
    if count > IMAGES {
        return too_much(format!(
            "the conversation has {count} images, the limit is {IMAGES}"
        ));
    }
    if all > ALL_IMAGES_BYTES {
        return too_much(format!(
            "the images have about {all} bytes, the limit is {ALL_IMAGES_BYTES}"
        ));
    }
    Ok(())
}

/// Standard alphabet, padded, nothing else: what is decoded is what was encoded.
fn is_base64(data: &str) -> bool {
    let padding = data.bytes().rev().take_while(|byte| *byte == b'=').count();
    let body = &data.as_bytes()[..data.len() - padding];
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    data.len().is_multiple_of(4) && padding <= 2 && body.iter().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::{Document, Image, Message, Role};

    fn picture(data: &str) -> Block {
        Block::Image(Image {
            source: Source::Base64 {
                media_type: "image/png".into(),
                data: data.into(),
            },
        })
    }

    fn told(history: History) -> Told {
        Told {
            history,
            thinking: true,
            mark: true,
        }
    }

    fn prepared(blocks: Vec<Block>, history: History) -> Result<Prepared> {
        let message = Message {
            role: Role::User,
            content: blocks,
        };
        Prepared::new(&Request::new("sonnet", vec![message]), told(history))
    }

    #[test]
    fn images_have_limits_of_number_size_and_form() {
        for history in [History::Native, History::Transcript] {
            let code = |blocks| prepared(blocks, history).unwrap_err().code();
            prepared(vec![picture("AAAA"); IMAGES], history).unwrap();
            assert_eq!(
                code(vec![picture("AAAA"); IMAGES + 1]),
                ErrorCode::HistoryTooLarge
            );
            for bad in ["AAA", "A A=", "====", "AAA-", "AA=A"] {
                assert_eq!(code(vec![picture(bad)]), ErrorCode::RequestInvalid, "{bad}");
            }
            let large = "A".repeat(IMAGE_BYTES / 3 * 4 + 8);
            assert_eq!(code(vec![picture(&large)]), ErrorCode::RequestInvalid);
            let many = "A".repeat(IMAGE_BYTES / 3 * 4);
            assert_eq!(code(vec![picture(&many); 6]), ErrorCode::HistoryTooLarge);
        }
    }

    #[test]
    fn a_document_counts_as_conversation_in_both_histories() {
        for history in [History::Native, History::Transcript] {
            let document = |bytes: usize| {
                Block::Document(Document {
                    source: Source::Base64 {
                        media_type: "application/pdf".into(),
                        data: "A".repeat(bytes),
                    },
                    title: None,
                })
            };
            prepared(vec![document(1024)], history).unwrap();
            let error = prepared(vec![document(HISTORY_BYTES)], history).unwrap_err();
            assert_eq!(error.code(), ErrorCode::HistoryTooLarge, "{history}");
        }
    }

    #[test]
    fn tools_have_the_documents_limits() {
        let mut request = Request::new("sonnet", vec![Message::user("x")]);
        request.tools = (0..=256)
            .map(|n| crate::request::Tool {
                name: format!("t{n}"),
                description: String::new(),
                input_schema: serde_json::json!({"type": "object"}),
            })
            .collect();
        let error = Prepared::new(&request, told(History::Native)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ToolLimit);
        request.tools.truncate(1);
        request.tools[0].description = "x".repeat(2 * 1024 * 1024);
        let error = Prepared::new(&request, told(History::Native)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ToolCatalogSize);
    }

    #[test]
    fn thinking_is_left_out_of_frames_where_its_signature_would_be_lost() {
        let thinking = Block::Thinking(crate::conversation::SignedThinking {
            thinking: "a thought".into(),
            signature: "c2lnbg==".into(),
        });
        let answer = Message {
            role: Role::Assistant,
            content: vec![thinking, Block::Text { text: "b".into() }],
        };
        let messages = vec![Message::user("a"), answer, Message::user("c")];
        let request = Request::new("sonnet", messages);
        for (history, thinking, is_told) in [
            (History::Native, true, true),
            (History::Native, false, false),
            (History::Transcript, false, true),
        ] {
            let told = Told {
                thinking,
                ..told(history)
            };
            let prepared = Prepared::new(&request, told).unwrap();
            let text = match prepared.script {
                Script::Transcript(content) => content.get().to_owned(),
                Script::Native(contents) => format!("{contents:?}"),
            };
            assert_eq!(text.contains("a thought"), is_told, "{history}");
            assert_eq!(prepared.changes.len(), usize::from(!is_told));
        }
    }

    #[test]
    fn the_mark_can_be_switched_off() {
        let text = |history, mark| {
            let request = Request::new("sonnet", vec![Message::user("x")]);
            let told = Told {
                mark,
                ..told(history)
            };
            match Prepared::new(&request, told).unwrap().script {
                Script::Transcript(content) => content.get().to_owned(),
                Script::Native(contents) => format!("{contents:?}"),
            }
        };
        for history in [History::Native, History::Transcript] {
            assert!(text(history, true).contains("cache_control"));
            assert!(!text(history, false).contains("cache_control"));
        }
    }
}
