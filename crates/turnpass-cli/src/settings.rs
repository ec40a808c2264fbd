//! The settings: a flag, else an environment variable, else the file, else the default.

mod environment;

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use turnpass::limits::Policy;
use turnpass::limits::budget::{Allowance, Budgets};
use turnpass::relay::LoopbackUrl;
use turnpass::replay::History;
use turnpass::request::{Effort, Limits, TransportKind};
use turnpass_agent::Compaction;
use turnpass_agent::agent::DEFAULT_ROUNDS;
use turnpass_agent::compaction::{COMPACTIONS, KEEP_TOKENS};

use crate::config_file;
use crate::exit::Fault;
use crate::prices::Prices;
pub(crate) use crate::words::{CarrierWord, Process, ReseedWord, ThresholdWord, ToolWord};

use environment::from_environment;

/// The model, unless a setting says otherwise: the alias of the service's everyday model.
const DEFAULT_MODEL: &str = "sonnet";

/// Longest deadline of a generation that can be set, in seconds: a day. A larger number is a slip, such as milliseconds.
const LONGEST_TIMEOUT_S: u32 = 24 * 60 * 60;

/// Each key with its environment variable, in the order in which they are shown.
pub(crate) const KEYS: [(&str, &str); 29] = [
    ("transport", "TURNPASS_TRANSPORT"),
    ("process", "TURNPASS_PROCESS"),
    ("reseed", "TURNPASS_RESEED"),
    ("tool_carrier", "TURNPASS_TOOL_CARRIER"),
    ("memory_mb", "TURNPASS_MEMORY_MB"),
    ("model", "TURNPASS_MODEL"),
    ("effort", "TURNPASS_EFFORT"),
    ("allow", "TURNPASS_ALLOW"),
    ("deny", "TURNPASS_DENY"),
    ("max_rounds", "TURNPASS_MAX_ROUNDS"),
    ("claude_path", "TURNPASS_CLAUDE_PATH"),
    ("lab_upstream", "TURNPASS_LAB_UPSTREAM"),
    ("lab_home", "TURNPASS_LAB_HOME"),
    ("usage_gate", "TURNPASS_USAGE_GATE"),
    ("max_window_percent", "TURNPASS_MAX_WINDOW_PERCENT"),
    (
        "max_requests_per_session",
        "TURNPASS_MAX_REQUESTS_PER_SESSION",
    ),
    ("max_tokens_per_session", "TURNPASS_MAX_TOKENS_PER_SESSION"),
    ("max_requests_per_day", "TURNPASS_MAX_REQUESTS_PER_DAY"),
    ("max_tokens_per_day", "TURNPASS_MAX_TOKENS_PER_DAY"),
    ("record", "TURNPASS_RECORD"),
    ("keep_records", "TURNPASS_KEEP_RECORDS"),
    ("history", "TURNPASS_HISTORY"),
    ("start_timeout_s", "TURNPASS_START_TIMEOUT_S"),
    ("idle_timeout_s", "TURNPASS_IDLE_TIMEOUT_S"),
    ("total_timeout_s", "TURNPASS_TOTAL_TIMEOUT_S"),
    ("compaction", "TURNPASS_COMPACTION"),
    ("compaction_threshold", "TURNPASS_COMPACTION_THRESHOLD"),
    ("compaction_keep_tokens", "TURNPASS_COMPACTION_KEEP_TOKENS"),
    ("max_compactions", "TURNPASS_MAX_COMPACTIONS"),
];

/// One layer of settings: what the flags, the environment or the file say.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Values {
    /// How requests reach the service: pool, replay or relay [env: TURNPASS_TRANSPORT]
    #[arg(long, value_name = "TRANSPORT")]
    pub(crate) transport: Option<TransportKind>,
    /// Whether the relay keeps its process: warm or per-request; unset, as the CLI was certified [env: TURNPASS_PROCESS]
    #[arg(long, value_name = "PROCESS")]
    pub(crate) process: Option<Process>,
    /// How the pool tells a process what was said before: native or transcript; unset, as certified [env: TURNPASS_RESEED]
    #[arg(long, value_name = "WAY")]
    pub(crate) reseed: Option<ReseedWord>,
    /// How the pool serves tools to the CLI: in-band or http; unset, as the CLI was certified [env: TURNPASS_TOOL_CARRIER]
    #[arg(long, value_name = "CARRIER")]
    pub(crate) tool_carrier: Option<CarrierWord>,
    /// Memory for kept processes, in MiB [env: TURNPASS_MEMORY_MB]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) memory_mb: Option<u32>,
    /// The model, as an alias or a full id [env: TURNPASS_MODEL]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// How hard the model works: none, low, medium, high, xhigh or max [env: TURNPASS_EFFORT]
    #[arg(long, value_name = "EFFORT")]
    pub(crate) effort: Option<Effort>,
    /// Tools that need no question; `outside` permits leaving the directory [env: TURNPASS_ALLOW]
    #[arg(long, value_name = "TOOL", value_delimiter = ',')]
    pub(crate) allow: Option<Vec<ToolWord>>,
    /// Tools that never run [env: TURNPASS_DENY]
    #[arg(long, value_name = "TOOL", value_delimiter = ',')]
    pub(crate) deny: Option<Vec<ToolWord>>,
    /// Generations in one run [env: TURNPASS_MAX_ROUNDS]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_rounds: Option<u32>,
    /// The `claude` program [env: TURNPASS_CLAUDE_PATH]
    #[arg(long, value_name = "FILE")]
    pub(crate) claude_path: Option<PathBuf>,
    /// A laboratory upstream, http on loopback, in place of the service [env: TURNPASS_LAB_UPSTREAM]
    #[arg(long, value_name = "URL")]
    pub(crate) lab_upstream: Option<String>,
    /// A throw-away home folder for the CLI, with a laboratory upstream only [env: TURNPASS_LAB_HOME]
    #[arg(long, value_name = "DIR")]
    pub(crate) lab_home: Option<PathBuf>,
    /// What to do about paid usage credits: require_off, warn or off [env: TURNPASS_USAGE_GATE]
    #[arg(long, value_name = "POLICY")]
    pub(crate) usage_gate: Option<Policy>,
    /// Send nothing while a usage window is used to this percentage [env: TURNPASS_MAX_WINDOW_PERCENT]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100), allow_negative_numbers = true)]
    pub(crate) max_window_percent: Option<u8>,
    /// Requests of one session [env: TURNPASS_MAX_REQUESTS_PER_SESSION]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_requests_per_session: Option<u64>,
    /// Tokens of one session, prompts and answers [env: TURNPASS_MAX_TOKENS_PER_SESSION]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens_per_session: Option<u64>,
    /// Requests of one day, all sessions together [env: TURNPASS_MAX_REQUESTS_PER_DAY]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_requests_per_day: Option<u64>,
    /// Tokens of one day, all sessions together [env: TURNPASS_MAX_TOKENS_PER_DAY]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens_per_day: Option<u64>,
    /// A private folder for what each CLI process prints, prompts and answers included [env: TURNPASS_RECORD]
    #[arg(long, value_name = "DIR")]
    pub(crate) record: Option<PathBuf>,
    /// Whether each generation leaves a line for `turnpass log`: true or false [env: TURNPASS_KEEP_RECORDS]
    #[arg(long, value_name = "BOOL")]
    pub(crate) keep_records: Option<bool>,
    /// How replay gives the conversation to its process: native or transcript; unset, as certified [env: TURNPASS_HISTORY]
    #[arg(long, value_name = "HISTORY")]
    pub(crate) history: Option<History>,
    /// From a request to the first sign of its answer, in seconds [env: TURNPASS_START_TIMEOUT_S]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) start_timeout_s: Option<u32>,
    /// Longest silence within an answer, in seconds [env: TURNPASS_IDLE_TIMEOUT_S]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) idle_timeout_s: Option<u32>,
    /// The whole of one generation, in seconds [env: TURNPASS_TOTAL_TIMEOUT_S]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) total_timeout_s: Option<u32>,
    /// Whether a conversation that grows too large is summed up: true or false [env: TURNPASS_COMPACTION]
    #[arg(long, value_name = "BOOL")]
    pub(crate) compaction: Option<bool>,
    /// From which size on: tokens, or N% of the window [env: TURNPASS_COMPACTION_THRESHOLD]
    #[arg(long, value_name = "SIZE")]
    pub(crate) compaction_threshold: Option<ThresholdWord>,
    /// How much of the latest conversation stays, in tokens [env: TURNPASS_COMPACTION_KEEP_TOKENS]
    #[arg(long, value_name = "N")]
    pub(crate) compaction_keep_tokens: Option<u64>,
    /// Compactions in one run [env: TURNPASS_MAX_COMPACTIONS]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_compactions: Option<u32>,
    /// Tables of the file only: neither a flag nor a variable has room for them.
    #[arg(skip)]
    pub(crate) prices: Option<Prices>,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Flag,
    Environment,
    File,
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "flag",
            Self::Environment => "environment",
            Self::File => "file",
            Self::Default => "default",
        })
    }
}

/// The settings that hold.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) transport: TransportKind,
    /// `None` leaves it, and the next two, to what the CLI was certified to do.
    pub(crate) process: Option<Process>,
    pub(crate) reseed: Option<ReseedWord>,
    pub(crate) tool_carrier: Option<CarrierWord>,
    /// `None` leaves it to the transport.
    pub(crate) memory_mb: Option<u32>,
    pub(crate) model: String,
    pub(crate) effort: Option<Effort>,
    pub(crate) allow: Vec<ToolWord>,
    pub(crate) deny: Vec<ToolWord>,
    pub(crate) max_rounds: u32,
    pub(crate) claude_path: Option<PathBuf>,
    pub(crate) lab_upstream: Option<LoopbackUrl>,
    pub(crate) lab_home: Option<PathBuf>,
    /// `None` leaves it to the transport.
    pub(crate) usage_gate: Option<Policy>,
    pub(crate) budgets: Budgets,
    pub(crate) record: Option<PathBuf>,
    pub(crate) keep_records: bool,
    /// Of replay alone; `None` leaves it to what the CLI was certified to do.
    pub(crate) history: Option<History>,
    /// Deadlines of each generation, whatever the transport.
    pub(crate) limits: Limits,
    pub(crate) compaction: Compaction,
    /// The person's prices for the estimate of `usage`.
    pub(crate) prices: Prices,
    /// Where each came from, in the order of [`KEYS`].
    pub(crate) sources: [Source; KEYS.len()],
}

/// Reads one environment variable; an argument so that tests need not change the real environment.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl Settings {
    /// Reads the environment and the file, and lays the flags over them.
    pub(crate) fn load(flags: Values, environment: Environment<'_>) -> Result<Self, Fault> {
        let file = config_file::load(environment)?;
        let environment = from_environment(environment)?;
        Self::from_layers([
            (Source::Flag, flags),
            (Source::Environment, environment),
            (Source::File, file),
        ])
    }

    fn from_layers(layers: [(Source, Values); 3]) -> Result<Self, Fault> {
        let mut sources = [Source::Default; KEYS.len()];
        let mut index = 0;
        // The first layer that has a value gives it; the keys are taken in the order of `KEYS`.
        macro_rules! first {
            ($key:ident) => {{
                debug_assert_eq!(KEYS[index].0, stringify!($key));
                let found = layers
                    .iter()
                    .find_map(|(source, layer)| Some((*source, layer.$key.clone()?)));
                sources[index] = found.as_ref().map_or(Source::Default, |found| found.0);
                index += 1;
                found.map(|found| found.1)
            }};
        }
        let default = Limits::default();
        let settings = Self {
            transport: first!(transport).unwrap_or(TransportKind::Pool),
            process: first!(process),
            reseed: first!(reseed),
            tool_carrier: first!(tool_carrier),
            memory_mb: first!(memory_mb),
            model: first!(model).unwrap_or_else(|| DEFAULT_MODEL.to_owned()),
            effort: first!(effort),
            allow: first!(allow).unwrap_or_default(),
            deny: first!(deny).unwrap_or_default(),
            max_rounds: first!(max_rounds).unwrap_or(DEFAULT_ROUNDS),
            claude_path: first!(claude_path),
            lab_upstream: first!(lab_upstream)
                .map(|text| LoopbackUrl::parse(&text))
                .transpose()?,
            lab_home: first!(lab_home),
            usage_gate: first!(usage_gate),
            budgets: Budgets {
                max_window_percent: first!(max_window_percent),
                session: Allowance {
                    requests: first!(max_requests_per_session),
                    tokens: first!(max_tokens_per_session),
                },
                day: Allowance {
                    requests: first!(max_requests_per_day),
                    tokens: first!(max_tokens_per_day),
                },
            },
            record: first!(record),
            keep_records: first!(keep_records).unwrap_or(true),
            history: first!(history),
            limits: Limits {
                start: deadline(first!(start_timeout_s), "start_timeout_s", default.start)?,
                idle: deadline(first!(idle_timeout_s), "idle_timeout_s", default.idle)?,
                total: deadline(first!(total_timeout_s), "total_timeout_s", default.total)?,
            },
            compaction: Compaction {
                enabled: first!(compaction).unwrap_or(true),
                threshold: first!(compaction_threshold).map(|word| word.0),
                keep_tokens: first!(compaction_keep_tokens).unwrap_or(KEEP_TOKENS),
                per_run: first!(max_compactions).unwrap_or(COMPACTIONS),
                ..Compaction::default()
            },
            prices: layers
                .iter()
                .find_map(|(_, layer)| layer.prices.clone())
                .unwrap_or_default(),
            sources,
        };
        debug_assert_eq!(index, KEYS.len());
        settings.checked()
    }

    fn checked(mut self) -> Result<Self, Fault> {
        if self.model.trim().is_empty() {
            return Err(Fault::usage(
                "the model is empty",
                "Name one, such as sonnet.",
            ));
        }
        if self.max_rounds == 0 {
            return Err(Fault::usage(
                "max_rounds is 0",
                "A run needs at least one round.",
            ));
        }
        if self.compaction.per_run == 0 {
            return Err(Fault::usage(
                "max_compactions is 0",
                "`compaction = false` switches it off.",
            ));
        }
        if self.memory_mb == Some(0) {
            return Err(Fault::usage(
                "memory_mb is 0",
                "Leave it out; there is room for one process at the least.",
            ));
        }
        let percent = self.budgets.max_window_percent;
        if percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
            return Err(Fault::usage(
                "max_window_percent is not between 1 and 100",
                "Leave it out for no limit.",
            ));
        }
        if self.lab_home.is_some() && self.lab_upstream.is_none() {
            return Err(Fault::usage(
                "lab_home is set without lab_upstream",
                "A made-up home is for the laboratory only; leave it out, or name a laboratory upstream.",
            ));
        }
        let file = |key: &str| {
            let index = KEYS.iter().position(|known| known.0 == key);
            index.is_some_and(|index| self.sources[index] == Source::File)
        };
        let (claude, home, record) = (file("claude_path"), file("lab_home"), file("record"));
        for (path, key, from_file) in [
            (&mut self.claude_path, "claude_path", claude),
            (&mut self.lab_home, "lab_home", home),
            (&mut self.record, "record", record),
        ] {
            let Some(path) = path else { continue };
            if from_file && path.is_relative() {
                return Err(Fault::usage(
                    format!("{key} in the configuration file is not an absolute path"),
                    "Write the whole path.",
                ));
            }
            *path = std::path::absolute(&*path).map_err(|error| {
                Fault::usage(
                    format!("{key} cannot be used: {error}"),
                    "Name another path.",
                )
            })?;
        }
        Ok(self)
    }

    /// The CLI that a flag or the file names. One that the variable names is left to the library, which reads it too and
    /// can then say so.
    pub(crate) fn claude_setting(&self) -> Option<PathBuf> {
        let index = KEYS.iter().position(|key| key.0 == "claude_path");
        let source = index.map(|index| self.sources[index]);
        let setting = self.claude_path.clone();
        setting.filter(|_| source != Some(Source::Environment))
    }

    /// The model, if the person named one.
    pub(crate) fn named_model(&self) -> Option<&str> {
        let index = KEYS.iter().position(|key| key.0 == "model");
        let source = index.map(|index| self.sources[index]);
        (source != Some(Source::Default)).then_some(self.model.as_str())
    }

    /// How the transport is set to run, in a word; empty where nothing is set, or there is one way only.
    pub(crate) fn way(&self) -> &'static str {
        match self.transport {
            TransportKind::Relay => self.process.map_or("", Process::as_str),
            TransportKind::Replay => self.history.map_or("", History::as_str),
            TransportKind::Pool => "",
        }
    }

    /// Each key with its value, as the file would have it, and where it came from.
    pub(crate) fn shown(&self) -> Vec<(&'static str, Option<String>, Source)> {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let path = |path: &Option<PathBuf>| path.as_ref().map(|p| quoted(&p.to_string_lossy()));
        let number = |number: Option<u64>| number.map(|n| n.to_string());
        let words = |words: &[ToolWord]| {
            let words: Vec<_> = words.iter().map(|word| word.0.as_str()).collect();
            Some(toml::Value::from(words).to_string())
        };
        let values = [
            Some(quoted(self.transport.as_str())),
            self.process.map(|word| quoted(word.as_str())),
            self.reseed.map(|word| quoted(word.as_str())),
            self.tool_carrier.map(|word| quoted(word.as_str())),
            self.memory_mb.map(|n| n.to_string()),
            Some(quoted(&self.model)),
            self.effort.map(|effort| quoted(effort.as_str())),
            words(&self.allow),
            words(&self.deny),
            Some(self.max_rounds.to_string()),
            path(&self.claude_path),
            self.lab_upstream.as_ref().map(|url| quoted(url.as_str())),
            path(&self.lab_home),
            self.usage_gate.map(|policy| quoted(policy.as_str())),
            self.budgets.max_window_percent.map(|n| n.to_string()),
            number(self.budgets.session.requests),
            number(self.budgets.session.tokens),
            number(self.budgets.day.requests),
            number(self.budgets.day.tokens),
            path(&self.record),
            Some(self.keep_records.to_string()),
            self.history.map(|word| quoted(word.as_str())),
            Some(self.limits.start.as_secs().to_string()),
            Some(self.limits.idle.as_secs().to_string()),
            Some(self.limits.total.as_secs().to_string()),
            Some(self.compaction.enabled.to_string()),
            self.compaction.threshold.map(|t| ThresholdWord(t).shown()),
            Some(self.compaction.keep_tokens.to_string()),
            Some(self.compaction.per_run.to_string()),
        ];
        KEYS.iter()
            .zip(values)
            .zip(self.sources)
            .map(|((key, value), source)| (key.0, value, source))
            .collect()
    }
}

/// A deadline of a generation: the seconds that were set, else the default.
fn deadline(seconds: Option<u32>, key: &str, default: Duration) -> Result<Duration, Fault> {
    match seconds {
        None => Ok(default),
        Some(seconds @ 1..=LONGEST_TIMEOUT_S) => Ok(Duration::from_secs(seconds.into())),
        Some(seconds) => Err(Fault::usage(
            format!("{key} is {seconds}, and has to be 1 to {LONGEST_TIMEOUT_S} seconds"),
            format!("Leave it out for the default of {}.", default.as_secs()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str) -> Values {
        Values {
            model: Some(name.to_owned()),
            ..Values::default()
        }
    }

    fn layered(flag: Values, environment: Values, file: Values) -> Result<Settings, Fault> {
        Settings::from_layers([
            (Source::Flag, flag),
            (Source::Environment, environment),
            (Source::File, file),
        ])
    }

    #[test]
    fn a_flag_beats_the_environment_beats_the_file_beats_the_default() {
        let none = Values::default;
        for (layers, wanted, source) in [
            ([model("a"), model("b"), model("c")], "a", Source::Flag),
            ([none(), model("b"), model("c")], "b", Source::Environment),
            ([none(), none(), model("c")], "c", Source::File),
            ([none(), none(), none()], DEFAULT_MODEL, Source::Default),
        ] {
            let [flag, environment, file] = layers;
            let settings = layered(flag, environment, file).unwrap();
            assert_eq!(
                (settings.model.as_str(), settings.sources[5]),
                (wanted, source)
            );
            let named = (source != Source::Default).then_some(wanted);
            assert_eq!(settings.named_model(), named);
        }
    }

    #[test]
    fn every_key_can_be_set_by_its_variable() {
        let value = |name: &str| {
            let text = match name {
                "TURNPASS_TRANSPORT" => "relay",
                "TURNPASS_PROCESS" => "per-request",
                "TURNPASS_RESEED" => "transcript",
                "TURNPASS_TOOL_CARRIER" => "http",
                "TURNPASS_MEMORY_MB" => "900",
                "TURNPASS_MODEL" => "opus",
                "TURNPASS_EFFORT" => "HIGH",
                "TURNPASS_ALLOW" => "write, shell",
                "TURNPASS_DENY" => "search",
                "TURNPASS_MAX_ROUNDS" => "7",
                "TURNPASS_CLAUDE_PATH" => "/opt/claude",
                "TURNPASS_LAB_UPSTREAM" => "http://127.0.0.1:8399/",
                "TURNPASS_LAB_HOME" => "/tmp/home",
                "TURNPASS_USAGE_GATE" => "require-off",
                "TURNPASS_MAX_WINDOW_PERCENT" => "80",
                "TURNPASS_MAX_REQUESTS_PER_SESSION" => "1",
                "TURNPASS_MAX_TOKENS_PER_SESSION" => "2",
                "TURNPASS_MAX_REQUESTS_PER_DAY" => "3",
                "TURNPASS_MAX_TOKENS_PER_DAY" => "4",
                "TURNPASS_RECORD" => "/tmp/recordings",
                "TURNPASS_KEEP_RECORDS" => "false",
                "TURNPASS_HISTORY" => "transcript",
                "TURNPASS_START_TIMEOUT_S" => "30",
                "TURNPASS_IDLE_TIMEOUT_S" => "60",
                "TURNPASS_TOTAL_TIMEOUT_S" => "600",
                "TURNPASS_COMPACTION" => "false",
                "TURNPASS_COMPACTION_THRESHOLD" => "60%",
                "TURNPASS_COMPACTION_KEEP_TOKENS" => "5",
                "TURNPASS_MAX_COMPACTIONS" => "6",
                _ => return None,
            };
            Some(OsString::from(text))
        };
        let environment = from_environment(&value).unwrap();
        let settings = layered(Values::default(), environment, Values::default()).unwrap();
        assert!(settings.sources.iter().all(|s| *s == Source::Environment));
        let shown: Vec<_> = settings.shown().into_iter().map(|each| each.1).collect();
        let wanted = [
            "\"relay\"",
            "\"per-request\"",
            "\"transcript\"",
            "\"http\"",
            "900",
            "\"opus\"",
            "\"high\"",
            "[\"write\", \"shell\"]",
            "[\"search\"]",
            "7",
            "\"/opt/claude\"",
            "\"http://127.0.0.1:8399\"",
            "\"/tmp/home\"",
            "\"require_off\"",
            "80",
            "1",
            "2",
            "3",
            "4",
            "\"/tmp/recordings\"",
            "false",
            "\"transcript\"",
            "30",
            "60",
            "600",
            "false",
            "\"60%\"",
            "5",
            "6",
        ];
        assert_eq!(shown, wanted.map(|text| Some(text.to_owned())));
    }

    #[test]
    fn a_bad_variable_is_named() {
        for (name, value, said) in [
            ("TURNPASS_EFFORT", "huge", "use none, low"),
            ("TURNPASS_TRANSPORT", "tube", "use pool, replay, relay"),
            ("TURNPASS_PROCESS", "cold", "use warm, per-request"),
            ("TURNPASS_RESEED", "frames", "use native, transcript"),
            ("TURNPASS_TOOL_CARRIER", "stdio", "use in-band, http"),
            ("TURNPASS_MEMORY_MB", "much", "invalid digit"),
            ("TURNPASS_ALLOW", "write,sh", "use read, list"),
            ("TURNPASS_MAX_ROUNDS", "-1", "invalid digit"),
            ("TURNPASS_USAGE_GATE", "on", "use require_off, warn, off"),
            ("TURNPASS_KEEP_RECORDS", "no", "`true` or `false`"),
            ("TURNPASS_HISTORY", "long", "use native, transcript"),
            ("TURNPASS_IDLE_TIMEOUT_S", "5m", "invalid digit"),
            ("TURNPASS_COMPACTION_THRESHOLD", "0", "use tokens"),
            ("TURNPASS_MAX_COMPACTIONS", "none", "invalid digit"),
        ] {
            let read = |asked: &str| (asked == name).then(|| OsString::from(value));
            let fault = from_environment(&read).unwrap_err();
            let text = fault.to_string();
            assert!(text.contains(name) && text.contains(said), "{text}");
        }
        let empty = |_: &str| Some(OsString::new());
        assert!(from_environment(&empty).unwrap().model.is_none());
    }

    #[test]
    fn a_deadline_of_nothing_or_of_more_than_a_day_is_refused() {
        let all = |seconds| Values {
            start_timeout_s: Some(seconds),
            idle_timeout_s: Some(seconds),
            total_timeout_s: Some(seconds),
            ..Values::default()
        };
        let none = Values::default;
        for seconds in [0, LONGEST_TIMEOUT_S + 1, 300_000, u32::MAX] {
            let fault = layered(all(seconds), none(), none()).unwrap_err();
            let text = fault.to_string();
            assert!(text.contains("start_timeout_s is"), "{text}");
            for key in ["start", "idle", "total"] {
                let one = Values {
                    start_timeout_s: (key == "start").then_some(seconds),
                    idle_timeout_s: (key == "idle").then_some(seconds),
                    total_timeout_s: (key == "total").then_some(seconds),
                    ..Values::default()
                };
                let text = layered(none(), none(), one).unwrap_err().to_string();
                let wanted = format!("{key}_timeout_s is {seconds}, and has to be 1 to 86400");
                assert!(text.contains(&wanted), "{text}");
            }
        }
        for seconds in [1, LONGEST_TIMEOUT_S] {
            let limits = layered(all(seconds), none(), none()).unwrap().limits;
            let wanted = Duration::from_secs(seconds.into());
            assert_eq!([limits.start, limits.idle, limits.total], [wanted; 3]);
        }
        // The documents' own.
        let limits = layered(none(), none(), none()).unwrap().limits;
        assert_eq!(limits, Limits::default());
        assert_eq!(limits.idle, Duration::from_secs(5 * 60));
        assert_eq!(limits.total, Duration::from_secs(30 * 60));
    }

    #[test]
    fn every_key_is_documented_with_its_variable() {
        let page = include_str!("../../../docs/guide/configuration.md");
        for (key, variable) in KEYS {
            let row = format!("| `{key}` | `{variable}` |");
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn settings_that_cannot_hold_together_are_refused() {
        let upstream = |url: &str| Values {
            lab_upstream: Some(url.to_owned()),
            ..Values::default()
        };
        for url in [
            "https://127.0.0.1:1",
            "http://10.0.0.1:1",
            "http://127.0.0.1@evil:1",
            "x",
        ] {
            let fault = layered(upstream(url), Values::default(), Values::default()).unwrap_err();
            assert_eq!(fault.code(), "lab_upstream_refused", "{url}");
        }
        let home = Values {
            lab_home: Some("/tmp/x".into()),
            ..Values::default()
        };
        layered(home, Values::default(), Values::default()).unwrap_err();
        layered(model(" "), Values::default(), Values::default()).unwrap_err();
        let never = Values {
            max_compactions: Some(0),
            ..Values::default()
        };
        let fault = layered(Values::default(), never, Values::default()).unwrap_err();
        assert!(fault.to_string().contains("compaction = false"), "{fault}");
        let relative = || Values {
            claude_path: Some("bin/claude".into()),
            ..Values::default()
        };
        layered(Values::default(), Values::default(), relative()).unwrap_err();
        let settings = layered(relative(), Values::default(), Values::default()).unwrap();
        assert!(settings.claude_path.unwrap().is_absolute());
    }
}
