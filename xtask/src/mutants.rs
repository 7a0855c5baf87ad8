//! `cargo xtask mutants`: plants small faults in a copy of the planner; the property tests must find each. Those of the protocol are
//! [`soak`](crate::soak)'s.

use std::process::{Command, ExitCode};

use anyhow::Context as _;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only faults whose names contain one of these words; all where empty
    names: Vec<String>,
}

/// Succeeds where every fault is found.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    plant("planner", &args.names)
}

/// Runs the program of the tests that plants the faults of a suite.
pub(crate) fn plant(suite: &str, names: &[String]) -> anyhow::Result<ExitCode> {
    let status = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--release", "--package", "kvferry-tests", "--bin", "mutants", "--", suite])
        .args(names)
        .status()
        .context("cargo run could not be started")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
