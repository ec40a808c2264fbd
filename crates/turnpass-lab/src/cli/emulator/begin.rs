//! How a line becomes a turn: the first records, a local answer, an acknowledgement, or requests.

use std::rc::Rc;

use serde_json::{Value, json};

use super::faults::Fault;
use super::state::{State, fresh_uuid};
use super::turn::{self, Shared};
use super::{Queued, body, records};

/// The init record, then a local answer, an acknowledgement, or requests.
pub(super) async fn start_turn(shared: Rc<Shared>, next: Queued) {
    let streaming = shared.state.borrow().flags.output_format() == "stream-json";
    if let Some(uuid) = next.uuid.as_deref().filter(|_| streaming) {
        let record = records::lifecycle(&shared.state.borrow(), uuid, "started");
        shared.say(&record);
    }
    if streaming {
        shared.say(&records::init(&shared.state.borrow()));
    }
    let text = body::text_of(&next.content);
    let command = if next.composed {
        None
    } else {
        slash_command(&text)
    };
    if let Some(command) = command {
        let said = format!("/{command} isn't available in this environment.");
        if streaming {
            shared.say(&records::local_answer(&shared.state.borrow(), &said));
        }
        shared.with_outcome(|outcome| {
            outcome.local = true;
            outcome.result = Some(said);
        });
        return;
    }
    shared.state.borrow_mut().take_results_of(&next.content);
    let content = with_pending(&mut shared.state.borrow_mut(), next.content, next.ask);
    let uuid = next.uuid.clone().unwrap_or_else(fresh_uuid);
    let message = json!({"role": "user", "content": content});
    shared.state.borrow_mut().push(uuid, message, !next.ask);
    if next.ask && shared.state.borrow().faults.has(Fault::AsksForTitle) {
        turn::probe(&shared, "claude-title").await;
    }
    if next.ask {
        turn::run(Rc::clone(&shared), next.uuid).await;
        shared.state.borrow_mut().pending_system = None;
    } else {
        shared.with_outcome(|outcome| {
            outcome.local = true;
            outcome.result = Some(String::new());
        });
    }
}

/// Puts the text of a model change before the user's own.
fn with_pending(state: &mut State, content: Value, ask: bool) -> Value {
    if !ask || state.pending_text.is_empty() {
        return content;
    }
    let mut blocks: Vec<Value> = std::mem::take(&mut state.pending_text)
        .into_iter()
        .map(|text| json!({"type": "text", "text": text}))
        .collect();
    match content {
        Value::Array(own) => blocks.extend(own),
        other => blocks.push(json!({"type": "text", "text": other})),
    }
    json!(blocks)
}

/// `/word` at the start is taken as a command; `/path/with/slashes` is not: measured on 2.1.332.
fn slash_command(text: &str) -> Option<&str> {
    let word = text.strip_prefix('/')?.split_whitespace().next()?;
    (!word.contains('/')).then_some(word)
}
