//! Whether a turn succeeded, from all the marks that tell it.
//!
//! A failure can come as `subtype:"success"` with exit code 0. The truth is spread over `is_error`, `terminal_reason` and `api_error_status` of
//! the `result`, and over the `assistant` records before it: `error`, `is_api_error_message`, the model `<synthetic>`. One mark is enough.

use super::records::{Assistant, ResultRecord};

/// Longest text of the CLI that a [`FailureMarks`] or [`Failure`] keeps, in bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// How a turn ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The model's answer is whole. Its stop reason is that of the last `message_delta`.
    Completed,
    /// No turn ran: a line with `shouldQuery:false` has been put into the history.
    Acknowledged,
    /// The turn reached `--max-turns`; what the model said is whole.
    MaxTurns,
    /// An interrupt ended it.
    Aborted,
    /// It failed.
    Failed(Failure),
}

/// A failed turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong.
    pub kind: FailureKind,
    /// The HTTP status, if the CLI named one.
    pub status: Option<u16>,
    /// The CLI's or the API's word that decided, such as `usage_limit_reached` or `api_error`.
    pub word: Option<String>,
    /// The CLI's sentence, cut at 4 KiB.
    pub text: String,
}

/// What went wrong, as far as words and status tell it. Texts are not looked into here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The conversation is too long, by the API or by the CLI's own estimate.
    PromptTooLong,
    /// An image or document was refused.
    Image,
    /// The subscription's limit is reached.
    UsageLimit,
    /// Paid credits are asked for.
    Billing,
    /// Not signed in, or the token was refused.
    Authentication,
    /// The model does not exist or is not allowed.
    ModelNotFound,
    /// A short throttle, not the subscription's limit.
    RateLimited,
    /// The API is overloaded (529).
    Overloaded,
    /// The answer reached the output limit and the CLI gave up going on.
    MaxOutputTokens,
    /// A safety classifier refused.
    Refusal,
    /// The connection broke, or nothing came.
    Connection,
    /// The API failed (5xx).
    Server,
    /// The API refused the request (other 4xx).
    InvalidRequest,
    /// The CLI could not begin: an unknown session or message.
    NotStarted,
    /// The CLI answered by itself, without a model.
    AnsweredLocally,
    /// Something else.
    Other,
}

/// What the `assistant` records of a turn say about a failure. One for each turn, fed with every `assistant` record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FailureMarks {
    error: Option<String>,
    api_error: Option<String>,
    status: Option<u16>,
    refused: bool,
    answered_locally: bool,
    synthetic: bool,
    text: Option<String>,
}

impl FailureMarks {
    /// Takes the marks of a record; the newest of each counts.
    pub fn observe(&mut self, record: &Assistant<'_>) {
        let error = record.error.as_deref();
        let failed = error.is_some()
            || record.is_api_error_message
            || record.api_error.is_some()
            || record.api_error_status.is_some();
        let local = record.local_command_source.is_some();
        let synthetic = record.message.is_synthetic();
        if !failed && !local && !synthetic {
            return;
        }
        self.error = error.map(cut).or(self.error.take());
        self.api_error = record
            .api_error
            .as_deref()
            .map(cut)
            .or(self.api_error.take());
        self.status = record.api_error_status.or(self.status);
        self.refused |= record.refused_message_id.is_some()
            || record.message.stop_reason.as_deref() == Some("refusal");
        self.answered_locally |= local || (synthetic && !failed);
        self.synthetic |= synthetic || failed;
        self.text = Some(cut(&record.message.content.text()));
    }

    /// Whether any record carried a mark.
    pub fn any(&self) -> bool {
        self.synthetic || self.answered_locally
    }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}

impl ResultRecord<'_> {
    /// How the turn ended, by this record and by `marks`, those of the turn's `assistant` records.
    ///
    /// Marks of one turn count to its end, also when the CLI went on by itself after a broken stream and the result is clean in itself
    /// (it does after a whole `tool_use` block, 2.1.332): the answer that the error interrupted is not whole. A caller that
    /// delivers parts of a turn on their own keeps marks for each part.
    ///
    /// Fails closed: a record without `is_error`, or with a `terminal_reason` that is new, is a failure.
    pub fn verdict(&self, marks: &FailureMarks) -> Verdict {
        let reason = self.terminal_reason.as_deref();
        if matches!(reason, Some("aborted_streaming" | "aborted_tools")) {
            return Verdict::Aborted;
        }
        let says_failed = self.is_error != Some(false)
            || self.subtype.as_deref() != Some("success")
            || self.api_error.is_some()
            || self.api_error_type.is_some()
            || self.api_error_status.is_some()
            || !self.errors.is_empty();
        match reason {
            Some("completed") if !says_failed && !marks.any() => Verdict::Completed,
            None if !says_failed && !marks.any() && self.is_acknowledgement() => {
                Verdict::Acknowledged
            }
            Some("max_turns") if !marks.any() && self.api_error_status.is_none() => {
                Verdict::MaxTurns
            }
            _ => Verdict::Failed(self.failure(marks)),
        }
    }

    /// `num_turns` 0 and no text: what `shouldQuery:false` gets. With a text, the CLI answered by itself (2.1.332).
    fn is_acknowledgement(&self) -> bool {
        self.num_turns == Some(0) && self.result.as_deref().unwrap_or_default().is_empty()
    }

    fn failure(&self, marks: &FailureMarks) -> Failure {
        let reason = self.terminal_reason.as_deref();
        let api_error = self.api_error.as_deref().or(marks.api_error.as_deref());
        let status = self.api_error_status.or(marks.status);
        let kind = self.kind(marks, api_error, status);
        let word = api_error
            .or(marks.error.as_deref())
            .or(self.api_error_type.as_deref())
            .or(reason)
            .or(self.subtype.as_deref());
        let own_text = self.result.as_deref().filter(|text| !text.is_empty());
        let text = own_text
            .or(self.errors.first().map(|error| error.as_str()))
            .filter(|_| self.is_error != Some(false) || marks.text.is_none())
            .or(marks.text.as_deref())
            .unwrap_or_default();
        Failure {
            kind,
            status,
            word: word.map(cut),
            text: cut(text),
        }
    }

    fn kind(
        &self,
        marks: &FailureMarks,
        api_error: Option<&str>,
        status: Option<u16>,
    ) -> FailureKind {
        let by_reason = match self.terminal_reason.as_deref() {
            Some("prompt_too_long" | "blocking_limit") => Some(FailureKind::PromptTooLong),
            Some("image_error") => Some(FailureKind::Image),
            _ => None,
        };
        let by_api_error = match api_error {
            Some("usage_limit_reached") => Some(FailureKind::UsageLimit),
            Some("max_output_tokens") => Some(FailureKind::MaxOutputTokens),
            Some("connection_failed" | "stream_idle_timeout" | "no_response") => {
                Some(FailureKind::Connection)
            }
            _ => None,
        };
        let by_status_or_word = match (status, marks.error.as_deref()) {
            (Some(402), _) | (_, Some("billing_error")) => Some(FailureKind::Billing),
            (Some(401 | 403), _) | (_, Some("authentication_failed")) => {
                Some(FailureKind::Authentication)
            }
            (Some(404), _) | (_, Some("model_not_found")) => Some(FailureKind::ModelNotFound),
            (Some(429), _) | (_, Some("rate_limit")) => Some(FailureKind::RateLimited),
            (Some(529), _) => Some(FailureKind::Overloaded),
            (_, Some("max_output_tokens")) => Some(FailureKind::MaxOutputTokens),
            _ => None,
        };
        let refused = marks.refused || self.stop_reason.as_deref() == Some("refusal");
        let by_rest = match (status, marks.error.as_deref()) {
            _ if refused => Some(FailureKind::Refusal),
            (Some(500..), _) | (None, Some("server_error")) => Some(FailureKind::Server),
            (Some(400..), _) | (None, Some("invalid_request")) => Some(FailureKind::InvalidRequest),
            _ => None,
        };
        let no_turn = self.num_turns == Some(0) && self.terminal_reason.is_none();
        let by_absence = match self.is_error {
            Some(true) if no_turn => Some(FailureKind::NotStarted),
            Some(false) if no_turn || marks.answered_locally => Some(FailureKind::AnsweredLocally),
            _ => None,
        };
        by_reason
            .or(by_api_error)
            .or(by_status_or_word)
            .or(by_rest)
            .or(self.api_error_type.as_deref().and_then(by_api_type))
            .or(by_absence)
            .unwrap_or(FailureKind::Other)
    }
}

/// By the API's own kind, for an error that came inside a stream and so has no status.
fn by_api_type(kind: &str) -> Option<FailureKind> {
    Some(match kind {
        "authentication_error" | "permission_error" => FailureKind::Authentication,
        "billing_error" => FailureKind::Billing,
        "not_found_error" => FailureKind::ModelNotFound,
        "rate_limit_error" => FailureKind::RateLimited,
        "overloaded_error" => FailureKind::Overloaded,
        "api_error" | "timeout_error" => FailureKind::Server,
        "invalid_request_error" | "request_too_large" => FailureKind::InvalidRequest,
        _ => return None,
    })
}
