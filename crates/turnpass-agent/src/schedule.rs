//! In which order the calls of one answer run. Pure.

use std::ops::Range;

use crate::tools::Effect;

/// The calls of one answer as steps: neighbouring reads form one step and run at the same time, each change is a step
/// of its own. So a read sees every change that the model asked for before it, and none that came after.
pub(crate) fn steps(effects: &[Effect]) -> Vec<Range<usize>> {
    let mut steps: Vec<Range<usize>> = Vec::new();
    for (index, effect) in effects.iter().enumerate() {
        match steps.last_mut() {
            Some(last) if *effect == Effect::Read && effects[last.start] == Effect::Read => {
                last.end = index + 1;
            }
            _ => steps.push(index..index + 1),
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use Effect::{Change, Read};

    #[test]
    fn reads_run_together_and_changes_alone() {
        assert!(steps(&[]).is_empty());
        assert_eq!(steps(&[Read, Read, Read]).first(), Some(&(0..3)));
        assert_eq!(steps(&[Read, Read, Read]).len(), 1);
        assert_eq!(steps(&[Change, Change]), [0..1, 1..2]);
        assert_eq!(
            steps(&[Read, Read, Change, Read, Change]),
            [0..2, 2..3, 3..4, 4..5]
        );
    }
}
