//! `cargo xtask lint`: every check that isn't a test, each named and timed.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::Context as _;

use crate::layers;

/// No arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs all checks, also after one has failed, so that one run shows every fault.
pub(crate) fn run(_: Args) -> anyhow::Result<ExitCode> {
    let cargo = |line: &'static str| move || run_cargo(line, &[]);
    let docs = || run_cargo("doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")]);
    let steps: [(&str, &dyn Fn() -> anyhow::Result<bool>); 5] = [
        ("format", &cargo("fmt --all --check")),
        ("clippy", &cargo("clippy --workspace --all-targets -- -D warnings")),
        ("docs", &docs),
        ("layers", &|| Ok(layers::run(layers::Args {})? == ExitCode::SUCCESS)),
        // No std, no sockets, no clock: what builds for a bare wasm machine uses none of them.
        ("wasm", &cargo("build -p kvferry-geometry -p kvferry-proto --target wasm32-unknown-unknown")),
    ];
    let mut failed = Vec::new();
    for (name, step) in steps {
        println!("-- {name}");
        let start = Instant::now();
        let ok = step()?;
        println!("-- {name}: {}, {:.1} s", if ok { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        if !ok {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

fn run_cargo(line: &str, env: &[(&str, &str)]) -> anyhow::Result<bool> {
    let status = Command::new(env!("CARGO"))
        .args(line.split(' '))
        .envs(env.iter().copied())
        .status()
        .with_context(|| format!("cargo {line} could not be started"))?;
    Ok(status.success())
}
