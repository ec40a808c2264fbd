//! The sign-in: what `claude auth status` says, and what a live answer says in spite of it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnpass::relay::{RelayOptions, RelayTransport};
use turnpass::{ErrorCode, Provider};
use turnpass_lab::cli::Recording;
use turnpass_lab::scenario::Reply;

use crate::stage::{MODES, Stage, WARM, ask, told};
use crate::{post, posted, turns};

/// How often the sign-in was asked for.
fn asked(stage: &Stage) -> usize {
    let all = Recording::read(&stage.path("record")).runs;
    all.iter()
        .filter(|run| run.argv.iter().any(|arg| arg == "auth"))
        .count()
}

#[tokio::test]
async fn bug_042_only_a_clear_answer_is_a_sign_in() {
    let good = json!({"loggedIn": true, "authMethod": "claude.ai", "apiProvider": "firstParty"});
    let with = |field: &str, value: Value| {
        let mut answer = good.clone();
        answer[field] = value;
        answer
    };
    let without = |field: &str| {
        let mut answer = good.clone();
        answer.as_object_mut().unwrap().remove(field);
        answer
    };
    let none = json!({"loggedIn": false, "authMethod": "none", "apiProvider": "firstParty"});
    let cases = [
        (json!({"json": none}), ErrorCode::Auth),
        (json!({"json": none, "exit": 0}), ErrorCode::Auth),
        (
            json!({"json": with("authMethod", json!("api_key"))}),
            ErrorCode::AuthIneligible,
        ),
        (
            json!({"json": with("authMethod", json!("oauth_token"))}),
            ErrorCode::AuthIneligible,
        ),
        (
            json!({"json": with("apiProvider", json!("bedrock"))}),
            ErrorCode::AuthIneligible,
        ),
        (
            json!({"json": with("loggedIn", json!("true")), "exit": 0}),
            ErrorCode::AuthUnknown,
        ),
        (
            json!({"json": without("loggedIn"), "exit": 0}),
            ErrorCode::AuthUnknown,
        ),
        (
            json!({"json": without("authMethod")}),
            ErrorCode::AuthUnknown,
        ),
        (json!({"json": good, "exit": 1}), ErrorCode::AuthUnknown),
        (
            json!({"raw": "<html>blocked</html>", "exit": 0}),
            ErrorCode::AuthUnknown,
        ),
        (
            json!({"raw": "", "exit": 0, "stderr": good.to_string()}),
            ErrorCode::AuthUnknown,
        ),
    ];
    for (auth, code) in cases {
        let stage = Stage::json(json!({"auth": auth}));
        for row in MODES {
            let heard = told(&stage.provider(row), ask("x")).await;
            assert_eq!(heard.error().code(), code, "{auth}: {}", heard.error());
            assert!(!heard.error().to_string().contains("blocked"));
        }
        assert!(
            stage.recording().runs.is_empty() && stage.sent().is_empty(),
            "{auth}"
        );
    }
}

#[tokio::test]
async fn bug_041_a_live_401_drops_what_was_known_of_the_sign_in() {
    for row in MODES {
        let stage = Stage::emulator();
        let provider = stage.provider(row);
        told(&provider, ask("[[say a]]")).await.done();
        told(&provider, ask("[[say b]]")).await.done();
        assert_eq!(asked(&stage), 1, "a success is believed for a while");
        for _ in 0..2 {
            stage
                .upstream
                .enqueue(Reply::error(401, "authentication_error", "no"));
        }
        let heard = told(&provider, ask("x")).await;
        heard.failed(ErrorCode::Auth);
        assert_eq!(told(&provider, ask("[[say c]]")).await.text(), "c");
        assert_eq!(asked(&stage), 2, "after a refusal it is asked again");
    }
}

#[tokio::test]
async fn bug_044_a_401_retires_the_process_that_got_it() {
    let stage = Stage::emulator();
    let provider = stage.provider(WARM);
    told(&provider, ask("[[say a]]")).await.done();
    let first = stage.recording().only().unwrap().pid;
    for _ in 0..2 {
        stage
            .upstream
            .enqueue(Reply::error(401, "authentication_error", "no"));
    }
    let heard = told(&provider, ask("x")).await;
    assert!(
        heard
            .failed(ErrorCode::Auth)
            .remedy()
            .contains("claude auth login")
    );
    assert_eq!(told(&provider, ask("[[say b]]")).await.text(), "b");
    assert_ne!(stage.recording().runs.last().unwrap().pid, first);
}

#[tokio::test]
async fn bug_041_a_refusal_that_only_the_cli_tells_is_an_auth_error() {
    for row in MODES {
        let refused = [
            json!({"send": {"type": "assistant", "error": "authentication_failed", "session_id": "s", "uuid": "u",
                "message": {"id": "m", "role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": "Please run /login"}]}}}),
            json!({"send": {"type": "result", "subtype": "success", "is_error": true, "api_error_status": 401,
                "terminal_reason": "api_error", "result": "Please run /login", "num_turns": 1, "session_id": "s", "uuid": "v"}}),
            json!({"exit": 1}),
        ];
        let stage = Stage::json(json!({"runs": [turns(row, refused), crate::good(row)]}));
        let provider = stage.provider(row);
        let heard = told(&provider, ask("x")).await;
        assert_eq!(heard.failed(ErrorCode::Auth).status(), Some(401));
        assert_eq!(told(&provider, ask("[[say again]]")).await.text(), "again");
        assert_eq!(asked(&stage), 2);
    }
}

#[tokio::test]
async fn bug_128_twenty_callers_share_one_check_and_it_ends_at_its_limit() {
    let stage = Stage::json(json!({"auth": [{"hang": true}, {}]}));
    let provider = stage.provider(WARM);
    let began = Instant::now();
    let all = (0..20).map(|_| told(&provider, ask("[[say x]]")));
    let heard = futures_util::future::join_all(all).await;
    for heard in &heard {
        assert!(heard.failed(ErrorCode::AuthUnknown).is_retryable());
    }
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(asked(&stage), 1);
    let pids: Vec<_> = Recording::read(&stage.path("record"))
        .runs
        .iter()
        .map(|run| run.pid)
        .collect();
    assert!(
        turnpass_lab::rig::wait_gone(&pids, Duration::from_secs(2)).is_empty(),
        "none is left"
    );
    assert_eq!(told(&provider, ask("[[say x]]")).await.text(), "x");
}

#[tokio::test]
async fn bug_128_a_shutdown_ends_a_check_that_hangs() {
    let stage = Stage::json(json!({"auth": {"hang": true}}));
    let provider = stage.provider(WARM);
    let generation = provider.generate(ask("x"));
    stage.asked_for_sign_in().await;
    let began = Instant::now();
    provider.shutdown().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(5));
    crate::stage::hear(generation).await.error();
    let pids: Vec<_> = Recording::read(&stage.path("record"))
        .runs
        .iter()
        .map(|run| run.pid)
        .collect();
    assert!(turnpass_lab::rig::wait_gone(&pids, Duration::from_secs(2)).is_empty());
}

#[tokio::test]
async fn bug_043_refused_sign_ins_are_renewed_one_after_the_other() {
    const RENEWAL: Duration = Duration::from_millis(300);
    const AT_ONCE: usize = 4;
    for row in MODES {
        // Each process is refused, needs a while to renew its sign-in, and sends the same once more.
        let refused = posted(row, json!({"reply": "ignore", "expect_status": 401}));
        let renewal = json!({"sleep_ms": u64::try_from(RENEWAL.as_millis()).unwrap()});
        let stage = Stage::json(json!({"runs": [turns(row, [refused, renewal, post(row)])]}));
        for at in 0..AT_ONCE {
            let mut refused = Reply::error(401, "authentication_error", "expired");
            refused.when.contains = Some(format!("say {at}"));
            stage.upstream.enqueue(refused);
        }
        let options = RelayOptions {
            memory_budget_bytes: u64::MAX,
            ..stage.options(row)
        };
        let provider = Provider::new(RelayTransport::new(options).unwrap());
        let all = (0..AT_ONCE).map(|at| {
            let mut request = ask(format!("[[say {at}]]"));
            request.session.0 = format!("s{at}");
            told(&provider, request)
        });
        for (at, heard) in futures_util::future::join_all(all).await.iter().enumerate() {
            assert_eq!(heard.text(), at.to_string(), "{row:?}: {:?}", heard.error);
            assert_eq!(heard.done().upstream_requests, 2, "each exactly once more");
        }
        let sent = stage.sent();
        let mut again: Vec<Instant> = sent
            .iter()
            .filter(|request| request.reply.status == Some(200))
            .map(|request| request.arrived_at)
            .collect();
        again.sort();
        assert_eq!((sent.len(), again.len()), (2 * AT_ONCE, AT_ONCE));
        for pair in again.windows(2) {
            // Each left its process later than the one before by the time that a renewal takes; on the way here it may lose
            // a part of that on a busy machine. Two at once would come together.
            assert!(
                pair[1] - pair[0] >= RENEWAL / 2,
                "{row:?}: two at the same time"
            );
        }
    }
}
