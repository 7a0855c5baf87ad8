//! Requests that are made up: how many blocks and slots they need, and which they get.

use kvferry_geometry::layout::{PagedView, View};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::units::{BlockId, Bytes, GroupId, Name, TokenRange, Tokens};
use kvferry_models::{DescribeError, EngineDescription, Slots};

/// A request, as far as it decides which blocks are used.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Length of the sequence.
    pub tokens: u64,
    /// States of the sequence in each group of states: one after all of its tokens, and earlier ones.
    pub states: u64,
}

/// One group's blocks of one request: of a group of states, the slots of [`Ask::positions`].
#[derive(Clone, Debug)]
pub struct GroupBlocks {
    /// The place in the sequence of the first, in blocks.
    pub first_position: u64,
    /// The blocks.
    pub ids: Vec<BlockId>,
}

impl Ask {
    /// The positions of a request's states: after all tokens, then ever earlier.
    pub fn positions(self) -> impl Iterator<Item = u64> {
        (1..=self.states).rev().map(move |i| self.tokens * i / self.states)
    }

    /// (first table position, entries) that a request lists in a group: a window's earlier blocks are gone, a ring lists all of
    /// its blocks, and an entry of a group of states is a slot.
    #[must_use]
    pub fn needs(self, m: &Manifest, group: GroupId) -> (u64, u64) {
        if m.is_state(group) {
            return (0, self.states);
        }
        let covers = m.groups()[group.index()].block_tokens.get().max(1);
        let ring = retentions(m, group).find_map(|r| if let Retention::Ring(r) = r { Some(r.get()) } else { None });
        if let Some(ring) = ring {
            return (0, ring / covers);
        }
        let first = self.kept(m, group).start().get() / covers;
        (first, self.tokens.div_ceil(covers).saturating_sub(first))
    }

    /// The tokens that some item of a group still reads.
    #[must_use]
    pub fn kept(self, m: &Manifest, group: GroupId) -> TokenRange {
        let n = Tokens::new(self.tokens);
        let start = retentions(m, group).map(|r| r.needed(n).start()).min();
        TokenRange::new(start.unwrap_or(n), n)
    }

    /// What the source says of a request with these blocks.
    pub fn src(self, m: &Manifest, blocks: &[GroupBlocks], tail: Tail) -> Vec<SrcGroup> {
        let one = |(group, b): (GroupId, &GroupBlocks)| -> SrcGroup {
            if m.is_state(group) {
                return SrcState { checkpoints: self.checkpoints(b).collect() }.into();
            }
            SrcPaged { table: BlockTable::new(b.first_position, &b.ids), held: self.kept(m, group), tail }.into()
        };
        groups(m).zip(blocks).map(one).collect()
    }

    /// What the destination says, if it has `[0, cached)` of its paged groups, and takes `more` of the earlier states, the
    /// latest of them.
    pub fn dst(self, m: &Manifest, blocks: &[GroupBlocks], cached: u64, more: u64) -> Vec<DstGroup> {
        let one = |(group, b): (GroupId, &GroupBlocks)| -> DstGroup {
            if m.is_state(group) {
                let more = usize::try_from(more).unwrap_or(usize::MAX);
                let more = self.checkpoints(b).skip(1).take(more).collect();
                return DstState { slot: b.ids.first().copied(), more }.into();
            }
            DstPaged { table: BlockTable::new(b.first_position, &b.ids), cached: Tokens::new(cached) }.into()
        };
        groups(m).zip(blocks).map(one).collect()
    }

    fn checkpoints(self, blocks: &GroupBlocks) -> impl Iterator<Item = Checkpoint> {
        let at = |(position, &slot)| Checkpoint { position: Tokens::new(position), slot };
        self.positions().zip(&blocks.ids).map(at)
    }
}

/// What the paged items of a group keep.
pub fn retentions(m: &Manifest, group: GroupId) -> impl Iterator<Item = Retention> {
    let items = m.groups().get(group.index()).into_iter().flat_map(|g| &g.items);
    items.filter_map(|&id| Some(m.spec().get(id).and_then(Item::as_paged)?.retention))
}

/// The groups of an engine by id.
pub fn groups(m: &Manifest) -> impl Iterator<Item = GroupId> + use<> {
    (0..u32::try_from(m.groups().len()).unwrap_or(u32::MAX)).map(GroupId::new)
}

/// Whether groups lie in the same memory, so that a block id is in use by one of them at a time.
pub fn shares_memory(m: &Manifest) -> bool {
    m.ranks().iter().any(|rank| {
        let mut group_of: Vec<Option<GroupId>> = vec![None; rank.layout.regions.len()];
        m.spec().iter().any(|(id, _)| {
            let Some(Some(view)) = rank.layout.views.get(id.index()) else {
                return false;
            };
            let Some(known) = group_of.get_mut(view.region().index()) else {
                return false;
            };
            *known.get_or_insert(m.group_of(id)) != m.group_of(id)
        })
    })
}

/// What `fit` makes room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// What each request is.
    pub ask: Ask,
    /// How many there are at a time.
    pub requests: u64,
    /// Whether there are blocks that no request uses.
    pub spare: bool,
}

/// Gives the engine as many blocks and slots as the requests need.
pub fn fit(d: &mut EngineDescription, room: Room) -> Result<(), DescribeError> {
    fit_with(d, room, &Ok)
}

/// The same where the manifest is not quite what the description makes.
pub fn fit_with<E: From<DescribeError>>(
    d: &mut EngineDescription,
    room: Room,
    adjust: &impl Fn(Manifest) -> Result<Manifest, E>,
) -> Result<(), E> {
    // First a sketch that tells how many tokens a block of each group covers.
    (d.blocks, d.slots) = (Some(1), Slots::default());
    let sketch = adjust(d.manifest()?)?;
    let with_spare = |n: u64| if room.spare { n + n / 8 + 2 } else { n };
    let of = |group| room.ask.needs(&sketch, group).1.saturating_mul(room.requests);
    let fits = |n: u64| u32::try_from(n).unwrap_or(u32::MAX).max(1);
    if d.layout.share || shares_memory(&sketch) {
        d.blocks = Some(fits(with_spare(groups(&sketch).map(of).fold(0, u64::saturating_add))));
        return Ok(());
    }
    let most = |state: bool| groups(&sketch).filter(|&g| sketch.is_state(g) == state).map(of).max().unwrap_or(0);
    d.blocks = Some(fits(with_spare(most(false))));
    // A slot is large: one to spare is enough.
    d.slots.count = Some(fits(most(true) + u64::from(room.spare)));
    Ok(())
}

/// Where groups share memory, a page of attention should not be much smaller than a state: the fewest tokens, in kernel blocks
/// of 16, whose page holds one.
pub fn grow_to_states(d: &mut EngineDescription) -> Result<(), DescribeError> {
    const KERNEL: u32 = 16;
    let mut apart = d.clone();
    (apart.layout.share, apart.layout.padding, apart.blocks) = (false, Bytes::ZERO, Some(1));
    let m = apart.manifest()?;
    let views = || m.ranks().iter().flat_map(|r| r.layout.views.iter().flatten());
    let state = views().filter_map(View::as_state).map(|v| v.slot_stride.get()).max().unwrap_or(0);
    // Of an entry, which stands for one token or more: then the page is larger still.
    let token = |v: &PagedView| v.block_stride.get() / u64::from(v.block_size.max(1));
    let token = views().filter_map(View::as_paged).map(token).max().unwrap_or(0);
    if let Some(tokens) = state.checked_next_multiple_of(token).and_then(|b| b.checked_div(token)).filter(|&t| t > 0) {
        let tokens = u32::try_from(tokens.next_multiple_of(u64::from(KERNEL))).unwrap_or(u32::MAX);
        d.block_size = d.block_size.max(tokens);
        d.kernel_block.get_or_insert(KERNEL);
    }
    Ok(())
}

/// Blocks that no request has yet: a list for each group, or one for all where they share memory.
#[derive(Clone, Debug)]
pub struct Free {
    lists: Vec<Vec<BlockId>>,
    shared: bool,
}

impl Free {
    /// All blocks of an engine, each group's in the order that `shuffle` makes; it is told the list's number.
    pub fn new(m: &Manifest, mut shuffle: impl FnMut(u32, &mut [BlockId])) -> Self {
        let shared = shares_memory(m);
        let all = groups(m).map(|g| (0..m.blocks(g).get()).map(BlockId::new).collect());
        let mut lists: Vec<Vec<BlockId>> = all.collect();
        if shared {
            lists.truncate(1);
        }
        for (number, list) in (0u32..).zip(&mut lists) {
            shuffle(number, list);
            // They are taken from the end.
            list.reverse();
        }
        Self { lists, shared }
    }

    /// The blocks of a request; nothing is taken where a group has too few.
    ///
    /// # Errors
    /// With the first group that has too few.
    pub fn take(&mut self, m: &Manifest, ask: Ask) -> Result<Vec<GroupBlocks>, NoRoom> {
        let mut out = Vec::with_capacity(self.lists.len());
        for group in groups(m) {
            let (first_position, count) = ask.needs(m, group);
            let list = self.lists.get_mut(if self.shared { 0 } else { group.index() });
            let taken = list.ok_or(0).and_then(|list| {
                let rest = usize::try_from(count).ok().and_then(|n| list.len().checked_sub(n)).ok_or(list.len())?;
                Ok(list.split_off(rest))
            });
            match taken {
                Ok(mut ids) => {
                    ids.reverse();
                    out.push(GroupBlocks { first_position, ids });
                }
                Err(left) => {
                    self.give(&out);
                    let (is_state, all) = (m.is_state(group), m.blocks(group).get());
                    let group = m.groups().get(group.index()).map(|g| g.name.clone());
                    return Err(NoRoom {
                        group: group.unwrap_or_else(|| "".into()),
                        is_state,
                        left,
                        all,
                        needs: count,
                    });
                }
            }
        }
        Ok(out)
    }

    /// The blocks of a request come back: the last that came back goes out first.
    pub fn give(&mut self, blocks: &[GroupBlocks]) {
        for (group, blocks) in blocks.iter().enumerate() {
            if let Some(list) = self.lists.get_mut(if self.shared { 0 } else { group }) {
                list.extend(blocks.ids.iter().rev());
            }
        }
    }

    /// Free blocks of the list that has the fewest.
    #[must_use]
    pub fn least(&self) -> usize {
        self.lists.iter().map(Vec::len).min().unwrap_or(0)
    }
}

/// A request finds too few blocks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "group {group} has {left} {kind} left of {all}, and the request needs {needs}; describe more, or leave {kind} out",
    kind = if *is_state { "slots" } else { "blocks" }
)]
pub struct NoRoom {
    /// The group.
    pub group: Name,
    /// Whether it is of states.
    pub is_state: bool,
    /// Blocks or slots that are free.
    pub left: usize,
    /// All.
    pub all: u32,
    /// How many are needed.
    pub needs: u64,
}

#[cfg(test)]
mod tests {
    use kvferry_models::{Grouping, Model};

    use super::*;

    const ASK: Ask = Ask { tokens: 1000, states: 3 };

    fn described(model: &str, share: bool) -> EngineDescription {
        let mut d = EngineDescription::new(Model::preset(model).unwrap(), "tp=2".parse().unwrap());
        if share {
            d.layout.share = true;
            d.grouping = Grouping::EqualLayers;
        }
        fit(&mut d, Room { ask: ASK, requests: 2, spare: false }).unwrap();
        d
    }

    #[test]
    fn states_have_positions_that_fall() {
        assert_eq!(ASK.positions().collect::<Vec<_>>(), [1000, 666, 333]);
        assert_eq!(Ask { tokens: 7, states: 1 }.positions().collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn windows_list_what_they_keep() {
        let m = described("gpt-oss-120b", false).manifest().unwrap();
        let needs: Vec<_> = groups(&m).map(|g| ASK.needs(&m, g)).collect();
        // 1,000 tokens, of which a window of 128 keeps 873 to 999, in blocks of 16.
        assert_eq!(needs, [(54, 9), (0, 63)]);
        assert!(!shares_memory(&m));
    }

    #[test]
    fn groups_that_share_memory_take_from_one_pool() {
        let m = described("qwen3-next-80b-a3b", true).manifest().unwrap();
        assert!(shares_memory(&m));
        let mut free = Free::new(&m, |_, _| {});
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..2 {
            for group in free.take(&m, ASK).unwrap() {
                assert!(group.ids.into_iter().all(|id| seen.insert(id)));
            }
        }
        // One group of 63 blocks and three of 3 states, twice.
        assert_eq!(seen.len(), 2 * (63 + 9));
        let error = free.take(&m, ASK).unwrap_err().to_string();
        assert!(error.contains("has 0 slots left of 144, and the request needs 3"), "{error}");
    }
}
