//! An engine's manifest: every rank's placement and layout, proven sound and complete, with a digest.
//!
//! A [`Manifest`] is the only thing that the planner takes, and making one is the only place where a description is
//! checked: past it every view lies inside its region, no two places of a group overlap, and the ranks together
//! hold every byte of every item.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::ops::RangeInclusive;

use crate::digest::Digest;
use crate::layout::{CacheLayout, Collector, LayoutError, SharedMemory, View};
use crate::placement::{HeadRange, MAX_PLACEMENTS, MAX_RANKS, Placement, RankPlacement};
use crate::spec::{Item, ItemKind, ModelSpec, Retention, write_list};
use crate::units::{BlockId, Bytes, GroupId, ItemId, Name, RankId, Tokens};

pub(crate) mod coverage;
mod digest;

/// The most faults that are told of one manifest.
pub const MAX_FAULTS: usize = 256;
/// The most runs of memory that are listed to prove that views don't overlap where nested strides don't prove it.
const PROOF_RUNS: u64 = 1 << 22;

/// The items that share one block table for each request.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CacheGroup {
    /// Unique in the engine; for messages only, since groups are never matched across engines.
    pub name: Name,
    /// The items.
    pub items: Vec<ItemId>,
    /// Tokens of the sequence that one entry of the block table covers: block size in tokens times context-parallel size. Every
    /// rank's view must agree with it. 0 for a group of states, whose slots cover no tokens.
    pub block_tokens: Tokens,
}

/// What one rank says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankManifest {
    /// What it holds.
    pub placement: RankPlacement,
    /// Where it lies.
    pub layout: CacheLayout,
}

/// A fault of a manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// No rank, or too many.
    #[error("the engine lists {got} ranks; it must be 1 to {limit}")]
    RankCount {
        /// Ranks listed.
        got: usize,
        /// The limit.
        limit: u32,
    },
    /// Too many ranks for so many items.
    #[error("{ranks} ranks times {items} items are more than the {limit} placements that are planned for")]
    Placements {
        /// Ranks listed.
        ranks: usize,
        /// Items of the model.
        items: usize,
        /// The limit.
        limit: usize,
    },
    /// The proof that the ranks hold everything would take too long.
    #[error(
        "item {item}: its placements are cut into too many different pieces to prove that together they hold everything; \
         use fewer distinct head intervals and token classes"
    )]
    TooComplex {
        /// The item.
        item: Name,
    },
    /// An item is in no group or in several.
    #[error("item {item}: listed in {got} cache groups; it must be in exactly one")]
    GroupsOfItem {
        /// The item.
        item: Name,
        /// How many groups list it.
        got: usize,
    },
    /// Groups share memory in more different ways than are kept apart.
    #[error(
        "rank {rank}: its groups share memory in too many different ways to tell which of their blocks have bytes in common; \
         use one block stride for all that share a region"
    )]
    Sharing {
        /// The rank.
        rank: RankId,
    },
    /// A group lists an item that the spec lacks.
    #[error("cache group {group}: lists item id {item}, but the model has {items} items")]
    UnknownItem {
        /// The group.
        group: Name,
        /// The id.
        item: ItemId,
        /// Items of the model.
        items: usize,
    },
    /// Two groups have one name.
    #[error("cache group {group}: the name is listed twice")]
    DuplicateGroup {
        /// The name.
        group: Name,
    },
    /// A group has paged items and states, so that one table can't serve them.
    #[error("cache group {group}: {paged} is a paged item, {state} a state; put them in two groups")]
    MixedGroup {
        /// The group.
        group: Name,
        /// A paged item.
        paged: Name,
        /// A state.
        state: Name,
    },
    /// A group of states says that its slots cover tokens.
    #[error("cache group {group}: it holds states, whose slots cover no tokens, but it counts {got} a block; use 0")]
    StateTokens {
        /// The group.
        group: Name,
        /// What it says.
        got: Tokens,
    },
    /// A ring isn't made of whole blocks.
    #[error(
        "item {item}: a ring of {ring} tokens is not a multiple of the {block_tokens} that a block of group {group} covers"
    )]
    Ring {
        /// The item.
        item: Name,
        /// Its group.
        group: Name,
        /// Tokens of the ring.
        ring: u64,
        /// Tokens of a block.
        block_tokens: u64,
    },
    /// Rings of different sizes in one group, so that one table can't serve them.
    #[error(
        "cache group {group}: items {first} ({a}) and {second} ({b}) can't share a block table; put them in two groups"
    )]
    Retention {
        /// The group.
        group: Name,
        /// An item.
        first: Name,
        /// Another.
        second: Name,
        /// What the first keeps.
        a: Retention,
        /// What the other keeps.
        b: Retention,
    },
    /// A fault of one rank's layout.
    #[error("rank {rank}: {error}")]
    Layout {
        /// The rank.
        rank: RankId,
        /// The fault.
        error: LayoutError,
    },
    /// A view's block covers another number of tokens than its group says.
    #[error(
        "rank {rank}: item {item}: a block of {block_size} tokens over {context} context ranks covers {got} tokens, \
         but group {group} counts {expected} a block"
    )]
    BlockTokens {
        /// The rank.
        rank: RankId,
        /// The item.
        item: Name,
        /// Its group.
        group: Name,
        /// Tokens that the entries of a block stand for.
        block_size: u64,
        /// How many ranks share the tokens.
        context: u32,
        /// Their product.
        got: u64,
        /// What the group says.
        expected: u64,
    },
    /// Bytes that no rank holds.
    #[error(
        "item {item}: no rank holds heads or units {heads} of tokens [{start}, {end}) (repeating every {period}); the heads are not \
         replicated often enough for the context-parallel size, or a stage lacks the item"
    )]
    Uncovered {
        /// The item.
        item: Name,
        /// The heads.
        heads: HeadRange,
        /// First token.
        start: u64,
        /// One past the last.
        end: u64,
        /// After how many tokens the gap repeats.
        period: u64,
    },
    /// The token classes of the ranks repeat together only after too many tokens.
    #[error(
        "item {item}: its token classes repeat together only after more than {limit} tokens; use interleaves that divide each other"
    )]
    Period {
        /// The item.
        item: Name,
        /// The limit.
        limit: u64,
    },
}

/// Every fault of a manifest; the first [`MAX_FAULTS`] of them where there are more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ManifestErrors(pub Vec<ManifestError>);

impl fmt::Display for ManifestErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, &self.0)
    }
}
impl core::error::Error for ManifestErrors {}

/// A sound and complete description of one engine's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    spec: ModelSpec,
    groups: Vec<CacheGroup>,
    ranks: Vec<RankManifest>,
    group_of: Vec<GroupId>,
    /// By group: block ids below this are valid on every rank.
    blocks: Vec<BlockId>,
    shared: SharedMemory,
    digest: Digest,
}

impl Manifest {
    /// Checks a description whole.
    ///
    /// # Errors
    /// All faults of the groups; else all faults of every rank's layout; else the bytes that no rank holds. At most
    /// [`MAX_FAULTS`] of each.
    pub fn new(spec: ModelSpec, groups: Vec<CacheGroup>, mut ranks: Vec<RankManifest>) -> Result<Self, ManifestErrors> {
        let mut errors = Vec::new();
        if ranks.is_empty() || ranks.len() > MAX_RANKS as usize {
            return Err(ManifestErrors(vec![ManifestError::RankCount { got: ranks.len(), limit: MAX_RANKS }]));
        }
        if ranks.len().saturating_mul(spec.items().len()) > MAX_PLACEMENTS {
            let (ranks, items, limit) = (ranks.len(), spec.items().len(), MAX_PLACEMENTS);
            return Err(ManifestErrors(vec![ManifestError::Placements { ranks, items, limit }]));
        }
        let group_of = check_groups(&spec, &groups, &mut errors);
        if !errors.is_empty() {
            errors.truncate(MAX_FAULTS);
            return Err(ManifestErrors(errors));
        }
        let tables: Vec<Vec<ItemId>> = groups.iter().map(|g| g.items.clone()).collect();
        let mut sound = true;
        let mut shared = Collector::default();
        // One for all ranks: proofs of freedom from overlap must not add up to more.
        let mut budget = PROOF_RUNS;
        for (rank, r) in (0u32..).map(RankId::new).zip(&mut ranks) {
            if let Err(mut faults) = r.layout.check_within(&spec, &r.placement, &tables, &mut budget) {
                sound = false;
                faults.truncate(MAX_FAULTS);
                errors.extend(faults.into_iter().map(|error| ManifestError::Layout { rank, error }));
                if errors.len() > MAX_FAULTS {
                    break;
                }
                continue;
            }
            if errors.len() > MAX_FAULTS {
                break;
            }
            check_block_tokens(&spec, &groups, &group_of, rank, r, &mut errors);
            order_components(&spec, &mut r.layout);
            if shared.add(&r.layout, &spec, &r.placement, &group_of).is_err() {
                errors.push(ManifestError::Sharing { rank });
                break;
            }
        }
        if sound {
            coverage::check(&spec, &ranks, &mut errors);
        }
        if !errors.is_empty() {
            errors.truncate(MAX_FAULTS);
            return Err(ManifestErrors(errors));
        }
        let digest = digest::of(&spec, &groups, &ranks);
        let blocks = groups.iter().map(|g| blocks_of(g, &ranks)).collect();
        Ok(Self { spec, groups, ranks, group_of, blocks, shared: shared.finish(), digest })
    }

    /// The model's items in this engine's order.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The cache groups.
    #[must_use]
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// The ranks.
    #[must_use]
    pub fn ranks(&self) -> &[RankManifest] {
        &self.ranks
    }

    /// One rank.
    #[must_use]
    pub fn rank(&self, rank: RankId) -> Option<&RankManifest> {
        self.ranks.get(rank.index())
    }

    /// The group of an item; the first for an id that isn't of this engine.
    #[must_use]
    pub fn group_of(&self, item: ItemId) -> GroupId {
        self.group_of.get(item.index()).copied().unwrap_or(GroupId::ZERO)
    }

    /// Names this manifest: equal digests mean equal manifests.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The lengths of a rank's regions by id, as a batch is checked against.
    #[must_use]
    pub fn region_lens(&self, rank: RankId) -> Vec<Bytes> {
        self.rank(rank).map_or_else(Vec::new, |r| r.layout.regions.iter().map(|x| x.len).collect())
    }

    /// The block ids that are valid for a group on every rank: those below this.
    #[must_use]
    pub fn blocks(&self, group: GroupId) -> BlockId {
        self.blocks.get(group.index()).copied().unwrap_or(BlockId::ZERO)
    }

    /// Whether a group holds states.
    #[must_use]
    pub fn is_state(&self, group: GroupId) -> bool {
        let first = self.groups.get(group.index()).and_then(|g| self.spec.get(*g.items.first()?));
        first.is_some_and(|item| item.as_state().is_some())
    }

    /// The blocks (or slots) of other groups that share bytes with a block on some rank, where groups share memory: of a group,
    /// from an id to an id, both included. What lies between the parts of a block counts as its own. Ids may pass the group's last.
    #[must_use]
    pub fn sharing(&self, group: GroupId, block: BlockId) -> Vec<(GroupId, RangeInclusive<BlockId>)> {
        self.shared.meeting(group, block)
    }

    /// What groups share memory.
    pub(crate) fn shared(&self) -> &SharedMemory {
        &self.shared
    }
}

fn blocks_of(group: &CacheGroup, ranks: &[RankManifest]) -> BlockId {
    let views = ranks.iter().flat_map(|r| group.items.iter().filter_map(|i| r.layout.views[i.index()].as_ref()));
    BlockId::new(views.map(View::blocks).min().unwrap_or(0))
}

fn check_groups(spec: &ModelSpec, groups: &[CacheGroup], errors: &mut Vec<ManifestError>) -> Vec<GroupId> {
    let mut count = vec![0usize; spec.items().len()];
    let mut group_of = vec![GroupId::ZERO; spec.items().len()];
    for (i, (id, group)) in (0u32..).map(GroupId::new).zip(groups).enumerate() {
        if groups[..i].iter().any(|g| g.name == group.name) {
            errors.push(ManifestError::DuplicateGroup { group: group.name.clone() });
        }
        let mut members = Vec::new();
        for &item in &group.items {
            let Some(found) = spec.get(item) else {
                let items = spec.items().len();
                errors.push(ManifestError::UnknownItem { group: group.name.clone(), item, items });
                continue;
            };
            count[item.index()] += 1;
            group_of[item.index()] = id;
            members.push(found);
        }
        check_members(group, &members, errors);
    }
    for (item, &got) in spec.items().iter().zip(&count) {
        if got != 1 {
            errors.push(ManifestError::GroupsOfItem { item: item.name.clone(), got });
        }
    }
    group_of
}

/// Whether one table can serve the items of a group.
fn check_members(group: &CacheGroup, members: &[&Item], errors: &mut Vec<ManifestError>) {
    let paged = members.iter().find(|i| i.as_paged().is_some());
    let state = members.iter().find(|i| i.as_state().is_some());
    match (paged, state) {
        (Some(paged), Some(state)) => {
            let (group, paged, state) = (group.name.clone(), paged.name.clone(), state.name.clone());
            errors.push(ManifestError::MixedGroup { group, paged, state });
            return;
        }
        (None, Some(_)) if group.block_tokens != Tokens::ZERO => {
            errors.push(ManifestError::StateTokens { group: group.name.clone(), got: group.block_tokens });
        }
        _ => {}
    }
    let mut kept = members.iter().filter_map(|i| Some((*i, i.as_paged()?.retention)));
    let Some((first, a)) = kept.next() else { return };
    let ring = |r: Retention| matches!(r, Retention::Ring(_));
    for (second, b) in kept {
        if a != b && (ring(a) || ring(b)) {
            let (group, first, second) = (group.name.clone(), first.name.clone(), second.name.clone());
            errors.push(ManifestError::Retention { group, first, second, a, b });
        }
    }
    if let Retention::Ring(ring) = a
        && ring.get().checked_rem(group.block_tokens.get()) != Some(0)
    {
        let (item, ring, block_tokens) = (first.name.clone(), ring.get(), group.block_tokens.get());
        errors.push(ManifestError::Ring { item, group: group.name.clone(), ring, block_tokens });
    }
}

fn check_block_tokens(
    spec: &ModelSpec,
    groups: &[CacheGroup],
    group_of: &[GroupId],
    rank: RankId,
    r: &RankManifest,
    errors: &mut Vec<ManifestError>,
) {
    for (id, item) in spec.iter() {
        let (Some(paged), Some(Placement::Paged(p)), Some(View::Paged(view))) =
            (item.as_paged(), &r.placement[id.index()], &r.layout.views[id.index()])
        else {
            continue;
        };
        let Some(group) = groups.get(group_of[id.index()].index()) else { continue };
        let context = p.tokens.count();
        let block_size = u64::from(view.block_size) * u64::from(paged.tokens_per_entry);
        let got = block_size * u64::from(context);
        if got != group.block_tokens.get() {
            errors.push(ManifestError::BlockTokens {
                rank,
                item: item.name.clone(),
                group: group.name.clone(),
                block_size,
                context,
                got,
                expected: group.block_tokens.get(),
            });
        }
    }
}

/// Puts every view's components or parts into the spec's order, so that equal layouts are equal values.
fn order_components(spec: &ModelSpec, layout: &mut CacheLayout) {
    for (id, item) in spec.iter() {
        match (&item.kind, layout.views.get_mut(id.index())) {
            (ItemKind::Paged(paged), Some(Some(View::Paged(view)))) => {
                view.components.sort_by_key(|c| paged.components.iter().position(|s| s.name == c.name));
            }
            (ItemKind::State(state), Some(Some(View::State(view)))) => {
                view.parts.sort_by_key(|p| state.parts.iter().position(|s| s.name == p.name));
            }
            _ => {}
        }
    }
}
