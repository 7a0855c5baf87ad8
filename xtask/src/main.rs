//! Commands of the kvferry workspace: `cargo xtask help` lists them.
//!
//! Each command is a module with `Args` and `run`; this file only names them.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "printing is what commands are for")]

use std::process::ExitCode;

use clap::Parser;

mod backends;
mod cargo;
mod check;
mod demo;
mod engine;
mod golden;
mod layers;
mod lint;
mod mutants;
mod native;
mod output;
mod plan;
mod preflight;
mod show;
mod sim;
mod soak;
mod sweep;
mod test;

/// The simulators allocate and free small things all the time: a fifth of their time with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Commands of the kvferry workspace")]
enum Command {
    /// Run a prefill and a decode engine and prove every byte that moves between them
    Demo(demo::Args),
    /// One rank of the demo
    #[command(hide = true)]
    DemoRank(demo::RankArgs),
    /// Run all tests and count what passed, failed and was skipped
    Test(test::Args),
    /// Fetch what the NIXL backend is built with and runs on, and print the environment for it
    Native(native::Args),
    /// Say which lane a transport takes to a peer, how good it is, and whether it is good enough
    Preflight(preflight::Args),
    /// The other side of a preflight
    #[command(hide = true)]
    PreflightTarget(preflight::TargetArgs),
    /// Run every check that isn't a test: format, clippy, docs, layers, wasm
    Lint(lint::Args),
    /// Check which crate depends on which, and what must be absent
    Layers(layers::Args),
    /// Plant small faults in a copy of the planner; the tests must find each
    Mutants(mutants::Args),
    /// Say whether engine D can take over the cache of engine P, and what to change if not
    Check(check::CheckArgs),
    /// Print what would move from engine P to engine D for one request
    Plan(plan::Args),
    /// Say what a deployment would do: who sends what to whom, which link is hot, what a handover costs
    Sim(sim::Args),
    /// Try many shapes of a deployment: which work, and which are best
    Sweep(sweep::Args),
    /// Run seeded worlds of many engines in which everything goes wrong, and hold them to the invariants
    Soak(soak::Args),
    /// Hold recorded transfers of another connector against our plans
    Golden(golden::Args),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Demo(args) => demo::run(&args),
        Command::DemoRank(args) => demo::run_rank(&args),
        Command::Test(args) => test::run(args),
        Command::Native(args) => native::run(args),
        Command::Preflight(args) => preflight::run(&args),
        Command::PreflightTarget(args) => preflight::run_target(&args),
        Command::Lint(args) => lint::run(args),
        Command::Layers(args) => layers::run(args),
        Command::Mutants(args) => mutants::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Plan(args) => plan::run(args),
        Command::Sim(args) => sim::run(&args),
        Command::Sweep(args) => sweep::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Golden(args) => golden::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
