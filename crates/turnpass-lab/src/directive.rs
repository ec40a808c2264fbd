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

mod parser;

use parser::starts_directive;

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
    Some(parser::parse(text))
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
