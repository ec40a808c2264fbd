//! What the service checks, written down apart from the normaliser. The words in quotes are the service's own.

use super::*;
use std::collections::HashSet;

/// Says what the service would refuse.
pub(super) fn check(messages: &[Sendable<'_>]) -> Result<(), String> {
    if messages.is_empty() {
        return Err("\"messages: at least one message is required\"".into());
    }
    let mut ids = HashSet::new();
    let mut open: Vec<&str> = Vec::new();
    for (n, message) in messages.iter().enumerate() {
        let wanted = if n % 2 == 0 {
            Role::User
        } else {
            Role::Assistant
        };
        if message.role != wanted {
            return Err(format!("message {n} is not the {wanted:?}'s"));
        }
        if message.content.is_empty() {
            return Err(format!("message {n} is empty"));
        }
        let answers = leading_results(message);
        if message.role == Role::User && answers != open {
            return Err(format!(
                "message {n}: \"`tool_use` ids were found without `tool_result` blocks immediately after\": {open:?}, {answers:?}"
            ));
        }
        open.clear();
        for (m, block) in message.content.iter().enumerate() {
            let behind = m >= answers.len();
            block_fits(message.role, block, behind).map_err(|why| format!("{n}.{m}: {why}"))?;
            if let Block::ToolUse(call) = &**block {
                if !ids.insert(call.id.0.as_str()) {
                    return Err(format!("{n}.{m}: \"`tool_use` ids must be unique\""));
                }
                open.push(&call.id.0);
            }
        }
    }
    match messages.last() {
        Some(last) if last.role == Role::User => Ok(()),
        _ => Err("the last message is the assistant's".into()),
    }
}

fn leading_results<'a>(message: &'a Sendable<'_>) -> Vec<&'a str> {
    message
        .content
        .iter()
        .map_while(|block| match &**block {
            Block::ToolResult(result) => Some(result.id.0.as_str()),
            _ => None,
        })
        .collect()
}

fn block_fits(role: Role, block: &Block, behind_results: bool) -> Result<(), String> {
    let user = role == Role::User;
    match block {
        Block::Text { text } => text_fits(text),
        Block::Image(image) if user => image_fits(&image.source),
        Block::Document(document) if user => document_fits(&document.source),
        Block::ToolResult(result) if user && !behind_results => result_fits(result),
        Block::ToolUse(call) if !user => {
            let fits = (1..=64).contains(&call.id.0.len())
                && call
                    .id
                    .0
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
            fits.then_some(())
                .ok_or_else(|| format!("id {:?}", call.id.0))
        }
        Block::Thinking(thinking) if !user && !thinking.signature.is_empty() => Ok(()),
        Block::RedactedThinking(redacted) if !user && !redacted.data.is_empty() => Ok(()),
        other => Err(format!("may not stand here: {other:?}")),
    }
}

fn text_fits(text: &str) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("\"text content blocks must contain non-whitespace text\"".into());
    }
    Ok(())
}

fn image_fits(source: &Source) -> Result<(), String> {
    match source {
        Source::Base64 { media_type, data } => {
            let known = ["image/jpeg", "image/png", "image/gif", "image/webp"];
            (known.contains(&media_type.as_str()) && !data.is_empty())
                .then_some(())
                .ok_or_else(|| format!("image {media_type}"))
        }
        Source::Url { url } if !url.is_empty() => Ok(()),
        other => Err(format!("image {other:?}")),
    }
}

fn document_fits(source: &Source) -> Result<(), String> {
    match source {
        Source::Base64 { media_type, data }
            if media_type == "application/pdf" && !data.is_empty() =>
        {
            Ok(())
        }
        Source::Text { media_type, data } if media_type == "text/plain" && !data.is_empty() => {
            Ok(())
        }
        Source::Url { url } if !url.is_empty() => Ok(()),
        other => Err(format!("document {other:?}")),
    }
}

fn result_fits(result: &ToolResult) -> Result<(), String> {
    if result.is_error && result.content.is_empty() {
        return Err("\"content cannot be empty if `is_error` is true\"".into());
    }
    for part in &result.content {
        match part {
            ResultBlock::Text { text } => text_fits(text)?,
            _ if result.is_error => {
                return Err("\"all content must be type `text` if `is_error` is true\"".into());
            }
            ResultBlock::Image(image) => image_fits(&image.source)?,
            ResultBlock::Document(document) => document_fits(&document.source)?,
        }
    }
    Ok(())
}
