//! Control requests that a script has answered beside its steps, also while a step waits.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::controls::{self, Answer};
use super::emulator::state::State;
use super::pipes::{Lines, Output};
use super::script::Control;

/// Which requests are answered, and with what.
#[derive(Default)]
struct Rules {
    /// Those that no rule names get the default answer.
    all: bool,
    listed: Vec<(Control, u64)>,
}

/// Stdin as the steps see it: without what is answered in the background.
pub(crate) struct Inbox {
    rules: Rc<RefCell<Rules>>,
    answering: Answering,
    lines: mpsc::UnboundedReceiver<Value>,
    /// Lines that came before a rule was made and that no rule takes.
    waiting: VecDeque<Value>,
}

/// What answering needs.
#[derive(Clone)]
struct Answering {
    state: Rc<RefCell<State>>,
    output: Output,
}

impl Inbox {
    /// Starts to sort lines; needs a local task set.
    pub(crate) fn start(mut raw: Lines, state: Rc<RefCell<State>>, output: Output) -> Inbox {
        let rules = Rc::<RefCell<Rules>>::default();
        let answering = Answering { state, output };
        let (sender, lines) = mpsc::unbounded_channel();
        let (made, answers) = (Rc::clone(&rules), answering.clone());
        tokio::task::spawn_local(async move {
            while let Some(bytes) = raw.recv().await {
                let line = serde_json::from_slice(&bytes)
                    .unwrap_or_else(|_| json!({"$not_json": String::from_utf8_lossy(&bytes)}));
                if !take(&made, &answers, &line) && sender.send(line).is_err() {
                    break;
                }
            }
        });
        Inbox {
            rules,
            answering,
            lines,
            waiting: VecDeque::new(),
        }
    }

    /// From here on answers these by itself, or all with the defaults; what already waits counts too.
    pub(crate) fn answer(&mut self, list: Option<&[Control]>) {
        {
            let mut rules = self.rules.borrow_mut();
            match list {
                None => rules.all = true,
                Some(list) => rules
                    .listed
                    .extend(list.iter().map(|control| (control.clone(), 0))),
            }
        }
        while let Ok(line) = self.lines.try_recv() {
            self.waiting.push_back(line);
        }
        self.waiting
            .retain(|line| !take(&self.rules, &self.answering, line));
    }

    /// The next line for a step; `None` at the end of input. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        match self.waiting.pop_front() {
            Some(line) => Some(line),
            None => self.lines.recv().await,
        }
    }
}

/// Whether the line is taken; the answer follows by itself.
fn take(rules: &RefCell<Rules>, answering: &Answering, line: &Value) -> bool {
    if line["type"] == "control_response" {
        return answering.state.borrow().link.answered(line);
    }
    if line["type"] != "control_request" {
        return false;
    }
    let Some(control) = rules.borrow_mut().rule_for(line) else {
        return false;
    };
    if control.ignore {
        return true;
    }
    let (answering, line) = (answering.clone(), line.clone());
    let delay = Duration::from_millis(control.delay_ms);
    if delay.is_zero() {
        answering.now(control, &line);
    } else {
        tokio::task::spawn_local(async move {
            tokio::time::sleep(delay).await;
            answering.now(control, &line);
        });
    }
    true
}

impl Rules {
    fn rule_for(&mut self, line: &Value) -> Option<Control> {
        let subtype = line["request"]["subtype"].as_str().unwrap_or_default();
        let listed = self.listed.iter_mut().find(|(control, used)| {
            control.subtype == subtype && control.times.is_none_or(|times| *used < times)
        });
        match listed {
            Some((control, used)) => {
                *used += 1;
                Some(control.clone())
            }
            None => self.all.then(|| Control::default_for(subtype)),
        }
    }
}

impl Answering {
    fn now(&self, control: Control, line: &Value) {
        // The state follows also when the words of the answer are the script's.
        let default = controls::answer(&mut self.state.borrow_mut(), &line["request"]);
        let answer = match (control.error, control.response) {
            (Some(error), _) => Answer::Error(error, None),
            (None, Some(response)) => Answer::Success(Some(response)),
            (None, None) => default,
        };
        self.output.record(&answer.record(&line["request_id"]));
    }
}
