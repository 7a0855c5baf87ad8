//! Which bytes one destination rank reads from one source rank, for every request at once.
//!
//! Items with equal placement and equal layout on both sides form an [`ItemClass`]: 80 layers are normally one. A class
//! is planned for one *period* of the entry axis, the least common multiple of what a block covers on both sides. A
//! [`Phase`] is a set of entries of that period with one block on each side; its loops are collapsed to the longest runs
//! that both layouts allow. [`PairPlan::resolve`] then multiplies phases by a request's block tables. An entry stands for one
//! token, or for several in compressed caches; values that cover several entries (the scales of a block) form a class
//! of their own with so much longer entries. A state is a block of one entry whose parts are loops over rows and units.
//!
//! The size of a plan is O(classes × phases + items), never O(blocks). Where a class's period would bring a
//! plan to more than [`MAX_PHASES`], none are kept for it and `resolve` walks the request's tokens instead, with the same kind
//! of output.
//!
//! A source that is still computing is resolved in pieces, by the watermarks of its items: see
//! [`PairPlan::resolve_between`].
//!
//! Planner code speaks of `src` and `dst` only: pull and push are one planner.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::batch::{Base, Side};
use crate::compat::Compatible;
use crate::digest::Digest;
use crate::layout::View;
use crate::manifest::{Manifest, RankManifest};
use crate::peers::PeerMap;
use crate::placement::{HeadRange, Placement};
use crate::spec::{Item, MAX_COMPONENTS, Retention};
use crate::token_set::{TokenSet, lcm};
use crate::units::{GroupId, ItemId, Name, RankId, TokenRange, Tokens};
use crate::watermarks::Watermark;

mod linear;
mod members;
mod nest;
mod pieces;
mod resolve;
mod rows;
mod side;
mod walk;

use linear::Linear;
use nest::{Cell, CompiledPhase};
use side::SideGeometry;
pub use walk::Phase;

/// The most token runs that one plan keeps phases for, over all its classes.
pub const MAX_PHASES: usize = 2048;
/// The longest period that is planned ahead, in entries.
const MAX_PLANNED_PERIOD: u64 = 1 << 22;

/// No plan for a pair of ranks, or none for a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The map was made from other manifests.
    #[error("ranks {src} and {dst}: the peer map was made from other manifests")]
    ForeignMap {
        /// Source rank.
        src: RankId,
        /// Destination rank.
        dst: RankId,
    },
    /// The request was bound to other engines.
    #[error("ranks {src} and {dst}: the request was bound to other engines than the plan was made for")]
    ForeignRequest {
        /// Source rank of the plan.
        src: RankId,
        /// Destination rank of the plan.
        dst: RankId,
    },
    /// The engine has no such rank.
    #[error("{side} rank {rank} does not exist; the engine has {ranks} ranks")]
    UnknownRank {
        /// Which side.
        side: Side,
        /// The rank.
        rank: RankId,
        /// Ranks of the engine.
        ranks: usize,
    },
    /// The map gives a rank an item that it does not hold, or cuts what can't be cut: the map is not what this crate computes.
    #[error("ranks {src} and {dst}: the peer map names an item that is not placed on both")]
    NotPlaced {
        /// Source rank.
        src: RankId,
        /// Destination rank.
        dst: RankId,
    },
    /// Watermarks of another engine.
    #[error("ranks {src} and {dst}: the watermarks are of {got} items, but the source has {expected}")]
    ForeignWatermarks {
        /// Source rank of the plan.
        src: RankId,
        /// Destination rank of the plan.
        dst: RankId,
        /// Items that have a watermark.
        got: usize,
        /// Items of the source.
        expected: usize,
    },
    /// The interval between the watermarks ends before it begins.
    #[error("source item {item}: it is to move from where it is {from} to where it is {to}; watermarks only grow")]
    Backwards {
        /// The item, by its source id.
        item: ItemId,
        /// Where the interval begins.
        from: Watermark,
        /// Where it ends.
        to: Watermark,
    },
    /// An item is to be whole though the source has not listed all of it.
    #[error(
        "source item {item}: it is marked as whole, but the request is only promised; bind the final lists to resolve it"
    )]
    Promised {
        /// The item, by its source id.
        item: ItemId,
    },
    /// A promised request doesn't list the blocks of tokens that are marked as final.
    #[error(
        "source group {group}: tokens {to} are to move, but its blocks cover {listed} so far; list more blocks first"
    )]
    NotListed {
        /// The source's group.
        group: GroupId,
        /// The tokens that are to move.
        to: TokenRange,
        /// The tokens that the listed blocks cover.
        listed: TokenRange,
    },
}

/// What of a class's items moves along an axis: the heads of paged items, or the units of one part of states.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AxisShare {
    /// The part, of states.
    pub part: Option<Name>,
    /// The heads or units.
    pub heads: HeadRange,
}

/// Items of a rank pair that differ only in where they start.
#[derive(Clone, Debug)]
pub struct ItemClass {
    /// The source's ids of the items.
    sources: Vec<ItemId>,
    items: Vec<ItemId>,
    groups: (GroupId, GroupId),
    /// `None` for states.
    retention: Option<Retention>,
    shares: Vec<AxisShare>,
    /// Tokens of an entry; for states an entry is a slot, and this is 1.
    entry_tokens: u64,
    /// Entries of the cache that an entry of the class covers: more than 1 for the values of a component with a span.
    span: u64,
    /// In entries, as all that follows.
    tokens: TokenSet,
    src: SideGeometry,
    dst: SideGeometry,
    cells: Vec<Cell>,
    bases: Arc<[Base]>,
    /// Entries of a period, or `None` where the request's entries are walked.
    period: Option<u64>,
    phases: Vec<CompiledPhase>,
    /// Set where entries lie end to end on both sides.
    linear: Option<Linear>,
}

impl ItemClass {
    /// Destination ids of the items.
    #[must_use]
    pub fn items(&self) -> &[ItemId] {
        &self.items
    }

    /// Source ids of the items, in the same order.
    #[must_use]
    pub fn sources(&self) -> &[ItemId] {
        &self.sources
    }

    /// What moves of them: one share for paged items, one for each part of states.
    #[must_use]
    pub fn shares(&self) -> &[AxisShare] {
        &self.shares
    }

    /// The groups whose tables are used: (source's, destination's).
    #[must_use]
    pub fn groups(&self) -> (GroupId, GroupId) {
        self.groups
    }

    /// Which tokens the items keep; `None` for states.
    #[must_use]
    pub fn retention(&self) -> Option<Retention> {
        self.retention
    }

    /// Tokens that one entry stands for; 1 for states, whose entries are slots.
    #[must_use]
    pub fn entry_tokens(&self) -> Tokens {
        Tokens::new(self.entry_tokens)
    }

    /// Entries after which phases repeat, or `None` where there are too many phases to keep.
    #[must_use]
    pub fn period(&self) -> Option<u64> {
        self.period
    }

    /// The phases of one period; empty without one.
    pub fn phases(&self) -> impl ExactSizeIterator<Item = &Phase> {
        self.phases.iter().map(|p| &p.phase)
    }

    /// Bytes of one entry over all items of the class.
    #[must_use]
    pub fn bytes_per_entry(&self) -> u64 {
        self.items.len() as u64 * self.cells.iter().map(Cell::bytes).sum::<u64>()
    }
}

/// What moves from one source rank to one destination rank.
#[derive(Clone, Debug)]
pub struct PairPlan {
    src: RankId,
    dst: RankId,
    /// Digests of the two engines' manifests.
    of: (Digest, Digest),
    /// How many items the source has.
    src_items: usize,
    classes: Vec<ItemClass>,
}

impl PairPlan {
    /// Plans one pair. A pair that exchanges nothing has a plan without classes.
    ///
    /// # Errors
    /// [`PlanError::ForeignMap`] where `peers` was made from other manifests, [`PlanError::UnknownRank`] where an engine has no
    /// such rank.
    pub fn new(c: &Compatible, peers: &PeerMap, src: RankId, dst: RankId) -> Result<Self, PlanError> {
        if !peers.is_of(c) {
            return Err(PlanError::ForeignMap { src, dst });
        }
        known(Side::Src, c.src(), src)?;
        known(Side::Dst, c.dst(), dst)?;
        let mut classes = Vec::new();
        for wanted in peers.pair(src, dst).map(|pair| members::wanted(peers, pair)).unwrap_or_default() {
            let sources: Option<Vec<ItemId>> = wanted.items.iter().map(|&i| c.src_item(i)).collect();
            let sources = sources.ok_or(PlanError::NotPlaced { src, dst })?;
            let from = Place { manifest: c.src(), rank: src, items: &sources };
            let to = Place { manifest: c.dst(), rank: dst, items: &wanted.items };
            members::classes_of(from, to, &wanted, &mut classes).ok_or(PlanError::NotPlaced { src, dst })?;
        }
        Ok(Self { src, dst, of: c.digests(), src_items: c.src().spec().items().len(), classes })
    }

    /// The plan that pairs a rank's paged items with themselves: a one-sided list of places, for zeroing.
    pub(crate) fn of_rank(manifest: &Manifest, rank: RankId) -> Result<Self, PlanError> {
        let placed = &known(Side::Dst, manifest, rank)?.placement;
        let mut classes = Vec::new();
        let mut all: Vec<members::Wanted> = Vec::new();
        for (id, p) in (0u32..).map(ItemId::new).zip(placed) {
            let Some(Placement::Paged(p)) = p else { continue };
            let share = (0, p.heads, TokenSet::of_class(p.tokens, p.tokens.period()));
            match all.iter_mut().find(|w| w.shares[..] == [share.clone()]) {
                Some(w) => w.items.push(id),
                None => all.push(members::Wanted { items: vec![id], shares: vec![share] }),
            }
        }
        for wanted in &all {
            let place = Place { manifest, rank, items: &wanted.items };
            members::classes_of(place, place, wanted, &mut classes)
                .ok_or(PlanError::NotPlaced { src: rank, dst: rank })?;
        }
        let (of, src_items) = ((manifest.digest(), manifest.digest()), manifest.spec().items().len());
        Ok(Self { src: rank, dst: rank, of, src_items, classes })
    }

    /// The rank that is read.
    #[must_use]
    pub fn src(&self) -> RankId {
        self.src
    }

    /// The rank that is written.
    #[must_use]
    pub fn dst(&self) -> RankId {
        self.dst
    }

    /// The item classes.
    #[must_use]
    pub fn classes(&self) -> &[ItemClass] {
        &self.classes
    }
}

/// The rank, where the engine has it.
fn known(side: Side, manifest: &Manifest, rank: RankId) -> Result<&RankManifest, PlanError> {
    manifest.rank(rank).ok_or(PlanError::UnknownRank { side, rank, ranks: manifest.ranks().len() })
}

/// One side of a share.
#[derive(Clone, Copy)]
struct Place<'a> {
    manifest: &'a Manifest,
    rank: RankId,
    items: &'a [ItemId],
}

/// One item of a place.
#[derive(Clone, Copy)]
struct Placed<'a> {
    item: &'a Item,
    placement: &'a Placement,
    view: &'a View,
    group: GroupId,
}

impl<'a> Place<'a> {
    fn get(&self, index: usize) -> Option<Placed<'a>> {
        let id = *self.items.get(index)?;
        let rank = self.manifest.rank(self.rank)?;
        let item = self.manifest.spec().get(id)?;
        let placement = rank.placement.get(id.index())?.as_ref()?;
        let view = rank.layout.views.get(id.index())?.as_ref()?;
        Some(Placed { item, placement, view, group: self.manifest.group_of(id) })
    }
}

impl ItemClass {
    /// Keeps the phases of one period where it has at most `most` runs of entries.
    fn compile(&mut self, most: usize) {
        let whole = if self.tokens.is_all() { 1 } else { self.tokens.period };
        let period = lcm(self.src.block_tokens, self.dst.block_tokens).and_then(|l| lcm(l, whole));
        let Some(period) = period.filter(|&l| l <= MAX_PLANNED_PERIOD) else { return };
        let runs: Vec<walk::Run> = walk::Runs::new(self, 0, period).take(most + 1).collect();
        if runs.len() <= most {
            let phases = walk::phases(runs.into_iter());
            self.phases = phases.into_iter().map(|phase| CompiledPhase::new(self, phase)).collect();
            self.period = Some(period);
        }
    }

    /// What the class's phases weigh against [`MAX_PHASES`].
    fn kept(&self) -> usize {
        self.phases.len() * self.cells.len().div_ceil(MAX_COMPONENTS)
    }

    /// The entries of a stretch of tokens that move: those of which all tokens have come, and values of which any entry moves.
    fn entries(&self, range: TokenRange) -> (u64, u64) {
        let each = self.entry_tokens / self.span;
        let (first, end) = (range.start().get() / each, range.end().get() / each);
        if first < end { (first / self.span, end.div_ceil(self.span)) } else { (0, 0) }
    }

    /// The entries of a stretch of tokens that are zeroed: those behind what moved.
    fn entries_behind(&self, range: TokenRange) -> (u64, u64) {
        (self.end_of(range.start()), range.end().get() / self.entry_tokens)
    }

    /// One past the last entry that tokens up to `end` fill, for values at least in part.
    fn end_of(&self, end: Tokens) -> u64 {
        (end.get() * self.span / self.entry_tokens).div_ceil(self.span)
    }
}
