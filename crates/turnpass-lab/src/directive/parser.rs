//! The parser of directives: recursive descent, never back over what it has read.

use serde_json::Value;

use super::{Directive, How, MAX_TEXT_SIZE_BYTES, MAX_THEN_DEPTH, Place, Program};

/// The directives of a text that holds some.
pub(super) fn parse(text: &str) -> Program {
    Parser { text, at: 0 }.sequence(0).0
}

pub(super) fn starts_directive(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("[[") else {
        return false;
    };
    let word = word_of(rest);
    if word.is_empty() {
        return false;
    }
    let after = &rest[word.len()..];
    after.is_empty() || after.starts_with("]]") || after.starts_with(|c: char| c.is_whitespace())
}

fn word_of(text: &str) -> &str {
    if !text.starts_with(|c: char| c.is_ascii_lowercase()) {
        return "";
    }
    let end = text
        .find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'))
        .unwrap_or(text.len());
    &text[..end]
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

type Parsed = Result<Directive, String>;

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Reads directives up to the end, or inside a `then` up to its `]]`; the flag says whether that was found.
    fn sequence(&mut self, depth: usize) -> (Program, bool) {
        let mut program = Program::default();
        loop {
            let rest = self.rest();
            let open = rest
                .match_indices("[[")
                .map(|(at, _)| at)
                .find(|&at| starts_directive(&rest[at..]));
            let close = if depth > 0 { rest.find("]]") } else { None };
            match (open, close) {
                (Some(open), close) if close.is_none_or(|close| open < close) => {
                    self.at += open + 2;
                    self.directive(depth, &mut program);
                }
                (_, Some(close)) => {
                    self.at += close + 2;
                    return (program, true);
                }
                _ => {
                    self.at = self.text.len();
                    return (program, false);
                }
            }
        }
    }

    fn directive(&mut self, depth: usize, program: &mut Program) {
        let word = word_of(self.rest());
        self.at += word.len();
        if word == "then" {
            if depth >= MAX_THEN_DEPTH {
                self.at = self.text.len();
                program
                    .directives
                    .push(invalid(word, "is nested too deep".into()));
                return;
            }
            let (then, closed) = self.sequence(depth + 1);
            if closed {
                program.then.push(then);
            } else {
                program
                    .directives
                    .push(invalid(word, "has no closing ]]".into()));
            }
            return;
        }
        let directive = self.arguments(word);
        program
            .directives
            .push(directive.unwrap_or_else(|problem| invalid(word, problem)));
    }

    fn arguments(&mut self, word: &str) -> Parsed {
        match word {
            "call" => {
                let name = self.token();
                let input = self
                    .json()?
                    .unwrap_or_else(|| Value::Object(Default::default()));
                if name.is_empty() {
                    return Err("needs the name of a tool".into());
                }
                Ok(Directive::Call { name, input })
            }
            "raw-call" => {
                let name = self.token();
                let raw = self.words()?;
                if name.is_empty() {
                    return Err("needs the name of a tool".into());
                }
                Ok(Directive::RawCall { name, raw })
            }
            "status" => {
                let status = self.token();
                let headers = self.json()?;
                let status = number(&status, "an HTTP status")?;
                let status = u16::try_from(status)
                    .ok()
                    .filter(|status| (200..600).contains(status))
                    .ok_or("needs an HTTP status from 200 to 599")?;
                Ok(Directive::Status {
                    status,
                    headers: headers_of(headers)?,
                })
            }
            "block" => Ok(Directive::Block(self.object()?)),
            "usage" => Ok(Directive::Usage(self.object()?)),
            "stop-details" => Ok(Directive::StopDetails(
                self.json()?.ok_or("needs a JSON value")?,
            )),
            _ => plain(word, self.words()?),
        }
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    /// One word of the arguments, which ends at white space or at the closing brackets.
    fn token(&mut self) -> String {
        self.skip_blanks();
        let rest = self.rest();
        let blank = rest.find(|c: char| c.is_whitespace()).unwrap_or(rest.len());
        let end = rest.find("]]").map_or(blank, |close| close.min(blank));
        self.at += end;
        rest[..end].to_owned()
    }

    /// Everything up to the closing brackets, or the content of a JSON string.
    fn words(&mut self) -> Result<String, String> {
        let rest = self.rest();
        let body = rest.trim_start();
        if body.starts_with('"') {
            let mut stream = serde_json::Deserializer::from_str(body).into_iter::<String>();
            if let Some(Ok(text)) = stream.next() {
                let after = &body[stream.byte_offset()..];
                let tail = after.trim_start();
                if tail.starts_with("]]") {
                    self.at += rest.len() - tail.len() + 2;
                    return Ok(text);
                }
            }
        }
        let Some(close) = rest.find("]]") else {
            self.at = self.text.len();
            return Err("has no closing ]]".into());
        };
        self.at += close + 2;
        // One blank separates the word from its text; the text's own blanks are kept.
        let text = &rest[..close];
        Ok(text
            .strip_prefix(char::is_whitespace)
            .unwrap_or(text)
            .to_owned())
    }

    /// A JSON value and the closing brackets; `None` where the brackets follow at once.
    fn json(&mut self) -> Result<Option<Value>, String> {
        let rest = self.rest();
        let body = rest.trim_start();
        if body.starts_with("]]") {
            self.at += rest.len() - body.len() + 2;
            return Ok(None);
        }
        let mut stream = serde_json::Deserializer::from_str(body).into_iter::<Value>();
        if let Some(Ok(value)) = stream.next() {
            let tail = body[stream.byte_offset()..].trim_start();
            if tail.starts_with("]]") {
                self.at += rest.len() - tail.len() + 2;
                return Ok(Some(value));
            }
        }
        let Some(close) = rest.find("]]") else {
            self.at = self.text.len();
            return Err("has no closing ]]".into());
        };
        self.at += close + 2;
        let escaped = rest[..close].trim();
        let once: Option<String> = serde_json::from_str(&format!("\"{escaped}\"")).ok();
        once.and_then(|text| serde_json::from_str(&text).ok())
            .map(Some)
            .ok_or_else(|| "needs a JSON value (raw-call takes any text)".into())
    }

    fn object(&mut self) -> Result<Value, String> {
        self.json()?
            .filter(Value::is_object)
            .ok_or_else(|| "needs a JSON object".into())
    }
}

fn invalid(word: &str, problem: String) -> Directive {
    Directive::Invalid {
        word: word.to_owned(),
        problem,
    }
}

fn number(text: &str, what: &str) -> Result<u64, String> {
    text.trim().parse().map_err(|_| format!("needs {what}"))
}

fn headers_of(value: Option<Value>) -> Result<Vec<(String, String)>, String> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let Value::Object(map) = value else {
        return Err("needs its headers as a JSON object".into());
    };
    Ok(map
        .into_iter()
        .map(|(name, value)| match value {
            Value::String(text) => (name, text),
            other => (name, other.to_string()),
        })
        .collect())
}

fn plain(word: &str, text: String) -> Parsed {
    let arguments = text.trim();
    Ok(match word {
        "say" => Directive::Say(text),
        "think" => Directive::Think(text),
        "redacted" => Directive::Redacted,
        "empty" => Directive::Empty,
        "text-size" => {
            let size = number(arguments, "a number of bytes")? as usize;
            if size > MAX_TEXT_SIZE_BYTES {
                return Err(format!("allows at most {MAX_TEXT_SIZE_BYTES} bytes"));
            }
            Directive::TextSize(size)
        }
        "stop" if arguments == "null" => Directive::Stop(None),
        "stop" if !arguments.is_empty() => Directive::Stop(Some(arguments.to_owned())),
        "stop" => return Err("needs a stop reason".into()),
        "error" => error_of(arguments)?,
        "delay" => Directive::DelayMs(number(arguments, "milliseconds")?),
        "stall" if arguments == "closed" => Directive::StallUntilClosed,
        "stall" => Directive::StallMs(number(arguments, "milliseconds or `closed`")?),
        "hold" if !arguments.is_empty() => Directive::Hold(arguments.to_owned()),
        "hold" => return Err("needs the name of a gate".into()),
        "ping" if arguments.is_empty() => Directive::Ping(1),
        "ping" => Directive::Ping(number(arguments, "a number of pings")?.min(10_000) as u32),
        "cut" => cut_of(arguments)?,
        "chunk" => chunk_of(arguments)?,
        "encode" => Directive::Encode(
            arguments
                .split(',')
                .map(|coding| coding.trim().to_owned())
                .collect(),
        ),
        _ => return Err("is not a directive".into()),
    })
}

fn error_of(arguments: &str) -> Parsed {
    let mut words = arguments.split_whitespace();
    let kind = words.next().ok_or("needs an error type")?.to_owned();
    let mid = match words.next() {
        None | Some("start") => false,
        Some("mid") => true,
        Some(_) => return Err("takes `start` or `mid` after the error type".into()),
    };
    Ok(Directive::Error { kind, mid })
}

fn cut_of(arguments: &str) -> Parsed {
    let (mut place, mut how) = (None, None);
    for word in arguments.split_whitespace() {
        match word {
            "before-head" => place = Some(Place::BeforeHead),
            "mid-block" => place = Some(Place::MidBlock),
            "after-block" => place = Some(Place::AfterBlock),
            "before-stop" => place = Some(Place::BeforeStop),
            "end" => how = Some(How::End),
            "close" => how = Some(How::Close),
            "rst" => how = Some(How::Rst),
            other => return Err(format!("does not know the place `{other}`")),
        }
    }
    if place.is_none() && how.is_none() {
        return Err("needs a place".into());
    }
    Ok(Directive::Cut {
        place: place.unwrap_or(Place::MidBlock),
        how: how.unwrap_or(How::End),
    })
}

fn chunk_of(arguments: &str) -> Parsed {
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let (chars, gap) = match words.as_slice() {
        [chars] => (chars, "0"),
        [chars, "ms", gap] => (chars, *gap),
        _ => return Err("is written `chunk N ms M`".into()),
    };
    let chars = number(chars, "a number of characters")?.max(1) as usize;
    Ok(Directive::Chunk {
        chars,
        gap_ms: number(gap, "milliseconds after `ms`")?,
    })
}
