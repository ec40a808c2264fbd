//! The conversation stays one that can be sent: every call has its result. Pure.

use std::collections::HashSet;

use turnpass::conversation::{Block, Message, Role, ToolResult, ToolUseId};

/// What the model is told about a call that was running when the agent ended.
const LOST_CALL: &str =
    "[turnpass] The agent ended before this tool answered; what it did is not known.";

/// Answers the calls of the last answer that have no result, and says how many there were.
///
/// An agent that was killed between a call and its result leaves such a conversation behind. Everything older was
/// sent before, and what is odd about it is the business of the library's normaliser.
pub(crate) fn close_open_calls(history: &mut Vec<Message>) -> usize {
    let Some(asked) = history
        .iter()
        .rposition(|message| message.role == Role::Assistant)
    else {
        return 0;
    };
    let answered: HashSet<&ToolUseId> = history[asked + 1..]
        .iter()
        .flat_map(|message| &message.content)
        .filter_map(|block| match block {
            Block::ToolResult(result) => Some(&result.id),
            _ => None,
        })
        .collect();
    let missing: Vec<Block> = history[asked]
        .tool_calls()
        .filter(|call| !answered.contains(&call.id))
        .map(|call| Block::ToolResult(ToolResult::error(call.id.clone(), LOST_CALL)))
        .collect();
    let count = missing.len();
    if count == 0 {
        return 0;
    }
    match history.get_mut(asked + 1) {
        // Results have to stand in the message right after the call, before anything else in it.
        Some(next) if next.role == Role::User => {
            let results = next
                .content
                .iter()
                .take_while(|block| matches!(block, Block::ToolResult(_)))
                .count();
            next.content.splice(results..results, missing);
        }
        _ => history.insert(
            asked + 1,
            Message {
                role: Role::User,
                content: missing,
            },
        ),
    }
    count
}

/// Keeps the text of an answer that broke off, and says that it did.
pub(crate) fn keep_partial(history: &mut Vec<Message>, text: &str, why: &str) {
    if !text.trim().is_empty() {
        history.push(Message::assistant(text));
    }
    // The note is not the model's own word, so it stands as a message of the host's side.
    history.push(Message::user(format!(
        "[turnpass] The answer broke off here: {why}."
    )));
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpass::conversation::{ToolCall, ToolInput};

    fn called(ids: &[&str]) -> Message {
        Message {
            role: Role::Assistant,
            content: ids
                .iter()
                .map(|id| {
                    Block::ToolUse(ToolCall {
                        id: ToolUseId((*id).into()),
                        name: "read".into(),
                        input: ToolInput::empty(),
                    })
                })
                .collect(),
        }
    }

    fn result(id: &str) -> ToolResult {
        ToolResult::text(ToolUseId(id.into()), "ok")
    }

    fn result_ids(message: &Message) -> Vec<&str> {
        message
            .content
            .iter()
            .filter_map(|block| match block {
                Block::ToolResult(result) => Some(result.id.0.as_str()),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn bug_087_calls_without_results_are_answered() {
        let mut history = vec![Message::user("x"), called(&["a", "b"])];
        assert_eq!(close_open_calls(&mut history), 2);
        assert_eq!(result_ids(&history[2]), ["a", "b"]);
        assert_eq!(close_open_calls(&mut history), 0, "once is enough");
    }

    #[test]
    fn bug_087_results_go_before_what_was_said_after_them() {
        let mut next = Message::results([result("a")]);
        next.content.push(Block::text("go on"));
        let mut history = vec![Message::user("x"), called(&["a", "b"]), next];
        assert_eq!(close_open_calls(&mut history), 1);
        assert_eq!(result_ids(&history[2]), ["a", "b"]);
        assert_eq!(history[2].content[2].as_text(), Some("go on"));
    }

    #[test]
    fn a_conversation_without_open_calls_is_untouched() {
        for mut history in [
            vec![],
            vec![Message::user("x")],
            vec![Message::user("x"), Message::assistant("y")],
            vec![called(&["a"]), Message::results([result("a")])],
        ] {
            let before = history.clone();
            assert_eq!(close_open_calls(&mut history), 0);
            assert_eq!(history, before);
        }
    }
}
