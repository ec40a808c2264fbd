//! An agent whose conversation grows beyond its threshold, over any transport: one summary, at the price of one request, and
//! the work goes on from it.

use tokio_util::sync::CancellationToken;
use turnpass::Provider;
use turnpass_agent::{Agent, AgentEvent, Approvals, Compaction, Outcome, Threshold, tools};
use turnpass_lab::scenario::Reply;
use turnpass_lab::upstream::{Recorded, Upstream};

/// Above what a conversation has before anything was said, with the CLI's own part, and reached after a few prompts.
const DUE_TOKENS: u64 = 12_000;
/// Prompts that are given at the most until a summary is due.
const PROMPTS: usize = 12;
/// Words of one prompt, about as many tokens.
const WORDS: usize = 1_500;
/// What the scripted model writes as the summary.
const SUMMARY: &str = "what was done so far, in short";

/// Asks until a summary was due, and once more after it.
pub(crate) async fn summed_up(provider: Provider, up: &Upstream) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("note"), "a line of the note").unwrap();
    let mut agent = Agent::builder(provider.clone(), "sonnet")
        .directory(folder.path())
        .tools(tools::all())
        .approvals(Approvals::read_only())
        .compaction(Compaction {
            threshold: Some(Threshold::Tokens(DUE_TOKENS)),
            keep_tokens: 2_000,
            ..Compaction::default()
        })
        .build()
        .unwrap();
    let cancel = CancellationToken::new();
    let note = |event: AgentEvent| match event {
        // Said before the summary's request is made, so it is the one that gets this answer.
        AgentEvent::Compacting { .. } => up.enqueue(Reply::text(SUMMARY)),
        AgentEvent::CompactionFailed { error, .. } => panic!("{error}"),
        _ => {}
    };
    let (mut generations, mut compactions, mut asked) = (0, 0, 0);
    while compactions == 0 {
        assert!(asked < PROMPTS, "never due: {:?}", agent.history().len());
        let filler = "words ".repeat(WORDS);
        let prompt = format!(
            r#"prompt {asked} {filler} [[call read {{"path":"note"}}]] [[then [[say answer {asked}]]]]"#
        );
        let report = agent.run(prompt, &cancel, note).await;
        assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
        generations += report.generations;
        compactions += report.compactions;
        asked += 1;
    }
    let report = agent.run("[[say remembered]]", &cancel, note).await;
    assert!(matches!(report.outcome, Outcome::Completed), "{report:?}");
    assert_eq!(agent.history().last().unwrap().text(), "remembered");
    generations += report.generations;
    provider.shutdown().await.unwrap();

    let sent = up.messages();
    assert_eq!(
        sent.len(),
        usize::try_from(generations).unwrap(),
        "one request a generation"
    );
    let violations: Vec<_> = sent.iter().flat_map(|one| &one.violations).collect();
    assert!(violations.is_empty(), "{violations:?}");
    let has = |one: &Recorded, text: &str| String::from_utf8_lossy(&one.body).contains(text);
    let asks = |one: &&Recorded| has(one, "is about to be replaced by a summary");
    assert_eq!(
        sent.iter().filter(asks).count(),
        1,
        "the question stays in no conversation"
    );
    let at = sent.iter().position(|one| asks(&one)).unwrap();
    assert!(
        has(&sent[at], "prompt 0 words"),
        "the summary is of the beginning"
    );
    for after in &sent[at + 1..] {
        assert!(has(after, SUMMARY) && !has(after, "prompt 0 words"));
        assert!(after.body.len() < sent[at].body.len());
    }
    assert!(sent.len() > at + 1, "it went on");
}
