//! P's engines: who computes what, when it is offered, and when its blocks are free.

use std::time::Duration;

use kvferry_geometry::request::{SrcGroup, Tail};
use kvferry_geometry::units::{TokenRange, Tokens};
use kvferry_proto::lease::Offer;
use kvferry_proto::names::{Attempt, LeaseId};
use kvferry_session::Ttl;
use kvferry_sim::world::{World, key};

use super::{Deployment, Event, handover, over, seconds};
use crate::load::Prefix;
use crate::scenario::{Choice, Stream};

/// A prompt arrives: the router gives it to an engine.
pub(super) fn arrive(world: &mut World<Deployment>, i: u32) {
    let now = seconds(world);
    let script = &mut world.script;
    let Some(p) = choose(script, i, now) else {
        return over(world, i, Some("no engine of P is up".into()));
    };
    let (load, scenario) = (script.load.clone(), script.scenario.clone());
    let Some(wanted) = load.requests.get(i as usize) else { return };
    let Some(producer) = script.producers.get_mut(p as usize) else { return };
    let hit = wanted.prefix.at_prefill(&mut producer.prefix, wanted.prompt);
    let time = scenario.prefill_time.time(wanted.prompt.saturating_sub(hit), hit).as_secs_f64();
    producer.done_at = producer.done_at.max(now) + time;
    producer.queue.push_back(i);
    if let Some(r) = script.request(i) {
        (r.p, r.life.hit) = (p, hit);
    }
    next(world, p);
}

fn choose(script: &mut Deployment, i: u32, now: f64) -> Option<u32> {
    let (load, scenario) = (script.load.clone(), script.scenario.clone());
    let wanted = load.requests.get(i as usize)?;
    let all = u32::try_from(script.producers.len()).unwrap_or(0);
    let turn = script.turn.0;
    script.turn.0 = (turn + 1) % all.max(1);
    let order = (0..all).map(|n| (turn + n) % all);
    let up: Vec<u32> = order.filter(|p| script.producers.get(*p as usize).is_some_and(|e| e.up)).collect();
    if scenario.router.prefill == Choice::RoundRobin {
        return up.first().copied();
    }
    let mut best: Option<(f64, u32)> = None;
    let mut plain = None;
    for p in up {
        let Some(producer) = script.producers.get_mut(p as usize) else { continue };
        // Only with block ids does it matter which engine it is.
        let time = match (&wanted.prefix, plain) {
            (Prefix::Blocks { .. }, _) | (_, None) => {
                let hit = wanted.prefix.at_prefill(&mut producer.prefix, wanted.prompt);
                scenario.prefill_time.time(wanted.prompt.saturating_sub(hit), hit).as_secs_f64()
            }
            (_, Some(time)) => time,
        };
        plain = Some(time);
        let done = producer.done_at.max(now) + time;
        if best.is_none_or(|(least, _)| done < least) {
            best = Some((done, p));
        }
    }
    best.map(|(_, p)| p)
}

/// The next prompt of an engine's queue, if it computes nothing and there are blocks.
pub(super) fn next(world: &mut World<Deployment>, p: u32) {
    let now = seconds(world);
    let scenario = world.script.scenario.clone();
    let m = &scenario.prefill.manifest;
    loop {
        let script = &mut world.script;
        let Some(producer) = script.producers.get_mut(p as usize).filter(|e| e.up && e.busy.is_none()) else { return };
        let Some(&i) = producer.queue.front() else { return };
        let Some(prompt) = script.requests.get(i as usize).map(|r| r.life.prompt) else { return };
        let ask = crate::blocks::Ask { tokens: prompt, states: 1 };
        let Some(producer) = script.producers.get_mut(p as usize) else { return };
        match producer.free.take(m, ask) {
            Ok(blocks) => {
                producer.queue.pop_front();
                producer.busy = Some(i);
                let epoch = producer.epoch;
                if let Some(r) = script.request(i) {
                    (r.src, r.epoch) = (Some(blocks), epoch);
                }
                return begin(world, i, p);
            }
            Err(none) if none.needs > u64::from(none.all) => {
                producer.queue.pop_front();
                over(world, i, Some("does not fit".into()));
            }
            // Until a lease ends.
            Err(_) => {
                producer.done_at = producer.done_at.max(now);
                return;
            }
        }
    }
}

/// When the steps of a prefill end, after its beginning, and tokens that are computed by then.
fn steps(script: &Deployment, i: u32) -> Vec<(Duration, u64)> {
    let Some(r) = script.requests.get(i as usize) else { return Vec::new() };
    let (prompt, hit, times) = (r.life.prompt, r.life.hit, &script.scenario.prefill_time);
    let all = times.time(prompt - hit.min(prompt), hit);
    match script.scenario.transfer.stream {
        Stream::None => vec![(all, prompt)],
        Stream::Layers { steps } => {
            let ends = times.layer_ends(u32::try_from(script.paged.len()).unwrap_or(1).max(1));
            let steps = u64::from(steps).clamp(1, ends.len() as u64);
            let end = |k: u64| {
                let layers = usize::try_from(ends.len() as u64 * k / steps).unwrap_or(1);
                let share = ends.get(layers.saturating_sub(1)).copied().unwrap_or(1.0);
                (all.mul_f64(share.clamp(0.0, 1.0)), prompt)
            };
            (1..=steps).map(end).collect()
        }
        Stream::Chunks { tokens } => {
            let mut out = Vec::new();
            let (mut at, mut done) = (Duration::ZERO, hit);
            while done < prompt {
                let to = (done + tokens.max(1)).min(prompt);
                at += times.time(to - done, done);
                done = to;
                out.push((at, done));
            }
            out
        }
    }
}

/// A prefill begins.
fn begin(world: &mut World<Deployment>, i: u32, p: u32) {
    let now = seconds(world);
    let ends = steps(&world.script, i);
    let end = ends.last().map_or(now, |e| now + e.0.as_secs_f64());
    if let Some(r) = world.script.request(i) {
        r.life.prefill = Some((now, end));
    }
    let streams = world.script.scenario.transfer.stream != Stream::None;
    if streams && !offer(world, i, p, true) {
        return;
    }
    for (step, (after, _)) in (1u32..).zip(&ends) {
        // Only the end matters where nothing is streamed.
        if streams || step as usize == ends.len() {
            world.later(*after, Event::Computed(i, step));
        }
    }
}

/// What is offered of a prompt: with its states, or without.
fn groups(script: &Deployment, i: u32, states: bool) -> Vec<SrcGroup> {
    let (Some(r), ask) = (script.requests.get(i as usize), script.ask(i)) else { return Vec::new() };
    let Some(blocks) = &r.src else { return Vec::new() };
    let mut groups = ask.src(&script.scenario.prefill.manifest, blocks, Tail::Exact);
    if !states {
        for group in &mut groups {
            if let SrcGroup::State(state) = group {
                state.checkpoints.clear();
            }
        }
    }
    groups
}

/// Offers what is computed or, where it `streams`, will be. False where that can't be.
fn offer(world: &mut World<Deployment>, i: u32, p: u32, streams: bool) -> bool {
    let groups = groups(&world.script, i, !streams);
    let offer = Offer { groups, content_key: key(i.into()) };
    let lease = world.lease_id();
    // A cache waits as long as a request may.
    let ttl = Ttl::For(world.script.scenario.transfer.deadline.saturating_mul(4));
    let mut result = None;
    world.with_owner(p, |owner, now| {
        result =
            Some(if streams { owner.announce(lease, offer, ttl, now) } else { owner.offer(lease, offer, ttl, now) });
    });
    match result {
        Some(Ok(fence)) => {
            world.script.leases.insert(lease, i);
            if let Some(r) = world.script.request(i) {
                r.fence = Some(fence);
            }
            let routing = world.script.scenario.transfer.routing;
            handover::choose(world, i);
            world.later(routing, Event::Ask(i));
            world.pump_owner(p);
            true
        }
        other => {
            let why = other.and_then(Result::err).map_or_else(|| "P is down".into(), |e| e.to_string());
            free(world, i);
            over(world, i, Some(format!("not offered: {why}")));
            idle(world, p, i);
            false
        }
    }
}

/// An engine has nothing to compute any more.
fn idle(world: &mut World<Deployment>, p: u32, i: u32) {
    if let Some(producer) = world.script.producers.get_mut(p as usize).filter(|e| e.busy == Some(i)) {
        producer.busy = None;
    }
    next(world, p);
}

/// A step of a prefill is done.
pub(super) fn computed(world: &mut World<Deployment>, i: u32, step: u32) {
    let ends = steps(&world.script, i);
    let last = step as usize >= ends.len();
    let Some(r) = world.script.requests.get(i as usize) else { return };
    let (p, epoch) = (r.p, r.epoch);
    if world.script.producers.get(p as usize).is_none_or(|e| e.epoch != epoch) {
        return;
    }
    if world.script.scenario.transfer.stream == Stream::None {
        offer(world, i, p, false);
    } else {
        promise(world, i, step, &ends, last);
    }
    if !last {
        return;
    }
    let load = world.script.load.clone();
    if let (Some(producer), Some(wanted)) = (world.script.producers.get_mut(p as usize), load.requests.get(i as usize))
    {
        wanted.prefix.enter(&mut producer.prefix);
    }
    idle(world, p, i);
}

/// Bytes are final: of some layers, or of a chunk.
fn promise(world: &mut World<Deployment>, i: u32, step: u32, ends: &[(Duration, u64)], last: bool) {
    let script = &world.script;
    let Some(r) = script.requests.get(i as usize) else { return };
    let (p, from, Some(lease)) = (r.p, r.promised, r.fence.as_ref().map(|f| f.lease)) else { return };
    let (items, range, promised) = match script.scenario.transfer.stream {
        Stream::Layers { .. } => {
            let to = script.paged.len() * step as usize / ends.len().max(1);
            let items = script.paged.get(usize::try_from(from).unwrap_or(0)..to).unwrap_or_default().to_vec();
            (items, (0, r.life.prompt), to as u64)
        }
        _ => {
            let to = ends.get((step as usize).saturating_sub(1)).map_or(r.life.prompt, |e| e.1);
            (script.paged.clone(), (from, to), to)
        }
    };
    let all = last.then(|| groups(script, i, true));
    if let Some(r) = world.script.request(i) {
        r.promised = promised;
    }
    let range = TokenRange::new(Tokens::new(range.0), Tokens::new(range.1));
    // Where the lease is over already nobody wants to know.
    world.with_owner(p, |owner, now| {
        if !items.is_empty() {
            drop(owner.region_ready(lease, Attempt::FIRST, &items, range, now));
        }
        if let Some(groups) = all {
            drop(owner.seal(lease, Attempt::FIRST, groups, now));
        }
    });
    world.pump_owner(p);
}

fn free(world: &mut World<Deployment>, i: u32) {
    let Some(r) = world.script.request(i) else { return };
    let (p, blocks) = (r.p, r.src.take());
    if let (Some(blocks), Some(producer)) = (blocks, world.script.producers.get_mut(p as usize)) {
        producer.free.give(&blocks);
    }
}

/// P has its blocks back.
pub(super) fn released(world: &mut World<Deployment>, p: u32, lease: LeaseId) {
    let Some(i) = world.script.leases.remove(&lease) else { return };
    let at = seconds(world);
    free(world, i);
    if let Some(r) = world.script.request(i) {
        r.life.released = Some(at);
    }
    next(world, p);
}

/// An engine is gone, with what it has computed and what waits for it: that goes to others.
pub(super) fn lost(world: &mut World<Deployment>, p: u32) {
    let script = &mut world.script;
    let fresh = crate::blocks::Free::new(&script.scenario.prefill.manifest, |_, _| {});
    let prefix = crate::load::PrefixCache::new(script.scenario.prefill.prefix_tokens);
    let Some(producer) = script.producers.get_mut(p as usize) else { return };
    producer.epoch += 1;
    (producer.free, producer.prefix, producer.up, producer.done_at) = (fresh, prefix, false, 0.0);
    let mut again: Vec<u32> = producer.queue.drain(..).collect();
    // Whatever nobody was told of is computed elsewhere.
    if let Some(i) = producer.busy.take()
        && script.requests.get(i as usize).is_some_and(|r| r.fence.is_none())
    {
        again.push(i);
    }
    let leases: Vec<LeaseId> = script
        .leases
        .iter()
        .filter(|(_, i)| script.requests.get(**i as usize).is_some_and(|r| r.p == p))
        .map(|(lease, _)| *lease)
        .collect();
    for lease in leases {
        let i = script.leases.remove(&lease);
        if let Some(r) = i.and_then(|i| script.requests.get_mut(i as usize)) {
            r.src = None;
        }
    }
    for i in again {
        if let Some(r) = world.script.request(i) {
            (r.src, r.life.prefill) = (None, None);
        }
        world.later(Duration::from_millis(1), Event::Arrive(i));
    }
}

/// An engine is complete again.
pub(super) fn back(world: &mut World<Deployment>, p: u32) {
    if let Some(producer) = world.script.producers.get_mut(p as usize) {
        producer.up = true;
    }
    next(world, p);
}
