//! Directives: instructions to the scripted upstream, written inside an ordinary prompt.
//!
//! A client that can only send text through some path (a host, a gateway, the real CLI) can still make the upstream do
//! anything, because the upstream reads `[[word arguments]]` out of the prompt. Parsing is pure, never fails and never
//! panics: what is not understood becomes [`Directive::Invalid`], which the upstream answers with a text that names it.
//!
//! # Grammar
//!
//! ```text
//! text      = { any characters | directive }
//! directive = "[[" word [ " " arguments ] "]]"        word = lower-case letter { lower-case letter | digit | "-" }
//! ```
//!
//! A text argument runs to the next `]]`. Written as a JSON string (`[[say "a ]] b\nc"]]`) it may hold anything.
//! A JSON argument ends where its JSON value ends, so nested arrays may hold `]]`. In a JSON-escaped text
//! (`[[call f {\"a\":1}]]`, as a transcript record holds it) one level of escaping is undone.
//!
//! | directive | effect |
//! |---|---|
//! | `[[say TEXT]]` | a text block |
//! | `[[text-size N]]` | a text block of exactly N bytes, always the same |
//! | `[[think TEXT]]` | a thinking block with a signature that the upstream will recognise |
//! | `[[redacted]]` | a redacted thinking block, recognised likewise |
//! | `[[call NAME JSON]]` | a tool call; several are parallel calls of one message; without JSON the input is `{}` |
//! | `[[raw-call NAME TEXT]]` | a tool call whose input is this text, JSON or not |
//! | `[[block JSON]]` | a content block of any type, started and stopped as given |
//! | `[[empty]]` | no content at all |
//! | `[[stop REASON]]` | the stop reason, any word; `null` for none |
//! | `[[stop-details JSON]]` | `stop_details` beside the stop reason |
//! | `[[usage JSON]]` | fields laid over the simulated usage |
//! | `[[status N JSON]]` | an HTTP error with these headers instead of a message |
//! | `[[error TYPE start]]`, `[[error TYPE mid]]` | an SSE `error` event, after which the stream ends |
//! | `[[delay MS]]` | silence before the response head |
//! | `[[stall MS]]`, `[[stall closed]]` | silence at this place; `closed` lasts until the client leaves |
//! | `[[hold GATE]]` | silence at this place until the test releases the gate |
//! | `[[ping N]]` | N pings at this place |
//! | `[[cut PLACE HOW]]` | PLACE `before-stop`, `after-block`, `mid-block`, `before-head`; HOW `end` (the body ends properly), `close`, `rst`; `[[cut close]]` and `[[cut rst]]` mean mid-block |
//! | `[[chunk N ms M]]` | deltas of N characters, one event every M milliseconds |
//! | `[[encode CODINGS]]` | content codings in order, as `gzip` or `gzip,br` |
//! | `[[then DIRECTIVES]]` | what to do once the results of this message's calls have come; may nest |

use std::fmt;

use serde_json::Value;

/// How deep `[[then ...]]` may nest. Each level is one recursion of the parser; no test needs a tenth of it.
pub const MAX_THEN_DEPTH: usize = 32;

/// The largest text that `[[text-size N]]` makes, in bytes. Larger than any limit a host has to prove.
pub const MAX_TEXT_SIZE_BYTES: usize = 64 << 20;

/// One instruction; the table in the [module](self) says what each does.
#[derive(Clone, Debug, PartialEq)]
pub enum Directive {
    /// `[[say TEXT]]`
    Say(String),
    /// `[[text-size N]]`
    TextSize(usize),
    /// `[[think TEXT]]`
    Think(String),
    /// `[[redacted]]`
    Redacted,
    /// `[[call NAME JSON]]`
    Call {
        /// The tool, with or without its MCP prefix.
        name: String,
        /// The input.
        input: Value,
    },
    /// `[[raw-call NAME TEXT]]`
    RawCall {
        /// The tool, with or without its MCP prefix.
        name: String,
        /// The input text, sent as it is.
        raw: String,
    },
    /// `[[block JSON]]`
    Block(Value),
    /// `[[empty]]`
    Empty,
    /// `[[stop REASON]]`
    Stop(Option<String>),
    /// `[[stop-details JSON]]`
    StopDetails(Value),
    /// `[[usage JSON]]`
    Usage(Value),
    /// `[[status N JSON]]`
    Status {
        /// The HTTP status.
        status: u16,
        /// Extra response headers.
        headers: Vec<(String, String)>,
    },
    /// `[[error TYPE WHERE]]`
    Error {
        /// The error type, as `overloaded_error`.
        kind: String,
        /// In the middle of the stream; otherwise as its first event.
        mid: bool,
    },
    /// `[[delay MS]]`
    DelayMs(u64),
    /// `[[stall MS]]`
    StallMs(u64),
    /// `[[stall closed]]`
    StallUntilClosed,
    /// `[[hold GATE]]`
    Hold(String),
    /// `[[ping N]]`
    Ping(u32),
    /// `[[cut PLACE HOW]]`
    Cut {
        /// Where.
        place: Place,
        /// How the connection ends there.
        how: How,
    },
    /// `[[chunk N ms M]]`
    Chunk {
        /// Characters in each delta.
        chars: usize,
        /// Milliseconds between events.
        gap_ms: u64,
    },
    /// `[[encode CODINGS]]`
    Encode(Vec<String>),
    /// Something in double brackets that is no instruction; the upstream answers with these words.
    Invalid {
        /// The word after the brackets.
        word: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// Where `[[cut]]` cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before the response head: no byte is answered.
    BeforeHead,
    /// Inside the last content block.
    MidBlock,
    /// After the last content block, before `message_delta`.
    AfterBlock,
    /// Before `message_stop`.
    BeforeStop,
}

/// How `[[cut]]` ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The HTTP body ends properly; only the events are missing.
    End,
    /// The connection is closed in the middle of the body.
    Close,
    /// The connection is reset.
    Rst,
}

/// The directives of one text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// What to do at once, in order.
    pub directives: Vec<Directive>,
    /// What to do after the results of each further round of tool calls.
    pub then: Vec<Program>,
}

impl Program {
    /// The directives of each round: `[0]` is at once, `[1]` after the first round of tool results, and so on.
    /// A nested `then` comes directly after the one that holds it.
    pub fn rounds(&self) -> Vec<&[Directive]> {
        let mut rounds = vec![self.directives.as_slice()];
        for program in &self.then {
            rounds.extend(program.rounds());
        }
        rounds
    }
}

/// Whether a text holds a directive.
pub fn has_directives(text: &str) -> bool {
    text.match_indices("[[")
        .any(|(at, _)| starts_directive(&text[at..]))
}

/// Reads the directives of a text; `None` if it holds none.
pub fn parse(text: &str) -> Option<Program> {
    if !has_directives(text) {
        return None;
    }
    let mut parser = Parser { text, at: 0 };
    Some(parser.sequence(0).0)
}

fn starts_directive(text: &str) -> bool {
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

impl fmt::Display for Directive {
    /// Writes the directive so that [`parse`] reads the same one back; texts are written as JSON strings.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let json = |text: &str| Value::from(text).to_string();
        match self {
            Self::Say(text) => write!(f, "[[say {}]]", json(text)),
            Self::TextSize(size) => write!(f, "[[text-size {size}]]"),
            Self::Think(text) => write!(f, "[[think {}]]", json(text)),
            Self::Redacted => f.write_str("[[redacted]]"),
            Self::Call { name, input } => write!(f, "[[call {name} {input}]]"),
            Self::RawCall { name, raw } => write!(f, "[[raw-call {name} {}]]", json(raw)),
            Self::Block(block) => write!(f, "[[block {block}]]"),
            Self::Empty => f.write_str("[[empty]]"),
            Self::Stop(reason) => {
                write!(f, "[[stop {}]]", reason.as_deref().unwrap_or("null"))
            }
            Self::StopDetails(details) => write!(f, "[[stop-details {details}]]"),
            Self::Usage(usage) => write!(f, "[[usage {usage}]]"),
            Self::Status { status, headers } => {
                let headers: serde_json::Map<String, Value> = headers
                    .iter()
                    .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
                    .collect();
                write!(f, "[[status {status} {}]]", Value::Object(headers))
            }
            Self::Error { kind, mid } => {
                write!(f, "[[error {kind} {}]]", if *mid { "mid" } else { "start" })
            }
            Self::DelayMs(ms) => write!(f, "[[delay {ms}]]"),
            Self::StallMs(ms) => write!(f, "[[stall {ms}]]"),
            Self::StallUntilClosed => f.write_str("[[stall closed]]"),
            Self::Hold(gate) => write!(f, "[[hold {gate}]]"),
            Self::Ping(count) => write!(f, "[[ping {count}]]"),
            Self::Cut { place, how } => {
                let place = match place {
                    Place::BeforeHead => "before-head",
                    Place::MidBlock => "mid-block",
                    Place::AfterBlock => "after-block",
                    Place::BeforeStop => "before-stop",
                };
                let how = match how {
                    How::End => "end",
                    How::Close => "close",
                    How::Rst => "rst",
                };
                write!(f, "[[cut {place} {how}]]")
            }
            Self::Chunk { chars, gap_ms } => write!(f, "[[chunk {chars} ms {gap_ms}]]"),
            Self::Encode(codings) => write!(f, "[[encode {}]]", codings.join(",")),
            Self::Invalid { word, .. } => write!(f, "[[{word}]]"),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for directive in &self.directives {
            write!(f, "{directive}")?;
        }
        for then in &self.then {
            write!(f, "[[then {then}]]")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn one(text: &str) -> Directive {
        let program = parse(text).unwrap();
        assert_eq!(program.directives.len(), 1, "{program:?}");
        program.directives[0].clone()
    }

    fn problem(text: &str) -> String {
        match one(text) {
            Directive::Invalid { problem, .. } => problem,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_no_directive_is_text() {
        for text in [
            "",
            "[[",
            "[[1,2]]",
            "[[A b]]",
            "[ [say x]]",
            "a[[b]c]",
            "[[[[",
            "[[-x]]",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert!(has_directives("see [[1]] and [[say x]]"));
    }

    #[test]
    fn texts_run_to_the_brackets_or_are_json_strings() {
        assert_eq!(one("[[say  a b ]]"), Directive::Say(" a b ".into()));
        assert_eq!(one("[[say]]"), Directive::Say(String::new()));
        assert_eq!(
            one(r#"[[say "a ]] \n"]]"#),
            Directive::Say("a ]] \n".into())
        );
        assert_eq!(one(r#"[[say "a" b]]"#), Directive::Say(r#""a" b"#.into()));
        let two = parse("x [[say a]] y\n[[say b]]").unwrap();
        assert_eq!(
            two.directives,
            [Directive::Say("a".into()), Directive::Say("b".into())]
        );
    }

    #[test]
    fn json_ends_where_its_value_ends() {
        let call = |input| Directive::Call {
            name: "f".into(),
            input,
        };
        assert_eq!(one("[[call f]]"), call(json!({})));
        assert_eq!(
            one(r#"[[call f {"a":[1,[2]],"b":"]]"} ]]"#),
            call(json!({"a":[1,[2]],"b":"]]"}))
        );
        assert_eq!(
            one(r#"[[call f {\"a\":\"\\n\"}]]"#),
            call(json!({"a": "\n"}))
        );
        assert_eq!(
            one(r#"[[status 429 {"retry-after":"5"}]]"#),
            Directive::Status {
                status: 429,
                headers: vec![("retry-after".into(), "5".into())]
            }
        );
    }

    #[test]
    fn wrong_arguments_are_named() {
        for (text, part) in [
            ("[[call]]", "name of a tool"),
            ("[[call f {]]", "JSON value"),
            ("[[block 3]]", "JSON object"),
            ("[[status 99]]", "200 to 599"),
            ("[[status x]]", "HTTP status"),
            ("[[stall soon]]", "milliseconds"),
            ("[[cut here]]", "`here`"),
            ("[[cut]]", "place"),
            ("[[chunk 5 s 3]]", "chunk N ms M"),
            ("[[error]]", "error type"),
            ("[[error x late]]", "start"),
            ("[[text-size 999999999999]]", "at most"),
            ("[[say no end", "no closing"),
            ("[[call f {\"a\":1}", "no closing"),
            ("[[then [[dance]]", "no closing"),
            ("[[dance]]", "not a directive"),
        ] {
            let problem = problem(text);
            assert!(problem.contains(part), "{text}: {problem}");
        }
    }

    #[test]
    fn thens_nest_and_follow_each_other() {
        let program =
            parse("[[say 0]][[then [[say 1]] [[then [[say 2]]]]]][[then [[say 3]]]]").unwrap();
        let rounds: Vec<String> = program
            .rounds()
            .into_iter()
            .map(|round| round.iter().map(ToString::to_string).collect())
            .collect();
        assert_eq!(
            rounds,
            [
                r#"[[say "0"]]"#,
                r#"[[say "1"]]"#,
                r#"[[say "2"]]"#,
                r#"[[say "3"]]"#
            ]
        );
        let deep = "[[then ".repeat(10_000);
        assert!(parse(&deep).is_some());
    }

    fn any_directive() -> impl Strategy<Value = Directive> {
        let word = "[a-z][a-z0-9_]{0,8}";
        let json = prop_oneof![
            any::<i64>().prop_map(Value::from),
            ".{0,12}".prop_map(Value::from),
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3), 0..3)
                .prop_map(Value::from),
        ];
        let object = prop::collection::btree_map(word, json, 0..4)
            .prop_map(|map| Value::Object(map.into_iter().collect()));
        let place = prop::sample::select(vec![
            Place::BeforeHead,
            Place::MidBlock,
            Place::AfterBlock,
            Place::BeforeStop,
        ]);
        let how = prop::sample::select(vec![How::End, How::Close, How::Rst]);
        prop_oneof![
            "(?s).{0,30}".prop_map(Directive::Say),
            "(?s).{0,30}".prop_map(Directive::Think),
            Just(Directive::Redacted),
            Just(Directive::Empty),
            Just(Directive::StallUntilClosed),
            (0..MAX_TEXT_SIZE_BYTES).prop_map(Directive::TextSize),
            (word, object.clone()).prop_map(|(name, input)| Directive::Call { name, input }),
            (word, "(?s).{0,30}").prop_map(|(name, raw)| Directive::RawCall { name, raw }),
            object.clone().prop_map(Directive::Block),
            object.clone().prop_map(Directive::Usage),
            object.prop_map(Directive::StopDetails),
            word.prop_map(|word| Directive::Stop((word != "null").then_some(word))),
            (
                200u16..600,
                prop::collection::btree_map(word, ".{0,9}", 0..3)
            )
                .prop_map(|(status, headers)| Directive::Status {
                    status,
                    headers: headers.into_iter().collect()
                }),
            (word, any::<bool>()).prop_map(|(kind, mid)| Directive::Error { kind, mid }),
            any::<u64>().prop_map(Directive::DelayMs),
            any::<u64>().prop_map(Directive::StallMs),
            word.prop_map(Directive::Hold),
            (0u32..10_000).prop_map(Directive::Ping),
            (place, how).prop_map(|(place, how)| Directive::Cut { place, how }),
            (1usize..999, any::<u64>())
                .prop_map(|(chars, gap_ms)| Directive::Chunk { chars, gap_ms }),
            prop::collection::vec("[a-z]{1,6}", 1..3).prop_map(Directive::Encode),
        ]
    }

    fn any_program() -> impl Strategy<Value = Program> {
        let leaf = prop::collection::vec(any_directive(), 1..4).prop_map(|directives| Program {
            directives,
            then: Vec::new(),
        });
        leaf.prop_recursive(3, 12, 3, |inner| {
            let directives = prop::collection::vec(any_directive(), 0..3);
            (directives, prop::collection::vec(inner, 1..3))
                .prop_map(|(directives, then)| Program { directives, then })
        })
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(program in any_program(), before in "[a-z \\n]{0,9}") {
            prop_assert_eq!(parse(&format!("{before}{program}{before}")), Some(program));
        }

        #[test]
        fn any_text_is_read_without_a_panic(
            text in r#"(\[\[|\]\]|say|call|then|status| |"|\{|\}|:|\\|[a-z]|é|\n){0,60}"#,
        ) {
            if let Some(program) = parse(&text) {
                prop_assert!(!program.rounds().is_empty());
            } else {
                prop_assert!(!has_directives(&text));
            }
        }
    }
}
