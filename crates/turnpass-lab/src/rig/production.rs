//! The production shape: the CLI believes that it talks to the first-party API, but its hosts are here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::isolation::{enter_loopback, re_execute};

/// The hosts that the real CLI talks to; all of them are loopback in this shape.
pub const PRODUCTION_HOSTS: [&str; 8] = [
    "api.anthropic.com",
    "claude.ai",
    "console.anthropic.com",
    "platform.claude.com",
    "claude.com",
    "mcp-proxy.anthropic.com",
    "code.claude.com",
    "downloads.claude.ai",
];

/// Set for the program inside.
const INSIDE: &str = "TURNPASS_LAB_INSIDE_PRODUCTION_SHAPE";

/// Why the production shape cannot be had here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the production shape is not available: {0}")]
pub struct Unavailable(pub String);

/// A throw-away authority, and a mount and network namespace in which [`PRODUCTION_HOSTS`] are 127.0.0.1.
pub struct ProductionShape {
    authority: PathBuf,
    server: Arc<rustls::ServerConfig>,
}

impl ProductionShape {
    /// Puts this program into the namespaces and makes the authority in `dir`.
    ///
    /// Call it first thing in `main`, before any thread: the program is replaced by itself and this
    /// call returns only inside. Needs root, or a kernel that lets users make namespaces.
    ///
    /// # Errors
    ///
    /// [`Unavailable`] with the reason; nothing has been changed then.
    pub fn enter(dir: &Path) -> Result<ProductionShape, Unavailable> {
        if std::env::var_os(INSIDE).is_none() {
            return match re_execute(&["--mount", "--net"], INSIDE) {
                Ok(never) => match never {},
                Err(reason) => Err(Unavailable(reason)),
            };
        }
        let failed = |what: &str, error: io::Error| Unavailable(format!("{what}: {error}"));
        enter_loopback().map_err(|error| failed("loopback", error))?;
        fs::create_dir_all(dir).map_err(|error| failed("directory", error))?;
        mount_hosts(dir).map_err(|error| failed("hosts file", error))?;
        ProductionShape::authority(dir).map_err(|error| failed("authority", error))
    }

    /// The authority alone, without namespaces: for checks of certificates and of hosts by other means.
    ///
    /// # Errors
    ///
    /// The file system, or the making of keys.
    pub fn authority(dir: &Path) -> io::Result<ProductionShape> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "turnpass laboratory, throw-away");
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let root = params.self_signed(&key).map_err(io::Error::other)?;
        let file = dir.join("authority.pem");
        fs::write(&file, root.pem())?;
        let issuer = Issuer::new(params, key);
        let mut names: Vec<String> = PRODUCTION_HOSTS
            .iter()
            .map(|name| (*name).to_owned())
            .collect();
        names.push("localhost".to_owned());
        let leaf_key = KeyPair::generate().map_err(io::Error::other)?;
        let leaf = CertificateParams::new(names).map_err(io::Error::other)?;
        let leaf = leaf
            .signed_by(&leaf_key, &issuer)
            .map_err(io::Error::other)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut server = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)
            .map_err(io::Error::other)?;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(ProductionShape {
            authority: file,
            server: Arc::new(server),
        })
    }

    /// The certificate of the authority, for NODE_EXTRA_CA_CERTS.
    pub fn authority_file(&self) -> &Path {
        &self.authority
    }

    /// The TLS side of an upstream on 127.0.0.1:443 that stands for [`PRODUCTION_HOSTS`].
    pub fn server_config(&self) -> Arc<rustls::ServerConfig> {
        Arc::clone(&self.server)
    }

    /// What the CLI needs in its environment; no base URL, and no proxy.
    pub fn environment(&self) -> Vec<(String, String)> {
        vec![(
            "NODE_EXTRA_CA_CERTS".to_owned(),
            self.authority.to_string_lossy().into_owned(),
        )]
    }
}

/// Binds a hosts file over `/etc/hosts` in this mount namespace. `unshare` has made it private.
#[cfg(target_os = "linux")]
fn mount_hosts(dir: &Path) -> io::Result<()> {
    let file = dir.join("hosts");
    fs::write(
        &file,
        format!("127.0.0.1 localhost {}\n", PRODUCTION_HOSTS.join(" ")),
    )?;
    rustix::mount::mount_bind(&file, "/etc/hosts")?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn mount_hosts(_dir: &Path) -> io::Result<()> {
    Err(io::Error::other("only on Linux"))
}
