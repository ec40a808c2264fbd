//! The configuration file: where it is, whether it may be trusted, and what is wrong in it.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy;

use crate::exit::Fault;
use crate::settings::{Environment, Values};

/// Names another file than the usual one.
pub(crate) const CONFIG_VARIABLE: &str = "TURNPASS_CONFIG";

/// Largest configuration file, in bytes; its keys need a thousandth of it.
const FILE_BYTES: u64 = 1024 * 1024;

/// The file's path, and whether it was named by [`CONFIG_VARIABLE`] and so has to exist.
pub(crate) fn path(environment: Environment<'_>) -> Result<(PathBuf, bool), Fault> {
    if let Some(named) = environment(CONFIG_VARIABLE).filter(|value| !value.is_empty()) {
        return Ok((named.into(), true));
    }
    // The same place on Linux and macOS; XDG_CONFIG_HOME moves it.
    let base = etcetera::base_strategy::Xdg::new().map_err(|error| {
        Fault::usage(
            format!("there is no home folder: {error}"),
            format!("Set HOME, or name a file with {CONFIG_VARIABLE}."),
        )
    })?;
    Ok((base.config_dir().join("turnpass/config.toml"), false))
}

/// What the file says; nothing when the usual one does not exist.
pub(crate) fn load(environment: Environment<'_>) -> Result<Values, Fault> {
    let (path, named) = path(environment)?;
    let unreadable = |error: std::io::Error| {
        Fault::usage(
            format!("{} cannot be read: {error}", path.display()),
            format!("Make it readable, or name another file with {CONFIG_VARIABLE}."),
        )
    };
    let file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound && !named => {
            return Ok(Values::default());
        }
        opened => opened.map_err(unreadable)?,
    };
    // Looked at on the open file, so that it is the file which is read.
    let state = file.metadata().map_err(unreadable)?;
    let me = rustix::process::geteuid().as_raw();
    if state.mode() & 0o022 != 0 || (state.uid() != me && state.uid() != 0) {
        return Err(Fault::usage(
            format!(
                "{} can be written by others, so it is not read",
                path.display()
            ),
            format!(
                "Run `chmod go-w {}` and make yourself its owner.",
                path.display()
            ),
        ));
    }
    let mut text = String::new();
    let read = file.take(FILE_BYTES + 1).read_to_string(&mut text);
    read.map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES {
        return Err(Fault::usage(
            format!("{} is larger than {FILE_BYTES} bytes", path.display()),
            "That cannot be a configuration file.",
        ));
    }
    parse(&path, &text)
}

fn parse(path: &Path, text: &str) -> Result<Values, Fault> {
    toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        let said = error.message().trim_end_matches('.').replace('\n', " ");
        Fault::usage(
            format!("{}, line {line}: {said}", path.display()),
            next_step(&said),
        )
    })
}

fn next_step(said: &str) -> String {
    // serde's words for a key that `deny_unknown_fields` met: the key, and those that may stand where it stands.
    let unknown = said
        .strip_prefix("unknown field `")
        .and_then(|rest| rest.split_once('`'));
    match unknown.and_then(|(key, expected)| nearest(key, expected.split('`').skip(1).step_by(2))) {
        Some(key) => format!("Did you mean `{key}`?"),
        None => "`turnpass run --help` and docs/guide/configuration.md say what each key takes."
            .to_owned(),
    }
}

/// The key that was probably meant.
fn nearest<'a>(written: &str, keys: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    keys.map(|key| (distance(written, key), key))
        .min()
        .filter(|(distance, key)| *distance <= 1 + key.len() / 4)
        .map(|(_, key)| key)
}

/// How many letters have to be put in, taken out or changed.
fn distance(from: &str, to: &str) -> usize {
    // Keys are short; a long text in their place is not near to any.
    let from: Vec<char> = from
        .chars()
        .take(40)
        .map(|c| c.to_ascii_lowercase())
        .collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, left) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in to.chars().enumerate() {
            let changed = diagonal + usize::from(*left != right && !(*left == '-' && right == '_'));
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;
    use std::os::unix::fs::PermissionsExt;

    fn load_text(text: &str, mode: u32) -> Result<Values, Fault> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        load(&|name| (name == CONFIG_VARIABLE).then(|| path.clone().into()))
    }

    #[test]
    fn the_file_sets_keys() {
        let text = "transport = \"relay\"\nallow = [\"write\"]\nmax_rounds = 3\neffort = \"low\"\n";
        let values = load_text(text, 0o600).unwrap();
        assert_eq!(values.max_rounds, Some(3));
        assert_eq!(values.allow.unwrap()[0].0, "write");
    }

    #[test]
    fn what_is_wrong_is_said_with_file_and_line() {
        for (text, line, said) in [
            ("\nmodle = \"x\"", "line 2", "Did you mean `model`?"),
            ("max-rounds = 3", "line 1", "Did you mean `max_rounds`?"),
            ("Transport = \"x\"", "line 1", "Did you mean `transport`?"),
            ("colour = 1", "line 1", "run --help"),
            (
                "[price.opus]\ninput = 1",
                "line 1",
                "Did you mean `prices`?",
            ),
            (
                "[prices.opus]\ninptu = 1",
                "line 2",
                "Did you mean `input`?",
            ),
            ("[prices.opus]\ninput = -1", "line 2", "is no price"),
            ("[prices.opsu]\ninput = 1", "line", "names no model"),
            ("# a\n# b\neffort = \"huge\"", "line 3", "huge"),
            (
                "allow = [\"write\",\n \"rm\"]",
                "line",
                "tool \"rm\" is not known",
            ),
            ("model = 3", "line 1", "string"),
            ("model = ", "line 1", "c.toml"),
        ] {
            let fault = load_text(text, 0o600).unwrap_err().to_string();
            for part in ["[usage]", "c.toml", line, said] {
                assert!(fault.contains(part), "{part}: {fault}");
            }
        }
    }

    #[test]
    fn a_file_that_others_can_write_is_refused() {
        for mode in [0o620, 0o602, 0o666] {
            let fault = load_text("", mode).unwrap_err().to_string();
            assert!(fault.contains("chmod go-w"), "{fault}");
        }
        load_text("", 0o644).unwrap();
    }

    #[test]
    fn a_named_file_has_to_exist() {
        let named =
            |name: &str| (name == CONFIG_VARIABLE).then(|| OsString::from("/nowhere/config.toml"));
        load(&named).unwrap_err();
    }
}
