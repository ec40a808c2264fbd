//! A CLI process that is started to be asked for use. It costs nothing: no message is sent.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::Mutex;

use super::gate::{CONTROL_LIMIT, Gate, SourceFault, UsageSource};
use super::shared::Ask;
use crate::cli::inquiry::{AFTER_ANSWER, Inquiry, NoAnswer};
use crate::cli::installed::Installed;
use crate::error::Result;
use crate::wire::control::ControlRequest;

/// Starts processes that are asked for use.
#[derive(Clone, Debug)]
pub struct Probe {
    installed: Arc<Installed>,
}

/// A process that can be asked for use. Dropping it kills it.
pub struct ProbeProcess(Mutex<Inquiry>);

impl fmt::Debug for ProbeProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeProcess").finish_non_exhaustive()
    }
}

impl Probe {
    /// A probe of the installed CLI.
    pub fn new(installed: Arc<Installed>) -> Self {
        Self { installed }
    }

    /// Starts one process.
    ///
    /// # Errors
    ///
    /// Those of [`Installed::inquire`].
    pub async fn start(&self) -> Result<ProbeProcess> {
        Ok(ProbeProcess(Mutex::new(self.installed.inquire().await?)))
    }

    /// Starts a process, asks it once and ends it. At the asker's limit the future is dropped, and the process with it.
    pub fn once(&self) -> Ask<Result<String, SourceFault>> {
        let probe = self.clone();
        Box::new(move || {
            let probe = probe.clone();
            Box::pin(async move {
                let process = probe.start().await.map_err(SourceFault::Gone)?;
                let answer = process.get_usage().await;
                process.end().await;
                answer
            })
        })
    }

    /// A gate whose second opinion is such a process, and whose sign-in check believes nothing earlier.
    pub fn gate(&self) -> Gate {
        Gate::new(self.once(), self.installed.fresh_sign_in())
    }
}

impl ProbeProcess {
    /// Ends the process in order and waits for it.
    pub async fn end(self) {
        if let Err(error) = self.0.into_inner().end(AFTER_ANSWER).await {
            tracing::warn!(code = %error.code(), "a process that was asked for use did not end");
        }
    }
}

impl UsageSource for ProbeProcess {
    fn get_usage(&self) -> BoxFuture<'_, Result<String, SourceFault>> {
        Box::pin(async {
            // One question at a time; the caller bounds the wait.
            let mut inquiry = self.0.lock().await;
            let request = ControlRequest::GetUsage {
                // A scan of a week of transcripts is not wanted.
                skip_behaviors: true,
            };
            match inquiry.ask(&request, CONTROL_LIMIT).await {
                Ok(payload) => Ok(payload),
                Err(NoAnswer::Refused(_)) => Err(SourceFault::Refused),
                Err(NoAnswer::Gone(error)) => Err(SourceFault::Gone(error)),
            }
        })
    }
}
