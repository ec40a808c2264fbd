//! Certificates kept in the state directory: one private file that several processes read and write.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::certificate::Certificate;
use super::identity::Identity;
use crate::cli::version::Version;
use crate::error::Result;
use crate::limits::state_file::StateFile;

/// Its name in the state directory.
pub const CERTIFICATES_FILE: &str = "certificates.json";

/// Most certificates that are kept, newest last. A person has one CLI; the CLI keeps a few older versions beside it.
pub const KEPT: usize = 16;

/// The certificates of this machine.
#[derive(Clone, Debug)]
pub struct Certificates {
    file: StateFile,
}

#[derive(Default, Serialize, Deserialize)]
struct Kept {
    // As values, so that one certificate of a later build does not hide the others.
    certificates: Vec<serde_json::Value>,
}

impl Certificates {
    /// Those that are kept in `state_dir`.
    pub fn new(state_dir: &Path) -> Self {
        Self {
            file: StateFile::new(state_dir, CERTIFICATES_FILE),
        }
    }

    /// The certificate of a program, if it was certified as it is now. It reads the kept file and, where that has one of this
    /// version, samples of the program; it starts nothing and writes nothing; whatever cannot be read is no certificate.
    pub fn of(&self, version: Version, program: &Path) -> Option<Certificate> {
        let number = version.to_string();
        let mut kept = self.kept().filter(|one| one.identity().version() == number);
        let first = kept.next()?;
        let identity = Identity::of(version, program).ok()?;
        std::iter::once(first)
            .chain(kept)
            .find(|one| *one.identity() == identity)
    }

    /// The certificate of this identity.
    pub fn find(&self, identity: &Identity) -> Option<Certificate> {
        self.kept().find(|one| one.identity() == identity)
    }

    /// Those of this build's form, newest first.
    fn kept(&self) -> impl Iterator<Item = Certificate> + use<> {
        let kept: Kept = self.file.read().ok().flatten().unwrap_or_default();
        let certificates = kept.certificates.into_iter().rev();
        certificates
            .filter_map(|value| serde_json::from_value::<Certificate>(value).ok())
            .filter(Certificate::is_current)
    }

    /// Keeps a certificate in place of an earlier one of the same identity. Blocks for a lock and a local write.
    ///
    /// # Errors
    ///
    /// `internal` that names the file when it cannot be read or written.
    pub fn keep(&self, certificate: &Certificate) -> Result<()> {
        let identity = serde_json::to_value(certificate.identity()).unwrap_or_default();
        let value = serde_json::to_value(certificate).unwrap_or_default();
        self.file.change(|kept: &mut Kept| {
            kept.certificates.retain(|one| one["identity"] != identity);
            kept.certificates.push(value);
            let surplus = kept.certificates.len().saturating_sub(KEPT);
            kept.certificates.drain(..surplus);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::certify::{Check, Outcome, Verdict};

    fn certificate(identity: Identity, verdict: Verdict) -> Certificate {
        let check = Check::FramesOrder;
        let outcome = Outcome {
            check,
            verdict,
            took_ms: 3,
        };
        Certificate::new(identity, vec![outcome])
    }

    fn program(dir: &Path, text: &str) -> Identity {
        let path = dir.join("claude");
        fs::write(&path, text).unwrap();
        Identity::of(Version::new(2, 1, 332), &path).unwrap()
    }

    #[test]
    fn a_kept_certificate_is_found_by_its_program_and_by_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let kept = Certificates::new(&state);
        let first = program(dir.path(), "one");
        assert_eq!(kept.find(&first), None);
        assert!(!state.exists(), "a look-up writes nothing");
        kept.keep(&certificate(first.clone(), Verdict::Holds))
            .unwrap();
        let path = dir.path().join("claude");
        let found = kept.of(Version::new(2, 1, 332), &path).unwrap();
        assert!(found.allows(Check::FramesOrder));
        assert_eq!(kept.of(Version::new(2, 1, 331), &path), None);
        let second = program(dir.path(), "another");
        assert_eq!(kept.find(&second), None, "the file has changed");
        let mode = fs::metadata(state.join(CERTIFICATES_FILE))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn the_latest_certification_of_a_program_counts_and_only_some_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Certificates::new(dir.path());
        let first = program(dir.path(), "one");
        kept.keep(&certificate(first.clone(), Verdict::Holds))
            .unwrap();
        let why = "asked twice".to_owned();
        kept.keep(&certificate(first.clone(), Verdict::Fails { seen: why }))
            .unwrap();
        assert!(!kept.find(&first).unwrap().allows(Check::FramesOrder));
        for n in 0..KEPT {
            let other = program(dir.path(), &format!("other {n}"));
            kept.keep(&certificate(other, Verdict::Holds)).unwrap();
        }
        assert_eq!(kept.find(&first), None, "the oldest is gone");
    }

    #[test]
    fn what_cannot_be_read_is_no_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Certificates::new(dir.path());
        let first = program(dir.path(), "one");
        kept.keep(&certificate(first.clone(), Verdict::Holds))
            .unwrap();
        let file = dir.path().join(CERTIFICATES_FILE);
        let text = fs::read_to_string(&file).unwrap();
        let later = text.replace("\"form\":1", "\"form\":2");
        assert_ne!(later, text);
        for wrong in [later.as_str(), "{", "[]"] {
            fs::write(&file, wrong).unwrap();
            assert_eq!(kept.find(&first), None, "{wrong}");
        }
        fs::write(&file, &text).unwrap();
        assert!(kept.find(&first).is_some());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(kept.find(&first), None, "others could have written it");
    }
}
