//! The closed form: what each request's plan puts on each link, and how long that takes if all links share what is used of them.
//!
//! For each request the planner says what goes from rank to rank. With `b(l)` what it puts on link `l` (bytes, or descriptors of a
//! card's engine) and `c(l)` the link's capacity, its bytes alone take `w = max b(l) / c(l)`, and no flow is faster than its route's
//! cap. Beside others they take `w / (1 - u)`: a link that is shared equally stretches what goes over it by what is left of it
//! (M/G/1 processor sharing: L. Kleinrock, *Queueing Systems*, volume 2, 1976, 4.4), and `u` is the share of the link that other
//! requests use over the whole span. Streamed in `k` equal steps beside a prefill of `t` seconds, the last byte is there at
//! `t + w / k` after the prefill's beginning where the wire is the faster (`w <= t`), and at `t / k + w` where it is not.
//!
//! Prefills queue at P's engines as they come (that is exact: it needs no event but arrivals); D's pool is not a limit here, but said.
//! What it can't see are bursts: use [`events`](crate::events) for those.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use kvferry_sim::fabric::{Moved, PairMoved};
use kvferry_transport::OpKind;

use crate::answer::{Answer, Cost, Gantt, GanttRow};
use crate::cluster::Route;
use crate::lives::{self, Found, Life};
use crate::load::{Load, LoadErrors, Prefix, PrefixCache};
use crate::number::nearest;
use crate::scenario::{Choice, Mode, Scenario, Stream, figures};
use crate::traffic::{Part, Sizes, Traffic, TrafficError};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnalyticError {
    /// There are no requests.
    #[error(transparent)]
    Load(#[from] LoadErrors),
    /// The engines don't get along, or a request can't be served.
    #[error(transparent)]
    Traffic(#[from] TrafficError),
}

/// Answers by the closed form.
///
/// # Errors
/// If there is no load, or the engines don't match.
pub fn analyse(scenario: &Scenario) -> Result<Answer, AnalyticError> {
    let load = scenario.requests()?;
    analyse_load(scenario, &load)
}

/// What a request puts on the links.
#[derive(Clone, Copy, Debug, Default)]
struct Weight {
    /// Seconds that its fullest link needs, and which link that is.
    wire: f64,
    link: u32,
    /// First byte, and what each operation costs besides.
    latency: f64,
    /// What is there before: asking, routing, binding.
    legs: f64,
}

/// Messages between owners, and between owners and ranks, from bind to release.
fn messages(mode: Mode, parts: &[Part]) -> u64 {
    let ranks = |of: fn(&Part) -> u32| parts.iter().map(of).collect::<BTreeSet<u32>>().len() as u64;
    match mode {
        // Bind and release with their answers; an order and its answer for each rank that reads.
        Mode::Pull => 4 + 2 * ranks(|p| p.dst),
        // What is written besides, and an order to finish for each rank that is written to.
        Mode::Push => 5 + 2 * ranks(|p| p.src) + 2 * ranks(|p| p.dst),
    }
}

/// Answers by the closed form for this load.
///
/// # Errors
/// As [`analyse`].
pub fn analyse_load(s: &Scenario, load: &Load) -> Result<Answer, AnalyticError> {
    analyse_with(s, load, &mut Traffic::new(s)?, true)
}

/// The same with the traffic of two such engines, which may know some requests already; sizes of descriptors only where they are wanted.
pub(crate) fn analyse_with(
    s: &Scenario,
    load: &Load,
    traffic: &mut Traffic,
    measured: bool,
) -> Result<Answer, AnalyticError> {
    let (mut lives, places) = prefills(s, load);
    let mut used = vec![0.0f64; s.cluster.links().len()];
    let mut moved = BTreeMap::<_, Moved>::new();
    let mut weights = Vec::with_capacity(lives.len());
    let (mut sizes, mut sent) = (Sizes::default(), 0);
    let step = (lives.len() / 64).max(1);
    let mut shown = None;
    let watched = s.gantt.unwrap_or(lives.len() as u64 / 2).min((lives.len() as u64).saturating_sub(1));
    for (i, (life, (p, d))) in lives.iter_mut().zip(&places).enumerate() {
        let salt = i as u64;
        let parts = match traffic.of(salt, life.prompt, life.decode_hit) {
            Ok(parts) => parts,
            Err(TrafficError::NoRoom { .. }) => {
                life.failed = Some("does not fit".into());
                weights.push(Weight::default());
                continue;
            }
            Err(other) => return Err(other.into()),
        };
        life.bytes = parts.iter().map(|part| part.bytes).sum();
        let slice = s.transfer.admission.slice.get().max(1);
        for part in parts {
            let entry = moved.entry(((*p, part.src), (*d, part.dst))).or_default();
            entry.bytes += part.bytes;
            entry.descriptors += part.descriptors;
            entry.ops += part.bytes.div_ceil(slice);
        }
        weights.push(weigh(s, parts, (*p, *d), &mut used));
        sent += messages(s.transfer.mode, parts);
        if salt == watched {
            shown = Some((i, parts.to_vec()));
        }
        if measured && i % step == 0 {
            traffic.measure(salt, life.prompt, life.decode_hit, &mut sizes)?;
        }
    }
    let span = lives.iter().filter_map(|l| l.prefill).map(|p| p.1).fold(load.span().as_secs_f64(), f64::max).max(1e-9);
    let decode = figures(&s.decode, &s.cluster);
    let links = s.cluster.links();
    for ((life, w), request) in lives.iter_mut().zip(&weights).zip(&load.requests) {
        let (None, Some((from, to))) = (&life.failed, life.prefill) else { continue };
        let capacity = links.get(w.link as usize).map_or(f64::INFINITY, |l| l.capacity());
        let others = used.get(w.link as usize).copied().unwrap_or(0.0) / capacity / span - w.wire / span;
        let wire = w.wire / (1.0 - others.clamp(0.0, 0.99));
        let end = stream_end(s.transfer.stream, to - from, wire, request.prompt) + from;
        let delivered = end.max(to) + w.legs + w.latency;
        life.wire = Some(wire);
        life.taken = Some(if s.transfer.stream == Stream::None { to } else { from });
        life.delivered = Some(delivered);
        life.released = Some(delivered);
        life.room = nearest(decode.bytes_per_token * (request.prompt + request.output) as f64 + decode.bytes_per_state);
        let token = s.decode_time.step(1, request.prompt + request.output / 2).as_secs_f64();
        life.first_token = Some(delivered + token);
        life.decoded = Some(delivered + token * request.output as f64);
    }
    let end = lives.iter().filter_map(|l| l.decoded).fold(span, f64::max);
    let transfers = moved.values().map(|m| m.ops).sum();
    let found = Found {
        engine: "analytic",
        moved: moved.into_iter().map(|((src, dst), moved)| PairMoved { src, dst, moved }).collect(),
        links: used.iter().map(|n| (nearest(*n), Vec::new())).collect(),
        sizes: sizes.descriptors(),
        gantt: shown.and_then(|(i, parts)| gantt(i, lives.get(i)?, &parts)),
        messages: sent,
        cost: Cost { events: lives.len() as u64, transfers, shares: (0, 0) },
        end,
    };
    Ok(lives::answer(s, &lives, found))
}

/// When the last byte is there, after the prefill's beginning.
fn stream_end(stream: Stream, prefill: f64, wire: f64, prompt: u64) -> f64 {
    let steps = match stream {
        Stream::None => return prefill + wire,
        Stream::Layers { steps } => f64::from(steps.max(1)),
        Stream::Chunks { tokens } => prompt.div_ceil(tokens.max(1)).max(1) as f64,
    };
    if wire <= prefill { prefill + wire / steps } else { prefill / steps + wire }
}

/// Prefills in the order of arrival, each by the engine that is free first; with the engines of P and D of each request.
fn prefills(s: &Scenario, load: &Load) -> (Vec<Life>, Vec<(u32, u32)>) {
    let cache = || PrefixCache::new(s.prefill.prefix_tokens);
    let mut prefix: Vec<PrefixCache> = (0..s.prefill.engines).map(|_| cache()).collect();
    let mut there: Vec<PrefixCache> = (0..s.decode.engines).map(|_| PrefixCache::new(s.decode.prefix_tokens)).collect();
    let blocks = load.requests.iter().any(|r| matches!(r.prefix, Prefix::Blocks { .. }));
    // When each engine is free, in nanoseconds so that it can be ordered.
    let mut free: BinaryHeap<Reverse<(u64, u32)>> = (0..s.prefill.engines).map(|p| Reverse((0, p))).collect();
    let mut done = vec![0.0f64; s.prefill.engines as usize];
    let (mut lives, mut places) = (Vec::new(), Vec::new());
    for (i, request) in load.requests.iter().enumerate() {
        let at = request.at.as_secs_f64();
        let turn = u32::try_from(i as u64 % u64::from(s.prefill.engines.max(1))).unwrap_or(0);
        let mut hit_at =
            |p: u32| prefix.get_mut(p as usize).map_or(0, |cache| request.prefix.at_prefill(cache, request.prompt));
        let time = |hit: u64| s.prefill_time.time(request.prompt - hit.min(request.prompt), hit).as_secs_f64();
        let p = match (s.router.prefill, blocks) {
            (Choice::RoundRobin, _) => turn,
            (Choice::LeastLoaded, false) => free.pop().map_or(turn, |Reverse((_, p))| p),
            (Choice::LeastLoaded, true) => {
                let all = (0..s.prefill.engines).map(|n| (turn + n) % s.prefill.engines);
                let mut end = |p: u32| done.get(p as usize).copied().unwrap_or(0.0).max(at) + time(hit_at(p));
                all.map(|p| (end(p), p)).min_by(|a, b| a.0.total_cmp(&b.0)).map_or(turn, |best| best.1)
            }
        };
        let hit = hit_at(p);
        if let Some(cache) = prefix.get_mut(p as usize) {
            request.prefix.enter(cache);
        }
        let begin = done.get(p as usize).copied().unwrap_or(0.0).max(at);
        let end = begin + time(hit);
        if let Some(slot) = done.get_mut(p as usize) {
            *slot = end;
        }
        if s.router.prefill == Choice::LeastLoaded && !blocks {
            free.push(Reverse((nearest(end * 1e9), p)));
        }
        let d = u32::try_from(i as u64 % u64::from(s.decode.engines.max(1))).unwrap_or(0);
        let decode_hit = there.get_mut(d as usize).map_or(0, |cache| {
            let hit = request.prefix.at_decode(cache, request.prompt);
            request.prefix.enter(cache);
            hit
        });
        let prefill = Some((begin, end));
        lives.push(Life { at, prompt: request.prompt, hit, decode_hit, prefill, ..Life::default() });
        places.push((p, d));
    }
    (lives, places)
}

/// Puts a request's bytes on its links.
fn weigh(s: &Scenario, parts: &[Part], (p, d): (u32, u32), used: &mut [f64]) -> Weight {
    let mut on: BTreeMap<u32, f64> = BTreeMap::new();
    let mut out = Weight::default();
    let (mut latency, mut slowest, mut node) = (0.0f64, 0.0f64, (0, 0));
    let kind = match s.transfer.mode {
        Mode::Pull => OpKind::Read,
        Mode::Push => OpKind::Write,
    };
    let slice = s.transfer.admission.slice.get().max(1);
    let mut posts: BTreeMap<u32, f64> = BTreeMap::new();
    for part in parts {
        let (Some(src), Some(dst)) = (s.prefill.gpu(p, part.src), s.decode.gpu(d, part.dst)) else { continue };
        node = (src.node, dst.node);
        for route in s.cluster.routes(src, dst, s.transfer.rails) {
            let (bytes, descriptors) = (part.bytes as f64 * route.share, part.descriptors as f64 * route.share);
            for link in &route.links {
                *on.entry(link.0).or_default() += bytes;
            }
            for link in if kind == OpKind::Read { &route.work } else { &route.push_work } {
                *on.entry(link.0).or_default() += descriptors;
            }
            let first = if kind == OpKind::Read { route.latency } else { route.push_latency() * 2 };
            latency = latency.max(first.as_secs_f64());
            // What one rank posts it posts one after the other, slice by slice.
            let poster = if kind == OpKind::Read { part.dst } else { part.src };
            *posts.entry(poster).or_default() += cost(&route, part.bytes.div_ceil(slice));
            slowest = slowest.max(bytes / route.cap);
        }
    }
    for (link, amount) in on {
        let Some(total) = used.get_mut(link as usize) else { continue };
        *total += amount;
        let capacity = s.cluster.links().get(link as usize).map_or(f64::INFINITY, |l| l.capacity());
        if amount / capacity > out.wire {
            (out.wire, out.link) = (amount / capacity, link);
        }
    }
    let posts = posts.into_values().fold(0.0, f64::max);
    out.wire = out.wire.max(slowest).max(posts);
    out.latency = latency;
    // Routed, bound and answered, ordered at the ranks and answered, released and answered.
    let across = s.cluster.control_latency(node.0, node.1).as_secs_f64();
    let within = s.cluster.control_latency(node.0, node.0).as_secs_f64();
    out.legs = if s.transfer.stream == Stream::None {
        s.transfer.routing.as_secs_f64() + 4.0 * across + 2.0 * within
    } else {
        2.0 * across + 2.0 * within
    };
    out
}

fn cost(route: &Route, ops: u64) -> f64 {
    route.per_message.as_secs_f64() * ops as f64
}

fn gantt(i: usize, life: &Life, parts: &[Part]) -> Option<Gantt> {
    let ((from, to), delivered, wire) = (life.prefill?, life.delivered?, life.wire?);
    let at = life.at;
    let mut rows = Vec::new();
    if from > at {
        let bars = vec![(0.0, from - at, "waits for P".to_owned())];
        rows.push(GanttRow { name: "queue".into(), kind: "wait".into(), bars });
    }
    let bars = vec![(from - at, to - at, format!("{} tokens, {} of them hit", life.prompt, life.hit))];
    rows.push(GanttRow { name: "prefill".into(), kind: "compute".into(), bars });
    let most = parts.iter().map(|p| p.bytes).max().unwrap_or(1).max(1) as f64;
    for part in parts.iter().take(24) {
        let begin = (delivered - wire).max(from) - at;
        let end = begin + wire * part.bytes as f64 / most;
        let bars = vec![(begin, end, format!("{:.1} MB", part.bytes as f64 / 1e6))];
        rows.push(GanttRow { name: format!("rank {} -> rank {}", part.src, part.dst), kind: "wire".into(), bars });
    }
    if let Some(token) = life.first_token {
        let bars = vec![(delivered - at, token - at, "first token at D".to_owned())];
        rows.push(GanttRow { name: "decode".into(), kind: "compute".into(), bars });
    }
    Some(Gantt { request: i as u64, tokens: life.prompt, rows })
}
