use super::*;
use std::path::PathBuf;

pub(in crate::record) fn recordings() -> Vec<(PathBuf, Vec<u8>)> {
    fn walk(folder: &std::path::Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                walk(&path, found);
            } else if name.ends_with(".ndjson") && !name.starts_with("stdin") {
                found.push((path.clone(), std::fs::read(&path).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    let lab = concat!(env!("CARGO_MANIFEST_DIR"), "/../turnpass-lab/fixtures");
    walk(lab.as_ref(), &mut found);
    assert!(found.len() > 80, "{}", found.len());
    found
}

pub(in crate::record) fn play(bytes: &[u8]) -> Replayed {
    let mut replay = Replay::new();
    for piece in bytes.chunks(1000) {
        replay.push(piece);
    }
    replay.finish()
}

#[test]
fn every_recording_of_the_laboratory_decodes() {
    let mut wrong = Vec::new();
    for (path, bytes) in recordings() {
        let replayed = play(&bytes);
        if replayed.standing == Standing::Broken {
            wrong.push(format!("{}: {:?}", path.display(), replayed.problems));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn both_forms_come_to_the_same() {
    let line = r#"{"type":"keep_alive"}"#;
    let rows = format!(
        "{{\"t\":1.5,\"dir\":\"out\",\"v\":{line}}}\n{{\"t\":2,\"dir\":\"in\",\"v\":{{\"type\":\"user\"}}}}\n"
    );
    let (bare, rows) = (play(line.as_bytes()), play(rows.as_bytes()));
    assert_eq!(bare.records["keep_alive"], 1);
    assert_eq!(bare.records, rows.records);
    assert_eq!((bare.lines, rows.lines, rows.other_rows), (1, 1, 1));
    assert_eq!(bare.standing, Standing::Decodes);
}

#[test]
fn what_is_new_is_told_apart_from_what_is_broken() {
    assert_eq!(play(b"").standing, Standing::Empty);
    let new = play(
        b"{\"type\":\"of_next_year\"}\nWarning: x\n\n{\"type\":\"system\",\"subtype\":\"mood\"}\n",
    );
    assert_eq!(new.standing, Standing::DecodesWithUnknown);
    assert_eq!(new.unknown["record:of_next_year"], 1);
    assert_eq!(new.unknown["system:mood"], 1);
    assert_eq!((new.noise["not_json"], new.noise["blank"]), (1, 1));
    let malformed = play(b"{\"type\":\"assistant\",\"message\":3}\n");
    assert_eq!(malformed.standing, Standing::Broken);
    assert!(malformed.problems[0].starts_with("line 1: a assistant record"));
    let order = concat!(
        r#"{"type":"stream_event","event":{"type":"content_block_stop","index":0}}"#,
        "\n",
        r#"{"type":"stream_event","event":{"type":"content_block_stop","index":1}}"#,
    );
    let order = play(order.as_bytes());
    assert_eq!((order.problem_count, order.standing), (1, Standing::Broken));
}
