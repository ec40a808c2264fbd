//! A process from its start to its end: pipes that fill, ends that do not come, deaths.

use std::time::{Duration, Instant};

use serde_json::json;
use turnpass::relay::{RelayOptions, RelayTransport};
use turnpass::{ErrorCode, Provider};
use turnpass_lab::cli::{EmulatorOptions, Run, Script};
use turnpass_lab::rig::processes;

use crate::stage::{
    MODES, PER_REQUEST, Stage, WARM, ask, ask_with_tools, hear, is_text, limits, told, until,
};
use crate::{body_with_tools, good, post, posted, turns};

/// From the end of a generation until everything of its process is gone: the grace after SIGTERM, the reading on of the
/// answer's connection, and a loaded machine.
const GONE: Duration = Duration::from_secs(6);

#[tokio::test]
async fn bug_015_a_loud_stderr_blocks_nothing() {
    for row in MODES {
        for stderr in [json!({"bytes": 200_000}), json!("a line\n".repeat(30_000))] {
            let mut run = turns(row, [post(row), json!({"stderr": stderr})]);
            run["steps"]
                .as_array_mut()
                .unwrap()
                .insert(0, json!({"stderr": stderr}));
            let stage = Stage::json(json!({"runs": [run]}));
            let heard = told(&stage.provider(row), ask("[[say heard]]")).await;
            assert_eq!(heard.text(), "heard");
        }
    }
}

#[tokio::test]
async fn bug_016_a_cli_that_writes_a_megabyte_before_it_reads() {
    let mut run = turns(WARM, [post(WARM)]);
    run["steps"]
        .as_array_mut()
        .unwrap()
        .insert(0, json!({"write_before_read": 1_000_000}));
    let stage = Stage::json(json!({"runs": [run]}));
    let mut request = ask("[[say both ways]]");
    // Far more than a pipe takes, by the CLI's input.
    request.model = "claude-opus-4-6[1m]".into();
    request.system = "x".repeat(3_000_000);
    let heard = told(&stage.provider(WARM), request).await;
    assert_eq!(heard.text(), "both ways");
}

#[tokio::test]
async fn bug_016_a_cli_that_never_reads_ends_at_the_start_deadline() {
    let silent = json!({"steps": ["never_read_stdin", "hang"]});
    for row in MODES {
        let stage = Stage::json(json!({"runs": [silent, good(row)]}));
        let provider = stage.provider(row);
        let mut request = ask("x");
        request.model = "claude-opus-4-6[1m]".into();
        request.system = "x".repeat(3_000_000);
        request.limits = limits(1_500, 60_000, 120_000);
        let heard = told(&provider, request).await;
        assert!(heard.failed(ErrorCode::StartTimeout).is_retryable());
        assert!(heard.took < Duration::from_secs(6), "{:?}", heard.took);
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
        let began = Instant::now();
        provider.shutdown().await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(15), "a task is stuck");
        stage.all_gone(Duration::from_secs(1)).await;
    }
}

#[tokio::test]
async fn bug_018_a_text_does_not_wait_for_a_process_that_will_not_end() {
    let row = PER_REQUEST;
    let run = turns(
        row,
        [
            json!({"ignore_signals": ["SIGTERM"]}),
            post(row),
            json!("hang"),
        ],
    );
    let stage = Stage::json(json!({"runs": [run]}));
    let provider = stage.provider(row);
    let heard = told(&provider, ask("[[say at once]]")).await;
    assert_eq!(heard.text(), "at once");
    let whole = stage.sent()[0].reply.last_byte_at.unwrap();
    assert!(
        whole.elapsed() < Duration::from_millis(1500),
        "it waited {:?}",
        whole.elapsed()
    );
    stage.all_gone(GONE).await;
    let asked = &stage.recording().runs[0].signals;
    assert!(
        asked.contains(&"SIGTERM".to_owned()),
        "it was asked first: {asked:?}"
    );
}

#[tokio::test]
async fn bug_018_a_call_waits_for_the_end_of_its_process_and_no_longer_than_the_grace() {
    let row = PER_REQUEST;
    let call = posted(row, json!({"body": body_with_tools()}));
    let run = turns(
        row,
        [json!({"ignore_signals": ["SIGTERM"]}), call, json!("hang")],
    );
    let stage = Stage::json(json!({"runs": [run]}));
    let began = Instant::now();
    let heard = told(&stage.provider(row), ask_with_tools("[[call read {}]]")).await;
    // The exit is part of a call's proof.
    heard.failed(ErrorCode::ProcessCleanup);
    assert!(heard.calls().is_empty());
    assert!(
        (9..25).contains(&began.elapsed().as_secs()),
        "{:?}",
        began.elapsed()
    );
    stage.all_gone(GONE).await;
}

#[tokio::test]
async fn bug_018_a_warm_process_that_will_not_end_is_ended_by_a_shutdown() {
    let mut run = turns(WARM, [post(WARM)]);
    let steps = run["steps"].as_array_mut().unwrap();
    steps.insert(
        0,
        json!({"ignore_signals": ["SIGTERM", "SIGINT", "SIGHUP"]}),
    );
    steps.push(json!("hang"));
    let stage = Stage::json(json!({"runs": [run]}));
    let provider = stage.provider(WARM);
    told(&provider, ask("[[say x]]")).await.done();
    let began = Instant::now();
    provider.shutdown().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15));
    stage.all_gone(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn bug_019_each_state_of_the_cli_has_its_deadline() {
    for row in MODES {
        let hang = || json!("hang");
        let cases = [
            (
                "before everything",
                json!({"steps": ["hang"]}),
                ErrorCode::StartTimeout,
            ),
            (
                "after its controls",
                json!({"steps": ["answer_controls", "hang"]}),
                ErrorCode::StartTimeout,
            ),
            (
                "after its first record",
                turns(row, [hang()]),
                ErrorCode::StartTimeout,
            ),
            (
                "after a tool's echo",
                turns(
                    row,
                    [
                        json!({"send_big": {"bytes": 500, "kind": "tool_result"}}),
                        hang(),
                    ],
                ),
                ErrorCode::StartTimeout,
            ),
        ];
        for (what, run, code) in cases {
            let stage = Stage::json(json!({"runs": [run]}));
            let mut request = ask("x");
            request.limits = limits(1_200, 60_000, 120_000);
            let heard = told(&stage.provider(row), request).await;
            assert_eq!(heard.error().code(), code, "{what}: {}", heard.error());
            assert!(heard.error().is_retryable(), "{what}");
            assert!(
                heard.took < Duration::from_secs(8),
                "{what}: {:?}",
                heard.took
            );
            assert_eq!(stage.sent().len(), 0, "{what}");
            stage.all_gone(GONE).await;
        }
    }
}

#[tokio::test]
async fn bug_019_a_turn_that_the_cli_never_ends_is_ended_by_the_grace() {
    for row in MODES {
        let run = turns(
            row,
            [
                posted(row, json!({"reply": "forward_no_result"})),
                json!("hang"),
            ],
        );
        let stage = Stage::json(json!({"runs": [run, good(row)]}));
        let provider = stage.provider(row);
        let heard = told(&provider, ask("[[say all of it]]")).await;
        let error = heard.failed(ErrorCode::ProcessCleanup);
        assert!(error.output_seen());
        assert_eq!(heard.text(), "all of it", "what was said is not taken back");
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    }
}

#[tokio::test]
async fn bug_021_a_grandchild_that_ignores_sigterm_is_gone_after_a_drop_and_after_a_good_end() {
    for row in MODES {
        for keep_pipes in [false, true] {
            let run = turns(
                row,
                [json!({"grandchild": {"keep_pipes": keep_pipes}}), post(row)],
            );
            let stage = Stage::json(json!({"runs": [run]}));
            let provider = stage.provider(row);
            let mut generation = provider.generate(ask("[[say half]] [[stall closed]]"));
            until(&mut generation, "text", is_text).await;
            let grandchildren = stage.recording().runs[0].grandchildren.clone();
            assert_eq!(grandchildren.len(), 1);
            drop(generation);
            drop(provider);
            stage.all_gone(GONE).await;
            assert!(processes::wait_gone(&grandchildren, GONE).is_empty());

            let provider = stage.provider(row);
            told(&provider, ask("[[say whole]]")).await.done();
            provider.shutdown().await.unwrap();
            stage.all_gone(GONE).await;
        }
    }
}

#[tokio::test]
async fn bug_021_a_deadline_during_the_start_leaves_nobody() {
    for row in MODES {
        let slow = EmulatorOptions {
            start_delay_ms: 60_000,
            ..EmulatorOptions::default()
        };
        let script = Script::runs(
            "2.1.332",
            [
                Run::Emulator(slow),
                Run::Emulator(EmulatorOptions::default()),
            ],
        );
        let stage = Stage::script(script);
        let provider = stage.provider(row);
        let mut request = ask("x");
        request.limits = limits(1_000, 60_000, 120_000);
        told(&provider, request)
            .await
            .failed(ErrorCode::StartTimeout);
        stage.all_gone(GONE).await;
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    }
}

#[tokio::test]
async fn bug_022_a_process_that_died_between_two_generations_costs_nobody_an_error() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        for settle in [false, true] {
            let stage = Stage::emulator();
            let provider = stage.provider(WARM);
            told(&provider, ask("[[say first]]")).await.done();
            let pid = stage.recording().only().unwrap().pid;
            rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal)
                .unwrap();
            if settle {
                assert!(processes::wait_gone(&[pid], GONE).is_empty());
            }
            let heard = told(&provider, ask("[[say second]]")).await;
            assert_eq!(heard.text(), "second");
            assert_eq!(heard.done().upstream_requests, 1);
            assert_eq!(stage.recording().runs.len(), 2);
            assert_eq!(stage.sent().len(), 2);
        }
    }
}

#[tokio::test]
async fn bug_022_a_generation_dropped_at_any_point_does_not_spoil_the_next() {
    let stage = Stage::emulator();
    let provider = stage.provider(WARM);
    told(&provider, ask("[[say first]]")).await.done();
    for at in 0..12 {
        let generation = provider.generate(ask(format!("[[say old {at}]] [[chunk 1 ms 2]]")));
        let heard = tokio::time::timeout(Duration::from_millis(at * 4), hear(generation)).await;
        drop(heard);
        let heard = told(&provider, ask(format!("[[say new {at}]]"))).await;
        assert_eq!(
            heard.text(),
            format!("new {at}"),
            "no byte of the old answer"
        );
        assert_eq!(heard.done().upstream_requests, 1);
    }
}

#[tokio::test]
async fn bug_023_an_unknown_option_is_an_incompatible_version_and_no_loop() {
    for row in MODES {
        let refusing =
            json!({"steps": [{"stderr": "error: unknown option '--no-chrome'\n"}, {"exit": 1}]});
        let stage = Stage::json(json!({"runs": [refusing]}));
        let provider = stage.provider(row);
        for at in 1..=3 {
            let heard = told(&provider, ask("x")).await;
            let error = heard.failed(ErrorCode::VersionIncompatible);
            assert!(
                !error.is_retryable() && error.detail().contains("--no-chrome"),
                "{error}"
            );
            assert_eq!(stage.recording().runs.len(), at, "one start for each call");
        }
        assert!(stage.sent().is_empty());
    }
}

#[tokio::test]
async fn bug_023_any_other_early_end_is_told_once() {
    for row in MODES {
        let failing = json!({"steps": [{"stderr": "No conversation found with session ID: x\n"}, {"exit": 1}]});
        let stage = Stage::json(json!({"runs": [failing, good(row)]}));
        let provider = stage.provider(row);
        let heard = told(&provider, ask("x")).await;
        let error = heard.failed(ErrorCode::ProcessExit);
        assert!(
            !error.to_string().contains("No conversation"),
            "stderr is in no error: {error}"
        );
        assert_eq!(stage.recording().runs.len(), 1);
        assert_eq!(told(&provider, ask("[[say next]]")).await.text(), "next");
    }
}

#[tokio::test]
async fn an_end_without_a_result_releases_no_call() {
    let row = PER_REQUEST;
    for end in [
        json!({"exit": 0}),
        json!({"exit": 3}),
        json!({"kill_self": "SIGABRT"}),
    ] {
        let call = json!({"reply": "forward_no_result", "body": body_with_tools()});
        let stage = Stage::json(json!({"runs": [turns(row, [posted(row, call), end])]}));
        let heard = told(
            &stage.provider(row),
            ask_with_tools("[[say x]] [[call read {}]]"),
        )
        .await;
        heard.failed(ErrorCode::ProcessExit);
        assert!(heard.calls().is_empty());
    }
}

#[tokio::test]
async fn a_closed_output_without_an_end_is_noticed() {
    for row in MODES {
        let run = turns(row, [json!("close_stdout"), json!("hang")]);
        let stage = Stage::json(json!({"runs": [run]}));
        let mut request = ask("x");
        request.limits = limits(2_000, 60_000, 120_000);
        let heard = told(&stage.provider(row), request).await;
        assert!(heard.error().is_retryable(), "{}", heard.error());
        stage.all_gone(GONE).await;
    }
}

#[tokio::test]
async fn bug_043_few_processes_start_at_the_same_time() {
    for row in MODES {
        let slow = EmulatorOptions {
            start_delay_ms: 250,
            ..EmulatorOptions::default()
        };
        let stage = Stage::script(Script::runs("2.1.332", [Run::Emulator(slow)]));
        let options = RelayOptions {
            memory_budget_bytes: u64::MAX,
            ..stage.options(row)
        };
        let provider = Provider::new(RelayTransport::new(options).unwrap());
        let all = (0..8).map(|at| {
            let mut request = ask(format!("[[say {at}]] [[hold open]]"));
            request.session.0 = format!("s{at}");
            told(&provider, request)
        });
        let release = async {
            stage
                .recorded("eight processes", |recording| recording.runs.len() == 8)
                .await;
            stage.upstream.wait_requests(8).await.unwrap();
            stage.upstream.release("open");
        };
        let (heard, ()) = tokio::join!(futures_util::future::join_all(all), release);
        assert!(heard.iter().all(|heard| heard.error.is_none()), "{row:?}");
        // A start ends with its request at the upstream: no more than two of the eight are ever between the two.
        let sent = stage.sent();
        let mut order: Vec<_> = sent.iter().map(|request| request.arrived_at).collect();
        order.sort();
        let spread = order[7] - order[0];
        assert!(
            spread >= Duration::from_millis(3 * 250 - 50),
            "{row:?}: all within {spread:?}"
        );
    }
}
