//! What the pool's CLI holds is what the host holds: after edits, changes, cancels and many tools; and two conversations
//! never meet.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use turnpass::Request;
use turnpass::conversation::{Block, Message, ToolResult};
use turnpass::event::{Event, PlanKind};
use turnpass::pool::status;
use turnpass_lab::upstream::Recorded;

use crate::stage::{
    Heard, Stage, ask, ask_with_tools, assert_valid, go_on, hear, host_messages, told, tool,
};

/// From the end of a generation until everything of its process is gone.
const GONE: Duration = Duration::from_secs(6);

fn how(heard: &Heard) -> (PlanKind, String) {
    let mut plans = heard.events.iter().filter_map(|event| match event {
        Event::Started { how, .. } => Some((how.kind, how.reason.clone())),
        _ => None,
    });
    plans
        .next_back()
        .unwrap_or_else(|| panic!("never started: {heard:?}"))
}

/// The texts of a request, role by role, as the service was given them.
fn texts(sent: &Recorded) -> Vec<(String, String)> {
    let of = |message: &Value| {
        let blocks = message["content"].as_array().unwrap();
        let texts = blocks.iter().filter_map(|block| block["text"].as_str());
        (
            message["role"].as_str().unwrap().to_owned(),
            texts.collect::<Vec<_>>().join("|"),
        )
    };
    host_messages(sent).iter().map(of).collect()
}

/// The same of a request of the host's.
fn wanted(request: &Request) -> Vec<(String, String)> {
    let of = |message: &Message| {
        let texts = message.content.iter().filter_map(Block::as_text);
        let role = match message.role {
            turnpass::conversation::Role::Assistant => "assistant",
            _ => "user",
        };
        (role.to_owned(), texts.collect::<Vec<_>>().join("|"))
    };
    request.messages.iter().map(of).collect()
}

#[track_caller]
fn assert_last_is(stage: &Stage, request: &Request) {
    let sent = stage.sent();
    assert_eq!(texts(sent.last().unwrap()), wanted(request));
}

/// A conversation of some turns, as the host has it.
async fn talked(provider: &turnpass::Provider, turns: usize) -> Request {
    let mut request = ask("[[say answer 0]] question 0");
    for turn in 1..=turns {
        let heard = told(provider, request.clone()).await;
        request.messages.push(heard.done().message.clone());
        request.messages.push(Message::user(format!(
            "[[say answer {turn}]] question {turn}"
        )));
        if let turnpass::event::StateOrder::Keep { state } = &heard.done().state {
            request.state = Some(state.clone());
        }
    }
    request
}

#[tokio::test]
async fn bug_058_two_requests_of_the_pool_differ_by_their_end_alone() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let mut request = talked(&provider, 3).await;
    request.tools.clear();
    told(&provider, request.clone()).await.done();
    provider.shutdown().await.unwrap();
    // Another process, of a program that was started anew.
    let provider = stage.pool(|_| {});
    told(&provider, request).await.done();
    let sent = stage.sent();
    for pair in sent.windows(2) {
        for field in ["/tools", "/system", "/model"] {
            assert_eq!(pair[0].field(field), pair[1].field(field), "{field}");
        }
        let (before, after) = (host_messages(&pair[0]), host_messages(&pair[1]));
        assert_eq!(before[..], after[..before.len()]);
    }
}

#[tokio::test]
async fn bug_064_to_066_and_074_every_tool_is_there_as_it_was_given() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let mut request = ask("[[say x]]");
    let nested = json!({"type": "object", "properties": {"list": {"type": "array", "items": {"type": "object",
        "properties": {"kind": {"const": "a"}, "n": {"enum": [1, 2.5]}, "s": {"type": "string", "pattern": "^a+$", "format": "uri",
        "description": "deep"}}, "required": ["kind"]}}}, "additionalProperties": true, "$defs": {"x": {"type": "null"}}});
    for at in 0..120 {
        let mut one = tool(&format!("tool_{at:03}"));
        one.input_schema = nested.clone();
        one.input_schema["properties"]["pad"] =
            json!({"type": "string", "description": "p".repeat(1500)});
        request.tools.push(one);
    }
    let odd = [
        json!({"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}),
        json!({"allOf": [{"type": "object"}], "if": {}, "then": {}}),
        json!({"$ref": "#/$defs/o", "$defs": {"o": {"type": "object", "properties": {"a": {}}}}}),
        json!({"type": ["object", "null"]}),
        json!({}),
        json!({"properties": {"a": {"type": "string"}}}),
    ];
    for (at, schema) in odd.into_iter().enumerate() {
        let mut one = tool(&format!("odd_{at}"));
        one.input_schema = schema;
        request.tools.push(one);
    }
    told(&provider, request.clone()).await.done();
    let sent = stage.sent();
    let tools = sent[0].field("/tools").unwrap().as_array().unwrap().clone();
    let name = |tool: &Value| tool["name"].as_str().unwrap().to_owned();
    let got: BTreeSet<_> = tools.iter().map(name).collect();
    let want: BTreeSet<_> = request
        .tools
        .iter()
        .map(|tool| format!("mcp__turnpass__{}", tool.name))
        .collect();
    assert_eq!(got, want);
    for tool in &tools {
        assert!(tool.get("defer_loading").is_none());
        assert_eq!(tool["input_schema"]["type"], "object", "{tool}");
        if name(tool).contains("tool_") {
            let list = &tool["input_schema"]["properties"]["list"];
            assert_eq!(*list, nested["properties"]["list"]);
        }
    }
}

#[tokio::test]
async fn bug_067_each_of_many_equal_calls_gets_its_own_result() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let call = r#"[[call read {"path":"same"}]] "#.repeat(4);
    let request = ask_with_tools(format!("{call} [[call read {{}}]] [[then [[say all]]]]"));
    let heard = told(&provider, request.clone()).await;
    let calls = heard.calls();
    assert_eq!(calls.len(), 5);
    let ids: BTreeSet<_> = calls.iter().map(|call| call.id.clone()).collect();
    assert_eq!(ids.len(), 5);
    let mut next = go_on(&request, heard.done());
    next.messages.last_mut().unwrap().content.reverse();
    assert_eq!(told(&provider, next).await.text(), "all");
    let sent = stage.sent();
    let results = sent[1].field("/messages").unwrap().as_array().unwrap();
    let results: Vec<_> = results
        .iter()
        .flat_map(|message| message["content"].as_array().cloned().unwrap_or_default())
        .filter(|block| block["type"] == "tool_result")
        .collect();
    assert_eq!(results.len(), 5);
    for result in results {
        let id = result["tool_use_id"].as_str().unwrap();
        assert!(
            result["content"]
                .to_string()
                .contains(&format!("result of {id}")),
            "{result}"
        );
    }
    assert_valid(&sent);
}

#[tokio::test]
async fn bug_072_results_go_whole_up_to_the_limit_and_are_cut_with_a_note_beyond() {
    for (bytes, whole) in [
        (30_000, true),
        (120_000, true),
        (450_000, true),
        (3_000_000, false),
    ] {
        let stage = Stage::emulator();
        let provider = stage.pool(|_| {});
        let mut request = ask_with_tools("[[call read {}]] [[then [[say done]]]]");
        request.model = "claude-opus-4-6[1m]".into();
        let heard = told(&provider, request.clone()).await;
        let mut next = request.clone();
        next.messages.push(heard.done().message.clone());
        let id = heard.calls()[0].id.clone();
        let text = "é".repeat(bytes / 2);
        next.messages
            .push(Message::results(vec![ToolResult::text(id, text.clone())]));
        let heard = told(&provider, next).await;
        assert_eq!(heard.text(), "done", "{bytes}: {:?}", heard.error);
        let sent = stage.sent();
        let body = String::from_utf8_lossy(&sent[1].body).into_owned();
        assert_eq!(body.contains(&text), whole, "{bytes}");
        assert!(!body.contains("saved to"), "no file that nobody can open");
        assert!(body.len() > bytes.min(450_000), "{bytes}: {}", body.len());
    }
}

#[tokio::test]
async fn bug_075_thirty_rounds_of_tools_reach_the_host_each_time() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let rounds = "[[then [[call read {}]] ".repeat(29);
    let end = "[[then [[say done]]]]";
    let mut request = ask_with_tools(format!(
        "[[call read {{}}]] {rounds}{end}{}",
        "]]".repeat(29)
    ));
    for round in 0..30 {
        let heard = told(&provider, request.clone()).await;
        assert_eq!(heard.calls().len(), 1, "{round}: {heard:?}");
        request = go_on(&request, heard.done());
    }
    assert_eq!(told(&provider, request).await.text(), "done");
    assert_eq!(stage.recording().runs.len(), 1, "one process for all");
    assert_eq!(stage.sent().len(), 31);
    assert_valid(&stage.sent());
}

#[tokio::test]
async fn bug_079_a_changed_prompt_or_tool_is_in_the_next_request() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let mut request = talked(&provider, 1).await;
    type Change = fn(&mut Request);
    let changes: [(&str, Change); 5] = [
        ("prompt", |request| {
            request.system = "You are another.".into()
        }),
        ("tool added", |request| request.tools.push(tool("extra"))),
        ("schema changed", |request| {
            request.tools[0].input_schema["properties"]["more"] = json!({"type": "string"});
        }),
        ("tool removed", |request| request.tools.clear()),
        ("model", |request| request.model = "opus".into()),
    ];
    for (what, change) in changes {
        change(&mut request);
        let heard = told(&provider, request.clone()).await;
        heard.done();
        let sent = stage.sent();
        let last = sent.last().unwrap();
        assert!(
            last.field("/system")
                .unwrap()
                .to_string()
                .contains(&request.system),
            "{what}"
        );
        let names: BTreeSet<_> = last
            .field("/tools")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .map(|tool| tool["name"].as_str().unwrap().to_owned())
            .collect();
        let want: BTreeSet<_> = request
            .tools
            .iter()
            .map(|tool| format!("mcp__turnpass__{}", tool.name))
            .collect();
        assert_eq!(names, want, "{what}");
        assert_eq!(texts(last), wanted(&request), "{what}");
        let model = last.field("/model").unwrap().as_str().unwrap();
        assert_eq!(model.contains("opus"), request.model.0 == "opus", "{what}");
        request.messages.push(heard.done().message.clone());
        request.messages.push(Message::user("[[say more]] and on"));
    }
}

#[tokio::test]
async fn bug_081_conversations_without_a_name_never_meet() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let (mut one, mut other) = (ask("hi [[say hello]]"), ask("hi [[say hello]]"));
    other.system = "You are another.".into();
    for round in 0..3 {
        for (name, request) in [("one", &mut one), ("other", &mut other)] {
            let heard = told(&provider, request.clone()).await;
            assert_last_is(&stage, request);
            let sent = stage.sent();
            let system = sent.last().unwrap().field("/system").unwrap().to_string();
            assert!(system.contains(&request.system));
            request.messages.push(heard.done().message.clone());
            request.messages.push(Message::user(format!(
                "{name} {round} [[say {name} {round}]]"
            )));
        }
    }
}

#[tokio::test]
async fn bug_082_after_any_edit_the_service_gets_exactly_the_new_history() {
    type Edit = fn(&mut Vec<Message>);
    let edits: [(&str, Edit, bool); 6] = [
        (
            "the last pair removed",
            |all| drop(all.splice(5..7, [])),
            false,
        ),
        (
            "an old message edited",
            |all| all[0] = Message::user("another beginning"),
            false,
        ),
        ("the same list again", |_| {}, true),
        (
            "the beginning summarised",
            |all| {
                drop(all.splice(
                    0..4,
                    [Message::user("a summary"), Message::assistant("good")],
                ))
            },
            false,
        ),
        (
            "the middle dropped",
            |all| drop(all.splice(2..4, [])),
            false,
        ),
        (
            "an answer rewritten",
            |all| all[1] = Message::assistant("never said"),
            false,
        ),
    ];
    for (what, edit, _) in edits {
        for keeps_state in [false, true] {
            let stage = Stage::emulator();
            let provider = stage.pool(|_| {});
            let mut request = talked(&provider, 4).await;
            told(&provider, request.clone()).await.done();
            edit(&mut request.messages);
            if !keeps_state {
                request.state = None;
            }
            let heard = told(&provider, request.clone()).await;
            heard.done();
            assert_last_is(&stage, &request);
            assert!(!how(&heard).1.is_empty(), "{what}: no reason");
            // And it goes on from there.
            request.messages.push(heard.done().message.clone());
            request.messages.push(Message::user("[[say on]] and on"));
            let heard = told(&provider, request.clone()).await;
            assert_eq!(heard.text(), "on");
            assert_last_is(&stage, &request);
            assert_eq!(how(&heard).0, PlanKind::Continued, "{what}");
            assert_valid(&stage.sent());
        }
    }
}

#[tokio::test]
async fn bug_087_a_history_that_broke_off_in_a_call_goes_on() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let request = ask_with_tools("[[call read {}]] [[call write {}]]");
    let heard = told(&provider, request.clone()).await;
    // The host died before the results, and its person says something else.
    for fresh in [false, true] {
        if fresh {
            provider.shutdown().await.unwrap();
        }
        let provider = stage.pool(|_| {});
        let mut next = request.clone();
        next.messages.push(heard.done().message.clone());
        next.messages.push(Message::user("[[say on]] go on"));
        assert_eq!(told(&provider, next).await.text(), "on");
    }
    assert_valid(&stage.sent());
}

/// What a host does next.
#[derive(Clone, Debug)]
enum Deed {
    Ask,
    /// Asks, and leaves after so many milliseconds.
    Leave(u64),
    /// Asks for a call, and brings its result.
    Call,
    /// Asks for a call, and says something else in place of its result.
    Abandon,
    /// Forgets its last exchange.
    Forget,
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        3 => Just(Deed::Ask),
        3 => (0u64..40).prop_map(Deed::Leave),
        2 => Just(Deed::Call),
        1 => Just(Deed::Abandon),
        1 => Just(Deed::Forget),
    ]
}

/// One conversation of a host that marks everything it says.
struct Talker {
    name: &'static str,
    request: Request,
    count: usize,
}

impl Talker {
    fn new(name: &'static str) -> Self {
        let mut request = ask_with_tools("");
        request.messages.clear();
        request.session.0 = name.to_owned();
        Self {
            name,
            request,
            count: 0,
        }
    }

    fn say(&mut self, directives: &str) {
        self.count += 1;
        let text = format!("{directives} {} says {}", self.name, self.count);
        self.request.messages.push(Message::user(text));
    }

    async fn hear(&mut self, provider: &turnpass::Provider) -> Heard {
        let heard = told(provider, self.request.clone()).await;
        let done = heard.done();
        if let turnpass::event::StateOrder::Keep { state } = &done.state {
            self.request.state = Some(state.clone());
        }
        self.request.messages.push(done.message.clone());
        heard
    }

    async fn act(&mut self, provider: &turnpass::Provider, deed: &Deed) {
        let name = self.name;
        match deed {
            Deed::Ask => {
                self.say(&format!("[[say {name} hears]]"));
                assert_eq!(self.hear(provider).await.text(), format!("{name} hears"));
            }
            Deed::Leave(ms) => {
                self.say(&format!(
                    "[[say {name} does not hear all of this]] [[chunk 4 ms 3]]"
                ));
                let generation = provider.generate(self.request.clone());
                let heard =
                    tokio::time::timeout(Duration::from_millis(*ms), hear(generation)).await;
                // What was not heard to its end was never said.
                drop(heard);
                self.request.messages.pop();
            }
            Deed::Call | Deed::Abandon => {
                let begin = self.request.messages.len();
                self.say(&format!(
                    "[[call read {{}}]] [[then [[say {name} is done]]]]"
                ));
                let heard = self.hear(provider).await;
                if matches!(deed, Deed::Abandon) {
                    self.request.messages.truncate(begin);
                    return;
                }
                let id = heard.calls()[0].id.clone();
                let result = ToolResult::text(id, format!("result for {name}"));
                self.request.messages.push(Message::results(vec![result]));
                assert_eq!(self.hear(provider).await.text(), format!("{name} is done"));
            }
            Deed::Forget => {
                let keep = self.request.messages.len().saturating_sub(2);
                let is_question = |message: &Message| {
                    message.role == turnpass::conversation::Role::User
                        && message
                            .content
                            .iter()
                            .all(|block| block.as_text().is_some())
                };
                if self.request.messages.get(keep).is_some_and(is_question) {
                    self.request.messages.truncate(keep);
                }
            }
        }
    }
}

async fn interleaved(one: Vec<Deed>, other: Vec<Deed>) {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let talk = |name: &'static str, deeds: Vec<Deed>| {
        let provider = provider.clone();
        async move {
            let mut talker = Talker::new(name);
            for deed in &deeds {
                talker.act(&provider, deed).await;
            }
            talker.say("[[say last]]");
            assert_eq!(talker.hear(&provider).await.text(), "last");
            talker.request.messages.pop();
            talker.request
        }
    };
    let (one, other) = tokio::join!(talk("alice", one), talk("bob", other));
    let sent = stage.sent();
    for (name, stranger, request) in [("alice", "bob", one), ("bob", "alice", other)] {
        let own = |sent: &&Recorded| String::from_utf8_lossy(&sent.body).contains(name);
        let own: Vec<_> = sent.iter().filter(own).collect();
        for sent in &own {
            let body = String::from_utf8_lossy(&sent.body);
            assert!(!body.contains(stranger), "{name} sees {stranger}: {body}");
        }
        assert_eq!(
            texts(own.last().unwrap()),
            wanted(&request),
            "{name}'s history is not the service's"
        );
    }
    assert_valid(&sent);
    provider.shutdown().await.unwrap();
    stage.all_gone(Duration::from_secs(1)).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 20, ..ProptestConfig::default() })]
    #[test]
    fn bug_076_and_081_two_conversations_never_meet_and_cancels_leave_no_trace(
        one in prop::collection::vec(deed(), 1..7),
        other in prop::collection::vec(deed(), 1..7),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(interleaved(one, other));
    }
}

/// What a pool has left behind on disk, beside the CLI's own folder.
fn left(stage: &Stage) -> Vec<String> {
    let pool = stage.path("state/pool");
    ["locks", "status"]
        .iter()
        .flat_map(|part| std::fs::read_dir(pool.join(part)).into_iter().flatten())
        .map(|entry| entry.unwrap().path().display().to_string())
        .collect()
}

#[tokio::test]
async fn three_hundred_generations_of_one_key_leave_nothing_and_need_one_process() {
    let stage = Stage::emulator();
    let provider = stage.pool(|_| {});
    let mut request = ask("[[say 0]]");
    for turn in 1..=300 {
        let heard = told(&provider, request.clone()).await;
        if turn % 100 == 0 {
            // As after a summary of the host's own.
            request.messages = vec![Message::user(format!("[[say {turn}]]"))];
            continue;
        }
        request.messages.push(heard.done().message.clone());
        request
            .messages
            .push(Message::user(format!("[[say {turn}]]")));
    }
    assert_eq!(stage.recording().runs.len(), 3, "one for each history");
    let shown = status::read(&stage.path("state"));
    assert_eq!(shown[0].sessions.len(), 1);
    provider.shutdown().await.unwrap();
    stage.all_gone(Duration::from_secs(1)).await;
    assert_eq!(left(&stage), Vec::<String>::new());
}

#[tokio::test]
async fn a_hundred_keys_one_after_the_other_leave_nothing() {
    let stage = Stage::emulator();
    let provider = stage.pool(|options| {
        options.memory_budget_bytes = 3 * turnpass::relay::PROCESS_BYTES;
        options.spare = true;
    });
    for key in 0..100 {
        let mut request = ask(format!("[[say {key}]]"));
        request.session.0 = format!("key {key}");
        assert_eq!(told(&provider, request).await.text(), key.to_string());
    }
    assert!(left(&stage).len() <= 3 + 1, "{:?}", left(&stage));
    provider.shutdown().await.unwrap();
    stage.all_gone(GONE).await;
    assert_eq!(left(&stage), Vec::<String>::new());
}
