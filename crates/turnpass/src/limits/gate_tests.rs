//! The gate against scripted answers, with a clock that stands still until nothing else can happen.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::cli::auth::{Asker, AuthStatus, FRESH_AUTH_LIMIT, SignedIn};

const OFF: &str =
    r#"{"rate_limits_available":true,"rate_limits":{"extra_usage":{"is_enabled":false}}}"#;
const ON: &str =
    r#"{"rate_limits_available":true,"rate_limits":{"extra_usage":{"is_enabled":true}}}"#;
/// What a running CLI says after the endpoint failed and headers came (2.1.332).
const SEEDED: &str =
    r#"{"rate_limits_available":true,"rate_limits":{"five_hour":{"utilization":3}}}"#;
/// What it says when the endpoint refuses it, and when it is signed out.
const NOT_READY: &str = r#"{"rate_limits_available":true,"rate_limits":null}"#;

#[derive(Clone, Debug)]
enum Say {
    Text(&'static str),
    After(Duration, &'static str),
    Refuse,
    Die,
    Hang,
}

/// Answers in order; the last one again and again.
struct Scripted {
    says: Mutex<VecDeque<Say>>,
    asked: Mutex<Vec<Instant>>,
    alive: AtomicUsize,
}

impl Scripted {
    fn new(says: impl IntoIterator<Item = Say>) -> Arc<Self> {
        Arc::new(Self {
            says: Mutex::new(says.into_iter().collect()),
            asked: Mutex::default(),
            alive: AtomicUsize::new(0),
        })
    }

    fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }

    /// Milliseconds from the first question to each.
    fn times(&self) -> Vec<u128> {
        let asked = self.asked.lock().unwrap();
        let first = asked[0];
        asked.iter().map(|at| (*at - first).as_millis()).collect()
    }

    async fn answer(self: Arc<Self>) -> Result<String, SourceFault> {
        self.asked.lock().unwrap().push(Instant::now());
        let say = {
            let mut says = self.says.lock().unwrap();
            match says.len() {
                1 => says[0].clone(),
                _ => says.pop_front().expect("a script is never empty"),
            }
        };
        self.alive.fetch_add(1, Ordering::SeqCst);
        let guard = Leave(Arc::clone(&self));
        let answer = match say {
            Say::Text(text) => Ok(text.to_owned()),
            Say::After(wait, text) => {
                tokio::time::sleep(wait).await;
                Ok(text.to_owned())
            }
            Say::Refuse => Err(SourceFault::Refused),
            Say::Die => Err(SourceFault::Gone(Error::new(
                ErrorCode::ProcessExit,
                "gone",
            ))),
            Say::Hang => std::future::pending().await,
        };
        drop(guard);
        answer
    }
}

struct Leave(Arc<Scripted>);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Running(Arc<Scripted>);

impl UsageSource for Running {
    fn get_usage(&self) -> BoxFuture<'_, Result<String, SourceFault>> {
        Box::pin(Arc::clone(&self.0).answer())
    }
}

/// A gate with a scripted fresh process and a scripted sign-in, and what each was asked.
struct Rig {
    gate: Arc<Gate>,
    running: Arc<Scripted>,
    fresh: Arc<Scripted>,
    sign_ins: Arc<AtomicUsize>,
    cancel: CancellationToken,
}

fn rig(running: &[Say], fresh: &[Say], status: Option<AuthStatus>) -> Rig {
    let (running, fresh) = (
        Scripted::new(running.iter().cloned()),
        Scripted::new(fresh.iter().cloned()),
    );
    let sign_ins = Arc::new(AtomicUsize::new(0));
    let (asked, counted) = (Arc::clone(&fresh), Arc::clone(&sign_ins));
    let asker: Asker = Box::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        let status = status.clone();
        Box::pin(async move {
            match status {
                Some(status) => status,
                None => std::future::pending().await,
            }
        })
    });
    let gate = Gate::new(
        Box::new(move || Box::pin(Arc::clone(&asked).answer())),
        AuthCheck::fresh(asker),
    );
    Rig {
        gate: Arc::new(gate),
        running,
        fresh,
        sign_ins,
        cancel: CancellationToken::new(),
    }
}

impl Rig {
    async fn ask(&self, call: CallKind) -> Finding {
        let running = Running(Arc::clone(&self.running));
        let question = Question {
            running: Some(&running),
            call,
            cancel: &self.cancel,
        };
        self.gate.ask(question).await
    }

    fn begin(&self, call: CallKind) -> tokio::task::JoinHandle<Finding> {
        let (gate, cancel) = (Arc::clone(&self.gate), self.cancel.clone());
        let running = Running(Arc::clone(&self.running));
        tokio::spawn(async move {
            let question = Question {
                running: Some(&running),
                call,
                cancel: &cancel,
            };
            gate.ask(question).await
        })
    }

    fn counts(&self) -> (usize, usize, usize) {
        (
            self.running.asked(),
            self.fresh.asked(),
            self.sign_ins.load(Ordering::SeqCst),
        )
    }
}

fn signed_in() -> Option<AuthStatus> {
    Some(AuthStatus::SignedIn(SignedIn::default()))
}

use Say::{After, Die, Hang, Refuse, Text};

#[tokio::test(start_paused = true)]
async fn rule_3_off_passes_at_once_and_asks_nobody_else() {
    let rig = rig(&[Text(OFF)], &[Text(ON)], None);
    assert!(matches!(rig.ask(CallKind::Advisor).await, Finding::Off));
    assert_eq!(rig.counts(), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn rule_4_on_refuses_at_once_and_asks_nobody_else() {
    let rig = rig(&[Text(ON)], &[Text(OFF)], signed_in());
    assert!(matches!(rig.ask(CallKind::Advisor).await, Finding::On));
    assert_eq!(rig.counts(), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn rule_5_unconfirmed_is_asked_again_after_500_ms_1_s_and_2_s_within_15_s() {
    let rig = rig(&[Text(NOT_READY)], &[Text(OFF)], None);
    assert!(matches!(rig.ask(CallKind::Normal).await, Finding::Off));
    let wanted = [0, 500, 1500, 3500, 5500, 7500, 9500, 11500, 13500];
    assert_eq!(rig.running.times(), wanted);
    assert_eq!(rig.counts(), (9, 1, 0), "one fresh process");
}

#[tokio::test(start_paused = true)]
async fn rule_5_an_answer_that_becomes_certain_ends_the_retries() {
    for (last, wanted) in [(OFF, true), (ON, false)] {
        let says = [Text(""), Refuse, Text(SEEDED), Text(last)];
        let rig = rig(&says, &[Hang], None);
        let found = rig.ask(CallKind::Normal).await;
        assert_eq!(matches!(found, Finding::Off), wanted, "{found:?}");
        assert_eq!(matches!(found, Finding::On), !wanted, "{found:?}");
        assert_eq!(rig.running.times(), [0, 500, 1500, 3500]);
        assert_eq!(rig.fresh.asked(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_5_slow_answers_count_against_the_15_s() {
    // The CLI gives the endpoint 5 s.
    let slow = After(Duration::from_millis(5300), NOT_READY);
    let rig = rig(&[slow], &[Text(OFF)], None);
    assert!(matches!(rig.ask(CallKind::Normal).await, Finding::Off));
    assert_eq!(rig.running.times(), [0, 5800, 12100]);
}

#[tokio::test(start_paused = true)]
async fn rule_2_one_question_has_30_s_and_then_the_process_is_done_with() {
    let rig = rig(&[Hang], &[Text(OFF)], None);
    let began = Instant::now();
    let found = rig.ask(CallKind::Normal).await;
    let Finding::Gone(error) = found else {
        panic!("{found:?}")
    };
    assert_eq!(error.code(), ErrorCode::ControlTimeout);
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    assert_eq!(rig.counts(), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_gone_is_no_usage_answer() {
    let rig = rig(&[Text(NOT_READY), Die], &[Text(OFF)], signed_in());
    let found = rig.ask(CallKind::Advisor).await;
    assert!(
        matches!(&found, Finding::Gone(error) if error.code() == ErrorCode::ProcessExit),
        "{found:?}"
    );
    assert_eq!(rig.counts(), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn rule_5_the_fresh_process_outranks_what_the_running_one_remembers() {
    for (fresh, wanted) in [
        (OFF, "Off"),
        (ON, "On"),
        (SEEDED, "Unconfirmed"),
        ("", "Unconfirmed"),
    ] {
        let rig = rig(&[Text(SEEDED)], &[Text(fresh)], signed_in());
        let found = format!("{:?}", rig.ask(CallKind::Normal).await);
        assert!(found.starts_with(wanted), "{found}");
        assert_eq!(rig.fresh.asked(), 1, "once");
    }
}

#[tokio::test(start_paused = true)]
async fn rule_5_the_fresh_process_has_8_s() {
    let rig = rig(&[Text(NOT_READY)], &[Hang], None);
    let began = Instant::now();
    let found = rig.ask(CallKind::Normal).await;
    assert!(matches!(found, Finding::Unconfirmed(Doubt::NoAnswer)));
    assert_eq!(began.elapsed(), Duration::from_millis(13_500) + FRESH_LIMIT);
    assert_eq!(rig.fresh.alive.load(Ordering::SeqCst), 0, "it was ended");
}

#[tokio::test(start_paused = true)]
async fn rule_5_the_fresh_process_is_one_at_a_time_for_the_whole_pool() {
    let slow = After(Duration::from_secs(5), OFF);
    let rig = rig(&[Text(NOT_READY)], &[slow], None);
    let callers: Vec<_> = (0..20).map(|_| rig.begin(CallKind::Normal)).collect();
    for caller in callers {
        assert!(matches!(caller.await.unwrap(), Finding::Off));
    }
    assert_eq!(rig.fresh.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn without_a_running_process_the_fresh_one_alone_decides() {
    for (fresh, wanted) in [(OFF, "Off"), (ON, "On"), (NOT_READY, "Unconfirmed")] {
        let rig = rig(&[Hang], &[Text(fresh)], Some(AuthStatus::SignedOut));
        let question = Question {
            running: None,
            call: CallKind::Advisor,
            cancel: &rig.cancel,
        };
        let found = format!("{:?}", rig.gate.ask(question).await);
        assert!(found.starts_with(wanted), "{found}");
        assert_eq!(rig.counts(), (0, 1, 0), "one not-ready is no second one");
    }
}

#[tokio::test(start_paused = true)]
async fn advisor_a_second_definitive_not_ready_permits_one_fresh_sign_in_check() {
    let rig = rig(
        &[Text(NOT_READY)],
        &[Text(NOT_READY)],
        Some(AuthStatus::SignedOut),
    );
    assert!(matches!(
        rig.ask(CallKind::Advisor).await,
        Finding::SignedOut
    ));
    assert_eq!(rig.counts(), (9, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn advisor_only_a_confirmed_logout_changes_the_refusal() {
    let ineligible = AuthStatus::Ineligible {
        auth_method: "api_key".into(),
        api_provider: "firstParty".into(),
    };
    let unknown = AuthStatus::Unknown {
        reason: "late".into(),
        text: String::new(),
    };
    for status in [signed_in(), Some(ineligible), Some(unknown)] {
        let rig = rig(&[Text(NOT_READY)], &[Text(NOT_READY)], status);
        let found = rig.ask(CallKind::Advisor).await;
        assert!(matches!(found, Finding::Unconfirmed(_)), "{found:?}");
        assert_eq!(rig.counts().2, 1, "a sign-in authorises nothing");
    }
}

#[tokio::test(start_paused = true)]
async fn advisor_good_and_unknown_usage_results_outrank_the_sign_in() {
    for fresh in [
        Text(OFF),
        Text(ON),
        Text(SEEDED),
        Text("{"),
        Refuse,
        Die,
        Hang,
    ] {
        let rig = rig(
            &[Text(NOT_READY)],
            std::slice::from_ref(&fresh),
            Some(AuthStatus::SignedOut),
        );
        let found = rig.ask(CallKind::Advisor).await;
        assert!(!matches!(found, Finding::SignedOut), "{fresh:?}: {found:?}");
        assert_eq!(rig.counts().2, 0, "{fresh:?}");
    }
    // The first one has to be definitive too.
    let rig = rig(
        &[Text(SEEDED)],
        &[Text(NOT_READY)],
        Some(AuthStatus::SignedOut),
    );
    assert!(matches!(
        rig.ask(CallKind::Advisor).await,
        Finding::Unconfirmed(_)
    ));
    assert_eq!(rig.counts().2, 0);
}

#[tokio::test(start_paused = true)]
async fn other_calls_never_look_at_the_sign_in() {
    for call in [CallKind::Normal, CallKind::SubAgent, CallKind::Summary] {
        let rig = rig(
            &[Text(NOT_READY)],
            &[Text(NOT_READY)],
            Some(AuthStatus::SignedOut),
        );
        assert!(matches!(rig.ask(call).await, Finding::Unconfirmed(_)));
        assert_eq!(rig.counts().2, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn advisor_the_sign_in_check_is_bounded_by_8_s() {
    let rig = rig(&[Text(NOT_READY)], &[Text(NOT_READY)], None);
    let began = Instant::now();
    assert!(matches!(
        rig.ask(CallKind::Advisor).await,
        Finding::Unconfirmed(_)
    ));
    assert_eq!(
        began.elapsed(),
        Duration::from_millis(13_500) + FRESH_AUTH_LIMIT
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_during_the_sign_in_check_takes_the_place_of_the_refusal() {
    let rig = rig(&[Text(NOT_READY)], &[Text(NOT_READY)], None);
    let caller = rig.begin(CallKind::Advisor);
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(rig.counts().2, 1, "it is under way");
    rig.cancel.cancel();
    assert!(matches!(caller.await.unwrap(), Finding::Cancelled));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_at_any_step_takes_the_place_of_the_refusal_and_joins() {
    for (running, fresh, wait) in [
        (Hang, Text(OFF), 1),
        (Text(NOT_READY), Hang, 15),
        (Text(NOT_READY), Text(NOT_READY), 15),
    ] {
        let rig = rig(&[running], &[fresh], None);
        let caller = rig.begin(CallKind::Advisor);
        tokio::time::sleep(Duration::from_secs(wait)).await;
        rig.gate.shutdown().await;
        assert!(matches!(caller.await.unwrap(), Finding::Closed));
        for source in [&rig.running, &rig.fresh] {
            assert_eq!(source.alive.load(Ordering::SeqCst), 0, "joined");
        }
        assert!(matches!(rig.ask(CallKind::Normal).await, Finding::Closed));
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_ends_the_wait_of_one_caller_only() {
    let slow = After(Duration::from_secs(6), OFF);
    let rig = rig(&[Text(NOT_READY)], &[slow], None);
    let stays = rig.begin(CallKind::Normal);
    let leaves = CancellationToken::new();
    let running = Running(Arc::clone(&rig.running));
    let question = Question {
        running: Some(&running),
        call: CallKind::Normal,
        cancel: &leaves,
    };
    let (found, ()) = tokio::join!(rig.gate.ask(question), async {
        tokio::time::sleep(Duration::from_secs(15)).await;
        leaves.cancel();
    });
    assert!(matches!(found, Finding::Cancelled));
    assert!(matches!(stays.await.unwrap(), Finding::Off));
    assert_eq!(rig.fresh.asked(), 1);
}

/// What a policy prints or refuses, for each finding.
#[test]
fn each_policy_makes_its_own_of_each_finding() {
    let gone = || Finding::Gone(Error::new(ErrorCode::ProcessExit, ""));
    let word = |passage: Passage| match passage {
        Passage::Open => "open".to_owned(),
        Passage::Told(text) => {
            assert!(text.ends_with('.'), "{text}");
            "told".to_owned()
        }
        Passage::Refused(error) => error.code().to_string(),
        Passage::Cancelled => "cancelled".to_owned(),
    };
    let doubt = Doubt::NoAnswer;
    for (finding, require_off, warn, off) in [
        (Finding::Off, "open", "open", "open"),
        (Finding::On, "billing", "told", "open"),
        (
            Finding::Unconfirmed(doubt),
            "usage_unconfirmed",
            "told",
            "open",
        ),
        (Finding::SignedOut, "auth", "auth", "open"),
        (gone(), "process_exit", "process_exit", "process_exit"),
        (Finding::Cancelled, "cancelled", "cancelled", "cancelled"),
        (Finding::Closed, "closed", "closed", "closed"),
    ] {
        let said = Policy::ALL.map(|policy| word(finding.clone().passage(policy)));
        assert_eq!(said, [require_off, warn, off], "{finding:?}");
    }
}

#[test]
fn a_refusal_for_credits_says_where_they_are_turned_off() {
    let error = credits_on();
    assert!(!error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains("Settings > Usage") && text.contains("usage_gate"),
        "{text}"
    );
}
