use std::collections::BTreeMap;

use super::*;

const ELF: &[u8] = b"\x7fELF\x02\x01";

/// A file system in a map; links lead to another entry.
#[derive(Default)]
struct Fake {
    nodes: BTreeMap<PathBuf, Node>,
    links: BTreeMap<PathBuf, PathBuf>,
}

impl Fake {
    fn file(mut self, path: &str, executable: bool, head: &[u8]) -> Self {
        let head = head.to_vec();
        self.nodes
            .insert(path.into(), Node::File { executable, head });
        self
    }

    fn program(self, path: &str) -> Self {
        self.file(path, true, ELF)
    }

    fn link(mut self, from: &str, to: &str) -> Self {
        self.links.insert(from.into(), to.into());
        self
    }

    fn directory(mut self, path: &str) -> Self {
        self.nodes.insert(path.into(), Node::Directory);
        self
    }
}

impl Probe for Fake {
    fn node(&self, path: &Path) -> Node {
        match self.links.get(path) {
            Some(target) => self.nodes.get(target).cloned().unwrap_or(Node::Dangling),
            None => self.nodes.get(path).cloned().unwrap_or(Node::Missing),
        }
    }

    fn canonical(&self, path: &Path) -> Option<PathBuf> {
        let target = self.links.get(path).map(PathBuf::as_path).unwrap_or(path);
        self.nodes.contains_key(target).then(|| target.to_owned())
    }

    fn names(&self, dir: &Path) -> Vec<String> {
        let below = self
            .nodes
            .keys()
            .filter_map(|path| path.strip_prefix(dir).ok());
        let names = below.filter_map(|rest| Some(rest.iter().next()?.to_str()?.to_owned()));
        names.collect()
    }
}

fn find(fake: &Fake, vars: &[(&str, &str)]) -> Result<Executable> {
    find_for(fake, vars, None, Platform::Linux)
}

fn find_for(
    fake: &Fake,
    vars: &[(&str, &str)],
    setting: Option<&str>,
    platform: Platform,
) -> Result<Executable> {
    let ours = vars.iter().copied().collect();
    let places = Places::new(setting.map(Path::new), &ours, platform);
    locate(&places, platform, fake)
}

fn found(fake: &Fake, vars: &[(&str, &str)]) -> (Rule, String) {
    let executable = find(fake, vars).unwrap();
    (
        executable.rule,
        executable.path.to_str().unwrap().to_owned(),
    )
}

const HOME: (&str, &str) = ("HOME", "/home/a");
const PATH: (&str, &str) = ("PATH", "/usr/bin:/bin");

#[test]
fn bug_031_each_rule_finds_it_and_says_so() {
    for (rule, path) in [
        (Rule::SearchPath, "/bin/claude"),
        (Rule::LocalBin, "/home/a/.local/bin/claude"),
        (Rule::NpmGlobal, "/home/a/.npm-global/bin/claude"),
        (Rule::Nvm, "/home/a/.nvm/versions/node/v22.1.0/bin/claude"),
        (Rule::Volta, "/home/a/.volta/bin/claude"),
        (Rule::Mise, "/home/a/.local/share/mise/shims/claude"),
        (Rule::Homebrew, "/opt/homebrew/bin/claude"),
        (Rule::Homebrew, "/usr/local/bin/claude"),
        (Rule::Homebrew, "/home/linuxbrew/.linuxbrew/bin/claude"),
    ] {
        let fake = Fake::default().program(path);
        assert_eq!(found(&fake, &[HOME, PATH]), (rule, path.to_owned()));
    }
}

#[test]
fn bug_031_folders_that_tools_name_are_honoured() {
    for (name, rule, path) in [
        ("NPM_CONFIG_PREFIX", Rule::NpmGlobal, "/x/bin/claude"),
        ("NVM_DIR", Rule::Nvm, "/x/versions/node/v1.2.3/bin/claude"),
        ("VOLTA_HOME", Rule::Volta, "/x/bin/claude"),
        ("MISE_DATA_DIR", Rule::Mise, "/x/shims/claude"),
    ] {
        let fake = Fake::default().program(path);
        assert_eq!(found(&fake, &[HOME, (name, "/x")]), (rule, path.to_owned()));
    }
}

#[test]
fn the_order_of_the_rules() {
    let mut fake = Fake::default();
    let mut found_now = Vec::new();
    for path in [
        "/usr/local/bin/claude",
        "/home/a/.local/share/mise/shims/claude",
        "/home/a/.volta/bin/claude",
        "/home/a/.nvm/versions/node/v22.1.0/bin/claude",
        "/home/a/.npm-global/bin/claude",
        "/home/a/.local/bin/claude",
        "/bin/claude",
        "/usr/bin/claude",
    ] {
        fake = fake.program(path);
        let (rule, at) = found(&fake, &[HOME, PATH]);
        assert_eq!(at, path);
        found_now.push(rule);
    }
    assert!(found_now.is_sorted_by(|later, earlier| later >= earlier));
    fake = fake.program("/v/claude").program("/s/claude");
    let vars = [HOME, PATH, (PATH_VARIABLE, "/v/claude")];
    assert_eq!(
        found(&fake, &vars),
        (Rule::Variable, "/v/claude".to_owned())
    );
    let both = find_for(&fake, &vars, Some("/s/claude"), Platform::Linux).unwrap();
    assert_eq!(both.rule, Rule::Setting);
}

#[test]
fn nvm_gives_the_newest_version_by_number() {
    let fake = ["v9.0.0", "v22.2.0", "v22.10.0", "v22.10.0-rc", "default"]
        .iter()
        .fold(Fake::default(), |fake, version| {
            fake.program(&format!("/home/a/.nvm/versions/node/{version}/bin/claude"))
        });
    assert!(found(&fake, &[HOME]).1.contains("v22.10.0/"));
}

#[test]
fn relative_folders_are_passed_over() {
    let fake = Fake::default()
        .program("bin/claude")
        .program("claude")
        .program("/bin/claude");
    let vars = [("PATH", "bin:.::/bin")];
    assert_eq!(
        found(&fake, &vars),
        (Rule::SearchPath, "/bin/claude".to_owned())
    );
}

#[test]
fn nothing_anywhere_is_missing() {
    let error = find(&Fake::default(), &[HOME, PATH]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ExecutableMissing);
    let error = find(&Fake::default(), &[]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ExecutableMissing);
}

#[test]
fn an_explicit_path_never_falls_through() {
    let fake = Fake::default()
        .program("/bin/claude")
        .directory("/dir")
        .file("/plain", false, ELF)
        .file("/stub", true, b"echo install me\n")
        .link("/dangling", "/gone");
    for (path, code, words) in [
        ("/absent", ErrorCode::ExecutableMissing, "does not exist"),
        ("claude", ErrorCode::ExecutableMissing, "absolute"),
        ("/dir", ErrorCode::ExecutableUnusable, "directory"),
        ("/plain", ErrorCode::ExecutableUnusable, "permissions"),
        (
            "/stub",
            ErrorCode::ExecutableUnusable,
            "not runnable (exec format)",
        ),
        (
            "/dangling",
            ErrorCode::ExecutableUnusable,
            "link to nothing",
        ),
    ] {
        let by_variable = find(&fake, &[PATH, (PATH_VARIABLE, path)]).unwrap_err();
        let by_setting = find_for(&fake, &[PATH], Some(path), Platform::Linux).unwrap_err();
        assert!(
            by_variable.detail().contains(PATH_VARIABLE),
            "{by_variable}"
        );
        for error in [by_variable, by_setting] {
            assert_eq!(error.code(), code, "{error}");
            assert!(error.detail().contains(words), "{error}");
            assert!(error.detail().contains(path), "{error}");
        }
    }
}

#[test]
fn bug_025_what_cannot_run_is_passed_over_and_told() {
    let stub = Fake::default().file(
        "/usr/bin/claude",
        true,
        b"echo \"Error: claude native binary not installed.\"",
    );
    let error = find(&stub, &[HOME, PATH]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ExecutableUnusable);
    assert!(
        error
            .to_string()
            .contains("/usr/bin/claude (from PATH) is installed but not runnable (exec format)")
    );
    assert!(!error.to_string().contains("signed in"));

    let both = stub.program("/home/a/.local/bin/claude");
    let executable = find(&both, &[HOME, PATH]).unwrap();
    assert_eq!(executable.rule, Rule::LocalBin);
    assert_eq!(
        executable.skipped,
        [Skipped {
            path: "/usr/bin/claude".into(),
            rule: Rule::SearchPath,
            why: Unusable::ExecFormat,
        }]
    );
}

#[test]
fn bug_025_a_program_for_another_system_is_no_program() {
    let heads: [(Platform, &[u8]); 3] = [
        (Platform::Linux, ELF),
        (Platform::MacOs, &[0xcf, 0xfa, 0xed, 0xfe, 7]),
        (Platform::Windows, b"MZ\x90"),
    ];
    for (platform, _) in heads {
        for (owner, head) in heads {
            let name = format!("/bin/{}", platform.native_name());
            let fake = Fake::default().file(&name, true, head);
            let runs = find_for(&fake, &[("PATH", "/bin")], None, platform).is_ok();
            assert_eq!(runs, owner == platform, "{platform:?} {owner:?}");
        }
    }
}

#[test]
fn bug_025_the_npm_placeholder_leads_to_the_package_beside_it() {
    let placeholder = "/usr/lib/node_modules/@anthropic-ai/claude-code/bin/claude.exe";
    let with = |native: &str| {
        Fake::default()
            .link("/usr/bin/claude", placeholder)
            .file(placeholder, true, b"echo \"Error\"")
            .program(native)
    };
    let package = Platform::Linux.packages()[0];
    for native in [
        format!("/usr/lib/node_modules/@anthropic-ai/{package}/claude"),
        format!(
            "/usr/lib/node_modules/@anthropic-ai/claude-code/node_modules/@anthropic-ai/{package}/claude"
        ),
    ] {
        assert_eq!(found(&with(&native), &[PATH]), (Rule::SearchPath, native));
    }
}

#[test]
fn a_link_to_the_program_is_kept_as_it_is() {
    let fake = Fake::default()
        .link(
            "/home/a/.local/bin/claude",
            "/home/a/.local/share/claude/versions/2.1.332",
        )
        .program("/home/a/.local/share/claude/versions/2.1.332");
    assert_eq!(found(&fake, &[HOME]).1, "/home/a/.local/bin/claude");
}

#[test]
fn bug_031_a_script_needs_its_interpreter() {
    let script = |first: &str| {
        Fake::default()
            .file("/n/bin/claude", true, format!("{first}\nrest").as_bytes())
            .program("/usr/bin/env")
    };
    let vars = [("PATH", "/usr/bin:/n/bin")];
    let missing = |fake: &Fake| match find(fake, &vars) {
        Ok(_) => None,
        Err(error) => Some(error.detail().to_owned()),
    };
    let env_node = script("#!/usr/bin/env node");
    assert!(missing(&env_node).unwrap().contains("a script for node"));
    assert_eq!(missing(&env_node.program("/n/bin/node")), None, "beside it");
    let flags = script("#!/usr/bin/env -S A=1 node --x").program("/usr/bin/node");
    assert_eq!(missing(&flags), None, "on the path");
    assert!(
        missing(&script("#!/opt/node"))
            .unwrap()
            .contains("/opt/node")
    );
    assert_eq!(
        missing(&script("#! /opt/node -x").program("/opt/node")),
        None
    );
    assert!(missing(&script("#!")).is_some());
}

#[test]
fn bug_030_a_batch_shim_leads_to_the_native_program() {
    let npm = "/c/Users/a/AppData/Roaming/npm";
    let shims = || {
        Fake::default()
            .file(&format!("{npm}/claude"), true, b"#!/bin/sh")
            .file(&format!("{npm}/claude.cmd"), true, b"@ECHO off")
            .file(&format!("{npm}/claude.ps1"), true, b"#!/usr/bin/env pwsh")
    };
    let vars = [("APPDATA", "/c/Users/a/AppData/Roaming")];
    let package = Platform::Windows.packages()[0];
    for native in [
        format!("{npm}/node_modules/@anthropic-ai/claude-code/bin/claude.exe"),
        format!("{npm}/node_modules/@anthropic-ai/{package}/claude.exe"),
        format!(
            "{npm}/node_modules/@anthropic-ai/claude-code/node_modules/@anthropic-ai/{package}/claude.exe"
        ),
    ] {
        let fake = shims().file(&native, true, b"MZ");
        let executable = find_for(&fake, &vars, None, Platform::Windows).unwrap();
        assert_eq!(
            (executable.rule, executable.path),
            (Rule::NpmGlobal, native.into())
        );
    }
    let error = find_for(&shims(), &vars, None, Platform::Windows).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ExecutableUnusable);
    assert!(error.detail().contains("batch file"), "{error}");
}

#[test]
fn the_disk_is_seen_as_it_is() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "#!/bin/sh\n").unwrap();
    assert!(matches!(
        Disk.node(&at("file")),
        Node::File {
            executable: false,
            ..
        }
    ));
    fs::set_permissions(at("file"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink(at("file"), at("link")).unwrap();
    symlink(at("gone"), at("dangling")).unwrap();
    let file = Node::File {
        executable: true,
        head: b"#!/bin/sh\n".to_vec(),
    };
    assert_eq!(Disk.node(&at("link")), file);
    assert_eq!(Disk.node(&at("dangling")), Node::Dangling);
    assert_eq!(Disk.node(&at("absent")), Node::Missing);
    assert_eq!(Disk.node(dir.path()), Node::Directory);
    let mut names = Disk.names(dir.path());
    names.sort();
    assert_eq!(names, ["dangling", "file", "link"]);

    let ours = Snapshot::from_iter([("PATH", dir.path())]);
    fs::rename(at("file"), at("claude")).unwrap();
    let executable = locate_here(None, &ours).unwrap();
    assert_eq!(
        (executable.rule, executable.path),
        (Rule::SearchPath, at("claude"))
    );
}
