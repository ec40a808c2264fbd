//! Which request gets which answer. The state that replies, cache and account routes share is here, behind one lock that
//! is never held over a wait.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::cache::{self, Cache, CacheOptions};
use super::checks::{self, Check, Checks, Violation};
use super::message::Asked;
use super::record::{Log, Recorded};
use super::script::{Script, compile};
use super::signature::Signer;
use super::{REQUEST_LIMIT_BYTES, account, model};
use crate::scenario::{Reply, Scenario, TokenAnswer, UsageAnswer, When};

/// Everything that the connections share.
pub(crate) struct Lab {
    pub(crate) log: Log,
    pub(crate) checks: Checks,
    pub(crate) cache_options: CacheOptions,
    pub(crate) recorder: Option<super::files::Recorder>,
    pub(crate) state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) scenario: Scenario,
    pub(crate) queue: VecDeque<Reply>,
    pub(crate) usage: VecDeque<UsageAnswer>,
    pub(crate) token: VecDeque<TokenAnswer>,
    pub(crate) signer: Signer,
    pub(crate) cache: Cache,
    messages: u64,
    tokens: u64,
}

impl State {
    pub(crate) fn new(scenario: Scenario, signer: Signer) -> Self {
        Self {
            queue: scenario.replies.iter().cloned().collect(),
            usage: scenario.usage.iter().cloned().collect(),
            token: scenario.token.iter().cloned().collect(),
            scenario,
            signer,
            cache: Cache::default(),
            messages: 0,
            tokens: 0,
        }
    }

    /// The first reply of the queue that fits; it is used up once it has served its number of times.
    fn next_reply(&mut self, request: &Value) -> Option<Reply> {
        let fits = |reply: &Reply| reply.times > 0 && meets(&reply.when, request, self.messages);
        let Some(at) = self.queue.iter().position(fits) else {
            return self.scenario.default.as_deref().cloned();
        };
        let reply = self.queue.get_mut(at)?;
        reply.times -= 1;
        let reply = reply.clone();
        if reply.times == 0 {
            self.queue.remove(at);
        }
        Some(reply)
    }
}

/// The next answer of a list whose last one stays.
fn next<T: Clone + Default>(list: &mut VecDeque<T>) -> T {
    match list.len() {
        0 => T::default(),
        1 => list[0].clone(),
        _ => list.pop_front().unwrap_or_default(),
    }
}

fn meets(when: &When, request: &Value, nth: u64) -> bool {
    let contains = |text: &String| last_user_contains(request, text);
    when.model
        .as_ref()
        .is_none_or(|model| request["model"] == **model)
        && when.nth.is_none_or(|wanted| wanted == nth)
        && when.stream.is_none_or(|wanted| wanted == streams(request))
        && when.contains.as_ref().is_none_or(contains)
}

fn streams(request: &Value) -> bool {
    request["stream"] == true
}

fn last_user_contains(request: &Value, text: &str) -> bool {
    let messages = request["messages"].as_array().into_iter().flatten();
    messages
        .rev()
        .find(|message| message["role"] == "user")
        .is_some_and(|message| strings_contain(&message["content"], text))
}

fn strings_contain(value: &Value, text: &str) -> bool {
    match value {
        Value::String(string) => string.contains(text),
        Value::Array(items) => items.iter().any(|item| strings_contain(item, text)),
        Value::Object(fields) => fields.values().any(|field| strings_contain(field, text)),
        _ => false,
    }
}

impl Lab {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a request whose body is complete, and says what to answer.
    pub(crate) fn answer(&self, recorded: Recorded) -> (u64, Script) {
        let (number, mut script) = self.decide(recorded);
        if super::http::find(&script.headers, "request-id").is_none() {
            script.set_header("request-id", &format!("req_lab{number:08}"));
        }
        (number, script)
    }

    fn decide(&self, mut recorded: Recorded) -> (u64, Script) {
        let method = recorded.method.clone();
        let path = recorded.path.clone();
        match (method.as_str(), path.as_str()) {
            ("POST", "/v1/messages") => return self.messages(recorded),
            ("POST", "/v1/messages/count_tokens") => return self.count_tokens(recorded),
            _ => {}
        }
        if recorded.body_bytes > REQUEST_LIMIT_BYTES {
            recorded.violations = vec![too_large(&recorded)];
        }
        let number = self.log.push(recorded);
        let mut state = self.state();
        let models = || -> Vec<String> {
            let listed = state.scenario.models.clone();
            listed.unwrap_or_else(|| account::MODELS.map(str::to_owned).to_vec())
        };
        let script = match (method.as_str(), path.as_str()) {
            ("GET", "/v1/models") => account::models(&models()),
            ("GET", path) if path.starts_with("/v1/models/") => {
                account::one_model(&models(), &path["/v1/models/".len()..])
            }
            ("GET", "/api/oauth/usage") => account::usage(&next(&mut state.usage)),
            ("GET", "/api/oauth/profile") => {
                let given = state.scenario.profile.clone();
                Script::json(200, &given.unwrap_or_else(account::profile))
            }
            ("HEAD" | "GET", "/api/hello") => Script::json(200, &json!({"message": "hello"})),
            ("POST", "/v1/oauth/token") => {
                state.tokens += 1;
                let answer = next(&mut state.token);
                account::token(&answer, state.tokens)
            }
            _ => Script::error(
                404,
                "not_found_error",
                &format!("no route: {method} {path}"),
            ),
        };
        (number, script)
    }

    fn violations(&self, recorded: &Recorded, state: &State, counting: bool) -> Vec<Violation> {
        if recorded.body_bytes > REQUEST_LIMIT_BYTES && self.checks.is_on(Check::Size) {
            return vec![too_large(recorded)];
        }
        checks::check(
            recorded.json.as_deref(),
            &self.checks,
            &state.signer,
            counting,
        )
    }

    /// The refusal of a request that broke a rule, if rules refuse.
    fn refusal(&self, violations: &[Violation]) -> Option<Script> {
        let first = violations.first().filter(|_| self.checks.refuses())?;
        Some(match first.check {
            Check::Size => Script::error(413, "request_too_large", &first.message()),
            _ => Script::error(400, "invalid_request_error", &first.message()),
        })
    }

    fn count_tokens(&self, mut recorded: Recorded) -> (u64, Script) {
        recorded.violations = self.violations(&recorded, &self.state(), true);
        let refusal = self.refusal(&recorded.violations);
        let json = recorded.json.clone();
        let number = self.log.push(recorded);
        let script = refusal.unwrap_or_else(|| {
            let count = json.as_deref().map_or(0, cache::count);
            Script::json(200, &json!({"input_tokens": count}))
        });
        (number, script)
    }

    fn messages(&self, mut recorded: Recorded) -> (u64, Script) {
        let mut guard = self.state();
        let state = &mut *guard;
        state.messages += 1;
        recorded.violations = self.violations(&recorded, state, false);
        let refusal = self.refusal(&recorded.violations);
        let request: Arc<Value> = recorded.json.clone().unwrap_or_default();
        if let Some(refusal) = refusal {
            return (self.log.push(recorded), refusal);
        }
        let report = state.cache.admit(&request, &self.cache_options);
        let usage = report.usage();
        recorded.cache = Some(report);
        let number = self.log.push(recorded);
        let scripted = state.next_reply(&request);
        let reply = fill(scripted, &request);
        let tools: Vec<String> = request["tools"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|tool| tool["name"].as_str().map(str::to_owned))
            .collect();
        let asked = Asked {
            number,
            model: request["model"].as_str().unwrap_or_default(),
            stream: streams(&request),
            tools: &tools,
            usage,
            signer: &state.signer,
        };
        let mut script = compile(&reply, &asked);
        for (name, value) in &state.scenario.headers {
            if super::http::find(&script.headers, name).is_none() {
                script.set_header(name, value);
            }
        }
        for (signature, text) in &script.issued {
            state.signer.admit_for(signature, text);
        }
        (number, script)
    }
}

/// Lets the directive model say what a reply does not.
fn fill(scripted: Option<Reply>, request: &Value) -> Reply {
    let Some(reply) = scripted else {
        return model::answer(request);
    };
    let said = reply.content.is_some()
        || reply.events.is_some()
        || reply.body.is_some()
        || reply.error.is_some()
        || reply.status >= 300;
    let answer = match &reply.directives {
        Some(text) => model::answer_directives(text, request),
        None if said => return reply,
        None => model::answer(request),
    };
    // The directives give the message; the scripted reply gives its shape where it says something.
    Reply {
        content: answer.content,
        error: answer.error,
        status: if reply.status == 200 {
            answer.status
        } else {
            reply.status
        },
        stop_reason: reply.stop_reason.or(answer.stop_reason),
        stop_details: reply.stop_details.or(answer.stop_details),
        usage: if reply.usage.is_empty() {
            answer.usage
        } else {
            reply.usage
        },
        headers: answer.headers.into_iter().chain(reply.headers).collect(),
        before_head_ms: reply.before_head_ms.max(answer.before_head_ms),
        between_events_ms: reply.between_events_ms.max(answer.between_events_ms),
        at: answer.at.into_iter().chain(reply.at).collect(),
        cut: reply.cut.or(answer.cut),
        encoding: if reply.encoding.is_empty() {
            answer.encoding
        } else {
            reply.encoding
        },
        ..reply
    }
}

fn too_large(recorded: &Recorded) -> Violation {
    Violation {
        check: Check::Size,
        place: "body".into(),
        problem: format!(
            "has {} bytes, at most {REQUEST_LIMIT_BYTES} are allowed",
            recorded.body_bytes
        ),
    }
}
