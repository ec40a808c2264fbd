//! The one error type: a stable code, a sentence that says what to do, and nothing secret.

use std::fmt;
use std::time::SystemTime;

/// Where a code comes from, for the table in the docs.
const POOL: &str = "pool";
const REPLAY: &str = "replay";
const RELAY: &str = "relay";
const SPEC: &str = "spec";

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $retry:literal, [$($from:ident),*], $meaning:literal, $remedy:literal;)*) => {
        /// Every way a request can fail. The words are stable; new ones may be added.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum ErrorCode {
            $(#[doc = $meaning] $name,)*
        }

        impl ErrorCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The stable word.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// Whether the same request may succeed later without anything being changed by hand.
            pub fn is_retryable(self) -> bool {
                match self { $(Self::$name => $retry,)* }
            }

            /// What it means, in a sentence.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }

            /// What a person can do, in a sentence.
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy,)* }
            }

            /// Which of the documents name this failure.
            pub fn sources(self) -> &'static [&'static str] {
                match self { $(Self::$name => &[$($from),*],)* }
            }
        }
    };
}

codes! {
    // The installed CLI.
    ExecutableMissing = "executable_missing", false, [POOL, REPLAY], "No `claude` program was found.", "Install Claude Code (`npm install -g @anthropic-ai/claude-code`), or name its program with TURNPASS_CLAUDE_PATH.";
    ExecutableUnusable = "executable_unusable", false, [SPEC], "A `claude` file was found but cannot run (a stub, a wrong format, no permission).", "Reinstall the CLI; `turnpass doctor` shows which file was found and by which rule.";
    VersionInvalid = "version_invalid", false, [POOL, REPLAY], "`claude --version` printed no version.", "Check that the path points at the CLI: run it with `--version` and look at what it prints.";
    VersionTooOld = "version_too_old", false, [POOL], "The CLI is older than 2.1.294.", "Run `claude update`.";
    VersionIncompatible = "version_incompatible", false, [SPEC], "The CLI refused an option or lacks a behaviour that this transport needs.", "Run `turnpass doctor`; use another transport, or another version of the CLI.";
    // Sign-in.
    Auth = "auth", false, [REPLAY, POOL, RELAY], "The CLI is signed out, or its session expired.", "Run `claude auth login --claudeai`.";
    AuthIneligible = "auth_ineligible", false, [POOL, REPLAY], "The CLI is signed in, but not with a Claude subscription.", "Run `claude auth logout`, then `claude auth login --claudeai`.";
    AuthUnknown = "auth_unknown", true, [POOL], "`claude auth status` gave no clear answer in time.", "Run `claude auth status` and look at its output; then try again.";
    InheritedCredentials = "inherited_credentials", false, [REPLAY], "The environment names a credential or another backend, and the setting is to refuse then.", "Unset the named variable, or set inherited_credentials to \"strip\".";
    // The request itself.
    RequestInvalid = "request_invalid", false, [SPEC], "The request cannot be sent as it stands.", "The message names the field and what is wrong with it.";
    TransportUnavailable = "transport_unavailable", false, [SPEC], "This provider was built without the asked transport.", "Choose one of the transports that the message lists.";
    ModelNotFound = "model_not_found", false, [REPLAY, RELAY], "The service does not know the model, or the plan does not include it.", "Use an alias (sonnet, opus, haiku, fable) or a full id that `claude` lists.";
    EffortUnsupported = "effort_unsupported", false, [SPEC], "The model cannot work at this effort level.", "Leave the effort out or choose a level that the message lists.";
    SamplingUnsupported = "sampling_unsupported", false, [SPEC], "This transport cannot apply a setting of the request.", "Remove the named setting, or use the transport that the message names.";
    ToolInvalid = "tool_invalid", false, [REPLAY, SPEC], "A tool of the request cannot be published.", "The message names the tool and what is wrong with its name or schema.";
    ToolLimit = "tool_limit", false, [REPLAY], "More tools than a request may carry.", "Offer fewer tools; the message says how many are allowed.";
    ToolCatalogSize = "tool_catalog_size", false, [REPLAY], "The tools' descriptions and schemas are larger than a request may carry.", "Shorten descriptions or schemas; the message says the limit.";
    WorkingDirectory = "working_directory", false, [REPLAY], "The working directory does not exist or cannot be entered.", "Name a directory that exists and that you may read.";
    HistoryTooLarge = "history_too_large", false, [RELAY], "The conversation is larger than the request that a transport may send.", "Compact the conversation; where turnpass refused it, the message says the size and the limit.";
    ContextLengthExceeded = "context_length_exceeded", false, [REPLAY, RELAY], "The conversation does not fit the model's context window.", "Compact the conversation and ask again.";
    // Start of a process and its isolation.
    LaunchFailed = "launch_failed", true, [SPEC], "The CLI could not be started.", "The message names the cause of the operating system; `turnpass doctor` tries the same start.";
    McpStartup = "mcp_startup", true, [REPLAY], "The CLI did not take over the host's tools.", "Try again; `turnpass doctor` tests the same hand-shake.";
    ProtocolInit = "protocol_init", false, [REPLAY], "The CLI's first record is not what this version of turnpass can verify.", "Run `turnpass doctor`; the message names the field.";
    IsolationTools = "isolation_tools", false, [REPLAY], "The CLI offers the model other tools than the host's.", "Run `turnpass doctor`; the message names the tools.";
    IsolationPermissions = "isolation_permissions", false, [REPLAY], "The CLI runs in another permission mode than asked.", "Run `turnpass doctor`; a managed policy of this machine may set it.";
    IsolationCustomizations = "isolation_customizations", false, [REPLAY], "Plugins, skills or commands are active in spite of the isolation.", "Run `turnpass doctor`; the message names them.";
    IsolationAuth = "isolation_auth", false, [REPLAY], "The CLI would use a key instead of the subscription.", "Remove the key that the message names the source of.";
    IsolationMcp = "isolation_mcp", false, [REPLAY], "The CLI loaded an MCP server that is not the host's.", "Run `turnpass doctor`; the message names it.";
    McpExecution = "mcp_execution", false, [REPLAY], "The CLI tried to execute a tool that only the host may execute.", "Run `turnpass doctor` and report the CLI version.";
    RecordingFailed = "recording_failed", false, [POOL], "A recording or the file of records could not be set up.", "Name a folder that only you can use (mode 0700, no symbolic link), or unset TURNPASS_RECORD.";
    // The conversation with the process.
    ProtocolOrder = "protocol_order", true, [REPLAY, POOL], "Records came in an order that cannot be right.", "Try again; if it stays, run `turnpass doctor` and report the CLI version.";
    ProtocolBlocks = "protocol_blocks", true, [REPLAY, POOL], "A content block began, went on or ended where it cannot.", "Try again; if it stays, run `turnpass doctor` and report the CLI version.";
    ProtocolResult = "protocol_result", true, [REPLAY, POOL], "The CLI's final record contradicts what it streamed.", "Try again; if it stays, run `turnpass doctor` and report the CLI version.";
    ProtocolRecord = "protocol_record", true, [REPLAY, POOL], "The CLI wrote too many lines that are no records.", "Run `turnpass doctor`; something may print into the CLI's output.";
    ProtocolShape = "protocol_shape", true, [REPLAY], "A record lacks something without which it means nothing.", "Try again; if it stays, run `turnpass doctor` and report the CLI version.";
    LineTooLong = "line_too_long", false, [RELAY, SPEC], "The CLI wrote one line above the limit.", "Raise the line limit, or ask for a shorter answer; the message says the limit.";
    ResponseTooLarge = "response_too_large", false, [RELAY], "The answer is larger than a transport keeps.", "Ask for a shorter answer; the message says the limit.";
    ControlTimeout = "control_timeout", true, [POOL], "The CLI did not answer a control request in time; its process was ended.", "Try again.";
    ProcessExit = "process_exit", true, [REPLAY, RELAY], "The CLI's process ended before the answer was complete.", "Try again; `turnpass doctor` shows whether the CLI runs at all.";
    ProcessCleanup = "process_cleanup", false, [REPLAY, POOL], "A process or private file could not be removed in time.", "Look for left-over `claude` processes before going on.";
    StreamInterrupted = "stream_interrupted", true, [REPLAY, RELAY], "The answer broke off: stream ended before message_stop.", "Try again; what was seen so far is incomplete.";
    ExtraGeneration = "extra_generation", false, [RELAY], "The CLI asked for another generation within the same request; it was refused.", "Ask again; nothing of the refused one was sent.";
    SummaryToolCall = "summary_tool_call", true, [POOL], "The model called a tool in place of writing the summary; the call was not run.", "Ask again, and say in the request for the summary that no tool may be used.";
    SummaryUnusable = "summary_unusable", true, [POOL], "The summary is empty, cut, refused, or no shorter than what it is of.", "Try again in a few minutes; the conversation is as it was.";
    RelayTransit = "relay_transit", true, [RELAY], "What the CLI sent to the relay cannot be admitted.", "Run `turnpass doctor`; nothing was sent upstream.";
    // Deadlines.
    StartTimeout = "start_timeout", true, [RELAY], "No sign of progress within the start deadline.", "Try again; raise the start deadline for a slow machine.";
    IdleTimeout = "idle_timeout", true, [REPLAY, RELAY], "No progress within the idle deadline.", "Try again; raise the idle deadline for long thinking.";
    TotalTimeout = "total_timeout", false, [REPLAY, RELAY], "The generation took longer than its overall deadline.", "Ask for less at once, or raise the deadline.";
    // The service.
    RateLimit = "rate_limit", true, [REPLAY, RELAY], "The service limits requests for a moment; this is not the plan's usage limit.", "Try again after the time given, if there is one, else in a minute.";
    UsageLimit = "usage_limit", false, [POOL, RELAY], "The plan's usage limit is reached.", "Wait until the limit opens again; `turnpass usage` shows when.";
    Billing = "billing", false, [POOL], "The request would draw on usage credits, or credits are exhausted.", "Look at the usage settings of your account; turnpass never turns credits on.";
    UsageUnconfirmed = "usage_unconfirmed", true, [POOL], "The CLI could not confirm that usage credits are off.", "Try again in a minute; `turnpass usage` shows what the CLI says, and usage_gate = \"warn\" sends all the same.";
    Budget = "budget", false, [SPEC], "A budget that you set is used up.", "Raise the budget that the message names, or wait: a day's ends at midnight, a window's when it starts anew.";
    Overloaded = "overloaded", true, [RELAY], "The service is overloaded.", "Try again in a minute.";
    UpstreamError = "upstream_error", true, [RELAY], "The service failed.", "Try again; the message gives the HTTP status.";
    UpstreamRejected = "upstream_rejected", false, [RELAY], "The service refused the request as malformed.", "The message gives the status and the kind of error; report it if the request looks right.";
    Forbidden = "forbidden", false, [RELAY], "The service does not allow this account the request.", "Check the plan and organisation of the signed-in account.";
    UpstreamUnreachable = "upstream_unreachable", true, [RELAY], "The service could not be reached.", "Check the network and the proxy settings.";
    // turnpass itself.
    LabUpstreamRefused = "lab_upstream_refused", false, [SPEC], "A laboratory upstream has to be a loopback http address.", "Use http://127.0.0.1:PORT.";
    SessionFile = "session_file", false, [SPEC], "A kept session is in use, damaged, too large, or cannot be read or written.", "The message says which; `turnpass sessions` lists what is kept.";
    Closed = "closed", false, [POOL], "The provider was shut down.", "Build a new provider.";
    Internal = "internal", false, [SPEC], "turnpass contradicted itself.", "Report it with the message.";
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Longest detail that an error keeps, in bytes; the rest is cut on a character boundary.
pub const ERROR_DETAIL_BYTES: usize = 1024;

/// A failed request.
///
/// `Display` gives the code, what happened and what to do. It never holds a prompt, a header, a bearer or the CLI's
/// standard error.
#[derive(Clone, Debug)]
pub struct Error(Box<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    code: ErrorCode,
    detail: String,
    status: Option<u16>,
    resets_at: Option<SystemTime>,
    output_seen: bool,
    state_retired: bool,
    remedy: Option<String>,
}

/// Short for a result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a detail in words; the detail is cut at [`ERROR_DETAIL_BYTES`].
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        if detail.len() > ERROR_DETAIL_BYTES {
            let end = detail.floor_char_boundary(ERROR_DETAIL_BYTES);
            detail.truncate(end);
            detail.push('…');
        }
        Self(Box::new(Inner {
            code,
            detail,
            status: None,
            resets_at: None,
            output_seen: false,
            state_retired: false,
            remedy: None,
        }))
    }

    /// With the HTTP status that the service gave.
    #[must_use]
    pub fn with_status(mut self, status: u16) -> Self {
        self.0.status = Some(status);
        self
    }

    /// With the time when a limit opens again. A time in the past is ignored.
    #[must_use]
    pub fn with_reset(mut self, at: SystemTime) -> Self {
        if at > SystemTime::now() {
            self.0.resets_at = Some(at);
        }
        self
    }

    /// With the fact that events of the answer had been given out before.
    #[must_use]
    pub fn with_output_seen(mut self, seen: bool) -> Self {
        self.0.output_seen = seen;
        self
    }

    /// With the fact that the request retired the backend state of its conversation.
    #[must_use]
    pub fn with_backend_state_retired(mut self, retired: bool) -> Self {
        self.0.state_retired = retired;
        self
    }

    /// With a next step that fits better than the code's own.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// What happened, in words.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// What to do, in a sentence.
    pub fn remedy(&self) -> &str {
        self.0
            .remedy
            .as_deref()
            .unwrap_or_else(|| self.0.code.remedy())
    }

    /// The HTTP status of the service, if there was one.
    pub fn status(&self) -> Option<u16> {
        self.0.status
    }

    /// When the limit opens again, if known.
    pub fn resets_at(&self) -> Option<SystemTime> {
        self.0.resets_at
    }

    /// Whether text or thinking had been given out before the failure; it is incomplete then.
    pub fn output_seen(&self) -> bool {
        self.0.output_seen
    }

    /// Whether the host has to delete the backend state that it stores for this conversation: a summary in place of
    /// the pool failed, and its live conversation went with it ([`StateRetirement`]).
    ///
    /// [`StateRetirement`]: crate::request::StateRetirement
    pub fn backend_state_retired(&self) -> bool {
        self.0.state_retired
    }

    /// Whether the same request may succeed later without anything being changed by hand.
    pub fn is_retryable(&self) -> bool {
        self.0.code.is_retryable()
    }

    /// Whether signing in again is the remedy.
    pub fn is_auth(&self) -> bool {
        matches!(
            self.0.code,
            ErrorCode::Auth | ErrorCode::AuthIneligible | ErrorCode::AuthUnknown
        )
    }

    /// Whether the conversation has to become shorter.
    pub fn is_context_overflow(&self) -> bool {
        matches!(
            self.0.code,
            ErrorCode::ContextLengthExceeded | ErrorCode::HistoryTooLarge
        )
    }

    /// Whether a deadline passed.
    pub fn is_timeout(&self) -> bool {
        matches!(
            self.0.code,
            ErrorCode::StartTimeout
                | ErrorCode::IdleTimeout
                | ErrorCode::TotalTimeout
                | ErrorCode::ControlTimeout
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] ", self.0.code)?;
        let said = if self.0.detail.is_empty() {
            self.0.code.meaning()
        } else {
            &self.0.detail
        };
        f.write_str(said)?;
        let close = if said.ends_with(['.', '!', '?', '…']) {
            " "
        } else {
            ". "
        };
        write!(f, "{close}{}", self.remedy())
    }
}

impl std::error::Error for Error {}

impl serde::Serialize for Error {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("code", self.0.code.as_str())?;
        map.serialize_entry("message", &self.to_string())?;
        map.serialize_entry("retryable", &self.is_retryable())?;
        map.serialize_entry("output_seen", &self.0.output_seen)?;
        if self.0.state_retired {
            map.serialize_entry("backend_state_retired", &true)?;
        }
        if let Some(status) = self.0.status {
            map.serialize_entry("status", &status)?;
        }
        if let Some(at) = self.0.resets_at {
            let seconds = at
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs());
            map.serialize_entry("resets_at", &seconds)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::time::Duration;

    #[test]
    fn every_code_is_told_apart_and_says_what_to_do() {
        let mut words = HashSet::new();
        for code in ErrorCode::ALL {
            assert!(words.insert(code.as_str()), "{code} stands twice");
            assert!(
                code.as_str()
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{code}"
            );
            for sentence in [code.meaning(), code.remedy()] {
                assert!(
                    sentence.ends_with('.') && sentence.len() >= 10,
                    "{code}: {sentence}"
                );
            }
            assert!(!code.sources().is_empty(), "{code} has no source");
        }
    }

    #[test]
    fn the_message_holds_code_cause_and_next_step() {
        let error = Error::new(
            ErrorCode::VersionTooOld,
            "claude 2.1.200 was found, 2.1.294 is the oldest that works",
        );
        assert_eq!(
            error.to_string(),
            "[version_too_old] claude 2.1.200 was found, 2.1.294 is the oldest that works. Run `claude update`."
        );
    }

    #[test]
    fn bug_004_a_long_detail_is_cut_on_a_character_boundary() {
        let detail = format!("{}👩‍👩‍👧", "x".repeat(ERROR_DETAIL_BYTES - 2));
        let error = Error::new(ErrorCode::Internal, detail);
        assert!(error.detail().len() <= ERROR_DETAIL_BYTES + '…'.len_utf8());
        assert!(error.detail().ends_with('…'));
    }

    #[test]
    fn bug_048_a_reset_time_in_the_past_is_ignored() {
        let past = SystemTime::now() - Duration::from_secs(5);
        assert!(
            Error::new(ErrorCode::UsageLimit, "")
                .with_reset(past)
                .resets_at()
                .is_none()
        );
        let future = SystemTime::now() + Duration::from_secs(60);
        assert_eq!(
            Error::new(ErrorCode::UsageLimit, "")
                .with_reset(future)
                .resets_at(),
            Some(future)
        );
    }

    #[test]
    fn the_documented_table_is_the_one_in_the_code() {
        let mut table = String::from(
            "| code | meaning | try again | what to do | named in |\n| --- | --- | --- | --- | --- |\n",
        );
        for code in ErrorCode::ALL {
            let retry = if code.is_retryable() { "yes" } else { "no" };
            let sources = code.sources().join(", ");
            table += &format!(
                "| `{code}` | {} | {retry} | {} | {sources} |\n",
                code.meaning(),
                code.remedy()
            );
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (head, _) = page
            .split_once("| code |")
            .expect("docs/errors.md has the table");
        let wanted = format!("{head}{table}");
        if page != wanted && std::env::var_os("TURNPASS_BLESS").is_some() {
            std::fs::write(path, &wanted).unwrap();
            return;
        }
        assert_eq!(
            page, wanted,
            "docs/errors.md is out of date: run this test with TURNPASS_BLESS=1"
        );
    }
}
