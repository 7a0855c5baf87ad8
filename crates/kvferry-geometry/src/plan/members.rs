//! From the shares of a rank pair to item classes.

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;

use super::linear::Linear;
use super::nest::{self, Cell};
use super::side::SideGeometry;
use super::{AxisShare, ItemClass, MAX_PHASES, Place, Placed};
use crate::batch::Base;
use crate::layout::{ComponentView, PagedView, View};
use crate::peers::{PeerMap, RankPair};
use crate::placement::{HeadRange, PagedPlacement, Placement};
use crate::spec::{Component, Item, ItemKind, PagedItem};
use crate::token_set::TokenSet;
use crate::units::ItemId;

/// Items of which the same moves: along each axis some heads or units, of some tokens.
pub(super) struct Wanted {
    /// Destination ids.
    pub(super) items: Vec<ItemId>,
    /// (axis of the destination, heads or units, tokens).
    pub(super) shares: Vec<(usize, HeadRange, TokenSet)>,
}

/// The shares of a pair. Parts of the same states come together.
pub(super) fn wanted(peers: &PeerMap, pair: &RankPair) -> Vec<Wanted> {
    let mut out: Vec<(bool, Wanted)> = Vec::new();
    for share in &pair.shares {
        let Some(set) = peers.item_sets.get(share.items) else { continue };
        let part = (set.axis, share.heads, share.tokens.clone());
        // A second share along one axis of paged items is another stretch of heads or tokens; states have one stretch of each part
        // or several, all of which are loops of one slot.
        let same = |(state, w): &&mut (bool, Wanted)| *state && set.state && w.items == set.items;
        match out.iter_mut().find(same) {
            Some((_, w)) => w.shares.push(part),
            None => out.push((set.state, Wanted { items: set.items.clone(), shares: vec![part] })),
        }
    }
    out.into_iter().map(|(_, w)| w).collect()
}

/// Splits items into classes and plans each; `None` where an item isn't placed on both ranks.
pub(super) fn classes_of(src: Place<'_>, dst: Place<'_>, wanted: &Wanted, out: &mut Vec<ItemClass>) -> Option<()> {
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
    for ((s, d), indices) in members {
        let bases: Option<Vec<Base>> = indices.iter().map(|&i| Some(base(src.get(i)?, dst.get(i)?))).collect();
        let ids = |of: &[ItemId]| -> Vec<ItemId> { indices.iter().map(|&i| of[i]).collect() };
        let members = Members { items: ids(dst.items), sources: ids(src.items), bases: bases? };
        match &d.item.kind {
            ItemKind::Paged(item) => {
                let spans: BTreeSet<u32> = item.components.iter().map(|c| c.span).collect();
                for span in spans {
                    keep(paged_class(s, d, item, span, &members, wanted)?, out);
                }
            }
            ItemKind::State(_) => keep(state_class(s, d, &members, wanted)?, out),
        }
    }
    Some(())
}

struct Members {
    items: Vec<ItemId>,
    sources: Vec<ItemId>,
    bases: Vec<Base>,
}

fn keep(mut class: ItemClass, out: &mut Vec<ItemClass>) {
    let kept: usize = out.iter().map(ItemClass::kept).sum();
    let weight = class.cells.len().div_ceil(crate::spec::MAX_COMPONENTS).max(1);
    class.compile(MAX_PHASES.saturating_sub(kept) / weight);
    out.push(class);
}

fn base(s: Placed<'_>, d: Placed<'_>) -> Base {
    Base {
        src_region: s.view.region(),
        dst_region: d.view.region(),
        src_offset: s.view.offset().get(),
        dst_offset: d.view.offset().get(),
    }
}

/// Whether two items of a rank differ in nothing but where they start.
fn same(a: Placed<'_>, b: Placed<'_>) -> bool {
    a.group == b.group && same_item(a.item, b.item) && a.placement == b.placement && same_view(a.view, b.view)
}

fn same_item(a: &Item, b: &Item) -> bool {
    match (&a.kind, &b.kind) {
        (ItemKind::Paged(a), ItemKind::Paged(b)) => {
            let alike = |(c, d): (&Component, &Component)| (c.width, c.span, c.heads) == (d.width, d.span, d.heads);
            (a.retention, a.tokens_per_entry, a.components.len())
                == (b.retention, b.tokens_per_entry, b.components.len())
                && a.components.iter().zip(&b.components).all(alike)
        }
        (ItemKind::State(a), ItemKind::State(b)) => {
            a.parts.len() == b.parts.len()
                && a.parts.iter().zip(&b.parts).all(|(p, q)| (&p.name, p.rows, p.width) == (&q.name, q.rows, q.width))
        }
        _ => false,
    }
}

fn same_view(a: &View, b: &View) -> bool {
    if a.stride() != b.stride() || a.blocks() != b.blocks() {
        return false;
    }
    match (a, b) {
        (View::Paged(a), View::Paged(b)) => {
            // Names last: numbers tell most views apart, and are quicker.
            let places = |c: &ComponentView| (c.offset, c.head_stride, c.entry_stride, c.chunks);
            (a.block_size, a.kernel, a.components.len()) == (b.block_size, b.kernel, b.components.len())
                && a.components.iter().zip(&b.components).all(|(c, d)| places(c) == places(d) && c.name == d.name)
        }
        (View::State(a), View::State(b)) => a.parts == b.parts,
        _ => false,
    }
}

type PagedSide<'a> = (&'a PagedItem, &'a PagedPlacement, &'a PagedView);

fn paged<'a>(p: Placed<'a>) -> Option<PagedSide<'a>> {
    match (&p.item.kind, p.placement, p.view) {
        (ItemKind::Paged(item), Placement::Paged(placement), View::Paged(view)) => Some((item, placement, view)),
        _ => None,
    }
}

/// The components of one span as a class, in entries of that span.
fn paged_class(
    s: Placed<'_>,
    d: Placed<'_>,
    item: &PagedItem,
    span: u32,
    members: &Members,
    wanted: &Wanted,
) -> Option<ItemClass> {
    let [(_, heads, tokens)] = &wanted.shares[..] else { return None };
    let (src, dst) = (paged(s)?, paged(d)?);
    let components: Vec<&Component> = item.components.iter().filter(|c| c.span == span).collect();
    let cells = nest::paged_cells(&components, (src.2, src.1), (dst.2, dst.1), *heads)?;
    let entry_tokens = u64::from(item.tokens_per_entry) * u64::from(span);
    let side = |(_, p, view): PagedSide<'_>| SideGeometry::paged(view, p.tokens, entry_tokens, &components);
    let mut class = ItemClass {
        items: members.items.clone(),
        groups: (s.group, d.group),
        retention: Some(item.retention),
        shares: vec![AxisShare { part: None, heads: *heads }],
        sources: members.sources.clone(),
        entry_tokens,
        span: u64::from(span),
        tokens: tokens.in_entries(entry_tokens)?,
        src: side(src)?,
        dst: side(dst)?,
        cells,
        bases: members.bases.clone().into(),
        period: None,
        phases: Vec::new(),
        linear: None,
    };
    class.linear = Linear::of(&class, src.2.blocks, dst.2.blocks);
    Some(class)
}

/// The parts of a state as a class whose entries are slots.
fn state_class(s: Placed<'_>, d: Placed<'_>, members: &Members, wanted: &Wanted) -> Option<ItemClass> {
    let (ItemKind::State(item), View::State(src), View::State(dst)) = (&d.item.kind, s.view, d.view) else {
        return None;
    };
    let mut cells: Vec<Cell> = Vec::new();
    let mut shares = Vec::new();
    for &(axis, units, _) in &wanted.shares {
        let part = item.parts.get(axis)?;
        let from = d.item.axis_in(axis, s.item)?;
        let placed = (s.placement.axis(from)?.heads, d.placement.axis(axis)?.heads);
        // A manifest's views have the order of its spec.
        cells.push(nest::state_cell(part, (src.parts.get(from)?, placed.0), (dst.parts.get(axis)?, placed.1), units));
        shares.push(AxisShare { part: Some(part.name.clone()), heads: units });
    }
    let (src_side, dst_side) = (SideGeometry::state(src), SideGeometry::state(dst));
    Some(ItemClass {
        items: members.items.clone(),
        groups: (s.group, d.group),
        retention: None,
        shares,
        sources: members.sources.clone(),
        entry_tokens: 1,
        span: 1,
        tokens: TokenSet { period: 1, intervals: vec![(0, 1)] },
        src: src_side,
        dst: dst_side,
        cells: nest::fused(cells),
        bases: members.bases.clone().into(),
        period: None,
        phases: Vec::new(),
        linear: None,
    })
}
