//! The world: engines, what is between them, and one queue of what happens next.
//!
//! Everything is drawn from one seed before it begins or from generators of its own, so a world runs the same every time, and
//! leaving something out of it ([`Mask`]) moves little else.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_proto::names::{Attempt, Epoch, Fence, LeaseId};
use kvferry_proto::rank::PullId;
use kvferry_session::owner::{LinkId, RankLinkId};
use kvferry_session::{Admission, LeaseTerms, StagingConfig};
use kvferry_transport::Region;

use crate::engine::{Blocks, Engine};
use crate::fabric::{Fabric, FabricConfig};
use crate::faults::{FaultKind, FaultPlan};
use crate::mask::Mask;
use crate::plan::RequestPlan;
use crate::rng::{Rng, hash, ms, us};
use crate::shape::{Model, Shape, Size};
use crate::stats::Stats;
use crate::violation::Violation;

mod ends;
mod links;
mod owners;
mod packet;
mod quiet;
mod ranks;
mod requests;
mod streams;
mod strikes;
mod witness;

pub(crate) use packet::Packet;

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// What all chance comes from.
    pub seed: u64,
    /// What is left out.
    pub mask: Mask,
    /// Whether there are bytes.
    pub bytes: bool,
    /// Whether messages go through their bytes on the wire.
    pub wire: bool,
    /// The engines' caches.
    pub shapes: Vec<Arc<Shape>>,
    /// The longest sequence.
    pub tokens: u64,
    /// The requests, by number.
    pub requests: Vec<RequestPlan>,
    /// What goes wrong.
    pub faults: FaultPlan,
    /// How the data plane is.
    pub fabric: FabricConfig,
    /// Shortest and longest time of a message.
    pub latency: (Duration, Duration),
    /// How long leases last.
    pub lease: LeaseTerms,
    /// How long ranks may take to stop.
    pub grace: Duration,
    /// After how long blocks in doubt are used again without evidence.
    pub reclaim: Option<Duration>,
    /// How long a link may take.
    pub handshake: Duration,
    /// How long an unused link is kept.
    pub idle: Option<Duration>,
    /// Bytes of staging memory of each rank, and how it is used.
    pub staging: Option<(usize, StagingConfig)>,
    /// How much is in flight at a time.
    pub admission: Admission,
    /// Whether what happens is written down.
    pub trace: bool,
}

/// A process of the world.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Who {
    Owner(u32),
    Rank(u32, u32),
}

/// What happens.
#[derive(Debug)]
pub(crate) enum Happens {
    Step(Who, u32),
    Resume(Who, u32),
    /// An owner is connected to.
    Accept(u64),
    Opened(u64),
    /// A message arrives at the connector (false) or at the other end.
    Peer(u64, bool, Packet),
    /// An end hears that the connection is gone.
    Closed(u64, bool),
    /// A connection could not be made.
    NotMade(u32, u32, LinkId),
    RankAccept(u32, u32, u32),
    FromRank(u32, u32, u32, Packet),
    ToRank(u32, u32, u32, Packet),
    /// An owner's life hears that a rank's is over.
    RankGone(u32, u32, RankLinkId),
    /// A rank's life ends.
    RankDies(u32, u32, u32),
    WorkDone(u32, u32, u32, u64),
    StartRank(u32, u32),
    StartEngine(u32),
    Strike(usize),
    Request(usize, Want),
}

/// What a request does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Want {
    Arrive,
    Offer,
    Ask,
    Cancel,
    Withdraw,
    Decline,
    /// The next step of its prefill.
    Step(u32),
    /// The consumer has decoded.
    Decoded,
    /// It must have ended.
    Overdue,
}

/// A link between two owners: who connected first.
#[derive(Debug)]
pub(crate) struct Conn {
    /// Engine, its life, its name for the link.
    pub(crate) ends: [End; 2],
    /// When the last message to each end arrives.
    pub(crate) last: [Duration; 2],
    pub(crate) rng: Rng,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) engine: u32,
    pub(crate) life: u32,
    pub(crate) link: Option<LinkId>,
    pub(crate) open: bool,
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

/// See the module's text.
#[derive(Debug)]
pub struct World {
    pub(crate) config: WorldConfig,
    pub(crate) now: Duration,
    pub(crate) queue: crate::queue::Queue<Happens>,
    pub(crate) fabric: Fabric,
    pub(crate) engines: Vec<Engine<Happens>>,
    pub(crate) conns: BTreeMap<u64, Conn>,
    next_conn: u64,
    pub(crate) requests: Vec<Request>,
    /// Owners between which nothing arrives, until then.
    pub(crate) cut: BTreeMap<(u32, u32), Duration>,
    /// What nothing lies in.
    pub(crate) nothing: Option<Region>,
    pub(crate) quiet: Arc<OwnedFd>,
    pub(crate) stats: Stats,
    pub(crate) violation: Option<Violation>,
    hash: u64,
    lines: VecDeque<String>,
    pub(crate) witness: witness::Witness,
    /// Nothing goes wrong any more.
    pub(crate) healed: bool,
    pub(crate) rng: Rng,
}

/// What came of a world.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What happened.
    pub stats: Stats,
    /// The invariant that did not hold, if one did not.
    pub violation: Option<Violation>,
    /// The same for the same world: of everything that happened and when.
    pub hash: u64,
    /// What happened last, if it was written down.
    pub trace: Vec<String>,
}

/// A world could not be begun.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the world of seed {seed} could not be made: {reason}")]
pub struct NotMade {
    seed: u64,
    reason: String,
}

/// The most lines that a trace has.
const LINES: usize = 4000;
/// How long after the last request a world may take until it is quiet.
const PATIENCE: Duration = Duration::from_secs(120);

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
            admission,
            trace: false,
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
        let not_made = |reason: String| NotMade { seed: config.seed, reason };
        let quiet = std::fs::File::open("/dev/null").map_err(|e| not_made(format!("/dev/null: {e}")))?;
        let nothing = match config.bytes {
            true => None,
            false => Some(nothing(&config.shapes).ok_or_else(|| not_made("no memory".into()))?),
        };
        let mut engines = Vec::new();
        for (index, shape) in (0u32..).zip(&config.shapes) {
            let id = kvferry_proto::names::EngineId::new(&format!("e{index}")).map_err(|e| not_made(e.to_string()))?;
            engines.push(Engine::new(index, id, shape.clone()));
        }
        let mut world = Self {
            now: Duration::ZERO,
            queue: crate::queue::Queue::default(),
            fabric: Fabric::new(config.fabric.clone()),
            engines,
            conns: BTreeMap::new(),
            next_conn: 0,
            requests: Vec::new(),
            cut: BTreeMap::new(),
            nothing,
            quiet: Arc::new(quiet.into()),
            stats: Stats::default(),
            violation: None,
            hash: hash(&[config.seed]),
            lines: VecDeque::new(),
            witness: witness::Witness::default(),
            healed: false,
            rng: Rng::of(&[config.seed, 5]),
            config,
        };
        for engine in 0..world.engines.len() {
            let engine = u32::try_from(engine).unwrap_or(0);
            world.queue.put(Duration::ZERO, Happens::StartEngine(engine));
        }
        world.plan_requests();
        for (i, event) in world.config.faults.events.clone().iter().enumerate() {
            let number = u32::try_from(i).unwrap_or(u32::MAX);
            if world.config.mask.strikes(number) && world.config.mask.has(event.kind) {
                world.queue.put(event.at, Happens::Strike(i));
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

    /// Lets the next thing happen; false where nothing is left, or an invariant didn't hold.
    pub(crate) fn next(&mut self, until: Duration) -> bool {
        if self.violation.is_some() {
            return false;
        }
        let (data, others) = (self.fabric.next(), self.queue.next());
        let Some(at) = [data, others].into_iter().flatten().min().filter(|at| *at <= until) else { return false };
        self.now = self.now.max(at);
        if data == Some(at) {
            for owner in self.fabric.advance(at) {
                self.count(20, u64::from(owner.engine), u64::from(owner.rank));
                self.wake_rank(owner.engine, owner.rank, owner.life);
            }
            return true;
        }
        if let Some((_, happens)) = self.queue.take() {
            self.happens(happens);
        }
        true
    }

    /// Whom something happens to, if it is a process that may be asleep.
    fn whom(&self, happens: &Happens) -> Option<Who> {
        let end = |conn: &u64, second: bool| {
            let conn = self.conns.get(conn)?;
            Some(Who::Owner(conn.ends[usize::from(second)].engine))
        };
        match happens {
            Happens::Step(who, _) => Some(*who),
            Happens::Accept(conn) => end(conn, true),
            Happens::Opened(conn) => end(conn, false),
            Happens::Peer(conn, second, _) | Happens::Closed(conn, second) => end(conn, *second),
            Happens::NotMade(engine, ..)
            | Happens::RankAccept(engine, ..)
            | Happens::FromRank(engine, ..)
            | Happens::RankGone(engine, ..) => Some(Who::Owner(*engine)),
            Happens::ToRank(engine, rank, ..) | Happens::WorkDone(engine, rank, ..) => Some(Who::Rank(*engine, *rank)),
            Happens::Request(i, want) => {
                let request = self.requests.get(*i)?;
                match want {
                    Want::Arrive | Want::Offer | Want::Withdraw | Want::Step(_) => Some(Who::Owner(request.producer)),
                    Want::Ask | Want::Cancel | Want::Decline | Want::Decoded => Some(Who::Owner(request.consumer)),
                    Want::Overdue => None,
                }
            }
            Happens::Resume(..)
            | Happens::RankDies(..)
            | Happens::StartRank(..)
            | Happens::StartEngine(_)
            | Happens::Strike(_) => None,
        }
    }

    pub(crate) fn happens(&mut self, happens: Happens) {
        if let Some(who) = self.whom(&happens)
            && let Some(process) = self.process(who)
            && process.paused.is_some()
        {
            process.held.push_back(happens);
            return;
        }
        match happens {
            Happens::Step(who, life) => self.timer(who, life),
            Happens::Resume(who, life) => self.resume(who, life),
            Happens::Accept(conn) => self.accept(conn),
            Happens::Opened(conn) => self.opened(conn),
            Happens::Peer(conn, second, packet) => self.peer_message(conn, second, packet),
            Happens::Closed(conn, second) => self.hears_close(conn, second),
            Happens::NotMade(engine, life, link) => self.not_made(engine, life, link),
            Happens::RankAccept(engine, rank, life) => self.rank_accept(engine, rank, life),
            Happens::FromRank(engine, rank, life, packet) => self.rank_says(engine, rank, life, packet),
            Happens::ToRank(engine, rank, life, packet) => self.rank_hears(engine, rank, life, packet),
            Happens::RankGone(engine, life, link) => self.rank_gone(engine, life, link),
            Happens::RankDies(engine, rank, life) => self.rank_dies(engine, rank, life),
            Happens::WorkDone(engine, rank, life, work) => self.work_done(engine, rank, life, work),
            Happens::StartRank(engine, rank) => self.start_rank(engine, rank),
            Happens::StartEngine(engine) => self.start_engine(engine),
            Happens::Strike(event) => self.strike(event),
            Happens::Request(request, want) => self.request(request, want),
        }
    }

    /// Notes that something happens, for the hash and the counts.
    pub(crate) fn count(&mut self, what: u64, a: u64, b: u64) {
        self.stats.events += 1;
        let now = u64::try_from(self.now.as_nanos()).unwrap_or(u64::MAX);
        self.hash = hash(&[self.hash, now, what, a << 32 | b]);
    }

    /// Writes a line down, if lines are.
    pub(crate) fn note(&mut self, line: impl FnOnce(&Self) -> String) {
        if self.config.trace {
            if self.lines.len() == LINES {
                self.lines.pop_front();
            }
            let line = format!("{:>12?} {}", self.now, line(self));
            self.lines.push_back(line);
        }
    }

    /// The first violation counts.
    pub(crate) fn violates(&mut self, violation: Violation) {
        self.note(|_| format!("VIOLATION {violation}"));
        self.violation.get_or_insert(violation);
    }

    pub(crate) fn put(&mut self, after: Duration, happens: Happens) {
        self.queue.put(self.now.saturating_add(after), happens);
    }

    /// A random lease, epoch and so on.
    pub(crate) fn lease_id(&mut self) -> LeaseId {
        LeaseId::new(self.rng.wide())
    }

    pub(crate) fn epoch(&mut self) -> Epoch {
        Epoch::new(self.rng.wide())
    }
}

/// Memory that all ranks share where there are no bytes: never touched, so it takes none.
fn nothing(shapes: &[Arc<Shape>]) -> Option<Region> {
    let lens = shapes.iter().flat_map(|s| s.manifest.ranks()).map(|r| {
        let longest = r.layout.regions.iter().map(|r| r.len.get()).max().unwrap_or(0);
        usize::try_from(longest).unwrap_or(usize::MAX).saturating_add(r.layout.regions.len())
    });
    Region::zeroed(lens.max().unwrap_or(1).max(1))
}
