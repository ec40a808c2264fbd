//! Who is alive, how much memory they use, and waiting until they are gone.
//!
//! On Linux from `/proc` and process descriptors; on macOS from `ps`, where the shared memory of a
//! process is not told apart ([`pss_bytes`] is then `None`) and waiting looks again at intervals.

use std::io;
use std::time::{Duration, Instant};

/// One process, at the moment of the look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its parent.
    pub parent: i32,
    /// Its process group.
    pub group: i32,
    /// Its session.
    pub session: i32,
    /// Its short name.
    pub name: String,
    /// It has ended and waits to be collected.
    pub zombie: bool,
}

/// The processes that belong together, zombies left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessTree {
    /// By process id.
    pub processes: Vec<Process>,
}

impl ProcessTree {
    /// Everybody in a process group.
    pub fn of_group(group: i32) -> ProcessTree {
        ProcessTree::of(|process| process.group == group)
    }

    /// Everybody in a session.
    pub fn of_session(session: i32) -> ProcessTree {
        ProcessTree::of(|process| process.session == session)
    }

    fn of(belongs: impl Fn(&Process) -> bool) -> ProcessTree {
        let mut processes = all();
        processes.retain(|process| !process.zombie && belongs(process));
        ProcessTree { processes }
    }

    /// Their ids.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.pid).collect()
    }

    /// The sum of their proportional memory. One that has ended since the look counts as nothing;
    /// `None` where none can be measured.
    pub fn pss_bytes(&self) -> Option<u64> {
        let measured = self
            .processes
            .iter()
            .filter_map(|process| pss_bytes(process.pid));
        measured.reduce(|sum, bytes| sum + bytes)
    }
}

/// Children, grandchildren and so on of a process that are alive. One whose parent has ended belongs to
/// another parent by then: use the group or the session to find those.
pub fn descendants(pid: i32) -> Vec<i32> {
    let everybody = all();
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        let children = everybody
            .iter()
            .filter(|process| process.parent == parent && !process.zombie);
        for child in children {
            if !found.contains(&child.pid) {
                found.push(child.pid);
            }
        }
        next += 1;
    }
    found.remove(0);
    found
}

/// The ids of the living members of a process group.
pub fn alive_in_group(group: i32) -> Vec<i32> {
    ProcessTree::of_group(group).pids()
}

/// Waits until none of `pids` is alive, or `bound` is over; gives those that still are.
///
/// A zombie counts as gone. Blocks the thread.
pub fn wait_gone(pids: &[i32], bound: Duration) -> Vec<i32> {
    let end = Instant::now() + bound;
    pids.iter()
        .copied()
        .filter(|pid| !wait_one(*pid, end))
        .collect()
}

#[cfg(target_os = "linux")]
fn all() -> Vec<Process> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|text| text.parse().ok()) else {
            continue;
        };
        // It may have ended since the directory was listed.
        if let Ok(stat) = std::fs::read_to_string(entry.path().join("stat"))
            && let Some(process) = parse_stat(pid, &stat)
        {
            found.push(process);
        }
    }
    found.sort_by_key(|process| process.pid);
    found
}

/// `pid (name) state parent group session ...`; the name may hold spaces and parentheses.
#[cfg(target_os = "linux")]
fn parse_stat(pid: i32, stat: &str) -> Option<Process> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let mut fields = tail.split_whitespace();
    let state = fields.next()?;
    let mut number = || fields.next()?.parse().ok();
    Some(Process {
        pid,
        parent: number()?,
        group: number()?,
        session: number()?,
        name: name.to_owned(),
        zombie: matches!(state, "Z" | "X"),
    })
}

#[cfg(not(target_os = "linux"))]
fn all() -> Vec<Process> {
    let output = std::process::Command::new("ps")
        .args(["-axo", "pid=,ppid=,pgid=,sess=,stat=,comm="])
        .output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let mut found: Vec<Process> = text
        .unwrap_or_default()
        .lines()
        .filter_map(parse_ps)
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

#[cfg(not(target_os = "linux"))]
fn parse_ps(line: &str) -> Option<Process> {
    let mut fields = line.split_whitespace();
    let mut number = || fields.next()?.parse().ok();
    let (pid, parent, group) = (number()?, number()?, number()?);
    let session = number().unwrap_or(0);
    let state = fields.next()?.to_owned();
    let name = fields.collect::<Vec<_>>().join(" ");
    Some(Process {
        pid,
        parent,
        group,
        session,
        name,
        zombie: state.starts_with('Z'),
    })
}

/// Proportional memory: its own, and its share of what it shares. `None` when the process is gone or
/// belongs to another user.
#[cfg(target_os = "linux")]
pub fn pss_bytes(pid: i32) -> Option<u64> {
    kilobytes(
        &std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?,
        "Pss:",
    )
}

/// Proportional memory; not told on this system.
#[cfg(not(target_os = "linux"))]
pub fn pss_bytes(_pid: i32) -> Option<u64> {
    None
}

/// Resident memory. `None` when the process is gone.
#[cfg(target_os = "linux")]
pub fn rss_bytes(pid: i32) -> Option<u64> {
    kilobytes(
        &std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?,
        "VmRSS:",
    )
}

/// Resident memory. `None` when the process is gone.
#[cfg(not(target_os = "linux"))]
pub fn rss_bytes(pid: i32) -> Option<u64> {
    let output = std::process::Command::new("ps")
        .args(["-o", "rss=", "-p", &pid.to_string()])
        .output();
    let kilobytes: u64 = String::from_utf8_lossy(&output.ok()?.stdout)
        .trim()
        .parse()
        .ok()?;
    Some(kilobytes * 1024)
}

#[cfg(target_os = "linux")]
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let number: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(number * 1024)
}

/// Whether the process has ended by `end`. A process descriptor becomes readable at that moment.
#[cfg(target_os = "linux")]
fn wait_one(pid: i32, end: Instant) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let Some(id) = Pid::from_raw(pid) else {
        return true;
    };
    let descriptor = match pidfd_open(id, PidfdFlags::empty()) {
        Ok(descriptor) => descriptor,
        Err(error) => return error == rustix::io::Errno::SRCH,
    };
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        let mut watched = [PollFd::new(&descriptor, PollFlags::IN)];
        match poll(&mut watched, timeout.as_ref()) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// How often to look for a process that is not a child: this system gives no event for it.
#[cfg(not(target_os = "linux"))]
const LOOK_AGAIN: Duration = Duration::from_millis(10);

#[cfg(not(target_os = "linux"))]
fn wait_one(pid: i32, end: Instant) -> bool {
    loop {
        if all()
            .iter()
            .all(|process| process.pid != pid || process.zombie)
        {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Sends SIGKILL to a whole process group; a group that is already gone is no error.
///
/// # Errors
///
/// The group belongs to somebody else, or the number is none.
pub fn kill_group(group: i32) -> io::Result<()> {
    use rustix::process::{Pid, Signal, kill_process_group};
    let group = Pid::from_raw(group).filter(|_| group > 1);
    let group = group.ok_or_else(|| io::Error::other("not a process group"))?;
    match kill_process_group(group, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_fields() {
        let process = parse_stat(7, "7 (a) b (c)) S 1 5 4 0 -1").unwrap();
        assert_eq!(
            (
                process.name.as_str(),
                process.parent,
                process.group,
                process.session
            ),
            ("a) b (c)", 1, 5, 4)
        );
        assert!(parse_stat(7, "7 (x) Z 1 5 4").unwrap().zombie);
    }

    #[test]
    fn a_group_is_counted_measured_killed_and_waited_for() {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "sleep 60 & sleep 60 & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let group = i32::try_from(child.id()).unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while alive_in_group(group).len() < 3 && Instant::now() < end {
            std::thread::yield_now();
        }
        let members = alive_in_group(group);
        assert_eq!(members.len(), 3);
        let mut below = descendants(group);
        below.sort_unstable();
        assert_eq!(below, members[1..]);
        assert!(rss_bytes(group).unwrap() > 0);
        assert!(ProcessTree::of_group(group).pss_bytes().unwrap() > 0);
        assert_eq!(
            wait_gone(&members, Duration::from_millis(20)),
            members,
            "they are alive"
        );
        kill_group(group).unwrap();
        assert_eq!(
            wait_gone(&members, Duration::from_secs(10)),
            Vec::<i32>::new()
        );
        child.wait().unwrap();
        assert!(alive_in_group(group).is_empty());
        kill_group(group).unwrap();
    }
}
