//! What the CLI shows and must not show, and what is refused before it is started.

use serde_json::json;
use turnpass::ErrorCode;
use turnpass::conversation::{Block, Image, Message, Role, Source};
use turnpass::event::Event;
use turnpass::request::Request;

use crate::bench::{Answer, body, say, tool};
use crate::ground::{Ground, Setup, script};
use crate::suite::private_dirs;

/// A ground whose CLI is started by a script with these lines in front, which may change the arguments.
fn started_by(setup: &Setup, before: &str) -> Ground {
    let cli = std::fs::canonicalize(&setup.cli.path).unwrap();
    Ground::with(setup, |options, dir| {
        let text = format!(
            "#!/bin/sh\necho \"$$ $*\" >> '{}'\ndir='{}'\n\
             case \" $* \" in *' --max-turns '*)\n{before}\n;; esac\nexec '{}' \"$@\"\n",
            dir.join("spawns").display(),
            dir.display(),
            cli.display(),
        );
        options.claude_path = Some(script(dir, "breached", &text));
    })
}

/// Takes the built-in plugins out of the settings file that the command line names.
const ENABLE: &str = r#"last=; for word in "$@"; do
  [ "$last" = --settings ] && sed -i 's/"\(cc-plugin-\)\{0,1\}agents-md@builtin":false,\{0,1\}//g' "$word"
  last=$word
done"#;

/// One that slips through is learned and the request repeated once, before anything was told; one that stays fails it.
pub(crate) async fn replay_built_in_plugin_slips_through(setup: Setup) {
    let once = format!("if [ ! -e \"$dir/slipped\" ]; then : > \"$dir/slipped\"\n{ENABLE}\nfi");
    let ground = started_by(&setup, &once);
    let (answer, seen) = ground.ask(say("[[say fine]]")).await;
    assert_eq!(answer.text(), "fine");
    // The CLI tells of its plugins in the moment in which it asks: what the first start had sent is never read.
    assert!((1..=2).contains(&seen.len()), "{}", seen.len());
    assert_eq!(ground.spawned().len(), 2, "one start was repeated");
    let begun = answer.events.iter();
    let begun = begun.filter(|event| matches!(event, Event::Started { .. }));
    assert_eq!(begun.count(), 1, "nothing of the first was told");
    let (answer, _) = ground.ask(say("[[say again]]")).await;
    assert_eq!(answer.text(), "again");
    assert_eq!(ground.spawned().len(), 3, "it was learned for good");
    ground.finish().await;

    let ground = started_by(&setup, ENABLE);
    let (answer, seen) = ground.ask(say("[[say never]]")).await;
    let code = Some(ErrorCode::IsolationCustomizations);
    assert_eq!(answer.code(), code, "{:?}", answer.end);
    assert_eq!(ground.spawned().len(), 2);
    assert!(seen.len() <= 2, "{}", seen.len());
    assert!(told_nothing(&answer), "{:?}", answer.events);
    ground.finish().await;
}

/// Nothing of an answer: notices at most.
fn told_nothing(answer: &Answer) -> bool {
    let mut events = answer.events.iter();
    events.all(|event| matches!(event, Event::Notice(_)))
}

/// Each way of loosening the CLI's isolation is found in its first record, and the host is told nothing else. The CLI asks
/// in the same moment, so a request may have gone out, with a key two; what is answered is never read.
pub(crate) async fn replay_each_breach_fails_closed_with_its_code(setup: Setup) {
    let plugin = r#"mkdir -p "$dir/p/.claude-plugin" "$dir/p/commands"
printf '{"name":"foreign","version":"1.0.0","description":"x"}' > "$dir/p/.claude-plugin/plugin.json"
set -- "$@" --plugin-dir "$dir/p""#;
    let server = r#"printf '{"mcpServers":{"mine":{"type":"stdio","command":"/bin/false"}}}' > "$dir/mine.json"
set -- "$@" --mcp-config "$dir/mine.json""#;
    let without = |word: &str| {
        format!(
            "n=$#; while [ $n -gt 0 ]; do n=$((n-1)); word=$1; shift; [ \"$word\" = {word} ] || set -- \"$@\" \"$word\"; done"
        )
    };
    let cases = [
        (
            "a foreign plugin",
            plugin.to_owned(),
            ErrorCode::IsolationCustomizations,
        ),
        (
            "slash commands",
            without("--disable-slash-commands"),
            ErrorCode::IsolationCustomizations,
        ),
        (
            "tools of the CLI's own",
            r#"set -- "$@" --tools Bash,Read"#.to_owned(),
            ErrorCode::IsolationTools,
        ),
        (
            "a permission mode",
            r#"set -- "$@" --permission-mode default"#.to_owned(),
            ErrorCode::IsolationPermissions,
        ),
        (
            "a key",
            "export ANTHROPIC_API_KEY=made-up-key".to_owned(),
            ErrorCode::IsolationAuth,
        ),
        (
            "a foreign server",
            server.to_owned(),
            ErrorCode::IsolationMcp,
        ),
    ];
    let mut told = Vec::new();
    for (what, before, code) in cases {
        let ground = started_by(&setup, &before);
        let (answer, seen) = ground.ask(say("[[say never]]")).await;
        let closed = answer.code() == Some(code) && told_nothing(&answer) && seen.len() <= 2;
        told.push((what, closed, answer.code(), seen.len(), answer.events));
        ground.finish().await;
    }
    assert!(told.iter().all(|case| case.1), "{told:?}");
}

/// Above each limit: refused before a process or a file is made.
pub(crate) async fn replay_limits_are_refused_before_anything_is_started(setup: Setup) {
    const MIB: usize = 1024 * 1024;
    let ground = Ground::new(&setup);
    let image = |bytes: usize| {
        Block::Image(Image {
            source: Source::Base64 {
                media_type: "image/png".into(),
                data: "A".repeat(bytes.div_ceil(3) * 4),
            },
        })
    };
    let images = |count: usize, bytes: usize| {
        let content = vec![image(bytes); count];
        let mut request = say("x");
        request.messages = vec![Message {
            role: Role::User,
            content,
        }];
        request
    };
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = say("x");
        change(&mut request);
        request
    };
    let cases = [
        (
            "256 tools",
            with(&|r| r.tools = (0..257).map(|n| tool(&format!("t{n}"))).collect()),
            ErrorCode::ToolLimit,
        ),
        (
            "2 MiB of tools",
            with(&|r| r.tools[0].description = "d".repeat(2 * MIB)),
            ErrorCode::ToolCatalogSize,
        ),
        (
            "32 MiB of history",
            say(&"x".repeat(32 * MIB + 1)),
            ErrorCode::HistoryTooLarge,
        ),
        ("20 images", images(21, 3), ErrorCode::HistoryTooLarge),
        (
            "20 MiB of an image",
            images(1, 20 * MIB + 3),
            ErrorCode::RequestInvalid,
        ),
        (
            "100 MiB of images",
            images(6, 20 * MIB - 3),
            ErrorCode::HistoryTooLarge,
        ),
        (
            "no deadline",
            with(&|r| r.limits.idle = std::time::Duration::ZERO),
            ErrorCode::RequestInvalid,
        ),
        (
            "an empty name",
            with(&|r| r.tools[0].name = String::new()),
            ErrorCode::ToolInvalid,
        ),
    ];
    for (what, request, code) in cases {
        let (answer, seen) = ground.ask(request).await;
        assert_eq!((answer.code(), seen.len()), (Some(code), 0), "{what}");
        assert!(told_nothing(&answer), "{what}: {:?}", answer.events);
    }
    assert!(
        !ground.dir().join("spawns").exists(),
        "not even its version was asked for"
    );
    assert!(private_dirs(ground.dir()).is_empty());
    ground.finish().await;
}

/// Why there is no store of image files: `@"path"` puts an image in front of all text, so inline blocks are what keeps its
/// place. The day a version keeps it, this fails.
pub(crate) async fn replay_no_version_keeps_an_image_by_path_in_place(setup: Setup) {
    const PNG: &[u8] = &[
        0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44,
        0x52, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x01, 0x08, 0x06, 0x00, 0x00, 0x00, 0x1f,
        0x15, 0xc4, 0x89, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x44, 0x41, 0x54, 0x78, 0xda, 0x63, 0x64,
        0xf8, 0xcf, 0x50, 0x0f, 0x00, 0x03, 0x86, 0x01, 0x80, 0x5a, 0x34, 0x7d, 0x6b, 0x00, 0x00,
        0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82,
    ];
    let ground = Ground::new(&setup);
    let image = ground.dir().join("image.png");
    std::fs::write(&image, PNG).unwrap();
    let line = json!({"type": "user", "message": {"role": "user", "content": [
        {"type": "text", "text": "in front"},
        {"type": "text", "text": format!("here: @\"{}\" behind", image.display())},
    ]}});
    let output = asked_raw(&ground, &setup, &format!("{line}\n")).await;
    let sent = ground.up.messages();
    assert_eq!(sent.len(), 1, "{output}");
    let all = body(&sent[0])["messages"].to_string();
    let place = |what: &str| all.find(what);
    let (image, text) = (place("image/png"), place("in front"));
    assert!(image.is_some() && text.is_some(), "{all}");
    assert!(image < text, "it keeps its place now: {all}");
    ground.finish().await;
}

/// The CLI by itself, as a person's script would use it.
async fn asked_raw(ground: &Ground, setup: &Setup, line: &str) -> String {
    use tokio::io::AsyncWriteExt as _;
    let mut child = tokio::process::Command::new(std::fs::canonicalize(&setup.cli.path).unwrap())
        .args([
            "-p",
            "--input-format",
            "stream-json",
            "--output-format",
            "stream-json",
            "--verbose",
        ])
        .args([
            "--tools",
            "",
            "--setting-sources=",
            "--strict-mcp-config",
            "--no-session-persistence",
        ])
        .args(["--max-turns", "1", "--model", "sonnet"])
        .env_clear()
        .envs(ground.home.environment())
        .env("TMPDIR", ground.dir())
        .env("ANTHROPIC_BASE_URL", ground.up.url())
        .env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
        .current_dir(ground.dir())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(line.as_bytes()).await.unwrap();
    drop(input);
    let output = crate::bench::within("the CLI", child.wait_with_output())
        .await
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}
