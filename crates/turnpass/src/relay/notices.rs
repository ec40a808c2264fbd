//! What the host is told before its answer. Pure.

use crate::conversation::names;
use crate::event::Notice;
use crate::tools::Catalogue;

/// The sentence that a relay's first generation carries.
pub const UNCERTIFIED: &str = "The relay replaces the messages of the CLI's own request. Anthropic's guidance on using \
a plan with `claude -p` does not certify that; existing usage credits may be charged.";

/// The notices of a generation: whether it is a laboratory's, whether it is a provider's first, and what the normaliser
/// changed.
pub(crate) fn of(laboratory: bool, first: bool, changes: &[String]) -> Vec<Notice> {
    let uncertified = || Notice::Uncertified {
        text: UNCERTIFIED.to_owned(),
    };
    let changes = changes.to_vec();
    let found = [
        laboratory.then_some(Notice::Laboratory),
        first.then(uncertified),
        (!changes.is_empty()).then_some(Notice::Normalised { changes }),
    ];
    found.into_iter().flatten().collect()
}

/// Characters of a description from which on a CLI that does not pass `descriptions_whole` cuts it (2.1.294 to 2.1.332 without
/// the setting that lifts it).
const LONG_DESCRIPTION_CHARS: usize = 2_048;

/// Which tools' descriptions a CLI cuts that does not pass them on whole.
pub(crate) fn cut_descriptions(catalogue: &Catalogue) -> Option<Notice> {
    let long: Vec<_> = catalogue
        .long_descriptions(LONG_DESCRIPTION_CHARS)
        .map(names::shown)
        .collect();
    (!long.is_empty()).then(|| Notice::Other {
        text: format!(
            "the installed CLI cuts descriptions of tools at {LONG_DESCRIPTION_CHARS} characters: {}",
            long.join(", ")
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_generation_says_that_nothing_certifies_this_and_a_laboratory_run_says_that_it_is_one()
     {
        assert!(
            matches!(&of(false, true, &[])[..], [Notice::Uncertified { text }] if text.contains("certify"))
        );
        assert!(of(false, false, &[]).is_empty());
        assert_eq!(of(true, false, &[]), [Notice::Laboratory]);
        let changed = vec!["one".to_owned()];
        assert_eq!(
            of(false, false, &changed),
            [Notice::Normalised {
                changes: changed.clone()
            }]
        );
    }
}
