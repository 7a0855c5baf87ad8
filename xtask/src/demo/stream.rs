//! `demo --stream layers`: a simulated prefill announces its layers as it computes them, and they are written meanwhile.
//!
//! First every layer's bytes are computed for real before it is announced: the memory holds other bytes until then, so that whatever
//! was written too early is seen when every byte is checked. That takes as long as filling memory takes and says nothing of
//! time. Then all is played once more by the *compute model*: a layer takes as long as was said, and nothing is filled; one request after
//! another, each to its end. At last the same is moved alone, when all is computed, for comparison.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kvferry::{Assurance, Delivered, Items, OfferStream, PullHandle, TokenRange, Tokens};
use serde::Serialize;

use super::args::Args;
use super::crew::Crew;
use super::link::{Answer, Order};
use super::report::{Round, Summary};
use super::scenario::{Layer, Role};
use super::service::Service;
use super::wire::{Moved, clock};
use super::{on_thread, verify};
use crate::show;

/// The computation of each request that is streamed: another than the memory holds at the start.
const TURN: u32 = 1;

/// What streaming has gained.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Streamed {
    /// Of the compute model: what a layer takes, in seconds.
    pub(crate) layer_seconds: f64,
    pub(crate) layers: usize,
    /// From the announcement until the seal; medians over the requests, as all that follows.
    pub(crate) prefill_seconds: f64,
    /// The same transfer alone, once all is computed.
    pub(crate) alone_seconds: f64,
    /// From the seal until it was delivered.
    pub(crate) exposed_seconds: f64,
    /// The part of the transfer's time that was hidden behind the prefill, 0 to 1.
    pub(crate) hidden: f64,
    /// The part of all bytes that were in place when their prefill ended.
    pub(crate) early_bytes: f64,
    /// The request with the median exposed time, layer by layer.
    pub(crate) lines: Vec<LayerLine>,
    /// Its seal and its delivery, in seconds from the announcement.
    pub(crate) sealed: f64,
    pub(crate) delivered: f64,
}

/// When a layer was computed and written, in seconds from the request's announcement.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LayerLine {
    pub(crate) layer: String,
    pub(crate) computed: (f64, f64),
    /// From the first post to the last completion, over all ranks; null where nothing was written.
    pub(crate) written: Option<(f64, f64)>,
    pub(crate) bytes: u64,
}

impl Streamed {
    pub(crate) fn print(&self) {
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        println!(
            "streamed {} by the compute model of {} each: prefill {}; the transfer alone {}, of which {} were left after the prefill: \
             {:.0} % of its time and {:.0} % of its bytes hidden",
            show::number_of(self.layers, "layer"),
            ms(self.layer_seconds),
            ms(self.prefill_seconds),
            ms(self.alone_seconds),
            ms(self.exposed_seconds),
            self.hidden * 100.0,
            self.early_bytes * 100.0,
        );
    }
}

/// One request's times, in nanoseconds of the host's clock.
struct Played {
    delivered: Delivered,
    announced: u64,
    layers: Vec<(u64, u64)>,
    sealed: u64,
    ended: u64,
}

/// All requests: computed and checked, then by the compute model, then alone.
pub(crate) async fn play(
    args: &Args,
    service: &Arc<Service>,
    mut crew: Crew,
    summary: &mut Summary,
    say: &impl Fn(String),
) -> anyhow::Result<Crew> {
    let scenario = Arc::clone(&service.scenario);
    let (layers, count) = (scenario.layers(), scenario.requests.len());
    let turns = vec![TURN; count];
    let start = clock();
    let (mut delivered, mut moving) = (Vec::new(), Vec::new());
    for request in 0..count {
        let (mut stream, handle) = begin(service, request, Assurance::Full).await?;
        for layer in &layers {
            let items = layer.all.clone();
            let compute = move |crew: &mut Crew| crew.prefill(request, TURN, Some(items));
            let (same, all) = on_thread(crew, compute).await?;
            crew = same;
            anyhow::ensure!(all, "a prefill rank is gone");
            announce(&stream, layer, args.tokens).await?;
        }
        stream.seal(scenario.src_groups(request)).await?;
        moving.push(handle);
    }
    for (request, handle) in moving.into_iter().enumerate() {
        delivered.push(handle.await.with_context(|| format!("request {request}"))?);
    }
    summary.add_delivered(&scenario, &delivered);
    summary.full = Some(Round::new(summary.bytes, seconds(start, clock())));
    say(format!("{} moved while they were computed; now checking every byte ...", show::size(summary.bytes)));
    crew = verify(crew, summary, &[Role::Decode], &turns, true).await?;
    if !summary.is_right() || summary.bytes == 0 {
        return Ok(crew);
    }

    // What was logged until here is of no interest.
    (crew, _) = log_of(crew).await?;
    let played = by_the_model(args, service, &layers).await?;
    let moved;
    (crew, moved) = log_of(crew).await?;
    let all: Vec<Delivered> = played.iter().map(|p| p.delivered.clone()).collect();
    summary.fences.add(&all);
    say("moved again by the compute model; checking again ...".into());
    crew = verify(crew, summary, &[Role::Prefill, Role::Decode], &turns, false).await?;

    let (alone, took) = service.round(Assurance::Fenced, 1).await?;
    summary.fences.add(&alone);
    summary.fenced = Some(Round::new(summary.bytes, took));
    let mut times: Vec<f64> = alone.iter().map(|d| d.report().took.as_secs_f64()).collect();
    times.sort_unstable_by(f64::total_cmp);
    summary.stream = Some(judge(args, &layers, &played, &moved, median(&times)));
    Ok(crew)
}

/// Announces a request, and has it pushed.
async fn begin(service: &Service, request: usize, assurance: Assurance) -> anyhow::Result<(OfferStream, PullHandle)> {
    let stream = service.announce(request).await?;
    let handle = service.pull(request, stream.reference(), assurance).await?;
    Ok((stream, handle))
}

/// A layer is computed. Its states are final with the seal.
pub(crate) async fn announce(stream: &OfferStream, layer: &Layer, tokens: u64) -> anyhow::Result<()> {
    if !layer.paged.is_empty() {
        let tokens = TokenRange::new(Tokens::ZERO, Tokens::new(tokens));
        stream.region_ready(Items::Ids(layer.paged.clone()), tokens).await?;
    }
    Ok(())
}

async fn by_the_model(args: &Args, service: &Arc<Service>, layers: &[Layer]) -> anyhow::Result<Vec<Played>> {
    let mut played = Vec::new();
    for request in 0..service.scenario.requests.len() {
        let announced = clock();
        let (mut stream, handle) = begin(service, request, Assurance::Fenced).await?;
        // The end is seen when it comes, also if that is before we look.
        let end = tokio::spawn(async move {
            let delivered = handle.await;
            (delivered, clock())
        });
        let (mut times, mut at) = (Vec::new(), announced);
        for layer in layers {
            let until = at.saturating_add(nanos(args.layer_time()));
            tokio::time::sleep(Duration::from_nanos(until.saturating_sub(clock()))).await;
            // The next one is computed while this one is announced.
            let now = clock();
            announce(&stream, layer, args.tokens).await?;
            times.push((at, now.max(at)));
            at = now;
        }
        stream.seal(service.scenario.src_groups(request)).await?;
        let sealed = clock();
        let (delivered, ended) = end.await?;
        let delivered = delivered.with_context(|| format!("request {request}"))?;
        played.push(Played { delivered, announced, layers: times, sealed, ended });
    }
    Ok(played)
}

/// What the prefill ranks have written since they were last asked.
async fn log_of(crew: Crew) -> anyhow::Result<(Crew, Vec<Moved>)> {
    let (crew, answers) = on_thread(crew, |crew| crew.ask(&Order::Log, &[Role::Prefill])).await?;
    let mut moved = Vec::new();
    for (_, answer) in answers {
        let Answer::Log(of_rank) = answer else { anyhow::bail!("a rank answered something else than its log") };
        moved.extend(of_rank);
    }
    Ok((crew, moved))
}

fn judge(args: &Args, layers: &[Layer], played: &[Played], moved: &[Moved], alone_seconds: f64) -> Streamed {
    // One request after another: what was posted from its announcement until its end is its own.
    let of_request = |p: &Played| {
        let (from, to) = (p.announced, p.ended);
        moved.iter().filter(move |m| m.from >= from && m.to <= to).copied().collect::<Vec<Moved>>()
    };
    let bytes = |of: &[Moved]| of.iter().map(|m| m.bytes).sum::<u64>();
    let early = played.iter().map(|p| {
        let its: Vec<Moved> = of_request(p).into_iter().filter(|m| m.to <= p.sealed).collect();
        bytes(&its)
    });
    let (early, all) = (early.sum::<u64>(), bytes(moved));
    let sorted = |time: &dyn Fn(&Played) -> f64| {
        let mut times: Vec<f64> = played.iter().map(time).collect();
        times.sort_unstable_by(f64::total_cmp);
        times
    };
    let exposed = median(&sorted(&|p| seconds(p.sealed, p.ended)));
    let prefill_seconds = median(&sorted(&|p| seconds(p.announced, p.sealed)));
    let typical = played.iter().min_by(|a, b| {
        let off = |p: &Played| (seconds(p.sealed, p.ended) - exposed).abs();
        off(a).total_cmp(&off(b))
    });
    let lines = typical.map(|p| {
        let its = of_request(p);
        let line = |(layer, (from, to)): (&Layer, &(u64, u64))| {
            let of_layer = || its.iter().filter(|m| layer.all.iter().any(|item| item.get() == m.item));
            let first = of_layer().map(|m| m.from).min();
            let last = of_layer().map(|m| m.to).max();
            LayerLine {
                layer: layer.name.clone(),
                computed: (seconds(p.announced, *from), seconds(p.announced, *to)),
                written: first.zip(last).map(|(a, b)| (seconds(p.announced, a), seconds(p.announced, b))),
                bytes: of_layer().map(|m| m.bytes).sum(),
            }
        };
        layers.iter().zip(&p.layers).map(line).collect()
    });
    let times = typical.map(|p| (seconds(p.announced, p.sealed), seconds(p.announced, p.ended)));
    let (sealed, delivered) = times.unwrap_or_default();
    Streamed {
        layer_seconds: args.layer_time().as_secs_f64(),
        layers: layers.len(),
        prefill_seconds,
        alone_seconds,
        exposed_seconds: exposed,
        hidden: if alone_seconds > 0.0 { (1.0 - exposed / alone_seconds).clamp(0.0, 1.0) } else { 0.0 },
        early_bytes: ratio(early, all),
        lines: lines.unwrap_or_default(),
        sealed,
        delivered,
    }
}

fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn seconds(from: u64, to: u64) -> f64 {
    Duration::from_nanos(to.saturating_sub(from)).as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "a part for people to read")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
