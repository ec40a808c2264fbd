# Short names for what is done often. `just` lists them.

_list:
    @just --list --unsorted

# The pinned CLIs and every test; the last line is the sum
check:
    ./check

# The tests of one crate or all, without the pinned CLIs being required
test *args:
    cargo test --workspace {{args}}

# Format and lints
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings

# Everything that holds of every commit
ci:
    .ci/run

# The agent on a small task, without an account and without a network
demo *args:
    cargo run --release --bin turnpass -- demo {{args}}

# The long runs: many cancels, kills and requests, and a tool that takes 400 s
soak:
    cargo test -p turnpass-cli --test soak -- --ignored --nocapture
    cargo test -p turnpass-cli --test pool_real -- --ignored soak_
    cargo test -p turnpass-cli --test replay_real -- --ignored soak_ --nocapture

# Fuzzes one target for a minute (needs nightly and cargo-fuzz)
fuzz target seconds="60":
    cd fuzz && cargo +nightly fuzz run {{target}} -- -max_total_time={{seconds}}

# How fast the pure parts are, and the way through the relay
bench:
    cargo bench --workspace
    cargo run --release --bin turnpass -- lab bench

# Certifies versions of the CLI (without arguments those of the page) and writes docs/compatibility.md and the library's table of them
compatibility *versions:
    cargo build --release -p turnpass-cli
    conformance/certify {{versions}}
    target/release/turnpass lab compatibility conformance/certificates/*.json > docs/compatibility.md
    target/release/turnpass lab compatibility --released conformance/certificates/*.json > crates/turnpass/src/certify/released.rs

# Writes the generated parts of the pages anew
bless:
    TURNPASS_BLESS=1 cargo test -p turnpass --lib error::
    TURNPASS_BLESS=1 cargo test -p turnpass-cli --test relay_real documented
