//! Lines of the CLI's stdout: split at 0x0A and nowhere else, with a cap on each line.
//!
//! A line is one JSON record and can be large: a tool input of 5 MB is one line of 5 MB (CLI 2.1.332). JSON text may hold U+2028, U+0085 or a CR
//! as plain characters, so nothing but 0x0A ends a line, and nothing of a line is trimmed.

use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// Largest line of the CLI that is taken by default, in bytes without its line end.
///
/// A whole tool input or an echoed tool result is one line; caps of 256 KiB and 1 MiB are known to end sessions for good.
pub const MAX_LINE_BYTES: usize = 16 * 1024 * 1024;

/// Largest line that is taken while the CLI is only answered with short synthetic replies (`seeds/relay.md`: 1 MiB).
pub const MAX_SYNTHETIC_LINE_BYTES: usize = 1024 * 1024;

/// Free room that [`LineSplitter::read_buf`] offers: the size of a Linux pipe, so that one read can empty it.
pub const READ_BYTES: usize = 64 * 1024;

/// A buffer that has grown beyond this for one large line is given up once that line is out.
const KEPT_CAPACITY_BYTES: usize = 4 * READ_BYTES;

/// A line was longer than the limit. The splitter takes nothing more, and the process that wrote the line has to be retired.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a line of the CLI is longer than the limit of {limit_bytes} bytes; raise the limit or shorten the request"
)]
pub struct LineTooLong {
    /// The limit.
    pub limit_bytes: usize,
}

/// Splits a byte stream into lines: [`push`](Self::push) or fill [`read_buf`](Self::read_buf), then take lines until there is none, then
/// [`finish`](Self::finish) at the end of the stream.
///
/// A line comes out as a slice of the read buffer, not as a copy. The limit counts for each line alone. Between two calls the splitter holds
/// at most one begun line, so it never grows beyond the limit and one chunk. The first error is the last: afterwards it swallows everything.
#[derive(Debug)]
pub struct LineSplitter {
    limit_bytes: usize,
    buffer: BytesMut,
    /// How much of the buffer is known to hold no 0x0A.
    searched: usize,
    poisoned: bool,
}

impl Default for LineSplitter {
    fn default() -> Self {
        Self::new(MAX_LINE_BYTES)
    }
}

impl LineSplitter {
    /// A splitter that refuses lines of more than `limit_bytes`.
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            limit_bytes,
            buffer: BytesMut::new(),
            searched: 0,
            poisoned: false,
        }
    }

    /// Takes the next bytes of the stream, copying them once.
    pub fn push(&mut self, bytes: &[u8]) {
        if !self.poisoned {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// The buffer, with room for [`READ_BYTES`] more, for a reader that appends to it and so needs no copy at all.
    ///
    /// Only appending is allowed; what stands in it already has been searched.
    pub fn read_buf(&mut self) -> &mut BytesMut {
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_CAPACITY_BYTES {
            self.buffer = BytesMut::new();
        }
        self.buffer.reserve(READ_BYTES);
        &mut self.buffer
    }

    /// The next whole line without its 0x0A, or `None` until there is more. Everything else of the line is kept, blanks and CR too.
    ///
    /// # Errors
    ///
    /// [`LineTooLong`], once, as soon as the line has passed the limit; lines before it have come out. From then on `Ok(None)`.
    pub fn next_line(&mut self) -> Result<Option<Bytes>, LineTooLong> {
        if self.poisoned {
            // A reader may still append to the buffer; it must not grow.
            self.buffer.clear();
            return Ok(None);
        }
        let end = memchr(b'\n', &self.buffer[self.searched..]).map(|at| self.searched + at);
        if end.unwrap_or(self.buffer.len()) > self.limit_bytes {
            self.buffer = BytesMut::new();
            self.poisoned = true;
            return Err(LineTooLong {
                limit_bytes: self.limit_bytes,
            });
        }
        let Some(end) = end else {
            self.searched = self.buffer.len();
            return Ok(None);
        };
        self.searched = 0;
        let mut line = self.buffer.split_to(end + 1);
        line.truncate(end);
        Ok(Some(line.freeze()))
    }

    /// At the end of the stream: the last line if it had no line end. Call it when [`next_line`](Self::next_line) has returned `Ok(None)`.
    pub fn finish(&mut self) -> Option<Bytes> {
        self.searched = 0;
        let rest = std::mem::take(&mut self.buffer);
        (!self.poisoned && !rest.is_empty()).then(|| rest.freeze())
    }

    /// Whether a line that was too long has ended this splitter.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain(splitter: &mut LineSplitter) -> Vec<Bytes> {
        std::iter::from_fn(|| splitter.next_line().unwrap()).collect()
    }

    fn split<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<Bytes> {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk);
            lines.extend(drain(&mut splitter));
        }
        lines.extend(splitter.finish());
        lines
    }

    #[test]
    fn only_0x0a_ends_a_line_and_nothing_is_trimmed() {
        let stream = "a\r\n\n \t\u{2028}\u{85}\x0b\x0c\n{\"x\":\"\\n\"}\nlast ".as_bytes();
        let expected = [
            "a\r",
            "",
            " \t\u{2028}\u{85}\x0b\x0c",
            "{\"x\":\"\\n\"}",
            "last ",
        ];
        assert_eq!(split([stream]), expected);
        assert_eq!(split([b"".as_slice()]), Vec::<Bytes>::new());
        assert_eq!(split([b"a\n".as_slice()]), ["a"]);
    }

    #[test]
    fn bug_001_large_lines_arrive_whole_and_one_too_long_is_one_error() {
        let mut splitter = LineSplitter::default();
        for mebibytes in [3, 12, 16] {
            let line = vec![b'x'; mebibytes * 1024 * 1024];
            for chunk in line.chunks(READ_BYTES) {
                splitter.push(chunk);
                assert_eq!(splitter.next_line(), Ok(None));
            }
            splitter.push(b"\nshort\n");
            assert_eq!(splitter.next_line().unwrap().unwrap(), line);
            assert_eq!(splitter.next_line().unwrap().unwrap(), "short");
        }

        for chunk_bytes in [1, 7, 100] {
            let mut splitter = LineSplitter::new(10);
            let mut errors = Vec::new();
            let mut lines = Vec::new();
            for chunk in b"0123456789\n0123456789a\nafter\n".chunks(chunk_bytes) {
                splitter.push(chunk);
                loop {
                    match splitter.next_line() {
                        Ok(Some(line)) => lines.push(line),
                        Ok(None) => break,
                        Err(error) => errors.push(error),
                    }
                }
            }
            assert_eq!(lines, ["0123456789"]);
            assert_eq!(errors, [LineTooLong { limit_bytes: 10 }]);
            assert!(errors[0].to_string().contains("10 bytes"));
            assert!(splitter.is_poisoned());
            assert_eq!(splitter.finish(), None);
        }
    }

    #[test]
    fn bug_002_the_limit_is_per_line_and_memory_stays_flat() {
        let mut splitter = LineSplitter::new(MAX_SYNTHETIC_LINE_BYTES);
        let line = [b'x'; 2047];
        let mut lines = 0;
        for _ in 0..20_000 {
            let buffer = splitter.read_buf();
            buffer.extend_from_slice(&line);
            buffer.extend_from_slice(b"\n");
            lines += drain(&mut splitter).len();
            assert!(splitter.buffer.capacity() <= 2 * KEPT_CAPACITY_BYTES);
        }
        assert_eq!(lines, 20_000);
    }

    #[test]
    fn memory_is_given_back_after_a_large_line() {
        let mut splitter = LineSplitter::default();
        splitter.push(&vec![b'x'; MAX_LINE_BYTES]);
        assert_eq!(splitter.next_line(), Ok(None));
        splitter.push(b"\n");
        drop(drain(&mut splitter));
        splitter.read_buf();
        assert!(splitter.buffer.capacity() <= KEPT_CAPACITY_BYTES);
    }

    #[test]
    fn a_line_without_an_end_is_bounded() {
        let mut splitter = LineSplitter::new(1000);
        let mut pushed = 0;
        while splitter.next_line().is_ok() {
            splitter.read_buf().extend_from_slice(&[b'x'; 300]);
            pushed += 300;
        }
        assert_eq!(pushed, 1200);
        for _ in 0..100 {
            splitter.read_buf().extend_from_slice(&[b'x'; 300]);
            assert_eq!(splitter.next_line(), Ok(None));
        }
        assert!(splitter.buffer.is_empty());
    }

    #[test]
    fn bug_008_white_space_in_big_lines() {
        let mut line = vec![b'x'; 300 * 1024];
        for mark in (READ_BYTES..line.len() - 3).step_by(READ_BYTES) {
            line[mark - 2..mark + 2].copy_from_slice(b" \t\r ");
        }
        let stream = [&line[..], b"\n"].concat();
        assert_eq!(split(stream.chunks(READ_BYTES)), [line]);
    }

    #[test]
    fn a_line_is_a_slice_of_the_buffer() {
        let mut splitter = LineSplitter::default();
        splitter.push(b"ab\ncd\n");
        let begin = splitter.buffer.as_ptr() as usize;
        let lines = drain(&mut splitter);
        let places: Vec<_> = lines
            .iter()
            .map(|line| line.as_ptr() as usize - begin)
            .collect();
        assert_eq!(places, [0, 3]);
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_lines(stream in prop::collection::vec(prop::sample::select(b"ab\n\r ".to_vec()), 0..80), size in 1..20usize) {
            let expected: Vec<&[u8]> = stream.split_inclusive(|&byte| byte == b'\n').map(|line| line.strip_suffix(b"\n").unwrap_or(line)).collect();
            prop_assert_eq!(split([stream.as_slice()]), expected.clone());
            prop_assert_eq!(split(stream.chunks(size)), expected);
        }
    }
}
