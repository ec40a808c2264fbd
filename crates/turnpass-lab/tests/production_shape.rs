//! NEEDS THE REAL CLI (`conformance/install`): the production shape, where the CLI's own hosts are loopback.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod support;

use std::path::Path;
use std::process::ExitCode;

use serde_json::json;
use support::{Cli, STREAM, Upstream};
use tokio::net::{TcpListener, TcpStream};
use turnpass_lab::rig::{MadeUpHome, ProductionShape, REQUIRE_REAL_CLI, RealCli, RefusingProxy};

fn main() -> ExitCode {
    // Named by the process, which stays the same when it starts itself anew inside the namespaces.
    let dir = std::env::temp_dir().join(format!("turnpass-lab-production-{}", std::process::id()));
    let shape = match ProductionShape::enter(&dir) {
        Ok(shape) => shape,
        Err(reason) => {
            eprintln!("NOT TESTED: {reason}");
            return ExitCode::from(u8::from(
                std::env::var(REQUIRE_REAL_CLI).as_deref() == Ok("1"),
            ));
        }
    };
    let upstream = Upstream::start([]);
    let usage = json!({"five_hour": {"utilization": 1, "resets_at": null}, "extra_usage": {"is_enabled": false}});
    upstream.answer_get("/api/oauth/usage", usage);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let target = upstream.url.trim_start_matches("http://").to_owned();
    runtime.spawn(terminate_tls(shape.server_config(), target));
    let conformance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    for cli in RealCli::for_tests(&conformance, "tests/production_shape.rs of turnpass-lab") {
        talks_to_its_own_hosts(&cli, &shape, &upstream, &dir);
        eprintln!("test {}::talks_to_its_own_hosts ... ok", cli.version);
    }
    std::fs::remove_dir_all(dir).unwrap();
    ExitCode::SUCCESS
}

async fn terminate_tls(config: std::sync::Arc<rustls::ServerConfig>, target: String) {
    let acceptor = tokio_rustls::TlsAcceptor::from(config);
    let listener = TcpListener::bind("127.0.0.1:443").await.unwrap();
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, target) = (acceptor.clone(), target.clone());
        tokio::spawn(async move {
            let mut secure = acceptor.accept(stream).await.ok()?;
            let mut plain = TcpStream::connect(target).await.ok()?;
            tokio::io::copy_bidirectional(&mut secure, &mut plain)
                .await
                .ok()
        });
    }
}

fn talks_to_its_own_hosts(cli: &RealCli, shape: &ProductionShape, upstream: &Upstream, dir: &Path) {
    let home = MadeUpHome::new(&dir.join(&cli.version)).unwrap();
    let proxy = RefusingProxy::start().unwrap();
    let mut command = cli.command(&home, &proxy, None).unwrap();
    for (name, _) in proxy.environment() {
        command.env_remove(name);
    }
    command
        .args(STREAM)
        .args(["--tools", ""])
        .envs(shape.environment())
        .current_dir(home.path());
    let before = upstream.asked().len();
    let mut real = Cli::spawn(command);
    let usage = real.control("u", json!({"subtype": "get_usage", "skip_behaviors": true}));
    assert_eq!(
        usage["response"]["rate_limits"]["extra_usage"]["is_enabled"], false,
        "{usage}"
    );
    real.user("hello");
    let init = real.until("system/init");
    if let Some(served) = init.get("served_by_anthropic") {
        assert_eq!(*served, true);
    }
    assert_eq!(real.until("result")["result"], "ok");
    assert_eq!(real.finish().code(), Some(0));
    let asked = upstream.asked();
    let hosts: Vec<&str> = asked[before..]
        .iter()
        .filter_map(|one| one.header("host"))
        .collect();
    assert!(hosts.contains(&"api.anthropic.com"), "{hosts:?}");
}
