//! The script that looks for faults: drawn requests, drawn faults, and the invariants of [`Violation`] after all
//! that happens.

use std::sync::Arc;
use std::time::Duration;

use kvferry_proto::names::{Attempt, Fence};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::PullId;
use kvferry_session::owner::{Effect, LinkId};
use kvferry_session::{Admission, LeaseTerms, StagingConfig};

use crate::engine::Blocks;
use crate::fabric::FabricConfig;
use crate::faults::{FaultKind, FaultPlan};
use crate::mask::Mask;
use crate::plan::RequestPlan;
use crate::rng::{Rng, ms, us};
use crate::shape::{Model, Shape, Size};
use crate::violation::Violation;
use crate::world::{self, Conn, NotMade, Outcome, Script, Who, World, WorldConfig, key};

mod ends;
mod quiet;
mod requests;
mod streams;
mod strikes;
mod witness;

/// How long after the last request a world may take until it is quiet.
const PATIENCE: Duration = Duration::from_secs(120);

type Happens = world::Happens<Event>;

/// What a trial wants to happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A fault strikes, by its number in the plan.
    Strike(usize),
    /// A request does its next step.
    Request(usize, Want),
}

fn wants(request: usize, want: Want) -> Happens {
    Happens::Script(Event::Request(request, want))
}

/// What a request does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// Its prompt arrives.
    Arrive,
    /// It is computed, and offered.
    Offer,
    /// The consumer asks for it.
    Ask,
    /// The consumer cancels it.
    Cancel,
    /// The producer withdraws its offer.
    Withdraw,
    /// The consumer declines it.
    Decline,
    /// The next step of its prefill.
    Step(u32),
    /// The consumer has decoded.
    Decoded,
    /// It must have ended.
    Overdue,
}

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) plan: RequestPlan,
    /// Its number in the plan.
    pub(crate) number: u32,
    pub(crate) producer: u32,
    pub(crate) consumer: u32,
    /// The lives of both engines that know it.
    pub(crate) lives: (u32, u32),
    /// What its bytes are.
    pub(crate) content: u64,
    /// What they were computed from.
    pub(crate) prompt: u64,
    /// What its bytes were in runs before.
    pub(crate) former: Vec<u64>,
    /// Blocks that its lease has besides, from runs before.
    pub(crate) extra: Vec<Blocks>,
    /// The request that offers the same at another engine.
    pub(crate) replica: Option<usize>,
    /// Whether it only offers, for another.
    pub(crate) silent: bool,
    /// Which run of its prefill.
    pub(crate) run: Attempt,
    /// Whether all of it is computed.
    pub(crate) computed: bool,
    pub(crate) tokens: u64,
    pub(crate) cached: u64,
    pub(crate) src: Option<Blocks>,
    pub(crate) dst: Option<Blocks>,
    pub(crate) fence: Option<Fence>,
    pub(crate) offered: Duration,
    pub(crate) ttl: Option<Duration>,
    pub(crate) pull: Option<PullId>,
    pub(crate) asked: Duration,
    pub(crate) deadline: Duration,
    /// When the consumer's part ended.
    pub(crate) ended: Option<Duration>,
    pub(crate) outcome: Option<String>,
    /// Times that it found no room.
    pub(crate) waits: u32,
    /// Which try of the plan's request.
    pub(crate) tries: u32,
    /// The request whose lease it shares, if it is not its own.
    pub(crate) of: Option<usize>,
    /// Whether it gives back what another has read.
    pub(crate) back: bool,
}

/// What is on its way, and what was said of it.
#[derive(Debug, Default)]
pub struct Trial {
    pub(crate) requests: Vec<Request>,
    pub(crate) witness: witness::Witness,
}

impl Script for Trial {
    type Event = Event;

    fn whom(world: &World, event: &Event) -> Option<Who> {
        let Event::Request(i, want) = event else { return None };
        let request = world.script.requests.get(*i)?;
        match want {
            Want::Arrive | Want::Offer | Want::Withdraw | Want::Step(_) => Some(Who::Owner(request.producer)),
            Want::Ask | Want::Cancel | Want::Decline | Want::Decoded => Some(Who::Owner(request.consumer)),
            Want::Overdue => None,
        }
    }

    fn happens(world: &mut World, event: Event) {
        match event {
            Event::Strike(number) => world.strike(number),
            Event::Request(request, want) => world.request(request, want),
        }
    }

    fn effect(world: &mut World, engine: u32, effect: Effect) {
        world.trial_effect(engine, effect);
    }

    fn said(world: &mut World, engine: u32, link: LinkId, message: &PeerMessage) {
        world.witness_said(engine, link, message);
    }

    fn stepped(world: &mut World, engine: u32) {
        world.look_aside(engine);
    }

    fn engine_lost(world: &mut World, engine: u32, open: Vec<usize>) {
        for request in open {
            world.engine_lost(request, engine);
        }
    }

    fn rank_lost(world: &mut World, engine: u32) {
        world.rank_lost(engine);
    }
}

impl WorldConfig {
    /// A few engines of few ranks and few blocks, with bytes: many things at a time, so that blocks are used again at once.
    #[must_use]
    pub fn small(seed: u64, mask: Mask) -> Self {
        let mut rng = Rng::of(&[seed, 1]);
        let engines = rng.small(2, 4);
        let (span, requests) = (ms(rng.between(1500, 8000)), rng.small(12, 48));
        let size = Size { ranks: 4, tokens: rng.between(12, 60), requests: rng.small(2, 4) };
        let shapes = draw_shapes(seed, engines, size);
        Self::of(seed, mask, true, shapes, size.tokens, span, requests)
    }

    /// Many engines of up to eight ranks, without bytes.
    #[must_use]
    pub fn large(seed: u64, mask: Mask) -> Self {
        let mut rng = Rng::of(&[seed, 1]);
        let engines = rng.small(8, 40);
        let (span, requests) = (ms(rng.between(3000, 10_000)), rng.small(200, 800));
        let size = Size { ranks: 8, tokens: rng.between(200, 2000), requests: rng.small(4, 40) };
        let shapes = draw_shapes(seed, engines, size);
        Self::of(seed, mask, false, shapes, size.tokens, span, requests)
    }

    /// A world of these engines, with drawn requests and faults.
    #[must_use]
    pub fn of(
        seed: u64,
        mask: Mask,
        bytes: bool,
        shapes: Vec<Arc<Shape>>,
        tokens: u64,
        span: Duration,
        requests: u32,
    ) -> Self {
        let engines = u32::try_from(shapes.len()).unwrap_or(0);
        let faults = FaultPlan::draw(seed, engines, span);
        let plans = (0..requests).map(|i| RequestPlan::draw(seed, i, (engines, tokens, span), &faults)).collect();
        let mut rng = Rng::of(&[seed, 2]);
        let ops = FaultKind::OF_OPS.iter().filter(|(kind, _)| mask.has(*kind));
        let rates = ops.filter_map(|(kind, _)| Some((*kind, *faults.rates.get(kind)?))).collect();
        // Some cards are so slow, and some owners so far apart, that much happens while something is on its way.
        let rate = 1 << rng.between(15, 28);
        let far = if rng.chance(3000) { ms(rng.between(2, 40)) } else { us(rng.between(50, 2000)) };
        let fabric = FabricConfig { bytes, rate, faults: rates, ..FabricConfig::new(seed) };
        let lease = if rng.chance(5000) {
            LeaseTerms::default()
        } else {
            LeaseTerms { ttl: Some(ms(4000)), extension: ms(2500), beat: ms(600), margin: ms(100) }
        };
        let small_slices = rng.chance(4000);
        let slice = kvferry_geometry::units::Bytes::new(rng.between(200, 2000));
        let admission = match small_slices {
            true => Admission { slice, peer_ops: 3, ops: 5, ..Admission::default() },
            false => Admission::default(),
        };
        let ways = [kvferry_session::Way::Destination, kvferry_session::Way::Source, kvferry_session::Way::Auto];
        let way = *rng.pick(&ways).unwrap_or(&ways[0]);
        let staging_bytes = usize::try_from(rng.between(4_096, 60_000)).unwrap_or(4096);
        let staged = bytes && rng.chance(3000);
        Self {
            seed,
            mask,
            bytes,
            wire: rng.chance(5000),
            shapes,
            tokens,
            requests: plans,
            faults,
            fabric,
            latency: (us(10), far),
            lease,
            grace: ms(rng.between(50, 2000)),
            reclaim: None,
            handshake: ms(rng.between(1000, 10_000)),
            idle: rng.chance(3000).then(|| ms(rng.between(200, 3000))),
            staging: staged.then_some((staging_bytes, StagingConfig { cost: None, way })),
            stripe: false,
            admission,
            trace: false,
            shared: false,
        }
    }
}

/// Shapes of one model that all feed each other.
fn draw_shapes(seed: u64, engines: u32, size: Size) -> Vec<Arc<Shape>> {
    for round in 0u64.. {
        let mut rng = Rng::of(&[seed, 3, round]);
        let Some(model) = Model::draw(&mut rng) else { continue };
        let mut shapes: Vec<Arc<Shape>> = Vec::new();
        for _ in 0..u64::from(engines) * 8 {
            if let Some(shape) = Shape::draw(&model, &mut rng, size)
                && shapes.iter().all(|s| s.feeds(&shape) && shape.feeds(s))
            {
                shapes.push(Arc::new(shape));
            }
            if shapes.len() == engines as usize {
                return shapes;
            }
        }
    }
    Vec::new()
}

impl World {
    /// The small world of a seed.
    ///
    /// # Errors
    /// If there is no memory or no file descriptor for it.
    pub fn small(seed: u64) -> Result<Self, NotMade> {
        Self::new(WorldConfig::small(seed, Mask::default()))
    }

    /// The large world of a seed.
    ///
    /// # Errors
    /// As for [`small`](Self::small).
    pub fn large(seed: u64) -> Result<Self, NotMade> {
        Self::new(WorldConfig::large(seed, Mask::default()))
    }

    /// A world before anything has happened.
    ///
    /// # Errors
    /// As for [`small`](Self::small).
    pub fn new(config: WorldConfig) -> Result<Self, NotMade> {
        let mut world = Self::with(config, Trial::default())?;
        world.plan_requests();
        for (i, event) in world.config.faults.events.clone().iter().enumerate() {
            let number = u32::try_from(i).unwrap_or(u32::MAX);
            if world.config.mask.strikes(number) && world.config.mask.has(event.kind) {
                world.queue.put(event.at, Happens::Script(Event::Strike(i)));
            }
        }
        Ok(world)
    }

    /// Runs it to its end: until it is quiet and everything is over, or an invariant doesn't hold.
    #[must_use]
    pub fn run(mut self) -> Outcome {
        self.run_until_quiet();
        self.stats.worlds = 1;
        self.stats.time = self.now;
        let of_fabric = self.fabric.stats();
        self.stats.add(&of_fabric);
        let violation = self.violation.take();
        Outcome { stats: self.stats, violation, hash: self.hash, trace: self.lines.into() }
    }

    fn trial_effect(&mut self, engine: u32, effect: Effect) {
        match effect {
            Effect::LeaseClosed { fence, how, .. } => {
                self.witness_closed(fence.lease, how);
                self.lease_closed(engine, fence.lease, &format!("{how:?}"));
            }
            Effect::PullEnded { pull, result } => {
                if let Ok(delivered) = &*result {
                    self.witness_delivered(engine, &delivered.report().fence);
                }
                self.pull_ended(engine, pull, *result);
            }
            Effect::Contradiction { fence, peer, what } => {
                let what = format!("{peer} about {fence}: {what}");
                self.violates(Violation::Contradiction { engine, what });
            }
            Effect::Reclaimed { pull, blocks } => {
                *self.stats.outcomes.entry("(reclaimed)".into()).or_default() += 1;
                self.note(|_| format!("e{engine} uses {blocks} blocks of pull {pull} again"));
            }
            Effect::Progress { pull, tokens } => {
                self.note(|_| format!("e{engine} pull {pull} is at {tokens}"));
                let request = self.engines.get(engine as usize).and_then(|e| e.pulls.get(&pull)).copied();
                if let Some(request) = request {
                    self.check_in_place(request, pull, tokens.get(), "as progress");
                }
            }
            Effect::RankLost { rank, .. } => self.note(|_| format!("e{engine} has lost rank {rank}")),
            Effect::Ready(_) => self.note(|_| format!("e{engine} is complete")),
            Effect::JoinRefused(error) => self.note(|_| format!("e{engine} refuses a rank: {error}")),
            Effect::LinkFailed { reasons, .. } => self.note(|_| format!("e{engine}: no link: {reasons:?}")),
            Effect::LinkDown { peer, reason, .. } => {
                self.note(|_| format!("e{engine}: link to {peer} is down: {reason}"))
            }
            _ => {}
        }
    }
}
