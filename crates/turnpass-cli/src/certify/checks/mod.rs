//! The checks themselves: each one makes the CLI do something and looks at what it did, on its output and upstream.

mod frames;
mod live;
mod requests;
mod sessions;
mod start;
mod tools;

use turnpass::certify::Check;

use super::cli::Why;
use super::lane::Lane;

/// How a check ends.
type Checked = Result<(), Why>;

/// Whether a check goes on in a process that another one left, or leaves its own. The others come last, so that they end as
/// few of those as possible.
pub(super) fn shares_its_process(check: Check) -> bool {
    !matches!(
        check,
        Check::Flags
            | Check::Isolation
            | Check::StdioBridge
            | Check::ReadyBeforePrompt
            | Check::InBandManifest
            | Check::MaxTurnsHandOff
            | Check::ExtraBodyLive
            | Check::SystemPromptLive
            | Check::ModelChangeClean
            | Check::ResumeAt
            | Check::ResumeParked
            | Check::ForkAt
            | Check::PromptSnapshotOff
            | Check::BlockingLimitGate
            | Check::Refusal410
            | Check::Readmission401
            | Check::BudgetStop
            | Check::IdleClose
    )
}

/// Runs one check. A process that a check leaves in order is kept for the next one.
pub(super) async fn run(check: Check, lane: &mut Lane) -> Checked {
    match check {
        Check::Flags => start::flags(lane).await,
        Check::InitFields => start::init_fields(lane).await,
        Check::PluginsOff => start::plugins_off(lane).await,
        Check::Isolation => start::isolation(lane).await,
        Check::ToolsExact => start::tools_exact(lane).await,
        Check::DescriptionsWhole => start::descriptions_whole(lane).await,
        Check::StdioBridge => start::stdio_bridge(lane).await,
        Check::ReadyBeforePrompt => start::ready_before_prompt(lane).await,
        Check::IdleClose => start::idle_close(lane).await,
        Check::ModelCatalogue => start::model_catalogue(lane).await,
        Check::InBandManifest => tools::in_band_manifest(lane).await,
        Check::InBandPairing => tools::in_band_pairing(lane).await,
        Check::InBandParallel => tools::in_band_parallel(lane).await,
        Check::ResultWhole => tools::result_whole(lane).await,
        Check::EndTurn => tools::end_turn(lane).await,
        Check::UnparsedInput => tools::unparsed_input(lane).await,
        Check::MaxTurnsHandOff => tools::max_turns_hand_off(lane).await,
        Check::FramesOrder => frames::order(lane).await,
        Check::FramesAcknowledged => frames::acknowledged(lane).await,
        Check::FramesThinking => frames::thinking(lane).await,
        Check::FramesLive => frames::live(lane).await,
        Check::ClientComposed => frames::client_composed(lane).await,
        Check::ExtraBodyLive => live::extra_body(lane).await,
        Check::SystemPromptLive => live::system_prompt(lane).await,
        Check::ModelChangeClean => live::model_change_clean(lane).await,
        Check::EffortLive => live::effort(lane).await,
        Check::RewindAfterInterrupt => live::rewind_after_interrupt(lane).await,
        Check::RewindAfterFailure => live::rewind_after_failure(lane).await,
        Check::InterruptCloses => live::interrupt_closes(lane).await,
        Check::CancelQueued => live::cancel_queued(lane).await,
        Check::ResumeAt => sessions::resume_at(lane).await,
        Check::ResumeParked => sessions::resume_parked(lane).await,
        Check::ForkAt => sessions::fork_at(lane).await,
        Check::PromptSnapshotOff => sessions::prompt_snapshot_off(lane).await,
        Check::OneRequest => requests::one(lane).await,
        Check::CacheBreakpoints => requests::cache_breakpoints(lane).await,
        Check::BlockingLimitGate => requests::blocking_limit_gate(lane).await,
        Check::Refusal410 => requests::refused_with_410(lane).await,
        Check::Readmission401 => requests::readmission_after_401(lane).await,
        Check::RetriesOff => requests::retries_off(lane).await,
        Check::FallbackOff => requests::fallback_off(lane).await,
        Check::RefusalOnce => requests::refusal_once(lane).await,
        Check::StopAfterCut => requests::stop_after_cut(lane).await,
        Check::BudgetStop => requests::budget_stop(lane).await,
    }
}
