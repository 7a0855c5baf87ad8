//! The data plane that all endpoints of a world share: operations that take time, strip by strip, and go wrong.
//!
//! Hardware moves bytes whether a process is awake or not, so operations go on by the world's clock
//! ([`Fabric::advance`]), and an endpoint's `step` only takes up what has ended. What an operation has not copied yet it copies
//! later, also where it has ended in doubt and its bytes land late: so the fabric always knows the truth about which bytes may
//! still be touched ([`Fabric::touching`]), whatever anybody was told.
//!
//! Without bytes ([`FabricConfig::bytes`]) operations take the same time and touch the same blocks, and copy nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_transport::error::LostCause;
use kvferry_transport::table::RegionTable;
use kvferry_transport::types::PeerInfo;
use kvferry_transport::{EndpointId, Event, OpId, Outcome, PeerId, TransferError};

use crate::faults::FaultKind;
use crate::places::{Place, RankPlaces};
use crate::queue::Queue;
use crate::rng::{Rng, ms, us};
use crate::stats::Stats;

mod op;
mod unwanted;
mod wires;

pub(crate) use op::{Fate, Op, Stage};
use wires::Network;
pub use wires::{Logged, Moved, PairMoved, Path, Wires};

/// How the data plane is, and how often it goes wrong: each rate in ten thousand operations (of `lane`: connections).
#[derive(Clone, Debug)]
pub struct FabricConfig {
    /// What all chance comes from.
    pub seed: u64,
    /// Whether bytes are copied.
    pub bytes: bool,
    /// Shortest and longest time until the first byte moves, and again until the end is told.
    pub latency: (Duration, Duration),
    /// Bytes per second of one endpoint.
    pub rate: u64,
    /// Most strips of one operation.
    pub strips: u64,
    /// How much later than in doubt late bytes land: shortest and longest.
    pub late: (Duration, Duration),
    /// Shortest and longest time until a lane is up.
    pub lane: (Duration, Duration),
    /// Rates of what operations do wrong.
    pub faults: BTreeMap<FaultKind, u32>,
    /// What is between the ranks. With it, and without bytes, an operation takes the time that it takes there, whatever `latency`,
    /// `rate` and `strips` say, and none goes wrong by itself.
    pub wires: Option<Arc<dyn Wires>>,
    /// Whether it is known which blocks are touched ([`Fabric::touching`]).
    pub watched: bool,
}

impl FabricConfig {
    /// Bytes are moved, in tens of microseconds, and nothing goes wrong.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let late = (us(50), ms(1500));
        Self {
            seed,
            bytes: true,
            latency: (us(2), us(40)),
            rate: 1 << 30,
            strips: 6,
            late,
            lane: (us(50), ms(5)),
            faults: BTreeMap::new(),
            wires: None,
            watched: true,
        }
    }
}

/// Which rank an endpoint belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Owner {
    /// The engine, counted in the world.
    pub engine: u32,
    /// Its rank.
    pub rank: u32,
    /// Which life of the rank.
    pub life: u32,
}

/// The data plane. Cheap to clone; clones are the same.
#[derive(Clone, Debug)]
pub struct Fabric {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: FabricConfig,
    pub(crate) now: Duration,
    pub(crate) nodes: Vec<Node>,
    by_id: BTreeMap<EndpointId, usize>,
    pub(crate) ops: BTreeMap<u64, Op>,
    next_op: u64,
    queue: Queue<Due>,
    woken: BTreeSet<usize>,
    /// Engines between which nothing moves, until then.
    cut: BTreeMap<(u32, u32), Duration>,
    pub(crate) stats: Stats,
    /// What flows, where there are wires.
    pub(crate) network: Option<Network>,
}

/// An endpoint.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: EndpointId,
    pub(crate) owner: Owner,
    pub(crate) alive: bool,
    pub(crate) table: RegionTable,
    pub(crate) revoked: BTreeSet<RegionId>,
    pub(crate) banned: BTreeSet<EndpointId>,
    pub(crate) peers: BTreeMap<PeerId, Conn>,
    pub(crate) ops: BTreeMap<OpId, u64>,
    /// What `step` will take up.
    pub(crate) arrived: VecDeque<Event>,
    pub(crate) next_peer: u64,
    pub(crate) next_op: u64,
    places: Option<Arc<RankPlaces>>,
    writers: BTreeMap<Place, u32>,
    readers: BTreeMap<Place, u32>,
    /// Blocks of its own, and who sends there what nobody will use.
    unwanted: BTreeMap<Place, BTreeSet<usize>>,
    /// Its card is busy until then.
    busy: Duration,
    /// How many times slower it is, until then.
    slow: (u64, Duration),
    pub(crate) rng: Rng,
}

#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) info: PeerInfo,
    pub(crate) node: usize,
    pub(crate) generation: u64,
    pub(crate) link: Link,
    /// Operations that wait for the lane.
    pub(crate) waiting: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(crate) enum Link {
    New,
    Up,
    Lost(LostCause),
}

/// What happens at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    /// A lane comes up, or doesn't.
    Lane { node: usize, peer: PeerId, refused: bool },
    /// The next strip of an operation moves.
    Strip(u64),
    /// Its end is told.
    End(u64),
    /// A cancel has reached the card.
    Stop(u64),
    /// Its end was lost; that is noticed.
    Missed(u64),
    /// That a peer is gone is noticed.
    Gone { node: usize, peer: PeerId },
}

/// Who may still touch a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Touch {
    /// Operations that write it.
    pub writers: u32,
    /// Operations that send it from its own rank.
    pub senders: u32,
}

impl Fabric {
    /// A data plane without endpoints.
    #[must_use]
    pub fn new(config: FabricConfig) -> Self {
        let network = config.wires.as_deref().filter(|_| !config.bytes).map(Network::new);
        let state = State {
            network,
            config,
            now: Duration::ZERO,
            nodes: Vec::new(),
            by_id: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            queue: Queue::default(),
            woken: BTreeSet::new(),
            cut: BTreeMap::new(),
            stats: Stats::default(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When something happens next.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.lock().next()
    }

    /// Lets time pass; gives the ranks whose endpoints have something to take up, each once.
    pub fn advance(&self, now: Duration) -> Vec<Owner> {
        let mut state = self.lock();
        while let Some(at) = state.next().filter(|at| *at <= now) {
            state.now = state.now.max(at);
            if state.queue.next().is_some_and(|due| due <= at) {
                if let Some((_, due)) = state.queue.take() {
                    state.happens(due);
                }
                continue;
            }
            let ended = state.network.as_mut().map(|n| n.flows.advance(at)).unwrap_or_default();
            for flow in ended {
                state.flowed(flow);
            }
        }
        state.now = state.now.max(now);
        let woken = std::mem::take(&mut state.woken);
        woken.into_iter().filter_map(|n| state.nodes.get(n)).filter(|n| n.alive).map(|n| n.owner).collect()
    }

    /// It is later, and nothing has happened since.
    pub(crate) fn goes_to(&self, now: Duration) {
        let mut state = self.lock();
        state.now = state.now.max(now);
    }

    /// Says what lies where in the memory of a rank's present life, so that [`touching`](Self::touching) can tell.
    pub fn describe(&self, endpoint: EndpointId, places: Arc<RankPlaces>) {
        let mut state = self.lock();
        if let Some(at) = state.by_id.get(&endpoint).copied().filter(|_| state.config.watched)
            && let Some(node) = state.nodes.get_mut(at)
        {
            node.places = Some(places);
        }
    }

    /// Who may still touch a block of a rank.
    #[must_use]
    pub fn touching(&self, endpoint: EndpointId, place: Place) -> Touch {
        let state = self.lock();
        let Some(node) = state.by_id.get(&endpoint).and_then(|at| state.nodes.get(*at)) else {
            return Touch::default();
        };
        let count = |map: &BTreeMap<Place, u32>| map.get(&place).copied().unwrap_or(0);
        Touch { writers: count(&node.writers), senders: count(&node.readers) }
    }

    /// The operations that may still touch a block, in words.
    #[must_use]
    pub fn touched_by(&self, endpoint: EndpointId, place: Place) -> Vec<String> {
        let state = self.lock();
        let Some(at) = state.by_id.get(&endpoint).copied() else { return Vec::new() };
        let touches = |op: &&Op| {
            (op.dst_node() == at && op.written.contains(&place)) || (op.node == at && op.sent.contains(&place))
        };
        let text = |op: &Op| {
            let node = |n: usize| state.nodes.get(n).map_or("?".into(), |n| format!("{:?}", n.owner));
            let (kind, stage, fate) = (op.kind, op.stage, op.fate);
            let (moved, total) = (op.moved, op.total);
            format!("{kind} by {} with {}: {moved} of {total}, {stage:?}, {fate:?}", node(op.node), node(op.peer_node))
        };
        state.ops.values().filter(touches).map(text).collect()
    }

    /// How many operations of an engine's ranks may still write a block of another's.
    pub(crate) fn written_by(&self, engine: u32, endpoint: EndpointId, place: Place) -> usize {
        let state = self.lock();
        let Some(at) = state.by_id.get(&endpoint).copied() else { return 0 };
        let of_engine = |op: &&Op| state.nodes.get(op.node).is_some_and(|n| n.owner.engine == engine);
        let writes = state.ops.values().filter(|op| op.writes_away() && op.dst_node() == at).filter(of_engine);
        writes.filter(|op| op.written.contains(&place)).count()
    }

    /// Operations that have not ended, or whose bytes may still land.
    #[must_use]
    pub fn open(&self) -> usize {
        self.lock().ops.len()
    }

    /// A process is gone. What it had posted stops at once, or, if `drains`, goes on until it is done.
    pub fn kill(&self, endpoint: EndpointId, drains: bool) {
        let mut state = self.lock();
        if let Some(at) = state.by_id.get(&endpoint).copied() {
            state.kill(at, drains);
        }
    }

    /// Stops what a process that is gone had left: a new one has its card now.
    pub fn flush(&self, endpoint: EndpointId) {
        let mut state = self.lock();
        let Some(at) = state.by_id.get(&endpoint).copied() else { return };
        let left: Vec<u64> = state.ops.iter().filter(|(_, op)| op.node == at).map(|(key, _)| *key).collect();
        for key in left {
            state.release(key);
        }
    }

    /// Nothing moves between two engines until then.
    pub fn cut(&self, a: u32, b: u32, until: Duration) {
        let mut state = self.lock();
        let end = state.cut.entry((a.min(b), a.max(b))).or_default();
        *end = until.max(*end);
    }

    /// A rank's card is so many times slower until then.
    pub fn slow(&self, endpoint: EndpointId, times: u64, until: Duration) {
        let mut state = self.lock();
        if let Some(at) = state.by_id.get(&endpoint).copied()
            && let Some(node) = state.nodes.get_mut(at)
        {
            node.slow = (times.max(1), until);
        }
    }

    /// Nothing goes wrong any more with what is posted from now on.
    pub fn heal(&self) {
        let mut state = self.lock();
        state.config.faults.clear();
        state.cut.clear();
    }

    /// What each rank has had from each other so far, where there are wires.
    #[must_use]
    pub fn moved(&self) -> Vec<PairMoved> {
        let state = self.lock();
        state
            .network
            .iter()
            .flat_map(|n| &n.moved)
            .map(|((src, dst), moved)| PairMoved { src: *src, dst: *dst, moved: *moved })
            .collect()
    }

    /// What each link has carried until now, where there are wires, in its own units.
    #[must_use]
    pub fn carried(&self) -> Vec<f64> {
        let mut state = self.lock();
        let now = state.now;
        let ended = state.network.as_mut().map(|n| n.flows.advance(now)).unwrap_or_default();
        for flow in ended {
            state.flowed(flow);
        }
        let Some(network) = &state.network else { return Vec::new() };
        (0..network.links).map(|link| network.flows.carried(link)).collect()
    }

    /// Writes operations between two engines down (source, destination) from now on, or none any more, where there are wires. Gives
    /// what was written down before.
    pub fn log(&self, engines: Option<(u32, u32)>) -> Vec<Logged> {
        let mut state = self.lock();
        let Some(network) = &mut state.network else { return Vec::new() };
        network.logs = engines;
        std::mem::take(&mut network.log)
    }

    /// How often rates were shared out anew, and among how many flows in all.
    #[must_use]
    pub fn shares(&self) -> (u64, u64) {
        self.lock().network.as_ref().map_or((0, 0), |n| n.flows.shares())
    }

    /// A link has another capacity from now on, in its units per second.
    pub fn set_capacity(&self, link: u32, capacity: f64) {
        let mut state = self.lock();
        let now = state.now;
        if let Some(network) = &mut state.network {
            network.flows.set_capacity(now, link, capacity);
        }
    }

    /// What has happened so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.lock().stats.clone()
    }
}

impl State {
    fn next(&mut self) -> Option<Duration> {
        let flows = self.network.as_mut().and_then(|n| n.flows.next());
        [self.queue.next(), flows].into_iter().flatten().min()
    }

    pub(crate) fn add(&mut self, owner: Owner, id: EndpointId) -> usize {
        let at = self.nodes.len();
        let rng =
            Rng::of(&[self.config.seed, u64::from(owner.engine), u64::from(owner.rank), u64::from(owner.life), 1]);
        self.by_id.insert(id, at);
        self.nodes.push(Node {
            id,
            owner,
            alive: true,
            table: RegionTable::new(),
            revoked: BTreeSet::new(),
            banned: BTreeSet::new(),
            peers: BTreeMap::new(),
            ops: BTreeMap::new(),
            arrived: VecDeque::new(),
            next_peer: 0,
            next_op: 0,
            places: None,
            writers: BTreeMap::new(),
            readers: BTreeMap::new(),
            unwanted: BTreeMap::new(),
            busy: Duration::ZERO,
            slow: (1, Duration::ZERO),
            rng,
        });
        at
    }

    pub(crate) fn find(&self, id: EndpointId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn put(&mut self, after: Duration, due: Due) {
        self.queue.put(self.now.saturating_add(after), due);
    }

    pub(crate) fn tell(&mut self, node: usize, event: Event) {
        if let Some(n) = self.nodes.get_mut(node)
            && n.alive
        {
            n.arrived.push_back(event);
            self.woken.insert(node);
        }
    }

    /// Draws whether an operation or lane of a node goes wrong in this way.
    pub(crate) fn goes_wrong(&mut self, node: usize, kind: FaultKind) -> bool {
        let rate = self.config.faults.get(&kind).copied().unwrap_or(0);
        let wrong = self.nodes.get_mut(node).is_some_and(|n| n.rng.chance(rate));
        if wrong {
            self.stats.fault(kind);
        }
        wrong
    }

    pub(crate) fn draw(&mut self, node: usize, (low, high): (Duration, Duration)) -> Duration {
        self.nodes.get_mut(node).map_or(low, |n| n.rng.time(low, high))
    }

    pub(crate) fn latency(&mut self, node: usize) -> Duration {
        self.draw(node, self.config.latency)
    }

    pub(crate) fn slowness(&self, node: usize) -> u64 {
        self.nodes.get(node).filter(|n| n.slow.1 > self.now).map_or(1, |n| n.slow.0)
    }

    /// When two cards have moved so many bytes that both take up now.
    pub(crate) fn occupy(&mut self, a: usize, b: usize, bytes: u64) -> Duration {
        let busy = |state: &Self, n: usize| state.nodes.get(n).map_or(Duration::ZERO, |n| n.busy);
        let begin = self.now.max(busy(self, a)).max(busy(self, b));
        let slow = self.slowness(a).max(self.slowness(b));
        let nanos = u128::from(bytes) * 1_000_000_000 * u128::from(slow) / u128::from(self.config.rate.max(1));
        let end = begin.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
        for n in [a, b] {
            if let Some(node) = self.nodes.get_mut(n) {
                node.busy = end;
            }
        }
        end
    }

    /// Until when nothing moves between two nodes, if something keeps it.
    pub(crate) fn cut_until(&self, a: usize, b: usize) -> Option<Duration> {
        let engine = |n: usize| self.nodes.get(n).map_or(0, |n| n.owner.engine);
        let (a, b) = (engine(a), engine(b));
        self.cut.get(&(a.min(b), a.max(b))).copied().filter(|until| *until > self.now)
    }

    pub(crate) fn at(&mut self, at: Duration, due: Due) {
        self.queue.put(at.max(self.now), due);
    }

    pub(crate) fn touch(&mut self, op: &Op, more: bool) {
        if let Some(node) = self.nodes.get_mut(op.dst_node()) {
            change(&mut node.writers, &op.written, more);
        }
        if let Some(node) = self.nodes.get_mut(op.node) {
            change(&mut node.readers, &op.sent, more);
        }
    }

    pub(crate) fn places_of(&self, node: usize) -> Option<Arc<RankPlaces>> {
        self.nodes.get(node)?.places.clone()
    }

    fn happens(&mut self, due: Due) {
        match due {
            Due::Lane { node, peer, refused } => self.lane(node, peer, refused),
            Due::Strip(key) => self.strip(key),
            Due::End(key) => self.told(key),
            Due::Stop(key) => self.stopped(key),
            Due::Missed(key) => self.missed(key),
            Due::Gone { node, peer } => self.lose(node, peer, LostCause::Gone),
        }
    }

    fn lane(&mut self, node: usize, peer: PeerId, refused: bool) {
        let Some(conn) = self.nodes.get(node).and_then(|n| n.peers.get(&peer)) else { return };
        if !matches!(conn.link, Link::New) {
            return;
        }
        let (to, alive) = (conn.node, self.nodes.get(conn.node).is_some_and(|n| n.alive));
        if !alive {
            return self.lose(node, peer, LostCause::Gone);
        }
        if refused {
            return self.lose(node, peer, LostCause::Lane("no way was found".into()));
        }
        if let Some(until) = self.cut_until(node, to) {
            return self.at(until, Due::Lane { node, peer, refused });
        }
        let Some(conn) = self.nodes.get_mut(node).and_then(|n| n.peers.get_mut(&peer)) else { return };
        conn.link = Link::Up;
        let waiting = std::mem::take(&mut conn.waiting);
        self.tell(node, Event::Connected { peer });
        for key in waiting {
            let after = self.approach(key).unwrap_or_else(|| self.latency(node));
            self.put(after, Due::Strip(key));
        }
    }

    /// A lane is lost: its operations end, then that is told.
    pub(crate) fn lose(&mut self, node: usize, peer: PeerId, cause: LostCause) {
        let Some(conn) = self.nodes.get_mut(node).and_then(|n| n.peers.get_mut(&peer)) else { return };
        if matches!(conn.link, Link::Lost(_)) {
            return;
        }
        conn.link = Link::Lost(cause.clone());
        conn.waiting.clear();
        self.end_all(node, peer, &TransferError::PeerLost(cause.clone()));
        self.tell(node, Event::PeerLost { peer, cause });
    }

    /// Ends all operations of a connection.
    pub(crate) fn end_all(&mut self, node: usize, peer: PeerId, why: &TransferError) {
        let all: Vec<u64> = self.nodes.get(node).into_iter().flat_map(|n| n.ops.values().copied()).collect();
        for key in all {
            if self.ops.get(&key).is_some_and(|op| op.peer == peer) {
                self.stop_now(key, why.clone());
            }
        }
    }

    fn kill(&mut self, at: usize, drains: bool) {
        let Some(node) = self.nodes.get_mut(at) else { return };
        if !node.alive {
            return;
        }
        node.alive = false;
        node.table = RegionTable::new();
        node.arrived.clear();
        node.peers.clear();
        let own: Vec<u64> = std::mem::take(&mut node.ops).into_values().collect();
        for key in own {
            match self.ops.get_mut(&key) {
                // Its own memory is no more, so only what it writes elsewhere can go on.
                Some(op) if drains && op.writes_away() && op.copier.is_some() && op.stage == Stage::Moving => {
                    op.stage = Stage::Told;
                    self.unsend(key);
                }
                _ => self.release(key),
            }
        }
        self.unsend_to(at);
        let of_others: Vec<(usize, PeerId)> = self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, n)| n.alive)
            .flat_map(|(i, n)| n.peers.iter().filter(|(_, c)| c.node == at).map(move |(peer, _)| (i, *peer)))
            .collect();
        for (node, peer) in of_others {
            let after = self.draw(node, (us(100), ms(300)));
            self.put(after, Due::Gone { node, peer });
        }
    }

    pub(crate) fn new_key(&mut self) -> u64 {
        self.next_op += 1;
        self.next_op
    }

    /// An operation ends for the one who posted it.
    pub(crate) fn end(&mut self, key: u64, outcome: Outcome) {
        let Some(op) = self.ops.get(&key) else { return };
        let (node, id, peer) = (op.node, op.id, op.peer);
        if let Some(n) = self.nodes.get_mut(node)
            && n.ops.remove(&id).is_some()
        {
            self.stats.op_ended(&outcome);
            self.tell(node, Event::Completed { op: id, peer, outcome });
        }
    }

    /// It has ended in doubt, and may still land: what it sends then is of no use to anybody, so its own blocks are free. Those that
    /// it writes are not.
    pub(crate) fn unsend(&mut self, key: u64) {
        let Some(op) = self.ops.get_mut(&key) else { return };
        let (node, sent) = (op.node, std::mem::take(&mut op.sent));
        if let Some(node) = self.nodes.get_mut(node) {
            change(&mut node.readers, &sent, false);
        }
    }

    /// Nothing touches memory for it any more.
    pub(crate) fn release(&mut self, key: u64) {
        self.unflow(key);
        if let Some(op) = self.ops.remove(&key) {
            self.touch(&op, false);
        }
    }
}

/// Counts places once more, or once less.
fn change(map: &mut BTreeMap<Place, u32>, places: &[Place], more: bool) {
    for place in places {
        let count = map.entry(*place).or_default();
        *count = if more { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            map.remove(place);
        }
    }
}
