//! Reading HTTP/1.1 requests: functions over buffers.

use bytes::{Buf as _, BytesMut};

/// The largest request head, in bytes. Clients send a few kilobytes; this leaves room for absurd header tests.
pub(crate) const MAX_HEAD_BYTES: usize = 256 << 10;

/// The request head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) http_1_0: bool,
}

/// How long the request's body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Exactly(u64),
    Chunked,
}

/// A request that cannot be read; the reason in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadRequest(pub(crate) &'static str);

/// Takes a whole head off the front of a buffer; `None` if it is not whole yet.
pub(crate) fn take_head(buffer: &mut BytesMut) -> Result<Option<Head>, BadRequest> {
    while buffer.starts_with(b"\r\n") {
        buffer.advance(2);
    }
    let end = buffer.windows(4).position(|window| window == b"\r\n\r\n");
    let Some(end) = end.filter(|end| *end <= MAX_HEAD_BYTES) else {
        if buffer.len() > MAX_HEAD_BYTES {
            return Err(BadRequest("the request head is too large"));
        }
        return Ok(None);
    };
    let bytes = buffer.split_to(end + 4);
    // Bytes above 0x7f are legal in header values and have no encoding; Latin-1 keeps each of them.
    let text: String = bytes[..end].iter().map(|byte| char::from(*byte)).collect();
    let mut lines = text.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (first.next(), first.next(), first.next(), first.next())
    else {
        return Err(BadRequest("the request line is malformed"));
    };
    if method.is_empty() || !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return Err(BadRequest("the request line is malformed"));
    }
    let mut headers = Vec::new();
    for line in lines {
        let (name, value) = line
            .split_once(':')
            .filter(|(name, _)| !name.is_empty() && !name.contains([' ', '\t']))
            .ok_or(BadRequest("a header line is malformed"))?;
        headers.push((name.to_owned(), value.trim_matches([' ', '\t']).to_owned()));
    }
    Ok(Some(Head {
        method: method.to_owned(),
        target: target.to_owned(),
        headers,
        http_1_0: version == "HTTP/1.0",
    }))
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    pub(crate) fn length(&self) -> Result<Length, BadRequest> {
        if let Some(coding) = self.header("transfer-encoding") {
            return match coding.trim().eq_ignore_ascii_case("chunked") {
                true => Ok(Length::Chunked),
                false => Err(BadRequest("the transfer-encoding is not chunked")),
            };
        }
        match self.header("content-length") {
            None => Ok(Length::Exactly(0)),
            Some(text) => text
                .parse()
                .map(Length::Exactly)
                .map_err(|_| BadRequest("the content-length is not a number")),
        }
    }

    pub(crate) fn keeps_alive(&self) -> bool {
        let connection = self.header("connection").unwrap_or_default();
        let has = |word: &str| {
            connection
                .split(',')
                .any(|part| part.trim().eq_ignore_ascii_case(word))
        };
        if self.http_1_0 {
            has("keep-alive")
        } else {
            !has("close")
        }
    }
}

/// The first header of a name, in any case.
pub(crate) fn find<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers
        .iter()
        .find(|(each, _)| each.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.as_str())
}

/// Undoes `transfer-encoding: chunked` as bytes come in.
#[derive(Debug, Default)]
pub(crate) struct Dechunk {
    left: u64,
    in_trailers: bool,
    /// The current chunk's data has been read and its line end has not.
    after_data: bool,
}

impl Dechunk {
    /// Moves body bytes from `input` to the end of `output`; true once the last chunk and the trailers are through.
    pub(crate) fn step(
        &mut self,
        input: &mut BytesMut,
        mut output: impl FnMut(&[u8]),
    ) -> Result<bool, BadRequest> {
        loop {
            if self.left > 0 {
                let take = usize::try_from(self.left)
                    .unwrap_or(usize::MAX)
                    .min(input.len());
                if take == 0 {
                    return Ok(false);
                }
                output(&input[..take]);
                input.advance(take);
                self.left -= take as u64;
                self.after_data = self.left == 0;
                continue;
            }
            let Some(end) = input.windows(2).position(|window| window == b"\r\n") else {
                return match input.len() > MAX_HEAD_BYTES {
                    true => Err(BadRequest("a chunk head is too long")),
                    false => Ok(false),
                };
            };
            let line = input.split_to(end + 2);
            let line = &line[..end];
            if self.after_data {
                if !line.is_empty() {
                    return Err(BadRequest("a chunk is longer than its size"));
                }
                self.after_data = false;
            } else if self.in_trailers {
                if line.is_empty() {
                    return Ok(true);
                }
            } else {
                self.left = chunk_size(line)?;
                self.in_trailers = self.left == 0;
            }
        }
    }
}

fn chunk_size(line: &[u8]) -> Result<u64, BadRequest> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
    std::str::from_utf8(digits)
        .ok()
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .ok_or(BadRequest("a chunk size is malformed"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_head_is_taken_whole_or_not_at_all() {
        let text = b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\nX-A:  b c \r\n\r\nbody";
        let whole = text.len() - 4;
        for cut in 0..whole {
            assert_eq!(take_head(&mut BytesMut::from(&text[..cut])), Ok(None));
        }
        let mut buffer = BytesMut::from(&text[..]);
        let head = take_head(&mut buffer).unwrap().unwrap();
        assert_eq!(head.method, "POST");
        assert_eq!(head.target, "/v1/messages?beta=true");
        assert_eq!(head.header("x-a"), Some("b c"));
        assert_eq!(&buffer[..], b"body");
    }

    #[test]
    fn malformed_requests_are_named() {
        for text in [
            "GET /\r\n\r\n",
            "GET / HTTP/2\r\n\r\n",
            "GET / HTTP/1.1\r\nx y: z\r\n\r\n",
        ] {
            assert!(take_head(&mut BytesMut::from(text)).is_err(), "{text}");
        }
        let huge = vec![b'a'; MAX_HEAD_BYTES + 1];
        assert!(take_head(&mut BytesMut::from(&huge[..])).is_err());
    }

    proptest! {
        #[test]
        fn chunks_cut_anywhere_give_the_same_body(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            piece in 1usize..9,
        ) {
            let mut wire = Vec::new();
            for chunk in &chunks {
                wire.extend_from_slice(format!("{:x};a=b\r\n", chunk.len()).as_bytes());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\nTrailer: x\r\n\r\n");
            let (mut dechunk, mut input, mut body) = (Dechunk::default(), BytesMut::new(), Vec::new());
            let mut done = false;
            for part in wire.chunks(piece) {
                prop_assert!(!done);
                input.extend_from_slice(part);
                done = dechunk.step(&mut input, |bytes| body.extend_from_slice(bytes)).unwrap();
            }
            prop_assert!(done);
            prop_assert!(input.is_empty());
            prop_assert_eq!(body, chunks.concat());
        }
    }
}
