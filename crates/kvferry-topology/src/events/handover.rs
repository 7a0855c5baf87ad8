//! D's engines: who takes a cache over, how that ends, and when its blocks are free.

use std::time::Duration;

use kvferry_geometry::units::Tokens;
use kvferry_proto::rank::{Assurance, PullId};
use kvferry_session::owner::{FailurePolicy, Mode as Who, PullWish};
use kvferry_session::{Delivered, Failed, Phase};
use kvferry_sim::world::{World, key};

use super::{Deployment, Event, over, seconds};
use crate::blocks::Ask;
use crate::number::nearest;
use crate::scenario::{Choice, Mode};

/// The router gives a request to an engine of D.
pub(super) fn choose(world: &mut World<Deployment>, i: u32) {
    let script = &mut world.script;
    let all = u32::try_from(script.consumers.len()).unwrap_or(0);
    let turn = script.turn.1;
    script.turn.1 = (turn + 1) % all.max(1);
    let up = |d: &u32| script.consumers.get(*d as usize).is_some_and(|e| e.up);
    let order = (0..all).map(|n| (turn + n) % all.max(1)).filter(up);
    let chosen = match script.scenario.router.decode {
        Choice::RoundRobin => order.into_iter().next(),
        Choice::LeastLoaded => order.min_by_key(|d| script.consumers.get(*d as usize).map(|e| e.tokens)),
    };
    let tokens = tokens_of(script, i);
    // Where none is up, it waits at the one whose turn it is.
    let d = chosen.unwrap_or(turn);
    if let Some(consumer) = script.consumers.get_mut(d as usize) {
        consumer.tokens += tokens;
    }
    if let Some(r) = script.request(i) {
        r.d = d;
    }
}

/// Tokens that D makes room for.
fn tokens_of(script: &Deployment, i: u32) -> u64 {
    script.load.requests.get(i as usize).map_or(0, |r| r.prompt + r.output)
}

/// D hears of a request.
pub(super) fn ask(world: &mut World<Deployment>, i: u32) {
    let Some(d) = world.script.requests.get(i as usize).map(|r| r.d) else { return };
    if let Some(consumer) = world.script.consumers.get_mut(d as usize) {
        consumer.waiting.push_back(i);
    }
    next(world, d);
}

/// Takes up what waits, first come first served, as long as there is room.
pub(super) fn next(world: &mut World<Deployment>, d: u32) {
    let scenario = world.script.scenario.clone();
    let m = &scenario.decode.manifest;
    loop {
        let script = &mut world.script;
        let Some(consumer) = script.consumers.get_mut(d as usize).filter(|e| e.up) else { return };
        let Some(&i) = consumer.waiting.front() else { return };
        let Some(wanted) = script.load.requests.get(i as usize) else { return };
        let prompt = Ask { tokens: wanted.prompt, states: 1 };
        let output = Ask { tokens: wanted.output, states: 0 };
        let taken = consumer.free.take(m, prompt).and_then(|a| match consumer.free.take(m, output) {
            Ok(b) => Ok((a, b)),
            Err(none) => {
                consumer.free.give(&a);
                Err(none)
            }
        });
        match taken {
            Ok(blocks) => {
                consumer.waiting.pop_front();
                pull(world, i, d, blocks);
            }
            Err(none) if none.needs > u64::from(none.all) || consumer.running == 0 => {
                consumer.waiting.pop_front();
                decline(world, i, d);
                over(world, i, Some("does not fit".into()));
            }
            Err(_) => {
                if let Some(r) = script.request(i) {
                    r.life.waited = true;
                }
                return;
            }
        }
    }
}

type Taken = (Vec<crate::blocks::GroupBlocks>, Vec<crate::blocks::GroupBlocks>);

fn pull(world: &mut World<Deployment>, i: u32, d: u32, blocks: Taken) {
    let at = seconds(world);
    let engine = world.script.consumer(d);
    let script = &mut world.script;
    let (scenario, load) = (script.scenario.clone(), script.load.clone());
    let Some(wanted) = load.requests.get(i as usize) else { return };
    let Some(consumer) = script.consumers.get_mut(d as usize) else { return };
    let cached = wanted.prefix.at_decode(&mut consumer.prefix, wanted.prompt);
    consumer.running += 1;
    let ask = Ask { tokens: wanted.prompt, states: 1 };
    let groups = ask.dst(&scenario.decode.manifest, &blocks.0, cached, 0);
    let (per_token, per_state) = script.room;
    let Some(r) = script.request(i) else { return };
    let Some(fence) = r.fence.clone() else { return };
    r.life.decode_hit = cached;
    r.life.taken = Some(at);
    r.life.room = nearest(per_token * (wanted.prompt + wanted.output) as f64 + per_state);
    r.dst = Some(blocks);
    let wish = PullWish {
        address: World::<Deployment>::address(r.p),
        fence,
        tokens: Tokens::new(wanted.prompt),
        groups,
        content_key: key(i.into()),
        assurance: Assurance::Fenced,
        deadline: scenario.transfer.deadline,
        priority: kvferry_session::owner::USUAL_PRIORITY,
        policy: FailurePolicy::default(),
        mode: match scenario.transfer.mode {
            Mode::Pull => Who::Pull,
            Mode::Push => Who::Push { progress: false },
        },
    };
    super::gantt::begins(world, i);
    let mut pull = None;
    world.with_owner(engine, |owner, now| pull = Some(owner.pull(wish, now)));
    if let Some(pull) = pull {
        world.script.pulls.insert((engine, pull), i);
        if let Some(r) = world.script.request(i) {
            r.pull = Some(pull);
        }
    }
    world.pump_owner(engine);
}

/// P is told that nobody wants a cache.
fn decline(world: &mut World<Deployment>, i: u32, d: u32) {
    let engine = world.script.consumer(d);
    let Some((address, fence)) =
        world.script.requests.get(i as usize).and_then(|r| Some((World::<Deployment>::address(r.p), r.fence.clone()?)))
    else {
        return;
    };
    world.with_owner(engine, |owner, now| owner.decline(&address, fence, now));
    world.pump_owner(engine);
    let tokens = tokens_of(&world.script, i);
    if let Some(consumer) = world.script.consumers.get_mut(d as usize) {
        consumer.tokens = consumer.tokens.saturating_sub(tokens);
    }
}

/// A request has ended, one way or the other.
pub(super) fn ended(world: &mut World<Deployment>, engine: u32, pull: PullId, result: Result<Delivered, Failed>) {
    let Some(i) = world.script.pulls.remove(&(engine, pull)) else { return };
    let at = seconds(world);
    super::gantt::ends(world, i);
    let script = &mut world.script;
    let (scenario, load) = (script.scenario.clone(), script.load.clone());
    let Some(wanted) = load.requests.get(i as usize) else { return };
    let Some(r) = script.requests.get_mut(i as usize) else { return };
    let d = r.d;
    match result {
        Ok(delivered) => {
            let report = delivered.report();
            // Where it is streamed, also what it waits for the next layer.
            let wire = report.phases.of(Phase::Write) + report.phases.of(Phase::Read);
            let wire = wire.saturating_sub(report.phases.queued());
            r.life.wire = Some(wire.as_secs_f64());
            r.life.bytes = report.bytes().get();
            r.life.delivered = Some(at);
            let Some(consumer) = script.consumers.get_mut(d as usize) else { return };
            wanted.prefix.enter(&mut consumer.prefix);
            consumer.decoding.0 += 1;
            consumer.decoding.1 += wanted.prompt + wanted.output / 2;
            let step = scenario.decode_time.step(consumer.decoding.0, consumer.decoding.1);
            if let Some(r) = script.request(i) {
                r.life.first_token = Some(at + step.as_secs_f64());
            }
            // The prefill has made the first token.
            let steps = u32::try_from(wanted.output).unwrap_or(u32::MAX).max(1);
            world.later(step.saturating_mul(steps), Event::Decoded(i));
        }
        Err(failed) => {
            let name = format!("{:?}", failed.cause);
            let name: String = name.chars().take_while(|c| c.is_alphanumeric()).collect();
            over(world, i, Some(name));
            leave(world, i, d);
        }
    }
}

/// D's blocks are free.
fn leave(world: &mut World<Deployment>, i: u32, d: u32) {
    let tokens = tokens_of(&world.script, i);
    let script = &mut world.script;
    let blocks = script.request(i).and_then(|r| r.dst.take());
    if let Some(consumer) = script.consumers.get_mut(d as usize) {
        consumer.tokens = consumer.tokens.saturating_sub(tokens);
        if let Some((a, b)) = blocks {
            consumer.running = consumer.running.saturating_sub(1);
            consumer.free.give(&b);
            consumer.free.give(&a);
        }
    }
    next(world, d);
}

/// D has made all tokens of a request.
pub(super) fn decoded(world: &mut World<Deployment>, i: u32) {
    let at = seconds(world);
    let Some(r) = world.script.request(i).filter(|r| !r.over) else { return };
    r.life.decoded = Some(at);
    let d = r.d;
    let tokens = world.script.load.requests.get(i as usize).map_or(0, |r| r.prompt + r.output / 2);
    if let Some(consumer) = world.script.consumers.get_mut(d as usize) {
        consumer.decoding.0 = consumer.decoding.0.saturating_sub(1);
        consumer.decoding.1 = consumer.decoding.1.saturating_sub(tokens);
    }
    over(world, i, None);
    leave(world, i, d);
}

/// An engine is gone, with all that it has.
pub(super) fn lost(world: &mut World<Deployment>, d: u32) {
    let engine = world.script.consumer(d);
    let script = &mut world.script;
    let fresh = crate::blocks::Free::new(&script.scenario.decode.manifest, |_, _| {});
    let prefix = crate::load::PrefixCache::new(script.scenario.decode.prefix_tokens);
    let Some(consumer) = script.consumers.get_mut(d as usize) else { return };
    (consumer.free, consumer.prefix, consumer.up) = (fresh, prefix, false);
    (consumer.running, consumer.decoding, consumer.tokens) = (0, (0, 0), 0);
    // What it had not taken up goes to others.
    let again: Vec<u32> = consumer.waiting.drain(..).collect();
    script.pulls.retain(|(e, _), _| *e != engine);
    let gone: Vec<u32> = (0u32..)
        .zip(&script.requests)
        .filter(|(_, r)| r.d == d && r.dst.is_some() && !r.over)
        .map(|(i, _)| i)
        .collect();
    for i in gone {
        if let Some(r) = world.script.request(i) {
            r.dst = None;
        }
        over(world, i, Some("D was lost".into()));
    }
    for i in again {
        choose(world, i);
        world.later(Duration::from_millis(1), Event::Ask(i));
    }
}

/// An engine is complete again.
pub(super) fn back(world: &mut World<Deployment>, d: u32) {
    if let Some(consumer) = world.script.consumers.get_mut(d as usize) {
        consumer.up = true;
    }
    next(world, d);
}
