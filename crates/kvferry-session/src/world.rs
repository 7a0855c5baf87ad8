//! Two whole engines on the in-memory transport, stepped by hand: real owners, real ranks, every message through its bytes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::layout::View;
use kvferry_geometry::manifest::{CacheGroup, RankManifest};
use kvferry_geometry::placement::Placement;
use kvferry_geometry::request::{DstGroup, SrcGroup};
use kvferry_geometry::spec::{ItemKind, ModelSpec};
use kvferry_geometry::units::{BlockId, ItemId, RankId, Tokens};
use kvferry_proto::lease::{Closing, Offer};
use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, LeaseId, ModelIdentity};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{Assurance, PullId};
use kvferry_proto::wire::{self, Frame, FrameReader};
use kvferry_transport::fault::{Faulty, Script};
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::{Region, Transport};

use crate::owner::{
    Effect, FailurePolicy, LeaseTerms, LinkId, Mode, OwnerConfig, OwnerSession, PullWish, RankLinkId, Ttl,
    USUAL_PRIORITY,
};
use crate::rank::{LocalWork, RankIdentity, RankSession, StagingConfig};
use crate::testing::Late;
use crate::{Delivered, Failed, LocalCache};

mod fences;
mod gather;
mod idle;
mod pushes;
mod slices;
mod tests;

/// What an engine is.
pub(crate) struct Shape {
    pub(crate) spec: ModelSpec,
    pub(crate) groups: Vec<CacheGroup>,
    pub(crate) ranks: Vec<RankManifest>,
    pub(crate) compat: CompatOptions,
    pub(crate) stripe: bool,
    /// Bytes of each rank's staging memory, and how it is used.
    pub(crate) staging: Option<(usize, StagingConfig)>,
    /// Faults of rank 0's transport.
    pub(crate) script: Script,
}

/// How a request ended.
pub(crate) type Ended = Result<Delivered, Box<Failed>>;

pub(crate) struct Engine {
    pub(crate) owner: OwnerSession,
    pub(crate) ranks: Vec<RankSession>,
    /// By rank, the cache's regions.
    pub(crate) memory: Vec<Vec<Region>>,
    shape: (ModelSpec, Vec<RankManifest>),
    staging: Option<(usize, StagingConfig)>,
    links: Vec<RankLinkId>,
    connects: Vec<LinkId>,
    said: VecDeque<PeerMessage>,
    pub(crate) ended: Vec<(PullId, Ended)>,
    pub(crate) closed: Vec<(Fence, Closing)>,
    /// Permutations that were not done, by rank.
    pub(crate) work: Vec<(usize, LocalWork)>,
    /// Whether permutations are done at once.
    pub(crate) permutes: bool,
    /// By rank: whether its transport takes no note of cancels.
    pub(crate) deaf: Vec<Arc<AtomicBool>>,
}

/// How a message is changed on its way.
pub(crate) type Heard = fn(PeerMessage) -> PeerMessage;

pub(crate) struct World {
    pub(crate) network: MemNetwork,
    pub(crate) p: Engine,
    pub(crate) d: Engine,
    /// The consumer's and the producer's name for the link.
    link: Option<(LinkId, LinkId)>,
    pub(crate) now: Duration,
    leases: u128,
    /// What the producer's owner says, as the consumer's hears it.
    pub(crate) heard: Heard,
    /// What the consumer's owner says, as the producer's hears it.
    pub(crate) asked: Heard,
}

fn frame(bytes: &[u8]) -> Frame {
    let mut reader = FrameReader::default();
    reader.extend(bytes);
    reader.next_frame().unwrap().unwrap()
}

/// One life of a rank, its cache's regions, and whether its transport takes no note of cancels.
fn begin(
    who: RankIdentity,
    network: &MemNetwork,
    manifest: &RankManifest,
    staging: Option<(usize, StagingConfig)>,
    script: Script,
) -> (RankSession, Vec<Region>, Arc<AtomicBool>) {
    let late = Late::new(Faulty::new(network.endpoint().unwrap(), script), Arc::default());
    let deaf = late.deaf.clone();
    let mut transport: Box<dyn Transport> = Box::new(late);
    let len = |r: &kvferry_geometry::layout::Region| usize::try_from(r.len.get()).unwrap();
    let regions: Vec<Region> = manifest.layout.regions.iter().map(|r| Region::zeroed(len(r)).unwrap()).collect();
    let mut cache = LocalCache::register(&mut *transport, manifest.clone(), regions.clone()).unwrap();
    if let Some((bytes, _)) = staging {
        cache = cache.with_staging(&mut *transport, Region::zeroed(bytes).unwrap()).unwrap();
    }
    let mut session = RankSession::new(who, transport, cache);
    if let Some((_, config)) = staging {
        session = session.with_staging(config).unwrap();
    }
    (session, regions, deaf)
}

pub(crate) const KEY: ContentKey = ContentKey::from_bytes([7; 32]);

impl Engine {
    fn new(id: &str, network: &MemNetwork, shape: Shape) -> Self {
        let engine = || EngineId::new(id).unwrap();
        let ranks = u32::try_from(shape.ranks.len()).unwrap();
        let (spec, groups) = (shape.spec.clone(), shape.groups);
        let mut owner = OwnerSession::new(OwnerConfig {
            identity: ModelIdentity::new("m").unwrap(),
            compat: shape.compat,
            stripe: shape.stripe,
            // These worlds let days pass; what expires has worlds of its own.
            lease: LeaseTerms { ttl: None, ..LeaseTerms::default() },
            ..OwnerConfig::new(engine(), Epoch::new(1), spec, groups, ranks)
        })
        .unwrap();
        let (mut sessions, mut memory, mut links, mut deaf) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut script = Some(shape.script);
        for (rank, manifest) in (0u32..).map(RankId::new).zip(&shape.ranks) {
            let who = RankIdentity { engine: engine(), rank, epoch: Epoch::new(2) };
            let script = script.take().unwrap_or_default();
            let (session, regions, is_deaf) = begin(who, network, manifest, shape.staging, script);
            sessions.push(session);
            memory.push(regions);
            deaf.push(is_deaf);
            links.push(owner.accept_rank(Duration::ZERO));
        }
        Self {
            owner,
            ranks: sessions,
            memory,
            shape: (shape.spec, shape.ranks),
            staging: shape.staging,
            links,
            connects: Vec::new(),
            said: VecDeque::new(),
            ended: Vec::new(),
            closed: Vec::new(),
            work: Vec::new(),
            permutes: true,
            deaf,
        }
    }

    /// A rank's process is killed.
    pub(crate) fn kill(&mut self, rank: usize, now: Duration) {
        self.owner.rank_closed(self.links[rank], "killed", now);
    }

    /// It begins anew, with memory of its own, in which there is nothing yet.
    pub(crate) fn revive(&mut self, rank: usize, network: &MemNetwork, now: Duration) {
        let engine = self.owner.snapshot(now).engine;
        let id = RankId::new(u32::try_from(rank).unwrap());
        let who = RankIdentity { engine, rank: id, epoch: Epoch::new(3) };
        let (session, regions, deaf) = begin(who, network, &self.shape.1[rank], self.staging, Script::default());
        (self.ranks[rank], self.memory[rank], self.deaf[rank]) = (session, regions, deaf);
        self.links[rank] = self.owner.accept_rank(now);
    }

    fn step(&mut self, now: Duration) {
        self.owner.step(now);
        for (i, rank) in self.ranks.iter_mut().enumerate() {
            rank.step(now);
            while let Some(work) = rank.next_work() {
                if self.permutes {
                    work.permute.run(1);
                    rank.work_done(work.id, now);
                } else {
                    self.work.push((i, work));
                }
            }
            while let Some(message) = rank.next_message() {
                let bytes = wire::encode_from_rank(&message).unwrap();
                self.owner.rank_message(self.links[i], wire::decode_from_rank(&frame(&bytes)).unwrap(), now);
            }
        }
        while let Some(effect) = self.owner.next_effect() {
            match effect {
                Effect::Connect { link, .. } => self.connects.push(link),
                Effect::SendPeer { message, .. } => self.said.push_back(message),
                Effect::SendRank { link, message } => {
                    let rank = self.links.iter().position(|l| *l == link).unwrap();
                    let bytes = wire::encode_to_rank(&message).unwrap();
                    self.ranks[rank].handle(wire::decode_to_rank(&frame(&bytes)).unwrap(), now);
                }
                Effect::PullEnded { pull, result } => self.ended.push((pull, (*result).map_err(Box::new))),
                Effect::LeaseClosed { fence, how, .. } => self.closed.push((fence, how)),
                Effect::JoinRefused(error) => panic!("{error}"),
                _ => {}
            }
        }
    }

    /// Every byte of an item at a rank: its place, and what it is, with its block (or slot) and the token in it (or row).
    fn each(&self, rank: usize, item: ItemId, mut visit: impl FnMut(&Region, u64, BlockId, u64, u64)) {
        let (spec, ranks) = &self.shape;
        let (manifest, named) = (&ranks[rank], &spec.items()[item.index()]);
        let (Some(view), Some(placed)) = (&manifest.layout.views[item.index()], &manifest.placement[item.index()])
        else {
            return;
        };
        let region = &self.memory[rank][view.region().index()];
        let name = |part: &str| hash(&[hash_text(named.name.as_str()), hash_text(part)]);
        for block in 0..view.blocks() {
            let start = view.offset().get() + u64::from(block) * view.stride().get();
            match (view, placed, &named.kind) {
                (View::Paged(v), Placement::Paged(p), ItemKind::Paged(paged)) => {
                    for c in &v.components {
                        let width = paged.components.iter().find(|s| s.name == c.name).unwrap().width.get();
                        for (e, h) in (0..u64::from(v.block_size)).flat_map(|e| p.heads_iter().map(move |h| (e, h))) {
                            let (kernel, within) = (e / u64::from(v.kernel.size), e % u64::from(v.kernel.size));
                            let head = u64::from(h - p.heads.start());
                            let at = start
                                + kernel * v.kernel.stride.get()
                                + c.offset.get()
                                + head * c.head_stride.get()
                                + within * c.entry_stride.get();
                            for x in 0..width {
                                let what = hash(&[name(c.name.as_str()), u64::from(h), x]);
                                visit(region, at + x, BlockId::new(block), e, what);
                            }
                        }
                    }
                }
                (View::State(v), Placement::State(p), ItemKind::State(state)) => {
                    for part in &v.parts {
                        let index = state.parts.iter().position(|s| s.name == part.name).unwrap();
                        let (spec, units) = (&state.parts[index], p.parts[index]);
                        for (r, u) in (0..spec.rows).flat_map(|r| (units.start()..units.end()).map(move |u| (r, u))) {
                            let unit = u64::from(u - units.start());
                            let at = start
                                + part.offset.get()
                                + u64::from(r) * part.row_stride.get()
                                + unit * part.unit_stride.get();
                            for x in 0..spec.width.get() {
                                let what = hash(&[name(part.name.as_str()), u64::from(u), x, u64::from(r)]);
                                visit(region, at + x, BlockId::new(block), 0, what);
                            }
                        }
                    }
                }
                _ => panic!("a view of the wrong kind"),
            }
        }
    }

    /// Which position of the sequence a block or slot stands for: token for a paged group, position for states.
    fn positions(
        &self,
        group: usize,
        list: &[(BlockId, u64)],
        block_tokens: u64,
    ) -> impl Fn(BlockId, u64) -> Option<u64> {
        let (list, _) = (list.to_vec(), group);
        move |block, entry| {
            let (_, at) = list.iter().find(|(id, _)| *id == block)?;
            Some(if block_tokens == 0 { *at } else { at * block_tokens + entry })
        }
    }

    fn group_items(&self, group: usize) -> (Vec<ItemId>, u64) {
        let manifest = self.owner.manifest().unwrap().cache().clone();
        let g = &manifest.groups()[group];
        (g.items.clone(), g.block_tokens.get())
    }

    /// Writes what a request's cache would be into all ranks.
    pub(crate) fn fill(&self, salt: u64, groups: &[SrcGroup]) {
        for (i, group) in groups.iter().enumerate() {
            let (items, block_tokens) = self.group_items(i);
            let list: Vec<(BlockId, u64)> = match group {
                SrcGroup::Paged(g) => g.table.iter().zip(g.table.first_position()..).collect(),
                SrcGroup::State(g) => g.checkpoints.iter().map(|c| (c.slot, c.position.get())).collect(),
            };
            let position = self.positions(i, &list, block_tokens);
            for (rank, item) in (0..self.ranks.len()).flat_map(|r| items.iter().map(move |i| (r, *i))) {
                self.each(rank, item, |region, at, block, entry, what| {
                    if let Some(t) = position(block, entry) {
                        region.write(at, &[byte(salt, what, t)]).unwrap();
                    }
                });
            }
        }
    }

    /// How many bytes of a group are there, of `[from, to)` for paged items and of all states listed; all others of the listed
    /// blocks are counted as well, as not there.
    pub(crate) fn found(&self, salt: u64, group: usize, list: &[(BlockId, u64)], (from, to): (u64, u64)) -> (u64, u64) {
        let (items, block_tokens) = self.group_items(group);
        let position = self.positions(group, list, block_tokens);
        let (mut there, mut missing) = (0, 0);
        for (rank, item) in (0..self.ranks.len()).flat_map(|r| items.iter().map(move |i| (r, *i))) {
            self.each(rank, item, |region, at, block, entry, what| {
                let Some(t) = position(block, entry) else { return };
                if block_tokens > 0 && !(from..to).contains(&t) {
                    return;
                }
                let mut got = [0];
                region.read(at, &mut got).unwrap();
                if got[0] == byte(salt, what, t) { there += 1 } else { missing += 1 }
            });
        }
        (there, missing)
    }
}

trait HeadsIter {
    fn heads_iter(&self) -> std::ops::Range<u32>;
}
impl HeadsIter for kvferry_geometry::placement::PagedPlacement {
    fn heads_iter(&self) -> std::ops::Range<u32> {
        self.heads.start()..self.heads.end()
    }
}

fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0xcbf2_9ce4_8422_2325, |h, p| {
        let mixed = (h ^ p).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    })
}

fn hash_text(text: &str) -> u64 {
    text.bytes().fold(1, |h, b| hash(&[h, u64::from(b)]))
}

/// Never 0, so that zeroed memory has none of it.
fn byte(salt: u64, what: u64, position: u64) -> u8 {
    (hash(&[salt, what, position]) % 255).to_le_bytes()[0] + 1
}

impl World {
    pub(crate) fn new(p: Shape, d: Shape) -> Self {
        let network = MemNetwork::new(5);
        let (p, d) = (Engine::new("p", &network, p), Engine::new("d", &network, d));
        let mut world = Self { network, p, d, link: None, now: Duration::ZERO, leases: 0, heard: |m| m, asked: |m| m };
        world.run(3);
        assert!(world.p.owner.manifest().is_some() && world.d.owner.manifest().is_some());
        world
    }

    /// Steps everything some times, 10 ms each.
    pub(crate) fn run(&mut self, times: usize) {
        for _ in 0..times {
            self.p.step(self.now);
            self.d.step(self.now);
            if let Some(ours) = self.d.connects.pop() {
                let theirs = self.p.owner.accept(None, self.now);
                self.link = Some((ours, theirs));
                assert!(self.d.owner.link_opened(ours, None, self.now));
            }
            if let Some((ours, theirs)) = self.link {
                for m in std::mem::take(&mut self.d.said) {
                    let bytes = wire::encode_peer(&(self.asked)(m)).unwrap();
                    self.p.owner.peer_message(theirs, wire::decode_peer(&frame(&bytes)).unwrap(), self.now);
                }
                for m in std::mem::take(&mut self.p.said) {
                    let bytes = wire::encode_peer(&(self.heard)(m)).unwrap();
                    self.d.owner.peer_message(ours, wire::decode_peer(&frame(&bytes)).unwrap(), self.now);
                }
            }
            self.now += Duration::from_millis(10);
        }
    }

    pub(crate) fn offer(&mut self, groups: Vec<SrcGroup>) -> Fence {
        self.leases += 1;
        let offer = Offer { groups, content_key: KEY };
        self.p.owner.offer(LeaseId::new(self.leases), offer, Ttl::Usual, self.now).unwrap()
    }

    pub(crate) fn wish(&self, fence: &Fence, tokens: u64, groups: Vec<DstGroup>) -> PullWish {
        PullWish {
            mode: Mode::Pull,
            address: "here".into(),
            fence: fence.clone(),
            tokens: Tokens::new(tokens),
            groups,
            content_key: KEY,
            assurance: Assurance::Full,
            deadline: Duration::from_secs(60),
            priority: USUAL_PRIORITY,
            policy: FailurePolicy::default(),
        }
    }

    /// Offers, pulls, and waits.
    pub(crate) fn pull(&mut self, tokens: u64, src: Vec<SrcGroup>, dst: Vec<DstGroup>) -> Ended {
        let fence = self.offer(src);
        let wish = self.wish(&fence, tokens, dst);
        let pull = self.d.owner.pull(wish, self.now);
        self.run(60);
        self.end_of(pull).unwrap_or_else(|| panic!("{pull} has not ended"))
    }

    pub(crate) fn end_of(&self, pull: PullId) -> Option<Ended> {
        self.d.ended.iter().find(|(id, _)| *id == pull).map(|(_, r)| r.clone())
    }
}
