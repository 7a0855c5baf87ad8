//! `cargo xtask sim SCENARIO`: what a deployment would do, before it is deployed.
//!
//! Exits 0 where an answer was made, whatever it says; 1 where the engines can't hand over to each other; 2 where the scenario or its trace
//! has faults.
//! `--json` prints `kvferry_topology::answer::Answer`, the page of `--html` shows the same figures and holds the same JSON.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use kvferry_topology::report;
use kvferry_topology::run::{Engine, SimError, run as simulate};
use kvferry_topology::scenario::{Scenario, ScenarioError, ScenarioErrors};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The scenario's file; docs/simulator.md tells of every key, docs/guides has worked ones
    #[arg(value_name = "SCENARIO")]
    scenario: PathBuf,
    /// Answer by the closed form, at once, instead of by discrete events
    #[arg(long)]
    analytic: bool,
    /// Also hand the same load over by pull, by push, and by push while it is computed
    #[arg(long)]
    compare: bool,
    /// Another seed than the scenario's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
    /// Also write a page that opens in any browser
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut scenario = match Scenario::from_file(&args.scenario) {
        Ok(scenario) => scenario,
        Err(errors) => {
            eprintln!("{errors}");
            return Ok(status(&errors));
        }
    };
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    let engine = if args.analytic { Engine::Analytic } else { Engine::Events };
    let began = Instant::now();
    // Whether the page can be written is known before anybody waits for it.
    let page = args
        .html
        .as_ref()
        .map(|file| std::fs::File::create(file).with_context(|| format!("{} can't be written", file.display())));
    let page = page.transpose()?;
    let answer = match simulate(&scenario, engine, args.compare) {
        Err(SimError::Load(errors)) => {
            eprintln!("{errors}");
            return Ok(ExitCode::from(2));
        }
        other => other?,
    };
    let took = began.elapsed();
    if let Some(mut page) = page {
        page.write_all(report::page(&answer).as_bytes())?;
    }
    let mut text =
        if args.json { format!("{}\n", serde_json::to_string_pretty(&answer)?) } else { report::text(&answer) };
    if !args.json {
        text.push_str(&format!("simulated in {:.1} s of this machine\n", took.as_secs_f64()));
        if let Some(file) = &args.html {
            text.push_str(&format!("{} holds the report\n", file.display()));
        }
    }
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever reads it has read enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        other => Ok(other.map(|()| ExitCode::SUCCESS)?),
    }
}

/// 1 where all that is wrong is that the engines don't match.
pub(crate) fn status(errors: &ScenarioErrors) -> ExitCode {
    let mismatch = |e: &ScenarioError| matches!(e, ScenarioError::Mismatch(_));
    ExitCode::from(if errors.0.iter().all(mismatch) { 1 } else { 2 })
}
