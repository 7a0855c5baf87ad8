//! `cargo xtask demo`: a prefill and a decode engine of different shapes, a process for each rank, caches of the size of a
//! real model; requests move between them, and every byte of the decode engine is proven right.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry::Assurance;
use kvferry_geometry::request::BoundRequest;
use tokio::signal::unix::{SignalKind, signal};

mod args;
mod baseline;
mod chaos;
mod crew;
mod image;
mod link;
mod plot;
mod rank;
mod report;
mod scenario;
mod service;
mod stream;
mod sweep;
mod wire;

pub(crate) use args::Args;
use crew::Crew;
use link::{Answer, Order};
pub(crate) use rank::{RankArgs, run as run_rank};
use report::{Phases, Round, Summary};
use scenario::{Engines, Role, Scenario};
use service::Service;

use crate::backends::{self, Wire};
use crate::show;

/// How long all ranks may take to fill their memory and join.
const JOIN: Duration = Duration::from_secs(300);

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    check_mode(args)?;
    check_transports(args)?;
    backends::ensure(&[args.wires(Role::Prefill), args.wires(Role::Decode)])?;
    if args.all {
        return sweep::run(args);
    }
    let engines = Engines::new(args)?;
    let wanted = engines.memory();
    check_memory(args, wanted)?;
    let scenario = Arc::new(Scenario::with(engines, args)?);
    check_plan(&scenario)?;
    let say = |text: String| {
        if !args.json {
            println!("{text}");
        }
    };
    say(format!(
        "{}: prefill {} ({} ranks) to decode {} ({} ranks), {} requests of {} tokens, {} of memory",
        scenario.model,
        args.prefill,
        scenario.prefill.ranks().count(),
        args.decode,
        scenario.decode.ranks().count(),
        args.requests,
        args.tokens,
        show::size(wanted),
    ));
    if let Some(states) = scenario.states() {
        say(states);
    }
    let (ours, theirs) = (args.wires(Role::Prefill), args.wires(Role::Decode));
    say(match ours {
        _ if ours.has(Wire::Mem) => "transport mem: all ranks are threads of this process".into(),
        _ if ours == theirs => format!("transport {ours}"),
        _ => format!("transport {ours} at the prefill ranks, {theirs} at the decode ranks"),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let summary = runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        // Whichever comes first, leaving this block drops the ranks and owners, and with them everything they had.
        tokio::select! {
            summary = play(args, &scenario, &say) => summary,
            _ = interrupt.recv() => bail!("interrupted"),
            _ = terminate.recv() => bail!("terminated"),
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    let summary = summary?;
    if let (Some(file), Some(streamed)) = (&args.svg, &summary.stream) {
        std::fs::write(file, plot::svg(&summary, streamed))
            .with_context(|| format!("cannot write {}", file.display()))?;
        say(format!("plot: {}", file.display()));
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        summary.print();
    }
    Ok(if summary.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether what was asked for is there, and makes sense.
fn check_mode(args: &Args) -> anyhow::Result<()> {
    if args.stream.is_some() && args.mode == args::Mode::Pull {
        bail!("--stream needs --mode push: who pulls reads what is complete");
    }
    if args.chaos && args.wires(Role::Prefill).has(Wire::Mem) {
        bail!("--chaos kills processes, and with --transport mem all ranks are threads of this one");
    }
    Ok(())
}

/// Whether the engines have a transport in common, before anything is built or started.
fn check_transports(args: &Args) -> anyhow::Result<()> {
    let (prefill, decode) = (args.wires(Role::Prefill), args.wires(Role::Decode));
    if !prefill.iter().any(|w| decode.has(w)) {
        bail!("prefill ranks have {prefill} and decode ranks {decode}: name one that both have");
    }
    Ok(())
}

/// Whether the machine is large enough.
fn check_memory(args: &Args, wanted: u64) -> anyhow::Result<()> {
    let available = kvferry_memory::available::available_memory().map_or(u64::MAX, kvferry_geometry::units::Bytes::get);
    if wanted > available / 10 * 9 {
        bail!(
            "this needs {} of memory, and the machine has {} to spare; ask for fewer --layers (now {}), --requests or --tokens",
            show::size(wanted),
            show::size(available),
            args.model.layers.map_or("all".to_owned(), |n| n.to_string()),
        );
    }
    Ok(())
}

/// Whether the engines can talk and the requests fit them, before anything is started.
fn check_plan(scenario: &Scenario) -> anyhow::Result<()> {
    let (compatible, _) = scenario.plan()?;
    for request in 0..scenario.requests.len() {
        BoundRequest::new(&compatible, scenario.request(request))?;
    }
    Ok(())
}

async fn play(args: &Args, scenario: &Arc<Scenario>, say: &impl Fn(String)) -> anyhow::Result<Summary> {
    let service = Service::start(args, scenario).await?;
    let sockets = [&service.prefill, &service.decode].map(|owner| owner.rank_socket().to_owned());
    let mut crew = Crew::start(args, scenario, [(Role::Prefill, &sockets[0]), (Role::Decode, &sockets[1])])?;
    let mut summary = Summary::new(args, scenario);

    say("filling caches ...".into());
    let start = Instant::now();
    crew = on_thread(crew, |crew| crew.hear(&[Role::Prefill, Role::Decode])).await?.0;
    service.prefill.ready(JOIN).await?;
    service.decode.ready(JOIN).await?;
    // With chaos some have yet to join.
    if !args.chaos {
        for socket in sockets {
            // All ranks have joined, and a killed demo leaves no file behind that is gone already.
            std::fs::remove_file(socket).ok();
        }
    }
    say(format!("all ranks ready after {:.1} s", start.elapsed().as_secs_f64()));
    let service = Arc::new(service);
    crew = if args.chaos {
        play_chaos(args, &service, crew, &mut summary, say).await?
    } else if args.stream.is_some() {
        stream::play(args, &service, crew, &mut summary, say).await?
    } else {
        play_twice(args, &service, crew, &mut summary, say).await?
    };
    summary.add_leases(&service).await?;
    drop(crew);
    Arc::into_inner(service).context("the engines are still in use")?.shutdown().await;
    Ok(summary)
}

/// All requests, with digests and without.
async fn play_twice(
    args: &Args,
    service: &Service,
    mut crew: Crew,
    summary: &mut Summary,
    say: &impl Fn(String),
) -> anyhow::Result<Crew> {
    let concurrency = args.concurrency.unwrap_or(args.requests) as usize;
    let (delivered, seconds) = service.round(Assurance::Full, concurrency).await?;
    summary.add_delivered(&service.scenario, &delivered);
    summary.full = Some(Round::new(summary.bytes, seconds));
    say(format!("{} moved and digested at both ends; now checking every byte ...", show::size(summary.bytes)));
    crew = verify(crew, summary, &[Role::Decode], &[], true).await?;

    if summary.is_right() && summary.bytes > 0 {
        let (delivered, seconds) = service.round(Assurance::Fenced, concurrency).await?;
        summary.fences.add(&delivered);
        summary.fenced = Some(Round::new(summary.bytes, seconds));
        summary.fenced_phases = Phases::of(&delivered);
        say("moved again; checking again ...".into());
        crew = verify(crew, summary, &[Role::Prefill, Role::Decode], &[], false).await?;
        let (same, memcpy) = on_thread(crew, yardstick).await?;
        (crew, summary.memcpy) = (same, Some(memcpy));
    }
    Ok(crew)
}

/// All requests until they are delivered, whoever is killed.
async fn play_chaos(
    args: &Args,
    service: &Arc<Service>,
    crew: Crew,
    summary: &mut Summary,
    say: &impl Fn(String),
) -> anyhow::Result<Crew> {
    let seed = chaos::seed()?;
    say(format!("killing {} with KVFERRY_SEED={seed} ...", show::number_of(args.kills as usize, "prefill rank")));
    let start = Instant::now();
    let played = chaos::play(args, service, crew, seed).await?;
    let seconds = start.elapsed().as_secs_f64();
    summary.add_delivered(&service.scenario, &played.delivered);
    summary.fences.stale = played.stale;
    summary.full = Some(Round::new(summary.bytes, seconds));
    summary.chaos = Some(played.chaos);
    say("all requests are delivered; now checking every byte ...".into());
    verify(played.crew, summary, &[Role::Prefill, Role::Decode], &played.turns, true).await
}

/// `turns`: which computation of each request must have arrived; empty for the first.
async fn verify(
    crew: Crew,
    summary: &mut Summary,
    roles: &'static [Role],
    turns: &[u32],
    counts: bool,
) -> anyhow::Result<Crew> {
    let order = Order::Verify { turns: turns.to_vec() };
    let (crew, answers) = on_thread(crew, move |crew| crew.ask(&order, roles)).await?;
    for (_, answer) in answers {
        let Answer::Verdict(verdict) = answer else { bail!("a rank answered something else than a verdict") };
        summary.add_verdict(verdict, counts);
    }
    Ok(crew)
}

/// Speaks to the ranks on a thread that may block, so that signals are heard meanwhile.
async fn on_thread<T: Send + 'static>(
    mut crew: Crew,
    f: impl FnOnce(&mut Crew) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<(Crew, T)> {
    tokio::task::spawn_blocking(move || {
        let out = f(&mut crew)?;
        Ok((crew, out))
    })
    .await?
}

/// The same runs by memcpy, all decode ranks at once as in the transfers.
fn yardstick(crew: &mut Crew) -> anyhow::Result<Round> {
    crew.ask(&Order::Prepare, &[Role::Decode])?;
    let (mut total, mut longest) = (0, 0f64);
    for (_, answer) in crew.ask(&Order::Copy, &[Role::Decode])? {
        let Answer::Copied { bytes, seconds } = answer else { bail!("a rank answered something else than a copy") };
        total += bytes;
        longest = longest.max(seconds);
    }
    Ok(Round::new(total, longest))
}
