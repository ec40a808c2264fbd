//! The pages: links lead somewhere, and the commands that a newcomer types are those that are run.

use crate::text::{File, repository, root};

/// Links of a page: the line and the target, without those that lead to the web.
fn links(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (index, line) in page.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        // Text between back-quotes is no link.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for (at, _) in prose.match_indices("](") {
            let target: String = prose[at + 2..].chars().take_while(|c| *c != ')').collect();
            if !target.contains("://") && !target.starts_with("mailto:") {
                found.push((index + 1, target));
            }
        }
    }
    found
}

/// The anchors of a page: its headings, as they are made into addresses.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            title
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

fn broken(page: &File, files: &[File]) -> Vec<String> {
    let folder = page.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut found = Vec::new();
    for (line, target) in links(&page.raw) {
        let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
        let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
        for part in path
            .split('/')
            .filter(|part| !part.is_empty() && *part != ".")
        {
            match part {
                ".." => {
                    parts.pop();
                }
                part => parts.push(part),
            }
        }
        let path = match path {
            "" => page.path.clone(),
            _ => parts.join("/"),
        };
        let file = files.iter().find(|file| file.path == path);
        let there = file.is_some() || root().join(&path).exists();
        let anchored = anchor.is_empty()
            || file.is_some_and(|file| anchors(&file.raw).iter().any(|known| known == anchor));
        if !there || !anchored {
            found.push(format!("{}:{line}: {target} leads nowhere", page.path));
        }
    }
    found
}

#[test]
fn links_lead_somewhere() {
    let files = repository();
    let pages = files.iter().filter(|file| file.path.ends_with(".md"));
    let found: Vec<String> = pages.flat_map(|page| broken(page, &files)).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let there = File::new("docs/there.md", "# A title: with marks\n");
    let page =
        "[a](there.md) [b](there.md#a-title-with-marks) [c](gone.md) [d](there.md#gone) `[e](x)`\n";
    let files = [there, File::new("docs/page.md", page)];
    let found = broken(&files[1], &files);
    assert_eq!(found.len(), 2, "{found:?}");
}

/// The first lines of the code blocks of a page.
fn commands(page: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in page.lines() {
        if line.starts_with("```") {
            inside = line == "```sh";
        } else if inside {
            found.push(line.split('#').next().unwrap_or_default().trim().to_owned());
        }
    }
    found
}

#[test]
fn the_two_commands_of_the_readme_are_those_that_ci_runs() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let ci = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    let commands = commands(&readme);
    assert_eq!(commands[0], "cargo run --release --bin turnpass -- demo");
    assert_eq!(commands[1], "./check");
    for command in &commands[..2] {
        assert!(
            ci.contains(command.as_str()),
            ".ci/run does not run {command}"
        );
    }
}

#[test]
fn nothing_depends_on_an_mcp_library() {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    assert!(
        !lock.contains("name = \"rmcp"),
        "MCP is our own: ARCHITECTURE.md says why"
    );
}
