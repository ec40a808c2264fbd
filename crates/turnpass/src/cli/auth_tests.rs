use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, mpsc, oneshot};

use super::*;
use crate::cli::ask::{ANSWER_BYTES, Question, ask};
use crate::cli::environment::Environment;

const BOUND: Duration = Duration::from_secs(30);

async fn bounded<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, future)
        .await
        .expect("it has to happen in time")
}

fn said(exit: i32, stdout: &str) -> AuthStatus {
    decode(&Ok(Answer {
        exit: Exit::Code(exit),
        stdout: stdout.into(),
        stderr_tail: r#"{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty"}"#
            .into(),
    }))
}

fn signed_in() -> AuthStatus {
    AuthStatus::SignedIn(SignedIn {
        subscription: Some("max".into()),
        ..SignedIn::default()
    })
}

// Decoding.

#[test]
fn the_real_answers() {
    // 2.1.332, made-up account.
    let full = r#"{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty","analyticsDisabled":true,
        "loginExpiresAt":null,"email":null,"subscriptionType":"max","storedClaudeAiLogin":true,"planTier":"max_5x"}"#;
    let wanted = SignedIn {
        subscription: Some("max".into()),
        plan_tier: Some("max_5x".into()),
        expires_at: None,
    };
    assert_eq!(said(0, full), AuthStatus::SignedIn(wanted));
    // 2.1.294.
    let short = r#"{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty","subscriptionType":"max"}"#;
    assert_eq!(said(0, short), signed_in());
    let out = r#"{"loggedIn":false,"authMethod":"none","apiProvider":"firstParty"}"#;
    assert_eq!(said(1, out), AuthStatus::SignedOut);
    assert_eq!(said(0, out), AuthStatus::SignedOut);
}

#[test]
fn bug_042_only_the_boolean_true_is_signed_in() {
    let with = |value: &str| {
        format!(r#"{{"loggedIn":{value},"authMethod":"claude.ai","apiProvider":"firstParty"}}"#)
    };
    for (exit, text) in [
        (0, with("null")),
        (0, with("\"true\"")),
        (0, with("1")),
        (0, with("[]")),
        (1, with("true")),
        (2, with("false")),
        (143, with("false")),
        (
            0,
            r#"{"authMethod":"claude.ai","apiProvider":"firstParty"}"#.into(),
        ),
        (0, r#"{"loggedIn":true,"apiProvider":"firstParty"}"#.into()),
        (0, r#"{"loggedIn":true,"authMethod":"claude.ai"}"#.into()),
        (
            0,
            r#"{"loggedIn":true,"authMethod":null,"apiProvider":"firstParty"}"#.into(),
        ),
        (0, format!("[{}]", with("true"))),
        (0, format!("{} {}", with("true"), with("true"))),
        (0, "<html><body>loggedIn: true</body></html>".into()),
        (0, with("true")[..30].into()),
        (0, "Logged in".into()),
        (0, String::new()),
        (1, " \n".into()),
    ] {
        let status = said(exit, &text);
        assert!(
            matches!(status, AuthStatus::Unknown { .. }),
            "{exit} {text}: {status:?}"
        );
        assert_eq!(status.accept().unwrap_err().code(), ErrorCode::AuthUnknown);
    }
}

#[test]
fn bug_042_no_answer_is_unknown() {
    for unanswered in [
        Unanswered::Late(AUTH_LIMIT),
        Unanswered::TooLong,
        Unanswered::NotStarted(Error::new(ErrorCode::LaunchFailed, "x")),
    ] {
        assert!(matches!(
            decode(&Err(unanswered)),
            AuthStatus::Unknown { .. }
        ));
    }
}

#[test]
fn other_ways_of_signing_in_are_named() {
    for (method, provider, key, named) in [
        ("api_key", "firstParty", "", "api_key"),
        ("oauth_token", "firstParty", "", "oauth_token"),
        ("third_party", "bedrock", "", "bedrock"),
        ("claude.ai", "vertex", "", "vertex"),
        (
            "claude.ai",
            "firstParty",
            r#","apiKeySource":"ANTHROPIC_API_KEY""#,
            "ANTHROPIC_API_KEY",
        ),
    ] {
        let text = format!(
            r#"{{"loggedIn":true,"authMethod":"{method}","apiProvider":"{provider}"{key}}}"#
        );
        let error = said(0, &text).accept().unwrap_err();
        assert_eq!(error.code(), ErrorCode::AuthIneligible);
        assert!(error.detail().contains(named), "{error}");
    }
}

#[test]
fn an_unclear_answer_is_kept_in_part_and_never_in_an_error() {
    let status = said(
        0,
        &format!("{{\"email\":\"marker\"{}é", "x".repeat(AUTH_TEXT_BYTES)),
    );
    let AuthStatus::Unknown { text, .. } = &status else {
        panic!("{status:?}");
    };
    assert!(text.contains("marker") && text.len() <= AUTH_TEXT_BYTES);
    assert!(!status.accept().unwrap_err().to_string().contains("marker"));
}

#[test]
fn the_expiry_is_read_in_both_likely_forms() {
    let with = |value: &str| {
        let text = format!(
            r#"{{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty","loginExpiresAt":{value}}}"#
        );
        said(0, &text).accept().unwrap().expires_at
    };
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    assert_eq!(with("1800000000000"), Some(at));
    assert_eq!(with("\"2027-01-15T08:00:00Z\""), Some(at));
    assert_eq!(with("null"), None);
    assert_eq!(with("\"soon\""), None);
}

// The shared check. Each question waits for the test to answer it.

struct Script {
    check: Arc<AuthCheck>,
    questions: mpsc::UnboundedReceiver<oneshot::Sender<AuthStatus>>,
    asked: Arc<AtomicUsize>,
}

fn script_with(limit: Duration, max_age: Duration) -> Script {
    let (ask, questions) = mpsc::unbounded_channel();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let asker: Asker = Box::new(move || {
        count.fetch_add(1, Ordering::SeqCst);
        let (reply, answer) = oneshot::channel();
        ask.send(reply).unwrap();
        Box::pin(async move { answer.await.unwrap_or(AuthStatus::SignedOut) })
    });
    Script {
        check: Arc::new(AuthCheck::with(asker, limit, max_age)),
        questions,
        asked,
    }
}

fn script() -> Script {
    script_with(BOUND, AUTH_MAX_AGE)
}

impl Script {
    async fn question(&mut self) -> oneshot::Sender<AuthStatus> {
        bounded(self.questions.recv()).await.unwrap()
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn spawn(&self) -> tokio::task::JoinHandle<Result<SignedIn>> {
        let check = Arc::clone(&self.check);
        tokio::spawn(async move { check.acquire().await })
    }

    /// Waiters that have joined a job; an acquire joins at its first poll.
    async fn spawn_joined(&self, count: usize) -> Vec<tokio::task::JoinHandle<Result<SignedIn>>> {
        let joined = Arc::new(Semaphore::new(0));
        let waiters = (0..count)
            .map(|_| {
                let (check, joined) = (Arc::clone(&self.check), Arc::clone(&joined));
                tokio::spawn(async move {
                    let mut acquire = std::pin::pin!(check.acquire());
                    let first = std::future::poll_fn(|cx| {
                        std::task::Poll::Ready(acquire.as_mut().poll(cx))
                    });
                    let first = first.await;
                    joined.add_permits(1);
                    match first {
                        std::task::Poll::Ready(result) => result,
                        std::task::Poll::Pending => acquire.await,
                    }
                })
            })
            .collect();
        bounded(joined.acquire_many(count.try_into().unwrap()))
            .await
            .unwrap()
            .forget();
        waiters
    }
}

fn code(result: Result<SignedIn>) -> ErrorCode {
    result.unwrap_err().code()
}

#[tokio::test]
async fn auth_many_callers_share_one_job_and_a_success_is_kept() {
    let mut script = script();
    let waiters = script.spawn_joined(20).await;
    script.question().await.send(signed_in()).unwrap();
    for waiter in waiters {
        assert_eq!(
            bounded(waiter)
                .await
                .unwrap()
                .unwrap()
                .subscription
                .as_deref(),
            Some("max")
        );
    }
    bounded(script.check.acquire()).await.unwrap();
    assert_eq!(script.asked(), 1);
    assert_eq!(script.check.last(), Some((signed_in(), false)));
}

#[tokio::test]
async fn auth_a_waiter_that_leaves_does_not_end_the_job() {
    let mut script = script();
    let waiters = script.spawn_joined(3).await;
    let question = script.question().await;
    for waiter in &waiters[..2] {
        waiter.abort();
    }
    let late = script.spawn_joined(1).await;
    question.send(signed_in()).unwrap();
    for waiter in waiters.into_iter().skip(2).chain(late) {
        assert!(bounded(waiter).await.unwrap().is_ok());
    }
    assert_eq!(script.asked(), 1);
}

#[tokio::test]
async fn auth_a_job_that_everybody_left_still_completes_and_serves() {
    let mut script = script();
    let waiter = script.spawn_joined(1).await.remove(0);
    let question = script.question().await;
    waiter.abort();
    assert!(bounded(waiter).await.unwrap_err().is_cancelled());
    question.send(signed_in()).unwrap();
    bounded(script.check.acquire()).await.unwrap();
    assert_eq!(script.asked(), 1);
}

#[tokio::test]
async fn auth_signed_out_allows_one_synchronised_replacement() {
    let mut script = script();
    let first = script.spawn_joined(5).await;
    script.question().await.send(AuthStatus::SignedOut).unwrap();
    for waiter in first {
        assert_eq!(code(bounded(waiter).await.unwrap()), ErrorCode::Auth);
    }
    assert_eq!(script.asked(), 1, "nobody who waited started another job");
    let second = script.spawn_joined(20).await;
    assert_eq!(script.asked(), 2, "twenty later callers started one");
    script.question().await.send(signed_in()).unwrap();
    for waiter in second {
        assert!(bounded(waiter).await.unwrap().is_ok());
    }
}

#[tokio::test]
async fn auth_late_waiter_of_the_old_job_gets_the_old_result_and_touches_nothing() {
    let mut script = script();
    // It has joined the first job, but is not polled again until a second one runs.
    let check = Arc::clone(&script.check);
    let mut late = Box::pin(check.acquire());
    std::future::poll_fn(|cx| {
        assert!(late.as_mut().poll(cx).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    script.question().await.send(AuthStatus::SignedOut).unwrap();
    let mut first = script.check.slot().job.clone().unwrap();
    bounded(first.result.wait_for(Option::is_some))
        .await
        .unwrap();
    let replacement = script.spawn_joined(1).await.remove(0);
    let question = script.question().await;
    assert_eq!(code(bounded(late).await), ErrorCode::Auth);
    let joined = script.spawn_joined(1).await.remove(0);
    question.send(signed_in()).unwrap();
    assert!(bounded(replacement).await.unwrap().is_ok());
    assert!(bounded(joined).await.unwrap().is_ok());
    assert_eq!(script.asked(), 2);
}

#[tokio::test]
async fn auth_only_success_is_kept() {
    let mut script = script();
    let ineligible = AuthStatus::Ineligible {
        auth_method: "api_key".into(),
        api_provider: "firstParty".into(),
    };
    for status in [
        AuthStatus::SignedOut,
        ineligible,
        AuthStatus::unknown("x", ""),
        signed_in(),
    ] {
        let waiter = script.spawn();
        script.question().await.send(status.clone()).unwrap();
        assert_eq!(
            bounded(waiter).await.unwrap().is_ok(),
            status == signed_in()
        );
    }
    bounded(script.check.acquire()).await.unwrap();
    assert_eq!(script.asked(), 4);
}

#[tokio::test]
async fn auth_a_success_grows_old() {
    let mut script = script_with(BOUND, Duration::ZERO);
    for _ in 0..2 {
        let waiter = script.spawn();
        script.question().await.send(signed_in()).unwrap();
        assert!(bounded(waiter).await.unwrap().is_ok());
    }
    assert_eq!(script.asked(), 2);
}

#[tokio::test]
async fn bug_041_a_live_refusal_drops_the_stored_success() {
    let mut script = script();
    let waiter = script.spawn();
    script.question().await.send(signed_in()).unwrap();
    assert!(bounded(waiter).await.unwrap().is_ok());
    script.check.forget();
    assert_eq!(
        script.check.last(),
        Some((signed_in(), true)),
        "stored sign-in present, last call refused"
    );
    let waiter = script.spawn();
    script.question().await.send(signed_in()).unwrap();
    assert!(bounded(waiter).await.unwrap().is_ok());
    assert_eq!(script.check.last(), Some((signed_in(), false)));
    assert_eq!(script.asked(), 2);
}

#[tokio::test]
async fn bug_041_a_job_that_ran_during_the_refusal_is_not_kept() {
    let mut script = script();
    let waiter = script.spawn_joined(1).await.remove(0);
    let question = script.question().await;
    script.check.forget();
    question.send(signed_in()).unwrap();
    assert!(bounded(waiter).await.unwrap().is_ok());
    assert_eq!(script.check.last(), Some((signed_in(), true)));
    let waiter = script.spawn();
    script.question().await.send(AuthStatus::SignedOut).unwrap();
    assert_eq!(code(bounded(waiter).await.unwrap()), ErrorCode::Auth);
}

#[tokio::test]
async fn auth_a_job_is_bounded() {
    let mut script = script_with(Duration::from_millis(20), AUTH_MAX_AGE);
    let waiters = script.spawn_joined(3).await;
    let held = script.question().await;
    for waiter in waiters {
        assert_eq!(code(bounded(waiter).await.unwrap()), ErrorCode::AuthUnknown);
    }
    assert!(held.is_closed(), "the question was dropped");
}

#[tokio::test]
async fn auth_shutdown_cancels_and_joins() {
    let mut script = script();
    let waiter = script.spawn_joined(1).await.remove(0);
    let held = script.question().await;
    bounded(script.check.shutdown()).await;
    assert!(held.is_closed());
    assert_eq!(code(bounded(waiter).await.unwrap()), ErrorCode::Closed);
    assert_eq!(
        code(bounded(script.check.acquire()).await),
        ErrorCode::Closed
    );
    assert_eq!(script.asked(), 1);
}

#[tokio::test]
async fn auth_dropping_the_check_cancels_its_job() {
    let mut script = script();
    let waiter = script.spawn_joined(1).await.remove(0);
    let mut held = script.question().await;
    waiter.abort();
    let _ = bounded(waiter).await;
    drop(script.check);
    bounded(held.closed()).await;
}

// With a fake program.

fn fake(dir: &Path, body: &str) -> Asker {
    let program = dir.join("claude");
    write_program(&program, &format!("#!/bin/sh\n{body}\n"));
    let environment = Environment::build(
        &[("PATH", "/usr/bin:/bin")].into_iter().collect(),
        crate::cli::environment::Base {
            program: &program,
            tmp: dir,
            time_zone: None,
            inherited: crate::cli::environment::InheritedCredentials::Strip,
        },
    )
    .unwrap();
    let cwd = dir.to_owned();
    Box::new(move || {
        let question = Question::new(
            &program,
            AUTH_STATUS,
            &environment,
            &cwd,
            Duration::from_millis(300),
        );
        Box::pin(async move { decode(&ask(question).await) })
    })
}

/// By another process: a descriptor that is open for writing here could be inherited by a child that another test starts
/// at this moment, and the kernel refuses to execute a file that somebody may write.
fn write_program(path: &Path, text: &str) {
    use std::io::Write;
    let mut shell = std::process::Command::new("/bin/sh")
        .args(["-c", "cat > \"$1\"", "write"])
        .arg(path)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    shell
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    assert!(shell.wait().unwrap().success());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn bug_128_a_hanging_check_is_shared_and_killed_with_its_group() {
    let dir = tempfile::tempdir().unwrap();
    let life = dir.path().join("life");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&life)
            .status()
            .unwrap()
            .success()
    );
    // The program and its child hold the FIFO, ignore SIGTERM and never answer.
    let body = format!(
        r#"echo call >> "$0.calls"; trap '' TERM; exec 9>"{}"
        sh -c 'trap "" TERM; while :; do sleep 1000; done' & while :; do sleep 1000; done"#,
        life.display()
    );
    // A blocking open waits for the first program, the read for the end of all of them.
    let (tell, all_gone) = oneshot::channel();
    std::thread::spawn(move || tell.send(std::fs::read(life).is_ok()));
    let check = Arc::new(AuthCheck::new(fake(dir.path(), &body)));
    let waiters: Vec<_> = (0..20)
        .map(|_| {
            let check = Arc::clone(&check);
            tokio::spawn(async move { check.acquire().await })
        })
        .collect();
    for waiter in waiters {
        assert_eq!(code(bounded(waiter).await.unwrap()), ErrorCode::AuthUnknown);
    }
    assert_eq!(bounded(all_gone).await, Ok(true));
    let calls = std::fs::read_to_string(dir.path().join("claude.calls")).unwrap();
    assert_eq!(calls.lines().count(), 1);
}

#[tokio::test]
async fn the_whole_way_with_a_program() {
    let dir = tempfile::tempdir().unwrap();
    for (body, wanted) in [
        (
            r#"[ "$*" = "--setting-sources= auth status" ] && echo '{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty"}'"#,
            None,
        ),
        (
            r#"echo '{"loggedIn":false,"authMethod":"none"}'; exit 1"#,
            Some(ErrorCode::Auth),
        ),
        (
            r#"echo '{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty"}' >&2"#,
            Some(ErrorCode::AuthUnknown),
        ),
        ("exit 2", Some(ErrorCode::AuthUnknown)),
        ("yes", Some(ErrorCode::AuthUnknown)),
    ] {
        let check = AuthCheck::new(fake(dir.path(), body));
        let result = bounded(check.acquire()).await;
        assert_eq!(result.err().map(|error| error.code()), wanted, "{body}");
    }
}

#[tokio::test]
async fn a_question_is_bounded_in_length() {
    let dir = tempfile::tempdir().unwrap();
    let size = |bytes: usize| {
        let program = Path::new("/bin/sh");
        let script = format!("head -c {bytes} /dev/zero");
        let mut environment = Environment::default();
        environment.set("PATH", "/usr/bin:/bin");
        ask(Question::new(
            program,
            &["-c", &script],
            &environment,
            dir.path(),
            BOUND,
        ))
    };
    assert_eq!(
        bounded(size(ANSWER_BYTES)).await.unwrap().stdout.len(),
        ANSWER_BYTES
    );
    assert!(matches!(
        bounded(size(ANSWER_BYTES + 1)).await,
        Err(Unanswered::TooLong)
    ));
}
