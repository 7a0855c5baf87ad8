//! An engine of a world: its blocks, its memory, its owner and its ranks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::BlockId;
use kvferry_proto::names::{EngineId, LeaseId};
use kvferry_proto::rank::PullId;
use kvferry_session::owner::{LinkId, RankLinkId};
use kvferry_session::{OwnerSession, RankSession};
use kvferry_transport::EndpointId;

use crate::clock::Clock;
use crate::memory::RankMemory;
use crate::shape::Shape;

/// A process: its clock, whether it is awake, and what waits for it.
#[derive(Debug)]
pub(crate) struct Process<E> {
    pub(crate) clock: Clock,
    /// Which life.
    pub(crate) life: u32,
    pub(crate) paused: Option<Duration>,
    /// How long it has been paused in all.
    pub(crate) slept: Duration,
    pub(crate) held: VecDeque<E>,
    /// The step that is due next, by the world's time.
    pub(crate) timer: Option<Duration>,
    /// How often it asked to be stepped again at once.
    pub(crate) spins: u32,
}

impl<E> Process<E> {
    pub(crate) fn new(clock: Clock, life: u32) -> Self {
        Self { clock, life, paused: None, slept: Duration::ZERO, held: VecDeque::new(), timer: None, spins: 0 }
    }
}

/// One rank.
#[derive(Debug)]
pub(crate) struct Rank<E> {
    pub(crate) process: Process<E>,
    /// `None`: it is down.
    pub(crate) session: Option<RankSession>,
    pub(crate) memory: Option<RankMemory>,
    pub(crate) endpoint: EndpointId,
    /// When this life began.
    pub(crate) since: Duration,
    /// Its owner's name for the link.
    pub(crate) link: Option<RankLinkId>,
    /// When the last message in each direction arrives: a link keeps the order.
    pub(crate) up: Duration,
    pub(crate) down: Duration,
    /// Permutations that are not done.
    pub(crate) work: BTreeMap<u64, kvferry_session::rank::LocalWork>,
}

/// Free blocks, and how many there are in all. The last that came back goes out first.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    free: Vec<u32>,
    all: u32,
}

impl Pool {
    fn new(all: u32) -> Self {
        Self { free: (0..all).rev().collect(), all }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.len() == self.all as usize
    }

    pub(crate) fn missing(&self) -> usize {
        (self.all as usize).saturating_sub(self.free.len())
    }
}

/// Blocks of one sequence, by group. Of states: slots.
pub(crate) type Blocks = Vec<Vec<u32>>;

/// One engine. `E`: what happens to its processes.
#[derive(Debug)]
pub(crate) struct Engine<E> {
    pub(crate) index: u32,
    pub(crate) id: EngineId,
    pub(crate) shape: Arc<Shape>,
    /// Which life.
    pub(crate) life: u32,
    /// `None`: it is down.
    pub(crate) owner: Option<OwnerSession>,
    pub(crate) process: Process<E>,
    pub(crate) ranks: Vec<Rank<E>>,
    pub(crate) pools: Vec<Pool>,
    /// The connections of its owner's links.
    pub(crate) links: BTreeMap<LinkId, u64>,
    /// Which rank is at which link of its owner.
    pub(crate) rank_links: BTreeMap<RankLinkId, u32>,
    /// Requests that have not ended, by its name: the request's number.
    pub(crate) pulls: BTreeMap<PullId, usize>,
    /// Leases that have not ended.
    pub(crate) leases: BTreeMap<LeaseId, usize>,
    /// Blocks of requests that ended in doubt.
    pub(crate) aside: BTreeMap<PullId, Blocks>,
    /// Requests for blocks that another writes, by that one: they must be refused.
    pub(crate) doomed: BTreeMap<PullId, PullId>,
}

impl<E> Engine<E> {
    pub(crate) fn new(index: u32, id: EngineId, shape: Arc<Shape>) -> Self {
        let pools = Self::pools_of(&shape);
        Self {
            index,
            id,
            shape,
            life: 0,
            owner: None,
            process: Process::new(Clock::default(), 0),
            ranks: Vec::new(),
            pools,
            links: BTreeMap::new(),
            rank_links: BTreeMap::new(),
            pulls: BTreeMap::new(),
            leases: BTreeMap::new(),
            aside: BTreeMap::new(),
            doomed: BTreeMap::new(),
        }
    }

    fn pools_of(shape: &Shape) -> Vec<Pool> {
        let groups = u32::try_from(shape.manifest.groups().len()).unwrap_or(0);
        let blocks = (0..groups).map(|g| shape.manifest.blocks(kvferry_geometry::units::GroupId::new(g)).get());
        blocks.map(Pool::new).collect()
    }

    /// Everything that its processes knew is forgotten.
    pub(crate) fn forget(&mut self) {
        self.pools = Self::pools_of(&self.shape);
        self.links.clear();
        self.rank_links.clear();
        self.pulls.clear();
        self.leases.clear();
        self.aside.clear();
        self.doomed.clear();
    }

    /// How many blocks of each group a sequence has, or one slot.
    pub(crate) fn wants(&self, tokens: u64) -> Vec<usize> {
        let of = |g: &kvferry_geometry::manifest::CacheGroup| match g.block_tokens.get() {
            0 => 1,
            each => usize::try_from(tokens.div_ceil(each)).unwrap_or(usize::MAX),
        };
        self.shape.manifest.groups().iter().map(of).collect()
    }

    /// Takes blocks out, if there are enough.
    pub(crate) fn take(&mut self, wants: &[usize]) -> Option<Blocks> {
        if self.pools.iter().zip(wants).any(|(pool, n)| pool.free.len() < *n) {
            return None;
        }
        let take = |(pool, n): (&mut Pool, &usize)| pool.free.split_off(pool.free.len() - n);
        Some(self.pools.iter_mut().zip(wants).map(take).collect())
    }

    /// Puts blocks back.
    pub(crate) fn give(&mut self, blocks: &[Vec<u32>]) {
        for (pool, list) in self.pools.iter_mut().zip(blocks) {
            pool.free.extend(list.iter().rev());
        }
    }

    /// Tokens of a block of each group; 0 for states.
    pub(crate) fn block_tokens(&self) -> Vec<u64> {
        self.shape.manifest.groups().iter().map(|g| g.block_tokens.get()).collect()
    }
}

/// Ids of blocks as the planner has them.
pub(crate) fn ids(list: &[u32]) -> Vec<BlockId> {
    list.iter().map(|id| BlockId::new(*id)).collect()
}
