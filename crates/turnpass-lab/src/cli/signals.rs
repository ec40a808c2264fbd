//! The signals that a run catches, notes, and ends by or ignores.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::recording::Recorder;

/// What a caught signal means.
pub(crate) enum SignalCode {
    /// SIGINT: the real CLI ends its turn and exits with 0.
    Interrupt,
    /// End with this code: 143 for SIGTERM, 129 for SIGHUP.
    End(u8),
    /// The script said that it is ignored.
    Ignored,
}

/// The signals that are caught and noted.
pub(crate) struct Signals {
    recorder: Arc<Recorder>,
    caught: Vec<(&'static str, Signal)>,
    ignored: Arc<Mutex<Vec<String>>>,
}

impl Signals {
    pub(crate) fn install(recorder: Arc<Recorder>) -> Signals {
        let kinds = [
            ("SIGTERM", SignalKind::terminate()),
            ("SIGINT", SignalKind::interrupt()),
            ("SIGHUP", SignalKind::hangup()),
            ("SIGUSR1", SignalKind::user_defined1()),
        ];
        // A signal that cannot be caught keeps its default action, which also ends the run.
        let caught = kinds
            .into_iter()
            .filter_map(|(name, kind)| Some((name, signal(kind).ok()?)))
            .collect();
        Signals {
            recorder,
            caught,
            ignored: IGNORED.with(Arc::clone),
        }
    }

    /// The next signal. Cancel safe.
    pub(crate) async fn next(&mut self) -> SignalCode {
        let name = std::future::poll_fn(|context| {
            for (name, signal) in &mut self.caught {
                if let std::task::Poll::Ready(Some(())) = signal.poll_recv(context) {
                    return std::task::Poll::Ready(*name);
                }
            }
            std::task::Poll::Pending
        })
        .await;
        let ignored = self
            .ignored
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .any(|one| one == name);
        self.recorder
            .note("signal", json!({"name": name, "ignored": ignored}));
        match name {
            _ if ignored => SignalCode::Ignored,
            "SIGINT" => SignalCode::Interrupt,
            "SIGHUP" => SignalCode::End(129),
            "SIGTERM" => SignalCode::End(143),
            _ => SignalCode::Ignored,
        }
    }

    /// Returns when a signal ends the run, with the code.
    pub(crate) async fn end(&mut self) -> u8 {
        loop {
            match self.next().await {
                SignalCode::Interrupt => return 0,
                SignalCode::End(code) => return code,
                SignalCode::Ignored => {}
            }
        }
    }
}

thread_local! {
    /// Shared between the player, which adds names, and [`Signals`]; the run has one thread.
    static IGNORED: Arc<Mutex<Vec<String>>> = Arc::default();
}

/// From here on these signals are noted and otherwise ignored.
pub(crate) fn ignore(names: &[String]) {
    IGNORED.with(|ignored| {
        let mut ignored = ignored.lock().unwrap_or_else(PoisonError::into_inner);
        ignored.extend(names.iter().cloned());
    });
}
