//! Whether the CLI has exactly our tools.

use std::collections::BTreeSet;

use crate::conversation::names::shown;
use crate::error::{Error, ErrorCode, Result};

/// Tools that the CLI may list beside ours and that execute nothing on this machine. A call of one is told to the host as
/// a rejected call, never released as one of the host's.
///
/// `DeferredToolPlaceholder` was seen on 2.1.332 (without `ENABLE_TOOL_SEARCH=false`); `EndConversation`, `ToolSearch` and
/// `WaitForMcpServers` were reported of programs like this one. Executors (`Bash`, `Write`, ...) are not here and fail.
pub const KNOWN_HARMLESS_EXTRAS: [&str; 4] = [
    "DeferredToolPlaceholder",
    "EndConversation",
    "ToolSearch",
    "WaitForMcpServers",
];

/// Most names that an error lists.
const NAMES_SHOWN: usize = 8;

/// How a list of tools compares with the one that was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Ours, and not in the list.
    pub missing: Vec<String>,
    /// In the list, neither ours nor harmless.
    pub foreign: Vec<String>,
    /// In the list and harmless; worth a note.
    pub harmless: Vec<String>,
}

/// Compares the names that the CLI lists (`init.tools`, or those of `mcp_status`) with the published names of ours
/// ([`expected_tool_names`](crate::tools::Catalogue::expected_tool_names)). The order does not count.
pub fn check_tools<'a>(
    actual: impl IntoIterator<Item = &'a str>,
    expected: impl IntoIterator<Item = &'a str>,
) -> Verdict {
    let actual: BTreeSet<_> = actual.into_iter().collect();
    let expected: BTreeSet<_> = expected.into_iter().collect();
    let names = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
    let (harmless, foreign): (Vec<&str>, Vec<&str>) = actual
        .difference(&expected)
        .partition(|name| KNOWN_HARMLESS_EXTRAS.contains(name));
    Verdict {
        missing: names(expected.difference(&actual).copied().collect()),
        foreign: names(foreign),
        harmless: names(harmless),
    }
}

impl Verdict {
    /// Whether a request may go on.
    pub fn is_ok(&self) -> bool {
        self.missing.is_empty() && self.foreign.is_empty()
    }

    /// The verdict as a result.
    ///
    /// # Errors
    ///
    /// `isolation_tools` for foreign tools, else `mcp_startup` for missing ones; both name them.
    pub fn into_result(self) -> Result<()> {
        if !self.foreign.is_empty() {
            let list = listed(&self.foreign);
            return Err(Error::new(
                ErrorCode::IsolationTools,
                format!("the CLI also offers {list}"),
            ));
        }
        if !self.missing.is_empty() {
            let list = listed(&self.missing);
            return Err(Error::new(
                ErrorCode::McpStartup,
                format!("the CLI does not offer {list}"),
            ));
        }
        Ok(())
    }
}

fn listed(names: &[String]) -> String {
    let mut text: Vec<_> = names.iter().take(NAMES_SHOWN).map(|n| shown(n)).collect();
    if names.len() > NAMES_SHOWN {
        text.push(format!("and {} more", names.len() - NAMES_SHOWN));
    }
    text.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: [&str; 2] = ["mcp__turnpass__read", "mcp__turnpass__write"];

    #[test]
    fn bug_039_harmless_extras_pass_and_executors_do_not() {
        let mut actual = OURS.to_vec();
        actual.extend(["EndConversation", "ToolSearch", "WaitForMcpServers"]);
        let verdict = check_tools(actual.clone(), OURS);
        assert!(verdict.is_ok());
        assert_eq!(verdict.harmless.len(), 3);
        actual.push("Bash");
        let error = check_tools(actual, OURS).into_result().unwrap_err();
        assert_eq!(error.code(), ErrorCode::IsolationTools);
        assert!(error.detail().contains("Bash"));
    }

    #[test]
    fn bug_063_a_missing_tool_is_named() {
        let verdict = check_tools([OURS[1]], OURS);
        assert_eq!(verdict.missing, [OURS[0]]);
        let error = verdict.into_result().unwrap_err();
        assert_eq!(error.code(), ErrorCode::McpStartup);
        assert!(error.detail().contains(OURS[0]));
    }

    #[test]
    fn another_servers_tool_is_foreign_and_no_tools_are_fine_where_none_are_asked() {
        assert_eq!(
            check_tools(["mcp__other__read"], []).foreign,
            ["mcp__other__read"]
        );
        assert_eq!(check_tools([], []), Verdict::default());
        assert!(check_tools(["Bash"], ["Bash"]).is_ok());
    }

    #[test]
    fn a_long_list_is_cut_in_the_message() {
        let names: Vec<String> = (0..100).map(|n| format!("tool{n}")).collect();
        let error = check_tools(names.iter().map(String::as_str), [])
            .into_result()
            .unwrap_err();
        assert!(error.detail().ends_with("and 92 more"), "{error}");
    }
}
