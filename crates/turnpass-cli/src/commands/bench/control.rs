//! The control: a plain HTTP client that sends the very same body to the same upstream, beside what is measured.

use std::sync::Arc;
use std::time::Instant;

use turnpass_lab::upstream::{Recorded, Upstream};

use super::bed::{Seen, Watch};
use crate::exit::Fault;

/// Headers that belong to one connection.
const OF_CONNECTION: [&str; 4] = ["host", "content-length", "connection", "accept-encoding"];

/// A plain client with a connection that is kept.
pub(super) struct Direct {
    client: reqwest::Client,
    base: String,
}

impl Direct {
    /// A client for this upstream. Nothing is connected yet.
    pub(super) fn new(upstream: &Upstream) -> Result<Self, Fault> {
        let failed = |error: &dyn std::fmt::Display| Fault::system(error.to_string(), "Try again.");
        // The client wants to know how it would speak TLS, though it speaks none here.
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::ring::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
        let client = reqwest::Client::builder()
            .no_proxy()
            .tcp_nodelay(true)
            .http1_only()
            .tls_backend_preconfigured(tls)
            .build()
            .map_err(|error| failed(&error))?;
        Ok(Self {
            client,
            base: upstream.url(),
        })
    }

    /// Sends a request like this one and reads its answer to the end.
    pub(super) async fn send(&self, upstream: &Upstream, like: &Recorded) -> Result<Seen, Fault> {
        self.send_marked(upstream, like, None).await
    }

    /// The same beside others: `mark` is a text of this body alone.
    pub(super) async fn send_marked(
        &self,
        upstream: &Upstream,
        like: &Recorded,
        mark: Option<&str>,
    ) -> Result<Seen, Fault> {
        let failed = |error: reqwest::Error| {
            Fault::system(format!("the control failed: {error}"), "Try again.")
        };
        let query = like
            .query
            .as_ref()
            .map_or(String::new(), |query| format!("?{query}"));
        let mut request = self
            .client
            .post(format!("{}{}{query}", self.base, like.path));
        for (name, value) in &like.headers {
            if !OF_CONNECTION
                .iter()
                .any(|own| name.eq_ignore_ascii_case(own))
            {
                request = request.header(name, value);
            }
        }
        let request = request.body(like.body.clone());
        let mut watch = Watch::start(upstream);
        let mut answer = request.send().await.map_err(failed)?;
        let mut frames = Frames::default();
        while let Some(chunk) = answer.chunk().await.map_err(failed)? {
            for _ in 0..frames.texts(&chunk) {
                watch.text(Instant::now());
            }
        }
        watch.end(upstream, mark).await
    }
}

/// Counts the events with text in a stream of bytes.
#[derive(Debug, Default)]
struct Frames(Vec<u8>);

impl Frames {
    fn texts(&mut self, chunk: &[u8]) -> usize {
        self.0.extend_from_slice(chunk);
        let mut count = 0;
        while let Some(end) = self.0.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = self.0.drain(..end + 2).collect();
            count += usize::from(event.starts_with(b"event: content_block_delta"));
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_across_chunks() {
        let mut frames = Frames::default();
        assert_eq!(
            frames.texts(b"event: ping\ndata: {}\n\nevent: content_bl"),
            0
        );
        assert_eq!(frames.texts(b"ock_delta\ndata: {}\n"), 0);
        assert_eq!(
            frames.texts(b"\nevent: content_block_delta\ndata: {}\n\n"),
            2
        );
    }
}
