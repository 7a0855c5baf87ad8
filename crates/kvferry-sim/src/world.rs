//! The world: engines, what is between them, and one queue of what happens next.
//!
//! Everything is drawn from one seed before it begins or from generators of its own, so a world runs the same every time, and
//! leaving something out of it ([`Mask`]) moves little else.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::Bytes;
use kvferry_memory::{BufferOptions, SharedBuffer};
use kvferry_proto::handshake::Claim;
use kvferry_proto::names::{Epoch, LeaseId};
use kvferry_session::owner::{LinkId, RankLinkId};
use kvferry_session::pairing::Pairings;
use kvferry_session::{Admission, LeaseTerms, StagingConfig};
use kvferry_transport::Region;

use crate::engine::Engine;
use crate::fabric::{Fabric, FabricConfig};
use crate::faults::FaultPlan;
use crate::mask::Mask;
use crate::plan::RequestPlan;
use crate::rng::{Rng, hash};
use crate::shape::Shape;
use crate::stats::Stats;
use crate::trial::Trial;
use crate::violation::Violation;

mod groups;
mod links;
mod owners;
mod packet;
mod ranks;
mod script;

pub use groups::key;
pub(crate) use packet::Packet;
pub use script::Script;

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
    /// Whether what a rank reads is spread over all that hold it.
    pub stripe: bool,
    /// How much is in flight at a time.
    pub admission: Admission,
    /// Whether what happens is written down.
    pub trace: bool,
    /// Whether engines compute once what is the same for all that are alike. Then none finds out that another has computed something else.
    pub shared: bool,
}

/// A process of the world.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Who {
    /// The owner of an engine.
    Owner(u32),
    /// A rank of an engine.
    Rank(u32, u32),
}

/// What happens. `E`: what the script wants to happen.
#[derive(Debug)]
pub(crate) enum Happens<E> {
    Step(Who, u32),
    Resume(Who, u32),
    /// An owner is connected to.
    Accept(u64),
    Opened(u64),
    /// A message arrives at the connector (false) or at the other end.
    Peer(u64, bool, Packet),
    /// What a hello claims is heard, which arrives later.
    Claim(u64, bool, Box<Claim>),
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
    Script(E),
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

/// See the module's text.
#[derive(Debug)]
pub struct World<S: Script = Trial> {
    pub(crate) config: WorldConfig,
    pub(crate) now: Duration,
    pub(crate) queue: crate::queue::Queue<Happens<S::Event>>,
    pub(crate) fabric: Fabric,
    pub(crate) engines: Vec<Engine<Happens<S::Event>>>,
    pub(crate) conns: BTreeMap<u64, Conn>,
    next_conn: u64,
    /// Owners between which nothing arrives, until then.
    pub(crate) cut: BTreeMap<(u32, u32), Duration>,
    /// What nothing lies in.
    pub(crate) nothing: Option<Region>,
    pub(crate) quiet: Arc<OwnedFd>,
    /// What sessions compute of pairs of caches, if they share it.
    pub(crate) pairings: Option<Pairings>,
    pub(crate) stats: Stats,
    pub(crate) violation: Option<Violation>,
    pub(crate) hash: u64,
    pub(crate) lines: VecDeque<String>,
    /// What makes things happen in it.
    pub script: S,
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

impl WorldConfig {
    /// A world of these engines where nothing goes wrong, without bytes, over these wires.
    #[must_use]
    pub fn plain(seed: u64, shapes: Vec<Arc<Shape>>, fabric: FabricConfig) -> Self {
        let latency = fabric.latency;
        Self {
            seed,
            mask: Mask::default(),
            bytes: false,
            wire: false,
            shapes,
            tokens: 0,
            requests: Vec::new(),
            faults: FaultPlan::default(),
            fabric,
            latency,
            lease: LeaseTerms::default(),
            grace: Duration::from_secs(2),
            reclaim: None,
            handshake: Duration::from_secs(10),
            idle: None,
            staging: None,
            stripe: false,
            admission: Admission::default(),
            trace: false,
            shared: true,
        }
    }
}

impl<S: Script> World<S> {
    /// A world in which the engines begin, and nothing else is about to happen.
    ///
    /// # Errors
    /// If there is no memory or no file descriptor for it.
    pub fn with(config: WorldConfig, script: S) -> Result<Self, NotMade> {
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
            cut: BTreeMap::new(),
            nothing,
            quiet: Arc::new(quiet.into()),
            pairings: config.shared.then(Pairings::default),
            stats: Stats::default(),
            violation: None,
            hash: hash(&[config.seed]),
            lines: VecDeque::new(),
            script,
            healed: false,
            rng: Rng::of(&[config.seed, 5]),
            config,
        };
        for engine in 0..world.engines.len() {
            let engine = u32::try_from(engine).unwrap_or(0);
            world.queue.put(Duration::ZERO, Happens::StartEngine(engine));
        }
        Ok(world)
    }

    /// Lets the next thing happen; false where nothing is left, or an invariant didn't hold.
    pub fn next(&mut self, until: Duration) -> bool {
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
        // What is posted now begins now.
        self.fabric.goes_to(at);
        if let Some((_, happens)) = self.queue.take() {
            self.happens(happens);
        }
        true
    }

    /// Whom something happens to, if it is a process that may be asleep.
    fn whom(&self, happens: &Happens<S::Event>) -> Option<Who> {
        let end = |conn: &u64, second: bool| {
            let conn = self.conns.get(conn)?;
            Some(Who::Owner(conn.ends[usize::from(second)].engine))
        };
        match happens {
            Happens::Step(who, _) => Some(*who),
            Happens::Accept(conn) => end(conn, true),
            Happens::Opened(conn) => end(conn, false),
            Happens::Peer(conn, second, _) | Happens::Claim(conn, second, _) | Happens::Closed(conn, second) => {
                end(conn, *second)
            }
            Happens::NotMade(engine, ..)
            | Happens::RankAccept(engine, ..)
            | Happens::FromRank(engine, ..)
            | Happens::RankGone(engine, ..) => Some(Who::Owner(*engine)),
            Happens::ToRank(engine, rank, ..) | Happens::WorkDone(engine, rank, ..) => Some(Who::Rank(*engine, *rank)),
            Happens::Script(event) => S::whom(self, event),
            Happens::Resume(..) | Happens::RankDies(..) | Happens::StartRank(..) | Happens::StartEngine(_) => None,
        }
    }

    pub(crate) fn happens(&mut self, happens: Happens<S::Event>) {
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
            Happens::Claim(conn, second, claim) => self.peer_claims(conn, second, &claim),
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
            Happens::Script(event) => S::happens(self, event),
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

    pub(crate) fn put(&mut self, after: Duration, happens: Happens<S::Event>) {
        self.queue.put(self.now.saturating_add(after), happens);
    }

    /// The world's time.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    /// The script's event happens after a while.
    pub fn later(&mut self, after: Duration, event: S::Event) {
        self.put(after, Happens::Script(event));
    }

    /// The script's event happens at a time, or now where that is over.
    pub fn at(&mut self, at: Duration, event: S::Event) {
        self.queue.put(at.max(self.now), Happens::Script(event));
    }

    /// The data plane.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// What has happened, without the data plane's part.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// What should never happen and did; then nothing more happens.
    #[must_use]
    pub fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// Whether an engine is there with all of its ranks.
    #[must_use]
    pub fn is_up(&self, engine: u32) -> bool {
        let owner = self.engines.get(engine as usize).and_then(|e| e.owner.as_ref());
        owner.is_some_and(|o| o.manifest().is_some() && o.missing().is_empty())
    }

    /// How an engine is reached.
    #[must_use]
    pub fn address(engine: u32) -> String {
        format!("e{engine}")
    }

    /// A random lease, epoch and so on.
    pub fn lease_id(&mut self) -> LeaseId {
        LeaseId::new(self.rng.wide())
    }

    pub(crate) fn epoch(&mut self) -> Epoch {
        Epoch::new(self.rng.wide())
    }
}

/// Memory that all ranks share where there are no bytes: never touched, so it takes none, however large the caches.
fn nothing(shapes: &[Arc<Shape>]) -> Option<Region> {
    let lens = shapes.iter().flat_map(|s| s.manifest.ranks()).map(|r| {
        let longest = r.layout.regions.iter().map(|r| r.len.get()).max().unwrap_or(0);
        longest.saturating_add(r.layout.regions.len() as u64)
    });
    let longest = Bytes::new(lens.max().unwrap_or(1).max(1));
    SharedBuffer::new("kvferry-sim", longest, BufferOptions::default()).ok().map(|buffer| buffer.region())
}
