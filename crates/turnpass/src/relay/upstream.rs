//! The way out: one request to the service, with the CLI's own headers, and its answer as plain chunks.
//!
//! The address is fixed to the service's API, or to a loopback laboratory that the person named. Redirects are not
//! followed. The bearer passes through in the headers of the one request and is kept nowhere.

use std::fmt;
use std::time::Duration;

use async_compression::tokio::bufread::{BrotliDecoder, GzipDecoder, ZlibDecoder, ZstdDecoder};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use tokio::io::{AsyncBufRead, AsyncRead, AsyncReadExt, BufReader};
use tokio_util::io::{ReaderStream, StreamReader};

use super::classify::ERROR_BODY_BYTES;
use crate::error::{Error, ErrorCode, Result};

/// The service's API; the relay document fixes it.
const SERVICE: &str = "https://api.anthropic.com";
/// Longest wait for a connection to the service.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an idle connection to the service is kept for the next generation; the service itself closes after a few
/// minutes.
const IDLE_CONNECTION: Duration = Duration::from_secs(90);
/// Most encodings that are undone one after another; the service uses none, since it is asked for `identity`.
const ENCODINGS_LIMIT: usize = 3;
/// Longest wait for the body of a failed answer.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Headers that belong to one connection, not to the request. `Proxy-*` is dropped as well.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::HOST,
    header::CONTENT_LENGTH,
    header::ACCEPT_ENCODING,
    header::CONTENT_ENCODING,
];

/// A laboratory upstream: an http address on loopback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopbackUrl(reqwest::Url);

impl LoopbackUrl {
    /// Reads an address such as `http://127.0.0.1:8399`.
    ///
    /// # Errors
    ///
    /// `lab_upstream_refused` for anything but plain http to a loopback address, with no name, password or query.
    pub fn parse(text: &str) -> Result<Self> {
        let refused =
            |why: &str| Error::new(ErrorCode::LabUpstreamRefused, format!("the address {why}"));
        let url = reqwest::Url::parse(text).map_err(|_| refused("is not a URL"))?;
        if url.scheme() != "http" {
            return Err(refused("is not plain http"));
        }
        let loopback = match url.host_str() {
            Some("localhost") => true,
            Some(host) => host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .parse::<std::net::IpAddr>()
                .is_ok_and(|ip| ip.is_loopback()),
            None => false,
        };
        if !loopback {
            return Err(refused("is not on loopback"));
        }
        let bare = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        if !bare || url.fragment().is_some() {
            return Err(refused("has more than host, port and path"));
        }
        Ok(Self(url))
    }

    /// The address without a trailing slash.
    pub fn as_str(&self) -> &str {
        self.0.as_str().trim_end_matches('/')
    }
}

/// Where requests go, and how.
#[derive(Clone)]
pub(crate) struct Upstream {
    client: reqwest::Client,
    base: String,
    laboratory: bool,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

/// An answer whose head has come.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// Headers fit to be passed on: nothing of the connection, no encoding, no length.
    pub(crate) headers: HeaderMap,
    /// The body, decoded.
    pub(crate) body: AnswerBody,
}

/// The decoded body of an answer. Dropping it closes the connection to the service.
pub(crate) struct AnswerBody(futures_util::stream::BoxStream<'static, std::io::Result<Bytes>>);

impl AnswerBody {
    /// The next chunk; `None` at the end, `Err` when the connection broke.
    pub(crate) async fn chunk(&mut self) -> Option<std::io::Result<Bytes>> {
        self.0.next().await
    }

    /// The whole body of a failed answer, at most [`ERROR_BODY_BYTES`], within [`ERROR_BODY_TIMEOUT`].
    pub(crate) async fn read_error(mut self) -> Bytes {
        let mut read = Vec::new();
        let all = async {
            while let Some(Ok(chunk)) = self.chunk().await {
                let room = ERROR_BODY_BYTES - read.len();
                read.extend_from_slice(&chunk[..chunk.len().min(room)]);
                if read.len() == ERROR_BODY_BYTES {
                    break;
                }
            }
        };
        // What came in time is enough to tell the kind.
        let _ = tokio::time::timeout(ERROR_BODY_TIMEOUT, all).await;
        read.into()
    }
}

impl Upstream {
    /// A client for the service, or for a laboratory.
    ///
    /// `extra_authorities` is a file of further certificate authorities in PEM, as NODE_EXTRA_CA_CERTS names one.
    ///
    /// # Errors
    ///
    /// `internal` when the TLS library cannot be set up, or `request_invalid` for an unreadable authorities file.
    pub(crate) fn new(
        laboratory: Option<&LoopbackUrl>,
        extra_authorities: Option<&[u8]>,
    ) -> Result<Self> {
        let failed = |error: &dyn fmt::Display| {
            Error::new(ErrorCode::Internal, format!("no http client: {error}"))
        };
        let builder = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(IDLE_CONNECTION)
            .tcp_nodelay(true)
            .http1_only();
        // A laboratory speaks plain http, so it needs no authority and no look at the machine's.
        let builder = match laboratory {
            Some(_) => builder
                .no_proxy()
                .tls_backend_preconfigured(tls(rustls::RootCertStore::empty())?),
            None => builder.tls_backend_preconfigured(tls(authorities(extra_authorities)?)?),
        };
        let base = laboratory.map_or(SERVICE, LoopbackUrl::as_str).to_owned();
        let client = builder.build().map_err(|error| failed(&error))?;
        Ok(Self {
            client,
            base,
            laboratory: laboratory.is_some(),
        })
    }

    /// Whether answers come from a laboratory.
    pub(crate) fn is_laboratory(&self) -> bool {
        self.laboratory
    }

    /// Sends one request and waits for the head of its answer.
    ///
    /// # Errors
    ///
    /// `upstream_unreachable`, without the address that was tried.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connection.
    pub(crate) async fn send(
        &self,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Answer> {
        let request = self
            .client
            .post(format!("{}{path}", self.base))
            .headers(outgoing(headers))
            .body(body);
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        let status = response.status();
        let headers = incoming(response.headers());
        let encodings = encodings(response.headers())?;
        let chunks = response
            .bytes_stream()
            .map_err(|error| std::io::Error::other(error.without_url()));
        let body = match encodings.is_empty() {
            true => chunks.boxed(),
            false => decode(StreamReader::new(chunks), encodings),
        };
        Ok(Answer {
            status,
            headers,
            body: AnswerBody(body),
        })
    }
}

/// The machine's certificate authorities, and those that the person added.
fn authorities(extra: Option<&[u8]>) -> Result<rustls::RootCertStore> {
    let mut roots = rustls::RootCertStore::empty();
    // Single certificates of the system that do not parse are no reason to fail; having none is.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(pem) = extra {
        use rustls::pki_types::{CertificateDer, pem::PemObject};
        let extra: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .filter_map(|found| found.ok())
            .collect();
        roots.add_parsable_certificates(extra);
    }
    if roots.is_empty() {
        return Err(no_tls("no certificate authority was found on this machine"));
    }
    Ok(roots)
}

fn tls(roots: rustls::RootCertStore) -> Result<rustls::ClientConfig> {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| no_tls(&error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn no_tls(why: &str) -> Error {
    Error::new(ErrorCode::Internal, format!("TLS cannot be set up: {why}"))
}

fn unreachable(error: &reqwest::Error) -> Error {
    let what = if error.is_connect() {
        "no connection to the service could be made"
    } else if error.is_timeout() {
        "the service did not answer in time"
    } else {
        "the connection to the service broke before it answered"
    };
    Error::new(ErrorCode::UpstreamUnreachable, what)
}

/// The CLI's headers less those of its connection; the reply is asked for uncompressed.
fn outgoing(headers: &HeaderMap) -> HeaderMap {
    let mut kept = passed_on(headers);
    kept.insert(
        header::ACCEPT_ENCODING,
        HeaderValue::from_static("identity"),
    );
    kept
}

fn incoming(headers: &HeaderMap) -> HeaderMap {
    passed_on(headers)
}

fn passed_on(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<&str> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(str::trim))
        .collect();
    let mut kept = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let of_connection = HOP_BY_HOP.contains(name)
            || name.as_str().starts_with("proxy-")
            || name.as_str() == "keep-alive"
            || named
                .iter()
                .any(|named| named.eq_ignore_ascii_case(name.as_str()));
        if !of_connection {
            kept.append(name.clone(), value.clone());
        }
    }
    kept
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Gzip,
    Brotli,
    Zstd,
    Deflate,
}

/// The encodings of a body, in the order in which they were applied.
fn encodings(headers: &HeaderMap) -> Result<Vec<Encoding>> {
    let unknown = || {
        Error::new(
            ErrorCode::UpstreamError,
            "the service's answer has an encoding that is not known",
        )
    };
    let mut found = Vec::new();
    for value in headers.get_all(header::CONTENT_ENCODING) {
        for word in value.to_str().map_err(|_| unknown())?.split(',') {
            match word.trim().to_ascii_lowercase().as_str() {
                "" | "identity" => {}
                "gzip" | "x-gzip" => found.push(Encoding::Gzip),
                "br" => found.push(Encoding::Brotli),
                "zstd" => found.push(Encoding::Zstd),
                // In HTTP the word means the zlib format.
                "deflate" => found.push(Encoding::Deflate),
                _ => return Err(unknown()),
            }
        }
    }
    if found.len() > ENCODINGS_LIMIT {
        return Err(unknown());
    }
    Ok(found)
}

fn decode(
    reader: impl AsyncBufRead + Send + Unpin + 'static,
    encodings: Vec<Encoding>,
) -> futures_util::stream::BoxStream<'static, std::io::Result<Bytes>> {
    let mut reader: Box<dyn AsyncBufRead + Send + Unpin> = Box::new(reader);
    for encoding in encodings.into_iter().rev() {
        let decoded: Box<dyn AsyncRead + Send + Unpin> = match encoding {
            Encoding::Gzip => Box::new(GzipDecoder::new(reader)),
            Encoding::Brotli => Box::new(BrotliDecoder::new(reader)),
            Encoding::Zstd => Box::new(ZstdDecoder::new(reader)),
            Encoding::Deflate => Box::new(ZlibDecoder::new(reader)),
        };
        reader = Box::new(BufReader::new(decoded));
    }
    // An answer may stop early in a stream that is flushed but not ended; what was decoded is given out at once.
    ReaderStream::new(reader.take(u64::MAX)).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_laboratory_is_on_loopback_and_nothing_else() {
        for good in [
            "http://127.0.0.1:8399",
            "http://localhost:1/",
            "http://[::1]:9",
            "http://127.9.9.9/lab",
        ] {
            assert!(
                !LoopbackUrl::parse(good).unwrap().as_str().ends_with('/'),
                "{good}"
            );
        }
        for bad in [
            "https://127.0.0.1:1",
            "http://api.anthropic.com",
            "http://10.0.0.1",
            "http://127.0.0.1.evil.example",
            "http://localhost.evil.example",
            "http://u:p@127.0.0.1",
            "http://127.0.0.1/?x=1",
            "127.0.0.1:1",
            "",
        ] {
            let error = LoopbackUrl::parse(bad).unwrap_err();
            assert_eq!(error.code(), ErrorCode::LabUpstreamRefused, "{bad}");
        }
    }

    #[test]
    fn headers_of_the_connection_stay_behind_and_the_rest_goes_on_in_order() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer t"),
            ("anthropic-beta", "a,b"),
            ("connection", "keep-alive, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "5"),
            ("host", "127.0.0.1"),
            ("content-length", "3"),
            ("accept-encoding", "gzip, br"),
            ("proxy-authorization", "p"),
            ("x-app", "cli"),
        ] {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        let sent = outgoing(&headers);
        let names: Vec<_> = sent.keys().map(HeaderName::as_str).collect();
        assert_eq!(
            names,
            [
                "authorization",
                "anthropic-beta",
                "x-app",
                "accept-encoding"
            ]
        );
        assert_eq!(sent[header::ACCEPT_ENCODING], "identity");
    }

    #[tokio::test]
    async fn bug_095_stacked_encodings_are_undone_in_reverse() {
        use async_compression::tokio::bufread::{BrotliEncoder, GzipEncoder};
        let plain = b"event: ping\ndata: {}\n\n".repeat(100);
        let mut packed = Vec::new();
        let inner = BufReader::new(GzipEncoder::new(&plain[..]));
        BrotliEncoder::new(inner)
            .read_to_end(&mut packed)
            .await
            .unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(
            header::CONTENT_ENCODING,
            HeaderValue::from_static("gzip, br"),
        );
        let found = encodings(&headers).unwrap();
        let chunks: Vec<Bytes> = decode(std::io::Cursor::new(packed), found)
            .try_collect()
            .await
            .unwrap();
        assert_eq!(chunks.concat(), plain);
    }

    #[test]
    fn bug_095_an_encoding_that_is_not_known_is_an_error() {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::CONTENT_ENCODING,
            HeaderValue::from_static("compress"),
        );
        assert_eq!(
            encodings(&headers).unwrap_err().code(),
            ErrorCode::UpstreamError
        );
        headers.insert(
            header::CONTENT_ENCODING,
            HeaderValue::from_static("gzip,gzip,gzip,gzip"),
        );
        assert!(encodings(&headers).is_err());
        headers.insert(
            header::CONTENT_ENCODING,
            HeaderValue::from_static("identity"),
        );
        assert!(encodings(&headers).unwrap().is_empty());
    }
}
