//! Which blocks of our engine are lent, and to whom: what requests write, and what leases let others read.
//!
//! A block that is written must be nobody else's: no other request may write it, and no lease may show it. Blocks that are only
//! read may be lent any number of times (requests with a common prefix). Where groups share memory, blocks of different groups
//! with common bytes count as one. A request in doubt keeps its blocks in quarantine: somebody may still write them, one of our own
//! ranks or, where the producer's ranks write, one of those. They leave it by evidence that all have stopped; by time only where the
//! engine vouches for that.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::{DstGroup, DstPaged, SrcGroup, SrcPaged};
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::units::{BlockId, GroupId, Name, RankId, TokenRange, Tokens};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::{EngineId, Epoch, Fence};
use kvferry_proto::push::Stoppage;
use kvferry_proto::rank::PullId;

/// A block or slot of a group.
pub(super) type Place = (GroupId, BlockId);

/// Who has a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Holder {
    /// A request in progress writes it.
    Pull(PullId),
    /// A request has ended, and some of its ranks may still write it.
    Quarantine(PullId),
    /// An open lease lets others read it.
    Lease,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pull(id) => write!(f, "request {id} in progress writes"),
            Self::Quarantine(id) => write!(f, "request {id} has left in quarantine: a rank may still write it"),
            Self::Lease => f.write_str("an open lease offers"),
        }
    }
}

/// Blocks that are asked for are lent already.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("block {block} of group {group} shares bytes with block {lent} of group {lent_group}, which {holder}")]
pub struct Overlap {
    /// The group.
    pub group: Name,
    /// Its block that was asked for.
    pub block: BlockId,
    /// The group of the block that is lent: the same, or one that shares its memory.
    pub lent_group: Name,
    /// The block that is lent.
    pub lent: BlockId,
    /// To whom.
    pub holder: Holder,
}

/// What a block is lent for.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    writer: Option<(PullId, bool)>,
    readers: u32,
}

impl Use {
    fn holder(self, also_readers: bool) -> Option<Holder> {
        match self.writer {
            Some((id, false)) => Some(Holder::Pull(id)),
            Some((id, true)) => Some(Holder::Quarantine(id)),
            None if also_readers && self.readers > 0 => Some(Holder::Lease),
            None => None,
        }
    }
}

/// Who may still write the blocks of a request that has ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Doubt {
    /// Ranks of ours.
    pub(super) ours: BTreeSet<RankId>,
    /// Ranks of the producer.
    pub(super) theirs: Option<Writers>,
}

/// The producer's ranks that may still write for an attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Writers {
    pub(super) fence: Fence,
    /// When they were granted their room.
    pub(super) granted: Duration,
    /// Each with its own life, and the ranks of ours whose memory it writes.
    pub(super) ranks: BTreeMap<RankId, (Epoch, BTreeSet<RankId>)>,
}

impl Doubt {
    pub(super) fn ours(ranks: &[RankId]) -> Self {
        Self { ours: ranks.iter().copied().collect(), theirs: None }
    }

    pub(super) fn is_none(&self) -> bool {
        self.ours.is_empty() && self.theirs.as_ref().is_none_or(|w| w.ranks.is_empty())
    }

    fn is_of(&self, engine: &EngineId) -> bool {
        self.theirs.as_ref().is_some_and(|w| w.fence.engine == *engine && !w.ranks.is_empty())
    }
}

/// The blocks that a request has left.
#[derive(Debug)]
struct Left {
    places: Vec<Place>,
    doubt: Doubt,
    since: Duration,
}

/// A request that has left blocks in quarantine.
pub(super) struct InDoubt<'a> {
    pub(super) pull: PullId,
    pub(super) blocks: usize,
    pub(super) doubt: &'a Doubt,
    pub(super) since: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Loans {
    used: BTreeMap<Place, Use>,
    /// Requests in quarantine, with their blocks and who has not been seen to have stopped.
    quarantine: BTreeMap<PullId, Left>,
}

impl Loans {
    /// Lends a request the blocks that it writes.
    pub(super) fn write(&mut self, m: &Manifest, id: PullId, places: &[Place]) -> Result<(), Overlap> {
        self.check(m, places, true)?;
        for place in places {
            self.used.entry(*place).or_default().writer = Some((id, false));
        }
        Ok(())
    }

    /// Lends a lease the blocks that it shows.
    pub(super) fn read(&mut self, m: &Manifest, places: &[Place]) -> Result<(), Overlap> {
        self.check(m, places, false)?;
        for place in places {
            let readers = &mut self.used.entry(*place).or_default().readers;
            *readers = readers.saturating_add(1);
        }
        Ok(())
    }

    /// A lease is over.
    pub(super) fn read_ended(&mut self, places: &[Place]) {
        for place in places {
            self.update(place, |used| used.readers = used.readers.saturating_sub(1));
        }
    }

    /// A request has ended; these may still write.
    pub(super) fn write_ended(&mut self, id: PullId, places: Vec<Place>, in_doubt: Doubt, now: Duration) {
        let doubt = !in_doubt.is_none();
        for place in &places {
            self.update(place, |used| {
                if matches!(used.writer, Some((of, _)) if of == id) {
                    used.writer = doubt.then_some((id, true));
                }
            });
        }
        if doubt {
            self.quarantine.insert(id, Left { places, doubt: in_doubt, since: now });
        }
    }

    /// A rank that was in doubt says, late, that it has stopped.
    pub(super) fn stopped(&mut self, id: PullId, rank: RankId) {
        self.settle(id, |doubt| {
            doubt.ours.remove(&rank);
        });
    }

    /// Less is in doubt of a request; its blocks leave quarantine when nothing is. Gives how many did.
    fn settle(&mut self, id: PullId, change: impl FnOnce(&mut Doubt)) -> usize {
        let Some(left) = self.quarantine.get_mut(&id) else { return 0 };
        change(&mut left.doubt);
        if left.doubt.is_none() { self.let_go(id) } else { 0 }
    }

    fn let_go(&mut self, id: PullId) -> usize {
        let Some(left) = self.quarantine.remove(&id) else { return 0 };
        let blocks = left.places.len();
        self.write_ended(id, left.places, Doubt::default(), left.since);
        blocks
    }

    /// The producer says which of its writers have stopped for an attempt.
    pub(super) fn writers_stopped(&mut self, fence: &Fence, who: &Stoppage) {
        let of_fence = |left: &Left| left.doubt.theirs.as_ref().is_some_and(|w| w.fence == *fence);
        let ids: Vec<PullId> = self.quarantine.iter().filter(|(_, left)| of_fence(left)).map(|(id, _)| *id).collect();
        for id in ids {
            self.settle(id, |doubt| match who {
                Stoppage::All => doubt.theirs = None,
                Stoppage::Except(still) => {
                    if let Some(w) = &mut doubt.theirs {
                        w.ranks.retain(|rank, _| still.contains(rank));
                    }
                }
                Stoppage::Unknown => {}
            });
        }
    }

    /// The attempts whose writers are in doubt.
    pub(super) fn doubted(&self) -> BTreeSet<Fence> {
        let theirs = self.quarantine.values().filter_map(|left| left.doubt.theirs.as_ref());
        theirs.filter(|w| !w.ranks.is_empty()).map(|w| w.fence.clone()).collect()
    }

    /// Whether ranks of an engine are in doubt.
    pub(super) fn doubts(&self, engine: &EngineId) -> bool {
        self.quarantine.values().any(|left| left.doubt.is_of(engine))
    }

    /// The producer's ranks that are in doubt for an attempt.
    pub(super) fn doubted_writers(&self, fence: &Fence) -> BTreeSet<RankId> {
        let of_fence = self.quarantine.values().filter_map(|left| left.doubt.theirs.as_ref());
        of_fence.filter(|w| w.fence == *fence).flat_map(|w| w.ranks.keys().copied()).collect()
    }

    /// An engine was met: a rank of it that has begun another life writes nothing any more that its former life was to write. That is
    /// known only if what the engine says of itself is not older than the grant (`since` then it was asked): lives have no order. Gives the
    /// attempts of which others are still in doubt.
    pub(super) fn peer_is_met(&mut self, peer: &EngineManifest, since: Option<Duration>) -> Vec<Fence> {
        let of_peer = |left: &Left| left.doubt.is_of(peer.engine());
        let ids: Vec<PullId> = self.quarantine.iter().filter(|(_, left)| of_peer(left)).map(|(id, _)| *id).collect();
        for id in &ids {
            self.settle(*id, |doubt| {
                if let Some(w) = doubt.theirs.as_mut().filter(|w| since.is_some_and(|since| since >= w.granted)) {
                    // One that isn't listed any more has shown no other life.
                    w.ranks.retain(|rank, (epoch, _)| peer.contact(*rank).is_none_or(|c| c.epoch == *epoch));
                }
            });
        }
        let left = ids.iter().filter_map(|id| self.quarantine.get(id));
        left.filter_map(|left| left.doubt.theirs.as_ref()).map(|w| w.fence.clone()).collect()
    }

    /// Lets those go that have been in quarantine since then or longer. Gives each with how many blocks.
    pub(super) fn reclaim(&mut self, since: Duration) -> Vec<(PullId, usize)> {
        let old: Vec<PullId> = self.quarantine.iter().filter(|(_, l)| l.since <= since).map(|(id, _)| *id).collect();
        old.into_iter().map(|id| (id, self.let_go(id))).collect()
    }

    /// Since when the oldest is in quarantine.
    pub(super) fn oldest(&self) -> Option<Duration> {
        self.quarantine.values().map(|left| left.since).min()
    }

    /// A rank has joined anew: nothing of its former life writes to its memory any more.
    pub(super) fn rank_is_new(&mut self, rank: RankId) {
        let waiting: Vec<PullId> = self.quarantine.keys().copied().collect();
        for id in waiting {
            self.settle(id, |doubt| {
                doubt.ours.remove(&rank);
                if let Some(w) = &mut doubt.theirs {
                    // What is written to the memory that it had changes nothing of what it has.
                    for (_, to) in w.ranks.values_mut() {
                        to.remove(&rank);
                    }
                    w.ranks.retain(|_, (_, to)| !to.is_empty());
                }
            });
        }
    }

    /// Requests that have left blocks in quarantine.
    pub(super) fn in_doubt(&self) -> impl Iterator<Item = InDoubt<'_>> {
        let show = |(pull, left): (&PullId, _)| -> InDoubt<'_> {
            let Left { places, doubt, since }: &Left = left;
            InDoubt { pull: *pull, blocks: places.len(), doubt, since: *since }
        };
        self.quarantine.iter().map(show)
    }

    /// Blocks in quarantine.
    pub(super) fn quarantined(&self) -> usize {
        self.quarantine.values().map(|left| left.places.len()).sum()
    }

    /// Whether nothing is lent.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.used.is_empty() && self.quarantine.is_empty()
    }

    /// How many blocks and slots are lent to writers, and how often to readers.
    #[cfg(test)]
    pub(super) fn lent(&self) -> (usize, usize) {
        let writers = self.used.values().filter(|used| used.writer.is_some()).count();
        (writers, self.used.values().map(|used| used.readers as usize).sum())
    }

    fn update(&mut self, place: &Place, change: impl FnOnce(&mut Use)) {
        let Entry::Occupied(mut used) = self.used.entry(*place) else { return };
        change(used.get_mut());
        if used.get().writer.is_none() && used.get().readers == 0 {
            used.remove();
        }
    }

    /// Whether no block is lent; those that are only read count for who wants to write.
    fn check(&self, m: &Manifest, places: &[Place], to_write: bool) -> Result<(), Overlap> {
        for &(group, block) in places {
            let same = self.used.get(&(group, block)).and_then(|used| Some(((group, block), used.holder(to_write)?)));
            let shared = || {
                m.sharing(group, block).into_iter().find_map(|(other, ids)| {
                    let (from, to) = ids.into_inner();
                    let mut lent = self.used.range((other, from)..=(other, to));
                    lent.find_map(|(place, used)| Some((*place, used.holder(to_write)?)))
                })
            };
            if let Some(((other, lent), holder)) = same.or_else(shared) {
                let name = |g: GroupId| m.groups().get(g.index()).map_or_else(|| Name::new("?"), |g| g.name.clone());
                return Err(Overlap { group: name(group), block, lent_group: name(other), lent, holder });
            }
        }
        Ok(())
    }
}

/// The blocks and slots that a request for the first `tokens` tokens may write, zeroed ones included.
pub(super) fn written(m: &Manifest, tokens: Tokens, groups: &[DstGroup]) -> Vec<Place> {
    let of_group = |(id, g): (GroupId, &DstGroup)| -> Vec<Place> {
        let ids: Vec<BlockId> = match g {
            DstGroup::Paged(g) => paged_written(m, id, tokens, g),
            DstGroup::State(g) => g.slot.into_iter().chain(g.more.iter().map(|c| c.slot)).collect(),
        };
        ids.into_iter().map(|block| (id, block)).collect()
    };
    (0u32..).map(GroupId::new).zip(groups).flat_map(of_group).collect()
}

fn paged_written(m: &Manifest, id: GroupId, tokens: Tokens, g: &DstPaged) -> Vec<BlockId> {
    if is_ring(m, id) {
        let all = g.cached < tokens;
        return g.table.iter().filter(|_| all).collect();
    }
    let need = |item: &Item| {
        let kept = item.as_paged()?.retention.needed(tokens);
        let need = kept.intersect(TokenRange::new(g.cached, tokens));
        (!need.is_empty()).then(|| need.start().get())
    };
    match items(m, id).filter_map(need).min() {
        Some(first) => from_position(&g.table, first / block_tokens(m, id)).collect(),
        None => Vec::new(),
    }
}

/// The blocks and slots whose bytes an offer shows.
pub(super) fn shown(m: &Manifest, groups: &[SrcGroup]) -> Vec<Place> {
    let of_group = |(id, g): (GroupId, &SrcGroup)| -> Vec<Place> {
        let ids: Vec<BlockId> = match g {
            SrcGroup::Paged(g) => paged_shown(m, id, g),
            SrcGroup::State(g) => g.checkpoints.iter().map(|c| c.slot).collect(),
        };
        ids.into_iter().map(|block| (id, block)).collect()
    };
    (0u32..).map(GroupId::new).zip(groups).flat_map(of_group).collect()
}

/// Entries before and after the held tokens are placeholders.
fn paged_shown(m: &Manifest, id: GroupId, g: &SrcPaged) -> Vec<BlockId> {
    if g.held.is_empty() {
        return Vec::new();
    }
    if is_ring(m, id) {
        return g.table.iter().collect();
    }
    let each = block_tokens(m, id);
    let (first, end) = (g.held.start().get() / each, g.held.end().get().div_ceil(each));
    let most = end.saturating_sub(first.max(g.table.first_position()));
    from_position(&g.table, first).take(usize::try_from(most).unwrap_or(usize::MAX)).collect()
}

fn from_position(table: &kvferry_geometry::request::BlockTable, first: u64) -> impl Iterator<Item = BlockId> {
    let skipped = first.saturating_sub(table.first_position());
    table.iter().skip(usize::try_from(skipped).unwrap_or(usize::MAX))
}

fn items(m: &Manifest, id: GroupId) -> impl Iterator<Item = &Item> {
    m.groups().get(id.index()).into_iter().flat_map(|g| &g.items).filter_map(|item| m.spec().get(*item))
}

fn block_tokens(m: &Manifest, id: GroupId) -> u64 {
    m.groups().get(id.index()).map_or(1, |g| g.block_tokens.get()).max(1)
}

fn is_ring(m: &Manifest, id: GroupId) -> bool {
    items(m, id).filter_map(Item::as_paged).any(|p| matches!(p.retention, Retention::Ring(_)))
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::layout::LayoutStyle;
    use kvferry_geometry::manifest::{CacheGroup, RankManifest};
    use kvferry_geometry::placement::{HeadRule, Parallelism};
    use kvferry_geometry::request::{BlockTable, Checkpoint, DstState, SrcState, Tail};
    use kvferry_geometry::spec::{Component, ModelSpec, PagedItem, StateItem, StatePart};
    use kvferry_geometry::units::ItemId;

    use super::*;

    /// A group of a window of 20 tokens, one of a ring of 32, one of states; 16 tokens a block.
    fn manifest() -> Manifest {
        let kv = |retention| PagedItem { retention, ..PagedItem::new(1, vec![Component::new("kv", 8, "bf16")]) };
        let spec = ModelSpec::new(vec![
            Item::paged("window", kv(Retention::Window(Tokens::new(20)))),
            Item::paged("ring", kv(Retention::Ring(Tokens::new(32)))),
            Item::state("state", StateItem { parts: vec![StatePart::new("s", 1, 1, 8, "fp32")] }),
        ]);
        let spec = spec.unwrap();
        let ids: Vec<[ItemId; 1]> = (0..3).map(|i| [ItemId::new(i)]).collect();
        let lists: Vec<(&[ItemId], u32, u32)> = ids.iter().map(|i| (&i[..], 16, 99)).collect();
        let placed = Parallelism::tensor(&spec, 1).place(&spec, |_, _| HeadRule::Whole).unwrap();
        let rank = |placement| {
            let layout = LayoutStyle::HND.build(&spec, &placement, &lists).unwrap();
            RankManifest { placement, layout }
        };
        let ranks = placed.into_iter().map(rank).collect();
        let group = |i: usize| CacheGroup {
            name: Name::new(["window", "ring", "state"][i]),
            items: ids[i].to_vec(),
            block_tokens: Tokens::new([16, 16, 0][i]),
        };
        Manifest::new(spec, (0..3).map(group).collect(), ranks).unwrap()
    }

    fn table(first: u64, ids: &[u32]) -> BlockTable {
        BlockTable::new(first, &ids.iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>())
    }

    fn plain(places: &[Place]) -> Vec<(u32, u32)> {
        places.iter().map(|(group, block)| (group.get(), block.get())).collect()
    }

    #[test]
    fn only_blocks_that_are_written_count() {
        let m = manifest();
        let written = |cached, first, window: &[u32], ring: &[u32]| {
            let paged = |table| DstPaged { table, cached: Tokens::new(cached) };
            let more = vec![Checkpoint { position: Tokens::new(16), slot: BlockId::new(8) }];
            let state = DstState { slot: Some(BlockId::new(9)), more };
            let groups = [paged(table(first, window)).into(), paged(table(0, ring)).into(), state.into()];
            plain(&super::written(&m, Tokens::new(70), &groups))
        };
        // 19 tokens before the 70th are read: from block position 3 on.
        let states = [(2, 9), (2, 8)];
        let ring = [(1, 5), (1, 6)];
        assert_eq!(written(0, 0, &[0, 1, 2, 3, 4], &[5, 6]), [&[(0, 3), (0, 4)][..], &ring, &states].concat());
        assert_eq!(written(0, 3, &[3, 4, 7], &[5, 6]), [&[(0, 3), (0, 4), (0, 7)][..], &ring, &states].concat());
        assert_eq!(written(64, 0, &[0, 1, 2, 3, 4], &[5, 6]), [&[(0, 4)][..], &ring, &states].concat());
        assert_eq!(written(70, 0, &[0, 1, 2, 3, 4], &[5, 6]), states, "all is cached but the states");
    }

    #[test]
    fn placeholders_are_not_shown() {
        let m = manifest();
        let shown = |held: (u64, u64)| {
            let held = TokenRange::new(Tokens::new(held.0), Tokens::new(held.1));
            let paged = |table| SrcPaged { table, held, tail: Tail::Exact };
            let state = SrcState { checkpoints: vec![Checkpoint { position: Tokens::new(70), slot: BlockId::new(9) }] };
            let groups = [paged(table(1, &[0, 0, 3, 4, 0])).into(), paged(table(0, &[5, 6])).into(), state.into()];
            plain(&super::shown(&m, &groups))
        };
        assert_eq!(shown((51, 70)), [(0, 3), (0, 4), (1, 5), (1, 6), (2, 9)]);
        assert_eq!(shown((48, 64)), [(0, 3), (1, 5), (1, 6), (2, 9)]);
        assert_eq!(shown((0, 0)), [(2, 9)]);
    }
}
