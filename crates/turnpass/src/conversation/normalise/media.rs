//! Images and documents: the kinds that the service takes.

use std::borrow::Cow;

use super::is_blank;
use super::rules::{MARK, Rule};
use crate::conversation::{Block, Document, Image, ResultBlock, Source};

/// The image types of the Messages API.
const IMAGES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];

/// The types of a document that is not an address.
const PDF: &str = "application/pdf";
const TEXT: &str = "text/plain";

/// What becomes of a source.
enum Fit {
    Fits,
    /// The same bytes under another media type.
    As(&'static str),
    /// Nothing that could be sent; the words say what it is.
    No(String),
}

fn image(source: &Source) -> Fit {
    match source {
        Source::Base64 { media_type, data } if !data.is_empty() => {
            if IMAGES.contains(&media_type.as_str()) {
                return Fit::Fits;
            }
            let lower = media_type.trim().to_ascii_lowercase();
            let known = IMAGES.into_iter().find(|known| *known == lower);
            match known.or((lower == "image/jpg").then_some(IMAGES[0])) {
                Some(known) => Fit::As(known),
                None => Fit::No(format!("an image of type {}", short(media_type))),
            }
        }
        Source::Url { url } if !is_blank(url) => Fit::Fits,
        Source::Text { .. } => Fit::No("an image given as text".to_owned()),
        _ => Fit::No("an image without bytes".to_owned()),
    }
}

fn document(source: &Source) -> Fit {
    match source {
        Source::Base64 { media_type, data } if !data.is_empty() => match media_type.as_str() {
            PDF => Fit::Fits,
            other if other.trim().eq_ignore_ascii_case(PDF) => Fit::As(PDF),
            other => Fit::No(format!("a document of type {}", short(other))),
        },
        Source::Text { media_type, data } if !is_blank(data) => match media_type.as_str() {
            TEXT => Fit::Fits,
            _ => Fit::As(TEXT),
        },
        Source::Url { url } if !is_blank(url) => Fit::Fits,
        _ => Fit::No("an empty document".to_owned()),
    }
}

fn short(text: &str) -> String {
    text.chars().take(40).collect()
}

fn retyped(source: &Source, to: &str) -> Source {
    let media_type = to.to_owned();
    match source.clone() {
        Source::Base64 { data, .. } => Source::Base64 { media_type, data },
        Source::Text { data, .. } => Source::Text { media_type, data },
        url @ Source::Url { .. } => url,
    }
}

fn left_out(what: &str) -> String {
    format!("{MARK}{what} was left out; the service does not take it]")
}

/// An image or document block of a message; other blocks pass.
pub(super) fn block(block: &Block) -> (Cow<'_, Block>, Option<Rule>) {
    let fit = match block {
        Block::Image(i) => image(&i.source),
        Block::Document(d) => document(&d.source),
        _ => Fit::Fits,
    };
    match fit {
        Fit::Fits => (Cow::Borrowed(block), None),
        Fit::As(kind) => {
            let block = match block {
                Block::Image(i) => Block::Image(Image {
                    source: retyped(&i.source, kind),
                }),
                Block::Document(d) => Block::Document(Document {
                    source: retyped(&d.source, kind),
                    title: d.title.clone(),
                }),
                other => other.clone(),
            };
            (Cow::Owned(block), Some(Rule::MediaType))
        }
        Fit::No(what) => (
            Cow::Owned(Block::text(left_out(&what))),
            Some(Rule::UnsupportedMedia),
        ),
    }
}

/// Whether a part of a result can stay as it is.
pub(super) fn fits(part: &ResultBlock) -> bool {
    let fit = match part {
        ResultBlock::Image(i) => image(&i.source),
        ResultBlock::Document(d) => document(&d.source),
        ResultBlock::Text { .. } => return true,
    };
    matches!(fit, Fit::Fits)
}

/// A part of a result as a block of a message.
pub(super) fn of_result<'a>(part: &ResultBlock) -> (Cow<'a, Block>, Option<Rule>) {
    let whole = match part {
        ResultBlock::Text { text } => Block::text(text),
        ResultBlock::Image(i) => Block::Image(i.clone()),
        ResultBlock::Document(d) => Block::Document(d.clone()),
    };
    let (block, rule) = block(&whole);
    (Cow::Owned(block.into_owned()), rule)
}

/// A part of a result as one that the service takes.
pub(super) fn result_part(part: &ResultBlock) -> (ResultBlock, Option<Rule>) {
    let (block, rule) = of_result(part);
    let part = match block.into_owned() {
        Block::Text { text } => ResultBlock::Text { text },
        Block::Image(i) => ResultBlock::Image(i),
        Block::Document(d) => ResultBlock::Document(d),
        // `of_result` makes no other block.
        _ => part.clone(),
    };
    (part, rule)
}
