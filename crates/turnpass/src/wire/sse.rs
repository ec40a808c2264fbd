//! Server-sent events: an incremental [`Parser`] and [`encode`].
//!
//! The parser follows the event-stream rules of the HTML standard (section 9.2.6) that a Messages stream can meet: line ends LF, CRLF
//! and CR, a byte order mark at the start, comments, `event:`, any number of `data:` lines, and an event that is dropped when the
//! stream ends before its blank line. `id:` and `retry:` steer a browser's reconnection, which a generation must not do, so they are ignored.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memchr2;

/// Largest event that a [`Parser`] accepts by default, in bytes of name, data and the line that is being read.
///
/// A tool input arrives in small deltas, but redacted thinking and server tool results come as one event; 16 MiB is also the cap on
/// a line of the CLI's stdout, so what one side can carry the other can too.
pub const MAX_EVENT_BYTES: usize = 16 * 1024 * 1024;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// One dispatched event.
///
/// `data` is a slice of the chunk it came in when the event has one `data:` line inside one chunk, and keeps that chunk alive; otherwise it
/// is a buffer of its own. Both fields are bytes as received: nothing has checked that they are UTF-8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Value of the last `event:` line; empty if there was none.
    pub name: Bytes,
    /// Values of the `data:` lines, joined with LF.
    pub data: Bytes,
}

impl Event {
    /// The event's name, or `""` when it has none or is not UTF-8.
    ///
    /// For a Messages stream the name only repeats the `type` inside the data, which is what decides.
    pub fn name_str(&self) -> &str {
        std::str::from_utf8(&self.name).unwrap_or_default()
    }
}

/// Why a [`Parser`] gave up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SseError {
    /// One event is larger than the limit.
    #[error("a server-sent event is larger than the limit of {limit_bytes} bytes")]
    EventTooLarge {
        /// The limit that was exceeded.
        limit_bytes: usize,
    },
}

/// `data:` so far. One line stays a slice of its chunk, further lines force a copy.
#[derive(Debug, Default)]
enum Data {
    #[default]
    None,
    One(Bytes),
    Joined(BytesMut),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::None => 0,
            Data::One(line) => line.len(),
            Data::Joined(lines) => lines.len(),
        }
    }

    fn add(&mut self, line: Bytes) {
        *self = match std::mem::take(self) {
            Data::None => Data::One(line),
            Data::One(first) => {
                let mut lines = BytesMut::with_capacity(first.len() + 1 + line.len());
                lines.extend_from_slice(&first);
                lines.extend_from_slice(b"\n");
                lines.extend_from_slice(&line);
                Data::Joined(lines)
            }
            Data::Joined(mut lines) => {
                lines.extend_from_slice(b"\n");
                lines.extend_from_slice(&line);
                Data::Joined(lines)
            }
        };
    }
}

/// Incremental event-stream parser: [`push`](Self::push) a chunk, then call [`next_event`](Self::next_event) until it returns `Ok(None)`.
///
/// Chunk boundaries may fall anywhere, also inside a CRLF or a character. Between two chunks it holds at most one event and one begun
/// line, together no more than the limit. The first error is the last: afterwards the parser swallows everything.
#[derive(Debug)]
pub struct Parser {
    limit_bytes: usize,
    chunk: Bytes,
    begun_line: BytesMut,
    /// The last line ended in CR, so an LF that comes next belongs to it.
    after_cr: bool,
    at_start: bool,
    name: Bytes,
    data: Data,
    poisoned: bool,
}

impl Default for Parser {
    fn default() -> Self {
        Self::new(MAX_EVENT_BYTES)
    }
}

impl Parser {
    /// A parser that refuses events of more than `limit_bytes`.
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            limit_bytes,
            chunk: Bytes::new(),
            begun_line: BytesMut::new(),
            after_cr: false,
            at_start: true,
            name: Bytes::new(),
            data: Data::None,
            poisoned: false,
        }
    }

    /// Takes the next chunk of the stream.
    ///
    /// Meant to be called when [`next_event`](Self::next_event) has returned `Ok(None)`; a chunk pushed earlier is appended to the unread rest by copying.
    pub fn push(&mut self, chunk: Bytes) {
        if self.poisoned {
            return;
        }
        if self.chunk.is_empty() {
            self.chunk = chunk;
        } else if !chunk.is_empty() {
            let mut both = BytesMut::with_capacity(self.chunk.len() + chunk.len());
            both.extend_from_slice(&self.chunk);
            both.extend_from_slice(&chunk);
            self.chunk = both.freeze();
        }
    }

    /// The next whole event, or `None` until more is pushed.
    ///
    /// # Errors
    ///
    /// [`SseError::EventTooLarge`], once. From then on `Ok(None)`.
    pub fn next_event(&mut self) -> Result<Option<Event>, SseError> {
        while let Some(line) = self.next_line()? {
            if line.is_empty() {
                if let Some(event) = self.dispatch() {
                    return Ok(Some(event));
                }
            } else {
                self.field(line);
            }
        }
        Ok(None)
    }

    /// Whether the stream, if it ended now, would lose a begun event or line.
    ///
    /// By the standard such an event is dropped; a caller that cares tells a cut stream from a finished one by it.
    pub fn has_partial(&self) -> bool {
        let in_event = !self.name.is_empty() || !matches!(self.data, Data::None);
        in_event || !self.begun_line.is_empty() || !self.chunk.is_empty()
    }

    /// Whether an error has ended this parser.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    fn next_line(&mut self) -> Result<Option<Bytes>, SseError> {
        if self.after_cr && !self.chunk.is_empty() {
            self.after_cr = false;
            if self.chunk[0] == b'\n' {
                self.chunk.advance(1);
            }
        }
        let end = memchr2(b'\n', b'\r', &self.chunk);
        let new_bytes = end.unwrap_or(self.chunk.len());
        let kept = self.name.len() + self.data.len() + self.begun_line.len();
        if kept + new_bytes > self.limit_bytes {
            return Err(self.poison());
        }
        let Some(end) = end else {
            self.begun_line.extend_from_slice(&self.chunk);
            self.chunk = Bytes::new();
            return Ok(None);
        };
        self.after_cr = self.chunk[end] == b'\r';
        let mut line = self.chunk.split_to(end);
        self.chunk.advance(1);
        if !self.begun_line.is_empty() {
            self.begun_line.extend_from_slice(&line);
            line = std::mem::take(&mut self.begun_line).freeze();
        }
        if self.at_start {
            self.at_start = false;
            if line.starts_with(BYTE_ORDER_MARK) {
                line.advance(BYTE_ORDER_MARK.len());
            }
        }
        Ok(Some(line))
    }

    fn field(&mut self, mut line: Bytes) {
        let (field, value) = match memchr::memchr(b':', &line) {
            Some(0) => return,
            Some(colon) => {
                let field = line.split_to(colon);
                line.advance(1);
                if line.first() == Some(&b' ') {
                    line.advance(1);
                }
                (field, line)
            }
            None => (line, Bytes::new()),
        };
        match field.as_ref() {
            b"data" => self.data.add(value),
            b"event" => self.name = value,
            _ => {}
        }
    }

    fn dispatch(&mut self) -> Option<Event> {
        let name = std::mem::take(&mut self.name);
        match std::mem::take(&mut self.data) {
            Data::None => None,
            Data::One(data) => Some(Event { name, data }),
            Data::Joined(data) => Some(Event {
                name,
                data: data.freeze(),
            }),
        }
    }

    fn poison(&mut self) -> SseError {
        let limit_bytes = self.limit_bytes;
        *self = Self::new(limit_bytes);
        self.poisoned = true;
        SseError::EventTooLarge { limit_bytes }
    }
}

/// Appends one event to `out`: an `event:` line unless `name` is empty, one `data:` line per line of `data`, and the blank line.
///
/// Line ends inside `data` (LF, CRLF, CR) arrive at the reader as LF, since the format has no way to carry them otherwise; JSON
/// has none. A name ends at its first line end. The CLI needs the `event:` line (2.1.332, 2.1.287, 2.1.283).
pub fn encode(out: &mut Vec<u8>, name: &str, data: &[u8]) {
    let name = name.split(['\n', '\r']).next().unwrap_or_default();
    if !name.is_empty() {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.push(b'\n');
    }
    let mut rest = data;
    loop {
        out.extend_from_slice(b"data: ");
        let Some(end) = memchr2(b'\n', b'\r', rest) else {
            out.extend_from_slice(rest);
            break;
        };
        out.extend_from_slice(&rest[..end]);
        out.push(b'\n');
        let width = if rest[end..].starts_with(b"\r\n") {
            2
        } else {
            1
        };
        rest = &rest[end + width..];
    }
    out.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse_chunks<'a>(
        parser: &mut Parser,
        chunks: impl IntoIterator<Item = &'a [u8]>,
    ) -> Vec<(String, String)> {
        let mut events = Vec::new();
        for chunk in chunks {
            parser.push(Bytes::copy_from_slice(chunk));
            while let Some(event) = parser.next_event().unwrap() {
                let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
                events.push((text(&event.name), text(&event.data)));
            }
        }
        events
    }

    fn parse(stream: &str) -> Vec<(String, String)> {
        parse_chunks(&mut Parser::default(), [stream.as_bytes()])
    }

    fn event(name: &str, data: &str) -> (String, String) {
        (name.to_owned(), data.to_owned())
    }

    #[test]
    fn every_line_end_closes_a_line() {
        for end in ["\n", "\r\n", "\r"] {
            let stream = format!("event: a{end}data: 1{end}{end}data: 2{end}{end}");
            assert_eq!(parse(&stream), [event("a", "1"), event("", "2")], "{end:?}");
        }
    }

    #[test]
    fn rules_of_the_standard() {
        assert_eq!(
            parse("data: a\ndata:  b\ndata\ndata:\n\n"),
            [event("", "a\n b\n\n")]
        );
        assert_eq!(
            parse("\u{feff}data: a\n\n\u{feff}data: b\n\ndata: c\n\n"),
            [event("", "a"), event("", "c")]
        );
        assert_eq!(
            parse(": comment\ndata: a\n:\nid: 7\nretry: 5\nother: x\n\n"),
            [event("", "a")]
        );
        assert_eq!(
            parse("data\n\n"),
            [event("", "")],
            "an empty data line is an event"
        );
        assert_eq!(
            parse("event: lost\n\ndata: a\n\n"),
            [event("", "a")],
            "a name does not outlive its event"
        );
        assert_eq!(parse("event: a\nevent: b\ndata:x\n\n"), [event("b", "x")]);
    }

    #[test]
    fn an_event_without_its_blank_line_is_not_dispatched_but_seen() {
        let mut parser = Parser::default();
        assert_eq!(
            parse_chunks(&mut parser, [b"data: a\n\ndata: b\n".as_slice()]),
            [event("", "a")]
        );
        assert!(parser.has_partial());
        let mut parser = Parser::default();
        assert_eq!(
            parse_chunks(&mut parser, [b"data: a\n\n".as_slice()]),
            [event("", "a")]
        );
        assert!(!parser.has_partial());
    }

    #[test]
    fn an_event_inside_one_chunk_is_not_copied() {
        let chunk = Bytes::from_static(b"event: e\ndata: payload\n\n");
        let mut parser = Parser::default();
        parser.push(chunk.clone());
        let data = parser.next_event().unwrap().unwrap().data;
        assert_eq!(data.as_ptr(), chunk[15..].as_ptr());
    }

    #[test]
    fn the_limit_counts_per_event_and_errs_once() {
        let mut parser = Parser::new(16);
        for _ in 0..1000 {
            assert_eq!(
                parse_chunks(&mut parser, [b"data: 0123456789\n\n".as_slice()]).len(),
                1
            );
        }
        for stream in [
            "data: 0123456789a\n",
            "data: 01234\ndata: 0123456\n",
            ": 012345678901234\n",
        ] {
            let mut parser = Parser::new(16);
            parser.push(Bytes::from_static(b"data: ok\n\n"));
            parser.push(Bytes::copy_from_slice(stream.as_bytes()));
            assert!(parser.next_event().unwrap().is_some());
            assert_eq!(
                parser.next_event(),
                Err(SseError::EventTooLarge { limit_bytes: 16 }),
                "{stream}"
            );
            parser.push(Bytes::from_static(b"\ndata: late\n\n"));
            assert_eq!(parser.next_event(), Ok(None));
            assert!(parser.is_poisoned());
        }
    }

    #[test]
    fn a_line_that_never_ends_is_bounded() {
        let mut parser = Parser::new(1024);
        let mut pushed = 0;
        let error = loop {
            parser.push(Bytes::from_static(&[b'x'; 100]));
            pushed += 100;
            if let Err(error) = parser.next_event() {
                break error;
            }
        };
        assert_eq!(error, SseError::EventTooLarge { limit_bytes: 1024 });
        assert_eq!(pushed, 1100);
    }

    /// Streams made of the pieces that the rules care about, so that cuts fall between them often.
    fn any_stream() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop::sample::select(vec![
            "data",
            "event",
            ":",
            " ",
            "\n",
            "\r",
            "\r\n",
            "\n\n",
            "\u{feff}",
            "data: {\"a\":1}\n",
            "event: x\r\n",
            "é😀",
            "id: 1\n",
        ]);
        prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat().into_bytes())
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(stream in any_stream(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20)) {
            let whole = parse_chunks(&mut Parser::default(), [stream.as_slice()]);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            cuts.push(stream.len());
            let mut from = 0;
            let chunks = cuts.iter().map(|&to| { let chunk = &stream[from..to]; from = to; chunk }).collect::<Vec<_>>();
            prop_assert_eq!(&parse_chunks(&mut Parser::default(), chunks), &whole);
            prop_assert_eq!(&parse_chunks(&mut Parser::default(), stream.chunks(1)), &whole);
        }

        #[test]
        fn what_is_encoded_is_what_is_read(name in "[a-z_ ]{0,12}", data in "(\\PC|\n|\r|\r\n| ){0,40}") {
            let mut out = Vec::new();
            encode(&mut out, &name, data.as_bytes());
            let events = parse_chunks(&mut Parser::default(), [out.as_slice()]);
            let normalised = data.replace("\r\n", "\n").replace('\r', "\n");
            prop_assert_eq!(events, vec![(name, normalised)]);
        }
    }
}
