//! Names of tools on the wire: `mcp__turnpass__<alias>`, and back.
//!
//! The alias of a name depends on nothing but the name, so it is the same in every request, whichever other tools are
//! offered, and a call of a tool that is no longer offered keeps its name in the history.
//!
//! | host's name | alias |
//! | --- | --- |
//! | keeps to `[A-Za-z0-9_-]`, at most [`ALIAS_BYTES`] long, does not itself end like a shortened one | the name |
//! | anything else | other characters replaced by `_`, cut, then `_` and eight hex digits of the SHA-256 of the name |
//!
//! Two names that look alike after cleaning (`a.b`, `a/b`) differ in the digits. A safe name that ends in `_` and eight
//! lower-case hex digits gets digits too, so that nobody's name can be taken for a shortened one.

use std::borrow::Cow;
use std::collections::HashMap;

use sha2::{Digest as _, Sha256};

use crate::error::{Error, ErrorCode, Result};

/// The name of our MCP server in the CLI.
pub const SERVER: &str = "turnpass";

/// What the CLI puts before the names of our server's tools (2.1.283 to 2.1.332: `mcp__<server>__`).
pub const PREFIX: &str = "mcp__turnpass__";

/// Longest name that the service takes, in bytes; the CLI does not check it (up to 128 pass it on 2.1.332).
pub const PUBLISHED_BYTES: usize = 64;

/// Longest alias, in bytes.
pub const ALIAS_BYTES: usize = PUBLISHED_BYTES - PREFIX.len();

/// Hex digits of a shortened name.
const HASH_DIGITS: usize = 8;

/// The name that our MCP server lists for a tool of the host.
///
/// # Errors
///
/// `tool_invalid` for an empty name or one that holds NUL.
pub fn alias(host: &str) -> Result<Cow<'_, str>> {
    let wrong = if host.is_empty() {
        "is empty"
    } else if host.contains('\0') {
        "holds a NUL character"
    } else {
        return Ok(alias_of_any(host));
    };
    Err(Error::new(
        ErrorCode::ToolInvalid,
        format!("the tool name {:?} {wrong}", shown(host)),
    ))
}

/// The name by which the model knows a tool of the host.
///
/// # Errors
///
/// As [`alias`].
pub fn published(host: &str) -> Result<String> {
    alias(host).map(|alias| format!("{PREFIX}{alias}"))
}

/// As [`alias`], for a call in the history. Total: a model may have written any name, and a history that cannot be sent
/// any more would be dead for good.
pub fn alias_of_any(host: &str) -> Cow<'_, str> {
    let safe = !host.is_empty() && host.bytes().all(is_safe);
    if safe && host.len() <= ALIAS_BYTES && !ends_like_shortened(host) {
        return Cow::Borrowed(host);
    }
    let room = ALIAS_BYTES - HASH_DIGITS - 1;
    let mut short: String = host.chars().map(clean).take(room).collect();
    short.push('_');
    short += &hex(&Sha256::digest(host.as_bytes())[..HASH_DIGITS / 2]);
    Cow::Owned(short)
}

/// A name for an error message: at most eighty characters.
pub(crate) fn shown(name: &str) -> String {
    let mut short: String = name.chars().take(80).collect();
    if short.len() < name.len() {
        short.push('…');
    }
    short
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|half| char::from(DIGITS[usize::from(half)]))
        .collect()
}

pub(crate) fn is_safe(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

pub(crate) fn clean(c: char) -> char {
    match u8::try_from(c) {
        Ok(byte) if is_safe(byte) => c,
        _ => '_',
    }
}

fn ends_like_shortened(name: &str) -> bool {
    let bytes = name.as_bytes();
    let Some(at) = bytes.len().checked_sub(HASH_DIGITS + 1) else {
        return false;
    };
    bytes[at] == b'_'
        && bytes[at + 1..]
            .iter()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b))
}

/// What a name that the model wrote stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved<'a> {
    /// Exactly the published name of this tool.
    Exact(&'a str),
    /// The published name with a doubled or a missing prefix; the only two repairs there are. The CLI does not know such
    /// a name: it answers the call with an error of its own, so where it runs the turn (pool) the call is not to be
    /// executed.
    Repaired(&'a str),
    /// No tool of this catalogue.
    Unknown,
}

impl<'a> Resolved<'a> {
    /// The host's name, repaired or not.
    pub fn host(self) -> Option<&'a str> {
        match self {
            Self::Exact(host) | Self::Repaired(host) => Some(host),
            Self::Unknown => None,
        }
    }
}

/// The way back from the names on the wire to the host's.
#[derive(Clone, Debug, Default)]
pub struct Names {
    by_alias: HashMap<String, String>,
}

impl Names {
    /// The names of these tools.
    ///
    /// # Errors
    ///
    /// `tool_invalid` for a name that cannot be published, and for two tools of one name.
    pub fn new<'a>(hosts: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let mut by_alias = HashMap::new();
        for host in hosts {
            let alias = alias(host)?.into_owned();
            if let Some(other) = by_alias.insert(alias, host.to_owned()) {
                let why = if other == host {
                    format!("the tool {:?} is offered twice", shown(host))
                } else {
                    // One in four thousand million for two names that look alike; said rather than guessed.
                    format!(
                        "the tools {:?} and {:?} have the same short name",
                        shown(&other),
                        shown(host)
                    )
                };
                return Err(Error::new(ErrorCode::ToolInvalid, why));
            }
        }
        Ok(Self { by_alias })
    }

    /// The host's tool behind an alias: the name in an MCP `tools/call`.
    pub fn host_of_alias(&self, alias: &str) -> Option<&str> {
        self.by_alias.get(alias).map(String::as_str)
    }

    /// The host's tool behind a name that the model wrote.
    pub fn resolve(&self, written: &str) -> Resolved<'_> {
        let bare = written.strip_prefix(PREFIX);
        if let Some(host) = bare.and_then(|alias| self.host_of_alias(alias)) {
            return Resolved::Exact(host);
        }
        let repaired = match bare {
            Some(bare) => bare.strip_prefix(PREFIX),
            None => Some(written),
        };
        repaired
            .and_then(|alias| self.host_of_alias(alias))
            .map_or(Resolved::Unknown, Resolved::Repaired)
    }

    /// The host's name for a call of any name: the tool's if there is one, else the written name without our prefix.
    pub fn host_or_written<'a>(&'a self, written: &'a str) -> &'a str {
        self.resolve(written)
            .host()
            .unwrap_or_else(|| written.strip_prefix(PREFIX).unwrap_or(written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(hosts: &[&str]) -> Names {
        Names::new(hosts.iter().copied()).unwrap()
    }

    #[test]
    fn safe_names_stay() {
        for name in ["read", "Read-File_2", "x", "A", "mcp__other__read"] {
            assert_eq!(published(name).unwrap(), format!("{PREFIX}{name}"));
        }
        let longest = "n".repeat(ALIAS_BYTES);
        assert_eq!(published(&longest).unwrap().len(), PUBLISHED_BYTES);
        assert_eq!(alias(&longest).unwrap(), longest);
    }

    #[test]
    fn bug_071_unsafe_and_long_names_are_shortened_and_come_back() {
        let long: Vec<String> = [50, 64, 65, 128].map(|n| "w".repeat(n)).into();
        let same_start = ["1", "2"].map(|end| format!("{}{}", "s".repeat(80), end.repeat(10)));
        let mut hosts = vec![
            "fs.read",
            "fs/read",
            "fs_read",
            "hello world",
            "é",
            "e\u{301}",
        ];
        hosts.extend(long.iter().map(String::as_str));
        hosts.extend(same_start.iter().map(String::as_str));
        let names = names(&hosts);
        for host in hosts {
            let wire = published(host).unwrap();
            assert!(wire.len() <= PUBLISHED_BYTES, "{wire}");
            assert!(wire.bytes().all(is_safe), "{wire}");
            assert_eq!(names.resolve(&wire), Resolved::Exact(host));
        }
    }

    #[test]
    fn the_alias_of_a_name_never_changes() {
        // The history and the service's prompt cache hold these bytes.
        assert_eq!(alias("fs.read").unwrap(), "fs_read_4074bc02");
        assert_eq!(
            alias("report_20240101").unwrap(),
            "report_20240101_aad8a968"
        );
    }

    #[test]
    fn bug_028_bug_071_empty_and_nul_names_are_refused() {
        for bad in ["", "a\0b"] {
            let error = alias(bad).unwrap_err();
            assert_eq!(error.code(), ErrorCode::ToolInvalid);
            assert!(error.detail().contains(&format!("{bad:?}")), "{error}");
        }
        assert!(!alias_of_any("").is_empty());
        assert!(alias_of_any("a\0b").bytes().all(is_safe));
    }

    #[test]
    fn a_tool_offered_twice_is_an_error() {
        let error = Names::new(["read", "read"]).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ToolInvalid);
        assert!(error.detail().contains("\"read\" is offered twice"));
    }

    #[test]
    fn bug_068_two_repairs_and_no_more() {
        let names = names(&["bash", "read"]);
        let cases = [
            ("mcp__turnpass__read", Resolved::Exact("read")),
            (
                "mcp__turnpass__mcp__turnpass__read",
                Resolved::Repaired("read"),
            ),
            ("bash", Resolved::Repaired("bash")),
            ("Bash", Resolved::Unknown),
            ("mcp_turnpass_read", Resolved::Unknown),
            ("mcp__other__read", Resolved::Unknown),
            ("mcp__turnpass__", Resolved::Unknown),
            ("", Resolved::Unknown),
        ];
        for (written, wanted) in cases {
            assert_eq!(names.resolve(written), wanted, "{written}");
        }
    }

    #[test]
    fn bug_068_a_host_tool_that_looks_prefixed_is_itself() {
        let names = names(&["mcp__turnpass__read", "read"]);
        let wire = published("mcp__turnpass__read").unwrap();
        assert_eq!(names.resolve(&wire), Resolved::Exact("mcp__turnpass__read"));
    }

    proptest! {
        #[test]
        fn aliases_are_safe_short_and_told_apart(a in "\\PC{1,80}", b in "\\PC{1,80}") {
            let (x, y) = (alias_of_any(&a), alias_of_any(&b));
            prop_assert!(x.len() <= ALIAS_BYTES && x.bytes().all(is_safe));
            prop_assert_eq!(a == b, x == y);
        }

        #[test]
        fn a_shortened_name_is_not_the_alias_of_itself(a in "\\PC{50,80}") {
            let x = alias_of_any(&a);
            prop_assert_ne!(alias_of_any(&x), x.clone());
        }
    }
}
