//! `cargo xtask soak`: seeded worlds of real sessions on a virtual clock, as many as one likes; see docs/soak.md.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvferry_sim::shrink::{Kind, shrink, trace};
use kvferry_sim::{Outcome, Replay, Stats, World};

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many seeds
    #[arg(long, default_value_t = 200)]
    seeds: u64,
    /// The first of them
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Begin no world after so many minutes
    #[arg(long)]
    minutes: Option<f64>,
    /// Few engines with every byte compared, or many without bytes
    #[arg(long, value_enum, default_value_t = Which::Small)]
    world: Which,
    /// Run one world again and print what happens: SEED, or SEED:MASK as a failing run prints it
    #[arg(long)]
    replay: Option<Replay>,
    /// Threads; all cores where nothing is said
    #[arg(long)]
    threads: Option<usize>,
    /// How often a failing world is run to make it smaller; 0 leaves it as it is
    #[arg(long, default_value_t = 400)]
    shrink: u32,
    /// Plant known faults in a copy of the sessions, those whose names contain one of these words or all: the first 200 seeds must
    /// find each
    #[arg(long, value_name = "NAME", num_args = 0..)]
    mutants: Option<Vec<String>>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Which {
    Small,
    Large,
}

impl Which {
    fn kind(self) -> Kind {
        match self {
            Self::Small => Kind::Small,
            Self::Large => Kind::Large,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Large => "large",
        }
    }
}

/// After so many seeds with a violation nothing more is begun.
const ENOUGH: usize = 20;
/// Lines of a trace that are printed after a run of many worlds; a replay prints all.
const LINES: usize = 120;

/// Succeeds where every invariant held in every world.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match (&args.mutants, &args.replay) {
        (Some(names), _) => crate::mutants::plant("protocol", names),
        (None, Some(replay)) => again(args, replay),
        (None, None) => soak(args),
    }
}

fn again(args: &Args, replay: &Replay) -> anyhow::Result<ExitCode> {
    let outcome = trace(args.world.kind(), replay)?;
    for line in &outcome.trace {
        println!("{line}");
    }
    println!("hash {:016x}", outcome.hash);
    print_counts(&outcome.stats, Duration::ZERO);
    print_end(1, &outcome.stats, usize::from(outcome.violation.is_some()));
    Ok(code(outcome.violation.is_none()))
}

/// What all threads add to.
#[derive(Default)]
struct Shared {
    next: AtomicU64,
    stop: AtomicBool,
    sum: Mutex<Sum>,
}

#[derive(Default)]
struct Sum {
    stats: Stats,
    failed: Vec<(u64, String)>,
    error: Option<String>,
}

impl Shared {
    fn add(&self, seed: u64, outcome: &Outcome) {
        let mut sum = self.sum.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        sum.stats.add(&outcome.stats);
        if let Some(violation) = &outcome.violation {
            sum.failed.push((seed, format!("{}: {violation}", violation.name())));
            if sum.failed.len() >= ENOUGH {
                self.stop.store(true, Ordering::Relaxed);
            }
        }
    }

    fn work(&self, args: &Args, end: Option<Instant>) {
        let kind = args.world.kind();
        while !self.stop.load(Ordering::Relaxed) && end.is_none_or(|end| Instant::now() < end) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= args.from.saturating_add(args.seeds) {
                return;
            }
            let replay = Replay { seed, mask: kvferry_sim::Mask::default() };
            match World::new(kind.config(&replay)) {
                Ok(world) => self.add(seed, &world.run()),
                Err(error) => {
                    let mut sum = self.sum.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    sum.error = Some(error.to_string());
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

fn soak(args: &Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let minutes = args.minutes.map(|m| Duration::try_from_secs_f64(m * 60.0));
    let within = minutes.transpose().context("--minutes is no time; give a number such as 5 or 0.5")?;
    let end = within.map(|within| began + within);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores).max(1);
    let shared = Shared { next: AtomicU64::new(args.from), ..Shared::default() };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| shared.work(args, end))).collect();
        let mut shown = Instant::now();
        while workers.iter().any(|w| !w.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
            if shown.elapsed() > Duration::from_secs(1) {
                shown = Instant::now();
                progress(args, &shared, began);
            }
        }
    });
    if std::io::stderr().is_terminal() {
        eprintln!();
    }
    let sum = shared.sum.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(error) = sum.error {
        anyhow::bail!(error);
    }
    let mut failed = sum.failed;
    failed.sort();
    report(args, &failed)?;
    print_counts(&sum.stats, began.elapsed());
    print_end(sum.stats.worlds, &sum.stats, failed.len());
    Ok(code(failed.is_empty()))
}

fn progress(args: &Args, shared: &Shared, began: Instant) {
    let sum = shared.sum.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (done, steps, bad) = (sum.stats.worlds, sum.stats.steps, sum.failed.len());
    drop(sum);
    let seconds = began.elapsed().as_secs_f64();
    let text = format!(
        "{done} of {} {} worlds, {:.0} s, {:.0} steps/s, {bad} violations",
        args.seeds,
        args.world.name(),
        seconds,
        per_second(steps, seconds),
    );
    if std::io::stderr().is_terminal() {
        eprint!("\r{text}  ");
        std::io::stderr().flush().unwrap_or(());
    } else {
        eprintln!("{text}");
    }
}

/// What went wrong: all of it in a line each, and the first of every kind made smaller.
fn report(args: &Args, failed: &[(u64, String)]) -> anyhow::Result<()> {
    let mut told: Vec<&str> = Vec::new();
    for (seed, what) in failed {
        println!("seed {seed}: {what}");
        let name = what.split(':').next().unwrap_or_default();
        if args.shrink == 0 || told.contains(&name) {
            continue;
        }
        told.push(name);
        let replay = Replay { seed: *seed, mask: kvferry_sim::Mask::default() };
        let small = shrink(args.world.kind(), replay, args.shrink)?;
        let lines = &small.outcome.trace;
        println!("  the last of {} lines that are left of it after {} runs:", lines.len(), small.runs);
        for line in lines.iter().skip(lines.len().saturating_sub(LINES)) {
            println!("  {line}");
        }
        let world = if args.world == Which::Large { " --world large" } else { "" };
        println!("  run it again: cargo xtask soak{world} --replay {}", small.replay);
    }
    Ok(())
}

fn print_counts(stats: &Stats, took: Duration) {
    let seconds = took.as_secs_f64();
    println!("events      {} ({} messages, {} strips of operations)", stats.events, stats.messages, stats.strips);
    let speed = if took.is_zero() {
        String::new()
    } else {
        format!(" in {seconds:.1} s, {:.0} a second", per_second(stats.steps, seconds))
    };
    println!("steps       {}{speed}", stats.steps);
    println!("time        {:.0} s of the worlds", stats.time.as_secs_f64());
    let (done, bad, doubt) = stats.ends;
    println!("operations  {} reads, {} writes: {done} done, {bad} failed, {doubt} in doubt", stats.reads, stats.writes);
    println!("compared    {} bytes", stats.compared);
    let list = |pairs: Vec<(String, u64)>| {
        let mut pairs = pairs;
        pairs.sort_by_key(|(name, count)| (std::cmp::Reverse(*count), name.clone()));
        pairs.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
    };
    let named = |map: &std::collections::BTreeMap<String, u64>| map.iter().map(|(n, c)| (n.clone(), *c)).collect();
    println!("requests    {}", list(named(&stats.outcomes)));
    println!("leases      {}", list(named(&stats.leases)));
    println!("faults      {}", list(stats.faults.iter().map(|(kind, count)| (kind.to_string(), *count)).collect()));
}

fn print_end(seeds: u64, stats: &Stats, violations: usize) {
    println!("{seeds} seeds, {} faults, {violations} violations", stats.all_faults());
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

fn code(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
