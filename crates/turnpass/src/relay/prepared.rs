//! A request made ready: everything that can be wrong with it is found here, before anything is started or spent. Pure.

use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::fit::{self, Fit};
use crate::cli::launch::PLACEHOLDER;
use crate::conversation::Message;
use crate::conversation::encode::{Marks, Ttl, encode};
use crate::conversation::names;
use crate::conversation::normalise::{NormaliseOptions, normalise};
use crate::error::{Error, ErrorCode, Result};
use crate::models;
use crate::request::{Effort, Limits, Request, TransportSession};
use crate::tools::{Catalogue, check_tools};
use crate::turn::ToolNames;
use crate::wire::splice::{CacheTtl, NativeBody, SpliceError};
use crate::wire::text::Text;

/// The CLI's system prompt is marked twice (2.1.294 to 2.1.332), which leaves two.
const MARKS: usize = 2;
/// Marks that the service takes in all (API documentation).
const ALL_MARKS: usize = 4;

/// Where the host's tools travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ToolCarrier {
    /// In the CLI's extra-body setting: they reach the service exactly as they are, in any number of changes on a live
    /// process, and the CLI need not know of them.
    #[default]
    ExtraBody,
    /// As the CLI's own MCP tools: in-band in a warm process (then fixed at its start, since a live CLI keeps what it
    /// sent once), by stdio in a process per request.
    Mcp,
}

/// Deadlines as far as a clock can hold them.
pub(crate) fn bounded(limits: Limits) -> Limits {
    Limits {
        start: limits.start.min(DEADLINE_LIMIT),
        idle: limits.idle.min(DEADLINE_LIMIT),
        total: limits.total.min(DEADLINE_LIMIT),
    }
}

/// The longest deadline: as good as none, and far from where adding it to a clock overflows.
const DEADLINE_LIMIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Why a request of the CLI is not sent.
#[derive(Debug)]
pub(crate) enum Misfit {
    /// It is another request than the one that was caused; the right one may still come.
    NotOurs,
    /// It is the one, and it is not as it has to be.
    Refused(Error),
}

/// A request that may be sent.
pub(crate) struct Prepared {
    pub(crate) session: TransportSession,
    pub(crate) fit: Fit,
    pub(crate) catalogue: Catalogue,
    pub(crate) carrier: ToolCarrier,
    /// As the host asked, thinking off included.
    pub(crate) effort: Option<Effort>,
    pub(crate) limits: Limits,
    /// What the normaliser changed, in words.
    pub(crate) changes: Vec<String>,
    /// The top-level fields that have to arrive as they were given.
    fields: Map<String, Value>,
    messages: Vec<Message>,
    encoded: Box<RawValue>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared")
            .field("messages", &self.messages.len())
            .finish_non_exhaustive()
    }
}

impl Prepared {
    /// Checks and encodes a request.
    ///
    /// # Errors
    ///
    /// `request_invalid`, `tool_*`, `effort_unsupported`, `history_too_large` or `context_length_exceeded`.
    pub(crate) fn new(request: Request, carrier: ToolCarrier) -> Result<Self> {
        check(&request)?;
        if request.state.is_some() {
            let what = "a relay keeps no backend state; leave it out";
            return Err(Error::new(ErrorCode::RequestInvalid, what));
        }
        let catalogue = Catalogue::build(&request.tools)?;
        let published = |host: &str| names::published(host).unwrap_or_else(|_| host.to_owned());
        let fields = fit::extra_body(&request.sampling, request.effort, published);
        let extra = extra_text(carrier, &catalogue, &fields);
        let (encoded, changes) = encoded(&request.messages, Ttl::OneHour, MARKS)?;
        let tools_bytes = catalogue.request_json().get().len();
        let tokens = models::estimate_tokens(&request.system, tools_bytes, &request.messages);
        models::check_context(&request.model, tokens)?;
        Ok(Self {
            session: request.session,
            fit: Fit {
                model: request.model.0,
                effort: request.effort.filter(|effort| *effort != Effort::None),
                system: request.system,
                extra,
            },
            effort: request.effort,
            limits: bounded(request.limits),
            catalogue,
            carrier,
            changes,
            fields,
            messages: request.messages,
            encoded,
        })
    }

    /// Whether the body is to have settings of the host's.
    pub(crate) fn has_settings(&self) -> bool {
        !self.fields.is_empty()
    }

    /// Lets the tools travel in another way.
    pub(crate) fn carry(&mut self, carrier: ToolCarrier) {
        if self.carrier == carrier {
            return;
        }
        self.carrier = carrier;
        self.fit.extra = extra_text(carrier, &self.catalogue, &self.fields);
    }

    /// Maps published tool names back to the host's.
    pub(crate) fn tool_names(&self) -> ToolNames {
        let names = self.catalogue.names().clone();
        Box::new(move |published| names.resolve(published).host().map(str::to_owned))
    }

    /// The CLI's request with the host's messages in place of its own, every other byte kept.
    pub(crate) fn restore(&self, native: &Bytes) -> Result<Bytes, Misfit> {
        let body = NativeBody::read(native).map_err(misfit)?;
        let inspection = body.inspect();
        let room = ALL_MARKS.saturating_sub(inspection.marks.len()).min(MARKS);
        let spliced = match inspection.ttl() {
            Some(CacheTtl::OneHour) if room == MARKS => body.splice(&self.encoded, PLACEHOLDER),
            other => {
                // The CLI went over to another lifetime (or none), or marks more than it did: a mark of an hour may not
                // stand behind one of five minutes, and a fifth is refused, so ours follow it.
                let ttl = match other {
                    Some(CacheTtl::OneHour) => Ttl::OneHour,
                    Some(_) => Ttl::FiveMinutes,
                    None => Ttl::None,
                };
                let (again, _) = encoded(&self.messages, ttl, room).map_err(Misfit::Refused)?;
                body.splice(&again, PLACEHOLDER)
            }
        };
        let restored = spliced.map_err(misfit)?;
        self.check_arrived(&body, &inspection.tool_names, inspection.stream)
            .map_err(Misfit::Refused)?;
        Ok(restored.into())
    }

    /// Whether the request carries exactly what the host asked for.
    fn check_arrived(
        &self,
        body: &NativeBody<'_>,
        tools: &[Option<Text<'_>>],
        stream: Option<bool>,
    ) -> Result<()> {
        if stream != Some(true) {
            return Err(Error::new(
                ErrorCode::RelayTransit,
                "the CLI's request is not a streamed one",
            ));
        }
        let tools = tools.iter().map(|name| name.as_deref().unwrap_or_default());
        check_tools(tools, self.catalogue.expected_tool_names()).into_result()?;
        for (key, given) in &self.fields {
            let arrived: Option<Value> = body
                .field(key)
                .and_then(|raw| serde_json::from_str(raw.get()).ok());
            if !arrived.is_some_and(|arrived| contains(given, &arrived)) {
                let what = format!("the CLI did not pass on the setting {key}");
                return Err(Error::new(ErrorCode::SamplingUnsupported, what));
            }
        }
        Ok(())
    }
}

/// The text of the extra-body setting, with the tools if they travel in it.
fn extra_text(carrier: ToolCarrier, catalogue: &Catalogue, fields: &Map<String, Value>) -> String {
    let in_body = carrier == ToolCarrier::ExtraBody && !catalogue.is_empty();
    fit::extra_body_text(in_body.then(|| catalogue.request_json()), fields)
}

/// The CLI merges `output_config` key by key (all three versions), so there it may have more than was given.
fn contains(given: &Value, arrived: &Value) -> bool {
    match (given, arrived) {
        (Value::Object(given), Value::Object(arrived)) => given.iter().all(|(key, value)| {
            arrived
                .get(key)
                .is_some_and(|arrived| fit::same_value(value, arrived))
        }),
        _ => fit::same_value(given, arrived),
    }
}

fn misfit(error: SpliceError) -> Misfit {
    match error {
        SpliceError::PlaceholderMissing => Misfit::NotOurs,
        SpliceError::RestoredTooLarge { .. } | SpliceError::NativeTooLarge { .. } => {
            Misfit::Refused(Error::new(ErrorCode::HistoryTooLarge, error.to_string()))
        }
        _ => Misfit::Refused(Error::new(ErrorCode::RelayTransit, error.to_string())),
    }
}

fn encoded(messages: &[Message], ttl: Ttl, most: usize) -> Result<(Box<RawValue>, Vec<String>)> {
    let normalised = normalise(messages, &NormaliseOptions::default())?;
    let encoded = encode(&normalised, Marks { ttl, most })?;
    let text = String::from_utf8(encoded.bytes)
        .map_err(|_| Error::new(ErrorCode::Internal, "the encoded messages are not UTF-8"))?;
    let raw = RawValue::from_string(text)
        .map_err(|_| Error::new(ErrorCode::Internal, "the encoded messages are not JSON"))?;
    Ok((raw, normalised.summary()))
}

/// What holds for a request whatever its transport.
pub(crate) fn check(request: &Request) -> Result<()> {
    models::check_model_id(&request.model)?;
    let invalid = |what: &str| Err(Error::new(ErrorCode::RequestInvalid, what));
    if request.session.0.contains('\0') || request.session.0.is_empty() {
        return invalid("the transport session is empty or has a NUL byte");
    }
    if let Some(directory) = &request.place.directory
        && !(directory.is_absolute() && directory.is_dir())
    {
        let what = format!(
            "{} is no absolute path of a directory that can be entered",
            directory.display()
        );
        return Err(Error::new(ErrorCode::WorkingDirectory, what));
    }
    if let Some(zone) = &request.place.time_zone
        && (zone.is_empty() || !zone.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        return invalid("the time zone is empty or holds a character that no time zone has");
    }
    if request.sampling.max_tokens == Some(0) {
        return invalid("max_tokens has to be at least 1");
    }
    if let Some(crate::request::ToolChoice::Tool { name, .. }) = &request.sampling.tool_choice
        && !request.tools.iter().any(|tool| tool.name == *name)
    {
        return invalid(&format!(
            "tool_choice names {name:?}, which is not among the tools"
        ));
    }
    if request.sampling.tool_choice.is_some() && request.tools.is_empty() {
        return invalid("tool_choice needs tools");
    }
    for (name, limit) in [
        ("start", request.limits.start),
        ("idle", request.limits.idle),
        ("total", request.limits.total),
    ] {
        if limit < Duration::from_millis(1) {
            return invalid(&format!("the {name} deadline is zero"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_service_never_gets_a_fifth_mark() {
        let mut messages = Vec::new();
        for _ in 0..4 {
            messages.extend([Message::user("a question"), Message::assistant("an answer")]);
        }
        messages.push(Message::user("the last one"));
        let request = Request::new("sonnet", messages);
        let prepared = Prepared::new(request, ToolCarrier::ExtraBody).unwrap();
        for (marks, left) in [(0, 0), (1, 2), (2, 2), (3, 1), (4, 0), (5, 0)] {
            for ttl in ["1h", "5m"] {
                let block = json!({"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": ttl}});
                let native = json!({
                    "model": "m", "stream": true, "system": vec![block; marks],
                    "messages": [{"role": "user", "content": PLACEHOLDER}],
                });
                let restored = prepared.restore(&native.to_string().into()).unwrap();
                let restored: Value = serde_json::from_slice(&restored).unwrap();
                let text = restored["messages"].to_string();
                assert_eq!(
                    text.matches("cache_control").count(),
                    left,
                    "{marks} {text}"
                );
                assert!(left == 0 || text.contains(&format!(r#""ttl":"{ttl}""#)) || ttl == "5m");
            }
        }
    }
}
