//! Control requests and their answers.

use super::*;

impl Session {
    /// Whether a control request waits for its answer.
    pub(crate) fn is_owed_an_answer(&self) -> bool {
        self.asked.values().any(Option::is_none)
    }

    /// Asks a control request and waits for its answer; what is said meanwhile is taken note of and otherwise dropped, so
    /// this is only for times when no answer of the model is awaited.
    pub(crate) async fn control(&mut self, request: &ControlRequest<'_>) -> Result<Box<RawValue>> {
        let id = self.next_control()?;
        self.group
            .stdin()
            .write(control::control_request(&id, request).into_bytes())?;
        let answered = async {
            loop {
                if let Some(Some(outcome)) = self.asked.get(&id) {
                    let outcome = outcome.clone();
                    self.asked.remove(&id);
                    return outcome.map_err(refused);
                }
                self.next(None).await?;
            }
        };
        match tokio::time::timeout(CONTROL_TIMEOUT, answered).await {
            Ok(answer) => answer,
            Err(_) => Err(late("answer a control request", CONTROL_TIMEOUT)),
        }
    }

    /// Lets a process that was told nothing yet finish its start, so that whoever takes it need not wait for that.
    pub(crate) async fn warm_up(&mut self) -> Result<()> {
        self.control(&ControlRequest::GetSettings {})
            .await
            .map(drop)
    }

    pub(super) fn next_control(&mut self) -> Result<String> {
        if self.asked.len() >= MAX_PENDING {
            let what = format!("{MAX_PENDING} control requests wait for an answer already");
            return Err(Error::new(ErrorCode::ControlTimeout, what));
        }
        let id = self.ids.next_id();
        self.asked.insert(id.clone(), None);
        Ok(id)
    }

    pub(super) fn controlled(&mut self, id: &str, outcome: Result<Box<RawValue>, String>) {
        if self.closing.as_deref() == Some(id) {
            self.closing = None;
        }
        // An answer to nothing that we asked is dropped.
        if let Some(slot) = self.asked.get_mut(id) {
            *slot = Some(outcome);
        }
    }

    /// Waits until every control request is answered.
    pub(super) async fn settled(&mut self) -> Result<()> {
        let answered = async {
            while self.asked.values().any(Option::is_none) {
                self.next(None).await?;
            }
            self.settle_controls()
        };
        match tokio::time::timeout(CONTROL_TIMEOUT, answered).await {
            Ok(answered) => answered,
            Err(_) => Err(late("answer a control request", CONTROL_TIMEOUT)),
        }
    }

    /// Takes note of the answers to requests that nobody waits for one by one.
    ///
    /// # Errors
    ///
    /// `version_incompatible` when one was refused.
    pub(crate) fn settle_controls(&mut self) -> Result<()> {
        let answered: Vec<_> = self
            .asked
            .iter()
            .filter(|(_, outcome)| outcome.is_some())
            .map(|(id, _)| id.clone())
            .collect();
        for id in answered {
            if let Some(Some(Err(why))) = self.asked.remove(&id) {
                return Err(refused(why));
            }
        }
        Ok(())
    }
}
