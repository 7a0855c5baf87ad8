//! `cargo xtask sweep SCENARIO`: which deployments of a scenario work, and which are best.
//!
//! `docs/sweep.md` tells of the scenario's `[sweep]` table, and of all that is printed. Exits 0 where a candidate works, 1 where none does, 2
//! where the scenario or the state has faults, or the page can't be written. Neither the number of threads nor an end in between changes what comes out.

use std::path::PathBuf;
use std::process::ExitCode;

use kvferry_topology::report;
use kvferry_topology::scenario::Scenario;
use kvferry_topology::sweep::{Objective, Question, Report, Sweep};

use crate::output::{self, Page};
use crate::sim;

mod state;
#[cfg(test)]
mod tests;
mod work;

use state::State;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The scenario's file, with a [sweep] table; docs/sweep.md tells of its keys
    #[arg(value_name = "SCENARIO")]
    scenario: PathBuf,
    /// What the best is by: handover-p50, handover-p99, ttft-p99, hot-link, descriptors or gpus
    #[arg(long, value_name = "NAME", value_parser = objective, default_value = "handover-p99")]
    objective: Objective,
    /// The two objectives of the front
    #[arg(long, value_name = "NAME,NAME", value_parser = axes, default_value = "gpus,handover-p99")]
    axes: Axes,
    /// How many of the best are shown
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Confirm those by discrete events, and show both figures
    #[arg(long)]
    events: bool,
    /// Note what is finished in this file, and go on from there the next time
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Another seed than the scenario's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Threads; all cores where nothing is said
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print all candidates as one JSON object
    #[arg(long)]
    json: bool,
    /// Also write a page that opens in any browser
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Two objectives.
#[derive(Clone, Copy)]
struct Axes(Objective, Objective);

fn objective(name: &str) -> Result<Objective, String> {
    let known = || Objective::ALL.map(Objective::name).join(", ");
    Objective::named(name).ok_or_else(|| format!("there is no such objective; there are {}", known()))
}

fn axes(names: &str) -> Result<Axes, String> {
    let (a, b) = names.split_once(',').ok_or("name two, as gpus,handover-p99")?;
    let (a, b) = (objective(a.trim())?, objective(b.trim())?);
    if a == b { Err("name two that differ".into()) } else { Ok(Axes(a, b)) }
}

/// Exit status: none works.
const NONE_WORKS: u8 = 1;
/// Exit status: the scenario or the state has faults.
const FAULTY: u8 = 2;

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let sweep = match sweep(args) {
        Ok(sweep) => sweep,
        Err(faults) => {
            eprintln!("{faults}");
            return Ok(ExitCode::from(FAULTY));
        }
    };
    let mut state = match args.state.as_ref().map(|file| State::open(file, &sweep)).transpose() {
        Ok(state) => state,
        Err(fault) => {
            eprintln!("{fault}");
            return Ok(ExitCode::from(FAULTY));
        }
    };
    // Whether the page can be written is known before anybody waits for it.
    let page = match args.html.as_deref().map(Page::open).transpose() {
        Ok(page) => page,
        Err(fault) => {
            eprintln!("{fault:#}");
            return Ok(ExitCode::from(FAULTY));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores).max(1);
    let results = work::all(&sweep, state.as_mut(), &args.question(), (threads, args.events))?;
    let report = Report::new(&sweep, &results, args.question());
    let mut out = Vec::new();
    if args.json {
        report.json(&mut out, true)?;
        out.push(b'\n');
    } else {
        out.extend(report::sweep::text(&report).bytes());
    }
    output::print(&out)?;
    match page.map(|page| page.write(&report::sweep::page(&report))).transpose() {
        Ok(told) if !args.json => output::print(told.unwrap_or_default())?,
        Ok(_) => {}
        Err(fault) => {
            eprintln!("{fault:#}");
            return Ok(ExitCode::from(FAULTY));
        }
    }
    Ok(if results.done().1 > 0 { ExitCode::SUCCESS } else { ExitCode::from(NONE_WORKS) })
}

impl Args {
    fn question(&self) -> Question {
        Question { objective: self.objective, axes: (self.axes.0, self.axes.1), top: self.top }
    }
}

fn sweep(args: &Args) -> Result<Sweep, String> {
    let mut scenario = Scenario::from_file(&args.scenario).map_err(|e| sim::faults(&e))?;
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    Sweep::new(scenario, &args.scenario.display().to_string()).map_err(|e| e.to_string())
}
