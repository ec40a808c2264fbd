//! The boundary that hosts use: a provider, its transports, and a generation as a stream.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::error::{Error, ErrorCode, Result};
use crate::event::{Event, Notice};
use crate::login::Login;
use crate::process::SHUTDOWN_LIMIT;
use crate::record::{Facts, RecordSink, Watch};
use crate::request::{Request, TransportKind};

/// Events that wait between a transport and its host; the relay document's bound. A host that reads slowly slows
/// the upstream down, and nothing piles up.
pub const EVENT_CHANNEL: usize = 16;

/// One way to reach the service.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Which of the three it is.
    fn kind(&self) -> TransportKind;

    /// How it runs its processes, in a word for records; `None` where there is one way only.
    fn process_word(&self) -> Option<&'static str> {
        None
    }

    /// Starts one generation. Returns at once; everything that can go wrong comes through the stream.
    fn generate(&self, request: Request) -> Generation;

    /// Ends everything this transport owns: processes, listeners, files. Later requests fail with `closed`.
    fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;
}

/// The person's installed CLI as a model provider.
///
/// Cheap to clone. Dropping the last clone ends every process it owns; [`Provider::shutdown`] does the same and waits.
#[derive(Clone)]
pub struct Provider {
    transports: Arc<BTreeMap<TransportKind, Box<dyn Transport>>>,
    default: TransportKind,
    records: Option<RecordSink>,
    login: Option<Login>,
    closing: Arc<Closing>,
}

/// Ends what waits for a sign-in, at a shutdown and with the last clone of the provider.
#[derive(Default)]
struct Closing {
    token: CancellationToken,
    /// Requests that wait for a sign-in.
    paused: TaskTracker,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.token.cancel();
    }
}

impl Provider {
    /// A provider with one transport, which is also its default.
    pub fn new(transport: impl Transport + 'static) -> Self {
        let default = transport.kind();
        let transports = BTreeMap::from([(default, Box::new(transport) as Box<dyn Transport>)]);
        Self {
            transports: Arc::new(transports),
            default,
            records: None,
            login: None,
            closing: Arc::default(),
        }
    }

    /// A provider with several transports; a later one of the same kind takes the place of an earlier one.
    ///
    /// # Errors
    ///
    /// `transport_unavailable` when the default is not among them.
    pub fn with_transports(
        transports: Vec<Box<dyn Transport>>,
        default: TransportKind,
    ) -> Result<Self> {
        let transports: BTreeMap<_, _> = transports.into_iter().map(|t| (t.kind(), t)).collect();
        let provider = Self {
            transports: Arc::new(transports),
            default,
            records: None,
            login: None,
            closing: Arc::default(),
        };
        provider.transport(default)?;
        Ok(provider)
    }

    /// The same provider, which gives one record of each generation to `sink`, whatever the transport and however it ends.
    #[must_use]
    pub fn with_records(mut self, sink: RecordSink) -> Self {
        self.records = Some(sink);
        self
    }

    /// The same provider, which signs in again when a request fails for want of a sign-in before anything of its answer was
    /// given out: it pauses, asks the owner, and sends the request once more. Without this such a request fails, which is
    /// the default.
    #[must_use]
    pub fn with_login(mut self, login: Login) -> Self {
        self.login = Some(login);
        self
    }

    /// Where records of generations go, with their totals.
    pub fn records(&self) -> Option<&RecordSink> {
        self.records.as_ref()
    }

    /// The transports of this provider.
    pub fn kinds(&self) -> impl Iterator<Item = TransportKind> + '_ {
        self.transports.keys().copied()
    }

    /// The transport of requests that name none.
    pub fn default_kind(&self) -> TransportKind {
        self.default
    }

    /// Starts one generation.
    ///
    /// Returns at once. The stream ends after exactly one [`Event::Done`] or one error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the generation cancels it: the upstream connection closes, and what the generation alone owned is ended.
    pub fn generate(&self, request: Request) -> Generation {
        let kind = request.transport.unwrap_or(self.default);
        let transport = self.transport(kind);
        let watch = self.records.as_ref().map(|sink| {
            let process = transport.as_ref().ok().and_then(|t| t.process_word());
            Watch::new(sink.clone(), Facts::new(&request, kind, process))
        });
        let mut generation = match (transport, &self.login) {
            (Ok(transport), None) => transport.generate(request),
            (Ok(transport), Some(login)) => {
                self.with_second_try(login.clone(), (kind, transport), request)
            }
            (Err(error), _) => Generation::failed(error),
        };
        generation.watch = watch;
        generation
    }

    /// A generation that is started once more after a sign-in, if it fails for want of one.
    fn with_second_try(
        &self,
        login: Login,
        (kind, transport): (TransportKind, &dyn Transport),
        request: Request,
    ) -> Generation {
        let (mut events, generation) = Generation::channel();
        let seen = login.generation();
        let first = transport.generate(request.clone());
        // A request that waits keeps no provider alive.
        let transports = Arc::downgrade(&self.transports);
        let (token, paused) = (self.closing.token.clone(), self.closing.paused.clone());
        tokio::spawn(async move {
            let cancelled = events.cancelled().clone();
            let tried = async {
                let Some(error) = pass_on(first, &mut events, true).await else {
                    return;
                };
                let waiting = paused.track_future(login.recover(seen));
                let signed_in = tokio::select! {
                    signed_in = waiting => signed_in,
                    () = token.cancelled() => return events.fail(closed()).await,
                };
                match signed_in {
                    // Whatever comes of it is told as it is.
                    Ok(()) => {
                        let again = transports.upgrade().and_then(|transports| {
                            let transport = transports.get(&kind)?;
                            Some(transport.generate(request))
                        });
                        let again = again.unwrap_or_else(|| Generation::failed(closed()));
                        pass_on(again, &mut events, false).await;
                    }
                    Err(why) => {
                        let what = format!("{}; {}", error.detail(), why.detail());
                        events.fail(Error::new(ErrorCode::Auth, what)).await;
                    }
                }
            };
            tokio::select! {
                () = cancelled.cancelled() => {}
                () = tried => {}
            }
        });
        generation
    }

    /// Ends everything this provider owns and waits for it, within the bounds of its transports; records are written then.
    ///
    /// # Errors
    ///
    /// `process_cleanup` when something could not be ended in time; the rest is ended all the same.
    pub async fn shutdown(&self) -> Result<()> {
        self.closing.token.cancel();
        let signing_in = self.no_sign_in();
        let all = self
            .transports
            .values()
            .map(|transport| transport.shutdown());
        let (ended, signing_in) = tokio::join!(futures_util::future::join_all(all), signing_in);
        if let Some(records) = &self.records {
            // A record that the disk does not take is counted; it fails nothing.
            let _ = records.flush().await;
        }
        ended.into_iter().chain([signing_in]).collect()
    }

    /// Waits until no request of this provider waits for a sign-in, and a login that nobody else waits for is gone.
    async fn no_sign_in(&self) -> Result<()> {
        let Some(login) = &self.login else {
            return Ok(());
        };
        self.closing.paused.close();
        let ended = async {
            self.closing.paused.wait().await;
            login.settled().await;
        };
        let ended = tokio::time::timeout(SHUTDOWN_LIMIT, ended).await;
        ended.map_err(|_| {
            let seconds = SHUTDOWN_LIMIT.as_secs();
            let what = format!("the CLI's login did not end within {seconds} s");
            Error::new(ErrorCode::ProcessCleanup, what)
        })
    }

    fn transport(&self, kind: TransportKind) -> Result<&dyn Transport> {
        self.transports
            .get(&kind)
            .map(AsRef::as_ref)
            .ok_or_else(|| {
                let have: Vec<_> = self.kinds().map(TransportKind::as_str).collect();
                Error::new(
                    ErrorCode::TransportUnavailable,
                    format!("{kind} is not one of: {}", have.join(", ")),
                )
            })
    }
}

fn closed() -> Error {
    Error::new(ErrorCode::Closed, "the provider was shut down")
}

/// Gives the events of one generation on to another. When `pauses`, an `auth` error before anything of the answer is not
/// given on but returned.
async fn pass_on(mut from: Generation, to: &mut EventSender, pauses: bool) -> Option<Error> {
    let mut begun = false;
    while let Some(item) = from.next().await {
        match item {
            Ok(event) => {
                begun |= !matches!(event, Event::Notice(_));
                if to.send(event).await.is_err() {
                    return None;
                }
            }
            Err(error) if pauses && !begun && error.code() == ErrorCode::Auth => {
                return Some(error);
            }
            Err(error) => to.fail(error).await,
        }
    }
    None
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider")
            .field("transports", &self.transports)
            .field("default", &self.default)
            .field("records", &self.records.is_some())
            .finish()
    }
}

/// One running generation: a stream of events that ends after one [`Event::Done`] or one error.
///
/// Dropping it cancels the generation.
#[derive(Debug)]
pub struct Generation {
    events: mpsc::Receiver<Result<Event>>,
    /// The terminal item; it has a place of its own, so that its transport never waits for a host that does not read.
    last: oneshot::Receiver<Result<Event>>,
    ended: bool,
    watch: Option<Watch>,
    _cancel: Option<DropGuard>,
}

/// The transport's side of a [`Generation`].
///
/// The first terminal item closes it; whatever a transport sends after that goes nowhere.
#[derive(Debug)]
pub struct EventSender {
    events: Option<mpsc::Sender<Result<Event>>>,
    last: Option<oneshot::Sender<Result<Event>>>,
    cancelled: CancellationToken,
}

impl Generation {
    /// A connected pair. The token of the sender is cancelled when the generation is dropped.
    pub fn channel() -> (EventSender, Self) {
        let (sender, events) = mpsc::channel(EVENT_CHANNEL);
        let (end, last) = oneshot::channel();
        let cancelled = CancellationToken::new();
        let guard = cancelled.clone().drop_guard();
        (
            EventSender {
                events: Some(sender),
                last: Some(end),
                cancelled,
            },
            Self {
                events,
                last,
                ended: false,
                watch: None,
                _cancel: Some(guard),
            },
        )
    }

    /// A generation that failed before it began.
    pub fn failed(error: Error) -> Self {
        let (mut sender, mut generation) = Self::channel();
        // The receiver is at hand, so it is told.
        let _ = sender.end(Err(error));
        generation._cancel = None;
        generation
    }

    /// The next event; `None` after the terminal one.
    ///
    /// # Cancel safety
    ///
    /// Dropping the returned future loses nothing.
    pub async fn next(&mut self) -> Option<Result<Event>> {
        std::future::poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }

    fn admit(&mut self, item: Option<Result<Event>>) -> Option<Result<Event>> {
        let item = item.unwrap_or_else(|| {
            self.last.try_recv().unwrap_or_else(|_| {
                Err(Error::new(
                    ErrorCode::Internal,
                    "a transport dropped a generation without ending it",
                ))
            })
        });
        self.ended = matches!(item, Err(_) | Ok(Event::Done(_)));
        if let Some(watch) = &mut self.watch {
            watch.see(&item);
        }
        Some(item)
    }
}

impl Stream for Generation {
    type Item = Result<Event>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let item = std::task::ready!(self.events.poll_recv(cx));
        Poll::Ready(self.admit(item))
    }
}

/// The host is not listening any more: the generation was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the generation was dropped")]
pub struct Cancelled;

/// Why an event was not given to the host.
#[derive(Clone, Debug, PartialEq)]
pub enum TrySend {
    /// [`EVENT_CHANNEL`] events are unread; this is the event.
    Full(Box<Event>),
    /// The generation was dropped or has ended.
    Cancelled,
}

impl EventSender {
    /// Gives one event to the host; waits while [`EVENT_CHANNEL`] events are unread. [`Event::Done`] never waits.
    ///
    /// # Errors
    ///
    /// [`Cancelled`] when the host dropped the generation or it has already ended.
    pub async fn send(&mut self, event: Event) -> Result<(), Cancelled> {
        if matches!(event, Event::Done(_)) {
            return self.end(Ok(event));
        }
        match &self.events {
            Some(events) => events.send(Ok(event)).await.map_err(|_| Cancelled),
            None => Err(Cancelled),
        }
    }

    /// Gives one event to the host if there is room for it now.
    ///
    /// # Errors
    ///
    /// [`TrySend`]; the event comes back when there is no room.
    pub fn try_send(&mut self, event: Event) -> Result<(), TrySend> {
        if matches!(event, Event::Done(_)) {
            return self.end(Ok(event)).map_err(|_| TrySend::Cancelled);
        }
        let events = self.events.as_ref().ok_or(TrySend::Cancelled)?;
        match events.try_send(Ok(event)) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Full(Ok(event))) => Err(TrySend::Full(Box::new(event))),
            Err(_) => Err(TrySend::Cancelled),
        }
    }

    /// Waits until [`EventSender::try_send`] has room, or nobody listens any more.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn ready(&self) {
        if let Some(events) = &self.events {
            // The place is given back at once; this sender is the only one, so it stays free. An error means that
            // nobody listens, which the next send says.
            let _ = events.reserve().await;
        }
    }

    /// A way to tell the host something beside the generation.
    pub fn notifier(&self) -> Option<Notifier> {
        let events = self.events.as_ref()?.downgrade();
        Some(Notifier { events })
    }

    /// Ends the generation with an error. Never waits for the host: it reads the error after what it has not read yet.
    pub async fn fail(&mut self, error: Error) {
        // A host that is gone needs no error.
        let _ = self.end(Err(error));
    }

    /// The terminal item stands beside the channel, and is read when that has ended.
    fn end(&mut self, item: Result<Event>) -> Result<(), Cancelled> {
        let told = match self.last.take() {
            Some(last) => last.send(item).map_err(|_| Cancelled),
            None => Err(Cancelled),
        };
        self.events = None;
        told
    }

    /// Cancelled when the host drops the generation.
    pub fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }
}

/// Tells the host something beside a generation that goes on. It keeps no generation open.
#[derive(Clone, Debug)]
pub struct Notifier {
    events: mpsc::WeakSender<Result<Event>>,
}

impl Notifier {
    /// Tells the host, if the generation has not ended and has room. False when it was not told.
    pub fn notify(&self, notice: Notice) -> bool {
        let events = self.events.upgrade();
        events.is_some_and(|events| events.try_send(Ok(Event::Notice(notice))).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::Message;
    use crate::event::{Done, StopReason, Usage};

    fn done() -> Event {
        Event::Done(Done::new(
            StopReason::EndTurn,
            Message::assistant("x"),
            Usage::default(),
            "m".into(),
        ))
    }

    #[tokio::test]
    async fn ends_after_one_terminal_event() {
        let (mut sender, mut generation) = Generation::channel();
        sender.send(Event::Text { text: "a".into() }).await.unwrap();
        sender.send(done()).await.unwrap();
        assert_eq!(sender.send(done()).await, Err(Cancelled));
        assert!(matches!(
            generation.next().await,
            Some(Ok(Event::Text { .. }))
        ));
        assert!(matches!(generation.next().await, Some(Ok(Event::Done(_)))));
        assert!(generation.next().await.is_none());
    }

    #[tokio::test]
    async fn a_host_that_does_not_read_is_waited_for() {
        let (mut sender, mut generation) = Generation::channel();
        let text = || Event::Text { text: "a".into() };
        for _ in 0..EVENT_CHANNEL {
            sender.try_send(text()).unwrap();
        }
        assert_eq!(
            sender.try_send(text()),
            Err(TrySend::Full(Box::new(text())))
        );
        assert!(generation.next().await.is_some());
        sender.ready().await;
        sender.try_send(text()).unwrap();
        drop(generation);
        sender.ready().await;
        assert_eq!(sender.try_send(text()), Err(TrySend::Cancelled));
    }

    #[tokio::test]
    async fn an_end_waits_for_no_host_and_comes_after_what_is_unread() {
        let text = || Event::Text { text: "a".into() };
        for fails in [false, true] {
            let (mut sender, mut generation) = Generation::channel();
            for _ in 0..EVENT_CHANNEL {
                sender.try_send(text()).unwrap();
            }
            match fails {
                true => sender.fail(Error::new(ErrorCode::Closed, "")).await,
                false => sender.send(done()).await.unwrap(),
            }
            assert_eq!(sender.send(text()).await, Err(Cancelled));
            for _ in 0..EVENT_CHANNEL {
                assert_eq!(generation.next().await.unwrap().unwrap(), text());
            }
            let last = generation.next().await.unwrap();
            assert_eq!(last.is_err(), fails);
            assert!(generation.next().await.is_none());
        }
    }

    #[derive(Debug)]
    struct Relay;

    impl Transport for Relay {
        fn kind(&self) -> TransportKind {
            TransportKind::Relay
        }

        fn generate(&self, _: Request) -> Generation {
            Generation::failed(Error::new(ErrorCode::Closed, "the relay was asked"))
        }

        fn shutdown(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
            Box::pin(std::future::ready(Ok(())))
        }
    }

    #[tokio::test]
    async fn a_request_for_a_transport_that_is_not_there_is_refused_with_those_that_are() {
        let provider = Provider::new(Relay);
        for (wanted, code) in [
            (None, ErrorCode::Closed),
            (Some(TransportKind::Relay), ErrorCode::Closed),
            (Some(TransportKind::Replay), ErrorCode::TransportUnavailable),
        ] {
            let mut request = Request::new("sonnet", vec![Message::user("x")]);
            request.transport = wanted;
            let error = provider
                .generate(request)
                .next()
                .await
                .unwrap()
                .unwrap_err();
            assert_eq!(error.code(), code);
            assert!(error.detail().contains("relay"), "{error}");
        }
    }

    #[tokio::test]
    async fn dropping_it_cancels() {
        let (mut sender, generation) = Generation::channel();
        drop(generation);
        sender.cancelled().cancelled().await;
        assert_eq!(sender.send(done()).await, Err(Cancelled));
    }

    #[tokio::test]
    async fn a_transport_that_forgets_to_end_is_an_error() {
        let (sender, mut generation) = Generation::channel();
        drop(sender);
        let error = generation.next().await.unwrap().unwrap_err();
        assert_eq!(error.code(), ErrorCode::Internal);
        assert!(generation.next().await.is_none());
    }
}
