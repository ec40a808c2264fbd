//! Standard error: always drained, a bounded tail kept.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of standard error that are kept, the last ones; the pool system's bound. Enough for a stack trace, little
/// enough to keep for every process.
pub const STDERR_TAIL_BYTES: usize = 8 * 1024;

/// Read at once; half a pipe's usual capacity.
const READ_BYTES: usize = 32 * 1024;

/// The last bytes that a process wrote to standard error.
#[derive(Clone, Debug, Default)]
pub(super) struct StderrTail(Arc<Mutex<VecDeque<u8>>>);

impl StderrTail {
    fn push(&self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(STDERR_TAIL_BYTES)..];
        let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over = (tail.len() + bytes.len()).saturating_sub(STDERR_TAIL_BYTES);
        tail.drain(..over);
        tail.extend(bytes);
    }

    /// The tail as text; bytes that are no UTF-8 become U+FFFD.
    pub(super) fn text(&self) -> String {
        let tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (head, rest) = tail.as_slices();
        String::from_utf8_lossy(&[head, rest].concat()).into_owned()
    }

    /// Reads until the end or a read error, so that the process never waits for a full pipe.
    pub(super) async fn drain(self, mut source: impl AsyncRead + Unpin) {
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(count @ 1..) = source.read(&mut buffer).await {
            self.push(&buffer[..count]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keeps_exactly_the_last_bytes(chunks in proptest::collection::vec(proptest::collection::vec(b'a'..=b'z', 0..9_000), 0..6)) {
            let tail = StderrTail::default();
            for chunk in &chunks {
                tail.push(chunk);
            }
            let all = chunks.concat();
            let wanted = &all[all.len().saturating_sub(STDERR_TAIL_BYTES)..];
            let text = tail.text();
            prop_assert_eq!(text.as_bytes(), wanted);
        }
    }
}
