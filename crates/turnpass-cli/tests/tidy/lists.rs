//! Where an exception is made, and why.

/// Files that may read the process environment. The laboratory is a program of its own and may too.
pub(crate) const READS_ENVIRONMENT: &[&str] = &[
    // The one snapshot of the library; everything else is given values.
    "crates/turnpass/src/cli/environment.rs",
    // The one reader of the program's settings.
    "crates/turnpass-cli/src/context.rs",
    // Stands in the place of the CLI while it is measured, and reads what the bench gave it.
    "crates/turnpass-cli/src/commands/bench/tap.rs",
    // A command of the shell tool runs in the person's own environment.
    "crates/turnpass-agent/src/tools/shell.rs",
];

/// Files and folders that may start a process.
pub(crate) const STARTS_PROCESSES: &[&str] = &[
    // The one type that owns a process group.
    "crates/turnpass/src/process/",
    // The laboratory is a program of its own.
    "crates/turnpass-lab/",
    // Copies a script without holding it open (ETXTBSY).
    "crates/turnpass-cli/src/stage.rs",
    // The bench measures itself from outside: as its own host, and as the CLI's stand-in, both ended with it.
    "crates/turnpass-cli/src/commands/bench/memory.rs",
    "crates/turnpass-cli/src/commands/bench/tap.rs",
    // The doctor starts this program itself as the tool server, as the CLI would, and kills it with its value.
    "crates/turnpass-cli/src/commands/doctor/",
];

/// Files that may start a task or a thread.
pub(crate) const STARTS_TASKS: &[&str] = &[
    // Pipes, the guard and the end of a process group.
    "crates/turnpass/src/process/group.rs",
    "crates/turnpass/src/process/stdin.rs",
    // The shared sign-in check, which shutdown joins, and the sweep of what killed hosts left.
    "crates/turnpass/src/cli/auth.rs",
    "crates/turnpass/src/cli/installed.rs",
    // A connection to a port of ours.
    "crates/turnpass/src/loopback/mod.rs",
    // The lines of a CLI, the generations and the spares of a relay.
    "crates/turnpass/src/relay/kept.rs",
    "crates/turnpass/src/relay/mod.rs",
    "crates/turnpass/src/relay/stable.rs",
    // The CLI's own login, which ends when nobody waits for it, and a request that may be sent once more after it, which ends
    // with its host.
    "crates/turnpass/src/login/mod.rs",
    "crates/turnpass/src/provider.rs",
    // The lines of a CLI, the ends of processes and what is shown of them, advisors that are idle, the generations and the
    // spare of a pool.
    "crates/turnpass/src/pool/mod.rs",
    "crates/turnpass/src/pool/session.rs",
    "crates/turnpass/src/pool/status.rs",
    "crates/turnpass/src/pool/table.rs",
    "crates/turnpass/src/pool/table/spare.rs",
    // The generations of a replay, and the end of each process with its files; shutdown joins both.
    "crates/turnpass/src/replay/mod.rs",
    "crates/turnpass/src/replay/running.rs",
    // Questions about use, and entries into the ledger, which shutdown joins; small files off the runtime's threads.
    "crates/turnpass/src/limits/guard.rs",
    "crates/turnpass/src/limits/book.rs",
    "crates/turnpass/src/limits/latest.rs",
    "crates/turnpass/src/models/known.rs",
    "crates/turnpass/src/cli/version.rs",
    "crates/turnpass/src/limits/shared.rs",
    // The thread that writes records, so that no generation waits for a disk.
    "crates/turnpass/src/record/sink.rs",
    // Tools that read files do so off the runtime's threads; the scripted transport answers from a task.
    "crates/turnpass-agent/src/tools/mod.rs",
    "crates/turnpass-agent/src/scripted.rs",
    // Signals, and a terminal that cannot be waited for otherwise.
    "crates/turnpass-cli/src/context.rs",
    "crates/turnpass-cli/src/terminal.rs",
    // One thread for each pipe and connection that the bench's stand-in copies.
    "crates/turnpass-cli/src/commands/bench/tap.rs",
];

/// Files and folders whose functions are pure: bytes or values in, values out.
pub(crate) const PURE: &[&str] = &[
    "crates/turnpass/src/wire/",
    "crates/turnpass/src/conversation/",
    "crates/turnpass/src/record/redact.rs",
    "crates/turnpass/src/record/replay.rs",
    "crates/turnpass/src/record/rows.rs",
    "crates/turnpass/src/turn.rs",
    "crates/turnpass/src/turn/stop.rs",
    "crates/turnpass/src/models.rs",
    "crates/turnpass/src/models/context.rs",
    "crates/turnpass/src/limits/verdict.rs",
    "crates/turnpass/src/limits/rate.rs",
    "crates/turnpass/src/limits/windows.rs",
    "crates/turnpass/src/cli/settings.rs",
    "crates/turnpass/src/tools/catalogue.rs",
    "crates/turnpass/src/tools/check.rs",
    "crates/turnpass/src/tools/in_band.rs",
    "crates/turnpass/src/tools/mcp.rs",
    "crates/turnpass/src/tools/pairing/",
    "crates/turnpass/src/tools/result.rs",
    "crates/turnpass/src/tools/schema.rs",
    "crates/turnpass/src/loopback/origin.rs",
    "crates/turnpass/src/pool/transcript.rs",
    "crates/turnpass/src/pool/keys.rs",
    "crates/turnpass/src/pool/answer.rs",
    "crates/turnpass/src/pool/hearing.rs",
    "crates/turnpass/src/pool/failure.rs",
    "crates/turnpass/src/pool/sync/compare.rs",
    "crates/turnpass/src/pool/sync/record.rs",
    "crates/turnpass/src/pool/sync/state.rs",
    "crates/turnpass/src/pool/sync/plan.rs",
    "crates/turnpass/src/login/dialogue.rs",
    "crates/turnpass/src/relay/admission.rs",
    "crates/turnpass/src/relay/fit.rs",
    "crates/turnpass/src/relay/completion.rs",
    "crates/turnpass/src/cli/isolation.rs",
    "crates/turnpass/src/relay/native.rs",
    "crates/turnpass/src/relay/reading.rs",
    "crates/turnpass/src/relay/classify.rs",
    "crates/turnpass/src/relay/prepared.rs",
];

/// Files above the limit: path, most lines, reason. The bounds only fall.
pub(crate) const LONG_FILES: &[(&str, usize, &str)] = &[
    (
        "crates/turnpass/src/cli/launch.rs",
        560,
        "one launch after another, over what they share",
    ),
    (
        "crates/turnpass/src/cli/locate.rs",
        570,
        "one rule after another in the order in which they are tried",
    ),
    (
        "crates/turnpass/src/conversation/normalise.rs",
        560,
        "one pass; its rules, ids and media have files of their own",
    ),
    (
        "crates/turnpass/src/relay/exchange.rs",
        640,
        "one loop over all that can happen in a generation",
    ),
    (
        "crates/turnpass/src/relay/mod.rs",
        530,
        "the story of a generation, top down, with the options and the transport",
    ),
    (
        "crates/turnpass/src/turn.rs",
        580,
        "one decoder: every transition of a message stands in it",
    ),
    (
        "crates/turnpass/src/wire/messages.rs",
        680,
        "every event of the service's stream, each with its fields",
    ),
    (
        "crates/turnpass/src/wire/stream_json/records.rs",
        600,
        "every record of the CLI, each with its fields",
    ),
    (
        "crates/turnpass-cli/src/commands/bench/scenes.rs",
        540,
        "one scene after another, each measured in its own way",
    ),
    (
        "crates/turnpass-lab/src/cli/emulator/mod.rs",
        620,
        "the loop of the emulator",
    ),
    (
        "crates/turnpass-lab/src/cli/emulator/turn.rs",
        580,
        "one turn of the emulator, as the real CLI was seen to take it",
    ),
    (
        "crates/turnpass-lab/src/cli/player.rs",
        520,
        "one step after another of a script",
    ),
    (
        "crates/turnpass-lab/src/scenario/mod.rs",
        580,
        "the file format of scenarios: every field with its documentation",
    ),
    (
        "crates/turnpass-lab/src/upstream/checks.rs",
        580,
        "one check after another of a Messages request",
    ),
    (
        "crates/turnpass-lab/tests/real_cli.rs",
        760,
        "one scene after another that the emulator is compared with the real CLI in",
    ),
    (
        "crates/turnpass-cli/tests/relay_real/outcomes.rs",
        800,
        "a row for every answer that the service can give",
    ),
];

/// Test files that let time pass, because that is what they test.
pub(crate) const WAITS_IN_TESTS: &[&str] = &[
    // A host that does not read for a while.
    "crates/turnpass-cli/tests/contract/answers.rs",
    // Their clock stands still until nothing else can happen, so no time passes at all.
    "crates/turnpass/src/limits/gate_tests.rs",
    "crates/turnpass/src/limits/shared.rs",
];

/// Names that hold such a word because the thing is called that.
pub(crate) const NAMED_SO: &[(&str, &str)] = &[
    // Requests that the CLI makes beside the one that was caused: a title, a probe, a count.
    (
        "crates/turnpass-cli/tests/scripted/extra_requests.rs",
        "helpers",
    ),
];

/// Places that may name the CLI's credential file: the laboratory writes a made-up one, a test looks who opens it, and the
/// pages speak of it.
pub(crate) const NAMES_CREDENTIALS: &[&str] = &[
    "crates/turnpass-lab/src/rig/",
    "crates/turnpass-cli/tests/services_real/strace.rs",
    "docs/",
];

/// Files that may name the variables that are never set: they are stripped here, and imitated there.
pub(crate) const NAMES_NEVER_SET: &[&str] = &[
    "crates/turnpass/src/cli/environment.rs",
    "crates/turnpass-lab/src/cli/emulator/",
];

/// Every file that a list names, for the check that it exists.
pub(crate) fn named_files() -> Vec<&'static str> {
    let lists = [
        READS_ENVIRONMENT,
        STARTS_PROCESSES,
        STARTS_TASKS,
        PURE,
        WAITS_IN_TESTS,
        NAMES_CREDENTIALS,
        NAMES_NEVER_SET,
    ];
    let long = LONG_FILES.iter().map(|(path, ..)| *path);
    let so = NAMED_SO.iter().map(|(path, _)| *path);
    let named = lists.into_iter().flatten().copied().chain(long).chain(so);
    named.filter(|path| !path.ends_with('/')).collect()
}
