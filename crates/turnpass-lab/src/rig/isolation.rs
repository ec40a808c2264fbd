//! A network namespace of its own for a test program.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// Set for the program inside, so that it does not start itself for ever.
const INSIDE: &str = "TURNPASS_LAB_INSIDE_NAMESPACE";

/// What keeps the real CLI off the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Isolation {
    /// Only loopback exists: nothing can be reached, whatever a program tries.
    Namespace,
    /// No namespace could be made; the caller must give the CLI the environment of a
    /// [`super::RefusingProxy`]. A program that ignores the proxy variables is not held by this.
    Proxy {
        /// Why there is no namespace.
        reason: String,
    },
}

/// Puts this program into a network namespace with loopback up.
///
/// Call it first thing in `main`, before any thread: when a namespace can be made, the program is
/// replaced by itself inside it and this call returns only there. Works as root, and as another user
/// where the kernel lets users make namespaces.
pub fn isolate() -> Isolation {
    if std::env::var_os(INSIDE).is_some() || only_loopback() {
        return match enter_loopback() {
            Ok(()) => Isolation::Namespace,
            Err(error) => Isolation::Proxy {
                reason: format!("loopback cannot be raised: {error}"),
            },
        };
    }
    match re_execute(&["--net"], INSIDE) {
        Ok(never) => match never {},
        Err(reason) => Isolation::Proxy { reason },
    }
}

/// Replaces this program by itself under `unshare`; returns only when that is not possible.
pub(super) fn re_execute(kinds: &[&str], marker: &str) -> Result<std::convert::Infallible, String> {
    if !cfg!(target_os = "linux") {
        return Err("namespaces exist on Linux only".to_owned());
    }
    let mut unshare: Vec<&str> = kinds.to_vec();
    if !rustix::process::geteuid().is_root() {
        unshare.push("--map-root-user");
    }
    let tried = Command::new("unshare")
        .args(&unshare)
        .arg("true")
        .stderr(Stdio::piped())
        .output();
    let tried = tried.map_err(|error| format!("the program unshare cannot be run: {error}"))?;
    if !tried.status.success() {
        let said = String::from_utf8_lossy(&tried.stderr).trim().to_owned();
        return Err(format!("unshare was refused: {said}"));
    }
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let error = Command::new("unshare")
        .args(&unshare)
        .arg("--")
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(marker, "1")
        .exec();
    Err(format!("unshare cannot be started: {error}"))
}

/// Raises loopback, checks that it is the only interface and that it works.
pub(super) fn enter_loopback() -> io::Result<()> {
    if !only_loopback() {
        return Err(io::Error::other("there are other network interfaces"));
    }
    if loopback_works() {
        return Ok(());
    }
    if raise_loopback().is_err() {
        let raised = Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status()?;
        if !raised.success() {
            return Err(io::Error::other("`ip link set lo up` failed"));
        }
    }
    if loopback_works() {
        Ok(())
    } else {
        Err(io::Error::other("loopback does not answer"))
    }
}

/// `/proc/self/net` is that of this process; `/sys/class/net` would be that of whoever mounted it.
fn only_loopback() -> bool {
    let Ok(table) = std::fs::read_to_string("/proc/self/net/dev") else {
        return false;
    };
    let names = table
        .lines()
        .skip(2)
        .filter_map(|line| line.split(':').next());
    names.map(str::trim).all(|name| name == "lo")
}

fn loopback_works() -> bool {
    let listener = std::net::TcpListener::bind("127.0.0.1:0");
    let address = listener
        .as_ref()
        .ok()
        .and_then(|listener| listener.local_addr().ok());
    address.is_some_and(|address| std::net::TcpStream::connect(address).is_ok())
}

/// One RTM_NEWLINK message that sets IFF_UP on interface 1, which is always `lo`.
#[cfg(target_os = "linux")]
fn raise_loopback() -> io::Result<()> {
    use rustix::net::netlink::SocketAddrNetlink;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};
    const RTM_NEWLINK: u16 = 16;
    const REQUEST_AND_ACK: u16 = 1 | 4;
    const LOOPBACK_INDEX: i32 = 1;
    const IFF_UP: u32 = 1;
    const MESSAGE_BYTES: u32 = 32;
    let mut message = Vec::with_capacity(32);
    message.extend_from_slice(&MESSAGE_BYTES.to_ne_bytes());
    message.extend_from_slice(&RTM_NEWLINK.to_ne_bytes());
    message.extend_from_slice(&REQUEST_AND_ACK.to_ne_bytes());
    message.extend_from_slice(&1_u32.to_ne_bytes()); // sequence
    message.extend_from_slice(&0_u32.to_ne_bytes()); // to the kernel
    message.extend_from_slice(&[0; 4]); // family, padding, type
    message.extend_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    message.extend_from_slice(&IFF_UP.to_ne_bytes()); // flags
    message.extend_from_slice(&IFF_UP.to_ne_bytes()); // which of them change
    // Protocol 0 of the netlink family is the routing one.
    let socket = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
    rustix::net::sendto(
        &socket,
        &message,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut answer = [0_u8; 256];
    let (read, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    // An NLMSG_ERROR answer: header of 16 bytes, then the error number, 0 for success.
    let code = answer
        .get(16..20)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes);
    match code {
        Some(0) if read >= 20 => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::Error::other("no answer from the kernel")),
    }
}

#[cfg(not(target_os = "linux"))]
fn raise_loopback() -> io::Result<()> {
    Err(io::Error::other("only on Linux"))
}
