//! The CLI's end of an HTTP carrier: a real client over a real socket.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header;
use serde_json::Value;

use crate::cli::launch::McpServer;
use crate::tools::http::HttpCarrier;
use crate::wire::sse;

/// Bound of every wait of these tests.
pub(in crate::tools) const BOUND: Duration = Duration::from_secs(20);

/// Ends the test when what is waited for does not come.
pub(in crate::tools) async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, what).await.expect("in time")
}

/// A client that knows the carrier's entry of the configuration file.
pub(in crate::tools) struct Client {
    http: reqwest::Client,
    url: String,
    authorization: String,
}

impl Client {
    pub(in crate::tools) fn new(carrier: &HttpCarrier) -> Self {
        let McpServer::Http { url, bearer, .. } = carrier.mcp_server_config() else {
            panic!("no http entry");
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let http = reqwest::Client::builder()
            .no_proxy()
            .tls_backend_preconfigured(tls)
            .build()
            .unwrap();
        Self {
            http,
            url,
            authorization: format!("Bearer {}", bearer.expose_str()),
        }
    }

    /// A message as CLI 2.1.332 sends it. Returns when the head of the answer is here.
    pub(in crate::tools) async fn post(&self, message: &str) -> Answer {
        let request = self
            .http
            .post(&self.url)
            .header(header::AUTHORIZATION, &self.authorization)
            .header(header::ACCEPT, "application/json, text/event-stream")
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::CONTENT_TYPE, "application/json")
            .header("mcp-protocol-version", "2025-11-25")
            .body(message.to_owned());
        let response = within(request.send()).await.unwrap();
        let kind = response.headers().get(header::CONTENT_TYPE);
        Answer {
            status: response.status().as_u16(),
            is_stream: kind.is_some_and(|kind| kind == "text/event-stream"),
            response,
            events: sse::Parser::default(),
        }
    }
}

/// An answer of which the body is still to be read.
pub(in crate::tools) struct Answer {
    pub(in crate::tools) status: u16,
    pub(in crate::tools) is_stream: bool,
    response: reqwest::Response,
    events: sse::Parser,
}

impl Answer {
    /// The next message, `None` at the end.
    pub(in crate::tools) async fn next(&mut self) -> Option<Value> {
        if !self.is_stream {
            let mut body = Vec::new();
            while let Some(chunk) = within(self.response.chunk()).await.unwrap() {
                body.extend_from_slice(&chunk);
            }
            return (!body.is_empty()).then(|| serde_json::from_slice(&body).unwrap());
        }
        loop {
            if let Some(event) = self.events.next_event().unwrap() {
                assert_eq!(event.name_str(), "message");
                return Some(serde_json::from_slice(&event.data).unwrap());
            }
            let chunk = within(self.response.chunk()).await.unwrap()?;
            self.events.push(chunk);
        }
    }
}
