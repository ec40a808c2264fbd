//! The builder of an agent, and the conversation that it owns.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use turnpass::conversation::{Message, ToolResult};
use turnpass::request::{
    BackendState, Effort, Limits, ModelId, Request, Sampling, StateRetirement, TransportKind,
    TransportSession,
};
use turnpass::{Error, ErrorCode, Provider, Result};

use crate::approval::Approvals;
use crate::compaction::Compaction;
use crate::directory::Directory;
use crate::event::{AgentEvent, Report};
use crate::history;
use crate::run::Run;
use crate::session::{CompactionMark, KeptSession};
use crate::tools::HostTool;

/// Generations in one run, unless the host says otherwise: longer than any task that a person waits for, and short
/// enough that an agent that goes in circles ends by itself.
pub const DEFAULT_ROUNDS: u32 = 50;

/// A model with tools, a working directory and a conversation.
#[derive(Debug)]
pub struct Agent {
    pub(crate) provider: Provider,
    pub(crate) request: Request,
    pub(crate) tools: Vec<Arc<dyn HostTool>>,
    pub(crate) approvals: Approvals,
    pub(crate) directory: Arc<Directory>,
    pub(crate) rounds: u32,
    pub(crate) kept: Option<KeptSession>,
    pub(crate) compaction: Compaction,
    /// What the model read for its last response, if that is still the conversation's size.
    pub(crate) last_prompt_tokens: Option<u64>,
    /// No summary is asked for before then.
    pub(crate) cools_until: Option<Instant>,
    /// Of the summary that was asked for last.
    pub(crate) retirement: Option<StateRetirement>,
}

impl Agent {
    /// Starts to describe an agent.
    pub fn builder(provider: Provider, model: impl Into<ModelId>) -> AgentBuilder {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut request = Request::new(model, Vec::new());
        // Two agents of one program must not share a conversation by accident.
        request.session = TransportSession(format!("agent-{}-{count}", std::process::id()));
        AgentBuilder {
            agent: Parts {
                provider,
                request,
                tools: Vec::new(),
                approvals: Approvals::read_only(),
                directory: PathBuf::from("."),
                rounds: DEFAULT_ROUNDS,
                kept: None,
                compaction: Compaction::default(),
                last_prompt_tokens: None,
            },
        }
    }

    /// Says something to the model, and runs rounds of generations and tools until one outcome is reached.
    ///
    /// With a kept session the conversation is on the disk whenever a generation or a tool begins. A disk that does not take
    /// it ends the run.
    ///
    /// Events come in order through the callback, which should return soon: the run waits for it. The last one is
    /// [`AgentEvent::Ended`] with the report that is also returned. Failures are outcomes; the conversation is one that
    /// can be gone on with after each of them.
    ///
    /// # Cancel safety
    ///
    /// Cancel through the token. Running tools are ended with all their processes, text that was seen stays in the
    /// conversation with a note, and the outcome is [`crate::Outcome::Cancelled`]. A summary that was being written leaves the
    /// conversation as it was. Dropping the future ends the same things, but the text of the running generation is lost.
    pub async fn run(
        &mut self,
        prompt: impl Into<String>,
        cancel: &CancellationToken,
        mut on_event: impl FnMut(AgentEvent) + Send,
    ) -> Report {
        // A run that was dropped in the middle of a summary.
        self.heed_retirement();
        let closed = history::close_open_calls(&mut self.request.messages);
        if closed > 0 {
            tracing::info!(calls = closed, "calls without a result were answered");
        }
        self.request.messages.push(Message::user(prompt));
        Run::new(self, cancel, &mut on_event).finish().await
    }

    /// The conversation so far; what a host stores to go on later with [`AgentBuilder::with_history`].
    pub fn history(&self) -> &[Message] {
        &self.request.messages
    }

    /// The backend state to store beside the conversation, if the transport keeps one.
    pub fn state(&self) -> Option<&BackendState> {
        self.request.state.as_ref()
    }

    /// Writes the conversation down, with results that are not in it yet.
    pub(crate) fn keep(&mut self, results: &[ToolResult]) -> Result<()> {
        let Some(kept) = &mut self.kept else {
            return Ok(());
        };
        let request = &mut self.request;
        let adds = !results.is_empty();
        if adds {
            request
                .messages
                .push(Message::results(results.iter().cloned()));
        }
        let saved = kept.save(
            &request.messages,
            request.state.as_ref(),
            &request.model,
            self.last_prompt_tokens,
        );
        if adds {
            request.messages.pop();
        }
        saved
    }

    /// Puts a shorter conversation in the place of this one, whose first `replaced` messages it sums up. In a kept session
    /// these are on the disk before it is done, and the shorter one when it is. The backend state was that of the longer one.
    pub(crate) fn replace(
        &mut self,
        shorter: Vec<Message>,
        replaced: usize,
        mark: CompactionMark,
    ) -> Result<()> {
        if let Some(kept) = &mut self.kept {
            kept.put_aside(&self.request.messages[..replaced], mark)?;
        }
        self.request.messages = shorter;
        self.request.state = None;
        // The next response says how large it is now.
        self.last_prompt_tokens = None;
        self.keep(&[])
    }

    /// Forgets the backend state, if the last summary says that it is of no more use.
    pub(crate) fn heed_retirement(&mut self) {
        let retirement = self.retirement.take();
        if retirement.is_some_and(|retirement| retirement.is_signaled()) {
            self.request.state = None;
        }
    }

    /// The working directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }
}

/// Describes an [`Agent`].
#[derive(Debug)]
pub struct AgentBuilder {
    agent: Parts,
}

#[derive(Debug)]
struct Parts {
    provider: Provider,
    request: Request,
    tools: Vec<Arc<dyn HostTool>>,
    approvals: Approvals,
    directory: PathBuf,
    rounds: u32,
    kept: Option<KeptSession>,
    compaction: Compaction,
    last_prompt_tokens: Option<u64>,
}

impl AgentBuilder {
    /// The tools; none by default. See [`crate::tools::all`].
    #[must_use]
    pub fn tools(mut self, tools: Vec<Arc<dyn HostTool>>) -> Self {
        self.agent.tools = tools;
        self
    }

    /// Who may do what; read-only by default.
    #[must_use]
    pub fn approvals(mut self, approvals: Approvals) -> Self {
        self.agent.approvals = approvals;
        self
    }

    /// The working directory; the program's own by default.
    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.agent.directory = directory.into();
        self
    }

    /// Generations in one run, at least one; [`DEFAULT_ROUNDS`] by default.
    #[must_use]
    pub fn rounds(mut self, rounds: u32) -> Self {
        self.agent.rounds = rounds;
        self
    }

    /// How hard the model should work.
    #[must_use]
    pub fn effort(mut self, effort: Option<Effort>) -> Self {
        self.agent.request.effort = effort;
        self
    }

    /// The system prompt, in place of the agent's own.
    #[must_use]
    pub fn system(mut self, system: impl Into<String>) -> Self {
        self.agent.request.system = system.into();
        self
    }

    /// Settings of each generation.
    #[must_use]
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.agent.request.sampling = sampling;
        self
    }

    /// Deadlines of each generation.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.agent.request.limits = limits;
        self
    }

    /// When and how the conversation is compacted; [`Compaction::default`] by default.
    #[must_use]
    pub fn compaction(mut self, compaction: Compaction) -> Self {
        self.agent.compaction = compaction;
        self
    }

    /// The transport; the provider's default otherwise.
    #[must_use]
    pub fn transport(mut self, transport: Option<TransportKind>) -> Self {
        self.agent.request.transport = transport;
        self
    }

    /// The transport session, to go on with a stored conversation under its own key.
    #[must_use]
    pub fn session(mut self, session: TransportSession) -> Self {
        self.agent.request.session = session;
        self
    }

    /// A stored conversation and its backend state, to go on with. Calls in it that have no result are answered with an
    /// error when the next run begins.
    #[must_use]
    pub fn with_history(mut self, messages: Vec<Message>, state: Option<BackendState>) -> Self {
        self.agent.request.messages = messages;
        self.agent.request.state = state;
        self
    }

    /// A kept session: its conversation is gone on with, and written down from here on, before each generation, after it,
    /// and after each step of tools. So a program that is killed loses at most the generation that was running, and no tool
    /// runs twice: a call whose result is not there when the next run begins is answered with an error that says so.
    #[must_use]
    pub fn kept(mut self, mut session: KeptSession) -> Self {
        let (messages, state) = session.take();
        self.agent.last_prompt_tokens = session.last_prompt_tokens();
        self = self
            .session(session.transport_session().clone())
            .with_history(messages, state);
        self.agent.kept = Some(session);
        self
    }

    /// The agent.
    ///
    /// # Errors
    ///
    /// `working_directory` when the directory cannot be opened, `request_invalid` for no rounds at all or a threshold of
    /// compaction that is none, `tool_invalid` for two tools of one name.
    pub fn build(self) -> Result<Agent> {
        let Parts {
            provider,
            mut request,
            tools,
            approvals,
            directory,
            rounds,
            kept,
            compaction,
            last_prompt_tokens,
        } = self.agent;
        if rounds == 0 {
            return Err(Error::new(
                ErrorCode::RequestInvalid,
                "rounds: a run needs at least one",
            ));
        }
        if let Some(wrong) = compaction.wrong() {
            return Err(Error::new(ErrorCode::RequestInvalid, wrong));
        }
        let directory = Arc::new(Directory::open(&directory)?);
        request.tools = tools.iter().map(|tool| tool.declaration()).collect();
        let mut names: Vec<_> = request.tools.iter().map(|tool| &tool.name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::new(
                ErrorCode::ToolInvalid,
                format!("two tools have the name {:?}", twice[0]),
            ));
        }
        if request.system.is_empty() {
            request.system = system_prompt(&directory);
        }
        Ok(Agent {
            provider,
            request,
            tools,
            approvals,
            directory,
            rounds,
            kept,
            compaction,
            last_prompt_tokens,
            cools_until: None,
            retirement: None,
        })
    }
}

fn system_prompt(directory: &Directory) -> String {
    format!(
        "You are an agent that works for the person at this computer, in the directory {}.\n\
         Use the tools to look at things before you say anything about them, and to do what was asked and no more.\n\
         Paths are relative to that directory. A tool that answers that it was denied was denied by the person: do not \
         try to get the same thing done another way.\n\
         When the work is done, say in a few words what you did and what you found.",
        directory.path().display()
    )
}
