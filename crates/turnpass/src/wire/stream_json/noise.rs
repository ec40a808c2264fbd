//! Lines that are no records: how many are borne, and what is kept of them.

use super::Noise;
use crate::error::{Error, ErrorCode};

/// Lines of one process that may be no records. One more ends the process with `protocol_record`.
pub(crate) const NOISE_LINES: u32 = 64;
/// How many of them are kept, from the first on.
const KEPT_LINES: usize = 8;
/// What is kept of each, in characters.
const KEPT_CHARS: usize = 200;

/// The lines of one process that were no records. What was kept is told once, when the process is done with, to whoever asked
/// for the program's diagnosis (`-v`); it may hold whatever the CLI or what it started printed, so it is in no error and in no
/// record of a generation.
#[derive(Debug, Default)]
pub(crate) struct NoiseLog {
    lines: u32,
    kept: Vec<String>,
}

impl NoiseLog {
    /// Takes one line. The error is that of a process which wrote too many; a blank line does not count.
    pub(crate) fn take(&mut self, line: &[u8], noise: Noise) -> Option<Error> {
        if noise == Noise::Blank {
            return None;
        }
        self.lines += 1;
        if self.kept.len() < KEPT_LINES {
            let text = String::from_utf8_lossy(line);
            self.kept.push(text.chars().take(KEPT_CHARS).collect());
        }
        (self.lines > NOISE_LINES).then(|| {
            let what = format!(
                "the CLI wrote more than {NOISE_LINES} lines that are no records; `turnpass -v` shows the first of them"
            );
            Error::new(ErrorCode::ProtocolRecord, what)
        })
    }
}

impl Drop for NoiseLog {
    fn drop(&mut self) {
        if self.lines > 0 {
            let (lines, first) = (self.lines, &self.kept);
            tracing::info!(lines, ?first, "the CLI wrote lines that are no records");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_borne_up_to_the_limit_and_blank_ones_for_ever() {
        let mut log = NoiseLog::default();
        for _ in 0..NOISE_LINES {
            assert!(log.take(b"a private word", Noise::NotJson).is_none());
            assert!(log.take(b"  ", Noise::Blank).is_none());
        }
        let error = log.take(b"[1]", Noise::NotARecord).unwrap();
        assert_eq!(error.code(), ErrorCode::ProtocolRecord);
        assert!(!error.to_string().contains("private"), "{error}");
    }

    #[test]
    fn the_first_lines_are_kept_and_cut() {
        let mut log = NoiseLog::default();
        log.take("é".repeat(1_000).as_bytes(), Noise::NotJson);
        log.take(b"\xffbytes", Noise::NotJson);
        for at in 0..NOISE_LINES {
            log.take(format!("line {at}").as_bytes(), Noise::NotJson);
        }
        assert_eq!(log.kept.len(), KEPT_LINES);
        assert_eq!(log.kept[0], "é".repeat(KEPT_CHARS));
        assert_eq!(log.kept[1..3], ["\u{fffd}bytes", "line 0"]);
    }
}
