//! File name patterns: `*` within a name, `**` over directories, `?` one character, `{a,b}` either. Pure.

use regex::Regex;

use super::Failure;

/// A pattern for relative paths. One without a slash is about the name alone.
#[derive(Debug)]
pub(super) struct Glob {
    regex: Regex,
    name_only: bool,
}

impl Glob {
    pub(super) fn new(pattern: &str) -> Result<Self, Failure> {
        let regex = Regex::new(&translate(pattern))
            .map_err(|_| Failure::new(format!("the file pattern {pattern:?} cannot be read")))?;
        Ok(Self {
            regex,
            name_only: !pattern.contains('/'),
        })
    }

    pub(super) fn matches(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        self.regex
            .is_match(if self.name_only { name } else { path })
    }
}

fn translate(pattern: &str) -> String {
    let mut regex = String::from("^(?s:");
    let mut rest = pattern.trim_start_matches("./").trim_start_matches('/');
    let mut braces = 0u32;
    while let Some(first) = rest.chars().next() {
        let (piece, used) = match first {
            '*' if rest.starts_with("**/") => ("(?:[^/]*/)*".to_owned(), 3),
            '*' if rest.starts_with("**") => (".*".to_owned(), 2),
            '*' => ("[^/]*".to_owned(), 1),
            '?' => ("[^/]".to_owned(), 1),
            '{' => {
                braces += 1;
                ("(?:".to_owned(), 1)
            }
            '}' if braces > 0 => {
                braces -= 1;
                (")".to_owned(), 1)
            }
            ',' if braces > 0 => ("|".to_owned(), 1),
            other => (
                regex::escape(other.encode_utf8(&mut [0; 4])),
                other.len_utf8(),
            ),
        };
        regex.push_str(&piece);
        rest = &rest[used..];
    }
    regex.push_str(")$");
    regex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_they_mean_in_a_shell() {
        for (pattern, yes, no) in [
            (
                "*.rs",
                &["a.rs", "x/y/a.rs", ".rs"][..],
                &["a.rsx", "a.rs/b"][..],
            ),
            ("src/*.rs", &["src/a.rs"], &["src/x/a.rs", "a.rs"]),
            ("./src/*.rs", &["src/a.rs"], &["a.rs"]),
            (
                "src/**/*.rs",
                &["src/a.rs", "src/x/y/a.rs"],
                &["b/src/a.rs"],
            ),
            ("**/t/*", &["t/a", "x/t/a"], &["x/t/y/a"]),
            ("a?c", &["abc", "aüc"], &["ac", "a/c"]),
            ("*.{js,ts}", &["x.js", "d/x.ts"], &["x.rs", "x.{js,ts}"]),
            ("a,b}", &["a,b}"], &["a"]),
            ("[x].(y)+", &["[x].(y)+"], &["x.y"]),
        ] {
            let glob = Glob::new(pattern).unwrap();
            for path in yes {
                assert!(glob.matches(path), "{pattern} {path}");
            }
            for path in no {
                assert!(!glob.matches(path), "{pattern} {path}");
            }
        }
        Glob::new("{a").unwrap_err();
    }
}
