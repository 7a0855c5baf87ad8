//! Which bytes one destination rank reads from one source rank, for every request at once.
//!
//! Items with equal placement and equal layout on both sides form an [`ItemClass`]: 80 layers are normally one. A class
//! is planned for one *period* of the token axis, the least common multiple of what a block covers on both sides. A
//! [`Phase`] is a set of tokens of that period with one block on each side; its loops are collapsed to the longest runs
//! that both layouts allow. [`PairPlan::resolve`] then multiplies phases by a request's block tables.
//!
//! The size of a plan is O(classes × phases + items), never O(blocks). Where a period would have more than
//! [`MAX_PERIOD_RUNS`] token runs, no phases are kept and `resolve` walks the request's tokens instead, with the same kind
//! of output.
//!
//! Planner code speaks of `src` and `dst` only: pull and push are one planner.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::batch::Base;
use crate::compat::Compatible;
use crate::layout::PagedView;
use crate::manifest::Manifest;
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

/// The most token runs of a period that are planned ahead.
pub const MAX_PERIOD_RUNS: u64 = 4096;

/// No plan for a pair of ranks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The map was made from other manifests.
    #[error("ranks {src} and {dst}: the peer map does not belong to these manifests")]
    ForeignMap {
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
    classes: Vec<ItemClass>,
}

impl PairPlan {
    /// Plans one pair. A pair that exchanges nothing has a plan without classes.
    ///
    /// # Errors
    /// [`PlanError::ForeignMap`] where `peers` was made from other manifests.
    pub fn new(c: &Compatible, peers: &PeerMap, src: RankId, dst: RankId) -> Result<Self, PlanError> {
        let foreign = || PlanError::ForeignMap { src, dst };
        if !peers.is_of(c) {
            return Err(foreign());
        }
        let mut classes = Vec::new();
        if let Some(pair) = peers.pair(src, dst) {
            for share in &pair.shares {
                let items = &peers.item_sets[share.items];
                let sources: Vec<ItemId> = items.iter().map(|&i| c.src_item(i)).collect();
                let from = Place { manifest: c.src(), rank: src, items: &sources };
                let to = Place { manifest: c.dst(), rank: dst, items };
                classes_of(from, to, share, &mut classes).ok_or_else(foreign)?;
            }
        }
        Ok(Self { src, dst, classes })
    }

    /// The plan that pairs a rank's places with themselves: a one-sided list of places, for zeroing.
    pub(crate) fn of_rank(manifest: &Manifest, rank: RankId) -> Self {
        let mut classes = Vec::new();
        let placed = manifest.rank(rank).map_or(&[][..], |r| &r.placement);
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
            // Every item is placed here, so there is nothing to fail.
            let _ = classes_of(place, place, &share, &mut classes);
        }
        Self { src: rank, dst: rank, classes }
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
        out.push(plan_class(src, dst, &indices, share)?);
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
    class.compile();
    Some(class)
}

impl ItemClass {
    /// Keeps the phases of one period where there are few enough.
    fn compile(&mut self) {
        let whole = if self.tokens.is_all() { 1 } else { self.tokens.period };
        let period = lcm(self.src.block_tokens, self.dst.block_tokens).and_then(|l| lcm(l, whole));
        let Some(period) = period.filter(|&l| l <= self.run_bound()) else { return };
        let runs = walk::Runs::new(self, 0, period);
        let phases = walk::phases(runs);
        self.phases = phases.into_iter().map(|phase| CompiledPhase::new(self, phase)).collect();
        self.period = Some(period);
    }

    /// The longest period that has at most [`MAX_PERIOD_RUNS`] token runs, reckoning with the shortest runs there can be.
    fn run_bound(&self) -> u64 {
        let shortest = [&self.src, &self.dst].iter().map(|s| s.shortest_run()).min().unwrap_or(1);
        MAX_PERIOD_RUNS.saturating_mul(shortest)
    }
}
