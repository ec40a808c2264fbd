//! A loopback proxy that refuses everything and counts it.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A client that sends no request line is let go after so long.
const READ_LIMIT: Duration = Duration::from_secs(5);

/// Refuses every CONNECT and every plain request with 403, and remembers what they were for.
///
/// Dropping it closes the port and ends its thread.
pub struct RefusingProxy {
    address: SocketAddr,
    attempts: Arc<Mutex<Vec<String>>>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RefusingProxy {
    /// Listens on a free loopback port.
    ///
    /// # Errors
    ///
    /// No port can be opened.
    pub fn start() -> io::Result<RefusingProxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let attempts = Arc::new(Mutex::new(Vec::new()));
        let ending = Arc::new(AtomicBool::new(false));
        let (seen, end) = (Arc::clone(&attempts), Arc::clone(&ending));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if end.load(Ordering::Acquire) {
                    break;
                }
                let seen = Arc::clone(&seen);
                // A thread each, bounded by READ_LIMIT: a silent client must not hide the next one.
                std::thread::spawn(move || refuse(&stream, &seen));
            }
        });
        Ok(RefusingProxy {
            address,
            attempts,
            ending,
            thread: Some(thread),
        })
    }

    /// Its address, for the proxy variables.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The proxy variables, in both spellings, with loopback exempt: without NO_PROXY the real CLI
    /// sends even 127.0.0.1 through a proxy.
    pub fn environment(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            all.push((name.to_owned(), self.url()));
            all.push((name.to_lowercase(), self.url()));
        }
        for name in ["NO_PROXY", "no_proxy"] {
            all.push((name.to_owned(), "127.0.0.1,localhost,::1".to_owned()));
        }
        all
    }

    /// What was refused, as `host:port` (CONNECT) or as the address that was asked for, in order.
    pub fn attempts(&self) -> Vec<String> {
        self.attempts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for RefusingProxy {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        // Wakes the thread out of accept. Where loopback is down nobody can wake it; it then ends with the program.
        if TcpStream::connect(self.address).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// The attempt is noted before the answer: whoever has been refused has been counted.
fn refuse(stream: &TcpStream, seen: &Mutex<Vec<String>>) -> io::Result<()> {
    stream.set_read_timeout(Some(READ_LIMIT))?;
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    if let Some(target) = first.split_whitespace().nth(1) {
        seen.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(target.to_owned());
    }
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut stream = stream;
    stream.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn it_refuses_and_remembers_the_target() {
        let proxy = RefusingProxy::start().unwrap();
        let mut client = TcpStream::connect(proxy.address).unwrap();
        client
            .write_all(b"CONNECT api.example.invalid:443 HTTP/1.1\r\nhost: x\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 403"));
        drop(client);
        let address = proxy.address;
        assert_eq!(proxy.attempts(), ["api.example.invalid:443"]);
        drop(proxy);
        assert!(TcpStream::connect(address).is_err(), "the port is closed");
    }
}
