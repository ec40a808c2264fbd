//! Where the one cache mark stands that the CLI leaves to a conversation. Pure.
//!
//! The service takes four marks; the CLI uses three of its own (2.1.283 to 2.1.332: two in the system prompt, one on its
//! last message, whose text does not come again at that place). The service looks back at most twenty blocks from a mark
//! for something that it has cached. A mark at the end of the conversation therefore loses everything as soon as one
//! round adds more than twenty blocks, such as ten calls with their results.
//!
//! So the mark goes on by steps: it stands at the end while the end is within reach of where the mark stood in the request
//! before, and at the furthest block within reach otherwise. Where it stood follows from the conversation alone, since
//! each user message was the end of a request. What lies behind it is read in full for once and caught up with later.

/// Blocks from one mark to the next. The service looks back twenty; two are left for what the CLI puts in between.
pub const STEP_BLOCKS: usize = 18;

/// The message and the block of the mark. For each message: whether a request ended with it, and for each of its blocks
/// whether it can carry a mark. `None` when no block can.
pub fn one_mark(messages: impl Iterator<Item = (bool, Vec<bool>)>) -> Option<(usize, usize)> {
    // Blocks that can carry a mark, by their number in the conversation.
    let mut places: Vec<(usize, (usize, usize))> = Vec::new();
    let mut mark: Option<usize> = None;
    let mut count = 0;
    for (message, (ends, blocks)) in messages.enumerate() {
        for (block, markable) in blocks.into_iter().enumerate() {
            if markable {
                places.push((count, (message, block)));
            }
            count += 1;
        }
        if ends {
            mark = next(&places, mark);
        }
    }
    mark.map(|at| places[at].1)
}

/// From the index of one mark to that of the next.
fn next(places: &[(usize, (usize, usize))], mark: Option<usize>) -> Option<usize> {
    let last = places.len().checked_sub(1)?;
    let Some(before) = mark else {
        return Some(last);
    };
    let reach = places[before].0 + STEP_BLOCKS;
    let within = places.iter().rposition(|(number, _)| *number <= reach)?;
    // With nothing within reach the mark would stay behind for good, so everything is written anew once.
    Some(if within > before { within } else { last })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A conversation of rounds: so many blocks of the assistant, then so many results.
    fn rounds(sizes: &[usize]) -> Vec<(bool, Vec<bool>)> {
        let mut messages = vec![(true, vec![true])];
        for size in sizes {
            messages.push((false, vec![false; *size]));
            messages.push((true, vec![true; *size]));
        }
        messages
    }

    fn number(messages: &[(bool, Vec<bool>)], (message, block): (usize, usize)) -> usize {
        messages[..message].iter().map(|m| m.1.len()).sum::<usize>() + block
    }

    #[test]
    fn it_stands_at_the_end_of_small_rounds() {
        for count in 0..12 {
            let messages = rounds(&vec![3; count]);
            let end = messages.len() - 1;
            let block = messages[end].1.len() - 1;
            assert_eq!(one_mark(messages.into_iter()), Some((end, block)));
        }
    }

    #[test]
    fn bug_096_it_is_always_within_reach_of_the_mark_before() {
        let sizes = [1, 15, 2, 14, 12, 1, 1, 16, 1];
        let mut last = None;
        for count in 0..=sizes.len() {
            let messages = rounds(&sizes[..count]);
            let at = number(&messages, one_mark(messages.iter().cloned()).unwrap());
            if let Some(last) = last {
                assert!(
                    at >= last && at - last <= STEP_BLOCKS,
                    "{count}: {last} {at}"
                );
            }
            last = Some(at);
        }
    }

    #[test]
    fn a_gap_that_no_step_crosses_is_jumped() {
        let messages = rounds(&[40, 1]);
        let at = one_mark(messages.clone().into_iter()).unwrap();
        assert_eq!(at, (4, 0));
        assert_eq!(one_mark(std::iter::empty()), None);
        assert_eq!(one_mark([(true, vec![false, false])].into_iter()), None);
    }

    proptest::proptest! {
        #[test]
        fn it_never_goes_back_and_is_on_a_block_that_can_carry_it(sizes in proptest::collection::vec(1usize..30, 0..12)) {
            let mut last = 0;
            for count in 0..=sizes.len() {
                let messages = rounds(&sizes[..count]);
                let (message, block) = one_mark(messages.iter().cloned()).unwrap();
                proptest::prop_assert!(messages[message].1[block]);
                let at = number(&messages, (message, block));
                proptest::prop_assert!(at >= last);
                last = at;
            }
        }
    }
}
