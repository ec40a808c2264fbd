//! What is left of a generation after its end.

use std::time::Duration;

use super::admission::Stage;
use super::lane::Lane;
use super::upstream::AnswerBody;

/// How long the connection to the service is read on after the answer, so that it can be used again.
const LINGER: Duration = Duration::from_secs(1);

/// What is left of a generation after its end.
pub(crate) struct Remains {
    pub(crate) body: Option<AnswerBody>,
    /// Something went to the service.
    pub(crate) sent: bool,
    /// The CLI has ended its turn.
    pub(crate) native_is_over: bool,
    /// ... and well.
    pub(crate) native_is_good: bool,
    /// The isolation of the process was seen to hold.
    pub(crate) isolated: bool,
    /// The process has shown that it cannot be trusted with another generation.
    pub(crate) unfit: bool,
}

impl Remains {
    /// Reads a finished answer's connection to its end, for a moment, so that it can be used again.
    pub(crate) fn linger(&mut self) -> impl Future<Output = ()> + Send + use<> {
        let body = self.body.take();
        async move {
            if let Some(mut body) = body {
                let rest = async { while let Some(Ok(_)) = body.chunk().await {} };
                let _ = tokio::time::timeout(LINGER, rest).await;
            }
        }
    }

    /// Closes the connection to the service at once.
    pub(crate) fn hang_up(&mut self) {
        self.body = None;
    }
}

/// Whether a lane's process may serve another generation.
pub(crate) fn is_reusable(lane: &Lane) -> bool {
    matches!(lane.admission().stage(), Stage::Spent | Stage::Idle)
}
