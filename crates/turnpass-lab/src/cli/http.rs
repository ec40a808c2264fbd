//! A small HTTP client for loopback: one connection, kept alive as the real CLI does.

use std::pin::Pin;

use async_compression::tokio::bufread as decoders;
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::TcpStream;
use tokio_util::io::StreamReader;

/// How much of a reply is read at once.
const READ_BYTES: usize = 16 * 1024;

/// Where `$ANTHROPIC_BASE_URL` points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Put before every path; the relay puts its secret here.
    pub(crate) prefix: String,
}

impl Base {
    /// Reads `http://host:port/prefix`.
    pub(crate) fn parse(url: &str) -> Result<Base, String> {
        let uri: http::Uri = url.parse().map_err(|_| format!("not an address: {url}"))?;
        if uri.scheme_str() != Some("http") {
            return Err("the scripted CLI speaks plain http only; point it at loopback".to_owned());
        }
        let host = uri.host().ok_or("the address has no host")?.to_owned();
        let prefix = uri.path().trim_end_matches('/').to_owned();
        Ok(Base {
            host,
            port: uri.port_u16().unwrap_or(80),
            prefix,
        })
    }

    pub(crate) fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// What is asked.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

/// A reply, its body still to be read.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    body: Pin<Box<dyn AsyncRead>>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The next piece of the body, decoded; `None` at a clean end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Vec<u8>>, String> {
        let mut piece = vec![0; READ_BYTES];
        let read = self
            .body
            .read(&mut piece)
            .await
            .map_err(|error| error.to_string())?;
        piece.truncate(read);
        Ok((read > 0).then_some(piece))
    }

    /// The whole body.
    pub(crate) async fn bytes(&mut self) -> Result<Vec<u8>, String> {
        let mut all = Vec::new();
        self.body
            .read_to_end(&mut all)
            .await
            .map_err(|error| error.to_string())?;
        Ok(all)
    }
}

/// The client. Dropping it closes the connection.
#[derive(Default)]
pub(crate) struct Client {
    open: Option<(Base, SendRequest<Full<Bytes>>)>,
}

impl Client {
    /// Sends a request, on the open connection if it still is. Dropping the future or the answer
    /// before the end closes the connection, as the real CLI's abort does.
    pub(crate) async fn send(&mut self, base: &Base, ask: &Ask) -> Result<Answer, String> {
        let mut sender = match self.open.take() {
            Some((open, sender)) if open == *base && !sender.is_closed() => sender,
            _ => connect(base).await?,
        };
        if sender.ready().await.is_err() {
            sender = connect(base).await?;
            sender.ready().await.map_err(|error| error.to_string())?;
        }
        let mut request = http::Request::builder()
            .method(ask.method.as_str())
            .uri(format!("{}{}", base.prefix, ask.path));
        for (name, value) in &ask.headers {
            request = request.header(name, value);
        }
        request = request.header("host", base.authority());
        let body = Full::new(Bytes::from(ask.body.clone()));
        let request = request.body(body).map_err(|error| error.to_string())?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        self.open = Some((base.clone(), sender));
        Ok(answer(response))
    }

    /// Closes the connection.
    pub(crate) fn close(&mut self) {
        self.open = None;
    }
}

async fn connect(base: &Base) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream = TcpStream::connect((base.host.as_str(), base.port))
        .await
        .map_err(|error| error.to_string())?;
    let _ = stream.set_nodelay(true);
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    tokio::spawn(async move {
        // Its errors reach the caller through the request that they belong to.
        let _ = connection.await;
    });
    Ok(sender)
}

fn answer(response: http::Response<Incoming>) -> Answer {
    let (head, body) = response.into_parts();
    let frames = body.into_data_stream().map_err(std::io::Error::other);
    let reader = StreamReader::new(frames);
    let encoding = head
        .headers
        .get("content-encoding")
        .and_then(|value| value.to_str().ok());
    let body: Pin<Box<dyn AsyncRead>> = match encoding {
        Some("gzip") => Box::pin(decoders::GzipDecoder::new(reader)),
        Some("br") => Box::pin(decoders::BrotliDecoder::new(reader)),
        Some("zstd") => Box::pin(decoders::ZstdDecoder::new(reader)),
        Some("deflate") => Box::pin(decoders::ZlibDecoder::new(reader)),
        _ => Box::pin(reader),
    };
    Answer {
        status: head.status.as_u16(),
        headers: head.headers,
        body,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_url_keeps_its_prefix_and_must_be_plain_http() {
        let base = Base::parse("http://127.0.0.1:8503/s3cr3t/").unwrap();
        assert_eq!((base.port, base.prefix.as_str()), (8503, "/s3cr3t"));
        assert_eq!(Base::parse("http://127.0.0.1:1").unwrap().prefix, "");
        assert!(
            Base::parse("https://example.invalid")
                .unwrap_err()
                .contains("plain http")
        );
    }
}
