use super::*;
use crate::conversation::{Message, ToolCall, ToolInput, ToolUseId};
use crate::event::{Done, Plan};
use crate::provider::{EventSender, Generation, Transport};
use crate::record::read;
use crate::{Provider, Request};
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Mutex;

/// Hands its senders to the test.
#[derive(Debug, Default)]
struct ByHand {
    senders: std::sync::Arc<Mutex<Vec<EventSender>>>,
}

impl Transport for ByHand {
    fn kind(&self) -> TransportKind {
        TransportKind::Replay
    }

    fn process_word(&self) -> Option<&'static str> {
        Some("by_hand")
    }

    fn generate(&self, _: Request) -> Generation {
        let (sender, generation) = Generation::channel();
        self.senders.lock().unwrap().push(sender);
        generation
    }

    fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async { Ok(()) })
    }
}

const MARKER: &str = "sEcReT-marker";

fn provider(folder: &Path) -> (Provider, std::sync::Arc<Mutex<Vec<EventSender>>>) {
    let transport = ByHand::default();
    let senders = std::sync::Arc::clone(&transport.senders);
    let sink = RecordSink::open(folder).unwrap();
    (Provider::new(transport).with_records(sink), senders)
}

fn request() -> Request {
    let mut request = Request::new(MARKER, vec![Message::user(MARKER)]);
    request.session = TransportSession(MARKER.to_owned());
    request.system = MARKER.to_owned();
    request.call = CallKind::Advisor;
    request
}

fn events() -> Vec<Event> {
    let text = || MARKER.to_owned();
    let how = Plan {
        kind: PlanKind::Resumed,
        reason: text(),
    };
    vec![
        Event::Notice(Notice::Retry {
            status: Some(529),
            reason: text(),
        }),
        Event::Started {
            model: "claude-m".into(),
            how,
        },
        Event::Thinking { text: text() },
        Event::Text { text: text() },
        Event::ToolCall(ToolCall {
            id: ToolUseId(text()),
            name: text(),
            input: ToolInput::from_streamed(&format!("{{\"{MARKER}\":\"{MARKER}\"}}")).unwrap(),
        }),
        Event::Notice(Notice::Other { text: text() }),
    ]
}

fn done() -> Event {
    let usage = Usage {
        input_tokens: Some(3),
        output_tokens: Some(5),
        cache_read_input_tokens: Some(100),
        ..Usage::default()
    };
    let stop = StopReason::StopSequence {
        sequence: Some(MARKER.to_owned()),
    };
    let mut done = Done::new(stop, Message::assistant(MARKER), usage, "claude-m".into());
    done.upstream_requests = 1;
    Event::Done(done)
}

fn records(folder: &Path) -> Vec<StreamRecord> {
    let mut records = Vec::new();
    assert_eq!(read(folder, |record| records.push(record)).unwrap(), 0);
    records
}

#[tokio::test]
async fn a_record_has_the_figures_and_nothing_that_was_said() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("records");
    let (provider, senders) = provider(&folder);
    let mut generation = provider.generate(request());
    let mut sender = senders.lock().unwrap().pop().unwrap();
    for event in events() {
        sender.send(event).await.unwrap();
    }
    sender.send(done()).await.unwrap();
    while generation.next().await.is_some() {}
    drop(generation);
    provider.shutdown().await.unwrap();

    let all = records(&folder);
    let [record] = &all[..] else {
        panic!("{all:?}")
    };
    assert_eq!(record.outcome, Outcome::Ok);
    assert_eq!(record.transport, TransportKind::Replay);
    assert_eq!(record.process.as_deref(), Some("by_hand"));
    assert_eq!(record.call_kind, CallKind::Advisor);
    assert_eq!(record.stop.as_deref(), Some("stop_sequence"));
    assert_eq!((record.chunks, record.attempts), (6, 2));
    assert_eq!(record.upstream_requests, Some(1));
    assert_eq!(record.plan, Some(PlanKind::Resumed));
    assert_eq!(record.model.as_deref(), Some("claude-m"));
    assert_eq!((record.tokens.input, record.tokens.cache_read), (3, 100));
    assert!(record.first_token_ms.is_some() && !record.partial_stream);
    assert_eq!(record.session.len(), SESSION_DIGEST_CHARS);

    let text = std::fs::read_to_string(folder.join("generations.jsonl")).unwrap();
    assert_eq!(text.lines().count(), 1);
    assert!(!text.contains(MARKER), "{text}");
    let counters = provider.records().unwrap().counters();
    assert_eq!((counters.of(Outcome::Ok), counters.written), (1, 1));
    assert_eq!(counters.tokens[&TransportKind::Replay].output, 5);
}

#[tokio::test]
async fn an_error_is_recorded_bounded_with_whether_output_was_seen() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("records");
    let (provider, senders) = provider(&folder);
    // Before the first event; in the middle; with a detail that is about the request.
    let long = format!("line\n{}", "é".repeat(400));
    for (code, detail, events) in [
        (ErrorCode::StartTimeout, "nothing came", vec![]),
        (ErrorCode::StreamInterrupted, long.as_str(), events()),
        (ErrorCode::RequestInvalid, MARKER, vec![]),
    ] {
        let mut generation = provider.generate(request());
        let mut sender = senders.lock().unwrap().pop().unwrap();
        for event in events {
            sender.send(event).await.unwrap();
        }
        sender.fail(Error::new(code, detail).with_status(500)).await;
        while generation.next().await.is_some() {}
    }
    // A transport that is not there at all.
    let mut elsewhere = request();
    elsewhere.transport = Some(TransportKind::Pool);
    provider
        .generate(elsewhere)
        .next()
        .await
        .unwrap()
        .unwrap_err();
    provider.shutdown().await.unwrap();

    let all = records(&folder);
    assert_eq!(all.len(), 4);
    let codes: Vec<_> = all
        .iter()
        .map(|record| record.error.as_ref().unwrap().code.as_str())
        .collect();
    let wanted = [
        "start_timeout",
        "stream_interrupted",
        "request_invalid",
        "transport_unavailable",
    ];
    assert_eq!(codes, wanted);
    assert_eq!((all[0].chunks, all[0].partial_stream), (0, false));
    assert_eq!((all[1].chunks, all[1].partial_stream), (6, true));
    let failure = all[1].error.as_ref().unwrap();
    assert!(failure.detail.len() <= ERROR_DETAIL_RECORDED_BYTES);
    assert!(failure.detail.starts_with("line é"));
    assert_eq!(failure.status, Some(500));
    assert_eq!(all[3].transport, TransportKind::Pool);
    let text = std::fs::read_to_string(folder.join("generations.jsonl")).unwrap();
    assert!(!text.contains(MARKER), "{text}");
}

#[tokio::test]
async fn a_dropped_generation_is_recorded_once_as_cancelled() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("records");
    let (provider, senders) = provider(&folder);
    let generation = provider.generate(request());
    drop(generation);
    let mut generation = provider.generate(request());
    let mut sender = senders.lock().unwrap().pop().unwrap();
    sender.send(Event::Text { text: "a".into() }).await.unwrap();
    generation.next().await.unwrap().unwrap();
    drop(generation);
    provider.shutdown().await.unwrap();
    let all = records(&folder);
    let seen: Vec<_> = all
        .iter()
        .map(|record| (record.outcome, record.partial_stream, record.chunks))
        .collect();
    let cancelled = Outcome::Cancelled;
    assert_eq!(seen, [(cancelled, false, 0), (cancelled, true, 1)]);
}
