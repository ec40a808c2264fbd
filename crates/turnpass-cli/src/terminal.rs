//! The terminal: style, text from elsewhere made safe, and the person who is asked.

use std::io::{BufRead, IsTerminal, Write};
use std::sync::Mutex;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use turnpass::login::{LoginPrompt, LoginUi};
use turnpass::secret::Secret;
use turnpass_agent::{Answer, Approver, Ask};

use crate::settings::Environment;

/// Lines of a call's detail that are shown with the question.
const DETAIL_LINES: usize = 40;

/// Longest line of a call's detail, in characters.
const DETAIL_CHARACTERS: usize = 400;

/// Styles for one stream; none unless it is a terminal.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Style {
    styled: bool,
}

impl Style {
    /// For a stream that is or is not a terminal. `NO_COLOR` and `TERM=dumb` switch styles off.
    pub(crate) fn new(is_terminal: bool, environment: Environment<'_>) -> Self {
        let set = |name: &str| environment(name).is_some_and(|value| !value.is_empty());
        let dumb = environment("TERM").is_some_and(|term| term == "dumb");
        Self {
            styled: is_terminal && !set("NO_COLOR") && !dumb,
        }
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub(crate) fn red(self, text: &str) -> String {
        self.with("31", text)
    }

    pub(crate) fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    pub(crate) fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.styled {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Text from a model or a file, with everything made visible that a terminal would obey: control characters, and the
/// characters that turn the direction of writing around.
pub(crate) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => shown.push(character),
            '\0'..='\x1f' => {
                // The pictures of the control characters stand in the same order.
                let picture = char::from_u32(0x2400 + u32::from(character));
                shown.push(picture.unwrap_or('\u{fffd}'));
            }
            '\x7f'..='\u{9f}'
            | '\u{61c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{202a}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => shown.extend(character.escape_unicode()),
            _ => shown.push(character),
        }
    }
    shown
}

/// Asks the person at the terminal, on standard error, and reads the answer from standard input.
#[derive(Debug)]
pub(crate) struct AskOnTerminal {
    style: Style,
    // A thread that reads cannot be interrupted, so there is one for all questions, and it may outlive a cancel.
    reader: Mutex<Option<std::sync::mpsc::Sender<oneshot::Sender<Option<String>>>>>,
}

impl AskOnTerminal {
    pub(crate) fn new(style: Style) -> Self {
        Self {
            style,
            reader: Mutex::new(None),
        }
    }

    /// Whether there is a person: both streams of the dialogue have to be a terminal.
    pub(crate) fn is_possible() -> bool {
        std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
    }

    fn line(&self) -> oneshot::Receiver<Option<String>> {
        let (tell, line) = oneshot::channel();
        let mut reader = match self.reader.lock() {
            Ok(reader) => reader,
            Err(poisoned) => poisoned.into_inner(),
        };
        let sender = reader.get_or_insert_with(start_reader);
        // A reader that is gone drops the question, which counts as no answer.
        let _ = sender.send(tell);
        line
    }
}

/// Shows the CLI's link at the terminal, on standard error, and reads the code from standard input.
#[derive(Debug)]
pub(crate) struct LoginOnTerminal {
    terminal: AskOnTerminal,
}

impl LoginOnTerminal {
    pub(crate) fn new(style: Style) -> Self {
        Self {
            terminal: AskOnTerminal::new(style),
        }
    }

    /// Whether there is a person.
    pub(crate) fn is_possible() -> bool {
        AskOnTerminal::is_possible()
    }
}

impl LoginUi for LoginOnTerminal {
    fn ask<'a>(&'a self, prompt: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>> {
        Box::pin(async move {
            let text = format!(
                "\n{}\n{} ({} of {}): ",
                visible(&prompt.steps),
                prompt.question,
                prompt.attempt,
                prompt.attempts
            );
            put(&text).ok()?;
            let line = self.terminal.line().await.ok()??;
            // An empty line declines.
            let code = line.trim();
            (!code.is_empty()).then(|| Secret::new(code.as_bytes()))
        })
    }
}

/// Tells the person something on standard error.
pub(crate) fn tell(text: &str) -> Result<(), crate::exit::Fault> {
    std::io::stderr()
        .lock()
        .write_all(text.as_bytes())
        .map_err(|error| {
            crate::exit::Fault::system(
                format!("standard error cannot be written: {error}"),
                "Send it somewhere else.",
            )
        })
}

fn start_reader() -> std::sync::mpsc::Sender<oneshot::Sender<Option<String>>> {
    let (sender, questions) = std::sync::mpsc::channel::<oneshot::Sender<Option<String>>>();
    std::thread::spawn(move || {
        for tell in questions {
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            let line = matches!(read, Ok(count) if count > 0).then_some(line);
            // The question may have been withdrawn.
            let _ = tell.send(line);
        }
    });
    sender
}

impl Approver for AskOnTerminal {
    fn ask<'a>(&'a self, ask: &'a Ask) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            // Without the question there can be no consent.
            if put(&question(ask, self.style)).is_err() {
                return Answer::No;
            }
            match self.line().await {
                Ok(Some(line)) => answer(&line),
                _ => Answer::No,
            }
        })
    }
}

/// Puts a question to the person.
fn put(question: &str) -> std::io::Result<()> {
    // What was typed before the question was seen is no answer to it.
    let typed = rustix::termios::QueueSelector::IFlush;
    rustix::termios::tcflush(std::io::stdin(), typed)?;
    let mut stderr = std::io::stderr().lock();
    stderr.write_all(question.as_bytes())?;
    stderr.flush()
}

fn question(ask: &Ask, style: Style) -> String {
    let mut text = format!(
        "\n{} {}\n",
        style.bold(&format!("{} wants to run:", visible(&ask.tool))),
        visible(&ask.summary)
    );
    let detail = visible(&ask.detail);
    if detail != visible(&ask.summary) {
        let mut lines = detail.lines();
        for line in lines.by_ref().take(DETAIL_LINES) {
            let mut shown: String = line.chars().take(DETAIL_CHARACTERS).collect();
            if shown.len() < line.len() {
                shown.push_str(" [the line goes on]");
            }
            text.push_str(&format!("  {shown}\n"));
        }
        let more = lines.count();
        if more > 0 {
            text.push_str(&format!("  [{more} more lines]\n"));
        }
    }
    for path in &ask.outside {
        let place = visible(&path.to_string_lossy());
        let warning = format!("outside the working directory: {place}");
        text.push_str(&format!("  {}\n", style.yellow(&warning)));
    }
    text + "Allow? [y]es, [a]lways, [N]o: "
}

fn answer(line: &str) -> Answer {
    match line.trim().to_lowercase().as_str() {
        "y" | "yes" => Answer::Once,
        "a" | "always" => Answer::Always,
        _ => Answer::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_model_is_obeyed_by_the_terminal() {
        let text = "a\x1b]0;title\x07\u{9b}31m\u{202e}b\r\n\tü👩‍👧";
        let shown = visible(text);
        assert_eq!(shown, "a␛]0;title␇\\u{9b}31m\\u{202e}b␍\n\tü👩‍👧");
        assert!(
            shown
                .chars()
                .all(|c| c == '\n' || c == '\t' || !c.is_control())
        );
    }

    #[test]
    fn only_a_clear_yes_is_one() {
        for (line, wanted) in [
            ("y\n", Answer::Once),
            (" YES \r\n", Answer::Once),
            ("a\n", Answer::Always),
            ("\n", Answer::No),
            ("n\n", Answer::No),
            ("yy\n", Answer::No),
        ] {
            assert_eq!(answer(line), wanted, "{line:?}");
        }
    }

    #[test]
    fn a_question_shows_all_that_matters() {
        let ask = Ask {
            tool: "write".into(),
            summary: "f (9 bytes)".into(),
            detail: (0..60).map(|n| format!("line {n}\x1b\n")).collect(),
            outside: vec!["/etc/x".into()],
        };
        let text = question(&ask, Style::default());
        assert!(text.contains("write wants to run: f (9 bytes)"));
        assert!(text.contains("  line 39␛\n  [20 more lines]\n"));
        assert!(text.contains("outside the working directory: /etc/x"));
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn styles_are_for_terminals_only() {
        let plain = |_: &str| None;
        assert_eq!(Style::new(false, &plain).red("x"), "x");
        assert_eq!(Style::new(true, &plain).red("x"), "\x1b[31mx\x1b[0m");
        let no_color = |name: &str| (name == "NO_COLOR").then(|| "1".into());
        assert_eq!(Style::new(true, &no_color).red("x"), "x");
        let dumb = |name: &str| (name == "TERM").then(|| "dumb".into());
        assert_eq!(Style::new(true, &dumb).red("x"), "x");
    }
}
