//! Conversations on disk, so that an emulated session can be resumed and forked.
//!
//! The place is that of the real CLI, the form our own: one JSON object a line, the first with the
//! system prompt.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::flags::Flags;
use super::state::Entry;

/// What a call says whose result a resume does not find.
pub(crate) const MISSING: &str = "[Tool result missing due to internal error]";

/// A stored conversation.
#[derive(Debug, Default)]
pub(crate) struct Saved {
    pub(crate) system_prompt: Option<String>,
    pub(crate) history: Vec<Entry>,
}

/// Where a run keeps its conversation, and what it begins with.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) session_id: String,
    /// `None` with `--no-session-persistence`.
    pub(crate) file: Option<PathBuf>,
    pub(crate) saved: Saved,
}

/// Why a session cannot be opened: printed on stderr and, for the first kind, as a result record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    NotFound(String),
    InUse(String),
}

/// The folder of all conversations; `None` without a home, when nothing is kept.
pub(crate) fn projects_dir() -> Option<PathBuf> {
    let named = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let config = named("CLAUDE_CONFIG_DIR").or_else(|| Some(named("HOME")?.join(".claude")));
    config.map(|dir| dir.join("projects"))
}

/// Opens what the flags name.
pub(crate) fn open(projects: &Path, cwd: &Path, flags: &Flags) -> Result<Opened, Refused> {
    let folder: String = cwd
        .to_string_lossy()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let place = |id: &str| projects.join(&folder).join(format!("{id}.jsonl"));
    let keep = !flags.has("--no-session-persistence");
    let fresh = || uuid::Uuid::new_v4().to_string();
    let asked = flags.value("--session-id");
    let resumed = flags.value("--resume").or(flags.value("-r"));
    let Some(resumed) = resumed else {
        let session_id = asked.map_or_else(fresh, str::to_owned);
        if asked.is_some() && find(projects, &session_id).is_some() {
            return Err(Refused::InUse(format!(
                "Error: Session ID {session_id} is already in use."
            )));
        }
        let file = keep.then(|| place(&session_id));
        return Ok(Opened {
            session_id,
            file,
            saved: Saved::default(),
        });
    };
    let missing = || Refused::NotFound(format!("No conversation found with session ID: {resumed}"));
    let found = find(projects, resumed).ok_or_else(missing)?;
    let mut saved = load(&found).map_err(|_| missing())?;
    match flags.value("--resume-session-at") {
        Some(at) => {
            let here = saved.history.iter().position(|entry| entry.uuid == at);
            let missing =
                || Refused::NotFound(format!("No message found with message.uuid of: {at}"));
            saved.history.truncate(here.ok_or_else(missing)? + 1);
            answer_calls(&mut saved.history, MISSING);
        }
        None => repair(&mut saved.history),
    }
    if flags.value("--system-prompt-snapshot") == Some("off") {
        saved.system_prompt = None;
    }
    let fork = flags.has("--fork-session");
    let session_id = if fork {
        asked.map_or_else(fresh, str::to_owned)
    } else {
        resumed.to_owned()
    };
    let file = if fork { place(&session_id) } else { found };
    Ok(Opened {
        session_id,
        file: keep.then_some(file),
        saved,
    })
}

/// A session is found from any working directory, as in the real CLI.
fn find(projects: &Path, id: &str) -> Option<PathBuf> {
    let name = format!("{id}.jsonl");
    let folders = std::fs::read_dir(projects).ok()?.flatten();
    folders
        .map(|folder| folder.path().join(&name))
        .find(|path| path.is_file())
}

/// A turn that was never finished: its calls get a result, and the model is said to have said nothing.
fn repair(history: &mut Vec<Entry>) {
    let answered = answer_calls(
        history,
        "[Tool call interrupted: the session ended before its result]",
    );
    let unanswered = history
        .last()
        .is_some_and(|last| last.message["role"] == "user" && !last.frame);
    if answered || unanswered {
        let text = json!([{"type": "text", "text": "No response requested."}]);
        history.push(entry(json!({"role": "assistant", "content": text})));
    }
}

/// Gives the calls of a last assistant message a result; false when there are none.
fn answer_calls(history: &mut Vec<Entry>, text: &str) -> bool {
    let blocks = history
        .last()
        .and_then(|last| last.message["content"].as_array());
    let calls = blocks
        .into_iter()
        .flatten()
        .filter(|block| block["type"] == "tool_use");
    let results: Vec<Value> = calls
        .map(|call| json!({"type": "tool_result", "content": text, "is_error": true, "tool_use_id": call["id"]}))
        .collect();
    if results.is_empty() {
        return false;
    }
    history.push(entry(json!({"role": "user", "content": results})));
    true
}

fn entry(message: Value) -> Entry {
    Entry {
        uuid: uuid::Uuid::new_v4().to_string(),
        message,
        frame: false,
    }
}

fn load(path: &Path) -> io::Result<Saved> {
    let mut saved = Saved::default();
    for line in std::fs::read_to_string(path)?.lines() {
        let row: Value = serde_json::from_str(line)?;
        match row["uuid"].as_str() {
            Some(uuid) => saved.history.push(Entry {
                uuid: uuid.to_owned(),
                message: row["message"].clone(),
                frame: row["frame"] == true,
            }),
            None => saved.system_prompt = row["system_prompt"].as_str().map(str::to_owned),
        }
    }
    Ok(saved)
}

/// Writes the whole conversation; under another name first, so that a reader never sees half of it.
pub(crate) fn save(path: &Path, system_prompt: Option<&str>, history: &[Entry]) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let draft = path.with_extension(format!("draft-{}", std::process::id()));
    let mut out = io::BufWriter::new(std::fs::File::create(&draft)?);
    writeln!(out, "{}", json!({"system_prompt": system_prompt}))?;
    for entry in history {
        let row = json!({"uuid": entry.uuid, "message": entry.message, "frame": entry.frame});
        writeln!(out, "{row}")?;
    }
    out.into_inner().map_err(io::IntoInnerError::into_error)?;
    std::fs::rename(draft, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(line: &[&str]) -> Flags {
        Flags::parse(&line.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn said(role: &str, uuid: &str) -> Entry {
        let content = json!([{"type": "text", "text": uuid}]);
        Entry {
            uuid: uuid.to_owned(),
            message: json!({"role": role, "content": content}),
            frame: false,
        }
    }

    #[test]
    fn a_session_is_resumed_cut_and_forked() {
        let dir = tempfile::tempdir().unwrap();
        let here = Path::new("/some/project");
        let first = open(dir.path(), here, &flags(&["--session-id", "s1"])).unwrap();
        let file = first.file.unwrap();
        assert!(file.ends_with("-some-project/s1.jsonl"));
        let history = [
            said("user", "u1"),
            said("assistant", "a1"),
            said("user", "u2"),
        ];
        save(&file, Some("prompt"), &history).unwrap();

        let again = open(
            dir.path(),
            Path::new("/elsewhere"),
            &flags(&["--resume", "s1"]),
        )
        .unwrap();
        assert_eq!(again.saved.system_prompt.as_deref(), Some("prompt"));
        assert_eq!(
            again.saved.history.len(),
            4,
            "the unanswered message is repaired"
        );
        assert_eq!(again.file, Some(file.clone()));
        let cut = flags(&[
            "--resume",
            "s1",
            "--resume-session-at",
            "a1",
            "--fork-session",
            "--system-prompt-snapshot",
            "off",
        ]);
        let fork = open(dir.path(), here, &cut).unwrap();
        assert_ne!(fork.session_id, "s1");
        assert_eq!(
            (fork.saved.history.len(), fork.saved.system_prompt),
            (2, None)
        );
        let in_use = open(dir.path(), here, &flags(&["--session-id", "s1"])).unwrap_err();
        assert!(matches!(in_use, Refused::InUse(_)));
        let missing = open(dir.path(), here, &flags(&["--resume", "s2"])).unwrap_err();
        assert_eq!(
            missing,
            Refused::NotFound("No conversation found with session ID: s2".to_owned())
        );
        let at = flags(&["--resume", "s1", "--resume-session-at", "zz"]);
        assert!(
            matches!(open(dir.path(), here, &at).unwrap_err(), Refused::NotFound(text) if text.contains("message.uuid of: zz"))
        );
        let quiet = open(
            dir.path(),
            here,
            &flags(&["--resume", "s1", "--no-session-persistence"]),
        )
        .unwrap();
        assert_eq!(quiet.file, None);
    }

    #[test]
    fn a_call_without_a_result_gets_one() {
        let call = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t1"}]});
        let mut history = vec![
            said("user", "u1"),
            Entry {
                uuid: "a".into(),
                message: call,
                frame: false,
            },
        ];
        repair(&mut history);
        assert_eq!(history[2].message["content"][0]["tool_use_id"], "t1");
        assert_eq!(history[3].message["role"], "assistant");
    }
}
