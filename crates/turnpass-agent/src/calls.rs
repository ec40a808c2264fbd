//! The tool calls of one answer: decided about in order, run in steps, answered in order.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use turnpass::Error;
use turnpass::conversation::{Message, ToolCall, ToolResult};
use turnpass::event::Rejection;

use crate::approval::{Answer, Ask, Verdict};
use crate::directory::Target;
use crate::event::AgentEvent;
use crate::output::bounded;
use crate::run::{Partial, Run, milliseconds};
use crate::schedule;
use crate::tools::{Effect, Failure, HostTool, Scene};

/// Calls that run at the same time; more would only wait for the same disk.
const READS_AT_ONCE: usize = 8;

/// For tools to end after a cancel, before they are dropped; longer than the shell's own way to a sure end.
const CANCEL_WAIT: Duration = Duration::from_secs(10);

/// What the model is told about a call that a cancel came before.
const NOT_RUN: &str = "[turnpass] not run: the person cancelled";

/// What the model is told about a call that had to be dropped after a cancel.
const CUT_OFF: &str = "[turnpass] ended: the person cancelled; what it did is not known";

/// What the model is told about a call after whose predecessors the conversation could not be kept.
const NOT_KEPT: &str = "not run: the conversation cannot be written down";

/// A call on its way, with what was decided about it.
enum Prepared {
    /// It runs, on these targets.
    Ready(Arc<dyn HostTool>, Vec<Target>),
    /// It is answered without being run.
    Refused(String),
}

impl Run<'_> {
    /// Answers calls that are not run, so that the conversation can be gone on with.
    pub(crate) fn refuse_all(&mut self, calls: &[ToolCall], why: &str) {
        let results: Vec<_> = calls
            .iter()
            .map(|call| {
                self.announce(call);
                self.refuse(call, why.to_owned())
            })
            .collect();
        self.answer(results);
    }

    fn refuse(&mut self, call: &ToolCall, why: String) -> ToolResult {
        self.report.refused_calls += 1;
        (self.emit)(AgentEvent::ToolEnded {
            id: call.id.clone(),
            name: call.name.clone(),
            output: why.clone(),
            is_error: true,
            refused: true,
            cut: false,
            elapsed_ms: 0,
        });
        ToolResult::error(call.id.clone(), why)
    }

    fn answer(&mut self, results: Vec<ToolResult>) {
        if !results.is_empty() {
            self.agent.request.messages.push(Message::results(results));
        }
    }

    /// Runs the calls of one answer, and gives the results to the conversation in the order of the calls.
    ///
    /// # Errors
    ///
    /// When the results cannot be kept. They stand in the conversation all the same, and further calls are refused.
    pub(crate) async fn run_calls(
        &mut self,
        calls: &[ToolCall],
        partial: &Partial,
    ) -> Result<(), Error> {
        let effects: Vec<Effect> = calls
            .iter()
            .map(|call| self.tool(&call.name).map_or(Effect::Read, |t| t.effect()))
            .collect();
        let mut results = Vec::with_capacity(calls.len());
        let mut kept = Ok(());
        for step in schedule::steps(&effects) {
            let calls = &calls[step];
            match &kept {
                Ok(()) => results.extend(self.run_step(calls, partial).await),
                Err(_) => results.extend(calls.iter().map(|call| {
                    self.announce(call);
                    self.refuse(call, NOT_KEPT.to_owned())
                })),
            }
            // What a step did is on the disk before the next one begins.
            kept = kept.and_then(|()| self.agent.keep(&results));
        }
        self.answer(results);
        kept
    }

    /// Decides about the calls of one step, one after the other, and runs them at the same time.
    async fn run_step(&mut self, calls: &[ToolCall], partial: &Partial) -> Vec<ToolResult> {
        let mut results: Vec<Option<ToolResult>> = Vec::new();
        let mut waiting = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            self.announce(call);
            match self.prepare(call, partial).await {
                Prepared::Refused(why) => results.push(Some(self.refuse(call, why))),
                Prepared::Ready(tool, targets) => {
                    results.push(None);
                    waiting.push((index, tool, targets));
                }
            }
        }
        let mut waiting = waiting.into_iter();
        let mut running = FuturesUnordered::new();
        let mut drop_at = None;
        loop {
            while running.len() < READS_AT_ONCE
                && !self.cancel.is_cancelled()
                && let Some((index, tool, targets)) = waiting.next()
            {
                running.push(self.start(index, &calls[index], tool, targets));
            }
            tokio::select! {
                biased;
                ended = running.next() => match ended {
                    Some((index, result, took)) => {
                        results[index] = Some(self.ended(&calls[index], result, took));
                    }
                    None => break,
                },
                () = self.cancel.cancelled(), if drop_at.is_none() => {
                    drop_at = Some(tokio::time::Instant::now() + CANCEL_WAIT);
                }
                () = sleep_until(drop_at) => break,
            }
        }
        // A tool that did not end in time is dropped, which ends it the hard way.
        drop(running);
        let never_began: Vec<usize> = waiting.map(|(index, ..)| index).collect();
        let mut all = Vec::with_capacity(calls.len());
        for (index, (result, call)) in results.into_iter().zip(calls).enumerate() {
            all.push(match result {
                Some(result) => result,
                None if never_began.contains(&index) => self.refuse(call, NOT_RUN.to_owned()),
                None => self.ended(call, Err(Failure::new(CUT_OFF)), CANCEL_WAIT),
            });
        }
        all
    }

    fn tool(&self, name: &str) -> Option<Arc<dyn HostTool>> {
        self.agent
            .request
            .tools
            .iter()
            .position(|tool| tool.name == name)
            .map(|index| self.agent.tools[index].clone())
    }

    fn announce(&mut self, call: &ToolCall) {
        let summary = self
            .tool(&call.name)
            .map_or_else(String::new, |tool| tool.summary(&call.input));
        (self.emit)(AgentEvent::ToolStarted {
            id: call.id.clone(),
            name: call.name.clone(),
            summary,
            input: call.input.clone(),
        });
    }

    async fn prepare(&mut self, call: &ToolCall, partial: &Partial) -> Prepared {
        match self.decide(call, partial).await {
            Ok((tool, targets)) => Prepared::Ready(tool, targets),
            Err(failure) => Prepared::Refused(failure.to_string()),
        }
    }

    async fn decide(
        &mut self,
        call: &ToolCall,
        partial: &Partial,
    ) -> Result<(Arc<dyn HostTool>, Vec<Target>), Failure> {
        if self.cancel.is_cancelled() {
            return Err(Failure::new(NOT_RUN));
        }
        if let Some(reason) = partial.rejected.get(&call.id) {
            return Err(rejected(call, reason));
        }
        let tool = self
            .tool(&call.name)
            .ok_or_else(|| rejected(call, &Rejection::UnknownTool))?;
        if !partial.released.contains(&call.id) {
            return Err(Failure::new("not run: the call was not released as whole"));
        }
        let targets = tool
            .paths(&call.input)?
            .iter()
            .map(|path| self.agent.directory.resolve(path))
            .collect::<Result<Vec<_>, _>>()?;
        self.consent(call, &tool, &targets).await?;
        Ok((tool, targets))
    }

    async fn consent(
        &mut self,
        call: &ToolCall,
        tool: &Arc<dyn HostTool>,
        targets: &[Target],
    ) -> Result<(), Failure> {
        let outside: Vec<&Path> = targets
            .iter()
            .filter(|target| !target.is_inside())
            .map(Target::place)
            .collect();
        let approvals = &mut self.agent.approvals;
        match approvals.verdict(&call.name, tool.effect(), &outside) {
            Verdict::Allow => return Ok(()),
            Verdict::Deny(why) => return Err(Failure::new(format!("denied: {why}"))),
            Verdict::Ask => {}
        }
        let Some(approver) = approvals.approver() else {
            return Err(Failure::new("denied: there is nobody to ask"));
        };
        let ask = Ask {
            tool: call.name.clone(),
            summary: tool.summary(&call.input),
            detail: tool.detail(&call.input),
            outside: outside.iter().map(|path| path.to_path_buf()).collect(),
        };
        let answer = tokio::select! {
            biased;
            () = self.cancel.cancelled() => Answer::No,
            answer = approver.ask(&ask) => answer,
        };
        match answer {
            Answer::Once => Ok(()),
            Answer::Always => {
                approvals.remember(&call.name, &outside);
                Ok(())
            }
            Answer::No => Err(Failure::new("denied: the person does not want this call")),
        }
    }

    fn start(
        &self,
        index: usize,
        call: &ToolCall,
        tool: Arc<dyn HostTool>,
        targets: Vec<Target>,
    ) -> impl Future<Output = (usize, Result<String, Failure>, Duration)> + use<> {
        let scene = Scene {
            directory: self.agent.directory.clone(),
            targets,
            cancel: self.cancel.child_token(),
        };
        let input = call.input.clone();
        let started = Instant::now();
        async move {
            let result = tool.call(input, scene).await;
            (index, result, started.elapsed())
        }
    }

    fn ended(
        &mut self,
        call: &ToolCall,
        result: Result<String, Failure>,
        took: Duration,
    ) -> ToolResult {
        self.report.tool_calls += 1;
        let is_error = result.is_err();
        let text = result.unwrap_or_else(|failure| failure.to_string());
        let (output, cut) = bounded(text);
        (self.emit)(AgentEvent::ToolEnded {
            id: call.id.clone(),
            name: call.name.clone(),
            output: output.clone(),
            is_error,
            refused: false,
            cut,
            elapsed_ms: milliseconds(took),
        });
        ToolResult {
            is_error,
            ..ToolResult::text(call.id.clone(), output)
        }
    }
}

fn rejected(call: &ToolCall, reason: &Rejection) -> Failure {
    Failure::new(match reason {
        Rejection::ArgumentDecode { .. } => {
            "not run: the input is not one JSON object; send the call again".to_owned()
        }
        Rejection::UnknownTool => format!("not run: there is no tool named {:?}", call.name),
    })
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
