//! What the installed CLI was certified to do decides the ways that are taken with it: with each check that fails, the way
//! around it, on a CLI that has just that fault; and a refusal before a process where there is none.

use std::path::PathBuf;
use std::pin::Pin;

use serde_json::Value;
use turnpass::certify::{Certificate, Certificates, Check, Identity, Otherwise, Outcome, Verdict};
use turnpass::cli::version::Version;
use turnpass::conversation::{Block, Message, ToolResult};
use turnpass::event::{Event, Notice, PlanKind, StateOrder};
use turnpass::pool::{PoolOptions, Reseed, ToolCarrier};
use turnpass::relay::{ProcessMode, RelayOptions, RelayTransport, ToolCarrier as RelayCarrier};
use turnpass::replay::{Carrier, History, ReplayOptions, ReplayTransport};
use turnpass::request::{Effort, TransportKind};
use turnpass::{ErrorCode, Provider, Request};
use turnpass_lab::cli::{EmulatorOptions, Fault, RecordedRun, Run, Script};

use crate::stage::{
    Heard, ROWS, Stage, ask, ask_with_tools, go_on, host_messages, is_text, is_transcript, limits,
    told, until,
};

/// A version that was certified before this build was released, and one that nobody knows.
const KNOWN: (&str, Version) = ("2.1.332", Version::new(2, 1, 332));
const UNKNOWN: (&str, Version) = ("2.1.9999", Version::new(2, 1, 9999));

/// A CLI of this version with a fault.
fn emulator(version: &str, fault: Option<Fault>) -> Stage {
    let mut script = Script::emulator(version);
    script.runs = vec![Run::Emulator(EmulatorOptions {
        faults: fault.into_iter().collect(),
        ..EmulatorOptions::default()
    })];
    Stage::script(script)
}

fn certificates(stage: &Stage) -> PathBuf {
    stage.path("certificates")
}

/// Keeps a certificate of the stage's CLI by which these checks fail.
fn certify(stage: &Stage, failing: &[Check]) {
    let outcome = |check: &Check| Outcome {
        check: *check,
        verdict: match failing.contains(check) {
            true => Verdict::Fails {
                seen: "something else".to_owned(),
            },
            false => Verdict::Holds,
        },
        took_ms: 1,
    };
    let identity = Identity::of(KNOWN.1, stage.claude()).unwrap();
    let outcomes = Check::ALL.iter().map(outcome).collect();
    let kept = Certificates::new(&certificates(stage));
    kept.keep(&Certificate::new(identity, outcomes)).unwrap();
}

fn pool(stage: &Stage, change: impl FnOnce(&mut PoolOptions)) -> Provider {
    stage.pool(|options| {
        options.certificates = Some(certificates(stage));
        change(options);
    })
}

fn replay(stage: &Stage, change: impl FnOnce(&mut ReplayOptions)) -> Provider {
    let mut options = stage.replay_options(History::Native);
    options.history = None;
    options.certificates = Some(certificates(stage));
    change(&mut options);
    Provider::new(ReplayTransport::new(options).unwrap())
}

fn relay(stage: &Stage, change: impl FnOnce(&mut RelayOptions)) -> Provider {
    let mut options = stage.options(ROWS[0]);
    (options.process, options.tools) = (None, None);
    options.certificates = Some(certificates(stage));
    change(&mut options);
    Provider::new(RelayTransport::new(options).unwrap())
}

fn provider(stage: &Stage, transport: TransportKind) -> Provider {
    match transport {
        TransportKind::Pool => pool(stage, |_| {}),
        TransportKind::Replay => replay(stage, |_| {}),
        TransportKind::Relay => relay(stage, |_| {}),
    }
}

/// A history of five messages, whose last one says `done`.
fn history() -> Request {
    let mut request = ask("word-0");
    request.messages.extend([
        Message::assistant("word-1"),
        Message::user("word-2"),
        Message::assistant("word-3"),
        Message::user("word-4 [[say done]]"),
    ]);
    request
}

/// Whether the last request has these words in this order, each once.
fn has_words(stage: &Stage, words: &[&str]) -> bool {
    let sent = stage.sent();
    let Some(last) = sent.last() else {
        return false;
    };
    let text = Value::from(host_messages(last)).to_string();
    let places: Vec<_> = words.iter().map(|word| text.find(word)).collect();
    let once = words.iter().all(|word| text.matches(word).count() == 1);
    once && places.iter().all(Option::is_some) && places.is_sorted()
}

fn starts(stage: &Stage) -> Vec<RecordedRun> {
    stage.recording().runs
}

/// Whether tools were told to a process with its start, which in-band they are not.
fn has_server(run: &RecordedRun) -> bool {
    run.flag("--mcp-config").is_some()
}

fn kind(heard: &Heard) -> Option<PlanKind> {
    heard.events.iter().rev().find_map(|event| match event {
        Event::Started { how, .. } => Some(how.kind),
        _ => None,
    })
}

fn keep_state(request: &mut Request, heard: &Heard) {
    if let StateOrder::Keep { state } = &heard.done().state {
        request.state = Some(state.clone());
    }
}

type Scene = Pin<Box<dyn Future<Output = bool>>>;
/// Whether all went well.
type Play = fn(Stage, Provider) -> Scene;

async fn reseeds(stage: Stage, provider: Provider) -> bool {
    let mut request = history();
    request.limits = limits(3_000, 5_000, 5_000);
    let heard = told(&provider, request).await;
    heard.text() == "done" && has_words(&stage, &["word-0", "word-1", "word-2", "word-3", "word-4"])
}

async fn reseeds_as_one(stage: Stage, provider: Provider) -> bool {
    let heard = told(&provider, history()).await;
    let sent = stage.sent();
    let messages = sent[0].field("/messages").and_then(Value::as_array);
    let spoken = |one: &Value| one["role"] == "assistant";
    let as_one = messages.is_some_and(|all| !all.iter().any(spoken));
    let words = ["word-0", "word-1", "word-2", "word-3", "word-4"];
    heard.text() == "done" && as_one && has_words(&stage, &words)
}

async fn thinks(stage: Stage, provider: Provider) -> bool {
    let mut request = history();
    let thought = turnpass::conversation::SignedThinking {
        thinking: "a-thought".into(),
        signature: stage.upstream.sign("a-thought"),
    };
    request.messages[1]
        .content
        .insert(0, Block::Thinking(thought));
    let heard = told(&provider, request).await;
    let given: String = starts(&stage)
        .iter()
        .flat_map(|run| run.stdin.iter().map(|line| line.text.clone()))
        .collect();
    heard.text() == "done" && !given.contains("a-thought")
}

async fn hears_more(stage: Stage, provider: Provider) -> bool {
    let mut request = ask("word-0 [[say word-1]]");
    let heard = told(&provider, request.clone()).await;
    request.messages.push(heard.done().message.clone());
    request.messages.extend([
        Message::user("word-2"),
        Message::assistant("word-3"),
        Message::user("word-4 [[say done]]"),
    ]);
    let heard = told(&provider, request).await;
    let sent = stage.sent();
    let text = Value::from(host_messages(sent.last().unwrap())).to_string();
    heard.text() == "done" && ["word-2", "word-3"].iter().all(|word| text.contains(word))
}

async fn calls(stage: Stage, provider: Provider) -> bool {
    let mut request = ask_with_tools("[[call read {}]] [[then [[say done]]]]");
    request.limits = limits(3_000, 5_000, 5_000);
    let heard = told(&provider, request.clone()).await;
    if heard.done.is_none() {
        return false;
    }
    let heard = told(&provider, go_on(&request, heard.done())).await;
    heard.text() == "done" && starts(&stage).iter().all(has_server)
}

async fn gets_a_long_result(stage: Stage, provider: Provider) -> bool {
    let request = ask_with_tools("[[call read {}]] [[then [[say done]]]]");
    let heard = told(&provider, request.clone()).await;
    let mut next = request.clone();
    next.messages.push(heard.done().message.clone());
    let (id, text) = (heard.calls()[0].id.clone(), "long".repeat(15_000));
    next.messages
        .push(Message::results(vec![ToolResult::text(id, text.clone())]));
    let heard = told(&provider, next).await;
    let sent = stage.sent();
    let body = String::from_utf8_lossy(&sent.last().unwrap().body).into_owned();
    heard.done.is_some() && body.contains(&text)
}

async fn says_more_with_a_result(stage: Stage, provider: Provider) -> bool {
    let mut request = ask_with_tools("[[call read {}]]");
    request.limits = limits(3_000, 5_000, 5_000);
    let heard = told(&provider, request.clone()).await;
    let mut next = go_on(&request, heard.done());
    let more = Block::Text {
        text: "word-9 [[say done]]".into(),
    };
    next.messages.last_mut().unwrap().content.push(more);
    let heard = told(&provider, next).await;
    heard.text() == "done" && stage.sent().len() == 2 && has_words(&stage, &["result of", "word-9"])
}

async fn works_harder(stage: Stage, provider: Provider) -> bool {
    let mut request = ask("[[say one]]");
    request.effort = Some(Effort::Low);
    let heard = told(&provider, request.clone()).await;
    let mut next = go_on(&request, heard.done());
    next.effort = Some(Effort::High);
    let heard = told(&provider, next).await;
    let sent = stage.sent();
    let effort = sent
        .iter()
        .map(|one| one.field("/output_config/effort").cloned());
    let effort: Vec<_> = effort.map(Option::unwrap_or_default).collect();
    heard.done.is_some() && effort == ["low", "high"]
}

async fn is_cancelled(stage: Stage, provider: Provider) -> bool {
    let request = ask("word-0 [[say word-1]] [[hold on]] [[say more]]");
    let mut generation = provider.generate(request);
    until(&mut generation, "a text", is_text).await;
    drop(generation);
    let heard = told(&provider, ask("word-2 [[say done]]")).await;
    let interrupted = starts(&stage).iter().any(|run| {
        let lines = run.stdin.iter().map(|line| line.json());
        lines
            .into_iter()
            .any(|line| line["request"]["subtype"] == "interrupt")
    });
    heard.text() == "done" && has_words(&stage, &["word-2"]) && !interrupted
}

async fn fails_and_is_asked_again(stage: Stage, provider: Provider) -> bool {
    let heard = told(&provider, ask("word-0 [[status 500 {}]]")).await;
    let heard_again = told(&provider, ask("word-2 [[say done]]")).await;
    let sent = stage.sent();
    let text = Value::from(host_messages(sent.last().unwrap())).to_string();
    heard.error.is_some() && heard_again.text() == "done" && !text.contains("word-0")
}

async fn is_taken_up(stage: Stage, provider: Provider) -> bool {
    let mut request = ask("word-0 [[say word-1]]");
    let heard = told(&provider, request.clone()).await;
    request = go_on(&request, heard.done());
    keep_state(&mut request, &heard);
    provider.shutdown().await.unwrap();
    let heard = told(&pool(&stage, |_| {}), request).await;
    kind(&heard) == Some(PlanKind::Reseeded) && has_words(&stage, &["word-0", "and so on"])
}

async fn changes_its_model(stage: Stage, provider: Provider) -> bool {
    let mut request = ask("word-0 [[say word-1]]");
    let heard = told(&provider, request.clone()).await;
    request = go_on(&request, heard.done());
    keep_state(&mut request, &heard);
    request.model = "opus".into();
    let heard = told(&provider, request).await;
    kind(&heard) == Some(PlanKind::Reseeded) && has_words(&stage, &["word-0", "and so on"])
}

async fn asks_once(stage: Stage, provider: Provider, text: &str) -> bool {
    let heard = told(&provider, ask(text)).await;
    provider.shutdown().await.unwrap();
    // A process that was killed has not noted its end.
    let killed = starts(&stage).iter().all(|run| run.exit.is_none());
    heard.done.is_some() && stage.sent().len() == 1 && killed
}

async fn is_refused(stage: Stage, provider: Provider) -> bool {
    asks_once(stage, provider, "[[say no]] [[stop refusal]]").await
}

async fn is_cut(stage: Stage, provider: Provider) -> bool {
    asks_once(stage, provider, "[[say so far]] [[stop max_tokens]]").await
}

async fn sets_the_body(stage: Stage, provider: Provider) -> bool {
    let mut request = ask("[[say done]]");
    request.sampling.temperature = Some(0.5);
    let heard = told(&provider, request).await;
    let Some(error) = &heard.error else {
        return false;
    };
    let named = error.detail().contains("extra_body_live");
    error.code() == ErrorCode::SamplingUnsupported && named && starts(&stage).is_empty()
}

async fn describes_at_length(stage: Stage, provider: Provider) -> bool {
    let mut request = ask_with_tools("[[say done]]");
    request.tools[1].description = "d".repeat(5_000);
    let heard = told(&provider, request).await;
    let told = heard.count(|event| match event {
        Event::Notice(Notice::Other { text }) => text.contains("write") && !text.contains("read"),
        _ => false,
    });
    heard.text() == "done" && told == 1 && stage.sent().len() == 1
}

async fn names_a_path(stage: Stage, provider: Provider) -> bool {
    let heard = told(&provider, ask("see @/word-0 [[say done]]")).await;
    heard.text() == "done" && stage.sent().iter().all(is_transcript)
}

async fn is_marked(stage: Stage, provider: Provider) -> bool {
    let heard = told(&provider, history()).await;
    let sent = stage.sent();
    let marks = |body: &Value| body.to_string().matches("\"cache_control\"").count();
    heard.text() == "done"
        && sent
            .iter()
            .all(|one| one.json.as_deref().is_some_and(|body| marks(body) <= 4))
}

macro_rules! play {
    ($play:ident) => {
        |stage, provider| Box::pin($play(stage, provider))
    };
}

/// Each way that is decided, with the fault that it goes around and what it is good for.
fn rows(transport: TransportKind) -> Vec<(Check, Fault, Play)> {
    match transport {
        TransportKind::Pool => vec![
            (
                Check::DescriptionsWhole,
                Fault::CutsDescriptions,
                play!(describes_at_length),
            ),
            (Check::InBandManifest, Fault::IgnoresManifests, play!(calls)),
            (
                Check::ResultWhole,
                Fault::StubsResults,
                play!(gets_a_long_result),
            ),
            (
                Check::EndTurn,
                Fault::IgnoresEndTurn,
                play!(says_more_with_a_result),
            ),
            (Check::FramesOrder, Fault::FramesOutOfOrder, play!(reseeds)),
            (
                Check::FramesAcknowledged,
                Fault::FramesUnacknowledged,
                play!(reseeds_as_one),
            ),
            (Check::FramesThinking, Fault::DropsThinking, play!(thinks)),
            (Check::FramesLive, Fault::NoLiveFrames, play!(hears_more)),
            (
                Check::ExtraBodyLive,
                Fault::NoLiveExtraBody,
                play!(sets_the_body),
            ),
            (Check::EffortLive, Fault::NoLiveEffort, play!(works_harder)),
            (
                Check::RewindAfterInterrupt,
                Fault::KeepsInterrupted,
                play!(is_cancelled),
            ),
            (
                Check::RewindAfterFailure,
                Fault::KeepsFailed,
                play!(fails_and_is_asked_again),
            ),
            (
                Check::InterruptCloses,
                Fault::InterruptKeepsRequest,
                play!(is_cancelled),
            ),
            (
                Check::CancelQueued,
                Fault::IgnoresCancelQueued,
                play!(is_cancelled),
            ),
            (Check::ResumeAt, Fault::IgnoresResumeAt, play!(is_taken_up)),
            (Check::ForkAt, Fault::IgnoresFork, play!(changes_its_model)),
            (
                Check::BlockingLimitGate,
                Fault::NoBlockingLimit,
                play!(is_cut),
            ),
            (
                Check::RefusalOnce,
                Fault::RetriesRefusals,
                play!(is_refused),
            ),
        ],
        TransportKind::Replay => vec![
            (
                Check::DescriptionsWhole,
                Fault::CutsDescriptions,
                play!(describes_at_length),
            ),
            (Check::InBandManifest, Fault::IgnoresManifests, play!(calls)),
            (
                Check::ClientComposed,
                Fault::IgnoresComposed,
                play!(names_a_path),
            ),
            (
                Check::CacheBreakpoints,
                Fault::ExtraCacheMark,
                play!(is_marked),
            ),
            (Check::FramesOrder, Fault::FramesOutOfOrder, play!(reseeds)),
            (
                Check::FramesAcknowledged,
                Fault::FramesUnacknowledged,
                play!(reseeds_as_one),
            ),
            (Check::FramesThinking, Fault::DropsThinking, play!(thinks)),
            (
                Check::ExtraBodyLive,
                Fault::NoLiveExtraBody,
                play!(sets_the_body),
            ),
            (
                Check::RefusalOnce,
                Fault::RetriesRefusals,
                play!(is_refused),
            ),
        ],
        TransportKind::Relay => vec![],
    }
}

/// Each row on a CLI with its fault: with the certificate that says so all goes well, and with one that does not it goes
/// wrong, so it is the certificate that helps.
async fn each_row(transport: TransportKind) {
    let mut wrong = Vec::new();
    for (check, fault, play) in rows(transport) {
        for is_known in [true, false] {
            // A short answer can be faster than the closing of the gate, and its process is killed for that as well.
            if check == Check::BlockingLimitGate && !is_known {
                continue;
            }
            let stage = emulator(KNOWN.0, Some(fault));
            let failing = Some(check).filter(|_| is_known);
            certify(&stage, failing.as_slice());
            let provider = provider(&stage, transport);
            let well = play(stage, provider).await;
            if well != is_known {
                wrong.push(format!("{check} with {fault:?}, known: {is_known}"));
            }
        }
    }
    assert_eq!(wrong, [""; 0], "{transport}");
}

#[tokio::test]
async fn the_pool_goes_around_what_does_not_hold() {
    each_row(TransportKind::Pool).await;
}

#[tokio::test]
async fn the_replay_goes_around_what_does_not_hold() {
    each_row(TransportKind::Replay).await;
}

/// What shows the way of a relay: whether its process stays, and whether its tools are in-band or served; else they are in the
/// body.
async fn relayed(
    failing: &[Check],
    fault: Option<Fault>,
    tools: Option<RelayCarrier>,
) -> (bool, bool, bool) {
    let stage = emulator(KNOWN.0, fault);
    certify(&stage, failing);
    let provider = relay(&stage, |options| options.tools = tools);
    for text in ["[[say one]]", "[[say two]]"] {
        told(&provider, ask_with_tools(text)).await.done();
    }
    let sent = stage.sent();
    for one in &sent {
        let names = one.field("/tools").and_then(Value::as_array).map(Vec::len);
        assert_eq!(names, Some(2));
    }
    let runs = starts(&stage);
    let is_in_band = |run: &RecordedRun| {
        let mut lines = run.stdin.iter();
        lines.any(|line| line.text.contains("sdkMcpServers"))
    };
    let (in_band, server) = (runs.iter().any(is_in_band), runs.iter().all(has_server));
    (runs.len() == 1, in_band, server)
}

#[tokio::test]
async fn the_relay_goes_around_what_does_not_hold() {
    let mcp = Some(RelayCarrier::Mcp);
    for (failing, fault, tools, wanted) in [
        (None, None, None, (true, false, false)),
        (
            Some(Check::SystemPromptLive),
            None,
            None,
            (false, false, false),
        ),
        (Some(Check::EffortLive), None, None, (false, false, false)),
        (Some(Check::ExtraBodyLive), None, None, (true, true, false)),
        (None, None, mcp, (true, true, false)),
        (
            Some(Check::InBandManifest),
            Some(Fault::IgnoresManifests),
            mcp,
            (false, false, true),
        ),
        (Some(Check::ToolsExact), None, None, (true, false, false)),
        (
            Some(Check::StdioBridge),
            Some(Fault::IgnoresMcpConfig),
            mcp,
            (true, true, false),
        ),
    ] {
        let failing: Vec<_> = failing.into_iter().collect();
        let seen = relayed(&failing, fault, tools).await;
        assert_eq!(
            seen, wanted,
            "{failing:?} {tools:?}: stays, in-band, by a server"
        );
    }
    for (failing, is_refused) in [(&[][..], false), (&[Check::ExtraBodyLive], true)] {
        let stage = emulator(KNOWN.0, None);
        certify(&stage, failing);
        let provider = provider(&stage, TransportKind::Relay);
        assert_eq!(sets_the_body(stage, provider).await, is_refused);
    }
}

#[tokio::test]
async fn a_check_that_a_transport_cannot_do_without_refuses_it_before_a_process() {
    for transport in TransportKind::ALL {
        for check in Check::ALL {
            if !matches!(check.otherwise(transport), Some(Otherwise::Refuses(_))) {
                continue;
            }
            let stage = emulator(KNOWN.0, None);
            certify(&stage, &[*check]);
            let heard = told(&provider(&stage, transport), ask("[[say no]]")).await;
            let error = heard.failed(ErrorCode::VersionIncompatible);
            assert!(
                error.detail().contains(check.as_str()),
                "{transport}: {error}"
            );
            assert!(
                starts(&stage).is_empty() && stage.sent().is_empty(),
                "{transport} {check}"
            );
        }
    }
}

#[tokio::test]
async fn what_is_asked_for_and_does_not_hold_is_refused_before_a_process() {
    type Make = fn(&Stage) -> Provider;
    let rows: [(Check, Make); 7] = [
        (Check::FramesOrder, |stage| {
            pool(stage, |o| o.reseed = Some(Reseed::Native))
        }),
        (Check::InBandManifest, |stage| {
            pool(stage, |o| o.tools = Some(ToolCarrier::InBand))
        }),
        (Check::FramesOrder, |stage| {
            replay(stage, |o| o.history = Some(History::Native))
        }),
        (Check::InBandManifest, |stage| {
            replay(stage, |o| o.tools = Some(Carrier::InBand))
        }),
        (Check::StdioBridge, |stage| {
            replay(stage, |o| o.tools = Some(Carrier::Stdio))
        }),
        (Check::EffortLive, |stage| {
            relay(stage, |o| o.process = Some(ProcessMode::Warm))
        }),
        (Check::ExtraBodyLive, |stage| {
            relay(stage, |o| o.tools = Some(RelayCarrier::ExtraBody))
        }),
    ];
    for (check, make) in rows {
        let stage = emulator(KNOWN.0, None);
        certify(&stage, &[check]);
        let heard = told(&make(&stage), ask_with_tools("[[say no]]")).await;
        let error = heard.failed(ErrorCode::VersionIncompatible);
        assert!(error.detail().contains(check.as_str()), "{error}");
        assert!(error.remedy().len() > 20, "{error}");
        assert!(
            starts(&stage).is_empty() && stage.sent().is_empty(),
            "{check}"
        );
        // Whoever asks for nothing is served on the same CLI.
        certify(&stage, &[]);
        told(&make(&stage), ask_with_tools("[[say yes]]"))
            .await
            .done();
    }
}

#[tokio::test]
async fn of_an_unknown_cli_the_documented_ways_are_taken_with_one_notice() {
    for transport in TransportKind::ALL {
        let stage = emulator(UNKNOWN.0, None);
        let provider = provider(&stage, transport);
        let mut notices = 0;
        for text in ["one", "two"] {
            let mut request = history();
            request.tools = ask_with_tools("").tools;
            request.messages.push(Message::assistant(text));
            request
                .messages
                .push(Message::user(format!("{text} [[say done]]")));
            let heard = told(&provider, request).await;
            assert_eq!(heard.text(), "done", "{transport}: {heard:?}");
            notices += heard.count(|event| match event {
                Event::Notice(Notice::UncertifiedVersion { version, text }) => {
                    version == UNKNOWN.0 && text.contains("turnpass doctor --certify")
                }
                _ => false,
            });
        }
        assert_eq!(notices, 1, "{transport}");
        let (runs, sent) = (starts(&stage), stage.sent());
        match transport {
            TransportKind::Pool => {
                assert!(runs.iter().all(has_server));
                let texts = host_messages(&sent[0]);
                assert_eq!(texts.len(), 1, "one message: {texts:?}");
            }
            TransportKind::Replay => {
                assert!(runs.iter().all(has_server) && sent.iter().all(is_transcript));
            }
            TransportKind::Relay => assert_eq!(runs.len(), 2, "a process for each"),
        }
    }
}

#[tokio::test]
async fn what_is_asked_for_of_an_unknown_cli_is_obeyed() {
    let stage = emulator(UNKNOWN.0, None);
    let provider = pool(&stage, |options| {
        options.reseed = Some(Reseed::Native);
        options.tools = Some(ToolCarrier::InBand);
    });
    let mut request = history();
    request.tools = ask_with_tools("").tools;
    told(&provider, request.clone()).await.done();
    assert_eq!(host_messages(&stage.sent()[0]).len(), 5);
    assert!(!starts(&stage).iter().any(has_server));
    let stage = emulator(UNKNOWN.0, None);
    let provider = replay(&stage, |options| {
        options.history = Some(History::Native);
        options.tools = Some(Carrier::InBand);
    });
    told(&provider, request).await.done();
    assert!(!is_transcript(&stage.sent()[0]) && !starts(&stage).iter().any(has_server));
}

#[tokio::test]
async fn a_certificate_of_another_file_counts_for_nothing() {
    let stage = emulator(KNOWN.0, None);
    certify(&stage, &[Check::Isolation]);
    told(&provider(&stage, TransportKind::Pool), ask("[[say no]]"))
        .await
        .failed(ErrorCode::VersionIncompatible);
    // An update, also while a provider is used.
    let provider = provider(&stage, TransportKind::Pool);
    told(&provider, ask("[[say no]]"))
        .await
        .failed(ErrorCode::VersionIncompatible);
    stage.change(Script::emulator("2.1.333"));
    let heard = told(&provider, ask("[[say yes]]")).await;
    assert_eq!(heard.text(), "yes");
    let is_told = |event: &Event| matches!(event, Event::Notice(Notice::UncertifiedVersion { .. }));
    assert_eq!(heard.count(is_told), 1);
}
