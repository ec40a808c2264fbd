//! Answers of thinking alone, which a CLI that holds the conversation leaves out.

use super::{Block, Rule, Turn, Turns};

impl<'a> Turns<'a> {
    /// After neighbours became one, so that thinking which its host keeps apart from what followed it stays.
    pub(super) fn without_thinking_alone(&mut self, turns: Vec<Turn<'a>>) -> Vec<Turn<'a>> {
        let mut kept: Vec<Turn<'a>> = Vec::with_capacity(turns.len());
        for turn in turns {
            let alone =
                !turn.assistant.is_empty() && turn.assistant.iter().all(|block| thinks(block));
            match kept.last_mut().filter(|_| alone) {
                Some(before) => {
                    self.note(Rule::ThinkingAlone, turn.at);
                    before.user.extend(turn.user);
                    before.answered |= turn.answered;
                }
                None => kept.push(turn),
            }
        }
        kept
    }
}

/// Whether a block is thinking, of either kind.
pub(super) fn thinks(block: &Block) -> bool {
    matches!(block, Block::Thinking(_) | Block::RedactedThinking(_))
}
