//! Where a request to a port of ours comes from. Pure.

use http::{HeaderMap, header};

/// Where a request comes from, as far as its head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A program that means this very port.
    Here,
    /// A page in a browser: it says its origin, whichever.
    Page,
    /// A program that means another host; a name that was made to point here among them.
    OtherHost,
}

/// Judges a head. A foreign page or a rebound name is to be told nothing about what is served here (bug 125).
pub(crate) fn origin_of(headers: &HeaderMap, port: u16) -> Origin {
    if headers.contains_key(header::ORIGIN) {
        return Origin::Page;
    }
    let own = format!("127.0.0.1:{port}");
    let mut hosts = headers.get_all(header::HOST).iter();
    let first = hosts.next().is_some_and(|host| *host == *own);
    match first && hosts.next().is_none() {
        true => Origin::Here,
        false => Origin::OtherHost,
    }
}
