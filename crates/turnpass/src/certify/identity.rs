//! Which program file a certificate speaks of: the CLI's version and a digest of the file.
//!
//! The version alone is not enough, since a file can be replaced or patched under the same version; the time of the last
//! change is not, since npm gives every file the same one. The whole file is about 230 MB and would take up to a second to
//! read, while a transport looks its certificate up at each start, so samples are read: the head, where a linker puts the
//! build's id; the tail, where the CLI's packer puts the table of what it appended; and [`SAMPLES`] pieces evenly between
//! them, with size and time. It tells whether a file changed. It is no defence against somebody who may write it.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cli::version::Version;

/// Bytes of each sample; a multiple of the pages that the system reads anyway.
pub const SAMPLE_BYTES: u64 = 64 * 1024;

/// Samples in all: 4 MiB, which a warm cache gives in about 4 ms.
pub const SAMPLES: u64 = 64;

/// One program file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    version: String,
    digest: String,
}

impl Identity {
    /// The identity of a program of this version. Links are followed. Blocks for a local read of a few MiB.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn of(version: Version, program: &Path) -> io::Result<Self> {
        let mut file = File::open(program)?;
        let state = file.metadata()?;
        let bytes = state.len();
        let modified = state.modified().ok();
        let modified = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let mut sum = Sha256::new();
        sum.update(bytes.to_le_bytes());
        sum.update(modified.unwrap_or_default().as_nanos().to_le_bytes());
        let mut piece = Vec::new();
        for at in places(bytes) {
            file.seek(SeekFrom::Start(at))?;
            piece.clear();
            (&mut file).take(SAMPLE_BYTES).read_to_end(&mut piece)?;
            sum.update(&piece);
        }
        let digest = sum.finalize();
        Ok(Self {
            version: version.to_string(),
            digest: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        })
    }

    /// The CLI's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The digest of the file, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// Where the samples of a file begin. A small file is covered whole.
fn places(bytes: u64) -> Vec<u64> {
    if bytes <= SAMPLES * SAMPLE_BYTES {
        return (0..bytes.div_ceil(SAMPLE_BYTES))
            .map(|n| n * SAMPLE_BYTES)
            .collect();
    }
    let last = bytes - SAMPLE_BYTES;
    (0..SAMPLES)
        .map(|n| last / (SAMPLES - 1) * n)
        .chain([last])
        .collect()
}

/// For tests of what holds an identity.
#[cfg(test)]
pub(super) fn test_identity() -> Identity {
    Identity {
        version: "2.1.332".to_owned(),
        digest: "00".repeat(32),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    const VERSION: Version = Version::new(2, 1, 332);

    #[test]
    fn any_change_of_version_size_time_or_sampled_bytes_is_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("claude");
        let large = vec![7_u8; (SAMPLES * SAMPLE_BYTES * 3) as usize];
        let time = UNIX_EPOCH + Duration::from_secs(500_000_000);
        let write = |bytes: &[u8]| {
            fs::write(&program, bytes).unwrap();
            let file = File::options().write(true).open(&program).unwrap();
            file.set_modified(time).unwrap();
            Identity::of(VERSION, &program).unwrap()
        };
        let known = write(&large);
        assert_eq!(write(&large), known, "the same file is the same");
        assert_eq!(known.digest().len(), 64);
        let mut changed = large.clone();
        for at in [0, changed.len() - 1] {
            changed[at] ^= 1;
            assert_ne!(write(&changed), known, "byte {at}");
            changed[at] ^= 1;
        }
        assert_ne!(write(&large[1..]), known, "size");
        write(&large);
        assert_ne!(
            Identity::of(Version::new(2, 1, 331), &program).unwrap(),
            known
        );
        let file = File::options().write(true).open(&program).unwrap();
        file.set_modified(time + Duration::from_secs(1)).unwrap();
        assert_ne!(Identity::of(VERSION, &program).unwrap(), known, "time");
        assert!(Identity::of(VERSION, &dir.path().join("absent")).is_err());
    }

    #[test]
    fn a_small_file_is_read_whole_and_a_large_one_from_end_to_end() {
        for bytes in [0, 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, SAMPLES * SAMPLE_BYTES] {
            let places = places(bytes);
            assert_eq!(places.len() as u64, bytes.div_ceil(SAMPLE_BYTES), "{bytes}");
        }
        let bytes = 230 * 1024 * 1024 + 17;
        let places = places(bytes);
        assert_eq!((places[0], places.len() as u64), (0, SAMPLES + 1));
        assert_eq!(places.last(), Some(&(bytes - SAMPLE_BYTES)));
        assert!(places.is_sorted());
    }
}
