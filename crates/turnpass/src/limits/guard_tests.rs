//! The guard with a CLI that is a shell script: it notes each start, and answers `get_usage` with what is in a file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use http::HeaderValue;

use super::*;
use crate::cli::environment::InheritedCredentials;
use crate::cli::installed::Installed;
use crate::conversation::{Role, ToolCall, ToolInput, ToolResult, ToolUseId};
use crate::event::Event;
use crate::limits::budget::Ledger;
use crate::limits::state_file::StateFile;
use crate::provider::Generation;

const BOUND: Duration = Duration::from_secs(30);
const OFF: &str = r#"{"rate_limits_available":true,"rate_limits":{"five_hour":{"utilization":70,"resets_at":4000000000},"extra_usage":{"is_enabled":false}}}"#;
const ON: &str =
    r#"{"rate_limits_available":true,"rate_limits":{"extra_usage":{"is_enabled":true}}}"#;

async fn bounded<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, future).await.unwrap()
}

struct Fake {
    dir: tempfile::TempDir,
}

impl Fake {
    fn new(answer: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        let script = format!(
            r#"#!/bin/sh
case "$1" in
--version) echo 2.1.332; exit;;
esac
echo start >> "{at}/starts"
while read -r line; do
  printf '%s\n' "$line" >> "{at}/asked"
  id=$(printf %s "$line" | sed 's/.*"request_id":"\([^"]*\)".*/\1/')
  [ -e "{at}/hang" ] && continue
  printf '{{"type":"control_response","response":{{"subtype":"success","request_id":"%s","response":%s}}}}\n' "$id" "$(cat "{at}/answer")"
done
"#
        );
        // By another process: a file that is open for writing here while another thread forks cannot be executed.
        let mut shell = std::process::Command::new("/bin/sh");
        let shell = shell.args(["-c", "printf %s \"$2\" > \"$1\"", "write"]);
        let program = dir.path().join("claude");
        assert!(shell.arg(&program).arg(script).status().unwrap().success());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let fake = Self { dir };
        fake.say(answer);
        fake
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn say(&self, answer: &str) {
        fs::write(self.path("answer"), answer).unwrap();
    }

    /// What was written to it.
    fn asked(&self) -> Vec<serde_json::Value> {
        let asked = fs::read_to_string(self.path("asked")).unwrap_or_default();
        let lines = asked.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    fn starts(&self) -> usize {
        let starts = fs::read_to_string(self.path("starts")).unwrap_or_default();
        starts.lines().count()
    }

    fn guard(&self, policy: Policy, budgets: Budgets, state: Option<&Path>) -> Arc<Guard> {
        let tmp = self.dir.path().to_str().unwrap();
        let snapshot = [("PATH", "/usr/bin:/bin"), ("TMPDIR", tmp)];
        let installed = Installed::new(
            Some(self.path("claude")),
            snapshot.into_iter().collect(),
            InheritedCredentials::Strip,
        );
        let options = GuardOptions {
            policy,
            budgets,
            state_dir: state.map(Path::to_owned),
        };
        Guard::new(Probe::new(Arc::new(installed)), options)
    }
}

fn said() -> Asked {
    Asked::of(&Request::new("sonnet", vec![Message::user("hello")]))
}

fn results() -> Asked {
    Asked::of(&Request::new("sonnet", vec![call(), answer_of_tools()]))
}

fn call() -> Message {
    Message {
        role: Role::Assistant,
        content: vec![Block::ToolUse(ToolCall {
            id: ToolUseId("toolu_1".to_owned()),
            name: "ask".to_owned(),
            input: ToolInput::from(serde_json::Map::new()),
        })],
    }
}

fn answer_of_tools() -> Message {
    Message {
        role: Role::User,
        content: vec![Block::ToolResult(ToolResult::text(
            ToolUseId("toolu_1".to_owned()),
            "42",
        ))],
    }
}

async fn before(guard: &Arc<Guard>, asked: Asked) -> Result<Ticket> {
    bounded(guard.before(asked, None, &CancellationToken::new())).await
}

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &'static str)| {
        let name = format!("anthropic-ratelimit-unified-{name}");
        (name.parse().unwrap(), HeaderValue::from_static(value))
    };
    pairs.iter().map(pair).collect::<HeaderMap>()
}

#[test]
fn rule_1_what_a_person_says_is_a_new_message_and_results_of_tools_are_none() {
    let mut both = answer_of_tools();
    both.content.push(Block::Text {
        text: "and now?".to_owned(),
    });
    for (messages, wanted) in [
        (vec![Message::user("hello")], true),
        (
            vec![Message::user("hello"), call(), answer_of_tools()],
            false,
        ),
        (vec![call(), both], true),
    ] {
        assert_eq!(is_new_message(&messages), wanted, "{messages:?}");
    }
}

#[test]
fn rule_1_no_shape_of_a_history_passes_a_new_message_off_as_results() {
    let empty = |role| Message {
        role,
        content: Vec::new(),
    };
    let said = || Message::user("and now?");
    let assistant = |text: &str| Message {
        role: Role::Assistant,
        content: vec![Block::Text {
            text: text.to_owned(),
        }],
    };
    for (name, messages) in [
        ("nothing", vec![]),
        (
            "an empty message behind it",
            vec![said(), empty(Role::User)],
        ),
        (
            "before the results",
            vec![call(), said(), answer_of_tools()],
        ),
        (
            "behind the results",
            vec![call(), answer_of_tools(), said()],
        ),
        ("results that nobody asked for", vec![answer_of_tools()]),
        ("results of no call", vec![said(), answer_of_tools()]),
        (
            "results that were given before",
            vec![
                call(),
                answer_of_tools(),
                assistant("done"),
                answer_of_tools(),
            ],
        ),
        (
            "an empty answer in between",
            vec![said(), empty(Role::Assistant), answer_of_tools()],
        ),
        ("a prefilled answer", vec![said(), assistant("Sure")]),
        ("a call without its result", vec![said(), call()]),
    ] {
        assert!(is_new_message(&messages), "{name}");
    }
    // An answer in two messages is one turn of the model.
    let parts = vec![said(), call(), assistant("I ask."), answer_of_tools()];
    assert!(!is_new_message(&parts));
}

#[tokio::test]
async fn rule_1_require_off_asks_before_a_new_message_and_not_before_results_of_tools() {
    let fake = Fake::new(OFF);
    let guard = fake.guard(Policy::RequireOff, Budgets::default(), None);
    before(&guard, results()).await.unwrap();
    assert_eq!(fake.starts(), 0);
    before(&guard, said()).await.unwrap();
    assert_eq!(fake.starts(), 1);
    fake.say(ON);
    let error = before(&guard, said()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Billing);
    before(&guard, results()).await.unwrap();
    bounded(guard.shutdown()).await;
    assert_eq!(fake.starts(), 2);
    assert_eq!(private_dirs(&fake), 0);
}

fn private_dirs(fake: &Fake) -> usize {
    let entries = fs::read_dir(fake.dir.path()).unwrap().flatten();
    let ours = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("turnpass-");
    entries.filter(ours).count()
}

#[tokio::test]
async fn rule_2_one_control_request_that_leaves_the_transcripts_alone_is_all_that_is_asked() {
    let fake = Fake::new(OFF);
    let guard = fake.guard(Policy::RequireOff, Budgets::default(), None);
    before(&guard, said()).await.unwrap();
    let asked = fake.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_eq!(asked[0]["type"], "control_request");
    let wanted = serde_json::json!({"subtype": "get_usage", "skip_behaviors": true});
    assert_eq!(asked[0]["request"], wanted);
}

#[tokio::test]
async fn rule_8_the_flag_can_flip_at_any_time_so_each_message_asks_anew() {
    let fake = Fake::new(OFF);
    let guard = fake.guard(Policy::RequireOff, Budgets::default(), None);
    for (answer, code) in [
        (OFF, None),
        (ON, Some(ErrorCode::Billing)),
        (OFF, None),
        (OFF, None),
        (ON, Some(ErrorCode::Billing)),
    ] {
        fake.say(answer);
        let error = before(&guard, said()).await.err().map(|error| error.code());
        assert_eq!(error, code);
    }
    assert_eq!(fake.starts(), 5);
}

#[tokio::test]
async fn a_passage_that_is_a_minute_old_is_none() {
    let fake = Fake::new(OFF);
    let guard = fake.guard(Policy::RequireOff, day(Some(9), None), None);
    let aged = |mut ticket: Ticket, seconds| {
        ticket.passed = ticket
            .passed
            .and_then(|passed| passed.checked_sub(Duration::from_secs(seconds)));
        ticket
    };
    let message = || async { before(&guard, said()).await.unwrap() };
    aged(message().await, 50).sending().unwrap();
    let late = aged(message().await, 61);
    let error = late.sending().unwrap_err();
    assert_eq!(error.code(), ErrorCode::UsageUnconfirmed);
    assert!(error.is_retryable(), "the next one asks anew");
    drop(late);
    // Only what had to pass can be late.
    aged(before(&guard, results()).await.unwrap(), 61)
        .sending()
        .unwrap();
    let Ok(()) = guard.book.count(said().key).await.map(drop) else {
        panic!("the late one has not counted")
    };
}

#[tokio::test]
async fn off_and_warn_start_nothing_before_a_message() {
    let fake = Fake::new(ON);
    for policy in [Policy::Off, Policy::Warn] {
        let guard = fake.guard(policy, Budgets::default(), None);
        before(&guard, said()).await.unwrap();
        assert_eq!(fake.starts(), 0);
    }
}

#[tokio::test]
async fn warn_tells_once_beside_the_generation() {
    let fake = Fake::new(ON);
    let guard = fake.guard(Policy::Warn, Budgets::default(), None);
    let (sender, mut generation) = Generation::channel();
    let ask = |notifier| {
        let guard = Arc::clone(&guard);
        async move {
            bounded(guard.before(said(), notifier, &CancellationToken::new()))
                .await
                .unwrap()
        }
    };
    ask(sender.notifier())
        .await
        .answered(200, &HeaderMap::new());
    let event = bounded(generation.next()).await.unwrap().unwrap();
    let Event::Notice(Notice::Other { text }) = event else {
        panic!("{event:?}")
    };
    assert!(text.contains("credits are on"), "{text}");
    // Not again within the interval, and nothing is left to tell.
    let ticket = ask(sender.notifier()).await;
    ticket.answered(200, &HeaderMap::new());
    bounded(guard.entered()).await;
    let mut told = Box::pin(generation.next());
    assert!(futures_util::poll!(&mut told).is_pending());
    assert!(ticket.pending().is_none());
    bounded(guard.shutdown()).await;
    assert_eq!(fake.starts(), 1);
}

#[tokio::test]
async fn a_notice_that_comes_too_late_is_told_with_the_next_request() {
    let fake = Fake::new(r#"{"rate_limits_available":true,"rate_limits":null}"#);
    let guard = fake.guard(Policy::Warn, Budgets::default(), None);
    before(&guard, said())
        .await
        .unwrap()
        .answered(200, &HeaderMap::new());
    bounded(async {
        while guard.told().pending.is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let next = before(&guard, results()).await.unwrap();
    let Some(Notice::Other { text }) = next.pending() else {
        panic!()
    };
    assert!(
        text.contains("not known") && text.contains("rate_limits is null"),
        "{text}"
    );
}

#[tokio::test]
async fn warn_says_nothing_where_credits_are_off() {
    let fake = Fake::new(OFF);
    let guard = fake.guard(Policy::Warn, Budgets::default(), None);
    before(&guard, said())
        .await
        .unwrap()
        .answered(200, &HeaderMap::new());
    bounded(async {
        while guard.told().board.told_at().is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    bounded(guard.shutdown()).await;
    assert!(guard.told().pending.is_none());
}

#[tokio::test]
async fn bug_128_a_probe_that_hangs_is_gone_after_shutdown() {
    let fake = Fake::new(OFF);
    fs::write(fake.path("hang"), "").unwrap();
    let guard = fake.guard(Policy::RequireOff, Budgets::default(), None);
    let waiting = Arc::clone(&guard);
    let waiter = tokio::spawn(async move { before(&waiting, said()).await });
    bounded(async {
        while fake.starts() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    bounded(guard.shutdown()).await;
    let error = bounded(waiter).await.unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::Closed);
    assert_eq!(private_dirs(&fake), 0);
}

#[tokio::test]
async fn bug_052_overage_in_the_head_of_an_answer_ends_it_under_require_off() {
    let fake = Fake::new(OFF);
    let overage = headers(&[
        ("status", "rejected"),
        ("overage-status", "allowed"),
        ("overage-in-use", "true"),
    ]);
    for (policy, wanted) in [
        (Policy::RequireOff, "End"),
        (Policy::Warn, "Tell"),
        (Policy::Off, "Go"),
    ] {
        let guard = fake.guard(policy, Budgets::default(), None);
        let ticket = before(&guard, results()).await.unwrap();
        let reaction = format!("{:?}", ticket.answered(200, &overage));
        assert!(reaction.starts_with(wanted), "{policy}: {reaction}");
    }
}

#[tokio::test]
async fn bug_051_nothing_is_latched_after_a_billing_error() {
    let fake = Fake::new(ON);
    let guard = fake.guard(Policy::RequireOff, Budgets::default(), None);
    assert!(before(&guard, said()).await.is_err());
    fake.say(OFF);
    before(&guard, said()).await.unwrap();
}

#[tokio::test]
async fn a_window_that_is_nearly_used_up_is_told_when_it_is_news() {
    let fake = Fake::new(OFF);
    let guard = fake.guard(Policy::Off, Budgets::default(), None);
    let ticket = before(&guard, said()).await.unwrap();
    let near = |used, reset| {
        let pairs = [
            ("status", "allowed_warning"),
            ("5h-utilization", used),
            ("5h-surpassed-threshold", "0.75"),
            ("5h-reset", reset),
        ];
        matches!(
            ticket.answered(200, &headers(&pairs)),
            Reaction::Tell(Notice::LimitWarning { .. })
        )
    };
    assert!(near("0.76", "4000000000"));
    assert!(!near("0.78", "4000000000"));
    assert!(near("0.81", "4000000000"));
    assert!(near("0.76", "4000018000"), "another window of five hours");
}

#[tokio::test]
async fn a_share_of_a_window_is_asked_for_once_and_then_read_from_answers() {
    let fake = Fake::new(OFF);
    let budgets = Budgets {
        max_window_percent: Some(75),
        ..Budgets::default()
    };
    let guard = fake.guard(Policy::Off, budgets, None);
    let ticket = before(&guard, said()).await.unwrap();
    before(&guard, results()).await.unwrap();
    assert_eq!(fake.starts(), 1);
    let pairs = [
        ("status", "allowed"),
        ("5h-utilization", "0.75"),
        ("5h-reset", "4000000000"),
    ];
    ticket.answered(200, &headers(&pairs));
    let error = before(&guard, results()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Budget);
    assert!(error.resets_at().is_some());
    assert_eq!(fake.starts(), 1);
}

#[tokio::test]
async fn a_share_of_a_window_that_nobody_tells_is_refused() {
    let fake = Fake::new(r#"{"rate_limits_available":true,"rate_limits":null}"#);
    let budgets = Budgets {
        max_window_percent: Some(75),
        ..Budgets::default()
    };
    let guard = fake.guard(Policy::Off, budgets, None);
    let error = before(&guard, said()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::UsageUnconfirmed);
}

fn day(requests: Option<u64>, tokens: Option<u64>) -> Budgets {
    Budgets {
        day: super::super::budget::Allowance { requests, tokens },
        ..Budgets::default()
    }
}

#[tokio::test]
async fn budgets_hold_in_memory_and_over_processes() {
    let fake = Fake::new(OFF);
    let state = fake.path("state");
    for state in [None, Some(state.as_path())] {
        let guard = fake.guard(Policy::Off, day(Some(2), None), state);
        for _ in 0..2 {
            let ticket = before(&guard, said()).await.unwrap();
            ticket.sending().unwrap();
        }
        let error = before(&guard, results()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Budget);
    }
    let another = fake.guard(Policy::Off, day(Some(2), None), Some(&state));
    assert!(before(&another, said()).await.is_err());
    assert_eq!(fake.starts(), 0);
}

/// Requests in the file, once everything is entered.
async fn counted(guard: &Arc<Guard>, state: &Path) -> u64 {
    bounded(guard.entered()).await;
    let file = StateFile::new(state, LEDGER_FILE);
    let ledger: Ledger = file.read().unwrap().unwrap_or_default();
    ledger.today(&Moment::now()).requests
}

#[tokio::test]
async fn a_request_that_was_not_sent_has_not_counted() {
    let fake = Fake::new(OFF);
    let state = fake.path("state");
    for state in [Some(state.as_path()), None] {
        let guard = fake.guard(Policy::Off, day(Some(1), None), state);
        for _ in 0..3 {
            drop(before(&guard, said()).await.unwrap());
        }
        let ticket = before(&guard, said()).await.unwrap();
        ticket.sending().unwrap();
        drop(ticket);
        let error = before(&guard, said()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Budget);
    }
    let guard = fake.guard(Policy::Off, Budgets::default(), Some(&state));
    assert_eq!(counted(&guard, &state).await, 1);
}

#[tokio::test]
async fn a_caller_that_leaves_while_it_is_counted_has_not_counted() {
    let fake = Fake::new(OFF);
    let state = fake.path("state");
    fs::create_dir(&state).unwrap();
    let guard = fake.guard(Policy::Off, day(Some(9), None), Some(&state));
    let lock = fs::File::create(state.join("ledger.json.lock")).unwrap();
    lock.lock().unwrap();
    let cancel = CancellationToken::new();
    let mut waits = Box::pin(guard.before(said(), None, &cancel));
    assert!(futures_util::poll!(&mut waits).is_pending());
    drop(waits);
    drop(lock);
    assert_eq!(counted(&guard, &state).await, 0);
}

#[tokio::test]
async fn bug_128_messages_that_wait_at_the_same_time_share_one_process() {
    let fake = Fake::new(OFF);
    fs::write(fake.path("hang"), "").unwrap();
    let guard = fake.guard(Policy::RequireOff, Budgets::default(), None);
    let cancel = CancellationToken::new();
    let begin = |cancel: &CancellationToken| {
        let (guard, cancel) = (Arc::clone(&guard), cancel.clone());
        tokio::spawn(async move { guard.before(said(), None, &cancel).await })
    };
    let callers: Vec<_> = (0..20).map(|_| begin(&cancel)).collect();
    let started = |count| {
        let fake = &fake;
        bounded(async move {
            while fake.starts() < count {
                tokio::task::yield_now().await;
            }
        })
    };
    started(1).await;
    cancel.cancel();
    for caller in callers {
        let error = bounded(caller).await.unwrap().unwrap_err();
        assert_eq!(error.code(), ErrorCode::Closed);
    }
    // The last one that left took the process with it; the next one has its own.
    fs::remove_file(fake.path("hang")).unwrap();
    let next = begin(&CancellationToken::new());
    bounded(next).await.unwrap().unwrap();
    assert_eq!(fake.starts(), 2);
    bounded(guard.shutdown()).await;
    assert_eq!(private_dirs(&fake), 0);
}

#[tokio::test]
async fn a_window_that_no_answer_tells_of_is_read_anew() {
    let window = |used| {
        format!(
            r#"{{"rate_limits_available":true,"rate_limits":{{"model_scoped":[{{"display_name":"Opus","utilization":{used}}}]}}}}"#
        )
    };
    let fake = Fake::new(&window(90));
    let budgets = Budgets {
        max_window_percent: Some(80),
        ..Budgets::default()
    };
    let guard = fake.guard(Policy::Off, budgets, None);
    let now = Moment::now().unix_s;
    let old = crate::limits::windows::Reading::read(&window(10));
    guard.told().board.reading(&old, now - 301, now);
    let read = UnifiedHeaders::read([("anthropic-ratelimit-unified-5h-utilization", "0.1")]);
    guard.told().board.headers(&read.unwrap(), now);
    let error = before(&guard, said()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Budget);
    assert!(error.detail().contains("Opus"), "{error}");
}

#[tokio::test]
async fn a_reading_that_fails_is_bridged_by_what_answers_told() {
    let fake = Fake::new(r#"{"rate_limits_available":true,"rate_limits":null}"#);
    let budgets = Budgets {
        max_window_percent: Some(80),
        ..Budgets::default()
    };
    let guard = fake.guard(Policy::Off, budgets, None);
    let names = ["anthropic-ratelimit-unified-5h-utilization"];
    let read = |part| UnifiedHeaders::read([(names[0], part)]).unwrap();
    let now = Moment::now().unix_s;
    guard.told().board.headers(&read("0.5"), now);
    before(&guard, said()).await.unwrap();
    guard.told().board.headers(&read("0.8"), now);
    let error = before(&guard, said()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Budget);
}

#[tokio::test]
async fn tokens_are_entered_when_a_generation_has_ended() {
    let fake = Fake::new(OFF);
    let state = fake.path("state");
    let guard = fake.guard(Policy::Off, day(None, Some(100)), Some(&state));
    let ticket = before(&guard, said()).await.unwrap();
    ticket.spent(&Usage {
        input_tokens: Some(10),
        cache_read_input_tokens: Some(80),
        output_tokens: Some(10),
        ..Usage::default()
    });
    bounded(guard.shutdown()).await;
    let guard = fake.guard(Policy::Off, day(None, Some(100)), Some(&state));
    let error = before(&guard, said()).await.unwrap_err();
    assert!(
        error.detail().contains("max_tokens_per_day is 100"),
        "{error}"
    );
}

#[tokio::test]
async fn a_ledger_that_cannot_be_written_refuses_only_where_a_budget_depends_on_it() {
    let fake = Fake::new(OFF);
    let state = fake.path("a-file");
    fs::write(&state, "").unwrap();
    let free = fake.guard(Policy::Off, Budgets::default(), Some(&state));
    before(&free, said()).await.unwrap();
    let bound = fake.guard(Policy::Off, day(Some(9), None), Some(&state));
    let error = before(&bound, said()).await.unwrap_err();
    assert!(error.detail().contains("ledger.json"), "{error}");
}
