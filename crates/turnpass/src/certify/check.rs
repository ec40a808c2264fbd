//! The checks as data: what each looks at, which transport relies on it, and what happens without it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::request::TransportKind;

/// What there is to say about a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Its name, as in JSON, in errors and on the pages.
    pub name: &'static str,
    /// What has to be seen for it to hold, as half a sentence.
    pub what: &'static str,
    /// Who relies on it.
    pub relied_on_by: &'static [Reliance],
}

/// One transport's reliance on a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reliance {
    /// Who relies on it.
    pub transport: TransportKind,
    /// What happens where it does not hold.
    pub otherwise: Otherwise,
}

/// What a transport does where a check does not hold. The text is the rest of a sentence that names the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// It takes another way, which it decides by the program's standing before anything is started.
    FallsBack(&'static str),
    /// What it always does covers it, so nothing is decided: it relies on the behaviour for speed or comfort alone.
    Always(&'static str),
    /// It does not work with this CLI, for this reason.
    Refuses(&'static str),
}

impl Otherwise {
    /// Its word in JSON.
    pub fn kind(self) -> &'static str {
        match self {
            Self::FallsBack(_) => "falls_back",
            Self::Always(_) => "always",
            Self::Refuses(_) => "refuses",
        }
    }

    /// The text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FallsBack(text) | Self::Always(text) | Self::Refuses(text) => text,
        }
    }
}

/// The table: name in code, name everywhere else, what has to be seen, and for each transport that relies on it what
/// happens otherwise.
macro_rules! checks {
    ($($check:ident = $name:literal, $what:literal, [$(($transport:ident $kind:ident $otherwise:literal)),*];)*) => {
        /// A behaviour of the CLI that a transport relies on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Check {
            $(#[doc = concat!("Holds when ", $what, ".")] $check,)*
        }

        impl Check {
            /// All checks, in the order in which they are told.
            pub const ALL: &[Self] = &[$(Self::$check),*];

            /// What there is to say about it.
            pub const fn about(self) -> &'static About {
                match self {
                    $(Self::$check => &About {
                        name: $name,
                        what: $what,
                        relied_on_by: &[$(Reliance {
                            transport: TransportKind::$transport,
                            otherwise: Otherwise::$kind($otherwise),
                        }),*],
                    },)*
                }
            }
        }
    };
}

checks! {
    Flags = "flags", "a start with every flag of ours answers `initialize`", [(Pool Refuses "no process can be started"), (Replay Refuses "no process can be started"), (Relay Refuses "no process can be started")];
    InitFields = "init_fields", "the first record has every field that the isolation is judged by, and `apiKeySource` is none", [(Pool Refuses "the isolation cannot be judged"), (Replay Refuses "the isolation cannot be judged"), (Relay Refuses "the isolation cannot be judged")];
    PluginsOff = "plugins_off", "our settings, which name each built-in plugin in both spellings, leave no plugin on", [(Pool Always "those that slip through are learned and the start is repeated once"), (Replay Always "those that slip through are learned and the start is repeated once"), (Relay Always "those that slip through are learned and the start is repeated once")];
    Isolation = "isolation", "hooks, instructions, memory, MCP servers, plugins and variables planted in the home and the project have no effect", [(Pool Refuses "a person's own configuration would act on requests"), (Replay Refuses "a person's own configuration would act on requests"), (Relay Refuses "a person's own configuration would act on requests")];
    ToolsExact = "tools_exact", "the first record lists exactly our tools and one connected server, and so does the request", [(Pool Refuses "the model would see other tools than the host's"), (Replay Refuses "the model would see other tools than the host's"), (Relay FallsBack "tools go in the extra body, never over MCP")];
    DescriptionsWhole = "descriptions_whole", "a tool description of 6,000 characters reaches the service whole", [(Pool FallsBack "the host is told which descriptions the CLI cuts"), (Replay FallsBack "the host is told which descriptions the CLI cuts"), (Relay FallsBack "over MCP the host is told which descriptions the CLI cuts")];
    InBandManifest = "in_band_manifest", "an in-band server with a manifest is there without one exchanged message", [(Pool FallsBack "tools go over loopback HTTP"), (Replay FallsBack "tools go over the stdio bridge"), (Relay FallsBack "over MCP each request has a process of its own, with the stdio bridge")];
    InBandPairing = "in_band_pairing", "a call names the block that it belongs to (`claudecode/toolUseId`)", [(Pool Refuses "calls cannot be paired with blocks")];
    InBandParallel = "in_band_parallel", "two calls of one message are both there before either is answered", [(Pool Always "each result waits for its call, and the calls come one after another")];
    ResultWhole = "result_whole", "a result of 200,000 characters reaches the service whole", [(Pool FallsBack "a turn with a result above 50,000 characters is taken back and told with its results")];
    EndTurn = "end_turn", "a result with `claude/endTurn` ends the turn without a request, and the next line goes on after it", [(Pool FallsBack "a turn with text beside results is taken back and told with its results")];
    StdioBridge = "stdio_bridge", "the CLI takes over the tools of `turnpass mcp-stdio`", [(Replay FallsBack "tools go in-band"), (Relay FallsBack "tools go in the extra body, or in-band to a kept process")];
    ReadyBeforePrompt = "ready_before_prompt", "`mcp_status` shows the server connected with its tools before any user line", [(Pool Refuses "a line could be sent to a process without tools"), (Replay Refuses "a line could be sent to a process without tools")];
    OneRequest = "one_request", "a plain turn is one request to the service and nothing else", [(Pool Refuses "a generation would be paid twice"), (Replay Refuses "a generation would be paid twice"), (Relay Always "the relay refuses every other request")];
    ClientComposed = "client_composed", "`@path` and `/command` in a user line and in a frame reach the service as written", [(Pool Refuses "text would be acted on"), (Replay FallsBack "the history is a transcript, in which `@` is escaped and no text begins with `/`"), (Relay Always "the placeholder holds neither")];
    CacheBreakpoints = "cache_breakpoints", "the CLI sets three cache breakpoints of one hour and leaves one to the host", [(Replay FallsBack "no breakpoint of our own is set"), (Relay Always "breakpoints of our own follow those of each request, and there is never a fifth")];
    FramesOrder = "frames_order", "a history in frames reaches the service in order, with calls and results", [(Pool FallsBack "a reseed is one transcript message"), (Replay FallsBack "the history is a transcript")];
    FramesAcknowledged = "frames_acknowledged", "each frame is acknowledged by its uuid", [(Pool FallsBack "a reseed is one transcript message"), (Replay FallsBack "the history is a transcript")];
    FramesThinking = "frames_thinking", "signed thinking in a frame keeps its signature", [(Pool FallsBack "thinking is left out of what is told"), (Replay FallsBack "thinking is left out of the history")];
    FramesLive = "frames_live", "frames after a real turn go on from it", [(Pool FallsBack "what a process with turns of its own has not heard is told as one message")];
    ExtraBodyLive = "extra_body_live", "`CLAUDE_CODE_EXTRA_BODY`, set on a running process, replaces `messages` and adds members", [(Pool FallsBack "settings of the body are refused"), (Replay FallsBack "settings of the body are refused"), (Relay FallsBack "tools go over MCP, and settings of the body are refused")];
    SystemPromptLive = "system_prompt_live", "`set_model` changes the system prompt before the first line, without a request", [(Pool Always "a new process is started for another prompt"), (Relay FallsBack "each request has a process of its own")];
    ModelChangeClean = "model_change_clean", "a change of prompt and model in a conversation leaves no text once its frame is rewound", [(Pool Always "another model or prompt is a fork or a new process")];
    EffortLive = "effort_live", "`apply_flag_settings` changes the effort of the next request", [(Pool FallsBack "a new process is started for another effort"), (Relay FallsBack "each request has a process of its own")];
    RewindAfterInterrupt = "rewind_after_interrupt", "an interrupted turn can be rewound out of the conversation", [(Pool FallsBack "the process is retired, and the conversation resumed or seeded anew")];
    RewindAfterFailure = "rewind_after_failure", "a failed turn can be rewound out of the conversation", [(Pool FallsBack "the process is retired, and the conversation resumed or seeded anew")];
    InterruptCloses = "interrupt_closes", "`interrupt` closes the request to the service at once", [(Pool FallsBack "a cancelled turn is ended by killing the process"), (Relay Always "the relay closes the request itself")];
    CancelQueued = "cancel_queued", "`interrupt` with `cancel_queued` takes a waiting line away and names it", [(Pool FallsBack "a cancelled turn is ended by killing the process")];
    ResumeAt = "resume_at", "`--resume` at a uuid goes on from just there, after a kill", [(Pool FallsBack "a lost conversation is seeded anew")];
    ResumeParked = "resume_parked", "`--resume` at the last call's record takes the results in the next line", [(Pool Always "calls of a lost process are told anew with what follows the last point")];
    ForkAt = "fork_at", "`--fork-session` at a uuid goes on from just there under another id", [(Pool FallsBack "a conversation that would be forked is seeded anew")];
    PromptSnapshotOff = "prompt_snapshot_off", "`--system-prompt-snapshot off` sends the new prompt on a resume", [(Pool Refuses "a resumed conversation would keep its old prompt")];
    BlockingLimitGate = "blocking_limit_gate", "the blocking limit, lowered while a reply streams, keeps the CLI from asking again by itself (max_tokens, empty)", [(Pool FallsBack "the process is killed when it would go on by itself"), (Replay Always "the process is killed when it would go on by itself")];
    Refusal410 = "refusal_410", "a request of the CLI's own that is answered with 410 ends the turn", [(Relay Always "each further request is refused again")];
    Readmission401 = "readmission_401", "after a 401 the CLI sends the same body once more", [(Relay Always "an expired sign-in fails the generation")];
    RetriesOff = "retries_off", "with no retries allowed a 500, a 503 and a 529 are one request each", [(Pool Refuses "a failed generation would be paid several times"), (Replay Refuses "a failed generation would be paid several times"), (Relay Always "the relay refuses every other request")];
    FallbackOff = "fallback_off", "a stream that breaks off is not asked for again without streaming", [(Pool Refuses "a broken generation would be paid twice"), (Replay Refuses "a broken generation would be paid twice"), (Relay Always "the relay refuses every other request")];
    RefusalOnce = "refusal_once", "a refusal by the model is not asked for again, nor from another model", [(Pool FallsBack "the process is killed at a refusal"), (Replay FallsBack "the process is killed at a refusal"), (Relay Always "the relay refuses every other request")];
    UnparsedInput = "unparsed_input", "a tool input that is no JSON is marked and never called", [(Pool Always "the input is judged by turnpass, and a call that comes all the same is never given to the host"), (Replay Always "the input is judged by turnpass alone")];
    StopAfterCut = "stop_after_cut", "the `message_stop` that the CLI makes up after a cut says which blocks it abandons", [(Pool Always "a block without its own end is dropped"), (Replay Always "a block without its own end is dropped")];
    MaxTurnsHandOff = "max_turns_hand_off", "`--max-turns 1` ends a turn with calls after one request", [(Replay Always "the process is killed at the end of the message"), (Relay Always "the relay refuses every other request")];
    BudgetStop = "budget_stop", "a budget of nothing ends a turn without tools after one request, whatever its stop reason", [(Replay Always "the process is killed at the end of the message")];
    IdleClose = "idle_close", "an idle process ends by itself when its input is closed", [(Pool Always "it is ended by a signal"), (Replay Always "it is ended by a signal"), (Relay Always "it is ended by a signal")];
    ModelCatalogue = "model_catalogue", "`initialize` lists models with their resolved ids and effort levels", [(Pool Always "the built-in list of models is used"), (Replay Always "the built-in list of models is used"), (Relay Always "the built-in list of models is used")];
}

impl Check {
    /// Its name.
    pub const fn as_str(self) -> &'static str {
        self.about().name
    }

    /// What a transport does where it does not hold; `None` when it does not rely on it.
    pub fn otherwise(self, transport: TransportKind) -> Option<Otherwise> {
        let relied_on_by = self.about().relied_on_by;
        let reliance = relied_on_by.iter().find(|one| one.transport == transport);
        reliance.map(|one| one.otherwise)
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Check {
    type Err = UnknownCheck;

    fn from_str(text: &str) -> Result<Self, UnknownCheck> {
        let mut known = Self::ALL.iter().copied();
        known
            .find(|check| check.as_str() == text)
            .ok_or(UnknownCheck)
    }
}

/// No check has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no check has this name; `turnpass doctor --certify` lists them")]
pub struct UnknownCheck;

impl Serialize for Check {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Check {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_check_has_a_name_of_its_own_that_finds_it() {
        let names: BTreeSet<_> = Check::ALL.iter().map(|check| check.as_str()).collect();
        assert_eq!(names.len(), Check::ALL.len());
        for check in Check::ALL {
            assert_eq!(check.as_str().parse::<Check>().unwrap(), *check);
            let json = serde_json::to_string(check).unwrap();
            assert_eq!(serde_json::from_str::<Check>(&json).unwrap(), *check);
        }
        assert!("nonsense".parse::<Check>().is_err());
    }

    #[test]
    fn every_check_is_relied_on_and_says_what_happens_without_it() {
        for check in Check::ALL {
            let about = check.about();
            assert!(!about.relied_on_by.is_empty(), "{check}");
            for reliance in about.relied_on_by {
                assert!(reliance.otherwise.as_str().len() > 10, "{check}");
                assert_eq!(
                    check.otherwise(reliance.transport),
                    Some(reliance.otherwise)
                );
            }
            let who: BTreeSet<_> = about
                .relied_on_by
                .iter()
                .map(|one| one.transport.as_str())
                .collect();
            assert_eq!(
                who.len(),
                about.relied_on_by.len(),
                "{check} names a transport twice"
            );
        }
        assert_eq!(Check::CancelQueued.otherwise(TransportKind::Relay), None);
    }
}
