//! What holds for every history.

use super::*;
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "[a-z]{1,4}",
        1 => Just(String::new()),
        1 => Just(" \n".to_owned()),
        1 => Just("trail \n".to_owned()),
        1 => "(?s).{0,6}",
    ]
}

/// Few ids, so that they are reused, and of every kind.
fn id() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(str::to_owned),
        1 => prop::sample::select(vec!["", "a.b", "a/b", "é", "functions.bash:0"]).prop_map(str::to_owned),
        1 => "[a-z.]{60,70}",
    ]
}

fn source() -> impl Strategy<Value = Source> {
    let kind = prop::sample::select(vec![
        "image/png",
        "image/jpg",
        "image/x",
        "application/pdf",
        "text/plain",
        "text/x",
    ]);
    prop_oneof![
        (kind.clone(), "[A-Z]{0,2}").prop_map(|(media_type, data)| Source::Base64 {
            media_type: media_type.into(),
            data
        }),
        (kind, text()).prop_map(|(media_type, data)| Source::Text {
            media_type: media_type.into(),
            data
        }),
        "(https://e.x)?".prop_map(|url| Source::Url { url }),
    ]
}

fn result_block() -> impl Strategy<Value = ResultBlock> {
    prop_oneof![
        3 => text().prop_map(|text| ResultBlock::Text { text }),
        1 => source().prop_map(|source| ResultBlock::Image(Image { source })),
        1 => source().prop_map(|source| ResultBlock::Document(Document { source, title: None })),
    ]
}

fn block() -> impl Strategy<Value = Block> {
    prop_oneof![
        4 => text().prop_map(Block::text),
        1 => source().prop_map(|source| Block::Image(Image { source })),
        1 => source().prop_map(|source| Block::Document(Document { source, title: None })),
        4 => (id(), text()).prop_map(|(id, name)| Block::ToolUse(ToolCall {
            id: ToolUseId(id),
            name,
            input: ToolInput::empty(),
        })),
        4 => (id(), prop::collection::vec(result_block(), 0..3), any::<bool>())
            .prop_map(|(id, content, is_error)| Block::ToolResult(ToolResult {
                id: ToolUseId(id),
                content,
                is_error,
            })),
        2 => (text(), "s?").prop_map(|(thinking, signature)| {
            Block::Thinking(SignedThinking { thinking, signature })
        }),
        1 => "r?".prop_map(|data| Block::RedactedThinking(RedactedThinking { data })),
    ]
}

fn any_message() -> impl Strategy<Value = Message> {
    let role = prop_oneof![
        4 => Just(Role::User),
        4 => Just(Role::Assistant),
        1 => Just(Role::System),
    ];
    (role, prop::collection::vec(block(), 0..5))
        .prop_map(|(role, content)| Message { role, content })
}

fn any_history() -> impl Strategy<Value = Vec<Message>> {
    prop::collection::vec(any_message(), 0..10)
}

/// `None` for a history that is an error, which has to be one of the two documented ones.
fn outcome(history: &[Message]) -> Option<Normalised<'_>> {
    match normalise(history, &NormaliseOptions::default()) {
        Ok(normalised) => Some(normalised),
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::RequestInvalid);
            None
        }
    }
}

fn thinking_of<'a>(blocks: impl Iterator<Item = &'a Block>) -> Vec<&'a Block> {
    blocks
        .filter(|block| match block {
            Block::Thinking(thinking) => !thinking.signature.is_empty(),
            Block::RedactedThinking(redacted) => !redacted.data.is_empty(),
            _ => false,
        })
        .collect()
}

/// Every text that a reader of the conversation can see, without those of the normaliser.
fn words<'a>(blocks: impl Iterator<Item = &'a Block>) -> Vec<String> {
    let mut words = Vec::new();
    for block in blocks {
        match block {
            Block::Text { text } => words.push(text.clone()),
            Block::ToolUse(call) => words.push(format!("call {}", call.name)),
            Block::ToolResult(result) => {
                words.extend(result.content.iter().filter_map(|p| match p {
                    ResultBlock::Text { text } => Some(text.clone()),
                    _ => None,
                }))
            }
            _ => {}
        }
    }
    words.retain(|word| !is_blank(word) && !word.starts_with(MARK));
    words.sort();
    words
}

/// As [`words`], from a history in which nothing is dropped or turned into marked text: each call answered once in the next
/// message.
fn tidy_turn() -> impl Strategy<Value = (Vec<Block>, Vec<Block>)> {
    let name = "[a-z]{1,4}";
    (
        prop::collection::vec((prop::bool::ANY, name, text()), 1..6),
        prop::collection::vec(text().prop_map(Block::text), 0..3),
        any::<bool>(),
    )
        .prop_map(|(parts, says, first_thinks)| {
            let mut assistant = vec![Block::text("said")];
            if first_thinks {
                assistant.insert(0, think("t"));
            }
            let mut user = says;
            for (n, (calls, name, text)) in parts.into_iter().enumerate() {
                if calls {
                    // The same few ids in every turn.
                    let id = ToolUseId(format!("id.{n}"));
                    assistant.push(Block::ToolUse(ToolCall {
                        id: id.clone(),
                        name,
                        input: ToolInput::empty(),
                    }));
                    user.push(Block::ToolResult(ToolResult::text(id, text)));
                } else {
                    assistant.push(Block::text(text));
                }
            }
            user.push(Block::text("asked"));
            (assistant, user)
        })
}

fn tidy_history() -> impl Strategy<Value = Vec<Message>> {
    (text(), prop::collection::vec(tidy_turn(), 0..6)).prop_map(|(first, turns)| {
        let mut history = vec![user(vec![Block::text(first), Block::text("q")])];
        for (said, asked) in turns {
            history.push(assistant(said));
            history.push(user(asked));
        }
        history
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_outcome_is_valid(history in any_history()) {
        if let Some(normalised) = outcome(&history) {
            let valid = check(&normalised.messages);
            prop_assert!(valid.is_ok(), "{valid:?} {:#?}", normalised.messages);
        }
    }

    #[test]
    fn normalising_again_changes_nothing(history in any_history()) {
        if let Some(once) = outcome(&history) {
            let once = once.to_messages();
            let twice = normal(&once);
            prop_assert_eq!(&twice.changes, &vec![]);
            prop_assert_eq!(twice.to_messages(), once);
        }
    }

    #[test]
    fn whatever_changed_was_said(history in any_history()) {
        if let Some(normalised) = outcome(&history)
            && normalised.changes.is_empty()
        {
            prop_assert_eq!(normalised.to_messages(), history);
        }
    }

    #[test]
    fn signed_thinking_keeps_its_bytes_and_order(history in any_history()) {
        if let Some(normalised) = outcome(&history) {
            let of_assistant = history.iter().filter(|m| m.role == Role::Assistant);
            let before = thinking_of(of_assistant.flat_map(|m| &m.content));
            let after = thinking_of(normalised.messages.iter().flat_map(|m| &m.content).map(|b| &**b));
            prop_assert_eq!(before, after);
        }
    }

    #[test]
    fn a_conversation_that_grows_keeps_its_bytes(
        history in any_history(),
        answer in prop::collection::vec(block(), 0..4),
        more in any_history(),
    ) {
        // What a host does: it sends A, gets an answer, and sends A, the answer and more. Every call of A is answered in A.
        let Some(short) = outcome(&history) else { return Ok(()) };
        let bad = [Rule::MissingResult, Rule::TrailingAssistant];
        prop_assume!(!short.changes.iter().any(|change| bad.contains(&change.rule)));
        let mut grown = history.clone();
        let mut said = vec![Block::text("said")];
        said.extend(answer);
        grown.push(assistant(said));
        grown.extend(more);
        let Some(long) = outcome(&grown) else { return Ok(()) };
        prop_assert_eq!(&long.messages[..short.messages.len()], &short.messages[..]);
        prop_assert_eq!(
            &digest::prefixes(&long)[..short.messages.len()],
            &digest::prefixes(&short)[..]
        );
    }

    #[test]
    fn a_tidy_conversation_loses_nothing(history in tidy_history()) {
        let normalised = normal(&history);
        let before = words(history.iter().flat_map(|m| &m.content));
        let after = words(normalised.messages.iter().flat_map(|m| &m.content).map(|b| &**b));
        prop_assert_eq!(before, after);
        let documented = [Rule::BlankText, Rule::RenamedId, Rule::MovedResult];
        for change in &normalised.changes {
            prop_assert!(documented.contains(&change.rule), "{change:?}");
        }
    }

    #[test]
    fn no_call_is_ever_lost(history in any_history()) {
        if let Some(normalised) = outcome(&history) {
            let calls = |messages: &[Message]| messages
                .iter()
                .filter(|m| m.role == Role::Assistant)
                .flat_map(Message::tool_calls)
                .map(|call| call.name.clone())
                .collect::<Vec<_>>();
            prop_assert_eq!(calls(&history), calls(&normalised.to_messages()));
        }
    }
}
