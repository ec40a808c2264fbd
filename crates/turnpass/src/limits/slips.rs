//! What is to be entered into a ledger that another process may be holding: an empty file each, beside the ledger, whose
//! name says it all.
//!
//! A slip is there with one call that waits for nobody, whole or not at all. Whoever next has the ledger's lock enters it, in
//! whichever process that is. So what was given back or spent counts for the next request, however long the lock is held and
//! whatever becomes of the process that left it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::budget::{Ledger, Moment, SessionKey};

/// How the name of a slip begins.
const PREFIX: &str = "ledger-slip";

/// Slips that are entered at once. Each is a request that ended since the last change, and every change enters them; the
/// rest waits for the next change.
const SLIPS_LIMIT: usize = 1024;

/// The folder of slips.
#[derive(Clone, Debug)]
pub(super) struct Slips {
    dir: PathBuf,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slip {
    key: SessionKey,
    /// The day that it belongs to.
    day: String,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// A request that was counted and not sent.
    Unsent,
    /// Tokens that a request took.
    Tokens(u64),
}

/// Slips that a ledger holds now, while it is not written yet.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Their files are gone: one that were entered twice would open a budget that is used up.
    unsent: Vec<Slip>,
    /// Their files are there still: tokens that were lost would do the same.
    tokens: Vec<PathBuf>,
}

impl Slip {
    /// A request that was counted on this day and not sent.
    pub(super) fn unsent(key: SessionKey, day: String) -> Self {
        Self {
            key,
            day,
            what: What::Unsent,
        }
    }

    /// Tokens that were taken now.
    pub(super) fn tokens(key: SessionKey, tokens: u64, now: &Moment) -> Self {
        Self {
            key,
            day: now.day.clone(),
            what: What::Tokens(tokens),
        }
    }

    /// Into the ledger.
    pub(super) fn enter(&self, ledger: &mut Ledger, now: &Moment) {
        match self.what {
            What::Unsent => ledger.unsent(&self.key, &self.day),
            What::Tokens(tokens) => {
                let then = Moment {
                    day: self.day.clone(),
                    ..now.clone()
                };
                ledger.tokens(&self.key, tokens, &then);
            }
        }
    }

    fn name(&self) -> String {
        let (key, day) = (self.key.as_str(), &self.day);
        let what = match self.what {
            What::Unsent => "unsent".to_owned(),
            What::Tokens(tokens) => tokens.to_string(),
        };
        format!(
            "{PREFIX}.{day}.{key}.{what}.{}",
            uuid::Uuid::new_v4().simple()
        )
    }

    fn of_name(name: &str) -> Option<Self> {
        let parts: Vec<_> = name.split('.').collect();
        let [PREFIX, day, key, what, _random] = parts[..] else {
            return None;
        };
        let what = match what {
            "unsent" => What::Unsent,
            tokens => What::Tokens(tokens.parse().ok()?),
        };
        Some(Self {
            key: SessionKey::parse(key)?,
            day: day.parse::<jiff::civil::Date>().ok()?.to_string(),
            what,
        })
    }
}

impl Slips {
    /// Those of the ledger in this directory.
    pub(super) fn of(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    /// Leaves one for whoever has the lock next.
    pub(super) fn leave(&self, slip: &Slip) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(self.dir.join(slip.name())).map(drop)
    }

    /// Whether there is one.
    pub(super) fn any(&self) -> bool {
        self.names().is_ok_and(|names| !names.is_empty())
    }

    /// Enters all that are there. To be called by whoever has the ledger's lock; [`Taken`] has to be told what became of the
    /// ledger.
    pub(super) fn enter(&self, ledger: &mut Ledger, now: &Moment) -> io::Result<Taken> {
        let mut taken = Taken::default();
        for (path, slip) in self.names()? {
            match slip.what {
                What::Unsent => {
                    if let Err(error) = fs::remove_file(path) {
                        // It would be entered again and again.
                        tracing::warn!(%error, "a request that was not sent stays counted");
                        continue;
                    }
                    taken.unsent.push(slip.clone());
                }
                What::Tokens(_) => taken.tokens.push(path),
            }
            slip.enter(ledger, now);
        }
        Ok(taken)
    }

    fn names(&self) -> io::Result<Vec<(PathBuf, Slip)>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let owner = rustix::process::geteuid().as_raw();
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let Some(slip) = name.to_str().and_then(Slip::of_name) else {
                continue;
            };
            // Not through a link: what another user put there is no word of ours.
            let is_ours = entry
                .metadata()
                .is_ok_and(|state| state.is_file() && state.uid() == owner);
            if is_ours && found.len() < SLIPS_LIMIT {
                found.push((entry.path(), slip));
            }
        }
        Ok(found)
    }
}

impl Taken {
    /// Whether there was none.
    pub(super) fn is_empty(&self) -> bool {
        self.unsent.is_empty() && self.tokens.is_empty()
    }

    /// The ledger was written with them.
    pub(super) fn written(self) {
        for path in self.tokens {
            if let Err(error) = fs::remove_file(&path) {
                // It counts again with the next change, so a budget closes too early and never too late.
                tracing::warn!(%error, "an entry of the ledger was not taken away");
            }
        }
    }

    /// The ledger was not written: what was taken goes back.
    pub(super) fn not_written(self, slips: &Slips) {
        for slip in self.unsent {
            if let Err(error) = slips.leave(&slip) {
                tracing::warn!(%error, "a request that was not sent stays counted");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::budget::Budgets;
    use crate::request::TransportSession;

    fn key() -> SessionKey {
        SessionKey::of(&TransportSession("s".to_owned()), None)
    }

    fn now() -> Moment {
        Moment {
            unix_s: 4_000_000_000,
            day: "2026-12-01".to_owned(),
            day_ends: None,
        }
    }

    fn ledger(requests: usize) -> Ledger {
        let mut ledger = Ledger::default();
        for _ in 0..requests {
            ledger.request(&Budgets::default(), &key(), &now()).unwrap();
        }
        ledger
    }

    #[test]
    fn a_slip_is_entered_once_and_in_its_own_day() {
        let dir = tempfile::tempdir().unwrap();
        let slips = Slips::of(dir.path());
        let yesterday = Moment {
            day: "2026-11-30".to_owned(),
            ..now()
        };
        slips.leave(&Slip::unsent(key(), now().day)).unwrap();
        slips.leave(&Slip::tokens(key(), 70, &now())).unwrap();
        slips.leave(&Slip::tokens(key(), 5, &yesterday)).unwrap();
        assert!(slips.any());
        let mut ledger = ledger(2);
        slips.enter(&mut ledger, &now()).unwrap().written();
        let spent = |day: &Moment| (ledger.today(day).requests, ledger.today(day).tokens);
        assert_eq!((spent(&now()), spent(&yesterday)), ((1, 70), (0, 5)));
        assert!(!slips.any());
        let mut again = ledger.clone();
        assert!(slips.enter(&mut again, &now()).unwrap().is_empty());
        assert_eq!(again, ledger);
    }

    #[test]
    fn what_was_not_written_is_there_for_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let slips = Slips::of(dir.path());
        slips.leave(&Slip::unsent(key(), now().day)).unwrap();
        slips.leave(&Slip::tokens(key(), 70, &now())).unwrap();
        for _ in 0..3 {
            let mut ledger = ledger(1);
            slips
                .enter(&mut ledger, &now())
                .unwrap()
                .not_written(&slips);
            let spent = ledger.today(&now());
            assert_eq!((spent.requests, spent.tokens), (0, 70));
        }
    }

    #[test]
    fn a_process_that_dies_before_it_writes_opens_no_budget() {
        let dir = tempfile::tempdir().unwrap();
        let slips = Slips::of(dir.path());
        slips.leave(&Slip::unsent(key(), now().day)).unwrap();
        slips.leave(&Slip::tokens(key(), 70, &now())).unwrap();
        drop(slips.enter(&mut ledger(1), &now()).unwrap());
        let mut read_again = ledger(1);
        slips.enter(&mut read_again, &now()).unwrap().written();
        let spent = read_again.today(&now());
        assert_eq!((spent.requests, spent.tokens), (1, 70));
    }

    #[test]
    fn what_is_no_slip_of_ours_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let slips = Slips::of(dir.path());
        let good = Slip::unsent(key(), now().day).name();
        std::os::unix::fs::symlink("nowhere", dir.path().join(&good)).unwrap();
        for name in [
            "ledger.json".to_owned(),
            good.replace("2026-12-01", "never"),
            good.replace("unsent", "-1"),
            good.replace("unsent", "sent"),
            good.replace(key().as_str(), "short"),
            format!("{good}.new"),
        ] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert!(!slips.any());
        let mut read = ledger(1);
        assert!(slips.enter(&mut read, &now()).unwrap().is_empty());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 7);
        assert!(!Slips::of(&dir.path().join("nowhere")).any());
    }
}
