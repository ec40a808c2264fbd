//! A refused sign-in, until the CLI has renewed it: the refusal is passed on to the CLI only when no other process starts or
//! renews, since what a sign-in is renewed with is good once (bug 43).

use std::pin::Pin;

use super::lane::{Admitted, Reply};
use crate::cli::starts::{Starts, Turn};
use crate::error::Result;

/// Where the renewal of one generation stands.
#[derive(Default)]
pub(crate) enum Renewal {
    /// Nothing was refused.
    #[default]
    None,
    /// The refusal waits for its turn.
    Waiting(Box<Waiting>),
    /// The CLI renews its sign-in; no other process does so meanwhile.
    Running {
        /// None when there was no turn within its limit: the CLI is told all the same, since it waits.
        _turn: Option<Turn>,
    },
}

/// A refusal that waits for its turn.
pub(crate) struct Waiting {
    admitted: Admitted,
    refusal: Reply,
    turn: Pin<Box<dyn Future<Output = Result<Turn>> + Send>>,
}

impl Renewal {
    /// A refusal that the CLI is to hear when its turn comes.
    pub(crate) fn wait(starts: &Starts, admitted: Admitted, refusal: Reply) -> Self {
        let starts = starts.clone();
        Self::Waiting(Box::new(Waiting {
            admitted,
            refusal,
            turn: Box::pin(async move { starts.alone().await }),
        }))
    }

    /// Waits for the turn; for ever when nothing waits for one.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn turn(&mut self) -> Option<Turn> {
        match self {
            Self::Waiting(waiting) => (&mut waiting.turn).await.ok(),
            _ => std::future::pending().await,
        }
    }

    /// Tells the CLI, which renews its sign-in now.
    pub(crate) fn begin(&mut self, turn: Option<Turn>) {
        let before = std::mem::replace(self, Self::Running { _turn: turn });
        if let Self::Waiting(waiting) = before {
            waiting.admitted.answer(waiting.refusal);
        }
    }
}
