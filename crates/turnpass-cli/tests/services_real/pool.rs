//! The pool in production shape: its gate asks the process that is running, and overage closes it.
//!
//! The pool reads its surroundings from its own environment, so each is in a host of its own: this program again, which is
//! told line by line what to do.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, ExitCode, Stdio};

use serde_json::{Value, json};
use turnpass::Transport as _;
use turnpass::conversation::{Message, ToolResult};
use turnpass::event::{Event, StateOrder};
use turnpass::pool::{PoolOptions, PoolTransport};
use turnpass::request::{Request, Tool};
use turnpass_lab::scenario::{ExtraUsage, Reply, UsageAnswer};

use super::Test;
use super::stage::Stage;

pub(crate) const TESTS: [(&str, Test); 4] = [
    (
        "pool::rule_1_the_running_process_is_rule_1_the_running_process_is_asked_before_a_message_and_not_before_results_and_not_before_results",
        rule_1_the_running_process_is_asked_before_a_message_and_not_before_results,
    ),
    (
        "pool::rule_4_credits_that_are_on_refuse_and_nothing_is_sent",
        rule_4_credits_that_are_on_refuse_and_nothing_is_sent,
    ),
    (
        "pool::rule_7_overage_closes_the_pool",
        rule_7_overage_closes_the_pool,
    ),
    (
        "pool::cuts_and_refused_requests_cost_one_request",
        cuts_and_refused_requests_cost_one_request,
    ),
];

/// Half a minute of waiting that is our own and no CLI's, so the newest one is enough.
pub(crate) const ON_THE_NEWEST: [(&str, Test); 1] = [(
    "pool::a_usage_endpoint_that_is_6_s_late_refuses",
    late_endpoint,
)];

/// What a host is to use, as JSON; set only in hosts.
const PLAY: &str = "TURNPASS_SERVICES_REAL_POOL";

/// A host in a process of its own.
struct Host {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    records: PathBuf,
}

impl Host {
    fn new(stage: &Stage) -> Self {
        let records = stage.path("records");
        let play =
            json!({"claude": stage.claude, "state": stage.path("state"), "records": records});
        let mut command = stage.command(std::env::current_exe().unwrap());
        let mut child = command
            .env(PLAY, play.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            records,
            child,
        }
    }

    fn told(&mut self, order: &Value) -> Value {
        writeln!(self.input, "{order}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line:?} to {order}"))
    }

    /// Says something in a conversation.
    fn say(&mut self, key: &str, text: &str) -> Value {
        self.told(&json!({"key": key, "say": text}))
    }

    /// Gives the results of the calls.
    fn results(&mut self, key: &str) -> Value {
        self.told(&json!({"key": key}))
    }

    /// How often a process was asked and answered, by the answers that it printed.
    fn questions(&self) -> Vec<usize> {
        let files = std::fs::read_dir(&self.records)
            .into_iter()
            .flatten()
            .flatten();
        let text = files.map(|file| std::fs::read_to_string(file.path()).unwrap());
        text.map(|text| text.matches(r#""rate_limits_available""#).count())
            .collect()
    }

    /// Ends it in order; nothing is left.
    fn finish(mut self, stage: &Stage) {
        assert_eq!(self.told(&json!({"end": true})), json!({"live": 0}));
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
        assert_eq!(stage.left(), [""; 0]);
    }
}

/// Plays the host, if the environment names one.
pub(crate) fn play() -> Option<ExitCode> {
    let play: Value = serde_json::from_str(&std::env::var(PLAY).ok()?).unwrap();
    let path = |field: &str| Some(PathBuf::from(play[field].as_str().unwrap()));
    let options = PoolOptions {
        claude_path: path("claude"),
        state_dir: path("state"),
        record: path("records"),
        spare: false,
        ..PoolOptions::default()
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let pool = PoolTransport::new(options).unwrap();
        let mut talks: std::collections::BTreeMap<String, Request> = Default::default();
        for line in std::io::stdin().lines() {
            let order: Value = serde_json::from_str(&line.unwrap()).unwrap();
            if order["end"] == true {
                pool.shutdown().await.unwrap();
                tell(&json!({"live": pool.live()}));
                return;
            }
            let key = order["key"].as_str().unwrap();
            let talk = talks.entry(key.to_owned()).or_insert_with(|| request(key));
            talk.messages.push(match order["say"].as_str() {
                Some(text) => Message::user(text),
                None => {
                    let calls = talk.messages.last().unwrap().tool_calls();
                    let results = calls.map(|call| ToolResult::text(call.id.clone(), "result"));
                    Message::results(results.collect::<Vec<_>>())
                }
            });
            let told = generate(&pool, talk).await;
            tell(&told);
        }
    });
    Some(ExitCode::SUCCESS)
}

fn tell(value: &Value) {
    println!("{value}");
}

fn request(key: &str) -> Request {
    let mut request = Request::new("sonnet", Vec::new());
    request.session = turnpass::request::TransportSession(key.to_owned());
    request.system = "You are under test.".to_owned();
    request.tools = vec![Tool {
        name: "read".to_owned(),
        description: "Reads.".to_owned(),
        input_schema: json!({"type": "object"}),
    }];
    request
}

async fn generate(pool: &PoolTransport, talk: &mut Request) -> Value {
    let mut generation = pool.generate(talk.clone());
    let mut text = String::new();
    let mut told = Value::Null;
    while let Some(next) = generation.next().await {
        match next {
            Ok(Event::Text { text: piece }) => text += &piece,
            Ok(Event::Done(done)) => {
                talk.messages.push(done.message.clone());
                if let StateOrder::Keep { state } = done.state {
                    talk.state = Some(state);
                }
                told = json!({"stop": done.stop, "requests": done.upstream_requests});
            }
            Ok(_) => {}
            Err(error) => {
                talk.messages.pop();
                told = json!({"error": error.code().as_str()});
            }
        }
    }
    told["text"] = text.into();
    told["live"] = pool.live().into();
    told
}

fn rule_1_the_running_process_is_asked_before_a_message_and_not_before_results(stage: &Stage) {
    let mut host = Host::new(stage);
    let called = host.say(
        "a",
        "[[call read {}]] [[then [[call read {}]] [[then [[say done]]]]]]",
    );
    assert_eq!(called["stop"]["reason"], "tool_use", "{called}");
    assert_eq!(host.questions(), [1]);
    host.results("a");
    assert_eq!(host.results("a")["text"], "done");
    assert_eq!(host.questions(), [1], "results of tools are no new message");
    for number in 2..4 {
        assert_eq!(host.say("a", "[[say on]]")["text"], "on");
        assert_eq!(host.questions(), [number]);
    }
    assert_eq!(stage.upstream.messages().len(), 5);
    // Another conversation is asked on its own process.
    assert_eq!(host.say("b", "[[say other]]")["text"], "other");
    let mut questions = host.questions();
    questions.sort_unstable();
    assert_eq!(questions, [1, 3]);
    host.finish(stage);
}

fn rule_4_credits_that_are_on_refuse_and_nothing_is_sent(stage: &Stage) {
    stage.upstream.set_usage([UsageAnswer {
        extra_usage: ExtraUsage::On,
        ..UsageAnswer::default()
    }]);
    let mut host = Host::new(stage);
    for _ in 0..2 {
        let refused = host.say("a", "[[say never]]");
        assert_eq!(refused["error"], "billing", "{refused}");
    }
    assert!(stage.upstream.messages().is_empty(), "nothing was sent");
    host.finish(stage);
}

fn overage() -> Reply {
    let headers = [
        ("anthropic-ratelimit-unified-status", "rejected"),
        ("anthropic-ratelimit-unified-overage-status", "allowed"),
        ("anthropic-ratelimit-unified-overage-in-use", "true"),
        (
            "anthropic-ratelimit-unified-representative-claim",
            "five_hour",
        ),
    ];
    Reply {
        headers: headers
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        between_events_ms: 50,
        ..Reply::text("a long answer that is paid for, and that nobody wanted to pay for")
    }
}

/// The CLI tells it with the end of the answer (2.1.294 to 2.1.332): that turn fails, and it is the last one.
fn rule_7_overage_closes_the_pool(stage: &Stage) {
    let mut host = Host::new(stage);
    assert_eq!(host.say("a", "[[say hello]]")["text"], "hello");
    assert_eq!(host.say("b", "[[say hello]]")["live"], 2);
    stage.upstream.enqueue(overage());
    let ended = host.say("a", "go on");
    assert_eq!(ended["error"], "billing", "{ended}");
    let sent = stage.upstream.messages().len();
    for key in ["a", "b", "c"] {
        let refused = host.say(key, "[[say never]]");
        assert_eq!(
            (&refused["error"], &refused["live"]),
            (&json!("billing"), &json!(0)),
            "{refused}"
        );
    }
    assert_eq!(
        stage.upstream.messages().len(),
        sent,
        "the pool sends nothing any more"
    );
    assert_eq!(processes(stage), 0, "no process of it lives on");
    host.finish(stage);
}

/// CLI processes that are there after a moment; the host itself is one that stays.
fn processes(stage: &Stage) -> usize {
    let is_cli = |line: &&String| line.contains("stream-json");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let count = stage.left_now().iter().filter(is_cli).count();
        if count == 0 || std::time::Instant::now() > end {
            return count;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn late_endpoint(stage: &Stage) {
    stage.upstream.set_usage([UsageAnswer {
        delay_ms: 6_000,
        ..UsageAnswer::default()
    }]);
    let mut host = Host::new(stage);
    let refused = host.say("a", "[[say never]]");
    assert_eq!(refused["error"], "usage_unconfirmed", "{refused}");
    assert!(stage.upstream.messages().is_empty(), "nothing was sent");
    // It is in time again: the next message goes.
    stage.upstream.set_usage([UsageAnswer::default()]);
    assert_eq!(host.say("a", "[[say at last]]")["text"], "at last");
    host.finish(stage);
}

/// To the first party a refused request is sent once, and the gate in the CLI holds as it does behind a base URL.
fn cuts_and_refused_requests_cost_one_request(stage: &Stage) {
    let mut host = Host::new(stage);
    assert_eq!(host.say("a", "[[say hello]]")["text"], "hello");
    for line in [
        "[[status 400]]",
        "[[chunk 4 ms 100]] [[say some words]] [[stop max_tokens]]",
        "[[chunk 4 ms 100]] [[say some words]] [[stop refusal]]",
        "[[chunk 4 ms 100]] [[say some words]] [[cut after-block end]]",
        "[[chunk 4 ms 100]] [[think some thoughts]]",
        "[[chunk 4 ms 100]] [[say so]] [[raw-call read {\"path\": \"a]]",
    ] {
        let before = stage.upstream.messages().len();
        let told = host.say("a", line);
        assert_eq!(
            stage.upstream.messages().len(),
            before + 1,
            "{line}: {told}"
        );
        if told["stop"]["reason"] == "tool_use" {
            host.results("a");
        }
        assert_eq!(
            host.say("a", "[[say still here]]")["text"],
            "still here",
            "after {line}"
        );
    }
    host.finish(stage);
}
