//! A lane of a certification: one upstream, one made-up home and at most one process of the CLI at a time.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use turnpass::cli::environment::{Base, Environment, InheritedCredentials, Snapshot};
use turnpass::cli::launch::{self, Ground, MCP_SERVER, Trial};
use turnpass::cli::private_dir::{PrivateDir, roots};
use turnpass::request::Tool;
use turnpass::tools::Catalogue;
use turnpass_lab::rig::MadeUpHome;
use turnpass_lab::scenario::Reply;
use turnpass_lab::upstream::{Options, Recorded, Upstream};

use super::cli::{self, Cli, Turn, Why, late, not_checked, seen};
use super::conversation;

/// The model of every trial: an alias that every version resolves.
pub(super) const MODEL: &str = "sonnet";

/// The system prompt of every trial.
pub(super) const SYSTEM: &str = "You are tried in a laboratory.";

/// Length of the description of the second tool: above every limit at which a version was seen to cut one (2,048 and
/// 4,096).
pub(super) const DESCRIPTION_CHARS: usize = 6_000;

/// What is the same for both lanes.
#[derive(Debug)]
pub(super) struct Subject {
    /// The CLI.
    pub(super) program: PathBuf,
    /// Its version.
    pub(super) version: String,
    /// The environment to build a child's from: of this process, but with the laboratory's home and proxy.
    pub(super) snapshot: Snapshot,
    /// The program that serves tools over stdio.
    pub(super) tool_server: PathBuf,
    /// The tools.
    pub(super) catalogue: Catalogue,
}

impl Subject {
    pub(super) fn new(
        program: PathBuf,
        version: String,
        snapshot: Snapshot,
        tool_server: PathBuf,
    ) -> Result<Self, Why> {
        let long = "long ".repeat(DESCRIPTION_CHARS / 5);
        let tool = |name: &str, description: &str| Tool {
            name: name.to_owned(),
            description: description.to_owned(),
            input_schema: json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        };
        let tools = [tool("alpha", "The first tool."), tool("beta", &long)];
        Ok(Self {
            program,
            version,
            snapshot,
            tool_server,
            catalogue: Catalogue::build(&tools).map_err(not_checked)?,
        })
    }

    /// The published name of a tool.
    pub(super) fn name(&self, tool: &str) -> String {
        format!("mcp__{MCP_SERVER}__{tool}")
    }

    /// The published names of all tools, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let names = self.catalogue.expected_tool_names();
        let names: BTreeSet<String> = names.map(str::to_owned).collect();
        names.into_iter().collect()
    }
}

/// A conversation on disk that several checks begin with.
#[derive(Clone, Debug)]
pub(super) struct Parent {
    pub(super) session: String,
    /// The last record of its first turn.
    pub(super) first: String,
    /// The last record of its second turn.
    pub(super) second: String,
    /// The lines of its first turn and of both.
    pub(super) turns: [Vec<String>; 2],
}

/// The lane.
pub(super) struct Lane {
    pub(super) subject: Arc<Subject>,
    pub(super) upstream: Upstream,
    pub(super) home: MadeUpHome,
    folder: PathBuf,
    kept: Option<Cli>,
    parent: Option<Parent>,
    labels: u32,
}

impl Lane {
    pub(super) fn new(subject: Arc<Subject>, folder: PathBuf) -> Result<Self, Why> {
        let home = MadeUpHome::new(&folder.join("home")).map_err(not_checked)?;
        std::fs::create_dir(folder.join("work")).map_err(not_checked)?;
        Ok(Self {
            subject,
            upstream: Upstream::start(Options::default()).map_err(not_checked)?,
            home,
            folder,
            kept: None,
            parent: None,
            labels: 0,
        })
    }

    /// After a check that failed: nothing of it is to be seen by the next one.
    pub(super) fn renew(&mut self) -> Result<(), Why> {
        self.kept = None;
        self.parent = None;
        self.upstream = Upstream::start(Options::default()).map_err(not_checked)?;
        Ok(())
    }

    /// Ends what the lane still runs.
    pub(super) fn end(&mut self) {
        self.kept = None;
    }

    /// Where every process of this lane works.
    pub(super) fn work(&self) -> PathBuf {
        self.folder.join("work")
    }

    /// A new folder of this lane; all of them go with the certification.
    pub(super) fn folder(&mut self, name: &str) -> Result<PathBuf, Why> {
        self.labels += 1;
        let folder = self.folder.join(format!("{name}-{}", self.labels));
        std::fs::create_dir(&folder).map_err(not_checked)?;
        Ok(folder)
    }

    /// A trial with the defaults of this lane.
    pub(super) fn trial(&self) -> Trial {
        Trial {
            base_url: self.upstream.url(),
            model: MODEL.to_owned(),
            system: SYSTEM.to_owned(),
            calls_allowed: true,
            ..Trial::default()
        }
    }

    /// Starts a process as `change` makes it of the defaults. The kept one ends first: a lane has one process at a time.
    pub(super) async fn start(&mut self, change: impl FnOnce(&mut Trial)) -> Result<Cli, Why> {
        let home = self.home.path().to_owned();
        self.start_at_home(&home, change).await
    }

    /// The same with another home.
    pub(super) async fn start_at_home(
        &mut self,
        home: &Path,
        change: impl FnOnce(&mut Trial),
    ) -> Result<Cli, Why> {
        if let Some(kept) = self.kept.take() {
            kept.kill().await?;
        }
        let mut snapshot = self.subject.snapshot.clone();
        snapshot.set("HOME", home);
        let dir = PrivateDir::create(&roots(&snapshot)).map_err(not_checked)?;
        let tmp = dir.tmp();
        let base = Base {
            program: &self.subject.program,
            tmp: &tmp,
            time_zone: None,
            inherited: InheritedCredentials::Strip,
        };
        let environment = Environment::build(&snapshot, base).map_err(not_checked)?;
        let ground = Ground {
            program: self.subject.program.clone(),
            environment,
            dir: dir.path().to_owned(),
            cwd: self.work(),
            learned_plugins: BTreeSet::new(),
        };
        let mut trial = self.trial();
        change(&mut trial);
        let launch = launch::trial(&ground, &trial).map_err(not_checked)?;
        Cli::start(launch, dir)
    }

    /// `initialize` with our tools in-band.
    pub(super) fn initialize(&self) -> Value {
        let manifest: Value =
            serde_json::from_str(self.subject.catalogue.manifest().get()).unwrap_or_default();
        json!({
            "subtype": "initialize", "sdkMcpServers": [MCP_SERVER],
            "sdkMcpServerManifests": {MCP_SERVER: manifest}, "systemPromptSnapshot": false,
        })
    }

    /// A new process that has our tools.
    pub(super) async fn fresh(&mut self, change: impl FnOnce(&mut Trial)) -> Result<Cli, Why> {
        let mut cli = self.start(change).await?;
        cli.control(self.initialize()).await?;
        Ok(cli)
    }

    /// A process that has our tools and may have had good turns before.
    pub(super) async fn live(&mut self) -> Result<Cli, Why> {
        match self.kept.take() {
            Some(cli) => Ok(cli),
            None => self.fresh(|_| {}).await,
        }
    }

    /// Gives a live process back, in order and between two turns.
    pub(super) fn keep(&mut self, cli: Cli) {
        self.kept = Some(cli);
    }

    /// A text that no other turn of this lane has.
    pub(super) fn label(&mut self, word: &str) -> String {
        self.labels += 1;
        format!("{word} {}", self.labels)
    }

    /// What the upstream answers next, as directives.
    pub(super) fn reply(&self, directives: &str) {
        self.upstream.enqueue(Reply::directives(directives));
    }

    /// How many requests for a message there were so far.
    pub(super) fn asked(&self) -> usize {
        self.upstream.messages().len()
    }

    /// The bodies of the requests after the first `before`.
    pub(super) fn bodies_since(&self, before: usize) -> Vec<Value> {
        let bodies = self.requests_since(before).into_iter();
        bodies
            .map(|one| one.json.as_deref().cloned().unwrap_or_default())
            .collect()
    }

    /// The requests after the first `before`.
    pub(super) fn requests_since(&self, before: usize) -> Vec<Recorded> {
        self.upstream.messages().into_iter().skip(before).collect()
    }

    /// The body of the one request after the first `before`.
    pub(super) fn one_since(&self, before: usize) -> Result<Value, Why> {
        let mut bodies = self.bodies_since(before);
        match (bodies.len(), bodies.pop()) {
            (1, Some(body)) => Ok(body),
            (count, _) => seen(format!("{count} requests")),
        }
    }

    /// One turn: a text that the upstream answers as told.
    pub(super) async fn turn(
        &mut self,
        cli: &mut Cli,
        text: &str,
        directives: &str,
    ) -> Result<Turn, Why> {
        self.reply(directives);
        cli.send(&[cli::user(&uuid(), text)])?;
        cli.result().await
    }

    /// A good turn, and what it adds to a conversation.
    pub(super) async fn good_turn(&mut self, cli: &mut Cli) -> Result<(Turn, Vec<String>), Why> {
        let (text, reply) = (self.label("ask"), self.label("reply"));
        let turn = self.turn(cli, &text, &format!("[[say {reply}]]")).await?;
        let turn = turn.good()?;
        Ok((
            turn,
            vec![
                format!("user text {text}"),
                format!("assistant text {reply}"),
            ],
        ))
    }

    /// A good turn after which the conversation has to be `before` and this turn's text, and nothing else.
    pub(super) async fn goes_on(
        &mut self,
        cli: &mut Cli,
        mut before: Vec<String>,
    ) -> Result<Value, Why> {
        let asked = self.asked();
        let (_, turn) = self.good_turn(cli).await?;
        let body = self.one_since(asked)?;
        before.extend(turn.into_iter().take(1));
        conversation::ends_with(&body, &before).map_err(Why::Seen)?;
        Ok(body)
    }

    /// A turn that stops in a call of `tool`; gives the call and the id of its block.
    pub(super) async fn parked(
        &mut self,
        cli: &mut Cli,
        text: &str,
    ) -> Result<(Value, Vec<Value>), Why> {
        let name = self.subject.name("alpha");
        self.reply(&format!("[[call {name} {{\"n\":1}}]]"));
        cli.send(&[cli::user(&uuid(), text)])?;
        let mut records = cli.until("tools/call", cli::is_call).await?;
        let call = records.pop().unwrap_or_default();
        Ok((call, records))
    }

    /// A conversation of two turns on disk, whose process was killed the moment its last result was read.
    pub(super) async fn parent(&mut self) -> Result<Parent, Why> {
        if let Some(parent) = &self.parent {
            return Ok(parent.clone());
        }
        let mut cli = self.fresh(|trial| trial.persists = true).await?;
        let (first, one) = self.good_turn(&mut cli).await?;
        let (second, two) = self.good_turn(&mut cli).await?;
        cli.kill().await?;
        let session = second.result()["session_id"].as_str().unwrap_or_default();
        let parent = Parent {
            session: session.to_owned(),
            first: first.last_assistant()?,
            second: second.last_assistant()?,
            turns: [one.clone(), [one, two].concat()],
        };
        self.parent = Some(parent.clone());
        Ok(parent)
    }

    /// Waits until the client has left a request that was still being answered.
    pub(super) async fn closed(&self, number: u64) -> Result<(), Why> {
        let closed = self
            .upstream
            .wait_for_within("the end of a request", CLOSE_LIMIT, |one| {
                one.number == number && one.client_closed_at().is_some()
            })
            .await;
        match closed {
            Ok(_) => Ok(()),
            Err(_) => late(format!(
                "the request is still open after {} s",
                CLOSE_LIMIT.as_secs()
            )),
        }
    }
}

/// From an interrupt to the end of the request: 10 ms on 2.1.332.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A new uuid.
pub(super) fn uuid() -> String {
    uuid::Uuid::new_v4().to_string()
}
