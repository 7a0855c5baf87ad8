//! `cargo xtask demo`: a prefill and a decode engine of different shapes, a process for each rank, caches of the size of a
//! real model; requests move between them, and every byte of the decode engine is proven right.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry::{Address, Assurance, ContentKey, Delivered, OfferSpec, Owner, PullSpec, Tokens};
use kvferry_geometry::request::BoundRequest;
use tokio::signal::unix::{SignalKind, signal};

mod args;
mod baseline;
mod crew;
mod image;
mod link;
mod rank;
mod report;
mod scenario;
mod sweep;

pub(crate) use args::Args;
use crew::Crew;
use link::{Answer, Order};
pub(crate) use rank::{RankArgs, run as run_rank};
use report::{Round, Summary};
use scenario::{Engines, Role, Scenario};

use crate::backends::{self, Wire};
use crate::show;

/// How long all ranks may take to fill their memory and join.
const JOIN: Duration = Duration::from_secs(300);
/// How long one round of requests may take.
const DEADLINE: Duration = Duration::from_secs(300);

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
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
    if args.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        summary.print();
    }
    Ok(if summary.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
    let prefill = owner(args, scenario, Role::Prefill).await?;
    let decode = owner(args, scenario, Role::Decode).await?;
    let owners = [(Role::Prefill, prefill.rank_socket()), (Role::Decode, decode.rank_socket())];
    let mut crew = Crew::start(args, scenario, owners)?;
    let mut summary = Summary::new(args, scenario);

    say("filling caches ...".into());
    let start = Instant::now();
    crew = on_thread(crew, |crew| crew.hear(&[Role::Prefill, Role::Decode])).await?.0;
    prefill.ready(JOIN).await?;
    decode.ready(JOIN).await?;
    for socket in [prefill.rank_socket(), decode.rank_socket()] {
        // All ranks have joined, and a killed demo leaves no file behind that is gone already.
        std::fs::remove_file(socket).ok();
    }
    say(format!("all ranks ready after {:.1} s", start.elapsed().as_secs_f64()));

    let (delivered, seconds) = round(scenario, &prefill, &decode, Assurance::Full).await?;
    for d in &delivered {
        summary.add_pairs(scenario, &d.report().pairs);
        summary.zeroed += d.report().zeroed.get();
    }
    summary.full = Some(Round::new(summary.bytes, seconds));
    say(format!("{} moved and digested at both ends; now checking every byte ...", show::size(summary.bytes)));
    crew = verify(crew, &mut summary, &[Role::Decode], true).await?;

    if summary.is_right() && summary.bytes > 0 {
        let (_, seconds) = round(scenario, &prefill, &decode, Assurance::Fenced).await?;
        summary.fenced = Some(Round::new(summary.bytes, seconds));
        say("moved again; checking again ...".into());
        crew = verify(crew, &mut summary, &[Role::Prefill, Role::Decode], false).await?;
        let (same, memcpy) = on_thread(crew, yardstick).await?;
        (crew, summary.memcpy) = (same, Some(memcpy));
    }
    drop(crew);
    decode.shutdown().await;
    prefill.shutdown().await;
    Ok(summary)
}

async fn owner(args: &Args, scenario: &Scenario, role: Role) -> anyhow::Result<Owner> {
    let manifest = &scenario.engine(role).manifest;
    let ranks = u32::try_from(manifest.ranks().len())?;
    let builder = Owner::builder(rank::engine_id(role)?, manifest.spec().clone(), manifest.groups().to_vec(), ranks)
        .model_identity(&scenario.model)
        .compat(args.ignore.options())
        .stripe(args.stripe)
        .listen(Address::loopback(0));
    Ok(builder.start().await?)
}

/// All requests at once; gives their deliveries and the time from the first pull to the last delivery.
async fn round(
    scenario: &Scenario,
    prefill: &Owner,
    decode: &Owner,
    assurance: Assurance,
) -> anyhow::Result<(Vec<Delivered>, f64)> {
    let mut references = Vec::new();
    for request in 0..scenario.requests.len() {
        let offer = OfferSpec { groups: scenario.src_groups(request), content_key: content(request) };
        references.push(prefill.offer(offer).await?);
    }
    let start = Instant::now();
    let mut handles = Vec::new();
    for (request, reference) in references.into_iter().enumerate() {
        let spec = PullSpec {
            tokens: Tokens::new(scenario.ask.tokens),
            groups: scenario.dst_groups(request),
            content_key: content(request),
            assurance,
            deadline: DEADLINE,
        };
        // The reference goes the way a router would take it: as text.
        handles.push(decode.pull(reference.to_string().parse()?, spec).await?);
    }
    let mut delivered = Vec::new();
    for (request, handle) in handles.into_iter().enumerate() {
        delivered.push(handle.await.with_context(|| format!("request {request}"))?);
    }
    Ok((delivered, start.elapsed().as_secs_f64()))
}

/// What a request's cache was computed from: here, its number.
fn content(request: usize) -> ContentKey {
    ContentKey::of(&[u32::try_from(request).unwrap_or(u32::MAX)], "", &[])
}

async fn verify(crew: Crew, summary: &mut Summary, roles: &'static [Role], counts: bool) -> anyhow::Result<Crew> {
    let (crew, answers) = on_thread(crew, |crew| crew.ask(Order::Verify, roles)).await?;
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
    crew.ask(Order::Prepare, &[Role::Decode])?;
    let (mut total, mut longest) = (0, 0f64);
    for (_, answer) in crew.ask(Order::Copy, &[Role::Decode])? {
        let Answer::Copied { bytes, seconds } = answer else { bail!("a rank answered something else than a copy") };
        total += bytes;
        longest = longest.max(seconds);
    }
    Ok(Round::new(total, longest))
}
