//! What `claude auth login --claudeai` says before it waits for the code. Pure: bytes so far in, the link out.

use url::Url;

/// Longest output that is looked through for the link, in bytes. The whole dialogue has some 700 (2.1.332).
pub(super) const DIALOGUE_BYTES: usize = 64 * 1024;

/// Longest code, in bytes. Those of the service have some hundred.
pub(super) const CODE_BYTES: usize = 4096;

/// Whose pages a link may lead to. A link to anywhere else is not shown: it is not the one that was asked for.
const HOSTS: [&str; 2] = ["claude.ai", "claude.com"];

/// The link of the dialogue, once the CLI waits for the code behind it.
///
/// The link stands alone on its line (2.1.332) or behind "visit:" (2.1.287), and the question after it has no line end.
pub(super) fn link(said: &str) -> Option<&str> {
    let at = said.find("Paste code here")?;
    said[..at]
        .split_whitespace()
        .rev()
        .find(|word| is_link(word))
}

fn is_link(word: &str) -> bool {
    let Ok(url) = Url::parse(word) else {
        return false;
    };
    let ours = |host: &str| {
        HOSTS.iter().any(|ours| {
            host == *ours
                || host
                    .strip_suffix(ours)
                    .is_some_and(|sub| sub.ends_with('.'))
        })
    };
    url.scheme() == "https"
        && url.host_str().is_some_and(ours)
        && url.path().ends_with("/oauth/authorize")
}

/// What a person pasted, as the CLI takes it: one line with a `#` in the middle. `None` for anything else, which the CLI
/// would only ask again for (2.1.332).
pub(super) fn code(pasted: &str) -> Option<&str> {
    let code = pasted.trim();
    let (before, after) = code.split_once('#')?;
    let plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_graphic());
    (code.len() <= CODE_BYTES && plain(before) && plain(after)).then_some(code)
}

/// Whether a login failed because the service could not be reached, which no other code helps: the CLI names the system's
/// error (`getaddrinfo EAI_AGAIN platform.claude.com`, 2.1.287 and 2.1.332).
pub(super) fn is_unreachable(words: &str) -> bool {
    const ERRORS: [&str; 6] = [
        "EAI_AGAIN",
        "ENOTFOUND",
        "ECONNREFUSED",
        "ECONNRESET",
        "ETIMEDOUT",
        "ENETUNREACH",
    ];
    ERRORS.iter().any(|error| words.contains(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_found_once_the_cli_waits() {
        let newer = "Opening browser to sign in…\nIf the browser didn't open, visit:\nhttps://claude.ai/oauth/authorize?z-abc\n";
        assert_eq!(link(newer), None, "it does not wait yet");
        let waits = format!("{newer}Paste code here if prompted > ");
        assert_eq!(
            link(&waits),
            Some("https://claude.ai/oauth/authorize?z-abc")
        );
        let older = "If the browser didn't open, visit: https://claude.com/cai/oauth/authorize?code=true&state=s\nPaste code here if prompted > ";
        assert_eq!(
            link(older),
            Some("https://claude.com/cai/oauth/authorize?code=true&state=s")
        );
    }

    #[test]
    fn a_link_to_anywhere_else_is_not_shown() {
        for other in [
            "http://claude.ai/oauth/authorize?x",
            "https://claude.ai.example.org/oauth/authorize?x",
            "https://notclaude.ai/oauth/authorize?x",
            "https://claude.ai/settings",
        ] {
            let said = format!("visit:\n{other}\nPaste code here if prompted > ");
            assert_eq!(link(&said), None, "{other}");
        }
    }

    #[test]
    fn a_network_that_is_away_is_no_wrong_code() {
        assert!(is_unreachable(
            "Couldn't log in: getaddrinfo EAI_AGAIN platform.claude.com"
        ));
        assert!(!is_unreachable(
            "Couldn't log in: That code wasn't accepted."
        ));
        assert!(!is_unreachable(
            "Login failed: Request failed with status code 400"
        ));
    }

    #[test]
    fn a_code_is_one_line_with_a_mark_in_the_middle() {
        assert_eq!(code(" abc#def \r\n"), Some("abc#def"));
        for wrong in ["", "abc", "#def", "abc#", "a b#c", "a#b\nc#d", "ä#b"] {
            assert_eq!(code(wrong), None, "{wrong:?}");
        }
        assert_eq!(code(&format!("a#{}", "x".repeat(CODE_BYTES))), None);
    }
}
