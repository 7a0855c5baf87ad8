//! One rank of the demo: memory of the size that the model asks for, filled by coordinate, served by a worker.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, bail};
use kvferry::{EngineId, Region, Transport, Worker};
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_memory::guard::Guarded;
use kvferry_memory::{BufferOptions, HostBuffer, SharedBuffer};
use kvferry_shm::Config;
use rustix::process::{Signal, set_parent_process_death_signal};

use super::args::Args;
use super::baseline::Baseline;
use super::image::{self, Turns, Verdict};
use super::link::{Answer, Link, Order};
use super::scenario::{Role, Scenario};
use super::wire::{Logged, WireLog};
use crate::backends::Wire;

/// Bytes on either side of every region that nothing may touch.
const BAND: u64 = 4096;

/// One rank of the demo, in a process of its own
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RankArgs {
    /// Which engine
    #[arg(long, value_enum)]
    role: Role,
    /// Which rank
    #[arg(long)]
    rank: u32,
    /// Where the engine's owner takes its ranks
    #[arg(long)]
    socket: PathBuf,
    #[command(flatten)]
    demo: Args,
}

impl RankArgs {
    /// The command line of a rank's process.
    pub(crate) fn line(role: Role, rank: RankId, socket: &Path, demo: &Args) -> Vec<String> {
        let mut out = vec!["demo-rank".to_owned(), format!("--role={}", role.name()), format!("--rank={rank}")];
        out.push(format!("--socket={}", socket.display()));
        out.extend(demo.again());
        out
    }
}

/// The process of a rank; its standard input is the line to the demo.
pub(crate) fn run(args: &RankArgs) -> anyhow::Result<ExitCode> {
    // The demo may be killed at any time, and then nothing of it may stay. The end of the line says the same, but
    // not while this process is busy.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    use std::os::fd::AsFd as _;
    let line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let scenario = Scenario::new(&args.demo)?;
    // Failing here is told on the line, as is all that follows.
    match args.demo.backends.open(args.demo.wires(args.role)) {
        Ok(opened) => serve(&scenario, args.role, RankId::new(args.rank), &args.socket, line, opened.transport)?,
        Err(error) => Link::new(line)?.say(&Answer::Failed(format!("{error:#}")))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves a rank until the demo says stop or is gone.
pub(crate) fn serve(
    scenario: &Scenario,
    role: Role,
    rank: RankId,
    owner: &Path,
    line: UnixStream,
    transport: Box<dyn Transport>,
) -> anyhow::Result<()> {
    let mut link = Link::new(line)?;
    if let Err(error) = obey(scenario, role, rank, owner, &mut link, transport) {
        link.say(&Answer::Failed(format!("{error:#}")))?;
    }
    Ok(())
}

fn obey(
    scenario: &Scenario,
    role: Role,
    rank: RankId,
    owner: &Path,
    link: &mut Link,
    transport: Box<dyn Transport>,
) -> anyhow::Result<()> {
    let engine = scenario.engine(role);
    let is_shared = scenario.wires(role).has(Wire::Shm);
    let guarded = memory(&engine.manifest.region_lens(rank), &engine.label(rank), is_shared)?;
    let regions: Vec<Region> = guarded.iter().map(|g| g.inner().clone()).collect();
    image::fill(scenario, role, rank, &regions)?;
    let described = engine.manifest.rank(rank).context("no such rank")?.clone();
    let log = WireLog::default();
    let transport: Box<dyn Transport> =
        if scenario.is_streamed() { Box::new(Logged::new(transport, log.clone())) } else { transport };
    let worker = Worker::builder(engine_id(role)?, rank, owner, described.clone(), regions.clone(), transport);
    let worker = worker.staging(scenario.staging(role)).spawn()?;
    link.say(&Answer::Ready)?;
    let threads = Config::default().threads;
    let mut yardstick = None;
    // What was computed here. A rank that was started again has the first computation of everything, as at the start.
    let mut computed = vec![0; scenario.requests.len()];
    while let Some(order) = link.hear()? {
        match order {
            Order::Prefill { request, turn, items } => {
                *computed.get_mut(request).context("no such request")? = turn;
                let turns = Turns { of: &computed, only: Some(request), items: items.as_deref() };
                image::compute(scenario, rank, &regions, turns)?;
                link.say(&Answer::Prefilled)?;
            }
            Order::Log => link.say(&Answer::Log(log.take(&described)))?,
            Order::Verify { turns } => {
                let of = if role == Role::Prefill { &computed } else { &turns };
                let mut verdict = image::verify(scenario, role, rank, &regions, Turns { of, ..Turns::default() })?;
                check_bands(&guarded, &mut verdict);
                link.say(&Answer::Verdict(verdict))?;
            }
            Order::Prepare => {
                yardstick = Some(Baseline::new(scenario, rank, &regions)?);
                link.say(&Answer::Prepared)?;
            }
            Order::Copy => {
                let Some(yardstick) = &yardstick else { bail!("asked to copy before being asked to prepare") };
                let start = Instant::now();
                let bytes = yardstick.copy(threads);
                link.say(&Answer::Copied { bytes, seconds: start.elapsed().as_secs_f64() })?;
            }
            Order::Quit => break,
        }
    }
    worker.stop();
    Ok(worker.join()?)
}

/// What an engine of the demo is called.
pub(crate) fn engine_id(role: Role) -> anyhow::Result<EngineId> {
    Ok(EngineId::new(&format!("demo-{}", role.name()))?)
}

/// Memory as engines have it, except where other processes are to map it.
fn memory(lens: &[Bytes], label: &str, is_shared: bool) -> anyhow::Result<Vec<Guarded>> {
    let one = |&len: &Bytes| {
        let whole = len.checked_add(Bytes::new(2 * BAND)).context("a region of more than 2^64 bytes")?;
        // Filling touches every page.
        let options = BufferOptions::default();
        let region = if is_shared {
            SharedBuffer::new(&format!("kvferry {label}"), whole, options)?.region()
        } else {
            HostBuffer::new(whole, options)?.region()
        };
        Guarded::new(region, usize::try_from(BAND)?).context("no room for guard bands")
    };
    lens.iter().map(one).collect()
}

fn check_bands(guarded: &[Guarded], verdict: &mut Verdict) {
    for (id, g) in guarded.iter().enumerate() {
        if let Err(touched) = g.check() {
            verdict.outside += 1;
            verdict.first.get_or_insert_with(|| format!("guard band of region {id}: {touched}"));
        }
    }
}
