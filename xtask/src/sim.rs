//! `cargo xtask sim SCENARIO`: what a deployment would do, before it is deployed.
//!
//! Exits 0 where an answer was made, whatever it says; 1 where the engines can't hand over to each other, in the words of `check`; 2
//! where the scenario, its trace or the page's file has faults, or the usage is wrong; 3 where something else kept it from an answer.
//! `--json` prints `kvferry_topology::answer::Answer`, the page of `--html` shows the same figures and holds the same JSON.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use kvferry_session::pairing::PairingError;
use kvferry_topology::analytic::AnalyticError;
use kvferry_topology::events::EventsError;
use kvferry_topology::report;
use kvferry_topology::run::{Engine, SimError, run as simulate};
use kvferry_topology::scenario::{Scenario, ScenarioError, ScenarioErrors};
use kvferry_topology::traffic::TrafficError;

use crate::check::{self, FAULTY, INCOMPATIBLE};
use crate::output::{self, Page};

#[cfg(test)]
mod tests;

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

/// Exit status: neither the engines nor the input are to blame.
const FAILED: u8 = 3;

/// Why there is no answer, in words, and the exit status that says so.
#[derive(Debug)]
struct Refused(u8, String);

impl Refused {
    fn failed(error: &anyhow::Error) -> Self {
        Self(FAILED, format!("error: {error:#}"))
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let told = told(args).and_then(|text| output::print(text).map_err(|e| Refused::failed(&e)));
    Ok(match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(Refused(status, text)) => {
            eprintln!("{}", text.trim_end());
            ExitCode::from(status)
        }
    })
}

/// What the command prints.
fn told(args: &Args) -> Result<String, Refused> {
    let mut scenario = Scenario::from_file(&args.scenario).map_err(|e| Refused(status(&e), faults(&e)))?;
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    let engine = if args.analytic { Engine::Analytic } else { Engine::Events };
    // Whether the page can be written is known before anybody waits for it.
    let page = args.html.as_deref().map(Page::open).transpose();
    let page = page.map_err(|e| Refused(FAULTY, format!("error: {e:#}")))?;
    let began = Instant::now();
    let answer = simulate(&scenario, engine, args.compare).map_err(refused)?;
    let took = began.elapsed();
    let page = page.map(|page| page.write(&report::page(&answer))).transpose();
    let page = page.map_err(|e| Refused::failed(&e))?.unwrap_or_default();
    if args.json {
        let json = serde_json::to_string_pretty(&answer).map_err(|e| Refused::failed(&e.into()))?;
        return Ok(json + "\n");
    }
    let took = format!("simulated in {:.1} s of this machine\n", took.as_secs_f64());
    Ok(report::text(&answer) + &took + &page)
}

/// 1 where all that is wrong is that the engines don't match.
fn status(errors: &ScenarioErrors) -> u8 {
    let mismatch = |e: &ScenarioError| matches!(e, ScenarioError::Mismatch(_));
    if errors.0.iter().all(mismatch) { INCOMPATIBLE } else { FAULTY }
}

/// The faults of a scenario, one below the other; what differs between its engines as `check` says it.
pub(crate) fn faults(errors: &ScenarioErrors) -> String {
    let fault = |error: &ScenarioError| match error {
        ScenarioError::Mismatch(found) => {
            format!("D cannot take over P's cache:\n{}", check::mismatches_text(found))
        }
        other => format!("{other}\n"),
    };
    errors.0.iter().map(fault).collect()
}

fn refused(error: SimError) -> Refused {
    let text = format!("error: {error}");
    let traffic = match error {
        SimError::Load(_) | SimError::Analytic(AnalyticError::Load(_)) | SimError::Events(EventsError::Load(_)) => {
            return Refused(FAULTY, text);
        }
        SimError::Analytic(AnalyticError::Traffic(traffic)) | SimError::Events(EventsError::Traffic(traffic)) => {
            traffic
        }
        _ => return Refused(FAILED, text),
    };
    match traffic {
        TrafficError::Mismatch(found) | TrafficError::Pairing(PairingError::Mismatch(found)) => {
            Refused(INCOMPATIBLE, faults(&ScenarioError::Mismatch(found).into()))
        }
        TrafficError::Pairing(_) => Refused(INCOMPATIBLE, text),
        // A request that these engines can't serve.
        _ => Refused(FAULTY, text),
    }
}
