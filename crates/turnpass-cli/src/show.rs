//! Shows a run: the model's text on standard output and everything else on standard error, or one JSON object a line.

use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;
use turnpass::event::Notice;
use turnpass_agent::{AgentEvent, Report};

use crate::commands::models::grouped;
use crate::context::Context;
use crate::terminal::{Style, visible};

/// The word that stands wherever something was not answered by the service.
pub(crate) const LABORATORY: &str = "laboratory: nothing reaches the service";

/// How a run is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// For people.
    Text,
    /// One event a line.
    JsonLines,
}

/// Shows the events of one run. When nobody reads any more, it cancels the run.
pub(crate) struct Show<Out, Err> {
    form: Form,
    out: Out,
    err: Err,
    out_is_terminal: bool,
    style: Style,
    cancel: CancellationToken,
    in_line: bool,
    thinking: bool,
    broken: bool,
    said_laboratory: bool,
    /// What the last retry was for.
    last_retry: Option<String>,
}

impl Show<std::io::Stdout, std::io::Stderr> {
    /// On the streams of this process.
    pub(crate) fn on_streams(form: Form, context: &Context, cancel: CancellationToken) -> Self {
        let out_is_terminal = std::io::stdout().is_terminal();
        Self::new(
            form,
            (std::io::stdout(), out_is_terminal),
            (std::io::stderr(), context.style()),
            cancel,
        )
    }
}

impl<Out: Write, Err: Write> Show<Out, Err> {
    pub(crate) fn new(
        form: Form,
        (out, out_is_terminal): (Out, bool),
        (err, style): (Err, Style),
        cancel: CancellationToken,
    ) -> Self {
        Self {
            form,
            out,
            err,
            out_is_terminal,
            style,
            cancel,
            in_line: false,
            thinking: false,
            broken: false,
            said_laboratory: false,
            last_retry: None,
        }
    }

    /// Whether the reader of standard output went away.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Shows one event.
    pub(crate) fn event(&mut self, event: &AgentEvent) {
        match self.form {
            Form::JsonLines => self.json(event),
            Form::Text => self.text(event),
        }
    }

    /// One JSON object as a line of standard output.
    pub(crate) fn json(&mut self, value: &impl serde::Serialize) {
        let written = serde_json::to_string(value)
            .map_err(std::io::Error::from)
            .and_then(|line| writeln!(self.out, "{line}"));
        self.written(written);
    }

    /// A line beside the answer. That it is a laboratory run is said once.
    pub(crate) fn note(&mut self, line: &str) {
        if line.contains(LABORATORY) && std::mem::replace(&mut self.said_laboratory, true) {
            return;
        }
        if self.form == Form::Text && self.in_line && self.out_is_terminal {
            let written = writeln!(self.out);
            self.written(written);
            self.in_line = false;
        }
        // Notes are for a person who looks on; a standard error that is closed is no reason to stop.
        let _ = writeln!(self.err, "{line}");
    }

    fn text(&mut self, event: &AgentEvent) {
        if self.thinking && !matches!(event, AgentEvent::Thinking { .. }) {
            self.thinking = false;
            let _ = writeln!(self.err);
        }
        match event {
            AgentEvent::Text { text } => self.piece(text),
            AgentEvent::Thinking { text } => {
                self.thinking = true;
                let _ = write!(self.err, "{}", self.style.dim(&visible(text)));
            }
            AgentEvent::ToolStarted { name, summary, .. } => {
                let call = visible(&format!("{name} {summary}"));
                self.note(&self.style.dim(&format!("→ {}", call.trim_end())));
            }
            AgentEvent::ToolEnded { .. } => self.tool_ended(event),
            AgentEvent::Retracted { reason } => {
                let text = format!("what was said last does not count: {}", visible(reason));
                self.note(&self.style.yellow(&text));
            }
            AgentEvent::Retry { wait_ms, error, .. } => {
                let said = error.to_string();
                let text = match self.last_retry.as_ref() == Some(&said) {
                    // The whole sentence with its advice once is enough.
                    true => format!("[{}] again. Trying again in {wait_ms} ms.", error.code()),
                    false => format!("{said} Trying again in {wait_ms} ms."),
                };
                self.last_retry = Some(said);
                self.note(&self.style.yellow(&text));
            }
            AgentEvent::Compacting { tokens, .. } => {
                let text = format!("compacting: about {} tokens", grouped(*tokens));
                self.note(&self.style.dim(&text));
            }
            AgentEvent::Compacted {
                messages_before,
                messages_after,
                tokens_before,
                tokens_after,
                ..
            } => {
                let (before, after) = (grouped(*tokens_before), grouped(*tokens_after));
                let text = format!(
                    "compacted: from about {before} to about {after} tokens, {messages_before} to {messages_after} messages"
                );
                self.note(&self.style.dim(&text));
            }
            AgentEvent::CompactionFailed { error, .. } => {
                let error = visible(&error.to_string());
                let text = format!("the conversation was not compacted and is as it was: {error}");
                self.note(&self.style.yellow(&text));
            }
            AgentEvent::Notice(notice) => {
                if let Some(text) = notice_text(notice) {
                    self.note(&self.style.yellow(&text));
                }
            }
            AgentEvent::Ended(report) => self.ended(report),
            _ => {}
        }
    }

    fn piece(&mut self, text: &str) {
        let written = if self.out_is_terminal {
            write!(self.out, "{}", visible(text))
        } else {
            write!(self.out, "{text}")
        };
        self.in_line = !text.ends_with('\n');
        self.written(written);
    }

    fn tool_ended(&mut self, event: &AgentEvent) {
        let AgentEvent::ToolEnded {
            name,
            output,
            is_error,
            refused,
            cut,
            elapsed_ms,
            ..
        } = event
        else {
            return;
        };
        let name = visible(name);
        let line = if *refused {
            self.style.yellow(&format!("← {name}: {}", visible(output)))
        } else {
            let size = output.len();
            let cut = if *cut { ", cut" } else { "" };
            let text = format!("← {name}: {size} bytes{cut}, {elapsed_ms} ms");
            if *is_error {
                let last = visible(output.lines().last().unwrap_or_default());
                self.style.red(&format!("{text}, failed: {last}"))
            } else {
                self.style.dim(&text)
            }
        };
        self.note(&line);
    }

    fn ended(&mut self, report: &Report) {
        if self.in_line {
            let written = writeln!(self.out);
            self.written(written);
            self.in_line = false;
        }
        self.note(&self.style.dim(&summary(report)));
    }

    fn written(&mut self, written: std::io::Result<()>) {
        let flushed = written.and_then(|()| self.out.flush());
        if flushed.is_err() && !self.broken {
            self.broken = true;
            self.cancel.cancel();
        }
    }
}

fn notice_text(notice: &Notice) -> Option<String> {
    Some(match notice {
        Notice::Retry { status, reason } => match status {
            Some(status) => format!("trying again after {status}: {}", visible(reason)),
            None => format!("trying again: {}", visible(reason)),
        },
        Notice::LimitWarning {
            window,
            utilization,
            ..
        } => {
            let used =
                utilization.map_or_else(String::new, |part| format!(" {:.0} %", part * 100.0));
            format!("usage limit {}:{used} used", visible(window))
        }
        Notice::RequestsRefused { count } => {
            format!("{count} further requests of the CLI were refused")
        }
        Notice::Laboratory => LABORATORY.to_owned(),
        Notice::Uncertified { text } | Notice::Other { text } => visible(text),
        // What was changed on the way out is for a host's log.
        _ => return None,
    })
}

/// A span in its two largest units.
pub(crate) fn span(seconds: i64) -> String {
    let seconds = Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min"),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// The error, and how long it is until that passes, if this is known.
pub(crate) fn error_text(error: &turnpass::Error, now: SystemTime) -> String {
    let left = error
        .resets_at()
        .and_then(|at| at.duration_since(now).ok())
        .and_then(|left| i64::try_from(left.as_secs()).ok());
    let text = match left {
        Some(left) => format!("{error} It opens again in {}.", span(left)),
        None => error.to_string(),
    };
    visible(&text)
}

fn summary(report: &Report) -> String {
    let mut text = format!(
        "[{}] {} generations, {} tool calls",
        report.outcome.as_str(),
        report.generations,
        report.tool_calls
    );
    match report.compactions {
        0 => {}
        1 => text.push_str(", 1 compaction"),
        times => text.push_str(&format!(", {times} compactions")),
    }
    if let Some(tokens) = report.context_tokens {
        text.push_str(&format!(", {tokens} tokens of context"));
    }
    if let Some(share) = report.cache_read_share {
        text.push_str(&format!(", {:.0} % read from the cache", share * 100.0));
    }
    if report.laboratory {
        text.push_str(", laboratory");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpass::conversation::{ToolInput, ToolUseId};

    fn shown(form: Form, terminal: bool, events: &[AgentEvent]) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let cancel = CancellationToken::new();
        let mut show = Show::new(
            form,
            (&mut out, terminal),
            (&mut err, Style::default()),
            cancel,
        );
        for event in events {
            show.event(event);
        }
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(out), text(err))
    }

    #[test]
    fn a_retry_for_the_same_reason_does_not_say_it_all_again() {
        let retry = |retry, code| AgentEvent::Retry {
            retry,
            wait_ms: 500,
            error: turnpass::Error::new(code, ""),
        };
        use turnpass::ErrorCode::{Overloaded, RateLimit};
        let events = [
            retry(1, RateLimit),
            retry(2, RateLimit),
            retry(3, Overloaded),
        ];
        let (_, err) = shown(Form::Text, false, &events);
        let lines: Vec<_> = err.lines().collect();
        assert_eq!(lines.len(), 3, "{err}");
        assert!(
            lines[0].starts_with("[rate_limit] ") && lines[0].len() > 60,
            "{err}"
        );
        assert_eq!(lines[1], "[rate_limit] again. Trying again in 500 ms.");
        assert!(lines[2].starts_with("[overloaded] "), "{err}");
    }

    fn said(text: &str) -> AgentEvent {
        AgentEvent::Text { text: text.into() }
    }

    fn started() -> AgentEvent {
        AgentEvent::ToolStarted {
            id: ToolUseId("t".into()),
            name: "read".into(),
            summary: "a\x1b.rs".into(),
            input: ToolInput::empty(),
        }
    }

    fn ended(output: &str, is_error: bool, refused: bool) -> AgentEvent {
        AgentEvent::ToolEnded {
            id: ToolUseId("t".into()),
            name: "read".into(),
            output: output.into(),
            is_error,
            refused,
            cut: false,
            elapsed_ms: 3,
        }
    }

    #[test]
    fn the_answer_goes_to_standard_output_and_the_rest_beside_it() {
        let events = [
            said("I lo"),
            said("ok"),
            started(),
            ended("12345", false, false),
            ended("x\nno such file", true, false),
            ended("denied: no", true, true),
            said("done\n"),
        ];
        let (out, err) = shown(Form::Text, false, &events);
        assert_eq!(out, "I lookdone\n");
        assert_eq!(
            err,
            "→ read a␛.rs\n← read: 5 bytes, 3 ms\n← read: 14 bytes, 3 ms, failed: no such file\n← read: denied: no\n"
        );
        let (out, _) = shown(Form::Text, true, &events);
        assert_eq!(out, "I look\ndone\n", "on a terminal both share the lines");
    }

    #[test]
    fn a_compaction_says_from_how_many_tokens_to_how_many() {
        let error = turnpass::Error::new(turnpass::ErrorCode::SummaryUnusable, "it is \x1bempty");
        let cause = turnpass_agent::Cause::Threshold;
        let events = [
            AgentEvent::Compacting {
                cause,
                tokens: 141_234,
            },
            AgentEvent::Compacted {
                cause,
                messages_before: 120,
                messages_after: 14,
                tokens_before: 141_234,
                tokens_after: 23_100,
                usage: turnpass::event::Usage::default(),
                model: "m".into(),
                upstream_requests: 1,
                laboratory: true,
            },
            AgentEvent::CompactionFailed { cause, error },
        ];
        let (out, err) = shown(Form::Text, false, &events);
        assert_eq!(out, "");
        assert!(
            err.starts_with(
                "compacting: about 141,234 tokens\ncompacted: from about 141,234 to about 23,100 tokens, 120 to 14 messages\n\
                 the conversation was not compacted and is as it was: [summary_unusable] it is ␛empty. "
            ),
            "{err}"
        );
        let (out, _) = shown(Form::JsonLines, false, &events);
        let kinds: Vec<_> = out
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["type"].clone())
            .collect();
        assert_eq!(kinds, ["compacting", "compacted", "compaction_failed"]);
    }

    #[test]
    fn escapes_reach_files_but_not_terminals() {
        let events = [said("\x1b[31m")];
        assert_eq!(shown(Form::Text, true, &events).0, "␛[31m");
        assert_eq!(shown(Form::Text, false, &events).0, "\x1b[31m");
    }

    #[test]
    fn a_limit_says_when_it_opens_again() {
        let now = SystemTime::now();
        let error = turnpass::Error::new(turnpass::ErrorCode::UsageLimit, "full");
        assert!(!error_text(&error, now).contains("opens again in"));
        let error = error.with_reset(now + Duration::from_secs(7380));
        let text = error_text(&error, now);
        assert!(text.ends_with("It opens again in 2 h 3 min."), "{text}");
        let later = now + Duration::from_secs(8000);
        assert!(!error_text(&error, later).contains("opens again in"));
    }

    #[test]
    fn json_is_one_object_a_line() {
        let (out, err) = shown(Form::JsonLines, true, &[said("a\nb"), started()]);
        let lines: Vec<serde_json::Value> = out
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines[0], serde_json::json!({"type":"text","text":"a\nb"}));
        assert_eq!(lines[1]["type"], "tool_started");
        assert!(err.is_empty());
    }

    #[test]
    fn the_run_is_cancelled_when_nobody_reads() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let cancel = CancellationToken::new();
        let mut show = Show::new(
            Form::JsonLines,
            (Closed, false),
            (Vec::new(), Style::default()),
            cancel.clone(),
        );
        show.event(&said("x"));
        assert!(show.is_broken() && cancel.is_cancelled());
    }
}
