//! Which bytes one destination rank reads from one source rank, for every request at once.
//!
//! Items with equal placement and equal layout on both sides form an [`ItemClass`]: 80 layers are normally one. A class
//! is planned for one *period* of the token axis, the least common multiple of what a block covers on both sides. A
//! [`Phase`] is a set of tokens of that period with one block on each side; its loops are collapsed to the longest runs
//! that both layouts allow. [`PairPlan::resolve`] then multiplies phases by a request's block tables.
//!
//! The size of a plan is O(classes × phases + items), never O(blocks). Where a class's period would bring a
//! plan to more than [`MAX_PHASES`], none are kept for it and `resolve` walks the request's tokens instead, with the same kind
//! of output.
//!
//! Planner code speaks of `src` and `dst` only: pull and push are one planner.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::batch::{Base, Side};
use crate::compat::Compatible;
use crate::digest::Digest;
use crate::layout::PagedView;
use crate::manifest::{Manifest, RankManifest};
use crate::peers::{PeerMap, Share};
use crate::placement::{HeadRange, Placement};
use crate::spec::PagedItem;
use crate::token_set::{TokenSet, lcm};
use crate::units::{GroupId, ItemId, RankId, Tokens};

mod linear;
mod nest;
mod resolve;
mod side;
mod walk;

use linear::Linear;
use nest::{Cell, CompiledPhase};
use side::SideGeometry;
pub use walk::Phase;

/// The most token runs that one plan keeps phases for, over all its classes.
pub const MAX_PHASES: usize = 2048;
/// The longest period that is planned ahead, in tokens.
const MAX_PLANNED_PERIOD: u64 = 1 << 22;

/// No plan for a pair of ranks.
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
    /// The map gives a rank an item that it does not hold: the map is not what this crate computes.
    #[error("ranks {src} and {dst}: the peer map names an item that is not placed on both")]
    NotPlaced {
        /// Source rank.
        src: RankId,
        /// Destination rank.
        dst: RankId,
    },
}

/// Items of a rank pair that differ only in where they start.
#[derive(Clone, Debug)]
pub struct ItemClass {
    items: Vec<ItemId>,
    groups: (GroupId, GroupId),
    heads: HeadRange,
    tokens: TokenSet,
    src: SideGeometry,
    dst: SideGeometry,
    cells: Vec<Cell>,
    bases: Arc<[Base]>,
    /// Tokens of a period, or `None` where the request's tokens are walked.
    period: Option<u64>,
    phases: Vec<CompiledPhase>,
    /// Set where tokens lie end to end on both sides.
    linear: Option<Linear>,
}

impl ItemClass {
    /// Destination ids of the items.
    #[must_use]
    pub fn items(&self) -> &[ItemId] {
        &self.items
    }

    /// The heads that move.
    #[must_use]
    pub fn heads(&self) -> HeadRange {
        self.heads
    }

    /// The groups whose tables are used: (source's, destination's).
    #[must_use]
    pub fn groups(&self) -> (GroupId, GroupId) {
        self.groups
    }

    /// The period of the token axis, or `None` where there are too many phases to keep.
    #[must_use]
    pub fn period(&self) -> Option<Tokens> {
        self.period.map(Tokens::new)
    }

    /// The phases of one period; empty without one.
    pub fn phases(&self) -> impl ExactSizeIterator<Item = &Phase> {
        self.phases.iter().map(|p| &p.phase)
    }

    /// Bytes of one token over all items of the class.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        let of_cell = |c: &Cell| c.run * c.count;
        self.items.len() as u64 * u64::from(self.heads.count()) * self.cells.iter().map(of_cell).sum::<u64>()
    }
}

/// What moves from one source rank to one destination rank.
#[derive(Clone, Debug)]
pub struct PairPlan {
    src: RankId,
    dst: RankId,
    /// Digests of the two engines' manifests.
    of: (Digest, Digest),
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
        if let Some(pair) = peers.pair(src, dst) {
            for share in &pair.shares {
                let items = &peers.item_sets[share.items];
                let sources: Vec<ItemId> = items.iter().map(|&i| c.src_item(i)).collect();
                let from = Place { manifest: c.src(), rank: src, items: &sources };
                let to = Place { manifest: c.dst(), rank: dst, items };
                classes_of(from, to, share, &mut classes).ok_or(PlanError::NotPlaced { src, dst })?;
            }
        }
        Ok(Self { src, dst, of: c.digests(), classes })
    }

    /// The plan that pairs a rank's places with themselves: a one-sided list of places, for zeroing.
    pub(crate) fn of_rank(manifest: &Manifest, rank: RankId) -> Result<Self, PlanError> {
        let placed = &known(Side::Dst, manifest, rank)?.placement;
        let mut classes = Vec::new();
        let mut shares: Vec<(Placement, Vec<ItemId>)> = Vec::new();
        for (id, p) in (0u32..).map(ItemId::new).zip(placed) {
            let Some(p) = p else { continue };
            match shares.iter_mut().find(|s| s.0 == *p) {
                Some(s) => s.1.push(id),
                None => shares.push((*p, vec![id])),
            }
        }
        for (p, items) in &shares {
            let tokens = TokenSet::of_class(p.tokens, p.tokens.period());
            let share = Share { items: 0, heads: p.heads, tokens };
            let place = Place { manifest, rank, items };
            classes_of(place, place, &share, &mut classes).ok_or(PlanError::NotPlaced { src: rank, dst: rank })?;
        }
        Ok(Self { src: rank, dst: rank, of: (manifest.digest(), manifest.digest()), classes })
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

impl<'a> Place<'a> {
    fn get(&self, index: usize) -> Option<(&'a PagedItem, &'a Placement, &'a PagedView, GroupId)> {
        let id = *self.items.get(index)?;
        let rank = self.manifest.rank(self.rank)?;
        let item = self.manifest.spec().get(id)?.as_paged();
        let placement = rank.placement.get(id.index())?.as_ref()?;
        let view = rank.layout.views.get(id.index())?.as_ref()?;
        Some((item, placement, view, self.manifest.group_of(id)))
    }
}

/// Splits the items of a share into classes and plans each; `None` where an item isn't placed on both ranks.
fn classes_of(src: Place<'_>, dst: Place<'_>, share: &Share, out: &mut Vec<ItemClass>) -> Option<()> {
    let mut members: Vec<((Placed<'_>, Placed<'_>), Vec<usize>)> = Vec::new();
    let mut last = 0;
    for index in 0..dst.items.len() {
        let (s, d) = (src.get(index)?, dst.get(index)?);
        let alike = |m: &((Placed<'_>, Placed<'_>), Vec<usize>)| same(m.0.0, s) && same(m.0.1, d);
        // Items mostly come in runs of one class.
        if !members.get(last).is_some_and(alike) {
            last = members.iter().position(alike).unwrap_or(members.len());
        }
        match members.get_mut(last) {
            Some(m) => m.1.push(index),
            None => members.push(((s, d), vec![index])),
        }
    }
    for (_, indices) in members {
        let mut class = plan_class(src, dst, &indices, share)?;
        let kept: usize = out.iter().map(|c| c.phases.len()).sum();
        class.compile(MAX_PHASES.saturating_sub(kept));
        out.push(class);
    }
    Some(())
}

type Placed<'a> = (&'a PagedItem, &'a Placement, &'a PagedView, GroupId);

/// Whether two items of a rank differ in nothing but where they start.
fn same((a, _, v, g): Placed<'_>, (b, _, w, h): Placed<'_>) -> bool {
    g == h
        && v.block_stride == w.block_stride
        && v.block_size == w.block_size
        && v.kernel == w.kernel
        && v.components == w.components
        && a.components.len() == b.components.len()
        && a.components.iter().zip(&b.components).all(|(c, d)| c.width == d.width)
}

fn plan_class(src: Place<'_>, dst: Place<'_>, indices: &[usize], share: &Share) -> Option<ItemClass> {
    let first = *indices.first()?;
    let (s, d) = (src.get(first)?, dst.get(first)?);
    let src_side = SideGeometry::new(s.2, s.1);
    let dst_side = SideGeometry::new(d.2, d.1);
    let cells = nest::cells(d.0, (s.2, s.1), (d.2, d.1), share.heads)?;
    let bases: Option<Vec<Base>> = indices
        .iter()
        .map(|&i| {
            let (v, w) = (src.get(i)?.2, dst.get(i)?.2);
            Some(Base {
                src_region: v.region,
                dst_region: w.region,
                src_offset: v.offset.get(),
                dst_offset: w.offset.get(),
            })
        })
        .collect();
    let mut class = ItemClass {
        items: indices.iter().map(|&i| dst.items[i]).collect(),
        groups: (s.3, d.3),
        heads: share.heads,
        tokens: share.tokens.clone(),
        src: src_side,
        dst: dst_side,
        cells,
        bases: bases?.into(),
        period: None,
        phases: Vec::new(),
        linear: None,
    };
    class.linear = Linear::of(&class, s.2, d.2);
    Some(class)
}

impl ItemClass {
    /// Keeps the phases of one period where it has at most `most` token runs.
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
}
