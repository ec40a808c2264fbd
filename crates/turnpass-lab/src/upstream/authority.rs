//! A throw-away certificate authority, for clients that insist on the production host names.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// The host names that the CLI asks (2.1.332), for the production shape of the rig.
pub const CLI_HOSTS: [&str; 8] = [
    "api.anthropic.com",
    "claude.ai",
    "claude.com",
    "code.claude.com",
    "console.anthropic.com",
    "downloads.claude.ai",
    "mcp-proxy.anthropic.com",
    "platform.claude.com",
];

/// Why no authority could be made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A name that cannot stand in a certificate, or a failure of the generator.
    #[error("could not make a certificate: {0}; check the host names")]
    Certificate(#[from] rcgen::Error),
    /// The server refuses the certificate.
    #[error("could not make a TLS configuration: {0}")]
    Tls(#[from] rustls::Error),
}

/// A certificate authority that exists only in this value, and one server certificate that it signed.
#[derive(Debug)]
pub struct Authority {
    ca_pem: String,
    server: Arc<ServerConfig>,
}

impl Authority {
    /// Makes both for these DNS names or IP addresses.
    pub fn new<S: Into<String>>(
        names: impl IntoIterator<Item = S>,
    ) -> Result<Self, AuthorityError> {
        let mut ca = CertificateParams::new(Vec::<String>::new())?;
        ca.distinguished_name
            .push(DnType::CommonName, "turnpass lab authority");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca_key = KeyPair::generate()?;
        let ca_certificate = ca.self_signed(&ca_key)?;
        let issuer = Issuer::new(ca, ca_key);

        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let mut leaf = CertificateParams::new(names)?;
        leaf.distinguished_name
            .push(DnType::CommonName, "turnpass lab upstream");
        leaf.use_authority_key_identifier_extension = true;
        let leaf_key = KeyPair::generate()?;
        let certificate = leaf.signed_by(&leaf_key, &issuer)?;

        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)?;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            ca_pem: ca_certificate.pem(),
            server: Arc::new(server),
        })
    }

    /// The configuration for [`Options::tls`](super::Options::tls).
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// The authority's certificate in PEM.
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// Writes `ca.pem` into a directory; the path is what `NODE_EXTRA_CA_CERTS` wants. An existing file is replaced.
    pub fn write_ca(&self, directory: &Path) -> std::io::Result<PathBuf> {
        let path = directory.join("ca.pem");
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)?;
        file.write_all(self.ca_pem.as_bytes())?;
        Ok(path)
    }
}
