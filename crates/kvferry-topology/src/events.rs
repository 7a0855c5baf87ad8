//! Discrete events: the real sessions of all engines on a virtual clock, over links that they share.
//!
//! Owners and ranks are those of [`kvferry_session`], stepped by [`kvferry_sim`]: they greet each other, offer, bind, admit, read or
//! write, release and give back as in production, without bytes. What they do takes the time that it takes on the cluster's links,
//! which are shared max-min fair ([`kvferry_sim::flows`]). What isn't a session is simple: P computes one prompt after the other, a
//! decode takes the time that its length takes, and D reserves blocks for prompt and output before it asks for a cache.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvferry_proto::names::{Fence, LeaseId};
use kvferry_proto::rank::PullId;
use kvferry_session::owner::Effect;
use kvferry_sim::fabric::FabricConfig;
use kvferry_sim::shape::Shape;
use kvferry_sim::world::{NotMade, Script, Who, World, WorldConfig};

use crate::answer::{Answer, Cost};
use crate::blocks::{Ask, Free, GroupBlocks};
use crate::lives::{self, Found, Life};
use crate::load::{Load, LoadErrors, PrefixCache};
use crate::scenario::{Broken, Scenario};
use crate::traffic::{Sizes, Traffic, TrafficError};

mod gantt;
mod handover;
mod prefill;
mod samples;
mod wires;

use gantt::Watch;
use samples::Samples;
use wires::ClusterWires;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// There are no requests.
    #[error(transparent)]
    Load(#[from] LoadErrors),
    /// The engines don't get along.
    #[error(transparent)]
    Traffic(#[from] TrafficError),
    /// There is no memory for the world.
    #[error(transparent)]
    NotMade(#[from] NotMade),
    /// The engines are not complete after ten simulated minutes.
    #[error("{missing} of {all} engines never became complete: {why}")]
    NotUp {
        /// How many.
        missing: u32,
        /// Of how many.
        all: u32,
        /// What their owners say.
        why: String,
    },
    /// A fault of kvferry: please report it.
    #[error("the simulation broke an invariant of the protocol, which is a fault of kvferry: {0}")]
    Violation(String),
}

/// Simulates a scenario.
///
/// # Errors
/// If there is no load, the engines don't match, or there isn't memory for them.
pub fn simulate(scenario: &Scenario) -> Result<Answer, EventsError> {
    let load = scenario.requests()?;
    simulate_load(scenario, &load)
}

/// Simulates a scenario with this load.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_load(scenario: &Scenario, load: &Load) -> Result<Answer, EventsError> {
    // What would be refused later is refused here, in words for people.
    let mut traffic = Traffic::new(scenario)?;
    let wires = Arc::new(ClusterWires::new(scenario));
    let fabric = FabricConfig {
        bytes: false,
        lane: (scenario.transfer.lane, scenario.transfer.lane),
        wires: Some(wires),
        watched: false,
        ..FabricConfig::new(scenario.seed)
    };
    let shape = |fleet: &crate::scenario::Fleet, side: &str| {
        let text = format!("{side} {}", fleet.description.shape);
        (Arc::new(Shape::plain(fleet.manifest.clone(), text)), fleet.engines as usize)
    };
    let (p, d) = (shape(&scenario.prefill, "prefill"), shape(&scenario.decode, "decode"));
    let shapes = std::iter::repeat_n(p.0, p.1).chain(std::iter::repeat_n(d.0, d.1)).collect();
    let mut config = WorldConfig::plain(scenario.seed, shapes, fabric);
    config.admission = scenario.transfer.admission;
    config.idle = scenario.transfer.idle;
    config.stripe = scenario.transfer.stripe;
    let all = scenario.prefill.engines + scenario.decode.engines;
    let mut world = World::with(config, Deployment::new(scenario, load))?;
    let mut until = Duration::ZERO;
    let up = |world: &World<Deployment>| (0..all).filter(|e| !world.is_up(*e)).count();
    while up(&world) > 0 {
        until += Duration::from_millis(100);
        while world.next(until) {}
        if until > Duration::from_secs(600) || world.violation().is_some() {
            let missing = u32::try_from(up(&world)).unwrap_or(u32::MAX);
            let why = world.violation().map_or_else(|| "no rank joined".into(), ToString::to_string);
            return Err(EventsError::NotUp { missing, all, why });
        }
    }
    world.script.begin = until;
    come(&mut world, 0);
    for (i, failure) in (0u32..).zip(&scenario.failures) {
        world.at(until + failure.at, Event::Breaks(i));
    }
    world.at(until, Event::Sample);
    let last = until + load.span() + scenario.transfer.deadline.saturating_mul(4) + Duration::from_secs(86_400);
    while world.script.open > 0 && world.next(last) {}
    if let Some(violation) = world.violation() {
        return Err(EventsError::Violation(violation.to_string()));
    }
    // Leases that are still to be given back.
    let settled = world.now() + Duration::from_secs(1);
    while world.next(settled) {}
    let mut sizes = Sizes::default();
    for (i, life) in world.script.sampled() {
        traffic.measure(i, life.prompt, life.decode_hit, &mut sizes)?;
    }
    let stats = world.stats().clone();
    let mut moved = world.fabric().moved();
    for m in &mut moved {
        // The world counts D's engines after P's.
        m.dst.0 = m.dst.0.saturating_sub(scenario.prefill.engines);
    }
    let transfers = moved.iter().map(|m| m.moved.ops).sum();
    let carried = world.fabric().carried();
    let begin = world.script.begin;
    let end = world.script.last.saturating_sub(begin).as_secs_f64();
    let links = world.script.samples.links(&scenario.cluster, &carried, end);
    let found = Found {
        engine: "events",
        moved,
        links,
        sizes: sizes.descriptors(),
        gantt: gantt::gantt(&world),
        messages: stats.messages,
        cost: Cost { events: stats.events, transfers, shares: world.fabric().shares() },
        end,
    };
    let lives: Vec<Life> = std::mem::take(&mut world.script.requests).into_iter().map(|r| r.life).collect();
    Ok(lives::answer(scenario, &lives, found))
}

/// What happens besides the sessions' own doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The load's next prompt arrives.
    Come(u32),
    /// A prompt is given to an engine.
    Arrive(u32),
    /// Its prefill has reached its how-manieth step; the last is its end.
    Computed(u32, u32),
    /// D hears of it.
    Ask(u32),
    /// D has made all its tokens.
    Decoded(u32),
    /// Something breaks.
    Breaks(u32),
    /// It is whole again.
    Mended(u32),
    /// Links are looked at.
    Sample,
}

/// A request on its way.
#[derive(Debug, Default)]
struct Request {
    life: Life,
    p: u32,
    d: u32,
    src: Option<Vec<GroupBlocks>>,
    /// For the prompt, and for the output.
    dst: Option<(Vec<GroupBlocks>, Vec<GroupBlocks>)>,
    fence: Option<Fence>,
    pull: Option<PullId>,
    /// Which life of P's engine computes it.
    epoch: u32,
    /// Tokens, or steps, that D was promised.
    promised: u64,
    over: bool,
}

/// An engine of P.
#[derive(Debug)]
struct Producer {
    free: Free,
    prefix: PrefixCache,
    queue: VecDeque<u32>,
    busy: Option<u32>,
    /// When all that waits will be computed, in seconds since the beginning.
    done_at: f64,
    epoch: u32,
    up: bool,
}

/// An engine of D.
#[derive(Debug)]
struct Consumer {
    free: Free,
    prefix: PrefixCache,
    waiting: VecDeque<u32>,
    /// Requests that have blocks.
    running: u64,
    /// Sequences that are decoded, and their tokens, half of what they make counted.
    decoding: (u64, u64),
    tokens: u64,
    up: bool,
}

/// The script: what engines do with prompts.
#[derive(Debug)]
pub struct Deployment {
    scenario: Arc<Scenario>,
    load: Arc<Load>,
    /// When the load begins, by the world's time.
    begin: Duration,
    /// When a request was last over.
    last: Duration,
    open: usize,
    requests: Vec<Request>,
    producers: Vec<Producer>,
    consumers: Vec<Consumer>,
    turn: (u32, u32),
    pulls: BTreeMap<(u32, PullId), u32>,
    leases: BTreeMap<LeaseId, u32>,
    samples: Samples,
    watch: Watch,
    /// Bytes of D's memory that a token and a state take, replicas counted.
    room: (f64, f64),
    paged: Vec<kvferry_geometry::units::ItemId>,
}

impl Deployment {
    fn new(scenario: &Scenario, load: &Load) -> Self {
        let (p, d) = (&scenario.prefill, &scenario.decode);
        let figures = crate::scenario::figures(d, &scenario.cluster);
        let producer = |_| Producer {
            free: Free::new(&p.manifest, |_, _| {}),
            prefix: PrefixCache::new(p.prefix_tokens),
            queue: VecDeque::new(),
            busy: None,
            done_at: 0.0,
            epoch: 0,
            up: true,
        };
        let consumer = |_| Consumer {
            free: Free::new(&d.manifest, |_, _| {}),
            prefix: PrefixCache::new(d.prefix_tokens),
            waiting: VecDeque::new(),
            running: 0,
            decoding: (0, 0),
            tokens: 0,
            up: true,
        };
        let spec = p.manifest.spec();
        let request = |r: &crate::load::LoadRequest| {
            let life = Life { at: r.at.as_secs_f64(), prompt: r.prompt, ..Life::default() };
            Request { life, ..Request::default() }
        };
        let middle = (load.requests.len() / 2) as u64;
        let shown = scenario.gantt.unwrap_or(middle).min((load.requests.len() as u64).saturating_sub(1));
        Self {
            scenario: Arc::new(scenario.clone()),
            load: Arc::new(load.clone()),
            begin: Duration::ZERO,
            last: Duration::ZERO,
            open: load.requests.len(),
            requests: load.requests.iter().map(request).collect(),
            producers: (0..p.engines).map(producer).collect(),
            consumers: (0..d.engines).map(consumer).collect(),
            turn: (0, 0),
            pulls: BTreeMap::new(),
            leases: BTreeMap::new(),
            samples: Samples::new(load.span()),
            watch: Watch::new(shown),
            room: (figures.bytes_per_token, figures.bytes_per_state),
            paged: spec.iter().filter(|(_, item)| item.as_paged().is_some()).map(|(id, _)| id).collect(),
        }
    }

    fn request(&mut self, i: u32) -> Option<&mut Request> {
        self.requests.get_mut(i as usize)
    }

    /// The world's name for an engine of D.
    fn consumer(&self, d: u32) -> u32 {
        self.scenario.prefill.engines + d
    }

    /// Some delivered requests, spread over all, with their numbers.
    fn sampled(&self) -> impl Iterator<Item = (u64, &Life)> {
        const MOST: usize = 64;
        let step = (self.requests.len() / MOST).max(1);
        let all = (0u64..).zip(&self.requests).step_by(step);
        all.filter(|(_, r)| r.life.delivered.is_some()).map(|(i, r)| (i, &r.life))
    }

    /// What an [`Ask`] for a request's prompt is.
    fn ask(&self, i: u32) -> Ask {
        Ask { tokens: self.requests.get(i as usize).map_or(0, |r| r.life.prompt), states: 1 }
    }
}

/// Seconds since the load began.
fn seconds(world: &World<Deployment>) -> f64 {
    world.now().saturating_sub(world.script.begin).as_secs_f64()
}

/// A request is over; what is left of it ends by itself.
fn over(world: &mut World<Deployment>, i: u32, failed: Option<String>) {
    let (now, at) = (world.now(), seconds(world));
    let script = &mut world.script;
    let Some(r) = script.requests.get_mut(i as usize).filter(|r| !r.over) else { return };
    r.over = true;
    if failed.is_some() {
        r.life.failed = failed;
        r.life.delivered = None;
        r.life.decoded = Some(at);
    }
    script.open -= 1;
    script.last = script.last.max(now);
}

/// A prompt will come in its time. Only the next is in the world's queue, which would be long with all of them.
fn come(world: &mut World<Deployment>, i: u32) {
    let script = &world.script;
    if let Some(request) = script.load.requests.get(i as usize) {
        world.at(script.begin + request.at, Event::Come(i));
    }
}

impl Script for Deployment {
    type Event = Event;

    fn whom(_: &World<Self>, _: &Event) -> Option<Who> {
        None
    }

    fn happens(world: &mut World<Self>, event: Event) {
        match event {
            Event::Come(i) => {
                come(world, i + 1);
                prefill::arrive(world, i);
            }
            Event::Arrive(i) => prefill::arrive(world, i),
            Event::Computed(i, step) => prefill::computed(world, i, step),
            Event::Ask(i) => handover::ask(world, i),
            Event::Decoded(i) => handover::decoded(world, i),
            Event::Breaks(n) => breaks(world, n),
            Event::Mended(n) => mended(world, n),
            Event::Sample => samples::sample(world),
        }
    }

    fn effect(world: &mut World<Self>, engine: u32, effect: Effect) {
        match effect {
            Effect::PullEnded { pull, result } => handover::ended(world, engine, pull, *result),
            Effect::LeaseClosed { fence, .. } => prefill::released(world, engine, fence.lease),
            _ => {}
        }
    }

    fn engine_lost(world: &mut World<Self>, engine: u32, _: Vec<usize>) {
        let of_p = world.script.scenario.prefill.engines;
        if engine < of_p { prefill::lost(world, engine) } else { handover::lost(world, engine - of_p) }
    }

    fn rank_lost(_: &mut World<Self>, _: u32) {}

    fn latency(world: &World<Self>, from: u32, to: u32) -> (Duration, Duration) {
        let s = &world.script.scenario;
        let node = |engine: u32| {
            let of_p = s.prefill.engines;
            let gpu = if engine < of_p { s.prefill.gpu(engine, 0) } else { s.decode.gpu(engine - of_p, 0) };
            gpu.map_or(0, |g| g.node)
        };
        let latency = s.cluster.control_latency(node(from), node(to));
        (latency, latency)
    }
}

fn breaks(world: &mut World<Deployment>, n: u32) {
    let Some(failure) = world.script.scenario.failures.get(n as usize).cloned() else { return };
    match failure.what {
        Broken::Prefill(p) => world.crash_engine(p, failure.lasts, false),
        Broken::Decode(d) => {
            let engine = world.script.consumer(d);
            world.crash_engine(engine, failure.lasts, false);
        }
        Broken::Link(name, percent) => limit(world, &name, percent),
    }
    world.later(failure.lasts, Event::Mended(n));
}

fn mended(world: &mut World<Deployment>, n: u32) {
    let Some(failure) = world.script.scenario.failures.get(n as usize).cloned() else { return };
    match failure.what {
        Broken::Link(name, _) => limit(world, &name, 100),
        // It takes its ranks some time to join.
        Broken::Prefill(p) if !world.is_up(p) => world.later(Duration::from_millis(10), Event::Mended(n)),
        Broken::Prefill(p) => prefill::back(world, p),
        Broken::Decode(d) if !world.is_up(world.script.consumer(d)) => {
            world.later(Duration::from_millis(10), Event::Mended(n));
        }
        Broken::Decode(d) => handover::back(world, d),
    }
}

fn limit(world: &mut World<Deployment>, name: &str, percent: u32) {
    let cluster = world.script.scenario.cluster.clone();
    for (at, link) in (0u32..).zip(cluster.links()).filter(|(_, l)| l.name() == name) {
        world.fabric().set_capacity(at, link.capacity() * f64::from(percent) / 100.0);
    }
}
