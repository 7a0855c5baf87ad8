//! `cargo xtask lint`: every check that isn't a test, each named and timed.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;

use crate::cargo::{self, Workspace};
use crate::layers;

/// No arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs all checks, also after one has failed, so that one run shows every fault.
pub(crate) fn run(_: Args) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::prepare()?;
    let left_out = workspace.lacks();
    if let Some((package, why)) = &left_out {
        eprintln!("clippy and docs are without {package}: {why}");
    }
    let all = workspace.selection().join(" ");
    let run = |line: String, env| run_cargo(&workspace, &line, env);
    let steps: [(&str, &dyn Fn() -> anyhow::Result<bool>); 5] = [
        ("format", &|| run("fmt --all --check".into(), None)),
        ("clippy", &|| run(format!("clippy {all} --all-targets -- -D warnings"), None)),
        ("docs", &|| run(format!("doc {all} --no-deps"), Some(("RUSTDOCFLAGS", "-D warnings")))),
        ("layers", &|| Ok(layers::run(layers::Args {})? == ExitCode::SUCCESS)),
        // No std, no sockets, no clock: what builds for a bare wasm machine uses none of them.
        ("wasm", &|| run("build -p kvferry-geometry -p kvferry-proto --target wasm32-unknown-unknown".into(), None)),
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
    if let Some((package, why)) = left_out.filter(|_| cargo::is_listed(&cargo::required(), "nixl")) {
        eprintln!("KVFERRY_REQUIRE has nixl, but {package} was left out: {why}");
        failed.push("native");
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

fn run_cargo(workspace: &Workspace, line: &str, env: Option<(&str, &str)>) -> anyhow::Result<bool> {
    let status = workspace
        .cargo()
        .args(line.split(' '))
        .envs(env)
        .status()
        .with_context(|| format!("cargo {line} could not be started"))?;
    Ok(status.success())
}
