use std::collections::BTreeSet;

use super::*;

fn base<'a>() -> Base<'a> {
    Base {
        program: Path::new("/opt/claude/bin/claude"),
        tmp: Path::new("/private/tmp"),
        time_zone: None,
        inherited: InheritedCredentials::Strip,
    }
}

fn build(pairs: &[(&str, &str)]) -> Environment {
    Environment::build(&pairs.iter().copied().collect(), base()).unwrap()
}

fn text<'a>(environment: &'a Environment, name: &str) -> &'a str {
    environment.get(name).unwrap_or_default().to_str().unwrap()
}

#[test]
fn an_empty_environment_gives_exactly_this() {
    let child = build(&[]);
    let names: Vec<_> = child.names().map(|name| name.to_str().unwrap()).collect();
    let mut wanted: Vec<_> = ["PATH", "TMPDIR", "NO_PROXY", "no_proxy"].into();
    wanted.extend(EVERYWHERE.iter().map(|switch| switch.name));
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

#[test]
fn each_listed_name_is_inherited_as_it_is() {
    for (name, _) in INHERITED {
        assert_eq!(
            text(&build(&[(name, "a value")]), name),
            "a value",
            "{name}"
        );
        assert_eq!(build(&[(name, "")]).get(name), None, "{name} empty");
    }
    for name in ["LC_ALL", "LC_CTYPE", "LC_TIME"] {
        assert_eq!(text(&build(&[(name, "de_AT.UTF-8")]), name), "de_AT.UTF-8");
    }
}

#[test]
fn bug_032_credentials_backends_and_markers_are_gone() {
    let hostile = [
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_CUSTOM_HEADERS",
        "ANTHROPIC_BETAS",
        "ANTHROPIC_MODEL",
        "ANTHROPIC_PROFILE",
        "ANTHROPIC_FEDERATION_RULE_ID",
        "ANTHROPIC_UNIX_SOCKET",
        "AWS_ACCESS_KEY_ID",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_VERTEX",
        "CLAUDE_CODE_USE_FOUNDRY",
        "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST",
        "CLAUDE_CODE_ENTRYPOINT",
        "CLAUDE_CODE_SIMPLE",
        "CLAUDE_CODE_EXTRA_BODY",
        "CLAUDE_CODE_EFFORT_LEVEL",
        "CLAUDE_CODE_RETRY_WATCHDOG",
        "NODE_OPTIONS",
        "LD_PRELOAD",
        "DYLD_INSERT_LIBRARIES",
        "XDG_RUNTIME_DIR",
    ];
    let pairs = hostile.map(|name| (name, "1"));
    assert_eq!(build(&pairs), build(&[]));
}

#[test]
fn bug_033_marks_of_a_surrounding_session_are_gone() {
    let inside = [
        ("CLAUDECODE", "1"),
        ("CLAUDE_CODE_SSE_PORT", "1"),
        ("CLAUDE_CODE_SESSION_ID", "1"),
        ("CLAUDE_CODE_MESSAGING_SOCKET", "1"),
        ("CLAUDE_CODE_MESSAGING_TOKEN", "1"),
        ("CLAUDE_CODE_CHILD_NOTES_DIR", "1"),
        ("CLAUDE_PROJECT_DIR", "1"),
        ("AI_AGENT", "1"),
    ];
    assert_eq!(build(&inside), build(&[]));
}

#[test]
fn bug_032_refuse_names_the_variable() {
    for name in REFUSED_NAMES {
        let ours = Snapshot::from_iter([(name, "marker")]);
        let refuse = Base {
            inherited: InheritedCredentials::Refuse,
            ..base()
        };
        let error = Environment::build(&ours, refuse).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InheritedCredentials);
        assert_eq!(error.detail(), format!("{name} is set"));
        let empty = Snapshot::from_iter([(name, "")]);
        assert!(Environment::build(&empty, refuse).is_ok(), "{name} empty");
    }
}

#[test]
fn bug_034_loopback_never_goes_to_a_proxy() {
    let both = |pairs: &[(&str, &str)]| {
        let child = build(pairs);
        assert_eq!(text(&child, "NO_PROXY"), text(&child, "no_proxy"));
        text(&child, "NO_PROXY").to_owned()
    };
    let loopback = "127.0.0.1,localhost,::1";
    assert_eq!(both(&[]), loopback);
    let proxy = [("HTTP_PROXY", "http://p:1"), ("https_proxy", "http://p:2")];
    assert_eq!(both(&proxy), loopback);
    assert_eq!(
        both(&[("NO_PROXY", "example.com")]),
        format!("example.com,{loopback}")
    );
    assert_eq!(both(&[("no_proxy", "a, b")]), format!("a,b,{loopback}"));
    let mixed = [("NO_PROXY", "a,localhost"), ("no_proxy", "b,a")];
    assert_eq!(both(&mixed), "a,localhost,b,127.0.0.1,::1");
    assert_eq!(both(&[("NO_PROXY", "*")]), "*");
    assert_eq!(both(&[("no_proxy", "a,*")]), "*");
}

#[test]
fn bug_031_the_programs_own_folder_leads_the_path() {
    let path = |ours: &[(&str, &str)]| text(&build(ours), "PATH").to_owned();
    assert_eq!(path(&[]), format!("/opt/claude/bin:{DEFAULT_PATH}"));
    assert_eq!(path(&[("PATH", "/bin")]), "/opt/claude/bin:/bin");
    assert_eq!(
        path(&[("PATH", "/bin:/opt/claude/bin")]),
        "/opt/claude/bin:/bin"
    );
}

#[test]
fn bug_035_the_configuration_folder_is_passed_on_unchanged() {
    for value in ["/srv/claude", "relative/dir", "~/.claude"] {
        assert_eq!(
            text(&build(&[("CLAUDE_CONFIG_DIR", value)]), "CLAUDE_CONFIG_DIR"),
            value
        );
    }
    assert_eq!(build(&[]).get("CLAUDE_CONFIG_DIR"), None);
}

#[test]
fn the_time_zone_is_the_sessions_else_ours() {
    let ours = Snapshot::from_iter([("TZ", "Europe/Vienna")]);
    let zone = |time_zone| {
        let child = Environment::build(
            &ours,
            Base {
                time_zone,
                ..base()
            },
        )
        .unwrap();
        text(&child, "TZ").to_owned()
    };
    assert_eq!(zone(Some("Asia/Tokyo")), "Asia/Tokyo");
    assert_eq!(zone(None), "Europe/Vienna");
    assert_eq!(build(&[]).get("TZ"), None);
}

#[test]
fn temporary_files_are_private() {
    assert_eq!(
        text(&build(&[("TMPDIR", "/tmp")]), "TMPDIR"),
        "/private/tmp"
    );
}

#[test]
fn each_switch_stands_once_and_none_is_forbidden() {
    let all: Vec<_> = EVERYWHERE.iter().chain(RELAY).collect();
    let names: BTreeSet<_> = all.iter().map(|switch| switch.name).collect();
    assert_eq!(names.len(), all.len());
    for (name, _) in NEVER_SET.iter().chain(INHERITED) {
        assert!(!names.contains(name), "{name}");
    }
    assert!(all.iter().all(|switch| switch.reason.len() > 10));
}

/// The exact values, so that no line is lost or added without somebody saying why.
#[test]
fn the_switches_are_exactly_these() {
    let line = |switch: &Switch| format!("{}={}", switch.name, switch.value);
    let everywhere: Vec<_> = EVERYWHERE.iter().map(line).collect();
    assert_eq!(
        everywhere,
        [
            "DISABLE_TELEMETRY=1",
            "DISABLE_AUTOUPDATER=1",
            "CLAUDE_CODE_DISABLE_FAST_MODE=1",
            "CLAUDE_CODE_DISABLE_AUTO_MEMORY=1",
            "CLAUDE_CODE_DISABLE_CLAUDE_MDS=1",
            "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS=1",
            "CLAUDE_CODE_SILENT_TURN_REMINDER=0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off",
            "CLAUDE_CODE_TODO_REMINDER_MODE=off",
            "DISABLE_COMPACT=1",
            "DISABLE_AUTO_COMPACT=1",
            "ENABLE_TOOL_SEARCH=false",
            "CLAUDE_CODE_MAX_MCP_DESCRIPTION_LENGTH=100000",
            "MCP_PROTOCOL_NEGOTIATION=legacy",
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK=1",
            "CLAUDE_CODE_DISABLE_REFUSAL_RETRY=1",
            "CLAUDE_CODE_DISABLE_REFUSAL_FALLBACK=1",
        ]
    );
    let relay: Vec<_> = RELAY.iter().map(line).collect();
    assert_eq!(
        relay,
        [
            "CLAUDE_CODE_MAX_RETRIES=0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
            "CLAUDE_CODE_DISABLE_ATTACHMENTS=1",
            "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE=50000000",
        ]
    );
}

#[test]
fn values_are_not_printed() {
    let child = build(&[("HTTPS_PROXY", "http://user:marker@proxy")]);
    assert!(!format!("{child:?}").contains("marker"));
}
