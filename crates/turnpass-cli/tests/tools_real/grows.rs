//! An agent whose conversation grows, over each transport on the real CLI.

use turnpass::Provider;
use turnpass::cli::environment::InheritedCredentials;
use turnpass::pool::{PoolOptions, PoolTransport};
use turnpass::relay::{LoopbackUrl, RelayOptions, RelayTransport};
use turnpass::replay::{ReplayOptions, ReplayTransport};
use turnpass::request::TransportKind;
use turnpass_lab::rig::{MadeUpHome, RealCli, RefusingProxy};
use turnpass_lab::upstream::{Options, Upstream};

use super::growing;
use super::pool::fenced;

pub(crate) async fn over(cli: &RealCli, transport: TransportKind) {
    let dir = tempfile::tempdir().unwrap();
    let home = MadeUpHome::new(&dir.path().join("home")).unwrap();
    let proxy = RefusingProxy::start().unwrap();
    let up = Upstream::start(Options::default()).unwrap();
    let claude_path = Some(fenced(dir.path(), &cli.path, &proxy));
    let lab_upstream = Some(LoopbackUrl::parse(&up.url()).unwrap());
    let lab_home = Some(home.path().to_owned());
    let provider = match transport {
        TransportKind::Pool => Provider::new(
            PoolTransport::new(PoolOptions {
                claude_path,
                spare: false,
                state_dir: Some(dir.path().join("state")),
                lab_upstream,
                lab_home,
                ..PoolOptions::default()
            })
            .unwrap(),
        ),
        TransportKind::Relay => Provider::new(
            RelayTransport::new(RelayOptions {
                claude_path,
                spares: 0,
                lab_upstream,
                lab_home,
                ..RelayOptions::default()
            })
            .unwrap(),
        ),
        TransportKind::Replay => Provider::new(
            ReplayTransport::new(ReplayOptions {
                claude_path,
                inherited_credentials: InheritedCredentials::Strip,
                lab_upstream,
                lab_home,
                ..ReplayOptions::default()
            })
            .unwrap(),
        ),
    };
    growing::summed_up(provider, &up).await;
}
